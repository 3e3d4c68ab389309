"""What is a user's own, by dotted path, wherever it is read: a loss, an estimator, a correction, an aggregation.

test_declare.py has what may be declared.
"""

from __future__ import annotations

import functools
import math
from argparse import Namespace
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers import CLIP, EXACT, Batch, loop_entropy, loop_log_probs, names_forgotten, random_batch, run_loss, with_gradient, zigzag
from host_emulator import run_cases
from host_steps import REDUCED_BY, REWARD, SEGMENTS, Case
from host_steps import oracle as truth_of_step
from loss_backends import TRITON, counted_launches, over_backends
from nemo_rl_cases import master_config
from test_explain import CLOSE
from torch import Tensor

from megatron_rl import register_correction
from megatron_rl.config import PolicyLossConfig
from megatron_rl.count import StepTotals
from megatron_rl.declare import LossValue, get_policy_loss, register_policy_loss
from megatron_rl.errors import ConfigError
from megatron_rl.hosts import nemo_rl
from megatron_rl.hosts.checks import check_launch
from megatron_rl.layout.groups import SINGLE
from megatron_rl.losses.corrections import CorrectionSettings
from megatron_rl.metrics.step import finalise_metrics
from megatron_rl.policy_loss import importance_correction, policy_loss
from megatron_rl.policy_loss.reduce_torch import evaluate
from megatron_rl.testing import oracle
from megatron_rl.testing.ranks import RankPool
from megatron_rl.validation import Settings, find_problems
from megatron_rl.validation.weight_words import samples_of_mean_1
from megatron_rl.weights import get_loss_aggregation, register_loss_aggregation, sample_token_weights

pytestmark = pytest.mark.usefixtures("own_losses")
NAMES = ("sums", "of_groups", "square_root", "odd", "of_the_call")
SAMPLE_SUM, OF_GROUPS, SQUARE_ROOT, ODD, OF_THE_CALL = (f"own_losses.{name}" for name in NAMES)
BATCH = random_batch([5, 1, 9, 3], seed=4)
ROLLOUT = BATCH.old_log_probs + 0.1 * torch.sin(torch.arange(len(BATCH.labels), dtype=torch.float64))
ROLLOUT = torch.where(BATCH.loss_mask, ROLLOUT, math.nan)  # what is masked may be anything


def public_function(name: str):
    return functools.partial(policy_loss, name)


def by_its_function(name: str, batch: Batch, **numbers: float) -> tuple[Tensor, Tensor]:
    """(loss, gradient) of the function itself, by autograd: of each token, or of a sample's means."""
    loss = get_policy_loss(name)
    clips = {} if loss.clip_ratios is None else CLIP
    numbers = clips | loss.resolve_parameters(numbers)

    def total(logits: Tensor) -> Tensor:
        found = logits[:0].sum()
        for document, advantage, weight in zip(batch.documents, batch.advantages, batch.token_weights, strict=True):
            own = [t for t in document if batch.loss_mask[t]]
            if not own:
                continue
            new, ones = loop_log_probs(logits[own], batch.labels[own]), torch.ones(len(own), dtype=torch.float64)
            log_ratio = new - batch.old_log_probs[own]
            known = {"token_counts": len(own) * ones, "mean_log_ratio": log_ratio.mean() * ones}
            known |= {"entropy": loop_entropy(logits[own]).detach(), "rollout_log_probs": ROLLOUT[own]}
            given = [log_ratio, advantage * ones, new]
            if loss.token_clip is not None:
                given[0] = loss.token_clip(*given[:2], **clips)
            vectors = {need: known[need] for need in loss.needs}
            if loss.level == "sequence":
                given = [vector.mean() * ones for vector in given]
                vectors = {need: vector.mean() * ones for need, vector in vectors.items()}
            returned = loss.function(*given[: 3 if loss.takes_log_probs else 2], **vectors, **numbers)
            found = found + weight * (returned.value if isinstance(returned, LossValue) else returned).sum()
        return found

    return with_gradient(total, batch.logits)


def assert_same(got, want, **tolerance) -> None:
    """(output, gradient) of a loss against (loss, gradient)."""
    torch.testing.assert_close(got[0].loss.detach(), want[0], **tolerance)
    torch.testing.assert_close(got[1], want[1], **tolerance)


def options_of(name: str, rollout: Tensor = ROLLOUT, **numbers: float) -> dict:
    loss = get_policy_loss(name)
    options = dict(CLIP) if loss.clip_ratios is not None else {}
    if "rollout_log_probs" in loss.needs:
        options |= {"rollout_log_probs": rollout}
    return options | {"loss_parameters": numbers}


