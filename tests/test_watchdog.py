"""The watchdog: which rows of metrics it warns of, once each, across a restart, and that a healthy run prints nothing."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from argparse import ArgumentParser
from unittest import mock

import pytest
import torch
from trainer_cases import run_loop

from megatron_rl.arguments import add_megatron_rl_args
from megatron_rl.config import PolicyLossConfig
from megatron_rl.errors import DataError
from megatron_rl.testing.ranks import RankPool
from megatron_rl.train.options import add_train_args
from megatron_rl.train.rollout_files import load_rollouts, save_rollouts
from megatron_rl.train.watchdog import IDLE_CLIP_STEPS, RunWatchdog, WatchdogState, watch

GRPO, GSPO = PolicyLossConfig(policy_loss="grpo"), PolicyLossConfig(policy_loss="gspo")
WIDE = PolicyLossConfig(policy_loss="gspo", clip_ratio_low=0.2, clip_ratio_high=0.2)
HEALTHY = {
    "rollout": 0,
    "num_tokens": 40,
    "num_samples": 8,
    "policy/ratio_new_old": 1.0,
    "policy/clipped_ratio_fraction": 0.0,
    "policy/effective_sample_size": 1.0,
    "policy/max_advantage": 1.5,
    "policy/min_advantage": -1.5,
    "policy/num_phantom_tokens": 0.0,
    "policy/num_tokens": 40.0,
    "policy/num_documents": 8.0,
}


def names(config, step, **changes) -> list[str]:
    row = HEALTHY | {name if name in HEALTHY else f"policy/{name}": value for name, value in changes.items()}
    return [finding.name for finding in watch(config, WatchdogState(), step, row)[0]]


def watched(config, rows, state: WatchdogState | None = None, first: int = 2) -> tuple[list, WatchdogState]:
    """(step, finding) of all that is told while the rows come, one a step from step `first` on, and the last state."""
    told, state = [], WatchdogState() if state is None else state
    for step, row in enumerate(rows, first):
        found, state = watch(config, state, step, row)
        told += [(step, finding) for finding in found]
    return told, state


def measured(kl, changed=0.5, number=41, **changes):
    """One step a rollout; after 20 of them, how far the policy has moved is measured before the next one."""
    row = HEALTHY | {"learning_rate": 1e-6, "rollout/reward": 0.1, "grad_norm": 0.3}
    moved = {"moved/changed_weights": changed} | ({} if kl is None else {"moved/kl": kl})
    return [
        row | {"rollout": step} | (moved if step and step % 20 == 0 else {}) | {name: of(step) for name, of in changes.items()}
        for step in range(number)
    ]


def silent_but(number):
    """Of 20 steps, so many have an advantage."""
    return {f"policy/{end}_advantage": lambda step: float(step % 20 < number) for end in ("max", "min")}


UNMOVED = [
    pytest.param(measured(9e-7), "so --lr 2e-05 is a start", id="below 1e-6"),
    pytest.param(measured(1.1e-6), None, id="above"),
    pytest.param(measured(None), None, id="no kept token has an advantage"),
    pytest.param(measured(5e-3, 9e-4), "lost in the rounding of bfloat16", id="the noise of logits beside still weights"),
    pytest.param(measured(5e-3, 1.1e-3), None, id="few bfloat16 weights change at a small rate"),
    pytest.param(measured(0.0), "0 nats per token", id="not at all"),
    pytest.param(measured(9e-7, number=20), None, id="20 steps"),
    pytest.param(measured(9e-7, **{"learning_rate": lambda step: 1e-8 * (step + 1)}), None, id="warm-up"),
    pytest.param(measured(9e-7, **{"learning_rate": lambda step: 1e-3 / (step + 1)}), None, id="end of the decay"),
    pytest.param(measured(9e-7, **{"rollout/reward": lambda step: step / 40}), None, id="it learns"),
    pytest.param(measured(0.0, **{"rollout/reward": lambda step: step / 40}), "rounding", id="a reward that grows by chance"),
    pytest.param(measured(9e-7, **silent_but(10)), "hardly moves", id="half of the steps have a signal"),
    pytest.param(measured(9e-7, **silent_but(9)), None, id="fewer have one"),
]


@pytest.mark.parametrize(("rows", "said"), UNMOVED)
def test_a_policy_that_does_not_move_is_told_once_with_the_learning_rate(rows, said):
    told = [(step, finding) for step, finding in watched(GRPO, rows)[0] if finding.name == "unmoved_policy"]
    assert [step for step, _ in told] == [2 + 20] * (said is not None)
    for _, finding in told:
        assert said in finding.line and "raise --lr (now 1e-06)" in finding.line
        assert finding.can_raise == ("rounding" in finding.line)


def test_a_learning_rate_that_has_decayed_to_0_is_told_once():
    """At the last step of a run it is healthy."""
    rows = [HEALTHY | {"learning_rate": rate} for rate in (1e-3, 0.0, 0.0, 0.0, 0.0, 1e-3, *[0.0] * 9)]
    [(step, finding)], _ = watched(GRPO, rows)
    assert (step, finding.name) == (2 + 6 + 4, "zero_rate") and "--lr-decay-iters" in finding.line


FIRST_STEP = [
    # loss, metric, what is reported of it, what is allowed, finding
    pytest.param(GRPO, "ratio_new_old", 0.89, 0.91, "first_ratio", id="FB-39 ratio too low"),
    pytest.param(GSPO, "ratio_new_old", 1.11, 1.09, "first_ratio", id="FB-39 ratio too high"),
    pytest.param(GRPO, "clipped_ratio_fraction", 0.61, 0.6, "first_clip_fraction", id="clipped away"),
    pytest.param(GRPO, "effective_sample_size", 0.49, 0.51, "first_sample_size", id="few tokens carry it"),
    pytest.param(GSPO, "effective_sample_size", 0.89, 0.91, "first_sample_size", id="few documents carry it"),
    pytest.param(GRPO, "num_phantom_tokens", 1.0, 0.0, "first_phantom_tokens", id="a token that nobody measured"),
    pytest.param(GSPO, "kl_new_old", 0.051, 0.049, "first_kl", id="FB-39 another policy, of mean ratio 1"),
]


@pytest.mark.parametrize(("config", "metric", "bad", "good", "finding"), FIRST_STEP)
def test_the_first_step_is_held_to_a_policy_that_has_not_moved(config, metric, bad, good, finding):
    """Any later step may do so: the policy has moved. What moves ratio or sample size moves the KL: it says nothing of its own."""
    assert names(config, 1, **{metric: bad}) == [finding]
    if finding in ("first_ratio", "first_phantom_tokens"):
        assert names(config, 1, kl_new_old=1.0, **{metric: bad}) == [finding]
    assert names(config, 1, **{metric: good}) == names(config, 2, **{metric: bad}) == []


OWN = {"policy/staleness": 0.0, "policy/max_staleness": 0.0}
OF_ENGINES = [
    # further metrics, the KL, float32 or bfloat16, whether it is told
    pytest.param(OWN, 1.1e-5, True, True, id="float32, beyond rounding"),
    pytest.param(OWN, 0.9e-5, True, False, id="float32, rounding"),
    pytest.param(OWN, 5.1e-3, False, True, id="bfloat16, beyond rounding"),
    pytest.param(OWN, 4.9e-3, False, False, id="bfloat16, rounding"),
    pytest.param({}, 0.04, True, False, id="nobody says whose log-probabilities they are"),
    pytest.param({**OWN, "policy/train_rollout_kl": 0.0}, 0.04, True, False, id="another engine sampled"),
    pytest.param({"policy/staleness": 0.5, "policy/max_staleness": 1.0}, 0.04, True, False, id="stale"),
    pytest.param({"policy/staleness": -1.0, "policy/max_staleness": 0.0}, 0.04, True, False, id="other unit"),
]


@pytest.mark.parametrize(("metrics", "kl", "is_float32", "finds"), OF_ENGINES)
def test_one_engine_at_the_same_weights_is_held_to_rounding(metrics, kl, is_float32, finds):
    """FB-39: a slightly wrong temperature moves the KL by far less than two engines differ."""
    row = HEALTHY | metrics | {"policy/kl_new_old": kl}
    found = [[finding.name for finding in watch(GRPO, WatchdogState(), n, row, is_float32=is_float32)[0]] for n in (1, 2)]
    assert found == [["first_kl"] if finds else [], []]


@pytest.mark.parametrize(
    ("metric", "bad", "good", "finding"),
    [
        ("correction_kept_tokens", 0.49, 0.51, "correction_drops"),
        ("correction_effective_sample_size", 0.09, 0.11, "correction_sample_size"),
    ],
)
def test_a_correction_that_leaves_little_is_told_at_any_step(metric, bad, good, finding):
    """FB-115: a bound that nearly every sample leaves throws the step away."""
    rest = {"correction_kept_tokens": 0.9, "correction_effective_sample_size": 0.8, "correction_weight": 1.1}
    for step in (1, 7):
        assert names(GRPO, step, **rest | {metric: bad}) == [finding]
        assert names(GRPO, step, **rest | {metric: good}) == []


def test_the_kept_share_of_a_product_of_ratios_is_told_at_the_first_step():
    product = dataclasses.replace(
        GRPO, importance_correction="tis", importance_correction_level="sequence_sum", importance_correction_high=2.0
    )
    rest = {"correction_kept_samples": 0.92, "correction_effective_sample_size": 0.31, "correction_weight": 0.9}
    row = HEALTHY | {f"policy/{name}": value for name, value in rest.items()}
    (finding,) = watch(product, WatchdogState(), 1, row)[0]
    assert "keeps 92% of the samples with an effective sample size of 0.31" in finding.line and not finding.can_raise
    assert watch(product, WatchdogState(), 2, row)[0] == watch(GRPO, WatchdogState(), 1, row)[0] == []


def test_a_correction_that_changes_nothing_is_told_once_after_twenty_steps():
    """FB-120: what is called the sampler's log-probabilities is a copy of the trainer's. One other step begins again."""
    still = {"correction_kept_tokens": 1.0, "correction_effective_sample_size": 1.0, "correction_weight": 1.0}
    row = HEALTHY | {f"policy/{name}": value for name, value in still.items()}
    moved = row | {"policy/correction_effective_sample_size": 0.999}
    [(step, finding)], _ = watched(GRPO, [row] * 19 + [moved] + [row] * 25)
    assert (step, finding.name, finding.can_raise) == (2 + 19 + 20, "idle_correction", False)


SILENT = HEALTHY | {"policy/max_advantage": 0.0, "policy/min_advantage": 0.0}


@pytest.mark.parametrize(
    ("before", "reward", "said"),
    [
        pytest.param([0.1, 0.4], 0.2, "reward 0.200, best of the run 0.400", id="collapsed"),
        pytest.param([0.0], 0.0, "the reward was 0 in every rollout", id="nothing is ever right"),
        pytest.param([0.1, 0.9], 1.0, None, id="solved"),
    ],
)
def test_a_run_without_a_signal_is_told_once_after_twenty_steps(before, reward, said):
    """A step of equal rewards trains nothing, and its KL of 0 and clip fraction of 0 look healthy."""
    rows = [HEALTHY | {"rollout/reward": value} for value in before]
    silent = SILENT | {"rollout/reward": reward}
    rows += [silent] * 19 + [HEALTHY | {"rollout/reward": reward}] + [silent] * 25
    told, _ = watched(GRPO, rows)
    assert [(step, finding.name) for step, finding in told] == [(2 + len(before) + 19 + 20, "no_signal")] * (said is not None)
    assert all(said in finding.line for _, finding in told)


def test_a_gradient_that_stays_0_beside_advantages_is_told_once():
    """Where every token is clipped, all metrics but the norm look alive."""
    still = HEALTHY | {"grad_norm": 0.0, "policy/max_advantage": 1.0, "policy/min_advantage": -1.0}
    rows = [still] * 4 + [still | {"grad_norm": 1e-3}] + [still] * 6 + [SILENT | {"grad_norm": 0.0}] * 6
    [(step, finding)], _ = watched(GRPO, rows)
    assert (step, finding.name, finding.can_raise) == (2 + 5 + 4, "zero_gradient", True)


@pytest.mark.parametrize(
    ("length", "reward", "is_told"),
    [
        pytest.param(4.0, 0.2, True, id="collapsed"),
        pytest.param(4.1, 0.2, False, id="above a tenth"),
        pytest.param(4.0, 0.5, False, id="short answers are the best"),
    ],
)
def test_responses_that_collapse_are_told_once_after_twenty_steps(length, reward, is_told):
    long = HEALTHY | {"rollout/reward": 0.5, "rollout/response_length": 40.0}
    short = HEALTHY | {"rollout/reward": reward, "rollout/response_length": length}
    told, _ = watched(GRPO, [long] + [short] * 19 + [long] + [short] * 25)
    assert [(step, finding.name) for step, finding in told] == [(2 + 1 + 19 + 20, "collapsed_length")] * is_told
    assert all("had 40, and the reward 0.200" in finding.line for _, finding in told)


# Of the demo at its first seed, with a CISPO whose weight is not detached, and with GSPO.
UNLEARNS = [0.0864, 0.0312, 0.013, 0.0094, 0.0081, 0.0118, 0.0081, 0.0039, 0.0061, 0.002, 0.001, 0.0036, 0.0023, 0.0049, 0.0]
UNLEARNS += [0.001, 0.0029, 0.001, 0.001, 0.0, 0.0, 0.0068, 0.002, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.001]
DRAWN = torch.Generator().manual_seed(0)
FALLS = [
    pytest.param(UNLEARNS, 25, id="the demo unlearns"),
    pytest.param(UNLEARNS[::-1], None, id="it learns"),
    pytest.param([0.5] * 5 + [0.13] * 40, None, id="by less than three quarters"),
    pytest.param([0.5] * 5 + [0.12] * 40, 25, id="by more"),
    pytest.param([-0.5] * 5 + [-0.87] * 40, None, id="below 0, by less"),
    pytest.param([-0.5] * 5 + [-0.88] * 40, 25, id="below 0"),
    pytest.param([0.5, 0.5, 0.5, 0.5, 0.1] + [0.11] * 40, None, id="one of the first was as low"),
    pytest.param([3 / 64] + [0.0, 1 / 64, 0.0, 0.0] * 40, None, id="a lucky first rollout of a sparse reward"),
    pytest.param([0.0] * 60, None, id="always 0"),
    pytest.param(torch.randn(300, generator=DRAWN).tolist(), None, id="noise"),
]


@pytest.mark.parametrize(("rewards", "rollout"), FALLS)
@pytest.mark.parametrize("steps_per_rollout", [1, 3])
def test_a_reward_that_falls_far_below_the_first_ones_is_told_once(rewards, rollout, steps_per_rollout):
    """Each rollout counts once, whatever the number of its steps."""
    rows = [{"rollout": number, "rollout/reward": reward} for number, reward in enumerate(rewards)]
    told, _ = watched(GRPO, [row for row in rows for _ in range(steps_per_rollout)], first=0)
    found = [(step // steps_per_rollout + 1, finding) for step, finding in told if finding.name == "fallen_reward"]
    assert [number for number, _ in found] == ([] if rollout is None else [rollout])
    assert all("sign of the loss or of the reward?" in finding.line and not finding.can_raise for _, finding in found)


@pytest.mark.parametrize(
    ("metric", "value", "finding"),
    [
        pytest.param("policy/num_tokens", 41.0, "phantom_num_tokens", id="FB-09 a token that was not counted"),
        pytest.param("num_tokens", 41, "phantom_num_tokens", id="FB-09 a masked sample counted as one token"),
        pytest.param("policy/num_documents", 9.0, "phantom_num_samples", id="a document that was not counted"),
    ],
)
def test_the_loss_must_see_what_the_step_is_divided_by(metric, value, finding):
    """At any step, since a mask may change at any."""
    for step in (1, 7):
        found, _ = watch(GRPO, WatchdogState(), step, HEALTHY | {metric: value})
        assert [one.name for one in found] == [finding]


def test_a_healthy_row_and_a_row_without_metrics_say_nothing():
    """--policy-metrics none has none of them, and a step without a token has no policy/ metric at all."""
    assert names(GRPO, 1) == names(GSPO, 1) == []
    assert watch(GSPO, WatchdogState(), 1, {"rollout": 0, "num_tokens": 40, "num_samples": 8, "loss": 1.0})[0] == []
    broken = HEALTHY | {"policy/ratio_new_old": None, "policy/effective_sample_size": float("nan")}
    assert watch(GSPO, WatchdogState(), 1, broken)[0] == []


@pytest.mark.parametrize("config", [GRPO, GSPO], ids=["grpo", "gspo"])
def test_each_line_names_a_cause_and_a_flag_that_exists(config):
    """A warning that leaves its reader to search is one that is ignored."""
    flags = add_train_args(add_megatron_rl_args(ArgumentParser()))._option_string_actions
    bad = {"ratio_new_old": 2.0, "clipped_ratio_fraction": 0.9, "effective_sample_size": 0.1, "num_phantom_tokens": 3.0}
    row = HEALTHY | {f"policy/{name}": value for name, value in bad.items()}
    found, state = watch(config, WatchdogState(), 1, row)
    found += watch(config, WatchdogState(), 1, HEALTHY | {"policy/kl_new_old": 1.0})[0]
    found += watch(config, WatchdogState(), 1, HEALTHY | OWN | {"policy/kl_new_old": 0.04})[0]
    found += idle(WIDE)
    assert len(found) == 7
    for finding in found:
        mentioned = {word.strip(",;:.()") for word in finding.line.split() if word.startswith(("--", "(--"))}
        assert "\n" not in finding.line and mentioned and mentioned <= flags.keys(), finding.line


def sampled_by(probabilities, scored, seed: int = 0, num_tokens: int = 400) -> dict[str, float]:
    """mean and kl of d = log pi - log mu over tokens that mu has sampled; scored: mu as its engine reports it. [n, V] each."""
    logits = 3 * torch.randn(num_tokens, 500, generator=torch.Generator().manual_seed(seed))
    sampler = probabilities(logits)
    taken = torch.multinomial(sampler, 1, generator=torch.Generator().manual_seed(seed + 1))
    noise = 0.02 * torch.randn(num_tokens, generator=torch.Generator().manual_seed(seed + 2))  # of two engines
    d = (logits.log_softmax(-1).gather(1, taken) - scored(logits).gather(1, taken).log())[:, 0] + noise
    return {"mean": float(d.mean()), "kl": float((d.exp() - 1 - d).mean())}


def top_p(mass: float):
    def kept(logits):
        whole = logits.softmax(-1)
        ordered, index = whole.sort(-1, descending=True)
        keep = torch.zeros_like(whole, dtype=torch.bool).scatter(1, index, (ordered.cumsum(-1) - ordered) < mass)
        return torch.where(keep, whole, 0.0) / torch.where(keep, whole, 0.0).sum(-1, keepdim=True)

    return kept


def heated(temperature: float):
    return lambda logits: (logits / temperature).softmax(-1)


def moved(logits):
    return (logits + torch.randn(logits.shape, generator=torch.Generator().manual_seed(9))).softmax(-1)


SAMPLERS = [
    # the sampler, as what it scores its tokens, whether that is the signature
    *(pytest.param(top_p(mass), top_p(mass), True, id=f"FB-114 top-p {mass}") for mass in (0.8, 0.9, 0.95)),
    pytest.param(top_p(0.8), heated(1.0), False, id="top-p 0.8, scored over the whole vocabulary"),
    *(pytest.param(heated(t), heated(t), False, id=f"temperature {t}") for t in (0.6, 0.9, 1.0, 1.3)),
    pytest.param(moved, moved, False, id="a policy that has moved"),
]


def test_scores_of_the_whole_vocabulary_are_known_where_kept_ids_are_replayed():
    """The sampler's scores lie below the trainer's by ln M. Without kept ids nothing names such a difference."""
    mean = 0.2
    rollout = {"train_rollout_logprob_diff": mean, "train_rollout_kl": math.exp(mean) - 1 - mean}
    old = {"new_logprobs": mean - 1, "old_logprobs": -1.0, "kl_new_old": math.exp(mean) - 1 - mean, "ratio_new_old": 1.22}
    assert names(GRPO, 9, **rollout) == [] and names(GRPO, 9, **rollout, kept_ids=7.0) == ["whole_rollout"]
    assert names(GRPO, 1, **old, kept_ids=7.0) == ["whole_old"] and "first_ratio" in names(GRPO, 1, **old)
    assert names(GRPO, 9, train_rollout_logprob_diff=mean, train_rollout_kl=0.1, kept_ids=7.0) == []


@pytest.mark.parametrize(("sampler", "scored", "is_truncated"), SAMPLERS)
def test_the_kept_mass_is_told_from_noise_temperature_and_another_policy(sampler, scored, is_truncated):
    """At any step of the sampler's scores, at the first of old ones, in the place of what else would be said of it there."""
    d = sampled_by(sampler, scored)
    rollout = {"train_rollout_logprob_diff": d["mean"], "train_rollout_kl": d["kl"]}
    old = {"new_logprobs": d["mean"] - 1, "old_logprobs": -1.0, "kl_new_old": d["kl"]}
    assert names(GRPO, 9, **rollout) == ["truncated_rollout"] * is_truncated
    assert ("truncated_old" in names(GRPO, 1, **old)) == is_truncated
    assert names(GRPO, 9, **old) == []
    if is_truncated:
        assert names(GRPO, 1, **old, ratio_new_old=0.8) == ["truncated_old"]
        line = watch(GRPO, WatchdogState(), 9, HEALTHY | {f"policy/{name}": value for name, value in rollout.items()})[0][0].line
        assert f"of mass {math.exp(d['mean']):.2f}" in line and "sample with top_p 1, top_k -1 and min_p 0" in line


