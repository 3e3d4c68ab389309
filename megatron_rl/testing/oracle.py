"""Loss, gradient and metrics of a whole step, from the equations of the papers. It imports torch alone.

One process, float64, on the CPU, all samples at once; autograd takes the derivative.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

BOUND = 20.0  # log-ratios are bounded to +- this before exp
TINY_REST = 1e-8  # DPPO: 1 - p is at least this
SAME_POLICY = 1e-5  # TOPR: a ratio above 1 by less is rounding
# Corrections that the field uses with one value: Yao et al. (tis), Ring-1T (icepop). Elsewhere both bounds are given.
USUAL_BOUNDS: dict[tuple[str, str], tuple[float, float]] = {("tis", "token"): (0.0, 2.0), ("icepop", "token"): (0.5, 5.0)}


@dataclass(frozen=True, kw_only=True)
class DenseSample:
    """A sample of m tokens, masked ones included; a vector has one number a token. What is masked is not read."""

    labels: list[int]
    mask: list[bool]
    advantages: list[float]
    old: list[float] | None  # None: on-policy
    rollout: list[float] | None  # None: nothing reads it
    ref: list[float] | None
    importance: list[float]
    prompt: int | str
    rollout_id: int | str | None = None  # equal for the rows of a rollout; None: the sample is one


@dataclass(frozen=True, kw_only=True)
class DenseSettings:
    loss: str | Callable[[Tokens], Result] = "grpo"  # a function is a user's own, of the form of LOSSES' rows
    low: float = math.nan  # the clip, as distances from 1
    high: float = math.nan
    parameters: dict[str, float] = field(default_factory=dict)
    aggregation: str = "sample_mean"
    divisor: float = 1.0
    correction: str = "none"
    level: str = "token"
    bounds: tuple[float | None, float | None] = (None, None)
    sequence_delta: float | None = None
    kl_estimator: str = "k3"
    kl_coefficient: float = 0.0
    entropy_coefficient: float = 0.0
    temperature: float = 1.0


@dataclass(frozen=True)
class Tokens:
    """The unmasked tokens of one sample, [m] each."""

    log_ratio: Tensor
    log_probs: Tensor
    advantages: Tensor
    entropy: Tensor
    settings: DenseSettings

    def number(self, name: str) -> float:
        return self.settings.parameters[name]

    def mean(self, values: Tensor) -> Tensor:
        return (values.sum() / len(values)).expand(len(values))


def bounded_exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-BOUND, BOUND).exp()


Result = tuple[Tensor, Tensor]  # value [m], whether it is clipped [m]


def clipped_surrogate(tokens: Tokens, log_ratio: Tensor) -> Result:
    """Schulman et al., arXiv:1707.06347, equation 7; with a finite c the dual clip of Ye et al., arXiv:1912.09729."""
    ratio, a = bounded_exp(log_ratio), tokens.advantages
    low, high, c = 1 - tokens.settings.low, 1 + tokens.settings.high, tokens.settings.parameters.get("clip_ratio_c", math.inf)
    objective = torch.minimum(ratio * a, ratio.clamp(low, high) * a)
    if c < math.inf:
        objective = torch.where(a < 0, torch.maximum(objective, c * a), objective)
    is_beyond = (a > 0) & (ratio > high) | (a < 0) & ((ratio < low) | (ratio > c))
    return -objective, (is_beyond | (log_ratio.abs() > BOUND)) & (a != 0)


def grpo(tokens: Tokens) -> Result:
    """arXiv:2402.03300, equation 3."""
    return clipped_surrogate(tokens, tokens.log_ratio)


def gspo(tokens: Tokens) -> Result:
    """arXiv:2507.18071, equations 5 and 7: the geometric mean of the tokens' ratios."""
    return clipped_surrogate(tokens, tokens.mean(tokens.log_ratio))


def gspo_token(tokens: Tokens) -> Result:
    """arXiv:2507.18071, section 4.3: the same ratio as a number, times pi / sg(pi)."""
    return clipped_surrogate(tokens, tokens.mean(tokens.log_ratio).detach() + tokens.log_probs - tokens.log_probs.detach())


def cispo(tokens: Tokens) -> Result:
    """arXiv:2506.13585, equation 4."""
    ratio = bounded_exp(tokens.log_ratio).detach()
    weight = ratio.clamp(1 - tokens.settings.low, 1 + tokens.settings.high)
    return -weight * tokens.advantages * tokens.log_probs, (weight != ratio) & (tokens.advantages != 0)


