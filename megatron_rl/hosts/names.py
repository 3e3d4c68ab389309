"""What a launch line or a settings file has wrong by name: a flag of ours that a parser drops, a name that is nearly ours."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from functools import cache

from megatron_rl.config import flag_fields
from megatron_rl.hosts.args import OPTIONS
from megatron_rl.loss_hub import declared_parameters
from megatron_rl.validation import field_of, flag_of, routes_of_flags

# A name that is more similar than this to one of our fields is a misspelling: no option of a host or of Megatron is.
CLOSEST_NAME = 0.85


@cache  # launcher, hooks and losses of a process judge one launch each, and a host has a thousand names
def likely_field(name: str) -> str | None:
    """Our setting that `name` misspells; None for a setting, for a host's option, and for a name that is similar to none."""
    fields = (*(field.name for field in flag_fields()), *declared_parameters())
    if name in fields or name in OPTIONS or "-" in name:  # megatron_rl.arguments reports a key with dashes
        return None
    return next(iter(get_close_matches(name, fields, n=1, cutoff=CLOSEST_NAME)), None)


def dropped_flags(args: Namespace, words: Sequence[str]) -> Iterator[str]:
    """Of our flags on the command line, misspelt ones included, those that the host's parser has dropped: slime drops what it does
    not know."""
    typed = {word.partition("=")[0] for word in words if word.startswith("--")}
    for flag in sorted(typed):
        name = field_of(flag)
        if flag in routes_of_flags() and name not in vars(args):
            remedy = f"put {name} into the file of --custom-config-path, or start with python -m megatron_rl.hosts.launch"
            yield f"{flag} is on the command line and not in args: this launcher drops flags that it does not know; {remedy}"
        elif flag not in routes_of_flags():
            meant = name if flag_of(name) in routes_of_flags() else likely_field(name)
            if meant is not None:
                yield f"{flag} has no effect: did you mean {flag_of(meant)}?"
