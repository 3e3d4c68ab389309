"""The state of one trainer in a host: what it has told, and whatever its adapter adds. Two trainers of a process have one each.

An adapter makes one `Runs` of its own subclass of `Run`, and finds the run by an object that lives as long as the trainer and that
the host hands over in each call: a Namespace, a config, a worker. Nothing here knows a host.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import torch.distributed as dist

from megatron_rl.layout.groups import SINGLE, ParallelGroups, resolve_group, resolve_groups


class Run:
    """told: what this trainer has said already, lines and warnings. A subclass must not hold the owner, or it is never freed."""

    def __init__(self) -> None:
        self.told: set[str] = set()

    def tell(self, title: str, line: Callable[[], str]) -> None:
        """One line for a title, on standard error of the first rank that has the loss. `line` is called only then."""
        if title not in self.told and is_first_rank():
            self.told.add(title)
            print(f"megatron_rl: {line()}", file=sys.stderr, flush=True)

    def warn(self, text: str) -> None:
        self.tell(text, lambda: text)


R = TypeVar("R", bound=Run)


class Runs(Generic[R]):
    """The runs of an adapter by their owners. An owner is known by identity, as configs and Namespaces have no hash, and weakly:
    its run goes with it."""

    def __init__(self, make: Callable[[], R]):
        self._make = make
        self._found: dict[int, tuple[weakref.ref[object], R]] = {}

    def of(self, owner: object) -> R:
        """The run of this owner, made at the first call. TypeError for an owner that takes no weak reference, as a dict."""
        key = id(owner)
        if key not in self._found:
            # The call comes before the number of the object can be given out again.
            reference = weakref.ref(owner, lambda _: self._found.pop(key, None))
            self._found[key] = reference, self._make()
        return self._found[key][1]

    def __iter__(self) -> Iterator[tuple[object, R]]:
        """(owner, run) of those that are alive."""
        return ((owner, run) for reference, run in [*self._found.values()] if (owner := reference()) is not None)


def ranks_in_words(groups: ParallelGroups | None = None, *, num_data: int | None = None) -> str:
    """The ranks that a step is divided over, for a start line: Megatron's groups; else num_data, the data-parallel ranks that a
    trainer tells; else all ranks, as nothing says what they share."""
    groups = groups or resolve_groups()
    if groups.dp_cp is not SINGLE:
        return " x ".join(f"{name} {getattr(groups, name).size()}" for name in ("dp", "cp", "tp", "pp"))
    world = dist.get_world_size() if dist.is_initialized() else 1
    if num_data is None:
        return "1 rank" if world == 1 else f"{world} ranks"
    return f"{num_data} data-parallel rank{'s' * (num_data > 1)}" + (f" of {world}" if world > num_data else "")


def is_first_rank() -> bool:
    """Of those that have the loss: the last pipeline stage."""
    dp_cp, tp, pp = (resolve_group(None, name) for name in ("dp_cp", "tp", "pp"))
    if dp_cp is SINGLE:  # no Megatron here
        return not dist.is_initialized() or dist.get_rank() == 0
    return dp_cp.rank() == tp.rank() == 0 and pp.rank() == pp.size() - 1
