"""Turns counts into loss weights. No other module divides by a count. Counts are global and taken before any slicing.

    L = sum_i w_i sum_t m_it l_it
    sample_mean w_i = 1 / (R M_j)      row_mean w_i = 1 / (R k_j m_i)
    prompt_mean w_i = 1 / (P M_g)      token_mean w_i = 1 / T      constant w_i = 1 / (L R)

R rollouts, P prompts and T unmasked tokens of the optimiser step; m_i unmasked tokens of sample i, M_j of its rollout, M_g of its
prompt; k_j samples of its rollout have one. Where each sample is a rollout, R = N samples, M_j = m_i and k_j = 1.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from megatron_rl.count import StepTotals, check_counts, check_totals
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.formula import COUNTS, OF_ONE_SAMPLE, STEP_COUNTS, Formula
from megatron_rl.registry import Registry, check_signature, takes

TOKEN_MEAN = Formula(T=-1)


@dataclass(frozen=True, slots=True)
class AggregationRecord:
    """One registered aggregation.

    function: gives the weights [S]: the formula's, or a user's own.
    rollout_counts: the counts of rollouts [S] that the function takes by keyword.
    rollout_formula: the weight of a token; None: a function of the user's own.
    source: the algorithms that use it, or "".
    needs: the counts of the step that it reads (STEP_COUNTS) where each sample is a rollout; None: not known.
    takes_divisor: whether it uses --loss-aggregation-divisor; None: not known.
    """

    name: str
    function: Callable[..., Any]
    rollout_counts: tuple[str, ...] = ()
    rollout_formula: Formula | None = None
    source: str = ""
    needs: tuple[str, ...] | None = None
    takes_divisor: bool | None = None

    @property
    def formula(self) -> Formula | None:
        """The weight of a token where each sample is a rollout."""
        return None if self.rollout_formula is None else self.rollout_formula.for_single_samples()

    @property
    def counts_rollouts(self) -> bool:
        """Whether a weight depends on how a rollout is cut into samples, or on the number of rollouts."""
        return self.rollout_formula is not None and not OF_ONE_SAMPLE.keys().isdisjoint(self.rollout_formula.powers)

    @property
    def needs_prompts(self) -> bool:
        return self.needs is not None and not {"num_prompts", "prompt_token_counts"}.isdisjoint(self.needs)

    @property
    def needs_rows(self) -> bool:
        """Whether it counts the rows of a rollout. Where each sample is a rollout, it is another aggregation's second name."""
        return self.rollout_formula is not None and "k_j" in self.rollout_formula.powers

    @property
    def counts_other_samples(self) -> bool:
        """Whether a sample's weight depends on the tokens of other samples. True where `needs` is not known."""
        return self.needs is None or self.needs_prompts or "num_tokens" in self.needs

    def missing_where_a_host_divides_by(self, count: str) -> tuple[str, ...] | None:
        """The counts of the step that are still needed in a host that divides by N (or by T); None: not known."""
        if self.formula is None:
            return None
        left = self.formula * Formula({count: 1})
        rows = ("rows_of_rollout",) if self.needs_rows else ()
        return (*(COUNTS[name] for name in left.powers if COUNTS[name] in STEP_COUNTS), *rows)

    @property
    def is_of_one_step(self) -> bool:
        """Whether N times the weight depends on counts of the step. N / P does not count: groups of one size make it a constant."""
        if self.formula is None:
            return True
        left = self.formula * Formula(N=1)
        return "T" in left.powers or left.powers.get("N", 0) != -left.powers.get("P", 0)


AGGREGATIONS: Registry[AggregationRecord] = Registry("loss aggregation", "register_loss_aggregation")


