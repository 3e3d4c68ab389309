"""How a launch ends at its start: with every problem, or after the check that MEGATRON_RL_CHECK=1 asks for, before Ray."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import NoReturn

from megatron_rl.errors import ConfigError

CHECK_VARIABLE = "MEGATRON_RL_CHECK"


def say(text: str) -> None:
    print(f"megatron_rl: {text}", file=sys.stderr, flush=True)


def end_with_problems(error: ConfigError) -> NoReturn:
    raise SystemExit("\n".join(f"megatron_rl: ConfigError: {problem}" for problem in error.problems))


def end_after_check(lines: Iterable[str]) -> None:
    """Where MEGATRON_RL_CHECK is set, ends the process with exit code 0, and with what the check says."""
    if os.environ.get(CHECK_VARIABLE, "0") in ("", "0"):
        return
    for line in lines:
        say(line)
    say(f"{CHECK_VARIABLE}: the launch has no problem, and ends here")
    raise SystemExit(0)
