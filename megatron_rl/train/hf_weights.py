"""Reads and writes the weights of a Hugging Face folder for a GPTModel on any layout.

A rank reads only its own slices. What the folder lacks, or has beyond the architecture, is named from the files' headers, before
anything is allocated. Saving gathers one parameter at a time.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl.errors import ConfigError, printable
from megatron_rl.files.json_values import Fields
from megatron_rl.layout.agreement import on_all_ranks
from megatron_rl.layout.groups import all_gather_stack, resolve_group, resolve_groups
from megatron_rl.megatron.model import build_gpt_model, find_gpt_model, global_parameter_name, is_of_expert, sharding_of
from megatron_rl.train.hf_model import HFModel, described

INDEX, SINGLE_FILE, CONFIG = "model.safetensors.index.json", "model.safetensors", "config.json"
# Of a folder, besides the weights: what `transformers` reads, and the tokenizer.
COPIED = ("*.json", "*.model", "*.txt", "*.jinja")
# In a folder that `transformers` wrote before 4.32, and nothing to load.
IGNORED = re.compile(r".*\.rotary_emb\.inv_freq")
# The tensors of a parameter, by name, and their shapes. One is sharded as the parameter is. Two are [gate, up], each sharded by
# itself. Three are [query, key, value], mixed group by group and cut evenly over the ranks.
Source = Mapping[str, tuple[int, ...]]


def read_hf_model(folder: str | Path) -> HFModel:
    """Reads config.json and the headers of the weights. Nothing is allocated.

    Raises ConfigError for a folder without them, for an architecture or a setting that is not known here, and for tensors that are
    missing, not known or of another shape.
    """
    folder = Path(folder)
    model = described(folder, Fields.from_file(folder / CONFIG, "no folder of a Hugging Face checkpoint"))
    check_tensors(model, tensors_in(folder))
    return model


def build_hf_model(model: HFModel, config: Any, *, max_sequence_length: int, **options: Any) -> Any:  # GPTModel
    """This pipeline stage's GPTModel with the folder's weights.

    config: transformer_config(**model.transformer_options(), ...). options: of build_gpt_model. Communication: none.
    Raises ConfigError for what build_gpt_model refuses, and for a max_sequence_length beyond the model's positions or its window.
    """
    if max_sequence_length > model.longest:
        raise ConfigError(
            f"sequences of {max_sequence_length} tokens are longer than {model.longest}, the least of max_position_embeddings and "
            f"sliding_window in {model.folder / CONFIG}: take shorter prompts or responses"
        )
    tp_size = resolve_group(None, "tp").size()
    gpt = build_gpt_model(
        config,
        vocab_size=-(-model.vocab_size // tp_size) * tp_size,
        max_sequence_length=max_sequence_length,
        tie_embeddings=model.tie_embeddings,
        rotary=model.rotary,
        seed=None,
        **options,
    )
    load_weights(model, gpt)
    return gpt


def sources(model: HFModel) -> dict[str, Source]:
    """By the global name of the parameter."""
    hidden, head_size, experts = model.hidden_size, model.head_size, model.experts
    queries, keys = model.num_attention_heads * head_size, model.num_query_groups * head_size
    found: dict[str, Source] = {
        "embedding.word_embeddings.weight": {"model.embed_tokens.weight": (model.vocab_size, hidden)},
        "decoder.final_layernorm.weight": {"model.norm.weight": (hidden,)},
    }
    if not model.tie_embeddings:
        found["output_layer.weight"] = {"lm_head.weight": (model.vocab_size, hidden)}
    for layer in range(model.num_layers):
        here, there = f"decoder.layers.{layer}", f"model.layers.{layer}"
        mixed, attention = f"{here}.self_attention.linear_qkv", f"{there}.self_attn"
        widths = {f"{attention}.q_proj": queries, f"{attention}.k_proj": keys, f"{attention}.v_proj": keys}
        # A norm has the name that it has where Transformer Engine fuses it into the product behind it, as in global_parameter_name.
        found[f"{mixed}.layer_norm_weight"] = {f"{there}.input_layernorm.weight": (hidden,)}
        found[f"{mixed}.weight"] = {f"{name}.weight": (width, hidden) for name, width in widths.items()}
        if model.traits.has_qkv_bias:
            found[f"{mixed}.bias"] = {f"{name}.bias": (width,) for name, width in widths.items()}
        if model.traits.has_qk_norm:
            for part in "qk":
                found[f"{here}.self_attention.{part}_layernorm.weight"] = {f"{attention}.{part}_norm.weight": (head_size,)}
        found[f"{here}.self_attention.linear_proj.weight"] = {f"{attention}.o_proj.weight": (hidden, queries)}
        norm_of_mlp: Source = {f"{there}.post_attention_layernorm.weight": (hidden,)}
        if experts is None or not experts.layers[layer]:
            found[f"{here}.mlp.linear_fc1.layer_norm_weight"] = norm_of_mlp
            found |= _mlp(f"{here}.mlp", f"{there}.mlp", model.ffn_hidden_size, hidden)
            continue
        found[f"{here}.pre_mlp_layernorm.weight"] = norm_of_mlp
        found[f"{here}.mlp.router.weight"] = {f"{there}.mlp.gate.weight": (experts.count, hidden)}
        for expert in range(experts.count):
            found |= _mlp(f"{here}.mlp.experts.{expert}", f"{there}.mlp.experts.{expert}", experts.width, hidden)
    return found


def _mlp(here: str, there: str, width: int, hidden: int) -> dict[str, Source]:
    return {
        f"{here}.linear_fc1.weight": {f"{there}.{name}_proj.weight": (width, hidden) for name in ("gate", "up")},
        f"{here}.linear_fc2.weight": {f"{there}.down_proj.weight": (hidden, width)},
    }


# Reading


def tensors_in(folder: Path) -> dict[str, Any]:
    """Each tensor of the weights as a slice of safetensors: nothing is read of one but its header, until it is indexed."""
    from safetensors import SafetensorError, safe_open

    index, names, found = folder / INDEX, {SINGLE_FILE}, dict[str, Any]()
    if index.exists():
        names = {str(name) for name in Fields.from_file(index, "a broken checkpoint").table("weight_map").content.values()}
    for path in (folder / name for name in sorted(names)):
        try:
            file = safe_open(path, framework="pt")
            found |= {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  # no dict
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{path} cannot be read: {printable(str(error))}; fetch the folder again") from None
    return found


def check_tensors(model: HFModel, tensors: Mapping[str, Any]) -> None:
    """Raises ConfigError for tensors that are missing, not known, or of another shape, from the headers alone."""
    wanted = {name: shape for source in sources(model).values() for name, shape in source.items()}
    unknown = [name for name in tensors if name not in wanted and not IGNORED.fullmatch(name)]
    if model.tie_embeddings and "lm_head.weight" in unknown:
        unknown.remove("lm_head.weight")
    found = {name: tuple(one.get_shape()) for name, one in tensors.items() if name in wanted}
    misshapen = [f"{name} {shape} instead of {wanted[name]}" for name, shape in found.items() if shape != wanted[name]]
    problems = [
        f"{model.folder}: {len(names)} tensors {what} for {model.architecture} with the sizes of {CONFIG}: "
        f"{', '.join(sorted(names)[:4])}; {remedy}"
        for what, names, remedy in (
            ("missing", [name for name in wanted if name not in tensors], "fetch the folder again"),
            ("not known", unknown, "a variant that is not supported here: train it in miles, slime or verl"),
            ("of another shape", misshapen, f"take the {CONFIG} that belongs to these weights"),
        )
        if names
    ]
    if problems:
        raise ConfigError(problems)


@torch.no_grad()
def load_weights(model: HFModel, gpt: Any) -> None:
    """Fills this rank's parameters, in their own dtype. Padded rows of the vocabulary become 0. Communication: none."""
    parameter_sources, tensors = sources(model), tensors_in(model.folder)
    for name, parameter in gpt.named_parameters():
        given = [tensors[one] for one in parameter_sources[global_parameter_name(gpt, name)]]
        dim, group = sharding_of(name, parameter)
        if len(given) == 3:
            values = _own_groups(given, model.num_query_groups, group.rank(), group.size())
        else:
            values = torch.cat([_own_slice(tensor, dim, group.rank(), group.size()) for tensor in given])
        parameter.zero_()
        parameter[tuple(slice(0, size) for size in values.shape)] = values.to(parameter)