def clipped_log_ratio(log_ratio: Tensor, a: Tensor, settings: DenseSettings) -> Tensor:
    low, high = math.log(1 - settings.low), math.log(1 + settings.high)
    above, below = (a > 0) & (log_ratio > high), (a < 0) & (log_ratio < low)
    return torch.where(above, high, torch.where(below, low, log_ratio))


def gmpo(tokens: Tokens) -> Result:
    """arXiv:2507.20673: tokens are clipped in log space, each on the side where its advantage pushes; then the geometric mean."""
    clipped = clipped_log_ratio(tokens.log_ratio, tokens.advantages, tokens.settings)
    mean, is_clipped = tokens.mean(clipped), clipped != tokens.log_ratio
    return -bounded_exp(mean) * tokens.advantages, (is_clipped | (mean.abs() > BOUND)) & (tokens.advantages != 0)


def sapo(tokens: Tokens) -> Result:
    """arXiv:2511.20347: f(r) = 4 / tau sigmoid(tau (r - 1))."""
    names = ("sapo_temperature_positive", "sapo_temperature_negative")
    tau = torch.tensor([tokens.number(names[int(a <= 0)]) for a in tokens.advantages], dtype=torch.float64)
    value = -4 / tau * torch.sigmoid(tau * (bounded_exp(tokens.log_ratio) - 1)) * tokens.advantages
    return value, torch.zeros_like(value, dtype=torch.bool)


def dppo(tokens: Tokens, divergence: Callable[[Tensor, Tensor], Tensor]) -> Result:
    """arXiv:2602.04879: a token that has left the trust region, and would go on, is masked; the ratio is truncated."""
    a, pi = tokens.advantages, tokens.log_probs.detach().exp()
    mu = (tokens.log_probs - tokens.log_ratio).detach().clamp(max=0.0).exp()
    is_far = torch.where(
        a > 0, divergence(pi, mu) > tokens.number("divergence_high"), divergence(pi, mu) > tokens.number("divergence_low")
    )
    is_masked = torch.where(a > 0, pi > mu, pi < mu) & is_far
    weight = bounded_exp(tokens.log_ratio).detach().clamp(max=tokens.number("ratio_truncation"))
    return -torch.where(is_masked, 0.0, weight) * a * tokens.log_probs, is_masked & (a != 0)


def total_variation(pi: Tensor, mu: Tensor) -> Tensor:
    return (pi - mu).abs()


def binary_kl(pi: Tensor, mu: Tensor) -> Tensor:
    """KL(mu, pi) of taking the token or not."""
    rest_of_pi, rest_of_mu = ((1 - p).clamp(min=TINY_REST) for p in (pi, mu))
    return torch.xlogy(mu, mu / pi) + rest_of_mu * (rest_of_mu / rest_of_pi).log()


def dro(tokens: Tokens) -> Result:
    """Kimi k1.5, arXiv:2501.12599, section 2.3, token by token."""
    value = -tokens.advantages * tokens.log_probs + tokens.number("log_ratio_penalty") / 2 * tokens.log_ratio**2
    return value, torch.zeros_like(value, dtype=torch.bool)


def reinforce(tokens: Tokens) -> Result:
    """Williams, 1992."""
    value = -tokens.advantages * tokens.log_probs
    return value, torch.zeros_like(value, dtype=torch.bool)


def topr(tokens: Tokens) -> Result:
    """arXiv:2503.14286, with the ratio of the token: positive tokens weigh 1, negative ones taper."""
    ratio = bounded_exp(tokens.log_ratio).detach()
    weight = torch.where(tokens.advantages >= 0, 1.0, ratio.clamp(max=1.0))
    return -weight * tokens.advantages * tokens.log_probs, (tokens.advantages < 0) & (ratio > 1 + SAME_POLICY)


def vespo(tokens: Tokens) -> Result:
    """arXiv:2602.10693, equations 17 (shifted, section 3.3) and 20: the gamma kernel of the whole sample's ratio."""
    whole = bounded_exp(tokens.log_ratio.detach().sum())
    sides = ["negative" if a < 0 else "positive" for a in tokens.advantages]
    powers, decays = ([tokens.number(f"vespo_{name}_{side}") for side in sides] for name in ("power", "decay"))
    kernel = torch.stack([whole**c1 * torch.exp(c2 * (1 - whole)) for c1, c2 in zip(powers, decays, strict=True)])
    value = -kernel * tokens.advantages * tokens.mean(tokens.log_probs)
    return value, torch.zeros_like(value, dtype=torch.bool)


