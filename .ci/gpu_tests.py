"""Runs test files in several pytest processes at a time, each with files of its own: no worker collects what another one runs.

    python3 .ci/gpu_tests.py --workers 6 --reports DIR tests/test_gpu.py tests/test_losses.py ... -- -m "gpu or kernel" -q

Each process collects its files alone and opens the device alone: an error that stays on the device takes only the tests after it in
its own files. Where pytest-xdist shares out tests, each worker collects all files. It prints {"planned": files}, then what each
process printed and {"files": ..., "rc": ..., "counts": ...}; DIR gets a JUnit report of each. Exit status 1 if a test failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from queue import Empty, SimpleQueue

# More groups than workers even out what sizes of files do not tell; each costs an import of torch.
GROUPS_PER_WORKER = 2
# pytest's own: no test was collected; here a file may have none that is chosen.
NO_TESTS = 5


def main(arguments: Sequence[str] | None = None) -> int:
    given = [*(sys.argv[1:] if arguments is None else arguments)]
    split = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(description="Test files in several pytest processes at a time. After --: words for pytest.")
    parser.add_argument("--workers", type=int, default=1, metavar="COUNT")
    parser.add_argument("--reports", type=Path, required=True, metavar="DIR")
    parser.add_argument("files", nargs="+", type=Path)
    args = parser.parse_args(given[:split])
    groups = groups_of(args.files, args.workers * GROUPS_PER_WORKER)
    print(json.dumps({"planned": [str(path) for group in groups for path in group]}), flush=True)
    run = Run(groups, args.reports, given[split + 1 :])
    for _ in range(args.workers):
        threading.Thread(target=run.work).start()
    left = args.workers
    while left:
        try:
            run.ended.get()  # and not join, after whose interrupt Python 3.11 calls a thread ended
            left -= 1
        except KeyboardInterrupt:  # it reaches the processes of the tests too, which then report what they have
            run.stop()
    return int(run.has_failed)


def groups_of(files: Sequence[Path], number: int) -> list[list[Path]]:
    """At most `number` groups of about the same size of source, the largest first."""
    groups: list[list[Path]] = [[] for _ in range(min(number, len(files)))]
    size = lambda group: sum(path.stat().st_size for path in group)  # noqa: E731
    for path in sorted(files, key=lambda path: (-path.stat().st_size, path)):
        min(groups, key=size).append(path)
    return sorted(groups, key=size, reverse=True)


class Run:
    def __init__(self, groups: Sequence[Sequence[Path]], reports: Path, words: Sequence[str]):
        self.queue: SimpleQueue[tuple[int, Sequence[Path]]] = SimpleQueue()
        for numbered in enumerate(groups):
            self.queue.put(numbered)
        self.reports, self.words = reports, words
        self.printing = threading.Lock()
        self.ended: SimpleQueue[None] = SimpleQueue()
        self.has_failed = False

    def work(self) -> None:
        try:
            with contextlib.suppress(Empty):
                while True:
                    self.run_group(*self.queue.get_nowait())
        finally:
            self.ended.put(None)

    def stop(self) -> None:
        """What has not started stays out."""
        self.has_failed = True
        with contextlib.suppress(Empty):
            while True:
                self.queue.get_nowait()

    def run_group(self, number: int, files: Sequence[Path]) -> None:
        report = f"--junitxml={self.reports / f'tests-{number}.xml'}"
        names = [str(path) for path in files]
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
            command = [sys.executable, "-m", "pytest", *self.words, report, *names]
            done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, check=False)
            output.seek(0)
            printed = output.read()
        counts = counts_of(printed)
        if counts is None and done.returncode != NO_TESTS:
            counts = {"error": 1}
        with self.printing:
            self.has_failed |= done.returncode not in (0, NO_TESTS)
            print(printed, json.dumps({"files": names, "rc": done.returncode, "counts": counts or {}}), sep="\n", flush=True)


def counts_of(printed: str) -> dict[str, int] | None:
    """From pytest's closing line: its XML counts a test that was interrupted as passed. None: the process ended without one."""
    line = next((line for line in reversed(printed.splitlines()) if re.search(r" in [\d.]+s", line)), None)
    if line is None:
        return None
    return {word.replace("errors", "error"): int(number) for number, word in re.findall(r"(\d+) ([a-z]+)", line)}


if __name__ == "__main__":
    sys.exit(main())
