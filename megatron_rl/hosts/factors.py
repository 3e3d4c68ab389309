"""What multiplies a token's weight between our loss and its gradient, in verl and ROLL: two tables.

A stage is (name, factor, what it does). tests/test_explain_chain.py holds each table against the code that does it.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.aggregation_record import Formula
from megatron_rl.hosts.door import AVERAGED as AVERAGED
from megatron_rl.hosts.door import SAMPLE_MEAN as SAMPLE_MEAN
from megatron_rl.hosts.door import SUMMED as SUMMED
from megatron_rl.hosts.door import TIMES_CP as TIMES_CP
from megatron_rl.hosts.door import Stage as Stage


@dataclass(frozen=True, slots=True)
class Stages:
    """of_samples: the factors that weigh samples; of_step: those that scale the whole step."""

    of_samples: list[Stage]
    of_step: list[Stage]


def of_roll(weight: Formula, *, needs_prompts: bool, per_token: bool) -> Stages:
    """Its Megatron strategy. Each context-parallel rank has the loss of its own tokens."""
    scale = ("ROLL", Formula(M=1, dp=1), "apply_loss_scale: multiplies by micro-batches and data-parallel ranks")
    return Stages([("loss", weight, "the weight, from counts of the step")], [scale, TIMES_CP, AVERAGED[1]])


def _carried(weight: Formula, needs_prompts: bool, estimator: str, ranks: Formula, words: str) -> list[Stage]:
    """Of a trainer whose advantages carry an aggregation that needs prompts."""
    if not needs_prompts:
        return [("loss", weight * ranks, f"{words}the weight, from counts of the step")]
    return [
        ("estimator", weight / SAMPLE_MEAN, f"{estimator} scales the sample's advantage"),
        ("loss", SAMPLE_MEAN * ranks, f"{words}the weight of sample_mean"),
    ]
