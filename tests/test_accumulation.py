"""Steps by number of documents: what is in them on each rank, what travels, how they end, fail, stop and go on after a kill."""

from __future__ import annotations

import functools
import gc
import json
import os
import signal
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch.distributed as dist
from helpers import counted_collectives, error_of, pool_of, wait_until
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config import PolicyLossConfig
from megatron_rl.count import StepTotals
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.layout.groups import SINGLE
from megatron_rl.testing.ranks import HANG_SECONDS, RankError
from megatron_rl.train import accumulation
from megatron_rl.train.accumulation import (
    AccumulatedStep,
    AccumulationSettings,
    StepAccumulator,
    cut_at_rollouts,
    make_accumulation_group,
)


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


@functools.cache
def shared_group(world):
    """One accumulation group for all calls of a layout: hundreds of examples need no group each."""
    return make_accumulation_group(world)


def accumulate(stream: Iterable, settings: dict, **options) -> StepAccumulator:
    """On this rank of a world that is the data-parallel group, or on one process."""
    groups = (
        {"dp_group": dist.group.WORLD, "group": shared_group(dist.group.WORLD)} if dist.is_initialized() else {"dp_group": SINGLE}
    )
    return StepAccumulator(stream, AccumulationSettings(**settings), **groups | options)


def steps_on_rank(rank, cases, prefetch):
    """The steps of each case: (streams, settings)."""
    answers = []
    for streams, of_case in cases:
        with accumulate(streams[rank], of_case, prefetch=prefetch) as steps:
            answers.append([plain(step) for step in steps])
            answers[-1] += [plain(step) for step in steps]  # the end stays the end
    return answers


def errors_on_rank(rank, streams, settings, prefetch):
    """(steps before the error, the error, the error of asking once more)."""
    done = []
    with accumulate(streams[rank], settings, prefetch=prefetch) as steps:
        first = error_of(lambda: done.extend(plain(step) for step in steps))
        return done, first, error_of(lambda: next(steps))


def unreadable(parts: Sequence, at: int, kind: str = "raises") -> Iterable:
    """A stream whose micro-batch number `at` cannot be read, or is no sequence."""
    for number, part in enumerate(parts):
        if number == at and kind == "raises":
            raise OSError("disk on fire")
        yield 7 if number == at else part


def settings_on_rank(rank, of_rank, state):
    return error_of(lambda: accumulate([], of_rank[rank], state=state[rank]))


def collectives_on_rank(rank, streams, settings, prefetch):
    """(name, shape, whether it ran over the group of accumulation) of each collective of making, steps and end."""
    group = shared_group(dist.group.WORLD)
    with counted_collectives() as calls:
        with accumulate(streams[rank], settings, prefetch=prefetch) as steps:
            at_making = len(calls)
            num_microbatches = [len(step.microbatches) for step in steps]
        rows = [(name, shape, used is group) for name, shape, used in calls]
    return num_microbatches, rows[:at_making], rows[at_making:]


def close_on_rank(rank, streams, settings, num_steps, forget):
    """(whether a thread is left, whether the end is quiet) after a loop that was left early, without its end being asked for."""
    steps = accumulate(streams[rank], settings)
    for _ in range(num_steps):
        next(steps)
    thread = steps._worker.thread
    if forget:
        del steps
        gc.collect()
        thread.join(accumulation.CLOSE_SECONDS)
        return thread.is_alive(), True
    steps.close()
    return thread.is_alive(), next(steps, None) is None


def one_rank_closes_on_rank(rank, streams, settings):
    """Rank 1 leaves after a step; the others go on until something ends them."""
    with accumulate(streams[rank], settings) as steps:
        next(steps)
        if rank == 1:
            return "closed"
        return error_of(lambda: list(steps))


def killed_on_rank(rank, streams, settings, num_steps, state_file, at):
    """Saves its state after `num_steps` steps; rank 1 then dies while it reads micro-batch `at` of its stream."""
    saved = threading.Event()

    def stream():
        for number, part in enumerate(streams[rank]):
            if number == at and rank == 1:
                saved.wait()
                os.kill(os.getpid(), signal.SIGKILL)
            yield part

    steps = accumulate(stream(), settings)
    for _ in range(num_steps):
        next(steps)
    state = steps.state_dict()
    if rank == 1:
        Path(state_file).write_text(json.dumps(state))
    saved.set()
    list(steps)


