"""`megatron-rl train` when something goes wrong around it: a second run, a full disk, a killed rank, a signal, a user's reward."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import test_train_command as command_line
from conftest import ROOT
from helpers import wait_until
from test_train_command import imported_megatron, in_an_empty_directory
from trainer_cases import metrics_of

from megatron_rl.errors import ConfigError
from megatron_rl.testing.ranks import HANG_SECONDS
from megatron_rl.train import output_dir
from megatron_rl.train.options import TrainOptions
from megatron_rl.train.tasks import make_task

pytestmark = pytest.mark.megatron
imported_megatron, in_an_empty_directory = imported_megatron, in_an_empty_directory  # the fixtures

TP2 = "--tensor-model-parallel-size 2"


def test_the_folder_of_a_run_is_its_own_while_it_lives(tmp_path):
    """Catches rows of both runs in one file, checkpoints that the other one removes, and a folder that kill -9 left locked."""
    first = command_line.Command(f"{command_line.ENDLESS} --output-dir out", tmp_path / "first")
    wait_until(lambda: command_line.has_saved(tmp_path / "out") or not first.ranks[0].is_alive())
    for how in ("--resume", f"--overwrite {TP2}"):
        ranks = 2 if TP2 in how else 1
        second = command_line.Command(f"{command_line.ENDLESS} --output-dir out {how}", tmp_path / "second", num_ranks=ranks)
        assert second.wait() == [2] * ranks
        says = "ConfigError: out is in use by another run: wait for it, end it, or name another --output-dir"
        assert says in second.output()
    first.kill_all()
    steps = [row["step"] for row in metrics_of(tmp_path / "out")]
    assert steps == list(range(1, len(steps) + 1))
    more = command_line.latest_step(tmp_path / "out") // 2 + 1
    command_line.run(f"{command_line.SMALL} --num-rollouts {more} --output-dir out --resume", tmp_path / "second")


def test_a_folder_that_another_run_filled_meanwhile_is_looked_at_again(tmp_path):
    """Two jobs started together: the second gets the lock when the first has ended, and must not take its results for nothing."""
    command_line.make_run(tmp_path / "out")
    options = TrainOptions(output_dir=str(tmp_path / "out"))
    with pytest.raises(ConfigError, match="--output-dir .*out holds a run; --resume goes on"):
        output_dir.take_output_dir(output_dir.lock_of(options), options, make_task("repeat"))
    assert command_line.has_saved(tmp_path / "out")


def test_overwriting_empties_a_folder_of_checkpoints_on_another_disk(tmp_path, monkeypatch):
    """Catches an old `latest` that a killed run would be resumed from, and `latest` on what is half gone."""
    large, rmtree = command_line.make_run(tmp_path / "large") / "checkpoints", output_dir.checkpoints.shutil.rmtree
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "checkpoints").symlink_to(large)

    def remove(path):
        assert not command_line.has_saved(tmp_path / "out"), "the pointer is there"
        rmtree(path)

    with monkeypatch.context() as looking:
        looking.setattr(output_dir.checkpoints.shutil, "rmtree", remove)
        assert command_line.prepared(tmp_path / "out", overwrite=True) == (False, False)
    assert (tmp_path / "out" / "checkpoints").is_symlink() and list(large.iterdir()) == []
    command_line.run(f"{command_line.SMALL} --num-rollouts 1 --output-dir out --overwrite", tmp_path / "logs")
    assert sorted(path.name for path in large.iterdir()) == ["latest", "step_00000002"]


def test_a_resumed_run_says_which_settings_it_changes(tmp_path):
    """A second seed in one curve is a line at start; what neither trains nor measures otherwise is none."""
    command_line.run(f"{command_line.SMALL} --num-rollouts 1 --output-dir out", tmp_path / "first")
    same = command_line.run(f"{command_line.SMALL} --num-rollouts 2 --output-dir out --resume --save-interval 1", tmp_path / "same")
    assert "resumed at" not in same.output()
    changes = "--lr 0.5 --policy-loss gspo --seed 5 --prompts-per-rollout 5 --steps-per-rollout 1 --samples-per-prompt 2"
    changes += " --kl-coefficient 0.1"
    words = command_line.SMALL.replace("--prompts-per-rollout 4 --samples-per-prompt 4", "")
    other = command_line.run(f"{words} {changes} --num-rollouts 3 --output-dir out --resume", tmp_path / "other")
    for flag, now, before in (
        *(("--lr", 0.5, 0.003), ("--policy-loss", "gspo", "grpo"), ("--seed", 5, 0), ("--prompts-per-rollout", 5, 4)),
        *(("--steps-per-rollout", 1, 2), ("--samples-per-prompt", 2, 4), ("--kl-coefficient", 0.1, 0.0)),
    ):
        assert f"megatron_rl: resumed at step 4 with {flag} {now}: the checkpoint was saved with {before}\n" in other.output()
    assert other.output().count("resumed at step 4") == 7


class Alone(command_line.Command):
    """Without torchrun."""

    def environment(self, rank, num_ranks, port):
        os.environ.pop("GLOO_SOCKET_IFNAME", None)
        return {}


class Early(command_line.Command):
    """A rank whose other rank never comes."""

    def environment(self, rank, num_ranks, port):
        return {**super().environment(rank, num_ranks, port), "WORLD_SIZE": 2}


def listens_on(pid: int) -> set[str]:
    """The addresses at which a process waits for connections."""
    entries = psutil.Process(pid).net_connections("inet")
    return {entry.laddr.ip for entry in entries if entry.status == psutil.CONN_LISTEN}


def test_a_run_of_one_process_listens_on_the_loopback_alone(tmp_path):
    """Its store and its groups ask for no password: nobody on the network may reach them."""
    command = Alone(f"{command_line.ENDLESS} --output-dir out", tmp_path / "logs")
    wait_until(lambda: command_line.has_saved(tmp_path / "out") or not command.ranks[0].is_alive())
    addresses = listens_on(command.ranks[0].pid)
    command.kill_all()
    assert addresses <= {"127.0.0.1", "::1"}, command.output()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_a_rank_waits_for_others_ends_it_with_a_line(tmp_path, number):
    """Catches a rank that answers only when those that never come have been waited for, and one that is gone without a word."""
    command = Early(f"{command_line.ENDLESS} --output-dir out", tmp_path / "logs")
    wait_until(lambda: listens_on(command.ranks[0].pid))
    os.kill(command.ranks[0].pid, number)
    assert command.wait() == [128 + number], command.output()
    name = signal.Signals(number).name
    assert command.output() == f"megatron-rl train: stopped by {name} while it started; nothing was trained\n"


def test_sigterm_while_a_command_imports_ends_it_with_a_line(tmp_path):
    """torch alone takes seconds: a scheduler that changes its mind meanwhile must find a word in the log."""
    line = [sys.executable, "-m", "megatron_rl", "train", *command_line.ENDLESS.split()]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(line, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=log, stderr=log)
    maps = Path(f"/proc/{process.pid}/maps")
    wait_until(lambda: "libtorch" in maps.read_text())
    process.terminate()
    assert process.wait() == 143
    assert (tmp_path / "log").read_text() == "megatron-rl train: stopped by SIGTERM while it started; nothing was trained\n"


def processes_of_session(leader: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


class SlowDisk(command_line.Command):
    """A file is on disk when the test says so: there is time to end a rank meanwhile."""

    def _serve(self, arguments, rank, num_ranks, port):
        os.fsync = lambda file: wait_until((self.folder / "on disk").exists)
        super()._serve(arguments, rank, num_ranks, port)


def test_a_rank_that_is_killed_while_it_saves_takes_everything_along(tmp_path):
    """Out of memory in a checkpoint: catches writers that live on, and copies of sockets that keep the other ranks waiting."""
    command = SlowDisk(f"{command_line.ENDLESS} --output-dir out {TP2}", tmp_path / "logs", 2)
    saves, (survivor, victim) = tmp_path / "out" / "checkpoints", command.ranks
    try:
        wait_until(lambda: any(saves.glob("*.partial/__1_*")) or not survivor.is_alive())
        os.kill(victim.pid, signal.SIGKILL)
        victim.join()
        (tmp_path / "logs" / "on disk").touch()
        assert processes_of_session(victim.pid) == []
        survivor.join(HANG_SECONDS)
        assert survivor.exitcode == 1, "the other rank waited for the dead one"
        assert "RunError: another rank ended, or did not come in time: its own message says why" in command.output()
        assert processes_of_session(survivor.pid) == []
    finally:
        command.kill_all()