LOSSES: dict[str, Callable[[Tokens], Result]] = {
    "grpo": grpo,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "cispo": cispo,
    "gmpo": gmpo,
    "sapo": sapo,
    "dppo_tv": lambda tokens: dppo(tokens, total_variation),
    "dppo_kl": lambda tokens: dppo(tokens, binary_kl),
    "dro": dro,
    "reinforce": reinforce,
    "topr": topr,
    "vespo": vespo,
}
# The ratio of these papers is to the policy that sampled.
OF_THE_SAMPLER = {"dppo_tv", "dppo_kl"}
# These have one ratio a sample, of the mean of these log-ratios of its tokens.
ONE_RATIO_A_SAMPLE: dict[str, Callable[[Tensor, Tensor, DenseSettings], Tensor]] = {
    **dict.fromkeys(("gspo", "vespo"), lambda log_ratio, advantages, settings: log_ratio),
    "gmpo": clipped_log_ratio,
}


class Counts(NamedTuple):
    N: int  # samples of the step
    R: int  # rollouts of the step
    P: int  # its prompts
    T: int  # its tokens
    m: int  # tokens of the sample
    Mj: int  # of its rollout
    M: int  # of its prompt
    kj: int  # samples of its rollout that have a token
    L: float  # the divisor


# The weight of a token.
AGGREGATIONS: dict[str, Callable[[Counts], float]] = {
    "sample_mean": lambda n: 1 / (n.R * n.Mj),
    "prompt_mean": lambda n: 1 / (n.P * n.M),
    "token_mean": lambda n: 1 / n.T,
    "constant": lambda n: 1 / (n.L * n.R),
    "row_mean": lambda n: 1 / (n.R * n.kj * n.m),
}
# The factor by w, the ratio of old to sampler that is compared, the token's own, and the bounds.
Correction = Callable[[Tensor, Tensor, float, float], Tensor]
CORRECTIONS: dict[str, Correction] = {
    "none": lambda w, own, low, high: torch.ones_like(w),
    "tis": lambda w, own, low, high: w.clamp(low, high),
    "icepop": lambda w, own, low, high: w * ((w >= low) & (w <= high)),
    "mask": lambda w, own, low, high: ((w >= low) & (w <= high)).double(),
    "seq_mask_tis": lambda w, own, low, high: own * ((w >= low) & (w <= high)),
}
# log w of a token, of the [m] log-ratios of its sample.
LEVELS: dict[str, Callable[[Tensor], Tensor]] = {
    "token": lambda logs: logs,
    "sequence_mean": lambda logs: (logs.sum() / len(logs)).expand(len(logs)),
    "sequence_sum": lambda logs: logs.sum().expand(len(logs)),
}


def k3(difference: Tensor) -> Tensor:
    """Schulman, 2020."""
    bounded = difference.clamp(-BOUND, BOUND)
    return (-bounded).exp() + bounded - 1


def unbiased(new: Tensor, ref: Tensor, log_ratio: Tensor) -> Result:
    """DeepSeek-V3.2, arXiv:2512.02556, equation 7. Beyond the bound there is no gradient."""
    value = bounded_exp(log_ratio) * k3(new - ref)
    return value, torch.where((log_ratio.abs() <= BOUND) & ((new - ref).abs() <= BOUND), value, 0.0)


# (value, what is differentiated in its place) by the log-probabilities of policy and reference, and the policy's log-ratio.
Estimator = Callable[[Tensor, Tensor, Tensor], Result]
ESTIMATORS: dict[str, Estimator] = {
    "k1": lambda new, ref, log_ratio: (new - ref, new - ref),
    "k2": lambda new, ref, log_ratio: ((new - ref) ** 2 / 2, (new - ref) ** 2 / 2),
    "k3": lambda new, ref, log_ratio: (k3(new - ref), k3(new - ref)),
    "k3+": lambda new, ref, log_ratio: (k3(new - ref), (new - ref) ** 2 / 2),
    "unbiased": unbiased,
}


@dataclass(frozen=True)
class Scores:
    """What the policy says of the unmasked tokens of a step, in their order, [T] each, with graph."""

    log_probs: Tensor
    entropy: Tensor


def scores_of(
    logits: Tensor,  # [T, V], of the unmasked tokens
    labels: Sequence[int],
    settings: DenseSettings,
) -> Scores:
    rows = torch.log_softmax(logits.double() / settings.temperature, -1)
    one_hot = torch.nn.functional.one_hot(torch.tensor(labels, dtype=torch.int64, device=rows.device), rows.shape[1])
    return Scores((one_hot * rows).sum(-1), -(rows.exp() * rows).sum(-1))


