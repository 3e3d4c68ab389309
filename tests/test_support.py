"""The ids that a sampler kept: the sets, scores over them in both backends, and what losses do with both.

tests/test_generated_steps.py has losses, aggregations, corrections and KL terms with sets on each layout."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch
from helpers import CLIP, KERNEL_DEVICE, Batch, float32, random_batch
from linear_cases import LargestNewTensor, every_term
from simulated_cuda import simulated_cuda
from simulated_ranks import groups_of_ranks, on_simulated_ranks
from test_log_probs import ON_BACKENDS
from torch import Tensor

from megatron_rl.errors import ConfigError, DataError
from megatron_rl.layout.groups import SINGLE
from megatron_rl.layout.sampling_support import SamplingSupport
from megatron_rl.ops.log_probs import vocab_parallel_log_probs
from megatron_rl.ops.scale import AssumedScale
from megatron_rl.policy_loss import policy_loss
from megatron_rl.policy_loss.api import PolicyLossOutput

SETS = [[5, 1], [], [3], [2, 0, 9]]


def as_lists(support: SamplingSupport) -> list[list[int]]:
    return [ids.tolist() for ids in support.ids.split(support.sizes.tolist())]


def test_sets_are_sorted_taken_joined_and_emptied():
    support = SamplingSupport.from_lists(SETS)
    assert as_lists(support) == [[1, 5], [], [3], [0, 2, 9]]
    assert support.rows.tolist() == [0, 0, 2, 3, 3, 3]
    taken = support.take(torch.tensor([3, 1, 3, -4]))  # from the end, as in all of torch
    assert as_lists(taken) == [[0, 2, 9], [], [0, 2, 9], [1, 5]]
    assert as_lists(support.take(torch.tensor([1]))) == [[]] and support.take(torch.tensor([], dtype=torch.int64)).num_rows == 0
    joined = SamplingSupport.cat([taken, support])
    assert joined.bound == 10
    assert as_lists(joined) == as_lists(taken) + as_lists(support)
    wrong = SamplingSupport.from_lists([[5, 1], [7, 7, 900], [3]])
    live = wrong.only(torch.tensor([True, False, True]))
    assert as_lists(live) == [[1, 5], [], [3]]
    assert live.is_inside(6) and not wrong.is_inside(901)


def test_a_set_has_its_token_and_an_id_is_repeated_in_its_own_row_alone():
    support = SamplingSupport.from_lists([[3, 1, 3], [3], [], [4, 5]])
    assert support.have(torch.tensor([3, 1, 3, 5])).tolist() == [True, False, False, True]
    assert support.are_repeated.tolist() == [False, False, True, False, False, False]  # sorted: 1 3 3, 3, 4 5
    assert SamplingSupport.from_lists([]).have(torch.tensor([], dtype=torch.int64)).tolist() == []


@pytest.mark.parametrize(
    ("ids", "offsets"), [([1, 2], [0, 1]), ([1, 2], [1, 2]), ([1, 2, 3], [0, 2, 1, 3]), ([1], []), ([1.0], [0, 1])]
)
def test_offsets_that_do_not_rise_to_the_ids_and_fractions_are_refused(ids, offsets):
    with pytest.raises(DataError, match="rise from 0 to the|ids must be a vector of torch.int32"):
        SamplingSupport(torch.tensor(ids), torch.tensor(offsets, dtype=torch.int64))


V = 16
# float32 against float64 of the same logits: a few roundings of numbers of size 5, and 1 / temperature; bfloat16: of the gradient
# alone, to 8 bits, which the interpreter cuts off.
VALUES = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 3e-6, torch.float16: 3e-6}
GRADIENTS = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 2**-7, torch.float16: 2**-9}


@pytest.fixture(params=ON_BACKENDS)
def backend(request) -> str:
    return request.param


@dataclass(frozen=True)
class Case:
    logits: Tensor  # [T, columns of all shards]
    labels: list[int]
    kept: list[list[int]]
    masked: tuple[int, ...] = ()
    vocab_size: int = V
    temperature: float = 0.7
    view: str = "itself"

    @property
    def mask(self) -> Tensor:
        return torch.tensor([t not in self.masked for t in range(len(self.labels))], dtype=torch.bool)


def normal(num_rows: int, width: int = V, seed: int = 5) -> Tensor:
    return 2 * torch.randn(num_rows, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).float().double()


def random_case(num_rows: int = 24, seed: int = 1, **changes) -> Case:
    """Sets of all sizes, whole ones too; at a tp of 4 some miss a shard, some straddle all."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(V, (num_rows,), generator=generator).tolist()
    kept = []
    for row, label in enumerate(labels):
        size = (1, 2, 3, 5, V, 8)[row % 6]
        others = [i for i in torch.randperm(V, generator=generator).tolist() if i != label]
        kept.append([*others[: size // 2], label, *others[size // 2 : size - 1]])
    return Case(**{"logits": normal(num_rows, seed=seed), "labels": labels, "kept": kept, "masked": (3, 10)} | changes)


def far_below() -> Case:
    """A forced set 90 nats below the row's maximum: e^x of one maximum would be 0."""
    logits = normal(3)
    logits[:, 4:] -= 63.0  # 90 nats at temperature 0.7
    return Case(logits, [9, 14, 4], [[9, 12], [14, 5, 6, 13], [4]])


def with_infinities() -> Case:
    logits = normal(3)
    logits[0, 3] = logits[1, 8:] = -math.inf
    return Case(logits, [2, 1, 5], [[3, 2, 7], [1, 9, 15], [5]])


def junk_of_masked_rows() -> Case:
    logits = normal(5)
    logits[1], logits[3, 2], logits[4] = math.nan, math.inf, -math.inf
    kept = [[1, 4], [-7, 2**40, 3, 3], [2, 15, 0], [], list(range(V))]
    return Case(logits, [4, -100, 0, V + 3, 2], kept, masked=(1, 3, 4))


CASES = {
    "sets of all sizes": random_case(),
    "one id each": Case(30 * normal(9), list(range(9)), [[t] for t in range(9)], temperature=0.3),
    "padding columns hold NaN": replace(
        random_case(12, seed=3),
        logits=torch.cat([normal(12, 13), torch.full((12, 3), math.nan, dtype=torch.float64)], 1),
        labels=[t % 13 for t in range(12)],
        kept=[sorted({t % 13, (5 * t) % 13, 12}) if t % 4 else list(range(13)) for t in range(12)],
        vocab_size=13,
    ),
    "near 1e4": random_case(12, seed=4, logits=normal(12) + 1e4),
    "far below": far_below(),
    "-inf logits": with_infinities(),
    "masked rows hold anything": junk_of_masked_rows(),
    "masked alone": Case(torch.full((2, V), math.nan), [-1, 99], [[], [5, 5]], masked=(0, 1)),
    "no row": Case(torch.zeros(0, V), [], []),
}


def truth(case: Case, c_support: Tensor, c_entropy: Tensor) -> tuple[Tensor, ...]:
    """(score, entropy of the vocabulary, gradient) in float64 by autograd of softmax, row by row; masked rows 0."""
    leaf = case.logits.double().clone().requires_grad_()
    found = [[torch.zeros((), dtype=torch.float64)] * 2 for _ in case.labels]
    total = leaf[:0].sum()
    for t in case.mask.nonzero()[:, 0].tolist():
        z = leaf[t, : case.vocab_size] / case.temperature
        support = z[case.labels[t]] - torch.logsumexp(z[case.kept[t]], 0)
        p = torch.softmax(z, 0)
        entropy = -torch.where(p > 0, p * torch.where(p > 0, p, 1.0).log(), 0.0).sum()
        found[t] = [support, entropy]
        for coefficients, value in zip((c_support, c_entropy), found[t], strict=True):
            total = total + coefficients[t] * value if coefficients[t] else total
    (gradient,) = torch.autograd.grad(total, leaf, allow_unused=True) if case.mask.any() else (None,)
    gradient = torch.zeros_like(case.logits).double() if gradient is None else gradient
    values = [torch.stack([row[i] for row in found]).detach() if found else torch.zeros(0, dtype=torch.float64) for i in range(2)]
    return *values, gradient


# Logits as a host may hand them over: rows further apart than they are wide, one column before.
VIEWS = {
    "itself": lambda x: x,
    "wide rows": lambda x: torch.cat([x, torch.full_like(x, math.nan)], 1)[:, : x.shape[1]],
    "shifted": lambda x: torch.cat([torch.full_like(x[:, :1], math.nan), x], 1)[:, 1:],
}
COEFFICIENTS = {"score": (1.0, 0.0), "both": (1.0, 1.0), "entropy": (0.0, 1.0)}


def coefficients_of(case: Case, which: str) -> list[Tensor]:
    steps = torch.arange(1.0, len(case.labels) + 1, dtype=torch.float64)
    return [weight * wave(steps) for weight, wave in zip(COEFFICIENTS[which], (torch.cos, torch.sin), strict=True)]


def run(case: Case, group, backend: str, dtype: torch.dtype, which: str, inplace: bool = False) -> tuple[Tensor, ...]:
    """What one tp rank computes: its values and its columns of the gradient, on the CPU."""
    width = case.logits.shape[1] // group.size()
    leaf = case.logits[:, group.rank() * width :][:, :width].to(KERNEL_DEVICE, dtype).clone().requires_grad_()
    values = vocab_parallel_log_probs(
        VIEWS[case.view](leaf * 1 if inplace else leaf),
        torch.tensor(case.labels, dtype=torch.int64, device=KERNEL_DEVICE),
        loss_mask=case.mask.to(KERNEL_DEVICE),
        temperature=case.temperature,
        vocab_size=case.vocab_size,
        tp_group=group,
        backend=backend,
        inplace=inplace,
        sampling_support=SamplingSupport.from_lists(case.kept).to(KERNEL_DEVICE),
        with_entropy=which != "score",
    )
    values = values if isinstance(values, tuple) else (values,)
    given = [c.to(KERNEL_DEVICE, value.dtype) for c, value in zip(coefficients_of(case, which), values, strict=False)]
    loss = sum((c * value).sum() for c, value in zip(given, values, strict=True) if c.any())
    if isinstance(loss, Tensor):
        loss.backward(retain_graph=not inplace)
        first = leaf.grad.clone()
        if not inplace:
            loss.backward()
            assert torch.equal(leaf.grad - first, first), "a second backward"
            leaf.grad = first
    gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    return *(value.detach().double().cpu() for value in values), gradient.double().cpu()


def by_ranks(case: Case, tp: int, backend: str, dtype: torch.dtype, which: str, inplace: bool = False) -> tuple[Tensor, ...]:
    groups = groups_of_ranks(tp=tp)
    ranks = on_simulated_ranks(lambda of_rank: run(case, of_rank.tp, backend, dtype, which, inplace), groups)
    for rank in ranks[1:]:
        assert all(torch.equal(mine, first) for mine, first in zip(rank[:-1], ranks[0][:-1], strict=True)), "the same bits"
    return *ranks[0][:-1], torch.cat([rank[-1] for rank in ranks], 1)


def check(case: Case, found: tuple[Tensor, ...], dtype: torch.dtype, which: str) -> None:
    rounded = replace(case, logits=case.logits.to(dtype).double())
    *values, gradient = truth(rounded, *coefficients_of(case, which))
    for got, want in zip(found[:-1], values, strict=False):
        torch.testing.assert_close(got, want, rtol=VALUES[dtype], atol=VALUES[dtype])
    scale = max(1.0, float(gradient.abs().max()) if gradient.numel() else 0.0)
    torch.testing.assert_close(found[-1], gradient, rtol=0, atol=GRADIENTS[dtype] * scale)
    assert not found[-1][:, case.vocab_size :].any(), "padding has no gradient"
    if case is CASES["one id each"] and which == "score":
        assert not any(part.any() for part in found), "exactly 0"


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("tp", "which"), [(1, "both"), (2, "score"), (4, "both"), (4, "entropy")])
def test_values_and_gradient_are_those_of_a_softmax_over_each_set(name, tp, which):
    check(CASES[name], by_ranks(CASES[name], tp, "torch", torch.float64, which), torch.float64, which)


@pytest.mark.parametrize(
    ("name", "tp", "which", "inplace", "dtype"),
    [
        ("sets of all sizes", 1, "both", False, torch.bfloat16),
        ("sets of all sizes", 2, "both", True, torch.float32),
        ("padding columns hold NaN", 4, "score", False, torch.bfloat16),
        ("far below", 2, "score", False, torch.float32),
        ("one id each", 4, "score", False, torch.float32),
        ("masked rows hold anything", 2, "both", True, torch.float16),
        ("-inf logits", 1, "entropy", True, torch.float16),
        ("no row", 2, "both", False, torch.float32),
    ],
)
def test_narrow_logits_too_in_place_and_in_both_backends(name, tp, which, inplace, dtype, backend):
    check(CASES[name], by_ranks(CASES[name], tp, backend, dtype, which, inplace), dtype, which)


@pytest.mark.parametrize("most", [1, 7])
def test_large_sets_are_taken_in_blocks_with_the_same_bits(most, backend):
    """Wrong sets are found in each block too. On CUDA nothing is read, and their scores are no numbers."""
    case, blocks = random_case(), SamplingSupport.blocks
    whole = by_ranks(case, 2, backend, torch.float32, "both", inplace=True)
    with mock.patch.object(SamplingSupport, "blocks", lambda support: blocks(support, most)):
        assert all(map(torch.equal, by_ranks(case, 2, backend, torch.float32, "both", inplace=True), whole))
        for row in (0, 23):
            wrong = replace(case, kept=[[*kept, kept[0]] if t == row else kept for t, kept in enumerate(case.kept)])
            if KERNEL_DEVICE == "cuda":
                assert run(wrong, SINGLE, backend, torch.float32, "both")[0].isfinite().logical_not().nonzero().tolist() == [[row]]
                continue
            with pytest.raises(DataError, match=f"token {row} has the ids"):
                run(wrong, SINGLE, backend, torch.float32, "both")


@pytest.mark.parametrize(("view", "inplace", "which"), [("wide rows", True, "score"), ("shifted", False, "both")])
def test_views_of_logits_have_the_numbers_of_a_copy(view, inplace, which, backend):
    found, want = (run(random_case(view=name), SINGLE, backend, torch.float32, which, inplace) for name in (view, "itself"))
    for got, wanted in zip(found, want, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-6)  # other splits of a row, other orders of additions


def test_support_scores_alone_keep_no_memory_of_the_logits():
    """Beside the logits and their gradient: numbers of rows and of pairs. The logits can go before backward."""
    num_rows, width = 64, 4096
    generator = torch.Generator().manual_seed(0)
    kept = [torch.randint(width, (8,), generator=generator).unique().tolist() for _ in range(num_rows)]
    labels, support = torch.tensor([ids[0] for ids in kept]), SamplingSupport.from_lists(kept)
    logits = torch.randn(num_rows, width, generator=generator).requires_grad_()
    with LargestNewTensor() as made:
        scores = vocab_parallel_log_probs(logits, labels, sampling_support=support)
        assert max(size for size, _ in made.sizes) < 0.05 * logits.numel()
        assert sum(x.numel() for x in scores.grad_fn.saved_tensors if x is not None) < 0.05 * logits.numel()
        made.sizes.clear()
        scores.sum().backward()
    assert sorted(size for size, _ in made.sizes)[-2] < 0.05 * logits.numel(), "the gradient alone"


@pytest.mark.parametrize("changes", [{"kept": [[0, 3], [4, 5, 2]]}, {"kept": [[0, 3], [4, 6]]}, {"kept": None}], ids=str)
def test_ranks_with_other_sets_are_named(changes):
    """Sets of masked tokens may differ: no rank reads them."""

    def one(group, kept) -> Tensor:
        support = None if kept is None else SamplingSupport.from_lists([*kept, [group.rank()] * group.rank()])
        mask = torch.tensor([True, True, False])
        return vocab_parallel_log_probs(
            normal(3)[:, :8], torch.tensor([0, 4, 9]), loss_mask=mask, tp_group=group, sampling_support=support, check_ranks=True
        )

    same = [[0, 3], [4, 5]]
    on_simulated_ranks(lambda of_rank: one(of_rank.tp, same), groups_of_ranks(tp=2))
    with pytest.raises(
        DataError,
        match="(sizes of|ids of|whether) sampling_support( is given)? differs between tensor-parallel ranks",
    ):
        on_simulated_ranks(lambda of_rank: one(of_rank.tp, changes["kept"] if of_rank.tp.rank() else same), groups_of_ranks(tp=2))


COLUMNS = 11


def sets_of(batch: Batch, size: int) -> SamplingSupport:
    """So many ids a row, the label among them."""
    return SamplingSupport.from_lists([[(int(label) + 3 * i) % COLUMNS for i in range(size)] for label in batch.labels])


def run_loss(name: str, batch: Batch, backend: str = "torch", **options) -> tuple[PolicyLossOutput, Tensor]:
    leaf = batch.logits.to(KERNEL_DEVICE).clone().requires_grad_()
    there = {key: value.to(KERNEL_DEVICE) if hasattr(value, "to") else value for key, value in options.items()}
    arguments = [value.to(KERNEL_DEVICE) for value in batch.arguments()]
    output = policy_loss(name, leaf * 1, *arguments, backend=backend, **CLIP, **there)
    output.loss.backward()
    return output, leaf.grad.cpu()


def test_an_announced_or_assumed_factor_changes_no_bit_and_is_checked(backend):
    """One kernel that reads each row once has no sets: two kernels make the gradient, with any factor."""
    batch = float32(random_batch([5, 4]))
    shared = {"sampling_support": sets_of(batch, 3)} | every_term(batch) | {"temperature": 0.7}
    _, want = run_loss("grpo", batch, backend, **shared)
    for factor in (1.0, AssumedScale()):
        assert torch.equal(run_loss("grpo", batch, backend, loss_scale=factor, **shared)[1], want)
    if KERNEL_DEVICE == "cpu":
        with pytest.raises(ConfigError, match="loss_scale=2.0 was declared and backward delivers 1.0"):
            run_loss("grpo", batch, backend, loss_scale=2.0, **shared)


@pytest.mark.skipif(KERNEL_DEVICE == "cuda", reason="on CUDA nothing is read")
def test_a_logit_outside_the_set_is_read_where_the_entropy_is(backend):
    batch = float32(random_batch([5, 4], num_masked=(0, 0)))
    batch.logits[6, (int(batch.labels[6]) + 1) % COLUMNS] = math.nan
    support, terms = sets_of(batch, 3), every_term(batch)
    with pytest.raises(DataError, match="document 1 of the micro-batch has 1 unmasked tokens .* not finite, in entropy"):
        run_loss("grpo", batch, backend, sampling_support=support, **terms)
    without = terms | {"entropy_coefficient": 0.0, "metrics": "basic"}
    output, gradient = run_loss("grpo", batch, backend, sampling_support=support, **without)
    assert output.loss.isfinite() and gradient.isfinite().all()


@pytest.mark.skipif(KERNEL_DEVICE == "cuda", reason="on CUDA nothing is read")
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_kept_logit_that_is_not_finite_is_named(value, backend):
    """-inf is a probability of 0: of the token that was drawn it is an error, of another one it is none."""
    batch = float32(random_batch([5, 4], num_masked=(0, 0)))
    label = int(batch.labels[6])
    batch.logits[6, label] = value
    with pytest.raises(DataError, match="document 1 of the micro-batch has 1 unmasked tokens .* not finite, in log_probs"):
        run_loss("grpo", batch, backend, sampling_support=sets_of(batch, 3))
    batch.logits[6, label], batch.logits[6, (label + 3) % COLUMNS] = 0.5, -math.inf
    output, gradient = run_loss("grpo", batch, backend, sampling_support=sets_of(batch, 3))
    assert output.loss.isfinite() and gradient.isfinite().all() and gradient[6, (label + 3) % COLUMNS] == 0


# Of a token 0 in a vocabulary of 11 -> whether its score is a number.
ON_A_DEVICE = {
    "a right set": ([0, 1], True),
    "without the action": ([8, 9], False),
    "empty": ([], False),
    "an id twice": ([0, 0, 3], False),
    "as many ids as the vocabulary, one of them twice": ([*range(10), 3], False),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("which", ON_A_DEVICE)
def test_a_device_is_not_waited_for_and_counts_a_wrong_set_as_not_finite(which, backend):
    """A check would wait there. Nothing raises: the step is stopped by the count. Of a masked token nothing counts, and the
    neighbours keep their gradient."""
    kept, is_right = ON_A_DEVICE[which]
    batch = float32(random_batch([5, 0, 4], num_masked=(0, 0, 1)))
    batch.labels[2] = batch.labels[5] = 0
    sets = [[int(label), (int(label) + 1) % COLUMNS] for label in batch.labels]
    sets[2] = sets[5] = kept
    with simulated_cuda() as seen:
        support = SamplingSupport.from_lists(sets).to(torch.device("cuda"))
        arguments, leaf = [value.to("cuda") for value in batch.arguments()], batch.logits.to("cuda").requires_grad_()
        options = {**CLIP, "tp_group": SINGLE, "cp_group": SINGLE, "metrics": "with_entropy", "backend": backend}
        seen.clear()
        output = policy_loss("grpo", leaf * 1, *arguments, sampling_support=support, **options)
        output.loss.backward()
        assert seen == []
        assert output.num_nonfinite.cpu().tolist() == [int(not is_right), 0, 0]
        outside, gradient = int(output.metrics.support[-1].cpu()), leaf.grad.cpu()
    assert outside == (which == "without the action")
    others = torch.arange(9) != 2
    assert gradient[others].isfinite().all()
    # A clipped row and the masked one have none.
    assert set((gradient[others] != 0).sum(1).tolist()) == {0, 2}
