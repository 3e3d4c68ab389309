"""Asks the installed Megatron-Core whether its schedule scales the loss of the sparse-attention indexer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from types import SimpleNamespace

import torch

from megatron_rl.validation.auxiliary_losses import unscaled_indexer_problem


def unscaled_indexer(settings: Mapping[str, object]) -> Iterator[str]:
    """Why the indexer of this model would train x micro-batches; nothing where the installed schedule scales its loss."""
    problem = unscaled_indexer_problem(settings)
    if problem is not None and scales_indexer_loss() is False:
        yield problem


@cache
def scales_indexer_loss() -> bool | None:
    """Whether the installed schedule gives the loss of the sparse-attention indexer a scale: since Megatron-Core 0.19.

    None: it has no such loss. This runs the part of the schedule that sets the scales, as a pipeline stage without a loss does.
    """
    try:
        from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossAutoScaler as Scaler
    except ImportError:  # before 0.16
        return None
    from megatron.core.pipeline_parallel.schedules import forward_step_calc_loss

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
