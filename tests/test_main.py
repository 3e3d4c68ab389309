"""`megatron-rl COMMAND` itself: what it prints of an error, and its exit codes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from pathlib import Path

import pytest

from megatron_rl.commands import main as command_line
from megatron_rl.errors import ConfigError, DataError, RunError


def run_without_a_reader(arguments: list[str], error_file: Path) -> None:
    """Standard output is a pipe whose other end is closed, as after `| head`."""
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)
    os.dup2(os.open(error_file, os.O_CREAT | os.O_WRONLY), 2)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
    sys.argv = ["megatron-rl", *arguments]
    sys.exit(command_line.main())


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["explain", "--response-lengths", "1,2,3", "--json"], id="one line of JSON, written when the command ends"),
        pytest.param(["explain", "--response-lengths", ",".join(["2"] * 3000), "--rows", "3000"], id="more than a buffer"),
        pytest.param(["launch-config", "--help"], id="help, after which argparse exits"),
    ],
)
def test_a_command_whose_output_nobody_reads_ends_without_a_word(tmp_path, arguments):
    """`megatron-rl explain ... | head`: SIGPIPE, which a shell shows as 141."""
    process = multiprocessing.get_context("fork").Process(target=run_without_a_reader, args=(arguments, tmp_path / "stderr"))
    process.start()
    process.join()
    assert (process.exitcode, (tmp_path / "stderr").read_text()) == (-signal.SIGPIPE, "")


def test_a_closed_pipe_of_a_command_s_own_work_is_an_error(monkeypatch):
    """A reward that lost its server must not end a run without a word."""

    def lost(arguments):
        raise BrokenPipeError("a socket of the user's own")

    monkeypatch.setattr(command_line, "run_command", lost)
    monkeypatch.setattr(sys, "argv", ["megatron-rl", "train"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(BrokenPipeError, match="a socket of the user's own"):
        command_line.main()
    assert signal.getsignal(signal.SIGPIPE) == signal.SIG_IGN


@pytest.mark.parametrize(("kind", "code", "end"), [(ConfigError, 2, "\\n"), (DataError, 1, "\n"), (RunError, 1, "\n")])
def test_an_error_moves_no_cursor(monkeypatch, capsys, kind, code, end):
    """What a file holds is part of messages: escapes are shown, lines stay lines, and a problem of a ConfigError is one."""

    class Failing:
        @staticmethod
        def add_arguments(parser, arguments):
            pass

        @staticmethod
        def run(args):
            raise kind("first\x1b[2J\r\u2028\nsecond")

    monkeypatch.setattr(command_line, "command_module", lambda name: Failing)
    assert command_line.main(["train"]) == code
    assert capsys.readouterr().err == f"megatron-rl train: {kind.__name__}: first\\x1b[2J\\r\\u2028{end}second\n"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        pytest.param("train --loss_agregation=constant", "did you mean --loss-aggregation?", id="a typo, and underscores"),
        pytest.param(
            "doctor --xyz 1", "--xyz is no flag of megatron-rl doctor: megatron-rl doctor --help lists", id="nothing near"
        ),
        pytest.param("selftest cp2 -3", "megatron-rl selftest takes no argument 'cp2 -3'", id="no flag at all"),
        pytest.param("train --xyz --zyx", "2 problems:", id="both"),
    ],
)
def test_an_unknown_flag_is_refused_with_what_it_may_mean(capsys, line, said):
    assert command_line.main(line.split()) == 2
    assert said in capsys.readouterr().err


def test_a_file_has_a_flag_in_each_line_and_the_last_value_counts(tmp_path, monkeypatch):
    """`train @run.args`, before what reads the words themselves: the loss of a user's own, the preset."""
    seen = []

    class Command:
        @staticmethod
        def add_arguments(parser, arguments):
            seen.append(arguments)
            parser.add_argument("--lr", type=float)
            parser.add_argument("--packed", action="store_true")

        @staticmethod
        def run(args):
            seen.append((args.lr, args.packed))
            return 0

    monkeypatch.setattr(command_line, "command_module", lambda name: Command)
    path = tmp_path / "run.args"
    path.write_text("--lr=0.001\n--packed\n")
    assert command_line.main(["train", f"@{path}", "--lr", "1"]) == 0
    assert seen == [["--lr=0.001", "--packed", "--lr", "1"], (1.0, True)]
