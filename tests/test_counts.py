"""Counts and weights of a step: by hand, against loops and over ranks. test_refused.py has refusals."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
from helpers import S_PROMPTS, counted_collectives, error_of, pool_of, s_masks
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.count import StepTotals, count_step, prompt_digest
from megatron_rl.errors import DataError
from megatron_rl.weights import (
    AGGREGATIONS,
    get_loss_aggregation,
    register_loss_aggregation,
    regularizer_weights,
    sample_token_weights,
)

# Step S: per-token losses (1, 2, 3, -). N = 4, P = 2, T = 7, M_a = 6, M_b = 1.
S_LOSSES = [1, 2, 3, 0]
S_TOTALS = StepTotals(num_samples=4, num_prompts=2, num_tokens=7)
# Weights and loss, as fractions. tests/test_explain.py reads them too.
GOLDEN = [
    # 2/8 x 1 + 4/16 x 2 + 1/4 x 3 = 1/4 + 1/2 + 3/4; dropping the masked sample from N would give 2
    pytest.param("sample_mean", ["1/8", "1/16", "1/4", "0"], "3/2", id="FB-06 FB-18 sample_mean"),
    # 2/12 x 1 + 4/12 x 2 + 1/2 x 3 = 1/6 + 2/3 + 3/2; means of sample means within each prompt would give 9/4
    pytest.param("prompt_mean", ["1/12", "1/12", "1/2", "0"], "7/3", id="FB-06 FB-17 prompt_mean"),
    # (2 x 1 + 4 x 2 + 1 x 3) / 7; a phantom token would give 13/8, a mean of micro-batch means 1.6
    pytest.param("token_mean", ["1/7", "1/7", "1/7", "0"], "13/7", id="FB-06 FB-09 token_mean"),
    # 13 / (8 x 4); not divided by N it would be 13/8
    pytest.param("constant", ["1/32", "1/32", "1/32", "0"], "13/32", id="FB-06 FB-05 constant"),
    # sample_mean, because each sample is a rollout
    pytest.param("row_mean", ["1/8", "1/16", "1/4", "0"], "3/2", id="row_mean"),
]
# Rows of a step: A and B answer prompt a, C and D prompt b. R = 4, P = 2, T = 15; M_A = 6, M_B = 3, M_C = 6, M_D = 0.
PROMPTS, ROLLOUTS = [*"aaabbbb"], [*"AABCCCD"]
TOKENS, LOSSES = [2, 4, 3, 1, 1, 4, 0], [1, 2, 3, 4, 5, 6, 0]
TOTALS = StepTotals(num_samples=7, num_prompts=2, num_tokens=15, num_rollouts=4)
TOKENS_OF_ROLLOUT, ROWS_OF_ROLLOUT, TOKENS_OF_PROMPT = [6, 6, 3, 6, 6, 6, 0], [2, 2, 1, 3, 3, 3, 0], [9, 9, 9, 6, 6, 6, 6]
# Rows as samples, 1/(7 m_i), have the loss 3.
GOLDEN_OF_ROLLOUTS = [
    # 1/24 (2 x 1 + 4 x 2 + 1 x 4 + 1 x 5 + 4 x 6) + 1/12 x 3 x 3 = 43/24 + 3/4
    ("sample_mean", ["1/24", "1/24", "1/12", "1/24", "1/24", "1/24", "0"], "61/24"),
    # 1/18 (2 + 8 + 9) + 1/12 (4 + 5 + 24) = 19/18 + 11/4
    ("prompt_mean", ["1/18", "1/18", "1/18", "1/12", "1/12", "1/12", "0"], "137/36"),
    # (19 + 33) / 15
    ("token_mean", ["1/15"] * 6 + ["0"], "52/15"),
    # 52 / (8 x 4)
    ("constant", ["1/32"] * 6 + ["0"], "13/8"),
    # (1 + 2) / (4 x 2) + 3 / 4 + (4 + 5 + 6) / (4 x 3) = 3/8 + 3/4 + 5/4
    ("row_mean", ["1/16", "1/32", "1/12", "1/12", "1/12", "1/48", "0"], "19/8"),
]


def test_each_built_in_aggregation_has_its_values_by_hand():
    names = set(AGGREGATIONS.names())
    assert {row.values[0] for row in GOLDEN} == {row[0] for row in GOLDEN_OF_ROLLOUTS} == names, "add its rows"


def weights_of(name: str, step: tuple, divisor: object = 8.0) -> torch.Tensor:
    """step: what count_step returns."""
    totals, tokens, prompt_tokens, rollouts = step
    of_rollouts = {} if rollouts is None else {"rollout_token_counts": rollouts.tokens, "rows_of_rollout": rollouts.rows}
    divisor = divisor if get_loss_aggregation(name).takes_divisor else None
    return sample_token_weights(name, tokens, totals, prompt_token_counts=prompt_tokens, divisor=divisor, **of_rollouts)


def assert_by_hand(name: str, step: tuple, wanted: list[str], losses: list[int], loss: str) -> None:
    """float32 weights: one rounding of the exact fraction, and so has the loss."""
    got = weights_of(name, step)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, torch.tensor([float(Fraction(w)) for w in wanted]), rtol=6e-8, atol=0)
    total = sum(w * m * value for w, m, value in zip(got.double().tolist(), step[1].tolist(), losses, strict=True))
    assert total == pytest.approx(float(Fraction(loss)), rel=1e-7)


@pytest.mark.parametrize(("name", "weights", "loss"), GOLDEN)
def test_step_s_by_hand(name, weights, loss):
    """FB-06, FB-08, FB-10: four names, four formulas, four numbers. Masks are counted, and not the lengths of responses."""
    step = count_step(s_masks(), S_PROMPTS)
    assert (step[0], step[1].tolist(), step[2].tolist()) == (S_TOTALS, [2, 4, 1, 0], [6, 6, 1, 1])
    assert_by_hand(name, step, weights, S_LOSSES, loss)


def step_of_rollouts() -> tuple:
    return count_step(None, PROMPTS, token_counts=TOKENS, rollout_ids=ROLLOUTS)


@pytest.mark.parametrize(("name", "weights", "loss"), GOLDEN_OF_ROLLOUTS)
def test_a_step_of_rollouts_by_hand(name, weights, loss):
    """A rollout counts once however many rows it has; one without a token counts in R, and not in T. The regularizers weigh each
    rollout the same."""
    step = step_of_rollouts()
    assert (step[0], step[1].tolist(), step[2].tolist()) == (TOTALS, TOKENS, TOKENS_OF_PROMPT)
    assert (step[3].tokens.tolist(), step[3].rows.tolist()) == (TOKENS_OF_ROLLOUT, ROWS_OF_ROLLOUT)
    assert {tensor.dtype for tensor in (*step[1:3], *step[3])} == {torch.int64}
    assert_by_hand(name, step, weights, LOSSES, loss)
    assert torch.equal(regularizer_weights(step[1], TOTALS, step[3].tokens), weights_of("sample_mean", step))


@pytest.mark.parametrize("name", AGGREGATIONS.names())
def test_a_rollout_of_one_sample_weighs_as_a_sample(name):
    """Bitwise, with ids and without. A KL coefficient means the same in every mode."""
    with_ids = count_step(None, PROMPTS, token_counts=TOKENS, rollout_ids=range(7))
    without = count_step(None, PROMPTS, token_counts=TOKENS)
    assert with_ids[0] == StepTotals(7, 2, 15, 7) and torch.equal(with_ids[3].tokens, without[1])
    assert torch.equal(weights_of(name, without), weights_of(name, with_ids))
    assert torch.equal(regularizer_weights(*without[1::-1]), weights_of("sample_mean", without))


def test_a_fully_masked_prompt_still_counts_as_a_prompt():
    """FB-18: P counts prompts of the step, not those that happen to have a token."""
    step = count_step([torch.ones(2), torch.zeros(3)], ["a", "b"])
    assert step[0] == StepTotals(2, 2, 2) and weights_of("prompt_mean", step).tolist() == [0.25, 0.0]
    assert weights_of("sample_mean", count_step([torch.ones(4)])).tolist() == [0.25], "a step of one sample has weights"


def test_masks_of_any_type_are_counted():
    generator = torch.Generator().manual_seed(0)
    bools = [torch.rand(3000 + index, generator=generator) < 0.5 for index in range(5)] + [torch.zeros(0, dtype=torch.bool)]
    expected = [int(mask.sum()) for mask in bools]
    kinds = [torch.bool, torch.float32, torch.uint8, torch.bfloat16]
    of_mixed_kinds = [mask.to(kinds[index % 4]) for index, mask in enumerate(bools)]
    for masks in (*([mask.to(kind) for mask in bools] for kind in kinds), of_mixed_kinds):
        assert count_step(masks)[1].tolist() == expected
    wrong = [mask.float() for mask in bools]
    wrong[1][3], wrong[4][0] = 0.5, 2.0
    with pytest.raises(DataError, match=r"loss_masks\[1\] has values"):
        count_step(wrong)


def test_partial_groups_pass_where_they_are_allowed_and_whole_ones_always():
    """FB-17, the allowing half."""
    assert count_step(s_masks(), S_PROMPTS, samples_per_prompt=2)[0].num_prompts == 2
    partial = count_step(s_masks(), [7, 7, 8, 9], samples_per_prompt=2, allow_partial_prompt_groups=True)
    assert partial[0].num_prompts == 3
    assert count_step(s_masks(), [*"abcd"], samples_per_prompt=1)[0].num_prompts == 4


@given(rows=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 3)), min_size=1, max_size=12))
@settings(max_examples=60, derandomize=True, database=None)
def test_any_step_of_rollouts_is_counted_as_a_loop_counts_it(rows):
    """FB-17: nothing assumes a group size, or that its rows are neighbours. rows: (rollout, prompt of its first row, tokens)."""
    prompt_of: dict[int, int] = {}
    rows = [(rollout, prompt_of.setdefault(rollout, prompt), tokens) for rollout, prompt, tokens in rows]
    if not sum(tokens for *_, tokens in rows):
        return
    step = count_step(None, [row[1] for row in rows], token_counts=[row[2] for row in rows], rollout_ids=[row[0] for row in rows])
    wanted = [
        (
            sum(other[2] for other in rows if other[0] == row[0]),
            sum(other[2] > 0 for other in rows if other[0] == row[0]),
            sum(other[2] for other in rows if other[1] == row[1]),
        )
        for row in rows
    ]
    assert list(zip(step[3].tokens.tolist(), step[3].rows.tolist(), step[2].tolist(), strict=True)) == wanted
    assert (step[0].num_rollouts, step[0].num_prompts) == (len(prompt_of), len({*prompt_of.values()}))


def test_a_digest_is_stable_and_tells_1_from_its_text():
    """hash() of a string differs from process to process: a group across ranks would fall apart. A lone surrogate is an id too."""
    assert count_step([torch.ones(1), torch.ones(2)], ["\ud800", "a"])[0].num_prompts == 2
    assert (prompt_digest("a"), prompt_digest(7)) == (1104878221144990322, 7131988341290827862)
    assert prompt_digest(1) != prompt_digest("1")
    assert len({prompt_digest(name) for name in ["", "a", "b", "int:1", 0, 1, -1, 2**63, 2**64]}) == 9
    assert all(-(2**63) <= prompt_digest(name) < 2**63 for name in ["", "a", 2**70])


# Over ranks. Rows of A on both of two ranks, of C on both; the third rank has none, and must not leave the others waiting.

PLACES = ([0, 3, 5, 6], [1, 2, 4], [])
# What rank 1 passes instead -> what the ranks are told.
FAULTS: dict[str, tuple[dict, list[str]]] = {
    "a mask": (
        {"loss_masks": [torch.full((1,), 2.0)] * 3, "token_counts": None},
        ["rank 1 of", "loss_masks[0] has values", "rank 1"],
    ),
    "no prompts": ({"prompt_ids": None}, ["prompt_ids are given on some"] * 3),
    "too few ids": ({"prompt_ids": ["a"]}, ["rank 1 of", "1 prompt_ids for 3 samples", "rank 1 of"]),
    "no rollouts": ({"rollout_ids": None}, ["rollout_ids are given on some"] * 3),
    # It says that its rows of A answer prompt b.
    "two prompts": ({"prompt_ids": [*"bab"]}, ["rollout 'A' has samples of two prompts"] * 2 + ["a rollout of other"]),
    "an iterator": ({"loss_masks": (1 / 0 for _ in "a"), "token_counts": None}, ["rank 1 of", "division by zero", "rank 1 of"]),
    "a size": ({"samples_per_prompt": 2}, ["samples_per_prompt differs"] * 3),
}
ranks = pool_of(3, use_megatron=False)


def count_over_ranks(rank: int):
    group = dist.group.WORLD
    columns = [[column[place] for place in PLACES[rank]] for column in (PROMPTS, ROLLOUTS, TOKENS)]
    own = dict(zip(("prompt_ids", "rollout_ids", "token_counts"), columns, strict=True)) | {"loss_masks": None}

    def counted(**changes) -> tuple:
        return count_step(dp_group=group, **own | changes)

    with counted_collectives() as of_rollouts:
        step = counted()
    with counted_collectives() as of_prompts:
        counted(rollout_ids=None)
    with counted_collectives() as of_samples:
        alone = counted(rollout_ids=None, prompt_ids=None)
    shapes = [[call[:2] for call in calls] for calls in (of_rollouts, of_prompts, of_samples)]
    # A rank without samples may give ids, or none, whatever the others do. A has two rows and is one rollout: prompt a has two.
    for same in (counted(rollout_ids=own["rollout_ids"] or None), counted(samples_per_prompt=2)):
        assert same[0] == step[0]
    sized = error_of(lambda: counted(samples_per_prompt=3))
    empty = error_of(lambda: counted(token_counts=[0] * len(own["token_counts"])))
    faults = []
    for change, _ in FAULTS.values():
        faults.append(error_of(lambda change=change: counted(**(change if rank == 1 else {}))))
    assert counted()[0] == step[0], "ranks out of step"
    return step, alone, shapes, sized, empty, faults


def test_a_step_over_ranks_is_that_of_one_process_and_all_raise_together(ranks):
    """FB-17, FB-29, FB-55: prompts and rollouts straddle ranks; a rank that raises alone would leave the others in a collective.
    6 numbers of 8 bytes and 2 for each sample are sent, and nothing more for rollouts."""
    whole = step_of_rollouts()
    for rank, (step, alone, shapes, sized, empty, faults) in enumerate(ranks.run(count_over_ranks)):
        for column, of_whole in zip((*step[1:3], *step[3]), (*whole[1:3], *whole[3]), strict=True):
            assert torch.equal(column, of_whole[PLACES[rank]])
        assert step[0] == TOTALS and alone[0] == StepTotals(7, None, 15) and alone[2] is None
        assert [[name for name, _ in calls] for calls in shapes] == [["all_gather"] * 2, ["all_gather"] * 2, ["all_gather"]]
        assert shapes[1:] == [[("all_gather", (6,)), ("all_gather", (4, 2))], [("all_gather", (6,))]]
        assert "2 of samples_per_prompt=3 rollouts in this step: every prompt has 2" in sized
        assert "7 samples and not a single unmasked token" in empty
        for (name, (_, messages)), error in zip(FAULTS.items(), faults, strict=True):
            assert messages[rank] in error, f"{name}: {error}"


def test_a_group_of_one_rank_counts_as_one_process_does(ranks):
    """FB-02: dp = 1 is no branch of its own."""

    def count(rank):
        return count_step(s_masks(), S_PROMPTS, dist.group.WORLD)

    (counted,) = ranks.run(count, world_size=1)
    alone = count_step(s_masks(), S_PROMPTS)
    assert counted[0] == alone[0] and torch.equal(counted[1], alone[1]) and torch.equal(counted[2], alone[2])


# Functions and formulas of one's own


def test_a_function_gets_the_counts_of_rollouts_that_it_names():
    """And those of a rollout of one sample where the step knows no rollouts."""
    seen = []

    @register_loss_aggregation("half_way")
    def half_way(token_counts, totals, *, prompt_token_counts, divisor, rollout_token_counts, rows_of_rollout):
        seen.append((totals.num_rollouts, rollout_token_counts.tolist(), rows_of_rollout.tolist()))
        return 1 / (totals.num_rollouts * rollout_token_counts**0.5 * rows_of_rollout)

    register_loss_aggregation("by_formula", formula="1 / (R M_j^0.5 k_j)")
    step = step_of_rollouts()
    wanted = [1 / (8 * 6**0.5)] * 2 + [1 / (4 * 3**0.5)] + [1 / (12 * 6**0.5)] * 3 + [0]
    assert weights_of("half_way", step).tolist() == weights_of("by_formula", step).tolist() == pytest.approx(wanted)
    sample_token_weights("half_way", step[1], StepTotals(7, 2, 15))
    assert seen == [(4, TOKENS_OF_ROLLOUT, ROWS_OF_ROLLOUT), (7, TOKENS, [1] * 7)]
