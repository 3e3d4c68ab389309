"""`megatron-rl bench head` on the CPU: gate, plans, peers, ratios, targets, memory and report; never a statement about speed."""

from __future__ import annotations

import importlib.util
import json
import sys
import textwrap
from dataclasses import replace

import pytest
import torch

from megatron_rl.__main__ import main
from megatron_rl.commands.bench import head as bench_head
from megatron_rl.commands.bench import head_peers as bench_head_peers
from megatron_rl.commands.bench import head_providers as bench_head_providers
from megatron_rl.commands.bench import session as bench_session
from megatron_rl.commands.bench.device import CpuDevice
from megatron_rl.commands.bench.harness import FAIL, NOT_INSTALLED, NOT_SUPPORTED, OK, Provider, Row, Settings, Step, measure
from megatron_rl.commands.bench.head_cases import CPU_MAIN, MAIN, PRESETS, HeadCase, HeadInputs, cases_of, plan_of, variants
from megatron_rl.commands.bench.head_problem import POLICY, HeadProblem, Result
from megatron_rl.commands.bench.head_providers import (
    LOGITS_MATMUL,
    OURS,
    OURS_FORWARD,
    OURS_SMALL,
    THREE_MATMULS,
    THREE_SMALL,
    UNFUSED,
    own_providers,
)
from megatron_rl.commands.bench.head_report import TARGETS, add_head_ratios
from megatron_rl.commands.bench.memory import peak_above_inputs
from megatron_rl.commands.bench.targets import judge_all
from megatron_rl.config import DEFAULT_MAX_LOGITS_BYTES
from megatron_rl.errors import ConfigError
from megatron_rl.ops.linear_schedule import rows_per_chunk

CPU = torch.device("cpu")
SMALL = HeadCase(160, 32, 600, dtype=torch.float32)
# Chunks of 19 rows of float32 logits: documents of 16 and 20 tokens, of which one fits, and one of 160.
SMALL_BUDGET = 20 * 600 * 4
TINY = ["bench", "head", "--device", "cpu", "--shape", "40,8,70", "--rounds", "1"]


def problem_of(case: HeadCase, num_sets: int = 1) -> HeadProblem:
    return HeadProblem(case, HeadInputs(case, CPU, num_sets=num_sets))


def measured(case: HeadCase, providers: list[Provider]) -> dict[str, Row]:
    rows, _ = measure(problem_of(case), providers, CpuDevice(), Settings(rounds=1, seconds_per_provider=1e-9))
    return {row.provider: row for row in rows}


# The gate


def spoiled(change) -> Provider:
    """The unfused step, its result changed in place or replaced by change(problem, result)."""

    def prepare(problem: HeadProblem) -> Step:
        right = bench_head_providers.unfused("right", inplace=False).prepare(problem)

        def run():
            result = right.run()
            changed = change(problem, result)
            return changed if isinstance(changed, Result) else result

        return Step(right.load, run, right.check)

    return Provider("spoiled", prepare)


def too_much_probability(problem: HeadProblem, result) -> None:
    """A tenth too much of sum_j p_j W_j in dX."""
    hidden, truth = problem.current.hidden, problem.truth(POLICY)
    expected = torch.softmax(hidden @ problem.weight.t(), -1) @ problem.weight
    result.hidden_gradient.sub_(0.1 * truth.coefficients.float()[:, None] * expected)


