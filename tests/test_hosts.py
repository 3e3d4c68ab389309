"""Our loss and our reducer inside miles and slime: each layout of a step has loss, gradient and metrics of the dense float64 step.

The emulated hosts run always, real checkouts with MILES_ROOT=... SLIME_ROOT=... pytest -m host --require host. Both load our hooks
by their own load_function, from samples to Megatron's gradient; neither scaling nor slicing is done by hand here. Then what
hooks.custom_loss communicates, reports, and refuses by name.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from helpers import counted_collectives, pool_of
from host_emulator import StepResult, run_cases
from host_harness import roots_by_environment
from host_steps import (
    AGENT,
    CONSTANT,
    GSPO,
    ICEPOP,
    KEYS,
    MASKED,
    OPSM,
    PER_TOKEN,
    REDUCED_BY,
    REPLAY,
    REWARD,
    SEGMENTS,
    SHAPES,
    TERMS,
    TIS,
    VOCAB_SIZE,
    Case,
    host_batch,
    host_logits,
    never,
    one,
    oracle,
)

from megatron_rl.errors import ConfigError, DataError
from megatron_rl.hosts import loss
from megatron_rl.hosts.checks import check_launch
from megatron_rl.hosts.loss import custom_loss
from megatron_rl.layout.groups import resolve_groups
from megatron_rl.metrics.policy import STATISTICS
from megatron_rl.policy_loss import policy_loss as front_door
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
SKIPPED = {"skip_old_log_probs": True, "custom_megatron_init_path": "megatron_rl.hooks.custom_megatron_init"}
CASES = {
    "grpo thd": Case(),
    "FB-27 gspo thd": Case(settings=GSPO),
    "FB-26 grpo bshd": Case("bshd"),
    "FB-26 gspo bshd with every term": Case("bshd", settings=GSPO | TIS | TERMS, without=()),
    "FB-24 grpo allgather with every term": Case("allgather", settings=TIS | TERMS, without=()),
    "FB-24 gspo allgather": Case("allgather", "slime", settings=GSPO, without=()),
    "FB-65 as many rows as samples": Case("allgather", shapes=[(2, 1, [1]), (3, 2, [1, 1]), (5, 2, [0, 1])]),
    "constant with every term": Case(settings=CONSTANT | TIS | TERMS, without=()),
    "token_mean, host per token": Case(settings=PER_TOKEN | TERMS, shapes=SHAPES),
    "token_mean gspo, host per token": Case(host="slime", settings=PER_TOKEN | GSPO | TIS, shapes=SHAPES, without=()),
    "FB-11 segments of one rollout share its weight": Case(settings=TERMS, rollouts=SEGMENTS),
    "FB-11 segments, constant, slime": Case(host="slime", settings=CONSTANT, rollouts=SEGMENTS),
    "rollout log-probabilities": Case(host="slime", settings={"use_rollout_logprobs": True}, without=("log_probs",)),
    "rollout log-probabilities, miles": Case(settings={"use_rollout_logprobs": True}, without=()),
    "FB-66 slime reuses the current log-probabilities": Case(host="slime", settings=GSPO | TERMS, without=("log_probs",)),
    "FB-66 miles reuses them": Case(settings={"skip_actor_forward_only": True}, without=("log_probs",)),
    "FB-66 our own flag, miles": Case(settings=GSPO | TERMS | SKIPPED, without=("log_probs",)),
    "FB-66 our own flag, slime, per token": Case(
        "thd", "slime", settings=PER_TOKEN | SKIPPED, shapes=SHAPES, without=("log_probs",)
    ),
    "TIS against the policy itself, our own flag": Case(settings=TIS | OPSM | SKIPPED, without=("log_probs",)),
    "TIS against the policy itself, slime without log_probs": Case(host="slime", settings=TIS, without=("log_probs",)),
    "icepop, a function of miles": Case(settings=ICEPOP["miles"] | TERMS, without=()),
    "icepop, a function of slime, gspo": Case("allgather", "slime", settings=ICEPOP["slime"] | GSPO, without=()),
    "FB-96 OPSM reads the sampler's log-probabilities": Case(settings=OPSM | TERMS, without=()),
    "FB-96 OPSM of a ratio to the sampler": Case(settings=OPSM | {"use_rollout_logprobs": True}, without=()),
    "FB-96 OPSM beside icepop, gspo, per token": Case(
        settings=OPSM | ICEPOP["miles"] | GSPO | PER_TOKEN, shapes=SHAPES, without=()
    ),
    "FB-93 k1, the hosts' default, in a loss": Case(settings=TERMS | {"kl_loss_type": "k1"}),
    "k2": Case(host="slime", settings=TERMS | {"kl_loss_type": "k2"}),
    "unbiased KL has the token's ratio under gspo too": Case(settings=TERMS | UNBIASED | GSPO),
    "unbiased KL beside TIS, which does not weigh it": Case(settings=TIS | TERMS | UNBIASED, without=()),
    "low_var_kl beyond the hosts' clamp": Case(settings=TERMS, ref_noise=3.5),
    "a reported KL of the host's kind, at coefficient 0": Case(settings=TERMS | {"kl_loss_coef": 0.0, "kl_loss_type": "k2"}),
    "cispo without a lower bound": Case(host="slime", settings=CISPO_OPEN | ICEPOP["slime"], without=()),
    "our own flags, a mask by the sample's ratio": Case(settings=MASK | CONSTANT, without=()),
    "FB-25 one-token responses, ranks without any": Case(shapes=[SHAPES[1], MASKED, SHAPES[1]]),
}
CASES |= {
    "kept ids": Case(settings=REPLAY["miles"] | ENTROPY),
    "kept ids, slime": Case(host="slime", settings=REPLAY["slime"] | TERMS, without=()),
    "kept ids bshd, gspo, TIS and OPSM": Case("bshd", settings=REPLAY["miles"] | GSPO | TIS | OPSM | ENTROPY, without=()),
    "kept ids allgather, slime, TIS": Case("allgather", "slime", settings=REPLAY["slime"] | TIS, without=()),
    "kept ids allgather, constant": Case("allgather", settings=REPLAY["miles"] | ENTROPY | CONSTANT),
    "kept ids, slime's reuse, per token": Case(
        host="slime", settings=REPLAY["slime"] | PER_TOKEN | UNBIASED | TERMS, shapes=SHAPES, without=("log_probs",)
    ),
    "kept ids, a ratio to the sampler": Case(settings=REPLAY["miles"] | {"use_rollout_logprobs": True}, without=()),
    "kept ids, a reported KL": Case(host="slime", settings=REPLAY["slime"] | TERMS | {"kl_loss_coef": 0.0, "kl_loss_type": "k2"}),
    "kept ids, ranks without any": Case(settings=REPLAY["miles"], shapes=[SHAPES[1], MASKED, SHAPES[1]]),
}
CASES |= {
    "dual clip": Case(settings={"eps_clip_c": 1.3}),
    "dual clip, gspo": Case(host="slime", settings=GSPO | {"eps_clip_c": 1.05}),
}
# Who reduces, with the weights that our hook puts into rewards or without. The host's reducer and our loss divide by the tokens of
# a sample's rollout; our reducer sees no rollouts.
WEIGHTED = {
    f"{mode}, {route}, {host}": Case(host=host, settings=REDUCED_BY[route] | REWARD | aggregation, size=size)
    for host, size in (("miles", 1), ("slime", 2))
    for route in REDUCED_BY
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
# Relative to the largest number, float32 against float64. Megatron's fused cross-entropy rounds its backward to bf16.
EXACT, FUSED = 1e-6, 2e-2
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
    """The number of samples of each data-parallel rank."""
    return [len(range(rank, len(case.shapes), dp)) for rank in range(dp)]


def reports_entropy(case: Case) -> bool:
    """miles says 0 of what it does not compute."""
    return case.host == "slime" or bool(case.settings.get("entropy_coef"))


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
    by_rank = ranks.run(run_cases, roots, [*cases.values()], tolerance != FUSED, world_size=dp * cp * tp, **layout)
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


@pytest.mark.host
@pytest.mark.megatron
def test_a_checkout_trains_the_dense_step_with_the_cross_entropy_it_comes_with(checkouts):
    """Catches an exact cross-entropy that hides what a host does with its own."""
    cases = {name: CASES[name] for host in REPLAY for name in (f"constant, reducer, {host}", f"prompt_mean, reducer, {host}")}
    assert_all_are_the_dense_step((checkouts, ROOTS), cases, 2, 2, tolerance=FUSED)


OF_TRITON = Case(settings=CONSTANT | {"policy_loss_backend": "triton"}, size=3)
# The gradient is written over the logits, but for the last two, which read them again.
IN_TRITON = {
    "constant": OF_TRITON,
    "per token": replace(OF_TRITON, host="slime", settings=OF_TRITON.settings | PER_TOKEN, shapes=SHAPES, size=1),
    "gspo bshd": replace(OF_TRITON, layout="bshd", settings=OF_TRITON.settings | GSPO, size=0),
    "recomputed": replace(OF_TRITON, settings=OF_TRITON.settings | {"recompute_loss_function": True}, size=0),
    "allgather": replace(OF_TRITON, host="slime", layout="allgather"),
}


@pytest.mark.kernel
@pytest.mark.interpreter
@pytest.mark.megatron
def test_our_loss_in_triton_trains_the_dense_step(hosts):
    """The host's factor is not known to the loss: a first micro-batch that assumes 1 has the others' gradient."""
    pytest.importorskip("triton")
    # A kernel's exponentials are off by 2^-22.
    assert_all_are_the_dense_step(hosts, IN_TRITON, 2, 2, tolerance=2 * EXACT)


@pytest.mark.parametrize("policy_loss", ["gmpo", "gspo_token", "dppo_tv", "topr"])
def test_pg_clipfrac_is_what_the_loss_itself_counts(policy_loss, monkeypatch):
    """A ratio of the sample, a clip that is none of the ratio's, a ratio to the sampler: no formula of the hosts fits them all."""
    counted = []

    def with_statistics(*operands, **options):
        output = front_door(*operands, **options | {"metrics": "basic"})
        counted.append(dict(zip(STATISTICS, output.metrics.values.tolist(), strict=True))["clipped_ratio_fraction"])
        return output

    monkeypatch.setattr("megatron_rl.hosts.loss.policy_loss", with_statistics)
    case = Case(settings={"policy_loss": policy_loss, "eps_clip": None, "eps_clip_high": None}, without=(), size=2)
    (found,) = run_cases(0, {}, [case])
    assert 6 * found.metrics["pg_clipfrac"] == pytest.approx(sum(counted), rel=1e-6)  # both are float32 sums of 0 and 1 / m_i
    assert sum(counted) > 0.1


