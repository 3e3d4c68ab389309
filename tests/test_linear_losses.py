"""The plans of the fused head, which rows are in its matmuls, and its memory; values are in test_generated_steps.py."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers import without_needless_clip
from linear_cases import (
    MASKS,
    ROWS,
    HeadBatch,
    budget,
    by_logits,
    every_term,
    head_batch,
    plan_of,
    run,
    seen,
    worst_error,
)

from megatron_rl.declare import LossValue, get_policy_loss, policy_loss_names, register_policy_loss
from megatron_rl.ops import log_probs_torch
from megatron_rl.ops.linear_log_probs import linear_log_probs
from megatron_rl.policy_loss import linear_gspo_loss, linear_policy_loss
from megatron_rl.policy_loss.linear import read_together

# Sums of a few dozen float64 products in another order.
EXACT = 1e-12
# A loss that declares no clip is given none.
NO_CLIP = {"clip_ratio_low": None, "clip_ratio_high": None}
OTHERS = [kind for kind in policy_loss_names() if kind not in ("grpo", "gspo")]
PLANS = {
    "token": {"in-chunk"},
    "sequence": {"in-chunk", "scale-last"},
    "row terms": {"in-chunk", "two-pass"},  # a coefficient that needs whole documents and is no multiple of theirs
}


def plans_of(kind: str, has_terms: bool) -> set[str]:
    """Of an off-policy loss."""
    loss = get_policy_loss(kind)
    has_row_terms = loss.reads_means and (has_terms or loss.level == "token" or loss.token_clip is not None)
    return PLANS["row terms" if has_row_terms else loss.level]


# kind, with every term, on-policy, and the plans that its chunks of nine rows take: one document is longer.
KINDS = {
    "gspo": ("gspo", False, False, PLANS["sequence"]),
    "gspo with importance weights": ("gspo", "importance weights", False, PLANS["sequence"]),
    "gspo with KL, entropy and importance weights": ("gspo", True, False, PLANS["row terms"]),
    "grpo": ("grpo", False, False, PLANS["token"]),
    "grpo with KL, entropy and importance weights": ("grpo", True, False, PLANS["token"]),
    "gspo on-policy": ("gspo", False, True, PLANS["sequence"]),
    "gspo on-policy with every term": ("gspo", True, True, PLANS["row terms"]),
    # What is registered beside them, off-policy.
    **{kind: (kind, False, False, plans_of(kind, False)) for kind in OTHERS},
    **{f"{kind} with every term": (kind, True, False, plans_of(kind, True)) for kind in OTHERS},
}


def fused(kind: str):
    return partial(without_needless_clip, linear_policy_loss, kind)


def options_of(name: str, case: HeadBatch) -> dict:
    _, terms, on_policy, _ = KINDS[name]
    options = every_term(case.batch) if terms else {"metrics": "basic"}
    if terms == "importance weights":
        options = {"importance_weights": options["importance_weights"], "metrics": "basic"}
    return {"on_policy": on_policy, "temperature": 0.7, **options}


# Each chunk size with half of the rows masked, and each other mask with a chunk size of its own.
ROWS_AND_MASKS = [
    *((rows, "half masked") for rows in ROWS),
    *zip(ROWS, (mask for mask in MASKS if mask != "half masked"), strict=False),
]


EACH_PLAN = ["gspo", "gspo with KL, entropy and importance weights", "grpo with KL, entropy and importance weights", "gspo_token"]


@pytest.mark.parametrize("name", KINDS)
def test_a_loss_takes_the_plans_of_its_level_in_chunks_of_the_size_asked_for(name, schedules):
    """One document is longer than a chunk of nine rows."""
    case = head_batch()
    run(fused(KINDS[name][0]), case, max_logits_bytes=budget(case, 9), **options_of(name, case))
    assert {plan_of(item) for items in schedules for item in items} == KINDS[name][-1]
    assert max(chunk.numel() for items in schedules for item in items for chunk in item.chunks) <= 9


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
def test_rows_without_a_gradient_leave_the_matmuls(kind, rows):
    """Six tokens each: masked ones are in no matmul, clipped ones and those of advantage 0 in the first alone, the rest in three.
    FB-96: CISPO's clip takes no row's gradient."""
    alive = 12 if kind == "cispo" else 6
    case = fates(kind)
    options = {**FATES, "max_logits_bytes": budget(case, rows)}
    want = by_logits(kind, case, **FATES)
    got = run(fused(kind), case, **options)
    assert max(worst_error(got, want).values()) < EXACT
    assert matmul_rows(case, kind, **options) == {"logits": 18, "hidden": alive, "weight": alive}
    # An entropy bonus gives every unmasked row a gradient.
    assert matmul_rows(case, kind, **options, **every_term(case.batch)) == {"logits": 18, "hidden": 18, "weight": 18}


@pytest.mark.parametrize("kind", ["grpo", "gspo"])
def test_the_entropy_of_each_token_comes_with_the_loss(kind):
    """From the logits of the chunks, which are computed once, and from the pass over logits. None where nothing asked for it."""
    case = fates(kind)
    options = {**FATES, "max_logits_bytes": budget(case, 1000), "metrics": "with_entropy"}
    log_probs = torch.log_softmax(case.batch.logits, -1)
    expected = torch.where(case.batch.loss_mask, -(log_probs.exp() * log_probs).sum(-1), 0.0)
    for found in (run(fused(kind), case, **options), by_logits(kind, case, **FATES, metrics="with_entropy")):
        torch.testing.assert_close(found.output.entropy_per_token, expected, rtol=EXACT, atol=EXACT)
    assert run(fused(kind), case, **options | {"metrics": "basic"}).output.entropy_per_token is None
    assert matmul_rows(case, kind, **options)["logits"] == 18


def test_long_documents_pay_what_their_plan_says():
    """Plan scale-last: three matmuls a row, the last chunk of a clipped document, or one of advantage 0, one. Two-pass: all chunks
    but the last have their logits computed again."""
    case = fates("gspo")
    options = {**FATES, "max_logits_bytes": budget(case, 2)}  # three chunks of 2 rows each
    assert matmul_rows(case, "gspo", **options) == {"logits": 18, "hidden": 6 + 4 + 4, "weight": 6 + 4 + 4}
    again = matmul_rows(case, "gspo", **options, **every_term(case.batch))
    assert again == {"logits": 18 + 12, "hidden": 18, "weight": 18}
    dense = matmul_rows(head_batch([12, 12]), "gspo", max_logits_bytes=budget(case, 1000))
    assert dense["logits"] == 12 and dense["hidden"] <= 12


def test_a_long_document_of_vespo_takes_three_matmuls():
    """Its weight reads the sample's count: the tokens share one coefficient, as in gspo, off-policy and on-policy."""
    case = fates("vespo")
    options = {"max_logits_bytes": budget(case, 2)}  # three chunks of 2 rows each; document 2 has advantage 0
    assert matmul_rows(case, "vespo", **options) == {"logits": 18, "hidden": 16, "weight": 16}
    on_policy = replace(case, batch=replace(case.batch, old_log_probs=None))
    assert matmul_rows(on_policy, "vespo", **options) == {"logits": 18, "hidden": 16, "weight": 16}
    assert matmul_rows(case, "gspo_token", **options)["logits"] > 18, "its tokens have coefficients of their own"


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


