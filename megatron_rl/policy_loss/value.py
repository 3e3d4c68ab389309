"""Computes the value loss of a critic: this rank's part of the step's loss, from values and returns."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.errors import ConfigError, DataError
from megatron_rl.layout.groups import document_ids, document_sums, spread
from megatron_rl.ops.backends import log_probs_dtype
from megatron_rl.policy_loss.inputs import (
    check_cu_seqlens,
    check_is_real,
    check_loss_mask,
    check_vector,
    check_weights,
    number_of,
)


@dataclass(frozen=True, slots=True)
class ValueLossOutput:
    """loss is 0-d and differentiable. The others are detached sums over this rank's unmasked tokens."""

    loss: Tensor
    num_clipped: Tensor  # 0-d float64, where the clipped value has the larger error: the gradient is 0
    squared_error: Tensor  # 0-d float64, sum of (V - R)^2
    num_nonfinite: Tensor  # [N] int32


def value_loss(
    values: Tensor,  # [T] with gradient
    returns: Tensor,  # [T]
    loss_mask: Tensor,  # [T] bool
    cu_seqlens: Tensor,  # [N + 1] int32
    token_weights: Tensor,  # [N] from sample_token_weights
    *,
    old_values: Tensor | None = None,  # [T]
    clip: float | None = None,
) -> ValueLossOutput:
    """The clipped squared error of a critic. `loss` is this rank's part of the step's

        sum_i w_i sum_t m_it l_it,    l = 1/2 max( (V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2 ),    w = token_weights

    without a clip l = 1/2 (V - R)^2. Squared error: Schulman et al., arXiv:1707.06347, equation 9. Clip: ppo2 of OpenAI baselines.

    The weights have the counts of the step, so the parts sum to its loss over micro-batches, dp and cp ranks: no mean of
    micro-batch means. They do not sum over tp, whose ranks hold the same number. scale_for_schedule takes `.loss`.
    Where both squares are equal, the gradient is that of V. T: as in policy_loss, padding past cu_seqlens[-1] is allowed.

    Args:
        values: [T] of any floating dtype, V of the critic in training, in the unit of the returns: a head of one output, flattened.
        returns: [T], R, constants.
        loss_mask: [T] bool, True on tokens that are trained; other positions may hold anything.
        cu_seqlens: [N + 1] int32, bounds of this rank's slices of the documents.
        token_weights: [N] float32, the weight of each token of a sample, of any aggregation. May be on the host, as cu_seqlens.
        old_values: [T], V_old of the critic before the first step on the rollout, constants; with `clip` only.
        clip: c above 0, in the unit of the returns.
    Returns: `loss` in float32, float64 for float64 values; num_clipped / num_tokens of the step's sums is the clipped share.
    Communication: none, also in backward. On CUDA it does not synchronise: look at num_nonfinite before the optimiser step.
    Raises: ConfigError for a clip that is no finite number above 0, and for `clip` without `old_values` or these without it.
        DataError for wrong shapes, dtypes, bounds and weights and, on the CPU, for unmasked values that are not finite.

    >>> values, returns = torch.tensor([1.0, 3.0], requires_grad=True), torch.tensor([2.0, 0.0])
    >>> output = value_loss(values, returns, torch.ones(2, dtype=torch.bool), torch.tensor([0, 2]), torch.tensor([0.5]))
    >>> output.loss.item()  # 0.5 x 0.5 x (1 + 9)
    2.5
    """
    if (clip is None) != (old_values is None):
        given, missing = ("old_values", "clip") if clip is None else (f"clip={clip!r}", "old_values [T]")
        raise ConfigError(f"{given} has no effect without {missing}: pass both, or neither for no clip")
    if clip is not None:
        clip = number_of("clip", clip)
        if not 0 < clip < math.inf:
            raise ConfigError(f"clip={clip} must be a finite number above 0, in the unit of the returns; None: no clip")
    num_tokens, num_documents, dtype = loss_mask.numel(), cu_seqlens.numel() - 1, log_probs_dtype(values)
    vectors = {"values": values, "returns": returns} | ({} if old_values is None else {"old_values": old_values})
    check_cu_seqlens(cu_seqlens, num_tokens)
    check_loss_mask(loss_mask, num_tokens)
    check_vector("token_weights", token_weights, "N", num_documents)
    for name, vector in vectors.items():
        check_vector(name, vector, "T", num_tokens)
        check_is_real(name, vector)
    check_weights("token_weights", token_weights, dtype)
    cu_seqlens = cu_seqlens.to(values.device, non_blocking=True)
    documents = document_ids(cu_seqlens, num_tokens)
    is_live = loss_mask.bool() & (documents < num_documents)
    # Before the arithmetic: the gradient of a masked NaN would be NaN too.
    live = {name: torch.where(is_live, vector.to(dtype), 0.0) for name, vector in vectors.items()}
    target = live["returns"].detach()
    squares = (live["values"] - target).square()
    larger, is_clipped = squares, torch.zeros_like(is_live)
    if clip is not None:
        old = live["old_values"].detach()
        clipped_squares = (live["values"].clamp(old - clip, old + clip) - target).square()
        is_clipped = ~(squares >= clipped_squares)  # NaN too, so that it reaches the sums
        larger = torch.where(is_clipped, clipped_squares, squares)
    weights = spread(token_weights.detach().to(values.device, dtype, non_blocking=True), documents)
    num_nonfinite = document_sums(is_live & ~torch.isfinite(larger), cu_seqlens).to(torch.int32)
    if not values.is_cuda and bool(num_nonfinite.any()):
        document = int(num_nonfinite.nonzero()[0])
        names = [name for name, vector in live.items() if not bool(torch.isfinite(vector[documents == document]).all())]
        raise DataError(
            f"document {document} of the micro-batch has {int(num_nonfinite[document])} unmasked tokens with a value that is not "
            f"finite, in {', '.join(names) or 'the squared error'}. Mask the token or drop the sample"
        )
    loss = (weights * larger / 2).double().sum().to(dtype)
    return ValueLossOutput(loss, is_clipped.double().sum(), squares.detach().double().sum(), num_nonfinite)
