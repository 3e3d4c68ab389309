"""The records of a loss: its options, the tensors of one micro-batch, what it returns, and what it sums over each document.

No value is changed, and masked values are not read. Both reducers, reduce_torch and reduce_triton, write the same columns into the
one reduction over cp. What the ranks of a document hold together is checked after it, so that all of them raise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_rl.config import DEFAULT_KL_ESTIMATOR, PolicyLossConfig, PolicyMetrics
from megatron_rl.count import check_counts
from megatron_rl.declare import PolicyLoss
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.layout.agreement import RankAgreement
from megatron_rl.layout.groups import SINGLE, Group, document_ids, resolve_group, spread
from megatron_rl.layout.sampling_support import SamplingSupport
from megatron_rl.losses.corrections import Correction, CorrectionSettings, check_correction
from megatron_rl.losses.distillation import DistillationSettings, check_distillation
from megatron_rl.losses.kl import KL_ESTIMATORS, KLEstimator
from megatron_rl.metrics.policy import PolicyStatistics
from megatron_rl.ops.backends import resolve_backend
from megatron_rl.ops.distribution import Teacher, compare_teachers
from megatron_rl.ops.linear_head import HeadOptions
from megatron_rl.ops.scale import AssumedScale
from megatron_rl.ops.support import compare_supports

# Relative standard deviation above which the advantages of a sample vary. For equal numbers float64 sums give less than 1e-7.
ADVANTAGE_VARIATION = 1e-5
# The columns that every loss has.
FIRST_COLUMNS = ("num_nonfinite", "counts")


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOptions(HeadOptions):
    """The keyword arguments of policy_loss, linear_policy_loss and loss_of_log_probs that are no tensors of a micro-batch. A call
    that has no use for one refuses it. HeadOptions says what those of a head mean.

    clip_ratio_low, clip_ratio_high: the ratio is clipped at 1 minus and 1 plus these; None: the loss's default.
    loss_parameters: values of the parameters that the loss declares, by name; a missing one keeps its default.
    tp_group, cp_group: a call without one, or with None, takes the group of megatron.core.parallel_state, else one rank.
    metrics: "none", "basic" or "with_entropy".
    correction: how the gap between the sampler's policy and the old one is corrected; it needs rollout_log_probs. None: not.
    kl_coefficient, entropy_coefficient: 0 turns the term off.
    kl_estimator: a registered estimator of KL(policy, reference), or module.function.
    distillation: of the term that compares with a teacher; it needs teacher or teacher_log_probs. None: there is none.
    check_ranks: whether tp and cp ranks compare their arguments; None: where they communicate through the CPU.
    loss_scale: the product of all factors of `.loss` before backward. None: backward makes the gradient, with any factor.
        From logits: where a loss's coefficients are known row by row, one Triton kernel then makes the gradient in forward, with
        two thirds of the memory traffic (docs/kernels.md, "One kernel, 4 bytes"). Out of place it is kept until backward. `.loss`
        can be differentiated once, and backward checks the factor: another one raises on the CPU, and puts NaN into the gradient
        on CUDA. An AssumedScale is for a caller who does not know the factor: the last one is assumed, and backward mends the
        gradient of another. linear_policy_loss says what it does there.
    inplace: of policy_loss: the gradient is written over the logits, by backward or, with loss_scale, by forward. Another backward
        that needs the logits then raises. A later read of them finds the gradient, and nothing raises: take an entropy or a second
        loss before.
    max_logits_bytes, sequence_parallel, fp32_logits: of linear_policy_loss.
    """

    clip_ratio_low: float | None = None
    clip_ratio_high: float | None = None
    loss_parameters: Mapping[str, float] = field(default_factory=dict)
    cp_group: Group = SINGLE
    metrics: str = PolicyMetrics.NONE
    correction: CorrectionSettings | None = None
    kl_coefficient: float = 0.0
    kl_estimator: str = DEFAULT_KL_ESTIMATOR
    entropy_coefficient: float = 0.0
    distillation: DistillationSettings | None = None
    check_ranks: bool | None = None
    loss_scale: Tensor | float | AssumedScale | None = None
    inplace: bool = False

    @property
    def estimator(self) -> KLEstimator | None:
        """None: there is no KL term."""
        return KL_ESTIMATORS[self.kl_estimator] if self.kl_coefficient else None

    def keywords(self, loss: PolicyLoss) -> dict[str, float]:
        """The keyword arguments of the loss's function: its clip and its parameters."""
        clip = loss.clip_bounds(self.clip_ratio_low, self.clip_ratio_high)
        parameters = loss.resolve_parameters(self.loss_parameters)
        return parameters if clip is None else {"clip_ratio_low": clip[0], "clip_ratio_high": clip[1]} | parameters

    def needs_entropy(self, loss: PolicyLoss) -> bool:
        """Whether the loss, a coefficient or a metric needs the entropy, which costs a pass over the row."""
        return loss.needs_entropy or self.entropy_coefficient != 0 or self.metrics == PolicyMetrics.WITH_ENTROPY

    def refuse(self, names: tuple[str, ...], why: str) -> None:
        """Raises ConfigError for the first of these options that is not at its default."""
        for option in fields(self):
            if option.name in names and getattr(self, option.name) != option.default:
                raise ConfigError(f"{option.name}={getattr(self, option.name)!r} {why}; leave it out")


