"""Runs NeMo-RL's own loss code from a checkout on CPU, its heavy imports stubbed; it must change no file of it."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType
from unittest.mock import MagicMock

from host_harness import StubFinder, StubModule, silent_logging

ROOT = os.environ.get("NEMO_RL_ROOT")
STUBBED = (
    "aiohttp datasets fastapi httpx huggingface_hub hydra megatron.bridge megatron.core.transformer.moe.moe_logging "
    "megatron.training mlflow modelopt nvidia_resiliency_ext omegaconf pandas prometheus_client pydantic pynvml ray safetensors "
    "scipy soundfile swanlab tensordict torchdata tqdm transformers uvicorn vllm wandb zmq"
).split()


class Settings:
    """What pydantic's BaseModel is to a config of defaults: keywords over class attributes, iterated as pairs."""

    def __init_subclass__(cls, **options: object) -> None:
        pass

    def __init__(self, **values: object):
        vars(self).update(values)

    def __iter__(self):
        names = [name for name in dir(type(self)) if not name.startswith("_")]
        yield from ((name, getattr(self, name)) for name in dict.fromkeys([*names, *vars(self)]))


def field_default(default: object = None, *, default_factory=None, **options: object) -> object:
    return default if default_factory is None else default_factory()


OF_PYDANTIC = {"BaseModel": Settings, "Field": field_default, "ConfigDict": dict}


class AnyAttribute(type):
    def __getattr__(cls, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=f"{cls.__name__}.{name}")


class ClassyModule(StubModule):
    """A name in TitleCase is an empty class, because NeMo-RL's classes inherit from some and annotate with others."""

    def __getattr__(self, name: str):
        if self.__name__ == "pydantic" and name in OF_PYDANTIC:
            return OF_PYDANTIC[name]
        if name == "__version__":
            return "5.0.0"
        if not name[0].isupper():
            return super().__getattr__(name)
        setattr(self, name, AnyAttribute(name, (), {"__init__": lambda self, *given, **options: None}))
        return vars(self)[name]


def load(module: str) -> ModuleType:
    """A module of the checkout. The process must serve no other purpose."""
    assert ROOT is not None, "NEMO_RL_ROOT names the checkout"
    if ROOT not in sys.path:
        sys.dont_write_bytecode = True
        sys.path.append(ROOT)
        sys.meta_path.insert(0, StubFinder(STUBBED, ClassyModule))
    with silent_logging():
        return importlib.import_module(module)


def source(path: str) -> str:
    assert ROOT is not None, "NEMO_RL_ROOT names the checkout"
    return Path(ROOT, path).read_text(encoding="utf-8")
