"""verl: our losses as entries of its tables, with the step's weights, and the estimators that carry prompt_mean.

    actor_rollout_ref.actor.policy_loss.loss_mode=megatron_rl.<loss>.<aggregation>
    algorithm.adv_estimator=megatron_rl.<estimator of verl>_prompt_mean             beside a loss_mode that ends in prompt_mean

What verl does with the number that a loss returns, D data-parallel ranks, c context-parallel ranks, M micro-batches:

    Megatron             verl: x M, Megatron: x c / M, mean over D c ranks; each c rank has the gradient of its own tokens
    Megatron, per token  verl: x R / D, Megatron: sums, then / R;  R: the tokens that the model was given
    FSDP                 mean over D ranks
                         -> (1 / D) sum over ranks and micro-batches

So a loss returns D sum_i w_i S_i of its micro-batch, w_i from the counts of the whole mini-batch, which verl hands over. KL and
entropy terms stay verl's own; verl's table of KL estimates gets `unbiased`, which it lacks.

verl hands the sampler's log-probabilities to no loss, but it hands over u = exp(old - sampled) under rollout_is=token. Where
nothing cuts u, sampled = old - log u: so our corrections, dppo_tv and dppo_kl compare with the sampler.
"""

from __future__ import annotations

import functools
import inspect
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megatron_rl.aggregation import StepTotals
from megatron_rl.aggregation_record import AggregationRecord
from megatron_rl.config import (
    CorrectionSettings,
    ImportanceCorrection,
    KLEstimator,
    LossAggregation,
    PolicyLossConfig,
    counted_twice,
)
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.hosts.dense_rows import (
    CORRECTION_SETTINGS,
    aggregations,
    carry_prompt_weights,
    is_carried,
    is_proportional,
    kl_of_tokens,
    loss_of_rows,
    marked_rows,
    read_config,
    signature_problem,
    tell_once,
)
from megatron_rl.hosts.given import Given
from megatron_rl.loss_hub import get_loss_aggregation, get_policy_loss, needs_rollout_log_probs, policy_loss_names
from megatron_rl.losses import PolicyLossOutput
from megatron_rl.step_metrics import finalise_metrics

PREFIX, COMPANION_SUFFIX = "megatron_rl.", "_prompt_mean"
PROBED = "verl-project/verl 1dda039b9"
# The arguments of verl's call of a loss.
LOSS_ARGUMENTS = (
    "old_log_prob",
    "log_prob",
    "advantages",
    "response_mask",
    "loss_agg_mode",
    "config",
    "rollout_is_weights",
)
# What verl gives to an estimator of one name alone, and so never to a companion.
GIVEN_BY_NAME = {"values", "batch", "non_tensor_batch", "reward_baselines", "sum_pi_squared"}
STD_SWITCH = "norm_adv_by_std_in_grpo"
# The settings of verl's actor that our losses read, and verl's defaults. verl's workers do not know what was typed; in
# actor.policy_loss these names are ours, and there a clip is typed whatever its value.
CLIPS = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}
# Our parameter -> (verl's setting, its default).
PARAMETERS = {
    "clip_ratio_c": ("clip_ratio_c", 3.0),
    "sapo_temperature_positive": ("tau_pos", 1.0),
    "sapo_temperature_negative": ("tau_neg", 1.05),
    "log_ratio_penalty": ("policy_loss.dro_beta", None),
}
# The class of verl's policy_loss that has fields for the settings of ours that verl has no name for.
POLICY_LOSS_CLASS = "megatron_rl.hosts.verl_config.PolicyLoss"
CLASS_LINE = f"actor_rollout_ref.actor.policy_loss._target_={POLICY_LOSS_CLASS}"
# The overrides with which verl hands over exp(old - sampled). verl itself bounds it at e^20, so a larger threshold cuts nothing.
LEAST_UNCUT_THRESHOLD = math.exp(20)
NEEDED_OF_ROLLOUT_CORRECTION = {"rollout_is": "token", "rollout_is_threshold": 1e9}
DIVISOR = "loss_scale_factor"
# Where a rollout is more than one row of the batch.
SEVERAL_ROWS = "an agent loop with several outputs a session"
DEFAULT_AGG_MODE = "token-mean"
# Our aggregation -> verl's name of it.
AGG_MODES: dict[str, str] = {
    LossAggregation.SAMPLE_MEAN: "seq-mean-token-mean",
    LossAggregation.CONSTANT: "seq-mean-token-sum-norm",
}
# Key of config.global_batch_info -> count of a step.
STEP_KEYS = {"num_samples": "global_batch_size", "num_tokens": "batch_num_tokens"}
# The arguments of verl's estimate of KL, and the estimate that ours adds: verl has the others, by the same names.
KL_ARGUMENTS = ("logprob", "ref_logprob", "kl_penalty")
ADDED_ESTIMATOR, MARK = KLEstimator.UNBIASED, "_has_estimator_of_megatron_rl"
# Marked samples with different numbers in a row that cannot be chance: 2^-50.
TELLING_MARKS = 10


