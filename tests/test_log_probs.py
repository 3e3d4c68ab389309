"""Log-probabilities over a sharded vocabulary, in both backends: value and gradient against float64 loops, on 1, 2 and 4 ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from helpers import KERNEL_DEVICE, loop_entropy, loop_log_probs
from linear_cases import LargestNewTensor, dense_scores
from simulated_ranks import groups_of_ranks, on_simulated_ranks

from megatron_rl.layout.agreement import MESSAGE_BYTES
from megatron_rl.ops.backends import why_triton_is_missing
from megatron_rl.ops.log_probs import vocab_parallel_log_probs
from megatron_rl.ops.log_probs_torch import CPU_CHUNK_BYTES

V = 16  # 4 columns on each of 4 ranks
# The first and the last column of every shard of 4 and of 8.
EDGE_LABELS = [0, 3, 4, 7, 8, 11, 12, 15]
FEW = [0, 8, 15]
KERNEL_CASES = ["FB-36 labels in the first", "-inf columns fill a whole shard, at a", "FB-56"]
# Each test that takes `backend` runs in torch, and in Triton on whatever runs kernels here.
DEVICES = {"torch": "cpu", "triton": KERNEL_DEVICE}
ON_TRITON = (pytest.mark.kernel, pytest.mark.skipif(why_triton_is_missing() is not None, reason="Triton cannot be imported"))
ON_BACKENDS = ["torch", pytest.param("triton", marks=ON_TRITON)]
# float32 against float64 of the same logits: ~6 roundings of numbers of size 5, and 1/temperature.
TOLERANCE = {"rtol": 0, "atol": 2e-6}
# Two binaries of one computation: a compiler may fuse other operations in them. The interpreter has no such freedom.
OTHER_BINARY = TOLERANCE if KERNEL_DEVICE == "cuda" else {"rtol": 0, "atol": 0}


@pytest.fixture(params=ON_BACKENDS)
def backend(request) -> str:
    return request.param


@dataclass(frozen=True)
class Case:
    """Logits as they are stored, all shards side by side, and which of them are real."""

    logits: torch.Tensor  # [T, 16]
    labels: torch.Tensor
    real: range = range(V)  # columns that take part
    vocab_size: int | None = None
    temperature: float = 1.0
    masked: tuple[int, ...] = ()

    @property
    def mask(self) -> torch.Tensor:
        return torch.tensor([t not in self.masked for t in range(len(self.labels))])


def normal(shift: float = 0.0, labels: list[int] = EDGE_LABELS) -> torch.Tensor:
    return 2 * torch.randn(len(labels), V, generator=torch.Generator().manual_seed(3)) + shift


def columns_filled(columns: slice, value: float, labels: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    logits = normal(labels=labels)
    logits[:, columns] = value
    return logits, torch.tensor(labels)


def garbage_rows() -> tuple[torch.Tensor, torch.Tensor]:
    logits, labels = normal(), torch.tensor(EDGE_LABELS)
    for row, value in ((1, math.nan), (4, math.inf), (6, -math.inf)):
        logits[row] = value
        labels[row] = {1: -100, 4: V + 5, 6: -1}[row]
    return logits, labels


def certain_tokens() -> tuple[torch.Tensor, torch.Tensor]:
    """Labels at the largest of seven finite columns: at a tiny temperature log-probability and entropy are 0."""
    logits, _ = columns_filled(slice(7, 16), -math.inf, [0, 6, 5])
    return logits, logits[:, :7].argmax(-1)


LABELS = torch.tensor(EDGE_LABELS)
CASES = {
    "FB-36 labels in the first and last column of every shard": Case(normal(), LABELS),
    "all logits near 1e4": Case(normal(1e4, FEW), torch.tensor(FEW)),
    "all logits near -1e4": Case(normal(-1e4, FEW), torch.tensor(FEW)),
    "FB-39 near -1e4 at a temperature": Case(normal(-1e4, FEW), torch.tensor(FEW), temperature=0.7),
    "-inf columns fill the first block": Case(*columns_filled(slice(0, 6), -math.inf, [6, 15, 8]), range(6, 16)),
    "-inf columns fill a whole shard": Case(*columns_filled(slice(8, 16), -math.inf, [0, 7, 3]), range(8)),
    # Between the shards' maxima lies -1e39 then, which float32 does not hold: 0 x -inf.
    "-inf columns fill a whole shard, at a tiny temperature": Case(*certain_tokens(), range(7), temperature=1e-9),
    "NaN past the true size": Case(*columns_filled(slice(13, 16), math.nan, [0, 12, 5]), range(13), 13),
    "FB-56 masked rows hold anything": Case(*garbage_rows(), masked=(1, 4, 6)),
}


def coefficients(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Upstream gradients of log_probs and entropy, all different and not 0."""
    steps = torch.arange(1, len(case.labels) + 1)
    return torch.cos(steps).double(), torch.sin(steps).double()


