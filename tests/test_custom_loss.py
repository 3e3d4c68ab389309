"""hooks.custom_loss on every layout of the hosts: parts of ranks and micro-batches make the dense loss; what it refuses by name."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from helpers import counted_collectives, error_of, pool_of
from host_loss_cases import (
    CONSTANT,
    GSPO,
    ICEPOP,
    KEYS,
    MASKED,
    OPSM,
    PER_TOKEN,
    REPLAY,
    REWARD,
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
    run_part,
)

from megatron_rl.errors import ConfigError, DataError
from megatron_rl.hosts import loss
from megatron_rl.hosts.checks import check_launch
from megatron_rl.hosts.loss import custom_loss
from megatron_rl.layout.groups import resolve_groups
from megatron_rl.metrics.policy import STATISTICS
from megatron_rl.policy_loss import policy_loss as front_door

UNBIASED, ENTROPY = {"use_unbiased_kl": True}, {"entropy_coef": 0.2}
CISPO_OPEN = {"advantage_estimator": "cispo", "eps_clip": 4.0}
MASK = {
    "importance_correction": "mask",
    "importance_correction_level": "sequence_mean",
    "importance_correction_low": 0.9,
    "importance_correction_high": 1.2,
}
SKIPPED = {"skip_old_log_probs": True, "custom_megatron_init_path": "megatron_rl.hooks.custom_megatron_init"}
SEGMENTS = [0, 1, 2, 2, 1, 3]
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
    "prompt_mean with the reward companion": Case(settings=REWARD, rollouts=SEGMENTS),
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
# Our names in miles' order; slime has neither ess_ratio nor train_rollout_kl.
ALL_KEYS = (
    "loss pg_loss entropy_loss pg_clipfrac ppo_kl ess_ratio train_rollout_logprob_abs_diff train_rollout_kl kl_loss ois tis "
    "tis_clipfrac tis_abs opsm_clipfrac"
).split()


def run_on_rank(rank: int, size: int, names: list[str]) -> dict:
    groups = resolve_groups()
    place = (groups.cp.rank(), groups.cp.size(), groups.dp.rank(), groups.dp.size(), groups.tp.rank(), groups.tp.size())
    return {name: run_part(CASES[name], size, *place) for name in names}


def assert_is_the_dense_loss(case: Case, parts: list, tp_size: int = 1) -> None:
    """The host's outer arithmetic: the sum over ranks and micro-batches, divided by the step's rollouts or tokens."""
    want_loss, want_gradients, want_metrics = oracle(case)
    tokens = sum(sum(mask) for _, _, mask in case.shapes)
    divisor = tokens if case.args().calculate_per_token_loss else case.num_rollouts
    loss = sum(part[0] for part in parts) / divisor / tp_size
    torch.testing.assert_close(loss, float(want_loss), rtol=1e-6, atol=1e-7)
    for number, want in enumerate(want_gradients):
        torch.testing.assert_close(sum(part[1][number] for part in parts) / divisor, want, rtol=1e-6, atol=1e-7)
    keys = {tuple(of_one) for part in parts for of_one in part[3]}
    assert len(keys) == 1, f"keys differ between ranks or micro-batches: {keys}"
    for name in keys.pop():
        if name == "entropy_loss" and case.host == "miles" and not case.settings.get("entropy_coef"):
            want_metrics[name] = 0.0  # as miles reports what it does not compute
        got = sum(part[2][name] for part in parts) / divisor / tp_size
        torch.testing.assert_close(got, want_metrics[name], rtol=2e-6, atol=2e-7, msg=lambda text, name=name: f"{name}: {text}")


# Each case with one size of micro-batches, in turn.
@pytest.mark.parametrize(("name", "size"), [(name, (2, 1, 6)[number % 3]) for number, name in enumerate(CASES)])
def test_micro_batches_add_up_to_the_dense_loss(name, size):
    """FB-56: everything masked is NaN, inf or 1e30 here, and half of the rows are NaN logits."""
    assert_is_the_dense_loss(CASES[name], [run_part(CASES[name], size)])


@pytest.mark.parametrize("policy_loss", ["gmpo", "gspo_token", "dppo_tv", "topr"])
def test_pg_clipfrac_is_what_the_loss_itself_counts(policy_loss, monkeypatch):
    """A ratio of the sample, a clip that is none of the ratio's, a ratio to the sampler: no formula of the hosts fits them all."""
    counted = []

    def with_statistics(*operands, **options):
        output = front_door(*operands, **options | {"metrics": "basic"})
        counted.append(dict(zip(STATISTICS, output.metrics.values.tolist(), strict=True))["clipped_ratio_fraction"])
        return output

    monkeypatch.setattr("megatron_rl.hosts.loss.policy_loss", with_statistics)
    case = Case(settings={"policy_loss": policy_loss, "eps_clip": None, "eps_clip_high": None}, without=())
    _, _, metrics, _ = run_part(case, 2)
    assert metrics["pg_clipfrac"] == pytest.approx(sum(counted), rel=1e-6)  # both are float32 sums of 0 and 1 / m_i
    assert sum(counted) > 0.1