# Name -> the shares of clipped tokens that may be.
OWN = {
    "own_reinforce": (0, 0),
    "own_reinforce_of_samples": (0, 0),
    "own_gmpo": (0.01, 0.99),
    "own_centred_on_the_sample": (0, 0),
    "own_truncated": (0.01, 0.99),
    "own_heeding": (0, 0),
    "own_heeding_of_samples": (0, 0),
}
NUMBERS = {"own_truncated": {"scale": 0.5, "ratio_cap": 1.05}, "own_reinforce": {"scale": 0.7}}


@pytest.mark.parametrize(
    ("name", "numbers"),
    [*((name, {}) for name in OWN), *NUMBERS.items()],
    ids=lambda value: value if isinstance(value, str) else "",
)
@over_backends
def test_a_loss_is_its_function(name, numbers, backend):
    """At each level, with what it needs and its parameters; its Triton version where it has one, kernels around it where not."""
    options = options_of(name, backend.to(ROLLOUT), **numbers)
    with counted_launches() as launches:
        got = backend.run(public_function(name), BATCH, metrics="basic", **options)
    assert_same(got, by_its_function(name, BATCH, **numbers), **backend.tolerance)
    assert ("loss_and_coefficients_kernel" in launches) == (backend is TRITON and get_policy_loss(name).triton is not None)
    low, high = OWN[name]
    assert low <= finalise_metrics(got[0].metrics)["policy/clipped_ratio_fraction"] <= high


@pytest.mark.parametrize("level", ["token", "sequence"])
@over_backends
def test_beyond_the_bound_of_the_log_ratio_nothing_trains_whatever_a_derivative_says(level, backend):
    """e^20 squared were a gradient of 1e17. Log-ratios of 25 in one sample, and of -25 in another."""
    first, second, *_ = BATCH.documents
    old = loop_log_probs(BATCH.logits, BATCH.labels)
    old[first], old[second] = old[first] - 25, old[second] + 25
    _, gradient = backend.run(public_function(f"own_unbounded_{level}"), replace(BATCH, old_log_probs=old))
    assert not gradient[[*first, *second]].any() and gradient.any()


def test_beyond_the_bound_a_derivative_by_the_log_probability_stays():
    """A = 2, log-ratio x, log-probability -3: of -e^x A log_prob it is -A e^x, and -A e^x (1 - 3) up to the bound."""

    def both(log_ratio, advantages, log_probs):
        return -log_ratio.exp() * advantages * log_probs

    register_policy_loss("both")(both)
    x = torch.tensor([-25.0, -20.0, 1.0, 20.0, 25.0], dtype=torch.float64)
    found = evaluate(get_policy_loss("both"), x, torch.full_like(x, 2.0), torch.full_like(x, -3.0), {}, {})
    torch.testing.assert_close(found.derivative, -2 * x.exp() * torch.tensor([1.0, -2.0, -2.0, -2.0, 1.0]).double(), **EXACT)


@pytest.fixture(scope="module")
def pool():
    import own_losses

    with names_forgotten():
        own_losses.declare()  # and its ranks know them
        with RankPool(2) as ranks:
            yield ranks


WIDE = replace(BATCH, logits=torch.nn.functional.pad(BATCH.logits, (0, 1), value=-1.0))  # for two shards of equal size


def on_a_rank(rank: int):
    """Of cp ranks, the second one without a token of the sample of one token; and of tp ranks, whose entropy needs both shards."""
    positions = [zigzag(document, rank, 2) for document in BATCH.documents]
    flat = [t for document in positions for t in document]
    part = BATCH.take(positions)
    shard = replace(WIDE, logits=WIDE.logits[:, 6 * rank : 6 * rank + 6])
    found = {}
    for name in OWN:
        over_cp = {"cp_group": dist.group.WORLD, "tp_group": SINGLE, "advantages_per": "sample"}
        over_tp = {"tp_group": dist.group.WORLD, "cp_group": SINGLE, "advantages_per": "sample"}
        output, gradient = run_loss(public_function(name), part, **over_cp, **options_of(name, ROLLOUT[flat]))
        sharded, columns = run_loss(public_function(name), shard, **over_tp, **options_of(name))
        found[name] = (output.loss.detach(), gradient, sharded.loss.detach(), columns)
    return flat, found


