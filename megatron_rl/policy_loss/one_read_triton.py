"""Makes log-probabilities and the gradient of the logits in one kernel (ops/rows_triton.py) where a loss's coefficients allow it.

Loss, metrics and counts come from reduce_triton afterwards, from log_probs [T].
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megatron_rl.config import PolicyMetrics
from megatron_rl.declare import PolicyLoss
from megatron_rl.ops.backends import VocabShard, gradient_like
from megatron_rl.ops.rows_triton import OneReadConfiguration, plan_one_read, run_one_read
from megatron_rl.ops.scale import Assumption
from megatron_rl.policy_loss.inputs import LossBatch, LossOptions, further_inputs
from megatron_rl.policy_loss.reduce_triton import loss_arguments, reduce_triton


def plan_loss(
    loss: PolicyLoss, logits: Tensor, batch: LossBatch, options: LossOptions, *, is_assumed: bool
) -> OneReadConfiguration | None:
    """How one kernel takes these logits; None where plan_one_read says so, and

    - the softmax needs another rank's statistics (tp above 1);
    - the loss reads the entropy;
    - a teacher of rows has a gradient of its own, or a sampled one reads the policy in training;
    - a coefficient needs other rows: a sequence-level loss off-policy, or a correction that reads the policy in training;
    - it is known before the rows, but with one more reduction over cp (cp above 1);
    - the factor is assumed and the gradient is float16: a wrong guess would leave zeros or infinities, which no factor mends.
    """
    if batch.teacher is not None or batch.teacher_log_probs is not None:
        return None
    if options.tp_group.size() > 1 or (is_assumed and logits.dtype == torch.float16):
        return None
    has_late_correction = options.correction is not None and batch.correction is None
    # A loss that reads the entropy gets it from the kernels of rows.
    is_known_in_row = loss.level == "token" and not has_late_correction and not loss.needs_entropy
    # On-policy a sequence-level loss needs no log-probability where it reads the log-ratio, which is 0, and counts.
    is_of_ratio = not loss.takes_log_probs and {*loss.needs} <= {"token_counts"} and options.correction is None
    is_known_on_policy = loss.level == "sequence" and batch.old_log_probs is None and is_of_ratio
    if not is_known_in_row and (options.cp_group.size() > 1 or not is_known_on_policy):
        return None
    return plan_one_read(logits, None)


@torch.no_grad()
def read_once(
    loss: PolicyLoss,
    logits: Tensor,  # [T, V]
    labels: Tensor,  # [T] int64
    batch: LossBatch,
    options: LossOptions,
    shard: VocabShard,
    configuration: OneReadConfiguration,  # of plan_loss
    made_with: Tensor | float | Assumption,
) -> tuple[Tensor, Tensor, Tensor]:  # log_probs [T], entropy [T], gradient [T, V]
    """One launch. In place the gradient is in the logits' memory.

    The policy term's coefficients that are known before the rows come from reduce_triton: three launches more.
    """
    policy_coefficients = None
    if loss.level == "sequence":
        zeros = torch.zeros(logits.shape[0], dtype=torch.float32, device=logits.device)
        alone = replace(options, kl_coefficient=0.0, entropy_coefficient=0.0, metrics=PolicyMetrics.NONE)
        policy_coefficients = reduce_triton(loss, zeros, None, batch, alone)[1].log_probs
    loss_scale = made_with.factor if isinstance(made_with, Assumption) else made_with
    scale = loss_scale.detach().float() if isinstance(loss_scale, Tensor) and loss_scale.device == logits.device else None
    arguments = loss_arguments(loss, batch, options) | {
        "POLICY_COEFFICIENTS": policy_coefficients,
        "VECTORS": tuple(vector.contiguous() for vector in further_inputs(loss, batch, torch.float32).values()) or None,
        "LOSS_SCALE": scale,
        "loss_scale": 1.0 if scale is not None else float(loss_scale),
        "HAS_ENTROPY_TERM": options.entropy_coefficient != 0,
    }
    gradient = logits.detach() if options.inplace else gradient_like(logits)
    with_entropy = options.needs_entropy(loss)
    found = run_one_read(configuration, logits, labels, shard, with_entropy=with_entropy, out=gradient, **arguments)
    return found.log_probs, found.entropy, gradient
