"""Our reducer and custom_loss inside miles and slime: each layout of a step has the gradient of the dense float64 step.

The emulated hosts run always, real checkouts with MILES_ROOT=... SLIME_ROOT=... pytest -m host --require host. Both load our hooks
by their own load_function, from samples to Megatron's gradient; neither scaling nor slicing is done by hand here.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from host_cases import SHAPES, HostCase
from host_harness import roots_by_environment
from host_ranks import StepResult, run_cases

from megatron_rl.testing.ranks import RankPool

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
    *((door, "prompt_mean", "convert", False) for door in ("default", "custom_loss")),
]
LAUNCH_IDS = [" ".join(map(str, filter(None, (*launch[:3], "per-token" * launch[3])))) for launch in LAUNCHES]
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


def one_host_and_size_each(cases: list[HostCase], turn: int) -> list[HostCase]:
    """Of these one host, and for each of its data layouts one micro-batch size: a sixth of the cases.

    turn: which host and which size comes first. It turns from launch to launch and from layout to layout, so no pair is lost.
    """
    host = sorted({case.host for case in cases})[turn % 2]
    by_layout: dict[str, dict[int, HostCase]] = {}
    for case in cases:
        if case.host == host:
            by_layout.setdefault(case.layout, {})[case.size] = case
    found = enumerate(by_layout.values(), turn // 2)
    return [sizes.get(SIZES[number % len(SIZES)], sizes[0]) for number, sizes in found]


def cases_of(dp_size: int, cp_size: int, estimator: str, *, hosts=("miles", "slime"), is_thinned=False) -> list[HostCase]:
    found, turn = [], LAYOUTS.index((dp_size, cp_size)) + (estimator == "gspo")
    for number, launch in enumerate(LAUNCHES):
        cases = [case for host in hosts for case in variants(host, launch, estimator, cp_size)]
        found += one_host_and_size_each(cases, turn + number) if is_thinned else cases
    return found


class Runs:
    """The results of all cases of a layout and an estimator, run once, in one call of the pool; of checkouts with every size."""

    def __init__(self, roots: dict[str, str]):
        self.roots, self.pool, self.results = roots, RankPool(4, timeout=240), {}

    def of(self, dp_size: int, cp_size: int, estimator: str) -> dict[HostCase, list[StepResult | str]]:
        key = (dp_size, cp_size, estimator)
        if key not in self.results:
            cases = cases_of(*key, hosts=sorted(self.roots)) if self.roots else cases_of(*key, is_thinned=True)
            self.results[key] = self.run(cases, dp_size, cp_size)
        return self.results[key]

    def run(self, cases: list[HostCase], dp_size: int, cp_size: int, is_exact: bool = True) -> dict:
        layout = {"world_size": dp_size * cp_size, "context_parallel_size": cp_size}
        by_rank = self.pool.run(run_cases, self.roots, cases, is_exact, **layout)
        return {case: list(results) for case, results in zip(cases, zip(*by_rank, strict=True), strict=True)}


@pytest.fixture(scope="module")
def emulated():
    runs = Runs({})
    with runs.pool:
        yield runs


@pytest.fixture(scope="module")
def checkouts():
    runs = Runs(ROOTS)
    with runs.pool:
        yield runs


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


def assert_launch(runs: Runs, launch: tuple, estimator: str, dp_size: int, cp_size: int) -> None:
    door, aggregation, companion, per_token = launch
    wanted = {"door": door, "aggregation": aggregation, "companion": companion, "per_token": per_token}
    found = runs.of(dp_size, cp_size, estimator)
    cases = {case: by_rank for case, by_rank in found.items() if wanted.items() <= vars(case).items()}
    assert cases
    for case, by_rank in cases.items():
        assert_is_the_dense_step(case, by_rank, dp_size, cp_size)


MATRIX = [
    pytest.mark.parametrize("estimator", ["grpo", "gspo"]),
    pytest.mark.parametrize("launch", LAUNCHES, ids=LAUNCH_IDS),
    pytest.mark.parametrize(("dp_size", "cp_size"), LAYOUTS, ids=[f"dp {dp} cp {cp}" for dp, cp in LAYOUTS]),
]


def test_one_host_and_size_each_loses_no_pair_of_facts():
    """Catches a turn in step with something else, so that a launch never meets slime, or small micro-batches under cp."""

    def pairs(is_thinned: bool) -> set[tuple]:
        found = set()
        for (dp_size, cp_size), estimator in itertools.product(LAYOUTS, ("grpo", "gspo")):
            for case in cases_of(dp_size, cp_size, estimator, is_thinned=is_thinned):
                launch = (case.door, case.aggregation, case.companion, case.per_token)
                facts = enumerate(((dp_size, cp_size), estimator, launch, case.host, case.layout, case.size))
                found.update(itertools.combinations(facts, 2))
                found.add((case.host, launch, cp_size > 1, estimator))
        return found

    assert pairs(True) == pairs(False)


def matrix(test):
    for mark in MATRIX:
        test = mark(test)
    return test


@pytest.mark.megatron
@matrix
def test_an_emulated_host_trains_the_dense_step(emulated, dp_size, cp_size, launch, estimator):
    """FB-20, FB-21: catches any factor of N, M, dp or cp, a count of a slice, a group's tokens of one micro-batch."""
    assert_launch(emulated, launch, estimator, dp_size, cp_size)


