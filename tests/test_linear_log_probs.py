"""The fused head's log-probabilities with their gradient: numbers, rows, memory, ranks and what is refused."""

from __future__ import annotations

import pytest
import torch
from linear_cases import Seen, relative
from simulated_ranks import groups_of_ranks, on_simulated_ranks

from megatron_rl.errors import ConfigError
from megatron_rl.ops.linear_log_probs import linear_log_probs

TOKENS, HIDDEN, VOCABULARY, TEMPERATURE = 24, 8, 32, 0.7
# Float32 against float64: rounding of sums of 8 to 32 products.
LIMIT = 2e-6
ROW = VOCABULARY * 4  # bytes of a row of logits


def operands(dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    c, e = (torch.randn(TOKENS, generator=generator, dtype=torch.float64) for _ in range(2))
    c[5:9] = e[5:7] = 0.0  # 5 and 6 take no part
    return hidden.to(dtype), weight.to(dtype), labels, c.to(dtype), e.to(dtype)


def by_autograd(hidden, weight, labels, c, e, temperature=TEMPERATURE):
    """In float64: log-probabilities, entropy, and the gradients of sum c log p + e H."""
    hidden, weight = (leaf.double().clone().requires_grad_() for leaf in (hidden, weight))
    temperature = torch.as_tensor(temperature, dtype=torch.float64).reshape(-1, 1)
    log_p = (hidden @ weight.T / temperature).log_softmax(-1)
    log_probs, entropy = log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    found = (c.double() * log_probs).sum() + (0 if e is None else (e.double() * entropy).sum())
    return log_probs.detach(), entropy.detach(), *torch.autograd.grad(found, (hidden, weight))


def by_head(hidden, weight, labels, c, e, temperature=TEMPERATURE, **options):
    hidden, weight = (leaf.clone().requires_grad_() for leaf in (hidden, weight))
    log_probs, entropy = linear_log_probs(hidden, weight, labels, temperature=temperature, with_entropy=True, **options)
    found = (c * log_probs).sum() + (0 if e is None else (e * entropy).sum())
    found.backward()
    return log_probs.detach(), entropy.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("rows", [1, 5, 1000], ids="{} rows a chunk".format)
@pytest.mark.parametrize("has_entropy", [False, True], ids=["", "with entropy"])
def test_numbers_and_gradients_are_those_of_a_dense_head(rows, has_entropy):
    hidden, weight, labels, c, e = operands(torch.float32)
    e = e if has_entropy else None
    got = by_head(hidden, weight, labels, c, e, max_logits_bytes=ROW * rows)
    for mine, theirs in zip(got, by_autograd(hidden, weight, labels, c, e), strict=True):
        assert relative(mine, theirs) < LIMIT
    # The numbers are those of the function without a gradient, bit for bit.
    plain = linear_log_probs(hidden, weight, labels, temperature=TEMPERATURE, with_entropy=True, max_logits_bytes=ROW * rows)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(got, plain, strict=False))


@pytest.mark.parametrize("of_rows", [False, True], ids=["one temperature", "a temperature a row"])
def test_linear_log_probs_have_a_gradient_where_an_operand_requires_one(of_rows):
    """With a mask, whose rows may hold anything, and columns that are padding."""
    hidden, weight, labels, c, e = operands()
    mask, temperature = torch.arange(TOKENS) % 3 != 0, 0.5 + torch.arange(TOKENS) % 2 if of_rows else TEMPERATURE
    poisoned, labels = torch.where(mask[:, None], hidden, torch.nan), labels % (VOCABULARY - 2)
    options = {"loss_mask": mask, "vocab_size": VOCABULARY - 2, "max_logits_bytes": 8 * ROW}
    got = by_head(poisoned, weight, labels, c, e, temperature, **options)
    log_probs, entropy, *gradients = by_autograd(hidden, weight[:-2], labels, c * mask, e * mask, temperature)
    gradients[1] = torch.cat([gradients[1], torch.zeros(2, HIDDEN)])
    for mine, theirs in zip(got, (log_probs * mask, entropy * mask, *gradients), strict=True):
        assert relative(mine, theirs) < 1e-13  # float64 on both sides
    assert not got[2][~mask].any()


