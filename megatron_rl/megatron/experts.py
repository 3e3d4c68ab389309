"""Says which settings of a mixture of experts would make a step depend on its layout or on chance."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig


def expert_problems(config: TransformerConfig) -> Iterator[str]:
    """Why a step of this mixture of experts would depend on its layout, or on chance."""
    if config.num_moe_experts is None:
        return
    tp, ep, expert_tp = config.tensor_model_parallel_size, config.expert_model_parallel_size, config.expert_tensor_parallel_size
    if config.num_moe_experts % ep:
        yield (
            f"expert_model_parallel_size={ep} does not divide num_moe_experts={config.num_moe_experts}: each rank must hold as "
            "many experts; choose a divisor"
        )
    if tp > 1 and not config.sequence_parallel:
        yield (
            f"tensor_model_parallel_size={tp} with num_moe_experts={config.num_moe_experts} needs sequence_parallel=True: Megatron "
            "would give each tensor-parallel rank all tokens, and its experts would count them more than once"
        )
    if tp > 1 and ep == 1 and expert_tp == 1:
        yield (
            f"tensor_model_parallel_size={tp} with expert_model_parallel_size=1 and expert_tensor_parallel_size=1: each "
            "tensor-parallel rank holds all experts and trains them with its own tokens, and Megatron-Core does not add their "
            f"gradients: the replicas drift apart. Set expert_model_parallel_size={tp}, or expert_tensor_parallel_size={tp}"
        )
    if config.moe_expert_capacity_factor is not None:
        yield (
            f"moe_expert_capacity_factor={config.moe_expert_capacity_factor}: which tokens an expert drops depends on the "
            "micro-batch and the rank that they lie in, so the step would depend on its layout; remove it, and no token is dropped"
        )
    if config.moe_input_jitter_eps is not None:
        yield (
            f"moe_input_jitter_eps={config.moe_input_jitter_eps}: random noise in the router makes old log-probabilities and the "
            "step's differ, so the first ratio is not 1; remove it"
        )
    if config.moe_router_load_balancing_type == "sinkhorn":
        yield (
            "moe_router_load_balancing_type='sinkhorn': it balances the tokens of a micro-batch on a rank, so routes depend on the "
            "layout; choose 'none', 'aux_loss' or 'seq_aux_loss'"
        )
    if config.moe_use_legacy_grouped_gemm:
        yield (
            "moe_use_legacy_grouped_gemm=True holds all experts in one tensor, and this package names each expert's weights; "
            "remove it: Transformer Engine's grouped products are used where moe_grouped_gemm=True"
        )
