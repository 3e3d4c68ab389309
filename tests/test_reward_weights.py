"""reward_post_process: what tests/test_hosts.py does not train: weights by hand where the host drops or masks samples, rewards
normalised, refusals; and inside checkouts, whose own Samples, conversion and schedule of steps are used.

MILES_ROOT=... SLIME_ROOT=... pytest -m host --require host tests/test_reward_weights.py
"""

from __future__ import annotations

import importlib
import random
from argparse import Namespace
from fractions import Fraction

import pytest
from host_harness import load_checkout, own_train_data, roots_by_environment, silent_logging
from launch_settings import REDUCER, REWARD, RolloutSample, launch

from megatron_rl.errors import ConfigError, DataError
from megatron_rl.hosts import ROLLOUT_HOST_NAMES
from megatron_rl.hosts.rewards import reward_post_process
from megatron_rl.testing.ranks import RankPool

DIVISOR = 8
MODES = {
    "prompt_mean": "--loss-aggregation prompt_mean",
    "token_mean": "--loss-aggregation token_mean",
    "constant": f"--loss-aggregation constant --loss-aggregation-divisor {DIVISOR}",
}
PARTIAL = " --samples-per-prompt 3 --allow-partial-prompt-groups"


def weighted(host: str, ours: str, **options) -> Namespace:
    """A launch with our hook."""
    return launch(host, ours, **REWARD | options)


def make_samples(counts: list[int], prompts: list, **fields: list) -> list[RolloutSample]:
    """One sample an entry: `counts` unmasked tokens among twice as many, its prompt, and further fields."""
    samples = []
    for index, (count, prompt) in enumerate(zip(counts, prompts, strict=True)):
        mask = [1] * count + [0] * max(count, 3)
        rest = {name: values[index] for name, values in fields.items()}
        samples.append(RolloutSample(prompt, 100 + index, len(mask), **{"loss_mask": mask, **rest}))
    return samples


def step_s(**fields: list) -> list[RolloutSample]:
    """Step S: m = (2, 4, 1, 0), prompts (7, 7, 9, 9), so N = 4, P = 2, T = 7, M_7 = 6, M_9 = 1."""
    return make_samples([2, 4, 1, 0], [7, 7, 9, 9], **fields)


def weights_of(samples: list, args: Namespace) -> list[float]:
    """Without the host's normalisation a reward of 1 becomes the sample's weight."""
    args.rewards_normalization = False
    return reward_post_process(args, samples)[1]


def fractions(text: str) -> list[float]:
    return [float(Fraction(word)) for word in text.split()]


