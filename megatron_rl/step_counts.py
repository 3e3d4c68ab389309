"""Counts one optimiser step: samples, rollouts, prompts and tokens, over all data-parallel ranks and before any slicing.

N samples, R rollouts, P prompts and T unmasked tokens. A sample is a row: one document. A rollout is one sample or several, as its
turns or agents are. M_j unmasked tokens of a rollout, k_j of its rows with at least one.
"""

from __future__ import annotations

import hashlib
import math
import operator
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from operator import attrgetter
from typing import NamedTuple, overload

import torch
from torch import Tensor

from megatron_rl.errors import ConfigError, DataError, EmptyStep, GroupSizeError
from megatron_rl.layout.groups import (
    Group,
    all_gather_stack,
    all_reduce_max,
    all_reduce_sum,
    all_to_all_rows,
    check_dp_group_excludes_cp,
    group_device,
    resolve_group,
)


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Counts of one optimiser step over all data-parallel ranks and micro-batches.

    num_prompts is None where prompts are unknown, num_rollouts where each sample is a rollout.
    Raises DataError for a count that is not a whole number of at least 0, and for more prompts than rollouts, or rollouts than
    samples.
    """

    num_samples: int
    num_prompts: int | None
    num_tokens: int
    num_rollouts: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_samples", "num_prompts", "num_tokens", "num_rollouts"):
            count = getattr(self, name)
            if count is None and name in ("num_prompts", "num_rollouts"):
                continue
            if isinstance(count, bool) or not isinstance(count, Integral) or count < 0:
                raise DataError(f"{name}={count!r} of StepTotals must be a whole number of at least 0: count_step gives it")
        if self.num_rollouts is not None and not min(1, self.num_samples) <= self.num_rollouts <= self.num_samples:
            raise DataError(f"num_rollouts={self.num_rollouts} of {self.num_samples} samples: each sample is of one rollout")
        if self.num_prompts is not None and not min(1, self.num_samples) <= self.num_prompts <= self.rollouts:
            kind = "samples" if self.num_rollouts is None else "rollouts"
            raise DataError(f"num_prompts={self.num_prompts} of {self.rollouts} {kind}: each of them has one prompt")

    @property
    def rollouts(self) -> int:
        """R, which is N where each sample is a rollout."""
        return self.num_samples if self.num_rollouts is None else self.num_rollouts


class RolloutCounts(NamedTuple):
    """Counts of the rollout of each sample, over the whole step."""

    tokens: Tensor  # [S] int64: M_j, its unmasked tokens
    rows: Tensor  # [S] int64: k_j, its samples with at least one unmasked token


@overload
def count_step(
    loss_masks: Iterable[Tensor] | None,
    prompt_ids: Sequence[int | str],
    dp_group: Group | None = None,
    *,
    token_counts: Tensor | Sequence[int] | None = None,
    samples_per_prompt: int | None = None,
    allow_partial_prompt_groups: bool = False,
    rollout_ids: None = None,
) -> tuple[StepTotals, Tensor, Tensor]: ...


@overload
def count_step(
    loss_masks: Iterable[Tensor] | None = None,
    prompt_ids: Sequence[int | str] | None = None,
    dp_group: Group | None = None,
    *,
    token_counts: Tensor | Sequence[int] | None = None,
    samples_per_prompt: int | None = None,
    allow_partial_prompt_groups: bool = False,
    rollout_ids: None = None,
) -> tuple[StepTotals, Tensor, Tensor | None]: ...


@overload
def count_step(
    loss_masks: Iterable[Tensor] | None = None,
    prompt_ids: Sequence[int | str] | None = None,
    dp_group: Group | None = None,
    *,
    token_counts: Tensor | Sequence[int] | None = None,
    samples_per_prompt: int | None = None,
    allow_partial_prompt_groups: bool = False,
    rollout_ids: Sequence[int | str],
) -> tuple[StepTotals, Tensor, Tensor | None, RolloutCounts]: ...


def count_step(
    loss_masks: Iterable[Tensor] | None = None,  # S tensors [response_length], bool or 0/1
    prompt_ids: Sequence[int | str] | None = None,
    dp_group: Group | None = None,
    *,
    token_counts: Tensor | Sequence[int] | None = None,  # [S] instead of loss_masks
    samples_per_prompt: int | None = None,
    allow_partial_prompt_groups: bool = False,
    rollout_ids: Sequence[int | str] | None = None,
) -> tuple[StepTotals, Tensor, Tensor | None] | tuple[StepTotals, Tensor, Tensor | None, RolloutCounts]:
    """Counts the samples, rollouts, prompts and tokens of the step, before context-parallel slicing and micro-batching.

    Every cp rank of one dp rank passes the same whole samples. A fully masked sample counts in num_samples (its rollout in
    num_rollouts, its prompt in num_prompts) and adds no token. Counts come back on the CPU: the totals, token_counts [S] int64,
    prompt_token_counts [S] int64 (None without prompt_ids), and with rollout_ids the RolloutCounts of the samples.

    Args:
        loss_masks: one tensor a sample, 1 where the token trains; all samples of this dp rank in the whole step, S of them.
        prompt_ids: S ids; samples with equal ids form a prompt group, over all dp ranks. None: prompts are not counted.
        dp_group: excludes cp, so that no sample is counted twice. None: Megatron's, else one rank.
        token_counts: the unmasked tokens of each sample, where they are known; give these or loss_masks.
        samples_per_prompt: the declared size of a prompt group, in rollouts. None: sizes are not checked.
        allow_partial_prompt_groups: accept groups smaller than samples_per_prompt.
        rollout_ids: S ids; samples with equal ids are rows of one rollout, over all dp ranks and micro-batches, and share their
            prompt. None: each sample is a rollout.
    Communication over dp, none at size 1: one all-gather of 56 bytes. With prompt_ids also the rows (digest of the id, tokens,
        samples) of each rank's prompts: up to GATHERED_ROWS rows in all by one all-gather; more by three all-to-alls, after which
        a rank holds only the prompts that it owns, and two all-reduces of numbers. With rollout_ids the same collectives carry the
        rows of each rank's rollouts in place of its prompts'. docs/scale.md has sizes and times.
    Raises: DataError, on all ranks of dp_group together, for a mask that is not 0/1, a step without an unmasked token, ids on some
        ranks only, a rollout of two prompts, and a prompt group that is incomplete or too large. ConfigError for samples_per_prompt
        without prompt_ids, for settings that differ between ranks, and for a dp_group that holds cp ranks.

    >>> masks = [torch.ones(2), torch.ones(4), torch.ones(1), torch.zeros(3)]
    >>> totals, tokens, prompt_tokens = count_step(masks, ["a", "a", "b", "b"])
    >>> totals, tokens.tolist(), prompt_tokens.tolist()
    (StepTotals(num_samples=4, num_prompts=2, num_tokens=7, num_rollouts=None), [2, 4, 1, 0], [6, 6, 1, 1])
    >>> totals, _, _, rollouts = count_step(masks, ["a", "a", "b", "b"], rollout_ids=["A", "A", "B", "C"])
    >>> totals.num_rollouts, rollouts.tokens.tolist(), rollouts.rows.tolist()
    (3, [6, 6, 1, 0], [2, 2, 1, 0])
    """
    dp_group = resolve_group(dp_group, "dp")
    check_dp_group_excludes_cp(dp_group)
    samples, problem = _local_samples(loss_masks, token_counts, prompt_ids, rollout_ids, samples_per_prompt)
    counts, ids = samples.counts, samples.rollouts or samples.prompts
    # A rank with a problem still takes part, so that all ranks raise and none waits for it.
    own = _Header(
        has_problem=problem is not None,
        samples_per_prompt=0 if samples_per_prompt is None or problem is not None else int(samples_per_prompt),
        allow_partial_prompt_groups=bool(allow_partial_prompt_groups),
        num_samples=counts.numel(),
        num_tokens=int(counts.sum()),
        ids=_PROMPTS * (samples.prompts is not None) + _ROLLOUTS * (samples.rollouts is not None),
        num_rows=0 if ids is None else ids.digests.numel(),
    )
    headers = all_gather_stack(torch.tensor(own, device=group_device(dp_group)), dp_group).cpu()
    if problem is not None:
        raise problem
    has_prompts, has_rollouts = _check_headers(headers)
    columns = dict(zip(_Header._fields, headers.unbind(1), strict=True))
    num_samples, num_tokens = int(columns["num_samples"].sum()), int(columns["num_tokens"].sum())
    if num_tokens == 0:
        raise EmptyStep(
            f"the step has {num_samples} samples and not a single unmasked token: there is nothing to learn from; skip the step, "
            "or give it more samples"
        )
    if samples_per_prompt is not None and not has_prompts:
        raise ConfigError(
            f"samples_per_prompt={samples_per_prompt} without prompt_ids: no group can be checked; pass them, or remove it"
        )
    found = _Merged.none(counts)
    if has_rollouts:
        found = _merge_rollouts(samples, columns["num_rows"], dp_group, rollout_ids or [])
    elif has_prompts:
        found = _merge_prompts(samples, columns["num_rows"], dp_group)
    if samples_per_prompt is not None:
        kind = "rollouts" if has_rollouts else "samples"
        _check_group_sizes(found, prompt_ids or [], samples_per_prompt, allow_partial_prompt_groups, kind)
    num_prompts, prompt_tokens = (found.num_prompts, found.prompt_tokens) if has_prompts else (None, None)
    totals = StepTotals(num_samples, num_prompts, num_tokens, found.num_rollouts)
    return (totals, counts, prompt_tokens) if rollout_ids is None else (totals, counts, prompt_tokens, found.rollouts)


def prompt_digest(prompt_id: int | str, kind: str = "prompt") -> int:
    """A stable 64-bit name of an id: the same in each process, unlike hash(). 1 and "1" are different. kind: of what, in errors.

    Raises DataError for an id that is not int or str.
    """
    if isinstance(prompt_id, bool) or not isinstance(prompt_id, str):
        try:
            if isinstance(prompt_id, bool):
                raise TypeError("bool")
            text = f"int:{operator.index(prompt_id)}"
        except TypeError as error:
            raise DataError(f"{kind} id {prompt_id!r} is {type(prompt_id).__name__}: use int or str") from error
    else:
        text = f"str:{prompt_id}"
    # surrogatepass: a lone surrogate is a legal str, so it must not raise.
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big", signed=True)


# Of _Header.ids.
_PROMPTS, _ROLLOUTS = 1, 2


class _Header(NamedTuple):
    """What a rank tells the others before rows are exchanged. All fields are sent as integers."""

    has_problem: bool
    samples_per_prompt: int  # 0: not given
    allow_partial_prompt_groups: bool
    num_samples: int
    num_tokens: int
    ids: int  # which ids are given: _PROMPTS, _ROLLOUTS, or their sum
    num_rows: int  # different rollouts on this rank; without ids of rollouts, different prompts


def _check_headers(headers: Tensor) -> tuple[bool, bool]:  # [dp, fields of _Header] int64
    """Whether prompts and rollouts are known. Raises one error on every rank where ranks disagree, or one refused its samples."""
    columns = dict(zip(_Header._fields, headers.unbind(1), strict=True))
    if bool(columns["has_problem"].any()):
        rank = int(columns["has_problem"].argmax())
        raise DataError(f"rank {rank} of the data-parallel group refused its samples: its own message says why")
    for name in ("samples_per_prompt", "allow_partial_prompt_groups"):
        if bool((columns[name] != columns[name][0]).any()):
            values = columns[name].tolist()
            raise ConfigError(f"{name} differs between data-parallel ranks: {values} (0: not given); pass the same on all of them")
    # A rank without samples has no say in whether ids are known.
    ids = columns["ids"][columns["num_samples"] > 0]
    found = []
    for name, bit in (("prompt_ids", _PROMPTS), ("rollout_ids", _ROLLOUTS)):
        has_ids = ids & bit > 0
        if bool(has_ids.any()) and not bool(has_ids.all()):
            raise DataError(f"{name} are given on some data-parallel ranks and missing on others: pass them on all or on none")
        found.append(bool(has_ids.any()))
    return found[0], found[1]


class _Ids(NamedTuple):
    """The different ids of this rank's samples."""

    digests: Tensor  # [U] int64, ascending
    of_sample: Tensor  # [S] int64: an index into digests

    @classmethod
    def of(cls, ids: Sequence[int | str], kind: str) -> _Ids:
        """Equal ids are hashed once where equal means the same: 1 == True == 1.0, but only 1 is an id."""
        if set(map(type, ids)) <= {int, str}:
            known = {name: prompt_digest(name, kind) for name in dict.fromkeys(ids)}
            return cls(*_int64(map(known.__getitem__, ids)).unique(return_inverse=True))
        return cls(*_int64(prompt_digest(name, kind) for name in ids).unique(return_inverse=True))


