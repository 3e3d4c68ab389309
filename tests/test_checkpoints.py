"""Checkpoints: each kind of run killed and resumed, saves that are cut off, damaged and foreign files, and what is refused."""

from __future__ import annotations

import io
import json
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import trainer_cases as cases
from helpers import error_of, pool_of

from megatron_rl.config import PolicyLossConfig
from megatron_rl.errors import ConfigError
from megatron_rl.layout.groups import resolve_groups
from megatron_rl.testing.ranks import RankError
from megatron_rl.train import checkpoints
from megatron_rl.train.checkpoints import CHECKSUMS
from megatron_rl.train.writers import MetricsWriter

pytestmark = pytest.mark.megatron

# Two optimiser steps a rollout, so that a resumed run that has lost an old log-probability or Adam's moments shows it at once.
CONFIG = PolicyLossConfig(
    policy_loss="gspo", loss_aggregation="prompt_mean", samples_per_prompt=4, clip_ratio_low=0.1, clip_ratio_high=0.1
)
OPTIONS = {"num_rollouts": 2, "save_interval": 1, "steps_per_rollout": 2}
EP, ETP = "expert_model_parallel_size", "expert_tensor_parallel_size"
EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32, "moe_aux_loss_coeff": 0.0}
pool = pool_of(2)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of run on two ranks; `other`: another layout of two ranks that goes on with it, with its settings of the trainer."""

    layout: dict[str, int] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    other: dict[str, int] | None = None
    other_settings: dict[str, Any] = field(default_factory=dict)


SHARDED = {"experts": EXPERTS, "use_distributed_optimizer": True}
KINDS = {
    # Another layout rounds its 16 bits in other places.
    "dense, float32 weights beside the model's": Kind(layout={cases.TP: 2}, settings={"bf16": True, "sequence_parallel": True}),
    "dense, distributed optimiser, a schedule": Kind(
        settings={"use_distributed_optimizer": True, "lr_decay_style": "linear", "lr_decay_iters": 9},
        options={"save_rollouts": "samples.jsonl"},
        other={cases.CP: 2},
    ),
    "experts, router replay": Kind(
        layout={EP: 2},
        settings=SHARDED,
        options={"router_replay": "rollout"},
        other={cases.TP: 2, EP: 2, ETP: 1},
        other_settings={"sequence_parallel": True},
    ),
    # Which documents share a step depends on the data-parallel ranks, and no other layout of two ranks has two.
    "steps of documents": Kind(
        config={"docs_per_step": 8}, options={"rollouts": "rollouts.jsonl", "num_rollouts": None, "micro_batch_size": 2}
    ),
    # The checkpoint is of the last trained step, so the skipped steps after it are met again, and counted once.
    "recorded rollouts, one without a token": Kind(
        config={"empty_step": "skip"}, options={"rollouts": "masked.jsonl", "num_rollouts": None}, other={cases.TP: 2}
    ),
}


def kind_on_rank(rank, folder, output_dir, kind, layout_settings, resume, row_of_kill):
    """A run of this kind. With row_of_kill rank 0 is killed when it has written that row."""
    settings, options = {**kind.settings, **layout_settings}, dict(kind.options)
    for name, place in (("rollouts", folder), ("save_rollouts", output_dir)):
        if name in options:
            options[name] = str(place / options[name])
    write = MetricsWriter.write

    def write_and_stop(self, step, metrics):
        write(self, step, metrics)
        if step == row_of_kill:
            os.kill(os.getpid(), signal.SIGKILL)

    with mock.patch.object(MetricsWriter, "write", write_and_stop):
        return run_on_rank(rank, output_dir, {**OPTIONS, **options}, settings, resume, replace(CONFIG, **kind.config))


@pytest.fixture(scope="module")
def given(tmp_path_factory) -> Path:
    """Files of rollouts of twelve samples, in one of which a rollout is masked."""
    folder = tmp_path_factory.mktemp("given")
    batches = [cases.make_batch(index, [[3, 4, 2, 4], [1, 4, 4, 2], [4, 4, 3, 1]]) for index in range(4)]
    cases.write_file(folder / "rollouts.jsonl", batches)
    cases.write_file(folder / "masked.jsonl", [cases.masked(batches[1]) if index == 1 else batches[index] for index in range(3)])
    return folder


def samples_of(file: Path) -> list[dict]:
    return [json.loads(line)["samples"] for line in file.read_text().splitlines()] if file.exists() else []


@pytest.mark.parametrize("name", KINDS)
def test_a_killed_run_goes_on_as_if_nothing_had_been(pool, tmp_path, given, name):
    """FB-90: a SIGKILL one row after a saved step. Catches Adam's moments or steps that start anew, prompts or noise that repeat,
    rows or samples of a lost rollout that stay; on the other layout shards in another order, moments of other parameters, padded
    vocabulary that is taken for a token."""
    kind = KINDS[name]

    def run(output, layout, layout_settings=(), *, resume=False, row_of_kill=None):
        beside = (kind, dict(layout_settings), resume, row_of_kill)
        return pool.run(kind_on_rank, given, tmp_path / output, *beside, world_size=2, **layout)

    whole = run("whole", kind.layout)
    with pytest.raises(RankError, match="exit code -9"):
        run("killed", kind.layout, row_of_kill=3)
    assert len(cases.metrics_of(tmp_path / "killed")) == 3
    assert checkpoints.latest_checkpoint(tmp_path / "killed" / "checkpoints").name == "step_00000002"
    shutil.copytree(tmp_path / "killed", tmp_path / "other")
    resumed = run("killed", kind.layout, resume=True)
    rows = cases.metrics_of(tmp_path / "whole")
    assert len(rows) > 3 and cases.metrics_of(tmp_path / "killed") == rows
    for (outcome, weights), (expected, truth) in zip(resumed, whole, strict=True):
        assert outcome.progress == expected.progress
        assert all(torch.equal(value, weights[name][2]) for name, (_, _, value) in truth.items())
    assert samples_of(tmp_path / "killed" / "samples.jsonl") == samples_of(tmp_path / "whole" / "samples.jsonl")
    if kind.other is not None:
        run("other", kind.other, kind.other_settings, resume=True)
        # 1e-5 relative or 1e-6 absolute: float32 in other orders through the steps of Adam stays ten times below that.
        assert cases.unlike_metrics(cases.metrics_of(tmp_path / "other"), rows) == []


def run_on_rank(rank, output_dir, options, settings, resume=False, config=CONFIG):
    base = sys.modules.get("megatron.core.dist_checkpointing.strategies.base")
    if base is not None:  # Megatron-Core up to 0.16 counts the saves of a process, and ranks of a pool have saved unlike numbers
        base.async_calls = type(base.async_calls)()
    return cases.run_loop(output_dir, config, options, settings=settings, resume=resume)


def save_on_rank(rank, directory, num_saves=2):
    """A step, saved as step 1 (, 2, ...)."""
    trainer, dp = cases.tiny_trainer(), resolve_groups().dp
    trainer.step([cases.ragged_step()[dp.rank() :: dp.size()]])
    for step in range(1, num_saves + 1):
        trainer.save(directory, step, {})


def load_on_rank(rank, checkpoints, settings):
    trainer = cases.tiny_trainer(**settings)
    return [error_of(lambda path=path: trainer.load(path)) for path in checkpoints]


def loading_each(pool, checkpoints, settings=None, world_size=1) -> list[tuple[str, ...]]:
    """What the ranks say of each checkpoint, when one policy loads one after the other."""
    answers = pool.run(load_on_rank, checkpoints, settings or {}, world_size=world_size, **{cases.TP: world_size})
    return list(zip(*answers, strict=True))


def loading(pool, checkpoint, settings=None, world_size=1) -> list[str]:
    """What each rank says when it loads."""
    return list(loading_each(pool, [checkpoint], settings, world_size)[0])


@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory):
    """A directory with steps 1 and 2 of TP2."""
    directory = tmp_path_factory.mktemp("saved")
    pool.run(save_on_rank, directory, world_size=2, **{cases.TP: 2})
    return directory


def copy_of(saved, folder) -> Path:
    """A copy of the first step."""
    return Path(shutil.copytree(saved / "step_00000001", folder / "step_00000001"))


OTHER_MODELS = [
    pytest.param({"num_layers": 4, "hidden_size": 64}, "--num-layers 2, this run has 4", id="two differences, told at once"),
    pytest.param({"num_attention_heads": 2}, "--num-attention-heads 4, this run has 2", id="other heads, of the same shapes"),
    pytest.param({"vocab_size": 12}, "--vocab-size 11, this run has 12", id="a vocabulary of the same padded size"),
]


@pytest.mark.parametrize(("settings", "message"), OTHER_MODELS)
def test_a_checkpoint_of_another_model_is_refused_by_the_flag(pool, saved, settings, message):
    """Catches Megatron's own answers: tracebacks of every rank, KeyError, and for heads and vocabulary none at all."""
    for error in loading(pool, saved / "step_00000002", settings, 2):
        assert error.startswith("ConfigError: ") and f"was saved with {message}: give it the same" in error
        assert len(settings) == 1 or ("2 problems" in error and "--hidden-size 32, this run has 64" in error)


