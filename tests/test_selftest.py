"""`megatron-rl selftest`: passes on layouts that are right, and calls a wrong scale by its name and size."""

from __future__ import annotations

import functools
import json
import math
import multiprocessing
import os
import re
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from helpers import pool_of

from megatron_rl.__main__ import main
from megatron_rl.commands import selftest as command
from megatron_rl.config import Backend
from megatron_rl.errors import ConfigError
from megatron_rl.layout.groups import ParallelGroups
from megatron_rl.megatron import router_losses
from megatron_rl.megatron.cpu import import_megatron
from megatron_rl.megatron.probe import CAUSES, factor_names
from megatron_rl.registries.corrections import correction_names
from megatron_rl.registries.kl_estimators import kl_estimator_names
from megatron_rl.testing import selftest, selftest_bench, selftest_steps, selftest_table
from megatron_rl.testing.comparison import Comparison, Truth, cause_of_gradient, compare, named_sizes
from megatron_rl.testing.layout_step import Layout, RankStep, Shard
from megatron_rl.testing.ranks import RankError, RankPool, run_ranks
from megatron_rl.testing.reference import CLIPS, ragged_samples
from megatron_rl.testing.selftest import RowResult, Setting, result_of, run_selftest
from megatron_rl.testing.selftest_bench import complete_layout
from megatron_rl.testing.selftest_router_losses import RouterTruth, compare_router_loss, truth_of_router_losses
from megatron_rl.testing.selftest_steps import WholeSteps, check_megatron, model_for, truths_of
from megatron_rl.testing.selftest_table import (
    Choice,
    cases_of,
    own_group_cases,
    per_token_cases,
    row_of_loss,
    row_of_router_loss,
    table,
    triton_here,
)
from megatron_rl.testing.selftest_terms import AGGREGATIONS, DIVIDED, FUSED, Case, term_pairs

ROOT = Path(__file__).resolve().parent.parent
megatron = pytest.mark.megatron
# The rows of the page are those of gloo.
CPU = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
OF_LOGITS, OF_HIDDEN_STATES = Case("grpo", "sample_mean"), Case("gspo", "prompt_mean", FUSED)
PER_TOKEN = Case("gspo", "token_mean", is_per_token=True)
OF_A_DIVISOR = Case("grpo", "sample_mean", term=DIVIDED)
# One backend: heads, losses, aggregations. A command runs a fifth of them: each loss, head and aggregation is among them.
ROWS = 2 * (len(CLIPS) * len(AGGREGATIONS) + len([*term_pairs()]))
FIFTH = cases_of(Backend.TORCH)[::5]


pool = pool_of(2)


def rows_of(cases) -> list:
    """The rows of these cases and those of the probe."""
    return [*(row for row in table(lambda case: False) if row.is_probe), *map(row_of_loss, cases)]


def runs_on_rank(rank: int, runs: list[tuple]) -> list[tuple[list[RowResult], Setting]]:
    """Of each (layout, cases, mistake in the package's own scale): the rows and the setting. One truth serves runs of one model."""
    from megatron_rl.megatron import forward_step

    right, found = forward_step.scale_for_schedule, []
    all_cases = [case for _, chosen, _ in runs for case in chosen]
    truth = functools.cache(lambda tiny: truths_of(ragged_samples(), tiny, all_cases))
    for asked, chosen, mistake in runs:
        scale, settings = right if mistake is None else functools.partial(mistake, right), []
        with (
            mock.patch.object(selftest_steps, "truths_of", lambda samples, tiny, cases: truth(tiny)),
            mock.patch.object(forward_step, "scale_for_schedule", scale),
        ):
            found.append((list(run_selftest(WholeSteps(asked, 2), settings.append, rows=rows_of(chosen))), settings[0]))
    return found


def divided_by_cp(right, loss_part, *args, groups, **others):
    return right(loss_part / groups.cp.size(), *args, groups=groups, **others)


