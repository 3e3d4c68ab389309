"""`.ci/gpu_session.py`: stages, budgets and results, on a CPU."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import GPU_FILES, ROOT
from forked import ForkedMain

from benchmarks import machine
from benchmarks.__main__ import build_parser, providers_of
from benchmarks.problems import PRESETS
from megatron_rl.megatron.cpu import import_megatron


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


SCRIPT = ROOT / ".ci" / "gpu_session.py"
gpu_session, gpu_tests, profile_kernels = load("gpu_session"), load("gpu_tests"), load("profile_kernels")
SIX_VALUES = "NVIDIA H100 80GB HBM3, 1980 MHz, 2619 MHz, 40, 120.00 W, 0x0000000000000000"

ONE_FILE_A_PROCESS = """
import sys
sys.argv[:1] = []
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
import gpu_tests
gpu_tests.GROUPS_PER_WORKER = 4
sys.exit(gpu_tests.main(sys.argv[1:]))
"""
# Two launches as `ncu --csv --page raw` prints them, after a line of the program itself.
NCU_OUTPUT = """\
==PROF== Connected to process 7
"ID","Kernel Name","dram__bytes_read.sum","gpu__time_duration.sum","launch__registers_per_thread"
"","","Gbyte","us","register/thread"
"0","row_statistics_kernel(int)","4.2","1,000.5","64"
"1","logits_gradient_kernel(int)","8.4","2,100","80"
"""


@pytest.fixture
def session(tmp_path) -> gpu_session.Session:
    for name in ("out", "scratch"):
        (tmp_path / name).mkdir()
    return gpu_session.Session(tmp_path / "out", tmp_path / "scratch", is_dry=False)


@pytest.mark.parametrize("factor", [1.0, 1.5], ids=["as predicted", "the first three half as long again"])
def test_no_stage_that_takes_what_was_predicted_is_cut_and_the_last_one_ends_in_time(factor):
    """A benchmark that its limit cuts fails its stage, and judges no target. Nothing has been measured: so there is slack, and the
    benchmarks, which give results from the start, lend it. The whole selftest takes what is left."""
    stages, spent = list(gpu_session.STAGES.values()), 0.0
    for number, one in enumerate(stages[:-1]):
        budget = gpu_session.budget_of(stages[number:], 590.0, spent)
        takes = one.expected * (factor if number < 3 else 1.0)
        enough = takes if factor == 1.0 or one.least is None else one.least
        assert budget - one.margin >= enough, one.name
        spent += min(takes, budget)
    last = gpu_session.budget_of(stages[-1:], 590.0, spent)
    assert last > 30.0 or factor > 1.0
    assert spent + last + gpu_session.SECONDS_TO_REPORT + gpu_session.SECONDS_TO_END <= 590.0 + 1e-6


def test_seconds_of_an_earlier_session_take_the_place_of_predictions(tmp_path, capsys):
    ends = {"tests": ("ok", 80.0), "losses": ("ok", 60.0), "train": ("stopped", 70.0), "head": ("left out", 0.0)}
    earlier = {"dry_run": False, "stages": {name: {"verdict": verdict, "seconds": took} for name, (verdict, took) in ends.items()}}
    found = {one.name: one for one in gpu_session.with_measured(list(gpu_session.STAGES.values()), earlier)}
    assert (found["tests"].expected, found["tests"].slack) == (80.0, gpu_session.MEASURED_SLACK)
    assert (found["losses"].expected, found["losses"].least) == (60.0, 60.0)
    assert (found["train"].expected, found["train"].slack) == (70.0, gpu_session.SLACK), "it would have taken longer"
    assert found["head"] == gpu_session.STAGES["head"] and found["first"] == gpu_session.STAGES["first"]
    (tmp_path / "old.json").write_text(json.dumps(earlier | {"dry_run": True}))
    with pytest.raises(SystemExit):
        gpu_session.main(["--out", str(tmp_path), "--measured", str(tmp_path / "old.json")])
    assert "must be the summary.json of a session on a GPU (ValueError: it is of --dry-run" in capsys.readouterr().err


def test_checkouts_of_peers_reach_the_benchmarks(tmp_path):
    """And one that is missing is named before anything runs."""
    session = gpu_session.Session(tmp_path, tmp_path, False, ("verl=/checkouts/verl",))
    for name in ("losses", "head"):
        command = gpu_session.STAGES[name].command(session, 100.0)
        assert command[-2:] == ["--peer", "verl=/checkouts/verl"]
    (line,) = [line for line in gpu_session.preflight(session, gpu_session.Gpu())["missing"] if "come as checkouts" in line]
    assert "fast_llm (losses)" in line and "verl (" not in line


def stage(name: str, program: str, read=lambda session, output: {"passed": len(output)}, expected=1.0, needs=()):
    return gpu_session.Stage(name, expected, lambda session, budget: [sys.executable, "-c", program], read, needs)


def run(stages, session, monkeypatch, seconds=None, to_report=3.0) -> tuple[int, dict[str, dict], str]:
    monkeypatch.setattr(gpu_session, "STAGES", {stage.name: stage for stage in stages})
    monkeypatch.setattr(gpu_session, "SECONDS_TO_REPORT", to_report)
    with (session.out / "session.log").open("w") as log:
        code = gpu_session.run_stages(stages, session, seconds, log)
    return code, json.loads((session.out / "summary.json").read_text())["stages"], (session.out / "session.log").read_text()


@pytest.mark.slow
def test_no_stage_takes_the_time_or_the_result_of_another(session, monkeypatch):
    """One fails, one hangs with a child, one prints nothing that can be read, one lacks a package; the last runs all the same."""
    child = session.scratch / "child"
    sleep = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)'])"
    says = f"print('before it hangs', flush=True); open({str(child)!r}, 'w').write(str(child.pid))"
    hangs = f"import subprocess, sys; child = {sleep}; {says}; child.wait()"
    stages = [
        stage("fails", "raise SystemExit('no device')"),
        stage("hangs", hangs, expected=3.0),
        stage("silent", "", gpu_session.read_selftest),
        stage("lacking", "", needs=("matplotlib",)),
        stage("good", "print('fine')"),
    ]
    monkeypatch.setattr(gpu_session, "is_there", lambda name: name != "matplotlib")
    code, found, log = run(stages, session, monkeypatch, seconds=20.0)
    assert code == 1
    verdicts = {"fails": "FAILED", "hangs": "stopped", "silent": "FAILED", "lacking": "left out", "good": "ok"}
    assert {name: result["verdict"] for name, result in found.items()} == verdicts
    assert "no device" in log and found["lacking"]["reason"] == "matplotlib is missing"
    assert "ValueError: no row was started" in found["silent"]["reason"]
    assert not Path(f"/proc/{child.read_text()}").exists()
    assert "before it hangs" in log and found["hangs"]["output_ends"][-1] == "KeyboardInterrupt"
    # What the first stages left over went to the last one: more than its fifth of the time, and than its share at the start.
    assert found["good"]["budget"] > 20.0 / 7


# The largest source runs first.
TEST_FILES = {
    "test_lost.py": "import os\ndef test_lost(): os.abort()\n" + "#" * 3000,
    "test_some.py": "def test_good(): pass\ndef test_bad(): assert 1 == 2\n" + "#" * 2000,
    "test_endless.py": "import pathlib, time\ndef test_endless():\n    pathlib.Path('{here}').touch()\n    time.sleep(600)\n"
    + "#" * 1000,
    "test_late.py": "def test_late(): pass\n",
}


@pytest.mark.slow
def test_tests_that_are_stopped_are_still_counted(session, monkeypatch):
    """Each process collects its own files. One that is lost takes no other's tests, and files that did not start are named."""
    here = session.scratch / "the endless test runs"
    paths = [session.scratch / name for name in TEST_FILES]
    for path in paths:
        path.write_text(TEST_FILES[path.name].replace("{here}", str(here)))
    monkeypatch.setattr(gpu_session, "gpu_test_files", lambda: [*map(str, paths)])
    monkeypatch.setattr(gpu_session, "MOST_WORKERS", 1)
    command = gpu_session.tests_command(session, None)
    command = [*command[: command.index("--") + 1], "-c", os.devnull, "-p", "no:cacheprovider"]
    command = [sys.executable, "-c", ONE_FILE_A_PROCESS, *command[1:]]
    really_wait = gpu_session.wait

    def wait(process, seconds):
        while seconds is None and not here.exists():
            assert process.poll() is None
            time.sleep(0.05)
        return seconds is not None and really_wait(process, seconds)

    monkeypatch.setattr(gpu_session, "wait", wait)
    tests = gpu_session.Stage("tests", 1.0, lambda session, budget: command, gpu_session.read_tests, ())
    _, found, log = run([tests], session, monkeypatch, to_report=120.0)
    found = found["tests"]
    assert found["verdict"] == "stopped" and "KeyboardInterrupt" in log and "collected 2 items" in log
    assert (found["passed"], found["failed"], found["error"]) == (1, 1, 1)
    assert "assert 1 == 2" in found["failures"][0] and "test_lost.py: pytest ended with -6" in found["failures"][1]
    assert found["unfinished"] == str(session.scratch / "test_late.py")


