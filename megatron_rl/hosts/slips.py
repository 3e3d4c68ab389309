"""Names of ours that are nearly right: no parser takes them, and a host that drops what it does not know never says so."""

from __future__ import annotations

from dataclasses import fields
from difflib import get_close_matches
from functools import cache

from megatron_rl.config import PolicyLossConfig
from megatron_rl.hosts.facts import OPTIONS
from megatron_rl.validation import ROUTES_OF_FLAG, field_of, flag_of

# An abbreviation that names one of ours and nobody else's; shorter ones may be anything.
SHORTEST_ABBREVIATION = len("--loss-agg")
# How alike two names must be for one to be a slip of the other: no option of a host or of Megatron comes as close as this.
CLOSEST_NAME = 0.85
OUR_FIELDS = tuple(field.name for field in fields(PolicyLossConfig))
OUR_HOOKS = tuple(option for option in OPTIONS if option.endswith("_path"))


def meant_flag(flag: str) -> str | None:
    """The flag of ours that `flag` is a slip of: other dashes, an abbreviation, a typing error. None for ours and for others'."""
    if not flag.startswith("--"):
        return None
    name = field_of(flag)
    if flag in ROUTES_OF_FLAG or name in OPTIONS:
        return None
    with_dashes = "--" + flag.lstrip("-").replace("_", "-").lower()
    longer = [ours for ours in ROUTES_OF_FLAG if ours.startswith(with_dashes) and len(flag) >= SHORTEST_ABBREVIATION]
    if longer:
        return min(longer, key=len)
    field = likely_field(field_of(with_dashes))
    return flag_of(field) if field is not None else None


def why_nobody_reads(flag: str) -> str:
    meant = meant_flag(flag)
    if meant is not None and "_" in flag:
        return f"did you mean {meant}? Flags have dashes"
    if meant is not None and meant.startswith(flag):
        return f"did you mean {meant}? These parsers take no abbreviations"
    return f"did you mean {meant}?"


def is_hook_place(flag: str) -> bool:
    """Whether a function of ours can stand behind this flag of a host."""
    return field_of(flag) in OUR_HOOKS


@cache  # our hooks judge a launch in each micro-batch, and a host has a thousand names
def likely_field(name: str) -> str | None:
    """The field of ours that `name` is a slip of; None for a field, a host's option and what is like neither."""
    # A key with dashes is reported by megatron_rl.arguments.
    if name in OUR_FIELDS or name in OPTIONS or "-" in name:
        return None
    return next(iter(get_close_matches(name, OUR_FIELDS, n=1, cutoff=CLOSEST_NAME)), None)
