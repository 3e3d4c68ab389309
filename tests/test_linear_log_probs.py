"""Heads that give logits in float32 or log-probabilities with their gradient: numbers, rows, memory, ranks and what is refused."""

from __future__ import annotations

import pytest
import torch
from linear_cases import Seen, dense_scores, relative
from simulated_ranks import groups_of_ranks, on_simulated_ranks
from torch import nn

from megatron_rl.layout import SINGLE
from megatron_rl.ops.fp32_head import fp32_head_logits
from megatron_rl.ops.linear_log_probs import linear_log_probs

TOKENS, HIDDEN, COLUMNS = 48, 64, 40
# float32 sums of 64 products against float64 ones: 64 roundings of 6e-8 at most, a tenth of it in the mean. bf16 logits: 4e-3.
FLOAT32 = 2e-6


def operands(dtype: torch.dtype = torch.bfloat16, seed: int = 0):
    """hidden [S, B, H], weight [V, H] as a parameter, gradient of the logits [S, B, V] float32."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(TOKENS // 2, 2, HIDDEN, generator=generator).to(dtype).requires_grad_()
    weight = nn.Parameter(torch.randn(COLUMNS, HIDDEN, generator=generator).to(dtype))
    return hidden, weight, torch.randn(TOKENS // 2, 2, COLUMNS, generator=generator)


def error_of(found, truth) -> float:
    return float((found.detach().double() - truth).norm() / truth.norm())


def exact(hidden, weight, gradient):
    """logits, their gradient's products with weight and hidden, all in float64."""
    x, w, g = hidden.detach().double(), weight.detach().double(), gradient.double()
    return x @ w.t(), g @ w, g.flatten(0, 1).t() @ x.flatten(0, 1)


@pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, 8), (torch.float16, 11)], ids=str)
def test_logits_of_16_bit_parameters_are_exact_to_float32(dtype, bits):
    """FB-85: products of two 16-bit numbers are exact in float32; a gradient is rounded once, to the parameters' dtype."""
    hidden, weight, gradient = operands(dtype)
    logits = fp32_head_logits(hidden, weight, tp_group=SINGLE)
    truth, *of_operands = exact(hidden, weight, gradient)
    assert logits.dtype == torch.float32 and logits.shape == (TOKENS // 2, 2, COLUMNS)
    assert error_of(logits, truth) < FLOAT32 and error_of(hidden @ weight.t(), truth) > 1e-4
    logits.backward(gradient)
    assert hidden.grad.dtype == weight.grad.dtype == dtype
    for found, expected in zip((hidden.grad, weight.grad), of_operands, strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=2.0**-bits, atol=1e-4)


@pytest.mark.parametrize(("num_microbatches", "tied"), [(1, True), (16, False)])
def test_the_error_of_the_weight_gradient_does_not_grow_with_micro_batches(num_microbatches, tied):
    """FB-85: a gradient that is rounded to bf16 in each micro-batch loses bits as they grow; in the float32 buffer it keeps them.
    What autograd gets is no gradient: Megatron's hook leaves it, but adds it for a tied weight, so there it must be zeros."""
    hidden, weight, gradient = operands()
    weight.main_grad = torch.zeros(weight.shape)
    weight.grad_added_to_main_grad, weight.zero_out_wgrad = False, tied
    rows, gradients = hidden.detach().repeat(num_microbatches, 1, 1), gradient.repeat(num_microbatches, 1, 1)
    rows += torch.randn(rows.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    for part, of_logits in zip(rows.chunk(num_microbatches), gradients.chunk(num_microbatches), strict=True):
        fp32_head_logits(part, weight, tp_group=SINGLE).backward(of_logits)
        assert weight.grad_added_to_main_grad
        assert weight.grad.dtype == torch.bfloat16
        assert not tied or not weight.grad.any()
    *_, truth = exact(rows, weight, gradients)
    assert error_of(weight.main_grad, truth) < FLOAT32


def of_shard(tp, sequence_parallel):
    """Errors of this rank's logits, hidden gradient and weight gradient, and whether tp ranks hold one hidden gradient."""
    hidden, weight, gradient = operands()
    truth = exact(hidden, weight, gradient)
    shard = nn.Parameter(weight.detach().chunk(tp.size())[tp.rank()].clone())
    shard.main_grad = torch.zeros(shard.shape)
    own = hidden.detach().chunk(tp.size())[tp.rank()].clone().requires_grad_() if sequence_parallel else hidden
    logits = fp32_head_logits(own, shard, tp_group=tp, sequence_parallel=sequence_parallel)
    logits.backward(gradient.chunk(tp.size(), -1)[tp.rank()])
    of_hidden = truth[1].chunk(tp.size())[tp.rank()] if sequence_parallel else truth[1]
    errors = [
        error_of(logits, truth[0].chunk(tp.size(), -1)[tp.rank()]),
        error_of(shard.main_grad, truth[2].chunk(tp.size())[tp.rank()]),
        # Rounded once, to bf16: 2^-9 of each number at most, less in the mean.
        error_of(own.grad, of_hidden) / 2**-9,
    ]
    return errors, own.grad.shape == own.shape, None if sequence_parallel else own.grad


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["TP", "TP+SP"])
def test_a_sharded_vocabulary_gives_whole_hidden_gradients(sequence_parallel):
    """Catches a shard's part of the sum over the vocabulary taken for the sum, or counted tp times, and shards in another order."""
    answers = on_simulated_ranks(lambda of_rank: of_shard(of_rank.tp, sequence_parallel), groups_of_ranks(tp=4))
    for (of_logits, of_weight, of_hidden), has_shape, gradient in answers:
        assert of_logits < FLOAT32 and of_weight < FLOAT32 and of_hidden < 1.0 and has_shape
        assert gradient is None or torch.equal(gradient, answers[0][2])


# Log-probabilities of hidden states with their gradient

ROWS_OF_HIDDEN, VOCABULARY, TEMPERATURE = 24, 32, 0.7
OF_ROWS = 0.5 + torch.arange(ROWS_OF_HIDDEN).roll(7) / ROWS_OF_HIDDEN  # a temperature a row
ROW_BYTES = VOCABULARY * 4  # of logits


def scored_operands(dtype=torch.float64):
    """hidden, weight, labels; and coefficients of log-probabilities and entropies, of which rows 5 and 6 have none."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(ROWS_OF_HIDDEN, 8, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCABULARY, 8, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, VOCABULARY, (ROWS_OF_HIDDEN,), generator=generator)
    c, e = (torch.randn(ROWS_OF_HIDDEN, generator=generator, dtype=torch.float64) for _ in range(2))
    c[5:9] = e[5:7] = 0.0
    return hidden.to(dtype), weight.to(dtype), labels, c.to(dtype), e.to(dtype)


def by_autograd(hidden, weight, labels, c, e, temperature=TEMPERATURE):
    """In float64: log-probabilities, entropy, and the gradients of sum c log p + e H."""
    hidden, weight = hidden.double(), weight.double()
    log_probs, entropy, gradient = dense_scores(hidden @ weight.T, labels, c, 0 * c if e is None else e, temperature)
    return log_probs, entropy, gradient @ weight, gradient.T @ hidden


def by_head(hidden, weight, labels, c, e, temperature=TEMPERATURE, **options):
    hidden, weight = (leaf.clone().requires_grad_() for leaf in (hidden, weight))
    log_probs, entropy = linear_log_probs(hidden, weight, labels, temperature=temperature, with_entropy=True, **options)
    found = (c * log_probs).sum() + (0 if e is None else (e * entropy).sum())
    found.backward()
    return log_probs.detach(), entropy.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("temperature", [TEMPERATURE, OF_ROWS], ids=["one temperature", "a temperature a row"])
@pytest.mark.parametrize(
    ("dtype", "rows", "has_entropy", "fp32_logits"),
    [
        (torch.float32, 1, False, False),
        (torch.float32, 5, True, False),
        (torch.bfloat16, 1000, True, True),
    ],
)
def test_numbers_and_gradients_are_those_of_a_dense_head(dtype, rows, has_entropy, fp32_logits, temperature):
    """With float32 logits of 16 bits only operands and results are rounded: a row of the hidden gradient once, to 2^-9, and so is
    the weight's, over all temperatures. Sums of 24 temperatures that are each rounded are 8e-3 off."""
    hidden, weight, labels, c, e = scored_operands(dtype)
    c, e = c.float(), e.float() if has_entropy else None
    options = {"max_logits_bytes": ROW_BYTES * rows, "fp32_logits": fp32_logits}
    got = by_head(hidden, weight, labels, c, e, temperature, **options)
    for mine, theirs in zip(got, by_autograd(hidden, weight, labels, c, e, temperature), strict=True):
        assert relative(mine, theirs) < (FLOAT32 if mine.dtype == torch.float32 else 2**-8)
    # The numbers are those of the function without a gradient, bit for bit.
    plain = linear_log_probs(hidden, weight, labels, temperature=temperature, with_entropy=True, **options)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(got, plain, strict=False))


