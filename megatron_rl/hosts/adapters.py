"""The adapters by name. A module is imported when it is asked for, and never imports its trainer by itself."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

# A word of a launch line that holds one of these is of that trainer; miles, slime and Megatron-LM are told by --host.
SIGNS = {
    "verl": ("verl.trainer.", "actor_rollout_ref."),
    "nemo_rl": ("run_grpo.py", "loss_fn."),
    "roll": ("start_rlvr", "roll.pipeline."),
    "skyrl": ("skyrl.train.", "trainer.algorithm."),
}


def adapter_named(name: str) -> Any:
    """The module megatron_rl.hosts.<name>. doctor and explain ask it for TITLE, PROBED, OFFER, COUNTS_ROLLOUTS, WHY_NOT_PER_TOKEN
    and for three functions: `compose` makes the trainer's config of a launch line by its own parser or composer (ImportError where
    it is not installed); `check` says what the check at start says of it, or raises one ConfigError with every problem; `stages`
    gives the factors between a token's weight and its gradient."""
    return import_module(f"megatron_rl.hosts.{name}")


def name_of(words: Sequence[str]) -> str | None:
    """Whose launch line it is."""
    return next((name for name, signs in SIGNS.items() if any(sign in word for sign in signs for word in words)), None)
