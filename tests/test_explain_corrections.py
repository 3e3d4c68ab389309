"""`megatron-rl explain` on a step that another engine has sampled: factors, products, and what dropped does to the step."""

from __future__ import annotations

import pytest
from explain_cases import CLOSE, MISMATCH, explain, explain_json, mismatched_samples, save_mismatch

from megatron_rl.config import PolicyLossConfig
from megatron_rl.layout.groups import ParallelGroups
from megatron_rl.megatron.samples import weigh_samples

STEP = ["--rollouts", "mismatch.jsonl"]
ICEPOP = ["--importance-correction", "icepop"]
MEAN = ["--importance-correction", "mask", "--importance-correction-level", "sequence_mean"]
MEAN += ["--importance-correction-low", "0.9", "--importance-correction-high", "1.4"]
LIVE = [(sample, t) for sample, (_, mask) in enumerate(MISMATCH) for t, bit in enumerate(mask) if bit]


@pytest.fixture(autouse=True)
def a_file_of_two_engines(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_mismatch()


def trained_weights(rejected_tokens: str, aggregation: str, factors: list[float]) -> list[float]:
    """Of each unmasked token, as a step of `megatron-rl train` or Megatron-LM has them."""
    config = PolicyLossConfig(
        loss_aggregation=aggregation,
        loss_aggregation_divisor=3.0 if aggregation == "constant" else None,
        importance_correction="icepop",
        rejected_tokens=rejected_tokens,
    )
    samples, _ = weigh_samples(config, mismatched_samples(), ParallelGroups())
    weights = [samples[sample].token_weight for sample, _ in LIVE]
    if rejected_tokens == "dropped" and aggregation in ("sample_mean", "token_mean"):  # of these the forward pass counts
        kept = [factor != 0 for factor in factors]
        near = [[aggregation == "token_mean" or one == other for one, _ in LIVE] for other, _ in LIVE]
        shares = [sum(row) / max(sum(k for k, is_near in zip(kept, row, strict=True) if is_near), 1) for row in near]
        weights = [weight * share for weight, share in zip(weights, shares, strict=True)]
    return weights


@pytest.mark.parametrize("aggregation", ["sample_mean", "prompt_mean", "token_mean", "constant"])
def test_weights_factors_and_the_change_of_the_step_are_those_of_training(aggregation):
    flags = [*STEP, *ICEPOP, "--loss-aggregation", aggregation]
    flags += ["--loss-aggregation-divisor", "3"] if aggregation == "constant" else []
    factors, sums = [0, 1, 0, 1, 2.5, 0.9, 1.1, 1], {}
    for rejected in ("counted", "dropped"):
        found = explain_json(*flags, "--rejected-tokens", rejected)["correction"]
        assert [tuple(token) for token in found["tokens"]] == LIVE
        assert found["factors"] == pytest.approx(factors, **CLOSE)
        assert found["ratios"] == pytest.approx([0.4, 1, 6, 1, 2.5, 0.9, 1.1, 1], **CLOSE)
        (weights,) = found["weights"].values()
        trained = trained_weights(rejected, aggregation, factors)
        of_kept = [(one, other) for one, other, factor in zip(weights, trained, factors, strict=True) if factor]
        assert [one for one, _ in of_kept] == pytest.approx([other for _, other in of_kept], **CLOSE)
        sums[rejected] = sum(weight * factor for weight, factor in zip(weights, factors, strict=True))
        (change,) = found["dropped_against_counted"].values()
    assert change == pytest.approx(sums["dropped"] / sums["counted"], **CLOSE)
    assert (change > 1.1) == (aggregation != "constant")  # its weight holds no count of tokens


def test_the_text_has_a_row_a_token_and_says_what_is_kept():
    code, out, error = explain(*STEP, *MEAN, "--loss-aggregation", "token_mean", "--rows", "5")
    assert (code, error) == (0, "")
    assert "correction: mask by sequence_mean in [0.9, 1.4]; rejected tokens are counted" in out
    rows = [line.split() for line in out.splitlines() if ", token " in line]
    # The five furthest from 1, in their order: geometric means of .632, 6 and 1.31.
    assert [row[1] + row[3] for row in rows] == ["0,0", "0,1", "1,0", "2,0", "2,1"]
    assert " ".join(rows[0][4:]) == "0.6325 0.125 x 0 = 0" and " ".join(rows[3][4:]) == "1.31 0.125 x 1 = 0.125"
    assert "kept: 5 of 8 tokens, in 2 of 4 samples; the policy term under --rejected-tokens dropped against counted" in out
    assert "token_mean x 1.6\n" in out  # 8 / 5


def test_a_step_that_loses_every_token_says_so():
    bounds = ["--importance-correction-low", "1", "--importance-correction-high", "1"]
    level = ["--importance-correction-level", "sequence_sum", "--loss-aggregation", "sample_mean"]
    out = explain(*STEP, "--importance-correction", "mask", *bounds, *level)[1]
    assert "kept: 0 of 8 tokens, in 0 of 4 samples" in out and "counted: none is left" in out


def test_flags_alone_are_told_in_one_line():
    lengths = ["--response-lengths", "3,5", "--loss-aggregation", "token_mean"]
    out = explain(*lengths, "--importance-correction", "tis", "--off-policy-sequence-delta", "0.1")[1]
    assert "correction: tis by token in [0, 2], samples beyond 0.1 dropped; rejected tokens are counted" in out
    assert "left out: the factors: give --rollouts FILE whose samples have old_log_probs and rollout_log_probs" in out
    assert explain_json(*lengths, "--importance-correction", "tis")["correction"] is None
    assert "correction" not in explain(*lengths)[1]
    assert "the factors" not in explain(*lengths, "--off-policy-sequence-delta", "0.1")[1]


@pytest.mark.parametrize(
    ("aggregation", "says"),
    [
        ("sample_mean", "sample_mean: m_i counts kept tokens in the forward pass"),
        ("token_mean", "token_mean: T / K multiplies the gradient after the last backward, K are the kept tokens of the step"),
        (
            "prompt_mean",
            "prompt_mean: kept tokens are counted before the step, because its weights depend on what other samples keep",
        ),
        ("constant", "constant: no count changes"),
    ],
)
def test_the_line_says_who_counts_kept_tokens(aggregation, says):
    flags = [*STEP, *ICEPOP, "--rejected-tokens", "dropped", "--loss-aggregation", aggregation]
    out = explain(*flags, *(["--loss-aggregation-divisor", "3"] if aggregation == "constant" else []))[1]
    assert f"rejected tokens are dropped; {says}" in out


def test_the_line_says_that_kept_tokens_of_rollouts_of_several_samples_are_counted_before_the_step():
    step = ["--response-lengths", "3,5,8", "--prompt-ids", "a,a,b", "--rollout-ids", "0,0,1"]
    out = explain(*step, *ICEPOP, "--rejected-tokens", "dropped", "--loss-aggregation", "sample_mean")[1]
    assert "rejected tokens are dropped; sample_mean: kept tokens are counted before the step, because its weights" in out
