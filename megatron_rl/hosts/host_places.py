"""The functions of miles and slime that we put one of ours around: where each is, what calls it, and what of it is another one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from megatron_rl.errors import place_of
from megatron_rl.hosts.base import Host
from megatron_rl.hosts.door import looks_up, part_of, signature_problem
from megatron_rl.megatron.head import HeadSettings

# Where a function of ours holds the one that it has replaced.
OWN = "_megatron_rl_replaced"


@dataclass(frozen=True, slots=True)
class Replaced:
    """A function of the host that we put one of ours around, or `Class.method`. arguments: its first ones. caller: what calls it,
    by this name. reads: further arguments, wherever they stand."""

    module: str
    name: str
    arguments: tuple[str, ...]
    caller: str
    reads: tuple[str, ...] = ()


BUILDER = Replaced("model", "setup_model_and_optimizer", ("args", "role", "..."), "initialize_model_and_optimizer")
MEASURE = Replaced(
    "actor",
    "get_log_probs_and_entropy",
    ("logits", "args", "unconcat_tokens", "total_lengths", "response_lengths", "with_entropy", "..."),
    "MegatronTrainRayActor.compute_log_prob",
)
FORWARD = Replaced(
    "actor",
    "MegatronTrainRayActor.compute_log_prob",
    ("self", "data_iterator", "num_microbatches", "..."),
    "MegatronTrainRayActor.train_actor",
    reads=("store_prefix",),
)
ADVANTAGES = Replaced("actor", "compute_advantages_and_returns", ("args", "rollout_data"), "MegatronTrainRayActor.train_actor")
OF_OLD_LOG_PROBS = (FORWARD, ADVANTAGES)
HEAD_REMEDY = "our head cannot be placed; remove --fused-lm-head-loss and --fp32-lm-head"


def of_head(settings: HeadSettings) -> tuple[Replaced, ...]:
    return (BUILDER, MEASURE) if settings.is_fused else (BUILDER,)


def host_problems(host: Host, places: Iterable[Replaced], remedy: str) -> Iterator[str]:
    """Why ours cannot be put around these functions of this host, with the line of the host that is another one. The host must have
    a training_package."""
    for one in places:
        place = f"{host.training_package}.{one.module}"
        try:
            module: Any = import_module(place)
        except ImportError as error:
            yield f"{place} of {host} cannot be imported ({error}): {remedy}"
            continue
        found = {name: part_of(module, name) for name in (one.name, one.caller)}
        if None in found.values():
            missing = next(name for name, function in found.items() if function is None)
            yield f"{host}'s {place} has no {missing} ({module.__file__}): {remedy}"
        elif problem := _problem_of(found[one.name], one):
            yield f"{host}'s {one.name} {problem} ({place_of(found[one.name])}): {remedy}"
        elif not looks_up(found[one.caller], one.name.rpartition(".")[2]):
            yield f"{host}'s {one.caller} does not call {one.name} ({place_of(found[one.caller])}): {remedy}"


def _problem_of(function: Callable[..., Any], one: Replaced) -> str | None:
    found = inspect.signature(function).parameters
    missing = [name for name in one.reads if name not in found]
    return f"has no argument {', '.join(missing)}" if missing else signature_problem(function, one.arguments)


def put_around(host: Host, one: Replaced, make: Callable[[Callable[..., Any], Host], Callable[..., Any]]) -> None:
    """From now on the host calls make(its own function, host) in its place. A second call changes nothing. `host_problems` must
    have found none."""
    *owners, name = one.name.split(".")
    owner: Any = functools.reduce(getattr, owners, import_module(f"{host.training_package}.{one.module}"))
    own = vars(owner)[name]
    if OWN not in vars(own):
        ours = functools.wraps(own)(make(own, host))
        vars(ours)[OWN] = own
        setattr(owner, name, ours)
