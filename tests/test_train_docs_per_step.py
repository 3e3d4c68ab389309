"""`--docs-per-step` in the training command: steps of a number of documents that no layout, restart or dry rank changes."""

from __future__ import annotations

import math
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import trainer_cases as shared
from helpers import error_of, pool_of
from hypothesis import given
from hypothesis import strategies as st
from test_train_command import Command, imported_megatron, in_an_empty_directory, latest_step, run

from megatron_rl.config import PolicyLossConfig
from megatron_rl.testing import oracle
from megatron_rl.testing.reference import DIVISOR, dense_samples
from megatron_rl.train.collection import with_ref_log_probs
from megatron_rl.train.document_steps import Deal, DocumentSteps, stream_of_rank
from megatron_rl.train.options import TrainOptions
from megatron_rl.train.replay import ReplayedRollouts
from megatron_rl.train.rollout_files import save_rollouts
from megatron_rl.train.rollouts import RolloutBatch, Sample
from megatron_rl.train.writers import MetricsWriter
from megatron_rl.weights import loss_aggregation_names

pytestmark = pytest.mark.megatron
imported_megatron, in_an_empty_directory = imported_megatron, in_an_empty_directory  # fixtures of each test here too

VOCABULARY = 9  # of --task repeat
GROUP = 4


def make_batch(index: int, sizes: list[list[int]], *, old: float | None = -2.2, seed: int = 0) -> RolloutBatch:
    """One prompt for each list of response lengths. The last token of a long response is masked."""
    generator = torch.Generator().manual_seed(1000 * seed + index)
    samples = []
    for prompt, size in ((prompt, size) for prompt, group in enumerate(sizes) for size in group):
        response = torch.randint(VOCABULARY - 1, (size,), generator=generator).tolist()
        advantage = float(torch.randn((), generator=generator))
        samples.append(
            Sample(
                prompt_id=f"p{prompt}",
                tokens=[8, prompt % 8, *response],
                response_length=size,
                loss_mask=[1] * min(size, 3) + [0] * (size - 3),
                reward=size / 4,
                advantage=advantage,
                # Near the policy's: ln 9 = 2.2; so ratios move and some of them clip.
                old_log_probs=None if old is None else [old + 0.1 * ((t + prompt) % 3 - 1) for t in range(size)],
                index=len(samples),
            )
        )
    return RolloutBatch(samples=samples, rollout_index=index)


def write_file(path: Path, sizes_of_rollouts: list[list[list[int]]], **settings) -> Path:
    for index, sizes in enumerate(sizes_of_rollouts):
        save_rollouts(path, make_batch(index, sizes, **settings))
    return path


# Response lengths of 1 to 4 tokens, 1 to 5 prompts of four samples in a rollout: 19 prompts, 76 documents.
RAGGED = [[[1 + (3 * r + 5 * g + i * i) % 4 for i in range(GROUP)] for g in range(n)] for r, n in enumerate((3, 5, 1, 4, 2, 4))]
NUM_DOCUMENTS = 76


@pytest.fixture(scope="module")
def ragged(tmp_path_factory) -> Path:
    return write_file(tmp_path_factory.mktemp("ragged") / "r.jsonl", RAGGED)


pool = pool_of(4)


# The command

REPLAY = "--policy-loss gspo --loss-aggregation prompt_mean --samples-per-prompt 4 --policy-metrics with_entropy --watchdog off"
SMALL = f"{REPLAY} --hidden-size 32 --no-tensorboard --output-dir out"