def resumed_on_rank(rank, streams, settings, state_file, is_positioned):
    state = json.loads(Path(state_file).read_text())
    stream = streams[rank][state["positions"][rank] :] if is_positioned else streams[rank]
    with accumulate(stream, settings, state=state, is_positioned=is_positioned) as steps:
        return [plain(step) for step in steps], steps.state_dict()


def state_after_on_rank(rank, streams, settings, num_steps, prefetch):
    with accumulate(streams[rank], settings, prefetch=prefetch) as steps:
        for _ in range(num_steps):
            next(steps)
        return steps.state_dict()


BY_MODE = pytest.mark.parametrize("prefetch", [True, False], ids=["prefetch", "inline"])


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


@BY_MODE
def test_steps_by_hand(pool, prefetch):
    """FB-89: one number of micro-batches on both ranks; a dry one runs empty ones; what is left has its real count."""
    cases = [(streams_of(sizes), {"docs_per_step": target}) for *sizes, target, _, _ in BY_HAND]
    for rank, answers in enumerate(pool.run(steps_on_rank, cases, prefetch, world_size=2)):
        for (*_, expected, shows), found in zip(BY_HAND, answers, strict=True):
            assert sizes_of(found) == [(documents, is_full, sizes[rank]) for documents, is_full, *sizes in expected], shows


@BY_MODE
def test_the_rest_may_be_left_out_and_is_reported(prefetch, caplog):
    """FB-89: 5 documents make one step of 4; the fifth is in none, and the log says so."""
    with accumulate(stream_of([2, 2, 1]), {"docs_per_step": 4, "drop_last": True}, prefetch=prefetch) as steps:
        assert [plain(step) for step in steps] == [(4, True, [[0, 1], [2, 3]])]
        assert steps.state_dict() == {"num_steps": 1, "num_documents": 4, "positions": [2]}
    assert "the last 1 documents do not fill a step" in caplog.text


@pytest.mark.parametrize(("multiple", "expected"), [(1, [3, 1]), (2, [4, 2]), (4, [4, 4])])
def test_empty_micro_batches_fill_up_to_the_multiple_of_an_interleaved_pipeline(multiple, expected):
    """Its schedule refuses 3 micro-batches in groups of 2. The empty ones stand at the end and hold no document."""
    found = list(accumulate(stream_of([1, 1, 1, 1]), {"docs_per_step": 3, "microbatch_multiple": multiple}))
    assert [len(step.microbatches) for step in found] == expected
    assert [[d.index for d in step.samples] for step in found] == [[0, 1, 2], [3]]
    assert [len(part) for part in found[0].microbatches[:3]] == [1, 1, 1]


@settings(max_examples=15)
@given(
    sizes=st.lists(st.lists(st.integers(0, 4), max_size=9), min_size=3, max_size=3),
    target=st.integers(1, 12),
    prefetch=st.booleans(),
)
def test_nothing_is_lost_nothing_comes_twice_and_no_step_is_longer_than_it_must_be(pool, sizes, target, prefetch):
    """FB-89, over random partitions on three ranks. A step without its last micro-batches would not have reached the target."""
    streams = streams_of(sizes)
    case = (streams, {"docs_per_step": target, "max_microbatches": 9})
    answers = [answer[0] for answer in pool.run(steps_on_rank, [case], prefetch)]
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


def test_a_count_of_other_samples_than_the_step_s_is_refused():
    """FB-88: a group that is not the accumulation's would give the step the denominators of another one."""
    [step] = accumulate([[Document(0, "a"), Document(1, "b", (1, 1, 0))], [Document(2, "a")]], {"docs_per_step": 3})
    totals, tokens, of_prompts, _ = step.count()
    assert (totals, tokens.tolist(), of_prompts.tolist()) == (StepTotals(3, 2, 4), [1, 2, 1], [2, 2, 2])
    assert step.split([1, 2, 3]) == [[1, 2], [3]]
    step.microbatches.pop()
    with pytest.raises(DataError, match="2 samples counted in a step assembled of 3"):
        step.count()
    with pytest.raises(DataError, match="1 values for the 2 samples"):
        step.split([1])


