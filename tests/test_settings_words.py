"""`megatron-rl train --settings FILE`: what a file says is what its flags would say, and a typed flag wins."""

from __future__ import annotations

import json

import pytest

from megatron_rl.__main__ import main
from megatron_rl.commands.settings_words import with_settings_file
from megatron_rl.errors import ConfigError


@pytest.fixture
def file(tmp_path):
    def write(text: str, suffix: str = "yaml") -> str:
        path = tmp_path / f"run.{suffix}"
        path.write_text(text)
        return str(path)

    return write


@pytest.mark.parametrize("suffix", ["yaml", "toml", "json"])
def test_a_file_is_its_flags_and_what_is_typed_comes_after_them(file, suffix):
    values = {"preset": "demo", "policy-loss": "grpo", "lr": 0.002, "plot": False, "packed": True, "fp32_lm_head": False}
    lines = {
        "yaml": "".join(f"{name}: {json.dumps(value)}\n" for name, value in values.items()) + "max_seconds: null\n",
        "toml": "".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items()),
        "json": json.dumps(values | {"max_seconds": None}),
    }
    path = file(lines[suffix], suffix)
    words = ["--preset=demo", "--policy-loss=grpo", "--lr=0.002", "--no-plot", "--packed"]
    assert with_settings_file(["--lr", "1", "--settings", path, "--json"]) == [*words, "--lr", "1", "--json"]
    assert with_settings_file([f"--settings={path}"]) == words
    assert with_settings_file(["--lr", "1"]) == ["--lr", "1"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model:\n  lr: 1\n", "model is a mapping: write one line for each flag"),
        ("lr: [1, 2]\n", "lr is a list: write one line for each flag"),
        ("settings: other.yaml\n", "names no other file"),
        ("[1]\n", "it must be key: value lines"),
    ],
)
def test_a_value_that_no_flag_has_is_refused(file, text, said):
    with pytest.raises(ConfigError, match=said):
        with_settings_file(["--settings", file(text)])


@pytest.mark.parametrize("words", [["--settings"], ["--settings", "--lr"], ["--settings="]])
def test_the_flag_needs_a_file(words):
    with pytest.raises(ConfigError, match="needs a file"):
        with_settings_file(words)


def test_one_file_has_the_settings(file):
    path = file("lr: 1\n")
    with pytest.raises(ConfigError, match="given 2 times"):
        with_settings_file(["--settings", path, "--settings", path])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("learning_rate: 1\n", "--learning-rate is no flag of megatron-rl train: did you mean --lr?"),
        ("lr: false\n", "argument --lr: invalid float value: 'false'"),
        ("policy_loss: gpso\n", "gpso"),
    ],
)
def test_the_flags_of_a_file_are_judged_as_typed_ones(file, text, said, capsys):
    try:
        code = main(["train", "--settings", file(text)])
    except SystemExit as error:  # argparse's own
        code = error.code
    assert code == 2 and said in capsys.readouterr().err


def test_a_missing_file_is_one_line(capsys):
    assert main(["train", "--settings", "nowhere.yaml"]) == 2
    assert "nowhere.yaml cannot be read: " in capsys.readouterr().err
