"""Our reducer and custom_loss inside miles and slime: each layout of a step has the gradient of the dense float64 step.

The emulated hosts run always, real checkouts with MILES_ROOT=... SLIME_ROOT=... pytest -m host --require host. Both load our hooks
by their own load_function, from samples to Megatron's gradient; neither scaling nor slicing is done by hand here.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from helpers import pool_of
from host_cases import SHAPES, HostCase
from host_harness import roots_by_environment
from host_ranks import StepResult, run_cases

from megatron_rl.testing.ranks import RankPool

pytestmark = pytest.mark.megatron

# Relative to the largest gradient, float32 against float64. Megatron's fused cross-entropy rounds its backward to bf16.
EXACT, FUSED = 1e-6, 2e-2
LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2), (1, 4)]  # (dp, cp)
SIZES = (0, 3, 1)  # samples of a micro-batch, 0 for all
# door, aggregation, companion hook, --calculate-per-token-loss
LAUNCHES = [
    ("default", "sample_mean", "", False),
    ("default", "token_mean", "", True),
    *((door, "sample_mean", "", False) for door in ("reducer", "custom_loss")),
    *((door, "constant", "", False) for door in ("reducer", "custom_loss")),
    *((door, "token_mean", "", True) for door in ("reducer", "custom_loss")),
    *((door, "prompt_mean", "reward", False) for door in ("default", "reducer", "custom_loss")),
    *((door, "token_mean", "reward", False) for door in ("default", "reducer", "custom_loss")),
    *((door, "constant", "reward", False) for door in ("default", "reducer", "custom_loss")),
]
ROOTS = roots_by_environment()


def variants(host: str, launch: tuple, estimator: str, cp_size: int) -> list[HostCase]:
    """The launch with each data layout and micro-batch size that this host runs."""
    door, aggregation, companion, per_token = launch
    case = HostCase(host, door, aggregation, estimator, companion, per_token)
    found = [replace(case, size=size) for size in SIZES]
    # slime has no bshd; the reducer refuses it under cp, and the host's own GSPO dies of an assertion there.
    if host == "miles" and (cp_size == 1 or door == "custom_loss" or (door == "default" and estimator == "grpo")):
        found += [replace(case, layout="bshd", size=size) for size in SIZES]
    if cp_size > 1:
        # The hosts' GSPO leaves the backward of a gather out on a rank that holds no response token of the micro-batch, and the
        # others wait for it: small micro-batches die there, with their own reducer as with ours. Our own loss gathers nothing.
        sizes = SIZES if door == "custom_loss" or estimator == "grpo" else (0,)
        found += [replace(case, layout="allgather", size=size) for size in sizes]
    return found


Place = tuple[int, int, str]  # dp, cp, estimator
PLACES = [(*layout, estimator) for layout in LAYOUTS for estimator in ("grpo", "gspo")]


def all_cases(place: Place, hosts=("miles", "slime")) -> list[HostCase]:
    _, cp_size, estimator = place
    return [case for launch in LAUNCHES for host in hosts for case in variants(host, launch, estimator, cp_size)]


def some_cases(place: Place) -> list[HostCase]:
    """So cut that any two facts of a case meet, and each launch its host with and without context parallelism."""
    return all_cases(place)[2 * PLACES.index(place) % 7 :: 7]


def run_on(pool: RankPool, roots: dict[str, str], cases: list[HostCase], dp_size: int, cp_size: int, is_exact: bool = True) -> dict:
    """{case: the answer of each rank}, in one call of the pool."""
    layout = {"world_size": dp_size * cp_size, "context_parallel_size": cp_size}
    by_rank = pool.run(run_cases, roots, cases, is_exact, **layout)
    return {case: list(results) for case, results in zip(cases, zip(*by_rank, strict=True), strict=True)}


pool = pool_of(4)
checkouts = pool_of(4)  # where a checkout stays loaded


def assert_is_the_dense_step(case: HostCase, by_rank: list[StepResult | str], dp_size: int, cp_size: int, tolerance=EXACT):
    for rank, result in enumerate(by_rank):
        assert not isinstance(result, str), f"{case}, rank {rank}:\n{result}"
        loss, gradient = case.truth()
        error = float((result.gradient - gradient).abs().max() / gradient.abs().max())
        assert error <= tolerance, f"{case}: the gradient is wrong by {error:.2e} of its largest element"
        # The loss is a difference of larger numbers: its roundings are those of numbers of size 0.1.
        assert result.loss == pytest.approx(loss, rel=EXACT, abs=1e-7), str(case)
        # What the dashboard shows is the objective, whoever reduces it.
        for name in ("loss", "pg_loss"):
            assert result.metrics[name] == pytest.approx(loss, rel=2 * EXACT, abs=2e-7), f"{case}: {name}"
        if case.per_token:
            assert result.num_tokens == cp_size * sum(sum(sample.mask) for sample in case.step().samples)
        else:
            num_samples = len(SHAPES) // dp_size
            assert result.num_tokens == dp_size * cp_size * -(-num_samples // (case.size or num_samples))


def assert_all_are_the_dense_step(pool, roots, cases, dp_size, cp_size, tolerance=EXACT):
    assert cases
    for case, by_rank in run_on(pool, roots, cases, dp_size, cp_size, tolerance == EXACT).items():
        assert_is_the_dense_step(case, by_rank, dp_size, cp_size, tolerance)


@pytest.fixture(params=["emulated", pytest.param("checkouts", marks=pytest.mark.host)])
def hosts(request) -> tuple[RankPool, dict[str, str], list[str]]:
    """(the ranks, the roots of the checkouts, the hosts that there are): the emulated hosts, or those of the checkouts."""
    if request.param == "emulated":
        return request.getfixturevalue("pool"), {}, ["miles", "slime"]
    return request.getfixturevalue("checkouts"), ROOTS, sorted(ROOTS)


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_a_host_trains_the_dense_step(hosts, place):
    """FB-21: catches any factor of N, M, dp or cp, a count of a slice, a group's tokens of one micro-batch. A checkout runs
    all cases."""
    ranks, roots, names = hosts
    assert_all_are_the_dense_step(ranks, roots, all_cases(place, names) if roots else some_cases(place), *place[:2])


TRITON = ("policy_loss_backend", "triton")
OF_TRITON = HostCase("miles", "custom_loss", "constant", size=3, options=(TRITON,))
# The gradient is written over the logits, but for the last two, which read them again.
IN_TRITON = [
    OF_TRITON,
    replace(OF_TRITON, host="slime", aggregation="token_mean", per_token=True, size=1),
    replace(OF_TRITON, layout="bshd", estimator="gspo"),
    replace(OF_TRITON, options=(TRITON, ("recompute_loss_function", True))),
    replace(OF_TRITON, host="slime", layout="allgather"),
]


@pytest.mark.kernel
@pytest.mark.interpreter
@pytest.mark.parametrize("cp_size", [1, 2])
def test_our_loss_in_triton_trains_the_dense_step(hosts, cp_size):
    """The host's factor is not known to the loss: a first micro-batch that assumes 1 has the others' gradient."""
    pytest.importorskip("triton")
    ranks, roots, names = hosts
    cases = [case for case in IN_TRITON if case.host in names and (cp_size > 1 or case.layout != "allgather")]
    # A kernel's exponentials are off by 2^-22.
    assert_all_are_the_dense_step(ranks, roots, cases, 2, cp_size, tolerance=2 * EXACT)


FUSED_CASES = [
    HostCase(host, "reducer", "constant", estimator, size=3) for host in ("miles", "slime") for estimator in ("grpo", "gspo")
]


@pytest.mark.host
def test_a_checkout_trains_the_dense_step_with_the_cross_entropy_it_comes_with(checkouts):
    """Catches an exact cross-entropy that hides what a host does with its own."""
    assert_all_are_the_dense_step(checkouts, ROOTS, [case for case in FUSED_CASES if case.host in ROOTS], 2, 2, FUSED)


# A rollout of several samples: the host divides by the rollout's tokens, and so do we where we see them or have weighted rewards.
# The estimators take turns.
SEGMENTS = [
    HostCase(*row, ("grpo", "gspo")[number % 3 % 2], "reward", size=3, segments=True)
    for number, row in enumerate(
        itertools.product(("miles", "slime"), ("custom_loss", "default", "reducer"), ("prompt_mean", "token_mean"))
    )
]
# A generate function of the user's: constant needs to know nothing of rollouts, and for sample_mean the hook knows them.
AGENT = (("custom_generate_function_path", "user.agent"),)
SEGMENTS += [
    # slime normalises rewards sample by sample, which is another advantage: there the hook does it by rollouts.
    HostCase(host, "reducer", "constant", estimator, companion, size=3, segments=True, options=AGENT)
    for host, estimator, companion in (("miles", "gspo", ""), ("slime", "grpo", "reward"))
]
SEGMENTS += [
    HostCase(host, "reducer", "sample_mean", companion="reward", size=3, segments=True, options=AGENT)
    for host in ("miles", "slime")
]


def test_rollouts_of_several_samples_train_the_dense_step(hosts):
    ranks, roots, names = hosts
    assert_all_are_the_dense_step(ranks, roots, [case for case in SEGMENTS if case.host in names], 2, 2)


MILES = HostCase("miles", "reducer", "sample_mean", size=3)
REFUSED = {
    replace(MILES, layout="bshd"): "bshd",
    replace(MILES, aggregation="constant", per_token=True): "calculate-per-token-loss",
    replace(MILES, per_token=True): "token_mean",
    replace(MILES, aggregation="prompt_mean"): "reward_post_process",
    replace(MILES, aggregation="token_mean"): "calculate-per-token-loss",
    replace(MILES, companion="reward"): "sample_mean",
    replace(MILES, options=AGENT): "reward_post_process",
    replace(MILES, door="custom_loss", aggregation="prompt_mean"): "reward_post_process",
}


def test_a_host_meets_the_refusal_where_it_loads_the_hook(hosts):
    """FB-11, FB-26: a hook that is loaded by the host must refuse by itself. slime has no bshd."""
    ranks, roots, names = hosts
    rows = {
        replace(case, host=host): words
        for case, words in REFUSED.items()
        for host in names
        if host == "miles" or case.layout != "bshd"
    }
    for case, answers in run_on(ranks, roots, list(rows), 1, 2).items():
        for answer in answers:
            assert isinstance(answer, str), f"{case} was trained"
            assert ("ConfigError" in answer or "DataError" in answer) and rows[case] in answer, f"{case}: {answer}"
