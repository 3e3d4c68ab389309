"""The packed logits of ROLL's strategy as its sequences: one gradient for all of them, in the memory of the logits.

ROLL calls a loss once a sequence, with `output_tensor[:, start:end]`. Autograd then makes a gradient of the size of all sequences
for each of them, and adds them up. And each slice counts the writes into the others, so no loss may write into its own. Here the
sequences come from one function of autograd:

    forward     [1, T, V] -> [1, T_i, V] each, in the same memory, each with a count of writes of its own
    backward    the gradient of each sequence goes to its rows of the logits, where it does not lie there already

A gradient of a sequence comes when all that read it has run backward, so that its logits are read by nobody any more.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from megatron_rl.errors import ConfigError
from megatron_rl.hosts.roll import DOOR
from megatron_rl.layout.groups import resolve_group
from megatron_rl.ops.backends import first_order_only

# Of ROLL's strategy, and its arguments.
UNPACK, ARGUMENTS = "_unpack_sequences", ("self", "output_tensor", "cu_seqlens_padded")


def share_one_gradient(strategy: Any) -> None:
    """From now on this strategy of ROLL cuts packed logits into the sequences above. Raises ConfigError for another contract."""
    if problems := [*DOOR.differences(type(strategy), UNPACK, ARGUMENTS)]:
        raise ConfigError(problems)

    def unpack_sequences(output_tensor: Tensor, cu_seqlens_padded: Tensor) -> Iterator[Tensor]:
        """[1, T / c, V / tp], bounds [N + 1] over all context-parallel ranks -> [1, T_i / c, V / tp] each. Synchronises."""
        bounds = (cu_seqlens_padded // resolve_group(None, "cp").size()).tolist()
        yield from sequences_of(output_tensor, bounds)

    setattr(strategy, UNPACK, unpack_sequences)


def is_alone(logits: Tensor) -> bool:
    """Whether a write into these logits is counted as one into them alone: they are no part of a larger tensor."""
    return logits._base is None or logits._base.numel() == logits.numel()


def sequences_of(
    logits: Tensor,  # [1, T, V]
    bounds: list[int],  # [N + 1], rising from 0 to T or less; the rest is padding
) -> tuple[Tensor, ...]:  # [1, bounds[i + 1] - bounds[i], V] each
    found: tuple[Tensor, ...] = _Sequences.apply(logits, bounds)
    return found


class _Sequences(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, bounds: list[int]) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        # Writes into the detached tensor are counted with those into the logits.
        ctx.memory, ctx.bounds = logits.detach(), bounds
        # Not slices of one tensor for autograd, which would count the writes into all of them together.
        return tuple(ctx.memory[:, start:end].data for start, end in pairwise(bounds))

    @staticmethod
    @first_order_only
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor, None]:
        memory, ctx.memory = ctx.memory, None
        if memory is None:
            raise ConfigError(
                "a second backward through the packed logits of ROLL: the first has written their gradient over them; compute the "
                "loss again"
            )
        for (start, end), gradient in zip(pairwise(ctx.bounds), gradients, strict=True):
            rows = memory[:, start:end]
            if gradient is None:
                rows.zero_()
            elif (gradient.data_ptr(), gradient.stride()[1:]) != (rows.data_ptr(), rows.stride()[1:]):
                rows.copy_(gradient)
        # Counted for the logits: an operation of the model that keeps them, as the tanh of a soft cap does, then raises.
        memory[:, ctx.bounds[-1] :].zero_()
        return memory, None
