"""The factor that backward will deliver, where the caller of a loss does not know it: the last one that it delivered is assumed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Assumption:
    """What one forward has assumed. It is kept with the graph, because other forwards and backwards may come before its own."""

    factor: Tensor  # [] float32: what the gradient was made with
    last: Tensor  # [] float32, of the AssumedScale: gets what backward delivers

    def correct(
        self,
        gradient: Tensor,  # [T, V]
        upstream: Tensor,  # []
    ) -> None:
        """Makes the gradient that of `upstream`, in place. Neither a synchronisation nor a collective."""
        from megatron_rl.ops.rescale_triton import rescale

        rescale(gradient, upstream, self.factor, self.last)


class AssumedScale:
    """A loss_scale of policy_loss for a caller who does not know what will multiply `.loss` before backward.

    Forward makes the gradient with the factor that the last backward delivered, at first with 1. Backward compares two numbers on
    the device. Where they are equal, the gradient has the bits of a declared loss_scale. Elsewhere one kernel multiplies it once by

        delivered / assumed

    which is one rounding more: at most 2^-8 of a number in bfloat16, twice 2^-24 in float32. Nothing synchronises. A factor of 0
    gives zeros, and one that is not finite stays visible. Neither is assumed afterwards, and none outside [2^-40, 2^40].

    A training loop has one object, and gives it to each forward whose loss is multiplied in the same way. Several forwards may run
    before their backwards. Where no kernel makes the gradient in forward, as on a CPU, it has no effect.

    >>> scale = AssumedScale()
    >>> scale.assume(torch.device("cpu")).factor
    tensor(1.)
    """

    def __init__(self) -> None:
        self._last: Tensor | None = None  # [] float32, on the device of the logits

    def assume(self, device: torch.device) -> Assumption:
        """For one forward. On another device than before, the factor is 1 again."""
        if self._last is None or self._last.device != device:
            self._last = torch.ones((), dtype=torch.float32, device=device)
        return Assumption(self._last.clone(), self._last)
