"""Steps by number of documents: what is in them on each rank, what travels, how they end, fail and go on after a stop.

Then `--docs-per-step` in the training command: no layout, restart or rank without documents changes a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pytest
import torch.distributed as dist
import trainer_cases as shared
from helpers import error_of, pool_of
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config import PolicyLossConfig
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.layout.groups import SINGLE
from megatron_rl.train.accumulation import AccumulatedStep, AccumulationSettings, StepAccumulator
from megatron_rl.train.collection import with_ref_log_probs
from megatron_rl.train.document_steps import DocumentSteps, stream_of_rank
from megatron_rl.train.options import TrainOptions
from megatron_rl.train.replay import ReplayedRollouts
from megatron_rl.train.rollouts import RolloutBatch, cut_at_rollouts

pytestmark = pytest.mark.megatron


@dataclass(frozen=True)
class Document:
    """What accumulation may look at of a sample, and a number to tell it by."""

    index: int
    prompt_id: str = "p"
    loss_mask: tuple[int, ...] = (1,)
    rollout_id: str | None = None


def stream_of(sizes: Sequence[int], first: int = 0, group: int | None = None) -> list[list[Document]]:
    """Micro-batches of these sizes with documents first, first + 1, ...; `group` of them in a row share a prompt."""
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    return [
        [Document(first + i, f"{first}/{i if group is None else i // group}") for i in range(start, start + size)]
        for start, size in zip(starts, sizes, strict=True)
    ]


def streams_of(sizes: Sequence[Sequence[int]], group: int | None = None) -> list[list[list[Document]]]:
    """A stream for each rank; rank r's documents are numbered from 1000 r."""
    return [stream_of(row, 1000 * rank, group) for rank, row in enumerate(sizes)]


def plain(step: AccumulatedStep) -> tuple[int, bool, list[list[int]]]:
    """(documents of all ranks, whether the step is full, this rank's micro-batches as document numbers)."""
    return step.num_documents, step.is_full, [[document.index for document in part] for part in step.microbatches]


def accumulate(stream: Iterable, settings: dict, **options) -> StepAccumulator:
    """On this rank of a world that is the data-parallel group, or on one process."""
    dp_group = dist.group.WORLD if dist.is_initialized() else SINGLE
    return StepAccumulator(stream, AccumulationSettings(**settings), dp_group=dp_group, **options)


def steps_on_rank(rank, cases):
    """The steps of each case: (streams, settings)."""
    answers = []
    for streams, of_case in cases:
        steps = accumulate(streams[rank], of_case)
        answers.append([plain(step) for step in steps])
        answers[-1] += [plain(step) for step in steps]  # the end stays the end
    return answers


def errors_on_rank(rank, streams, settings):
    """(steps before the error, the error)."""
    done = []
    return done, error_of(lambda: done.extend(plain(step) for step in accumulate(streams[rank], settings)))


def settings_on_rank(rank, of_rank):
    return error_of(lambda: accumulate([], of_rank[rank]))


def resumed_on_rank(rank, streams, settings, num_steps):
    """The state after so many steps, and the steps of an accumulator that is made with it."""
    before = accumulate(streams[rank], settings)
    for _ in range(num_steps):
        next(before)
    state = before.state_dict()
    after = accumulate(streams[rank], settings, state=state)
    return state, [plain(step) for step in after], after.state_dict()


pool = pool_of(3, use_megatron=False)
trainers = pool_of(4)


def test_nothing_is_read_that_the_step_does_not_need():
    """A stream may sample from the policy that trains: its next micro-batch must not be older than the step before."""
    reads, parts = [], stream_of([2] * 4)
    stream = (reads.append(number) or part for number, part in enumerate(parts))
    steps = accumulate(stream, {"docs_per_step": 4})
    step = next(steps)
    assert (reads, plain(step), step.split("abcd")) == ([0, 1], (4, True, [[0, 1], [2, 3]]), [["a", "b"], ["c", "d"]])


WHOLE = {"keep_prompt_groups": True}


