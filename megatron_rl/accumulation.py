"""Assembles optimiser steps of a given number of documents from streams of micro-batches (`--docs-per-step`).

It weights no loss and counts no denominator: count_step counts the samples of the whole step.

    with StepAccumulator(stream, AccumulationSettings(docs_per_step=256)) as steps:  # on every rank
        for step in steps:
            samples, totals = weigh_samples(config, step.samples, groups)  # the counts of the samples in this step
            context = StepContext(totals=totals, num_microbatches=len(step.microbatches))
            batches = [make_packed_batch(part, context, **shapes) for part in step.split(samples)]
            optimizer.zero_grad()
            get_forward_backward_func()(
                forward_step_func=forward_step, data_iterator=iter(batches), model=model, num_microbatches=len(batches), **sizes
            )
            optimizer.step()
            save(weights, steps.state_dict())  # StepAccumulator(..., state=...) continues from there
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import queue
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.accumulation_rounds import AccumulatedStep, AccumulationSettings, Assembler
from megatron_rl.errors import ConfigError
from megatron_rl.layout.groups import (
    SINGLE,
    Group,
    all_gather_stack,
    check_dp_group_excludes_cp,
    group_device,
    process_group,
    resolve_group,
    world_group,
)

logger = logging.getLogger(__name__)

# How long close() waits for a stream or a peer that does not answer. Peers that close too answer within milliseconds.
CLOSE_SECONDS = 5.0
# The longest delay of Ctrl-C while a rank waits for a step.
SIGNAL_SECONDS = 0.5


def make_accumulation_group(dp_group: Group | None = None, *, timeout: datetime.timedelta | None = None) -> Group:
    """A gloo group of the ranks of `dp_group` for counts: they need no GPU and do not wait behind collectives of other groups.

    torch.distributed.new_group makes one for each data-parallel group. So every rank of the world calls this function, in the same
    order as its other calls of new_group. The group lives as long as torch.distributed.
    Communication: one all-gather over the world; none at dp 1.
    """
    dp_group = resolve_group(dp_group, "dp")
    if dp_group.size() == 1:
        return SINGLE
    world = world_group()
    ranks = torch.tensor(dist.get_process_group_ranks(process_group(dp_group)), device=group_device(world))
    members = sorted({tuple(row) for row in all_gather_stack(ranks, world).tolist()})
    groups: dict[tuple[int, ...], Group] = {row: dist.new_group(list(row), backend="gloo", timeout=timeout) for row in members}
    return groups[tuple(ranks.tolist())]


class StepAccumulator(Iterator[AccumulatedStep]):
    """Iterator over steps. Every rank makes one with the stream of its data-parallel rank (the tp, cp and pp ranks share it).

    In each round each rank fetches a micro-batch, until the global number of documents reaches the target. A rank gives an empty
    micro-batch when its stream has ended, or when its prompt groups are whole and another rank's are not. A micro-batch that was
    fetched beyond the target opens the next step. The order of each stream is kept. Rounds without a document are left out.

    prefetch: a thread assembles step n + 1, no further, while step n is computed. So the stream must not sample from the policy
        that trains, and must not use a group that the main thread uses. False: the stream is read inline, and only as far as the
        step needs (one micro-batch further for prompt groups by id).
    group: a group of make_accumulation_group, to share it. None: one is made where there is a thread or dp_group is NCCL.
    state: what state_dict() returned. The stream is read from its start up to that position, or begins there (is_positioned).

    Communication: in the constructor one all-gather of settings (and that of make_accumulation_group). Each round: one
    asynchronous all-reduce of six int64 on the CPU; with prefetch the next micro-batch is read meanwhile. One more round where the
    streams, or the thread, end.
    Raises, on all ranks of dp_group in the same step: DataError when a stream fails on one rank, when a step exceeds
    max_microbatches, and (prefetch) when a rank closed early; RuntimeError when a rank died. The constructor raises ConfigError
    for settings that differ between ranks. After an error each further call raises it again. Call close(), or leave the `with`
    block, before torch.distributed is destroyed.
    """

    def __init__(
        self,
        stream: Iterable[Sequence[Any]],
        settings: AccumulationSettings,
        *,
        dp_group: Group | None = None,
        group: Group | None = None,
        prefetch: bool = True,
        state: dict[str, Any] | None = None,
        is_positioned: bool = False,
    ):
        # Kept as it was given: a resolved group that is still referenced at exit may abort the interpreter in a thread of gloo.
        self._given_dp_group, dp_group = dp_group, resolve_group(dp_group, "dp")
        check_dp_group_excludes_cp(dp_group)
        if group is None:
            needs_own = prefetch or group_device(dp_group).type != "cpu"
            group = make_accumulation_group(dp_group) if needs_own else dp_group
        if group.size() != dp_group.size() or group_device(group).type != "cpu":
            raise ConfigError("group must be a gloo group of dp_group's ranks: take it from make_accumulation_group(dp_group)")
        self._num_steps, self._num_documents, self._position = _read_state(state, dp_group)
        _check_agreement(group, settings.as_numbers() | {"prefetch": int(prefetch), "num_steps": self._num_steps})
        to_skip = 0 if is_positioned else self._position
        assembler = Assembler(stream, settings, group, position=self._position, num_to_skip=to_skip, reads_ahead=prefetch)
        self._assembler: Assembler | None = assembler
        self._worker = worker = _Worker(assembler) if prefetch else None
        self._end: BaseException | None = None
        self._is_first = True
        # The thread holds no reference to this object, so that the object can be collected, which stops the thread.
        self._finalizer = None if worker is None else weakref.finalize(self, worker.stop)

    def __next__(self) -> AccumulatedStep:
        if self._end is not None:
            raise self._end
        if self._worker is None:
            outcome = None if self._assembler is None else _outcome_of(self._assembler)
        else:
            if self._is_first:
                self._worker.wanted.release()
            self._is_first = False
            outcome = self._worker.get()
        if not isinstance(outcome, AccumulatedStep):
            self._end = StopIteration() if outcome is None else outcome
            raise self._end
        if self._worker is not None:
            self._worker.wanted.release()
        self._num_steps += 1
        self._num_documents += outcome.num_documents
        self._position = outcome.position
        return outcome

    def state_dict(self) -> dict[str, Any]:
        """The position after the steps that were handed out, equal on all ranks and fit for JSON. Prefetched steps do not count.

        Every rank calls it, from its main thread. Communication: one all-gather of one int64 over dp_group.
        """
        dp_group = resolve_group(self._given_dp_group, "dp")
        position = torch.tensor([self._position], device=group_device(dp_group))
        positions = all_gather_stack(position, dp_group).flatten().tolist()
        return {"num_steps": self._num_steps, "num_documents": self._num_documents, "positions": positions}

    def close(self) -> None:
        """Ends the iteration and the thread. One rank alone may call it: peers that want another step get an error at once."""
        if self._end is None:
            self._end = StopIteration()
        if self._worker is not None and self._finalizer is not None and self._finalizer.detach():
            self._worker.stop()
            self._worker.thread.join(CLOSE_SECONDS)
            if self._worker.thread.is_alive():
                logger.warning(
                    f"the docs-per-step thread still waits for its stream or a peer after {CLOSE_SECONDS:g} s: left alone"
                )
        self._worker = self._assembler = None  # they hold the group

    def __enter__(self) -> StepAccumulator:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _Worker:
    """The thread. It puts one step into `ready` for each release of `wanted`, until the end, an error or `stop`."""

    def __init__(self, assembler: Assembler):
        self.wanted = threading.Semaphore(0)
        self.ready: queue.SimpleQueue[AccumulatedStep | BaseException | None] = queue.SimpleQueue()
        self._assembler = assembler
        # A daemon, so that a stream that blocks for ever does not keep the process alive.
        self.thread = threading.Thread(target=self._run, name="docs-per-step", daemon=True)
        self.thread.start()

    def get(self) -> AccumulatedStep | BaseException | None:
        while True:  # Python handles signals between waits: one that arrives just before a wait does not end that wait
            with contextlib.suppress(queue.Empty):
                return self.ready.get(timeout=SIGNAL_SECONDS)

    def stop(self) -> None:
        """Tells the thread to stop, without waiting. The thread takes part in one more round, to tell its peers."""
        self._assembler.is_stopping.set()
        self.wanted.release()

    def _run(self) -> None:
        is_alive = True
        while is_alive:
            self.wanted.acquire()
            outcome = _outcome_of(self._assembler)
            is_alive = isinstance(outcome, AccumulatedStep)
            self.ready.put(outcome)


def _outcome_of(assembler: Assembler) -> AccumulatedStep | BaseException | None:
    """The next step, or the exception of its assembly, which the main thread raises."""
    try:
        return assembler.next_step()
    except BaseException as error:
        return error


def _read_state(state: dict[str, Any] | None, dp_group: Group) -> tuple[int, int, int]:  # steps, documents, this rank's position
    if state is None:
        return 0, 0, 0
    names = {"num_steps", "num_documents", "positions"}
    if not names <= state.keys():
        raise ConfigError(f"state={state} must be what state_dict() returned: it lacks {sorted(names - state.keys())}")
    positions = state["positions"]
    if len(positions) != dp_group.size():
        raise ConfigError(
            f"state holds the positions of {len(positions)} data-parallel streams, there are {dp_group.size()} now: divide what "
            f"follows the first {state['num_documents']} documents among them, and pass positions of 0 with is_positioned=True"
        )
    return state["num_steps"], state["num_documents"], positions[dp_group.rank()]


def _check_agreement(group: Group, values: dict[str, int]) -> None:
    """Raises ConfigError where settings differ: these ranks would wait for each other's rounds."""
    rows = all_gather_stack(torch.tensor(list(values.values()), dtype=torch.int64, device="cpu"), group).tolist()
    columns = zip(values, zip(*rows, strict=True), strict=True)
    problems = [f"{name} differs between data-parallel ranks: {list(column)}" for name, column in columns if len(set(column)) > 1]
    if problems:
        raise ConfigError(problems)
