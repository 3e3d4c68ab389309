"""examples/selections.py, fipo.py and gtpo.py: what each makes of a step is what the formula makes of it."""

from __future__ import annotations

import math
from dataclasses import replace
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from helpers import EXACT, ROOT, loop_log_probs, pool_of, random_batch

pool = pool_of(3, use_megatron=False)


def example(name: str) -> ModuleType:
    module = ModuleType(name)
    exec((ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8"), vars(module))
    return module


# Selections

LENGTHS = (9, 2, 14, 5, 7, 11, 1)
SAMPLES = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS])


def step():
    """Entropies with ties, and covariances of which about a third are between 1 and 5."""
    generator = torch.Generator().manual_seed(3)
    entropy = torch.randint(6, (len(SAMPLES),), generator=generator) / 4
    log_probs, advantages = (2 * torch.randn(len(SAMPLES), generator=generator, dtype=torch.float64) for _ in range(2))
    return entropy, log_probs, advantages, torch.rand(len(SAMPLES), generator=generator) > 0.2


def weights_on_rank(rank, cut, size):
    """The tokens of this rank, and what the example makes of them."""
    tokens = torch.randperm(len(SAMPLES), generator=torch.Generator().manual_seed(9))  # any order of the tokens will do
    tokens = tokens[(SAMPLES if cut == "samples" else SAMPLES + POSITIONS)[tokens] % size == rank]
    entropy, log_probs, advantages, mask = (values[tokens] for values in step())
    selections, group = example("selections"), dist.group.WORLD if size > 1 else None
    order = SAMPLES[tokens] * 2**32 + POSITIONS[tokens]
    return tokens, {
        "top_entropy": selections.top_entropy(entropy, mask, order, share=0.29, group=group),
        "every clip_cov": selections.clip_cov(log_probs, advantages, mask, order, share=1.0, seed=5, group=group),
        "clip_cov": selections.clip_cov(log_probs, advantages, mask, order, share=0.1, seed=5, group=group),
    }


def weights_by_hand():
    """The whole step sorted by entropy, the first of equal ones first; and the covariances of its unmasked tokens."""
    entropy, log_probs, advantages, mask = step()
    live = mask.nonzero()[:, 0].tolist()
    chosen = sorted(live, key=lambda token: (-entropy[token], token))[: int(0.29 * len(live))]
    covariance = (log_probs - log_probs[mask].mean()) * (advantages - advantages[mask].mean())
    is_candidate = mask & (covariance >= 1) & (covariance <= 5)
    return {"top_entropy": torch.isin(torch.arange(len(SAMPLES)), torch.tensor(chosen)), "every clip_cov": ~is_candidate}


@pytest.mark.parametrize(("cut", "size"), [("samples", 1), ("samples", 3), ("tokens", 3)])
def test_a_selection_is_of_the_whole_step_for_any_cut_of_it(pool, cut, size):
    whole = {name: torch.full((len(SAMPLES),), -1.0) for name in ("top_entropy", "every clip_cov", "clip_cov")}
    for tokens, answers in pool.run(weights_on_rank, cut, size, world_size=size):
        for name, weights in answers.items():
            whole[name][tokens] = weights
    for name, weights in weights_by_hand().items():
        assert torch.equal(whole[name], weights.float()), name
    left_out, candidates = (whole[name] == 0 for name in ("clip_cov", "every clip_cov"))
    num_tokens = int(step()[-1].sum())
    assert int(whole["top_entropy"].sum()) == int(0.29 * num_tokens)
    assert int(left_out.sum()) == int(0.1 * num_tokens) < int(candidates.sum()) and bool(candidates[left_out].all())
    assert left_out.nonzero()[:, 0].tolist() == [1, 7, 24, 29]  # the draw of this seed, in each layout


# Weights of advantages


def spread_advantages(batch):
    return batch.advantages.repeat_interleave(torch.tensor([len(document) for document in batch.documents]))


def batch_of(sign: int):
    """Ratios on both sides of the clips and of the limit, and a sample without a trained token."""
    batch = random_batch([40, 3, 17, 1], num_masked=(7, 3, 0, 0), noise=0.7, seed=3)
    return replace(batch, advantages=sign * batch.advantages)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_advantages_of_fipo_are_those_by_hand(sign):
    """Weights of 0.5 and more: each token's sum over the tokens behind it, one by one."""
    batch, want = batch_of(sign), spread_advantages(batch_of(sign))
    log_probs = loop_log_probs(batch.logits, batch.labels)
    for document, advantage in zip(batch.documents, batch.advantages, strict=True):
        trained = [token for token in document if batch.loss_mask[token]]
        shift = {token: float(log_probs[token] - batch.old_log_probs[token]) for token in trained}
        for place, token in enumerate(trained):
            near = [(k, shift[other]) for k, other in enumerate(trained[place:]) if math.exp(shift[other]) <= 2.0]
            weight = min(max(math.exp(sum(2 ** (-k / 5.0) * x for k, x in near)), 0.5), 1.6)
            if advantage < 0 and math.exp(shift[token]) > 2.0:
                weight = min(weight, 1.0)
            want[token] = weight * advantage
    before = (log_probs, batch.old_log_probs, spread_advantages(batch), batch.loss_mask, batch.cu_seqlens)
    settings = {"half_life": 5.0, "weight_low": 0.5, "weight_high": 0.6, "ratio_limit": 2.0}
    found = example("fipo").future_kl_advantages(*before, **settings)
    assert len({*(found / before[2]).tolist()}) > 20
    torch.testing.assert_close(found, want, **EXACT)
    at_first = example("fipo").future_kl_advantages(log_probs, log_probs, *before[2:])
    assert torch.equal(at_first, before[2])


@pytest.mark.parametrize("sign", [1, -1])
def test_the_advantages_of_gtpo_are_those_by_hand(sign):
    batch, want = batch_of(sign), spread_advantages(batch_of(sign))
    entropy = torch.distributions.Categorical(logits=batch.logits).entropy()
    for document, advantage in zip(batch.documents, batch.advantages, strict=True):
        trained = [token for token in document if batch.loss_mask[token]]
        of_token = entropy if advantage > 0 else 1 / entropy
        for token in trained:
            want[token] = advantage * (1 + 0.4 * (of_token[token] / of_token[trained].mean() - 1))
    before = (entropy, spread_advantages(batch), batch.loss_mask, batch.cu_seqlens)
    found = example("gtpo").entropy_weighted_advantages(*before, share=0.4)
    assert entropy.min() > example("gtpo").SMALLEST_ENTROPY
    torch.testing.assert_close(found, want, **EXACT)
    sure = example("gtpo").entropy_weighted_advantages(torch.zeros_like(entropy), *before[1:])
    torch.testing.assert_close(sure, before[1], **EXACT)
