"""Hooks that tests name on a launch line, for a host to import by its own loader; each does one simple thing."""

from __future__ import annotations

import torch


def rejecting_tis(args, *, pg_loss, loss_masks, **others):
    """Every third response token is rejected: modified masks, the losses as they were."""
    masks = [mask.clone() for mask in loss_masks]
    for mask in masks:
        mask[2::3] = 0
    return pg_loss, masks, {"kept": pg_loss.detach() * 0 + 1}


def sum_by_four_positional_arguments(total_lengths, response_lengths, loss_masks, calculate_per_token_loss, /):
    """A factory that takes what it is promised, and nothing by keyword."""
    assert len(total_lengths) == len(response_lengths) == len(loss_masks) and calculate_per_token_loss is False
    assert [mask.shape[0] for mask in loss_masks] == response_lengths, "masks of whole responses"
    return lambda values: values.sum() / 7.0


def advantages_alone(args, batch, logits, sum_of_sample_mean):
    """A custom loss that is no policy loss: the mean advantage, through the reducer that the host hands over."""
    mean = sum_of_sample_mean(torch.cat(batch["advantages"]))
    return mean + 0 * logits.sum(), {"advantages": mean, "samples": torch.tensor(float(len(batch["loss_masks"])))}
