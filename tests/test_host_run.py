"""hosts/run.py: each trainer of a process has a state of its own, which goes with it."""

from __future__ import annotations

import gc
from argparse import Namespace
from dataclasses import dataclass

import pytest

from megatron_rl.hosts.run import Run, Runs


@dataclass
class Config:
    """Equal to another of the same numbers, and without a hash, as a trainer's config."""

    learning_rate: float = 1e-6


@pytest.mark.parametrize("owner", [Namespace, Config])
def test_equal_owners_have_a_run_each_and_keep_it(owner):
    runs, actor, critic = Runs(Run), owner(), owner()
    assert actor == critic and runs.of(actor) is not runs.of(critic)
    assert runs.of(actor) is runs.of(actor)


def test_a_run_goes_with_its_owner_and_a_new_owner_starts_anew():
    runs, owner = Runs(Run), Namespace()
    runs.of(owner).told.add("a line")
    for _ in range(20):  # the number of a freed object is given out again
        owner = Namespace()
        gc.collect()
        assert not runs.of(owner).told and len(runs) == 1
        runs.of(owner).told.add("a line")
    runs.forget(owner)
    assert len(runs) == 0


def test_a_line_comes_once_a_run_and_is_made_only_then(capfd):
    runs, owners = Runs(Run), [Namespace(), Namespace()]
    made = []
    for _ in range(2):
        for owner in owners:
            runs.of(owner).tell("title", lambda: made.append(1) or "of a step")
            runs.of(owner).warn("careful")
    assert len(made) == 2
    assert capfd.readouterr().err.splitlines() == ["megatron_rl: of a step", "megatron_rl: careful"] * 2
