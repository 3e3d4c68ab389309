"""Counts and weights: step S by hand, prompt groups across ranks, messages. References are fractions."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers import S_PROMPTS, error_of, s_masks
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.count import StepTotals, count_step, prompt_digest
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.testing.ranks import run_ranks
from megatron_rl.weights import loss_aggregation_names, regularizer_weights, sample_token_weights

# Step S: per-token losses (1, 2, 3, -). N = 4, P = 2, T = 7, M_a = 6, M_b = 1.
S_LOSSES = [1, 2, 3, 0]
S_TOTALS = StepTotals(num_samples=4, num_prompts=2, num_tokens=7)
S_COUNTS, S_PROMPT_COUNTS = torch.tensor([2, 4, 1, 0]), torch.tensor([6, 6, 1, 1])
# Weights and loss, as fractions or as decimals. tests/test_explain.py reads them too.
GOLDEN = [
    # 2/8 x 1 + 4/16 x 2 + 1/4 x 3 = 1/4 + 1/2 + 3/4; dropping the masked sample from N would give 2
    pytest.param("sample_mean", ["1/8", "1/16", "1/4", "0"], "3/2", id="FB-06 FB-18 sample_mean"),
    # 2/12 x 1 + 4/12 x 2 + 1/2 x 3 = 1/6 + 2/3 + 3/2; means of sample means within each prompt would give 9/4
    pytest.param("prompt_mean", ["1/12", "1/12", "1/2", "0"], "7/3", id="FB-06 FB-17 prompt_mean"),
    # (2 x 1 + 4 x 2 + 1 x 3) / 7; a phantom token would give 13/8, a mean of micro-batch means 1.6
    pytest.param("token_mean", ["1/7", "1/7", "1/7", "0"], "13/7", id="FB-06 FB-09 token_mean"),
    # 13 / (8 x 4); not divided by N it would be 13/8
    pytest.param("constant", ["1/32", "1/32", "1/32", "0"], "13/32", id="FB-06 FB-05 constant"),
    # sample_mean, because each sample is a rollout; tests/test_rollout_counts.py has rollouts of several
    pytest.param("row_mean", ["1/8", "1/16", "1/4", "0"], "3/2", id="row_mean"),
]
DIVISORS = {"constant": 8.0}


def test_each_built_in_aggregation_has_its_value_by_hand():
    assert {row.values[0] for row in GOLDEN} == set(loss_aggregation_names()), "add its row to GOLDEN of tests/test_aggregation.py"


def weights_of(mode: str, counts, totals, prompt_counts=None, divisor=None) -> torch.Tensor:
    return sample_token_weights(
        mode, counts, totals, prompt_token_counts=prompt_counts, divisor=DIVISORS.get(mode) if divisor is None else divisor
    )


@pytest.mark.parametrize(("mode", "weights", "loss"), GOLDEN)
def test_step_s_by_hand(mode, weights, loss):
    """FB-06: four names, four formulas, four numbers."""
    totals, counts, prompt_counts, _ = count_step(s_masks(), S_PROMPTS)
    assert (totals, counts.tolist(), prompt_counts.tolist()) == (S_TOTALS, [2, 4, 1, 0], [6, 6, 1, 1])
    got = weights_of(mode, counts, totals, prompt_counts)
    assert got.dtype == torch.float32
    # float32 weights: one rounding of the exact fraction.
    torch.testing.assert_close(got, torch.tensor([float(Fraction(w)) for w in weights]), rtol=6e-8, atol=0)
    total = sum(w * m * value for w, m, value in zip(got.double().tolist(), counts.tolist(), S_LOSSES, strict=True))
    assert total == pytest.approx(float(Fraction(loss)), rel=1e-7)


def test_a_fully_masked_prompt_still_counts_as_a_prompt():
    """FB-18: P counts prompts of the step, not those that happen to have a token."""
    totals, counts, prompt_counts, _ = count_step([torch.ones(2), torch.zeros(3)], ["a", "b"])
    assert totals == StepTotals(2, 2, 2)
    assert weights_of("prompt_mean", counts, totals, prompt_counts).tolist() == [0.25, 0.0]


def test_a_step_of_one_sample_has_weights():
    assert weights_of("sample_mean", torch.tensor([4]), StepTotals(1, None, 4)).tolist() == [0.25]


@pytest.mark.parametrize("divisor", [8, 8.0, np.int64(8), np.float32(8)], ids=lambda value: type(value).__name__)
def test_any_real_number_is_a_divisor(divisor):
    """FB-12: numpy's numbers come out of configurations."""
    assert weights_of("constant", S_COUNTS, S_TOTALS, divisor=divisor).tolist() == [1 / 32, 1 / 32, 1 / 32, 0]


