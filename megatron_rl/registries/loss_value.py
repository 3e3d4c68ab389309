"""Defines what the function of a policy loss returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class LossValue:
    """What a policy loss returns: [T], one per token, at level "token"; [N], one per sample, at level "sequence".

    value: is multiplied by the weights. Masked positions may hold anything.
    derivative: d value / d log-probability of the token; at level "sequence" d value / d mean log-probability of the sample.
        log_ratio and log_probs both move with the log-probability. `value` detaches each factor that is constant for the gradient,
        so autograd finds the same number: a check at launch compares the two. None: autograd. Beyond a log-ratio of +-20 the
        derivative through log_ratio is 0: one that is given is set to 0 there, where the function takes no log_probs.
    is_clipped: bool, what the metrics count as clipped. None: nothing is clipped.
    """

    value: Tensor
    derivative: Tensor | None = None
    is_clipped: Tensor | None = None
