"""The hooks of a training actor in a host: one looks at a launch before any data is used, one at each optimiser step.

hooks.custom_megatron_init checks the launch and prints what it is. hooks.before_train_step stops the optimiser after non-finite
tokens: our reducer and our loss record them, and a hook on the wrapped torch optimisers looks at the count once a step. No
argument and no gradient is changed.
"""

from __future__ import annotations

import sys
import warnings
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist

from megatron_rl.config import DEFAULT_KL_ESTIMATOR, LaunchMethod, PolicyLossConfig, SupportUse
from megatron_rl.errors import ConfigError
from megatron_rl.hosts.args import HostLaunch, read_launch
from megatron_rl.hosts.checks import check_launch, dropped_flags, launch_warnings
from megatron_rl.hosts.heads.placed_head import take_over
from megatron_rl.hosts.heads.skipped_log_probs import leave_out_forward
from megatron_rl.hosts.host_run import RUNS
from megatron_rl.hosts.run import ranks_in_words
from megatron_rl.layout.agreement import maxima_anywhere
from megatron_rl.layout.groups import ParallelGroups, resolve_groups
from megatron_rl.losses.corrections import CorrectionSettings
from megatron_rl.megatron.head import HeadSettings
from megatron_rl.megatron.installed import unscaled_indexer
from megatron_rl.megatron.model import model_config_of
from megatron_rl.megatron.probe import ProbeResult, probe_schedule
from megatron_rl.validation import weight_words
from megatron_rl.validation.advice import numbers_in_words
from megatron_rl.validation.auxiliary_losses import auxiliary_loss_problems, number
from megatron_rl.validation.experts import expert_problems
from megatron_rl.validation.model_settings import DROPOUTS, model_problems
from megatron_rl.weights import get_loss_aggregation


def custom_megatron_init(args: Namespace) -> None:
    """The host calls it in each training actor, when process groups are up and no data has come.

    It finds every problem of the launch, runs the installed Megatron's loss arithmetic, and prints one line on rank 0. Warnings
    come through `warnings`, on rank 0. With --fused-lm-head-loss or --fp32-lm-head the model that the host builds next gets our
    head; with --skip-old-log-probs the host leaves a forward out.

    Communication: one all-reduce of one number over dp-cp, pp and tp each, and the probe's steps.
    Raises one ConfigError with every problem; where ranks differ, those without a problem raise with the others.
    """
    run, groups = RUNS.of(args), resolve_groups()
    launch, problems = None, list[str]()
    try:
        launch = check_launch(args, found=[*dropped_flags(args, sys.argv[1:])], in_actor=True)
    except ConfigError as error:
        problems += error.problems
    # A rank whose installation lacks a path would leave the others waiting in the probe.
    if maxima_anywhere(torch.tensor([len(problems)]), groups) != [0] and not problems:
        problems = ["another rank refused this launch, and this one agrees with it: see the message of that rank"]
    if problems or launch is None:
        raise ConfigError(problems)
    config, host = launch.config, launch.host
    probe = probe_schedule(calculate_per_token_loss=launch.is_per_token)
    run.head = HeadSettings.of(config)
    if run.head.is_on:
        take_over(host, run.head)
    run.skips_old_log_probs = config.skip_old_log_probs
    if run.skips_old_log_probs:
        leave_out_forward(host)
    tell_start(summary(launch, probe, groups), launch_warnings(launch))


def said_of(args: Namespace) -> list[str]:
    """What the check at start says of parsed arguments: what trains, and warnings. Raises one ConfigError with every problem."""
    launch = check_launch(args)
    return [trained_in_words(launch), *launch_warnings(launch)]


def summary(launch: HostLaunch, probe: ProbeResult, groups: ParallelGroups) -> str:
    """The coefficients of KL and entropy that act are our loss's, or those of the host's own."""
    config = launch.config
    if launch.has_our_loss:
        coefficients = config.kl_coefficient, config.entropy_coefficient
    else:
        coefficients = launch["kl_loss_coef"] if launch["use_kl_loss"] else 0.0, launch["entropy_coef"]
    parts = [trained_in_words(launch), shift_in_words(config, coefficients)]
    return start_line(parts, launch.host.name, probe, groups)


