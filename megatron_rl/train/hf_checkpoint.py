"""Reads and writes checkpoints of Hugging Face's format for a GPTModel on any layout: Llama, Qwen2, Qwen3 dense and with experts.

A rank reads only its own slices. What the folder lacks, or has beyond the architecture, is named from the files' headers, before
anything is allocated. Saving gathers one parameter at a time.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from megatron_rl.errors import ConfigError, RunError, printable
from megatron_rl.files.json_values import Fields
from megatron_rl.files.safetensors_header import TensorEntry, read_safetensors_header
from megatron_rl.layout.agreement import on_all_ranks
from megatron_rl.layout.groups import all_gather_stack, resolve_group, resolve_groups
from megatron_rl.megatron.model import build_gpt_model, find_gpt_model, global_parameter_name, is_of_expert, sharding_of
from megatron_rl.megatron.rotary import Rotary
from megatron_rl.train.checkpoints import kind_of_checkpoint
from megatron_rl.train.hf_rotary import rotary_of

INDEX, SINGLE_FILE, CONFIG = "model.safetensors.index.json", "model.safetensors", "config.json"
# Of a folder, besides the weights: what `transformers` reads, and the tokenizer.
COPIED = ("*.json", "*.model", "*.txt", "*.jinja")
# In a folder that a run wrote: which one.
MARKER = "megatron_rl_run.json"
# What to do where the tensors do not fit config.json.
MISSHAPEN_REMEDY = f"{CONFIG} is of another model: take the one that belongs to these weights"
MISSING_REMEDY = f"after an incomplete download: fetch the folder again; else {MISSHAPEN_REMEDY}"
UNKNOWN_REMEDY = f"a variant that is not supported here: train it in miles, slime or verl; else {MISSHAPEN_REMEDY}"
# In a folder that `transformers` wrote before 4.32, and nothing to load.
IGNORED = re.compile(r".*\.rotary_emb\.inv_freq")


@dataclass(frozen=True, slots=True)
class Architecture:
    """What differs between the architectures, apart from sizes."""

    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    has_experts: bool = False


ARCHITECTURES: Mapping[str, Architecture] = {
    "LlamaForCausalLM": Architecture(),
    "Qwen2ForCausalLM": Architecture(has_qkv_bias=True),
    "Qwen3ForCausalLM": Architecture(has_qk_norm=True),
    "Qwen3MoeForCausalLM": Architecture(has_qk_norm=True, has_experts=True),
}
# What the mapping below does not compute, with the value that turns it off.
_MUST_BE: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class HFModel:
    """A checked folder. config: keywords of transformer_config, but the three sizes that it takes by name."""

    folder: Path
    architecture: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    head_size: int
    ffn_hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    tie_embeddings: bool
    rotary: Rotary
    norm_eps: float
    num_experts: int = 0
    expert_ffn_hidden_size: int = 0
    experts_per_token: int = 0
    normalizes_experts: bool = True
    expert_layers: tuple[bool, ...] = ()

    @property
    def traits(self) -> Architecture:
        return ARCHITECTURES[self.architecture]

    def transformer_options(self) -> dict[str, Any]:
        """Keywords of transformer_config."""
        options: dict[str, Any] = {
            "num_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "num_attention_heads": self.num_attention_heads,
            "num_query_groups": self.num_query_groups,
            "kv_channels": self.head_size,
            "ffn_hidden_size": self.ffn_hidden_size,
            "normalization": "RMSNorm",
            "layernorm_epsilon": self.norm_eps,
            "gated_linear_unit": True,
            "activation_func": silu,
            "add_bias_linear": False,
            "add_qkv_bias": self.traits.has_qkv_bias,
            "qk_layernorm": self.traits.has_qk_norm,
        }
        if self.traits.has_experts:
            options |= {
                "num_moe_experts": self.num_experts,
                "moe_ffn_hidden_size": self.expert_ffn_hidden_size,
                "moe_router_topk": self.experts_per_token,
                # Without it the softmax is over the chosen experts, which is softmax, choice and division by their sum.
                "moe_router_pre_softmax": not self.normalizes_experts,
                "moe_router_load_balancing_type": "none",
                "moe_layer_freq": [int(has) for has in self.expert_layers],
            }
        return options

    def build(self, config: Any, *, max_sequence_length: int, vp_stage: int | None = None, **options: Any) -> Any:
        """This pipeline stage's GPTModel with the folder's weights.

        config: transformer_config(**transformer_options(), ...). Communication: none.
        Raises ConfigError for what build_gpt_model refuses, and for a max_sequence_length beyond the model's positions.
        """
        if max_sequence_length > self.max_position_embeddings:
            raise ConfigError(
                f"sequences of {max_sequence_length} tokens are longer than max_position_embeddings={self.max_position_embeddings} "
                f"in {self.folder / CONFIG}: take shorter prompts or responses"
            )
        tp_size = resolve_group(None, "tp").size()
        model = build_gpt_model(
            config,
            vocab_size=-(-self.vocab_size // tp_size) * tp_size,
            max_sequence_length=max_sequence_length,
            vp_stage=vp_stage,
            tie_embeddings=self.tie_embeddings,
            rotary=self.rotary,
            seed=None,
            **options,
        )
        load_weights(self, model)
        return model


# What a folder says


def read_hf_model(folder: str | Path) -> HFModel:
    """Reads config.json and the headers of the weights. Nothing is allocated.

    Raises ConfigError for a folder without them, for an architecture or a setting that is not known here, and for tensors that are
    missing, not known or of another shape.
    """
    folder = Path(folder)
    if not folder.is_dir():
        fetch = f": a model of the Hub is fetched with `hf download {folder} --local-dir models/{folder.name}`"
        raise ConfigError(f"--hf-checkpoint {folder}: there is no such folder{fetch if len(folder.parts) == 2 else ''}")
    other = None if (folder / CONFIG).exists() else kind_of_checkpoint(folder)
    if other is not None:
        raise ConfigError(f"--hf-checkpoint {folder} is no Hugging Face folder: {other}")
    fields = Fields.of_file(folder / CONFIG, "no folder of a Hugging Face checkpoint")
    names = fields.items("architectures", str)
    known = [name for name in names if name in ARCHITECTURES]
    if not known:
        raise ConfigError(
            f"{folder / CONFIG}: architectures={names} is not known here; known are {', '.join(ARCHITECTURES)}. Train others in "
            "miles, slime or verl"
        )
    problems = _not_computed(fields)
    with Files(folder) as files:
        try:
            model = _described(folder, known[0], fields, len(files.file_of))
        except ConfigError as error:
            problems += error.problems
        if problems:
            raise ConfigError(problems)
        check_tensors(model, files)
    return model


def _not_computed(fields: Fields) -> list[str]:
    """A line for each setting that makes another model of the same tensors."""
    problems = [
        f"{fields.place}: {name}={fields.content[name]!r} is not computed here; it must be {allowed[0]!r}"
        for name, allowed in _MUST_BE.items()
        if name in fields.content and fields.content[name] not in allowed
    ]
    layers = set(fields.items("layer_types", str)) - {"full_attention"}
    if layers:
        problems.append(f"{fields.place}: layer_types has {', '.join(sorted(layers))}; only full_attention is computed here")
    if fields.has("quantization_config"):
        problems.append(
            f"{fields.place}: quantization_config is given, and quantised weights are not trained here: take those before it"
        )
    return problems


def _described(folder: Path, architecture: str, fields: Fields, num_tensors: int) -> HFModel:
    """num_tensors: of the weights. A layer, or an expert of a layer, has one at least: no list is longer than that."""
    of_weights = f": the weights hold {num_tensors} tensors"
    num_layers = fields.whole("num_hidden_layers", most=max(num_tensors, 1), why=of_weights)
    hidden_size, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    groups, head_size = fields.whole("num_key_value_heads", heads), fields.whole("head_dim", hidden_size // heads)
    if heads % groups:
        raise ConfigError(f"{fields.place}: num_attention_heads={heads} must be a multiple of num_key_value_heads={groups}")
    if head_size % 2 or not head_size:
        raise ConfigError(f"{fields.place}: heads of {head_size} numbers: rotary positions turn pairs, so head_dim must be even")
    experts: dict[str, Any] = {}
    if ARCHITECTURES[architecture].has_experts:
        dense, every = set(fields.items("mlp_only_layers", int)), fields.whole("decoder_sparse_step", 1)
        num_experts = fields.whole("num_experts", most=max(num_tensors, 1), why=of_weights)
        experts = {
            "num_experts": num_experts,
            "expert_ffn_hidden_size": fields.whole("moe_intermediate_size"),
            "experts_per_token": fields.whole("num_experts_per_tok", most=num_experts),
            "normalizes_experts": fields.switch("norm_topk_prob"),
            "expert_layers": tuple(layer not in dense and (layer + 1) % every == 0 for layer in range(num_layers)),
        }
        if sum(experts["expert_layers"]) * num_experts > num_tensors:
            raise ConfigError(f"{fields.place}: num_experts={num_experts} in {sum(experts['expert_layers'])} layers{of_weights}")
        if experts["experts_per_token"] == 1 and experts["normalizes_experts"]:
            raise ConfigError(
                f"{fields.place}: num_experts_per_tok=1 with norm_topk_prob=true: the weight of the one expert is always 1, so the "
                "router would not learn, and Megatron-Core refuses it: take a model of 2 experts a token, or without norm_topk_prob"
            )
    return HFModel(
        folder=folder,
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_attention_heads=heads,
        num_query_groups=groups,
        head_size=head_size,
        ffn_hidden_size=fields.whole("intermediate_size"),
        vocab_size=fields.whole("vocab_size"),
        max_position_embeddings=fields.whole("max_position_embeddings"),
        tie_embeddings=fields.switch("tie_word_embeddings", False),
        rotary=rotary_of(fields),
        norm_eps=fields.number("rms_norm_eps", below=1.0),
        **experts,
    )


# Which tensors make a parameter


@dataclass(frozen=True, slots=True)
class Source:
    """The tensors of a parameter. kind: whole; sharded along its dimension; gated: [gate, up], each sharded by itself; qkv: query,
    key and value, mixed group by group and cut evenly over the ranks, as Megatron holds them. shapes: of the tensors."""

    names: tuple[str, ...]
    kind: str
    shapes: tuple[tuple[int, ...], ...]


def sources(model: HFModel) -> dict[str, Source]:
    """By the parameter's global name."""
    hidden, queries, keys = model.hidden_size, model.num_attention_heads * model.head_size, model.num_query_groups * model.head_size
    vocabulary = (model.vocab_size, hidden)
    found = {
        "embedding.word_embeddings.weight": Source(("model.embed_tokens.weight",), "sharded", (vocabulary,)),
        "decoder.final_layernorm.weight": Source(("model.norm.weight",), "whole", ((hidden,),)),
    }
    if not model.tie_embeddings:
        found["output_layer.weight"] = Source(("lm_head.weight",), "sharded", (vocabulary,))

    def gated(name: str, width: int) -> Source:
        return Source((f"{name}.gate_proj.weight", f"{name}.up_proj.weight"), "gated", ((width, hidden), (width, hidden)))

    def down(name: str, width: int) -> Source:
        return Source((f"{name}.down_proj.weight",), "sharded", ((hidden, width),))

    for layer in range(model.num_layers):
        here, there = f"decoder.layers.{layer}", f"model.layers.{layer}"
        qkv = tuple(f"{there}.self_attn.{part}_proj" for part in "qkv")
        widths = (queries, keys, keys)
        has_experts = bool(model.expert_layers) and model.expert_layers[layer]
        norm = "pre_mlp_layernorm.weight" if has_experts else "mlp.linear_fc1.layer_norm_weight"
        found |= {
            f"{here}.self_attention.linear_qkv.layer_norm_weight": Source(
                (f"{there}.input_layernorm.weight",), "whole", ((hidden,),)
            ),
            f"{here}.{norm}": Source((f"{there}.post_attention_layernorm.weight",), "whole", ((hidden,),)),
            f"{here}.self_attention.linear_qkv.weight": Source(
                tuple(f"{name}.weight" for name in qkv), "qkv", tuple((width, hidden) for width in widths)
            ),
            f"{here}.self_attention.linear_proj.weight": Source(
                (f"{there}.self_attn.o_proj.weight",), "sharded", ((hidden, queries),)
            ),
        }
        if model.traits.has_qkv_bias:
            found[f"{here}.self_attention.linear_qkv.bias"] = Source(
                tuple(f"{name}.bias" for name in qkv), "qkv", tuple((width,) for width in widths)
            )
        if model.traits.has_qk_norm:
            for part in "qk":
                found[f"{here}.self_attention.{part}_layernorm.weight"] = Source(
                    (f"{there}.self_attn.{part}_norm.weight",), "whole", ((model.head_size,),)
                )
        if not has_experts:
            found[f"{here}.mlp.linear_fc1.weight"] = gated(f"{there}.mlp", model.ffn_hidden_size)
            found[f"{here}.mlp.linear_fc2.weight"] = down(f"{there}.mlp", model.ffn_hidden_size)
            continue
        found[f"{here}.mlp.router.weight"] = Source((f"{there}.mlp.gate.weight",), "whole", ((model.num_experts, hidden),))
        for expert in range(model.num_experts):
            of_expert = f"{there}.mlp.experts.{expert}"
            found[f"{here}.mlp.experts.{expert}.linear_fc1.weight"] = gated(of_expert, model.expert_ffn_hidden_size)
            found[f"{here}.mlp.experts.{expert}.linear_fc2.weight"] = down(of_expert, model.expert_ffn_hidden_size)
    return found


