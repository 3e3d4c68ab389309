"""verl: our losses as entries of its tables, with the step's weights, and the estimators that carry prompt_mean.

    actor_rollout_ref.actor.policy_loss.loss_mode=megatron_rl.<loss>.<aggregation>
    algorithm.adv_estimator=megatron_rl.<estimator of verl>_prompt_mean             beside a loss_mode that ends in prompt_mean

What verl does with the number that a loss returns, D data-parallel ranks, c context-parallel ranks, M micro-batches:

    Megatron             verl: x M, Megatron: x c / M, mean over D c ranks; each c rank has the gradient of its own tokens
    Megatron, per token  verl: x R / D, Megatron: sums, then / R;  R: the tokens that the model was given
    FSDP                 mean over D ranks
                         -> (1 / D) sum over ranks and micro-batches

So a loss returns D sum_i w_i S_i of its micro-batch, w_i from the counts of the whole mini-batch, which verl hands over. KL and
entropy terms stay verl's own.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.aggregation import StepTotals, weigh_tokens
from megatron_rl.aggregation_record import AggregationRecord
from megatron_rl.config import LossAggregation, PolicyLossConfig, PolicyMetrics
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.layout.groups import SINGLE
from megatron_rl.loss_hub import (
    PolicyLoss,
    get_loss_aggregation,
    get_policy_loss,
    loss_aggregation_names,
    numbers_in_words,
    policy_loss_names,
)
from megatron_rl.losses import PolicyLossOutput, loss_of_log_probs
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
# The settings of verl's actor that our losses read, and verl's defaults: a value that is its default is nobody's choice.
CLIPS = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}
# Our parameter -> (verl's setting, its default).
PARAMETERS = {
    "clip_ratio_c": ("clip_ratio_c", 3.0),
    "sapo_temperature_positive": ("tau_pos", 1.0),
    "sapo_temperature_negative": ("tau_neg", 1.05),
    "log_ratio_penalty": ("policy_loss.dro_beta", None),
}
DIVISOR = "loss_scale_factor"
DEFAULT_AGG_MODE = "token-mean"
# Our aggregation -> verl's name of it.
AGG_MODES: dict[str, str] = {
    LossAggregation.SAMPLE_MEAN: "seq-mean-token-mean",
    LossAggregation.CONSTANT: "seq-mean-token-sum-norm",
}
# Key of config.global_batch_info -> count of a step.
STEP_KEYS = {"num_samples": "global_batch_size", "num_tokens": "batch_num_tokens"}
# A marked advantage has a code in its last bits: a relative change of at most 16 x 2^-23.
MARK_BITS = 5
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
        """Advantages carry the aggregation, because verl tells a loss nothing of prompts."""
        return self.aggregation == LossAggregation.PROMPT_MEAN


def loss_modes() -> dict[str, LossMode]:
    """All that verl can train, by its loss_mode. Not among them: losses that compare with the sampler, whose log-probabilities verl
    gives no loss; other aggregations that need prompts; and prompt_mean of a loss that is not proportional to the advantage."""
    losses = [name for name in policy_loss_names() if "." not in name and not get_policy_loss(name).inputs_needed]
    records = [get_loss_aggregation(name) for name in loss_aggregation_names() if "." not in name]
    plain = [record.name for record in records if record.needs is not None and not record.needs_prompts]
    modes = [LossMode(loss, aggregation) for loss in losses for aggregation in plain]
    modes += [LossMode(loss, LossAggregation.PROMPT_MEAN.value) for loss in losses if is_proportional(get_policy_loss(loss))]
    return {str(mode): mode for mode in modes}


@functools.cache
def is_proportional(loss: PolicyLoss) -> bool:
    """Whether twice the advantage gives twice the loss and twice the gradient, by a trial on two samples."""
    numbers = torch.linspace(-0.3, 0.3, 6, dtype=torch.float64)
    advantages = torch.tensor([0.5, 0.5, 0.5, -1.0, -1.0, -1.0], dtype=torch.float64)

    def trial(factor: float) -> Tensor:
        log_probs = (numbers - 1).requires_grad_()
        ones, bounds = torch.ones(6, dtype=torch.bool), torch.tensor([0, 3, 6], dtype=torch.int32)
        weights = torch.ones(2, dtype=torch.float64)
        given = (log_probs, numbers - 1 - numbers.flip(0), factor * advantages, ones, bounds, weights)
        output = loss_of_log_probs(loss.name, *given, tp_group=SINGLE, cp_group=SINGLE)
        return torch.cat([torch.autograd.grad(output.loss, log_probs)[0], output.loss.detach()[None]])

    return torch.allclose(trial(2.0), 2 * trial(1.0), rtol=1e-9, atol=1e-12)


def read_mode(name: str) -> LossMode:
    """Raises ConfigError, which lists what there is."""
    modes = loss_modes()
    if name in modes:
        return modes[name]
    loss, _, aggregation = name.removeprefix(PREFIX).rpartition(".")
    losses, aggregations = ([*dict.fromkeys(getattr(mode, part) for mode in modes.values())] for part in ("loss", "aggregation"))
    why = "megatron_rl.<loss>.<aggregation> has one of each"
    if loss in losses and aggregation in aggregations:
        why = f"{loss} is not proportional to the advantage, and in verl the advantages carry {aggregation}"
    elif loss in policy_loss_names() and loss not in losses:
        why = f"{loss} compares with the sampler, whose log-probabilities verl hands to no loss"
    raise ConfigError(
        f"loss_mode={name!r} is none of ours in verl: {why}. Losses: {', '.join(losses)}. Aggregations: {', '.join(aggregations)}"
    )


# Settings


def setting(actor: Any, name: str) -> Any:
    """actor.name or actor.policy_loss.name of verl's actor config, or of the overrides of a launch line; None: not there."""
    for part in name.split("."):
        actor = actor.get(part) if actor is not None else None
    return actor


