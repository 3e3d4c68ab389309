"""Imports what a user names by a dotted path, with an error that says which half of the path is wrong."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from megatron_rl.errors import ConfigError


def import_dotted(path: str, purpose: str) -> Callable[..., Any]:
    """Imports module.function as the hosts do. Raises ConfigError, which says which half failed."""
    function: Callable[..., Any] = import_attribute(path, purpose)
    if not callable(function):
        raise ConfigError(f"{purpose} {path!r} is {type(function).__name__}, not a function")
    return function


def import_attribute(path: str, purpose: str, kind: str = "function") -> Any:
    """What has the name after the last dot in the module before it. kind: what it is, for messages. Raises ConfigError."""
    module_name, _, attribute = path.rpartition(".")
    if not module_name:
        raise ConfigError(f"{purpose} {path!r} has no dot: write module.{kind}")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, TypeError) as error:  # a leading dot asks for a relative import: TypeError
        places = "PYTHONPATH, and with megatron-rl the current directory, are where modules are looked for"
        raise ConfigError(f"{purpose} {path!r}: module {module_name!r} cannot be imported ({error}); {places}") from error
    if not hasattr(module, attribute):
        raise ConfigError(f"{purpose} {path!r}: module {module_name!r} has no {attribute!r}; write module.{kind}")
    return getattr(module, attribute)