class _Samples(NamedTuple):
    """The samples of this rank."""

    counts: Tensor  # [S] int64, unmasked tokens
    prompts: _Ids | None = None
    rollouts: _Ids | None = None

    def rows_of_prompts(self) -> Tensor:  # [U, 3] int64: digest, tokens, samples
        if self.prompts is None:  # a rank without samples
            return torch.zeros(0, 3, dtype=torch.int64)
        return torch.stack([self.prompts.digests, *self._sums(self.prompts, torch.ones_like(self.counts))], dim=1)

    def rows_of_rollouts(self) -> Tensor:  # [U, 4] int64: digest of the prompt, digest of the rollout, tokens, samples with a token
        """A rollout of no known prompt is a prompt of its own."""
        if self.rollouts is None:  # a rank without samples
            return torch.zeros(0, 4, dtype=torch.int64)
        sums = self._sums(self.rollouts, (self.counts > 0).long())
        return torch.stack([self.prompts_of_rollouts(), self.rollouts.digests, *sums], dim=1)

    def _sums(self, ids: _Ids, ones: Tensor) -> Tensor:  # [2, U]
        sums = torch.zeros(2, ids.digests.numel(), dtype=torch.int64)
        return sums.index_add_(1, ids.of_sample, torch.stack([self.counts, ones]))

    def prompts_of_rollouts(self) -> Tensor:  # [U] int64, digests
        assert self.rollouts is not None
        if self.prompts is None:
            return self.rollouts.digests
        found = torch.empty_like(self.rollouts.digests)
        found[self.rollouts.of_sample] = self.prompts.digests[self.prompts.of_sample]
        return found