# Reading


class Files:
    """The safetensors files of a folder, opened where needed. Reading a slice reads nothing else."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._stack, self._open, self._headers = ExitStack(), dict[str, Any](), dict[str, dict[str, TensorEntry]]()
        index = folder / INDEX
        if index.exists():
            self.file_of = _weight_map(index)
        elif (folder / SINGLE_FILE).exists():
            self.file_of = dict.fromkeys(self._header(SINGLE_FILE), SINGLE_FILE)
        else:
            raise ConfigError(f"{folder} has neither {SINGLE_FILE} nor {INDEX}: weights in pickles (*.bin) are not read here")

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def _header(self, name: str) -> dict[str, TensorEntry]:
        if name not in self._headers:
            try:
                self._headers[name] = read_safetensors_header(self.folder / name)
            except (OSError, ValueError) as error:
                raise ConfigError(f"{self.folder / name} cannot be read: {printable(str(error))}") from None
        return self._headers[name]

    def _file(self, name: str) -> Any:
        if name not in self._open:
            try:
                from safetensors import SafetensorError, safe_open
            except ImportError:
                raise ConfigError("a Hugging Face checkpoint needs safetensors: pip install safetensors") from None
            self._header(name)
            try:
                self._open[name] = self._stack.enter_context(safe_open(str(self.folder / name), framework="pt"))
            except (OSError, SafetensorError) as error:
                raise ConfigError(f"{self.folder / name} cannot be read: {error}; fetch the folder again") from None
        return self._open[name]

    def shape_of(self, tensor: str) -> tuple[int, ...] | None:
        """From the header; None where the file lacks what the index says of it."""
        entry = self._header(self.file_of[tensor]).get(tensor)
        return None if entry is None else entry.shape

    def slice_of(self, tensor: str) -> Any:
        return self._file(self.file_of[tensor]).get_slice(tensor)


def _weight_map(index: Path) -> dict[str, str]:
    """tensor -> file beside the index. A link may stand there, as in the cache of the Hub, and no path."""
    files = dict(Fields.of_file(index, "a broken checkpoint").table("weight_map").content)
    if not files:
        raise ConfigError(f"{index}: weight_map names no tensor: fetch the folder again")
    for tensor, name in files.items():
        if not isinstance(name, str) or not re.fullmatch(r"[^/\\\0]+\.safetensors", name):
            raise ConfigError(f"{index}: weight_map has {name!r} for {tensor}: it must be a .safetensors file beside the index")
    return files


def check_tensors(model: HFModel, files: Files) -> None:
    """Raises ConfigError for each tensor that is missing, not known or of another shape, from the headers alone."""
    wanted = {name: shape for source in sources(model).values() for name, shape in zip(source.names, source.shapes, strict=True)}
    ignored = {"lm_head.weight"} if model.tie_embeddings else set()
    shapes = {name: shape for name in wanted if name in files.file_of and (shape := files.shape_of(name)) is not None}
    missing = sorted(set(wanted) - set(shapes))
    unknown = sorted(name for name in set(files.file_of) - set(wanted) - ignored if not IGNORED.fullmatch(name))
    misshapen = [f"{name} {shape} instead of {wanted[name]}" for name, shape in shapes.items() if shape != wanted[name]]
    problems = [
        f"{model.folder}: {what} for {model.architecture} with the sizes of {CONFIG}: {_shown(names)}; {remedy}"
        for what, names, remedy in (
            ("missing", missing, MISSING_REMEDY),
            ("not known", unknown, UNKNOWN_REMEDY),
            ("of another shape", misshapen, MISSHAPEN_REMEDY),
        )
        if names
    ]
    if problems:
        raise ConfigError(problems)


def _shown(names: Sequence[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


@torch.no_grad()
def load_weights(model: HFModel, gpt: Any) -> None:
    """Fills this rank's parameters, in their own dtype. Padded rows of the vocabulary become 0. Communication: none."""
    of_parameters = sources(model)
    with Files(model.folder) as files:
        for name, parameter in gpt.named_parameters():
            source = of_parameters[global_parameter_name(gpt, name)]
            dim, group = sharding_of(name, parameter)
            if source.kind == "qkv":
                values = _own_groups(files, source, model.num_query_groups, group.rank(), group.size())
            else:
                parts = [
                    _own_slice(files.slice_of(tensor), shape, dim, group.rank(), group.size())
                    for tensor, shape in zip(source.names, source.shapes, strict=True)
                ]
                values = torch.cat(parts)
            parameter.zero_()
            parameter[tuple(slice(0, size) for size in values.shape)] = values.to(parameter)