def test_a_truncated_completion_leaves_numerator_and_denominator_together():
    """FB-08, FB-10: counting happens on the masks that the loss will see; their sums count, not the lengths of responses."""
    assert count_step([torch.tensor([1, 1, 0, 0, 1])])[1].tolist() == [3]
    masks = s_masks()
    masks[1] = torch.zeros_like(masks[1])
    totals, counts, prompt_counts, _ = count_step(masks, S_PROMPTS)
    assert (totals.num_tokens, counts.tolist(), prompt_counts.tolist()) == (3, [2, 0, 1, 0], [2, 2, 1, 1])
    assert weights_of("token_mean", counts, totals).tolist() == pytest.approx([1 / 3, 0, 1 / 3, 0])


@pytest.mark.parametrize("num_tokens", [8, 3000])
def test_masks_of_any_type_are_counted(num_tokens):
    generator = torch.Generator().manual_seed(0)
    bools = [torch.rand(num_tokens + index, generator=generator) < 0.5 for index in range(5)] + [torch.zeros(0, dtype=torch.bool)]
    expected = [int(mask.sum()) for mask in bools]
    kinds = [torch.bool, torch.float32, torch.uint8, torch.bfloat16]
    of_mixed_kinds = [mask.to(kinds[index % 4]) for index, mask in enumerate(bools)]
    for masks in (*([mask.to(kind) for mask in bools] for kind in kinds), of_mixed_kinds):
        assert count_step(masks)[1].tolist() == expected
    wrong = [mask.float() for mask in bools]
    wrong[1][3], wrong[4][0] = 0.5, 2.0
    with pytest.raises(DataError, match=r"loss_masks\[1\] has values"):
        count_step(wrong)


STEP = {"counts": S_COUNTS, "totals": S_TOTALS, "prompt_counts": S_PROMPT_COUNTS}
WHOLE_NUMBERS = "must be whole numbers"
REFUSED_WEIGHTS = [  # (error, message, aggregation, what is changed of step S)
    (ConfigError, "prompt_mean needs prompt_token_counts: pass prompt_ids to count_step", "prompt_mean", {"prompt_counts": None}),
    (ConfigError, "prompt_mean needs totals.num_prompts", "prompt_mean", {"totals": StepTotals(4, None, 7)}),
    (ConfigError, "constant needs divisor", "constant", {"divisor": None}),
    *[
        (ConfigError, "must be a finite number above 0", "constant", {"divisor": divisor})
        for divisor in (0, -1, math.nan, math.inf, True, "8k")
    ],
    *[
        (ConfigError, f"divisor=8 with loss aggregation {mode}, which has no divisor: remove it", mode, {"divisor": 8})
        for mode in ("sample_mean", "prompt_mean", "token_mean", "row_mean")
    ],
    (ConfigError, "'mean' is not registered; known: sample_mean, prompt_mean, token_mean, constant", "mean", {}),
    (DataError, "no unmasked token", "token_mean", {"totals": StepTotals(4, 2, 0)}),
    (DataError, "token_counts is tuple", "token_mean", {"counts": (2, 4)}),
    (DataError, r"prompt_token_counts \(2,\) must have one entry a sample", "prompt_mean", {"prompt_counts": S_PROMPT_COUNTS[:2]}),
    (DataError, "constant gives a weight that is negative or not finite in float32", "constant", {"divisor": 1e-40}),
    (DataError, r"\[20, 40, 1, 1\] are more than the 7 tokens of the step", "prompt_mean", {"prompt_counts": [20, 40, 1, 1]}),
    (
        DataError,
        "are below .*, what the sample itself adds: pass",
        "prompt_mean",
        {"prompt_counts": [6, 3, 1, 1]},
    ),
    *[
        (DataError, f"prompt_token_counts {WHOLE_NUMBERS}", "prompt_mean", {"prompt_counts": counts})
        for counts in ([math.nan, 6, 1, 1], [6.5, 6, 1, 1], [6, 6, 1, -1])
    ],
    *[
        (DataError, f"token_counts {message}", "token_mean", {"counts": counts})
        for counts, message in (
            *(([value, 1], WHOLE_NUMBERS) for value in (math.nan, math.inf, 1.5, -1)),
            ([True, False], "is torch.bool"),
            ([2, 4, 2], "hold 3 samples and 8 tokens, more than the whole step has"),
            ([1, 1, 1, 1, 1], "hold 5 samples and 5 tokens"),
        )
    ],
]


