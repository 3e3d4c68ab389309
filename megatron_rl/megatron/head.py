"""Replaces the forward of a model's output layer for one call. Megatron's classes do not change.

Fused: the layer computes nothing and gives its hidden states and weight to the loss. fp32: the layer computes float32 logits. The
layer's own forward is restored before the call returns. Hooks on the layer run as usual.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron_rl.config import DEFAULT_MAX_LOGITS_BYTES, PolicyLossConfig
from megatron_rl.errors import ConfigError, name_of, place_of
from megatron_rl.layout.groups import Group, have_same_ranks, resolve_groups
from megatron_rl.megatron.batch import ForwardInput
from megatron_rl.megatron.context_groups import models_with_groups, params_with_group
from megatron_rl.megatron.model import find_gpt_model, find_output_layer, model_config_of
from megatron_rl.megatron.router_losses import routed
from megatron_rl.ops.fp32_head import fp32_head_logits

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

# Where our forward of an output layer holds the layer's own.
OWN = "_megatron_rl_own_forward"
# The one value that a replaced layer returns. Any scale or soft cap would change it.
_MARK = 1000.0
# Layers whose model returns their output unchanged. On CUDA the check synchronises, so it is done once.
_plain_heads: weakref.WeakSet[nn.Module] = weakref.WeakSet()
# Bare models -> what they were checked for: the settings, and what hands the output layer a part of its rows.
_checked: weakref.WeakKeyDictionary[nn.Module, set[tuple[HeadSettings, str]]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadSettings:
    """What a model's output layer computes. With the defaults it is not replaced. setting: what the user typed, in a host that has
    a switch of its own."""

    is_fused: bool = False
    is_fp32: bool = False
    max_logits_bytes: int = DEFAULT_MAX_LOGITS_BYTES
    setting: str | None = None

    @property
    def is_on(self) -> bool:
        return self.is_fused or self.is_fp32

    @classmethod
    def of(cls, config: PolicyLossConfig) -> HeadSettings:
        fused, fp32, largest = config.fused_lm_head_loss, config.fp32_lm_head, config.max_logits_bytes
        return cls(is_fused=fused, is_fp32=fp32, max_logits_bytes=largest)


@dataclass(frozen=True, slots=True)
class HeadInputs:
    """The arguments of the output layer. `weight` is the parameter in use: the layer's, or the embedding's where tied."""

    hidden: Tensor  # [S, B, H]; under sequence parallelism [S / tp, B, H]
    weight: Tensor  # [V_tp, H]
    is_sequence_parallel: bool


def setting_problems(settings: HeadSettings, config: TransformerConfig) -> Iterator[str]:
    """Why the settings do not fit the model's config; the same on every rank."""
    flags = flags_of(settings)
    if not flags:
        return
    if config.defer_embedding_wgrad_compute:
        yield (
            f"{flags} with defer_embedding_wgrad_compute=True: the output layer's gradient is computed here and not deferred; "
            f"remove --defer-embedding-wgrad-compute or {flags}"
        )
    if settings.is_fp32 and not (config.bf16 or config.fp16) and config.params_dtype == torch.float32:
        yield (
            "--fp32-lm-head has no effect with float32 parameters: their logits are float32 already; remove it, or train 16-bit "
            "parameters with --bf16"
        )


class ModelOutput(NamedTuple):
    """output: for the schedule. inputs: the arguments of the output layer, if it is fused and on this stage. further: of each layer
    of multi-token prediction the logits [B, S, V_tp], or in place of them these arguments."""

    output: Tensor
    inputs: HeadInputs | None
    further: tuple[Tensor | HeadInputs, ...] = ()


def run_model(
    model: nn.Module,
    batch: ForwardInput,
    settings: HeadSettings,
    tp_group: Group,
    positions: Tensor | None = None,  # [B] int64, one for each sequence of this context-parallel rank; not with a fused head
    *,
    num_further: int = 0,  # layers of multi-token prediction that run
) -> ModelOutput:
    """Without labels the model of the last stage returns this tensor-parallel rank's logits [B, S, V_tp], without a gather; with
    `positions` the logits of one position of each sequence, [B, 1, V_tp]; with a fused head one number in their place.
    Raises ConfigError where the head does not fit the model.
    """
    config, layer = model_config_of(model), find_output_layer(model)
    use = "multi-token prediction" if num_further else "sampling" if positions is not None else ""
    _check_once(model, layer, settings, tp_group, use)
    packed = packed_params_of(model, config, batch)
    extra: dict[str, object] = {} if packed is None else {"packed_seq_params": packed}
    extra |= without_upcast(model)
    has_routers = config.num_moe_experts is not None or batch.routes is not None

    def call() -> Tensor:
        no_routers: AbstractContextManager[dict[str, Tensor]] = nullcontext({})
        routers = routed(model, config, batch, tp_group) if has_routers else no_routers
        with routers as padding, _rows_of_layers(model, trains_mtp=num_further > 0):
            output: Tensor = model(batch.tokens, batch.position_ids, None, **extra, **padding)
        return output

    if layer is None or not (settings.is_on or use):
        return ModelOutput(call(), None)
    detaches = vars(config).get("mtp_detach_heads", False)  # since Megatron-Core 0.19
    parts_of = partial(_parts_of, num_further=num_further, detaches=detaches)
    if settings.is_fused:
        return _with_inputs(layer, call, parts_of)
    return _with_logits(layer, call, parts_of, settings, tp_group, positions)


