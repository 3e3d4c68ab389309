"""`megatron-rl selftest` where the losses run alone, and the rows of what is added to a loss: each fault has a row of its name."""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from unittest import mock

import pytest
from forked import forget, forked
from helpers import pool_of
from test_selftest import CPU, FIFTH, megatron

from megatron_rl.config import Backend
from megatron_rl.errors import ConfigError
from megatron_rl.losses import reduce_torch
from megatron_rl.megatron.cpu import import_megatron
from megatron_rl.ops.backends import is_interpreted
from megatron_rl.registries.correction_settings import CorrectionSettings
from megatron_rl.testing import loss_batch, selftest_losses
from megatron_rl.testing.layout_step import Layout
from megatron_rl.testing.reference import ragged_samples
from megatron_rl.testing.selftest import RowResult, run_selftest
from megatron_rl.testing.selftest_losses import LossesAlone
from megatron_rl.testing.selftest_table import cases_of, is_interpreted_too, row_of_loss
from megatron_rl.testing.selftest_terms import ALL_TERMS, DUAL_CLIP, FUSED, LOGITS, OF_STEPS, Case, term_pairs

FIFTH_ALONE = [case for case in FIFTH if case.term not in OF_STEPS]
plain_pool = pool_of(2, use_megatron=False)


# Each loss, aggregation and head is in one of them.
FEW = [Case("grpo", "sample_mean"), Case("gspo", "prompt_mean", FUSED), Case("gspo", "token_mean"), Case("grpo", "constant", FUSED)]
# Each term once: with a ratio of a token from logits, and with one of a sample from hidden states, in turn.
PAIRS_OF_TERMS = [pair for pair in term_pairs() if pair[0] in ("grpo", "gspo") and pair[2] not in OF_STEPS]
TERMS_OF_TOKENS = [*dict.fromkeys(term for _, _, term in PAIRS_OF_TERMS)][::2]
OF_TERMS = [
    Case(loss, aggregation, LOGITS if loss == "grpo" else FUSED, term=term)
    for loss, aggregation, term in PAIRS_OF_TERMS
    if (loss == "grpo") == (term in TERMS_OF_TOKENS)
]


def loss_rows_on_rank(rank: int, asked: Layout, mistake: str | None = None):
    settings, wrong = [], contextlib.nullcontext()
    if mistake is not None:
        module, change = MISTAKES_ALONE[mistake]
        wrong = mock.patch.object(module, mistake, change(vars(module)[mistake]))
    with wrong:
        rows = list(run_selftest(LossesAlone(asked, 2), settings.append, rows=[*map(row_of_loss, FEW)]))
        return rows, settings[0]


def changed(name: str, change) -> object:
    """policy_loss and linear_policy_loss with another value of a keyword."""
    return lambda right: lambda *args, **keywords: right(*args, **{**keywords, name: change(keywords[name])})


def of_means(settings: CorrectionSettings) -> CorrectionSettings:
    """The mean over a sample's tokens in place of their sum, with the bounds that were given."""
    return replace(settings, level="sequence_mean") if settings.level == "sequence_sum" else settings


# A fault of a term -> the keyword that shows it, its wrong value, and how the rows that must find it begin.
FAULTS_OF_TERMS = {
    "KL times 10": ("kl_coefficient", lambda value: 10 * value, "KL"),
    "the KL of another estimator": ("kl_estimator", lambda value: "k2" if value != "k2" else "k3", "KL"),
    "a sampler's policy as the reference": ("ref_log_probs", lambda values: None if values is None else values + 0.1, "KL"),
    "no entropy": ("entropy_coefficient", lambda value: 0.0, ("entropy", ALL_TERMS)),
    "temperature squared": ("temperature", lambda value: value**2, ("temperature", ALL_TERMS)),
    "no correction": ("correction", lambda value: CorrectionSettings(), ("tis", "icepop", "mask", "seq_mask_tis", "OPSM")),
    "no dual clip": ("loss_parameters", lambda parameters: {}, DUAL_CLIP),
    "means in place of sums": ("correction", lambda value: of_means(value), "tis of sequence sums"),
    "regularisers by the loss's weights": ("regularizer_weights", lambda values: 2 * values, ("KL", "entropy")),
}


