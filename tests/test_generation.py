"""Sampling, its noise, and log-probabilities by the training model: the same on every layout, of the softmax that the loss sees."""

from __future__ import annotations

import math
from functools import partial
from unittest import mock

import pytest
import torch
from helpers import error_of, pool_of
from hypothesis import example, given
from hypothesis import settings as of_hypothesis
from hypothesis import strategies as st
from trainer_cases import CP, PP, TP, VOCABULARY, lively, tiny_trainer

from megatron_rl.layout.groups import resolve_groups
from megatron_rl.megatron.model import find_output_layer
from megatron_rl.train import generation
from megatron_rl.train.generation import INCREMENT, SamplingSettings, gumbel_noise, scramble, signed
from megatron_rl.train.sampling_filter import KeptTokens, kept_by_top_p

NOISE = partial(gumbel_noise, 7, 0)
END = 4
# Float32 logits of one model computed in two orders differ by some 1e-6; a wrong position or temperature by 1e-2 and more.
TOLERANCE = 2e-5
LAYOUTS = [
    pytest.param(
        2, {TP: 2}, {"sequence_parallel": True}, id="TP2+SP: the best token on either shard; rows padded to a multiple of tp"
    ),
    pytest.param(4, {TP: 4}, {}, id="TP4: the last shard ends in padding"),
    pytest.param(4, {CP: 2}, {}, id="CP2xDP2: one cp rank alone holds a sequence's last token; dp ranks sample other prompts"),
    pytest.param(4, {TP: 2, PP: 2}, {}, id="TP2xPP2: one stage alone has logits"),
    pytest.param(4, {TP: 2, CP: 2}, {"sequence_parallel": True}, id="TP2+SPxCP2"),
]
pool = pool_of(4)


def settings_of(**others) -> SamplingSettings:
    values = {"max_new_tokens": 6, "end_tokens": (END,), "temperature": 1.0, "vocab_size": VOCABULARY, "rows_per_forward": 64}
    return SamplingSettings(**{**values, **others})


def prompts_of(count: int) -> list[list[int]]:
    """Lengths of 1 to 9."""
    return [[(3 * number + place) % VOCABULARY for place in range(1 + number % 9)] for number in range(count)]


def plain_logits(trainer, tokens: list[int]) -> torch.Tensor:
    """[len(tokens), VOCABULARY] of a plain forward of one sequence, of one rank's model."""
    with torch.no_grad():
        return trainer.model(torch.tensor([tokens]), torch.arange(len(tokens))[None], None)[0, :, :VOCABULARY].double()


def sampled_on_rank(rank, settings, **others):
    """sample id -> (response, kept ids of each token, their scores, their masses) of this dp rank's samples; without top_p no more
    than the response."""
    trainer, dp = lively(tiny_trainer(**settings)), resolve_groups().dp
    mine, prompts = range(dp.rank(), 12, dp.size()), prompts_of(12)
    kept = KeptTokens(len(mine)) if "top_p" in others else None
    responses = trainer.sample([prompts[index] for index in mine], list(mine), settings_of(**others), NOISE, kept=kept)
    found = {}
    for place, index in enumerate(mine):
        fields = kept.fields(place) if kept else {}
        rows = [ids.tolist() for ids in fields["kept_ids"].ids.split(fields["kept_ids"].sizes.tolist())] if kept else []
        found[index] = responses[place], rows, fields.get("rollout_log_probs"), fields.get("kept_mass")
    return found


def both_sampled_on_rank(rank, settings):
    """Of the whole vocabulary, and of top-p."""
    return sampled_on_rank(rank, settings), sampled_on_rank(rank, settings, top_p=TOP_P)


def recomputed_on_rank(rank, settings):
    with mock.patch.object(generation, "can_cache", return_value=False):
        return both_sampled_on_rank(rank, settings)


@pytest.fixture(scope="module")
def alone(pool):
    """What one rank samples without a cache: each token by a forward of the whole sequence."""
    return pool.run(recomputed_on_rank, {}, world_size=1)[0]


@pytest.fixture(scope="module")
def responses(alone):
    return {index: response for index, (response, *_) in alone[0].items()}


