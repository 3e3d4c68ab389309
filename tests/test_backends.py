"""A backend that cannot run is refused when a run begins, not at its first loss. The choice itself: test_log_probs_triton.py."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch

from megatron_rl.config import PolicyLossConfig
from megatron_rl.errors import ConfigError
from megatron_rl.hosts import facts, init_hook
from megatron_rl.ops import backends

TRITON = PolicyLossConfig(policy_loss_backend="triton")
NEEDS_CUDA = "backend='triton' needs CUDA and the logits are on cpu"


@pytest.fixture
def not_interpreted(monkeypatch):
    """As in a process that is no test's."""
    monkeypatch.setattr(backends, "why_triton_is_missing", lambda: None)
    monkeypatch.setattr(backends, "is_interpreted", lambda: False)


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_what_can_run_is_not_refused(not_interpreted, backend):
    backends.check_backend(backend, torch.device("cpu"))


@pytest.mark.megatron
def test_no_trainer_is_made_with_a_backend_that_cannot_run(not_interpreted):
    """FB-80: before a model is built and a rollout is sampled."""
    from megatron_rl.megatron.trainer import PolicyTrainer, TrainerSettings

    settings = TrainerSettings(num_layers=1, hidden_size=8, num_attention_heads=1, vocab_size=4, max_sequence_length=4)
    with pytest.raises(ConfigError, match=NEEDS_CUDA):
        PolicyTrainer(settings, TRITON, torch.device("cpu"))


def test_the_init_hook_lists_it_with_the_launchs_other_problems(not_interpreted, monkeypatch):
    """FB-80: in the host's training actor, before any data, and once for all problems."""
    monkeypatch.setattr(facts, "_remembered_args", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    launch = {
        "loss_aggregation": "sample_mean",
        "loss_type": "custom_loss",
        "custom_loss_function_path": "megatron_rl.hooks.custom_loss",
        "advantage_estimator": "grpo",
        "context_parallel_size": 2,
        "policy_loss_backend": "triton",
    }
    with pytest.raises(ConfigError) as error:
        init_hook.custom_megatron_init(Namespace(**launch))
    assert NEEDS_CUDA in str(error.value) and "--context-parallel-size 2" in str(error.value)