def read_settings(mode: LossMode, actor: Any) -> PolicyLossConfig:
    """Our settings from verl's actor config. Raises one ConfigError with every problem."""
    loss, record = get_policy_loss(mode.loss), mode.record
    problems = list(_setting_problems(mode, actor))
    clips = {name: setting(actor, name) for name in CLIPS}
    if loss.clip_ratios is None or all(clips[name] in (None, default) for name, default in CLIPS.items()):
        clips = dict.fromkeys(CLIPS)
    values = {ours: setting(actor, theirs) for ours, (theirs, _) in PARAMETERS.items()}
    declared = {parameter.name for parameter in loss.parameters}
    parameters: dict[str, float] = {name: value for name, value in values.items() if name in declared and value is not None}
    try:
        loss.clip_bounds(*clips.values())
        loss.resolve_parameters(parameters)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    return PolicyLossConfig(
        policy_loss=mode.loss,
        loss_aggregation=mode.aggregation,
        loss_aggregation_divisor=setting(actor, DIVISOR) if record.takes_divisor else None,
        loss_parameters=parameters,
        policy_metrics=PolicyMetrics.BASIC,
        **clips,
    )


def _setting_problems(mode: LossMode, actor: Any) -> Iterator[str]:
    loss, divisor = get_policy_loss(mode.loss), setting(actor, DIVISOR)
    if loss.clip_ratios is None:
        for name, default in CLIPS.items():
            if setting(actor, name) not in (None, default):
                yield f"actor.{name}={setting(actor, name)} has no effect: {mode.loss} has no clip; remove it"
    declared = {parameter.name for parameter in loss.parameters}
    for ours, (theirs, usual) in PARAMETERS.items():
        if ours not in declared and setting(actor, theirs) not in (None, usual):
            yield f"actor.{theirs}={setting(actor, theirs)} has no effect: {mode.loss} has no {ours}; remove it"
    if mode.record.takes_divisor and divisor is None:
        yield f"{mode} needs its L: set actor.{DIVISOR}, for Dr. GRPO the longest response in tokens"
    elif mode.record.takes_divisor and not (isinstance(divisor, int | float) and 0 < divisor < float("inf")):
        yield f"actor.{DIVISOR}={divisor!r} must be a number above 0: it is the L of {mode}"
    elif divisor is not None and not mode.record.takes_divisor:
        yield f"actor.{DIVISOR}={divisor} has no effect: {mode.aggregation} has no divisor; remove it"
    given, allowed = setting(actor, "loss_agg_mode") or DEFAULT_AGG_MODE, agg_modes(mode)
    if given not in allowed:
        yield (
            f"actor.loss_agg_mode={given} beside {mode}: two aggregations in one launch. Ours is in the loss_mode, and verl's acts "
            f"on its KL and entropy alone; set actor.loss_agg_mode={' or '.join(allowed)}"
        )


