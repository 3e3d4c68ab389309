"""The fused head on tp 2 x cp 2 simulated ranks: its collectives, and that a fault of one rank stops all."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from helpers import CLIP, error_of, last_rank_alone, without_needless_clip
from linear_cases import HeadBatch, budget, every_term, head_batch
from simulated_ranks import SimulatedGroup, groups_of_ranks, on_simulated_ranks

from megatron_rl.declare import LossValue, register_policy_loss
from megatron_rl.layout.agreement import MESSAGE_BYTES
from megatron_rl.policy_loss import linear_policy_loss

LENGTHS = [12, 22, 4, 0, 2, 12]
SMALL, LARGE = 5, 1000  # rows a chunk
BY_TOKENS = "gspo by tokens"  # its tokens have coefficients of their own, of their documents' means


def uneven(document: list[int], cp_rank: int, cp_size: int) -> list[int]:
    """Three quarters on the first rank, nothing of the short ones on the second: more than an equal slice, and empty bins."""
    first = len(document) * 3 // 4 if len(document) > 8 and cp_size > 1 else len(document)
    return document[:first] if cp_rank == 0 else document[first:] if cp_rank == 1 else []


DEALS = {"uneven": uneven, "last rank alone": last_rank_alone}


@dataclass(frozen=True)
class Run:
    kind: str
    has_terms: bool = False
    on_policy: bool = False
    rows: int = SMALL
    deal: str = "uneven"
    sequence_parallel: bool = False

    def __str__(self) -> str:
        words = [self.kind, "every term" if self.has_terms else "", "on-policy" if self.on_policy else "", f"{self.rows} rows"]
        words += [self.deal, "SP" if self.sequence_parallel else ""]
        return ", ".join(word for word in words if word)


FORMS = [("gspo", False, False), ("gspo", True, False), ("grpo", False, False), ("grpo", True, False), ("gspo", True, True)]
RUNS = [
    *[Run(*form, sequence_parallel=number % 2 == 0) for number, form in enumerate(FORMS)],
    *[Run(*form, rows=LARGE, sequence_parallel=True) for form in FORMS[:2]],
    *[Run(*form, deal="last rank alone") for form in FORMS[:3]],
    *[Run(BY_TOKENS), Run(BY_TOKENS, has_terms=True, sequence_parallel=True)],
]


def whole_case() -> HeadBatch:
    return head_batch(LENGTHS, seed=21)


def options_of(run: Run, case: HeadBatch) -> dict:
    options = every_term(case.batch) if run.has_terms else {"metrics": "basic"}
    return {"temperature": 0.7, "advantages_per": "sample", **options, **CLIP}


def local_arguments(run: Run, groups) -> tuple[HeadBatch, list[int], dict]:
    """This rank's tokens, with as many rows of junk that tp divides them, its rows of the weight, and its options."""
    case = whole_case()
    positions = [DEALS[run.deal](document, groups.cp.rank(), groups.cp.size()) for document in case.batch.documents]
    flat = [token for document in positions for token in document]
    take = flat + [0] * (-len(flat) % groups.tp.size())
    batch = case.batch.take(positions)
    rows = {name: getattr(case.batch, name)[take].clone() for name in ("labels", "old_log_probs", "loss_mask")}
    hidden = case.hidden[take].clone()
    hidden[~rows["loss_mask"]] = hidden[len(flat) :] = math.nan  # FB-56: whatever is masked, or past the documents
    options = options_of(run, case)
    options |= {name: options[name][take] for name in ("importance_weights", "ref_log_probs") if name in options}
    if run.deal == "uneven":
        options["token_counts"] = torch.tensor([int(case.batch.loss_mask[d].sum()) for d in case.batch.documents])
    weight = case.weight.chunk(groups.tp.size())[groups.tp.rank()]
    return HeadBatch(hidden, weight.clone(), replace(batch, **rows)), flat, options


def loss_of(run: Run, case: HeadBatch, options: dict, groups):
    labels, old, *rest = case.batch.arguments()
    arguments = (run.kind, case.hidden, case.weight, labels, None if run.on_policy else old, *rest)
    options = {"tp_group": groups.tp, "cp_group": groups.cp, "max_logits_bytes": budget(case, run.rows), **options}
    return without_needless_clip(linear_policy_loss, *arguments, sequence_parallel=run.sequence_parallel, **options)


@pytest.fixture
def calls(monkeypatch) -> list[tuple]:
    """(thread of the rank, group, collective, shape), without the comparison of arguments."""
    found, exchange = [], SimulatedGroup.exchange

    def noted(group, kind, value, *others):
        if tuple(value.shape) != (MESSAGE_BYTES,):
            found.append((threading.get_ident(), group, kind, tuple(value.shape)))
        return exchange(group, kind, value, *others)

    monkeypatch.setattr(SimulatedGroup, "exchange", noted)
    return found


