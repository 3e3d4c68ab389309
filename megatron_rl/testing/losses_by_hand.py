"""Each registered loss by hand, as loops over numbers that autograd differentiates. It shares no code with the losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

Numbers = Mapping[str, float]  # the loss's parameters
Result = tuple[Tensor, bool]  # value 0-d, and whether it is clipped


def clipped(ratio: Tensor, advantage: float, low: float, high: float, dual: float = math.inf) -> Tensor:
    """-min(rho A, clip(rho) A) by cases, and for A < 0 at most c A; a clipped ratio is a constant."""
    if advantage < 0 and ratio > dual:
        return ratio.new_tensor(-dual * advantage)
    if advantage > 0 and ratio > 1 + high:
        return ratio.new_tensor(-(1 + high) * advantage)
    if advantage < 0 and ratio < 1 - low:
        return ratio.new_tensor(-(1 - low) * advantage)
    return -ratio * advantage


def clipped_objective(log_ratio: Tensor, advantage: float, log_prob: Tensor, low: float, high: float, numbers: Numbers) -> Result:
    ratio, dual = log_ratio.clamp(-20, 20).exp(), numbers.get("clip_ratio_c", math.inf)
    is_beyond = advantage > 0 and ratio > 1 + high
    is_beyond = is_beyond or (advantage < 0 and (ratio < 1 - low or ratio > dual))
    return clipped(ratio, advantage, low, high, dual), bool((is_beyond or abs(log_ratio) > 20) and advantage != 0)


def weighted_log_prob(log_ratio: Tensor, advantage: float, log_prob: Tensor, low: float, high: float, numbers: Numbers) -> Result:
    ratio = float(log_ratio.detach().clamp(-20, 20).exp())
    weight = min(max(ratio, 1 - low), 1 + high)
    return -weight * advantage * log_prob, weight != ratio and advantage != 0


def sigmoid_of_ratio(log_ratio: Tensor, advantage: float, log_prob: Tensor, low: float, high: float, numbers: Numbers) -> Result:
    temperature = numbers["sapo_temperature_positive" if advantage > 0 else "sapo_temperature_negative"]
    exponent = temperature * (log_ratio.clamp(-20, 20).exp() - 1)
    return -4 / (temperature * (1 + (-exponent).exp())) * advantage, False


def penalised_log_prob(log_ratio: Tensor, advantage: float, log_prob: Tensor, low: float, high: float, numbers: Numbers) -> Result:
    return -advantage * log_prob + numbers["log_ratio_penalty"] * log_ratio**2 / 2, False


def advantage_times_log_prob(
    log_ratio: Tensor, advantage: float, log_prob: Tensor, low: float, high: float, numbers: Numbers
) -> Result:
    return -advantage * log_prob, False


def tapered_log_prob(log_ratio: Tensor, advantage: float, log_prob: Tensor, low: float, high: float, numbers: Numbers) -> Result:
    ratio = float(log_ratio.detach().clamp(-20, 20).exp())
    is_above = advantage < 0 and ratio > 1
    # What is above 1 by rounding is not counted as clipped.
    return -(1.0 if advantage >= 0 or is_above else ratio) * advantage * log_prob, is_above and ratio > 1 + 1e-5


def smoothly_weighted_log_prob(
    log_ratio: Tensor, advantage: float, log_prob: Tensor, low: float, high: float, numbers: Numbers
) -> Result:
    """VESPO: the whole ratio of the sample is a number."""
    whole = min(max(float(log_ratio.detach()) * numbers["token_counts"], -20.0), 20.0)
    side = "negative" if advantage < 0 else "positive"
    power, decay = numbers[f"vespo_power_{side}"], numbers[f"vespo_decay_{side}"]
    return -(math.exp(whole) ** power) * math.exp(decay * (1 - math.exp(whole))) * advantage * log_prob, False


def inside_a_bound(name: str, log_ratio: Tensor, advantage: float, log_prob: Tensor, numbers: Numbers) -> Result:
    """DPPO: the two probabilities as Python numbers. `name` says which divergence."""
    pi, mu = math.exp(log_prob.detach()), math.exp(min(float(log_prob.detach() - log_ratio.detach()), 0.0))
    divergence = abs(pi - mu)
    if name == "dppo_kl":
        rest_of_pi, rest_of_mu = max(1 - pi, 1e-8), max(1 - mu, 1e-8)
        divergence = (mu * math.log(mu / pi) if mu else 0.0) + rest_of_mu * math.log(rest_of_mu / rest_of_pi)
    goes_on = pi > mu if advantage > 0 else pi < mu
    is_masked = goes_on and divergence > numbers["divergence_high" if advantage > 0 else "divergence_low"]
    weight = min(float(log_ratio.detach().clamp(-20, 20).exp()), numbers["ratio_truncation"])
    return (log_prob * 0 if is_masked else -weight * advantage * log_prob), bool(is_masked and advantage != 0)


def total_variation_bound(
    log_ratio: Tensor, advantage: float, log_prob: Tensor, low: float, high: float, numbers: Numbers
) -> Result:
    return inside_a_bound("dppo_tv", log_ratio, advantage, log_prob, numbers)


def kl_bound(log_ratio: Tensor, advantage: float, log_prob: Tensor, low: float, high: float, numbers: Numbers) -> Result:
    return inside_a_bound("dppo_kl", log_ratio, advantage, log_prob, numbers)


def tokens_of_a_clipped_sample(
    log_ratios: list[Tensor], advantages: list[float], log_probs: list[Tensor], low: float, high: float, numbers: Numbers
) -> list[Result]:
    """GSPO-token: the sample's ratio as a number times exp(new - new as a number), which is 1 and has a derivative."""
    mean = sum(float(log_ratio.detach()) for log_ratio in log_ratios) / len(log_ratios)
    ratios = [mean + new - float(new.detach()) for new in log_probs]
    return [
        clipped_objective(ratio, a, new, low, high, numbers) for ratio, a, new in zip(ratios, advantages, log_probs, strict=True)
    ]


