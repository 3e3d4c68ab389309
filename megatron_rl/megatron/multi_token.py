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

import inspect
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from megatron_rl.aggregation import further_token_weight
from megatron_rl.config import PolicyLossConfig
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.layout.groups import ParallelGroups, resolve_group
from megatron_rl.megatron.batch import FurtherTokens, PolicyBatch
from megatron_rl.megatron.head import HeadInputs, rows_of
from megatron_rl.megatron.probe import megatron_version
from megatron_rl.megatron.samples import trained_mtp_layers
from megatron_rl.policy_loss import linear_policy_loss, policy_loss
from megatron_rl.policy_loss.api import PolicyLossOutput
from megatron_rl.policy_loss.settings import LossKeywords

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig


class MultiTokenLoss(NamedTuple):
    """All 0-d. loss: this rank's part of the step's, with graph. mean: it without c, detached. num_nonfinite: unmasked tokens."""

    loss: Tensor
    mean: Tensor
    num_nonfinite: Tensor


def further_tokens(batch: PolicyBatch, model: nn.Module, config: TransformerConfig) -> FurtherTokens | None:
    """What the layers of MTP are trained on in this forward; None where they do not run: without such layers, with the factor 0, in
    a forward without a gradient. Raises DataError where the step has not counted its tokens, and ConfigError where the installed
    Megatron-Core cannot recompute such layers."""
    num_layers = trained_mtp_layers(config)
    if not num_layers or not model.training or not torch.is_grad_enabled():
        return None
    given = batch.context.num_further_tokens
    if given is None or batch.further is None or len(given) != num_layers:
        raise DataError(
            f"mtp_num_layers={config.mtp_num_layers} needs the tokens of the whole step that its layers predict: give "
            "StepContext(num_further_tokens=count_further_tokens(...)), or set mtp_loss_scaling_factor=0"
        )
    recomputes = config.recompute_granularity == "full" and config.recompute_method == "uniform" and not config.fp8
    # Their parameters go through its checkpoint, which saves tensors alone.
    if recomputes and batch.packed_seq_params is not None and megatron_version().startswith("0.16."):
        raise ConfigError(
            f"mtp_num_layers={config.mtp_num_layers} with recompute_granularity=full on packed rows: megatron-core "
            f"{megatron_version()} cannot recompute these layers there, and its own error is a TypeError; set "
            "recompute_granularity=selective, recompute_method=block, which does not recompute them, or mtp_loss_scaling_factor=0"
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
    """Communication and errors: as policy_loss or linear_policy_loss, once a layer."""
    outputs = []
    for number, of_layer in enumerate(rows):
        counted = (batch.context.num_further_tokens or ())[number]
        factor = model_config.mtp_loss_scaling_factor
        weight = torch.tensor([further_token_weight(counted, num_layers=len(rows), factor=factor)])
        labels, masks = tokens.labels[number], (tokens.loss_mask[number], tokens.host_loss_mask[number])
        options: LossKeywords = {
            "vocab_size": vocab_size,
            "tp_group": groups.tp,
            "cp_group": batch.cp_group,
            "backend": config.policy_loss_backend,
            "advantages_per": "sample",
        }
        outputs.append(_of_layer(of_layer, labels, masks, weight, config, loss_scale, options))
    loss = torch.stack([output.loss for output in outputs]).sum()
    mean = loss.detach().float() / model_config.mtp_loss_scaling_factor
    return MultiTokenLoss(loss, mean, torch.stack([output.num_nonfinite.sum() for output in outputs]).sum())


def _of_layer(
    rows: Tensor | HeadInputs,
    labels: Tensor,  # [T]
    masks: tuple[Tensor, Tensor],  # [T] each: on the device, and on the CPU
    weight: Tensor,  # [1]
    config: PolicyLossConfig,
    loss_scale: float | Tensor | None,
    options: LossKeywords,
) -> PolicyLossOutput:
    """All rows are one document of advantage 1."""
    advantage, bounds = torch.ones(1), torch.tensor([0, labels.numel()], dtype=torch.int32)
    weight = weight.to(labels.device, non_blocking=True)
    if isinstance(rows, Tensor):
        advantage, bounds = (there.to(labels.device, non_blocking=True) for there in (advantage, bounds))
        tokens = (advantage, masks[0], bounds, weight)
        return policy_loss("reinforce", rows.flatten(0, 1), labels, None, *tokens, inplace=True, loss_scale=loss_scale, **options)
    hidden, is_sequence_parallel = rows_of(rows, resolve_group(options["tp_group"], "tp"))
    return linear_policy_loss(
        "reinforce",
        hidden,
        rows.weight,
        labels,
        None,
        advantage,
        masks[1],
        bounds,
        weight,
        max_logits_bytes=config.max_logits_bytes,
        sequence_parallel=is_sequence_parallel,
        fp32_logits=config.fp32_lm_head,
        loss_scale=loss_scale,
        **options,
    )


def multi_token_problems(config: PolicyLossConfig, model_config: TransformerConfig) -> Iterator[str]:
    """Why the layers of MTP that this model trains would not be exact."""
    if not trained_mtp_layers(model_config):
        return
    given, remedy = f"mtp_num_layers={model_config.mtp_num_layers!r}", "set mtp_loss_scaling_factor=0"
    from megatron.core.transformer import multi_token_prediction

    if "packed_seq_params" not in inspect.signature(multi_token_prediction.roll_tensor).parameters:
        yield (
            f"{given}: the installed Megatron-Core gives these layers the next tokens of a row without the borders of its samples; "
            f"install megatron-core 0.16 or later, or {remedy}"
        )
    if vars(model_config).get("mtp_grad_scale_func") is not None:  # since Megatron-Core 0.19
        yield f"{given} with mtp_grad_scale_func in the model's config: nothing is attached that it could scale; remove it"
    if vars(model_config).get("use_mup"):
        yield f"{given} with use_mup=True: Megatron-Core scales the logits of the policy, and those of MTP would not be; {remedy}"
