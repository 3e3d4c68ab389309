"""What layouts are compared with: ragged samples, a model in float64 on one process, and the oracle's loss of them."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from megatron_rl.config import CorrectionLevel, PolicyLossConfig
from megatron_rl.declare import COMPUTED_INPUTS, POLICY_LOSSES, LossValue, PolicyLoss, get_policy_loss
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.losses.corrections import CorrectionSettings
from megatron_rl.megatron.model import global_parameter_name, transformer_config
from megatron_rl.testing import oracle
from megatron_rl.testing.comparison import Truth
from megatron_rl.testing.layout_step import StepSample, TinyGPT, build_tiny

DIVISOR = 48.0
# Narrow, so that ratios lie on both sides of it: of a ratio a token, and of a ratio a sample.
CLIP_OF_TOKENS, CLIP_OF_MEANS = (0.15, 0.25), (3e-4, 4e-4)
# The losses that a truth is computed for: those that need nothing that a caller would pass. A clip of None: the loss has none.
CLIPS: dict[str, tuple[float, float] | None] = {
    name: None if loss.clip_ratios is None else CLIP_OF_MEANS if loss.clips_means else CLIP_OF_TOKENS
    for name, loss in ((name, get_policy_loss(name)) for name in POLICY_LOSSES.names())
    if {*loss.needs} <= {*COMPUTED_INPUTS}
}
# Parameters at which the ratios lie on both sides of a bound that is no clip; the probability of a token here is near 1 / 61.
PARAMETERS: Mapping[str, Mapping[str, float]] = {
    "dppo_tv": {"divergence_low": 1e-3, "divergence_high": 2e-3, "ratio_truncation": 1.2},
    "dppo_kl": {"divergence_low": 1e-4, "divergence_high": 2e-4, "ratio_truncation": 1.2},
}
# Ratios stay this share of the width away from both edges of a clip or a correction, so that float32 rounding decides nothing.
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


def in_rollouts(samples: Sequence[StepSample]) -> list[StepSample]:
    """Ragged samples as rows of rollouts: two rollouts of each prompt, whose rows alternate."""
    return [replace(sample, rollout_id=f"{sample.prompt_id}/{place % 2}") for place, sample in enumerate(samples)]


def dense_samples(step: Sequence[StepSample]) -> list[oracle.DenseSample]:
    return [
        oracle.DenseSample(
            labels=sample.tokens[-len(sample.loss_mask) :],
            mask=[bool(bit) for bit in sample.loss_mask],
            advantages=[sample.advantage] * len(sample.loss_mask),
            old=sample.old_log_probs,
            rollout=sample.rollout_log_probs,
            ref=sample.ref_log_probs,
            importance=[1.0] * len(sample.loss_mask),
            prompt=sample.prompt_id,
            rollout_id=sample.rollout_id,
        )
        for sample in step
    ]


def scores_of(
    samples: Sequence[StepSample],
    logits: Sequence[Tensor],  # [response_length, V] each
    temperature: float = 1.0,
) -> list[oracle.Scores]:
    """Of each sample, with its masked tokens, on the CPU."""
    settings = oracle.DenseSettings(temperature=temperature)
    rows = [(one.cpu(), sample.tokens[-len(sample.loss_mask) :]) for one, sample in zip(logits, samples, strict=True)]
    return [oracle.scores_of(*row, settings) for row in rows]


def loss_by_hand(step: Sequence[StepSample], scores: Sequence[oracle.Scores], config: PolicyLossConfig) -> Tensor:
    """The oracle's loss of the whole step, 0-d float64 with the graph of the scores, which are those of scores_of. Raises DataError
    for a sample without the sampler's log-probabilities where the settings need them."""
    samples, is_of_sampler = dense_samples(step), get_policy_loss(config.policy_loss).anchor == "rollout"
    if (is_of_sampler or CorrectionSettings.of(config) is not None) and any(sample.rollout is None for sample in samples):
        raise DataError("a sample has no rollout_log_probs, which this loss compares with: give it some")
    if is_of_sampler:  # nothing reads the old ones
        samples = [replace(sample, old=sample.rollout) for sample in samples]
    masks = [torch.tensor(sample.loss_mask, dtype=torch.bool) for sample in step]

    def unmasked(name: str) -> Tensor:
        return torch.cat([getattr(one, name)[mask] for one, mask in zip(scores, masks, strict=True)])

    step_scores = oracle.Scores(unmasked("log_probs"), unmasked("entropy"))
    return oracle.StepTerms(samples, step_scores, settings_of(config)).loss()


