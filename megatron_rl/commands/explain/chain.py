"""The factors between a token's weight and its gradient: a table of formulas by host and contract. Nothing is executed here.

tests/test_explain.py holds the chains of hosts against arithmetic by hand, and the package's own factors against its code.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.commands.explain.weights import Weighing
from megatron_rl.commands.launch_config import needs_reward_hook
from megatron_rl.config import GradientDivisor, LaunchMethod
from megatron_rl.formula import Formula
from megatron_rl.hosts import ROLLOUT_HOST_NAMES, SETTINGS_NAMES
from megatron_rl.hosts.adapters import adapter_named
from megatron_rl.hosts.contract import AVERAGED, SUMMED, Stage
from megatron_rl.weights import TOKEN_MEAN, formula_value

# The weight of an aggregation that declares no formula.
OWN_WEIGHT = Formula(w_i=1)
FINALIZE = "divides by the tokens that all ranks have counted"
Layout = dict[str, int]  # the sizes of the process groups, and num_microbatches


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
    def is_exact(self) -> bool:
        return not self.left_over.powers


def chain_of(host: str, weighing: Weighing, layout: Layout, method: LaunchMethod, *, per_token: bool) -> Chain:
    if host in ROLLOUT_HOST_NAMES:
        return _host_chain(host, weighing, layout, method, per_token=per_token)
    if host in SETTINGS_NAMES:
        adapter = adapter_named(host)
        sample_stages, rest = adapter.stages(_weight(weighing), weighing.record, per_token=per_token)
        return _chain(sample_stages, rest, weighing, layout, _weight(weighing))
    return _own_chain(weighing, layout, per_token=per_token)


def _weight(weighing: Weighing) -> Formula:
    """The declared letters, where a rollout has several samples and is counted as one."""
    record = weighing.record
    return (record.rollout_formula if weighing.counts.has_fan_out else record.formula) or OWN_WEIGHT


def _host_chain(host: str, weighing: Weighing, layout: Layout, method: LaunchMethod, *, per_token: bool) -> Chain:
    """miles and slime, with the lines that `megatron-rl launch-config` writes. Their N counts rollouts: the tokens of a whole
    rollout, M_roll, take the place of a sample's. Our reducer sees samples, everybody else the rollout that they are part of."""
    counts, record = weighing.counts, weighing.record
    rollout_count = "M_roll" if counts.has_fan_out else "m_i"
    asked = (record.formula or OWN_WEIGHT).renamed({"m_i": rollout_count})
    if record.needs_rows and record.rollout_formula is not None and counts.has_fan_out:
        asked = record.rollout_formula.renamed({"R": "N", "M_j": "M_roll"})
    own = rollout_count if method == LaunchMethod.CUSTOM_LOSS else "m_i"
    if needs_reward_hook(weighing.config, per_token=per_token):
        does = "hooks.reward_post_process scales the sample's advantage"
        sample_stages: list[Stage] = [("reward hook", asked * Formula({"N": 1, own: 1}), does)]
        reduced = Formula({own: -1})
    else:
        # The host divides by N or by T later.
        sample_stages, reduced = [], (record.formula or OWN_WEIGHT).without("N", "T").renamed({"m_i": own})
    name = "megatron_rl.hooks.custom_loss" if method == LaunchMethod.CUSTOM_LOSS else "megatron_rl.reducers.get_pg_loss_reducer"
    sample_stages.append((str(method), reduced, name))
    does = f"{host} scales what its loss function returns"
    if per_token:
        # The tokens that a host counts are the same on each cp rank, so finalize divides by cp T. A masked sample counts as one.
        letter = "T'" if counts.num_masked else "T"
        rest = [("host", Formula(cp=1), does), *SUMMED, ("finalize", Formula({letter: -1, "cp": -1}), FINALIZE)]
    else:
        rest = [("host", Formula({"M": 1, "dp": 1, "cp": 1, "N": -1}), does), *AVERAGED]
    return _chain(sample_stages, rest, weighing, layout, asked)


def _own_chain(weighing: Weighing, layout: Layout, *, per_token: bool) -> Chain:
    """Megatron-LM and `megatron-rl train`: global weights, scale_for_schedule, Megatron."""
    weight, rest = _weight(weighing), []
    if weighing.config.gradient_divisor != GradientDivisor.NONE:
        does = "--gradient-divisor, as DeepSpeed divides: only the gradient, not the reported loss"
        rest.append(("gradient divisor", Formula(N=-1), does))
    scale = Formula(T=1) if per_token else Formula(M=1, dp=1, cp=1)
    rest.append(("scale", scale, "scale_for_schedule undoes what follows"))
    rest += [*SUMMED, ("finalize", TOKEN_MEAN, FINALIZE)] if per_token else AVERAGED
    sample_stages = [("weight", weight, "sample_token_weights, from counts of the whole step")]
    return _chain(sample_stages, rest, weighing, layout, weight)


def _chain(sample_stages: Sequence[Stage], rest: Sequence[Stage], weighing: Weighing, layout: Layout, wanted: Formula) -> Chain:
    """sample_stages: the factors that weigh samples, 0 for one without a token; rest: those that scale the whole step."""
    counts, has_tokens = weighing.counts, weighing.counts.tokens > 0
    symbols = _symbols(weighing, layout)
    net = math.prod((formula for _, formula, _ in (*sample_stages, *rest)), start=Formula())
    # --gradient-divisor is asked for too.
    divided = Formula() if weighing.config.gradient_divisor == GradientDivisor.NONE else Formula(N=-1)
    asked = wanted * divided
    left_over = net / asked
    factors: list[Factor] = []
    for stage, formula, does in (*sample_stages, *rest):
        values = torch.as_tensor(formula_value(formula, symbols), dtype=torch.float64).expand(counts.num_samples)
        values = torch.where(has_tokens, values, 0.0) if len(factors) < len(sample_stages) else values
        factors.append(Factor(stage, formula, values, _has_a_part(formula, left_over), does))
    net_weights = torch.stack([factor.values for factor in factors]).prod(0)
    ratio = net_weights[has_tokens] / (weighing.token_weights * formula_value(divided, symbols))[has_tokens]
    return Chain(factors, net, asked, left_over, net_weights, ratio)


def _has_a_part(formula: Formula, left_over: Formula) -> bool:
    """Whether a name is above the line in both, or below it in both."""
    return any(power * left_over.powers.get(name, 0) > 0 for name, power in formula.powers.items())


def _symbols(weighing: Weighing, layout: Layout) -> dict[str, Tensor]:
    counts, totals = weighing.counts, weighing.counts.totals
    symbols: dict[str, float | Tensor | None] = {
        **{"M": layout["num_microbatches"], "dp": layout["data_parallel_size"], "cp": layout["context_parallel_size"]},
        **{"N": totals.num_samples, "R": totals.num_samples, "P": totals.num_prompts, "L": weighing.divisor},
        **{"T": totals.num_tokens, "T_all": totals.num_tokens, "T'": int(counts.tokens.clamp(min=1).sum())},
        **{"m_i": counts.tokens, "M_roll": counts.rollout_tokens, "M_j": counts.rollout_tokens, "k_j": counts.rollout_rows},
        **{"M_g": counts.prompt_tokens, "w_i": weighing.token_weights},
    }
    return {name: torch.as_tensor(value, dtype=torch.float64) for name, value in symbols.items() if value is not None}
