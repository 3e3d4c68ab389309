"""The files that `megatron-rl explain` reads: our rollouts, a sample a line, dumps of hosts. No file runs anything."""

from __future__ import annotations

import json
import os
import pickle
import random
import zipfile
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from explain_cases import CLOSE, explain, explain_json
from test_rollouts import make_sample

from megatron_rl.train.rollout_files import save_rollouts
from megatron_rl.train.rollouts import RolloutBatch


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def rollout(index: int, lengths: list[int]) -> RolloutBatch:
    samples = []
    for number, length in enumerate(lengths):
        response = {"tokens": [1] * (length + 2), "response_length": length, "loss_mask": [1] * (length - 1) + [0]}
        samples.append(make_sample(number, f"p{number // 2}", old_log_probs=None, **response))
    return RolloutBatch(samples=samples, rollout_index=index)


def test_a_rollout_of_our_file():
    for index, lengths in ((0, [3, 5, 4]), (1, [2, 2])):
        save_rollouts("r.jsonl", rollout(index, lengths))
    found = explain_json("--rollouts", "r.jsonl")
    assert (found["prompt_ids"], found["token_counts"]) == (["p0", "p0", "p1"], [2, 4, 3])
    assert found["left_out"][0].startswith("1 other rollouts of the file")
    assert explain_json("--rollouts", "r.jsonl", "--rollout-index", "1")["token_counts"] == [1, 1]
    assert "holds the rollouts 0 to 1" in explain("--rollouts", "r.jsonl", "--rollout-index", "7")[2]


def test_the_rollouts_of_our_file_count_once():
    """Tokens 2, 4 of rollout A and 3 of B: N = 2, M_A = 6."""
    whole = rollout(0, [3, 5, 4])
    samples = [replace(sample, rollout_id="AAB"[n], prompt_id="p") for n, sample in enumerate(whole.samples)]
    save_rollouts("r.jsonl", replace(whole, samples=samples))
    found = explain_json("--rollouts", "r.jsonl", "--loss-aggregation", "sample_mean")
    assert (found["num_rollouts"], found["rollout_ids"]) == (2, ["A", "A", "B"])
    assert found["aggregations"]["sample_mean"]["token_weights"] == pytest.approx([1 / 12, 1 / 12, 1 / 6], **CLOSE)
    assert "--host roll counts rows by its own rule: leave --host out" in explain("--rollouts", "r.jsonl", "--host", "roll")[2]


def test_what_the_sampler_kept_and_what_the_mistake_would_be():
    """Unmasked sets of 1, 3, 1 and 1 ids and masses 0.5, 0.8, 0.9 and 0.2; the longest sample's product is 0.4."""
    kept, masses = [[[1], [1, 5, 7], [1] * 9], [[1], [1]]], [[0.5, 0.8, 0.01], [0.9, 0.2]]
    samples = [
        make_sample(n, "p", tokens=[1] * 5, response_length=len(sets), loss_mask=[1, 1, 0][: len(sets)], kept_ids=sets)
        for n, sets in enumerate(kept)
    ]
    samples = [replace(sample, old_log_probs=None) for sample in samples]
    save_rollouts("bare.jsonl", RolloutBatch(samples=samples, rollout_index=0))
    samples = [replace(sample, kept_mass=torch.tensor(row)) for sample, row in zip(samples, masses, strict=True)]
    save_rollouts("r.jsonl", RolloutBatch(samples=samples, rollout_index=0))
    text = "kept ids: 1.5 a token; 75% of the tokens have one, score 0 and no gradient"
    off = "; kept mass 0.6: over the whole vocabulary each ratio would be off by it, the product over 2 tokens by 0.4"
    lines = [explain("--rollouts", name, "--loss-aggregation", "sample_mean")[1].splitlines() for name in ("bare.jsonl", "r.jsonl")]
    assert text in lines[0] and text + off in lines[1]
    bare, found = (explain_json("--rollouts", name)["kept_ids"] for name in ("bare.jsonl", "r.jsonl"))
    assert bare == {"mean_size": 1.5, "single_fraction": 0.75, "mean_mass": None, "longest_sample": None, "mass_product": None}
    assert found == bare | {"mean_mass": pytest.approx(0.6), "longest_sample": 2, "mass_product": pytest.approx(0.4)}


def write_lines(*lines: object) -> list[str]:
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    Path("lines.jsonl").write_text("\n".join(text) + "\n\n", encoding="utf-8")
    return ["--rollouts", "lines.jsonl"]


