"""Turns counts into loss weights. No other module divides by a count. Counts are global and taken before any slicing.

    L = sum_i w_i sum_t m_it l_it
    sample_mean w_i = 1 / (R M_j)      row_mean w_i = 1 / (R k_j m_i)
    prompt_mean w_i = 1 / (P M_g)      token_mean w_i = 1 / T      constant w_i = 1 / (L R)

R rollouts, P prompts and T unmasked tokens of the optimiser step; m_i unmasked tokens of sample i, M_j of its rollout, M_g of its
prompt; k_j samples of its rollout have one. Where each sample is a rollout, R = N samples, M_j = m_i and k_j = 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from numbers import Real

import torch
from torch import Tensor

from megatron_rl.aggregation_record import COUNTS, AggregationRecord, declared_fields
from megatron_rl.count import StepTotals, check_counts, check_totals
from megatron_rl.declare import Function, Registry, check_signature, takes
from megatron_rl.errors import ConfigError, DataError

# Relative. A function may compute in float32, with a few roundings.
FORMULA_TOLERANCE = 1e-5
_PARAMETERS = (("token_counts", "totals"), ("prompt_token_counts", "divisor"))
# Letter of a formula -> the keyword that a function with this letter must have. Another function may have it.
_OF_ROLLOUTS = {letter: COUNTS[letter] for letter in ("M_j", "k_j")}
AGGREGATIONS: Registry[AggregationRecord] = Registry(
    "loss aggregation",
    "register_loss_aggregation",
    declare=lambda name, function: register_loss_aggregation(name)(function),
)


def register_loss_aggregation(
    name: str,
    *,
    formula: str | None = None,
    source: str = "",
    needs: tuple[str, ...] | None = None,
    takes_divisor: bool | None = None,
) -> Callable[[Function], Function]:
    """Decorator: registers `fn(token_counts [S], totals, *, prompt_token_counts [S] | None, divisor) -> weights [S]` as `name`.

    A function with the keywords rollout_token_counts or rows_of_rollout gets M_j or k_j too, [S]; they are m_i and 1 where each
    sample is a rollout. Its totals have num_rollouts in any case.

    formula: the weight as a product of counts over a product of counts, as in "1 / (R M_j)": N samples, R rollouts, P prompts and T
        tokens of the step, m_i tokens of sample i, M_j of its rollout's samples, k_j of which have a token, M_g tokens of its
        prompt's samples, L the divisor. needs and takes_divisor follow from it.
        Without it explain and start lines say that the weight is not stated, and miles and slime need the reward hook.
    source: the algorithms that use it, as in "GRPO, GSPO".
    needs: without a formula, the counts that the function reads besides token_counts, of aggregation_record.STEP_COUNTS.
    takes_divisor: without a formula, whether it uses --loss-aggregation-divisor.

    Raises ConfigError when another function has the name, or when a field or the signature is wrong.
    """
    AGGREGATIONS.check_name(name)
    try:
        fields = declared_fields(formula, source, needs, takes_divisor)
    except ConfigError as error:
        raise ConfigError(f"loss aggregation {name!r}: {error}") from error

    def decorate(function: Function) -> Function:
        powers = {} if fields[0] is None else fields[0].powers
        of_rollouts = (keyword for letter, keyword in _OF_ROLLOUTS.items() if letter in powers or takes(function, keyword))
        positional, keywords = _PARAMETERS
        check_signature("loss aggregation", name, function, positional, (*keywords, *of_rollouts))
        AGGREGATIONS.add(name, AggregationRecord(name, function, *fields))
        return function

    return decorate


def get_loss_aggregation(name: str) -> AggregationRecord:
    """The record of that name. A name with a dot is imported as module.function, and registered without a formula if it was not.

    Raises ConfigError for an unknown name and for a function that cannot be imported.
    """
    return AGGREGATIONS.find(name)


def loss_aggregation_names() -> tuple[str, ...]:
    return AGGREGATIONS.names()


def sample_token_weights(
    aggregation: str,
    token_counts: Tensor,  # [S] unmasked tokens of each sample, over all cp ranks
    totals: StepTotals,
    *,
    prompt_token_counts: Tensor | None = None,  # [S] unmasked tokens of each sample's prompt group, over the step
    divisor: float | None = None,
    rollout_token_counts: Tensor | None = None,  # [S] unmasked tokens of each sample's rollout, over the step
    rows_of_rollout: Tensor | None = None,  # [S] samples of its rollout with at least one unmasked token
) -> Tensor:  # [S] float32
    """The weight of each token of a sample in the step's loss; 0 for a fully masked sample.

    Any part of the step's samples may be passed: the denominators come from `totals`.

    Args:
        aggregation: sample_mean, row_mean, prompt_mean, token_mean, constant, a registered name, or module.function.
        token_counts, totals, prompt_token_counts: as count_step returns them. prompt_token_counts is needed by prompt_mean.
        divisor: the L of constant, in tokens; None for the other built-in aggregations.
        rollout_token_counts, rows_of_rollout: tokens and rows of count_step's RolloutCounts. With rollouts in `totals` sample_mean
            needs the first, row_mean the second. None, and no rollouts in `totals`: each sample is a rollout.
    Communication: none.
    Raises: ConfigError for an unknown aggregation, for prompt or rollout counts or a divisor that it needs and does not get, and
        for a divisor that it has no use for. DataError for counts that are not whole numbers of at least 0, are larger than
        `totals` or do not fit each other, and for a registered aggregation that returns no weights, or other weights than its
        formula gives.

    >>> totals = StepTotals(num_samples=4, num_prompts=2, num_tokens=7)
    >>> (1 / sample_token_weights("sample_mean", torch.tensor([2, 4, 1]), totals)).tolist()
    [8.0, 16.0, 4.0]
    """
    check_counts("token_counts", token_counts)
    check_totals(totals)
    if not token_counts.is_cuda and (token_counts.numel() > totals.num_samples or int(token_counts.sum()) > totals.num_tokens):
        raise DataError(
            f"token_counts hold {token_counts.numel()} samples and {int(token_counts.sum())} tokens, more than the whole step has: "
            f"{totals}; pass the counts and totals of one count_step"
        )
    groups = {"prompt_token_counts": prompt_token_counts, "rollout_token_counts": rollout_token_counts}
    for name, counts in groups.items():
        _check_group_counts(name, counts, token_counts)
        if counts is not None and not counts.is_cuda and bool((counts > totals.num_tokens).any()):
            raise DataError(
                f"{name} {counts.tolist()} hold more tokens than the whole step: {totals}; pass the counts and totals of one "
                "count_step"
            )
    return weigh_tokens(
        *(aggregation, token_counts, totals),
        prompt_token_counts=prompt_token_counts,
        divisor=divisor,
        rollout_token_counts=rollout_token_counts,
        rows_of_rollout=rows_of_rollout,
    )


def weigh_tokens(
    aggregation: str,
    token_counts: Tensor,  # [S]
    totals: StepTotals,
    *,
    prompt_token_counts: Tensor | None = None,  # [S]
    divisor: float | None = None,
    rollout_token_counts: Tensor | None = None,  # [S]
    rows_of_rollout: Tensor | None = None,  # [S]
) -> Tensor:  # [S] float32
    """sample_token_weights, but `token_counts` are not compared with `totals`.

    For rows that are segments of samples, and for hosts that divide by the step's counts themselves (totals of 1).
    """
    record = get_loss_aggregation(aggregation)
    of_rollouts = {"rollout_token_counts": rollout_token_counts, "rows_of_rollout": rows_of_rollout}
    taken = [name for name in of_rollouts if takes(record.function, name)]
    _check_needs(record, aggregation, totals, prompt_token_counts, divisor)
    _check_rollouts(aggregation, totals, of_rollouts, taken)
    check_totals(totals)
    check_counts("token_counts", token_counts)
    for name, tensor in {"prompt_token_counts": prompt_token_counts, **of_rollouts}.items():
        _check_group_counts(name, tensor, token_counts)
    totals = replace(totals, num_rollouts=totals.rollouts)
    given = {
        "token_counts": token_counts,
        "prompt_token_counts": prompt_token_counts,
        "rollout_token_counts": token_counts if rollout_token_counts is None else rollout_token_counts,
        "rows_of_rollout": torch.ones_like(token_counts) if rows_of_rollout is None else rows_of_rollout,
    }
    # Copies, because a registered function may write into its arguments.
    copies = {name: None if tensor is None else tensor.to(torch.float64, copy=True) for name, tensor in given.items()}
    weights = record.function(
        *(copies["token_counts"], totals),
        prompt_token_counts=copies["prompt_token_counts"],
        divisor=divisor,
        **{name: copies[name] for name in taken},
    )
    if not isinstance(weights, Tensor) or not weights.is_floating_point() or weights.shape != token_counts.shape:
        shown = f"{tuple(weights.shape)} {weights.dtype}" if isinstance(weights, Tensor) else type(weights).__name__
        raise DataError(
            f"loss aggregation {aggregation} returned {shown}: it must return a floating point tensor [S={token_counts.numel()}], "
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
    _check_formula(record, exact, token_counts, given, totals, divisor)
    return weights


@register_loss_aggregation("sample_mean", formula="1 / (R M_j)", source="GRPO, GSPO")
def sample_mean(
    token_counts: Tensor,
    totals: StepTotals,
    *,
    prompt_token_counts: Tensor | None,
    divisor: float | None,
    rollout_token_counts: Tensor,
) -> Tensor:
    """Each rollout weighs the same, and each token of a rollout. GRPO (arXiv:2402.03300); GSPO as published (arXiv:2507.18071)."""
    assert totals.num_rollouts is not None  # the caller gives N where each sample is a rollout
    return 1.0 / (totals.num_rollouts * rollout_token_counts)


@register_loss_aggregation("prompt_mean", formula="1 / (P M_g)", source="DAPO as published")
def prompt_mean(token_counts: Tensor, totals: StepTotals, *, prompt_token_counts: Tensor | None, divisor: float | None) -> Tensor:
    """Each prompt weighs the same, and each token of a prompt. DAPO (arXiv:2503.14476); the prompt average of ScaleRL."""
    assert totals.num_prompts is not None and prompt_token_counts is not None  # the caller checks this
    return 1.0 / (totals.num_prompts * prompt_token_counts)


@register_loss_aggregation("token_mean", formula="1 / T", source="frameworks' DAPO")
def token_mean(token_counts: Tensor, totals: StepTotals, *, prompt_token_counts: Tensor | None, divisor: float | None) -> Tensor:
    """Each token of the step weighs the same: what most frameworks call DAPO."""
    return torch.full_like(token_counts, 1.0 / totals.num_tokens)


@register_loss_aggregation("constant", formula="1 / (L R)", source="Dr. GRPO")
def constant(token_counts: Tensor, totals: StepTotals, *, prompt_token_counts: Tensor | None, divisor: float | None) -> Tensor:
    """A rollout weighs in proportion to its tokens. Dr. GRPO (arXiv:2503.20783). L sets the scale of a run: it has no default."""
    assert divisor is not None and totals.num_rollouts is not None  # the caller checks the first and gives the second
    return torch.full_like(token_counts, 1.0 / (divisor * totals.num_rollouts))


@register_loss_aggregation("row_mean", formula="1 / (R k_j m_i)", source="equal weight to each turn of a rollout")
def row_mean(
    token_counts: Tensor,
    totals: StepTotals,
    *,
    prompt_token_counts: Tensor | None,
    divisor: float | None,
    rows_of_rollout: Tensor,
) -> Tensor:
    """Each rollout weighs the same, and each of its samples that have a token. sample_mean where each sample is a rollout."""
    assert totals.num_rollouts is not None  # the caller gives N where each sample is a rollout
    return 1.0 / (totals.num_rollouts * rows_of_rollout * token_counts)


def regularizer_weights(
    token_counts: Tensor, totals: StepTotals, rollout_token_counts: Tensor | None = None
) -> Tensor:  # [S] float32
    """Weights of the KL and entropy terms: sample_mean under every aggregation, so that coefficients keep their meaning.

    Raises what sample_token_weights raises.
    """
    return sample_token_weights("sample_mean", token_counts, totals, rollout_token_counts=rollout_token_counts)


def further_token_weight(num_tokens: int, *, num_layers: int, factor: float) -> float:
    """factor / (num_layers num_tokens): the weight of a token that a layer of multi-token prediction predicts. num_tokens: of the
    whole step, for this layer; where there are none nothing has the weight."""
    return factor / (num_layers * max(1, num_tokens))


def _check_needs(
    record: AggregationRecord, aggregation: str, totals: StepTotals, prompt_token_counts: Tensor | None, divisor: float | None
) -> None:
    """Raises ConfigError where a count that the record needs is missing, or a divisor is missing, of no use or not positive."""
    given = {"prompt_token_counts": prompt_token_counts, "totals.num_prompts": totals.num_prompts}
    missing = [name for name in given if name.rpartition(".")[2] in (record.needs or ()) and given[name] is None]
    if missing:
        raise ConfigError(f"{aggregation} needs {missing[0]}: pass prompt_ids to count_step, and what it counts to the weights")
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


def _check_rollouts(aggregation: str, totals: StepTotals, given: Mapping[str, Tensor | None], taken: Sequence[str]) -> None:
    """Raises where totals know rollouts and the counts of rollouts that the function takes are missing, or the other way round."""
    for name, counts in given.items():
        if totals.num_rollouts is None and counts is not None:
            raise DataError(f"{name} with {totals}, which count no rollouts: pass the counts and totals of one count_step")
        if totals.num_rollouts is not None and counts is None and name in taken:
            raise ConfigError(
                f"{aggregation} needs {name}, because the step has {totals.num_rollouts} rollouts of {totals.num_samples} samples: "
                "pass count_step's rollouts to the weights"
            )


def _check_formula(
    record: AggregationRecord,
    weights: Tensor,  # [S], of any floating dtype
    token_counts: Tensor,  # [S]
    counts: Mapping[str, Tensor | None],  # [S], by the name in COUNTS
    totals: StepTotals,
    divisor: float | None,
) -> None:
    """Raises DataError where the function returned other weights than its declared formula gives."""
    formula = record.rollout_formula
    if formula is None:
        return
    numbers = {**{name: getattr(totals, name, None) for name in COUNTS.values()}, "divisor": divisor, **counts}
    values: dict[str, Tensor | float] = {}
    for letter, name in COUNTS.items():
        number = numbers[name]
        if number is not None:
            values[letter] = number.double() if isinstance(number, Tensor) else float(number)
    declared = torch.as_tensor(formula.evaluate(values), dtype=torch.float64).expand(weights.shape)
    has_tokens = token_counts > 0
    is_apart = has_tokens & ~torch.isclose(weights.double(), declared, rtol=FORMULA_TOLERANCE, atol=0.0)
    if bool(is_apart.any()):
        first = int(is_apart.nonzero()[0])
        raise DataError(
            f"loss aggregation {record.name} returned {float(weights[first]):.6g} for sample {first}, of "
            f"{int(token_counts[first])} unmasked tokens, and its formula {formula} gives {float(declared[first]):.6g}; "
            f"{int(is_apart.sum())} of {len(weights)} samples differ: correct one of them"
        )


# Counts of what a sample belongs to -> what that is.
_GROUPS = {"prompt_token_counts": "prompt group", "rollout_token_counts": "rollout"}


def _check_group_counts(name: str, group_counts: Tensor | None, counts: Tensor) -> None:
    if group_counts is None:
        return
    check_counts(name, group_counts)
    if group_counts.shape != counts.shape:
        raise DataError(f"{name} {tuple(group_counts.shape)} must have one entry a sample, as token_counts {tuple(counts.shape)}")
    if counts.is_cuda or group_counts.is_cuda:
        return
    if name in _GROUPS and bool((group_counts < counts).any()):
        raise DataError(
            f"{name} {group_counts.tolist()} are below token_counts {counts.tolist()}: a {_GROUPS[name]} holds at least its "
            "sample's tokens; pass those of the same count_step"
        )
    if name not in _GROUPS and bool((group_counts < (counts > 0)).any()):
        raise DataError(f"{name} {group_counts.tolist()} are 0 for a sample with tokens: pass those of the same count_step")