def too_much_off_the_labels(problem: HeadProblem, result) -> None:
    is_label = torch.zeros(problem.case.vocab_size, dtype=torch.bool)
    is_label[problem.current.labels] = True
    result.weight_gradient[~is_label] *= 1.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("change", "found"),
    [
        pytest.param(lambda p, r: replace(r, loss=r.loss * 1.001), "loss", id="loss off by a thousandth"),
        pytest.param(lambda p, r: replace(r, log_probs=r.log_probs + 0.02), "log_prob", id="log-probabilities moved"),
        pytest.param(lambda p, r: r.hidden_gradient[:150].mul_(1.05), "dX", id="dX scaled"),
        pytest.param(too_much_probability, "dX, rows in float64", id="probabilities a tenth too large in dX"),
        pytest.param(too_much_off_the_labels, "dW off the labels", id="probabilities a tenth too large in dW"),
        pytest.param(lambda p, r: r.weight_gradient.mul_(1.02), "dW", id="dW scaled"),
        pytest.param(lambda p, r: r.weight_gradient[3, 1:2].fill_(float("nan")), "non-finite", id="an element unwritten"),
    ],
)
def test_a_wrong_result_fails_and_is_not_timed(change, found, dtype):
    # Many more columns than rows: most rows of dW hold no label, and the labels' are as large as all of them.
    case = HeadCase(160, 32, 4000, dtype=dtype)
    row = measured(case, [spoiled(change)])["spoiled"]
    assert row.status == FAIL and row.median_ms is None
    assert any(check.name.startswith(found) and not check.is_passed for check in row.checks), row.detail


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", variants(SMALL), ids=lambda case: case.title)
def test_every_provider_of_ours_passes_on_each_kind_of_case(case, dtype):
    """Those of CUDA too, in torch: a wrong sign or a missing weight in the bench must not wait for a GPU to be found."""
    providers = own_providers(case, "cuda", SMALL_BUDGET)
    rows = measured(replace(case, dtype=dtype), [*providers, bench_head_providers.unfused("copy", inplace=False)])
    assert {name: row.detail for name, row in rows.items() if row.status != OK} == {}
    assert {THREE_MATMULS, OURS, UNFUSED} <= set(rows)
    names = [check.name for check in rows[OURS].checks]
    assert {"loss", "log_prob", "dX", "dX, rows in float64", "dW", "dW off the labels"} <= set(names)


def test_the_whole_gradients_that_all_are_compared_with_are_those_of_autograd():
    """Written differently: float64, cross-entropy and a loop over documents."""
    case = replace(SMALL, num_tokens=40, documents=4, with_kl=True, masked=0.25)
    problem = problem_of(case)
    inputs = problem.current
    hidden, weight = inputs.hidden.double().requires_grad_(), problem.weight.double().requires_grad_()
    log_probs = -torch.nn.functional.cross_entropy(hidden @ weight.t(), inputs.labels, reduction="none")
    total = 0.0
    for document, (start, stop) in enumerate(zip(problem.cu_seqlens[:-1].tolist(), problem.cu_seqlens[1:].tolist(), strict=True)):
        rows = [row for row in range(start, stop) if problem.loss_mask[row]]
        ratio = (log_probs[rows] - inputs.old_log_probs[rows]).mean().exp()
        difference = inputs.ref_log_probs[rows].double() - log_probs[rows]
        penalty = 0.1 * (difference.exp() - difference - 1).sum()
        total = total + (penalty - len(rows) * ratio * inputs.advantages[document]) / problem.num_unmasked
    total.backward()
    found = problem.whole_gradients(POLICY)
    torch.testing.assert_close(problem.truth(POLICY).loss, total.detach(), rtol=1e-6, atol=0)
    # float32 products of 32 and 600 terms.
    torch.testing.assert_close(found[0].double(), hidden.grad, rtol=1e-3, atol=1e-8)
    torch.testing.assert_close(found[1].double(), weight.grad, rtol=1e-3, atol=1e-8)


@pytest.mark.parametrize("loss", ["gspo", "grpo"])
def test_a_share_of_rows_is_clipped_and_has_no_gradient(loss):
    """Three documents of ten, or 30 % of 160 tokens, and none without: a neighbour of the clip would move with rounding."""
    case = replace(SMALL, loss=loss, documents=10)
    assert int((problem_of(case).truth(POLICY).coefficients == 0).sum()) == 0
    assert int((problem_of(replace(case, clipped=0.3)).truth(POLICY).coefficients == 0).sum()) == 48


# Plans


