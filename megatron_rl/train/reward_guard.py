"""Runs a user's code: the code may not end the process, and it has a time limit. Its result is not changed."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn, TypeVar

from megatron_rl.errors import RunError

T = TypeVar("T")

# After the limit: how long the code may take to notice the signal, before another thread ends the process.
GRACE_SECONDS = 10.0
# The signal is repeated: code that catches everything and tries again catches the first one too.
SECONDS_BETWEEN_SIGNALS = 1.0
_exit_process = os._exit


@contextlib.contextmanager
def keeps_process_alive(name: str) -> Iterator[None]:
    """RunError for sys.exit and os._exit inside: with exit code 0 a run that trained nothing would look complete.

    Processes that the code forks may end themselves. Not noticed: os.abort, signals, and exits of libraries in C.
    """
    owner = os.getpid()

    def refuse(status: int) -> NoReturn:
        if os.getpid() != owner:
            _exit_process(status)
        raise SystemExit(f"os._exit({status})")

    os._exit = refuse
    try:
        yield
    except SystemExit as error:
        call = error.code if isinstance(error.code, str) and error.code.startswith("os._exit(") else f"sys.exit({error.code!r})"
        raise RunError(f"{name} called {call}: return a value or raise an error instead") from error
    finally:
        os._exit = _exit_process


@contextlib.contextmanager
def keeps_settings_of_torch() -> Iterator[None]:
    """A user's code may turn gradients off or set another default type: both are restored after it."""
    import torch  # not above: the flags of `train` are read without it

    has_gradients, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    try:
        yield
    finally:
        torch.set_grad_enabled(has_gradients)
        torch.set_default_dtype(dtype)


class TimeLimit:
    """Each `call` within the block may take `seconds`; RunError says which one took longer.

    A signal (SIGALRM) interrupts the main thread in Python, in a system call and in a regular expression. Code that goes on
    (it catches everything, uses SIGALRM itself, or does not return from a library in C) ends with the whole process GRACE_SECONDS
    later, after the same message. Not noticed: C code that lets no other thread run.
    """

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._place: str | None = None
        self._deadline = 0.0
        self._change = threading.Condition()
        self._is_over = False
        self._is_main_thread = threading.current_thread() is threading.main_thread()
        self._thread = threading.Thread(target=self._watch, name="time limit of rewards", daemon=True)

    def __enter__(self) -> TimeLimit:
        if self._is_main_thread:
            self._handler = signal.getsignal(signal.SIGALRM)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        with self._change:
            self._is_over = True
            self._change.notify()
        self._thread.join()
        if self._is_main_thread:
            signal.signal(signal.SIGALRM, self._handler)

    def call(self, function: Callable[[], T], place: str) -> T:
        """Returns function(). place: what it does, for the message."""
        with self._change:
            self._place, self._deadline = place, time.monotonic() + self.seconds
            self._change.notify()
        if self._is_main_thread:
            signal.signal(signal.SIGALRM, self._interrupt)  # each time: the code before may have changed it
            signal.setitimer(signal.ITIMER_REAL, self.seconds, SECONDS_BETWEEN_SIGNALS)
        try:
            try:
                return function()
            finally:
                self._place = None  # from here on no signal raises
        except _OutOfTimeError:
            raise RunError(self._message(place)) from None
        finally:
            if self._is_main_thread:
                signal.setitimer(signal.ITIMER_REAL, 0)

    def _interrupt(self, number: int, frame: object) -> None:
        if self._place is not None and time.monotonic() >= self._deadline:
            raise _OutOfTimeError

    def _watch(self) -> None:
        with self._change:
            while not self._is_over:
                place, late = self._place, time.monotonic() - self._deadline - GRACE_SECONDS
                if place is None or late < 0:
                    self._change.wait(None if place is None else -late)
                else:
                    print(f"megatron-rl train: RunError: {self._message(place)}", file=sys.stderr, flush=True)
                    _exit_process(1)

    def _message(self, place: str) -> str:
        return f"{place} has not returned after {self.seconds:g} s: make it faster, or raise --reward-timeout"


class _OutOfTimeError(BaseException):
    """Not an Exception, because a reward may catch those."""
