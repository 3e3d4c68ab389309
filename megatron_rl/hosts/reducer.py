"""What miles and slime call to sum their own loss of a micro-batch: a weighted sum of this rank's tokens.

    --custom-pg-loss-reducer-function-path megatron_rl.reducers.get_pg_loss_reducer

Afterwards the host divides the result by the step's rollouts (--calculate-per-token-loss: tokens). Nothing here divides by them, by
M, by cp or by dp. The launch is judged at the first call.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatron_rl.config import LaunchMethod
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.hosts.args import REWARD_LINE, TOTALS_OF_HOST
from megatron_rl.hosts.checks import bshd_problem, check_launch
from megatron_rl.hosts.host_run import RUNS, current_args
from megatron_rl.layout.context_parallel import slice_response
from megatron_rl.layout.groups import resolve_group
from megatron_rl.weights import sample_token_weights


def get_pg_loss_reducer(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    loss_masks: Sequence[Tensor],  # S tensors [response_length], 0/1: whole responses, never cp slices
    calculate_per_token_loss: bool = False,
) -> Callable[[Tensor], Tensor]:
    """reducer(x): x [local response tokens] float32, sample after sample -> 0-d, attached to x.

        sample_mean    sum_i S_i / m_i         S_i: the sum of x over sample i's unmasked tokens on this cp rank
        constant       sum_i S_i / divisor     m_i: unmasked tokens of the whole response
        token_mean     sum_i S_i               under --calculate-per-token-loss

    With hooks.reward_post_process on the launch line each aggregation is sum_i S_i / m_i of advantages that it has scaled.
    The masks that a custom rejection function hands over count as they are: with sample_mean our m_i then leaves rejected tokens
    out, where the host's own reducer keeps them in.

    A masked value may be NaN. A fully masked sample, an empty slice and an empty micro-batch give 0. The one side effect is the
    count of non-finite unmasked values for an armed hooks.before_train_step: under --recompute-loss-function the hosts call the
    reducer twice, and counting twice does no harm. Communication: none. Under the per-token contract it synchronises
    once, to see whether a sample is fully masked.

    Raises ConfigError for a launch whose scale would be wrong, see hosts/checks.py; DataError for an x of the wrong length, and for
    a fully masked sample under the per-token contract, which the host counts as one token.
    """
    args, is_per_token = current_args(), bool(calculate_per_token_loss)
    run = RUNS.of(args)
    plan = run.judged((LaunchMethod.REDUCER, is_per_token), args, partial(read_plan, is_per_token=is_per_token))
    if plan.has_head:
        run.check_head()
    guard = run.guard
    cp_group = resolve_group(None, "cp")
    cp_rank, cp_size = cp_group.rank(), cp_group.size()
    if cp_size > 1 and plan.qkv_format != "thd":
        raise ConfigError(bshd_problem(plan.qkv_format, cp_size))
    if not loss_masks:
        return _nothing_to_sum
    whole = torch.cat(list(loss_masks)) != 0
    masks = list(whole.split([mask.shape[0] for mask in loss_masks]))
    token_counts = torch.stack([mask.sum() for mask in masks])
    if is_per_token:
        check_no_phantom_tokens(token_counts)
    # What is left of each token's weight when the host has divided by N or by T.
    weights = sample_token_weights(plan.aggregation, token_counts, TOTALS_OF_HOST, divisor=plan.divisor, are_of_step=False)
    if cp_size > 1:
        masks = [
            slice_response(mask, total, cp_rank, cp_size) if mask.shape[0] else mask
            for mask, total in zip(masks, total_lengths, strict=True)
        ]
    local_mask = torch.cat(masks)
    sizes = torch.tensor([mask.shape[0] for mask in masks], device=weights.device)
    token_weights = weights.repeat_interleave(sizes, output_size=local_mask.shape[0])

    def reducer(
        x: Tensor,  # [local response tokens]
    ) -> Tensor:  # 0-d
        if x.shape != local_mask.shape:
            raise DataError(
                f"the loss has shape {tuple(x.shape)} and this rank's responses hold {local_mask.shape[0]} tokens (cp rank "
                f"{cp_rank} of {cp_size}): pass one value for each of them, in the order of the samples"
            )
        if guard.is_armed:
            guard.record_nonfinite((~torch.isfinite(x.detach()) & local_mask).sum())
        # where before the product: 0 x NaN is NaN, in the gradient too.
        return (torch.where(local_mask, x, 0.0) * token_weights).sum()

    return reducer


@dataclass(frozen=True, slots=True)
class ReducerPlan:
    """What a launch asks of the reducer. aggregation: sample_mean where the reward hook has weighted the samples."""

    aggregation: str
    divisor: float | None
    qkv_format: str
    has_head: bool
    """The launch asks for float32 logits."""


def read_plan(args: Namespace, *, is_per_token: bool) -> ReducerPlan:
    """The call says what the host does with the result. Arguments that say something else were changed after parsing.

    Raises one ConfigError with every problem of the launch."""
    given = vars(args).get("calculate_per_token_loss", is_per_token)
    if bool(given) != is_per_token:
        raise ConfigError(
            f"the reducer is called with calculate_per_token_loss={is_per_token} and the arguments say {bool(given)}: "
            "one of them was changed after parsing; leave both alone"
        )
    launch = check_launch(Namespace(**vars(args) | {"calculate_per_token_loss": given}), LaunchMethod.REDUCER)
    config = launch.config
    name, divisor = config.loss_aggregation, config.loss_aggregation_divisor
    if launch.has_reward_hook:
        name, divisor = "sample_mean", None
    return ReducerPlan(name, divisor, launch["qkv_format"], config.fp32_lm_head)


def check_no_phantom_tokens(token_counts: Tensor) -> None:  # [S]
    """For the per-token contract. One look at the device a micro-batch; the host synchronises there too, for the metrics."""
    if bool((token_counts == 0).any()):
        masked = torch.nonzero(token_counts == 0).flatten().tolist()
        raise DataError(
            f"samples {masked} of the micro-batch are fully masked, and under --calculate-per-token-loss the host counts one "
            f"token for each of them, which shrinks the gradient: drop them, or take {REWARD_LINE} in place of the flag"
        )


def _nothing_to_sum(x: Tensor) -> Tensor:  # [0] -> 0-d
    """A micro-batch without samples: its zero stays in the graph, so that this rank meets the collectives of the backward."""
    if x.numel():
        raise DataError(f"the loss has {x.numel()} values for 0 samples: pass an empty one")
    return x.sum() * 0
