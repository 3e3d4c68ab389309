"""Defines what a loss is given, and checks it: the keyword arguments, the tensors of a micro-batch, their sums over documents.

Keyword arguments are frozen objects, and settings that are resolved for one loss. Tensors are put into one form; no value is
changed, and masked values are not read. What the ranks of a document hold together is checked after the one reduction over cp,
which both twins of the loss (reduce_torch, reduce_triton) need: its columns and their use are here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from megatron_rl.aggregation import check_counts
from megatron_rl.config import (
    DEFAULT_MAX_LOGITS_BYTES,
    Backend,
    CorrectionSettings,
    ImportanceCorrection,
    KLEstimator,
    PolicyMetrics,
    counted_twice,
)
from megatron_rl.corrections import Correction
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.layout.groups import Group, RankAgreement
from megatron_rl.layout.packing import document_ids, spread
from megatron_rl.loss_hub import PolicyLoss


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOptions:
    """The keyword arguments that policy_loss and linear_policy_loss share.

    clip_ratio_low, clip_ratio_high: the ratio is clipped at 1 minus and 1 plus these; None: the loss's default.
    loss_parameters: values of the parameters that the loss declares, by name; a missing one keeps its default.
    temperature: the logits are divided by it: the sampling temperature of the rollouts.
    vocab_size: real columns over all tp ranks; the columns after them are padding. None: all columns are real.
    token_counts [N]: unmasked tokens of each sample over all cp ranks; they are checked. None: they are counted.
    tp_group, cp_group: None: those of megatron.core.parallel_state, else one rank.
    metrics: "none", "basic" or "with_entropy".
    backend: "auto", "torch" or "triton".
    advantages_per: "sample" or "token"; None: read from the shape. Where N == T it is needed, unless each document has one token
        and cu_seqlens lies on the host, or document_lengths say so: a loss never reads values of the device.
    importance_weights [T]: constants that multiply a token's part of the loss.
    ref_log_probs [T]: of the reference policy in nats, for the KL term.
    rollout_log_probs [T]: of the sampling engine in nats, for losses that need them.
    correction: how the gap between the sampler's policy and the old one is corrected; it needs rollout_log_probs. None: not.
    kl_coefficient, entropy_coefficient: 0 turns the term off.
    kl_estimator: "k1", "k2", "k3", "k3+" or "unbiased"; ops/ratios.py has the formulas.
    regularizer_weights [N]: from aggregation.regularizer_weights; needed where a coefficient is not 0.
    check_ranks: whether tp and cp ranks compare their arguments; None: where they communicate through the CPU.
    """

    clip_ratio_low: float | None = None
    clip_ratio_high: float | None = None
    loss_parameters: Mapping[str, float] = field(default_factory=dict)
    temperature: float = 1.0
    vocab_size: int | None = None
    token_counts: Tensor | None = None
    tp_group: Group | None = None
    cp_group: Group | None = None
    metrics: str = PolicyMetrics.NONE
    backend: str = Backend.AUTO
    advantages_per: str | None = None
    importance_weights: Tensor | None = None
    ref_log_probs: Tensor | None = None
    rollout_log_probs: Tensor | None = None
    correction: CorrectionSettings | None = None
    kl_coefficient: float = 0.0
    kl_estimator: str = KLEstimator.K3
    entropy_coefficient: float = 0.0
    regularizer_weights: Tensor | None = None
    check_ranks: bool | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LogitsLossOptions(LossOptions):
    """The keyword arguments of policy_loss: those of LossOptions, and

    inplace: the gradient is written over the logits, by backward or, with loss_scale, by forward; any later use of them raises.
    loss_scale: the product of all factors of `.loss` before backward. Where a loss's coefficients are known row by row, one Triton
        kernel then makes the gradient in forward, with two thirds of the memory traffic (docs/kernels.md, "One kernel, 4 bytes").
        Out of place it is kept until backward. `.loss` can be differentiated once, and backward checks the factor: another one
        raises on the CPU, and puts NaN into the gradient on CUDA. None: backward makes the gradient, with any factor.
    """

    inplace: bool = False
    loss_scale: Tensor | float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearLossOptions(LossOptions):
    """The keyword arguments of linear_policy_loss; its docstring explains them."""

    max_logits_bytes: int = DEFAULT_MAX_LOGITS_BYTES
    sequence_parallel: bool = False
    fp32_logits: bool = False
    scaled_exp: bool = False
    document_lengths: Sequence[int] | None = None
    loss_scale: Tensor | float | None = None
    return_log_probs: bool = True


@dataclass(frozen=True, slots=True)
class LossSettings:
    """The settings of a LossOptions, checked against the declaration of the loss."""

    clip: tuple[float, float] | None  # low, high; None: the loss has no clip
    parameters: dict[str, float]  # all that the loss declares, in its order
    kl_coefficient: float
    kl_estimator: str
    entropy_coefficient: float
    metrics: str
    tp_group: Group
    cp_group: Group
    backend: Backend  # resolved: TORCH or TRITON
    check_ranks: bool | None

    @property
    def keywords(self) -> dict[str, float]:
        """The keyword arguments of the loss's function."""
        clip = {} if self.clip is None else {"clip_ratio_low": self.clip[0], "clip_ratio_high": self.clip[1]}
        return clip | self.parameters

    @property
    def needs_entropy(self) -> bool:
        """Whether a coefficient or a metric needs the entropy, which costs a pass over the row."""
        return self.entropy_coefficient != 0 or self.metrics == PolicyMetrics.WITH_ENTROPY

    def agreement(self) -> RankAgreement:
        """A RankAgreement for a check that may fail on one rank only, so that all ranks raise. Communication: as RankAgreement."""
        return RankAgreement(self.tp_group, self.cp_group, check_ranks=self.check_ranks)

    def policy_alone(self) -> LossSettings:
        return replace(self, kl_coefficient=0.0, entropy_coefficient=0.0, metrics=PolicyMetrics.NONE)


