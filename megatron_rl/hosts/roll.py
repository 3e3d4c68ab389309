"""ROLL: our losses on the logits of its Megatron strategy, with the weights of the step.

    actor_train:
      worker_cls: megatron_rl.hosts.roll_worker.ActorWorker
      pg_variant: <loss>.<aggregation>

What ROLL and Megatron do with the number that a loss returns, D data-parallel and c context-parallel ranks, M micro-batches:

    ROLL: x M D; Megatron: x c / M; DDP: mean over D c ranks
    -> sum over ranks and micro-batches; with packing ROLL calls a loss once a sequence, and adds

So a loss returns its rank's part of sum_i w_i S_i, w_i from the counts of the whole step, which ROLL hands over. Each rank has the
logits of its own tokens, so KL and entropy come from the same pass, with ROLL's coefficients. Prompts are known by their tokens.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_rl.aggregation import StepTotals, count_step, regularizer_weights, weigh_tokens
from megatron_rl.aggregation_record import AggregationRecord
from megatron_rl.arguments import read_number
from megatron_rl.config import CorrectionSettings, KLEstimator, PolicyLossConfig, counted_twice
from megatron_rl.errors import ConfigError
from megatron_rl.hosts.dense_rows import (
    CORRECTION_SETTINGS,
    read_config,
    read_name,
    refuse_nonfinite,
    signature_problem,
    tell_once,
    warn_once,
)
from megatron_rl.hosts.given import Given
from megatron_rl.hosts.sampling import SamplingVerdict, judge_sampling, readers_of, value_at
from megatron_rl.hosts.settings_line import UNKNOWN
from megatron_rl.layout.groups import ParallelGroups, all_reduce_sum, resolve_group
from megatron_rl.loss_hub import get_loss_aggregation, get_policy_loss
from megatron_rl.losses import PolicyLossOutput, policy_loss
from megatron_rl.step_metrics import finalise_metrics, reduce_statistics

PROBED = "alibaba/ROLL 8eb27cc2"
WORKER = "megatron_rl.hosts.roll_worker.ActorWorker"
STRATEGY = "megatron_train"
# ROLL's settings drop a name that they do not know without a word. So our numbers are variables of the worker's environment.
VARIABLES = "MEGATRON_RL_"
DIVISOR = "loss_aggregation_divisor"
# ROLL's clip, of both sides or of each with use_pg_clip_range, and the default of all three.
CLIPS, CLIP = ("pg_clip", "pg_clip_low", "pg_clip_high"), 0.2
# Others of its numbers that our worker reads, of the pipeline and of actor_train.training_args.
NUMBERS = (
    "pg_clip",
    "kl_loss_coef",
    "entropy_loss_coef",
    "rl_loss_coef",
    "rollout_batch_size",
    "num_return_sequences_in_group",
    "ppo_epochs",
)
# Switches, of the pipeline and of actor_train: any text is true.
SWITCHES = ("use_pg_clip_range", "dual_clip_loss", "use_kl_loss", "enable_old_logprobs_recompute")
WORKER_SWITCHES = ("apply_loss_scale", "use_dynamic_batching_in_train")
STEP = ("per_device_train_batch_size", "gradient_accumulation_steps")
# ROLL's name of our mean of KL and entropy.
AGG_MODE = "seq-mean-token-mean"
# What ROLL's own loss reads of a pipeline, the only value that ours accepts, and why.
ONLY = {
    "importance_sampling": ("token", "two losses in one launch; ours is gspo: set pg_variant: gspo.<aggregation>"),
    "difficulty_loss_weight": (False, "ROLL normalises these weights in each micro-batch, so they depend on its size"),
    "length_loss_weight": (False, "ROLL normalises these weights in each micro-batch, so they depend on its size"),
    "rl_loss_coef": (1.0, "it would multiply the weights; change the learning rate"),
    "loss_agg_mode": (AGG_MODE, "our aggregation is in pg_variant, and KL and entropy are means over samples"),
}
OUR_PIPELINE = "our worker is made for ROLL's RLVR pipeline; start examples/start_rlvr_pipeline.py"
# Columns that we add to ROLL's batch of a step, [B] int64, and to its meta_info.
PROMPT_TOKENS, NUM_PROMPTS = "megatron_rl_prompt_tokens", "megatron_rl_num_prompts"
# What we call, replace or are called by.
WORKER_METHODS = {"loss_func": ("self", "data", "output_tensor"), "initialize": ("self", "pipeline_config")}
STRATEGY_METHODS = {
    "train_step": ("self", "batch", "loss_func"),
    "inner_forward_step": ("self", "loss_func", "data_iterator", "model"),
    "_get_feature_on_this_cp_rank": ("self", "feature", "feature_name"),
}


@dataclass(frozen=True, slots=True)
class RollSettings:
    config: PolicyLossConfig
    is_on_policy: bool  # ROLL has not computed old log-probabilities: the batch has placeholders
    warnings: tuple[str, ...] = ()

    @property
    def record(self) -> AggregationRecord:
        return get_loss_aggregation(self.config.loss_aggregation)

    @property
    def counts_prompts(self) -> bool:
        return self.record.needs is None or self.record.needs_prompts

    def __str__(self) -> str:
        return f"{self.config.policy_loss}.{self.config.loss_aggregation}"


# Settings


def read_settings(worker: Any, pipeline: Any) -> RollSettings:
    """From ROLL's config of the worker and of the pipeline. Raises one ConfigError with every problem."""
    remedy = "Set actor_train.pg_variant: <loss>.<aggregation>"
    loss_name, aggregation = read_name("actor_train.pg_variant", worker.pg_variant, remedy, lambda record: True)
    loss = get_policy_loss(loss_name)
    ours = {name: value for name, value in worker.system_envs.items() if name.startswith(VARIABLES)}

    def given(name: str) -> Given:
        variable = VARIABLES + name.upper()
        return Given(f"actor_train.system_envs.{variable}", read_number(ours.get(variable)))

    # The switch chooses both sides, whatever their values; without it ROLL's default is nobody's choice.
    has_range = bool(pipeline.use_pg_clip_range)
    names = ("pg_clip_low", "pg_clip_high") if has_range else ("pg_clip", "pg_clip")
    low, high = (Given(name, getattr(pipeline, name), CLIP, True if has_range else None) for name in names)
    more_numbers = [Given(name, getattr(pipeline, name)) for name in NUMBERS if hasattr(pipeline, name)]
    more_numbers += [Given(f"actor_train.training_args.{name}", getattr(worker.training_args, name)) for name in STEP]
    dual_clip = 1 + 2 * pipeline.pg_clip if pipeline.dual_clip_loss else None  # ROLL's c
    parameters = [parameter.name for parameter in loss.parameters if parameter.name != "clip_ratio_c"]
    correction = {name: given(name).value for name in CORRECTION_SETTINGS if given(name).is_chosen}
    estimator = given("kl_estimator")
    config, problems = read_config(
        f"pg_variant: {loss_name}.{aggregation}",
        loss_name,
        aggregation,
        (low, high),
        {"clip_ratio_c": Given("dual_clip_loss", dual_clip)} | {name: given(name) for name in parameters},
        given(DIVISOR),
        "use_pg_clip_range: true and {name}: {value}",
        more_numbers,
        kl_coefficient=pipeline.kl_loss_coef if pipeline.use_kl_loss else 0.0,
        kl_estimator=KLEstimator.K3 if estimator.value is None else estimator.value,
        entropy_coefficient=max(pipeline.entropy_loss_coef, 0.0),
        **correction,
    )
    sampling = judge_sampler(config, pipeline)
    settings = RollSettings(config, not pipeline.enable_old_logprobs_recompute, sampling.warnings)
    allowed = [VARIABLES + name.upper() for name in (*parameters, DIVISOR, *CORRECTION_SETTINGS, "kl_estimator")]
    if estimator.is_chosen and estimator.value not in tuple(KLEstimator):
        problems.append(f"{estimator.name}={estimator.value} is not one of {', '.join(KLEstimator)}")
    elif estimator.is_chosen and not config.kl_coefficient:
        problems.append(f"{estimator.name}={estimator.value} has no effect without use_kl_loss: true and kl_loss_coef; remove it")
    for variable in sorted(ours.keys() - set(allowed)):
        problems.append(
            f"actor_train.system_envs.{variable}={ours[variable]} has no effect: {settings} has {', '.join(allowed)}; remove it"
        )
    for one in (Given(name, getattr(pipeline, name), CLIP) for name in CLIPS):
        if one.is_chosen and one.name not in (*names, "pg_clip" if dual_clip else ""):
            switch = "dual_clip_loss: true" if has_range else "use_pg_clip_range: true"
            problems.append(f"{one.name}: {one.value} has no effect without {switch}; set the switch, or remove it")
    problems += [*_problems(settings, worker, pipeline), *CorrectionSettings.of(config).problems(), *sampling.problems]
    if problems:
        raise ConfigError(problems)
    return settings


