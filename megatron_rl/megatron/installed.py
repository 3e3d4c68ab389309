"""Asks the installed Megatron-Core what it does, where releases differ: it runs the part in question, or reads its signature."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from types import SimpleNamespace

import torch

from megatron_rl.validation.auxiliary_losses import unscaled_indexer_problem


@cache
def expert_replicas_drift() -> bool:
    """Whether replicas of experts drift apart at tensor parallelism 2, expert parallelism 1 and expert tensor parallelism 1.

    Megatron adds the gradients of a parameter with `allreduce` over data-parallel ranks alone, of one without it over all ranks
    that hold the expert. Needs parallel_state, of any sizes.
    """
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        num_moe_experts=2,
        add_bias_linear=False,
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        expert_tensor_parallel_size=1,
        gradient_accumulation_fusion=False,
        perform_initialization=False,
        use_cpu_initialization=not torch.cuda.is_available(),
    )
    size = 16 * max(1, torch.distributed.get_world_size())  # a multiple of whatever shares an expert here
    layer = ColumnParallelLinear(8, size, config=config, init_method=torch.nn.init.zeros_, bias=False, is_expert=True)
    return bool(vars(layer.weight).get("allreduce", True))


def unscaled_indexer(settings: Mapping[str, object]) -> Iterator[str]:
    """Why the indexer of this model would train x micro-batches; nothing where the installed schedule scales its loss."""
    problem = unscaled_indexer_problem(settings)
    if problem is not None and not scales_indexer_loss():
        yield problem


@cache
def scales_indexer_loss() -> bool:
    """Whether the installed schedule gives the loss of the sparse-attention indexer a scale: since Megatron-Core 0.19.

    This runs the part of the schedule that sets the scales, as a pipeline stage without a loss does.
    """
    from megatron.core.pipeline_parallel.schedules import forward_step_calc_loss
    from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossAutoScaler as Scaler

    named = {"timers": None, "num_moe_experts": None, "mtp_num_layers": None, "grad_scale_func": None}
    config = SimpleNamespace(**named, calculate_per_token_loss=False, experimental_attention_variant="dsa")
    before = Scaler.main_loss_backward_scale
    try:
        Scaler.main_loss_backward_scale = None
        output, stage = torch.zeros(1), {"cp_group_size": 1, "is_last_stage": False}
        forward_step_calc_loss(None, output, None, config, None, False, 2, [], **stage)
        return Scaler.main_loss_backward_scale is not None
    finally:
        Scaler.main_loss_backward_scale = before
