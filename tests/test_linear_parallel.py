"""The fused head on tensor-, sequence- and context-parallel gloo ranks: its collectives, and that a fault of one rank stops all."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from helpers import CLIP, OfLayouts, counted_collectives, error_of, last_rank_alone, names_forgotten, without_needless_clip, zigzag
from linear_cases import HeadBatch, budget, every_term, head_batch

from megatron_rl.declare import LossValue, register_policy_loss
from megatron_rl.layout.groups import REDUCE_SCATTER, resolve_groups
from megatron_rl.policy_loss import linear_policy_loss
from megatron_rl.testing.ranks import RankPool

pytestmark = pytest.mark.megatron
LAYOUTS = {
    "tp 4": {"tensor_model_parallel_size": 4},
    "tp 2 x cp 2": {"tensor_model_parallel_size": 2, "context_parallel_size": 2},
    "cp 2": {"context_parallel_size": 2, "world_size": 2},
}
LENGTHS = [12, 22, 4, 0, 2, 12]
SMALL, LARGE = 5, 1000  # rows a chunk
BY_TOKENS = "gspo by tokens"  # its tokens have coefficients of their own, of their documents' means


def uneven(document: list[int], cp_rank: int, cp_size: int) -> list[int]:
    """Three quarters on the first rank, nothing of the short ones on the second: more than an equal slice, and empty bins."""
    first = len(document) * 3 // 4 if len(document) > 8 and cp_size > 1 else len(document)
    return document[:first] if cp_rank == 0 else document[first:] if cp_rank == 1 else []


DEALS = {"zigzag": zigzag, "uneven": uneven, "last rank alone": last_rank_alone}


@dataclass(frozen=True)
class Run:
    kind: str
    has_terms: bool = False
    on_policy: bool = False
    rows: int = SMALL
    deal: str = "zigzag"
    sequence_parallel: bool = False

    def __str__(self) -> str:
        words = [self.kind, "every term" if self.has_terms else "", "on-policy" if self.on_policy else "", f"{self.rows} rows"]
        words += [self.deal, "SP" if self.sequence_parallel else ""]
        return ", ".join(word for word in words if word)


FORMS = [("gspo", False, False), ("gspo", True, False), ("grpo", False, False), ("grpo", True, False), ("gspo", True, True)]
RUNS = [
    *[Run(*form) for form in FORMS],
    *[Run(*form, rows=LARGE, sequence_parallel=True) for form in FORMS[:3]],
    *[Run(*form, deal="uneven", sequence_parallel=True) for form in FORMS],
    *[Run(*form, deal="last rank alone") for form in FORMS[:3]],
    *[Run(BY_TOKENS, deal="uneven"), Run(BY_TOKENS, has_terms=True, sequence_parallel=True)],
]


def runs_of(layout: str) -> list[Run]:
    """Sequence parallelism needs tp > 1, a deal to the last rank cp > 1."""
    is_possible = [("tp" in layout or not r.sequence_parallel) and ("cp" in layout or r.deal != "last rank alone") for r in RUNS]
    return [run for run, possible in zip(RUNS, is_possible, strict=True) if possible]


def whole_case() -> HeadBatch:
    return head_batch(LENGTHS, seed=21)


def options_of(run: Run, case: HeadBatch) -> dict:
    options = every_term(case.batch) if run.has_terms else {"metrics": "basic"}
    return {"temperature": 0.7, "advantages_per": "sample", **options, **CLIP}


def local_arguments(run: Run, groups) -> tuple[HeadBatch, list[int], dict]:
    """This rank's tokens, with a tail of junk up to a multiple of tp, its rows of the weight, and its options."""
    case = whole_case()
    positions = [DEALS[run.deal](document, groups.cp.rank(), groups.cp.size()) for document in case.batch.documents]
    flat = [token for document in positions for token in document]
    tail = -len(flat) % groups.tp.size()
    take = flat + [0] * tail
    batch = case.batch.take(positions)
    pad = {name: getattr(case.batch, name)[take].clone() for name in ("labels", "old_log_probs", "loss_mask")}
    hidden = case.hidden[take].clone()
    pad["loss_mask"][len(flat) :] = True
    pad["labels"][len(flat) :] = -100
    for tensor in (pad["old_log_probs"], hidden):
        tensor[len(flat) :] = math.nan
    hidden[~pad["loss_mask"]] = math.nan  # FB-56: whatever is masked
    height = case.weight.shape[0] // groups.tp.size()
    weight = case.weight[groups.tp.rank() * height :][:height]
    options = options_of(run, case)
    for name in ("importance_weights", "ref_log_probs"):
        if name in options:
            options[name] = options[name][take]
    if run.deal == "uneven":
        options["token_counts"] = torch.tensor([int(case.batch.loss_mask[d].sum()) for d in case.batch.documents])
    return HeadBatch(hidden, weight, replace(batch, **pad)), flat, options