def judge_sampler(config: PolicyLossConfig, pipeline: Any) -> SamplingVerdict:
    host = getattr(pipeline, "train_infer_correction", None)
    theirs = {} if host is None else {"is_weight": host.is_weight.enabled, "filters": any(one.enabled for one in host.filters)}
    readers = [*readers_of(config), *(f"train_infer_correction.{name}" for name, is_on in theirs.items() if is_on)]
    is_known = getattr(pipeline, "actor_infer", None) is not None
    return judge_sampling("roll", functools.partial(value_at, pipeline) if is_known else lambda name: UNKNOWN, readers)


def _problems(settings: RollSettings, worker: Any, pipeline: Any) -> Iterator[str]:
    if not hasattr(pipeline, "num_return_sequences_in_group"):
        yield f"{type(pipeline).__name__}: {OUR_PIPELINE}"
        return
    texts = {name: getattr(pipeline, name) for name in SWITCHES} | {f"actor_train.{n}": getattr(worker, n) for n in WORKER_SWITCHES}
    for name, value in texts.items():
        if isinstance(value, str):
            yield f"{name}: {value!r} is text, which ROLL takes for true: write true or false, without quotes"
    for name, (only, why) in ONLY.items():
        if getattr(pipeline, name) != only:
            yield f"{name}: {getattr(pipeline, name)} beside {settings}: {why}; set {name}: {only}"
    layout = worker.strategy_args.strategy_config
    if worker.strategy_args.strategy_name != STRATEGY:
        yield (
            f"actor_train.strategy_args.strategy_name: {worker.strategy_args.strategy_name}: our worker needs the logits of ROLL's "
            f"Megatron strategy; set {STRATEGY}"
        )
        return
    if not worker.apply_loss_scale:
        yield "actor_train.apply_loss_scale: false: Megatron and DDP would average over micro-batches and ranks; set it to true"
    if layout.get("calculate_per_token_loss"):
        yield "strategy_config.calculate_per_token_loss: true: ROLL's factors are made for the mean over ranks; remove it"
    step = step_of(worker)
    batch = pipeline.rollout_batch_size * pipeline.num_return_sequences_in_group
    is_one_step = step == batch and not worker.use_dynamic_batching_in_train
    if settings.counts_prompts and not is_one_step:
        how = "dynamic batching" if worker.use_dynamic_batching_in_train else f"a step of {step} of {batch} samples"
        yield (
            f"{how} beside {settings}: an optimiser step must have all samples of a batch, because a smaller one cuts prompt "
            f"groups; set actor_train.training_args.gradient_accumulation_steps so that per_device_train_batch_size x "
            "gradient_accumulation_steps x data-parallel ranks is rollout_batch_size x num_return_sequences_in_group, and "
            "use_dynamic_batching_in_train: false"
        )
    if settings.is_on_policy and not (is_one_step and pipeline.ppo_epochs == 1):
        yield (
            "enable_old_logprobs_recompute: false with several optimiser steps a batch: the batch has no old log-probabilities, "
            "and the ratio of the later steps would be 1; set enable_old_logprobs_recompute: true, and no "
            "force_disable_old_logprobs_recompute"
        )
    yield from _correction_problems(settings, pipeline.train_infer_correction)