def register_loss_aggregation(
    name: str,
    *,
    formula: str | None = None,
    source: str = "",
    needs: tuple[str, ...] | None = None,
    takes_divisor: bool | None = None,
) -> Callable[..., Any]:
    """Registers a formula as the aggregation `name`; without one it is the decorator of a function.

        square_root = register_loss_aggregation("square_root", formula="1 / (N m_i^0.5)")

    A function is `fn(token_counts [S], totals, *, prompt_token_counts [S] | None, divisor) -> weights [S]`. One with the keywords
    rollout_token_counts or rows_of_rollout gets M_j or k_j too, [S]; they are m_i and 1 where each sample is a rollout. Its totals
    have num_rollouts in any case. Explain and start lines say that its weight is not stated, and miles and slime need the reward
    hook.

    formula: the weight as a product of counts over a product of counts, as in "1 / (R M_j)": N samples, R rollouts, P prompts and T
        tokens of the step, m_i tokens of sample i, M_j of its rollout's samples, k_j of which have a token, M_g tokens of its
        prompt's samples, L the divisor.
    source: the algorithms that use it, as in "GRPO, GSPO".
    needs: of a function, the counts that it reads besides token_counts, of weights.STEP_COUNTS.
    takes_divisor: of a function, whether it uses --loss-aggregation-divisor.

    Returns what `--loss-aggregation module.name` finds: the formula's function, or the decorator.
    Raises ConfigError when another aggregation has the name, or when a field or the signature is wrong.
    """
    AGGREGATIONS.check_name(name)
    for problem in _problems_of_fields(formula, source, needs, takes_divisor):
        raise ConfigError(f"loss aggregation {name!r}: {problem}")
    if formula is None:

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            counts = tuple(keyword for keyword in _OF_ROLLOUTS.values() if takes(function, keyword))
            check_signature("loss aggregation", name, function, _POSITIONAL, (*_KEYWORDS, *counts))
            AGGREGATIONS.add(name, AggregationRecord(name, function, counts, None, source, needs, takes_divisor))
            return function

        return decorate
    try:
        parsed = Formula.parse(formula)
    except ConfigError as error:
        raise ConfigError(f"loss aggregation {name!r}: {error}") from error
    function = _function_of(parsed)
    function.__module__ = sys._getframe(1).f_globals["__name__"]  # who declares it, as namedtuple does
    counts = tuple(keyword for letter, keyword in _OF_ROLLOUTS.items() if letter in parsed.powers)
    letters = parsed.for_single_samples().powers
    needs = tuple(count for letter, count in COUNTS.items() if letter in letters and count in STEP_COUNTS)
    AGGREGATIONS.add(name, AggregationRecord(name, function, counts, parsed, source, needs, "L" in parsed.powers))
    return function


_POSITIONAL, _KEYWORDS = ("token_counts", "totals"), ("prompt_token_counts", "divisor")
# Letter of a formula -> the count of rollouts that a function gets by keyword where it asks for it.
_OF_ROLLOUTS = {letter: COUNTS[letter] for letter in ("M_j", "k_j")}


def formula_value(formula: Formula, values: Mapping[str, Any]) -> Any:
    """Of numbers or tensors [S] in place of the letters: the product above over the product below, in the order of the text."""
    above = math.prod(values[name] ** power for name, power in formula.powers.items() if power > 0)
    return above / math.prod(values[name] ** -power for name, power in formula.powers.items() if power < 0)


def _function_of(formula: Formula) -> Callable[..., Tensor]:
    def weights(token_counts: Tensor, totals: StepTotals, **counts: Tensor | float | None) -> Tensor:
        values = {letter: counts.get(name, getattr(totals, name, None)) for letter, name in COUNTS.items()}
        weight = formula_value(formula, values | {"m_i": token_counts})
        return weight if isinstance(weight, Tensor) else torch.full_like(token_counts, weight)

    return weights


def _problems_of_fields(formula: object, source: object, needs: object, takes_divisor: object) -> Iterator[str]:
    if not isinstance(source, str):
        yield f"source={source!r} must be text: the algorithms that use this aggregation"
    if formula is not None and (needs is not None or takes_divisor is not None):
        yield f"formula={formula!r} says what it needs: remove needs and takes_divisor"
    if needs is not None and not (isinstance(needs, tuple) and all(name in STEP_COUNTS for name in needs)):
        yield f"needs={needs!r} must be a tuple of names, of {', '.join(STEP_COUNTS)}"
    if takes_divisor is not None and not isinstance(takes_divisor, bool):
        yield f"takes_divisor={takes_divisor!r} must be True or False"


def get_loss_aggregation(name: str) -> AggregationRecord:
    """The declaration of that name, or of module.name. Raises ConfigError as Registry."""
    return AGGREGATIONS[str(name)]