def rows_of_terms_on_rank(rank: int) -> dict[str, list[RowResult]]:
    """Of each fault, and of none: the rows of the terms."""
    bench, rows, found = LossesAlone(Layout(context=2), 2), [*map(row_of_loss, OF_TERMS)], {}

    def results() -> list[RowResult]:
        return list(run_selftest(bench, rows=rows))

    found[""] = results()
    bench.prepare = lambda cases: None  # no fault changes the truths
    for fault, (name, change, _) in FAULTS_OF_TERMS.items():
        wrong = {loss: changed(name, change)(vars(selftest_losses)[loss]) for loss in ("policy_loss", "linear_policy_loss")}
        with mock.patch.multiple(selftest_losses, **wrong):
            found[fault] = results()
    right = reduce_torch.kl_estimate
    with mock.patch.object(reduce_torch, "kl_estimate", lambda *args: (right(*args)[0], -right(*args)[1])):
        found["KL's sign"] = results()
    return found


@pytest.fixture(scope="module")
def of_terms(plain_pool):
    return plain_pool.run(rows_of_terms_on_rank)[0]


def test_rows_of_terms_pass(of_terms):
    assert len(of_terms[""]) == len(OF_TERMS) and all(row.passed for row in of_terms[""])


@pytest.mark.parametrize("fault", [*FAULTS_OF_TERMS, "KL's sign"])
def test_a_fault_of_a_term_fails_its_rows_and_no_other(of_terms, fault):
    """What is added to a loss has rows of its own, so the row that fails has the name of the fault."""
    *_, must_fail = FAULTS_OF_TERMS.get(fault, ("KL",))
    wrong = [case.term for case, row in zip(OF_TERMS, of_terms[fault], strict=True) if not row.passed]
    assert wrong == [case.term for case in OF_TERMS if case.term.startswith(must_fail)]


def interpreted_rows_on_rank(rank: int):
    few = [row_of_loss(next(case for case in cases_of(Backend.TRITON) if is_interpreted_too(case)))]
    with mock.patch.object(selftest_losses, "ragged_samples", lambda **_: ragged_samples()[8:12]):
        return list(run_selftest(LossesAlone(Layout(), 1), interprets_triton=True, rows=few))


# What a mistake of the package would do to the rows: name -> (module that calls it, the wrong one, from the right one).
MISTAKES_ALONE = {
    "count_step": (selftest_losses, lambda right: lambda masks, prompt_ids, group: right(masks, prompt_ids)),
    "local_positions": (loss_batch, lambda right: lambda length, rank, size: right(length, 0, size)),
    "policy_loss": (
        selftest_losses,
        lambda right: lambda *a, tp_group, **k: right(*a, tp_group=tp_group, **{**k, "vocab_size": None}),
    ),
}


WITH_SWITCHES = Layout(tensor=2, sequence_parallel=True, distributed_optimizer=True)


@pytest.mark.parametrize("asked", [WITH_SWITCHES, Layout(context=2), Layout()], ids=["TP2", "CP2", "DP2"])
def test_the_losses_alone_pass_on_every_layout_without_megatron(plain_pool, asked):
    """Journey E: torch and gloo are enough. What is Megatron's is left out, or refused."""
    (rows, setting), (others, _) = plain_pool.run(loss_rows_on_rank, asked)
    assert rows == others and len(rows) == len(FEW)
    for row in rows:
        assert row.passed and row.norm_error is None and 1e-9 < row.gradient_error < 1e-6, row
    assert setting.megatron_version is None and not setting.layout.sequence_parallel
    assert setting.left_out[0].startswith("schedule, DDP, optimiser, the per-token contract and counts without dropped tokens")
    switches = ("sequence parallel: Megatron's", "distributed optimizer: Megatron's")
    assert setting.left_out[1:-1] == (switches if asked is WITH_SWITCHES else ())
    with pytest.raises(ConfigError, match="--pipeline-model-parallel-size 2: stages are Megatron-Core's, which is not installed"):
        LossesAlone(Layout(pipeline=2), 2)


