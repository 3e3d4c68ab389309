"""The kernel that leaves the gradient of each row's log-probability in place of the logits: alone, and in the fused head.

Interpreted on a CPU, compiled on a GPU. Its machine code: tests/test_kernel_code.py.
"""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from helpers import KERNEL_DEVICE
from launches import counted_launches
from linear_cases import HeadBatch, budget, every_term, head_batch, on_device, run, worst_error
from test_linear_losses import KINDS, fused, options_of
from test_log_probs_triton import IS_INTERPRETED, SMALL, SMALL_GRADIENT, in_guarded_memory, random_rows, truth

import megatron_rl.ops.backends as backends
import megatron_rl.ops.rows_triton as rows_triton
from megatron_rl.layout.groups import SINGLE
from megatron_rl.ops.backends import OneReadConfiguration
from megatron_rl.ops.log_probs import vocab_shard
from megatron_rl.ops.log_probs_triton import logits_gradient_triton, row_results_triton
from megatron_rl.ops.rows_triton import unit_gradient

pytestmark = pytest.mark.kernel
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


def rows_with_padding(dtype: torch.dtype, stride: int, offset: int):
    """(memory, logits [ROWS, WIDTH] in it with NaN behind the vocabulary, labels)."""
    logits, labels = random_rows(ROWS, WIDTH, dtype, seed=3)
    logits[:, REAL:] = math.nan
    memory, view = in_guarded_memory(logits, stride, offset)
    return memory, view, (labels % REAL).to(KERNEL_DEVICE)


@pytest.mark.parametrize(("stride", "offset"), [(WIDTH, 0), (96, 0), (96, 5)], ids=["adjacent", "aligned", "off by five"])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("with_entropy", [False, True], ids=["", "entropy"])
def test_in_place_it_is_the_gradient_of_a_log_probability(lanes, dtype, stride, offset, with_entropy):
    memory, rows, labels = rows_with_padding(dtype, stride, offset)
    before, logits = memory.clone(), rows.clone()
    result = unit_gradient(rows, labels, vocab_shard(WIDTH, 0.7, REAL, SINGLE), with_entropy=with_entropy, out=rows)
    log_probs, entropy, gradient = truth(logits[:, :REAL], labels, torch.ones(ROWS), torch.zeros(ROWS), 0.7)
    assert torch.allclose(result.log_probs.cpu().double(), log_probs, rtol=0, atol=5e-6)
    assert torch.allclose(result.entropy.cpu().double(), entropy if with_entropy else 0 * entropy, rtol=0, atol=5e-6)
    assert torch.allclose(rows[:, :REAL].cpu().double(), gradient, rtol=0, atol=TOLERANCES[dtype])
    assert not rows[:, REAL:].any()
    rows.copy_(logits)
    assert torch.equal(memory.nan_to_num(7.0), before.nan_to_num(7.0)), "it wrote beside its rows"


def test_float32_logits_give_a_16_bit_gradient_beside_them(lanes):
    _, logits, labels = rows_with_padding(torch.float32, 96, 0)
    out = torch.full((ROWS, 96), math.nan, dtype=torch.bfloat16, device=KERNEL_DEVICE)[:, :WIDTH]
    before = logits.clone()
    unit_gradient(logits, labels, vocab_shard(WIDTH, 0.7, REAL, SINGLE), with_entropy=False, out=out)
    _, _, gradient = truth(logits[:, :REAL], labels, torch.ones(ROWS), torch.zeros(ROWS), 0.7)
    assert torch.allclose(out[:, :REAL].cpu().double(), gradient, rtol=0, atol=TOLERANCES[torch.bfloat16])
    assert not out[:, REAL:].any() and torch.equal(logits.nan_to_num(7.0), before.nan_to_num(7.0))