def agreement_of(keywords: dict[str, Any]) -> RankAgreement | nullcontext[None]:
    """Encloses all checks of a call, so that an error of one rank is named on all; one rank has nobody to compare with. The groups
    are then those of the launch."""
    tp_group, cp_group = (resolve_group(keywords.get(f"{name}_group"), name) for name in ("tp", "cp"))
    keywords |= {"tp_group": tp_group, "cp_group": cp_group}
    if tp_group.size() == cp_group.size() == 1:
        return nullcontext()
    return RankAgreement(tp_group, cp_group, check_ranks=keywords.get("check_ranks"))


def options_of(config: PolicyLossConfig) -> dict[str, Any]:
    """The keyword arguments of a call that the settings give, for every micro-batch of a run."""
    same_name = ("clip_ratio_low", "clip_ratio_high", "loss_parameters", "kl_coefficient", "kl_estimator", "entropy_coefficient")
    return {
        **{name: getattr(config, name) for name in same_name},
        "temperature": config.policy_temperature,
        "metrics": config.policy_metrics,
        "backend": config.policy_loss_backend,
        "correction": CorrectionSettings.of(config),
        "distillation": DistillationSettings.of(config),
    }


def options_and_tensors(keywords: Mapping[str, Any]) -> tuple[LossOptions, dict[str, Any]]:
    """The options of a call, and the keywords of LossBatch. Raises TypeError for an unknown one."""
    tensors = {name: value for name, value in keywords.items() if name in OPTIONAL_FIELDS}
    return LossOptions(**{name: value for name, value in keywords.items() if name not in tensors}), tensors


