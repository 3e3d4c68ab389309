"""What hooks.custom_loss refuses, by name: settings that it would not honour, keys that are absent, data that would train wrong."""

from __future__ import annotations

import math

import pytest
import torch
from host_loss_cases import SHAPES, VOCAB_SIZE, Case, host_batch, host_logits
from host_loss_runs import CONSTANT, GSPO, PER_TOKEN, REWARD, TERMS, TIS, never, one

from megatron_rl.errors import ConfigError, DataError
from megatron_rl.hosts import step_guard
from megatron_rl.hosts.custom_loss import custom_loss, stop_on_nonfinite

REFUSED = {
    "FB-96 OPSM": ({"use_opsm": True}, "--use-opsm"),
    "mismatch metrics": ({"get_mismatch_metrics": True}, "--get-mismatch-metrics is not implemented"),
    "custom TIS": ({"use_tis": True, "custom_tis_function_path": "a.b"}, "--custom-tis-function-path a.b is not implemented"),
    "unbiased KL": ({"use_kl_loss": True, "use_unbiased_kl": True, "kl_loss_type": "k3"}, "--use-unbiased-kl"),
    "FB-93 the hosts' default KL type": ({"use_kl_loss": True, "kl_loss_type": None}, "--kl-loss-type k1"),
    "true on policy": ({"true_on_policy_mode": True}, "--true-on-policy-mode"),
    "cispo": ({"advantage_estimator": "cispo"}, "--advantage-estimator cispo has no loss"),
    "FB-02 constant without divisor": ({"loss_aggregation": "constant"}, "loss-aggregation-divisor"),
    "FB-13 constant per token": (CONSTANT | {"calculate_per_token_loss": True}, "calculate.per.token.loss"),
    "clip set twice": ({"clip_ratio_low": 0.3}, "--clip-ratio-low 0.3 and --eps-clip 0.1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_would_not_be_honoured_are_refused(name):
    settings, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        one(Case(shapes=SHAPES, without=()), **settings)


@pytest.mark.parametrize("host", ["miles", "slime"])
@pytest.mark.parametrize(("option", "value"), [("rollout_top_p", 0.9), ("rollout_top_k", 20)])
def test_a_truncated_sampling_support_is_refused(host, option, value):
    """FB-39: log-probabilities of the support that was sampled from are others than ours, of the whole vocabulary."""
    with pytest.raises(ConfigError, match=f"--{option.replace('_', '-')} {value} .*is not implemented"):
        one(Case(host=host), **{option: value})
    one(Case(host=host), rollout_top_p=1.0, rollout_top_k=-1)
    one(Case(host=host), rollout_top_k=0)


@pytest.mark.parametrize("key", ["rollout_top_p_token_ids", "rollout_sampling_mask_ids"])
def test_a_batch_that_brings_its_sampling_support_is_refused(key):
    """Whatever the arguments say: a sample may be sampled by settings of its own."""
    with pytest.raises(DataError, match=f"the host's batch has '{key}'.*the whole vocabulary"):
        one(Case(), lambda batch, logits: batch.update({key: [[1, 2]]}))


def test_a_missing_flag_is_an_error_and_never_a_default():
    """FB-70: slime drops unknown flags."""
    case = Case()
    args, samples = case.args(), case.samples()
    del args.loss_aggregation
    logits = host_logits(case, samples, samples, [sample.logits for sample in samples], 0, 1)
    with pytest.raises(ConfigError, match="loss_aggregation is missing"):
        custom_loss(args, host_batch(case, samples, samples, 0, 1), logits, never)


def without(key):
    return lambda batch, logits: batch.update({key: None})


def shorter(key):
    return lambda batch, logits: batch.update({key: [batch[key][0][:-1], *batch[key][1:]]})


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


BAD_DATA = {
    **{
        f"FB-02 no {key}": (Case(without=()), without(key), {}, f"no '{key}'")
        for key in ("unconcat_tokens", "total_lengths", "response_lengths", "loss_masks", "advantages", "log_probs")
    },
    "FB-02 no max_seq_lens": (Case("bshd"), without("max_seq_lens"), {}, "no 'max_seq_lens'"),
    "FB-02 no ref_log_probs": (Case(settings=TERMS), without("ref_log_probs"), {}, "no 'ref_log_probs'"),
    "FB-02 TIS, no rollout_log_probs": (Case(settings=TIS), None, {}, "no 'rollout_log_probs'"),
    "FB-02 TIS, no log_probs": (Case(host="slime", settings=TIS, without=("log_probs",)), None, {}, "no 'log_probs'"),
    "FB-02 rollout log-probs unset": (Case(settings={"use_rollout_logprobs": True}), None, {}, "no 'rollout_log_probs'"),
    "FB-11 companion without counts": (Case(settings=REWARD), without("rollout_mask_sums"), {}, "no 'rollout_mask_sums'"),
    "FB-61 short mask": (Case(), shorter("loss_masks"), {}, r"loss_masks\[0\] .* \(4,\), expected \[5\]"),
    "FB-61 short tokens": (Case(), shorter("unconcat_tokens"), {}, r"unconcat_tokens\[0\] .* \(8,\), expected \[9\]"),
    "FB-61 short log_probs": (Case(), shorter("log_probs"), {}, r"log_probs\[0\] .* \(4,\): it must be \[5\]"),
    "FB-61 too few lists": (Case(), lambda b, _: b["advantages"].pop(), {}, "5 advantages for 6 total_lengths"),
    "FB-61 too few masks": (Case(), lambda b, _: b["loss_masks"].pop(), {}, "5 loss_masks for 6 total_lengths"),
    "wrong rollout sums": (Case(), lambda b, _: b["rollout_mask_sums"].pop(), {}, r"rollout_mask_sums .* \(5,\), expected \[6\]"),
    "FB-40 flat logits": (Case(), logits_like(75), {}, "logits must be"),
    "too few rows": (Case(), logits_like(1, 71), {}, "need 1 x 72 rows or more"),
    "FB-26 bshd rows of another length": (Case("bshd"), logits_like(6, 25), {}, "need 6 x 24 rows"),
    "FB-26 thd logits for bshd": (Case("bshd"), logits_like(1, 144), {}, "need 6 x 24 rows"),
    "FB-09 phantom token": (Case(settings=PER_TOKEN), None, {}, r"samples \[3\] .* fully masked.* counts one token"),
    "FB-58 NaN old": (Case(), poison("log_probs", math.nan), {}, "document 0 .* old_log_probs"),
    "FB-58 inf advantage": (Case(), poison("advantages", math.inf), {}, "document 0 .* advantages"),
    "FB-58 -inf rollout log-prob": (
        Case(settings=TIS, without=()),
        poison("rollout_log_probs", -math.inf),
        {},
        "document 0 .* importance_weights",
    ),
    "FB-58 NaN logits": (Case(), lambda b, logits: logits * math.nan, {}, "log_probs"),
    "FB-68 advantages that vary in a sample": (Case(settings=GSPO), vary, {}, "advantages vary inside document 0"),
}


@pytest.mark.parametrize("name", BAD_DATA)
def test_bad_data_is_refused_by_name(name):
    case, change, settings, message = BAD_DATA[name]
    with pytest.raises(DataError, match=message):
        one(case, None if change is None else lambda batch, logits: _only_tensors(change(batch, logits)), **settings)


def _only_tensors(result):
    """A change of the batch returns something of no use here: only logits count."""
    return result if isinstance(result, torch.Tensor) and result.dim() > 1 and result.shape[-1] == VOCAB_SIZE else None


def test_an_armed_guard_takes_the_count_and_nobody_looks(monkeypatch):
    """FB-58 on CUDA: with before_train_step in place the count goes there; without it each micro-batch looks for itself."""
    recorded = []
    monkeypatch.setattr(step_guard, "record_nonfinite", recorded.append)
    monkeypatch.setattr(step_guard, "is_armed", lambda: True)
    stop_on_nonfinite(torch.tensor([0, 3, 1], dtype=torch.int32))
    assert [int(count) for count in recorded] == [4]
    monkeypatch.setattr(step_guard, "is_armed", lambda: False)
    stop_on_nonfinite(torch.zeros(3, dtype=torch.int32))
    with pytest.raises(DataError, match=r"samples \[1, 2\] of the micro-batch have 4 unmasked tokens"):
        stop_on_nonfinite(torch.tensor([0, 3, 1], dtype=torch.int32))
    assert len(recorded) == 1
