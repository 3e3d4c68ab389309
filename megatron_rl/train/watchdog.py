"""Checks each step's metrics for signs that a run does not train on what it says. No step is changed.

`watch` is a pure function of a row of metrics and a small state, which a checkpoint keeps. docs/metrics.md lists the findings.
"""

from __future__ import annotations

import itertools
import logging
import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace

from megatron_rl.config import CorrectionLevel, PolicyLossConfig, PolicyMetrics, RatioUnit, Watchdog
from megatron_rl.errors import DataError
from megatron_rl.loss_hub import clip_in_words, get_policy_loss
from megatron_rl.train.writers import CHANGED_WEIGHTS, LENGTH, MOVED_KL, REWARD

logger = logging.getLogger(__name__)

# At its first step a policy is the one that sampled: ratio 1, nothing clipped. Sampler and trainer round differently, by some 1 %.
HEALTHY_FIRST_RATIO = (0.9, 1.1)
# If ratios were noise, about half of the tokens with a signal could be clipped, because the sign must fit: more is no noise.
LARGEST_FIRST_CLIP_FRACTION = 0.6
# Log-normal ratios of deviation d have exp(-d^2). Tokens: 0.5 is d = 0.83, one ratio in five off by a factor of two. Documents: a
# mean over m tokens has exp(-d^2 / m), so the same tokens give 0.9 at m = 7 already, and more at any greater length.
LEAST_FIRST_SAMPLE_SIZE = {"token": 0.5, "sequence": 0.9, "batch": 0.5}  # at level "batch" the metrics have the token's ratio
# KL in nats per token. The mean ratio of samples of the old policy is 1 in expectation whatever the new one is, so another
# temperature or shifted log-probs may leave ratio and sample size as they are. Log-ratios of deviation d have d^2 / 2: 0.05 is
# d = 0.3, ten times the difference of engines of different precision.
LARGEST_FIRST_KL = 0.05
# The same where one engine has measured old and new log-probabilities at the same weights: d is rounding alone. A log-prob is a
# difference of logits, of some 30 at most. Rounding them to bfloat16 gives 30 x 2^-9 = 0.06, and the layers below give as much:
# d = 0.1. Float32 gives 30 x 2^-24 = 2e-6; the sum of hundreds of these is below d = 4.5e-3.
LARGEST_FIRST_KL_OF_ONE_ENGINE = {"bfloat16": 5e-3, "float32": 1e-5}
# A sampler that keeps tokens of mass M, and scores them among themselves, has d = log M on each: a mean of d below 0, and little
# variance. exp(d) - 1 - d has a mean of about (mean^2 + variance) / 2. Where d is noise or another policy, the variance is the
# larger part: a temperature of 0.6 or a policy that has moved gave 6 to 25 times what the mean alone gives, top-p 0.8 to 0.95 gave
# 1.0 to 1.4 times, top-k 20 up to 3. At M = 0.99 it drowns in the rounding of two engines.
LARGEST_LOG_MASS, LARGEST_EXCESS_OF_CONSTANT = -0.01, 3.0
# A GSPO clip that acts on less than one token in a thousand, over this number of steps in which it could act, never acts.
IDLE_CLIP_FRACTION, IDLE_CLIP_STEPS = 1e-3, 20
# Under these a correction throws away most of a step, or leaves it to few tokens.
LEAST_KEPT_SHARE, LEAST_CORRECTED_SAMPLE_SIZE = 0.5, 0.1
# A correction that changes no token over this number of steps does nothing: one measurement was given twice, or bounds are wide.
IDLE_CORRECTION_STEPS = 20
# As many steps in a row without a single advantage are no bad luck: the policy gradient stays 0 until something else moves it.
SILENT_STEPS = 20
# A gradient is exactly 0 only where no token has one: in as many steps in a row, whatever the data, something is wrong.
STILL_STEPS = 5
# KL in nats per token of a policy from itself as many steps before. 1e-6 is a log-ratio of deviation 1.4e-3 (d^2 / 2): the
# probability of a token changes by a thousandth. A small model of random weights had 5e-7 at a learning rate of 1e-6, and 5e-2 at
# the 1e-3 with which it learns: the KL grows with the square.
LEAST_KL, UNMOVED_STEPS = 1e-6, 20
# Bfloat16 logits of a large model change by their rounding where few weights do. At a learning rate of 1e-6 6 % of the bfloat16
# weights changed in these steps, at 1e-7 0.8 %, at 1e-9 0.03 %.
LEAST_CHANGED_SHARE = 1e-3
# The KL to which the remedy scales the learning rate: a hundredth of what the model that learns had, and common in a first stretch.
USUAL_KL = 5e-4
# Responses of a tenth of the run's longest mean length, for as many steps in a row, where the reward is not the run's best.
COLLAPSED_SHARE, COLLAPSED_STEPS = 0.1, 20
# The reward has fallen where it did in so many of all pairs of one of the first rollouts and one of the last, and by so much of the
# first mean. Of 300 rollouts that learn nothing, of a normal, log-normal or sparse reward, at most 1 run in 100 has that. The demo
# that was trained away from its advantages had it after 25 and 26.
FIRST_REWARDS, LAST_REWARDS, FALLEN_PAIRS, FALLEN_SHARE = 5, 20, 0.97, 0.75