def checked_options(loss: PolicyLoss, options: LossOptions, batch: LossBatch, like_logits: Tensor) -> LossOptions:
    """The options as numbers, with the backend that runs, and without a correction that is off.

    Raises ConfigError for a value outside its range, and for a missing tensor that the loss or a term needs.
    """
    clip = {"clip_ratio_low": options.clip_ratio_low, "clip_ratio_high": options.clip_ratio_high}
    coefficients = {"kl_coefficient": options.kl_coefficient, "entropy_coefficient": options.entropy_coefficient}
    given = {name: value for name, value in clip.items() if value is not None} | coefficients
    numbers: dict[str, Any] = {name: number_of(name, value) for name, value in given.items()}
    options = replace(options, **numbers)
    loss.clip_bounds(options.clip_ratio_low, options.clip_ratio_high)
    for name, value in coefficients.items():
        if not 0 <= getattr(options, name) < math.inf:
            raise ConfigError(f"{name}={value} must be a finite number of at least 0; 0 turns the term off")
    if not isinstance(options.metrics, str) or options.metrics not in set(PolicyMetrics):
        raise ConfigError(f"metrics={options.metrics!r} is not one of {', '.join(PolicyMetrics)}")
    if options.kl_coefficient or options.kl_estimator != DEFAULT_KL_ESTIMATOR:  # an unknown name raises without a term too
        _ = KL_ESTIMATORS[str(options.kl_estimator)]
    if options.correction is not None:
        check_correction(loss, options.correction, batch.rollout_log_probs)
    if options.kl_coefficient and batch.ref_log_probs is None:
        raise ConfigError(f"kl_coefficient={options.kl_coefficient} needs ref_log_probs [T]; pass them or set it to 0")
    if (options.kl_coefficient or options.entropy_coefficient) and batch.regularizer_weights is None:
        raise ConfigError(
            "kl_coefficient and entropy_coefficient need regularizer_weights [N]: pass "
            "megatron_rl.regularizer_weights(token_counts, totals), the sample_mean weights of the step"
        )
    if options.distillation is not None:
        check_distillation(options.distillation, batch.teacher, batch.teacher_log_probs, batch.sampling_support)
    elif batch.teacher is not None or batch.teacher_log_probs is not None:
        raise ConfigError("a teacher has no effect without distillation=DistillationSettings(...): add it, or leave it out")
    for name in loss.inputs_needed:
        if getattr(batch, name) is None:
            raise ConfigError(f"policy loss {loss.name!r} needs {name} [T]; pass them, or choose another loss")
    return replace(
        options,
        loss_parameters=loss.resolve_parameters(options.loss_parameters),
        backend=resolve_backend(options.backend, like_logits),
        correction=options.correction if options.correction is not None and options.correction.is_on else None,
    )


def number_of(name: str, value: object) -> float:
    """The value as a float; inf where float32, in which the loss computes, cannot hold it. Raises ConfigError for no number."""
    if isinstance(value, bool) or not isinstance(value, int | float | Real):
        raise ConfigError(f"{name}={value!r} must be a number")
    number: Any = value  # numbers.Real has no type for its comparisons
    return float(number) if abs(number) <= torch.finfo(torch.float32).max or number != number else math.copysign(math.inf, number)


@dataclass(frozen=True)
class LossBatch:
    """The tensors of one micro-batch of this rank. Masked positions, and padding past cu_seqlens[-1], may hold anything.

    old_log_probs [T]: of the policy that the ratio compares with, in nats. None: on-policy.
    advantages: [N] or [T] as the caller gives them, [T] inside.
    loss_mask [T]: True on tokens that are trained; False on padding inside.
    cu_seqlens [N + 1]: bounds of this rank's slices of the documents.
    token_weights [N]: the weight of each token of a sample.
    token_counts [N]: unmasked tokens of each sample over all cp ranks; they are checked. None: they are counted.
    importance_weights [T]: constants that multiply a token's part of the loss.
    ref_log_probs [T]: of the reference policy in nats, for the KL term.
    rollout_log_probs [T]: of the sampling engine in nats, for a correction and losses that need them.
    regularizer_weights [N]: of the KL and entropy terms, from megatron_rl.regularizer_weights; needed where a coefficient is not 0.
    sampling_support: the ids that the sampler kept, a set for each row of the logits. log_probs, ratios, corrections and the KL
        term are then over these sets: give all log-probabilities so. The entropy is over the vocabulary. None: all ids.
    teacher_log_probs [T]: of a teacher at the labels, in nats. The advantage of a token gets coefficient (teacher's - anchor's).
    teacher: what a teacher gives for each row, for the divergence of `distillation`.
    Set inside: documents [T], the document of each token, N on padding; entropy [T] of the policy in training, where the loss reads
        it; divergences [T] from the teacher; correction, which importance_weights hold already.
    """

    old_log_probs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor
    cu_seqlens: Tensor
    token_weights: Tensor
    _: KW_ONLY
    token_counts: Tensor | None = None
    importance_weights: Tensor | None = None
    ref_log_probs: Tensor | None = None
    rollout_log_probs: Tensor | None = None
    regularizer_weights: Tensor | None = None
    sampling_support: SamplingSupport | None = None
    teacher_log_probs: Tensor | None = None
    teacher: Teacher | None = None
    documents: Tensor | None = None
    entropy: Tensor | None = None
    divergences: Tensor | None = None
    correction: Correction | None = None

    @property
    def num_documents(self) -> int:
        return self.cu_seqlens.numel() - 1

    def arguments(self) -> dict[str, Any]:
        """What a caller gives, by the names of the arguments of policy_loss."""
        return {name: getattr(self, name) for name in (*REQUIRED_FIELDS, *OPTIONAL_FIELDS)}

    def spread(self, per_document: Tensor) -> Tensor:  # [N] -> [T], 0 on padding
        return spread(per_document, not_none(self.documents))

    def anchor(self, log_probs: Tensor) -> Tensor:  # [T] -> [T] of its dtype
        """What the ratio compares log_probs with: themselves, where on-policy."""
        return log_probs if self.old_log_probs is None else self.old_log_probs.to(log_probs.dtype)

    def take(self, rows: slice | Tensor) -> LossBatch:  # [k] ascending
        """These rows alone, of the same documents, which may be cut anywhere; counts stay those of whole documents."""
        vectors: dict[str, Any] = {name: None if (vector := getattr(self, name)) is None else vector[rows] for name in TOKEN_FIELDS}
        if isinstance(rows, slice):
            cu_seqlens = (self.cu_seqlens - rows.start).clamp(0, rows.stop - rows.start)
        else:
            cu_seqlens = torch.searchsorted(rows, self.cu_seqlens.to(rows.dtype)).to(self.cu_seqlens.dtype)
        correction = None if self.correction is None else self.correction.of(rows)
        return replace(self, **vectors, cu_seqlens=cu_seqlens, correction=correction, sampling_support=None, teacher=None)


