"""The table of docs/corrections.md: bias of the policy gradient under each kind and level, by enumeration of every response."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers import ROOT

from megatron_rl.losses import importance_correction
from megatron_rl.registries.correction_settings import CorrectionSettings

VOCABULARY, LENGTH = 3, 3
CASES = {  # kind, level -> bounds
    "none": None,
    "tis, token, high 2": {"high": 2.0},
    "icepop, token, [0.5, 5]": {},
    "mask, token, [0.5, 2]": {"low": 0.5, "high": 2.0},
    "tis, sequence_mean, high 2": {"high": 2.0},
    "icepop, sequence_mean, [0.5, 2]": {"low": 0.5, "high": 2.0},
    "mask, sequence_mean, [0.5, 2]": {"low": 0.5, "high": 2.0},
    "tis, sequence_sum, high 2": {"high": 2.0},
    "tis, sequence_sum, high 1e8": {"high": 1e8},
    "icepop, sequence_sum, [0.5, 2]": {"low": 0.5, "high": 2.0},
    "mask, sequence_sum, [0.5, 2]": {"low": 0.5, "high": 2.0},
}


@pytest.fixture(scope="module")
def figures() -> dict[str, tuple[str, ...]]:
    """case -> bias, cosine and standard deviation, as the page writes them. The sampler is 0.3 nats away; each prefix has its own
    distribution; the loss is reinforce with `constant` weights, of the advantage against the exact mean."""
    generator = torch.Generator().manual_seed(0)
    responses = list(itertools.product(range(VOCABULARY), repeat=LENGTH))
    prefixes = [prefix for n in range(LENGTH) for prefix in itertools.product(range(VOCABULARY), repeat=n)]
    logits = torch.randn(len(prefixes), VOCABULARY, generator=generator, dtype=torch.float64)
    noise = 0.6 * torch.randn(len(prefixes), VOCABULARY, generator=generator, dtype=torch.float64)
    rewards = torch.randn(len(responses), generator=generator, dtype=torch.float64)
    leaf, tokens = logits.clone().requires_grad_(), torch.tensor(responses)
    rows = torch.tensor([[prefixes.index(response[:t]) for t in range(LENGTH)] for response in responses])
    trained, sampled = torch.log_softmax(leaf, 1)[rows, tokens], torch.log_softmax(logits + noise, 1)[rows, tokens]  # [S, L]
    probabilities, drawn = trained.sum(1).exp(), sampled.sum(1).exp()
    advantages = rewards - (probabilities.detach() * rewards).sum()
    truth = torch.autograd.grad((probabilities * advantages).sum(), leaf, retain_graph=True)[0].flatten()
    one = (torch.autograd.grad(token, leaf, retain_graph=True)[0].flatten() for token in trained.flatten())
    scores = torch.stack(list(one)).view(len(responses), LENGTH, -1)
    bounds = torch.arange(0, tokens.numel() + 1, LENGTH)

    def of(name: str, given: dict | None) -> tuple[str, ...]:
        weights = torch.ones(tokens.numel(), dtype=torch.float64)
        if given is not None:
            kind, level = name.split(", ")[:2]
            vectors = (trained.detach().flatten(), sampled.flatten(), torch.ones(tokens.numel(), dtype=torch.bool), bounds)
            weights = importance_correction(CorrectionSettings(kind=kind, level=level, **given), *vectors)[0].weights
        gradients = (weights.view(tokens.shape)[..., None] * scores).sum(1) * advantages[:, None]
        mean = (drawn[:, None] * gradients).sum(0)
        spread = (drawn * (gradients - mean).square().sum(1)).sum().sqrt()
        bias = (mean - truth).norm() / truth.norm()
        cosine = torch.cosine_similarity(mean, truth, dim=0)
        return tuple(f"{float(x):.2f}" for x in (bias, cosine, spread / truth.norm()))

    return {name: of(name, given) for name, given in CASES.items()}


@pytest.mark.parametrize("name", CASES)
def test_the_page_has_the_bias_of_each_kind_and_level(figures, name):
    page = (ROOT / "docs" / "corrections.md").read_text(encoding="utf-8")
    kind, _, rest = name.partition(", ")
    level, _, bounds = rest.partition(", ")
    assert f"| {' | '.join((f'`{kind}`' if rest else kind, level or '', bounds, *figures[name]))} |" in page


def test_the_whole_ratio_of_a_sample_is_unbiased(figures):
    assert figures["tis, sequence_sum, high 1e8"][:2] == ("0.00", "1.00")
    assert figures["none"][0] > figures["tis, token, high 2"][0] > figures["tis, sequence_mean, high 2"][0]