class _Merged(NamedTuple):
    """What this rank's samples belong to, counted over all data-parallel ranks, and the sizes of all prompt groups of the step."""

    prompt_tokens: Tensor  # [S] int64
    group_sizes: Tensor  # [S] int64: rollouts of the sample's prompt; without ids of rollouts, samples
    rollouts: RolloutCounts
    num_prompts: int = 0
    num_rollouts: int | None = None
    largest: int = 0  # group
    smallest: int = 0

    @classmethod
    def none(cls, counts: Tensor) -> _Merged:
        return cls(counts, counts, RolloutCounts(counts, (counts > 0).long()))


class _AddedUp(NamedTuple):
    """What a rank finds of the rows that it is given."""

    answers: Tensor  # [R, k] int64, one for each row
    sums: Tensor  # [*] int64: counts of what it owns, which are added up over owners
    group_sizes: Tensor  # [P] int64, of the prompts that it owns


# Up to this many rows in all, each rank gets the rows of all ranks: one collective, 2 MB, and a few milliseconds to merge them.
GATHERED_ROWS = 65536


def _merge_prompts(samples: _Samples, num_rows: Tensor, dp_group: Group) -> _Merged:
    """Adds the tokens and samples of each prompt up over dp. num_rows: [dp]. Communication: as count_step."""
    answers, (num_prompts,), (largest, smallest) = _exchange(samples.rows_of_prompts(), num_rows, dp_group, _add_up_prompts)
    of_sample = samples.counts[:0] if samples.prompts is None else samples.prompts.of_sample
    tokens, sizes = answers[of_sample].unbind(1)
    return _Merged(tokens, sizes, _Merged.none(samples.counts).rollouts, num_prompts, None, largest, smallest)


