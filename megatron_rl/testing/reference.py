"""The reference that layouts are compared with: one process, float64, Python loops. It shares no code with losses and weights."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_rl.errors import ConfigError, DataError
from megatron_rl.layout.groups import SINGLE
from megatron_rl.loss_hub import (
    COMPUTED_INPUTS,
    LossValue,
    PolicyLoss,
    get_loss_aggregation,
    get_policy_loss,
    policy_loss_names,
)
from megatron_rl.losses.token_batch import JointSums, TokenBatch
from megatron_rl.megatron.model import global_parameter_name, transformer_config
from megatron_rl.testing.comparison import Truth
from megatron_rl.testing.invariance import with_old_log_probs
from megatron_rl.testing.layout_step import StepSample, TinyGPT, build_tiny
from megatron_rl.testing.losses_by_hand import REFERENCES, sample_by_hand

DIVISOR = 48.0
# Narrow, so that ratios lie on both sides of it: of a ratio a token, and of a ratio a sample.
CLIP_OF_TOKENS, CLIP_OF_MEANS = (0.15, 0.25), (3e-4, 4e-4)
# The losses that a truth is computed for: those that need nothing that a caller would pass. A clip of None: the loss has none.
CLIPS: dict[str, tuple[float, float] | None] = {
    name: None if loss.clip_ratios is None else CLIP_OF_MEANS if loss.clips_means else CLIP_OF_TOKENS
    for name, loss in ((name, get_policy_loss(name)) for name in policy_loss_names())
    if {*loss.needs} <= {*COMPUTED_INPUTS}
}
# Parameters at which the ratios lie on both sides of a bound that is no clip; the probability of a token here is near 1 / 61.
PARAMETERS: Mapping[str, Mapping[str, float]] = {
    "dppo_tv": {"divergence_low": 1e-3, "divergence_high": 2e-3, "ratio_truncation": 1.2},
    "dppo_kl": {"divergence_low": 1e-4, "divergence_high": 2e-4, "ratio_truncation": 1.2},
}
NO_CLIP = (0.0, 0.0)  # of a loss that has none and does not look at it
# Ratios stay this share of the clip width away from both clip edges, so that float32 rounding decides no clip.
MARGIN = 0.05
# (prompt, response) tokens: ragged, one-token responses, one long prompt whose response lies in one context-parallel chunk.
SHAPES = [(3, 9), (1, 24), (20, 4), (6, 1), (2, 14), (5, 17), (23, 1), (9, 9), (4, 4), (7, 18), (12, 2), (3, 21)]
SHAPES += [(1, 1), (10, 8), (16, 7), (2, 5)]
FULLY_MASKED, WITHOUT_ADVANTAGE = 5, 8
SAMPLES_PER_PROMPT = 4


def ragged_samples(seed: int = 0, vocab_size: int = 61, num_samples: int = len(SHAPES)) -> list[StepSample]:
    """Samples with ragged lengths and masks, four of each prompt. Ranks and micro-batches split the groups. Of sixteen
    samples one is fully masked, and one has no advantage."""
    numbers = random.Random(seed)
    samples = []
    for index in range(num_samples):
        (prompt, response), place = SHAPES[index % len(SHAPES)], index % len(SHAPES)
        density = 0.0 if place == FULLY_MASKED else 1.0 if response < 5 else numbers.choice([0.4, 0.7, 1.0])
        mask = [int(numbers.random() < density) for _ in range(response)]
        if place != FULLY_MASKED and not any(mask):
            mask[0] = 1
        samples.append(
            StepSample(
                tokens=[numbers.randrange(vocab_size) for _ in range(prompt + response)],
                loss_mask=mask,
                prompt_id=f"prompt {index // SAMPLES_PER_PROMPT}",
                advantage=0.0 if place == WITHOUT_ADVANTAGE else numbers.gauss(0.0, 1.0),
            )
        )
    return samples


def weights_by_hand(samples: Sequence[StepSample], aggregation: str, divisor: float = DIVISOR) -> list[float]:
    """The weight of a token of each sample, by the formula that the record declares and not by its function. divisor: its L."""
    counts = [int(sum(sample.loss_mask)) for sample in samples]
    groups: dict[str, int] = {}
    rollouts: dict[object, list[int]] = {}
    for place, (sample, count) in enumerate(zip(samples, counts, strict=True)):
        groups[sample.prompt_id] = groups.get(sample.prompt_id, 0) + count
        rollouts.setdefault(rollout_key(sample, place), []).append(count)
    formula = get_loss_aggregation(aggregation).rollout_formula
    if formula is None:
        raise ConfigError(f"loss aggregation {aggregation!r} declares no formula: there is nothing to compute its weights by")
    of_step = {"N": len(samples), "R": len(rollouts), "P": len(groups), "T": sum(counts), "L": divisor}
    weights = []
    for place, (sample, count) in enumerate(zip(samples, counts, strict=True)):
        of_rollout = rollouts[rollout_key(sample, place)]
        rows = {"M_j": sum(of_rollout), "k_j": sum(one > 0 for one in of_rollout)}
        values = {**of_step, **rows, "m_i": count, "M_g": groups[sample.prompt_id]}
        weights.append(float(formula.evaluate(values)) if count else 0.0)
    return weights


def rollout_key(sample: StepSample, place: int) -> object:
    """Equal for the samples of one rollout. place: of the sample in the step."""
    return (None, place) if sample.rollout_id is None else sample.rollout_id


def in_rollouts(samples: Sequence[StepSample]) -> list[StepSample]:
    """The samples as rows of rollouts: two rollouts of each prompt, whose rows alternate."""
    return [replace(sample, rollout_id=f"{sample.prompt_id}/{place % 2}") for place, sample in enumerate(samples)]


def with_one_advantage(samples: Sequence[StepSample]) -> list[StepSample]:
    """Each rollout with the advantage of its first sample."""
    firsts: dict[object, float] = {}
    for place, sample in enumerate(samples):
        firsts.setdefault(rollout_key(sample, place), sample.advantage)
    return [replace(sample, advantage=firsts[rollout_key(sample, place)]) for place, sample in enumerate(samples)]


def old_log_probs_of(sample: StepSample) -> list[float]:
    if sample.old_log_probs is None:
        raise DataError("a sample has no old_log_probs, which the reference needs because it is off-policy: give it some")
    return sample.old_log_probs


def losses_by_hand(
    samples: Sequence[StepSample],
    log_probs: Sequence[Tensor],
    policy_loss: str,
    parameters: Mapping[str, float],
    factors: Sequence[Sequence[float]] | None = None,
    clip: tuple[float, float] | None = None,
    entropies: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """The sum over each sample's unmasked tokens, 0-d float64 with graph, before its weight.

    log_probs, entropies: one tensor [response_length] a sample; a loss that needs no entropy needs no entropies. factors: of each
    token, of a loss that is not of level "batch". clip: (low, high) of a loss that has a clip; None: as in CLIPS.
    """
    loss, sums = get_policy_loss(policy_loss), []
    if loss.needs_entropy and entropies is None:
        raise ConfigError(f"policy loss {policy_loss!r} needs the entropy of each token: pass entropies")
    clip = CLIPS.get(policy_loss) if clip is None else clip
    for index, (sample, values) in enumerate(zip(samples, log_probs, strict=True)):
        kept = [t for t, bit in enumerate(sample.loss_mask) if bit]
        if not kept:
            sums.append(0.0 * values.sum())
            continue
        anchors = old_log_probs_of(sample) if loss.anchor == "old" else rollout_log_probs_of(sample)
        differences, current = [values[t] - anchors[t] for t in kept], [values[t] for t in kept]
        computed = {"token_counts": torch.full((len(kept),), float(len(kept)), dtype=values.dtype, device=values.device)}
        if entropies is not None:
            computed["entropy"] = torch.stack([entropies[index][t].detach() for t in kept])
        vectors = {name: computed[name] for name in loss.needs}
        if loss.level == "batch" and policy_loss not in REFERENCES:
            tokens = (torch.stack(differences), torch.stack(current), sample.advantage)
            sums.append(sum_by_batch(loss, *tokens, parameters, clip, vectors))
            continue
        advantages, numbers = [sample.advantage] * len(kept), loss.resolve_parameters(parameters)
        if policy_loss in REFERENCES:
            found = sample_by_hand(policy_loss, differences, advantages, current, clip or NO_CLIP, numbers)
            of_tokens = [value for value, _ in found]
        else:
            of_tokens = by_its_function(loss, differences, advantages, current, parameters, clip, vectors)
        if factors is not None:
            of_tokens = [factors[index][t] * value for t, value in zip(kept, of_tokens, strict=True)]
        sums.append(torch.stack(of_tokens).sum() + 0.0 * values.sum())  # a sample that is clipped whole has constants alone
    return sums


def rollout_log_probs_of(sample: StepSample) -> list[float]:
    if sample.rollout_log_probs is None:
        raise DataError("a sample has no rollout_log_probs, which this loss compares with: give it some")
    return sample.rollout_log_probs


def mean_of(numbers: list[Tensor]) -> Tensor:
    return sum(numbers[1:], start=numbers[0]) / len(numbers)


def by_its_function(
    loss: PolicyLoss,
    differences: list[Tensor],
    advantages: list[float],
    log_probs: list[Tensor],
    parameters: Mapping[str, float],
    clip: tuple[float, float] | None,
    vectors: Mapping[str, Tensor],  # [m] each, what the loss needs
) -> list[Tensor]:
    """The values of a loss that is not written out by hand: its own function on one whole sample."""
    if loss.level == "sequence":
        differences, log_probs = ([mean_of(numbers)] * len(numbers) for numbers in (differences, log_probs))
        vectors = {name: vector.mean().expand(len(vector)) for name, vector in vectors.items()}
    inputs = (torch.stack(differences), torch.tensor(advantages, dtype=torch.float64), torch.stack(log_probs))
    value = loss.function(*inputs[: 2 + loss.takes_log_probs], **vectors, **keywords_by_hand(loss, parameters, clip))
    return list(value.value if isinstance(value, LossValue) else value)


def keywords_by_hand(loss: PolicyLoss, parameters: Mapping[str, float], clip: tuple[float, float] | None) -> dict[str, float]:
    clips = {} if clip is None else {"clip_ratio_low": clip[0], "clip_ratio_high": clip[1]}
    return clips | loss.resolve_parameters(parameters)


def sum_by_batch(
    loss: PolicyLoss,
    differences: Tensor,  # [m]
    log_probs: Tensor,  # [m]
    advantage: float,
    parameters: Mapping[str, float],
    clip: tuple[float, float] | None,
    vectors: Mapping[str, Tensor],  # [m] each, what the loss needs
) -> Tensor:  # 0-d
    """The sum of a loss of level "batch" over a whole sample without masked tokens, on one rank: its sums are plain sums."""
    size, device = differences.numel(), differences.device
    batch = TokenBatch(
        log_ratio=differences,
        log_probs=log_probs,
        advantages=torch.full_like(differences, advantage),
        loss_mask=torch.ones(size, dtype=torch.bool, device=device),
        documents=torch.zeros(size, dtype=torch.int64, device=device),
        token_counts=torch.tensor([float(size)], dtype=torch.float64, device=device),
        cu_seqlens=torch.tensor([0, size], device=device),
        sums=JointSums(SINGLE, 1, device, is_checked=False),
    )
    value = loss.function(batch, **vectors, **keywords_by_hand(loss, parameters, clip))
    return (value.value if isinstance(value, LossValue) else value).sum()


@dataclass(frozen=True, slots=True)
class LossTruth:
    """A step with old log-probabilities for one loss, and its truth by aggregation."""

    samples: list[StepSample]
    by_aggregation: dict[str, Truth]


def with_anchors(samples: Sequence[StepSample], log_probs: Sequence[list[float]], policy_loss: str) -> list[StepSample]:
    """The samples with these as the log-probabilities that the loss compares with. Where they are the sampler's, the old ones are
    others, which must not be read."""
    step = with_old_log_probs(samples, log_probs)
    if get_policy_loss(policy_loss).anchor == "old":
        return step
    shifted = [[value + 0.5 for value in values] for values in log_probs]
    anchored = [replace(sample, rollout_log_probs=list(values)) for sample, values in zip(step, log_probs, strict=True)]
    return with_old_log_probs(anchored, shifted)


def scale_of_terms(samples: Sequence[StepSample], aggregation: str, divisor: float = DIVISOR) -> float:
    """The scale that a loss's rounding grows with. A ratio is near 1, so a token's value is near its advantage."""
    weights = weights_by_hand(samples, aggregation, divisor)
    return sum(weight * sum(s.loss_mask) * abs(s.advantage) for s, weight in zip(samples, weights, strict=True))


def old_log_probs_off_the_edges(
    samples: Sequence[StepSample],
    log_probs: Sequence[Sequence[float]],
    policy_loss: str,
    seed: int = 1,
    bounds: Sequence[float] = (),
) -> list[list[float]]:
    """Old log-probabilities that put some ratios inside the clip, some below and some above, none near an edge or a bound."""
    numbers = random.Random(seed)
    loss = get_policy_loss(policy_loss)
    low, high = CLIPS[policy_loss] or (CLIP_OF_MEANS if loss.level == "sequence" else CLIP_OF_TOKENS)
    draws_means = loss.level == "sequence" or loss.clips_means
    edges = (math.log(1 - low), math.log(1 + high))
    margin = MARGIN * (edges[1] - edges[0])

    def draw() -> float:
        while True:
            value = numbers.uniform(2 * edges[0], 2 * edges[1])
            if all(abs(value - edge) > margin for edge in (*edges, *map(math.log, bounds))):
                return value

    old = []
    for sample, values in zip(samples, log_probs, strict=True):
        if not draws_means:
            old.append([value - draw() for value in values])
            continue
        kept = [t for t, bit in enumerate(sample.loss_mask) if bit]
        noise = {t: numbers.gauss(0.0, 0.05) for t in kept}
        mean = sum(noise.values()) / max(len(kept), 1)
        shift = draw() - mean
        old.append([value - noise.get(t, 0.0) - shift for t, value in enumerate(values)])
    return old


def double_model(tiny: TinyGPT, samples: Sequence[StepSample]):
    """The whole model in float64, of Megatron's own layers, because Transformer Engine's have no float64."""
    config = transformer_config(
        num_layers=tiny.num_layers,
        hidden_size=tiny.hidden_size,
        num_attention_heads=tiny.num_attention_heads,
        **tiny.expert_options,
    )
    longest = max(len(sample.tokens) for sample in samples)
    model = build_tiny(tiny, config, longest, use_transformer_engine=False)
    # Its forward gives the policy's logits alone: Megatron-Core wants labels where its config has multi-token prediction.
    model.config, model.mtp_process = copy.copy(config), False
    model.config.mtp_num_layers = None
    return model.to(_device()).double()


def mtp_loss_by_hand(model, samples: Sequence[StepSample], tiny: TinyGPT) -> Tensor | None:  # 0-d float64 with graph
    """The loss of multi-token prediction of the whole step, sample after sample, as the module multi_token writes it down; None for
    a model without."""
    depth, factor = (
        tiny.expert_options.get(name, default) for name, default in (("mtp_num_layers", 0), ("mtp_loss_scaling_factor", 0.1))
    )
    if not (depth and factor):
        return None
    shares: list[list[Tensor]] = [[] for _ in range(depth)]
    for sample in samples:
        kept: list[Tensor] = []
        length = len(sample.tokens)
        hook = model.output_layer.register_forward_pre_hook(lambda layer, inputs, kept=kept: kept.append(inputs[0]))
        positions = torch.arange(length, device=_device())[None]
        model(torch.tensor([sample.tokens], device=_device()), positions, None)
        hook.remove()
        (hidden,) = kept
        rotary = None if model.config.multi_latent_attention else model.rotary_pos_emb(length)
        rotary = rotary[0] if isinstance(rotary, tuple) else rotary  # yarn's, with a scale that is in it already
        for k, layer in enumerate(model.mtp.layers, 1):
            following = torch.tensor([(sample.tokens + [0] * k)[k:]], device=_device())
            inputs = {"hidden_states": hidden, "decoder_input": model.embedding(following, positions), "attention_mask": None}
            hidden = layer._proj_and_transformer_layer(**inputs, rotary_pos_emb=rotary)
            scores = torch.log_softmax((hidden[:, 0] @ model.output_layer.weight.t())[:, : tiny.true_vocab_size], -1)
            for place, bit in enumerate(sample.loss_mask, length - len(sample.loss_mask)):
                if bit and place - 1 - k >= 0:
                    shares[k - 1].append(-scores[place - 1 - k, sample.tokens[place]])
    return factor / depth * torch.stack([torch.stack(of_layer).mean() for of_layer in shares]).sum()


def model_logits(model, samples: Sequence[StepSample], tiny: TinyGPT) -> list[Tensor]:
    """The logits that predict each sample's response, [response_length, V] float64 with graph."""
    rows = []
    for sample in samples:
        tokens = torch.tensor([sample.tokens], device=_device())
        logits = model(tokens, torch.arange(tokens.shape[1], device=_device())[None], None)[0, :, : tiny.true_vocab_size]
        rows.append(logits[-len(sample.loss_mask) - 1 : -1])
    return rows


def model_log_probs(model, samples: Sequence[StepSample], tiny: TinyGPT) -> list[Tensor]:
    """The log-probabilities of each sample, [response_length] float64 with graph."""
    values = []
    for sample, logits in zip(samples, model_logits(model, samples, tiny), strict=True):
        log_softmax, response = torch.log_softmax(logits, -1), sample.tokens[-len(sample.loss_mask) :]
        values.append(torch.stack([log_softmax[place, token] for place, token in enumerate(response)]))
    return values


def global_parameters(model) -> dict[str, Tensor]:
    return {global_parameter_name(model, name): parameter for name, parameter in model.named_parameters()}


def _device() -> torch.device:
    return torch.device(torch.cuda.current_device())