def _own_slice(tensor: Any, shape: Sequence[int], dim: int | None, rank: int, size: int) -> Tensor:
    if dim is None:
        whole: Tensor = tensor[:]
        return whole
    # The vocabulary is padded to a multiple of the ranks, so the last ranks may hold fewer rows, or none.
    share = math.ceil(shape[dim] / size)
    start, end = min(rank * share, shape[dim]), min((rank + 1) * share, shape[dim])
    own: Tensor = tensor[start:end] if dim == 0 else tensor[:, start:end]
    return own


def _own_groups(files: Files, source: Source, num_groups: int, rank: int, size: int) -> Tensor:
    """This rank's rows of all query groups, which are cut evenly over the ranks. A group is [its queries, its key, its value]. With
    fewer groups than ranks a rank holds a part of one group, as Megatron's linear_qkv does."""
    first, end = rank * num_groups // size, -(-(rank + 1) * num_groups // size)
    by_group, group_width = [], sum(shape[0] for shape in source.shapes) // num_groups
    for tensor, shape in zip(source.names, source.shapes, strict=True):
        width = shape[0] // num_groups
        rows: Tensor = files.slice_of(tensor)[first * width : end * width]
        by_group.append(rows.view(end - first, width, *rows.shape[1:]))
    share = num_groups * group_width // size
    return torch.cat(by_group, 1).flatten(0, 1).narrow(0, rank * share - first * group_width, share)