def test_the_cases_take_the_plans_that_they_are_there_for():
    """With the default budget on a GPU (2 bytes a logit) and with the CPU's cache-sized chunks."""
    expected = ["A", "D", "A", "A", "D", "B", "C"]
    for case, rows in ((MAIN, rows_per_chunk(DEFAULT_MAX_LOGITS_BYTES, 2 * MAIN.vocab_size)), (CPU_MAIN, 896)):
        assert [plan_of(variant, rows)[0] for variant in variants(case)] == expected
    assert {plan_of(case, 896)[0] for case in PRESETS["cpu"]["full"]} == {"A", "B", "C", "D"}


@pytest.mark.parametrize("case", variants(SMALL), ids=lambda case: case.title)
def test_the_plan_that_is_named_is_the_one_that_runs(case, monkeypatch):
    module = sys.modules["megatron_rl.losses.linear"]
    inner, seen = module.run_with_gradient, []
    monkeypatch.setattr(module, "run_with_gradient", lambda head, items, *rest: seen.extend(items) or inner(head, items, *rest))
    problem = problem_of(case)
    bench_head_providers.ours(OURS, max_logits_bytes=SMALL_BUDGET).prepare(problem).run()
    plans = "".join(plan for plan in "ABCD" if any(item.plan == plan for item in seen))
    rows = bench_head_providers.chunk_rows(case, CPU, SMALL_BUDGET)
    assert plan_of(case, rows) == (plans, sum(len(item.chunks) for item in seen))


def test_chunks_of_4096_rows_are_asked_for_in_bytes():
    """Of float32 logits on a CPU: one buffer, 4 bytes a logit; a block of rows that move is beside it."""
    budget = bench_head_providers.bytes_for(4096, HeadCase(16384, 8, 32000, dtype=torch.float32), CPU)
    assert rows_per_chunk(budget, 4 * 32000) == 4096


# Peers, stood in for by modules with their names and signatures


DOUBLES = {
    "liger_kernel/chunked_loss/__init__.py": """
        import torch
        class LigerFusedLinearGRPOLoss(torch.nn.Module):
            def __init__(self, beta=0.04, compiled=True, use_ref_model=True, chunk_size=1, epsilon_low=0.2, epsilon_high=0.2,
                         loss_type="dapo", max_completion_length=None, importance_sampling_level="token", temperature=1.0):
                super().__init__()
                assert loss_type == "bnpo" and not use_ref_model and beta == 0.0
                self.low, self.high, self.level = epsilon_low, epsilon_high, importance_sampling_level
            def forward(self, _input, lin_weight, selected_token_ids, attention_mask, advantages, bias=None,
                        ref_per_token_logps=None, old_per_token_logps=None):
                log_probs = torch.log_softmax(_input @ lin_weight.t(), -1).gather(-1, selected_token_ids[..., None])[..., 0]
                ratio = (log_probs - old_per_token_logps) * attention_mask
                if self.level == "sequence":
                    ratio = ratio.sum(-1, keepdim=True) / attention_mask.sum(-1, keepdim=True)
                ratio, advantages = ratio.exp(), advantages[:, None]
                values = -torch.min(ratio * advantages, ratio.clamp(1 - self.low, 1 + self.high) * advantages)
                return (values * attention_mask).sum() / attention_mask.sum(), ()
        """,
    "liger_kernel/ops/__init__.py": """
        import torch
        class LigerFusedLinearScaledCrossEntropyFunction:
            @staticmethod
            def apply(_input, weight, target, temperature=1.0, ignore_index=-100, m_tiles_per_cluster=1, return_entropy=False):
                return torch.nn.functional.cross_entropy(_input @ weight.t() / temperature, target, reduction="none")
        """,
    "verl/utils/kernel/linear_cross_entropy.py": """
        import torch
        def linear_cross_entropy(hidden, weight, labels, temperature=1.0, reduction="none", dist_process_group=None):
            assert reduction == "none" and isinstance(temperature, float)
            log_probs = torch.log_softmax(hidden @ weight.t() / temperature, -1)
            return log_probs.gather(1, labels[:, None])[:, 0], -(log_probs.exp() * log_probs).sum(-1)
        """,
    "cut_cross_entropy/__init__.py": """
        import torch
        def linear_cross_entropy(e, c, targets, ignore_index=-100, softcap=None, reduction="mean", shift=False, filter_eps="high",
                                 impl="cce"):
            assert filter_eps is None and impl == "cce"
            return torch.nn.functional.cross_entropy(e @ c.t(), targets, reduction=reduction)
        """,
    "quack/linear_cross_entropy.py": """
        import torch
        def chunked_linear_cross_entropy(x, weight, target, chunk_size=4096, ignore_index=-100, reduction="mean", tuned=True):
            return torch.nn.functional.cross_entropy(x @ weight.t(), target, ignore_index=ignore_index, reduction=reduction)
        """,
}


