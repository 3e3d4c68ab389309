"""What doctor says, as text and as JSON. It must never import what may be broken, torch included."""

from __future__ import annotations

import json
from collections.abc import Sequence
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


def num_problems(rows: Sequence[Finding]) -> int:
    return sum(row.status == PROBLEM for row in rows)


def as_text(rows: Sequence[Finding]) -> str:
    width = max(len(row.subject) for row in rows)
    lines = [f"  {row.status:8s} {row.subject:{width}s}  {printable(row.text)}".rstrip() for row in rows]
    count = num_problems(rows)
    return "\n".join([f"megatron_rl {__version__}", *lines, f"doctor: {count or 'no'} problem{'' if count == 1 else 's'}"])


def as_json(rows: Sequence[Finding]) -> str:
    return json.dumps({"megatron_rl": __version__, "problems": num_problems(rows), "findings": [asdict(row) for row in rows]})
