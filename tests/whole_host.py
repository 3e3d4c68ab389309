"""A rank of a host's own training on recorded rollouts, on CPU and gloo: its parser, rollout manager, model, optimiser and actor.

Nothing that computes, schedules, scales or updates is replaced. What is replaced:

| replaced | why |
|---|---|
| the packages of STUBBED_OF_WHOLE | not installed; imported on the way, and not called with --debug-train-only |
| Ray: get and put hand the object over, remote leaves a class as it is | each rank has its own rollout manager in its process |
| pydantic.BaseModel: without its checks | miles's records of processes and events |
| transformers' AutoConfig: a type and no size | the model comes from Megatron's flags, with Megatron's NullTokenizer |
| CUDA: install_cpu_support, the memory counters, the architecture | there is none |
| slime's accelerator: one of the CPU, through its own set_accelerator | it knows CUDA and MUSA |
| torch.distributed.init_process_group | run_ranks has made the gloo group |
| the hosts' wrapper of process groups: two methods more | torch 2.13 calls what was _allgather_base by another name |
| numpy's version, in one assertion | both hosts refuse numpy 2 |
| load_checkpoint | the weights are those of build_gpt_model, by name: the same in every layout |
| sglang's flags in miles's validation, its aliases of transformers | they are of the sampler |
| miles's object store, made anew | actor and manager share a process |
| the dashboard's log | it notes what it is given |
| Megatron's fused cross-entropy in miles, by Megatron's other one | the fused one rounds its gradient to bfloat16 |

--spec names layer_spec, because Transformer Engine's attention needs CUDA. The file of --custom-config-path says bf16: false,
because both hosts set bf16 themselves: so float32 is compared with float32.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import sys
import types
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from host_checkouts import STUBBED, load_checkout, silent_logging
from torch import Tensor
from trainer_cases import named_shards

from megatron_rl.hosts.launch import with_our_flags
from megatron_rl.megatron.cpu import install_cpu_support
from megatron_rl.megatron.model import find_gpt_model, gpt_layer_spec, layout_independent_normal

MEGATRON_ROOT = "MEGATRON_LM_ROOT"
# megatron.training is Megatron-LM's own here; its RL folder needs pydantic, its tokenizers six and regex.
STUBBED_OF_WHOLE = (*(name for name in STUBBED if name != "megatron.training"), "megatron.rl", "six", "regex")
STUBBED_OF_WHOLE += tuple("fastapi omegaconf polars pybase64 pylatexenc setproctitle starlette tokenizers tqdm uvicorn".split())
SEED = 0


def layer_spec(args: Namespace, config: Any, vp_stage: int | None) -> Any:
    return gpt_layer_spec(config, vp_stage=vp_stage)


def run_whole(rank: int, host: str, root: str, megatron_root: str, words: list[str]) -> tuple[dict, list[dict[str, float]]]:
    """The host's training of this command line, on this rank: the weights that it leaves, as trainer_cases.weights_of, and the
    host's metrics of each step, on the rank that reports."""
    install_cpu_support()
    make_importable(root, megatron_root)
    made = {"slime": Slime, "miles": Miles}[host](rank)
    with silent_logging(), made.replacements():
        return made.train(words)


def make_importable(root: str, megatron_root: str) -> None:
    load_checkout(root, STUBBED_OF_WHOLE)
    add_megatron_lm(megatron_root)

    ray, transformers, pydantic = map(importlib.import_module, ("ray", "transformers", "pydantic"))
    pydantic.BaseModel = Model
    ray.remote, ray.get, ray.put = remote, lambda value: value, lambda value, **transport: value
    ray.get_gpu_ids = lambda: [0]
    transformers.AutoConfig.from_pretrained = lambda *names, **options: types.SimpleNamespace(model_type="gpt")


def add_megatron_lm(root: str) -> None:
    import megatron

    folder = str(Path(root, "megatron"))
    if folder not in megatron.__path__:  # a namespace: megatron.core stays the installed one
        megatron.__path__.append(folder)
        sys.path.append(root)


class Model:
    """In the place of pydantic.BaseModel, without its checks: the fields are the keywords."""

    model_fields: ClassVar[dict[str, types.SimpleNamespace]] = {}

    def __init_subclass__(cls):
        own = {name: types.SimpleNamespace(default=getattr(cls, name, None)) for name in vars(cls).get("__annotations__", {})}
        cls.model_fields = cls.model_fields | own

    def __init__(self, **fields: Any):
        vars(self).update(fields)


def remote(*decorated: Any, **options: Any) -> Any:
    """ray.remote: the class itself, whose actors elsewhere are mocks."""
    if not decorated:
        return remote
    if isinstance(decorated[0], type):
        decorated[0].options = staticmethod(mock.MagicMock())
    return decorated[0]


def load_weights(model: list, optimizer: Any, *others: Any, **options: Any) -> tuple[int, int]:
    """In the place of load_checkpoint: what build_gpt_model gives. Returns (iteration, operations), as that does."""
    for chunk in map(find_gpt_model, model):
        with torch.no_grad():
            for name, parameter in chunk.named_parameters():
                mean = 1.0 if "norm" in name and name.endswith("weight") else 0.0
                normal = layout_independent_normal(chunk, name, parameter, seed=SEED)
                parameter.copy_(mean + chunk.config.init_method_std * normal)
    optimizer.reload_model_params()
    return -1, 0


