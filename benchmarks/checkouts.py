"""The checkouts that the benchmarks measure, and one file of such a checkout without the packages that the others need."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from unittest.mock import MagicMock

from benchmarks.measure import NOT_INSTALLED, NOT_SUPPORTED, Unavailable
from megatron_rl.errors import ConfigError

# --peer NAME=PATH: the package that must be in PATH.
CHECKOUTS = {
    "fast_llm": "https://github.com/ServiceNow/Fast-LLM",
    "miles": "https://github.com/radixark/miles",
    "slime": "https://github.com/THUDM/slime",
    "verl": "https://github.com/volcengine/verl",
    "nemo_rl": "https://github.com/NVIDIA-NeMo/RL",
    "skyrl": "https://github.com/NovaSky-AI/SkyRL",
    "mcore_adapter": "https://github.com/alibaba/ROLL (its mcore_adapter/src)",
}


def checkout_of(package: str) -> str:
    return f"--peer {package}=PATH, a checkout of {CHECKOUTS[package]}"


def add_checkouts(values: Sequence[str]) -> None:
    """NAME=PATH: makes the checkouts importable, after everything that is installed, so they cannot shadow torch or triton."""
    for value in values:
        name, _, path = value.partition("=")
        if name not in CHECKOUTS:
            raise ConfigError(f"--peer {value}: write NAME=PATH with NAME one of {', '.join(CHECKOUTS)}")
        if not (Path(path) / name).is_dir():
            raise ConfigError(f"--peer {value}: {path} holds no folder {name}; give the checkout's own folder")
        if path not in sys.path:
            sys.path.append(path)


class _Stub(ModuleType):
    """A module of an absent package. Names in TitleCase are classes, because hosts' classes inherit from some."""

    __path__: list[str] = []  # noqa: RUF012  # so that its submodules are looked for too

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        value = type(name, (), {}) if name[0].isupper() else MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds stubs for the packages that it is told of."""

    def __init__(self) -> None:
        self.packages = set[str]()

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        is_stub = name.partition(".")[0] in self.packages
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_stub else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


def host_module(name: str) -> ModuleType:
    """A module of a checkout on sys.path: its file alone, without what the packages around it do when they are imported.

    A package that the file cannot do without is a stub, for this import alone. Raises Unavailable without the checkout, and where
    the file cannot be run here.
    """
    package, *folders = name.split(".")[:-1]
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise Unavailable(NOT_INSTALLED, checkout_of(package))
    before, absent, place = set(sys.modules), _Absent(), list(found.submodule_search_locations)
    for depth in range(len(folders) + 1):
        around = ModuleType(".".join([package, *folders[:depth]]))
        around.__path__ = [str(Path(folder, *folders[:depth])) for folder in place]
        sys.modules.setdefault(around.__name__, around)
    sys.meta_path.append(absent)
    try:
        while True:
            try:
                return importlib.import_module(name)
            except ModuleNotFoundError as error:
                missing = (error.name or package).partition(".")[0]
                if missing in absent.packages | {package}:
                    raise
                absent.packages.add(missing)
    except Exception as error:  # a host's own code
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise Unavailable(NOT_SUPPORTED, f"import {name}: {reason}") from None
    finally:
        sys.meta_path.remove(absent)
        for made in set(sys.modules) - before:
            if made.partition(".")[0] in absent.packages | {package}:
                del sys.modules[made]
