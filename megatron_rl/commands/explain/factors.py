"""What the package's own code multiplies a loss by on a host and a layout: executed on one token, never derived. No formula here.

Nothing here starts a process or imports Megatron-Core.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.commands.explain.launch import CONVERT, HostRun
from megatron_rl.commands.explain.weights import Counts
from megatron_rl.config import GradientDivisor
from megatron_rl.layout.groups import ParallelGroups
from megatron_rl.megatron.schedule import delivered_factor, scale_for_schedule
from megatron_rl.testing.host_emulator import EmulatedHost


@dataclass(frozen=True, slots=True)
class Size:
    """A process group of that many ranks, of which only the size is asked."""

    ranks: int

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    data: int = 1
    num_microbatches: int = 1

    @property
    def groups(self) -> ParallelGroups:
        """tp and pp stand in no factor, so they are left at one rank."""
        return ParallelGroups(cp=Size(self.context), dp=Size(self.data), dp_cp=Size(self.data * self.context))

    @property
    def num_ranks(self) -> int:
        return self.tensor * self.context * self.pipeline * self.data


def unit_loss(args: Namespace, batch: dict, logits: Tensor, reduce) -> tuple[Tensor, dict]:
    """A custom loss of 1: what comes out of the host is the host's factor."""
    return torch.ones((), dtype=torch.float64), {}


def denominators(launch: HostRun, counts: Counts) -> Tensor:  # [S]
    """rollout_mask_sums, which a host's own reducer and our loss divide by: the converter writes its prompt's tokens there."""
    return counts.prompt_tokens if launch.companion == CONVERT else counts.rollout_tokens


def host_factor(launch: HostRun, layout: Layout, counts: Counts) -> tuple[float, int]:
    """(factor on the loss, tokens that the host counts over the step). The emulator sees masks of the right sums alone."""
    args = Namespace(
        loss_type="custom_loss",
        custom_loss_function_path=f"{__name__}.unit_loss",
        calculate_per_token_loss=launch.is_per_token,
        recompute_loss_function=False,
        allgather_cp=False,
        qkv_format="thd",
    )
    batch = {
        "loss_masks": [count.reshape(1) for count in counts.tokens],
        "total_lengths": [1] * counts.num_samples,
        "response_lengths": [0] * counts.num_samples,
        "rollout_mask_sums": counts.rollout_tokens,
    }
    num_rollouts = counts.totals.num_prompts if launch.companion == CONVERT else counts.totals.num_samples
    loss, num_tokens, _ = EmulatedHost(launch.host, layout.groups).loss_function(
        args, batch, torch.zeros(1, 1, 1), num_microbatches=layout.num_microbatches, num_rollouts=num_rollouts
    )
    return float(loss), int(num_tokens)


def own_reducer(launch: HostRun, counts: Counts) -> Tensor:  # [S]
    """The gradient of the host's default reducer, one token a sample: its weight."""
    num_samples = counts.num_samples
    batch = {
        "total_lengths": [2] * num_samples,
        "response_lengths": [1] * num_samples,
        "rollout_mask_sums": denominators(launch, counts),
    }
    args = Namespace(calculate_per_token_loss=launch.is_per_token, qkv_format="thd")
    values = torch.ones(num_samples, dtype=torch.float64, requires_grad=True)
    masks = [torch.ones(1, dtype=torch.int64)] * num_samples
    EmulatedHost(launch.host, ParallelGroups()).default_reducer(args, batch, masks)(values).backward()
    return values.grad


def own_scale(layout: Layout, counts: Counts, *, per_token: bool, divisor: str = GradientDivisor.NONE) -> float:
    """What scale_for_schedule multiplies our part of the loss by."""
    loss, _, _ = scale_for_schedule(
        torch.ones((), dtype=torch.float64),
        layout.num_microbatches,
        totals=counts.totals,
        num_local_tokens=1,
        config=Namespace(calculate_per_token_loss=per_token),
        groups=layout.groups,
        gradient_divisor=divisor,
    )
    return float(loss)


def schedule_and_ddp(layout: Layout, counts: Counts, *, per_token: bool) -> tuple[float, float]:
    """Megatron-Core 0.13 to 0.19: the schedule's factor is what delivered_factor says that backward delivers of our scale; DDP's
    average and, per token, finalize_model_grads undo the rest of it, which is what scale_for_schedule relies on."""
    config = Namespace(calculate_per_token_loss=per_token, grad_scale_func=None)
    delivered = delivered_factor(layout.num_microbatches, totals=counts.totals, config=config, groups=layout.groups)
    schedule = delivered / own_scale(layout, counts, per_token=per_token)
    return schedule, 1.0 if per_token else 1.0 / delivered


def gradient_divisor_factor(counts: Counts) -> float:
    """What --gradient-divisor num_samples does to the gradient: DeepSpeed's second division."""
    divided = own_scale(Layout(), counts, per_token=False, divisor=GradientDivisor.NUM_SAMPLES)
    return divided / own_scale(Layout(), counts, per_token=False)
