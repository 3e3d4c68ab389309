"""Recorded rollouts in the place of sampled ones. A data-parallel rank keeps its own samples, and where it can reads them alone.

A file is read whole by every rank. Of the parts that --save-rollouts wrote on several data-parallel ranks each rank reads its own,
if they divide by the ranks; what all ranks must know of the other samples then travels as SampleHeader.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megatron_rl.config import RouterReplay, SupportUse
from megatron_rl.errors import DataError
from megatron_rl.layout.agreement import on_all_ranks
from megatron_rl.layout.groups import SINGLE, Group, all_gather_stack, group_device
from megatron_rl.megatron.samples import RouteShape
from megatron_rl.registries.correction_settings import CorrectionSettings
from megatron_rl.step_counts import prompt_digest
from megatron_rl.train.options import TrainOptions
from megatron_rl.train.rollout_files import GIVEN_FOR_ALL, check_parts, existing_parts, load_rollouts, read_part
from megatron_rl.train.rollouts import RolloutBatch, Sample, SampleHeader, SharedRollout, problem_of_rollouts
from megatron_rl.train.trainer import PolicyTrainer


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayRules:
    """What the samples of a file must have, and what is kept of them."""

    vocab_size: int
    has_sampler: bool = False  # refuse samples without rollout_log_probs
    refuses_sets: bool = False  # refuse samples with kept_ids
    router_replay: str = RouterReplay.NONE
    route_shape: RouteShape | None = None  # of the routes that router_replay, or a comparison, needs; None: routes are left out

    @classmethod
    def of(cls, options: TrainOptions, trainer: PolicyTrainer) -> ReplayRules:
        has_routes = options.router_replay != RouterReplay.NONE or options.check_router_replay
        return cls(
            vocab_size=trainer.settings.vocab_size,
            has_sampler=CorrectionSettings.of(trainer.config).is_on,
            refuses_sets=trainer.config.sampling_support == SupportUse.REFUSE,
            router_replay=options.router_replay,
            route_shape=trainer.route_shape if has_routes else None,
        )

    def kept(self, path: str, batch: RolloutBatch) -> RolloutBatch:
        """Raises DataError where the samples lack something."""
        if self.has_sampler and any(sample.rollout_log_probs is None for sample in batch.samples):
            raise DataError(
                f"{path}, rollout {batch.rollout_index}: no rollout_log_probs, which the correction compares with: record the "
                "sampling engine's log-probabilities, or remove --importance-correction and --off-policy-sequence-delta"
            )
        if self.refuses_sets and any(sample.kept_ids is not None for sample in batch.samples):
            raise DataError(
                f"{path}, rollout {batch.rollout_index}: kept_ids with --sampling-support refuse: its sampler kept a part of the "
                "vocabulary (top-p, top-k, min-p), and its log-probabilities are over that; choose --sampling-support replay, or "
                "record rollouts of the whole vocabulary"
            )
        if self.route_shape is None:
            return replace(batch, samples=[replace(sample, routes=None) for sample in batch.samples])
        if all(sample.routes is not None for sample in batch.samples):
            return batch
        if self.router_replay != RouterReplay.OLD_LOG_PROBS:
            raise DataError(
                f"{path}, rollout {batch.rollout_index}: no routes, which --router-replay rollout and --check-router-replay need: "
                "record the routes of the sampling engine, choose --router-replay old_log_probs, or remove the flag"
            )
        if any(sample.old_log_probs is not None for sample in batch.samples):
            raise DataError(
                f"{path}, rollout {batch.rollout_index}: old_log_probs and no routes: --router-replay old_log_probs needs the "
                "routes of the forward that measured them; give both, or old_log_probs: null, and this policy measures both"
            )
        return batch


class ReplayedRollouts:
    """The rollouts of a file, in its order; a resumed run skips those that it has trained on."""

    def __init__(self, path: str, rules: ReplayRules, *, first: int, dp_group: Group = SINGLE):
        """first: the index of the rollout to begin with."""
        self._path, self._rules, self._first, self._dp = path, rules, first, dp_group
        files, num_ranks = existing_parts(path), dp_group.size()
        has_own_parts = num_ranks > 1 and Path(path) not in files and len(files) % num_ranks == 0
        self._own_files = files[dp_group.rank() :: num_ranks] if has_own_parts else []
        self._batches = itertools.islice(self._load(), first, None)
        read = partial(read_part, vocab_size=rules.vocab_size, route_shape=rules.route_shape)
        self._readers = [_Ahead(read(file), first) for file in self._own_files]

    def get(self, rollout_index: int, *, policy_version: int | None = None) -> SharedRollout | None:
        """None after the last rollout. policy_version has no effect: the file's samples have their own, or none.

        Communication, where each rank reads its own parts: on_all_ranks', and two all-gathers over dp, of 15 numbers a rank and 6
        numbers a sample.
        """
        if self._own_files:
            return self._shared(rollout_index)
        batch = next(self._batches, None)
        if batch is None:
            return None
        self._check_index(batch.rollout_index, rollout_index)
        return SharedRollout.of(batch, self._dp.rank(), self._dp.size())

    def from_start(self) -> Iterator[RolloutBatch]:
        """The whole file again, whatever `get` has returned."""
        for rollout_index, batch in enumerate(self._load()):
            self._check_index(batch.rollout_index, rollout_index)
            yield batch

    def _load(self) -> Iterator[RolloutBatch]:
        rules = self._rules
        for batch in load_rollouts(self._path, vocab_size=rules.vocab_size, route_shape=rules.route_shape):
            yield rules.kept(self._path, batch)

    def _check_index(self, found: int, due: int) -> None:
        if found != due:
            raise DataError(f"{self._path} holds rollout {found} where rollout {due} is due: it was cut or edited")

    def _shared(self, due: int) -> SharedRollout | None:
        parts: list[RolloutBatch] = []

        def read() -> None:
            parts.extend(self._rules.kept(self._path, part) for reader in self._readers for part in reader.take(due))

        on_all_ranks(read)
        samples = [sample for part in parts for sample in part.samples]
        heads = [reader.head.rollout_index for reader in self._readers if reader.head is not None]
        given = [all(getattr(sample, name) is not None for sample in samples) for name in GIVEN_FOR_ALL]
        digests = [-1 if part.digest is None else part.digest for part in parts]
        summary = [len(samples), len(parts), max((part.num_parts for part in parts), default=0), min(heads, default=-1)]
        sizes = [-1 if part.vocab_size is None else part.vocab_size for part in parts]
        summary += [min(digests, default=-1), max(digests, default=-1), *given, min(sizes, default=-1), max(sizes, default=-1)]
        on_rank = torch.tensor(summary, dtype=torch.int64, device=group_device(self._dp))
        ranks = all_gather_stack(on_rank, self._dp).tolist()
        holders = [of_rank for of_rank in ranks if of_rank[0]]
        if not holders:
            left = [of_rank[3] for of_rank in ranks if of_rank[3] >= 0]
            if left:
                self._check_index(min(left), due)
            return None
        num_parts = [of_rank[2] for of_rank in holders for _ in range(of_rank[1])]
        digests, sizes = ([value for of_rank in holders for value in of_rank[place]] for place in (slice(4, 6), slice(-2, None)))
        check_parts(self._path, due, num_parts, digests, sizes)
        for place, (name, without) in enumerate(GIVEN_FOR_ALL.items(), 6):
            if len({of_rank[place] for of_rank in holders}) > 1:
                raise DataError(
                    f"{self._path}, rollout {due}: {name} is in some parts and null in others; give it for all samples, or for "
                    f"none ({without})"
                )
        has_rollouts = bool(holders[0][6 + list(GIVEN_FOR_ALL).index("rollout_id")])
        headers = self._headers(samples, [of_rank[0] for of_rank in ranks], due, has_rollouts)
        vocab_size = next((part.vocab_size for part in parts), None)
        own = RolloutBatch(samples=samples, rollout_index=due, vocab_size=vocab_size)
        return SharedRollout(headers=headers, own=own)

    def _headers(self, samples: list[Sample], counts: list[int], due: int, has_rollouts: bool) -> list[SampleHeader]:
        """Of the samples of all ranks, by their index. counts: the samples of each rank."""
        rows = torch.zeros(max(counts), 6, dtype=torch.int64)
        for place, sample in enumerate(samples):
            digest = prompt_digest(sample.prompt_id)
            bits = struct.unpack("2q", struct.pack("2d", sample.reward, sample.advantage))
            rollout = 0 if sample.rollout_id is None else prompt_digest(sample.rollout_id, "rollout")
            rows[place] = torch.tensor([sample.index, digest, sample.response_length, *bits, rollout])
        gathered = all_gather_stack(rows.to(group_device(self._dp)), self._dp).cpu()
        headers = [
            _header(row, dp_rank)
            for dp_rank, (of_rank, count) in enumerate(zip(gathered, counts, strict=True))
            for row in of_rank[:count]
        ]
        headers.sort(key=lambda header: header.index)
        for before, header in itertools.pairwise(headers):
            if before.index == header.index:
                raise DataError(f"{self._path}, rollout {due}: index: {header.index} is in two parts: each sample has its own")
        if not has_rollouts:
            headers = [replace(header, rollout_id=None) for header in headers]
        if (problem := problem_of_rollouts(headers)) is not None:
            raise DataError(f"{self._path}, rollout {due}, digests of ids: {problem[0]}: {problem[1]}")
        return headers


class _Ahead:
    """One file, with its next rollout read."""

    def __init__(self, batches: Iterator[RolloutBatch], first: int):
        self._batches, self._first = batches, first
        self.head: RolloutBatch | None = None
        self._has_begun = False

    def take(self, due: int) -> list[RolloutBatch]:
        """The file's part of the rollout, which it may not have."""
        if not self._has_begun:
            self._has_begun = True
            self.head = next((batch for batch in self._batches if batch.rollout_index >= self._first), None)
        if self.head is None or self.head.rollout_index != due:
            return []
        taken, self.head = self.head, next(self._batches, None)
        return [taken]


def _header(row: Tensor, dp_rank: int) -> SampleHeader:
    index, digest, length, *bits, rollout = row.tolist()
    reward, advantage = struct.unpack("2d", struct.pack("2q", *bits))
    return SampleHeader(
        prompt_id=digest,
        index=index,
        response_length=length,
        reward=reward,
        advantage=advantage,
        dp_rank=dp_rank,
        rollout_id=rollout,
    )
