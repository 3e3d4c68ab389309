"""The kernels of rows, with blocks so small that every part of a row occurs: against float64, and what memory they touch.

What the front entry promises is tested for both backends in test_log_probs.py, their machine code in test_kernel_code.py.
Interpreted on a CPU, compiled on a GPU. Then the kernel that reads a row once, beside the two: when it is chosen, and its factor.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from unittest import mock

import pytest
import torch
from helpers import CLIP, KERNEL_DEVICE, Batch, random_batch, without_needless_clip
from linear_cases import budget, dense_scores, head_batch, on_device, run, worst_error
from loss_backends import counted_launches
from simulated_cuda import simulated_cuda
from test_head import KINDS, fused, options_of
from test_log_probs import TOLERANCE
from torch import Tensor

import megatron_rl.ops.backends as backends
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.layout.groups import SINGLE
from megatron_rl.losses.corrections import CorrectionSettings
from megatron_rl.metrics.step import finalise_metrics
from megatron_rl.ops.backends import (
    GradientConfiguration,
    StatisticsConfiguration,
    VocabShard,
    gradient_like,
    vocab_shard,
)
from megatron_rl.ops.log_probs_torch import merge_shards
from megatron_rl.policy_loss import policy_loss
from megatron_rl.policy_loss.api import PolicyLossOutput

pytest.importorskip("triton")
import megatron_rl.ops.rows_triton as rows_triton
from megatron_rl.ops.log_probs_triton import (
    LIST_BLOCK,
    list_rows,
    logits_gradient_triton,
    merge_shards_triton,
    row_results_triton,
)
from megatron_rl.ops.rows_triton import ROWS_AT_ONCE, OneReadConfiguration, one_read_configuration, unit_gradient

pytestmark = pytest.mark.kernel
IS_INTERPRETED = KERNEL_DEVICE == "cpu"
only_interpreted = pytest.mark.skipif(not IS_INTERPRETED, reason="addresses are seen in the interpreter alone")
# float32: tiles of 4 x 4 columns, two in flight; 16 bits: of 4 x 8. One tile of 32 columns in the gradient.
SMALL = {"configuration": StatisticsConfiguration(lanes=4, tiles=2, num_warps=1)}
SMALL_GRADIENT = {"configuration": GradientConfiguration(block=32, num_warps=1)}
# Linux's flag for memory that counts only where it is touched; Python names it from 3.13 on.
MAP_NORESERVE = 0x4000
# Of a 16-bit gradient: half a unit in the last place, and a whole one where the interpreter cuts bfloat16 off instead of rounding.
GRADIENT_TOLERANCE = {
    torch.float32: {"rtol": 0, "atol": 2e-6},
    torch.float16: {"rtol": 2**-11, "atol": 2e-6},
    torch.bfloat16: {"rtol": 2**-7 if IS_INTERPRETED else 2**-8, "atol": 2e-6},
}


@dataclass
class Accesses:
    """What an interpreted kernel touches: byte addresses; vectors are the rows [*, 16 bytes] of 2-D accesses that are not cut."""

    loads: list = field(default_factory=list)
    stores: list = field(default_factory=list)
    vectors: list = field(default_factory=list)

    def note(self, into: list, pointers, mask) -> None:
        import numpy

        addresses, active = numpy.broadcast_arrays(pointers.data, mask.data)
        into.append(addresses[active].astype(numpy.int64))
        if addresses.ndim == 2:
            self.vectors.append(addresses[active.all(axis=1), 0].astype(numpy.int64))


def counts(accesses: list, memory: torch.Tensor) -> torch.Tensor:
    """How often each element of a contiguous tensor was touched, in its shape."""
    import numpy

    addresses = numpy.concatenate([numpy.empty(0, numpy.int64), *accesses])
    index = (addresses - memory.data_ptr()) // memory.itemsize
    index = index[(index >= 0) & (index < memory.numel())]
    return torch.from_numpy(numpy.bincount(index, minlength=memory.numel())).view(memory.shape)


@contextlib.contextmanager
def recorded_accesses() -> Iterator[Accesses]:
    from triton.runtime.interpreter import interpreter_builder as builder

    accesses = Accesses()
    load, store = builder.create_masked_load, builder.create_masked_store

    def noted_load(pointers, mask, *others):
        accesses.note(accesses.loads, pointers, mask)
        return load(pointers, mask, *others)

    def noted_store(pointers, value, mask, *others):
        accesses.note(accesses.stores, pointers, mask)
        return store(pointers, value, mask, *others)

    with mock.patch.multiple(builder, create_masked_load=noted_load, create_masked_store=noted_store):
        yield accesses


def in_guarded_memory(rows: torch.Tensor, stride: int, offset: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(memory of NaN, the rows as a view of it): row r begins at element offset + r * stride."""
    memory = torch.full((offset + len(rows) * stride + 64,), math.nan, dtype=rows.dtype, device=KERNEL_DEVICE)
    view = memory.as_strided(rows.shape, (stride, 1), offset)
    view.copy_(rows)
    return memory, view