@dataclass(frozen=True, slots=True)
class WatchdogState:
    """What a checkpoint keeps: the reported findings, and the clip fractions of the last steps that could clip."""

    reported: tuple[str, ...] = ()
    last_rollout: int | None = None
    clip_fractions: tuple[float, ...] = ()
    idle_corrections: int = 0
    """Steps so far, without a break, on which the correction changed nothing."""
    silent_steps: int = 0
    """Steps so far, without a break, whose advantages were all 0."""
    still_steps: int = 0
    """Steps so far, without a break, whose gradient was exactly 0 although some advantage was not."""
    moving_steps: int = 0
    """Steps with a signal and the full learning rate, since how far the policy moved was measured."""
    unrated_steps: int = 0
    """Steps so far, without a break, whose learning rate was 0."""
    learning_rates: tuple[float, float] = (0.0, 0.0)
    """The largest so far, and the last."""
    rewards: tuple[float, ...] = ()
    """The least and the largest mean reward of a rollout."""
    first_rewards: tuple[float, ...] = ()
    """Of the run's first rollouts."""
    last_rewards: tuple[float, ...] = ()
    """Of the last ones that are none of these."""
    longest: float = 0.0
    """The largest mean length of a rollout's responses, in tokens."""
    short_steps: int = 0
    """Steps so far, without a break, whose responses were a tenth of that or less."""


@dataclass(frozen=True, slots=True)
class WatchdogFinding:
    name: str
    line: str
    can_raise: bool = True


def watch(
    config: PolicyLossConfig, state: WatchdogState, step: int, row: Mapping[str, float | None], *, is_float32: bool = False
) -> tuple[list[WatchdogFinding], WatchdogState]:
    """What is wrong with optimiser step `step` (1 is the run's first) by its row of metrics, each finding once a run.

    A metric that the row lacks is not checked; --policy-metrics none leaves none. row["rollout"] marks the steps after the first
    one on the same rollout. Equal rows give equal findings, so that ranks with equal metrics raise together. is_float32: the policy
    computes in float32, so that one engine agrees with itself to that rounding.
    """
    values = {name: value for name, value in row.items() if isinstance(value, int | float) and math.isfinite(value)}
    state = _remember(config, state, values)
    found = [*_truncation(step, values)]
    if step == 1 and not any(finding.name in ("truncated_old", "whole_old") for finding in found):
        found += _first_step(config, values)
    found += _first_kl(config, values, is_float32) if step == 1 and not found else []  # one line for one cause
    found += [*_phantom_counts(config, values), *_idle_clip(config, state), *_correction(values, state), *_silence(values, state)]
    found += [*_stillness(config, values, state), *_collapse(values, state), *_unmoved(values, state, is_float32)]
    found += [*_fallen(state)]
    found += [*_first_product(config, values)] if step == 1 else []
    found = [finding for finding in found if finding.name not in state.reported]
    state = replace(state, moving_steps=0) if CHANGED_WEIGHTS in values else state
    return found, replace(state, reported=(*state.reported, *(finding.name for finding in found)))