# Each rollout weighs the same, and each token of a rollout. GRPO (arXiv:2402.03300); GSPO as published (arXiv:2507.18071).
sample_mean = register_loss_aggregation("sample_mean", formula="1 / (R M_j)", source="GRPO, GSPO")
# Each prompt weighs the same, and each token of a prompt. DAPO (arXiv:2503.14476); the prompt average of ScaleRL.
prompt_mean = register_loss_aggregation("prompt_mean", formula="1 / (P M_g)", source="DAPO as published")
# Each token of the step weighs the same: what most frameworks call DAPO.
token_mean = register_loss_aggregation("token_mean", formula="1 / T", source="frameworks' DAPO")
# A rollout weighs in proportion to its tokens. Dr. GRPO (arXiv:2503.20783). L sets the scale of a run: it has no default.
constant = register_loss_aggregation("constant", formula="1 / (L R)", source="Dr. GRPO")
# Each rollout weighs the same, and each of its samples that have a token. sample_mean where each sample is a rollout.
row_mean = register_loss_aggregation("row_mean", formula="1 / (R k_j m_i)", source="equal weight to each turn of a rollout")


def sample_token_weights(
    aggregation: str,
    token_counts: Tensor,  # [S] unmasked tokens of each sample, over all cp ranks
    totals: StepTotals,
    *,
    prompt_token_counts: Tensor | None = None,  # [S] unmasked tokens of each sample's prompt group, over the step
    divisor: float | None = None,
    rollout_token_counts: Tensor | None = None,  # [S] unmasked tokens of each sample's rollout, over the step
    rows_of_rollout: Tensor | None = None,  # [S] samples of its rollout with at least one unmasked token
    are_of_step: bool = True,
) -> Tensor:  # [S] float32
    """The weight of each token of a sample in the step's loss; 0 for a fully masked sample.

    Any part of the step's samples may be passed: the denominators come from `totals`.

    Args:
        aggregation: sample_mean, row_mean, prompt_mean, token_mean, constant, a registered name, or module.function.
        token_counts, totals, prompt_token_counts: as count_step returns them. prompt_token_counts is needed by prompt_mean.
        divisor: the L of constant, in tokens; None for the other built-in aggregations.
        rollout_token_counts, rows_of_rollout: tokens and rows of count_step's RolloutCounts. With rollouts in `totals` sample_mean
            needs the first, row_mean the second. None, and no rollouts in `totals`: each sample is a rollout.
        are_of_step: compare the counts with `totals`. False: a token_counts is of a segment of a sample, or a host divides by the
            step's counts itself and `totals` are 1.
    Communication: none.
    Raises: ConfigError for an unknown aggregation, for prompt or rollout counts or a divisor that it needs and does not get, and
        for a divisor that it has no use for. DataError for counts that are not whole numbers of at least 0, are larger than
        `totals` or do not fit each other, and for a function that returns no weights.

    >>> totals = StepTotals(num_samples=4, num_prompts=2, num_tokens=7)
    >>> (1 / sample_token_weights("sample_mean", torch.tensor([2, 4, 1]), totals)).tolist()
    [8.0, 16.0, 4.0]
    """
    record = get_loss_aggregation(aggregation)
    check_totals(totals)
    check_counts("token_counts", token_counts)
    rollout_counts = {"rollout_token_counts": rollout_token_counts, "rows_of_rollout": rows_of_rollout}
    _check_needs(record, totals, prompt_token_counts, rollout_counts, divisor)
    _check_values(token_counts, {"prompt_token_counts": prompt_token_counts} | rollout_counts, totals if are_of_step else None)
    given = {
        "prompt_token_counts": prompt_token_counts,
        "rollout_token_counts": token_counts if rollout_token_counts is None else rollout_token_counts,
        "rows_of_rollout": torch.ones_like(token_counts) if rows_of_rollout is None else rows_of_rollout,
    }
    weights = record.function(
        token_counts.to(torch.float64, copy=True),  # copies, because a user's function may write into its arguments
        replace(totals, num_rollouts=totals.rollouts),
        divisor=None if divisor is None else float(divisor),
        **{
            name: None if counts is None else counts.to(torch.float64, copy=True)
            for name, counts in given.items()
            if name in ("prompt_token_counts", *record.rollout_counts)
        },
    )
    if not isinstance(weights, Tensor) or not weights.is_floating_point() or weights.shape != token_counts.shape:
        shown = f"{tuple(weights.shape)} {weights.dtype}" if isinstance(weights, Tensor) else type(weights).__name__
        raise DataError(
            f"loss aggregation {aggregation} returned {shown}: it must return a floating point tensor [S={token_counts.numel()}], "
            "one weight a sample"
        )
    weights = torch.where(token_counts > 0, weights, 0.0).to(torch.float32)  # before the check: 1e300 is finite in float64 alone
    # On CUDA looking would synchronise.
    if not weights.is_cuda and not bool((torch.isfinite(weights) & (weights >= 0)).all()):
        raise DataError(
            f"loss aggregation {aggregation} gives a weight that is negative or not finite in float32: {weights.tolist()}"
        )
    return weights


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
    record: AggregationRecord,
    totals: StepTotals,
    prompt_token_counts: Tensor | None,
    rollout_counts: Mapping[str, Tensor | None],
    divisor: float | None,
) -> None:
    """Raises ConfigError where a count that the record needs is missing, or a divisor is missing, of no use or not positive; and
    DataError for counts of rollouts beside totals that know none."""
    given = {"prompt_token_counts": prompt_token_counts, "totals.num_prompts": totals.num_prompts}
    missing = [name for name in given if name.rpartition(".")[2] in (record.needs or ()) and given[name] is None]
    if missing:
        raise ConfigError(f"{record.name} needs {missing[0]}: pass prompt_ids to count_step, and what it counts to the weights")
    for name, counts in rollout_counts.items():
        if totals.num_rollouts is None and counts is not None:
            raise DataError(f"{name} with {totals}, which count no rollouts: pass the counts and totals of one count_step")
        if totals.num_rollouts is not None and counts is None and name in record.rollout_counts:
            raise ConfigError(
                f"{record.name} needs {name}, because the step has {totals.num_rollouts} rollouts of {totals.num_samples} samples: "
                "pass count_step's rollouts to the weights"
            )
    if divisor is None:
        if record.takes_divisor and record.formula is not None:
            raise ConfigError(
                f"loss aggregation {record.name} needs divisor (--loss-aggregation-divisor): the longest allowed response"
            )
    elif record.takes_divisor is False:
        raise ConfigError(
            f"divisor={divisor} with loss aggregation {record.name}, which has no divisor: remove it or choose constant"
        )
    elif isinstance(divisor, bool) or not isinstance(divisor, Real) or not math.isfinite(divisor) or divisor <= 0:
        raise ConfigError(f"divisor={divisor!r} must be a finite number above 0")


