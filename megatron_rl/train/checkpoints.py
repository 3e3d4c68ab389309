"""Saves and loads a run through megatron.core.dist_checkpointing. A checkpoint is complete, or `latest` does not name it.

A save writes into a temporary directory, renames it, and then writes its name into `latest`. A run that is killed before that keeps
the previous checkpoint. A load checks the checksums before it uses a file: torch reads a file with a flipped bit without an error.
It runs no code of a file. The format does not depend on the layout, and has no rollouts or metrics.
"""

from __future__ import annotations

import copy
import hashlib
import multiprocessing.dummy
import os
import pickle
import random
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_rl.errors import ConfigError, RunError, printable
from megatron_rl.layout.agreement import on_all_ranks
from megatron_rl.layout.groups import process_group, resolve_groups
from megatron_rl.megatron.model import model_config_of

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.optimizer import MegatronOptimizer

LATEST = "latest"
STEP_NAME = re.compile(r"step_\d+")
# The names of all entries that saves write into a directory.
OWN_NAME = re.compile(r"latest(\.new)?|step_\d+(\.partial|\.replaced)?")
# In the format of sha256sum, so that `sha256sum -c SHA256SUMS` checks a checkpoint without this package.
CHECKSUMS = "SHA256SUMS"
METADATA = ".metadata"
# The classes and functions that torch and Megatron-Core 0.16 to 0.20 write into .metadata, besides dtypes.
IN_METADATA = {
    "torch.distributed.checkpoint.metadata": (
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
        *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.planner": ("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"),
    "megatron.core.dist_checkpointing.strategies.torch": ("MCoreMetadata", "MCoreSavePlan"),
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
}
# Formats in which a distributed optimiser saves each parameter's state in the parameter's shape -> the method that loads them. Only
# these can be loaded under another dp, tp or pp size. The format of Megatron-Core 0.15 and later comes first.
RESHARDABLE_FORMATS = {
    "fully_reshardable": "load_parameter_state_from_fully_reshardable",
    "fully_sharded_model_space": "load_parameter_state_from_fs_model_space",
}


def check_can_save() -> None:
    """Raises ConfigError without megatron-core, and without psutil, which the writers of dist_checkpointing need: without it they
    hang without a message."""
    whys = {
        "megatron": "megatron-core",
        "psutil": "psutil (megatron-core does not declare it, and hangs without it)",
    }
    absent = [why for module, why in whys.items() if find_spec(module) is None]
    if absent:
        names = " ".join(why.partition(" ")[0] for why in absent)
        raise ConfigError(
            f"training needs {' and '.join(absent)}, which this Python does not have: pip install {names}; the extra "
            "megatron_rl[megatron,train] brings all that training needs"
        )


def save_checkpoint(
    directory: str | Path,
    step: int,
    model: DistributedDataParallel,
    optimizer: MegatronOptimizer,
    counters: dict[str, Any],
    *,
    description: dict[str, int],
) -> Path:
    """Writes `directory`/step_<step>, then its name into `latest`. Every rank calls it. If a rank fails, `latest` does not change.

    model: the DDP-wrapped model of this rank. counters: plain numbers and text, equal on all ranks. description: settings that must
    be equal to load the checkpoint, by the names of their flags.
    Communication: on_all_ranks three times, and as dist_checkpointing.
    Raises RunError, on all ranks, where it cannot be written, for instance to a full disk.
    """
    check_can_save()
    directory, rank = Path(directory), dist.get_rank()
    final = directory / f"step_{step:08d}"
    partial_save = final.with_name(final.name + ".partial")
    with _writable(final):
        on_all_ranks(partial(_make_empty, partial_save) if rank == 0 else _nothing)
        model_state = _sharded_model_state(model)
        state = {
            "model": model_state,
            "optimizer": optimizer.sharded_state_dict(model_state, metadata=_optimizer_metadata()),
            "random": _sharded_random_state(_random_state()),
            "counters": {**counters, "step": step, "world_size": dist.get_world_size(), "layout": _layout()},
            "description": description,
        }
        _save_in_this_process(state, partial_save)
        checksums = _checksums(partial_save)

        def publish() -> None:
            lines = [f"{digest}  {name}\n" for name, digest in checksums.items()]
            (partial_save / CHECKSUMS).write_text("".join(lines), encoding="utf-8")
            _replace_directory(final, partial_save)
            _write_atomically(directory / LATEST, final.name + "\n")

        on_all_ranks(publish if rank == 0 else _nothing)
    return final


def latest_checkpoint(directory: str | Path) -> Path:
    """The newest complete checkpoint. Raises ConfigError where there is none; the message says what is there."""
    directory = Path(directory)
    pointer = directory / LATEST
    if not pointer.is_file():
        kind = kind_of_checkpoint(directory) or f"it has no file `{LATEST}`; start without --resume and --load, or name another run"
        raise ConfigError(f"no checkpoint in {directory}: {kind}")
    with pointer.open("rb") as file:
        content = file.read(200)
    name = content.decode(errors="backslashreplace").strip(" \t\r\n")
    if not STEP_NAME.fullmatch(name):
        raise ConfigError(
            f"{pointer} holds '{printable(name)}': it must name a checkpoint beside it, as step_00000050; write one of these "
            f"into it: {', '.join(_whole_checkpoints(directory)) or 'there is none'}"
        )
    checkpoint = directory / name
    if not checkpoint.is_dir():
        raise ConfigError(f"{pointer} names {checkpoint.name}, which is not there: it was removed, or the copy is incomplete")
    return checkpoint


def kind_of_checkpoint(folder: Path) -> str | None:
    """What a folder is that holds other weights than the flag takes, and what to type; None for a folder of no known kind."""

    def holds(*patterns: str) -> bool:
        return any(any(folder.glob(pattern)) for pattern in patterns)

    if holds("adapter_config.json"):
        return "it is a LoRA adapter: merge it into its model (merge_and_unload of peft), and give that folder to --hf-checkpoint"
    if holds("config.json"):
        return f"it is a Hugging Face folder: type --hf-checkpoint {folder}, without --load and --resume"
    if STEP_NAME.fullmatch(folder.name):
        return f"it is one checkpoint of a run of `megatron-rl train`: type --load {folder.parent}, where `{LATEST}` names the step"
    if holds(LATEST, f"*/{LATEST}"):
        return f"it is a run of `megatron-rl train`: type --load {folder}, with the --hf-checkpoint that the run began with, if any"
    if holds("latest_checkpointed_iteration.txt", "iter_*", "mp_rank_*", "*.distcp", "common.pt"):
        return (
            "it is a checkpoint of Megatron-LM: write it as a Hugging Face folder, in miles and slime with "
            "tools/convert_torch_dist_to_hf.py, and give that folder to --hf-checkpoint"
        )
    return None


def foreign_entries(directory: str | Path) -> list[str]:
    """The entries of a checkpoint directory that no save has written."""
    directory = Path(directory)
    return sorted(path.name for path in directory.iterdir() if not OWN_NAME.fullmatch(path.name)) if directory.is_dir() else []


def remove_checkpoints(directory: str | Path) -> None:
    """Removes the entries that saves have written, `latest` first, so that a killed run leaves no incomplete checkpoint to resume.
    If the directory is a link, the link stays."""
    directory = Path(directory)
    if not directory.is_dir():
        return
    (directory / LATEST).unlink(missing_ok=True)
    for path in directory.iterdir():
        if OWN_NAME.fullmatch(path.name):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    if not directory.is_symlink() and not any(directory.iterdir()):
        directory.rmdir()


def load_checkpoint(
    checkpoint: str | Path, model: DistributedDataParallel, optimizer: MegatronOptimizer, *, description: dict[str, int]
) -> dict[str, Any]:
    """Fills model and optimiser and returns the counters. Random states are restored only on the layout that saved them; on another
    layout the run keeps its own.

    Communication: as on_all_ranks and dist_checkpointing.
    Raises ConfigError, before any file is used, when the files are not as they were saved; also when they contain more than plain
    data, for another description, and when they cannot be loaded.
    """
    _check_files(Path(checkpoint))
    with _plain_data_only():
        return _load_checked(Path(checkpoint), model, optimizer, description)


def _checksums(checkpoint: Path) -> dict[str, str]:
    """name -> SHA-256 of all files but CHECKSUMS. Each rank reads a share. Communication: as on_all_ranks."""

    def of_share() -> dict[str, str]:
        names = sorted(path.name for path in checkpoint.iterdir() if path.is_file() and path.name != CHECKSUMS)
        digests = {}
        for name in names[dist.get_rank() :: dist.get_world_size()]:
            with (checkpoint / name).open("rb") as file:
                digests[name] = hashlib.file_digest(file, "sha256").hexdigest()
        return digests

    return {name: digest for share in on_all_ranks(of_share) for name, digest in share.items()}


def _check_files(checkpoint: Path) -> None:
    """Raises ConfigError, on all ranks, unless all files are as they were saved. Communication: as on_all_ranks."""
    path, found = checkpoint / CHECKSUMS, _checksums(checkpoint)
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    saved = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    damaged = sorted(name for name in saved.keys() | found.keys() if saved.get(name) != found.get(name))
    if damaged:
        names = printable(", ".join(damaged)) if lines else CHECKSUMS
        raise ConfigError(
            f"{checkpoint} cannot be read: files are missing or damaged: {names}; `{LATEST}` beside it may name an earlier "
            "checkpoint instead"
        )


class _MetadataUnpickler(pickle.Unpickler):
    """Knows only the classes that are in a .metadata. torch reads that file with pickle.load, which runs any function."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(vars(torch).get(name), torch.dtype)
        if not is_dtype and name not in IN_METADATA.get(module, ()):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return super().find_class(module, name)


def _load_checked(
    checkpoint: Path, model: DistributedDataParallel, optimizer: MegatronOptimizer, description: dict[str, int]
) -> dict[str, Any]:
    from megatron.core import dist_checkpointing

    saved = _load_common(checkpoint)
    _check_description(checkpoint, saved["description"], description)
    counters: dict[str, Any] = saved["counters"]
    _give_adam_a_state(optimizer)
    is_same_layout = (counters["world_size"], counters["layout"]) == (dist.get_world_size(), _layout())
    model_state = _sharded_model_state(model)
    state = {
        "model": model_state,
        "optimizer": optimizer.sharded_state_dict(model_state, is_loading=True, metadata=_optimizer_metadata()),
    }
    if is_same_layout:
        state["random"] = _sharded_random_state(None)
    now, then = len(getattr(optimizer, "chained_optimizers", [optimizer])), len(_parts_of_state(saved["optimizer"]))
    if now != then and numbers_optimizer_states():
        raise ConfigError(
            f"{checkpoint} has the states of {then} optimisers and this run has {now}, because other ranks share the experts: "
            "the installed Megatron-Core puts the optimiser's number into their names; use the --expert-model-parallel-size that "
            "saved it, or install megatron-core 0.14 or later"
        )
    with _readable(checkpoint):
        loaded = dist_checkpointing.load(state, str(checkpoint))
    model.module.load_state_dict(loaded["model"])
    _load_optimizer(optimizer, _grouped_as_now(optimizer, loaded["optimizer"], saved["optimizer"]))
    if is_same_layout:
        _set_random_state(loaded["random"]["state"])
    return counters


def _load_common(checkpoint: Path) -> dict[str, Any]:
    """Loads counters and description, which every rank reads, after a look at .metadata. Raises ConfigError when they cannot be
    read."""
    from megatron.core import dist_checkpointing

    with _readable(checkpoint):
        with (checkpoint / METADATA).open("rb") as file:
            _MetadataUnpickler(file).load()
        common: dict[str, Any] = dist_checkpointing.load_common_state_dict(str(checkpoint))
    missing = [name for name in ("counters", "description") if name not in common]
    if missing:
        raise ConfigError(f"{checkpoint} holds no {' and no '.join(missing)}: it is not a checkpoint of `megatron-rl train`")
    return common


@contextmanager
def _plain_data_only() -> Iterator[None]:
    """Inside the block torch.load always reads with weights_only=True, which runs no code of a file."""
    wanted = {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "0"}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            os.environ.update({} if value is None else {name: value})


@contextmanager
def _readable(checkpoint: Path) -> Iterator[None]:
    """Turns the errors of a load into ConfigError. Only reading is done inside."""
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except (CheckpointingException, CheckpointException, OSError, pickle.UnpicklingError) as error:
        raise ConfigError(f"{checkpoint} cannot be loaded: {_first_failure(error)}; its files are as they were saved") from error


@contextmanager
def _writable(final: Path) -> Iterator[None]:
    """Turns the errors of a save into RunError, which says which checkpoint is complete. torch's writer raises RuntimeError."""
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except (CheckpointingException, CheckpointException, OSError, RuntimeError) as error:
        whole = (final.parent / LATEST).is_file() and latest_checkpoint(final.parent)
        left = f"{whole} is whole, and --resume goes on from it" if whole else "no earlier checkpoint is there"
        place = next(path for path in (final.parent, *final.absolute().parents) if path.exists())
        free = f"{shutil.disk_usage(place).free / 1e9:.1f} GB are free on its disk"
        raise RunError(f"checkpoint {final} cannot be written: {_first_failure(error)} ({free}); {left}") from error


def _first_failure(error: BaseException) -> str:
    """The first error in one line. torch's exception for several ranks (a BaseException) has a traceback for each of them."""
    failures = getattr(error, "failures", None)
    if failures is not None:
        rank, (first, _) = next(iter(failures.items()), (None, (None, None)))
        return "another rank says why" if first is None else f"rank {rank}: {_first_failure(first)}"
    if isinstance(error, pickle.UnpicklingError):
        return "it holds more than plain data, and none of it was run"
    text = str(error).strip().partition("\n")[0]
    return printable(text if isinstance(error, RunError) else f"{type(error).__name__}: {text}")


def _check_description(checkpoint: Path, saved: dict[str, int], wanted: dict[str, int]) -> None:
    problems = [
        f"{checkpoint} was saved with {flag} {saved.get(flag)}, this run has {value}: give it the same"
        for flag, value in wanted.items()
        if saved.get(flag, 0) != value  # an earlier version has not recorded what its runs could not have
    ]
    if problems:
        raise ConfigError(problems)


def _save_in_this_process(state: dict[str, Any], path: Path) -> None:
    """dist_checkpointing.save with threads in place of processes.

    Megatron-Core up to 0.16 forks a process for each file, a process that collects their reports, and in some versions one more. A
    forked process outlives a rank that is killed and keeps its sockets open: the other ranks then wait for a dead rank, and memory
    and ports stay in use. A SIGTERM to the process group, from torchrun or a scheduler, ends it too. This save is synchronous, so
    threads do the same work, as in Megatron-Core 0.17 and later.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import async_utils, filesystem_async

    threads = SimpleNamespace(get_context=lambda kind: multiprocessing.dummy)
    before = [(module, module.mp) for module in (async_utils, filesystem_async)]
    for module, _ in before:
        module.mp = threads
    try:
        dist_checkpointing.save(state, str(path))
    finally:
        for module, processes in before:
            module.mp = processes


def _make_empty(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)


def _nothing() -> None:
    pass


def _whole_checkpoints(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if STEP_NAME.fullmatch(path.name))


def _replace_directory(final: Path, partial: Path) -> None:
    """Renames `partial` to `final`. An older `final`, which `latest` may name, is missing only between two renames."""
    replaced = final.with_name(final.name + ".replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if final.exists():
        final.rename(replaced)
    partial.rename(final)
    shutil.rmtree(replaced, ignore_errors=True)


def _sharded_model_state(model: DistributedDataParallel) -> dict[str, Any]:
    """With multi-token prediction the last stage has the embedding too, and Megatron asks whose copies these are."""
    if not model_config_of(model).mtp_num_layers:
        whole: dict[str, Any] = model.module.sharded_state_dict()
        return whole
    shared: dict[str, Any] = model.module.sharded_state_dict(metadata={"dp_cp_group": process_group(resolve_groups().dp_cp)})
    return shared


def _optimizer_metadata() -> dict[str, Any]:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    known = [name for name, load in RESHARDABLE_FORMATS.items() if hasattr(DistributedOptimizer, load)]
    return {"distrib_optim_sharding_type": known[0], "chained_optim_avoid_prefix": True}


def numbers_optimizer_states() -> bool:
    """Whether the installed Megatron-Core names states by the place of their optimiser in a chain, whatever it is asked for."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.optimizer.optimizer import ChainedOptimizer

    class Part:
        config, optimizer = None, SimpleNamespace(param_groups=[])

        def sharded_state_dict(self, *positional: Any, **named: Any) -> dict[str, Any]:
            return {"state": ShardedObject("state", None, (1,), (0,))}

    found = ChainedOptimizer([Part(), Part()]).sharded_state_dict({}, metadata=_optimizer_metadata())
    return any(part["state"].key != "state" for part in _parts_of_state(found))


def _distributed_parts(optimizer: MegatronOptimizer) -> list[Any]:
    """The distributed optimisers over torch's Adam. Megatron-Core alone cannot load them: see the two functions below. The Adam of
    apex and of Transformer Engine has one step count for a group of parameters and needs no help."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    adams = (torch.optim.Adam, torch.optim.AdamW)
    return [part for part in parts if isinstance(part, DistributedOptimizer) and isinstance(part.optimizer, adams)]


def _give_adam_a_state(optimizer: MegatronOptimizer) -> None:
    """Gives Adam an initial state. It has none before its first step, but the distributed optimiser asserts one before it loads."""
    for part in _distributed_parts(optimizer):
        for parameter in (parameter for group in part.optimizer.param_groups for parameter in group["params"]):
            if not part.optimizer.state[parameter]:
                moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                part.optimizer.state[parameter] = {"step": torch.zeros(()), **moments}


def _load_optimizer(optimizer: MegatronOptimizer, state: dict[str, Any]) -> None:
    """optimizer.load_state_dict, with the two steps that a distributed optimiser over torch's Adam lacks.

    It copies each entry of Adam's state from the file, which has no step count, so the count is taken out first. It also gives all
    parameters the same count tensor, which Adam would increase once for each of them, so each parameter gets a copy.
    """
    parts = _distributed_parts(optimizer)
    if not parts:
        optimizer.load_state_dict(state)
        return
    for part, of_part in zip(parts, _parts_of_state(state), strict=True):
        parameters, load = of_part.pop("param_state"), RESHARDABLE_FORMATS[of_part["param_state_sharding_type"]]
        part.load_state_dict(of_part)
        states = part.optimizer.state.values()
        step_counts = [of_parameter.pop("step") for of_parameter in states]
        getattr(part, load)(parameters)
        for of_parameter, step_count in zip(states, step_counts, strict=True):
            of_parameter["step"] = step_count.clone()


# What tells Megatron's groups of parameters apart, beside whether experts are spread over ranks, which is a matter of the layout.
_GROUP_KEYS = ("wd_mult", "lr_mult", "is_decoupled_lr")


def _parts_of_state(state: dict[Any, Any]) -> list[dict[str, Any]]:
    """The states of the optimisers in a chain. Megatron makes one more for experts that are spread over ranks."""
    chained = sorted(key for key in state if isinstance(key, int))
    return [state[key] for key in chained] if chained else [state]


def _grouped_as_now(optimizer: MegatronOptimizer, loaded: dict[Any, Any], saved: dict[Any, Any]) -> dict[Any, Any]:
    """The loaded state with the groups of parameters that this layout has, where the saving one had others.

    Moments are found by parameter. What a group holds besides (learning rate, decay, step) is the same in the groups of experts.
    """
    parts, parts_then = getattr(optimizer, "chained_optimizers", [optimizer]), _parts_of_state(saved)
    if len(parts) == len(parts_then):
        return loaded
    loaded = {key: value for key, value in loaded.items() if isinstance(key, int) == (len(parts) > 1)}
    groups_then = [group for part in parts_then for group in _inner(part)["param_groups"]]
    by_key = {tuple(group[key] for key in _GROUP_KEYS): group for group in groups_then}
    for part, state in zip(parts, _parts_of_state(loaded), strict=True):
        for key, value in parts_then[0].items():  # what is no tensor is in the file by the place that it had then
            state.setdefault(key, copy.deepcopy(value))
        inner, first = _inner(state), _inner(parts_then[0])
        # A distributed optimiser has no list of parameters in its groups.
        given = [group for group in inner.get("param_groups", []) if "params" in group] or [{}] * len(part.param_groups)
        inner["param_groups"] = [
            by_key[tuple(now[key] for key in _GROUP_KEYS)]
            | {name: group[name] for name, group in (("params", of_file), ("is_expert_parallel", now)) if name in group}
            for now, of_file in zip(part.param_groups, given, strict=True)
        ]
        if "common_step" in first.get("state", {}):
            inner["state"]["common_step"] = first["state"]["common_step"]
    return loaded


def _inner(state: dict[str, Any]) -> dict[str, Any]:
    """torch's state inside the state of an optimiser of 16-bit parameters, or the state itself."""
    inner: dict[str, Any] = state.get("optimizer", state)
    return inner


def _layout() -> list[int]:
    from megatron.core import parallel_state

    return [
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_expert_model_parallel_world_size(),
        parallel_state.get_expert_tensor_parallel_world_size(),
    ]


def _random_state() -> dict[str, Any]:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    state = {"python": random.getstate(), "torch": torch.get_rng_state(), "megatron": get_cuda_rng_tracker().get_states()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: dict[str, Any]) -> None:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    get_cuda_rng_tracker().set_states(state["megatron"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def _sharded_random_state(state: dict[str, Any] | None) -> dict[str, Any]:
    """The random state as one object for each rank."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    rank, world_size = dist.get_rank(), dist.get_world_size()
    return {"state": ShardedObject("megatron_rl.random", state, (world_size,), (rank,), replica_id=0)}


def _write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(text)
    os.replace(temporary, path)