def killed_save_on_rank(rank, directory):
    """A whole first save, and a second one that is killed before its rename."""
    from megatron.core import dist_checkpointing

    trainer = cases.tiny_trainer()
    trainer.step([cases.ragged_step()])
    trainer.save(directory, 1, {})
    original = dist_checkpointing.save
    with mock.patch.object(dist_checkpointing, "save", lambda *args: (original(*args), os.kill(os.getpid(), signal.SIGKILL))):
        trainer.save(directory, 2, {})


def test_a_save_that_is_killed_half_way_leaves_the_checkpoint_before_it(pool, tmp_path):
    """`latest` must not name what is not whole, and the next save must get over what is left."""
    with pytest.raises(RankError, match="exit code -9"):
        pool.run(killed_save_on_rank, tmp_path, world_size=1)
    checkpoint = checkpoints.latest_checkpoint(tmp_path)
    assert checkpoint.name == "step_00000001"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000001", "step_00000002.partial"]
    assert loading(pool, checkpoint) == [""]
    pool.run(save_on_rank, tmp_path, world_size=1)
    assert checkpoints.latest_checkpoint(tmp_path).name == "step_00000002"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000001", "step_00000002"]


def save_on_a_small_disk(rank, directory):
    """What the second save raises: files of the second rank end at a limit, while tensors are written, as on a full disk."""
    trainer = cases.tiny_trainer()
    trainer.step([cases.ragged_step()])
    trainer.save(directory, 1, {})
    if rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    try:
        return error_of(lambda: trainer.save(directory, 2, {}))
    finally:
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.getrlimit(resource.RLIMIT_FSIZE)[1],) * 2)


