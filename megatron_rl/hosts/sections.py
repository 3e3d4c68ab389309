"""Every name of the sections of a host's settings that our losses read, so that a misspelt one is refused without the host.

A host may drop a name that it does not have, or refuse it in a worker after it has loaded a model. And some hosts take `true` for a
number, which is 1 then. tests/test_sections.py compares the tables with checkouts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from megatron_rl.hosts.given import Given, not_numbers
from megatron_rl.hosts.settings_line import UNKNOWN, Row

# A misspelt section is more similar than this to the right one; no two sections of a host are.
CLOSEST_SECTION = 0.9
# Words for the two sides of a range: another trainer says high where this one says max. The wrong side is never what was meant.
_SIDES = (("low", "min"), ("high", "max"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """numbers, others: names below the prefix. trees: names with names of their own, which are not judged. idle: a name that none
    of our losses reads -> what to do."""

    host: str
    prefix: str  # with its dot
    numbers: tuple[str, ...]
    others: tuple[str, ...] = ()
    trees: tuple[str, ...] = ()
    idle: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.numbers, *self.others)

    def judge(
        self, given: Mapping[str, Any], added: Collection[str] = (), *, is_ours: bool = True, may_have_more: bool = False
    ) -> Iterator[Row]:
        """given: settings of a line by their whole names. added: names that this host has by us. is_ours: one of our losses trains.
        may_have_more: a name that is like none of these may be one of another version, and gets a note."""
        known = (*self.names, *added)
        for whole, value in given.items():
            parent, _, last = whole.rpartition(".")
            name = whole.removeprefix(self.prefix)
            if name == whole:
                section = self.prefix.removesuffix(".")
                if parent != section and last in known and get_close_matches(parent, [section], 1, CLOSEST_SECTION):
                    yield Row(whole, f"{self.host} has no such setting: did you mean {self.prefix}{last}?", is_wrong=True)
            elif name in self.numbers:
                yield from (Row(whole, problem, is_wrong=True) for problem in not_numbers([Given(whole, value)]))
            elif name not in known and name.partition(".")[0] not in self.trees:
                close = get_close_matches(name, known, 1) if (side := _side(name)) is None else _closest_of_side(name, side, known)
                meant = f"did you mean {self.prefix}{close[0]}?" if close else f"remove it; it has {', '.join(sorted(known))}"
                is_note = may_have_more and not close
                yield Row(whole, f"{self.host} has no such setting: {meant}", is_wrong=not is_note, is_note=is_note)
            if is_ours and name != whole and name in self.idle:
                yield Row(whole, f"{whole}={value} has no effect: our losses do not read it; {self.idle[name]}", is_wrong=True)


def _side(name: str) -> tuple[str, ...] | None:
    return next((words for words in _SIDES if name.endswith(words)), None)


def _closest_of_side(name: str, side: tuple[str, ...], known: Collection[str]) -> list[str]:
    """The known name of this side that is most similar, whichever word it has for the side, and whatever the order of its words."""

    def stem(one: str) -> str:
        return "_".join(sorted(one[: -len(next(filter(one.endswith, side)))].split("_")))

    name_of = {stem(one): one for one in known if one.endswith(side)}
    return [name_of[one] for one in get_close_matches(stem(name), name_of, 1)]


def values_for_groups(host: str, given: Mapping[str, Any], names: Iterable[str], mode: str) -> Iterator[Row]:
    """One value in the place of a group of settings: nothing below it can be judged. names: settings that our losses read, by
    their whole names. mode: the one that chooses the loss."""
    names = list(names)
    for whole, value in given.items():
        if value is UNKNOWN or not any(name.startswith(f"{whole}.") for name in names):
            continue
        if str(value).startswith("{"):
            yield Row(whole, "several settings in one word are not read here: type each by its whole name", is_note=True)
        else:
            meant = f": did you mean {mode}={value}?" if mode.startswith(f"{whole}.") else ""
            yield Row(whole, f"it is a group of settings, and {host} takes no {value} in its place{meant}", is_wrong=True)
