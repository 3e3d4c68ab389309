"""Rollouts in parts: each data-parallel rank writes and reads its own samples."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from unittest import mock

import pytest
from helpers import error_of, pool_of
from trainer_cases import PP, TP, metrics_of, run_loop, unlike_metrics

from megatron_rl.config import PolicyLossConfig
from megatron_rl.errors import DataError
from megatron_rl.train import replay
from megatron_rl.train.rollout_files import existing_parts, load_rollouts, record_of

pytestmark = pytest.mark.megatron

GSPO = PolicyLossConfig(policy_loss="gspo", loss_aggregation="prompt_mean", samples_per_prompt=4, policy_metrics="with_entropy")
pool = pool_of(4)


def run_on_rank(rank, output_dir, options, resume=False):
    return error_of(lambda: run_loop(output_dir, GSPO, options, resume=resume))


def run(pool, output_dir, world_size, *, resume=False, layout=None, **options):
    [error, *others] = pool.run(
        run_on_rank, output_dir, {"num_rollouts": 2, **options}, resume, world_size=world_size, **(layout or {})
    )
    assert all((other == "") == (error == "") for other in others), "each rank ends"
    return error


@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory):
    """Two rollouts of 16 samples in two steps, as a file of one rank and as the parts of two data-parallel ranks of two stages."""
    folder = tmp_path_factory.mktemp("saved")
    assert run(pool, folder / "one", 1, save_rollouts=str(folder / "one.jsonl")) == ""
    assert run(pool, folder / "two", 4, layout={PP: 2}, save_rollouts=str(folder / "two.jsonl")) == ""
    return folder


def test_parts_together_are_the_file_of_one_rank(saved):
    assert [path.name for path in existing_parts(saved / "two.jsonl")] == ["two.part-0.jsonl", "two.part-1.jsonl"]
    for part in (0, 1):
        lines = [json.loads(line) for line in (saved / f"two.part-{part}.jsonl").read_text().splitlines()]
        assert [[sample["index"] % 2 for sample in line["samples"]] for line in lines] == [[part] * 8] * 2
    for whole, expected in zip(load_rollouts(saved / "two.jsonl"), load_rollouts(saved / "one.jsonl"), strict=True):
        for found, truth in zip(record_of(whole)["samples"], record_of(expected)["samples"], strict=True):
            # Sums in another order on two stages; two steps of Adam lie between the rollouts.
            assert found.pop("old_log_probs") == pytest.approx(truth.pop("old_log_probs"), abs=1e-4)
            assert found == truth


def reading_on_rank(rank, output_dir, options):
    """(error, the files that this rank has opened)."""
    opened, read = [], replay.read_part

    def noted(path, **others):
        opened.append(path.name)
        return read(path, **others)

    with mock.patch.object(replay, "read_part", noted):
        error = error_of(lambda: run_loop(output_dir, GSPO, options))
    return error, opened


@pytest.mark.parametrize(
    ("world_size", "layout", "own_files"),
    [
        pytest.param(1, {}, [[]], id="one rank reads both"),
        pytest.param(2, {}, [["two.part-0.jsonl"], ["two.part-1.jsonl"]], id="DP2"),
        pytest.param(4, {TP: 2}, [["two.part-0.jsonl"]] * 2 + [["two.part-1.jsonl"]] * 2, id="DP2xTP2"),
        pytest.param(4, {}, [[]] * 4, id="DP4: two parts do not divide by four ranks"),
    ],
)
def test_a_run_from_parts_is_the_one_from_the_file(pool, saved, tmp_path, world_size, layout, own_files):
    """Other groups, orders or counts than those of the whole rollout would change a weight; other micro-batches a collective."""
    options = {"rollouts": str(saved / "two.jsonl"), "micro_batch_size": 3}
    answers = pool.run(reading_on_rank, tmp_path / "out", options, world_size=world_size, **layout)
    assert answers == [("", files) for files in own_files]
    assert run(pool, tmp_path / "truth", 1, rollouts=str(saved / "one.jsonl")) == ""
    assert unlike_metrics(metrics_of(tmp_path / "out"), metrics_of(tmp_path / "truth"), relative=1e-4) == []


def test_documents_are_dealt_from_parts_too(pool, saved, tmp_path):
    config = dataclasses.replace(GSPO, docs_per_step=8)
    for name, path in (("parts", "two.jsonl"), ("file", "one.jsonl")):
        pool.run(documents_on_rank, tmp_path / name, config, {"rollouts": str(saved / path)}, world_size=2)
    assert unlike_metrics(metrics_of(tmp_path / "parts"), metrics_of(tmp_path / "file"), relative=1e-4) == []


def documents_on_rank(rank, output_dir, config, options):
    run_loop(output_dir, config, options)


def test_a_resumed_run_may_have_other_ranks(pool, saved, tmp_path):
    """Two rollouts on two data-parallel ranks, the third on one, the fourth on four: one recorded run."""
    path = str(tmp_path / "r.jsonl")
    for number, world_size in ((2, 2), (3, 1), (4, 4)):
        options = {"num_rollouts": number, "save_rollouts": path}
        assert run(pool, tmp_path / "out", world_size, resume=number > 2, **options) == ""
    names = ["r.jsonl", *(f"r.part-{part}.jsonl" for part in range(4))]
    assert [file.name for file in existing_parts(path)] == names
    batches = list(load_rollouts(path))
    assert [(batch.rollout_index, len(batch.samples)) for batch in batches] == [(index, 16) for index in range(4)]
    # A run that begins anew leaves nothing of the earlier one, on however many ranks that was.
    assert run(pool, tmp_path / "anew", 1, num_rollouts=1, save_rollouts=path) == ""
    assert [file.name for file in existing_parts(path)] == ["r.jsonl"] and len(list(load_rollouts(path))) == 1


def without_last_line(text):
    return "".join(text.splitlines(keepends=True)[:-1])


def with_edited_last_line(text, **changes):
    line = json.loads(text.splitlines()[-1])
    for sample in line["samples"]:
        sample.update(changes)
    return without_last_line(text) + json.dumps(line) + "\n"


FAULTS = {
    "a part that was cut": (without_last_line, "rollout 1: 1 of its 2 parts are there. A killed run leaves its last rollout"),
    "the part of a run on three ranks": (
        lambda text: text.replace('"num_parts": 2', '"num_parts": 3'),
        "rollout 0: 2 of its 3 parts are there",
    ),
    "one part without old_log_probs": (lambda text: with_edited_last_line(text, old_log_probs=None), "old_log_probs"),
    "a token outside the vocabulary": (
        lambda text: with_edited_last_line(text, tokens=[8, 1, 1, 1, 90]),
        "tokens: 90 at position 4",
    ),
    "rollouts that skip": (lambda text: text.replace('"rollout_index": 1', '"rollout_index": 5'), "rollout 1: 1 of its 2 parts"),
    "the first part twice": (None, "index: 0 is"),
    "the part of another run": (
        lambda text: re.sub(r'"digest": \d+', '"digest": 5', text),
        "rollout 0: its parts have different digests",
    ),
    "another vocabulary": (
        lambda text: re.sub(r'"vocab_size": \d+', '"vocab_size": 8', text),
        "rollout 0: its parts have different vocab_size",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_parts_that_do_not_belong_together_are_refused_on_every_rank(pool, saved, tmp_path, fault, world_size):
    """Read whole by one rank, and by each rank its own. Without one of the samples every weight of the rollout would be another."""
    change, message = FAULTS[fault]
    first, second = ((saved / f"two.part-{part}.jsonl").read_text() for part in (0, 1))
    (tmp_path / "two.part-0.jsonl").write_text(first)
    (tmp_path / "two.part-1.jsonl").write_text(first if change is None else change(second))
    error = run(pool, tmp_path / "out", world_size, rollouts=str(tmp_path / "two.jsonl"))
    assert error.startswith("DataError") and message in error, error


def test_a_file_whose_number_has_a_leading_zero_stands_for_no_part(saved, tmp_path):
    for name in ("two.part-0.jsonl", "two.part-1.jsonl"):
        shutil.copy(saved / name, tmp_path)
    for name in ("two.part-01.jsonl", "two.part-\u0661.jsonl"):
        (tmp_path / name).write_text("not this one")
    assert [file.name for file in existing_parts(tmp_path / "two.jsonl")] == ["two.part-0.jsonl", "two.part-1.jsonl"]


def test_a_part_that_is_missing_is_refused(saved, tmp_path):
    (tmp_path / "two.part-1.jsonl").write_text((saved / "two.part-1.jsonl").read_text())
    with pytest.raises(DataError, match=r"two.jsonl, rollout 0: 1 of its 2 parts are there.* copy the missing two.part-0.jsonl"):
        next(load_rollouts(tmp_path / "two.jsonl"))


def test_a_part_by_its_own_name_is_refused(saved, tmp_path):
    """It would train on half of the samples, with weights of the half."""
    part = shutil.copy(saved / "two.part-1.jsonl", tmp_path)
    with pytest.raises(DataError, match=r"rollout 0: this is one of 2 parts; .*two.jsonl stands for all of them"):
        next(load_rollouts(part))
    renamed = shutil.copy(part, tmp_path / "other.jsonl")
    with pytest.raises(DataError, match=r"other.jsonl, rollout 0: 1 of its 2 parts are there"):
        next(load_rollouts(renamed))


@pytest.mark.parametrize("of_file", ["one.jsonl", "two.jsonl"])
def test_a_replayed_run_saves_parts_that_can_be_read(pool, saved, tmp_path, of_file):
    options = {"rollouts": str(saved / of_file), "save_rollouts": str(tmp_path / "again.jsonl")}
    assert run(pool, tmp_path / "out", 2, **options) == ""
    for again, before in zip(load_rollouts(tmp_path / "again.jsonl"), load_rollouts(saved / of_file), strict=True):
        found, truth = (sorted(sample.index for sample in batch.samples) for batch in (again, before))
        assert found == truth and again.rollout_index == before.rollout_index
