"""A setting that is given twice is said by every reader of a line: doctor of each kind of host, explain, our launcher."""

from __future__ import annotations

import json

import pytest

from megatron_rl.__main__ import main
from megatron_rl.hosts import launch

LAUNCHER = "python3 -m megatron_rl.hosts.launch train.py --custom-megatron-init-path megatron_rl.hooks.custom_megatron_init"
REDUCER = "--custom-pg-loss-reducer-function-path megatron_rl.reducers.get_pg_loss_reducer"
LAST = "the last one counts, the first one has no effect"
VERL = "python3 -m verl.trainer.main_ppo"
LR = "actor_rollout_ref.actor.clip_ratio"


def rows(capsys, *words: str) -> list[tuple[str, str, str]]:
    main(["doctor", "--json", "--launch-only", *words])
    report = json.loads(capsys.readouterr().out)["launch"]
    return [tuple(row.values()) for part in ("reading", "paths", "flags", "rules") for row in report[part]]


@pytest.mark.parametrize(
    ("words", "name", "values"),
    [
        pytest.param(
            f"--host miles -- {LAUNCHER} {REDUCER} --loss-aggregation prompt_mean --loss-aggregation=sample_mean",
            "--loss-aggregation",
            "prompt_mean, sample_mean",
            id="ours in a host's parser",
        ),
        pytest.param(
            "--host slime -- python3 train.py --eps-clip 0.2 --eps-clip 0.3", "--eps-clip", "0.2, 0.3", id="the host's own"
        ),
        pytest.param(f"-- {VERL} {LR}=0.2 {LR}=0.3", LR, "0.2, 0.3", id="hydra"),
        pytest.param(f"-- {VERL} {LR}=0.2 ++{LR}=0.3", LR, "0.2, 0.3", id="hydra, added or replaced"),
    ],
)
def test_doctor_says_which_of_two_values_counts_and_it_is_no_problem(capsys, words, name, values):
    found = [row for row in rows(capsys, *words.split()) if row[0] == name and "times" in row[2]]
    assert found == [(name, "note", f"given 2 times ({values}): {LAST}")]


def test_doctor_says_that_hydra_refuses_a_plus_for_what_is_there(capsys):
    """hydra 1.3: "Could not append to config. An item is already at"."""
    for first in ("+", "++", ""):
        found = rows(capsys, "--", *f"{VERL} {first}{LR}=0.2 +{LR}=0.3".split())
        assert any(status == "PROBLEM" and "hydra refuses it" in text for name, status, text in found if name == LR), first
    found = rows(capsys, "--", *f"{VERL} ++{LR}=0.2 {LR}=0.3".split())
    assert not any("hydra refuses it" in text for _, _, text in found)


def test_what_a_person_adds_to_a_python_launcher_is_ours_and_said(tmp_path, capsys):
    (script := tmp_path / "run_mine.py").write_text(
        "import miles.utils as U\na = '--lr 1 --lr 2 '\nU.execute_train(f'{a}{args.extra_args}')\n"
    )
    added = f"{REDUCER} --loss-aggregation prompt_mean --loss-aggregation token_mean"
    found = [row for row in rows(capsys, "--", "python", str(script), "--extra-args", added) if "times" in row[2]]
    assert [row[0] for row in found] == ["--loss-aggregation"]


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (
            "--loss-aggregation prompt_mean --loss-aggregation sample_mean",
            f"--loss-aggregation given 2 times (prompt_mean, sample_mean): {LAST}",
        ),
        ("--loss-aggregation sample_mean --loss-aggregation=sample_mean", ""),
        (
            "--rows 3 --rows 1 --rows 2 --loss-aggregation sample_mean",
            "--rows given 3 times (3, 1, 2): the last one counts, the others have no effect",
        ),
    ],
)
def test_a_command_says_which_of_two_values_counts(capsys, typed, said):
    assert main(["explain", "--response-lengths", "3,5", *typed.split()]) == 0
    assert [line for line in capsys.readouterr().err.splitlines() if "times" in line] == [f"megatron_rl: {said}"] * bool(said)


def test_our_launcher_says_it_before_the_script_runs(tmp_path, monkeypatch, capsys):
    (script := tmp_path / "train.py").write_text("")
    monkeypatch.setattr(launch, "hosts_of", lambda script: [])
    launch.main([str(script), "--loss-aggregation", "prompt_mean", "--lr", "1", "--lr", "2", "--loss-aggregation", "token_mean"])
    said = [line for line in capsys.readouterr().err.splitlines() if "times" in line]
    assert said == [f"megatron_rl: --loss-aggregation given 2 times (prompt_mean, token_mean): {LAST}"]