def _compared(config: PolicyLossConfig) -> tuple[str, str]:
    """The field that the loss compares with, and what to do where it is of other weights."""
    if get_policy_loss(config.policy_loss).anchor == "rollout":
        return "rollout_log_probs", "give what the sampling engine measured"
    return "old_log_probs", "null in --rollouts takes this policy's own"


def _truncation(step: int, values: Mapping[str, float]) -> Iterator[WatchdogFinding]:
    """Of the sampler's own log-probabilities at any step, and of old ones at the first, where they may be the sampler's."""
    compared = {"rollout": (values.get("policy/train_rollout_logprob_diff"), values.get("policy/train_rollout_kl"))}
    new, old = values.get("policy/new_logprobs"), values.get("policy/old_logprobs")
    if step == 1 and new is not None and old is not None:
        compared["old"] = (new - old, values.get("policy/kl_new_old"))
    for name, (mean, kl) in compared.items():
        if mean is None or kl is None or abs(mean) < -LARGEST_LOG_MASS:
            continue
        if kl > LARGEST_EXCESS_OF_CONSTANT * (math.exp(mean) - 1 - mean):
            continue
        if mean > 0 and "policy/kept_ids" in values:
            yield WatchdogFinding(
                f"whole_{name}",
                f"{name}_log_probs are {mean:.3f} nats below the trainer's on nearly every token: they are over the vocabulary, "
                f"and the trainer's are over the sampler's kept ids, of mass {math.exp(-mean):.2f}, so each importance weight is "
                "the inverse of that mass; let the sampler report log-probabilities among the kept tokens (vLLM: "
                "logprobs_mode=processed_logprobs), or leave them out of --rollouts",
            )
        if mean < 0:
            yield WatchdogFinding(
                f"truncated_{name}",
                f"{name}_log_probs are {-mean:.3f} nats above the trainer's on nearly every token: the sampler kept a part of the "
                f"vocabulary, of mass {math.exp(mean):.2f} (top-p, top-k, min-p, forbidden words), and reports log-probabilities "
                "among the kept tokens, so each importance weight is that mass; sample with top_p 1, top_k -1 and min_p 0, or let "
                "the sampler report log-probabilities of the whole vocabulary (vLLM: logprobs_mode=raw_logprobs at temperature 1); "
                "--importance-correction then has weights near 1",
            )


def _first_step(config: PolicyLossConfig, values: Mapping[str, float]) -> Iterator[WatchdogFinding]:
    compared, remedy = _compared(config)
    ratio = values.get("policy/ratio_new_old", 1.0)
    if not HEALTHY_FIRST_RATIO[0] <= ratio <= HEALTHY_FIRST_RATIO[1]:
        yield WatchdogFinding(
            "first_ratio",
            f"mean importance ratio {ratio:.3f} at the first step, expected 1: check --policy-temperature (as in sampling), "
            "--fp32-lm-head (where the sampler's head is float32), the loss masks (prompt tokens unmasked?), and whether "
            f"{compared} are of other weights than those that sampled; {remedy}",
        )
    clipped = values.get("policy/clipped_ratio_fraction", 0.0)
    if clipped > LARGEST_FIRST_CLIP_FRACTION:
        yield WatchdogFinding(
            "first_clip_fraction",
            f"clip fraction {clipped:.0%} at the first step, expected 0: sampler and trainer differ before anything moved by more "
            f"than the loss lets pass ({clip_in_words(config)}); check --fp32-lm-head and the {compared} of --rollouts, then widen "
            "--clip-ratio-low and --clip-ratio-high",
        )
    level = get_policy_loss(config.policy_loss).level
    size, least = values.get("policy/effective_sample_size", 1.0), LEAST_FIRST_SAMPLE_SIZE[level]
    if size < least:
        unit = "documents" if level == "sequence" else "tokens"
        yield WatchdogFinding(
            "first_sample_size",
            f"effective sample size {size:.3f} of the {unit} at the first step, expected 1 and at least {least:g}: few of them "
            f"carry the step; check that {compared} of --rollouts are not shifted by a token, --policy-temperature and "
            "--fp32-lm-head",
        )
    phantoms = values.get("policy/num_phantom_tokens", 0)
    if phantoms:
        yield WatchdogFinding(
            "first_phantom_tokens",
            f"{phantoms:.0f} phantom tokens at the first step: unmasked, with an old log-probability of exactly 0 that the policy "
            "does not share, so it was not measured (a tool's or a prompt's token?); set their loss_mask to 0 in --rollouts, or "
            "old_log_probs to null, which takes this policy's own",
        )


