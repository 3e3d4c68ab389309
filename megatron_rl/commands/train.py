"""`megatron-rl train`: flags in, a trained policy, metrics.jsonl, curves and checkpoints out. It must never hold training logic."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from megatron_rl.arguments import add_megatron_rl_args, validate_megatron_rl_args
from megatron_rl.config import PolicyLossConfig, Route
from megatron_rl.errors import ConfigError
from megatron_rl.training.option_rules import train_options
from megatron_rl.training.options import (
    CHECKPOINT_DIRECTORY,
    TrainOptions,
    add_train_args,
    model_vocab_size,
    set_preset_defaults,
)
from megatron_rl.training.plots import plot_curves
from megatron_rl.training.tasks import Task, make_task
from megatron_rl.training.user_tasks import PromptFileTask
from megatron_rl.training.writers import METRICS_FILE
from megatron_rl.validation import config_warnings

PLOT_FILE = "curves.png"
VOCABULARY_FILE = "vocabulary.json"


def add_arguments(parser: ArgumentParser, arguments: Sequence[str]) -> None:
    add_megatron_rl_args(parser)
    add_train_args(parser)
    set_preset_defaults(parser, arguments)


def run(args: Namespace) -> int:
    logging.basicConfig(level=logging.WARNING, format="megatron_rl: %(message)s")
    quiet_megatron()
    options, config = read_settings(args)
    task = make_task(
        options.task,
        prompts=options.prompts,
        reward=options.reward,
        max_new_tokens=options.max_new_tokens,
        end_token=options.end_token,
    )
    check_vocabulary(options, task)
    outcome = train(options, config, task)
    is_first_rank = os.environ.get("RANK", "0") == "0"
    if is_first_rank:
        report(options, config, outcome)
    return outcome.exit_code


def read_settings(args: Namespace) -> tuple[TrainOptions, PolicyLossConfig]:
    """Both groups of flags, checked; one ConfigError with the problems of both."""
    problems: list[str] = []
    options = config = None
    try:
        options = train_options(vars(args), world_size=int(os.environ.get("WORLD_SIZE", "1")))
    except ConfigError as error:
        problems += error.problems
    try:
        config = validate_megatron_rl_args(args, Route.TRAIN)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    return options, config


def train(options: TrainOptions, config: PolicyLossConfig, task: Task):  # -> Outcome
    """Imports Megatron-Core and runs the loop on this rank."""
    import torch.distributed as dist

    from megatron_rl.megatron import checkpoints
    from megatron_rl.megatron.trainer import PolicyTrainer, TrainerSettings, initialize_ranks
    from megatron_rl.training.collection import ReplayedRollouts, SampledRollouts
    from megatron_rl.training.loop import Progress, TrainingRun

    checkpoints.check_can_save()
    device = initialize_ranks(
        tensor_model_parallel_size=options.tensor_model_parallel_size,
        pipeline_model_parallel_size=options.pipeline_model_parallel_size,
        context_parallel_size=options.context_parallel_size,
        seed=options.seed,
    )
    settings = TrainerSettings(
        num_layers=options.num_layers,
        hidden_size=options.hidden_size,
        num_attention_heads=options.num_attention_heads,
        vocab_size=model_vocab_size(options, task.vocab_size),
        max_sequence_length=task.max_prompt_tokens + task.max_new_tokens,
        seed=options.seed,
        lr=options.lr,
        adam_beta2=options.adam_beta2,
        weight_decay=options.weight_decay,
        clip_grad=options.clip_grad,
        sequence_parallel=options.sequence_parallel,
        use_distributed_optimizer=options.use_distributed_optimizer,
        bf16=device.type == "cuda" if options.bf16 is None else options.bf16,
        packed=options.packed,
    )
    trainer = PolicyTrainer(settings, config, device)
    progress, recent_rewards, resume_step, stream_state, watchdog_state = Progress(), [], None, None, None
    if options.resume or options.load:
        counters = trainer.load(checkpoints.latest_checkpoint(checkpoint_directory(options)))
        progress, recent_rewards = Progress(**counters["progress"]), counters["recent_rewards"]
        resume_step, stream_state, watchdog_state = progress.num_steps, counters.get("stream"), counters.get("watchdog")
    if options.rollouts:
        rollouts = ReplayedRollouts(options.rollouts, vocab_size=settings.vocab_size, first=progress.num_rollouts)
    else:
        rollouts = SampledRollouts(trainer, task, options, config.samples_per_prompt)
    training = TrainingRun(
        trainer,
        rollouts,
        options,
        config,
        progress=progress,
        recent_rewards=recent_rewards,
        resume_step=resume_step,
        stream_state=stream_state,
        watchdog_state=watchdog_state,
    )
    if dist.get_rank() == 0:
        prepare_output_dir(options, task)
        announce(options, config, trainer)
    try:
        return training.run()
    finally:
        dist.destroy_process_group()


def checkpoint_directory(options: TrainOptions) -> Path:
    """Where --resume or --load finds checkpoints; --load takes that directory, or the run's that holds it."""
    given = Path(options.output_dir if options.load is None else options.load)
    inside = given / CHECKPOINT_DIRECTORY
    return inside if options.load is None or inside.is_dir() else given


