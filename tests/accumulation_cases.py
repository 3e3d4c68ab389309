"""Streams of micro-batches, and what one rank makes of its own; functions of ranks, and never an assertion of their own."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from helpers import counted_collectives, error_of

from megatron_rl import accumulation
from megatron_rl.accumulation import AccumulatedStep, AccumulationSettings, StepAccumulator, make_accumulation_group
from megatron_rl.aggregation import count_step, sample_token_weights
from megatron_rl.layout.groups import SINGLE

MODES = [True, False]
THREAD_NAME = "docs-per-step"


@dataclass(frozen=True)
class Document:
    """What accumulation may look at of a sample, and a number to tell it by."""

    index: int
    prompt_id: str = "p"
    loss_mask: tuple[int, ...] = (1,)


def stream_of(sizes: Sequence[int], first: int = 0, group: int | None = None) -> list[list[Document]]:
    """Micro-batches of these sizes with documents first, first + 1, ...; `group` of them in a row share a prompt."""
    numbers = iter(range(10**6))
    made = []
    for size in sizes:
        indices = [next(numbers) for _ in range(size)]
        names = [f"{first}/{index if group is None else index // group}" for index in indices]
        made.append([Document(first + index, name) for index, name in zip(indices, names, strict=True)])
    return made


def streams_of(sizes: Sequence[Sequence[int]], group: int | None = None) -> list[list[list[Document]]]:
    """A stream for each rank; rank r's documents are numbered from 1000 r."""
    return [stream_of(row, 1000 * rank, group) for rank, row in enumerate(sizes)]


def plain(step: AccumulatedStep) -> tuple[int, bool, list[list[int]]]:
    """(documents of all ranks, whether the step is full, this rank's micro-batches as document numbers)."""
    return step.num_documents, step.is_full, [[document.index for document in part] for part in step.microbatches]


_GROUPS: dict = {}


def shared_group():
    """One accumulation group for all calls of a layout: hundreds of examples need no group each."""
    world = dist.group.WORLD
    if world not in _GROUPS:
        _GROUPS[world] = make_accumulation_group(world)
    return _GROUPS[world]


def accumulate(stream: Iterable, settings: dict, **options) -> StepAccumulator:
    """On this rank of a world that is the data-parallel group, or on one process."""
    groups = {"dp_group": dist.group.WORLD, "group": shared_group()} if dist.is_initialized() else {"dp_group": SINGLE}
    return StepAccumulator(stream, AccumulationSettings(**settings), **groups | options)


def steps_on_rank(rank, cases, prefetch):
    """The steps of each case: (streams, settings)."""
    answers = []
    for streams, settings in cases:
        with accumulate(streams[rank], settings, prefetch=prefetch) as steps:
            answers.append([plain(step) for step in steps])
            answers[-1] += [plain(step) for step in steps]  # the end stays the end
    return answers


def errors_on_rank(rank, streams, settings, prefetch):
    """(steps before the error, the error, the error of asking once more)."""
    done = []
    with accumulate(streams[rank], settings, prefetch=prefetch) as steps:
        first = error_of(lambda: done.extend(plain(step) for step in steps))
        return done, first, error_of(lambda: next(steps))


class Unreadable(Sequence):
    """A stream whose micro-batch number `at` cannot be read, or is no sequence."""

    def __init__(self, parts: Sequence, at: int, kind: str = "raises"):
        self._parts, self._at, self._kind = parts, at, kind

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, index: int):
        if index == self._at and self._kind == "raises":
            raise OSError("disk on fire")
        return 7 if index == self._at else self._parts[index]


def settings_on_rank(rank, of_rank, state):
    return error_of(lambda: accumulate([], of_rank[rank], state=state[rank]))


def weights_on_rank(rank, streams, settings, aggregations):
    """(index, tokens, weight) of this rank's documents in each step, by each aggregation."""
    answers = []
    with accumulate(streams[rank], settings) as steps:
        for step in steps:
            totals, tokens, of_prompts = step.count(dist.group.WORLD)
            rows = {}
            for name, divisor in aggregations:
                weights = sample_token_weights(name, tokens, totals, prompt_token_counts=of_prompts, divisor=divisor)
                rows[name] = [(d.index, weight) for d, weight in zip(step.samples, weights.tolist(), strict=True)]
            answers.append((totals, rows, [len(part) for part in step.split(tokens.tolist())]))
    return answers


def collectives_on_rank(rank, streams, settings, prefetch):
    """(name, shape, whether it ran over the group of accumulation) of each collective of making, steps and end."""
    group = shared_group()
    with counted_collectives() as calls:
        with accumulate(streams[rank], settings, prefetch=prefetch) as steps:
            at_making = len(calls)
            num_microbatches = [len(step.microbatches) for step in steps]
        calls = list(calls)
    rows = [(name, shape, used is group) for name, shape, used in calls]
    return num_microbatches, rows[:at_making], rows[at_making:]


def static_collectives_on_rank(rank, stream):
    """Collectives and threads of a step that does not use the accumulator, although it is imported."""
    masks = [list(document.loss_mask) for part in stream for document in part]
    import torch

    with counted_collectives() as calls:
        count_step([torch.tensor(mask) for mask in masks], None, dist.group.WORLD)
        threads = [thread.name for thread in threading.enumerate()]
        return [name for name, _, _ in calls], THREAD_NAME in threads


