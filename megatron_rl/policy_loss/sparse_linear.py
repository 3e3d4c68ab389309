"""Computes a loss of the fused head where each row has a set of kept ids: scores of all rows, one reduction, the gradient."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megatron_rl.declare import PolicyLoss
from megatron_rl.ops.linear_gradient import ReadyGradient, main_grad_of
from megatron_rl.ops.log_probs_torch import working_dtype
from megatron_rl.ops.support_head import SupportHead, run_scores, run_support_gradient
from megatron_rl.policy_loss.api import reducer_of
from megatron_rl.policy_loss.inputs import LossInputs
from megatron_rl.policy_loss.reduce_torch import LossResult
from megatron_rl.policy_loss.settings import LossSettings
from megatron_rl.policy_loss.support_terms import kl_apart


@torch.no_grad()
def reduce_with_support(
    sparse: SupportHead,
    loss: PolicyLoss,
    inputs: LossInputs,
    settings: LossSettings,
    hidden: Tensor,  # [T, H] or [T / tp, H], as the caller gave it
    ready: ReadyGradient | None,
) -> LossResult:
    """The result of the micro-batch; fills `ready` with the gradient, if it is wanted.

    A loss of any level has its coefficients at once, because the scores of all rows are there.
    Communication: as run_scores, reduce_loss_torch and run_support_gradient.
    """
    run_scores(sparse)
    head = sparse.head
    if sparse.full is not None:
        inputs = replace(inputs, log_kept_mass=sparse.full - head.log_probs)
    result = reducer_of(loss, settings)(loss, head.log_probs, head.entropy, inputs, settings)
    if settings.is_kl_of_all:
        own, of_kl = kl_apart(result.coefficients, head.log_probs, inputs, settings, head.shard.vocab_size)
        result = replace(result, coefficients=own, full_coefficients=of_kl)
    if ready is None:
        return result
    scale = 1.0 if ready.loss_scale is None else ready.loss_scale
    c, c_full, e = result.coefficients, result.full_coefficients, result.entropy_coefficients
    of_weight = main_grad_of(ready.parameter) if ready.is_in_main_grad else None
    if of_weight is None and ready.parameter.requires_grad:
        of_weight = torch.zeros_like(head.weight, dtype=working_dtype(head.weight))
    of_hidden = torch.zeros_like(head.hidden) if hidden.requires_grad else None
    c_full, e = (None if part is None else part * scale for part in (c_full, e))
    ready.hidden = run_support_gradient(sparse, c * scale, c_full, e, of_hidden=of_hidden, of_weight=of_weight)
    ready.weight = None if ready.is_in_main_grad else of_weight
    return result
