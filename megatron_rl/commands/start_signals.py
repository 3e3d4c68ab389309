"""SIGTERM and Ctrl-C while a command starts: one line and the shell's exit code at once. It must never be on while a run saves."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any

# A shell's convention: 128 + the signal's number.
SIGNAL_EXIT_CODE = 128
_listening: list[StartSignals] = []


class StartSignals:
    """Until `hand_over`, or the end of the block, a signal ends the process with a line.

    A handler in Python would have to wait: imports take seconds, and a rank that waits for others in C runs no Python for minutes.
    So a thread hears of it through a pipe. Processes that are forked meanwhile are left alone.
    """

    def __init__(self, command: str):
        self._command = command
        self._handlers: dict[int, Any] = {}
        self._received = False

    def __enter__(self) -> StartSignals:
        if threading.current_thread() is not threading.main_thread():
            return self  # signals are the main thread's
        reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        threading.Thread(target=self._listen, args=(reader,), name="signals at start", daemon=True).start()
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:  # a shell starts background jobs with Ctrl-C ignored
                self._handlers[number] = signal.signal(number, self._remember)
        self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=self._stop)
        _listening.append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        hand_over()

    def _stop(self) -> None:
        if self._handlers:
            signal.set_wakeup_fd(self._wakeup)
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            self._handlers = {}
            os.close(self._writer)

    def _remember(self, number: int, frame: object) -> None:
        """The thread acts; without a handler it would hear of nothing."""
        self._received = True

    def _listen(self, reader: int) -> None:
        with open(reader, "rb", buffering=0) as pipe:
            for byte in iter(lambda: pipe.read(1), b""):
                if byte[0] in self._handlers:
                    if os.environ.get("RANK", "0") == "0":
                        name = signal.Signals(byte[0]).name
                        line = f"megatron-rl {self._command}: stopped by {name} while it started; nothing was trained"
                        print(line, file=sys.stderr, flush=True)
                    os._exit(SIGNAL_EXIT_CODE + byte[0])


def hand_over() -> None:
    """From here on the run itself decides what a signal does. Without a StartSignals, and a second time, it does nothing."""
    while _listening:
        started = _listening.pop()
        if started._received:
            time.sleep(10)  # the thread is about to end the process
        started._stop()
