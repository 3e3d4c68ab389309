"""A small policy in any layout, its samples, gradients and whole runs, in the ranks of a pool; never an assertion of its own."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_rl.config import PolicyLossConfig
from megatron_rl.layout.groups import resolve_groups
from megatron_rl.megatron.model import find_gpt_model, find_output_layer, global_parameter_name
from megatron_rl.testing.invariance import StepSample
from megatron_rl.train.loop import TrainingRun
from megatron_rl.train.options import TrainOptions
from megatron_rl.train.rollout_files import cut_rollouts, save_rollouts
from megatron_rl.train.rollouts import RolloutBatch, Sample
from megatron_rl.train.session import restore, rollouts_of
from megatron_rl.train.tasks import make_task
from megatron_rl.train.trainer import PolicyTrainer, TrainerSettings
from megatron_rl.train.writers import METRICS_FILE, TOKENS_PER_SECOND, read_metrics

TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
# Equal runs differ in these metrics alone.
TIMING_METRICS = ("seconds", TOKENS_PER_SECOND)
VPP = "virtual_pipeline_model_parallel_size"
# An odd number: at tp 2 and 4 the vocabulary is padded.
VOCABULARY = 11
CPU = torch.device("cpu")
# Gradients are compared as they are, so nothing may be clipped, and no step may move the weights.
NO_CLIPPING, NO_MOVE = 1e9, 0.0
STILL = {"clip_grad": NO_CLIPPING, "lr": NO_MOVE}


def tiny_trainer(config: PolicyLossConfig | None = None, **settings) -> PolicyTrainer:
    """A policy of two layers on this rank's part of the layout."""
    values = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "vocab_size": VOCABULARY,
        "max_sequence_length": 32,
        **settings,
    }
    config = PolicyLossConfig(clip_ratio_low=0.2, clip_ratio_high=0.3) if config is None else config
    return PolicyTrainer(TrainerSettings(**values), config, CPU)


def lively(trainer: PolicyTrainer, factor: float = 20.0) -> PolicyTrainer:
    """The policy with larger logits: at its initial weights every token is nearly as likely as any other."""
    head = find_output_layer(trainer.model)
    if head is not None:
        with torch.no_grad():
            head.weight.mul_(factor)
    return trainer


def ragged_step(shapes: Sequence[tuple[int, int]] = ((3, 5), (1, 7), (9, 2), (4, 1), (2, 6), (6, 3)), seed: int = 0):
    """Samples of (prompt, response) lengths, two a prompt, every third response token masked, no old log-probabilities."""
    generator = torch.Generator().manual_seed(seed)
    return [
        StepSample(
            tokens=torch.randint(VOCABULARY, (prompt + response,), generator=generator).tolist(),
            loss_mask=[int(t % 3 != 2) for t in range(response)],
            prompt_id=f"prompt {index // 2}",
            advantage=float(torch.randn((), generator=generator)),
        )
        for index, (prompt, response) in enumerate(shapes)
    ]


def make_batch(index: int, sizes: list[list[int]], *, old: float | None = -2.2, seed: int = 0) -> RolloutBatch:
    """A rollout of --task repeat: one prompt for each list of response lengths. The last token of a long response is masked."""
    generator = torch.Generator().manual_seed(1000 * seed + index)
    samples = []
    for prompt, size in ((prompt, size) for prompt, group in enumerate(sizes) for size in group):
        response = torch.randint(8, (size,), generator=generator).tolist()
        advantage = float(torch.randn((), generator=generator))
        samples.append(
            Sample(
                prompt_id=f"p{prompt}",
                tokens=[8, prompt % 8, *response],
                response_length=size,
                loss_mask=[1] * min(size, 3) + [0] * (size - 3),
                reward=size / 4,
                advantage=advantage,
                # Near the policy's: ln 9 = 2.2; so ratios move and some of them clip.
                old_log_probs=None if old is None else [old + 0.1 * ((t + prompt) % 3 - 1) for t in range(size)],
                index=len(samples),
            )
        )
    return RolloutBatch(samples=samples, rollout_index=index)


def masked(batch: RolloutBatch) -> RolloutBatch:
    return replace(batch, samples=[replace(sample, loss_mask=[0] * sample.response_length) for sample in batch.samples])


def write_file(path: Path, batches: Sequence[RolloutBatch]) -> Path:
    for index, batch in enumerate(batches):
        save_rollouts(path, replace(batch, rollout_index=index))
    return path


# Response lengths of 1 to 4 tokens, 1 to 5 prompts of four samples in a rollout: 19 prompts, 76 documents.
RAGGED = [[[1 + (3 * r + 5 * g + i * i) % 4 for i in range(4)] for g in range(n)] for r, n in enumerate((3, 5, 1, 4, 2, 4))]


def ragged_batches() -> list[RolloutBatch]:
    return [make_batch(index, sizes) for index, sizes in enumerate(RAGGED)]