def _first_kl(config: PolicyLossConfig, values: Mapping[str, float], is_float32: bool) -> Iterator[WatchdogFinding]:
    kl, dtype = values.get("policy/kl_new_old", 0.0), "float32" if is_float32 else "bfloat16"
    # Rollouts that carry a version and no log-probabilities of a sampler were measured by the trainer's own engine.
    is_of_these_weights = values.get("policy/staleness") == 0.0 and values.get("policy/max_staleness") == 0.0
    is_of_one_engine = is_of_these_weights and "policy/train_rollout_kl" not in values
    if is_of_one_engine and kl > LARGEST_FIRST_KL_OF_ONE_ENGINE[dtype]:
        yield WatchdogFinding(
            "first_kl",
            f"KL from old to new {kl:.2g} nats per token at the first step, expected 0 and at most "
            f"{LARGEST_FIRST_KL_OF_ONE_ENGINE[dtype]:g}, which is rounding in {dtype}: the rollouts say that old log-probs are of "
            "this engine and these weights (policy_version as many steps as are done, no rollout_log_probs); check "
            "--policy-temperature (as in sampling), --seed and the sizes of the model; if another engine measured them, give "
            "them as rollout_log_probs in --rollouts too",
        )
    elif kl > LARGEST_FIRST_KL:
        yield WatchdogFinding(
            "first_kl",
            f"KL from old to new {kl:.2g} nats per token at the first step, expected 0: sampler and trainer do not agree token by "
            f"token although their mean ratio may; check --policy-temperature (as in sampling), that {_compared(config)[0]} "
            "of --rollouts are not shifted by a token, that they are of the weights that this run starts with, and --fp32-lm-head",
        )


def _phantom_counts(config: PolicyLossConfig, values: Mapping[str, float]) -> Iterator[WatchdogFinding]:
    """The loss counts its own tokens; the weights come from what count_step has counted. A document that is a turn or a rollout is
    no sample."""
    counts = [("policy/num_tokens", "num_tokens", "unmasked tokens")]
    if config.importance_ratio_unit == RatioUnit.ROW:
        counts.append(("policy/num_documents", "num_samples", "documents"))
    for seen, counted, what in counts:
        if seen in values and counted in values and values[seen] != values[counted]:
            yield WatchdogFinding(
                f"phantom_{counted}",
                f"the loss sees {values[seen]:.0f} {what} and the step is divided by {values[counted]:.0f}: the difference is "
                f"phantom {what}; hand the same loss masks to count_step and to the loss, and change none in between",
            )


