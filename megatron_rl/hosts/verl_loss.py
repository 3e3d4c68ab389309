"""verl's call of our losses, what it needs to be right, and the tables that the plugin fills. `verl` has what is declared of it.

verl hands the sampler's log-probabilities to no loss, but it hands over u = exp(old - sampled) under rollout_is=token. Where
nothing cuts u, sampled = old - log u: so our corrections, dppo_tv and dppo_kl compare with the sampler.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megatron_rl.errors import ConfigError, DataError
from megatron_rl.hosts.dense_rows import carry_prompt_weights, kl_of_tokens, loss_of_rows, marked_rows, step_line
from megatron_rl.hosts.door import Found, place_of, signature_problem
from megatron_rl.hosts.door_settings import OnceRead, modes
from megatron_rl.hosts.run import Run, Runs
from megatron_rl.hosts.settings import Settings
from megatron_rl.hosts.verl import (
    ACTOR,
    AGG_MODE,
    COMPANION_SUFFIX,
    DEFAULT_AGG_MODE,
    DOOR,
    LOSS_MODE,
    PREFIX,
    SEVERAL_ROWS,
    divides_by_samples,
    is_added_estimator,
    uncut_weights,
)
from megatron_rl.loss_hub import needs_rollout_log_probs
from megatron_rl.losses import PolicyLossOutput
from megatron_rl.metrics.step import finalise_metrics
from megatron_rl.step_counts import StepTotals

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
# What verl gives to an estimator of one name alone, and so never to a companion.
GIVEN_BY_NAME = {"values", "batch", "non_tensor_batch", "reward_baselines", "sum_pi_squared"}
STD_SWITCH = "norm_adv_by_std_in_grpo"
# Key of config.global_batch_info -> count of a step.
STEP_KEYS = {"num_samples": "global_batch_size", "num_tokens": "batch_num_tokens"}
# Marked samples with different numbers in a row that cannot be chance: 2^-50.
TELLING_MARKS = 10


class VerlRun(Run):
    """The state of one trainer, by the actor config that verl hands over in each call.

    marked: samples with a mark in a loss that wants none, as long as there was none without.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reader, self.marked = OnceRead(DOOR), set[tuple[int, float]]()
        self.has_unmarked = False


class Tables:
    """What our entries of one verl share: the runs of its trainers, and each call's numbers until verl computes the KL term."""

    def __init__(self) -> None:
        self.runs = Runs(VerlRun)
        # log_prob of a call -> (weak reference to it, log-probabilities of the policy that sampled, mask)
        self.before_kl: dict[int, tuple[weakref.ref[Tensor], Tensor, Tensor]] = {}


def settings_of(mode: str, actor: Any) -> Settings:
    """Of verl's actor config, in a worker. Other sections are not known there, and what was typed is not known."""

    of_actor = Settings.of_object(actor, DOOR.all_defaults, ACTOR, knows_defaults=False)
    return of_actor.read_by(lambda name: mode if name == LOSS_MODE else of_actor.value_of(name))


# The loss of a micro-batch


