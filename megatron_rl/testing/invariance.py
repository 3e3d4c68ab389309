"""One optimiser step on any layout of a real GPTModel, its loss and whole gradient: the promise as a property to test.

    with RankPool(4) as pool:
        truth = reference_step(pool, step, config)
        found = step_on_layout(pool, Layout(tensor=2, context=2, num_microbatches=2), step, config)
        assert found.gradient_error(truth) < 1e-5

It must never contain a factor that undoes a layout by hand: schedule, DDP and optimiser are Megatron's, as in a training run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_rl.config import PolicyLossConfig
from megatron_rl.layout.collectives import all_gather_stack, all_reduce_sum, broadcast_from_last
from megatron_rl.layout.context_parallel import padded_length
from megatron_rl.layout.groups import ParallelGroups, resolve_groups
from megatron_rl.megatron.batch import StepContext, make_packed_batch, make_padded_batch, weigh_samples
from megatron_rl.megatron.forward_step import check_finite, make_forward_step
from megatron_rl.megatron.model import build_gpt_model, global_parameter_name, transformer_config
from megatron_rl.metrics import combine_statistics as combine
from megatron_rl.metrics import finalise_metrics, reduce_statistics
from megatron_rl.testing.ranks import RankPool


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How a step is spread out. Sizes are those of the process groups; num_microbatches is per rank."""

    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    data: int = 1
    virtual_pipeline: int | None = None
    num_microbatches: int = 1
    sequence_parallel: bool = False
    packed: bool = False
    distributed_optimizer: bool = False
    average_in_collective: bool = False
    overlap_grad_reduce: bool = False
    calculate_per_token_loss: bool = False

    @property
    def world_size(self) -> int:
        return self.tensor * self.context * self.pipeline * self.data

    @property
    def model_parallel(self) -> dict[str, int]:
        """Arguments of initialize_model_parallel."""
        sizes = {
            "tensor_model_parallel_size": self.tensor,
            "context_parallel_size": self.context,
            "pipeline_model_parallel_size": self.pipeline,
        }
        if self.virtual_pipeline is not None:
            sizes["virtual_pipeline_model_parallel_size"] = self.virtual_pipeline
        return sizes

    def __str__(self) -> str:
        sizes = {"DP": self.data, "TP": self.tensor, "CP": self.context, "PP": self.pipeline, "VPP": self.virtual_pipeline}
        name = "x".join(f"{letters}{size}" for letters, size in sizes.items() if size and size > 1) or "one rank"
        flags = ("sequence_parallel", "packed", "distributed_optimizer", "average_in_collective", "overlap_grad_reduce")
        flags += ("calculate_per_token_loss",)
        return ", ".join([name, f"M{self.num_microbatches}", *(flag for flag in flags if getattr(self, flag))])


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSample:
    """A sample as plain numbers, so that it travels to any rank and into any other framework."""

    tokens: list[int]  # prompt and response
    loss_mask: list[int]  # one a response token
    prompt_id: str
    advantage: float
    old_log_probs: list[float] | None = None
    ref_log_probs: list[float] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TinyGPT:
    """The model of the property: small, deep enough for four pipeline stages, heads enough for four tensor ranks."""

    num_layers: int = 4
    hidden_size: int = 32
    num_attention_heads: int = 4
    vocab_size: int = 64
    true_vocab_size: int = 61  # three padded columns, all on the last tensor rank
    seed: int = 0


@dataclass(frozen=True, slots=True)
class StepResult:
    """loss: the step's L with its regularisers. gradient: the whole gradient by global parameter name, float64, on the CPU."""

    loss: float
    gradient: dict[str, Tensor]
    optimizer_norm: float | None
    metrics: dict[str, float]

    def gradient_error(self, truth: StepResult) -> float:
        """Norm of the difference over the norm of the truth, all parameters as one vector."""
        if self.gradient.keys() != truth.gradient.keys():
            raise KeyError(f"parameters differ: {sorted(self.gradient.keys() ^ truth.gradient.keys())}")
        difference = sum(float((self.gradient[name] - value).square().sum()) for name, value in truth.gradient.items())
        return (difference / sum(float(value.square().sum()) for value in truth.gradient.values())) ** 0.5