CORRECTED = [name for name, case in CASES.items() if set(case.settings) & {"use_tis", "use_opsm", "importance_correction"}]


@pytest.mark.parametrize("name", CORRECTED)
def test_a_correction_of_the_cases_acts_on_some_tokens_and_not_on_all(name):
    """A case whose bounds hold every ratio would agree with a loss that corrects nothing."""
    settings, metrics = CASES[name].settings, oracle(CASES[name]).metrics
    if "use_opsm" in settings:
        assert 0 < metrics["opsm_clipfrac"] < 0.6
    if set(settings) & {"use_tis", "importance_correction"}:
        assert 0 < metrics["tis_clipfrac"] < 0.9


ALONE_IN_ROW = Case("allgather bshd", settings=GSPO | TIS | TERMS, without=())


def counted_on_rank(rank: int) -> dict:
    """Collectives of a forward and of its backward."""
    cp = resolve_groups().cp

    def counted(case: Case):
        with counted_collectives() as forward:
            loss, _, _ = one(case, cp_rank=cp.rank(), cp_size=cp.size())
        with counted_collectives() as backward:
            loss.backward()
        return [(name, shape) for name, shape, _ in forward], len(backward)

    return {
        "gspo": counted(Case(settings=GSPO)),
        "gspo without metrics": counted(Case(settings=GSPO | {"policy_metrics": "none"})),
        "grpo slime": counted(Case(host="slime")),
    }


