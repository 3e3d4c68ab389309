"""The policy-loss reducer that a host calls: a weighted sum of this rank's tokens, not divided by N, M, cp or dp.

base.Host says what the host does with the result, and so what is left to do here.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_rl.aggregation import weigh_tokens
from megatron_rl.config import LossAggregation, PolicyLossConfig, Route
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.hosts import step_guard
from megatron_rl.hosts.base import REWARD_LINE, HostLaunch, HostOptions, current_args
from megatron_rl.hosts.checks import bshd_problem, check_launch
from megatron_rl.layout.context_parallel import slice_response
from megatron_rl.layout.groups import Group, resolve_group

Reducer = Callable[[Tensor], Tensor]


def get_pg_loss_reducer(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    loss_masks: Sequence[Tensor],  # S tensors [response_length], 0/1: whole responses, never cp slices
    calculate_per_token_loss: bool = False,
) -> Reducer:
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

    Raises ConfigError for a launch whose scale would be wrong, see hosts/checks.py; DataError for lists of different lengths, a
    mask or x of the wrong length, and for a fully masked sample under the per-token contract, which the host counts as one token.

    >>> from megatron_rl.hosts.base import remember_args
    >>> remember_args(Namespace(loss_aggregation="constant", loss_aggregation_divisor=4.0))
    >>> reducer = get_pg_loss_reducer([5, 4], [3, 2], [torch.tensor([1, 0, 1]), torch.tensor([1, 1])])
    >>> reducer(torch.tensor([1.0, float("nan"), 2.0, 3.0, 4.0]))
    tensor(2.5000)
    """
    config, launch = _settings(current_args(), calculate_per_token_loss)
    if not launch.options.host.loss.drops_masked_values and step_guard.is_armed():
        step_guard.expect_finite_gradients()
    _check_lengths(total_lengths, response_lengths, loss_masks)
    cp_group = resolve_group(None, "cp")
    if cp_group.size() > 1 and launch.options["qkv_format"] != "thd":
        raise ConfigError(bshd_problem(launch.options["qkv_format"], cp_group.size()))
    if not loss_masks:
        return _nothing_to_sum
    masks = [_as_bool(index, mask) for index, mask in enumerate(loss_masks)]
    token_counts = torch.stack([mask.sum() for mask in masks])
    if calculate_per_token_loss:
        _check_no_phantom_tokens(token_counts)
    weights = _sample_weights(config, launch, token_counts)
    local = [_local_part(mask, total, cp_group) for mask, total in zip(masks, total_lengths, strict=True)]
    local_mask = torch.cat(local)
    sizes = torch.tensor([part.shape[0] for part in local], device=weights.device)
    token_weights = weights.repeat_interleave(sizes, output_size=local_mask.shape[0])

    def reducer(
        x: Tensor,  # [local response tokens]
    ) -> Tensor:  # 0-d
        _check_values(x, local_mask.shape[0], cp_group)
        if step_guard.is_armed():
            step_guard.record_nonfinite((~torch.isfinite(x.detach()) & local_mask).sum())
        # where before the product: 0 x NaN is NaN, in the gradient too.
        return (torch.where(local_mask, x, 0.0) * token_weights).sum()

    return reducer


def _settings(args: Namespace, is_per_token: bool) -> tuple[PolicyLossConfig, HostLaunch]:
    """The call says what the host does with the result. Arguments that say something else were changed after parsing."""
    options = HostOptions(args)
    has_switch = options.has("calculate_per_token_loss")
    if has_switch and options["calculate_per_token_loss"] != bool(is_per_token):
        raise ConfigError(
            f"the reducer is called with calculate_per_token_loss={is_per_token} and the arguments say "
            f"{options['calculate_per_token_loss']}: one of them was changed after parsing; leave both alone"
        )
    of_call = {} if has_switch else {"calculate_per_token_loss": bool(is_per_token)}
    return check_launch(Namespace(**vars(args), **of_call), Route.REDUCER)


def _sample_weights(config: PolicyLossConfig, launch: HostLaunch, token_counts: Tensor) -> Tensor:  # [S] float32
    """What is left of each token's weight when the host has divided by N or by T."""
    aggregation, divisor = config.loss_aggregation, config.loss_aggregation_divisor
    if launch.companion is not None:
        aggregation, divisor = LossAggregation.SAMPLE_MEAN, None
    return weigh_tokens(aggregation, token_counts, launch.options.host.denominators(launch.options), divisor=divisor)


def _local_part(mask: Tensor, total_length: int, cp_group: Group) -> Tensor:  # [response] -> [local response tokens]
    if cp_group.size() == 1 or not mask.shape[0]:
        return mask
    return slice_response(mask, total_length, cp_group.rank(), cp_group.size())


def _as_bool(index: int, mask: Tensor) -> Tensor:
    is_set = mask != 0
    # On CUDA looking would synchronise; the hosts' masks are int32 zeros and ones.
    if not mask.is_cuda and mask.dtype != torch.bool and not torch.equal(is_set, mask == 1):
        raise DataError(f"loss_masks[{index}] has values other than 0 and 1: a mask selects tokens, weights belong elsewhere")
    return is_set


def _check_lengths(total_lengths: Sequence[int], response_lengths: Sequence[int], loss_masks: Sequence[Tensor]) -> None:
    sizes = (len(total_lengths), len(response_lengths), len(loss_masks))
    if len(set(sizes)) > 1:
        raise DataError(
            f"{sizes[0]} total_lengths, {sizes[1]} response_lengths and {sizes[2]} loss_masks: pass one of each for each sample"
        )
    for index, (mask, length) in enumerate(zip(loss_masks, response_lengths, strict=True)):
        if mask.shape != (length,):
            raise DataError(
                f"loss_masks[{index}] has shape {tuple(mask.shape)} for a response of {length} tokens: pass the whole response's "
                "mask, not its context-parallel slice"
            )


def _check_values(x: Tensor, num_tokens: int, cp_group: Group) -> None:
    if x.shape != (num_tokens,):
        raise DataError(
            f"the loss has shape {tuple(x.shape)} and this rank's responses hold {num_tokens} tokens (cp rank {cp_group.rank()} of "
            f"{cp_group.size()}): pass one value for each of them, in the order of the samples"
        )


def _check_no_phantom_tokens(token_counts: Tensor) -> None:
    num_masked = int((token_counts == 0).sum())
    if num_masked:
        raise DataError(
            f"{num_masked} of {token_counts.numel()} samples are fully masked, and under --calculate-per-token-loss the host "
            f"counts each as one token: token_mean would be too small; remove the flag and add {REWARD_LINE}, "
            "or drop such samples before training"
        )


def _nothing_to_sum(x: Tensor) -> Tensor:  # [0] -> 0-d
    """A micro-batch without samples: its zero stays in the graph, so that this rank meets the collectives of the backward."""
    if x.numel():
        raise DataError(f"the loss has {x.numel()} values for 0 samples: pass an empty one")
    return x.sum() * 0
