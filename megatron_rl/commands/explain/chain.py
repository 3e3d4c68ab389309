"""The factors between a token's weight and its gradient on a host and a layout; each is what the package's own code does there.

A factor has a formula, to be read, and numbers, which come from executing that code: aggregation, the host rules, the hosts'
emulator (held against real checkouts by tests), scale_for_schedule. A formula that does not give the numbers is a mistake of ours
and an AssertionError.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_rl.aggregation import weigh_tokens
from megatron_rl.commands.explain.factors import (
    Layout,
    denominators,
    gradient_divisor_factor,
    host_factor,
    own_reducer,
    own_scale,
    schedule_and_ddp,
)
from megatron_rl.commands.explain.formula import Formula, Symbols, product
from megatron_rl.commands.explain.launch import CONVERT, REWARD, HostRun
from megatron_rl.commands.explain.step import StepInput
from megatron_rl.commands.explain.weights import Counts, Weighing
from megatron_rl.config import GradientDivisor, LossAggregation, PolicyLossConfig, Route
from megatron_rl.hosts.companions import RolloutBatch, reward_weights
from megatron_rl.hosts.custom_loss import LossPlan
from megatron_rl.hosts.custom_loss import sample_weights as custom_loss_weights

# The weight that is asked for, as docs/aggregation.md has it. An aggregation of a user's own is its own symbol.
ASKED = {
    LossAggregation.SAMPLE_MEAN: Formula(N=-1, m_i=-1),
    LossAggregation.PROMPT_MEAN: Formula(P=-1, M_g=-1),
    LossAggregation.TOKEN_MEAN: Formula(T=-1),
    LossAggregation.CONSTANT: Formula(L=-1, N=-1),
}
OWN_WEIGHT = Formula(w_i=1)
# What is left for our reducer where the host divides by N, under the per-token contract by T.
LEFT = {
    LossAggregation.SAMPLE_MEAN: Formula(m_i=-1),
    LossAggregation.TOKEN_MEAN: Formula(),
    LossAggregation.CONSTANT: Formula(L=-1),
}
# float32 weights and a float32 1/M, against float64 formulas.
TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True, eq=False)
class Factor:
    stage: str
    formula: Formula
    values: Tensor  # [S] float64
    does: str
    differs: bool = False


@dataclass(frozen=True, slots=True)
class Chain:
    factors: list[Factor]
    net: Formula
    asked: Formula
    net_weights: Tensor  # [S] float64
    ratio: Tensor  # [S'] net / asked, of the samples with an unmasked token
    known: dict[str, float]
    """The names that have a number without a step: the layout and the divisor."""

    @property
    def left_over(self) -> Formula:
        return self.net / self.asked

    @property
    def is_equal_here(self) -> bool:
        return bool(((self.ratio - 1).abs() <= TOLERANCE).all())

    @property
    def is_exact(self) -> bool:
        """On any step."""
        return not self.left_over.powers and self.is_equal_here


def asked_weight(config: PolicyLossConfig, counts: Counts) -> Formula:
    """--gradient-divisor is asked for too. Where a rollout has several samples, its tokens stand for a sample's."""
    formula = ASKED.get(config.loss_aggregation, OWN_WEIGHT)
    if counts.has_fan_out:
        formula = Formula({"M_roll" if name == "m_i" else name: power for name, power in formula.powers.items()})
    return formula if config.gradient_divisor == GradientDivisor.NONE else formula * Formula(N=-1)


def host_chain(launch: HostRun, step: StepInput, counts: Counts, weighing: Weighing, layout: Layout) -> Chain:
    """miles and slime. Raises what the hooks raise of the step: custom_loss DataError for a masked sample, per token."""
    config, per_token, is_converted = launch.config, launch.is_per_token, launch.companion == CONVERT
    scale, num_tokens = host_factor(launch, layout, counts)
    factors = []
    if launch.companion == REWARD:
        batch = RolloutBatch(step.masks, step.prompts, step.rollout_keys)
        # What divides the sample later: our reducer sees samples, everybody else the rollout that they are part of.
        later = "m_i" if launch.route == Route.REDUCER else _rollout_name(counts)
        formula = ASKED[config.loss_aggregation] * Formula({"N": 1, later: 1})
        weights = reward_weights(batch, config, launch.step_view)
        factors.append(Factor("reward hook", formula, weights, "hooks.reward_post_process scales the sample's advantage"))
    factors.append(_reduced(launch, counts))
    does = f"{launch.host} scales what its loss function returns"
    of_host = Formula({"M": 1, "dp": 1, "cp": 1, "P" if is_converted else "N": -1})
    if per_token:
        of_host = Formula(cp=1)
    elif is_converted:
        does += "; the converter makes a rollout of each prompt"
    factors.append(Factor("host", of_host, _same(scale, counts), does))
    # The tokens that a host counts are the same on each cp rank, so finalize divides by cp T'.
    tokens = Formula({"T" if num_tokens == counts.totals.num_tokens else "T'": -1, "cp": -1})
    factors += _after_loss(per_token, layout, counts, tokens, layout.context * num_tokens)
    return _chain(factors, config, counts, weighing, _symbols(counts, layout, config, num_tokens), layout)