def packed_params_of(model: nn.Module, config: TransformerConfig, batch: ForwardInput) -> object | None:
    """The packed_seq_params of this forward: the batch's, with the micro-batch's group where it is not the model's.
    Raises what params_with_group raises."""
    own = resolve_groups(model).cp
    group = own if batch.cp_group is None or have_same_ranks(batch.cp_group, own) else batch.cp_group
    if group is own and find_gpt_model(model) not in models_with_groups:
        return batch.packed_seq_params
    return params_with_group(model, config, batch, group)


def _check_once(model: nn.Module, layer: Any, settings: HeadSettings, tp_group: Group, use: str) -> None:
    bare = find_gpt_model(model)
    known = _checked.setdefault(bare, set())
    if (settings, use) in known:
        return
    problems = list(setting_problems(settings, model_config_of(model)))
    if layer is not None:
        problems += layer_problems(layer, settings, tp_group, use)
    elif settings.is_on and getattr(bare, "post_process", False):
        problems.append(unfound_problem(model, settings))
    if layer is not None and settings.is_fused and is_sharded_behind_forward(model):
        problems.append(sharded_problem(settings))
    if problems:
        raise ConfigError(problems)
    known.add((settings, use))


def _with_logits(
    layer: Any,
    call: Callable[[], Tensor],
    parts_of: Callable[[HeadInputs], list[HeadInputs]],
    settings: HeadSettings,
    tp_group: Group,
    positions: Tensor | None,
) -> ModelOutput:
    own: Callable[..., tuple[Tensor, None]] = layer.forward
    further: list[Tensor] = []

    def logits_of(inputs: HeadInputs) -> Tensor:
        if positions is not None:
            rows = HeadInputs(_rows_at(inputs, positions, tp_group)[None], inputs.weight, False)
            with _given_whole_rows(layer):
                return logits_of_part(rows)
        main, *layer_rows = parts_of(inputs)
        further.extend(logits_of_part(part).transpose(0, 1) for part in layer_rows)
        return logits_of_part(main)

    def logits_of_part(inputs: HeadInputs) -> Tensor:
        if settings.is_fp32:
            is_sharded = inputs.is_sequence_parallel
            return fp32_head_logits(inputs.hidden, inputs.weight, tp_group=tp_group, sequence_parallel=is_sharded)
        logits: Tensor = own(inputs.hidden, weight=inputs.weight)[0]
        return logits

    with replaced(layer, logits_of):
        return ModelOutput(call(), None, tuple(further))


def _with_inputs(layer: Any, call: Callable[[], Tensor], parts_of: Callable[[HeadInputs], list[HeadInputs]]) -> ModelOutput:
    with_gradient, seen = torch.is_grad_enabled(), []

    def keep(inputs: HeadInputs) -> Tensor:
        if with_gradient and not torch.is_grad_enabled():
            raise ConfigError(
                "--fused-lm-head-loss with activation recomputation around the output layer: its hidden states would have no "
                "gradient; recompute only the transformer layers, or remove --fused-lm-head-loss"
            )
        seen.append(inputs)
        return inputs.hidden.new_full((1, 1, 1), _MARK, dtype=torch.float32)

    with replaced(layer, keep):
        output = call()
    _check_mark(layer, output, len(seen))
    main, *further = parts_of(seen[0])
    return ModelOutput(output, main, tuple(further))


def _parts_of(inputs: HeadInputs, num_further: int, detaches: bool) -> list[HeadInputs]:
    """The model's own rows, then those of each layer of multi-token prediction. detaches: the latter do not train the weight."""
    main, *others = inputs.hidden.chunk(1 + num_further)
    weight = inputs.weight.detach() if detaches else inputs.weight
    return [replace(inputs, hidden=main), *(replace(inputs, hidden=hidden, weight=weight) for hidden in others)]