def test_ten_steps_of_documents_are_equal_on_tp2_x_pp2_and_on_one_rank(tmp_path, ragged):
    """FB-88, FB-46: every metric but timings. Steps of 7 in micro-batches of 2 end with a prompt group: 8 of ragged lengths."""
    arguments = f"{SMALL} --rollouts {ragged} --docs-per-step 7 --micro-batch-size 2"
    one = run(arguments, tmp_path / "one")
    shutil.move("out", "expected")
    run(f"{arguments} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", tmp_path / "four", num_ranks=4)
    rows = shared.metrics_of("expected")
    assert len(rows) == 10 and [row["num_documents"] for row in rows] == [8] * 9 + [4]
    assert len({row["num_tokens"] for row in rows}) > 3 and "policy/entropy" in rows[0]
    assert shared.unlike_metrics(shared.metrics_of("out"), rows) == []
    assert "recorded rollouts, 7 documents a step or more" in one.output()
    assert rows[-1]["documents_seen"] == NUM_DOCUMENTS and rows[-1]["prompts_seen"] == 19
    assert rows[-1]["tokens_seen"] == sum(row["num_tokens"] for row in rows)
    assert [row["rollout"] for row in rows] == [0, 1, 1, 1, 3, 3, 4, 5, 5, 5]
    assert rows[0]["rollout/reward"] == pytest.approx(sum(sum(group) for group in RAGGED[0][:2]) / 4 / 8)
    assert rows[0]["rollout/response_length"] == pytest.approx(sum(sum(group) for group in RAGGED[0][:2]) / 8)


def test_the_rows_of_a_file_have_the_lengths_and_groups_of_all_ranks(pool, tmp_path):
    """Two ranks, steps of two prompts, of which one has no signal from the third step on."""
    for index in range(4):
        batch = make_batch(index, [[40 if index < 2 else 4] * GROUP, [20] * GROUP])
        silent = [replace(sample, advantage=0.0) if sample.prompt_id == "p1" else sample for sample in batch.samples]
        save_rollouts(tmp_path / "r.jsonl", replace(batch, samples=silent if index > 1 else batch.samples))
    options = {"rollouts": str(tmp_path / "r.jsonl"), "micro_batch_size": 2}
    pool.run(run_on_rank, tmp_path / "out", CONFIG, options, world_size=2)
    rows = shared.metrics_of(tmp_path / "out")
    assert [row["rollout/response_length"] for row in rows] == [30.0] * 2 + [12.0] * 2
    assert [row["rollout/groups_without_signal"] for row in rows] == [0.0] * 2 + [0.5] * 2


