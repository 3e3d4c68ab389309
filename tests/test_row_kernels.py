"""The kernels of rows, with blocks so small that every part of a row occurs: against float64, and what memory they touch.

What the front door promises is tested for both backends in test_log_probs.py, their machine code in test_kernel_code.py.
Interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Iterator
from dataclasses import dataclass, field
from unittest import mock

import pytest
import torch
from helpers import KERNEL_DEVICE
from linear_cases import budget, dense_scores, head_batch, on_device, run, worst_error
from loss_backends import counted_launches
from test_head import KINDS, fused, options_of
from test_log_probs import TOLERANCE

import megatron_rl.ops.backends as backends
from megatron_rl.layout.groups import SINGLE
from megatron_rl.ops.backends import (
    GradientConfiguration,
    OneReadConfiguration,
    StatisticsConfiguration,
    VocabShard,
    flat_rows,
    gradient_like,
    split_rows,
    vocab_shard,
)
from megatron_rl.ops.log_probs_torch import merge_shards

pytest.importorskip("triton")
import megatron_rl.ops.rows_triton as rows_triton
from megatron_rl.ops.log_probs_triton import (
    LIST_BLOCK,
    list_rows,
    logits_gradient_triton,
    merge_shards_triton,
    row_results_triton,
)
from megatron_rl.ops.rows_triton import unit_gradient

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
    pytest.param(33, 33, 0, 1, id="one above a tile"),
    pytest.param(63, 63, 0, 2, id="one below two tiles, split"),
    pytest.param(65, 65, 0, 2, id="one above two tiles, split"),
    pytest.param(40, 40, 0, 1, id="a multiple of 8 and not of 16"),
    pytest.param(1, 1, 0, 1, id="one column"),
    pytest.param(5, 5, 0, 1, id="rows that end before the first aligned column"),
    pytest.param(48, 48, 3, 1, id="a misaligned address"),
    pytest.param(97, 107, 5, 1, id="a misaligned address and an odd stride"),
    pytest.param(130, 131, 1, 3, id="the same, split in three"),
    pytest.param(90, 96, 0, 2, id="aligned rows of a ragged width"),
    pytest.param(171, 171, 2, 1, id="more padding than a tile"),
]


# float32 meets each shape; 16 bits, with tiles of 64 columns and other alignments, the borders of theirs.
SIXTEEN_BITS = [torch.bfloat16, torch.float16]
SHAPES_AND_DTYPES = [
    pytest.param(*shape.values, dtype, id=f"{shape.id}, {dtype}")
    for number, shape in enumerate(SHAPES)
    for dtype in (torch.float32, SIXTEEN_BITS[number % 2])
    if dtype == torch.float32 or shape.values[0] in (1, 63, 64, 65, 48, 97, 130)
]


@pytest.mark.parametrize(("width", "stride", "offset", "splits", "dtype"), SHAPES_AND_DTYPES)
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


def test_the_merge_of_more_rows_than_two_programs_take_is_the_twins():
    """Parts that are far apart."""
    generator = torch.Generator().manual_seed(1)
    parts = torch.randn(5, 257, 4, generator=generator)
    parts[..., 0] *= 40
    parts[..., 1] = parts[..., 1].abs() + 0.1
    active, shard = torch.arange(257) % 3 > 0, VocabShard(0, 1, 1 / 0.9, 1)
    want = merge_shards(parts, active, shard)
    got = merge_shards_triton(parts.to(KERNEL_DEVICE), active.to(KERNEL_DEVICE), shard)
    for ours, theirs in zip(got, want, strict=True):
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


@pytest.mark.parametrize("has_mask", [False, True])
def test_rows_lie_beyond_two_to_the_31_elements(has_mask):
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
    shard, mask = VocabShard(0, 50, 1.0, 50), (ones > 0 if has_mask else None)
    result, _ = forward_and_gradient(rows, labels, mask, shard, ones, out=rows)
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


@only_interpreted
def test_wrapped_memory_that_begins_at_any_address_is_read_right():
    """The address cannot be moved down into memory that is not ours: slower on a GPU, and the same numbers."""
    logits, labels = random_rows(3, 50, torch.bfloat16)
    memory = bytearray(2 * logits.numel() + 64)
    start = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % 16 + 6
    rows = torch.frombuffer(memory, dtype=torch.bfloat16, offset=start, count=logits.numel()).view(3, 50)
    rows.copy_(logits)
    assert rows.data_ptr() % 16 == 6 and flat_rows(rows).shift == 0
    wanted = dense_scores(logits, labels, torch.ones(3), torch.zeros(3), 1.0)[0]
    result = row_results_triton(rows, labels, None, VocabShard(0, 50, 1.0, 50), SINGLE, with_entropy=False, **SMALL)
    torch.testing.assert_close(result.log_probs.double(), wanted, rtol=0, atol=4e-6)  # logits up to 10, twice TOLERANCE


@pytest.mark.parametrize(
    ("stride", "offset", "expected_stride"),
    [(96, 0, 96), (104, 16, 96), (97, 0, 97), (100, 3, 100)],
    ids=["contiguous", "aligned rows", "rows 1 apart", "rows 4 apart, shifted"],
)
def test_a_gradient_has_the_logits_aligned_columns(stride, offset, expected_stride):
    rows = torch.empty(offset + 5 * stride, dtype=torch.bfloat16).as_strided((5, 96), (stride, 1), offset)
    gradient = gradient_like(rows)
    assert flat_rows(gradient).is_aligned_with(flat_rows(rows))
    assert gradient.shape == rows.shape and gradient.dtype == rows.dtype
    assert gradient.stride() == (expected_stride, 1) and gradient.storage_offset() == offset % 8


@pytest.mark.parametrize(
    ("num_rows", "num_columns", "splits", "expected_splits"),
    [
        (4096, 151936, None, (1, 153600)),  # the rows fill the device
        (512, 151936, None, (3, 51200)),  # 8 x 132 / 512 = 2.06
        (16, 151936, None, (15, 10240)),  # 66 wanted; at least 4 tiles each, at most 18: 74.2 tiles / 18 = 4.1, so 5 each
        (16, 4096, None, (1, 4096)),
        (1, 100, None, (1, 2048)),
        (16, 100, 4, (1, 2048)),  # columns for one tile
        (0, 0, None, (1, 2048)),
    ],
)
def test_few_rows_are_split_over_the_device(monkeypatch, num_rows, num_columns, splits, expected_splits):
    """By hand, for tiles of 2048 columns and 132 SMs. A split is a multiple of the tile and none is empty."""
    monkeypatch.setattr("megatron_rl.ops.backends.num_processors", lambda device: 132)
    got = split_rows(num_rows, num_columns, 2048, splits, torch.device("cpu"))
    assert got == expected_splits
    assert (got[0] - 1) * got[1] < max(num_columns, 1) <= got[0] * got[1]


# Lanes and tiles of the statistics as in SMALL, blocks as in SMALL_GRADIENT: the kernel then has the numbers of the two kernels.
SAME_LANES = OneReadConfiguration(
    SMALL["configuration"].lanes, SMALL["configuration"].tiles, SMALL_GRADIENT["configuration"].block, num_warps=1
)
ROWS, WIDTH, REAL = 13, 83, 77
# float32: sums of 77 exponentials in another order. bfloat16: a unit in the last place of 1 / 0.7; the interpreter truncates.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2**-7}


@pytest.fixture(autouse=True)
def one_processor(monkeypatch):
    """A few rows are two waves, as in the interpreter: a GPU's processors would leave them to the two kernels."""
    monkeypatch.setattr(backends, "num_processors", lambda device: backends.PROCESSORS_OF_A_CPU)


