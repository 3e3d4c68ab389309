"""One optimiser step through TRL's trainer with ours: a stand-in of its trainer, ranks as threads, a float64 truth.

The stand-in generates, splits and buffers completions as TRL f2cd57710 does; the log-probabilities of a sample are parameters.
"""

from __future__ import annotations

import random
import sys
import threading
import types
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from dense_row_cases import Result, RowCase, gradients_of, padded, parameters_of, samples_of
from torch import Tensor

from megatron_rl.loss_hub import get_loss_aggregation, get_policy_loss
from megatron_rl.testing.layout_step import StepSample
from megatron_rl.testing.reference import CLIPS, DIVISOR

GENERATIONS = 4


@dataclass
class Config:
    """TRL's GRPOConfig, as far as our trainer reads it."""

    loss_type: str = "dapo"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    beta: float = 0.0
    entropy_coef: float = 0.0
    use_liger_kernel: bool = False
    importance_sampling_level: str = "token"
    top_entropy_quantile: float = 1.0
    use_adaptive_entropy: bool = False
    off_policy_mask_threshold: float | None = None
    use_bias_correction_kl: bool = False
    use_vllm: bool = False
    vllm_importance_sampling_correction: bool = True
    vllm_importance_sampling_mode: str = "sequence_mask"
    gradient_accumulation_steps: int = 1
    steps_per_generation: int = 1
    num_iterations: int = 1
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None
    temperature: float = 1.0
    generation_kwargs: dict | None = None
    entropy_target: float = 0.2


@dataclass(frozen=True, kw_only=True)
class Case(RowCase):
    accumulation: int = 1
    generated: int = 1
    """Micro-batches of a generation, steps_per_generation."""
    iterations: int = 1

    def __str__(self) -> str:
        return (
            f"{self.loss}.{self.aggregation} dp{self.dp} accumulation {self.accumulation} of {self.generated} x {self.iterations}"
        )


class Ranks:
    """Collectives of threads, one a rank."""

    def __init__(self, size: int):
        self.size, self.barrier, self.given = size, threading.Barrier(size), [torch.empty(0)] * size

    def exchange(self, rank: int, value: Tensor) -> list[Tensor]:
        self.given[rank] = value
        self.barrier.wait(60)
        found = list(self.given)
        self.barrier.wait(60)
        return found


@dataclass
class Accelerator:
    ranks: Ranks
    process_index: int

    @property
    def num_processes(self) -> int:
        return self.ranks.size

    def gather(self, value: Tensor) -> Tensor:
        return torch.cat(self.ranks.exchange(self.process_index, value))

    def reduce(self, value: Tensor, reduction: str) -> Tensor:
        return torch.stack(self.ranks.exchange(self.process_index, value)).sum(0)


@dataclass
class Model:
    """What one rank trains on: its columns, and a function of log-probabilities with gradient."""

    columns: Mapping[str, Tensor]
    log_probs_of: Callable[[Tensor], Tensor]
    accelerator: Accelerator
    training: bool = True
    called: list[str] = field(default_factory=list)


class GRPOTrainer:
    """The contract of TRL's."""

    def __init__(self, model, reward_funcs=None, args=None, train_dataset=None, rollout_func=None):
        self.model, self.args, self.accelerator = model, args, model.accelerator
        self.num_generations = self.num_generations_eval = GENERATIONS
        self.num_iterations, self.aux_loss_enabled = args.num_iterations, False
        self._buffered_inputs, self._step = None, 0
        self._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}

    def _generate_and_score_completions(self, inputs):
        return dict(self.model.columns)

    def _prepare_inputs(self, generation_batch):
        if self._step % (self.args.steps_per_generation * self.num_iterations) == 0:
            whole = self._generate_and_score_completions(generation_batch)
            order = torch.tensor(random.Random(self._step).sample(range(len(whole["advantages"])), len(whole["advantages"])))
            parts = self.args.steps_per_generation
            split = {name: value[order].chunk(parts) for name, value in whole.items()}
            self._buffered_inputs = [{name: chunks[part] for name, chunks in split.items()} for part in range(parts)]
        return self._buffered_inputs[self._step % self.args.steps_per_generation]

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, compute_entropy=False, **others
    ):
        log_probs = model.log_probs_of(input_ids[:, -logits_to_keep:])
        return log_probs, -log_probs, None

    def _compute_loss(self, model, inputs):
        raise AssertionError("TRL's own loss is not asked")