def head_in_words(config: PolicyLossConfig, tp_size: int) -> str:
    """What the output layer leaves in memory."""
    precision = "float32 logits" if config.fp32_lm_head else "logits"
    if config.fused_lm_head_loss:
        return f"hidden states on each tp rank, {precision} [rows, V/{tp_size}] in at most {config.max_logits_bytes} bytes"
    return f"{precision} [T, V/{tp_size}] on each tp rank"


def tell_start(line: str, told: Iterable[str]) -> None:
    """The warnings of a launch that starts, and its line, on rank 0, in the name of the caller's caller."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        for warning in told:
            warnings.warn(f"megatron_rl: {warning}", stacklevel=3)
        print(line, flush=True)


def start_line(parts: Sequence[str], host: str, probe: ProbeResult, groups: ParallelGroups) -> str:
    contract = f"contract {probe.contract}, {probe.in_words} on {ranks_in_words(groups)}"
    return "megatron_rl: " + " | ".join([*parts, f"host {host}", f"Megatron-Core {probe.megatron_version}", contract, "PASS"])


def trained_in_words(launch: HostLaunch) -> str:
    """Who reduces, our loss with its numbers where it is at work, our head likewise, the step, and the weight of a token."""
    config, reduced_by, loss = launch.config, "our reducer" if launch.has_reducer else "the host's reducer", []
    if launch.has_our_loss:
        reduced_by, loss = "custom_loss", [f"{config.policy_loss}, {terms_in_words(config)}"]
    by = f"loss_aggregation={config.loss_aggregation} by {reduced_by}{', reward hook' if launch.has_reward_hook else ''}"
    if HeadSettings.of(config).is_on:
        loss.append(head_in_words(config, launch["tensor_model_parallel_size"]))
    if config.sampling_support == SupportUse.REPLAY:
        terms = ", KL over the same" if config.kl_coefficient else ""
        loss.append(f"log-probabilities over the kept ids of {launch.host.kept.ids}{terms}")
    if config.skip_old_log_probs:
        loss.append("old log-probabilities are the step's own, each ratio is 1")
    for name in DROPOUTS:
        if value := number(launch.ours(name)):
            loss.append(f"{name} {value:g}: the first ratio is not 1")
    return " | ".join([by, *loss, step_in_words(launch), f"weight of a token {weight_of_a_token(launch)}"])


def counts_of_step(launch: HostLaunch) -> tuple[int | None, int | None]:
    """(rollouts, prompts) of a step; None where the arguments do not say."""
    step, group = launch["global_batch_size"], launch["n_samples_per_prompt"]
    if step is None or launch["use_dynamic_global_batch_size"]:
        return None, None  # the size is known only at the step
    return step, (step // group if group and step % group == 0 else None)


def step_in_words(launch: HostLaunch) -> str:
    if launch["multi_lora"]:
        return "step of an adapter's own batch, whose rollouts are N"
    rollouts, prompts = counts_of_step(launch)
    if rollouts is None:
        return "step of as many samples as come"
    prompts_text = "" if prompts is None else f", {prompts} prompts"
    return f"step of {rollouts} rollouts (one of several samples counts once){prompts_text}"


def terms_in_words(config: PolicyLossConfig) -> str:
    """The settings of our loss, from our flags or from the host's."""
    estimator = f" ({config.kl_estimator})" if config.kl_coefficient and config.kl_estimator != DEFAULT_KL_ESTIMATOR else ""
    terms = f"KL {config.kl_coefficient:g}{estimator}, entropy {config.entropy_coefficient:g}"
    corrections = "".join(f", {correction}" for correction in corrections_in_words(config))
    return f"{numbers_in_words(config)}, {terms}{corrections}, temperature {config.policy_temperature:g} applied"


