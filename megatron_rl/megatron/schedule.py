"""What a loss function returns, so that Megatron's schedule, DDP and finalize_model_grads yield the step's loss exactly.

With D = dp cp ranks and M micro-batches, Megatron-Core 0.13 and later divides a 3-tuple's loss by (its token count x M), and DDP
averages over D. `loss_part` is this rank's part of the plain sum over dp, cp and micro-batches, so returning

    (loss_part D M, 1)                   undoes both: the gradient is that of sum loss_part
    (loss_part T, local token count)     under calculate_per_token_loss: Megatron sums and divides by the summed counts, T

This module must never weight a token: `loss_part` comes weighted by global counts. docs/parallelism.md has the arithmetic.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.aggregation import StepTotals
from megatron_rl.config import GradientDivisor
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.layout.groups import ParallelGroups


def scale_for_schedule(
    loss_part: Tensor,  # 0-d, this rank's weighted sum over its own tokens of one micro-batch
    num_microbatches: int,
    *,
    totals: StepTotals,
    num_local_tokens: int | Tensor,  # unmasked tokens of this rank in this micro-batch
    config,  # the model's TransformerConfig: its calculate_per_token_loss is what counts, not the flag on args
    groups: ParallelGroups,
    gradient_divisor: str = GradientDivisor.NONE,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:  # loss 0-d, num_tokens 0-d int32, report
    """The 3-tuple that loss_func returns. num_microbatches is what this rank hands to the schedule.

    gradient_divisor "num_samples" divides the gradient, regularisers included, once more by the step's samples, as DeepSpeed's
    accumulation x world does; the reported loss keeps its value. The report holds [sum, count] pairs, which Megatron's train_step
    adds over micro-batches and dp-cp and divides: `policy/loss` comes out as the step's loss. Its tensors share no storage with
    the returned loss, because the schedule divides that in place.

    Communication: none. Raises ConfigError or DataError for sizes below 1 and for totals without tokens.
    """
    if num_microbatches < 1:
        raise ConfigError(f"num_microbatches={num_microbatches} must be at least 1: it is what the schedule is called with")
    if totals.num_tokens < 1 or totals.num_samples < 1:
        raise DataError(f"{totals}: a step without an unmasked token has no loss; skip it")
    if loss_part.dim() != 0:
        raise DataError(f"loss_part has shape {tuple(loss_part.shape)}: it must be 0-d, the sum over this rank's tokens")
    num_parts = groups.dp_cp.size() * num_microbatches
    if config.calculate_per_token_loss:
        factor, num_tokens = float(totals.num_tokens), num_local_tokens
    else:
        factor, num_tokens = float(num_parts), 1
    if gradient_divisor == GradientDivisor.NUM_SAMPLES:
        factor /= totals.num_samples
    elif gradient_divisor != GradientDivisor.NONE:
        raise ConfigError(f"gradient_divisor={gradient_divisor!r} is not one of {', '.join(GradientDivisor)}")
    value = loss_part.detach().float()
    report = {"policy/loss": torch.stack([value, torch.full_like(value, 1.0 / num_parts)])}
    num_tokens = torch.as_tensor(num_tokens, device=loss_part.device).to(torch.int32).reshape(())
    return loss_part * factor, num_tokens.clone(), report