@dataclass(frozen=True, slots=True)
class LossMode:
    loss: str
    aggregation: str

    def __str__(self) -> str:
        return f"{PREFIX}{self.loss}.{self.aggregation}"

    @property
    def record(self) -> AggregationRecord:
        return get_loss_aggregation(self.aggregation)

    @property
    def has_companion(self) -> bool:
        return is_carried(self.aggregation)


def loss_modes() -> dict[str, LossMode]:
    """All that verl can train, by its loss_mode. Not among them: losses that need another vector than the sampler's
    log-probabilities; other aggregations that need prompts; and prompt_mean of a loss that is not proportional to the advantage."""
    losses = [get_policy_loss(name) for name in policy_loss_names() if "." not in name]
    modes = [
        LossMode(loss.name, record.name)
        for record in aggregations()
        for loss in losses
        if not {*loss.inputs_needed} - {"rollout_log_probs"} and (not is_carried(record.name) or is_proportional(loss))
    ]
    return {str(mode): mode for mode in modes}


def read_mode(name: str) -> LossMode:
    """Raises ConfigError, which lists what there is."""
    modes = loss_modes()
    if name in modes:
        return modes[name]
    loss, _, aggregation = name.removeprefix(PREFIX).rpartition(".")
    losses, known = ([*dict.fromkeys(getattr(mode, part) for mode in modes.values())] for part in ("loss", "aggregation"))
    why = "megatron_rl.<loss>.<aggregation> has one of each"
    if loss in losses and aggregation in known:
        why = f"{loss} is not proportional to the advantage, and in verl the advantages carry {aggregation}"
    close = get_close_matches(name.replace("-", "_"), modes, n=1)
    meant = f"; did you mean {close[0]}?" if close else "."
    raise ConfigError(
        f"loss_mode={name!r} is not a loss of megatron_rl in verl: {why}{meant} Losses: {', '.join(losses)}. "
        f"Aggregations: {', '.join(known)}"
    )


# Settings


def setting(actor: Any, name: str) -> Any:
    """actor.name or actor.policy_loss.name of verl's actor config, or of the overrides of a launch line; None: not there."""
    for part in name.split("."):
        actor = actor.get(part) if actor is not None else None
    return actor


