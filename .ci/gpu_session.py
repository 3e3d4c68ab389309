"""Runs what only a GPU can answer, one stage after another: a fault of one takes neither the time nor the results of another.

    python3 .ci/gpu_session.py --out DIR                    every stage, as long as it takes
    python3 .ci/gpu_session.py --out DIR --seconds 590      the same within ten minutes
    python3 .ci/gpu_session.py --out DIR --dry-run          the smallest form of each stage, on a CPU

It installs nothing, and needs torch, Triton, pytest and pytest-xdist. With --seconds each stage gets a share of the time that is
left, by what it takes on an H100. A stage that runs past its share is interrupted, and what it has printed is kept. DIR gets
session.log with all output, summary.json, written again after each stage, and a JSON file of each benchmark.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parent.parent
# What a process gets to write its report after SIGINT, before SIGKILL.
SECONDS_TO_REPORT = 15.0
# A benchmark starts no case in the last part of its time: one case and the report take about that long.
BENCHMARK_MARGIN = 25.0
MOST_WORKERS = 12
# Of a stage's output, in summary.json and at the end.
LINES_KEPT = 6
GPU_QUERY = "name,driver_version,clocks.sm,clocks.mem,temperature.gpu,power.draw,clocks_throttle_reasons.active"
# The rows of the first stage: the kernels that a loss from logits or a fused head launches, at token and at sequence level.
FIRST_ROWS = [f"{row}, {head}, " for row in ("grpo token_mean", "gspo sample_mean") for head in ("logits", "fused head")]
# Exits with the reason where Transformer Engine's layers cannot be used.
ASK_FOR_TRANSFORMER_ENGINE = (
    "import sys; from megatron_rl.megatron.cpu import import_megatron; import_megatron(); "
    "from megatron_rl.megatron.model import has_transformer_engine as works; "
    "sys.exit(None if works() else 'Transformer Engine does not work here')"
)


@dataclass(frozen=True, slots=True)
class Session:
    out: Path
    scratch: Path
    is_dry: bool


@dataclass(frozen=True, slots=True)
class Stage:
    """`commands(session, seconds)`: words for Python, one list for each process. seconds: what the stage gets, None: no limit."""

    name: str
    share: float
    """Seconds on an H100."""
    commands: Callable[[Session, float | None], list[list[str]]]
    needs: str = ""
    """A Python program that ends with a reason where the stage cannot run."""


def selftest(*words: str) -> list[str]:
    return ["-m", "megatron_rl", "selftest", *words]


def first(session: Session, seconds: float | None) -> list[list[str]]:
    backend = "torch" if session.is_dry else "triton"
    return [selftest(*[word for row in FIRST_ROWS for word in ("--row", row + backend)])]


def gpu_test_files() -> list[str]:
    """The files that may hold a `gpu` or a `kernel` test; loss_backends.py and ON_BACKENDS give their users tests of kernels."""
    marks = re.compile(r"mark\.(gpu|kernel)\b|from loss_backends import|\bON_BACKENDS\b")
    paths = sorted((ROOT / "tests").glob("test_*.py"))
    return [path.relative_to(ROOT).as_posix() for path in paths if marks.search(path.read_text(encoding="utf-8"))]


def tests(session: Session, seconds: float | None) -> list[list[str]]:
    if session.is_dry:
        return [["-m", "pytest", "-q", "--maxfail", "3", "-k", "dtypes_and_strides", "tests/test_losses.py"]]
    workers = str(min(MOST_WORKERS, os.cpu_count() or 1))
    # One file, one worker: an error that stays on the device takes only the tests after it in that worker.
    shared = ["-n", workers, "--dist", "loadfile", "--require", "gpu", "-m", "gpu or kernel"]
    return [["-m", "pytest", "-q", *shared, *gpu_test_files()]]


def whole_selftest(session: Session, seconds: float | None) -> list[list[str]]:
    return [selftest(*(["--row", "token_mean, logits"] if session.is_dry else []))]


def transformer_engine(session: Session, seconds: float | None) -> list[list[str]]:
    """Short trainings, which take its layers where they work: on one GPU, and on two in each layout that two have. Not selftest:
    these layers round float32 products to TF32, a thousand times its tolerance."""
    two = [
        ["--tensor-model-parallel-size", "2", "--sequence-parallel"],
        ["--context-parallel-size", "2"],
        ["--pipeline-model-parallel-size", "2"],
        ["--use-distributed-optimizer"],
    ]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    commands = [training(session, "demo"), training(session, "moe")]
    if count_gpus() > 1:
        commands += [[*launcher, *training(session, "demo", *words)] for words in two]
        commands.append([*launcher, *training(session, "moe", "--expert-model-parallel-size", "2")])
    return commands


def training(session: Session, preset: str, *words: str) -> list[str]:
    run = ["--preset", preset, "--num-rollouts", "5", "--output-dir", str(session.scratch / "te"), "--overwrite"]
    return ["-m", "megatron_rl", "train", *run, *words]


def count_gpus() -> int:
    return len(ask("nvidia-smi", "--query-gpu=name", "--format=csv,noheader"))


def benchmark(kind: str, *smallest: str) -> Callable[[Session, float | None], list[list[str]]]:
    def commands(session: Session, seconds: float | None) -> list[list[str]]:
        limit = 0.0 if seconds is None else max(seconds - BENCHMARK_MARGIN, 1.0)
        size = ["--device", "cpu", "--rounds", "1", *smallest] if session.is_dry else []
        return [["-m", "benchmarks", kind, *size, "--output-dir", str(session.out), "--time-limit", f"{limit:.0f}"]]

    return commands


def demo(session: Session, seconds: float | None) -> list[list[str]]:
    few = ["--num-rollouts", "2"] if session.is_dry else []
    return [["-m", "megatron_rl", "train", "--preset", "demo", "--output-dir", str(session.scratch / "demo"), *few]]


STAGES = {
    stage.name: stage
    for stage in (
        Stage("first", 25.0, first),
        Stage("tests", 120.0, tests),
        Stage("selftest", 50.0, whole_selftest),
        Stage("te", 60.0, transformer_engine, ASK_FOR_TRANSFORMER_ENGINE),
        Stage("losses", 150.0, benchmark("losses", "--case", "T 64, V 512", "--provider", "ours, torch", "--provider", "eager")),
        Stage("head", 100.0, benchmark("head", "--shape", "40,8,70", "--provider", "ours", "--provider", "three matmuls")),
        Stage("hosts", 60.0, benchmark("hosts", "--case", "miles", "--shape", "64,64,512")),
        Stage("demo", 40.0, demo),
    )
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if every stage that was asked for ended well, else 1. A stage that cannot run here is left out with its reason."""
    parser = argparse.ArgumentParser(description="GPU tests, selftest, benchmarks, a training; each has a share of the time.")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="Where the results are written.")
    parser.add_argument("--seconds", type=float, metavar="NUMBER", help="Time for everything. Default: no limit.")
    parser.add_argument("--stages", default=",".join(STAGES), help=f"Some of {','.join(STAGES)}. Default: all.")
    parser.add_argument("--dry-run", action="store_true", help="The smallest form of each stage, on a CPU.")
    args = parser.parse_args(arguments)
    names = args.stages.split(",")
    if unknown := [name for name in names if name not in STAGES]:
        parser.error(f"--stages {args.stages}: no stage {unknown[0]!r}; there are {','.join(STAGES)}")
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, (args.out / "session.log").open("w", encoding="utf-8") as log:
        session = Session(args.out.resolve(), Path(scratch), args.dry_run)
        return run_stages([STAGES[name] for name in names], session, args.seconds, log)


