"""Metrics: each by hand, the same for every split over micro-batches and ranks, not computed where not asked for."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from helpers import ROOT, counted_collectives, loop_log_probs, pool_of, random_batch, run_loss
from loss_backends import LOSSES, over_backends
from sass_gate import TorchOperations

import megatron_rl.ops.log_probs_torch as reference_module
import megatron_rl.policy_loss.reduce_torch as reduce_module
from megatron_rl.layout.groups import SINGLE, ParallelGroups, resolve_groups
from megatron_rl.losses.grpo import grpo
from megatron_rl.metrics.policy import METRICS, NEUTRAL, PolicyStatistics, Reduction, TokenValues, policy_statistics
from megatron_rl.metrics.step import combine_statistics, finalise_metrics, neutral_statistics, reduce_statistics, report_pairs
from megatron_rl.policy_loss import grpo_loss

CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}


def statistics(ratios, advantages, masks=None, *, low=0.2, high=0.2, old=-1.0) -> PolicyStatistics:
    """Of token-level samples given as lists of ratios, one advantage each, through the clipped objective itself."""
    counts = [len(r) for r in ratios]
    ratio = torch.tensor([x for sample in ratios for x in sample], dtype=torch.float64)
    mask = torch.ones(len(ratio), dtype=torch.bool) if masks is None else torch.tensor([x for m in masks for x in m]).bool()
    counts = [n if masks is None else sum(m) for n, m in zip(counts, masks or counts, strict=True)]
    per_token = torch.repeat_interleave(torch.arange(len(ratios)), torch.tensor([len(r) for r in ratios]).long())
    advantage = torch.tensor(advantages, dtype=torch.float64)[per_token]
    old_log_probs = torch.full_like(ratio, old)
    is_clipped = grpo(ratio.log(), advantage, clip_ratio_low=low, clip_ratio_high=high).is_clipped
    return policy_statistics(
        TokenValues(old_log_probs + ratio.log(), old_log_probs, ratio, is_clipped, advantage, entropy=None),
        loss_mask=mask,
        counts=torch.tensor(counts, dtype=torch.int64)[per_token],
        num_documents=len(ratios),
        is_sequence_level=False,
        cp_rank=0,
    )


def test_every_metric_by_hand():
    """FB-49: samples of 2 and 1 tokens: ratios (0.5, 1), A = -1 and (1.5), A = 1; old log-probs all -1."""
    metrics = finalise_metrics(statistics([[0.5, 1.0], [1.5]], [-1.0, 1.0]))
    kl = [r - 1 - math.log(r) for r in (0.5, 1.0, 1.5)]
    assert metrics == pytest.approx(
        {
            "policy/num_documents": 2,
            "policy/num_tokens": 3,
            "policy/old_logprobs": -1,
            # ((-1 + log 0.5 - 1) / 2 + (-1 + log 1.5)) / 2
            "policy/new_logprobs": ((-2 + math.log(0.5)) / 2 + (-1 + math.log(1.5))) / 2,
            "policy/ratio_new_old": (0.75 + 1.5) / 2,
            "policy/kl_new_old": ((kl[0] + kl[1]) / 2 + kl[2]) / 2,
            # 1 of 2 tokens below with A < 0, 1 of 1 above with A > 0
            "policy/clipped_ratio_fraction": 0.75,
            "policy/clipped_low": 0.25,
            "policy/clipped_high": 0.5,
            "policy/advantage": 0.0,
            "policy/max_advantage": 1.0,
            "policy/min_advantage": -1.0,
            "policy/ratio_new_old_sum": 3.0,
            "policy/ratio_new_old_squared_sum": 3.5,
            # 3^2 / 3.5 / 3
            "policy/effective_sample_size": 9 / 3.5 / 3,
        }
    )


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_largest_and_smallest_advantage_are_exact(sign):
    """FB-45, FB-49: no zero placeholder wins under MAX or MIN; masked samples and empty micro-batches give nothing."""
    healthy = statistics([[1.0], [1.0, 1.0]], [sign * 2, sign * 3])
    masked = statistics([[1.0]], [sign * 99], [[0]])
    empty = statistics([], [])
    metrics = finalise_metrics(combine_statistics([empty, healthy, masked, neutral_statistics(has_entropy=False)]))
    assert sorted((metrics["policy/max_advantage"], metrics["policy/min_advantage"])) == sorted((sign * 2, sign * 3))
    assert metrics["policy/max_advantage"] > metrics["policy/min_advantage"]
    assert all(math.isfinite(value) for value in metrics.values())


def test_a_step_without_a_token_prints_nothing():
    """FB-45: no inf, no 0/0; a rank without tokens contributes the neutral element of each reduction."""
    for parts in ([statistics([], [])], [statistics([[1.0]], [1.0], [[0]])], [neutral_statistics(has_entropy=True)]):
        assert finalise_metrics(combine_statistics(parts)) == {}
    assert [NEUTRAL[kind] for kind in Reduction] == [0.0, math.inf, -math.inf]


BATCH = random_batch([5, 1, 9, 3, 4, 7], num_masked=(1, 0, 3, 3, 0, 2), seed=40)


@pytest.mark.parametrize(
    ("metrics", "coefficient", "columns"), [("none", 0, 3), ("basic", 0, 3), ("with_entropy", 0, 4), ("none", 0.1, 4)]
)
def test_what_is_not_asked_for_is_not_computed(monkeypatch, metrics, coefficient, columns):
    """At "none" no statistic is computed; the entropy costs a column only where a metric or coefficient asks."""
    computed, widths = [], []
    original = reference_module.row_statistics_reference

    def statistics_of(tokens, **keywords):
        computed.append(tokens.entropy is not None)
        return policy_statistics(tokens, **keywords)

    def rows(*args, **keywords):
        result = original(*args, **keywords)
        widths.append(result.shape[1])
        return result

    monkeypatch.setattr(reduce_module, "policy_statistics", statistics_of)
    monkeypatch.setattr(reference_module, "row_statistics_reference", rows)
    options = {"entropy_coefficient": coefficient, "regularizer_weights": BATCH.token_weights} if coefficient else {}
    output, _ = run_loss(grpo_loss, BATCH, metrics=metrics, **options, **CLIP)
    assert widths == [columns]
    assert computed == {"none": [], "basic": [False], "with_entropy": [True]}[metrics]
    assert (output.metrics is None) == (metrics == "none")
    if metrics != "none":
        assert ("policy/entropy" in finalise_metrics(output.metrics)) == (metrics == "with_entropy")


@over_backends
def test_rounding_is_no_clip_at_a_first_step(backend):
    """The old log-probabilities of the same weights, by a sum in another order: no ratio is exactly 1."""
    batch = random_batch([40], num_masked=(0,), vocab_size=50, seed=3)
    batch.logits[:] = batch.logits.float()  # one number on both sides
    batch.old_log_probs[:] = loop_log_probs(batch.logits, batch.labels) + 1e-6 * torch.randn(40, dtype=torch.float64)
    batch.advantages[:] = -1.0
    output, _ = backend.run(LOSSES["topr"], batch, metrics="basic")
    assert finalise_metrics(output.metrics)["policy/clipped_ratio_fraction"] == 0.0
    batch.old_log_probs[:20] -= 0.1
    output, _ = backend.run(LOSSES["topr"], batch, metrics="basic")
    assert finalise_metrics(output.metrics)["policy/clipped_ratio_fraction"] == pytest.approx(0.5)


def test_old_of_a_loss_that_compares_with_the_sampler_is_the_sampler():
    """As the page says."""
    batch, found = random_batch([3]), {}
    sampled = batch.old_log_probs - 1.0
    for name in ("cispo", "dppo_tv", "dppo_kl"):
        output, _ = run_loss(LOSSES[name], batch, metrics="basic", rollout_log_probs=sampled)
        found[name] = finalise_metrics(output.metrics)["policy/old_logprobs"]
    assert found["dppo_tv"] == found["dppo_kl"] == pytest.approx(found["cispo"] - 1.0)
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert "`dppo_tv` and `dppo_kl` compare with the policy that sampled" in page and "of dppo the rollout's" in page


def reduce_on_ranks(rank, kind, whole):
    """This rank's dp share of the step, only on the last pipeline stage, through the step's one reduction; cp is tested
    with the losses. The first data-parallel rank holds no unmasked token but advantages."""
    groups = resolve_groups()
    samples = [3] if groups.dp.rank() == 0 else [0, 1, 2, 4, 5]
    batch = whole.take([whole.documents[i] for i in samples], samples)
    is_last = groups.pp.rank() == groups.pp.size() - 1
    options = {"tp_group": SINGLE, "metrics": "with_entropy", **CLIP}
    local = run_loss(LOSSES[kind], batch, **options)[0].metrics if is_last else None
    with counted_collectives() as calls:
        reduced = reduce_statistics(local, groups, has_entropy=True)
    return finalise_metrics(reduced), [(name, group is groups.tp) for name, _, group in calls]


pool = pool_of(4)


@pytest.mark.megatron
@pytest.mark.parametrize(
    ("layout", "expected_calls"),
    [
        pytest.param(
            {"pipeline_model_parallel_size": 2},
            [["broadcast"]] * 2 + [["all_gather", "broadcast"]] * 2,
            id="FB-45 FB-44 pp 2 x dp 2: the last stage gathers, once",
        ),
        pytest.param({"tensor_model_parallel_size": 2}, [["all_gather"]] * 4, id="FB-51 tp 2 x dp 2"),
    ],
)
def test_every_rank_ends_with_the_metrics_of_the_step(pool, layout, expected_calls):
    """FB-44, FB-45, FB-46, FB-51: one all-gather over the last stage's dp-cp, one broadcast over pp, never over tp or the world.

    With advantages of one sign alone a placeholder of 0, a stage's or a rank's, would be the largest or the smallest.
    """
    magnitudes = BATCH.advantages.abs() + 0.1
    for kind, advantages in zip(LOSSES, (BATCH.advantages, magnitudes, -magnitudes), strict=False):
        batch = replace(BATCH, advantages=advantages)
        expected = finalise_metrics(run_loss(LOSSES[kind], batch, tp_group=SINGLE, metrics="with_entropy", **CLIP)[0].metrics)
        answers = pool.run(reduce_on_ranks, kind, batch, **layout)
        for (metrics, calls), expected_of_rank in zip(answers, expected_calls, strict=True):
            assert metrics == pytest.approx(expected, rel=1e-10, abs=1e-12)
            assert calls == [(name, False) for name in expected_of_rank]


def test_on_one_rank_the_reduction_is_free():
    local = statistics([[1.0, 2.0]], [1.0])
    with counted_collectives() as calls:
        reduced = reduce_statistics(local, ParallelGroups(), has_entropy=False)
    assert calls == [] and torch.equal(reduced.values, local.values)
    assert "policy/entropy" not in report_pairs(local, 1), "nobody measured it"
    assert ParallelGroups().pp is SINGLE


# A row computes its value and converts it to float64; the rest is what rows share, and one sum, maximum and minimum.
MOST_OPERATIONS = 29 + 2 * len(METRICS)
ROW = """METRICS += (
    Metric("largest_ratio", lambda tokens: tokens.ratios, Reduction.MAX),
)
STATISTICS: dict"""
STEP_WITH_A_ROW = """
import sys; sys.path.insert(0, {tests!r})
import json, torch
from dataclasses import replace
from helpers import CLIP, KERNEL_DEVICE, random_batch, run_loss
from megatron_rl.policy_loss import policy_loss
from megatron_rl.metrics.step import combine_statistics
from megatron_rl.metrics.step import finalise_metrics
batch = random_batch([4, 3])
batch = replace(batch, logits=batch.logits.float(), token_weights=batch.token_weights.float())
names = ("logits", "labels", "old_log_probs", "advantages", "loss_mask")
batch = replace(batch, **{{name: getattr(batch, name).to(KERNEL_DEVICE) for name in names}})
found = []
for name in ("grpo", "gspo"):
    for backend in ("torch", "triton"):
        output, _ = run_loss(lambda *a, **k: policy_loss(name, *a, **k), batch, metrics="basic", backend=backend, **CLIP)
        found.append(finalise_metrics(combine_statistics([output.metrics, output.metrics]))["policy/largest_ratio"])
