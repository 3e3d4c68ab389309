"""Saves and loads a run through megatron.core.dist_checkpointing. A checkpoint is complete, or `latest` does not name it.

A save writes into a temporary directory, renames it, and then writes its name into `latest`. A run that is killed before that keeps
the previous checkpoint. A load checks the checksums before it uses a file: torch reads a file with a flipped bit without an error.
It runs no code of a file. The format does not depend on the layout. It has no rollouts, metrics or random states: prompts and noise
depend only on the seed and the counters.
"""

from __future__ import annotations

import hashlib
import multiprocessing.dummy
import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist

from megatron_rl.errors import ConfigError, RunError, printable
from megatron_rl.layout.agreement import on_all_ranks

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.optimizer import MegatronOptimizer

LATEST = "latest"
STEP_NAME = re.compile(r"step_\d+")
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
# A distributed optimiser saves each parameter's state in the parameter's shape: it can be loaded under another dp, tp or pp size.
OPTIMIZER_FORMAT = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


def check_can_save() -> None:
    """Raises ConfigError without megatron-core, and without psutil: the writers of dist_checkpointing hang without it."""
    absent = [name for module, name in (("megatron", "megatron-core"), ("psutil", "psutil")) if find_spec(module) is None]
    if absent:
        raise ConfigError(
            f"training needs {' and '.join(absent)}, which this Python does not have: pip install {' '.join(absent)}; the extra "
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
    Communication: as on_all_ranks and dist_checkpointing.
    Raises RunError, on all ranks, where it cannot be written, for instance to a full disk.
    """
    directory = Path(directory)
    final = directory / f"step_{step:08d}"
    partial, replaced = (final.with_name(final.name + end) for end in (".partial", ".replaced"))

    def make_empty() -> None:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)

    def publish() -> None:
        lines = [f"{digest}  {name}\n" for name, digest in checksums.items()]
        (partial / CHECKSUMS).write_text("".join(lines), encoding="utf-8")
        # An older directory of this step, which `latest` may name, is missing only between two renames.
        shutil.rmtree(replaced, ignore_errors=True)
        if final.exists():
            final.rename(replaced)
        partial.rename(final)
        shutil.rmtree(replaced, ignore_errors=True)
        pointer = directory / (LATEST + ".new")
        pointer.write_text(final.name + "\n")
        os.replace(pointer, directory / LATEST)

    with _writable(final):
        on_first_rank(make_empty)
        model_state = model.module.sharded_state_dict()
        state = {
            "model": model_state,
            "optimizer": optimizer.sharded_state_dict(model_state, metadata=OPTIMIZER_FORMAT),
            "counters": {**counters, "step": step},
            "description": description,
        }
        _save_in_this_process(state, partial)
        checksums = _checksums(partial)
        on_first_rank(publish)
    return final


def latest_checkpoint(directory: str | Path) -> Path:
    """The newest complete checkpoint. Raises ConfigError where there is none."""
    directory = Path(directory)
    pointer = directory / LATEST
    if not pointer.is_file():
        raise ConfigError(f"no checkpoint in {directory}: it has no file `{LATEST}`; start without --resume, or name another run")
    with pointer.open("rb") as file:
        name = file.read(200).decode(errors="backslashreplace").strip()
    if not STEP_NAME.fullmatch(name) or not (directory / name).is_dir():
        raise ConfigError(
            f"{pointer} holds '{printable(name)}': it must name a checkpoint beside it, as step_00000050; write the newest into it"
        )
    return directory / name


def remove_checkpoints(directory: str | Path) -> None:
    """Removes the checkpoints, `latest` first, so that a killed run leaves no incomplete one to resume. Other files stay."""
    directory = Path(directory)
    (directory / LATEST).unlink(missing_ok=True)
    for path in directory.glob("step_*"):
        shutil.rmtree(path)


def load_checkpoint(
    checkpoint: str | Path, model: DistributedDataParallel, optimizer: MegatronOptimizer, *, description: dict[str, int]
) -> dict[str, Any]:
    """Fills model and optimiser and returns the counters. Other ranks than the saving ones may load it.

    Communication: as on_all_ranks and dist_checkpointing.
    Raises ConfigError, before any file is used, when the files are not as they were saved; also when they contain more than plain
    data, for another description, and when they cannot be loaded.
    """
    from megatron.core import dist_checkpointing

    checkpoint = Path(checkpoint)
    _check_files(checkpoint)
    with _plain_data_only():
        with _readable(checkpoint), (checkpoint / METADATA).open("rb") as metadata:
            _MetadataUnpickler(metadata).load()
            saved = dist_checkpointing.load_common_state_dict(str(checkpoint))
        _check_description(checkpoint, saved, description)
        _give_adam_a_state(optimizer)
        model_state = model.module.sharded_state_dict()
        optimizer_state = optimizer.sharded_state_dict(model_state, is_loading=True, metadata=OPTIMIZER_FORMAT)
        with _readable(checkpoint):
            loaded = dist_checkpointing.load({"model": model_state, "optimizer": optimizer_state}, str(checkpoint))
    model.module.load_state_dict(loaded["model"])
    _load_optimizer(optimizer, loaded["optimizer"])
    counters: dict[str, Any] = saved["counters"]
    return counters


def _checksums(checkpoint: Path) -> dict[str, str]:
    """name -> SHA-256 of all files but CHECKSUMS. Each rank reads a share. Communication: as on_all_ranks."""

    def digests_of_share() -> dict[str, str]:
        names = sorted(path.name for path in checkpoint.iterdir() if path.is_file() and path.name != CHECKSUMS)
        digests = {}
        for name in names[dist.get_rank() :: dist.get_world_size()]:
            with (checkpoint / name).open("rb") as file:
                digests[name] = hashlib.file_digest(file, "sha256").hexdigest()
        return digests

    return {name: digest for share in on_all_ranks(digests_of_share) for name, digest in share.items()}


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
        raise RunError(f"checkpoint {final} cannot be written: {_first_failure(error)}; {left}") from error


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


def _check_description(checkpoint: Path, saved: dict[str, Any], wanted: dict[str, int]) -> None:
    then = saved["description"]
    problems = [
        f"{checkpoint} was saved with {flag} {then.get(flag)}, this run has {value}: give it the same"
        for flag, value in wanted.items()
        if then.get(flag) != value
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
    with mock.patch.object(async_utils, "mp", threads), mock.patch.object(filesystem_async, "mp", threads):
        dist_checkpointing.save(state, str(path))


def on_first_rank(work: Callable[[], None]) -> None:
    """Every rank raises its error. Communication: as on_all_ranks."""
    on_all_ranks(work if dist.get_rank() == 0 else lambda: None)


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
    chain_states = [state[number] for number in sorted(key for key in state if isinstance(key, int))]
    for part, part_state in zip(parts, chain_states or [state], strict=True):
        parameters = part_state.pop("param_state")
        part.load_state_dict(part_state)
        states = part.optimizer.state.values()
        step_counts = [parameter_state.pop("step") for parameter_state in states]
        part.load_parameter_state_from_fully_reshardable(parameters)
        for parameter_state, step_count in zip(states, step_counts, strict=True):
            parameter_state["step"] = step_count.clone()
