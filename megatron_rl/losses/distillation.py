"""Defines on-policy distillation: how far the policy p is from a teacher q at a token, over the vocabulary or over its buckets.

The buckets b are the columns of the vocabulary or, with the teacher's top K ids, these K columns and one for all others together
(ops/distribution.py). docs/distillation.md shows why the last one matters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatron_rl.config import DEFAULT_BETA, DEFAULT_DIVERGENCE, Distillation, PolicyLossConfig
from megatron_rl.errors import ConfigError
from megatron_rl.layout.sampling_support import SamplingSupport
from megatron_rl.ops.distribution import BucketValues, Teacher, TopKTeacher


def reverse_kl(log_p: Tensor, log_q: Tensor) -> BucketValues:
    """KL(p, q) = sum_b p_b (log p_b - log q_b): it seeks a mode of the teacher.

    On-policy distillation: Agarwal et al. (GKD), arXiv:2306.13649; Gu et al. (MiniLLM), arXiv:2306.08543.
    """
    value = log_p.exp() * (log_p - log_q)
    return BucketValues(value, value)


def forward_kl(log_p: Tensor, log_q: Tensor) -> BucketValues:
    """KL(q, p) = sum_b q_b (log q_b - log p_b): it covers the teacher. Hinton et al., arXiv:1503.02531."""
    q = log_q.exp()
    return BucketValues(q * (log_q - log_p), -q)


def jsd(log_p: Tensor, log_q: Tensor, *, beta: float) -> BucketValues:
    """beta KL(q, m) + (1 - beta) KL(p, m) with m = beta q + (1 - beta) p. GKD, arXiv:2306.13649, equation 1."""
    log_m = torch.logaddexp(log_q + math.log(beta), log_p + math.log1p(-beta))
    policy_part = (1 - beta) * log_p.exp() * (log_p - log_m)
    return BucketValues(beta * log_q.exp() * (log_q - log_m) + policy_part, policy_part)


DIVERGENCES: dict[str, Callable[..., BucketValues]] = {"reverse_kl": reverse_kl, "forward_kl": forward_kl, "jsd": jsd}


@dataclass(frozen=True, slots=True)
class DistillationSettings:
    """The distillation term of a loss: coefficient sum_i w_i sum_t m_it D(p_t, q_t), with the token weights w of the policy loss.

    divergence: "reverse_kl", "forward_kl" or "jsd" of policy and teacher, at a temperature of each.
    beta: of jsd, between 0 and 1.
    coefficient: of the term; of a sampled teacher the factor of its advantages.
    teacher_temperature: divides the teacher's logits. Log-probabilities that a teacher gives are at theirs.
    """

    divergence: str = DEFAULT_DIVERGENCE
    beta: float = DEFAULT_BETA
    coefficient: float = 1.0
    teacher_temperature: float = 1.0

    @classmethod
    def of(cls, config: PolicyLossConfig) -> DistillationSettings | None:
        """None: there is no teacher."""
        if config.distillation == Distillation.NONE:
            return None
        return cls(config.distillation_divergence, config.distillation_beta, config.distillation_coefficient)

    def problems(self) -> Iterator[str]:
        """Each that makes the settings useless: what is wrong, and what to write."""
        if self.divergence not in DIVERGENCES:
            yield f"divergence={self.divergence!r} is not one of {', '.join(DIVERGENCES)}"
        for name, upper in (("coefficient", math.inf), ("teacher_temperature", math.inf), ("beta", 1.0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < upper:
                yield f"{name}={value!r} must be a number above 0 and below {upper:g}"
        if self.divergence != "jsd" and self.beta != DEFAULT_BETA:
            yield f"beta={self.beta!r} has no effect on {self.divergence}: leave it out, or choose jsd"

    @property
    def function(self) -> Callable[[Tensor, Tensor], BucketValues]:
        """The divergence of its buckets: log p, log q [*] -> BucketValues."""
        return partial(jsd, beta=self.beta) if self.divergence == "jsd" else DIVERGENCES[self.divergence]


def check_distillation(
    settings: DistillationSettings,
    teacher: Teacher | None,
    teacher_log_probs: Tensor | None,
    sampling_support: SamplingSupport | None,
) -> None:
    """Raises ConfigError where the settings are wrong, or do not fit what the call of a loss has of a teacher."""
    if not isinstance(settings, DistillationSettings):
        raise ConfigError(f"distillation={settings!r} must be a DistillationSettings")
    if problems := list(settings.problems()):
        raise ConfigError(problems)
    if (teacher is None) == (teacher_log_probs is None):
        raise ConfigError("distillation needs either teacher, for each row, or teacher_log_probs [T] of the labels; pass one")
    temperature = settings.teacher_temperature
    if temperature != 1.0 and (teacher is None or isinstance(teacher, TopKTeacher)):
        raise ConfigError(f"teacher_temperature={temperature} has no effect on a teacher's log-probabilities: leave it out")
    if teacher is None and settings.divergence != "reverse_kl":
        raise ConfigError(f"teacher_log_probs give reverse_kl, not {settings.divergence}: leave divergence out")
    if sampling_support is not None:
        raise ConfigError("distillation compares over the whole vocabulary, and sampling_support keeps a part: leave one out")