def round_events_on_rank(rank, sizes):
    """What happens in which order on this rank: reads, launches and waits of a prefetched step, without its end."""
    events = []
    launch = dist.all_reduce

    class Work:
        def __init__(self, work):
            self._work = work

        def wait(self):
            events.append("wait")
            return self._work.wait()

    def stream() -> Iterator[list[Document]]:
        for number, part in enumerate(stream_of(sizes)):
            events.append(f"read {number}")
            yield part

    def launching(*args, **kwargs):
        events.append("launch")
        return Work(launch(*args, **kwargs))

    steps = accumulate(stream(), {"docs_per_step": 2 * sum(sizes)})
    dist.all_reduce = launching
    try:
        next(steps)
        return list(events)
    finally:
        dist.all_reduce = launch
        steps.close()


def close_on_rank(rank, streams, settings, num_steps, forget):
    """(whether a thread is left, whether the end is quiet) after a loop that was left early, without its end being asked for."""
    steps = accumulate(streams[rank], settings)
    for _ in range(num_steps):
        next(steps)
    thread = steps._worker.thread
    if forget:
        del steps
        gc.collect()
        thread.join(accumulation.CLOSE_SECONDS)
        return thread.is_alive(), True
    steps.close()
    return thread.is_alive(), next(steps, None) is None


def one_rank_closes_on_rank(rank, streams, settings):
    """Rank 1 leaves after a step; the others go on until something ends them."""
    with accumulate(streams[rank], settings) as steps:
        next(steps)
        if rank == 1:
            return "closed"
        return error_of(lambda: list(steps))


def killed_on_rank(rank, streams, settings, num_steps, state_file, at):
    """Saves its state after `num_steps` steps; rank 1 then dies while it reads micro-batch `at` of its stream."""
    saved = threading.Event()

    def stream():
        for number, part in enumerate(streams[rank]):
            if number == at and rank == 1:
                saved.wait()
                os.kill(os.getpid(), signal.SIGKILL)
            yield part

    steps = accumulate(stream(), settings)
    for _ in range(num_steps):
        next(steps)
    state = steps.state_dict()
    if rank == 1:
        with contextlib.suppress(FileExistsError):
            Path(state_file).write_text(json.dumps(state))
    saved.set()
    list(steps)


def resumed_on_rank(rank, streams, settings, state_file, is_positioned):
    state = json.loads(Path(state_file).read_text())
    stream = streams[rank][state["positions"][rank] :] if is_positioned else streams[rank]
    with accumulate(stream, settings, state=state, is_positioned=is_positioned) as steps:
        return [plain(step) for step in steps], steps.state_dict()


def state_after_on_rank(rank, streams, settings, num_steps, prefetch):
    with accumulate(streams[rank], settings, prefetch=prefetch) as steps:
        for _ in range(num_steps):
            next(steps)
        return steps.state_dict()


def gradients_on_rank(rank, parts_of_rank, settings):
    """(dp ranks of the accumulation's group, [gradient of each step]) of a real model, by the loop of accumulation's docstring."""
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from trainer_cases import CPU, NO_CLIPPING, NO_MOVE, gradients_of, ragged_step, tiny_trainer, with_shifted_old_log_probs

    from megatron_rl.config import PolicyLossConfig
    from megatron_rl.megatron.batch import StepContext, make_padded_batch, weigh_samples
    from megatron_rl.megatron.forward_step import make_forward_step

    config = PolicyLossConfig(policy_loss="gspo", loss_aggregation="prompt_mean")
    trainer = tiny_trainer(config, clip_grad=NO_CLIPPING, lr=NO_MOVE)
    model, optimizer, groups = trainer.model, trainer.optimizer, trainer.groups
    [samples] = with_shifted_old_log_probs(trainer, [ragged_step()], shift=3e-4)
    stream = [[samples[index] for index in part] for part in parts_of_rank[groups.dp.rank()]]
    forward_step = make_forward_step(config, vocab_size=trainer.settings.vocab_size)
    shapes = {"num_rows": 6, "row_length": 12, "cp_group": groups.cp, "device": CPU}
    sizes = {"seq_length": 12, "micro_batch_size": 6, "forward_only": False}
    gradients = []
    with StepAccumulator(stream, AccumulationSettings(**settings)) as steps:
        for step in steps:
            weighted, totals = weigh_samples(config, step.samples, groups)
            context = StepContext(totals=totals, num_microbatches=len(step.microbatches))
            batches = [make_padded_batch(part, context, **shapes) for part in step.split(weighted)]
            model.zero_grad_buffer()
            optimizer.zero_grad()
            get_forward_backward_func()(
                forward_step_func=forward_step, data_iterator=iter(batches), model=model, num_microbatches=len(batches), **sizes
            )
            optimizer.step()
            gradients.append(gradients_of(trainer))
    group = make_accumulation_group()
    ranks = [dist.get_process_group_ranks(group)] if group is not SINGLE else []
    return ranks == [dist.get_process_group_ranks(groups.dp)] * len(ranks), gradients
