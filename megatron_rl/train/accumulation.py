"""Cuts streams of micro-batches into optimiser steps of a given number of documents (`--docs-per-step`).

In rounds each rank gives a micro-batch of its stream, until a step has its documents. No loss is weighted here: count_step counts
the samples of the whole step.

    steps = StepAccumulator(stream, AccumulationSettings.of(config))  # on every rank
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

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any, NamedTuple

import torch

from megatron_rl.config import PolicyLossConfig
from megatron_rl.count import check_dp_group_excludes_cp
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.layout.groups import (
    Group,
    all_gather_stack,
    all_reduce_sum,
    group_device,
    resolve_group,
)
from megatron_rl.weights import get_loss_aggregation

# Micro-batches that a step may have beyond its documents: no run samples one prompt so often, or gives so many empty ones.
FURTHER_MICROBATCHES = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class AccumulationSettings:
    """When a step is complete; equal on all ranks."""

    docs_per_step: int
    """Documents (samples) over all data-parallel ranks at which a step is complete; whole micro-batches, so it may hold more."""
    keep_prompt_groups: bool = False
    """A step ends where no rank is inside a prompt group. The samples of a group must follow one another in one rank's stream. A
    rollout of several samples is whole then; else a step may hold a part of it, and counts that as a rollout."""
    samples_per_prompt: int | None = None
    """Groups end by counting. None, or samples with a rollout_id: they end where prompt_id changes, which reads one micro-batch
    ahead."""

    @classmethod
    def of(cls, config: PolicyLossConfig) -> AccumulationSettings:
        """The settings of the flags. Groups stay whole where the aggregation needs them whole, or their size is declared."""
        size = None if config.allow_partial_prompt_groups else config.samples_per_prompt
        keep = size is not None or get_loss_aggregation(config.loss_aggregation).needs_prompts
        if config.docs_per_step is None:
            raise ConfigError("docs_per_step is not set: static accumulation needs no StepAccumulator")
        return cls(docs_per_step=config.docs_per_step, keep_prompt_groups=keep, samples_per_prompt=size)

    @property
    def most_microbatches(self) -> int:
        """Of one rank in a step: a round without an empty micro-batch has a document."""
        return self.docs_per_step + FURTHER_MICROBATCHES


@dataclass(frozen=True, kw_only=True, slots=True)
class AccumulatedStep:
    """One step: the micro-batches of this rank. Each rank has the same number of them, and some may be empty."""

    microbatches: list[Sequence[Any]]
    num_documents: int  # over all data-parallel ranks
    is_full: bool  # False: the streams ended before the target

    @property
    def samples(self) -> list[Any]:
        return list(itertools.chain.from_iterable(self.microbatches))

    def split(self, values: Sequence[Any]) -> list[list[Any]]:
        """Cuts values, one for each of `samples`, into the micro-batches. Raises DataError for another number of values."""
        ends = list(itertools.accumulate((len(part) for part in self.microbatches), initial=0))
        if ends[-1] != len(values):
            raise DataError(f"{len(values)} values for the {ends[-1]} samples of this rank's step")
        return [list(values[start:end]) for start, end in itertools.pairwise(ends)]


class StepAccumulator(Iterator[AccumulatedStep]):
    """Iterator over steps. Every rank makes one with the stream of its data-parallel rank (the tp, cp and pp ranks share it).

    In each round each rank takes a micro-batch, until the global number of documents reaches the target. A rank gives an empty
    micro-batch when its stream has ended, or when its prompt groups are whole and another rank's are not. The order of each stream
    is kept, and it is read only as far as the step needs (one micro-batch further for prompt groups by id). Rounds without a
    document are left out.

    state: what state_dict() returned. The stream is read from its start up to that position.

    Communication over dp: in the constructor one all-gather of settings; each round one all-reduce of three int64, with one more
    round where the streams end.
    Raises: DataError for a step that does not end, on all ranks of dp_group together. What a stream raises comes out on its own
        rank only: do not go on after it, because the others have taken their part of the step. The constructor raises ConfigError
        for settings that differ between ranks.
    """

    def __init__(
        self,
        stream: Iterable[Sequence[Any]],
        settings: AccumulationSettings,
        *,
        dp_group: Group | None = None,
        state: dict[str, Any] | None = None,
    ):
        self._settings, self._group = settings, resolve_group(dp_group, "dp")
        check_dp_group_excludes_cp(self._group)
        self._position = 0 if state is None else _position_in(state, self._group)
        _check_agreement(settings, self._group)
        self._stream = _after(iter(stream), self._position)
        self._ready: Sequence[Any] | None = None  # read, and not yet given to a step
        self._is_over = False  # all ranks' streams have ended
        self._is_inside = False  # a prompt group
        self._num_in_group = 0
        self._last_id: tuple[Any, ...] = ()  # one prompt_id, once there was a sample

    def __next__(self) -> AccumulatedStep:
        settings, num_rounds, num_documents = self._settings, 0, 0
        parts: list[Sequence[Any]] = []
        is_full = False
        while not self._is_over:
            counts, own = self._round(takes=not is_full or self._is_inside)
            if counts.microbatches and num_rounds == settings.most_microbatches:
                raise DataError(self._endless(num_documents))
            num_rounds += 1
            num_documents += counts.documents
            if counts.documents:
                parts.append(own)
            is_full = num_documents >= settings.docs_per_step
            if is_full and not counts.inside:
                break
            self._is_over = not counts.microbatches  # 0 only where every stream has ended: else a rank inside a group gave one
        if not num_documents:
            raise StopIteration
        return AccumulatedStep(microbatches=parts, num_documents=num_documents, is_full=is_full)

    def state_dict(self) -> dict[str, Any]:
        """The position after the steps that were handed out, equal on all ranks and fit for JSON.

        Every rank calls it. Communication: one all-gather of one int64 over dp.
        """
        position = torch.tensor([self._position], device=group_device(self._group))
        return {"positions": all_gather_stack(position, self._group).flatten().tolist()}

    def _round(self, *, takes: bool) -> tuple[_Counts, Sequence[Any]]:
        """The sum of the ranks' counts, and what this rank gives: a micro-batch, or nothing."""
        own = self._take() if takes else None
        mine = _Counts(0 if own is None else len(own), own is not None, self._is_inside)
        payload = torch.tensor(mine, dtype=torch.int64, device=group_device(self._group))
        return _Counts(*all_reduce_sum(payload, self._group).tolist()), [] if own is None else own

    def _take(self) -> Sequence[Any] | None:
        own, self._ready = self._next(), None
        self._is_inside = False
        if own is not None:
            self._position += 1
            self._is_inside = self._settings.keep_prompt_groups and self._ends_inside_group(own)
        return own

    def _next(self) -> Sequence[Any] | None:
        """The next micro-batch, which is kept until it is taken; None at the end of the stream."""
        if self._ready is None:
            self._ready = next(self._stream, None)
        return self._ready

    def _ends_inside_group(self, own: Sequence[Any]) -> bool:
        size = self._settings.samples_per_prompt
        if size is not None and not (len(own) and own[-1].rollout_id is not None):
            self._num_in_group = (self._num_in_group + len(own)) % size
            return self._num_in_group > 0
        if len(own):
            self._last_id = (own[-1].prompt_id,)
        following = self._next()
        if following is None or not self._last_id:
            return False
        # An empty micro-batch does not say that the group has ended, so it may go on.
        return not len(following) or following[0].prompt_id == self._last_id[0]

    def _endless(self, num_documents: int) -> str:
        if num_documents >= self._settings.docs_per_step:
            why = "prompt groups do not end: samples_per_prompt samples of a prompt must follow one another"
        else:
            why = "micro-batches hold few documents: raise --micro-batch-size"
        return (
            f"a step of docs_per_step={self._settings.docs_per_step} has {num_documents} documents after "
            f"{self._settings.most_microbatches} micro-batches a rank: {why}; or lower --docs-per-step"
        )