def resolve_options(loss: PolicyLoss, options: LossOptions, tp_group: Group, cp_group: Group, backend: Backend) -> LossSettings:
    """The settings. Raises ConfigError for a value outside its range, and for a missing tensor that the loss or a term needs."""
    clip = loss.clip_bounds(
        *(
            None if value is None else _number(name, value)
            for name, value in (("clip_ratio_low", options.clip_ratio_low), ("clip_ratio_high", options.clip_ratio_high))
        )
    )
    coefficients = {"kl_coefficient": options.kl_coefficient, "entropy_coefficient": options.entropy_coefficient}
    for name, value in coefficients.items():
        coefficients[name] = _number(name, value)
        if not 0 <= coefficients[name] < math.inf:
            raise ConfigError(f"{name}={value} must be a finite number of at least 0; 0 turns the term off")
    if not isinstance(options.metrics, str) or options.metrics not in set(PolicyMetrics):
        raise ConfigError(f"metrics={options.metrics!r} is not one of {', '.join(PolicyMetrics)}")
    if options.kl_estimator not in tuple(KLEstimator):
        raise ConfigError(f"kl_estimator={options.kl_estimator!r} is not one of {', '.join(KLEstimator)}")
    if options.correction is not None:
        _check_correction(loss, options.correction, options.rollout_log_probs)
    if coefficients["kl_coefficient"] and options.ref_log_probs is None:
        raise ConfigError(f"kl_coefficient={options.kl_coefficient} needs ref_log_probs [T]; pass them or set it to 0")
    if any(coefficients.values()) and options.regularizer_weights is None:
        raise ConfigError(
            "kl_coefficient and entropy_coefficient need regularizer_weights [N]: pass "
            "aggregation.regularizer_weights(token_counts, totals), the sample_mean weights of the step"
        )
    for name in loss.inputs_needed:
        if getattr(options, name) is None:
            raise ConfigError(f"policy loss {loss.name!r} needs {name} [T]; pass them, or choose another loss")
    parameters = loss.resolve_parameters(options.loss_parameters)
    return LossSettings(
        clip=clip,
        parameters=parameters,
        kl_coefficient=coefficients["kl_coefficient"],
        kl_estimator=options.kl_estimator,
        entropy_coefficient=coefficients["entropy_coefficient"],
        metrics=options.metrics,
        tp_group=tp_group,
        cp_group=cp_group,
        backend=backend,
        check_ranks=options.check_ranks,
    )


def _check_correction(loss: PolicyLoss, correction: CorrectionSettings, rollout_log_probs: Tensor | None) -> None:
    if not isinstance(correction, CorrectionSettings):
        raise ConfigError(f"correction={correction!r} must be a CorrectionSettings, as in CorrectionSettings(kind='tis')")
    problems = list(correction.problems())
    if problems:
        raise ConfigError(problems)
    if correction.is_on and rollout_log_probs is None:
        raise ConfigError("a correction compares with the sampler and needs rollout_log_probs [T]: pass them, or correction=None")
    if correction.kind != ImportanceCorrection.NONE and loss.anchor == "rollout":
        raise ConfigError(counted_twice(correction.kind, loss.name))