def _own_slice(tensor: Any, dim: int | None, rank: int, size: int) -> Tensor:
    if dim is None:
        whole: Tensor = tensor[:]
        return whole
    # The vocabulary is padded to a multiple of the ranks, so the last ranks may hold fewer rows, or none.
    length = tensor.get_shape()[dim]
    share = math.ceil(length / size)
    start, end = min(rank * share, length), min((rank + 1) * share, length)
    own: Tensor = tensor[start:end] if dim == 0 else tensor[:, start:end]
    return own


def _own_groups(tensors: Sequence[Any], num_groups: int, rank: int, size: int) -> Tensor:
    """This rank's rows of all query groups, which are cut evenly over the ranks. A group is [its queries, its key, its value]. With
    fewer groups than ranks a rank holds a part of one group, as Megatron's linear_qkv does."""
    first, end = rank * num_groups // size, -(-(rank + 1) * num_groups // size)
    by_group = []
    for tensor in tensors:
        width = tensor.get_shape()[0] // num_groups
        rows: Tensor = tensor[first * width : end * width]
        by_group.append(rows.view(end - first, width, *rows.shape[1:]))
    groups = torch.cat(by_group, 1)
    group_width = groups.shape[1]
    share = num_groups * group_width // size
    return groups.flatten(0, 1).narrow(0, rank * share - first * group_width, share)