def run_on_rank(run: Run, groups) -> dict:
    case, flat, options = local_arguments(run, groups)
    num_rows = case.hidden.shape[0] // (groups.tp.size() if run.sequence_parallel else 1)
    own = slice(groups.tp.rank() * num_rows, (groups.tp.rank() + 1) * num_rows) if run.sequence_parallel else slice(None)
    hidden, weight = case.hidden[own].clone().requires_grad_(), case.weight.clone().requires_grad_()
    labels, old, *rest = case.batch.arguments()
    with counted_collectives() as forward:
        output = without_needless_clip(
            linear_policy_loss,
            run.kind,
            hidden,
            weight,
            labels,
            None if run.on_policy else old,
            *rest,
            max_logits_bytes=budget(case, run.rows),
            sequence_parallel=run.sequence_parallel,
            **options,
        )
    with counted_collectives() as backward:
        (output.loss * 3.0).backward()
    return {
        "forward": [(name, shape, "cp" if group is groups.cp else "tp") for name, shape, group in forward],
        "backward": [name for name, _, _ in backward],
    }


# What is wrong on the last cp rank alone -> the runs that meet it: in-chunk and scale-last, two-pass, row-by-row, on-policy.
FAULTS = {
    "NaN hidden": [Run("gspo"), Run("gspo", has_terms=True), Run("grpo"), Run("gspo", on_policy=True)],
    "infinite old log-probability": [Run("gspo")],
    "advantages that vary": [Run("gspo"), Run("gspo", on_policy=True)],
}


def refusals(groups) -> dict[tuple[str, str], str]:
    """What each rank is told about a fault that one rank alone sees, in one of several bins; after each all are still in step."""
    told = {}
    for fault, runs in FAULTS.items():
        for run in runs:
            for has_fault in (True, False):
                case, flat, options = local_arguments(run, groups)
                token = next(row for row in range(len(flat)) if flat[row] >= 20 and case.batch.loss_mask[row])  # of document 1
                spread = case.batch.advantages.repeat_interleave(case.batch.cu_seqlens.diff())
                if fault == "advantages that vary":
                    spread = torch.cat([spread, spread.new_zeros(len(case.hidden) - len(spread))])
                    case, options["advantages_per"] = replace(case, batch=replace(case.batch, advantages=spread)), "token"
                at = {"NaN hidden": case.hidden, "infinite old log-probability": case.batch.old_log_probs}.get(fault, spread)
                if has_fault and groups.cp.rank() == groups.cp.size() - 1:
                    at[token] = {"NaN hidden": math.nan, "infinite old log-probability": math.inf}.get(fault, 7.0)
                hidden, weight = case.hidden.requires_grad_(), case.weight.requires_grad_()
                labels, old, *rest = case.batch.arguments()
                arguments = (run.kind, hidden, weight, labels, None if run.on_policy else old, *rest)
                message = error_of(partial(linear_policy_loss, *arguments, **options, max_logits_bytes=budget(case, SMALL)))
                told[fault if has_fault else "healthy", f"{fault}, {run}"] = message
    return told


