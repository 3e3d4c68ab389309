"""What doctor says, one line each: of a machine, and of a launch line. It must never import what may be broken, torch included."""

from __future__ import annotations

from dataclasses import dataclass, field

OK, ABSENT, NOTE, PROBLEM = "ok", "absent", "note", "PROBLEM"


@dataclass(frozen=True, slots=True)
class Finding:
    """status: ok, absent (and not needed), note, or PROBLEM: it would stop or falsify training."""

    subject: str
    status: str
    text: str


@dataclass(frozen=True, slots=True)
class LaunchReport:
    """title: whose launcher reads the line, and on which route our loss would be reached. flags: of ours, one finding each.

    unread: what stands on the line unexpanded and may hide flags; nothing is said of those.
    """

    title: str
    route: str | None
    reading: list[Finding] = field(default_factory=list)
    paths: list[Finding] = field(default_factory=list)
    flags: list[Finding] = field(default_factory=list)
    rules: list[Finding] = field(default_factory=list)
    unread: tuple[str, ...] = ()

    @property
    def findings(self) -> list[Finding]:
        return [*self.reading, *self.paths, *self.flags, *self.rules]
