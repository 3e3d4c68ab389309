"""`--docs-per-step` in the training command: steps of a number of documents that no layout, restart or dry rank changes."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import trainer_cases as shared
from helpers import error_of, pool_of
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.config import PolicyLossConfig
from megatron_rl.testing import oracle
from megatron_rl.testing.reference import DIVISOR, dense_samples
from megatron_rl.train.collection import with_ref_log_probs
from megatron_rl.train.document_steps import DocumentSteps, stream_of_rank
from megatron_rl.train.options import TrainOptions
from megatron_rl.train.replay import ReplayedRollouts
from megatron_rl.train.rollouts import RolloutBatch
from megatron_rl.weights import loss_aggregation_names

pytestmark = pytest.mark.megatron

VOCABULARY = 9  # of --task repeat
GROUP = 4
NUM_DOCUMENTS = 76  # of shared.RAGGED


pool = pool_of(4)
CONFIG = PolicyLossConfig(
    policy_loss="grpo",
    loss_aggregation="token_mean",
    samples_per_prompt=GROUP,
    docs_per_step=8,
    policy_metrics="with_entropy",
    watchdog="off",
)


@pytest.fixture(scope="module")
def ragged(tmp_path_factory) -> Path:
    return shared.write_file(tmp_path_factory.mktemp("ragged") / "r.jsonl", shared.ragged_batches())


def test_the_rows_of_a_file_have_the_lengths_and_groups_of_all_ranks(pool, tmp_path):
    """Two ranks, steps of two prompts, of which one has no signal from the third step on."""
    batches = [shared.make_batch(index, [[40 if index < 2 else 4] * GROUP, [20] * GROUP]) for index in range(4)]
    for index in (2, 3):
        samples = [replace(sample, advantage=sample.advantage * (sample.prompt_id != "p1")) for sample in batches[index].samples]
        batches[index] = replace(batches[index], samples=samples)
    shared.write_file(tmp_path / "r.jsonl", batches)
    options = {"rollouts": str(tmp_path / "r.jsonl"), "micro_batch_size": 2}
    pool.run(run_on_rank, tmp_path / "out", CONFIG, options, world_size=2)
    rows = shared.metrics_of(tmp_path / "out")
    assert [row["rollout/response_length"] for row in rows] == [30.0] * 2 + [12.0] * 2
    assert [row["rollout/groups_without_signal"] for row in rows] == [0.0] * 2 + [0.5] * 2


def test_steps_go_on_from_rollout_to_rollout_and_end_with_a_prompt_group(pool, ragged, tmp_path):
    """FB-88: steps of 7 hold 8 documents of ragged lengths, the last one what is left."""
    options = {"rollouts": str(ragged), "micro_batch_size": 2}
    pool.run(run_on_rank, tmp_path, replace(CONFIG, docs_per_step=7), options, world_size=1)
    rows = shared.metrics_of(tmp_path)
    assert [row["num_documents"] for row in rows] == [8] * 9 + [4] and len({row["num_tokens"] for row in rows}) > 3
    assert rows[-1]["documents_seen"] == NUM_DOCUMENTS and rows[-1]["prompts_seen"] == 19
    assert rows[-1]["tokens_seen"] == sum(row["num_tokens"] for row in rows)
    assert [row["rollout"] for row in rows] == [0, 1, 1, 1, 3, 3, 4, 5, 5, 5]
    first_step = sum(sum(group) for group in shared.RAGGED[0][:2])
    assert rows[0]["rollout/reward"] == pytest.approx(first_step / 4 / 8)
    assert rows[0]["rollout/response_length"] == pytest.approx(first_step / 8)


def test_masked_rollouts_are_divided_by(pool, tmp_path):
    """FB-55: twenty masked documents. Steps of 24 count them with twelve others."""
    batches = shared.ragged_batches()[:4]
    batches[1] = shared.masked(batches[1])
    options = {"rollouts": str(shared.write_file(tmp_path / "r.jsonl", batches)), "micro_batch_size": 2}
    pool.run(run_on_rank, tmp_path / "out", replace(CONFIG, docs_per_step=24), options, world_size=2)
    rows = shared.metrics_of(tmp_path / "out")
    for name in ("num_documents", "policy/num_documents"):
        assert [row[name] for row in rows] == [24, 24, 4]
    assert rows[0]["num_tokens"] == sum(int(sample.loss_mask.sum()) for sample in batches[0].samples)


def refused_on_rank(rank, output_dir, config, options):
    return error_of(lambda: shared.run_loop(output_dir, config, options, resume=True))


def run_on_rank(rank, output_dir, config, options, resume=False):
    outcome, weights = shared.run_loop(output_dir, config, options, resume=resume)
    return outcome.progress, weights


def steps_on_rank(rank, path, config, micro_batch_size):
    """Trains on a file; (of each step: this rank's documents, sizes of micro-batches, metrics), weights, the data-parallel rank."""
    trainer = shared.tiny_trainer(config, vocab_size=VOCABULARY)
    options = TrainOptions(micro_batch_size=micro_batch_size, rollouts=path)
    found = []
    documents = DocumentSteps(trainer, options, config)
    for step in documents.of_file(ReplayedRollouts(options, trainer), first_rollout=0, state=None):
        metrics = trainer.step(measured(trainer, step.microbatches))
        found.append((step.samples, [len(part) for part in step.microbatches], metrics))
    return found, shared.weights_of(trainer), trainer.groups.dp.rank()


def numbered(rows: list[dict]) -> list[dict]:
    return [{"step": number, **row} for number, row in enumerate(rows)]


def whole_steps_on_rank(rank, steps, config):
    """Trains on steps of documents, each as one micro-batch."""
    trainer = shared.tiny_trainer(config, vocab_size=VOCABULARY)
    return [trainer.step(measured(trainer, [samples])) for samples in steps], shared.weights_of(trainer)


def measured(trainer, microbatches):
    return with_ref_log_probs(trainer, microbatches) if trainer.config.kl_coefficient else microbatches


UNEVEN = [[[4, 4, 1, 3]], [[1, 1]], [[2, 2, 3]], [[1]], [[4, 4, 4, 4]], [[1]], [[3, 3]]]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"entropy_coefficient": 0.1, "loss_aggregation": "prompt_mean"}, id="prompt_mean, entropy term"),
        pytest.param({"kl_coefficient": 0.1, "fused_lm_head_loss": True}, id="sample_mean, KL term, fused head"),
    ],
)
def test_a_rank_that_runs_dry_runs_empty_micro_batches_and_loses_nothing(pool, tmp_path, settings):
    """FB-89, FB-25: prompts of 1 to 4 samples go to two data-parallel ranks in turn; one has 12 documents, the other one 5. Each
    step, dry rank and all, is what one process makes of the same documents in one micro-batch. Over two pipeline stages: the
    counts of each are added over its own data-parallel ranks."""
    path = shared.write_file(tmp_path / "r.jsonl", [shared.make_batch(index, sizes) for index, sizes in enumerate(UNEVEN)])
    config = PolicyLossConfig(policy_loss="gspo", docs_per_step=5, samples_per_prompt=None, **settings)
    answers = pool.run(steps_on_rank, str(path), config, 1, world_size=4, **{shared.PP: 2})
    (first, *_), (second, *_), *of_last_stage = answers
    for (found, *_), steps in zip(of_last_stage, (first, second), strict=True):
        for (samples, *others), (expected, *of_first) in zip(found, steps, strict=True):
            assert others == of_first and [place_of(sample) for sample in samples] == [place_of(sample) for sample in expected]
    assert [sizes for _, sizes, _ in first] != [sizes for _, sizes, _ in second]
    for (_, sizes, metrics), (_, other_sizes, other_metrics) in zip(first, second, strict=True):
        assert len(sizes) == len(other_sizes) and metrics == other_metrics
    assert second[-1][1] == [0] * len(second[-1][1]), "the last step is one rank's alone"
    together = [mine + others for (mine, _, _), (others, _, _) in zip(first, second, strict=True)]
    assert sum(map(len, together)) == 17 and len({place_of(sample) for samples in together for sample in samples}) == 17
    [(metrics, truth)] = pool.run(whole_steps_on_rank, together, config, world_size=1)
    # Rounding of float32 in other orders, through four steps of Adam.
    assert shared.relative_difference(shared.whole([weights for _, weights, _ in answers]), shared.whole([truth])) < 1e-5
    assert shared.unlike_metrics(numbered([row[2] for row in first]), numbered(metrics)) == []


