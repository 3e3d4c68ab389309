"""What holds of each trainer: the step is exact, masked values change nothing, corrections and lines are those of the settings.

What is one host's alone, and what needs its checkout, is in test_<host>.py.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import refused_hosts
import skyrl_cases
import torch
from adapter_cases import (
    CORRECTIONS,
    EACH_SEQUENCE,
    LOSSES,
    TOLERANCE,
    Adapter,
    RowCase,
    adapters,
    check_kl,
    largest_error,
    samples_of,
    too_large,
)
from helpers import pool_of

from megatron_rl.errors import ConfigError, DataError
from megatron_rl.formula import Formula
from megatron_rl.hosts import nemo_rl
from megatron_rl.hosts.contract import Contract
from megatron_rl.testing.reference import CLIPS
from megatron_rl.weights import formula_value, get_loss_aggregation

pool = pool_of(4)
ADAPTERS = adapters()
WEIGHED = {nemo_rl.WEIGHTS.removeprefix(nemo_rl.LOSS_FN): True}
TRUNCATED = WEIGHED | {"truncated_importance_sampling_type": "tis", "truncated_importance_sampling_ratio": 1.05}

of_each_host = pytest.mark.parametrize("adapter", ADAPTERS.values(), ids=ADAPTERS, indirect=True)
on_ranks = pytest.mark.parametrize(
    "adapter",
    [pytest.param(one, id=name, marks=[pytest.mark.megatron] * (one.num_ranks > 1)) for name, one in ADAPTERS.items()],
    indirect=True,
)


@pytest.fixture
def adapter(request, monkeypatch) -> Iterator[Adapter]:
    with monkeypatch.context() as patch:
        request.param.install(patch)
        yield request.param


def few(adapter: Adapter) -> list:
    """Each aggregation with one of LOSSES, in turn, in one process: what a token weighs does not ask for the loss."""
    return [
        RowCase(loss=LOSSES[(place + turn) % len(LOSSES)], aggregation=one, **layout)
        for turn, layout in enumerate(adapter.shorts)
        for place, one in enumerate(adapter.aggregations)
    ]


# The step


@on_ranks
@pytest.mark.parametrize("loss", LOSSES)
def test_the_step_is_exact_in_each_layout(adapter, loss, request):
    """Ranks, micro-batches and packings of the host, ragged prompt groups, fully masked samples; against float64.

    Where a host has many, a layout under an aggregation meets one of the losses, in turn: it multiplies the weights of all by one
    factor."""
    chosen = adapter.matrix([loss])
    if len(chosen) >= 16 * len(LOSSES):
        chosen = [case for place, case in enumerate(chosen) if (place + place // len(LOSSES)) % len(LOSSES) == LOSSES.index(loss)]
    assert Counter(case.aggregation for case in chosen).keys() == {*adapter.aggregations} and len({*map(str, chosen)}) >= 16
    found = adapter.errors(chosen, partial(request.getfixturevalue, "pool"))
    assert len(found) == len(chosen) and not too_large(found)


@on_ranks
def test_each_other_loss_by_name_is_exact(adapter, request):
    chosen = adapter.others(LOSSES)
    assert {case.loss for case in chosen} | {*LOSSES} == {loss for loss, _ in adapter.modes()} <= CLIPS.keys()
    found = adapter.errors(chosen, partial(request.getfixturevalue, "pool"))
    assert len(found) == len(chosen) and not too_large(found)


@of_each_host
@pytest.mark.parametrize("poison", [math.nan, -math.inf])
def test_masked_values_change_nothing(adapter, poison):
    """Neither our loss, nor the host's terms beside it, nor a metric."""
    for case in few(adapter):
        step = adapter.step(case)
        clean, found = (adapter.run(case, step, poison=value, **adapter.terms) for value in (None, poison))
        # In float32, where sums may come in another order.
        assert largest_error(found, clean.loss, clean.gradients) <= 1e-6 and clean.loss != 0, case
        assert found.metrics == clean.metrics, case


@of_each_host
def test_a_micro_batch_without_a_trained_token_is_exact(adapter):
    """One of each rank. No response of one token is in it where such is to be had: verl fills batches with them."""
    for case in few(adapter):
        step = adapter.step(case)
        is_long = [len(one.loss_mask) > 1 for one in step.samples]
        ranks = list(case.micro_batches())
        chosen = [next((batch for batch in of_rank if all(is_long[i] for i in batch)), of_rank[0]) for of_rank in ranks]
        first = {index for batch in chosen for index in batch}
        empty = [replace(one, loss_mask=[0] * len(one.loss_mask)) if i in first else one for i, one in enumerate(step.samples)]
        step = adapter.step(case, empty, step.log_probs)
        found = adapter.run(case, step)
        assert largest_error(found, *adapter.truth(case, step)) <= TOLERANCE and found.loss != 0, case
        assert not any(found.gradients[index].any() for index in first)


