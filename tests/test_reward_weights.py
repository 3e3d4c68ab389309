"""reward_post_process: weights by hand, exact losses in the hosts, normalisation, refusals; references are loops."""

from __future__ import annotations

from argparse import Namespace
from fractions import Fraction

import pytest
from rollout_cases import DOORS, REDUCER, RolloutSample, launch, make_samples, step_s

from megatron_rl.errors import ConfigError, DataError
from megatron_rl.hosts.rewards import reward_post_process

HOSTS = ("miles", "slime")
MODES = {
    "prompt_mean": "--loss-aggregation prompt_mean",
    "token_mean": "--loss-aggregation token_mean",
    "constant": "--loss-aggregation constant --loss-aggregation-divisor 8",
}
PARTIAL = " --samples-per-prompt 3 --allow-partial-prompt-groups"


def weights_of(samples: list, args: Namespace) -> list[float]:
    """Without the host's normalisation a reward of 1 becomes the sample's weight."""
    args.rewards_normalization = False
    return reward_post_process(args, samples)[1]


def fractions(text: str) -> list[float]:
    return [float(Fraction(word)) for word in text.split()]


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        # (N/P) m_i / M_g: 2 x 2/6, 2 x 4/6, 2 x 1/1
        pytest.param("prompt_mean", "2/3 4/3 2 0", id="FB-17 prompt_mean"),
        # N m_i / T: 4 x 2/7, 4 x 4/7, 4 x 1/7; a phantom token would make it 8ths
        pytest.param("token_mean", "8/7 16/7 4/7 0", id="FB-09 token_mean"),
        # m_i / 8
        pytest.param("constant", "1/4 1/2 1/8 0", id="constant"),
    ],
)
def test_weights_of_step_s_by_hand(host, door, mode, expected):
    args = launch(host, "reward", MODES[mode], **DOORS[door])
    assert weights_of(step_s(), args) == pytest.approx(fractions(expected), rel=1e-6)


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize(
    ("mode", "door", "expected"),
    [
        # Rollout 1 holds 2 + 1 tokens in two segments, rollout 2 holds 3: N = 2, P = 1, M_g = T = 6. d_i = M_roll = 3.
        pytest.param("prompt_mean", "host's reducer", "1 1 1", id="prompt_mean, host's reducer"),
        pytest.param("prompt_mean", "custom_loss", "1 1 1", id="prompt_mean, custom_loss"),
        # d_i = m_i: 2 x 2/6, 2 x 1/6, 2 x 3/6
        pytest.param("prompt_mean", "our reducer", "2/3 1/3 1", id="prompt_mean, our reducer"),
        pytest.param("token_mean", "our reducer", "2/3 1/3 1", id="token_mean, our reducer"),
        pytest.param("constant", "host's reducer", "3/8 3/8 3/8", id="constant, host's reducer"),
        pytest.param("constant", "our reducer", "2/8 1/8 3/8", id="constant, our reducer"),
    ],
)
def test_weights_cancel_the_denominator_that_will_divide(host, mode, door, expected):
    """FB-11: a rollout of two segments counts once in N, and each reducer's own denominator stands in the weight."""
    samples = make_samples([2, 1, 3], [0, 0, 0], rollout_id=[1, 1, 2])
    args = launch(host, "reward", MODES[mode], global_batch_size=2, rollout_batch_size=1, **DOORS[door])
    assert weights_of(samples, args) == pytest.approx(fractions(expected), rel=1e-6)


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize(("by_deviation", "unit"), [(True, 0.5**0.5), (False, 1.0)])
def test_rewards_are_normalised_by_group_index_with_one_reward_a_rollout(host, by_deviation, unit):
    """FB-11, FB-17: prompt 5 has rollouts of rewards 1, in two segments, and 3: mean 2, deviation sqrt(2). Prompt 6 has one: 0."""
    options = {"global_batch_size": 3, "grpo_std_normalization": by_deviation, **DOORS["our reducer"]}
    args = launch(host, "reward", "--loss-aggregation constant --loss-aggregation-divisor 1", **options)
    samples = make_samples([1, 2, 1, 1], [5, 6, 5, 5], rollout_id=[10, 20, 11, 10], reward=[1.0, 5.0, 3.0, 1.0])
    assert reward_post_process(args, samples)[1] == pytest.approx([-unit, 0.0, unit, -unit], abs=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_a_zero_token_sample_leaves_the_other_samples_weights_unchanged(mode):
    """FB-18: w_i / (N d_i), what a token weighs after the host's mean, does not move; a constant's w_i does not either."""
    args = launch("miles", "reward", MODES[mode] + PARTIAL, n_samples_per_prompt=3, use_dynamic_global_batch_size=True)
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
    weights = weights_of(samples, launch("miles", "reward", MODES["prompt_mean"]))
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
    args = launch(host, "reward", MODES["prompt_mean"], **options)
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
    args = launch(host, "reward", MODES["prompt_mean"], global_batch_size=3, n_samples_per_prompt=3, rollout_batch_size=1)
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
        reward_post_process(launch("miles", "reward", MODES["prompt_mean"], **refused), step_s())
    reward_post_process(launch("miles", "reward", MODES["prompt_mean"], **allowed), step_s())


@pytest.mark.parametrize("host", HOSTS)
def test_token_mean_over_several_steps_is_refused_and_constant_is_not(host):
    """Four samples come where the flags promise one step of two: the flags alone do not show it."""
    options = {"global_batch_size": 2, "rollout_batch_size": 1}
    with pytest.raises(ConfigError, match="the rollout batch makes 2 steps of --global-batch-size 2: token_mean"):
        reward_post_process(launch(host, "reward", MODES["token_mean"], **options), step_s())
    reward_post_process(launch(host, "reward", MODES["constant"], **options), step_s())


@pytest.mark.parametrize("host", HOSTS)
def test_sample_mean_gives_each_segment_its_share_of_the_rollout(host):
    """FB-11: our reducer divides by each sample's own tokens: m_i / M_roll(i) is left, 2/3 and 1/3 of rollout 7; without the hook
    a rollout function of the user's own is refused."""
    agent = {"custom_generate_function_path": "user.agent", "custom_pg_loss_reducer_function_path": REDUCER}
    args = launch(host, "reward", "--loss-aggregation sample_mean", **agent)
    assert weights_of(step_s(), args) == pytest.approx([1.0, 1.0, 1.0, 0.0])
    segments = make_samples([3, 2, 1, 2], [1, 1, 1, 2], rollout_id=[1, 7, 7, 3])
    assert weights_of(segments, args) == pytest.approx(fractions("1 2/3 1/3 1"))


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


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize(("refused", "message", "allowed"), DATA)
def test_samples_that_cannot_be_weighted_are_refused(host, refused, message, allowed):
    args = launch(host, "reward", MODES["prompt_mean"])
    with pytest.raises(DataError, match=message):
        reward_post_process(args, refused())
    reward_post_process(args, allowed())


def test_constant_asks_for_prompts_where_rewards_are_normalised_and_never_takes_a_part_of_them():
    """FB-17: without a normalisation no group is needed; one that is known for some samples only is a fault in any case."""
    args = launch("miles", "reward", MODES["constant"])
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
        reward_post_process(launch("miles", "reward", MODES["prompt_mean"]), samples)
    reward_post_process(launch("slime", "reward", MODES["prompt_mean"]), samples)


def test_a_prompt_group_cut_by_a_step_is_refused():
    """Flags alone do not show it: 4 rollouts a step are two whole groups, but the groups do not stand side by side."""
    args = launch("miles", "reward", MODES["prompt_mean"], rollout_batch_size=4)
    with pytest.raises(DataError, match="prompt group 2 has samples in step 0 and step 1"):
        reward_post_process(args, make_samples([1] * 8, [1, 1, 2, 3, 3, 2, 4, 4]))
    reward_post_process(args, make_samples([1] * 8, [1, 2, 2, 1, 3, 4, 4, 3]))


def test_steps_with_unlike_groups_are_refused():
    """N / P would differ from step to step: 4 rollouts of 2 prompts, then 4 of 3. One step of all is allowed."""
    samples = make_samples([1] * 8, [1, 1, 2, 2, 3, 3, 4, 5])
    ours = "--loss-aggregation prompt_mean --samples-per-prompt 2 --allow-partial-prompt-groups"
    args = launch("slime", "reward", ours)
    with pytest.raises(DataError, match="step 0 has 4 rollouts of 2 prompts, step 1 has 4 of 3"):
        reward_post_process(args, samples)
    args.global_batch_size, args.rollout_batch_size = 8, 4
    # (N/P) m_i / M_g = 8/5 x 1/2 and 8/5 x 1/1
    assert weights_of(samples, args) == pytest.approx([0.8] * 6 + [1.6] * 2)


def test_a_dynamic_global_batch_of_rollouts_with_segments_is_refused():
    args = launch("miles", "reward", MODES["prompt_mean"], use_dynamic_global_batch_size=True)
    with pytest.raises(ConfigError, match="--use-dynamic-global-batch-size with 5 samples of 4 rollouts"):
        reward_post_process(args, make_samples([1] * 5, [1, 1, 1, 2, 2], rollout_id=[1, 1, 2, 3, 4]))


def test_multimodal_samples_of_several_steps_are_refused_in_miles_alone():
    """FB-07: miles deals multimodal samples to ranks by count, so that steps hold other samples than rollouts would say."""
    samples = step_s(multimodal_train_inputs=[{"pixels": 1}] * 4)
    with pytest.raises(ConfigError, match="samples with multimodal_train_inputs: miles then splits samples"):
        reward_post_process(launch("miles", "reward", MODES["prompt_mean"], global_batch_size=2), samples)
    reward_post_process(launch("miles", "reward", MODES["prompt_mean"]), samples)
    reward_post_process(launch("slime", "reward", MODES["prompt_mean"], global_batch_size=2), samples)
