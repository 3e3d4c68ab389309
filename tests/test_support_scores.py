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
from test_log_probs import ON_BACKENDS
from torch import Tensor

from megatron_rl.errors import DataError
from megatron_rl.layout.groups import SINGLE
from megatron_rl.layout.sampling_support import SamplingSupport
from megatron_rl.ops.backends import resolve_backend
from megatron_rl.ops.log_probs import row_kernels, vocab_parallel_log_probs, vocab_shard
from megatron_rl.ops.support import SupportLogProbs

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


def truth(case: Case, c_support: Tensor, c_entropy: Tensor) -> tuple[Tensor, ...]:
    """(score, entropy of the vocabulary, gradient) in float64 by autograd of softmax, row by row; masked rows 0."""
    leaf = case.logits.double().clone().requires_grad_()
    found = [[torch.zeros((), dtype=torch.float64)] * 2 for _ in case.labels]
    total = leaf[:0].sum()
    for t in case.mask.nonzero()[:, 0].tolist():
        z = leaf[t, : case.vocab_size] / case.temperature
        support = z[case.labels[t]] - torch.logsumexp(z[case.kept[t]], 0)
        p = torch.softmax(z, 0)
        entropy = -torch.where(p > 0, p * torch.where(p > 0, p, 1.0).log(), 0.0).sum()
        found[t] = [support, entropy]
        for coefficients, value in zip((c_support, c_entropy), found[t], strict=True):
            total = total + coefficients[t] * value if coefficients[t] else total
    (gradient,) = torch.autograd.grad(total, leaf, allow_unused=True) if case.mask.any() else (None,)
    gradient = torch.zeros_like(case.logits).double() if gradient is None else gradient
    values = [torch.stack([row[i] for row in found]).detach() if found else torch.zeros(0, dtype=torch.float64) for i in range(2)]
    return *values, gradient


COEFFICIENTS = {"score": (1.0, 0.0), "both": (1.0, 1.0), "entropy": (0.0, 1.0)}


def coefficients_of(case: Case, which: str) -> list[Tensor]:
    steps = torch.arange(1.0, len(case.labels) + 1, dtype=torch.float64)
    return [weight * wave(steps) for weight, wave in zip(COEFFICIENTS[which], (torch.cos, torch.sin), strict=True)]


