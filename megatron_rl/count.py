"""Counts one optimiser step: samples, rollouts, prompts and tokens, over all data-parallel ranks and before any slicing.

N samples, R rollouts, P prompts and T unmasked tokens. A sample is a row: one document. A rollout is one sample or several, as its
turns or agents are. M_j unmasked tokens of a rollout, k_j of its rows with at least one.
"""

from __future__ import annotations

import hashlib
import math
import operator
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.errors import ConfigError, DataError, EmptyStep, GroupSizeError
from megatron_rl.layout.groups import (
    Group,
    all_gather_stack,
    group_device,
    initialised_parallel_state,
    process_group,
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


class StepCounts(NamedTuple):
    """What count_step returns, on the CPU."""

    totals: StepTotals
    token_counts: Tensor  # [S] int64: unmasked tokens of each sample
    prompt_token_counts: Tensor | None  # [S] int64: those of all samples of its prompt; None without prompt_ids
    rollouts: RolloutCounts | None  # None where each sample is a rollout


def count_step(
    loss_masks: Iterable[Tensor] | None = None,  # S tensors [response_length], bool or 0/1
    prompt_ids: Sequence[int | str] | None = None,
    dp_group: Group | None = None,
    *,
    token_counts: Tensor | Sequence[int] | None = None,  # [S] instead of loss_masks
    samples_per_prompt: int | None = None,
    allow_partial_prompt_groups: bool = False,
    rollout_ids: Sequence[int | str] | None = None,
) -> StepCounts:
    """Counts the samples, rollouts, prompts and tokens of the step, before context-parallel slicing and micro-batching.

    Every cp rank of one dp rank passes the same whole samples. A fully masked sample counts in num_samples (its rollout in
    num_rollouts, its prompt in num_prompts) and adds no token.

    Args:
        loss_masks: one tensor a sample, 1 where the token trains; all samples of this dp rank in the whole step, S of them.
        prompt_ids: S ids; samples with equal ids form a prompt group, over all dp ranks. None: prompts are not counted.
        dp_group: excludes cp, so that no sample is counted twice. None: Megatron's, else one rank.
        token_counts: the unmasked tokens of each sample, where they are known; give these or loss_masks.
        samples_per_prompt: the declared size of a prompt group, in rollouts. None: sizes are not checked.
        allow_partial_prompt_groups: accept groups smaller than samples_per_prompt.
        rollout_ids: S ids; samples with equal ids are rows of one rollout, over all dp ranks and micro-batches, and share their
            prompt. None: each sample is a rollout.
    Communication over dp, none at size 1: one all-gather of 48 bytes and, with ids, one of a row for each sample: its tokens and
        the digests of its ids, 16 bytes with ids of one kind, 24 with both. docs/parallelism.md has sizes and times.
    Raises: DataError, on all ranks of dp_group together, for a mask that is not 0/1, a step without an unmasked token, ids on some
        ranks only, a rollout of two prompts, and a prompt group that is incomplete or too large. ConfigError for samples_per_prompt
        without prompt_ids, for settings that differ between ranks, and for a dp_group that holds cp ranks.

    >>> masks = [torch.ones(2), torch.ones(4), torch.ones(1), torch.zeros(3)]
    >>> counts = count_step(masks, ["a", "a", "b", "b"])
    >>> counts.totals, counts.token_counts.tolist(), counts.prompt_token_counts.tolist()
    (StepTotals(num_samples=4, num_prompts=2, num_tokens=7, num_rollouts=None), [2, 4, 1, 0], [6, 6, 1, 1])
    >>> counts = count_step(masks, ["a", "a", "b", "b"], rollout_ids=["A", "A", "B", "C"])
    >>> counts.totals.num_rollouts, counts.rollouts.tokens.tolist(), counts.rollouts.rows.tolist()
    (3, [6, 6, 1, 0], [2, 2, 1, 0])
    """
    dp_group = resolve_group(dp_group, "dp")
    check_dp_group_excludes_cp(dp_group)
    own, problem = _local_samples(loss_masks, token_counts, prompt_ids, rollout_ids, samples_per_prompt)
    # A rank with a problem still takes part, so that all ranks raise and none waits for it.
    header = _Header(
        has_problem=problem is not None,
        samples_per_prompt=0 if samples_per_prompt is None or problem is not None else int(samples_per_prompt),
        allow_partial_prompt_groups=bool(allow_partial_prompt_groups),
        num_samples=own.tokens.numel(),
        num_tokens=int(own.tokens.sum()),
        ids=_PROMPTS * (own.prompts is not None) + _ROLLOUTS * (own.rollouts is not None),
    )
    headers = all_gather_stack(torch.tensor(header, device=group_device(dp_group)), dp_group).cpu()
    if problem is not None:
        raise problem
    columns = dict(zip(_Header._fields, headers.unbind(1), strict=True))
    has_prompts, has_rollouts = _check_headers(columns)
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
    if not (has_prompts or has_rollouts):
        return StepCounts(StepTotals(num_samples, None, num_tokens), own.tokens, None, None)
    step, here = _gathered(own, columns["num_samples"], dp_group, has_prompts, has_rollouts)
    rollouts, num_rollouts, prompt_tokens, num_prompts = None, None, None, None
    rollout_numbers = torch.arange(num_samples)  # [num_samples]: the number of its rollout
    if step.rollouts is not None:
        num_rollouts, rollout_numbers = _numbered(step.rollouts)
        rollouts = RolloutCounts(
            tokens=_sums(step.tokens, rollout_numbers, num_rollouts)[rollout_numbers[here]],
            rows=_sums((step.tokens > 0).long(), rollout_numbers, num_rollouts)[rollout_numbers[here]],
        )
    if step.prompts is not None:
        num_prompts, prompt_numbers = _numbered(step.prompts)
        prompt_of = torch.zeros(num_rollouts or num_samples, dtype=torch.int64)  # [R]: that of one of the rollout's samples
        prompt_of[rollout_numbers] = prompt_numbers
        _check_one_prompt(rollout_numbers[prompt_of[rollout_numbers] != prompt_numbers], rollout_numbers[here], rollout_ids or [])
        prompt_tokens = _sums(step.tokens, prompt_numbers, num_prompts)[prompt_numbers[here]]
        if samples_per_prompt is not None:
            kind = "rollouts" if has_rollouts else "samples"
            sizes = prompt_of.bincount()
            _check_group_sizes(sizes, prompt_numbers[here], prompt_ids or [], samples_per_prompt, allow_partial_prompt_groups, kind)
    return StepCounts(StepTotals(num_samples, num_prompts, num_tokens, num_rollouts), own.tokens, prompt_tokens, rollouts)


def check_dp_group_excludes_cp(dp_group: Group) -> None:
    """Raises ConfigError where dp_group holds ranks that have the same samples, of cp, tp or pp: each would be counted so often."""
    parallel_state = initialised_parallel_state()
    if parallel_state is None or dp_group.size() == 1:
        return
    dp_ranks = set(dist.get_process_group_ranks(process_group(dp_group)))
    for name, group in (
        ("context", parallel_state.get_context_parallel_group()),
        ("tensor", parallel_state.get_tensor_model_parallel_group()),
        ("pipeline", parallel_state.get_pipeline_model_parallel_group()),
    ):
        shared = dp_ranks.intersection(dist.get_process_group_ranks(group))
        if len(shared) > 1:
            raise ConfigError(
                f"dp_group holds the {name}-parallel ranks {sorted(shared)}, whose samples are the same: each would be counted "
                f"{len(shared)} times; pass get_data_parallel_group() or None"
            )


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


def _check_headers(columns: Mapping[str, Tensor]) -> tuple[bool, bool]:  # [dp] int64, by the name in _Header
    """Whether prompts and rollouts are known. Raises one error on every rank where ranks disagree, or one refused its samples."""
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


class _Samples(NamedTuple):
    """Samples of one rank, or of all ranks."""

    tokens: Tensor  # [S] int64, unmasked ones
    prompts: Tensor | None = None  # [S] int64, digests
    rollouts: Tensor | None = None  # [S] int64, digests


def _gathered(own: _Samples, num_samples: Tensor, dp_group: Group, has_prompts: bool, has_rollouts: bool) -> tuple[_Samples, slice]:
    """The samples of all ranks, and the place of this rank's among them. num_samples: [dp]. One all-gather over dp."""
    nothing = own.tokens[:0]  # a rank without samples need not know ids
    columns = [own.tokens, *[own.prompts] * has_prompts, *[own.rollouts] * has_rollouts]
    rows = torch.zeros(int(num_samples.max()), len(columns), dtype=torch.int64)
    rows[: own.tokens.numel()] = torch.stack([nothing if column is None else column for column in columns], dim=1)
    gathered = all_gather_stack(rows.to(group_device(dp_group)), dp_group).cpu()
    found = gathered[torch.arange(rows.shape[0]) < num_samples[:, None]].unbind(1)
    begin = int(num_samples[: dp_group.rank()].sum())
    step = _Samples(found[0], found[1] if has_prompts else None, found[-1] if has_rollouts else None)
    return step, slice(begin, begin + own.tokens.numel())


def _numbered(digests: Tensor) -> tuple[int, Tensor]:  # [N] -> how many are different, and the number of each, [N]
    names, places = digests.unique(return_inverse=True)
    return names.numel(), places


def _sums(values: Tensor, places: Tensor, size: int) -> Tensor:  # [N] int64, [N] -> [size]
    return torch.zeros(size, dtype=torch.int64).index_add_(0, places, values)


def _check_one_prompt(wrong: Tensor, rollout_numbers: Tensor, rollout_ids: Sequence[int | str]) -> None:  # [*], [S]
    """Raises DataError on all ranks where a rollout's samples have different prompts; a rank that has one of them names it.

    wrong: the numbers of such rollouts. rollout_numbers: those of this rank's samples.
    """
    if not wrong.numel():
        return
    own = torch.isin(rollout_numbers, wrong).nonzero()[:1, 0].tolist()
    name = f"rollout {rollout_ids[own[0]]!r}" if own else "a rollout of other data-parallel ranks"
    raise DataError(
        f"{name} has samples of two prompts: the rows of a rollout share one prompt; give each rollout of the step an id of its "
        "own, as f'{prompt_id}/{number}', or correct prompt_ids"
    )


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
        prompts = None if prompt_ids is None else _digests(prompt_ids, "prompt")
        return _Samples(counts, prompts, None if rollout_ids is None else _digests(rollout_ids, "rollout")), None
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


def _digests(ids: Sequence[int | str], kind: str) -> Tensor:  # [S] int64
    """Equal ids are hashed once where equal means the same: 1 == True == 1.0, but only 1 is an id."""
    if set(map(type, ids)) <= {int, str}:
        known = {name: prompt_digest(name, kind) for name in dict.fromkeys(ids)}
        return _int64(map(known.__getitem__, ids))
    return _int64(prompt_digest(name, kind) for name in ids)


def _int64(values: Iterable[int]) -> Tensor:
    """Ten times as fast as torch.tensor of a list."""
    numbers = array("q", values)
    return torch.frombuffer(numbers, dtype=torch.int64) if numbers else torch.zeros(0, dtype=torch.int64)


def _count_masks(masks: list[Tensor]) -> Tensor:  # [S] int64
    """The unmasked tokens of each mask. The host waits once for masks on a device."""
    wrong = next((number for number, mask in enumerate(masks) if not isinstance(mask, Tensor) or mask.dim() != 1), None)
    counts = [_count_mask(mask) for mask in _on_host(masks[:wrong])]
    if None in counts:
        raise DataError(
            f"loss_masks[{counts.index(None)}] has values other than 0 and 1: a mask selects tokens, weights belong elsewhere"
        )
    if wrong is not None:
        mask = masks[wrong]
        given = f"{tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise DataError(f"loss_masks[{wrong}] is {given}: it must be a tensor [response_length]")
    return torch.tensor(counts, dtype=torch.int64)


def _on_host(masks: list[Tensor]) -> list[Tensor]:
    """One copy for all masks that lie on a device."""
    moved = [mask for mask in masks if mask.is_cuda]
    if not moved:
        return masks
    copies = iter(torch.cat(moved).cpu().split([mask.numel() for mask in moved]))
    return [next(copies) if mask.is_cuda else mask for mask in masks]


def _count_mask(mask: Tensor) -> int | None:  # [response_length] on the CPU
    """The ones; None where it has other values than 0 and 1. numpy takes half of torch's time."""
    if mask.dtype == torch.bool:
        return int(np.count_nonzero(mask.numpy()))
    values = (mask.float() if mask.dtype == torch.bfloat16 else mask).numpy()  # numpy has no bfloat16
    ones = int(np.count_nonzero(values == 1))
    return ones if ones == np.count_nonzero(values) else None


def _check_group_sizes(
    sizes: Tensor,  # [P]
    prompt_numbers: Tensor,  # [S] of this rank's samples: an index into sizes
    prompt_ids: Sequence[int | str],
    samples_per_prompt: int,
    allow_partial: bool,
    kind: str,
) -> None:
    """Raises on all ranks where one prompt group has a wrong size; a rank that holds samples of such a group names it."""
    smallest, largest = int(sizes.min()), int(sizes.max())
    for size, is_bad in ((largest, largest > samples_per_prompt), (smallest, smallest < samples_per_prompt)):
        if not is_bad or (size < samples_per_prompt and allow_partial):
            continue
        own = (sizes[prompt_numbers] == size).nonzero()[:1, 0].tolist()
        name = f"prompt {prompt_ids[own[0]]!r}" if own else "a prompt of another data-parallel rank"
        declare = f"every prompt has {size}, so give --samples-per-prompt {size}; or else " if smallest == largest else ""
        if size > samples_per_prompt:
            has = f"{size} {kind} in this step, more than samples_per_prompt={samples_per_prompt}"
            raise GroupSizeError(f"{name} has {has}: {declare}look for ids that two prompts share")
        has = f"{size} of samples_per_prompt={samples_per_prompt} {kind} in this step"
        raise GroupSizeError(f"{name} has {has}: {declare}keep groups whole, or allow it with --allow-partial-prompt-groups")
