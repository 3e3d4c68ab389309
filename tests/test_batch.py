"""Micro-batches, padded and packed: which token each row predicts, what each cp rank holds, and what is refused by name.

Then packed bins through the real schedule: one gradient however samples fill them, padding rows nowhere, temperature, refusals.
"""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers import error_of, pool_of
from trainer_cases import (
    CP,
    PP,
    STILL,
    TP,
    VOCABULARY,
    gradients_of,
    ragged_step,
    relative_difference,
    tiny_trainer,
    whole,
    with_shifted_old_log_probs,
)

from megatron_rl.config import PolicyLossConfig
from megatron_rl.count import StepTotals
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.layout.groups import ParallelGroups, resolve_groups
from megatron_rl.layout.sampling_support import SamplingSupport
from megatron_rl.megatron.batch import PolicySample, StepContext, make_packed_batch, make_padded_batch
from megatron_rl.megatron.forward_step import MicrobatchReport
from megatron_rl.megatron.packed_bins import PackedBin, PackedForwardStep, batches_of_step, samples_of_bin

pytestmark = pytest.mark.megatron

CPU = torch.device("cpu")
CONTEXT = StepContext(totals=StepTotals(3, 2, 9), num_microbatches=2)


def rank_of(cp_rank: int, cp_size: int):
    return SimpleNamespace(rank=lambda: cp_rank, size=lambda: cp_size)


def sample_of(number: int, prompt: int, response: int, **others) -> PolicySample:
    """Tokens and log-probabilities that say where they belong: token q of sample n is 100 n + q, its old log-probability -q / 8."""
    total = prompt + response
    values = torch.arange(prompt, total) / 8.0
    return PolicySample(
        **{
            "tokens": 100 * number + torch.arange(total),
            "loss_mask": torch.tensor([t % 3 != 1 for t in range(response)]),
            "advantage": float(number),
            "token_weight": 0.5**number,
            "token_count": sum(t % 3 != 1 for t in range(response)),
            "regularizer_weight": 0.25**number,
            "old_log_probs": -values,
            "ref_log_probs": -2 * values,
            **others,
        }
    )


def padded(samples, *, cp_rank=0, cp_size=1, row_length=16, num_rows=None):
    num_rows = len(samples) if num_rows is None else num_rows
    group = rank_of(cp_rank, cp_size)
    return make_padded_batch(samples, CONTEXT, num_rows=num_rows, row_length=row_length, cp_group=group, device=CPU)


def packed(samples, *, cp_rank=0, cp_size=1, row_length=64):
    return make_packed_batch(samples, CONTEXT, row_length=row_length, cp_group=rank_of(cp_rank, cp_size), device=CPU)


def test_a_row_predicts_each_response_token_at_the_position_before_it():
    """FB-60, by hand: prompt 7 8 9, response 5 6. The logits at position 2 give the 5, those at 3 the 6; nothing gives the 7."""
    of_response = {"loss_mask": [1, 1], "old_log_probs": [-0.5, -0.6], "ref_log_probs": [-1.5, -1.6]}
    given = {name: torch.tensor(values) for name, values in {"tokens": [7, 8, 9, 5, 6], **of_response}.items()}
    for batch in (padded([sample_of(0, 3, 2, **given)], row_length=6), packed([sample_of(0, 3, 2, **given)], row_length=6)):
        assert batch.tokens.tolist() == [[7, 8, 9, 5, 6, 0]]
        assert batch.position_ids[0, :5].tolist() == [0, 1, 2, 3, 4]
        assert batch.labels[:4].tolist() == [8, 9, 5, 6]
        assert batch.loss.loss_mask.tolist() == [False, False, True, True, False, False]
        torch.testing.assert_close(batch.loss.old_log_probs, torch.tensor([0.0, 0.0, -0.5, -0.6, 0.0, 0.0]))
        torch.testing.assert_close(batch.loss.ref_log_probs, torch.tensor([0.0, 0.0, -1.5, -1.6, 0.0, 0.0]))


