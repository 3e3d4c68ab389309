"""Runs code of verl, NeMo-RL, ROLL and SkyRL from a checkout on CPU, its heavy imports stubbed; it must change no file of it."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir
from types import ModuleType
from unittest.mock import MagicMock

from host_harness import StubModule, load_checkout, silent_logging


class ClassyModule(StubModule):
    """A name in TitleCase is an empty class, because hosts' classes inherit from some and annotate with others."""

    def __getattr__(self, name: str):
        if not name[0].isupper():
            return super().__getattr__(name)
        setattr(self, name, self.class_of(name))
        return vars(self)[name]

    def class_of(self, name: str) -> type:
        return type(name, (), {"__class_getitem__": classmethod(lambda cls, item: cls)})


@dataclass(frozen=True, kw_only=True)
class Checkout:
    variable: str  # of the environment
    stubbed: Sequence[str]
    module_type: type[StubModule] = ClassyModule
    prepare: Callable[[], None] = lambda: None  # before the first module

    def path(self, *parts: str) -> Path:
        """A test that calls this has the mark host(variable)."""
        return Path(os.environ[self.variable], *parts)

    def load(self, module: str, *, without: Sequence[str] = ()) -> ModuleType:
        """A module of the checkout. The process must serve no other purpose. without: names that are not stubbed."""
        root = str(self.path())
        if root not in sys.path:
            sys.dont_write_bytecode = True
            load_checkout(root, [name for name in self.stubbed if name not in without], self.module_type)
            self.prepare()
        with silent_logging():
            return importlib.import_module(module)

    def source(self, path: str) -> str:
        return self.path(path).read_text(encoding="utf-8")


VERL = Checkout(
    variable="VERL_ROOT",
    stubbed=(
        "accelerate codetiming datasets dill huggingface_hub hydra omegaconf orjson pandas peft pyarrow ray safetensors tensordict "
        "torchdata transfer_queue transformers vllm wandb"
    ).split(),
)


# NeMo-RL


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


class ModuleForNemoRL(ClassyModule):
    def __getattr__(self, name: str):
        if self.__name__ == "pydantic" and name in OF_PYDANTIC:
            return OF_PYDANTIC[name]
        return "5.0.0" if name == "__version__" else super().__getattr__(name)

    def class_of(self, name: str) -> type:
        return AnyAttribute(name, (), {"__init__": lambda self, *given, **options: None})


NEMO_RL = Checkout(
    variable="NEMO_RL_ROOT",
    stubbed=(
        "aiohttp datasets fastapi httpx huggingface_hub hydra megatron.bridge megatron.core.transformer.moe.moe_logging "
        "megatron.training mlflow modelopt nvidia_resiliency_ext omegaconf pandas prometheus_client pydantic pynvml ray rich "
        "safetensors scipy soundfile swanlab tensordict torchdata tqdm transformers uvicorn vllm wandb zmq"
    ).split(),
    module_type=ModuleForNemoRL,
)


# ROLL and SkyRL


def keep_logs_away() -> None:
    os.environ["ROLL_LOG_DIR"] = str(Path(gettempdir(), "roll-logs"))  # without it ROLL makes a folder here


ROLL = Checkout(
    variable="ROLL_ROOT",
    stubbed=(
        "codetiming dacite datasets huggingface_hub hydra imageio mcore_adapter more_itertools omegaconf opentelemetry peft "
        "pybase64 ray safetensors tensordict tqdm transfer_queue transformers wandb"
    ).split(),
    prepare=keep_logs_away,
)


def without_ray() -> None:
    vars(importlib.import_module("ray"))["is_initialized"] = lambda: False


SKYRL = Checkout(
    variable="SKYRL_ROOT",
    stubbed=(
        "aiohttp cloudpickle datasets httpx jaxtyping loguru omegaconf orjson pybase64 ray skyrl.backends.backend skyrl.tinker "
        "skyrl.train.config skyrl.train.evaluate skyrl.utils.log skyrl_gym tensordict torchdata tqdm transformers"
    ).split(),
    prepare=without_ray,
)
