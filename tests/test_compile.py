"""Callers that are compiled: the losses keep their gradient. The other tests run with torch.compile off (conftest.py)."""

from __future__ import annotations

import pytest
import torch
from helpers import random_batch

import megatron_rl
from megatron_rl.layout.groups import SINGLE
from megatron_rl.ops.fp32_head import fp32_head_logits
from megatron_rl.policy_loss import policy_loss

BATCH = random_batch([5, 3], vocab_size=7)
HIDDEN_SIZE = 4
GROUPS = {"tp_group": SINGLE, "cp_group": SINGLE, "advantages_per": "sample"}


@pytest.fixture(autouse=True)
def compiling(monkeypatch):
    """torch.compile at work: TORCH_COMPILE_DISABLE is read when torch._dynamo is imported."""
    import torch._dynamo

    monkeypatch.delenv("TORCH_COMPILE_DISABLE")
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no pool of processes
    torch._dynamo.reset()
    with torch._dynamo.config.patch(disable=False):
        yield
    torch._dynamo.reset()


WEIGHT, HIDDEN = (
    torch.randn(rows, HIDDEN_SIZE, generator=torch.Generator().manual_seed(rows), dtype=torch.float64) for rows in (7, 8)
)
# Each front door as a function of one leaf: logits [T, V] or hidden states [T, H].
FRONT_DOORS = {
    "grpo_loss": (BATCH.logits, lambda leaf: megatron_rl.grpo_loss(leaf, *BATCH.arguments(), **GROUPS).loss),
    "gspo_loss": (BATCH.logits, lambda leaf: megatron_rl.gspo_loss(leaf, *BATCH.arguments(), **GROUPS).loss),
    "a registered loss": (
        BATCH.logits,
        lambda leaf: policy_loss("own_reinforce", leaf, *BATCH.arguments(), **GROUPS).loss,
    ),
    "linear_grpo_loss": (
        HIDDEN,
        lambda leaf: megatron_rl.linear_grpo_loss(leaf, WEIGHT, *BATCH.arguments(), **GROUPS).loss,
    ),
    "linear_gspo_loss": (
        HIDDEN,
        lambda leaf: megatron_rl.linear_gspo_loss(leaf, WEIGHT, *BATCH.arguments(), **GROUPS).loss,
    ),
    "vocab_parallel_log_probs": (
        BATCH.logits,
        lambda leaf: megatron_rl.vocab_parallel_log_probs(leaf, BATCH.labels, tp_group=SINGLE).sum(),
    ),
    "fp32_head_logits": (
        HIDDEN.bfloat16(),
        lambda leaf: fp32_head_logits(leaf, WEIGHT.bfloat16(), tp_group=SINGLE).square().sum(),
    ),
}


def gradient(function, leaf: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = leaf.clone().requires_grad_()
    value = function(leaf)
    value.backward()
    return value.detach(), leaf.grad


# Alone and beside another term, each in one of the two backends that trace, in turn. Inductor meets the same breaks of the graph.
CASES = [(name, *(("eager", True), ("aot_eager", False))[number % 2]) for number, name in enumerate(FRONT_DOORS)]


@pytest.mark.parametrize(("name", "backend", "beside"), CASES)
def test_a_compiled_caller_gets_the_gradient(name, backend, beside, own_losses):
    """Catches a loss that keeps its value and loses its gradient. Alone backward would fail; beside another term nothing would."""
    leaf, loss = FRONT_DOORS[name]

    def step(leaf):
        scaled = 2.0 * leaf
        return loss(scaled) + (scaled.square().sum() if beside else 0.0)

    value, expected = gradient(step, leaf)
    compiled = torch.compile(step, backend=backend)
    for _ in range(2):  # once traced, once from the cache
        got_value, got = gradient(compiled, leaf)
        torch.testing.assert_close(got_value, value)
        torch.testing.assert_close(got, expected)
    assert expected.abs().max() > 0


def test_fullgraph_says_so():
    """Whoever forbids graph breaks is told; a loss without a gradient would be the alternative."""
    leaf, loss = FRONT_DOORS["grpo_loss"]
    with pytest.raises(Exception, match="disable"):
        torch.compile(loss, backend="eager", fullgraph=True)(leaf.clone().requires_grad_())


def test_compiled_autograd_gets_the_gradient():
    """A backward that is traced itself runs the hand-written ones as they are."""
    leaf, loss = FRONT_DOORS["gspo_loss"]
    _, expected = gradient(loss, leaf)
    traced = leaf.clone().requires_grad_()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        loss(traced).backward()
    torch.testing.assert_close(traced.grad, expected)
