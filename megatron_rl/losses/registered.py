"""Calls the function of a registered policy loss, on copies of its inputs, and checks what it returns. It computes no loss."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_rl.errors import DataError
from megatron_rl.layout.groups import Group
from megatron_rl.loss_hub import PolicyLossEntry
from megatron_rl.losses.inputs import LossInputs


class LossValues(NamedTuple):
    """What a loss says of each token, or of each sample."""

    value: Tensor  # [*]
    derivative: Tensor  # [*] of the value by the log-ratio; by the token's log-probability for a loss without a surrogate
    is_clipped: Tensor  # [*] bool


def surrogate_values(
    entry: PolicyLossEntry,
    log_ratio: Tensor,  # [*] of tokens or samples
    advantages: Tensor,  # [*]
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
) -> LossValues:
    """The loss's surrogate. Finiteness is left to the caller, who knows which of them count. Raises DataError."""
    given = {"log_ratio": log_ratio.clone(), "advantages": advantages.clone()}
    returned = entry.surrogate(*given.values(), clip_ratio_low=clip_ratio_low, clip_ratio_high=clip_ratio_high)
    return _checked(entry, returned, given, log_ratio, advantages)


def function_values(
    entry: PolicyLossEntry,
    log_probs: Tensor,  # [T]
    old_log_probs: Tensor,  # [T]
    advantages: Tensor,  # [T], or [N] at level "sequence"
    token_advantages: Tensor,  # [T]
    inputs: LossInputs,
    token_counts: Tensor,  # [N]
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
    cp_group: Group,
) -> LossValues:  # [T]
    """A registered loss without a surrogate. Finiteness is left to the caller. Raises DataError."""
    given = {
        "log_probs": log_probs.clone(),
        "old_log_probs": old_log_probs.clone(),
        "advantages": advantages.clone(),
        "loss_mask": inputs.loss_mask.clone(),
        "cu_seqlens": inputs.cu_seqlens.clone(),
        "token_counts": token_counts.clone(),
    }
    returned = entry.values(*given.values(), clip_ratio_low=clip_ratio_low, clip_ratio_high=clip_ratio_high, cp_group=cp_group)
    return _checked(entry, returned, given, log_probs, token_advantages)


def nonfinite_values(values: LossValues, is_live: Tensor) -> Tensor:  # [*] bool
    return is_live & ~(torch.isfinite(values.value) & torch.isfinite(values.derivative))


def _checked(entry: PolicyLossEntry, returned: object, given: dict[str, Tensor], like: Tensor, advantages: Tensor) -> LossValues:
    """(value, derivative) or (value, derivative, is_clipped). Without the third, a clipped one is one without a derivative."""
    for name, tensor in given.items():
        # Under inference_mode no write is counted; it meets a copy there too.
        if not tensor.is_inference() and tensor._version:
            raise DataError(f"policy loss {entry.name!r} writes into {name}: it must leave its inputs as they are")
    if not isinstance(returned, tuple) or len(returned) not in (2, 3):
        found = f"{len(returned)} of them" if isinstance(returned, tuple) else type(returned).__name__
        raise DataError(
            f"policy loss {entry.name!r} must return two or three tensors (value, derivative[, is_clipped]), got {found}"
        )
    for name, tensor in zip(("value", "derivative", "is_clipped")[: len(returned)], returned, strict=True):
        dtype = torch.bool if name == "is_clipped" else like.dtype
        if not isinstance(tensor, Tensor) or tensor.shape != like.shape or tensor.dtype != dtype:
            found = f"{tuple(tensor.shape)} {tensor.dtype}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise DataError(f"policy loss {entry.name!r} returned {found} as its {name}: it must be {tuple(like.shape)} {dtype}")
    value, derivative = returned[0].detach(), returned[1].detach()
    is_clipped = returned[2] if len(returned) == 3 else (derivative == 0) & (advantages != 0)
    return LossValues(value, derivative, is_clipped)
