"""Our loss and our reducer inside miles and slime: each layout of a step has loss, gradient and metrics of the dense float64 step.

The emulated hosts run always, real checkouts with MILES_ROOT=... SLIME_ROOT=... pytest -m host --require host. Both load our hooks
by their own load_function, from samples to Megatron's gradient; neither scaling nor slicing is done by hand here.
"""

from __future__ import annotations

import math
import re
from argparse import Namespace
from dataclasses import replace

import pytest
import torch
from helpers import error_of, pool_of, set_global_args
from host_checkouts import roots_by_environment
from host_emulator import StepResult, run_cases
from host_steps import (
    AGENT,
    CONSTANT,
    GSPO,
    ICEPOP,
    MASKED,
    OPSM,
    PER_TOKEN,
    REDUCED_BY,
    REPLAY,
    REWARD,
    SEGMENTS,
    SHAPES,
    SKIPPED,
    TERMS,
    TIS,
    Case,
    oracle,
)

from megatron_rl import hooks, reducers  # noqa: F401  (the names that the launch line gives)
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.hosts.reducer import get_pg_loss_reducer
from megatron_rl.testing.ranks import RankPool

UNBIASED, ENTROPY = {"use_unbiased_kl": True}, {"entropy_coef": 0.2}
CISPO_OPEN = {"advantage_estimator": "cispo", "eps_clip": 4.0}
MASK = {
    "importance_correction": "mask",
    "importance_correction_level": "sequence_mean",
    "importance_correction_low": 0.9,
    "importance_correction_high": 1.2,
}
PROMPT_MEAN, TOKEN_MEAN = {"loss_aggregation": "prompt_mean"}, {"loss_aggregation": "token_mean"}
CASES = {
    "grpo thd": Case(),
    "FB-27 gspo thd": Case(settings=GSPO),
    "FB-26 gspo bshd with every term": Case("bshd", settings=GSPO | TIS | TERMS, without=()),
    "FB-24 grpo allgather with every term": Case("allgather", settings=TIS | TERMS, without=()),
    "FB-65 as many rows as samples": Case("allgather", shapes=[(2, 1, [1]), (3, 2, [1, 1]), (5, 2, [0, 1])]),
    "constant with every term": Case(settings=CONSTANT | TIS | TERMS, without=()),
    "token_mean, host per token": Case(settings=PER_TOKEN | TERMS, shapes=SHAPES),
    "token_mean gspo, host per token": Case(host="slime", settings=PER_TOKEN | GSPO | TIS, shapes=SHAPES, without=()),
    "FB-11 segments of one rollout share its weight": Case(settings=TERMS, rollouts=SEGMENTS),
    "FB-11 segments, constant, slime": Case(host="slime", settings=CONSTANT, rollouts=SEGMENTS),
    "rollout log-probabilities": Case(host="slime", settings={"use_rollout_logprobs": True}, without=("log_probs",)),
    "FB-66 slime reuses the current log-probabilities": Case(host="slime", settings=GSPO | TERMS, without=("log_probs",)),
    "FB-66 our own flag, miles": Case(settings=GSPO | TERMS | SKIPPED, without=("log_probs",)),
    "TIS against the policy itself, our own flag": Case(settings=TIS | OPSM | SKIPPED, without=("log_probs",)),
    "icepop, a function of miles": Case(settings=ICEPOP["miles"] | TERMS, without=()),
    "FB-96 OPSM reads the sampler's log-probabilities": Case(settings=OPSM | TERMS, without=()),
    "FB-93 k1, the hosts' default, in a loss": Case(settings=TERMS | {"kl_loss_type": "k1"}),
    "k2": Case(host="slime", settings=TERMS | {"kl_loss_type": "k2"}),
    "unbiased KL has the token's ratio under gspo too": Case(settings=TERMS | UNBIASED | GSPO),
    "unbiased KL beside TIS, which does not weigh it": Case(settings=TIS | TERMS | UNBIASED, without=()),
    "low_var_kl beyond the hosts' clamp": Case(settings=TERMS, ref_noise=3.5),
    "a reported KL of the host's kind, at coefficient 0": Case(settings=TERMS | {"kl_loss_coef": 0.0, "kl_loss_type": "k2"}),
    "a reported unbiased KL, at coefficient 0": Case(settings=TERMS | UNBIASED | {"kl_loss_coef": 0.0}),
    "cispo without a lower bound": Case(host="slime", settings=CISPO_OPEN | ICEPOP["slime"], without=()),
    "our own flags, a mask by the sample's ratio": Case(settings=MASK | CONSTANT, without=()),
    "FB-25 one-token responses, ranks without any": Case(shapes=[SHAPES[1], MASKED, SHAPES[1]]),
}
CASES |= {
    "kept ids": Case(settings=REPLAY["miles"] | ENTROPY),
    "kept ids, slime": Case(host="slime", settings=REPLAY["slime"] | TERMS, without=()),
    "kept ids bshd, gspo, TIS and OPSM": Case("bshd", settings=REPLAY["miles"] | GSPO | TIS | OPSM | ENTROPY, without=()),
    "kept ids allgather, slime, TIS": Case("allgather", "slime", settings=REPLAY["slime"] | TIS, without=()),
    "kept ids, slime's reuse, per token": Case(
        host="slime", settings=REPLAY["slime"] | PER_TOKEN | UNBIASED | TERMS, shapes=SHAPES, without=("log_probs",)
    ),
    "kept ids, ranks without any": Case(settings=REPLAY["miles"], shapes=[SHAPES[1], MASKED, SHAPES[1]]),
}
# pg_clipfrac is what the loss itself counts: of a sample's ratio, by a clip that is none of the ratio's, of a ratio to the sampler.
CASES |= {
    f"a loss by name, {name}": Case(settings={"policy_loss": name, "eps_clip": None, "eps_clip_high": None}, without=())
    for name in ("gmpo", "gspo_token", "dppo_tv", "topr")
}
CASES |= {
    "entropy that a flag of miles reports": Case(settings={"observe_training_entropy": True}),
    "entropy that a flag of ours reports": Case(settings={"policy_metrics": "with_entropy"}),
    "dual clip": Case(settings={"eps_clip_c": 1.05}),
}
# Who reduces, with the weights that our hook puts into rewards or without. The host's reducer and our loss divide by the tokens of
# a sample's rollout; our reducer sees no rollouts.
WEIGHTED = {
    f"{mode}, {method}, {host}": Case(host=host, settings=REDUCED_BY[method] | REWARD | aggregation, size=size)
    for host, size in (("miles", 1), ("slime", 2))
    for method in REDUCED_BY
    for mode, aggregation in (("prompt_mean", PROMPT_MEAN), ("token_mean", TOKEN_MEAN), ("constant", CONSTANT))
}
WEIGHTED |= {f"FB-11 segments, {name}": replace(case, rollouts=SEGMENTS) for name, case in WEIGHTED.items()}
for host in REPLAY:
    reduced = Case(host=host, settings=REDUCED_BY["reducer"])
    WEIGHTED |= {
        f"sample_mean, reducer, {host}": reduced,
        f"constant, reducer, {host}": replace(reduced, settings=reduced.settings | CONSTANT),
        f"per token, reducer, {host}": replace(reduced, settings=reduced.settings | PER_TOKEN, shapes=SHAPES),
        f"recomputed, {host}": replace(reduced, settings={"recompute_loss_function": True}),
        f"FB-11 segments, constant, our reducer alone, {host}": replace(
            reduced, settings=reduced.settings | CONSTANT | AGENT, rollouts=SEGMENTS
        ),
        f"FB-11 segments, sample_mean, our reducer, {host}": replace(
            reduced, settings=reduced.settings | REWARD | AGENT, rollouts=SEGMENTS
        ),
    }
