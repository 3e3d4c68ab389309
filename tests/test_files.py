"""Readers of what somebody else wrote: an archive is read as it is laid out, or refused; a value or a named error, and no code."""

from __future__ import annotations

import io
import re
import struct
import warnings
import zipfile
from collections import OrderedDict
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from megatron_rl.errors import ConfigError, DataError
from megatron_rl.files import archive
from megatron_rl.files.bounds import check_tree
from megatron_rl.files.host_dumps import load_samples
from megatron_rl.files.json_values import parse_json
from megatron_rl.files.plain_pickle import DAMAGED
from megatron_rl.files.yaml_values import parse_yaml


def saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def read(content: bytes):
    return archive.read_archive(io.BytesIO(content), len(content))


MATRIX = torch.arange(12.0).view(3, 4)
VALUES = {
    "scalars": {"a": [1, -1, 2**40, 1.5, True, None, "text", b"bytes"], (1, "x"): (), 3: {1, 2}, 4: frozenset([5])},
    "ordered": OrderedDict(a=1, b=torch.Size([2, 3])),
    "types": [torch.arange(5).to(kind.dtype) for kind in archive.STORAGES.values()],
    "bool": torch.tensor([True, False, True]),
    "views of one storage": [MATRIX, MATRIX.t(), MATRIX[1], MATRIX[:, 2], MATRIX[1:1], torch.ones(1).expand(3)],
    "empty": [torch.empty(0), torch.empty(2, 0, 3), [], {}],
    "scalar tensor": torch.tensor(3.5),
}


def parts(value: object):
    """A tensor as its values, type and strides: tensors compare by element."""
    if isinstance(value, torch.Tensor):
        return value.tolist(), value.dtype, value.shape, value.stride()
    if isinstance(value, dict):
        return type(value), [(key, parts(inner)) for key, inner in value.items()]
    return (type(value), [*map(parts, value)]) if isinstance(value, list) else value


@pytest.mark.parametrize("name", VALUES)
def test_what_torch_saves_is_read_as_torch_reads_it(name):
    content = saved(VALUES[name])
    found, not_read = read(content)
    assert parts(found) == parts(torch.load(io.BytesIO(content), weights_only=False))
    assert not_read == []


def test_an_archive_without_checksums_is_read_and_one_with_a_wrong_one_is_not():
    torch.serialization.set_crc32_options(False)
    try:
        content = saved(MATRIX)
    finally:
        torch.serialization.set_crc32_options(True)
    assert torch.equal(read(content)[0], MATRIX)
    with pytest.raises(ValueError, match="the checksum of data/0 differs"):
        read(saved(MATRIX).replace(MATRIX.numpy().tobytes(), bytes(48)))


# Archives that readers of zip see differently. Each has a directory that this function moves, repeats or changes.


def zipped(members: dict[str, bytes], **options) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", **options) as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names that stand twice
        for name, content in members.items():
            file.writestr(name.rstrip("~"), content)
    return buffer.getvalue()


PICKLE = b"\x80\x02]q\x00K\x01a."
WHOLE = zipped({"d/data.pkl": PICKLE, "d/version": b"3\n"})


def ended(
    content: bytes, *, members: int | None = None, length: int | None = None, start: int | None = None, tail: bytes = b""
) -> bytes:
    """With another end record."""
    *head, count, old_length, old_start, _ = archive.END.unpack(content[-22:])
    values = (members or count, length or old_length, old_start if start is None else start, len(tail))
    return content[:-22] + archive.END.pack(*head[:3], values[0], *values) + tail


def with_second_directory() -> bytes:
    """Before the end a directory of the same length: Python adds the length of a prefix, and sees it; torch sees the first."""
    _, _, _, _, count, length, start, _ = archive.END.unpack(WHOLE[-22:])
    other = zipped({"x/data.pkl": b"N.", "x/version": b"3\n"})
    second = other[archive.END.unpack(other[-22:])[6] : -22]
    assert len(second) == length
    return WHOLE[:-22] + second + WHOLE[-22:]