def without_the_factor_of_microbatches(right, loss_part, num_microbatches, **others):
    loss, num_tokens, report = right(loss_part, num_microbatches, **others)
    return loss / num_microbatches, num_tokens, report


def without_the_factor_of_dp(right, loss_part, *args, groups, **others):
    loss, num_tokens, report = right(loss_part, *args, groups=groups, **others)
    return loss / groups.dp.size(), num_tokens, report


def unlike_weights(right, loss_part, *args, num_local_tokens, **others):
    return right(loss_part * (1 + 0.1 * float(num_local_tokens)), *args, num_local_tokens=num_local_tokens, **others)


def without_the_gradient_divisor(right, *args, gradient_divisor, **others):
    return right(*args, **others)


RIGHT = {
    "CP2": (Layout(context=2), (OF_LOGITS, PER_TOKEN, *own_group_cases()[::3])),
    "TP2+SP, packed": (Layout(tensor=2, sequence_parallel=True, packed=True), (OF_HIDDEN_STATES, PER_TOKEN)),
    "PP2": (Layout(pipeline=2), (OF_LOGITS, OF_A_DIVISOR)),
    "DP2, distributed optimiser": (Layout(distributed_optimizer=True), (OF_HIDDEN_STATES, own_group_cases()[2])),
}
MISTAKES = {
    "FB-21 1/cp": (
        *(Layout(context=2), (OF_LOGITS, OF_HIDDEN_STATES, PER_TOKEN), divided_by_cp, 0.5),
        "gradient is 0.5 of expected = 1/cp: the mean that DDP takes over context-parallel "
        "ranks is left in, or a rank divides by its own tokens; the reported loss is off by the same factor",
    ),
    "FB-01 1/M": (
        *(Layout(context=2), (OF_LOGITS,), without_the_factor_of_microbatches, 1 / 3),
        "gradient is 0.333333 of expected = 1/micro-batches: the schedule's mean over micro-batches is left in",
    ),
    "FB-03 1/dp": (
        *(Layout(), (OF_LOGITS,), without_the_factor_of_dp, 0.5),
        "gradient is 0.5 of expected = 1/dp: the mean that DDP takes over data-parallel ranks is left in",
    ),
    "--gradient-divisor has no effect": (
        *(Layout(), (OF_A_DIVISOR,), without_the_gradient_divisor, 16.0),
        "gradient is 16 of expected = samples: nothing divides by the step's samples",
    ),
    "weights that depend on the layout": (
        *(Layout(), (OF_LOGITS,), unlike_weights, None),
        "gradient is no multiple of expected (nearest ",
    ),
}


@pytest.fixture(scope="module")
def of_ranks(shared):
    """Of each rank: name -> (rows, setting)."""
    runs = {name: (*run, None) for name, run in RIGHT.items()} | {name: run[:3] for name, run in MISTAKES.items()}
    answers = shared("test_selftest", lambda: run_ranks(runs_on_rank, 2, [*runs.values()]))
    return [dict(zip(runs, of_rank, strict=True)) for of_rank in answers]


@megatron
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_layout_passes_every_row_and_all_ranks_say_so(of_ranks, name):
    (rows, setting), (others, _) = (of_rank[name] for of_rank in of_ranks)
    assert rows == others and [row.name for row in rows] == ["schedule probe", *map(str, RIGHT[name][1])]
    for row in rows:
        assert row.passed and row.cause == "" and row.ratio == pytest.approx(1, abs=1e-5), row
    assert setting.sizes["micro-batches"] == setting.layout.num_microbatches
    assert all(1e-9 < row.gradient_error < 2e-6 for row in rows[1:])