def test_the_tail_of_a_packed_row_is_a_document_of_its_own_and_no_sample():
    """FB-63: attention must not let padding see a sample's tokens, and the loss must not count it."""
    batch = packed([sample_of(0, 3, 5), sample_of(1, 2, 4)], row_length=20)
    assert batch.packed_seq_params.qkv_format == "thd"
    assert batch.packed_seq_params.cu_seqlens_q.tolist() == batch.packed_seq_params.cu_seqlens_kv.tolist() == [0, 8, 14, 20]
    assert batch.packed_seq_params.max_seqlen_q == 8
    assert batch.loss.cu_seqlens.tolist() == [0, 8, 14]
    assert not batch.loss.loss_mask[14:].any() and batch.position_ids[0, 14:].tolist() == [0, 1, 2, 3, 4, 5]
    full = packed([sample_of(0, 3, 5), sample_of(1, 2, 4)], row_length=14)
    assert full.packed_seq_params.cu_seqlens_q.tolist() == [0, 8, 14]


def test_a_sample_s_numbers_reach_the_loss_in_the_order_of_the_documents():
    """Log-probabilities that no sample has stay None: on-policy is the loss's case, not one of zeros."""
    none = {"old_log_probs": None, "ref_log_probs": None}
    samples = [sample_of(3, 1, 2, **none), sample_of(1, 2, 4, **none)]
    for batch in (padded(samples, num_rows=3), packed(samples)):
        assert batch.loss.advantages.tolist() == [3.0, 1.0]
        assert batch.loss.token_weights.tolist() == [0.125, 0.5]
        assert batch.loss.regularizer_weights.tolist() == [0.25**3, 0.25]
        assert batch.loss.token_counts.tolist() == [1, 3]
        assert batch.context is CONTEXT and batch.loss.old_log_probs is batch.loss.ref_log_probs is None


UNLIKE = r"sample 1: {} has \({},\) values for a response of {}"
SOME = "{} is given for 1 of 2 samples of a micro-batch: all or none"
REFUSED = [
    pytest.param({"tokens": torch.arange(3)}, "sample 1 has 3 tokens, 3 of them response", id="no prompt"),
    pytest.param({"loss_mask": torch.ones(0)}, "sample 1 has 5 tokens, 0 of them response", id="no response"),
    pytest.param({"loss_mask": torch.ones(2)}, UNLIKE.format("old_log_probs", 3, 2), id="short mask"),
    pytest.param({"old_log_probs": torch.ones(5)}, UNLIKE.format("old_log_probs", 5, 3), id="prompt too"),
    pytest.param({"old_log_probs": None}, SOME.format("old_log_probs"), id="some on-policy"),
    pytest.param({"kept_ids": SamplingSupport.from_lists([[1]])}, SOME.format("kept_ids"), id="some from a part of the vocabulary"),
    pytest.param({"teacher_topk_ids": torch.ones(3, 2)}, SOME.format("teacher_topk_ids"), id="some with a teacher"),
]


@pytest.mark.parametrize(("fault", "message"), REFUSED)
def test_a_sample_whose_parts_do_not_fit_is_refused_by_its_number(fault, message):
    """A zip that drops the longer list's tail trains on less than was given, without a word."""
    with pytest.raises(DataError, match=message):
        packed([sample_of(0, 2, 3), sample_of(1, 2, 3, **fault)])


def test_sets_of_another_number_of_tokens_are_refused():
    three, two = (SamplingSupport.from_lists([[1]] * number) for number in (3, 2))
    with pytest.raises(DataError, match="sample 1: kept_ids has 2 sets for a response of 3 tokens"):
        padded([sample_of(0, 2, 3, kept_ids=three), sample_of(1, 2, 3, kept_ids=two)])


