"""Corrects for the gap between the sampler's policy and the trainer's: a factor of each token's policy term, 0 where it is dropped.

    w_t = exp(old_log_prob_t - rollout_log_prob_t)                           level token
    w_i = exp(sum_t m_it (old_log_prob_t - rollout_log_prob_t) / m_i)        level sequence_mean, the geometric mean of w_t
    w_i = exp(sum_t m_it (old_log_prob_t - rollout_log_prob_t))              level sequence_sum, their product
    d_i = sum_t m_it (rollout_log_prob_t - log_prob_t) / m_i                 off-policy: dropped where A < 0 and d_i > delta

The factors multiply the policy term of a token as importance weights do. KL and entropy terms have no such factor. The counts that
weights are made from stay as they are. Exponents are bounded to +-20.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeGuard

import torch
from torch import Tensor

from megatron_rl.config import LARGEST_RATIO, NO_CORRECTION, CorrectionLevel, PolicyLossConfig
from megatron_rl.declare import PolicyLoss, bounded_exp, checked_result, get_policy_loss
from megatron_rl.errors import ConfigError
from megatron_rl.layout.groups import Group, all_reduce_sum, document_sums, spread
from megatron_rl.registry import Function, Registry, check_signature

# Level -> the usual (low, high) of w there; None: it has to be given.
Bounds = Mapping[str, tuple[float | None, float | None]]
GIVEN: Bounds = dict.fromkeys(CorrectionLevel, (None, None))
_EXAMPLES: dict[str, str] = {
    CorrectionLevel.TOKEN: "a first try is [0.5, 2]",
    CorrectionLevel.SEQUENCE_MEAN: "a first try is [0.99, 1.01], because the mean over a sample moves little",
    CorrectionLevel.SEQUENCE_SUM: "a first try is [0.1, 10]; the sum over thousands of tokens leaves most bounds",
}


@dataclass(frozen=True, slots=True)
class CorrectionValue:
    """What a correction returns: [*], as the ratios that it gets, [T] of tokens or [N] of samples.

    weights: the factors of the policy term, in the dtype of the ratios.
    is_kept: bool, False where the factor drops a token or a sample. None: everything is kept.
    """

    weights: Tensor
    is_kept: Tensor | None = None


@dataclass(frozen=True, slots=True)
class CorrectionKind:
    """A correction as it was declared; `register_correction` says what each field means."""

    name: str
    function: Callable[..., Any]
    bounds: Bounds = field(hash=False)
    weigh_tokens: Callable[..., Any] | None


CORRECTIONS: Registry[CorrectionKind] = Registry("importance correction", "register_correction")


def register_correction(
    name: str,
    *,
    bounds: Bounds = GIVEN,
    weigh_tokens: Callable[..., Any] | None = None,
) -> Callable[[Function], Function]:
    """Decorator: registers a function as the importance correction `name`. The package knows nothing else of it.

        fn(ratios, low, high) -> weights, or CorrectionValue(weights, is_kept)

    ratios w = old / rollout probability are [T] of the tokens, or [N] of the samples, as the level says; low and high are numbers.
    The function is elementwise, and its weights are constants for the gradient. The package does the rest: sums over samples and cp
    ranks, mask, gradient, metrics, every backend, head and host.

    bounds: each level where it acts -> (low, high), taken where a flag is not given; None: the flag must be given.
    weigh_tokens: fn(ratios [T]) -> weights [T]: at a level of samples each token has this factor besides. None: it has none.
    Raises ConfigError when another function has the name, or when the declaration or a signature is wrong.
    """
    CORRECTIONS.check_name(name)
    kind = CORRECTIONS.kind
    unknown = [level for level in bounds if level not in tuple(CorrectionLevel)]
    if unknown or not bounds:
        raise ConfigError(f"bounds={bounds!r} of {kind} {name!r} must be of levels, {', '.join(CorrectionLevel)}")
    if weigh_tokens is not None and CorrectionLevel.TOKEN in bounds:
        raise ConfigError(f"weigh_tokens of {kind} {name!r} acts at levels of samples: leave token out of bounds")

    def decorate(function: Function) -> Function:
        check_signature(kind, name, function, ("ratios", "low", "high"))
        if weigh_tokens is not None:
            check_signature(f"weigh_tokens of {kind}", name, weigh_tokens, ("ratios",))
        CORRECTIONS.add(name, CorrectionKind(name, function, bounds, weigh_tokens))
        return function

    return decorate


# At level token the default of verl, miles and slime.
@register_correction("tis", bounds=dict.fromkeys(CorrectionLevel, (0.0, None)) | {CorrectionLevel.TOKEN: (0.0, 2.0)})
def tis(ratios: Tensor, low: float, high: float) -> CorrectionValue:
    """w, clamped to the bounds.

    Yao et al. 2025, https://fengyao.notion.site/off-policy-rl.
    Use it when another engine samples, above all in a lower precision.
    """
    return CorrectionValue(ratios.clamp(low, high))


@register_correction("mask")
def mask(ratios: Tensor, low: float, high: float) -> CorrectionValue:
    """1 inside the bounds, 0 outside.

    SkyRL's measurement, https://github.com/NovaSky-AI/SkyRL/pull/1665.
    Use it when rollouts are a step or more old, at level sequence_mean.
    """
    is_kept = (ratios >= low) & (ratios <= high)
    return CorrectionValue(is_kept.to(ratios.dtype), is_kept)


@register_correction("icepop", bounds={**GIVEN, CorrectionLevel.TOKEN: (0.5, 5.0)})
def icepop(ratios: Tensor, low: float, high: float) -> CorrectionValue:
    """w inside the bounds, 0 outside.

    Ring-1T, arXiv:2510.18855.
    Use it when a few tokens of a mixture of experts differ very much.
    """
    is_kept = (low <= ratios) & (ratios <= high)
    return CorrectionValue(torch.where(is_kept, ratios, 0.0), is_kept)


@register_correction(
    "seq_mask_tis",
    # NeMo-RL's recipe of ProRL v2.1.
    bounds={CorrectionLevel.SEQUENCE_MEAN: (0.999, 1.002), CorrectionLevel.SEQUENCE_SUM: (None, None)},
    weigh_tokens=lambda ratios: ratios,  # of the token, without bounds
)
def seq_mask_tis(ratios: Tensor, low: float, high: float) -> CorrectionValue:
    """w of the token where the sample's w is inside the bounds, 0 in other samples.

    NeMo-RL's guide to ProRL v2, https://github.com/NVIDIA-NeMo/RL/blob/main/docs/guides/prorlv2.md: seq-mask-tis.

        u_t = w_t 1[low <= w_i <= high]     w_t = old_prob_t / rollout_prob_t, w_i the geometric mean of the sample's w_t

    Use it when another engine samples long responses of a mixture of experts.
    """
    return mask(ratios, low, high)


@dataclass(frozen=True, kw_only=True, slots=True)
class CorrectionSettings:
    """How a loss corrects for the gap between the policy that sampled and the one that the trainer calls old.

    w is the ratio of old to rollout probability: of the token, or by level of the sample. kind: a registered correction, or
    module.function; it makes the factor of a token's part of the loss from w and the bounds [low, high].
    sequence_delta: besides, samples of negative advantage whose mean log(rollout / trained probability) exceeds it are dropped
    (OPSM, DeepSeek-V3.2, arXiv:2512.02556, section 3.1). Bounds are inclusive. Weights are constants for the gradient.

    >>> CorrectionSettings(kind="tis").bounds
    (0.0, 2.0)
    >>> CorrectionSettings(kind="mask", level="sequence_mean", low=0.99, high=1.01).bounds
    (0.99, 1.01)
    """

    kind: str = NO_CORRECTION
    level: str = CorrectionLevel.TOKEN
    low: float | None = None
    high: float | None = None
    sequence_delta: float | None = None

    @classmethod
    def of(cls, config: PolicyLossConfig) -> CorrectionSettings | None:
        """None: the config has no setting of a correction."""
        settings = cls(
            kind=config.importance_correction,
            level=config.importance_correction_level,
            low=config.importance_correction_low,
            high=config.importance_correction_high,
            sequence_delta=config.off_policy_sequence_delta,
        )
        return None if settings == cls() else settings

    @property
    def has_factor(self) -> bool:
        """Whether a correction makes a factor from w."""
        return self.kind != NO_CORRECTION

    @property
    def is_on(self) -> bool:
        return self.has_factor or self.sequence_delta is not None

    @property
    def needs_sums(self) -> bool:
        """Whether a criterion or a weight is made from a sum over the sample, which context-parallel ranks add up."""
        return self.sequence_delta is not None or self.is_of_sequence

    @property
    def is_of_sequence(self) -> bool:
        return self.has_factor and self.level != CorrectionLevel.TOKEN

    @property
    def bounds(self) -> tuple[float, float]:
        """(low, high) of w. Call it where `problems` finds none."""
        low, high = CORRECTIONS[self.kind].bounds[self.level] if self.has_factor else (0.0, math.inf)
        low, high = low if self.low is None else self.low, high if self.high is None else self.high
        assert low is not None and high is not None
        return low, high

    def problems(self) -> Iterator[str]:
        """What is wrong with the settings, each with its remedy. A field may hold a value of any type."""
        declared = None
        if self.has_factor:
            try:
                declared = CORRECTIONS[str(self.kind)]
            except ConfigError as error:
                yield f"importance_correction={self.kind!r}: {error}"
                return
        if self.level not in tuple(CorrectionLevel):
            yield f"importance_correction_level={self.level!r} is not one of {', '.join(CorrectionLevel)}"
            return
        given = {"importance_correction_low": self.low, "importance_correction_high": self.high}
        wrong = [name for name, value in given.items() if value is not None and not _is_ratio(value)]
        for name in wrong:
            yield (
                f"{name}={given[name]!r} must be a finite number at or above 0: it bounds a ratio of probabilities, which is 1 "
                "where sampler and trainer agree"
            )
        if self.sequence_delta is not None and not _is_ratio(self.sequence_delta):
            yield (
                f"off_policy_sequence_delta={self.sequence_delta!r} must be a finite number at or above 0, in nats per token; "
                "leave it out to drop no sample"
            )
        if declared is None:
            settings = {**given, "importance_correction_level": None if self.level == CorrectionLevel.TOKEN else self.level}
            for name, value in settings.items():
                if value is not None:
                    yield f"{name}={value} has no effect without a correction: remove it, or choose --importance-correction"
            return
        if self.level not in declared.bounds:
            levels = " or ".join(f"--importance-correction-level {level}" for level in declared.bounds)
            yield f"importance_correction={self.kind} does not act at level {self.level}: choose {levels}"
            return
        if wrong:
            return
        needed = [
            name for name, usual in zip(given, declared.bounds[self.level], strict=True) if given[name] is None and usual is None
        ]
        if needed:
            flags = " and ".join("--" + name.replace("_", "-") for name in needed)
            yield (
                f"importance_correction={self.kind} at level {self.level} needs {flags}: recipes do not agree on a value; "
                + _EXAMPLES[self.level]
            )
            return
        low, high = self.bounds
        if high > LARGEST_RATIO or 0 < low < 1 / LARGEST_RATIO:
            yield (
                f"importance_correction bounds [{low:g}, {high:g}] lie outside of e^-20 to e^20, at which ratios are bounded "
                "before they are compared: take narrower ones, or 0 for no lower bound"
            )
        elif not low <= 1 <= high:
            yield (
                f"importance_correction bounds [{low:g}, {high:g}] do not hold 1, the ratio where sampler and trainer agree: they "
                "are ratios and not distances from 1"
            )


def needs_rollout_log_probs(config: PolicyLossConfig) -> bool:
    """Whether the configured loss or its correction compares with the policy that sampled."""
    return CorrectionSettings.of(config) is not None or "rollout_log_probs" in get_policy_loss(config.policy_loss).inputs_needed


def check_correction(loss: PolicyLoss, correction: CorrectionSettings, rollout_log_probs: Tensor | None) -> None:
    """Raises ConfigError where the settings are wrong, or do not fit the loss and what its call has."""
    if not isinstance(correction, CorrectionSettings):
        raise ConfigError(f"correction={correction!r} must be a CorrectionSettings, as in CorrectionSettings(kind='tis')")
    problems = list(correction.problems())
    if problems:
        raise ConfigError(problems)
    if correction.is_on and rollout_log_probs is None:
        raise ConfigError("a correction compares with the sampler and needs rollout_log_probs [T]: pass them, or correction=None")
    if correction.has_factor and loss.anchor == "rollout":
        raise ConfigError(counted_twice(correction.kind, loss.name))


def counted_twice(kind: str, policy_loss: str, setting: str | None = None) -> str:
    """The refusal of a correction for a loss whose ratio compares with the sampler already. setting: the host's, if it is one."""
    given, remedy = setting or f"importance_correction={kind}", "turn it off" if setting else "remove --importance-correction"
    return (
        f"{given} with policy loss {policy_loss!r}: the ratio of this loss is to the rollout probability already, and the "
        f"correction would be counted twice; {remedy}, or choose a loss whose ratio is to old_log_probs"
    )


