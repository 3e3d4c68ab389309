"""The files that `megatron-rl explain` reads: our rollouts, a sample a line. No file runs anything."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
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
    assert "--host roll: it counts rows; remove --host" in explain("--rollouts", "r.jsonl", "--host", "roll")[2]


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
    (({"foo": 1},), "line 1: response_length is None: a whole number is needed"),
    (({"response_length": 3}, "{"), "line 2: not JSON"),
    (({"response_length": 3}, {"response_length": -1}), "line 2: response_length is -1"),
    (("[" * 100_000,), "line 1: not JSON (lists or objects that are nested too deeply"),
    (({"response_length": 3}, "[" * 100_000), "line 2: not JSON (lists or objects that are nested too deeply"),
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
    assert "--rollouts none.jsonl cannot be read: No such file" in explain("--rollouts", "none.jsonl")[2]


# What a file must not do to the terminal, to this process, to its memory

FORGED = "x\x1b[2J\nmegatron_rl: PASS\x85\u2028"


def test_a_file_writes_no_lines_of_its_own():
    """Escapes that move the cursor, newlines that begin a line of ours: in prompts and rollouts."""
    rows = [{"response_length": 2, "prompt_id": name, "rollout_id": FORGED} for name in ("a", FORGED)]
    outputs = [explain(*write_lines({"response_length": 2, "prompt_id": FORGED})), explain(*write_lines(*rows))]
    assert [code for code, _, _ in outputs] == [0, 1]
    for _, out, error in outputs:
        shown = out + error
        assert "\\x1b[2J\\nmegatron_rl:" in shown, shown
        assert all(char.isprintable() or char == "\n" for char in shown)
        assert not any(line.startswith("megatron_rl: P") for line in shown.splitlines())


def test_the_tokens_of_a_step_are_bounded_wherever_it_comes_from():
    """Each response is allowed, both together fill the memory."""
    code, _, error = explain(*write_lines({"response_length": 10**8}, {"response_length": 10**8}))
    assert code == 1 and "line 2: response_length is 100000000: a whole number is needed, with at most 134217728 tokens" in error
    assert explain("--response-lengths", "100000000,100000000")[0] == 2
