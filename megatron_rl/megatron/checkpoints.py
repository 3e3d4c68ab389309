"""Saves and loads a run through megatron.core.dist_checkpointing; a checkpoint is whole or it is not there.

It is written beside its place and renamed last, and the `latest` file names it only then: whoever is killed in between leaves the
one before. The format does not depend on the layout; it must never hold rollouts or metrics.
"""

from __future__ import annotations

import os
import pickle
import queue
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_rl.errors import ConfigError
from megatron_rl.layout.collectives import group_device

LATEST = "latest"
# How a distributed optimiser saves each parameter's state as a tensor of its own shape, which alone reloads under another dp, tp or
# pp size: the format and what loads it, the one of Megatron-Core 0.15 and later first.
RESHARDABLE_FORMATS = {
    "fully_reshardable": "load_parameter_state_from_fully_reshardable",
    "fully_sharded_model_space": "load_parameter_state_from_fs_model_space",
}


def check_can_save() -> None:
    """Raises ConfigError without psutil: dist_checkpointing's writers need it, do not say so, and then hang for ever."""
    if find_spec("psutil") is None:
        raise ConfigError(
            "saving a checkpoint needs psutil, which megatron-core does not declare and without which it hangs: pip install psutil"
        )


def save_checkpoint(directory: str | Path, step: int, model, optimizer, counters: dict, *, description: dict[str, int]) -> Path:
    """Writes `directory`/step_<step> and points `latest` at it. Every rank calls it; a rank that fails leaves `latest` as it was.

    model: the DDP-wrapped model of this rank. counters: plain numbers and text, equal on all ranks. description: the settings
    without which the checkpoint cannot be loaded, by the names of their flags.
    """
    from megatron.core import dist_checkpointing

    check_can_save()
    final = Path(directory) / f"step_{step:08d}"
    partial = final.with_name(final.name + ".partial")
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    _barrier()
    model_state = model.module.sharded_state_dict()
    state = {
        "model": model_state,
        "optimizer": optimizer.sharded_state_dict(model_state, metadata=_optimizer_metadata()),
        "random": _sharded_random_state(_random_state()),
        "counters": {**counters, "step": step, "world_size": dist.get_world_size(), "layout": _layout()},
        "description": description,
    }
    _collect_in_this_process()
    dist_checkpointing.save(state, str(partial))
    _barrier()
    if dist.get_rank() == 0:
        _replace_directory(final, partial)
        _write_atomically(Path(directory) / LATEST, final.name + "\n")
    _barrier()
    return final


def latest_checkpoint(directory: str | Path) -> Path:
    """The newest whole checkpoint. Raises ConfigError, saying what is there, when there is none."""
    directory = Path(directory)
    pointer = directory / LATEST
    if not pointer.is_file():
        raise ConfigError(f"no checkpoint in {directory}: it has no file `{LATEST}`; start without --resume, or name another run")
    checkpoint = directory / pointer.read_text().strip()
    if not checkpoint.is_dir():
        raise ConfigError(f"{pointer} names {checkpoint.name}, which is not there: it was removed, or the copy is incomplete")
    return checkpoint


def load_counters(checkpoint: str | Path) -> dict:
    """The counters alone, before a model exists. Raises ConfigError when they cannot be read."""
    return _load_common(checkpoint)["counters"]


def load_checkpoint(checkpoint: str | Path, model, optimizer, *, description: dict[str, int]) -> dict:
    """Fills model and optimiser and returns the counters. Random states are restored where the layout is the one that saved them;
    on another layout they belong to ranks that no longer exist, and the run goes on with its own.

    Raises ConfigError when the checkpoint has another description, and when its files cannot be read.
    """
    from megatron.core import dist_checkpointing

    saved = _load_common(checkpoint)
    _check_description(checkpoint, saved["description"], description)
    counters = saved["counters"]
    _give_adam_a_state(optimizer)
    is_same_layout = (counters["world_size"], counters["layout"]) == (dist.get_world_size(), _layout())
    model_state = model.module.sharded_state_dict()
    state = {
        "model": model_state,
        "optimizer": optimizer.sharded_state_dict(model_state, is_loading=True, metadata=_optimizer_metadata()),
    }
    if is_same_layout:
        state["random"] = _sharded_random_state(None)
    with _readable(checkpoint):
        loaded = dist_checkpointing.load(state, str(checkpoint))
    model.module.load_state_dict(loaded["model"])
    _load_optimizer(optimizer, loaded["optimizer"])
    if is_same_layout:
        _set_random_state(loaded["random"]["state"])
    return counters


def _load_common(checkpoint: str | Path) -> dict:
    """What every rank reads whole: counters and description. Raises ConfigError when they cannot be read."""
    from megatron.core import dist_checkpointing

    # Errors of torch.load and json for a file that ends early; Megatron-Core to 0.16 stumbles over its message for a missing one.
    with _readable(checkpoint, RuntimeError, ValueError, AttributeError):
        return dist_checkpointing.load_common_state_dict(str(checkpoint))


