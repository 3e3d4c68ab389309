"""Sampling noise: its numbers, its distribution, and that no layout changes it. The reference uses python integers."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_rl.training.noise import INCREMENT, _scramble, _signed, gumbel_noise

MASK = 2**64 - 1


def splitmix64(state: int) -> int:
    """One number of the published generator, in unbounded integers."""
    z = (state + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def gumbel_reference(seed: int, rollout: int, sample: int, position: int, column: int) -> float:
    state = 0
    for part in (seed, rollout, sample, position):
        # Scrambling state + increment, with the part mixed in between: splitmix64 of what gives that sum.
        state = splitmix64((((state + 0x9E3779B97F4A7C15) & MASK) ^ (part & MASK)) - 0x9E3779B97F4A7C15)
    word = splitmix64(state + column * 0x9E3779B97F4A7C15)
    return -math.log(-math.log(((word >> 12) + 0.5) / 2**52))


def noise(seed=0, rollout=0, samples=1, positions=0, columns=9):
    """Noise of the first so many samples and columns, at one position."""
    rows = torch.arange(samples)
    return gumbel_noise(seed, rollout, rows, torch.full_like(rows, positions), torch.arange(columns))


def test_the_hash_is_the_published_splitmix64():
    """The first numbers for the seed 1234567, as published with the generator (Rosetta Code, "Pseudo-random numbers/
    Splitmix64"). Catches an arithmetic shift, which copies the sign, and a multiplication that does not wrap."""
    states = torch.tensor([1234567]) + torch.arange(1, 6) * _signed(INCREMENT)
    numbers = [int(word) % 2**64 for word in _scramble(states)]
    assert numbers == [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]


@pytest.mark.parametrize("seed", [0, 1, 2**63 + 5, -1], ids=["zero", "one", "above int64", "negative"])
def test_every_number_equals_the_reference(seed):
    """Catches an argument that is left out or mixed in twice, and a seed that overflows."""
    samples, positions, columns = [0, 5, 1000], [7, 0, 31], [0, 1, 50, 151935]
    got = gumbel_noise(seed, 12, torch.tensor(samples), torch.tensor(positions), torch.tensor(columns))
    assert got.dtype == torch.float32
    for row, (sample, position) in enumerate(zip(samples, positions, strict=True)):
        for place, column in enumerate(columns):
            assert float(got[row, place]) == pytest.approx(gumbel_reference(seed, 12, sample, position, column), rel=1e-6)


@pytest.mark.parametrize("tp_size", [2, 3, 4])
def test_a_vocabulary_shard_gets_the_columns_of_the_whole(tp_size):
    """Catches noise by local column, with which every tensor-parallel rank would draw the same pattern."""
    whole = noise(samples=5, columns=1000)
    rows = torch.arange(5)
    shards = [gumbel_noise(0, 0, rows, rows * 0, columns) for columns in torch.arange(1000).chunk(tp_size)]
    assert torch.equal(torch.cat(shards, dim=1), whole)


def test_a_subset_of_samples_gets_the_rows_of_the_whole():
    """Catches noise by local row: a data-parallel rank holds some of the samples, at positions of their own."""
    samples, positions, columns = torch.arange(8), torch.arange(8) * 3, torch.arange(40)
    whole = gumbel_noise(3, 1, samples, positions, columns)
    picked = torch.tensor([6, 1, 3])
    assert torch.equal(gumbel_noise(3, 1, samples[picked], positions[picked], columns), whole[picked])


def test_no_generator_is_touched_and_a_call_repeats_exactly():
    """Catches hidden state: a resumed run would draw other tokens than the uninterrupted one."""
    before = torch.get_rng_state()
    first = noise(samples=4)
    torch.rand(3)
    assert torch.equal(noise(samples=4), first)
    torch.set_rng_state(before)
    noise(samples=4)
    assert torch.equal(torch.get_rng_state(), before)


# 40 samples x 5000 columns: bounds below are 5 standard errors, which a right generator passes; the noise is fixed, so
# a test that passes once passes always.
NUM_ROWS, NUM_COLUMNS = 40, 5000


def uniforms() -> torch.Tensor:  # [NUM_ROWS, NUM_COLUMNS] float64
    return torch.exp(-torch.exp(-noise(seed=11, samples=NUM_ROWS, columns=NUM_COLUMNS).double()))


def test_the_uniform_numbers_behind_it_are_uniform():
    """Mean 1/2 and variance 1/12 within 5 standard errors (deviations sqrt(1/12), sqrt(1/180)); the largest distance of
    the empirical distribution below 2 / sqrt(n), which Kolmogorov's law exceeds with probability 2 exp(-8) = 7e-4."""
    values = uniforms().flatten()
    count = values.numel()
    assert abs(float(values.mean()) - 0.5) < 5 * math.sqrt(1 / 12 / count)
    assert abs(float(values.var()) - 1 / 12) < 5 * math.sqrt(1 / 180 / count)
    distance = (values.sort().values - (torch.arange(count) + 0.5) / count).abs().max()
    assert float(distance) < 2 / math.sqrt(count)


@pytest.mark.parametrize("neighbours", ["columns", "samples", "positions", "rollouts", "seeds"])
def test_neighbours_are_not_correlated(neighbours):
    """The correlation of n independent pairs has a standard error of 1 / sqrt(n); bound 5. Of two sets of 200 000
    float32 numbers about one in a hundred meets by chance; bound one in ten. Catches a hash that adds its arguments:
    sample 1 at position 0 would draw what sample 0 draws at position 1."""
    here = uniforms()
    if neighbours == "columns":
        here, there = here[:, ::2], here[:, 1::2]
    elif neighbours == "samples":
        here, there = here[::2], here[1::2]
    else:
        change = {"positions": {"positions": 1}, "rollouts": {"rollout": 1}, "seeds": {"seed": 12}}[neighbours]
        other = noise(**{"seed": 11, "samples": NUM_ROWS, "columns": NUM_COLUMNS} | change).double()
        there = torch.exp(-torch.exp(-other))
    pairs = torch.stack([here.flatten(), there.flatten()])
    assert abs(float(torch.corrcoef(pairs)[0, 1])) < 5 / math.sqrt(pairs.shape[1])
    assert float(torch.isin(*pairs).double().mean()) < 0.1, "the same numbers, moved"


def test_all_arguments_are_told_apart():
    """Catches (sample, position) = (1, 2) and (2, 1) drawing the same, which a sum or an xor of both would give."""
    rows = {
        tuple(gumbel_noise(seed, rollout, torch.tensor([s]), torch.tensor([p]), torch.arange(4))[0].tolist())
        for seed in range(3)
        for rollout in range(3)
        for s in range(3)
        for p in range(3)
    }
    assert len(rows) == 3**4


def test_argmax_of_logits_plus_noise_draws_from_the_softmax():
    """Pearson's chi-square over 6 tokens has 5 degrees of freedom: mean 5, and above 25.7 with probability 1e-4.
    Catches noise of the wrong sign or scale: with half the scale the statistic is in the thousands."""
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5, -3.0])
    num_draws = 20_000
    drawn = (logits + noise(seed=5, samples=num_draws, columns=6)).argmax(1)
    observed = torch.bincount(drawn, minlength=6).double()
    expected = logits.double().softmax(0) * num_draws
    assert float(((observed - expected) ** 2 / expected).sum()) < 25.7


def test_the_noise_is_finite_at_the_ends_of_its_range():
    """u = 2^-53 and u = 1 - 2^-53: in float32 the second would round to 1, and the noise to infinity."""
    smallest, largest = (-math.log(-math.log(u)) for u in (2.0**-53, 1 - 2.0**-53))
    assert smallest == pytest.approx(-3.6038, abs=1e-4)
    assert largest == pytest.approx(36.7368, abs=1e-4)
    values = noise(samples=200, columns=5000)
    assert torch.isfinite(values).all()
    assert smallest <= float(values.min()) and float(values.max()) <= largest


@pytest.mark.parametrize("name", ["samples", "positions", "columns"])
def test_indices_of_another_type_are_refused(name):
    """Catches int32 indices, on which the hash would wrap at 32 bits."""
    tensors = {"samples": torch.arange(2), "positions": torch.arange(2), "columns": torch.arange(3)}
    tensors[name] = tensors[name].int()
    with pytest.raises(TypeError, match=rf"{name} must be one-dimensional int64"):
        gumbel_noise(0, 0, **tensors)