@pytest.mark.parametrize("shape", [(3, 1), (2, 2), (3,)], ids=str)
def test_the_ids_of_a_teacher_are_k_for_each_response_token(shape):
    samples = [sample_of(0, 2, 3, teacher_topk_ids=torch.ones(3, 2)), sample_of(1, 2, 3, teacher_topk_ids=torch.ones(shape))]
    message = (
        r"sample 1: teacher_topk_ids is {}, and must be \(3, 2\): a row for each response token, with as many ids as in sample 0"
    )
    with pytest.raises(DataError, match=message.format(re.escape(str(shape)))):
        packed(samples)


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        ([[[0, 1]]], r"sample 0: routes are torch.int64 \(1, 1, 2\), not ids \[num_moe_layers, 2, topk\]"),
        ([[[0, 1], [2, 2]]], "the experts of a token must be different ids of at least 0"),
    ],
)
def test_wrong_routes_are_refused(routes, message):
    with pytest.raises(DataError, match=message):
        padded([sample_of(0, 1, 2, routes=torch.tensor(routes))])


def test_the_staleness_of_a_sample_is_the_step_s_version_less_its_own():
    samples = [sample_of(0, 2, 3, policy_version=7), sample_of(1, 2, 3, policy_version=4)]
    context = replace(CONTEXT, policy_version=9)
    batch = make_padded_batch(samples, context, num_rows=2, row_length=8, cp_group=rank_of(0, 1), device=CPU)
    assert batch.staleness.tolist() == [2, 5]
    with pytest.raises(DataError, match="samples have a policy_version and the step has none"):
        padded(samples)


UNFIT = [
    (padded, {"num_rows": 1}, "2 samples do not fit num_rows=1"),
    (padded, {"row_length": 5}, "sample 1 has 6 tokens, 4 of them response, in a row of 5"),
    (packed, {"row_length": 10}, "2 samples of 11 padded tokens do not fit row_length=10"),
    (packed, {"row_length": 18, "cp_size": 2}, "row_length=18 must be a multiple of 4, twice the context-parallel size"),
]


@pytest.mark.parametrize(("make", "settings", "message"), UNFIT)
def test_what_does_not_fit_the_micro_batch_is_refused(make, settings, message):
    """FB-63: rows that overflow into their neighbours; and lengths that cp ranks cannot cut into equal chunks."""
    with pytest.raises(DataError, match=message):
        make([sample_of(0, 2, 3), sample_of(1, 2, 4)], **settings)


# Packed bins

LENGTH = 80  # of a bin: all samples fit one, also when cp pads each to a multiple of 4
# Two orders of float32 additions of the same numbers; the smallest wrong share of this step, one token of 18, is 5e-2.
TOLERANCE = 1e-5
PADDING = -1  # stands for a row that only pads

pool = pool_of(4)


def pack(samples, rows, prompts, length=LENGTH) -> PackedBin:
    """The samples of these rows side by side, with a gap after each; prompts grows by a None for each padding row."""
    tokens, mask, old = (torch.zeros(1, length, dtype=dtype) for dtype in (torch.int64, torch.float32, torch.float32))
    starts, lengths, indices, advantages, start = [], [], [], [], 0
    for row in rows:
        starts.append(start)
        if row == PADDING:
            indices.append(len(prompts))
            prompts.append(None)
            lengths.append(0)
            advantages.append(0.0)
            continue
        sample = samples[row]
        end, response = start + len(sample.tokens), len(sample.loss_mask)
        tokens[0, start:end] = torch.tensor(sample.tokens)
        mask[0, end - response : end] = torch.tensor(sample.loss_mask)
        if sample.old_log_probs is not None:
            old[0, end - response : end] = torch.tensor(sample.old_log_probs)
        indices.append(row)
        lengths.append(len(sample.tokens))
        advantages.append(sample.advantage)
        start = end + 1
    return PackedBin(
        tokens=tokens,
        loss_mask=mask[:, 1:],
        advantages=torch.tensor(advantages),
        old_log_probs=None if samples[0].old_log_probs is None else old[:, 1:],
        ref_log_probs=None,
        seq_starts=[*starts, start],
        seq_lengths=lengths,
        seq_indices=indices,
    )


