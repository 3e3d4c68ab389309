"""Checkpoints: bitwise resume, other layouts, saves that are cut off, and what is refused before anything is loaded."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import error_of
from trainer_cases import (
    CP,
    PP,
    TP,
    metrics_of,
    ragged_step,
    relative_difference,
    run_loop,
    tiny_trainer,
    unlike_metrics,
    weights_of,
    whole,
)

from megatron_rl.config import PolicyLossConfig
from megatron_rl.errors import ConfigError
from megatron_rl.layout.groups import resolve_groups
from megatron_rl.megatron import checkpoints
from megatron_rl.testing.ranks import RankError, RankPool

pytestmark = pytest.mark.megatron

# Two optimiser steps a rollout, so that a resumed run that has lost an old log-probability or Adam's moments shows it at once.
CONFIG = PolicyLossConfig(
    policy_loss="gspo", loss_aggregation="prompt_mean", samples_per_prompt=4, clip_ratio_low=0.1, clip_ratio_high=0.1
)
OPTIONS = {"num_rollouts": 4, "save_interval": 2, "steps_per_rollout": 2}


@pytest.fixture(scope="module")
def pool():
    with RankPool(2, timeout=240) as ranks:
        yield ranks


def run_on_rank(rank, output_dir, options, settings, resume=False):
    return run_loop(output_dir, CONFIG, options, settings=settings, resume=resume)


def cut_back_to_rollout_2(finished: Path, target: Path) -> None:
    """The directory as a run that was killed after its first checkpoint and some more rows would have left it."""
    shutil.copytree(finished, target)
    [early] = [path for path in (target / "checkpoints").iterdir() if path.name == "step_00000004"]
    (target / "checkpoints" / "latest").write_text(early.name + "\n")
    shutil.rmtree(target / "checkpoints" / "step_00000008")


SAME_LAYOUT = [
    pytest.param(1, {}, {}, id="one rank"),
    pytest.param(2, {TP: 2}, {"sequence_parallel": True}, id="TP2+SP"),
    pytest.param(2, {}, {"use_distributed_optimizer": True}, id="FB-78 DP2, distributed optimiser"),
    pytest.param(2, {TP: 2}, {"bf16": True}, id="TP2 in bf16: float32 weights beside the model's"),
]


@pytest.mark.parametrize(("world_size", "layout", "settings"), SAME_LAYOUT)
def test_a_run_resumed_on_its_layout_is_bitwise_the_uninterrupted_one(pool, tmp_path, world_size, layout, settings):
    """FB-90: metrics without timings, final weights, samples, tokens and rewards. Catches Adam's moments or step count that start
    anew or count P times, prompts or noise that repeat, rows of a lost rollout that stay in the file."""
    run = partial(pool.run, run_on_rank, world_size=world_size, **layout)
    complete = run(tmp_path / "complete", OPTIONS, settings)
    cut_back_to_rollout_2(tmp_path / "complete", tmp_path / "resumed")
    resumed = run(tmp_path / "resumed", OPTIONS, settings, True)
    rows = metrics_of(tmp_path / "complete")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert metrics_of(tmp_path / "resumed") == rows
    for (outcome, weights), (expected, truth) in zip(resumed, complete, strict=True):
        assert outcome.progress == expected.progress
        assert outcome.progress.samples_seen == 4 * 16 and outcome.progress.num_rollouts == 4
        assert all(torch.equal(value, weights[name][2]) for name, (_, _, value) in truth.items())


CHAINS = [
    pytest.param([(2, {TP: 2}), (1, {}), (2, {PP: 2})], {}, id="FB-78 TP2 to one rank to PP2"),
    pytest.param(
        [(2, {}), (1, {}), (2, {CP: 2})], {"use_distributed_optimizer": True}, id="FB-78 distributed optimiser, DP2 to 1 to CP2"
    ),
]


@pytest.mark.parametrize(("chain", "settings"), CHAINS)
def test_a_run_goes_on_on_other_layouts_with_the_same_numbers(pool, tmp_path, chain, settings):
    """Two rollouts on each layout in turn, against six on one rank. Catches shards in another order, moments of other parameters,
    padded vocabulary that is taken for a token, counters that a layout changes. FB-90, and FB-78 under the pool's timeout."""
    pool.run(run_on_rank, tmp_path / "one", {**OPTIONS, "num_rollouts": 6}, settings, world_size=1)
    for leg, (world_size, layout) in enumerate(chain):
        options = {**OPTIONS, "num_rollouts": 2 * leg + 2}
        answers = pool.run(run_on_rank, tmp_path / "chain", options, settings, leg > 0, world_size=world_size, **layout)
    expected = metrics_of(tmp_path / "one")
    # 1e-5 relative or 1e-6 absolute: float32 in other orders through twelve steps of Adam stays ten times below that.
    assert unlike_metrics(metrics_of(tmp_path / "chain"), expected) == []
    assert answers[0][0].progress.num_steps == 12 and answers[0][0].progress.samples_seen == 6 * 16


