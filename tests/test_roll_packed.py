"""ROLL's packed logits as sequences with one gradient: what it is, where it lies, and who may write into it."""

from __future__ import annotations

import functools

import pytest
import roll_cases
import torch
from carrier_cases import LiveBytes
from helpers import pool_of
from roll_cases import Case
from torch import Tensor

from megatron_rl.config import Backend
from megatron_rl.errors import ConfigError
from megatron_rl.hosts import log_probs, roll_loss
from megatron_rl.hosts.roll_packed import is_alone, sequences_of
from megatron_rl.layout.groups import SINGLE
from megatron_rl.losses import policy_loss

# 1 row of padding behind the last sequence; an empty sequence.
BOUNDS, VOCABULARY = [0, 3, 3, 8, 10], 7
pool = pool_of(2)


def slices_of(logits: Tensor, bounds: list[int]) -> list[Tensor]:
    """As ROLL cuts them."""
    return [logits[:, start:end] for start, end in zip(bounds, bounds[1:], strict=False)]


def leaf() -> Tensor:
    return torch.randn(1, BOUNDS[-1] + 1, VOCABULARY, generator=torch.Generator().manual_seed(1)).requires_grad_()


def gradient_of(cut, *, reads=(0, 1, 2, 3)) -> tuple[Tensor, Tensor]:
    """(the gradient by the leaf, the logits in between) of a sum over sequences; each is read twice."""
    made = leaf()
    logits = made * 2.0
    sequences = cut(logits, BOUNDS)
    total = sum(((n + 1.0) * sequences[n].logsumexp(-1)).sum() + sequences[n].square().sum() for n in reads)
    seen = []
    logits.register_hook(seen.append)
    total.backward()
    return made.grad, logits, seen[0]


@pytest.mark.parametrize("reads", [(0, 1, 2, 3), (0, 3), (2,)], ids=str)
def test_the_gradient_is_that_of_slices_and_lies_in_the_logits(reads):
    """A sequence that nobody reads has none, and neither has padding."""
    (expected, _, _), (found, logits, gradient) = gradient_of(slices_of, reads=reads), gradient_of(sequences_of, reads=reads)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert gradient.data_ptr() == logits.data_ptr() and gradient.shape == logits.shape


def written_over(cut, inplace: bool) -> Tensor:
    """The gradient of a loss of ours for each sequence, by the leaf."""
    made = leaf()
    logits, losses = made * 2.0, []
    for number, sequence in enumerate(cut(logits, BOUNDS)):
        rows = sequence.flatten(0, 1)
        labels = torch.arange(len(rows)) % VOCABULARY
        of_tokens = (labels, labels * -0.3 - 1, torch.tensor([1.0 - number]), labels >= 0)
        bounds, weights = torch.tensor([0, len(rows)], dtype=torch.int32), torch.ones(1)
        losses.append(policy_loss("grpo", rows, *of_tokens, bounds, weights, advantages_per="sample", inplace=inplace).loss)
    sum(losses).backward()
    return made.grad


def test_each_sequence_may_be_written_and_slices_may_not():
    """A write into a slice is counted as one into each slice: backward of the others then raises."""
    expected = written_over(slices_of, inplace=False)
    torch.testing.assert_close(written_over(sequences_of, inplace=True), expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(written_over(sequences_of, inplace=False), expected, rtol=1e-6, atol=1e-7)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        written_over(slices_of, inplace=True)
    logits = leaf() * 2.0
    assert [is_alone(one) for one in sequences_of(logits, BOUNDS)] == [True] * 4
    assert [is_alone(one) for one in slices_of(logits, [0, 3, BOUNDS[-1] + 1])] == [False, False]
    assert is_alone(logits) and is_alone(logits.transpose(0, 1).contiguous()) and is_alone(logits[:, :])


@pytest.mark.parametrize("inplace", [False, True])
def test_an_operation_that_keeps_the_logits_raises(inplace):
    """As the tanh of a soft cap: its backward reads what it has returned. No rows of padding, and each gradient in its place."""
    labels = torch.zeros(1, 4, dtype=torch.int64)
    sequences = sequences_of(torch.tanh(leaf()[:, :8]), [0, 4, 8])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        sum(log_probs.log_probs_of_logits(one, labels, SINGLE, inplace=inplace).sum() for one in sequences).backward()


def test_a_second_backward_is_refused():
    logits = leaf() * 2.0
    total = sum(one.sum() for one in sequences_of(logits, BOUNDS))
    total.backward(retain_graph=True)
    with pytest.raises(ConfigError, match="a second backward through the packed logits of ROLL"):
        total.backward()


def peak_of(cut) -> float:
    """The most bytes that live at once in a backward, of a logit."""
    made = torch.randn(1, 64, 512).requires_grad_()
    logits = made * 2.0
    sequences = cut(logits, [*range(0, 65, 8)])
    total = sum(log_probs.log_probs_of_logits(one, torch.zeros(1, 8), SINGLE, inplace=is_alone(one)).sum() for one in sequences)
    del sequences
    with LiveBytes() as live:
        total.backward()
    return live.peak / logits.numel()


def test_eight_sequences_need_no_gradient_of_their_own():
    """Of slices autograd makes one of all rows for each, and adds them: two live at once. Ours is the logits' memory, which is
    counted with it; the leaf's own gradient has 4 bytes a logit more."""
    ours, theirs = peak_of(sequences_of), peak_of(slices_of)
    assert ours < 8.1 and theirs > 12.0, (ours, theirs)


def results_on_rank(rank: int, chosen: list[Case]) -> tuple[list[roll_cases.Result], list]:
    """With the answers of CUDA: our loss writes, and assumes the factor that backward will deliver."""
    options = []

    @functools.wraps(policy_loss)
    def noted(*given, **named):
        options.append((named["inplace"], named["loss_scale"] is not None))
        return policy_loss(*given, **named)

    roll_loss.resolve_backend, roll_loss.policy_loss = lambda *of: Backend.TRITON, noted
    try:
        return roll_cases.results_on_rank(rank, chosen), options
    finally:
        roll_loss.resolve_backend, roll_loss.policy_loss = resolve_backend, policy_loss


resolve_backend = roll_loss.resolve_backend
PACKED = {"packing": "a call a sequence", "sizes": (2, 4), "num_samples": 6}
CASES = [Case(loss=loss, aggregation="token_mean", cp=cp, **PACKED) for loss in ("grpo", "gspo") for cp in (1, 2)]


@pytest.mark.megatron
def test_packed_sequences_take_the_path_of_rows(pool):
    """Each writes its gradient over its logits, and assumes the factor of the last one, which all of them share."""
    seen = []

    def run(chosen, **layout):
        answers = pool.run(results_on_rank, chosen, **layout)
        seen.extend(option for _, options in answers for option in options)
        return [found for found, _ in answers]

    errors = roll_cases.errors_of(CASES, run)
    assert len(errors) == len(CASES) and max(errors.values()) < 2e-6, errors  # as tests/test_roll.py
    assert seen == [(True, True)] * (2 * 6 + 2 * 2 * 6)  # a call a sequence, on one rank and on each of two