@BY_MODE
def test_one_small_all_reduce_for_each_fetched_micro_batch_and_one_for_the_end(pool, prefetch):
    """Steps of 2, 2 and 1 micro-batches. Making compares the settings once; nothing runs over the main thread's group."""
    case = (streams_of([[1] * 5, [1] * 5]), {"docs_per_step": 4})
    for num_microbatches, at_making, later in pool.run(collectives_on_rank, *case, prefetch, world_size=2):
        assert num_microbatches == [2, 2, 1]
        assert [(name, own) for name, _, own in at_making] == [("all_gather", True)]
        assert later == [("all_reduce", (6,), True)] * (5 + 1)


def test_the_next_step_is_read_while_this_one_is_held_and_no_further():
    """By events: while step 0 is held, step 1 is read and the micro-batch whose counts travel; step 2 waits."""
    reads = [threading.Event() for _ in range(12)]

    def stream():
        for event, part in zip(reads, stream_of([1] * 12), strict=True):
            event.set()
            yield part

    with accumulate(stream(), {"docs_per_step": 3}) as steps:
        assert not reads[0].is_set(), "nothing is read before a step is asked for"
        assert plain(next(steps))[2] == [[0], [1], [2]]
        assert reads[6].wait(HANG_SECONDS)
        wait_until(lambda: steps._worker.ready.qsize() == 1)
        assert not reads[7].is_set()
        assert steps.state_dict()["positions"] == [3]
        next(steps)
        assert reads[9].wait(HANG_SECONDS)


def test_inline_nothing_is_read_that_the_step_does_not_need():
    """A stream may sample from the policy that trains: its next micro-batch must not be older than the step before."""
    reads, parts = [], stream_of([2] * 4)
    stream = (reads.append(number) or part for number, part in enumerate(parts))
    steps = accumulate(stream, {"docs_per_step": 4}, prefetch=False)
    assert (reads, plain(next(steps)), reads) == ([0, 1], (4, True, [[0, 1], [2, 3]]), [0, 1])
    assert not docs_per_step_threads()


WHOLE = {"keep_prompt_groups": True}


@pytest.mark.parametrize("extra", [{"samples_per_prompt": 4}, {}], ids=["by count", "by prompt_id"])
@BY_MODE
def test_a_step_ends_where_no_rank_is_inside_a_prompt_group(pool, extra, prefetch):
    """Groups of 4. Round 1 reaches the target 2; rank 1 is inside a group and goes on to the end of its second one. Catches a step
    that ends at the target, and one that waits until both ranks happen to be at an end, which would take all."""
    streams = streams_of([[4, 4], [3, 3, 2, 4]], group=4)
    case = (streams, {"docs_per_step": 2, **WHOLE, **extra})
    first, second = pool.run(steps_on_rank, [case], prefetch, world_size=2)
    assert sizes_of(first[0]) == [(12, True, [4, 0, 0]), (8, True, [4])]
    assert sizes_of(second[0]) == [(12, True, [3, 3, 2]), (8, True, [4])]


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
    extra = {"max_microbatches": 1000} | ({} if by_id else {"samples_per_prompt": size})
    answers = pool.run(steps_on_rank, [(streams, {"docs_per_step": target, **WHOLE, **extra})], True)
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
    with pytest.raises(DataError, match="disk on fire"):
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


@BY_MODE
@pytest.mark.parametrize(
    ("sizes", "given_settings", "text"),
    [
        pytest.param(
            [[1, 1, 1, 1], [0, 0, 0, 0]],
            {"docs_per_step": 6, "max_microbatches": 3},
            "docs_per_step=6 has 3 documents after max_microbatches=3 micro-batches a rank: micro-batches hold few documents",
            id="few documents",
        ),
        pytest.param(
            [[3] * 9, []],
            {"docs_per_step": 2, "max_microbatches": 3, "samples_per_prompt": 5, **WHOLE},
            "docs_per_step=2 has 9 documents after max_microbatches=3 micro-batches a rank: prompt groups do not end",
            id="a group that does not end",
        ),
        pytest.param([[0] * 9, [0] * 9], {"docs_per_step": 2}, "has 0 documents after max_microbatches=4", id="default bound"),
    ],
)
def test_a_step_beyond_the_bound_is_an_error_on_every_rank(pool, sizes, given_settings, text, prefetch):
    """FB-89: it names the target, what was reached and what helps; asking again gives the same error, not a quiet end."""
    for done, first, again in pool.run(errors_on_rank, streams_of(sizes), given_settings, prefetch, world_size=2):
        assert not done
        assert first.startswith("DataError: ") and text in first and "raise max_microbatches" in first
        assert again == first


