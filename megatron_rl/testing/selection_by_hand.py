"""A token selection by a sort of the whole step, for references in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_rl.config import PolicyLossConfig
from megatron_rl.layout.noise import hash_of
from megatron_rl.registries.selection_settings import TokenSelectionSettings
from megatron_rl.registries.token_selections import Effect, Taken, get_token_selection
from megatron_rl.testing.layout_step import StepSample

Rows = Sequence[Sequence[float]]  # of each sample, of each token of the response


def selected_by_hand(step: Sequence[StepSample], log_probs: Rows, entropy: Rows, config: PolicyLossConfig) -> list[list[bool]]:
    """The selected tokens of each response. A sample's id is its number in the step, and the seed of drawn ones is 0.

    log_probs, entropy: of the policy before the step.
    """
    settings = TokenSelectionSettings.of(config)
    selected = [[False] * len(sample.loss_mask) for sample in step]
    if not settings.is_on:
        return selected
    places = [(i, t) for i, sample in enumerate(step) for t, bit in enumerate(sample.loss_mask) if bit]
    vectors = {
        "log_probs": [log_probs[i][t] for i, t in places],
        "entropy": [entropy[i][t] for i, t in places],
        "advantages": [step[i].advantage for i, _ in places],
    }
    means = {name: sum(values) / max(len(values), 1) for name, values in vectors.items()}
    vectors |= {f"centred_{name}": [value - means[name] for value in values] for name, values in vectors.items()}
    declared, (low, high) = settings.declared, settings.bounds
    score = declared.function(**{need: torch.tensor(vectors[need], dtype=torch.float64) for need in declared.needs}).tolist()
    drawn = (hash_of(0, *torch.tensor(places, dtype=torch.int64).view(-1, 2).T) & 0xFFFFFFFF).tolist()
    order = {Taken.LARGEST: [-one for one in score], Taken.SMALLEST: score, Taken.RANDOM: drawn}[declared.taken]
    ranked = sorted((key, place) for key, one, place in zip(order, score, places, strict=True) if low <= one <= high)
    for _, (i, t) in ranked[: settings.number_of(len(places))]:
        selected[i][t] = True
    return selected


def trained_by_hand(selected: Sequence[Sequence[bool]], config: PolicyLossConfig) -> list[list[bool]]:
    """Of each sample the tokens whose policy term is trained."""
    effect = get_token_selection(config.token_selection).effect
    return [
        [{Effect.TRAINED_ALONE: is_one, Effect.LEFT_OUT: not is_one}.get(effect, True) for is_one in of_sample]
        for of_sample in selected
    ]