@pytest.mark.parametrize(
    ("asked", "mistake", "num_wrong", "message"),
    [
        pytest.param(Layout(), "count_step", 4, "= dp: nothing divides by the data-parallel ranks", id="counts of a rank alone"),
        pytest.param(Layout(context=2), "local_positions", 4, "token_counts says", id="a slice twice"),
        pytest.param(Layout(tensor=2), "policy_loss", 2, "gradient is no multiple", id="padded columns"),
    ],
)
def test_a_mistake_of_the_losses_is_found_without_megatron(plain_pool, asked, mistake, num_wrong, message):
    (rows, _), _ = plain_pool.run(loss_rows_on_rank, asked, mistake)
    failed = [row for row in rows if not row.passed]
    assert len(failed) == num_wrong and message in failed[0].cause, failed


def alone(*arguments: str, num_rows: int | None = None) -> tuple[int | None, str, str]:
    """`megatron-rl selftest` in a fork that has no Megatron and imports this package anew; with every num_rows-th row."""

    def command() -> int | None:
        forget("megatron", "mine")
        command = import_module("megatron_rl.commands.selftest")
        command.find_spec = lambda name: None
        if num_rows is not None:
            table = import_module("megatron_rl.testing.selftest_table")
            cases = table.cases_of(Backend.TORCH)[::num_rows]
            table.cases_of = lambda backend: cases if backend == Backend.TORCH else []
        code = import_module("megatron_rl.__main__").main(["selftest", *arguments])
        assert not any(name.startswith("megatron.") for name in sys.modules)
        return code

    return forked(command)


def test_the_command_without_megatron():
    """With a fifth of its rows."""
    code, out, error = alone(num_rows=5)
    assert code == 0, error
    lines = out.splitlines()
    assert lines[1].endswith("without megatron-core: the losses alone") and "norm by" not in lines[2]
    assert lines[-1].startswith(f"PASS: {len(FIFTH_ALONE)} of {len(FIFTH_ALONE)} rows of the losses alone, ")
    assert sum(line.startswith("left out: schedule, DDP, optimiser") for line in lines) == 1


OWN_LOSSES = """
from megatron_rl import LossValue, bounded_exp, register_policy_loss

@register_policy_loss("right")
def right(log_ratio, advantages, log_probs):
    return -bounded_exp(log_ratio).detach() * advantages * log_probs

@register_policy_loss("wrong")
def wrong(log_ratio, advantages):
    return LossValue(-bounded_exp(log_ratio) * advantages, derivative=-advantages)

@register_policy_loss("needy", needs=("rollout_log_probs",))
def needy(log_ratio, advantages, *, rollout_log_probs):
    return -log_ratio * advantages * rollout_log_probs.exp()
"""


def whole_steps(*arguments: str) -> tuple[int | None, str, str]:
    """`megatron-rl selftest` in a fork that imports this package anew."""

    def command() -> int:
        os.environ.update(CPU)
        forget("mine")
        return import_module("megatron_rl.__main__").main(["selftest", *arguments])

    import_megatron()
    return forked(command)