def with_other_end() -> bytes:
    """Directories of 64 bits: torch writes both ends, and they may say different things."""
    content = saved([1])
    return content[:-22] + archive.END.pack(*archive.END.unpack(content[-22:])[:3], 1, 1, 46, 0, 0)


LAYOUTS = {
    "a second directory": (with_second_directory, "its directory ends at byte"),
    "ends that differ": (with_other_end, "the two ends of its directory differ"),
    "a prefix": (lambda: b"#!/bin/sh\n" + WHOLE, "its directory ends at byte"),
    "a prefix that the offsets know": (lambda: shifted(WHOLE, 10), "begins at byte 10, and what stands before it ends at 0"),
    "a comment": (lambda: ended(WHOLE, tail=b"PK\x05\x06"), "no archive"),
    "bytes behind": (lambda: WHOLE + b"x", "no archive"),
    "two archives": (lambda: WHOLE + WHOLE, "its directory ends at byte"),
    "a name twice": (
        lambda: zipped({"d/data.pkl": PICKLE, "d/data.pkl~": b"N."}),
        "it holds d/data.pkl",
    ),
    "two folders": (lambda: zipped({"d/data.pkl": PICKLE, "e/version": b"3\n"}), "it holds e/version"),
    "a path": (lambda: zipped({"d/data.pkl": PICKLE, "d/../x": b""}), "it holds d/../x"),
    "code": (lambda: zipped({"d/data.pkl": PICKLE, "d/code/__torch__.py": b""}), "it holds d/code/__torch__.py"),
    "no folder": (lambda: zipped({"data.pkl": PICKLE}), "it holds data.pkl"),
    "compressed": (lambda: zipped({"d/data.pkl": PICKLE * 99}, compression=zipfile.ZIP_DEFLATED), "is compressed"),
    "another name at its place": (lambda: WHOLE.replace(b"d/data.pkl", b"d/code.pkl", 1), "is another member in the directory"),
    "another size at its place": (lambda: WHOLE[:18] + struct.pack("<LL", 7, 7) + WHOLE[26:], "has another size in the directory"),
    "more members than there are": (lambda: ended(WHOLE, members=9), "a directory of .* bytes for 9 members"),
    "a directory that is longer": (lambda: ended(WHOLE, length=10**6), "its directory ends at byte"),
    "a directory at the start": (lambda: ended(WHOLE, start=0), "its directory ends at byte"),
    "no data": (lambda: zipped({"d/version": b"3\n"}), "it holds no data.pkl"),
    "big-endian": (lambda: zipped({"d/data.pkl": PICKLE, "d/byteorder": b"big"}), "big-endian"),
}


def shifted(content: bytes, by: int) -> bytes:
    """Behind a prefix, with every offset right."""
    found = bytearray(bytes(by) + content)
    for entry in (place for place in range(len(found)) if found[place : place + 4] == b"PK\x01\x02"):
        struct.pack_into("<L", found, entry + 42, struct.unpack_from("<L", found, entry + 42)[0] + by)
    struct.pack_into("<L", found, len(found) - 6, struct.unpack_from("<L", found, len(found) - 6)[0] + by)
    return bytes(found)


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_archive_that_readers_of_zip_see_differently_is_refused(name):
    content, message = LAYOUTS[name]
    assert read(WHOLE)[0] == [1]
    with pytest.raises(ValueError, match=message):
        read(content())


class Program(torch.nn.Module):
    """TorchScript that writes bytes to a file when it is loaded."""

    def __init__(self):
        super().__init__()
        self.text = torch.tensor(list(b"any bytes"), dtype=torch.uint8)

    @torch.jit.export
    def __getstate__(self):
        return (self.text, self.training)

    @torch.jit.export
    def __setstate__(self, state: tuple[torch.Tensor, bool]):
        self.text = state[0]
        self.training = state[1]
        torch.from_file("was_run", True, self.text.numel(), dtype=torch.uint8).copy_(self.text)

    def forward(self, x: torch.Tensor):
        return x


