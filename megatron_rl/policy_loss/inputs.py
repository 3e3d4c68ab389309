"""Defines the tensors of one micro-batch that a loss is given, checks them, and says what the loss sums over each document.

They are put into one form; no value is changed, and masked values are not read. Both twins of the loss, reduce_torch and
reduce_triton, write the same columns into the one reduction over cp. What the ranks of a document hold together is checked after
it, so that all of them raise.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_rl.count import check_counts
from megatron_rl.declare import PolicyLoss
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.layout.groups import Group, all_reduce_sum
from megatron_rl.layout.packing import document_ids, document_sums, spread
from megatron_rl.layout.sampling_support import SamplingSupport
from megatron_rl.losses.corrections import Correction, CorrectionSettings
from megatron_rl.policy_loss.settings import LossKeywords

# Relative standard deviation above which a sample's [T] advantages vary. For equal numbers float64 sums give less than 1e-7.
ADVANTAGE_VARIATION = 1e-5
# The columns that every loss has.
FIRST_COLUMNS = ("num_nonfinite", "counts")


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
    correction: CorrectionSettings | None  # None: no correction, or an applied one
    applied_correction: Correction | None = None  # is in importance_weights already
    document_numbers: tuple[int, ...] | None = None  # N, the caller's numbers, for messages; None: 0 to N - 1
    entropy: Tensor | None = None  # [T] of the policy in training, where the loss reads it, or over more than log_probs are
    sampling_support: SamplingSupport | None = None  # T rows

    @property
    def num_documents(self) -> int:
        return self.cu_seqlens.numel() - 1

    @property
    def compares_with_sampler(self) -> bool:
        """Whether rollout_log_probs are in a correction, so that they must be finite."""
        return self.correction is not None or self.applied_correction is not None

    @functools.cached_property
    def token_documents(self) -> Tensor:
        """[T] int64, N on padding."""
        return document_ids(self.cu_seqlens, self.loss_mask.numel())

    def anchor(self, log_probs: Tensor) -> Tensor:  # [T] -> [T] of its dtype
        """What the ratio compares log_probs with: themselves, where on-policy."""
        return log_probs if self.old_log_probs is None else self.old_log_probs.to(log_probs.dtype)

    def token_advantages(self, dtype: torch.dtype) -> Tensor:  # [T]
        advantages = self.advantages.to(dtype)
        return spread(advantages, self.token_documents) if self.advantages_per == "sample" else advantages


def are_coefficients_known_on_policy(loss: PolicyLoss, inputs: LossInputs) -> bool:
    """Whether a sequence-level loss needs no log-probability: it reads the log-ratio, which is 0 on-policy, and counts."""
    is_of_ratio = not loss.takes_log_probs and {*loss.needs} <= {"token_counts"} and inputs.correction is None
    return loss.level == "sequence" and inputs.old_log_probs is None and is_of_ratio


def prepare_inputs(
    loss: PolicyLoss,
    options: LossKeywords,  # from with_defaults
    cp_group: Group,
    *,
    num_tokens: int,
    device: torch.device,
    dtype: torch.dtype,
    old_log_probs: Tensor | None,
    advantages: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    token_weights: Tensor,
    document_lengths: Sequence[int] | None = None,
) -> LossInputs:
    """Checks shapes and dtypes, and finds out whether `advantages` are per sample or per token.

    dtype: of the log-probabilities and of the loss; weights must be finite in it.
    Raises DataError or ConfigError, which name the argument.
    """
    old_log_probs = options["rollout_log_probs"] if loss.anchor == "rollout" else old_log_probs
    # All cp ranks reduce tensors whose shape depends on what advantages are.
    ranks_must_agree = loss.level == "sequence" and cp_group.size() > 1
    token_counts, regularizer_weights = options["token_counts"], options["regularizer_weights"]
    required = {"cu_seqlens": cu_seqlens, "loss_mask": loss_mask, "advantages": advantages, "token_weights": token_weights}
    per_token = {
        "old_log_probs": old_log_probs,
        "importance_weights": options["importance_weights"],
        "ref_log_probs": options["ref_log_probs"],
        "rollout_log_probs": options["rollout_log_probs"],
    }
    optional = {**per_token, "token_counts": token_counts, "regularizer_weights": regularizer_weights}
    _check_are_tensors(required | {name: value for name, value in optional.items() if value is not None})
    check_cu_seqlens(cu_seqlens, num_tokens)
    num_documents = cu_seqlens.numel() - 1
    check_loss_mask(loss_mask, num_tokens)
    per_document = {
        "token_weights": token_weights,
        "token_counts": token_counts,
        "regularizer_weights": regularizer_weights,
    }
    for length, letter, tensors in ((num_tokens, "T", per_token), (num_documents, "N", per_document)):
        for name, tensor in tensors.items():
            if tensor is not None and tensor.shape != (length,):
                raise DataError(f"{name} must be [{letter}={length}], got {tuple(tensor.shape)}")
    for name, tensor in (("advantages", advantages), *per_token.items(), *per_document.items()):
        if tensor is not None and name != "token_counts" and (tensor.is_complex() or tensor.dtype == torch.bool):
            raise DataError(f"{name} is {tensor.dtype}: a loss needs real numbers; pass a floating point tensor")
    _check_weights("token_weights", token_weights, dtype)
    _check_weights("regularizer_weights", regularizer_weights, dtype)
    if token_counts is not None:
        check_counts("token_counts", token_counts)
    advantages_per = options["advantages_per"]
    if advantages_per is None:
        lengths = document_lengths if cp_group.size() == 1 else None
        advantages_per = _meaning_of_advantages(advantages, num_tokens, cu_seqlens, lengths, ranks_must_agree)
    else:
        _check_advantages_per(advantages_per, advantages, {"sample": num_documents, "token": num_tokens})
    # Counts and weights are small and may come from the host: they are copied to the logits' device.
    cu_seqlens, token_weights = (value.to(device, non_blocking=True) for value in (cu_seqlens, token_weights))
    token_counts, regularizer_weights = (
        None if value is None else value.to(device, non_blocking=True) for value in (token_counts, regularizer_weights)
    )
    _check_devices(device, {"loss_mask": loss_mask, "advantages": advantages, **per_token})
    loss_mask = loss_mask.bool() & (torch.arange(num_tokens, device=device, dtype=cu_seqlens.dtype) < cu_seqlens[-1])
    _check_weights("importance_weights", options["importance_weights"], dtype, loss_mask)
    return LossInputs(
        old_log_probs=old_log_probs,
        advantages=advantages,
        advantages_per=advantages_per,
        loss_mask=loss_mask,
        cu_seqlens=cu_seqlens,
        token_weights=token_weights,
        token_counts=token_counts,
        importance_weights=options["importance_weights"],
        ref_log_probs=options["ref_log_probs"],
        rollout_log_probs=options["rollout_log_probs"],
        regularizer_weights=regularizer_weights,
        correction=options["correction"] if options["correction"] is not None and options["correction"].is_on else None,
        sampling_support=options["sampling_support"],
    )


def check_loss_mask(loss_mask: Tensor, num_tokens: int) -> None:
    """Raises DataError unless the mask is [T] of 0 and 1. Values are checked on the CPU only."""
    if loss_mask.shape != (num_tokens,) or loss_mask.dtype not in (torch.bool, torch.int32, torch.int64, torch.uint8):
        raise DataError(f"loss_mask must be [T={num_tokens}] bool, got {tuple(loss_mask.shape)} {loss_mask.dtype}")
    if not loss_mask.is_cuda and loss_mask.dtype != torch.bool and bool(((loss_mask != 0) & (loss_mask != 1)).any()):
        raise DataError("loss_mask has values other than 0 and 1: a mask selects tokens; pass weights as token_weights")


def check_cu_seqlens(cu_seqlens: Tensor, num_tokens: int) -> None:
    """Raises DataError unless cu_seqlens is [N + 1], integer, starts with 0, never decreases and ends at or before num_tokens.

    Values are checked on the CPU only: on CUDA that would synchronise.
    """
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise DataError(
            f"cu_seqlens must be [N + 1] int32, the bounds of N documents, got {tuple(cu_seqlens.shape)} {cu_seqlens.dtype}"
        )
    if cu_seqlens.is_cuda:
        return
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0:
        raise DataError(f"cu_seqlens starts with {bounds[0]}, it must start with 0: the bounds count this rank's tokens")
    for index, (start, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        if end < start:
            raise DataError(f"cu_seqlens decreases from {start} to {end} at document {index}")
    if bounds[-1] > num_tokens:
        raise DataError(
            f"cu_seqlens ends at {bounds[-1]} but there are {num_tokens} tokens; under context parallelism it bounds the local "
            "slices: layout.local_cu_seqlens(cu_seqlens, cp_size) converts Megatron's"
        )


def given(tensor: Tensor | None) -> Tensor:
    """The tensor, for type checkers: the checks of the options have shown that it is not None."""
    assert tensor is not None
    return tensor


def _check_are_tensors(arguments: Mapping[str, object]) -> None:
    for name, value in arguments.items():
        if not isinstance(value, Tensor):
            raise DataError(f"{name} is {type(value).__name__}: pass a torch tensor")


def _check_weights(name: str, weights: Tensor | None, dtype: torch.dtype, loss_mask: Tensor | None = None) -> None:
    """Raises DataError unless they are floating point numbers of at least 0. Values are checked on the CPU only. loss_mask: of
    tokens, whose masked weights may be anything, and whose others are counted later where they are not finite."""
    if weights is None:
        return
    if not weights.is_floating_point():
        raise DataError(f"{name} is {weights.dtype}: weights are quotients; pass a floating point tensor")
    if weights.is_cuda:
        return
    if loss_mask is None and not bool(torch.isfinite(weights.to(dtype)).all()):
        raise DataError(f"{name} has values that are not finite in {dtype}: {weights.tolist()}")
    is_negative = (weights < 0) & torch.isfinite(weights)
    if bool((is_negative if loss_mask is None else is_negative & loss_mask).any()):
        raise DataError(f"{name} has values below 0: a weight has no sign; the sign of a token is its advantage's")


def _check_devices(device: torch.device, tensors: dict[str, Tensor | None]) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise DataError(f"{name} is on {tensor.device} and the logits on {device}: move it with .to(logits.device)")


def _check_advantages_per(advantages_per: str, advantages: Tensor, lengths: Mapping[str, int]) -> None:
    if advantages_per not in lengths:
        raise ConfigError(f'advantages_per={advantages_per!r} must be "sample", "token" or None')
    if advantages.shape != (lengths[advantages_per],):
        raise DataError(
            f'advantages {tuple(advantages.shape)} with advantages_per="{advantages_per}" must be [{lengths[advantages_per]}]'
        )


def _meaning_of_advantages(
    advantages: Tensor, num_tokens: int, cu_seqlens: Tensor, document_lengths: Sequence[int] | None, ranks_must_agree: bool
) -> str:
    """ "sample" or "token". It reads no value of the device: so a CUDA graph can hold the call."""
    num_documents = cu_seqlens.numel() - 1
    if advantages.shape == (num_documents,) and num_documents == num_tokens:
        ranks_must_agree = ranks_must_agree and num_documents > 0
        # Of one token and one sample both readings are the same number.
        is_the_same = num_documents <= 1 or _have_one_token_each(cu_seqlens, document_lengths)
        if is_the_same and not ranks_must_agree:
            return "sample"
        unknown = "cu_seqlens is on the device, where a loss reads no values"
        why = unknown if is_the_same is None else "not every document has exactly one token"
        why = "documents may have tokens on other ranks" if ranks_must_agree else why
        raise DataError(
            f"advantages [{num_tokens}] fit both {num_documents} samples and {num_tokens} tokens, and {why}: pass "
            'advantages_per="sample" or "token"'
        )
    for meaning, length in (("sample", num_documents), ("token", num_tokens)):
        if advantages.shape == (length,):
            return meaning
    raise DataError(
        f"advantages {tuple(advantages.shape)} must be [N={num_documents}], one a sample, or [T={num_tokens}], one a token"
    )


def _have_one_token_each(cu_seqlens: Tensor, document_lengths: Sequence[int] | None) -> bool | None:
    """None: the host does not know."""
    if not cu_seqlens.is_cuda:
        return bool((cu_seqlens.diff() == 1).all())
    return None if document_lengths is None else all(type(length) is int and length == 1 for length in document_lengths)


def checked_tensors(
    loss: PolicyLoss, log_probs: Tensor, inputs: LossInputs, kl_coefficient: float
) -> dict[str, Tensor]:  # [T] each
    """The tensors that must be finite at every unmasked token, by their names in messages."""
    dtype = log_probs.dtype
    tensors = {"log_probs": log_probs, "old_log_probs": inputs.anchor(log_probs), "advantages": inputs.token_advantages(dtype)}
    # In the dtype of the loss: 1e300 is finite only in float64.
    if inputs.importance_weights is not None:
        tensors["importance_weights"] = inputs.importance_weights.to(dtype)
    if inputs.compares_with_sampler:
        tensors["rollout_log_probs"] = given(inputs.rollout_log_probs).to(dtype)
    if kl_coefficient:
        tensors["ref_log_probs"] = given(inputs.ref_log_probs).to(dtype)
    if inputs.sampling_support is not None and inputs.entropy is not None:  # a logit outside the set is in it, and not in log_probs
        tensors["entropy"] = inputs.entropy
    return tensors | further_inputs(loss, inputs, dtype)


def further_inputs(loss: PolicyLoss, inputs: LossInputs, dtype: torch.dtype) -> dict[str, Tensor]:  # [T] each
    """The further inputs that the loss declares, without what the sums give: counts of a sequence-level loss, and means."""
    passed = [name for name in loss.needs if name not in ("token_counts", "mean_log_ratio")]
    vectors = {name: given(getattr(inputs, name)).to(dtype) for name in passed}
    if "token_counts" in loss.needs and loss.level != "sequence":
        vectors["token_counts"] = spread(given(inputs.token_counts).to(dtype), inputs.token_documents)
    return {name: vectors[name] for name in loss.needs if name in vectors}


def with_token_counts(loss: PolicyLoss, inputs: LossInputs, cp_group: Group) -> LossInputs:
    """The inputs with the counts that the loss needs for its tokens; a sequence-level loss has them after the reduction.

    Communication: where the caller gave none, one all-reduce of [N] over cp.
    """
    if "token_counts" not in loss.needs or loss.level == "sequence" or inputs.token_counts is not None:
        return inputs
    return replace(inputs, token_counts=all_reduce_sum(document_sums(inputs.loss_mask, inputs.cu_seqlens), cp_group))


@dataclass(frozen=True, slots=True)
class DocumentSums:
    """Sums of each document over all cp ranks, [N] float64 each; None where the loss does not need it."""

    num_nonfinite: Tensor
    counts: Tensor
    means: dict[str, Tensor]  # mean_columns in the dtype of log_probs
    importance: Tensor | None
    advantages: Tensor | None  # one per document, from [T] input
    advantages_vary: Tensor | None  # [N] bool
    is_miscounted: Tensor | None  # [N] bool: the caller's token_counts differ


def sum_columns(loss: PolicyLoss, inputs: LossInputs) -> tuple[str, ...]:
    """The k columns of the reduced [N, k] tensor. Their order depends only on settings, so it is the same on every rank."""
    columns = [*FIRST_COLUMNS, *mean_columns(loss)]
    if loss.level == "sequence":
        if inputs.importance_weights is not None:
            columns.append("importance")
        if inputs.advantages_per == "token":
            columns += ["advantages", "squared_advantages"]
    return tuple(columns)


def mean_columns(loss: PolicyLoss) -> tuple[str, ...]:
    """The vectors whose mean over a sample's tokens the loss needs."""
    if loss.level != "sequence":
        return ("log_ratio",) if loss.reads_means else ()
    further = (name for name in loss.needs if name != "token_counts")
    return ("log_ratio", *(("log_probs",) if loss.takes_log_probs else ()), *further)


