"""One run of `megatron-rl train` on this rank: ranks, trainer, rollouts and output directory, put together; then the loop.

It must never read a flag.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from filelock import FileLock

from megatron_rl.config import PolicyLossConfig
from megatron_rl.errors import RunError
from megatron_rl.layout.agreement import is_lost_rank
from megatron_rl.megatron.ranks import initialize_ranks
from megatron_rl.train import checkpoints
from megatron_rl.train.collection import Evaluation, SampledRollouts
from megatron_rl.train.hf_weights import read_hf_model
from megatron_rl.train.loop import Outcome, Start, TrainingRun
from megatron_rl.train.options import (
    CHECKPOINT_DIRECTORY,
    TrainOptions,
    changed_settings,
    experts_of,
    model_vocab_size,
    settings_of,
)
from megatron_rl.train.output_dir import LOCK_FILE, take_output_dir
from megatron_rl.train.replay import ReplayedRollouts
from megatron_rl.train.rollout_files import cut_rollouts, load_rollouts
from megatron_rl.train.tasks import Task
from megatron_rl.train.trainer import PolicyTrainer, TrainerSettings
from megatron_rl.train.user_tasks import PromptFileTask
from megatron_rl.validation import config_warnings
from megatron_rl.validation.advice import numbers_in_words


def train(options: TrainOptions, config: PolicyLossConfig, task: Task, on_start: Callable[[], None]) -> Outcome:
    """on_start: called when everything is ready, before the first step."""
    eval_task = None
    if options.eval_prompts is not None and isinstance(task, PromptFileTask):
        # It may have no other characters than --prompts, and other ids below --vocab-size.
        eval_task = task.with_prompts_of(options.eval_prompts, options.vocab_size)
    checkpoints.check_can_save()
    device = initialize_ranks(
        tensor_model_parallel_size=options.tensor_model_parallel_size,
        pipeline_model_parallel_size=options.pipeline_model_parallel_size,
        context_parallel_size=options.context_parallel_size,
        expert_model_parallel_size=options.expert_model_parallel_size,
        seed=options.seed,
    )
    settings = trainer_settings(options, [task, *([] if eval_task is None else [eval_task])], device)
    # Held until this function ends; the kernel drops it with the process, by kill -9 too.
    lock = FileLock(Path(options.output_dir) / LOCK_FILE, blocking=False)
    with says_why_it_ends():
        trainer = PolicyTrainer(settings, config, device)
        checkpoints.on_first_rank(partial(take_output_dir, lock, options, task))
        start, changes = restore(trainer, options)
        rollouts = rollouts_of(trainer, task, options, first=start.progress.num_rollouts)
        evaluation = None if eval_task is None else Evaluation(trainer, eval_task, options)
        training = TrainingRun(trainer, rollouts, options, start, evaluation=evaluation)
        if options.save_rollouts is not None:
            checkpoints.on_first_rank(partial(cut_rollouts, options.save_rollouts, start.progress.num_rollouts))
        if dist.get_rank() == 0:
            announce(options, trainer, changes)
        on_start()
        outcome = training.run()
        if options.save_hf is not None and outcome.exit_code == 0:
            trainer.save_hf(options.save_hf)
        return outcome


@contextmanager
def says_why_it_ends() -> Iterator[None]:
    """RunError for Ctrl-C and for a lost rank; then the groups of ranks are destroyed."""
    try:
        yield
    except KeyboardInterrupt as error:  # before the run, after it, or the second Ctrl-C of one
        raise RunError("stopped by Ctrl-C; if a checkpoint is there, the same line with --resume goes on") from error
    except RuntimeError as error:
        if not is_lost_rank(error):
            raise
        first_line = str(error).partition("\n")[0]
        raise RunError(f"another rank ended, or did not come in time: its own message says why ({first_line})") from error
    finally:
        dist.destroy_process_group()


def trainer_settings(options: TrainOptions, tasks: Sequence[Task], device: torch.device) -> TrainerSettings:
    """The options of the same names, and what follows from the task and the device."""
    given = {field.name: getattr(options, field.name) for field in fields(TrainerSettings) if hasattr(options, field.name)}
    recorded = None if options.rollouts is None else next(load_rollouts(options.rollouts)).vocab_size
    given["vocab_size"] = model_vocab_size(options, max(task.vocab_size for task in tasks), recorded)
    given["max_sequence_length"] = max(task.max_prompt_tokens + task.max_new_tokens for task in tasks)
    given["bf16"] = device.type == "cuda" if options.bf16 is None else options.bf16
    given["experts"] = experts_of(options)
    if options.lr_decay_style != "constant":
        given["lr_decay_iters"] = (options.num_rollouts or 0) * options.steps_per_rollout
    given["hf_model"] = None if options.hf_checkpoint is None else read_hf_model(options.hf_checkpoint)
    return TrainerSettings(**given)


def rollouts_of(trainer: PolicyTrainer, task: Task, options: TrainOptions, *, first: int) -> SampledRollouts | ReplayedRollouts:
    """Those of --rollouts from index `first` on, or such as the policy samples."""
    if options.rollouts:
        return ReplayedRollouts(options, trainer, first=first)
    assert trainer.config.samples_per_prompt is not None, "with_group_size gives one"
    return SampledRollouts(trainer, task, options, trainer.config.samples_per_prompt)


def restore(trainer: PolicyTrainer, options: TrainOptions) -> tuple[Start, list[str]]:
    """Where the run begins, and a line for each setting that is not the checkpoint's. Loads the weights of the checkpoint."""
    if not options.resume:
        return Start(), []
    counters = trainer.load(checkpoints.latest_checkpoint(Path(options.output_dir) / CHECKPOINT_DIRECTORY))
    start = Start.from_counters(counters)
    return start, changed_settings(counters["settings"], settings_of(options, trainer.config), start.progress.num_steps)


def announce(options: TrainOptions, trainer: PolicyTrainer, lines: list[str]) -> None:
    """One line: what is trained, on which layout, under which contract; then `lines`, and the warnings."""
    groups, probe, settings, config = trainer.groups, trainer.probe, trainer.settings, trainer.config
    sizes = {"DP": groups.dp.size(), "TP": groups.tp.size(), "CP": groups.cp.size(), "PP": groups.pp.size()}
    if options.num_experts is not None:
        sizes["EP"] = options.expert_model_parallel_size
    layout = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one rank"
    kind = "GPT" if settings.hf_model is None else settings.hf_model.architecture
    dtype = "bfloat16" if settings.bf16 else "float32"
    samples = f"{options.prompts_per_rollout} prompts x {config.samples_per_prompt} samples"
    samples = "recorded rollouts" if options.rollouts else samples
    if config.docs_per_step is not None:
        samples += f", {config.docs_per_step} documents a step or more"
    else:
        samples += f", {options.steps_per_rollout} steps a rollout"
    if options.top_p < 1.0:
        samples += f", top-p {options.top_p:g}: log-probabilities over the kept ids"
    print(
        f"megatron_rl: {config.policy_loss}, {config.loss_aggregation}, {numbers_in_words(config)} | "
        f"{kind} of {settings.num_layers} layers x {settings.hidden_size}, {dtype}, lr {options.lr:g} | {samples} | "
        f"{layout}, {trainer.device.type} | "
        f"megatron-core {probe.megatron_version}, {probe.contract}: gradient x {probe.ratio:.6f}, PASS",
        file=sys.stderr,
        flush=True,
    )
    for line in [*lines, *config_warnings(config)]:
        logging.getLogger(__name__).warning(line)
