"""The loss kernels on [T] and [N] numbers: what a caller's tensors may be, and what is launched.

Their numbers against the oracle: tests/test_generated_steps.py. Interpreted here, compiled on a GPU.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import CLIP, KERNEL_DEVICE, Batch, float32, placed, random_batch
from launches import counted_launches
from loss_backends import TRITON
from sass_gate import TorchOperations
from torch import Tensor

from megatron_rl.declare import register_policy_loss
from megatron_rl.policy_loss import policy_loss

pytest.importorskip("triton")
from megatron_rl.policy_loss.reduce_triton import document_sums_kernel

pytestmark = pytest.mark.kernel


def make_batch() -> Batch:
    """float32; blocks have 4 tokens: no token, one, one less than a block, a block, one more, two and a bit, all masked."""
    batch = float32(random_batch([0, 1, 3, 4, 5, 11, 5], num_masked=(0, 0, 1, 0, 2, 3, 5)))
    return replace(placed(batch, KERNEL_DEVICE), token_weights=batch.token_weights)


def every_term(batch: Batch) -> dict:
    wave = torch.cos(torch.arange(len(batch.labels), device=KERNEL_DEVICE))
    return {
        "importance_weights": 1.2 + wave,
        "ref_log_probs": (batch.old_log_probs - 0.1 * wave).bfloat16().float(),
        "kl_coefficient": 0.7,
        "entropy_coefficient": 0.3,
        "regularizer_weights": batch.token_weights + 1,
        "token_counts": torch.tensor([int(batch.loss_mask[document].sum()) for document in batch.documents]),
        "metrics": "with_entropy",
    }


def run(batch: Batch, options: dict, kind: str = "gspo") -> list[Tensor]:
    """Loss, log-probabilities, counts, metrics and the gradient by the logits."""
    leaf = batch.logits.detach().clone().requires_grad_()
    with TRITON.small_blocks():
        output = policy_loss(kind, leaf, *batch.arguments(), backend="triton", **CLIP, **options)
        output.loss.backward()
    return [output.loss.detach(), output.log_probs, output.num_nonfinite, output.metrics.values, leaf.grad]


def test_dtypes_and_strides_of_the_callers_tensors_do_not_matter():
    """FB-80: bf16, float64, int32 counts and strided or expanded tensors give what plain ones of the same numbers give."""
    batch = make_batch()
    rounded = {name: getattr(batch, name).bfloat16().float() for name in ("old_log_probs", "advantages")}
    batch = replace(batch, **rounded)
    options = every_term(batch)
    odd = replace(
        batch,
        old_log_probs=batch.old_log_probs.bfloat16(),
        loss_mask=batch.loss_mask.long(),
        advantages=batch.advantages.bfloat16(),
        token_weights=batch.token_weights.double(),
    )
    changed = {
        "ref_log_probs": options["ref_log_probs"].double(),
        "importance_weights": torch.stack([options["importance_weights"]] * 2, 1)[:, 0],
        "token_counts": options["token_counts"].int(),
    }
    assert all(map(torch.equal, run(odd, options | changed), run(batch, options)))
    ones = torch.ones(1, device=KERNEL_DEVICE).expand_as(batch.old_log_probs)
    expanded, plain = (run(batch, options | {"importance_weights": weights}) for weights in (ones, ones.clone()))
    assert all(map(torch.equal, expanded, plain))


def test_varying_advantages_are_counted(monkeypatch):
    """1e-3 in one token: the whole document. On a CPU it raises; where nobody looks, as on a GPU, it is counted."""
    batch = make_batch()
    monkeypatch.setattr("megatron_rl.policy_loss.api.refuse_bad_data", lambda *arguments: None)
    sizes = torch.tensor([len(document) for document in batch.documents], device=KERNEL_DEVICE)
    varying = batch.advantages.repeat_interleave(sizes)
    varying[batch.documents[4][-1]] += 1e-3
    options = {"advantages_per": "token", "metrics": "basic"}
    assert run(replace(batch, advantages=varying), options)[2].tolist() == [0, 0, 0, 0, 3, 0, 0]


def test_a_loss_without_a_triton_version_launches_no_kernel_of_a_loss():
    """A loss that is a function of torch tensors alone is computed in torch, whatever the backend."""
    register_policy_loss("torch_alone", clip_ratios=(0.2, 0.2))(
        lambda log_ratio, advantages, *, clip_ratio_low, clip_ratio_high: -log_ratio.exp() * advantages
    )
    with counted_launches() as launches:
        run(make_batch(), {"metrics": "basic"}, "torch_alone")
    assert launches == ["list_rows_kernel", "row_statistics_kernel", "logits_gradient_kernel"]


@pytest.mark.parametrize("coefficient", [0.0, 0.1])
def test_backward_is_a_multiplication_for_each_coefficient_and_one_kernel(monkeypatch, coefficient):
    """The first `ones_like` is autograd's own. tests/test_kernel_code.py counts what forward launches beside its kernels."""
    batch = make_batch()
    options = {"entropy_coefficient": coefficient, "regularizer_weights": batch.token_weights, "backend": "triton"}
    output = policy_loss("gspo", batch.logits.requires_grad_(), *batch.arguments(), **options)
    launches: list[str] = []
    operations: list[str] = []
    # The interpreter is made of torch operations: nothing is executed.
    monkeypatch.setattr(type(document_sums_kernel), "run", lambda kernel, *a, **k: launches.append(kernel.fn.__name__))
    with TorchOperations(operations):
        output.loss.backward()
    # Fresh memory is filled with NaN by conftest.py.
    found = [name for name in operations if not name.startswith("fill_")]
    assert launches == ["logits_gradient_kernel"]
    assert found == ["ones_like.default"] + ["mul.Tensor"] * (2 if coefficient else 1)