@contextmanager
def _readable(checkpoint: str | Path, *more: type[Exception]) -> Iterator[None]:
    """ConfigError for what Megatron and torch raise inside, and for `more`, when files are missing or damaged."""
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    # The second one derives from BaseException, and its text holds a traceback for each rank.
    except (CheckpointingException, CheckpointException, OSError, EOFError, pickle.UnpicklingError, *more) as error:
        raise ConfigError(
            f"{checkpoint} cannot be read ({type(error).__name__}): files are missing or damaged; `{LATEST}` beside it may name an "
            "earlier checkpoint instead"
        ) from error


def _check_description(checkpoint: str | Path, saved: dict[str, int], wanted: dict[str, int]) -> None:
    problems = [
        f"{checkpoint} was saved with {flag} {saved[flag]}, this run has {value}: give it the same"
        for flag, value in wanted.items()
        if saved[flag] != value
    ]
    if problems:
        raise ConfigError(problems)


def _collect_in_this_process() -> None:
    """Megatron collects its writers' reports in a process that it starts with the first save, for asynchronous saving.

    This save is synchronous and a queue is enough. That process takes seconds to start, outlives a rank that is killed, and ends
    with a SIGTERM to the process group, as torchrun and schedulers send it: the last save would fail. Megatron-Core 0.13 and 0.14
    keep it, because they fork for synchronous saves too.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    saves_here = "execute_sync" in TorchDistSaveShardedStrategy.save.__code__.co_names
    if saves_here and vars(filesystem_async).get("_results_queue", "another Megatron-Core") is None:
        filesystem_async._results_queue = queue.Queue()


def _replace_directory(final: Path, partial: Path) -> None:
    """An older `final`, which `latest` may name, is gone for the moment between two renames and no longer."""
    replaced = final.with_name(final.name + ".replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if final.exists():
        final.rename(replaced)
    partial.rename(final)
    shutil.rmtree(replaced, ignore_errors=True)


def _optimizer_metadata() -> dict:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    known = [name for name, load in RESHARDABLE_FORMATS.items() if hasattr(DistributedOptimizer, load)]
    return {"distrib_optim_sharding_type": known[0], "chained_optim_avoid_prefix": True}


def _distributed_parts(optimizer) -> list:
    """The distributed optimisers over torch's own Adam. Megatron-Core loads none of these by itself: see the two functions below.
    apex's and Transformer Engine's Adam keep one step count for a group of parameters and need no help."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    adams = (torch.optim.Adam, torch.optim.AdamW)
    return [part for part in parts if isinstance(part, DistributedOptimizer) and isinstance(part.optimizer, adams)]


def _give_adam_a_state(optimizer) -> None:
    """Adam has no state before its first step, and the distributed optimiser asserts a step count before it loads one."""
    for part in _distributed_parts(optimizer):
        for parameter in (parameter for group in part.optimizer.param_groups for parameter in group["params"]):
            if not part.optimizer.state[parameter]:
                moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                part.optimizer.state[parameter] = {"step": torch.zeros(()), **moments}


def _load_optimizer(optimizer, state: dict) -> None:
    """optimizer.load_state_dict, and for a distributed optimiser over torch's Adam what that cannot do.

    It copies each entry of Adam's state from the file, where the step count is none, so the count steps aside; and it gives all
    parameters one and the same count, which Adam would raise once for each of them.
    """
    parts = _distributed_parts(optimizer)
    if not parts:
        optimizer.load_state_dict(state)
        return
    [part] = parts
    parameters, load = state.pop("param_state"), RESHARDABLE_FORMATS[state["param_state_sharding_type"]]
    part.load_state_dict(state)
    states = part.optimizer.state.values()
    step_counts = [of_parameter.pop("step") for of_parameter in states]
    getattr(part, load)(parameters)
    for of_parameter, step_count in zip(states, step_counts, strict=True):
        of_parameter["step"] = step_count.clone()


def _layout() -> list[int]:
    from megatron.core import parallel_state

    return [
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
    ]


def _random_state() -> dict:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    state = {"python": random.getstate(), "torch": torch.get_rng_state(), "megatron": get_cuda_rng_tracker().get_states()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: dict) -> None:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    get_cuda_rng_tracker().set_states(state["megatron"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def _sharded_random_state(state: dict | None) -> dict:
    """One object a rank."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    rank, world_size = dist.get_rank(), dist.get_world_size()
    return {"state": ShardedObject("megatron_rl.random", state, (world_size,), (rank,), replica_id=0)}


def _write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(text)
    os.replace(temporary, path)


def _barrier() -> None:
    """NCCL is told the device: it would guess one and warn."""
    device = group_device(dist.group.WORLD)
    dist.barrier(group=dist.group.WORLD, device_ids=[device.index] if device.type == "cuda" else None)
