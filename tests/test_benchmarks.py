"""`python -m benchmarks` on the CPU: gate, peers, drift, ratios, targets, memory, results; never a statement about speed.

Then each stage of `.ci/gpu_session.py` in its smallest form.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import GPU_FILES

import benchmarks.__main__ as command
from benchmarks import measure as harness
from benchmarks import providers, report
from benchmarks.measure import (
    ERROR,
    FAIL,
    NOT_INSTALLED,
    NOT_SUPPORTED,
    OK,
    Check,
    CpuDevice,
    Provider,
    ProviderRow,
    Settings,
    Step,
    Unavailable,
    measure,
)
from benchmarks.problems import CASES, BenchmarkCase, HeadProblem, Inputs, Problem, Result
from benchmarks.providers import FUSED, OURS, THREE_MATMULS, UNFUSED

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")
LOSSES = [case for case in CASES["losses"]["cpu"] if case.kind == "loss"]
HEAD = BenchmarkCase(80, 304, 16, dtype=torch.float32)
TINY = ["losses", "--device", "cpu", "--rounds", "3", "--case", "T 64, V 512", "--case", "gradient kernel"]
OURS_ALONE = ["--provider", "ours, torch", "--provider", "eager", "--provider", "torch version"]  # a peer is an import of seconds
TINY_HEAD = ["head", "--device", "cpu", "--shape", "40,8,70", "--rounds", "1"]
FEW_ROUNDS = Settings(rounds=1, seconds_per_provider=1e-9)


@pytest.fixture(autouse=True)
def no_garbage_collection(monkeypatch):
    """Of a whole test process it takes a second; what it frees is memory of a GPU."""
    monkeypatch.setattr(harness, "gc", SimpleNamespace(collect=lambda: 0))


@pytest.fixture(autouse=True)
def no_fake_group_stays():
    """Other tests of this process fork ranks."""
    yield
    providers.close_fake_groups()


def problem_of(case: BenchmarkCase) -> Problem:
    return command.PROBLEMS[case.kind](case, Inputs(case, CPU, num_sets=1))


def measured(case: BenchmarkCase, chosen: list[Provider]) -> dict[str, ProviderRow]:
    rows, _ = measure(problem_of(case), chosen, CpuDevice(), FEW_ROUNDS)
    return {row.provider: row for row in rows}


class Toy:
    """A problem without tensors: what it loads is written down."""

    num_sets, logits_bytes, given = 3, 2e9, ()

    def __init__(self):
        self.events: list[tuple[str, int]] = []

    def provider(self, name: str, run=lambda: None) -> Provider:
        def prepare(problem: Toy) -> Step:
            load = lambda index: problem.events.append((name, index))  # noqa: E731
            return Step(load, run, lambda result: [Check("value", 0.0, 0.5)])

        return Provider(name, prepare)


class ScriptedDevice(CpuDevice):
    """A clock that reads what it is told: the n-th timing takes `milliseconds(n)`."""

    def __init__(self, milliseconds):
        self.milliseconds, self.num_timings = milliseconds, 0

    def timed(self, run, host_milliseconds=0.0):
        run()
        self.num_timings += 1
        return self.milliseconds(self.num_timings), 0.0


def raising(error: Exception):
    def function(*_):
        raise error

    return function


# The gate


def spoiled(change) -> Provider:
    """The torch step, its result changed in place or replaced by change(problem, result)."""

    def prepare(problem: Problem) -> Step:
        is_head = isinstance(problem, HeadProblem)
        right = providers.unfused("", inplace=False) if is_head else providers.ours("", "torch", inplace=False)
        step = right.prepare(problem)

        def run():
            result = step.run()
            changed = change(problem, result)
            return changed if isinstance(changed, Result) else result

        return Step(step.load, run, step.check)

    return Provider("spoiled", prepare)


def too_much_softmax(problem, result) -> None:
    """A tenth too much everywhere but at the label: 2e-3 of the whole gradient's norm here, and a wrong model in the end."""
    (gradient,), labels = result.gradients, problem.current.labels[:, None]
    at_label = gradient.gather(1, labels).clone()
    gradient.mul_(1.1).scatter_(1, labels, at_label)


def too_much_off_the_labels(problem, result) -> None:
    is_label = torch.zeros(problem.case.vocab_size, dtype=torch.bool)
    is_label[problem.current.labels] = True
    result.gradients[1][~is_label] *= 1.1


# Many more columns than rows: most rows of dW hold no label, and the labels' are as large as all of them.
LOGITS_CASE, HEAD_CASE = BenchmarkCase(128, 20000), BenchmarkCase(160, 4000, 32)


@pytest.mark.parametrize(
    ("case", "change", "found"),
    [
        pytest.param(LOGITS_CASE, too_much_softmax, "gradient off the label", id="softmax a tenth too large"),
        pytest.param(HEAD_CASE, too_much_off_the_labels, "dW off the labels", id="probabilities a tenth too large in dW"),
        pytest.param(replace(HEAD_CASE, dtype=torch.float32), lambda p, r: r.gradients[0].mul_(1.0001), "dX", id="float32 limit"),
    ],
)
def test_a_wrong_result_fails_and_is_not_timed(case, change, found):
    row = measured(case, [spoiled(change)])["spoiled"]
    assert row.status == FAIL and row.median_ms is None and row.rounds == 0
    assert found in [check.name for check in row.checks if not check.is_passed] and f"{found} " in row.detail


