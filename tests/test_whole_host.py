"""The hosts' own training actors, whole, leave the parameters that `megatron-rl train` leaves on the same recorded rollouts.

MILES_ROOT=... SLIME_ROOT=... MEGATRON_LM_ROOT=... pytest -m host --require host tests/test_whole_host.py

MEGATRON_LM_ROOT is a checkout of Megatron-LM at the tag of the installed megatron-core: the hosts call megatron.training, which no
package has. Red here means that a host has changed what it calls, or that a hook trains something else than our command.

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
import json
import os
import random
import sys
import types
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import trainer_cases
from forked import forked
from host_checkouts import STUBBED, load_checkout, roots_by_environment, silent_logging
from torch import Tensor
from trainer_cases import named_shards

from megatron_rl.commands import main as command_line
from megatron_rl.hosts.launch import with_our_flags
from megatron_rl.megatron.cpu import install_cpu_support
from megatron_rl.megatron.model import find_gpt_model, gpt_layer_spec, layout_independent_normal
from megatron_rl.testing.ranks import run_ranks
from megatron_rl.train.rollout_files import save_rollouts
from megatron_rl.train.rollouts import RolloutBatch, Sample, group_advantages
from megatron_rl.train.trainer import PolicyTrainer

MEGATRON_ROOT = "MEGATRON_LM_ROOT"
ROOTS = roots_by_environment()
pytestmark = [
    pytest.mark.host,
    pytest.mark.megatron,
    pytest.mark.skipif(MEGATRON_ROOT not in os.environ, reason=f"needs a checkout of Megatron-LM: set {MEGATRON_ROOT} to its root"),
]
VOCABULARY, GROUP_SIZE, PROMPTS, STEPS, ROLLOUTS = 12, 4, 4, 2, 2
DIVISOR = 16
# Adam's first step is the sign of a gradient. Of 3 to 8 this seed alone has no entry so near 0 that rounding decides its sign: with
# the others our command is up to 5e-5 from itself in other micro-batches.
SEED = 7
LIMIT = 1e-5
CLIPS = {"grpo": (0.2, 0.28), "gspo": (0.04, 0.03), "cispo": (0.2, 0.28)}
# miles has no estimator of the other's name.
ESTIMATORS = ("grpo", "gspo")
LAYOUTS = {
    "dp2": "",
    "cp2": "--context-parallel-size 2",
    "tp2": "--tensor-model-parallel-size 2",
    "pp2": "--pipeline-model-parallel-size 2",
    "dp2 in dynamic batches": "--use-dynamic-batch-size --max-tokens-per-gpu 40",
    "tp2 with sp": "--tensor-model-parallel-size 2 --sequence-parallel",
}
REDUCER = "--custom-pg-loss-reducer-function-path megatron_rl.reducers.get_pg_loss_reducer"
CUSTOM_LOSS = (
    "--loss-type custom_loss --custom-loss-function-path megatron_rl.hooks.custom_loss "
    "--custom-megatron-before-train-step-hook-path megatron_rl.hooks.before_train_step"
)
# 8 rows of 12 float32 columns, 16 of 6.
FUSED = f"{CUSTOM_LOSS} --fused-lm-head-loss --max-logits-bytes 400"
ENTRIES = {"stock": "", "reducer": REDUCER, "custom_loss": CUSTOM_LOSS, "fused": FUSED}
REWARD_HOOK = "--custom-reward-post-process-path megatron_rl.hooks.reward_post_process"
INIT_HOOK = "--custom-megatron-init-path megatron_rl.hooks.custom_megatron_init"
MODEL = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --lr 3e-3 --clip-grad 1.0"
OF_HOST = f"""
    {MODEL} --adam-beta2 0.95 --weight-decay 0 --vocab-size {VOCABULARY} --make-vocab-size-divisible-by 1
    --tokenizer-type NullTokenizer --seq-length 64 --init-method-std 0.05 --disable-bias-linear --normalization RMSNorm
    --position-embedding-type rope --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    --lr-decay-style constant --transformer-impl local --spec test_whole_host layer_spec --no-rope-fusion --no-masked-softmax-fusion
    --no-persist-layer-norm --no-gradient-accumulation-fusion --distributed-backend gloo --data-pad-size-multiplier 4
    --actor-num-nodes 1 --actor-num-gpus-per-node 2 --num-gpus-per-node 2 --hf-checkpoint unused --debug-train-only
    --rollout-batch-size {PROMPTS} --n-samples-per-prompt {GROUP_SIZE} --num-rollout {ROLLOUTS}
    --micro-batch-size 2 --disable-rollout-global-dataset
