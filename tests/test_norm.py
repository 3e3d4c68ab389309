"""SequenceParallelNorm against the textbook formula, and the mark that its parameters carry."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_rl.errors import ConfigError
from megatron_rl.megatron.attention import SequenceParallelNorm


def norm_config(**overrides):
    values = {
        "normalization": "RMSNorm",
        "layernorm_zero_centered_gamma": False,
        "use_cpu_initialization": True,
        "params_dtype": torch.float64,
        "sequence_parallel": True,
    }
    return SimpleNamespace(**{**values, **overrides})


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_the_norm_is_the_textbook_one_and_marks_its_parameters(normalization):
    """Catches a missing mark, without which finalize_model_grads leaves the gradient of one tp rank under SP."""
    norm = SequenceParallelNorm(norm_config(normalization=normalization), 5, eps=0.1)
    hidden = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for row, actual in zip(hidden, norm(hidden), strict=True):
        centred = row - row.sum() / 5 if normalization == "LayerNorm" else row
        torch.testing.assert_close(actual, centred / ((centred**2).sum() / 5 + 0.1) ** 0.5)
    names = ["weight", "bias"] if normalization == "LayerNorm" else ["weight"]
    assert [name for name, _ in norm.named_parameters()] == names
    assert all(parameter.sequence_parallel for parameter in norm.parameters())
    unmarked = SequenceParallelNorm(norm_config(normalization=normalization, sequence_parallel=False), 5)
    assert not any(parameter.sequence_parallel for parameter in unmarked.parameters())


def test_a_norm_that_would_be_another_one_is_refused():
    with pytest.raises(ConfigError, match="normalization='L2Norm' must be 'LayerNorm' or 'RMSNorm'"):
        SequenceParallelNorm(norm_config(normalization="L2Norm"), 5)
    with pytest.raises(ConfigError, match="layernorm_zero_centered_gamma"):
        SequenceParallelNorm(norm_config(layernorm_zero_centered_gamma=True), 5)
