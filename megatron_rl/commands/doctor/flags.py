"""Whether anything reads a flag of ours on a launch line, by the table that validation goes by; it must never decide by another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from megatron_rl.commands.doctor.findings import NOTE, OK, PROBLEM, Finding
from megatron_rl.commands.doctor.script import is_unread
from megatron_rl.commands.doctor.words import TRAIN, LaunchLine
from megatron_rl.config import Route
from megatron_rl.hosts.facts import Host
from megatron_rl.hosts.slips import is_hook_place, meant_flag, why_nobody_reads
from megatron_rl.validation import ROUTES_OF_FLAG
from megatron_rl.validation.routes import REASONS


def judge_flags(line: LaunchLine, route: Route | None) -> list[Finding]:
    """route: None where nothing of ours is at work; then only what is meant for us and reaches nobody is told."""
    read = [*_read_flags(line, route)] if route is not None else []
    return [*read, *_slips(line), *_behind(line), *_repeated(line)]


def _read_flags(line: LaunchLine, route: Route) -> Iterator[Finding]:
    for flag, value in line.ours.items():
        if flag in line.typed and not line.takes_our_flags and (flag not in line.filed or line.host == Host.MILES):
            yield Finding(flag, PROBLEM, fate_of_unknown_flags(line))
        elif route not in ROUTES_OF_FLAG[flag]:
            places = ", ".join(place for place in Route if place in ROUTES_OF_FLAG[flag])
            reason = f" ({REASONS[flag]})" if flag in REASONS else ""
            yield Finding(flag, PROBLEM, f"ignored on the route {route}: it works on {places}{reason}")
        elif is_unread(value):
            yield Finding(flag, NOTE, f"{value} is not known here: read on the route {route}, and not judged")
        else:
            yield Finding(flag, OK, f"{value or 'on'}, read on the route {route}")
        if line.filed.get(flag, line.typed.get(flag)) != line.typed.get(flag, line.filed.get(flag)):
            text = f"the file of --custom-config-path wins: {line.filed[flag]}, not the {line.typed[flag]} of the line"
            yield Finding(flag, NOTE, text)


def _slips(line: LaunchLine) -> Iterator[Finding]:
    for flag in dict.fromkeys(flag for flag, _ in line.flags):
        if meant_flag(flag) is not None:
            yield Finding(flag, PROBLEM, f"{fate_of_unknown_flags(line)}: {why_nobody_reads(flag)}")


def _behind(line: LaunchLine) -> Iterator[Finding]:
    lost = [word for word in line.behind if word.partition("=")[0] in ROUTES_OF_FLAG or word.startswith("megatron_rl.")]
    if lost:
        verb = "reaches" if len(lost) == 1 else "reach"
        text = f"a parser takes what stands behind it for no flag: {', '.join(lost)} {verb} nobody; remove the --"
        yield Finding("--", PROBLEM, text)


def _repeated(line: LaunchLine) -> Iterator[Finding]:
    for flag, times in Counter(flag for flag, _ in line.flags).items():
        values = [" ".join(values) for other, values in line.flags if other == flag]
        if times > 1 and len(set(values)) > 1 and (flag in ROUTES_OF_FLAG or is_hook_place(flag)):
            yield Finding(flag, NOTE, f"given {times} times, and the last counts: {values[-1]}, not {', '.join(values[:-1])}")


def fate_of_unknown_flags(line: LaunchLine) -> str:
    """What the parser that reads the line does with a flag that it does not have."""
    if line.host == TRAIN:
        return "refused as an unknown argument"
    if line.host == Host.MEGATRON_LM:
        remedy = "pass compose_extra_args_provider() of megatron_rl.hosts.megatron_lm to its pretrain"
        return "unknown to this script's parser" + ("" if line.takes_our_flags else f": {remedy}")
    end = {Host.SLIME: "dropped without a word", Host.MILES: "refused as an unknown argument"}[Host(line.host)]
    return f"{end} by the {'' if line.uses_our_launcher else 'stock '}launcher of {line.host}"