def on_a_rank(rank):
    groups = resolve_groups()
    layout = {(4, 1): "tp 4", (2, 2): "tp 2 x cp 2", (1, 2): "cp 2"}[groups.tp.size(), groups.cp.size()]
    results = {str(run): run_on_rank(run, groups) for run in runs_of(layout)}
    return {"results": results, "told": refusals(groups), "cp": groups.cp.rank(), "tp": groups.tp.rank()}


def gspo_by_tokens(log_ratio, advantages, log_probs, *, clip_ratio_low, clip_ratio_high, mean_log_ratio):
    ratio = (mean_log_ratio + log_probs - log_probs.detach()).exp()
    value = -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high) * advantages)
    return LossValue(value, is_clipped=value != -ratio * advantages)


@pytest.fixture(scope="module", autouse=True)
def registry_of_this_file_alone():
    with names_forgotten():
        register_policy_loss(BY_TOKENS, needs=("mean_log_ratio",), clip_ratios=(3e-4, 4e-4))(gspo_by_tokens)
        yield


@pytest.fixture(scope="module")
def by_layout(registry_of_this_file_alone, shared):
    with RankPool(4) as pool:
        yield OfLayouts(pool, on_a_rank, LAYOUTS, shared)


def ranks_of(by_layout, layout: str, run: Run) -> list[tuple[int, int, dict]]:
    return [(of_rank["cp"], of_rank["tp"], of_rank["results"][str(run)]) for of_rank in by_layout[layout]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_collectives_are_those_that_are_promised(by_layout, layout):
    """FB-27: tp one all-gather [rows, 3 or 4] a chunk and one reduction of dX; cp one all-reduce of [N, k], and one a bin, in the
    same number on every rank; nothing in backward."""
    for run in runs_of(layout):
        ranks = ranks_of(by_layout, layout, run)
        over_cp = [[shape for _, shape, group in result["forward"] if group == "cp"] for _, _, result in ranks]
        assert all(shapes == over_cp[0] for shapes in over_cp), "ranks that meet other collectives hang"
        for _, _, result in ranks:
            assert result["backward"] == []
            tp = [(name, shape) for name, shape, group in result["forward"] if group == "tp"]
            width = 4 if run.has_terms else 3
            gathers = [shape for name, shape in tp if name == "all_gather" and shape[1] == width]
            assert all(shape[0] <= run.rows for shape in gathers)
            scatters = [name for name, _ in tp if name == REDUCE_SCATTER]
            assert len(scatters) == (1 if run.sequence_parallel else 0)
            if run.sequence_parallel:
                assert not [name for name, _ in tp if name == "all_reduce"]
            elif tp:
                assert len([name for name, _ in tp if name == "all_reduce"]) <= len(gathers)
            if "tp" not in layout:
                assert tp == []
        if "cp" in layout:
            is_free = run.kind == "grpo"
            reductions = over_cp[0] if is_free else over_cp[0][1:]  # sizes first
            assert {shape[0] for shape in reductions} == {len(LENGTHS)}
            of_results = [shape for shape in reductions if len(shape) == 1]  # after the means
            reductions = [shape for shape in reductions if len(shape) == 2]
            assert len(of_results) == (len(reductions) if run.kind == BY_TOKENS else 0)
            assert len(reductions) == 1 if is_free else len(reductions) == 2 if run.rows == LARGE else len(reductions) > 2
        else:
            assert over_cp[0] == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bad_data_on_one_rank_stops_all_of_them(by_layout, layout):
    """In the middle of the bins, in each plan, all tp and cp ranks raise after the same all-reduce, and go on together."""
    last = max(of_rank["cp"] for of_rank in by_layout[layout])
    for of_rank in by_layout[layout]:
        for (fault, _), message in of_rank["told"].items():
            if fault == "healthy":
                assert message == ""
            elif fault == "advantages that vary":
                assert message.startswith("DataError: advantages vary inside document 1: ")
            else:
                name = "log_probs" if fault == "NaN hidden" else "old_log_probs"
                where = f"in {name}" if of_rank["cp"] == last else "on another context-parallel rank"
                assert message.startswith("DataError: document 1 of the micro-batch has 1 unmasked tokens") and where in message
