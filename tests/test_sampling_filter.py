"""Sampling with top-p: which ids are kept, on each layout the same, and what is recorded of a token."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import pool_of
from hypothesis import given, settings
from hypothesis import strategies as st
from test_generation import LAYOUTS, NOISE, prompts_of, settings_of
from trainer_cases import CP, PP, VOCABULARY, lively, tiny_trainer

from megatron_rl.layout.groups import resolve_groups
from megatron_rl.train.sampling_filter import KeptTokens, kept_by_top_p

pool = pool_of(4)
# Float32 logits, and sums of eleven exponentials of them, on two layouts.
TOLERANCE = 2e-5
# Under which several tokens of one row are likely.
TEMPERATURE = 3.0


# Probabilities .5 .25 .125 .125 of ids 2, 0, 1, 3.
BY_HAND = [math.log(0.25), math.log(0.125), math.log(0.5), math.log(0.125)]
CASES = [
    pytest.param(0.5, [2], id="the first reaches it"),
    pytest.param(0.51, [0, 2], id="the token that crosses is kept"),
    pytest.param(0.8, [0, 1, 2], id="of two equal ones the smaller id crosses"),
    pytest.param(1e-9, [2], id="the largest is always kept"),
]


@pytest.mark.parametrize(("top_p", "expected"), CASES)
def test_the_kept_ids_by_hand(top_p, expected):
    assert kept_by_top_p(torch.tensor([BY_HAND]), top_p)[0].nonzero().flatten().tolist() == expected


def reference(row: list[float], top_p: float) -> list[int]:
    """Token by token, in Python's float64."""
    order = sorted(range(len(row)), key=lambda number: (-row[number], number))
    weight = {number: math.exp(row[number] - row[order[0]]) for number in order}
    total, before, kept = sum(weight.values()), 0.0, []
    for number in order:
        if number == order[0] or before < top_p * total:
            kept.append(number)
        before += weight[number]
    return sorted(kept)


# Logits of few values, so that many are equal; p of odd digits, so that no sum lies on it.
ROWS = st.lists(st.lists(st.sampled_from([-90.0, -2.0, -0.5, 0.0, 0.5, 3.0]), min_size=7, max_size=7), min_size=1, max_size=4)


@settings(max_examples=100, deadline=None)
@given(ROWS, st.sampled_from([0.9131, 0.5173, 0.0313]))
def test_the_kept_ids_are_those_of_a_loop_over_tokens(rows, top_p):
    for row, is_kept in zip(rows, kept_by_top_p(torch.tensor(rows), top_p), strict=True):
        assert is_kept.nonzero().flatten().tolist() == reference(row, top_p)


TOP_P = 0.8


def sampled_on_rank(rank, layout, top_p, temperature=1.0):
    """sample id -> (response, kept ids of each token, their scores, their masses), of this dp rank's samples."""
    trainer, dp = lively(tiny_trainer(**layout)), resolve_groups().dp
    mine, prompts = range(dp.rank(), 12, dp.size()), prompts_of(12)
    settings = settings_of(top_p=top_p, temperature=temperature)
    kept = KeptTokens(len(mine))
    responses = trainer.sample([prompts[index] for index in mine], list(mine), settings, NOISE, kept=kept)
    found = {}
    for place, index in enumerate(mine):
        fields = kept.fields(place)
        sets = fields["kept_ids"]
        rows = [ids.tolist() for ids in sets.ids.split(sets.sizes.tolist())]
        found[index] = responses[place], rows, fields["rollout_log_probs"], fields["kept_mass"]
    return found


@pytest.mark.megatron
def test_a_mass_that_keeps_every_token_draws_those_of_no_filter(pool):
    """No token of the model is as rare as 1e-12, so that the whole path of a filter runs."""
    [plain] = pool.run(plain_tokens_on_rank, {}, world_size=1)
    [found] = pool.run(sampled_on_rank, {}, 1 - 1e-12, world_size=1)
    assert {index: response for index, (response, *_) in found.items()} == plain
    for _, rows, _, masses in found.values():
        assert all(row == list(range(VOCABULARY)) for row in rows) and masses.tolist() == pytest.approx([1.0] * len(rows))


def plain_tokens_on_rank(rank, layout):
    trainer, prompts = lively(tiny_trainer(**layout)), prompts_of(12)
    return dict(enumerate(trainer.sample(prompts, list(range(12)), settings_of(), NOISE)))


