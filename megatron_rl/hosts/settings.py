"""The settings of a launch of a trainer that settings configure: how they are read, what is known of each, how they are typed.

    Given      one setting: its value, the host's default, and whether somebody chose it
    Settings   all of a launch, from its line, its files or the host's own objects
    StepSizes  how a step is cut into ranks and micro-batches, and who says it

One rule for the clip in every host. What is typed wins, even where it equals the host's default. Where only merged settings are
known, both sides at the host's default count as not set, and the loss has its own clip; one side at the default beside a chosen
one may be either, and is refused.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from typing import Any, NamedTuple

from megatron_rl.config import SEQUENCE_CLIP_RATIO_WARNING
from megatron_rl.hosts.dealing import Dealing
from megatron_rl.loss_hub import PolicyLoss

LONGEST_VALUE = 10_000
UNKNOWN = object()  # a value that only the shell or the trainer knows
ABSENT = object()  # a name that is not set, where None is a value that somebody has set


class Letter(str):
    """Stands in a line for a value that is the user's: without quotes where others have some."""

    def __repr__(self) -> str:
        return str(self)


class Given(NamedTuple):
    """A setting of the trainer that our loss reads."""

    name: str  # as it is typed
    value: Any
    default: Any = None
    is_typed: bool | None = None  # on the launch line; None: not known here

    @property
    def is_chosen(self) -> bool:
        return self.value is not None and (self.is_typed is True or self.value != self.default)


class Size(NamedTuple):
    """source: the setting or the flag that says it. title: of the trainer whose default it is; empty: it is set."""

    value: int
    source: str
    title: str = ""

    @property
    def in_words(self) -> str:
        """a=512, and whose default it is."""
        return f"{self.source}={self.value}" + f", {self.title}'s default," * bool(self.title)


class StepSizes(NamedTuple):
    """Data-parallel ranks, samples of a rank in a micro-batch, micro-batches of a rank in a step, most tokens of a micro-batch
    (0: it has some budget). None: not known. unread: the settings for whose sake `data` is not known. dealing: None: samples
    keep their order. longest: a response."""

    data: Size | None = None
    micro_batch: Size | None = None
    num_microbatches: Size | None = None
    tokens: Size | None = None
    unread: tuple[str, ...] = ()
    dealing: Dealing | None = None
    longest: Size | None = None


NOT_ASKED = StepSizes()


class Settings:
    """value_of: the value of a whole name, UNKNOWN or ABSENT. defaults: the host's. typed: the names on the launch line;
    None: not known. has_files: what is not on the line may be in a file, by choice or not. given: all names that the launch sets,
    with their values. knows_defaults: what is not set has its default."""

    def __init__(
        self,
        value_of: Callable[[str], Any],
        defaults: Mapping[str, Any],
        *,
        typed: Collection[str] | None = None,
        has_files: bool = False,
        given: Mapping[str, Any] | None = None,
        knows_defaults: bool = True,
    ):
        self.value_of, self.typed, self.has_files, self.given = value_of, typed, has_files, given or {}
        self.defaults, self.knows_defaults = defaults, knows_defaults
        self.stand_ins: Mapping[str, Any] = {}  # what is read for an UNKNOWN value; None without one
        self.imports_modules = False  # of the user's own, which may add names to the host's tables
        self.asked = NOT_ASKED  # by flags of doctor and explain, in the place of what the launch says

    @classmethod
    def of_names(cls, given: Mapping[str, Any], defaults: Mapping[str, Any], **others: Any) -> Settings:
        """Of whole names with their values."""
        return cls(lambda name: given.get(name, ABSENT), defaults, given=given, **others)

    @classmethod
    def of_object(cls, tree: Any, defaults: Mapping[str, Any], prefix: str = "", **others: Any) -> Settings:
        """Of the host's own object, nested mappings and attributes, whose names stand behind `prefix`."""

        def value_of(name: str) -> Any:
            return value_at(tree, name.removeprefix(prefix)) if name.startswith(prefix) else ABSENT

        return cls(value_of, defaults, **others)

    def read_by(self, value_of: Callable[[str], Any]) -> Settings:
        """The same launch, whose values come from `value_of`."""
        found = copy(self)
        found.value_of = value_of
        return found

    def __getitem__(self, name: str) -> Any:
        """The value, the host's default, or UNKNOWN."""
        value = self.value_of(name)
        if value is not ABSENT:
            return value
        return self.defaults.get(name) if self.knows_defaults else UNKNOWN

    def is_typed(self, name: str) -> bool | None:
        if self.typed is None or (self.has_files and name not in self.typed):
            return None
        return name in self.typed

    def one(self, name: str, shown: str | None = None) -> Given:
        """shown: how it is typed, where that is not its name."""
        value, default = self.value_of(name), self.defaults.get(name)
        if value is ABSENT:
            value = default if self.knows_defaults else None
        elif value is UNKNOWN:
            value = self.stand_ins.get(name)
        return Given(shown or name, value, default, self.is_typed(name))