def save_on_rank(rank, directory, settings, num_saves=1):
    """The weights after a step, saved as step 1 (, 2, ...)."""
    trainer = tiny_trainer(**settings)
    dp = resolve_groups().dp
    trainer.step([ragged_step()[dp.rank() :: dp.size()]])
    for step in range(1, num_saves + 1):
        trainer.save(directory, step, {"note": step})
    return weights_of(trainer)


def load_on_rank(rank, checkpoint, settings):
    """(counters, weights, error)."""
    trainer = tiny_trainer(**settings)
    counters = {}
    message = error_of(lambda: counters.update(trainer.load(checkpoint)))
    return counters, weights_of(trainer), message


@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory):
    """A directory with steps 1 and 2 of TP2, and the weights."""
    directory = tmp_path_factory.mktemp("saved")
    return directory, whole(pool.run(save_on_rank, directory, {}, 2, world_size=2, **{TP: 2}))


def test_weights_and_counters_come_back(pool, saved):
    directory, weights = saved
    checkpoint = checkpoints.latest_checkpoint(directory)
    assert checkpoint.name == "step_00000002"
    assert checkpoints.load_counters(checkpoint)["note"] == 2
    for world_size, layout in ((2, {TP: 2}), (1, {})):
        answers = pool.run(load_on_rank, checkpoint, {}, world_size=world_size, **layout)
        assert relative_difference(whole([answer[1] for answer in answers]), weights) == 0.0
        for counters, _, message in answers:
            assert message == "" and counters["note"] == 2 and counters["step"] == 2


def draws_on_rank(rank, directory):
    """Random numbers of each generator after a save, and again after loading it."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    def draws():
        with get_cuda_rng_tracker().fork():
            of_megatron = torch.rand(3).tolist()
        return torch.rand(3).tolist(), random.random(), of_megatron

    torch.manual_seed(100 + rank)
    random.seed(200 + rank)
    trainer = tiny_trainer()
    trainer.step([ragged_step()])
    checkpoint = trainer.save(directory, 1, {})
    first, second = draws(), draws()
    trainer.load(checkpoint)
    return first, second, draws()


def test_each_rank_s_random_states_come_back(pool, tmp_path):
    """Dropout of a resumed run would differ, or be the same on all ranks: torch's, python's and Megatron's generators."""
    answers = pool.run(draws_on_rank, tmp_path, world_size=2, **{TP: 2})
    for first, second, again in answers:
        assert again == first and first != second
    assert answers[0][0] != answers[1][0]


OTHER_MODELS = [
    pytest.param({"num_layers": 1}, "--num-layers 2, this run has 1", id="fewer layers"),
    pytest.param({"num_layers": 4}, "--num-layers 2, this run has 4", id="more layers"),
    pytest.param({"hidden_size": 64}, "--hidden-size 32, this run has 64", id="another width"),
    pytest.param({"num_attention_heads": 2}, "--num-attention-heads 4, this run has 2", id="other heads, of the same shapes"),
    pytest.param({"vocab_size": 12}, "--vocab-size 11, this run has 12", id="a vocabulary of the same padded size"),
    pytest.param({"vocab_size": 20}, "--vocab-size 11, this run has 20", id="a larger vocabulary, which Megatron would fill up"),
    pytest.param({"bf16": True}, "--bf16 False, this run has True", id="another precision"),
    pytest.param(
        {"use_distributed_optimizer": True}, "--use-distributed-optimizer False, this run has True", id="another optimiser"
    ),
]