@pytest.mark.megatron
def test_each_sampled_token_is_in_its_set_and_its_score_is_of_the_set(pool):
    """The logits of each position come from a plain forward of the whole sequence."""
    [(found, logits)] = pool.run(with_logits_on_rank, world_size=1)
    sizes = set()
    for index, (response, rows, scores, masses) in found.items():
        for place, token in enumerate(response):
            z = logits[index][place].double() / 0.7
            truth = reference(z.tolist(), TOP_P)
            assert token in rows[place] and rows[place] == truth
            p = z.softmax(-1)
            assert float(masses[place]) == pytest.approx(float(p[truth].sum()), abs=TOLERANCE)
            assert float(scores[place]) == pytest.approx(math.log(p[token] / p[truth].sum()), abs=20 * TOLERANCE)
            sizes.add(len(truth))
    assert max(sizes) < VOCABULARY and len(sizes) > 1


def with_logits_on_rank(rank):
    found = sampled_on_rank(rank, {}, TOP_P, temperature=0.7)
    trainer, logits = lively(tiny_trainer()), {}
    with torch.no_grad():
        for index, prompt in enumerate(prompts_of(12)):
            tokens = torch.tensor([[*prompt, *found[index][0]]])
            row = trainer.model(tokens, torch.arange(tokens.shape[1])[None], None)[0, :, :VOCABULARY]
            logits[index] = row[len(prompt) - 1 : -1]
    return found, logits


@pytest.fixture(scope="module")
def alone(pool):
    return pool.run(sampled_on_rank, {}, TOP_P, world_size=1)[0]


@pytest.mark.slow
@pytest.mark.megatron
@pytest.mark.parametrize(
    ("world_size", "layout", "settings"), [*LAYOUTS, pytest.param(2, {CP: 2}, {}, id="CP2"), pytest.param(2, {PP: 2}, {}, id="PP2")]
)
def test_every_layout_draws_the_same_tokens_from_the_same_sets(pool, alone, world_size, layout, settings):
    """Catches a set of one shard's columns, ids that start at 0 on each shard, and rows that a cp rank or a stage has not heard."""
    together = {}
    for answer in pool.run(sampled_on_rank, settings, TOP_P, world_size=world_size, **layout):
        for index, (response, rows, scores, masses) in answer.items():
            expected = alone[index]
            assert (response, rows) == expected[:2], index
            torch.testing.assert_close(scores, expected[2], rtol=0, atol=20 * TOLERANCE)
            torch.testing.assert_close(masses, expected[3], rtol=0, atol=TOLERANCE)
        together |= answer
    assert together.keys() == alone.keys() and any(len(row) > 1 for _, rows, *_ in alone.values() for row in rows)


def frequencies_on_rank(rank, count):
    """(how often each token follows one prompt, its logits by a plain forward)."""
    trainer, prompt = lively(tiny_trainer()), [3, 1, 4]
    found = trainer.sample(
        [prompt] * count,
        list(range(count)),
        settings_of(max_new_tokens=1, rows_per_forward=count, top_p=TOP_P, temperature=TEMPERATURE),
        NOISE,
    )
    with torch.no_grad():
        logits = trainer.model(torch.tensor([prompt]), torch.arange(3)[None], None)[0, -1, :VOCABULARY]
    return torch.tensor(found).flatten().bincount(minlength=VOCABULARY), logits.double() / TEMPERATURE


@pytest.mark.megatron
def test_tokens_come_as_often_as_the_softmax_over_their_set_says(pool):
    """8,192 draws. 29.6 is the chi-square that ten free numbers exceed once in a thousand seeds, and the seed is fixed; fewer free
    numbers exceed it more rarely. Over the vocabulary each expected count is off by the kept mass."""
    count = 8192
    [(found, logits)] = pool.run(frequencies_on_rank, count, world_size=1)
    kept = reference(logits.tolist(), TOP_P)
    p = logits.softmax(-1)
    outside = [token for token in range(VOCABULARY) if token not in kept]
    assert int(found[outside].sum()) == 0 and len(kept) > 1 and outside

    def chi_square(expected):
        return float(((found[kept] - expected).square() / expected).sum())

    assert chi_square(count * p[kept] / p[kept].sum()) < 29.6
    assert chi_square(count * p[kept]) > 40
