"""What doctor says of the shell script that a launch line was read from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from megatron_rl.commands.doctor.report import NOTE, PROBLEM, Finding
from megatron_rl.commands.doctor.script import ScriptLine

# More variables of branches are counted, and not listed.
MOST_BRANCHES = 4


def of_script(read_from: ScriptLine | None, stray: ScriptLine | None) -> Iterator[Finding]:
    """What could not be decided in a shell script, whoever's line it starts."""
    if read_from and read_from.unparsed:
        text = f"not understood, and what they set is not known: line {', '.join(read_from.unparsed)}"
        yield Finding("script", NOTE, text)
    if read_from and read_from.unheard:
        lost = f"no effect of {' '.join(read_from.unheard)}: nothing in the script takes what is behind it"
        text = f'{lost}; put "$@" behind the words of {read_from.place}, or edit them'
        yield Finding("script", NOTE if read_from.absent else PROBLEM, text)
    yield from (Finding("script", PROBLEM, text) for text in (read_from.slips if read_from else ()))
    if stray:
        words = f"{stray.words[0]} and {len(stray.words) - 1} words after it"
        text = f"{words} are alone on line {stray.line} and have no effect: the line above lacks its \\ at the end"
        yield Finding("script", PROBLEM, text)


def branches_of(read_from: ScriptLine | None) -> Iterator[Finding]:
    """What depends on branches of a script, of which it is not known here which one runs."""
    if read_from is None or not read_from.branches:
        return
    named = {f"${{{name.split()[0]}}}" for name in read_from.branches}
    words = [(flag, word) for flag, word in pairwise(["", *read_from.words]) if any(name in word for name in named)]
    unjudged = dict.fromkeys(flag if "=" not in word else word.partition("=")[0].lstrip("+~") for flag, word in words)
    text = f"taken as if each branch of the script had run: {_first(read_from.branches)}"
    text += f"; not judged, for they have another value in each: {_first([*unjudged])}" if unjudged else ""
    typed = " ".join(f"{name}=..." for name in read_from.deciding)
    yield Finding("branches", NOTE, text + (f"; type {typed} before bash to choose" if typed else ""))


def _first(names: Sequence[str]) -> str:
    more = len(names) - MOST_BRANCHES
    return ", ".join(names[:MOST_BRANCHES]) + (f" and {more} more" if more > 0 else "")