def run_schedule(trainer, forward_step, bins):
    """(gradients, the schedule's reports) of what a training loop does between two optimiser steps; the iterator hands out indices,
    as train_rl.py's does."""
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.rerun_state_machine import RerunDataIterator

    trainer.model.zero_grad_buffer()
    trainer.optimizer.zero_grad()
    reports = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=RerunDataIterator(iter(range(len(bins)))),
        model=trainer.model,
        num_microbatches=len(bins),
        seq_length=LENGTH,
        micro_batch_size=1,
        forward_only=False,
    )
    return gradients_of(trainer), reports


def forward_step_of(bins, prompts, config, rollouts=None):
    """rollouts: of each row; None: each row is one."""
    rollouts = rollouts or range(len(prompts))
    given = {"vocab_size": VOCABULARY, "rollout_of_row": lambda: rollouts, "config": config}
    return PackedForwardStep(lambda index: bins[index], lambda: prompts, lambda: len(bins), **given)


def gradients_on_rank(rank, config, fillings, masked_row=None):
    """(the trainer's gradient, that of each filling of bins) on one model. A masked row keeps its prompt and loses its tokens."""
    trainer = tiny_trainer(config, **STILL, packed=True)
    rows = with_shifted_old_log_probs(trainer, [[sample] for sample in ragged_step()], shift=3e-4)
    samples = [row[0] for row in rows]
    if masked_row is not None:
        samples[masked_row] = replace(samples[masked_row], loss_mask=[0] * len(samples[masked_row].loss_mask))
    dp = resolve_groups().dp
    trainer.step([samples[dp.rank() :: dp.size()]])
    answers = [gradients_of(trainer)]
    for filling in fillings:
        prompts = [sample.prompt_id for sample in samples]
        bins = [pack(samples, rows, prompts) for rows in filling][dp.rank() :: dp.size()]
        answers.append(run_schedule(trainer, forward_step_of(bins, prompts, config), bins)[0])
    return answers


FILLINGS = [
    [[0, 1, 2, 3, 4, 5]],
    [[0, 3], [1, 2, 4, 5]],
    [[5, PADDING], [4, 0, 1], [], [3, 2]],
    [[], [PADDING], [1, 0, 2, PADDING, 5], [4, 3]],
]
AGGREGATIONS = {
    "sample_mean": PolicyLossConfig(),
    "prompt_mean": PolicyLossConfig(policy_loss="gspo", loss_aggregation="prompt_mean"),
}


def difference_to_the_trainer(answers, filling=0):
    return relative_difference(whole([answer[filling + 1] for answer in answers]), whole([answer[0] for answer in answers]))


# Ranks, layout, aggregation, how bins are filled, and a masked row.
ROWS = [
    pytest.param(1, {}, "prompt_mean", FILLINGS, None, id="one rank"),
    pytest.param(1, {}, "sample_mean", FILLINGS, 2, id="one rank, a masked sample"),
    pytest.param(4, {TP: 2, CP: 2}, "prompt_mean", FILLINGS[2:3], None, id="FB-28 TP2xCP2"),
    pytest.param(4, {PP: 2}, "prompt_mean", FILLINGS[3:], None, id="FB-25 PP2xDP2: a bin of padding passes the pipeline"),
]


@pytest.mark.parametrize(("world_size", "layout", "aggregation", "fillings", "masked_row"), ROWS)
def test_samples_have_one_gradient_however_bins_are_filled(pool, world_size, layout, aggregation, fillings, masked_row):
    """A mean over bins of token means depends on the packing, and an empty bin counts one token; FB-09: padding rows too. A masked
    sample counts in N: a row is told by its prompt, never by its mask."""
    answers = pool.run(gradients_on_rank, AGGREGATIONS[aggregation], fillings, masked_row, world_size=world_size, **layout)
    for filling in range(len(fillings)):
        assert difference_to_the_trainer(answers, filling) < TOLERANCE


