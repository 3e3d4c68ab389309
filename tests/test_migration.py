"""docs/hosts/migration.md has the rows of `megatron-rl explain --framework` and of migration_rows.py, and its scales are right."""

from __future__ import annotations

import math
import re
from argparse import ArgumentTypeError

import pytest
import torch
from conftest import ROOT
from explain_cases import CLOSE, explain
from migration_rows import CORRECTIONS, KL, LOSSES, rows, table

from megatron_rl.aggregation import StepTotals, sample_token_weights
from megatron_rl.commands.explain.peers import FACTOR_OF_DIVISOR, PEERS, divisor_here, framework, title

STEP = ["--response-lengths", "3,5,8,8"]
PAGE = ROOT / "docs" / "hosts" / "migration.md"


def aggregation_rows() -> list[str]:
    """The first table of docs/hosts/migration.md."""
    rows = ["| elsewhere | here | mind |", "|---|---|---|"]
    for peer in PEERS:
        if peer.aggregation is None and peer.flags is not None:
            continue
        here = "none, on purpose" if peer.aggregation is None else f"`{peer.aggregation}`"
        here += "" if peer.divisor is None else f", divisor {peer.divisor}"
        rows.append(f"| {title(peer.framework, peer.setting)} | {here} | {peer.note} |".replace("|  |", "| |"))
    return rows


def divisor_rows() -> list[str]:
    """The second table: settings that are given an L."""
    rows = ["| from | x ours | so take |", "|---|---|---|"]
    for peer in PEERS:
        factor = FACTOR_OF_DIVISOR.get(peer.divisor or "")
        if factor is not None:
            take = "the same L" if peer.divisor == "L" else peer.divisor
            rows.append(f"| {title(peer.framework, peer.setting)} | {factor} | {take} |")
    return rows


def table_below(heading: str) -> list[str]:
    """The first table of that section, line for line."""
    section = PAGE.read_text(encoding="utf-8").partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return [line for line in section.splitlines() if line.startswith("|")]


@pytest.mark.parametrize(
    ("heading", "make_rows"),
    [
        ("Aggregations", aggregation_rows),
        ("The divisor of `constant`", divisor_rows),
        ("Losses of each framework", lambda: table(LOSSES)),
        ("Corrections", lambda: table(CORRECTIONS)),
        ("KL estimators", lambda: table(KL)),
    ],
    ids=["settings", "divisors", "losses", "corrections", "KL"],
)
def test_the_page_has_the_rows_of_the_tables_and_no_others(heading, make_rows):
    """Both ways: a row of one alone would tell users two things. The rows to paste are those on the right."""
    assert table_below(heading) == make_rows()


WHOLE_LINES = [
    span for row in rows(CORRECTIONS) for span in re.findall("`(--(?:importance-correction |off-policy)[^`]*)`", row.here)
]


@pytest.mark.parametrize("line", dict.fromkeys(WHOLE_LINES))
def test_a_correction_of_the_page_is_accepted(line):
    """Flags, names and bounds; where a row gives the bounds in words, any will do."""
    flags = [{"C": "2", "d": "0.1"}.get(word, word) for word in line.split()]
    needs_bounds = "mask" in flags or ("icepop" in flags and "--importance-correction-level" in flags)
    for flag, value in (("--importance-correction-low", "0.9"), ("--importance-correction-high", "1.1")):
        flags += [flag, value] if needs_bounds and flag not in flags else []
    code, out, error = explain(*STEP, "--loss-aggregation", "token_mean", *flags)
    assert code == 0 and "correction, factor of a token" in out, error


def test_every_framework_has_its_rows():
    names = {"verl", "TRL", "NeMo-RL", "SkyRL", "ROLL", "AReaL", "OpenRLHF", "miles, slime", "ms-swift", "prime-rl"}
    assert {row.framework for row in rows(CORRECTIONS)} == {row.framework for row in rows(KL)} == names
    assert {row.framework for row in rows(LOSSES)} == names | {"slime"}


@pytest.mark.parametrize("low", [0.2, 0.4])
def test_a_clip_of_the_log_ratio_in_our_words(low):
    """verl clips the log-ratio of GMPO at -low and low; here the same numbers are distances of the ratio from 1."""
    row = next(row for row in rows(LOSSES) if "geo_mean" in row.setting)
    ours = {
        name: eval(formula.replace("0.2", str(low)), {"exp": math.exp})
        for name, formula in re.findall(r"(low|high) ([^,]+)", row.here)
    }
    assert math.log(1 - ours["low"]) == pytest.approx(-low) and math.log(1 + ours["high"]) == pytest.approx(low)


