"""The chain of factors of `megatron-rl explain`, by hand: of samples, of rollouts of several, and of each hook."""

from __future__ import annotations

import math

import pytest
from explain_cases import CLOSE, CONSTANT, LAYOUT, PER_TOKEN, PROMPT_MEAN, STEP, chain_of, stages

from megatron_rl.hosts import SETTINGS_NAMES
from megatron_rl.hosts.adapters import adapter_named
from megatron_rl.weights import Formula, get_loss_aggregation

OUR_LOSS = ["--policy-loss", "grpo"]


def test_a_chain_by_hand():
    """dp 8 x cp 2, M = 16, N = 4: reducer 1/m_i, host 16 x 16 / 4 = 64, schedule 1/16, DDP 1/16, net 1/(4 m_i)."""
    chain = chain_of(
        *STEP, "--host", "slime", "--data-parallel-size", "8", "--context-parallel-size", "2", "--num-microbatches", "16"
    )
    assert stages(chain) == {"reducer": "1/m_i", "host": "M dp cp/N", "schedule": "1/M", "DDP": "1/(dp cp)"}
    values = [factor["values"] for factor in chain["factors"]]
    assert values[0] == pytest.approx([1 / 2, 1 / 4, 1, 1 / 3], **CLOSE)
    assert [row[0] for row in values[1:]] == pytest.approx([64, 1 / 16, 1 / 16], **CLOSE)
    assert chain["net_weights"] == pytest.approx([1 / 8, 1 / 16, 1 / 4, 1 / 12], **CLOSE)
    assert (chain["net"], chain["asked"], chain["left_over"]) == ("1/(N m_i)", "1/(N m_i)", "1")


def test_a_chain_per_token_by_hand():
    """dp 8 x cp 2: the host gives each rank's sum x 2, and the 10 tokens are counted on both cp ranks of a sample."""
    chain = chain_of(*STEP, "--host", "miles", *PER_TOKEN, "--data-parallel-size", "8", "--context-parallel-size", "2")
    assert stages(chain) == {"reducer": "1", "host": "cp", "schedule": "1", "DDP": "1", "finalize": "1/(T cp)"}
    assert [factor["values"][0] for factor in chain["factors"]] == pytest.approx([1, 2, 1, 1, 1 / 20], **CLOSE)


# Of miles and slime: test_rollouts_of_several_samples_weigh_as_one.
@pytest.mark.parametrize("arguments", [[], CONSTANT, PROMPT_MEAN, PER_TOKEN], ids=" ".join)
@pytest.mark.parametrize("host", ["megatron_lm", "train"])
def test_a_sound_launch_has_the_weight_that_was_asked_for(host, arguments):
    chain = chain_of(*STEP, "--host", host, *arguments, *LAYOUT)
    assert chain["ratio"] == pytest.approx([1.0] * 4, **CLOSE)
    assert not any(factor["differs"] for factor in chain["factors"])


@pytest.mark.parametrize("loss", [[], OUR_LOSS], ids=["reducer", "custom_loss"])
def test_a_phantom_token_is_marked_where_it_is_counted(loss):
    """FB-09: T = 7, and the masked sample counts as one token more."""
    step = [*STEP, "--loss-masks", "11,1111,1,000"]
    chain = chain_of(*step, "--host", "miles", *PER_TOKEN, *loss, *LAYOUT, code=1)
    assert chain["left_over"] == "T/T'" and chain["ratio"] == pytest.approx([7 / 8] * 3, **CLOSE)
    assert {factor["stage"] for factor in chain["factors"] if factor["differs"]} == {"finalize"}


def test_a_divisor_of_the_gradient_that_was_asked_for_differs_from_nothing():
    """FB-91: --gradient-divisor num_samples is in the chain, and in what was asked for."""
    chain = chain_of(*STEP, "--host", "train", "--gradient-divisor", "num_samples", *LAYOUT)
    assert stages(chain)["gradient divisor"] == "1/N"
    assert (chain["net"], chain["asked"]) == ("1/(N^2 m_i)", "1/(N^2 m_i)")
    assert chain["net_weights"] == pytest.approx([1 / 32, 1 / 64, 1 / 16, 1 / 48], **CLOSE)


FAN_OUT = [*STEP, "--rollout-ids", "0,0,1,2"]
# Rollouts of 6, 1 and 3 tokens, the first of two samples: N = 3, P = 2, T = 10, M_g = 6 and 4.
BY_ROLLOUT = [
    pytest.param(OUR_LOSS, [1 / 18, 1 / 18, 1 / 3, 1 / 9], id="our loss, sample_mean"),
    pytest.param([*OUR_LOSS, *CONSTANT], [1 / 24] * 4, id="our loss, constant"),
    pytest.param([*OUR_LOSS, *PROMPT_MEAN], [1 / 12, 1 / 12, 1 / 8, 1 / 8], id="our loss and reward hook, prompt_mean"),
    pytest.param(PROMPT_MEAN, [1 / 12, 1 / 12, 1 / 8, 1 / 8], id="reducer and reward hook, prompt_mean"),
    pytest.param(CONSTANT, [1 / 24] * 4, id="FB-11 reducer, constant"),
    pytest.param(["--loss-aggregation", "token_mean"], [1 / 10] * 4, id="reducer and reward hook, token_mean"),
    pytest.param(PER_TOKEN, [1 / 10] * 4, id="per-token"),
]


@pytest.mark.parametrize(("arguments", "weights"), BY_ROLLOUT)
def test_rollouts_of_several_samples_weigh_as_one(arguments, weights):
    """Fan-out is counted once, on every route that can."""
    assert chain_of(*FAN_OUT, "--host", "miles", *arguments, *LAYOUT)["net_weights"] == pytest.approx(weights, **CLOSE)


def test_a_sample_without_a_token_weighs_nothing_in_a_rollout_that_has_some():
    """Rollout 0: a masked sample and one of 4 tokens. M_roll = 4, N = 3."""
    chain = chain_of(*FAN_OUT, "--loss-masks", "00,1111,1,111", "--host", "miles", *OUR_LOSS)
    assert chain["net_weights"] == pytest.approx([0, 1 / 12, 1 / 3, 1 / 9], **CLOSE)


def test_our_reducer_sees_no_rollouts():
    """Each of the two samples would weigh as a rollout: M_roll/m_i = 6/2 and 6/4 too much."""
    chain = chain_of(*FAN_OUT, "--host", "miles", *LAYOUT, code=1)
    assert (chain["left_over"], chain["asked"]) == ("M_roll/m_i", "1/(N M_roll)")
    assert chain["ratio"] == pytest.approx([3, 3 / 2, 1, 1], **CLOSE)


@pytest.mark.parametrize("aggregation", ["sample_mean", "prompt_mean"])
@pytest.mark.parametrize("name", SETTINGS_NAMES)
def test_the_factors_of_each_trainer_of_settings_leave_the_weight(name, aggregation):
    """M, dp and cp cancel; in verl's per-token contract R, the tokens of the model, too."""
    record, adapter = get_loss_aggregation(aggregation), adapter_named(name)
    for per_token in (False, True) if adapter.WHY_NOT_PER_TOKEN is None else (False,):
        of_samples, of_step = adapter.stages(record.formula, record, per_token=per_token)
        factors = [factor for _, factor, _ in (*of_samples, *of_step)]
        assert math.prod(factors, start=Formula()) == record.formula
