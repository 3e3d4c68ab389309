"""Cuts streams of samples into optimiser steps of a given number of documents (`--docs-per-step`): the one place that does.

`Deal` cuts prompt groups into the micro-batches of each data-parallel rank. `StepAccumulator` takes micro-batches from the ranks'
streams, in rounds, until a step has its documents. It weights no loss: count_step counts the samples of the whole step.

    with StepAccumulator(stream, AccumulationSettings(docs_per_step=256)) as steps:  # on every rank
        for step in steps:
            samples, totals = weigh_samples(config, step.samples, groups)  # EmptyStep on all ranks: nothing trains, go on
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
import itertools
import logging
import queue
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_rl.config import PolicyLossConfig
from megatron_rl.count import StepCounts, count_step
from megatron_rl.errors import ConfigError, DataError
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
from megatron_rl.rollout_groups import Sample, rollouts_of
from megatron_rl.weights import get_loss_aggregation

logger = logging.getLogger(__name__)


# How long close() waits for a stream or a peer that does not answer. Peers that close too answer within milliseconds.
CLOSE_SECONDS = 5.0
# The longest delay of Ctrl-C while a rank waits for a step.
SIGNAL_SECONDS = 0.5
# The most samples that a prompt group of unknown size may add beyond the target: no run samples one prompt so often.
LARGEST_GROUP = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class AccumulationSettings:
    """When a step is complete; equal on all ranks."""

    docs_per_step: int
    """Documents (samples) over all data-parallel ranks at which a step is complete; whole micro-batches, so it may hold more."""
    max_microbatches: int | None = None
    """The most micro-batches of one rank in a step; None: a bound that only streams of empty micro-batches reach."""
    microbatch_multiple: int = 1
    """Empty micro-batches are added up to a multiple of it: microbatch_group_size_per_vp_stage of an interleaved pipeline."""
    keep_prompt_groups: bool = False
    """A step ends where no rank is inside a prompt group. The samples of a group must follow one another in one rank's stream. A
    rollout of several samples is whole then; else a step may hold a part of it, and counts that as a rollout."""
    samples_per_prompt: int | None = None
    """Groups end by counting. None, or samples with a rollout_id: they end where prompt_id changes, which reads one micro-batch
    ahead."""
    drop_last: bool = False
    """Leave out the samples at the end of the streams that do not fill a step: a step of few documents has a large variance."""

    def __post_init__(self) -> None:
        bounds = {"docs_per_step": 1, "max_microbatches": 1, "microbatch_multiple": 1, "samples_per_prompt": 1}
        given = {name: getattr(self, name) for name in bounds}
        optional = ("max_microbatches", "samples_per_prompt")
        wrong = {n: v for n, v in given.items() if not (v is None and n in optional) and (type(v) is not int or v < 1)}
        if wrong:
            raise ConfigError([f"{name}={value!r} must be a whole number of at least 1" for name, value in wrong.items()])

    @classmethod
    def of(cls, config: PolicyLossConfig, **others: Any) -> AccumulationSettings:
        """The settings of the flags. Groups stay whole where the aggregation needs them whole, or their size is declared."""
        size = None if config.allow_partial_prompt_groups else config.samples_per_prompt
        keep = size is not None or get_loss_aggregation(config.loss_aggregation).needs_prompts
        if config.docs_per_step is None:
            raise ConfigError("docs_per_step is not set: static accumulation needs no StepAccumulator")
        return cls(docs_per_step=config.docs_per_step, keep_prompt_groups=keep, samples_per_prompt=size, **others)

    @property
    def bound(self) -> int:
        """max_microbatches, else twice the documents, plus a prompt group: a round without an empty micro-batch has a document."""
        if self.max_microbatches is not None:
            return self.max_microbatches
        return 2 * self.docs_per_step + (0 if not self.keep_prompt_groups else self.samples_per_prompt or LARGEST_GROUP)

    def as_numbers(self) -> dict[str, int]:
        """The settings as integers, to compare ranks; unset is 0."""
        return {field.name: int(getattr(self, field.name) or 0) for field in fields(self)}


@dataclass(frozen=True, kw_only=True, slots=True)
class AccumulatedStep:
    """One step: the micro-batches of this rank. Each rank has the same number of them, and some may be empty."""

    microbatches: list[Sequence[Any]]
    num_documents: int  # over all data-parallel ranks
    is_full: bool  # False: the streams ended before the target
    position: int  # micro-batches that this rank's stream has given to this step and the steps before it

    @property
    def samples(self) -> list[Any]:
        return list(itertools.chain.from_iterable(self.microbatches))

    def split(self, values: Sequence[Any]) -> list[list[Any]]:
        """Cuts values, one for each of `samples`, into the micro-batches. Raises DataError for another number of values."""
        ends = list(itertools.accumulate((len(part) for part in self.microbatches), initial=0))
        if ends[-1] != len(values):
            raise DataError(f"{len(values)} values for the {ends[-1]} samples of this rank's step")
        return [list(values[start:end]) for start, end in itertools.pairwise(ends)]

    def count(
        self,
        dp_group: Group | None = None,
        *,
        samples_per_prompt: int | None = None,
        allow_partial_prompt_groups: bool = False,
        rollout_ids: Sequence[int | str] | None = None,
    ) -> StepCounts:
        """count_step of the samples (their loss_mask and prompt_id): all denominators of the step.

        Communication and errors: those of count_step. Raises DataError too where the numbers of samples differ.
        """
        masks = [torch.as_tensor(sample.loss_mask) for sample in self.samples]
        counted = count_step(
            masks,
            [sample.prompt_id for sample in self.samples],
            dp_group,
            samples_per_prompt=samples_per_prompt,
            allow_partial_prompt_groups=allow_partial_prompt_groups,
            rollout_ids=rollout_ids,
        )
        if counted[0].num_samples != self.num_documents:
            raise DataError(
                f"{counted[0].num_samples} samples counted in a step assembled of {self.num_documents}: pass the dp_group of the "
                "StepAccumulator"
            )
        return counted


@dataclass(frozen=True, slots=True)
class Deal:
    """Deals whole prompt groups to the data-parallel ranks in turn, and cuts each rank's share into micro-batches."""

    dp_size: int
    micro_batch_size: int | None
    """None: a micro-batch is a prompt group."""

    def cut(self, groups: Sequence[list[Sample]], first_rank: int = 0) -> list[list[list[Sample]]]:
        """The micro-batches of each rank; the first group goes to first_rank, the next one to the rank behind it."""
        shares = [groups[(rank - first_rank) % self.dp_size :: self.dp_size] for rank in range(self.dp_size)]
        return [self.cut_share(share) for share in shares]

    def cut_share(self, groups: Sequence[list[Sample]]) -> list[list[Sample]]:
        """The micro-batches of one rank's prompt groups."""
        if self.micro_batch_size is None:
            return list(groups)
        return cut_at_rollouts(list(itertools.chain.from_iterable(groups)), self.micro_batch_size)


