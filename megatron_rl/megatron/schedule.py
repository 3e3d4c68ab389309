"""Scales the loss for Megatron's schedule, so that schedule, DDP and finalize_model_grads give exactly the step's loss.

With D = dp cp ranks and M micro-batches, Megatron-Core divides a 3-tuple's loss by (its token count x M), and DDP
averages over D. `loss_part` is this rank's part of the plain sum over dp, cp and micro-batches. So the returned tuple is

    (loss_part D M, 1)                   which undoes both: the gradient of sum loss_part remains
    (loss_part T, local token count)     with calculate_per_token_loss: Megatron sums and divides by the summed counts, T

No token is weighted here: `loss_part` has the weights from global counts already. docs/parallelism.md has the arithmetic.
"""

from __future__ import annotations

from numbers import Integral, Real
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_rl.config import GradientDivisor, LaunchMethod
from megatron_rl.count import StepTotals, check_totals
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.layout.groups import ParallelGroups
from megatron_rl.validation.auxiliary_losses import router_loss_problems

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

# The return value of loss_func: loss 0-d, num_tokens 0-d int32, report.
ScheduledLoss = tuple[Tensor, Tensor, dict[str, Tensor]]
LARGEST_COUNT = torch.iinfo(torch.int32).max


def scale_for_schedule(
    loss_part: Tensor,  # 0-d, this rank's weighted sum over its own tokens of one micro-batch
    num_microbatches: int,
    *,
    totals: StepTotals,
    num_local_tokens: int | Tensor,  # unmasked tokens of this rank in this micro-batch
    config: TransformerConfig,  # the model's: its calculate_per_token_loss is what counts, not the flag on args
    groups: ParallelGroups,
    gradient_divisor: str = GradientDivisor.NONE,
    router_aux_loss: str | None = None,
    added_part: Tensor | None = None,  # 0-d
) -> ScheduledLoss:
    """The 3-tuple that loss_func returns to Megatron's schedule: (loss 0-d, num_tokens 0-d int32, report).

    The report holds [sum, count] pairs. Megatron's train_step sums both over micro-batches and dp-cp and divides, so that
    `policy/loss` is the step's loss. The report shares no storage with the loss, because the schedule divides the loss in place.

    Args:
        loss_part: this rank's weighted sum over its tokens of one micro-batch, `.loss` of a policy loss.
        num_microbatches: the micro-batches that this rank gives to the schedule.
        totals: the counts of the step, from count_step.
        num_local_tokens: unmasked tokens of this rank in this micro-batch. A tensor on the device is not checked: that would
            synchronise.
        config: the model's; its calculate_per_token_loss counts, not the flag on args.
        groups: the process groups of this rank.
        gradient_divisor: "none", or "num_samples", which divides the gradient (also of the KL and entropy terms) by the step's
            samples once more, as DeepSpeed does. The reported loss does not change.
        router_aux_loss: "host" or "exact" accept auxiliary losses of experts; None refuses them under the per-token contract, and
            "refuse" under each.
        added_part: of a loss that is trained beside, and has its own denominator: gradient_divisor does not divide it, and
            `policy/loss` does not count it.
    Communication: none; no synchronisation.
    Raises: ConfigError for a num_microbatches that is not a whole number above 0, for an unknown gradient_divisor, and for
        auxiliary losses of experts that are refused: the per-token contract would rescale them. DataError for totals without
        tokens, a loss_part that is not 0-d, and a num_local_tokens that is not a whole number in int32.
    """
    if loss_part.dim() != 0:
        raise DataError(f"loss_part has shape {tuple(loss_part.shape)}: it must be 0-d, the sum over this rank's tokens")
    factor = _factor(num_microbatches, totals, config, groups, gradient_divisor)
    num_tokens = _checked_count(num_local_tokens)
    if config.calculate_per_token_loss or router_aux_loss is not None:
        problems = list(router_loss_problems(vars(config) | {"router_aux_loss": router_aux_loss}, LaunchMethod.MEGATRON_LM))
        if problems:
            raise ConfigError(problems)
    if not config.calculate_per_token_loss:
        num_tokens = 1
    value = loss_part.detach().float()
    num_parts = groups.dp_cp.size() * num_microbatches
    report = {"policy/loss": torch.stack([value, torch.full_like(value, 1.0 / num_parts)])}
    # A new tensor, because Megatron sums the counts in place. torch.full uses a kernel; a copy from the host would synchronise.
    if isinstance(num_tokens, Tensor):
        num_tokens = num_tokens.detach().to(loss_part.device, torch.int32, copy=True).reshape(())
    else:
        num_tokens = torch.full((), num_tokens, dtype=torch.int32, device=loss_part.device)
    loss = loss_part * factor
    if added_part is not None:
        loss = loss + added_part * _factor(num_microbatches, totals, config, groups, GradientDivisor.NONE)
    return loss, num_tokens, report


