"""Defines the keyword arguments of the loss functions: as frozen objects, for type checkers, and resolved for one loss."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, TypedDict

import torch
from torch import Tensor

from megatron_rl.config import DEFAULT_MAX_LOGITS_BYTES, Backend, PolicyMetrics
from megatron_rl.errors import ConfigError
from megatron_rl.layout.groups import Group, RankAgreement
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
    advantages_per: "sample" or "token"; None: read from the shape.
    importance_weights [T]: constants that multiply a token's part of the loss.
    ref_log_probs [T]: of the reference policy in nats, for the KL term.
    rollout_log_probs [T]: of the sampling engine in nats, for losses that need them.
    kl_coefficient, entropy_coefficient: 0 turns the term off.
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
    kl_coefficient: float = 0.0
    entropy_coefficient: float = 0.0
    regularizer_weights: Tensor | None = None
    check_ranks: bool | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LogitsLossOptions(LossOptions):
    """The keyword arguments of policy_loss. inplace: backward writes the gradient over the logits; any later use of them raises."""

    inplace: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearLossOptions(LossOptions):
    """The keyword arguments of linear_policy_loss; its docstring explains them."""

    max_logits_bytes: int = DEFAULT_MAX_LOGITS_BYTES
    sequence_parallel: bool = False
    fp32_logits: bool = False
    document_lengths: Sequence[int] | None = None
    loss_scale: Tensor | float | None = None
    return_log_probs: bool = True


class LossKeywords(TypedDict, total=False):
    """LossOptions as keywords."""

    clip_ratio_low: float | None
    clip_ratio_high: float | None
    loss_parameters: Mapping[str, float]
    temperature: float
    vocab_size: int | None
    token_counts: Tensor | None
    tp_group: Group | None
    cp_group: Group | None
    metrics: str
    backend: str
    advantages_per: str | None
    importance_weights: Tensor | None
    ref_log_probs: Tensor | None
    rollout_log_probs: Tensor | None
    kl_coefficient: float
    entropy_coefficient: float
    regularizer_weights: Tensor | None
    check_ranks: bool | None


class LogitsLossKeywords(LossKeywords, total=False):
    inplace: bool


class LinearLossKeywords(LossKeywords, total=False):
    max_logits_bytes: int
    sequence_parallel: bool
    fp32_logits: bool
    document_lengths: Sequence[int] | None
    loss_scale: Tensor | float | None
    return_log_probs: bool


@dataclass(frozen=True, slots=True)
class LossSettings:
    """The settings of a LossOptions, checked against the declaration of the loss."""

    clip: tuple[float, float] | None  # low, high; None: the loss has no clip
    parameters: dict[str, float]  # all that the loss declares, in its order
    kl_coefficient: float
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
    if coefficients["kl_coefficient"] and options.ref_log_probs is None:
        raise ConfigError(f"kl_coefficient={options.kl_coefficient} needs ref_log_probs [T]; pass them or set it to 0")
    if any(coefficients.values()) and options.regularizer_weights is None:
        raise ConfigError(
            "kl_coefficient and entropy_coefficient need regularizer_weights [N]: pass "
            "aggregation.regularizer_weights(token_counts, totals), the sample_mean weights of the step"
        )
    for name in loss.needs:
        if getattr(options, name) is None:
            raise ConfigError(f"policy loss {loss.name!r} needs {name} [T]; pass them, or choose another loss")
    parameters = loss.resolve_parameters(options.loss_parameters)
    return LossSettings(
        clip=clip,
        parameters=parameters,
        kl_coefficient=coefficients["kl_coefficient"],
        entropy_coefficient=coefficients["entropy_coefficient"],
        metrics=options.metrics,
        tp_group=tp_group,
        cp_group=cp_group,
        backend=backend,
        check_ranks=options.check_ranks,
    )


def _number(name: str, value: object) -> float:
    """The value as a float; inf where float32, in which the loss computes, cannot hold it. Raises ConfigError for no number."""
    if isinstance(value, bool) or not isinstance(value, int | float | Real):
        raise ConfigError(f"{name}={value!r} must be a number")
    number: Any = value  # numbers.Real has no type for its comparisons
    return float(number) if abs(number) <= torch.finfo(torch.float32).max or number != number else math.copysign(math.inf, number)