@pytest.mark.megatron
def test_a_loss_is_its_function_over_ranks(pool):
    """FB-109: the means, counts and entropies of whole samples, and the gradient through them, of each rank's own tokens."""
    answers = pool.run(on_a_rank, world_size=2)
    for name in OWN:
        loss, gradient = by_its_function(name, BATCH)
        of_wide, gradient_of_wide = by_its_function(name, WIDE)
        torch.testing.assert_close(sum(found[name][0] for _, found in answers), loss, **EXACT)
        for rank, (flat, found) in enumerate(answers):
            torch.testing.assert_close(found[name][1], gradient[flat], **EXACT)
            torch.testing.assert_close(found[name][2], of_wide, **EXACT)
            torch.testing.assert_close(found[name][3], gradient_of_wide[:, 6 * rank : 6 * rank + 6], **EXACT)


# What it cannot take


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"megatron_rl": "own_centred.sample_mean"}, "policy_loss=own_centred depends at one token on the others"),
        (
            {"megatron_rl": "grpo.token_mean", "reference_policy_kl_penalty": 0.1, "megatron_rl_kl_estimator": "own_centred_kl"},
            "kl_estimator=own_centred_kl depends at one token on the others",
        ),
        ({"megatron_rl": f"grpo.{OF_THE_CALL}"}, "own_of_the_call depends at one sample on the others"),
    ],
)
def test_trainers_that_hand_over_rows_ask_a_function_of_ones_own_too(settings, said):
    """Of verl, NeMo-RL, ROLL and SkyRL, whose settings no launch rule judges, NeMo-RL: all have one reader."""
    nemo_rl.read(master_config({"megatron_rl": "own_reinforce.sample_mean"}))
    with pytest.raises(ConfigError, match=said):
        nemo_rl.read(master_config({"reference_policy_kl_penalty": 0, **settings}))


# Estimators and corrections


@over_backends
def test_an_own_estimator_by_dotted_path_trains(backend):
    """Autograd gives its derivative, and without a Triton version the loss runs in torch. Advantages of 0 leave the term alone."""
    batch = replace(BATCH, advantages=0 * BATCH.advantages)
    ref, weights = batch.old_log_probs + 0.4, batch.token_weights
    options = {"kl_coefficient": 0.5, "ref_log_probs": ref, "regularizer_weights": weights}
    got = backend.run(public_function("grpo"), batch, kl_estimator="own_losses.jeffreys", **options, **CLIP)

    def term(logits: Tensor) -> Tensor:
        d = loop_log_probs(logits, batch.labels) - ref
        of_tokens = weights.repeat_interleave(torch.tensor([len(document) for document in batch.documents]))
        return (torch.where(batch.loss_mask, d * (1 - (-d).exp()) / 2, 0.0) * of_tokens).sum() / 2

    assert_same(got, with_gradient(term, batch.logits), **backend.tolerance)


def test_a_correction_of_ones_own_weighs_tokens_and_samples():
    w, zeros = torch.tensor([0.25, 1.0, 4.0], dtype=torch.float64), torch.zeros(3, dtype=torch.float64)

    def weights_of(settings: CorrectionSettings, *bounds: int) -> list[float]:
        given = (w.log(), zeros, torch.ones(3, dtype=torch.bool), torch.tensor(bounds))
        return importance_correction(settings, *given)[0].weights.tolist()

    bounds = {"importance_correction_low": 0.5, "importance_correction_high": 2.0}
    settings = CorrectionSettings.of(PolicyLossConfig(importance_correction="own_losses.root", **bounds))
    assert weights_of(settings, 0, 3) == pytest.approx([0.5**0.5, 1.0, 2.0**0.5], rel=1e-12)
    levels = {"sequence_mean": (0.0, None)}
    register_correction("own", bounds=levels, weigh_tokens=lambda ratios: ratios.sqrt())(lambda ratios, low, high: ratios / 4)
    # The geometric means of w are 1/2 and 4: 1/8 x (1/2, 1), and 1 x 2.
    found = weights_of(CorrectionSettings(kind="own", level="sequence_mean", high=3.0), 0, 2, 3)
    assert found == pytest.approx([1 / 16, 1 / 8, 2.0], rel=1e-12)


# Aggregations