def _check_values(token_counts: Tensor, groups: Mapping[str, Tensor | None], totals: StepTotals | None) -> None:
    """Raises DataError for counts of a sample's group that cannot be, beside its own and those of the step, where given."""
    if totals is not None and not token_counts.is_cuda:
        num_samples, num_tokens = token_counts.numel(), int(token_counts.sum())
        if num_samples > totals.num_samples or num_tokens > totals.num_tokens:
            raise DataError(
                f"token_counts hold {num_samples} samples and {num_tokens} tokens, more than the whole step has: {totals}; pass "
                "the counts and totals of one count_step"
            )
    for name, counts in groups.items():
        if counts is None:
            continue
        check_counts(name, counts)
        if counts.shape != token_counts.shape:
            raise DataError(
                f"{name} {tuple(counts.shape)} must have one entry a sample, as token_counts {tuple(token_counts.shape)}"
            )
        if counts.is_cuda or token_counts.is_cuda:
            continue
        own = (token_counts > 0).long() if name == "rows_of_rollout" else token_counts
        if bool((counts < own).any()):
            raise DataError(
                f"{name} {counts.tolist()} are below {own.tolist()}, what the sample itself adds: pass those of one count_step"
            )
        if totals is not None and bool((counts > totals.num_tokens).any()):
            raise DataError(
                f"{name} {counts.tolist()} are more than the {totals.num_tokens} tokens of the step: pass the counts and totals of "
                "one count_step"
            )