@pytest.mark.slow
@pytest.mark.megatron
@pytest.mark.parametrize(("world_size", "layout", "settings"), LAYOUTS)
def test_every_layout_samples_the_same_tokens_from_the_same_sets_on_every_rank(pool, alone, world_size, layout, settings):
    """Catches noise that depends on the layout, a shard's column taken for the token, a rank that heard of another token; a set of
    one shard's columns, ids that start at 0 on each shard, and rows that a cp rank or a stage has not heard."""
    answers = pool.run(both_sampled_on_rank, settings, world_size=world_size, **layout)
    for kind, expected in enumerate(alone):
        for index, (response, rows, scores, masses) in (item for answer in answers for item in answer[kind].items()):
            assert (response, rows) == expected[index][:2], index
            if kind:
                torch.testing.assert_close(scores, expected[index][2], rtol=0, atol=20 * TOLERANCE)
                torch.testing.assert_close(masses, expected[index][3], rtol=0, atol=TOLERANCE)
        assert set().union(*(answer[kind] for answer in answers)) == set(expected)


@pytest.mark.megatron
def test_the_end_token_ends_a_response_and_belongs_to_it(pool, responses):
    """Catches a lost last token, a batch that stops with its first sample, a chunk of rows that takes another's noise."""
    lengths = [len(response) for response in responses.values()]
    assert len(set(lengths)) > 2 and max(lengths) == 6
    for response in responses.values():
        assert END not in response[:-1] and (len(response) == 6 or response[-1] == END)
    endless = pool.run(partial(sampled_on_rank, end_tokens=(), rows_per_forward=5), {}, world_size=1)[0]
    for index, (response, *_) in endless.items():
        assert len(response) == 6 and response[: len(responses[index])] == responses[index]


EXPERTS = {"experts": {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32, "moe_grouped_gemm": False}}
CACHED = [
    pytest.param(1, {}, {}, id="one rank"),
    pytest.param(2, {TP: 2}, {"sequence_parallel": True}, id="TP2+SP"),
    pytest.param(2, {PP: 2}, {}, id="PP2"),
    pytest.param(2, {"expert_model_parallel_size": 2}, EXPERTS, id="EP2: dp ranks of two forwards and of one share experts"),
]


def logits_on_rank(rank, settings, is_cached):
    """(the logits [B, V_tp] of each forward that has some, the responses), of the most probable tokens."""
    trainer, found = lively(tiny_trainer(**settings)), []
    head, dp = find_output_layer(trainer.model), resolve_groups().dp
    if head is not None:
        head.register_forward_hook(lambda _, inputs, out: found.append(out[0].detach().float().flatten(0, -2).clone()))
    mine = range(5)[dp.rank() :: dp.size()]
    with mock.patch.object(generation, "can_cache", return_value=is_cached):
        responses = trainer.sample(
            [prompts_of(5)[n] for n in mine], list(mine), settings_of(rows_per_forward=2), lambda *_: torch.zeros(())
        )
    return found, responses


@pytest.mark.slow
@pytest.mark.megatron
@pytest.mark.parametrize(("world_size", "layout", "settings"), CACHED)
def test_the_logits_of_a_cached_token_are_those_of_a_whole_forward(pool, world_size, layout, settings):
    """Of each new token of each sample, and not only the one that is the largest: a key at another position, or of a sample that
    has ended, moves logits long before it moves an argmax."""
    cached, whole = (pool.run(logits_on_rank, settings, flag, world_size=world_size, **layout) for flag in (True, False))
    num_compared = 0
    for (found, responses), (expected, truth) in zip(cached, whole, strict=True):
        assert responses == truth and len(found) == len(expected)
        for mine, other in zip(found, expected, strict=True):
            rows = min(len(mine), len(other))  # rows of padding: a forward of one token a sample has other multiples
            num_compared += rows
            # The logits are twenty times the model's.
            torch.testing.assert_close(mine[:rows], other[:rows], rtol=0, atol=20 * TOLERANCE)
    assert num_compared >= 5 * 4


