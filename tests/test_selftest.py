"""`megatron-rl selftest`: passes on layouts that are right, and calls a wrong scale by its name and size."""

from __future__ import annotations

import functools
import math
import os
import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from unittest import mock

import pytest
import torch
from forked import forget, forked
from helpers import pool_of

from megatron_rl.commands import selftest as command
from megatron_rl.config import NO_CORRECTION
from megatron_rl.layout.groups import ParallelGroups
from megatron_rl.losses.corrections import CORRECTIONS
from megatron_rl.losses.kl import KL_ESTIMATORS
from megatron_rl.megatron.cpu import import_megatron
from megatron_rl.megatron.probe import factor_names
from megatron_rl.testing import selftest
from megatron_rl.testing.comparison import CAUSES, Comparison, Truth, cause_of_gradient, compare, named_sizes
from megatron_rl.testing.layout_step import Layout, RankStep, Shard
from megatron_rl.testing.ranks import run_ranks
from megatron_rl.testing.reference import CLIPS, ragged_samples
from megatron_rl.testing.selftest import (
    AGGREGATIONS,
    DIVIDED,
    FUSED,
    Case,
    RowResult,
    WholeSteps,
    chosen,
    complete_layout,
    own_group_cases,
    per_token_cases,
    run_selftest,
    table,
    term_pairs,
    truths_of,
)

megatron = pytest.mark.megatron
# The rows of the page are those of gloo.
CPU = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
OF_LOGITS, OF_HIDDEN_STATES = Case("grpo", "sample_mean"), Case("gspo", "prompt_mean", FUSED)
PER_TOKEN = Case("gspo", "token_mean", is_per_token=True)
OF_A_DIVISOR = Case("grpo", "sample_mean", term=DIVIDED)
FUSED_PER_TOKEN, FUSED_OF_A_DIVISOR = replace(PER_TOKEN, head=FUSED), replace(OF_A_DIVISOR, head=FUSED)
# One backend: heads, losses, aggregations.
ROWS = 2 * (len(CLIPS) * len(AGGREGATIONS) + len([*term_pairs()]))


pool = pool_of(2)


def runs_on_rank(rank: int, runs: list[tuple]) -> list[tuple[list[RowResult], Layout]]:
    """Of each (layout, cases, mistake in the package's own scale): the rows and the layout. One truth serves runs of one model."""
    from megatron.core import parallel_state

    from megatron_rl.megatron import forward_step

    right, found = forward_step.scale_for_schedule, []
    all_cases = [case for _, cases, _ in runs for case in cases]
    truth = functools.cache(lambda tiny: truths_of(ragged_samples(), tiny, all_cases))
    for asked, cases, mistake in runs:
        scale = right if mistake is None else functools.partial(mistake, right)
        with (
            mock.patch.object(selftest, "truths_of", lambda samples, tiny, cases: truth(tiny)),
            mock.patch.object(forward_step, "scale_for_schedule", scale),
        ):
            parallel_state.destroy_model_parallel()
            bench = WholeSteps(asked, 2, cases)
            found.append((list(run_selftest(bench)), bench.layout))
    return found


def divided_by_cp(right, loss_part, *args, groups, **others):
    return right(loss_part / groups.cp.size(), *args, groups=groups, **others)


def unlike_weights(right, loss_part, *args, num_local_tokens, **others):
    return right(loss_part * (1 + 0.1 * float(num_local_tokens)), *args, num_local_tokens=num_local_tokens, **others)


RIGHT = {
    "CP2": (Layout(context=2), (OF_LOGITS, PER_TOKEN, *own_group_cases()[::3])),
    "TP2+SP, packed": (Layout(tensor=2, sequence_parallel=True, packed=True), (OF_HIDDEN_STATES, FUSED_PER_TOKEN)),
    "PP2": (Layout(pipeline=2), (OF_LOGITS, OF_A_DIVISOR, FUSED_OF_A_DIVISOR)),
    "DP2, distributed optimiser": (Layout(distributed_optimizer=True), (OF_HIDDEN_STATES, own_group_cases()[2])),
}
# test_ranks.py has the names of the other factors, in words of the same function.
MISTAKES = {
    "FB-21 1/cp": (
        *(Layout(context=2), (OF_LOGITS, OF_HIDDEN_STATES, PER_TOKEN), divided_by_cp, 0.5),
        "gradient is 0.5 of expected = 1/cp: the mean that DDP takes over context-parallel "
        "ranks is left in, or a rank divides by its own tokens; the reported loss is off by the same factor",
    ),
    "weights that depend on the layout": (
        *(Layout(), (OF_LOGITS,), unlike_weights, None),
        "gradient is no multiple of expected (nearest ",
    ),
}


