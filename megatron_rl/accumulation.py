"""Assembles optimiser steps of a wanted number of documents from streams of micro-batches (`--docs-per-step`); it must never
weight a loss nor keep a count that a step divides by: count_step takes those from the whole step's samples.

    with StepAccumulator(stream, AccumulationSettings(docs_per_step=256)) as steps:  # on every rank
        for step in steps:
            samples, totals = weigh_samples(config, step.samples, groups)  # the counts of what the step really holds
            context = StepContext(totals=totals, num_microbatches=len(step.microbatches))
            batches = [make_packed_batch(part, context, **shapes) for part in step.split(samples)]
            optimizer.zero_grad()
            get_forward_backward_func()(
                forward_step_func=forward_step, data_iterator=iter(batches), model=model, num_microbatches=len(batches), **sizes
            )
            optimizer.step()
            save(weights, steps.state_dict())  # StepAccumulator(..., state=...) goes on from there
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
# How late Ctrl-C may come through while a step is waited for.
SIGNAL_SECONDS = 0.5


def make_accumulation_group(dp_group: Group | None = None, *, timeout: datetime.timedelta | None = None) -> Group:
    """A gloo group of the ranks of `dp_group` for counts alone: they stay off the GPU and out of the order of other groups.

    Made by torch.distributed.new_group, once for each data-parallel group: every rank of the world calls it, in the same order
    among the makings of groups. It lives as long as torch.distributed. Communication: one all-gather over the world; none at dp 1.
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
    """Iterator over steps. Every rank makes one, with its own data-parallel rank's stream (tp, cp and pp ranks: the same one).

    Round after round each rank fetches a micro-batch, until the global number of documents reaches the target. Ranks whose
    stream has ended, or whose prompt groups are whole while others' are not, give empty micro-batches. What was fetched beyond
    the target opens the next step; each rank's order is kept. Micro-batches without a document on any rank are left out.

    prefetch: a thread assembles step n + 1, no more, while n is computed. So the stream must not sample from the policy that
    trains, nor use a group that the main thread uses. prefetch=False reads inline, and (prompt groups by id aside) nothing that
    the step does not need. `group`: one of make_accumulation_group's, to share it; None: made here, where there is a thread or
    dp_group is NCCL. `state`: of state_dict(); the stream is read from its start up to there, or begins there (is_positioned).

    Communication: at the making one all-gather of settings (and the group's); then for each round one asynchronous all-reduce of
    six int64 on the CPU, with prefetch while the next micro-batch is read; one more where the streams, or the thread, end.
    Raises, on all ranks of dp_group in the same step: DataError for a stream that fails on one of them, for a step beyond
    max_microbatches and (prefetch) for a rank that closed early; RuntimeError where a rank died; ConfigError at the making for
    settings that differ. An error stays. Close it, or end the `with`, before torch.distributed is destroyed.
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
        # Kept as it was given: a group that somebody still holds when the interpreter ends may abort it in gloo's threads.
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
        # The thread does not know this object, so that it is collected, and the thread told, when nobody else does.
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
        """What has been handed out, equal on all ranks and fit for JSON; what is only prefetched does not count.

        Every rank calls it, from its main thread. Communication: one all-gather of one int64 over dp_group.
        """
        dp_group = resolve_group(self._given_dp_group, "dp")
        position = torch.tensor([self._position], device=group_device(dp_group))
        positions = all_gather_stack(position, dp_group).flatten().tolist()
        return {"num_steps": self._num_steps, "num_documents": self._num_documents, "positions": positions}

    def close(self) -> None:
        """Ends the iteration and the thread, on whichever ranks: peers that want another step get an error instead of waiting."""
        if self._end is None:
            self._end = StopIteration()
        if self._worker is not None and self._finalizer is not None and self._finalizer.detach():
            self._worker.stop()
            self._worker.thread.join(CLOSE_SECONDS)
            if self._worker.thread.is_alive():
                logger.warning(
                    f"the docs-per-step thread still waits for its stream or a peer after {CLOSE_SECONDS:g} s: left alone"
                )
        self._worker = self._assembler = None  # and with them the group

    def __enter__(self) -> StepAccumulator:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _Worker:
    """The thread: one step for each `wanted`, into `ready`, until the end, an error or `stop`."""

    def __init__(self, assembler: Assembler):
        self.wanted = threading.Semaphore(0)
        self.ready: queue.SimpleQueue[AccumulatedStep | BaseException | None] = queue.SimpleQueue()
        self._assembler = assembler
        # A daemon: a stream that blocks for ever must not keep the process alive.
        self.thread = threading.Thread(target=self._run, name="docs-per-step", daemon=True)
        self.thread.start()

    def get(self) -> AccumulatedStep | BaseException | None:
        while True:  # Python looks for signals here: one that arrives just before a wait does not end that wait
            with contextlib.suppress(queue.Empty):
                return self.ready.get(timeout=SIGNAL_SECONDS)

    def stop(self) -> None:
        """Does not wait. The thread takes part in one more round, to tell its peers."""
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
    """The next step, or what it raises: the thread's errors are the main thread's to raise, and each of them stays."""
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
            f"state holds the positions of {len(positions)} data-parallel streams, there are {dp_group.size()} now: deal out what "
            f"follows the first {state['num_documents']} documents, and pass positions of 0 with is_positioned=True"
        )
    return state["num_steps"], state["num_documents"], positions[dp_group.rank()]


def _check_agreement(group: Group, values: dict[str, int]) -> None:
    """Ranks that want unlike steps would wait for each other's rounds."""
    rows = all_gather_stack(torch.tensor(list(values.values()), dtype=torch.int64, device="cpu"), group).tolist()
    columns = zip(values, zip(*rows, strict=True), strict=True)
    problems = [f"{name} differs between data-parallel ranks: {list(column)}" for name, column in columns if len(set(column)) > 1]
    if problems:
        raise ConfigError(problems)