@pytest.fixture
def doubles(tmp_path, monkeypatch):
    for path, source in DOUBLES.items():
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        for folder in file.parents:
            if folder == tmp_path:
                break
            (folder / "__init__.py").touch()
        file.write_text(textwrap.dedent(source), encoding="utf-8")
    packages = {path.split("/")[0] for path in DOUBLES}
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] in packages}
    for name in before:
        del sys.modules[name]
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(bench_head_peers, "_needs_cuda", lambda problem: None)
    monkeypatch.setattr(
        bench_head_peers,
        "fused_linear_cross_entropy_log_probs",
        lambda: lambda hidden, weight, labels: -torch.nn.functional.cross_entropy(hidden @ weight.t(), labels, reduction="none"),
    )
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] in packages]:
        del sys.modules[name]
    sys.modules.update(before)


@pytest.mark.parametrize("loss", ["gspo", "grpo"])
def test_each_adapter_hands_its_peer_what_it_takes(doubles, loss):
    """Lengths that differ by one: padded rows must not be taken for tokens."""
    case = replace(SMALL, num_tokens=61, loss=loss)
    rows = measured(case, bench_head_peers.peer_providers(case, {}))
    assert {name: row.detail for name, row in rows.items() if row.status != OK} == {}
    assert len(rows) == 6 and not any(row.is_ours for row in rows.values())


def test_a_peer_that_computes_something_else_fails(doubles):
    """One that returns -log_prob for log_prob; one that takes no mean."""
    path = doubles / "verl/utils/kernel/linear_cross_entropy.py"
    path.write_text(path.read_text().replace("return log_probs.gather", "return -log_probs.gather"), encoding="utf-8")
    path = doubles / "quack/linear_cross_entropy.py"
    path.write_text(path.read_text().replace("reduction=reduction", "reduction='sum'"), encoding="utf-8")
    rows = measured(SMALL, bench_head_peers.peer_providers(SMALL, {}))
    assert {name for name, row in rows.items() if row.status == FAIL} == {bench_head_peers.VERL, bench_head_peers.QUACK}


def test_peers_that_are_missing_or_that_this_machine_cannot_run_are_rows(monkeypatch):
    found = importlib.util.find_spec
    absent = {"liger_kernel", "verl", "cut_cross_entropy", "quack"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in absent else found(name, *rest))
    providers = bench_head_peers.peer_providers(SMALL, {})
    statuses = [row.status for row in measured(SMALL, providers).values()]
    assert statuses == [NOT_INSTALLED, *[NOT_SUPPORTED] * 5]

    def missing():
        raise ImportError("no such file")

    monkeypatch.setattr(bench_head_peers, "_needs_cuda", lambda problem: None)
    monkeypatch.setattr(bench_head_peers, "fused_linear_cross_entropy_log_probs", missing)
    rows = measured(SMALL, providers)
    assert {row.status for row in rows.values()} == {NOT_INSTALLED}
    details = " ".join(row.detail for row in rows.values())
    assert all(f"--peer {name}=PATH" in details for name in ("verl", "cut_cross_entropy", "quack", "megatron"))


def test_peers_stand_beside_dense_cases_alone():
    assert bench_head_peers.peer_providers(replace(MAIN, masked=0.3), {}) == []
    assert len(bench_head_peers.peer_providers(MAIN, {})) == 6


