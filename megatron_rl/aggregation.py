"""Turns counts into loss weights. No other module divides by a count. Counts are global and taken before any slicing.

    L = sum_i w_i sum_t m_it l_it
    sample_mean w_i = 1 / (N m_i)      prompt_mean w_i = 1 / (P M_g)      token_mean w_i = 1 / T      constant w_i = 1 / (L N)

N samples, P prompts and T unmasked tokens of the optimiser step; m_i unmasked tokens of sample i, M_g of all samples of its prompt.
"""

from __future__ import annotations

import hashlib
import math
import operator
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Integral, Real
from operator import attrgetter
from typing import NamedTuple, overload

import torch
from torch import Tensor

from megatron_rl.aggregation_record import AggregationRecord
from megatron_rl.errors import ConfigError, DataError, EmptyStep
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
from megatron_rl.loss_hub import get_loss_aggregation, register_loss_aggregation

# Relative. A function may compute in float32, with a few roundings.
FORMULA_TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Counts of one optimiser step over all data-parallel ranks and micro-batches; num_prompts None where prompts are unknown.

    Raises DataError for a count that is not a whole number of at least 0, and for more prompts than samples.
    """

    num_samples: int
    num_prompts: int | None
    num_tokens: int

    def __post_init__(self) -> None:
        for name in ("num_samples", "num_prompts", "num_tokens"):
            count = getattr(self, name)
            if count is None and name == "num_prompts":
                continue
            if isinstance(count, bool) or not isinstance(count, Integral) or count < 0:
                raise DataError(f"{name}={count!r} of StepTotals must be a whole number of at least 0: count_step gives it")
        if self.num_prompts is not None and not min(1, self.num_samples) <= self.num_prompts <= self.num_samples:
            raise DataError(f"num_prompts={self.num_prompts} of {self.num_samples} samples: each sample has one prompt")


@overload
def count_step(
    loss_masks: Iterable[Tensor] | None,
    prompt_ids: Sequence[int | str],
    dp_group: Group | None = None,
    *,
    token_counts: Tensor | Sequence[int] | None = None,
    samples_per_prompt: int | None = None,
    allow_partial_prompt_groups: bool = False,
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
) -> tuple[StepTotals, Tensor, Tensor | None]: ...


def count_step(
    loss_masks: Iterable[Tensor] | None = None,  # S tensors [response_length], bool or 0/1
    prompt_ids: Sequence[int | str] | None = None,
    dp_group: Group | None = None,
    *,
    token_counts: Tensor | Sequence[int] | None = None,  # [S] instead of loss_masks
    samples_per_prompt: int | None = None,
    allow_partial_prompt_groups: bool = False,
) -> tuple[StepTotals, Tensor, Tensor | None]:  # totals, token_counts [S] int64, prompt_token_counts [S] int64
    """Counts the samples, prompts and tokens of the step, before context-parallel slicing and micro-batching.

    Every cp rank of one dp rank passes the same whole samples. A fully masked sample counts in num_samples (its prompt in
    num_prompts) and adds no token. Counts come back on the CPU.

    Args:
        loss_masks: one tensor a sample, 1 where the token trains; all samples of this dp rank in the whole step, S of them.
        prompt_ids: S ids; samples with equal ids form a prompt group, over all dp ranks. None: prompts are not counted.
        dp_group: excludes cp, so that no sample is counted twice. None: Megatron's, else one rank.
        token_counts: the unmasked tokens of each sample, where they are known; give these or loss_masks.
        samples_per_prompt: the declared size of a prompt group. None: sizes are not checked.
        allow_partial_prompt_groups: accept groups smaller than samples_per_prompt.
    Communication over dp, none at size 1: one all-gather of 56 bytes. With prompt_ids also the rows (digest of the id, tokens,
        samples) of each rank's prompts: up to GATHERED_ROWS rows in all by one all-gather; more by three all-to-alls, after which
        a rank holds only the prompts that it owns, and two all-reduces of numbers. docs/scale.md has sizes and times.
    Raises: DataError, on all ranks of dp_group together, for a mask that is not 0/1, a step without an unmasked token, prompt_ids
        on some ranks only, and a prompt group that is incomplete or too large. ConfigError for samples_per_prompt without
        prompt_ids, for settings that differ between ranks, and for a dp_group that holds cp ranks.

    >>> masks = [torch.ones(2), torch.ones(4), torch.ones(1), torch.zeros(3)]
    >>> totals, tokens, prompt_tokens = count_step(masks, ["a", "a", "b", "b"])
    >>> totals, tokens.tolist(), prompt_tokens.tolist()
    (StepTotals(num_samples=4, num_prompts=2, num_tokens=7), [2, 4, 1, 0], [6, 6, 1, 1])
    """
    dp_group = resolve_group(dp_group, "dp")
    check_dp_group_excludes_cp(dp_group)
    counts, prompts, problem = _local_counts(loss_masks, token_counts, prompt_ids, samples_per_prompt)
    # A rank with a problem still takes part, so that all ranks raise and none waits for it.
    own = _Header(
        has_problem=problem is not None,
        samples_per_prompt=0 if samples_per_prompt is None or problem is not None else int(samples_per_prompt),
        allow_partial_prompt_groups=bool(allow_partial_prompt_groups),
        num_samples=counts.numel(),
        num_tokens=int(counts.sum()),
        has_ids=prompts is not None,
        num_prompts=0 if prompts is None else prompts.digests.numel(),
    )
    headers = all_gather_stack(torch.tensor(own, device=group_device(dp_group)), dp_group).cpu()
    if problem is not None:
        raise problem
    has_ids = _check_headers(headers)
    columns = dict(zip(_Header._fields, headers.unbind(1), strict=True))
    num_samples, num_tokens = int(columns["num_samples"].sum()), int(columns["num_tokens"].sum())
    if num_tokens == 0:
        raise EmptyStep(
            f"the step has {num_samples} samples and not a single unmasked token: there is nothing to learn from; skip the step, "
            "or give it more samples"
        )
    if not has_ids:
        if samples_per_prompt is not None:
            raise ConfigError(
                f"samples_per_prompt={samples_per_prompt} without prompt_ids: no group can be checked; pass them, or remove it"
            )
        return StepTotals(num_samples, None, num_tokens), counts, None
    prompts = prompts or _Prompts.none()
    merged = merge_prompts(prompts.rows(counts), columns["num_prompts"], dp_group)
    if samples_per_prompt is not None:
        names = [] if prompt_ids is None else prompt_ids
        _check_group_sizes(merged, prompts, names, samples_per_prompt, allow_partial_prompt_groups)
    return StepTotals(num_samples, merged.num_prompts, num_tokens), counts, merged.tokens[prompts.of_sample]


def sample_token_weights(
    aggregation: str,
    token_counts: Tensor,  # [S] unmasked tokens of each sample, over all cp ranks
    totals: StepTotals,
    *,
    prompt_token_counts: Tensor | None = None,  # [S] unmasked tokens of each sample's prompt group, over the step
    divisor: float | None = None,
) -> Tensor:  # [S] float32
    """The weight of each token of a sample in the step's loss; 0 for a fully masked sample.

    Any part of the step's samples may be passed: the denominators come from `totals`.

    Args:
        aggregation: sample_mean, prompt_mean, token_mean, constant, a registered name, or module.function.
        token_counts, totals, prompt_token_counts: as count_step returns them. prompt_token_counts is needed by prompt_mean.
        divisor: the L of constant, in tokens; None for the other built-in aggregations.
    Communication: none.
    Raises: ConfigError for an unknown aggregation, for prompt counts or a divisor that it needs and does not get, and for a divisor
        that it has no use for. DataError for counts that are not whole numbers of at least 0 or are larger than `totals`, and for
        a registered aggregation that returns no weights, or other weights than its formula gives.

    >>> totals = StepTotals(num_samples=4, num_prompts=2, num_tokens=7)
    >>> (1 / sample_token_weights("sample_mean", torch.tensor([2, 4, 1]), totals)).tolist()
    [8.0, 16.0, 4.0]
    """
    check_counts("token_counts", token_counts)
    _check_totals(totals)
    if not token_counts.is_cuda and (token_counts.numel() > totals.num_samples or int(token_counts.sum()) > totals.num_tokens):
        raise DataError(
            f"token_counts hold {token_counts.numel()} samples and {int(token_counts.sum())} tokens, more than the whole step has: "
            f"{totals}; pass the counts and totals of one count_step"
        )
    if prompt_token_counts is not None:
        _check_prompt_counts(prompt_token_counts, token_counts)
        if not prompt_token_counts.is_cuda and bool((prompt_token_counts > totals.num_tokens).any()):
            raise DataError(
                f"prompt_token_counts {prompt_token_counts.tolist()} hold more tokens than the whole step: {totals}; pass the "
                "counts and totals of one count_step"
            )
    return weigh_tokens(aggregation, token_counts, totals, prompt_token_counts=prompt_token_counts, divisor=divisor)


def weigh_tokens(
    aggregation: str,
    token_counts: Tensor,  # [S]
    totals: StepTotals,
    *,
    prompt_token_counts: Tensor | None = None,  # [S]
    divisor: float | None = None,
) -> Tensor:  # [S] float32
    """sample_token_weights, but `token_counts` are not compared with `totals`.

    For rows that are segments of samples, and for hosts that divide by the step's counts themselves (totals of 1).
    """
    record = get_loss_aggregation(aggregation)
    _check_needs(record, aggregation, totals, prompt_token_counts, divisor)
    _check_totals(totals)
    check_counts("token_counts", token_counts)
    if prompt_token_counts is not None:
        _check_prompt_counts(prompt_token_counts, token_counts)
    # Copies, because a registered function may write into its arguments.
    counts, groups = (
        None if tensor is None else tensor.to(torch.float64, copy=True) for tensor in (token_counts, prompt_token_counts)
    )
    weights = record.function(counts, totals, prompt_token_counts=groups, divisor=divisor)
    if not isinstance(weights, Tensor) or not weights.is_floating_point() or weights.shape != token_counts.shape:
        given = f"{tuple(weights.shape)} {weights.dtype}" if isinstance(weights, Tensor) else type(weights).__name__
        raise DataError(
            f"loss aggregation {aggregation} returned {given}: it must return a floating point tensor [S={token_counts.numel()}], "
            "one weight a sample"
        )
    exact = torch.where(token_counts > 0, weights, 0.0)
    weights = exact.to(torch.float32)  # before the check: 1e300 is finite in float64 alone
    if weights.is_cuda:  # looking would synchronise
        return weights
    if not bool((torch.isfinite(weights) & (weights >= 0)).all()):
        raise DataError(
            f"loss aggregation {aggregation} gives a weight that is negative or not finite in float32: {weights.tolist()}"
        )
    _check_formula(record, exact, token_counts, totals, prompt_token_counts, divisor)
    return weights


@register_loss_aggregation("sample_mean", formula="1 / (N m_i)", source="GRPO, GSPO")
def sample_mean(token_counts: Tensor, totals: StepTotals, *, prompt_token_counts: Tensor | None, divisor: float | None) -> Tensor:
    """Each sample weighs the same. GRPO (arXiv:2402.03300); GSPO as published (arXiv:2507.18071)."""
    return 1.0 / (totals.num_samples * token_counts)


@register_loss_aggregation("prompt_mean", formula="1 / (P M_g)", source="DAPO as published")
def prompt_mean(token_counts: Tensor, totals: StepTotals, *, prompt_token_counts: Tensor | None, divisor: float | None) -> Tensor:
    """Each prompt weighs the same, and each token of a prompt. DAPO (arXiv:2503.14476); the prompt average of ScaleRL."""
    assert totals.num_prompts is not None and prompt_token_counts is not None  # the caller checks this
    return 1.0 / (totals.num_prompts * prompt_token_counts)


@register_loss_aggregation("token_mean", formula="1 / T", source="frameworks' DAPO")
def token_mean(token_counts: Tensor, totals: StepTotals, *, prompt_token_counts: Tensor | None, divisor: float | None) -> Tensor:
    """Each token of the step weighs the same: what most frameworks call DAPO."""
    return torch.full_like(token_counts, 1.0 / totals.num_tokens)


@register_loss_aggregation("constant", formula="1 / (L N)", source="Dr. GRPO")
def constant(token_counts: Tensor, totals: StepTotals, *, prompt_token_counts: Tensor | None, divisor: float | None) -> Tensor:
    """A sample weighs in proportion to its tokens. Dr. GRPO (arXiv:2503.20783). L sets the scale of a run: it has no default."""
    assert divisor is not None  # the caller checks this
    return torch.full_like(token_counts, 1.0 / (divisor * totals.num_samples))


def regularizer_weights(token_counts: Tensor, totals: StepTotals) -> Tensor:  # [S] float32
    """Weights of the KL and entropy terms: sample_mean under every aggregation, so that coefficients keep their meaning.

    Raises what sample_token_weights raises.
    """
    return sample_token_weights("sample_mean", token_counts, totals)


def prompt_digest(prompt_id: int | str) -> int:
    """A stable 64-bit name of a prompt: the same in each process, unlike hash(). 1 and "1" are different prompts.

    Raises DataError for an id that is not int or str.
    """
    if isinstance(prompt_id, bool) or not isinstance(prompt_id, str):
        try:
            if isinstance(prompt_id, bool):
                raise TypeError("bool")
            text = f"int:{operator.index(prompt_id)}"
        except TypeError as error:
            raise DataError(f"prompt id {prompt_id!r} is {type(prompt_id).__name__}: use int or str") from error
    else:
        text = f"str:{prompt_id}"
    # surrogatepass: a lone surrogate is a legal str, so it must not raise.
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big", signed=True)


class _Header(NamedTuple):
    """What a rank tells the others before prompts are exchanged. All fields are sent as integers."""

    has_problem: bool
    samples_per_prompt: int  # 0: not given
    allow_partial_prompt_groups: bool
    num_samples: int
    num_tokens: int
    has_ids: bool
    num_prompts: int  # different ids on this rank


def _check_headers(headers: Tensor) -> bool:  # [dp, fields of _Header] int64
    """Whether prompts are known. Raises the same error on every rank where ranks disagree, or where one refused its samples."""
    columns = dict(zip(_Header._fields, headers.unbind(1), strict=True))
    if bool(columns["has_problem"].any()):
        rank = int(columns["has_problem"].argmax())
        raise DataError(f"rank {rank} of the data-parallel group refused its samples: its own message says why")
    for name in ("samples_per_prompt", "allow_partial_prompt_groups"):
        if bool((columns[name] != columns[name][0]).any()):
            values = columns[name].tolist()
            raise ConfigError(f"{name} differs between data-parallel ranks: {values} (0: not given); pass the same on all of them")
    # A rank without samples has no say in whether prompts are known.
    has_ids = columns["has_ids"][columns["num_samples"] > 0]
    if bool(has_ids.any()) and not bool(has_ids.all()):
        raise DataError("prompt_ids are given on some data-parallel ranks and missing on others: pass them on all or on none")
    return bool(has_ids.any())


class _Prompts(NamedTuple):
    """The different prompts of this rank."""

    digests: Tensor  # [U] int64, ascending
    of_sample: Tensor  # [S] int64: the prompt of each sample, an index into digests

    @classmethod
    def none(cls) -> _Prompts:
        return cls(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))

    def rows(self, counts: Tensor) -> Tensor:  # [S] -> [U, 3] int64: digest, tokens, samples
        sums = torch.zeros(2, self.digests.numel(), dtype=torch.int64)
        sums.index_add_(1, self.of_sample, torch.stack([counts, torch.ones_like(counts)]))
        return torch.stack([self.digests, *sums], dim=1)


class MergedPrompts(NamedTuple):
    """This rank's prompts, counted over all data-parallel ranks, and the sizes of all prompt groups of the step."""

    tokens: Tensor  # [U] int64, in the order of this rank's rows
    samples: Tensor  # [U] int64
    num_prompts: int
    largest: int  # samples of the largest prompt group
    smallest: int