def run_on_rank(run: Run, groups, calls) -> dict:
    case, _, options = local_arguments(run, groups)
    if run.sequence_parallel:
        case = replace(case, hidden=case.hidden.chunk(groups.tp.size())[groups.tp.rank()].clone())
    case.hidden.requires_grad_(), case.weight.requires_grad_()
    output = loss_of(run, case, options, groups)
    own = [(kind, shape, group) for thread, group, kind, shape in calls if thread == threading.get_ident()]
    (output.loss * 3.0).backward()
    return {"tp": [call[:2] for call in own if call[2] is groups.tp], "cp": [call[1] for call in own if call[2] is groups.cp]}


# What is wrong on the last cp rank alone -> the runs that meet it: in-chunk and scale-last, two-pass, row-by-row, on-policy.
FAULTS = {
    "NaN hidden": [Run("gspo"), Run("gspo", has_terms=True), Run("grpo"), Run("gspo", on_policy=True)],
    "infinite old log-probability": [Run("gspo")],
    "advantages that vary": [Run("gspo"), Run("gspo", on_policy=True)],
}


def refusal(fault: str, run: Run, groups, has_fault: bool) -> str:
    """What a rank is told about a fault that the last cp rank alone sees, in one of several bins."""
    case, flat, options = local_arguments(run, groups)
    token = next(row for row in range(len(flat)) if flat[row] >= 20 and case.batch.loss_mask[row])  # of document 1
    spread = case.batch.advantages.repeat_interleave(case.batch.cu_seqlens.diff())
    if fault == "advantages that vary":
        spread = torch.cat([spread, spread.new_zeros(len(case.hidden) - len(spread))])
        case, options["advantages_per"] = replace(case, batch=replace(case.batch, advantages=spread)), "token"
    at = {"NaN hidden": case.hidden, "infinite old log-probability": case.batch.old_log_probs}.get(fault, spread)
    if has_fault and groups.cp.rank() == 1:
        at[token] = {"NaN hidden": math.nan, "infinite old log-probability": math.inf}.get(fault, 7.0)
    case.hidden.requires_grad_(), case.weight.requires_grad_()
    return error_of(partial(loss_of, run, case, options, groups))


def gspo_by_tokens(log_ratio, advantages, log_probs, *, clip_ratio_low, clip_ratio_high, mean_log_ratio):
    ratio = (mean_log_ratio + log_probs - log_probs.detach()).exp()
    value = -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high) * advantages)
    return LossValue(value, is_clipped=value != -ratio * advantages)


@pytest.fixture(autouse=True)
def loss_by_tokens():
    register_policy_loss(BY_TOKENS, needs=("mean_log_ratio",), clip_ratios=(3e-4, 4e-4))(gspo_by_tokens)


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_collectives_are_those_that_are_promised(run, calls):
    """FB-27: tp one all-gather [rows, 3 or 4] a chunk and one reduction of dX; cp one all-reduce of [N, k], and one a bin, in the
    same number on every rank, or the simulation raises; nothing in backward."""
    ranks = on_simulated_ranks(lambda groups: run_on_rank(run, groups, calls), groups_of_ranks(tp=2, cp=2))
    assert len(calls) == sum(len(of_rank[axis]) for of_rank in ranks for axis in of_rank), "forward alone"
    for of_rank in ranks:
        gathers = [shape for name, shape in of_rank["tp"] if name == "all_gather" and shape[1] == (4 if run.has_terms else 3)]
        assert all(shape[0] <= run.rows for shape in gathers)
        names = [name.split()[0] for name, _ in of_rank["tp"]]
        assert names.count("reduce_scatter") == run.sequence_parallel
        assert names.count("all_reduce") <= (0 if run.sequence_parallel else len(gathers))
    is_free, over_cp = run.kind == "grpo", ranks[0]["cp"]
    reductions = over_cp if is_free else over_cp[1:]  # sizes first
    assert {shape[0] for shape in reductions} == {len(LENGTHS)}
    of_results = [shape for shape in reductions if len(shape) == 1]  # after the means
    of_bins = [shape for shape in reductions if len(shape) == 2]
    assert len(of_results) == (len(of_bins) if run.kind == BY_TOKENS else 0)
    assert len(of_bins) == 1 if is_free else len(of_bins) == 2 if run.rows == LARGE else len(of_bins) > 2


@pytest.mark.parametrize(("fault", "run"), [(fault, run) for fault, runs in FAULTS.items() for run in runs], ids=str)
def test_bad_data_on_one_rank_stops_all_of_them(fault, run):
    """In the middle of the bins, in each plan, all tp and cp ranks raise after the same all-reduce, and go on together."""

    def told(groups) -> tuple[int, str, str]:
        return groups.cp.rank(), refusal(fault, run, groups, True), refusal(fault, run, groups, False)

    for cp_rank, message, healthy in on_simulated_ranks(told, groups_of_ranks(tp=2, cp=2)):
        assert healthy == ""
        if fault == "advantages that vary":
            assert message.startswith("DataError: advantages vary inside document 1: ")
        else:
            name = "log_probs" if fault == "NaN hidden" else "old_log_probs"
            where = f"in {name}" if cp_rank == 1 else "on another context-parallel rank"
            assert message.startswith("DataError: document 1 of the micro-batch has 1 unmasked tokens") and where in message