@contextmanager
def _rows_of_layers(model: nn.Module, *, trains_mtp: bool) -> Iterator[None]:
    """Inside the block GPTModel hands its output layer its own rows. With trains_mtp those of each layer of multi-token prediction
    follow; else these layers do not run. It adds no loss.

    Megatron-Core's forward wants labels where its config has such layers: there it finds none. The decoder's config stays.
    """
    bare: Any = find_gpt_model(model)
    if not model_config_of(model).mtp_num_layers:
        yield
        return
    own, has_layers = bare.config, bare.mtp_process
    is_tied = has_layers and bare.share_embeddings_and_output_weights
    if is_tied:  # without these layers GPTModel would take the last stage's own weight, which is not trained
        weight = bare.shared_embedding_or_output_weight()
        # The head may add to main_grad itself. The embedding of these layers has a gradient too, which the hook must still add.
        weight.zero_out_wgrad = True
        vars(bare)["shared_embedding_or_output_weight"] = lambda: weight
    bare.config = copy.copy(own)
    bare.config.mtp_num_layers = None
    bare.mtp_process = has_layers and trains_mtp
    try:
        yield
    finally:
        bare.config, bare.mtp_process = own, has_layers
        vars(bare).pop("shared_embedding_or_output_weight", None)


def unfound_problem(model: nn.Module, settings: HeadSettings) -> str:
    """Of a last stage whose logits are computed by a layer that find_output_layer does not know."""
    return (
        f"{flags_of(settings)}: the model is a {type(find_gpt_model(model)).__name__} whose output layer is not found: neither it "
        f"nor its language_model has the attribute output_layer; remove {flags_of(settings)}"
    )


def without_upcast(model: nn.Module) -> dict[str, bool]:
    """The keyword that keeps Float16Module from a float32 copy of 16-bit logits; else nothing.

    The losses compute in float32 from 16-bit logits. The copy would have the same values, and its backward the same rounding. So
    the results are equal, without a float32 tensor [T, V_tp].
    """
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.transformer.module import Float16Module

    while isinstance(model, DistributedDataParallel):
        model = model.module
    return {"fp32_output": False} if isinstance(model, Float16Module) else {}


def forward_through(layer: Any, compute: Callable[[HeadInputs], Tensor]) -> Callable[..., tuple[Tensor, None]]:
    """A forward for this layer that returns what `compute` makes of its arguments."""

    def forward(input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None) -> tuple[Tensor, None]:
        if runtime_gather_output:
            raise ConfigError("the output layer was asked to gather logits over tp, which this loss does not need: pass None")
        return compute(HeadInputs(input_, layer.weight if weight is None else weight, layer.sequence_parallel)), None

    setattr(forward, OWN, own_forward(layer))
    return forward


def own_forward(layer: Any) -> Callable[..., Any]:
    """The layer's forward as the model was built, also while the layer has one of ours."""
    forward = getattr(layer, "forward", layer)
    found: Callable[..., Any] = getattr(forward, OWN, forward)
    return found


@contextmanager
def replaced(layer: Any, compute: Callable[[HeadInputs], Tensor]) -> Iterator[None]:
    """Inside the block the layer's forward is `compute`. Only the instance is changed, and restored afterwards."""
    own = vars(layer).get("forward")
    layer.forward = forward_through(layer, compute)
    try:
        yield
    finally:
        del layer.forward
        if own is not None:
            layer.forward = own


def rows_of(inputs: HeadInputs, tp_group: Group) -> tuple[Tensor, bool]:
    """(hidden states in the order of a PolicyBatch, [T, H] or [T / tp, H]; whether they are [T / tp, H]).

    Megatron's order is [S, B]; the order of a batch is row after row. Shards of a single row stay sharded. Shards of several rows
    are gathered, and backward takes this rank's part of a gradient that is complete over tp.
    Communication: as whole_sequences for several rows, else none.
    """
    hidden = inputs.hidden
    if hidden.shape[1] == 1:
        return hidden.flatten(0, 1), inputs.is_sequence_parallel
    return whole_sequences(inputs, tp_group).transpose(0, 1).flatten(0, 1), False


def whole_sequences(inputs: HeadInputs, tp_group: Group) -> Tensor:  # [S, B, H]
    """This context-parallel rank's hidden states on every tp rank. Their gradient must be complete over tp.

    Communication: under sequence parallelism one all-gather over tp, else none.
    """
    if not inputs.is_sequence_parallel:
        return inputs.hidden
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

    hidden: Tensor = gather_from_sequence_parallel_region(inputs.hidden, tensor_parallel_output_grad=False, group=tp_group)
    return hidden