@pytest.mark.parametrize(
    ("name", "rows", "dtype"),
    [
        *((name, 2, torch.bfloat16) for name in EACH_PLAN),
        *((name, *((16, torch.float32), (1, torch.bfloat16))[number % 2]) for number, name in enumerate(EACH_PLAN)),
    ],
)
def test_the_budget_bounds_all_buffers_together(name, rows, dtype, monkeypatch):
    """No tensor of [T, V], and all that is as wide as the vocabulary at one time fits into max_logits_bytes together."""
    # The torch kernels work on scratch rows of a constant size, beside the budget: one row here, and up to six tensors of it.
    monkeypatch.setattr(log_probs_torch, "CPU_CHUNK_BYTES", 1)
    case = head_batch([8, 24, 3, 9], vocab_size=256, hidden_size=7).to(dtype)
    limit, scratch = budget(case, rows), 6 * 256 * 4
    with seen(case) as record:
        run(fused(KINDS[name][0]), case, max_logits_bytes=limit, **options_of(name, case))
    assert rows // 2 < record.most_rows <= rows
    assert 0.5 * limit < record.peak_bytes <= limit + scratch


def squared(log_ratio, advantages):
    """Half the squared distance of log-ratio and advantage: advantage 0 pulls towards the old policy, and nothing is clipped."""
    return LossValue((log_ratio - advantages).square() / 2, derivative=log_ratio - advantages)