def check_that_ranks_wait_at_the_end_of_groups(of_ranks, size, target):
    for number in range(1, len(of_ranks[0])):
        counts = [sum(map(len, parts[:number])) for parts in of_ranks]
        if sum(counts) >= target:
            assert any(count % size for count in counts), "a step that could have ended"
            assert all(count % size or not parts[number] for count, parts in zip(counts, of_ranks, strict=True))


@settings(max_examples=30)
@given(data=st.data(), size=st.integers(1, 4), target=st.integers(1, 12), kind=st.sampled_from(["documents", "by id", "by count"]))
def test_nothing_is_lost_no_group_is_cut_and_no_step_is_longer_than_it_must_be(pool, data, size, target, kind):
    """FB-89, over random cuts of whole groups into micro-batches, empty ones among them, on three ranks: all have one number of
    micro-batches, of which empty ones where a rank has run dry. Without its last micro-batches a step would not have reached the
    target, or would have cut a group; a rank that has ended its group waits meanwhile."""
    sizes = []
    for _ in range(3):
        left, row = size * data.draw(st.integers(0, 5)), []
        while left:
            row.append(data.draw(st.integers(0, min(left, 5))))
            left -= row[-1]
        sizes.append(row)
    streams = streams_of(sizes, group=size)
    extra = {"documents": {}, "by id": WHOLE, "by count": {**WHOLE, "samples_per_prompt": size}}[kind]
    answers = [answer[0] for answer in pool.run(steps_on_rank, [(streams, {"docs_per_step": target, **extra})])]
    for rank, steps in enumerate(answers):
        seen = [[index for part in parts for index in part] for _, _, parts in steps]
        assert sum(seen, []) == [document.index for part in streams[rank] for document in part]
        assert kind == "documents" or all(len(indices) % size == 0 for indices in seen)
    for of_ranks in zip(*answers, strict=True):
        assert len({(documents, is_full, len(parts)) for documents, is_full, parts in of_ranks}) == 1
        documents, is_full, _ = of_ranks[0]
        by_round = [sum(len(part) for part in parts) for parts in zip(*(parts for _, _, parts in of_ranks), strict=True)]
        assert documents == sum(by_round) and is_full == (documents >= target) and all(by_round)
        assert kind != "documents" or sum(by_round[:-1]) < target
        if kind == "by count":
            check_that_ranks_wait_at_the_end_of_groups([parts for _, _, parts in of_ranks], size, target)
    assert all(is_full for _, is_full, _ in answers[0][:-1])


def test_a_rollout_of_several_samples_is_not_cut_where_groups_are_whole():
    """Two rollouts of two samples each, whose samples alternate: by count the group would end after two samples."""
    rows = [Document(index, "a", rollout_id=rollout) for index, rollout in enumerate("ABAB")] + [Document(4, "b", rollout_id="C")]
    found = accumulate([[row] for row in rows], {"docs_per_step": 1, "samples_per_prompt": 2, **WHOLE})
    assert [[document.index for document in step.samples] for step in found] == [[0, 1, 2, 3], [4]]


def test_micro_batches_are_cut_between_rollouts():
    rows = [Document(index, rollout_id=rollout) for index, rollout in enumerate(["A", "B", "A", "A", None, None])]
    cuts = {size: [[row.index for row in part] for part in cut_at_rollouts(rows, size)] for size in (1, 2, 4, 6)}
    assert cuts == {
        1: [[0, 2, 3], [1], [4], [5]],
        2: [[0, 2, 3], [1, 4], [5]],
        4: [[0, 2, 3, 1], [4, 5]],
        6: [[0, 2, 3, 1, 4, 5]],
    }


def test_a_step_that_does_not_end_is_an_error_on_every_rank(pool):
    """FB-89: it names the target, what was reached and what helps."""
    sizes, of_groups = [[1] + [5] * 1100, []], {"docs_per_step": 2, "samples_per_prompt": 5, **WHOLE}
    text = "docs_per_step=2 has 5126 documents after 1026 micro-batches a rank: prompt groups do not end"
    for done, error in pool.run(errors_on_rank, streams_of(sizes), of_groups, world_size=2):
        assert not done and error.startswith("DataError: ") and text in error and "or lower --docs-per-step" in error


