"""Loss, gradient and metrics of a whole step, from the equations of the papers. It imports torch alone.

One process, float64, the logits of all samples at once; autograd takes the derivative. A name without a formula here is an error
that says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

BOUND = 20.0  # log-ratios are bounded to +- this before exp
TINY_REST = 1e-8  # DPPO: 1 - p is at least this
SAME_POLICY = 1e-5  # TOPR: a ratio above 1 by less is rounding
# Corrections that the field uses with one value: Yao et al. (tis), Ring-1T (icepop). Elsewhere both bounds are given.
USUAL_BOUNDS = {("tis", "token"): (0.0, 2.0), ("icepop", "token"): (0.5, 5.0)}


@dataclass(frozen=True, kw_only=True)
class DenseSample:
    """A sample of m tokens, masked ones included; a vector has one number a token. What is masked is not read."""

    labels: list[int]
    mask: list[bool]
    advantages: list[float]
    old: list[float] | None  # None: on-policy
    rollout: list[float]
    ref: list[float]
    importance: list[float]
    prompt: str
    kept: list[list[int]] | None = None  # the ids that the sampler drew from; None: all
    rollout_id: str | None = None  # equal for the rows of a rollout; None: the sample is one


@dataclass(frozen=True, kw_only=True)
class DenseSettings:
    loss: str
    low: float = math.nan  # the clip, as distances from 1
    high: float = math.nan
    parameters: dict[str, float] = field(default_factory=dict)
    aggregation: str = "sample_mean"
    divisor: float = 1.0
    correction: str = "none"
    level: str = "token"
    bounds: tuple[float | None, float | None] = (None, None)
    sequence_delta: float | None = None
    is_dropped: bool = False  # rejected tokens are not counted
    kl_estimator: str = "k3"
    kl_score: str = "full"  # where ids are kept: whether ref and the KL term are over all ids, or over the kept ones
    kl_coefficient: float = 0.0
    entropy_coefficient: float = 0.0
    entropy_score: str = "full"  # likewise of the entropy
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


def gmpo(tokens: Tokens) -> Result:
    """arXiv:2507.20673: tokens are clipped in log space, each on the side where its advantage pushes; then the geometric mean."""
    a, log_ratio = tokens.advantages, tokens.log_ratio
    above = (a > 0) & (log_ratio > math.log(1 + tokens.settings.high))
    below = (a < 0) & (log_ratio < math.log(1 - tokens.settings.low))
    kept = torch.where(above, math.log(1 + tokens.settings.high), torch.where(below, math.log(1 - tokens.settings.low), log_ratio))
    mean = tokens.mean(kept)
    return -bounded_exp(mean) * a, (above | below | (mean.abs() > BOUND)) & (a != 0)


def sapo(tokens: Tokens) -> Result:
    """arXiv:2511.20347: f(r) = 4 / tau sigmoid(tau (r - 1))."""
    names = ("sapo_temperature_positive", "sapo_temperature_negative")
    tau = torch.tensor([tokens.number(names[int(a <= 0)]) for a in tokens.advantages], dtype=torch.float64)
    value = -4 / tau * torch.sigmoid(tau * (bounded_exp(tokens.log_ratio) - 1)) * tokens.advantages
    return value, torch.zeros_like(value, dtype=torch.bool)


def dppo(tokens: Tokens, divergence: Callable[[float, float], float]) -> Result:
    """arXiv:2602.04879: a token that has left the trust region, and would go on, is masked; the ratio is truncated."""
    weights, is_masked = [], []
    for log_ratio, log_prob, a in zip(*(x.tolist() for x in (tokens.log_ratio, tokens.log_probs, tokens.advantages)), strict=True):
        pi, mu = math.exp(log_prob), math.exp(min(log_prob - log_ratio, 0.0))
        bound = tokens.number("divergence_high" if a > 0 else "divergence_low")
        goes_on = pi > mu if a > 0 else pi < mu
        is_masked.append(goes_on and divergence(pi, mu) > bound)
        ratio = math.exp(min(max(log_ratio, -BOUND), BOUND))
        weights.append(0.0 if is_masked[-1] else min(ratio, tokens.number("ratio_truncation")))
    value = -torch.tensor(weights, dtype=torch.float64) * tokens.advantages * tokens.log_probs
    return value, torch.tensor(is_masked, dtype=torch.bool) & (tokens.advantages != 0)


def total_variation(pi: float, mu: float) -> float:
    return abs(pi - mu)


def binary_kl(pi: float, mu: float) -> float:
    """KL(mu, pi) of taking the token or not."""
    rests = [max(1 - p, TINY_REST) for p in (pi, mu)]
    return (mu * math.log(mu / pi) if mu else 0.0) + rests[1] * math.log(rests[1] / rests[0])


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


def fipo(tokens: Tokens) -> Result:
    """arXiv:2603.19835, section 3: the advantage is weighed by what the policy does to the tokens from here on."""
    limit, gamma = tokens.number("fipo_ratio_limit"), 0.5 ** (1 / tokens.number("fipo_half_life"))
    shifts = tokens.log_ratio.detach().clamp(-BOUND, BOUND)
    taken = torch.where(shifts.exp() > limit, 0.0, shifts)
    futures = [sum(gamma ** (k - t) * taken[k] for k in range(t, len(taken))) for t in range(len(taken))]
    weights = torch.stack(futures).exp().clamp(1 - tokens.number("fipo_weight_low"), 1 + tokens.number("fipo_weight_high"))
    weights = torch.where((tokens.advantages < 0) & (shifts.exp() > limit), weights.clamp(max=1.0), weights)
    settings = replace(tokens.settings, parameters={"clip_ratio_c": limit})
    return clipped_surrogate(replace(tokens, advantages=weights * tokens.advantages, settings=settings), tokens.log_ratio)


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
    "fipo": fipo,
}
# The ratio of these papers is to the policy that sampled.
OF_THE_SAMPLER = {"dppo_tv", "dppo_kl"}
# These have one ratio a sample.
ONE_RATIO_A_SAMPLE = {"gspo", "vespo"}
# The weight of a token by R, P, T of the step, m of its sample, Mj and kj of its rollout, M of its prompt, L the divisor.
AGGREGATIONS: dict[str, Callable[..., float]] = {
    "sample_mean": lambda R, P, T, m, Mj, kj, M, L: 1 / (R * Mj),
    "prompt_mean": lambda R, P, T, m, Mj, kj, M, L: 1 / (P * M),
    "token_mean": lambda R, P, T, m, Mj, kj, M, L: 1 / T,
    "constant": lambda R, P, T, m, Mj, kj, M, L: 1 / (L * R),
    "row_mean": lambda R, P, T, m, Mj, kj, M, L: 1 / (R * kj * m),
}
# The factor by w, the ratio of old to sampler, and its bounds.
CORRECTIONS: dict[str, Callable[[Tensor, float, float], Tensor]] = {
    "none": lambda w, low, high: torch.ones_like(w),
    "tis": lambda w, low, high: w.clamp(low, high),
    "icepop": lambda w, low, high: w * ((w >= low) & (w <= high)),
    "mask": lambda w, low, high: ((w >= low) & (w <= high)).double(),
    "seq_mask_tis": lambda w, low, high: ((w >= low) & (w <= high)).double(),
}
# Where a token has its own w as a further factor.
TIMES_OWN_RATIO = {"seq_mask_tis"}
# log w of a token, of the [m] log-ratios of its sample.
LEVELS: dict[str, Callable[[Tensor], Tensor]] = {
    "token": lambda logs: logs,
    "sequence_mean": lambda logs: (logs.sum() / len(logs)).expand(len(logs)),
    "sequence_sum": lambda logs: logs.sum().expand(len(logs)),
}
# (value, what is differentiated in its place) by d = log pi - log ref, bounded d, and the ratio rho. Schulman, 2020; unbiased:
# DeepSeek-V3.2, arXiv:2512.02556, equation 7.
ESTIMATORS: dict[str, Callable[[Tensor, Tensor, Tensor], Result]] = {
    "k1": lambda d, bounded, rho: (d, d),
    "k2": lambda d, bounded, rho: (d**2 / 2, d**2 / 2),
    "k3": lambda d, bounded, rho: ((-bounded).exp() + bounded - 1, (-bounded).exp() + bounded - 1),
    "k3+": lambda d, bounded, rho: ((-bounded).exp() + bounded - 1, d**2 / 2),
    "unbiased": lambda d, bounded, rho: (rho * ((-bounded).exp() + bounded - 1), rho * ((-bounded).exp() + bounded - 1)),
}


def formula(table: dict, name: str, of_what: str):
    if name not in table:
        raise KeyError(f"{of_what} {name!r} has no formula: add it to the oracle, megatron_rl/testing/oracle.py")
    return table[name]


@dataclass(frozen=True)
class DenseResult:
    loss: float
    gradient: Tensor  # [all tokens, V]
    policy_loss: float
    kl_loss: float
    entropy: float
    metrics: dict[str, float]
    log_probs: Tensor  # [all tokens], 0 where masked
    num_counted: int  # the tokens that the aggregation counts
    num_unmasked: int


def dense_step(samples: Sequence[DenseSample], logits: Tensor, settings: DenseSettings) -> DenseResult:
    """logits: [all tokens of all samples, V], in order."""
    leaf = logits.double().detach().requires_grad_()
    log_softmax = torch.log_softmax(leaf / settings.temperature, -1)
    starts = [0]
    for sample in samples:
        starts.append(starts[-1] + len(sample.labels))
    parts = [SampleTerms(s, log_softmax[a:b], settings) for s, a, b in zip(samples, starts[:-1], starts[1:], strict=True)]
    counts = [int(part.is_kept().sum()) if settings.is_dropped else len(part.live) for part in parts]  # of the policy term
    names = [sample.rollout_id or f"sample {place}" for place, sample in enumerate(samples)]
    of_prompts: dict[str, int] = {}
    for sample, count in zip(samples, counts, strict=True):
        of_prompts[sample.prompt] = of_prompts.get(sample.prompt, 0) + count
    of_rollouts = {name: [count for other, count in zip(names, counts, strict=True) if other == name] for name in names}
    live_of = {name: sum(len(part.live) for other, part in zip(names, parts, strict=True) if other == name) for name in names}
    weigh = formula(AGGREGATIONS, settings.aggregation, "loss aggregation")
    policy = kl = entropy = leaf.sum() * 0.0
    for part, m, name in zip(parts, counts, names, strict=True):
        if m > 0:
            of_step = {"R": len(of_rollouts), "P": len(of_prompts), "T": sum(counts), "M": of_prompts[part.sample.prompt]}
            of_step |= {"Mj": sum(of_rollouts[name]), "kj": sum(count > 0 for count in of_rollouts[name])}
            weight = weigh(**of_step, m=m, L=settings.divisor)
            policy = policy + weight * (part.importance * part.factors * part.values).sum()
        if part.live:
            weight = 1 / (len(of_rollouts) * live_of[name])
            kl, entropy = kl + weight * part.kl.sum(), entropy + weight * part.entropy.sum()
    loss = policy + settings.kl_coefficient * kl - settings.entropy_coefficient * entropy
    (gradient,) = torch.autograd.grad(loss, leaf)
    log_probs = torch.cat([torch.zeros(0, dtype=torch.float64), *(part.all_log_probs() for part in parts)])
    metrics = dense_metrics([part for part in parts if part.live], len(samples), settings)
    return DenseResult(
        loss=float(loss.detach()),
        gradient=gradient,
        policy_loss=float(policy.detach()),
        kl_loss=float(kl.detach()),
        entropy=float(entropy.detach()),
        metrics=metrics,
        log_probs=log_probs,
        num_counted=sum(counts),
        num_unmasked=sum(len(part.live) for part in parts),
    )


def over_kept(row: Tensor, kept: Sequence[int], label: int) -> Tensor:  # [V], any logits or log-probabilities -> 0-d
    """log pi(label) where the sampler draws from the kept ids alone: -log sum_{k kept} exp(x_k - x_label)."""
    return -torch.logsumexp(torch.stack([row[k] - row[label] for k in kept]), 0)


class SampleTerms:
    """What one sample gives to each term, on its unmasked tokens [m]."""

    def __init__(self, sample: DenseSample, log_softmax: Tensor, settings: DenseSettings):
        self.sample, self.settings = sample, settings
        self.live = [t for t, is_live in enumerate(sample.mask) if is_live]

        def of(values: Sequence[float]) -> Tensor:
            return torch.tensor([values[t] for t in self.live], dtype=torch.float64)

        rows = log_softmax[self.live]
        one_hot = torch.nn.functional.one_hot(torch.tensor([sample.labels[t] for t in self.live], dtype=torch.int64), rows.shape[1])
        self.new = full = (one_hot * rows).sum(-1)
        if sample.kept is not None and self.live:
            kept = [(row, sample.kept[t], sample.labels[t]) for row, t in zip(rows, self.live, strict=True)]
            self.new = torch.stack([over_kept(*of_token) for of_token in kept])
            self.num_kept = torch.tensor([len(ids) for _, ids, _ in kept])
            self.mass = torch.stack([row[ids].exp().sum() for row, ids, _ in kept]).detach()
        self.entropy = -(rows.exp() * rows).sum(-1)
        if settings.entropy_score == "support" and sample.kept is not None and self.live:
            of_kept = [row[ids].log_softmax(0) for row, ids, _ in kept]
            self.entropy = torch.stack([-(log_p.exp() * log_p).sum() for log_p in of_kept])
        self.rollout, self.importance, self.advantages = of(sample.rollout), of(sample.importance), of(sample.advantages)
        self.old = self.new.detach() if sample.old is None else of(sample.old)
        self.anchor = self.rollout if settings.loss in OF_THE_SAMPLER else self.old
        self.log_ratio = self.new - self.anchor
        tokens = Tokens(self.log_ratio, self.new, self.advantages, self.entropy.detach(), settings)
        self.values, self.is_clipped = self.new, torch.zeros(0, dtype=torch.bool)
        if self.live:
            self.values, self.is_clipped = formula(LOSSES, settings.loss, "policy loss")(tokens)
        self.factors, self.ratios, self.is_off_policy = self.corrected()
        d = (full if settings.kl_score == "full" else self.new) - of(sample.ref)
        estimate = formula(ESTIMATORS, settings.kl_estimator, "KL estimator")
        value, trained = estimate(d, d.clamp(-BOUND, BOUND), bounded_exp(self.log_ratio))
        if settings.kl_estimator == "unbiased":  # beyond the bound there is no gradient
            is_inside = (self.log_ratio.abs() <= BOUND) & (d.abs() <= BOUND)
            trained = torch.where(is_inside, trained, 0.0)
        self.kl = value.detach() + trained - trained.detach()

    def corrected(self) -> tuple[Tensor, Tensor, Tensor]:
        """The factor, w, and whether the token is dropped as part of an off-policy sample (DeepSeek-V3.2, section 3.1)."""
        settings, logs = self.settings, (self.old - self.rollout).detach()
        if settings.correction == "none" or not self.live:
            ratios = torch.ones_like(logs)
        else:
            ratios = bounded_exp(formula(LEVELS, settings.level, "correction level")(logs))
        factors = formula(CORRECTIONS, settings.correction, "importance correction")(ratios, *self.bounds())
        if settings.correction in TIMES_OWN_RATIO:
            factors = factors * bounded_exp(logs)
        is_off_policy = torch.zeros(len(self.live), dtype=torch.bool)
        if settings.sequence_delta is not None and self.live:
            divergence = float((self.rollout - self.new.detach()).sum()) / len(self.live)
            is_off_policy = (self.advantages < 0) & (divergence > settings.sequence_delta)
        return torch.where(is_off_policy, 0.0, factors), ratios, is_off_policy

    def bounds(self) -> tuple[float, float]:
        usual = USUAL_BOUNDS.get((self.settings.correction, self.settings.level), (0.0, math.inf))
        given = zip(self.settings.bounds, usual, strict=True)
        low, high = (of_paper if bound is None else bound for bound, of_paper in given)
        return low, high

    def is_kept(self) -> Tensor:
        return self.factors != 0

    def all_log_probs(self) -> Tensor:
        found = torch.zeros(len(self.sample.mask), dtype=torch.float64)
        found[self.live] = self.new.detach()
        return found


def dense_metrics(parts: Sequence[SampleTerms], num_documents: int, settings: DenseSettings) -> dict[str, float]:
    """Means over samples of means over tokens, sums and extremes over tokens; {} for a step without a token."""
    if not parts:
        return {}

    def means(values: Callable[[SampleTerms], Tensor]) -> float:
        return sum(float(values(part).double().mean()) for part in parts) / len(parts)

    def tokens(values: Callable[[SampleTerms], Tensor]) -> Tensor:
        return torch.cat([values(part).double().detach() for part in parts])

    def ratio(part: SampleTerms) -> Tensor:
        of_tokens = part.log_ratio.detach()
        is_shared = settings.loss in ONE_RATIO_A_SAMPLE
        return bounded_exp((of_tokens.sum() / len(of_tokens)).expand(len(of_tokens)) if is_shared else of_tokens)

    def sample_size(values: Tensor) -> float:
        return float(values.sum() ** 2 / (values**2).sum() / len(values)) if values.any() else 0.0

    def k3(part: SampleTerms) -> Tensor:
        x = part.log_ratio.detach().clamp(-BOUND, BOUND)
        return x.exp() - x - 1

    seen = torch.cat([ratio(part)[:1] if settings.loss in ONE_RATIO_A_SAMPLE else ratio(part) for part in parts])
    advantages = tokens(lambda part: part.advantages)
    found = {
        "num_documents": num_documents,
        "num_tokens": sum(len(part.live) for part in parts),
        "old_logprobs": means(lambda part: part.anchor),
        "new_logprobs": means(lambda part: part.new.detach()),
        "ratio_new_old": means(ratio),
        "ratio_new_old_sum": float(seen.sum()),
        "ratio_new_old_squared_sum": float((seen**2).sum()),
        "effective_sample_size": sample_size(seen),
        "kl_new_old": means(k3),
        "clipped_ratio_fraction": means(lambda part: part.is_clipped),
        "clipped_low": means(lambda part: part.is_clipped & (part.advantages < 0)),
        "clipped_high": means(lambda part: part.is_clipped & (part.advantages > 0)),
        "advantage": means(lambda part: part.advantages),
        "max_advantage": float(advantages.max()),
        "min_advantage": float(advantages.min()),
        "entropy": means(lambda part: part.entropy.detach()),
    }
    if any(part.sample.kept is not None for part in parts):
        found |= {"kept_ids": means(lambda part: part.num_kept), "outside_support": 0, "kept_mass": means(lambda part: part.mass)}
    if settings.correction == "none" and settings.sequence_delta is None:
        return found
    is_kept = tokens(SampleTerms.is_kept)
    for sign, is_of_sign in {"positive": advantages > 0, "negative": advantages < 0}.items():
        if is_of_sign.any():
            found[f"correction_kept_{sign}"] = float(is_kept[is_of_sign].mean())
    return found | {
        "correction_kept_tokens": float(is_kept.mean()),
        "correction_kept_samples": means(SampleTerms.is_kept),
        "correction_off_policy": means(lambda part: part.is_off_policy),
        "correction_weight": means(lambda part: part.factors),
        "correction_at_low": float(tokens(lambda part: part.ratios < part.bounds()[0]).mean()),
        "correction_at_high": float(tokens(lambda part: part.ratios > part.bounds()[1]).mean()),
        "correction_largest_weight": float(tokens(lambda part: part.factors).max()),
        "correction_largest_ratio": float(tokens(lambda part: part.ratios).max()),
        "correction_effective_sample_size": sample_size(tokens(lambda part: part.factors)),
    }