def read_settings(mode: LossMode, actor: Any) -> PolicyLossConfig:
    """Our settings from verl's actor config. Raises one ConfigError with every problem."""

    def given(name: str, default: Any = None) -> Given:
        return Given(f"actor_rollout_ref.actor.{name}", setting(actor, name), default)

    loss = get_policy_loss(mode.loss)
    own = {name: given(f"policy_loss.{name}") for name in own_settings(mode)}
    theirs = {name: given(name, default) for name, default in CLIPS.items()}
    low, high = (theirs[name] if own[name].value is None else own[name]._replace(is_typed=True) for name in CLIPS)
    named = own.keys() - {*CORRECTION_SETTINGS, *CLIPS}
    config, problems = read_config(
        str(mode),
        mode.loss,
        mode.aggregation,
        (low, high),
        {ours: given(*theirs) for ours, theirs in PARAMETERS.items()} | {name: own[name] for name in named},
        given(DIVISOR),
        f"{CLASS_LINE} +actor_rollout_ref.actor.policy_loss.clip_ratio_{{side}}={{value}}",
        [given("kl_loss_coef"), given("entropy_coeff")],
        **{name: own[name].value for name in CORRECTION_SETTINGS if own[name].is_chosen},
    )
    problems += [
        f"{own[name].name}={own[name].value} and {theirs[name].name}={theirs[name].value} are the same thing with two values: "
        "remove one of them"
        for name in CLIPS
        if own[name].value is not None and theirs[name].is_chosen and theirs[name].value != own[name].value
    ]
    found = CorrectionSettings.of(config)
    problems += found.problems()
    if found.kind != ImportanceCorrection.NONE and loss.anchor == "rollout":
        problems.append(counted_twice(found.kind, loss.name))
    agg_mode, allowed = setting(actor, "loss_agg_mode") or DEFAULT_AGG_MODE, agg_modes(mode, actor)
    if agg_mode not in allowed:
        problems.append(
            f"actor_rollout_ref.actor.loss_agg_mode={agg_mode} beside {mode}: two aggregations in one launch. Ours is in the "
            "loss_mode, and verl's acts on its KL and entropy alone; set actor_rollout_ref.actor.loss_agg_mode="
            + " or ".join(allowed)
        )
    if problems:
        raise ConfigError(problems)
    return config


def own_settings(mode: LossMode) -> tuple[str, ...]:
    """Our settings that actor.policy_loss may hold: the clip, those of the correction, and the loss's parameters that verl has no
    name for."""
    parameters = [parameter.name for parameter in get_policy_loss(mode.loss).parameters]
    return (*CLIPS, *CORRECTION_SETTINGS, *(name for name in parameters if name not in PARAMETERS))


def agg_modes(mode: LossMode, actor: Any) -> tuple[str, ...]:
    """The values of actor.loss_agg_mode that are accepted: verl's default, verl's name of the loss's aggregation, and beside a KL
    or entropy term the mean over samples, which is ours of these terms."""
    has_terms = setting(actor, "use_kl_loss") or setting(actor, "entropy_coeff")
    of_terms = [AGG_MODES[LossAggregation.SAMPLE_MEAN]] if has_terms else []
    return tuple(dict.fromkeys((DEFAULT_AGG_MODE, AGG_MODES.get(mode.aggregation, DEFAULT_AGG_MODE), *of_terms)))


# The loss of a micro-batch


def read_step(mode: LossMode, info: Mapping[str, Any]) -> tuple[int, StepTotals]:
    """(D, totals of the mini-batch). Raises ConfigError, with the key, where verl's call does not say what the weights need."""
    keys: dict[str, Any] = {"dp_size": info.get("dp_size")} | {key: info.get(key) for key in STEP_KEYS.values()}
    needs = (mode.record.needs or ()) if not mode.has_companion else ("num_samples",)
    for key in ("dp_size", *(STEP_KEYS[need] for need in needs)):
        if keys[key] is None:
            raise ConfigError(
                f"verl's config.global_batch_info has no {key}, which {mode} needs: this verl has another contract than the one "
                f"that was probed ({PROBED}); it has {', '.join(name for name, value in info.items() if value is not None)}"
            )
    counts = {name: max(int(keys[key] or 1), 1) for name, key in STEP_KEYS.items()}
    return int(keys["dp_size"]), StepTotals(num_prompts=None, **counts)


