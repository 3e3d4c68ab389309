"""What each door refuses by its own table of settings, and what it reads of a right one. Whatever one door has learnt, each knows.

Settings are given by name, as explain types them. Lines and files of the hosts are in door_lines.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pytest
import toy_door
from door_table import must_say_one_row

from megatron_rl.config import PolicyLossConfig
from megatron_rl.hosts import door_line
from megatron_rl.hosts.door import ONE_SAMPLE, WORDS, Door, Found, Kind
from megatron_rl.hosts.door_settings import losses
from megatron_rl.hosts.doors import DOORS as BY_NAME
from megatron_rl.hosts.settings import UNKNOWN, Letter, Settings
from megatron_rl.validation.checks import Row, check

DOORS = BY_NAME | {toy_door.DOOR.name: toy_door.DOOR}
of_each_door = pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
# Without one of its letters a shorter section is too unlike itself to be meant.
SHORTEST_SECTION = 6
# Each host refuses at least so many wrong settings by name.
LEAST = 40
SWITCH, NO_SUCH = "is a switch, and must be a number", "has no such setting: did you mean"


def sound(door: Door, **chosen: Any) -> dict[str, Any]:
    """Settings by name with which our loss trains there: those that explain types. chosen: fields of PolicyLossConfig."""
    chosen = {"loss_aggregation": first_aggregation(door)} | chosen
    chosen |= {ONE_SAMPLE: must_say_one_row(door, chosen["loss_aggregation"])}
    given, problems = door_line.given_by(door, PolicyLossConfig(**chosen))
    assert not problems, problems
    return {name: value for name, value in given.items() if value is not UNKNOWN}


def first_aggregation(door: Door) -> str:
    return next(record.name for record in door.aggregations() if not record.takes_divisor)


def judged(door: Door, given: Mapping[str, Any]) -> list[Row]:
    return [*door_line.judge_settings(door, Settings.of_names(given, door.all_defaults, typed=given))]


def problems_of(door: Door, given: Mapping[str, Any]) -> list[str]:
    return [f"{row.subject}: {row.text}" for row in judged(door, given) if row.is_wrong]


def not_refused(door: Door, wrong: Iterable[tuple[Mapping[str, Any], list[str]]]) -> str:
    """A line for each of these settings for which no problem says all that it must; empty: there is none."""
    found = [(given, says, problems_of(door, given)) for given, says in wrong]
    return "\n".join(str(one) for one in found if not any(all(word in text for word in one[1]) for text in one[2]))


def misspelt(name: str) -> str:
    """Without a letter in the middle of its last part."""
    start = name.rfind(".") + 1
    at = (start + len(name)) // 2
    return name[:at] + name[at + 1 :]


def groups_of(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def wrong_settings(door: Door) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """(settings beside the sound ones, what one message says): kinds, idle ones, slips, values for groups."""
    known = {one.name for one in door.settings} | door.own_names()
    for one in door.settings:
        if one.kind in (Kind.NUMBER, Kind.BOUNDS):
            yield {one.name: True}, [one.name, SWITCH]
        if one.kind == Kind.NUMBER and one.idle is None and one.field is None:
            yield {one.name: "high"}, ["'high'", "must be"]
        if one.kind == Kind.SWITCH and one.idle is None:
            yield {one.name: "maybe"}, [one.name, "'maybe' is text", "write true or false"]
        if one.kind == Kind.GROUP:
            yield {one.name: "abc"}, [one.name, "it is a group of settings", "takes no abc in its place"]
        if one.idle is not None:
            yield {one.name: 0.5}, [one.name, one.idle]
        slip = misspelt(one.name)
        if one.name.startswith(door.sections) and one.kind != Kind.GROUP and slip not in known:
            yield {slip: 0.5}, [f"{slip}: {door.title} {NO_SUCH} {one.name}?"]
    for name in sorted(door.own_names()):
        yield {misspelt(name): 0.5}, [misspelt(name)]
        if not name.lower().endswith(WORDS):
            yield {name: True}, [name]
    for group in sorted({group for one in door.settings for group in groups_of(one.name)}):
        yield {group: "abc"}, [f"{group}: it is a group of settings"]
    for prefix in (prefix for prefix in door.sections if prefix.endswith(".")):
        section, inner = prefix.removesuffix("."), [one.name for one in door.settings if one.name.startswith(prefix)]
        name = next(name for name in inner if "." not in name.removeprefix(prefix))
        slip = f"{misspelt(section)}.{name.removeprefix(prefix)}"
        if len(section) >= SHORTEST_SECTION:
            yield {slip: 0.5}, [f"{slip}: {door.title} {NO_SUCH} {name}?"]


@of_each_door
def test_each_wrong_setting_is_refused_by_name(door):
    base, wrong = sound(door), [*wrong_settings(door)]
    assert not problems_of(door, base)
    silent = not_refused(door, ((base | given, says) for given, says in wrong))
    assert not silent, silent
    assert len(wrong) >= LEAST or door is toy_door.DOOR, len(wrong)


def wrong_values(door: Door) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """(settings, what one message says): loss and aggregation, divisor, clip, parameters, corrections."""
    choice, own, base = door.choice, door.own.name, sound(door)
    yield base | {choice.setting: base[choice.setting].replace("grpo", "grpoo")}, [choice.setting, "grpo"]
    if choice.aggregation is None:
        yield base | {choice.setting: f"{choice.prefix}grpo.mean"}, [choice.setting, "'mean' is no aggregation"]
    last = choice.setting.rpartition(".")[2]
    if last not in door.known_names:
        whole = door.line_of(choice.setting, base[choice.setting])
        yield base | {last: base[choice.setting]}, [f"{last}: ", f"type its whole name, {whole}"]
    with_divisor = sound(door, loss_aggregation="constant", loss_aggregation_divisor=8.5)
    (divisor,) = (name for name, value in with_divisor.items() if value == 8.5)
    yield (
        {name: value for name, value in with_divisor.items() if name != divisor},
        ["needs its L: set ", *door.typed({divisor: Letter("L")})],
    )
    for value in (0, -8, math.nan, math.inf, "long"):
        yield with_divisor | {divisor: value}, [divisor, "must be a number above 0"]
    yield base | {divisor: 8.5}, [divisor, "has no effect", "no divisor"]
    clipped = sound(door, clip_ratio_low=0.11, clip_ratio_high=0.33)
    low, high = (next(name for name, value in clipped.items() if value == side) for side in (0.11, 0.33))
    yield clipped | {low: 1.5}, ["1.5 must be in [0, 1)"]
    yield clipped | {high: -0.1}, ["-0.1 must be"]
    without = sound(door, policy_loss="reinforce")
    yield without | {name: clipped[name] for name in clipped.keys() - base.keys()}, ["has no effect: reinforce has no clip"]
    for field, setting in door.field_settings.items():
        if field in ("clip_ratio_c", "sapo_temperature_positive", "sapo_temperature_negative", "log_ratio_penalty"):
            value = True if setting.kind == Kind.SWITCH else 7.5
            yield without | {setting.name: value}, [setting.name, "has no effect: reinforce has no"]
    yield without | {own("divergence_low"): 0.1}, [own("divergence_low"), "has no effect"]
    corrected = sound(door, importance_correction="icepop", importance_correction_low=0.5, importance_correction_high=2.0)
    kind, *bounds = (own(f"importance_correction{part}") for part in ("", "_low", "_high"))
    yield corrected | {kind: "cut"}, ["'cut' is not registered"]
    yield corrected | {own("importance_correction_level"): "group"}, ["'group' is not one of"]
    yield corrected | dict(zip(bounds, (2.0, 0.5), strict=True)), ["importance_correction_low=2"]
    yield {name: value for name, value in corrected.items() if name != kind}, ["has no effect without a correction"]
    yield corrected | {own("off_policy_sequence_delta"): -0.1}, ["off_policy_sequence_delta=-0.1"]
    if "dppo_tv" in losses(door):
        yield sound(door, policy_loss="dppo_tv") | {kind: "tis"}, ["would be counted twice"]


@of_each_door
def test_each_wrong_value_is_refused_by_name(door):
    silent = not_refused(door, wrong_values(door))
    assert not silent, silent


@of_each_door
def test_each_known_setting_is_no_slip(door):
    """A value that the host has itself is never refused for its name."""
    base = sound(door)
    for one in door.settings:
        problems = problems_of(door, base | {one.name: 1 if one.default is None else one.default})
        assert not [text for text in problems if "has no such setting" in text], one.name


# What a file or a line may hold in the place of anything.
ODD = (None, "", "1", "nan", "é", -1, 0, 10**400, math.nan, math.inf, [1, 2], {"a": 1}, [], "[" * 3000, UNKNOWN)


@of_each_door
def test_no_value_of_a_setting_ends_in_another_error(door):
    """A value is judged, or is not known: each row is text of one setting."""
    base = sound(door)
    for name in {*door.known_names, *door.own_names()}:
        for value in ODD:
            rows = judged(door, base | {name: value})
            assert all(isinstance(row.text, str) and row.subject for row in rows)


@of_each_door
def test_a_known_name_with_a_word_more_is_another_setting(door):
    """NeMo-RL's own files have grpo.val_num_generations_per_prompt beside grpo.num_generations_per_prompt."""
    base, known = sound(door), {*door.known_names, *door.own_names()}
    for name in (one.name for one in door.settings if not one.name.startswith(door.sections or ("-",))):
        parent, _, last = name.rpartition(".")
        other = f"{parent}.gadget_{last}" if parent else f"gadget_{last}"
        rows = judged(door, base | {other: 8}) if other not in known else []
        assert not [row.text for row in rows if "did you mean" in row.text], other


@of_each_door
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
