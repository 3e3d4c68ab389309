"""Which tokens top-p keeps, the same on every layout, and what its sampler records of each token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_rl.layout.sampling_support import SamplingSupport, offsets_of


def kept_by_top_p(
    logits: Tensor,  # [B, V] float32, divided by the temperature
    top_p: float,  # below 1
) -> Tensor:  # [B, V] bool
    """The fewest most probable tokens of each row whose mass reaches top_p: the token that crosses it is kept.

    Of equal logits the smaller id comes first. The largest is always kept. Holtzman et al., arXiv:1904.09751.

    A function of the whole row alone: a stable sort, and a sum in float64 in the order of the sort. So every layout with equal
    logits keeps the same tokens. A row that is not finite may keep none: whoever draws must look at it.
    Communication: none.
    """
    ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
    mass = (ordered.double() - ordered[:, :1].double()).exp_().cumsum(-1)  # of p / max(p)
    is_kept = torch.ones_like(mass, dtype=torch.bool)
    is_kept[:, 1:] = mass[:, :-1] < top_p * mass[:, -1:]
    return torch.zeros_like(is_kept).scatter_(1, ids, is_kept)


class KeptTokens:
    """What a sampler kept, by the place of a sample in its prompts: a set of ids for each sampled token, with the token's score.

    The score is log softmax over the set, and the mass what the set has of the softmax over the vocabulary.
    """

    def __init__(self, num_samples: int):
        self._tokens: list[list[tuple[Tensor, float, float]]] = [[] for _ in range(num_samples)]

    def add(
        self,
        samples: Sequence[int],  # the B samples that got a token
        ids: Tensor,  # [nnz] int32 on the CPU, row after row
        sizes: Sequence[int],  # [B]
        scores: Sequence[float],  # [B]
        masses: Sequence[float],  # [B]
    ) -> None:
        for sample, *token in zip(samples, ids.split(list(sizes)), scores, masses, strict=True):
            self._tokens[sample].append(tuple(token))

    def fields(self, sample: int) -> dict[str, Any]:
        """Of its Sample: the sets, what they had of the softmax, and the sampler's own log-probabilities, over the sets."""
        rows, scores, masses = zip(*self._tokens[sample], strict=True)
        support = SamplingSupport(torch.cat(rows), offsets_of(torch.tensor([len(row) for row in rows])))
        return {"kept_ids": support, "kept_mass": torch.tensor(masses), "rollout_log_probs": torch.tensor(scores)}