def test_an_absolute_cap_is_a_distance_plus_one():
    """CISPO of TRL and ms-swift: 5.0 there is 4.0 here."""
    capped = [row for row in rows(LOSSES) if "absolute" in row.differs]
    caps = [(float(re.findall("epsilon_high=([0-9.]+)", row.setting)[0]), row.here) for row in capped]
    assert [here for cap, here in caps if f"--clip-ratio-high {cap - 1:g}" not in here] == [] and len(capped) == 2


@pytest.mark.parametrize(
    ("name", "framework", "flags"),
    [
        (
            "normalize_by_documents=True",
            "Fast-LLM",
            "--loss-aggregation constant --loss-aggregation-divisor 1 (GRPO and GSPO alike",
        ),
        # M = 3 micro-batches on dp = 2 ranks of N = 12 samples: L M dp / N = 64 x 3 x 2 / 12
        ("masked_mean_denominator=L", "open-instruct", "--loss-aggregation constant --loss-aggregation-divisor 32 [L M dp / N]"),
        ("masked_mean_denominator unset", "open-instruct", "has no equal here"),
        ("--pg-loss-divisor L", "miles", "--loss-aggregation constant --loss-aggregation-divisor 64"),
        ("bf16_last_layer_fp32", "PipelineRL", "--fp32-lm-head"),
    ],
)
def test_a_setting_is_found_under_the_name_that_its_users_know(name, framework, flags):
    step = ["--response-lengths", ",".join(["5"] * N), "--loss-aggregation", "constant", "--loss-aggregation-divisor", "64"]
    layout = ["--host", "train", "--data-parallel-size", str(DP), "--num-microbatches", str(M)]
    (line,) = (line for line in explain(*step, *layout, "--framework", framework)[1].splitlines() if name in line)
    assert flags in line, line
    assert name.split()[0] in PAGE.read_text(encoding="utf-8")


N, DP, M, L, TOKENS = 12, 2, 3, 64.0, 5
# What a token weighs there, from the framework's own reductions: a micro-batch holds N / (M dp) = 2 samples.
WEIGHTS = {
    # sum over a micro-batch / L, over accumulation steps, averaged over ranks
    "L M dp / N": 1 / L / M / DP,
    # sum over a rank / L, averaged over ranks
    "L dp / N": 1 / L / DP,
    # sum over the step / L
    "L / N": 1 / L,
    # sum over the step / (L N)
    "L": 1 / (L * N),
    # sum over a sample, averaged over samples
    "1": 1 / N,
    # sum over the step
    "1 / N": 1.0,
}


@pytest.mark.parametrize("formula", FACTOR_OF_DIVISOR)
def test_a_divisor_for_another_framework_gives_its_weight(formula):
    divisor = divisor_here(formula, L, N, DP, M)
    weights = sample_token_weights("constant", torch.tensor([TOKENS]), StepTotals(N, None, 60), divisor=divisor)
    assert float(weights[0]) == pytest.approx(WEIGHTS[formula], **CLOSE)


CONSTANT = ["--loss-aggregation", "constant", "--loss-aggregation-divisor", "8192"]


def test_a_framework_is_answered_in_flags():
    _, out, _ = explain(*STEP, *CONSTANT, "--framework", "verl")
    assert "from 0.7.1 at L = 8192 use --loss-aggregation constant --loss-aggregation-divisor 8192 (L is loss_scale_factor" in out
    assert "0.7.0, engine workers at L = 8192 use --loss-aggregation constant --loss-aggregation-divisor 2048 [L dp / N]" in out
    assert "to reproduce verl loss_agg_mode=token-mean use --loss-aggregation token_mean" in out
    assert "to reproduce TRL" not in out
    layout = ["--host", "train", "--data-parallel-size", "2", "--num-microbatches", "2"]
    assert (
        "legacy workers at L = 8192 use --loss-aggregation constant --loss-aggregation-divisor 8192 [L M dp / N]"
        in (explain(*STEP, *CONSTANT, *layout, "--framework", "verl")[1])
    )


@pytest.mark.parametrize(
    ("typed", "name"),
    [("VERL", "verl"), ("dr-grpo", "Dr. GRPO"), ("nemo_rl", "NeMo-RL"), ("megatron lm", "Megatron-LM"), ("slime", "slime")],
)
def test_a_framework_is_found_however_it_is_spelled(typed, name):
    assert framework(typed) == name


def test_an_unknown_framework_is_told_the_known_ones():
    with pytest.raises(ArgumentTypeError, match="'rllib' is not known: give one of verl, TRL"):
        framework("rllib")
