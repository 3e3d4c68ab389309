"""Runs work right after a module of a host is loaded: before its other modules take names from it."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class After(importlib.abc.MetaPathFinder):
    """Finds no module by itself; it lets `work` run after the module is loaded. After a search alone, or an import that fails, it
    waits for the next."""

    def __init__(self, name: str, work: Callable[[Any], None]):
        self.name, self.work = name, work
        self.is_searching = False

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if fullname != self.name or self.is_searching:
            return None
        self.is_searching = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self.is_searching = False
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_work(module: ModuleType) -> None:
                load(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    self.work(module)

            spec.loader.exec_module = load_and_work  # type: ignore[method-assign]
        return spec


def after_import(name: str, work: Callable[[Any], None]) -> None:
    """work(module) now where the module is loaded, else right after it is."""
    if name in sys.modules:
        work(sys.modules[name])
    else:
        sys.meta_path.insert(0, After(name, work))