@pytest.mark.megatron
def test_gspo_sums_one_row_a_sample_over_context_ranks(pool):
    """FB-27: six samples, one all-reduce of [6, k] for the loss, one more for the metrics, none in backward."""
    for counts in pool.run(counted_on_rank, world_size=2, context_parallel_size=2):
        assert counts["gspo"] == ([("all_reduce", (6, 5)), ("all_reduce", (6,))], 0)
        assert counts["gspo without metrics"] == ([("all_reduce", (6, 5))], 0)
        assert counts["grpo slime"] == ([("all_reduce", (6, 2))], 0)


@pytest.mark.megatron
def test_contiguous_padded_rows_hold_one_sample(pool):
    """The host finds a sample's rows by the lengths before it, without their padding."""
    cases = [replace(ALONE_IN_ROW, size=size) for size in (2, 1)]
    answers = pool.run(run_cases, {}, cases, world_size=2, context_parallel_size=2)
    for refused, _ in answers:
        assert "--allgather-cp with --qkv-format bshd and 2 samples" in refused and "--micro-batch-size 1" in refused
    assert_is_the_dense_step("one sample a row", cases[1], [found for _, found in answers], 1, 2)


def test_one_process_launches_no_collective():
    with counted_collectives() as calls:
        one(CASES["FB-26 gspo bshd with every term"])[0].backward()
    assert calls == []


