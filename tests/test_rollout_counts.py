"""Rollouts of several samples: counts over ranks and weights, against values by hand and a loop over rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from helpers import counted_collectives, error_of
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.count import RolloutCounts, StepTotals, count_step
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.testing.ranks import run_ranks
from megatron_rl.weights import (
    Formula,
    get_loss_aggregation,
    loss_aggregation_names,
    register_loss_aggregation,
    regularizer_weights,
    sample_token_weights,
)

# Rows of a step: A and B answer prompt a, C and D prompt b. R = 4, P = 2, T = 15; M_A = 6, M_B = 3, M_C = 6, M_D = 0.
PROMPTS, ROLLOUTS = [*"aaabbbb"], [*"AABCCCD"]
TOKENS, LOSSES = [2, 4, 3, 1, 1, 4, 0], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 0.0]
TOTALS = StepTotals(num_samples=7, num_prompts=2, num_tokens=15, num_rollouts=4)
TOKENS_OF_ROLLOUT, ROWS_OF_ROLLOUT, TOKENS_OF_PROMPT = [6, 6, 3, 6, 6, 6, 0], [2, 2, 1, 3, 3, 3, 0], [9, 9, 9, 6, 6, 6, 6]
DIVISORS = {"constant": 8.0}
# Weights and loss. Rows as samples, 1/(7 m_i), have the loss 3.
GOLDEN = {
    # 1/24 (2 x 1 + 4 x 2 + 1 x 4 + 1 x 5 + 4 x 6) + 1/12 x 3 x 3 = 43/24 + 3/4
    "sample_mean": ([1 / 24, 1 / 24, 1 / 12, 1 / 24, 1 / 24, 1 / 24, 0], 2.541666667),
    # 1/18 (2 + 8 + 9) + 1/12 (4 + 5 + 24) = 19/18 + 11/4
    "prompt_mean": ([1 / 18] * 3 + [1 / 12] * 3 + [0], 3.805555556),
    # (19 + 33) / 15
    "token_mean": ([1 / 15] * 6 + [0], 3.466666667),
    # 52 / (8 x 4)
    "constant": ([1 / 32] * 6 + [0], 1.625),
    # (1 + 2) / (4 x 2) + 3 / 4 + (4 + 5 + 6) / (4 x 3) = 3/8 + 3/4 + 5/4
    "row_mean": ([1 / 16, 1 / 32, 1 / 12, 1 / 12, 1 / 12, 1 / 48, 0], 2.375),
}


def test_each_built_in_aggregation_has_its_value_by_hand():
    assert set(GOLDEN) == set(loss_aggregation_names())


def weights_of(aggregation: str, step: tuple) -> torch.Tensor:
    """step: what count_step returns."""
    totals, tokens, prompt_tokens, rollouts = step
    return sample_token_weights(
        *(aggregation, tokens, totals),
        prompt_token_counts=prompt_tokens,
        divisor=DIVISORS.get(aggregation),
        rollout_token_counts=rollouts.tokens,
        rows_of_rollout=rollouts.rows,
    )


def by_hand(step: tuple) -> None:
    totals, tokens, prompt_tokens, rollouts = step
    assert (totals, tokens.tolist(), prompt_tokens.tolist()) == (TOTALS, TOKENS, TOKENS_OF_PROMPT)
    assert (rollouts.tokens.tolist(), rollouts.rows.tolist()) == (TOKENS_OF_ROLLOUT, ROWS_OF_ROLLOUT)
    assert {tensor.dtype for tensor in (tokens, prompt_tokens, *rollouts)} == {torch.int64}


@pytest.mark.parametrize("aggregation", GOLDEN)
def test_a_step_by_hand(aggregation):
    """A rollout counts once however many rows it has; one without a token counts in R, and not in T."""
    step = count_step(None, PROMPTS, token_counts=TOKENS, rollout_ids=ROLLOUTS)
    by_hand(step)
    weights, (wanted, loss) = weights_of(aggregation, step), GOLDEN[aggregation]
    # float32 weights: one rounding of the exact fraction.
    torch.testing.assert_close(weights, torch.tensor(wanted), rtol=6e-8, atol=0)
    total = sum(w * m * value for w, m, value in zip(weights.double().tolist(), TOKENS, LOSSES, strict=True))
    assert total == pytest.approx(loss, rel=1e-7)  # the rounding of the weights
    assert weights_of(aggregation, step)[3:].tolist() == weights[3:].tolist()


def test_the_regularizers_weigh_each_rollout_the_same():
    _, tokens, _, rollouts = count_step(None, PROMPTS, token_counts=TOKENS, rollout_ids=ROLLOUTS)
    assert torch.equal(regularizer_weights(tokens, TOTALS, rollouts.tokens), torch.tensor(GOLDEN["sample_mean"][0]))


def test_rows_as_samples_weigh_as_before():
    totals, tokens, _, _ = count_step(None, PROMPTS, token_counts=TOKENS)
    weights = sample_token_weights("sample_mean", tokens, totals).double().tolist()
    assert sum(w * m * value for w, m, value in zip(weights, TOKENS, LOSSES, strict=True)) == pytest.approx(3.0, rel=1e-7)


class Part(NamedTuple):
    """What one rank passes."""

    tokens: list[int]
    prompts: list[str]
    rollouts: list[str]

    @classmethod
    def of(cls, places: Sequence[int]) -> Part:
        return cls(*([column[place] for place in places] for column in (TOKENS, PROMPTS, ROLLOUTS)))

    def count(self, group: object, **options) -> tuple:
        return count_step(None, self.prompts, group, token_counts=self.tokens, rollout_ids=self.rollouts, **options)


# Rows of A on both of two ranks, of C on both; with three the last one has none.
PLACES = ([0, 3, 5, 6], [1, 2, 4])


def count_over_ranks(rank, parts):
    group = dist.group.WORLD
    own, is_culprit = parts[rank], rank == 1
    with counted_collectives() as with_rollouts:
        step = own.count(group)
    with counted_collectives() as with_prompts:
        count_step(None, own.prompts, group, token_counts=own.tokens)
    assert [name for name, *_ in with_rollouts] == [name for name, *_ in with_prompts], "a collective more"
    alone = count_step(None, None, group, token_counts=own.tokens, rollout_ids=own.rollouts)
    # A rank without samples may give ids, or none, whatever the others do.
    without = count_step(None, own.prompts, group, token_counts=own.tokens, rollout_ids=None if own.tokens else [])
    assert without[0] == StepTotals(7, 2, 15)
    ids = own.rollouts or None
    assert count_step(None, own.prompts, group, token_counts=own.tokens, rollout_ids=ids)[0] == step[0]
    # A has two rows and is one rollout: prompt a has two, as prompt b has.
    assert own.count(group, samples_per_prompt=2)[0] == step[0]
    errors = [
        error_of(call)
        for call in (
            lambda: own.count(group, samples_per_prompt=3),
            # The second rank says that its rows of A answer prompt b.
            lambda: own._replace(prompts=["b" if name == "A" and is_culprit else "a" for name in own.rollouts]).count(group),
            lambda: own._replace(rollouts=own.rollouts[is_culprit:]).count(group),
            lambda: own._replace(prompts=[*map(str, range(len(own.prompts)))]).count(group) if is_culprit else own.count(group),
            lambda: own._replace(rollouts=None).count(group) if is_culprit else own.count(group),
        )
    ]
    assert own.count(group)[0] == step[0], "ranks out of step"
    return step, alone, errors


@pytest.mark.parametrize("size", [2, 3])
def test_rows_of_a_rollout_lie_on_several_ranks(size):
    """As one process counts them, in as many collectives as prompts alone need; all ranks raise together."""
    places = [*PLACES, []][:size]
    found = run_ranks(count_over_ranks, size, [Part.of(of_rank) for of_rank in places], use_megatron=False)
    whole = count_step(None, PROMPTS, token_counts=TOKENS, rollout_ids=ROLLOUTS)
    of_pairs = {rank: "rollout 'A' has samples of two prompts" for rank in (0, 1)} | {2: "a rollout of other data-parallel ranks"}
    for rank, (step, alone, errors) in enumerate(found):
        for column, of_whole in zip((*step[1:3], *step[3]), (*whole[1:3], *whole[3]), strict=True):
            assert torch.equal(column, of_whole[places[rank]])
        assert step[0] == TOTALS and alone[0] == StepTotals(7, None, 15, 4) and alone[2] is None
        assert all(map(torch.equal, alone[3], step[3]))
        size_error, of_two_prompts, too_few, _, on_some_ranks = errors
        assert "2 of samples_per_prompt=3 rollouts in this step: every prompt has 2" in size_error
        assert of_pairs[rank] in of_two_prompts and "f'{prompt_id}/{number}'" in of_two_prompts
        own = "2 rollout_ids for 3 samples" if rank == 1 else "rank 1 of the data-parallel group refused"
        assert own in too_few
        assert "rollout_ids are given on some data-parallel ranks" in on_some_ranks


def test_a_rollout_of_two_prompts_on_one_rank_is_named():
    with pytest.raises(DataError, match="rollout 'A' has samples of two prompts: the rows of a rollout share one prompt"):
        count_step(None, ["a", "b"], token_counts=[1, 1], rollout_ids=["A", "A"])


@given(rows=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 3)), min_size=1, max_size=12))
@settings(max_examples=60, derandomize=True, database=None)
def test_any_step_is_counted_as_a_loop_counts_it(rows):
    """rows: (rollout, prompt of the first row of the rollout, tokens)."""
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


@pytest.mark.parametrize("aggregation", GOLDEN)
def test_a_rollout_of_one_sample_weighs_as_a_sample(aggregation):
    """Bitwise, with ids and without."""
    with_ids = count_step(None, PROMPTS, token_counts=TOKENS, rollout_ids=range(7))
    totals, tokens, prompt_tokens, _ = count_step(None, PROMPTS, token_counts=TOKENS)
    assert with_ids[0] == StepTotals(7, 2, 15, 7) and torch.equal(with_ids[3].tokens, tokens)
    divisor = DIVISORS.get(aggregation)
    weights = sample_token_weights(aggregation, tokens, totals, prompt_token_counts=prompt_tokens, divisor=divisor)
    assert torch.equal(weights, weights_of(aggregation, with_ids))


@pytest.mark.parametrize("ids", [None, PROMPTS])
def test_without_ids_of_rollouts_nothing_more_is_sent(ids):
    """6 numbers of 8 bytes, and 2 for each sample."""

    def shapes(rank):
        with counted_collectives() as made:
            totals, *_ = count_step(None, ids, dist.group.WORLD, token_counts=TOKENS)
        assert totals.num_rollouts is None and totals.rollouts == 14
        return [(name, shape) for name, shape, _ in made]

    for made in run_ranks(shapes, 2, use_megatron=False):
        assert made == [("all_gather", (6,)), *([] if ids is None else [("all_gather", (7, 2))])]


COUNTS = RolloutCounts(torch.tensor(TOKENS_OF_ROLLOUT), torch.tensor(ROWS_OF_ROLLOUT))
REFUSED = [  # error, message, totals, tokens and rows of rollouts
    (ConfigError, "sample_mean needs rollout_token_counts, because the step has 4 rollouts of 7 samples", TOTALS, None, None),
    (DataError, "rollout_token_counts with .* which count no rollouts", StepTotals(7, 2, 15), COUNTS.tokens, None),
    (DataError, "rows_of_rollout with .* which count no rollouts", StepTotals(7, 2, 15), None, COUNTS.rows),
    (DataError, r"rollout_token_counts \(2,\) must have one entry a sample", TOTALS, COUNTS.tokens[:2], None),
    (
        DataError,
        "are below .*, what the sample itself adds: pass those of one count_step",
        TOTALS,
        COUNTS.tokens - 5 * (COUNTS.tokens > 5),
        None,
    ),
    (DataError, "rollout_token_counts .* are more than the 15 tokens of the step", TOTALS, COUNTS.tokens + 10, None),
    (DataError, "rows_of_rollout must be whole numbers", TOTALS, COUNTS.tokens, COUNTS.rows - 1),
    (DataError, "rows_of_rollout .* are below .*, what the sample itself adds", TOTALS, COUNTS.tokens, COUNTS.rows * 0),
]


@pytest.mark.parametrize(("error", "message", "totals", "tokens", "rows"), REFUSED)
def test_wrong_counts_are_refused(error, message, totals, tokens, rows):
    with pytest.raises(error, match=message):
        sample_token_weights("sample_mean", torch.tensor(TOKENS), totals, rollout_token_counts=tokens, rows_of_rollout=rows)


@pytest.mark.parametrize(
    ("totals", "message"),
    [
        ((4, 2, 7, 5), "num_rollouts=5 of 4 samples"),
        ((4, 2, 7, 0), "num_rollouts=0 of 4 samples"),
        ((4, 3, 7, 2), "num_prompts=3 of 2 rollouts"),
        ((4, 3, 7, 2.5), "num_rollouts=2.5 of StepTotals"),
    ],
)
def test_wrong_totals_are_refused(totals, message):
    with pytest.raises(DataError, match=message):
        StepTotals(*totals)


def test_a_function_gets_the_counts_of_rollouts_that_it_names():
    """And those of a rollout of one sample where the step knows no rollouts."""
    seen = []

    @register_loss_aggregation("half_way")
    def half_way(token_counts, totals, *, prompt_token_counts, divisor, rollout_token_counts, rows_of_rollout):
        seen.append((totals.num_rollouts, rollout_token_counts.tolist(), rows_of_rollout.tolist()))
        return 1 / (totals.num_rollouts * rollout_token_counts**0.5 * rows_of_rollout)

    register_loss_aggregation("by_formula", formula="1 / (R M_j^0.5 k_j)")
    step = count_step(None, PROMPTS, token_counts=TOKENS, rollout_ids=ROLLOUTS)
    wanted = [1 / (8 * 6**0.5)] * 2 + [1 / (4 * 3**0.5)] + [1 / (12 * 6**0.5)] * 3 + [0]
    assert weights_of("half_way", step).tolist() == weights_of("by_formula", step).tolist() == pytest.approx(wanted)
    sample_token_weights("half_way", step[1], StepTotals(7, 2, 15))
    assert seen == [(4, TOKENS_OF_ROLLOUT, ROWS_OF_ROLLOUT), (7, TOKENS, [1] * 7)]


def test_a_formula_of_rollouts_is_one_of_samples_where_each_is_one():
    assert Formula.parse("1 / (N R M_j^2 k_j L)").of_one_sample() == Formula(N=-2, m_i=-2, L=-1)
    record = get_loss_aggregation("sample_mean")
    assert (str(record.rollout_formula), str(record.formula), record.needs) == ("1/(R M_j)", "1/(N m_i)", ("num_samples",))