def rows(clip_fractions, *, rollout=0, **changes):
    """Two steps a rollout; the second has the clip fraction."""
    for number, fraction in enumerate(clip_fractions):
        yield HEALTHY | {"rollout": rollout + number}
        moved = {"policy/clipped_ratio_fraction": fraction, "policy/effective_sample_size": 0.9999}
        yield HEALTHY | {"rollout": rollout + number} | moved | changes


def idle(config, clip_fractions=(0.0,) * IDLE_CLIP_STEPS, **changes) -> list:
    return [finding for _, finding in watched(config, rows(clip_fractions, **changes))[0]]


def test_a_gspo_clip_that_never_acts_is_noticed_after_twenty_steps_that_could_clip():
    """verl#2775, TRL#3834: 0.2, the token-level default, clips no mean of log-ratios."""
    assert idle(WIDE, (0.0,) * 19) == []
    [finding] = idle(WIDE)
    assert finding.name == "idle_clip" and not finding.can_raise
    assert "the clip 0.2/0.2 never acts" in finding.line and "--clip-ratio-low 0.0003 --clip-ratio-high 0.0004" in finding.line
    assert len(idle(WIDE, (0.0,) * 60)) == 1, "once"
    # 0.1 % of 20 steps: a mean of 0.001 is not below, of 0.00095 it is.
    assert idle(WIDE, (*[0.0] * 19, 0.02)) == []
    assert len(idle(WIDE, (*[0.0] * 19, 0.019))) == 1


