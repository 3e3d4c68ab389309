"""hosts/run.py: each trainer of a process has a state of its own, which goes with it."""

from __future__ import annotations

import contextlib
import gc
import io
from argparse import Namespace
from dataclasses import dataclass

import pytest
from helpers import pool_of

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
        gc.collect(0)  # what was made here; the whole heap takes half a second
        assert not runs.of(owner).told and len([*runs]) == 1
        runs.of(owner).told.add("a line")


def test_a_line_comes_once_a_run_and_is_made_only_then(capfd):
    runs, owners = Runs(Run), [Namespace(), Namespace()]
    made = []
    for _ in range(2):
        for owner in owners:
            runs.of(owner).tell("title", lambda: made.append(1) or "of a step")
            runs.of(owner).warn("careful")
    assert len(made) == 2
    assert capfd.readouterr().err.splitlines() == ["megatron_rl: of a step", "megatron_rl: careful"] * 2


pool = pool_of(4)


def told_on_rank(rank: int) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed):
        Run().warn("careful")
    return printed.getvalue()


@pytest.mark.megatron
def test_one_rank_of_those_that_have_the_loss_tells(pool):
    """Ranks 2 and 3 are the last stage, and 2 the first of its tensor-parallel ranks."""
    layout = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    assert pool.run(told_on_rank, **layout) == ["", "", "megatron_rl: careful\n", ""]