def test_running_twice_gives_the_same_and_changes_nothing():
    """--recompute-loss-function runs the loss again; arguments, batch and logits stay as they are."""
    case = CASES["FB-26 gspo bshd with every term"]
    args, samples = case.args(), case.samples()
    logits = host_logits(case, samples, samples, [sample.logits for sample in samples], 0, 1)
    batch = host_batch(case, samples, samples, 0, 1)
    before = copy.deepcopy((args, batch, logits))
    first, second = (custom_loss(args, batch, logits, never) for _ in range(2))
    assert first[0] == second[0] and first[1] == second[1]
    assert repr((args, batch, logits)) == repr(before)


def test_a_launch_is_judged_once(monkeypatch):
    judged = []
    monkeypatch.setattr(loss, "check_launch", lambda *given, **named: judged.append(given) or check_launch(*given, **named))
    case = Case()
    args, samples = case.args(), case.samples()
    logits = host_logits(case, samples, samples, [sample.logits for sample in samples], 0, 1)
    batch = host_batch(case, samples, samples, 0, 1)
    first, same = (custom_loss(args, batch, logits, never)[0] for _ in range(2))
    assert torch.equal(first, same) and len(judged) == 1


def test_reported_loss_does_not_share_memory_with_the_loss():
    """Whoever scales the loss in place leaves the metric alone."""
    loss, metrics, _ = one(Case(), lambda batch, logits: logits.float())
    kept = float(metrics["loss"])
    with torch.no_grad():
        loss.mul_(100)
    assert float(metrics["loss"]) == kept != 0


# Our names in miles' order; slime has neither ess_ratio nor train_rollout_kl.
ALL_KEYS = (
    "loss pg_loss entropy_loss pg_clipfrac ppo_kl ess_ratio train_rollout_logprob_abs_diff train_rollout_kl kl_loss ois tis "
    "tis_clipfrac tis_abs opsm_clipfrac"
).split()


@pytest.mark.parametrize("shapes", [SHAPES, [MASKED, MASKED]], ids=["normal", "all masked"])
def test_metric_names_are_the_hosts_in_their_order(shapes):
    everything = Case(settings=TIS | OPSM | TERMS, shapes=shapes, without=())
    assert list(one(everything)[1]) == ALL_KEYS
    slime = Case(host="slime", settings=TIS | OPSM | TERMS, shapes=shapes, without=())
    assert list(one(slime)[1]) == [name for name in ALL_KEYS if name not in ("ess_ratio", "train_rollout_kl")]
    assert list(one(Case(shapes=shapes), policy_metrics="none")[1]) == ["loss", "pg_loss", "entropy_loss"]


def test_entropy_is_reported_where_the_host_reports_it():
    """The value is the same with and without a coefficient; miles reports 0 for what it leaves out."""
    want = oracle(Case(host="slime")).metrics["entropy_loss"] * 6
    for case in (
        Case(host="slime"),
        Case(settings={"observe_training_entropy": True}),
        Case(settings={"policy_metrics": "with_entropy"}),
        Case(settings={"entropy_coef": 0.1}),
    ):
        torch.testing.assert_close(float(one(case)[1]["entropy_loss"]), want, rtol=1e-6, atol=0)
    assert one(Case())[1]["entropy_loss"] == 0


def test_a_fully_masked_micro_batch_is_a_zero_in_the_graph():
    """FB-55: no NaN, zero gradient, and the backward reaches the logits."""
    loss, metrics, (leaf,) = one(Case(shapes=[MASKED], settings=GSPO | TIS | TERMS, without=()))
    loss.backward()
    assert loss == 0 and all(value == 0 for value in metrics.values())
    assert leaf.grad is not None and not leaf.grad.any()


