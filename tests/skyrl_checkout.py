"""Runs SkyRL's own loss utilities from a checkout on CPU, its heavy imports stubbed; it must change no file of it."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType

from host_harness import StubFinder, silent_logging
from verl_checkout import ClassyModule

ROOT = os.environ.get("SKYRL_ROOT")
STUBBED = ("cloudpickle jaxtyping loguru omegaconf ray skyrl.backends.backend skyrl.train.config tensordict transformers").split()


def load(module: str) -> ModuleType:
    """A module of the checkout. The process must serve no other purpose."""
    assert ROOT is not None, "SKYRL_ROOT names the checkout"
    if ROOT not in sys.path:
        sys.dont_write_bytecode = True
        sys.path.append(ROOT)
        sys.meta_path.insert(0, StubFinder(STUBBED, ClassyModule))
        vars(importlib.import_module("ray"))["is_initialized"] = lambda: False
    with silent_logging():
        return importlib.import_module(module)


def source(path: str) -> str:
    assert ROOT is not None, "SKYRL_ROOT names the checkout"
    return Path(ROOT, path).read_text(encoding="utf-8")