def _merge_rollouts(samples: _Samples, num_rows: Tensor, dp_group: Group, rollout_ids: Sequence[int | str]) -> _Merged:
    """Adds up over dp: tokens and rows of each rollout, tokens and rollouts of each prompt. Communication: as count_step.

    Raises DataError, on all ranks, for a rollout whose rows have different prompts.
    """
    rows = samples.rows_of_rollouts()
    # The owner of a prompt adds up. A claim tells the owner of the rollout its prompt: two prompts of one may have two owners.
    claims = torch.cat([rows[:, :2].flip(1), torch.full_like(rows[:, :2], _CLAIM)], dim=1)
    claims = claims if samples.prompts is not None else claims[:0]
    answers, sums, (largest, smallest) = _exchange(rows, num_rows, dp_group, _add_up_rollouts, claims)
    num_prompts, num_rollouts, num_faults = sums
    of_sample = samples.counts[:0] if samples.rollouts is None else samples.rollouts.of_sample
    tokens, of_rows, prompt_tokens, sizes, is_fault = answers[of_sample].unbind(1)
    if num_faults:
        own = is_fault.nonzero()[:1, 0].tolist()
        raise _two_prompts(f"rollout {rollout_ids[own[0]]!r}" if own else "a rollout of other data-parallel ranks")
    return _Merged(prompt_tokens, sizes, RolloutCounts(tokens, of_rows), num_prompts, num_rollouts, largest, smallest)


