"""examples/length_bias.py at a reduced size: what the picture in docs/aggregation.md claims holds for every seed that is tried."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest
import torch
from conftest import ROOT

from megatron_rl.loss_hub import loss_aggregation_names

SCRIPT = ROOT / "examples" / "length_bias.py"
STEPS, SEEDS = 40, (0, 1)


@pytest.fixture(scope="module")
def example() -> ModuleType:
    specification = importlib.util.spec_from_file_location("length_bias", SCRIPT)
    module = importlib.util.module_from_spec(specification)
    sys.modules["length_bias"] = module  # dataclasses look their module up
    specification.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def curves(example, shared):
    names = ("sample_mean", "prompt_mean", "token_mean", "constant")  # the picture's
    return shared("test_length_bias", lambda: {name: [example.train(name, seed, steps=STEPS) for seed in SEEDS] for name in names})


def test_sample_mean_lengthens_wrong_answers_and_shortens_right_ones_and_prompt_mean_less(curves):
    """Dr. GRPO's claim, where the reward does not depend on the length. The noise of 40 steps is 2 %."""
    for run, less in zip(curves["sample_mean"], curves["prompt_mean"], strict=True):
        assert run.wrong[-1] > 2.0 and run.right[-1] < 0.5
        assert 1.05 < less.wrong[-1] < 0.6 * run.wrong[-1] and run.right[-1] < less.right[-1] < 0.97
    for run in curves["constant"] + curves["token_mean"]:
        assert (run.wrong[-1], run.right[-1]) == pytest.approx((1.0, 1.0), abs=0.05)


def test_prompts_of_long_answers_take_the_weight_where_tokens_count_alike(curves):
    """Answers of 4 and 16 tokens in the mean: 4 / 20 of the tokens are those of the short prompts, give or take a step's luck."""
    for name in ("sample_mean", "prompt_mean"):
        assert all(share == pytest.approx(0.5, abs=1e-6) for run in curves[name] for share in run.share_of_short)
    for name in ("token_mean", "constant"):
        shares = torch.tensor([run.share_of_short for run in curves[name]])
        assert float(shares.mean()) == pytest.approx(0.2, abs=0.02)


def test_the_command_prints_a_row_for_each_aggregation_and_draws(example, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--steps", "3", "--seeds", "1", "--plot", "bias.png"])
    example.main()
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]
    assert names == example.AGGREGATIONS == [name for name in loss_aggregation_names() if name != "row_mean"]
    assert (tmp_path / "bias.png").read_bytes().startswith(b"\x89PNG")