# Up to this many rows in all, each rank gets the rows of all ranks: one collective, 1.5 MB, and a few milliseconds to merge them.
GATHERED_ROWS = 65536


def merge_prompts(rows: Tensor, num_rows: Tensor, dp_group: Group) -> MergedPrompts:  # [U, 3] int64 on the CPU, [dp] int64
    """Adds the tokens and samples of each prompt up over dp. num_rows: the rows of each rank. Communication: as count_step."""
    if int(num_rows.max()) * dp_group.size() > GATHERED_ROWS and dp_group.size() > 1:
        return _merged_by_owners(rows, dp_group)
    padded = torch.zeros(int(num_rows.max()), 3, dtype=torch.int64)
    padded[: rows.shape[0]] = rows
    gathered = all_gather_stack(padded.to(group_device(dp_group)), dp_group).cpu().flatten(0, 1)
    digests, totals, _ = _added_up(gathered[gathered[:, 2] > 0])
    tokens, samples = totals[torch.searchsorted(digests, rows[:, 0].contiguous())].unbind(1)
    return MergedPrompts(tokens, samples, digests.numel(), *_size_range(totals))


def _merged_by_owners(rows: Tensor, dp_group: Group) -> MergedPrompts:
    """A prompt belongs to rank digest mod dp, which adds its rows up and answers. No rank holds the rows of the others' prompts."""
    owners = rows[:, 0] % dp_group.size()
    order = owners.argsort(stable=True)
    to_send = torch.bincount(owners, minlength=dp_group.size())
    device = group_device(dp_group)
    to_receive = all_to_all_rows(to_send.to(device), None, None, dp_group).cpu()
    there, back = to_send.tolist(), to_receive.tolist()
    received = all_to_all_rows(rows[order].to(device), there, back, dp_group).cpu()
    digests, totals, places = _added_up(received)
    answers = all_to_all_rows(totals[places].to(device), back, there, dp_group).cpu()
    counts = torch.empty_like(answers)
    counts[order] = answers
    largest, smallest = _size_range(totals)
    num_prompts = int(all_reduce_sum(torch.tensor(digests.numel(), device=device), dp_group))
    largest, negative = all_reduce_max(torch.tensor([largest, -smallest], device=device), dp_group).tolist()
    return MergedPrompts(counts[:, 0], counts[:, 1], num_prompts, largest, -negative)