def run_stages(stages: Sequence[Stage], session: Session, seconds: float | None, log: TextIO) -> int:
    end = None if seconds is None else time.monotonic() + seconds
    summary: dict[str, Any] = {"python": sys.version.split()[0], "gpu": ask_gpu(), "dry_run": session.is_dry, "stages": {}}
    for number, stage in enumerate(stages):
        share = None
        if end is not None:
            left = end - time.monotonic() - SECONDS_TO_REPORT
            share = max(left, 0.0) * stage.share / sum(other.share for other in stages[number:])
        say(f"[{number + 1}/{len(stages)}] {stage.name}" + ("" if share is None else f", at most {share:.0f} s"), log)
        found = run_stage(stage, session, share, log)
        summary["stages"][stage.name] = found | {"gpu_after": ask_gpu()}
        (session.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
        say(f"{stage.name}: {found['verdict']}, {found['seconds']:.1f} s", log)
        for line in found["output_ends"]:
            say(f"    {line[:150]}", log)
    verdicts = [found["verdict"] for found in summary["stages"].values()]
    say(f"{', '.join(f'{verdicts.count(verdict)} {verdict}' for verdict in dict.fromkeys(verdicts))}; results: {session.out}", log)
    return 0 if set(verdicts) <= {"ok", "left out"} else 1


def run_stage(stage: Stage, session: Session, seconds: float | None, log: TextIO) -> dict[str, Any]:
    started, verdict, output = time.monotonic(), "ok", ""
    commands = stage.commands(session, seconds)
    if stage.needs:
        code, output, _ = run_process(["-c", stage.needs], session, None)
        if code != 0:
            verdict, commands = "left out", []
    for words in commands:
        left = None if seconds is None else seconds - (time.monotonic() - started)
        code, printed, was_stopped = run_process(words, session, left)
        output += printed
        log.write(f"\n===== {stage.name}: python {' '.join(words)}\n{printed}\n")
        if was_stopped or code != 0:
            verdict = "stopped" if was_stopped else "FAILED"
        if was_stopped:
            break
    lines = [line for line in output.splitlines() if line.strip()]
    took = round(time.monotonic() - started, 1)
    return {"verdict": verdict, "seconds": took, "share": seconds, "output_ends": lines[-LINES_KEPT:]}


def run_process(words: Sequence[str], session: Session, seconds: float | None) -> tuple[int, str, bool]:
    """(exit status, output, whether it ran past its time). In a process group of its own, which ends with it."""
    path = session.scratch / "output"
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(paths)}
    with path.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # A shell starts background jobs with Ctrl-C ignored, and a stage past its time is asked to report by it.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        was_stopped = False
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            was_stopped = True
            os.killpg(process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(SECONDS_TO_REPORT)
        finally:  # what it left running too
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return process.wait(), path.read_text(encoding="utf-8", errors="replace"), was_stopped


def ask_gpu() -> list[str]:
    return ask("nvidia-smi", f"--query-gpu={GPU_QUERY}", "--format=csv,noheader")


def ask(*command: str) -> list[str]:
    """The lines that a program prints; none where it is missing, fails or hangs."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []


def say(line: str, log: TextIO) -> None:
    print(line, flush=True)
    log.write(line + "\n")
    log.flush()


if __name__ == "__main__":
    sys.exit(main())