print(json.dumps(found))
"""


def test_the_metrics_of_a_micro_batch_are_few_operations():
    """Rows of one reduction are one tensor, so that a further metric costs a device its own value and a conversion."""
    tokens, operations = TokenValues(*torch.rand(3, 5), torch.rand(5) > 0.5, *torch.rand(2, 5)), []
    with TorchOperations(operations):
        policy_statistics(
            tokens,
            loss_mask=torch.ones(5, dtype=torch.bool),
            counts=torch.full((5,), 5.0),
            num_documents=1,
            is_sequence_level=False,
            cp_rank=0,
        )
    assert len(operations) <= MOST_OPERATIONS, operations


@pytest.mark.kernel
@pytest.mark.slow
def test_a_metric_is_one_row_of_the_table(tmp_path):
    """As a contributor writes it: into the table and nowhere else, for torch, Triton, ranks and report."""
    shutil.copytree(ROOT / "megatron_rl", tmp_path / "megatron_rl", ignore=shutil.ignore_patterns("__pycache__"))
    page = tmp_path / "megatron_rl" / "metrics" / "policy.py"
    page.write_text(page.read_text().replace("\nSTATISTICS: dict", "\n" + ROW, 1))
    # conftest.py has set TRITON_INTERPRET where there is no GPU.
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    script = STEP_WITH_A_ROW.format(tests=str(ROOT / "tests"))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    token, token_triton, sample, sample_triton = json.loads(done.stdout)
    batch = random_batch([4, 3])
    log_ratio = loop_log_probs(batch.logits, batch.labels) - batch.old_log_probs
    assert token == pytest.approx(log_ratio[batch.loss_mask].max().exp().item(), rel=1e-5)
    assert (token_triton, sample_triton) == pytest.approx((token, sample), rel=1e-5)  # float32: log-probabilities good to 5e-7
    assert sample < token