# Ratios and targets


def rows_by_hand(**times: float) -> list[Row]:
    names = {"three": THREE_MATMULS, "logits": LOGITS_MATMUL, "ours": OURS, "unfused": UNFUSED, "forward": OURS_FORWARD}
    return [Row(names[name], name in ("ours", "unfused"), "", median_ms=time) for name, time in times.items()]


def test_ratios_by_hand():
    """T 160, H 32, V 600: a matmul is 2 x 160 x 32 x 600 = 6.144e6 FLOP; three in 3 ms are 6.144e-3 TFLOP/s. Four: 3 + 1 ms."""
    rows = rows_by_hand(three=3.0, logits=1.0, ours=3.6, unfused=4.5, forward=1.2)
    rows[2].peak_extra_bytes, rows[3].peak_extra_bytes = 50.0, 200.0
    three, logits, ours, unfused, forward = add_head_ratios(rows, problem_of(SMALL))
    assert three["teraflops_6"] == pytest.approx(6.144e-3) and three["teraflops_8"] == pytest.approx(8.192e-3)
    assert logits["teraflops_2"] == pytest.approx(6.144e-3) and logits["teraflops_6"] is None and three["teraflops_2"] is None
    assert ours["over_three_matmuls"] == pytest.approx(1.2) and ours["over_four_matmuls"] == pytest.approx(0.9)
    assert ours["over_unfused"] == pytest.approx(0.8) and unfused["over_unfused"] == 1.0
    assert forward["over_one_matmul"] == pytest.approx(1.2) and forward["over_three_matmuls"] is None
    # (160 + 600) x 32 x 4 bytes of inputs.
    assert ours["memory_over_unfused"] == 0.25 and ours["peak_bytes"] == 97280 + 50


def case_by_hand(case: HeadCase, device: str = "cuda", void: bool = False, **rows: dict) -> dict:
    names = {"ours": OURS, "forward": OURS_FORWARD, "small": OURS_SMALL, "verl": bench_head_peers.VERL}
    empty = dict.fromkeys(("median_ms", "over_three_matmuls", "over_four_matmuls", "over_one_matmul", "over_unfused"))
    empty |= {"peak_extra_bytes": None, "memory_over_unfused": None, "status": OK}
    found = [{**empty, "provider": names[name], **values} for name, values in rows.items()]
    return {"device": device, "title": case.title, "shape": case.as_dict(), "is_void": void, "rows": found}


def verdicts(*cases: dict) -> dict:
    return {verdict.name: verdict for verdict in judge_all(list(cases), [*TARGETS["cuda"], *TARGETS["cpu"]])}


def test_masked_and_clipped_rows_are_judged_against_the_dense_case_of_their_shape():
    """32 ms masked over 40 ms dense: 0.80, over 0.78 by 2.6 %. GRPO's clipped rows are held against GRPO's dense case: 0.85."""
    found = verdicts(
        case_by_hand(MAIN, ours={"median_ms": 40.0}),
        case_by_hand(replace(MAIN, loss="grpo"), ours={"median_ms": 20.0}),
        case_by_hand(replace(MAIN, masked=0.3), ours={"median_ms": 32.0}),
        case_by_hand(replace(MAIN, loss="grpo", clipped=0.3), ours={"median_ms": 17.0}),
    )
    masked, clipped = found["30 % of the rows masked, time over dense"], found["30 % of the rows clipped, time over dense"]
    assert (masked.worst, masked.verdict) == (pytest.approx(0.8), "missed") and masked.margin == pytest.approx(-0.02 / 0.78)
    assert (clipped.worst, clipped.verdict, clipped.num_cases) == (pytest.approx(0.85), "met", 1)