class WholeHost:
    """A host's training process, of one rank."""

    name: str
    model_module: str
    initialize_module: str

    def __init__(self, rank: int):
        self.rank, self.steps = rank, []

    @contextlib.contextmanager
    def replacements(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for owner, name, value in self.replaced():
                stack.enter_context(mock.patch.object(importlib.import_module(owner), name, value))
            yield

    def replaced(self) -> Iterator[tuple[str, str, Any]]:
        groups = importlib.import_module(f"{self.name}.utils.reloadable_process_group").ReloadableProcessGroup
        for method in ("all_gather_single", "reduce_scatter_single"):
            setattr(groups, method, functools.partialmethod(groups._fwd, method))
        yield "torch.distributed", "init_process_group", lambda *given, **options: None
        yield "megatron.training.arguments", "get_device_arch_version", lambda: 10
        yield self.initialize_module, "np", types.SimpleNamespace(__version__="1.26", random=np.random)
        yield self.model_module, "load_checkpoint", load_weights

    def note(self, args: Namespace, metrics: dict[str, float], *others: Any, **options: Any) -> None:
        if "train/step" in metrics:
            self.steps.append(dict(metrics))

    def parse(self, words: list[str]) -> Namespace:
        """By the host's parser; as our launcher calls it, where a flag of ours is among the words."""
        parse_args = importlib.import_module(f"{self.name}.utils.arguments").parse_args
        parse_args = with_our_flags(parse_args) if "--loss-aggregation" in words else parse_args
        with mock.patch.object(sys, "argv", ["train.py", *words]):
            return parse_args()

    def train(self, words: list[str]) -> tuple[dict, list[dict[str, float]]]:
        args = self.parse(words)
        actor, first = self.start(args)
        manager = self.manager(args)
        manager.set_train_parallel_config(actor.train_parallel_config)
        for rollout in range(first, args.num_rollout):
            self.train_on(actor, manager, rollout)
        return named_shards(find_gpt_model(actor.model[0]), lambda parameter: parameter.detach()), self.steps

    def start(self, args: Namespace) -> tuple[Any, int]:
        """The actor, and the rollout that it begins with."""
        raise NotImplementedError

    def manager(self, args: Namespace) -> Any:
        raise NotImplementedError

    def train_on(self, actor: Any, manager: Any, rollout: int) -> None:
        raise NotImplementedError


class Slime(WholeHost):
    name = "slime"
    model_module = "slime.backends.megatron_utils.model"
    initialize_module = "slime.backends.megatron_utils.initialize"

    def replaced(self) -> Iterator[tuple[str, str, Any]]:
        self._set_accelerator()
        yield from super().replaced()
        yield "slime.observability.logging_utils", "log", self.note

    def _set_accelerator(self) -> None:
        from slime.utils import accelerator

        class CPU(accelerator.CUDAAccelerator):
            name = device_type = "cpu"
            communication_backend_name = "gloo"

            def is_available(self) -> bool:
                return True

            def current_device(self) -> str:
                return "cpu"

            def device_name(self, index=None) -> str:
                return "cpu"

            def mem_get_info(self, device=None) -> tuple[int, int]:
                return 2**40, 2**40

            def memory_allocated(self, device=None) -> int:
                return 0

            memory_reserved = memory_allocated

        accelerator.set_accelerator(CPU())

    def start(self, args: Namespace) -> tuple[Any, int]:
        actor = importlib.import_module("slime.backends.megatron_utils.actor")
        made = actor.MegatronTrainRayActor(dist.get_world_size(), self.rank, "127.0.0.1", 0)
        return made, made.init(args, "actor")

    def manager(self, args: Namespace) -> Any:
        return importlib.import_module("slime.ray.rollout").RolloutManager(args, None)

    def train_on(self, actor: Any, manager: Any, rollout: int) -> None:
        actor.train(rollout, manager.generate(rollout))


class Miles(WholeHost):
    name = "miles"
    model_module = "miles.backends.megatron_utils.model"
    initialize_module = "miles.backends.megatron_utils.initialize"

    def replaced(self) -> Iterator[tuple[str, str, Any]]:
        yield "miles.utils.hf_config", "register_hf_config_aliases", lambda: None
        yield "miles.utils.arguments", "sglang_validate_args", lambda args: None
        yield from super().replaced()
        yield "torch.cuda", "mem_get_info", lambda device=None: (2**40, 2**40)
        yield "torch.cuda", "memory_allocated", lambda device=None: 0
        yield "torch.cuda", "memory_reserved", lambda device=None: 0
        yield "miles.utils.tracking_utils.tracking", "log", self.note
        # Megatron's fused one rounds its gradient to bfloat16: with it, miles's own loss is 2e-3 from itself.
        yield "megatron.core.fusions.fused_cross_entropy", "fused_vocab_parallel_cross_entropy", unfused_cross_entropy

    def start(self, args: Namespace) -> tuple[Any, int]:
        actor = importlib.import_module("miles.backends.megatron_utils.actor")
        self._empty_store()
        made = actor.MegatronTrainRayActor(
            args, dist.get_world_size(), self.rank, "127.0.0.1", 0, indep_dp_store_addr="", role="actor", cell_index=0
        )
        return made, made.init(args, "actor", indep_dp_info=actor.IndepDPInfo.create_trivial())

    def manager(self, args: Namespace) -> Any:
        self._empty_store()
        return importlib.import_module("miles.ray.rollout.rollout_manager").RolloutManager(args, None)

    def _empty_store(self) -> None:
        """Each process makes its object store once; here actor and manager share a process. Ray's store has no state."""
        importlib.import_module("miles.utils.object_store")._INSTANCE = None

    def train_on(self, actor: Any, manager: Any, rollout: int) -> None:
        actor.train(rollout, asyncio.run(manager.generate(rollout))["data_ref"])


def unfused_cross_entropy(logits: Tensor, labels: Tensor, group: Any) -> Tensor:
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

    return vocab_parallel_cross_entropy(logits, labels)
