"""Says which settings of the model, beside those of experts, would make a step depend on its layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megatron_rl.validation.auxiliary_losses import size_of

# Of Megatron-Core: its schedule of rounds in the releases 0.16 to 0.19; the groups and the scheduler of its development branch.
OWN_GROUPS = ("hybrid_context_parallel", "dynamic_context_parallel")
DROPOUTS = ("hidden_dropout", "attention_dropout")


def model_problems(settings: Mapping[str, object], *, has_own_groups: bool = False) -> Iterator[str]:
    """Why a step of this model would be wrong on its layout, without an error of Megatron.

    has_own_groups: whether each micro-batch brings its context-parallel group, as a PolicyBatch does.
    """
    for name in OWN_GROUPS:
        if settings.get(name) and not has_own_groups:
            yield (
                f"{name}={settings[name]!r}: each micro-batch then has a context-parallel group of its own, and this launch cuts "
                f"all of them over the model's; remove --{name.replace('_', '-')}"
            )
    if has_own_groups and settings.get("hybrid_context_parallel"):
        for name in ("pipeline_model_parallel_size", "expert_model_parallel_size"):
            if size_of(settings.get(name)) > 1:
                yield (
                    f"hybrid_context_parallel=True with {name}={settings[name]}: these ranks would run different numbers of "
                    f"micro-batches, and wait for each other; set {name}=1"
                )
    tp = size_of(settings.get("tensor_model_parallel_size"))
    if not settings.get("multi_latent_attention") or tp == 1:
        return
    sizes = f"multi_latent_attention=True with tensor_model_parallel_size={tp}"
    misses = "the gradient of the rotary key, which all heads share, misses the heads of the other tensor-parallel ranks"
    if settings.get("transformer_impl") == "local":
        yield (
            f"{sizes} and transformer_impl='local': in these layers of Megatron-Core {misses}; use --transformer-impl "
            "transformer_engine"
        )
    elif not settings.get("sequence_parallel"):
        yield f"{sizes} needs sequence_parallel: without it {misses}; add --sequence-parallel"