def backward_factor(
    num_microbatches: int,
    *,
    totals: StepTotals,
    config: TransformerConfig,  # the model's
    groups: ParallelGroups,
    gradient_divisor: str = GradientDivisor.NONE,
) -> float | Tensor | None:  # a tensor is 0-d, on the device
    """The factor with which the schedule's backward multiplies the gradient of `loss_part`; None where it is not known.

    Unit contract: fl(fl(1 / M) D M), rounded as float32 does; per-token contract: T. With a gradient scaler (fp16) times its scale,
    which stays on the device. None with another grad_scale_func than Megatron's optimisers set. No synchronisation.
    """
    scale = _gradient_scale(config)
    if scale is None:
        return None
    factor = _factor(num_microbatches, totals, config, groups, gradient_divisor)
    delivered = scale * factor if config.calculate_per_token_loss else scale / num_microbatches * factor
    return float(delivered) if delivered.device.type == "cpu" else delivered


def _checked_count(num_local_tokens: int | Tensor) -> int | Tensor:
    """The checked number where the host has it, else the tensor on its device. Raises DataError."""
    number: float | Tensor = num_local_tokens
    if isinstance(num_local_tokens, Tensor):
        if num_local_tokens.numel() != 1:
            raise DataError(
                f"num_local_tokens has shape {tuple(num_local_tokens.shape)}: it must be one number, this rank's unmasked tokens "
                "in this micro-batch"
            )
        if num_local_tokens.device.type != "cpu":
            return num_local_tokens
        number = num_local_tokens.item()
    is_number = isinstance(number, Real) and not isinstance(number, bool)
    if not is_number or not 0 <= number <= LARGEST_COUNT or number % 1:
        raise DataError(
            f"num_local_tokens={number!r} must be a whole number from 0 to {LARGEST_COUNT}: Megatron adds the counts "
            "in int32; pass loss_mask.sum(), this rank's unmasked tokens in this micro-batch"
        )
    return int(number)


def _factor(
    num_microbatches: int, totals: StepTotals, config: TransformerConfig, groups: ParallelGroups, gradient_divisor: str
) -> float:
    check_totals(totals)
    is_whole = isinstance(num_microbatches, Integral) and not isinstance(num_microbatches, bool)
    if not is_whole or num_microbatches < 1:
        raise ConfigError(
            f"num_microbatches={num_microbatches!r} must be at least 1, a whole number: pass the number given to the schedule"
        )
    factor = float(totals.num_tokens) if config.calculate_per_token_loss else float(groups.dp_cp.size() * num_microbatches)
    if gradient_divisor == GradientDivisor.NUM_SAMPLES:
        factor /= totals.num_samples
    elif gradient_divisor != GradientDivisor.NONE:
        raise ConfigError(f"gradient_divisor={gradient_divisor!r} is not one of {', '.join(GradientDivisor)}")
    return factor


def _gradient_scale(config: TransformerConfig) -> Tensor | None:  # 0-d float32, on the CPU unless a scaler keeps it elsewhere
    """The gradient with which backward starts: 1, or the scale of the optimiser's scaler; None with a foreign grad_scale_func."""
    one = torch.ones((), device="cpu")
    if config.grad_scale_func is None:
        return one
    from megatron.core.optimizer import MegatronOptimizer

    optimizer = getattr(config.grad_scale_func, "__self__", None)
    if not isinstance(optimizer, MegatronOptimizer) or config.grad_scale_func != optimizer.scale_loss:
        return None
    parts = vars(optimizer).get("chained_optimizers", [optimizer])
    has_scaler = any(vars(part).get("grad_scaler") is not None for part in parts)
    return optimizer.get_loss_scale().detach().reshape(()) if has_scaler else one
