"""Micro-batches, padded and packed: which token each row predicts, what each cp rank holds, and what is refused by name."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megatron_rl.config import PolicyLossConfig
from megatron_rl.count import StepTotals
from megatron_rl.errors import DataError
from megatron_rl.layout.groups import ParallelGroups
from megatron_rl.layout.sampling_support import SamplingSupport
from megatron_rl.megatron.batch import PolicySample, StepContext, make_packed_batch, make_padded_batch, weigh_samples
from megatron_rl.testing.invariance import StepSample

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
        assert batch.loss_mask.tolist() == [False, False, True, True, False, False]
        torch.testing.assert_close(batch.old_log_probs, torch.tensor([0.0, 0.0, -0.5, -0.6, 0.0, 0.0]))
        torch.testing.assert_close(batch.ref_log_probs, torch.tensor([0.0, 0.0, -1.5, -1.6, 0.0, 0.0]))


def test_context_parallel_ranks_take_zigzag_chunks_of_each_row_and_of_each_document():
    """By hand: of 8 positions at cp 2, rank 0 takes chunks 0 and 3, as the model's rotary positions do."""
    sample = sample_of(0, 3, 5)
    assert [padded([sample], cp_rank=rank, cp_size=2, row_length=8).position_ids.tolist() for rank in (0, 1)] == [
        [[0, 1, 6, 7]],
        [[2, 3, 4, 5]],
    ]
    # Packed: documents of 4 and 8, chunks of 1 and 2.
    two = [sample_of(0, 1, 2), sample_of(1, 2, 6)]
    first, second = (packed(two, cp_rank=rank, cp_size=2, row_length=12) for rank in (0, 1))
    assert first.position_ids.tolist() == [[0, 3, 0, 1, 6, 7]] and second.position_ids.tolist() == [[1, 2, 2, 3, 4, 5]]
    assert first.cu_seqlens.tolist() == second.cu_seqlens.tolist() == [0, 2, 6]


def test_the_tail_of_a_packed_row_is_a_document_of_its_own_and_no_sample():
    """FB-63: attention must not let padding see a sample's tokens, and the loss must not count it."""
    batch = packed([sample_of(0, 3, 5), sample_of(1, 2, 4)], row_length=20)
    assert batch.packed_seq_params.qkv_format == "thd"
    assert batch.packed_seq_params.cu_seqlens_q.tolist() == batch.packed_seq_params.cu_seqlens_kv.tolist() == [0, 8, 14, 20]
    assert batch.packed_seq_params.max_seqlen_q == 8
    assert batch.cu_seqlens.tolist() == [0, 8, 14]
    assert not batch.loss_mask[14:].any() and batch.position_ids[0, 14:].tolist() == [0, 1, 2, 3, 4, 5]
    full = packed([sample_of(0, 3, 5), sample_of(1, 2, 4)], row_length=14)
    assert full.packed_seq_params.cu_seqlens_q.tolist() == [0, 8, 14]


def test_a_sample_s_numbers_reach_the_loss_in_the_order_of_the_documents():
    """Log-probabilities that no sample has stay None: on-policy is the loss's case, not one of zeros."""
    none = {"old_log_probs": None, "ref_log_probs": None}
    samples = [sample_of(3, 1, 2, **none), sample_of(1, 2, 4, **none)]
    for batch in (padded(samples, num_rows=3), packed(samples)):
        assert batch.advantages.tolist() == [3.0, 1.0]
        assert batch.token_weights.tolist() == [0.125, 0.5]
        assert batch.regularizer_weights.tolist() == [0.25**3, 0.25]
        assert batch.token_counts.tolist() == [1, 3]
        assert batch.context is CONTEXT and batch.old_log_probs is batch.ref_log_probs is None


