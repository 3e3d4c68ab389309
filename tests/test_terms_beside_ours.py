"""KL and entropy that a trainer adds to our loss, and the learning rate: what doctor says, and explain's columns, by hand."""

from __future__ import annotations

import json

import pytest

from megatron_rl.__main__ import main
from megatron_rl.config import PolicyLossConfig
from megatron_rl.hosts.base import CUSTOM_LOSS_LINE, INIT_LINE, REDUCER_LINE
from megatron_rl.hosts.dense_rows import step_line
from megatron_rl.hosts.doors import DOORS
from megatron_rl.hosts.verl import ACTOR, AGG_MODE, LOSS_MODE
from megatron_rl.loss_hub import get_loss_aggregation

VERL = "python -m verl.trainer.main_ppo"
CONSTANT = f"{VERL} {LOSS_MODE}=megatron_rl.grpo.constant {ACTOR}loss_scale_factor=2048"
TERMS = f"{ACTOR}use_kl_loss=True {ACTOR}kl_loss_coef=0.01 {ACTOR}entropy_coeff=0.001"
BY_L = f"{AGG_MODE}=seq-mean-token-sum-norm"
STEP = ["--response-lengths", "3,5,7"]  # N = 3, T = 15


def doctor(capsys, line: str) -> tuple[int, str]:
    code = main(["doctor", "--launch-only", "--", *line.split()])
    return code, capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            f"{CONSTANT} {TERMS}",
            (
                # (1/T) / (1/(L N)) = L N / T = L/m
                "0.01 x low_var_kl, averaged by loss_agg_mode=token-mean, verl's own: a token weighs 1/T, L/m = 2048/m times",
                "0.001, averaged by loss_agg_mode=token-mean, verl's own: a token weighs 1/T, L/m = 2048/m times a token of",
                "token-mean: of KL and entropy; our loss does not read it",
                "against sample_mean, and against token_mean, verl's default, x m/2048 (m: mean tokens of a sample)",
                f"Dr. GRPO has no KL in the loss, so set {ACTOR}use_kl_loss=False; or divide it by L too, with {BY_L}",
            ),
        ),
        (f"{CONSTANT} {TERMS} {BY_L}", ("a token weighs 1/(N L) = 1/(N 2048), as in the policy term",)),
        # (1/T) / (1/(N m_i)) = N m_i / T = m_i/m, and for who comes from token_mean the other way round
        (
            f"{VERL} {LOSS_MODE}=megatron_rl.grpo.sample_mean {TERMS}",
            ("1/T, m_i/m times a token of", "against sample_mean x 1; against token_mean, verl's default, x 1 on average, x m/m_i"),
        ),
        (
            # what was the KL's aggregation would be refused without it
            f"{CONSTANT} {ACTOR}use_kl_loss=True {ACTOR}loss_agg_mode=seq-mean-token-mean",
            (f"so set {ACTOR}use_kl_loss=False {ACTOR}loss_agg_mode=token-mean; or divide",),
        ),
        (
            f"{CONSTANT} {ACTOR}use_kl_loss=True {ACTOR}entropy_coeff=0.1 {ACTOR}loss_agg_mode=seq-mean-token-mean",
            (f"so set {ACTOR}use_kl_loss=False; or divide",),
        ),
        (f"{CONSTANT}", ("token-mean: nothing reads it: no KL and no entropy in the loss",)),
        (f"{CONSTANT} {ACTOR}clip_ratio_high=0.28", ("clip 0.2/0.28, clip_ratio_c 3 (low: the loss's own)",)),
    ],
)
def test_doctor_says_what_verls_terms_weigh_beside_ours(line, said, capsys):
    code, out = doctor(capsys, line)
    assert code == 0, out
    for words in said:
        assert words in out, out


def test_dr_grpo_has_no_advice_without_a_kl_or_with_one_that_is_divided_too(capsys):
    for line in (CONSTANT, f"{CONSTANT} {TERMS} {BY_L}", f"{CONSTANT} {ACTOR}entropy_coeff=0.001"):
        assert "Dr. GRPO has no KL" not in doctor(capsys, line)[1]


def test_explain_shows_the_terms_beside_ours(capsys):
    assert main(["explain", *STEP, "--json", "--", *f"{CONSTANT} {TERMS}".split()]) == 0
    own = json.loads(capsys.readouterr().out)["own_loss"]
    assert {name: one["formula"] for name, one in own.items()} == {"policy": "1/(L N)", "KL": "1/T", "entropy": "1/T"}
    assert own["policy"]["weights"] == pytest.approx([1 / (2048 * 3)] * 3) and own["KL"]["weights"] == pytest.approx([1 / 15] * 3)


def test_one_slip_of_a_name_is_one_problem(capsys):
    code, out = doctor(capsys, f"{VERL} {ACTOR}loss_mode=megatron_rl.grpo.token_mean")
    assert code == 1 and out.count("PROBLEM") == 1 and f"type its whole name, {LOSS_MODE}=megatron_rl.grpo.token_mean" in out


@pytest.mark.parametrize(
    ("name", "divisor", "said"),
    [
        ("token_mean", None, "x 1"),
        ("constant", 8.0, "x m/8 (m: mean tokens of a sample)"),  # T/(L N)
        ("sample_mean", None, "x 1 on average, x m/m_i for sample i (m: mean tokens of a sample)"),  # T/(N m_i)
        ("prompt_mean", None, "x 1 on average, x (N m)/(P M_g) for sample i (m: mean tokens of a sample)"),  # T/(P M_g)
    ],
)
def test_the_shift_against_the_mean_over_tokens(name, divisor, said):
    assert get_loss_aggregation(name).shift_against_token_mean(divisor).replace("N m/", "(N m)/") == said