def _two_prompts(rollout: str) -> DataError:
    return DataError(
        f"{rollout} has samples of two prompts: the rows of a rollout share one prompt; give each rollout of the step an id of its "
        "own, as f'{prompt_id}/{number}', or correct prompt_ids"
    )


def _exchange(
    rows: Tensor,  # [U, c] int64 on the CPU; the first column names the owner
    num_rows: Tensor,  # [dp]: the rows of each rank
    dp_group: Group,
    add_up: Callable[[Tensor], _AddedUp],
    claims: Tensor | None = None,  # [U, c] int64: rows for another owner, which are needed where no rank sees all rows
) -> tuple[Tensor, list[int], tuple[int, int]]:  # answers [U, k], sums, (largest, smallest) group
    """What add_up finds of the rows of all ranks. Communication: as count_step."""
    if int(num_rows.max()) * dp_group.size() > GATHERED_ROWS and dp_group.size() > 1:
        return _exchange_by_owners(rows, dp_group, add_up, rows[:0] if claims is None else claims)
    padded = torch.zeros(int(num_rows.max()), rows.shape[1], dtype=torch.int64)
    padded[: rows.shape[0]] = rows
    gathered = all_gather_stack(padded.to(group_device(dp_group)), dp_group).cpu()
    answers, sums, group_sizes = add_up(gathered[torch.arange(padded.shape[0]) < num_rows[:, None]])
    begin = int(num_rows[: dp_group.rank()].sum())
    return answers[begin : begin + rows.shape[0]], sums.tolist(), _range(group_sizes)


