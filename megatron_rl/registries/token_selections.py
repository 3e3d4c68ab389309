"""Declares a selection of a step's tokens: `register_token_selection`, and the registry that --token-selection reads."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from megatron_rl.errors import ConfigError
from megatron_rl.registries.registry import Registry
from megatron_rl.registries.signatures import check_called

Function = TypeVar("Function", bound=Callable[..., Any])
# The vectors [T] that a score may read. The last two take one all-reduce for the means.
SCORE_INPUTS = ("log_probs", "entropy", "advantages", "centred_log_probs", "centred_advantages")
CENTRED = ("centred_log_probs", "centred_advantages")


class Taken(StrEnum):
    """Which tokens of a step are selected, until there are enough."""

    LARGEST = "largest"
    SMALLEST = "smallest"
    RANDOM = "random"


class Effect(StrEnum):
    """What a selection changes."""

    TRAINED_ALONE = "trained_alone"
    """The policy term of all other tokens has the factor 0."""
    LEFT_OUT = "left_out"
    """The policy term of the selected tokens has the factor 0."""
    PENALIZED = "penalized"
    """The selected tokens have a KL penalty towards the policy that their ratio compares with."""
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class TokenSelectionKind:
    """A selection as it was declared; `register_token_selection` says what each field means."""

    name: str
    function: Callable[..., Any]
    effect: Effect
    taken: Taken
    bounds: tuple[float, float]
    needs: tuple[str, ...]

    @property
    def is_centred(self) -> bool:
        """Whether the score reads the step's means."""
        return not set(self.needs).isdisjoint(CENTRED)


TOKEN_SELECTIONS: Registry[TokenSelectionKind] = Registry("token selection", "token_selections", "register_token_selection")


def register_token_selection(
    name: str,
    *,
    effect: str,
    taken: str = Taken.LARGEST,
    bounds: tuple[float, float] = (-math.inf, math.inf),
) -> Callable[[Function], Function]:
    """Decorator: registers a function as the token selection `name`. The package knows nothing else of it.

        fn(entropy, ...) -> score

    The function computes the score of each token, elementwise, from vectors [T] of float64 that it names as arguments:
        log_probs, entropy: of the policy before the step, in nats.
        advantages.
        centred_log_probs, centred_advantages: minus the mean over all unmasked tokens of the step.
    The package does the rest: the order over the whole step, the number of selected tokens, the effect in each backend and head.

    effect: what a selection changes: "trained_alone" (no policy term of the others), "left_out" (none of the selected) or
        "penalized" (a KL penalty of the selected). Each token keeps its count in the denominators.
    taken: which are selected: "largest" or "smallest" scores, or "random" ones.
    bounds: only tokens whose score lies in them, both inclusive, can be selected. Flags give others.
    Raises ConfigError when another function has the name, or when the declaration or the signature is wrong.
    """
    check_called(TOKEN_SELECTIONS.decorator, name)
    kind = TOKEN_SELECTIONS.kind
    for field, value, known in (("effect", effect, Effect), ("taken", taken, Taken)):
        if value not in tuple(known):
            raise ConfigError(f"{field}={value!r} of {kind} {name!r} is not one of {', '.join(known)}")
    if not isinstance(bounds, tuple) or len(bounds) != 2 or not bounds[0] <= bounds[1]:
        raise ConfigError(f"bounds={bounds!r} of {kind} {name!r} must be (low, high) with low <= high")

    def decorate(function: Function) -> Function:
        try:
            needs = tuple(inspect.signature(function).parameters)
        except (TypeError, ValueError) as error:  # no function, or a builtin without a signature
            raise ConfigError(f"{kind} {name!r} must be a function with a signature: {error}") from error
        unknown = [need for need in needs if need not in SCORE_INPUTS]
        if unknown:
            raise ConfigError(f"{kind} {name!r} has the argument {unknown[0]!r}: a score reads {', '.join(SCORE_INPUTS)}")
        TOKEN_SELECTIONS.add(name, TokenSelectionKind(name, function, Effect(effect), Taken(taken), bounds, needs))
        return function

    return decorate


def get_token_selection(name: object) -> TokenSelectionKind:
    """The declaration of that name, or of module.function. Raises ConfigError as Registry.find."""
    return TOKEN_SELECTIONS.find(name)


def token_selection_names() -> tuple[str, ...]:
    return TOKEN_SELECTIONS.names()
