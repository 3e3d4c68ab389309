"""Checks the arguments of a loss and puts them into one form. It changes no value and does not read masked ones."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.aggregation import check_counts
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.layout.packing import check_cu_seqlens, document_ids
from megatron_rl.losses.options import LossOptions


@dataclass(frozen=True)
class LossInputs:
    """One micro-batch of this rank. Masked positions, and padding past cu_seqlens[-1], may hold anything."""

    old_log_probs: Tensor | None  # [T]
    advantages: Tensor  # [N] or [T], as advantages_per says
    advantages_per: str  # "sample" or "token"
    loss_mask: Tensor  # [T] bool, False on padding
    cu_seqlens: Tensor  # [N + 1]
    token_weights: Tensor  # [N]
    token_counts: Tensor | None  # [N] over all cp ranks
    importance_weights: Tensor | None  # [T]
    ref_log_probs: Tensor | None  # [T]
    rollout_log_probs: Tensor | None  # [T]
    regularizer_weights: Tensor | None  # [N]
    document_numbers: tuple[int, ...] | None = None  # N, the caller's numbers, for messages; None: 0 to N - 1

    @property
    def num_documents(self) -> int:
        return self.cu_seqlens.numel() - 1

    @functools.cached_property
    def token_documents(self) -> Tensor:
        """[T] int64, N on padding. Only the torch twin needs it."""
        return document_ids(self.cu_seqlens, self.loss_mask.numel())


def prepare_inputs(
    num_tokens: int,
    device: torch.device,
    dtype: torch.dtype,
    old_log_probs: Tensor | None,
    advantages: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    token_weights: Tensor,
    options: LossOptions,
    *,
    ranks_must_agree: bool,
) -> LossInputs:
    """Checks shapes and dtypes, and finds out whether `advantages` are per sample or per token.

    dtype: that of the log-probabilities and of the loss; weights must be finite in it.
    ranks_must_agree: `advantages` must mean the same on all cp ranks, because they reduce tensors of a shape that depends on it.
    Raises DataError or ConfigError, which name the argument.
    """
    token_counts, regularizer_weights = options.token_counts, options.regularizer_weights
    required = {"cu_seqlens": cu_seqlens, "loss_mask": loss_mask, "advantages": advantages, "token_weights": token_weights}
    per_token = {
        "old_log_probs": old_log_probs,
        "importance_weights": options.importance_weights,
        "ref_log_probs": options.ref_log_probs,
        "rollout_log_probs": options.rollout_log_probs,
    }
    optional = {**per_token, "token_counts": token_counts, "regularizer_weights": regularizer_weights}
    _check_are_tensors(required | {name: value for name, value in optional.items() if value is not None})
    check_cu_seqlens(cu_seqlens, num_tokens)
    num_documents = cu_seqlens.numel() - 1
    if loss_mask.shape != (num_tokens,) or loss_mask.dtype not in (torch.bool, torch.int32, torch.int64, torch.uint8):
        raise DataError(f"loss_mask must be [T={num_tokens}] bool, got {tuple(loss_mask.shape)} {loss_mask.dtype}")
    per_document = {
        "token_weights": token_weights,
        "token_counts": token_counts,
        "regularizer_weights": regularizer_weights,
    }
    if not loss_mask.is_cuda and loss_mask.dtype != torch.bool and bool(((loss_mask != 0) & (loss_mask != 1)).any()):
        raise DataError("loss_mask has values other than 0 and 1: a mask selects tokens; pass weights as token_weights")
    for length, letter, tensors in ((num_tokens, "T", per_token), (num_documents, "N", per_document)):
        for name, tensor in tensors.items():
            if tensor is not None and tensor.shape != (length,):
                raise DataError(f"{name} must be [{letter}={length}], got {tuple(tensor.shape)}")
    for name, tensor in (("advantages", advantages), *per_token.items(), *per_document.items()):
        if tensor is not None and tensor.is_complex():
            raise DataError(f"{name} is {tensor.dtype}: a loss needs real numbers; pass a floating point tensor")
    for name in ("token_weights", "regularizer_weights"):
        weights = per_document[name]
        if weights is not None and not weights.is_cuda and not bool(torch.isfinite(weights.to(dtype)).all()):
            raise DataError(f"{name} has values that are not finite in {dtype}: {weights.tolist()}")
    if token_counts is not None:
        check_counts("token_counts", token_counts)
    # Counts and weights are small and may come from the host: they are copied to the logits' device.
    cu_seqlens, token_weights = (value.to(device, non_blocking=True) for value in (cu_seqlens, token_weights))
    token_counts, regularizer_weights = (
        None if value is None else value.to(device, non_blocking=True) for value in (token_counts, regularizer_weights)
    )
    _check_devices(device, {"loss_mask": loss_mask, "advantages": advantages, **per_token})
    return LossInputs(
        old_log_probs=old_log_probs,
        advantages=advantages,
        advantages_per=_meaning_of_advantages(advantages, num_tokens, cu_seqlens, options.advantages_per, ranks_must_agree),
        loss_mask=loss_mask.bool() & (torch.arange(num_tokens, device=device, dtype=cu_seqlens.dtype) < cu_seqlens[-1]),
        cu_seqlens=cu_seqlens,
        token_weights=token_weights,
        token_counts=token_counts,
        importance_weights=options.importance_weights,
        ref_log_probs=options.ref_log_probs,
        rollout_log_probs=options.rollout_log_probs,
        regularizer_weights=regularizer_weights,
    )


def given(tensor: Tensor | None) -> Tensor:
    """The tensor, for type checkers: the checks of the options have shown that it is not None."""
    assert tensor is not None
    return tensor


def _check_are_tensors(arguments: Mapping[str, object]) -> None:
    for name, value in arguments.items():
        if not isinstance(value, Tensor):
            raise DataError(f"{name} is {type(value).__name__}: pass a torch tensor")


def _check_devices(device: torch.device, tensors: dict[str, Tensor | None]) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise DataError(f"{name} is on {tensor.device} and the logits on {device}: move it with .to(logits.device)")


def _meaning_of_advantages(
    advantages: Tensor, num_tokens: int, cu_seqlens: Tensor, advantages_per: str | None, ranks_must_agree: bool
) -> str:
    num_documents = cu_seqlens.numel() - 1
    lengths = {"sample": num_documents, "token": num_tokens}
    if advantages_per is not None:
        if advantages_per not in lengths:
            raise ConfigError(f'advantages_per={advantages_per!r} must be "sample", "token" or None')
        if advantages.shape != (lengths[advantages_per],):
            raise DataError(
                f'advantages {tuple(advantages.shape)} with advantages_per="{advantages_per}" must be [{lengths[advantages_per]}]'
            )
        return advantages_per
    if advantages.shape == (num_documents,) and num_documents == num_tokens:
        # Only this case needs the values of the bounds, which synchronises on CUDA.
        ranks_must_agree = ranks_must_agree and num_documents > 0
        if not ranks_must_agree and bool((cu_seqlens.diff() == 1).all()):
            return "sample"
        why = "documents may have tokens on other ranks" if ranks_must_agree else "not every document has exactly one token"
        raise DataError(
            f"advantages [{num_tokens}] fit both {num_documents} samples and {num_tokens} tokens, and {why}: pass "
            'advantages_per="sample" or "token"'
        )
    for meaning, length in lengths.items():
        if advantages.shape == (length,):
            return meaning
    raise DataError(
        f"advantages {tuple(advantages.shape)} must be [N={num_documents}], one a sample, or [T={num_tokens}], one a token"
    )