def compute_loss(
    mode: LossMode,
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
    settings = read_settings(mode, config)
    num_ranks, totals = read_step(mode, config.global_batch_info)
    mask = response_mask.bool()
    _check_rows(mode, log_prob.detach(), advantages, mask, totals)
    sampled = None
    if needs_rollout_log_probs(settings):
        sampled, rollout_is_weights = rollout_log_probs_of(mode, old_log_prob, rollout_is_weights, mask), None
    output = loss_of_rows(
        settings,
        totals,
        *(log_prob, old_log_prob, advantages, mask),
        scale=num_ranks,
        importance_weights=rollout_is_weights,
        rollout_log_probs=sampled,
    )
    tell_step(mode, settings, totals, config)
    if setting(config, "kl_loss_type") == ADDED_ESTIMATOR:
        # As in policy_loss: the importance ratio of `unbiased` has the loss's own denominator.
        behind = sampled if sampled is not None and get_policy_loss(mode.loss).anchor == "rollout" else old_log_prob
        _before_kl[:] = [(weakref.ref(log_prob), behind, mask)]
    return output.loss, _metrics(output)


# (log_prob, that of the policy that sampled, mask) of our latest call, until verl computes the KL term of the same micro-batch.
_before_kl: list[tuple[weakref.ref[Tensor], Tensor, Tensor]] = []


def with_added_estimator(estimate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """verl's kl_penalty, which knows kl_loss_type=unbiased too. verl tells it nothing of the policy that sampled; our loss has been
    called with these log-probabilities right before, and knows. Raises ConfigError where it has not."""

    @functools.wraps(estimate)
    def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:  # [S, R] each -> [S, R]
        if kl_penalty != ADDED_ESTIMATOR:
            return estimate(logprob, ref_logprob, kl_penalty)
        before, sampled, mask = _before_kl.pop() if _before_kl else (None, logprob, logprob)
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

    vars(kl_penalty)[MARK] = True
    return kl_penalty


def rollout_log_probs_of(mode: LossMode, old_log_prob: Tensor, weights: Tensor | None, mask: Tensor) -> Tensor:  # [S, R] each
    """The sampler's log-probabilities, old - log u; masked ones may be anything. Raises ConfigError where u is not there or cut."""
    problem = "verl gives no rollout_is_weights" if weights is None else None
    if weights is not None and bool((mask & (weights == 0)).any()):
        problem = "verl has set some rollout_is_weights to 0"
    if problem is not None:
        raise ConfigError(
            f"{problem}, from which {mode} with these settings gets the sampler's log-probabilities; set "
            f"{' '.join(rollout_correction_overrides())}, without bypass_mode"
        )
    assert weights is not None
    return old_log_prob - weights.log()


def rollout_correction_overrides() -> list[str]:
    return [f"algorithm.rollout_correction.{name}={value}" for name, value in NEEDED_OF_ROLLOUT_CORRECTION.items()]


def tell_step(mode: LossMode, settings: PolicyLossConfig, totals: StepTotals, config: Any) -> None:
    terms = []
    if setting(config, "use_kl_loss"):
        terms.append(f"KL {setting(config, 'kl_loss_coef')} ({setting(config, 'kl_loss_type')})")
    if entropy := setting(config, "entropy_coeff"):
        terms.append(f"entropy {entropy}")
    mean = setting(config, "loss_agg_mode") or DEFAULT_AGG_MODE
    regularizers = f"{' and '.join(terms)} averaged by verl, {mean}" if terms else "no KL and no entropy in the loss"
    tell_once(f"loss_mode={mode} in verl", settings, totals, regularizers, several=SEVERAL_ROWS)


def _metrics(output: PolicyLossOutput) -> dict[str, float]:
    """By the names that verl's own losses use. verl averages them over micro-batches."""
    found = finalise_metrics(output.metrics) if output.metrics is not None else {}
    return {
        "actor/pg_clipfrac": found.get("policy/clipped_ratio_fraction", 0.0),
        "actor/ppo_kl": found.get("policy/old_logprobs", 0.0) - found.get("policy/new_logprobs", 0.0),
    }


# Rows whose weight would be wrong


@dataclass
class _Seen:
    """Samples with a mark in a loss that wants none: different numbers in a row from the start; None after the first without."""

    marked: set[tuple[int, float]] | None


_seen = _Seen(set())


def _check_rows(mode: LossMode, log_prob: Tensor, advantages: Tensor, mask: Tensor, totals: StepTotals) -> None:
    """Raises DataError for advantages that lack the companion's weights, or have them where none are wanted, and for samples that
    verl has added to fill a mini-batch, where a weight divides by the number of samples."""
    token_counts = mask.sum(-1)
    divides_by_samples = not mode.has_companion and (mode.record.needs is None or "num_samples" in mode.record.needs)
    if divides_by_samples:
        # verl's v1 trainer fills a batch with responses of one masked token: a row without a log-probability after the first.
        is_filling = (token_counts == 0) & (log_prob[:, 1:] == 0).all(-1)
        if bool(is_filling.any()):
            raise DataError(
                f"{int(is_filling.sum())} samples of the micro-batch are fully masked responses of one token: verl adds such "
                f"samples to fill a mini-batch, and its global_batch_size counts them, so {mode} would divide by too many; make "
                "data.train_batch_size a multiple of actor.ppo_mini_batch_size, or train token_mean or prompt_mean"
            )
    if not mode.has_companion and _seen.marked is None:
        return
    is_marked, has_advantage = marked_rows(advantages, mask, totals.num_samples)
    if mode.has_companion:
        if not bool((is_marked | ~has_advantage).all()):
            raise DataError(
                f"the advantages of {mode} do not have the weights of their prompt groups in a mini-batch of {totals.num_samples} "
                f"samples. Set algorithm.adv_estimator={PREFIX}grpo{COMPANION_SUFFIX} (or another estimator), and one mini-batch a "
                "batch: actor.ppo_mini_batch_size = data.train_batch_size. Masks and advantages must stay as the estimator has "
                "left them"
            )
    elif bool(has_advantage.any()):
        if not bool(is_marked[has_advantage].all()):
            _seen.marked = None
            return
        first = torch.where(mask, advantages, -torch.inf).max(-1).values
        assert _seen.marked is not None
        _seen.marked.update(zip(token_counts[has_advantage].tolist(), first[has_advantage].tolist(), strict=True))
        if len(_seen.marked) >= TELLING_MARKS:
            raise DataError(
                f"the advantages have the weights of {LossAggregation.PROMPT_MEAN} in them, and {mode} weighs once more: set "
                f"loss_mode={PREFIX}{mode.loss}.{LossAggregation.PROMPT_MEAN}, or an estimator of verl"
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
    """What verl's tables lack of the contract that our losses are written for."""
    for name in ("register_policy_loss", "register_adv_est", "POLICY_LOSS_REGISTRY", "ADV_ESTIMATOR_REGISTRY", "kl_penalty"):
        if not hasattr(tables, name):
            yield f"{tables.__name__} has no {name}"
    own = getattr(tables, "POLICY_LOSS_REGISTRY", {}).get("vanilla")
    if own is None:
        yield f"{tables.__name__} has no loss 'vanilla'"
    elif problem := signature_problem("verl's own loss", own, LOSS_ARGUMENTS):
        yield problem
    if hasattr(tables, "kl_penalty") and (problem := signature_problem("kl_penalty", tables.kl_penalty, KL_ARGUMENTS)):
        yield problem


def register(tables: ModuleType) -> None:
    """Adds our losses and estimators to verl's tables, and ours of KL; a loss that the hub has learnt since is added by another
    call.

    Raises ConfigError for a verl with another contract than the one that was probed.
    """
    if problems := [f"{problem} ({PROBED})" for problem in contract_problems(tables)]:
        raise ConfigError(problems)
    for name, mode in loss_modes().items():
        tables.register_policy_loss(name)(functools.partial(compute_loss, mode))
    known = {str(getattr(name, "value", name)): estimate for name, estimate in tables.ADV_ESTIMATOR_REGISTRY.items()}
    for name, estimate in companions(known).items():
        if name not in tables.ADV_ESTIMATOR_REGISTRY:
            tables.register_adv_est(name)(estimate)
    if not hasattr(tables.kl_penalty, MARK):
        tables.kl_penalty = with_added_estimator(tables.kl_penalty)  # type: ignore[attr-defined]
