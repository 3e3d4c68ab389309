"""`.ci/gpu_session.py`: its stages, and that none takes the time or the result of another, on a CPU."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from conftest import GPU_FILES, ROOT

spec = importlib.util.spec_from_file_location("gpu_session", ROOT / ".ci" / "gpu_session.py")
gpu_session = importlib.util.module_from_spec(spec)
sys.modules["gpu_session"] = gpu_session  # dataclasses look their module up
spec.loader.exec_module(gpu_session)


def stage(name: str, program: str, share: float = 1.0, needs: str = "") -> gpu_session.Stage:
    return gpu_session.Stage(name, share, lambda session, seconds: [["-c", program]], needs)


@pytest.mark.slow
def test_no_stage_takes_the_time_or_the_result_of_another(tmp_path, monkeypatch):
    """One fails, one hangs with a child, one cannot run here; the last gets the time that they left."""
    child = tmp_path / "child"
    sleep = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)'])"
    says = f"print('before it hangs', flush=True); open({str(child)!r}, 'w').write(str(child.pid))"
    stages = [
        stage("fails", "raise SystemExit('no device')"),
        stage("hangs", f"import subprocess, sys; child = {sleep}; {says}; child.wait()", share=3.0),
        stage("lacking", "", needs="import sys; sys.exit('the engine is missing')"),
        stage("good", "print('fine')"),
    ]
    monkeypatch.setattr(gpu_session, "STAGES", {one.name: one for one in stages})
    monkeypatch.setattr(gpu_session, "SECONDS_TO_REPORT", 3.0)
    code = gpu_session.main(["--out", str(tmp_path / "out"), "--seconds", "20"])
    found = json.loads((tmp_path / "out" / "summary.json").read_text())["stages"]
    log = (tmp_path / "out" / "session.log").read_text()
    assert code == 1
    assert {name: one["verdict"] for name, one in found.items()} == {
        "fails": "FAILED",
        "hangs": "stopped",
        "lacking": "left out",
        "good": "ok",
    }
    assert "no device" in log and found["lacking"]["output_ends"] == ["the engine is missing"]
    assert not Path(f"/proc/{child.read_text()}").exists()
    assert "before it hangs" in log and found["hangs"]["output_ends"][-1] == "KeyboardInterrupt"
    # A sixth of the time was its share at the start.
    assert found["good"]["share"] > 20.0 / 6


def test_every_test_for_a_gpu_lies_in_a_file_that_is_run(request):
    assert request.config.stash[GPU_FILES] <= set(gpu_session.gpu_test_files())


@pytest.mark.slow
@pytest.mark.megatron
def test_the_smallest_form_of_every_stage_runs(tmp_path):
    code = gpu_session.main(["--out", str(tmp_path), "--dry-run"])
    found = json.loads((tmp_path / "summary.json").read_text())["stages"]
    log = (tmp_path / "session.log").read_text()
    assert code == 0, log
    # Without CUDA there are no layers of Transformer Engine.
    expected = {name: "left out" if name == "te" else "ok" for name in gpu_session.STAGES}
    assert {name: one["verdict"] for name, one in found.items()} == expected, log
    assert "Transformer Engine does not work here" in found["te"]["output_ends"][-1]
    assert "PASS" in found["selftest"]["output_ends"][-1] and "passed" in found["tests"]["output_ends"][-1]
    assert all(list(tmp_path.glob(f"*_{kind}_results.json")) for kind in ("losses", "head"))
