"""The factors between a token's weight and its gradient: a table of formulas by host, route and contract. Nothing is executed here.

tests/test_explain_table.py holds each row against the code that does it: the reducers and hooks, the emulated hosts, the schedule.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.aggregation_record import TOKEN_MEAN, Formula
from megatron_rl.commands.explain.launch import our_route
from megatron_rl.commands.explain.step import LaunchLayout
from megatron_rl.commands.explain.weights import Weighing
from megatron_rl.config import GradientDivisor
from megatron_rl.hosts.adapters import Adapter
from megatron_rl.hosts.args import HostLaunch
from megatron_rl.hosts.contract import AVERAGED, SUMMED
from megatron_rl.hosts.rewards import HostCounts

# The weight of an aggregation that declares no formula.
OWN_WEIGHT = Formula(w_i=1)
REDUCER = "megatron_rl.reducers.get_pg_loss_reducer"
FINALIZE = "divides by the tokens that all ranks have counted"
# A factor of float32 weights is equal to one of float64 formulas within this.
TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True, eq=False)
class Factor:
    stage: str
    formula: Formula
    values: Tensor  # [S] float64
    differs: bool
    does: str


@dataclass(frozen=True, slots=True)
class Chain:
    """In the order of the keys of --json."""

    factors: list[Factor]
    net: Formula
    asked: Formula
    left_over: Formula
    net_weights: Tensor  # [S] float64
    ratio: Tensor  # [S'] net / asked, of the samples with an unmasked token

    @property
    def is_equal_here(self) -> bool:
        return bool(((self.ratio - 1).abs() <= TOLERANCE).all())

    @property
    def is_exact(self) -> bool:
        """On any step."""
        return not self.left_over.powers and self.is_equal_here


def host_chain(launch: HostLaunch, weighing: Weighing, layout: LaunchLayout) -> Chain | None:
    """miles and slime. None where our reducer or loss cannot know its weights: the launch is refused."""
    counts = weighing.counts
    reduced = _reduced(launch, counts, weighing.record.formula or OWN_WEIGHT)
    if reduced is None:
        return None
    of_samples = [reduced]
    if launch.has_reward_hook:
        # What divides the sample later: our reducer sees samples, everybody else the rollout that they are part of.
        later = "m_i" if launch.has_reducer else _rollout_letter(counts)
        hook = _asked_of(weighing) * Formula({"N": 1, later: 1})
        of_samples.insert(0, ("reward hook", hook, "hooks.reward_post_process scales the sample's advantage"))
    does = f"{launch.host} scales what its loss function returns"
    if launch.is_per_token:
        # The tokens that a host counts are the same on each cp rank, so finalize divides by cp T. A masked sample counts as one.
        letter = "T'" if counts.num_masked else "T"
        rest = [("host", Formula(cp=1), does), *SUMMED, ("finalize", Formula({letter: -1, "cp": -1}), FINALIZE)]
    else:
        rest = [("host", Formula({"M": 1, "dp": 1, "cp": 1, "N": -1}), does), *AVERAGED]
    return _chain(of_samples, rest, weighing, layout)


def own_chain(weighing: Weighing, layout: LaunchLayout, *, per_token: bool) -> Chain:
    """Megatron-LM and `megatron-rl train`: global weights, scale_for_schedule, Megatron."""
    weight = weighing.record.formula or OWN_WEIGHT
    rest = []
    if weighing.config.gradient_divisor != GradientDivisor.NONE:
        does = "--gradient-divisor, as DeepSpeed divides: the gradient alone, not the reported loss"
        rest.append(("gradient divisor", Formula(N=-1), does))
    scale = Formula(T=1) if per_token else Formula(M=1, dp=1, cp=1)
    rest.append(("scale", scale, "scale_for_schedule undoes what follows"))
    rest += [*SUMMED, ("finalize", TOKEN_MEAN, FINALIZE)] if per_token else AVERAGED
    # It counts rollouts: the declared letters, where one has several samples.
    weight = weighing.record.rollout_formula or OWN_WEIGHT if weighing.counts.has_fan_out else weight
    of_samples = [("weight", weight, "sample_token_weights, from counts of the whole step")]
    return _chain(of_samples, rest, weighing, layout, weight)


def adapter_chain(adapter: Adapter, weighing: Weighing, layout: LaunchLayout, *, per_token: bool) -> Chain:
    """A trainer that settings configure."""
    is_counted = adapter.COUNTS_ROLLOUTS and weighing.counts.has_fan_out
    weight = (weighing.record.rollout_formula if is_counted else weighing.record.formula) or OWN_WEIGHT
    stages = adapter.stages(weight, weighing.record, per_token=per_token)
    return _chain(*stages, weighing, layout, weight if is_counted else None)


def _reduced(launch: HostLaunch, counts: HostCounts, formula: Formula) -> tuple[str, Formula, str] | None:
    """What one token counts in the number that the loss function returns."""
    mean, is_loss = Formula({_rollout_letter(counts): -1}), launch.has_our_loss
    if our_route(launch) is None:
        return "reducer", Formula() if launch.is_per_token else mean, f"{launch.host}'s own"
    if is_loss and launch.is_per_token:
        weight = Formula()
    elif launch.has_reward_hook:
        weight = mean if is_loss else Formula(m_i=-1)
    else:
        weight = formula.without("N", "T")  # the host divides by one of them later
        if not weight.powers.keys() <= {"m_i", "L"}:
            return None
        weight = _of_rollouts(weight, counts) if is_loss else weight
    return ("custom_loss", weight, "megatron_rl.hooks.custom_loss") if is_loss else ("reducer", weight, REDUCER)


def _rollout_letter(counts: HostCounts) -> str:
    return "M_roll" if counts.has_fan_out else "m_i"


def _asked_of(weighing: Weighing) -> Formula:
    """The weight in the letters of a host."""
    record, counts = weighing.record, weighing.counts
    if record.needs_rows and record.rollout_formula is not None and counts.has_fan_out:
        return record.rollout_formula.renamed({"R": "N", "M_j": "M_roll"})
    return _of_rollouts(record.formula or OWN_WEIGHT, counts)


def _of_rollouts(formula: Formula, counts: HostCounts) -> Formula:
    """N counts rollouts: the tokens of a whole rollout take the place of a sample's."""
    return formula.renamed({"m_i": _rollout_letter(counts)})


