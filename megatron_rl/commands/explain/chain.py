"""The factors between a token's weight and its gradient on a host and a layout; each is what the package's own code does there.

A factor has a formula, to be read, and numbers, which come from executing that code: aggregation, the host rules, the hosts'
emulator (held against real checkouts by tests), scale_for_schedule. A formula that does not give the numbers is a mistake of ours
and an AssertionError. Nothing here starts a process or imports Megatron-Core.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_rl.aggregation import sample_token_weights
from megatron_rl.commands.explain.formula import Formula, Symbols, product
from megatron_rl.commands.explain.input import StepInput
from megatron_rl.commands.explain.launch import HostRun
from megatron_rl.commands.explain.weights import Counts, Weighing
from megatron_rl.config import GradientDivisor, LossAggregation, PolicyLossConfig, Route
from megatron_rl.hosts.facts import HostArgs
from megatron_rl.hosts.launch_facts import HOST_DIVIDES
from megatron_rl.hosts.loss_plan import LossPlan
from megatron_rl.hosts.loss_plan import sample_weights as custom_loss_weights
from megatron_rl.hosts.reward_weights import sample_weights as reward_weights
from megatron_rl.hosts.rollout_batch import RolloutBatch
from megatron_rl.layout.groups import ParallelGroups
from megatron_rl.megatron.schedule import delivered_factor, scale_for_schedule
from megatron_rl.testing.host_emulator import EmulatedHost

# The weight that is asked for, as docs/aggregation.md has it. An aggregation of a user's own is its own symbol.
ASKED = {
    LossAggregation.SAMPLE_MEAN: Formula(N=-1, m_i=-1),
    LossAggregation.PROMPT_MEAN: Formula(P=-1, M_g=-1),
    LossAggregation.TOKEN_MEAN: Formula(T=-1),
    LossAggregation.CONSTANT: Formula(L=-1, N=-1),
}
OWN_WEIGHT = Formula(w_i=1)
# What is left for us where the host divides by N, under the per-token contract by T.
LEFT = {
    LossAggregation.SAMPLE_MEAN: Formula(m_i=-1),
    LossAggregation.TOKEN_MEAN: Formula(),
    LossAggregation.CONSTANT: Formula(L=-1),
}
# float32 weights and a float32 1/M, against float64 formulas.
TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True)
class Size:
    """A process group of that many ranks, of which only the size is asked."""

    ranks: int

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    data: int = 1
    num_microbatches: int = 1

    @property
    def groups(self) -> ParallelGroups:
        """tp and pp stand in no factor, so they are left at one rank."""
        return ParallelGroups(cp=Size(self.context), dp=Size(self.data), dp_cp=Size(self.data * self.context))


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
    symbols: Symbols

    @property
    def left_over(self) -> Formula:
        return self.net / self.asked

    @property
    def is_exact(self) -> bool:
        return bool(((self.ratio - 1).abs() <= TOLERANCE).all())


def host_chain(launch: HostRun, step: StepInput, counts: Counts, weighing: Weighing, layout: Layout) -> Chain:
    """miles and slime. Raises what the hooks raise of the step: custom_loss DataError for a masked sample, per token."""
    config, per_token = launch.config, launch.is_per_token
    scale, num_tokens = _emulated(launch, layout, counts)
    factors = []
    if launch.has_companion:
        batch = RolloutBatch(step.masks, step.prompts, list(range(len(step.masks))))
        formula = ASKED[config.loss_aggregation] * Formula(N=1, m_i=1)
        weights = reward_weights(batch, config, HostArgs(launch.args))
        factors.append(Factor("reward hook", formula, weights, "hooks.reward_post_process scales the sample's advantage"))
    factors.append(_reduced(launch, counts))
    of_host = Formula(cp=1) if per_token else Formula(M=1, dp=1, cp=1, N=-1)
    factors.append(Factor("host", of_host, _same(scale, counts), f"{launch.host} scales what its loss function returns"))
    # The tokens that a host counts are the same on each cp rank, so finalize divides by cp T'.
    tokens = Formula({"T" if num_tokens == counts.totals.num_tokens else "T'": -1, "cp": -1})
    factors += _after_loss(per_token, layout, counts, tokens, layout.context * num_tokens)
    return _chain(factors, config, counts, weighing, _symbols(counts, layout, config, num_tokens))


def own_chain(config: PolicyLossConfig, counts: Counts, weighing: Weighing, layout: Layout, *, per_token: bool) -> Chain:
    """Megatron-LM and `megatron-rl train`: global weights, scale_for_schedule, Megatron."""
    symbols = _symbols(counts, layout, config, counts.totals.num_tokens) | {"w_i": weighing.token_weights}
    asked = ASKED.get(config.loss_aggregation, OWN_WEIGHT)
    factors = [Factor("weight", asked, weighing.token_weights, "sample_token_weights, from counts of the whole step")]
    plain = _scaled(layout, counts, per_token, GradientDivisor.NONE)
    if config.gradient_divisor != GradientDivisor.NONE:
        divided = _scaled(layout, counts, per_token, config.gradient_divisor) / plain
        factors.append(
            Factor("gradient divisor", Formula(N=-1), _same(divided, counts), "--gradient-divisor, as DeepSpeed divides")
        )
    formula = Formula(T=1) if per_token else Formula(M=1, dp=1, cp=1)
    factors.append(Factor("scale", formula, _same(plain, counts), "scale_for_schedule undoes what follows"))
    factors += _after_loss(per_token, layout, counts, Formula(T=-1), counts.totals.num_tokens)
    return _chain(factors, config, counts, weighing, symbols)


def unit_loss(args: Namespace, batch: dict, logits: Tensor, reduce) -> tuple[Tensor, dict]:
    """A custom loss of 1: what comes out of the host is the host's factor."""
    return torch.ones((), dtype=torch.float64), {}