def corrections_in_words(config: PolicyLossConfig) -> Iterator[str]:
    settings = CorrectionSettings.of(config)
    if settings is None:
        return
    if settings.has_factor:
        low, high = settings.bounds
        yield f"{settings.kind} by {settings.level} in [{low:g}, {high:g}]"
    if settings.sequence_delta is not None:
        yield f"samples beyond {settings.sequence_delta:g} dropped"


def weight_of_a_token(launch: HostLaunch) -> str:
    """As a formula and, as far as the arguments say, in numbers."""
    config = launch.config
    record = get_loss_aggregation(config.loss_aggregation)
    samples, prompts = counts_of_step(launch)
    text = weight_words.weight_in_words(record, {"L": config.loss_aggregation_divisor, "N": samples, "P": prompts})
    # A reducer sees samples; our loss sees the rollouts that the samples are segments of.
    return text.replace("m_i", "M_roll") if launch.has_our_loss else text


def shift_in_words(config: PolicyLossConfig, kl_and_entropy: tuple[float, float] = (0.0, 0.0)) -> str:
    """How the weights change against sample_mean, and so the strength of the terms that keep sample_mean, where they are on."""
    record = get_loss_aggregation(config.loss_aggregation)
    shift = f"weights {weight_words.shift_in_words(record, config.loss_aggregation_divisor)}"
    strength = weight_words.mean_strength_of(record)
    if strength is None:
        return shift
    names = " and ".join(name for name, coefficient in zip(("KL", "entropy"), kl_and_entropy, strict=True) if coefficient)
    terms = strength.inverse().with_names({"L": f"{config.loss_aggregation_divisor or 0:g}"})
    return f"{shift}: Adam hides it, clipping does not{f'; {names} x {terms} beside it' if names else ''}"


# Before each optimiser step


def before_train_step(args: Namespace, rollout_id: int, step_id: int, model, optimizer, opt_param_scheduler) -> None:
    """The host calls it before each step, without the step's data.

    The first call compares the model's config with the arguments, which a bridge may have changed since, and registers the check
    on the optimiser. The next call checks a step that the host skipped (a gradient norm that is not finite).

    Communication: one all-reduce of one number over dp-cp, pp and tp each, at the optimiser's step, and once at the first call.
    Synchronises once a step. Raises ConfigError, or DataError on all ranks together.
    """
    guard = RUNS.of(args).guard
    for part in list(model) if isinstance(model, Sequence) else [model]:
        if part not in guard.models:
            check_model_contract(args, model_config_of(part))
            guard.models.add(part)
    guard.arm(optimizer)
    guard.begin(rollout_id, step_id)


def check_model_contract(args: Namespace, model_config) -> None:
    """The host scales the loss by its argument, and Megatron divides by the model's config: both must say the same. The auxiliary
    losses of the model must keep their scale too, wherever they were set."""
    launch = read_launch(args)
    in_arguments, in_model = launch.is_per_token, bool(model_config.calculate_per_token_loss)
    if in_arguments != in_model:
        remedy = "remove --calculate-per-token-loss" if in_arguments else "add it, or set --context-parallel-size 1"
        raise ConfigError(
            f"calculate_per_token_loss is {in_arguments} in the arguments and {in_model} in the model's config, which was changed "
            f"after parsing: the host scales the loss for one contract and Megatron divides for the other; {remedy}"
        )
    settings = {"context_parallel_size": launch["context_parallel_size"], **vars(model_config)}
    settings["enable_mtp_training"] = launch["enable_mtp_training"]
    problems = list(auxiliary_loss_problems(settings | {"calculate_per_token_loss": in_model}, LaunchMethod.REDUCER))
    problems += [*expert_problems(vars(model_config)), *model_problems(vars(model_config))]
    problems += unscaled_indexer(settings | {"calculate_per_token_loss": in_model})
    if problems:
        raise ConfigError(problems)
