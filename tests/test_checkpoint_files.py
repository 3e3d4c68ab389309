"""The files of a checkpoint: what a stranger's may ask for, what a flipped bit does, where `latest` may point."""

from __future__ import annotations

import io
import os
import pickle
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from helpers import error_of
from trainer_cases import TP, ragged_step, tiny_trainer

from megatron_rl.errors import ConfigError
from megatron_rl.layout.groups import resolve_groups
from megatron_rl.megatron import checkpoints
from megatron_rl.megatron.checkpoint_files import CHECKSUMS, checksums_of, write_checksums
from megatron_rl.testing.ranks import RankPool

pytestmark = pytest.mark.megatron


class Command:
    """What a pickle may hold: unpickled by Python's own reader, it makes a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture(scope="module")
def pool():
    with RankPool(2, timeout=240) as ranks:
        yield ranks


def save_on_rank(rank, directory):
    trainer = tiny_trainer()
    dp = resolve_groups().dp
    trainer.step([ragged_step()[dp.rank() :: dp.size()]])
    trainer.save(directory, 1, {"note": 1})


def load_on_rank(rank, checkpoint):
    return error_of(lambda: tiny_trainer().load(checkpoint))


@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    pool.run(save_on_rank, directory, world_size=2, **{TP: 2})
    return directory / "step_00000001"


def copy_of(saved: Path, folder: Path) -> Path:
    return Path(shutil.copytree(saved, folder / saved.name))


def with_right_checksums(checkpoint: Path) -> Path:
    write_checksums(checkpoint, checksums_of(checkpoint, {path.name for path in checkpoint.iterdir()} - {CHECKSUMS}))
    return checkpoint


def archived(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def replace_metadata(checkpoint: Path, made: Path) -> str:
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Command(made)))
    return ".metadata: it asks for posix.mkdir"


def hide_in_metadata(checkpoint: Path, made: Path) -> str:
    """All that a reader looks for is there; the command is one more field."""
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    metadata.planner_data = {"more": Command(made)}
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    return ".metadata: it asks for posix.mkdir"


def change_a_class_in_metadata(checkpoint: Path, made: Path) -> str:
    """Asks for nothing but a class of torch's, and gives it an attribute."""
    attributes = b"(N}X\x06\x00\x00\x00markerK\x01stb."
    (checkpoint / ".metadata").write_bytes(b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n" + attributes)
    return ".metadata: it sets attributes of"


def replace_common(checkpoint: Path, made: Path) -> str:
    (checkpoint / "common.pt").write_bytes(archived({"counters": Command(made)}))
    return "common.pt: it asks for posix.mkdir"


def replace_common_by_a_plain_pickle(checkpoint: Path, made: Path) -> str:
    (checkpoint / "common.pt").write_bytes(pickle.dumps({"counters": Command(made)}))
    return "common.pt cannot be read (ValueError: it is no archive of torch.save)"


def take_another_format(checkpoint: Path, made: Path) -> str:
    (checkpoint / "metadata.json").write_text('{"sharded_backend": "zarr", "common_backend": "torch"}')
    return "metadata.json cannot be read (ValueError: its backends are 'zarr' and 'torch'"


def point_at(checkpoint: Path, wanted, payload: bytes) -> str:
    """The payload behind the end of a file, and .metadata that says that it is the entry."""
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    [index, *_] = [index for index in metadata.storage_data if wanted(metadata.state_dict_metadata[index.fqn])]
    info = metadata.storage_data[index]
    with (checkpoint / info.relative_path).open("ab") as file:
        info.offset, info.length = file.tell(), len(payload)
        file.write(payload)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    return f"{info.relative_path}: it asks for posix.mkdir"


def replace_an_object(checkpoint: Path, made: Path) -> str:
    """Random states are objects between the tensors: torch reads those without weights_only."""
    return point_at(checkpoint, lambda entry: type(entry).__name__ == "BytesStorageMetadata", archived(Command(made)))


def replace_a_tensor(checkpoint: Path, made: Path) -> str:
    point_at(checkpoint, lambda entry: type(entry).__name__ == "TensorStorageMetadata", archived(Command(made)))
    return ": UnpicklingError: Weights only load failed"


def read_another_folder(checkpoint: Path, made: Path) -> str:
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    next(iter(metadata.storage_data.values())).relative_path = "../../\x1b[2Jfile"
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    return ".metadata cannot be read (ValueError: it names the file '../../\\x1b[2Jfile', which SHA256SUMS does not list"


ATTACKS = [
    replace_metadata,
    hide_in_metadata,
    change_a_class_in_metadata,
    take_another_format,
    read_another_folder,
    replace_common,
    replace_common_by_a_plain_pickle,
    replace_an_object,
    replace_a_tensor,
]


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_a_stranger_s_checkpoint_runs_nothing(pool, saved, tmp_path, attack):
    """With right checksums, which whoever makes the files makes too. The message names the file and what it asked for."""
    made = tmp_path / "made"
    checkpoint = copy_of(saved, tmp_path)
    says = attack(checkpoint, made)
    with_right_checksums(checkpoint)
    answers = pool.run(load_on_rank, checkpoint, world_size=2, **{TP: 2})
    assert not made.exists(), "the checkpoint's own code ran"
    assert not hasattr(torch.distributed.checkpoint.metadata.Metadata, "marker")
    # Megatron-Core 0.18 and later: a rank that reads none of the tensor does not hear of it.
    refused = [message for message in answers if message]
    assert len(refused) == 2 or (refused and attack is replace_a_tensor)
    for message in refused:
        assert message.startswith("ConfigError: ") and says in message, message


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "__1_0.distcp", "common.pt", "metadata.json", CHECKSUMS])
def test_one_flipped_bit_is_found_in_any_file(pool, saved, tmp_path, name):
    """In the middle of a tensor nothing else would notice it: the run would go on with other weights."""
    checkpoint = copy_of(saved, tmp_path)
    if name not in os.listdir(checkpoint):
        pytest.skip(f"this Megatron-Core writes no {name}")
    content = bytearray((checkpoint / name).read_bytes())
    for place in (0, len(content) // 3, len(content) // 2, len(content) - 2):
        flipped = bytearray(content)
        flipped[place] ^= 0x04
        (checkpoint / name).write_bytes(flipped)
        for message in pool.run(load_on_rank, checkpoint, world_size=2, **{TP: 2}):
            assert message.startswith("ConfigError: ") and "files are missing or damaged: " in message, message
            assert name in message or name == CHECKSUMS, message


def test_a_checkpoint_without_checksums_can_be_taken_as_it_is(pool, saved, tmp_path):
    """The message's own line, typed in a shell, makes one of an earlier version load."""
    checkpoint = copy_of(saved, tmp_path)
    (checkpoint / CHECKSUMS).unlink()
    [message] = pool.run(load_on_rank, checkpoint, world_size=1)
    line = message.partition("`")[2].partition("`")[0]
    assert line.startswith("cd ") and "SHA256SUMS is missing" in message
    subprocess.run(["bash", "-c", line], check=True)
    assert pool.run(load_on_rank, checkpoint, world_size=1) == [""]


def test_sha256sum_reads_our_checksums(saved):
    finished = subprocess.run(["sha256sum", "--strict", "-c", CHECKSUMS], cwd=saved, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert finished.stdout.count(": OK") == len(list(saved.iterdir())) - 1


def failing_load_on_rank(rank, checkpoint):
    """The ranks run out of memory while torch copies tensors into the model."""
    from torch.distributed.checkpoint import FileSystemReader

    def read_data(self, plan, planner):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\nGPU 0 has a total capacity of ...")

    original = FileSystemReader.read_data
    FileSystemReader.read_data = read_data
    try:
        return error_of(lambda: tiny_trainer().load(checkpoint))
    finally:
        FileSystemReader.read_data = original


def test_what_fails_while_loading_is_named_and_is_no_damage(pool, saved):
    """Catches "files are missing or damaged" for a GPU that is full: the reader would look for a fault where none is."""
    for message in pool.run(failing_load_on_rank, saved, world_size=2, **{TP: 2}):
        assert re.search(r"cannot be loaded: rank \d: OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB.;", message)
        assert "damaged" not in message and "Traceback" not in message


NO_NAMES = [
    b"",
    b".",
    b"..",
    b"../..",
    b"/etc",
    b"step_00000001\nstep_00000002",
    b"\xff\xfe",
    b"\x1b[31mX",
    "\u2028".encode(),
    b"a" * 5000,
]


@pytest.mark.parametrize("content", NO_NAMES, ids=lambda content: ascii(content[:20]))
def test_latest_never_leaves_its_folder(tmp_path, content):
    """A damaged or forged pointer is refused by name; what it holds reaches the terminal as escapes alone."""
    (tmp_path / "step_00000001").mkdir()
    (tmp_path / "latest").write_bytes(content)
    with pytest.raises(ConfigError, match="latest holds '.*': it must name a checkpoint beside it, .*step_00000001$") as raised:
        checkpoints.latest_checkpoint(tmp_path)
    assert str(raised.value).isprintable() and len(str(raised.value)) < 500


def test_a_checkpoint_of_another_program_is_told_from_ours(pool, saved, tmp_path):
    """Megatron's own checkpoints have the same files: catches a bare KeyError."""
    checkpoint = copy_of(saved, tmp_path)
    if "common.pt" not in os.listdir(checkpoint):
        pytest.skip("this Megatron-Core writes no common.pt")
    (checkpoint / "common.pt").write_bytes(archived({"iteration": 7}))
    [message] = pool.run(load_on_rank, with_right_checksums(checkpoint), world_size=1)
    assert message.startswith("ConfigError: ") and "holds no counters and no description" in message
