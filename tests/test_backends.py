"""A backend that cannot run is refused when a run begins, not at its first loss; what a fresh process has; which one "auto" is;
callers that torch compiles."""

from __future__ import annotations

import sys
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
from helpers import random_batch, run_in_children
from host_steps import CUSTOM_LOSS

import megatron_rl
from megatron_rl.config import Backend
from megatron_rl.errors import ConfigError
from megatron_rl.hosts import training_hooks
from megatron_rl.layout.groups import SINGLE
from megatron_rl.ops import backends
from megatron_rl.ops.fp32_head import fp32_head_logits
from megatron_rl.testing.oracle import LOSSES

NEEDS_CUDA = "backend='triton' needs CUDA and the logits are on cpu"


@pytest.fixture
def not_interpreted(monkeypatch):
    """As in a process that is no test's."""
    monkeypatch.setattr(backends, "why_triton_is_missing", lambda: None)
    monkeypatch.setattr(backends, "is_interpreted", lambda: False)


def test_the_init_hook_lists_it_with_the_launchs_other_problems(not_interpreted, monkeypatch):
    """FB-80: in the host's training actor, before any data, and once for all problems."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    launch = {**CUSTOM_LOSS, "loss_aggregation": "sample_mean", "context_parallel_size": 2, "policy_loss_backend": "triton"}
    with pytest.raises(ConfigError) as error:
        training_hooks.custom_megatron_init(Namespace(**launch))
    assert NEEDS_CUDA in str(error.value) and "--context-parallel-size 2" in str(error.value)


ON_CUDA = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, device="cuda:0")


def test_auto_is_triton_for_cuda_logits_of_at_most_32_bits(monkeypatch):
    """Device and dtype alone decide; a Triton that cannot be imported is an error there and no reason to compute in torch."""
    double = SimpleNamespace(is_cuda=True, dtype=torch.float64, device="cuda:0")
    chosen = [("auto", ON_CUDA), ("torch", ON_CUDA), ("auto", double), ("auto", torch.zeros(1))]
    assert [backends.resolve_backend(*given) for given in chosen] == [Backend.TRITON, Backend.TORCH, Backend.TORCH, Backend.TORCH]
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(backends, "why_triton_is_missing", backends.why_triton_is_missing.__wrapped__)
    for backend in ("auto", "triton"):
        with pytest.raises(ConfigError, match=f"backend='{backend}' on cuda:0 needs Triton.*install the Triton.*backend='torch'"):
            backends.resolve_backend(backend, ON_CUDA)
    assert not backends.is_interpreted()


def test_rocm_takes_torch_and_refuses_triton_by_name(not_interpreted, monkeypatch):
    """Its tensors say is_cuda, and Triton refuses the launch option maxnreg there: a KeyError in each loss."""
    assert backends.resolve_backend("auto", ON_CUDA) == Backend.TRITON
    monkeypatch.setattr(torch.version, "hip", "7.1")
    assert backends.resolve_backend("auto", ON_CUDA) == Backend.TORCH
    with pytest.raises(ConfigError, match="built for ROCm 7.1: .*--policy-loss-backend torch"):
        backends.resolve_backend("triton", ON_CUDA)


def test_a_triton_that_is_too_old_is_refused_by_name(monkeypatch):
    for version, is_refused in (("3.3.1", True), ("3.4.0+git1234", False), ("3.10.0", False)):
        monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__=version))
        reason = backends.why_triton_is_missing.__wrapped__()
        assert (reason is not None) == is_refused, version
        assert reason is None or "Triton 3.3.1 is older than 3.4" in reason


GRADIENT = """
import sys, torch, megatron_rl
from megatron_rl.layout.groups import SINGLE
x = torch.zeros(2, 3, requires_grad=True)
megatron_rl.vocab_parallel_log_probs(x, torch.zeros(2, dtype=torch.int64), tp_group=SINGLE).sum().backward()
assert 'torch._dynamo' not in sys.modules
"""
ONES_OWN_GRPO = """
from megatron_rl import ConfigError, register_policy_loss
try:
    register_policy_loss('grpo')(lambda log_ratio, advantages: log_ratio)