@megatron
@pytest.mark.parametrize("name", MISTAKES)
def test_a_wrong_scale_fails_with_the_ratio_and_its_name(of_ranks, name):
    """The number in place of a week of doubt: what users of other frameworks found by comparing gradient norms by hand."""
    _, chosen, mistake, ratio, message = MISTAKES[name]
    probe, *rows = of_ranks[0][name][0]
    assert probe.passed  # the probe has the right scale: the mistake is in the forward step
    for case, row in zip(chosen, rows, strict=True):
        assert not row.passed
        if case is OF_HIDDEN_STATES:  # the head has put its weight's gradient away by then, and checks the factor itself
            assert row.cause.startswith("all ranks: ") or "gradient is" in row.cause, row
        else:
            assert row.cause.startswith(message) and (ratio is None or row.ratio == pytest.approx(ratio, rel=1e-5)), row
    if mistake is divided_by_cp:  # docs/selftest.md shows this one
        assert re.search(r"x +0\.500000", command.row_text(rows[0]))


# Auxiliary losses of routers


def times(factor):
    """A mistake that multiplies one loss: from the right function, (the right function, loss, sizes of the step) -> loss."""

    def wrong(right, router, *arguments, **named):
        step = vars(router)["routed_step"]
        attach = router_losses._attached
        with mock.patch.object(router_losses, "_attached", lambda r, a, n, loss, c: attach(r, a, n, loss * factor(step), c)):
            return right(router, *arguments, **named)

    return wrong


def counting_padding(right, router, logits, padding_mask=None):
    return right(router, logits)


# A mistake of each loss, and what its row says then.
ROUTER_MISTAKES = {
    "z_loss": ("apply_z_loss", counting_padding, "gradient is no multiple of expected"),
    "aux_loss": ("_apply_aux_loss", times(lambda step: step.num_parts), "gradient is 6 of expected = dp x micro-batches"),
    "seq_aux_loss": ("_apply_seq_aux_loss", times(lambda step: step.data_size), "gradient is 2 of expected = dp or ep: "),
    "global_aux_loss": ("_apply_global_aux_loss", times(lambda step: 1 / step.data_size), "gradient is 0.5 of expected = 1/dp or"),
}


EP2 = Layout(expert=2)
ROUTER_LAYOUTS = [Layout(expert=2, packed=True), Layout(tensor=2, expert=2, expert_tensor=1, sequence_parallel=True)]
# name -> (layout, losses with their mistake)
ROUTER_RUNS = {str(asked): (asked, ()) for asked in ROUTER_LAYOUTS}
PAIRS = (("z_loss", "seq_aux_loss"), ("aux_loss", "global_aux_loss"))
ROUTER_RUNS |= {f"mistakes {n}": (EP2, wrong) for n, wrong in enumerate(PAIRS)}


def router_runs_on_rank(rank: int) -> dict[str, tuple[list[RowResult], Setting]]:
    found, truth = {}, functools.cache(lambda *key: truth_of_router_losses(ragged_samples(), *key))
    selftest_steps.truth_of_router_losses, selftest_steps.truths_of = lambda samples, *key: truth(*key), lambda *_: {}
    all_rows = [row for row in table(lambda case: False) if row.case is None]
    for run, (asked, wrong) in ROUTER_RUNS.items():
        # Each pair of mistakes is looked for under one of the two contracts.
        is_per_token = None if not wrong else wrong != PAIRS[0]
        rows = [row for row in all_rows if row.is_probe or is_per_token in (None, row.name.endswith("per-token"))]
        changed, settings = dict(router_losses._EXACT), []
        for name in wrong:
            method, mistake, _ = ROUTER_MISTAKES[name]
            changed[method] = functools.partial(mistake, changed[method])
        with mock.patch.object(router_losses, "_EXACT", changed):
            bench = WholeSteps(asked, 2, has_experts=True)
            found[run] = list(run_selftest(bench, settings.append, rows=rows)), settings[0]
    return found


@pytest.fixture(scope="module")
def of_routers(shared):
    return shared("test_selftest routers", lambda: run_ranks(router_runs_on_rank, 2)[0])


