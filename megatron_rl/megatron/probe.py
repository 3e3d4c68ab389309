"""Runs the loss arithmetic of the installed Megatron on one parameter, and raises where the gradient would not be exact.

Where DDP reduces experts over other ranks than the rest, with a factor of its own, there is a second parameter, an expert's.
A wrong factor gets a name: exactly cp, 1/micro-batches or dp points at one cause.

A version number is no proof: the meaning of the tuple changed in 0.13 and 0.15, and a model's config may change the per-token flag
after the arguments were parsed. The user's model and optimiser are not used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatron_rl.count import StepTotals
from megatron_rl.errors import ConfigError
from megatron_rl.layout.groups import SINGLE, ParallelGroups, all_gather_stack, all_reduce_sum, resolve_group, resolve_groups
from megatron_rl.megatron.context_groups import hybrid_data
from megatron_rl.megatron.installed import expert_replicas_drift
from megatron_rl.megatron.model import transformer_config
from megatron_rl.megatron.schedule import ScheduledLoss, scale_for_schedule

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

# Float32 holds the sum of the parts exactly up to about 4,000 replicas. With 12,000, ranks that add in different orders differ by
# 3e-5. A wrong factor is a size or a ratio of counts, which is not so close to 1, nor another factor so close to a size.
TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """ratio: measured gradient / gradient of the step's loss; 1 when exact. contract: the returned tuple, as text.
    expert_ratio: the ratio of an expert's parameter; None where it is reduced as the rest."""

    ratio: float
    contract: str
    megatron_version: str
    expert_ratio: float | None = None

    @property
    def in_words(self) -> str:
        expert_ratios = "" if self.expert_ratio is None else f", of experts {self.expert_ratio:.6g}"
        return f"ratio {self.ratio:.6g}{expert_ratios}"


@dataclass(frozen=True, slots=True)
class MeasuredGradients:
    """experts: of the ranks that hold different experts or shards of one; none where they are reduced as the rest. Equal on all
    ranks."""

    dense: float
    experts: tuple[float, ...]


def probe_schedule(
    *,
    calculate_per_token_loss: bool = False,
    ddp_config: DistributedDataParallelConfig | None = None,
    hybrid_context_parallel: bool = False,
) -> ProbeResult:
    """Runs scale_for_schedule's tuple through the installed schedule, DDP and finalize_model_grads on the current layout.

    hybrid_context_parallel: of the model's config: another schedule, where ranks run unlike numbers of micro-batches.
    Every rank calls it, after parallel_state is initialised. It takes some milliseconds and leaves no state.
    Communication: as run_one_parameter, and two all-reduces of one number over dp-cp.
    Raises ConfigError, on all ranks, when it is not the gradient of the sum of the parts.
    """
    groups = resolve_groups()
    num_microbatches = 3 * groups.pp.size()  # not 2, a likely cp or dp, so that a wrong factor has one name
    if hybrid_context_parallel and not reduces_experts_apart():
        num_microbatches += 2 * (groups.dp_cp.rank() % 2)
    parts = _parts(groups, num_microbatches)
    # Some micro-batches have no token. The mean is not 1, which would hide a count that is ignored.
    counts = [2 * ((index + groups.dp_cp.rank()) % 3) for index in range(num_microbatches)]
    total = _sum_over_step(counts, groups)
    totals = StepTotals(num_samples=1, num_prompts=None, num_tokens=int(total))

    def tuple_of(value: Tensor, index: int, config: TransformerConfig) -> ScheduledLoss:
        return scale_for_schedule(
            value,
            num_microbatches,
            totals=totals,
            num_local_tokens=counts[index],
            config=config,
            groups=groups,
        )

    hybrid = {"hybrid_context_parallel": True} if hybrid_context_parallel else {}  # older releases have no such field
    measured = run_one_parameter(
        tuple_of, parts, ddp_config=ddp_config, calculate_per_token_loss=calculate_per_token_loss, **hybrid
    )
    expected = _sum_over_step(parts, groups)
    expert_ratios = [gradient / expected for gradient in measured.experts]
    contract = "per-token: (loss x T, tokens)" if calculate_per_token_loss else "unit: (loss x D x M, 1)"
    farthest = max(expert_ratios, key=lambda ratio: abs(ratio - 1.0), default=None)
    result = ProbeResult(measured.dense / expected, contract, megatron_version(), farthest)
    for ratio, whose in ((result.ratio, ""), (result.expert_ratio, " for the parameters of experts")):
        if ratio is not None and not abs(ratio - 1.0) <= TOLERANCE:
            raise ConfigError(_refusal(result, ratio, whose, groups, num_microbatches))
    return result


