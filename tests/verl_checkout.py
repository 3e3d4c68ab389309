"""Runs verl's own ppo_loss from a checkout on CPU, its heavy imports stubbed; it must change no file of it."""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType

from host_harness import StubFinder, StubModule, silent_logging

ROOT = os.environ.get("VERL_ROOT")
STUBBED = (
    "accelerate codetiming datasets dill huggingface_hub hydra omegaconf orjson pandas peft pyarrow ray safetensors tensordict "
    "torchdata transfer_queue transformers vllm wandb"
).split()


class ClassyModule(StubModule):
    """A name in TitleCase is an empty class, because hosts' classes inherit from some and annotate with others."""

    def __getattr__(self, name: str):
        if not name[0].isupper():
            return super().__getattr__(name)
        setattr(self, name, type(name, (), {"__class_getitem__": classmethod(lambda cls, item: cls)}))
        return vars(self)[name]


def load(module: str) -> ModuleType:
    """A module of the checkout. The process must serve no other purpose."""
    assert ROOT is not None, "VERL_ROOT names the checkout"
    if ROOT not in sys.path:
        sys.path.append(ROOT)
        sys.meta_path.insert(0, StubFinder(STUBBED, ClassyModule))
    with silent_logging():
        return importlib.import_module(module)