def test_a_full_disk_is_told_in_one_line_on_all_ranks(pool, tmp_path):
    """Catches a traceback of every rank, a rank that waits for one that has ended, and a message that does not say what is left."""
    for message in pool.run(save_on_a_small_disk, tmp_path, world_size=2, **{cases.TP: 2}):
        assert message.startswith(f"RunError: checkpoint {tmp_path}/step_00000002 cannot be written: ") and "\n" not in message
        assert message.endswith(f"; {tmp_path}/step_00000001 is whole, and --resume goes on from it")
    assert checkpoints.latest_checkpoint(tmp_path).name == "step_00000001"


class Command:
    """What a pickle may hold: unpickled by Python's own reader, it makes a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def with_right_checksums(checkpoint: Path) -> Path:
    subprocess.run(["bash", "-c", f"sha256sum .metadata [!S]* > {CHECKSUMS}"], cwd=checkpoint, check=True)
    return checkpoint


def archived(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def hide_in_metadata(checkpoint: Path, command: Command) -> None:
    """All that a reader looks for is there; the command is one more field."""
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    metadata.planner_data = {"more": command}
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))


def replace_common_values(checkpoint: Path, command: Command) -> None:
    (checkpoint / "common.pt").write_bytes(archived({"counters": command}))


def replace_an_object(checkpoint: Path, command: Command) -> None:
    """The payload behind the end of a file, and .metadata that says that it is the entry. A module's extra state is an object
    between the tensors: torch reads it without weights_only."""
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    kinds = {name: type(kind).__name__ for name, kind in metadata.state_dict_metadata.items()}
    info = next(info for index, info in metadata.storage_data.items() if kinds[index.fqn] == "BytesStorageMetadata")
    with (checkpoint / info.relative_path).open("ab") as file:
        info.offset, info.length = file.tell(), len(archived(command))
        file.write(archived(command))
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))


ATTACKS = (hide_in_metadata, replace_common_values, replace_an_object)


def test_a_stranger_s_checkpoint_runs_nothing(pool, saved, tmp_path):
    """With right checksums, which whoever makes the files makes too."""
    copies = [copy_of(saved, tmp_path / attack.__name__) for attack in ATTACKS]
    for attack, copy in zip(ATTACKS, copies, strict=True):
        attack(copy, Command(copy.parent / "made"))
    found = loading_each(pool, [with_right_checksums(copy) for copy in copies], world_size=2)
    for attack, copy, answers in zip(ATTACKS, copies, found, strict=True):
        assert not (copy.parent / "made").exists(), f"{attack}: the checkpoint's own code ran"
        # Megatron-Core 0.18 and later: a rank that does not read the object does not hear of it.
        refused = [message for message in answers if message]
        assert len(refused) == 2 or (refused and attack is replace_an_object), attack
        assert all("it holds more than plain data, and none of it was run" in message for message in refused), refused


def flipped(path: Path) -> None:
    """In the middle of a tensor nothing else would notice it: the run would go on with other weights."""
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 0x04
    path.write_bytes(content)


DAMAGES = {"missing": Path.unlink, "cut": lambda path: os.truncate(path, path.stat().st_size // 2), "flipped": flipped}


def test_a_damaged_file_is_refused(pool, saved, tmp_path):
    """Which files there are is the installed Megatron-Core's choice. sha256sum reads the sums."""
    checked = subprocess.run(["sha256sum", "--strict", "-c", CHECKSUMS], cwd=saved / "step_00000001", capture_output=True)
    assert checked.returncode == 0
    names = os.listdir(saved / "step_00000001")
    assert {".metadata", "__0_0.distcp", "__1_0.distcp", CHECKSUMS} <= set(names)
    rows = [(name, damage) for name in names for damage in DAMAGES]
    copies = [copy_of(saved, tmp_path / f"{damage} {name}") for name, damage in rows]
    for copy, (name, damage) in zip(copies, rows, strict=True):
        DAMAGES[damage](copy / name)
    for (name, damage), messages in zip(rows, loading_each(pool, copies, world_size=2), strict=True):
        for message in messages:
            assert message.startswith("ConfigError: ") and "missing or damaged" in message, (name, damage, message)
            assert name in message or damage != "flipped" or name == CHECKSUMS, message


@pytest.mark.parametrize("content", [b"..", b"step_00000007\n", b"\xff\xfe", b"\x1b[31mX", b"a" * 5000], ids=range(5))
def test_latest_never_leaves_its_folder(tmp_path, content):
    """A damaged or forged pointer, or one to a checkpoint that was not copied, is refused by name; what it holds reaches the
    terminal as escapes alone."""
    (tmp_path / "latest").write_bytes(content)
    with pytest.raises(ConfigError, match="latest holds '.*': it must name a checkpoint beside it") as raised:
        checkpoints.latest_checkpoint(tmp_path)
    assert str(raised.value).isprintable() and len(str(raised.value)) < 500