def with_shifted_old_log_probs(trainer: PolicyTrainer, microbatches, shift: float = 0.05):
    """Old log-probabilities beside the policy's own, alternately above and below, so that ratios are not all 1."""
    values = trainer.log_probs(microbatches)
    return [
        [
            replace(sample, old_log_probs=[value + shift * (-1) ** t for t, value in enumerate(row)])
            for sample, row in zip(samples, rows, strict=True)
        ]
        for samples, rows in zip(microbatches, values, strict=True)
    ]


def weights_of(trainer: PolicyTrainer) -> dict[str, tuple[int | None, int, torch.Tensor]]:
    """global name -> (sharded dimension or None, tp rank, this rank's values)."""
    return named_shards(find_gpt_model(trainer.model), lambda parameter: parameter.detach())


def gradients_of(trainer: PolicyTrainer) -> dict[str, tuple[int | None, int, torch.Tensor]]:
    """The reduced gradients of the last step: with NO_CLIPPING the optimiser has left them as they were."""
    return named_shards(find_gpt_model(trainer.model), lambda parameter: parameter.main_grad)


def named_shards(model, value_of) -> dict[str, tuple[int | None, int, torch.Tensor]]:
    """Of each parameter of a GPTModel: global name -> (sharded dimension or None, tp rank, value_of(parameter))."""
    shards, tp_rank = {}, resolve_groups().tp.rank()
    for name, parameter in model.named_parameters():
        dim = parameter.partition_dim if vars(parameter).get("tensor_model_parallel", False) else None
        shards[global_parameter_name(model, name)] = (dim, tp_rank, value_of(parameter).float().clone())
    return shards


def whole(answers: Sequence[dict], vocabulary: int = VOCABULARY) -> dict[str, torch.Tensor]:
    """Whole tensors by name from the shards of all ranks; the vocabulary's padding is cut off."""
    parts: dict[str, dict[int, torch.Tensor]] = {}
    dims = {}
    for answer in answers:
        for name, (dim, tp_rank, value) in answer.items():
            dims[name] = dim
            parts.setdefault(name, {})[tp_rank if dim is not None else 0] = value
    joined = {}
    for name, shards in parts.items():
        tensor = shards[0] if dims[name] is None else torch.cat([shards[rank] for rank in sorted(shards)], dims[name])
        joined[name] = tensor[:vocabulary] if "word_embeddings" in name or "output_layer" in name else tensor
    return joined


def relative_difference(found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> float:
    """Norm of the difference over the norm of the truth, all tensors as one vector."""
    assert found.keys() == truth.keys()
    difference = sum(float((found[name] - value).double().square().sum()) for name, value in truth.items())
    return (difference / sum(float(value.double().square().sum()) for value in truth.values())) ** 0.5


def run_loop(
    output_dir: str | Path,
    config: PolicyLossConfig,
    options: dict,
    *,
    settings: dict | None = None,
    resume: bool = False,
    on_trainer=None,
):
    """What `megatron-rl train` does on this rank once the process groups stand: (outcome, final weights of this rank)."""
    options = TrainOptions(**{"output_dir": str(output_dir), "tensorboard": False, "prompts_per_rollout": 4, **options})
    task = make_task(options.task)
    trainer = tiny_trainer(
        config,
        **{
            "vocab_size": task.vocab_size,
            "max_sequence_length": task.max_prompt_tokens + task.max_new_tokens,
            "packed": options.packed,
            "router_replay": options.router_replay,
            **(settings or {}),
        },
    )
    if on_trainer is not None:
        on_trainer(trainer)
    start, _ = restore(trainer, replace(options, resume=resume))
    if options.save_rollouts is not None and dist.get_rank() == 0:
        cut_rollouts(options.save_rollouts, start.progress.num_rollouts)
    rollouts = rollouts_of(trainer, task, options, first=start.progress.num_rollouts)
    return TrainingRun(trainer, rollouts, options, start).run(), weights_of(trainer)


def metrics_of(output_dir: str | Path) -> list[dict]:
    """The rows of metrics.jsonl without those that a clock decides."""
    rows = read_metrics(Path(output_dir) / METRICS_FILE)
    return [{name: value for name, value in row.items() if name not in TIMING_METRICS} for row in rows]


def unlike_metrics(found: list[dict], truth: list[dict], *, relative: float = 1e-5, absolute: float = 1e-6) -> list[str]:
    """One line for each metric of a step that is neither within `relative` nor within `absolute` of the truth."""
    lines = [] if len(found) == len(truth) else [f"{len(found)} rows for {len(truth)}"]
    for row, expected in itertools.zip_longest(found, truth, fillvalue={}):
        if row.keys() != expected.keys():
            lines.append(f"step {expected.get('step')}: metrics {sorted(row.keys() ^ expected.keys())}")
        for name in row.keys() & expected.keys():
            difference = abs(row[name] - expected[name])
            if difference > absolute and difference > relative * abs(expected[name]):
                lines.append(f"step {expected['step']}: {name} is {row[name]}, expected {expected[name]}")
    return lines