def prepare_output_dir(options: TrainOptions, task: Task) -> None:
    """A new run must not find an older run's checkpoints and metrics, unless it goes on from them; text prompts keep their
    vocabulary beside them."""
    output_dir = Path(options.output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    own_checkpoints = output_dir / CHECKPOINT_DIRECTORY
    goes_on = options.resume or options.load and checkpoint_directory(options).resolve() == own_checkpoints.resolve()
    if not goes_on:
        shutil.rmtree(own_checkpoints, ignore_errors=True)
        (output_dir / METRICS_FILE).unlink(missing_ok=True)
    if isinstance(task, PromptFileTask) and task.vocabulary is not None:
        task.vocabulary.save(output_dir / VOCABULARY_FILE)


def check_vocabulary(options: TrainOptions, task: Task) -> None:
    """A checkpoint's token ids must mean the same characters: ConfigError, on every rank and before any of them starts."""
    if not isinstance(task, PromptFileTask) or task.vocabulary is None or not (options.resume or options.load):
        return
    run_dir = checkpoint_directory(options).parent
    if (run_dir / VOCABULARY_FILE).exists():
        task.vocabulary.check_saved(run_dir / VOCABULARY_FILE)


def announce(options: TrainOptions, config: PolicyLossConfig, trainer) -> None:
    """One line: what is trained, on which layout, under which contract; then the warnings."""
    groups = trainer.groups
    sizes = {"DP": groups.dp.size(), "TP": groups.tp.size(), "CP": groups.cp.size(), "PP": groups.pp.size()}
    layout = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one rank"
    low, high = config.resolved_clip_ratios()
    switches = {"fused": config.fused_lm_head_loss, "fp32": config.fp32_lm_head}
    kinds = " ".join(name for name, is_on in switches.items() if is_on)
    head = f", {kinds} head" if kinds else ""
    samples = (
        "recorded rollouts" if options.rollouts else f"{options.prompts_per_rollout} prompts x {config.samples_per_prompt} samples"
    )
    if config.docs_per_step is not None:
        samples += f", {config.docs_per_step} documents a step"
    elif not options.rollouts:
        samples += f", {options.steps_per_rollout} steps a rollout"
    probe = trainer.probe
    print(
        f"megatron_rl: {config.policy_loss}, {config.loss_aggregation}, clip {low:g}/{high:g}{head} | {samples} | {layout}, "
        f"{trainer.device.type} | megatron-core {probe.megatron_version}, {probe.contract}: gradient x {probe.ratio:.6f}, PASS",
        file=sys.stderr,
        flush=True,
    )
    for line in config_warnings(config):
        logging.getLogger(__name__).warning(line)


def report(options: TrainOptions, config: PolicyLossConfig, outcome) -> None:
    """The picture and the closing line, or one JSON object on stdout."""
    output_dir = Path(options.output_dir)
    metrics = output_dir / METRICS_FILE
    plot = None
    if options.plot and outcome.progress.num_steps:
        plot = output_dir / PLOT_FILE
        plot_curves(metrics, plot, f"{config.policy_loss}, {config.loss_aggregation}", x_axis=options.x_axis)
    progress = outcome.progress
    if options.json:
        summary = {
            **asdict(replace(progress)),
            "reason": outcome.reason,
            "seconds": round(outcome.seconds, 3),
            "metrics": str(metrics),
            "plot": None if plot is None else str(plot),
            "checkpoint": None if outcome.checkpoint is None else str(outcome.checkpoint),
        }
        print(json.dumps(summary), flush=True)
        return
    if progress.first_reward is None:
        print(f"megatron_rl: {outcome.reason}; nothing was trained", file=sys.stderr)
        return
    places = ", ".join(str(path) for path in (metrics, plot, outcome.checkpoint) if path is not None)
    print(
        f"megatron_rl: {outcome.reason}; mean reward {progress.first_reward:.3f} -> {progress.last_reward:.3f} in "
        f"{progress.num_rollouts} rollouts, {progress.num_steps} steps, {outcome.seconds:.0f} s\nmegatron_rl: {places}",
        file=sys.stderr,
        flush=True,
    )


def quiet_megatron() -> None:
    """Megatron-Core warns at import of what it does without (Transformer Engine, apex); `doctor` is the place for that."""
    warnings.filterwarnings("ignore", module=r"megatron\..*")
    warnings.filterwarnings("ignore", module=r"torch\..*")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    logging.getLogger("megatron.core.dist_checkpointing").setLevel(logging.CRITICAL)  # what it logs it raises too
