"""A rank of verl's own training worker on CPU and gloo: its engine, optimiser, micro-batches and ppo_loss, on recorded rollouts.

Nothing that computes, schedules, scales or updates is replaced. What is replaced:

| replaced | why |
|---|---|
| verl's platform: one of the CPU, through its own set_platform; VERL_ENGINE_DEVICE=cuda | it knows CUDA, ROCm and NPU |
| initialize_global_process_group_ray, set_numa_affinity | run_ranks has made the gloo group |
| the controller's dispatch: each data-parallel rank takes its contiguous part | there is no Ray cluster |
| mbridge: a bridge of this package's hf_weights | mbridge asks for Transformer Engine's layers |
| the dtype of McoreEngineConfig, float32 after its check | it takes 16 bits alone, and float32 is compared with float32 |
| CUDA in Megatron-Core: install_cpu_support | there is none |
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.megatron.cpu import install_cpu_support
from megatron_rl.megatron.model import build_gpt_model, transformer_config
from megatron_rl.train.hf_weights import build_hf_model, read_hf_model, save_hf_checkpoint

MAX_SEQUENCE_LENGTH = 64
GROUP_SIZE = 4  # rollouts of a prompt
MTP_FACTOR = 0.7  # of its loss, as large as the policy's
# With this eps Adam's step follows the size of a gradient, and not its sign, which rounding decides where a gradient is near 0. A
# gradient that is clipped would have one size under each aggregation.
LR, EPS, BETA2, CLIP_GRAD = 3e-3, 1e-3, 0.95, 1e9


@dataclass(frozen=True, kw_only=True)
class EngineLayout:
    """How a mini-batch is laid out."""

    engine: str  # fsdp2 or megatron
    world_size: int = 1
    micro_batch_size: int | None = None  # None: dynamic batch sizes, of max_tokens
    max_tokens: int = 40
    parallel: dict[str, int] = field(default_factory=dict)  # sizes of the Megatron engine
    remove_padding: bool = True  # packed rows (thd)
    has_our_log_probs: bool = False
    is_fused: bool = False  # use_fused_kernels
    has_mtp: bool = False  # a layer of multi-token prediction, with random weights, and its loss
    backend: str = "triton"  # of verl's fused kernels, FSDP engine

    def __str__(self) -> str:
        sizes = [f"{name.split('_')[0]} {size}" for name, size in self.parallel.items()]
        batches = "dynamic batches" if self.micro_batch_size is None else f"micro-batches of {self.micro_batch_size}"
        rows = "" if self.remove_padding else ", padded rows"
        head = ", fused head" if self.is_fused else ", our log-probabilities" if self.has_our_log_probs else ""
        mtp = ", MTP" * self.has_mtp
        return f"{self.engine}, {self.world_size} ranks, {', '.join([*sizes, batches])}{rows}{head}{mtp}"


@dataclass(frozen=True, kw_only=True)
class VerlRun:
    """One training run of a loss: its batches are optimiser steps, or several with mini_batches."""

    loss_mode: str
    actor: dict[str, Any]  # what a launch line sets of the actor
    mini_batches: int = 1


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """The batch of a step as verl's trainer holds it: left-padded prompts, right-padded responses."""

    tensors: dict[str, Tensor]  # [S, ...]
    rewards: Tensor  # [S]
    prompt_ids: Sequence[str]
    temperature: float | Tensor  # a number, or one a sample [S]
    sessions: Sequence[int] | None = None  # the rollout of each sample, among those of its prompt; None: of the old trainer
    advantages: Tensor | None = None  # [S, R]; None: of verl's grpo


def run_verl(
    rank: int,
    root: str,
    folder: str,
    layout: EngineLayout,
    runs: Sequence[VerlRun],
    rollouts: Sequence[Rollout],
) -> list[dict[str, Tensor]]:
    """The weights that each run leaves, by their names in the folder's format; on the first rank."""
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(dist.get_world_size()), "MASTER_ADDR": "localhost", "MASTER_PORT": "0"})
    os.environ.update({"LOCAL_RANK": "0", "VERL_ENGINE_DEVICE": "cuda", "VERL_LOGGING_LEVEL": "ERROR"})
    sys.dont_write_bytecode = True
    sys.path.insert(0, root)
    install_cpu_support()
    use_cpu_platform()
    from verl.workers import engine_workers

    import megatron_rl.hosts.verl_plugin  # noqa: F401  # as verl's plugin loader does in each worker

    if layout.has_our_log_probs:
        import megatron_rl.hosts.heads.verl  # noqa: F401  # as verl does for external_lib
    engine_workers.initialize_global_process_group_ray = lambda **options: None
    engine_workers.set_numa_affinity = lambda: None
    use_own_bridge()
    found = []
    Bridge.has_mtp = layout.has_mtp
    for run in runs:
        worker = make_worker(folder, layout)
        train(worker, run, rollouts, layout)
        found.append(weights_of(worker, layout, folder))
        destroy_parallel_state()
    return found


