"""`megatron-rl train` from its flags to its exit code: on forked ranks, which start as torchrun's do and skip the imports, and
once through torchrun itself."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import multiprocessing
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from helpers import ROOT, wait_until
from torch.distributed import run as torchrun
from trainer_cases import metrics_of, unlike_metrics

from megatron_rl.arguments import add_megatron_rl_args, validate_megatron_rl_args
from megatron_rl.commands import main as command_line
from megatron_rl.config import LaunchMethod
from megatron_rl.declare import clip_of
from megatron_rl.errors import ConfigError
from megatron_rl.megatron.cpu import import_megatron
from megatron_rl.testing.ranks import HANG_SECONDS
from megatron_rl.train import checkpoints
from megatron_rl.train.option_rules import TrainLaunch, check_effects, train_options, with_group_size
from megatron_rl.train.options import TrainOptions, add_train_args, experts_of, set_preset_defaults
from megatron_rl.validation import flag_of

pytestmark = pytest.mark.megatron

# Small enough for a rollout in a tenth of a second.
SMALL = "--prompts-per-rollout 4 --samples-per-prompt 4 --hidden-size 32 --no-tensorboard"
ENDLESS = f"{SMALL} --num-rollouts 100000 --save-interval 2"


def free_port() -> int:
    """Below those that the system gives to connections: one of them may be another test's before the ranks listen."""
    for port in random.SystemRandom().sample(range(20000, 32000), 100):
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    raise OSError("a hundred ports are taken")


class Command:
    """`megatron-rl train ARGUMENTS` on ranks forked from this process; each a session of its own, as under torchrun."""

    def __init__(self, arguments: str, folder: Path, num_ranks: int = 1):
        port = free_port()
        self.folder = folder
        folder.mkdir(exist_ok=True)
        process = multiprocessing.get_context("fork").Process
        given = [(arguments.split(), rank, num_ranks, port) for rank in range(num_ranks)]
        self.ranks = [process(target=self._serve, args=of_rank, daemon=False) for of_rank in given]
        for rank in self.ranks:
            rank.start()

    def _serve(self, arguments: list[str], rank: int, num_ranks: int, port: int) -> None:
        self._redirect(rank)
        os.environ.update({name: str(value) for name, value in self.environment(rank, num_ranks, port).items()})
        self._train(arguments)

    def _redirect(self, rank: int) -> None:
        os.setsid()
        for name, number in (("stdout", 1), ("stderr", 2)):
            os.dup2(os.open(self.folder / f"{name}.{rank}", os.O_CREAT | os.O_TRUNC | os.O_WRONLY), number)
            setattr(sys, name, open(number, "w", closefd=False))
        logging.getLogger().handlers.clear()  # pytest's

    def _train(self, arguments: list[str]) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        code = command_line.main(["train", *arguments])
        sys.stdout.flush()
        sys.stderr.flush()
        raise SystemExit(code)

    def environment(self, rank: int, num_ranks: int, port: int) -> dict[str, object]:
        """What torchrun tells a rank."""
        sizes = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks}
        return {**sizes, "MASTER_PORT": port, "MASTER_ADDR": "127.0.0.1"}

    def wait(self) -> list[int]:
        """The exit codes. Whoever is left when a run hangs is killed, with its helpers."""
        deadline = time.monotonic() + HANG_SECONDS
        for rank in self.ranks:
            rank.join(max(0.0, deadline - time.monotonic()))
        codes = [rank.exitcode for rank in self.ranks]
        self.kill_all()
        return codes

    def kill_all(self) -> None:
        for rank in self.ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)
            rank.join()

    def output(self, name: str = "stderr", rank: int = 0) -> str:
        return (self.folder / f"{name}.{rank}").read_text()


