"""Defines every setting of the policy loss with its default. It imports no torch and reads no flag."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from enum import StrEnum
from typing import Any


class PolicyMetrics(StrEnum):
    NONE = "none"
    BASIC = "basic"
    WITH_ENTROPY = "with_entropy"


class Backend(StrEnum):
    AUTO = "auto"
    TORCH = "torch"
    TRITON = "triton"


# The Triton that the CUDA build of a torch release pins in its package metadata. tests/test_kernel_code.py compiles each
# kernel with each of them.
TRITON_OF_TORCH = {
    **{"2.8": "3.4", "2.9": "3.5", "2.10": "3.6", "2.11": "3.6"},
    **{"2.12": "3.7", "2.13": "3.7", "2.14": "3.8", "2.15": "3.9"},
}


class CorrectionLevel(StrEnum):
    """Whose ratio a correction compares with its bounds: the token's, or the sample's, the mean or the sum of its log-ratios."""

    TOKEN = "token"
    SEQUENCE_MEAN = "sequence_mean"
    SEQUENCE_SUM = "sequence_sum"


class SupportUse(StrEnum):
    """What is done with the ids that a sampler kept, where samples come with them."""

    REFUSE = "refuse"
    REPLAY = "replay"


class Distillation(StrEnum):
    """What the samples have of a teacher: nothing, its log-probabilities of their tokens, or those of its top K ids."""

    NONE = "none"
    SAMPLED = "sampled"
    TOPK = "topk"


# The correction that is none, and a name in the registry of KL estimators.
NO_CORRECTION = "none"
DEFAULT_KL_ESTIMATOR = "k3"
# Where a sample has them.
FIELDS_OF_TEACHER: dict[str, tuple[str, ...]] = {
    Distillation.NONE: (),
    Distillation.SAMPLED: ("teacher_log_probs",),
    Distillation.TOPK: ("teacher_topk_ids", "teacher_topk_log_probs"),
}
DEFAULT_DIVERGENCE, DEFAULT_BETA = "reverse_kl", 0.5


class EmptySteps(StrEnum):
    """What becomes of a step in which no token trains."""

    RAISE = "raise"
    SKIP = "skip"


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


class AdvantageNormalization(StrEnum):
    STD = "std"
    NONE = "none"


class Watchdog(StrEnum):
    OFF = "off"
    WARN = "warn"
    RAISE = "raise"


class LaunchMethod(StrEnum):
    """How a launch reaches the loss. Which flag works on which launch method: `validation.methods_of_flags`."""

    REDUCER = "reducer"
    CUSTOM_LOSS = "custom_loss"
    MEGATRON_LM = "megatron_lm"
    TRAIN = "train"


# Log-ratios are bounded to +- this before exp: e^20 = 5e8 is far outside any clip and squares to 2e17, well inside float32.
LOG_RATIO_BOUND = 20.0
LARGEST_RATIO = math.exp(LOG_RATIO_BOUND)
# A clip ratio of a sequence-level loss above this hardly ever clips on long responses: their mean log-ratio does not move by 5 %.
SEQUENCE_CLIP_RATIO_WARNING = 0.05
DEFAULT_MAX_LOGITS_BYTES = 2 * 1024**3


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLossConfig:
    """The settings: type, default, one line of meaning for each. `arguments.validate_megatron_rl_args` makes it."""

    policy_loss: str = "grpo"
    """The loss: a built-in name, a registered name, or module.function."""
    loss_aggregation: str = "sample_mean"
    """The weight of a token: a registered aggregation, or module.function."""
    loss_aggregation_divisor: float | None = None
    """The L of constant: each token weighs 1 / (L x rollouts). Required with constant, refused with the other built-in ones."""
    samples_per_prompt: int | None = None
    """Declared size of each prompt group; a step with an incomplete group raises."""
    allow_partial_prompt_groups: bool = False
    """Accept prompt groups smaller than samples_per_prompt."""
    one_sample_per_rollout: bool = False
    """Declares that each rollout is one sample, where a host may make several and does not say whose they are."""
    clip_ratio_low: float | None = None
    """The importance ratio is clipped at 1 minus this; None: the loss's default (grpo 0.2, gspo 3e-4)."""
    clip_ratio_high: float | None = None
    """The importance ratio is clipped at 1 plus this; None: the loss's default (grpo 0.2, gspo 4e-4)."""
    loss_parameters: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Numbers that the loss declares besides its clip, by name; each has its own flag. A missing one keeps its default."""
    policy_temperature: float = 1.0
    """Logits are divided by it before the softmax: the temperature that the rollouts were sampled at."""
    importance_correction: str = NO_CORRECTION
    """The factor of a token by w = old / rollout probability: a registered correction, or module.function; none: no factor."""
    importance_correction_level: str = CorrectionLevel.TOKEN
    """The w of the correction: of a token, exp of the sample's mean log w (sequence_mean), exp of its sum (sequence_sum)."""
    importance_correction_low: float | None = None
    """Lower bound of w, a ratio; None: at level token the usual one (tis 0, icepop 0.5), at other levels 0 for tis."""
    importance_correction_high: float | None = None
    """Upper bound of w, a ratio; None: at level token the usual one (tis 2, icepop 5)."""
    off_policy_sequence_delta: float | None = None
    """Drops samples of A < 0 whose mean log(rollout / trained probability) exceeds this, in nats per token (OPSM); None: off."""
    kl_coefficient: float = 0.0
    """Weight of the estimate of KL(policy, reference), averaged by sample_mean; 0 computes nothing."""
    kl_estimator: str = DEFAULT_KL_ESTIMATOR
    """The estimate of KL(policy, reference): a registered estimator, or module.function."""
    sampling_support: str | None = None
    """Samples with kept ids of a sampler: replay: scores are over them; refuse: an error. None: train replays, a host refuses."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy, averaged by sample_mean and subtracted from the loss; 0 computes nothing."""
    distillation: str = Distillation.NONE
    """What samples have of a teacher: none, sampled (its log-probabilities of their tokens), topk (those of its top K ids)."""
    distillation_divergence: str = DEFAULT_DIVERGENCE
    """How far the policy is from the top K ids of the teacher and a bucket for all others: reverse_kl, forward_kl, jsd."""
    distillation_beta: float = DEFAULT_BETA
    """The teacher's weight in the mixture of jsd, between 0 and 1."""
    distillation_coefficient: float = 1.0
    """Factor of the distillation term, with the token weights of the policy loss; of what sampled adds to the advantages."""
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
    skip_old_log_probs: bool = False
    """In miles and slime: a rollout is one step, and old log-probabilities are its own, without a forward; each ratio is 1."""
    docs_per_step: int | None = None
    """Accumulate micro-batches until the step holds this many documents (samples) over all ranks, in whole prompt groups."""
    empty_step: str = EmptySteps.RAISE
    """A step whose tokens are all masked: raise, or skip: no rank calls the optimiser."""
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