def settings_of(config: PolicyLossConfig) -> oracle.DenseSettings:
    """A user's own loss is its own function on one process: then layouts are compared, and not its equation.

    Raises ConfigError for another function of a user's own."""
    built_in = {*oracle.AGGREGATIONS, *oracle.ESTIMATORS, *oracle.CORRECTIONS}
    for field in ("loss_aggregation", "kl_estimator", "importance_correction"):
        if (name := getattr(config, field)) not in built_in:
            raise ConfigError(f"{field}={name}: the float64 reference has the built-in ones only; check the step with one of them")
    loss = get_policy_loss(config.policy_loss)
    low, high = loss.clip_bounds(config.clip_ratio_low, config.clip_ratio_high) or (math.nan, math.nan)
    return oracle.DenseSettings(
        loss=loss.name if loss.name in oracle.LOSSES else partial(_own_result, loss),
        low=low,
        high=high,
        parameters=loss.resolve_parameters(config.loss_parameters),
        aggregation=config.loss_aggregation,
        divisor=config.loss_aggregation_divisor or DIVISOR,
        correction=config.importance_correction,
        level=config.importance_correction_level,
        bounds=(config.importance_correction_low, config.importance_correction_high),
        sequence_delta=config.off_policy_sequence_delta,
        kl_estimator=config.kl_estimator,
        kl_coefficient=config.kl_coefficient,
        entropy_coefficient=config.entropy_coefficient,
        temperature=config.policy_temperature,
    )


def _own_result(loss: PolicyLoss, tokens: oracle.Tokens) -> oracle.Result:
    size = len(tokens.log_ratio)
    computed = {"token_counts": torch.full_like(tokens.advantages, float(size)), "entropy": tokens.entropy}
    inputs = (tokens.log_ratio, tokens.advantages, tokens.log_probs)[: 2 + loss.takes_log_probs]
    if loss.level == "sequence":
        inputs = tuple(map(tokens.mean, inputs))
        computed = {name: tokens.mean(values) for name, values in computed.items()}
    clips = {} if loss.clip_ratios is None else {"clip_ratio_low": tokens.settings.low, "clip_ratio_high": tokens.settings.high}
    value = loss.function(*inputs, **{name: computed[name] for name in loss.needs}, **clips, **tokens.settings.parameters)
    return value.value if isinstance(value, LossValue) else value, torch.zeros(size, dtype=torch.bool)


@dataclass(frozen=True, slots=True)
class LossTruth:
    """A step with old log-probabilities for one loss, and its truth by aggregation."""

    samples: list[StepSample]
    by_aggregation: dict[str, Truth]


def scale_of_terms(samples: Sequence[StepSample], aggregation: str, divisor: float = DIVISOR) -> float:
    """The scale that a loss's rounding grows with. A ratio is near 1, so a token's value is near its advantage. divisor: L."""
    counts = [sum(sample.loss_mask) for sample in samples]
    weights = oracle.token_weights(dense_samples(samples), counts, oracle.DenseSettings(aggregation=aggregation, divisor=divisor))
    return sum(weight * m * abs(sample.advantage) for sample, weight, m in zip(samples, weights, counts, strict=True))