def agg_modes(mode: LossMode) -> tuple[str, ...]:
    """The values of actor.loss_agg_mode that are accepted: verl's default, and verl's name of the loss's aggregation."""
    return tuple(dict.fromkeys((DEFAULT_AGG_MODE, AGG_MODES.get(mode.aggregation, DEFAULT_AGG_MODE))))


def numbers(settings: PolicyLossConfig) -> str:
    """Clip and parameters in words, and whose clip it is."""
    is_own = get_policy_loss(settings.policy_loss).clip_ratios is not None and settings.clip_ratio_low is None
    return numbers_in_words(settings) + (" (the loss's own clip)" if is_own else "")


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
    num_rows, width = mask.shape
    token_counts = mask.sum(-1)
    _check_rows(mode, log_prob.detach(), advantages, mask, token_counts, totals)
    aggregation = LossAggregation.SAMPLE_MEAN if mode.has_companion else mode.aggregation
    weights = weigh_tokens(aggregation, token_counts, totals, divisor=settings.loss_aggregation_divisor)
    output = loss_of_log_probs(
        mode.loss,
        log_prob.flatten(),
        old_log_prob.flatten(),
        advantages.flatten(),
        mask.flatten(),
        torch.arange(num_rows + 1, dtype=torch.int32, device=mask.device) * width,
        num_ranks * weights,
        clip_ratio_low=settings.clip_ratio_low,
        clip_ratio_high=settings.clip_ratio_high,
        loss_parameters=settings.loss_parameters,
        importance_weights=None if rollout_is_weights is None else rollout_is_weights.flatten(),
        advantages_per="token",
        token_counts=token_counts,
        metrics=settings.policy_metrics,
        tp_group=SINGLE,  # each rank of tp and cp has the same whole rows
        cp_group=SINGLE,
    )
    _stop_on_nonfinite(output)
    _tell_once(mode, settings, totals, config)
    return output.loss, _metrics(output)


def _metrics(output: PolicyLossOutput) -> dict[str, float]:
    """By the names that verl's own losses use. verl averages them over micro-batches."""
    found = finalise_metrics(output.metrics) if output.metrics is not None else {}
    return {
        "actor/pg_clipfrac": found.get("policy/clipped_ratio_fraction", 0.0),
        "actor/ppo_kl": found.get("policy/old_logprobs", 0.0) - found.get("policy/new_logprobs", 0.0),
    }


def _stop_on_nonfinite(output: PolicyLossOutput) -> None:
    if output.num_nonfinite.is_cuda and bool((output.num_nonfinite > 0).any()):  # on the CPU the loss has raised by itself
        samples = torch.nonzero(output.num_nonfinite > 0).flatten().tolist()
        raise DataError(
            f"samples {samples} of the micro-batch have {int(output.num_nonfinite.sum())} unmasked tokens with a value that is not "
            "finite, in log_prob, old_log_prob, advantages or rollout_is_weights: mask them or drop the samples"
        )


_told: set[str] = set()


def _tell_once(mode: LossMode, settings: PolicyLossConfig, totals: StepTotals, config: Any) -> None:
    """One line at the first step of this process, on the first rank."""
    if str(mode) in _told or (dist.is_initialized() and dist.get_rank() != 0):
        return
    _told.add(str(mode))
    known = {"L": settings.loss_aggregation_divisor, "N": totals.num_samples}
    record = mode.record
    if record.needs is not None and "num_tokens" in record.needs:
        known["T"] = totals.num_tokens
    parts = [
        f"megatron_rl: loss_mode={mode} in verl",
        numbers(settings),
        f"step of {totals.num_samples} samples",
        f"weight of a token {record.weight_in_words(known)}" + (", in the advantages" if mode.has_companion else ""),
        f"learning rate against sample_mean {record.learning_rate_shift(settings.loss_aggregation_divisor)}",
        f"KL and entropy are verl's, {setting(config, 'loss_agg_mode') or DEFAULT_AGG_MODE}",
    ]
    print(" | ".join(parts), file=sys.stderr, flush=True)


# Rows whose weight would be wrong


@dataclass
class _Seen:
    """Samples with a mark in a loss that wants none: different numbers in a row from the start; None after the first without."""

    marked: set[tuple[int, float]] | None


_seen = _Seen(set())


def _check_rows(
    mode: LossMode, log_prob: Tensor, advantages: Tensor, mask: Tensor, token_counts: Tensor, totals: StepTotals
) -> None:
    """Raises DataError for advantages that lack the companion's weights, or have them where none are wanted, and for samples that
    verl has added to fill a mini-batch, where a weight divides by the number of samples."""
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
    is_marked, has_advantage = marked_rows(advantages, mask, token_counts, totals.num_samples)
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


