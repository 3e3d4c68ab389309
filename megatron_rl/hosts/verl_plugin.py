"""What verl loads by the entry point `verl.plugins`, in each process that imports verl: it adds our losses to verl's tables.

verl's modules must not be loaded by this import, so each is changed right after verl has loaded it, and nothing of the package that
needs torch is imported before. verl drops an exception of a plugin without a word: a verl with another contract keeps
its own losses, and that is said. A launch with a problem ends by SystemExit where verl itself validates the whole config, in
verl.trainer.main_ppo before Ray starts.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from megatron_rl.errors import ConfigError
from megatron_rl.hosts import start_check
from megatron_rl.hosts.after_import import after_import

TABLES, CHECKS, ENGINES = "verl.trainer.ppo.core_algos", "verl.utils.config", "verl.workers.engine.base"


def fill(tables: ModuleType) -> None:
    from megatron_rl.hosts import verl_loss

    change(tables, verl_loss.register)


def count_in(engines: ModuleType) -> None:
    """Each engine counts a mini-batch before it trains on it with a loss of ours; a loss that nobody has counted for is refused."""
    from megatron_rl.hosts import verl_step

    change(engines, verl_step.count_in)


def change(module: ModuleType, work: Callable[[Any], None]) -> None:
    try:
        work(module)
    except ConfigError as error:
        start_check.say(f"none of its losses can train in verl: {error}")


def judge(checks: Any) -> None:
    """verl's validate_config ends a launch of ours that has a problem, and each one after a check that was asked for."""
    validate = checks.validate_config

    @functools.wraps(validate)
    def validate_ours_too(config: Any, *given: Any, **named: Any) -> Any:
        from megatron_rl.hosts import verl

        try:
            lines = verl.check(config)
        except ConfigError as error:
            start_check.end_with_problems(error)
        result = validate(config, *given, **named)
        start_check.end_after_check(lines)
        return result

    checks.validate_config = validate_ours_too
    package = sys.modules.get(CHECKS.rpartition(".")[0])
    if getattr(package, "validate_config", None) is validate:
        package.validate_config = validate_ours_too  # type: ignore[union-attr]


after_import(TABLES, fill)
after_import(ENGINES, count_in)
after_import(CHECKS, judge)
