"""What a registry asks of a function that is declared: its arguments, in their order, and the path of its Triton twin."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from megatron_rl.errors import ConfigError


def check_called(decorator: str, name: object) -> None:
    """Raises ConfigError for a decorator without parentheses, which is given the function in the place of the name."""
    if callable(name):
        function = getattr(name, "__name__", "f")
        raise ConfigError(f'@{decorator} of {function} has no name: write @megatron_rl.{decorator}("{function}", ...)')


def check_signature(
    kind: str,
    name: str,
    function: Callable[..., Any],
    positional: tuple[str, ...],
    keywords: tuple[str, ...] = (),
    remedy: str = "",
) -> None:
    """Raises ConfigError at registration for a function that lacks an argument, or has one at the place of another: it would fail
    in the middle of a run, or compute something else. Names that are none of `positional` are free. remedy: of a missing one."""
    wanted = f"({', '.join([*positional, *(['*', *keywords] if keywords else [])])})"
    own: list[str] = []
    try:
        signature = inspect.signature(function)
        own = list(signature.parameters)
        signature.bind(*positional, **dict.fromkeys(keywords))
    except (TypeError, ValueError) as error:  # ValueError: a builtin without a signature
        further = f"; {remedy}" if remedy and len(own) > len(positional) + len(keywords) else ""
        raise ConfigError(f"{kind} {name!r} must accept {wanted}: {error}{further}") from error
    for given, place in zip(own[: len(positional)], positional[: len(own)], strict=True):
        if given != place and given in positional:
            raise ConfigError(
                f"{kind} {name!r} is given {', '.join(positional)} in this order, and its function has {given} at the place of "
                f"{place}: write {wanted}"
            )


def check_twin_path(kind: str, name: str, triton: object) -> None:
    """Raises ConfigError unless `triton` of a declaration is None or the text module.function."""
    if triton is not None and not isinstance(triton, str):
        raise ConfigError(f"triton={triton!r} of {kind} {name!r} must be the text module.function, or None")
    if triton is not None and "." not in triton:
        raise ConfigError(f"triton={triton!r} of {kind} {name!r} has no dot: write module.function")