def cut_at_rollouts(samples: Sequence[Sample], size: int) -> list[list[Sample]]:
    """Micro-batches of at most `size` samples, in their order. The samples of one rollout stay together: a rollout that is larger
    makes a larger micro-batch, and its samples come where the first of them is."""
    parts: list[list[Sample]] = []
    for rollout in rollouts_of(samples):
        if not parts or len(parts[-1]) + len(rollout) > size:
            parts.append([])
        parts[-1] += rollout
    return parts


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


class Counts(NamedTuple):
    """What a rank sends in each round. The ranks get the sum."""

    documents: int = 0
    microbatches: int = 0  # ranks that gave a micro-batch of their stream
    inside: int = 0  # ranks inside a prompt group
    failed: int = 0
    stopping: int = 0
    ranks: int = 0  # sum of the indices of failed and stopping ranks: the index itself where there is one such rank

    def check(self, failure: Exception | None) -> None:
        who = f"data-parallel rank {self.ranks}" if self.failed + self.stopping == 1 else "more than one data-parallel rank"
        if failure is not None:
            raise DataError(f"the stream of this rank failed ({type(failure).__name__}: {failure})") from failure
        if self.failed:
            raise DataError(f"the stream of {who} failed: its own message says why")
        if self.stopping:
            raise DataError(f"{who} has closed its accumulation while others want a step: end the loop on all ranks together")