def use_cpu_platform() -> None:
    from verl.plugin.platform import platform_manager
    from verl.plugin.platform.platform_cuda import PlatformCUDA

    counters = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
    none = {**{name: lambda *of: 0 for name in counters}, "mem_get_info": lambda *of: (0, 0), "empty_cache": lambda: None}
    names = {name: getattr(torch.cpu, name) for name in dir(torch.cpu)}

    class PlatformCPU(PlatformCUDA):
        device_name = "cpu"
        device_module = types.SimpleNamespace(**names, **none, get_device_name=lambda *of: "CPU")

        def is_available(self) -> bool:
            return True

        def current_device(self) -> torch.device:
            return torch.device("cpu")

        def device_count(self) -> int:
            return 1

        def manual_seed_all(self, seed: int) -> None:
            torch.manual_seed(seed)

    platform_manager.set_platform(PlatformCPU())


def make_worker(folder: str, layout: EngineLayout) -> Any:
    """verl's TrainingWorker, as ActorRolloutRefWorker makes it for the actor."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers import config as configs
    from verl.workers.engine_workers import TrainingWorker

    model = configs.HFModelConfig(
        path=folder,
        override_config={"attn_implementation": "eager"},
        use_remove_padding=layout.remove_padding and layout.engine == "megatron",
        enable_gradient_checkpointing=False,
        use_fused_kernels=layout.is_fused,
        fused_kernel_options={"impl_backend": layout.backend},
        mtp=configs.MtpConfig(enable=layout.has_mtp, enable_train=layout.has_mtp, mtp_loss_scaling_factor=MTP_FACTOR),
    )
    if layout.has_mtp:
        model.hf_config.num_nextn_predict_layers = 1
    batches = {
        "use_dynamic_bsz": layout.micro_batch_size is None,
        "micro_batch_size_per_gpu": layout.micro_batch_size,
        "max_token_len_per_gpu": layout.max_tokens,
        "use_fused_kernels": layout.is_fused,
    }
    schedule = {"lr": LR, "weight_decay": 0.0, "clip_grad": CLIP_GRAD, "total_training_steps": 100}
    if layout.engine == "megatron":
        engine = configs.McoreEngineConfig(vanilla_mbridge=True, use_distributed_optimizer=False, **layout.parallel, **batches)
        vars(engine)["dtype"] = "fp32"
        adam = {"adam_beta2": BETA2, "adam_eps": EPS}
        optim = configs.McoreOptimizerConfig(lr_decay_style="constant", override_optimizer_config=adam, **schedule)
    else:
        precision = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32")
        engine = configs.FSDPEngineConfig(strategy=layout.engine, mixed_precision=precision, use_torch_compile=False, **batches)
        betas = (0.9, BETA2)
        optim = configs.FSDPOptimizerConfig(betas=betas, override_optimizer_config={"eps": EPS}, **schedule)
    worker = TrainingWorker(
        configs.TrainingWorkerConfig(
            model_type="language_model",
            model_config=model,
            engine_config=engine,
            optimizer_config=optim,
            checkpoint_config=CheckpointConfig(),
        )
    )
    worker.reset()
    return worker


def train(worker: Any, run: VerlRun, rollouts: Sequence[Rollout], layout: EngineLayout) -> None:
    """As verl's trainer: the estimator on the whole batch, the parts to the workers, update_actor. The batch has the columns that
    verl's agent loops write."""
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn
    from verl.utils import tensordict_utils as tu
    from verl.workers import config as configs
    from verl.workers.utils.losses import ppo_loss
    from verl.workers.utils.padding import left_right_2_no_padding

    loss = configs.PolicyLossConfig(loss_mode=run.loss_mode)
    sizes = {"rollout_n": GROUP_SIZE, "ppo_micro_batch_size_per_gpu": 1}
    strategy = "megatron" if layout.engine == "megatron" else "fsdp"
    worker.set_loss_fn(partial(ppo_loss, config=configs.ActorConfig(strategy=strategy, policy_loss=loss, **sizes, **run.actor)))
    for rollout in rollouts:
        mask, number = rollout.tensors["response_mask"], len(rollout.rewards)
        last = torch.zeros_like(mask, dtype=torch.float32)
        last[:, 0] = rollout.rewards  # the estimators add up a response's rewards
        advantages = rollout.advantages
        if advantages is None:
            advantages, _ = get_adv_estimator_fn("grpo")(
                token_level_rewards=last, response_mask=mask, index=np.array(rollout.prompt_ids, dtype=object), config={}
            )
        parts = number // worker.engine.get_data_parallel_size()
        place = worker._query_dispatch_info("train")
        part = slice(place * parts, (place + 1) * parts)
        own = {name: values[part] for name, values in {**rollout.tensors, "advantages": advantages}.items()}
        names = {"uid": rollout.prompt_ids, "session_id": rollout.sessions}
        names = {name: list(values[part]) for name, values in names.items() if values is not None}
        temperature = rollout.temperature
        if isinstance(temperature, Tensor):
            own["temperature"], others = temperature[place * parts : (place + 1) * parts], {}
        else:
            others = {"temperature": temperature}
        data = tu.get_tensordict(own | names, non_tensor_dict=others)
        data = left_right_2_no_padding(data)
        step = number // run.mini_batches
        tu.assign_non_tensor(
            data,
            calculate_entropy=bool(run.actor.get("entropy_coeff")),  # as verl's worker asks its engine
            global_batch_size=step,
            mini_batch_size=step,
            epochs=1,
            seed=1,
            dataloader_kwargs={"shuffle": False},
            compute_loss=True,
        )
        worker.train_mini_batch(data)