def ranks_of_model(layout: Mapping[str, Any]) -> int:
    """layout: ROLL's strategy_config."""
    return math.prod(layout.get(f"{kind}_parallel_size") or 1 for kind in ("tensor_model", "pipeline_model", "context"))


def step_of(worker: Any) -> int:
    """Samples of an optimiser step, by ROLL's config of the worker."""
    training, layout = worker.training_args, worker.strategy_args.strategy_config
    ranks = len(worker.device_mapping) // ranks_of_model(layout)
    return training.per_device_train_batch_size * training.gradient_accumulation_steps * ranks


def _correction_problems(settings: RollSettings, host: Any) -> Iterator[str]:
    """host: ROLL's train_infer_correction."""
    is_weighed, is_filtered = host.is_weight.enabled, any(one.enabled for one in host.filters)
    loss = get_policy_loss(settings.config.policy_loss)
    if settings.is_on_policy and (is_weighed or is_filtered):
        yield (
            "train_infer_correction with enable_old_logprobs_recompute: false: ROLL drops tokens after it has counted them; set "
            "enable_old_logprobs_recompute: true"
        )
    kind = settings.config.importance_correction
    if is_weighed and CorrectionSettings.of(settings.config).is_on:
        yield (
            f"train_infer_correction.is_weight.enabled: true beside {VARIABLES}IMPORTANCE_CORRECTION={kind}: the gap between "
            "sampler and trainer would be counted twice; remove one of them"
        )
    if is_weighed and loss.anchor == "rollout":
        yield counted_twice(kind, loss.name, "train_infer_correction.is_weight.enabled: true")