class Torchrun(Command):
    """torchrun itself, forked from this process, with two ranks that it forks in place of starting interpreters."""

    def _serve(self, arguments: list[str], rank: int, num_ranks: int, port: int) -> None:
        self._redirect(rank)
        config_from_args = torchrun.config_from_args

        def with_forks(args):
            return dataclasses.replace(config_from_args(args)[0], start_method="fork"), self._train, (arguments,)

        torchrun.config_from_args = with_forks
        torchrun.main(["--standalone", "--nproc-per-node", "2", "-m", "megatron_rl", "train", *arguments])


def run(arguments: str, folder: Path, num_ranks: int = 1) -> Command:
    """A command that has ended with exit code 0 on all ranks."""
    command = Command(arguments, folder, num_ranks)
    assert command.wait() == [0] * num_ranks, command.output()
    return command


@pytest.fixture(scope="module", autouse=True)
def imported_megatron() -> Iterator[None]:
    import_megatron()
    import torch._dynamo  # noqa: F401  # an optimiser's first step imports it

    yield


@pytest.fixture(autouse=True)
def in_an_empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def latest_step(run_dir: Path) -> int:
    return int(checkpoints.latest_checkpoint(run_dir / "checkpoints").name.removeprefix("step_"))


def has_saved(run_dir: Path) -> bool:
    return (run_dir / "checkpoints" / "latest").exists()


def fails(arguments: str, capsys) -> tuple[int, str]:
    code = command_line.main(["train", *arguments.split()])
    return code, capsys.readouterr().err


def test_everything_that_is_wrong_is_told_at_once_and_nothing_is_written(tmp_path, capsys, monkeypatch):
    """FB-12, FB-74: one launch for each mistake is one queue for each. Rank 0 speaks for all; a rank that is wrong alone waits."""
    arguments = "--reward os.getcwd --loss-aggregation constant --sequence-parallel --lr 0 --clip-ratio-low 1.5"
    code, message = fails(arguments, capsys)
    assert code == 2 and message.startswith("megatron-rl train: ConfigError: 5 problems:")
    for part in (
        "--reward os.getcwd needs --prompts: a built-in task has its own",
        "--loss-aggregation-divisor",
        "--sequence-parallel needs --tensor-model-parallel-size",
        "--lr 0.0 must be above 0",
        "clip_ratio_low=1.5 must be in [0, 1)",
    ):
        assert part in message
    waits = []
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(command_line.time, "sleep", waits.append)
    code, message = fails("--lr 0", capsys)
    assert code == 2 and "--lr 0.0 must be above 0" in message and waits == [command_line.SECONDS_FOR_RANK_0]
    assert list(tmp_path.iterdir()) == []


REWARD = """
def share_of_a(prompt, response, record):
    assert prompt == record["prompt"] and record["answer"] == "a"
    return response.count("a") / 6
"""


def test_a_user_s_own_prompts_and_reward_are_trained_on_and_told_as_json(tmp_path, monkeypatch):
    """The whole of it on one rank, with flags of a file before those that are typed. A changed setting is a line at start.
    Prompts of other characters must not resume it: the token ids would change their meaning."""
    (tmp_path / "own_reward.py").write_text(REWARD)
    monkeypatch.syspath_prepend(tmp_path)
    lines = [json.dumps({"prompt": text, "answer": "a"}) for text in ("ab", "b", "bab", "abba")]
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    task = "--prompts p.jsonl --reward own_reward.share_of_a --max-new-tokens 6 --policy-loss grpo --output-dir out"
    sizes = "--prompts-per-rollout 4 --samples-per-prompt 4 --hidden-size 32 --lr 1e-2"
    (tmp_path / "run.args").write_text("\n".join(f"{task} {sizes} --num-rollouts=9 --json".split()))
    command = run("@run.args --num-rollouts 8 --no-tensorboard", tmp_path / "logs")
    [line] = command.output("stdout").splitlines()
    summary = json.loads(line)
    rows = metrics_of(tmp_path / "out")
    assert summary["num_rollouts"] == 8 and summary["num_steps"] == len(rows) == 16
    assert summary["samples_seen"] == rows[-1]["documents_seen"] == 8 * 16
    assert summary["reason"] == "all 8 rollouts are done"
    assert Path(summary["plot"]).stat().st_size > 1000 and Path(summary["checkpoint"]).is_dir()
    assert summary["last_reward"] > summary["first_reward"]
    assert "gradient x 1.000000, PASS" in command.output()

    resumed = run(f"{task} {sizes} --lr 0.5 --num-rollouts 9 --no-tensorboard --resume", tmp_path / "logs")
    assert [row["step"] for row in metrics_of(tmp_path / "out")] == list(range(1, 19))
    assert resumed.output("stdout") == "" and "9 rollouts, 18 steps" in resumed.output()
    assert "megatron_rl: resumed at step 16 with --lr 0.5: the checkpoint was saved with 0.01\n" in resumed.output()

    (tmp_path / "p.jsonl").write_text("\n".join([*lines, json.dumps({"prompt": "xyz", "answer": "a"})]))
    refused = Command(f"{task} {sizes} --num-rollouts 11 --resume", tmp_path / "logs")
    assert refused.wait() == [2] and "the checkpoint's token ids would change their meaning" in refused.output()
    assert latest_step(tmp_path / "out") == 18


