"""`megatron-rl train`: flags in, a trained policy, metrics.jsonl, curves and checkpoints out. It must never hold training logic.

What needs torch is imported inside functions, so that `train --help` answers at once, and without torch.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any

from megatron_rl.arguments import add_megatron_rl_args, validate_megatron_rl_args
from megatron_rl.commands.start_signals import hand_over
from megatron_rl.config import AdvantageNormalization, PolicyLossConfig, Route
from megatron_rl.errors import ConfigError, RunError
from megatron_rl.loss_hub import numbers_in_words
from megatron_rl.training.options import PLOT_FILE, TrainOptions, add_train_args, experts_of, model_vocab_size, set_preset_defaults
from megatron_rl.training.plots import plot_curves
from megatron_rl.training.run_lock import RunLock
from megatron_rl.training.settings_record import changed_settings, settings_of
from megatron_rl.training.tasks import Task, make_task
from megatron_rl.training.user_tasks import PromptFileTask
from megatron_rl.training.writers import METRICS_FILE, names_what_cannot_be_written
from megatron_rl.validation import config_warnings


def add_arguments(parser: ArgumentParser, arguments: Sequence[str]) -> None:
    add_megatron_rl_args(parser, arguments)
    add_train_args(parser)
    set_preset_defaults(parser, arguments)


def run(args: Namespace) -> int:
    from megatron_rl.training.output_dir import check_vocabulary

    logging.basicConfig(level=logging.WARNING, format="megatron_rl: %(message)s")
    quiet_megatron()
    options, config = read_settings(args, int(os.environ.get("WORLD_SIZE", "1")))
    task = make_task(
        options.task,
        prompts=options.prompts,
        reward=options.reward,
        max_new_tokens=options.max_new_tokens,
        end_token=options.end_token,
        hf_checkpoint=options.hf_checkpoint,
        vocab_size=options.vocab_size,
    )
    check_vocabulary(options, task)
    outcome = train(options, config, task, evaluation_task(options, task))
    if os.environ.get("RANK", "0") == "0":
        report(options, config, outcome)
    return outcome.exit_code


def read_settings(args: Namespace, world_size: int) -> tuple[TrainOptions, PolicyLossConfig]:
    """Both groups of flags, checked; one ConfigError with the problems of both."""
    from megatron_rl.training.option_rules import train_options

    found: list[Any] = []
    problems: list[str] = []
    for read in (partial(train_options, vars(args), world_size=world_size), partial(validate_megatron_rl_args, args, Route.TRAIN)):
        try:
            found.append(read())
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return found[0], found[1]


def evaluation_task(options: TrainOptions, task: Task):  # -> PromptFileTask | None
    """The task of --eval-prompts, whose characters must be those of --prompts."""
    if options.eval_prompts is None or not isinstance(task, PromptFileTask):
        return None
    return task.with_prompts_of(options.eval_prompts)


def train(options: TrainOptions, config: PolicyLossConfig, task: Task, eval_task: PromptFileTask | None = None):  # -> Outcome
    """Imports Megatron-Core and runs the loop on this rank."""
    import torch.distributed as dist

    from megatron_rl.layout.groups import is_lost_rank
    from megatron_rl.megatron import checkpoints
    from megatron_rl.megatron.trainer import PolicyTrainer, initialize_ranks
    from megatron_rl.training.collection import Evaluation, SampledRollouts
    from megatron_rl.training.loop import TrainingRun
    from megatron_rl.training.output_dir import prepare_output_dir, take_output_dir
    from megatron_rl.training.replay import ReplayedRollouts, ReplayRules

    checkpoints.check_can_save()
    device = initialize_ranks(
        tensor_model_parallel_size=options.tensor_model_parallel_size,
        pipeline_model_parallel_size=options.pipeline_model_parallel_size,
        context_parallel_size=options.context_parallel_size,
        expert_model_parallel_size=options.expert_model_parallel_size,
        expert_tensor_parallel_size=options.expert_tensor_parallel_size,
        seed=options.seed,
    )
    settings = trainer_settings(options, [task, *([] if eval_task is None else [eval_task])], device)
    lock = RunLock()
    try:
        trainer = PolicyTrainer(settings, config, device)
        lines = on_first_rank(partial(take_output_dir, lock, options))
        place, changes = restore(trainer, options, config)
        rollouts: SampledRollouts | ReplayedRollouts
        if options.rollouts:
            first, rules = place["progress"].num_rollouts, ReplayRules.of(options, trainer)
            rollouts = ReplayedRollouts(options.rollouts, rules, first=first, dp_group=trainer.groups.dp)
        elif config.samples_per_prompt is None:
            raise ConfigError("rollouts are sampled in groups of one prompt: give --samples-per-prompt")
        else:
            rollouts = SampledRollouts(trainer, task, options, config.samples_per_prompt)
        evaluation = None if eval_task is None else Evaluation(trainer, eval_task, options, len(eval_task.prompts))
        training = TrainingRun(trainer, rollouts, options, config, evaluation=evaluation, **place)
        lines += changes + on_first_rank(partial(prepare_output_dir, options, task, place["resume_step"]))
        if dist.get_rank() == 0:
            announce(options, config, trainer, lines)
        hand_over()
        outcome = training.run()
        if options.save_hf is not None:
            trainer.save_hf(options.save_hf)
        return outcome
    except RuntimeError as error:
        if not is_lost_rank(error):
            raise
        first_line = str(error).partition("\n")[0]
        raise RunError(f"another rank ended, or did not come in time: its own message says why ({first_line})") from error
    finally:
        lock.release()
        dist.destroy_process_group()


def on_first_rank(work: Callable[[], list[str]]) -> list[str]:
    """What the first rank found, on every rank; what it raised too. Communication: on_all_ranks'."""
    from megatron_rl.layout.groups import on_all_ranks

    return on_all_ranks(work if os.environ["RANK"] == "0" else list)[0]