def test_steps_that_could_not_clip_say_nothing_of_the_clip():
    """Another loss; no advantage; a policy that has moved by less than the published clip: one that has learnt everything."""
    no_advantage = {"policy/max_advantage": 0.0, "policy/min_advantage": 0.0}
    for config, changes in ((GRPO, {}), (WIDE, no_advantage), (WIDE, {"policy/effective_sample_size": 1 - 1e-8})):
        assert idle(config, (0.0,) * 40, **changes) == []


def test_first_steps_on_a_rollout_do_not_count():
    """They are on-policy: with one step a rollout nothing ever clips."""
    row = HEALTHY | {"policy/effective_sample_size": 0.9999}
    told, state = watched(WIDE, [row | {"rollout": step} for step in range(1, 60)], first=1)
    assert told == [] and state.clip_fractions == ()
    assert watched(WIDE, [row | {"rollout": None}] * 40, state, first=60)[0] == []  # rows of somebody else's loop


def messages_of(action) -> list[str]:
    messages = []
    with mock.patch.object(logging.getLogger("megatron_rl.train.watchdog"), "warning", messages.append):
        action()
    return messages


def test_a_restart_neither_forgets_nor_repeats():
    """The state goes through a checkpoint, whose lists may come back for tuples: 12 + 8 steps that could clip are 20. One of an
    earlier version may have a field that is no more.
    """
    parts = [list(rows((0.0,) * 12)), list(rows((0.0,) * 8, rollout=12)), list(rows((0.0,) * 30, rollout=20))]
    state, warned = None, []
    for part in parts:
        watchdog = RunWatchdog(WIDE, state=state)
        warned.append(len(messages_of(lambda part=part, dog=watchdog: [dog.look(9, row) for row in part])))
        state = json.loads(json.dumps(watchdog.state_dict())) | {"of_an_earlier_version": 3}
    assert warned == [0, 1, 0]