def _is_ratio(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


@dataclass(frozen=True, slots=True)
class Correction:
    """The correction of one micro-batch of this rank."""

    weights: Tensor  # [T] the factor of each token's policy term; 0 where it is dropped or masked
    ratios: Tensor  # [T] w before the bounds; 1 where no ratio is computed
    is_kept: Tensor  # [T] bool; False where dropped, and where masked
    is_off_policy: Tensor  # [T] bool: dropped as a token of an off-policy sample
    is_low: Tensor  # [T] bool: w is below the lower bound
    is_high: Tensor  # [T] bool: w is above the upper bound

    def of(self, tokens: slice | Tensor) -> Correction:
        """Of these tokens of the micro-batch."""
        return Correction(*(getattr(self, field.name)[tokens] for field in fields(self)))


def sums_of_samples(
    settings: CorrectionSettings,
    *,
    log_probs: Tensor,  # [T]
    old_log_probs: Tensor,  # [T]
    rollout_log_probs: Tensor,  # [T]
    loss_mask: Tensor,  # [T] bool, False on padding
    cu_seqlens: Tensor,  # [N + 1]
    cp_group: Group,
) -> dict[str, Tensor]:  # [N] float64 each
    """What a correction sums over the tokens of a sample, and "counts". Communication: one all-reduce of [N, k <= 3] over cp."""
    columns = {"counts": loss_mask}
    if settings.is_of_sequence:
        columns["old_to_rollout"] = old_log_probs - rollout_log_probs
    if settings.sequence_delta is not None:
        columns["rollout_to_trained"] = rollout_log_probs - log_probs
    stacked = torch.stack([torch.where(loss_mask, column, 0).double() for column in columns.values()], dim=-1)
    return dict(zip(columns, all_reduce_sum(document_sums(stacked, cu_seqlens), cp_group).unbind(-1), strict=True))


def correct(
    settings: CorrectionSettings,
    *,
    old_log_probs: Tensor,  # [T]
    rollout_log_probs: Tensor,  # [T]
    advantages: Tensor,  # [T]
    sums: dict[str, Tensor],  # sums_of_samples; not read unless settings.needs_sums
    loss_mask: Tensor,  # [T] bool
    documents: Tensor,  # [T] int64, N on padding
) -> Correction:
    """The correction from the sums. No communication, no synchronisation."""
    weights = ratios = torch.ones_like(old_log_probs)
    is_kept = torch.ones_like(loss_mask)
    if settings.is_of_sequence:
        log_ratio = sums["old_to_rollout"]
        if settings.level == CorrectionLevel.SEQUENCE_MEAN:
            log_ratio = log_ratio / sums["counts"].clamp(min=1)
        sample_ratios = bounded_exp(log_ratio)
        parts = (sample_ratios, *_bounded(settings, sample_ratios))
        ratios, weights, is_kept = (spread(part, documents) for part in parts)
        weigh = CORRECTIONS[settings.kind].weigh_tokens
        if weigh is not None:
            token_ratios = bounded_exp(old_log_probs - rollout_log_probs)
            weights = weights * _checked(settings, "its weights of tokens", weigh(token_ratios), token_ratios)
    elif settings.has_factor:
        ratios = bounded_exp(old_log_probs - rollout_log_probs)
        weights, is_kept = _bounded(settings, ratios)
    is_off_policy = torch.zeros_like(loss_mask)
    if settings.sequence_delta is not None:
        divergence = sums["rollout_to_trained"] / sums["counts"].clamp(min=1)
        is_off_policy = loss_mask & (advantages < 0) & spread(divergence > settings.sequence_delta, documents)
    is_kept = is_kept & ~is_off_policy & loss_mask
    dtype = old_log_probs.dtype
    weights, ratios = torch.where(is_kept, weights, 0.0).to(dtype), torch.where(loss_mask, ratios, 1.0).to(dtype)
    low, high = settings.bounds
    return Correction(weights, ratios, is_kept, is_off_policy, is_low=ratios < low, is_high=ratios > high)


def _bounded(settings: CorrectionSettings, ratios: Tensor) -> tuple[Tensor, Tensor]:  # weights [*], is_kept [*] bool
    returned = CORRECTIONS[settings.kind].function(ratios, *settings.bounds)
    result = returned if isinstance(returned, CorrectionValue) else CorrectionValue(returned)
    is_kept = torch.ones_like(ratios, dtype=torch.bool) if result.is_kept is None else result.is_kept
    return _checked(settings, "its weights", result.weights, ratios), _checked(settings, "is_kept", is_kept, ratios.bool())


def _checked(settings: CorrectionSettings, name: str, value: object, like: Tensor) -> Tensor:
    return checked_result(f"importance correction {settings.kind!r}", name, value, like)