def test_files_are_shared_out_by_their_size(tmp_path):
    sizes = {"a": 100, "b": 60, "c": 50, "d": 10}
    for name, size in sizes.items():
        (tmp_path / name).write_text("#" * size)
    groups = gpu_tests.groups_of([tmp_path / name for name in sizes], 2)
    assert [[path.name for path in group] for group in groups] == [["a", "d"], ["b", "c"]]


def test_what_ncu_prints_is_read_in_bytes_and_nanoseconds():
    first, second = profile_kernels.read_launches(NCU_OUTPUT)
    assert first == {"kernel": "row_statistics_kernel", "nanoseconds": 1000500.0, "bytes_read": 4.2e9, "registers": 64.0}
    assert second["kernel"] == "logits_gradient_kernel" and second["nanoseconds"] == 2.1e6
    assert profile_kernels.read_launches("==ERROR== no counters") == []


def test_of_the_page_of_ncu_a_reader_sees_the_metrics_alone():
    """It has columns of the device too, and what the program prints stands around it."""
    lines = [line.replace('","', '","of the device","', 1) if line.startswith('"') else line for line in NCU_OUTPUT.splitlines()]
    shown = profile_kernels.with_asked_columns("\n".join([*lines, '"a line"', "after"])).splitlines()
    assert shown[0] == "==PROF== Connected to process 7" and shown[5:] == ['"a line"', "after"]
    assert shown[1] == "ID  Kernel Name  dram__bytes_read.sum  gpu__time_duration.sum  launch__registers_per_thread"
    assert shown[2:4] == ["-  -  Gbyte  us  register/thread", "0  row_statistics_kernel(int)  4.2  1,000.5  64"]
    assert profile_kernels.with_asked_columns("no page") == "no page"


