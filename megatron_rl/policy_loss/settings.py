"""Defines the keyword arguments of the losses, and resolves them for one loss into checked settings.

The keywords are typed here once: `**keywords: Unpack[LogitsLossKeywords]` is what a type checker, a reader and the losses read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from numbers import Real
from typing import Any, TypedDict, TypeVar, cast

import torch
from torch import Tensor

from megatron_rl.config import DEFAULT_KL_ESTIMATOR, DEFAULT_MAX_LOGITS_BYTES, Backend, PolicyMetrics
from megatron_rl.declare import PolicyLoss, declared_parameters
from megatron_rl.errors import ConfigError
from megatron_rl.layout.agreement import RankAgreement
from megatron_rl.layout.groups import ALONE, Agreement, Group, resolve_group
from megatron_rl.layout.sampling_support import SamplingSupport
from megatron_rl.losses.corrections import CorrectionSettings, counted_twice
from megatron_rl.losses.kl import KL_ESTIMATORS, KLEstimator
from megatron_rl.ops.assumed_scale import AssumedScale


class LossKeywords(TypedDict, total=False):
    """The keyword arguments that policy_loss and linear_policy_loss share. None is the default where no other one is named.

    clip_ratio_low, clip_ratio_high: the ratio is clipped at 1 minus and 1 plus these; None: the loss's default.
    loss_parameters: values of the parameters that the loss declares, by name; a missing one keeps its default. Default: none.
    temperature: the logits are divided by it: the sampling temperature of the rollouts. Default 1.
    vocab_size: real columns over all tp ranks; the columns after them are padding. None: all columns are real.
    token_counts [N]: unmasked tokens of each sample over all cp ranks; they are checked. None: they are counted.
    tp_group, cp_group: None: the groups of megatron.core.parallel_state, else one rank.
    metrics: "none", "basic" or "with_entropy". Default "none".
    backend: "auto", "torch" or "triton". Default "auto".
    advantages_per: "sample" or "token"; None: read from the shape. Where N == T it is needed, unless each document has one token
        and cu_seqlens lies on the host, or document_lengths say so: a loss never reads values of the device.
    importance_weights [T]: constants that multiply a token's part of the loss.
    ref_log_probs [T]: of the reference policy in nats, for the KL term.
    rollout_log_probs [T]: of the sampling engine in nats, for losses that need them.
    correction: how the gap between the sampler's policy and the old one is corrected; it needs rollout_log_probs. None: not.
    kl_coefficient, entropy_coefficient: 0 turns the term off. Default 0.
    kl_estimator: a registered estimator of KL(policy, reference), or module.function. Default "k3".
    regularizer_weights [N]: from aggregation.regularizer_weights; needed where a coefficient is not 0.
    sampling_support: the ids that the sampler kept, a set for each row of the logits. log_probs, ratios and corrections are then
        over these sets, and so is the KL term: give old_log_probs, rollout_log_probs and ref_log_probs so. An entropy is over the
        whole vocabulary. None: all ids.
    check_ranks: whether tp and cp ranks compare their arguments; None: where they communicate through the CPU.
    """

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
    correction: CorrectionSettings | None
    kl_coefficient: float
    kl_estimator: str
    entropy_coefficient: float
    regularizer_weights: Tensor | None
    check_ranks: bool | None
    sampling_support: SamplingSupport | None


class LogitsLossKeywords(LossKeywords, total=False):
    """The keyword arguments of policy_loss: LossKeywords has most of them, and here are

    inplace: the gradient is written over the logits, by backward or, with loss_scale, by forward. Another backward that needs the
        logits then raises. A later read of them finds the gradient, and nothing raises: take an entropy or a second loss before.
        Default False.
    loss_scale: the product of all factors of `.loss` before backward. Where a loss's coefficients are known row by row, one Triton
        kernel then makes the gradient in forward, with two thirds of the memory traffic (docs/kernels.md, "One kernel, 4 bytes").
        Out of place it is kept until backward. `.loss` can be differentiated once, and backward checks the factor: another one
        raises on the CPU, and puts NaN into the gradient on CUDA. An AssumedScale is for a caller who does not know the factor: the
        last one is assumed, and backward mends the gradient of another. None: backward makes the gradient, with any factor.
    """

    inplace: bool
    loss_scale: Tensor | float | AssumedScale | None


class LinearLossKeywords(LossKeywords, total=False):
    """The keyword arguments of linear_policy_loss; its docstring explains them."""

    max_logits_bytes: int
    sequence_parallel: bool
    fp32_logits: bool
    document_lengths: Sequence[int] | None
    loss_scale: Tensor | float | None


Keywords = TypeVar("Keywords", bound=LossKeywords)
# The defaults that are not None.
DEFAULTS: Mapping[str, object] = {
    "loss_parameters": {},
    "temperature": 1.0,
    "metrics": PolicyMetrics.NONE,
    "backend": Backend.AUTO,
    "kl_coefficient": 0.0,
    "kl_estimator": DEFAULT_KL_ESTIMATOR,
    "entropy_coefficient": 0.0,
    "inplace": False,
    "max_logits_bytes": DEFAULT_MAX_LOGITS_BYTES,
    "sequence_parallel": False,
    "fp32_logits": False,
}


def agreement_of(tp_group: Group, cp_group: Group, check_ranks: bool | None) -> Agreement:
    """A RankAgreement over the groups, or ALONE where each is one rank."""
    if tp_group.size() == cp_group.size() == 1:
        return ALONE
    return RankAgreement(tp_group, cp_group, check_ranks=check_ranks)


def groups_and_agreement(keywords: Mapping[str, Any]) -> tuple[Group, Group, Agreement]:
    """The tp and cp group, and the agreement that encloses all other checks, so that an error of one rank is named on all."""
    tp_group, cp_group = resolve_group(keywords.get("tp_group"), "tp"), resolve_group(keywords.get("cp_group"), "cp")
    return tp_group, cp_group, agreement_of(tp_group, cp_group, keywords.get("check_ranks"))


def with_defaults(kind: type[Keywords], loss: PolicyLoss, keywords: Mapping[str, Any]) -> Keywords:
    """All keywords of the kind. Raises ConfigError for an unknown one: it may be a parameter of a loss, or a misspelt name."""
    known = list(kind.__annotations__)
    if unknown := sorted(keywords.keys() - set(known)):
        name, losses_of = unknown[0], declared_parameters()
        if name in losses_of and loss.name not in losses_of[name]:
            raise ConfigError(f"policy loss {loss.name!r} has no parameter {name}: it is one of {', '.join(losses_of[name])}")
        own = [parameter.name for parameter in loss.parameters]
        side = name.replace("_max", "_high").replace("_min", "_low")  # another library's word: clip_ratio_max
        close = [name] if name in own else [side] if side in known else get_close_matches(name, [*known, *own], n=1)
        typed = f'loss_parameters={{"{close[0]}": {keywords[name]!r}}}' if close and close[0] in own else "".join(close)
        if name in own:
            raise ConfigError(f"{name} is a parameter of policy loss {loss.name!r} and no keyword: pass {typed}")
        remedy = f"did you mean {typed}?" if close else f"it takes {', '.join(known)}"
        raise ConfigError(f"policy loss {loss.name!r} takes no keyword {name}: {remedy}")
    return cast(Keywords, {name: keywords.get(name, DEFAULTS.get(name)) for name in known})


@dataclass(frozen=True, slots=True)
class LossSettings:
    """The settings that keywords give, checked against the declaration of the loss."""

    clip: tuple[float, float] | None  # low, high; None: the loss has no clip
    parameters: dict[str, float]  # all that the loss declares, in its order
    kl_coefficient: float
    kl_estimator: KLEstimator | None  # None: there is no KL term
    entropy_coefficient: float
    metrics: str
    tp_group: Group
    cp_group: Group
    backend: Backend  # resolved: TORCH or TRITON
    check_ranks: bool | None
    is_entropy_read: bool  # by the loss itself

    @property
    def keywords(self) -> dict[str, float]:
        """The keyword arguments of the loss's function."""
        clip = {} if self.clip is None else {"clip_ratio_low": self.clip[0], "clip_ratio_high": self.clip[1]}
        return clip | self.parameters

    @property
    def needs_entropy(self) -> bool:
        """Whether the loss, a coefficient or a metric needs the entropy, which costs a pass over the row."""
        return self.is_entropy_read or self.entropy_coefficient != 0 or self.metrics == PolicyMetrics.WITH_ENTROPY

    def agreement(self) -> Agreement:
        """An agreement for a check that may fail on one rank only, so that all ranks raise. Communication: as RankAgreement."""
        return agreement_of(self.tp_group, self.cp_group, self.check_ranks)

    def policy_alone(self) -> LossSettings:
        return replace(self, kl_coefficient=0.0, kl_estimator=None, entropy_coefficient=0.0, metrics=PolicyMetrics.NONE)