CORRECTED = [name for name, case in CASES.items() if set(case.settings) & {"use_tis", "use_opsm", "importance_correction"}]


@pytest.mark.parametrize("name", CORRECTED)
def test_a_correction_of_the_cases_acts_on_some_tokens_and_not_on_all(name):
    """A case whose bounds hold every ratio would agree with a loss that corrects nothing."""
    settings, metrics = CASES[name].settings, oracle(CASES[name])[2]
    if "use_opsm" in settings:
        assert 0 < metrics["opsm_clipfrac"] < 0.6
    if set(settings) & {"use_tis", "importance_correction"}:
        assert 0 < metrics["tis_clipfrac"] < 0.9


pool = pool_of(4)


@pytest.mark.slow
@pytest.mark.megatron
@pytest.mark.parametrize(
    ("world_size", "size", "layout", "which"),
    [
        # Each case on one of the first three layouts, in turn.
        pytest.param(2, 3, {"context_parallel_size": 2}, slice(0, None, 3), id="cp 2"),
        pytest.param(4, 2, {"context_parallel_size": 4}, slice(1, None, 3), id="cp 4"),
        pytest.param(4, 6, {"context_parallel_size": 2}, slice(2, None, 3), id="cp 2 x dp 2"),
        pytest.param(4, 6, {"context_parallel_size": 2, "tensor_model_parallel_size": 2}, slice(0, None, 4), id="cp 2 x tp 2"),
    ],
)
def test_ranks_add_up_to_the_dense_loss(pool, world_size, size, layout, which):
    """FB-26, FB-24, FB-25, FB-11: thd, bshd and allgather rows; a rank without tokens takes part like any other."""
    names = list(CASES)[which]
    if "tensor_model_parallel_size" in layout:  # sets on both shards and on one, of one id and of all
        names = list(dict.fromkeys([*names, *(name for name in CASES if name.startswith("kept ids"))]))
    answers = pool.run(run_on_rank, size, names, world_size=world_size, **layout)
    for name in names:
        assert_is_the_dense_loss(CASES[name], [answer[name] for answer in answers], layout.get("tensor_model_parallel_size", 1))


ALONE_IN_ROW = Case("allgather bshd", settings=GSPO | TIS | TERMS, without=())


def count_and_refuse(rank: int):
    """Collectives of a forward and of its backward, and the errors that only cp > 1 can raise."""
    cp = resolve_groups().cp

    def counted(case: Case):
        with counted_collectives() as forward:
            loss, _, _ = one(case, cp_rank=cp.rank(), cp_size=cp.size())
        with counted_collectives() as backward:
            loss.backward()
        return [(name, shape) for name, shape, _ in forward], len(backward)

    counts = {
        "gspo": counted(Case(settings=GSPO)),
        "gspo without metrics": counted(Case(settings=GSPO | {"policy_metrics": "none"})),
        "grpo slime": counted(Case(host="slime")),
    }
    place = (cp.rank(), cp.size())
    return counts, error_of(lambda: run_part(ALONE_IN_ROW, 2, *place)), run_part(ALONE_IN_ROW, 1, *place)


@pytest.mark.megatron
def test_gspo_sums_one_row_a_sample_over_context_ranks(pool):
    """FB-27: six samples, one all-reduce of [6, k] for the loss, one more for the metrics, none in backward."""
    answers = pool.run(count_and_refuse, world_size=2, context_parallel_size=2)
    for counts, refusal, _ in answers:
        assert counts["gspo"] == ([("all_reduce", (6, 5)), ("all_reduce", (6,))], 0)
        assert counts["gspo without metrics"] == ([("all_reduce", (6, 5))], 0)
        assert counts["grpo slime"] == ([("all_reduce", (6, 2))], 0)
        assert "--allgather-cp with --qkv-format bshd and 2 samples" in refusal and "--micro-batch-size 1" in refusal
    assert_is_the_dense_loss(ALONE_IN_ROW, [answer[2] for answer in answers])


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


@pytest.mark.parametrize("shapes", [SHAPES, [MASKED, MASKED]], ids=["normal", "all masked"])
def test_metric_names_are_the_hosts_in_their_order(shapes):
    everything = Case(settings=TIS | OPSM | TERMS, shapes=shapes, without=())
    assert list(one(everything)[1]) == ALL_KEYS
    slime = Case(host="slime", settings=TIS | OPSM | TERMS, shapes=shapes, without=())
    assert list(one(slime)[1]) == [name for name in ALL_KEYS if name not in ("ess_ratio", "train_rollout_kl")]
    assert list(one(Case(shapes=shapes), policy_metrics="none")[1]) == ["loss", "pg_loss", "entropy_loss"]


def test_entropy_is_reported_where_the_host_reports_it():
    """The value is the same with and without a coefficient; miles reports 0 for what it leaves out."""
    want = oracle(Case(host="slime"))[2]["entropy_loss"] * 6
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
    "FB-11 companion without counts": (Case(settings=REWARD), without("rollout_mask_sums"), "no 'rollout_mask_sums'"),
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
