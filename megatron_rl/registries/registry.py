"""A registry: the declarations of one kind by name. The built-in ones are in one folder or file, a user's are module.function."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from megatron_rl.errors import ConfigError
from megatron_rl.registries.dotted import import_dotted

_PACKAGE = Path(__file__).parents[1]


class Declaration(Protocol):
    @property
    def function(self) -> Callable[..., Any]: ...


Record = TypeVar("Record", bound=Declaration)


class Registry(Generic[Record]):
    """kind: in messages, as in "KL estimator". home: the folder or file of megatron_rl that declares the built-in names. decorator:
    its name. declare: declares a function of a user's that is not decorated, under its dotted name. None: it is refused."""

    def __init__(self, kind: str, home: str, decorator: str, declare: Callable[[str, Callable[..., Any]], object] | None = None):
        self.kind, self.home, self.decorator, self._declare = kind, home, decorator, declare
        self.records: dict[str, Record] = {}
        self._has_built_in = False

    def add(self, name: str, record: Record) -> None:
        """Raises ConfigError where another function has the name, whichever was imported first."""
        if not isinstance(name, str) or not name:
            raise ConfigError(f"{self.kind} name {name!r} must be a non-empty string")
        if not record.function.__module__.startswith("megatron_rl."):
            self._import_built_in()
        known = self.records.get(name)
        if known is not None and known.function is not record.function and not _is_run_again(known.function, record.function):
            raise ConfigError(f"{self.kind} {name!r} is already registered by {known.function.__module__}; choose another name")
        self.records[name] = record

    def find(self, name: object) -> Record:
        """The declaration of that name. A name with a dot is imported as module.function; its module declares it, or `declare`.

        Raises ConfigError for an unknown name, for a function that cannot be imported, and for one that is not declared.
        """
        if not isinstance(name, str):
            raise ConfigError(f"{self.kind} {name!r} must be a name: a registered one, or module.function")
        self._import_built_in()
        if name in self.records:
            return self.records[name]
        if "." not in name:
            known = ", ".join(self.records)
            raise ConfigError(
                f"{self.kind} {name!r} is not registered; known: {known}. A name with a dot is imported as module.function"
            )
        function = import_dotted(name, self.kind)
        # The module registers the function under a plain name when it is imported; the dotted one is then a second name.
        same = next((record for record in self.records.values() if record.function is function), None)
        if same is not None:
            self.records[name] = same
        elif self._declare is not None:
            self._declare(name, function)
        else:
            raise ConfigError(
                f"{self.kind} {name!r} is not declared: decorate {name.rpartition('.')[2]} with @megatron_rl.{self.decorator}"
            )
        return self.records[name]

    def find_or_none(self, name: object) -> Record | None:
        """`find`, and None where it raises: for what a rule judges while another one reports a wrong name."""
        try:
            return self.find(name)
        except ConfigError:
            return None

    def names(self) -> tuple[str, ...]:
        self._import_built_in()
        return tuple(self.records)

    def is_built_in(self, name: str) -> bool:
        """Whether the declaration of that name is the package's."""
        return f"{self.find(name).function.__module__}.".startswith(f"megatron_rl.{self.home}.")

    def names_in_sources(self) -> tuple[str, ...]:
        """The built-in names and the registered ones, without an import of the files, which need torch: for a help text."""
        return tuple(dict.fromkeys((*_names_declared_in(_PACKAGE / self.home, self.decorator), *self.records)))

    def _import_built_in(self) -> None:
        """At the first look into the registry, so that it does not matter what was imported before."""
        if self._has_built_in:
            return
        home = importlib.import_module(f"megatron_rl.{self.home}")
        for module in pkgutil.iter_modules(getattr(home, "__path__", ()), f"{home.__name__}."):
            if not module.name.endswith("_triton"):  # imported where kernels run
                importlib.import_module(module.name)
        self._has_built_in = True


def _is_run_again(before: Callable[..., Any], now: Callable[..., Any]) -> bool:
    """Whether a cell of a notebook defines its function once more, or a file that raised below it is imported once more."""
    names = {(function.__module__, function.__qualname__) for function in (before, now)}
    is_again = now.__module__ == "__main__" or getattr(before, "__globals__", None) is not getattr(now, "__globals__", None)
    return len(names) == 1 and is_again and "<lambda>" not in now.__qualname__


@functools.cache  # each parser asks again
def _names_declared_in(home: Path, decorator: str) -> tuple[str, ...]:
    """In the files of a folder, or in one file."""
    found = []
    for path in sorted(home.glob("*.py")) or [home.with_suffix(".py")]:
        functions = [node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef)]
        for call in (one for function in functions for one in function.decorator_list):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == decorator:
                found.append(str(ast.literal_eval(call.args[0])))
    return tuple(found)


def takes(function: Callable[..., Any], name: str) -> bool:
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):  # no function, or a builtin without a signature: check_signature says so
        return False