def shapes_seen_on_rank(rank):
    """The shapes of the tokens of each forward, and of the logits that the output layer computes, while three prompts of 1 to 3
    tokens are sampled."""
    trainer, tokens, logits = tiny_trainer(), [], set()
    head = find_output_layer(trainer.model)
    trainer.model.register_forward_pre_hook(lambda _, given: tokens.append(tuple(given[0].shape)))
    head.register_forward_hook(lambda _, inputs, out: logits.add(tuple(out[0].shape)))
    trainer.sample(prompts_of(3), [0, 1, 2], settings_of(end_tokens=()), NOISE)
    return tokens, logits, head.weight.shape[0]


@pytest.mark.megatron
def test_sampling_computes_a_row_a_token_and_the_logits_of_the_last_positions_alone(pool):
    """Catches a cache that is not used: the prompts go once, and then one token of each sample; and logits of each token of each
    sequence, [S, B, V_tp], of which one row is read."""
    [(tokens, logits, width)] = pool.run(shapes_seen_on_rank, world_size=1)
    assert logits == {(1, 3, width)} and tokens == [(3, 3), *[(1, 3)] * 5]


def reference(row: list[float], top_p: float) -> list[int]:
    """Token by token, in Python's float64: the token that crosses is kept, of two equal ones the smaller id crosses."""
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


# Probabilities .5 .25 .125 .125 of ids 2, 0, 1, 3: the first reaches .5.
@example([[math.log(0.25), math.log(0.125), math.log(0.5), math.log(0.125)]], 0.5)
@of_hypothesis(max_examples=100)
@given(ROWS, st.sampled_from([0.9131, 0.5173, 0.0313]))
def test_the_kept_ids_are_those_of_a_loop_over_tokens(rows, top_p):
    for row, is_kept in zip(rows, kept_by_top_p(torch.tensor(rows), top_p), strict=True):
        assert is_kept.nonzero().flatten().tolist() == reference(row, top_p)


TOP_P = 0.8


def with_logits_on_rank(rank, others):
    """(what is sampled, the logits of each position by a plain forward of the whole sequence)."""
    found, trainer = sampled_on_rank(rank, {}, temperature=0.7, **others), lively(tiny_trainer())
    logits = {
        index: plain_logits(trainer, [*prompt, *found[index][0]])[len(prompt) - 1 : -1]
        for index, prompt in enumerate(prompts_of(12))
    }
    return found, logits


@pytest.mark.megatron
@pytest.mark.parametrize("others", [{}, {"top_p": TOP_P}], ids=["all ids", "top-p"])
def test_a_token_is_the_largest_of_its_set_with_noise_at_the_temperature_and_its_score_is_of_the_set(pool, others):
    """FB-39: so it is a draw from the softmax over the set at that temperature."""
    [(found, logits)] = pool.run(with_logits_on_rank, others, world_size=1)
    prompts, columns, sizes = prompts_of(12), torch.arange(VOCABULARY), set()
    for index, (response, rows, scores, masses) in found.items():
        for place, token in enumerate(response):
            z = logits[index][place] / 0.7
            truth = reference(z.tolist(), others.get("top_p", 1.0))
            noise = NOISE(torch.tensor([index]), torch.tensor([len(prompts[index]) + place]), columns)[0]
            assert token == max(truth, key=(z + noise).tolist().__getitem__)
            sizes.add(len(truth))
            if not others:
                continue
            assert rows[place] == truth
            p = z.softmax(-1)
            assert float(masses[place]) == pytest.approx(float(p[truth].sum()), abs=TOLERANCE)
            assert float(scores[place]) == pytest.approx(math.log(p[token] / p[truth].sum()), abs=20 * TOLERANCE)
    assert (len(sizes) > 1 and max(sizes) < VOCABULARY) if others else sizes == {VOCABULARY}