# Step S: N = 4, P = 2, T = 7, m = (2, 4, 1, 0), M_g = (6, 6, 1, 1).
WEIGHTS = {
    SAMPLE_SUM: [1 / 4, 1 / 4, 1 / 4, 0],
    OF_GROUPS: [2 / 24, 4 / 24, 1 / 4, 0],
    SQUARE_ROOT: [1 / (4 * 2**0.5), 1 / 8, 1 / 4, 0],
    ODD: [1 / 48, 1 / 56, 1 / 44, 0],
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_its_weights_by_hand(name):
    """FB-04: what is registered is as good as a built-in one, found by its name, and an empty sample has weight 0."""
    counts, prompts = torch.tensor([2, 4, 1, 0]), torch.tensor([6, 6, 1, 1])
    weights = sample_token_weights(name, counts, StepTotals(4, 2, 7), prompt_token_counts=prompts)
    assert weights.tolist() == pytest.approx(WEIGHTS[name], **CLOSE)
    assert find_problems(Settings(config=PolicyLossConfig(loss_aggregation=name))) == []


REDUCER = {"custom_pg_loss_reducer_function_path": "megatron_rl.reducers.get_pg_loss_reducer"}


def test_a_host_that_gives_too_little_refuses_it_by_name():
    def problem_of(name, **others) -> str:
        with pytest.raises(ConfigError) as caught:
            check_launch(Namespace(loss_aggregation=name, **REDUCER, **others))
        (problem,) = caught.value.problems
        return problem

    assert problem_of(OF_GROUPS).startswith(f"--loss-aggregation {OF_GROUPS} needs prompt_token_counts: ")
    assert "it declares no formula, so what the host's division by N leaves of its weight is not known" in problem_of(ODD)
    several = {"custom_generate_function_path": "my.generate"}
    assert "may return several samples for one rollout" in problem_of(SQUARE_ROOT, **several)
    check_launch(Namespace(loss_aggregation=SAMPLE_SUM, **REDUCER, **several))
    assert "does not go with calculate_per_token_loss=True" in problem_of(SAMPLE_SUM, calculate_per_token_loss=True)
    for formula, missing in (("1 / (N T)", "num_tokens"), ("1 / N^2", "num_samples"), ("1 / m_i", "num_samples")):
        register_loss_aggregation(f"of {formula}", formula=formula)
        assert problem_of(f"of {formula}").startswith(f"--loss-aggregation of {formula} needs {missing}")


def test_what_a_record_says_of_its_weights():
    """Whether they depend on the tokens of other samples, and over which samples a strength has the mean 1."""
    names = ("sample_mean", "constant", "prompt_mean", "token_mean", ODD)
    records = [get_loss_aggregation(name) for name in names]
    assert [record.counts_other_samples for record in records] == [False, False, True, True, True]
    assert [samples_of_mean_1(record) for record in records] == [None, None, "its prompt's samples", "the step's samples", None]


# In the emulated hosts. R counts rollouts and Mj a rollout's tokens, as the hosts do.
BY_HAND = {
    SAMPLE_SUM: lambda n: 1 / n.R,
    OF_GROUPS: lambda n: n.Mj / (n.R * n.M),
    SQUARE_ROOT: lambda n: 1 / (n.R * n.Mj**0.5),
    ODD: lambda n: 1 / (n.R * (n.Mj + 10)),
}
# Small micro-batches; one sample a rollout, or several where the part of ours sees rollouts.
IN_HOSTS = [
    Case(
        host=host,
        settings=REDUCED_BY[method] | hook | {"loss_aggregation": name, "advantage_estimator": loss},
        rollouts=rollouts,
        size=2,
    )
    for host, method, name, loss, hook, rollouts in (
        ("miles", "reducer", SAMPLE_SUM, "grpo", {}, SEGMENTS),
        ("slime", "reducer", SQUARE_ROOT, "grpo", {}, None),
        ("slime", "custom_loss", SAMPLE_SUM, "gspo", {}, None),
        ("miles", "host", OF_GROUPS, "grpo", REWARD, SEGMENTS),
        ("slime", "reducer", ODD, "grpo", REWARD, SEGMENTS),
        ("slime", "custom_loss", OF_GROUPS, "gspo", REWARD, SEGMENTS),
    )
]


@pytest.mark.megatron
def test_it_is_trained_in_the_emulated_hosts(pool):
    for case, result in zip(IN_HOSTS, pool.run(run_cases, {}, IN_HOSTS, world_size=1)[0], strict=True):
        assert not isinstance(result, str), f"{case}:\n{result}"
        with mock.patch.dict(oracle.AGGREGATIONS, BY_HAND):
            wanted = truth_of_step(case).gradient
        error = float((result.gradient - wanted).abs().max() / wanted.abs().max())
        assert error <= 1e-6, f"{case}: {error:.2e}"