@pytest.mark.parametrize(("settings", "message"), OTHER_MODELS)
def test_a_checkpoint_of_another_model_is_refused_by_the_flag(pool, saved, settings, message):
    """Catches Megatron's own answers: tracebacks of every rank in an exception that no `except Exception` catches, KeyError, an
    empty AssertionError, and for heads and vocabulary none at all."""
    directory, _ = saved
    for _, _, error in pool.run(load_on_rank, directory / "step_00000002", settings, world_size=2, **{TP: 2}):
        assert error.startswith("ConfigError: ") and f"was saved with {message}: give it the same" in error


def test_all_differences_are_told_at_once(pool, saved):
    [(_, _, error)] = pool.run(load_on_rank, saved[0] / "step_00000001", {"num_layers": 4, "hidden_size": 64}, world_size=1)
    assert "2 problems" in error and "--num-layers" in error and "--hidden-size" in error


def cut_in_half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("damage", [Path.unlink, cut_in_half], ids=["missing", "cut off"])
def test_a_checkpoint_with_a_damaged_file_is_refused(pool, saved, tmp_path, damage):
    """A copy that was interrupted: its error must be one that the command shows, and leave the weights alone. Which files there are
    is the installed Megatron-Core's choice."""
    whole = saved[0] / "step_00000001"
    names = sorted(path.name for path in whole.iterdir())
    assert len(names) > 2
    for name in names:
        copy = tmp_path / f"damaged {name}"
        shutil.copytree(whole, copy)
        damage(copy / name)
        for _, _, error in pool.run(load_on_rank, copy, {}, world_size=1):
            assert error.startswith("ConfigError: ") and "cannot be read" in error and "missing or damaged" in error, (name, error)


def test_no_checkpoint_and_a_pointer_to_nothing_are_told_apart(tmp_path):
    """A run that was killed before its first save, and a directory that was copied without its largest part."""
    with pytest.raises(ConfigError, match=r"no checkpoint in .*: it has no file `latest`; start without --resume"):
        checkpoints.latest_checkpoint(tmp_path)
    (tmp_path / "latest").write_text("step_00000007\n")
    with pytest.raises(
        ConfigError, match=r"latest names step_00000007, which is not .*: it was removed,? or the copy is incomplete"
    ):
        checkpoints.latest_checkpoint(tmp_path)


def failing_save_on_rank(rank, directory, failing_rank, how):
    """A whole first save, and a second one that a rank does not survive."""
    from megatron.core import dist_checkpointing

    trainer = tiny_trainer()
    trainer.step([ragged_step()[rank::2]])
    trainer.save(directory, 1, {})
    original = dist_checkpointing.save

    def save(state, path):
        original(state, path)
        if rank == failing_rank and how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == failing_rank:
            raise OSError("no space left on device")

    dist_checkpointing.save = save
    trainer.save(directory, 2, {})


FAILURES = [
    pytest.param(1, 0, "killed", "SIGKILL", id="killed before the rename"),
    pytest.param(2, 1, "out of space", "no space left on device", id="one of two ranks is out of space"),
]


@pytest.mark.parametrize(("world_size", "failing_rank", "how", "error"), FAILURES)
def test_a_save_that_fails_half_way_leaves_the_checkpoint_before_it(tmp_path, world_size, failing_rank, how, error):
    """`latest` must not name what is not whole, and the next save must get over what is left."""
    with RankPool(world_size, timeout=240) as own_pool:
        with pytest.raises(RankError, match=error):
            own_pool.run(failing_save_on_rank, tmp_path, failing_rank, how)
        checkpoint = checkpoints.latest_checkpoint(tmp_path)
        assert checkpoint.name == "step_00000001"
        assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000001", "step_00000002.partial"]
        assert [message for _, _, message in own_pool.run(load_on_rank, checkpoint, {}, world_size=1)] == [""]
        own_pool.run(save_on_rank, tmp_path, {}, 2, world_size=1)
        assert checkpoints.latest_checkpoint(tmp_path).name == "step_00000002"
        assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000001", "step_00000002"]