@pytest.mark.parametrize(("error", "message", "mode", "changes"), REFUSED_WEIGHTS)
def test_wrong_counts_and_settings_are_refused_with_a_message(error, message, mode, changes):
    """FB-02, FB-12, FB-55: no missing denominator has a local default, and no divisor is without effect."""
    changes = {name: torch.tensor(value) if isinstance(value, list) else value for name, value in changes.items()}
    given = {**STEP, "divisor": DIVISORS.get(mode), **changes}
    with pytest.raises(error, match=message):
        prompts, divisor = given.pop("prompt_counts"), given.pop("divisor")
        sample_token_weights(mode, *given.values(), prompt_token_counts=prompts, divisor=divisor)


@pytest.mark.parametrize(
    ("totals", "message"),
    [
        ((4, -1, 7), "num_prompts=-1 of StepTotals must be a whole number"),
        ((4, 2.5, 7), "num_prompts=2.5"),
        ((4.0, 2, 7), "num_samples=4.0"),
        ((4, 2, math.nan), "num_tokens=nan"),
        ((True, None, 7), "num_samples=True"),
        ((4, 2, torch.tensor(7)), r"num_tokens=tensor\(7\)"),
        ((4, 5, 7), "num_prompts=5 of 4 samples"),
        ((4, 0, 7), "num_prompts=0 of 4 samples"),
    ],
)
def test_wrong_totals_are_refused(totals, message):
    with pytest.raises(DataError, match=message):
        StepTotals(*totals)


TWO = {"samples_per_prompt": 2}
REFUSED_STEPS = [  # (error, message, masks, prompt ids, options)
    (DataError, "2 samples and not a single unmasked token", [torch.zeros(3), torch.zeros(2)], None, {}),
    (DataError, "0 samples and not a single", [], None, {}),
    *[
        (DataError, r"loss_masks\[1\] has values other than 0 and 1", [torch.ones(2), torch.tensor([1.0, value])], None, {})
        for value in (0.5, math.nan)
    ],
    (DataError, r"loss_masks\[0\] is list", [[1, 1]], None, {}),
    (DataError, r"loss_masks\[0\] is \(1, 2\)", [torch.ones(1, 2)], None, {}),
    (DataError, "loss_masks or prompt_ids cannot be read", 3, None, {}),
    (DataError, "neither loss_masks nor token_counts: give it one of them", None, None, {}),
    (DataError, "both loss_masks and token_counts", s_masks(), None, {"token_counts": [2, 4, 1, 0]}),
    *[(DataError, f"token_counts {WHOLE_NUMBERS}", None, None, {"token_counts": [1.0, value]}) for value in (0.5, -1, math.nan)],
    (DataError, "2 prompt_ids for 4 samples", s_masks(), ["a", "b"], {}),
    *[(DataError, "use int or str", [torch.ones(1)], [bad], {}) for bad in (None, 1.5, True)],
    *[(DataError, "use int or str", [torch.ones(1)] * 2, [1, bad], {}) for bad in (1.0, True)],
    *[
        (ConfigError, f"samples_per_prompt={size!r} must be a whole number", s_masks(), S_PROMPTS, {"samples_per_prompt": size})
        for size in (0, "2", 1.5)
    ],
    (ConfigError, "samples_per_prompt=2 without prompt_ids: no group can be checked", s_masks(), None, TWO),
    (DataError, "'b' has 1 of samples_per_prompt=2 .*--allow-partial-prompt-groups", s_masks(), ["a", "a", "b", "c"], TWO),
    (DataError, "step: every prompt has 1, so give --samples-per-prompt 1; or else keep", s_masks(), ["a", "b", "c", "d"], TWO),
    (DataError, "=2: every prompt has 4, so give --samples-per-prompt 4; or else look for ids", s_masks(), ["a"] * 4, TWO),
    (
        *(DataError, "prompt 'a' has 3 samples in this step, more than samples_per_prompt=2"),
        *(s_masks(), ["a", "a", "a", "c"], {**TWO, "allow_partial_prompt_groups": True}),
    ),
]