BAD = HEALTHY | {"policy/ratio_new_old": 0.3, "policy/effective_sample_size": 0.2}


def test_warn_speaks_on_the_first_rank_and_raise_stops_every_rank():
    """All findings in one error; the idle clip is a warning at most."""
    first, other = RunWatchdog(GRPO, is_first_rank=True), RunWatchdog(GRPO, is_first_rank=False)
    assert len(messages_of(lambda: first.look(1, BAD))) == 2
    assert messages_of(lambda: other.look(1, BAD)) == []
    config = PolicyLossConfig(policy_loss="gspo", clip_ratio_low=0.2, clip_ratio_high=0.2, watchdog="raise")
    for is_first in (True, False):
        with pytest.raises(DataError, match="mean importance ratio 0.300(.|\n)*effective sample size 0.200 of the documents"):
            RunWatchdog(config, is_first_rank=is_first).look(1, BAD)
    watchdog = RunWatchdog(config)
    assert len(messages_of(lambda: [watchdog.look(9, row) for row in rows((0.0,) * 30)])) == 1


def test_off_looks_at_nothing_and_tokens_are_looked_at_one_by_one_at_the_first_step_alone():
    """It costs a few launches and, with the fused head, keeps the log-probabilities."""
    watchdog = RunWatchdog(PolicyLossConfig(watchdog="off"))
    assert messages_of(lambda: watchdog.look(1, BAD)) == [] and not watchdog.counts_phantoms(0)
    assert watchdog.state_dict() == RunWatchdog(GRPO).state_dict()
    assert [RunWatchdog(GRPO).counts_phantoms(steps) for steps in (0, 1, 100)] == [True, False, False]


