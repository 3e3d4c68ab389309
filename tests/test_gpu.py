"""What only a GPU can show: the losses there without a synchronisation, in 16 bits, and the training command on NCCL."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from megatron_rl import StepTotals, grpo_loss, gspo_loss, regularizer_weights, sample_token_weights, vocab_parallel_log_probs
from megatron_rl.layout import SINGLE

pytestmark = pytest.mark.gpu


def make_step(device: str, dtype: torch.dtype):
    """Three documents, the second without a token, a padding tail, a masked row of NaN."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(24, 1000, generator=generator).to(dtype)
    labels = torch.randint(0, 990, (24,), generator=generator)
    cu_seqlens = torch.tensor([0, 9, 9, 20], dtype=torch.int32)
    mask = torch.rand(24, generator=generator) < 0.7
    mask[3], mask[0] = False, True
    logits[3] = float("nan")
    counts = torch.tensor([int(mask[:9].sum()), 0, int(mask[9:20].sum())])
    totals = StepTotals(num_samples=3, num_prompts=None, num_tokens=int(counts.sum()))
    weights, regularizers = sample_token_weights("token_mean", counts, totals), regularizer_weights(counts, totals)
    clean = logits.float().nan_to_num(0.0)
    log_probs = torch.log_softmax(clean[:, :990] / 0.7, -1).gather(1, labels[:, None])[:, 0]
    old = log_probs + 0.1 * torch.randn(24, generator=generator)
    arguments = [logits, labels, old, torch.tensor([1.0, 0.0, -0.5]), mask, cu_seqlens, weights]
    options = {
        "temperature": 0.7,
        "vocab_size": 990,
        "ref_log_probs": old - 0.1,
        "kl_coefficient": 0.1,
        "entropy_coefficient": 0.01,
        "regularizer_weights": regularizers,
    }
    move = lambda value: value.to(device) if isinstance(value, torch.Tensor) else value  # noqa: E731
    return [move(value) for value in arguments], {name: move(value) for name, value in options.items()}


# float32 on both sides: sums of 990 exponentials in another order. 16 bits: one rounding of the gradient, 2^-8 for bfloat16.
TOLERANCES = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@pytest.mark.parametrize("loss", [grpo_loss, gspo_loss], ids=lambda loss: loss.__name__)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("inplace", [False, True], ids=["out of place", "in place"])
def test_the_loss_on_the_gpu_is_that_on_the_cpu(loss, dtype, inplace):
    """FB-56 on the GPU too: masked rows of NaN are computed there and taken out afterwards."""
    results = []
    for device in ("cpu", "cuda"):
        (logits, *others), options = make_step(device, dtype)
        leaf = logits.requires_grad_()
        output = loss(leaf * 1.0, *others, inplace=inplace, metrics="with_entropy", tp_group=SINGLE, cp_group=SINGLE, **options)
        output.loss.backward()
        results.append((output, leaf.grad))
    (on_cpu, expected), (on_gpu, found) = results
    assert found.is_cuda and found.dtype == dtype
    torch.testing.assert_close(on_gpu.loss.cpu(), on_cpu.loss, rtol=1e-4, atol=1e-5)
    error = (found.cpu().double() - expected.double()).norm() / expected.double().norm()
    assert error < TOLERANCES[dtype]
    torch.testing.assert_close(on_gpu.metrics.values.cpu(), on_cpu.metrics.values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("loss", [grpo_loss, gspo_loss], ids=lambda loss: loss.__name__)
def test_the_loss_does_not_synchronise(loss):
    """One hidden .item() a micro-batch stalls the pipeline: torch raises on it in this mode."""
    (logits, *others), options = make_step("cuda", torch.bfloat16)
    options["metrics"] = "with_entropy"
    leaf = logits.requires_grad_()
    loss(leaf, *others, tp_group=SINGLE, cp_group=SINGLE, **options).loss.backward()  # what is allocated once
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss(leaf, *others, tp_group=SINGLE, cp_group=SINGLE, **options).loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_non_finite_token_is_counted_and_not_raised():
    """FB-58: on CUDA the count travels with the output and the driver of the step looks at it."""
    (logits, labels, old, *others), options = make_step("cuda", torch.float32)
    old[0] = float("inf")
    output = gspo_loss(logits, labels, old, *others, tp_group=SINGLE, cp_group=SINGLE, **options)
    assert output.num_nonfinite.tolist() == [1, 0, 0]


def test_float64_logits_keep_float64():
    logits = torch.randn(5, 70, dtype=torch.float64, device="cuda")
    labels = torch.randint(0, 70, (5,), device="cuda")
    expected = torch.log_softmax(logits, -1).gather(1, labels[:, None])[:, 0]
    torch.testing.assert_close(vocab_parallel_log_probs(logits, labels, tp_group=SINGLE), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.megatron
def test_the_training_command_learns_on_one_gpu(tmp_path):
    """NCCL, bfloat16 and the GPU's own attention: the demo's reward rises from chance."""
    command = [sys.executable, "-m", "megatron_rl", "train", "--preset", "demo", "--num-rollouts", "40", "--json"]
    command += ["--output-dir", str(tmp_path / "run"), "--no-tensorboard", "--no-plot"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "0"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, env=environment)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["first_reward"] < 0.3 and summary["last_reward"] > 0.6
