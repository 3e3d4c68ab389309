"""Work in a fork of this process, which has torch already: a process of its own without the seconds of its start."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from tempfile import TemporaryFile

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


def forget(*packages: str) -> None:
    """For a fork: the next import of these packages and of megatron_rl reads their files again."""
    for name in [name for name in sys.modules if name.split(".")[0] in ("megatron_rl", *packages)]:
        del sys.modules[name]