UNLIKE, SOME = (
    r"sample 1: {} has \({},\) values for a response of {}",
    "{} is given for 1 of 2 samples of a micro-batch: all or none",
)
REFUSED = [
    pytest.param({"tokens": torch.arange(3)}, "sample 1 has 3 tokens, 3 of them response", id="no prompt"),
    pytest.param({"loss_mask": torch.ones(9)}, "sample 1 has 5 tokens, 9 of them response", id="mask longer than its sample"),
    pytest.param({"loss_mask": torch.ones(0)}, "sample 1 has 5 tokens, 0 of them response", id="no response"),
    pytest.param({"loss_mask": torch.ones(2)}, UNLIKE.format("old_log_probs", 3, 2), id="short mask"),
    pytest.param({"loss_mask": torch.ones(4)}, UNLIKE.format("old_log_probs", 3, 4), id="long mask"),
    pytest.param({"old_log_probs": torch.ones(5)}, UNLIKE.format("old_log_probs", 5, 3), id="prompt too"),
    pytest.param({"ref_log_probs": torch.ones(2)}, UNLIKE.format("ref_log_probs", 2, 3), id="reference"),
    pytest.param({"old_log_probs": None}, SOME.format("old_log_probs"), id="some on-policy"),
    pytest.param({"ref_log_probs": None}, SOME.format("ref_log_probs"), id="some reference"),
    pytest.param({"kept_ids": SamplingSupport.from_lists([[1]])}, SOME.format("kept_ids"), id="some from a part of the vocabulary"),
]


@pytest.mark.parametrize("make", [padded, packed])
@pytest.mark.parametrize(("fault", "message"), REFUSED)
def test_a_sample_whose_parts_do_not_fit_is_refused_by_its_number(fault, message, make):
    """A zip that drops the longer list's tail trains on less than was given, without a word."""
    with pytest.raises(DataError, match=message):
        make([sample_of(0, 2, 3), sample_of(1, 2, 3, **fault)])


def test_sets_of_another_number_of_tokens_are_refused():
    three, two = (SamplingSupport.from_lists([[1]] * number) for number in (3, 2))
    with pytest.raises(DataError, match="sample 1: kept_ids has 2 sets for a response of 3 tokens"):
        padded([sample_of(0, 2, 3, kept_ids=three), sample_of(1, 2, 3, kept_ids=two)])


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        ([[[0, 1]]], r"sample 0: routes are torch.int64 \(1, 1, 2\), not ids \[num_moe_layers, 2, topk\]"),
        ([[[0.5, 1.0], [1.0, 2.0]]], "sample 0: routes are torch.float32"),
        ([[[0, -1], [1, 2]]], "the experts of a token must be different ids of at least 0"),
        ([[[0, 1], [2, 2]]], "the experts of a token must be different ids"),
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
    (packed, {"row_length": 12, "cp_size": 2}, "2 samples of 16 padded tokens do not fit row_length=12"),
    (padded, {"row_length": 18, "cp_size": 2}, "row_length=18 must be a multiple of 4, twice the context-parallel size"),
    (packed, {"row_length": 18, "cp_size": 2}, "row_length=18 must be a multiple of 4, twice the context-parallel size"),
]


@pytest.mark.parametrize(("make", "settings", "message"), UNFIT)
def test_what_does_not_fit_the_micro_batch_is_refused(make, settings, message):
    """FB-63: rows that overflow into their neighbours; and lengths that cp ranks cannot cut into equal chunks."""
    with pytest.raises(DataError, match=message):
        make([sample_of(0, 2, 3), sample_of(1, 2, 4)], **settings)


def test_a_step_of_partial_groups_or_of_masks_that_weigh_is_refused():
    """FB-17: a group that lost a sample would change every weight of prompt_mean. A mask of 0.5 would count as 1."""
    step = [StepSample(tokens=[1, 2], loss_mask=[1], prompt_id=name, advantage=0.0) for name in "aab"]
    with pytest.raises(DataError, match="prompt 'b' has 1 of samples_per_prompt=2 samples"):
        weigh_samples(PolicyLossConfig(samples_per_prompt=2), step, ParallelGroups())
    partial = PolicyLossConfig(samples_per_prompt=2, allow_partial_prompt_groups=True)
    assert len(weigh_samples(partial, step, ParallelGroups())[0]) == 3
    for mask in ([1, 2], [0.5, 1.0], [1, -1]):
        step = [StepSample(tokens=[1, 2, 3], loss_mask=mask, prompt_id="a", advantage=1.0)]
        with pytest.raises(DataError, match=r"loss_masks\[0\] has values other than 0 and 1"):
            weigh_samples(PolicyLossConfig(), step, ParallelGroups())