def test_without_rollout_counts_a_sample_is_its_own_rollout():
    """miles hands None over where its data has no rollouts: then m_i = 6 and 6, -(1 + 3) = -4."""

    def known(batch, logits):
        batch["advantages"] = [torch.full((6,), 1.0), torch.full((6,), 3.0)]
        batch["rollout_mask_sums"] = None

    case = Case(host="slime", shapes=[SHAPES[4], SHAPES[4]], rollouts=[0, 0], without=("log_probs", "rollout_log_probs"))
    torch.testing.assert_close(float(one(case, known)[0].detach()), -4.0, rtol=1e-6, atol=0)


# test_host_rules has every rule of a launch; one of them here shows that our loss asks for all.
REFUSED = {
    "true on policy": ({"true_on_policy_mode": True}, "--true-on-policy-mode"),
    "FB-96 an estimator without a loss": ({"advantage_estimator": "opd"}, "--advantage-estimator opd names no policy loss"),
    "a correction set twice": (TIS | {"importance_correction": "mask"}, "--importance-correction mask and --use-tis tis are the"),
    "an estimator of KL set twice": (TERMS | UNBIASED | {"kl_estimator": "k3"}, "--kl-estimator k3 and --kl-loss-type unbiased"),
    "clip set twice": ({"clip_ratio_low": 0.3}, "--clip-ratio-low 0.3 and --eps-clip 0.1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_would_not_be_honoured_are_refused(name):
    settings, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        one(Case(shapes=SHAPES, without=()), **settings)


@pytest.mark.parametrize("key", ["rollout_top_p_token_ids", "rollout_sampling_mask_ids"])
def test_a_batch_that_brings_its_sampling_support_is_refused(key):
    """Whatever the arguments say: a sample may be sampled by settings of its own."""
    with pytest.raises(DataError, match=f"the host's batch has '{key}'.*the whole vocabulary"):
        one(Case(), lambda batch, logits: batch.update({key: [[1, 2]]}))


def without(key):
    return lambda batch, logits: batch.update({key: None})


def shorter(key):
    return lambda batch, logits: batch.update({key: [batch[key][0][:-1], *batch[key][1:]]})


def fewer(key):
    return lambda batch, logits: batch.update({key: batch[key][:-1]})


def poison(key, value):
    """At response index 2 of sample 0, which is unmasked."""

    def change(batch, logits):
        batch[key][0] = batch[key][0].clone()
        batch[key][0][2] = value

    return change


def logits_like(*shape):
    return lambda batch, logits: torch.zeros(*shape, VOCAB_SIZE, requires_grad=True)


def vary(batch, logits):
    batch["advantages"][0] = torch.arange(5.0)


NEEDS = "no 'rollout_log_probs', .*needs with what compares with the sampler's policy; it has"
# The launch, what is done to the batch, what is said.
BAD_DATA = {
    **{
        f"FB-02 no {key}": (Case(without=()), without(key), f"no '{key}'")
        for key in ("unconcat_tokens", "total_lengths", "response_lengths", "loss_masks", "advantages", "log_probs")
    },
    "FB-02 no max_seq_lens": (Case("bshd"), without("max_seq_lens"), "no 'max_seq_lens'"),
    "FB-02 no ref_log_probs": (Case(settings=TERMS), without("ref_log_probs"), "no 'ref_log_probs'"),
    "FB-02 TIS, no rollout_log_probs": (Case(settings=TIS), None, NEEDS),
    "FB-02 rollout log-probs unset": (Case(settings={"use_rollout_logprobs": True}), None, "no 'rollout_log_probs'"),
    "FB-11 companion without counts": (Case(settings=REWARD | PROMPT_MEAN), without("rollout_mask_sums"), "no 'rollout_mask_sums'"),
    "short log_probs": (Case(), shorter("log_probs"), r"log_probs\[0\] .* \(4,\): it must be \[5\]"),
    "log_probs of a forward that is left out": (Case(settings=SKIPPED, without=()), None, "log_probs, which would be ignored"),
    "too few lists": (Case(), fewer("advantages"), "5 advantages for 6 total_lengths"),
    "wrong rollout sums": (Case(), fewer("rollout_mask_sums"), r"rollout_mask_sums .* \(5,\), expected \[6\]"),
    "FB-40 flat logits": (Case(), logits_like(75), "logits must be"),
    "too few rows": (Case(), logits_like(1, 71), "need 1 x 72 rows or more"),
    "FB-26 bshd rows of another length": (Case("bshd"), logits_like(6, 25), "need 6 x 24 rows"),
    "FB-09 phantom token": (Case(settings=PER_TOKEN), None, r"samples \[3\] .* fully masked.* counts one token"),
    "NaN old": (Case(), poison("log_probs", math.nan), "document 0 .* old_log_probs"),
    "inf advantage": (Case(), poison("advantages", math.inf), "document 0 .* advantages"),
    "NaN logits": (Case(), lambda batch, logits: logits * math.nan, "log_probs"),
    "advantages that vary in a sample": (Case(settings=GSPO), vary, "advantages vary inside document 0"),
}


REPLAYED = Case(settings=REPLAY["miles"])
REPLAYED_BY_SLIME = Case(host="slime", settings=REPLAY["slime"])


def change_sets(case, change):
    """change(ids, offsets) of sample 0, whose tokens 0, 2 and 3 are trained, with sets of 3, 4 and 8 ids; masked ones have none."""

    def changed(batch, logits):
        keys = KEYS[case.host]
        new = change(*(batch[key][0].clone() for key in keys))
        for key, value in zip(keys, new, strict=True):
            batch[key][0] = value

    return changed


def outside(batch, logits):
    """Sample 2 takes the sets of tokens one later."""
    ids, offsets = (batch[key] for key in KEYS["miles"])
    ids[2], offsets[2] = ids[2][3:], torch.tensor([0, 1, 5, 5])


BAD_SETS = {
    "no ids": (REPLAYED, without(KEYS["miles"][0]), f"no '{KEYS['miles'][0]}', which --sampling-support replay needs: this host"),
    "fewer lists": (REPLAYED, fewer(KEYS["miles"][0]), "5 rollout_sampling_mask_ids for 6 samples"),
    "a sample without": (
        *(REPLAYED, change_sets(REPLAYED, lambda ids, offsets: (None, offsets))),
        r"rollout_sampling_mask_ids\[0\] of the host's batch is None: with --sampling-support replay each sample needs",
    ),
    "short offsets": (
        *(REPLAYED, change_sets(REPLAYED, lambda ids, offsets: (ids, offsets[:-1]))),
        r"rollout_sampling_mask_offsets\[0\] .* has 5 offsets, and its response of 5 tokens needs 6",
    ),
    "an empty set": (
        *(REPLAYED, change_sets(REPLAYED, lambda ids, offsets: (ids[3:], (offsets - 3).clamp(min=0)))),
        r"token 0 \(sample 0 of the micro-batch\) is trained and its set is empty",
    ),
    "padding in a set": (
        *(REPLAYED, change_sets(REPLAYED, lambda ids, offsets: (ids.index_fill(0, torch.tensor([2]), -1), offsets))),
        r"token 0 \(sample 0 .*\) has the ids -1, .*: they must be distinct and in \[0, 8\)",
    ),
    "a token outside its set": (REPLAYED, outside, r"token 6 \(sample 2 of the micro-batch\) took the id \d, which is not among"),
    "the sets of other tokens, slime": (
        *(REPLAYED_BY_SLIME, lambda batch, logits: [tokens.add_(1).remainder_(8) for tokens in batch["unconcat_tokens"]] and None),
        "took the id .* which is not among its",
    ),
    "the sets of another host": (
        *(REPLAYED, lambda batch, logits: batch.update({KEYS["slime"][0]: [[1]]})),
        f"has '{KEYS['slime'][0]}': .*the whole vocabulary; sample with",
    ),
    "sets, and no flag": (
        *(Case(), lambda batch, logits: batch.update({KEYS["miles"][0]: [[1]]})),
        "the whole vocabulary; sample with .*, or add --sampling-support replay",
    ),
}
BAD_DATA |= {f"kept ids: {name}": row for name, row in BAD_SETS.items()}


@pytest.mark.parametrize("name", BAD_DATA)
def test_bad_data_is_refused_by_name(name):
    case, change, message = BAD_DATA[name]
    with pytest.raises(DataError, match=message):
        one(case, change)


def test_slime_counts_a_sampled_token_at_the_edge_of_its_set_as_kept():
    """Its sampler and its trainer both do. miles refuses it."""
    whole = one(REPLAYED_BY_SLIME)[0]

    def without_token(batch, logits):
        ids, token = KEYS["slime"][0], batch["unconcat_tokens"][0][4]
        assert batch[ids][0][0] == token
        batch[ids][0], offsets = batch[ids][0][1:], batch[KEYS["slime"][1]][0]
        batch[KEYS["slime"][1]][0] = torch.cat([offsets[:1], offsets[1:] - 1])

    assert one(REPLAYED_BY_SLIME, without_token)[0] == whole