def _emulated(launch: HostRun, layout: Layout, counts: Counts) -> tuple[float, int]:
    """(factor on the loss, tokens that the host counts over the step). The emulator sees masks of the right sums alone."""
    args = Namespace(
        loss_type="custom_loss",
        custom_loss_function_path=f"{__name__}.unit_loss",
        calculate_per_token_loss=launch.is_per_token,
        recompute_loss_function=False,
        allgather_cp=False,
        qkv_format="thd",
    )
    num_samples = counts.totals.num_samples
    batch = {
        "loss_masks": [count.reshape(1) for count in counts.tokens],
        "total_lengths": [1] * num_samples,
        "response_lengths": [0] * num_samples,
        "rollout_mask_sums": counts.tokens,
    }
    loss, num_tokens, _ = EmulatedHost(launch.host, layout.groups).loss_function(
        args, batch, torch.zeros(1, 1, 1), num_microbatches=layout.num_microbatches, num_rollouts=num_samples
    )
    return float(loss), int(num_tokens)


def _reduced(launch: HostRun, counts: Counts) -> Factor:
    """What one token counts in the number that the loss function returns."""
    name, divisor = launch.config.loss_aggregation, launch.config.loss_aggregation_divisor
    if launch.has_companion:
        name, divisor = LossAggregation.SAMPLE_MEAN, None
    if launch.route is None:
        formula = LEFT[LossAggregation.TOKEN_MEAN if launch.is_per_token else LossAggregation.SAMPLE_MEAN]
        return Factor("reducer", formula, _own_reducer(launch, counts), f"{launch.host}'s own")
    if launch.route == Route.CUSTOM_LOSS:
        plan = LossPlan(launch.config, HostArgs(launch.args), launch.has_companion)
        weights, _ = custom_loss_weights(plan, counts.tokens, counts.tokens)
        formula = LEFT[LossAggregation.TOKEN_MEAN if plan.is_per_token else name]
        return Factor("custom_loss", formula, weights.double(), "megatron_rl.hooks.custom_loss")
    weights = sample_token_weights(name, counts.tokens, HOST_DIVIDES, divisor=divisor)
    return Factor("reducer", LEFT[name], weights.double(), "megatron_rl.reducers.get_pg_loss_reducer")


def _own_reducer(launch: HostRun, counts: Counts) -> Tensor:  # [S]
    """The gradient of the host's default reducer, one token a sample: its weight."""
    num_samples = counts.totals.num_samples
    batch = {"total_lengths": [2] * num_samples, "response_lengths": [1] * num_samples, "rollout_mask_sums": counts.tokens}
    args = Namespace(calculate_per_token_loss=launch.is_per_token, qkv_format="thd")
    values = torch.ones(num_samples, dtype=torch.float64, requires_grad=True)
    masks = [torch.ones(1, dtype=torch.int64)] * num_samples
    EmulatedHost(launch.host, ParallelGroups()).default_reducer(args, batch, masks)(values).backward()
    return values.grad


