"""Runs ROLL's own strategy and worker code from a checkout on CPU, its heavy imports stubbed; it must change no file of it."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from tempfile import gettempdir
from types import ModuleType

from host_harness import StubFinder, silent_logging
from verl_checkout import ClassyModule

ROOT = os.environ.get("ROLL_ROOT")
STUBBED = (
    "codetiming dacite datasets huggingface_hub hydra imageio mcore_adapter more_itertools omegaconf opentelemetry peft pybase64 "
    "ray safetensors tensordict tqdm transfer_queue transformers wandb"
).split()


def load(module: str) -> ModuleType:
    """A module of the checkout. The process must serve no other purpose."""
    assert ROOT is not None, "ROLL_ROOT names the checkout"
    if ROOT not in sys.path:
        sys.dont_write_bytecode = True
        os.environ["ROLL_LOG_DIR"] = str(Path(gettempdir(), "roll-logs"))  # without it ROLL makes a folder here
        sys.path.append(ROOT)
        sys.meta_path.insert(0, StubFinder(STUBBED, ClassyModule))
    with silent_logging():
        return importlib.import_module(module)


def source(path: str) -> str:
    assert ROOT is not None, "ROLL_ROOT names the checkout"
    return Path(ROOT, path).read_text(encoding="utf-8")