# Writing


@torch.no_grad()
def save_hf_checkpoint(model: HFModel, chunks: Iterable[Any], folder: str | Path) -> None:
    """Writes the weights of the model on all ranks to `folder`, with the settings and the tokenizer of the folder it came from.

    Every rank calls it. A rank writes what it holds first: of a pipeline stage the rank 0 of tp and dp-cp, of experts rank 0 of
    their groups. Weights keep the dtype that they have here.
    Communication: an all-gather of each sharded parameter over its group, and the names of the written tensors over all ranks.
    Raises RunError on all ranks where a file cannot be written, and what copied_files raises.
    """
    folder, groups = Path(folder), resolve_groups()
    of_parameters, own = sources(model), dict[str, Tensor]()
    for chunk in chunks:
        gpt = find_gpt_model(chunk)
        for name, parameter in gpt.named_parameters():
            global_name = global_parameter_name(gpt, name)
            dim, group = sharding_of(name, parameter)
            shards = [parameter.detach()] if dim is None else list(all_gather_stack(parameter.detach().contiguous(), group))
            replicas = resolve_group(None, "expert_dp") if is_of_expert(name) else groups.dp_cp
            is_second_copy = name == "output_layer.weight" and model.tie_embeddings
            if group.rank() or replicas.rank() or is_second_copy:
                continue
            own |= _separated(of_parameters[global_name], shards, dim, model)
    written = on_all_ranks(lambda: [(name, tensor.numel() * tensor.element_size()) for name, tensor in own.items()])
    writers = [rank for rank, names in enumerate(written) if names]
    file_of = {rank: f"model-{number:05d}-of-{len(writers):05d}.safetensors" for number, rank in enumerate(writers, 1)}
    here = torch.distributed.get_rank()

    def write() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if own:
            from safetensors import SafetensorError
            from safetensors.torch import save_file

            try:
                save_file(own, folder / file_of[here], metadata={"format": "pt"})
            except SafetensorError as error:  # a full disk too
                raise RunError(f"{folder / file_of[here]} cannot be written: {error}") from error
        if here == 0:
            weight_map = {name: file_of[rank] for rank, names in enumerate(written) for name, _ in names}
            total = sum(size for names in written for _, size in names)
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
            for path in copied_files(model.folder):
                shutil.copyfile(path, folder / path.name)

    on_all_ranks(write)