def value_at(tree: Any, name: str) -> Any:
    """The value of a dotted name in nested mappings and objects; ABSENT: not there."""
    for part in name.split("."):
        get = getattr(tree, "get", None)
        tree = get(part, ABSENT) if callable(get) else getattr(tree, part, ABSENT)
        if tree is ABSENT or tree is UNKNOWN:
            return tree
    return tree


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The leaves of nested mappings by their whole names. An empty mapping is a leaf."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def put(settings: dict[str, Any], names: Sequence[str], value: Any) -> None:
    """Sets settings[a][b] for the names a, b."""
    *parents, last = names
    for parent in parents:
        if not isinstance(settings.get(parent), dict):
            settings[parent] = {}
        settings = settings[parent]
    settings[last] = value


# Words of a launch line


def read_overrides(words: Sequence[str]) -> dict[str, Any]:
    """The settings a.b=value among the words, by name. ~a.b and ~a.b=value take one away."""
    found: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if word.startswith("~"):
            found.pop(name.removeprefix("~"), None)
        elif equals and not word.startswith("-"):
            found[name.lstrip("+")] = read_value(value)
    return found


def read_value(text: str) -> Any:
    """As hydra reads a plain value."""
    if "$" in text or "`" in text:
        return UNKNOWN
    words = {"true": True, "false": False, "null": None, "none": None, "inf": math.inf}
    if text.lower() in words:
        return words[text.lower()]
    try:
        value = ast.literal_eval(text) if len(text) < LONGEST_VALUE else text
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # the last two of deep nesting
        return text
    return value if isinstance(value, int | float | str | list | tuple | dict) else text


def as_typed(value: Any) -> str:
    """A number with all its digits, a whole one without a dot."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


# Numbers and clips


def not_numbers(settings: Iterable[Given]) -> Iterator[str]:
    """A problem for each number that is true or false: Python counts them as 1 and 0."""
    for one in settings:
        if isinstance(one.value, bool):
            yield f"{one.name}={str(one.value).lower()} is a switch, and must be a number: type the number, or remove it"


def acting_clip(
    loss: PolicyLoss,
    low: Given,
    high: Given,
    keep: str,  # how to type a value that is the host's default; {side}, {name} and {value} are filled in
) -> tuple[tuple[Any, Any], list[str]]:
    """((low, high), problems); None: the loss's own. A loss without a clip has (None, None)."""
    if loss.clip_ratios is None or not (low.is_chosen or high.is_chosen):
        return (None, None), []
    problems, chosen = [], [one.value for one in (low, high) if one.is_chosen and isinstance(one.value, int | float)]
    is_far = loss.clips_means and max(chosen, default=0) > SEQUENCE_CLIP_RATIO_WARNING
    both = " ".join(f"{one.name}={own:g}" for one, own in zip((low, high), loss.clip_ratios, strict=True))
    for side, one, other, own in (("low", low, high, loss.clip_ratios[0]), ("high", high, low, loss.clip_ratios[1])):
        if one.is_chosen or one.value is None or one.value == own or one.is_typed is not None:
            continue
        has, typed = (f"{loss.clip_ratios[0]:g}/{loss.clip_ratios[1]:g}", both) if is_far else (f"{own:g}", f"{one.name}={own:g}")
        problems.append(
            f"{one.name}={one.value} beside {other.name}={other.value}: {one.value} is the host's default, so it is not known "
            f"whether you chose it, and {loss.name} has {has} of its own; type {typed} for that, or "
            f"{keep.format(side=side, name=one.name, value=one.value)} for {one.value}"
        )
    return (low.value if low.is_chosen else None, high.value if high.is_chosen else None), problems


def clip_to_type(
    loss: PolicyLoss, low: float | None, high: float | None, defaults: Mapping[str, float]
) -> dict[str, float]:  # by the host's names
    """What to type for this clip: nothing for the loss's own; else each side that the host's default would leave open."""
    if (low is None and high is None) or loss.clip_ratios is None:
        return {name: value for name, value in zip(defaults, (low, high), strict=True) if value is not None}
    sides = zip(defaults.items(), (low, high), loss.clip_ratios, strict=True)
    pairs = [(name, own if value is None else value, value is not None or own != default) for (name, default), value, own in sides]
    return {name: value for name, value, is_needed in pairs if is_needed}