FAKE_NCU = """#!/bin/sh
echo "==WARNING== Unable to access the following 6 metrics"
echo '"a line that the program prints"'
case "$*" in
  *{without_rights}*) echo "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access the counters" ;;
  *one_read_kernel*) echo "==ERROR== no counters" ;;
  *unit_gradient_kernel*) echo "left out: gspo: CUDA out of memory"; echo "==ERROR== The application returned an error"; exit 1 ;;
  *scaled_exp_kernel*) sleep 600 ;;
  *) cat {output} ;;
esac
"""


def profile_with(session, monkeypatch, without_rights: str, seconds: float) -> tuple[int, dict, str]:
    (session.scratch / "output").write_text(NCU_OUTPUT)
    ncu = session.scratch / "ncu"
    ncu.write_text(FAKE_NCU.format(output=session.scratch / "output", without_rights=without_rights))
    ncu.chmod(0o755)
    monkeypatch.setattr(gpu_session, "find_ncu", lambda: str(ncu))
    profile = gpu_session.Stage("profile", 1.0, gpu_session.profile_command, gpu_session.read_profile, ())
    code, found, log = run([profile], session, monkeypatch, seconds=seconds)
    return code, found["profile"], log


def test_each_kernel_is_profiled_whatever_happens_to_the_others(session, monkeypatch):
    """One call of ncu sees no launch, one fails, one hangs: those of the others are kept, by the name of the kernel. Warnings come
    first."""
    code, found, log = profile_with(session, monkeypatch, "nothing", 10.0)
    assert code == 1 and found["verdict"] == "FAILED" and log.count("===== ") == 1 + len(profile_kernels.KERNELS)
    assert list(found["launches"]) == ["row_statistics_kernel", "logits_gradient_kernel"]
    assert len(found["launches"]["row_statistics_kernel"]) == 2
    no_launch, failed, hung = found["failures"]
    assert "one_read_kernel: ncu saw no launch of it; its output ends: " in no_launch and "==ERROR== no counters" in no_launch
    assert failed.startswith("unit_gradient_kernel: left out: gspo: CUDA out of memory; ncu ended with 1: ")
    assert hung.startswith("scaled_exp_kernel: ncu hangs: stopped after")


