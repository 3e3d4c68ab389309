"""What each host door offers: every name of the hub, judged by the objects of the hosts through `explain --host`.

A cell of the table is `yes`, or the reason of REASONS why the door refuses the name.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator
from functools import cache

from megatron_rl.__main__ import main
from megatron_rl.hosts import DOOR_NAMES, ROLLOUT_HOST_NAMES
from megatron_rl.hosts.door import Door
from megatron_rl.hosts.doors import DOORS as DECLARED
from megatron_rl.hosts.settings import Settings
from megatron_rl.loss_hub import get_loss_aggregation, loss_aggregation_names, policy_loss_names
from megatron_rl.registries.corrections import correction_names, get_correction
from megatron_rl.registries.kl_estimators import kl_estimator_names

# door -> the flags of explain beside it. In miles and slime our losses run as their custom loss.
DOORS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(ROLLOUT_HOST_NAMES, ("--route", "custom_loss")),
    **dict.fromkeys(DOOR_NAMES, ()),
    "megatron_lm": (),
}
STEP = ("--response-lengths", "3,5", "--prompt-ids", "a,b")
BOUNDS = ("--importance-correction-low", "0.9", "--importance-correction-high", "1.1")


def settings() -> dict[str, dict[str, tuple[str, ...]]]:
    """Kind -> name -> the flags that choose it."""
    aggregations = {}
    for name in loss_aggregation_names():
        if "." not in name and get_loss_aggregation(name).name == name:
            divisor = ("--loss-aggregation-divisor", "8") if get_loss_aggregation(name).takes_divisor else ()
            aggregations[name] = ("--loss-aggregation", name, *divisor)
    kinds = [name for name in correction_names() if get_correction(name).levels]
    corrections = {
        f"{kind}, {level}": ("--importance-correction", kind, "--importance-correction-level", level, *BOUNDS)
        for kind in kinds
        for level in get_correction(kind).levels
    }
    return {
        "loss": {name: ("--policy-loss", name) for name in policy_loss_names() if "." not in name},
        "aggregation": aggregations,
        "correction": corrections | {"off_policy_sequence_delta": ("--off-policy-sequence-delta", "0.1")},
        "KL estimator": {str(name): ("--kl-coefficient", "0.1", "--kl-estimator", name) for name in kl_estimator_names()},
    }


# What explain is told where each rollout is one row.
ONE_ROW_FLAG = ("--one-sample-per-rollout",)


def must_say_one_row(door: Door, aggregation: str) -> bool:
    """Whether the door refuses an aggregation that counts rollouts until the user says that each has one row."""
    rollouts = door.rollouts(Settings.of_names({}, door.all_defaults))
    return get_loss_aggregation(aggregation).counts_rollouts and rollouts.several is not None and not rollouts.are_counted


@cache
def problems(door: str, *flags: str) -> tuple[str, ...]:
    """Why the door refuses these settings."""
    given = dict(zip(flags, (*flags[1:], ""), strict=True))
    aggregation = given.get("--loss-aggregation", "sample_mean")
    said = ONE_ROW_FLAG * (door in DECLARED and must_say_one_row(DECLARED[door], aggregation))
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as error:
        main(["explain", *STEP, "--host", door, *DOORS[door], *flags, *said, "--json"])
    return tuple(json.loads(out.getvalue())["problems"]) if out.getvalue() else (error.getvalue(),)


NOT_PROPORTIONAL = "not proportional"
# (door, kind) -> name -> why the door refuses it, in at most three words; ANY: of each name that has no reason of its own.
ANY = "any"
REASONS: dict[tuple[str, str], dict[str, str]] = {
    **{(door, "aggregation"): {"row_mean": "no rollout ids"} for door in DECLARED if door not in ("verl", "skyrl")},
    ("nemo_rl", "loss"): {"dro": NOT_PROPORTIONAL},
    ("miles", "loss"): {"dro": NOT_PROPORTIONAL},
    ("slime", "loss"): {"dro": NOT_PROPORTIONAL},
    ("skyrl", "loss"): {"dro": NOT_PROPORTIONAL},
    ("skyrl", "KL estimator"): {ANY: "not in SkyRL"},
    ("prime_rl", "aggregation"): {"prompt_mean": "no prompts there", "row_mean": "no rollout ids"},
    ("prime_rl", "KL estimator"): {ANY: "no reference there"},
}
TITLES = {name: name for name in ROLLOUT_HOST_NAMES} | {name: door.title for name, door in DECLARED.items()}
TITLES["megatron_lm"] = "Megatron-LM"
LINKS = {"loss": "losses.md", "aggregation": "aggregation.md", "correction": "corrections.md", "KL estimator": "corrections.md"}


def refused(door: str, kind: str, name: str) -> list[str]:
    """With which aggregations of the door it refuses the name; [""]: with each of them."""
    found = settings()
    flags = found[kind][name]
    if kind != "loss":
        return [""] if problems(door, *flags) else []
    offered = {aggregation: chosen for aggregation, chosen in found["aggregation"].items() if not problems(door, *chosen)}
    under = [aggregation for aggregation, chosen in offered.items() if problems(door, *flags, *chosen)]
    return [""] if len(under) == len(offered) else under


def reason_of(door: str, kind: str, name: str) -> str:
    stated = REASONS.get((door, kind), {})
    reason = stated.get(name, stated.get(ANY))
    if reason is None:
        raise ValueError(f"{TITLES[door]} refuses the {kind} {name}: state why in REASONS of tests/door_table.py, in three words")
    return reason


def cell(door: str, kind: str, name: str) -> str:
    under = refused(door, kind, name)
    if not under:
        return "yes"
    reason = reason_of(door, kind, name)
    return reason if under == [""] else f"yes, but {' and '.join(f'`{one}`' for one in under)}: {reason}"


def lines(kind: str) -> Iterator[str]:
    yield f"| [{kind}](../{LINKS[kind]}) | {' | '.join(f'[{TITLES[door]}]({door}.md)' for door in DOORS)} |\n"
    yield f"|---{'|---' * len(DOORS)}|\n"
    names_of: dict[tuple[str, ...], list[str]] = {}  # cells -> the names that have them
    for name in settings()[kind]:
        names_of.setdefault(tuple(cell(door, kind, name) for door in DOORS), []).append(f"`{name}`")
    for cells, names in names_of.items():
        yield f"| {'; '.join(names)} | {' | '.join(cells)} |\n"
