"""What a run leaves for people: the metrics file with its resume, TensorBoard, the curves, the progress display."""

from __future__ import annotations

import io
import json
import math
import resource
import signal
import struct
import sys
from unittest import mock

import pytest
import torch
from helpers import error_of

from megatron_rl.errors import ConfigError, DataError
from megatron_rl.testing.ranks import run_ranks
from megatron_rl.train.plots import plot_curves
from megatron_rl.train.progress import describe, make_bar
from megatron_rl.train.writers import (
    CLIP_FRACTION,
    ENTROPY,
    KL,
    METRICS_FILE,
    REWARD,
    X_AXES,
    MetricsWriter,
    missing_rows,
    read_metrics,
)


def write_steps(output_dir, steps, resume_step=None, **settings) -> list[dict]:
    with MetricsWriter(output_dir, tensorboard=False, resume_step=resume_step, **settings) as writer:
        for step in steps:
            writer.write(step, {REWARD: step / 10, KL: 1e-4 * step})
    return read_metrics(output_dir / METRICS_FILE)


def test_a_row_is_one_line_of_strict_json_that_is_on_disk_before_the_next_step(tmp_path):
    """Catches NaN, scalars that json refuses, a buffer that a killed run loses, and ranks that write each row twice."""
    metrics = {"loss": torch.tensor(0.5), "count": 3, "worst": math.nan, "note": "x", "none": None, "best": -math.inf}
    with MetricsWriter(tmp_path / "other", is_writer_rank=False) as writer:
        writer.write(1, metrics)
    assert not (tmp_path / "other").exists()
    writer = MetricsWriter(tmp_path / "deep" / "run", tensorboard=False)
    writer.write(1, metrics)
    (line,) = (tmp_path / "deep" / "run" / METRICS_FILE).read_text().splitlines()
    assert line == '{"step": 1, "loss": 0.5, "count": 3, "worst": null, "note": "x", "none": null, "best": null}'
    with pytest.raises(ValueError, match="metrics of step 1 after step 1"):
        writer.write(1, {})
    writer.close()
    writer.close()


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
def test_the_unfinished_line_of_a_killed_run_is_ignored_and_replaced(tmp_path, rest):
    """Catches a reader that fails on such a file, and a new row glued to half of an old one."""
    write_steps(tmp_path, [1, 2])
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write(rest)
    assert [row["step"] for row in read_metrics(tmp_path / METRICS_FILE)] == [1, 2]
    assert [row["step"] for row in write_steps(tmp_path, [3], resume_step=2)] == [1, 2, 3]


DAMAGED = [
    ("{", "line 2: not JSON"),
    ("[]", "line 2: step: missing"),
    ('{"loss": 1}', "line 2: step: missing"),
    ('{"step": "2"}', "line 2: step: '2' must be a whole number of at least 1"),
    ('{"step": null}', "line 2: step: None must be a whole number"),
    ('{"step": NaN}', "line 2: step: nan must be a whole number"),
    ('{"step": true}', "line 2: step: True must be a whole number"),
    ('{"step": 2.0}', "line 2: step: 2.0 must be a whole number"),
    ('{"step": 1}', "line 2: step: 1 follows 1: two runs wrote this file, or it was edited"),
    ('{"step": 5}', "line 3: step: 3 follows 5: two runs wrote this file, or it was edited"),
    ("[" * 100_000, "line 2: not JSON .lists or objects that are nested too deeply"),
    ("\ufeff", "line 2: not JSON"),
]


@pytest.mark.parametrize(("line", "message"), DAMAGED, ids=lambda value: value[:12] if value[0] in "[{" else "")
def test_a_damaged_row_in_the_middle_is_refused_with_its_line(tmp_path, line, message):
    """It would be a gap in the curve. An editor's mark at the begin is refused: not every reader takes it."""
    path = tmp_path / METRICS_FILE
    path.write_text('{"step": 1}\n' + line + '\n{"step": 3}\n')
    with pytest.raises(DataError, match=message):
        read_metrics(path)
    path.write_bytes(b'\xef\xbb\xbf{"step": 1}\n')
    with pytest.raises(DataError, match="line 1: not JSON .Unexpected UTF-8 BOM"):
        read_metrics(path)


LOST_ROWS = [
    pytest.param([1, 2, 3, 4, 5, 6], None, id="whole"),
    pytest.param([1, 2, 3, 4, 5, 6, 7, 8], None, id="rows after the checkpoint, which are cut"),
    pytest.param([3, 4, 5, 6], None, id="a run that began from another's checkpoint"),
    pytest.param([1, 2, 3, 4], "5 to 6", id="the last two lost"),
    pytest.param([1, 2, 3, 4, 5], "6", id="the last one lost"),
    pytest.param([1, 3, 4, 6], "2, 5", id="holes"),
    pytest.param([1, 7], "2 to 6", id="a hole up to the checkpoint"),
    pytest.param([], "1 to 6", id="empty"),
    pytest.param(None, "1 to 6", id="deleted"),
]