def gradients_of_turns_on_rank(rank, config):
    """(the trainer's gradient of whole rollouts, that of the same as two rows each, that of the rows as rollouts)"""
    trainer = tiny_trainer(config, **STILL, packed=True)
    samples = [row[0] for row in with_shifted_old_log_probs(trainer, [[sample] for sample in ragged_step()], shift=3e-4)]
    dp = resolve_groups().dp
    trainer.step([samples[dp.rank() :: dp.size()]])
    answers, turns = [gradients_of(trainer)], []
    for number, sample in enumerate(samples):
        places = [[(place < 1 + number % 2) == is_first for place in range(len(sample.loss_mask))] for is_first in (True, False)]
        cuts = [[bit * is_own for bit, is_own in zip(sample.loss_mask, own, strict=True)] for own in places]
        turns += [replace(sample, loss_mask=cut) for cut in cuts]
    prompts, order = [turn.prompt_id for turn in turns], [11, 0, 3, 6, 9, 2, 5, 8, 1, 4, 7, 10]
    bins = [pack(turns, order[first : first + 3], prompts) for first in range(0, 12, 3)][dp.rank() :: dp.size()]
    for rollouts in ([row // 2 for row in range(12)], None):
        answers.append(run_schedule(trainer, forward_step_of(bins, prompts, config, rollouts=rollouts), bins)[0])
    return answers


def test_turns_of_a_rollout_in_any_bin_give_the_gradient_of_the_whole_rollout(pool):
    """FB-141"""
    answers = pool.run(gradients_of_turns_on_rank, PolicyLossConfig(), world_size=2)
    assert difference_to_the_trainer(answers) < TOLERANCE
    assert difference_to_the_trainer(answers, 1) > 100 * TOLERANCE  # else the cut would say nothing


def test_rows_that_may_be_turns_of_a_rollout_are_refused():
    with pytest.raises(ConfigError, match="loss_aggregation=sample_mean counts rollouts, and .*give PackedForwardStep"):
        batches_of_step(PolicyLossConfig(), [plain_bin(seq_indices=[0, 1, 2])], ["x", "y", None], ParallelGroups())


def ratios_on_rank(rank, config):
    """(mean ratio with old log-probabilities measured by the trainer, those)."""
    trainer = tiny_trainer(config, packed=True)
    [measured] = trainer.log_probs([ragged_step()])
    samples = [replace(sample, old_log_probs=list(row)) for sample, row in zip(ragged_step(), measured, strict=True)]
    prompts = [sample.prompt_id for sample in samples]
    bins = [pack(samples, rows, prompts) for rows in FILLINGS[2]]
    forward_step = forward_step_of(bins, prompts, config)
    run_schedule(trainer, forward_step, bins)
    return forward_step.metrics()["policy/ratio_new_old"], torch.cat([torch.as_tensor(row) for row in measured])


def test_the_flags_of_the_head_and_the_temperature_act_on_bins_too(pool):
    """FB-69, FB-39: train_rl.py divides no logits. At 0.5 the log-probabilities differ; the old ones are measured alike."""
    cold = PolicyLossConfig(policy_temperature=0.5)
    fused = replace(cold, fused_lm_head_loss=True, max_logits_bytes=512)
    found = [pool.run(ratios_on_rank, config, world_size=1)[0] for config in (fused, cold, PolicyLossConfig())]
    assert [ratio for ratio, _ in found] == pytest.approx([1.0] * 3, abs=1e-6)
    (_, of_fused), (_, of_cold), (_, of_warm) = found
    torch.testing.assert_close(of_fused, of_cold, rtol=0, atol=2e-6)
    assert not torch.allclose(of_cold, of_warm, atol=1e-2)


def plain_bin(**changes) -> PackedBin:
    """By hand: row 4 is 7 8 9 of prompt p with 8 and 9 trained, row 2 is 5 6 with 6 trained, then one row of padding."""
    values = {
        "tokens": torch.tensor([[7, 8, 9, 5, 6, 0, 0]]),
        "loss_mask": torch.tensor([[1.0, 1.0, 0.0, 1.0, 0.0, 0.0]]),
        "advantages": torch.tensor([0.5, -1.0, 0.0]),
        "old_log_probs": torch.tensor([[-0.8, -0.9, 9.0, -0.6, 9.0, 9.0]]),
        "ref_log_probs": None,
        "seq_starts": [0, 3, 5, 7],
        "seq_lengths": [3, 2, 0],
        "seq_indices": [4, 2, 5],
    }
    return PackedBin(**{**values, **changes})


PROMPTS = ["x", "x", "q", "x", "p", None]


def test_a_bin_comes_apart_into_its_samples():
    """FB-64, by hand: entry q of a shifted row belongs to token q + 1, and the last entry of a sequence to nobody."""
    first, second = samples_of_bin(plain_bin(), PROMPTS)
    assert (first.tokens, first.loss_mask, first.prompt_id, first.advantage) == ([7, 8, 9], [1, 1], "p", 0.5)
    assert first.old_log_probs == pytest.approx([-0.8, -0.9])
    assert (second.tokens, second.loss_mask, second.prompt_id) == ([5, 6], [1], "q")
    assert second.old_log_probs == pytest.approx([-0.6]) and second.ref_log_probs is None
    assert len(samples_of_bin(plain_bin(seq_starts=[0, 3, 5]), PROMPTS)) == 2
    ids = torch.arange(12).view(1, 6, 2)
    first, second = samples_of_bin(plain_bin(teacher_topk_ids=ids, teacher_log_probs=-ids[..., 0]), PROMPTS)
    assert (first.teacher_topk_ids, first.teacher_log_probs) == ([[0, 1], [2, 3]], [0, -2])
    assert (second.teacher_topk_ids, second.teacher_log_probs) == ([[6, 7]], [-6])


# What is changed in the bin, or in the prompts of rows, and what is said.
BAD = [
    ({"prompts": ["x", "x", "q", "x", None, None]}, "row 4 has 2 unmasked tokens and no prompt"),
    ({"seq_lengths": [3, 1, 0]}, "row 2 has 1 tokens from position 3"),
    ({"loss_mask": torch.tensor([0.0, 1, 1, 0, 1, 0, 0])}, "loss_mask has 7 entries for a bin of 7 tokens: it is"),
    ({"loss_mask": torch.tensor([1.0, 1, 1, 1, 0, 0])}, "1 unmasked positions of a bin predict no token of their"),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_a_bin_that_does_not_fit_together_is_refused(changes, message):
    """FB-64: boundaries off by one or two train the next sequence's prompt."""
    prompts = changes.get("prompts", PROMPTS)
    with pytest.raises(DataError, match=message):
        samples_of_bin(plain_bin(**{name: value for name, value in changes.items() if name != "prompts"}), prompts)


def refusals_on_rank(rank):
    """What a rank says and whether the gradients were finalised, where rank 1 has a count of what is not finite."""
    trainer = tiny_trainer(packed=True)
    samples = [replace(sample, old_log_probs=[-1.0] * len(sample.loss_mask)) for sample in ragged_step()]
    prompts, called = [sample.prompt_id for sample in samples], []
    bins = [pack(samples, rows, prompts) for rows in FILLINGS[1]]
    forward_step = forward_step_of(bins, prompts, trainer.config)
    trainer.model.config.finalize_model_grads_func = lambda *positional, **named: called.append(1)
    check = forward_step.check

    def check_of_counts():  # on a GPU the loss does not look
        count, zero = torch.tensor([3 if rank == 1 else 0], dtype=torch.int32), torch.zeros(())
        forward_step._forward_step._reports = [MicrobatchReport(zero, None, None, count, None)]
        check()

    forward_step.check = check_of_counts
    return error_of(lambda: run_schedule(trainer, forward_step, bins)), len(called)


def test_a_non_finite_token_stops_every_rank_before_gradients_are_finalised(pool):
    """On the GPU the loss does not synchronise, and Megatron's loop has no hook before its optimiser."""
    first, second = pool.run(refusals_on_rank, world_size=2, **{TP: 2})
    assert "another rank met an unmasked token that is not finite: the optimiser step is refused" in first[0] and first[1] == 0
    assert "micro-batches {0: 3}" in second[0] and second[1] == 0