"""


# A rank of a host

# megatron.training is Megatron-LM's own here; its RL folder needs pydantic, its tokenizers six and regex.
STUBBED_OF_WHOLE = (*(name for name in STUBBED if name != "megatron.training"), "megatron.rl", "six", "regex")
STUBBED_OF_WHOLE += tuple("fastapi omegaconf polars pybase64 pylatexenc setproctitle starlette tokenizers tqdm uvicorn".split())


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
                normal = layout_independent_normal(chunk, name, parameter, seed=0)
                parameter.copy_(mean + chunk.config.init_method_std * normal)
    optimizer.reload_model_params()
    return -1, 0


class WholeHost:
    """A host's training process, of one rank. start: (the actor, the rollout that it begins with)."""

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


# Its runs and ours


@dataclass(frozen=True)
class WholeCase:
    entry: str
    loss: str
    aggregation: str

    def __str__(self) -> str:
        return f"{self.entry} {self.loss} {self.aggregation}"

    @property
    def aggregation_flags(self) -> str:
        divisor = f" --loss-aggregation-divisor {DIVISOR}" if self.aggregation == "constant" else ""
        return f"--loss-aggregation {self.aggregation}{divisor}"

    @property
    def data(self) -> str:
        """A host that divides by the step's tokens counts one for a fully masked sample, and our hooks refuse it."""
        return "without_masked_sample" if self.aggregation == "token_mean" else "with_masked_sample"

    def of_host(self, folder: Path) -> list[str]:
        low, high = CLIPS[self.loss]
        estimator = self.loss if self.loss in ESTIMATORS else f"grpo --policy-loss {self.loss}"
        words = f"{OF_HOST} --advantage-estimator {estimator} --eps-clip {low} --eps-clip-high {high} {ENTRIES[self.entry]}"
        words += f" --load-debug-rollout-data {folder}/{self.data}/{{rollout_id}}.pt --ref-load {folder}"
        words += f" --custom-config-path {folder}/fp32.yaml"
        if self.entry != "stock":
            words += f" {self.aggregation_flags} {INIT_HOOK}"
        words += f" --num-steps-per-rollout {STEPS}"
        words += {"prompt_mean": f" {REWARD_HOOK}", "token_mean": " --calculate-per-token-loss"}.get(self.aggregation, "")
        return words.split()

    def of_train(self, folder: Path) -> list[str]:
        low, high = CLIPS[self.loss]
        return f"""
            {MODEL} --vocab-size {VOCABULARY} --rollouts {folder}/{self.data}.jsonl --steps-per-rollout {STEPS} --no-bf16
            --policy-loss {self.loss} --clip-ratio-low {low} --clip-ratio-high {high} --samples-per-prompt {GROUP_SIZE}
            --output-dir {folder}/{self.loss}-{self.aggregation} --no-tensorboard
            {self.aggregation_flags}
        """.split()


AGGREGATIONS = ("sample_mean", "prompt_mean", "constant")
CASES = [WholeCase("stock", loss, "sample_mean") for loss in ESTIMATORS]
CASES += [WholeCase(entry, loss, name) for entry in ("reducer", "custom_loss") for loss in ESTIMATORS for name in AGGREGATIONS]
CASES += [WholeCase(entry, "grpo", "token_mean") for entry in ("stock", "reducer", "custom_loss", "fused")]
ROWS = [(layout, case) for layout in ("dp2", "cp2", "tp2", "pp2") for case in CASES]
ROWS += [
    (layout, WholeCase("fused", loss, "constant" if loss == "gspo" else "sample_mean"))
    for layout in ("dp2", "cp2", "tp2 with sp", "pp2")
    for loss in CLIPS
]
ROWS += [
    (layout, case)
    for layout in ("dp2 in dynamic batches", "tp2 with sp")
    for case in (WholeCase("reducer", "grpo", "constant"), WholeCase("custom_loss", "gspo", "prompt_mean"))
]
HOSTS = sorted(ROOTS) or ["slime"]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    """The same rollouts for the hosts (one file a rollout) and for our command (one line a rollout)."""
    for name in ("models.gpt.gpt_layer_specs", "optimizer", "pipeline_parallel"):  # once, and not in each fork
        importlib.import_module(f"megatron.core.{name}")
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "fp32.yaml").write_text("bf16: false\n")
    for data in ("with_masked_sample", "without_masked_sample"):
        (folder / data).mkdir()
        numbers = random.Random(SEED)
        for rollout in range(ROLLOUTS):
            groups = range(rollout * PROMPTS, (rollout + 1) * PROMPTS)
            records = [record for group in groups for record in group_of(numbers, group, data == "with_masked_sample")]
            torch.save({"rollout_id": rollout, "samples": records}, folder / data / f"{rollout}.pt")
            save_rollouts(folder / f"{data}.jsonl", RolloutBatch(samples=samples_of(records), rollout_index=rollout))
    return folder