@megatron
@pytest.mark.parametrize("asked", ROUTER_LAYOUTS, ids=str)
def test_auxiliary_losses_of_routers_have_rows_under_both_contracts(of_routers, asked):
    """FB-97: against one process in float64, which shares no code with them. Two are said to depend on the cut."""
    (_, *rows), setting = of_routers[str(asked)]
    if asked.expert > 1:
        of_experts, *rows = rows
        assert of_experts.name == "schedule probe, experts" and of_experts.ratio == pytest.approx(1, abs=1e-5)
    losses = [name for name in ROUTER_MISTAKES if not (asked.packed and name == "seq_aux_loss")]
    assert [row.name for row in rows] == [f"{name} of routers, exact{per}" for per in ("", ", per-token") for name in losses]
    assert all(row.passed and 1e-9 < row.gradient_error < 2e-6 and row.loss_error == 0 for row in rows), rows
    assert set(setting.cuts) == {"aux_loss", "global_aux_loss"} and all(off > 0.1 for _, off in setting.cuts.values())
    assert any(text.startswith("seq_aux_loss with packed rows") for text in setting.left_out) == asked.packed


@megatron
@pytest.mark.parametrize("run", [name for name, (_, wrong) in ROUTER_RUNS.items() if wrong])
def test_a_mistake_in_an_auxiliary_loss_fails_its_row_alone(of_routers, run):
    (_, _, *rows), _ = of_routers[run]
    for row, name in zip(rows, ROUTER_MISTAKES, strict=True):
        assert row.passed == (name not in ROUTER_RUNS[run][1]) and row.name.startswith(name), row
        assert row.passed or row.cause.startswith(ROUTER_MISTAKES[name][2]), row


ROW_OF_Z_LOSS = row_of_router_loss("z_loss", is_per_token=False)


def test_an_auxiliary_loss_is_held_to_the_leaves_of_routers_and_of_experts():
    """Of a gradient of norm 1000 the router's part is 0.1 and off by 1e-3 of itself: the whole is off by 1e-7."""
    names = ["a", "decoder.layers.0.mlp.router.weight", "decoder.layers.0.mlp.experts.0.linear_fc1.weight"]
    truth = {name: torch.tensor([size]).double() for name, size in zip(names, (1000.0, 0.1, 0.2), strict=True)}
    for wrong, leaves in ((names[1], "routers"), (names[2], "experts"), (None, None)):
        shards = {name: Shard(None, 0, 1, value * (1.001 if name == wrong else 1.0)) for name, value in truth.items()}
        model = mock.Mock(groups=ParallelGroups())
        model.step.return_value = RankStep(0.0, [shards], None, {}, {})
        expected = RouterTruth([], {"z_loss": Truth(0.0, 1.0, truth)}, {})
        row = result_of(ROW_OF_Z_LOSS, compare_router_loss(model, "z_loss", expected), {"dp": 2})
        assert row.passed == (wrong is None)
        assert row.passed or row.cause == f"leaves of {leaves}: gradient is 1.001 of expected"


@megatron
def test_the_last_lines_have_the_cuts_without_a_verdict_and_count_the_rows_that_fail(of_ranks):
    """The mistake leaves the probe of the schedule alone."""
    rows, setting = of_ranks[0]["FB-21 1/cp"]
    assert [row.passed for row in rows] == [True, False, False, False]
    assert command.closing(setting, rows, 1.0).splitlines()[-1] == "FAIL: 3 of 4 rows fail, 1.0 s"
    layout = Layout(data=2, num_microbatches=3)
    alone = mock.Mock(left_out=(), cuts={"aux_loss": (1.25, 0.5)}, layout=layout, model="", megatron_version=None)
    cut, verdict = command.closing(alone, [RowResult("one", True)], 1.0).splitlines()
    assert cut.startswith("cut: the gradient of aux_loss in 3 micro-batches on each of 2 data-parallel ranks is x 1.25 as long as")
    assert cut.endswith(" in one, and off by 0.5") and verdict == "PASS: 1 of 1 rows of the losses alone, 1.0 s"


