"""Selects tokens of a step of whole samples, and gives each sample what the selection changes of its loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from megatron_rl.config import PolicyLossConfig
from megatron_rl.errors import DataError
from megatron_rl.layout.groups import ParallelGroups
from megatron_rl.megatron.samples import PolicySample
from megatron_rl.registries.selection_settings import TokenSelectionSettings
from megatron_rl.selections import TokenSelection, select_tokens


class Scored(Protocol):
    """The part of a sample that a selection reads, from any trainer."""

    @property
    def loss_mask(self) -> Sequence[int] | Tensor: ...  # one a response token

    @property
    def advantage(self) -> float: ...


@dataclass(frozen=True, slots=True)
class StepSelection:
    """What is selected of this data-parallel rank's samples."""

    selection: TokenSelection  # of the samples' response tokens, one sample after the other
    lengths: tuple[int, ...]  # of the responses

    def applied_to(self, samples: Sequence[PolicySample]) -> list[PolicySample]:
        """The samples of weigh_samples, in the order of the selection, with what it changes. Raises DataError for other samples."""
        if tuple(sample.response_length for sample in samples) != self.lengths:
            raise DataError(
                f"these {len(samples)} samples are not the {len(self.lengths)} of which tokens were selected: their number or "
                "their lengths differ; give the samples of the selection, in their order"
            )
        selection = self.selection
        weights, coefficients = (
            [None] * len(samples) if values is None else values.split(list(self.lengths))
            for values in (selection.importance_weights, selection.old_kl_coefficients)
        )
        return [
            replace(sample, importance_weights=weight, old_kl_coefficients=coefficient)
            for sample, weight, coefficient in zip(samples, weights, coefficients, strict=True)
        ]

    def metrics(self) -> dict[str, float]:
        """The share of the step's tokens that is selected, and the score of the last selected one, where there is one."""
        selection = self.selection
        found = {"policy/selected_share": selection.num_selected / max(selection.num_tokens, 1)}
        return found if selection.threshold is None else found | {"policy/selection_threshold": selection.threshold}


def select_step_tokens(
    config: PolicyLossConfig,
    samples: Sequence[Scored],
    sample_ids: Sequence[int],
    groups: ParallelGroups,
    *,
    log_probs: Sequence[Tensor],  # of each sample [response_length], by the policy before the step, in nats
    entropy: Sequence[Tensor] | None = None,  # of each sample [response_length], of the policy before the step, in nats
    seed: int = 0,
) -> StepSelection:
    """config.token_selection over the whole step, from this data-parallel rank's whole samples.

    Then hand the samples of weigh_samples to `applied_to`, and make the batches of what it returns. Every rank calls it, also one
    without samples; tp, cp and pp ranks of one data-parallel rank give the same values. sample_ids, seed, errors: as select_tokens.
    Communication: that of select_tokens, over dp.
    """
    masks = [torch.as_tensor(sample.loss_mask).bool().cpu() for sample in samples]
    lengths = tuple(mask.numel() for mask in masks)
    selection = select_tokens(
        TokenSelectionSettings.of(config),
        torch.cat([torch.zeros(0, dtype=torch.bool), *masks]),
        torch.tensor([0, *lengths]).cumsum(0),
        sample_ids,
        log_probs=_joined(log_probs),
        entropy=None if entropy is None else _joined(entropy),
        advantages=torch.tensor([sample.advantage for sample in samples], dtype=torch.float64).repeat_interleave(
            torch.tensor(lengths, dtype=torch.int64)
        ),
        seed=seed,
        group=groups.dp,
    )
    return StepSelection(selection, lengths)


def _joined(values: Sequence[Tensor]) -> Tensor:
    return torch.cat([torch.zeros(0), *(torch.as_tensor(value).cpu() for value in values)])
