"""`.ci/gpu_session.py`: stages, budgets and results, on a CPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import GPU_FILES, ROOT

from benchmarks.__main__ import build_parser, providers_of
from benchmarks.problems import PRESETS


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


SCRIPT = ROOT / ".ci" / "gpu_session.py"
gpu_session, profile_kernels = load("gpu_session"), load("profile_kernels")

FAILING_TESTS = "def test_good(): pass\ndef test_bad(): assert 1 == 2\ndef test_endless():\n    import time\n    time.sleep(60)\n"
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


def test_stages_that_take_what_was_predicted_are_cut_by_nothing_and_the_last_one_ends_in_time():
    """A benchmark that its limit cuts fails its stage, and judges no target."""
    stages, spent = list(gpu_session.STAGES.values()), 0.0
    for number, one in enumerate(stages):
        budget = gpu_session.budget_of(stages[number:], 590.0, spent)
        assert budget - one.margin >= one.expected, one.name
        spent += one.expected
    last = gpu_session.budget_of(stages[-1:], 590.0, 400.0)
    assert 400.0 + last + gpu_session.SECONDS_TO_REPORT + gpu_session.SECONDS_TO_END <= 590.0


def test_checkouts_of_peers_reach_the_benchmarks(tmp_path):
    """And one that is missing is named before anything runs."""
    session = gpu_session.Session(tmp_path, tmp_path, False, ("verl=/checkouts/verl",))
    for name in ("losses", "head"):
        command = gpu_session.STAGES[name].command(session, 100.0)
        assert command[-2:] == ["--peer", "verl=/checkouts/verl"]
    (line,) = [line for line in gpu_session.preflight(session)["missing"] if "come as checkouts" in line]
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
    hangs = f"import subprocess, sys; child = {sleep}; open({str(child)!r}, 'w').write(str(child.pid)); child.wait()"
    stages = [
        stage("fails", "raise SystemExit('no device')"),
        stage("hangs", hangs, expected=3.0),
        stage("silent", "", gpu_session.read_selftest),
        stage("lacking", "", needs=("unheard_of",)),
        stage("good", "print('fine')"),
    ]
    started = time.monotonic()
    code, found, log = run(stages, session, monkeypatch, seconds=14.0)
    assert code == 1 and time.monotonic() - started < 14.0
    verdicts = {"fails": "FAILED", "hangs": "stopped", "silent": "FAILED", "lacking": "left out", "good": "ok"}
    assert {name: result["verdict"] for name, result in found.items()} == verdicts
    assert "no device" in log and found["lacking"]["reason"] == "unheard_of is missing"
    assert "StopIteration" in found["silent"]["reason"]
    assert not Path(f"/proc/{child.read_text()}").exists()
    # What the first stages left over went to the last one: more than its fifth of the time, and than its share at the start.
    assert found["hangs"]["seconds"] < 11.0 and found["good"]["budget"] > 14.0 / 7


@pytest.mark.slow
def test_tests_that_are_stopped_are_still_counted(session, monkeypatch):
    """pytest is asked to report before it is ended."""
    path = session.scratch / "test_some.py"
    path.write_text(FAILING_TESTS)
    command = [sys.executable, "-m", "pytest", f"--junitxml={session.scratch / 'tests.xml'}", "-c", os.devnull, str(path)]
    tests = gpu_session.Stage("tests", 1.0, lambda session, budget: command, gpu_session.read_tests, ())
    # A busy machine: pytest may be slow to write its report.
    _, found, log = run([tests], session, monkeypatch, seconds=6.0, to_report=30.0)
    assert found["tests"]["verdict"] == "stopped" and "KeyboardInterrupt" in log
    assert (found["tests"]["passed"], found["tests"]["failed"]) == (1, 1) and "assert 1 == 2" in found["tests"]["failures"][0]


def test_what_ncu_prints_is_read_in_bytes_and_nanoseconds():
    first, second = profile_kernels.read_launches(NCU_OUTPUT)
    assert first == {"kernel": "row_statistics_kernel", "nanoseconds": 1000500.0, "bytes_read": 4.2e9, "registers": 64.0}
    assert second["kernel"] == "logits_gradient_kernel" and second["nanoseconds"] == 2.1e6
    assert profile_kernels.read_launches("==ERROR== no counters") == []


FAKE_NCU = """#!/bin/sh
case "$*" in
  *one_read_kernel*) echo "==ERROR== no counters" ;;
  *scaled_exp_kernel*) sleep 60 ;;
  *) cat {output} ;;
esac
"""


def test_each_kernel_is_profiled_whatever_happens_to_the_others(session, monkeypatch):
    """One call of ncu sees no launch, one hangs: those of the others are kept, by the name of the kernel."""
    (session.scratch / "output").write_text(NCU_OUTPUT)
    ncu = session.scratch / "ncu"
    ncu.write_text(FAKE_NCU.format(output=session.scratch / "output"))
    ncu.chmod(0o755)
    monkeypatch.setattr(gpu_session, "find_ncu", lambda: str(ncu))
    profile = gpu_session.Stage("profile", 1.0, gpu_session.profile_command, gpu_session.read_profile, ())
    code, found, log = run([profile], session, monkeypatch, seconds=10.0)
    assert code == 1 and found["profile"]["verdict"] == "FAILED" and log.count("===== ") == 1 + len(profile_kernels.KERNELS)
    assert list(found["profile"]["launches"]) == ["row_statistics_kernel", "logits_gradient_kernel", "unit_gradient_kernel"]
    no_launch, hung = found["profile"]["failures"]
    assert "one_read_kernel: ncu saw no launch of it; its output ends: ==ERROR== no counters" in no_launch
    assert hung.startswith("scaled_exp_kernel: stopped after")


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
        (["--stages", "tests,speed"], "no stage 'speed'; there are selftest,tests,train"),
        (["--seconds", "0"], "--seconds 0 must be above 0"),
    ],
)
def test_a_wrong_setting_is_named(arguments, message, tmp_path, capsys):
    with pytest.raises(SystemExit):
        gpu_session.main(["--out", str(tmp_path), *arguments])
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.megatron
def test_the_smallest_form_of_every_stage_runs(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, str(SCRIPT), "--out", str(tmp_path), "--dry-run"], capture_output=True, text=True, env=environment
    )
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert result.returncode == 0, result.stdout
    assert {name: found["verdict"] for name, found in summary["stages"].items()} == dict.fromkeys(gpu_session.STAGES, "ok")
    assert summary["stages"]["selftest"]["passed"] > 100 and summary["stages"]["tests"]["passed"] > 0
    assert summary["stages"]["train"]["steps"] == 4 and summary["stages"]["losses"]["medians_ms"]
    assert {call["path"] for call in summary["stages"]["overhead"]["calls"]} == {"logits", "logits, metrics", "logits, loss_scale"}
    assert len(result.stdout.splitlines()) < 60 and len(list(tmp_path.iterdir())) <= 8