def _number(name: str, value: object) -> float:
    """The value as a float; inf where float32, in which the loss computes, cannot hold it. Raises ConfigError for no number."""
    if isinstance(value, bool) or not isinstance(value, int | float | Real):
        raise ConfigError(f"{name}={value!r} must be a number")
    number: Any = value  # numbers.Real has no type for its comparisons
    return float(number) if abs(number) <= torch.finfo(torch.float32).max or number != number else math.copysign(math.inf, number)


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
    correction: CorrectionSettings | None  # None: no correction, or a known one
    known_correction: Correction | None = None  # is in importance_weights already
    document_numbers: tuple[int, ...] | None = None  # N, the caller's numbers, for messages; None: 0 to N - 1

    @property
    def num_documents(self) -> int:
        return self.cu_seqlens.numel() - 1

    @property
    def compares_with_sampler(self) -> bool:
        """Whether rollout_log_probs are in a correction, so that they must be finite."""
        return self.correction is not None or self.known_correction is not None

    @functools.cached_property
    def token_documents(self) -> Tensor:
        """[T] int64, N on padding. Only the torch twin needs it."""
        return document_ids(self.cu_seqlens, self.loss_mask.numel())


def is_known_on_policy(loss: PolicyLoss, inputs: LossInputs) -> bool:
    """Whether the coefficients are known in advance: a sequence-level loss of only the log-ratio, which is 0 on-policy."""
    is_of_ratio = not loss.takes_log_probs and not loss.needs and inputs.correction is None
    return loss.level == "sequence" and inputs.old_log_probs is None and is_of_ratio


def prepare_inputs(
    loss: PolicyLoss,
    options: LossOptions,
    cp_group: Group,
    num_tokens: int,
    device: torch.device,
    dtype: torch.dtype,
    old_log_probs: Tensor | None,
    advantages: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    token_weights: Tensor,
) -> LossInputs:
    """Checks shapes and dtypes, and finds out whether `advantages` are per sample or per token.

    dtype: that of the log-probabilities and of the loss; weights must be finite in it.
    Raises DataError or ConfigError, which name the argument.
    """
    old_log_probs = options.rollout_log_probs if loss.anchor == "rollout" else old_log_probs
    # All cp ranks reduce tensors whose shape depends on what advantages are.
    ranks_must_agree = loss.level == "sequence" and cp_group.size() > 1
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
    advantages_per = _meaning_of_advantages(advantages, num_tokens, cu_seqlens, options, cp_group, ranks_must_agree)
    # Counts and weights are small and may come from the host: they are copied to the logits' device.
    cu_seqlens, token_weights = (value.to(device, non_blocking=True) for value in (cu_seqlens, token_weights))
    token_counts, regularizer_weights = (
        None if value is None else value.to(device, non_blocking=True) for value in (token_counts, regularizer_weights)
    )
    _check_devices(device, {"loss_mask": loss_mask, "advantages": advantages, **per_token})
    return LossInputs(
        old_log_probs=old_log_probs,
        advantages=advantages,
        advantages_per=advantages_per,
        loss_mask=loss_mask.bool() & (torch.arange(num_tokens, device=device, dtype=cu_seqlens.dtype) < cu_seqlens[-1]),
        cu_seqlens=cu_seqlens,
        token_weights=token_weights,
        token_counts=token_counts,
        importance_weights=options.importance_weights,
        ref_log_probs=options.ref_log_probs,
        rollout_log_probs=options.rollout_log_probs,
        regularizer_weights=regularizer_weights,
        correction=options.correction if options.correction is not None and options.correction.is_on else None,
    )


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


def _check_devices(device: torch.device, tensors: dict[str, Tensor | None]) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise DataError(f"{name} is on {tensor.device} and the logits on {device}: move it with .to(logits.device)")