# Writing


@torch.no_grad()
def save_hf_checkpoint(model: HFModel, chunks: Iterable[Any], folder: str | Path) -> None:
    """Writes the weights of the model on all ranks to `folder`, with the settings and the tokenizer of the folder it came from.

    It is written as folder.partial and then renamed, so `folder` is whole or not there. Every rank calls it. A rank writes what it
    holds first: of a pipeline stage the rank 0 of tp and dp-cp, of experts rank 0 of their groups. Weights keep the dtype that they
    have here.
    Communication: an all-gather of each sharded parameter over its group, and the names of the written tensors over all ranks.
    Raises on all ranks where a file cannot be written.
    """
    here, partial = torch.distributed.get_rank(), Path(f"{folder}.partial")
    own = _tensors_of_this_rank(model, chunks)
    written = on_all_ranks(lambda: [(name, tensor.nbytes) for name, tensor in own.items()])
    writers = [rank for rank, names in enumerate(written) if names]
    file_of = {rank: f"model-{number:05d}-of-{len(writers):05d}.safetensors" for number, rank in enumerate(writers, 1)}

    def write() -> None:
        from safetensors.torch import save_file

        partial.mkdir(parents=True, exist_ok=True)
        if own:
            save_file(own, partial / file_of[here], metadata={"format": "pt"})
        if here == 0:
            weight_map = {name: file_of[rank] for rank, names in enumerate(written) for name, _ in names}
            total = sum(size for names in written for _, size in names)
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (partial / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
            for path in {path for pattern in COPIED for path in model.folder.glob(pattern)} - {model.folder / INDEX}:
                shutil.copyfile(path, partial / path.name)

    on_all_ranks(write)
    on_all_ranks(lambda: here == 0 and partial.replace(folder))


def save_hf_problem(folder: Path, output_dir: str) -> str | None:
    """Why no folder can be written there, from what is there."""
    for place in (folder, Path(f"{folder}.partial")):
        if os.path.lexists(place):
            return f"{place} is there already"
    return "--output-dir would be inside" if Path(output_dir).absolute().is_relative_to(folder.absolute()) else None


def _tensors_of_this_rank(model: HFModel, chunks: Iterable[Any]) -> dict[str, Tensor]:
    parameter_sources, own = sources(model), dict[str, Tensor]()
    for chunk in chunks:
        gpt = find_gpt_model(chunk)
        for name, parameter in gpt.named_parameters():
            dim, group = sharding_of(name, parameter)
            shards = [parameter.detach()] if dim is None else list(all_gather_stack(parameter.detach().contiguous(), group))
            replicas = resolve_group(None, "expert_dp") if is_of_expert(name) else resolve_groups().dp_cp
            is_second_copy = name == "output_layer.weight" and model.tie_embeddings
            if group.rank() or replicas.rank() or is_second_copy:
                continue
            source = parameter_sources[global_parameter_name(gpt, name)]
            parts = _separated(source, shards, dim, model.num_query_groups)
            own |= {name: part.contiguous().cpu().clone() for name, part in zip(source, parts, strict=True)}
    return own


def _separated(source: Source, shards: Sequence[Tensor], dim: int | None, num_groups: int) -> Sequence[Tensor]:
    """The tensors of a parameter, from the shards of all ranks."""
    if len(source) == 3:  # the groups of all ranks stand one after another, also where a rank holds a part of one
        joined = torch.cat(list(shards))
        sizes = [shape[0] // num_groups for shape in source.values()]
        split = joined.view(num_groups, sum(sizes), *joined.shape[1:]).split(sizes, 1)
        return [part.flatten(0, 1) for part in split]
    if len(source) == 2:
        halves = [shard.chunk(2) for shard in shards]
        return [torch.cat([halves_of_shard[place] for halves_of_shard in halves]) for place in range(2)]
    whole = shards[0] if dim is None else torch.cat(list(shards), dim)
    ((num_rows, *_),) = source.values()
    return [whole[:num_rows]]  # without the padding of the vocabulary
