"""Declares a correction for the gap between sampler and trainer: `register_correction`, and its registry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from megatron_rl.config import CorrectionLevel
from megatron_rl.errors import ConfigError
from megatron_rl.registries.registry import Registry
from megatron_rl.registries.signatures import check_called, check_signature

if TYPE_CHECKING:
    from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., Any])
BOUNDS = ("low", "high")


LEVELS_OF_SAMPLES = (CorrectionLevel.SEQUENCE_MEAN, CorrectionLevel.SEQUENCE_SUM)


@dataclass(frozen=True, slots=True)
class CorrectionValue:
    """What a correction returns: [*], as the ratios that it gets, [T] of tokens or [N] of samples.

    weights: the factors of the policy term, in the dtype of the ratios.
    is_kept: bool, False where the factor drops a token or a sample. None: everything is kept.
    """

    weights: Tensor
    is_kept: Tensor | None = None


@dataclass(frozen=True, slots=True)
class CorrectionKind:
    """A correction as it was declared; `register_correction` says what each field means."""

    name: str
    function: Callable[..., Any]
    levels: tuple[str, ...]
    required_bounds: tuple[str, ...]
    published_bounds: Mapping[str, tuple[float, float]] = field(hash=False)
    weigh_tokens: Callable[..., Any] | None


CORRECTIONS: Registry[CorrectionKind] = Registry("importance correction", "correction_kinds", "register_correction")


def register_correction(
    name: str,
    *,
    levels: tuple[str, ...] = tuple(CorrectionLevel),
    required_bounds: tuple[str, ...] = BOUNDS,
    published_bounds: Mapping[str, tuple[float, float]] | None = None,
    weigh_tokens: Callable[..., Any] | None = None,
) -> Callable[[Function], Function]:
    """Decorator: registers a function as the importance correction `name`. The package knows nothing else of it.

        fn(ratios, low, high) -> weights, or CorrectionValue(weights, is_kept)

    ratios w = old / rollout probability are [T] of the tokens, or [N] of the samples, as the level says; low and high are numbers.
    The function is elementwise, and its weights are constants for the gradient. The package does the rest: sums over samples and cp
    ranks, mask, gradient, metrics, every backend, head and host.

    levels: where it acts, of CorrectionLevel.
    published_bounds: level -> (low, high), taken where a flag is not given.
    required_bounds: of "low" and "high", those that must be given at a level without published ones. Else low is 0, high inf.
    weigh_tokens: fn(ratios [T]) -> weights [T]: at a level of samples each token has this factor besides. None: it has none.
    Raises ConfigError when another function has the name, or when the declaration or a signature is wrong.
    """
    check_called(CORRECTIONS.decorator, name)
    kind = CORRECTIONS.kind
    published = dict(published_bounds or {})
    for field_name, values, known in (
        ("levels", levels, tuple(CorrectionLevel)),
        ("required_bounds", required_bounds, BOUNDS),
        ("published_bounds", tuple(published), levels),
    ):
        if not isinstance(values, tuple) or any(value not in known for value in values):
            raise ConfigError(f"{field_name}={values!r} of {kind} {name!r} must be a tuple of {', '.join(known)}")
    for level, bounds in published.items():
        if not bounds[0] <= 1 <= bounds[1]:
            raise ConfigError(f"published_bounds of {kind} {name!r} at level {level} are {bounds}: they must hold 1")
    if weigh_tokens is not None and CorrectionLevel.TOKEN in levels:
        raise ConfigError(f"weigh_tokens of {kind} {name!r} acts at levels of samples: leave token out of levels={levels}")

    def decorate(function: Function) -> Function:
        check_signature(kind, name, function, ("ratios", *BOUNDS))
        if weigh_tokens is not None:
            check_signature(f"weigh_tokens of {kind}", name, weigh_tokens, ("ratios",))
        CORRECTIONS.add(
            name,
            CorrectionKind(
                name=name,
                function=function,
                levels=tuple(map(str, levels)),
                required_bounds=required_bounds,
                published_bounds=published,
                weigh_tokens=weigh_tokens,
            ),
        )
        return function

    return decorate


def get_correction(name: object) -> CorrectionKind:
    """The declaration of that name, or of module.function. Raises ConfigError as Registry.find."""
    return CORRECTIONS.find(name)


def correction_names() -> tuple[str, ...]:
    return CORRECTIONS.names()
