"""`megatron-rl train`: learning-rate schedules, evaluation on prompts of their own, and Weights & Biases."""

from __future__ import annotations

import json
import math
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
from test_train_command import Command
from test_train_options import ROLLOUT, options_of, write_prompts

from megatron_rl.errors import ConfigError, DataError
from megatron_rl.train.tasks import make_task
from megatron_rl.train.writers import MetricsWriter

pytestmark = pytest.mark.megatron

SMALL = "--prompts-per-rollout 4 --samples-per-prompt 4 --hidden-size 32 --no-tensorboard --steps-per-rollout 2"


def share_of_digits(prompt, response, record):
    return sum(character.isdigit() for character in response) / 16


def trained(tmp_path, flags, num_ranks=1) -> list[dict]:
    """The rows of metrics.jsonl."""
    command = Command(f"{flags} {SMALL} --output-dir {tmp_path / 'run'}", tmp_path, num_ranks)
    assert command.wait() == [0] * num_ranks, command.output()
    return [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        pytest.param("--lr 0.01", [0.01] * 6, id="constant"),
        pytest.param("--lr 0.01 --lr-warmup-iters 4", [0.0025, 0.005, 0.0075, 0.01, 0.01, 0.01], id="warm-up"),
        pytest.param(
            "--lr 0.01 --lr-warmup-iters 2 --lr-decay-style linear --min-lr 0.002",
            [0.005, 0.01, 0.008, 0.006, 0.004, 0.002],  # to the last of 6 steps
            id="linear",
        ),
        pytest.param(
            "--lr 0.01 --lr-decay-style cosine",
            [0.005 * (1 + math.cos(math.pi * step / 6)) for step in range(1, 7)],
            id="cosine",
        ),
    ],
)
def test_the_learning_rate_of_each_step(tmp_path, flags, expected):
    rows = trained(tmp_path, f"--task repeat --num-rollouts 3 {flags}")
    assert [row["learning_rate"] for row in rows] == pytest.approx(expected, abs=1e-9)


def test_evaluation_is_the_same_on_each_layout_and_comes_every_n_rollouts(tmp_path):
    own, other = (
        write_prompts(tmp_path / "own.jsonl", "1+2=", "3+4="),
        write_prompts(tmp_path / "other.jsonl", "2+2=", "4+13=", "1="),
    )
    flags = (
        f"--prompts {own} --eval-prompts {other} --save-interval 2 --reward test_train_schedule.share_of_digits --num-rollouts 3"
    )
    found = []
    for name, layout, num_ranks in (("one", "", 1), ("two", "--tensor-model-parallel-size 2", 2), ("data", "", 2)):
        (tmp_path / name).mkdir()
        found.append(trained(tmp_path / name, f"{flags} {layout}", num_ranks))
    for rows in found:
        assert ["eval/reward" in row for row in rows] == [True, True, False, False, True, True]  # two steps a rollout
        assert 0 < rows[0]["eval/reward"] <= 1 and 0 < rows[0]["eval/response_length"] <= 16
        for name in ("eval/reward", "eval/response_length"):
            assert rows[0][name] == rows[1][name] == found[0][0][name]
    assert rows[0]["eval/reward"] == pytest.approx(round(rows[0]["eval/reward"] * 48) / 48)  # of three prompts, 16 tokens each


def test_prompts_of_an_evaluation_that_do_not_fit_are_refused(tmp_path):
    own = write_prompts(tmp_path / "own.jsonl", "1+2=")
    task = make_task(prompts=own, reward="test_train_schedule.share_of_digits")
    with pytest.raises(DataError, match="has no 'ab'"):
        task.with_prompts_of(write_prompts(tmp_path / "a.jsonl", "a1b"))
    with pytest.raises(DataError, match="line 1: prompt: must be text, "):
        task.with_prompts_of(write_prompts(tmp_path / "b.jsonl", [1, 2]))
    ids = make_task(prompts=write_prompts(tmp_path / "c.jsonl", [1, 2]), reward="test_train_schedule.share_of_digits")
    with pytest.raises(DataError, match="token 7 is not below 3, the vocabulary"):
        ids.with_prompts_of(write_prompts(tmp_path / "d.jsonl", [7]))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--lr-decay-style linear --docs-per-step 16", "--lr-decay-style linear has no effect with --docs-per-step"),
        ("--lr-decay-style linear --rollouts a.jsonl", "--lr-decay-style linear needs --num-rollouts"),
        ("--lr-warmup-iters -1", "--lr-warmup-iters -1 must be at least 0"),
    ],
)
def test_a_decay_whose_end_is_not_known_is_refused(tmp_path, monkeypatch, line, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text(ROLLOUT)
    with pytest.raises(ConfigError) as refused:
        options_of(line)
    assert message in str(refused.value)


def test_weights_and_biases_listens_to_the_events_of_the_run_and_gets_its_settings(monkeypatch, tmp_path):
    """What is written before wandb.init is not sent."""
    pytest.importorskip("tensorboard", reason="needs tensorboard: pip install tensorboard")
    run = mock.Mock(spec=["finish"])

    def init(**given):
        assert given == {"project": "p", "config": {"--lr": 0.1}, "dir": tmp_path, "sync_tensorboard": True}
        assert not (tmp_path / "tensorboard").exists()
        return run

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    with MetricsWriter(tmp_path, 0, tensorboard=True, wandb={"project": "p", "config": {"--lr": 0.1}}) as writer:
        writer.write(1, {"loss": 0.5})
        assert (tmp_path / "tensorboard").exists() and not run.finish.called
    run.finish.assert_called_once_with()