def _chain(of_samples, rest, weighing: Weighing, layout: LaunchLayout, wanted: Formula | None = None) -> Chain:
    """of_samples: the factors that weigh samples, 0 for one without a token; rest: those that scale the whole step. wanted: the
    weight that is asked for; None: the record's, of samples that are rollouts."""
    counts, has_tokens = weighing.counts, weighing.counts.tokens > 0
    symbols, formulas = _symbols(weighing, layout), [formula for _, formula, _ in (*of_samples, *rest)]
    net = math.prod(formulas, start=Formula())
    # --gradient-divisor is asked for too.
    divided = Formula() if weighing.config.gradient_divisor == GradientDivisor.NONE else Formula(N=-1)
    asked = (wanted or _asked_of(weighing)) * divided
    left_over = net / asked
    # One factor that is all of it, else those that have a part in it.
    suspects = {left_over} & {*formulas} if left_over.powers else set()
    suspects = suspects or {formula for formula in formulas if _has_a_part(formula, left_over)}
    factors: list[Factor] = []
    for stage, formula, does in (*of_samples, *rest):
        values = torch.as_tensor(formula.evaluate(symbols), dtype=torch.float64).expand(counts.num_samples)
        values = torch.where(has_tokens, values, 0.0) if len(factors) < len(of_samples) else values
        factors.append(Factor(stage, formula, values, formula in suspects, does))
    net_weights = torch.stack([factor.values for factor in factors]).prod(0)
    ratio = net_weights[has_tokens] / (weighing.token_weights * divided.evaluate(symbols))[has_tokens]
    return Chain(factors, net, asked, left_over, net_weights, ratio)


def _has_a_part(formula: Formula, left_over: Formula) -> bool:
    """Whether a name is above the line in both, or below it in both."""
    return any(power * left_over.powers.get(name, 0) > 0 for name, power in formula.powers.items())


def _symbols(weighing: Weighing, layout: LaunchLayout) -> dict[str, Tensor]:
    counts, totals = weighing.counts, weighing.counts.totals
    symbols: dict[str, float | Tensor | None] = {"M": layout.num_microbatches, "dp": layout.data, "cp": layout.context}
    symbols |= {"N": totals.num_samples, "P": totals.num_prompts, "T": totals.num_tokens, "L": weighing.divisor}
    symbols |= {
        "T_all": int(counts.tokens.sum()),
        "R": totals.num_samples,
        "M_j": counts.rollout_tokens,
        "k_j": counts.rollout_rows,
    }
    symbols |= {"T'": int(counts.tokens.clamp(min=1).sum()), "w_i": weighing.token_weights}
    symbols |= {"m_i": counts.tokens, "M_roll": counts.rollout_tokens, "M_g": counts.prompt_tokens}
    return {name: torch.as_tensor(value, dtype=torch.float64) for name, value in symbols.items() if value is not None}