# The step


def weigh_steps(strategy: Any, settings: RollSettings) -> None:
    """From now on the strategy counts the prompts of a step before it trains, where weights need them, and tells its first step.

    Raises ConfigError for a strategy with another contract than the one that was probed."""
    if problems := [*contract_problems(type(strategy), STRATEGY_METHODS)]:
        raise ConfigError(problems)
    train_step = strategy.train_step

    @functools.wraps(train_step)
    def counted_train_step(batch: Any, loss_func: Callable[..., Any]) -> Any:
        if settings.counts_prompts:
            count_prompts(batch)
        metrics = train_step(batch=batch, loss_func=loss_func)
        tell_step(settings, read_totals(batch))
        return metrics

    strategy.train_step = counted_train_step


def count_prompts(data: Any) -> None:
    """Adds the tokens of each sample's prompt group to this rank's batch of a step. Samples with equal prompts are a group.

    Communication: that of count_step over the data-parallel ranks. Raises what it raises.
    """
    columns = data.batch
    ids, is_prompt = columns["input_ids"].cpu(), columns["prompt_mask"].bool().cpu()
    prompts = [str(row[kept].tolist()) for row, kept in zip(ids, is_prompt, strict=True)]
    totals, _, prompt_counts = count_step(None, prompts, token_counts=loss_mask_of(columns).sum(-1).cpu())
    columns[PROMPT_TOKENS] = prompt_counts.to(columns["input_ids"].device)
    data.meta_info[NUM_PROMPTS] = totals.num_prompts


def loss_mask_of(columns: Any) -> Tensor:  # [B, S - 1] bool
    final = columns.get("final_response_mask", None)
    return (columns["response_mask"][:, 1:] if final is None else final).bool()


def read_totals(data: Any) -> StepTotals:
    """Raises ConfigError, with the key, where ROLL's call does not have the counts of the step."""
    meta = data.meta_info
    key = "response_mask" if data.batch.get("final_response_mask", None) is None else "final_response_mask"
    try:
        num_samples, num_tokens = int(meta["global_valid_samples"]["default"]), int(meta["batch_num_tokens"][key])
    except KeyError as error:
        raise ConfigError(
            f"ROLL's meta_info has no {error}, which our weights need: this ROLL has another contract than the one that was probed "
            f"({PROBED})"
        ) from None
    return StepTotals(num_samples=num_samples, num_prompts=meta.get(NUM_PROMPTS), num_tokens=num_tokens)


def tell_step(settings: RollSettings, totals: StepTotals) -> None:
    config = settings.config
    warn_once(settings.warnings)
    terms = [f"KL {config.kl_coefficient:g} ({config.kl_estimator})"] * bool(config.kl_coefficient)
    terms += [f"entropy {config.entropy_coefficient:g}"] * bool(config.entropy_coefficient)
    regularizers = f"{' and '.join(terms)} x mean over samples" if terms else "no KL and no entropy in the loss"
    tell_once(f"pg_variant: {settings} in ROLL", config, totals, regularizers)


# The loss