def log_ratios_off(
    sample: StepSample, edges: Sequence[float], numbers: random.Random, unit: str = CorrectionLevel.TOKEN
) -> list[float]:
    """A log-ratio for each token. That of the unit, a token or the mean or the sum of the sample, lies between the first two edges
    or beyond one of them, and near none."""
    margin = MARGIN * (edges[1] - edges[0])

    def draw() -> float:
        while True:
            value = numbers.uniform(2 * edges[0], 2 * edges[1])
            if all(abs(value - edge) > margin for edge in edges):
                return value

    if unit == CorrectionLevel.TOKEN:
        return [draw() for _ in sample.loss_mask]
    noise = [numbers.gauss(0.0, 0.05) if bit else 0.0 for bit in sample.loss_mask]
    num_kept = max(sum(sample.loss_mask), 1)
    mean = draw() / (num_kept if unit == CorrectionLevel.SEQUENCE_SUM else 1)
    return [one - sum(noise) / num_kept + mean for one in noise]


def with_anchors(
    samples: Sequence[StepSample], log_probs: Sequence[Sequence[float]], policy_loss: str, bounds: Sequence[float] = ()
) -> list[StepSample]:
    """The samples with log-probabilities to compare these with, so that some ratios are inside the clip, some below and some above,
    none near an edge or a bound. Where they are the sampler's, the old ones are others, which must not be read."""
    numbers, loss = random.Random(1), get_policy_loss(policy_loss)
    low, high = CLIPS[policy_loss] or (CLIP_OF_MEANS if loss.level == "sequence" else CLIP_OF_TOKENS)
    edges = [math.log(ratio) for ratio in (1 - low, 1 + high, *bounds)]
    has_means = loss.level == "sequence" or loss.clips_means
    unit = CorrectionLevel.SEQUENCE_MEAN if has_means else CorrectionLevel.TOKEN
    step = []
    for sample, values in zip(samples, log_probs, strict=True):
        log_ratios = log_ratios_off(sample, edges, numbers, unit)
        anchors = [value - log_ratio for value, log_ratio in zip(values, log_ratios, strict=True)]
        if loss.anchor == "old":
            step.append(replace(sample, old_log_probs=anchors))
        else:
            step.append(replace(sample, old_log_probs=[one + 0.5 for one in anchors], rollout_log_probs=anchors))
    return step


def double_model(tiny: TinyGPT, samples: Sequence[StepSample]):
    """The whole model in float64, of Megatron's own layers, because Transformer Engine's have no float64."""
    config = transformer_config(
        num_layers=tiny.num_layers,
        hidden_size=tiny.hidden_size,
        num_attention_heads=tiny.num_attention_heads,
        **tiny.expert_options,
    )
    model = build_tiny(tiny, config, max(len(sample.tokens) for sample in samples), use_transformer_engine=False)
    # Its forward gives the policy's logits alone: Megatron-Core wants labels where its config has multi-token prediction.
    model.config, model.mtp_process = copy.copy(config), False
    model.config.mtp_num_layers = None
    return model.to(_device()).double()


def mtp_loss_by_hand(model, samples: Sequence[StepSample], tiny: TinyGPT) -> Tensor | None:  # 0-d float64 with graph
    """The loss of multi-token prediction of the whole step, sample after sample, as the module multi_token writes it down; None for
    a model without."""
    depth, factor = tiny.expert_options.get("mtp_num_layers"), tiny.expert_options.get("mtp_loss_scaling_factor", 0.1)
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
    return factor / depth * torch.stack([torch.stack(layer_shares).mean() for layer_shares in shares]).sum()


def model_logits(model, samples: Sequence[StepSample], tiny: TinyGPT) -> list[Tensor]:
    """The logits that predict each sample's response, [response_length, V] float64 with graph."""
    rows = []
    for sample in samples:
        tokens = torch.tensor([sample.tokens], device=_device())
        logits = model(tokens, torch.arange(tokens.shape[1], device=_device())[None], None)[0, :, : tiny.true_vocab_size]
        rows.append(logits[-len(sample.loss_mask) - 1 : -1])
    return rows


def global_parameters(model) -> dict[str, Tensor]:
    return {global_parameter_name(model, name): parameter for name, parameter in model.named_parameters()}


def _device() -> torch.device:
    return torch.device(torch.cuda.current_device())
