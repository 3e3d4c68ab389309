"""Says which settings of a mixture of experts would make a step depend on its layout, or on chance.

Settings come by their names on a command line or in a TransformerConfig; one that is not named has Megatron's default.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megatron_rl.validation.auxiliary_losses import listed, num_experts_of, number, size_of

# Megatron-Core that does not add the gradients of replicas: read in the source of each release, and measured on 0.16 and 0.19.
DRIFTING_VERSIONS = "0.13 to 0.18"
_BY_CHANCE = {
    "moe_input_jitter_eps": "random noise in the router makes old log-probabilities and the step's differ",
    "moe_router_force_load_balancing": "the router's choice is random, for benchmarks",
    "moe_router_force_biased": "the router's choice is random, for benchmarks",
}


def expert_problems(settings: Mapping[str, object]) -> Iterator[str]:
    """No message for a dense model."""
    experts = num_experts_of(settings)
    if not experts:
        return
    tp, ep = (size_of(settings.get(size)) for size in ("tensor_model_parallel_size", "expert_model_parallel_size"))
    if experts % ep:
        yield f"expert_model_parallel_size={ep} does not divide the {experts} experts: choose a divisor"
    if tp > 1 and not settings.get("sequence_parallel"):
        yield (
            f"tensor_model_parallel_size={tp} with experts needs sequence_parallel: Megatron would give each tensor-parallel rank "
            "all tokens, and its experts would count them more than once; add --sequence-parallel"
        )
    if tp > 1 and settings.get("add_bias_linear") and settings.get("transformer_impl") == "local":
        yield (
            f"add_bias_linear=True with experts, tensor_model_parallel_size={tp} and transformer_impl='local': these layers of "
            "Megatron-Core add the gradients of different experts' biases, without an error; use --transformer-impl "
            "transformer_engine"
        )
    capacity = settings.get("moe_expert_capacity_factor")
    if capacity is not None and not number(capacity) < 0:  # Megatron takes a negative one for none
        yield (
            f"moe_expert_capacity_factor={capacity!r}: which tokens an expert drops depends on the micro-batch and the rank that "
            "they lie in; remove it, and no token is dropped"
        )
    budget = settings.get("moe_expert_rank_capacity_factor")  # since 0.18; what is beyond it ends the run under ncclep
    if budget is not None and settings.get("moe_flex_dispatcher_backend") != "ncclep":
        yield (
            f"moe_expert_rank_capacity_factor={budget!r}: which tokens a rank's experts drop depends on the layout, and Megatron "
            "drops them without a word; remove it"
        )
    for name, why in _BY_CHANCE.items():
        if number(settings.get(name)):
            yield f"{name}={settings[name]!r}: {why}; remove it"
    for kind in listed(settings.get("moe_router_load_balancing_type") or ""):
        if kind in ("sinkhorn", "quantile_balancing"):
            yield (
                f"moe_router_load_balancing_type={kind!r}: it balances the tokens of a micro-batch on a rank, so routes depend on "
                "the layout; choose 'aux_loss'"
            )


def drift_problem(settings: Mapping[str, object]) -> str | None:
    """Why experts that all ranks hold would train on wrong gradients, in a Megatron-Core that treats them as dense parameters.

    With one expert-parallel rank it adds the gradients of an expert over data-parallel ranks: replicas on tensor-parallel ranks are
    not added, and shards on data-parallel ranks are added to each other.
    """
    tp, ep = (size_of(settings.get(size)) for size in ("tensor_model_parallel_size", "expert_model_parallel_size"))
    etp = size_of(settings.get("expert_tensor_parallel_size"), tp)
    if not num_experts_of(settings) or ep > 1 or etp == tp:
        return None
    sizes = f"tensor_model_parallel_size={tp} with expert_model_parallel_size=1 and expert_tensor_parallel_size={etp}"
    if etp > tp:
        return (
            f"{sizes}: data-parallel or context-parallel ranks hold different shards of an expert, and Megatron-Core "
            f"{DRIFTING_VERSIONS} adds the gradients of different shards; set --expert-tensor-parallel-size {tp}"
        )
    held = "all experts" if etp == 1 else "replicas of a shard of each expert"
    return (
        f"{sizes}: each tensor-parallel rank holds {held} and trains them with its own tokens, and Megatron-Core "
        f"{DRIFTING_VERSIONS} does not add their gradients: the replicas drift apart; set --expert-tensor-parallel-size {tp}"
    )