MILES = "python -m megatron_rl.hosts.launch train.py --global-batch-size 3 --rollout-batch-size 1 --n-samples-per-prompt 3"
REDUCER = "--custom-pg-loss-reducer-function-path megatron_rl.reducers.get_pg_loss_reducer"
OUR_LOSS = "--loss-type custom_loss --custom-loss-function-path megatron_rl.hooks.custom_loss"
CONVERTER = "--custom-convert-samples-to-train-data-path megatron_rl.hooks.convert_samples_to_train_data"
BOTH = "--entropy-coef 0.1 --use-kl-loss --kl-loss-coef 0.1 --kl-loss-type k3"


@pytest.mark.parametrize(
    ("flags", "titles"),
    [
        (f"{OUR_LOSS} --entropy-coef 0.1", "policy, entropy 1/(N m_i)"),
        (
            f"{OUR_LOSS} {BOTH} --loss-aggregation constant --loss-aggregation-divisor 8",
            "policy 1/(L N), L = 8  KL, entropy 1/(N m_i)",
        ),
        # Of the host's own loss beside our reducer.
        (
            f"{REDUCER} {BOTH} --loss-aggregation constant --loss-aggregation-divisor 8",
            "policy 1/(L N), L = 8  KL, entropy 1/(N m_i)",
        ),
        (f"{REDUCER} --loss-aggregation sample_mean --kl-loss-coef 0.1", "policy 1/(N m_i)"),
        (f"{REDUCER} {BOTH} --loss-aggregation token_mean --calculate-per-token-loss", "policy 1/T  KL, entropy 1/T'"),
        # A step of one prompt: its means are of prompts, in each term.
        (f"{CONVERTER} {BOTH} --loss-aggregation prompt_mean --global-batch-size 1", "policy, KL, entropy 1/(P M_g)"),
    ],
)
def test_terms_of_one_weight_share_a_column_in_miles(flags, titles, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main(["explain", *STEP, "--prompt-ids", "a,a,a", "--host", "miles", "--", *f"{MILES} {flags}".split()])
    out = capsys.readouterr().out
    header = out.splitlines()[1].partition("tokens")[2].split("  ")
    assert [one.strip() for one in header if one.strip()] == titles.split("  "), out


@pytest.mark.parametrize("loss", ["grpo.constant", "grpo.sample_mean", "gspo.token_mean"])
def test_the_start_line_compares_the_weights_as_doctor_does(loss, capsys):
    divisor = f" {ACTOR}loss_scale_factor=2048" if loss.endswith("constant") else ""
    _, out = doctor(capsys, f"{VERL} {LOSS_MODE}=megatron_rl.{loss}{divisor}")
    said = next(row for row in out.splitlines() if " learning rate " in row).partition("learning rate")[2].strip()
    config = PolicyLossConfig(loss_aggregation=loss.partition(".")[2], loss_aggregation_divisor=2048.0 if divisor else None)
    assert "verl's default" in said
    assert f"| weights {said} |" in step_line("verl", config, None, "no KL", of_token_mean=DOORS["verl"].of_token_mean)


def test_only_a_trainer_whose_default_is_the_mean_over_tokens_is_compared_with_it():
    assert {name for name, door in DOORS.items() if not door.of_token_mean} == {"roll"}  # its default is 1/(N+ m_i)


@pytest.mark.parametrize(
    ("ours", "estimator", "weight", "has_ratio"),
    [
        (f"{REDUCER_LINE} --loss-aggregation constant --loss-aggregation-divisor 8", "gspo", 1 / 24, True),
        (f"{REDUCER_LINE} --loss-aggregation constant --loss-aggregation-divisor 8", "grpo", 1 / 24, False),
        (f"{CUSTOM_LOSS_LINE} --policy-loss gspo --loss-aggregation constant --loss-aggregation-divisor 8", "grpo", 1 / 24, True),
        ("", "gspo", None, True),
    ],
)
def test_a_line_has_shares_the_sum_and_the_weight_of_one_ratio(capsys, ours, estimator, weight, has_ratio):
    """Three samples of 2, 4 and 2 tokens. Of 1/(L N) = 1/24 a token: shares 1/4, 1/2, 1/4, sum 8/24. Of 1/(N m_i): a third each."""
    start = "-m megatron_rl.hosts.launch " if ours else ""
    line = f"python {start}train.py --advantage-estimator {estimator} {ours} {INIT_LINE if ours else ''}"
    main(["explain", "--response-lengths", "2,4,2", "--host", "miles", "--", *line.split()])
    rows = capsys.readouterr().out.splitlines()
    for row, tokens in zip(rows[2:5], (2, 4, 2), strict=True):
        one, share = (weight, tokens / 8) if weight else (1 / 3 / tokens, 1 / 3)
        of_ratio = f"W {one * tokens:.4g}" if has_ratio else ""
        assert row.split()[5:] == [f"{one:.4g}", *of_ratio.split(), f"{share:.1%}"], row
    assert rows[5].split() == ["sum", "of", "weights", "8", f"{8 * weight if weight else 1:.4g}"]
    assert ("W_i" in rows[6]) == has_ratio