def share_of_digits(prompt, response, record):
    return sum(character.isdigit() for character in response) / 16


def test_evaluation_and_learning_rate_are_the_same_on_one_rank_and_on_two(tmp_path):
    """An evaluation of three prompts, 16 tokens each, every second rollout, of two steps; a decay to the last of six steps."""
    own, other = write_prompts(tmp_path / "own.jsonl", "1+2=", "3+4="), write_prompts(tmp_path / "e.jsonl", "2+2=", "4+13=", "1=")
    flags = f"{SMALL} --prompts {own} --eval-prompts {other} --save-interval 2 --reward test_train_command.share_of_digits"
    flags += " --num-rollouts 3 --lr 0.01 --lr-warmup-iters 2 --lr-decay-style linear --min-lr 0.002 --steps-per-rollout 2"
    of_one = None
    for name, num_ranks in (("one", 1), ("two", 2)):
        run(f"{flags} --output-dir {name}", tmp_path / "logs", num_ranks)
        rows = metrics_of(name)
        of_one = of_one or rows[0]
        assert [row["learning_rate"] for row in rows] == pytest.approx([0.005, 0.01, 0.008, 0.006, 0.004, 0.002], abs=1e-9)
        assert ["eval/reward" in row for row in rows] == [True, True, False, False, True, True]
        assert all(rows[0][name] == rows[1][name] == of_one[name] for name in ("eval/reward", "eval/response_length"))
    assert 0 < of_one["eval/reward"] <= 1 and 0 < of_one["eval/response_length"] <= 16
    assert of_one["eval/reward"] == pytest.approx(round(of_one["eval/reward"] * 48) / 48)


def test_bad_data_in_the_middle_ends_every_rank_and_the_checkpoint_before_it_goes_on(tmp_path):
    """Exit code 1 with file, line and sample. When the file is repaired the run ends as if nothing had been. FB-80: two ranks
    replay in chunks of hidden states what the logits of one rank recorded: six steps within 1e-5 relative or 1e-6 absolute."""
    run(f"--preset demo {SMALL} --num-rollouts 3 --output-dir recorded --save-rollouts whole.jsonl", tmp_path / "logs")
    lines = (tmp_path / "whole.jsonl").read_text().splitlines(keepends=True)
    lines[2] = lines[2].replace('"tokens": [6', '"tokens": [99', 1)
    (tmp_path / "r.jsonl").write_text("".join(lines))
    replay = f"--preset demo {SMALL} --tensor-model-parallel-size 2 --sequence-parallel --packed --micro-batch-size 3"
    replay += " --fused-lm-head-loss --max-logits-bytes 4096 --output-dir out --rollouts r.jsonl --save-interval 1"
    command = Command(replay, tmp_path / "logs", num_ranks=2)
    assert command.wait() == [1, 1]
    for rank in (0, 1):
        assert "DataError: r.jsonl, line 3, sample 0: tokens: 99 must be below" in command.output(rank=rank)
    assert latest_step(tmp_path / "out") == 4
    shutil.copy(tmp_path / "whole.jsonl", tmp_path / "r.jsonl")
    run(f"{replay} --resume", tmp_path / "logs", num_ranks=2)
    expected = metrics_of(tmp_path / "recorded")
    assert len(expected) == 6 and unlike_metrics(metrics_of(tmp_path / "out"), expected) == []


