"""Reads and writes checkpoints of Hugging Face's format for a GPTModel on any layout.

A rank reads only its own slices. What the folder lacks, or has beyond the architecture, is named from the files' headers, before
anything is allocated. Saving gathers one parameter at a time.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl.errors import ConfigError, RunError, printable
from megatron_rl.files.bounds import open_regular
from megatron_rl.files.json_values import Fields
from megatron_rl.layout.agreement import on_all_ranks
from megatron_rl.layout.groups import all_gather_stack, resolve_group, resolve_groups
from megatron_rl.megatron.model import build_gpt_model, find_gpt_model, global_parameter_name, is_of_expert, sharding_of
from megatron_rl.train.checkpoints import kind_of_checkpoint
from megatron_rl.train.hf_mapping import Source, sources
from megatron_rl.train.hf_model import HFModel, described

INDEX, SINGLE_FILE, CONFIG = "model.safetensors.index.json", "model.safetensors", "config.json"
# Of a folder, besides the weights: what `transformers` reads, and the tokenizer.
COPIED = ("*.json", "*.model", "*.txt", "*.jinja")
# In a folder that a run wrote: which one.
MARKER = "megatron_rl_run.json"
# What to do where the tensors do not fit config.json.
MISSHAPEN_REMEDY = f"{CONFIG} is of another model: take the one that belongs to these weights"
MISSING_REMEDY = f"after an incomplete download: fetch the folder again; else {MISSHAPEN_REMEDY}"
QUANTISED_REMEDY = "take the folder of the model that is not quantised"
UNKNOWN_REMEDY = f"a variant that is not supported here: train it in miles, slime or verl; else {MISSHAPEN_REMEDY}"
FLOATS = ("BF16", "F16", "F32", "F64")
# In a folder that `transformers` wrote before 4.32, and nothing to load.
IGNORED = re.compile(r".*\.rotary_emb\.inv_freq")


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
    with Files(folder) as files:
        model = described(folder, fields, files.file_of)
        check_tensors(model, files)
    return model


def build_hf_model(model: HFModel, config: Any, *, max_sequence_length: int, vp_stage: int | None = None, **options: Any) -> Any:
    """This pipeline stage's GPTModel with the folder's weights.

    config: transformer_config(**model.transformer_options(), ...). Communication: none.
    Raises ConfigError for what build_gpt_model refuses, and for a max_sequence_length beyond the model's positions.
    """
    check_length(model, max_sequence_length)
    tp_size = resolve_group(None, "tp").size()
    gpt = build_gpt_model(
        config,
        vocab_size=-(-model.vocab_size // tp_size) * tp_size,
        max_sequence_length=max_sequence_length,
        vp_stage=vp_stage,
        tie_embeddings=model.tie_embeddings,
        rotary=model.rotary,
        seed=None,
        **options,
    )
    load_weights(model, gpt)
    return gpt


def check_length(model: HFModel, length: int) -> None:
    """Raises ConfigError for a length beyond the positions of the model, and for one in which its window would leave tokens out."""
    for name, most in (("max_position_embeddings", model.max_position_embeddings), ("sliding_window", model.window)):
        if most is not None and length > most:
            raise ConfigError(
                f"sequences of {length} tokens are longer than {name}={most} in {model.folder / CONFIG}: take shorter prompts or "
                "responses"
            )


class Files:
    """The safetensors files of a folder, opened where needed. Reading a slice reads nothing else."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._stack, self._open, self._names = ExitStack(), dict[str, Any](), dict[str, set[str]]()
        index = folder / INDEX
        if index.exists():
            self.file_of = _weight_map(index)
        elif (folder / SINGLE_FILE).exists():
            self.file_of = dict.fromkeys(self._file(SINGLE_FILE).keys(), SINGLE_FILE)
        else:
            raise ConfigError(f"{folder} has neither {SINGLE_FILE} nor {INDEX}: weights in pickles (*.bin) are not read here")

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def _file(self, name: str) -> Any:
        if name not in self._open:
            try:
                from safetensors import SafetensorError, safe_open
            except ImportError:
                raise ConfigError("a Hugging Face checkpoint needs safetensors: pip install safetensors") from None
            try:
                open_regular(self.folder / name).close()
                self._open[name] = self._stack.enter_context(safe_open(str(self.folder / name), framework="pt"))
            except (OSError, SafetensorError) as error:
                raise ConfigError(f"{self.folder / name} cannot be read: {printable(str(error))}; fetch the folder again") from None
            self._names[name] = set(self._open[name].keys())
        return self._open[name]

    def has(self, tensor: str) -> bool:
        """Whether the file that the index says has it."""
        name = self.file_of.get(tensor)
        if name is None:
            return False
        self._file(name)
        return tensor in self._names[name]

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
    found = {name: files.slice_of(name) for name in wanted if files.has(name)}
    missing = sorted(set(wanted) - set(found))
    unknown = sorted(name for name in set(files.file_of) - set(wanted) - ignored if not IGNORED.fullmatch(name))
    shapes = {name: tuple(one.get_shape()) for name, one in found.items()}
    misshapen = [f"{name} {shape} instead of {wanted[name]}" for name, shape in shapes.items() if shape != wanted[name]]
    dtypes = {name: one.get_dtype() for name, one in found.items()}
    other_types = [f"{name} is {dtype}" for name, dtype in dtypes.items() if dtype not in FLOATS]
    problems = [
        f"{model.folder}: {what} for {model.architecture} with the sizes of {CONFIG}: {shown(names)}; {remedy}"
        for what, names, remedy in (
            ("missing", missing, MISSING_REMEDY),
            ("not known", unknown, UNKNOWN_REMEDY),
            ("of another shape", misshapen, MISSHAPEN_REMEDY),
            (f"weights other than {', '.join(FLOATS)}", other_types, QUANTISED_REMEDY),
        )
        if names
    ]
    if problems:
        raise ConfigError(problems)


def shown(names: Sequence[str], most: int = 4) -> str:
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
                tensors = zip(map(files.slice_of, source.names), source.shapes, strict=True)
                values = torch.cat([_own_slice(tensor, shape, dim, group.rank(), group.size()) for tensor, shape in tensors])
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
            source = of_parameters[global_name]
            parts = _separated(source, shards, dim, model)
            own |= {name: part.contiguous().cpu().clone() for name, part in zip(source.names, parts, strict=True)}
    here = torch.distributed.get_rank()
    written = on_all_ranks(lambda: [(name, tensor.numel() * tensor.element_size()) for name, tensor in own.items()])
    writers = [rank for rank, names in enumerate(written) if names]
    file_of = {rank: f"model-{number:05d}-of-{len(writers):05d}.safetensors" for number, rank in enumerate(writers, 1)}

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


def _separated(source: Source, shards: Sequence[Tensor], dim: int | None, model: HFModel) -> list[Tensor]:
    """The tensors of a parameter, from the shards of all ranks."""
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
        # Without the padding of the vocabulary.
        parts = [whole[: source.shapes[0][0]]]
    return parts