def _exchange_by_owners(
    own: Tensor, dp_group: Group, add_up: Callable[[Tensor], _AddedUp], claims: Tensor
) -> tuple[Tensor, list[int], tuple[int, int]]:
    """A prompt belongs to rank digest mod dp, which adds its rows up and answers. No rank holds the rows of the others' prompts."""
    rows = torch.cat([own, claims])
    owners = rows[:, 0] % dp_group.size()
    order = owners.argsort(stable=True)
    to_send = torch.bincount(owners, minlength=dp_group.size())
    device = group_device(dp_group)
    to_receive = all_to_all_rows(to_send.to(device), None, None, dp_group).cpu()
    there, back = to_send.tolist(), to_receive.tolist()
    received = all_to_all_rows(rows[order].to(device), there, back, dp_group).cpu()
    found = add_up(received)
    answers = all_to_all_rows(found.answers.to(device), back, there, dp_group).cpu()
    in_order = torch.empty_like(answers)
    in_order[order] = answers
    of_rows, of_claims = in_order.split([own.shape[0], claims.shape[0]])
    if claims.shape[0]:
        of_rows[:, -1] |= of_claims[:, -1]
    largest, smallest = _range(found.group_sizes)
    sums = all_reduce_sum(found.sums.to(device), dp_group).tolist()
    largest, negative = all_reduce_max(torch.tensor([largest, -smallest], device=device), dp_group).tolist()
    return of_rows, sums, (largest, -negative)


def _add_up_prompts(rows: Tensor) -> _AddedUp:  # [R, 3]: digest, tokens, samples
    """Answers: tokens and samples of the row's prompt. Sums: prompts."""
    digests, places = rows[:, 0].unique(return_inverse=True)
    totals = torch.zeros(digests.numel(), 2, dtype=torch.int64).index_add_(0, places, rows[:, 1:])
    return _AddedUp(totals[places], torch.tensor([digests.numel()]), totals[:, 1])


# In the place of the counts of a row that is a claim.
_CLAIM = -1


def _add_up_rollouts(
    rows: Tensor,
) -> _AddedUp:  # [R, 4]: prompt, rollout, tokens, rows; of a claim the ids change places
    """Answers: tokens and rows of the rollout, tokens and rollouts of its prompt, 1 where the rollout has two prompts.
    Sums: prompts, rollouts, and rollouts of two prompts."""
    is_row = rows[:, 2] != _CLAIM
    prompts, rollouts = torch.where(is_row, rows[:, :2].T, rows[:, :2].flip(1).T)
    names, places = rollouts.unique(return_inverse=True)
    prompt_of = torch.empty_like(names)
    prompt_of[places] = prompts  # of one of its rows
    totals = torch.zeros(names.numel(), 5, dtype=torch.int64)
    totals[:, :2].index_add_(0, places[is_row], rows[is_row, 2:])
    totals[places[prompt_of[places] != prompts], 4] = 1
    is_owned = torch.zeros(names.numel(), dtype=torch.bool)
    is_owned[places[is_row]] = True
    digests, of_rollout = prompt_of[is_owned].unique(return_inverse=True)
    of_prompts = torch.zeros(digests.numel(), 2, dtype=torch.int64)
    tokens = totals[is_owned, 0]
    of_prompts.index_add_(0, of_rollout, torch.stack([tokens, torch.ones_like(tokens)], dim=1))
    totals[is_owned, 2:4] = of_prompts[of_rollout]
    sums = torch.stack([torch.tensor(digests.numel()), is_owned.sum(), totals[:, 4].sum()])
    return _AddedUp(totals[places], sums, of_prompts[:, 1])


def _range(sizes: Tensor) -> tuple[int, int]:  # [P] -> the largest and the smallest
    """(0, a number above all sizes) without a prompt, which an owner may be."""
    return (int(sizes.max()), int(sizes.min())) if sizes.numel() else (0, torch.iinfo(torch.int64).max)


