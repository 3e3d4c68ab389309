"""What stops a step, what a loss refuses of its advantages, which bits nothing moves, and the tensors that it may be given.

test_generated_steps.py has values of whole steps, test_refused.py what is said of wrong arguments.
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers import CLIP, EXACT, KERNEL_DEVICE, float32, random_batch, run_loss
from linear_cases import every_term
from loss_backends import KERNEL, LOSSES, OF_EACH_LEVEL, TRITON, over_backends
from refused import log_probs_of_hidden, log_probs_of_logits, loss_of_hidden, loss_of_logits
from torch import Tensor

from megatron_rl.errors import ConfigError, DataError
from megatron_rl.losses.corrections import CorrectionSettings
from megatron_rl.ops.backends import vocab_shard
from megatron_rl.ops.log_probs import vocab_parallel_log_probs
from megatron_rl.policy_loss import grpo_loss, policy_loss

BATCH = random_batch([5, 1, 9, 3])


@over_backends
def test_advantages_that_vary_inside_a_sample_are_refused_at_sequence_level(monkeypatch, backend):
    """Never an average. A difference of 1e-3 in one token of nine is found; where nobody looks, as on a GPU, it is counted."""
    varying = replace(BATCH, advantages=torch.ones(18, dtype=torch.float64))
    varying.advantages[9] += 1e-3
    if backend.device == "cpu":
        with pytest.raises(DataError, match="advantages vary inside document 2: a sequence-level loss takes one advantage"):
            backend.run(LOSSES["gspo"], varying, **CLIP)
    monkeypatch.setattr("megatron_rl.policy_loss.api.refuse_bad_data", lambda *arguments: None)
    assert backend.run(LOSSES["gspo"], varying, **CLIP)[0].num_nonfinite.tolist() == [0, 0, 6, 0]


def test_advantages_that_fit_both_readings_are_taken_where_both_are_the_same():
    """One token a sample. test_refused.py has the others: a guess would be silently wrong."""
    one_each = random_batch([1, 1, 1], num_masked=(0, 0, 0), seed=9)
    both = (run_loss(LOSSES["gspo"], one_each, **said, **CLIP)[1] for said in ({}, {"advantages_per": "sample"}))
    assert torch.equal(*both)


def test_a_gradient_of_the_gradient_is_refused():
    """create_graph=True would give a gradient that does not require grad: a penalty on it would have no effect."""
    logits = BATCH.logits.clone().requires_grad_()
    output = LOSSES["grpo"](logits, *BATCH.arguments(), **CLIP)
    for value in (output.loss, vocab_parallel_log_probs(logits, BATCH.labels).sum()):
        with pytest.raises(ConfigError, match="create_graph=True"):
            torch.autograd.grad(value, logits, create_graph=True)


def test_the_order_of_documents_moves_no_bit_of_a_float32_loss():
    """Sums are float64: 300 documents of very different sizes, forwards and backwards."""
    batch = random_batch([1 + number % 7 for number in range(300)], num_masked=(0,) * 300, seed=5)
    scale = torch.logspace(-4, 4, 300, dtype=torch.float64)
    batch = replace(batch, logits=batch.logits.float(), old_log_probs=batch.old_log_probs.float(), token_weights=scale)
    backwards = list(reversed(range(300)))
    turned = batch.take([batch.documents[number] for number in backwards], backwards)
    losses = [grpo_loss(one.logits, *one.arguments(), advantages_per="sample", **CLIP).loss for one in (batch, turned)]
    assert torch.equal(*losses) and losses[0].dtype == torch.float32


SMALL = random_batch([4, 1, 3], seed=15)


@pytest.mark.parametrize("kind", OF_EACH_LEVEL)
@over_backends
def test_upstream_factors_scale_the_gradient_and_the_report_is_not_aliased(kind, backend):
    """The schedule divides the returned loss in place; the detached parts and the gradient keep their values."""
    want, gradient = backend.run(LOSSES[kind], SMALL, metrics="basic", **CLIP)
    output, divided = backend.run(LOSSES[kind], SMALL, divisor=4, metrics="basic", **CLIP)
    assert torch.equal(output.loss, want.loss / 4)
    assert torch.equal(output.policy_loss, want.policy_loss)
    assert torch.equal(output.metrics.values, want.metrics.values)
    torch.testing.assert_close(divided, gradient / 4, **EXACT)


# What stops a step

TENSORS = ["logits", "old_log_probs", "advantages", "importance_weights", "ref_log_probs", "labels"]


@pytest.mark.parametrize("kind", OF_EACH_LEVEL)
@pytest.mark.parametrize("tensor", TENSORS)
@over_backends
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


OF_SAMPLES = {"kind": "tis", "level": "sequence_mean", "high": 2.0}
OF_BOTH = {"kind": "mask", "level": "sequence_mean", "low": 0.8, "high": 1.2, "sequence_delta": 0.02}


@over_backends
@pytest.mark.parametrize("name", ["grpo", "gspo"])
@pytest.mark.parametrize(("settings", "value"), [({"kind": "tis"}, math.nan), (OF_SAMPLES, math.inf), (OF_BOTH, math.nan)])
def test_a_sampler_s_log_prob_that_is_not_finite_stops_the_step(backend, name, settings, value):
    """Also where it enters a sum of the sample alone, which the kernels do not read, and a bound would hide it. It is told alone:
    the weights of its sample are made from it, and nobody gave importance weights."""
    batch = random_batch([4, 3], num_masked=(1, 1))
    rollout = batch.old_log_probs.clone()
    rollout[[0, 5]] = value  # token 0 is masked
    options = {"correction": CorrectionSettings(**settings), "rollout_log_probs": rollout.to(backend.device, backend.dtype)}
    if backend.device == "cuda":  # where nobody looks, it is counted
        assert backend.run(LOSSES[name], batch, **options, **CLIP)[0].num_nonfinite.tolist() == [0, 1]
        return
    with pytest.raises(DataError, match="document 1 .*has 1 unmasked tokens .*not finite, in rollout_log_probs;"):
        backend.run(LOSSES[name], batch, **options, **CLIP)


OF_TWO = [SimpleNamespace(rank=lambda rank=rank: rank, size=lambda: 2) for rank in range(2)]


@pytest.mark.parametrize("tp_group", OF_TWO, ids=["first", "last"])
@pytest.mark.parametrize(
    ("call", "columns"), [(loss_of_logits, 4), (loss_of_hidden, 16), (log_probs_of_logits, 16), (log_probs_of_hidden, 16)]
)
def test_a_shard_without_a_real_column_is_refused_on_each_rank(call, columns, tp_group):
    """Of gathered logits the first rank would train the whole vocabulary, and the others nothing. No rank asks another."""
    with pytest.raises(DataError, match=f"vocab_size={columns} with {columns} columns on each of 2 .* begin at {columns}, "):
        call(vocab_size=columns, tp_group=tp_group, check_ranks=False)
    assert vocab_shard(columns, 1.0, columns + 1, tp_group).num_columns == [columns, 1][tp_group.rank()]
    assert vocab_shard(columns, 1.0, None, tp_group).num_columns == columns


# Tensors of callers


def run_of_odd_tensors(**changes) -> list[Tensor]:
    """Loss, log-probabilities, metrics and the gradient by the logits, of a small batch of float32."""
    batch = float32(random_batch([0, 1, 3, 4, 5, 11, 5], num_masked=(0, 0, 1, 0, 2, 3, 5)))
    options = every_term(batch) | {
        "token_counts": torch.tensor([int(batch.loss_mask[document].sum()) for document in batch.documents])
    }
    given = {name: getattr(batch, name).bfloat16().float() for name in ("old_log_probs", "advantages")}
    given |= {name: getattr(batch, name) for name in ("labels", "loss_mask", "cu_seqlens", "token_weights")} | options
    given = {name: changes.get(name, lambda value: value)(value) for name, value in given.items()}
    given = {name: value.to(KERNEL_DEVICE) if isinstance(value, Tensor) else value for name, value in given.items()}
    leaf = batch.logits.to(KERNEL_DEVICE).requires_grad_()
    with TRITON.small_blocks():
        output = policy_loss("gspo", leaf, backend="triton", **CLIP, **given)
        output.loss.backward()
    return [output.loss.detach(), output.log_probs, output.metrics.values, leaf.grad]


@pytest.mark.kernel
@KERNEL[1]
def test_dtypes_and_strides_of_the_callers_tensors_do_not_matter():
    """FB-80: bf16, float64, int32 counts and strided or expanded tensors give what plain ones of the same numbers give."""
    names = {"old_log_probs": Tensor.bfloat16, "advantages": Tensor.bfloat16, "loss_mask": Tensor.long, "token_counts": Tensor.int}
    strided = {"importance_weights": lambda weights: torch.stack([weights] * 2, 1)[:, 0]}
    assert all(map(torch.equal, run_of_odd_tensors(**names, **strided), run_of_odd_tensors()))
    ones = (lambda weights: torch.ones(1).expand_as(weights), lambda weights: torch.ones_like(weights))
    expanded, plain = (run_of_odd_tensors(importance_weights=of_ones) for of_ones in ones)
    assert all(map(torch.equal, expanded, plain))