def _codes(token_counts: Tensor, num_samples: int) -> Tensor:  # [S] -> [S] int32 of MARK_BITS bits
    mixed = (token_counts.long() + 1) * (num_samples + 0x9E37)
    mixed = (mixed ^ (mixed >> 7)) * 0x9E3779B1 & 0xFFFFFFFF
    return (mixed >> 20 & (1 << MARK_BITS) - 1).int()


def mark(advantages: Tensor, token_counts: Tensor, num_samples: int) -> Tensor:  # [S, R] float32, [S] -> [S, R]
    """Writes a code of the sample's tokens and the step's samples into the last bits of each advantage that is not 0.

    The loss recognises it. Whatever changes advantages, masks or the step after the estimator breaks it.
    """
    bits, codes = advantages.contiguous().view(torch.int32), _codes(token_counts, num_samples)[:, None]
    half, all_bits = 1 << (MARK_BITS - 1), (1 << MARK_BITS) - 1
    marked = ((bits - codes + half) & ~all_bits) | codes
    return torch.where(advantages == 0, advantages, marked.view(torch.float32))


def marked_rows(
    advantages: Tensor, mask: Tensor, token_counts: Tensor, num_samples: int
) -> tuple[Tensor, Tensor]:  # [S] bool each: all its advantages have the code; it has an advantage that is not 0
    is_live = mask & (advantages != 0)
    if advantages.dtype != torch.float32:
        return torch.zeros_like(token_counts, dtype=torch.bool), is_live.any(-1)
    found = advantages.contiguous().view(torch.int32) & (1 << MARK_BITS) - 1
    has_code = found == _codes(token_counts, num_samples)[:, None]
    return (has_code | ~is_live).all(-1) & is_live.any(-1), is_live.any(-1)


# prompt_mean: an estimator of verl, with the weights of prompt groups in its advantages


def prompt_factors(token_counts: Tensor, groups: Sequence[object]) -> Tensor:  # [S] -> [S] float32
    """What turns sample_mean over S samples into prompt_mean: (S / P) m_i / M_g. Samples that verl has added to fill the batch, in
    a group of their own, have no token and are in no prompt."""
    numbers: dict[object, int] = {}
    of_sample = torch.tensor([numbers.setdefault(group, len(numbers)) for group in groups], device=token_counts.device)
    of_group = torch.zeros(len(numbers), dtype=token_counts.dtype, device=token_counts.device).index_add(0, of_sample, token_counts)
    num_prompts = sum(not str(group).startswith("pad") for group in numbers)
    totals = StepTotals(
        num_samples=len(groups), num_prompts=max(num_prompts, min(1, len(groups))), num_tokens=int(token_counts.sum())
    )
    weights = weigh_tokens(LossAggregation.PROMPT_MEAN, token_counts, totals, prompt_token_counts=of_group[of_sample])
    return weights * token_counts * len(groups)


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
        raise ConfigError("the batch has no uid, so nobody knows which samples share a prompt: prompt_mean needs it")
    given = {"token_level_rewards": token_level_rewards, "response_mask": response_mask, "config": config, "index": index}
    parameters = inspect.signature(estimate).parameters
    if STD_SWITCH in parameters and config is not None:
        given[STD_SWITCH] = config.get(STD_SWITCH, True)
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    advantages, returns = estimate(**{name: value for name, value in given.items() if takes_any or name in parameters})
    token_counts = response_mask.bool().sum(-1)
    factors = prompt_factors(token_counts, list(index))
    weighed = torch.where(response_mask.bool(), advantages.float() * factors[:, None], 0.0)
    return mark(weighed, token_counts, len(token_counts)), returns


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
    for name in ("register_policy_loss", "register_adv_est", "POLICY_LOSS_REGISTRY", "ADV_ESTIMATOR_REGISTRY"):
        if not hasattr(tables, name):
            yield f"{tables.__name__} has no {name}"
    own = getattr(tables, "POLICY_LOSS_REGISTRY", {}).get("vanilla")
    arguments = tuple(inspect.signature(own).parameters) if own is not None else ()
    if arguments != LOSS_ARGUMENTS:
        yield f"verl's own loss takes ({', '.join(arguments)}), and ({', '.join(LOSS_ARGUMENTS)}) was probed"


def register(tables: ModuleType) -> None:
    """Adds our losses and estimators to verl's tables; a loss that the hub has learnt since is added by another call.

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