def group_of(numbers: random.Random, group: int, has_masked_sample: bool) -> list[dict]:
    """The samples of a prompt: ragged responses, masked tokens, in the second group a sample without unmasked tokens."""
    prompt = [numbers.randrange(VOCABULARY) for _ in range(numbers.randrange(1, 9))]
    records = []
    for place in range(GROUP_SIZE):
        length = numbers.randrange(1, 14)
        mask = [int(numbers.random() < 0.8) for _ in range(length)]
        if (group, place) == (1, 2):
            mask = [0] * length
        if not has_masked_sample and not any(mask):
            mask = [1] * length
        records.append(
            {
                "group_index": group,
                "index": group * GROUP_SIZE + place,
                "tokens": prompt + [numbers.randrange(VOCABULARY) for _ in range(length)],
                "response_length": length,
                "loss_mask": mask,
                "reward": numbers.gauss(0.0, 1.0),
                "status": "completed",
            }
        )
    return records


def samples_of(records: list[dict]) -> list[Sample]:
    prompt_ids = [str(record["group_index"]) for record in records]
    advantages = group_advantages([record["reward"] for record in records], prompt_ids)
    names = ("tokens", "response_length", "loss_mask", "reward", "index")
    return [
        Sample(prompt_id=prompt, advantage=advantage, old_log_probs=None, **{name: record[name] for name in names})
        for record, prompt, advantage in zip(records, prompt_ids, advantages, strict=True)
    ]


@pytest.fixture(scope="module")
def trained(recorded):
    """(loss, aggregation) -> trained_by_command of its case."""
    return functools.cache(lambda *case: trained_by_command(WholeCase("", *case).of_train(recorded)))


def trained_by_command(words: list[str]) -> tuple[dict, dict, list[float]]:
    """What `megatron-rl train` leaves on one rank: initial weights, last weights, gradient norms."""
    folder = Path(words[words.index("--output-dir") + 1])

    def child() -> int:
        seen = {}

        def of_trainer(trainer):
            return trainer_cases.whole([trainer_cases.weights_of(trainer)], VOCABULARY)

        def make(trainer, *given) -> None:
            initialise(trainer, *given)
            seen["first"] = of_trainer(trainer)

        def save(trainer, *given):
            torch.save((seen["first"], of_trainer(trainer)), folder.with_suffix(".pt"))
            return keep(trainer, *given)

        initialise, keep = PolicyTrainer.__init__, PolicyTrainer.save
        with mock.patch.object(PolicyTrainer, "__init__", make), mock.patch.object(PolicyTrainer, "save", save):
            return command_line.main(["train", *words])

    code, _, error = forked(child)
    assert code == 0, error
    with open(folder / "metrics.jsonl") as rows:
        norms = [json.loads(row)["grad_norm"] for row in rows]
    return (*torch.load(folder.with_suffix(".pt")), norms)


def trained_by_host(host: str, words: list[str]) -> list[tuple[dict, list[dict]]]:
    """New ranks for each launch: a host leaves its process groups, each with threads, and its functions in torch.distributed."""
    return run_ranks(run_whole, 2, host, ROOTS[host], os.environ[MEGATRON_ROOT], words, use_megatron=False)


def difference_of(of_ranks: list[dict], first: dict, last: dict) -> float:
    """The norm of the difference of the parameters over the norm of what the steps have moved."""
    found = trainer_cases.whole(of_ranks, VOCABULARY)
    moved, expected = ({name: weights[name] - value for name, value in first.items()} for weights in (found, last))
    return trainer_cases.relative_difference(moved, expected)


@pytest.mark.parametrize(("host", "layout", "case"), [(host, *row) for host in HOSTS for row in ROWS], ids=str)
def test_a_host_trains_what_our_command_trains(recorded, trained, host, layout, case):
    """Adam hides the scale of a gradient, so the norm that the host reports before it clips is compared too, step by step."""
    runs = trained_by_host(host, [*case.of_host(recorded), *LAYOUTS[layout].split()])
    first, last, norms = trained(case.loss, case.aggregation)
    difference = difference_of([weights for weights, _ in runs], first, last)
    (steps,) = (steps for _, steps in runs if steps)
    of_norms = max(abs(step["train/grad_norm"] / norm - 1) for step, norm in zip(steps, norms, strict=True))
    assert len(norms) == STEPS * ROLLOUTS
    assert of_norms < LIMIT, (steps, norms)
    assert difference < LIMIT
