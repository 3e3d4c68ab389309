"""Defines every setting of the policy loss with its default. It imports no torch and reads no flag."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from enum import StrEnum
from typing import Any, TypeGuard


class LossAggregation(StrEnum):
    """The four built-in weightings, described in docs/aggregation.md. Any registered name is accepted too."""

    SAMPLE_MEAN = "sample_mean"
    PROMPT_MEAN = "prompt_mean"
    TOKEN_MEAN = "token_mean"
    CONSTANT = "constant"


class PolicyMetrics(StrEnum):
    NONE = "none"
    BASIC = "basic"
    WITH_ENTROPY = "with_entropy"


class Backend(StrEnum):
    AUTO = "auto"
    TORCH = "torch"
    TRITON = "triton"


# The Triton that the CUDA build of a torch release pins in its package metadata. tests/test_triton_versions.py compiles, loads and
# launches each kernel with each of them, for sm_90 and sm_100.
TRITON_OF_TORCH = {
    **{"2.8": "3.4", "2.9": "3.5", "2.10": "3.6", "2.11": "3.6"},
    **{"2.12": "3.7", "2.13": "3.7", "2.14": "3.8", "2.15": "3.9"},
}


class ImportanceCorrection(StrEnum):
    """The factor of a token's policy term, from w, the ratio of the old policy to the sampler's (corrections.py).

    none: 1.
    tis: w, clamped to the bounds. Yao et al. 2025, https://fengyao.notion.site/off-policy-rl. Use it when another engine samples,
        above all in a lower precision.
    icepop: w inside the bounds, 0 outside. Ring-1T, arXiv:2510.18855. Use it when a few tokens of a mixture of experts differ very
        much.
    mask: 1 inside the bounds, 0 outside. SkyRL's measurement, https://github.com/NovaSky-AI/SkyRL/pull/1665. Use it when rollouts
        are a step or more old, at level sequence_mean.
    """

    NONE = "none"
    TIS = "tis"
    ICEPOP = "icepop"
    MASK = "mask"


class CorrectionLevel(StrEnum):
    TOKEN = "token"
    SEQUENCE_MEAN = "sequence_mean"
    SEQUENCE_SUM = "sequence_sum"


class RejectedTokens(StrEnum):
    COUNTED = "counted"
    DROPPED = "dropped"


class KLEstimator(StrEnum):
    K1 = "k1"
    K2 = "k2"
    K3 = "k3"
    K3_PLUS = "k3+"
    UNBIASED = "unbiased"


class RouterAuxLoss(StrEnum):
    REFUSE = "refuse"
    HOST = "host"
    EXACT = "exact"


class RouterReplay(StrEnum):
    NONE = "none"
    OLD_LOG_PROBS = "old_log_probs"
    ROLLOUT = "rollout"


class GradientDivisor(StrEnum):
    NONE = "none"
    NUM_SAMPLES = "num_samples"


class Overlong(StrEnum):
    """What happens to a response that --max-new-tokens cut."""

    KEEP = "keep"
    MASK = "mask"
    PENALTY = "penalty"


class AdvantageNormalization(StrEnum):
    STD = "std"
    NONE = "none"


class Watchdog(StrEnum):
    OFF = "off"
    WARN = "warn"
    RAISE = "raise"


class Route(StrEnum):
    """How a launch reaches the loss. Which flag works on which route is one table: `validation.ROUTES_OF_FLAG`."""

    REDUCER = "reducer"
    CUSTOM_LOSS = "custom_loss"
    MEGATRON_LM = "megatron_lm"
    TRAIN = "train"


# The published bounds (low, high) of a correction at level token: TIS truncates at 2 (verl, miles, slime), IcePop keeps [0.5, 5]
# (Ring-1T, arXiv:2510.18855). Other criteria have no value that several recipes share, so it must be given.
PUBLISHED_BOUNDS: dict[tuple[str, str], tuple[float, float]] = {
    (ImportanceCorrection.TIS, CorrectionLevel.TOKEN): (0.0, 2.0),
    (ImportanceCorrection.ICEPOP, CorrectionLevel.TOKEN): (0.5, 5.0),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class CorrectionSettings:
    """How a loss corrects for the gap between the policy that sampled and the one that the trainer calls old.

    w is the ratio of old to rollout probability: of the token, or by level of the sample. `tis` multiplies a token's part of the
    loss by w clamped to [low, high]; `icepop` by w inside the bounds and by 0 outside; `mask` by 1 inside and by 0 outside.
    sequence_delta: besides, samples of negative advantage whose mean log(rollout / trained probability) exceeds it are dropped
    (OPSM, DeepSeek-V3.2, arXiv:2512.02556, section 3.1). Bounds are inclusive. Weights are constants for the gradient.

    >>> CorrectionSettings(kind="tis").bounds
    (0.0, 2.0)
    >>> CorrectionSettings(kind="mask", level="sequence_mean", low=0.99, high=1.01).bounds
    (0.99, 1.01)
    """

    kind: str = ImportanceCorrection.NONE
    level: str = CorrectionLevel.TOKEN
    low: float | None = None
    high: float | None = None
    sequence_delta: float | None = None

    @classmethod
    def of(cls, config: PolicyLossConfig) -> CorrectionSettings:
        return cls(
            kind=config.importance_correction,
            level=config.importance_correction_level,
            low=config.importance_correction_low,
            high=config.importance_correction_high,
            sequence_delta=config.off_policy_sequence_delta,
        )

    @property
    def is_on(self) -> bool:
        return self.kind != ImportanceCorrection.NONE or self.sequence_delta is not None

    @property
    def is_of_current_policy(self) -> bool:
        """Whether the criterion reads the policy in training, so that nobody knows before the forward pass what it drops."""
        return self.sequence_delta is not None

    @property
    def needs_sums(self) -> bool:
        """Whether a criterion is a sum over the sample, which context-parallel ranks add up."""
        return self.sequence_delta is not None or self.is_of_sequence

    @property
    def is_of_sequence(self) -> bool:
        return self.kind != ImportanceCorrection.NONE and self.level != CorrectionLevel.TOKEN

    @property
    def columns(self) -> tuple[str, ...]:
        """The sums over a sample that the criteria need. They depend only on settings, so they are the same on every rank."""
        needed = {"old_to_rollout": self.is_of_sequence, "rollout_to_trained": self.sequence_delta is not None}
        return tuple(name for name, is_needed in needed.items() if is_needed)

    @property
    def bounds(self) -> tuple[float, float]:
        """(low, high) of w. Call it where `problems` finds none."""
        low, high = PUBLISHED_BOUNDS.get((self.kind, self.level), (0.0, math.inf))
        return (low if self.low is None else self.low, high if self.high is None else self.high)

    def problems(self) -> Iterator[str]:
        """What is wrong with the settings, each with its remedy. A field may hold a value of any type."""
        if self.kind not in tuple(ImportanceCorrection):
            yield f"importance_correction={self.kind!r} is not one of {', '.join(ImportanceCorrection)}"
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
        if self.kind == ImportanceCorrection.NONE:
            settings = {**given, "importance_correction_level": None if self.level == CorrectionLevel.TOKEN else self.level}
            for name, value in settings.items():
                if value is not None:
                    yield f"{name}={value} has no effect without a correction: remove it, or choose --importance-correction"
            return
        if wrong:
            return
        needed = [name for name, value in given.items() if value is None]
        if self.kind == ImportanceCorrection.TIS:
            needed = [name for name in needed if name.endswith("high")]
        if needed and (self.kind, self.level) not in PUBLISHED_BOUNDS:
            flags = " and ".join("--" + name.replace("_", "-") for name in needed)
            yield (
                f"importance_correction={self.kind} at level {self.level} needs {flags}: recipes do not agree on a value; "
                + _EXAMPLES[self.level]
            )
            return
        low, high = self.bounds
        if low > high:
            yield f"importance_correction_low={low:g} is above importance_correction_high={high:g}: no ratio lies between them"
        elif high == 0:
            yield "importance_correction_high=0 leaves no token a weight: give a bound above 0"
        elif high > LARGEST_RATIO or 0 < low < 1 / LARGEST_RATIO:
            yield (
                f"importance_correction bounds [{low:g}, {high:g}] lie outside of e^-20 to e^20, at which ratios are bounded "
                "before they are compared: take narrower ones, or 0 for no lower bound"
            )
        elif not low <= 1 <= high:
            yield (
                f"importance_correction bounds [{low:g}, {high:g}] do not hold 1, the ratio where sampler and trainer agree: they "
                "are ratios and not distances from 1"
            )


# Log-ratios are bounded to +- this before exp: e^20 = 5e8 is far outside any clip and squares to 2e17, well inside float32.
LOG_RATIO_BOUND = 20.0
LARGEST_RATIO = math.exp(LOG_RATIO_BOUND)
_EXAMPLES: dict[str, str] = {
    CorrectionLevel.TOKEN: "a first try is [0.5, 2]",
    CorrectionLevel.SEQUENCE_MEAN: "a first try is [0.99, 1.01], because the mean over a sample moves little",
    CorrectionLevel.SEQUENCE_SUM: "a first try is [0.1, 10]; the sum over thousands of tokens leaves most bounds",
}


def counted_twice(kind: str, policy_loss: str, setting: str | None = None) -> str:
    """The refusal of a correction for a loss whose ratio compares with the sampler already. setting: the host's, if it is one."""
    given, remedy = setting or f"importance_correction={kind}", "turn it off" if setting else "remove --importance-correction"
    return (
        f"{given} with policy loss {policy_loss!r}: the ratio of this loss is to the rollout probability already, and the "
        f"correction would be counted twice; {remedy}, or choose a loss whose ratio is to old_log_probs"
    )