def token_weights(samples: Sequence[DenseSample], counts: Sequence[int], settings: DenseSettings) -> list[float]:
    """The weight of a token of each sample, whose counts these are."""
    rollouts = [f"sample {n}" if sample.rollout_id is None else sample.rollout_id for n, sample in enumerate(samples)]
    weights = []
    for sample, rollout, count in zip(samples, rollouts, counts, strict=True):
        siblings = [other for name, other in zip(rollouts, counts, strict=True) if name == rollout]
        prompt_counts = [other for one, other in zip(samples, counts, strict=True) if one.prompt == sample.prompt]
        numbers = Counts(
            N=len(samples),
            R=len({*rollouts}),
            P=len({one.prompt for one in samples}),
            T=sum(counts),
            m=count,
            Mj=sum(siblings),
            M=sum(prompt_counts),
            kj=sum(other > 0 for other in siblings),
            L=settings.divisor,
        )
        weights.append(AGGREGATIONS[settings.aggregation](numbers) if count else 0.0)
    return weights


def joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([torch.zeros(0, dtype=torch.float64), *parts])


class StepTerms:
    """What the tokens of a step give to each term, [T] each: its unmasked tokens, in their order."""

    def __init__(self, samples: Sequence[DenseSample], scores: Scores, settings: DenseSettings):
        self.samples, self.settings, self.scores, self.new = samples, settings, scores, scores.log_probs
        self.owners = [i for i, sample in enumerate(samples) for is_live in sample.mask if is_live]
        self.places = [t for sample in samples for t, is_live in enumerate(sample.mask) if is_live]
        self.of_samples = [[token for token, owner in enumerate(self.owners) if owner == i] for i in range(len(samples))]
        live = [tokens for tokens in self.of_samples if tokens]
        self.rollout, self.importance, self.advantages = self.given("rollout"), self.given("importance"), self.given("advantages")
        is_on_policy = torch.tensor([samples[i].old is None for i in self.owners], dtype=torch.bool)
        self.old = torch.where(is_on_policy, self.new.detach(), self.given("old"))
        self.anchor = self.rollout if settings.loss in OF_THE_SAMPLER else self.old
        self.log_ratio = self.new - self.anchor
        loss = LOSSES[settings.loss] if isinstance(settings.loss, str) else settings.loss
        found = [
            loss(Tokens(self.log_ratio[unit], self.new[unit], self.advantages[unit], scores.entropy[unit].detach(), settings))
            for unit in live
        ]
        self.values = joined([value for value, _ in found])
        self.is_clipped = joined([is_clipped for _, is_clipped in found]).bool()
        self.correct(live)
        self.add_up()

    def given(self, name: str) -> Tensor:
        """0 where a sample has none of it."""
        vectors = [getattr(sample, name) for sample in self.samples]
        values = [vectors[i][t] if vectors[i] is not None else 0.0 for i, t in zip(self.owners, self.places, strict=True)]
        return torch.tensor(values, dtype=torch.float64)

    def correct(self, sample_places: list[list[int]]) -> None:
        """The factors, w, and which tokens are dropped as part of an off-policy sample (DeepSeek-V3.2, section 3.1)."""
        settings, logs = self.settings, (self.old - self.rollout).detach()
        level = LEVELS[settings.level]
        self.ratios = bounded_exp(joined([level(logs[tokens]) for tokens in sample_places]))
        if settings.correction == "none":
            self.ratios = torch.ones_like(logs)
        usual = USUAL_BOUNDS.get((settings.correction, settings.level), (0.0, math.inf))
        self.bounds = [published if given is None else given for given, published in zip(settings.bounds, usual, strict=True)]
        self.factors = CORRECTIONS[settings.correction](self.ratios, bounded_exp(logs), *self.bounds)
        divergences = [(self.rollout - self.new.detach())[tokens].mean().expand(len(tokens)) for tokens in sample_places]
        delta = math.inf if settings.sequence_delta is None else settings.sequence_delta
        self.is_off_policy = (self.advantages < 0) & (joined(divergences) > delta)
        self.factors = torch.where(self.is_off_policy, 0.0, self.factors)

    def add_up(self) -> None:
        settings, live = self.settings, [len(tokens) for tokens in self.of_samples]
        policy_weights = token_weights(self.samples, live, settings)
        other_weights = token_weights(self.samples, live, replace(settings, aggregation="sample_mean"))
        weights, others = (self.factors.new_tensor([of[i] for i in self.owners]) for of in (policy_weights, other_weights))
        value, trained = ESTIMATORS[settings.kl_estimator](self.new, self.given("ref"), self.log_ratio)
        self.policy = (weights * self.importance * self.factors * self.values).sum()
        self.kl = (others * (value.detach() + trained - trained.detach())).sum()
        self.entropy = (others * self.scores.entropy).sum()

    def loss(self) -> Tensor:
        return self.policy + self.settings.kl_coefficient * self.kl - self.settings.entropy_coefficient * self.entropy
