"""A selection of a step's tokens, as importance weights: top_entropy trains the uncertain ones alone, clip_cov leaves some out.

    order = sample_ids * 2**32 + positions    # a number of each token that this rank holds of the step, the same in each layout
    weights = top_entropy(entropy, loss_mask, order, share=0.2, group=dp_cp_group)    # of the policy before the step
    output = policy_loss("grpo", ..., importance_weights=weights[tokens of the micro-batch])

The weights are 0 or 1, and computed once a step, on all ranks of the group. A selection of a micro-batch's tokens would be another
one: 8 micro-batches take 8 tokens where the step has 1 (verl#7829). Here each token has its number in the step, and everything is
computed in the order of these numbers, so the same tokens are selected for any cut into micro-batches and any layout. Denominators
count all unmasked tokens, also those that are not trained.
"""

from __future__ import annotations

from fractions import Fraction

import torch
import torch.distributed as dist
from torch import Tensor


def top_entropy(
    entropy: Tensor,  # [T] nats
    loss_mask: Tensor,  # [T] bool
    order: Tensor,  # [T] int64
    *,
    share: float,  # of the step's unmasked tokens
    group: dist.ProcessGroup | None = None,  # the ranks that hold the step's tokens; None: one rank
) -> Tensor:  # [T] float32
    """1 for the tokens with the largest entropy of the step, else 0. Of equal ones the first is taken.

    Wang et al., "Beyond the 80/20 Rule", arXiv:2506.01939: the share is 0.2.
    Communication: one gather of the unmasked tokens over the group, 16 bytes each.
    """
    numbers, entropies = whole_step(loss_mask, order, entropy, group=group)
    largest = entropies.sort(descending=True, stable=True).indices
    return torch.isin(order, numbers[largest[: count(share, len(numbers))]].to(order.device)).float()


def clip_cov(
    log_probs: Tensor,  # [T] of the policy before the step
    advantages: Tensor,  # [T]
    loss_mask: Tensor,  # [T] bool
    order: Tensor,  # [T] int64
    *,
    share: float,  # of the step's unmasked tokens
    seed: int,  # another one for each step
    low: float = 1.0,
    high: float = 5.0,
    group: dist.ProcessGroup | None = None,
) -> Tensor:  # [T] float32
    """0 for random ones of the tokens whose covariance is in [low, high], else 1.

        Cov_t = (log_prob_t - its mean) (A_t - its mean)    means over the unmasked tokens of the step

    Cui et al., "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models", arXiv:2505.22617, Clip-Cov: the
    share is 2e-4. Communication: as top_entropy, 24 bytes a token.
    """
    numbers, values, gains = whole_step(loss_mask, order, log_probs, advantages, group=group)
    covariance = (values - values.mean()) * (gains - gains.mean())
    candidates = numbers[(covariance >= low) & (covariance <= high)]
    drawn = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(seed))
    return 1 - torch.isin(order, candidates[drawn[: count(share, len(numbers))]].to(order.device)).float()


def count(share: float, num_tokens: int) -> int:
    """The share as it is written in decimals, rounded down, and at least one token."""
    return max(int(Fraction(str(share)) * num_tokens), 1)


def whole_step(loss_mask: Tensor, order: Tensor, *columns: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    """The numbers and the columns (float64) of the step's unmasked tokens, in the order of the numbers, on the CPU of each rank."""
    mine = [order[loss_mask].cpu(), *(column.detach()[loss_mask].cpu().double() for column in columns)]
    parts = [mine]
    if group is not None:
        parts = [mine] * dist.get_world_size(group)
        dist.all_gather_object(parts, mine, group)
    step = [torch.cat(column) for column in zip(*parts, strict=True)]
    first = step[0].argsort()
    return [column[first] for column in step]