def squared_by_autograd(log_ratio, advantages):
    return (log_ratio - advantages).square() / 2


OWN = [("token", squared), ("token", squared_by_autograd), ("sequence", squared), ("sequence", squared_by_autograd)]


@pytest.mark.parametrize("on_policy", [False, True], ids=["", "on-policy"])
@pytest.mark.parametrize(("level", "function"), OWN, ids=lambda value: getattr(value, "__name__", value))
def test_a_loss_of_a_users_own_takes_the_plans_of_its_level(level, function, on_policy, schedules):
    """At advantage 0 too, where this one has a gradient."""
    name = f"{function.__name__} {level}"
    register_policy_loss(name, level)(function)
    case = head_batch()
    advantages = case.batch.advantages.clone()
    advantages[[1, 5]] = 0.0
    case = replace(case, batch=replace(case.batch, advantages=advantages))
    want = by_logits(name, case, on_policy=on_policy, **NO_CLIP)
    for rows in (6, 1000):
        options = {"on_policy": on_policy, "max_logits_bytes": budget(case, rows), **NO_CLIP}
        assert max(worst_error(run(fused(name), case, **options), want).values()) < EXACT
    assert {plan_of(item) for item in schedules[0]} == PLANS[level]


@pytest.mark.parametrize(("rows", "mask"), ROWS_AND_MASKS)
def test_log_probs_alone_take_one_matmul(rows, mask):
    """Under no_grad, for old and reference policies: equal to the logits path, masked rows 0 and in no matmul."""
    case = head_batch(mask=mask)
    hidden = case.hidden.clone().requires_grad_()
    hidden.data[~case.batch.loss_mask] = math.nan
    with seen(case) as record, torch.no_grad():
        options = {"loss_mask": case.batch.loss_mask, "temperature": 0.7, "with_entropy": True}
        log_probs, entropy = linear_log_probs(
            hidden, case.weight, case.batch.labels, max_logits_bytes=budget(case, rows), **options
        )
    scaled = torch.log_softmax(case.batch.logits / 0.7, -1)
    expected = scaled.gather(1, case.batch.labels[:, None])[:, 0]
    keep = case.batch.loss_mask
    torch.testing.assert_close(log_probs, torch.where(keep, expected, 0.0), rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(entropy, torch.where(keep, -(scaled.exp() * scaled).sum(-1), 0.0), rtol=EXACT, atol=EXACT)
    assert not log_probs.requires_grad
    assert record.rows == {"logits": int(keep.sum()), "hidden": 0, "weight": 0}


def test_what_the_host_reads_together_is_what_was_there():
    """The one copy from a device: bounds beyond int32's neighbours, and masks, with their dtypes."""
    given = [torch.tensor([0, 5, 2**30], dtype=torch.int32), torch.tensor([True, False]), torch.zeros(0, dtype=torch.bool)]
    assert all(torch.equal(got, want) and got.dtype == want.dtype for got, want in zip(read_together(*given), given, strict=True))
