"""The losses on context- and tensor-parallel gloo ranks: which collectives there are, and that a fault of one rank stops all."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

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
from loss_backends import HAS_TRITON, PER_TOKEN

from megatron_rl.layout.groups import resolve_groups
from megatron_rl.losses.corrections import CorrectionSettings
from megatron_rl.policy_loss import policy_loss
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
    the loss; "corrected": a correction too."""
    if which == "plain":
        return {"token_counts": torch.tensor([int(batch.loss_mask[d].sum()) for d in batch.documents]), **OPTIONS}
    options = every_term(batch) | {"backend": "torch", **OPTIONS}
    if which.startswith("corrected"):
        sampled = batch.old_log_probs + 0.2 * torch.sin(3 * torch.arange(len(batch.labels), dtype=torch.float64)) - 0.02
        options |= {"correction": CORRECTION, "rollout_log_probs": sampled}
    per_token = {name: options[name][positions] for name in (*PER_TOKEN, "rollout_log_probs") if name in options}
    return options | per_token


def run_case(kind: str, case: Case, which: str, groups) -> dict:
    batch = case.batch()
    positions = case.positions(groups.cp.rank(), groups.cp.size())
    local, flat = batch.take(positions), [t for document in positions for t in document]
    width = VOCAB_SIZE // groups.tp.size()
    columns = slice(groups.tp.rank() * width, (groups.tp.rank() + 1) * width)
    leaf = local.logits[:, columns].clone().requires_grad_()
    with counted_collectives() as forward:
        output = without_needless_clip(policy_loss, kind, leaf, *local.arguments(), **options_of(batch, which, flat))
    with counted_collectives() as backward:
        output.loss.backward()
    return {
        "positions": flat,
        "forward": [(name, shape, "cp" if group is groups.cp else "tp") for name, shape, group in forward],
        "backward": [name for name, _, _ in backward],
    }


# Two criteria of a sample and none of a token.
CORRECTION = CorrectionSettings(kind="icepop", level="sequence_mean", low=0.9, high=1.1, sequence_delta=0.0)
# A loss of each path through the reduction.
OF_EACH_PATH = ("cispo", "gspo", "gspo_token", "gmpo")
RUNS = [
    *((kind, name, which) for kind in OF_EACH_PATH for name, which in (("FB-28 zigzag", "plain"), ("FB-28 unlike counts", "all"))),
    *((kind, "FB-28 unlike counts", "corrected") for kind in OF_EACH_PATH),
    *(("gspo", name, "all") for name in CASES),
]


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
        "no document": told("gspo", batch.take([], [])),
    }


def on_a_rank(rank):
    groups = resolve_groups()
    results = {run: run_case(run[0], CASES[run[1]], run[2], groups) for run in RUNS}
    told = refusals(groups)
    assert error_of(lambda: run_case("gspo", CASES["FB-28 zigzag"], "plain", groups)) == ""
    return {"results": results, "told": told, "cp": groups.cp.rank(), "tp": groups.tp.rank()}


@pytest.fixture(scope="module")
def by_layout(shared):
    with RankPool(4) as pool:
        yield OfLayouts(pool, on_a_rank, LAYOUTS, shared)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_forward_reduces_once_and_backward_not_at_all(by_layout, layout):
    """FB-27: one all-reduce of [N, k <= 6] over cp, before it one of [N, 3] for the sums of a correction; one all-gather over tp if
    tp > 1; none in any backward."""
    for of_rank in by_layout[layout]:
        for (kind, name, which), result in of_rank["results"].items():
            assert result["backward"] == []
            gathers = [("all_gather", (len(result["positions"]), 3 if which == "plain" else 4), "tp")]
            reductions = [call for call in result["forward"] if call[0] == "all_reduce"]
            assert [call for call in result["forward"] if call[0] != "all_reduce"] == gathers * ("tp" in layout)
            num_documents = len(CASES[name].lengths)
            if kind == "gspo_token":  # whether its results are finite, which it has after the means
                assert reductions.pop() == ("all_reduce", (num_documents,), "cp")
            *of_correction, (_, shape, group) = reductions
            assert of_correction == [("all_reduce", (num_documents, 3), "cp")] * (which == "corrected")
            assert group == "cp" and shape[0] == num_documents and shape[1:] <= (6,), shape


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
    """Each rank sees one value in each document, together they vary."""
    for told in (of_rank["told"] for of_rank in by_layout[layout]):
        assert "advantages vary inside document 0" in told["advantages differ between ranks"]
        for healthy in ("advantages are equal", "T equals N", "no document"):
            assert told[healthy] == ""