@pytest.mark.parametrize(("steps", "lost"), LOST_ROWS)
def test_rows_that_a_checkpoint_is_ahead_of_are_told(tmp_path, steps, lost):
    """A curve with a hole, and no word about it, is read as a curve without one."""
    path = tmp_path / METRICS_FILE
    if steps is not None:
        path.write_text("".join(f'{{"step": {step}}}\n' for step in steps) + ("" if 6 in steps else '{"step": 6, "lo'))
    lines = missing_rows(path, 6)
    says = (
        f"{path} holds no rows of steps {lost}, which the checkpoint was trained on: they are lost, and the file goes on with step"
    )
    assert lines == ([] if lost is None else [f"{says} 7"])


def test_a_full_disk_leaves_whole_rows_and_one_line(tmp_path):
    """Catches a traceback, and the part of a row that the disk still took."""

    def fill_the_disk(rank):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (230, 230))
        return error_of(lambda: write_steps(tmp_path, range(1, 100)))

    [said] = run_ranks(fill_the_disk, 1, use_megatron=False)
    assert said == (
        f"RunError: {tmp_path / METRICS_FILE} cannot be written: File too large; its rows are whole, and --resume goes on from the "
        "last checkpoint"
    )
    content = (tmp_path / METRICS_FILE).read_bytes()
    assert content.endswith(b"}\n") and len(read_metrics(tmp_path / METRICS_FILE)) == content.count(b"\n") == 3


def read_events(output_dir) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(output_dir / "tensorboard"), purge_orphaned_data=True)
    events.Reload()
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


@pytest.mark.parametrize("x_axis", ["step", "documents_seen"])
def test_tensorboard_holds_the_numbers_and_continues_after_a_resume(tmp_path, x_axis):
    """FB-90: catches two branches after a resume, as by a purge by step where documents count, and events of an earlier run."""
    pytest.importorskip("tensorboard", reason="needs tensorboard: pip install tensorboard")
    for resume_step, steps in ((None, [1, 2]), (None, [1, 2, 3, 4]), (2, [3, 4])):
        with MetricsWriter(tmp_path, resume_step=resume_step, x_axis=x_axis) as writer:
            for step in steps:
                numbers = {"loss": step + (resume_step or 0) * 10.0, "documents_seen": 10 * step}
                writer.write(step, {**numbers, "note": "text", "bad": math.nan})
    size, events = 10 if x_axis == "documents_seen" else 1, read_events(tmp_path)
    assert events.keys() == {"loss", "documents_seen"}
    assert events["loss"] == [(size * step, value) for step, value in ((1, 1.0), (2, 2.0), (3, 23.0), (4, 24.0))]
    assert [(row["step"], row["documents_seen"]) for row in read_metrics(tmp_path / METRICS_FILE)][2:] == [(3, 30), (4, 40)]


@pytest.mark.parametrize(("x_axis", "x"), [("step", 1), ("documents_seen", 64), ("tokens_seen", 900)])
def test_a_user_s_own_writer_gets_every_number_once_on_the_writing_rank(tmp_path, x_axis, x):
    """An object like TensorBoard's, and one like a run of Weights & Biases; neither needs to be installed. Ended with the run. An
    object that can write nothing is refused before the file is touched: a factory forgot its return."""
    row = {"loss": 0.5, "worst": math.nan, "note": "x", "documents_seen": 64, "tokens_seen": 900}
    scalars, logs, elsewhere = mock.Mock(spec=["add_scalar", "finish"]), mock.Mock(spec=["log", "finish"]), mock.Mock(spec=["log"])
    for rank, writers in ((0, [scalars, logs]), (1, [elsewhere])):
        with MetricsWriter(tmp_path / "run", False, is_writer_rank=rank == 0, x_axis=x_axis, writers=writers) as writer:
            writer.write(1, row)
    numbers = {"loss": 0.5, "documents_seen": 64, "tokens_seen": 900}
    assert scalars.mock_calls == [*(mock.call.add_scalar(name, value, x) for name, value in numbers.items()), mock.call.finish()]
    assert logs.mock_calls == [mock.call.log({"step": 1, **numbers}, step=x), mock.call.finish()]
    assert elsewhere.mock_calls == [] and x_axis in X_AXES
    with pytest.raises(ConfigError, match="of type NoneType has neither add_scalar"):
        MetricsWriter(tmp_path / "none", writers=[None])
    assert not (tmp_path / "none").exists()


