"""What a fused head asks a loss for, item by item: the coefficients of rows, and at the end the loss. It never sees a logit.

Items of whole documents (plans A, B, C): one `loss_parts` each, whose parts add up. Free rows (plan D): a coefficient is a
function of its own token, and one `loss_parts` over everything closes.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from megatron_rl.config import PolicyMetrics
from megatron_rl.layout.packing import document_ids, spread
from megatron_rl.loss_hub import PolicyLossEntry
from megatron_rl.losses.inputs import LossInputs
from megatron_rl.losses.linear_inputs import bin_inputs
from megatron_rl.losses.parts import LossParts, LossSettings, loss_parts
from megatron_rl.losses.registered import surrogate_values
from megatron_rl.metrics import combine_statistics
from megatron_rl.ops.linear_log_probs import LinearHead, device_rows
from megatron_rl.ops.linear_schedule import WorkItem
from megatron_rl.ops.ratios import k3_estimate


class DocumentCoefficients:
    """Plans A, B and C. Communication: what loss_parts does, once an item: one all-reduce of [N_bin, k] over cp."""

    def __init__(self, entry: PolicyLossEntry, inputs: LossInputs, settings: LossSettings, bounds: list[int], head: LinearHead):
        self.entry, self.inputs, self.settings, self.bounds, self.head = entry, inputs, settings, bounds, head
        self.parts: list[tuple[WorkItem, LossParts]] = []
        self.coefficients = torch.zeros_like(head.log_probs)
        self.entropy_coefficients = torch.zeros_like(head.log_probs) if settings.entropy_coefficient else None

    def __call__(self, item: WorkItem) -> tuple[Tensor, Tensor | None]:
        inputs, tokens = bin_inputs(self.inputs, item.documents, self.bounds)
        entropy = None if self.head.entropy is None else self.head.entropy[tokens]
        parts = loss_parts(self.entry, self.head.log_probs[tokens], entropy, inputs, self.settings)
        self.parts.append((item, parts))
        self.coefficients[tokens] = parts.coefficients
        if self.entropy_coefficients is not None:
            self.entropy_coefficients[tokens] = parts.entropy_coefficients
        rows = _rows_of(item, self.coefficients.device)
        return self.coefficients[rows], None if self.entropy_coefficients is None else self.entropy_coefficients[rows]

    def finish(self) -> LossParts:
        """The micro-batch's parts. Every document was in exactly one item."""
        all_parts = [parts for _, parts in self.parts]
        num_nonfinite = all_parts[0].num_nonfinite.new_zeros(len(self.bounds) - 1)
        for item, parts in self.parts:
            num_nonfinite[torch.tensor(item.documents, dtype=torch.int64).to(num_nonfinite.device, non_blocking=True)] = (
                parts.num_nonfinite
            )
        return LossParts(
            loss=_total([parts.loss for parts in all_parts]),
            policy_loss=_total([parts.policy_loss for parts in all_parts]),
            kl_loss=_total([parts.kl_loss for parts in all_parts]),
            entropy=_total([parts.entropy for parts in all_parts]),
            coefficients=self.coefficients,
            entropy_coefficients=self.entropy_coefficients,
            num_nonfinite=num_nonfinite,
            statistics=(None if all_parts[0].statistics is None else combine_statistics([parts.statistics for parts in all_parts])),
        )


class TokenCoefficients:
    """Plan D: a token-level surrogate, or any with one on-policy, where the ratio is 1 and the policy's part known beforehand.

        c_t = w_i u_t value'(log_ratio_t) + kl_coefficient v_i k3'_t          e_t = -entropy_coefficient v_i

    At sequence level, on-policy, the first term is loss_parts' own at ratio 1: one more all-reduce of [N, k] over cp, at the start.
    """

    def __init__(self, entry: PolicyLossEntry, inputs: LossInputs, settings: LossSettings, bounds: list[int], head: LinearHead):
        self.entry, self.inputs, self.settings, self.head = entry, inputs, settings, head
        self.documents = document_ids(inputs.cu_seqlens, inputs.loss_mask.numel())
        self.dtype = head.log_probs.dtype
        self.known = None
        if entry.level == "sequence":
            policy_alone = dataclasses.replace(settings, kl_coefficient=0.0, entropy_coefficient=0.0, metrics=PolicyMetrics.NONE)
            self.known = loss_parts(entry, torch.zeros_like(head.log_probs), None, inputs, policy_alone).coefficients

    def __call__(self, item: WorkItem) -> tuple[Tensor, Tensor | None]:
        rows = _rows_of(item, self.documents.device)
        documents, log_probs = self.documents[rows], self.head.log_probs[rows]
        c = self._policy(rows, documents, log_probs) if self.known is None else self.known[rows]
        if not (self.settings.kl_coefficient or self.settings.entropy_coefficient):
            return c, None
        weights = spread(self.inputs.regularizer_weights.to(self.dtype), documents)
        if self.settings.kl_coefficient:
            _, derivative = k3_estimate(log_probs, self.inputs.ref_log_probs[rows].to(self.dtype))
            c = c + self.settings.kl_coefficient * weights * derivative
        return c, -self.settings.entropy_coefficient * weights if self.settings.entropy_coefficient else None

    def _policy(self, rows: slice | Tensor, documents: Tensor, log_probs: Tensor) -> Tensor:  # [rows]
        inputs, settings = self.inputs, self.settings
        old = log_probs if inputs.old_log_probs is None else inputs.old_log_probs[rows].to(self.dtype)
        advantages = inputs.advantages.to(self.dtype)
        advantages = spread(advantages, documents) if inputs.advantages_per == "sample" else advantages[rows]
        clip = {"clip_ratio_low": settings.clip_ratio_low, "clip_ratio_high": settings.clip_ratio_high}
        derivative = surrogate_values(self.entry, log_probs - old, advantages, **clip).derivative
        weights = spread(inputs.token_weights.to(self.dtype), documents)
        if inputs.importance_weights is not None:
            weights = weights * inputs.importance_weights[rows].to(self.dtype)
        return weights * derivative

    def finish(self) -> LossParts:
        """Communication: one all-reduce of [N, k] over cp."""
        return loss_parts(self.entry, self.head.log_probs, self.head.entropy, self.inputs, self.settings)


def _rows_of(item: WorkItem, device: torch.device) -> slice | Tensor:
    rows = torch.cat(item.chunks) if item.chunks else torch.zeros(0, dtype=torch.int64)
    return device_rows(rows, device) if rows.numel() else rows.to(device, non_blocking=True)


def _total(parts: list[Tensor | None]) -> Tensor | None:  # 0-d each
    """Their sum, in float64 and in a tensor of its own; None for a term that is off."""
    return None if parts[0] is None else torch.stack(parts).sum(dtype=torch.float64).to(parts[0].dtype)