def _rows_at(inputs: HeadInputs, positions: Tensor, tp_group: Group) -> Tensor:  # [B, H]
    """One position of each sequence; several of a single sequence."""
    hidden = whole_sequences(inputs, tp_group)
    if hidden.shape[1] == 1:
        return hidden[positions, 0]
    return hidden[positions, torch.arange(positions.shape[0], device=positions.device)]


@contextmanager
def _given_whole_rows(layer: Any) -> Iterator[None]:
    """Inside the block the layer does not gather its rows over tp, because each rank has them all."""
    gathers = layer.sequence_parallel
    layer.sequence_parallel = False
    try:
        yield
    finally:
        layer.sequence_parallel = gathers


def is_free_in_forward(model: nn.Module) -> bool:
    """Whether forward may write into the gradient buffers: not if Megatron gathers fp8 parameters through them."""
    found: nn.Module | None = model
    while found is not None:
        ddp_config = getattr(found, "ddp_config", None)
        if ddp_config is not None and vars(ddp_config).get("reuse_grad_buf_for_mxfp8_param_ag", False):
            return False
        found = getattr(found, "module", None)
    return True


def flags_of(settings: HeadSettings) -> str:
    """What the user typed, for a message."""
    if settings.setting is not None:
        return settings.setting
    flags = {"--fused-lm-head-loss": settings.is_fused, "--fp32-lm-head": settings.is_fp32}
    return " and ".join(flag for flag, is_on in flags.items() if is_on)


def is_sharded_behind_forward(model: nn.Module) -> bool:
    """Whether FSDP, torch's or Megatron's, holds the parameters between forwards."""
    from torch.distributed.tensor import DTensor  # takes seconds to import, and a trainer has done so

    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def sharded_problem(settings: HeadSettings) -> str:
    return (
        f"{flags_of(settings)} with FSDP: the weight of the output layer is whole within the layer's own forward alone, and the "
        f"loss reads it later; train with Megatron's DistributedDataParallel, or remove {flags_of(settings)}"
    )


def layer_problems(layer: Any, settings: HeadSettings, tp_group: Group, replaced_for: str = "") -> Iterator[str]:
    """Why the loss would not be that of this model, by its output layer alone: the same on every rank that has the layer.

    Under our head the layer must give this rank's part of X W^T, as Megatron's own does. Hooks on it are not looked at.
    replaced_for: what hands the layer a part of its rows, with its weight, where no head of ours is on.
    """
    if settings.is_on or replaced_for:
        yield from _product_problems(layer, flags_of(settings) or replaced_for)
    if settings.is_on and getattr(layer, "bias", None) is not None:
        yield f"{flags_of(settings)} with a bias in the output layer: only X W^T is computed; build it with bias=False"
    if getattr(layer, "gather_output", False) and tp_group.size() > 1:
        yield (
            f"the output layer gathers its logits over {tp_group.size()} tensor-parallel ranks (gather_output=True): the loss "
            "takes them for one rank's part of the vocabulary, and the head would be trained in part; build the model with "
            "parallel_output=True"
        )


def _product_problems(layer: Any, flags: str) -> Iterator[str]:
    from megatron.core.tensor_parallel import ColumnParallelLinear

    # Megatron's branch dev, and that of miles, build a subclass. Without labels its forward is that of ColumnParallelLinear.
    module = sys.modules.get("megatron.core.transformer.linear_cross_entropy")
    plain = (ColumnParallelLinear, getattr(module, "LinearCrossEntropyModule", ColumnParallelLinear))
    forward = own_forward(layer)
    if forward not in [MethodType(known.forward, layer) for known in plain]:
        what = f", {'a subclass of' if isinstance(layer, ColumnParallelLinear) else 'not'} Megatron's ColumnParallelLinear"
        what = " whose forward was replaced" if "forward" in vars(layer) else what
        yield (
            f"{flags}: the output layer is a {type(layer).__name__}{what}. It computes by {name_of(forward)} "
            f"({place_of(forward)}). Our head computes X W^T only, so an adapter, a scale or a soft cap would be lost. "
            f"Remove {flags}, or build the plain layer (leave the output layer out of the adapter's target modules)"
        )


def _check_mark(layer: nn.Module, output: Tensor, num_calls: int) -> None:
    """Raises ConfigError for a model that calls the layer twice or changes its output: its logits are not X W^T."""
    if num_calls == 1 and output.is_cuda and layer in _plain_heads:
        return
    if num_calls != 1 or output.numel() != 1 or output.item() != _MARK:
        raise ConfigError(
            f"--fused-lm-head-loss: this model calls its output layer {num_calls} times"
            + (" and changes the logits afterwards (a scale or a soft cap)" if num_calls == 1 else "")
            + "; the loss would be of other logits: remove --fused-lm-head-loss"
        )
    _plain_heads.add(layer)
