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
    """Finds no module by itself; it lets `work` run after the module is loaded."""

    def __init__(self, name: str, work: Callable[[Any], None]):
        self.name, self.work = name, work

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_work(module: ModuleType) -> None:
                load(module)
                self.work(module)

            spec.loader.exec_module = load_and_work  # type: ignore[method-assign]
        return spec


def after_import(name: str, work: Callable[[Any], None]) -> None:
    """work(module) now where the module is loaded, else right after it is."""
    if name in sys.modules:
        work(sys.modules[name])
    else:
        sys.meta_path.insert(0, After(name, work))
