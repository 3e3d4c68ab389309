"""Runs code of hosts from checkouts on CPU, their heavy imports stubbed; it must change no file of them."""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import logging
import os
import sys
import types
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir
from types import ModuleType
from unittest.mock import MagicMock, patch

import torch
from helpers import GLOBAL_VARS
from torch import Tensor

from megatron_rl.hosts.args import Host
from megatron_rl.layout.groups import ParallelGroups

ROOT_VARIABLES = {"miles": "MILES_ROOT", "slime": "SLIME_ROOT"}
# What the hosts import on the way to their loss and never use there. A package of this list that is installed is stubbed too.
STUBBED = (
    "aiohttp flash_attn httpx huggingface_hub mbridge megatron.bridge megatron.training mooncake pydantic ray requests safetensors "
    "sglang sglang_router torch.utils.tensorboard torch_memory_saver transformers urllib3 uvloop wandb"
).split()


def roots_by_environment() -> dict[str, str]:
    """{host: root} of the checkouts that MILES_ROOT and SLIME_ROOT name."""
    return {host: os.environ[name] for host, name in ROOT_VARIABLES.items() if os.environ.get(name)}


class StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Serves a module of mocks for each of the names and below it, and for no other name."""

    def __init__(self, names: Sequence[str] = STUBBED, module_type: type[types.ModuleType] | None = None):
        self.names, self.module_type = names, module_type or StubModule

    def find_spec(self, fullname, path=None, target=None):
        if not any(fullname == name or fullname.startswith(name + ".") for name in self.names):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec):
        return self.module_type(spec.name)

    def exec_module(self, module):
        module.__path__ = []


class StubModule(types.ModuleType):
    """Any attribute is a mock; a decorator among them leaves what it decorates as it is."""

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        mock = unchanged if name == "remote" else MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, mock)
        return mock


def unchanged(*decorated, **options):
    return decorated[0] if decorated else unchanged


def load_checkout(root: str, stubbed: Sequence[str] = STUBBED, module_type: type[types.ModuleType] | None = None) -> None:
    """Makes the checkout importable, for good: a rank serves no other purpose."""
    if not Path(root).is_dir():
        raise FileNotFoundError(f"{root} is no folder: MILES_ROOT, VERL_ROOT and their like name the roots of checkouts")
    if not any(isinstance(finder, StubFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, StubFinder(stubbed, module_type))
    if root not in sys.path:
        sys.path.append(root)


class RealHost:
    """One rank of a checkout, with the methods of EmulatedHost."""

    def __init__(self, host: Host, groups: ParallelGroups, root: str):
        self.host, self.groups, self.root = host, groups, root
        load_checkout(root)
        with silent_logging():
            importlib.import_module(GLOBAL_VARS)
            self._load_modules()
        if host.name == "miles":
            self._set_miles_groups()

    def _load_modules(self) -> None:
        names = {
            "miles": ("miles.backends.training_utils.loss", "miles.backends.training_utils.log_utils", "miles.utils.misc"),
            "slime": ("slime.backends.megatron_utils.loss", "slime.observability.train_metric_utils", "slime.utils.misc"),
        }[self.host.name]
        self.loss_module, self.metrics_module, misc = map(importlib.import_module, names)
        self.load_function: Callable = misc.load_function

    def _set_miles_groups(self) -> None:
        """What create_megatron_parallel_state does, from parallel_state's groups."""
        parallel = importlib.import_module("miles.backends.training_utils.parallel")

        def info(group):
            return parallel.GroupInfo(rank=group.rank(), size=group.size(), group=group, gloo_group=group)

        single = parallel.GroupInfo(rank=0, size=1, group=None)
        groups = self.groups
        parallel.set_parallel_state(
            parallel.ParallelState(
                intra_dp=info(groups.dp),
                intra_dp_cp=info(groups.dp_cp),
                cp=info(groups.cp),
                tp=info(groups.tp),
                pp=info(groups.pp),
                ep=single,
                etp=single,
                indep_dp=single,
            )
        )

    def loss_function(
        self, args: Namespace, batch: dict, logits: Tensor, *, num_microbatches: int, num_rollouts: int
    ) -> tuple[Tensor, Tensor, dict]:
        if self.host.name == "slime":
            return self.loss_module.loss_function(args, batch, num_microbatches, num_rollouts, logits)
        return self.loss_module.loss_function(
            args, batch, num_microbatches, logits, apply_megatron_loss_scaling=True, num_rollouts=num_rollouts
        )

    def reduce_metrics(self, logs: list[dict], args: Namespace, *, num_rollouts: int) -> dict[str, float]:
        if self.host.name == "slime":
            return self.metrics_module.reduce_train_step_metrics(
                logs,
                calculate_per_token_loss=args.calculate_per_token_loss,
                step_global_batch_size=num_rollouts,
                cp_size=self.groups.cp.size(),
                dp_with_cp_group=self.groups.dp_cp,
            )
        return self.metrics_module.aggregate_train_losses(logs, None if args.calculate_per_token_loss else num_rollouts)

    def train_data(self, args: Namespace, samples: list) -> dict[str, list]:
        kind = importlib.import_module(f"{self.host}.utils.types").Sample
        names = "group_index index response_length reward tokens loss_mask rollout_id remove_sample".split()
        samples = [kind(**{name: vars(sample)[name] for name in names}) for sample in samples]
        return own_train_data(self.host.name, args, samples)


def own_train_data(host: str, args: Namespace, samples: list) -> dict:
    """Through the host's conversion, with our hooks where `args` names them, loaded by the host's own loader."""
    load = importlib.import_module(f"{host}.utils.misc").load_function
    hooks = {
        f"custom_{name}_func": load(path) if (path := vars(args)[f"custom_{name}_path"]) else None
        for name in ("convert_samples_to_train_data", "reward_post_process")
    }
    if host == "miles":
        conversion = importlib.import_module("miles.ray.rollout.train_data_conversion")
        return conversion.convert_samples_to_train_data(args, samples, {}, **hooks)
    manager = object.__new__(importlib.import_module("slime.ray.rollout").RolloutManager)
    vars(manager).update(args=args, **hooks)
    return manager._convert_samples_to_train_data(samples)


@contextlib.contextmanager
def silent_logging():

    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


@contextlib.contextmanager
def exact_cross_entropy():
    """An fp32 cross-entropy in the place of Megatron's fused one, whose backward rounds to bf16. For one tensor-parallel rank."""
    module = importlib.import_module("megatron.core.fusions.fused_cross_entropy")

    def exact(logits: Tensor, labels: Tensor, group) -> Tensor:  # [s, b, V], [s, b] -> [s, b]
        assert group.size() == 1
        return torch.logsumexp(logits, -1) - logits.gather(-1, labels[..., None])[..., 0]

    with patch.object(module, "fused_vocab_parallel_cross_entropy", exact):
        yield


# verl, NeMo-RL, ROLL and SkyRL


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