def emulated_trl() -> types.ModuleType:
    """The modules that ours imports."""
    package = types.ModuleType("trl")
    package.__path__ = []
    trainer, inner = types.ModuleType("trl.trainer"), types.ModuleType("trl.trainer.grpo_trainer")
    trainer.__path__ = []
    package.GRPOTrainer = inner.GRPOTrainer = GRPOTrainer  # type: ignore[attr-defined]
    sys.modules |= {"trl": package, "trl.trainer": trainer, "trl.trainer.grpo_trainer": inner}
    return package


def config_of(case: Case, **settings: Any) -> Config:
    clip, parameters = CLIPS[case.loss], parameters_of(case)
    clips = {} if clip is None else {"epsilon": clip[0], "epsilon_high": clip[1]}
    clips |= {"delta": 3.0} if "clip_ratio_c" in parameters else {}
    steps = {"steps_per_generation": case.generated, "gradient_accumulation_steps": case.accumulation}
    return Config(f"megatron_rl.{case.loss}.{case.aggregation}", **(clips | steps | {"num_iterations": case.iterations} | settings))


def own_of(case: Case) -> dict[str, Any]:
    return {"loss_aggregation_divisor": DIVISOR} if get_loss_aggregation(case.aggregation).takes_divisor else {}


def step_of(case: Case) -> tuple[list[StepSample], list[Tensor]]:
    """Samples of whole prompt groups, one of them fully masked."""
    samples, log_probs = samples_of(case)
    samples = [replace(sample, prompt_id=str(index // GENERATIONS)) for index, sample in enumerate(samples)]
    samples[1] = replace(samples[1], loss_mask=[0] * len(samples[1].loss_mask))
    return samples, log_probs


def run_step(
    case: Case,
    samples: Sequence[StepSample],
    log_probs: Sequence[Tensor],
    trainer_of: Callable[..., Any],
    poison: float | None = None,  # in masked positions
    own: Mapping[str, Any] | None = None,
    gap: float | None = None,  # of the policy's log-probabilities over the reference's
    **settings: Any,
) -> Result:
    """The gradient that the optimiser gets of the first step, and the loss over ranks and micro-batches."""
    width = max(len(sample.loss_mask) for sample in samples)
    leaves = [values.float().requires_grad_() for values in log_probs]
    mask = padded([sample.loss_mask for sample in samples], width).bool()
    needs_sampler = settings.get("use_vllm", False) or "rollout_log_probs" in get_policy_loss(case.loss).inputs_needed
    columns = {
        "prompt_ids": torch.zeros(len(samples), 1, dtype=torch.int64),
        "prompt_mask": torch.ones(len(samples), 1, dtype=torch.int64),
        "completion_ids": torch.arange(len(samples))[:, None].expand(-1, width),
        "completion_mask": mask.long(),
        "advantages": torch.tensor([sample.advantage for sample in samples]),
    }
    has_old = any(sample.old_log_probs is not None for sample in samples)  # TRL measures none where a step trains what it generated
    if has_old:
        columns["old_per_token_logps"] = padded([sample.old_log_probs or [] for sample in samples], width)
    if needs_sampler:
        sampled = [sample.rollout_log_probs or sample.old_log_probs or [] for sample in samples]
        columns["sampling_per_token_logps"] = padded(sampled, width)
    if gap is not None:
        columns["ref_per_token_logps"] = padded([values.tolist() for values in log_probs], width) - gap
    if poison is not None and has_old:
        columns["old_per_token_logps"] = torch.where(mask, columns["old_per_token_logps"], poison)

    def log_probs_of(completion_ids: Tensor) -> Tensor:
        rows = [torch.nn.functional.pad(leaves[index], (0, width - len(leaves[index]))) for index in completion_ids[:, 0].tolist()]
        found = torch.stack(rows)
        return found if poison is None else torch.where(mask[completion_ids[:, 0]], found, poison)

    ranks, share = Ranks(case.dp), len(samples) // case.dp
    lock = threading.Lock()

    def train(rank: int) -> tuple[float, dict]:
        own_columns = {name: value[rank * share : (rank + 1) * share] for name, value in columns.items()}
        model = Model(own_columns, log_probs_of, Accelerator(ranks, rank))
        trainer = trainer_of(model, args=config_of(case, **settings), megatron_rl=own_of(case) | dict(own or {}))
        total = 0.0
        for _ in range(case.accumulation):
            inputs = trainer._prepare_inputs(None)
            loss = trainer._compute_loss(model, inputs) / case.dp  # DDP: mean over ranks
            with lock:
                loss.backward()
            total += float(loss.detach())
            trainer._step += 1
        return total, dict(trainer._metrics["train"])

    with ThreadPoolExecutor(case.dp) as pool:
        found = list(pool.map(train, range(case.dp)))
    return Result(sum(total for total, _ in found), gradients_of(leaves), [metrics for _, metrics in found])
