"""Each registered loss on what must not matter, what must stop the step, and what is refused: value, gradient and message."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch
from helpers import CLIP, EXACT, padded, random_batch
from loss_backends import FUSED, LOSSES, over_losses, rows_of_losses

from megatron_rl.errors import ConfigError, DataError
from megatron_rl.losses import grpo_loss
from megatron_rl.step_metrics import neutral_statistics

JUNK = [math.nan, math.inf, -1e30]


def with_every_term(batch) -> dict:
    weights = {"kl_coefficient": 0.1, "entropy_coefficient": 0.01, "regularizer_weights": batch.token_weights}
    return {"metrics": "with_entropy", **weights, **CLIP}


@pytest.mark.parametrize(("kind", "backend", "junk"), rows_of_losses(JUNK, [*JUNK, -math.inf, 1e30, 0.0]))
def test_masked_positions_may_hold_anything(kind, backend, junk):
    """FB-56: bit-equal to clean input, for the policy, KL and entropy terms, importance weights and all metrics. The masked
    tokens lie inside samples whose other tokens keep their gradient. A fused head without terms of a token's own has other
    plans for the same documents."""
    clean = random_batch([7, 3, 2], num_masked=(2, 1, 2), seed=10)
    dirty_rows = ~clean.loss_mask
    weights = {"importance_weights": torch.linspace(0.5, 1.5, 12, dtype=torch.float64)}

    def dirty(x):
        return torch.where(dirty_rows if x.dim() == 1 else dirty_rows[:, None], junk, x)

    labels = torch.where(dirty_rows, -100 if junk < 0 else 11 + 5, clean.labels)
    advantages = clean.advantages.clone()
    advantages[2] = junk  # of the fully masked third document
    changed = {"logits": dirty(clean.logits), "old_log_probs": dirty(clean.old_log_probs)}
    batch = replace(clean, labels=labels, advantages=advantages, **changed)
    every_term = (weights | {"ref_log_probs": clean.old_log_probs - 0.1}, with_every_term(clean))
    for per_token, options in [every_term, (weights, {"metrics": "basic", **CLIP})][: 2 if backend is FUSED else 1]:
        got, gradient = backend.run(LOSSES[kind], batch, **{k: dirty(v) for k, v in per_token.items()}, **options)
        want, clean_gradient = backend.run(LOSSES[kind], clean, **per_token, **options)
        for name in ("loss", "policy_loss", "kl_loss", "entropy", "log_probs", "num_nonfinite"):
            one, other = getattr(got, name), getattr(want, name)
            assert one is other is None or torch.equal(one, other), name
        assert torch.equal(got.metrics.values, want.metrics.values)
        assert torch.equal(gradient, clean_gradient)
        if "ref_log_probs" in per_token:
            assert (gradient[clean.loss_mask] != 0).any(1).all(), "the other tokens keep a gradient"


@pytest.mark.parametrize(("kind", "backend", "tail"), rows_of_losses([5], [1, 63]))
def test_a_tail_of_padding_changes_nothing(kind, backend, tail):
    """FB-63: padding past cu_seqlens[-1] is out of every document, whatever its mask and contents."""
    batch = random_batch([4, 1, 3])
    options = {"metrics": "with_entropy", "entropy_coefficient": 0.1, "regularizer_weights": batch.token_weights, **CLIP}
    got, gradient = backend.run(LOSSES[kind], padded(batch, tail), **options)
    want, clean_gradient = backend.run(LOSSES[kind], batch, **options)
    # The sums run over other lengths and so round in another order; nothing else may differ by a bit.
    torch.testing.assert_close(got.loss, want.loss, **EXACT)
    torch.testing.assert_close(got.metrics.values, want.metrics.values, **EXACT)
    assert torch.equal(gradient[:-tail], clean_gradient) and (gradient[-tail:] == 0).all()
    assert torch.equal(got.log_probs[:-tail], want.log_probs)


TENSORS = ["logits", "old_log_probs", "advantages", "importance_weights", "ref_log_probs", "labels"]


@pytest.mark.parametrize(("kind", "backend", "tensor"), rows_of_losses(TENSORS))
def test_an_unmasked_value_that_is_not_finite_stops_the_step(kind, backend, tensor):
    """FB-41, FB-135: NaN would train as if on-policy; the message names document and tensor. On CUDA it is counted."""
    named = "log_probs" if tensor in ("logits", "labels") else tensor
    for value in (math.nan, math.inf, -math.inf) if backend.name == "torch" else (math.nan,):
        batch = random_batch([3, 4, 2], num_masked=(0, 1, 0), seed=12)
        per_token = {"importance_weights": torch.ones(9).double(), "ref_log_probs": batch.old_log_probs.clone()}
        options = {**per_token, "kl_coefficient": 0.1, "regularizer_weights": torch.ones(3), **CLIP}
        # Token 5 is unmasked and belongs to document 1.
        if tensor in options:
            options[tensor][5] = value
        elif tensor == "labels":
            batch.logits[5, batch.labels[5]] = -math.inf
        else:
            getattr(batch, tensor)[1 if tensor == "advantages" else 5] = value
        count = 3 if tensor == "advantages" else 1
        if backend.device == "cuda":
            assert backend.run(LOSSES[kind], batch, **options)[0].num_nonfinite.tolist() == [0, count, 0]
            continue
        with pytest.raises(
            DataError, match=f"document 1 of the micro-batch has {count} .* not finite, in .*{named}.*; 1 documents"
        ):
            backend.run(LOSSES[kind], batch, **options)


@over_losses("grpo")
@pytest.mark.parametrize("lengths", [[3, 2], [0, 0], []], ids=["all masked", "no token", "no document"])
def test_an_idle_rank_stays_in_the_graph(kind, backend, lengths):
    """FB-25, FB-45, FB-55: the loss is 0 and still depends on the logits, no metric is 0 / 0, and backward gives zeros."""
    batch = random_batch(lengths, num_masked=tuple(lengths), seed=14)
    options = {**with_every_term(batch), "ref_log_probs": batch.old_log_probs}
    output, gradient = backend.run(LOSSES[kind], batch, **options)
    assert output.loss.item() == 0.0 and gradient.shape == batch.logits.shape and (gradient == 0).all()
    neutral = neutral_statistics(has_entropy=True).values
    neutral[0] = len(lengths)
    torch.testing.assert_close(output.metrics.values, neutral)


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


NUMBERS = ("clip_ratio_high", "kl_coefficient", "entropy_coefficient")
HUGE = {name: torch.full((5,), 1e300, dtype=torch.float64) for name in ("importance_weights", "ref_log_probs")}
KL = {"kl_coefficient": 0.1, "regularizer_weights": torch.ones(2)}
FRACTIONS = (2.5, math.nan, math.inf, -2)
PER_TOKEN = ("old_log_probs", "importance_weights")
WRONG_DATA = [  # (argument, value, message)
    ("loss_mask", torch.ones(5), r"loss_mask must be \[T=5\] bool"),
    ("loss_mask", torch.ones(4, dtype=torch.bool), r"\[T=5\]"),
    ("loss_mask", torch.tensor([1, 2, 1, 0, 1]), "other than 0 and 1"),
    ("old_log_probs", torch.zeros(6), r"old_log_probs must be \[T=5\], got \(6,\)"),
    ("old_log_probs", torch.zeros(5, device="meta"), "is on meta and the logits on cpu"),
    ("token_weights", torch.ones(3), r"token_weights must be \[N=2\]"),
    ("token_weights", torch.tensor([1, math.nan]), "not finite"),
    ("token_weights", torch.full((2,), 1e300, dtype=torch.float64), "token_weights has values .* not finite in torch.float32"),
    ("importance_weights", torch.ones(2), r"importance_weights must be \[T=5\]"),
    ("importance_weights", HUGE["importance_weights"], "not finite, in importance_weights"),
    ("advantages", torch.ones(3), r"must be \[N=2\], one a sample, or \[T=5\]"),
    ("advantages", torch.ones(2, 1), r"must be \[N=2\]"),
    ("advantages_per", "token", r'advantages_per="token" must be \[5\]'),
    ("cu_seqlens", torch.tensor([0, 2, 6]), "ends at 6 but there are 5"),
    ("regularizer_weights", torch.tensor([1, math.nan]), "regularizer_weights has"),
    ("token_counts", torch.ones(3), r"token_counts must be \[N=2\]"),
    ("token_counts", torch.tensor([1, 2]), "token_counts says 1 for document 0, and loss_mask has 2 unmasked tokens"),
    ("token_counts", torch.tensor([20, 20]), "token_counts says 20 for document 0"),
    *[("token_counts", torch.tensor([number, 2]), "must be whole numbers of at least 0") for number in FRACTIONS],
    ("token_counts", torch.tensor([True, True]), "token_counts is torch.bool"),
    ("vocab_size", 3.0, "vocab_size=3.0 must be a whole number"),
    ("labels", torch.zeros(5), "int64"),
    ("labels", None, "labels are NoneType: pass a torch tensor"),
    ("labels", [0, 1, 2, 0, 1], "labels are list"),
    ("logits", None, "logits are NoneType: pass a dense torch tensor"),
    ("logits", [[0.0]], "logits are list"),
    ("logits", torch.ones(5, 4).to_sparse(), "layout torch.sparse_coo"),
    ("logits", torch.ones(5, 4).to(torch.float8_e4m3fn), "float8_e4m3fn"),
    ("logits", torch.zeros(1, 5, 4), "flatten batch and sequence"),
    *[(name, torch.ones(5, dtype=torch.complex64), f"{name} is torch.complex64") for name in PER_TOKEN],
    ("cu_seqlens", [0, 2, 5], "cu_seqlens is list: pass a torch tensor"),
    ("advantages", [1.0, -1.0], "advantages is list"),
    ("token_counts", [2, 3], "token_counts is list"),
]
WRONG_SETTINGS = [
    ("advantages_per", "turn", 'must be "sample", "token" or None'),
    ("clip_ratio_low", 1.3, r"clip_ratio_low=1.3 must be in \[0, 1\)"),
    *[(f"clip_ratio_{side}", value, f"clip_ratio_{side}={value}") for side in ("low", "high") for value in (-0.1, math.nan)],
    *[(name, value, f"{name}={value} must be a finite") for name in NUMBERS[1:] for value in (-0.1, math.nan, math.inf)],
    *[(name, value, f"{name}={re.escape(repr(value))} must be a number") for name in NUMBERS for value in ("0.1", True, [0.1])],
    *[(name, 1e300, f"{name}=.* must be a finite number") for name in NUMBERS],
    ("clip_ratio_low", "0.2", "clip_ratio_low='0.2' must be a number"),
    ("kl_coefficient", None, "kl_coefficient=None must be a number"),
    ("kl_coefficient", 0.1, "needs ref_log_probs"),
    ("entropy_coefficient", 0.1, "need regularizer_weights"),
    *[("temperature", value, f"temperature={value!r} must be") for value in (0.0, "1", None, 1e-40)],
    *[("metrics", value, "none, basic, with_entropy") for value in ("all", ["basic"])],
    ("inplace", "no", "inplace='no' must be True or False"),
    ("backend", "cuda", "backend='cuda' is not one of auto, torch, triton"),
]
REFUSED = [(DataError, *row) for row in WRONG_DATA] + [(ConfigError, *row) for row in WRONG_SETTINGS]


@pytest.mark.parametrize(("error", "name", "value", "message"), REFUSED)
def test_wrong_arguments_are_refused_with_a_message(error, name, value, message):
    """FB-40, FB-63, FB-65, FB-74, FB-80, FB-116: no shape is guessed or broadcast, nothing is dropped without a word."""
    with pytest.raises(error, match=message):
        call(**{name: value})


def test_the_healthy_call_of_the_table_above_is_healthy():
    assert math.isfinite(call().loss.item())
    with pytest.raises(DataError, match="not finite, in ref_log_probs"):
        call(ref_log_probs=HUGE["ref_log_probs"], **KL)