def test_sigterm_to_all_process_groups_saves_and_resume_goes_on(tmp_path):
    """As torchrun and schedulers send it: catches a last save that fails for want of helpers, and ranks that stop apart."""
    command = Command(f"{ENDLESS} --output-dir out --tensor-model-parallel-size 2", tmp_path / "logs", num_ranks=2)
    wait_until(lambda: has_saved(tmp_path / "out") or not command.ranks[0].is_alive())
    for rank in command.ranks:
        os.killpg(rank.pid, signal.SIGTERM)
    assert command.wait() == [143, 143], command.output()
    assert "stopped by SIGTERM" in command.output()
    rows = metrics_of(tmp_path / "out")
    assert latest_step(tmp_path / "out") == rows[-1]["step"]
    more = rows[-1]["rollout"] + 2
    run(f"{SMALL} --output-dir out --resume --num-rollouts {more}", tmp_path / "logs")
    resumed = metrics_of(tmp_path / "out")
    assert resumed[: len(rows)] == rows and resumed[-1]["rollout"] == more - 1


def test_ctrl_c_on_torchrun_saves_and_ends_it(tmp_path):
    """torchrun answers Ctrl-C with one of its own to each rank and a time limit: the rollout under way, the checkpoint and the
    summary must fit, and the exit code must not be 0."""
    command = Torchrun(f"{ENDLESS} --output-dir out --tensor-model-parallel-size 2", tmp_path / "logs")
    wait_until(lambda: has_saved(tmp_path / "out") or not command.ranks[0].is_alive())
    family = psutil.Process(command.ranks[0].pid).children(recursive=True)
    os.kill(command.ranks[0].pid, signal.SIGINT)
    try:
        (code,) = command.wait()
    finally:
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
    assert len(family) >= 2 and code not in (0, -signal.SIGKILL)
    assert "stopped by SIGINT" in command.output()
    assert latest_step(tmp_path / "out") == metrics_of(tmp_path / "out")[-1]["step"]


# What goes wrong around a run


class Alone(Command):
    """Without torchrun."""

    def environment(self, rank, num_ranks, port):
        os.environ.pop("GLOO_SOCKET_IFNAME", None)
        return {}


def listens_on(pid: int) -> set[str]:
    """The addresses at which a process waits for connections."""
    entries = psutil.Process(pid).net_connections("inet")
    return {entry.laddr.ip for entry in entries if entry.status == psutil.CONN_LISTEN}


def test_a_run_of_one_process_listens_on_the_loopback_alone_and_its_folder_is_its_own_while_it_lives(tmp_path):
    """Its store and its groups ask for no password: nobody on the network may reach them. Catches rows of both runs in one file,
    checkpoints that the other one removes, and a folder that kill -9 left locked."""
    first = Alone(f"{ENDLESS} --output-dir out", tmp_path / "first")
    wait_until(lambda: has_saved(tmp_path / "out") or not first.ranks[0].is_alive())
    assert listens_on(first.ranks[0].pid) <= {"127.0.0.1", "::1"}, first.output()
    second = Command(f"{ENDLESS} --output-dir out --resume", tmp_path / "second")
    assert second.wait() == [2]
    assert "ConfigError: out is in use by another run: wait for it, end it, or name another --output-dir" in second.output()
    first.kill_all()
    steps = [row["step"] for row in metrics_of(tmp_path / "out")]
    assert steps == list(range(1, len(steps) + 1))
    run(f"{SMALL} --num-rollouts {latest_step(tmp_path / 'out') // 2 + 1} --output-dir out --resume", tmp_path / "second")


