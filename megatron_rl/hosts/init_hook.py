"""Checks a launch in a host before any data is touched (hooks.custom_megatron_init). No argument is changed."""

from __future__ import annotations

import os
import sys
import warnings
from argparse import Namespace
from collections.abc import Iterator

import torch
import torch.distributed as dist

from megatron_rl.config import PolicyLossConfig, Route
from megatron_rl.errors import ConfigError
from megatron_rl.hosts.base import INIT_LINE, HostLaunch, HostOptions, names_ours, remember_args
from megatron_rl.hosts.checks import check_launch
from megatron_rl.hosts.command_line import dropped_flags, path_problems
from megatron_rl.hosts.start_warnings import host_warnings
from megatron_rl.hosts.step_guard import largest_anywhere
from megatron_rl.layout.groups import ParallelGroups, resolve_groups
from megatron_rl.loss_hub import get_loss_aggregation, numbers_in_words
from megatron_rl.megatron.probe import ProbeResult, probe_schedule
from megatron_rl.ops.backends import check_backend
from megatron_rl.validation import routes_of_flags

# Asks for doctor's report on the launch instead of the launch; `python -m megatron_rl.hosts.launch` gives it.
CHECK_VARIABLE = "MEGATRON_RL_CHECK"
# The arguments' name of a size -> the group that must have it.
SIZES = {"tensor_model_parallel_size": "tp", "pipeline_model_parallel_size": "pp", "context_parallel_size": "cp"}