def copied_files(folder: Path) -> list[Path]:
    """The settings and the tokenizer of a folder. Raises ConfigError for each that is a link out of the folder, because a copy of
    it would publish another file of this machine. The Hub's cache is such links, from snapshots/<revision> to blobs beside it."""
    files = sorted(path for pattern in COPIED for path in folder.glob(pattern) if path.name not in (INDEX, MARKER))
    real = folder.resolve()
    inside = [real, *([real.parent.parent / "blobs"] if real.parent.name == "snapshots" else [])]
    problems = [
        f"{path} is a link to {path.resolve()}, out of the folder: it is not copied into --save-hf; put the file itself there, or "
        "remove the link"
        for path in files
        if not any(path.resolve().is_relative_to(allowed) for allowed in inside)
    ]
    if problems:
        raise ConfigError(problems)
    return files


def _separated(source: Source, shards: Sequence[Tensor], dim: int | None, model: HFModel) -> dict[str, Tensor]:
    """The tensors of a parameter, on the CPU, from the shards of all ranks."""
    parts: list[Tensor]
    if source.kind == "qkv":  # the groups of all ranks stand one after another, also where a rank holds a part of one
        joined, sizes = torch.cat(list(shards)), [shape[0] // model.num_query_groups for shape in source.shapes]
        split = joined.view(model.num_query_groups, sum(sizes), *joined.shape[1:]).split(sizes, 1)
        parts = [part.flatten(0, 1) for part in split]
    elif source.kind == "gated":
        halves = [shard.chunk(2) for shard in shards]
        parts = [torch.cat([of_shard[place] for of_shard in halves]) for place in range(2)]
    else:
        whole = shards[0] if dim is None else torch.cat(list(shards), dim)
        parts = [whole[: source.shapes[0][0]]]  # without the padding of the vocabulary
    return {name: part.contiguous().cpu().clone() for name, part in zip(source.names, parts, strict=True)}