def _scaled(layout: Layout, counts: Counts, per_token: bool, divisor: str) -> float:
    one = torch.ones((), dtype=torch.float64)
    config = Namespace(calculate_per_token_loss=per_token)
    loss, _, _ = scale_for_schedule(
        one,
        layout.num_microbatches,
        totals=counts.totals,
        num_local_tokens=1,
        config=config,
        groups=layout.groups,
        gradient_divisor=divisor,
    )
    return float(loss)


def _after_loss(per_token: bool, layout: Layout, counts: Counts, tokens: Formula, num_tokens: int) -> list[Factor]:
    """Megatron-Core 0.13 to 0.19. The schedule's factor is what delivered_factor says that backward delivers of our scale; DDP's
    average and, per token, finalize_model_grads undo the rest of it, which is what scale_for_schedule relies on."""
    config = Namespace(calculate_per_token_loss=per_token, grad_scale_func=None)
    delivered = delivered_factor(layout.num_microbatches, totals=counts.totals, config=config, groups=layout.groups)
    schedule = delivered / _scaled(layout, counts, per_token, GradientDivisor.NONE)
    if per_token:
        return [
            Factor("schedule", Formula(), _same(schedule, counts), "adds micro-batches"),
            Factor("DDP", Formula(), _same(1.0, counts), "adds ranks"),
            Factor("finalize", tokens, _same(1.0 / num_tokens, counts), "divides by the tokens that all ranks have counted"),
        ]
    return [
        Factor("schedule", Formula(M=-1), _same(schedule, counts), "averages over micro-batches"),
        Factor("DDP", Formula(dp=-1, cp=-1), _same(1.0 / delivered, counts), "averages over dp x cp ranks"),
    ]


def _chain(factors: list[Factor], config: PolicyLossConfig, counts: Counts, weighing: Weighing, symbols: Symbols) -> Chain:
    has_tokens = counts.tokens > 0
    for factor in factors:
        expected = factor.formula.evaluate(symbols).expand(len(has_tokens))[has_tokens]
        assert torch.allclose(factor.values[has_tokens], expected, rtol=TOLERANCE, atol=0.0), (
            f"{factor.stage} is not {factor.formula}"
        )
    net = product(factor.formula for factor in factors)
    asked = ASKED.get(config.loss_aggregation, OWN_WEIGHT)
    left_over = net / asked
    # One factor that is all of it, else those that have a part in it.
    suspects = [factor for factor in factors if left_over.powers and factor.formula == left_over]
    suspects = suspects or [factor for factor in factors if factor.formula.shares_a_power_with(left_over)]
    marked = [replace(factor, differs=factor in suspects) for factor in factors]
    net_weights = torch.stack([factor.values for factor in factors]).prod(0)
    net_weights = torch.where(has_tokens, net_weights, 0.0)
    ratio = net_weights[has_tokens] / weighing.token_weights[has_tokens]
    return Chain(marked, net, asked, net_weights, ratio, symbols)


def _symbols(counts: Counts, layout: Layout, config: PolicyLossConfig, num_host_tokens: int) -> Symbols:
    totals = counts.totals
    symbols = {"N": totals.num_samples, "P": totals.num_prompts, "T": totals.num_tokens, "T'": num_host_tokens}
    symbols |= {"M": layout.num_microbatches, "dp": layout.data, "cp": layout.context, "L": config.loss_aggregation_divisor}
    symbols |= {"m_i": counts.tokens, "M_g": counts.prompt_tokens}
    return {name: torch.as_tensor(value, dtype=torch.float64) for name, value in symbols.items() if value is not None}


def _same(value: float, counts: Counts) -> Tensor:  # [S]
    return torch.full((counts.totals.num_samples,), value, dtype=torch.float64)


def gradient_divisor_factor(counts: Counts) -> float:
    """What --gradient-divisor num_samples does to the gradient: DeepSpeed's second division."""
    layout = Layout()
    return _scaled(layout, counts, False, GradientDivisor.NUM_SAMPLES) / _scaled(layout, counts, False, GradientDivisor.NONE)