@pytest.mark.parametrize("temperature", [TEMPERATURE, OF_ROWS], ids=["one temperature", "a temperature a row"])
def test_masked_rows_and_padded_columns_have_no_gradient(temperature):
    hidden, weight, labels, c, e = scored_operands()
    mask, labels = torch.arange(ROWS_OF_HIDDEN) % 3 != 0, labels % (VOCABULARY - 2)
    options = {"loss_mask": mask, "vocab_size": VOCABULARY - 2, "max_logits_bytes": 8 * ROW_BYTES}
    got = by_head(torch.where(mask[:, None], hidden, torch.nan), weight, labels, c, e, temperature, **options)
    log_probs, entropy, *gradients = by_autograd(hidden, weight[:-2], labels, c * mask, e * mask, temperature)
    gradients[1] = torch.cat([gradients[1], torch.zeros(2, 8)])
    for mine, theirs in zip(got, (log_probs * mask, entropy * mask, *gradients), strict=True):
        assert relative(mine, theirs) < 1e-13  # float64 on both sides
    assert not got[2][~mask].any()


def test_backward_multiplies_the_rows_that_have_a_coefficient_and_no_logits_are_kept():
    """Forward has one product of each row; backward three, of the rows that the loss reads."""
    hidden, weight, labels, _, _ = scored_operands(torch.float32)
    hidden.requires_grad_()
    is_read = torch.arange(ROWS_OF_HIDDEN) >= ROWS_OF_HIDDEN - 3
    with Seen(8, VOCABULARY) as forward:
        log_probs = linear_log_probs(hidden, weight, labels, max_logits_bytes=ROW_BYTES * 2)
    with Seen(8, VOCABULARY) as backward:
        log_probs[is_read].sum().backward()
    assert forward.rows == {"logits": ROWS_OF_HIDDEN, "hidden": 0, "weight": 0} and forward.most_rows <= 2
    assert backward.rows == {"logits": 3, "hidden": 3, "weight": 0}
    assert (hidden.grad.abs().amax(1) > 0).tolist() == is_read.tolist()


# Columns that lie together in memory, and every row with a coefficient: each chunk is a slice of rows.
BY_COLUMNS = {"hidden": lambda hidden: hidden.t().contiguous().t(), "c": lambda c: c + 1.0}
# As in a micro-batch whose samples are all masked.
IDLE = {"c": lambda c: 0 * c, "e": lambda e: 0 * e}


@pytest.mark.parametrize(
    ("temperature", "sequence_parallel", "reduces_hidden", "changes"),
    [
        pytest.param(TEMPERATURE, False, True, BY_COLUMNS, id="hidden states of other strides"),
        pytest.param(TEMPERATURE, False, False, {}, id="the parts of the sum"),
        pytest.param(TEMPERATURE, True, True, {}, id="SP"),
        pytest.param(TEMPERATURE, True, True, IDLE, id="SP, no coefficient on any rank"),
        pytest.param(OF_ROWS, True, True, {}, id="SP, a temperature a row"),
    ],
)
def test_two_tensor_parallel_ranks_have_the_gradient_of_one(temperature, sequence_parallel, reduces_hidden, changes):
    given = dict(zip(("hidden", "weight", "labels", "c", "e"), scored_operands(torch.float32), strict=True))
    given |= {name: change(given[name]) for name, change in changes.items()}
    options = {"sequence_parallel": sequence_parallel, "reduces_hidden": reduces_hidden, "max_logits_bytes": ROW_BYTES * 5}

    def part_of(tp):
        own = {"hidden": given["hidden"].chunk(2)[tp.rank()]} if sequence_parallel else {}
        own["weight"] = given["weight"].chunk(2)[tp.rank()]
        return by_head(**given | own, temperature=temperature, tp_group=tp, **options)

    first, second = on_simulated_ranks(lambda of_rank: part_of(of_rank.tp), groups_of_ranks(tp=2))
    want = by_autograd(**given, temperature=temperature)
    for mine, other, theirs in zip(first[:2], second[:2], want[:2], strict=True):
        assert torch.equal(mine, other)
        assert relative(mine, theirs) < FLOAT32
    hidden = torch.cat([first[2], second[2]]) if sequence_parallel else first[2] if reduces_hidden else first[2] + second[2]
    assert relative(hidden, want[2]) < FLOAT32
    assert relative(torch.cat([first[3], second[3]]), want[3]) < FLOAT32
    if not sequence_parallel:
        assert torch.equal(first[2], second[2]) == reduces_hidden