@pytest.mark.parametrize("lanes", [SAME_LANES], indirect=True, ids=["few lanes"])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_with_the_same_lanes_it_has_the_bits_of_the_two_kernels(lanes, dtype):
    _, rows, labels = rows_with_padding(dtype, 96, 5)
    shard, ones = vocab_shard(WIDTH, 0.7, REAL, SINGLE), torch.ones(ROWS, device=KERNEL_DEVICE)
    want = row_results_triton(rows, labels, None, shard, SINGLE, with_entropy=True, **SMALL)
    numbers = (want.maximum, want.total, want.entropy, ones, None)
    gradient = logits_gradient_triton(rows, labels, None, *numbers, shard, out=rows.clone(), **SMALL_GRADIENT)
    got = unit_gradient(rows, labels, shard, with_entropy=True, out=rows)
    for name in ("maximum", "total", "log_probs"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    # On a GPU each kernel fuses the multiply-adds of an entropy in its own way: a step or two of float32.
    torch.testing.assert_close(got.entropy, want.entropy, rtol=0 if IS_INTERPRETED else 2**-22, atol=0)
    # A float32 gradient likewise: on an H100 one was not equal. 16-bit ones were, because rounding hides it.
    step = 0.0 if IS_INTERPRETED or dtype != torch.float32 else 2**-22 * float(gradient.abs().max())
    torch.testing.assert_close(rows, gradient, rtol=0, atol=step)


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


def launches_of(name: str, case: HeadBatch, rows: int, **options) -> Counter:
    moved, there = on_device(case, options_of(name, case) | options, KERNEL_DEVICE)
    with counted_launches() as launches:
        run(fused(KINDS[name][0]), moved, backend="triton", max_logits_bytes=budget(case, rows), **there)
    return Counter(launches)


@pytest.mark.parametrize(
    ("name", "rows", "unit_gradients", "gradients"),
    [
        pytest.param("grpo", 1000, 1, 0, id="row-by-row"),
        pytest.param("gspo", 1000, 1, 0, id="in-chunk"),
        pytest.param("gspo", 9, 2, 0, id="scale-last: one document in two chunks"),
        pytest.param("grpo", 9, 2, 0, id="row-by-row in two chunks"),
        pytest.param("gspo with KL, entropy and importance weights", 1000, 0, 1, id="an entropy term does not commute"),
    ],
)
def test_each_plan_reads_its_logits_once(name, rows, unit_gradients, gradients):
    case = head_batch([36], seed=8).to(torch.float32)
    launches = launches_of(name, case, rows)
    assert (launches["one_read_kernel"], launches["logits_gradient_kernel"]) == (unit_gradients, gradients), launches
    assert launches["row_statistics_kernel"] == gradients, launches


def test_two_pass_computes_the_other_chunks_again():
    """KL without entropy: the last chunk is read once, each of the others at the statistics and at the gradient."""
    case = head_batch([36], seed=8).to(torch.float32)
    terms = every_term(case.batch)
    options = {name: terms[name] for name in ("ref_log_probs", "kl_coefficient", "regularizer_weights")} | {"metrics": "basic"}
    launches = launches_of("gspo", case, 9, **options)
    wanted = {"one_read_kernel": 1, "row_statistics_kernel": 1, "logits_gradient_kernel": 1}
    assert {name: launches[name] for name in wanted} == wanted, launches


@pytest.mark.parametrize("rows", [9, 1000])
@pytest.mark.parametrize("name", ["gspo", "grpo", "gspo on-policy"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_coefficient_after_the_product_gives_the_gradient_of_one_before(name, rows, dtype):
    """bfloat16 has the limit of c before the product, which has one rounding less. float32: sums in another order, exp2."""
    case = head_batch(seed=8).to(dtype)
    exact = run(fused(KINDS[name][0]), case.to(torch.float64), backend="torch", **options_of(name, case.to(torch.float64)))
    moved, there = on_device(case, options_of(name, case), KERNEL_DEVICE)
    got = run(fused(KINDS[name][0]), moved, backend="triton", max_logits_bytes=budget(case, rows), **there)
    errors = worst_error(got, exact)
    limit = 3e-6 if dtype == torch.float32 else 2**-6
    assert errors["hidden"] < limit and errors["weight"] < limit, errors
