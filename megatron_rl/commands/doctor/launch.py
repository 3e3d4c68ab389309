"""What a launch line would train: the trainer's own parser or composer reads it, and the check that runs at its start judges it."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_rl.commands.doctor.report import NOTE, OK, PROBLEM, Finding
from megatron_rl.errors import ConfigError
from megatron_rl.hosts.adapters import adapter_named, name_of

CHECK = "start it with MEGATRON_RL_CHECK=1 in its environment, which stops it after the same check"


def judge_line(words: Sequence[str], host: str | None) -> list[Finding]:
    name = host or name_of(words)
    if name is None:
        return [Finding("line", NOTE, f"no word of it names a trainer that is known here: add --host, or {CHECK}")]
    adapter = adapter_named(name)
    try:
        config = adapter.compose(words)
    except ImportError as error:
        return [Finding("line", NOTE, f"{adapter.TITLE} cannot read it here ({error}): run doctor in its environment, or {CHECK}")]
    except SystemExit as error:  # of an argument parser, which has said why
        return [Finding("line", PROBLEM, f"{adapter.TITLE}'s own parser refuses it, exit code {error.code}")]
    except ConfigError as error:
        return [Finding("line", PROBLEM, problem) for problem in error.problems]
    try:
        return [Finding("settings", OK, text) for text in adapter.check(config)]
    except ConfigError as error:
        return [Finding("settings", PROBLEM, problem) for problem in error.problems]