def _remember(config: PolicyLossConfig, state: WatchdogState, values: Mapping[str, float]) -> WatchdogState:
    """Adds the step's clip fraction where the clip could act: not the rollout's first step, some advantages that are not 0, and a
    policy that has moved by more than the published clip."""
    rollout, size = values.get("rollout"), values.get("policy/effective_sample_size", 1.0)
    clipped = values.get("policy/clipped_ratio_fraction")
    is_again = rollout is not None and rollout == state.last_rollout
    has_signal = values.get("policy/max_advantage", 0.0) != 0.0 or values.get("policy/min_advantage", 0.0) != 0.0
    state = replace(state, last_rollout=None if rollout is None else int(rollout))
    if "policy/max_advantage" in values:
        state = replace(state, silent_steps=0 if has_signal else state.silent_steps + 1)
        is_still = has_signal and values.get("grad_norm") == 0.0
        state = replace(state, still_steps=state.still_steps + 1 if is_still else 0)
    if REWARD in values:
        of_run = (*state.rewards, values[REWARD])
        state = replace(state, rewards=(min(of_run), max(of_run)))
        if len(state.first_rewards) < FIRST_REWARDS and not is_again:
            state = replace(state, first_rewards=(*state.first_rewards, values[REWARD]))
        elif not is_again:
            state = replace(state, last_rewards=(*state.last_rewards, values[REWARD])[-LAST_REWARDS:])
    if LENGTH in values:
        longest = max(state.longest, values[LENGTH])
        is_short = values[LENGTH] <= COLLAPSED_SHARE * longest
        state = replace(state, longest=longest, short_steps=state.short_steps + 1 if is_short else 0)
    if "policy/correction_kept_tokens" in values:
        state = replace(state, idle_corrections=state.idle_corrections + 1 if _is_idle(values) else 0)
    rate, (largest, last) = values.get("learning_rate", 0.0), state.learning_rates
    state = replace(state, learning_rates=(max(largest, rate), rate))
    is_full_rate = rate <= last and rate >= largest / 2  # neither in the warm-up nor at the end of the decay
    state = replace(state, moving_steps=state.moving_steps + (has_signal and is_full_rate))
    state = replace(state, unrated_steps=state.unrated_steps + 1 if values.get("learning_rate") == 0.0 else 0)
    loss = get_policy_loss(config.policy_loss)
    if loss.level != "sequence" or loss.clip_ratios is None or clipped is None or not (is_again and has_signal):
        return state
    # (sum r)^2 / (n sum r^2) = 1 / (1 + v^2), v the deviation of the ratios over their mean.
    has_moved = 0.0 < size < 1.0 and math.sqrt(1.0 / size - 1.0) > max(loss.clip_ratios)
    if not has_moved:
        return state
    return replace(state, clip_fractions=(*state.clip_fractions, clipped)[-IDLE_CLIP_STEPS:])


def _silence(values: Mapping[str, float], state: WatchdogState) -> Iterator[WatchdogFinding]:
    """A task that is solved has no signal either: then the reward is the best of the run."""
    if state.silent_steps < SILENT_STEPS or not state.rewards or REWARD not in values:
        return
    reward, (least, best) = values[REWARD], state.rewards
    if least < best and reward >= best:
        return
    cause = f"the reward was {best:g} in every rollout" if least == best else f"reward {reward:.3f}, best of the run {best:.3f}"
    yield WatchdogFinding(
        "no_signal",
        f"every advantage was 0 in {SILENT_STEPS} steps, because all samples of a prompt had equal rewards, and the gradient "
        f"of the policy is 0 ({cause}): look at the responses; if they are all alike, start again with a lower --lr, an "
        "--entropy-coefficient or a --kl-coefficient; if the reward cannot tell them apart, give one with partial credit, easier "
        "--prompts or more --samples-per-prompt",
    )


def _stillness(config: PolicyLossConfig, values: Mapping[str, float], state: WatchdogState) -> Iterator[WatchdogFinding]:
    """No weight has moved since the first of these steps, so nothing ends it but other data."""
    if state.still_steps < STILL_STEPS:
        return
    clipped = values.get("policy/clipped_ratio_fraction")
    has_clip = clipped is not None and get_policy_loss(config.policy_loss).clip_ratios is not None
    how = "" if not has_clip else f"; {clipped:.0%} of the tokens are clipped, by the {clip_in_words(config)}"
    yield WatchdogFinding(
        "zero_gradient",
        f"the gradient was exactly 0 in {STILL_STEPS} steps although some advantages are not 0{how}: check the old_log_probs of "
        "--rollouts (of other weights, they clip every token), the bounds of the clip and of --importance-correction, the loss "
        "masks, and whether the parameters take a gradient at all",
    )