def trainer_settings(options: TrainOptions, tasks: Sequence[Task], device):  # -> TrainerSettings
    """The options of the same names, and what follows from the task and the device."""
    from megatron_rl.megatron.hf_checkpoint import read_hf_model
    from megatron_rl.megatron.trainer import TrainerSettings
    from megatron_rl.training.rollout_files import recorded_vocab_size

    given = {field.name: getattr(options, field.name) for field in fields(TrainerSettings) if hasattr(options, field.name)}
    recorded = None if options.rollouts is None else recorded_vocab_size(options.rollouts)
    given["vocab_size"] = model_vocab_size(options, max(task.vocab_size for task in tasks), recorded)
    given["max_sequence_length"] = max(task.max_prompt_tokens + task.max_new_tokens for task in tasks)
    given["bf16"] = device.type == "cuda" if options.bf16 is None else options.bf16
    given["experts"] = experts_of(options)
    given["hf_model"] = None if options.hf_checkpoint is None else read_hf_model(options.hf_checkpoint)
    return TrainerSettings(**given)


def restore(trainer, options: TrainOptions, config: PolicyLossConfig) -> tuple[dict, list[str]]:
    """Where TrainingRun begins, and a line for each setting that is not the checkpoint's."""
    from megatron_rl.megatron import checkpoints
    from megatron_rl.training.loop import Progress
    from megatron_rl.training.output_dir import checkpoint_directory

    if not (options.resume or options.load):
        return {"progress": Progress(), "recent_rewards": [], "resume_step": None}, []
    checkpoint = checkpoints.latest_checkpoint(checkpoint_directory(options))
    counters = trainer.load(checkpoint)
    if "progress" not in counters:
        raise ConfigError(f"{checkpoint} holds no progress: it was not saved by `megatron-rl train`")
    progress = Progress(**counters["progress"])
    place = {
        "progress": progress,
        "recent_rewards": counters["recent_rewards"],
        "resume_step": progress.num_steps,
        "stream_state": counters.get("stream"),
        "watchdog_state": counters.get("watchdog"),
    }
    return place, changed_settings(counters.get("settings", {}), settings_of(options, config), progress.num_steps)


def announce(options: TrainOptions, config: PolicyLossConfig, trainer, lines: list[str]) -> None:
    """One line: what is trained, on which layout, under which contract; then `lines`, and the warnings."""
    from megatron_rl.training.document_stream import size_of_steps

    groups = trainer.groups
    sizes = {"DP": groups.dp.size(), "TP": groups.tp.size(), "CP": groups.cp.size(), "PP": groups.pp.size()}
    if options.num_experts is not None:
        sizes |= {"EP": options.expert_model_parallel_size, "ETP": options.expert_tensor_parallel_size or groups.tp.size()}
    layout = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one rank"
    switches = {"fused": config.fused_lm_head_loss, "fp32": config.fp32_lm_head}
    kinds = " ".join(name for name, is_on in switches.items() if is_on)
    head = f", {kinds} head" if kinds else ""
    samples = (
        "recorded rollouts" if options.rollouts else f"{options.prompts_per_rollout} prompts x {config.samples_per_prompt} samples"
    )
    if config.docs_per_step is not None:
        size, why = size_of_steps(options, config, groups.dp.size())
        samples += f", {size} documents a step"
        lines = [*why, *lines]
    elif not options.rollouts:
        samples += f", {options.steps_per_rollout} steps a rollout"
    if not options.rollouts:
        is_divided = options.advantage_normalization == AdvantageNormalization.STD
        samples += f", advantages {'(r - mean) / std' if is_divided else 'r - mean'} of a prompt"
    probe = trainer.probe
    print(
        f"megatron_rl: {config.policy_loss}, {config.loss_aggregation}, {numbers_in_words(config)}{head} | {samples} | {layout}, "
        f"{trainer.device.type} | megatron-core {probe.megatron_version}, {probe.contract}: gradient x {probe.ratio:.6f}, PASS",
        file=sys.stderr,
        flush=True,
    )
    for line in [*lines, *config_warnings(config)]:
        logging.getLogger(__name__).warning(line)


def report(options: TrainOptions, config: PolicyLossConfig, outcome) -> None:
    """The picture and the closing line, or one JSON object on stdout."""
    output_dir = Path(options.output_dir)
    metrics = output_dir / METRICS_FILE
    plot = None
    if options.plot and outcome.progress.num_steps:
        plot = output_dir / PLOT_FILE
        with names_what_cannot_be_written(plot):
            plot_curves(metrics, plot, f"{config.policy_loss}, {config.loss_aggregation}", x_axis=options.x_axis)
    progress = outcome.progress
    if options.json:
        summary = {
            **asdict(progress),
            "reason": outcome.reason,
            "seconds": round(outcome.seconds, 3),
            "metrics": metrics,
            "plot": plot,
            "checkpoint": outcome.checkpoint,
        }
        print(json.dumps(summary, default=str), flush=True)
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
    warnings.filterwarnings("ignore", module=r"(megatron|torch)\..*")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    logging.getLogger("megatron.core.dist_checkpointing").setLevel(logging.CRITICAL)  # what it logs it raises too