def padding_on_rank(rank, vocabulary, values):
    """Responses where the columns beyond the vocabulary hold each value in turn instead of what the model would give."""
    trainer, groups = tiny_trainer(vocab_size=vocabulary), resolve_groups()
    head = find_output_layer(trainer.model)
    columns = torch.arange(head.weight.shape[0]) + groups.tp.rank() * head.weight.shape[0]
    settings, responses, is_padding = settings_of(vocab_size=vocabulary, end_tokens=()), [], columns >= vocabulary
    for value in values:
        hook = head.register_forward_hook(lambda _, inputs, out, value=value: (out[0].masked_fill(is_padding, value), out[1]))
        responses.append(trainer.sample([[0, 1]] * 16, list(range(16)), settings, NOISE))
        hook.remove()
    return int(is_padding.sum()), responses


@pytest.mark.megatron
def test_padded_vocabulary_is_never_sampled(pool):
    """5 tokens at tp 4 are 8 columns: one shard ends in padding, one holds nothing else."""
    answers = pool.run(padding_on_rank, 5, [1e30, math.inf, math.nan, -math.inf], world_size=4, **{TP: 4})
    assert [num_padded for num_padded, _ in answers] == [0, 0, 1, 2]
    for _, responses in answers:
        assert responses == answers[0][1]
        assert all({token for response in of_value for token in response} == {0, 1, 2, 3, 4} for of_value in responses)


def diverged_on_rank(rank):
    """What sampling says when one column's logits are NaN, on one tp rank."""
    trainer, groups = tiny_trainer(), resolve_groups()
    head = find_output_layer(trainer.model)
    if head is not None and groups.tp.rank() == groups.tp.size() - 1:
        with torch.no_grad():
            head.weight[0].fill_(math.nan)
    return error_of(lambda: trainer.sample(prompts_of(3), [5, 6, 7], settings_of(), NOISE))


@pytest.mark.slow
@pytest.mark.megatron
@pytest.mark.parametrize("layout", [{TP: 2, CP: 2}, {TP: 2, PP: 2}], ids=["TP2xCP2", "TP2xPP2"])
def test_logits_that_are_not_finite_stop_every_rank_that_samples(pool, layout):
    """Argmax takes a NaN for the largest value and would train on its column; a rank that raises alone hangs the others."""
    for message in pool.run(diverged_on_rank, world_size=4, **layout):
        assert message.startswith("DataError: the policy's logits are not finite while sampling (sample ")
        assert "training has diverged" in message


def splitmix64(state: int) -> int:
    """One number of the published generator, in unbounded integers."""
    mask = 2**64 - 1
    z = (state + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def gumbel_reference(seed: int, rollout: int, sample: int, position: int, column: int) -> float:
    state, mask = 0, 2**64 - 1
    for part in (seed, rollout, sample, position):
        # Scrambling state + increment, with the part mixed in between: splitmix64 of what gives that sum.
        state = splitmix64((((state + 0x9E3779B97F4A7C15) & mask) ^ (part & mask)) - 0x9E3779B97F4A7C15)
    word = splitmix64(state + column * 0x9E3779B97F4A7C15)
    return -math.log(-math.log(((word >> 12) + 0.5) / 2**52))


def test_the_hash_is_the_published_splitmix64():
    """The first numbers for the seed 1234567, as published with the generator (Rosetta Code, "Pseudo-random numbers/
    Splitmix64"). Catches an arithmetic shift, which copies the sign, and a multiplication that does not wrap."""
    numbers = [int(word) % 2**64 for word in scramble(torch.tensor([1234567]) + torch.arange(1, 6) * signed(INCREMENT))]
    assert numbers == [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]


@pytest.mark.parametrize("seed", [0, 1, 2**63 + 5, -1], ids=["zero", "one", "above int64", "negative"])
def test_every_number_of_the_noise_equals_the_reference(seed):
    """Catches an argument that is left out, mixed in twice, added to another one or counted from this rank's first column or
    row, float32 on the way, and a seed that overflows."""
    samples, positions, columns = [4, 5, 1000, 1, 0], [7, 0, 31, 2, 1], [50, 1, 0, 151935]
    got = gumbel_noise(seed, 12, torch.tensor(samples), torch.tensor(positions), torch.tensor(columns))
    places = zip(samples, positions, strict=True)
    expected = [[gumbel_reference(seed, 12, *place, column) for column in columns] for place in places]
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=0)
