"""verl's call of our losses, what it needs to be right, and the tables that the plugin fills. `verl` reads the settings."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megatron_rl.declare import get_policy_loss
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.hosts.choice import Launch
from megatron_rl.hosts.dense_rows import RowCounts, kl_of_tokens, loss_of_rows, metrics_of
from megatron_rl.hosts.run import Run, Runs
from megatron_rl.hosts.verl import (
    CONTRACT,
    OFFER,
    PREFIX,
    PROBED,
    TABLES,
    UNCUT_WEIGHTS,
    is_added_estimator,
    read,
)
from megatron_rl.losses.corrections import needs_rollout_log_probs
from megatron_rl.policy_loss import PolicyLossOutput


class VerlRun(Run):
    """The state of one trainer, by the actor config that verl hands over in each call. rows: the counts of the micro-batch that
    verl calls its loss for."""

    def __init__(self) -> None:
        super().__init__()
        self.launch: Launch | None = None
        self.rows: RowCounts | None = None

    def read(self, actor: Any) -> Launch:
        self.launch = self.launch or read(actor)
        return self.launch


RUNS = Runs(VerlRun)
# On log_prob, until verl computes the KL term of that call: the log-probabilities of the policy that sampled, and the mask.
BEHIND = "_megatron_rl_behind"


# The loss of a micro-batch


def read_rows(launch: Launch, run: VerlRun, config: Any, mask: Tensor) -> tuple[int, RowCounts]:
    """(D, counts). Raises ConfigError for a call without counts, DataError for rows that have changed since they were counted."""
    num_ranks, rows, own = config.global_batch_info.get("dp_size"), run.rows, mask.sum(-1)
    if rows is None or num_ranks is None:
        lacks = "config.global_batch_info has no dp_size" if rows else "BaseEngine.train_batch has not counted its step"
        raise ConfigError(f"verl calls {PREFIX}{launch}, and {lacks}: this verl has another contract than {PROBED}")
    if not torch.equal(rows.tokens, own):
        changed = f"{own.tolist()} unmasked tokens, and {rows.tokens.tolist()} when the step was counted"
        raise DataError(f"the rows of a micro-batch have {changed}: leave response_mask and the order of rows as they are")
    return int(num_ranks), rows


def compute_loss(
    *,
    old_log_prob: Tensor,  # [S, R]
    log_prob: Tensor,  # [S, R] with gradient: the whole responses, on each context-parallel rank
    advantages: Tensor,  # [S, R]
    response_mask: Tensor,  # [S, R] bool
    loss_agg_mode: str,
    config: Any,
    rollout_is_weights: Tensor | None = None,  # [S, R]
) -> tuple[Tensor, dict[str, float]]:  # 0-d with gradient, verl's names of metrics
    """verl's policy loss of one micro-batch: D sum_i w_i sum_t m_it u_it l_it, u = rollout_is_weights.

    Masked values may be anything. Communication: none. Synchronises, as verl's own losses do for their metrics.
    Raises ConfigError for settings that are not honoured, and what read_rows raises.
    """
    run, mask = RUNS.of(config), response_mask.bool()
    launch = run.read(config)
    num_ranks, rows = read_rows(launch, run, config, mask)
    sampled = None
    if needs_rollout_log_probs(launch.config):
        sampled, rollout_is_weights = rollout_log_probs_of(launch, old_log_prob, rollout_is_weights, mask), None
    output = loss_of_rows(
        launch.config,
        rows.totals,
        *(log_prob, old_log_prob, advantages, mask),
        scale=num_ranks,
        importance_weights=rollout_is_weights,
        rollout_log_probs=sampled,
        prompt_token_counts=rows.prompt_tokens,
        rollouts=rows.rollouts,
    )
    launch.tell(run, rows.totals, num_data=num_ranks)
    if is_added_estimator(config.kl_loss_type):
        # As in policy_loss: the ratio that an estimator reads has the loss's own denominator.
        is_of_sampler = get_policy_loss(launch.config.policy_loss).anchor == "rollout"
        vars(log_prob)[BEHIND] = sampled if sampled is not None and is_of_sampler else old_log_prob, mask
    return output.loss, _metrics(output)


def with_added_estimator(estimate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """verl's kl_penalty, which knows our estimators too, as in kl_loss_type=unbiased. verl does not pass the sampler's log-probs
    here: our loss, which was just called with the same tensor, has left them on it. Raises ConfigError where it was not called."""

    @functools.wraps(estimate)
    def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:  # [S, R] each -> [S, R]
        if not is_added_estimator(kl_penalty):
            return estimate(logprob, ref_logprob, kl_penalty)
        if BEHIND not in vars(logprob):
            text = "is megatron_rl's, for actor.kl_loss_type beside one of its losses; set an estimate of verl's own"
            raise ConfigError(f"kl_penalty={kl_penalty} {text}")
        return kl_of_tokens(kl_penalty, logprob, ref_logprob, *vars(logprob)[BEHIND])

    return kl_penalty


def rollout_log_probs_of(launch: Launch, old_log_prob: Tensor, weights: Tensor | None, mask: Tensor) -> Tensor:  # [S, R] each
    """The sampler's log-probabilities, old - log u; masked ones may be anything. Raises ConfigError where u is not there or cut."""
    if weights is None or bool((mask & (weights == 0)).any()):
        has = "gives no rollout_is_weights" if weights is None else "has set some rollout_is_weights to 0"
        raise ConfigError(
            f"verl {has}, from which {PREFIX}{launch} gets the sampler's log-probabilities; set "
            f"{' '.join(f'{name}={value}' for name, value in UNCUT_WEIGHTS.items())}, without bypass_mode"
        )
    return old_log_prob - weights.log()


def _metrics(output: PolicyLossOutput) -> dict[str, float]:
    """By the names that verl's own losses use. verl averages them over micro-batches."""
    found = metrics_of(output)
    return {
        "actor/pg_clipfrac": found.get("policy/clipped_ratio_fraction", 0.0),
        "actor/ppo_kl": found.get("policy/old_logprobs", 0.0) - found.get("policy/new_logprobs", 0.0),
    }


# Registration


def register(tables: ModuleType) -> None:
    """Adds our losses and our estimates of KL to verl's tables. Raises ConfigError for a verl with another contract than the one
    that was probed."""
    CONTRACT.check({path: expected for path, expected in CONTRACT.calls.items() if path.startswith(TABLES)}, tables)
    for loss, aggregation in OFFER.pairs():
        tables.register_policy_loss(f"{PREFIX}{loss}.{aggregation}")(compute_loss)
    tables.kl_penalty = with_added_estimator(tables.kl_penalty)  # type: ignore[attr-defined]