PARTS = {"samples_per_prompt": 8, "allow_partial_prompt_groups": True}
FLAGS = [
    pytest.param({}, False, None, id="nothing needs whole groups"),
    pytest.param({"loss_aggregation": "prompt_mean"}, True, None, id="prompt_mean"),
    pytest.param({"samples_per_prompt": 8}, True, 8, id="count_step would refuse a part of a declared group"),
    pytest.param(PARTS, False, None, id="parts are allowed"),
    pytest.param({**PARTS, "loss_aggregation": "prompt_mean"}, True, None, id="parts are allowed, counting would miss their ends"),
]


@pytest.mark.parametrize(("flags", "keeps", "size"), FLAGS)
def test_flags_decide_whether_groups_stay_whole(flags, keeps, size):
    with pytest.raises(ConfigError, match="docs_per_step is not set"):
        AccumulationSettings.of(PolicyLossConfig(**flags))
    found = AccumulationSettings.of(PolicyLossConfig(docs_per_step=16, **flags))
    assert (found.docs_per_step, found.keep_prompt_groups, found.samples_per_prompt) == (16, keeps, size)


def test_ranks_that_want_unlike_steps_all_say_so(pool):
    """They would wait for each other's rounds."""
    of_rank = [{"docs_per_step": 4}, {"docs_per_step": 6, "keep_prompt_groups": True}]
    for message in pool.run(settings_on_rank, of_rank, world_size=2):
        assert message.startswith("ConfigError: 2 problems:")
        assert "docs_per_step differs between data-parallel ranks: [4, 6]" in message
        assert "keep_prompt_groups differs between data-parallel ranks: [0, 1]" in message


# Unlike numbers of documents per rank; rank 2 runs dry; groups of 2 that straddle micro-batches.
RESUMED = streams_of([[2, 1, 3, 2, 1, 1, 2, 4, 2], [1, 1, 2, 2, 3, 1, 2, 3, 1], [2, 2]], group=2)
RESUMED_SETTINGS = {"docs_per_step": 6, **WHOLE, "samples_per_prompt": 2}


def test_the_state_after_each_step_resumes_it(pool):
    """FB-90: a resumed run makes the very steps that the stopped one would have made."""
    answers = pool.run(steps_on_rank, [(RESUMED, RESUMED_SETTINGS)])
    assert len(answers[0][0]) == 4
    for num_steps in range(len(answers[0][0]) + 1):
        found = pool.run(resumed_on_rank, RESUMED, RESUMED_SETTINGS, num_steps)
        for rank, (state, steps, at_end) in enumerate(found):
            assert steps == answers[rank][0][num_steps:]
            assert state == found[0][0] and at_end == {"positions": [len(stream) for stream in RESUMED]}
            before = [index for _, _, parts in answers[rank][0][:num_steps] for part in parts for index in part]
            position = state["positions"][rank]
            assert [document.index for part in RESUMED[rank][:position] for document in part] == before


def test_a_state_that_does_not_fit_is_refused():
    target = {"docs_per_step": 4}
    with pytest.raises(ConfigError, match="positions of 2 data-parallel streams, there are 1 now: resume with as many"):
        accumulate([], target, state={"positions": [2, 2]})
    with pytest.raises(DataError, match="ended 1 micro-batches before where the run stopped: another stream"):
        next(accumulate(stream_of([1, 1]), target, state={"positions": [3]}))


# In the training command

VOCABULARY = 9  # of --task repeat
GROUP = 4
slow = pytest.mark.slow


def run_on_rank(rank, output_dir, config, options):
    return shared.run_loop(output_dir, config, options)[0].progress


def trained_on_rank(rank, path, config):
    """Trains on a file; (of each step: this rank's documents, sizes of micro-batches, metrics), weights, the data-parallel rank."""
    trainer = shared.tiny_trainer(config, vocab_size=VOCABULARY)
    options = TrainOptions(micro_batch_size=1, rollouts=path)
    found = []
    documents = DocumentSteps(trainer, options)
    for step in documents.from_file(ReplayedRollouts(options, trainer), first_rollout=0, state=None):
        metrics = trainer.step(with_ref_log_probs(trainer, step.microbatches))
        found.append((step.samples, [len(part) for part in step.microbatches], metrics))
    return found, shared.weights_of(trainer), trainer.groups.dp.rank()