def step_on_layout(
    pool: RankPool, layout: Layout, step: Sequence[StepSample], config: PolicyLossConfig, model: TinyGPT | None = None
) -> StepResult:
    """The step through the installed Megatron-Core on `layout`: float32, count_step over dp, schedule, DDP, optimiser."""
    return steps_on_layout(pool, layout, step, [config], model)[0]


def steps_on_layout(
    pool: RankPool,
    layout: Layout,
    step: Sequence[StepSample],
    configs: Sequence[PolicyLossConfig],
    model: TinyGPT | None = None,
) -> list[StepResult]:
    """step_on_layout for several losses on one model."""
    arguments = (layout, list(step), list(configs), TinyGPT() if model is None else model)
    answers = pool.run(_run_on_rank, *arguments, world_size=layout.world_size, **layout.model_parallel)
    return [_merge([answer[index] for answer in answers]) for index in range(len(configs))]


def _run_on_rank(rank: int, layout: Layout, step, configs, tiny: TinyGPT) -> list:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    groups = resolve_groups()
    config = transformer_config(
        num_layers=tiny.num_layers,
        hidden_size=tiny.hidden_size,
        num_attention_heads=tiny.num_attention_heads,
        sequence_parallel=layout.sequence_parallel,
        calculate_per_token_loss=layout.calculate_per_token_loss,
        finalize_model_grads_func=finalize_model_grads,
    )
    row_length = _row_length(step, layout)
    stages = range(layout.virtual_pipeline) if layout.virtual_pipeline else [None]
    bare = [
        build_gpt_model(config, vocab_size=tiny.vocab_size, max_sequence_length=row_length, vp_stage=stage, seed=tiny.seed)
        for stage in stages
    ]
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=layout.distributed_optimizer,
        average_in_collective=layout.average_in_collective,
        overlap_grad_reduce=layout.overlap_grad_reduce,
    )
    models = [DistributedDataParallel(config, ddp_config, model) for model in bare]
    optimizer_config = OptimizerConfig(
        optimizer="adam", lr=0.0, clip_grad=1.0, use_distributed_optimizer=layout.distributed_optimizer
    )
    optimizer = get_megatron_optimizer(optimizer_config, models)
    if layout.overlap_grad_reduce:
        config.no_sync_func = models[0].no_sync
    return [_one_step(policy_config, models, optimizer, layout, step, tiny, groups) for policy_config in configs]


def _one_step(policy_config: PolicyLossConfig, models, optimizer, layout: Layout, step, tiny: TinyGPT, groups):
    from megatron.core.pipeline_parallel import get_forward_backward_func

    batches = make_step_batches(policy_config, layout, step, groups)
    forward_step = make_forward_step(policy_config, vocab_size=tiny.true_vocab_size)
    for model in models:
        model.zero_grad_buffer()
    optimizer.zero_grad()  # the optimiser left main_grad in .grad, which the next backward would add
    iterators = [iter(batches) for _ in models]
    is_chunked = len(models) > 1
    scaled = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if is_chunked else iterators[0],
        model=models if is_chunked else models[0],
        num_microbatches=layout.num_microbatches,
        seq_length=_row_length(step, layout) if not layout.packed else batches[0].tokens.numel() * groups.cp.size(),
        micro_batch_size=batches[0].tokens.shape[0],
        forward_only=False,
    )
    reports = forward_step.take_reports()
    check_finite(reports)
    _gather_distributed_gradients(models)
    gradients = [_named_shards(model) for model in models]
    _, norm, _ = optimizer.step()
    # Megatron's train_step: [sum, count] pairs, added over micro-batches and dp-cp.
    pair = torch.stack([report["policy/loss"] for report in scaled]).sum(0) if scaled else torch.zeros(2)
    pair = broadcast_from_last(all_reduce_sum(pair, groups.dp_cp), groups.pp)
    has_metrics = policy_config.policy_metrics != "none"
    metrics = {}
    if has_metrics:
        local = combine([report.statistics for report in reports]) if reports else None
        has_entropy = policy_config.policy_metrics == "with_entropy"
        metrics = finalise_metrics(reduce_statistics(local, groups, has_entropy=has_entropy))
    return float(pair[0] / pair[1]), gradients, float(norm), metrics