@pytest.fixture(scope="module")
def of_ranks(shared):
    """Of each rank: name -> (rows, layout)."""
    runs = {name: (*run, None) for name, run in RIGHT.items()} | {name: run[:3] for name, run in MISTAKES.items()}
    answers = shared("test_selftest", lambda: run_ranks(runs_on_rank, 2, [*runs.values()]))
    return [dict(zip(runs, of_rank, strict=True)) for of_rank in answers]


@megatron
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_layout_passes_every_row_and_all_ranks_say_so(of_ranks, name):
    """FB-15: Megatron divides by the summed token counts, of which cp ranks report a part each. FB-91: DeepSpeed's second division
    by the step's samples is that of the gradient, and not of the loss."""
    (rows, layout), (others, _) = (of_rank[name] for of_rank in of_ranks)
    assert rows == others and [row.name for row in rows] == ["schedule probe", *map(str, RIGHT[name][1])]
    for row in rows:
        assert row.passed and row.cause == "" and row.ratio == pytest.approx(1, abs=1e-5), row
    assert layout.num_microbatches == 3 and layout.data * layout.context * layout.tensor * layout.pipeline == 2
    assert all(1e-9 < row.gradient_error < 2e-6 for row in rows[1:])


@megatron
@pytest.mark.parametrize("name", MISTAKES)
def test_a_wrong_scale_fails_with_the_ratio_and_its_name(of_ranks, name):
    """The number in place of a week of doubt: what users of other frameworks found by comparing gradient norms by hand."""
    _, cases, mistake, ratio, message = MISTAKES[name]
    probe, *rows = of_ranks[0][name][0]
    assert probe.passed  # the probe has the right scale: the mistake is in the forward step
    for case, row in zip(cases, rows, strict=True):
        assert not row.passed
        if case is OF_HIDDEN_STATES:  # the head has put its weight's gradient away by then, and checks the factor itself
            assert row.cause.startswith("all ranks: ") or "gradient is" in row.cause, row
        else:
            assert row.cause.startswith(message) and (ratio is None or row.ratio == pytest.approx(ratio, rel=1e-5)), row
    if mistake is divided_by_cp:  # docs/tools.md shows this one
        assert re.search(r"x +0\.500000", command.row_text(rows[0]))


def test_a_ratio_is_called_by_the_size_that_it_is():
    of_two = cause_of_gradient(2.0, 0.0, {"cp": 2, "tp": 2})
    assert of_two.startswith("gradient is 2 of expected = cp or tp: ")
    of_a_count = cause_of_gradient(1 / 113, 0.0, {"tokens": 113})
    assert of_a_count.startswith("gradient is 0.00884956 of expected = 1/tokens: the step's tokens divide twice")
    assert cause_of_gradient(0.7, 0.0, {"cp": 2, "dp": 2, "micro-batches": 3}) == "gradient is 0.7 of expected"


def test_every_size_that_a_row_names_has_a_cause_and_micro_batches_are_no_other_size():
    """Otherwise 1/2 could be cp or micro-batches."""
    sizes = named_sizes(complete_layout(Layout(context=2), 4), ragged_samples())
    assert set(sizes) == set(CAUSES) and factor_names(1 / 3, sizes) == ["1/(micro-batches)"]
    layout = complete_layout(Layout(context=2, pipeline=3), 24)
    assert (layout.data, layout.num_microbatches) == (4, 5)


def found(gradient: torch.Tensor, loss: float = 2.0) -> RankStep:
    return RankStep(loss, [{"a": Shard(None, 0, 1, gradient)}], float(gradient.norm()), {}, {})


def test_a_comparison_by_hand():
    """truth (3, 4); found (3, 0): along it 9/25, beside it sqrt(9/25 - 81/625) = 0.48, off by 4/5; norm 3/5 of 5."""
    truth = Truth(4.0, 8.0, {"a": torch.tensor([3.0, 4.0], dtype=torch.float64)})
    got = compare(found(torch.tensor([3.0, 0.0], dtype=torch.float64)), truth, ParallelGroups())
    expected = Comparison(ratio=0.36, gradient_error=0.8, residual=0.48, loss_error=0.25, loss_ratio=0.5, norm_error=0.4)
    for name in Comparison.__slots__:
        assert getattr(got, name) == pytest.approx(getattr(expected, name)), name
    nan = compare(found(torch.full((2,), math.nan, dtype=torch.float64)), truth, ParallelGroups())
    assert nan.cause(1e9, {}).startswith("gradient is not finite: a division by 0")
    right_gradient = [{"a": Shard(None, 0, 1, truth.gradient["a"])}]
    without_optimizer = compare(RankStep(4.0, right_gradient, None, {}, {}), truth, ParallelGroups())
    assert without_optimizer.norm_error is None and without_optimizer.cause(1e-9, {}) == ""
    assert compare(RankStep(8.0, right_gradient, 10.0, {}, {}), truth, ParallelGroups()).cause(1e-5, {"cp": 2}) == (
        "the optimiser's gradient norm is off by 1, the gradient itself is right; the reported loss is 2 of expected = cp: each "
        "context-parallel rank counts the tokens of all of them"
    )
    zero = compare(found(torch.zeros(2, dtype=torch.float64), loss=4.0), truth, ParallelGroups())
    assert zero.cause(1e-5, {}) == "no gradient arrives"