def test_without_tensorboard_one_line_says_so_and_the_file_is_written(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with MetricsWriter(tmp_path) as writer:
        for step in (1, 2):
            writer.write(step, {"loss": 1.0})
    assert len(read_metrics(tmp_path / METRICS_FILE)) == 2
    assert [record.message for record in caplog.records] == [
        f"TensorBoard is not installed: metrics go to {METRICS_FILE} alone; pip install tensorboard, or pass --no-tensorboard"
    ]


def png_size(path) -> tuple[int, int]:
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n" and content[12:16] == b"IHDR"
    return struct.unpack(">II", content[16:24])


def write_rows(path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def row(step: int, **changes) -> dict:
    return {"step": step, REWARD: 0.1 * step, KL: 1e-4, CLIP_FRACTION: 0.05} | changes


PANELS = [
    pytest.param([row(step, **{ENTROPY: 2.0}) for step in range(1, 30)], 4, id="with entropy"),
    pytest.param([row(1, **{KL: None}), row(2, **{KL: None})], 3, id="a metric that was never finite"),
    pytest.param([{"step": 1}], 3, id="one row, nothing but its step"),
]


@pytest.mark.parametrize(("rows", "num_panels"), PANELS)
def test_curves_have_a_panel_for_each_metric(tmp_path, rows, num_panels):
    """Width 8 inches, 2.1 for each panel and 0.6 for title and axis, 120 dots an inch. Catches a crash on few rows."""
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install matplotlib")
    plot_curves(write_rows(tmp_path / "m.jsonl", rows), tmp_path / "plots" / "curves.png", "GSPO, repeat")
    assert png_size(tmp_path / "plots" / "curves.png") == (960, int((2.1 * num_panels + 0.6) * 120))
    with pytest.raises(DataError, match="holds no row yet"):
        plot_curves(write_rows(tmp_path / "empty.jsonl", []), tmp_path / "x.png", "")


@pytest.fixture
def figures(monkeypatch):
    """The figures that were saved, to look at what was drawn."""
    figure = pytest.importorskip("matplotlib.figure", reason="needs matplotlib: pip install matplotlib")
    saved = []
    save = figure.Figure.savefig
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, *args, **rest: (saved.append(self), save(self, *args, **rest)))
    return saved


@pytest.mark.parametrize(
    ("x_axis", "points", "label"), [("step", [1, 2, 4], "Optimiser step"), ("documents_seen", [8, 20, 24], "Documents trained on")]
)
def test_the_curves_are_the_numbers_of_the_file(tmp_path, figures, x_axis, points, label):
    """Catches a metric in another's panel, a point drawn for a row that was not finite, an empty panel unexplained."""
    rows = [row(1), row(2, **{KL: None}), {"step": 4, KL: 3e-4, REWARD: 0.9}]
    rows = [{**values, "documents_seen": seen} for values, seen in zip(rows, (8, 20, 24), strict=True)]
    path = write_rows(tmp_path / "m.jsonl", [{name: row[name] for name in row if name != CLIP_FRACTION} for row in rows])
    plot_curves(path, tmp_path / "curves.png", "a title", x_axis=x_axis)
    reward, kl, clipped = figures[0].axes
    assert [list(line.get_xdata()) for line in reward.lines + kl.lines] == [points, [points[0], points[2]]]
    assert [list(line.get_ydata()) for line in reward.lines + kl.lines] == [[0.1, 0.2, 0.9], [1e-4, 3e-4]]
    assert ([text.get_text() for text in clipped.texts], list(clipped.lines)) == (["not measured"], [])
    assert (figures[0].get_suptitle(), clipped.get_xlabel()) == ("a title", label)


def test_the_steps_of_a_rollout_are_one_point(tmp_path, figures):
    """Two steps a rollout, clip fraction 0 and 0.2: one point at the last step, their mean 0.1, and no zigzag."""
    rows = [row(step, rollout=(step - 1) // 2, **{CLIP_FRACTION: 0.2 * (step % 2)}) for step in range(1, 7)]
    plot_curves(write_rows(tmp_path / "m.jsonl", rows), tmp_path / "curves.png", "")
    _, _, clipped = figures[0].axes
    assert [list(line.get_xdata()) for line in clipped.lines] == [[2, 4, 6]]
    assert list(clipped.lines[0].get_ydata()) == pytest.approx([0.1, 0.1, 0.1])


# Progress

METRICS = {REWARD: 0.5125, KL: 1.234e-4, CLIP_FRACTION: 0.031, "tokens_per_second": 1234.4}


def test_the_line_shows_what_is_worth_watching_and_was_measured():
    assert describe(METRICS | {"loss": 3.0}) == "reward 0.512  KL 1.23e-04  clipped 3.1%  tokens/s 1,234"
    assert describe({REWARD: None, KL: 0.0}) == "KL 0.00e+00"


def test_a_log_gets_a_line_seldom_and_the_last_state(monkeypatch, caplog):
    """190 steps of 1/8 s: a line at the start, one every 5 s, one at the end. Catches a log of one line a step. Without tqdm one
    line says so."""
    tqdm = pytest.importorskip("tqdm", reason="needs tqdm: pip install tqdm")
    now = [0.0]
    monkeypatch.setattr(tqdm.std, "time", lambda: now[0])
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with make_bar(390, 200) as bar:
        for _ in range(190):
            now[0] += 0.125
            bar.set_postfix_str(describe(METRICS), refresh=False)
            bar.update()
    lines = sys.stderr.getvalue().split("\r")[1:]
    assert [line.partition("| ")[2].split("/")[0] for line in lines] == [str(step) for step in (200, 240, 280, 320, 360, 390)]
    assert "reward 0.512  KL 1.23e-04  clipped 3.1%  tokens/s 1,234" in lines[-1]
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with make_bar(2, 0) as bar:
        assert bar is None
    assert [record.message for record in caplog.records] == ["tqdm is not installed: no progress is shown; pip install tqdm"]
