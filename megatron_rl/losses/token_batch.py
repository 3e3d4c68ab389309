"""Defines what a loss of level "batch" is given: this rank's tokens, and sums over samples that include all cp ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_rl.errors import DataError
from megatron_rl.layout.groups import Group, all_reduce_sum
from megatron_rl.layout.packing import document_sums, spread
from megatron_rl.losses.ordered_sums import SlicedTokens, ordered_sum


class RefusedElsewhere(Exception):
    """Another cp rank refused the result of the loss; RankAgreement passes its message on."""


class OtherNumberOfSums(DataError):
    """A cp rank has ended its sums while another one asks for a further sum."""


@dataclass(slots=True)
class JointSums:
    """Sums over cp for one call of a loss. is_checked: a rank that refuses, or that has no further sum, tells the others in their
    next sum.

    Without that they would wait in the sum for a rank that has left, because the number of sums of a loss is not known.
    """

    cp_group: Group
    num_documents: int
    device: torch.device
    is_checked: bool
    num_done: int = 0

    def __call__(self, values: Tensor) -> Tensor:  # [N] or [N, k] -> the same, float64
        """Communication: one all-reduce of it; where checked one of [N + 2] for each column. Raises RefusedElsewhere, and
        OtherNumberOfSums."""
        values = values.double()
        if not self.is_checked:
            return all_reduce_sum(values.contiguous(), self.cp_group)
        if values.dim() > 1:  # a rank that refuses does not know k
            return torch.stack([self(column) for column in values.unbind(-1)], dim=-1)
        return self._exchange(values, is_refused=False, is_end=False)

    def end(self, *, is_refused: bool) -> None:
        """Ends the sums: tells the other ranks that this one refused, or raises RefusedElsewhere where another one did, and
        OtherNumberOfSums where another one has not ended.

        Communication: one all-reduce of [N + 2] where checked.
        """
        if self.is_checked:
            none = torch.zeros(self.num_documents, dtype=torch.float64, device=self.device)
            self._exchange(none, is_refused=is_refused, is_end=not is_refused)

    def _exchange(self, values: Tensor, *, is_refused: bool, is_end: bool) -> Tensor:  # [N] -> [N]
        state = values.new_tensor([float(is_refused), float(is_end)])
        found = all_reduce_sum(torch.cat([values, state]), self.cp_group)
        num_refused, num_ended = found[-2:].tolist()
        if num_refused and not is_refused:
            raise RefusedElsewhere
        if 0 < num_ended < self.cp_group.size() and not num_refused:
            raise OtherNumberOfSums(
                f"asks for {self.num_done} sums over samples on this rank{'' if is_end else ' and a further one'}, and for another "
                "number on another context-parallel rank: each rank must make the same sums, also one without a token, and either "
                "all return a derivative or all leave it to autograd"
            )
        self.num_done += 1
        return found[:-2]


@dataclass(frozen=True)
class TokenBatch:
    """The argument of a loss of level "batch": this rank's tokens, and sums over samples, which include all cp ranks.

    The sums are differentiable, so a loss may be any function of them.
    """

    log_ratio: Tensor  # [T] log_probs - old_log_probs
    log_probs: Tensor  # [T]
    advantages: Tensor  # [T]
    loss_mask: Tensor  # [T] bool; the vectors above are 0 where it is False
    documents: Tensor  # [T] int64, the sample of each token; N on padding
    token_counts: Tensor  # [N] unmasked tokens of each sample over all cp ranks
    cu_seqlens: Tensor  # [N + 1] this rank's slices
    sums: JointSums
    cp_layout: str | None = None  # the order of the slices: "zigzag" or "contiguous"; None: not known

    def sample_sum(self, values: Tensor) -> Tensor:  # [T] -> [N], or [T, k] -> [N, k]
        """The sum over the unmasked tokens of each sample.

        Communication: one all-reduce of the result over cp, and one in backward; where ranks are checked one of [N + 2] a column.
        """
        masked = torch.where(self.loss_mask if values.dim() == 1 else self.loss_mask[:, None], values, 0.0)
        sums: Tensor = _SampleSum.apply(masked, self.cu_seqlens, self.documents, self.sums)  # type: ignore[no-untyped-call]  # torch's
        return sums

    def sample_mean(self, values: Tensor) -> Tensor:  # [T] -> [N], or [T, k] -> [N, k]
        """The mean over the unmasked tokens of each sample; 0 for a sample without one. Communication: as sample_sum."""
        counts = self.token_counts.clamp(min=1).to(values.dtype)
        return self.sample_sum(values) / (counts if values.dim() == 1 else counts[:, None])

    def suffix_sum(self, values: Tensor, *, decay: float = 1.0) -> Tensor:  # [T] -> [T], or [T, k] -> [T, k]
        """Of each unmasked token the sum over the unmasked tokens of its sample from this one on; of a masked one 0.

            sum_t = sum_{k >= t} decay^(k - t) values_k        k and t count the sample's unmasked tokens, over all cp ranks

        The sum is float64, in an order that is the same in every run.
        Communication: at cp above 1 one all-reduce of [N, c (k + 1)] over cp, c the chunks of a sample (2 cp_size in zigzag order),
        and one in backward; in zigzag order one of [N] before; where ranks are checked one of [N + 2] a column.
        Raises: ConfigError for a decay outside (0, 1], and where cp_layout is None at cp above 1; DataError for another shape and,
        on the CPU, for slices that are not in zigzag order. On CUDA their samples get NaN.
        """
        return ordered_sum(values, self._sliced_tokens(), self.sums, decay=decay, from_the_end=True)

    def prefix_sum(self, values: Tensor, *, decay: float = 1.0) -> Tensor:  # [T] -> [T], or [T, k] -> [T, k]
        """As suffix_sum, over the sample's unmasked tokens up to this one: sum_t = sum_{k <= t} decay^(t - k) values_k."""
        return ordered_sum(values, self._sliced_tokens(), self.sums, decay=decay, from_the_end=False)

    def _sliced_tokens(self) -> SlicedTokens:
        return SlicedTokens(self.loss_mask, self.documents, self.cu_seqlens, self.sums.cp_group, self.cp_layout)

    def of_tokens(self, values: Tensor) -> Tensor:  # [N] -> [T], or [N, k] -> [T, k]
        """Gives each token the value of its sample; 0 on padding."""
        return spread(values, self.documents)


class _SampleSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, cu_seqlens: Tensor, documents: Tensor, sums: JointSums) -> Tensor:
        ctx.documents, ctx.sums = documents, sums
        return sums(document_sums(values, cu_seqlens)).to(values.dtype)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None]:
        # The part of the loss on each cp rank depends on the sum, so their derivatives are added.
        return spread(ctx.sums(upstream).to(upstream.dtype), ctx.documents), None, None, None
