"""Gives routers the padding of a micro-batch, and gives their auxiliary losses the value of one rank on the whole step.

Under --router-aux-loss host they keep Megatron's scale, which validation/auxiliary_losses.py describes. Under exact, for a step of
T tokens without padding in B samples, with E experts and k routes a token, scores p and routes f in {0, 1}:

    z_loss            c sum_t logsumexp(logits_t)^2 / T
    seq_aux_loss      c E sum_i sum_e (sum_{t in i} f_te) (sum_{t in i} p_te) / (k (T / B)^2 B)
    aux_loss          c E sum_e (sum_{t in b} f_te) (sum_{t in b} p_te) / (k n_b^2), the mean over micro-batches b of n_b tokens
    global_aux_loss   c E sum_e (sum_{t to b} f_te) (sum_{t in b} p_te) / (k n_b N_b), the mean over micro-batches b of all
                      data-parallel ranks; "to b": in the micro-batches of the step so far, of N_b tokens

The first two are what stock Megatron computes on one rank for one micro-batch with its padding mask; the last two have the
micro-batch in their definition, and depend on nothing else. In place of N_b Megatron has n_b times the micro-batches so far, which
is another number where their sizes differ. A router adds its part of the loss on this rank; Megatron's scaling
of it is undone by step constants, so activation recomputation may repeat a forward in any order.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatron_rl.config import RouterAuxLoss
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.layout.groups import Group, ParallelGroups, have_same_ranks
from megatron_rl.megatron.batch import ForwardInput, PolicyBatch
from megatron_rl.megatron.model import find_gpt_model
from megatron_rl.megatron.routing import replayed, routers_of

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe.router import TopKRouter

# The parameters of the router's methods that are replaced, as Megatron-Core 0.16 has them.
REPLACED_METHODS = {
    "apply_z_loss": ("logits", "padding_mask"),
    "_apply_aux_loss": ("probs", "scores_for_aux_loss", "routing_map", "with_padding_mask"),
    "_apply_seq_aux_loss": ("probs", "scores_for_aux_loss", "routing_map", "seq_length", "bsz", "with_padding_mask"),
    "_apply_global_aux_loss": ("probs", "scores_for_aux_loss", "routing_map", "with_padding_mask"),
}


@dataclass(frozen=True, slots=True)
class RoutedStep:
    """What the losses of routers need to know about the whole step."""

    num_tokens: int  # T
    num_samples: int  # B
    num_parts: int  # micro-batches times data-parallel ranks, without context parallelism
    data_size: int
    gradient_factor: float
    """Of a loss whose schedule divides it by num_parts. 1 under the default contract."""
    schedule_factor: float = 1.0
    """What the schedule multiplies these losses by, beside the loss scale: cp / micro-batches; 1 under the per-token contract."""


def takes_padding_mask(model: nn.Module | type[nn.Module]) -> bool:
    """Whether the model gives its routers a padding mask, as a GPTModel does."""
    return "padding_mask" in inspect.signature(find_gpt_model(model).forward).parameters


def padding_of(model: nn.Module, config: TransformerConfig, batch: ForwardInput, tp_group: Group) -> dict[str, Tensor]:
    """The keyword that tells routers which positions are padding; {} for a model that takes none.

    Megatron slices the mask under sequence parallelism on the first pipeline stage alone, so the other stages get a slice here.
    """
    is_padding = batch.is_padding
    if is_padding is None or not takes_padding_mask(model):
        return {}
    if config.sequence_parallel and not find_gpt_model(model).pre_process:
        is_padding = is_padding.chunk(tp_group.size(), 1)[tp_group.rank()].contiguous()
    return {"padding_mask": is_padding}


@contextmanager
def padding_of_mtp(model: nn.Module, config: TransformerConfig, batch: ForwardInput, tp_group: Group) -> Iterator[None]:
    """Inside the block layers of multi-token prediction give their routers the padding, also where backward recomputes them.

    Megatron-Core to 0.17 has no argument for it: a layer that is recomputed keeps the function that it was called with, and so the
    mask. 0.18 has one, and shifts this rank's part of the mask as the tokens: the layer gets the unshifted one in its place.
    """
    layers = getattr(find_gpt_model(model), "mtp", None)
    is_padding = batch.is_padding
    if layers is None or is_padding is None:
        yield
        return
    if config.sequence_parallel:
        is_padding = is_padding.chunk(tp_group.size(), 1)[tp_group.rank()].contiguous()

    def add_mask(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return inputs, named | {"padding_mask": is_padding}

    def masked(layer: nn.Module, own: Callable[..., Tensor], *inputs: Any, **named: Any) -> Tensor:
        children = dict(layer.named_children())
        inner = children.get("transformer_layer", children.get("mtp_model_layer"))
        assert inner is not None
        with inner.register_forward_pre_hook(add_mask, with_kwargs=True):
            return own(*inputs, **named)

    def unshifted(layer: nn.Module, own: Callable[..., tuple[Any, ...]], *inputs: Any, **named: Any) -> tuple[Any, ...]:
        token_ids, positions, _, *others = own(*inputs, **named)
        return token_ids, positions, is_padding, *others

    takes_mask = "padding_mask" in inspect.signature(type(layers.layers[0])._get_embeddings).parameters
    name, changed = ("_get_embeddings", unshifted) if takes_mask else ("_proj_and_transformer_layer", masked)
    for layer in layers.layers:
        vars(layer)[name] = functools.partial(changed, layer, getattr(layer, name))
    try:
        yield
    finally:
        for layer in layers.layers:
            del vars(layer)[name]


@contextmanager
def routed(model: nn.Module, config: TransformerConfig, batch: ForwardInput, tp_group: Group) -> Iterator[dict[str, Tensor]]:
    """Around a forward of a model with experts, or of a batch with routes: its routers have the routes and the padding of the
    micro-batch. Gives the keywords of the forward. Raises what `replayed` raises."""
    with replayed(model, config, batch, tp_group), padding_of_mtp(model, config, batch, tp_group):
        yield padding_of(model, config, batch, tp_group)


def router_losses(config: TransformerConfig) -> dict[str, float]:
    """The auxiliary losses that are on: name -> coefficient."""
    if config.num_moe_experts is None:
        return {}
    kinds, coefficients = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    pairs = zip(kinds, coefficients, strict=True) if isinstance(kinds, list) else [(kinds, coefficients)]
    found = {kind: coefficient for kind, coefficient in pairs if kind.endswith("aux_loss") and coefficient}
    return found | ({"z_loss": config.moe_z_loss_coeff} if config.moe_z_loss_coeff else {})


def prepare_routers(
    mode: str | None, model: nn.Module, config: TransformerConfig, batch: PolicyBatch, groups: ParallelGroups
) -> None:
    """Call it before each forward of a training step of a model with experts. Raises ConfigError for losses that would be wrong in
    a micro-batch over a context-parallel group that is not the model's."""
    if config.moe_router_enable_expert_bias:
        _count_real_tokens(model)
    losses, is_exact = router_losses(config), mode == RouterAuxLoss.EXACT
    # Only the exact z-loss is a sum over tokens; the others add up the routes over the model's group.
    wrong = [name for name in losses if not is_exact or name != "z_loss"]
    if wrong and not have_same_ranks(batch.cp_group, groups.cp):
        raise ConfigError(
            f"{', '.join(wrong)} with a micro-batch over {batch.cp_group.size()} context-parallel ranks, in a model with "
            f"{groups.cp.size()}: its routers balance the tokens of the model's group, whose ranks now have other samples; set "
            "their coefficients to 0 (z_loss alone goes with --router-aux-loss exact), or give each micro-batch the model's group"
        )
    if losses and not is_exact:
        _divide_by_a_token()
    step = _step_of(config, batch, groups) if losses and is_exact else None
    for router in routers_of(model):
        if step is not None:
            exact = {name: MethodType(method, router) for name, method in _EXACT.items()}
            vars(router).update(exact, routed_step=step)
        elif "routed_step" in vars(router):  # a step before this one was exact
            for name in ("routed_step", "is_measured", *_EXACT):
                vars(router).pop(name, None)