# [T] each, besides the advantages and the mask.
VECTORS = ("old_log_probs", "importance_weights", "ref_log_probs", "rollout_log_probs", "teacher_log_probs")
TOKEN_FIELDS = ("advantages", "loss_mask", "documents", "entropy", "divergences", *VECTORS)
DOCUMENT_FIELDS = ("token_weights", "token_counts", "regularizer_weights")
REQUIRED_FIELDS = ("old_log_probs", "advantages", "loss_mask", "cu_seqlens", "token_weights")
OPTIONAL_FIELDS = (*VECTORS[1:], *DOCUMENT_FIELDS[1:], "sampling_support", "teacher")


@dataclass(frozen=True, slots=True)
class PolicyLossOutput:
    """loss = policy_loss + kl_coefficient kl_loss - entropy_coefficient entropy + distillation is 0-d and differentiable, and has
    its own storage, because schedules divide it in place; the other fields are detached. kl_loss and entropy are None at
    coefficient 0, metrics is None at "none". entropy_per_token is there where the loss, a coefficient or a metric needs it."""

    loss: Tensor
    policy_loss: Tensor
    kl_loss: Tensor | None
    entropy: Tensor | None
    log_probs: Tensor  # [T]
    num_nonfinite: Tensor  # [N] int32
    metrics: PolicyStatistics | None
    correction: Correction | None = None  # None without a correction
    entropy_per_token: Tensor | None = None  # [T], in nats; 0 in masked rows
    distillation: Tensor | None = None  # with its coefficient; None without a teacher of rows
    divergences: Tensor | None = None  # [T] from this teacher; 0 in masked rows


class Coefficients(NamedTuple):
    """What a reducer computes beside the output."""

    log_probs: Tensor  # [T] d loss / d log_probs
    entropy: Tensor | None  # [T] d loss / d entropy
    sums: Tensor  # [N, k] float64, over all cp ranks
    divergences: Tensor | None = None  # [T] d loss / d divergences