def guarded_on_rank(rank: int, does: dict):
    """What `does` says of this rank: an error that its row raises, "waits" for rank 1, "dies"; or nothing, a row that passes."""
    import torch.distributed as dist

    selftest.SECONDS_FOR_THE_OTHERS = 0.3

    def row():
        if does.get(rank) == "dies":
            os._exit(9)
        if does.get(rank) == "waits":
            dist.recv(torch.zeros(1), src=1, group=dist.group.WORLD)
        if rank in does:
            raise ValueError(does[rank])
        return RowResult("a row", True)

    return selftest.guarded("a row", dist.group.WORLD, row), selftest.gather_texts(["", "µ"][rank], dist.group.WORLD)


def test_what_one_rank_raises_fails_the_row_on_all_of_them(capfd):
    """Catches a selftest that hangs where others wait for a rank that failed. Texts of all ranks travel without numpy."""
    with RankPool(2, use_megatron=False) as pool:
        both, one = {0: "rank 0 cannot", 1: "rank 1 cannot"}, {1: "rank 1 cannot"}
        for does, cause in ((both, "all ranks: ValueError: rank 0 cannot"), (one, "ranks 1: ValueError: rank 1 cannot"), ({}, "")):
            assert pool.run(guarded_on_rank, does) == [(RowResult("a row", not cause, cause=cause), ["", "µ"])] * 2
        with pytest.raises(RankError, match="rank 1: ended without an answer, exit code 1"):
            pool.run(guarded_on_rank, {0: "waits", 1: "rank 1 is out"})
        assert "rank 1: a row: ValueError: rank 1 is out; the other ranks wait for this one" in capfd.readouterr().err
        with pytest.raises(RankError):
            pool.run(guarded_on_rank, {1: "dies"})
    said = capfd.readouterr().err
    assert "megatron_rl selftest: FAIL: rank 0: a row: " in said and said.rstrip().endswith("; another rank has ended")
    assert "Traceback" not in said


CAUSES_BY_HAND = [
    pytest.param(0.5, {"cp": 2, "dp": 1}, "= 1/cp: ", id="an inverse"),
    pytest.param(2.0, {"cp": 2, "tp": 2}, "= cp or tp: ", id="two sizes that are alike"),
    pytest.param(1 / 113, {"tokens": 113}, "= 1/tokens: the step's tokens divide twice", id="a count"),
    pytest.param(0.7, {"cp": 2, "dp": 2, "micro-batches": 3}, "", id="nothing"),
]


@pytest.mark.parametrize(("ratio", "sizes", "expected"), CAUSES_BY_HAND)
def test_a_ratio_is_called_by_the_size_that_it_is(ratio, sizes, expected):
    said = cause_of_gradient(ratio, 0.0, sizes)
    assert said.startswith(f"gradient is {ratio:.6g} of expected {expected}".rstrip())
    assert expected or said == f"gradient is {ratio:.6g} of expected"


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
    assert not nan.is_within(1e9) and nan.cause(1e9, {}).startswith("gradient is not finite: a division by 0")
    without_optimizer = compare(
        RankStep(4.0, [{"a": Shard(None, 0, 1, truth.gradient["a"])}], None, {}, {}), truth, ParallelGroups()
    )
    assert without_optimizer.norm_error is None and without_optimizer.is_within(1e-9) and without_optimizer.cause(1e-9, {}) == ""
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
    told = found[0].cause(1e-5, {}).startswith("data- and context-parallel ranks hold different gradients: nothing added them up")
    assert found[0].ranks_differ == told == (not sizes)


