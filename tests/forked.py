"""Work in a fork of this process, which has torch already: a process of its own without the seconds of its start."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Sequence
from tempfile import TemporaryFile

from _pytest.assertion.rewrite import AssertionRewritingHook

SECONDS = 600  # no work here takes longer, however busy the machine is: it hangs


def forked(work: Callable[[], object], seconds: float = SECONDS) -> tuple[int | None, str, str]:
    """(exit code, standard output, standard error). The work returns its exit code, or ends the process; None: after `seconds`."""
    with TemporaryFile("w+") as out, TemporaryFile("w+") as error:

        def child() -> None:
            for stream, number in ((out, 1), (error, 2)):
                os.dup2(stream.fileno(), number)
            sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
            sys.exit(work())

        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join(seconds)
        process.kill()
        for stream in (out, error):
            stream.seek(0)
        return process.exitcode, out.read(), error.read()


def in_fork(work: Callable[[], object], seconds: float = SECONDS) -> tuple[str, str]:
    """(standard output, standard error) of a work that must end well, and returns nothing."""
    code, out, error = forked(work, seconds)
    assert code == 0, out + error[-3000:]
    return out, error


def run_main(words: Sequence[str]) -> None:
    """What `python -m MODULE ...` runs, in this process: a fork."""
    assert words[0] == "-m", words
    sys.argv = ["-m", *words[2:]]
    # pytest's loader, by which its plugins' packages are imported, has no code to run.
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, AssertionRewritingHook)]
    sys.modules.pop(f"{words[1]}.__main__", None)
    runpy.run_module(words[1], run_name="__main__", alter_sys=True)


class ForkedMain(subprocess.Popen):
    """`python -m MODULE ...` as a fork, in a session of its own."""

    def __init__(self, command: Sequence[str], *, cwd: os.PathLike, env: dict[str, str], stdout, **others):
        def child() -> None:
            os.setsid()
            for number in (1, 2):
                os.dup2(stdout.fileno(), number)
            sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))
            os.chdir(cwd)
            os.environ.update(env)
            run_main(command[1:])

        self.args, self.process = command, multiprocessing.get_context("fork").Process(target=child)
        self.process.start()
        self.pid, self.returncode = self.process.pid, None

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        self.returncode = self.process.exitcode
        return self.returncode

    def __del__(self):
        """Of Popen: there is nothing to collect."""


def forget(*packages: str) -> None:
    """For a fork: the next import of these packages and of megatron_rl reads their files again."""
    for name in [name for name in sys.modules if name.split(".")[0] in ("megatron_rl", *packages)]:
        del sys.modules[name]
