"""What doctor says, as text and as JSON. It must never import what may be broken, torch included."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field

from megatron_rl import __version__
from megatron_rl.errors import printable

OK, ABSENT, NOTE, PROBLEM = "ok", "absent", "note", "PROBLEM"


@dataclass(frozen=True, slots=True)
class Finding:
    """status: ok, absent (and not needed), note, or PROBLEM: it would stop or falsify training."""

    subject: str
    status: str
    text: str


@dataclass(frozen=True, slots=True)
class LaunchReport:
    """title: whose launcher reads the line, and on which route our loss would be reached. flags: ours, one finding each.

    unread: what stands on the line unexpanded and may hide flags; nothing is said of those. unjudged: what is said in the place of
    "no problems" where no loss was judged, or not all that acts on it; None: all was. unknown: flags that a check reads and whose
    value is not known here. remedy: how they can be given.
    """

    title: str
    route: str | None
    reading: list[Finding] = field(default_factory=list)
    paths: list[Finding] = field(default_factory=list)
    flags: list[Finding] = field(default_factory=list)
    rules: list[Finding] = field(default_factory=list)
    unread: tuple[str, ...] = ()
    unjudged: str | None = None
    unknown: tuple[str, ...] = ()
    remedy: str = ""

    @property
    def findings(self) -> list[Finding]:
        return [*self.reading, *self.paths, *self.flags, *self.rules]


def num_problems(rows: Iterable[Finding]) -> int:
    return sum(row.status == PROBLEM for row in rows)


def as_text(machine: Sequence[Finding], launches: Sequence[LaunchReport]) -> str:
    """Trainings of one script that are alike but for their place share one table."""
    lines = [f"megatron_rl {__version__} on this machine", *_table(machine)] if machine else []
    if not launches:
        return "\n".join([*lines, f"doctor: {_count(num_problems(machine))}"])
    alike: dict[str, list[str]] = {}
    for launch in launches:
        alike.setdefault("\n".join([*_table(launch.findings), _last_line(machine, launch)]), []).append(printable(launch.title))
    for text, titles in alike.items():
        lines += [*(f"launch line: {title}" for title in titles), text]
    return "\n".join(lines)


def _last_line(machine: Sequence[Finding], launch: LaunchReport) -> str:
    problems = num_problems([*machine, *launch.findings])
    unread = launch.unread if launch.unjudged is not None else (*launch.unread, *launch.unknown)
    hidden = f"; not read: {printable(', '.join(unread))}" if unread else ""
    if launch.unjudged is not None:
        here = f"{_count(problems)}; " if problems else "no problems on this machine; " if machine else ""
        return f"doctor: {here}{launch.unjudged}{hidden}"
    return f"doctor: {_count(problems)}{' in what could be read' if hidden else ''}{hidden}{launch.remedy}"


def _count(problems: int) -> str:
    return f"{problems or 'no'} problem{'' if problems == 1 else 's'}"


def _table(rows: Sequence[Finding]) -> list[str]:
    texts = [(printable(row.subject), row.status, printable(row.text)) for row in rows]
    width = max((len(subject) for subject, _, _ in texts), default=0)
    return [f"  {status:8s} {subject:{width}s}  {text}".rstrip() for subject, status, text in texts]


def as_json(machine: Sequence[Finding], launches: Sequence[LaunchReport]) -> str:
    """launch: of the first training; further: of the others."""
    each = [asdict(launch) for launch in launches]
    problems = num_problems([*machine, *(one for launch in launches for one in launch.findings)])
    found = {"megatron_rl": __version__, "problems": problems, "machine": [asdict(row) for row in machine], "launch": None}
    return json.dumps(found | ({"launch": each[0]} if each else {}) | ({"further": each[1:]} if each[1:] else {}))
