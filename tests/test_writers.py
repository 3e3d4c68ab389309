"""What a run leaves for people: the metrics file with its resume, TensorBoard, the curves, the progress display."""

from __future__ import annotations

import io
import math
import sys
from types import SimpleNamespace
from unittest import mock

import pytest

from megatron_rl.errors import DataError
from megatron_rl.train.plots import plot_curves
from megatron_rl.train.progress import describe, make_bar
from megatron_rl.train.writers import (
    CLIP_FRACTION,
    ENTROPY,
    KL,
    METRICS_FILE,
    REWARD,
    MetricsWriter,
    read_metrics,
)


def write_steps(output_dir, steps, resume_step=0) -> list[dict]:
    with MetricsWriter(output_dir, resume_step, tensorboard=False) as writer:
        for step in steps:
            writer.write(step, {REWARD: step / 10, KL: 1e-4 * step})
    return read_metrics(output_dir / METRICS_FILE)


def test_a_row_is_one_line_of_strict_json_that_is_on_disk_before_the_next_step(tmp_path):
    """Catches NaN, which not every JSON reader takes, and a buffer that a killed run loses."""
    with MetricsWriter(tmp_path / "deep" / "run", 0, tensorboard=False) as writer:
        writer.write(1, {"loss": 0.5, "count": 3, "worst": math.nan, "note": "x", "none": None, "best": -math.inf})
        (line,) = (tmp_path / "deep" / "run" / METRICS_FILE).read_text().splitlines()
    assert line == '{"step": 1, "loss": 0.5, "count": 3, "worst": null, "note": "x", "none": null, "best": null}'


def test_a_resumed_file_continues_exactly(tmp_path):
    """FB-90: rows past the checkpoint are written again, once. A new run starts an empty file, a lost one is begun again."""
    write_steps(tmp_path / "whole", range(1, 9))
    write_steps(tmp_path / "cut", range(1, 6))
    write_steps(tmp_path / "cut", range(4, 9), resume_step=3)
    whole, cut = ((tmp_path / name / METRICS_FILE).read_bytes() for name in ("whole", "cut"))
    assert cut == whole
    assert [row["step"] for row in write_steps(tmp_path / "cut", [1])] == [1]
    (tmp_path / "cut" / METRICS_FILE).unlink()
    assert [row["step"] for row in write_steps(tmp_path / "cut", [5], resume_step=4)] == [5]


@pytest.mark.parametrize("rest", ['{"step": 3, "los', '{"step": 3}', "\u00e9"])
def test_the_unfinished_line_of_a_killed_run_is_dropped_and_replaced(tmp_path, rest):
    """Catches a reader that fails on such a file, and a new row glued to half of an old one."""
    write_steps(tmp_path, [1, 2])
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write(rest)
    assert [row["step"] for row in read_metrics(tmp_path / METRICS_FILE)] == [1, 2]
    assert [row["step"] for row in write_steps(tmp_path, [3], resume_step=2)] == [1, 2, 3]
    (tmp_path / METRICS_FILE).write_text('{"step": 1}\n{\n{"step": 3}\n')
    with pytest.raises(DataError, match="line 2: not JSON"):  # in the middle it would be a gap in the curve
        read_metrics(tmp_path / METRICS_FILE)


def read_events(output_dir) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(output_dir / "tensorboard"), purge_orphaned_data=True)
    events.Reload()
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_tensorboard_holds_the_numbers_and_continues_after_a_resume(tmp_path):
    """FB-90: catches two branches after a resume, and events of an earlier run."""
    pytest.importorskip("tensorboard", reason="needs tensorboard: pip install tensorboard")
    for resume_step, steps in ((0, [1, 2]), (0, [1, 2, 3, 4]), (2, [3, 4])):
        with MetricsWriter(tmp_path, resume_step, tensorboard=True) as writer:
            for step in steps:
                writer.write(step, {"loss": step + resume_step * 10.0, "note": "text", "bad": math.nan})
    assert read_events(tmp_path) == {"loss": [(1, 1.0), (2, 2.0), (3, 23.0), (4, 24.0)]}


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


# The curves


def test_the_curves_are_the_numbers_of_the_rows_a_point_for_each_rollout(tmp_path, monkeypatch):
    """Two steps a rollout, clip fraction 0 and 0.2: one point at the last step, their mean 0.1, and no zigzag. Catches a metric in
    another's panel, a point of a row that was not finite, and a panel of a metric that was never measured."""
    figure = pytest.importorskip("matplotlib.figure", reason="needs matplotlib: pip install matplotlib")
    saved = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, *args, **rest: saved.append(self))
    rows = [
        {"step": step, "rollout": (step - 1) // 2, REWARD: 0.1 * ((step + 1) // 2), CLIP_FRACTION: 0.2 * (step % 2), KL: None}
        for step in range(1, 7)
    ]
    rows[3][ENTROPY] = 2.0
    plot_curves(rows, tmp_path / "curves.png", "a title")
    drawn = {panel.get_title(loc="left"): [line.get_xydata().T.tolist() for line in panel.lines] for panel in saved[0].axes}
    assert drawn == {
        "Mean reward": [[[2, 4, 6], [0.1, 0.2, pytest.approx(0.3)]]],
        "Fraction clipped, mean over a rollout's steps": [[[2, 4, 6], [0.1, 0.1, 0.1]]],
        "Entropy (nats)": [[[4], [2.0]]],
    }


# Progress

METRICS = {REWARD: 0.5125, KL: 1.234e-4, CLIP_FRACTION: 0.031, "tokens_per_second": 1234.4}


def test_a_log_gets_a_line_seldom_and_the_last_state(monkeypatch):
    """190 steps of 1/8 s: a line at the start, one every 5 s, one at the end. Catches a log of one line a step, or of each rank."""
    tqdm = pytest.importorskip("tqdm", reason="needs tqdm: pip install tqdm")
    now = [0.0]
    monkeypatch.setattr(tqdm.std, "time", lambda: now[0])
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with make_bar(390, 200, is_shown=True) as bar:
        for _ in range(190):
            now[0] += 0.125
            bar.set_postfix_str(describe(METRICS), refresh=False)
            bar.update()
    lines = sys.stderr.getvalue().split("\r")[1:]
    assert [line.partition("| ")[2].split("/")[0] for line in lines] == [str(step) for step in (200, 240, 280, 320, 360, 390)]
    assert "reward 0.512  KL 1.23e-04  clipped 3.1%  tokens/s 1,234" in lines[-1]
    with make_bar(2, 0, is_shown=False) as bar:
        bar.update()
    assert sys.stderr.getvalue().split("\r")[1:] == lines