def test_sigterm_while_a_command_imports_ends_it_with_a_line(tmp_path):
    """torch alone takes seconds: a scheduler that changes its mind meanwhile must find a word in the log."""
    line = [sys.executable, "-m", "megatron_rl", "train", *ENDLESS.split()]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(line, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=log, stderr=log)
    maps = Path(f"/proc/{process.pid}/maps")
    wait_until(lambda: "libtorch" in maps.read_text())
    process.terminate()
    assert process.wait() == 143
    assert (tmp_path / "log").read_text() == "megatron-rl train: stopped by SIGTERM while it started; nothing was trained\n"


# `megatron-rl COMMAND`, and the flags of train: defaults, presets, and each rule with what it rejects and what it allows.


# A file of one rollout.
ROLLOUT = (
    '{"rollout_index": 0, "samples": [{"prompt_id": "a", "tokens": [1, 2], "response_length": 1, "loss_mask": [1], "reward": 1.0, '
    '"advantage": 0.0, "old_log_probs": null, "index": 0}]}\n'
)


def make_parser() -> argparse.ArgumentParser:
    return add_train_args(add_megatron_rl_args(argparse.ArgumentParser(allow_abbrev=False)))


def parse(line: str) -> argparse.Namespace:
    parser = make_parser()
    set_preset_defaults(parser, line.split())
    return parser.parse_args(line.split())


def write_prompts(path, *prompts):
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return path


def options_of(line: str) -> TrainOptions:
    return train_options(with_group_size(vars(parse(line))))


@pytest.fixture(autouse=True)
def empty_directory(tmp_path, monkeypatch):
    """runs/train is the default output directory: no test may depend on one that somebody left."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_without_flags_every_option_has_its_default_and_each_is_a_flag():
    """Catches a default that is written twice, in the field and at the flag, and differs."""
    assert options_of("") == TrainOptions(num_rollouts=140, lr=3e-3)
    assert with_group_size(vars(parse("")))["samples_per_prompt"] == 8
    text = make_parser().format_help()
    for field in dataclasses.fields(TrainOptions):
        assert f"--{field.name.replace('_', '-')}" in text


def value_for(option: dataclasses.Field) -> str:
    """A value of the option's flag, other than its default."""
    choices = [choice for choice in option.metadata["argparse"].get("choices", ()) if choice != option.default]
    return "" if option.default is False else choices[-1] if choices else "1" if option.default is None else str(option.default + 1)


def effects_of(typed: dict) -> list[str]:
    settings = {one.name: one.default for one in dataclasses.fields(TrainOptions)} | {"docs_per_step": None} | typed
    values = {name: value for name, value in settings.items() if name != "docs_per_step"}
    return [*check_effects(TrainLaunch(**values, settings=settings))]


CONDITIONAL = [one for one in dataclasses.fields(TrainOptions) if one.metadata["needs"] or one.metadata["without"]]


@pytest.mark.parametrize("option", CONDITIONAL, ids=lambda one: one.name)
def test_a_flag_that_would_do_nothing_is_refused(option):
    """Without the one that it needs, and beside the one that makes it idle."""
    value = vars(parse(f"{flag_of(option.name)} {value_for(option)}"))[option.name]
    shown, typed = f"{flag_of(option.name)} {value}".removesuffix(" True"), {option.name: value}
    if option.metadata["needs"] is not None:
        needed, why = option.metadata["needs"]
        said = f"{shown} needs {flag_of(needed)}: {why}"
        assert said in effects_of(typed | ({needed: False} if needed == "tensorboard" else {}))
        assert said not in effects_of(typed | {needed: True if needed == "tensorboard" else 2})
    if option.metadata["without"] is not None:
        other, why = option.metadata["without"]
        said = f"{shown} has no effect with {flag_of(other)}: {why}; remove it"
        assert said in effects_of(typed | {other: "given"}) and said not in effects_of(typed)


