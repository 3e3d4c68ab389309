"""verl's call of our losses, what it needs to be right, and the tables that the plugin fills. `verl` has what is declared of it.

verl hands the sampler's log-probabilities to no loss, but it hands over u = exp(old - sampled) under rollout_is=token. Where
nothing cuts u, sampled = old - log u: so our corrections, dppo_tv and dppo_kl compare with the sampler.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megatron_rl.errors import ConfigError, DataError, place_of
from megatron_rl.hosts.dense_rows import RowCounts, kl_of_tokens, loss_of_rows, step_line
from megatron_rl.hosts.door import Found, Rollouts, signature_problem
from megatron_rl.hosts.door_settings import OnceRead, modes
from megatron_rl.hosts.run import Run, Runs
from megatron_rl.hosts.settings import Settings
from megatron_rl.hosts.verl import (
    ACTOR,
    AGG_MODE,
    DEFAULT_AGG_MODE,
    DOOR,
    LOSS_MODE,
    PREFIX,
    SESSIONS,
    is_added_estimator,
)
from megatron_rl.hosts.verl_correction import uncut_weights
from megatron_rl.loss_hub import needs_rollout_log_probs
from megatron_rl.losses import PolicyLossOutput
from megatron_rl.metrics.step import finalise_metrics
from megatron_rl.step_counts import StepTotals

TABLES = "verl.trainer.ppo.core_algos"
# The arguments of verl's call of a loss, and of its estimate of KL.
LOSS_ARGUMENTS = (
    "old_log_prob",
    "log_prob",
    "advantages",
    "response_mask",
    "loss_agg_mode",
    "config",
    "rollout_is_weights",
)
KL_ARGUMENTS, MARK = ("logprob", "ref_logprob", "kl_penalty"), "_has_estimator_of_megatron_rl"


class VerlRun(Run):
    """The state of one trainer, by the actor config that verl hands over in each call.

    rows: the counts of the micro-batch that verl calls its loss for. has_model: whether verl_step has judged the engine's model.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reader = OnceRead(DOOR)
        self.rows: RowCounts | None = None
        self.has_model = False


class Tables:
    """What our entries of one verl share: the runs of its trainers, and each call's numbers until verl computes the KL term."""

    def __init__(self) -> None:
        self.runs = Runs(VerlRun)
        # log_prob of a call -> (weak reference to it, log-probabilities of the policy that sampled, mask)
        self.before_kl: dict[int, tuple[weakref.ref[Tensor], Tensor, Tensor]] = {}


def run_of(actor: Any) -> VerlRun:
    """The trainer of an actor config, in a process where `register` has filled verl's tables."""
    tables: Tables = vars(import_module(TABLES).kl_penalty)[MARK]
    return tables.runs.of(actor)


def settings_of(mode: str, actor: Any) -> Settings:
    """Of verl's actor config, in a worker. Other sections are not known there, and what was typed is not known."""

    of_actor = Settings.of_object(actor, DOOR.all_defaults, ACTOR, knows_defaults=False)
    return of_actor.read_by(lambda name: mode if name == LOSS_MODE else of_actor.value_of(name))


# The loss of a micro-batch


def read_rows(found: Found, run: VerlRun, config: Any, mask: Tensor) -> tuple[int, RowCounts]:
    """(D, counts). Raises ConfigError for a call without counts, DataError for rows that have changed since they were counted."""
    num_ranks, rows, own = config.global_batch_info.get("dp_size"), run.rows, mask.sum(-1)
    if rows is None or num_ranks is None:
        lacks = "config.global_batch_info has no dp_size" if rows else "BaseEngine.train_batch has not counted its step"
        raise ConfigError(f"verl calls {PREFIX}{found}, and {lacks}: this verl has another contract than {DOOR.probed}")
    if not torch.equal(rows.tokens, own):
        raise DataError(
            f"the rows of a micro-batch have {own.tolist()} unmasked tokens, and {rows.tokens.tolist()} when the step was counted: "
            "response_mask and the order of rows must stay as they are in the mini-batch"
        )
    return int(num_ranks), rows