def weights_of(worker: Any, layout: EngineLayout, folder: str) -> dict[str, Tensor]:
    if layout.engine != "megatron":
        parameters, _ = worker.engine.get_per_tensor_param()
        return {name: value.detach().clone() for name, value in parameters}
    if layout.has_mtp:  # of this rank, by Megatron's names: the folder's format has no MTP
        chunks = enumerate(worker.engine.module)
        return {f"{index} {name}": value.detach().clone() for index, chunk in chunks for name, value in chunk.named_parameters()}
    chosen = [mkdtemp(dir=folder)]  # of no other run: stages are files
    dist.broadcast_object_list(chosen, 0)
    save_hf_checkpoint(read_hf_model(folder), worker.engine.module, os.path.join(chosen[0], "saved"))
    dist.barrier()
    return weights_in(Path(chosen[0], "saved"))


def weights_in(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def destroy_parallel_state() -> None:
    from megatron.core import parallel_state

    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()


def use_own_bridge() -> None:
    """In the place of verl.models.mcore.mbridge, which imports mbridge."""
    module = types.ModuleType("verl.models.mcore.mbridge")
    vars(module).update(AutoBridge=Bridge, make_value_model=None, freeze_moe_router=None)
    sys.modules[module.__name__] = module


class Bridge:
    """mbridge's interface, as far as the engine calls it."""

    has_mtp = False

    def __init__(self, folder: str):
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

        model_parallel_cuda_manual_seed(0)
        self._model = read_hf_model(folder)
        is_parallel = parallel_state.get_tensor_model_parallel_world_size() > 1
        options = self._model.transformer_options()
        mtp = {"mtp_num_layers": 1} if self.has_mtp else {}
        self.config = transformer_config(**options, sequence_parallel=is_parallel, variable_seq_lengths=True, **mtp)

    @classmethod
    def from_config(cls, hf_config: Any, dtype: torch.dtype) -> Bridge:
        assert dtype == torch.float32
        return cls(hf_config.name_or_path)

    def set_extra_args(self, **options: Any) -> None:
        for name, value in options.items():
            setattr(self.config, name, value)

    def get_model(self, *, ddp_config: dict[str, Any], wrap_with_ddp: bool, **options: Any) -> list:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

        assert wrap_with_ddp
        sizes = {"max_sequence_length": MAX_SEQUENCE_LENGTH, "use_transformer_engine": False}
        if self.has_mtp:  # no folder has that layer: weights of a seed
            chunk = build_gpt_model(self.config, vocab_size=self._model.vocab_size, **sizes)
        else:
            chunk = build_hf_model(self._model, self.config, **sizes)
        return [DistributedDataParallel(self.config, DistributedDataParallelConfig(**ddp_config), chunk)]

    def load_weights(self, module: list, path: str) -> None:
        """`build` has loaded them."""