def test_a_wrong_norm_and_a_wrong_loss_fail_beside_a_right_gradient():
    """What clips the gradient is Megatron's own norm; what is logged is the report."""
    gradient = torch.tensor([3.0, 4.0], dtype=torch.float64)
    got = compare(
        RankStep(8.0, [{"a": Shard(None, 0, 1, gradient)}], 10.0, {}, {}), Truth(4.0, 8.0, {"a": gradient}), ParallelGroups()
    )
    assert got.cause(1e-5, {"cp": 2}) == (
        "the optimiser's gradient norm is off by 1, the gradient itself is right; the reported loss is 2 of expected = cp: each "
        "context-parallel rank counts the tokens of all of them"
    )


def test_every_loss_aggregation_head_and_backend_has_a_row():
    few = [{getattr(case, name) for case in FIFTH} for name in ("policy_loss", "aggregation", "head")]
    assert list(map(len, few)) == [len(CLIPS), len(AGGREGATIONS), 2], "a command's tests run each once"
    rows = table(lambda case: True)
    cases = [row.case for row in rows if row.case is not None]
    assert len(cases) == 2 * ROWS + len(per_token_cases()) + len(own_group_cases()) and len(per_token_cases()) == 2 * len(CLIPS)
    assert len({row.name for row in rows}) == len(rows)
    assert {case.aggregation for case in cases} == set(AGGREGATIONS) and {case.backend for case in cases} == {"torch", "triton"}
    assert {case.config.kl_estimator for case in cases} == set(kl_estimator_names())
    assert {case.config.importance_correction for case in cases} == set(correction_names())


def test_what_of_triton_is_left_out_is_said(monkeypatch):
    """On a CPU its rows take seconds, interpreted: one of each loss on each head, and only where it was asked for."""
    cpu, cuda = torch.device("cpu"), torch.device("cuda")

    def here(device, interprets=False):
        runs_triton, left_out = triton_here(device, interprets=interprets)
        return [case for case in cases_of(Backend.TRITON) if runs_triton(case)], left_out

    monkeypatch.setattr(selftest_table, "why_triton_is_missing", lambda: None)
    monkeypatch.setattr(selftest_table, "is_interpreted", lambda: True)
    few, text = here(cpu, interprets=True)
    assert len({(case.policy_loss, case.head, case.term) for case in few}) == len(few) == 2 * (len(CLIPS) + 1)
    assert text.startswith(f"Triton: all but {len(few)} of {ROWS} rows, which its interpreter ran")
    rows, text = here(cpu)
    assert rows == [] and text.endswith("; --interpret-triton runs a few rows in its interpreter")
    with pytest.raises(ConfigError, match="--interpret-triton is for ranks without CUDA"):
        here(cuda, interprets=True)
    assert len(here(cuda)[0]) == ROWS and here(cuda)[1] is None
    monkeypatch.setattr(selftest_table, "is_interpreted", lambda: False)
    assert here(cpu, interprets=True)[1] == "Triton: it was imported before --interpret-triton could ask for its interpreter"
    monkeypatch.setattr(selftest_table, "why_triton_is_missing", lambda: "ImportError: x")
    assert here(cuda) == ([], "Triton: ImportError: x")


@pytest.mark.parametrize("asked", [Layout(tensor=3), Layout(tensor=8), Layout(pipeline=3), Layout(tensor=2, pipeline=8)], ids=str)
def test_the_model_fits_any_layout(asked):
    tiny = model_for(asked)
    assert tiny.num_attention_heads % asked.tensor == tiny.vocab_size % asked.tensor == 0
    assert tiny.num_layers % asked.pipeline == tiny.hidden_size % tiny.num_attention_heads == 0
    assert tiny.vocab_size > tiny.true_vocab_size


def test_a_layout_that_the_ranks_do_not_give_is_refused():
    command = "torchrun --nproc-per-node 2 -m megatron_rl selftest"
    refused = {
        Layout(context=2): f"1 rank does not divide into model replicas of 2 .*{command}",
        Layout(tensor=0): "--tensor-model-parallel-size 0 must be at least 1",
        Layout(sequence_parallel=True): "--sequence-parallel does nothing with --tensor-model-parallel-size 1",
    }
    for asked, message in refused.items():
        with pytest.raises(ConfigError, match=message):
            complete_layout(asked, 1)