@pytest.fixture(params=[None, SAME_LANES], ids=["shipped lanes", "few lanes"])
def lanes(request, monkeypatch):
    if request.param is not None:
        monkeypatch.setattr(rows_triton, "one_read_configuration", lambda *sizes: request.param)
    return request.param


@pytest.mark.parametrize(
    ("stride", "offset", "dtype", "into", "with_entropy"),
    [
        (WIDTH, 0, torch.float32, None, True),
        (WIDTH, 0, torch.bfloat16, None, False),
        (96, 0, torch.bfloat16, None, True),
        (96, 5, torch.float32, None, False),
        (96, 5, torch.bfloat16, None, True),
        (96, 0, torch.float32, torch.bfloat16, False),
    ],
)
def test_a_unit_gradient_is_that_of_a_log_probability_in_place_and_beside(lanes, stride, offset, dtype, into, with_entropy):
    """NaN stands behind the vocabulary and between the rows."""
    values, labels = random_rows(ROWS, WIDTH, dtype, seed=3)
    values[:, REAL:] = math.nan
    memory, rows = in_guarded_memory(values, stride, offset)
    labels, before, logits = (labels % REAL).to(KERNEL_DEVICE), memory.clone(), rows.clone()
    out = rows if into is None else torch.full((ROWS, 96), math.nan, dtype=into, device=KERNEL_DEVICE)[:, :WIDTH]
    result = unit_gradient(rows, labels, vocab_shard(WIDTH, 0.7, REAL, SINGLE), with_entropy=with_entropy, out=out)
    log_probs, entropy, gradient = dense_scores(logits[:, :REAL], labels, torch.ones(ROWS), torch.zeros(ROWS), 0.7)
    assert torch.allclose(result.log_probs.cpu().double(), log_probs, rtol=0, atol=5e-6)
    assert torch.allclose(result.entropy.cpu().double(), entropy if with_entropy else 0 * entropy, rtol=0, atol=5e-6)
    assert torch.allclose(out[:, :REAL].cpu().double(), gradient, rtol=0, atol=TOLERANCES[out.dtype])
    assert not out[:, REAL:].any()
    if into is None:
        rows.copy_(logits)
    assert torch.equal(memory.nan_to_num(7.0), before.nan_to_num(7.0)), "it wrote beside its rows"


@pytest.mark.parametrize(
    ("rows", "out_dtype", "is_planned"),
    [(ROWS, torch.float32, True), (1, torch.float32, False), (0, torch.float32, False), (ROWS, torch.float16, False)],
    ids=["enough rows", "fewer than two waves", "no row", "float16, which large hidden states would overflow"],
)
def test_it_runs_where_rows_fit_the_cache_and_the_dtype_has_the_range(rows, out_dtype, is_planned):
    logits = torch.zeros(rows, WIDTH, device=KERNEL_DEVICE)
    out = logits if out_dtype == torch.float32 else torch.zeros(rows, WIDTH, dtype=out_dtype, device=KERNEL_DEVICE)
    labels, shard = torch.zeros(rows, dtype=torch.int64, device=KERNEL_DEVICE), vocab_shard(WIDTH, 1.0, None, SINGLE)
    assert (unit_gradient(logits, labels, shard, with_entropy=False, out=out) is not None) == is_planned


# In the fused head


@pytest.mark.parametrize(
    ("name", "rows", "launched", "options"),
    [
        pytest.param("grpo", 1000, (1, 0, 0), {}, id="row-by-row"),
        pytest.param("gspo", 1000, (1, 0, 0), {}, id="in-chunk"),
        pytest.param("gspo", 9, (2, 0, 0), {}, id="scale-last: one document in two chunks"),
        pytest.param("grpo", 9, (2, 0, 0), {}, id="row-by-row in two chunks"),
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