def run_one_parameter(
    tuple_of: Callable[[Tensor, int, TransformerConfig], tuple[Any, ...]],
    parts: list[float],
    *,
    ddp_config: DistributedDataParallelConfig | None = None,
    **contract: bool,  # calculate_per_token_loss, hybrid_context_parallel
) -> MeasuredGradients:
    """The gradient of a one-parameter model after the installed schedule, DDP and finalize_model_grads.

    The loss of micro-batch m is parameter * parts[m]; loss_func returns `tuple_of(loss, m, config)`. Where reduces_experts_apart, a
    parameter of an expert is added to the first. Its gradients come from all ranks that send it tokens, each tensor-parallel rank
    with its share, so the step's is the same.
    Communication: one training step, one all-reduce over pp and one all-gather over dp-cp; for the parameter of an expert
    an all-reduce of one number a micro-batch, one all-reduce over pp and two all-gathers.
    """
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    tp_size = parallel_state.get_tensor_model_parallel_world_size()
    num_stages = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
    config = transformer_config(
        num_layers=parallel_state.get_pipeline_model_parallel_world_size() * num_stages,
        hidden_size=tp_size,
        num_attention_heads=tp_size,
        finalize_model_grads_func=finalize_model_grads,
        variable_seq_lengths=False,
        **contract,
    )
    ddp_config = DistributedDataParallelConfig() if ddp_config is None else ddp_config
    models = [
        DistributedDataParallel(config, ddp_config, _OneParameter(config, stage if num_stages > 1 else None))
        for stage in range(num_stages)
    ]
    # A schedule may fetch ahead, so the number of a micro-batch is taken from the order of the losses, not of the batches.
    order = count()

    def loss_func(output: Tensor) -> tuple[Any, ...]:
        index = next(order)
        return tuple_of(output.sum() * parts[index], index, config)

    def forward_step(data_iterator: object, model: _OneParameter) -> tuple[Tensor, Callable[[Tensor], tuple[Any, ...]]]:
        return model(), loss_func

    iterator: Any = [None] * num_stages if num_stages > 1 else None
    if contract.get("hybrid_context_parallel"):
        iterator = hybrid_data([[SINGLE] * len(parts)], resolve_groups().dp_cp)
    for model in models:
        model.zero_grad_buffer()
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterator,
        model=models if num_stages > 1 else models[0],
        num_microbatches=len(parts),
        seq_length=parallel_state.get_context_parallel_world_size(),
        micro_batch_size=1,
        forward_only=False,
    )
    # Only the last pipeline stage multiplies the loss; the parameter of the other stages has gradient 0.
    groups = resolve_groups()

    def summed(name: str) -> Tensor:
        parameters = [getattr(model.module, name) for model in models]
        return all_reduce_sum(torch.stack([parameter.main_grad.float().sum() for parameter in parameters]).sum(), groups.pp)

    # With the distributed optimiser only the shard of rank 0 holds the reduced gradient; else all ranks hold it.
    dense = float(all_gather_stack(summed("parameter"), groups.dp_cp)[0])
    if not reduces_experts_apart():
        return MeasuredGradients(dense, ())
    expert_sums = all_gather_stack(summed("expert"), resolve_group(None, "expert_dp"))[0]
    return MeasuredGradients(dense, tuple(all_gather_stack(expert_sums, resolve_group(None, "expert_mp")).tolist()))


def reduces_experts_apart() -> bool:
    """Whether the installed Megatron's DDP reduces an expert's parameter over other ranks than the rest.

    With expert parallelism each release does. 0.19 does where experts are cut otherwise than the dense layers too; earlier releases
    let the replicas drift there.
    """
    if resolve_group(None, "ep").size() > 1:
        return True
    is_cut_alike = resolve_group(None, "expert_tp").size() == resolve_group(None, "tp").size()
    return not is_cut_alike and not expert_replicas_drift()


