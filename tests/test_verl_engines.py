"""verl's own training worker, whole, leaves the parameters that our trainer leaves on the same rollouts: FSDP and Megatron engines.

VERL_ROOT=... pytest -m host --require host tests/test_verl_engines.py

It needs what verl imports: tensordict, hydra-core, transformers, accelerate, peft, codetiming, datasets, dill, fastapi, orjson,
pandas, pillow, ray, uvicorn. Red here means that verl has changed what it calls, or that our loss gets another scale from it.

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

import functools
import importlib.util
import os
import random
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_hf import save_tokenizer, small_model
from test_whole_host import VOCABULARY, group_of, samples_of
from torch import Tensor

from megatron_rl.config import PolicyLossConfig
from megatron_rl.megatron.cpu import install_cpu_support
from megatron_rl.megatron.model import transformer_config
from megatron_rl.testing.ranks import run_ranks
from megatron_rl.train.hf_weights import build_hf_model, read_hf_model, save_hf_checkpoint
from megatron_rl.train.rollouts import Sample
from megatron_rl.train.trainer import PolicyTrainer, TrainerSettings

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[train]'")
NEEDED = "tensordict hydra accelerate peft codetiming datasets dill fastapi orjson pandas PIL ray uvicorn".split()
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.host("VERL_ROOT"),
    pytest.mark.megatron,
    pytest.mark.skipif(bool(MISSING), reason=f"verl's own requirements are not installed: {', '.join(MISSING)}"),
]


# A rank of verl's own worker

MAX_SEQUENCE_LENGTH = 64
GROUP_SIZE = 4  # rollouts of a prompt
# With this eps Adam's step follows the size of a gradient, and not its sign, which rounding decides where a gradient is near 0. A
# gradient that is clipped would have one size under each aggregation.
LR, EPS, BETA2, CLIP_GRAD = 3e-3, 1e-3, 0.95, 1e9


@dataclass(frozen=True, kw_only=True)
class EngineLayout:
    """How a mini-batch is laid out."""

    engine: str  # fsdp2 or megatron
    world_size: int = 1
    micro_batch_size: int | None = None  # None: dynamic batch sizes
    parallel: dict[str, int] = field(default_factory=dict)  # sizes of the Megatron engine
    has_our_log_probs: bool = False
    is_fused: bool = False  # use_fused_kernels

    def __str__(self) -> str:
        sizes = [f"{name.split('_')[0]} {size}" for name, size in self.parallel.items()]
        batches = "dynamic batches" if self.micro_batch_size is None else f"micro-batches of {self.micro_batch_size}"
        head = ", fused head" if self.is_fused else ", our log-probabilities" if self.has_our_log_probs else ""
        return f"{self.engine}, {self.world_size} ranks, {', '.join([*sizes, batches])}{head}"


def run_verl(
    rank: int,
    root: str,
    folder: str,
    layout: EngineLayout,
    runs: Sequence[dict[str, Any]],
    rollouts: Sequence[dict[str, Any]],
) -> list[dict[str, Tensor]]:
    """The weights that each run leaves, by their names in the folder's format; on the first rank. runs: what a launch line sets of
    the actor. rollouts: as_rollout of each optimiser step."""
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
        use_remove_padding=layout.engine == "megatron",
        enable_gradient_checkpointing=False,
        use_fused_kernels=layout.is_fused,
        fused_kernel_options={"impl_backend": "triton"},
    )
    batches = {
        "use_dynamic_bsz": layout.micro_batch_size is None,
        "micro_batch_size_per_gpu": layout.micro_batch_size,
        "max_token_len_per_gpu": 40,
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


def train(worker: Any, actor: dict[str, Any], rollouts: Sequence[dict[str, Any]], layout: EngineLayout) -> None:
    """As verl's trainer: the parts to the workers, update_actor. The batch has the columns that verl's agent loops write."""
    from verl.utils import tensordict_utils as tu
    from verl.workers import config as configs
    from verl.workers.utils.losses import ppo_loss
    from verl.workers.utils.padding import left_right_2_no_padding

    loss = configs.PolicyLossConfig(loss_mode=actor["loss_mode"])
    others = {name: value for name, value in actor.items() if name != "loss_mode"}
    sizes = {"rollout_n": GROUP_SIZE, "ppo_micro_batch_size_per_gpu": 1}
    strategy = "megatron" if layout.engine == "megatron" else "fsdp"
    worker.set_loss_fn(partial(ppo_loss, config=configs.ActorConfig(strategy=strategy, policy_loss=loss, **sizes, **others)))
    for rollout in rollouts:
        number = len(rollout["uid"])
        parts = number // worker.engine.get_data_parallel_size()
        place = worker._query_dispatch_info("train")
        part = slice(place * parts, (place + 1) * parts)
        own = {name: values[part] for name, values in rollout.items()}
        data = left_right_2_no_padding(tu.get_tensordict(own, non_tensor_dict={"temperature": TEMPERATURE}))
        tu.assign_non_tensor(
            data,
            calculate_entropy=False,
            global_batch_size=number,
            mini_batch_size=number,
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

    def __init__(self, folder: str):
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

        model_parallel_cuda_manual_seed(0)
        self._model = read_hf_model(folder)
        is_parallel = parallel_state.get_tensor_model_parallel_world_size() > 1
        options = self._model.transformer_options()
        self.config = transformer_config(**options, sequence_parallel=is_parallel, variable_seq_lengths=True)

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
        chunk = build_hf_model(self._model, self.config, **sizes)
        return [DistributedDataParallel(self.config, DistributedDataParallelConfig(**ddp_config), chunk)]

    def load_weights(self, module: list, path: str) -> None:
        """`build` has loaded them."""


PROMPTS, ROLLOUTS, DIVISOR, TEMPERATURE = 3, 3, 16, 0.9
SPECIAL = 2  # ids in front, of which transformers gives padding no gradient
CLIPS = {"grpo": (0.2, 0.28), "gspo": (0.04, 0.03), "cispo": (1.0, 0.28)}
NO_DUAL_CLIP = {"clip_ratio_c": 1e9}
# Of what the steps have moved. Float32, three steps; a sample that counts twice is 0.1.
LIMIT = 1e-5
AGGREGATIONS = ("sample_mean", "prompt_mean", "token_mean", "constant")
FSDP = EngineLayout(engine="fsdp2", micro_batch_size=12)
MEGATRON = replace(FSDP, engine="megatron")
TP, PP, CP = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
LAYOUTS = [
    FSDP,
    replace(FSDP, micro_batch_size=3),
    replace(FSDP, world_size=2, micro_batch_size=2),
    replace(FSDP, world_size=2, micro_batch_size=None),
    MEGATRON,
    replace(MEGATRON, world_size=2, micro_batch_size=2),
    replace(MEGATRON, world_size=2, micro_batch_size=None),
    replace(MEGATRON, world_size=2, micro_batch_size=3, parallel={CP: 2}),
    replace(MEGATRON, world_size=4, micro_batch_size=3, parallel={CP: 2}),
    replace(MEGATRON, world_size=2, micro_batch_size=4, parallel={TP: 2}),
    replace(MEGATRON, world_size=2, micro_batch_size=3, parallel={PP: 2}),
]
# By our log-probabilities and our head.
LAYOUTS += [
    replace(FSDP, world_size=2, micro_batch_size=2, has_our_log_probs=True),
    *(
        replace(MEGATRON, world_size=2, micro_batch_size=3, parallel={size: 2}, has_our_log_probs=True, is_fused=is_fused)
        for size in (CP, PP)
        for is_fused in (False, True)
    ),
    replace(MEGATRON, world_size=2, micro_batch_size=4, parallel={TP: 2}, has_our_log_probs=True, is_fused=True),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    small_model(
        vocab_size=VOCABULARY + SPECIAL, head_dim=16, eos_token_id=0, initializer_range=0.1, tie_word_embeddings=False
    ).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@functools.cache
def rollouts() -> list[list[Sample]]:
    """Ragged prompts and responses, masked tokens in their middle, and a sample without an unmasked token."""
    numbers, made = random.Random(5), []
    for _ in range(ROLLOUTS):
        samples = samples_of([record for group in range(PROMPTS) for record in group_of(numbers, group, True)])
        old = [[numbers.gauss(-3.2, 0.3) for _ in range(sample.response_length)] for sample in samples]
        both = zip(samples, old, strict=True)
        made.append([replace(one, tokens=one.tokens + SPECIAL, old_log_probs=values) for one, values in both])
    return made


def as_rollout(samples: list[Sample]) -> dict[str, Any]:
    """The batch of a step as verl's trainer holds it: left-padded prompts, right-padded responses."""
    prompts = max(len(sample.tokens) - sample.response_length for sample in samples)
    width = max(sample.response_length for sample in samples)
    rows = {name: torch.zeros(len(samples), prompts + width, dtype=torch.int64) for name in ("input_ids", "attention_mask")}
    of_response = {name: torch.zeros(len(samples), width) for name in ("response_mask", "old_log_probs")}
    for row, sample in enumerate(samples):
        start = prompts - (len(sample.tokens) - sample.response_length)
        rows["input_ids"][row, start : start + len(sample.tokens)] = sample.tokens
        rows["attention_mask"][row, start : start + len(sample.tokens)] = 1
        of_response["response_mask"][row, : sample.response_length] = sample.loss_mask.float()
        of_response["old_log_probs"][row, : sample.response_length] = sample.old_log_probs
    positions = (rows["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    halves = {"prompts": rows["input_ids"][:, :prompts], "responses": rows["input_ids"][:, prompts:]}
    tensors = {**rows, **halves, **of_response, "position_ids": positions}
    tensors["response_mask"] = tensors["response_mask"].long()
    tensors["advantages"] = torch.tensor([sample.advantage for sample in samples])[:, None] * tensors["response_mask"]
    return tensors | {"uid": [sample.prompt_id for sample in samples]}


def verl_run(loss: str, aggregation: str) -> dict[str, Any]:
    low, high = CLIPS[loss]
    actor = {"loss_mode": f"megatron_rl.{loss}.{aggregation}", "clip_ratio_low": low, "clip_ratio_high": high}
    actor |= {} if loss == "cispo" else NO_DUAL_CLIP
    return actor | ({"loss_scale_factor": DIVISOR} if aggregation == "constant" else {})


def truth_on_rank(rank: int, folder: str) -> list[dict[str, Tensor]]:
    """The weights that our trainer leaves of each row, by their names in the folder's format."""
    found, model = [], read_hf_model(folder)
    for loss, aggregation in ROWS:
        low, high = CLIPS[loss]
        config = PolicyLossConfig(
            policy_loss=loss,
            loss_aggregation=aggregation,
            loss_aggregation_divisor=DIVISOR if aggregation == "constant" else None,
            clip_ratio_low=low,
            clip_ratio_high=high,
            policy_temperature=TEMPERATURE,
            samples_per_prompt=None if aggregation != "prompt_mean" else GROUP_SIZE,
        )
        settings = TrainerSettings(
            num_layers=model.num_layers,
            hidden_size=model.hidden_size,
            num_attention_heads=model.num_attention_heads,
            vocab_size=model.vocab_size,
            max_sequence_length=64,
            lr=LR,
            adam_beta2=BETA2,
            adam_eps=EPS,
            clip_grad=CLIP_GRAD,
            hf_model=model,
        )
        trainer = PolicyTrainer(settings, config, torch.device("cpu"))
        for samples in rollouts():
            trainer.step([samples])
        saved = Path(mkdtemp(dir=folder), "saved")
        trainer.save_hf(saved)
        found.append(weights_in(saved))
    return found


def differences(found: dict[str, Tensor], truth: dict[str, Tensor], before: dict[str, Tensor]) -> float:
    """The norm of the difference over the norm of what the steps have moved."""
    assert found.keys() == truth.keys() == before.keys()
    moved = sum(float((truth[name] - value).double().square().sum()) for name, value in before.items())
    return (sum(float((found[name] - value).double().square().sum()) for name, value in truth.items()) / moved) ** 0.5


ROWS = [(loss, aggregation) for loss in CLIPS for aggregation in AGGREGATIONS]


@pytest.fixture(scope="module")
def truth(folder):
    return run_ranks(truth_on_rank, 1, str(folder), timeout=300)[0]


@pytest.fixture(scope="module")
def before(folder):
    return weights_in(folder)


def trained_by_verl(folder: Path, layout: EngineLayout, runs: list[dict]) -> list[dict[str, Tensor]]:
    arguments = (os.environ["VERL_ROOT"], str(folder), layout, runs, [as_rollout(samples) for samples in rollouts()])
    return run_ranks(run_verl, layout.world_size, *arguments, use_megatron=False, timeout=600)[0]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_verls_training_worker_leaves_the_parameters_of_our_trainer(folder, truth, before, layout):
    found = trained_by_verl(folder, layout, [verl_run(*row) for row in ROWS])
    errors = {row: differences(weights, expected, before) for row, weights, expected in zip(ROWS, found, truth, strict=True)}
    assert max(errors.values()) < LIMIT, errors