def test_each_hidden_size_has_its_own_bound_and_recomputation_is_not_judged_by_three_matmuls():
    found = verdicts(
        case_by_hand(MAIN, ours={"over_three_matmuls": 1.16}),
        case_by_hand(HeadCase(16384, 2048, 151936), ours={"over_three_matmuls": 1.16}),
        case_by_hand(replace(MAIN, documents=1, with_kl=True), ours={"over_three_matmuls": 1.4}),
        case_by_hand(replace(MAIN, documents=1), void=True, ours={"over_three_matmuls": 1.9}),
        case_by_hand(HeadCase(16384, 4096, 16032), ours={"over_three_matmuls": 1.9}),
    )
    of_4096 = found["forward and backward over three matmuls, H 4096"]
    assert (of_4096.verdict, of_4096.worst, of_4096.num_cases) == ("missed", 1.16, 1)
    assert found["forward and backward over three matmuls, H 2048"].verdict == "met"
    assert found["forward and backward over three matmuls, H 8192"].verdict == "not measured"


def test_memory_is_judged_at_its_shape_and_on_a_cpu_against_the_unfused_path():
    memory = HeadCase(16384, 4096, 128256)
    found = verdicts(
        case_by_hand(memory, ours={"peak_extra_bytes": 4.0 * 2**30}, small={"peak_extra_bytes": 2.4 * 2**30}),
        case_by_hand(MAIN, ours={"peak_extra_bytes": 9.0 * 2**30}),
        case_by_hand(CPU_MAIN, "cpu", ours={"over_unfused": 1.0, "memory_over_unfused": 0.4}),
        case_by_hand(replace(CPU_MAIN, masked=0.3), "cpu", ours={"over_unfused": 1.3, "memory_over_unfused": 0.6}),
    )
    assert found["extra memory at T 16384, H 4096, V 128256, GiB"].verdict == "met"
    assert found["extra memory there into main_grad, 4096 rows, GiB"].worst == pytest.approx(2.4)
    assert found["CPU: time over the unfused path"].worst == 1.0
    assert found["CPU: extra memory over the unfused path's"].verdict == "missed"


def test_a_peer_is_judged_by_its_time_over_ours():
    found = verdicts(case_by_hand(MAIN, ours={"median_ms": 40.0}, verl={"median_ms": 80.0}))
    assert found["verl's time over ours"].worst == 2.0 and found["verl's time over ours"].verdict == "met"


# Memory


def hold_and_touch(inputs: int, step: int):
    """64 MiB are 16 Mi float32 numbers; ones are written, so that they are resident."""
    held = torch.ones(inputs * 2**18)
    return lambda: (torch.ones(step * 2**18), held)[0]


def refuse():
    raise ConfigError("no such shape")


def test_peak_memory_is_that_of_the_step_alone():
    """128 MiB of inputs are not in it, the step's 64 MiB are; a megabyte or two of code and threads beside them."""
    peak = peak_above_inputs(hold_and_touch, 128, 64) / 2**20
    assert 64 <= peak < 72, peak
    with pytest.raises(RuntimeError, match="the process that measures memory: ConfigError: no such shape"):
        peak_above_inputs(refuse)


# The command


@pytest.fixture
def no_processes(monkeypatch):
    """The steps that would run in processes of their own run here; what they return is made up."""

    def peak(prepare, *arguments):
        assert prepare(*arguments)() is not None
        return 1e6 if arguments[1] == OURS else 4e6

    monkeypatch.setattr(bench_head, "peak_above_inputs", peak)


