"""Which tokens top-k, top-p and min-p keep, the same on every layout, and what their sampler records of each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from megatron_rl.layout.sampling_support import SamplingSupport, offsets_of
from megatron_rl.train.options import TrainOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingFilter:
    """Filters of a sampler, in the order in which they act; with the defaults each token is kept."""

    top_k: int = -1  # -1: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off

    @classmethod
    def of(cls, options: TrainOptions) -> SamplingFilter:
        return cls(top_k=options.top_k, top_p=options.top_p, min_p=options.min_p)

    @property
    def on(self) -> dict[str, float]:
        """The filters that keep a part, in the order in which they act."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return {one.name: values[one.name] for one in fields(self) if values[one.name] != one.default}

    @property
    def is_on(self) -> bool:
        return bool(self.on)

    def in_words(self) -> str:
        return ", ".join(f"{name.replace('_', '-')} {value:g}" for name, value in self.on.items())

    def kept(self, logits: Tensor) -> Tensor:  # [B, V] float32, divided by the temperature -> [B, V] bool
        """The tokens of each row that all filters keep, in this order; p is the softmax of the row.

            top_k  the k largest
            top_p  of those the fewest largest whose part of their mass reaches top_p: the token that crosses it is kept
            min_p  of those the tokens of p >= min_p max(p)

        Of equal logits the smaller id comes first, in the count of top_k and in the sum of top_p. The largest is always kept.
        Holtzman et al., arXiv:1904.09751 (top-p); Fan et al., arXiv:1805.04833 (top-k); Nguyen et al., arXiv:2407.01082 (min-p).

        A function of the whole row alone: a stable sort, and a sum in float64 in the order of the sort. So every layout with equal
        logits keeps the same tokens. A row that is not finite may keep none: whoever draws must look at it.
        Communication: none.
        """
        ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
        part = (ordered.double() - ordered[:, :1].double()).exp_()  # p / max(p)
        is_kept = torch.ones_like(part, dtype=torch.bool)
        if self.top_k != -1:
            is_kept[:, self.top_k :] = False
            part[:, self.top_k :] = 0.0
        if self.top_p < 1.0:
            mass = part.cumsum(-1)
            is_kept[:, 1:] &= mass[:, :-1] < self.top_p * mass[:, -1:]
        if self.min_p > 0.0:
            is_kept &= part >= self.min_p
        return torch.zeros_like(is_kept).scatter_(1, ids, is_kept)


class KeptTokens:
    """What a sampler kept, by the place of a sample in its prompts: a set of ids for each sampled token, with the token's score.

    The score is log softmax over the set, and the mass what the set has of the softmax over the vocabulary.
    """

    def __init__(self, num_samples: int):
        self._ids: list[list[Tensor]] = [[] for _ in range(num_samples)]
        self._scores: list[list[float]] = [[] for _ in range(num_samples)]
        self._masses: list[list[float]] = [[] for _ in range(num_samples)]

    def add(
        self,
        samples: Sequence[int],  # the B samples that got a token
        ids: Tensor,  # [nnz] int32 on the CPU, row after row
        sizes: Sequence[int],  # [B]
        scores: Sequence[float],  # [B]
        masses: Sequence[float],  # [B]
    ) -> None:
        for sample, row, score, mass in zip(samples, ids.split(list(sizes)), scores, masses, strict=True):
            self._ids[sample].append(row)
            self._scores[sample].append(score)
            self._masses[sample].append(mass)

    def _support(self, sample: int) -> SamplingSupport:
        """One row for each token of the response."""
        rows = self._ids[sample]
        sizes = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        return SamplingSupport(torch.cat([torch.empty(0, dtype=torch.int32), *rows]), offsets_of(sizes))

    def fields(self, sample: int) -> dict[str, Any]:
        """Of its Sample: the sets, what they had of the softmax, and the sampler's own log-probabilities, over the sets."""
        masses, scores = torch.tensor(self._masses[sample]), torch.tensor(self._scores[sample])
        return {"kept_ids": self._support(sample), "kept_mass": masses, "rollout_log_probs": scores}
