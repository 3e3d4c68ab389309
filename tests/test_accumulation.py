"""Steps by number of documents: what is in them on each rank, what travels, how they end, fail and go on after a stop."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pytest
import torch.distributed as dist
from helpers import counted_collectives, error_of, pool_of
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config import PolicyLossConfig
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.layout.groups import SINGLE
from megatron_rl.train.accumulation import AccumulatedStep, AccumulationSettings, StepAccumulator
from megatron_rl.train.rollouts import cut_at_rollouts


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


def unreadable(parts: Sequence, at: int) -> Iterable:
    """A stream whose micro-batch number `at` cannot be read."""
    yield from parts[:at]
    raise OSError("disk on fire")


def settings_on_rank(rank, of_rank):
    return error_of(lambda: accumulate([], of_rank[rank]))


def collectives_on_rank(rank, streams, settings):
    """(name, shape) of each collective of making, then of steps and end."""
    with counted_collectives() as calls:
        steps = accumulate(streams[rank], settings)
        at_making = len(calls)
        num_microbatches = [len(step.microbatches) for step in steps]
    rows = [(name, shape) for name, shape, _ in calls]
    return num_microbatches, rows[:at_making], rows[at_making:]


def resumed_on_rank(rank, streams, settings, num_steps):
    """The state after so many steps, and the steps of an accumulator that is made with it."""
    before = accumulate(streams[rank], settings)
    for _ in range(num_steps):
        next(before)
    state = before.state_dict()
    after = accumulate(streams[rank], settings, state=state)
    return state, [plain(step) for step in after], after.state_dict()


pool = pool_of(3, use_megatron=False)


def sizes_of(answer) -> list[tuple[int, bool, list[int]]]:
    return [(documents, is_full, [len(part) for part in parts]) for documents, is_full, parts in answer]


BY_HAND = [
    # sizes of the micro-batches of two ranks, target, [(documents, is it full, sizes on rank 0, sizes on rank 1)], what it shows
    ([2, 2], [2, 2], 4, [(4, True, [2], [2]), (4, True, [2], [2])], "hit exactly"),
    ([3, 3], [3, 3], 4, [(6, True, [3], [3]), (6, True, [3], [3])], "overshot"),
    ([5, 0, 1], [1, 1, 4], 6, [(6, True, [5], [1]), (6, True, [0, 1], [1, 4])], "unlike numbers per rank"),
    ([1, 1, 1], [1, 1, 1], 4, [(4, True, [1, 1], [1, 1]), (2, False, [1], [1])], "ends early"),
    ([], [1, 1, 1], 2, [(2, True, [0, 0], [1, 1]), (1, False, [0], [1])], "dry from the start"),
    ([1], [1, 1, 1], 2, [(2, True, [1], [1]), (2, True, [0, 0], [1, 1])], "dry in the middle"),
    ([1, 0, 1], [1, 0, 1], 4, [(4, True, [1, 1], [1, 1])], "micro-batches that are empty everywhere are left out"),
    ([0, 0], [0], 4, [], "no document at all"),
    ([], [], 4, [], "no micro-batch at all"),
]


def test_steps_by_hand(pool):
    """FB-89: one number of micro-batches on both ranks; a dry one runs empty ones; what is left has its real count."""
    cases = [(streams_of(sizes), {"docs_per_step": target}) for *sizes, target, _, _ in BY_HAND]
    for rank, answers in enumerate(pool.run(steps_on_rank, cases, world_size=2)):
        for (*_, expected, shows), found in zip(BY_HAND, answers, strict=True):
            assert sizes_of(found) == [(documents, is_full, sizes[rank]) for documents, is_full, *sizes in expected], shows


def test_empty_micro_batches_fill_up_to_the_multiple_of_an_interleaved_pipeline():
    """Its schedule refuses 3 micro-batches in groups of 2. The empty ones stand at the end and hold no document."""
    found = list(accumulate(stream_of([1, 1, 1, 1]), {"docs_per_step": 3, "microbatch_multiple": 2}))
    assert [len(step.microbatches) for step in found] == [4, 2] and found[0].split([1, 2, 3]) == [[1], [2], [3], []]
    assert [[d.index for d in step.samples] for step in found] == [[0, 1, 2], [3]]
    assert [len(part) for part in found[0].microbatches[:3]] == [1, 1, 1]


@settings(max_examples=15)
@given(
    sizes=st.lists(st.lists(st.integers(0, 4), max_size=9), min_size=3, max_size=3),
    target=st.integers(1, 12),
)
def test_nothing_is_lost_nothing_comes_twice_and_no_step_is_longer_than_it_must_be(pool, sizes, target):
    """FB-89, over random partitions on three ranks. A step without its last micro-batches would not have reached the target."""
    streams = streams_of(sizes)
    case = (streams, {"docs_per_step": target})
    answers = [answer[0] for answer in pool.run(steps_on_rank, [case])]
    for rank, steps in enumerate(answers):
        handed_out = [index for _, _, parts in steps for part in parts for index in part]
        assert handed_out == [document.index for part in streams[rank] for document in part]
    for of_ranks in zip(*answers, strict=True):
        assert len({(documents, is_full, len(parts)) for documents, is_full, parts in of_ranks}) == 1
        documents, is_full, _ = of_ranks[0]
        by_round = [sum(len(part) for part in parts) for parts in zip(*(parts for _, _, parts in of_ranks), strict=True)]
        assert documents == sum(by_round) and is_full == (documents >= target)
        assert all(by_round) and sum(by_round[:-1]) < target
    assert all(is_full for _, is_full, _ in answers[0][:-1])


def test_one_small_all_reduce_for_each_fetched_micro_batch_and_one_for_the_end(pool):
    """Steps of 2, 2 and 1 micro-batches. Making compares the settings once."""
    case = (streams_of([[1] * 5, [1] * 5]), {"docs_per_step": 4})
    for num_microbatches, at_making, later in pool.run(collectives_on_rank, *case, world_size=2):
        assert num_microbatches == [2, 2, 1]
        assert at_making == [("all_gather", (4,))]
        assert later == [("all_reduce", (3,))] * (5 + 1)


def test_nothing_is_read_that_the_step_does_not_need():
    """A stream may sample from the policy that trains: its next micro-batch must not be older than the step before."""
    reads, parts = [], stream_of([2] * 4)
    stream = (reads.append(number) or part for number, part in enumerate(parts))
    steps = accumulate(stream, {"docs_per_step": 4})
    assert (reads, plain(next(steps)), reads) == ([0, 1], (4, True, [[0, 1], [2, 3]]), [0, 1])


WHOLE = {"keep_prompt_groups": True}


def test_a_step_ends_where_no_rank_is_inside_a_prompt_group(pool):
    """Groups of 4. Round 1 reaches the target 2; rank 1 is inside a group and goes on to the end of its second one. Catches a step
    that ends at the target, and one that waits until both ranks happen to be at an end, which would take all."""
    streams = streams_of([[4, 4], [3, 3, 2, 4]], group=4)
    cases = [(streams, {"docs_per_step": 2, **WHOLE, **extra}) for extra in ({"samples_per_prompt": 4}, {})]
    first, second = pool.run(steps_on_rank, cases, world_size=2)
    for of_first, of_second in zip(first, second, strict=True):
        assert sizes_of(of_first) == [(12, True, [4, 0, 0]), (8, True, [4])]
        assert sizes_of(of_second) == [(12, True, [3, 3, 2]), (8, True, [4])]


@settings(max_examples=15)
@given(data=st.data(), size=st.integers(1, 4), target=st.integers(1, 10), by_id=st.booleans())
def test_groups_are_whole_in_every_step_and_nothing_is_lost(pool, data, size, target, by_id):
    """Random cuts of whole groups into micro-batches, empty ones among them, on three ranks."""
    sizes = []
    for _ in range(3):
        left, row = size * data.draw(st.integers(0, 5)), []
        while left:
            row.append(data.draw(st.integers(0, min(left, 5))))
            left -= row[-1]
        sizes.append(row)
    streams = streams_of(sizes, group=size)
    extra = {} if by_id else {"samples_per_prompt": size}
    answers = pool.run(steps_on_rank, [(streams, {"docs_per_step": target, **WHOLE, **extra})])
    for rank, [steps] in enumerate(answers):
        seen = [[index for part in parts for index in part] for _, _, parts in steps]
        assert sum(seen, []) == [document.index for part in streams[rank] for document in part]
        assert all(len(indices) % size == 0 for indices in seen)
        assert len(steps) == len(answers[0][0])


def test_a_group_whose_end_is_hidden_by_an_empty_or_a_broken_micro_batch_is_not_cut():
    """By id: an empty micro-batch after half a group says nothing, so the step goes on; one that cannot be read is an error."""
    a, b, c, d = (Document(index, prompt) for index, prompt in enumerate("aabb"))
    found = accumulate([[a], [], [b], [c], [d]], {"docs_per_step": 1, **WHOLE})
    assert [[document.index for document in step.samples] for step in found] == [[0, 1], [2, 3]]
    with pytest.raises(OSError, match="disk on fire"):
        next(accumulate(unreadable([[a], [b]], at=1), {"docs_per_step": 1, **WHOLE}))


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
    pairs = [Document(index, rollout_id=rollout) for index, rollout in enumerate("AABB")]
    assert cut_at_rollouts(pairs, 3) == [pairs[:2], pairs[2:]]
    assert cut_at_rollouts(rows[4:], 1) == [[rows[4]], [rows[5]]] and cut_at_rollouts([], 3) == []


@pytest.mark.parametrize(
    ("sizes", "given_settings", "text"),
    [
        pytest.param(
            [[1] + [0] * 1100, [0] * 1100],
            {"docs_per_step": 6},
            "docs_per_step=6 has 1 documents after 1030 micro-batches a rank: micro-batches hold few documents",
            id="few documents",
        ),
        pytest.param(
            [[1] + [5] * 1100, []],
            {"docs_per_step": 2, "samples_per_prompt": 5, **WHOLE},
            "docs_per_step=2 has 5126 documents after 1026 micro-batches a rank: prompt groups do not end",
            id="a group that does not end",
        ),
    ],
)
def test_a_step_that_does_not_end_is_an_error_on_every_rank(pool, sizes, given_settings, text):
    """FB-89: it names the target, what was reached and what helps."""
    for done, error in pool.run(errors_on_rank, streams_of(sizes), given_settings, world_size=2):
        assert not done
        assert error.startswith("DataError: ") and text in error and "or lower --docs-per-step" in error


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
    found = AccumulationSettings.of(PolicyLossConfig(docs_per_step=16, **flags), microbatch_multiple=2)
    assert (found.docs_per_step, found.microbatch_multiple) == (16, 2)
    assert (found.keep_prompt_groups, found.samples_per_prompt) == (keeps, size)


def test_ranks_that_want_unlike_steps_all_say_so(pool):
    """They would wait for each other's rounds."""
    of_rank = [{"docs_per_step": 4}, {"docs_per_step": 6, "keep_prompt_groups": True}]
    for message in pool.run(settings_on_rank, of_rank, world_size=2):
        assert message.startswith("ConfigError: 2 problems:")
        assert "docs_per_step differs between data-parallel ranks: [4, 6]" in message
        assert "keep_prompt_groups differs between data-parallel ranks: [0, 1]" in message


# Unlike numbers of documents per rank; rank 2 runs dry; groups of 2 that straddle micro-batches.
RESUMED = streams_of([[2, 1, 3, 2, 1, 1, 2, 4, 2], [1, 1, 2, 2, 3, 1, 2, 3, 1], [2, 2]], group=2)
RESUMED_SETTINGS = {"docs_per_step": 6, "microbatch_multiple": 2, **WHOLE, "samples_per_prompt": 2}


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