def save_on_a_small_disk(rank, directory, full_rank, limit):
    """(what the second save raised, of which kind): files of the full rank end at the limit, as on a full disk."""
    trainer = tiny_trainer()
    trainer.step([ragged_step()])
    trainer.save(directory, 1, {})
    if rank == full_rank:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    try:
        return error_of(lambda: trainer.save(directory, 2, {}))
    finally:
        if rank == full_rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.getrlimit(resource.RLIMIT_FSIZE)[1],) * 2)


SMALL_DISKS = [
    pytest.param(1, 0, 20_000, id="one rank, while tensors are written"),
    pytest.param(1, 0, 100, id="one rank, while common values are written"),
    pytest.param(2, 1, 20_000, id="the second of two ranks"),
]


@pytest.mark.parametrize(("world_size", "full_rank", "limit"), SMALL_DISKS)
def test_a_full_disk_is_told_in_one_line_on_all_ranks(tmp_path, world_size, full_rank, limit):
    """Catches a traceback of every rank, a rank that waits for one that has ended, and a message that does not say what is left."""
    with RankPool(world_size, timeout=240) as own_pool:
        messages = own_pool.run(save_on_a_small_disk, tmp_path, full_rank, limit, **({TP: 2} if world_size == 2 else {}))
    for message in messages:
        assert message.startswith(f"RunError: checkpoint {tmp_path}/step_00000002 cannot be written: ") and "\n" not in message
        assert message.endswith(f"; {tmp_path}/step_00000001 is whole, and --resume goes on from it")
    assert "GB are free on its disk" in messages[0] and (
        "File too large" in messages[0] or "OSError" in messages[0] or limit == 100
    )
    assert checkpoints.latest_checkpoint(tmp_path).name == "step_00000001"


def test_a_step_that_is_there_already_is_replaced_and_never_half_gone(tmp_path, monkeypatch):
    """Catches an old checkpoint that is deleted file by file while `latest` names it: a kill in between would leave no other."""
    old, new = tmp_path / "step_00000003", tmp_path / "step_00000003.partial"
    for path, text in ((old, "old"), (new, "new")):
        path.mkdir()
        (path / "file").write_text(text)

    def rmtree(path, ignore_errors=False):
        assert Path(path) != old
        assert not old.exists() or (old / "file").read_text() in ("old", "new")

    monkeypatch.setattr(checkpoints.shutil, "rmtree", rmtree)
    checkpoints._replace_directory(old, new)
    assert (old / "file").read_text() == "new" and not new.exists()


def starts_of_processes_on_rank(rank, directory):
    """What Python tells its auditors of processes that start during two saves."""
    starts = []
    kinds = ("os.fork", "os.forkpty", "os.posix_spawn", "subprocess.Popen")
    sys.addaudithook(lambda event, arguments: starts.append(event) if event in kinds else None)
    trainer = tiny_trainer()
    trainer.step([ragged_step()])
    for step in (1, 2):
        trainer.save(directory, step, {})
    return starts


def test_a_save_starts_no_process(tmp_path):
    """A writer outlives a rank that is killed, and its copies of the rank's sockets keep the others waiting for the dead; torchrun
    and schedulers send SIGTERM to every process of the group, and the last checkpoint fails with a broken pipe."""
    with RankPool(1, timeout=240) as own_pool:
        assert own_pool.run(starts_of_processes_on_rank, tmp_path) == [[]]
    assert checkpoints.latest_checkpoint(tmp_path).name == "step_00000002"


def test_without_psutil_nothing_is_started(monkeypatch, tmp_path):
    """FB-78: Megatron's writers die without it and the save waits for them for ever, without a word."""
    find_spec = checkpoints.find_spec
    monkeypatch.setattr(checkpoints, "find_spec", lambda name: None if name == "psutil" else find_spec(name))
    with pytest.raises(ConfigError, match="needs psutil, which megatron-core does not declare.*: pip install psutil"):
        checkpoints.save_checkpoint(tmp_path / "checkpoints", 1, None, None, {}, description={})
    assert list(tmp_path.iterdir()) == []
