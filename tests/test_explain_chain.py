"""The chain of factors of `megatron-rl explain`, by hand: of samples, of rollouts of several, and of each hook beside its code."""

from __future__ import annotations

import math

import pytest
from explain_cases import CLOSE, CONSTANT, LAYOUT, PER_TOKEN, PROMPT_MEAN, STEP, chain_of, explain_json, stages

from megatron_rl.aggregation_record import Formula
from megatron_rl.hosts import SETTINGS_NAMES
from megatron_rl.hosts.adapters import adapter_named
from megatron_rl.loss_hub import get_loss_aggregation

MASKED = [*STEP, "--loss-masks", "11,1111,1,000"]


def test_a_chain_by_hand():
    """dp 8 x cp 2, M = 16, N = 4: reducer 1/m_i, host 16 x 16 / 4 = 64, schedule 1/16, DDP 1/16, net 1/(4 m_i)."""
    chain, problems = chain_of(
        *STEP, "--host", "slime", "--data-parallel-size", "8", "--context-parallel-size", "2", "--num-microbatches", "16"
    )
    assert problems == []
    assert stages(chain) == {"reducer": "1/m_i", "host": "M dp cp/N", "schedule": "1/M", "DDP": "1/(dp cp)"}
    values = [factor["values"] for factor in chain["factors"]]
    assert values[0] == pytest.approx([1 / 2, 1 / 4, 1, 1 / 3], **CLOSE)
    assert [row[0] for row in values[1:]] == pytest.approx([64, 1 / 16, 1 / 16], **CLOSE)
    assert chain["net_weights"] == pytest.approx([1 / 8, 1 / 16, 1 / 4, 1 / 12], **CLOSE)
    assert (chain["net"], chain["asked"], chain["left_over"], chain["is_exact"]) == ("1/(N m_i)", "1/(N m_i)", "1", True)


def test_a_chain_per_token_by_hand():
    """dp 8 x cp 2: the host gives each rank's sum x 2, and the 10 tokens are counted on both cp ranks of a sample."""
    chain, _ = chain_of(*STEP, "--host", "miles", *PER_TOKEN, "--data-parallel-size", "8", "--context-parallel-size", "2")
    assert stages(chain) == {"reducer": "1", "host": "cp", "schedule": "1", "DDP": "1", "finalize": "1/(T cp)"}
    assert [factor["values"][0] for factor in chain["factors"]] == pytest.approx([1, 2, 1, 1, 1 / 20], **CLOSE)


# Of miles and slime: test_rollouts_of_several_samples_weigh_as_one.
SOUND = [
    pytest.param(["--host", host, *rest], id=" ".join([host, *rest]))
    for host in ("megatron_lm", "train")
    for rest in ([], CONSTANT, ["--loss-aggregation", "prompt_mean"], ["--loss-aggregation", "token_mean"])
]
SOUND.append(pytest.param(["--host", "megatron_lm", *PER_TOKEN], id="megatron_lm per-token"))


@pytest.mark.parametrize("arguments", SOUND)
def test_a_sound_launch_has_the_weight_that_was_asked_for(arguments):
    chain, problems = chain_of(*STEP, *arguments, *LAYOUT)
    assert problems == []
    assert chain["is_exact"]
    assert chain["ratio"] == pytest.approx([1.0] * 4, **CLOSE)
    assert not any(factor["differs"] for factor in chain["factors"])


THEIR_LOSS, TOKEN_MEAN = ["--route", "host"], ["--loss-aggregation", "token_mean"]
STOCK = "stock token_mean, which nobody of ours judges"
# N = 4, T = 7 and one phantom token, m = (2, 4, 1, 0), L = 8.
# name: (arguments, what is left over, where, ratio of the samples with a token)
BROKEN = {
    "per-token": (["slime", *CONSTANT, "--calculate-per-token-loss"], "N/T'", {"finalize"}, [4 / 8] * 3),
    "FB-09 a phantom token": (["miles", *PER_TOKEN], "T/T'", {"finalize"}, [7 / 8] * 3),
    "a dropped flag": (["slime", *THEIR_LOSS, *CONSTANT], "L/m_i", {"reducer"}, [4, 2, 8]),
    STOCK: (["miles", *THEIR_LOSS, "--calculate-per-token-loss"], "N m_i/T'", {"finalize"}, [1, 2, 1 / 2]),
    "token_mean that nobody divides": (["miles", *TOKEN_MEAN, "--companion", "none"], "T/N", {"host"}, [7 / 4] * 3),
}


@pytest.mark.parametrize("name", BROKEN)
def test_the_factor_that_differs_is_marked_and_the_exit_code_is_1(name):
    arguments, left_over, marked, ratio = BROKEN[name]
    chain, problems = chain_of(*MASKED, "--host", *arguments, *LAYOUT, code=1)
    assert chain["left_over"] == left_over
    assert chain["ratio"] == pytest.approx(ratio, **CLOSE)
    assert not chain["is_exact"]
    assert {factor["stage"] for factor in chain["factors"] if factor["differs"]} == marked
    assert bool(problems) == (name != STOCK)


def test_a_divisor_of_the_gradient_that_was_asked_for_differs_from_nothing():
    """FB-91: --gradient-divisor num_samples is in the chain, and in what was asked for."""
    chain, _ = chain_of(*STEP, "--host", "train", "--gradient-divisor", "num_samples", *LAYOUT)
    assert stages(chain)["gradient divisor"] == "1/N"
    assert (chain["net"], chain["asked"], chain["is_exact"]) == ("1/(N^2 m_i)", "1/(N^2 m_i)", True)
    assert chain["net_weights"] == pytest.approx([1 / 32, 1 / 64, 1 / 16, 1 / 48], **CLOSE)


def test_custom_loss_refuses_a_phantom_token_and_so_does_the_chain():
    chain, problems = chain_of(*MASKED, "--host", "miles", "--route", "custom_loss", *PER_TOKEN, code=1)
    assert chain["left_over"] == "T/T'"
    assert "fully masked samples (1)" in problems[0] and "our loss refuses such a step" in problems[0]


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
    pytest.param(PROMPT_MEAN, "prompt_mean", id="reducer, reward hook"),
    pytest.param(CONSTANT, "constant", id="FB-11 reducer, constant"),
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


@pytest.mark.parametrize("aggregation", ["sample_mean", "prompt_mean"])
@pytest.mark.parametrize("name", SETTINGS_NAMES)
def test_the_factors_of_each_trainer_of_settings_leave_the_weight(name, aggregation):
    """M, dp and cp cancel; in verl's per-token contract R, the tokens of the model, too."""
    record, adapter = get_loss_aggregation(aggregation), adapter_named(name)
    for per_token in (False, True) if adapter.WHY_NOT_PER_TOKEN is None else (False,):
        of_samples, of_step = adapter.stages(record.formula, record, per_token=per_token)
        factors = [factor for _, factor, _ in (*of_samples, *of_step)]
        assert math.prod(factors, start=Formula()) == record.formula