def own_chain(config: PolicyLossConfig, counts: Counts, weighing: Weighing, layout: Layout, *, per_token: bool) -> Chain:
    """Megatron-LM and `megatron-rl train`: global weights, scale_for_schedule, Megatron."""
    symbols = _symbols(counts, layout, config, counts.totals.num_tokens) | {"w_i": weighing.token_weights}
    weight = ASKED.get(config.loss_aggregation, OWN_WEIGHT)
    factors = [Factor("weight", weight, weighing.token_weights, "sample_token_weights, from counts of the whole step")]
    if config.gradient_divisor != GradientDivisor.NONE:
        does = "--gradient-divisor, as DeepSpeed divides: the gradient alone, not the reported loss"
        factors.append(Factor("gradient divisor", Formula(N=-1), _same(gradient_divisor_factor(counts), counts), does))
    formula = Formula(T=1) if per_token else Formula(M=1, dp=1, cp=1)
    scale = _same(own_scale(layout, counts, per_token=per_token), counts)
    factors.append(Factor("scale", formula, scale, "scale_for_schedule undoes what follows"))
    factors += _after_loss(per_token, layout, counts, Formula(T=-1), counts.totals.num_tokens)
    return _chain(factors, config, counts, weighing, symbols, layout)


def _reduced(launch: HostRun, counts: Counts) -> Factor:
    """What one token counts in the number that the loss function returns."""
    config, is_converted = launch.config, launch.companion == CONVERT
    mean = Formula({"M_g" if is_converted else _rollout_name(counts): -1})
    if launch.route is None:
        does = f"{launch.host}'s own" + (", on the converter's rollout_mask_sums" if is_converted else "")
        return Factor("reducer", Formula() if launch.is_per_token else mean, own_reducer(launch, counts), does)
    name, divisor = config.loss_aggregation, config.loss_aggregation_divisor
    if launch.companion is not None:
        name, divisor = LossAggregation.SAMPLE_MEAN, None
    if launch.route == Route.CUSTOM_LOSS:
        plan = LossPlan(config, launch.host.options(launch.args), launch.companion is not None)
        weights, _ = custom_loss_weights(plan, counts.tokens, denominators(launch, counts))
        formula = LEFT[LossAggregation.TOKEN_MEAN if plan.is_per_token else name]
        formula = mean if formula == LEFT[LossAggregation.SAMPLE_MEAN] else formula
        return Factor("custom_loss", formula, weights.double(), "megatron_rl.hooks.custom_loss")
    weights = weigh_tokens(name, counts.tokens, launch.host.denominators(launch.host.options(launch.args)), divisor=divisor)
    return Factor("reducer", LEFT[name], weights.double(), "megatron_rl.reducers.get_pg_loss_reducer")


def _after_loss(per_token: bool, layout: Layout, counts: Counts, tokens: Formula, num_tokens: int) -> list[Factor]:
    schedule, ddp = schedule_and_ddp(layout, counts, per_token=per_token)
    if per_token:
        return [
            Factor("schedule", Formula(), _same(schedule, counts), "adds micro-batches"),
            Factor("DDP", Formula(), _same(ddp, counts), "adds ranks"),
            Factor("finalize", tokens, _same(1.0 / num_tokens, counts), "divides by the tokens that all ranks have counted"),
        ]
    return [
        Factor("schedule", Formula(M=-1), _same(schedule, counts), "averages over micro-batches"),
        Factor("DDP", Formula(dp=-1, cp=-1), _same(ddp, counts), "averages over dp x cp ranks"),
    ]


def _chain(
    factors: list[Factor], config: PolicyLossConfig, counts: Counts, weighing: Weighing, symbols: Symbols, layout: Layout
) -> Chain:
    has_tokens = counts.tokens > 0
    for factor in factors:
        expected = factor.formula.evaluate(symbols).expand(len(has_tokens))[has_tokens]
        assert torch.allclose(factor.values[has_tokens], expected, rtol=TOLERANCE, atol=0.0), (
            f"{factor.stage} is not {factor.formula}"
        )
    net, asked = product(factor.formula for factor in factors), asked_weight(config, counts)
    left_over = net / asked
    # One factor that is all of it, else those that have a part in it.
    suspects = [factor for factor in factors if left_over.powers and factor.formula == left_over]
    suspects = suspects or [factor for factor in factors if factor.formula.shares_a_power_with(left_over)]
    marked = [replace(factor, differs=factor in suspects) for factor in factors]
    net_weights = torch.where(has_tokens, torch.stack([factor.values for factor in factors]).prod(0), 0.0)
    asked_weights = weighing.token_weights
    if config.gradient_divisor != GradientDivisor.NONE:
        asked_weights = asked_weights * gradient_divisor_factor(counts)
    known = {"M": layout.num_microbatches, "dp": layout.data, "cp": layout.context}
    known |= {} if config.loss_aggregation_divisor is None else {"L": config.loss_aggregation_divisor}
    return Chain(marked, net, asked, net_weights, net_weights[has_tokens] / asked_weights[has_tokens], known)


def _symbols(counts: Counts, layout: Layout, config: PolicyLossConfig, num_host_tokens: int) -> Symbols:
    totals = counts.totals
    symbols = {"N": totals.num_samples, "P": totals.num_prompts, "T": totals.num_tokens, "T'": num_host_tokens}
    symbols |= {"M": layout.num_microbatches, "dp": layout.data, "cp": layout.context, "L": config.loss_aggregation_divisor}
    symbols |= {"m_i": counts.tokens, "M_roll": counts.rollout_tokens, "M_g": counts.prompt_tokens}
    return {name: torch.as_tensor(value, dtype=torch.float64) for name, value in symbols.items() if value is not None}


def _rollout_name(counts: Counts) -> str:
    return "M_roll" if counts.has_fan_out else "m_i"


def _same(value: float, counts: Counts) -> Tensor:  # [S]
    return torch.full((counts.num_samples,), value, dtype=torch.float64)
