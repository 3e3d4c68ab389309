"""Checks each step's metrics for signs that a run does not train on what it says. No step is changed.

`watch` is a pure function of a row of metrics and a small state, which a checkpoint keeps. docs/metrics.md lists the findings.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from megatron_rl.config import Watchdog
from megatron_rl.errors import DataError
from megatron_rl.train.writers import REWARD

logger = logging.getLogger(__name__)

# At its first step a policy is the one that sampled: ratio 1. Sampler and trainer round differently, by some 1 %.
HEALTHY_FIRST_RATIO = (0.9, 1.1)
# KL in nats per token. The mean ratio of samples of the old policy is 1 in expectation whatever the new one is. Log-ratios of
# deviation d have d^2 / 2: 0.05 is d = 0.3, ten times the difference of engines of different precision.
LARGEST_FIRST_KL = 0.05
# A sampler that keeps tokens of mass M, and scores them among themselves, has d = log M on each: a mean of d below 0, and little
# variance. exp(d) - 1 - d has a mean of about (mean^2 + variance) / 2. Where d is noise or another policy, the variance is the
# larger part: a temperature of 0.6 or a policy that has moved gave 6 to 25 times what the mean alone gives, top-p 0.8 to 0.95 gave
# 1.0 to 1.4 times, top-k 20 up to 3. At M = 0.99 it drowns in the rounding of two engines.
LARGEST_LOG_MASS, LARGEST_EXCESS_OF_CONSTANT = -0.01, 3.0
# As many steps in a row without a single advantage are no bad luck: the policy gradient stays 0 until something else moves it.
SILENT_STEPS = 20
# A gradient is exactly 0 only where no token has one: in as many steps in a row, whatever the data, something is wrong.
STILL_STEPS = 5


@dataclass(frozen=True, slots=True)
class WatchdogState:
    """What a checkpoint keeps: the reported findings, and what is counted from step to step."""

    reported: tuple[str, ...] = ()
    silent_steps: int = 0
    """Steps so far, without a break, whose advantages were all 0."""
    still_steps: int = 0
    """Steps so far, without a break, whose gradient was exactly 0 although some advantage was not."""
    rewards: tuple[float, ...] = ()
    """The least and the largest mean reward of a rollout."""


def watch(state: WatchdogState, step: int, row: Mapping[str, float | None]) -> tuple[dict[str, str], WatchdogState]:
    """What is wrong with optimiser step `step` (1 is the run's first) by its row of metrics: name -> line, each finding once a run.

    A metric that the row lacks is not checked; --policy-metrics none leaves none. Equal rows give equal findings, so that ranks
    with equal metrics raise together.
    """
    values = {name: value for name, value in row.items() if isinstance(value, int | float) and math.isfinite(value)}
    state = _remember(state, values)
    found = dict(_truncation(step, values))
    if step == 1 and "truncated_old" not in found:
        found |= _first_step(values)
    found |= {**dict(_phantom_tokens(values)), **dict(_silence(values, state)), **dict(_stillness(state))}
    found = {name: line for name, line in found.items() if name not in state.reported}
    return found, replace(state, reported=(*state.reported, *found))


def _remember(state: WatchdogState, values: Mapping[str, float]) -> WatchdogState:
    if "policy/max_advantage" in values:
        has_signal = values["policy/max_advantage"] != 0.0 or values.get("policy/min_advantage", 0.0) != 0.0
        is_still = has_signal and values.get("grad_norm") == 0.0
        state = replace(state, silent_steps=0 if has_signal else state.silent_steps + 1)
        state = replace(state, still_steps=state.still_steps + 1 if is_still else 0)
    if REWARD in values:
        run_rewards = (*state.rewards, values[REWARD])
        state = replace(state, rewards=(min(run_rewards), max(run_rewards)))
    return state


def _truncation(step: int, values: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """Of the sampler's own log-probabilities at any step, and of old ones at the first, where they may be the sampler's."""
    compared = {"rollout": (values.get("policy/train_rollout_logprob_diff"), values.get("policy/train_rollout_kl"))}
    new, old = values.get("policy/new_logprobs"), values.get("policy/old_logprobs")
    if step == 1 and new is not None and old is not None:
        compared["old"] = (new - old, values.get("policy/kl_new_old"))
    for name, (mean, kl) in compared.items():
        if mean is None or kl is None or mean > LARGEST_LOG_MASS:
            continue
        if kl <= LARGEST_EXCESS_OF_CONSTANT * (math.exp(mean) - 1 - mean):
            yield (
                f"truncated_{name}",
                f"{name}_log_probs are {-mean:.3f} nats above the trainer's on nearly every token, so each importance weight is "
                f"off by a mass of {math.exp(mean):.2f}: the sampler kept a part of the vocabulary and reports log-probabilities "
                "among the tokens that it kept; sample with top_p 1, top_k -1 and min_p 0",
            )


def _first_step(values: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    ratio, kl = values.get("policy/ratio_new_old", 1.0), values.get("policy/kl_new_old", 0.0)
    phantoms = values.get("policy/num_phantom_tokens", 0)
    causes = (
        "check --policy-temperature (as in sampling), --fp32-lm-head (where the sampler's head is float32), and the "
        "log-probabilities of --rollouts: of other weights than those that sampled, shifted by a token, or prompt tokens unmasked?"
    )
    if not HEALTHY_FIRST_RATIO[0] <= ratio <= HEALTHY_FIRST_RATIO[1]:
        yield "first_ratio", f"mean importance ratio {ratio:.3f} at the first step, expected 1: {causes}"
    elif kl > LARGEST_FIRST_KL and not phantoms:  # one line for one cause
        yield "first_kl", f"KL from old to new {kl:.2g} nats per token at the first step, expected 0: {causes}"
    if phantoms:
        yield (
            "first_phantom_tokens",
            f"{phantoms:.0f} phantom tokens at the first step: unmasked, with an old log-probability of exactly 0 that the policy "
            "does not share, so it was not measured (a tool's or a prompt's token?); set their loss_mask to 0 in --rollouts",
        )


def _phantom_tokens(values: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """The loss counts its own tokens; the weights come from what count_step has counted."""
    seen, counted = values.get("policy/num_tokens"), values.get("num_tokens")
    if seen is not None and counted is not None and seen != counted:
        yield (
            "phantom_num_tokens",
            f"the loss sees {seen:.0f} unmasked tokens and the step is divided by {counted:.0f}: the difference is phantom tokens; "
            "hand the same loss masks to count_step and to the loss, and change none in between",
        )


def _silence(values: Mapping[str, float], state: WatchdogState) -> Iterator[tuple[str, str]]:
    """A task that is solved has no signal either: then the reward is the best of the run."""
    if state.silent_steps < SILENT_STEPS or REWARD not in values:
        return
    reward, (least, best) = values[REWARD], state.rewards
    if reward < best or least == best:
        yield (
            "no_signal",
            f"every advantage was 0 in {SILENT_STEPS} steps, because all samples of a prompt had equal rewards, and the gradient "
            f"of the policy is 0 (reward {reward:.3f}, best of the run {best:.3f}): look at the responses (--resume --show-samples "
            "8); if they are all alike, start again with a lower --lr; if the reward cannot tell them apart, give one with partial "
            "credit, easier --prompts or more --samples-per-prompt",
        )


def _stillness(state: WatchdogState) -> Iterator[tuple[str, str]]:
    """No weight has moved since the first of these steps, so nothing ends it but other data."""
    if state.still_steps >= STILL_STEPS:
        yield (
            "zero_gradient",
            f"the gradient was exactly 0 in {STILL_STEPS} steps although some advantages are not 0: check the old_log_probs of "
            "--rollouts (of other weights, they clip every token), the bounds of the clip and of --importance-correction, the loss "
            "masks, and whether the parameters take a gradient at all",
        )


def look(watchdog: str, state: WatchdogState, step: int, row: Mapping[str, float | None], *, speaks: bool) -> WatchdogState:
    """`watch` as --watchdog says: logs what it finds on the rank that speaks, or raises one DataError on all ranks."""
    if watchdog == Watchdog.OFF:
        return state
    found, state = watch(state, step, row)
    if found and watchdog == Watchdog.RAISE:
        raise DataError("\n".join(found.values()))
    for line in found.values() if speaks else ():
        logger.warning(line)
    return state