def steps_of_aggregations_on_rank(rank, path, configs):
    return [steps_on_rank(rank, path, config, 1)[0] for config in configs]


def test_short_micro_batches_do_not_dominate(pool, tmp_path):
    """FB-88: two ranks, micro-batches of one document of 1 to 3 unmasked tokens. The loss of each step is the one of its documents
    together; the mean over micro-batches of their means, and a count of tokens that goes on from step to step, are far from it."""
    path = shared.write_file(tmp_path / "r.jsonl", [shared.make_batch(0, shared.RAGGED[1][:4], old=None)])
    configs = [
        replace(CONFIG, loss_aggregation=name, loss_aggregation_divisor=DIVISOR if name == "constant" else None)
        for name in loss_aggregation_names()
    ]
    answers = pool.run(steps_of_aggregations_on_rank, str(path), configs, world_size=2)
    for config, *of_ranks in zip(configs, *answers, strict=True):
        assert len(of_ranks[0]) == 2
        for parts in zip(*of_ranks, strict=True):
            samples = [sample for of_rank, _, _ in parts for sample in of_rank]
            assert {len(of_rank) for of_rank, _, _ in parts} == {4} and len({int(s.loss_mask.sum()) for s in samples}) > 1
            # On-policy every ratio is 1, so the loss is - sum_i w_i m_i A_i.
            counts = [int(sample.loss_mask.sum()) for sample in samples]
            settings = oracle.DenseSettings(aggregation=config.loss_aggregation, divisor=DIVISOR)
            weights = oracle.token_weights(dense_samples(samples), counts, settings)
            expected = -math.fsum(w * m * s.advantage for w, m, s in zip(weights, counts, samples, strict=True))
            for _, _, metrics in parts:
                # Sums of some dozen float32 terms of order 1.
                assert metrics["loss/policy"] == pytest.approx(expected, rel=1e-5, abs=1e-6)
        if config.loss_aggregation == "token_mean":
            assert abs(-sum(s.advantage for s in samples) / len(samples) - expected) > 0.02