@pytest.mark.parametrize(("error", "message", "masks", "prompts", "options"), REFUSED_STEPS)
def test_a_wrong_step_is_refused(error, message, masks, prompts, options):
    """FB-17, FB-55: incomplete and too large groups, a size that nothing could check, a step without a token."""
    with pytest.raises(error, match=message):
        count_step(masks, prompts, **options)


def test_partial_groups_pass_where_they_are_allowed_and_whole_ones_always():
    """FB-17, the allowing half."""
    assert count_step(s_masks(), S_PROMPTS, samples_per_prompt=2)[0].num_prompts == 2
    partial = count_step(s_masks(), [7, 7, 8, 9], samples_per_prompt=2, allow_partial_prompt_groups=True)
    assert partial[0].num_prompts == 3


@given(order=st.permutations(range(8)), ids=st.sampled_from([["x", "y", "z"], [3, -1, 2**70]]))
@settings(max_examples=30, derandomize=True, database=None)
def test_ragged_groups_are_found_in_any_order(order, ids):
    """FB-17: groups of 1, 2 and 5, shuffled; nothing assumes a group size, or that its samples are neighbours."""
    lengths = [4, 1, 2, 0, 3, 7, 1, 5]
    prompts = [ids[0], *[ids[1]] * 2, *[ids[2]] * 5]
    totals, counts, prompt_counts, _ = count_step([torch.ones(lengths[i]) for i in order], [prompts[i] for i in order])
    expected = Counter()
    for prompt, length in zip(prompts, lengths, strict=True):
        expected[prompt] += length
    assert totals == StepTotals(8, 3, 23)
    assert counts.tolist() == [lengths[i] for i in order]
    assert prompt_counts.tolist() == [expected[prompts[i]] for i in order]


def test_a_digest_is_stable_and_tells_1_from_its_text():
    """hash() of a string differs from process to process: a group across ranks would fall apart. A lone surrogate is an id too."""
    assert count_step([torch.ones(1), torch.ones(2)], ["\ud800", "a"])[0].num_prompts == 2
    assert (prompt_digest("a"), prompt_digest(7)) == (1104878221144990322, 7131988341290827862)
    assert prompt_digest(1) != prompt_digest("1")
    assert len({prompt_digest(name) for name in ["", "a", "b", "int:1", 0, 1, -1, 2**63, 2**64]}) == 9
    assert all(-(2**63) <= prompt_digest(name) < 2**63 for name in ["", "a", 2**70])


def test_regularizer_weights_are_sample_mean_under_every_aggregation():
    """A KL coefficient means the same in every mode."""
    assert torch.equal(regularizer_weights(S_COUNTS, S_TOTALS), weights_of("sample_mean", S_COUNTS, S_TOTALS))


