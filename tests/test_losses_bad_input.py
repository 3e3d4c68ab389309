"""Each registered loss on what must not matter, what must stop the step, and what is refused: value, gradient and message."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch
from helpers import (
    BATCHES,
    CLIP,
    EXACT,
    assert_same,
    by_loop,
    loop_log_probs,
    padded,
    random_batch,
    run_loss,
)
from loss_backends import HAS_TRITON, KERNEL, LOSSES, TORCH, TRITON

from megatron_rl.errors import ConfigError, DataError
from megatron_rl.losses import grpo_loss


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize(
    ("backend", "junk"),
    [
        *((TORCH, junk) for junk in (math.nan, math.inf, -math.inf, 1e30, -1e30, 0.0)),
        *(pytest.param(TRITON, junk, marks=KERNEL) for junk in (math.nan, math.inf, -1e30)),
    ],
    ids=str,
)
def test_masked_positions_may_hold_anything(kind, backend, junk):
    """FB-56, FB-57: bit-equal to clean input, for the policy, KL and entropy terms, importance weights and all metrics.

    The masked tokens lie inside samples whose other tokens keep their gradient.
    """
    clean = random_batch([6, 5, 2], num_masked=(2, 1, 2), seed=10)
    dirty_rows = ~clean.loss_mask
    per_token = {
        "importance_weights": torch.linspace(0.5, 1.5, 13, dtype=torch.float64),
        "ref_log_probs": clean.old_log_probs - 0.1,
    }

    def dirty(x):
        return torch.where(dirty_rows if x.dim() == 1 else dirty_rows[:, None], junk, x)

    labels = torch.where(dirty_rows, -100 if junk < 0 else 11 + 5, clean.labels)
    # The advantage of the fully masked third document.
    advantages = clean.advantages.clone()
    advantages[2] = junk
    batch = replace(
        clean,
        logits=dirty(clean.logits),
        labels=labels,
        old_log_probs=dirty(clean.old_log_probs),
        advantages=advantages,
    )
    options = {
        "regularizer_weights": clean.token_weights,
        "kl_coefficient": 0.1,
        "entropy_coefficient": 0.01,
        "metrics": "with_entropy",
        **CLIP,
    }
    got, gradient = backend.run(LOSSES[kind], batch, **{k: dirty(v) for k, v in per_token.items()}, **options)
    want, clean_gradient = backend.run(LOSSES[kind], clean, **per_token, **options)
    for name in ("loss", "policy_loss", "kl_loss", "entropy", "log_probs", "num_nonfinite"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    assert torch.equal(got.metrics.values, want.metrics.values)
    assert torch.equal(gradient, clean_gradient)
    assert (gradient[clean.loss_mask] != 0).any(1).all(), "FB-57: the other tokens keep a gradient"


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize(("backend", "tail"), [(TORCH, 1), (TORCH, 63), pytest.param(TRITON, 9, marks=KERNEL)], ids=str)
def test_a_tail_of_padding_changes_nothing(kind, backend, tail):
    """FB-63: padding past cu_seqlens[-1] is out of every document, whatever its mask and contents."""
    batch = BATCHES["ragged"]
    got, gradient = backend.run(LOSSES[kind], padded(batch, tail), metrics="basic", **CLIP)
    want, clean_gradient = backend.run(LOSSES[kind], batch, metrics="basic", **CLIP)
    # The sums run over other lengths and so round in another order; nothing else may differ by a bit.
    torch.testing.assert_close(got.loss, want.loss, **EXACT)
    torch.testing.assert_close(got.metrics.values, want.metrics.values, **EXACT)
    assert torch.equal(gradient[:-tail], clean_gradient) and (gradient[-tail:] == 0).all()
    assert torch.equal(got.log_probs[:-tail], want.log_probs)


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("log_ratio", [-1e4, -100.0, 100.0, 1e4])
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_no_log_ratio_makes_the_loss_or_its_gradient_infinite(kind, log_ratio, advantage):
    """FB-59: exp before clip, or 0 x inf in backward; A = 0 is exactly 0, a saturated or clipped gradient exactly 0."""
    batch = random_batch([3, 4], num_masked=(0, 1), seed=11)
    log_probs = loop_log_probs(batch.logits, batch.labels)
    batch = replace(batch, old_log_probs=log_probs - log_ratio, advantages=torch.full((2,), advantage, dtype=torch.float64))
    output, gradient = run_loss(LOSSES[kind], batch, **CLIP)
    # The ratio is bounded to e^(+-20), where a loss by the ratio has no gradient.
    expected, wanted = by_loop(kind, batch)
    assert (gradient[wanted == 0] == 0).all()
    torch.testing.assert_close(gradient, wanted, rtol=1e-9, atol=1e-12)
    if advantage == 0:
        assert output.loss.item() == 0.0
    torch.testing.assert_close(output.loss.detach(), expected, rtol=1e-9, atol=0)


def poisoned(tensor: str, value: float):
    """(batch, options) with this value in one tensor at token 5, which is unmasked and belongs to document 1."""
    batch = random_batch([3, 4, 2], num_masked=(0, 1, 0), seed=12)
    options = {
        "importance_weights": torch.ones(9),
        "ref_log_probs": batch.old_log_probs.clone(),
        "kl_coefficient": 0.1,
        "regularizer_weights": torch.ones(3),
    }
    if tensor in options:
        options[tensor][5] = value
    elif tensor == "labels":
        batch.logits[5, batch.labels[5]] = -math.inf
    else:
        getattr(batch, tensor)[1 if tensor == "advantages" else 5] = value
    return batch, options | CLIP


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("tensor", ["logits", "old_log_probs", "advantages", "importance_weights", "ref_log_probs", "labels"])
def test_an_unmasked_value_that_is_not_finite_stops_the_step(kind, value, tensor):
    """FB-58, FB-41: never a NaN policy that trains as if on-policy; the message names document and tensor."""
    batch, options = poisoned(tensor, value)
    named = "log_probs" if tensor in ("logits", "labels") else tensor
    with pytest.raises(DataError, match=f"document 1 of the micro-batch has .* not finite, in .*{named}.*; 1 documents"):
        run_loss(LOSSES[kind], batch, **options)


@pytest.mark.kernel
@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("tensor", ["logits", "labels"])
def test_what_the_row_kernels_find_stops_the_step(kind, tensor):
    """FB-58, FB-41: a NaN logit, a label of probability 0. What else may be bad is in test_losses_triton.py."""
    batch, options = poisoned(tensor, math.nan)
    if TRITON.device == "cuda":
        output, _ = TRITON.run(LOSSES[kind], batch, **options)
        assert output.num_nonfinite.tolist() == [0, 1, 0]
    else:
        with pytest.raises(DataError, match="document 1 of the micro-batch has 1 unmasked .* in log_probs; 1 documents"):
            TRITON.run(LOSSES[kind], batch, **options)


@pytest.mark.parametrize("kind", LOSSES)
def test_a_masked_label_of_probability_zero_is_no_fault(kind):
    """FB-41, the allowing half."""
    batch = random_batch([3, 4], num_masked=(1, 1), seed=13)
    batch.logits[3, batch.labels[3]] = -math.inf
    assert_same(run_loss(LOSSES[kind], batch, **CLIP), by_loop(kind, batch))


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("lengths", [[3, 2], [0, 0], []], ids=["all masked", "no token", "no document"])
def test_an_idle_rank_stays_in_the_graph(kind, lengths):
    """FB-25, FB-55: the loss is 0 and still depends on the logits; backward gives zeros: no collective is skipped."""
    batch = random_batch(lengths, num_masked=tuple(lengths), seed=14)
    output, gradient = run_loss(LOSSES[kind], batch, metrics="with_entropy", **CLIP)
    assert output.loss.item() == 0.0 and output.loss.requires_grad
    assert gradient.shape == batch.logits.shape and (gradient == 0).all()


def call(**changes):
    """grpo_loss on a healthy batch of 2 documents and 5 tokens, with these arguments changed."""
    arguments = {
        "logits": torch.zeros(5, 4),
        "labels": torch.zeros(5, dtype=torch.int64),
        "old_log_probs": torch.zeros(5),
        "advantages": torch.ones(2),
        "loss_mask": torch.ones(5, dtype=torch.bool),
        "cu_seqlens": torch.tensor([0, 2, 5], dtype=torch.int32),
        "token_weights": torch.ones(2),
    }
    return grpo_loss(**{**arguments, **changes})


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        pytest.param({"loss_mask": torch.ones(5)}, DataError, r"loss_mask must be \[T=5\] bool", id="float mask"),
        pytest.param({"loss_mask": torch.ones(4, dtype=torch.bool)}, DataError, r"\[T=5\]", id="FB-61 short mask"),
        pytest.param({"old_log_probs": torch.zeros(6)}, DataError, r"old_log_probs must be \[T=5\], got \(6,\)", id="old"),
        pytest.param({"token_weights": torch.ones(3)}, DataError, r"token_weights must be \[N=2\]", id="weights"),
        pytest.param({"token_weights": torch.tensor([1, math.nan])}, DataError, "not finite", id="weights NaN"),
        pytest.param({"token_counts": torch.ones(3)}, DataError, r"token_counts must be \[N=2\]", id="counts"),
        pytest.param({"importance_weights": torch.ones(2)}, DataError, r"importance_weights must be \[T=5\]", id="u"),
        pytest.param({"advantages": torch.ones(3)}, DataError, r"must be \[N=2\], one a sample, or \[T=5\]", id="A"),
        pytest.param({"advantages": torch.ones(2, 1)}, DataError, r"must be \[N=2\]", id="FB-65 A [N, 1] is not broadcast"),
        pytest.param({"advantages_per": "token"}, DataError, r'advantages_per="token" must be \[5\]', id="A per token"),
        pytest.param({"advantages_per": "turn"}, ConfigError, 'must be "sample", "token" or None', id="per what"),
        pytest.param({"cu_seqlens": torch.tensor([0, 2, 6])}, DataError, "ends at 6 but there are 5", id="FB-63 bounds"),
        pytest.param({"labels": torch.zeros(5)}, DataError, "int64", id="float labels"),
        pytest.param({"clip_ratio_low": 1.3}, ConfigError, r"clip_ratio_low=1.3 must be in \[0, 1\)", id="FB-74 low"),
        pytest.param({"clip_ratio_low": -0.1}, ConfigError, "clip_ratio_low=-0.1", id="FB-74 low negative"),
        pytest.param({"clip_ratio_high": -0.1}, ConfigError, "clip_ratio_high=-0.1", id="FB-74 high negative"),
        pytest.param({"clip_ratio_high": math.nan}, ConfigError, "clip_ratio_high=nan", id="FB-74 high NaN"),
        pytest.param({"clip_ratio_low": math.nan}, ConfigError, "clip_ratio_low=nan", id="FB-74 low NaN"),
        pytest.param({"temperature": 0.0}, ConfigError, "temperature=0.0", id="FB-74 temperature"),
        *[
            pytest.param({name: value}, ConfigError, f"{name}={value} must be a finite", id=f"FB-74 {name}={value}")
            for name in ("kl_coefficient", "entropy_coefficient")
            for value in (-0.1, math.nan, math.inf)
        ],
        pytest.param({"regularizer_weights": torch.tensor([1, math.nan])}, DataError, "regularizer_weights has", id="v NaN"),
        pytest.param({"metrics": "all"}, ConfigError, "none, basic, with_entropy", id="metrics"),
        pytest.param({"kl_coefficient": 0.1}, ConfigError, "needs ref_log_probs", id="FB-80 KL without reference"),
        pytest.param({"entropy_coefficient": 0.1}, ConfigError, "need regularizer_weights", id="entropy without weights"),
        *[
            pytest.param({"token_counts": torch.tensor(counts)}, DataError, message, id=f"token_counts {counts}")
            for counts, message in (
                ([1, 2], "token_counts says 1 for document 0, and loss_mask has 2 unmasked tokens"),
                ([20, 20], "token_counts says 20 for document 0"),
                ([2.5, 2], "must be whole numbers of at least 0"),
                ([math.nan, 2], "must be whole numbers"),
                ([math.inf, 2], "must be whole numbers"),
                ([-2, 2], "must be whole numbers"),
                ([True, True], "token_counts is torch.bool"),
            )
        ],
        *[
            pytest.param(
                {name: torch.full((5,), 1e300, dtype=torch.float64)} | more, DataError, f"not finite, in {name}", id=f"{name} 1e300"
            )
            for name, more in (
                ("importance_weights", {}),
                ("ref_log_probs", {"kl_coefficient": 0.1, "regularizer_weights": torch.ones(2)}),
            )
        ],
        pytest.param(
            {"token_weights": torch.full((2,), 1e300, dtype=torch.float64)},
            *(DataError, "token_weights has values that are not finite in torch.float32"),
            id="token_weights that only float64 holds",
        ),
        *[
            pytest.param({name: value}, ConfigError, f"{name}={re.escape(repr(value))} must be a number", id=f"{name} {value!r}")
            for name in ("clip_ratio_high", "kl_coefficient", "entropy_coefficient")
            for value in ("0.1", True, [0.1])
        ],
        *[
            pytest.param({name: 1e300}, ConfigError, f"{name}=.* must be a finite number", id=f"{name} beyond float32")
            for name in ("clip_ratio_high", "kl_coefficient", "entropy_coefficient")
        ],
        pytest.param({"kl_coefficient": None}, ConfigError, "kl_coefficient=None must be a number", id="no coefficient"),
        pytest.param({"metrics": ["basic"]}, ConfigError, "none, basic, with_entropy", id="list of metrics"),
        pytest.param({"temperature": "1"}, ConfigError, "temperature='1' must be a finite number", id="text for a temperature"),
        pytest.param({"temperature": None}, ConfigError, "temperature=None must be a finite number", id="no temperature"),
        pytest.param({"vocab_size": 3.0}, DataError, "vocab_size=3.0 must be a whole number", id="fraction as vocab_size"),
        pytest.param({"inplace": "no"}, ConfigError, "inplace='no' must be True or False", id="text for inplace"),
        pytest.param({"labels": None}, DataError, "labels are NoneType: pass a torch tensor", id="no labels"),
        pytest.param({"labels": [0, 1, 2, 0, 1]}, DataError, "labels are list", id="list of labels"),
        pytest.param({"logits": None}, DataError, "logits are NoneType: pass a dense torch tensor", id="no logits"),
        pytest.param({"logits": [[0.0]]}, DataError, "logits are list", id="list of logits"),
        pytest.param({"logits": torch.ones(5, 4).to_sparse()}, DataError, "layout torch.sparse_coo", id="sparse logits"),
        pytest.param({"logits": torch.ones(5, 4).to(torch.float8_e4m3fn)}, DataError, "float8_e4m3fn", id="float8 logits"),
        *[
            pytest.param(
                {name: torch.ones(5, dtype=torch.complex64)}, DataError, f"{name} is torch.complex64", id=f"complex {name}"
            )
            for name in ("old_log_probs", "importance_weights")
        ],
        pytest.param({"loss_mask": torch.tensor([1, 2, 1, 0, 1])}, DataError, "other than 0 and 1", id="integer mask of 2"),
        pytest.param({"cu_seqlens": [0, 2, 5]}, DataError, "cu_seqlens is list: pass a torch tensor", id="list of bounds"),
        pytest.param({"advantages": [1.0, -1.0]}, DataError, "advantages is list", id="list of advantages"),
        pytest.param({"token_counts": [2, 3]}, DataError, "token_counts is list", id="list of counts"),
        pytest.param({"clip_ratio_low": "0.2"}, ConfigError, "clip_ratio_low='0.2' must be a number", id="text for a clip"),
        pytest.param({"temperature": 1e-40}, ConfigError, "temperature=1e-40 must be", id="a temperature without an inverse"),
        pytest.param({"logits": torch.zeros(1, 5, 4)}, DataError, "flatten batch and sequence", id="FB-40 3-D logits"),
        pytest.param({"old_log_probs": torch.zeros(5, device="meta")}, DataError, "is on meta and the logits on cpu", id="device"),
        pytest.param({"backend": "cuda"}, ConfigError, "backend='cuda' is not one of auto, torch, triton", id="FB-80 backend"),
    ],
)
def test_wrong_arguments_are_refused_with_a_message(changes, error, message):
    with pytest.raises(error, match=message):
        call(**changes)


def test_the_healthy_call_of_the_table_above_is_healthy():
    assert math.isfinite(call().loss.item())
