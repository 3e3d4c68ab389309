"""The hooks of the rollout process inside real checkouts: their Samples, conversion and schedule of steps. Writes nothing there.

MILES_ROOT=... SLIME_ROOT=... pytest -m host --require host tests/test_rollout_hosts.py
"""

from __future__ import annotations

import importlib
import random
from argparse import Namespace

import pytest
from host_harness import load_checkout, own_train_data, roots_by_environment, silent_logging
from rollout_cases import DOORS, launch

from megatron_rl.hosts import ROLLOUT_HOST_NAMES
from megatron_rl.testing.ranks import RankPool

DIVISOR = 8
OURS = {
    "prompt_mean": "--loss-aggregation prompt_mean",
    "token_mean": "--loss-aggregation token_mean",
    "constant": f"--loss-aggregation constant --loss-aggregation-divisor {DIVISOR}",
}
SCHEDULE = dict(micro_batch_size=1, balance_data=False, balance_by_flops=False, rollout_top_p=1.0)
SCHEDULE |= dict(disable_rollout_trim_samples=False, n_samples_per_prompt=3, rollout_batch_size=4)

# The segments of each rollout, by prompt.
EQUAL = {3: [1, 1, 1], 4: [1, 1, 1], 8: [1, 1, 1], 9: [1, 1, 1]}
SEGMENTS = {3: [1, 2, 1], 4: [1, 1, 3], 8: [2, 1, 1], 9: [1, 1, 1]}
RAGGED = {3: [1, 2, 1], 4: [1], 8: [2, 1], 9: [1, 1, 1]}

pytestmark = pytest.mark.host


@pytest.fixture(scope="module", params=ROLLOUT_HOST_NAMES)
def checkout(request):
    """call(function, *args) gives function(host, *args), computed in a process of its own that can import the checkout."""
    host = request.param
    root = roots_by_environment().get(host)
    if root is None:
        pytest.skip(f"needs a checkout of {host}: set {host.upper()}_ROOT")
    with RankPool(1, use_megatron=False) as pool:
        yield lambda function, *args: pool.run(in_checkout, host, root, function, args)[0]


def in_checkout(rank: int, host: str, root: str, function, args: tuple):
    load_checkout(root)
    with silent_logging():
        return function(host, *args)


def real_samples(host: str, groups: dict[int, list[int]], *, seed: int = 0) -> list:
    """The host's own Samples: `groups` has the number of segments of each rollout of a prompt. One is removed, one masked."""
    kind, numbers = importlib.import_module(f"{host}.utils.types").Sample, random.Random(seed)
    samples, rollout = [], 0
    for prompt, rollouts in groups.items():
        for num_segments in rollouts:
            rollout, reward = rollout + 1, numbers.gauss(0, 1)
            for _ in range(num_segments):
                length = numbers.randrange(1, 9)
                mask = [1, *(numbers.randrange(2) for _ in range(length - 1))]
                sample = kind(
                    group_index=prompt, index=len(samples), response_length=length, reward=reward, tokens=[1] * (length + 3)
                )
                sample.loss_mask, sample.rollout_id = mask, rollout if any(n > 1 for g in groups.values() for n in g) else None
                samples.append(sample)
    samples[1].remove_sample = True
    samples[2].loss_mask = [0] * samples[2].response_length
    samples[-1].loss_mask = None
    return samples


def token_weights(host: str, args: Namespace, samples: list, metadata: dict | None = None) -> list[float | None]:
    """What a token of each sample weighs in its step, by the host's schedule and its 1/N, 1/M_roll; None where it is dropped."""
    args.rewards_normalization = False
    for sample in samples:
        sample.reward = 1.0  # the processed reward is then the weight
    data = own_train_data(host, args, samples, metadata)
    schedule = importlib.import_module(f"{host}.utils.dp_schedule").build_dp_schedule
    parallel = dict(dp_size=1, cp_size=1, vpp_size=1, microbatch_group_size_per_vp_stage=1)
    (partition,), (micro_batches,), num_micro_batches, num_rollouts = schedule(
        args,
        parallel,
        [len(tokens) for tokens in data["tokens"]],
        global_batch_size=data.get("dynamic_global_batch_size", args.global_batch_size),
        rollout_indices=data["rollout_ids"],
    )
    found, start = [None] * len(samples), 0
    for num_batches, n in zip(num_micro_batches, num_rollouts, strict=True):
        for row in (row for batch in micro_batches[start : start + num_batches] for row in batch):
            i = partition[row]
            has_tokens = any(data["loss_masks"][i])
            found[i] = data["rewards"][i] / n / max(data["rollout_mask_sums"][i], 1) if has_tokens else 0.0
        start += num_batches
    return found