@functools.cache
def _divide_by_a_token() -> None:
    """Megatron's losses of a micro-batch of padding alone, which a rank without samples has, are 0 and no longer 0 / 0."""
    from megatron.core.transformer.moe import router

    own_counts = getattr(router, "get_tokens_per_expert_and_token_count", None)
    if own_counts is None:  # a release that counts otherwise
        return

    def counts(*args: Any, **named: Any) -> tuple[Tensor, Any, Any]:
        per_expert, rank_total, total = own_counts(*args, **named)
        return per_expert, rank_total, total.clamp(min=1) if isinstance(total, Tensor) else total

    vars(router)["get_tokens_per_expert_and_token_count"] = counts


def _step_of(config: TransformerConfig, batch: PolicyBatch, groups: ParallelGroups) -> RoutedStep:
    context = batch.context
    if context.num_routed_tokens is None:
        raise DataError("--router-aux-loss exact needs the tokens of the whole step: StepContext(num_routed_tokens=...)")
    num_parts = context.num_microbatches * groups.dp.size()
    per_token = config.calculate_per_token_loss
    factor = context.totals.num_tokens / num_parts if per_token else 1.0
    schedule_factor = 1.0 if per_token else groups.cp.size() / context.num_microbatches
    return RoutedStep(context.num_routed_tokens, context.totals.num_samples, num_parts, groups.dp.size(), factor, schedule_factor)