def test_tf32_is_turned_off_or_refused(monkeypatch):
    """Its rounding is a thousand times the tolerance, and moves GSPO's ratios over the clip."""
    monkeypatch.setenv("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1")
    asked = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", asked.append)
    monkeypatch.setattr(type(torch.backends.cuda.matmul), "__getattr__", lambda self, name: True)
    with pytest.raises(ConfigError, match="TF32"):
        selftest_bench.refuse_tf32(torch.device("cuda"))
    assert asked == ["highest"] and "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE" not in os.environ


def test_a_megatron_that_cannot_be_imported_is_told(monkeypatch):
    """What stands in its way may raise anything; doctor names it."""
    monkeypatch.setitem(sys.modules, "megatron.core.models.gpt", None)
    with pytest.raises(ConfigError, match=r"cannot be imported \((ModuleNotFound|Import)Error.*megatron-rl doctor says why"):
        check_megatron()


def test_rows_are_chosen_by_their_names():
    rows = table(lambda case: False)
    probes, found = rows[:2], Choice("grpo", ("token_mean, logits", "fused head, torch, KL")).of(rows)
    assert found[:2] == probes and {row.case.policy_loss for row in found[2:]} == {"grpo"}
    assert {row.case.head for row in found[2:]} == {"logits", FUSED}
    assert all("token_mean, logits" in row.name or "fused head, torch, KL" in row.name for row in found[2:])
    assert Choice().of(rows) == rows and Choice(None, ("z_loss",)).of(rows)[2].case is None
    assert Choice(None, ("schedule",)).of(rows) == probes
    with pytest.raises(ConfigError, match="--row 'tritn': no row has that in its name"):
        Choice(None, ("tritn",)).of(rows)


def test_the_figures_of_a_long_name_stay_in_their_columns():
    """A loss of a user's own has the name of its module too."""
    short, long = (command.row_text(RowResult("n" * length, True, 1.0, 1e-7, 1e-8, 1e-8)) for length in (71, 72))
    first, second = long.splitlines()
    assert first.rstrip() == "PASS  " + "n" * 72
    assert second.index("x  1.0") == short.index("x  1.0") and len(second) == len(short)


@megatron
def test_one_process_without_torchrun(tmp_path):
    """Also the JSON: lines on standard output, whatever Megatron prints. A fork of this process, which saves the imports."""

    def in_a_fork() -> None:
        os.dup2(os.open(tmp_path / "stdout", os.O_CREAT | os.O_WRONLY), 1)
        sys.stdout = open(1, "w", closefd=False)
        fifth = rows_of([*FIFTH, *per_token_cases()[::5]])
        selftest.table = lambda runs_triton: fifth
        sys.exit(main(["selftest", "--json"]))

    import_megatron()
    process = multiprocessing.get_context("fork").Process(target=in_a_fork)
    process.start()
    process.join()
    assert process.exitcode == 0
    lines = [json.loads(line) for line in (tmp_path / "stdout").read_text().splitlines()]
    number = 1 + len(FIFTH) + len(per_token_cases()[::5])
    assert [next(iter(line)) for line in lines] == ["setting", *["running", "row"] * number, "result"]
    assert lines[-1]["result"]["passed"] and lines[-1]["result"]["rows"] == number
    setting = lines[0]["setting"]
    assert setting["layout"]["num_microbatches"] == 2 and setting["left_out"][-1].startswith("Triton: ")


def failing_rows(rank: int) -> str:
    """What docs/selftest.md shows of a failure; tests/pages.py runs it."""
    ((rows, _),) = runs_on_rank(rank, [(Layout(context=2), (Case("grpo", "token_mean"),), divided_by_cp)])
    return command.row_text(rows[1])