def test_counters_that_may_not_be_read_are_named_with_what_to_do_and_asked_for_once(session, monkeypatch):
    _, found, log = profile_with(session, monkeypatch, "row_statistics_kernel", 60.0)
    assert found["verdict"] == "FAILED" and len(found["failures"]) == len(profile_kernels.KERNELS)
    assert all("ERR_NVGPUCTRPERM): run as root, or load the driver with" in line for line in found["failures"])
    assert log.count("==ERROR== ERR_NVGPUCTRPERM") == 1


@pytest.mark.parametrize("profiled", profile_kernels.KERNELS, ids=lambda profiled: profiled.kernel)
def test_each_profiled_kernel_has_a_case_and_a_provider(profiled):
    """The names that the benchmarks give on a GPU; the first provider of the first case is the one that is profiled."""
    cases = [case for case in PRESETS[profiled.benchmark]["cuda"]["quick"] if profiled.case in case.title]
    options = build_parser().parse_args(profiled.command(9.0)[3:])
    assert options.kind == profiled.benchmark and options.time_limit == 9.0
    assert providers_of(cases[0], "cuda", options)[0].name == profiled.provider
    assert cases[0].loss == "grpo" or profiled.kernel != "one_read_kernel"


def test_every_test_for_a_gpu_lies_in_a_file_that_is_run(request):
    assert request.config.stash[GPU_FILES] <= set(gpu_session.gpu_test_files())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stages", "tests,speed"], "no stage 'speed'; there are first,tests,train"),
        (["--seconds", "0"], "--seconds 0 must be above 0"),
    ],
)
def test_a_wrong_setting_is_named(arguments, message, tmp_path, capsys):
    with pytest.raises(SystemExit):
        gpu_session.main(["--out", str(tmp_path), *arguments])
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.megatron
def test_the_smallest_form_of_every_stage_runs(tmp_path, monkeypatch, capfd):
    """Commands of the package are forks, which have torch and Megatron already; scripts of .ci/ are processes."""
    start = subprocess.Popen
    monkeypatch.setattr(
        gpu_session.subprocess, "Popen", lambda command, **how: (ForkedMain if command[1] == "-m" else start)(command, **how)
    )
    import_megatron()
    code = gpu_session.main(["--out", str(tmp_path), "--dry-run"])
    shown = capfd.readouterr().out
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert code == 0, shown
    assert {name: found["verdict"] for name, found in summary["stages"].items()} == dict.fromkeys(gpu_session.STAGES, "ok")
    assert summary["stages"]["first"]["passed"] > 4 and "reason" in summary["stages"]["first"]
    assert summary["stages"]["selftest"]["passed"] > 20 and summary["stages"]["tests"]["passed"] > 0
    assert summary["stages"]["train"]["steps"] == 4 and summary["stages"]["losses"]["medians_ms"]
    assert len(shown.splitlines()) < 60 and len(list(tmp_path.iterdir())) <= 8


