"""Where miles and slime build a model and measure its log-probabilities: the functions that placed_head puts one of ours around."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from megatron_rl.hosts.base import Host
from megatron_rl.hosts.door import looks_up, part_of, place_of, signature_problem
from megatron_rl.megatron.head import HeadSettings

REMEDY = "our head cannot be placed; remove --fused-lm-head-loss and --fp32-lm-head"


@dataclass(frozen=True, slots=True)
class Replaced:
    """A function of the host that we put one of ours around. arguments: its first ones. caller: what calls it, by this name."""

    module: str
    name: str
    arguments: tuple[str, ...]
    caller: str


BUILDER = Replaced("model", "setup_model_and_optimizer", ("args", "role", "..."), "initialize_model_and_optimizer")
MEASURE = Replaced(
    "actor",
    "get_log_probs_and_entropy",
    ("logits", "args", "unconcat_tokens", "total_lengths", "response_lengths", "with_entropy", "..."),
    "MegatronTrainRayActor.compute_log_prob",
)


def replaced_by(settings: HeadSettings) -> tuple[Replaced, ...]:
    return (BUILDER, MEASURE) if settings.is_fused else (BUILDER,)


def host_problems(host: Host, settings: HeadSettings) -> Iterator[str]:
    """Why our head cannot be placed in the models of this host, with the line of the host that is another one. The host must have a
    training_package."""
    for one in replaced_by(settings):
        place = f"{host.training_package}.{one.module}"
        try:
            module: Any = import_module(place)
        except ImportError as error:
            yield f"{place} of {host} cannot be imported ({error}): {REMEDY}"
            continue
        found = {name: part_of(module, name) for name in (one.name, one.caller)}
        if None in found.values():
            missing = next(name for name, function in found.items() if function is None)
            yield f"{host}'s {place} has no {missing} ({module.__file__}): {REMEDY}"
        elif problem := signature_problem(found[one.name], one.arguments):
            yield f"{host}'s {one.name} {problem} ({place_of(found[one.name])}): {REMEDY}"
        elif not looks_up(found[one.caller], one.name):
            yield f"{host}'s {one.caller} does not call {one.name} ({place_of(found[one.caller])}): {REMEDY}"
