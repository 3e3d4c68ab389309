"""A loss_scale that is assumed: the bits of a declared one where the guess was right, and one rounding more where not.

Interpreted on a CPU, compiled on a GPU. The kernel that makes the gradient: tests/test_row_kernels.py.
"""

from __future__ import annotations

import contextlib
import math
from argparse import Namespace
from collections.abc import Iterator
from unittest import mock

import pytest
import roll_cases
import torch
from adapter_cases import RowCase
from helpers import CLIP, KERNEL_DEVICE, Batch
from host_steps import Case, host_batch, host_logits, never
from torch import Tensor

from megatron_rl import AssumedScale
from megatron_rl.config import Backend
from megatron_rl.hosts import roll_loss
from megatron_rl.hosts.loss import custom_loss, is_last_reader, read_plan
from megatron_rl.layout.groups import SINGLE
from megatron_rl.policy_loss import policy_loss

pytest.importorskip("triton")
from test_row_kernels import IS_INTERPRETED, REAL, SMALL_GRADIENT, few_lanes, make_batch

from megatron_rl.ops.rescale_triton import rescale

pytestmark = pytest.mark.kernel
FACTOR = 3.0
BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32
# A rounding of the product, where the interpreter cuts bfloat16 off, and before it those of the ratio and of float32.
ROUNDINGS = {BFLOAT16: (1 if IS_INTERPRETED else 0.5) * 2**-7 + 2**-22, FLOAT32: 2 * 2**-24 + 2**-46}


@contextlib.contextmanager
def small() -> Iterator[list[str]]:
    """Rows of 77 columns have full blocks, a masked one and edges. Gives the names of the kernels that are launched."""
    with few_lanes() as launches, mock.patch.dict(rescale.__kwdefaults__, SMALL_GRADIENT):
        yield launches


class Forward:
    """A loss on logits of its own."""

    def __init__(self, batch: Batch, loss_scale: AssumedScale | float | None, **options):
        self.batch, self.leaf = batch, batch.logits.clone().requires_grad_()
        self.logits = self.leaf * 1
        options = {"temperature": 0.7, "vocab_size": REAL, "backend": "triton", "tp_group": SINGLE, **CLIP, **options}
        self.loss = policy_loss("grpo", self.logits, *batch.arguments(), loss_scale=loss_scale, **options).loss

    def backward(self, factor: float) -> Tensor:
        """The gradient of the leaf."""
        self.loss.backward(torch.full_like(self.loss, factor))
        return self.leaf.grad


def terms_of(batch: Batch) -> dict:
    """Importance weights, a KL and an entropy term, and metrics."""
    wave = 1.2 + torch.cos(batch.old_log_probs + batch.labels)
    terms = {"ref_log_probs": batch.old_log_probs - 0.1, "kl_coefficient": 0.2, "entropy_coefficient": 0.3}
    terms["regularizer_weights"] = 0.5 + torch.arange(len(batch.documents), dtype=torch.float32)
    return {"importance_weights": wave, "metrics": "with_entropy", **terms}


def declared(batch: Batch, factor: float, **options) -> Tensor:
    return Forward(batch, factor, **options).backward(factor)


def assert_one_rounding(found: Tensor, made: Tensor, ratio: float) -> None:
    """found is made x ratio, as float64 has it."""
    truth = made.double() * ratio
    # The numbers that bfloat16 and float32 cannot hold with all their digits.
    assert ((found.double() - truth).abs() <= ROUNDINGS[found.dtype] * truth.abs() + 2.0**-125).all()


@pytest.mark.parametrize(
    ("dtype", "inplace", "has_terms"),
    [(BFLOAT16, True, False), (FLOAT32, False, False), (BFLOAT16, False, True), (FLOAT32, True, True)],
)
def test_a_right_guess_has_the_bits_of_a_declared_factor(dtype, inplace, has_terms):
    batch, scale = make_batch(dtype), AssumedScale()
    options = {"inplace": inplace, **(terms_of(batch) if has_terms else {})}
    with small() as launches:
        Forward(batch, scale, **options).backward(FACTOR)
        launches.clear()
        found = Forward(batch, scale, **options).backward(FACTOR)
        assert launches.count("one_read_kernel") == launches.count("rescale_kernel") == 1
        assert "logits_gradient_kernel" not in launches
        wanted = declared(batch, FACTOR, **options)
    assert torch.equal(found, wanted) and found.any()


@pytest.mark.parametrize(
    ("factor", "dtype", "inplace"),
    [(0.3, BFLOAT16, True), (-7.0, FLOAT32, False), (2.0**20, BFLOAT16, False), (1e-20, FLOAT32, True)],
)
def test_a_wrong_guess_costs_one_rounding(factor, dtype, inplace):
    """The first guess is 1. Of a product in float64 with the gradient of that guess."""
    batch = make_batch(dtype)
    with small():
        found = Forward(batch, AssumedScale(), inplace=inplace).backward(factor)
        made = declared(batch, 1.0, inplace=inplace)
    assert_one_rounding(found, made, float(torch.tensor(factor, dtype=FLOAT32)))