def _local_samples(
    loss_masks: Iterable[Tensor] | None,
    token_counts: Tensor | Sequence[int] | None,
    prompt_ids: Sequence[int | str] | None,
    rollout_ids: Sequence[int | str] | None,
    samples_per_prompt: int | None,
) -> tuple[_Samples, Exception | None]:
    """(samples, problem): a problem is returned, not raised, so that ranks raise together."""
    nothing = _Samples(torch.zeros(0, dtype=torch.int64))
    try:
        if samples_per_prompt is not None and not (
            isinstance(samples_per_prompt, int | Integral) and not isinstance(samples_per_prompt, bool) and samples_per_prompt >= 1
        ):
            raise ConfigError(f"samples_per_prompt={samples_per_prompt!r} must be a whole number of at least 1, or None")
        if (loss_masks is None) == (token_counts is None):
            both = "neither loss_masks nor token_counts" if loss_masks is None else "both loss_masks and token_counts"
            raise DataError(f"count_step got {both}: give it one of them")
        if loss_masks is not None:
            counts = _count_masks(list(loss_masks))
        else:
            counts = torch.as_tensor(token_counts).cpu()  # the one look
            check_counts("token_counts", counts)
            counts = counts.reshape(-1).long()
        for name, ids in (("prompt_ids", prompt_ids), ("rollout_ids", rollout_ids)):
            if ids is not None and len(ids) != counts.numel():
                raise DataError(f"{len(ids)} {name} for {counts.numel()} samples: give one id a sample")
        samples = _Samples(
            counts,
            None if prompt_ids is None else _Ids.of(prompt_ids, "prompt"),
            None if rollout_ids is None else _Ids.of(rollout_ids, "rollout"),
        )
        if samples.prompts is not None and samples.rollouts is not None and rollout_ids is not None:
            own = samples.prompts_of_rollouts()[samples.rollouts.of_sample]
            faults = (own != samples.prompts.digests[samples.prompts.of_sample]).nonzero()[:1, 0].tolist()
            if faults:
                raise _two_prompts(f"rollout {rollout_ids[faults[0]]!r}")
        return samples, None
    except (ConfigError, DataError) as error:
        return nothing, error
    except Exception as error:  # from the caller's iterator, for instance: the other ranks must not wait for this one
        problem = DataError(f"loss_masks or prompt_ids cannot be read ({type(error).__name__}): {error}")
        problem.__cause__ = error
        return nothing, problem


def check_totals(totals: StepTotals) -> None:
    """Raises DataError for another object than the counts of a step, and for a step without an unmasked token."""
    if not isinstance(totals, StepTotals):
        raise DataError(f"totals is {type(totals).__name__}: pass the StepTotals that count_step returns")
    if totals.num_tokens <= 0 or totals.num_samples <= 0:
        raise DataError(f"{totals} has no unmasked token: nothing to weight")


def check_counts(name: str, counts: Tensor) -> None:
    """Raises DataError unless `counts` are whole numbers of at least 0. Values are checked on the CPU only."""
    if not isinstance(counts, Tensor) or counts.dtype == torch.bool or counts.is_complex():
        given = counts.dtype if isinstance(counts, Tensor) else type(counts).__name__
        raise DataError(f"{name} is {given}: it must be a tensor of whole numbers, as count_step gives them")
    if counts.is_cuda:  # looking would synchronise
        return
    # A comparison with NaN is False, and no float is above inf.
    if not bool(((counts >= 0) & (counts == counts.floor()) & (counts < math.inf)).all()):
        raise DataError(f"{name} must be whole numbers of at least 0, got {counts.tolist()}; count_step gives them")


# Masks of fewer tokens, on average, are counted together: calls cost more than the copy that joins them. A call for each of 16,384
# bool masks takes 25 ms at any of these lengths, one of other dtypes 70 to 105 ms; together 8 ms at 8 tokens, 28 at 256, 60 at 512.
FEW_TOKENS, FEW_BITS = 1024, 256