def _unmoved(values: Mapping[str, float], state: WatchdogState, is_float32: bool) -> Iterator[WatchdogFinding]:
    """Where the reward is the best of the run, and was worse, a policy that moves has learned; zero_gradient names one without a
    gradient."""
    if state.unrated_steps >= STILL_STEPS:
        yield WatchdogFinding(
            "zero_rate",
            f"the learning rate was 0 in {STILL_STEPS} steps, and no weight moves: the decay ends before the run; give a --min-lr "
            "above 0, a larger --lr-decay-iters, or fewer --num-rollouts",
        )
    kl, changed = values.get(MOVED_KL), values.get(CHANGED_WEIGHTS, 1.0)
    least, best = state.rewards or (0.0, 0.0)
    is_still = changed < LEAST_CHANGED_SHARE or kl == 0.0
    has_learned = least < best and values.get(REWARD, best) >= best and not is_still
    if kl is None or state.moving_steps * 2 < UNMOVED_STEPS or state.still_steps or has_learned:
        return
    if not is_still and kl >= LEAST_KL:
        return
    rate, dtype = values.get("learning_rate", 0.0), "float32" if is_float32 else "bfloat16"
    if is_still:
        remedy = (
            f"updates are lost in the rounding of {dtype} weights, or parameters take none; raise --lr (now {rate:g}) 1000-fold"
        )
    else:
        enough = rate * math.sqrt(USUAL_KL / kl)
        remedy = f"raise --lr (now {rate:g}); the KL grows with its square, so --lr {enough:.0e} is a start"
    yield WatchdogFinding(
        "unmoved_policy",
        f"the policy hardly moves: its KL from itself {UNMOVED_STEPS} steps before is {kl:.1g} nats per token, on samples whose "
        f"advantages are not 0, and {changed:.2%} of its weights changed: {remedy}",
        can_raise=is_still,
    )


def _collapse(values: Mapping[str, float], state: WatchdogState) -> Iterator[WatchdogFinding]:
    if state.short_steps < COLLAPSED_STEPS or not state.rewards or values.get(REWARD, state.rewards[1]) >= state.rewards[1]:
        return
    yield WatchdogFinding(
        "collapsed_length",
        f"responses have {values[LENGTH]:.3g} tokens on average and had {state.longest:.3g}, and the reward {values[REWARD]:.3f} "
        f"is not the best of the run, {state.rewards[1]:.3f}: look at the responses; start again with a lower --lr or a "
        "--kl-coefficient, or with --loss-aggregation constant, under which no length is favoured",
    )


def _fallen(state: WatchdogState) -> Iterator[WatchdogFinding]:
    if len(state.last_rewards) < LAST_REWARDS:
        return
    pairs = itertools.product(state.first_rewards, state.last_rewards)
    fallen = statistics.fmean((first > last) + (first == last) / 2 for first, last in pairs)
    first, last = statistics.fmean(state.first_rewards), statistics.fmean(state.last_rewards)
    if fallen < FALLEN_PAIRS or first - last < FALLEN_SHARE * abs(first):
        return
    yield WatchdogFinding(
        "fallen_reward",
        f"mean reward {last:.3g} in the last {LAST_REWARDS} rollouts, far below the {first:.3g} of the first {FIRST_REWARDS}: sign "
        "of the loss or of the reward? megatron-rl selftest --policy-loss tries a loss of your own; if both are right and the "
        "prompts did not become harder, start again with a lower --lr or a --kl-coefficient",
        can_raise=False,
    )


def _is_idle(values: Mapping[str, float]) -> bool:
    """Whether every token has the factor 1: nothing is dropped, and the factors are equal with mean 1."""
    size, weight = values.get("policy/correction_effective_sample_size", 0.0), values.get("policy/correction_weight", 0.0)
    return values["policy/correction_kept_tokens"] == 1.0 and abs(size - 1.0) < 1e-12 and abs(weight - 1.0) < 1e-6