@pytest.mark.parametrize("host", ROLLOUT_HOST_NAMES)
@pytest.mark.parametrize(("by_deviation", "unit"), [(True, 0.5**0.5), (False, 1.0)])
def test_rewards_are_normalised_by_group_index_with_one_reward_a_rollout(host, by_deviation, unit):
    """FB-11, FB-17: prompt 5 has rollouts of rewards 1, in two segments, and 3: mean 2, deviation sqrt(2). Prompt 6 has one: 0."""
    options = {"global_batch_size": 3, "grpo_std_normalization": by_deviation, **REDUCER}
    args = weighted(host, "--loss-aggregation constant --loss-aggregation-divisor 1", **options)
    samples = make_samples([1, 2, 1, 1], [5, 6, 5, 5], rollout_id=[10, 20, 11, 10], reward=[1.0, 5.0, 3.0, 1.0])
    assert reward_post_process(args, samples)[1] == pytest.approx([-unit, 0.0, unit, -unit], abs=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_a_zero_token_sample_leaves_the_other_samples_weights_unchanged(mode):
    """FB-18: w_i / (N d_i), what a token weighs after the host's mean, does not move; a constant's w_i does not either."""
    args = weighted("miles", MODES[mode] + PARTIAL, n_samples_per_prompt=3, use_dynamic_global_batch_size=True)
    without = weights_of(make_samples([2, 4, 1, 3], [7, 7, 9, 9]), args)
    placeholder = RolloutSample(9, 3, 0, loss_mask=None)
    with_it = weights_of([*make_samples([2, 4, 1, 3], [7, 7, 9, 9]), placeholder], args)
    assert with_it[-1] == 0.0
    per_n = (1, 1) if mode == "constant" else (4, 5)
    assert [w / per_n[1] for w in with_it[:-1]] == pytest.approx([w / per_n[0] for w in without], rel=1e-6)


@pytest.mark.parametrize("change", [{"remove_sample": [False, False, False, True]}, {"loss_mask": [[1] * 3] * 3 + [[0] * 3]}])
def test_a_sample_that_the_host_will_mask_has_weight_zero(change):
    """The hook runs before the host clears the mask of a removed sample; reading the mask alone would count its tokens."""
    samples = [RolloutSample(index // 2, index, 3, **{k: v[index] for k, v in change.items()}) for index in range(4)]
    weights = weights_of(samples, weighted("miles", MODES["prompt_mean"]))
    assert weights == pytest.approx([1.0, 1.0, 2.0, 0.0])  # 2 x 3/6, 2 x 3/6, 2 x 3/3
    assert [sample.loss_mask for sample in samples] == change.get("loss_mask", [None] * 4), "samples are left as they are"


@pytest.mark.parametrize(
    ("host", "options", "expected"),
    [
        # 3 groups of 2 rollouts, one token each, steps of 4 rollouts: the third group is dropped, T = 4.
        pytest.param("slime", {}, [1, 1, 1, 1, 0, 0], id="slime drops the rest"),
        pytest.param("miles", {}, [1, 1, 1, 1, 0, 0], id="miles drops the rest"),
        # A partial step of 2 rollouts, kept only with dynamic micro-batches: prompt_mean has N / P = 2 there too.
        pytest.param("miles", {"allow_partial_train_step": True}, [1, 1, 1, 1, 0, 0], id="FB-07 no dynamic micro-batches"),
        pytest.param(
            "miles", {"allow_partial_train_step": True, "use_dynamic_batch_size": True}, [1] * 6, id="FB-07 miles keeps it"
        ),
    ],
)
def test_rollouts_beyond_the_last_full_step_count_where_the_host_trains_them(host, options, expected):
    args = weighted(host, MODES["prompt_mean"], **options)
    assert weights_of(make_samples([1] * 6, [1, 1, 2, 2, 3, 3]), args) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("host", "rollout_ids", "index"),
    [
        # Two of one prompt's four samples are segments of one rollout: N = 3.
        pytest.param("miles", [5, 5, None, None], [100, 101, 102, 103], id="FB-11 miles: index stands in"),
        pytest.param("slime", [5, 5, None, None], [None] * 4, id="FB-11 slime: a fresh number"),
    ],
)
def test_samples_without_a_rollout_id_are_rollouts_of_their_own(host, rollout_ids, index):
    samples = make_samples([1, 1, 2, 2], [1, 1, 1, 1], rollout_id=rollout_ids)
    for sample, number in zip(samples, index, strict=True):
        sample.index = number
    args = weighted(host, MODES["prompt_mean"], global_batch_size=3, n_samples_per_prompt=3, rollout_batch_size=1)
    # 3 x M_roll / 6 with M_roll = 2 for all
    assert weights_of(samples, args) == pytest.approx([1.0] * 4)


SETTINGS = [
    pytest.param({"custom_reward_post_process_path": "a.b"}, "would not know that samples are weighted", {}, id="a wrapper"),
    pytest.param({"samples_per_prompt": "8"}, "same thing with two values", {"samples_per_prompt": "2"}, id="two group sizes"),
    pytest.param({"global_batch_size": None}, "neither --global-batch-size", {"global_batch_size": 4}, id="no batch size"),
    (
        {"delay_split_train_data_by_dp": True, "global_batch_size": 2},
        "--delay-split-train-data-by-dp: miles then splits samples",
        {"delay_split_train_data_by_dp": True, "global_batch_size": 4},
    ),
]


@pytest.mark.parametrize(("refused", "message", "allowed"), SETTINGS)
def test_a_setting_that_would_undo_the_weights_is_refused(refused, message, allowed):
    """FB-07: a rollout that the host drops must not count in a denominator."""
    with pytest.raises(ConfigError, match=message):
        reward_post_process(weighted("miles", MODES["prompt_mean"], **refused), step_s())
    reward_post_process(weighted("miles", MODES["prompt_mean"], **allowed), step_s())


@pytest.mark.parametrize("host", ROLLOUT_HOST_NAMES)
def test_token_mean_over_several_steps_is_refused_and_constant_is_not(host):
    """Four samples come where the flags promise one step of two: the flags alone do not show it."""
    options = {"global_batch_size": 2, "rollout_batch_size": 1}
    with pytest.raises(ConfigError, match="the rollout batch makes 2 steps of --global-batch-size 2: token_mean"):
        reward_post_process(weighted(host, MODES["token_mean"], **options), step_s())
    reward_post_process(weighted(host, MODES["constant"], **options), step_s())


def groups(*prompts, **fields) -> list:
    """Samples of these prompts, one unmasked token each."""
    return make_samples([1] * len(prompts), list(prompts), **fields)


DATA = [
    pytest.param(lambda: groups(1, None, 2, 2), r"1 of 4 .* no group_index \(the first is sample 1\)", step_s, id="FB-17 None"),
    pytest.param(lambda: groups(1, 2, 2, 3), "prompt 1 has 1 of samples_per_prompt=2", lambda: groups(1, 2, 2, 1), id="FB-17 part"),
    pytest.param(lambda: groups(1, 1, 1, 2), "prompt 1 has 3 samples", step_s, id="too many"),
    pytest.param(lambda: groups(1, 1, 2), "3 rollouts do not fill one step", step_s, id="FB-07 too few rollouts"),
    pytest.param(
        lambda: groups(1, 1, 2, 2, rollout_id=[1, 2, 1, 2]), r"rollout 1 has samples of the prompt groups \['1', '2'\]",
        lambda: groups(1, 1, 2, 2, rollout_id=[1, 2, 3, 4]), id="FB-11 a rollout of two prompts",
    ),
    pytest.param(
        lambda: groups(1, 1, 1, 2, 2, rollout_id=[1, 1, 2, 3, 4], reward=[1, 2, 1, 1, 1]), "segments of one rollout share one",
        lambda: groups(1, 1, 1, 2, 2, rollout_id=[1, 1, 2, 3, 4], reward=[2, 2, 1, 1, 1]), id="FB-11 segments that disagree",
    ),
    pytest.param(lambda: [RolloutSample(1, 0, 2, loss_mask=[1])], "a loss_mask of 1 for a response_length of 2", step_s, id="mask"),
    pytest.param(lambda: make_samples([0] * 4, [1, 1, 2, 2]), "not a single unmasked token", step_s, id="nothing to learn from"),
    pytest.param(
        lambda: step_s(reward=[1.0, float("nan"), 0.0, 0.0]), "sample 1 has the reward nan", lambda: step_s(reward=[1, 0, True, 2]),
        id="FB-18 a reward that is NaN",
    ),
    pytest.param(lambda: step_s(reward=[1.0, 1.0, None, 1.0]), "sample 2 has the reward None", step_s, id="no reward"),
    pytest.param(lambda: step_s(reward=[{"a": 1.0}] * 4), "give --reward-key", step_s, id="a dictionary of rewards"),
]  # fmt: skip


@pytest.mark.parametrize("host", ROLLOUT_HOST_NAMES)
@pytest.mark.parametrize(("refused", "message", "allowed"), DATA)
def test_samples_that_cannot_be_weighted_are_refused(host, refused, message, allowed):
    args = weighted(host, MODES["prompt_mean"])
    with pytest.raises(DataError, match=message):
        reward_post_process(args, refused())
    reward_post_process(args, allowed())


def test_constant_asks_for_prompts_where_rewards_are_normalised_and_never_takes_a_part_of_them():
    """FB-17: without a normalisation no group is needed; one that is known for some samples only is a fault in any case."""
    args = weighted("miles", MODES["constant"])
    with pytest.raises(DataError, match="4 of 4 samples have no group_index"):
        reward_post_process(args, make_samples([1] * 4, [None] * 4))
    assert weights_of(make_samples([1] * 4, [None] * 4), args) == pytest.approx([1 / 8] * 4)
    with pytest.raises(DataError, match="2 of 4 samples have no group_index"):
        weights_of(make_samples([1] * 4, [1, None, None, 2]), args)


def test_a_sample_that_miles_cannot_tell_apart_is_refused():
    """Without rollout_id and index miles counts all such samples as one rollout; slime numbers them."""
    samples = step_s()
    samples[3].index = None
    with pytest.raises(DataError, match="sample 3 has neither rollout_id nor index"):
        reward_post_process(weighted("miles", MODES["prompt_mean"]), samples)
    reward_post_process(weighted("slime", MODES["prompt_mean"]), samples)


def test_a_prompt_group_cut_by_a_step_is_refused():
    """Flags alone do not show it: 4 rollouts a step are two whole groups, but the groups do not stand side by side."""
    args = weighted("miles", MODES["prompt_mean"], rollout_batch_size=4)
    with pytest.raises(DataError, match="prompt group 2 has samples in step 0 and step 1"):
        reward_post_process(args, make_samples([1] * 8, [1, 1, 2, 3, 3, 2, 4, 4]))
    reward_post_process(args, make_samples([1] * 8, [1, 2, 2, 1, 3, 4, 4, 3]))


def test_steps_with_unlike_groups_are_refused():
    """N / P would differ from step to step: 4 rollouts of 2 prompts, then 4 of 3. One step of all is allowed."""
    samples = make_samples([1] * 8, [1, 1, 2, 2, 3, 3, 4, 5])
    ours = "--loss-aggregation prompt_mean --samples-per-prompt 2 --allow-partial-prompt-groups"
    args = weighted("slime", ours)
    with pytest.raises(DataError, match="step 0 has 4 rollouts of 2 prompts, step 1 has 4 of 3"):
        reward_post_process(args, samples)
    args.global_batch_size, args.rollout_batch_size = 8, 4
    # (N/P) m_i / M_g = 8/5 x 1/2 and 8/5 x 1/1
    assert weights_of(samples, args) == pytest.approx([0.8] * 6 + [1.6] * 2)


def test_a_dynamic_global_batch_of_rollouts_with_segments_is_refused():
    args = weighted("miles", MODES["prompt_mean"], use_dynamic_global_batch_size=True)
    with pytest.raises(ConfigError, match="--use-dynamic-global-batch-size with 5 samples of 4 rollouts"):
        reward_post_process(args, make_samples([1] * 5, [1, 1, 1, 2, 2], rollout_id=[1, 1, 2, 3, 4]))


def test_multimodal_samples_of_several_steps_are_refused_in_miles_alone():
    """FB-07: miles deals multimodal samples to ranks by count, so that steps hold other samples than rollouts would say."""
    samples = step_s(multimodal_train_inputs=[{"pixels": 1}] * 4)
    with pytest.raises(ConfigError, match="samples with multimodal_train_inputs: miles then splits samples"):
        reward_post_process(weighted("miles", MODES["prompt_mean"], global_batch_size=2), samples)
    reward_post_process(weighted("miles", MODES["prompt_mean"]), samples)
    reward_post_process(weighted("slime", MODES["prompt_mean"], global_batch_size=2), samples)


# In checkouts

SCHEDULE = dict(micro_batch_size=1, balance_data=False, balance_by_flops=False, rollout_top_p=1.0)
SCHEDULE |= dict(disable_rollout_trim_samples=False, n_samples_per_prompt=3, rollout_batch_size=4)

# The segments of each rollout, by prompt.
EQUAL = {3: [1, 1, 1], 4: [1, 1, 1], 8: [1, 1, 1], 9: [1, 1, 1]}
SEGMENTS = {3: [1, 2, 1], 4: [1, 1, 3], 8: [2, 1, 1], 9: [1, 1, 1]}
RAGGED = {3: [1, 2, 1], 4: [1], 8: [2, 1], 9: [1, 1, 1]}


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
    return token_weights(host, weighted(host, MODES[mode], **options), samples), expected


@pytest.mark.host
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
    options = dict(SCHEDULE, global_batch_size=12, grpo_std_normalization=by_deviation, **REDUCER)
    ours = weighted(host, "--loss-aggregation constant --loss-aggregation-divisor 1", **options)
    theirs = Namespace(**{**vars(ours), "custom_reward_post_process_path": None})
    found, plain = (own_train_data(host, args, real_samples(host, groups)) for args in (ours, theirs))
    assert found["raw_reward"] == plain["raw_reward"]
    counts = [sum(mask) for mask in plain["loss_masks"]]
    return found["rewards"], [reward * count for reward, count in zip(plain["rewards"], counts, strict=True)]


@pytest.mark.host
@pytest.mark.parametrize("by_deviation", [True, False])
def test_normalised_rewards_are_the_hosts_own(checkout, by_deviation):
    """constant with a divisor of 1 and our reducer makes the weight m_i."""
    found, expected = checkout(weighted_and_own_rewards, by_deviation)
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)


def trimmed(host: str) -> tuple[int, list, list]:
    options = dict(SCHEDULE, global_batch_size=99, use_dynamic_global_batch_size=True)
    args = weighted(host, MODES["token_mean"], **options)
    post = importlib.import_module("miles.ray.rollout.rollout_data_conversion").postprocess_rollout_data
    kept, metadata = post(args, real_samples(host, {3: [1, 1, 1], 4: [1, 1, 1], 5: [1]}), {"dp_size": 2})
    expected = expected_weights(kept, "token_mean", lambda prompt: 0)
    return len(kept), token_weights(host, args, kept, metadata), expected


@pytest.mark.host
@pytest.mark.parametrize("checkout", ["miles"], indirect=True)
def test_a_dynamic_global_batch_of_miles_is_what_the_hook_takes_it_for(checkout):
    """FB-07: miles trims to a multiple of dp, calls the hook, and makes one step whose N is the number of samples left."""
    num_kept, found, expected = checkout(trimmed)
    assert num_kept == 6
    assert found == pytest.approx(expected, rel=1e-6)
