"""`megatron-rl train`: flags in, a trained policy, metrics.jsonl, curves and checkpoints out. It must never hold training logic."""

from __future__ import annotations

import json
import logging
import os
import sys
from argparse import ArgumentError, ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_rl.arguments import add_megatron_rl_args, validate_megatron_rl_args
from megatron_rl.commands.start_signals import hand_over
from megatron_rl.config import LaunchMethod, PolicyLossConfig
from megatron_rl.errors import ConfigError
from megatron_rl.train.options import DEFAULT_SAMPLES_PER_PROMPT, PLOT_FILE, TrainOptions, add_train_args, set_preset_defaults
from megatron_rl.train.plots import plot_curves
from megatron_rl.train.tasks import make_task
from megatron_rl.train.writers import METRICS_FILE, names_what_cannot_be_written, read_metrics


def add_arguments(parser: ArgumentParser, arguments: Sequence[str]) -> None:
    parser.usage = "megatron-rl train [--task TASK | --prompts FILE --reward module.function | --rollouts FILE] [flags] [@FILE]"
    parser.epilog = "@FILE: a file with a flag in each line, as --lr=0.001; the last value of a flag counts."
    add_megatron_rl_args(parser, arguments)
    loss_group = parser._action_groups[-1]
    loss_group.title, loss_group.description = (
        "loss",
        "What a step minimises, how it is aggregated and corrected, and what is measured of it.",
    )
    samples_flag = next(flag for flag in loss_group._group_actions if flag.dest == "samples_per_prompt")
    samples_flag.help = f"Samples of each prompt. Unset: {DEFAULT_SAMPLES_PER_PROMPT}, or as many as --rollouts begins with."
    try:
        add_train_args(parser)
    except ArgumentError as error:  # the flags of a loss of one's own come first
        raise ConfigError(f"a parameter of your policy loss has the name of a flag of train, {error}; rename it") from error
    set_preset_defaults(parser, arguments)


def run(args: Namespace) -> int:
    from megatron_rl.megatron.cpu import quiet_megatron

    logging.basicConfig(level=logging.WARNING, format="megatron_rl: %(message)s")
    quiet_megatron()
    options, config = read_settings(args)
    task = make_task(
        options.task,
        prompts=options.prompts,
        reward=options.reward,
        max_new_tokens=options.max_new_tokens,
        hf_checkpoint=options.hf_checkpoint,
        vocab_size=options.vocab_size,
    )
    from megatron_rl.train.session import train  # Megatron-Core: after everything that a wrong flag can say

    outcome = train(options, config, task, hand_over)
    if os.environ.get("RANK", "0") == "0":
        report(options, config, outcome)
    return outcome.exit_code


def read_settings(args: Namespace) -> tuple[TrainOptions, PolicyLossConfig]:
    """Both groups of flags, checked; one ConfigError with the problems of both."""
    from megatron_rl.train.option_rules import train_options, with_group_size

    args = Namespace(**with_group_size(vars(args)))
    found: list[Any] = []
    problems: list[str] = []
    for read in (partial(train_options, vars(args)), partial(validate_megatron_rl_args, args, LaunchMethod.TRAIN)):
        try:
            found.append(read())
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return found[0], found[1]


def report(options: TrainOptions, config: PolicyLossConfig, outcome) -> None:
    """The picture and the closing line, or one JSON object on stdout."""
    metrics, plot, progress = Path(options.output_dir) / METRICS_FILE, None, outcome.progress
    rows = read_metrics(metrics)
    if rows and find_spec("matplotlib") is not None:
        plot = Path(options.output_dir) / PLOT_FILE
        with names_what_cannot_be_written(plot):
            plot_curves(rows, plot, f"{config.policy_loss}, {config.loss_aggregation}")
    if options.json:
        summary = {
            **asdict(progress),
            "reason": outcome.reason,
            "seconds": round(outcome.seconds, 3),
            "metrics": metrics,
            "plot": plot,
            "checkpoint": outcome.checkpoint,
            "save_hf": options.save_hf if outcome.exit_code == 0 else None,
        }
        print(json.dumps(summary, default=str), flush=True)
        return
    skipped = f", {progress.skipped_steps} skipped" if progress.skipped_steps else ""
    if progress.first_reward is None:
        print(f"megatron_rl: {outcome.reason}; nothing was trained{skipped}", file=sys.stderr)
        return
    save_hf = options.save_hf if outcome.exit_code == 0 else None
    places = ", ".join(str(path) for path in (metrics, plot, outcome.checkpoint, save_hf) if path is not None)
    if options.save_hf is not None and save_hf is None:
        places += f"\nmegatron_rl: --save-hf {options.save_hf} is written when the run is complete: --resume goes on"
    print(
        f"megatron_rl: {outcome.reason}; mean reward {progress.first_reward:.3f} -> {progress.last_reward:.3f} in "
        f"{progress.num_rollouts} rollouts, {progress.num_steps} steps{skipped}, {outcome.seconds:.0f} s\n"
        f"megatron_rl: {places}",
        file=sys.stderr,
        flush=True,
    )