def sharpen(trainer) -> None:
    """A policy that knows what it wants, as a trained one: a fresh one gives every token the same, at any temperature."""
    for name, parameter in trainer.model.named_parameters():
        if "output_layer" in name or "word_embeddings" in name:
            parameter.data.mul_(10.0)
    trainer.optimizer.reload_model_params()


def sharp_run_on_rank(rank, output_dir, config, options):
    return messages_of(lambda: run_loop(output_dir, config, {"steps_per_rollout": 1, **options}, on_trainer=sharpen))


@pytest.fixture(scope="module")
def sharp(tmp_path_factory):
    """A pool, and a rollout of 32 samples of a sharp policy with its log-probabilities."""
    path = tmp_path_factory.mktemp("sharp") / "r.jsonl"
    with RankPool(2) as pool:
        config = PolicyLossConfig(samples_per_prompt=8)
        options = {"num_rollouts": 1, "save_rollouts": str(path)}
        assert pool.run(sharp_run_on_rank, path.parent / "out", config, options, world_size=1) == [[]]
        yield pool, next(load_rollouts(path))


CASES = {
    # settings, old log-probabilities of a sample
    "healthy": ({}, lambda sample: sample.old_log_probs),
    "half": ({"policy_temperature": 0.5}, lambda sample: sample.old_log_probs),
    "double": ({"policy_temperature": 2.0}, lambda sample: sample.old_log_probs),
    # Within the limits of two engines; this file is of one, and of the weights that the run starts with.
    "a little": ({"policy_temperature": 1.05}, lambda sample: sample.old_log_probs),
    "shifted": ({}, lambda sample: [*sample.old_log_probs[1:], sample.old_log_probs[0]]),
    "placeholder": ({}, lambda sample: [0.0, *sample.old_log_probs[1:]] if sample.index == 3 else sample.old_log_probs),
}


