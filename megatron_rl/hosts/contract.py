"""What a trainer's functions must look like for ours to be called by them or put around them, and what it does with our number."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from megatron_rl.errors import ConfigError, place_of
from megatron_rl.formula import Formula

Stage = tuple[str, Formula, str]  # name, factor, what it does
# What multiplies a token's weight after the loss function has returned, in Megatron-Core 0.16 to 0.20.
# tests/test_explain.py holds each adapter's stages against the code that does them.
AVERAGED: tuple[Stage, ...] = (
    ("schedule", Formula(M=-1), "averages over micro-batches"),
    ("DDP", Formula(dp=-1, cp=-1), "averages over dp x cp ranks"),
)
SUMMED: tuple[Stage, ...] = (("schedule", Formula(), "adds micro-batches"), ("DDP", Formula(), "adds ranks"))
TIMES_CP: Stage = ("schedule", Formula(M=-1, cp=1), "averages over micro-batches, x cp")


@dataclass(frozen=True, slots=True)
class Contract:
    """title: as the trainer writes itself. probed: the repository and revision that was measured. calls: module:function or
    module:Class.method -> its arguments; a last "..." takes more."""

    title: str
    probed: str
    calls: Mapping[str, tuple[str, ...]]

    def check(self, calls: Mapping[str, tuple[str, ...]] | None = None, owner: Any = None) -> None:
        """Raises ConfigError for what the installed trainer lacks, with the file and line of what is different.

        owner: the module or class that has `calls`; None: each path names its module."""
        found: list[str] = []
        for path, expected in (self.calls if calls is None else calls).items():
            module, _, name = path.rpartition(":")
            holder: Any = import_module(module) if owner is None else owner
            function = part_of(holder, name)
            problem = "is missing" if function is None else signature_problem(function, expected)
            if problem is not None:
                place = place_of(holder if function is None else function)
                found.append(f"{self.title}'s {holder.__name__}.{name} {problem}, and {self.probed} was probed ({place})")
        if found:
            raise ConfigError(found)


def signature_problem(function: Callable[..., Any], expected: tuple[str, ...]) -> str | None:
    """What differs from the arguments that our function is written for. A last "..." in `expected`: others may follow."""
    found = tuple(inspect.signature(function).parameters)
    first = expected[:-1] if expected[-1:] == ("...",) else expected
    if found == first or (first != expected and found[: len(first)] == first):
        return None
    return f"takes ({', '.join(found)}), ours is made for ({', '.join(expected)})"


def looks_up(function: Callable[..., Any], name: str) -> bool:
    """Whether a function reads that name of its module: what takes the name's place then has an effect."""
    return name in inspect.unwrap(function).__code__.co_names


def part_of(module: Any, path: str) -> Any:
    """A function of a module, or `Class.method`; None where it is not there."""
    return functools.reduce(lambda owner, part: getattr(owner, part, None), path.split("."), module)


# A function that we put one of ours around. Where ours holds the one that it has replaced:
OWN = "_megatron_rl_replaced"


@dataclass(frozen=True, slots=True)
class Replaced:
    """A function of a trainer, or `Class.method`, in this module of a package. arguments: its first ones. caller: what calls it, by
    this name. reads: further arguments, wherever they stand."""

    module: str
    name: str
    arguments: tuple[str, ...]
    caller: str
    reads: tuple[str, ...] = ()

    def problems(self, title: str, package: str, remedy: str) -> Iterator[str]:
        """Why ours cannot be put around it, with the line of the trainer that is different."""
        place = f"{package}.{self.module}"
        try:
            module: Any = import_module(place)
        except ImportError as error:
            yield f"{place} of {title} cannot be imported ({error}): {remedy}"
            return
        found = {name: part_of(module, name) for name in (self.name, self.caller)}
        if None in found.values():
            missing = next(name for name, function in found.items() if function is None)
            yield f"{title}'s {place} has no {missing} ({module.__file__}): {remedy}"
        elif problem := self._difference(found[self.name]):
            yield f"{title}'s {self.name} {problem} ({place_of(found[self.name])}): {remedy}"
        elif not looks_up(found[self.caller], self.name.rpartition(".")[2]):
            yield f"{title}'s {self.caller} does not call {self.name} ({place_of(found[self.caller])}): {remedy}"

    def _difference(self, function: Callable[..., Any]) -> str | None:
        found = inspect.signature(function).parameters
        missing = [name for name in self.reads if name not in found]
        return f"has no argument {', '.join(missing)}" if missing else signature_problem(function, self.arguments)

    def put_around(self, package: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """From now on the trainer calls make(its own function) in its place. A second call changes nothing. `problems` must have
        found none."""
        *owners, name = self.name.split(".")
        owner: Any = functools.reduce(getattr, owners, import_module(f"{package}.{self.module}"))
        own = vars(owner)[name]
        if OWN not in vars(own):
            ours = functools.wraps(own)(make(own))
            vars(ours)[OWN] = own
            setattr(owner, name, ours)