CASES |= WEIGHTED
ROOTS = roots_by_environment()
EXACT = 1e-6  # relative to the largest number, float32 against float64
pool = pool_of(4)
checkouts = pool_of(4)  # where a checkout stays loaded


def assert_is_the_dense_step(name: str, case: Case, by_rank: list[StepResult | str], dp: int, cp: int, tolerance=EXACT) -> None:
    for rank, found in enumerate(by_rank):
        assert not isinstance(found, str), f"{name}, rank {rank}:\n{found}"
        wanted = oracle(case)
        error = float((found.gradient - wanted.gradient).abs().max() / wanted.gradient.abs().max().clamp(min=1e-3))
        assert error <= tolerance, f"{name}: the gradient is wrong by {error:.2e} of its largest element"
        # The loss is a difference of larger numbers: its roundings are those of numbers of size 0.1.
        assert found.loss == pytest.approx(wanted.loss, rel=EXACT, abs=1e-7), name
        metrics = wanted.metrics | ({} if reports_entropy(case) else {"entropy_loss": 0.0})
        assert list(found.metrics) == list(by_rank[0].metrics)
        for key in found.metrics if case.has_our_loss else ("loss", "pg_loss"):
            assert found.metrics[key] == pytest.approx(metrics[key], rel=2 * EXACT, abs=2e-7), f"{name}: {key}"
        if case.args().calculate_per_token_loss:
            assert found.num_tokens == cp * sum(sum(mask) for _, _, mask in case.shapes)
        else:
            assert found.num_tokens == cp * sum(-(-of_rank // (case.size or of_rank)) for of_rank in dealt(case, dp))


def dealt(case: Case, dp: int) -> list[int]:
    return [len(range(rank, len(case.shapes), dp)) for rank in range(dp)]


def reports_entropy(case: Case) -> bool:
    """miles says 0 of what it does not compute."""
    asked = {"entropy_coef", "observe_training_entropy", "policy_metrics"}
    return case.host == "slime" or bool(asked & {*case.settings})


# Each case with one size of micro-batches, in turn.
@pytest.mark.parametrize(("name", "size"), [(name, (2, 1, 6)[number % 3]) for number, name in enumerate(CASES)])
def test_micro_batches_add_up_to_the_dense_step(name, size):
    """FB-56: everything masked is NaN, inf or 1e30 here, and half of the rows are NaN logits."""
    case = replace(CASES[name], size=size)
    assert_is_the_dense_step(name, case, run_cases(0, {}, [case]), 1, 1)


@pytest.fixture(params=["emulated", pytest.param("checkouts", marks=pytest.mark.host)])
def hosts(request) -> tuple[RankPool, dict[str, str]]:
    """The ranks, and the roots of the checkouts: the emulated hosts, or those that there are."""
    is_emulated = request.param == "emulated"
    return request.getfixturevalue("pool" if is_emulated else "checkouts"), {} if is_emulated else ROOTS


def assert_all_are_the_dense_step(hosts, cases: dict[str, Case], dp: int, cp: int, tp: int = 1, tolerance=EXACT) -> None:
    ranks, roots = hosts
    if roots:  # the samples of a checkout bring no sets here
        cases = {name: case for name, case in cases.items() if case.host in roots and not case.keeps}
    layout = {"context_parallel_size": cp, "tensor_model_parallel_size": tp}
    by_rank = ranks.run(run_cases, roots, [*cases.values()], world_size=dp * cp * tp, **layout)
    for number, (name, case) in enumerate(cases.items()):
        assert_is_the_dense_step(name, case, [results[number] for results in by_rank], dp, cp, tolerance)


LAYOUTS = [(2, 1, 1), (1, 2, 1), (1, 4, 1), (2, 2, 1), (1, 2, 2)]  # dp, cp, tp


@pytest.mark.slow
@pytest.mark.megatron
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_ranks_add_up_to_the_dense_step(hosts, layout):
    """FB-21, FB-26, FB-24, FB-25, FB-11: catches any factor of N, M, dp or cp, a count of a slice, a group's tokens of one
    micro-batch. A rank without tokens takes part like any other. A checkout runs all cases that it knows."""
    names, is_real = list(CASES), bool(hosts[1])
    dp, cp, tp = layout
    if tp > 1:  # sets on both shards and on one, of one id and of all; our reducer sees no vocabulary
        chosen = [name for number, name in enumerate(names) if name.startswith("kept ids") or number % 4 == 0]
        chosen = [name for name in chosen if CASES[name].has_our_loss]
    else:
        chosen = names if is_real else names[LAYOUTS.index(layout) :: 4]
    sizes = (3, 2, 0)
    cases = {name: replace(CASES[name], size=sizes[number % 3]) for number, name in enumerate(chosen)}
    assert_all_are_the_dense_step(hosts, cases, *layout)


@pytest.mark.host
@pytest.mark.megatron
@pytest.mark.parametrize("layout", ["bshd", "allgather"])
@pytest.mark.parametrize("estimator", ["grpo", "gspo"])
def test_a_checkout_reduces_its_own_rows_with_our_weights(checkouts, layout, estimator):
    """The hosts' GSPO leaves the backward of a gather out on a rank that holds no response token of the micro-batch, and the others
    wait for it, with their own reducer as with ours: one micro-batch. slime has no padded rows, and our reducer refuses them under
    context parallelism."""
    cases = {
        name: replace(case, layout=layout, settings=case.settings | {"advantage_estimator": estimator}, size=0)
        for name, case in WEIGHTED.items()
        if not case.has_our_loss and (layout == "allgather" or case.host == "miles")
    }
    assert_all_are_the_dense_step((checkouts, ROOTS), cases, 2, *((1, 1) if layout == "bshd" else (2, 1)))


ACTING = {"use_tis", "use_opsm", "importance_correction", "policy_loss"}
CORRECTED = [name for name, case in CASES.items() if ACTING & {*case.settings}]


@pytest.mark.parametrize("name", CORRECTED)
def test_a_correction_or_a_clip_of_the_cases_acts_on_some_tokens_and_not_on_all(name):
    """A case whose bounds hold every ratio would agree with a loss that corrects nothing."""
    settings, metrics = CASES[name].settings, oracle(CASES[name]).metrics
    if "use_opsm" in settings:
        assert 0 < metrics["opsm_clipfrac"] < 0.6
    if set(settings) & {"use_tis", "importance_correction"}:
        assert 0 < metrics["tis_clipfrac"] < 0.9
    if "policy_loss" in settings:
        assert 0.02 < metrics["pg_clipfrac"] < 1


ALONE_IN_ROW = Case("allgather bshd", settings=GSPO | TIS | TERMS, without=())


@pytest.mark.megatron
def test_contiguous_padded_rows_hold_one_sample(pool):
    """The host finds a sample's rows by the lengths before it, without their padding."""
    cases = [replace(ALONE_IN_ROW, size=size) for size in (2, 1)]
    answers = pool.run(run_cases, {}, cases, world_size=2, context_parallel_size=2)
    for refused, _ in answers:
        assert "--allgather-cp with --qkv-format bshd and 2 samples" in refused and "--micro-batch-size 1" in refused
    assert_is_the_dense_step("one sample a row", cases[1], [found for _, found in answers], 1, 2)


# The reducer by hand

MODES = {
    "sample_mean": {"loss_aggregation": "sample_mean"},
    "constant": {"loss_aggregation": "constant", "loss_aggregation_divisor": 40960.0},
    "token_mean": {"loss_aggregation": "token_mean", "calculate_per_token_loss": True},
}
# Total length, mask of the response: tool tokens in the middle, FB-10; one response of one token, a long prompt.
RESPONSES = [(9, [1, 1, 0, 0, 1]), (12, [0, 1, 1, 1, 1, 1, 1, 1, 1]), (31, [1]), (16, [1] * 15)]
FULLY_MASKED = (8, [0, 0, 0])


def call_as_hosts(settings: dict, responses):
    """miles and slime: positional, and `calculate_per_token_loss` is the fourth."""
    set_global_args(Namespace(**settings))
    masks = [torch.tensor(mask, dtype=torch.int32) for _, mask in responses]
    lengths = [total for total, _ in responses], [len(mask) for _, mask in responses]
    return get_pg_loss_reducer(*lengths, masks, settings.get("calculate_per_token_loss", False))


def test_three_samples_by_hand():
    """S = (1 + 2, 4, 0); m = (2, 1, 0): sample_mean 3/2 + 4/1 + 0, constant 7/4, token_mean 7."""
    responses = [(5, [1, 0, 1]), (3, [1]), FULLY_MASKED]
    x = torch.tensor([1.0, 9.0, 2.0, 4.0, 9.0, 9.0, 9.0])
    assert call_as_hosts(MODES["sample_mean"], responses)(x).item() == 5.5
    assert call_as_hosts(MODES["constant"] | {"loss_aggregation_divisor": 4}, responses)(x).item() == 1.75
    assert call_as_hosts(MODES["token_mean"], responses[:2])(x[:4]).item() == 7.0


def refuse_bshd(rank: int) -> str:
    return error_of(lambda: call_as_hosts(MODES["sample_mean"] | {"qkv_format": "bshd"}, RESPONSES))


@pytest.mark.megatron
def test_padded_rows_under_context_parallelism_are_refused_by_the_group_itself(pool):
    """FB-26: also where the arguments do not say cp. Slicing packed chunks out of padded rows takes the wrong tokens."""
    for message in pool.run(refuse_bshd, world_size=2, context_parallel_size=2):
        assert message.startswith("ConfigError: --qkv-format bshd with --context-parallel-size 2")


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("mode", MODES)
def test_a_masked_value_may_be_anything(mode, junk):
    """FB-56: 0 x NaN is NaN, and the gradient of a product by NaN weights is too: slime does not zero masked entries."""
    mask = torch.tensor([is_set for _, mask in RESPONSES for is_set in mask], dtype=torch.bool)
    clean = torch.randn(len(mask))
    results, gradients = [], []
    for values in (clean, torch.where(mask, clean, junk)):
        x = values.clone().requires_grad_()
        result = call_as_hosts(MODES[mode], RESPONSES)(x)
        result.backward()
        results.append(result.detach())
        gradients.append(x.grad)
    assert torch.equal(*results) and torch.equal(*gradients)
    assert (gradients[0][~mask] == 0).all() and (gradients[0][mask] != 0).all()


NOTHING = [("sample_mean", []), ("token_mean", []), ("sample_mean", [FULLY_MASKED] * 2), ("constant", [FULLY_MASKED] * 2)]


@pytest.mark.parametrize(("mode", "responses"), NOTHING)
def test_nothing_to_sum_gives_a_zero_in_the_graph(mode, responses):
    """A Python 0 has no clone, a detached 0 leaves this rank out of the backward's collectives; never NaN."""
    x = torch.full((sum(len(mask) for _, mask in responses),), math.nan, requires_grad=True)
    result = call_as_hosts(MODES[mode], responses)(x)
    assert result.dim() == 0 and result.item() == 0.0 and result.requires_grad
    result.clone().backward()
    assert torch.equal(x.grad, torch.zeros_like(x))


# test_launch has the rules of a launch; these show that the reducer asks for them.
NO_REDUCER = {
    "dropped flag": ({}, RESPONSES, "loss_aggregation is missing from args.*megatron_rl.hosts.launch"),
    "FB-09 a phantom token": (
        *(MODES["token_mean"], [RESPONSES[0], FULLY_MASKED]),
        "samples .1. of the micro-batch are fully masked.*counts one token for each.*reward_post_process",
    ),
}


@pytest.mark.parametrize(("settings", "responses", "says"), NO_REDUCER.values(), ids=NO_REDUCER)
def test_a_launch_of_a_wrong_scale_never_gets_a_reducer(settings, responses, says):
    with pytest.raises((ConfigError, DataError), match=says):
        call_as_hosts(settings, responses)


def test_arguments_that_are_not_those_of_the_call_never_give_a_reducer():
    """FB-15: the call says what the host does with the result, and a flag may be changed after parsing."""
    with pytest.raises(ConfigError, match="call megatron.training.global_vars.set_args.args. before the first step"):
        get_pg_loss_reducer([5], [3], [torch.ones(3)])
    set_global_args(Namespace(**MODES["token_mean"]))
    with pytest.raises(ConfigError, match="calculate_per_token_loss=False and the arguments say True.*leave both alone"):
        get_pg_loss_reducer([5], [3], [torch.ones(3)], False)


def test_a_loss_of_the_wrong_length_is_refused_with_both_numbers():
    """[1] would broadcast, and anything else fail far from its cause."""
    reducer = call_as_hosts(MODES["sample_mean"], [(5, [1, 0, 1])])
    for values in (torch.ones(0), torch.ones(4), torch.ones(1, 3)):
        shape = re.escape(str(tuple(values.shape)))
        with pytest.raises(DataError, match=rf"shape {shape} and this rank's responses hold 3 tokens .cp rank 0 of 1"):
            reducer(values)
