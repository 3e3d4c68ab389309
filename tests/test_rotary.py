"""Rotary positions of build_gpt_model: the angles are those of the papers, and what the model would leave out is refused."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import error_of, pool_of

from megatron_rl.megatron.model import build_gpt_model, transformer_config
from megatron_rl.megatron.rotary import Llama3, Rotary, Yarn

pytestmark = pytest.mark.megatron

HEAD, LENGTH = 16, 6
YARN = Yarn(factor=8.0, original_length=64, beta_fast=4.0, beta_slow=1.0)
LLAMA3 = Llama3(factor=4.0, low_freq_factor=0.5, high_freq_factor=3.0, original_length=64)
pool = pool_of(1)


def model_of(rotary: Rotary, **options):
    config = transformer_config(num_layers=1, hidden_size=2 * HEAD, num_attention_heads=2, **options)
    return build_gpt_model(config, vocab_size=16, max_sequence_length=LENGTH, rotary=rotary)


def angles_on_rank(rank: int, rotary: Rotary) -> tuple[torch.Tensor, float]:  # [LENGTH, dimensions], scale of the softmax
    model = model_of(rotary)
    return model.rotary_pos_emb(LENGTH)[:, 0, 0], model.decoder.layers[0].self_attention.core_attention.softmax_scale


def frequencies(size: int, base: float) -> list[float]:
    return [base ** (-2 * pair / size) for pair in range(size // 2)]


def yarn_by_hand(yarn: Yarn, base: float) -> list[float]:
    """A frequency f turns L f / 2 pi times within the first length L: one with many turns stays, one with few is divided."""

    def place(turns: float) -> float:  # the pair of dimensions that turns so often
        return HEAD * math.log(yarn.original_length / (2 * math.pi * turns)) / (2 * math.log(base))

    low, high = place(yarn.beta_fast), place(yarn.beta_slow)
    low, high = max(low, 0), min(high, HEAD - 1)
    shares = [min(max((pair - low) / (high - low), 0.0), 1.0) for pair in range(HEAD // 2)]
    return [f * (1 - share) + f / yarn.factor * share for f, share in zip(frequencies(HEAD, base), shares, strict=True)]


def llama3_by_hand(llama3: Llama3, base: float) -> list[float]:
    found = []
    for f in frequencies(HEAD, base):
        turns = llama3.original_length * f / (2 * math.pi)
        kept = (turns - llama3.low_freq_factor) / (llama3.high_freq_factor - llama3.low_freq_factor)
        found.append(f if kept > 1 else f / llama3.factor if kept < 0 else kept * f + (1 - kept) * f / llama3.factor)
    return found


@pytest.mark.parametrize(
    ("rotary", "by_hand", "factor"),
    [
        pytest.param(Rotary(), frequencies(HEAD, 10000), 1.0, id="whole heads"),
        pytest.param(Rotary(base=1e6), frequencies(HEAD, 1e6), 1.0, id="another base"),
        pytest.param(Rotary(base=500.0, llama3=LLAMA3), llama3_by_hand(LLAMA3, 500.0), 1.0, id="Llama 3"),
        pytest.param(Rotary(base=500.0, yarn=YARN), yarn_by_hand(YARN, 500.0), 0.1 * math.log(8) + 1, id="YaRN"),
    ],
)
def test_the_angles_are_those_of_the_paper(pool, rotary, by_hand, factor):
    angles, found = pool.run(angles_on_rank, rotary)[0]
    expected = torch.outer(torch.arange(LENGTH).double(), torch.tensor(by_hand * 2).double())
    torch.testing.assert_close(angles.double(), expected, rtol=1e-6, atol=1e-7)  # float32 frequencies
    assert found == pytest.approx(factor**2 / math.sqrt(HEAD))  # on queries and on keys


def refusals_on_rank(rank: int) -> list[str]:
    latent = {"multi_latent_attention": True, "rope_type": "rope"}
    cases = [(Rotary(base=500.0), latent), (Rotary(yarn=YARN), {"softmax_scale": 0.1}), (Rotary(yarn=YARN, llama3=LLAMA3), {})]
    return [error_of(lambda rotary=rotary, options=options: model_of(rotary, **options)) for rotary, options in cases]


def test_what_the_model_would_leave_out_is_refused(pool):
    """It would take the other form, or none, without an error."""
    latent, scale, two = pool.run(refusals_on_rank)[0]
    assert "with multi_latent_attention: the config has its positions and wins; leave rotary out" in latent
    assert "softmax_scale=0.1 with rotary.yarn, which makes it 0.364" in scale
    assert "rotary has llama3 and yarn: positions are scaled in one form" in two