class _Counts(NamedTuple):
    """What a rank sends in each round. The ranks get the sum."""

    documents: int
    microbatches: int  # ranks that gave a micro-batch of their stream
    inside: int  # ranks inside a prompt group


def _after(stream: Iterator[Sequence[Any]], position: int) -> Iterator[Sequence[Any]]:
    """The micro-batches from that position on."""
    for number in range(position):
        if next(stream, None) is None:
            raise DataError(f"it ended {position - number} micro-batches before where the run stopped: another stream?")
    yield from stream


def _position_in(state: dict[str, Any], dp_group: Group) -> int:
    positions: list[int] = state["positions"]
    if len(positions) != dp_group.size():
        raise ConfigError(
            f"state holds the positions of {len(positions)} data-parallel streams, there are {dp_group.size()} now: resume with as "
            "many data-parallel ranks"
        )
    return positions[dp_group.rank()]


def _check_agreement(settings: AccumulationSettings, dp_group: Group) -> None:
    """Raises ConfigError where settings differ: these ranks would wait for each other's rounds."""
    own = torch.tensor([int(value or 0) for value in astuple(settings)], device=group_device(dp_group))
    columns = zip(fields(settings), all_gather_stack(own, dp_group).T.tolist(), strict=True)
    problems = [f"{field.name} differs between data-parallel ranks: {column}" for field, column in columns if len(set(column)) > 1]
    if problems:
        raise ConfigError(problems)