@pytest.mark.megatron
@pytest.mark.parametrize(
    ("loss", "docs_per_step", "names"),
    [
        pytest.param("grpo", None, ("healthy", "half", "a little", "placeholder"), id="grpo, rollouts"),
        pytest.param("gspo", 16, ("healthy", "double", "shifted", "placeholder"), id="gspo, documents"),
    ],
)
def test_a_replay_of_rollouts_that_do_not_fit_is_noticed_and_one_that_fits_is_not(sharp, tmp_path, loss, docs_per_step, names):
    """FB-39: half and double the temperature leave a mean ratio near 1, its expectation over samples of the old policy; a
    shift by a token leaves GSPO's ratios as they are. On two ranks: the first one speaks."""
    pool, batch = sharp
    for name in names:
        settings, old_log_probs = CASES[name]
        samples = [dataclasses.replace(sample, old_log_probs=old_log_probs(sample)) for sample in batch.samples]
        path = tmp_path / f"{name}.jsonl"
        save_rollouts(path, dataclasses.replace(batch, samples=samples))
        config = PolicyLossConfig(policy_loss=loss, samples_per_prompt=8, docs_per_step=docs_per_step, **settings)
        first, other = pool.run(sharp_run_on_rank, tmp_path / name, config, {"rollouts": str(path)})
        assert other == [] and bool(first) == (name != "healthy"), (name, first)
        if name == "a little":
            assert len(first) == 1 and "of this engine and these weights" in first[0]
        if name == "placeholder":
            assert len(first) == 1 and first[0].startswith("1 phantom tokens at the first step")
        elif first:
            assert any("--policy-temperature" in line for line in first)