def random_rows(num_rows: int, width: int, dtype=torch.float32, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(num_rows, width, generator=generator)).to(dtype)
    return logits, torch.randint(width, (num_rows,), generator=generator)


def forward_and_gradient(rows, labels, mask, shard, c, e=None, *, out=None, forward=SMALL, backward=SMALL_GRADIENT):
    """(what the forward kernels give, the gradient), the entropy where it has coefficients."""
    result = row_results_triton(rows, labels, mask, shard, SINGLE, with_entropy=e is not None, **forward)
    vectors = (mask, result.maximum, result.total, result.entropy, c, e, shard)
    return result, logits_gradient_triton(rows, labels, *vectors, out=gradient_like(rows) if out is None else out, **backward)


# Tiles are 32 columns of float32 and 64 of 16 bits in the statistics, 32 in the gradient.
SHAPES = [
    pytest.param(64, 64, 0, 1, id="whole tiles alone"),
    pytest.param(31, 31, 0, 1, id="one below a tile"),
    pytest.param(63, 63, 0, 2, id="one below two tiles, split"),
    pytest.param(65, 65, 0, 2, id="one above two tiles, split"),
    pytest.param(40, 40, 0, 1, id="a multiple of 8 and not of 16"),
    pytest.param(1, 1, 0, 1, id="one column"),
    pytest.param(5, 5, 0, 1, id="rows that end before the first aligned column"),
    pytest.param(97, 107, 5, 1, id="a misaligned address and an odd stride"),
    pytest.param(130, 131, 1, 3, id="the same, split in three"),
    pytest.param(171, 171, 2, 1, id="more padding than a tile"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("width", "stride", "offset", "splits"), SHAPES)
def test_every_part_of_a_row_is_read_and_written_once(width, stride, offset, splits, dtype):
    """Values and gradients against float64 for v around block edges, and each address that the kernels touch.

    The last three columns (120 of the widest) are NaN past the true size; so is all memory around the rows.
    """
    real = max(width - (120 if width == 171 else 3), 1)
    logits, labels = random_rows(2, width, dtype)
    labels = (labels % real).to(KERNEL_DEVICE)
    logits[:, real:] = math.nan
    memory, rows = in_guarded_memory(logits, stride, offset)
    c, e = torch.tensor([0.7, -1.3], device=KERNEL_DEVICE), torch.tensor([0.2, 0.0], device=KERNEL_DEVICE)
    shard = VocabShard(0, real, 1 / 0.7, real)
    log_probs, entropy, gradient = dense_scores(logits[:, :real], labels, c, e, 0.7)
    forward = {"configuration": StatisticsConfiguration(4, 2, 1, splits)}
    backward = {"configuration": GradientConfiguration(32, 1, splits)}
    with recorded_accesses() if IS_INTERPRETED else contextlib.nullcontext() as reading:
        result = row_results_triton(rows, labels, None, shard, SINGLE, with_entropy=True, **forward)
    torch.testing.assert_close(result.log_probs.cpu().double(), log_probs, rtol=0, atol=4e-6)  # logits up to 10, twice TOLERANCE
    torch.testing.assert_close(result.entropy.cpu().double(), entropy, rtol=0, atol=4e-6)
    arguments = (rows, labels, None, result.maximum, result.total, result.entropy, c, e, shard)
    apart = gradient_like(rows)
    logits_gradient_triton(*arguments, out=apart, **backward)
    torch.testing.assert_close(apart[:, :real].double().cpu(), gradient, **GRADIENT_TOLERANCE[dtype])
    assert (apart[:, real:] == 0).all()
    with recorded_accesses() if IS_INTERPRETED else contextlib.nullcontext() as writing:
        logits_gradient_triton(*arguments, out=rows, **backward)
    assert torch.equal(rows, apart), "in place and apart are the same numbers"
    inside = torch.zeros(memory.shape, dtype=torch.bool)
    inside.as_strided(rows.shape, rows.stride(), offset)[:] = True
    assert memory.cpu()[~inside].isnan().all()
    if IS_INTERPRETED:
        once = inside.long()
        once.as_strided(rows.shape, rows.stride(), offset)[:, real:] = 0
        # The label's logit is read a second time.
        once.as_strided(rows.shape, rows.stride(), offset)[torch.arange(2), labels] += 1
        assert torch.equal(counts(reading.loads, memory), once)
        assert torch.equal(counts(writing.stores, memory), inside.long())
        assert (counts(writing.loads, memory) <= inside).all()
        for address in (*reading.vectors, *writing.vectors):
            assert (address % 16 == 0)[address >= memory.data_ptr()].all(), "each whole vector is one aligned 128-bit access"


@only_interpreted
def test_rows_without_a_gradient_are_never_read():
    """FB-56: masked rows in both directions, rows whose coefficients are 0 in backward: written, and none of their bytes loaded."""
    logits, labels = random_rows(6, 70)
    mask = torch.tensor([True, False, True, True, False, True])
    logits[~mask], labels[~mask] = math.nan, -100
    c = torch.tensor([1.0, math.nan, 0.0, -2.0, math.inf, 0.0])
    e = torch.tensor([0.5, math.nan, 0.0, 0.0, 1.0, 0.25])
    shard = VocabShard(0, 70, 1.0, 70)
    with recorded_accesses() as accesses:
        result = row_results_triton(logits, labels, mask, shard, SINGLE, with_entropy=True, **SMALL)
    assert (counts(accesses.loads, logits)[mask] >= 1).all()
    assert (counts(accesses.loads, logits)[~mask] == 0).all() and (counts(accesses.loads, labels)[~mask] == 0).all()
    assert (result.log_probs[~mask] == 0).all() and (result.entropy[~mask] == 0).all()
    out = torch.full_like(logits, math.nan)
    with recorded_accesses() as accesses:
        logits_gradient_triton(
            *(logits, labels, mask, result.maximum, result.total, result.entropy, c, e, shard), out=out, **SMALL_GRADIENT
        )
    needed = mask & ((c != 0) | (e != 0))
    assert needed.tolist() == [True, False, False, True, False, True]
    for vector in (logits, labels, result.maximum, result.total):
        assert (counts(accesses.loads, vector)[~needed] == 0).all()
    assert (out[~needed] == 0).all() and out.isfinite().all()
    _, _, gradient = dense_scores(logits[needed], labels[needed], c[needed], e[needed], 1.0)
    torch.testing.assert_close(out[needed].double(), gradient, **TOLERANCE)


def test_the_merge_of_more_rows_than_two_programs_take_is_that_of_torch():
    parts = torch.randn(5, 257, 4, generator=torch.Generator().manual_seed(1))
    parts[..., 0] *= 40  # parts that are far apart
    parts[..., 1] = parts[..., 1].abs() + 0.1
    active, shard = torch.arange(257) % 3 > 0, VocabShard(0, 1, 1 / 0.9, 1)
    got = merge_shards_triton(parts.to(KERNEL_DEVICE), active.to(KERNEL_DEVICE), shard)
    for ours, theirs in zip(got, merge_shards(parts, active, shard), strict=True):
        torch.testing.assert_close(ours.cpu()[active], theirs[active], rtol=2e-6, atol=1e-5)  # log-probabilities up to 200
    assert all((ours.cpu()[~active] == 0).all() for ours in got[2:])


@pytest.mark.parametrize("with_entropy", [False, True])
def test_a_nan_logit_is_visible_wherever_it_stands(with_entropy):
    """Head, whole tiles, tail and last columns each have code of their own, and a maximum that drops NaN."""
    columns = [0, 6, 7, 8, 39, 40, 60, 72, 74]
    logits, labels = random_rows(10, 75)
    logits[torch.arange(9), columns] = math.nan
    _, rows = in_guarded_memory(logits, 75, 1)
    labels = labels.to(KERNEL_DEVICE)
    ones = torch.ones(10, device=KERNEL_DEVICE)
    result, gradient = forward_and_gradient(rows, labels, None, VocabShard(0, 75, 1.0, 75), ones, ones if with_entropy else None)
    assert result.log_probs.isnan().tolist() == [True] * 9 + [False]
    assert gradient.isnan().all(1).tolist() == [True] * 9 + [False]


@pytest.mark.parametrize("kind", ["first columns", "a whole split", "all but the label"])
def test_minus_infinity_columns_have_probability_0(kind):
    """A tile, a lane or a split without a single finite logit gives no inf - inf; its gradient is exactly 0."""
    columns = {"first columns": slice(0, 50), "a whole split": slice(32, 64)}
    logits, _ = random_rows(2, 130)
    logits[:, columns.get(kind, slice(0, 129))] = -math.inf
    real = logits[0].isfinite()
    labels = torch.tensor([129, 129])
    ones = torch.ones(2)
    position = real.cumsum(0) - 1
    log_probs, entropy, gradient = dense_scores(logits[:, real], position[labels], ones, ones, 1.0)
    there = [tensor.to(KERNEL_DEVICE) for tensor in (logits, labels)]
    ones = ones.to(KERNEL_DEVICE)
    forward = {"configuration": StatisticsConfiguration(4, 2, 1, 4)}
    result, out = forward_and_gradient(*there, None, VocabShard(0, 130, 1.0, 130), ones, ones, forward=forward)
    torch.testing.assert_close(result.log_probs.cpu().double(), log_probs, rtol=0, atol=4e-6)  # logits up to 10, twice TOLERANCE
    torch.testing.assert_close(result.entropy.cpu().double(), entropy, rtol=0, atol=4e-6)
    out = out.cpu()
    assert (out[:, ~real] == 0).all()
    torch.testing.assert_close(out[:, real].double(), gradient, **TOLERANCE)


def test_rows_lie_beyond_two_to_the_31_elements():
    """FB-81: row * stride in 32 bits would wrap around, and a listed row is 32 bits wide; the memory between is never touched."""
    stride = 2**30 + 5
    if IS_INTERPRETED:
        reserved = mmap.mmap(-1, 2 * (3 * stride + 100), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
        memory = torch.frombuffer(reserved, dtype=torch.float16)
    else:
        needed, (free, _) = 2 * (3 * stride + 100), torch.cuda.mem_get_info()
        if free < needed:
            pytest.skip(f"needs {needed >> 30} GiB of the GPU's memory, and other processes leave {free / 2**30:.1f}")
        memory = torch.empty(3 * stride + 100, dtype=torch.float16, device=KERNEL_DEVICE)
    rows = memory.as_strided((4, 50), (stride, 1))
    logits, labels = random_rows(4, 50, torch.float16)
    rows.copy_(logits)
    labels, ones = labels.to(KERNEL_DEVICE), torch.ones(4, device=KERNEL_DEVICE)
    log_probs, _, gradient = dense_scores(logits, labels, ones, 0 * ones, 1.0)
    shard = VocabShard(0, 50, 1.0, 50)
    result, _ = forward_and_gradient(rows, labels, ones > 0, shard, ones, out=rows)
    torch.testing.assert_close(result.log_probs.cpu().double(), log_probs, rtol=0, atol=4e-6)  # logits up to 10, twice TOLERANCE
    torch.testing.assert_close(rows.cpu().double(), gradient, **GRADIENT_TOLERANCE[torch.float16])


@pytest.mark.parametrize("num_rows", [1, LIST_BLOCK - 1, LIST_BLOCK, LIST_BLOCK + 1, 2 * LIST_BLOCK + 5])
def test_rows_are_listed_unmasked_first_and_each_in_order(num_rows):
    for mask in (torch.arange(num_rows) % 7 < 3, torch.ones(num_rows).bool(), torch.zeros(num_rows).bool()):
        order, num_active = list_rows(mask.to(KERNEL_DEVICE))
        assert order.tolist() == [*mask.nonzero()[:, 0].tolist(), *(~mask).nonzero()[:, 0].tolist()]
        assert num_active.tolist() == [int(mask.sum())]


@pytest.mark.parametrize("kind", ["bfloat16 rows", "misaligned rows", "columns apart"])
def test_the_gradient_goes_into_any_tensor(kind):
    """The fused head keeps float32 logits and a bfloat16 gradient. Rows that begin elsewhere modulo 8 are copied once."""
    logits, labels = random_rows(3, 70)
    c = torch.tensor([1.0, -0.5, 0.0])
    wanted = dense_scores(logits, labels, c, 0 * c, 1.0)[2]
    out = {
        "bfloat16 rows": torch.full((3, 70), math.nan, dtype=torch.bfloat16, device=KERNEL_DEVICE),
        "misaligned rows": in_guarded_memory(logits, 75, 3)[1],
        "columns apart": torch.full((70, 3), math.nan, device=KERNEL_DEVICE).t(),
    }[kind]
    logits, labels, c = (tensor.to(KERNEL_DEVICE) for tensor in (logits, labels, c))
    shard = VocabShard(0, 70, 1.0, 70)
    result = row_results_triton(logits, labels, None, shard, SINGLE, with_entropy=False, **SMALL)
    arguments = (logits, labels, None, result.maximum, result.total, result.entropy, c, None, shard)
    assert logits_gradient_triton(*arguments, out=out, **SMALL_GRADIENT) is out
    torch.testing.assert_close(out.double().cpu(), wanted, **GRADIENT_TOLERANCE[out.dtype])


# The kernel that reads a row once

WIDTH, REAL, TAIL = 77, 70, 2  # stored columns, those that are no padding, tokens after the last document
# Lanes and tiles of the statistics as in SMALL, blocks as in SMALL_GRADIENT. 77 columns have full tiles, a masked one and edges.
FEW_LANES = OneReadConfiguration(lanes=4, tiles=2, block=32, num_warps=1)
# float32: sums of 70 exponentials in another order. bfloat16: a unit in the last place of 1 / 0.7; the interpreter truncates.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2**-7}


@pytest.fixture(autouse=True)
def one_processor(monkeypatch):
    """A few rows are two waves, as in the interpreter: a GPU's processors would leave them to the two kernels."""
    for module in (backends, rows_triton):
        monkeypatch.setattr(module, "num_processors", lambda device: backends.PROCESSORS_OF_A_CPU)


@contextlib.contextmanager
def few_lanes(configuration: OneReadConfiguration | None = FEW_LANES) -> Iterator[list[str]]:
    """Any shape fits the cache, and both paths have the same lanes. Gives the names of the kernels that are launched."""
    with (
        mock.patch.object(rows_triton, "one_read_configuration", lambda *sizes: configuration),
        mock.patch.dict(row_results_triton.__kwdefaults__, SMALL),
        mock.patch.dict(logits_gradient_triton.__kwdefaults__, SMALL_GRADIENT),
        counted_launches() as launches,
    ):
        yield launches


@pytest.mark.parametrize(
    ("stride", "offset", "dtype", "into", "with_entropy"),
    [
        (WIDTH, 0, torch.float32, None, True),
        (WIDTH, 0, torch.bfloat16, None, False),
        (96, 0, torch.bfloat16, None, True),
        (96, 5, torch.bfloat16, None, True),
        (96, 0, torch.float32, torch.bfloat16, False),
    ],
)
def test_a_unit_gradient_is_that_of_a_log_probability_in_place_and_beside(stride, offset, dtype, into, with_entropy):
    """NaN stands behind the vocabulary and between the rows."""
    values, labels = random_rows(13, WIDTH, dtype, seed=3)
    values[:, REAL:] = math.nan
    memory, rows = in_guarded_memory(values, stride, offset)
    labels, before, logits = (labels % REAL).to(KERNEL_DEVICE), memory.clone(), rows.clone()
    out = rows if into is None else torch.full((13, 96), math.nan, dtype=into, device=KERNEL_DEVICE)[:, :WIDTH]
    with few_lanes():
        result = unit_gradient(rows, labels, vocab_shard(WIDTH, 0.7, REAL, SINGLE), with_entropy=with_entropy, out=out)
    log_probs, entropy, gradient = dense_scores(logits[:, :REAL], labels, torch.ones(13), torch.zeros(13), 0.7)
    assert torch.allclose(result.log_probs.cpu().double(), log_probs, rtol=0, atol=5e-6)
    assert torch.allclose(result.entropy.cpu().double(), entropy if with_entropy else 0 * entropy, rtol=0, atol=5e-6)
    assert torch.allclose(out[:, :REAL].cpu().double(), gradient, rtol=0, atol=TOLERANCES[out.dtype])
    assert not out[:, REAL:].any()
    if into is None:
        rows.copy_(logits)
    assert torch.equal(memory.nan_to_num(7.0), before.nan_to_num(7.0)), "it wrote beside its rows"


# In the fused head


@pytest.mark.parametrize(
    ("name", "rows", "launched", "options"),
    [
        pytest.param("grpo", 1000, (1, 0, 0), {}, id="row-by-row"),
        pytest.param("gspo", 1000, (1, 0, 0), {}, id="in-chunk"),
        pytest.param("gspo", 9, (2, 0, 0), {}, id="scale-last: one document in two chunks"),
        pytest.param("gspo with every term", 1000, (0, 1, 1), {}, id="an entropy term does not commute"),
        # KL: the last chunk is read once, each of the others at the statistics and at the gradient.
        pytest.param("gspo with every term", 9, (1, 1, 1), {"entropy_coefficient": 0.0, "metrics": "basic"}, id="two-pass"),
    ],
)
def test_each_plan_reads_its_logits_once(name, rows, launched, options):
    case = head_batch([36], seed=8).to(torch.float32)
    moved, there = on_device(case, options_of(name, case) | options, KERNEL_DEVICE)
    with counted_launches() as launches:
        run(fused(KINDS[name][0]), moved, backend="triton", max_logits_bytes=budget(case, rows), **there)
    kernels = ("one_read_kernel", "row_statistics_kernel", "logits_gradient_kernel")
    assert tuple(map(launches.count, kernels)) == launched, launches


@pytest.mark.parametrize(("name", "rows"), [("gspo", 9), ("grpo", 1000)])
def test_a_coefficient_after_the_product_of_16_bits_gives_the_gradient_of_one_before(name, rows):
    """The limit of c before the product, which has one rounding less. float32: tests/test_generated_steps.py."""
    case = head_batch(seed=8).to(torch.bfloat16)
    exact = run(fused(KINDS[name][0]), case.to(torch.float64), backend="torch", **options_of(name, case.to(torch.float64)))
    moved, there = on_device(case, options_of(name, case), KERNEL_DEVICE)
    got = run(fused(KINDS[name][0]), moved, backend="triton", max_logits_bytes=budget(case, rows), **there)
    errors = worst_error(got, exact)
    assert errors["hidden"] < 2**-6 and errors["weight"] < 2**-6, errors


# In a loss of which a factor is declared

SCALE = 3.0
LENGTHS, NUM_MASKED = [4, 0, 5, 1, 2], (1, 0, 2, 0, 2)  # the last document is masked altogether


def make_batch(dtype: torch.dtype = torch.float32) -> Batch:
    """Logits with padded columns and tokens that hold NaN where nothing may be read; float32 vectors."""
    batch = random_batch([*LENGTHS, TAIL], vocab_size=REAL, num_masked=(*NUM_MASKED, TAIL))
    logits = torch.full((sum(LENGTHS) + TAIL, WIDTH), math.nan, dtype=torch.float64)
    logits[:, :REAL] = 2 * batch.logits
    logits[~batch.loss_mask] = math.nan
    batch = replace(batch, logits=logits.to(dtype), documents=batch.documents[:-1])
    numbers = {"old_log_probs": batch.old_log_probs.float(), "advantages": batch.advantages[:-1].float()}
    batch = replace(batch, token_weights=batch.token_weights[:-1].float(), **numbers)
    names = ("logits", "labels", "old_log_probs", "advantages", "loss_mask")
    return replace(batch, **{name: getattr(batch, name).to(KERNEL_DEVICE) for name in names})


def run_loss(
    kind: str, batch: Batch, *, loss_scale: float | Tensor | None = SCALE, backend: str = "triton", **options
) -> tuple[PolicyLossOutput, Tensor]:
    """(the output, the gradient), after a backward with SCALE."""
    leaf = batch.logits.clone().requires_grad_()
    asked = {"temperature": 0.7, "vocab_size": REAL, "backend": backend, "loss_scale": loss_scale} | options
    output = without_needless_clip(policy_loss, kind, leaf * 1, *batch.arguments(), **CLIP, **asked)
    (output.loss * SCALE).backward()
    return output, leaf.grad


@pytest.mark.parametrize(("backend", "loss_scale"), [("torch", None), ("triton", None), ("triton", SCALE)])
def test_without_old_log_probs_the_ratio_is_exactly_1(backend, loss_scale):
    """Also in kernels of one read and of two, which add up a row in other orders."""
    for kind in ("grpo", "cispo", "topr", "gspo", "gmpo"):
        batch = replace(make_batch(), old_log_probs=None)
        found = finalise_metrics(run_loss(kind, batch, backend=backend, loss_scale=loss_scale, metrics="basic")[0].metrics)
        assert found["policy/ratio_new_old_sum"] == found["policy/ratio_new_old_squared_sum"], kind
        assert (found["policy/effective_sample_size"], found["policy/kl_new_old"]) == (1.0, 0.0), kind
        assert found["policy/ratio_new_old"] == pytest.approx(1.0, abs=1e-15), kind  # a mean of ones over float64 weights
        assert found["policy/clipped_ratio_fraction"] == 0.0 and found["policy/old_logprobs"] == found["policy/new_logprobs"], kind


# A row of 256 logits with the lanes of each shipped program, beside K1's 128: sums of 256 float32 numbers in another order.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_warps", ROWS_AT_ONCE)
def test_more_lanes_change_the_last_bits_alone(num_warps, dtype):
    batch = make_batch(dtype)
    batch = replace(batch, logits=torch.cat([batch.logits[:, :REAL].nan_to_num().repeat(1, 60)], 1))
    lanes = 32 * num_warps
    with few_lanes(OneReadConfiguration(lanes, 2, 16 * lanes, num_warps)):
        found, gradient = run_loss("grpo", batch, vocab_size=None)
    wanted, two_kernels = run_loss("grpo", batch, vocab_size=None, loss_scale=None)
    torch.testing.assert_close(found.log_probs, wanted.log_probs, rtol=0, atol=2e-6)
    torch.testing.assert_close(gradient, two_kernels, rtol=5e-6 if dtype == torch.float32 else 2**-7, atol=1e-9)
    torch.testing.assert_close(found.loss, wanted.loss, rtol=2e-6, atol=1e-6)


@only_interpreted
@pytest.mark.parametrize("inplace", [True, False])
def test_a_row_is_read_twice_and_written_once_and_a_masked_one_only_written(inplace):
    """The second read comes from the cache. Nothing beside the rows is touched."""
    batch, stride, offset = make_batch(), WIDTH + 6, 5
    memory, view = in_guarded_memory(batch.logits, stride, offset)
    with few_lanes() as launches, recorded_accesses() as accesses:
        leaf = view.requires_grad_()
        output = policy_loss(
            "grpo", leaf, *batch.arguments(), backend="triton", vocab_size=REAL, loss_scale=SCALE, inplace=inplace, tp_group=SINGLE
        )
    assert launches[0] == "one_read_kernel"
    reads = counts(accesses.loads, memory).as_strided(view.shape, (stride, 1), offset)
    live, label = batch.loss_mask, batch.labels
    of_label = torch.zeros_like(reads).scatter_(1, label[:, None], 1)  # the log-probability's own load
    has_gradient = reads[:, 0] == 2
    assert torch.equal(reads[~live], torch.zeros_like(reads[~live]))
    # A vector at the end may hold padding: it is read, and not used. A clipped row is read once.
    assert torch.equal((reads - of_label)[live & has_gradient][:, :REAL], torch.full_like(reads, 2)[live & has_gradient][:, :REAL])
    assert (reads - of_label)[live][:, :REAL].min() >= 1 and reads[live][:, :REAL].max() <= 3 and (live & has_gradient).any()
    written = counts(accesses.stores, memory)
    expected = torch.zeros_like(written)
    expected.as_strided(view.shape, (stride, 1), offset).fill_(int(inplace))
    assert torch.equal(written, expected)
    output.loss.mul(SCALE).backward()
    assert leaf.grad[~live].eq(0).all() and torch.isfinite(leaf.grad).all()


def test_a_value_that_is_not_finite_is_found_as_after_two_kernels(monkeypatch):
    """On a CPU it raises; where nobody looks, as on a GPU, counts and NaN in the gradient are those of two kernels."""
    batch = make_batch()
    batch.logits[1, 3], batch.old_log_probs[6], batch.labels[8] = math.nan, math.inf, REAL
    if IS_INTERPRETED:
        with few_lanes(), pytest.raises(DataError, match="document 0 of the micro-batch has 1 unmasked tokens"):
            run_loss("cispo", batch)
        monkeypatch.setattr("megatron_rl.policy_loss.api.refuse_bad_data", lambda *arguments: None)
    with few_lanes():
        found, gradient = run_loss("cispo", batch)
        wanted, two_kernels = run_loss("cispo", batch, loss_scale=None)
    assert found.num_nonfinite.tolist() == wanted.num_nonfinite.tolist() == [1, 0, 2, 0, 0]
    torch.testing.assert_close(gradient, two_kernels, rtol=0, atol=0, equal_nan=True)
    assert gradient[1].isnan().any()


# What backward delivers is checked by both paths and by both backends: no shape decides whether a wrong factor is seen.
@pytest.mark.parametrize(
    ("backend", "is_one_read"), [("triton", True), ("triton", False), ("torch", False)], ids=["one read", "two kernels", "torch"]
)
@pytest.mark.skipif(not IS_INTERPRETED, reason="on a GPU a wrong factor is NaN: the test below")
def test_another_factor_than_the_announced_one_is_refused(backend, is_one_read):
    with few_lanes(FEW_LANES if is_one_read else None) as launches:
        batch = make_batch()
        with pytest.raises(ConfigError, match="loss_scale=2.0 was declared and backward delivers 3.0"):
            run_loss("grpo", batch, loss_scale=2.0, backend=backend)
        leaf = batch.logits.clone().requires_grad_()
        output = policy_loss("grpo", leaf, *batch.arguments(), backend=backend, vocab_size=REAL, loss_scale=SCALE)
        for _ in range(2 if is_one_read else 1):
            with pytest.raises(ConfigError, match="a second backward") if leaf.grad is not None else contextlib.nullcontext():
                (output.loss * SCALE).backward(retain_graph=True)
    assert ("one_read_kernel" in launches) == is_one_read


@pytest.mark.skipif(not IS_INTERPRETED, reason="there is a GPU")
@pytest.mark.parametrize("is_one_read", [True, False])
@pytest.mark.parametrize("declared", [SCALE, 2.0])
def test_on_a_gpu_another_factor_makes_the_gradient_nan_and_nobody_waits(is_one_read, declared):
    batch = make_batch()
    with few_lanes(FEW_LANES if is_one_read else None), simulated_cuda() as seen:
        leaf = batch.logits.to("cuda").requires_grad_()
        tensors = [tensor.to("cuda") for tensor in batch.arguments()]
        seen.clear()
        output = policy_loss("grpo", leaf, *tensors, vocab_size=REAL, loss_scale=declared, tp_group=SINGLE, cp_group=SINGLE)
        (output.loss * SCALE).backward()
        assert seen == []
        gradient = leaf.grad.cpu()
    assert gradient[batch.loss_mask].isnan().any() == (declared != SCALE)
    if declared != SCALE:  # each row that another layer multiplies becomes NaN
        assert gradient[batch.loss_mask & gradient.ne(0).any(1)].isnan().any(1).all()


CORRECTED = {
    "rollout_log_probs": torch.linspace(-3.0, -2.0, sum(LENGTHS) + TAIL, device=KERNEL_DEVICE),
    "correction": CorrectionSettings(kind="tis", high=1.1, level="token"),
}


# (loss, whether with a correction, a change of the batch): what one kernel cannot know.
@pytest.mark.parametrize(
    ("kind", "is_corrected", "change", "is_one_read"),
    [
        pytest.param("grpo", False, {}, True, id="a loss of tokens"),
        pytest.param("gspo", False, {"old_log_probs": None}, True, id="a sequence loss on-policy"),
        pytest.param("gspo", False, {}, False, id="a sequence loss off-policy"),
        # A row's entropy is known when it has been read, which is after the loss's derivative was wanted.
        pytest.param("own_heeding", False, {}, False, id="a loss that needs entropies"),
        pytest.param("grpo", True, {"old_log_probs": None}, False, id="weights of the policy in training"),
        pytest.param("gspo", True, {"old_log_probs": None}, False, id="a sequence loss with a correction"),
    ],
)
def test_one_kernel_is_chosen_where_the_coefficients_are_known(kind, is_corrected, change, is_one_read, own_losses):
    batch = replace(make_batch(), **change)
    with few_lanes() as launches:
        run_loss(kind, batch, **(CORRECTED if is_corrected else {}))
    assert ("one_read_kernel" in launches) == is_one_read == ("row_statistics_kernel" not in launches)


def test_two_kernels_stay_without_a_gradient_a_factor_or_adjacent_columns():
    batch = make_batch()
    logits = batch.logits.clone()
    options = {"backend": "triton", "vocab_size": REAL, "loss_scale": SCALE, "inplace": True}
    with few_lanes() as launches:
        policy_loss("grpo", logits, *batch.arguments(), **options)
        with torch.no_grad():
            policy_loss("grpo", logits.requires_grad_(), *batch.arguments(), **options)
        policy_loss("grpo", logits, *batch.arguments(), **options | {"loss_scale": None})
        strided = logits.detach().t().contiguous().t().requires_grad_()
        policy_loss("grpo", strided, *batch.arguments(), **options | {"inplace": False})
    assert "one_read_kernel" not in launches
    assert torch.equal(logits.detach().nan_to_num(), batch.logits.nan_to_num())  # the in-place write waits for a backward


# 132 multiprocessors and 50 MiB. (rows, columns, bytes of a logit, warps)
@pytest.mark.parametrize(
    ("num_rows", "num_columns", "itemsize", "num_warps"),
    [
        pytest.param(8192, 151936, 2, 32, id="Qwen in bf16: a row an SM"),
        pytest.param(8192, 151936, 4, 32, id="Qwen in float32: the rows do not fit, and half of them is still found"),
        pytest.param(8192, 52958, 2, 16, id="the widest bf16 rows of three an SM"),
        pytest.param(8192, 25600, 2, 8, id="a short vocabulary: six rows"),
        pytest.param(263, 151936, 2, None, id="fewer than two waves"),
        pytest.param(300, 25600, 2, 32, id="too few rows for six at once"),
    ],
)
def test_shape_and_cache_choose_the_program(monkeypatch, num_rows, num_columns, itemsize, num_warps):
    monkeypatch.setattr(rows_triton, "num_processors", lambda device: 132)
    monkeypatch.setattr(rows_triton, "cache_bytes", lambda device: 50 << 20)
    found = one_read_configuration(num_rows, num_columns * itemsize, torch.device("cuda"))
    assert (None if found is None else found.num_warps) == num_warps