def compute_loss(
    mode: str,  # the loss_mode
    tables: Tables,
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
    run = tables.runs.of(config)
    found = run.reader.read(settings_of(mode, config))
    mask = response_mask.bool()
    num_ranks, rows = read_rows(found, run, config, mask)
    sampled = None
    if needs_rollout_log_probs(found.config):
        sampled, rollout_is_weights = rollout_log_probs_of(found, old_log_prob, rollout_is_weights, mask), None
    output = loss_of_rows(
        found.config,
        rows.totals,
        *(log_prob, old_log_prob, advantages, mask),
        scale=num_ranks,
        importance_weights=rollout_is_weights,
        rollout_log_probs=sampled,
        prompt_token_counts=rows.prompt_tokens,
        rollouts=rows.rollouts,
    )
    tell_step(found, run, rows.totals, num_ranks)
    if is_added_estimator(found.settings[f"{ACTOR}kl_loss_type"]):
        # As in policy_loss: the ratio that an estimator reads has the loss's own denominator.
        behind = sampled if sampled is not None and found.loss.anchor == "rollout" else old_log_prob
        key = id(log_prob)
        reference = weakref.ref(log_prob, lambda _: tables.before_kl.pop(key, None))
        tables.before_kl[key] = reference, behind, mask
    return output.loss, _metrics(output)


def with_added_estimator(estimate: Callable[..., Tensor], tables: Tables) -> Callable[..., Tensor]:
    """verl's kl_penalty, which knows our estimators too, as in kl_loss_type=unbiased. verl does not pass the sampler's log-probs
    here. Our loss was just called with the same log_prob tensor, so its values are reused. Raises ConfigError where it was not."""

    @functools.wraps(estimate)
    def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:  # [S, R] each -> [S, R]
        if not is_added_estimator(kl_penalty):
            return estimate(logprob, ref_logprob, kl_penalty)
        before, sampled, mask = tables.before_kl.pop(id(logprob), (None, logprob, logprob))
        if before is None or before() is not logprob:
            raise ConfigError(
                f"{kl_penalty} is megatron_rl's estimate for the KL term (actor.kl_loss_type) beside one of its losses, and not "
                "for rewards (algorithm.kl_penalty): set an estimate of verl's own, or for the term "
                f"actor_rollout_ref.actor.policy_loss.loss_mode={PREFIX}<loss>.<aggregation>"
            )
        found = kl_of_tokens(kl_penalty, *(torch.where(mask, values, 0.0) for values in (logprob, ref_logprob, sampled)))
        if not bool(found.isfinite().all()):
            raise DataError("ref_log_prob has an unmasked value that is not finite: mask the token or drop the sample")
        return found

    vars(kl_penalty)[MARK] = tables
    return kl_penalty


def rollout_log_probs_of(found: Found, old_log_prob: Tensor, weights: Tensor | None, mask: Tensor) -> Tensor:  # [S, R] each
    """The sampler's log-probabilities, old - log u; masked ones may be anything. Raises ConfigError where u is not there or cut."""
    problem = "verl gives no rollout_is_weights" if weights is None else None
    if weights is not None and bool((mask & (weights == 0)).any()):
        problem = "verl has set some rollout_is_weights to 0"
    if problem is not None:
        raise ConfigError(
            f"{problem}, from which {PREFIX}{found} with these settings gets the sampler's log-probabilities; set "
            f"{' '.join(uncut_weights())}, without bypass_mode"
        )
    assert weights is not None
    return old_log_prob - weights.log()


def tell_step(found: Found, run: Run, totals: StepTotals, num_ranks: int) -> None:
    settings, terms = found.settings, []
    if settings[f"{ACTOR}use_kl_loss"] is True:
        terms.append(f"KL {settings[f'{ACTOR}kl_loss_coef']} ({settings[f'{ACTOR}kl_loss_type']})")
    if entropy := settings.one(f"{ACTOR}entropy_coeff").value:
        terms.append(f"entropy {entropy}")
    mean = settings.one(AGG_MODE).value or DEFAULT_AGG_MODE
    regularizers = f"{' and '.join(terms)} averaged by verl, {mean}" if terms else "no KL and no entropy in the loss"
    title = f"loss_mode={PREFIX}{found} in verl"
    has_several = totals.num_rollouts != totals.num_samples
    rollouts = replace(SESSIONS, is_said=has_several) if totals.num_rollouts is not None else Rollouts()
    given, of_token_mean = (title, found.config, totals, regularizers), found.door.of_token_mean
    run.tell(title, lambda: step_line(*given, of_token_mean=of_token_mean, rollouts=rollouts, num_data=num_ranks))


def _metrics(output: PolicyLossOutput) -> dict[str, float]:
    """By the names that verl's own losses use. verl averages them over micro-batches."""
    found = finalise_metrics(output.metrics) if output.metrics is not None else {}
    return {
        "actor/pg_clipfrac": found.get("policy/clipped_ratio_fraction", 0.0),
        "actor/ppo_kl": found.get("policy/old_logprobs", 0.0) - found.get("policy/new_logprobs", 0.0),
    }


# Registration


def contract_problems(tables: ModuleType) -> Iterator[str]:
    """What verl's tables lack of the contract that our losses are written for, with the line that is another one."""
    for name in ("register_policy_loss", "POLICY_LOSS_REGISTRY", "kl_penalty"):
        if not hasattr(tables, name):
            yield f"{tables.__name__} has no {name}"
    own = getattr(tables, "POLICY_LOSS_REGISTRY", {}).get("vanilla")
    if own is None:
        yield f"{tables.__name__} has no loss 'vanilla'"
    expected = {"verl's own loss": (own, LOSS_ARGUMENTS), "kl_penalty": (getattr(tables, "kl_penalty", None), KL_ARGUMENTS)}
    for name, (function, arguments) in expected.items():
        if function is not None and (problem := signature_problem(function, arguments)):
            yield f"{name} {problem}, {place_of(function)}"


def register(tables: ModuleType) -> None:
    """Adds our losses and our estimate of KL to verl's tables; a loss that the hub has learnt since is added by another call.

    Raises ConfigError for a verl with another contract than the one that was probed.
    """
    if problems := [f"{problem} ({DOOR.probed} was probed)" for problem in contract_problems(tables)]:
        raise ConfigError(problems)
    shared = getattr(tables.kl_penalty, MARK, None) or Tables()
    for name in loss_modes():
        tables.register_policy_loss(name)(functools.partial(compute_loss, name, shared))
    if not hasattr(tables.kl_penalty, MARK):
        tables.kl_penalty = with_added_estimator(tables.kl_penalty, shared)  # type: ignore[attr-defined]


def loss_modes() -> list[str]:
    """All that verl can train, by its loss_mode. Not among them: losses that need another vector than the sampler's
    log-probabilities."""
    return [f"{PREFIX}{name}" for name in modes(DOOR)]