def _added_up(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[R, 3] -> different digests [U], their tokens and samples [U, 2], and the place in them of each row [R]."""
    digests, places = rows[:, 0].unique(return_inverse=True)
    totals = torch.zeros(digests.numel(), 2, dtype=torch.int64).index_add_(0, places, rows[:, 1:])
    return digests, totals, places


def _size_range(totals: Tensor) -> tuple[int, int]:  # [U, 2] -> the largest and the smallest number of samples
    """(0, a number above all sizes) without a prompt, which an owner may be."""
    samples = totals[:, 1]
    return (int(samples.max()), int(samples.min())) if samples.numel() else (0, torch.iinfo(torch.int64).max)


def _local_counts(
    loss_masks: Iterable[Tensor] | None,
    token_counts: Tensor | Sequence[int] | None,
    prompt_ids: Sequence[int | str] | None,
    samples_per_prompt: int | None,
) -> tuple[Tensor, _Prompts | None, Exception | None]:
    """(tokens of each sample, prompts, problem): a problem is returned, not raised, so that ranks raise together."""
    nothing = torch.zeros(0, dtype=torch.int64)
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
        if prompt_ids is None:
            return counts, None, None
        if len(prompt_ids) != counts.numel():
            raise DataError(f"{len(prompt_ids)} prompt_ids for {counts.numel()} samples: give one id a sample")
        return counts, _Prompts(*_digests(prompt_ids).unique(return_inverse=True)), None
    except (ConfigError, DataError) as error:
        return nothing, None, error
    except Exception as error:  # from the caller's iterator, for instance: the other ranks must not wait for this one
        problem = DataError(f"loss_masks or prompt_ids cannot be read ({type(error).__name__}): {error}")
        problem.__cause__ = error
        return nothing, None, problem


def _digests(prompt_ids: Sequence[int | str]) -> Tensor:  # [S] int64
    """prompt_digest of each id. Equal ids are hashed once where equal means the same: 1 == True == 1.0, but only 1 is an id."""
    if set(map(type, prompt_ids)) <= {int, str}:
        known = {prompt_id: prompt_digest(prompt_id) for prompt_id in dict.fromkeys(prompt_ids)}
        return _int64(map(known.__getitem__, prompt_ids))
    return _int64(map(prompt_digest, prompt_ids))


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


def _check_totals(totals: StepTotals) -> None:
    if totals.num_tokens <= 0 or totals.num_samples <= 0:
        raise DataError(f"{totals} has no unmasked token: nothing to weight")


def _check_needs(
    record: AggregationRecord, aggregation: str, totals: StepTotals, prompt_token_counts: Tensor | None, divisor: float | None
) -> None:
    """Raises ConfigError where a count that the record needs is missing, or a divisor is missing, of no use or not positive."""
    given = {"prompt_token_counts": prompt_token_counts, "totals.num_prompts": totals.num_prompts}
    missing = [name for name in given if name.rpartition(".")[2] in (record.needs or ()) and given[name] is None]
    if missing:
        raise ConfigError(f"{aggregation} needs {missing[0]}: pass prompt_ids to count_step and its third result to the weights")
    if divisor is None:
        if record.takes_divisor and record.formula is not None:
            raise ConfigError(
                f"loss aggregation {aggregation} needs divisor (--loss-aggregation-divisor): the longest allowed response"
            )
    elif record.takes_divisor is False:
        raise ConfigError(
            f"divisor={divisor} with loss aggregation {aggregation}, whose weight is {record.weight_in_words({})}: it has no "
            "divisor; remove it or choose constant"
        )
    elif isinstance(divisor, bool) or not isinstance(divisor, Real) or not math.isfinite(divisor) or divisor <= 0:
        raise ConfigError(f"divisor={divisor!r} must be a finite number above 0")


def _check_formula(
    record: AggregationRecord,
    weights: Tensor,  # [S], of any floating dtype
    token_counts: Tensor,  # [S]
    totals: StepTotals,
    prompt_token_counts: Tensor | None,  # [S]
    divisor: float | None,
) -> None:
    """Raises DataError where the function returned other weights than its declared formula gives."""
    if record.formula is None:
        return
    counts = {"m_i": token_counts, "M_g": prompt_token_counts}
    numbers = {"N": totals.num_samples, "P": totals.num_prompts, "T": totals.num_tokens, "L": divisor}
    values: dict[str, Tensor | float] = {name: tensor.double() for name, tensor in counts.items() if tensor is not None}
    values |= {name: float(number) for name, number in numbers.items() if number is not None}
    declared = torch.as_tensor(record.formula.evaluate(values), dtype=torch.float64).expand(weights.shape)
    has_tokens = token_counts > 0
    if not torch.allclose(weights.double()[has_tokens], declared[has_tokens], rtol=FORMULA_TOLERANCE, atol=0.0):
        raise DataError(
            f"loss aggregation {record.name} returned {weights.tolist()} and its formula {record.formula} gives "
            f"{torch.where(has_tokens, declared, 0.0).tolist()}: correct one of them"
        )


def _check_prompt_counts(prompt_counts: Tensor, counts: Tensor) -> None:
    check_counts("prompt_token_counts", prompt_counts)
    if prompt_counts.shape != counts.shape:
        raise DataError(
            f"prompt_token_counts {tuple(prompt_counts.shape)} must have one entry a sample, as token_counts {tuple(counts.shape)}"
        )
    if not counts.is_cuda and not prompt_counts.is_cuda and bool((prompt_counts < counts).any()):
        raise DataError(
            f"prompt_token_counts {prompt_counts.tolist()} are below token_counts {counts.tolist()}: a prompt group holds at least "
            "its sample's tokens; pass count_step's third result"
        )


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
    merged: MergedPrompts, prompts: _Prompts, prompt_ids: Sequence[int | str], samples_per_prompt: int, allow_partial: bool
) -> None:
    """Raises on all ranks where one prompt group has a wrong size; a rank that holds samples of such a group names it."""
    for size, is_bad in (
        (merged.largest, merged.largest > samples_per_prompt),
        (merged.smallest, merged.smallest < samples_per_prompt),
    ):
        if not is_bad or (size < samples_per_prompt and allow_partial):
            continue
        own = (merged.samples[prompts.of_sample] == size).nonzero()[:1, 0].tolist()
        name = f"prompt {prompt_ids[own[0]]!r}" if own else "a prompt of another data-parallel rank"
        is_usual = merged.smallest == merged.largest
        declare = f"every prompt has {size}, so give --samples-per-prompt {size}; or else " if is_usual else ""
        if size > samples_per_prompt:
            found = f"{size} samples in this step, more than samples_per_prompt={samples_per_prompt}"
            raise DataError(f"{name} has {found}: {declare}look for ids that two prompts share")
        found = f"{size} of samples_per_prompt={samples_per_prompt} samples in this step"
        raise DataError(f"{name} has {found}: {declare}keep groups whole, or allow it with --allow-partial-prompt-groups")