def _meaning_of_advantages(
    advantages: Tensor, num_tokens: int, cu_seqlens: Tensor, options: LossOptions, cp_group: Group, ranks_must_agree: bool
) -> str:
    """ "sample" or "token". It reads no value of the device: so a CUDA graph can hold the call."""
    num_documents, advantages_per = cu_seqlens.numel() - 1, options.advantages_per
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
        ranks_must_agree = ranks_must_agree and num_documents > 0
        # Of one token and one sample both readings are the same number.
        is_the_same = num_documents <= 1 or _have_one_token_each(cu_seqlens, options, cp_group)
        if is_the_same and not ranks_must_agree:
            return "sample"
        unknown = "cu_seqlens is on the device, where a loss reads no values"
        why = unknown if is_the_same is None else "not every document has exactly one token"
        why = "documents may have tokens on other ranks" if ranks_must_agree else why
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


def _have_one_token_each(cu_seqlens: Tensor, options: LossOptions, cp_group: Group) -> bool | None:
    """None: the host does not know."""
    if not cu_seqlens.is_cuda:
        return bool((cu_seqlens.diff() == 1).all())
    lengths = options.document_lengths if isinstance(options, LinearLossOptions) and cp_group.size() == 1 else None
    return None if lengths is None else all(type(length) is int and length == 1 for length in lengths)


# Relative standard deviation above which a sample's [T] advantages vary. For equal numbers float64 sums give less than 1e-7.
ADVANTAGE_VARIATION = 1e-5
# The columns that every loss has.
FIRST_COLUMNS = ("num_nonfinite", "counts")


@dataclass(frozen=True, slots=True)
class DocumentStats:
    """Sums of each document over all cp ranks, [N] float64 each; None where the loss does not need it."""

    num_nonfinite: Tensor
    counts: Tensor
    correction_sums: dict[str, Tensor]  # those of corrections.correction_columns
    means: dict[str, Tensor]  # mean_columns in the dtype of log_probs; empty unless the loss is sequence-level
    importance: Tensor | None
    advantages: Tensor | None  # one per document, from [T] input
    advantages_vary: Tensor | None  # [N] bool
    is_miscounted: Tensor | None  # [N] bool: the caller's token_counts differ


def stats_columns(loss: PolicyLoss, inputs: LossInputs) -> tuple[str, ...]:
    """The k columns of the reduced [N, k] tensor. Their order depends only on settings, so it is the same on every rank."""
    columns = list(FIRST_COLUMNS)
    if loss.level == "sequence":
        columns += mean_columns(loss)
        if inputs.importance_weights is not None:
            columns.append("importance")
        if inputs.advantages_per == "token":
            columns += ["advantages", "squared_advantages"]
    return tuple(columns) if inputs.correction is None else (*columns, *inputs.correction.columns)


def mean_columns(loss: PolicyLoss) -> tuple[str, ...]:
    """The vectors whose mean over a sample's tokens a sequence-level loss needs."""
    return ("log_ratio", *(("log_probs",) if loss.takes_log_probs else ()), *loss.needs)


def mean_of_documents(sums: Tensor, counts: Tensor, dtype: torch.dtype) -> Tensor:  # [N]
    """sums / counts; 0 for a fully masked document."""
    return torch.where(counts > 0, sums / counts.clamp(min=1), 0.0).to(dtype)


def read_stats(
    loss: PolicyLoss,
    reduced: Tensor,  # [N, k] float64, in the order of stats_columns
    inputs: LossInputs,
    dtype: torch.dtype,
) -> DocumentStats:
    """Reads the reduced columns by name and computes means and errors from them. dtype: of the log-probabilities and the means."""
    columns = stats_columns(loss, inputs)
    sums = dict(zip(columns, reduced.unbind(-1), strict=True))
    num_nonfinite, counts = sums["num_nonfinite"], sums["counts"]
    mean_advantages = vary = is_miscounted = None
    # Reading a flag on CUDA would synchronise. So a wrong document counts as non-finite, which stops the step before the optimiser.
    if "advantages" in sums:
        mean_advantages = sums["advantages"] / counts.clamp(min=1)
        mean_square = sums["squared_advantages"] / counts.clamp(min=1)
        vary = (mean_square - mean_advantages.square()) > ADVANTAGE_VARIATION**2 * mean_square
        num_nonfinite = num_nonfinite + torch.where(vary, counts, 0.0)
    if inputs.token_counts is not None:
        is_miscounted = inputs.token_counts != counts
        num_nonfinite = num_nonfinite + torch.where(is_miscounted, counts.clamp(min=1), 0.0)
    means = {name: mean_of_documents(sums[name], counts, dtype) for name in mean_columns(loss)} if loss.level == "sequence" else {}
    correction_sums = {} if inputs.correction is None else {name: sums[name] for name in inputs.correction.columns}
    return DocumentStats(
        num_nonfinite, counts, correction_sums, means, sums.get("importance"), mean_advantages, vary, is_miscounted
    )