def prepared(
    loss: PolicyLoss | None,  # None: a correction alone
    batch: LossBatch,  # as the caller gave it
    *,
    num_tokens: int,
    device: torch.device,
    dtype: torch.dtype,
    advantages_per: str | None = None,
) -> LossBatch:
    """The batch on the device with an advantage for each token; no padding is live. Raises DataError or ConfigError, which name the
    argument.

    dtype: of the log-probabilities and of the loss; weights must be finite in it.
    """
    if loss is not None and loss.anchor == "rollout":
        batch = replace(batch, old_log_probs=batch.rollout_log_probs)
    required = REQUIRED_FIELDS[1:]
    given = {name: getattr(batch, name) for name in (*required, *VECTORS, *DOCUMENT_FIELDS[1:])}
    given = {name: value for name, value in given.items() if value is not None or name in required}
    for name, value in given.items():
        if not isinstance(value, Tensor):
            raise DataError(f"{name} is {type(value).__name__}: pass a torch tensor")
    check_cu_seqlens(batch.cu_seqlens, num_tokens)
    check_loss_mask(batch.loss_mask, num_tokens)
    for length, letter, names in ((num_tokens, "T", VECTORS), (batch.num_documents, "N", DOCUMENT_FIELDS)):
        for name in names:
            if name in given:
                check_vector(name, given[name], letter, length)
    for name in ("advantages", *VECTORS, "token_weights", "regularizer_weights"):
        if name in given:
            check_is_real(name, given[name])
    check_weights("token_weights", batch.token_weights, dtype)
    check_weights("regularizer_weights", batch.regularizer_weights, dtype)
    if batch.token_counts is not None:
        check_counts("token_counts", batch.token_counts)
    is_per_sample = _are_per_sample(batch.advantages, advantages_per, num_tokens, batch.cu_seqlens)
    for name in ("loss_mask", "advantages", *VECTORS):
        if name in given and given[name].device != device:
            raise DataError(f"{name} is on {given[name].device} and the logits on {device}: move it with .to(logits.device)")
    # Counts and weights are small and may come from the host: they are copied to the logits' device.
    moved = {name: given[name].to(device, non_blocking=True) for name in ("cu_seqlens", *DOCUMENT_FIELDS) if name in given}
    cu_seqlens = moved["cu_seqlens"]
    loss_mask = batch.loss_mask.bool() & (torch.arange(num_tokens, device=device, dtype=cu_seqlens.dtype) < cu_seqlens[-1])
    check_weights("importance_weights", batch.importance_weights, dtype, loss_mask)
    batch = replace(batch, loss_mask=loss_mask, documents=document_ids(cu_seqlens, num_tokens), **moved)
    return replace(batch, advantages=batch.spread(batch.advantages)) if is_per_sample else batch


def compare_calls(
    agreement: RankAgreement | None, loss: PolicyLoss, options: LossOptions, batch: LossBatch, advantages: Tensor
) -> None:  # advantages: as the caller gave them
    """Adds to the agreement what ranks that compute one loss must have in common: over tp all of it; over cp the options and the
    [N] tensors."""
    if agreement is None or not agreement.is_active:
        return
    agreement.add("policy loss", loss.name)
    scale = options.loss_scale
    agreement.add("loss_scale", scale if scale is None or isinstance(scale, Real) else type(scale).__name__)
    for option in fields(options):
        if option.name not in ("tp_group", "cp_group", "check_ranks", "loss_scale"):
            agreement.add(option.name, getattr(options, option.name))
    compare_supports(agreement, batch.sampling_support, batch.loss_mask)
    compare_teachers(agreement, batch.teacher, batch.loss_mask)
    agreement.add("number of documents", batch.num_documents)
    agreement.add("cu_seqlens", batch.cu_seqlens, is_sliced=True)
    for name in VECTORS:
        vector = getattr(batch, name)  # masked values may be anything
        agreement.add(name, None if vector is None else torch.where(batch.loss_mask, vector, 0), is_sliced=True)
    is_per_token = advantages is batch.advantages
    agreement.add("advantages", torch.where(batch.loss_mask, advantages, 0) if is_per_token else advantages, is_sliced=is_per_token)
    for name in DOCUMENT_FIELDS:
        agreement.add(name, getattr(batch, name))


def check_vector(name: str, vector: Tensor, letter: str, length: int) -> None:
    """Raises DataError unless it has this length, which the letter names, and one dimension."""
    if vector.shape != (length,):
        raise DataError(f"{name} must be [{letter}={length}], got {tuple(vector.shape)}")


def check_is_real(name: str, numbers: Tensor) -> None:
    """Raises DataError for complex numbers and truth values."""
    if numbers.is_complex() or numbers.dtype == torch.bool:
        raise DataError(f"{name} is {numbers.dtype}: a loss needs real numbers; pass a floating point tensor")


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