def vectors_of_samples(loss: PolicyLoss, sums: DocumentSums, dtype: torch.dtype) -> dict[str, Tensor]:  # [N] each
    """The further inputs that a sequence-level loss declares: the counts, and the means of the others."""
    return {name: sums.counts.to(dtype) if name == "token_counts" else sums.means[name] for name in loss.needs}


def mean_of_documents(sums: Tensor, counts: Tensor, dtype: torch.dtype) -> Tensor:  # [N]
    """sums / counts; 0 for a fully masked document."""
    return torch.where(counts > 0, sums / counts.clamp(min=1), 0.0).to(dtype)


def read_sums(
    loss: PolicyLoss,
    reduced: Tensor,  # [N, k] float64, in the order of sum_columns
    inputs: LossInputs,
    dtype: torch.dtype,
) -> DocumentSums:
    """Reads the reduced columns by name and computes means and errors from them. dtype: of the log-probabilities and the means."""
    column = dict(zip(sum_columns(loss, inputs), reduced.unbind(-1), strict=True))
    num_nonfinite, counts = column["num_nonfinite"], column["counts"]
    mean_advantages = vary = is_miscounted = None
    # Reading a flag on CUDA would synchronise. So a wrong document counts as non-finite, which stops the step before the optimiser.
    if "advantages" in column:
        mean_advantages = column["advantages"] / counts.clamp(min=1)
        mean_square = column["squared_advantages"] / counts.clamp(min=1)
        vary = (mean_square - mean_advantages.square()) > ADVANTAGE_VARIATION**2 * mean_square
        num_nonfinite = num_nonfinite + torch.where(vary, counts, 0.0)
    if inputs.token_counts is not None:
        is_miscounted = inputs.token_counts != counts
        num_nonfinite = num_nonfinite + torch.where(is_miscounted, counts.clamp(min=1), 0.0)
    return DocumentSums(
        num_nonfinite=num_nonfinite,
        counts=counts,
        means={name: mean_of_documents(column[name], counts, dtype) for name in mean_columns(loss)},
        importance=column.get("importance"),
        advantages=mean_advantages,
        advantages_vary=vary,
        is_miscounted=is_miscounted,
    )


def has_bad_data(sums: DocumentSums) -> bool:
    """Whether a document cannot be trained: bad_data words it. After the all-reduce the answer is the same on all cp ranks, so
    that these raise together. On CUDA nothing is read, and the answer is False."""
    return not sums.num_nonfinite.is_cuda and bool((sums.num_nonfinite > 0).any())


def is_any(is_bad: Tensor) -> bool:
    """Of results of a loss that are not finite. On CUDA nothing is read, and the answer is False."""
    return not is_bad.is_cuda and bool(is_bad.any())
