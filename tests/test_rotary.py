"""Rotary positions of build_gpt_model: the angles are those of the papers, and what a release would leave out is refused."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import error_of, pool_of

from megatron_rl.megatron.model import build_gpt_model, transformer_config
from megatron_rl.megatron.rotary import Rotary, Yarn

pytestmark = pytest.mark.megatron

HEAD, LENGTH = 16, 6
YARN = Yarn(factor=8.0, original_length=64, beta_fast=4.0, beta_slow=1.0)
pool = pool_of(1)


def model_of(rotary: Rotary, **options):
    config = transformer_config(num_layers=1, hidden_size=2 * HEAD, num_attention_heads=2, **options)
    return build_gpt_model(config, vocab_size=16, max_sequence_length=LENGTH, rotary=rotary)


def angles_on_rank(rank: int, rotary: Rotary) -> tuple[torch.Tensor, float]:  # [LENGTH, dimensions], factor of the queries
    found = model_of(rotary).rotary_pos_emb(LENGTH)
    angles, factor = found if isinstance(found, tuple) else (found, 1.0)
    return angles[:, 0, 0], float(factor)


def frequencies(size: int, base: float) -> list[float]:
    return [base ** (-2 * pair / size) for pair in range(size // 2)]


def yarn_by_hand(yarn: Yarn, base: float) -> list[float]:
    """A frequency f turns L f / 2 pi times within the first length L: one with many turns stays, one with few is divided."""

    def place(turns: float) -> float:  # the pair of dimensions that turns so often
        return HEAD * math.log(yarn.original_length / (2 * math.pi * turns)) / (2 * math.log(base))

    low, high = place(yarn.beta_fast), place(yarn.beta_slow)
    if yarn.rounds_range:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, HEAD - 1)
    shares = [min(max((pair - low) / (high - low), 0.0), 1.0) for pair in range(HEAD // 2)]
    return [f * (1 - share) + f / yarn.factor * share for f, share in zip(frequencies(HEAD, base), shares, strict=True)]


@pytest.mark.parametrize(
    ("rotary", "by_hand", "factor"),
    [
        pytest.param(Rotary(), frequencies(HEAD, 10000), 1.0, id="whole heads"),
        pytest.param(Rotary(base=1e6, percent=0.5), frequencies(HEAD // 2, 1e6), 1.0, id="half of a head, as GLM"),
        pytest.param(Rotary(base=500.0, yarn=YARN), yarn_by_hand(YARN, 500.0), 0.1 * math.log(8) + 1, id="YaRN"),
    ],
)
def test_the_angles_are_those_of_the_paper(pool, rotary, by_hand, factor):
    angles, found = pool.run(angles_on_rank, rotary)[0]
    expected = torch.outer(torch.arange(LENGTH).double(), torch.tensor(by_hand * 2).double())
    torch.testing.assert_close(angles.double(), expected, rtol=1e-6, atol=1e-7)  # float32 frequencies
    assert found == pytest.approx(factor)


def refusals_on_rank(rank: int) -> list[str]:
    from megatron.core.models.gpt import gpt_model

    latent = {"multi_latent_attention": True, "rope_type": "rope"}
    cases = [(Rotary(percent=0.5), latent), (Rotary(percent=0.5, yarn=YARN), {})]
    messages = [error_of(lambda rotary=rotary, options=options: model_of(rotary, **options)) for rotary, options in cases]
    kept = gpt_model.YarnRotaryEmbedding
    del gpt_model.YarnRotaryEmbedding
    try:
        return [*messages, error_of(lambda: model_of(Rotary(yarn=YARN)))]
    finally:
        gpt_model.YarnRotaryEmbedding = kept


def test_what_megatron_would_leave_out_is_refused(pool):
    """It would take the other form, or none, without an error."""
    of_latent, of_yarn, of_release = pool.run(refusals_on_rank)[0]
    assert "with multi_latent_attention: its rotary positions are in its config" in of_latent
    assert "rotary.yarn with percent=0.5 and llama3_factor=None" in of_yarn
    assert "the installed Megatron-Core has no YaRN; install 0.15 or later" in of_release