def checked_tensors(
    loss: PolicyLoss, log_probs: Tensor, inputs: LossInputs, kl_coefficient: float
) -> dict[str, Tensor]:  # [T] each
    """The tensors that must be finite at every unmasked token, by their names in messages."""
    dtype = log_probs.dtype
    old_log_probs = log_probs if inputs.old_log_probs is None else inputs.old_log_probs.to(dtype)
    advantages = inputs.advantages.to(dtype)
    if inputs.advantages_per == "sample":
        advantages = spread(advantages, inputs.token_documents)
    tensors = {"log_probs": log_probs, "old_log_probs": old_log_probs, "advantages": advantages}
    # In the dtype of the loss: 1e300 is finite only in float64.
    if inputs.importance_weights is not None:
        tensors["importance_weights"] = inputs.importance_weights.to(dtype)
    if inputs.compares_with_sampler:
        tensors["rollout_log_probs"] = given(inputs.rollout_log_probs).to(dtype)
    if kl_coefficient:
        tensors["ref_log_probs"] = given(inputs.ref_log_probs).to(dtype)
    return tensors | further_inputs(loss, inputs, dtype)


def further_inputs(loss: PolicyLoss, inputs: LossInputs, dtype: torch.dtype) -> dict[str, Tensor]:  # [T] each
    """The further inputs that the loss declares."""
    return {name: given(getattr(inputs, name)).to(dtype) for name in loss.needs}


def raise_on_bad_data(
    loss: PolicyLoss,
    stats: DocumentStats,
    log_probs: Tensor,  # [T]
    inputs: LossInputs,
    kl_coefficient: float,
    results: dict[str, Tensor] | None = None,  # [T] each: the results of the loss
) -> None:
    """Raises DataError for non-finite unmasked tokens, for advantages that vary inside a sample and for token_counts that differ
    from the mask's. On CUDA it reads nothing.

    Call it after the all-reduce: its numbers are those of all cp ranks, so that these raise together.
    """
    if stats.num_nonfinite.is_cuda or not bool((stats.num_nonfinite > 0).any()):
        return
    if stats.is_miscounted is not None and bool(stats.is_miscounted.any()):
        document = int(stats.is_miscounted.nonzero()[0])
        told = given(inputs.token_counts)[document].item()
        raise DataError(
            f"token_counts says {told:g} for document {_named(document, inputs)}, and loss_mask "
            f"has {int(stats.counts[document])} unmasked tokens over all context-parallel ranks: pass count_step's counts, or None"
        )
    if stats.advantages_vary is not None and bool(stats.advantages_vary.any()):
        document = int(stats.advantages_vary.nonzero()[0])
        raise DataError(
            f"advantages vary inside document {_named(document, inputs)}: a sequence-level loss takes one advantage per sample; "
            "average them in the rollout, or use a token-level loss (grpo)"
        )
    document = int((stats.num_nonfinite > 0).nonzero()[0])
    here = inputs.loss_mask & (inputs.token_documents == document)
    tensors = checked_tensors(loss, log_probs, inputs, kl_coefficient)
    # A result is named only where its inputs are finite.
    found = [
        [name for name, tensor in some.items() if bool((here & ~torch.isfinite(tensor)).any())] for some in (tensors, results or {})
    ]
    names = found[0] or found[1]
    where = f"in {', '.join(names)}" if names else "on another context-parallel rank"
    raise DataError(
        f"document {_named(document, inputs)} of the micro-batch has {int(stats.num_nonfinite[document])} unmasked tokens with a "
        f"value that is not finite, {where}; {int((stats.num_nonfinite > 0).sum())} documents are affected. A label outside the "
        "vocabulary gives -inf log_probs; mask the token or drop the sample"
    )


def _named(document: int, inputs: LossInputs) -> int:
    return document if inputs.document_numbers is None else inputs.document_numbers[document]


def raise_on_nonfinite(loss: PolicyLoss, is_bad: Tensor) -> None:
    """Raises DataError where the loss returned non-finite results for finite inputs. On CUDA it reads nothing."""
    if not is_bad.is_cuda and bool(is_bad.any()):
        raise DataError(f"policy loss {loss.name!r} returned values or derivatives that are not finite, from finite inputs")