def run(case: Case, group, backend: str, dtype: torch.dtype, which: str, inplace: bool = False) -> tuple[Tensor, ...]:
    """What one tp rank computes: its values and its columns of the gradient, on the CPU."""
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
        with_entropy=which != "score",
    )
    values = values if isinstance(values, tuple) else (values,)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("name", "tp", "which", "inplace"),
    [
        ("sets of all sizes", 1, "both", False),
        ("sets of all sizes", 2, "both", True),
        ("padding columns hold NaN", 4, "score", False),
        ("far below", 2, "score", False),
        ("masked rows hold anything", 2, "both", True),
        ("-inf logits", 1, "entropy", True),
        ("no row", 2, "both", False),
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
ENTROPY = [0.928339989, 0.845648114, 0.080887401, 1.609437912]  # of all five ids
LOG_MASS = [-0.141561612, -0.158824399, -0.012208570, 0.0]
# With coefficients (-1, 0.5, 2, -0.25) of the scores, and with (0.2, -0.1, 0.3, 0.5) of the entropies too.
GRADIENT = [
    [1.152398043, -1.152398043, 0.0, 0.0, 0.0],
    [0.0, 0.0, -0.639285296, 0.0, 0.639285296],
    [0.0, 0.0, 0.0, 0.0, 0.0],
    [0.071428571, 0.071428571, 0.071428571, -0.285714286, 0.071428571],
]
GRADIENT_OF_BOTH = [
    [1.037975927, -1.111328289, 0.026256380, 0.010225994, 0.036869987],
    [-0.018968201, -0.008343761, -0.576466614, -0.015453847, 0.619232424],
    [0.002367520, -0.029076625, 0.007884043, 0.009960441, 0.008864621],
    [0.071428571, 0.071428571, 0.071428571, -0.285714286, 0.071428571],
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_values_by_hand(dtype, backend):
    if backend == "triton" and dtype == torch.float64:
        dtype = torch.float32
    leaf = BY_HAND.logits.to(KERNEL_DEVICE, dtype).clone().requires_grad_()
    labels, support = torch.tensor(BY_HAND.labels).to(KERNEL_DEVICE), SamplingSupport.from_lists(BY_HAND.kept).to(KERNEL_DEVICE)
    shared = {"temperature": 0.7, "backend": backend}
    scores, entropy = vocab_parallel_log_probs(leaf, labels, sampling_support=support, with_entropy=True, **shared)
    of_all = vocab_parallel_log_probs(leaf.detach(), labels, **shared)
    c, e = torch.tensor([[-1, 0.5, 2, -0.25], [0.2, -0.1, 0.3, 0.5]], dtype=dtype, device=KERNEL_DEVICE)
    (alone,) = torch.autograd.grad((c * scores).sum(), leaf, retain_graph=True)
    (both,) = torch.autograd.grad((c * scores + e * entropy).sum(), leaf)
    near = functools.partial(torch.testing.assert_close, rtol=0, atol=1e-9 if dtype == torch.float64 else 1e-6, check_dtype=False)
    mass = of_all - scores
    for got, want in (*((scores, SUPPORT), (entropy, ENTROPY), (mass, LOG_MASS), (alone, GRADIENT), (both, GRADIENT_OF_BOTH)),):
        near(got.detach().cpu(), torch.tensor(want, dtype=torch.float64))
    assert scores[2] == 0.0, "a set of one id"


@pytest.mark.parametrize("tp", [1, 4])
def test_a_set_of_one_id_has_score_and_gradient_exactly_0(tp, backend):
    case = Case(30 * normal(9), list(range(9)), [[t] for t in range(9)], temperature=0.3)
    scores, gradient = by_ranks(case, tp, backend, torch.float32, "score")
    assert not scores.any() and not gradient.any()


def test_each_row_is_computed_alone_and_the_order_of_ids_decides_no_bit(backend):
    case = random_case()
    whole = by_ranks(case, 2, backend, torch.float32, "both")
    shuffled = replace(case, kept=[sorted(kept, key=lambda i: (7 * i) % 11) for kept in case.kept])
    assert all(map(torch.equal, by_ranks(shuffled, 2, backend, torch.float32, "both"), whole))
    rows = [17, 4, 22]
    support = SamplingSupport.from_lists(case.kept)
    of_all = {"temperature": 0.7, "with_entropy": True}
    labels = torch.tensor(case.labels)
    found = vocab_parallel_log_probs(
        case.logits[rows].float(), labels[rows], sampling_support=support.take(torch.tensor(rows)), **of_all
    )
    alone = vocab_parallel_log_probs(case.logits.float(), labels, sampling_support=support, **of_all)
    assert all(torch.equal(got, want[rows]) for got, want in zip(found, alone, strict=True))


@pytest.mark.parametrize("most", [1, 7])
def test_large_sets_are_taken_in_blocks_with_the_same_bits(most, backend):
    """Wrong sets are found in each block too. On CUDA nothing is read, and their scores are no numbers."""
    case, blocks = random_case(), SamplingSupport.blocks
    whole = by_ranks(case, 2, backend, torch.float32, "both", inplace=True)
    with mock.patch.object(SamplingSupport, "blocks", lambda support: blocks(support, most)):
        assert all(map(torch.equal, by_ranks(case, 2, backend, torch.float32, "both", inplace=True), whole))
        for row in (0, 23):
            wrong = replace(case, kept=[[*kept, kept[0]] if t == row else kept for t, kept in enumerate(case.kept)])
            if KERNEL_DEVICE == "cuda":
                assert run(wrong, SINGLE, backend, torch.float32, "both")[0].isfinite().logical_not().nonzero().tolist() == [[row]]
                continue
            with pytest.raises(DataError, match=f"token {row} has the ids"):
                run(wrong, SINGLE, backend, torch.float32, "both")


# Logits as a host may hand them over: a view with strided columns, rows further apart than they are wide, one column before.
VIEWS = {
    "strided columns": lambda x: x.T.contiguous().T,
    "wide rows": lambda x: torch.cat([x, torch.full_like(x, math.nan)], 1)[:, : x.shape[1]],
    "shifted": lambda x: torch.cat([torch.full_like(x[:, :1], math.nan), x], 1)[:, 1:],
}


@pytest.mark.parametrize("which", ["score", "both"])
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
            with_entropy=which == "both",
        )
        sum(value.sum() for value in (values if isinstance(values, tuple) else (values,))).backward()

    on_simulated_ranks(lambda of_rank: one(of_rank.tp), groups_of_ranks(tp=tp))
    return calls


@pytest.mark.parametrize(("which", "widths"), [("score", [3]), ("both", [3, 4])])
def test_scores_and_entropy_have_an_all_gather_each_and_backward_none(which, widths, monkeypatch):
    case = Case(normal(5), [0, 1, 2, 3, 4], [[t, t + 6] for t in range(5)])
    calls = [call for call in counted(case, 2, which, monkeypatch) if call[1] != (4096,)]
    assert calls == [("all_gather", (5, width)) for width in widths]


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
    case = random_case()
    leaf, mask, support = case.logits.clone().requires_grad_(), case.mask, SamplingSupport.from_lists(case.kept)
    scores, entropy = vocab_parallel_log_probs(
        leaf, torch.tensor(case.labels), loss_mask=mask, sampling_support=support, with_entropy=True
    )
    loss = (scores + 2 * entropy).sum()
    (first,) = torch.autograd.grad(loss, leaf, retain_graph=True)
    (second,) = torch.autograd.grad(loss, leaf)
    assert torch.equal(first, second)


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
        scores, _ = SupportLogProbs.apply(leaf, labels, None, shard, group, False, False, kernels, support)
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


def test_sets_of_masked_tokens_may_differ_between_ranks():
    """Trained sets are the vocabulary here: the score is the one without sets."""

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