def custom_megatron_init(args: Namespace) -> None:
    """Called by the host in each training actor, when process groups are up and no data has come.

    Finds every problem of the launch, executes the installed Megatron's loss arithmetic, and prints one line on rank 0. Warnings
    come through `warnings`, on rank 0.

    Communication: one all-reduce of one number over dp-cp, pp and tp each, and the probe's steps.
    Raises one ConfigError with every problem; where ranks differ, those without a problem raise with the others.
    """
    remember_args(args)
    groups = resolve_groups()
    config, launch, problems = None, None, [*path_problems(args), *dropped_flags(args, sys.argv, routes_of_flags())]
    if is_check():
        problems.insert(0, check_came_too_late())
    try:
        config, launch = check_launch(args)
        if launch.route == Route.CUSTOM_LOSS:
            check_backend(config.policy_loss_backend, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    except ConfigError as error:
        problems += error.problems
    problems += group_problems(args, groups)
    # A rank whose installation lacks a path would leave the others waiting in the probe.
    if largest_anywhere(torch.tensor(len(problems)), groups) and not problems:
        problems = ["another rank refused this launch, and this one agrees with it: see the message of that rank"]
    if problems or config is None or launch is None:
        raise ConfigError(problems)
    probe = probe_schedule(calculate_per_token_loss=launch.is_per_token)
    if not dist.is_initialized() or dist.get_rank() == 0:
        for line in host_warnings(config, launch):
            warnings.warn(f"megatron_rl: {line}", stacklevel=2)
        print(summary(config, launch, probe, groups), flush=True)


def is_check() -> bool:
    return os.environ.get(CHECK_VARIABLE, "0") not in ("", "0")


def check_came_too_late() -> str:
    return (
        f"{CHECK_VARIABLE}={os.environ[CHECK_VARIABLE]} asks for a report without a run, and this run has started: a host calls "
        "the init hook when Ray, process groups and GPUs are up; unset it, or give the launch line to megatron-rl doctor --, or "
        "start with python -m megatron_rl.hosts.launch, which stops at the variable in time"
    )


def without_init_hook(options: HostOptions) -> Iterator[str]:
    """What a launch that the launcher has judged loses without the hook. The FSDP backend of miles calls none."""
    path = options["custom_megatron_init_path"]
    if options["train_backend"] == "megatron" and not names_ours(path, "custom_megatron_init"):
        flag, _, hook = INIT_LINE.partition(" ")
        what = f"{flag} {path} is not ours: call {hook} in it" if path else f"no {flag} is on the launch line: add {INIT_LINE}"
        yield (
            f"{what}. Without it no training actor is checked: no probe of the installed Megatron, no line at start, no look at "
            "the process groups"
        )


def group_problems(args: Namespace, groups: ParallelGroups) -> list[str]:
    options, problems = HostOptions(args), []
    for option, name in SIZES.items():
        size, given = getattr(groups, name).size(), options[option]
        if options.has(option) and given != size:
            problems.append(
                f"--{option.replace('_', '-')} {given} and the {name} process group has {size} ranks, which losses follow: "
                "the arguments were changed after Megatron was initialised, or it was not initialised"
            )
    return problems


def summary(config: PolicyLossConfig, launch: HostLaunch, probe: ProbeResult, groups: ParallelGroups) -> str:
    reduced_by = {True: "our reducer", False: "the host's reducer"}[launch.has_reducer]
    loss = []
    if launch.route == Route.CUSTOM_LOSS:
        reduced_by, loss = "custom_loss", [f"{config.policy_loss}, {terms_in_words(config)}"]
    companion = "" if launch.companion is None else {"reward": ", reward hook", "convert": ", converter"}[launch.companion]
    return " | ".join(
        [
            f"megatron_rl: loss_aggregation={config.loss_aggregation} by {reduced_by}{companion}",
            *loss,
            step_in_words(launch),
            f"weight of a token {weight_of_a_token(config, launch)}",
            shift_in_words(config),
            f"host {launch.options.host}",
            f"Megatron-Core {probe.megatron_version}",
            f"contract {probe.contract}, ratio {probe.ratio:.6g} on {layout_in_words(groups)}",
            "PASS",
        ]
    )


def terms_in_words(config: PolicyLossConfig) -> str:
    """What our loss was told, whoever's flag said it."""
    terms = f"KL {config.kl_coefficient:g}, entropy {config.entropy_coefficient:g}"
    return f"{numbers_in_words(config)}, {terms}, temperature {config.policy_temperature:g} applied"


def counts_of_step(launch: HostLaunch) -> tuple[int | None, int | None]:
    """(samples, prompts) of a step; None where the arguments do not tell. A host counts rollouts, beside the converter prompts."""
    step, group = launch.options["global_batch_size"], launch.options["n_samples_per_prompt"]
    if step is None or launch.options["use_dynamic_global_batch_size"]:
        return None, None  # known when the step is
    if launch.companion == "convert":
        return (step * group if group else None), step
    return step, (step // group if group and step % group == 0 else None)


def step_in_words(launch: HostLaunch) -> str:
    named = zip(counts_of_step(launch), ("samples", "prompts"), strict=True)
    known = [f"{number} {what}" for number, what in named if number is not None]
    return f"step of {', '.join(known)}" if known else "step of as many samples as come"


def weight_of_a_token(config: PolicyLossConfig, launch: HostLaunch) -> str:
    """As a formula and, as far as the arguments tell, in numbers."""
    record = get_loss_aggregation(config.loss_aggregation)
    samples, prompts = counts_of_step(launch)
    text = record.weight_in_words({"L": config.loss_aggregation_divisor, "N": samples, "P": prompts})
    # A reducer sees samples, our loss the rollouts that they are segments of.
    return text.replace("m_i", "M_roll") if launch.route == Route.CUSTOM_LOSS else text


def shift_in_words(config: PolicyLossConfig) -> str:
    """Of the policy's gradient, and so of the terms that stay averaged by sample_mean."""
    shift = f"learning rate against sample_mean {learning_rate_shift(config)}"
    strength = get_loss_aggregation(config.loss_aggregation).mean_strength
    if strength is None:
        return shift
    terms = strength.inverse().with_names({"L": f"{config.loss_aggregation_divisor or 0:g}"})
    return f"{shift}: Adam hides it, clipping does not; KL and entropy x {terms} beside it"


def learning_rate_shift(config: PolicyLossConfig) -> str:
    return get_loss_aggregation(config.loss_aggregation).learning_rate_shift(config.loss_aggregation_divisor)


def layout_in_words(groups: ParallelGroups) -> str:
    return " x ".join(f"{name} {getattr(groups, name).size()}" for name in ("dp", "cp", "tp", "pp"))