@pytest.mark.host
@pytest.mark.megatron
@matrix
def test_a_checkout_trains_the_dense_step(checkouts, dp_size, cp_size, launch, estimator):
    """The same through the loss code of the checkouts."""
    assert_launch(checkouts, launch, estimator, dp_size, cp_size)


FUSED_CASES = [
    HostCase(host, "reducer", "constant", estimator, size=3) for host in ("miles", "slime") for estimator in ("grpo", "gspo")
]


@pytest.mark.host
@pytest.mark.megatron
def test_a_checkout_trains_the_dense_step_with_the_cross_entropy_it_comes_with(checkouts):
    """Catches an exact cross-entropy that hides what a host does with its own."""
    cases = [case for case in FUSED_CASES if case.host in ROOTS]
    for case, by_rank in checkouts.run(cases, 2, 2, is_exact=False).items():
        assert_is_the_dense_step(case, by_rank, 2, 2, tolerance=FUSED)


# A rollout of several samples: the host divides by the rollout's tokens, and so do we where we see them or have weighted rewards.
SEGMENTS = [
    HostCase(host, door, aggregation, estimator, companion, size=3, segments=True)
    for host in ("miles", "slime")
    for estimator in ("grpo", "gspo")
    for door, aggregation, companion in [
        ("custom_loss", "prompt_mean", "reward"),
        ("custom_loss", "token_mean", "reward"),
        ("default", "prompt_mean", "reward"),
        ("default", "token_mean", "reward"),
        ("reducer", "prompt_mean", "reward"),
        ("reducer", "token_mean", "reward"),
    ]
]
# A generate function of the user's: constant needs to know nothing of rollouts, and sample_mean that each is one sample.
AGENT = (("custom_generate_function_path", "user.agent"),)
SEGMENTS += [
    # slime normalises rewards sample by sample, which is another advantage: there the hook does it by rollouts.
    HostCase(host, "reducer", "constant", estimator, companion, size=3, segments=True, options=AGENT)
    for host, companion in (("miles", ""), ("slime", "reward"))
    for estimator in ("grpo", "gspo")
]
SEGMENTS += [
    HostCase(host, "reducer", "sample_mean", companion="reward", size=3, options=(*AGENT, ("one_sample_per_rollout", True)))
    for host in ("miles", "slime")
]


@pytest.mark.megatron
def test_rollouts_of_several_samples_train_the_dense_step(emulated):
    for case, by_rank in emulated.run(SEGMENTS, 2, 2).items():
        assert_is_the_dense_step(case, by_rank, 2, 2)


@pytest.mark.host
@pytest.mark.megatron
def test_rollouts_of_several_samples_train_the_dense_step_in_a_checkout(checkouts):
    cases = [case for case in SEGMENTS if case.host in ROOTS]
    for case, by_rank in checkouts.run(cases, 2, 2).items():
        assert_is_the_dense_step(case, by_rank, 2, 2)


MILES = HostCase("miles", "reducer", "sample_mean", size=3)
REFUSED = [
    pytest.param(replace(MILES, layout="bshd"), "bshd", id="FB-26 bshd under cp in the reducer"),
    pytest.param(replace(MILES, aggregation="constant", per_token=True), "calculate-per-token-loss", id="constant per token"),
    pytest.param(replace(MILES, per_token=True), "token_mean", id="sample_mean per token"),
    pytest.param(replace(MILES, aggregation="prompt_mean"), "reward_post_process", id="prompt_mean alone"),
    pytest.param(replace(MILES, aggregation="token_mean"), "calculate-per-token-loss", id="token_mean alone"),
    pytest.param(replace(MILES, companion="reward"), "sample_mean", id="sample_mean with the companion"),
    pytest.param(replace(MILES, options=AGENT), "--one-sample-per-rollout", id="FB-11 sample_mean of rollouts that may be several"),
    (
        replace(MILES, options=(*AGENT, ("one_sample_per_rollout", True)), companion="reward", segments=True),
        "rollout 100 has 2 samples",
    ),
    (replace(MILES, door="custom_loss", aggregation="prompt_mean"), "reward_post_process"),
]


@pytest.mark.megatron
@pytest.mark.parametrize(("case", "words"), REFUSED)
def test_a_host_meets_the_refusal_where_it_loads_the_hook(emulated, case, words):
    """FB-11, FB-26: a hook that is loaded by the host must refuse by itself."""
    for answer in emulated.run([case], 1, 2)[case]:
        assert isinstance(answer, str), f"{case} was trained"
        assert ("ConfigError" in answer or "DataError" in answer) and words in answer


@pytest.mark.host
@pytest.mark.megatron
@pytest.mark.parametrize(("case", "words"), REFUSED)
def test_a_checkout_meets_the_refusal_where_it_loads_the_hook(checkouts, case, words):
    cases = [replace(case, host=host) for host in ROOTS if host == "miles" or case.layout != "bshd"]
    for answers in checkouts.run(cases, 1, 2).values():
        assert all(isinstance(answer, str) and "Error" in answer and words in answer for answer in answers), answers
