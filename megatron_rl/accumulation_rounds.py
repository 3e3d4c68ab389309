"""Fetches micro-batches in rounds until a step has the wanted number of documents. It starts no thread and weights no loss."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.aggregation import StepTotals, count_step
from megatron_rl.config import PolicyLossConfig
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.layout.groups import Group
from megatron_rl.loss_hub import get_loss_aggregation

logger = logging.getLogger(__name__)

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
    """A step ends where no rank is inside a prompt group. The samples of a group must follow one another in one rank's stream."""
    samples_per_prompt: int | None = None
    """Groups end by counting. None: they end where prompt_id changes, which reads one micro-batch ahead."""
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
    ) -> tuple[StepTotals, Tensor, Tensor | None]:
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
        )
        if counted[0].num_samples != self.num_documents:
            raise DataError(
                f"{counted[0].num_samples} samples counted in a step assembled of {self.num_documents}: pass the dp_group of the "
                "StepAccumulator"
            )
        return counted


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
        if size is not None:
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
            if num_samples and self._settings.keep_prompt_groups and self._settings.samples_per_prompt is None:
                self._ready[0].prompt_id, self._ready[-1].prompt_id  # noqa: B018
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
            f"{why}; or raise max_microbatches (train: --max-microbatches), or lower --docs-per-step"
        )