def test_a_selftest_that_is_cut_keeps_the_rows_that_ended_and_names_the_one_that_ran(session):
    lines = [{"setting": {}}, {"running": "one"}, {"row": {"name": "one", "passed": True, "cause": ""}}, {"running": "two"}]
    output = "".join(json.dumps(line) + "\n" for line in lines) + "Traceback of whoever ended it\n"
    assert gpu_session.read_selftest(session, output) == {"passed": 1, "failed": 0, "failures": [], "unfinished": "cut in two"}
    ended = {"row": {"name": "two", "passed": False, "cause": "1/cp"}}, {"result": {"passed": False, "rows": 2}}
    output += "".join(json.dumps(line) + "\n" for line in ended)
    assert gpu_session.read_selftest(session, output) == {"passed": 1, "failed": 1, "failures": ["two: 1/cp"]}


# The machine


WITH_KERNELS = "first, tests, losses, profile, head"


def without(name: str, monkeypatch, tmp_path) -> None:
    """Takes away what a stage needs of the machine."""
    tools = {machine.COMPILER: ("gcc", "clang", "cc"), machine.NCU: ("ncu",)}.get(name, ())
    which = shutil.which
    monkeypatch.setattr(machine.shutil, "which", lambda tool, **where: None if tool in tools else which(tool, **where))
    monkeypatch.delenv("CC", raising=False)
    if name == machine.HEADERS:
        monkeypatch.setattr(machine.sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path / "no headers")})
    if name == machine.DRIVER:
        monkeypatch.delenv("TRITON_LIBCUDA_PATH", raising=False)
        monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
        monkeypatch.setattr(machine, "ask", lambda command, seconds: machine.Answer("libc.so.6 => /lib/libc.so.6"))


@pytest.mark.parametrize(
    ("name", "remedy", "stages"),
    [
        (machine.COMPILER, "install gcc (apt-get install gcc), or set CC", WITH_KERNELS),
        (machine.HEADERS, "apt-get install python3", WITH_KERNELS),
        (machine.DRIVER, "set TRITON_LIBCUDA_PATH to the folder of the driver's", WITH_KERNELS),
        (machine.NCU, "it comes with the CUDA toolkit", "profile"),
    ],
)
def test_what_the_machine_lacks_is_named_and_takes_away_the_stages_that_need_it(
    name, remedy, stages, session, monkeypatch, tmp_path
):
    """Training in torch and the selftest, whose rows fail one by one, run without a compiler."""
    for part in [*machine.PARTS_OF_THE_MACHINE]:
        if part != name:
            monkeypatch.setitem(machine.PARTS_OF_THE_MACHINE, part, lambda: None)
    without(name, monkeypatch, tmp_path)
    found = gpu_session.preflight(session, gpu_session.Gpu())
    assert name in found["lacks"]
    (line,) = [line for line in found["missing"] if line.startswith(f"{name} is missing")]
    assert f"without it these stages are left out: {stages}; " in line and remedy in line
    lacking = dataclasses.replace(session, lacks=frozenset(found["lacks"]))
    train = gpu_session.STAGES["train"].command(lacking, 9.0)
    assert ("torch" in train) == (name != machine.NCU)


def test_a_compiler_is_looked_for_as_triton_does(monkeypatch):
    """$CC, then gcc, then clang; a machine with cc alone has none for it."""
    monkeypatch.setattr(machine.shutil, "which", lambda tool: tool if tool == "cc" else None)
    monkeypatch.delenv("CC", raising=False)
    assert machine.why_no_compiler() == "Triton does not look for cc: set CC=cc"
    monkeypatch.setenv("CC", "cc")
    assert machine.why_no_compiler() is None
    monkeypatch.setenv("CC", "gcc-99")
    assert "CC=gcc-99 is no program" in machine.why_no_compiler()


@pytest.mark.parametrize(("version", "is_named"), [("3.3.1", True), ("3.6.0", False), ("4.0", True), (None, False)])
def test_a_triton_that_is_not_tested_is_named(version, is_named):
    problem = machine.problem_of_triton(version)
    assert (problem is not None) == is_named
    assert (
        not is_named or f"triton {version} is none with which the kernels are compiled in tests: install one of 3.4, 3.5" in problem
    )