def test_a_sample_a_line():
    flags = write_lines({"response_length": 3, "prompt_id": "a"}, {"loss_mask": [1, 0, 1, 1, 0], "prompt_id": "b", "reward": 1.0})
    found = explain_json(*flags)
    assert (found["response_lengths"], found["token_counts"]) == ([3, 5], [3, 3])
    assert (found["prompt_ids"], found["rollout_ids"]) == (["a", "b"], None)
    found = explain_json(*write_lines({"response_length": 3, "rollout_id": 0}, {"response_length": 5, "rollout_id": 0}))
    assert (found["prompt_ids"], found["rollout_ids"], found["num_rollouts"]) == (None, [0, 0], 1)


BAD_LINES = [
    (({"foo": 1},), "line 1: response_length is None: a whole number of 0 to"),
    (({"response_length": 3}, "{"), "line 2: not JSON"),
    (({"response_length": 3}, {"response_length": -1}), "line 2: response_length is -1"),
    (("[" * 100_000,), "line 1: lists or objects that are nested too deeply"),
    (({"response_length": 3}, "[" * 100_000), "line 2: lists or objects that are nested too deeply"),
    (({"response_length": 3}, [1]), "line 2: list in the place of a dict"),
    (({"response_length": 3, "loss_mask": [1]},), "line 1: a loss_mask of 1 for a response_length of 3"),
    (({"response_length": 3, "prompt_id": "a"}, {"response_length": 3}), "line 2 has no prompt_id and others have"),
    (({"response_length": 3, "prompt_id": [1]},), "line 1: prompt_id is [1]: a whole number or text is needed"),
    (
        ({"response_length": 3, "prompt_id": "a", "rollout_id": 0}, {"response_length": 3, "prompt_id": "b", "rollout_id": 0}),
        "rollout 0 has samples of the prompts a and b",
    ),
]


@pytest.mark.parametrize(("lines", "says"), BAD_LINES, ids=lambda value: value[:40] if isinstance(value, str) else "")
def test_a_bad_line_is_named(lines, says):
    code, out, error = explain(*write_lines(*lines))
    assert (code, out) == (1, "")
    assert "--rollouts lines.jsonl" in error
    assert says in error


def test_a_missing_file_is_named_with_its_flag():
    assert "--rollouts none.jsonl: there is no such rollout file" in explain("--rollouts", "none.jsonl")[2]


def dumped(**fields) -> dict:
    """As Sample.to_dict() of a host, of which a hook reads some."""
    ours = {"group_index": 0, "index": 0, "response_length": 3, "loss_mask": None, "remove_sample": False, "reward": 1.0}
    return {**ours, "prompt": "text", "status": "completed", "metadata": {"k": [1]}, **fields}


DUMP = [
    dumped(index=0),
    dumped(index=1, loss_mask=[1, 0, 1]),
    dumped(index=2, group_index=1, remove_sample=True),
    dumped(index=3, group_index=1, response_length=2, tokens=torch.arange(4)),
]


@pytest.mark.parametrize("host", ["miles", "slime"])
@pytest.mark.parametrize("content", [{"rollout_id": 4, "samples": DUMP, "metadata": {}}, DUMP], ids=["dict", "list"])
def test_a_dump_of_a_host(content, host):
    """Masks as training will see them: none is all ones, a removed sample is fully masked."""
    torch.save(content, "4.pt")
    found = explain_json("--rollout-dump", "4.pt", "--host", host)
    assert (found["prompt_ids"], found["token_counts"]) == ([0, 0, 1, 1], [3, 2, 0, 2])
    assert found["aggregations"]["sample_mean"]["token_weights"] == pytest.approx([1 / 12, 1 / 8, 0, 1 / 8], **CLOSE)
    assert found["left_out"][0].startswith("steps: the file is taken as one step")


@pytest.mark.parametrize("host", ["miles", "slime"])
def test_a_dump_whose_rollouts_have_several_samples_is_counted_in_rollouts(host):
    """A compact fan-out: 3 and 5 tokens of rollout 9, and one of 2. N = 2, M_roll = 8."""
    torch.save(
        [dumped(rollout_id=9), dumped(rollout_id=9, response_length=5), dumped(index=1, rollout_id=3, response_length=2)], "d.pt"
    )
    found = explain_json("--rollout-dump", "d.pt", "--host", host, "--route", "custom_loss")
    assert (found["num_samples"], found["num_rollouts"], found["rollout_ids"]) == (3, 2, [9, 9, 3])
    assert found["aggregations"]["sample_mean"]["token_weights"] == pytest.approx([1 / 16, 1 / 16, 1 / 4], **CLOSE)