def test_a_forward_keeps_what_it_has_assumed_while_others_come_between():
    """Pipelines run several forwards before their backwards: F F B B, with a factor that changes from step to step."""
    batch, scale = make_batch(), AssumedScale()
    with small():
        wanted = {factor: declared(batch, factor) for factor in (4.0, 0.5)}
        for factor in (4.0, 0.5):  # each ratio is a power of two, so that nothing is rounded
            first, second = Forward(batch, scale), Forward(batch, scale)
            assert torch.equal(first.backward(factor), wanted[factor])
            third = Forward(batch, scale)
            assert torch.equal(second.backward(factor), wanted[factor])
            assert torch.equal(third.backward(factor), wanted[factor])


@pytest.mark.parametrize("factor", [0.0, math.inf, -math.inf, math.nan, 2.0**-41, 2.0**41])
def test_what_cannot_be_assumed_is_delivered_and_forgotten(factor):
    """A guess of 0 would give zeros, and no factor makes a gradient of them."""
    batch, scale = make_batch(), AssumedScale()
    with small():
        Forward(batch, scale).backward(FACTOR)
        found, wanted = Forward(batch, scale).backward(factor), declared(batch, FACTOR)
        after = Forward(batch, scale).backward(FACTOR)
    if math.isfinite(factor):
        assert_one_rounding(found, wanted, factor / FACTOR)
        assert found.any() == (factor != 0)
    else:
        assert (found.isnan() | found.isinf())[batch.loss_mask & wanted.ne(0).any(1)].all()
    assert torch.equal(after, wanted)


# In miles and slime


def args_of(case: Case, **settings) -> Namespace:
    args = case.args()
    vars(args).update({"policy_loss_backend": "triton", **settings})
    return args


def host_step(case: Case, args: Namespace, factor: float) -> tuple[tuple, bool]:
    """(gradient, loss and metrics, whether the host's logits are what they were) of one micro-batch, with the host's factor."""
    samples = case.samples()
    leaf = host_logits(case, samples, samples, [sample.logits for sample in samples], 0, 1).float().requires_grad_()
    given = leaf * 1
    loss, metrics = custom_loss(args, host_batch(case, samples, samples, 0, 1), given, never)
    (loss * factor).backward()
    return (leaf.grad.tolist(), loss.item(), metrics), torch.equal(given.nan_to_num(), leaf.nan_to_num())


@pytest.mark.interpreter
@pytest.mark.parametrize(
    "reader", [{"custom_loss_function_path": "mine.loss"}, {"recompute_loss_function": True}], ids=["the user", "a second run"]
)
@pytest.mark.parametrize("host", ["miles", "slime"])
def test_a_host_gets_one_read_where_nobody_reads_the_logits_afterwards(host, reader):
    """Gradient and metrics are those of two kernels, with the entropy of the logits as they came."""
    case = Case(host=host, settings={"observe_training_entropy": True} if host == "miles" else {})
    args, cautious = args_of(case), args_of(case, **reader)
    with small() as launches:
        for factor in (0.25, 0.25, 0.5):
            launches.clear()
            found, is_untouched = host_step(case, args, factor)
            assert not is_untouched
            assert launches.count("one_read_kernel") == launches.count("rescale_kernel") == 1, launches
            launches.clear()
            assert host_step(case, cautious, factor) == (found, True)
            assert not {"one_read_kernel", "rescale_kernel"} & {*launches}
            assert "entropy_loss" in found[-1]


@pytest.mark.parametrize(
    ("cp_size", "allgather_cp", "backend", "is_last"),
    [(2, True, "triton", False), (2, False, "triton", True), (1, True, "triton", True), (1, False, "torch", False)],
)
def test_the_host_reads_the_logits_again_under_allgather_cp(cp_size, allgather_cp, backend, is_last):
    """It adds 0 x their sum to the loss, so that each rank has a backward."""
    case = Case("allgather" if allgather_cp else "thd")
    plan = read_plan(args_of(case, policy_loss_backend=backend))
    assert is_last_reader(plan, torch.zeros(2, 3, device=KERNEL_DEVICE), mock.Mock(size=lambda: cp_size)) == is_last


# In ROLL


@pytest.mark.interpreter
@pytest.mark.parametrize("packing", ["rows", "a call a sequence"])
def test_roll_gets_one_read_of_rows_and_not_of_packed_sequences(packing, monkeypatch):
    """Packed sequences share one memory, which none may write over."""
    case = RowCase(loss="grpo", aggregation="token_mean", sizes=(3, 5), num_samples=8, packing=packing)
    step = roll_cases.ADAPTER.step(case)
    monkeypatch.setattr("megatron_rl.policy_loss.inputs.resolve_backend", lambda *given: Backend.TRITON)
    with small() as launches:
        wanted = roll_cases.ADAPTER.run(case, step)
        assert not {"one_read_kernel", "rescale_kernel"} & {*launches}
        launches.clear()
        monkeypatch.setattr(roll_loss, "resolve_backend", lambda *given: Backend.TRITON)
        found = roll_cases.ADAPTER.run(case, step)
    assert launches.count("one_read_kernel") == launches.count("rescale_kernel") == (2 if packing == "rows" else 0)
    assert found.loss == wanted.loss and all(map(torch.equal, found.gradients, wanted.gradients))