def _correction(values: Mapping[str, float], state: WatchdogState) -> Iterator[WatchdogFinding]:
    kept, size = values.get("policy/correction_kept_tokens", 1.0), values.get("policy/correction_effective_sample_size", 1.0)
    if kept < LEAST_KEPT_SHARE:
        yield WatchdogFinding(
            "correction_drops",
            f"the correction keeps {kept:.0%} of the tokens, and the rest of the rollout trains nothing: look at "
            "policy/train_rollout_logprob_abs_diff; check --policy-temperature and --fp32-lm-head, then widen "
            "--importance-correction-low and --importance-correction-high, or choose --importance-correction-level sequence_mean "
            "in place of sequence_sum",
        )
    elif size < LEAST_CORRECTED_SAMPLE_SIZE:
        yield WatchdogFinding(
            "correction_sample_size",
            f"effective sample size {size:.3f} of the corrected tokens: a tenth of them decides the step; lower "
            "--importance-correction-high, or choose --importance-correction-level token or sequence_mean in place of sequence_sum",
        )
    if state.idle_corrections >= IDLE_CORRECTION_STEPS:
        yield WatchdogFinding(
            "idle_correction",
            f"the correction has changed no token in {IDLE_CORRECTION_STEPS} steps: where policy/train_rollout_logprob_abs_diff is "
            "0, old_log_probs and rollout_log_probs are copies of each other, and the sampling engine's own are needed; else the "
            "bounds are wider than the engines differ, so narrow them or remove the correction",
            can_raise=False,
        )


def _first_product(config: PolicyLossConfig, values: Mapping[str, float]) -> Iterator[WatchdogFinding]:
    kept, size = values.get("policy/correction_kept_samples"), values.get("policy/correction_effective_sample_size")
    if config.importance_correction_level == CorrectionLevel.SEQUENCE_SUM and kept is not None and size is not None:
        yield WatchdogFinding(
            "sequence_sum",
            f"level sequence_sum keeps {kept:.0%} of the samples with an effective sample size of {size:.2f} at the first step: "
            "its ratio is a product over all tokens, so both fall with the length of responses; sequence_mean does not",
            can_raise=False,
        )


def _idle_clip(config: PolicyLossConfig, state: WatchdogState) -> Iterator[WatchdogFinding]:
    mean = sum(state.clip_fractions) / IDLE_CLIP_STEPS
    loss = get_policy_loss(config.policy_loss)
    if loss.clip_ratios is not None and len(state.clip_fractions) == IDLE_CLIP_STEPS and mean < IDLE_CLIP_FRACTION:
        low, high = loss.clip_ratios
        yield WatchdogFinding(
            "idle_clip",
            f"{loss.name} clip fraction {mean:.2%} over {IDLE_CLIP_STEPS} steps that moved the policy: the {clip_in_words(config)} "
            f"never acts, a sample's ratio moves less; set --clip-ratio-low {low:g} --clip-ratio-high {high:g}, as published",
            can_raise=False,
        )


class RunWatchdog:
    """`--watchdog` of a run: logs what `watch` finds on one rank, or raises it on all of them."""

    def __init__(
        self, config: PolicyLossConfig, *, state: Mapping | None = None, is_first_rank: bool = True, is_float32: bool = False
    ):
        """state: what `state_dict` gave, from a checkpoint. is_float32: as in `watch`."""
        self._config, self._is_first_rank, self._is_float32 = config, is_first_rank, is_float32
        # A field that is not known belongs to a finding that an earlier version had.
        known = {} if state is None else {field.name: state[field.name] for field in fields(WatchdogState) if field.name in state}
        known = {name: tuple(value) if isinstance(value, list) else value for name, value in known.items()}
        self._state = replace(WatchdogState(**known), moving_steps=0)  # a run that is resumed measures from there on

    @property
    def is_on(self) -> bool:
        return self._config.watchdog != Watchdog.OFF and self._config.policy_metrics != PolicyMetrics.NONE

    def counts_phantoms(self, steps_done: int) -> bool:
        """Whether the next step counts phantom tokens."""
        return self._config.watchdog != Watchdog.OFF and steps_done == 0

    def look(self, step: int, row: Mapping[str, float | None]) -> None:
        """Raises one DataError with every finding under --watchdog raise, on all ranks whose metrics are equal."""
        if self._config.watchdog == Watchdog.OFF:
            return
        found, self._state = watch(self._config, self._state, step, row, is_float32=self._is_float32)
        raised = [finding.line for finding in found if finding.can_raise and self._config.watchdog == Watchdog.RAISE]
        if self._is_first_rank:
            for finding in found:
                if finding.line not in raised:
                    logger.warning(finding.line)
        if raised:
            raise DataError("\n".join(raised))

    def state_dict(self) -> dict:
        return asdict(self._state)
