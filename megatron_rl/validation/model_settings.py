"""Says what settings of the model do to a step, beside the settings of experts: which are refused, and which are noise.

A step must not depend on its layout. Settings come by their names on a command line or in a TransformerConfig.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megatron_rl.config import Route
from megatron_rl.validation.auxiliary_losses import as_typed, size_of

# The settings that are read here, beside settings of auxiliary losses and of experts.
FURTHER_SETTINGS = (
    *("multi_latent_attention", "transformer_impl", "hybrid_context_parallel", "dynamic_context_parallel"),
    *("hidden_dropout", "attention_dropout", "megatron_to_hf_mode", "train_backend"),
)
# Of Megatron-Core: its schedule of rounds in the releases 0.16 to 0.19; the groups and the scheduler of its development branch.
OWN_GROUPS = ("hybrid_context_parallel", "dynamic_context_parallel")
DROPOUTS = ("hidden_dropout", "attention_dropout")


def model_problems(settings: Mapping[str, object], route: Route | None = None, *, has_own_groups: bool = False) -> Iterator[str]:
    """Why a step of this model would be wrong on its layout, without an error of Megatron.

    has_own_groups: whether each micro-batch brings its context-parallel group, as a PolicyBatch does.
    """
    for name in () if has_own_groups else OWN_GROUPS:
        if settings.get(name):
            yield (
                f"{as_typed(name, True, route)}: each micro-batch then has a context-parallel group of its own, and this launch "
                f"cuts all of them over the model's; remove --{name.replace('_', '-')}, or write a loop of your own "
                "(docs/parallelism.md)"
            )
    if has_own_groups and settings.get("hybrid_context_parallel"):
        yield from _hybrid_problems(settings)
    tp = size_of(settings.get("tensor_model_parallel_size"))
    if not settings.get("multi_latent_attention") or tp == 1:
        return
    sizes = f"{as_typed('multi_latent_attention', True, route)} with tensor_model_parallel_size={tp}"
    misses = "the gradient of the rotary key, which all heads share, misses the heads of the other tensor-parallel ranks"
    if settings.get("transformer_impl") == "local":
        yield (
            f"{sizes} and transformer_impl='local': in these layers of Megatron-Core {misses}, and everything below it trains "
            "wrongly without an error; use --transformer-impl transformer_engine, or --tensor-model-parallel-size 1"
        )
    elif not settings.get("sequence_parallel"):
        yield (
            f"{sizes} needs {as_typed('sequence_parallel', None, route)}: without it {misses}, and the copies of the down "
            "projections drift apart; add --sequence-parallel"
        )


def _hybrid_problems(settings: Mapping[str, object]) -> Iterator[str]:
    """What waits for ranks that run another number of micro-batches, or is scaled by one context-parallel size."""
    for name in ("pipeline_model_parallel_size", "expert_model_parallel_size"):
        if size_of(settings.get(name)) > 1:
            yield (
                f"hybrid_context_parallel=True with {name}={settings[name]}: these ranks would run different numbers of "
                f"micro-batches, and wait for each other; set {name}=1, or hybrid_context_parallel=False: under the usual schedule "
                "micro-batches have groups of their own too"
            )
