"""The gradient of the fused head: factors, main_grad, hooks, precision, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import CLIP
from linear_cases import budget, by_logits, head_batch, relative, seen

from megatron_rl.errors import ConfigError
from megatron_rl.ops import linear_head
from megatron_rl.ops.scale import AssumedScale
from megatron_rl.policy_loss import linear_gspo_loss, linear_policy_loss

SMALL, LARGE = 6, 1000  # rows a chunk: plans in-chunk and scale-last, plan in-chunk alone


def call(case, hidden, weight, **options):
    labels, *rest = case.batch.arguments()
    return linear_gspo_loss(hidden, weight, labels, *rest, **{**CLIP, **options})


def leaves(case):
    return case.hidden.clone().requires_grad_(), case.weight.clone().requires_grad_()


def megatron_parameter(weight, *, zero_out: bool = False, dtype=torch.float32, start: float = 0.5) -> torch.nn.Parameter:
    """As Megatron's DDP leaves it, with a main gradient that holds something already."""
    parameter = torch.nn.Parameter(weight.clone())
    parameter.main_grad = torch.full(weight.shape, start, dtype=dtype)
    parameter.grad_added_to_main_grad = False
    if zero_out:
        parameter.zero_out_wgrad = True
    return parameter


def ddp_hook(parameter) -> None:
    """What DDP does after a parameter's gradient was accumulated."""
    assert parameter.grad is not None, "with overlapped reduction DDP asserts it"
    if not parameter.grad_added_to_main_grad or getattr(parameter, "zero_out_wgrad", False):
        parameter.main_grad.add_(parameter.grad)
    parameter.grad = None


@pytest.mark.parametrize("rows", [SMALL, LARGE])
@pytest.mark.parametrize("loss_scale", [None, 24.0, torch.tensor(24.0)], ids=["unknown", "announced", "announced as a tensor"])
@pytest.mark.parametrize("zero_out", [False, True], ids=["", "tied"])
def test_main_grad_gets_what_the_plain_path_adds(rows, loss_scale, zero_out):
    """FB-85, FB-87: added to what is there, once, also where the hook adds the dummy; two micro-batches equal one of both. With an
    announced factor it is there when forward ends: the buffer of the weight's size is what that saves."""
    first, second = head_batch(seed=1).to(torch.float32), head_batch(seed=2).to(torch.float32)
    second = replace(second, weight=first.weight)
    parameter = megatron_parameter(first.weight, zero_out=zero_out)
    expected = torch.full_like(first.weight, 0.5)
    for case in (first, second):
        hidden = case.hidden.clone().requires_grad_()
        start = parameter.main_grad.clone()
        output = call(case, hidden, parameter, max_logits_bytes=budget(case, rows), loss_scale=loss_scale)
        after_forward = parameter.main_grad.clone()
        (output.loss * 24.0).backward()
        assert torch.equal(after_forward, start if loss_scale is None else parameter.main_grad)
        ddp_hook(parameter)
        want = by_logits("gspo", case, factor=24.0)
        expected += want.weight_gradient
        assert relative(hidden.grad, want.hidden_gradient) < 1e-5
    assert relative(parameter.main_grad, expected) < 1e-5


@pytest.mark.parametrize("loss_scale", [None, 1.0])
@pytest.mark.parametrize("zero_out", [False, True], ids=["", "tied"])
def test_a_hook_on_the_weight_sees_its_gradient(loss_scale, zero_out):
    """FB-150: in main_grad no hook would see it, and one that masks or counts the gradient would get a placeholder."""
    case = head_batch().to(torch.float32)
    parameter, seen = megatron_parameter(case.weight, zero_out=zero_out, start=0.0), []
    parameter.register_hook(lambda gradient: gradient * 3)
    parameter.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad.clone()))
    call(case, case.hidden.clone().requires_grad_(), parameter, loss_scale=loss_scale).loss.backward()
    ddp_hook(parameter)
    expected = by_logits("gspo", case, factor=3.0).weight_gradient
    assert relative(parameter.main_grad, expected) < 1e-5 and relative(seen[0], expected) < 1e-5


def test_another_factor_than_the_announced_one_raises_with_both():
    """What a wrong guess has added to main_grad cannot be taken out again."""
    case = head_batch()
    with pytest.raises(ConfigError, match=r"loss_scale=AssumedScale\(\) is for losses from logits"):
        call(case, *leaves(case), loss_scale=AssumedScale())
    hidden, weight = leaves(case)
    output = call(case, hidden, weight, loss_scale=4.0)
    with pytest.raises(ConfigError, match="loss_scale=4.0 was declared and backward delivers 8.0"):
        (output.loss * 8.0).backward()
    # A product of float32 numbers may be off in its last bits.
    output = call(case, *leaves(case), loss_scale=4.0)
    (output.loss * (4.0 * (1 + 5e-7))).backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=["bfloat16 buffer", "float64 buffer"])