@of_each_host
def test_a_value_of_a_trained_token_that_is_not_finite_is_refused(adapter):
    case = RowCase(loss="grpo", aggregation="token_mean")
    samples, log_probs = samples_of(case)
    samples[1] = replace(samples[1], old_log_probs=[math.nan] * len(samples[1].loss_mask))
    with pytest.raises(DataError, match="not finite"):
        adapter.run(case, adapter.step(case, samples, log_probs))


@pytest.mark.parametrize(
    ("adapter", "column", "remedy"),
    [
        (ADAPTERS["roll"], "infer_logprobs", "set actor_infer.generating_args.logprobs: 1"),
        (ADAPTERS["skyrl"], "rollout_logprobs", "set generator.sampling_params.logprobs=1"),
    ],
    indirect=["adapter"],
)
def test_a_batch_without_the_samplers_log_probabilities_is_refused(adapter, column, remedy):
    case = RowCase(loss="dppo_tv", aggregation="token_mean")
    step = adapter.step(case)
    del step.columns[column]
    with pytest.raises(ConfigError, match=remedy):
        adapter.run(case, step)


@of_each_host
@pytest.mark.parametrize(("own", "factor"), CORRECTIONS, ids=str)
def test_a_correction_of_ours_is_set_by_its_names_here(adapter, own, factor):
    """The sampler's log-probabilities are 0.1 lower, so each weight is exp(0.1), and 1.05 under a bound of 1.05."""
    case = RowCase(loss="cispo", aggregation="token_mean", **adapter.shorts[0])
    plain, found = adapter.run(case, adapter.step(case)), adapter.run(case, adapter.below(case), own=own)
    assert found.loss == pytest.approx(plain.loss * factor, rel=1e-5, abs=1e-9) and plain.loss != 0  # float32


@pytest.mark.parametrize(
    ("adapter", "settings", "bound"),
    [
        pytest.param(ADAPTERS["verl"], {}, math.inf, id="verl"),
        pytest.param(ADAPTERS["nemo_rl"], WEIGHED, math.inf, id="nemo_rl"),
        pytest.param(ADAPTERS["nemo_rl"], TRUNCATED, 1.05, id="nemo_rl, truncated"),
        pytest.param(ADAPTERS["roll"], {}, math.inf, id="roll"),
        pytest.param(ADAPTERS["skyrl"], skyrl_cases.correction(2.0), 2.0, id="skyrl"),
        pytest.param(ADAPTERS["skyrl"], skyrl_cases.correction(1.05), 1.05, id="skyrl, truncated"),
    ],
    indirect=["adapter"],
)
def test_the_hosts_own_weights_multiply_the_loss_of_each_token(adapter, settings, bound):
    """min(exp(old - sampled), bound), with another gap for each token."""
    case, numbers = RowCase(loss="cispo", aggregation="token_mean", **adapter.shorts[0]), random.Random(0)
    samples, log_probs = samples_of(case)
    gaps = [[numbers.uniform(-0.2, 0.2) for _ in sample.loss_mask] for sample in samples]
    sampled = [
        [old - gap for old, gap in zip(sample.old_log_probs, of_sample, strict=True)]
        for sample, of_sample in zip(samples, gaps, strict=True)
    ]
    samples = [replace(sample, rollout_log_probs=values) for sample, values in zip(samples, sampled, strict=True)]
    step = adapter.step(case, samples, log_probs)
    if adapter.name == "roll":
        step.columns["train_infer_is_weight"] = (step.columns["old_log_probs"] - step.columns["infer_logprobs"]).exp()
    found = adapter.run(case, step, **settings)
    factors = [[min(math.exp(gap), bound) for gap in of_sample] for of_sample in gaps]
    assert largest_error(found, *adapter.truth(case, step, factors)) <= TOLERANCE


NEMO_KL, ROLL_KL = {"reference_policy_kl_penalty": 0.1}, {"use_kl_loss": True, "kl_loss_coef": 0.1}