def compared_on_rank(rank: int, wrong_rank: int, dim: int | None) -> Comparison:
    """truth a = (3, 4), sharded by `dim` or whole on each rank, and b = 12; one rank has 0 for its a."""
    from megatron_rl.layout.groups import resolve_groups

    groups, truth = resolve_groups(), {"a": torch.tensor([3.0, 4.0]).double(), "b": torch.tensor([12.0]).double()}
    tp_rank = groups.tp.rank()
    own = truth["a"] if dim is None else truth["a"].chunk(2)[tp_rank]
    place = (tp_rank, groups.tp.size())
    shards = {"a": Shard(dim, *place, own * (rank != wrong_rank)), "b": Shard(None, *place, truth["b"])}
    return compare(RankStep(1.0, [shards], 13.0, {}, {}), Truth(1.0, 1.0, truth), groups)


@megatron
@pytest.mark.parametrize(
    ("sizes", "wrong_rank", "dim", "squared_error"),
    [
        pytest.param({}, 1, None, 25 / 169, id="DP2: the replica that is off counts, not the mean"),
        pytest.param({"tensor_model_parallel_size": 2}, 1, 0, 16 / 169, id="TP2: a shard"),
        pytest.param({"tensor_model_parallel_size": 2}, 0, None, 12.5 / 169, id="TP2: a whole parameter on one of two ranks"),
    ],
)
def test_a_comparison_over_ranks_by_hand(pool, sizes, wrong_rank, dim, squared_error):
    found = pool.run(compared_on_rank, wrong_rank, dim, **sizes)
    assert found[0] == found[1] and found[0].gradient_error ** 2 == pytest.approx(squared_error)


def test_every_loss_aggregation_head_and_backend_has_a_row():
    cases = table()
    assert len(cases) == 2 * ROWS + len(per_token_cases()) + len(own_group_cases()) and len(per_token_cases()) == 2 * len(CLIPS)
    assert len({str(case) for case in cases}) == len(cases)
    assert {case.aggregation for case in cases} == set(AGGREGATIONS) and {case.backend for case in cases} == {"torch", "triton"}
    assert {case.config.kl_estimator for case in cases} == set(KL_ESTIMATORS.names())
    assert {case.config.importance_correction for case in cases} == {NO_CORRECTION, *CORRECTIONS.names()}


def test_rows_are_chosen_by_their_names():
    found = chosen(table(), "grpo", texts=("token_mean, logits",))
    assert found and all(case.policy_loss == "grpo" and "token_mean, logits" in str(case) for case in found)


OWN_LOSSES = """
from megatron_rl import bounded_exp, register_policy_loss

@register_policy_loss("right")
def right(log_ratio, advantages, log_probs):
    return -bounded_exp(log_ratio).detach() * advantages * log_probs

"""


def command_on_mine(*arguments: str) -> tuple[int | None, str, str]:
    """`megatron-rl selftest` in a fork that imports this package anew."""

    def command() -> int:
        os.environ.update(CPU)
        forget("mine")
        return import_module("megatron_rl.__main__").main(["selftest", *arguments])

    import_megatron()
    return forked(command)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A user types the command in the folder of his file, as `train` finds it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


@megatron
def test_a_loss_of_ones_own_has_rows_of_its_own(folder):
    """Its function on one process is the reference. Standard output has the report, whatever Megatron prints."""
    Path("mine.py").write_text(OWN_LOSSES)
    code, out, error = command_on_mine("--policy-loss", "mine.right")
    assert code == 0, out + error
    title, versions, columns, *rows, own_groups, left_out, verdict = out.splitlines()
    assert title.startswith("megatron_rl selftest: TP 1 x CP 1 x PP 1 x DP 1 | cpu, gloo | 2 micro-batches a rank, 16 samples")
    assert versions.startswith("torch ") and columns.split() == ["gradient", "off", "by", "loss", "by", "norm", "by"]
    assert len(rows) == 15 and all(row.startswith("PASS  ") for row in rows) and all("mine.right " in row for row in rows[1:])
    assert own_groups.startswith("left out: own cp groups: one rank ") and left_out.startswith("left out: Triton: ")
    assert verdict.startswith("PASS: 15 of 15 rows, ")


def failing_rows(rank: int) -> str:
    """What docs/tools.md shows of a failure; tests/pages.py runs it."""
    ((rows, _),) = runs_on_rank(rank, [(Layout(context=2), (Case("grpo", "token_mean"),), divided_by_cp)])
    return command.row_text(rows[1])