def test_a_dump_that_is_a_program_to_torch_and_data_to_python_writes_no_file(tmp_path, monkeypatch):
    """Python takes the directory that stands at the end, torch the one that the end record names."""
    monkeypatch.chdir(tmp_path)
    torch.jit.script(Program()).save("program.pt")
    content = Path("program.pt").read_bytes()
    end64 = content.rfind(b"PK\x06\x06")
    count, length, start = archive.END64.unpack_from(content, end64)[7:]
    name, filled = b"x/data.pkl", length - archive.ENTRY.size - len(b"x/data.pkl")
    entry = (
        archive.ENTRY.pack(b"PK\x01\x02", 20, 20, 0, 0, 0, 0, 0, 10, 10, len(name), 0, filled, 0, 0, 0, 0) + name + bytes(filled)
    )
    end = archive.END.pack(b"PK\x05\x06", 0, 0, count, count, length, start, 0)
    Path("d.pt").write_bytes(content[: start + length] + entry + end)
    assert zipfile.ZipFile("d.pt").namelist() == ["x/data.pkl"]
    Path("was_run").unlink(missing_ok=True)
    with pytest.raises(DataError, match="--rollout-dump d.pt is damaged, or not of this kind"):
        load_samples("d.pt", "--rollout-dump")
    assert not Path("was_run").exists()


# What a pickle of a few bytes may ask for: each level doubles, so that 40 of them take for ever.