@pytest.mark.parametrize(("host", "num_rollouts"), [("miles", 2), ("slime", 3)])
def test_a_missing_rollout_id_is_read_as_the_host_reads_it(host, num_rollouts):
    """miles takes the index, slime a fresh number. JSON has names for both."""
    torch.save([dumped(index=0), dumped(index=0), dumped(index=1)], "d.pt")
    assert explain_json("--rollout-dump", "d.pt", "--host", host, "--route", "custom_loss")["num_rollouts"] == num_rollouts
    torch.save([dumped(index=0), dumped(index=1, rollout_id=5), dumped(index=2, rollout_id=5)], "d.pt")
    found = explain_json("--rollout-dump", "d.pt", "--host", "slime", "--route", "custom_loss")
    assert found["rollout_ids"] == ["of sample 0", 5, 5]


class RunsCode:
    def __reduce__(self):
        return os.mkdir, ("was_run",)


@dataclass
class Adapter:
    name: str


class Odd:
    """A state that is no dict, as objects of C have."""

    def __reduce__(self):
        return Odd, (), 7


def test_an_object_of_a_dump_is_left_out_by_name_and_not_run(tmp_path):
    """A dump is somebody's file: what it would run when unpickled is not run, and the rest is read."""
    metadata = {"adapter": Adapter("a"), "code": RunsCode(), "odd": Odd(), "set": {1}}
    torch.save({"samples": [dumped(metadata=metadata), dumped(index=1)]}, "d.pt")
    found = explain_json("--rollout-dump", "d.pt")
    assert found["token_counts"] == [3, 3]
    (line,) = [line for line in found["left_out"] if line.startswith("objects of the file")]
    assert f"{Adapter.__module__}.Adapter" in line
    assert f"{os.mkdir.__module__}.mkdir" in line
    assert "set" not in line
    assert not (tmp_path / "was_run").exists()


BAD_DUMPS = [
    ({"rollout_data": {}}, 'holds a dict with the keys rollout_data: a list of samples is needed, or a dict with one at "samples"'),
    ([], "holds list: a list of samples is needed"),
    (RunsCode(), "holds StandIn: a list of samples is needed"),
    ([[1, 2]], "sample 0: list in the place of a dict"),
    ([{"tokens": [1]}], "response_length is None"),
    ([dumped(response_length=10**12)], "response_length is 1000000000000: a whole number of 0 to"),
    ([dumped(loss_mask=[1, 2, 1])], "loss_mask must be a list of 0 and 1"),
    ([dumped(loss_mask="110")], "loss_mask must be a list of 0 and 1"),
    ([dumped(loss_mask=RunsCode())], "loss_mask must be a list of 0 and 1"),
    ([dumped(loss_mask=[[1, 1, 1]])], "loss_mask must be a list of 0 and 1"),
    ([dumped(loss_mask=[1])], "a loss_mask of 1 for a response_length of 3"),
    ([dumped(loss_mask=[1])] * 5, "; and 2 more"),
    ([dumped(group_index=[1])], "group_index is [1]: a whole number or text is needed"),
    ([dumped(), dumped(group_index=None)], "1 of 2 samples have no group_index"),
    # What would fill the memory: long responses, masks and lengths of stride 0.
    ([dumped(response_length=10**8) for _ in range(50)], "DataError: --rollout-dump d.pt"),
    ([dumped(response_length=2, loss_mask=torch.ones(1).expand(2**40))], "DataError: --rollout-dump d.pt"),
    ([dumped(response_length=2, loss_mask=torch.ones(1).expand(2**20, 2**20))], "DataError: --rollout-dump d.pt"),
    ([dumped(response_length=torch.ones(1).expand(2**40))], "DataError: --rollout-dump d.pt"),
]


@pytest.mark.parametrize(("content", "says"), BAD_DUMPS, ids=lambda value: value[:40] if isinstance(value, str) else "")
def test_a_dump_that_cannot_be_read_is_refused_by_name(tmp_path, content, says):
    torch.save(content, "d.pt")
    code, out, error = explain("--rollout-dump", "d.pt")
    assert (code, out) == (1, "")
    assert says in error
    assert not (tmp_path / "was_run").exists()


@pytest.mark.parametrize("seed", range(4))
def test_a_damaged_dump_is_read_or_refused(seed):
    """Bytes overwritten at random, a tensor and compact rollouts among them: never another error, never a hang."""
    torch.save({"samples": [*DUMP, dumped(rollout_id=3, loss_mask=torch.tensor([1, 0, 1]))]}, "whole.pt")
    whole = Path("whole.pt").read_bytes()
    generator = random.Random(seed)
    for _ in range(25):
        content = bytearray(whole)
        for _ in range(generator.choice([1, 3])):
            content[generator.randrange(len(content))] = generator.randrange(256)
        Path("d.pt").write_bytes(content)
        code, out, error = explain("--rollout-dump", "d.pt", "--loss-aggregation", "sample_mean")
        assert (code == 0 and out) or (code in (1, 2) and "Error" in error)