def numbered(rows: list[dict]) -> list[dict]:
    return [{"step": number, **row} for number, row in enumerate(rows)]


def whole_steps_on_rank(rank, steps, config):
    """Trains on steps of documents, each as one micro-batch."""
    trainer = shared.tiny_trainer(config, vocab_size=VOCABULARY)
    return [trainer.step(with_ref_log_probs(trainer, [samples])) for samples in steps], shared.weights_of(trainer)


UNEVEN = [[[4, 4, 1, 3]], [[1, 1]], [[2, 2, 3]], [[1]], [[4, 4, 4, 4]], [[1]], [[3, 3]]]


@slow
def test_a_rank_that_runs_dry_runs_empty_micro_batches_and_loses_nothing(trainers, tmp_path):
    """FB-88, FB-89, FB-25: prompts of 1 to 4 samples go to two data-parallel ranks in turn; one has 12 documents, the other one 5.
    Each step, dry rank and all, is what one process makes of the same documents in one micro-batch. Over two pipeline stages: the
    counts of each are added over its own data-parallel ranks."""
    path = shared.write_file(tmp_path / "r.jsonl", [shared.make_batch(index, sizes) for index, sizes in enumerate(UNEVEN)])
    config = PolicyLossConfig(policy_loss="gspo", docs_per_step=5, samples_per_prompt=None, kl_coefficient=0.1)
    answers = trainers.run(trained_on_rank, str(path), config, world_size=4, **{shared.PP: 2})
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
    [(metrics, truth)] = trainers.run(whole_steps_on_rank, together, config, world_size=1)
    # Rounding of float32 in other orders, through four steps of Adam.
    assert shared.relative_difference(shared.whole([weights for _, weights, _ in answers]), shared.whole([truth])) < 1e-5
    assert shared.unlike_metrics(numbered([row[2] for row in first]), numbered(metrics)) == []


@slow
def test_the_steps_of_a_sampled_rollout_end_with_it_and_use_its_old_log_probs(trainers, tmp_path):
    """The first step of a rollout is on-policy and the next ones are not. A last step holds what is left: 12 and 4 of 16."""
    config = PolicyLossConfig(policy_loss="gspo", loss_aggregation="prompt_mean", samples_per_prompt=GROUP, docs_per_step=9)
    [progress] = trainers.run(run_on_rank, tmp_path, config, {"num_rollouts": 2, "micro_batch_size": 4}, world_size=1)
    rows = shared.metrics_of(tmp_path)
    assert progress.samples_seen == 32
    assert [row["num_documents"] for row in rows] == [12, 4] * 2 and [row["rollout"] for row in rows] == [0, 0, 1, 1]
    assert [row["documents_seen"] for row in rows] == [12, 16, 28, 32]
    assert all(row["policy/ratio_new_old"] == pytest.approx(1.0, abs=1e-5) for row in rows[::2])
    assert all(abs(row["policy/ratio_new_old"] - 1.0) > 1e-4 for row in rows[1::2])


def place_of(sample) -> tuple[int, int]:
    return sample.rollout_index, sample.index


def numbered_batches(sizes_of_rollouts: list[list[int]]) -> list[RolloutBatch]:
    return [shared.make_batch(index, [[1] * size for size in sizes]) for index, sizes in enumerate(sizes_of_rollouts)]


def test_prompt_groups_stay_whole_and_their_names_apart():
    """One prompt asked in two rollouts is two groups."""
    deal = {"dp_size": 2, "micro_batch_size": 3}
    first, second = (list(stream_of_rank(numbered_batches([[2, 2], [2]]), rank, **deal)) for rank in (0, 1))
    assert [[place_of(sample) for sample in part] for part in first] == [[(0, 0), (0, 1)], [(1, 0), (1, 1)]]
    assert [[place_of(sample) for sample in part] for part in second] == [[(0, 2), (0, 3)]]
    assert [sample.prompt_id for part in first for sample in part] == ["0/p0", "0/p0", "1/p0", "1/p0"]


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
    assert max(map(len, groups)) - min(map(len, groups)) <= 1, "ranks take their turn over all rollouts"
