"""The fused head's matmuls: which rows are in them, its plans, bins and chunks, its memory; and the gradient that they give.

Values are in tests/test_generated_steps.py."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers import CLIP, without_needless_clip
from linear_cases import HeadBatch, budget, by_logits, every_term, head_batch, plan_of, relative, run, seen, worst_error

from megatron_rl.errors import ConfigError
from megatron_rl.ops import linear_head, log_probs_torch
from megatron_rl.ops.scale import AssumedScale
from megatron_rl.policy_loss import linear, linear_gspo_loss, linear_policy_loss
from megatron_rl.policy_loss.linear import schedule_documents

# Sums of a few dozen float64 products in another order.
EXACT = 1e-12


# (loss, terms, the plans that its chunks of nine rows take: one document is longer)
KINDS = {
    "gspo": ("gspo", None, {"in-chunk", "scale-last"}),
    "gspo with every term": ("gspo", "every term", {"in-chunk", "two-pass"}),
    "gspo_token": ("gspo_token", None, {"in-chunk", "two-pass"}),
    "grpo": ("grpo", None, {"in-chunk"}),
    "grpo with every term": ("grpo", "every term", {"in-chunk"}),
    "gspo on-policy": ("gspo", "on-policy", {"in-chunk", "scale-last"}),
}


def fused(kind: str):
    return partial(without_needless_clip, linear_policy_loss, kind)


def options_of(name: str, case: HeadBatch) -> dict:
    terms = KINDS[name][1]
    options = every_term(case.batch) if terms == "every term" else {"metrics": "basic"}
    return {"on_policy": terms == "on-policy", "temperature": 0.7, **options}


@pytest.mark.parametrize(
    ("name", "rows", "dtype"),
    [
        *((name, 9, torch.float64) for name in KINDS),
        *((name, 2, torch.bfloat16) for name in KINDS),
        ("gspo", 16, torch.float32),
        ("gspo_token", 1, torch.bfloat16),
    ],
)
def test_a_loss_takes_the_plans_of_its_level_in_buffers_of_the_budget(name, rows, dtype, schedules, monkeypatch):
    """No tensor of [T, V], and all that is as wide as the vocabulary at one time fits into max_logits_bytes together."""
    # The torch kernels work on scratch rows of a constant size, beside the budget: one row here, and up to six tensors of it.
    monkeypatch.setattr(log_probs_torch, "CPU_CHUNK_BYTES", 1)
    case = head_batch([8, 24, 3, 9], vocab_size=256, hidden_size=7).to(dtype)
    limit, scratch = budget(case, rows), 6 * 256 * max(case.hidden.element_size(), 4)
    with seen(case) as record:
        run(fused(KINDS[name][0]), case, max_logits_bytes=limit, **options_of(name, case))
    assert rows // 2 < record.most_rows <= rows
    assert 0.5 * limit < record.peak_bytes <= limit + scratch
    if rows == 9:
        assert {plan_of(item) for items in schedules for item in items} == KINDS[name][-1]


def matmul_rows(case: HeadBatch, kind: str, **options) -> dict[str, int]:
    with seen(case) as record:
        run(fused(kind), case, **options)
    return record.rows


# Document 0 clipped, 1 alive, 2 of advantage 0, 3 masked as a whole; 12 tokens each, every second one masked elsewhere.
FATES = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.15}


def fates(kind: str) -> HeadBatch:
    case = head_batch([12, 12, 12, 12], seed=5, vocab_size=32)
    log_probs = torch.log_softmax(case.batch.logits, -1).gather(1, case.batch.labels[:, None])[:, 0]
    old = log_probs.clone()
    old[:12] -= 0.5  # ratio 1.65
    mask = case.batch.loss_mask.clone()
    mask[36:] = False
    return replace(
        case, batch=replace(case.batch, old_log_probs=old, advantages=torch.tensor([1.0, 1.0, 0.0, 1.0]).double(), loss_mask=mask)
    )


@pytest.mark.parametrize("rows", [8, 1000], ids=["a bin each", "one bin"])
@pytest.mark.parametrize("kind", ["grpo", "gspo", "cispo"])
def test_rows_without_a_gradient_leave_the_matmuls(kind, rows, monkeypatch):
    """Six tokens each: masked ones are in no matmul, clipped ones and those of advantage 0 in the first alone, the rest in three.
    FB-96: CISPO's clip takes no row's gradient."""
    monkeypatch.setattr(linear, "CPU_TEMPORARY_BYTES", 2 * 8 * 32)  # two rows move at once
    alive = 12 if kind == "cispo" else 6
    case = fates(kind)
    options = {**FATES, "max_logits_bytes": budget(case, rows)}
    want = by_logits(kind, case, **FATES, metrics="with_entropy")
    got = run(fused(kind), case, **options, metrics="with_entropy")
    assert max(worst_error(got, want).values()) < EXACT
    for metrics in ("none", "with_entropy"):
        assert matmul_rows(case, kind, **options, metrics=metrics) == {"logits": 18, "hidden": alive, "weight": alive}
    # An entropy bonus gives every unmasked row a gradient.
    assert matmul_rows(case, kind, **options, **every_term(case.batch)) == {"logits": 18, "hidden": 18, "weight": 18}
    log_probs = torch.log_softmax(case.batch.logits, -1)
    entropy = torch.where(case.batch.loss_mask, -(log_probs.exp() * log_probs).sum(-1), 0.0)
    for found in (got, want):
        torch.testing.assert_close(found.output.entropy_per_token, entropy, rtol=EXACT, atol=EXACT)
    assert run(fused(kind), case, **options, metrics="basic").output.entropy_per_token is None


@pytest.mark.parametrize(
    ("kind", "options", "rows"),
    [
        # Three matmuls a row; of the last chunk of a clipped document, or one of advantage 0, one.
        pytest.param("gspo", FATES, {"logits": 18, "hidden": 14, "weight": 14}, id="scale-last"),
        # The tokens share one coefficient, which reads the sample's count. Nothing is clipped.
        pytest.param("vespo", {}, {"logits": 18, "hidden": 16, "weight": 16}, id="scale-last of vespo"),
        pytest.param("vespo", {"on_policy": True}, {"logits": 18, "hidden": 16, "weight": 16}, id="scale-last of vespo on-policy"),
        # All chunks but the last have their logits computed again.
        pytest.param("gspo", {**FATES, "has_terms": True}, {"logits": 30, "hidden": 18, "weight": 18}, id="two-pass"),
        pytest.param("gspo_token", FATES, {"logits": 18 + 4, "hidden": 6, "weight": 6}, id="two-pass, coefficients of a token"),
    ],
)
def test_long_documents_pay_what_their_plan_says(kind, options, rows):
    case, options = fates(kind), dict(options)
    terms = every_term(case.batch) if options.pop("has_terms", False) else {}
    assert matmul_rows(case, kind, **options, **terms, max_logits_bytes=budget(case, 2)) == rows  # three chunks of 2 rows each


def test_a_clipped_long_document_leaves_nothing_behind():
    """Plan scale-last multiplies before it knows the coefficient: what overflowed (float16 does soon) is dropped, not times 0."""
    case = head_batch([12], seed=9)
    case.hidden[:, 0], case.weight[:, 0], case.weight[0, 0] = 0.0, -1.7e308, 1.7e308  # no logit moves, (delta - p) W overflows
    labels = torch.zeros_like(case.batch.labels)
    old = torch.log_softmax(case.hidden @ case.weight.T, -1)[:, 0] - 0.5
    batch = replace(case.batch, labels=labels, old_log_probs=old, advantages=torch.ones(1).double())
    got = run(linear_gspo_loss, replace(case, batch=batch), max_logits_bytes=budget(case, 2), **FATES)
    assert not got.hidden_gradient.any() and not got.weight_gradient.any()
    alive = replace(case, batch=replace(batch, old_log_probs=old + 0.5))
    assert run(linear_gspo_loss, alive, max_logits_bytes=budget(case, 2), **FATES).hidden_gradient.isinf().any()


# What a caller's surroundings may not change


def test_autocast_changes_nothing():
    """Operands have the dtype that was asked for: under autocast the gradient of hidden alone would be a product of bfloat16."""
    case = head_batch().to(torch.float32)
    want = run(linear_gspo_loss, case, max_logits_bytes=budget(case, 6))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = run(linear_gspo_loss, case, max_logits_bytes=budget(case, 6))
    assert torch.equal(got.hidden_gradient, want.hidden_gradient) and torch.equal(got.weight_gradient, want.weight_gradient)
    assert torch.equal(got.output.loss, want.output.loss)


# Chunks and bins


@pytest.mark.parametrize(
    ("counts", "bins", "terms", "plans"),
    [
        pytest.param((3, 2), [(0, 1)], False, "in-chunk", id="two documents in one chunk"),
        pytest.param((12, 2), [(0,), (1,)], False, "scale-last in-chunk", id="a long one"),
        pytest.param((12, 2), [(0,), (1,)], True, "two-pass in-chunk", id="a long one with terms"),
        pytest.param((4, 3), [(0, 1)], False, "two-pass", id="a bin that holds more here than on other cp ranks"),
        pytest.param((0, 2), [(0,), (1,)], False, "in-chunk in-chunk", id="FB-25 a bin that is empty here is an item"),
        pytest.param((), [], False, "", id="no document"),
    ],
)
def test_the_plan_is_chosen_by_what_this_rank_holds(counts, bins, terms, plans):
    rows = list(torch.arange(sum(counts)).split(counts))
    items = schedule_documents(bins, rows, 5, is_shared=not terms)
    assert " ".join(plan_of(item) for item in items) == plans
    assert len(items) == len(bins), "one item for each bin, in their order: every rank meets its reduction"
    assert sum(chunk.numel() for item in items for chunk in item.chunks) == sum(counts)
    assert all(chunk.numel() <= 5 for item in items for chunk in item.chunks)
    for item in items:
        assert len(item.chunks) == -(-sum(chunk.numel() for chunk in item.chunks) // 5), "as few as can be"
        # Those of the last chunk are not computed again.
        assert plan_of(item) != "two-pass" or item.chunks[-1].numel() == 5


# The gradient: factors, main_grad, hooks, precision, and what is refused

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
@pytest.mark.parametrize("loss_scale", [None, 24.0, torch.tensor(24.0)], ids=["unknown", "declared", "declared as a tensor"])
@pytest.mark.parametrize("zero_out", [False, True], ids=["", "tied"])
def test_main_grad_gets_what_the_plain_path_adds(rows, loss_scale, zero_out):
    """FB-85, FB-87: added to what is there, once, also where the hook adds the dummy; two micro-batches equal one of both. With an
    declared factor it is there when forward ends: the buffer of the weight's size is what that saves."""
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
        pytest.param("gspo", 4, 48, None, 1, id="one product, an declared factor"),
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