def _count_masks(masks: list[Tensor]) -> Tensor:  # [S] int64
    """The unmasked tokens of each mask. The host waits once for each device."""
    problems: dict[int, str] = {}  # by the number of the mask
    first = None
    if not all(issubclass(kind, Tensor) for kind in set(map(type, masks))) or set(map(Tensor.dim, masks)) - {1}:
        first = next(index for index, mask in enumerate(masks) if not isinstance(mask, Tensor) or mask.dim() != 1)
        given = f"{tuple(masks[first].shape)}" if isinstance(masks[first], Tensor) else type(masks[first]).__name__
        problems[first] = f"loss_masks[{first}] is {given}: it must be a tensor [response_length]"
    masks = masks[:first]
    devices, dtypes = set(map(Tensor.get_device, masks)), set(map(attrgetter("dtype"), masks))
    is_one_kind = len(devices) == len(dtypes) == 1
    kinds = {*zip(map(Tensor.get_device, masks), map(attrgetter("dtype"), masks), strict=True)} if not is_one_kind else set()
    counts = torch.zeros(len(masks), dtype=torch.int64)
    for device in devices:
        numbers: list[int] | range = range(len(masks))  # of the masks on this device, dtype by dtype
        found = []
        if is_one_kind:
            found.append(_counts_of_alike(masks))
        else:
            numbers = []
            for dtype in (dtype for other, dtype in kinds if other == device):
                alike = [n for n, m in enumerate(masks) if (m.get_device(), m.dtype) == (device, dtype)]
                found.append(_counts_of_alike([masks[number] for number in alike]))
                numbers.extend(alike)
        nonzero, ones = torch.cat(found, dim=1).cpu().long()  # the one look
        counts[torch.arange(len(masks)) if is_one_kind else _int64(numbers)] = ones
        for place in (nonzero != ones).nonzero()[:, 0].tolist():
            number = numbers[place]
            problems[number] = (
                f"loss_masks[{number}] has values other than 0 and 1: a mask selects tokens, weights belong elsewhere"
            )
    if problems:
        raise DataError(problems[min(problems)])
    return counts


def _int64(values: Iterable[int]) -> Tensor:
    """Ten times as fast as torch.tensor of a list."""
    numbers = array("q", values)
    return torch.frombuffer(numbers, dtype=torch.int64) if numbers else torch.zeros(0, dtype=torch.int64)


def _counts_of_alike(masks: list[Tensor]) -> Tensor:  # [2, number of masks], whole numbers: values other than 0, values of 1
    """For masks of one device and dtype, which are counted together where a call for each would cost more."""
    lengths = _int64(map(Tensor.numel, masks))
    few = FEW_BITS if masks[0].dtype == torch.bool else FEW_TOKENS
    if not masks[0].is_cuda and int(lengths.sum()) > few * len(masks):
        nonzero = torch.stack([mask.count_nonzero() for mask in masks])
        ones = nonzero if masks[0].dtype == torch.bool else torch.stack([(mask == 1).count_nonzero() for mask in masks])
        return torch.stack([nonzero, ones])
    flat = torch.cat(masks)
    lengths = lengths.to(flat.device, non_blocking=True)
    # float32 counts are exact up to 2^24 tokens a sample; unsafe: the check of the lengths would synchronise.
    count = partial(torch.segment_reduce, reduce="sum", lengths=lengths, unsafe=True)
    nonzero = count((flat != 0).float())
    return torch.stack([nonzero, nonzero if flat.dtype == torch.bool else count((flat == 1).float())])


def _check_group_sizes(
    found: _Merged, prompt_ids: Sequence[int | str], samples_per_prompt: int, allow_partial: bool, kind: str
) -> None:
    """Raises on all ranks where one prompt group has a wrong size; a rank that holds samples of such a group names it."""
    for size, is_bad in (
        (found.largest, found.largest > samples_per_prompt),
        (found.smallest, found.smallest < samples_per_prompt),
    ):
        if not is_bad or (size < samples_per_prompt and allow_partial):
            continue
        own = (found.group_sizes == size).nonzero()[:1, 0].tolist()
        name = f"prompt {prompt_ids[own[0]]!r}" if own else "a prompt of another data-parallel rank"
        is_usual = found.smallest == found.largest
        declare = f"every prompt has {size}, so give --samples-per-prompt {size}; or else " if is_usual else ""
        if size > samples_per_prompt:
            has = f"{size} {kind} in this step, more than samples_per_prompt={samples_per_prompt}"
            raise GroupSizeError(f"{name} has {has}: {declare}look for ids that two prompts share")
        has = f"{size} of samples_per_prompt={samples_per_prompt} {kind} in this step"
        raise GroupSizeError(f"{name} has {has}: {declare}keep groups whole, or allow it with --allow-partial-prompt-groups")