class Assembler:
    """Runs the rounds and decides which micro-batch belongs to which step."""

    def __init__(
        self,
        stream: Iterable[Sequence[Any]],
        settings: AccumulationSettings,
        group: Group,  # on the CPU
        *,
        position: int,  # the micro-batches of the stream that earlier steps took
        num_to_skip: int,  # those of them that the stream still holds
        reads_ahead: bool,
    ):
        self._stream, self._settings, self._group, self._reads_ahead = iter(stream), settings, group, reads_ahead
        self._position, self._num_to_skip = position, num_to_skip
        self.is_stopping = threading.Event()
        self._ready: Sequence[Any] | Exception | None = None  # read, and not yet given to a step
        self._is_dry = False
        self._is_over = False  # all ranks' streams have ended
        self._is_inside = False
        self._num_in_group = 0
        self._last_id: tuple[Any, ...] = ()  # one prompt_id, once there was a sample

    def next_step(self) -> AccumulatedStep | None:
        """The next step; None at the end of all streams. Raises DataError as StepAccumulator says."""
        settings, num_rounds, num_documents = self._settings, 0, 0
        parts: list[Sequence[Any]] = []
        is_full = False
        while not self._is_over:
            counts, own = self._round(is_full)
            counts.check(own if isinstance(own, Exception) else None)
            if counts.microbatches and num_rounds == settings.bound:
                raise DataError(self._beyond_bound(num_documents))
            num_rounds += 1
            num_documents += counts.documents
            if counts.documents:
                parts.append([] if own is None or isinstance(own, Exception) else own)
            is_full = num_documents >= settings.docs_per_step
            if is_full and not counts.inside:
                break
            self._is_over = not counts.microbatches  # 0 only where every stream has ended: else a rank inside a group gave one
        if not is_full and num_documents and settings.drop_last and self._group.rank() == 0:
            logger.warning(f"the last {num_documents} documents do not fill a step: left out, as drop_last asks")
        if not num_documents or (settings.drop_last and not is_full):
            return None
        parts += [[] for _ in range(-len(parts) % settings.microbatch_multiple)]
        return AccumulatedStep(microbatches=parts, num_documents=num_documents, is_full=is_full, position=self._position)

    def _round(self, is_full: bool) -> tuple[Counts, Sequence[Any] | Exception | None]:
        """The sum of the ranks' counts, and what this rank gives: a micro-batch, what its stream raised, or nothing."""
        own, rank = None, self._group.rank()
        if self.is_stopping.is_set():
            counts = Counts(stopping=1, ranks=rank)
        else:
            if not is_full or self._is_inside:
                own = self._take()
            if isinstance(own, Exception):
                counts = Counts(failed=1, ranks=rank)
            else:
                counts = Counts(0 if own is None else len(own), own is not None, self._is_inside)
        payload = torch.tensor(counts, dtype=torch.int64, device="cpu")
        work = dist.all_reduce(payload, group=self._group, async_op=True) if self._group.size() > 1 else None
        if self._reads_ahead and not self.is_stopping.is_set():
            self._fetch()
        if work is not None:
            try:
                work.wait()
            except RuntimeError as error:
                raise RuntimeError("docs-per-step: a data-parallel rank has ended, or did not come to a round in time") from error
        return Counts(*payload.tolist()), own

    def _take(self) -> Sequence[Any] | Exception | None:
        self._fetch()
        own, self._ready = self._ready, None
        self._is_inside = False
        if own is not None and not isinstance(own, Exception):
            self._position += 1
            self._is_inside = self._settings.keep_prompt_groups and self._ends_inside_group(own)
        return own

    def _ends_inside_group(self, own: Sequence[Any]) -> bool:
        size = self._settings.samples_per_prompt
        if size is not None and not (len(own) and own[-1].rollout_id is not None):
            self._num_in_group = (self._num_in_group + len(own)) % size
            return self._num_in_group > 0
        if len(own):
            self._last_id = (own[-1].prompt_id,)
        self._fetch()
        if self._ready is None or not self._last_id:
            return False
        # An empty micro-batch or a failure does not say that the group has ended, so it may go on.
        return isinstance(self._ready, Exception) or not len(self._ready) or self._ready[0].prompt_id == self._last_id[0]

    def _fetch(self) -> None:
        """Reads one micro-batch unless one is ready. An exception of the stream is kept until its turn; then all ranks are told."""
        if self._ready is not None or self._is_dry:
            return
        try:
            while self._num_to_skip:
                if next(self._stream, None) is None:
                    raise DataError(f"it ended {self._num_to_skip} micro-batches before where the run stopped: another stream?")
                self._num_to_skip -= 1
            self._ready = next(self._stream)
            num_samples = len(self._ready)  # here, so that an item that is no sequence counts as a failure of the stream
            if num_samples and self._settings.keep_prompt_groups:
                self._ready[0].prompt_id, self._ready[-1].prompt_id, self._ready[-1].rollout_id  # noqa: B018
        except StopIteration:
            self._is_dry = True
        except Exception as error:
            self._ready = error

    def _beyond_bound(self, num_documents: int) -> str:
        target, bound = self._settings.docs_per_step, self._settings.bound
        if num_documents >= target:
            why = "prompt groups do not end: samples_per_prompt samples of a prompt must follow one another"
        else:
            why = "micro-batches hold few documents: raise --micro-batch-size"
        return (
            f"a step of docs_per_step={target} has {num_documents} documents after max_microbatches={bound} micro-batches a rank: "
            f"{why}; or raise max_microbatches, or lower --docs-per-step"
        )
