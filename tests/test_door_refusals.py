"""What each door refuses by its own table of settings: every number that is true, text for every switch, every misspelt name, every
setting that none of our losses reads, one value in the place of a group. Whatever one door has learnt, each door refuses."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import toy_door

from megatron_rl.config import PolicyLossConfig
from megatron_rl.hosts import door_line
from megatron_rl.hosts.door import WORDS, Door, Found, Kind
from megatron_rl.hosts.doors import DOORS as BY_NAME
from megatron_rl.hosts.settings import UNKNOWN, Settings
from megatron_rl.validation.checks import Row, check

DOORS = BY_NAME | {toy_door.DOOR.name: toy_door.DOOR}
# Each host refuses at least so many wrong lines by name.
LEAST = 40


def sound(door: Door) -> dict[str, Any]:
    """Settings by name with which our loss trains there: those that explain types."""
    for aggregation in ("token_mean", "sample_mean"):
        given, problems = door_line.given_by(door, PolicyLossConfig(loss_aggregation=aggregation))
        if not problems:
            return {name: value for name, value in given.items() if value is not UNKNOWN}
    raise AssertionError(problems)


def judged(door: Door, given: Mapping[str, Any]) -> list[Row]:
    settings = Settings.of_names(given, door.all_defaults, typed=given)
    return [row for row in door_line.judge_settings(door, settings) if row.is_wrong]


def misspelt(name: str) -> str:
    """With the last two letters that differ in the other order, or one letter more."""
    for at in range(len(name) - 2, name.rfind("."), -1):
        if name[at] != name[at + 1] and "." not in name[at : at + 2]:
            return name[:at] + name[at + 1] + name[at] + name[at + 2 :]
    return name + name[-1]


def wrong_settings(door: Door) -> Iterator[tuple[str, dict[str, Any], str]]:
    """(kind of fault, settings beside the sound ones, what the message names)."""
    known = {one.name for one in door.settings} | door.own_names()
    for one in door.settings:
        if one.kind in (Kind.NUMBER, Kind.BOUNDS):
            yield "a number that is true", {one.name: True}, one.name
        if one.kind == Kind.SWITCH:
            yield "text for a switch", {one.name: "maybe"}, one.name
        if one.idle is not None:
            yield "idle", {one.name: 0.5}, one.idle.split(";")[0][:20]
        slip = misspelt(one.name)
        if one.name.startswith(door.sections) and one.kind != Kind.GROUP and slip not in known:
            yield "a slip", {slip: 0.5}, slip
    for name in sorted(door.own_names()):
        yield "a slip", {misspelt(name): 0.5}, misspelt(name)
        if not name.lower().endswith(WORDS):
            yield "a number of ours that is true", {name: True}, name


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
def test_each_wrong_setting_is_refused_by_name(door):
    base = sound(door)
    assert not judged(door, base)
    found, silent = 0, []
    for fault, given, named in wrong_settings(door):
        rows = judged(door, base | given)
        found += 1
        if not any(named in f"{row.subject} {row.text}" for row in rows):
            silent.append((fault, given, [row.text for row in rows]))
    assert not silent, "\n".join(map(str, silent))
    assert found >= LEAST or door is toy_door.DOOR, found


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
def test_each_known_setting_is_no_slip(door):
    """A value that the host has itself is never refused for its name."""
    base = sound(door)
    for one in door.settings:
        rows = judged(door, base | {one.name: 1 if one.default is None else one.default})
        assert not [row.text for row in rows if "has no such setting" in row.text], one.name


# What a file or a line may hold in the place of anything.
ODD = (None, "", "1", "nan", "é", -1, 0, 10**400, math.nan, math.inf, [1, 2], {"a": 1}, [], "[" * 3000, UNKNOWN)


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
def test_no_value_of_a_setting_ends_in_another_error(door):
    """A value is judged, or is not known: each row is text of one setting."""
    base = sound(door)
    for name in {*door.known_names, *door.own_names()}:
        for value in ODD:
            given = base | {name: value}
            rows = [*door_line.judge_settings(door, Settings.of_names(given, door.all_defaults, typed=given))]
            assert all(isinstance(row.text, str) and row.subject for row in rows)


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
def test_a_known_name_with_a_word_more_is_another_setting(door):
    """NeMo-RL's own files have grpo.val_num_generations_per_prompt beside grpo.num_generations_per_prompt."""
    base, known = sound(door), {*door.known_names, *door.own_names()}
    for name in (one.name for one in door.settings if not one.name.startswith(door.sections or ("-",))):
        parent, _, last = name.rpartition(".")
        other = f"{parent}.gadget_{last}" if parent else f"gadget_{last}"
        rows = judged(door, base | {other: 8}) if other not in known else []
        assert not [row.text for row in rows if "did you mean" in row.text], other


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
def test_a_check_of_a_door_gets_no_text_and_no_list_for_a_number(door):
    """It compares numbers, as CONTRIBUTING shows: without this its TypeError would hide what is wrong."""

    @check()
    def compares(found: Found) -> Iterator[str]:
        yield from (one.name for one in door.settings if one.kind == Kind.NUMBER and (found.settings[one.name] or 0) < -1e9)

    strict, base = dataclasses.replace(door, checks=(compares,)), sound(door)
    for name in (one.name for one in door.settings if one.kind == Kind.NUMBER):
        for value in ("many", [1]):
            assert any(
                name in f"{row.subject} {row.text}" or "must be" in row.text for row in judged(strict, base | {name: value})
            ), name
