"""`megatron-rl explain` where a rollout has several samples, and the hooks of the rollout process: each factor against its code."""

from __future__ import annotations

import pytest
from explain_cases import CLOSE, CONSTANT, LAYOUT, PER_TOKEN, PROMPT_MEAN, STEP, chain_of, explain, explain_json, stages
from rollout_cases import launch as rollout_launch
from rollout_cases import make_samples
from test_convert import miles_module, put_modules

from megatron_rl.hosts.base import host_named
from megatron_rl.hosts.companions import convert_samples_to_train_data
from megatron_rl.layout.groups import ParallelGroups
from megatron_rl.testing.host_emulator import EmulatedHost

FAN_OUT = [*STEP, "--rollout-ids", "0,0,1,2"]
# Rollouts of 6, 1 and 3 tokens, the first of two samples: N = 3, P = 2, T = 10, M_g = 6 and 4.
ROLLOUTS = {
    "sample_mean": [1 / 18, 1 / 18, 1 / 3, 1 / 9],
    "prompt_mean": [1 / 12, 1 / 12, 1 / 8, 1 / 8],
    "token_mean": [1 / 10] * 4,
    "constant": [1 / 24] * 4,
}
BY_ROLLOUT = [
    pytest.param(["--route", "custom_loss"], "sample_mean", id="custom_loss"),
    pytest.param(["--route", "custom_loss", *CONSTANT], "constant", id="custom_loss, constant"),
    pytest.param(["--route", "custom_loss", *PROMPT_MEAN], "prompt_mean", id="custom_loss, reward hook"),
    pytest.param(["--route", "custom_loss", *PROMPT_MEAN, "--companion", "convert"], "prompt_mean", id="custom_loss, converter"),
    pytest.param(PROMPT_MEAN, "prompt_mean", id="reducer, reward hook"),
    pytest.param(CONSTANT, "constant", id="FB-11 reducer, constant"),
    pytest.param([*PROMPT_MEAN, "--companion", "convert"], "prompt_mean", id="host's reducer, converter"),
    pytest.param([*PROMPT_MEAN, "--route", "host", "--companion", "reward"], "prompt_mean", id="host's reducer, reward hook"),
    pytest.param(["--loss-aggregation", "token_mean"], "token_mean", id="reducer, reward hook, token_mean"),
    pytest.param(PER_TOKEN, "token_mean", id="per-token"),
    pytest.param(["--route", "host"], "sample_mean", id="the host's own"),
]


@pytest.mark.parametrize("host", ["miles", "slime"])
@pytest.mark.parametrize(("arguments", "aggregation"), BY_ROLLOUT)
def test_rollouts_of_several_samples_weigh_as_one(host, arguments, aggregation):
    """Fan-out is counted once, on every route that can."""
    chain, problems = chain_of(*FAN_OUT, "--host", host, *arguments, *LAYOUT)
    assert problems == []
    assert chain["net_weights"] == pytest.approx(ROLLOUTS[aggregation], **CLOSE)


def test_a_sample_without_a_token_weighs_nothing_in_a_rollout_that_has_some():
    """Rollout 0: a masked sample and one of 4 tokens. M_roll = 4, N = 3."""
    masked = [*FAN_OUT, "--loss-masks", "00,1111,1,111"]
    found = explain_json(*masked, "--host", "miles", "--route", "custom_loss")
    assert found["num_masked_samples"] == 1
    expected = [0, 1 / 12, 1 / 3, 1 / 9]
    assert found["aggregations"]["sample_mean"]["token_weights"] == pytest.approx(expected, **CLOSE)
    assert found["chain"]["net_weights"] == pytest.approx(expected, **CLOSE)


def test_our_reducer_sees_no_rollouts_and_is_refused():
    """Each of the two samples would weigh as a rollout: M_roll/m_i = 6/2 and 6/4 too much."""
    chain, problems = chain_of(*FAN_OUT, "--host", "miles", *LAYOUT, code=1)
    assert (chain["left_over"], chain["asked"]) == ("M_roll/m_i", "1/(N M_roll)")
    assert chain["ratio"] == pytest.approx([3, 3 / 2, 1, 1], **CLOSE)
    assert "may return several samples for one rollout" in problems[0]


