"""The adapters by name. A module is imported when it is asked for, and never imports its trainer by itself."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, cast

from megatron_rl.aggregation_record import AggregationRecord, Formula
from megatron_rl.hosts.contract import Stage

if TYPE_CHECKING:
    from megatron_rl.hosts.choice import Offer

# A word of a launch line that holds one of these is of that trainer; miles, slime and Megatron-LM are told by --host.
SIGNS = {
    "verl": ("verl.trainer.", "actor_rollout_ref."),
    "nemo_rl": ("run_grpo.py", "loss_fn."),
    "roll": ("start_rlvr", "roll.pipeline."),
    "skyrl": ("skyrl.train.", "trainer.algorithm."),
}


class Adapter(Protocol):
    """What doctor and explain ask of each module megatron_rl.hosts.<name>."""

    TITLE: str
    PROBED: str  # the repository and revision that was measured
    OFFER: Offer  # which losses and aggregations can be trained there
    COUNTS_ROLLOUTS: bool  # whether there are launches where the rows of a rollout are counted
    WHY_NOT_PER_TOKEN: str | None  # why Megatron's per-token contract cannot be chosen there

    def compose(self, words: Sequence[str]) -> Any:
        """The trainer's config of a launch line, by its own parser or composer. Raises ImportError where it is not installed."""

    def check(self, config: Any) -> list[str]:
        """What the check at start says of it: what trains, and warnings. Raises one ConfigError with every problem."""

    def stages(self, weight: Formula, record: AggregationRecord, *, per_token: bool) -> tuple[list[Stage], list[Stage]]:
        """(the factors that weigh samples, those that scale the whole step), between a token's weight and its gradient."""


def adapter_named(name: str) -> Adapter:
    return cast(Adapter, import_module(f"megatron_rl.hosts.{name}"))


def name_of(words: Sequence[str]) -> str | None:
    """Whose launch line it is."""
    return next((name for name, signs in SIGNS.items() if any(sign in word for sign in signs for word in words)), None)