def compute_loss(
    settings: RollSettings,
    strategy: Any,
    data: Any,  # ROLL's micro-batch of whole samples: [B, S] and [B, S - 1] columns; position t of the latter is of token t + 1
    logits: Tensor,  # [B, S / c, V / tp] with gradient: of this rank's tokens
) -> tuple[Tensor, dict[str, float]]:  # 0-d with gradient, ROLL's names of metrics
    """This rank's part of sum_i w_i sum_t m_it u_it l_it + KL - entropy, u: ROLL's train_infer_is_weight, or our correction.

    Masked values may be anything. Communication: that of policy_loss, and over context-parallel ranks two sums for metrics.
    Synchronises, as ROLL's own loss does for its metrics. Raises ConfigError for a call without the step's counts or the sampler's
    log-probabilities, and DataError for unmasked values that are not finite.
    """
    config, columns, totals = settings.config, data.batch, read_totals(data)
    mask = loss_mask_of(columns)
    token_counts, correction = mask.sum(-1), CorrectionSettings.of(config)

    def on_this_rank(values: Tensor) -> Tensor:  # [B, S - 1] -> [B S / c]
        return strategy._get_feature_on_this_cp_rank(torch.nn.functional.pad(values, (0, 1)), PROMPT_TOKENS).flatten()

    needs_sampler = correction.is_on or "rollout_log_probs" in get_policy_loss(config.policy_loss).inputs_needed
    sampled = columns.get("infer_logprobs", None) if needs_sampler else None
    if needs_sampler and (sampled is None or len(sampled) == 0):
        raise ConfigError(
            f"the batch has no infer_logprobs, which {settings} needs: set actor_infer.generating_args.logprobs: 1, so that the "
            "sampler reports them"
        )
    importance = columns.get("train_infer_is_weight", None)
    rows, width = logits.shape[:2]
    output = policy_loss(
        config.policy_loss,
        logits.flatten(0, 1),
        on_this_rank(torch.where(mask, columns["input_ids"][:, 1:], 0)),
        None if settings.is_on_policy else on_this_rank(columns["old_log_probs"].float()),
        on_this_rank(columns["advantages"].float()),
        on_this_rank(mask),
        torch.arange(rows + 1, dtype=torch.int32, device=logits.device) * width,
        weigh_tokens(
            config.loss_aggregation,
            token_counts,
            totals,
            prompt_token_counts=columns[PROMPT_TOKENS] if settings.counts_prompts else None,
            divisor=config.loss_aggregation_divisor,
        ),
        clip_ratio_low=config.clip_ratio_low,
        clip_ratio_high=config.clip_ratio_high,
        loss_parameters=config.loss_parameters,
        importance_weights=None if importance is None else on_this_rank(importance),
        rollout_log_probs=None if sampled is None else on_this_rank(sampled),
        correction=correction if correction.is_on else None,
        ref_log_probs=on_this_rank(columns["ref_log_probs"].float()) if config.kl_coefficient else None,
        kl_coefficient=config.kl_coefficient,
        kl_estimator=config.kl_estimator,
        entropy_coefficient=config.entropy_coefficient,
        regularizer_weights=regularizer_weights(token_counts, totals),
        advantages_per="token",
        token_counts=token_counts,
        metrics=config.policy_metrics,
    )
    refuse_nonfinite(output)
    return output.loss, _metrics(output)


def _metrics(output: PolicyLossOutput) -> dict[str, float]:
    """ROLL adds what ends with @sum over its calls and data-parallel ranks, and averages what ends with @mean. It reads one
    context-parallel rank, so the parts are added up here."""
    cp_group = resolve_group(None, "cp")
    sums = {
        "actor/total_loss@sum": output.loss.detach(),
        "actor/pg_loss@sum": output.policy_loss,
        "actor/kl_loss@sum": output.kl_loss,
    }
    parts = {name: value for name, value in sums.items() if value is not None}
    totals = all_reduce_sum(torch.stack(list(parts.values())).double(), cp_group).tolist()
    statistics = reduce_statistics(output.metrics, ParallelGroups(dp_cp=cp_group), has_entropy=False)
    found = finalise_metrics(statistics)
    return {
        **dict(zip(parts, totals, strict=True)),
        "actor/ppo_ratio_clipfrac@mean": found.get("policy/clipped_ratio_fraction", 0.0),
        "actor/policykl@mean": found.get("policy/new_logprobs", 0.0) - found.get("policy/old_logprobs", 0.0),
    }


def contract_problems(owner: type, methods: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    """What a class of ROLL lacks of the contract that our loss is written for."""
    for name, arguments in methods.items():
        found = getattr(owner, name, None)
        path = f"{owner.__name__}.{name}"
        if found is None:
            yield f"ROLL's {owner.__name__} has no {name} ({PROBED} was probed)"
        elif problem := signature_problem(path, found, arguments):
            yield f"{problem} ({PROBED})"
