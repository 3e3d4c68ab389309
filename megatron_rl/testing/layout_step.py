"""What one rank of a layout does in a step: builds the model, DDP and optimiser, runs the step, and returns its gradient shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from megatron_rl.config import PolicyLossConfig
from megatron_rl.layout.agreement import all_gather_objects
from megatron_rl.layout.context_parallel import padded_length
from megatron_rl.layout.groups import (
    Group,
    ParallelGroups,
    all_gather_stack,
    all_reduce_max,
    all_reduce_sum,
    broadcast_from_last,
    group_device,
    resolve_group,
    resolve_groups,
)
from megatron_rl.megatron.batch import PolicyBatch, StepContext, make_packed_batch, make_padded_batch, weigh_samples
from megatron_rl.megatron.context_groups import make_context_groups
from megatron_rl.megatron.forward_step import PolicyForwardStep, check_finite
from megatron_rl.megatron.model import build_gpt_model, global_parameter_name, halves_of, sharding_of, transformer_config
from megatron_rl.megatron.rotary import Rotary
from megatron_rl.megatron.samples import StepSample, count_further_tokens, count_routed_tokens
from megatron_rl.metrics.step import step_metrics

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import TransformerConfig

# The version that a step trains, where its samples have one.
POLICY_VERSION = 10


class Shard(NamedTuple):
    """One rank's part of a gradient, in float64 on the CPU. dim: the dimension that is sharded, or None; number: of this shard, of
    `size`. parts: a gated layer holds [gate, up], of which each is sharded by itself."""

    dim: int | None
    number: int
    size: int
    gradient: Tensor
    parts: int = 1

    def cut_from(self, whole: Tensor) -> Tensor:
        """This shard of a whole tensor."""
        if self.dim is None:
            return whole
        return torch.cat([part.chunk(self.size, self.dim)[self.number] for part in whole.chunk(self.parts, self.dim)], self.dim)


def joined(shards: Sequence[Shard]) -> Tensor:
    """The whole tensor, from its shards in order."""
    dim = shards[0].dim
    if dim is None:
        return shards[0].gradient
    by_shard = [shard.gradient.chunk(shard.parts, dim) for shard in shards]
    return torch.cat([part for pieces in zip(*by_shard, strict=True) for part in pieces], dim)


Shards = dict[str, Shard]  # by global name


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How a step is split. Sizes are of process groups; num_microbatches is per rank."""

    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    data: int = 1
    expert: int = 1
    expert_tensor: int | None = None  # None: as Megatron, the tensor-parallel size
    virtual_pipeline: int | None = None
    num_microbatches: int = 1
    context_sizes: tuple[int, ...] = ()
    """The size of the context-parallel groups, of neighbours in dp-cp, of each micro-batch. (): `context` for all."""
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
    def local_multiple(self) -> int:
        return self.tensor if self.sequence_parallel else 1

    @property
    def contexts(self) -> tuple[int, ...]:
        """The context-parallel size of each micro-batch."""
        return self.context_sizes or (self.context,) * self.num_microbatches

    def over(self, context: int) -> Layout:
        """As many ranks with another context-parallel size."""
        return replace(self, context=context, data=self.context * self.data // context, context_sizes=())

    @property
    def model_parallel(self) -> dict[str, Any]:
        """Arguments of initialize_model_parallel."""
        sizes = {
            "tensor_model_parallel_size": self.tensor,
            "context_parallel_size": self.context,
            "pipeline_model_parallel_size": self.pipeline,
            "expert_model_parallel_size": self.expert,
            "expert_tensor_parallel_size": self.expert_tensor,
        }
        if self.virtual_pipeline is not None:
            sizes["virtual_pipeline_model_parallel_size"] = self.virtual_pipeline
        return sizes

    def __str__(self) -> str:
        sizes = {"DP": self.data, "TP": self.tensor, "CP": self.context, "PP": self.pipeline, "VPP": self.virtual_pipeline}
        sizes |= {"EP": self.expert, "ETP": self.expert_tensor}
        name = "x".join(f"{letters}{size}" for letters, size in sizes.items() if size and size > 1) or "one rank"
        if self.context_sizes:
            name += f" as CP {', '.join(map(str, self.context_sizes))}"
        flags = [field.name for field in fields(self) if getattr(self, field.name) is True]
        return ", ".join([name, f"M{self.num_microbatches}", *flags])


@dataclass(frozen=True, kw_only=True, slots=True)
class TinyGPT:
    """The model of the test: small, with layers for four pipeline stages and heads for four tensor ranks."""

    num_layers: int = 4
    hidden_size: int = 32
    num_attention_heads: int = 4
    vocab_size: int = 64
    true_vocab_size: int = 61  # three padded columns, all on the last tensor rank
    tie_embeddings: bool = False
    bf16: bool = False  # with float32 gradient buffers
    use_transformer_engine: bool = True  # where it works
    # Further fields of TransformerConfig with their values, also of a mixture of experts; tuples in place of lists.
    experts: tuple[tuple[str, object], ...] = ()
    rotary: Rotary = Rotary()  # noqa: RUF009  # frozen

    @property
    def expert_options(self) -> dict[str, Any]:
        return {name: [*value] if isinstance(value, tuple) and name != "window_size" else value for name, value in self.experts}


def build_tiny(tiny: TinyGPT, config: TransformerConfig, row_length: int, **options: Any) -> GPTModel:
    """One stage of the model. options: of build_gpt_model."""
    return build_gpt_model(
        config,
        vocab_size=tiny.vocab_size,
        max_sequence_length=row_length,
        tie_embeddings=tiny.tie_embeddings,
        rotary=tiny.rotary,
        **options,
    )


@dataclass(frozen=True, slots=True)
class RankStep:
    """One rank's result of a step: loss, gradient shards of each stage, the optimiser's norm (None without one), metrics, and what
    Megatron's train_step would log (empty before the last pipeline stage)."""

    loss: float
    gradients: list[Shards]
    optimizer_norm: float | None
    metrics: dict[str, float]
    reported: dict[str, float]


class LayoutModel:
    """The tiny model with DDP and optimiser on this rank of an initialised layout, for one step after another."""

    declares_factor = True  # of the forward step

    def __init__(self, layout: Layout, row_length: int, tiny: TinyGPT):
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer.module import Float16Module

        self.layout, self.tiny, self.groups = layout, tiny, resolve_groups()
        self.context_groups = make_context_groups(layout.context_sizes) if layout.context_sizes else {}
        config = transformer_config(
            num_layers=tiny.num_layers,
            hidden_size=tiny.hidden_size,
            num_attention_heads=tiny.num_attention_heads,
            sequence_parallel=layout.sequence_parallel,
            calculate_per_token_loss=layout.calculate_per_token_loss,
            finalize_model_grads_func=finalize_model_grads,
            bf16=tiny.bf16,
            **tiny.expert_options,
        )
        stages = range(layout.virtual_pipeline) if layout.virtual_pipeline else [None]
        device = torch.device(torch.cuda.current_device())
        bare = [
            build_tiny(tiny, config, row_length, vp_stage=stage, use_transformer_engine=tiny.use_transformer_engine).to(device)
            for stage in stages
        ]
        wrapped = [Float16Module(config, model) for model in bare] if tiny.bf16 else bare
        ddp_config = DistributedDataParallelConfig(
            use_distributed_optimizer=layout.distributed_optimizer,
            average_in_collective=layout.average_in_collective,
            overlap_grad_reduce=layout.overlap_grad_reduce,
            grad_reduce_in_fp32=tiny.bf16,
        )
        self.models = [DistributedDataParallel(config, ddp_config, model) for model in wrapped]
        optimizer_config = OptimizerConfig(
            optimizer="adam",
            lr=0.0,
            clip_grad=1.0,
            use_distributed_optimizer=layout.distributed_optimizer,
            bf16=tiny.bf16,
            params_dtype=config.params_dtype,
        )
        self.optimizer = get_megatron_optimizer(optimizer_config, self.models)
        config.grad_scale_func = self.optimizer.scale_loss
        if layout.overlap_grad_reduce:
            config.no_sync_func = self.models[0].no_sync

    def step(self, policy_config: PolicyLossConfig, samples: Sequence[StepSample]) -> RankStep:
        models, groups = self.models, self.groups
        batches = make_step_batches(policy_config, self.layout, samples, groups, self.context_groups, models[0].config)
        forward_step = PolicyForwardStep(policy_config, vocab_size=self.tiny.true_vocab_size, reports_metrics=True)
        forward_step.declares_factor = self.declares_factor
        rows, length = batches[0].tokens.shape
        scaled = run_schedule(models, batches, length * groups.cp.size(), rows, forward_step)
        reports = forward_step.take_reports()
        check_finite(reports)
        gradients = gradient_shards(models)
        _, norm, _ = self.optimizer.step()
        reported = as_train_step_logs(scaled, groups)
        loss = torch.tensor(reported.get("policy/loss", 0.0), dtype=torch.float64, device=group_device(groups.pp))
        metrics = {}
        if policy_config.policy_metrics != "none":
            has_entropy = policy_config.policy_metrics == "with_entropy"
            statistics = [report.statistics for report in reports if report.statistics is not None]
            metrics = step_metrics(statistics, groups, has_entropy=has_entropy)
        return RankStep(float(broadcast_from_last(loss, groups.pp)), gradients, float(norm), metrics, reported)


def run_schedule(
    models: Sequence[Any],  # of DistributedDataParallel
    batches: Sequence[Any],
    seq_length: int,
    micro_batch_size: int,
    forward_step: Callable[..., Any],
) -> list[dict[str, Tensor]]:
    """The reports of Megatron's schedule. Parameters' .grad is dropped too: an optimiser may have left its buffer there."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    for model in models:
        model.zero_grad_buffer()
        for parameter in model.parameters():
            parameter.grad = None
    is_chunked = len(models) > 1
    iterators = [iter(batches) for _ in models]
    reports: list[dict[str, Tensor]] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if is_chunked else iterators[0],
        model=list(models) if is_chunked else models[0],
        num_microbatches=len(batches),
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        forward_only=False,
    )
    return reports


def as_train_step_logs(reports: Sequence[dict[str, Tensor]], groups: ParallelGroups) -> dict[str, float]:
    """As Megatron's train_step: [sum, count] pairs, added over micro-batches and dp-cp, then divided. Before the last stage: {}."""
    names = list(reports[0]) if reports else []
    pairs = [all_reduce_sum(torch.vstack([report[name] for report in reports]).sum(0), groups.dp_cp) for name in names]
    return {name: float(pair[0] / pair[1]) for name, pair in zip(names, pairs, strict=True)}


def samples_of(layout: Layout, groups: ParallelGroups, microbatch: int, num_samples: int) -> range:
    """The numbers of this rank's samples in a micro-batch. Ranks and micro-batches take the step's samples in turn, so both split
    prompt groups."""
    if not layout.context_sizes:
        return range(num_samples)[groups.dp.rank() :: groups.dp.size()][microbatch :: layout.num_microbatches]
    size = layout.contexts[microbatch]
    number, num_groups = groups.dp_cp.rank() // size, groups.dp_cp.size() // size
    return range(num_samples)[microbatch :: layout.num_microbatches][number::num_groups]


def make_step_batches(
    policy_config: PolicyLossConfig,
    layout: Layout,
    step: Sequence[StepSample],
    groups: ParallelGroups,
    context_groups: Mapping[int, Group] | None = None,
    model_config: Any = None,  # a TransformerConfig
) -> list[PolicyBatch]:
    """This rank's micro-batches. Under context_sizes, whose make_context_groups are given, samples are weighed where the layout
    without them has them, and then moved. model_config: of a model with multi-token prediction.
    Communication: that of weigh_samples, under context_sizes a gather of the samples over all ranks, and an all-reduce over dp-cp
    for the shape of the rows."""
    numbers = range(len(step))[groups.dp.rank() :: groups.dp.size()]
    mine = [step[number] for number in numbers]
    samples, totals = weigh_samples(policy_config, mine, groups)
    weighed = dict(zip(numbers, samples, strict=True))
    if layout.context_sizes:
        weighed = {number: sample for rank_samples in all_gather_objects(weighed) for number, sample in rank_samples.items()}
    parts = [[weighed[n] for n in samples_of(layout, groups, index, len(step))] for index in range(layout.num_microbatches)]
    sizes = layout.contexts
    context = StepContext(
        totals=totals,
        num_microbatches=len(parts),
        policy_version=POLICY_VERSION,
        counts_phantoms=any(sample.rollout_log_probs is not None for sample in step),
        num_routed_tokens=count_routed_tokens(policy_config, mine, groups),
        num_further_tokens=None if model_config is None else count_further_tokens(model_config, mine, groups),
    )
    packed = [sum(padded_length(len(sample.tokens), size) for sample in part) for part, size in zip(parts, sizes, strict=True)]
    # Ranks that share a micro-batch may have others that they do not share: all take the largest of any rank.
    own_shape = torch.tensor([max(map(len, parts)), max(packed)], device=group_device(groups.dp_cp))
    num_rows, longest = all_reduce_max(own_shape, groups.dp_cp).tolist()
    device, batches = torch.device(torch.cuda.current_device()), []
    for part, size in zip(parts, sizes, strict=True):
        cp_group = (context_groups or {}).get(size, groups.cp)
        if layout.packed:
            length = padded_length(longest + 1, size, multiple=layout.local_multiple)
            batch = make_packed_batch(part, context, row_length=length, cp_group=cp_group, device=device)
        else:
            length = row_length(step, layout.over(size))
            batch = make_padded_batch(part, context, num_rows=num_rows, row_length=length, cp_group=cp_group, device=device)
        batches.append(batch)
    return batches


def row_length(step: Sequence[StepSample], layout: Layout) -> int:
    """The length of the longest sample's row, padded for this layout."""
    longest = max(len(sample.tokens) for sample in step)
    return max(padded_length(longest, size, multiple=layout.local_multiple) for size in layout.contexts)


def gradient_shards(models: Sequence[Any]) -> list[Shards]:  # of each stage
    """As named_shards. The distributed optimiser leaves each rank a shard of the reduced buffer: all-gathers the others' first."""
    for model in models:
        if not model.ddp_config.use_distributed_optimizer:
            continue
        for buffers, group in (
            (model.buffers, resolve_groups().dp_cp),
            (model.expert_parallel_buffers, resolve_group(None, "expert_dp")),
        ):
            for bucket in (bucket for buffer in buffers for bucket in buffer.buckets):
                shard = bucket.grad_data.chunk(group.size())[group.rank()]
                bucket.grad_data.copy_(all_gather_stack(shard, group).flatten())
    return [named_shards(model) for model in models]


def named_shards(model) -> Shards:
    shards, bare = {}, model.module
    bare = bare.module if hasattr(bare, "module") else bare
    has_both = bare.share_embeddings_and_output_weights and hasattr(bare, "embedding")
    for name, parameter in bare.named_parameters():
        if has_both and name == "output_layer.weight":
            continue  # not used: beside multi-token prediction the last stage has the embedding
        dim, group = sharding_of(name, parameter)
        gradient = parameter.main_grad.detach().double().cpu().clone()
        shard = Shard(dim, group.rank(), group.size(), gradient, halves_of(name, model.config))
        shards[global_parameter_name(bare, name)] = shard
    return shards