DOUBLED = b"]q\x00" + b"".join(b"]q%c(h%ch%ce" % (n + 1, n, n) for n in range(40))
TUPLES = b")q\x00" + b"".join(b"(h%ch%ctq%c" % (n, n, n + 1) for n in range(40))
HOSTILE = {
    "lists that share": (DOUBLED, "more than .* values, each counted wherever it stands"),
    "a key of tuples": (TUPLES + b"}h%cNs" % 40, "a key of the kind tuple"),
    "an item of a set": (TUPLES + b"c__builtin__\nset\n(]h%catR" % 40, "a key of the kind tuple"),
    "a list in itself": (b"]q\x00h\x00a", "contains itself"),
    "deep": (b"]" * 500 + b"a" * 499, "nested too deeply"),
    "a long number": (b"\x8b" + struct.pack("<i", 9000) + bytes(8999) + b"\x01", "a whole number of more than 64 bits"),
    "a buffer of 2^40 bytes": (b"\x96" + struct.pack("<Q", 2**40), "a buffer"),
    "bytes of a codec": (b"c_codecs\nencode\n(X\x01\x00\x00\x00aX\x03\x00\x00\x00ziptR", "bytes of the codec 'zip'"),
    "the same bytes again and again": (
        b"c_codecs\nencode\nq\x00(X\xe8\x03\x00\x00"
        + b"a" * 1000
        + b"X\x06\x00\x00\x00latin1tq\x01]("
        + b"h\x00h\x01R" * 100
        + b"e",
        "more elements than the file has room for",
    ),
    "the same set again and again": (
        b"c__builtin__\nset\nq\x00](" + b"K\x01" * 1000 + b"e\x85q\x01](" + b"h\x00h\x01R" * 100 + b"e",
        "more elements than the file has room for",
    ),
    "no storage": (b"X\x01\x00\x00\x00aQ", "a reference that is no storage"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_small_pickle_that_would_take_all_time_or_memory_is_refused(name):
    code, message = HOSTILE[name]
    with pytest.raises((*DAMAGED,), match=message):
        read(zipped({"d/data.pkl": b"\x80\x02" + code + b"."}))


def test_a_storage_of_booleans_is_copied_once():
    content = saved([torch.ones(4, dtype=torch.bool)] * 2)
    members = archive.read_layout(io.BytesIO(content), len(content))
    reader = archive.ArchiveUnpickler(io.BytesIO(content), len(content), members)
    first, second = (reader.persistent_load(("storage", archive.StorageKind(torch.bool), "0", "cpu", 4)) for _ in range(2))
    assert first.elements.data_ptr() == second.elements.data_ptr()


def test_an_object_of_many_keys_names_the_one_that_stands_twice():
    """300,000 keys: a search that counts each among all others takes hours."""
    keys = ",".join(f'"{number}":0' for number in range(300_000))
    with pytest.raises(ValueError, match="the key 'z' stands twice in one object"):
        parse_json(f'{{{keys},"z":1,"z":2}}')


def test_a_tree_is_bounded_by_what_it_would_print():
    shared = [1, 2]
    check_tree([shared, shared], most_values=6)
    with pytest.raises(ValueError, match="more than 5 values"):
        check_tree([shared, shared], most_values=5)
    with pytest.raises(ValueError, match="more than 2 levels"):
        check_tree({"a": ([],)}, most_values=99, most_depth=2)


# YAML: pyyaml raises errors of ten kinds, and a few hundred bytes may stand for 9^9 values

BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join(['*' + before] * 9)}]\n" for before, name in pairwise("abcdefghi")
)
MERGES = "a: &a {k1: 1, k2: 2}\n" + "".join(
    f"{name}: &{name} {{<<: [{','.join(['*' + before] * 9)}]}}\n" for before, name in pairwise("abcdefghi")
)
HOSTILE_YAML = {
    "a tag of Python": ("a: !!python/object/apply:os.mkdir [was_run]", "could not determine a constructor"),
    "a name of Python": ("a: !!python/name:os.system", "could not determine a constructor"),
    "a date that is none": ("a: 2020-13-45", "month must be in 1..12"),
    "no number": ("a: !!int x", "invalid literal for int"),
    "no float": ("a: !!float 8k", "could not convert string to float"),
    "no time": ("a: !!timestamp x", "."),
    "no switch": ("a: !!bool x", "'x'"),
    "5000 digits": ("a: " + "9" * 5000, "a value of 5000 characters that is no text"),
    "base 60": ("a: " + "1:" * 3000 + "1", "a value of 6001 characters"),
    "aliases of aliases": (BOMB, "more than 100000 values, each counted wherever it stands"),
    "many aliases": ("a: &a 1\nb: [" + "*a," * 300 + "]", "more than 256 aliases"),
    "a list in itself": ("a: &a [*a]", "contains itself"),
    "deep": ("a: " + "[" * 900 + "]" * 900, "nested too deeply: more than 64 levels"),
    "deep and open": ("a: " + "{a: [" * 50_000, "nested too deeply"),
    "two documents": ("a: 1\n---\nb: 2", "expected a single document"),
    "a list as a key": ("[1, 2]: 1", "found unhashable key"),
    "a long file": ("a" * 300_000, "has 300000 characters: at most 262144 are read"),
    "an escape": ("a: \x1b[31m", "special characters are not allowed"),
}


def test_merges_of_merges_are_a_named_error_or_two_keys():
    """PyYAML before 6.0.4 writes 9^8 pairs for them; later releases merge a key once."""
    try:
        found = parse_yaml(MERGES, "c.yaml")
    except ConfigError as error:
        assert "a mapping of more than 10000 keys" in str(error)
    else:
        assert all(value == {"k1": 1, "k2": 2} for value in found.values()) and list(found) == list("abcdefghi")


@pytest.mark.parametrize("name", HOSTILE_YAML)
def test_hostile_yaml_is_a_named_error(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text, message = HOSTILE_YAML[name]
    with pytest.raises(ConfigError, match="^c.yaml ") as refused:
        parse_yaml(text, "c.yaml")
    assert re.search(message, str(refused.value)) and str(refused.value).isprintable(), refused.value
    assert not Path("was_run").exists()


def test_yaml_of_a_launch_is_read_with_its_anchors():
    text = "base: &base {a: 1, b: [x, y]}\nother:\n  <<: *base\n  a: 2.5e-1\ndate: 2020-01-02\nnone: null\n"
    assert parse_yaml(text, "c.yaml")["other"] == {"a": 0.25, "b": ["x", "y"]}
