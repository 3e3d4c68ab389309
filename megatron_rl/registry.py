"""Holds what is declared by name, a registry of each kind; imports a function by its name, and checks the signature of one."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from megatron_rl.errors import ConfigError

Function = TypeVar("Function", bound=Callable[..., Any])
# What declares the built-in names: imported at the first look into a registry, so that it does not matter what was imported before.
BUILT_IN = ("megatron_rl.losses", "megatron_rl.weights")


class Declaration(Protocol):
    @property
    def function(self) -> Callable[..., Any]: ...


Record = TypeVar("Record", bound=Declaration)


class Registry(dict[str, Record]):
    """Declarations of one kind by name. kind: in messages, as in "KL estimator". decorator: the name of what declares one.

    registry[name] imports a name with a dot as module.function, and its module declares it. It raises ConfigError for an unknown
    name, for a function that cannot be imported, and for one that is not declared. A name that may be no text, as one from a YAML
    file, is looked up as str(name).
    """

    def __init__(self, kind: str, decorator: str):
        self.kind, self.decorator = kind, decorator

    def check_name(self, name: object) -> None:
        """Raises ConfigError for a name that is none, as where a decorator without parentheses is given the function."""
        if callable(name):
            function = getattr(name, "__name__", "f")
            raise ConfigError(
                f'@{self.decorator} of {function} has no name: write @megatron_rl.{self.decorator}("{function}", ...)'
            )
        if not isinstance(name, str) or not name:
            raise ConfigError(f"{self.kind} name {name!r} must be a non-empty string")

    def add(self, name: str, record: Record) -> None:
        """Raises ConfigError where another function has the name, whichever was imported first."""
        if not _is_ours(record.function):
            _import_built_in()
        known = self.get(name)
        if known is not None and not _is_same(known.function, record.function):
            raise ConfigError(f"{self.kind} {name!r} is already registered by {known.function.__module__}; choose another name")
        self[name] = record

    def __missing__(self, name: object) -> Record:
        if not isinstance(name, str):
            raise ConfigError(f"{self.kind} {name!r} must be a name: a registered one, or module.function")
        _import_built_in()
        if name in self:
            return self[name]
        if "." not in name:
            known = ", ".join(self)
            raise ConfigError(
                f"{self.kind} {name!r} is not registered; known: {known}. A name with a dot is imported as module.function"
            )
        function = import_dotted(name, self.kind)
        # The module registers the function under a plain name when it is imported; the dotted one is then a second name.
        same = next((record for record in self.values() if record.function is function), None)
        if same is None:
            raise ConfigError(
                f"{self.kind} {name!r} is not declared: decorate {name.rpartition('.')[2]} with @megatron_rl.{self.decorator}"
            )
        self[name] = same
        return same

    def find(self, name: object) -> Record | None:
        """None where the name is wrong: for what a rule judges while another one reports it."""
        try:
            return self[str(name)]
        except ConfigError:
            return None

    def names(self) -> tuple[str, ...]:
        _import_built_in()
        return tuple(self)

    def is_built_in(self, name: str) -> bool:
        """Whether the declaration of that name is the package's."""
        return _is_ours(self[name].function)


def _import_built_in() -> None:
    for module in BUILT_IN:
        importlib.import_module(module)


def _is_ours(function: Callable[..., Any]) -> bool:
    return function.__module__.startswith("megatron_rl.")


def _is_same(before: Callable[..., Any], now: Callable[..., Any]) -> bool:
    """Also where a cell of a notebook, or a file that is imported once more, defines its function again."""
    is_again = (before.__module__, before.__qualname__) == (now.__module__, now.__qualname__)
    return before is now or (is_again and "<lambda>" not in now.__qualname__)


def import_dotted(path: str, purpose: str) -> Callable[..., Any]:
    """Imports module.function as the hosts do. purpose: what it is for, in messages. Raises ConfigError, which says which half
    failed."""
    module_name, _, attribute = path.rpartition(".")
    if not module_name:
        raise ConfigError(f"{purpose} {path!r} has no dot: write module.function")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, TypeError) as error:  # a leading dot asks for a relative import: TypeError
        places = "PYTHONPATH, and with megatron-rl the current directory, are where modules are looked for"
        raise ConfigError(f"{purpose} {path!r}: module {module_name!r} cannot be imported ({error}); {places}") from error
    if not hasattr(module, attribute):
        raise ConfigError(f"{purpose} {path!r}: module {module_name!r} has no {attribute!r}; write module.function")
    function: Callable[..., Any] = getattr(module, attribute)
    if not callable(function):
        raise ConfigError(f"{purpose} {path!r} is {type(function).__name__}, not a function")
    return function


def takes(function: Callable[..., Any], name: str) -> bool:
    """Whether the function has an argument of that name."""
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):  # no function, or a builtin without a signature: check_signature says so
        return False


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


def check_triton_path(kind: str, name: str, triton: object) -> None:
    """Raises ConfigError unless `triton` of a declaration is None or the text module.function."""
    if triton is not None and not (isinstance(triton, str) and "." in triton):
        raise ConfigError(f"triton={triton!r} of {kind} {name!r} must be the text module.function, or None")