@pytest.mark.parametrize(
    ("run", "name", "code", "says"),
    [
        pytest.param(whole_steps, "right", 0, "PASS: 15 of 15 rows, ", id="whole steps", marks=megatron),
        pytest.param(alone, "right", 0, "PASS: 12 of 12 rows of the losses alone, ", id="the losses alone"),
        pytest.param(alone, "wrong", 2, "returns a derivative that its value does not have", id="a wrong derivative"),
        pytest.param(alone, "needy", 2, "needs rollout_log_probs, which the samples", id="what the step has not"),
    ],
)
def test_a_loss_of_ones_own_has_rows_of_its_own(tmp_path, monkeypatch, run, name, code, says):
    """From the folder of its file, as `train` finds it. Its own function on one process is the reference."""
    (tmp_path / "mine.py").write_text(OWN_LOSSES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    found, out, error = run("--policy-loss", f"mine.{name}")
    assert found == code and says in out + error, out + error
    rows = [line for line in out.splitlines() if line.startswith(("PASS  ", "FAIL  ")) and "probe" not in line]
    assert all(f"mine.{name} " in row for row in rows)


def rows_of_mine(text: str, code: int, says: str, *flags: str) -> tuple[str, list[str]]:
    """(output, rows) of a selftest of grpo in a folder where mine.py has this text."""
    Path("mine.py").write_text(text)
    found, out, error = alone(*flags, "--policy-loss", "grpo")
    assert found == code and says in out + error, out + error
    return out, [line for line in out.splitlines() if line.startswith(("PASS  ", "FAIL  "))]


OWN_AGGREGATIONS = """
from megatron_rl import register_loss_aggregation

def declared(name, **fields):
    return register_loss_aggregation(name, source="a test", **fields)

@declared("root", formula="1 / (N m_i^0.5)")
def root(token_counts, totals, *, prompt_token_counts, divisor):
    return 1 / (totals.num_samples * token_counts.sqrt())

@declared("off", formula="1 / (N m_i^0.5)")
def off(token_counts, totals, *, prompt_token_counts, divisor):
    return 1 / (totals.num_samples * token_counts)

@declared("mute")
def mute(token_counts, totals, *, prompt_token_counts, divisor):
    return 1 / (totals.num_samples * token_counts)
"""


@pytest.mark.parametrize(
    ("name", "code", "says"),
    [
        pytest.param("root", 0, " root, logits, torch ", id="its function is its formula"),
        pytest.param("off", 1, "and its formula 1/(N m_i^0.5) gives", id="another function than its formula"),
        pytest.param("mute", 2, "declares no formula", id="without a formula"),
    ],
)
def test_an_aggregation_of_ones_own_has_rows_of_its_own(tmp_path, monkeypatch, name, code, says):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    out, rows = rows_of_mine(OWN_AGGREGATIONS, code, says, "--loss-aggregation", f"mine.{name}")
    assert all(f"grpo {name}, " in row for row in rows) and (rows or code == 2), out


OWN_ESTIMATORS = """
from megatron_rl import KLValue, register_kl_estimator

@register_kl_estimator("squared")
def squared(log_probs, ref_log_probs):
    return (log_probs - ref_log_probs) ** 2

@register_kl_estimator("doubled")
def doubled(log_probs, ref_log_probs):
    difference = log_probs - ref_log_probs
    return KLValue(difference, 2 + 0 * difference)
"""


@pytest.mark.parametrize(
    ("name", "others", "code", "says"),
    [
        pytest.param("mine.squared", (), 0, "PASS: 10 of 10 rows", id="each aggregation and head"),
        pytest.param("k2", ("--loss-aggregation", "constant"), 0, "PASS: 2 of 2 rows", id="a built-in one, and one aggregation"),
        pytest.param("mine.doubled", (), 2, "kl_estimator=doubled returns a derivative", id="a wrong derivative"),
        pytest.param("k2", ("--model-like", "gpt-oss"), 2, "gpt-oss has rows of its own: remove it", id="a model of the field"),
    ],
)
def test_a_kl_estimator_has_rows_of_its_own(tmp_path, monkeypatch, name, others, code, says):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    out, rows = rows_of_mine(OWN_ESTIMATORS, code, says, "--kl-estimator", name, *others)
    assert all(row.split("  x ")[0].rstrip().endswith(f", torch, KL {name.removeprefix('mine.')}") for row in rows), out
    assert rows or code == 2


def test_interpreted_rows_pass(plain_pool):
    """The same kernels as on CUDA, against the same reference."""
    if not is_interpreted():
        pytest.skip("needs Triton and its interpreter: where there is CUDA the kernels run compiled, and the rows are all of them")
    [[row]] = plain_pool.run(interpreted_rows_on_rank, world_size=1)
    assert row.name.endswith("logits, triton") and row.passed, row