@pytest.fixture(scope="module")
def uninterrupted(imported_megatron, ragged, tmp_path_factory):
    """Arguments of a run of two data-parallel ranks and its metrics. Nine steps, but for the last of 9 documents and more."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    arguments = f"{REPLAY} --hidden-size 32 --no-tensorboard --rollouts {ragged} --docs-per-step 6 --micro-batch-size 3"
    arguments += " --save-interval 4"  # one checkpoint on the way
    run(f"{arguments} --output-dir {folder}/out", folder / "logs", num_ranks=2)
    return arguments, shared.metrics_of(folder / "out")


def stopped_after_a_step(step: int, by: signal.Signals, arguments: str, folder: Path, monkeypatch) -> Command:
    """A run of two ranks whose first rank alone gets the signal, when the row of a step is written."""
    write = MetricsWriter.write

    def write_and_stop(self, at, metrics):
        write(self, at, metrics)
        if at >= step:
            os.kill(os.getpid(), by)

    with monkeypatch.context() as in_the_forks:
        in_the_forks.setattr(MetricsWriter, "write", write_and_stop)
        return Command(f"{arguments} --output-dir out", folder / "logs", num_ranks=2)


def test_sigterm_on_one_rank_ends_both_after_the_step_and_resume_goes_on(tmp_path, monkeypatch, uninterrupted):
    """FB-89, FB-90: it arrives while the next step is read ahead on both: nobody waits for a round that does not come."""
    arguments, expected = uninterrupted
    stopped = stopped_after_a_step(4, signal.SIGTERM, arguments, tmp_path, monkeypatch)
    assert stopped.wait() == [143, 143], stopped.output()
    assert shared.metrics_of("out") == expected[:4] and latest_step(Path("out")) == 4
    on_one_rank = Command(f"{arguments} --output-dir out --resume", tmp_path / "logs")
    assert on_one_rank.wait() == [2]
    dealt = "in a file that was dealt to 2 data-parallel ranks in micro-batches of 3, and this run has 1 and 3"
    assert f"ConfigError: the checkpoint is {dealt}: resume with the former" in on_one_rank.output()
    run(f"{arguments} --output-dir out --resume", tmp_path / "logs", num_ranks=2)
    assert shared.metrics_of("out") == expected


@pytest.mark.parametrize("docs_per_step", [8, 24])
def test_masked_rollouts_are_divided_by_and_a_step_of_nothing_else_ends_every_rank(pool, tmp_path, docs_per_step):
    """FB-55: twenty masked documents. Steps of 24 count them with twelve others; the third step of 8 has nothing else."""
    batches = [make_batch(index, sizes) for index, sizes in enumerate(RAGGED[:4])]
    masked = [replace(sample, loss_mask=[0] * sample.response_length) for sample in batches[1].samples]
    for batch in (batches[0], replace(batches[1], samples=masked), *batches[2:]):
        save_rollouts(tmp_path / "r.jsonl", batch)
    config = replace(CONFIG, docs_per_step=docs_per_step)
    options = {"rollouts": str(tmp_path / "r.jsonl"), "micro_batch_size": 2}
    answers = pool.run(refused_on_rank, tmp_path / "out", config, options, world_size=2)
    rows = shared.metrics_of(tmp_path / "out")
    if docs_per_step == 8:
        expected = "EmptyStep: the step has 8 samples and not a single unmasked token"
        assert all(error.startswith(expected) and "give it more samples" in error for error in answers)
        assert [row["num_documents"] for row in rows] == [8, 8] and not (tmp_path / "out" / "checkpoints").exists()
    else:
        assert answers == ["", ""]
        for name in ("num_documents", "policy/num_documents"):
            assert [row[name] for row in rows] == [24, 24, 4]
        assert rows[0]["num_tokens"] == sum(int(sample.loss_mask.sum()) for sample in batches[0].samples)


def refused_on_rank(rank, output_dir, config, options):
    return error_of(lambda: shared.run_loop(output_dir, config, options))


# The loop in the ranks of a pool

CONFIG = PolicyLossConfig(
    policy_loss="grpo", loss_aggregation="token_mean", samples_per_prompt=GROUP, docs_per_step=8, policy_metrics="with_entropy",
    watchdog="off",
)  # fmt: skip


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
    path = write_file(tmp_path / "r.jsonl", UNEVEN)
    config = PolicyLossConfig(policy_loss="gspo", docs_per_step=5, samples_per_prompt=None, **settings)
    answers = pool.run(steps_on_rank, str(path), config, 1, world_size=4, **{shared.PP: 2})
    (first, *_), (second, *_), *of_last_stage = answers
    for (found, *_), steps in zip(of_last_stage, (first, second), strict=True):
        for (samples, *others), (expected, *of_first) in zip(found, steps, strict=True):
            assert others == of_first and [sample.place for sample in samples] == [sample.place for sample in expected]
    assert [sizes for _, sizes, _ in first] != [sizes for _, sizes, _ in second]
    for (_, sizes, metrics), (_, other_sizes, other_metrics) in zip(first, second, strict=True):
        assert len(sizes) == len(other_sizes) and metrics == other_metrics
    assert second[-1][1] == [0] * len(second[-1][1]), "the last step is one rank's alone"
    together = [mine + others for (mine, _, _), (others, _, _) in zip(first, second, strict=True)]
    assert sum(map(len, together)) == 17 and len({sample.place for samples in together for sample in samples}) == 17
    [(metrics, truth)] = pool.run(whole_steps_on_rank, together, config, world_size=1)
    # Rounding of float32 in other orders, through four steps of Adam.
    assert shared.relative_difference(shared.whole([weights for _, weights, _ in answers]), shared.whole([truth])) < 1e-5
    assert shared.unlike_metrics(numbered([row[2] for row in first]), numbered(metrics)) == []


def steps_of_aggregations_on_rank(rank, path, configs):
    return [steps_on_rank(rank, path, config, 1)[0] for config in configs]


def test_short_micro_batches_do_not_dominate(pool, tmp_path):
    """FB-88: two ranks, micro-batches of one document of 1 to 3 unmasked tokens. The loss of each step is the one of its documents
    together; the mean over micro-batches of their means, and a count of tokens that goes on from step to step, are far from it."""
    path = write_file(tmp_path / "r.jsonl", [RAGGED[1][:4]], old=None)
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
    """The first step of a rollout is on-policy and the next ones are not.
    Two ranks sample and train what one does. A last step holds what is left: 12 and 4 of 16 documents."""
    options = {"num_rollouts": 2, "micro_batch_size": 4}
    for name, docs_per_step, world_size in (("one", 9, 1), ("even", 8, 1), ("two", 8, 2)):
        config = PolicyLossConfig(
            policy_loss="gspo", loss_aggregation="prompt_mean", samples_per_prompt=GROUP, docs_per_step=docs_per_step
        )
        answers = pool.run(run_on_rank, tmp_path / name, config, options, world_size=world_size)
        assert all(progress.samples_seen == 32 for progress, _ in answers)
    rows = shared.metrics_of(tmp_path / "one")
    assert [row["num_documents"] for row in rows] == [12, 4] * 2 and [row["rollout"] for row in rows] == [0, 0, 1, 1]
    assert [row["documents_seen"] for row in rows] == [12, 16, 28, 32]
    assert all(row["policy/ratio_new_old"] == pytest.approx(1.0, abs=1e-5) for row in rows[::2])
    assert all(abs(row["policy/ratio_new_old"] - 1.0) > 1e-4 for row in rows[1::2])
    assert shared.unlike_metrics(shared.metrics_of(tmp_path / "two"), shared.metrics_of(tmp_path / "even")) == []


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


def numbered_batches(sizes_of_rollouts: list[list[int]]) -> list[RolloutBatch]:
    return [make_batch(index, [[1] * size for size in sizes]) for index, sizes in enumerate(sizes_of_rollouts)]


def test_prompt_groups_stay_whole_and_their_names_apart():
    """One prompt asked in two rollouts is two groups. A micro-batch of unset size is a group; no rollout's end cuts one."""
    first, second = (list(stream_of_rank(numbered_batches([[2, 2], [2]]), Deal(2, 3), rank)) for rank in (0, 1))
    assert [[sample.place for sample in part] for part in first] == [[(0, 0), (0, 1)], [(1, 0), (1, 1)]]
    assert [[sample.place for sample in part] for part in second] == [[(0, 2), (0, 3)]]
    assert [sample.prompt_id for part in first for sample in part] == ["0/p0", "0/p0", "1/p0", "1/p0"]
    stream = stream_of_rank(numbered_batches([[2, 3, 1], [2], [4]]), Deal(1, None), 0)
    assert [len(part) for part in stream] == [2, 3, 1, 2, 4]


ROLLOUTS = st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=5), min_size=1, max_size=5)
DEALS = st.builds(Deal, st.integers(1, 4), st.none() | st.integers(1, 5))


@given(sizes=ROLLOUTS, deal=DEALS)
def test_the_streams_of_all_ranks_have_every_document_once_and_each_prompt_group_on_one_rank(sizes, deal):
    batches = numbered_batches(sizes)
    streams = [[s for part in stream_of_rank(batches, deal, rank) for s in part] for rank in range(deal.dp_size)]
    everything = sorted((index, number) for index, batch in enumerate(batches) for number in range(len(batch.samples)))
    assert sorted(sample.place for stream in streams for sample in stream) == everything
    groups = [{sample.prompt_id for sample in stream} for stream in streams]
    assert len(set().union(*groups)) == sum(map(len, groups))