def geometric_mean_of_clipped_ratios(
    log_ratios: list[Tensor], advantages: list[float], log_probs: list[Tensor], low: float, high: float, numbers: Numbers
) -> list[Result]:
    """GMPO: a clipped log-ratio is a number."""
    kept, is_clipped = [], []
    for log_ratio, a in zip(log_ratios, advantages, strict=True):
        bound = math.log(1 + high) if a > 0 else math.log(1 - low)
        is_beyond = (a > 0 and log_ratio > bound) or (a < 0 and log_ratio < bound)
        kept.append(log_ratio.new_tensor(bound) if is_beyond else log_ratio)
        is_clipped.append(bool(is_beyond))
    mean = sum(kept[1:], kept[0]) / len(kept)
    ratio = mean.clamp(-20, 20).exp()
    return [(-ratio * a, bool((flag or abs(mean) > 20) and a != 0)) for flag, a in zip(is_clipped, advantages, strict=True)]


def weighted_by_later_tokens(
    log_ratios: list[Tensor], advantages: list[float], log_probs: list[Tensor], low: float, high: float, numbers: Numbers
) -> list[Result]:
    """FIPO: for each token a loop over the tokens from it on. Their weight is a number."""
    limit, found = numbers["fipo_ratio_limit"], []
    shifts = [min(max(float(log_ratio.detach()), -20.0), 20.0) for log_ratio in log_ratios]
    for t, (log_ratio, a) in enumerate(zip(log_ratios, advantages, strict=True)):
        future = 0.0
        for k in range(t, len(shifts)):
            if math.exp(shifts[k]) <= limit:
                future += 0.5 ** ((k - t) / numbers["fipo_half_life"]) * shifts[k]
        weight = min(max(math.exp(future), 1 - numbers["fipo_weight_low"]), 1 + numbers["fipo_weight_high"])
        if a < 0 and math.exp(shifts[t]) > limit:
            weight = min(weight, 1.0)
        found.append(clipped_objective(log_ratio, weight * a, log_probs[t], low, high, {"clip_ratio_c": limit}))
    return found


# Each registered loss by its name: its level, and one element of it as numbers that autograd differentiates:
# (log_ratio 0-d, advantage, log_prob 0-d, low, high, parameters) -> (value 0-d, whether it is clipped). At level "sequence" the
# element is one sample, given by its means, and the parameters hold its token_counts. At level "batch" it is a sample, given by the
# lists of its tokens.
REFERENCES: dict[str, tuple[str, Callable[..., Any]]] = {
    "grpo": ("token", clipped_objective),
    "gspo": ("sequence", clipped_objective),
    "cispo": ("token", weighted_log_prob),
    "gspo_token": ("batch", tokens_of_a_clipped_sample),
    "gmpo": ("batch", geometric_mean_of_clipped_ratios),
    "sapo": ("token", sigmoid_of_ratio),
    "dppo_tv": ("token", total_variation_bound),
    "dppo_kl": ("token", kl_bound),
    "dro": ("token", penalised_log_prob),
    "reinforce": ("token", advantage_times_log_prob),
    "topr": ("token", tapered_log_prob),
    "vespo": ("sequence", smoothly_weighted_log_prob),
    "fipo": ("batch", weighted_by_later_tokens),
}


def sample_by_hand(
    policy_loss: str,
    log_ratios: Sequence[Tensor],  # of the sample's unmasked tokens, 0-d each
    advantages: Sequence[float],
    log_probs: Sequence[Tensor],
    clip: tuple[float, float],
    parameters: Numbers,
) -> list[Result]:
    """Of each token. A loss without a clip does not look at `clip`."""
    level, element = REFERENCES[policy_loss]
    if not log_ratios:
        return []
    if level == "batch":
        found: list[Result] = element(list(log_ratios), list(advantages), list(log_probs), *clip, parameters)
        return found
    if level == "sequence":
        parameters = {**parameters, "token_counts": float(len(log_ratios))}
        log_ratios, log_probs = ([sum(values[1:], values[0]) / len(values)] * len(values) for values in (log_ratios, log_probs))
    given = zip(log_ratios, advantages, log_probs, strict=True)
    return [element(log_ratio, advantage, new, *clip, parameters) for log_ratio, advantage, new in given]