def test_defaults_that_depend_on_other_flags(tmp_path):
    """Catches a default refused as if it had been given, and 140 rollouts that cut a longer file short."""
    assert [options_of(line).steps_per_rollout for line in ("", "--preset demo", "--docs-per-step 64")] == [2, 2, 1]
    (tmp_path / "r.jsonl").write_text(ROLLOUT)
    assert options_of("--rollouts r.jsonl").num_rollouts is None
    assert options_of("--rollouts r.jsonl --num-rollouts 10").num_rollouts == 10


def test_a_flag_that_is_given_wins_over_the_preset():
    """Catches a preset that overrides what the user wrote, and GSPO's clip of 3e-4 left standing under GRPO."""
    args = parse("--policy-loss grpo --lr 1 --preset demo")
    config = validate_megatron_rl_args(args, LaunchMethod.TRAIN)
    assert (config.policy_loss, args.lr, config.loss_aggregation) == ("grpo", 1.0, "prompt_mean")
    assert clip_of(config) == (0.2, 0.2)


# Rules

REJECTED = [
    # line, what the message says
    ("--lr-decay-style linear --docs-per-step 16", "linear has no effect with --docs-per-step"),
    ("--lr-decay-style linear --rollouts here.jsonl", "linear needs --num-rollouts"),
    ("--save-rollouts here.jsonl", r"--save-rollouts here\.jsonl exists"),
    ("--output-dir old", "--output-dir old holds a run; --resume goes on"),
    # FB-120: one engine, and the policy itself
    ("--importance-correction tis", "tis has .* with the engine .* every ratio is 1; .*--rollouts"),
    ("--off-policy-sequence-delta 0.1 --steps-per-rollout 1", "no effect with one optimiser step"),
    ("--top-p 0", r"--top-p 0\.0 must be above 0 and at most 1; 1 turns it off"),
    ("--top-p 0.9 --sampling-support refuse", "with --sampling-support refuse: .* is off by"),
    ("--sampling-support replay", "--sampling-support replay has no effect: .* add --top-p"),
]


@pytest.fixture
def earlier_files(empty_directory):
    """A rollout file, a finished run, and one that failed before its first step."""
    for folder in ("old/checkpoints/step_00000001", "failed"):
        (empty_directory / folder).mkdir(parents=True)
    texts = {
        "here.jsonl": ROLLOUT,
        "old/checkpoints/latest": "step_00000001\n",
        "failed/metrics.jsonl": "",
    }
    for path, text in texts.items():
        (empty_directory / path).write_text(text)


@pytest.mark.parametrize(("line", "message"), REJECTED)
def test_a_bad_option_is_refused_with_its_flag(earlier_files, line, message):
    with pytest.raises(ConfigError, match=message):
        options_of(line)


ALLOWED = [
    "--top-p 0.9 --sampling-support replay",
    "--sampling-support replay --rollouts here.jsonl",
    "--importance-correction tis --off-policy-sequence-delta 0.1 --rollouts here.jsonl",
    "--docs-per-step many",  # the rules of the loss tell that it is no number
    "--save-rollouts here.jsonl --resume --output-dir old",
    "--output-dir failed",
]


@pytest.mark.parametrize("line", ALLOWED)
def test_a_good_option_is_allowed(earlier_files, line):
    options_of(line)


def test_a_folder_of_experts_has_the_losses_of_routers_that_are_typed():
    balance, kind = {"moe_aux_loss_coeff": 0.1}, {"moe_router_load_balancing_type": "aux_loss"}
    for typed, more in (({}, {}), (balance, kind)):
        assert experts_of(TrainOptions(hf_checkpoint="folder", num_experts=4, **typed)) == typed | more


# The command itself


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("train --loss_agregation=constant", "did you mean --loss-aggregation?"),
        ("selftest cp2 -3", "megatron-rl selftest takes no argument 'cp2 -3'"),
    ],
)
def test_an_unknown_flag_is_refused_with_what_it_may_mean(capsys, line, said):
    assert command_line.main(line.split()) == 2
    assert said in capsys.readouterr().err