def not_none(tensor: Tensor | None) -> Tensor:
    """The tensor; the checks have refused None."""
    assert tensor is not None
    return tensor


def check_weights(name: str, weights: Tensor | None, dtype: torch.dtype, loss_mask: Tensor | None = None) -> None:
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


def _are_per_sample(advantages: Tensor, advantages_per: str | None, num_tokens: int, cu_seqlens: Tensor) -> bool:
    """Whether they are [N]. It reads no value of the device: so a CUDA graph can hold the call."""
    num_documents = cu_seqlens.numel() - 1
    lengths = {"sample": num_documents, "token": num_tokens}
    if advantages_per is not None:
        if advantages_per not in lengths:
            raise ConfigError(f'advantages_per={advantages_per!r} must be "sample", "token" or None')
        if advantages.shape != (lengths[advantages_per],):
            raise DataError(
                f'advantages {tuple(advantages.shape)} with advantages_per="{advantages_per}" must be [{lengths[advantages_per]}]'
            )
        return advantages_per == "sample"
    if advantages.shape not in ((num_documents,), (num_tokens,)):
        raise DataError(
            f"advantages {tuple(advantages.shape)} must be [N={num_documents}], one a sample, or [T={num_tokens}], one a token"
        )
    if num_documents == num_tokens > 1 and (cu_seqlens.is_cuda or not bool((cu_seqlens.diff() == 1).all())):
        # Of one token a sample both readings are the same numbers.
        why = "cu_seqlens is on the device, where a loss reads no values"
        why = why if cu_seqlens.is_cuda else "not every document has exactly one token"
        raise DataError(
            f"advantages [{num_tokens}] fit both {num_documents} samples and {num_tokens} tokens, and {why}: pass "
            'advantages_per="sample" or "token"'
        )
    return advantages.shape == (num_documents,)


def checked_tensors(loss: PolicyLoss, log_probs: Tensor, batch: LossBatch, options: LossOptions) -> dict[str, Tensor]:  # [T] each
    """The tensors that must be finite at every unmasked token, by their names in messages."""
    dtype = log_probs.dtype
    tensors = {"log_probs": log_probs, "old_log_probs": batch.anchor(log_probs), "advantages": batch.advantages.to(dtype)}
    # In the dtype of the loss: 1e300 is finite only in float64.
    if batch.importance_weights is not None:
        tensors["importance_weights"] = batch.importance_weights.to(dtype)
    if options.correction is not None:
        tensors["rollout_log_probs"] = not_none(batch.rollout_log_probs).to(dtype)
    if options.kl_coefficient:
        tensors["ref_log_probs"] = not_none(batch.ref_log_probs).to(dtype)
    if batch.sampling_support is not None and batch.entropy is not None:  # a logit outside the set is in it, and not in log_probs
        tensors["entropy"] = batch.entropy
    if batch.divergences is not None:
        tensors["divergence from the teacher"] = batch.divergences
    return tensors | further_inputs(loss, batch, dtype)


def further_inputs(loss: PolicyLoss, batch: LossBatch, dtype: torch.dtype) -> dict[str, Tensor]:  # [T] each
    """The further inputs that the loss declares, without what the sums give: counts of a sequence-level loss, and means."""
    vectors = {}
    for name in loss.needs:
        if name == "token_counts" and loss.level == "token":
            vectors[name] = batch.spread(not_none(batch.token_counts).to(dtype))
        elif name not in ("token_counts", "mean_log_ratio"):
            vectors[name] = not_none(getattr(batch, name)).to(dtype)
    return vectors


@dataclass(frozen=True, slots=True)
class DocumentSums:
    """Sums of each document over all cp ranks, [N] float64 each; None where the loss does not need it."""

    num_nonfinite: Tensor
    counts: Tensor
    means: dict[str, Tensor]  # mean_columns in the dtype of log_probs
    importance: Tensor | None
    advantages_vary: Tensor | None  # [N] bool
    is_miscounted: Tensor | None  # [N] bool: the caller's token_counts differ


