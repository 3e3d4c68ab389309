"""Makes context-parallel groups of single micro-batches, and gives them to layers and to Megatron-Core's hybrid schedule.

PackedSeqParams has a place for the group. Rotary positions and core attention read it there, with one exception: releases to 0.19
rotate the documents of a packed row by the model's own group. Hooks on the attention layers close that gap, as Megatron-Core's
development branch does: within its forward, and where backward recomputes it, a layer has its micro-batch's group.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_rl.errors import ConfigError
from megatron_rl.layout.groups import (
    Group,
    all_gather_stack,
    group_device,
    process_group,
    resolve_group,
    resolve_groups,
    world_group,
)
from megatron_rl.megatron.attention import PackedAttention
from megatron_rl.megatron.batch import ForwardInput
from megatron_rl.megatron.model import find_gpt_model

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

# Bare models that have run a micro-batch over another group. From then on each forward names its group, because the layers of
# Transformer Engine keep the last one.
models_with_groups: weakref.WeakSet[nn.Module] = weakref.WeakSet()
# Settings under which a layer communicates over one group, the model's or one that was captured, whatever packed_seq_params say.
_SETTINGS = (
    "multi_latent_attention",
    "experimental_attention_variant",
    "mtp_num_layers",
    "hierarchical_context_parallel_sizes",
    "enable_cuda_graph",
    "cuda_graph_impl",
)


def make_context_groups(sizes: Iterable[int], dp_cp_group: Group | None = None) -> dict[int, Group]:
    """{size: this rank's context-parallel group of that size}, of neighbours in the dp-cp group, as Megatron-Core makes them.

    They are for micro-batches with groups of their own. torch.distributed.new_group makes each, so every rank of the world calls
    this function, with the same sizes, in the same order as its other calls of new_group. A group of one rank is a process group
    too, because the layers of a model ask torch for its ranks.
    Communication: one all-gather over the world, and the making of groups.
    Raises ConfigError for a size that does not divide the dp-cp group.
    """
    dp_cp_group = resolve_group(dp_cp_group, "dp_cp")
    sizes = sorted(set(sizes))
    wrong = [size for size in sizes if size < 1 or dp_cp_group.size() % size]
    if wrong:
        size = dp_cp_group.size()
        choices = ", ".join(str(number) for number in range(1, size + 1) if size % number == 0)
        raise ConfigError(f"context-parallel sizes {wrong} do not divide the {size} ranks of dp x cp: choose of {choices}")
    world = world_group()
    own = dist.get_process_group_ranks(process_group(dp_cp_group)) if dp_cp_group.size() > 1 else [dist.get_rank()]
    ranks = torch.tensor(own, device=group_device(world))
    found: dict[int, Group] = {}
    for members in sorted({tuple(row) for row in all_gather_stack(ranks, world).tolist()}):
        for size in sizes:
            for start in range(0, len(members), size):
                group = dist.new_group(list(members[start : start + size]))
                if dist.get_rank() in members[start : start + size]:
                    found[size] = group
    return found


def params_with_group(model: nn.Module, config: TransformerConfig, batch: ForwardInput, group: Group) -> object:
    """The packed_seq_params of a forward over this group, which its layers take from now on.

    A padded batch gets some in the format sbhd, as in Megatron-Core's hybrid context parallelism. No communication.
    Raises ConfigError where a layer would use the model's group all the same.
    """
    bare = find_gpt_model(model)
    if bare not in models_with_groups:
        from megatron.core.transformer.attention import Attention

        layers = [module for module in bare.modules() if isinstance(module, Attention)]
        problems = [*own_group_problems(vars(config)), *_layer_problems(bare, layers)]
        if problems:
            own_size = resolve_groups(model).cp.size()
            sizes = f"a micro-batch over {group.size()} context-parallel ranks, in a model with {own_size}"
            raise ConfigError([f"{sizes}: {problem}; give each micro-batch the model's group" for problem in problems])
        for layer in layers:
            _take_group_of_call(layer)
        models_with_groups.add(bare)
    params: Any = _padded_params(batch, group) if batch.packed_seq_params is None else copy.copy(batch.packed_seq_params)
    params.cp_group, params.local_cp_size = group, group.size()
    return params


def own_group_problems(settings: Mapping[str, object]) -> Iterator[str]:
    """Of these settings of a TransformerConfig, without the remedy."""
    for name in _SETTINGS:
        if settings.get(name) not in (None, False, 0, "none"):
            yield f"{name}={settings[name]!r}: its layers take only one group"


def _layer_problems(bare: nn.Module, layers: Sequence[Any]) -> Iterator[str]:
    if any(type(module).__module__.startswith("megatron.core.ssm") for module in bare.modules()):
        yield "its state-space layers exchange only over the model's group"
    from megatron.core.extensions import transformer_engine

    engine_attention = getattr(transformer_engine, "TEDotProductAttention", None)
    takes_group = (PackedAttention, engine_attention) if isinstance(engine_attention, type) else PackedAttention
    kinds = {type(layer.core_attention).__name__ for layer in layers if not isinstance(layer.core_attention, takes_group)}
    if kinds:
        yield f"{', '.join(sorted(kinds))} does not read the group in packed_seq_params"


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


def _padded_params(batch: ForwardInput, group: Group) -> object:
    from megatron.core.packed_seq_params import PackedSeqParams

    num_rows, local = batch.tokens.shape
    length = local * group.size()
    bounds = torch.arange(num_rows + 1, dtype=torch.int32, device=batch.tokens.device) * length
    named = {f"cu_seqlens_{name}": bounds for name in ("q", "kv", "q_padded", "kv_padded")}
    return PackedSeqParams(qkv_format="sbhd", **named, max_seqlen_q=length, max_seqlen_kv=length)


def hybrid_data(
    rounds: Sequence[Sequence[Group]], dp_cp_group: Group
) -> Iterator[tuple[dict[int, dict[str, Any]], list[list[list[int]]]]]:
    """The data_iterator of a step for the schedule of Megatron-Core's hybrid context parallelism (hybrid_context_parallel in a
    model's config). rounds: of each round the groups of this rank's micro-batches; every rank has as many rounds.

    The schedule runs rounds, with a barrier after each, in which a rank stays in one group and ranks run different numbers of
    micro-batches. It hands a sample to the first tensor-parallel rank alone, so the forward step takes its micro-batches elsewhere:

        batches = iter(batches of this rank, in the order of the rounds)
        forward_step_func=lambda _, model: policy_forward_step(batches, model)
        data_iterator=hybrid_data([[batch.cp_group for batch in round_groups] for round_groups in rounds], groups.dp_cp)

    As Megatron-Core's HybridCPDataLoaderWrapper it gives samples by number, and their numbers by round and dp-cp rank. Of the other
    ranks only this rank's samples are known, and the schedule reads no more. No communication.
    Raises ConfigError for a last round without a micro-batch: the schedule reduces gradients in its last backward.
    """
    if not rounds or not rounds[-1]:
        raise ConfigError(
            "the last of the rounds has no micro-batch on this rank, and the schedule reduces gradients in its last backward: make "
            "one without samples"
        )
    numbers, rounds_of_ranks = count(), []
    samples: dict[int, dict[str, Any]] = {}
    places = {rank: place for place, rank in enumerate(_ranks(dp_cp_group))}
    for round_groups in rounds:
        numbers_of_ranks: list[list[int]] = [[] for _ in places]
        for group in round_groups:
            number = next(numbers)
            samples[number] = {}
            for rank in _ranks(group):
                numbers_of_ranks[places[rank]].append(number)
        rounds_of_ranks.append(numbers_of_ranks)
    return iter([(samples, rounds_of_ranks)])


def _ranks(group: Group) -> list[int]:
    return [dist.get_rank()] if group.size() == 1 else list(dist.get_process_group_ranks(process_group(group)))