def expected(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(log_probs, entropy, gradient [T, 16], that of the log_probs alone) in float64, of unmasked rows and real columns; else 0."""
    rows, columns = case.mask.nonzero()[:, 0], list(case.real)
    leaf = case.logits[rows][:, columns].double().requires_grad_()
    labels = case.labels[rows] - case.real.start
    new, entropy = (loop_log_probs(leaf, labels, temperature=case.temperature), loop_entropy(leaf, temperature=case.temperature))
    c, e = coefficients(case)
    alone = (c[rows] * new).sum()
    results = [torch.zeros(len(case.labels), dtype=torch.float64) for _ in range(2)]
    results[0][rows], results[1][rows] = new.detach(), entropy.detach()
    for loss in (alone + (e[rows] * entropy).sum(), alone):
        gradient = torch.zeros(case.logits.shape, dtype=torch.float64)
        gradient[rows[:, None], torch.tensor(columns)] = torch.autograd.grad(loss, leaf, retain_graph=True)[0]
        results.append(gradient)
    return tuple(results)


def run_case(case: Case, group, backend: str) -> dict:
    """What one tp rank computes from its columns."""
    width, device = V // group.size(), DEVICES[backend]
    columns = case.logits[:, group.rank() * width : (group.rank() + 1) * width]
    leaf = columns.to(device, copy=True).contiguous().requires_grad_()
    labels, before = case.labels.to(device), leaf.detach().clone()
    options = {
        "loss_mask": case.mask.to(device),
        "temperature": case.temperature,
        "vocab_size": case.vocab_size,
        "tp_group": group,
        "backend": backend,
    }
    log_probs, entropy = vocab_parallel_log_probs(leaf, labels, with_entropy=True, **options)
    alone = vocab_parallel_log_probs(leaf, labels, **options)
    with torch.no_grad():
        evaluated = vocab_parallel_log_probs(leaf, labels, **options)
    in_forward = [] if group.size() == 1 else list(group.calls)
    c, e = (values.to(device) for values in coefficients(case))
    (c * log_probs + e * entropy).sum().backward()
    return {
        "log_probs": log_probs.detach().cpu(),
        "entropy": entropy.detach().cpu(),
        "gradient": leaf.grad.cpu(),
        "gradient without entropy": torch.autograd.grad((c * alone).sum(), leaf)[0].cpu(),
        "without entropy": alone.detach().cpu(),
        "without gradient": evaluated.cpu(),
        "logits untouched": torch.equal(leaf.detach().view(torch.int32), before.view(torch.int32)),
        "gathers": [call for call in in_forward if call[1] != (MESSAGE_BYTES,)],
        "in backward": 0 if group.size() == 1 else len(group.calls) - len(in_forward),
    }


# Interpreted kernels are slow: at tp 2 they meet each case, at 1 and 4 those in which shards differ.
ROWS = [
    pytest.param(backend, tp_size, name, id=f"{backend}-{tp_size}-{name}", marks=ON_TRITON if backend == "triton" else ())
    for backend in DEVICES
    for tp_size in (1, 2, 4)
    for name in CASES
    if backend == "torch" or tp_size == 2 or name.startswith(tuple(KERNEL_CASES))
]


@pytest.mark.parametrize(("backend", "tp_size", "name"), ROWS)
def test_every_shard_has_its_part_of_the_float64_result(backend, tp_size, name):
    """FB-35, FB-36: values of each rank are those of float64, gradients those of its columns. Ranks agree bit
    for bit; else they may disagree on a clip, and their weights drift apart. One all-gather in forward, [T, 4] with the entropy and
    [T, 3] without, with a gradient or not, nothing in backward, and on one rank no collective at all."""
    case = CASES[name]
    ranks = on_simulated_ranks(lambda of_rank: run_case(case, of_rank.tp, backend), groups_of_ranks(tp=tp_size))
    log_probs, entropy, gradient, gradient_alone = expected(case)
    gathers = [("all_gather", (len(log_probs), k)) for k in (4, 3, 3)] if tp_size > 1 else []
    assert ranks[0]["gathers"] == gathers
    assert ranks[0]["in backward"] == 0
    for of_rank in ranks:
        assert all(torch.equal(of_rank[part], ranks[0][part]) for part in ("log_probs", "entropy"))
        torch.testing.assert_close(of_rank["log_probs"].double(), log_probs, **TOLERANCE)
        torch.testing.assert_close(of_rank["entropy"].double(), entropy, **TOLERANCE)
        # Asking for the entropy moves no log-probability.
        torch.testing.assert_close(of_rank["without entropy"], of_rank["log_probs"], **OTHER_BINARY)
        assert torch.equal(of_rank["without gradient"], of_rank["without entropy"])
        assert of_rank["logits untouched"], "FB-33: the caller's logits, bit for bit"
    real = torch.zeros(V, dtype=torch.bool)
    real[list(case.real)] = True
    for which, exact in (("gradient", gradient), ("gradient without entropy", gradient_alone)):
        joined = torch.cat([of_rank[which] for of_rank in ranks], dim=1)
        torch.testing.assert_close(joined.double(), exact, **TOLERANCE)
        assert (joined[:, ~real] == 0).all() and (joined[~case.mask] == 0).all()


def log_probs_of(logits, labels=LABELS, *, backend, **options):
    """vocab_parallel_log_probs where this backend runs; results on the CPU."""
    device = DEVICES[backend]
    moved = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    result = vocab_parallel_log_probs(logits.to(device), labels.to(device), backend=backend, **moved)
    return tuple(part.cpu() for part in result) if isinstance(result, tuple) else result.cpu()


def gradients(logits, labels, backend="torch", **options):
    """(log_probs, gradient of their sum) of a fresh leaf."""
    leaf = logits.detach().clone().requires_grad_()
    log_probs = log_probs_of(leaf, labels, backend=backend, **options)
    log_probs.sum().backward()
    return log_probs.detach(), leaf.grad


# Of 257 columns: a gradient has at most size 1, and is rounded once, to 11 or to 8 bits, which Triton's interpreter cuts off.
ROUNDINGS = {torch.float32: 1e-6, torch.float16: 2**-11, torch.bfloat16: 2**-8}


@pytest.mark.parametrize("dtype", ROUNDINGS, ids=str)
def test_a_gradient_is_rounded_once_to_the_dtype_of_the_logits(backend, dtype):
    """It makes no detour through bfloat16."""
    generator = torch.Generator().manual_seed(5)
    logits = (3 * torch.randn(12, 257, generator=generator)).to(dtype)
    labels = torch.randint(257, (12,), generator=generator)
    log_probs, gradient = gradients(logits, labels, backend)
    assert (gradient.dtype, log_probs.dtype) == (dtype, torch.float32)
    truth, _, exact = dense_scores(logits, labels, torch.ones(12), torch.zeros(12), 1.0)
    is_cut_off = backend == "triton" and KERNEL_DEVICE == "cpu"
    torch.testing.assert_close(log_probs.double(), truth, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient.double(), exact, rtol=0, atol=ROUNDINGS[dtype] * (2 if is_cut_off else 1))


@pytest.mark.parametrize(("offset", "is_masked"), [(-1, False), (0, True), (0, False), (1, True), (65, True)])
def test_chunk_edges_are_not_visible(offset, is_masked):
    """FB-40: T one below, at, one above the rows of a chunk, two chunks and a row; masked rows break the runs. Rows of other
    temperature have other entropies: a chunk along the vocabulary is right for as many rows as it is long alone.

    Fresh memory is NaN in tests (conftest.py), so a row that nobody writes is seen.
    """
    num_columns = 16384
    num_tokens = CPU_CHUNK_BYTES // (4 * num_columns) + offset
    generator = torch.Generator().manual_seed(6)
    leaf = torch.linspace(0.5, 3.0, num_tokens)[:, None] * torch.randn(num_tokens, num_columns, generator=generator)
    labels = torch.randint(num_columns, (num_tokens,), generator=generator)
    mask = torch.arange(num_tokens) % 5 != 3 if is_masked else torch.ones(num_tokens, dtype=torch.bool)
    leaf.requires_grad_()
    log_probs, entropy = vocab_parallel_log_probs(leaf, labels, loss_mask=mask, with_entropy=True, backend="torch")
    (of_log_probs,) = torch.autograd.grad(log_probs.sum(), leaf, retain_graph=True)
    (of_entropy,) = torch.autograd.grad(entropy.sum(), leaf)
    ones, zeros = mask.double(), torch.zeros(num_tokens)
    truth, exact_entropy, exact = dense_scores(leaf, labels, ones, zeros, 1.0)
    *_, exact_of_entropy = dense_scores(leaf, labels, zeros, ones, 1.0)
    assert exact_entropy.max() - exact_entropy.min() > 1
    torch.testing.assert_close(log_probs.double(), truth * mask, **TOLERANCE)
    torch.testing.assert_close(entropy.double(), exact_entropy * mask, rtol=0, atol=1e-5)  # sums of 16,384 float32 products
    torch.testing.assert_close(of_log_probs.double(), exact, **TOLERANCE)
    torch.testing.assert_close(of_entropy.double(), exact_of_entropy, **TOLERANCE)


@pytest.mark.parametrize("shape", ["columns of a wider tensor", "transposed", "expanded rows"])
def test_strided_logits_give_the_same(backend, shape):
    """A kernel that assumes contiguous rows reads its neighbour's."""
    dense = normal()
    views = {
        "columns of a wider tensor": lambda x: torch.cat([x * 0 + 9, x, x * 0 - 9], 1)[:, V : 2 * V],
        "transposed": lambda x: x.t().contiguous().t(),
        "expanded rows": lambda x: x[:1].expand(8, V),
    }
    device = DEVICES[backend]
    labels, steps = LABELS.to(device), torch.arange(8, device=device)
    source = dense.to(device, copy=True).requires_grad_()
    view = views[shape](source)
    assert not view.is_contiguous()
    (vocab_parallel_log_probs(view, labels, backend=backend) * steps).sum().backward()
    plain = dense.to(device, copy=True).requires_grad_()
    rows = plain[:1].repeat(8, 1) if shape == "expanded rows" else plain
    (vocab_parallel_log_probs(rows, labels, backend=backend) * steps).sum().backward()
    torch.testing.assert_close(source.grad, plain.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inplace_gives_the_same_in_the_callers_own_memory(backend, dtype):
    """FB-33: same values, no second [T, V]; a second backward, or another consumer of the logits, raises.

    A Triton kernel writes behind autograd's back: unless it is told, both would compute from overwritten logits.
    """
    device = DEVICES[backend]
    base = normal().to(device, dtype).requires_grad_()
    labels, options = LABELS.to(device), {"loss_mask": (LABELS != 7).to(device), "with_entropy": True, "backend": backend}
    arrived = []
    logits = base * 1
    logits.register_hook(lambda gradient: arrived.append(gradient.data_ptr()))
    other_consumer = logits.square().sum()
    log_probs, entropy = vocab_parallel_log_probs(logits, labels, inplace=True, **options)
    loss = log_probs.sum() + 0.3 * entropy.sum()
    loss.backward(retain_graph=True)
    assert arrived == [logits.data_ptr()]
    plain = base.detach().clone().requires_grad_()
    log_probs_2, entropy_2 = vocab_parallel_log_probs(plain, labels, **options)
    (log_probs_2.sum() + 0.3 * entropy_2.sum()).backward()
    assert torch.equal(log_probs, log_probs_2) and torch.equal(entropy, entropy_2)
    assert torch.equal(base.grad, plain.grad)
    for late in (loss, other_consumer):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            late.backward(retain_graph=True)


def test_inplace_in_columns_that_do_not_lie_side_by_side(backend):
    """The kernel works on a copy; the callers' memory holds the gradient all the same, and nothing of it is left over."""
    logits = normal().to(DEVICES[backend]).t().contiguous().t().requires_grad_()
    used = logits * 1
    assert used.stride() == (1, 8)
    vocab_parallel_log_probs(used, LABELS.to(used.device), inplace=True, backend=backend).sum().backward()
    torch.testing.assert_close(used.detach(), logits.grad, rtol=0, atol=0)
    torch.testing.assert_close(logits.grad.cpu(), gradients(normal(), LABELS)[1], **TOLERANCE)


@pytest.mark.parametrize("with_entropy", [False, True])
def test_rows_that_are_not_finite_stay_visible(backend, with_entropy):
    """FB-41: NaN, inf and a row of -inf alone; a label that nobody owns, or of probability 0, is -inf, where merged
    with zeros it would silently be -lse. The losses refuse them; masked they are 0, and rows beside them are untouched."""
    logits, labels, bad = normal(), LABELS.clone(), torch.arange(8) < 6
    logits[0, 9], logits[1, 9], logits[2], logits[3, 7] = math.nan, math.inf, -math.inf, -math.inf
    labels[4], labels[5] = -1, 99
    labels[3] = 7
    result = log_probs_of(logits, labels, backend=backend, with_entropy=with_entropy)
    log_probs = result[0] if with_entropy else result
    assert log_probs.isnan().tolist()[:2] == [True] * 2 and log_probs[3:6].tolist() == [-math.inf] * 3
    assert log_probs.isfinite().tolist() == (~bad).tolist()
    assert not with_entropy or result[1].isnan().tolist()[:2] == [True] * 2
    masked = log_probs_of(logits, labels, backend=backend, loss_mask=~bad)
    assert (masked[bad] == 0).all()
    torch.testing.assert_close(masked[~bad], log_probs[~bad], **OTHER_BINARY)
    torch.testing.assert_close(log_probs[~bad].double(), loop_log_probs(logits[~bad].double(), labels[~bad]), **TOLERANCE)


@pytest.mark.parametrize(
    ("dtype", "with_entropy", "inplace"),
    [(torch.bfloat16, False, False), (torch.bfloat16, True, True), (torch.float32, True, False)],
)
def test_nothing_of_the_logits_size_is_made_beside_the_gradient(backend, dtype, with_entropy, inplace):
    """FB-42 on one rank: forward makes chunks on a CPU and vectors in kernels; backward one [T, V], in place not even that."""
    num_columns, num_rows = 16384, CPU_CHUNK_BYTES // (4 * 16384)
    most = 4 * 3 * num_rows if backend == "triton" else num_rows * num_columns
    logits = torch.zeros(3 * num_rows, num_columns, dtype=dtype, device=DEVICES[backend], requires_grad=True)
    used, labels = logits * 1, torch.zeros(3 * num_rows, dtype=torch.int64, device=DEVICES[backend])
    options = {"with_entropy": with_entropy, "inplace": inplace, "backend": backend}
    with LargestNewTensor() as made:
        result = vocab_parallel_log_probs(used, labels, **options)
        assert max(size for size, _ in made.sizes) <= most
        loss = sum(part.sum() for part in result) if with_entropy else result.sum()
        made.sizes.clear()
        torch.autograd.grad(loss, used)
    assert [entry for entry in made.sizes if entry[0] > most] == ([] if inplace else [(logits.numel(), dtype)])
