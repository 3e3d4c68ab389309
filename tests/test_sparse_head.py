"""The fused head with sets of kept ids: the products of pairs, their scores and gradients, and what the head makes of them.

Kernels are interpreted on a CPU, compiled on a GPU. Their machine code: tests/test_kernel_code.py. tests/test_generated_steps.py
has the head's losses, corrections and layouts with sets."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers import KERNEL_DEVICE, without_needless_clip
from linear_cases import VOCAB_SIZE as HEAD_COLUMNS
from linear_cases import HeadBatch, LargestNewTensor, every_term, head_batch, run

from megatron_rl.config import Backend
from megatron_rl.layout.groups import SINGLE
from megatron_rl.layout.sampling_support import SamplingSupport
from megatron_rl.ops.backends import vocab_shard
from megatron_rl.ops.linear_log_probs import pair_kernels
from megatron_rl.ops.log_probs_torch import working_dtype
from megatron_rl.ops.support import Pairs, make_pairs, pair_gradient, score_pairs
from megatron_rl.policy_loss import linear_policy_loss

pytestmark = pytest.mark.kernel
TEMPERATURE, VOCAB_SIZE = 0.7, 37
# Empty, alone, two, a block of pairs and one more, more than two blocks, all but one, all. Row 3 and 8 share most ids with others.
SIZES = [0, 1, 2, 8, 9, 20, 36, 37, 3]
# The width of rows whose columns are not adjacent in memory.
COLUMN_BY_COLUMN = 21
# Rows that are in no product: empty, masked.
IDLE = [0, 5]
LIVE = torch.tensor([0, 1, 2, 3, 4, 6, 7, 8])
# float32 sums of H products in another order: 1040 terms of size 1/32 keep five digits. A 16-bit dX has one rounding more, and
# the interpreter truncates to bfloat16.
TOLERANCES = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-11}
BACKENDS = {Backend.TORCH: tuple(TOLERANCES), Backend.TRITON: (torch.float32, torch.bfloat16, torch.float16)}
CASES = [pytest.param(backend, dtype, id=f"{backend} {dtype}") for backend, dtypes in BACKENDS.items() for dtype in dtypes]


class Case:
    """Hidden states and a weight with NaN wherever a head of pairs must not read."""

    def __init__(self, dtype: torch.dtype, width: int, *, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        lists = [torch.randperm(VOCAB_SIZE, generator=generator)[:size].tolist() for size in SIZES]
        self.support = SamplingSupport.from_lists(lists)
        self.labels = torch.tensor([ids[-1] if ids else 0 for ids in lists])
        self.hidden = torch.randn(len(SIZES), width, generator=generator, dtype=torch.float64).to(dtype)
        self.weight = (torch.randn(VOCAB_SIZE + 1, width, generator=generator, dtype=torch.float64) / width**0.5).to(dtype)
        self.c = torch.randn(len(SIZES), generator=generator, dtype=torch.float64).to(working_dtype(self.hidden))
        self.shard = vocab_shard(VOCAB_SIZE + 1, TEMPERATURE, VOCAB_SIZE, SINGLE)
        self.hidden[IDLE], self.weight[VOCAB_SIZE] = math.nan, math.nan
        if width == COLUMN_BY_COLUMN:
            self.hidden, self.weight = (rows.t().contiguous().t() for rows in (self.hidden, self.weight))

    def pairs(self) -> Pairs:
        return make_pairs(self.support, LIVE, self.labels.to(KERNEL_DEVICE), self.shard)

    def run(self, backend: Backend, *, max_bytes: int = 2**31) -> dict[str, torch.Tensor]:
        pairs, kernels, options = self.pairs(), pair_kernels(backend), {"max_bytes": max_bytes}
        hidden, weight, c = (tensor.to(KERNEL_DEVICE) for tensor in (self.hidden, self.weight, self.c))
        scores = score_pairs(hidden, weight, pairs, self.shard, SINGLE, kernels, **options)
        g = pair_gradient(scores, pairs, c[pairs.rows], self.shard)
        of_hidden, of_weight = torch.zeros_like(hidden), torch.ones_like(weight, dtype=working_dtype(weight))
        kernels.add_hidden(g, pairs, weight, out=of_hidden, **options)
        kernels.add_weight(g, pairs, hidden, out=of_weight, **options)
        found = {"log_probs": scores.log_probs, "of_hidden": of_hidden, "of_weight": of_weight}
        return {name: tensor.cpu() for name, tensor in found.items()}

    def truth(self) -> dict[str, torch.Tensor]:
        """Row by row, in float64, by autograd."""
        hidden, weight = self.hidden.double().requires_grad_(), self.weight.double().requires_grad_()
        log_probs = [torch.tensor(math.nan, dtype=torch.float64)]  # of the empty set
        for row in LIVE[1:].tolist():
            kept = self.support.ids[self.support.offsets[row] : self.support.offsets[row + 1]].long()
            z = weight[kept] @ hidden[row] / TEMPERATURE
            log_probs.append(z.log_softmax(0)[kept == self.labels[row]][0])
            (log_probs[-1] * self.c[row]).backward()
        return {"log_probs": torch.stack(log_probs).detach(), "of_hidden": hidden.grad, "of_weight": weight.grad + 1}


# One vector and less, whole blocks, blocks and a rest, no whole vector.
@pytest.mark.parametrize("width", [8, 1024, 1040, COLUMN_BY_COLUMN])
@pytest.mark.parametrize(("backend", "dtype"), CASES)
def test_scores_and_gradients_are_those_of_the_kept_columns_alone(backend, dtype, width):
    """NaN in masked and padded rows says that nothing else was read. A set of one id scores exactly 0, without a gradient."""
    case = Case(dtype, width)
    found, again, wanted = case.run(backend), case.run(backend), case.truth()
    assert all(torch.equal(again[name].nan_to_num(), tensor.nan_to_num()) for name, tensor in found.items()), "two runs agree"
    for name, tensor in found.items():
        tolerance = TOLERANCES[dtype] if name == "of_hidden" else TOLERANCES[working_dtype(case.hidden)]
        largest = float(wanted[name].nan_to_num().abs().max())
        assert torch.allclose(tensor.double(), wanted[name], rtol=0, atol=tolerance * largest, equal_nan=True), name
    assert found["log_probs"][1] == 0
    assert not found["of_hidden"][[*IDLE, 1]].any() and (found["of_weight"][VOCAB_SIZE] == 1).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_kept_logits_far_below_the_others_and_below_0_keep_their_digits(backend):
    """Their own maximum: z = -300 and -301 beside 0. e^-300 is 0 in float32. log_prob = -ln(1 + e^-1)."""
    weight = torch.tensor([[-300.0], [-301.0], [0.0]], device=KERNEL_DEVICE)
    support, shard = SamplingSupport.from_lists([[0, 1]]), vocab_shard(3, 1.0, None, SINGLE)
    pairs = make_pairs(support, torch.tensor([0]), torch.tensor([0], device=KERNEL_DEVICE), shard)
    one = torch.ones(1, 1, device=KERNEL_DEVICE)
    scores = score_pairs(one, weight, pairs, shard, SINGLE, pair_kernels(backend), max_bytes=100)
    assert float(scores.log_probs) == pytest.approx(-math.log1p(math.exp(-1)), rel=1e-6)
    g = pair_gradient(scores, pairs, one[0], shard)
    p = 1 / (1 + math.exp(-1))
    assert g.tolist() == pytest.approx([1 - p, -(1 - p)], rel=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_label_outside_its_set_and_a_wrong_id_give_no_number(backend):
    """On CUDA no check has read the sets: another label, an id below 0, one twice, one past the vocabulary, and a right row."""
    support = SamplingSupport.from_lists([[4], [-1, 2], [2, 2], [2, 5], [1, 2]])
    labels, shard = torch.tensor([3, 2, 2, 2, 2], device=KERNEL_DEVICE), vocab_shard(5, 1.0, None, SINGLE)
    pairs = make_pairs(support, torch.arange(5), labels, shard)
    hidden, weight = torch.ones(5, 1, device=KERNEL_DEVICE), torch.ones(5, 1, device=KERNEL_DEVICE)
    found = score_pairs(hidden, weight, pairs, shard, SINGLE, pair_kernels(backend), max_bytes=100).log_probs.cpu()
    assert found[0] == -math.inf and found[1:4].isnan().all() and float(found[4]) == pytest.approx(-math.log(2))


# Sums of a few dozen float64 products in another order.
EXACT = 1e-12
# Of a third of the rows one id, then two, a few, eight, most and all of the vocabulary.
HEAD_SIZES = (1, 2, 5, 1, 8, 15, 1, HEAD_COLUMNS, 3)


def sets(case: HeadBatch, sizes: tuple[int, ...] = HEAD_SIZES, *, seed: int = 3) -> SamplingSupport:
    """The label is in each set; at a tp of 4 some miss a shard and some straddle all. Masked rows hold junk."""
    generator = torch.Generator().manual_seed(seed)
    vocab_size, lists = case.weight.shape[0], []
    for token, label in enumerate(case.batch.labels.tolist()):
        ids = torch.randperm(vocab_size, generator=generator)[: sizes[token % len(sizes)]].tolist()
        ids = ids if label in ids else [label, *ids[1:]]
        lists.append(ids if case.batch.loss_mask[token] else [[], [-1, 3, 3], ids][token % 3])
    return SamplingSupport.from_lists(lists)


fused = partial(without_needless_clip, linear_policy_loss, "grpo")


def terms(which: str, case: HeadBatch) -> dict:
    """none: nothing reads the vocabulary; entropy: it does, as a bonus and a metric, beside a KL term."""
    return {"metrics": "basic"} if which == "none" else every_term(case.batch)


def test_nothing_of_the_logits_size_is_made():
    """Beside the weight and its gradient: vectors of [T] and rows of pairs, which the budget bounds."""
    case = head_batch([300, 212], seed=2, hidden_size=16, vocab_size=8192).to(torch.float32)
    case = replace(case, batch=replace(case.batch, loss_mask=torch.ones(512, dtype=torch.bool)))
    with LargestNewTensor() as made:
        run(fused, case, sampling_support=sets(case, (1, 1, 2, 30, 1, 2, 9, 1)), max_logits_bytes=2**18)
    assert max(size for size, _ in made.sizes) <= case.weight.numel() < 0.05 * 512 * 8192


@pytest.mark.parametrize("which", ["none", "entropy"])
@pytest.mark.parametrize("loss_scale", [None, 3.0])
def test_main_grad_gets_the_sum_unrounded(which, loss_scale):
    """In forward with an declared factor, else in backward; beside what is there."""
    case = head_batch().to(torch.bfloat16)
    options = {"sampling_support": sets(case), **terms(which, case)}
    want = run(fused, head_batch().to(torch.bfloat16).to(torch.float32), factor=3.0, **options)
    parameter = torch.nn.Parameter(case.weight)
    parameter.main_grad, parameter.grad_added_to_main_grad = torch.ones(parameter.shape), False
    hidden = case.hidden.clone().requires_grad_()
    labels, old, *rest = case.batch.arguments()
    keywords = {**options, "clip_ratio_low": 0.1, "clip_ratio_high": 0.15, "fp32_logits": True, "loss_scale": loss_scale}
    output = linear_policy_loss("grpo", hidden, parameter, labels, old, *rest, **keywords)
    (output.loss * 3.0).backward()
    assert parameter.grad_added_to_main_grad
    # float32 sums of bfloat16's products; the other head rounds nothing either.
    torch.testing.assert_close(parameter.main_grad - 1, want.weight_gradient, rtol=1e-4, atol=3e-6)
    # bfloat16, rounded once or twice; beside an entropy the sum of two such parts, which may cancel.
    atol = 2**-8 * float(want.hidden_gradient.abs().max()) if which == "entropy" else 1e-5
    torch.testing.assert_close(hidden.grad.float(), want.hidden_gradient, rtol=2**-7, atol=atol)
