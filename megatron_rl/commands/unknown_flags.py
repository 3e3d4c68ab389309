"""Says what an unknown flag may have meant. It must never accept one."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from difflib import get_close_matches


def problems_of_unknown(unknown: Sequence[str], command: str, parser: ArgumentParser) -> Iterator[str]:
    """A line for each unknown flag; one for the words, where there are words alone."""
    known = [flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")]
    flags = [word.partition("=")[0] for word in unknown if word.startswith("-") and word != "--" and not word[1:2].isdigit()]
    for flag in flags:
        close = get_close_matches(flag.replace("_", "-"), known, 1)
        remedy = f"did you mean {close[0]}?" if close else f"megatron-rl {command} --help lists the flags"
        yield f"{flag} is no flag of megatron-rl {command}: {remedy}"
    if not flags:
        yield f"megatron-rl {command} takes no argument {' '.join(unknown)!r}: remove it, or give it to a flag"
