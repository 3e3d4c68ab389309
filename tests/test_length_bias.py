"""examples/length_bias.py at a reduced size: what the picture in docs/aggregation.md claims holds for every seed that is tried."""

from __future__ import annotations

import importlib.util
import sys

import pytest
from helpers import ROOT

SCRIPT = ROOT / "examples" / "length_bias.py"
WRONG, RIGHT, SHARE_OF_SHORT = range(3)


@pytest.fixture(scope="module")
def example():
    specification = importlib.util.spec_from_file_location("length_bias", SCRIPT)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def curves(example):
    return {name: [example.train(name, seed, steps=40) for seed in (0, 1)] for name in example.AGGREGATIONS}


def test_sample_mean_lengthens_wrong_answers_and_shortens_right_ones_and_prompt_mean_less(curves):
    """Dr. GRPO's claim, where the reward does not depend on the length. The noise of 40 steps is 2 %."""
    for run, less in zip(curves["sample_mean"], curves["prompt_mean"], strict=True):
        assert run[-1, WRONG] > 2.0 and run[-1, RIGHT] < 0.5
        assert 1.05 < less[-1, WRONG] < 0.6 * run[-1, WRONG] and run[-1, RIGHT] < less[-1, RIGHT] < 0.97
    for run in curves["constant"] + curves["token_mean"]:
        assert run[-1, [WRONG, RIGHT]].tolist() == pytest.approx([1.0, 1.0], abs=0.05)


def test_prompts_of_long_answers_take_the_weight_where_tokens_count_alike(curves):
    """Answers of 4 and 16 tokens in the mean: 4 / 20 of the tokens are those of the short prompts, give or take a step's luck."""
    for name, share, tolerance in (
        *(("sample_mean", 0.5, 1e-6), ("prompt_mean", 0.5, 1e-6)),
        *(("token_mean", 0.2, 0.02), ("constant", 0.2, 0.02)),
    ):
        means = [float(run[:, SHARE_OF_SHORT].mean()) for run in curves[name]]
        assert sum(means) / len(means) == pytest.approx(share, abs=tolerance), name


def test_the_command_prints_a_row_for_each_aggregation_and_draws(example, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib")
    monkeypatch.setattr(example, "STEPS", 3)
    monkeypatch.setattr(example, "SEEDS", 1)
    monkeypatch.setattr(example, "train", lambda name, seed, train=example.train: train(name, seed, steps=3))
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), str(tmp_path / "bias.png")])
    example.main()
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [*example.AGGREGATIONS]
    assert (tmp_path / "bias.png").read_bytes().startswith(b"\x89PNG")