def test_only_what_requires_a_gradient_gets_one():
    """A head that is frozen, hidden states that are frozen, and nothing at all: under no_grad, as an evaluation asks for it."""
    hidden, weight, labels, c, e = operands()
    want = by_autograd(hidden, weight, labels, c, None)[2:]
    for number, leaf in enumerate((hidden, weight)):
        leaf.requires_grad_()
        (c * linear_log_probs(hidden, weight, labels, temperature=TEMPERATURE)).sum().backward()
        assert relative(leaf.grad, want[number]) < 1e-14
        leaf.requires_grad_(False)
    assert not linear_log_probs(hidden, weight, labels).requires_grad
    with torch.no_grad():
        assert not linear_log_probs(hidden.requires_grad_(), weight, labels).requires_grad


def test_a_second_backward_of_a_retained_graph_gives_the_gradient_again():
    hidden, weight, labels, c, _ = operands()
    hidden.requires_grad_()
    found = (c * linear_log_probs(hidden, weight, labels)).sum()
    first, second = (torch.autograd.grad(found, hidden, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second) and first.abs().max() > 0
    with pytest.raises(ConfigError, match="create_graph=True"):
        torch.autograd.grad(found, hidden, create_graph=True)


def test_backward_multiplies_the_rows_that_have_a_coefficient_and_no_logits_are_kept():
    """Forward has one product of each row; backward three, of the rows that the loss reads."""
    hidden, weight, labels, _, _ = operands(torch.float32)
    hidden.requires_grad_()
    is_read = torch.arange(TOKENS) >= TOKENS - 3
    with Seen(HIDDEN, VOCABULARY) as forward:
        log_probs = linear_log_probs(hidden, weight, labels, max_logits_bytes=ROW * 2)
    with Seen(HIDDEN, VOCABULARY) as backward:
        log_probs[is_read].sum().backward()
    assert forward.rows == {"logits": TOKENS, "hidden": 0, "weight": 0} and forward.most_rows <= 2
    assert backward.rows == {"logits": 3, "hidden": 3, "weight": 0}
    assert (hidden.grad.abs().amax(1) > 0).tolist() == is_read.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("of_rows", [False, True], ids=["one temperature", "a temperature a row"])
def test_with_float32_logits_only_operands_and_results_are_rounded(dtype, of_rows):
    """bfloat16 results are good to 2^-9 of an element: a row of logits' gradient is rounded once, and so is the weight's, over all
    temperatures. Sums of 24 temperatures that are each rounded are 8e-3 off."""
    hidden, weight, labels, c, e = operands(dtype)
    temperatures = 0.5 + torch.arange(TOKENS).roll(7) / TOKENS if of_rows else TEMPERATURE
    got = by_head(hidden, weight, labels, c.float(), e.float(), temperatures, fp32_logits=True)
    for mine, theirs in zip(got, by_autograd(hidden, weight, labels, c, e, temperatures), strict=True):
        assert relative(mine, theirs) < (LIMIT if mine.dtype == torch.float32 else 2**-8)


@pytest.mark.parametrize("live", [slice(0, 0), slice(3, 4)], ids=["no row", "one row"])
def test_a_temperature_without_a_coefficient_takes_no_part(live):
    hidden, weight, labels, c, _ = operands(torch.float32)
    c = torch.zeros_like(c).index_fill_(0, torch.arange(TOKENS)[live], 1.5)
    leaves = [leaf.clone().requires_grad_() for leaf in (hidden, weight)]
    temperatures = torch.where(torch.arange(TOKENS) % 2 == 0, 2.0, TEMPERATURE)  # row 3 has TEMPERATURE
    (c * linear_log_probs(*leaves, labels, temperature=temperatures)).sum().backward()
    want = by_autograd(hidden, weight, labels, c, None)[2:]
    for leaf, theirs in zip(leaves, want, strict=True):
        assert leaf.grad.dtype == leaf.dtype and (leaf.grad - theirs).abs().max() <= LIMIT * theirs.abs().max()


OF_ROWS = 0.5 + torch.arange(TOKENS) % 3


def parts_of(tp, *, temperature, sequence_parallel: bool, reduces_hidden: bool):
    """What a rank of two gets."""
    hidden, weight, labels, c, e = operands(torch.float32)
    shard = weight.chunk(2)[tp.rank()]
    given = hidden.chunk(2)[tp.rank()] if sequence_parallel else hidden
    options = {"sequence_parallel": sequence_parallel, "reduces_hidden": reduces_hidden, "tp_group": tp}
    return by_head(given, shard, labels, c, e, temperature, max_logits_bytes=ROW * 5, **options)


@pytest.mark.parametrize(
    ("temperature", "sequence_parallel", "reduces_hidden"),
    [(TEMPERATURE, False, True), (TEMPERATURE, False, False), (TEMPERATURE, True, True), (OF_ROWS, True, True)],
    ids=["whole hidden states", "the parts of the sum", "SP", "SP, a temperature a row"],
)
def test_two_tensor_parallel_ranks_have_the_gradient_of_one(temperature, sequence_parallel, reduces_hidden):
    options = {"temperature": temperature, "sequence_parallel": sequence_parallel, "reduces_hidden": reduces_hidden}
    first, second = on_simulated_ranks(lambda of_rank: parts_of(of_rank.tp, **options), groups_of_ranks(tp=2))
    want = by_autograd(*operands(torch.float32), temperature)
    for mine, other, theirs in zip(first[:2], second[:2], want[:2], strict=True):
        assert torch.equal(mine, other) and relative(mine, theirs) < LIMIT
    hidden = torch.cat([first[2], second[2]]) if sequence_parallel else first[2] if reduces_hidden else first[2] + second[2]
    assert relative(hidden, want[2]) < LIMIT and relative(torch.cat([first[3], second[3]]), want[3]) < LIMIT
    if not sequence_parallel:
        assert torch.equal(first[2], second[2]) == reduces_hidden


def test_the_sum_over_ranks_reaches_the_gradient_of_hidden_states_of_any_strides():
    """Columns that lie together in memory, and every row with a coefficient: each chunk is a slice of rows."""
    hidden, weight, labels, c, _ = operands(torch.float32)
    want = by_autograd(hidden, weight, labels, c + 1.0, None)[2]

    def of_columns(tp):
        options = {"tp_group": tp, "max_logits_bytes": ROW * 5}
        return by_head(hidden.t().contiguous().t(), weight.chunk(2)[tp.rank()], labels, c + 1.0, None, **options)

    for found in on_simulated_ranks(lambda of_rank: of_columns(of_rank.tp), groups_of_ranks(tp=2)):
        assert relative(found[2], want) < LIMIT


def test_ranks_without_a_coefficient_have_a_gradient_of_zeros():
    """No row has one on any rank, as in a micro-batch whose samples are all masked."""
    hidden, weight, labels, c, _ = operands(torch.float32)

    def without_a_coefficient(tp):
        options = {"tp_group": tp, "sequence_parallel": True}
        return by_head(hidden.chunk(2)[tp.rank()], weight.chunk(2)[tp.rank()], labels, 0 * c, None, **options)[2]

    for gradient in on_simulated_ranks(lambda of_rank: without_a_coefficient(of_rank.tp), groups_of_ranks(tp=2)):
        assert gradient.shape == (TOKENS // 2, HIDDEN) and gradient.abs().max() == 0