def test_the_command_writes_what_it_prints(no_processes, tmp_path, capsys):
    assert main([*TINY, "--output-dir", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    report = json.loads(next(tmp_path.glob("*_head_results.json")).read_text(encoding="utf-8"))
    text = next(tmp_path.glob("*_head_report.md")).read_text(encoding="utf-8")
    (case,) = report["cases"]
    rows = {row["provider"]: row for row in case["rows"]}
    assert case["plan"] == "A" and ": plan A, 1 chunk of up to 40 rows" in case["title"] and case["title"] in out
    assert rows[OURS]["memory_over_unfused"] == 0.25 and rows[UNFUSED]["peak_extra_bytes"] == 4e6
    assert rows[THREE_MATMULS]["over_three_matmuls"] == 1.0 and THREE_SMALL not in rows
    assert f"{rows[OURS]['over_unfused']:.2f}" in text and "VOID" not in text
    for words in ("# bench head:", "TF 8TvH: if it is four", "CPU: extra memory over the unfused path's", "leaves out"):
        assert words in text, words
    if importlib.util.find_spec("matplotlib"):
        assert next(tmp_path.glob("*_head_chart.png")).read_bytes().startswith(b"\x89PNG")


def test_a_step_in_a_process_of_its_own_takes_less_than_all_logits(capsys):
    """The whole way once: 320 x 20000 float32 logits are 26 MB; ours holds a chunk of 20 rows, and the gradient of the head."""
    arguments = ["--shape", "320,16,20000", "--rounds", "1", "--max-logits-bytes", str(21 * 80000), "--provider", "ours", "--json"]
    assert main(["bench", "head", "--device", "cpu", *arguments, "--provider", "unfused"]) == 0
    (case,) = json.loads(capsys.readouterr().out)["cases"]
    peaks = {row["provider"]: row["peak_extra_bytes"] for row in case["rows"]}
    assert peaks[UNFUSED] >= 320 * 20000 * 4
    assert peaks[OURS] < 0.5 * peaks[UNFUSED]


class PretendedGpu(CpuDevice):
    """Takes everything that is written for CUDA but for the device itself."""

    kind = "cuda"

    def peak_extra_bytes(self, run):
        run()
        return 1e9


def test_what_is_written_for_cuda_runs_against_a_stand_in(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(bench_head, "find_device", lambda name: PretendedGpu())
    for name in ("describe_machine", "measure_ceilings"):
        function = getattr(bench_session, name)
        monkeypatch.setattr(bench_session, name, lambda device, function=function: function(CpuDevice()))
    arguments = ["--shape", "160,8,70", "--rounds", "1", "--max-drift", "1e6", "--output-dir", str(tmp_path)]
    assert main(["bench", "head", *arguments]) == 0
    report = json.loads(next(tmp_path.glob("*.json")).read_text(encoding="utf-8"))
    assert [case["plan"] for case in report["cases"]] == ["A", "D", "A", "A", "D", "A", "A"]  # 160 rows fit any chunk
    rows = {row["provider"]: row for row in report["cases"][0]["rows"]}
    assert {name for name, row in rows.items() if row["status"] == OK} >= {THREE_SMALL, OURS_SMALL, OURS_FORWARD}
    assert rows[OURS]["peak_extra_bytes"] == 1e9 and rows[OURS]["over_four_matmuls"] > 0
    assert not [row for case in report["cases"] for row in case["rows"] if row["is_ours"] and row["status"] != OK]
    assert "forward and backward over three matmuls, H 4096" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "64,8"], "must be T,H,V: three whole numbers"),
        (["--shape", "8,8,70"], "at least 20 tokens"),
        (["--shape", "40,8,70", "--max-logits-bytes", "100"], "280 is the smallest budget that works"),
        (["--shape", "40,8,70", "--case", "T 5"], "it has:\n  gspo T 40, H 8, V 70"),
        (["--threads", "0"], "--threads 0 must be at least 1"),
        (["--peer", "fast_llm=/x"], "NAME one of liger_kernel, verl"),
    ],
)
def test_a_wrong_setting_says_what_to_do(arguments, message, capsys):
    assert main(["bench", "head", "--device", "cpu", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_step_of_ours_that_has_no_memory_ends_with_an_error(monkeypatch, capsys):
    def dies(*_):
        raise RuntimeError("out of memory?")

    monkeypatch.setattr(bench_head, "peak_above_inputs", dies)
    assert main([*TINY, "--provider", "ours"]) == 1
    assert "error: out of memory?" in capsys.readouterr().out


def test_every_case_of_a_preset_has_a_title_of_its_own():
    for device, presets in PRESETS.items():
        for preset in presets:
            titles = [case.title for case in cases_of(device, preset, None)]
            assert len(titles) == len(set(titles))