@pytest.mark.parametrize("case", LOSSES, ids=lambda case: case.title)
def test_the_inputs_clip_nothing_and_what_torch_offers_passes(case):
    """Shards too: their partials come from a group whose other ranks are absent."""
    problem = problem_of(case)
    log_ratio = problem.current.log_probs - problem.current.old_log_probs.double()
    ratio = (problem.mean(log_ratio) if case.loss == "gspo" else log_ratio[problem.loss_mask]).exp()
    assert 1 - problem.clip_low < float(ratio.min()) < float(ratio.max()) < 1 + problem.clip_high
    statuses = {name: row.status for name, row in measured(case, providers.loss_providers("cpu")).items()}
    assert statuses.pop(OURS) == NOT_SUPPORTED and statuses.pop("torch.compile") == NOT_SUPPORTED
    assert statuses.pop("eager torch") == (OK if case.shards == 1 else NOT_SUPPORTED)
    assert set(statuses.values()) == {OK}


@pytest.mark.parametrize(
    "case",
    [replace(HEAD, dtype=torch.bfloat16), replace(HEAD, loss="grpo", documents=10), replace(HEAD, documents=1, masked=0.3)],
    ids=lambda case: case.title,
)
def test_every_head_of_the_package_passes_on_each_kind_of_case(case, monkeypatch):
    """Those of CUDA too, in torch: a wrong sign or a missing weight in the benchmark must not wait for a GPU to be found."""
    # Chunks of 10 rows of float32 logits: documents of 8 and 10 tokens, of which one fits, and one of 80.
    monkeypatch.setattr(providers, "MAX_LOGITS_BYTES", 10 * 304 * 4)
    rows = measured(case, [*providers.head_providers(case, "cuda"), providers.unfused("copy", inplace=False)])
    assert {name: row.detail for name, row in rows.items() if row.status != OK} == {}
    assert [check.name for check in rows[FUSED].checks] == ["loss", "log_prob", "dX", "dW", "dW off the labels"]


# Time


def test_whatever_an_adapter_raises_is_a_row_and_the_others_run():
    toy, calls = Toy(), []

    def break_at_the_fifth():
        calls.append(1)
        if len(calls) == 5:
            raise RuntimeError("CUDA error:\n  too late")

    chosen = [
        Provider("absent", raising(Unavailable(NOT_INSTALLED, "pip install it"))),
        Provider("by design", raising(Unavailable(NOT_SUPPORTED, "no shards"))),
        Provider("broken", raising(KeyError("signature"))),
        toy.provider("breaks later", break_at_the_fifth),
        toy.provider("good"),
    ]
    rows, drift = measure(toy, chosen, ScriptedDevice(lambda n: 2.0), Settings(rounds=4))
    assert [row.status for row in rows] == [NOT_INSTALLED, NOT_SUPPORTED, ERROR, ERROR, OK]
    details = ["pip install it", "no shards", "KeyError: 'signature'", "RuntimeError: CUDA error: too late", ""]
    assert [row.detail for row in rows] == details
    assert [row.median_ms for row in rows] == [None, None, None, None, 2.0] and drift == 0.0


def test_providers_take_turns_and_input_sets_rotate():
    toy = Toy()
    measure(toy, [toy.provider(name) for name in "AB"], ScriptedDevice(lambda n: 1.0), Settings(rounds=4))
    # 4 rounds of A and B, each on the round's set; what came before is the gate.
    assert toy.events[-8:] == [(name, number % 3) for number in range(4) for name in "AB"]
    assert [number for number in range(30) if harness.takes_part(number, 5, 30)] == list(range(5, 30, 6))
    # Six values 0 .. 5: 20 % of the way from the first to the last is 1.
    assert harness.percentiles([5, 3, 1, 0, 2, 4]) == [1.0, 2.5, 4.0]


# Results


@pytest.mark.parametrize(
    ("arguments", "section"),
    [([*TINY, *OURS_ALONE], "loss"), (TINY_HEAD, "head"), (["cpu", "--shape", "16,50", *OURS_ALONE], "cpu")],
)
def test_the_tables_hold_the_numbers_of_the_json(arguments, section, tmp_path, capsys):
    assert command.main([*arguments, "--output-dir", str(tmp_path)]) == 0
    (path,) = tmp_path.glob(f"*cpu*_{arguments[0]}_results.json")
    out, found = capsys.readouterr().out, json.loads(path.read_text(encoding="utf-8"))
    assert report.ON_CPU in out and command.main(["show", str(path)]) == 0 and capsys.readouterr().out == out
    rows = [(case, row) for case in found["cases"] for row in case["rows"] if row["status"] == OK]
    assert section in {case["kind"] for case, _ in rows} and len(rows) >= 3
    for case, row in rows:
        lines = out.split(f"### {case['title']}")[1].split("###")[0].splitlines()
        (line,) = [line for line in lines if line.startswith(f"| {row['provider']} ")]
        cells = [cell.strip() for cell in line.split("|")]
        assert f"{row['median_ms']:.3f}" in cells and str(row["rounds"]) in cells
    if section == "head":
        of = {row["provider"]: row for _, row in rows}
        assert of[THREE_MATMULS]["over_three_matmuls"] == 1.0 and of[UNFUSED]["memory_over_unfused"] == 1.0


# The session on a GPU

specification = importlib.util.spec_from_file_location("gpu_session", ROOT / ".ci" / "gpu_session.py")
gpu_session = importlib.util.module_from_spec(specification)
sys.modules["gpu_session"] = gpu_session  # dataclasses look their module up
specification.loader.exec_module(gpu_session)


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
