"""Scores over the ids that a sampler kept, in both backends: values by hand, a float64 softmax of each set, layouts, bad input."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch
from carrier_cases import LiveBytes
from helpers import KERNEL_DEVICE
from simulated_ranks import groups_of_ranks, on_simulated_ranks
from test_log_probs import ON_BACKENDS, ON_TRITON
from torch import Tensor

from megatron_rl.errors import ConfigError, DataError
from megatron_rl.layout.groups import SINGLE
from megatron_rl.layout.sampling_support import SamplingSupport
from megatron_rl.ops.backends import resolve_backend
from megatron_rl.ops.log_probs import row_kernels, vocab_parallel_log_probs, vocab_shard
from megatron_rl.ops.support_scores import SupportLogProbs

V = 16
# float32 against float64 of the same logits: a few roundings of numbers of size 5, and 1 / temperature; bfloat16: of the gradient
# alone, to 8 bits, which the interpreter cuts off.
VALUES = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 3e-6, torch.float16: 3e-6}
GRADIENTS = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 2**-7, torch.float16: 2**-9}


@pytest.fixture(params=ON_BACKENDS)
def backend(request) -> str:
    return request.param


@dataclass(frozen=True)
class Case:
    logits: Tensor  # [T, columns of all shards]
    labels: list[int]
    kept: list[list[int]]
    masked: tuple[int, ...] = ()
    vocab_size: int = V
    temperature: float = 0.7

    @property
    def mask(self) -> Tensor:
        return torch.tensor([t not in self.masked for t in range(len(self.labels))], dtype=torch.bool)


def normal(num_rows: int, width: int = V, seed: int = 5) -> Tensor:
    return 2 * torch.randn(num_rows, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).float().double()


def random_case(num_rows: int = 24, seed: int = 1, **changes) -> Case:
    """Sets of all sizes, whole ones too; at a tp of 4 some miss a shard, some straddle all."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(V, (num_rows,), generator=generator).tolist()
    kept = []
    for row, label in enumerate(labels):
        size = (1, 2, 3, 5, V, 8)[row % 6]
        others = [i for i in torch.randperm(V, generator=generator).tolist() if i != label]
        kept.append([*others[: size // 2], label, *others[size // 2 : size - 1]])
    return Case(**{"logits": normal(num_rows, seed=seed), "labels": labels, "kept": kept, "masked": (3, 10)} | changes)


def far_below() -> Case:
    """A forced set 90 nats below the row's maximum: e^x of one maximum would be 0."""
    logits = normal(3)
    logits[:, 4:] -= 63.0  # 90 nats at temperature 0.7
    return Case(logits, [9, 14, 4], [[9, 12], [14, 5, 6, 13], [4]])


def with_infinities() -> Case:
    logits = normal(3)
    logits[0, 3] = logits[1, 8:] = -math.inf
    return Case(logits, [2, 1, 5], [[3, 2, 7], [1, 9, 15], [5]])


def junk_of_masked_rows() -> Case:
    logits = normal(5)
    logits[1], logits[3, 2], logits[4] = math.nan, math.inf, -math.inf
    kept = [[1, 4], [-7, 2**40, 3, 3], [2, 15, 0], [], list(range(V))]
    return Case(logits, [4, -100, 0, V + 3, 2], kept, masked=(1, 3, 4))


CASES = {
    "sets of all sizes": random_case(),
    "temperature 1": random_case(12, seed=2, temperature=1.0),
    "padding columns hold NaN": replace(
        random_case(12, seed=3),
        logits=torch.cat([normal(12, 13), torch.full((12, 3), math.nan, dtype=torch.float64)], 1),
        labels=[t % 13 for t in range(12)],
        kept=[sorted({t % 13, (5 * t) % 13, 12}) if t % 4 else list(range(13)) for t in range(12)],
        vocab_size=13,
    ),
    "near 1e4": random_case(12, seed=4, logits=normal(12) + 1e4),
    "far below": far_below(),
    "-inf logits": with_infinities(),
    "masked rows hold anything": junk_of_masked_rows(),
    "masked alone": Case(torch.full((2, V), math.nan), [-1, 99], [[], [5, 5]], masked=(0, 1)),
    "no row": Case(torch.zeros(0, V), [], []),
}


def truth(case: Case, c_support: Tensor, c_full: Tensor, c_entropy: Tensor) -> tuple[Tensor, ...]:
    """(support score, full score, entropy, gradient) in float64 by autograd of softmax, row by row; masked rows 0."""
    leaf = case.logits.double().clone().requires_grad_()
    found = [[torch.zeros((), dtype=torch.float64)] * 3 for _ in case.labels]
    total = leaf[:0].sum()
    for t in case.mask.nonzero()[:, 0].tolist():
        z = leaf[t, : case.vocab_size] / case.temperature
        support = z[case.labels[t]] - torch.logsumexp(z[case.kept[t]], 0)
        p = torch.softmax(z, 0)
        entropy = -torch.where(p > 0, p * torch.where(p > 0, p, 1.0).log(), 0.0).sum()
        found[t] = [support, z[case.labels[t]] - torch.logsumexp(z, 0), entropy]
        for coefficients, value in zip((c_support, c_full, c_entropy), found[t], strict=True):
            total = total + coefficients[t] * value if coefficients[t] else total
    (gradient,) = torch.autograd.grad(total, leaf, allow_unused=True) if case.mask.any() else (None,)
    gradient = torch.zeros_like(case.logits).double() if gradient is None else gradient
    values = [torch.stack([row[i] for row in found]).detach() if found else torch.zeros(0, dtype=torch.float64) for i in range(3)]
    return *values, gradient


COEFFICIENTS = {
    "support": (1.0, 0.0, 0.0),
    "full": (0.0, 1.0, 0.0),
    "both": (1.0, 1.0, 0.0),
    "all": (1.0, 1.0, 1.0),
    "entropy": (1.0, 0.0, 1.0),
}


def coefficients_of(case: Case, which: str) -> list[Tensor]:
    steps = torch.arange(1.0, len(case.labels) + 1, dtype=torch.float64)
    return [
        weight * wave(steps)
        for weight, wave in zip(COEFFICIENTS[which], (torch.cos, torch.sin, lambda x: torch.cos(2 * x)), strict=True)
    ]


def run(case: Case, group, backend: str, dtype: torch.dtype, which: str, inplace: bool = False) -> tuple[Tensor, ...]:
    """What one tp rank computes: the three values and its columns of the gradient, on the CPU."""
    width = case.logits.shape[1] // group.size()
    leaf = case.logits[:, group.rank() * width :][:, :width].to(KERNEL_DEVICE, dtype).clone().requires_grad_()
    values = vocab_parallel_log_probs(
        leaf * 1 if inplace else leaf,
        torch.tensor(case.labels, dtype=torch.int64, device=KERNEL_DEVICE),
        loss_mask=case.mask.to(KERNEL_DEVICE),
        temperature=case.temperature,
        vocab_size=case.vocab_size,
        tp_group=group,
        backend=backend,
        inplace=inplace,
        sampling_support=SamplingSupport.from_lists(case.kept).to(KERNEL_DEVICE),
        with_full=True,
        with_entropy=which in ("all", "entropy"),
    )
    given = [c.to(KERNEL_DEVICE, value.dtype) for c, value in zip(coefficients_of(case, which), values, strict=False)]
    loss = sum((c * value).sum() for c, value in zip(given, values, strict=True) if c.any())
    if isinstance(loss, Tensor):
        loss.backward()
    gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    return *(value.detach().double().cpu() for value in values), gradient.double().cpu()


def by_ranks(case: Case, tp: int, backend: str, dtype: torch.dtype, which: str, inplace: bool = False) -> tuple[Tensor, ...]:
    groups = groups_of_ranks(tp=tp)
    ranks = on_simulated_ranks(lambda of_rank: run(case, of_rank.tp, backend, dtype, which, inplace), groups)
    for rank in ranks[1:]:
        assert all(torch.equal(mine, first) for mine, first in zip(rank[:-1], ranks[0][:-1], strict=True)), "the same bits"
    return *ranks[0][:-1], torch.cat([rank[-1] for rank in ranks], 1)


def check(case: Case, found: tuple[Tensor, ...], dtype: torch.dtype, which: str) -> None:
    rounded = replace(case, logits=case.logits.to(dtype).double())
    *values, gradient = truth(rounded, *coefficients_of(case, which))
    for got, want in zip(found[:-1], values, strict=False):
        torch.testing.assert_close(got, want, rtol=VALUES[dtype], atol=VALUES[dtype])
    scale = max(1.0, float(gradient.abs().max()) if gradient.numel() else 0.0)
    torch.testing.assert_close(found[-1], gradient, rtol=0, atol=GRADIENTS[dtype] * scale)
    assert not found[-1][:, case.vocab_size :].any(), "padding has no gradient"


@pytest.mark.parametrize("which", COEFFICIENTS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_values_and_gradient_are_those_of_a_softmax_over_each_set(name, which, tp):
    check(CASES[name], by_ranks(CASES[name], tp, "torch", torch.float64, which), torch.float64, which)


def run_with_entropy_of_sets(case: Case, group, backend: str, dtype: torch.dtype, with_full: bool) -> tuple[Tensor, ...]:
    """(scores over the sets, their entropy, this shard's gradient) of one tp rank; with_full: beside scores over the vocabulary."""
    width = case.logits.shape[1] // group.size()
    leaf = case.logits[:, group.rank() * width :][:, :width].to(KERNEL_DEVICE, dtype).clone().requires_grad_()
    labels = torch.tensor(case.labels, dtype=torch.int64, device=KERNEL_DEVICE)
    shard, kernels = vocab_shard(width, case.temperature, case.vocab_size, group), row_kernels(resolve_backend(backend, leaf))
    rows = (leaf, labels, case.mask.to(KERNEL_DEVICE), SamplingSupport.from_lists(case.kept).to(KERNEL_DEVICE), shard, group)
    scores, full, entropy = SupportLogProbs.apply(*rows, with_full, True, True, False, kernels, True)
    assert (full is not None) == with_full
    c, c_full, e = (x.to(KERNEL_DEVICE, scores.dtype) for x in coefficients_of(case, "all"))
    loss = (c * scores).sum() + (e * entropy).sum()
    (loss if full is None else loss + (c_full * full).sum()).backward()
    return *(x.detach().double().cpu() for x in (scores, entropy)), leaf.grad.double().cpu()


@pytest.mark.parametrize("with_full", [False, True], ids=["alone", "beside the vocabulary"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("backend", "tp", "dtype"),
    [
        *(("torch", *of) for of in ((1, torch.float64), (2, torch.float64), (4, torch.float64), (2, torch.float32))),
        pytest.param("triton", 1, torch.bfloat16, marks=ON_TRITON),
        pytest.param("triton", 2, torch.float32, marks=ON_TRITON),
    ],
    ids=str,
)
def test_an_entropy_of_each_set_is_that_of_its_softmax(name, backend, tp, dtype, with_full):
    """In float64 by autograd, row by row. A whole row has that of the vocabulary, a set of one id 0 and no gradient."""
    case = CASES[name]
    ranks = on_simulated_ranks(
        lambda of_rank: run_with_entropy_of_sets(case, of_rank.tp, backend, dtype, with_full), groups_of_ranks(tp=tp)
    )
    assert all(torch.equal(mine, first) for rank in ranks for mine, first in zip(rank[:2], ranks[0][:2], strict=True))
    rounded = replace(case, logits=case.logits.to(dtype).double())
    leaf = rounded.logits.clone().requires_grad_()
    c, c_full, e = coefficients_of(case, "all")
    scores, entropies = torch.zeros(2, len(case.labels), dtype=torch.float64)
    total = leaf[:0].sum()
    for t in case.mask.nonzero()[:, 0].tolist():
        row = leaf[t, : case.vocab_size]
        z = (row - row.max().detach()) / case.temperature  # so that logits near 1e4 are exact here too
        log_p = z[case.kept[t]] - torch.logsumexp(z[case.kept[t]], 0)
        p = torch.softmax(z[case.kept[t]], 0)
        score = z[case.labels[t]] - torch.logsumexp(z[case.kept[t]], 0)
        entropy = -torch.where(p > 0, p * torch.where(p > 0, log_p, 0.0), 0.0).sum()
        scores[t], entropies[t] = score.detach(), entropy.detach()
        full = z[case.labels[t]] - torch.logsumexp(z, 0) if with_full else 0.0
        total = total + c[t] * score + e[t] * entropy + c_full[t] * full
    if case.mask.any():
        total.backward()
    gradient = torch.zeros_like(rounded.logits) if leaf.grad is None else leaf.grad
    found = torch.cat([rank[2] for rank in ranks], 1)
    for got, want in ((ranks[0][0], scores), (ranks[0][1], entropies)):
        torch.testing.assert_close(got, want, rtol=VALUES[dtype], atol=VALUES[dtype])
    scale = max(1.0, float(gradient.abs().max()) if gradient.numel() else 0.0)
    torch.testing.assert_close(found, gradient, rtol=0, atol=GRADIENTS[dtype] * scale)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_whole_row_beside_others_has_the_bits_of_the_vocabularys_entropy(tp, backend):
    case = whole_but((1, 2, 8))
    groups, is_whole = groups_of_ranks(tp=tp), torch.tensor([t not in (1, 2, 7, 8) for t in range(12)])
    of_sets, *_ = on_simulated_ranks(
        lambda of_rank: run_with_entropy_of_sets(case, of_rank.tp, backend, torch.float32, False), groups
    )
    entropy = by_ranks(case, tp, backend, torch.float32, "all")[2]
    assert torch.equal(of_sets[1][is_whole], entropy[is_whole]) and not torch.equal(of_sets[1], entropy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("name", "tp", "which", "inplace"),
    [
        ("sets of all sizes", 1, "all", False),
        ("sets of all sizes", 2, "both", True),
        ("padding columns hold NaN", 4, "support", False),
        ("far below", 2, "both", False),
        ("masked rows hold anything", 2, "all", True),
        ("-inf logits", 1, "entropy", True),
        ("no row", 2, "all", False),
    ],
)
def test_narrow_logits_too_in_place_and_in_both_backends(name, tp, which, inplace, dtype, backend):
    case = CASES[name]
    if name == "padding columns hold NaN" and dtype == torch.float16:
        case = replace(case, temperature=1.0)
    check(case, by_ranks(case, tp, backend, dtype, which, inplace), dtype, which)


# Values by hand, to 1e-9: logits, temperature 0.7, sets and actions as below; ids 0 and 1 of the first row give
# -ln(1 + e^(1 / 0.7)) = -1.643401346, and the last row keeps all five equal logits: ln(1 / 5).
BY_HAND = Case(
    torch.tensor(
        [[2.0, 1, 0, -1, 0.5], [0.3, -0.7, 1.9, 0, 0.4], [-1, 4, 0, 0.2, 0.1], [1, 1, 1, 1, 1]],
        dtype=torch.float64,
    ),
    [1, 4, 1, 3],
    [[0, 1], [2, 4], [1], [0, 1, 2, 3, 4]],
    vocab_size=5,
)
SUPPORT = [-1.643401346, -2.253789357, 0.0, -1.609437912]
FULL = [-1.784962958, -2.412613756, -0.012208570, -1.609437912]
LOG_MASS = [-0.141561612, -0.158824399, -0.012208570, 0.0]
# With coefficients (-1, 0.5, 2, -0.25) of the support's and (0.1, 0, -0.3, 0.05) of the full scores.
GRADIENT = [
    [1.052369698, -1.033512797, -0.005744890, -0.001376769, -0.011735242],
    [0.0, 0.0, -0.639285296, 0.0, 0.639285296],
    [0.000334671, -0.005200435, 0.001396492, 0.001858328, 0.001610944],
    [0.057142857, 0.057142857, 0.057142857, -0.228571429, 0.057142857],
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_values_by_hand(dtype, backend):
    if backend == "triton" and dtype == torch.float64:
        dtype = torch.float32
    leaf = BY_HAND.logits.to(KERNEL_DEVICE, dtype).clone().requires_grad_()
    labels, support = torch.tensor(BY_HAND.labels).to(KERNEL_DEVICE), SamplingSupport.from_lists(BY_HAND.kept).to(KERNEL_DEVICE)
    scores, full = vocab_parallel_log_probs(
        leaf, labels, temperature=0.7, backend=backend, sampling_support=support, with_full=True
    )
    c_support, c_full = torch.tensor([[-1, 0.5, 2, -0.25], [0.1, 0, -0.3, 0.05]], dtype=dtype, device=KERNEL_DEVICE)
    (c_support * scores + c_full * full).sum().backward()
    near = functools.partial(torch.testing.assert_close, rtol=0, atol=1e-9 if dtype == torch.float64 else 1e-6, check_dtype=False)
    for got, want in ((scores, SUPPORT), (full, FULL), (full - scores, LOG_MASS), (leaf.grad, GRADIENT)):
        near(got.detach().cpu(), torch.tensor(want, dtype=torch.float64))
    assert scores[2] == 0.0, "a set of one id"


def whole_but(rows: tuple[int, ...]) -> Case:
    """Every id is kept but in these rows, which keep three."""
    kept = [[t % V, (t + 5) % V, (t + 1) % V] if t in rows else list(reversed(range(V))) for t in range(12)]
    return Case(normal(12), [(3 * t) % V if t not in rows else t % V for t in range(12)], kept, masked=(2, 7))


@pytest.mark.parametrize("with_entropy", [False, True], ids=["alone", "with entropy"])
@pytest.mark.parametrize("inplace", [False, True], ids=["out of place", "in place"])
@pytest.mark.parametrize("rows", [(), (1, 2, 8)], ids=["all whole", "three rows not"])
@pytest.mark.parametrize(
    ("tp", "dtype"), [(1, torch.float32), (2, torch.float32), (4, torch.bfloat16), (1, torch.float64)], ids=str
)
def test_a_row_that_keeps_the_vocabulary_has_the_bits_of_a_row_without_a_set(tp, dtype, rows, inplace, with_entropy, backend):
    """Values and gradient, whatever the other rows keep."""
    if backend == "triton" and dtype == torch.float64:
        dtype = torch.float16
    case, which = whole_but(rows), "all" if with_entropy else "both"
    *values, gradient = by_ranks(case, tp, backend, dtype, which, inplace)

    def without_sets(group) -> tuple[Tensor, ...]:
        width = V // group.size()
        leaf = case.logits[:, group.rank() * width :][:, :width].to(KERNEL_DEVICE, dtype).clone().requires_grad_()
        labels, mask = torch.tensor(case.labels).to(KERNEL_DEVICE), case.mask.to(KERNEL_DEVICE)
        found = vocab_parallel_log_probs(
            leaf * 1 if inplace else leaf,
            labels,
            loss_mask=mask,
            temperature=0.7,
            tp_group=group,
            backend=backend,
            inplace=inplace,
            with_entropy=with_entropy,
        )
        found = found if with_entropy else (found,)
        c, c_full, e = (x.to(KERNEL_DEVICE, found[0].dtype) for x in coefficients_of(case, which))
        loss = ((c_full + c) * found[0]).sum()
        (loss + (e * found[1]).sum() if with_entropy else loss).backward()
        return *(x.detach().double().cpu() for x in found), leaf.grad.double().cpu()

    ranks = on_simulated_ranks(lambda of_rank: without_sets(of_rank.tp), groups_of_ranks(tp=tp))
    is_whole = torch.tensor([t not in rows for t in range(12)])
    scores, full, *entropy = values
    assert torch.equal(scores[is_whole], ranks[0][0][is_whole]) and torch.equal(full, ranks[0][0])
    assert not with_entropy or torch.equal(entropy[0], ranks[0][1])
    assert torch.equal(gradient[is_whole], torch.cat([rank[-1] for rank in ranks], 1)[is_whole])
    assert not rows or not torch.equal(scores, full), "other rows have two scores"


@pytest.mark.parametrize("tp", [1, 4])
def test_a_set_of_one_id_has_score_and_gradient_exactly_0(tp, backend):
    case = Case(30 * normal(9), list(range(9)), [[t] for t in range(9)], temperature=0.3)
    scores, _, gradient = by_ranks(case, tp, backend, torch.float32, "support")
    assert not scores.any() and not gradient.any()


def test_each_row_is_computed_alone_and_the_order_of_ids_decides_no_bit(backend):
    case = random_case()
    whole = by_ranks(case, 2, backend, torch.float32, "all")
    shuffled = replace(case, kept=[sorted(kept, key=lambda i: (7 * i) % 11) for kept in case.kept])
    assert all(map(torch.equal, by_ranks(shuffled, 2, backend, torch.float32, "all"), whole))
    rows = [17, 4, 22]
    support = SamplingSupport.from_lists(case.kept)
    scores, full = vocab_parallel_log_probs(
        case.logits[rows].float(),
        torch.tensor(case.labels)[rows],
        temperature=0.7,
        sampling_support=support.take(torch.tensor(rows)),
        with_full=True,
    )
    alone = vocab_parallel_log_probs(
        case.logits.float(), torch.tensor(case.labels), temperature=0.7, sampling_support=support, with_full=True
    )
    assert torch.equal(scores, alone[0][rows]) and torch.equal(full, alone[1][rows])


@pytest.mark.parametrize("most", [1, 7])
def test_large_sets_are_taken_in_blocks_with_the_same_bits(most, backend):
    """Wrong sets are found in each block too. On CUDA nothing is read, and their scores are no numbers."""
    case, blocks = random_case(), SamplingSupport.blocks
    whole = by_ranks(case, 2, backend, torch.float32, "all", inplace=True)
    with mock.patch.object(SamplingSupport, "blocks", lambda support: blocks(support, most)):
        assert all(map(torch.equal, by_ranks(case, 2, backend, torch.float32, "all", inplace=True), whole))
        for row in (0, 23):
            wrong = replace(case, kept=[[*kept, kept[0]] if t == row else kept for t, kept in enumerate(case.kept)])
            if KERNEL_DEVICE == "cuda":
                assert run(wrong, SINGLE, backend, torch.float32, "all")[0].isfinite().logical_not().nonzero().tolist() == [[row]]
                continue
            with pytest.raises(DataError, match=f"token {row} has the ids"):
                run(wrong, SINGLE, backend, torch.float32, "all")


# Logits as a host may hand them over: a view with strided columns, rows further apart than they are wide, one column before.
VIEWS = {
    "strided columns": lambda x: x.T.contiguous().T,
    "wide rows": lambda x: torch.cat([x, torch.full_like(x, math.nan)], 1)[:, : x.shape[1]],
    "shifted": lambda x: torch.cat([torch.full_like(x[:, :1], math.nan), x], 1)[:, 1:],
}


@pytest.mark.parametrize("which", ["support", "all"])
@pytest.mark.parametrize("inplace", [False, True], ids=["out of place", "in place"])
@pytest.mark.parametrize("view", VIEWS)
def test_views_of_logits_have_the_numbers_of_a_copy(view, inplace, which, backend):
    case, found = random_case(), []
    for given in (VIEWS[view], torch.clone):
        leaf = case.logits.float().to(KERNEL_DEVICE).clone().requires_grad_()
        values = vocab_parallel_log_probs(
            given(leaf * 1),
            torch.tensor(case.labels).to(KERNEL_DEVICE),
            loss_mask=case.mask.to(KERNEL_DEVICE),
            temperature=0.7,
            backend=backend,
            inplace=inplace,
            sampling_support=SamplingSupport.from_lists(case.kept).to(KERNEL_DEVICE),
            with_full=True,
            with_entropy=True,
        )
        c = [x.to(KERNEL_DEVICE, torch.float32) for x in coefficients_of(case, which)]
        sum((w * value).sum() for w, value in zip(c, values, strict=True) if w.any()).backward()
        found.append((*(value.detach() for value in values), leaf.grad))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-6)  # other splits of a row, other orders of additions


def counted(case: Case, tp: int, which: str, monkeypatch) -> list[tuple[str, tuple[int, ...]]]:
    """The collectives of the first rank, without the comparison of arguments; and what backward adds."""
    calls: list[tuple[str, tuple[int, ...]]] = []

    def one(group) -> None:
        from simulated_ranks import SimulatedGroup

        exchange = SimulatedGroup.exchange

        def counting(self, kind, value):
            if self.own_rank == 0:
                calls.append((kind, tuple(value.shape)))
            return exchange(self, kind, value)

        if group.rank() == 0:
            monkeypatch.setattr(SimulatedGroup, "exchange", counting)
        width = V // group.size()
        leaf = case.logits[:, group.rank() * width :][:, :width].float().clone().requires_grad_()
        values = vocab_parallel_log_probs(
            leaf,
            torch.tensor(case.labels),
            tp_group=group,
            check_ranks=False,
            sampling_support=SamplingSupport.from_lists(case.kept),
            with_full=which != "support",
            with_entropy=which == "all",
        )
        sum(value.sum() for value in (values if isinstance(values, tuple) else (values,))).backward()

    on_simulated_ranks(lambda of_rank: one(of_rank.tp), groups_of_ranks(tp=tp))
    return calls


@pytest.mark.parametrize(("which", "width"), [("support", 3), ("both", 6), ("all", 7)])
def test_one_all_gather_has_all_of_it_and_backward_none(which, width, monkeypatch):
    case = Case(normal(5), [0, 1, 2, 3, 4], [[t, t + 6] for t in range(5)])
    calls = [call for call in counted(case, 2, which, monkeypatch) if call[1] != (4096,)]
    assert calls == [("all_gather", (5, width))]


def test_support_scores_alone_keep_no_memory_of_the_logits():
    """Beside the logits and their gradient: numbers of rows and of pairs. The logits can go before backward."""
    num_rows, width = 64, 4096
    generator = torch.Generator().manual_seed(0)
    kept = [torch.randint(width, (8,), generator=generator).unique().tolist() for _ in range(num_rows)]
    labels, support = torch.tensor([ids[0] for ids in kept]), SamplingSupport.from_lists(kept)
    of_logits = num_rows * width * 4
    with LiveBytes() as live:
        logits = torch.randn(num_rows, width, generator=generator).requires_grad_()
        base = live.peak
        scores = vocab_parallel_log_probs(logits, labels, sampling_support=support)
        assert live.peak - base < 0.1 * of_logits
        saved = [x for x in scores.grad_fn.saved_tensors if x is not None]
        assert sum(x.nbytes for x in saved) < 0.05 * of_logits
        scores.sum().backward()
    assert live.peak - base < 1.1 * of_logits, "the gradient"


def test_in_place_a_second_loss_of_the_same_logits_raises():
    leaf = normal(4).requires_grad_()
    logits, labels, support = leaf * 1, torch.tensor([0, 1, 2, 3]), SamplingSupport.from_lists([[t, t + 1] for t in range(4)])
    first, second = (vocab_parallel_log_probs(logits, labels, inplace=True, sampling_support=support) for _ in range(2))
    first.sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second.sum().backward()


def test_a_second_backward_out_of_place_gives_the_same():
    case = whole_but((1, 8))
    leaf = case.logits.clone().requires_grad_()
    scores, full = vocab_parallel_log_probs(
        leaf, torch.tensor(case.labels), sampling_support=SamplingSupport.from_lists(case.kept), with_full=True
    )
    loss = (scores + 2 * full).sum()
    (first,) = torch.autograd.grad(loss, leaf, retain_graph=True)
    (second,) = torch.autograd.grad(loss, leaf)
    torch.testing.assert_close(first, second, rtol=0, atol=1e-15)  # the first one finds exponentials, the second makes them


# What is refused on the CPU, and what it is on a device that nobody asks: a score that is no number, which the losses count.
WRONG = {
    "the action outside its set": ([3, 5], -math.inf),
    "an empty set": ([], math.nan),
    "an id twice": ([4, 2, 2], math.nan),
    "an id that no vocabulary has": ([4, 16], math.nan),
    "an id below 0": ([-1, 4], math.nan),
    "as many ids as the vocabulary, one of them twice": ([*range(15), 3], math.nan),
}
SAID = {
    "the action outside its set": r"token 1 took the id 4, which is not among its 2 ids 3, 5: .*shifted by one[?]",
    "an empty set": r"token 1 is trained and its set is empty: mask the token",
    "an id twice": r"token 1 has the ids 2, 2, 4: they must be distinct and in \[0, 16\)",
    "an id that no vocabulary has": r"token 1 has the ids 4, 16: they must be distinct and in \[0, 16\)",
    "an id below 0": r"token 1 has the ids -1, 4: they must be",
    "as many ids as the vocabulary, one of them twice": r"token 1 has the ids 0, 1, 2, 3, 3, 4, \.\.\.: they must be",
}


@pytest.mark.parametrize("which", WRONG)
def test_a_wrong_set_of_a_trained_token_is_named(which):
    support = SamplingSupport.from_lists([[0, 3], WRONG[which][0], []])
    mask = torch.tensor([True, True, False])
    with pytest.raises(DataError, match=f"^sampling_support: {SAID[which]}.* 1 unmasked tokens have such a fault$"):
        vocab_parallel_log_probs(normal(3), torch.tensor([0, 4, 4]), loss_mask=mask, sampling_support=support)
    vocab_parallel_log_probs(
        normal(3), torch.tensor([0, 4, 4]), loss_mask=torch.tensor([True, False, False]), sampling_support=support
    )


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("which", WRONG)
def test_a_wrong_set_that_nobody_reads_gives_no_number(which, tp, backend):
    """As on CUDA, where a check would wait: the loss then counts the token as not finite. Its neighbours keep their numbers."""
    case = Case(normal(3), [0, 4, 6], [[0, 3], WRONG[which][0], [6, 15]])
    support = SamplingSupport.from_lists(case.kept).to(KERNEL_DEVICE)
    labels = torch.tensor(case.labels).to(KERNEL_DEVICE)

    def one(group) -> tuple[Tensor, Tensor]:
        width = V // group.size()
        leaf = case.logits[:, group.rank() * width :][:, :width].float().to(KERNEL_DEVICE).clone().requires_grad_()
        shard, kernels = vocab_shard(width, 1.0, None, group), row_kernels(resolve_backend(backend, leaf))
        scores, _, _ = SupportLogProbs.apply(leaf, labels, None, support, shard, group, False, False, False, False, kernels, True)
        scores.sum().backward()
        return scores.detach().cpu(), leaf.grad.cpu()

    ranks = on_simulated_ranks(lambda of_rank: one(of_rank.tp), groups_of_ranks(tp=tp))
    gradient = torch.cat([rank[1] for rank in ranks], 1)
    want = WRONG[which][1]
    for scores, _ in ranks:
        assert scores[1] == want or (math.isnan(want) and scores[1].isnan())
        assert scores[[0, 2]].isfinite().all()
    assert gradient[[0, 2]].isfinite().all() and (gradient[[0, 2]] != 0).sum() == 4


@pytest.mark.parametrize(
    ("support", "message"),
    [
        ([[0, 1]], "sampling_support is list: pass megatron_rl.SamplingSupport"),
        (SamplingSupport.from_lists([[0], [1]]), "sampling_support has 2 rows and the micro-batch 3 tokens"),
        (SamplingSupport.from_lists([[0], [1], [2]]).to(torch.device("meta")), "sampling_support is on meta and the logits on cpu"),
    ],
)
def test_what_is_no_support_of_these_rows_is_refused(support, message):
    with pytest.raises(DataError, match=message):
        vocab_parallel_log_probs(normal(3), torch.tensor([0, 1, 2]), sampling_support=support)


def test_full_scores_without_sets_are_refused():
    with pytest.raises(ConfigError, match="with_full=True needs sampling_support"):
        vocab_parallel_log_probs(normal(3), torch.tensor([0, 1, 2]), with_full=True)


def test_sets_of_masked_tokens_may_differ_between_ranks():
    """One rank finds that all its sets are whole, the other does not: both gather the same."""

    def one(group) -> Tensor:
        kept = [list(range(V)), list(range(V)), list(range(V)) if group.rank() else []]
        return vocab_parallel_log_probs(
            normal(3)[:, 8 * group.rank() :][:, :8],
            torch.tensor([0, 4, 9]),
            loss_mask=torch.tensor([True, True, False]),
            tp_group=group,
            sampling_support=SamplingSupport.from_lists(kept),
        )

    first, second = on_simulated_ranks(lambda of_rank: one(of_rank.tp), groups_of_ranks(tp=2))
    want = vocab_parallel_log_probs(normal(3), torch.tensor([0, 4, 9]), loss_mask=torch.tensor([True, True, False]))
    assert torch.equal(first, second)
    torch.testing.assert_close(first, want, rtol=0, atol=1e-14)


@pytest.mark.parametrize("check_ranks", [True, False])
@pytest.mark.parametrize("size", [7, V])
def test_a_masked_set_on_one_rank_alone_decides_nothing(size, check_ranks):
    """Not even where it is the vocabulary, whose logits would be gathered. Trained sets are small."""

    def one(group) -> Tensor:
        kept = [[0, 3], [4, 5], [*range(size * group.rank())]]
        return vocab_parallel_log_probs(
            normal(3)[:, 8 * group.rank() :][:, :8],
            torch.tensor([0, 4, 9]),
            loss_mask=torch.tensor([True, True, False]),
            tp_group=group,
            check_ranks=check_ranks,
            sampling_support=SamplingSupport.from_lists(kept),
        )

    first, second = on_simulated_ranks(lambda of_rank: one(of_rank.tp), groups_of_ranks(tp=2))
    z = normal(3)
    want = [z[0, 0] - z[0, [0, 3]].logsumexp(0), z[1, 4] - z[1, [4, 5]].logsumexp(0), torch.tensor(0.0).double()]
    assert torch.equal(first, second)
    torch.testing.assert_close(first, torch.stack(want), rtol=0, atol=1e-14)  # float64, sums of two terms


@pytest.mark.parametrize("changes", [{"kept": [[0, 3], [4, 5, 2]]}, {"kept": [[0, 3], [4, 6]]}, {"kept": None}], ids=str)
def test_ranks_with_other_sets_are_named(changes):
    """Sets of masked tokens may differ: no rank reads them."""

    def one(group, kept) -> Tensor:
        support = None if kept is None else SamplingSupport.from_lists([*kept, [group.rank()] * group.rank()])
        mask = torch.tensor([True, True, False])
        return vocab_parallel_log_probs(
            normal(3)[:, :8], torch.tensor([0, 4, 9]), loss_mask=mask, tp_group=group, sampling_support=support, check_ranks=True
        )

    same = [[0, 3], [4, 5]]
    on_simulated_ranks(lambda of_rank: one(of_rank.tp, same), groups_of_ranks(tp=2))
    with pytest.raises(
        DataError,
        match="(sizes of|ids of|whether) sampling_support( is given)? differs between tensor-parallel ranks",
    ):
        on_simulated_ranks(lambda of_rank: one(of_rank.tp, changes["kept"] if of_rank.tp.rank() else same), groups_of_ranks(tp=2))
