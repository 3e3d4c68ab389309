"""Each loss on what must stop the step, and an idle rank; tests/messages.txt has what it says of wrong arguments."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from helpers import CLIP, random_batch
from loss_backends import LOSSES, over_losses, rows_of_losses
from refused_calls import log_probs_of_hidden, log_probs_of_logits, loss_of_hidden, loss_of_logits

from megatron_rl.errors import DataError
from megatron_rl.losses.corrections import CorrectionSettings
from megatron_rl.metrics.step import neutral_statistics
from megatron_rl.ops.log_probs import vocab_shard
from megatron_rl.policy_loss import grpo_loss, gspo_loss


def with_every_term(batch) -> dict:
    weights = {"kl_coefficient": 0.1, "entropy_coefficient": 0.01, "regularizer_weights": batch.token_weights}
    return {"metrics": "with_entropy", **weights, **CLIP}


TENSORS = ["logits", "old_log_probs", "advantages", "importance_weights", "ref_log_probs", "labels"]


@pytest.mark.parametrize(("kind", "backend", "tensor"), rows_of_losses(TENSORS))
def test_an_unmasked_value_that_is_not_finite_stops_the_step(kind, backend, tensor):
    """FB-41, FB-135: NaN would train as if on-policy; the message names document and tensor. On CUDA it is counted."""
    named = "log_probs" if tensor in ("logits", "labels") else tensor
    for value in (math.nan, math.inf, -math.inf) if backend.name == "torch" else (math.nan,):
        batch = random_batch([3, 4, 2], num_masked=(0, 1, 0), seed=12)
        per_token = {"importance_weights": torch.ones(9).double(), "ref_log_probs": batch.old_log_probs.clone()}
        options = {**per_token, "kl_coefficient": 0.1, "regularizer_weights": torch.ones(3), **CLIP}
        # Token 5 is unmasked and belongs to document 1.
        if tensor in options:
            options[tensor][5] = value
        elif tensor == "labels":
            batch.logits[5, batch.labels[5]] = -math.inf
        else:
            getattr(batch, tensor)[1 if tensor == "advantages" else 5] = value
        count = 3 if tensor == "advantages" else 1
        if backend.device == "cuda":
            assert backend.run(LOSSES[kind], batch, **options)[0].num_nonfinite.tolist() == [0, count, 0]
            continue
        with pytest.raises(
            DataError, match=f"document 1 of the micro-batch has {count} .* not finite, in .*{named}.*; 1 documents"
        ):
            backend.run(LOSSES[kind], batch, **options)


OF_TWO = [SimpleNamespace(rank=lambda rank=rank: rank, size=lambda: 2) for rank in range(2)]


@pytest.mark.parametrize("tp_group", OF_TWO, ids=["first", "last"])
@pytest.mark.parametrize(
    ("call", "columns"), [(loss_of_logits, 4), (loss_of_hidden, 16), (log_probs_of_logits, 16), (log_probs_of_hidden, 16)]
)
def test_a_shard_without_a_real_column_is_refused_on_each_rank(call, columns, tp_group):
    """Of gathered logits the first rank would train the whole vocabulary, and the others nothing. No rank asks another."""
    with pytest.raises(DataError, match=f"vocab_size={columns} with {columns} columns on each of 2 .* begin at {columns}, "):
        call(vocab_size=columns, tp_group=tp_group, check_ranks=False)
    assert vocab_shard(columns, 1.0, columns + 1, tp_group).num_columns == [columns, 1][tp_group.rank()]
    assert vocab_shard(columns, 1.0, None, tp_group).num_columns == columns


@over_losses("grpo")
@pytest.mark.parametrize("lengths", [[3, 2], [0, 0], []], ids=["all masked", "no token", "no document"])
def test_an_idle_rank_stays_in_the_graph(kind, backend, lengths):
    """FB-25, FB-45, FB-55: the loss is 0 and still depends on the logits, no metric is 0 / 0, and backward gives zeros."""
    batch = random_batch(lengths, num_masked=tuple(lengths), seed=14)
    options = {**with_every_term(batch), "ref_log_probs": batch.old_log_probs}
    output, gradient = backend.run(LOSSES[kind], batch, **options)
    assert output.loss.item() == 0.0 and gradient.shape == batch.logits.shape and (gradient == 0).all()
    neutral = neutral_statistics(has_entropy=True).values
    neutral[0] = len(lengths)
    torch.testing.assert_close(output.metrics.values, neutral)


def test_importance_weights_of_masked_tokens_and_of_padding_may_be_anything():
    """Token 1 is masked, tokens 5 and 6 are padding; the mask says nothing of padding."""
    batch = random_batch([4, 3], num_masked=(0, 0), seed=13)
    batch.loss_mask[1] = False
    weights = torch.tensor([1.0, -1.0, 1.0, 1.0, 1.0, -2.0, math.nan])
    inputs = (batch.logits, batch.labels, batch.old_log_probs, batch.advantages, batch.loss_mask)
    output = grpo_loss(*inputs, torch.tensor([0, 4, 5]), batch.token_weights, importance_weights=weights)
    assert output.loss.isfinite()


FAULTS = {
    "in log_probs": lambda given: given["logits"].__setitem__((0, slice(None)), math.nan),
    "token_counts says 9": lambda given: given.update(token_counts=torch.tensor([9, 4])),
    "advantages vary": lambda given: given["advantages"].__setitem__(0, 7.0),
}


@pytest.mark.parametrize("message", FAULTS)
@pytest.mark.parametrize("old", ["given", None], ids=["a delta", "on-policy"])
def test_bad_data_beside_a_correction_that_reads_the_policy_is_named(old, message):
    """The correction is in the weights of the micro-batch that is refused."""
    batch = random_batch([3, 4], num_masked=(0, 0))
    labels, old_log_probs, _, *others = batch.arguments()
    given = {"logits": batch.logits.clone(), "advantages": torch.ones(7), "token_counts": torch.tensor([3, 4])}
    FAULTS[message](given)
    correction = CorrectionSettings(kind="tis", level="sequence_mean", high=2.0, sequence_delta=None if old is None else 0.1)
    with pytest.raises(DataError, match=message):
        gspo_loss(
            *(given["logits"], labels, None if old is None else old_log_probs, given["advantages"], *others),
            token_counts=given["token_counts"],
            advantages_per="token",
            correction=correction,
            rollout_log_probs=old_log_probs,
        )
