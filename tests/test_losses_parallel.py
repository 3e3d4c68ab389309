"""The losses on context- and tensor-parallel gloo ranks: parts add up to one rank's loss, and nobody hangs."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from helpers import (
    CLIP,
    KERNEL_DEVICE,
    OfLayouts,
    counted_collectives,
    error_of,
    last_rank_alone,
    random_batch,
    run_loss,
    without_needless_clip,
    zigzag,
)
from linear_cases import every_term
from loss_backends import HAS_TRITON, PER_TOKEN, TORCH, TRITON

from megatron_rl.config import CorrectionSettings
from megatron_rl.layout.groups import resolve_groups
from megatron_rl.loss_hub import get_policy_loss, policy_loss_names
from megatron_rl.losses import policy_loss
from megatron_rl.metrics import combine_statistics
from megatron_rl.step_metrics import finalise_metrics
from megatron_rl.testing.ranks import RankPool

pytestmark = pytest.mark.megatron
# A slice may well have as many tokens as there are documents: said, not guessed.
OPTIONS = {"advantages_per": "sample", **CLIP}
LAYOUTS = {"cp 4": {"context_parallel_size": 4}, "cp 2 x tp 2": {"context_parallel_size": 2, "tensor_model_parallel_size": 2}}
VOCAB_SIZE = 12


def uneven(document: list[int], cp_rank: int, cp_size: int) -> list[int]:
    """The first rank takes half, the second half of the rest, and so on: unlike counts, empty slices."""
    for _ in range(cp_rank):
        document = document[len(document) // 2 :]
    return document if cp_rank == cp_size - 1 else document[: len(document) // 2]


@dataclass(frozen=True)
class Case:
    """A whole batch and how its documents are dealt out to cp ranks."""

    lengths: list[int]
    num_masked: tuple[int, ...] | None = None
    deal: object = zigzag

    def batch(self):
        return random_batch(self.lengths, num_masked=self.num_masked, vocab_size=VOCAB_SIZE, seed=30)

    def positions(self, cp_rank: int, cp_size: int) -> list[list[int]]:
        return [self.deal(document, cp_rank, cp_size) for document in self.batch().documents]


CASES = {
    "FB-28 zigzag": Case([8, 16, 8]),
    "FB-28 unlike counts": Case([9, 5, 14, 1], deal=uneven),
    "FB-22 a one-token response": Case([16, 8], (15, 2)),
    "FB-22 all unmasked tokens in one chunk": Case([16], (14,)),
    "FB-23 prompts that fill whole chunks": Case([24, 9, 31], (20, 7, 30)),
    "FB-25 ranks that hold no token at all": Case([5, 3], deal=last_rank_alone),
    "FB-55 a fully masked document": Case([8, 8], (8, 1)),
    "FB-25 nothing unmasked on any rank": Case([8, 8], (8, 8)),
    "no document": Case([], ()),
}


def options_of(batch, which: str, positions: list[int]) -> dict:
    """Keyword arguments for these positions. "plain": no further term, and token counts given; else every term, and counted by
    the loss; "corrected": a correction too; "kernels": by the interpreted kernels, on float32 logits."""
    if which == "plain":
        return {"token_counts": torch.tensor([int(batch.loss_mask[d].sum()) for d in batch.documents]), **OPTIONS}
    options = every_term(batch) | {"backend": "triton" if which.endswith("kernels") else "torch", **OPTIONS}
    if which.startswith("corrected"):
        sampled = batch.old_log_probs + 0.2 * torch.sin(3 * torch.arange(len(batch.labels), dtype=torch.float64)) - 0.02
        options |= {"correction": CORRECTION, "rollout_log_probs": sampled}
    per_token = {name: options[name][positions] for name in (*PER_TOKEN, "rollout_log_probs") if name in options}
    return options | per_token


@functools.cache
def whole(kind: str, name: str, which: str):
    """(output, gradient) on one rank, whose groups resolve to SINGLE, in float64 and torch. FB-27: cp = tp = 1 launch nothing."""
    which, batch = {"kernels": "all", "corrected kernels": "corrected"}.get(which, which), CASES[name].batch()
    options = options_of(batch, which, list(range(len(batch.labels))))
    with counted_collectives() as calls:
        found = run_loss(partial(without_needless_clip, policy_loss, kind), batch, **options)
    assert calls == []
    return found


def run_case(kind: str, case: Case, which: str, groups) -> dict:
    batch = case.batch()
    positions = case.positions(groups.cp.rank(), groups.cp.size())
    local, flat = batch.take(positions), [t for document in positions for t in document]
    width = VOCAB_SIZE // groups.tp.size()
    columns = slice(groups.tp.rank() * width, (groups.tp.rank() + 1) * width)
    dtype = torch.float32 if which.endswith("kernels") else torch.float64
    leaf = local.logits[:, columns].to(dtype, copy=True).requires_grad_()
    with counted_collectives() as forward:
        output = without_needless_clip(policy_loss, kind, leaf, *local.arguments(), **options_of(batch, which, flat))
    with counted_collectives() as backward:
        output.loss.backward()
    return {
        "positions": flat,
        "columns": columns,
        "parts": {name: getattr(output, name) for name in ("policy_loss", "kl_loss", "entropy")} | {"loss": output.loss.detach()},
        "log_probs": output.log_probs,
        "num_nonfinite": output.num_nonfinite,
        "metrics": output.metrics,
        "gradient": leaf.grad,
        "forward": [(name, shape, "cp" if group is groups.cp else "tp") for name, shape, group in forward],
        "backward": [name for name, _, _ in backward],
    }


# A loss of each path through the reduction meets each case, on the two layouts in turn; another loss of its level a third of them,
# in turn. Each case is met on each layout, with and without further terms.
OF_EACH_PATH = ("cispo", "grpo", "gspo", "gspo_token", "gmpo")


def runs_of(layout: int) -> list[tuple[str, str, str]]:
    numbered = [(i + j + layout, kind, name) for i, kind in enumerate(policy_loss_names()) for j, name in enumerate(CASES)]
    return [(kind, name, ("plain", "all")[n // 2 % 2]) for n, kind, name in numbered if n % (2 if kind in OF_EACH_PATH else 6) == 0]


# Two criteria of a sample and none of a token: their sums travel with the loss's own.
CORRECTION = CorrectionSettings(kind="icepop", level="sequence_mean", low=0.9, high=1.1, sequence_delta=0.0)
OF_OLD = [kind for kind in policy_loss_names() if get_policy_loss(kind).anchor == "old"]
OF_CORRECTED = [(kind, list(CASES)[i % 4], "corrected") for i, kind in enumerate(OF_OLD)]
RUNS_OF = {layout: runs_of(number) + OF_CORRECTED for number, layout in enumerate(LAYOUTS)}
# Kernels are interpreted in a rank: a process that has used CUDA cannot be forked. They are slow: each loss on a layout in turn.
FEW_TOKENS = "FB-28 unlike counts of few tokens"
if KERNEL_DEVICE == "cpu" and HAS_TRITON:
    for layout, kinds in zip(LAYOUTS, (("grpo", "gspo"), ("gspo", "grpo")), strict=True):
        of_kernels = zip(kinds, ("kernels", "corrected kernels"), strict=True)
        RUNS_OF[layout] += [(kind, FEW_TOKENS, which) for kind, which in of_kernels]
    CASES[FEW_TOKENS] = Case([5, 1, 4], (1, 0, 0), deal=uneven)
TOLERANCES = {
    **dict.fromkeys(("plain", "all", "corrected"), TORCH.tolerance),
    **dict.fromkeys(("kernels", "corrected kernels"), TRITON.tolerance),
}


ON_KERNELS = {"backend": "triton"} if KERNEL_DEVICE == "cpu" and HAS_TRITON else {}


def refusals(groups) -> dict[str, str]:
    """What each rank is told about faults that one rank alone can see; afterwards all of them must still be in step."""
    case = Case([8, 12], (0, 0))
    batch = case.batch()
    positions = case.positions(groups.cp.rank(), groups.cp.size())
    width = VOCAB_SIZE // groups.tp.size()
    batch = replace(batch, logits=batch.logits[:, groups.tp.rank() * width :][:, :width])
    local = batch.take(positions)
    is_culprit = groups.cp.rank() == 1
    # Document 1 begins where this rank's slice of document 0 ends. NaN in one column: one tp rank alone holds it.
    first = len(positions[0])
    poisoned = {name: getattr(local, name).clone() for name in ("logits", "old_log_probs")}
    if is_culprit:
        poisoned["old_log_probs"][first] = math.inf
        if groups.tp.rank() == 0:
            poisoned["logits"][first, 0] = math.nan
    token_advantages = torch.full((len(local.labels),), 2.0 if is_culprit else 1.0)
    one_each = batch.take([[document[groups.cp.rank()]] for document in batch.documents])

    def told(kind, batch, **options):
        return error_of(lambda: run_loss(lambda *a, **k: policy_loss(kind, *a, **k), batch, **CLIP, **options))

    return {
        "NaN logit": told("gspo", replace(local, logits=poisoned["logits"])),
        "NaN logit in grpo": told("grpo", replace(local, logits=poisoned["logits"])),
        "NaN logit in kernels": told("gspo", replace(local, logits=poisoned["logits"].float()), **ON_KERNELS),
        "infinite old log-prob": told("gspo", replace(local, old_log_probs=poisoned["old_log_probs"])),
        "advantages differ between ranks": told("gspo", replace(local, advantages=token_advantages)),
        "advantages are equal": told("gspo", replace(local, advantages=token_advantages * 0 + 1)),
        "T equals N": told("gspo", one_each),
        "T equals N, explained": told("gspo", one_each, advantages_per="sample"),
        "T equals N in grpo": told("grpo", one_each),
        "no document": told("gspo", batch.take([], [])),
    }


def on_a_rank(rank):
    groups = resolve_groups()
    runs = RUNS_OF["cp 4" if groups.cp.size() == 4 else "cp 2 x tp 2"]
    results = {run: run_case(run[0], CASES[run[1]], run[2], groups) for run in runs}
    told = refusals(groups)
    assert error_of(lambda: run_case("gspo", CASES["FB-28 zigzag"], "plain", groups)) == ""
    return {"results": results, "told": told, "cp": groups.cp.rank(), "tp": groups.tp.rank()}


@pytest.fixture(scope="module")
def by_layout(shared):
    with RankPool(4) as pool:
        yield OfLayouts(pool, on_a_rank, LAYOUTS, shared)


@pytest.mark.parametrize(("layout", "run"), [(layout, run) for layout in LAYOUTS for run in RUNS_OF[layout]], ids=str)
def test_parts_and_gradients_of_all_ranks_are_those_of_one_rank(by_layout, layout, run):
    """FB-22, FB-23, FB-25, FB-28, FB-51: loss parts add up over cp and are equal over tp; each rank's gradient is its slice of rows
    and columns of the unsharded one; metrics combine to the same numbers. Tp ranks hold the same bits, so the same clips."""
    kind, name, which = run
    output, gradient = whole(kind, name, which)
    ranks = [(of_rank["cp"], of_rank["tp"], of_rank["results"][run]) for of_rank in by_layout[layout]]
    for part in ("loss", "policy_loss", "kl_loss", "entropy"):
        want = getattr(output, part)
        if want is None:
            assert all(result["parts"][part] is None for _, _, result in ranks)
        else:
            total = sum(result["parts"][part] for _, tp, result in ranks if tp == 0)
            torch.testing.assert_close(total.double(), want.detach(), **TOLERANCES[which])
    for cp, _, result in ranks:
        peer = next(other for cp_of_other, _, other in ranks if cp_of_other == cp)
        assert torch.equal(result["log_probs"], peer["log_probs"])
        assert all(x is None or torch.equal(x, peer["parts"][name]) for name, x in result["parts"].items())
        own = gradient[result["positions"]][:, result["columns"]]
        torch.testing.assert_close(result["gradient"].double(), own, **TOLERANCES[which])
        torch.testing.assert_close(result["log_probs"].double(), output.log_probs[result["positions"]], **TOLERANCES[which])
        assert torch.equal(result["num_nonfinite"], output.num_nonfinite)
    if which != "plain":
        combined = combine_statistics([result["metrics"] for _, tp, result in ranks if tp == 0])
        tolerance = {"rel": TOLERANCES[which]["rtol"], "abs": TOLERANCES[which]["atol"]}
        assert finalise_metrics(combined) == pytest.approx(finalise_metrics(output.metrics), **tolerance)


# The own sums of a loss of level "batch", with and without importance weights. Where ranks are checked, as here, a sum has one
# column a collective, and two numbers more: ranks that refuse, and ranks that have made all their sums.
OWN_SUMS = {("gspo_token", which): 2 for which in ("plain", "all", "corrected")} | {("gmpo", "plain"): 3}
OWN_SUMS |= {("gmpo", which): 5 for which in ("all", "corrected")}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_forward_reduces_once_and_backward_not_at_all(by_layout, layout):
    """FB-27: one all-reduce of [N, k], k <= 4 (with the sums of a correction 6), over cp; one all-gather over tp if tp > 1; none in
    any backward."""
    for of_rank in by_layout[layout]:
        for (kind, name, which), result in of_rank["results"].items():
            assert result["backward"] == []
            gathers = [("all_gather", (len(result["positions"]), 3 if which == "plain" else 4), "tp")]
            reductions = [call for call in result["forward"] if call[0] == "all_reduce"]
            assert [call for call in result["forward"] if call[0] != "all_reduce"] == gathers * ("tp" in layout)
            (_, shape, group), *own = reductions
            assert own == [("all_reduce", (len(CASES[name].lengths) + 2,), "cp")] * OWN_SUMS.get((kind, which), 0)
            most = (6,) if which.startswith("corrected") else (4,)
            assert group == "cp" and shape[0] == len(CASES[name].lengths) and shape[1:] <= most, shape


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("fault", "tensor"),
    [
        pytest.param("NaN logit", "log_probs", id="NaN in one column of one tp rank"),
        pytest.param("NaN logit in grpo", "log_probs", id="the same in grpo"),
        pytest.param("NaN logit in kernels", "log_probs", id="the same in kernels"),
        pytest.param("infinite old log-prob", "old_log_probs", id="old log-prob on one cp rank"),
    ],
)
def test_bad_data_on_one_rank_stops_all_of_them(by_layout, layout, fault, tensor):
    """All tp and cp ranks raise after the same all-reduce; one that raised alone would leave others waiting."""
    for of_rank in by_layout[layout]:
        where = f"in {tensor}" if of_rank["cp"] == 1 else "on another context-parallel rank"
        assert of_rank["told"][fault].startswith("DataError: document 1 of the micro-batch has 1 unmasked tokens")
        assert where in of_rank["told"][fault]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_ranks_must_agree_on_about_advantages_is_refused_on_all(by_layout, layout):
    """Each rank sees one value in each document, together they vary. N == T with one local token in each document is [N]
    here and [T] elsewhere: ranks would reduce unlike shapes."""
    for told in (of_rank["told"] for of_rank in by_layout[layout]):
        assert "advantages vary inside document 0" in told["advantages differ between ranks"]
        assert "documents may have tokens on other ranks: pass" in told["T equals N"]
        for healthy in ("advantages are equal", "T equals N, explained", "T equals N in grpo", "no document"):
            assert told[healthy] == ""
