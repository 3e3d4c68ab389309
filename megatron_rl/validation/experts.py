"""Says what the settings of a mixture of experts do to a step: which are refused, which change it, which leave it as it is.

A step must not depend on its layout, and not on chance. Settings come by their names on a command line or in a TransformerConfig;
a setting that is not named has Megatron's default.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megatron_rl.config import Route
from megatron_rl.validation.auxiliary_losses import as_typed, listed, num_experts_of, number, size_of

# The settings that are read here; flags of miles and slime among them.
EXPERT_SETTINGS = (
    *("num_experts", "num_moe_experts", "expert_model_parallel_size", "expert_tensor_parallel_size"),
    *("tensor_model_parallel_size", "sequence_parallel", "calculate_per_token_loss", "router_aux_loss"),
    *("moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_input_jitter_eps"),
    *("moe_expert_capacity_factor", "moe_token_drop_policy", "moe_router_force_load_balancing", "moe_router_force_biased"),
    *("moe_router_enable_expert_bias", "moe_router_bias_update_rate", "moe_enable_routing_replay"),
    *("use_routing_replay", "use_rollout_routing_replay", "moe_expert_rank_capacity_factor", "moe_flex_dispatcher_backend"),
    *("moe_shared_expert_overlap", "add_bias_linear"),
)
# Megatron-Core that does not add the gradients of replicas: read in the source of each release, and measured on 0.16 and 0.19.
DRIFTING_VERSIONS = "0.13 to 0.18"


def expert_problems(settings: Mapping[str, object], route: Route | None = None) -> Iterator[str]:
    """Why a step of this mixture of experts would depend on its layout, or on chance. No message for a dense model."""
    name, experts = num_experts_of(settings)
    if experts == 0:
        return
    tp, ep = (size_of(settings.get(size)) for size in ("tensor_model_parallel_size", "expert_model_parallel_size"))

    def given(setting: str, value: object = None) -> str:
        return as_typed(setting, settings[setting] if value is None else value, route)

    if experts is not None and experts % ep:
        yield (
            f"{given('expert_model_parallel_size', ep)} does not divide {given(name, experts)}: each rank must hold as many "
            "experts; choose a divisor"
        )
    if tp > 1 and not settings.get("sequence_parallel"):
        yield (
            f"{given('tensor_model_parallel_size', tp)} with experts needs {as_typed('sequence_parallel', None, route)}: Megatron "
            "would give each tensor-parallel rank all tokens, and its experts would count them more than once; add "
            "--sequence-parallel"
        )
    if tp > 1 and settings.get("add_bias_linear") and settings.get("transformer_impl") == "local":  # read with the model's
        yield (
            f"add_bias_linear=True with experts, tensor_model_parallel_size={tp} and transformer_impl='local': these layers of "
            "Megatron-Core add the gradients of different experts' biases, without an error; use --transformer-impl "
            "transformer_engine, or --disable-bias-linear where the model has none"
        )
    capacity, jitter = settings.get("moe_expert_capacity_factor"), settings.get("moe_input_jitter_eps")
    if capacity is not None and not number(capacity) < 0:  # Megatron takes a negative one for none
        yield (
            f"{given('moe_expert_capacity_factor')}: which tokens an expert drops depends on the micro-batch and the rank that "
            "they lie in, so the step would depend on its layout; remove it, and no token is dropped"
        )
    budget = "moe_expert_rank_capacity_factor"  # since 0.18; what is beyond it ends the run under ncclep
    if settings.get(budget) is not None and settings.get("moe_flex_dispatcher_backend") != "ncclep":
        yield (
            f"{given(budget)}: which tokens a rank's experts drop depends on the layout, and Megatron drops them without a word; "
            "remove it, or choose --moe-flex-dispatcher-backend ncclep, which ends the run in place of a drop"
        )
    if number(jitter):
        yield (
            f"{given('moe_input_jitter_eps')}: random noise in the router makes old log-probabilities and the step's differ, so "
            "the first ratio is not 1; remove it"
        )
    for forced in ("moe_router_force_load_balancing", "moe_router_force_biased"):
        if settings.get(forced):
            yield f"{given(forced)}: the router's choice is random, for benchmarks; remove it"
    for kind in listed(settings.get("moe_router_load_balancing_type") or ""):
        if kind in ("sinkhorn", "quantile_balancing"):
            yield (
                f"{given('moe_router_load_balancing_type', kind)}: it balances the tokens of a micro-batch on a rank, so "
                "routes depend on the layout; choose 'none', 'aux_loss' or 'seq_aux_loss'"
            )


def drift_problem(settings: Mapping[str, object]) -> str | None:
    """Why experts that all ranks hold would train on wrong gradients, in a Megatron-Core that treats them as dense parameters.

    With one expert-parallel rank it adds the gradients of an expert over data-parallel ranks: replicas on tensor-parallel ranks are
    not added, and shards on data-parallel ranks are added to each other.
    """
    tp, ep = (size_of(settings.get(size)) for size in ("tensor_model_parallel_size", "expert_model_parallel_size"))
    etp = size_of(settings.get("expert_tensor_parallel_size"), tp)
    if num_experts_of(settings)[1] == 0 or ep > 1 or etp == tp:
        return None
    sizes = f"tensor_model_parallel_size={tp} with expert_model_parallel_size=1 and expert_tensor_parallel_size={etp}"
    if etp > tp:
        return (
            f"{sizes}: data-parallel or context-parallel ranks hold different shards of an expert, and Megatron-Core "
            f"{DRIFTING_VERSIONS} adds the gradients of different shards. Set --expert-tensor-parallel-size {tp}, or share the "
            "experts with --expert-model-parallel-size"
        )
    held = "all experts" if etp == 1 else "replicas of a shard of each expert"
    return (
        f"{sizes}: each tensor-parallel rank holds {held} and trains them with its own tokens, and Megatron-Core "
        f"{DRIFTING_VERSIONS} does not add their gradients: the replicas drift apart. Set --expert-model-parallel-size {tp}, or "
        f"--expert-tensor-parallel-size {tp}"
    )