def _is_ratio(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


# A clip ratio of a sequence-level loss above this hardly ever clips: the mean log-ratio of a sample does not move by 5 %.
SEQUENCE_CLIP_RATIO_WARNING = 0.05
DEFAULT_MAX_LOGITS_BYTES = 2 * 1024**3


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLossConfig:
    """The settings: type, default, one line of meaning for each. `arguments.validate_megatron_rl_args` makes it."""

    policy_loss: str = "grpo"
    """The loss: a built-in name, a registered name, or module.function."""
    loss_aggregation: str = LossAggregation.SAMPLE_MEAN
    """The weight of a token: sample_mean, prompt_mean, token_mean, constant, a registered name, or module.function."""
    loss_aggregation_divisor: float | None = None
    """The L of constant: each token weighs 1 / (L x samples). Required with constant, refused with the other built-in ones."""
    samples_per_prompt: int | None = None
    """Declared size of each prompt group; a step with an incomplete group raises."""
    allow_partial_prompt_groups: bool = False
    """Accept prompt groups smaller than samples_per_prompt."""
    one_sample_per_rollout: bool = False
    """Declares that each rollout of your own rollout function is one sample, as sample_mean in a reducer needs; checked."""
    clip_ratio_low: float | None = None
    """The importance ratio is clipped at 1 minus this; None: the loss's default (grpo 0.2, gspo 3e-4)."""
    clip_ratio_high: float | None = None
    """The importance ratio is clipped at 1 plus this; None: the loss's default (grpo 0.2, gspo 4e-4)."""
    loss_parameters: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Numbers that the loss declares besides its clip, by name; each has its own flag. A missing one keeps its default."""
    policy_temperature: float = 1.0
    """Logits are divided by it before the softmax: the temperature that the rollouts were sampled at."""
    importance_correction: str = ImportanceCorrection.NONE
    """Factor of a token by w = old / rollout probability: tis w in bounds, icepop w or 0 outside, mask 1 or 0 outside; none."""
    importance_correction_level: str = CorrectionLevel.TOKEN
    """The w of the correction: of a token, exp of the sample's mean log w (sequence_mean), exp of its sum (sequence_sum)."""
    importance_correction_low: float | None = None
    """Lower bound of w, a ratio; None: at level token the usual one (tis 0, icepop 0.5), at other levels 0 for tis."""
    importance_correction_high: float | None = None
    """Upper bound of w, a ratio; None: at level token the usual one (tis 2, icepop 5)."""
    off_policy_sequence_delta: float | None = None
    """Drops samples of A < 0 whose mean log(rollout / trained probability) exceeds this, in nats per token (OPSM); None: off."""
    rejected_tokens: str = RejectedTokens.COUNTED
    """Whether the step's counts hold tokens that a correction drops: counted (weights as without it), dropped."""
    kl_coefficient: float = 0.0
    """Weight of the estimate of KL(policy, reference), averaged by sample_mean; 0 computes nothing."""
    kl_estimator: str = KLEstimator.K3
    """The estimate: k1, k2, k3, k3+ (value of k3, gradient of k2), unbiased (importance ratio of the token times k3)."""
    entropy_coefficient: float = 0.0
    """Weight of the full-vocabulary entropy, averaged by sample_mean and subtracted from the loss; 0 computes nothing."""
    policy_metrics: str = PolicyMetrics.BASIC
    """Which metrics are computed: none, basic, with_entropy."""
    policy_loss_backend: str = Backend.AUTO
    """Which kernels compute log-probabilities: auto, torch, triton."""
    fused_lm_head_loss: bool = False
    """Compute the loss from hidden states, without the logits of the whole micro-batch in memory."""
    max_logits_bytes: int = DEFAULT_MAX_LOGITS_BYTES
    """Upper bound in bytes of all logits buffers of the fused head together."""
    scaled_exp_head: bool = False
    """The fused head's first product leaves scaled exponentials, and no kernel reads the logits again; Triton, tp size 1."""
    fp32_lm_head: bool = False
    """Compute logits in float32 from the 16-bit parameters, which stay as they are."""
    docs_per_step: int | None = None
    """Accumulate micro-batches until the step holds this many documents (samples) over all ranks, in whole prompt groups."""
    router_aux_loss: str | None = None
    """Auxiliary losses of experts' routers: refuse, host (as Megatron scales them), exact (as one rank on the whole step); None:
    refuse with --calculate-per-token-loss, else host."""
    gradient_divisor: str = GradientDivisor.NONE
    """num_samples divides the gradient, not the reported loss, again by the step's samples, as DeepSpeed does."""
    watchdog: str = Watchdog.WARN
    """What to do when a step's metrics look wrong (at the first step a mean ratio outside [0.9, 1.1], ...): off, warn, raise."""


def flag_fields() -> tuple[Field[Any], ...]:
    """The settings with a flag of the same name: all except loss_parameters, because the losses declare those flags."""
    return tuple(field for field in fields(PolicyLossConfig) if field.name != "loss_parameters")