def test_a_step_of_exactly_as_many_micro_batches_as_allowed_is_handed_out():
    """Also where the stream ends there, short of the target."""
    for sizes, target in (([1, 1, 1, 1], 3), ([1, 1, 1], 5)):
        found = next(accumulate(stream_of(sizes), {"docs_per_step": target, "max_microbatches": 3}))
        assert len(found.microbatches) == 3


@BY_MODE
@pytest.mark.parametrize("kind", ["raises", "no sequence"])
def test_a_stream_that_fails_on_one_rank_is_an_error_on_all_after_the_same_step(pool, kind, prefetch):
    """FB-89: rank 1's third micro-batch belongs to the second step; the first one is handed out although it was read ahead."""
    streams = streams_of([[1] * 6] * 3)
    streams[1] = unreadable(streams[1], at=2, kind=kind)
    answers = pool.run(errors_on_rank, streams, {"docs_per_step": 6}, prefetch)
    for rank, (done, first, again) in enumerate(answers):
        assert sizes_of(done) == [(6, True, [1, 1])]
        own = {"raises": "OSError: disk on fire", "no sequence": "TypeError: object of type 'int' has no len()"}[kind]
        expected = f"this rank failed ({own})" if rank == 1 else "data-parallel rank 1 failed: its own message says why"
        assert first == again == f"DataError: the stream of {expected}"


def test_settings_that_make_no_step_are_refused():
    unfit = {"max_microbatches": 0, "microbatch_multiple": None, "samples_per_prompt": 1.5}
    wrong = [{"docs_per_step": 0}, {"docs_per_step": True}, *({"docs_per_step": 4, name: value} for name, value in unfit.items())]
    for values in wrong:
        name, value = list(values.items())[-1]
        with pytest.raises(ConfigError, match=f"{name}={value} must be"):
            AccumulationSettings(**values)
    with pytest.raises(ConfigError, match="docs_per_step is not set"):
        AccumulationSettings.of(PolicyLossConfig())


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
    found = AccumulationSettings.of(PolicyLossConfig(docs_per_step=16, **flags), microbatch_multiple=2)
    assert (found.docs_per_step, found.microbatch_multiple) == (16, 2)
    assert (found.keep_prompt_groups, found.samples_per_prompt) == (keeps, size)


def test_ranks_that_want_unlike_steps_all_say_so(pool):
    """They would wait for each other's rounds."""
    state = {"num_steps": 3, "num_documents": 12, "positions": [3, 3]}
    of_rank = [{"docs_per_step": 4}, {"docs_per_step": 6}]
    for message in pool.run(settings_on_rank, of_rank, [state, None], world_size=2):
        assert message.startswith("ConfigError: 2 problems:")
        assert "docs_per_step differs between data-parallel ranks: [4, 6]" in message
        assert "num_steps differs between data-parallel ranks: [3, 0]" in message


@pytest.mark.parametrize("forget", [False, True], ids=["close", "garbage collection"])
def test_leaving_the_loop_early_ends_the_thread_on_every_rank(pool, forget):
    """Closed before the first step, amid the next one's assembly, and where all streams have ended."""
    case = (streams_of([[1] * 3, [1] * 3]), {"docs_per_step": 2})
    for num_steps in (0, 1, 2):
        assert pool.run(close_on_rank, *case, num_steps, forget, world_size=2) == [(False, True)] * 2


def test_a_rank_that_closes_alone_is_an_error_on_the_others_and_not_a_hang(pool):
    """An exception in the training of one rank ends its `with`; the others' threads must not wait for its rounds."""
    answers = pool.run(one_rank_closes_on_rank, streams_of([[1] * 50] * 3), {"docs_per_step": 3})
    assert answers[1] == "closed"
    for message in (answers[0], answers[2]):
        assert message.startswith("DataError: data-parallel rank 1 has closed its accumulation")


