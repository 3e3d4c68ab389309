"""Settings that are one of a trainer's own words, else it refuses the run: how a misspelt one is found, and what is said of it.

A list may be open: a module of the user's own may add a name. Such a name is no problem, unless it is a slip of a known one and
the launch shows no code of the user's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches

from megatron_rl.hosts.settings import UNKNOWN, Settings
from megatron_rl.validation.checks import Row

# A word of the list is meant by one that is as similar: gprpo and grpo are 0.89 alike, gspo and sapo 0.75.
CLOSEST_WORD = 0.8
# A setting that names code of the user's own, as model.external_lib, reward.custom_reward_function.path and data.custom_cls.name.
OF_USERS_CODE = re.compile(r"(?:.*\.)?(?:external_lib|custom_\w+)(?:\.\w+)*")


@dataclass(frozen=True, slots=True)
class Words:
    """names: all that the trainer has. adds: what is typed so that a module of the user's own adds a name; empty: nothing adds one.
    meant: words that are not similar to the name that they mean. is_read: whether a launch reads the setting. beside_ours: it
    is read beside a loss of ours too."""

    names: tuple[str, ...]
    adds: str = ""
    meant: Mapping[str, str] = field(default_factory=dict)
    is_read: Callable[[Settings], bool] = lambda settings: True
    beside_ours: bool = False

    def has(self, value: object) -> bool:
        """Also where it is not set, or not known here."""
        return value in (None, UNKNOWN) or value in self.names


def closest(value: object, words: Iterable[str]) -> str | None:
    """The word that a misspelt one means: with its letters in another order, or a similar one."""
    text, known = str(value), [*words]
    swapped = next((word for word in known if sorted(word) == sorted(text)), None)
    return swapped or next(iter(get_close_matches(text, known, 1, CLOSEST_WORD)), None)


def none_of(name: str, value: object, words: Iterable[str], meant: str | None) -> str:
    return f"{name}={value} is none of {', '.join(words)}{f'; set {name}={meant}' if meant else ''}"


def refused(title: str, name: str, text: str) -> Row:
    """Of a run that the trainer itself refuses."""
    return Row(name, f"{title} refuses this run: {text}", is_wrong=True)


def names_users_code(given: Mapping[str, object], imports: Collection[str], package: str) -> bool:
    """imports: further settings that name some. package: ours, which adds no name of the user's."""
    names = [name for name in given if name in imports or OF_USERS_CODE.fullmatch(name)]
    return any(given[name] not in ("", "null", None, UNKNOWN) and package not in str(given[name]) for name in names)


def unknown_words(title: str, words: Mapping[str, Words], settings: Settings, *, imports_modules: bool) -> Iterator[Row]:
    """imports_modules: code of the user's own may have added names. A word with a dot may mean one of ours: others judge it."""
    for name, one in words.items():
        value = settings[name]
        if one.has(value) or "." in str(value) or not one.is_read(settings):
            continue
        meant = one.meant.get(str(value)) or closest(value, one.names)
        text, of_ones_own = none_of(name, value, one.names, meant), f"one of your own, or of a fork: {one.adds}"
        is_slip = meant is not None and meant not in str(value)  # a longer name is none
        if not one.adds:
            yield refused(title, name, text)
        elif imports_modules and is_slip:
            yield Row(name, f"{text}, unless it is one of your own", is_note=True)
        elif is_slip:
            yield refused(title, name, f"{text} ({of_ones_own})")
        elif not imports_modules:
            text = none_of(name, value, one.names, None)
            yield Row(name, f"{text}: {title} refuses it, unless it is {of_ones_own}", is_note=True)
