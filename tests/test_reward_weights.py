"""reward_post_process: what tests/test_hosts.py does not train: weights by hand where the host drops or masks samples, rewards
normalised, refusals. tests/test_whole_host.py has the hosts' own normalisation, conversion and schedule of steps.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field, replace

import pytest
from host_steps import REDUCER, REWARD, RolloutSample, launch

from megatron_rl.errors import ConfigError, DataError
from megatron_rl.hosts import ROLLOUT_HOST_NAMES
from megatron_rl.hosts.rewards import reward_post_process

DIVISOR = 8
MODES = {
    "prompt_mean": "--loss-aggregation prompt_mean",
    "token_mean": "--loss-aggregation token_mean",
    "constant": f"--loss-aggregation constant --loss-aggregation-divisor {DIVISOR}",
}


def make_samples(counts: list[int], prompts: list, **fields: list) -> list[RolloutSample]:
    """One sample an entry: `counts` unmasked tokens among twice as many, its prompt, and further fields."""
    samples = []
    for index, (count, prompt) in enumerate(zip(counts, prompts, strict=True)):
        mask = [1] * count + [0] * max(count, 3)
        rest = {name: values[index] for name, values in fields.items()}
        samples.append(RolloutSample(prompt, **{"index": 100 + index, "response_length": len(mask), "loss_mask": mask, **rest}))
    return samples


def step_s(**fields: list) -> list[RolloutSample]:
    """Step S: m = (2, 4, 1, 0), prompts (7, 7, 9, 9), so N = 4, P = 2, T = 7, M_7 = 6, M_9 = 1."""
    return make_samples([2, 4, 1, 0], [7, 7, 9, 9], **fields)


@dataclass
class Rollouts:
    samples: list[RolloutSample]
    host: str = "miles"
    mode: str = "prompt_mean"
    options: dict = field(default_factory=dict)

    def rewards(self) -> list[float]:
        return reward_post_process(launch(self.host, MODES.get(self.mode, self.mode), **REWARD | self.options), self.samples)[1]

    def weights(self) -> list[float]:
        """Without the host's normalisation a reward of 1 becomes the sample's weight."""
        return replace(self, options={"rewards_normalization": False} | self.options).rewards()


def groups(*prompts, **fields) -> list[RolloutSample]:
    """Samples of these prompts, one unmasked token each."""
    return make_samples([1] * len(prompts), list(prompts), **fields)


def whole_samples(**fields: list) -> list[RolloutSample]:
    """Two prompts of two samples of three tokens."""
    return [RolloutSample(index // 2, index, 3, **{name: of[index] for name, of in fields.items()}) for index in range(4)]


SIX, PARTIAL = groups(1, 1, 2, 2, 3, 3), "--loss-aggregation prompt_mean --samples-per-prompt 2 --allow-partial-prompt-groups"
UNLIKE = groups(1, 1, 2, 2, 3, 3, 4, 5)
KEEPS_REST = {"allow_partial_train_step": True, "use_dynamic_batch_size": True}
ONE_PROMPT = {"global_batch_size": 3, "n_samples_per_prompt": 3, "rollout_batch_size": 1}
MINUTE = {"index": [None] * 4, "rollout_id": [5, 5, None, None]}
WEIGHTS = {
    # 3 groups of 2 rollouts, one token each, steps of 4 rollouts: the third group is dropped, T = 4.
    "slime drops the rest": (Rollouts(SIX, "slime"), [1, 1, 1, 1, 0, 0]),
    "miles drops the rest": (Rollouts(SIX), [1, 1, 1, 1, 0, 0]),
    # A partial step of 2 rollouts, kept only with dynamic micro-batches: prompt_mean has N / P = 2 there too.
    "FB-07 no dynamic micro-batches": (Rollouts(SIX, options={"allow_partial_train_step": True}), [1, 1, 1, 1, 0, 0]),
    "FB-07 miles keeps it": (Rollouts(SIX, options=KEEPS_REST), [1] * 6),
    # The hook runs before the host clears the mask of a removed sample: 2 x 3/6, 2 x 3/6, 2 x 3/3.
    "a sample that the host will remove": (Rollouts(whole_samples(remove_sample=[False, False, False, True])), [1, 1, 2, 0]),
    "a fully masked sample": (Rollouts(whole_samples(loss_mask=[[1] * 3] * 3 + [[0] * 3])), [1, 1, 2, 0]),
    # Two of one prompt's four samples are segments of one rollout: N = 3, and 3 x M_roll / 6 with M_roll = 2 for all.
    "FB-11 miles: index stands in": (
        *(Rollouts(make_samples([1, 1, 2, 2], [1] * 4, rollout_id=[5, 5, None, None]), options=ONE_PROMPT), [1] * 4),
    ),
    "FB-11 slime: a fresh number": (Rollouts(make_samples([1, 1, 2, 2], [1] * 4, **MINUTE), "slime", options=ONE_PROMPT), [1] * 4),
    # (N/P) m_i / M_g = 8/5 x 1/2 and 8/5 x 1/1
    "unlike groups in one step": (
        *(Rollouts(UNLIKE, "slime", PARTIAL, {"global_batch_size": 8, "rollout_batch_size": 4}), [0.8] * 6 + [1.6] * 2),
    ),
    "FB-17 a constant needs no prompts": (Rollouts(groups(*[None] * 4), mode="constant"), [1 / 8] * 4),
}


@pytest.mark.parametrize(("rollouts", "expected"), WEIGHTS.values(), ids=WEIGHTS)
def test_weights_by_hand(rollouts, expected):
    before = copy.deepcopy(rollouts.samples)
    assert rollouts.weights() == pytest.approx(expected) and rollouts.samples == before


@pytest.mark.parametrize("host", ROLLOUT_HOST_NAMES)
@pytest.mark.parametrize(("by_deviation", "unit"), [(True, 0.5**0.5), (False, 1.0)])
def test_rewards_are_normalised_by_group_index_with_one_reward_a_rollout(host, by_deviation, unit):
    """FB-11, FB-17: prompt 5 has rollouts of rewards 1, in two segments, and 3: mean 2, deviation sqrt(2). Prompt 6 has one: 0."""
    options = {"global_batch_size": 3, "grpo_std_normalization": by_deviation, **REDUCER}
    samples = make_samples([1, 2, 1, 1], [5, 6, 5, 5], rollout_id=[10, 20, 11, 10], reward=[1.0, 5.0, 3.0, 1.0])
    found = Rollouts(samples, host, "--loss-aggregation constant --loss-aggregation-divisor 1", options).rewards()
    assert found == pytest.approx([-unit, 0.0, unit, -unit], abs=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_a_zero_token_sample_leaves_the_other_samples_weights_unchanged(mode):
    """FB-18: w_i / (N d_i), what a token weighs after the host's mean, does not move; a constant's w_i does not either."""
    ours = MODES[mode] + " --samples-per-prompt 3 --allow-partial-prompt-groups"
    options = {"n_samples_per_prompt": 3, "use_dynamic_global_batch_size": True}
    samples = make_samples([2, 4, 1, 3], [7, 7, 9, 9])
    without = Rollouts(samples, mode=ours, options=options).weights()
    *with_it, placeholder = Rollouts([*samples, RolloutSample(9, 3, 0)], mode=ours, options=options).weights()
    per_n = (1, 1) if mode == "constant" else (4, 5)
    assert placeholder == 0.0
    assert [weight / per_n[1] for weight in with_it] == pytest.approx([weight / per_n[0] for weight in without], rel=1e-6)


S, TWO_STEPS = Rollouts(step_s()), {"global_batch_size": 2, "rollout_batch_size": 1}
SPLIT, DYNAMIC = {"delay_split_train_data_by_dp": True}, {"use_dynamic_global_batch_size": True}
IMAGES, EIGHT = step_s(multimodal_train_inputs=[{"pixels": 1}] * 4), {"rollout_batch_size": 4}
FIVE = {"rollout_id": [1, 1, 2, 3, 4]}
# What is refused, the message, what is allowed beside it.
REFUSED = {
    # A setting that would undo the weights. FB-07: a rollout that the host drops must not count in a denominator.
    "a wrapper": (replace(S, options={"custom_reward_post_process_path": "a.b"}), "would not know that samples are weighted", S),
    "a split by samples": (replace(S, options=SPLIT | TWO_STEPS), "-data-by-dp: miles then splits", replace(S, options=SPLIT)),
    "images": (
        *(Rollouts(IMAGES, options=TWO_STEPS), "samples with multimodal_train_inputs: miles then splits samples"),
        Rollouts(IMAGES, "slime", options=TWO_STEPS),
    ),
    "FB-11 a dynamic step of segments": (
        *(Rollouts(groups(1, 1, 1, 2, 2, **FIVE), options=DYNAMIC), "-dynamic-global-batch-size with 5 samples of 4 rollouts"),
        replace(S, options=DYNAMIC),
    ),
    # The flags alone do not show it: four samples come where they promise one step of two.
    "token_mean over several steps": (
        *(Rollouts(step_s(), "slime", "token_mean", TWO_STEPS), "the rollout batch makes 2 steps of --global-batch-size 2: token_"),
        Rollouts(step_s(), "slime", "constant", TWO_STEPS),
    ),
    "a prompt group cut by a step": (
        *(Rollouts(groups(1, 1, 2, 3, 3, 2, 4, 4), options=EIGHT), "prompt group 2 has samples in step 0 and step 1"),
        Rollouts(groups(1, 2, 2, 1, 3, 4, 4, 3), options=EIGHT),
    ),
    # N / P would differ from step to step.
    "unlike groups": (Rollouts(UNLIKE, "slime", PARTIAL), "step 0 has 4 rollouts of 2 prompts, step 1 has 4 of 3", S),
    # Samples that cannot be weighted.
    "FB-17 no prompt": (Rollouts(groups(1, None, 2, 2)), r"1 of 4 .* no group_index \(the first is sample 1\)", S),
    "FB-17 part of a group": (Rollouts(groups(1, 2, 2, 3)), "prompt 1 has 1 of samples_per_prompt=2", Rollouts(groups(1, 2, 2, 1))),
    "too many": (Rollouts(groups(1, 1, 1, 2)), "prompt 1 has 3 samples", S),
    "a mask of another length": (Rollouts([RolloutSample(1, 0, 2, loss_mask=[1])]), "mask of 1 for a response_length of 2", S),
    "FB-07 too few rollouts": (Rollouts(groups(1, 1, 2)), "3 rollouts do not fill one step", S),
    "FB-11 a rollout of two prompts": (
        *(Rollouts(groups(1, 1, 2, 2, rollout_id=[1, 2, 1, 2])), r"rollout 1 has samples of the prompt groups \['1', '2'\]"),
        Rollouts(groups(1, 1, 2, 2, rollout_id=[1, 2, 3, 4])),
    ),
    "FB-11 segments that disagree": (
        *(Rollouts(groups(1, 1, 1, 2, 2, **FIVE, reward=[1, 2, 1, 1, 1])), "segments of one rollout share one"),
        Rollouts(groups(1, 1, 1, 2, 2, **FIVE, reward=[2, 2, 1, 1, 1])),
    ),
    # Without rollout_id and index miles counts all such samples as one rollout; slime numbers them.
    "samples that miles cannot tell apart": (
        *(Rollouts(step_s(index=[100, 101, 102, None])), "sample 3 has neither rollout_id nor index"),
        Rollouts(step_s(index=[100, 101, 102, None]), "slime"),
    ),
    "nothing to learn from": (Rollouts(make_samples([0] * 4, [1, 1, 2, 2])), "not a single unmasked token", S),
    "FB-18 NaN": (Rollouts(step_s(reward=[1, math.nan, 0, 0])), "reward nan", Rollouts(step_s(reward=[1, 0, True, 2]))),
}


@pytest.mark.parametrize(("refused", "message", "allowed"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_weighted_is_refused(refused, message, allowed):
    with pytest.raises((ConfigError, DataError), match=message):
        refused.rewards()
    allowed.rewards()