def make_step_batches(policy_config: PolicyLossConfig, layout: Layout, step: Sequence[StepSample], groups: ParallelGroups):
    """This rank's micro-batches: samples dealt to dp ranks and micro-batches in turn, so that prompt groups straddle both."""
    mine = list(step)[groups.dp.rank() :: groups.dp.size()]
    samples, totals = weigh_samples(policy_config, mine, groups)
    context = StepContext(totals=totals, num_microbatches=layout.num_microbatches)
    parts = [samples[index :: layout.num_microbatches] for index in range(layout.num_microbatches)]
    shared = {"cp_group": groups.cp, "device": torch.device(torch.cuda.current_device())}
    row_length = _row_length(step, layout)
    if not layout.packed:
        num_rows = max(len(part) for part in parts)
        return [make_padded_batch(part, context, num_rows=num_rows, row_length=row_length, **shared) for part in parts]
    multiple = _local_multiple(layout)
    lengths = [sum(padded_length(len(sample.tokens), layout.context) for sample in part) for part in parts]
    packed_length = padded_length(max(lengths) + 1, layout.context, multiple=multiple)
    return [make_packed_batch(part, context, row_length=packed_length, **shared) for part in parts]


def _local_multiple(layout: Layout) -> int:
    return layout.tensor if layout.sequence_parallel else 1


def _row_length(step, layout: Layout) -> int:
    longest = max(len(sample.tokens) for sample in step)
    return padded_length(longest, layout.context, multiple=_local_multiple(layout))


def _gather_distributed_gradients(models) -> None:
    """The distributed optimiser leaves each rank its shard of the reduced buffer: the others' shards are fetched for comparison."""
    for model in models:
        if not model.ddp_config.use_distributed_optimizer:
            continue
        group = resolve_groups().dp_cp
        for buffer in model.buffers:
            for bucket in buffer.buckets:
                shard = bucket.grad_data.chunk(group.size())[group.rank()]
                bucket.grad_data.copy_(all_gather_stack(shard, group).flatten())


def _named_shards(model) -> dict[str, tuple[int | None, int, Tensor]]:
    """global name -> (sharded dimension or None, tp rank, gradient in float64)."""
    shards, tp_rank = {}, resolve_groups().tp.rank()
    for name, parameter in model.module.named_parameters():
        dim = parameter.partition_dim if vars(parameter).get("tensor_model_parallel", False) else None
        gradient = parameter.main_grad.detach().double().cpu().clone()
        shards[global_parameter_name(model.module, name)] = (dim, tp_rank, gradient)
    return shards


def _merge(answers: list) -> StepResult:
    """One whole gradient from all ranks' shards. Ranks that hold the same shard must hold the same numbers."""
    shards: dict[str, dict[int, Tensor]] = {}
    dims: dict[str, int | None] = {}
    for _, gradients, _, _ in answers:
        for model in gradients:
            for name, (dim, tp_rank, gradient) in model.items():
                dims[name] = dim
                key = tp_rank if dim is not None else 0
                known = shards.setdefault(name, {}).setdefault(key, gradient)
                # All-reduce gives each rank the same bits; sequence-parallel norms are summed in another order on each tp rank.
                torch.testing.assert_close(gradient, known, rtol=1e-5, atol=1e-7 * float(known.abs().max() + 1e-30))
    whole = {
        name: parts[0] if dims[name] is None else torch.cat([parts[key] for key in sorted(parts)], dims[name])
        for name, parts in shards.items()
    }
    losses = {answer[0] for answer in answers}
    loss, _, norm, metrics = answers[0]
    if max(losses) - min(losses) > 1e-6 * max(abs(loss), 1e-6):
        raise AssertionError(f"ranks report different losses: {sorted(losses)}")
    return StepResult(loss, whole, norm, metrics)


def with_old_log_probs(step: Sequence[StepSample], old_log_probs: Sequence[list[float]]) -> list[StepSample]:
    """The same samples with other old log-probabilities."""
    return [replace(sample, old_log_probs=values) for sample, values in zip(step, old_log_probs, strict=True)]
