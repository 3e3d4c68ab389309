"""Trains the layers of multi-token prediction (MTP) beside the policy, as one rank would that has the whole step.

With K layers, c = mtp_loss_scaling_factor, and S_k the unmasked response tokens of the step with more than k tokens of their sample
before them, the loss is

    c / K sum_k 1 / |S_k| sum_{s in S_k} -ln p_k(y_s),    k = 1 ... K

Layer k predicts token s at the position of token s - 1 - k, and sees its sample up to token s - 1. p_k is over the vocabulary
without padding columns, at temperature 1. This is what stock Megatron has on one rank in one micro-batch with the mask of the
responses. On a layout Megatron attaches it to hidden states with a scale of its own (validation/auxiliary_losses.py). Here nothing
is attached: it is a term of the loss that the forward step returns, so the schedule scales it as the policy's. The term is
reinforce with advantage 1 and the weight c / (K |S_k|) a token, on the rows that head.py takes from the output layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron_rl.config import PolicyLossConfig
from megatron_rl.errors import DataError
from megatron_rl.layout.groups import ParallelGroups
from megatron_rl.megatron.batch import FurtherTokens, PolicyBatch
from megatron_rl.megatron.head import HeadInputs, rows_of
from megatron_rl.megatron.samples import trained_mtp_layers
from megatron_rl.policy_loss import linear_policy_loss, policy_loss
from megatron_rl.weights import further_token_weight

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig


class MultiTokenLoss(NamedTuple):
    """All 0-d. loss: this rank's part of the step's, with graph. mean: it without c, detached. num_nonfinite: unmasked tokens."""

    loss: Tensor
    mean: Tensor
    num_nonfinite: Tensor


def further_tokens(batch: PolicyBatch, model: nn.Module, config: TransformerConfig) -> FurtherTokens | None:
    """What the trained layers of MTP are trained on in this forward; None where they do not run, in one without a gradient.
    Raises DataError where the step has not counted its tokens."""
    if not model.training or not torch.is_grad_enabled():
        return None
    given = batch.context.num_further_tokens
    if given is None or batch.further is None or len(given) != trained_mtp_layers(config):
        raise DataError(
            f"mtp_num_layers={config.mtp_num_layers} needs the tokens of the whole step that its layers predict: give "
            "StepContext(num_further_tokens=count_further_tokens(...)), or set mtp_loss_scaling_factor=0"
        )
    return batch.further


def multi_token_loss(
    rows: Sequence[Tensor | HeadInputs],  # of each layer
    tokens: FurtherTokens,
    batch: PolicyBatch,
    config: PolicyLossConfig,
    model_config: TransformerConfig,
    groups: ParallelGroups,
    *,
    vocab_size: int,
    loss_scale: float | Tensor | None,  # what backward multiplies the loss by, where it is known
) -> MultiTokenLoss:
    """All rows of a layer are one document of advantage 1.
    Communication and errors: as policy_loss or linear_policy_loss, once a layer."""
    num_tokens = tokens.labels.shape[1]
    options: dict[str, Any] = {
        "vocab_size": vocab_size,
        "tp_group": groups.tp,
        "cp_group": batch.cp_group,
        "backend": config.policy_loss_backend,
        "advantages_per": "sample",
    }
    on_host = torch.ones(1), torch.tensor([0, num_tokens], dtype=torch.int32)  # advantage, bounds
    factor, outputs = model_config.mtp_loss_scaling_factor, []
    for layer_rows, counted, labels, mask, host_mask in zip(
        rows, batch.context.num_further_tokens or (), tokens.labels, tokens.loss_mask, tokens.host_loss_mask, strict=True
    ):
        weights = torch.tensor([further_token_weight(counted, num_layers=len(rows), factor=factor)])
        weights = weights.to(labels.device, non_blocking=True)
        if isinstance(layer_rows, Tensor):
            advantages, bounds = (there.to(labels.device, non_blocking=True) for there in on_host)
            given = (layer_rows.flatten(0, 1), labels, None, advantages, mask, bounds, weights)
            outputs.append(policy_loss("reinforce", *given, inplace=True, loss_scale=loss_scale, **options))
            continue
        hidden, is_sequence_parallel = rows_of(layer_rows, groups.tp)
        advantages, bounds = on_host
        outputs.append(
            linear_policy_loss(
                "reinforce",
                hidden,
                layer_rows.weight,
                labels,
                None,
                advantages,
                host_mask,
                bounds,
                weights,
                max_logits_bytes=config.max_logits_bytes,
                sequence_parallel=is_sequence_parallel,
                fp32_logits=config.fp32_lm_head,
                loss_scale=loss_scale,
                **options,
            )
        )
    loss = torch.stack([output.loss for output in outputs]).sum()
    num_nonfinite = torch.stack([output.num_nonfinite.sum() for output in outputs]).sum()
    mean = loss.detach().float() / factor
    return MultiTokenLoss(loss, mean, num_nonfinite)
