"""The chain of factors of `megatron-rl explain`: each factor against the code that does it, the product against a real schedule."""

from __future__ import annotations

import math
import re
from argparse import Namespace

import pytest
import torch
from explain_cases import CLOSE, CONSTANT, LAYOUT, PER_TOKEN, PROMPT_MEAN, STEP, chain_of, explain, explain_json, stages

from megatron_rl.aggregation import StepTotals
from megatron_rl.errors import DataError
from megatron_rl.hosts import base
from megatron_rl.hosts.base import remember_args
from megatron_rl.hosts.reducer import get_pg_loss_reducer
from megatron_rl.layout.groups import resolve_groups

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


SOUND = [
    pytest.param(["--host", host, *rest], id=" ".join([host, *rest]))
    for host in ("miles", "slime")
    for rest in (
        [],
        CONSTANT,
        ["--loss-aggregation", "prompt_mean"],
        ["--loss-aggregation", "token_mean"],
        PER_TOKEN,
        ["--route", "custom_loss", *CONSTANT],
        ["--route", "custom_loss", "--policy-loss", "gspo", "--loss-aggregation", "prompt_mean"],
        ["--route", "custom_loss", *PER_TOKEN],
    )
]
SOUND += [
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


# N = 4, T = 7 and one phantom token, m = (2, 4, 1, 0), L = 8. The last: whether the launch would be refused.
BROKEN = [
    pytest.param(
        ["--host", "slime", *CONSTANT, "--calculate-per-token-loss"], "N/T'", {"finalize"}, [4 / 8] * 3, True, id="per-token"
    ),
    pytest.param(["--host", "miles", *PER_TOKEN], "T/T'", {"finalize"}, [7 / 8] * 3, True, id="FB-09 a phantom token"),
    pytest.param(
        ["--host", "slime", "--route", "host", *CONSTANT], "L/m_i", {"reducer"}, [4, 2, 8], True, id="FB-70 a dropped flag"
    ),
    pytest.param(
        ["--host", "miles", "--route", "host", "--calculate-per-token-loss"],
        "N m_i/T'",
        {"finalize"},
        [1, 2, 1 / 2],
        False,
        id="stock token_mean, which nobody of ours judges",
    ),
    pytest.param(
        ["--host", "slime", *PROMPT_MEAN, "--companion", "convert", "--route", "reducer"],
        "M_g/m_i",
        {"reducer"},
        [3, 3 / 2, 1],
        True,
        id="the converter beside our reducer",
    ),
    pytest.param(
        ["--host", "slime", "--loss-aggregation", "token_mean", "--companion", "convert"],
        "T/(P M_g)",
        {"reducer", "host"},
        [7 / 12, 7 / 12, 7 / 2],
        True,
        id="the converter with token_mean",
    ),
    pytest.param(
        ["--host", "miles", "--loss-aggregation", "token_mean", "--companion", "none"],
        "T/N",
        {"host"},
        [7 / 4] * 3,
        True,
        id="token_mean that nobody divides",
    ),
]


@pytest.mark.parametrize(("arguments", "left_over", "marked", "ratio", "is_refused"), BROKEN)
def test_the_factor_that_differs_is_marked_and_the_exit_code_is_1(arguments, left_over, marked, ratio, is_refused):
    chain, problems = chain_of(*MASKED, *arguments, *LAYOUT, code=1)
    assert chain["left_over"] == left_over
    assert chain["ratio"] == pytest.approx(ratio, **CLOSE)
    assert not chain["is_exact"]
    assert {factor["stage"] for factor in chain["factors"] if factor["differs"]} == marked
    assert bool(problems) == is_refused


def test_a_divisor_of_the_gradient_that_was_asked_for_differs_from_nothing():
    """FB-91: --gradient-divisor num_samples is in the chain, and in what was asked for."""
    chain, _ = chain_of(*STEP, "--host", "train", "--gradient-divisor", "num_samples", *LAYOUT)
    assert stages(chain)["gradient divisor"] == "1/N"
    assert (chain["net"], chain["asked"], chain["is_exact"]) == ("1/(N^2 m_i)", "1/(N^2 m_i)", True)
    assert chain["net_weights"] == pytest.approx([1 / 32, 1 / 64, 1 / 16, 1 / 48], **CLOSE)


def test_a_chain_needs_no_step():
    """dp 8 x cp 2, M = 16: the host multiplies by 16 x 16 / N = 256/N, schedule and DDP by 1/16 each. No number of a step."""
    arguments = ["--host", "slime", "--data-parallel-size", "8", "--context-parallel-size", "2", "--num-microbatches", "16"]
    found = explain_json(*arguments)
    chain = found["chain"]
    assert stages(chain) == {"reducer": "1/m_i", "host": "M dp cp/N", "schedule": "1/M", "DDP": "1/(dp cp)"}
    assert (chain["net"], chain["is_exact"], chain["known"]) == ("1/(N m_i)", True, {"M": 16, "dp": 8, "cp": 2})
    assert [chain["net_weights"], chain["ratio"], *(factor["values"] for factor in chain["factors"])] == [None] * 6
    assert [found[name] for name in ("num_samples", "token_counts", "aggregations", "source", "mean_tokens")] == [None] * 5
    assert found["left_out"][0].startswith("numbers: no step is given")
    _, out, _ = explain(*arguments)
    assert re.search(r"^host +M dp cp/N +256/N ", out, re.MULTILINE)
    assert out.count("0.0625") == 2
    assert "sample 0" not in out


def test_custom_loss_refuses_a_phantom_token_and_so_does_the_chain():
    chain, problems = chain_of(*MASKED, "--host", "miles", "--route", "custom_loss", *PER_TOKEN, code=1)
    assert chain["left_over"] == "T/T'"
    assert "fully masked samples (1)" in problems[0] and "our loss refuses such a step" in problems[0]


@pytest.fixture
def remembered(monkeypatch):
    monkeypatch.setattr(base, "_remembered_args", None)


def test_a_step_that_the_chain_calls_refused_is_refused_by_the_reducer(remembered):
    """FB-09: a phantom token under the per-token contract."""
    _, problems = chain_of(*MASKED, "--host", "slime", *PER_TOKEN, code=1)
    assert "our reducer refuses such a step" in problems[0]
    remember_args(Namespace(loss_aggregation="token_mean", loss_aggregation_divisor=None, calculate_per_token_loss=True))
    with pytest.raises(DataError, match="fully masked"):
        get_pg_loss_reducer([4, 5], [2, 3], [torch.ones(2), torch.zeros(3)], True)


# What the loss function returns on a dp-cp rank and a micro-batch; what is measured is the gradient by their sum.
PARTS = [[1.0, 4.0, 0.5], [2.0, -3.0, 8.0], [0.25, 6.0, 5.0], [7.0, 1.5, -2.0]]
FROM_LOSS = ("gradient divisor", "scale", "host", "schedule", "DDP", "finalize")


def measured_on_rank(rank, host: str, per_token: bool, divisor: str) -> float:
    """Through the installed schedule, DDP and finalize_model_grads: gradient / sum of the parts."""
    from megatron_rl.megatron.probe import run_one_parameter
    from megatron_rl.megatron.schedule import scale_for_schedule

    groups, totals = resolve_groups(), StepTotals(num_samples=4, num_prompts=2, num_tokens=10)
    mine = PARTS[groups.dp_cp.rank()]
    # Tokens of a micro-batch: own ones with scale_for_schedule, 10 in all; with a host each cp rank counts whole samples.
    own = [[1, 2, 0], [1, 0, 1], [2, 0, 1], [1, 1, 0]][groups.dp_cp.rank()]
    whole = [[2, 4, 0], [1, 3, 0]][groups.dp.rank()]

    def tuple_of(value, index, config):
        if host == "train":
            settings = {"config": config, "groups": groups, "gradient_divisor": divisor}
            return scale_for_schedule(value, 3, totals=totals, num_local_tokens=own[index], **settings)
        scaled = value * groups.cp.size() if per_token else value * 3 / 4 * groups.dp_cp.size()
        return scaled, torch.tensor(whole[index] if per_token else 1, dtype=torch.int32), {}

    gradient = run_one_parameter(tuple_of, mine, calculate_per_token_loss=per_token)
    return gradient / math.fsum(value for row in PARTS for value in row)


CASES = [
    pytest.param("slime", [], False, "none", id="FB-14 host"),
    pytest.param("slime", PER_TOKEN, True, "none", id="FB-14 host, per-token"),
    pytest.param("train", [], False, "none", id="FB-14 scale_for_schedule"),
    pytest.param("megatron_lm", PER_TOKEN, True, "none", id="FB-14 scale_for_schedule, per-token"),
    pytest.param("train", ["--gradient-divisor", "num_samples"], False, "num_samples", id="FB-91 gradient divisor"),
]


@pytest.fixture(scope="module")
def pool():
    from megatron_rl.testing.ranks import RankPool

    with RankPool(4) as ranks:
        yield ranks


@pytest.mark.megatron
@pytest.mark.parametrize(("host", "arguments", "per_token", "divisor"), CASES)
def test_the_product_of_the_factors_is_the_gradient_of_a_real_schedule(pool, host, arguments, per_token, divisor):
    """FB-14: cp 2 x dp 2, three micro-batches; nothing is compensated by hand on the side of the chain."""
    chain, _ = chain_of(*STEP, "--host", host, *arguments, *LAYOUT)
    after = math.prod(factor["values"][0] for factor in chain["factors"] if factor["stage"] in FROM_LOSS)
    kind = "train" if host == "megatron_lm" else host
    for measured in pool.run(measured_on_rank, kind, per_token, divisor, context_parallel_size=2):
        # A probe's tolerance: float32 sums of parts.
        assert measured == pytest.approx(after, rel=1e-5)