def fake_program(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"echo '{SIX_VALUES}'", {"name": "NVIDIA H100 80GB HBM3", "clocks.sm": "1980 MHz"}),
        (
            f"echo 'WARNING: infoROM is corrupted at gpu 0000:01:00.0'; echo '{SIX_VALUES}'; echo 'WARNING: again'",
            {"power.draw": "120.00 W"},
        ),
        ("echo Insufficient Permissions; exit 4", {"error": "nvidia-smi ended with 4: Insufficient Permissions"}),
        ("echo No devices were found", {"error": "nvidia-smi answers 'No devices were found'"}),
        ("sleep 600", {"error": "nvidia-smi hangs: stopped after 0 s"}),
        (None, {"error": "nvidia-smi is missing"}),
    ],
    ids=["answers", "warns first", "lacks rights", "finds nothing", "hangs", "is missing"],
)
def test_nvidia_smi_that_does_not_answer_is_named(text, found, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin" if text else str(tmp_path))
    if text:
        fake_program(tmp_path, "nvidia-smi", text)
    if text == "sleep 600":
        monkeypatch.setattr(machine, "SECONDS_FOR_NVIDIA_SMI", 0.2)
    gpu = machine.Gpu()
    assert found.items() <= gpu.read().items()
    if text == "sleep 600":
        monkeypatch.setattr(machine, "ask", lambda *_: pytest.fail("it is asked again"))
        assert gpu.read() == found


class Unkillable:
    """Of a program in an uninterruptible call of a driver: no signal ends it."""

    pid, returncode = 2**22 + 1, None  # above the largest pid

    def __init__(self, *_, **__):
        self.waits: list[float | None] = []

    def communicate(self, timeout=None):
        return self.wait(timeout)

    def wait(self, timeout=None):
        self.waits.append(timeout)
        raise subprocess.TimeoutExpired("nvidia-smi", timeout)


def test_a_process_that_no_signal_ends_is_left_behind_and_named(session, monkeypatch):
    """Each wait has a limit, that after SIGKILL too."""
    monkeypatch.setattr(subprocess, "Popen", Unkillable)
    assert "hangs: stopped after 1 s, and it does not end after SIGKILL" in machine.ask(["nvidia-smi"], 1.0).error
    process = Unkillable()
    assert gpu_session.end_group(process) is False and None not in process.waits
    code, found, _ = run([stage("hangs", ""), stage("later", "")], session, monkeypatch, seconds=100.0)
    assert code == 1 and list(found) == ["hangs", "later"]
    assert found["hangs"]["verdict"] == "stopped" and "does not end after SIGKILL" in found["hangs"]["reason"]


# A driver that fails

# A torch whose calls of the device are counted, and of which one may fail.
FAKE_TORCH = """
import json, os, pathlib
counter = pathlib.Path(os.environ["FAKE_DRIVER"])
class cuda:
    def __getattr__(self, name):
        def call(*arguments):
            number, failing = json.loads(counter.read_text())
            counter.write_text(json.dumps([number + 1, failing]))
            if number == failing:
                raise RuntimeError(f"CUDA error in torch.cuda.{name}: unspecified launch failure")
        return call
cuda = cuda()
"""
ON_DEVICE = "import torch; torch.cuda.init(); torch.cuda.get_device_properties(0); torch.cuda.synchronize(); print('fine')"
STAGES_OF_A_FAKE = ("first", "second", "third")


class Faults:
    """Counts the calls to the outside that the session itself makes, and fails one of them."""

    def __init__(self, monkeypatch, failing: int | None):
        self.calls: list[str] = []
        self.failing = failing
        for owner, name, error in (
            (machine.subprocess, "Popen", OSError(11, "Resource temporarily unavailable")),
            (machine.shutil, "which", OSError(5, "Input/output error")),
            (machine.sysconfig, "get_paths", KeyError("include")),
            (machine.os, "killpg", PermissionError(1, "Operation not permitted")),
            (gpu_session.importlib.metadata, "version", importlib.metadata.PackageNotFoundError("torch")),
            (gpu_session, "write_summary", OSError(28, "No space left on device")),
            (gpu_session, "is_there", None),  # a package is not found
            (gpu_session, "wait", OSError(10, "No child processes")),
        ):
            monkeypatch.setattr(owner, name, self.counted(name, getattr(owner, name), error))

    def counted(self, name, call, error):
        def counting(*arguments, **options):
            self.calls.append(name)
            if len(self.calls) - 1 != self.failing:
                return call(*arguments, **options)
            if error is None:
                return False
            raise error

        return counting


def run_with_fault(session, monkeypatch, failing: int | None, failing_on_device: int | None) -> tuple[Faults, dict, dict]:
    session.out.mkdir(parents=True)
    session.scratch.mkdir()
    bin_of_fakes = session.scratch / "bin"
    bin_of_fakes.mkdir()
    fake_program(bin_of_fakes, "nvidia-smi", f"echo '{SIX_VALUES}'")
    for name in ("ncu", "gcc", "ldconfig"):
        fake_program(bin_of_fakes, name, f"echo {machine.DRIVER}")
    (session.scratch / "torch.py").write_text(FAKE_TORCH)
    (session.scratch / "calls").write_text(json.dumps([0, failing_on_device]))
    read = lambda session, output: {"passed": output.count("fine")}  # noqa: E731
    command = lambda session, budget: [sys.executable, "-S", "-c", ON_DEVICE]  # noqa: E731  # -S starts sooner
    stages = [gpu_session.Stage(name, 1.0, command, read, ("torch",)) for name in STAGES_OF_A_FAKE]
    with monkeypatch.context() as patches:
        patches.setenv("PATH", f"{bin_of_fakes}:/usr/bin:/bin")
        patches.setenv("PYTHONPATH", str(session.scratch))
        patches.setenv("FAKE_DRIVER", str(session.scratch / "calls"))
        patches.setattr(gpu_session, "ROOT", session.scratch)
        faults = Faults(patches, failing)
        run(stages, session, patches)
    summary = json.loads((session.out / "summary.json").read_text())
    return faults, summary, {name: found["verdict"] for name, found in summary["stages"].items()}


def last_place(calls: list[str], name: str) -> int:
    return len(calls) - 1 - calls[::-1].index(name)


@pytest.mark.slow
def test_each_call_to_the_outside_may_fail_once_and_all_other_stages_are_in_the_summary(tmp_path, monkeypatch):
    """nvidia-smi, ncu, compiler, starting and ending of processes, files, packages, and each call of the device in a stage."""

    def session_of(name: str) -> gpu_session.Session:
        return gpu_session.Session(tmp_path / name / "out", tmp_path / name / "scratch", is_dry=False)

    faults, summary, verdicts = run_with_fault(session_of("none"), monkeypatch, None, None)
    assert verdicts == dict.fromkeys(STAGES_OF_A_FAKE, "ok") and summary["preflight"]["gpu"]["name"] == "NVIDIA H100 80GB HBM3"
    assert {"Popen", "which", "get_paths", "write_summary", "is_there", "wait", "killpg", "version"} == set(faults.calls)
    # The first and the last call of each name, and each call of the device in the second stage.
    ends = {place for name in faults.calls for place in (faults.calls.index(name), last_place(faults.calls, name))}
    for failing, failing_on_device in [*((place, None) for place in sorted(ends)), *((None, place) for place in (3, 4, 5))]:
        where = f"{faults.calls[failing] if failing is not None else 'device'} {failing} {failing_on_device}"
        _, summary, found = run_with_fault(session_of(where), monkeypatch, failing, failing_on_device)
        others = [name for name in STAGES_OF_A_FAKE if found.get(name) == "ok"]
        if where.startswith("is_there"):  # no torch: every stage needs it
            assert list(found) == [*STAGES_OF_A_FAKE] and set(found.values()) <= {"ok", "left out"}
            continue
        if where.startswith("write_summary") and failing == last_place(faults.calls, "write_summary"):
            assert others == [*STAGES_OF_A_FAKE[:2]], "the last stage cannot be written; session.log has it"
            continue
        assert len(others) >= len(STAGES_OF_A_FAKE) - 1 and list(found) == [*STAGES_OF_A_FAKE], where
        for name in set(STAGES_OF_A_FAKE) - set(others):
            ended = summary["stages"][name]
            said = ended["reason"] or ended["output_ends"][-1]
            assert found[name] == "FAILED" and re.search("CUDA error in torch.cuda|it could not be run \\(", said), where
