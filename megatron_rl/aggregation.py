"""Turns counts into loss weights. No other module divides by a count. Counts are global and taken before any slicing.

    L = sum_i w_i sum_t m_it l_it
    sample_mean w_i = 1 / (N m_i)      prompt_mean w_i = 1 / (P M_g)      token_mean w_i = 1 / T      constant w_i = 1 / (L N)

N samples, P prompts and T unmasked tokens of the optimiser step; m_i unmasked tokens of sample i, M_g of all samples of its prompt.
"""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import NamedTuple, overload

import torch
from torch import Tensor

from megatron_rl.aggregation_record import AggregationRecord
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.layout.groups import Group, all_gather_stack, check_dp_group_excludes_cp, group_device, resolve_group
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
    loss_masks: Iterable[Tensor],
    prompt_ids: Sequence[int | str],
    dp_group: Group | None = None,
    *,
    samples_per_prompt: int | None = None,
    allow_partial_prompt_groups: bool = False,
) -> tuple[StepTotals, Tensor, Tensor]: ...


@overload
def count_step(
    loss_masks: Iterable[Tensor],
    prompt_ids: Sequence[int | str] | None = None,
    dp_group: Group | None = None,
    *,
    samples_per_prompt: int | None = None,
    allow_partial_prompt_groups: bool = False,
) -> tuple[StepTotals, Tensor, Tensor | None]: ...


