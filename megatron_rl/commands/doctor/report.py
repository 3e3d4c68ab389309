"""What doctor says, as text and as JSON. It must never import what may be broken, torch included."""

from __future__ import annotations

import json
from collections.abc import Sequence
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

    unread: what stands on the line unexpanded and may hide flags; nothing is said of those. unjudged: what is said where no loss
    was judged, in the place of "no problems"; None: one was.
    """

    title: str
    route: str | None
    reading: list[Finding] = field(default_factory=list)
    paths: list[Finding] = field(default_factory=list)
    flags: list[Finding] = field(default_factory=list)
    rules: list[Finding] = field(default_factory=list)
    unread: tuple[str, ...] = ()
    unjudged: str | None = None

    @property
    def findings(self) -> list[Finding]:
        return [*self.reading, *self.paths, *self.flags, *self.rules]


def as_text(machine: Sequence[Finding], launch: LaunchReport | None, num_problems: int) -> str:
    lines = [f"megatron_rl {__version__} on this machine", *_table(machine)] if machine else []
    if launch is not None:
        lines += [f"launch line: {printable(launch.title)}", *_table(launch.findings)]
    hidden = "" if launch is None or not launch.unread else f"; not read: {printable(', '.join(launch.unread))}"
    count = f"{num_problems or 'no'} problem{'' if num_problems == 1 else 's'}"
    if launch is not None and launch.unjudged is not None:
        here = f"{count}; " if num_problems else "no problems on this machine; " if machine else ""
        lines.append(f"doctor: {here}{launch.unjudged}{hidden}")
    else:
        lines.append(f"doctor: {count}{' in what could be read' if hidden else ''}{hidden}")
    return "\n".join(lines)


def _table(rows: Sequence[Finding]) -> list[str]:
    texts = [(printable(row.subject), row.status, printable(row.text)) for row in rows]
    width = max((len(subject) for subject, _, _ in texts), default=0)
    return [f"  {status:8s} {subject:{width}s}  {text}".rstrip() for subject, status, text in texts]


def as_json(machine: Sequence[Finding], launch: LaunchReport | None, num_problems: int) -> str:
    found = {"megatron_rl": __version__, "problems": num_problems, "machine": [asdict(row) for row in machine]}
    return json.dumps(found | {"launch": None if launch is None else asdict(launch)})