@pytest.mark.parametrize("aggregation", ["constant", "prompt_mean"])
@pytest.mark.parametrize(
    ("adapter", "settings", "estimator"),
    [
        (ADAPTERS["nemo_rl"], NEMO_KL, "k3"),
        (ADAPTERS["nemo_rl"], NEMO_KL | {"megatron_rl_kl_estimator": "k2"}, "k2"),
        (ADAPTERS["nemo_rl"], NEMO_KL | {"megatron_rl_kl_estimator": "unbiased"}, "unbiased"),
        (ADAPTERS["roll"], ROLL_KL, "k3"),
        (ADAPTERS["roll"], ROLL_KL | {"MEGATRON_RL_KL_ESTIMATOR": "k2"}, "k2"),
    ],
    indirect=["adapter"],
)
def test_kl_is_a_mean_over_samples_and_nemo_rls_own_over_tokens(adapter, settings, estimator, aggregation):
    case = RowCase(loss="grpo", aggregation=aggregation, sizes=(3, 5), cp=3 - adapter.num_ranks // 2, packing=EACH_SEQUENCE)
    step = adapter.step(case)
    plain, found = (adapter.run(case, step, **given) for given in ({}, settings))
    check_kl(plain, found, step, estimator, is_over_tokens=settings == NEMO_KL)


@pytest.mark.parametrize(
    ("adapter", "settings", "placeholder"),
    [
        (ADAPTERS["nemo_rl"], {"force_on_policy_ratio": True}, {"prev_logprobs": -50.0}),
        (ADAPTERS["roll"], {"enable_old_logprobs_recompute": False}, {"old_log_probs": 0}),
    ],
    indirect=["adapter"],
)
def test_without_old_log_probs_the_ratio_is_one(adapter, settings, placeholder):
    case = RowCase(loss="grpo", aggregation="sample_mean")
    step = adapter.step(case)
    for name, value in placeholder.items():
        step.columns[name] = torch.full(step.columns[name].shape, value)
    found = adapter.run(case, step, **settings)
    by_hand = [-sample.advantage * bool(sum(sample.loss_mask)) / len(step.samples) for sample in step.samples]
    assert found.loss == pytest.approx(sum(by_hand), abs=1e-6)
    assert found.metrics[0].get("actor/policykl@mean", 0.0) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(
    ("launch", "settings"), [(launch, settings) for launch, rows in refused_hosts.TAKEN.items() for settings in rows]
)
def test_a_launch_beside_a_refused_one_is_taken(launch, settings):
    launch(**settings)


@pytest.mark.parametrize(("launch", "settings", "fields"), refused_hosts.READ)
def test_settings_are_read_by_the_hosts_names(launch, settings, fields):
    config = launch(**settings).config
    assert {name: getattr(config, name) for name in fields} == fields


@of_each_host
def test_the_factors_of_the_step_are_those_that_explain_declares(adapter):
    """What the loss multiplies by itself is the rest, as the step is exact."""
    case, num_microbatches = RowCase(loss="grpo", aggregation="sample_mean", dp=2, cp=4), 3
    _, of_step = adapter.module.stages(Formula(), get_loss_aggregation("sample_mean"), per_token=False)
    declared = math.prod((formula for _, formula, _ in of_step), start=Formula())
    by_hand = adapter.host_factor(case, num_microbatches) * adapter.factor(case, num_microbatches)
    assert formula_value(declared, {"dp": case.dp, "cp": case.cp, "M": num_microbatches}) == pytest.approx(by_hand)


# What is said


@of_each_host
def test_two_trainers_of_a_process_say_one_line_each(adapter, capsys):
    """At the first of several micro-batches."""
    case = RowCase(loss="gspo", aggregation="sample_mean", **adapter.shorts[0] | {"dp": 1})
    for number in (1, 2):
        adapter.run(case, adapter.step(case))
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("megatron_rl: ")]
        assert len(lines) == 1, (number, lines)
        assert f" in {adapter.module.TITLE} | " in lines[0] and "| weight of a token " in lines[0], lines


@of_each_host
def test_metrics_have_the_hosts_names(adapter):
    case = RowCase(loss="grpo", aggregation="token_mean", **adapter.shorts[0])
    assert adapter.run(case, adapter.step(case), **adapter.terms).metrics[0].keys() == adapter.metrics


# Another revision of the host


def another(one, two): ...


class Owner:
    method = another


def test_another_revisions_contract_is_named_with_its_line():
    """Those of the hosts are asked where an emulated host starts."""
    right = {f"{__name__}:another": ("one", "two"), f"{__name__}:Owner.method": ("one", "...")}
    Contract("A host", "a revision", right).check()
    wrong = right | {f"{__name__}:another": ("one",), f"{__name__}:Owner.missing": ()}
    with pytest.raises(ConfigError) as refused:
        Contract("A host", "a revision", wrong).check()
    takes, missing = refused.value.problems
    place = f"and a revision was probed ({__file__}:{another.__code__.co_firstlineno})"
    assert takes == f"A host's {__name__}.another takes (one, two), ours is made for (one), {place}"
    assert missing.startswith(f"A host's {__name__}.Owner.missing is missing, and a revision was probed")
