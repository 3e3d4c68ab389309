"""The factor that backward will deliver: declared by the caller of a loss, or assumed to be the last one that it delivered."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

from megatron_rl.errors import ConfigError

# Relative. The factor is a product of a few float32 numbers; a wrong one differs by a count of ranks or micro-batches.
FACTOR_TOLERANCE = 1e-6


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


def check_declared_scale(loss_scale: Tensor | float) -> None:
    """Raises ConfigError unless loss_scale is a factor that backward can deliver."""
    is_scalar = isinstance(loss_scale, Tensor) and loss_scale.dim() == 0
    is_number = isinstance(loss_scale, Real) and not isinstance(loss_scale, bool) and 0 < loss_scale < float("inf")
    if not is_scalar and not is_number:
        raise ConfigError(
            f"loss_scale={loss_scale!r} must be a finite number above 0 or a 0-d tensor: the factor that backward will deliver; "
            "pass None if it is not known yet"
        )


def check_actual_scale(upstream: Tensor, loss_scale: Tensor | float, why: str) -> Tensor | None:
    """None if backward delivers the declared factor, else ConfigError with `why`. On CUDA: 1, or NaN for another factor."""
    is_equal = (upstream / loss_scale - 1.0).abs() <= FACTOR_TOLERANCE
    if upstream.is_cuda:
        return torch.where(is_equal, 1.0, float("nan"))
    if not bool(is_equal):
        raise ConfigError(
            f"loss_scale={float(loss_scale)!r} was declared and backward delivers {float(upstream)!r}: {why}. Pass the product of "
            "everything that multiplies .loss: the schedule's factor, 1 / num_microbatches and the optimizer's loss scale"
        )
    return None