def sum_columns(loss: PolicyLoss, batch: LossBatch) -> tuple[str, ...]:
    """The k columns of the reduced [N, k] tensor. Their order depends only on settings, so it is the same on every rank."""
    columns = [*FIRST_COLUMNS, *mean_columns(loss)]
    if loss.level == "sequence":
        columns += ["advantages", "squared_advantages", *(() if batch.importance_weights is None else ("importance",))]
    return tuple(columns)


def mean_columns(loss: PolicyLoss) -> tuple[str, ...]:
    """The vectors whose mean over a sample's tokens the loss needs, besides the advantages."""
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
    batch: LossBatch,
    dtype: torch.dtype,
) -> DocumentSums:
    """Reads the reduced columns by name and computes means and errors from them. dtype: of the log-probabilities and the means."""
    column = dict(zip(sum_columns(loss, batch), reduced.unbind(-1), strict=True))
    num_nonfinite, counts = column["num_nonfinite"], column["counts"]
    names, vary, is_miscounted = mean_columns(loss), None, None
    # Reading a flag on CUDA would synchronise. So a wrong document counts as non-finite, which stops the step before the optimiser.
    if loss.level == "sequence":
        names = (*names, "advantages")
        mean_square = column["squared_advantages"] / counts.clamp(min=1)
        vary = (mean_square - (column["advantages"] / counts.clamp(min=1)).square()) > ADVANTAGE_VARIATION**2 * mean_square
        num_nonfinite = num_nonfinite + torch.where(vary, counts, 0.0)
    if batch.token_counts is not None:
        is_miscounted = batch.token_counts != counts
        num_nonfinite = num_nonfinite + torch.where(is_miscounted, counts.clamp(min=1), 0.0)
    return DocumentSums(
        num_nonfinite=num_nonfinite,
        counts=counts,
        means={name: mean_of_documents(column[name], counts, dtype) for name in names},
        importance=column.get("importance"),
        advantages_vary=vary,
        is_miscounted=is_miscounted,
    )


def refuse_bad_data(loss: PolicyLoss, output: PolicyLossOutput, sums: Tensor, batch: LossBatch, options: LossOptions) -> None:
    """Raises DataError where a document cannot be trained: token_counts that differ from the mask's, advantages that vary inside a
    sample, and values that are not finite.

    The number of the latter is summed over cp, so that these ranks raise together. On CUDA nothing is read: num_nonfinite tells.
    """
    if output.num_nonfinite.is_cuda or not bool((output.num_nonfinite > 0).any()):
        return
    read, document = read_sums(loss, sums, batch, output.log_probs.dtype), int((output.num_nonfinite > 0).nonzero()[0])
    if read.is_miscounted is not None and bool(read.is_miscounted.any()):
        document = int(read.is_miscounted.nonzero()[0])
        raise DataError(
            f"token_counts says {not_none(batch.token_counts)[document].item():g} for document {document}, and loss_mask has "
            f"{int(read.counts[document])} unmasked tokens over all context-parallel ranks: pass count_step's counts, or None"
        )
    if read.advantages_vary is not None and bool(read.advantages_vary.any()):
        raise DataError(
            f"advantages vary inside document {int(read.advantages_vary.nonzero()[0])}: a sequence-level loss takes one advantage "
            "per sample; average them in the rollout, or use a token-level loss (grpo)"
        )
    here = batch.loss_mask & (batch.documents == document)
    tensors = checked_tensors(loss, output.log_probs, replace(batch, entropy=output.entropy_per_token), options)
    names = [name for name, tensor in tensors.items() if bool((here & ~torch.isfinite(tensor)).any())]
    where = f"in {', '.join(names)}"
    remedy = "A label outside the vocabulary gives -inf log_probs; mask the token or drop the sample"
    if not names:
        functions = [f"policy loss {loss.name}", *([f"KL estimator {options.kl_estimator}"] if options.kl_coefficient else [])]
        where = f"in what {' or '.join(functions)} returns for finite inputs"
        where += ", or on another context-parallel rank" if options.cp_group.size() > 1 else ""
        remedy = "Mask the token or drop the sample"
    raise DataError(
        f"document {document} of the micro-batch has {int(output.num_nonfinite[document])} unmasked tokens with a value that is "
        f"not finite, {where}; {int((output.num_nonfinite > 0).sum())} documents are affected. {remedy}"
    )