def test_the_steps_of_a_sampled_rollout_end_with_it_and_use_its_old_log_probs(pool, tmp_path):
    """The first step of a rollout is on-policy and the next ones are not. A last step holds what is left: 12 and 4 of 16."""
    config = PolicyLossConfig(policy_loss="gspo", loss_aggregation="prompt_mean", samples_per_prompt=GROUP, docs_per_step=9)
    [(progress, _)] = pool.run(run_on_rank, tmp_path, config, {"num_rollouts": 2, "micro_batch_size": 4}, world_size=1)
    rows = shared.metrics_of(tmp_path)
    assert progress.samples_seen == 32
    assert [row["num_documents"] for row in rows] == [12, 4] * 2 and [row["rollout"] for row in rows] == [0, 0, 1, 1]
    assert [row["documents_seen"] for row in rows] == [12, 16, 28, 32]
    assert all(row["policy/ratio_new_old"] == pytest.approx(1.0, abs=1e-5) for row in rows[::2])
    assert all(abs(row["policy/ratio_new_old"] - 1.0) > 1e-4 for row in rows[1::2])


def test_a_static_run_goes_on_with_documents_where_it_stopped(pool, ragged, tmp_path):
    """A checkpoint between rollouts has no place in the file but their number: what follows is the rest, once."""
    static = replace(CONFIG, docs_per_step=None)
    options = {"rollouts": str(ragged), "num_rollouts": 2, "steps_per_rollout": 1}
    pool.run(run_on_rank, tmp_path, static, options, world_size=1)
    options = {"rollouts": str(ragged), "micro_batch_size": 2}
    progress = [found for found, _ in pool.run(run_on_rank, tmp_path, CONFIG, options, True, world_size=2)]
    assert progress[0] == progress[1]
    assert (progress[0].samples_seen, progress[0].num_rollouts) == (NUM_DOCUMENTS, 6)
    assert shared.metrics_of(tmp_path)[2]["rollout"] == 3, "rollouts 2 and 3: four documents and four of sixteen"
    [error] = pool.run(refused_on_rank, tmp_path, CONFIG, options, world_size=1)
    dealt = "in a file that was dealt to 2 data-parallel ranks in micro-batches of 2, and this run has 1 and 2"
    assert f"ConfigError: the checkpoint is {dealt}: resume with the former" in error


def place_of(sample) -> tuple[int, int]:
    return sample.rollout_index, sample.index


def numbered_batches(sizes_of_rollouts: list[list[int]]) -> list[RolloutBatch]:
    return [shared.make_batch(index, [[1] * size for size in sizes]) for index, sizes in enumerate(sizes_of_rollouts)]


def test_prompt_groups_stay_whole_and_their_names_apart():
    """One prompt asked in two rollouts is two groups. A micro-batch of unset size is a group; no rollout's end cuts one."""
    deal = {"dp_size": 2, "micro_batch_size": 3}
    first, second = (list(stream_of_rank(numbered_batches([[2, 2], [2]]), rank, **deal)) for rank in (0, 1))
    assert [[place_of(sample) for sample in part] for part in first] == [[(0, 0), (0, 1)], [(1, 0), (1, 1)]]
    assert [[place_of(sample) for sample in part] for part in second] == [[(0, 2), (0, 3)]]
    assert [sample.prompt_id for part in first for sample in part] == ["0/p0", "0/p0", "1/p0", "1/p0"]
    stream = stream_of_rank(numbered_batches([[2, 3, 1], [2], [4]]), 0, dp_size=1, micro_batch_size=None)
    assert [len(part) for part in stream] == [2, 3, 1, 2, 4]


ROLLOUTS = st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=5), min_size=1, max_size=5)
DEALS = st.fixed_dictionaries({"dp_size": st.integers(1, 4), "micro_batch_size": st.none() | st.integers(1, 5)})


@given(sizes=ROLLOUTS, deal=DEALS)
def test_the_streams_of_all_ranks_have_every_document_once_and_each_prompt_group_on_one_rank(sizes, deal):
    batches = numbered_batches(sizes)
    streams = [[s for part in stream_of_rank(batches, rank, **deal) for s in part] for rank in range(deal["dp_size"])]
    everything = sorted((index, number) for index, batch in enumerate(batches) for number in range(len(batch.samples)))
    assert sorted(place_of(sample) for stream in streams for sample in stream) == everything
    groups = [{sample.prompt_id for sample in stream} for stream in streams]
    assert len(set().union(*groups)) == sum(map(len, groups))