def resolve_settings(loss: PolicyLoss, options: LossKeywords, tp_group: Group, cp_group: Group, backend: Backend) -> LossSettings:
    """The settings. Raises ConfigError for a value outside its range, and for a missing tensor that the loss or a term needs."""
    metrics, kl_estimator, correction = options["metrics"], options["kl_estimator"], options["correction"]
    low, high = options["clip_ratio_low"], options["clip_ratio_high"]
    clip = loss.clip_bounds(
        None if low is None else _number("clip_ratio_low", low), None if high is None else _number("clip_ratio_high", high)
    )
    coefficients = {"kl_coefficient": options["kl_coefficient"], "entropy_coefficient": options["entropy_coefficient"]}
    for name, value in coefficients.items():
        coefficients[name] = _number(name, value)
        if not 0 <= coefficients[name] < math.inf:
            raise ConfigError(f"{name}={value} must be a finite number of at least 0; 0 turns the term off")
    if not isinstance(metrics, str) or metrics not in set(PolicyMetrics):
        raise ConfigError(f"metrics={metrics!r} is not one of {', '.join(PolicyMetrics)}")
    estimator = None
    if coefficients["kl_coefficient"] or kl_estimator != DEFAULT_KL_ESTIMATOR:  # an unknown name raises without a term too
        try:
            estimator = KL_ESTIMATORS.find(kl_estimator)
        except ConfigError as error:
            raise ConfigError(f"kl_estimator={kl_estimator!r}: {error}") from error
    if correction is not None:
        _check_correction(loss, correction, options["rollout_log_probs"])
    if coefficients["kl_coefficient"] and options["ref_log_probs"] is None:
        raise ConfigError(f"kl_coefficient={options['kl_coefficient']} needs ref_log_probs [T]; pass them or set it to 0")
    if any(coefficients.values()) and options["regularizer_weights"] is None:
        raise ConfigError(
            "kl_coefficient and entropy_coefficient need regularizer_weights [N]: pass "
            "aggregation.regularizer_weights(token_counts, totals), the sample_mean weights of the step"
        )
    tensors: Mapping[str, object] = options
    for name in loss.inputs_needed:
        if tensors[name] is None:
            raise ConfigError(f"policy loss {loss.name!r} needs {name} [T]; pass them, or choose another loss")
    parameters = loss.resolve_parameters(options["loss_parameters"])
    return LossSettings(
        clip=clip,
        parameters=parameters,
        kl_coefficient=coefficients["kl_coefficient"],
        kl_estimator=estimator if coefficients["kl_coefficient"] else None,
        entropy_coefficient=coefficients["entropy_coefficient"],
        metrics=metrics,
        tp_group=tp_group,
        cp_group=cp_group,
        backend=backend,
        check_ranks=options["check_ranks"],
        is_entropy_read=loss.needs_entropy,
    )


def _check_correction(loss: PolicyLoss, correction: CorrectionSettings, rollout_log_probs: Tensor | None) -> None:
    if not isinstance(correction, CorrectionSettings):
        raise ConfigError(f"correction={correction!r} must be a CorrectionSettings, as in CorrectionSettings(kind='tis')")
    problems = list(correction.problems())
    if problems:
        raise ConfigError(problems)
    if correction.is_on and rollout_log_probs is None:
        raise ConfigError("a correction compares with the sampler and needs rollout_log_probs [T]: pass them, or correction=None")
    if correction.has_factor and loss.anchor == "rollout":
        raise ConfigError(counted_twice(correction.kind, loss.name))


def _number(name: str, value: object) -> float:
    """The value as a float; inf where float32, in which the loss computes, cannot hold it. Raises ConfigError for no number."""
    if isinstance(value, bool) or not isinstance(value, int | float | Real):
        raise ConfigError(f"{name}={value!r} must be a number")
    number: Any = value  # numbers.Real has no type for its comparisons
    return float(number) if abs(number) <= torch.finfo(torch.float32).max or number != number else math.copysign(math.inf, number)
