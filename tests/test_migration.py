"""docs/hosts/migration.md and the rows of `megatron-rl explain --framework` are one table, and its scales are right."""

from __future__ import annotations

import math
from argparse import ArgumentTypeError

import pytest
import torch
from conftest import ROOT
from explain_cases import CLOSE, explain, explain_json
from migration_tables import READ_AT, aggregation_rows, divisor_rows

from megatron_rl import grpo_loss
from megatron_rl.aggregation import StepTotals, sample_token_weights
from megatron_rl.commands.explain import peers
from megatron_rl.commands.explain.peers import FRAMEWORKS, PEERS, framework
from megatron_rl.layout.groups import ParallelGroups
from megatron_rl.metrics import step_metrics

STEP = ["--response-lengths", "3,5,8,8"]
PAGE = ROOT / "docs" / "hosts" / "migration.md"


def table_below(heading: str) -> list[str]:
    """The first table of that section, line for line."""
    section = PAGE.read_text(encoding="utf-8").partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return [line for line in section.splitlines() if line.startswith("|")]


@pytest.mark.parametrize(
    ("heading", "rows"),
    [("Aggregations", aggregation_rows), ("The divisor of `constant`", divisor_rows)],
    ids=["settings", "divisors"],
)
def test_the_page_has_the_rows_that_explain_prints_and_no_others(heading, rows):
    """Both ways: a row of one alone would tell users two things. The rows to paste are those on the right."""
    assert table_below(heading) == rows()


def test_the_page_says_where_each_framework_was_read():
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    assert [name for name, place in READ_AT.items() if f"{name} {place}" not in text] == []
    papers = {"DAPO"}
    assert set(READ_AT) == set(FRAMEWORKS) - papers


def test_settings_that_are_no_aggregation_stand_in_the_page_too():
    """They are no rows of its first table, and explain answers with them."""
    for peer in PEERS:
        if peer.flags is not None:
            assert peer.aggregation is None and f"{peer.framework} {peer.setting} | `{peer.flags}`" in PAGE.read_text(
                encoding="utf-8"
            )
            (line,) = (line for line in explain(*STEP, "--framework", peer.framework)[1].splitlines() if peer.flags in line)
            assert line.startswith(f"to reproduce {peer.framework}")


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


def test_the_clip_fractions_of_the_page_by_hand():
    """Ratios 1.5, 1.5, 0.5, 1 with A = 1, -1, -1, 1, clip 0.2, one token a sample: three lie outside [0.8, 1.2], two are kept from
    learning."""
    ratios, advantages = torch.tensor([1.5, 1.5, 0.5, 1.0]), torch.tensor([1.0, -1.0, -1.0, 1.0])
    logits, labels = torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64)
    arguments = (logits, labels, -math.log(3) - ratios.log(), advantages, torch.ones(4, dtype=torch.bool), torch.arange(5).int())
    output = grpo_loss(
        *arguments, torch.full((4,), 0.25), clip_ratio_low=0.2, clip_ratio_high=0.2, metrics="basic", advantages_per="sample"
    )
    assert step_metrics([output.metrics], ParallelGroups(), has_entropy=False)["policy/clipped_ratio_fraction"] == 0.5
    outside = float(((ratios < 0.8) | (ratios > 1.2)).float().mean())
    assert outside == 0.75
    assert "ours is 0.5 and theirs 0.75" in " ".join(PAGE.read_text(encoding="utf-8").split())


def test_a_row_without_an_equal_says_why_and_the_others_have_a_scale_where_one_is_needed():
    for peer in PEERS:
        assert (peer.aggregation == "constant") == (peer.scale is not None), peer
        assert peer.aggregation is not None or peer.note, peer


N, DP, M, L, TOKENS = 12, 2, 3, 64.0, 5
# What a token weighs there, from the framework's own reductions: a micro-batch holds N / (M dp) = 2 samples.
WEIGHTS = {
    # sum over a micro-batch / L, over accumulation steps, averaged over ranks
    "BY_MICRO_BATCH": 1 / L / M / DP,
    # sum over a rank / L, averaged over ranks
    "BY_SAMPLES_A_RANK": 1 / L / DP,
    # sum over the step / L
    "BY_SAMPLES": 1 / L,
    # sum over the step / (L N)
    "SAME": 1 / (L * N),
    # sum over a sample, averaged over samples
    "ONE": 1 / N,
    # sum over the step
    "ONE_BY_SAMPLES": 1.0,
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_divisor_for_another_framework_gives_its_weight(name):
    scale = vars(peers)[name]
    divisor = scale.value(L, N, DP, M)
    weights = sample_token_weights("constant", torch.tensor([TOKENS]), StepTotals(N, None, 60), divisor=divisor)
    assert float(weights[0]) == pytest.approx(WEIGHTS[name], **CLOSE)


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


def test_one_aggregation_is_told_in_the_words_of_all_that_have_it():
    found = explain_json(*STEP, "--loss-aggregation", "prompt_mean", "--prompt-ids", "a,a,b,b")["equivalents"]
    assert [one["framework"] for one in found] == ["SkyRL", "DAPO"]
    assert explain_json(*STEP)["equivalents"] == []


@pytest.mark.parametrize(
    ("typed", "name"),
    [("VERL", "verl"), ("dr-grpo", "Dr. GRPO"), ("nemo_rl", "NeMo-RL"), ("megatron lm", "Megatron-LM"), ("slime", "slime")],
)
def test_a_framework_is_found_however_it_is_spelled(typed, name):
    assert framework(typed) == name


def test_two_frameworks_of_one_row_are_asked_for_by_either_name():
    of_miles, of_slime = (explain_json(*STEP, "--framework", name)["equivalents"] for name in ("miles", "slime"))
    assert of_miles == of_slime
    assert len(of_miles) == 4


def test_an_unknown_framework_is_told_the_known_ones():
    with pytest.raises(ArgumentTypeError, match="'rllib' is not known: give one of verl, TRL"):
        framework("rllib")