def damaged_archive() -> bytes:
    """The pickle of the archive is overwritten; the archive itself is whole."""
    torch.save(DUMP, "whole.pt")
    return Path("whole.pt").read_bytes().replace(b"group_index", b"group\x00inde\xff", 1)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (lambda: b"text", "ValueError: no archive"),
        (lambda: pickle.dumps([1]), "ValueError: no archive"),
        (lambda: b"", "ValueError: no archive"),
        (damaged_archive, "ValueError: the checksum of data.pkl differs"),
    ],
    ids=["text", "pickle", "empty", "damaged"],
)
def test_a_file_of_another_kind_is_no_dump(content, says):
    Path("d.pt").write_bytes(content())
    code, _, error = explain("--rollout-dump", "d.pt")
    assert code == 1
    assert f"--rollout-dump d.pt is damaged, or not of this kind: {says}" in error


@pytest.mark.parametrize("members", [("constants.pkl", "data.pkl"), ("notes.txt",)], ids=["TorchScript", "no data"])
def test_an_archive_that_torch_would_not_read_as_data_is_refused(members):
    with zipfile.ZipFile("d.pt", "w") as archive:
        for member in members:
            archive.writestr(f"d/{member}", b"")
    assert "ValueError: an archive of another kind than torch.save's" in explain("--rollout-dump", "d.pt")[2]


# What a file must not do to the terminal, to this process, to its memory

FORGED = "x\x1b[2J\nmegatron_rl: PASS\x85\u2028"


def pickled_archive(code: bytes) -> None:
    with zipfile.ZipFile("d.pt", "w") as archive:
        for name, content in (("data.pkl", code), ("byteorder", b"little"), ("version", b"3\n")):
            archive.writestr(f"d/{name}", content)


def unicode_of(text: str) -> bytes:
    data = text.encode()
    return b"X" + len(data).to_bytes(4, "little") + data


def test_a_file_writes_no_lines_of_its_own():
    """Escapes that move the cursor, newlines that begin a line of ours: in keys, names of objects and prompts."""
    torch.save({FORGED: 1}, "d.pt")
    outputs = [explain("--rollout-dump", "d.pt")]
    samples = pickle.dumps([dumped(group_index=FORGED), dumped(group_index="b")], protocol=2)[2:-1]
    names = unicode_of("module") + unicode_of(FORGED)
    pickled_archive(b"\x80\x04}(" + unicode_of("samples") + samples + unicode_of("more") + names + b"\x93u.")
    outputs.append(explain("--rollout-dump", "d.pt"))
    outputs.append(explain(*write_lines({"response_length": 2, "prompt_id": FORGED})))
    rows = [{"response_length": 2, "prompt_id": name, "rollout_id": FORGED} for name in ("a", FORGED)]
    outputs.append(explain(*write_lines(*rows)))
    assert [code for code, _, _ in outputs] == [1, 0, 0, 1]
    for _, out, error in outputs:
        shown = out + error
        assert "\\x1b[2J\\nmegatron_rl:" in shown, shown
        assert all(char.isprintable() or char == "\n" for char in shown)
        assert not any(line.startswith("megatron_rl: P") for line in shown.splitlines())
    assert "objects of the file that are neither numbers, text, lists nor tensors: module.x\\x1b" in outputs[1][1]


@pytest.mark.parametrize(
    ("module", "name"), [("torch._utils", "_rebuild_tensor_v2"), ("collections", "OrderedDict"), ("torch", "Size")]
)
def test_a_dump_sets_no_attribute_of_what_it_asks_for(module, name):
    """BUILD with a pair of states sets attributes: of a function of torch it would change this process."""
    code = f"\x80\x02c{module}\n{name}\n(N}}X\x06\x00\x00\x00markerK\x01stb.".encode("latin-1")
    pickled_archive(code)
    code, _, error = explain("--rollout-dump", "d.pt")
    assert code == 1 and "it sets attributes of" in error
    assert not hasattr(getattr(import_module(module), name), "marker")


def test_a_small_file_that_unpacks_to_gigabytes_is_refused():
    """torch.save compresses nothing, and no byte of its archives is there twice."""
    with zipfile.ZipFile("d.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("d/data.pkl", b"\x80\x02" + b"N0" * 50_000 + b"].")
    code, _, error = explain("--rollout-dump", "d.pt")
    assert code == 1 and "d/data.pkl is compressed or encrypted, and torch.save stores its members as they are" in error


def test_the_tokens_of_a_step_are_bounded_wherever_it_comes_from():
    """Each response is allowed, all of them together fill the memory."""
    code, _, error = explain(*write_lines(*[{"response_length": 10**8} for _ in range(50)]))
    assert code == 1 and "5000000000 response tokens in one step: at most 134217728" in error
    code, _, error = explain("--response-lengths", ",".join(["100000000"] * 50))
    assert code == 2 and "5000000000 response tokens in one step: at most 134217728" in error
