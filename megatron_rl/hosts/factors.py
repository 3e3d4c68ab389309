"""What multiplies a token's weight between our loss and its gradient, in verl and ROLL: two tables.

A stage is (name, factor, what it does). tests/test_explain_chain.py holds each table against the code that does it.
"""

from __future__ import annotations

from dataclasses import dataclass

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