def megatron_version() -> str:
    import megatron.core

    return str(megatron.core.__version__)


class _OneParameter(nn.Module):
    """Returns its parameters' sum on the last pipeline stage, its input on the others. Megatron reads the attributes by name."""

    share_embeddings_and_output_weights = False
    position_embedding_type = "rope"

    def __init__(self, config: TransformerConfig, vp_stage: int | None):
        from megatron.core import parallel_state
        from megatron.core.enums import ModelType

        super().__init__()
        self.model_type = ModelType.encoder_or_decoder
        stage = {"ignore_virtual": True} if vp_stage is None else {"ignore_virtual": False, "vp_stage": vp_stage}
        self.config = config
        self.vp_stage = vp_stage
        self.pre_process = parallel_state.is_pipeline_first_stage(**stage)
        self.post_process = parallel_state.is_pipeline_last_stage(**stage)
        device = torch.cuda.current_device()
        self.parameter = nn.Parameter(torch.ones(1, device=device))
        if reduces_experts_apart():
            self.expert = nn.Parameter(torch.ones(1, device=device))
            vars(self.expert)["allreduce"] = False  # Megatron's mark of an expert
        self.input_tensor: Any = None

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor] | None) -> None:
        self.input_tensor = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

    def forward(self) -> Tensor:
        hidden = torch.zeros(1, 1, self.config.hidden_size, device=self.parameter.device)
        if not self.pre_process:
            hidden = self.input_tensor
        if self.post_process:
            return self.parameter + self._of_expert() + 0.0 * hidden.sum()
        return hidden + 0.0 * (self.parameter + self._of_expert())

    def _of_expert(self) -> Tensor:
        """The expert's parameter, as a rank's tokens reach it: its backward adds what the ranks of its tokens send."""
        if not reduces_experts_apart():
            return torch.zeros_like(self.parameter)
        from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region

        shared: Tensor = copy_to_tensor_model_parallel_region(self.expert, resolve_group(None, "expert_mp"))
        return shared / resolve_group(None, "tp").size()


def _parts(groups: ParallelGroups, num_microbatches: int) -> list[float]:
    """Numbers that differ on each rank and micro-batch, so that a mean of means differs from the sum."""
    rank = groups.dp_cp.rank()
    return [1.0 + 0.5 * index + 0.25 * rank * (index + 1) for index in range(num_microbatches)]


def _sum_over_step(values: Sequence[float], groups: ParallelGroups) -> float:
    total = torch.tensor(float(sum(values)), device=torch.cuda.current_device())
    return float(all_reduce_sum(total, groups.dp_cp))


def _refusal(result: ProbeResult, ratio: float, whose: str, groups: ParallelGroups, num_microbatches: int) -> str:
    sizes = {
        "cp": groups.cp.size(),
        "dp": groups.dp.size(),
        "dp x cp": groups.dp_cp.size(),
        "micro-batches": num_microbatches,
        "ep": resolve_group(None, "ep").size(),
    }
    names = factor_names(ratio, sizes)
    guess = f", which is {' or '.join(names)}" if names else ""
    return (
        f"Megatron-Core {result.megatron_version} and scale_for_schedule do not agree on what a 3-tuple means: the gradient of "
        f"{result.contract} is {ratio:.6g} of the step's{whose}{guess}; see docs/parallelism.md. Use megatron-core 0.16 to 0.20, "
        "and change neither calculate_per_token_loss nor scale_for_schedule"
    )


def factor_names(ratio: float, sizes: Mapping[str, int]) -> list[str]:
    """The names of the sizes that equal the ratio, then of those whose inverse does: ["cp", "1/(micro-batches)"]; sizes above 1."""
    named = [name for name, size in sizes.items() if size > 1 and abs(ratio - size) < TOLERANCE * size]
    return named + [f"1/({name})" for name, size in sizes.items() if size > 1 and abs(ratio * size - 1) < TOLERANCE]
