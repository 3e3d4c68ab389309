"""Gives the layers of a model the context-parallel group of a micro-batch, where it is another one than the model's.

Megatron-Core's PackedSeqParams has a place for it. Rotary positions and core attention read it there, with one exception: releases
up to 0.19 rotate the documents of a packed row by the model's own group. Hooks on the attention layers close that gap, as
Megatron-Core's development branch does: within its forward, and where backward recomputes it, a layer has its micro-batch's group.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from megatron_rl.errors import ConfigError
from megatron_rl.layout.context_groups import have_same_ranks
from megatron_rl.layout.groups import SINGLE, Group, resolve_groups
from megatron_rl.megatron.attention import PackedAttention
from megatron_rl.megatron.batch import ForwardInput
from megatron_rl.megatron.model import find_gpt_model

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer import TransformerConfig

# Bare models that have run a micro-batch over another group. From then on each forward names its group, because the layers of
# Transformer Engine keep the last one.
_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def packed_params_of(model: nn.Module, config: TransformerConfig, batch: ForwardInput) -> object | None:
    """The packed_seq_params of this forward: the batch's, with the micro-batch's group where it is not the model's.

    A padded batch gets some in the format sbhd, as in Megatron-Core's hybrid context parallelism. No communication.
    Raises ConfigError for own_group_problems.
    """
    own = resolve_groups(model).cp
    group = own if batch.cp_group is None or have_same_ranks(batch.cp_group, own) else batch.cp_group
    bare = find_gpt_model(model)
    if bare not in _models:
        if group is own:
            return batch.packed_seq_params
        problems = [f"{_sizes(group, own)}: {problem}" for problem in own_group_problems(bare, config, group)]
        if problems:
            raise ConfigError(problems)
        for layer in _attention_layers(bare):
            _take_group_of_call(layer)
        _models.add(bare)
    params: Any = _padded_params(batch, group) if batch.packed_seq_params is None else copy.copy(batch.packed_seq_params)
    params.cp_group, params.local_cp_size = group, group.size()
    return params  # type: ignore[no-any-return]


def _sizes(group: Group, own: Group) -> str:
    return f"a micro-batch over {group.size()} context-parallel ranks, in a model with {own.size()}"


def packed_params_name_groups() -> bool:
    """Whether the installed Megatron-Core's PackedSeqParams has a place for a micro-batch's group: since 0.16."""
    from megatron.core.packed_seq_params import PackedSeqParams

    return "cp_group" in (field.name for field in fields(PackedSeqParams))


def own_group_problems(bare: nn.Module, config: TransformerConfig, group: Group) -> Iterator[str]:
    """Why this model cannot run a micro-batch over a group that is not its own."""
    if not packed_params_name_groups():
        yield "PackedSeqParams of the installed Megatron-Core has no cp_group; install megatron-core 0.16 or later"
        return
    if group is SINGLE:
        yield "SINGLE is no process group, which layers need; take that of one rank from layout.context_groups.make_context_groups"
    for problem in own_group_problems_of(vars(config)):
        yield f"{problem}; give each micro-batch the model's group"
    modules = list(bare.modules())
    if any(type(module).__module__.startswith("megatron.core.ssm") for module in modules):
        yield "its state-space layers exchange over the model's group alone; give each micro-batch the model's group"
    kinds = {type(layer.core_attention).__name__ for layer in _attention_layers(bare) if not _takes_group(layer.core_attention)}
    if kinds:
        names = ", ".join(sorted(kinds))
        yield f"{names} does not read the group in packed_seq_params; use Transformer Engine's layers, or PackedAttention"


def own_group_problems_of(settings: Mapping[str, object]) -> Iterator[str]:
    """Of these settings of a TransformerConfig alone, without the remedy."""
    for name, why in _SETTINGS.items():
        if settings.get(name) not in (None, False, 0, "none"):
            yield f"{name}={settings[name]!r}: {why}"


# Settings under which a layer communicates over the model's own group, whatever packed_seq_params say.
_SETTINGS = {
    "multi_latent_attention": "its layers take the model's group alone",
    "experimental_attention_variant": "its layers take the model's group alone",
    "mtp_num_layers": "multi-token prediction shifts tokens over the model's group alone",
    "hierarchical_context_parallel_sizes": "its groups are made once",
    "enable_cuda_graph": "a graph repeats the group that it was captured with",
    "cuda_graph_impl": "a graph repeats the group that it was captured with",
}


def _attention_layers(bare: nn.Module) -> list[Any]:
    from megatron.core.transformer.attention import Attention

    return [module for module in bare.modules() if isinstance(module, Attention)]


def _takes_group(core_attention: nn.Module) -> bool:
    if isinstance(core_attention, PackedAttention):
        return True
    from megatron.core.extensions import transformer_engine

    kind = getattr(transformer_engine, "TEDotProductAttention", None)
    return isinstance(kind, type) and isinstance(core_attention, kind)


def _take_group_of_call(layer: Any) -> None:
    own = layer.pg_collection

    def place(layer: Any, args: object, named: Mapping[str, Any]) -> None:
        group = getattr(named.get("packed_seq_params"), "cp_group", None)
        if group is not None:
            layer.pg_collection = copy.copy(own)
            layer.pg_collection.cp = group

    def restore(layer: Any, *unused: object) -> None:
        layer.pg_collection = own

    layer.register_forward_pre_hook(place, with_kwargs=True)
    layer.register_forward_hook(restore, always_call=True)


def _padded_params(batch: ForwardInput, group: Group) -> PackedSeqParams:
    from megatron.core.packed_seq_params import PackedSeqParams

    num_rows, local = batch.tokens.shape
    length = local * group.size()
    bounds = torch.arange(num_rows + 1, dtype=torch.int32, device=batch.tokens.device) * length
    named = {f"cu_seqlens_{name}": bounds for name in ("q", "kv", "q_padded", "kv_padded")}
    return PackedSeqParams(qkv_format="sbhd", **named, max_seqlen_q=length, max_seqlen_kv=length)
