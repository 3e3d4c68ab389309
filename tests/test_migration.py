"""docs/hosts/migration.md: the flags, bounds and divisors that it tells users of other frameworks to type are right."""

from __future__ import annotations

import math
import re

import pytest
import torch
from conftest import ROOT
from explain_cases import CLOSE, explain

from megatron_rl.aggregation import sample_token_weights
from megatron_rl.loss_hub import loss_aggregation_names
from megatron_rl.step_counts import StepTotals


def rows_below(heading: str) -> list[list[str]]:
    """The cells of the section's first table, without its head."""
    page = (ROOT / "docs" / "hosts" / "migration.md").read_text(encoding="utf-8")
    section = page.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]


LOSSES, CORRECTIONS = map(rows_below, ("Losses of each framework", "Corrections"))
WHOLE_LINES = [span for row in CORRECTIONS for span in re.findall("`(--(?:importance-correction |off-policy)[^`]*)`", row[1])]


@pytest.mark.parametrize("line", dict.fromkeys(WHOLE_LINES))
def test_a_correction_of_the_page_is_accepted(line):
    """Flags, names and bounds; where a row gives the bounds in words, any will do."""
    flags = [{"C": "2", "d": "0.1"}.get(word, word) for word in line.split()]
    needs_bounds = "mask" in flags or ("icepop" in flags and "--importance-correction-level" in flags)
    for flag, value in (("--importance-correction-low", "0.9"), ("--importance-correction-high", "1.1")):
        flags += [flag, value] if needs_bounds and flag not in flags else []
    code, out, error = explain("--response-lengths", "3,5,8,8", "--loss-aggregation", "token_mean", *flags)
    assert code == 0 and "correction: " in out, error


@pytest.mark.parametrize("low", [0.2, 0.4])
def test_a_clip_of_the_log_ratio_in_our_words(low):
    """verl clips the log-ratio of GMPO at -low and low; here the same numbers are distances of the ratio from 1."""
    (here,) = [row[1] for row in LOSSES if "geo_mean" in row[0]]
    ours = {
        name: eval(formula.replace("0.2", str(low)), {"exp": math.exp}) for name, formula in re.findall(r"(low|high) ([^,]+)", here)
    }
    assert math.log(1 - ours["low"]) == pytest.approx(-low) and math.log(1 + ours["high"]) == pytest.approx(low)


def test_an_absolute_cap_is_a_distance_plus_one():
    """CISPO of TRL and ms-swift: 5.0 there is 4.0 here."""
    ((cap, here),) = [(float(re.findall("epsilon_high=([0-9.]+)", row[0])[0]), row[1]) for row in LOSSES if "absolute" in row[2]]
    assert f"--clip-ratio-high {cap - 1:g}" in here


N, DP, M, L, TOKENS = 12, 2, 3, 64.0, 5
# Divisor of `constant` -> what a token weighs in the framework, from its own reductions. A micro-batch holds 2 samples.
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


def number(formula: str) -> float:
    """Of a product of letters over one, as `L M dp / N` or `N / (M dp)`."""
    return eval(re.sub(r"(?<=\w) (?=\w)", " * ", formula), {"N": N, "dp": DP, "M": M, "L": L})


def test_a_divisor_for_another_framework_gives_its_weight():
    """The aggregations of the first table exist, and a divisor turns `constant` into what the framework computes."""
    here = re.compile(r"none, on purpose|`(\w+)`(?:, divisor (.*))?")
    found = {there: here.fullmatch(ours) for there, ours, _ in rows_below("Aggregations")}
    assert {match[1] for match in found.values()} <= {None, *loss_aggregation_names()}
    divisors = {there: match[2] for there, match in found.items() if match[2]}
    assert set(divisors.values()) == set(WEIGHTS)
    for formula, weight in WEIGHTS.items():
        totals = StepTotals(N, None, N * TOKENS)
        (ours,) = sample_token_weights("constant", torch.tensor([TOKENS]), totals, divisor=number(formula))
        assert float(ours) == pytest.approx(weight, **CLOSE), formula
