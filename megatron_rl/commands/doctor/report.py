"""What doctor says, as text and as JSON. It must never import what may be broken, torch included."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from megatron_rl import __version__
from megatron_rl.errors import printable

OK, ABSENT, NOTE, PROBLEM = "ok", "absent", "note", "PROBLEM"


@dataclass(frozen=True, slots=True)
class Finding:
    """status: ok, absent (and not needed), note, or PROBLEM: it would stop or falsify training."""

    subject: str
    status: str
    text: str


def num_problems(rows: Iterable[Finding]) -> int:
    return sum(row.status == PROBLEM for row in rows)


def as_text(machine: Sequence[Finding], launch: Sequence[Finding]) -> str:
    lines = [f"megatron_rl {__version__} on this machine", *_table(machine)] if machine else []
    lines += ["the launch line", *_table(launch)] if launch else []
    problems = num_problems([*machine, *launch])
    return "\n".join([*lines, f"doctor: {problems or 'no'} problem{'' if problems == 1 else 's'}"])


def _table(rows: Sequence[Finding]) -> list[str]:
    texts = [(printable(row.subject), row.status, printable(row.text)) for row in rows]
    width = max(len(subject) for subject, _, _ in texts)
    return [f"  {status:8s} {subject:{width}s}  {text}".rstrip() for subject, status, text in texts]


def as_json(machine: Sequence[Finding], launch: Sequence[Finding]) -> str:
    found = {"megatron_rl": __version__, "problems": num_problems([*machine, *launch])}
    return json.dumps(found | {"machine": [asdict(row) for row in machine], "launch": [asdict(row) for row in launch]})