def test_a_converters_chain_by_hand():
    """dp 2 x cp 2, M = 3, P = 2: the host's own reducer 1/M_g, host 3 x 4 / 2 = 6, schedule 1/3, DDP 1/4, net 1/(2 M_g)."""
    found = explain_json(*FAN_OUT, "--host", "slime", *PROMPT_MEAN, "--companion", "convert", *LAYOUT)
    chain = found["chain"]
    assert (chain["route"], chain["companion"]) == ("host", "convert")
    assert stages(chain) == {"reducer": "1/M_g", "host": "M dp cp/P", "schedule": "1/M", "DDP": "1/(dp cp)"}
    values = [factor["values"] for factor in chain["factors"]]
    assert values[0] == pytest.approx([1 / 6, 1 / 6, 1 / 4, 1 / 4], **CLOSE)
    assert [row[0] for row in values[1:]] == pytest.approx([6, 1 / 3, 1 / 4], **CLOSE)
    assert not any("custom-pg-loss-reducer" in line for line in found["launch_lines"])
    text = explain(*FAN_OUT, "--host", "slime", *PROMPT_MEAN, "--companion", "convert")[1]
    assert "with the converter --global-batch-size counts prompts, and KL, entropy and clip fraction are prompt means too" in text
    assert "KL and entropy terms are" not in text  # they move with the loss
    assert "against sample_mean: " not in text


# Two rollouts a prompt, the first of two samples: N = 4, P = 2, M_roll = 6, 1, 3, 5, M_g = 7 and 8.
EQUAL_LENGTHS, EQUAL_PROMPTS, EQUAL_ROLLOUTS = [2, 4, 1, 3, 5], [7, 7, 7, 9, 9], [0, 0, 1, 2, 3]
EQUAL = [
    *("--response-lengths", ",".join(map(str, EQUAL_LENGTHS)), "--prompt-ids", ",".join(map(str, EQUAL_PROMPTS))),
    *("--rollout-ids", ",".join(map(str, EQUAL_ROLLOUTS)), *PROMPT_MEAN),
]


def test_a_converters_denominators_are_those_that_the_hook_writes(monkeypatch):
    """hooks.convert_samples_to_train_data on the same rollouts: what the host's own reducer and the host divide by."""
    put_modules(monkeypatch, miles_module())
    samples = make_samples(EQUAL_LENGTHS, EQUAL_PROMPTS, rollout_id=EQUAL_ROLLOUTS)
    args = rollout_launch("miles", "convert", "--loss-aggregation prompt_mean", global_batch_size=2)
    data = convert_samples_to_train_data(args, samples)
    chain, _ = chain_of(*EQUAL, "--host", "miles", "--companion", "convert")
    assert chain["factors"][0]["values"] == pytest.approx([1 / total for total in data["rollout_mask_sums"]], **CLOSE)
    assert chain["factors"][1]["values"] == pytest.approx([1 / len(set(data["rollout_ids"]))] * 5, **CLOSE)


@pytest.mark.parametrize("host", ["miles", "slime"])
def test_a_reward_hooks_factor_is_what_the_hook_returns(host):
    """hooks.reward_post_process on rewards of 1 that nobody normalises: the weights themselves; and the host's denominators."""
    samples = make_samples(EQUAL_LENGTHS, EQUAL_PROMPTS, rollout_id=EQUAL_ROLLOUTS)
    args = rollout_launch(host, "reward", "--loss-aggregation prompt_mean", rewards_normalization=False)
    data = EmulatedHost(host_named(host), ParallelGroups()).train_data(args, samples)
    chain, _ = chain_of(*EQUAL, "--host", host, "--route", "host", "--companion", "reward")
    assert chain["factors"][0]["values"] == pytest.approx(data["rewards"], **CLOSE)
    assert chain["factors"][1]["values"] == pytest.approx([1 / total for total in data["rollout_mask_sums"]], **CLOSE)
