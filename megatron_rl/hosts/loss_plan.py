"""What a host's arguments ask of custom_loss, read once a micro-batch, and what a token then weighs; no argument is changed."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.aggregation import weigh_tokens
from megatron_rl.config import LossAggregation, PolicyLossConfig, PolicyMetrics, Route
from megatron_rl.errors import DataError
from megatron_rl.hosts.facts import Host, HostArgs
from megatron_rl.hosts.launch_facts import HOST_DIVIDES, REWARD_LINE
from megatron_rl.hosts.rules import check_launch


@dataclass(frozen=True, slots=True)
class LossPlan:
    """config: clips, temperature and coefficients with the host's values filled in."""

    config: PolicyLossConfig
    view: HostArgs
    has_companion: bool
    """A hook of ours has put the aggregation into advantages or rollouts: what is left is the host's mean over rollouts."""

    @property
    def is_per_token(self) -> bool:
        return self.view["calculate_per_token_loss"]

    @property
    def kl_is_reported(self) -> bool:
        return self.view["use_kl_loss"] or self.config.kl_coefficient != 0

    @property
    def entropy_is_reported(self) -> bool:
        """Where we are asked, and where the host does: slime always, miles for a coefficient or --observe-training-entropy."""
        if self.config.entropy_coefficient or self.config.policy_metrics == PolicyMetrics.WITH_ENTROPY:
            return True
        is_computed = self.view.host == Host.SLIME or self.view["observe_training_entropy"]
        return bool(is_computed) and self.config.policy_metrics != PolicyMetrics.NONE


def read_plan(args: Namespace) -> LossPlan:
    """Raises one ConfigError with every setting that custom_loss would not honour, or would train on a wrong scale."""
    config, launch = check_launch(args, Route.CUSTOM_LOSS)
    return LossPlan(config=config, view=launch.view, has_companion=launch.companion is not None)


def sample_weights(
    plan: LossPlan,
    token_counts: Tensor,  # [N] unmasked tokens of each sample of the micro-batch, over all cp ranks
    rollout_token_counts: Tensor,  # [N] unmasked tokens of the sample's whole rollout
) -> tuple[Tensor, Tensor]:  # token_weights [N], mean_weights [N], float32
    """What one token counts in the number that a rank returns, before the host divides by the step's rollouts or tokens.

    sample_mean 1 / M_roll, so that two segments of a rollout share its weight; constant 1 / divisor; per token 1. KL, entropy
    and metrics take the host's own mean_weights: 1 / M_roll, per token 1.
    Raises DataError for a fully masked sample under --calculate-per-token-loss, where the host would count one token for it.
    """
    if plan.is_per_token:
        # One look at the device a micro-batch; the host synchronises there too, when it collects the metrics.
        if bool((token_counts == 0).any()):
            masked = torch.nonzero(token_counts == 0).flatten().tolist()
            raise DataError(
                f"samples {masked} of the micro-batch are fully masked, and under --calculate-per-token-loss the host counts one "
                f"token for each of them, which shrinks the gradient: drop them, or take {REWARD_LINE} in place of the flag"
            )
        weights = weigh_tokens(LossAggregation.TOKEN_MEAN, token_counts, HOST_DIVIDES)
        return weights, weights
    mean_weights = weigh_tokens(LossAggregation.SAMPLE_MEAN, rollout_token_counts, HOST_DIVIDES)
    if plan.has_companion or plan.config.loss_aggregation == LossAggregation.SAMPLE_MEAN:
        return mean_weights, mean_weights
    name, divisor = plan.config.loss_aggregation, plan.config.loss_aggregation_divisor
    weights = weigh_tokens(name, rollout_token_counts, HOST_DIVIDES, divisor=divisor)
    return torch.where(token_counts > 0, weights, 0.0), mean_weights