def _z_loss(router: TopKRouter, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
    config, step = router.config, vars(router)["routed_step"]
    if not config.moe_z_loss_coeff or not (router.training and torch.is_grad_enabled()):
        return logits
    values = torch.logsumexp(logits, dim=-1).square()
    if padding_mask is not None:
        values = torch.where(padding_mask, 0.0, values)
    loss = values.sum() * (config.moe_z_loss_coeff * step.num_parts / step.num_tokens)
    return _attached(router, logits, "z_loss", loss, config.moe_z_loss_coeff)


def _aux_loss(
    router: TopKRouter, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor, with_padding_mask: bool = False
) -> Tensor:
    coefficient = router.get_aux_loss_coeff("aux_loss")
    if not coefficient:
        return probs
    per_expert = _summed(routing_map.sum(dim=0), router.tp_cp_group)
    num_tokens = (per_expert.sum() / router.topk).clamp(min=1)
    loss = _balance(router, scores_for_aux_loss, per_expert, coefficient) / num_tokens**2
    return _attached(router, probs, "load_balancing_loss", loss, coefficient)


def _seq_aux_loss(
    router: TopKRouter,
    probs: Tensor,
    scores_for_aux_loss: Tensor,
    routing_map: Tensor,
    seq_length: int,
    bsz: int,
    with_padding_mask: bool = False,
) -> Tensor:
    coefficient, step = router.get_aux_loss_coeff("seq_aux_loss"), vars(router)["routed_step"]
    if not coefficient:
        return probs
    per_expert = _summed(routing_map.reshape(seq_length, -1).sum(dim=0), router.tp_cp_group)
    balance = _balance(router, scores_for_aux_loss.reshape(seq_length, -1), per_expert, coefficient)
    mean_length = step.num_tokens / step.num_samples
    loss = balance * (step.num_parts / (mean_length**2 * step.num_samples))
    return _attached(router, probs, "seq_load_balancing_loss", loss, coefficient)


def _global_aux_loss(
    router: TopKRouter, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor, with_padding_mask: bool = False
) -> Tensor:
    coefficient, step = router.get_aux_loss_coeff("global_aux_loss"), vars(router)["routed_step"]
    if not coefficient:
        return probs
    per_expert = _summed(routing_map.sum(dim=0), router.tp_dp_cp_group)
    num_tokens = (per_expert.sum() / router.topk).clamp(min=1)
    router.global_tokens_per_expert += per_expert
    router.ga_steps += 1
    so_far = router.global_tokens_per_expert.clone()  # the buffer changes before backward
    tokens_so_far = (so_far.sum() / router.topk).clamp(min=1)
    # The parts of the data-parallel ranks add up to the loss of their common micro-batch, and are not averaged.
    loss = _balance(router, scores_for_aux_loss, so_far, coefficient) / (num_tokens * tokens_so_far) * step.data_size
    return _attached(router, probs, "global_load_balancing_loss", loss, coefficient)


_EXACT: dict[str, Callable[..., Tensor]] = {
    "apply_z_loss": _z_loss,
    "_apply_aux_loss": _aux_loss,
    "_apply_seq_aux_loss": _seq_aux_loss,
    "_apply_global_aux_loss": _global_aux_loss,
}


def _summed(values: Tensor, group: Any) -> Tensor:
    """Communication: one all-reduce of [E] or [B E]."""
    from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region

    total: Tensor = reduce_from_tensor_model_parallel_region(values, group)
    return total


def _balance(router: TopKRouter, scores: Tensor, per_expert: Tensor, coefficient: float) -> Tensor:  # 0-d, not yet divided
    balance: Tensor = (scores.sum(dim=0) * per_expert).sum() * (router.num_experts * coefficient / router.topk)
    return balance


def _attached(router: TopKRouter, activation: Tensor, name: str, loss: Tensor, coefficient: float) -> Tensor:
    """The activation, with this rank's part of a loss that the schedule divides by num_parts; logged as Megatron logs its own."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, save_to_aux_losses_tracker

    config = router.config
    num_layers = config.num_layers + (config.mtp_num_layers or 0)
    # Since Megatron-Core 0.17 layers of multi-token prediction have numbers of their own.
    number = router.layer_number + (config.num_layers if vars(router).get("is_mtp_layer") else 0)
    save_to_aux_losses_tracker(name, loss / coefficient, number, num_layers, reduce_group=router.tp_cp_group)
    scaled: Tensor = MoEAuxLossAutoScaler.apply(activation, loss * vars(router)["routed_step"].gradient_factor)
    if scaled.requires_grad and "is_measured" not in vars(router):
        scaled.register_hook(functools.partial(_check_schedule, router))
    return scaled


def _check_schedule(router: TopKRouter, gradient: Tensor) -> None:
    """In the first backward, before the gradient of an auxiliary loss: raises ConfigError where the schedule gives it another scale
    than the one that exact undoes. Synchronises."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    if "is_measured" in vars(router):
        return
    config, step, found = router.config, vars(router)["routed_step"], MoEAuxLossAutoScaler.main_loss_backward_scale
    loss_scale = 1.0 if config.grad_scale_func is None else float(config.grad_scale_func(torch.ones(1, device=gradient.device)))
    expected, given = loss_scale * step.schedule_factor, 1.0 if found is None else float(found)
    if abs(given - expected) > 1e-5 * expected:  # a few float32 roundings
        raise ConfigError(
            f"--router-aux-loss exact: the installed schedule multiplies the losses of routers by {given:g}, and {expected:g} "
            f"(loss scale x cp / micro-batches) was expected, so they would train x {given / expected:g}: choose host or refuse, "
            "or install megatron-core 0.16 to 0.19"
        )
    vars(router)["is_measured"] = True


def _count_real_tokens(model: nn.Module) -> None:
    """Routers with an expert bias count the tokens of each expert. Megatron-Core 0.16 gives their mask a wrong shape."""

    def apply_expert_bias(router: TopKRouter, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        if router.enable_expert_bias and torch.is_grad_enabled():
            with torch.no_grad():
                real = routing_map if padding_mask is None else routing_map & ~padding_mask[:, None]
                router.local_tokens_per_expert += real.sum(dim=0)

    for router in routers_of(model):
        vars(router)["_apply_expert_bias"] = MethodType(apply_expert_bias, router)