except ConfigError as error:
    assert 'already registered by megatron_rl.losses.grpo' in str(error)
else:
    raise SystemExit('a name of the package was free')
from megatron_rl import gspo_loss
"""
TRITON_ON_CPU = """
from megatron_rl import ConfigError, vocab_parallel_log_probs
from megatron_rl.ops.backends import is_interpreted
assert not is_interpreted()
try:
    vocab_parallel_log_probs(torch.zeros(1, 4), torch.tensor([2]), backend='triton')
except ConfigError as error:
    assert "backend='triton' needs CUDA and the logits are on cpu: pass backend='auto' or 'torch'" in str(error)
else:
    raise SystemExit('it ran')
"""
HUB = "from megatron_rl.weights import get_loss_aggregation; from megatron_rl.declare import get_policy_loss, POLICY_LOSSES; "


@pytest.mark.slow
def test_what_a_fresh_process_has():
    """FB-80: Triton decides when a kernel is defined whether it interprets. The registries are full at the first look, whichever it
    is, and who does not compile does not import the compiler, which takes seconds."""
    looks = ["assert get_policy_loss('grpo').name == 'grpo'", "get_loss_aggregation('sample_mean')"]
    looks += [f"assert sorted(POLICY_LOSSES.names()) == {sorted(LOSSES)}"]
    codes = [*(HUB + look for look in looks), ONES_OWN_GRPO, GRADIENT]
    codes += [TRITON_ON_CPU] if backends.why_triton_is_missing() is None and not torch.cuda.is_available() else []
    run_in_children(*codes)


# Callers that are compiled: the losses keep their gradient. The other tests run with torch.compile off (conftest.py)

BATCH = random_batch([5, 3], vocab_size=7)
HIDDEN_SIZE = 4
GROUPS = {"tp_group": SINGLE, "cp_group": SINGLE, "advantages_per": "sample"}


@pytest.fixture
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
# Each front entry as a function of one leaf: logits [T, V] or hidden states [T, H].
FRONT_DOORS = {
    "a loss of logits": (BATCH.logits, lambda leaf: megatron_rl.gspo_loss(leaf, *BATCH.arguments(), **GROUPS).loss),
    "a loss of hidden states": (HIDDEN, lambda leaf: megatron_rl.linear_grpo_loss(leaf, WEIGHT, *BATCH.arguments(), **GROUPS).loss),
    "log-probabilities": (
        BATCH.logits,
        lambda leaf: megatron_rl.vocab_parallel_log_probs(leaf, BATCH.labels, tp_group=SINGLE).sum(),
    ),
    "the fp32 head": (
        HIDDEN.bfloat16(),
        lambda leaf: fp32_head_logits(leaf, WEIGHT.bfloat16(), tp_group=SINGLE).square().sum(),
    ),
}


def gradient(function, leaf: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = leaf.clone().requires_grad_()
    value = function(leaf)
    value.backward()
    return value.detach(), leaf.grad


@pytest.mark.slow
@pytest.mark.parametrize("name", FRONT_DOORS)
def test_a_compiled_caller_gets_the_gradient(name, compiling):
    """Catches a loss that keeps its value and loses its gradient. Alone backward would fail; beside another term nothing would.
    Backends that compile meet the same breaks of the graph."""
    leaf, loss = FRONT_DOORS[name]

    def step(leaf):
        scaled = 2.0 * leaf
        return loss(scaled) + scaled.square().sum()

    value, expected = gradient(step, leaf)
    compiled = torch.compile(step, backend="eager")
    for _ in range(2):  # once traced, once from the cache
        got_value, got = gradient(compiled, leaf)
        torch.testing.assert_close(got_value, value)
        torch.testing.assert_close(got, expected)
    assert expected.abs().max() > 0