# Scenarios over 3 data-parallel ranks: what rank r passes to count_step.
GROUP_IDS = [["p", "q"], ["q", "p", "r"], []]
GROUP_MASKS = [[torch.ones(2), torch.ones(3)], [torch.ones(4), torch.zeros(2), torch.ones(1)], []]


def count_over_ranks(rank):
    """FB-29: a rank that raises alone leaves the others in a collective until the timeout. FB-55: no token anywhere."""
    group = dist.group.WORLD
    masks, ids = GROUP_MASKS[rank], GROUP_IDS[rank]
    numbers = [{"p": 10, "q": 11, "r": 12}[name] for name in ids]
    # A rank without samples has no say in whether prompts are known: it may pass an empty list, or None.
    healthy = [count_step(masks, prompts, group) for prompts in (ids, numbers or None, None)]
    lengths = [int(mask.sum()) for mask in masks]
    by_lengths = count_step(None, ids, group, token_counts=lengths)
    too_large = error_of(lambda: count_step(masks, ids, group, samples_per_prompt=1))
    too_small = error_of(lambda: count_step(masks, ids, group, samples_per_prompt=2))
    partial = count_step(masks, ids, group, samples_per_prompt=2, allow_partial_prompt_groups=True)
    for other in (by_lengths, partial):
        assert other[0] == healthy[0][0] and all(map(torch.equal, other[1:3], healthy[0][1:3]))
    assert "has 2 samples in this step, more than samples_per_prompt=1" in too_large, too_large
    assert "has 1 of samples_per_prompt=2" in too_small and ("prompt 'r'" in too_small) == (rank == 1), too_small
    one, is_culprit = [torch.ones(1)], rank == 1
    for messages, call in (
        (["rank 1 of", "loss_masks[0] has values", "rank 1 of"], lambda: count_step([one[0] * (1 + is_culprit)], None, group)),
        (["given on some"] * 3, lambda: count_step(one, None if is_culprit else ["p"], group)),
        (["3 samples and not a single unmasked token"] * 3, lambda: count_step([torch.zeros(2)], None, group)),
        (["a prompt of another", "'r' has 1", "a prompt of"], lambda: count_step(masks, ids, group, samples_per_prompt=2)),
        (["rank 1 of", "use int or str", "rank 1 of"], lambda: count_step(one, [object()] if is_culprit else ["p"], group)),
        (["rank 1 of", "2 prompt_ids for 1 samples", "rank 1 of"], lambda: count_step(one, ["p"] * (1 + is_culprit), group)),
    ):
        error = error_of(call)
        assert error.startswith(("DataError", "EmptyStep", "GroupSizeError")) and messages[rank] in error, error
    # All ranks are still in step after six errors.
    assert count_step(masks, ids, group)[0] == healthy[0][0]
    return [(totals, counts.tolist(), None if p is None else p.tolist()) for totals, counts, p, _ in healthy]


def test_prompt_groups_straddle_ranks_an_empty_rank_takes_part_and_all_raise_together():
    """FB-17, FB-29: M_p = 2 + 0, M_q = 3 + 4, M_r = 1; rank 2 holds nothing and must not leave the others waiting."""
    expected = [([2, 3], [2, 7]), ([4, 0, 1], [7, 2, 1]), ([], [])]
    found = run_ranks(count_over_ranks, 3, use_megatron=False)
    for (by_name, by_number, without), (counts, prompt_counts) in zip(found, expected, strict=True):
        assert by_name == by_number == (StepTotals(5, 3, 10), counts, prompt_counts)
        assert without == (StepTotals(5, None, 10), counts, None)


def test_a_group_of_one_rank_counts_as_one_process_does():
    """FB-02: dp = 1 is no branch of its own."""

    def count(rank):
        return count_step(s_masks(), S_PROMPTS, dist.group.WORLD)

    (counted,) = run_ranks(count, 1, use_megatron=False)
    alone = count_step(s_masks(), S_PROMPTS)
    assert counted[0] == alone[0] and torch.equal(counted[1], alone[1]) and torch.equal(counted[2], alone[2])