def read_step(found: Found, info: Mapping[str, Any]) -> tuple[int, StepTotals]:
    """(D, totals of the mini-batch). Raises ConfigError, with the key, where verl's call does not say what the weights need."""
    keys: dict[str, Any] = {"dp_size": info.get("dp_size")} | {key: info.get(key) for key in STEP_KEYS.values()}
    needs = (found.record.needs or ()) if not found.is_carried else ("num_samples",)
    for key in ("dp_size", *(STEP_KEYS[need] for need in needs)):
        if keys[key] is None:
            raise ConfigError(
                f"verl's config.global_batch_info has no {key}, which {PREFIX}{found} needs: this verl has another contract than "
                f"the one that was probed ({DOOR.probed}); it has "
                + ", ".join(name for name, value in info.items() if value is not None)
            )
    counts = {name: max(int(keys[key] or 1), 1) for name, key in STEP_KEYS.items()}
    return int(keys["dp_size"]), StepTotals(num_prompts=None, **counts)


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

    Masked values may be anything. Communication: none. Synchronises once, as verl's own losses do for their metrics.
    Raises ConfigError for settings that are not honoured, and DataError for rows whose weight would be wrong.
    """
    run = tables.runs.of(config)
    found = run.reader.read(settings_of(mode, config))
    num_ranks, totals = read_step(found, config.global_batch_info)
    mask = response_mask.bool()
    _check_rows(found, run, log_prob.detach(), advantages, mask, totals)
    sampled = None
    if needs_rollout_log_probs(found.config):
        sampled, rollout_is_weights = rollout_log_probs_of(found, old_log_prob, rollout_is_weights, mask), None
    output = loss_of_rows(
        found.config,
        totals,
        *(log_prob, old_log_prob, advantages, mask),
        scale=num_ranks,
        importance_weights=rollout_is_weights,
        rollout_log_probs=sampled,
    )
    tell_step(found, run, totals)
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


def tell_step(found: Found, run: Run, totals: StepTotals) -> None:
    settings, terms = found.settings, []
    if settings[f"{ACTOR}use_kl_loss"] is True:
        terms.append(f"KL {settings[f'{ACTOR}kl_loss_coef']} ({settings[f'{ACTOR}kl_loss_type']})")
    if entropy := settings.one(f"{ACTOR}entropy_coeff").value:
        terms.append(f"entropy {entropy}")
    mean = settings.one(AGG_MODE).value or DEFAULT_AGG_MODE
    regularizers = f"{' and '.join(terms)} averaged by verl, {mean}" if terms else "no KL and no entropy in the loss"
    title = f"loss_mode={PREFIX}{found} in verl"
    run.tell(title, lambda: step_line(title, found.config, totals, regularizers, several=SEVERAL_ROWS))


def _metrics(output: PolicyLossOutput) -> dict[str, float]:
    """By the names that verl's own losses use. verl averages them over micro-batches."""
    found = finalise_metrics(output.metrics) if output.metrics is not None else {}
    return {
        "actor/pg_clipfrac": found.get("policy/clipped_ratio_fraction", 0.0),
        "actor/ppo_kl": found.get("policy/old_logprobs", 0.0) - found.get("policy/new_logprobs", 0.0),
    }


# Rows whose weight would be wrong


def _check_rows(found: Found, run: VerlRun, log_prob: Tensor, advantages: Tensor, mask: Tensor, totals: StepTotals) -> None:
    """Raises DataError for advantages that lack the companion's weights, or have them where none are wanted, and for samples that
    verl has added to fill a mini-batch, where a weight divides by the number of samples."""
    token_counts = mask.sum(-1)
    if divides_by_samples(found):
        # verl's v1 trainer fills a batch with responses of one masked token: a row without a log-probability after the first.
        is_filling = (token_counts == 0) & (log_prob[:, 1:] == 0).all(-1)
        if bool(is_filling.any()):
            raise DataError(
                f"{int(is_filling.sum())} samples of the micro-batch are fully masked responses of one token: verl adds such "
                f"samples to fill a mini-batch, and its global_batch_size counts them, so {PREFIX}{found} would divide by too "
                "many; make data.train_batch_size a multiple of actor.ppo_mini_batch_size, or train token_mean or prompt_mean"
            )
    if not found.is_carried and run.has_unmarked:
        return
    is_marked, has_advantage = marked_rows(advantages, mask, totals.num_samples)
    if found.is_carried:
        if not bool((is_marked | ~has_advantage).all()):
            raise DataError(
                f"the advantages of {PREFIX}{found} do not have the weights of their prompt groups in a mini-batch of "
                f"{totals.num_samples} samples. Set algorithm.adv_estimator={PREFIX}grpo{COMPANION_SUFFIX} (or another estimator), "
                "and one mini-batch a batch: actor.ppo_mini_batch_size = data.train_batch_size. Masks and advantages must stay as "
                "the estimator has left them"
            )
    elif bool(has_advantage.any()):
        if not bool(is_marked[has_advantage].all()):
            run.has_unmarked = True
            return
        first = torch.where(mask, advantages, -torch.inf).max(-1).values
        run.marked.update(zip(token_counts[has_advantage].tolist(), first[has_advantage].tolist(), strict=True))
        if len(run.marked) >= TELLING_MARKS:
            raise DataError(
                f"the advantages have the weights of prompt_mean in them, and {PREFIX}{found} weighs once more: "
                f"set loss_mode={PREFIX}{found.loss.name}.prompt_mean, or an estimator of verl"
            )