def expected_weights(samples: list, mode: str, step_of_prompt) -> list[float]:
    """The aggregation's own weight, by loops, over the samples that share a step."""
    masks = [[0] * s.response_length if s.remove_sample else s.loss_mask or [1] * s.response_length for s in samples]
    found = []
    for sample, mask in zip(samples, masks, strict=True):
        same = step_of_prompt(sample.group_index)
        step = [(s, sum(m)) for s, m in zip(samples, masks, strict=True) if step_of_prompt(s.group_index) == same]
        rollouts = {s.rollout_id if s.rollout_id is not None else ("row", s.index) for s, _ in step}
        divisor = {
            "prompt_mean": len({s.group_index for s, _ in step}) * sum(n for s, n in step if s.group_index == sample.group_index),
            "token_mean": sum(n for _, n in step),
            "constant": DIVISOR * len(rollouts),
        }[mode]
        found.append(1 / divisor if any(mask) else 0.0)
    return found


def rewards_of(host: str, mode: str, groups: dict, steps: int) -> tuple[list, list]:
    options = dict(SCHEDULE, global_batch_size=sum(map(len, groups.values())) // steps)
    if groups == RAGGED:
        options.update(samples_per_prompt=3, allow_partial_prompt_groups=True, rollout_batch_size=3)
    samples = real_samples(host, groups)
    expected = expected_weights(samples, mode, lambda prompt: list(groups).index(prompt) * steps // len(groups))
    return token_weights(host, launch(host, "reward", OURS[mode], **options), samples), expected


@pytest.mark.parametrize(
    ("mode", "groups", "steps"),
    [
        pytest.param("prompt_mean", EQUAL, 1, id="prompt_mean"),
        pytest.param("prompt_mean", SEGMENTS, 2, id="FB-11 prompt_mean, segments, two steps"),
        pytest.param("prompt_mean", RAGGED, 1, id="FB-17 prompt_mean, ragged groups"),
        pytest.param("token_mean", SEGMENTS, 1, id="FB-09 token_mean, segments"),
        pytest.param("constant", SEGMENTS, 2, id="constant, segments, two steps"),
    ],
)
def test_rewards_weight_samples_as_the_hosts_schedule_and_denominators_need(checkout, mode, groups, steps):
    found, expected = checkout(rewards_of, mode, groups, steps)
    assert found == pytest.approx(expected, rel=1e-6)


def weighted_and_own_rewards(host: str, by_deviation: bool) -> tuple[list, list]:
    groups = SEGMENTS if host == "miles" else EQUAL  # slime takes segments for one large group
    options = dict(SCHEDULE, global_batch_size=12, grpo_std_normalization=by_deviation, **DOORS["our reducer"])
    ours = launch(host, "reward", "--loss-aggregation constant --loss-aggregation-divisor 1", **options)
    theirs = Namespace(**{**vars(ours), "custom_reward_post_process_path": None})
    weighted, plain = (own_train_data(host, args, real_samples(host, groups)) for args in (ours, theirs))
    assert weighted["raw_reward"] == plain["raw_reward"]
    counts = [sum(mask) for mask in plain["loss_masks"]]
    return weighted["rewards"], [reward * count for reward, count in zip(plain["rewards"], counts, strict=True)]


@pytest.mark.parametrize("by_deviation", [True, False])
def test_normalised_rewards_are_the_hosts_own(checkout, by_deviation):
    """constant with a divisor of 1 and our reducer makes the weight m_i."""
    found, expected = checkout(weighted_and_own_rewards, by_deviation)
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)


def trimmed(host: str) -> tuple[int, list, list]:
    options = dict(SCHEDULE, global_batch_size=99, use_dynamic_global_batch_size=True)
    args = launch(host, "reward", OURS["token_mean"], **options)
    post = importlib.import_module("miles.ray.rollout.rollout_data_conversion").postprocess_rollout_data
    kept, metadata = post(args, real_samples(host, {3: [1, 1, 1], 4: [1, 1, 1], 5: [1]}), {"dp_size": 2})
    expected = expected_weights(kept, "token_mean", lambda prompt: 0)
    return len(kept), token_weights(host, args, kept, metadata), expected


@pytest.mark.parametrize("checkout", ["miles"], indirect=True)
def test_a_dynamic_global_batch_of_miles_is_what_the_hook_takes_it_for(checkout):
    """FB-07: miles trims to a multiple of dp, calls the hook, and makes one step whose N is the number of samples left."""
    num_kept, found, expected = checkout(trimmed)
    assert num_kept == 6
    assert found == pytest.approx(expected, rel=1e-6)
