"""verl's call of our losses, what it needs to be right, and the tables that the plugin fills. `verl` reads the settings."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megatron_rl.errors import ConfigError, DataError
from megatron_rl.hosts.choice import Launch
from megatron_rl.hosts.dense_rows import EACH_ROW, RowCounts, kl_of_tokens, loss_of_rows, step_line
from megatron_rl.hosts.run import Run, Runs
from megatron_rl.hosts.verl import (
    CONTRACT,
    LOSS_MODE,
    OFFER,
    PREFIX,
    PROBED,
    SESSIONS,
    TABLES,
    TITLE,
    UNCUT_WEIGHTS,
    is_added_estimator,
    read,
)
from megatron_rl.loss_hub import needs_rollout_log_probs
from megatron_rl.losses import PolicyLossOutput
from megatron_rl.metrics.step import finalise_metrics
from megatron_rl.step_counts import StepTotals


class VerlRun(Run):
    """The state of one trainer, by the actor config that verl hands over in each call.

    rows: the counts of the micro-batch that verl calls its loss for. has_model: whether verl_step has judged the engine's model.
    before_kl: by the id of log_prob, until verl computes the KL term of that call: (weak reference to it, log-probabilities of the
    policy that sampled, mask).
    """

    def __init__(self) -> None:
        super().__init__()
        self.launch: Launch | None = None
        self.rows: RowCounts | None = None
        self.has_model = False
        self.before_kl: dict[int, tuple[weakref.ref[Tensor], Tensor, Tensor]] = {}

    def read(self, actor: Any) -> Launch:
        """What the config chooses, judged again where a value has changed."""
        if self.launch is None or not self.launch.is_of(actor):
            self.launch = read(actor)
        return self.launch


RUNS, MARK = Runs(VerlRun), "_has_estimator_of_megatron_rl"


# The loss of a micro-batch


def read_rows(launch: Launch, run: VerlRun, config: Any, mask: Tensor) -> tuple[int, RowCounts]:
    """(D, counts). Raises ConfigError for a call without counts, DataError for rows that have changed since they were counted."""
    num_ranks, rows, own = config.global_batch_info.get("dp_size"), run.rows, mask.sum(-1)
    if rows is None or num_ranks is None:
        lacks = "config.global_batch_info has no dp_size" if rows else "BaseEngine.train_batch has not counted its step"
        raise ConfigError(f"verl calls {PREFIX}{launch}, and {lacks}: this verl has another contract than {PROBED}")
    if not torch.equal(rows.tokens, own):
        raise DataError(
            f"the rows of a micro-batch have {own.tolist()} unmasked tokens, and {rows.tokens.tolist()} when the step was counted: "
            "response_mask and the order of rows must stay as they are in the mini-batch"
        )
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
    tell_step(launch, run, rows.totals, num_ranks)
    if is_added_estimator(config.kl_loss_type):
        # As in policy_loss: the ratio that an estimator reads has the loss's own denominator.
        behind = sampled if sampled is not None and launch.loss.anchor == "rollout" else old_log_prob
        key = id(log_prob)
        reference = weakref.ref(log_prob, lambda _: run.before_kl.pop(key, None))
        run.before_kl[key] = reference, behind, mask
    return output.loss, _metrics(output)


def with_added_estimator(estimate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """verl's kl_penalty, which knows our estimators too, as in kl_loss_type=unbiased. verl does not pass the sampler's log-probs
    here. Our loss was just called with the same log_prob tensor, so its values are reused. Raises ConfigError where it was not."""

    @functools.wraps(estimate)
    def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:  # [S, R] each -> [S, R]
        if not is_added_estimator(kl_penalty):
            return estimate(logprob, ref_logprob, kl_penalty)
        key, none = id(logprob), (None, logprob, logprob)
        before, sampled, mask = next((run.before_kl.pop(key) for _, run in RUNS if key in run.before_kl), none)
        if before is None or before() is not logprob:
            raise ConfigError(
                f"{kl_penalty} is megatron_rl's estimate for the KL term (actor.kl_loss_type) beside one of its losses, and not "
                "for rewards (algorithm.kl_penalty): set an estimate of verl's own, or for the term "
                f"{LOSS_MODE}={PREFIX}<loss>.<aggregation>"
            )
        found = kl_of_tokens(kl_penalty, *(torch.where(mask, values, 0.0) for values in (logprob, ref_logprob, sampled)))
        if not bool(found.isfinite().all()):
            raise DataError("ref_log_prob has an unmasked value that is not finite: mask the token or drop the sample")
        return found

    vars(kl_penalty)[MARK] = True
    return kl_penalty


def rollout_log_probs_of(launch: Launch, old_log_prob: Tensor, weights: Tensor | None, mask: Tensor) -> Tensor:  # [S, R] each
    """The sampler's log-probabilities, old - log u; masked ones may be anything. Raises ConfigError where u is not there or cut."""
    problem = "verl gives no rollout_is_weights" if weights is None else None
    if weights is not None and bool((mask & (weights == 0)).any()):
        problem = "verl has set some rollout_is_weights to 0"
    if problem is not None:
        raise ConfigError(
            f"{problem}, from which {PREFIX}{launch} with these settings gets the sampler's log-probabilities; set "
            f"{' '.join(f'{name}={value}' for name, value in UNCUT_WEIGHTS.items())}, without bypass_mode"
        )
    assert weights is not None
    return old_log_prob - weights.log()


def tell_step(launch: Launch, run: Run, totals: StepTotals, num_ranks: int) -> None:
    has_several = totals.num_rollouts != totals.num_samples
    rollouts = replace(SESSIONS, is_said=has_several) if totals.num_rollouts is not None else EACH_ROW
    given = (launch.title, launch.config, totals, launch.terms)
    run.tell(launch.title, lambda: step_line(*given, of_token_mean=TITLE, rollouts=rollouts, num_data=num_ranks))


def _metrics(output: PolicyLossOutput) -> dict[str, float]:
    """By the names that verl's own losses use. verl averages them over micro-batches."""
    found = finalise_metrics(output.metrics) if output.metrics is not None else {}
    return {
        "actor/pg_clipfrac": found.get("policy/clipped_ratio_fraction", 0.0),
        "actor/ppo_kl": found.get("policy/old_logprobs", 0.0) - found.get("policy/new_logprobs", 0.0),
    }


# Registration


def register(tables: ModuleType) -> None:
    """Adds our losses and our estimate of KL to verl's tables; a loss that the hub has learnt since is added by another call.

    Raises ConfigError for a verl with another contract than the one that was probed.
    """
    calls = {path.partition(":")[2]: expected for path, expected in CONTRACT.calls.items() if path.startswith(TABLES)}
    if problems := [text for name, expected in calls.items() for text in CONTRACT.differences(tables, name, expected)]:
        raise ConfigError(problems)
    for mode in OFFER.modes():
        tables.register_policy_loss(mode)(compute_loss)
    if not hasattr(tables.kl_penalty, MARK):
        tables.kl_penalty = with_added_estimator(tables.kl_penalty)  # type: ignore[attr-defined]
