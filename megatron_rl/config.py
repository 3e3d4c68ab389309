"""Defines every setting of the policy loss with its default. It imports no torch and reads no flag."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from enum import StrEnum
from typing import Any


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


class GradientDivisor(StrEnum):
    NONE = "none"
    NUM_SAMPLES = "num_samples"


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


# A clip ratio of a sequence-level loss above this hardly ever clips: the mean log-ratio of a sample does not move by 5 %.
SEQUENCE_CLIP_RATIO_WARNING = 0.05
DEFAULT_MAX_LOGITS_BYTES = 2 * 1024**3


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLossConfig:
    """The settings: type, default, one line of meaning for each. `arguments.validate_megatron_rl_args` makes it."""

    policy_loss: str = "grpo"
    """The loss: grpo, gspo, gspo_token, cispo, gmpo, sapo, dppo_tv, dppo_kl, dro, reinforce, topr, a registered name, or
    module.function."""
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
    kl_coefficient: float = 0.0
    """Weight of the k3 estimate of KL(policy, reference), averaged by sample_mean; 0 computes nothing."""
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
    fp32_lm_head: bool = False
    """Compute logits in float32 from the 16-bit parameters, which stay as they are."""
    docs_per_step: int | None = None
    """Accumulate micro-batches until the step holds this many documents (samples) over all ranks, in whole prompt groups."""
    gradient_divisor: str = GradientDivisor.NONE
    """num_samples divides the gradient, not the reported loss, again by the step's samples, as DeepSpeed does."""
    watchdog: str = Watchdog.WARN
    """What to do when a step's metrics look wrong (at the first step a mean ratio outside [0.9, 1.1], ...): off, warn, raise."""


def flag_fields() -> tuple[Field[Any], ...]:
    """The settings with a flag of the same name: all except loss_parameters, because the losses declare those flags."""
    return tuple(field for field in fields(PolicyLossConfig) if field.name != "loss_parameters")