def test_a_main_grad_of_another_precision_is_left_to_the_hook(dtype):
    """Megatron with bfloat16 gradient buffers: autograd gets the gradient, in the weight's dtype, and DDP adds it."""
    case = head_batch().to(torch.float32)
    parameter = megatron_parameter(case.weight, dtype=dtype, start=0.0)
    (call(case, case.hidden.clone().requires_grad_(), parameter, loss_scale=2.0).loss * 2.0).backward()
    assert not parameter.grad_added_to_main_grad and parameter.main_grad.abs().max() == 0
    assert relative(parameter.grad, by_logits("gspo", case, factor=2.0).weight_gradient) < 1e-5


def test_a_second_backward_is_refused():
    """The first one took the gradient and scaled it in place: a silent second one would deliver it twice scaled."""
    hidden, weight = leaves(head_batch())
    loss = call(head_batch(), hidden, weight).loss
    loss.backward(retain_graph=True)
    with pytest.raises(ConfigError, match="a second backward through the fused head"):
        loss.backward()


def test_without_gradients_one_matmul_runs():
    case = head_batch()
    with torch.no_grad(), seen(case) as record:
        output = call(case, case.hidden, case.weight, max_logits_bytes=budget(case, SMALL), metrics="basic")
    assert record.rows == {"logits": int(case.batch.loss_mask.sum()), "hidden": 0, "weight": 0}
    want = by_logits("gspo", case, metrics="basic").output
    assert not output.loss.requires_grad
    torch.testing.assert_close(output.loss, want.loss.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(output.metrics.values, want.metrics.values, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_what_is_frozen_has_no_matmul(frozen):
    case = head_batch()
    hidden, weight = leaves(case)
    (hidden if frozen == "hidden" else weight).requires_grad_(False)
    want = by_logits("gspo", case)
    with seen(case) as record:
        call(case, hidden, weight, max_logits_bytes=budget(case, SMALL)).loss.backward()
    assert record.rows[frozen] == 0 < record.rows["hidden" if frozen == "weight" else "weight"]
    got, expected = (weight.grad, want.weight_gradient) if frozen == "hidden" else (hidden.grad, want.hidden_gradient)
    assert relative(got, expected) < 1e-12 and (hidden if frozen == "hidden" else weight).grad is None


def test_a_recomputed_head_is_refused_where_it_would_add_twice():
    """Activation recomputation runs forward again inside backward: main_grad would get the gradient a second time."""
    from torch.utils.checkpoint import checkpoint

    case = head_batch().to(torch.float32)
    for loss_scale, refused in ((1.0, True), (None, False)):
        parameter = megatron_parameter(case.weight, start=0.0)
        hidden = case.hidden.clone().requires_grad_()

        def loss_of(hidden, loss_scale=loss_scale, parameter=parameter):
            return call(case, hidden, parameter, loss_scale=loss_scale).loss * 1.0

        loss = checkpoint(loss_of, hidden, use_reentrant=True)
        if refused:
            with pytest.raises(ConfigError, match="leave the head out of activation recomputation"):
                loss.backward()
        else:
            loss.backward()
            assert relative(parameter.main_grad, by_logits("gspo", case).weight_gradient) < 1e-5


def test_float16_needs_its_scale():
    """The gradient of a token's mean is 1e-6 and less, which float16 rounds to 0 unless its scale is known in forward."""
    case = head_batch().to(torch.float16)
    with pytest.raises(ConfigError, match="float16 hidden states need loss_scale"):
        call(case, *leaves(case))
    hidden, weight = leaves(case)
    (call(case, hidden, weight, loss_scale=1024.0).loss * 1024.0).backward()
    assert relative(hidden.grad, by_logits("gspo", case, factor=1024.0).hidden_gradient) < 1e-2
    with torch.no_grad():
        call(case, *leaves(case))


# Without main_grad: the first product makes the weight's gradient


def sixteen_bits(documents: int = 4, *, idle: tuple[int, ...] = (), hidden_size: int = 40):
    """bfloat16, 12 rows a document, 64 columns. No clip binds: rows of idle documents, of advantage 0, have no coefficient."""
    case = head_batch([12] * documents, seed=4, vocab_size=64, hidden_size=hidden_size).to(torch.bfloat16)
    advantages = torch.where(torch.isin(torch.arange(documents), torch.tensor(idle, dtype=torch.int64)), 0.0, 1.0)
    everything = torch.ones(12 * documents, dtype=torch.bool)
    return replace(case, batch=replace(case.batch, loss_mask=everything, advantages=advantages.double()))


WIDE = {"clip_ratio_low": 0.99, "clip_ratio_high": 100.0}


@pytest.fixture
def small_blocks(monkeypatch):
    """On a CPU 16-bit products are made in blocks; here a block is no whole [V, H]."""
    monkeypatch.setattr(linear_head, "CPU_TEMPORARY_BYTES", 7 * 4 * 48)


def weight_gradient_of(kind, case, *, rows=1000, factor=1.0, main_grad=False, **options):
    """float32 from main_grad, or what autograd gives."""
    parameter = megatron_parameter(case.weight, start=0.0) if main_grad else case.weight.clone().requires_grad_()
    labels, *rest = case.batch.arguments()
    options = {**WIDE, "max_logits_bytes": budget(case, rows), **options}
    hidden = case.hidden.clone().requires_grad_()
    (linear_policy_loss(kind, hidden, parameter, labels, *rest, **options).loss * factor).backward()
    return parameter.main_grad if main_grad else parameter.grad


@pytest.mark.parametrize(
    ("kind", "documents", "rows", "factor", "roundings"),
    [
        pytest.param("gspo", 4, 48, None, 1, id="one product, an announced factor"),
        pytest.param("gspo", 4, 48, 8.0, 1, id="one product, a power of two in backward"),
        pytest.param("gspo", 4, 48, 24.0, 2, id="one product, another factor in backward"),
        pytest.param("grpo", 4, 12, 24.0, 1, id="row-by-row"),
        pytest.param("gspo", 4, 12, 24.0, 1, id="in-chunk"),
        pytest.param("gspo", 1, 5, 24.0, 1, id="scale-last"),
    ],
)
def test_one_product_writes_16_bits_at_once_and_several_are_rounded_once(small_blocks, kind, documents, rows, factor, roundings):
    """The budget holds exactly the rows there are."""
    case = sixteen_bits(documents)
    got = weight_gradient_of(kind, case, rows=rows, factor=factor or 1.0, loss_scale=None if factor else 1.0)
    exact = weight_gradient_of(kind, case, rows=rows, loss_scale=1.0, main_grad=True)
    wanted = exact.double() * (factor or 1.0)
    # One rounding of 2^-8, and one more where 16 bits are multiplied by no power of two. 1e-6: sums in another order.
    limit = roundings * 2**-8 * (1 + 2**-8) + 1e-6
    assert ((got.double() - wanted).abs() <= limit * wanted.abs() + 1e-9 * wanted.abs().max()).all()


@pytest.mark.parametrize("kind", ["gspo", "grpo"])
@pytest.mark.parametrize("idle", [(0, 1, 2), (1, 2, 3), (0, 3), (0, 1, 2, 3)], ids=str)
def test_chunks_without_a_coefficient_make_no_product(small_blocks, kind, idle):
    """The first product, and it alone, writes where nothing is yet; without any product the gradient is 0."""
    case = sixteen_bits(idle=idle)
    got = weight_gradient_of(kind, case, loss_scale=1.0, fp32_logits=True, max_logits_bytes=12 * 64 * 4)
    truth = replace(case, hidden=case.hidden.double(), weight=case.weight.double())
    want = by_logits(kind, truth, **WIDE).weight_gradient
    # float32 logits, so that the rounding of the result alone is left.
    assert got.dtype == torch.bfloat16 and relative(got, want) < 2**-8 + 1e-5
    assert bool(got.any()) == bool(want.any()) == (len(idle) < 4)


@pytest.mark.parametrize("kind", ["gspo", "grpo"])
@pytest.mark.parametrize("num_chunks", [1, 16])
def test_the_weight_gradient_of_16_bit_operands_does_not_lose_bits_with_chunks(kind, num_chunks):
    """FB-85: the buffer is float32, whatever the number of chunks; rounding each chunk to bfloat16 costs 1e-2."""
    case = sixteen_bits(16, hidden_size=32)
    options = {"fp32_logits": True, "max_logits_bytes": 64 * 4 * (192 // num_chunks + 12)}
    got = weight_gradient_of(kind, case, main_grad=True, **options)
    truth = replace(case, hidden=case.hidden.double(), weight=case.weight.double())
    want = by_logits(kind, truth, **WIDE).weight_gradient
    # float32 logits, products and sums of bfloat16 operands: 1e-6; the bound leaves the exponential's own rounding.
    assert float((got.double() - want).norm() / want.norm()) < 3e-6
