"""The truth that layouts are held against: one process, float64, Python loops, no code of the package's losses or weights."""

from __future__ import annotations

import math
import random

import torch

from megatron_rl.megatron.model import build_gpt_model, global_parameter_name, transformer_config
from megatron_rl.testing.invariance import StepResult, StepSample, TinyGPT

DIVISOR = 48.0
CLIPS = {"grpo": (0.15, 0.25), "gspo": (3e-4, 4e-4)}
# Ratios stay this share of the clip width away from both clip edges, so that float32 rounding decides no clip.
MARGIN = 0.05


def ragged_samples(seed: int = 0, vocab_size: int = 61) -> list[StepSample]:
    """16 samples of 4 prompts dealt in turn, so that groups straddle ranks and micro-batches: ragged lengths and masks, one fully
    masked sample, one-token responses, one long prompt whose response lies in one context-parallel chunk."""
    numbers = random.Random(seed)
    shapes = [(3, 9), (1, 24), (20, 4), (6, 1), (2, 14), (5, 17), (23, 1), (9, 9), (4, 4), (7, 18), (12, 2), (3, 21)]
    shapes += [(1, 1), (10, 8), (16, 7), (2, 5)]
    samples = []
    for index, (prompt, response) in enumerate(shapes):
        density = 0.0 if index == 5 else 1.0 if response < 5 else numbers.choice([0.4, 0.7, 1.0])
        mask = [int(numbers.random() < density) for _ in range(response)]
        if index != 5 and not any(mask):
            mask[0] = 1
        samples.append(
            StepSample(
                tokens=[numbers.randrange(vocab_size) for _ in range(prompt + response)],
                loss_mask=mask,
                prompt_id=f"prompt {index // 4}",
                advantage=0.0 if index == 8 else numbers.gauss(0.0, 1.0),
            )
        )
    return samples


def weights_by_hand(samples: list[StepSample], aggregation: str) -> list[float]:
    counts = [sum(sample.loss_mask) for sample in samples]
    prompts = {sample.prompt_id for sample in samples}
    weights = []
    for sample, count in zip(samples, counts, strict=True):
        group = sum(n for other, n in zip(samples, counts, strict=True) if other.prompt_id == sample.prompt_id)
        by_name = {
            "sample_mean": lambda n=count: 1 / (len(samples) * n),
            "prompt_mean": lambda g=group: 1 / (len(prompts) * g),
            "token_mean": lambda: 1 / sum(counts),
            "constant": lambda: 1 / (DIVISOR * len(samples)),
        }
        weights.append(by_name[aggregation]() if count else 0.0)
    return weights


def loss_by_hand(samples, log_probs, policy_loss: str, aggregation: str):
    """0-d float64 with graph; log_probs: one tensor [response_length] a sample."""
    low, high = CLIPS[policy_loss]
    total = torch.zeros((), dtype=torch.float64)
    for sample, values, weight in zip(samples, log_probs, weights_by_hand(samples, aggregation), strict=True):
        kept = [t for t, bit in enumerate(sample.loss_mask) if bit]
        if not kept:
            continue
        differences = [values[t] - sample.old_log_probs[t] for t in kept]
        if policy_loss == "gspo":
            differences = [sum(differences) / len(kept)] * len(kept)
        for difference in differences:
            ratio = difference.exp()
            clipped = ratio.clamp(1 - low, 1 + high)
            total = total - weight * torch.minimum(ratio * sample.advantage, clipped * sample.advantage)
    return total


def reference_on_rank(rank: int, samples: list[StepSample], combinations, tiny: TinyGPT) -> list[StepResult]:
    model = _double_model(tiny, samples)
    results = []
    for policy_loss, aggregation in combinations:
        model.zero_grad()
        loss = loss_by_hand(samples, _log_probs(model, samples, tiny), policy_loss, aggregation)
        loss.backward()
        gradient = {global_parameter_name(model, name): p.grad.clone() for name, p in model.named_parameters()}
        results.append(StepResult(float(loss), gradient, None, {}))
    return results


def log_probs_on_rank(rank: int, samples: list[StepSample], tiny: TinyGPT) -> list[list[float]]:
    with torch.no_grad():
        return [values.tolist() for values in _log_probs(_double_model(tiny, samples), samples, tiny)]


def old_log_probs_off_the_edges(samples, log_probs, policy_loss: str, seed: int = 1) -> list[list[float]]:
    """Old log-probabilities that put some ratios inside the clip, some below and some above, none near an edge."""
    numbers = random.Random(seed)
    low, high = CLIPS[policy_loss]
    edges = (math.log(1 - low), math.log(1 + high))
    margin = MARGIN * (edges[1] - edges[0])

    def draw() -> float:
        while True:
            value = numbers.uniform(2 * edges[0], 2 * edges[1])
            if all(abs(value - edge) > margin for edge in edges):
                return value

    old = []
    for sample, values in zip(samples, log_probs, strict=True):
        if policy_loss == "grpo":
            old.append([value - draw() for value in values])
            continue
        kept = [t for t, bit in enumerate(sample.loss_mask) if bit]
        noise = {t: numbers.gauss(0.0, 0.05) for t in kept}
        mean = sum(noise.values()) / max(len(kept), 1)
        shift = draw() - mean
        old.append([value - noise.get(t, 0.0) - shift for t, value in enumerate(values)])
    return old


def _double_model(tiny: TinyGPT, samples):
    config = transformer_config(
        num_layers=tiny.num_layers, hidden_size=tiny.hidden_size, num_attention_heads=tiny.num_attention_heads
    )
    longest = max(len(sample.tokens) for sample in samples)
    return build_gpt_model(config, vocab_size=tiny.vocab_size, max_sequence_length=longest, seed=tiny.seed).double()


def _log_probs(model, samples, tiny: TinyGPT):
    values = []
    for sample in samples:
        tokens = torch.tensor([sample.tokens])
        logits = model(tokens, torch.arange(tokens.shape[1])[None], None)[0, :, : tiny.true_vocab_size]
        prompt = len(sample.tokens) - len(sample.loss_mask)
        log_softmax = torch.log_softmax(logits, -1)
        values.append(torch.stack([log_softmax[q - 1, sample.tokens[q]] for q in range(prompt, len(sample.tokens))]))
    return values
