"""Asks the installed Megatron-Core what it does, where releases differ: it runs the part in question, or reads its signature."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from types import SimpleNamespace

import torch
from torch import Tensor

from megatron_rl.validation.auxiliary_losses import unscaled_indexer_problem


@cache
def expert_replicas_drift() -> bool:
    """Whether replicas of experts drift apart at tensor parallelism 2, expert parallelism 1 and expert tensor parallelism 1.

    Megatron adds the gradients of a parameter with `allreduce` over data-parallel ranks alone, of one without it over all ranks
    that hold the expert. Needs parallel_state, of any sizes.
    """
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        num_moe_experts=2,
        add_bias_linear=False,
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        expert_tensor_parallel_size=1,
        gradient_accumulation_fusion=False,
        perform_initialization=False,
        use_cpu_initialization=not torch.cuda.is_available(),
    )
    size = 16 * max(1, torch.distributed.get_world_size())  # a multiple of whatever shares an expert here
    layer = ColumnParallelLinear(8, size, config=config, init_method=torch.nn.init.zeros_, bias=False, is_expert=True)
    return bool(vars(layer.weight).get("allreduce", True))


@cache
def shares_key_heads() -> bool:
    """Whether tensor-parallel ranks may be more than key heads, so that a rank holds a part of one: since Megatron-Core 0.16."""
    from megatron.core.transformer import TransformerConfig

    try:
        TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, num_query_groups=1, tensor_model_parallel_size=2)
    except ValueError:
        return False
    return True


def norms_queries_twice() -> bool:
    """Whether multi-latent attention without q_lora_rank gives queries a norm where keys have one: since Megatron-Core 0.19."""
    return find_spec("megatron.core.transformer.mla_qk_norm_config") is not None


def unscaled_indexer(settings: Mapping[str, object]) -> Iterator[str]:
    """Why the indexer of this model would train x micro-batches; nothing where the installed schedule scales its loss."""
    problem = unscaled_indexer_problem(settings)
    if problem is not None and scales_indexer_loss() is False:
        yield problem


@cache
def scales_indexer_loss() -> bool | None:
    """Whether the installed schedule gives the loss of the sparse-attention indexer a scale: since Megatron-Core 0.19.

    None: it has no such loss. This runs the part of the schedule that sets the scales, as a pipeline stage without a loss does.
    """
    try:
        from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossAutoScaler as Scaler
    except ImportError:  # before 0.16
        return None
    from megatron.core.pipeline_parallel.schedules import forward_step_calc_loss

    named = {"timers": None, "num_moe_experts": None, "mtp_num_layers": None, "grad_scale_func": None}
    config = SimpleNamespace(**named, calculate_per_token_loss=False, experimental_attention_variant="dsa")
    before = Scaler.main_loss_backward_scale
    try:
        Scaler.main_loss_backward_scale = None
        output, stage = torch.zeros(1), {"cp_group_size": 1, "is_last_stage": False}
        forward_step_calc_loss(None, output, None, config, None, False, 2, [], **stage)
        return Scaler.main_loss_backward_scale is not None
    finally:
        Scaler.main_loss_backward_scale = before


@dataclass(frozen=True, slots=True)
class HostScales:
    """What a release of Megatron-Core does to these losses under --calculate-per-token-loss, beside routed / response tokens."""

    divides_z_loss: bool = True  # by the tp times cp ranks
    divides_samples: bool = True  # the loss of samples by the number of samples in the micro-batch
    multiplies_balance: bool = False  # the others by the tp times cp ranks, whose tokens are in its count already


@cache
def installed_scales() -> HostScales:
    """Of the installed Megatron-Core with padding masks: a stand-in of its router answers. Needs a default process group."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
    from megatron.core.transformer.moe.router import TopKRouter

    class RouterStandIn(TopKRouter):
        def __init__(self, num_slices: int):
            settings = {"moe_z_loss_coeff": 1.0, "num_layers": 1, "num_moe_experts": 2, "moe_router_fusion": False}
            self.__dict__ |= {
                "config": SimpleNamespace(**settings, mtp_num_layers=None, mtp_use_repeated_layer=False),
                "tp_cp_group": SimpleNamespace(size=lambda: num_slices),
                "layer_number": None,  # what has no layer is not logged
                **{"topk": 1, "is_mtp_layer": False, "training": True, "calculate_per_token_loss": True, "tp_dp_cp_group": None},
            }

        def get_aux_loss_coeff(self, aux_loss_type: str) -> float:
            return 1.0

    def of_z_loss(num_slices: int) -> float:
        logits = torch.zeros(1, 2, requires_grad=True)
        return _first_gradient(logits, RouterStandIn(num_slices).apply_z_loss(logits) * 0)

    def of_samples(number: int) -> float:
        scores, routes = torch.tensor([[0.75, 0.25]] * number, requires_grad=True), torch.tensor([[True, False]] * number)
        probs = torch.ones(number, 2, requires_grad=True)
        return _first_gradient(
            scores, RouterStandIn(1)._apply_seq_aux_loss(probs, scores, routes, 1, number, with_padding_mask=True)
        )

    def of_balance(num_slices: int) -> float:
        loss, probs, router = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True), RouterStandIn(num_slices)
        return _first_gradient(loss, router.attach_and_log_load_balancing_loss(probs, 1.0, loss, "", None, valid_token_count=1))

    before = MoEAuxLossAutoScaler.main_loss_backward_scale  # a first backward sets it for the whole process
    try:
        return HostScales(
            divides_z_loss=of_z_loss(2) < 0.75 * of_z_loss(1),
            divides_samples=of_samples(2) < 0.75 * of_samples(1),
            multiplies_balance=of_balance(2) > 1.5 * of_balance(1),
        )
    finally:
        MoEAuxLossAutoScaler.main_loss_backward_scale = before


def _first_gradient(values: Tensor, activation: Tensor) -> float:
    """The length of the gradient of values[0] that an auxiliary loss attached to the activation gives."""
    activation.sum().backward()
    assert values.grad is not None
    return float(values.grad[0].norm())


def counts_by_sample() -> bool:
    """Whether a router without padding mask multiplies seq_aux_loss by the tokens of a sample, and not of the micro-batch."""
    from megatron.core.transformer.moe.router import TopKRouter

    attach = getattr(TopKRouter, "attach_and_log_load_balancing_loss", None)
    return attach is not None and "valid_token_count" in inspect.signature(attach).parameters