# prompt_mean: an estimator of verl, with the weights of prompt groups in its advantages


def with_prompt_weights(advantages: Tensor, response_mask: Tensor, prompts: Sequence[object]) -> Tensor:  # [S, R] each, [S]
    """Samples that verl has added to fill the batch, in a group of their own, have no token and are in no prompt."""
    numbers: dict[object, int] = {}
    group = torch.tensor([numbers.setdefault(prompt, len(numbers)) for prompt in prompts], device=advantages.device)
    num_prompts = max(sum(not str(prompt).startswith("pad") for prompt in numbers), min(1, len(prompts)))
    return carry_prompt_weights(advantages, response_mask, response_mask.bool().sum(-1), group, num_prompts)


def estimate_with_prompt_weights(
    estimate: Callable[..., tuple[Tensor, Tensor]],
    *,
    token_level_rewards: Tensor,  # [S, R], all samples of the batch
    response_mask: Tensor,  # [S, R]
    config: Any = None,
    index: Sequence[object] | None = None,  # the prompt of each sample
    **others: object,  # rewards of a baseline, which no estimator here takes
) -> tuple[Tensor, Tensor]:  # advantages, returns [S, R]
    """verl's estimator, its advantages multiplied and marked. Returns stay as they are. Raises ConfigError without prompts."""
    if index is None:
        raise ConfigError("the batch has no uid, so it is not known which samples share a prompt: prompt_mean needs it")
    given = {"token_level_rewards": token_level_rewards, "response_mask": response_mask, "config": config, "index": index}
    parameters = inspect.signature(estimate).parameters
    if STD_SWITCH in parameters and config is not None:
        given[STD_SWITCH] = config.get(STD_SWITCH, True)
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    advantages, returns = estimate(**{name: value for name, value in given.items() if takes_any or name in parameters})
    return with_prompt_weights(advantages, response_mask, list(index)), returns


def companions(estimators: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """An estimator for each of verl's that needs neither a critic, nor rollouts of a baseline, nor the batch."""
    found: dict[str, Callable[..., Any]] = {}
    for name, estimate in estimators.items():
        names = set(inspect.signature(estimate).parameters)
        if not name.startswith(PREFIX) and not names & GIVEN_BY_NAME:
            found[f"{PREFIX}{name}{COMPANION_SUFFIX}"] = functools.partial(estimate_with_prompt_weights, estimate)
    return found


# Registration


def contract_problems(tables: ModuleType) -> Iterator[str]:
    """What verl's tables lack of the contract that our losses are written for, with the line that is another one."""
    for name in ("register_policy_loss", "register_adv_est", "POLICY_LOSS_REGISTRY", "ADV_ESTIMATOR_REGISTRY", "kl_penalty"):
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
    """Adds our losses and estimators to verl's tables, and ours of KL; a loss that the hub has learnt since is added by another
    call.

    Raises ConfigError for a verl with another contract than the one that was probed.
    """
    if problems := [f"{problem} ({DOOR.probed} was probed)" for problem in contract_problems(tables)]:
        raise ConfigError(problems)
    shared = getattr(tables.kl_penalty, MARK, None) or Tables()
    for name in loss_modes():
        tables.register_policy_loss(name)(functools.partial(compute_loss, name, shared))
    known = {str(getattr(name, "value", name)): estimate for name, estimate in tables.ADV_ESTIMATOR_REGISTRY.items()}
    for name, estimate in companions(known).items():
        if name not in tables.ADV_ESTIMATOR_REGISTRY:
            tables.register_adv_est(name)(estimate)
    if not hasattr(tables.kl_penalty, MARK):
        tables.kl_penalty = with_added_estimator(tables.kl_penalty, shared)  # type: ignore[attr-defined]


def loss_modes() -> list[str]:
    """All that verl can train, by its loss_mode. Not among them: losses that need another vector than the sampler's
    log-probabilities; other aggregations that need prompts; and prompt_mean of a loss that is not proportional to the advantage."""
    return [f"{PREFIX}{name}" for name in modes(DOOR)]