def count_step(
    loss_masks: Iterable[Tensor],  # S tensors [response_length], bool or 0/1: this rank's whole samples of the whole step
    prompt_ids: Sequence[int | str] | None = None,
    dp_group: Group | None = None,
    *,
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
        samples_per_prompt: the declared size of a prompt group. None: sizes are not checked.
        allow_partial_prompt_groups: accept groups smaller than samples_per_prompt.
    Communication: one all-gather of sizes and one of [S, 2] int64 (digests of ids, tokens) over dp; none at size 1, the second
        only with prompt_ids.
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
    counts, digests, problem = _local_counts(loss_masks, prompt_ids, samples_per_prompt)
    device = group_device(dp_group)
    # A rank with a problem still takes part, so that all ranks raise and none waits for it.
    group_size = 0 if samples_per_prompt is None or problem is not None else int(samples_per_prompt)
    own = _Header(problem is not None, group_size, bool(allow_partial_prompt_groups), len(counts), sum(counts), digests is not None)
    headers = [_Header(*row) for row in all_gather_stack(torch.tensor(own, device=device), dp_group).tolist()]
    if problem is not None:
        raise problem
    has_ids = _check_headers(headers)
    num_samples, num_tokens = sum(row.num_samples for row in headers), sum(row.num_tokens for row in headers)
    if num_tokens == 0:
        raise DataError(
            f"the step has {num_samples} samples and not a single unmasked token: there is nothing to learn from; skip the step, "
            "or give it more samples"
        )
    token_counts = torch.tensor(counts, dtype=torch.int64)
    if not has_ids:
        if samples_per_prompt is not None:
            raise ConfigError(
                f"samples_per_prompt={samples_per_prompt} without prompt_ids: no group can be checked; pass them, or remove it"
            )
        return StepTotals(num_samples, None, num_tokens), token_counts, None
    rows = _exchange_prompts(counts, digests or [], [row.num_samples for row in headers], dp_group, device)
    tokens_of_prompt: dict[int, int] = {}
    samples_of_prompt: dict[int, int] = {}
    for digest, count in rows:
        tokens_of_prompt[digest] = tokens_of_prompt.get(digest, 0) + count
        samples_of_prompt[digest] = samples_of_prompt.get(digest, 0) + 1
    names = dict(zip(digests or [], prompt_ids or [], strict=True))
    _check_group_sizes(samples_of_prompt, names, samples_per_prompt, allow_partial_prompt_groups)
    prompt_token_counts = torch.tensor([tokens_of_prompt[digest] for digest in digests or []], dtype=torch.int64)
    return StepTotals(num_samples, len(tokens_of_prompt), num_tokens), token_counts, prompt_token_counts


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
    record = get_loss_aggregation(str(aggregation))
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
    """What a rank tells the others before samples are exchanged. All fields are sent as integers."""

    has_problem: bool
    samples_per_prompt: int  # 0: not given
    allow_partial_prompt_groups: bool
    num_samples: int
    num_tokens: int
    has_ids: bool


def _check_headers(headers: list[_Header]) -> bool:
    """Whether prompts are known. Raises the same error on every rank where ranks disagree, or where one refused its samples."""
    for rank, header in enumerate(headers):
        if header.has_problem:
            raise DataError(f"rank {rank} of the data-parallel group refused its samples: its own message says why")
    for name in ("samples_per_prompt", "allow_partial_prompt_groups"):
        values = [getattr(header, name) for header in headers]
        if len(set(values)) > 1:
            raise ConfigError(f"{name} differs between data-parallel ranks: {values} (0: not given); pass the same on all of them")
    # A rank without samples has no say in whether prompts are known.
    has_ids = {bool(header.has_ids) for header in headers if header.num_samples}
    if len(has_ids) > 1:
        raise DataError("prompt_ids are given on some data-parallel ranks and missing on others: pass them on all or on none")
    return True in has_ids


def _local_counts(
    loss_masks: Iterable[Tensor], prompt_ids: Sequence[int | str] | None, samples_per_prompt: int | None
) -> tuple[list[int], list[int] | None, Exception | None]:
    """(tokens of each sample, prompt digests, problem): a problem is returned, not raised, so that ranks raise together."""
    try:
        if samples_per_prompt is not None and not (
            isinstance(samples_per_prompt, int | Integral) and not isinstance(samples_per_prompt, bool) and samples_per_prompt >= 1
        ):
            raise ConfigError(f"samples_per_prompt={samples_per_prompt!r} must be a whole number of at least 1, or None")
        counts = _count_masks(loss_masks)
        if prompt_ids is None:
            return counts, None, None
        if len(prompt_ids) != len(counts):
            raise DataError(f"{len(prompt_ids)} prompt_ids for {len(counts)} loss_masks: one id a sample")
        return counts, [prompt_digest(prompt_id) for prompt_id in prompt_ids], None
    except (ConfigError, DataError) as error:
        return [], None, error
    except Exception as error:  # from the caller's iterator, for instance: the other ranks must not wait for this one
        problem = DataError(f"loss_masks or prompt_ids cannot be read ({type(error).__name__}): {error}")
        problem.__cause__ = error
        return [], None, problem


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


def _count_masks(masks: Iterable[Tensor]) -> list[int]:
    """The unmasked tokens of each mask. The host waits once for each device."""
    counts, ones, problem = [], {}, None
    for index, mask in enumerate(masks):
        if not isinstance(mask, Tensor) or mask.dim() != 1:
            given = f"{tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
            problem = f"loss_masks[{index}] is {given}: it must be a tensor [response_length]"
            break
        counts.append(mask.count_nonzero())
        if mask.dtype != torch.bool:
            ones[index] = (mask == 1).count_nonzero()
    numbers = _numbers([*counts, *ones.values()])
    for index, number in zip(ones, numbers[len(counts) :], strict=True):
        if number != numbers[index]:
            problem = f"loss_masks[{index}] has values other than 0 and 1: a mask selects tokens, weights belong elsewhere"
            break
    if problem is not None:
        raise DataError(problem)
    return numbers[: len(counts)]


def _numbers(values: list[Tensor]) -> list[int]:  # 0-d, on any devices
    """The numbers on the host, with one copy from each device."""
    numbers = [0] * len(values)
    for device in {value.device for value in values}:
        places = [place for place, value in enumerate(values) if value.device == device]
        for place, number in zip(places, torch.stack([values[place] for place in places]).tolist(), strict=True):
            numbers[place] = number
    return numbers


def _exchange_prompts(
    counts: list[int], digests: list[int], sizes: list[int], dp_group: Group, device: torch.device
) -> list[tuple[int, int]]:
    """(digest, tokens) of every sample of the step, in rank order, from one all-gather padded to the largest rank."""
    payload = torch.zeros(max(sizes), 2, dtype=torch.int64, device=device)
    if counts:
        payload[: len(counts)] = torch.tensor(list(zip(digests, counts, strict=True)), dtype=torch.int64)
    gathered = all_gather_stack(payload, dp_group).tolist()
    return [(row[0], row[1]) for rows, size in zip(gathered, sizes, strict=True) for row in rows[:size]]


def _check_group_sizes(
    samples_of_prompt: dict[int, int], names: dict[int, int | str], samples_per_prompt: int | None, allow_partial: bool
) -> None:
    if samples_per_prompt is None:
        return
    for digest, size in samples_of_prompt.items():
        name = repr(names[digest]) if digest in names else f"with digest {digest} (on another data-parallel rank)"
        if size > samples_per_prompt:
            raise DataError(f"prompt {name} has {size} samples in this step, more than samples_per_prompt={samples_per_prompt}")
        if size < samples_per_prompt and not allow_partial:
            raise DataError(
                f"prompt {name} has {size} of samples_per_prompt={samples_per_prompt} samples in this step: keep groups whole, or "
                "allow it with --allow-partial-prompt-groups"
            )