def swallow(trainer) -> None:
    """Weights in float32 that the optimiser updates, by nothing."""
    for group in trainer.optimizer.param_groups:
        group["lr"] = 0.0


def freeze(trainer) -> None:
    trainer.model.requires_grad_(False)
    for parameter in trainer.model.parameters():
        parameter.main_grad.zero_()


POLICIES = [
    # settings of the trainer, what is done to it, findings
    pytest.param({"lr": 3e-3}, None, [], id="learns"),
    pytest.param({"lr": 1e-9}, None, ["the KL grows with its square"], id="1e-9"),
    pytest.param({"lr": 1e-9, "bf16": True}, None, ["lost in the rounding of bfloat16 weights"], id="1e-9, bfloat16"),
    pytest.param({"lr": 3e-3}, swallow, ["lost in the rounding of float32 weights"], id="updates of nothing"),
    pytest.param({"lr": 3e-3}, freeze, ["the gradient was exactly 0 in 5 steps"], id="frozen"),
    pytest.param({"lr": 1e-3, "lr_decay_style": "linear", "lr_decay_iters": 5}, None, ["learning rate was 0"], id="decayed"),
]


def whole_run_on_rank(rank, output_dir, settings, change):
    options = {"steps_per_rollout": 1, "num_rollouts": 21, "prompts_per_rollout": 4}
    config = PolicyLossConfig(samples_per_prompt=4)
    return messages_of(lambda: run_loop(output_dir, config, options, settings=settings, on_trainer=change))


@pytest.mark.megatron
@pytest.mark.parametrize(("settings", "change", "said"), POLICIES)
def test_a_run_on_policy_that_does_not_move_is_told(sharp, tmp_path, settings, change, said):
    """One step a rollout: ratio, KL and clip fraction of each step are 1, 0 and 0 in all of them. On two ranks."""
    pool, _ = sharp
    first, other = pool.run(whole_run_on_rank, tmp_path / "run", settings, change)
    assert other == [] and len(first) == len(said), first
    assert all(words in line for words, line in zip(said, first, strict=True))
