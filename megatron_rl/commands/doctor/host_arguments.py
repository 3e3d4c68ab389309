"""What the parser that reads a launch line would make of it, as far as the rules look at it; it must never guess a value."""

from __future__ import annotations

import re
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from megatron_rl.arguments import add_megatron_rl_args
from megatron_rl.commands.doctor.config_file import typed
from megatron_rl.commands.doctor.words import LaunchLine
from megatron_rl.errors import ConfigError
from megatron_rl.hosts.facts import MILES_ONLY, OPTIONS, Host
from megatron_rl.hosts.slips import meant_flag
from megatron_rl.validation import ROUTES_OF_FLAG, field_of

# What the parsers of both hosts fill in, where our rules look at it.
HOST_DEFAULTS = {"advantage_estimator": "grpo", "eps_clip": 0.2, "kl_loss_type": "k1", "n_samples_per_prompt": 1}


def host_arguments(line: LaunchLine) -> Namespace:
    """The line with the file of --custom-config-path over it.

    Flags of ours that this parser does not have are left out, as it leaves them out, and so is what is not known here. Raises
    ConfigError for a value that our parser refuses.
    """
    values: dict[str, object] = {}
    if line.host in (Host.MILES, Host.SLIME):
        values = {"rollout_batch_size": None, **HOST_DEFAULTS}
    if line.host == Host.MILES:
        values |= dict.fromkeys(MILES_ONLY, False)
    for flag, given in line.flags:
        name = field_of(flag)
        if flag in ROUTES_OF_FLAG or flag in line.unknown or meant_flag(flag) is not None:
            continue
        turned_off = re.fullmatch(r"(disable|no)_(\w+)", name)
        if turned_off and turned_off[2] in OPTIONS and not given:
            values[turned_off[2]] = False
        else:
            values[name] = typed(given)
    if line.takes_our_flags:
        values |= vars(our_arguments(line.words))
    return Namespace(**values | line.from_file)


def our_arguments(words: Sequence[str]) -> Namespace:
    return add_megatron_rl_args(Parser(add_help=False, allow_abbrev=False)).parse_known_args(list(words))[0]


class Parser(ArgumentParser):
    """Raises instead of ending the process."""

    def error(self, message: str):
        raise ConfigError(message)