@BY_MODE
def test_ctrl_c_interrupts_the_wait_for_a_step(monkeypatch, caplog, prefetch):
    """KeyboardInterrupt while a stream blocks; close() then gives up on a thread that does not come back, and says so."""
    monkeypatch.setattr(accumulation, "CLOSE_SECONDS", 0.05)
    reading, go_on = threading.Event(), threading.Event()

    def stream():
        reading.set()
        while not go_on.wait(0.01):  # Python looks for signals between waits
            pass
        yield [Document(0)]

    def interrupt():
        reading.wait(HANG_SECONDS)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        with accumulate(stream(), {"docs_per_step": 1}, prefetch=prefetch) as steps:
            threads = docs_per_step_threads()
            next(steps)
    assert ("still waits for its stream or a peer" in caplog.text) is prefetch
    go_on.set()
    assert len(threads) == prefetch
    for thread in threads:
        thread.join(HANG_SECONDS)
        assert not thread.is_alive()


def docs_per_step_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "docs-per-step"]


# Unlike numbers of documents per rank; rank 2 runs dry; groups of 2 that straddle micro-batches.
RESUMED = streams_of([[2, 1, 3, 2, 1, 1, 2, 4, 2], [1, 1, 2, 2, 3, 1, 2, 3, 1], [2, 2]], group=2)
RESUMED_SETTINGS = {"docs_per_step": 6, "microbatch_multiple": 2, **WHOLE, "samples_per_prompt": 2}


@pytest.mark.parametrize("is_positioned", [False, True], ids=["from the start", "from the position"])
def test_a_killed_run_goes_on_with_the_very_steps_that_it_would_have_made(pool, tmp_path, is_positioned):
    """FB-90: rank 1 is killed while it reads step 2, after a checkpoint of step 1; what was read ahead is read again."""
    [truth, *_] = answers = pool.run(steps_on_rank, [(RESUMED, RESUMED_SETTINGS)], True)
    assert len(truth[0]) == 4
    state_file = tmp_path / "state.json"
    with pytest.raises(RankError) as error:
        pool.run(killed_on_rank, RESUMED, RESUMED_SETTINGS, 1, str(state_file), 4)
    assert "exit code -9" in error.value.errors[1]
    assert "RuntimeError: docs-per-step: a data-parallel rank has ended" in error.value.errors[0]
    for rank, (steps, state) in enumerate(pool.run(resumed_on_rank, RESUMED, RESUMED_SETTINGS, str(state_file), is_positioned)):
        assert steps == answers[rank][0][1:]
        assert state["num_steps"] == len(truth[0])
        assert state["num_documents"] == sum(len(part) for stream in RESUMED for part in stream)
        assert state["positions"] == [len(stream) for stream in RESUMED]


@BY_MODE
def test_the_state_after_each_step_resumes_it(pool, tmp_path, prefetch):
    """What a thread has read ahead does not count: the states are those of an inline run."""
    answers = pool.run(steps_on_rank, [(RESUMED, RESUMED_SETTINGS)], True)
    for num_steps in range(len(answers[0][0]) + 1):
        states = pool.run(state_after_on_rank, RESUMED, RESUMED_SETTINGS, num_steps, prefetch)
        for rank, state in enumerate(states):
            assert state == states[0]
            before = [index for _, _, parts in answers[rank][0][:num_steps] for part in parts for index in part]
            position = state["positions"][rank]
            assert [document.index for part in RESUMED[rank][:position] for document in part] == before


def test_a_state_that_does_not_fit_is_refused():
    state, target = {"num_steps": 1, "num_documents": 8, "positions": [2, 2]}, {"docs_per_step": 4}
    says = "positions of 2 data-parallel streams, there are 1 now: divide what follows the first 8"
    with pytest.raises(ConfigError, match=says):
        accumulate([], target, state=state)
    with pytest.raises(ConfigError, match=r"lacks \['positions'\]"):
        accumulate([], target, state={"num_steps": 1, "num_documents": 8})
    with pytest.raises(DataError, match="ended 1 micro-batches before where the run stopped: another stream"):
        next(accumulate(stream_of([1, 1]), target, state={**state, "positions": [3]}))
