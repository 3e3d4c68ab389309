"""What only a GPU can show: compiled kernels without a synchronisation, in a CUDA graph, compiled once, and training on NCCL.

The kernel tests (marker `kernel`) run compiled there too; what they say is not repeated here.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import without_needless_clip

from megatron_rl import StepTotals, grpo_loss, gspo_loss, regularizer_weights, sample_token_weights, vocab_parallel_log_probs
from megatron_rl.declare import policy_loss_names, register_policy_loss
from megatron_rl.layout import SINGLE
from megatron_rl.layout.groups import ParallelGroups
from megatron_rl.megatron.schedule import scale_for_schedule
from megatron_rl.metrics.step import report_pairs
from megatron_rl.ops import backends
from megatron_rl.ops.assumed_scale import AssumedScale
from megatron_rl.policy_loss import policy_loss

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


@pytest.mark.parametrize("loss", [grpo_loss, gspo_loss], ids=lambda loss: loss.args[0])
@pytest.mark.parametrize(("dtype", "inplace"), [*((dtype, False) for dtype in TOLERANCES), (torch.bfloat16, True)], ids=str)
def test_the_loss_on_the_gpu_is_that_on_the_cpu(loss, dtype, inplace):
    """FB-56 on the GPU too: Triton there, torch here. The rounding of 16-bit gradients is seen here alone."""
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


@pytest.mark.parametrize("loss", [grpo_loss, gspo_loss], ids=lambda loss: loss.args[0])
@pytest.mark.parametrize("of_documents", ["cuda", "cpu"])
def test_the_loss_does_not_synchronise(loss, of_documents):
    """One hidden .item() a micro-batch stalls the pipeline: torch raises on it in this mode. [N] numbers may be the host's."""
    (logits, *others), options = make_step("cuda", torch.bfloat16)
    others[4:] = [numbers.to(of_documents) for numbers in others[4:]]
    options["regularizer_weights"] = options["regularizer_weights"].to(of_documents)
    options["metrics"] = "with_entropy"
    leaf = logits.requires_grad_()
    loss(leaf, *others, tp_group=SINGLE, cp_group=SINGLE, **options).loss.backward()  # what is allocated once
    with synchronisation_refused():
        loss(leaf, *others, tp_group=SINGLE, cp_group=SINGLE, **options).loss.backward()


@contextlib.contextmanager
def synchronisation_refused():
    """torch raises on each operation for which the host would wait."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("per_token", [False, True], ids=["unit", "per-token"])
def test_the_seam_to_the_schedule_does_not_synchronise(per_token):
    """It runs in every micro-batch, between forward and backward: a blocking copy there ends the host's run-ahead."""
    (logits, *others), options = make_step("cuda", torch.bfloat16)
    output = gspo_loss(logits, *others, tp_group=SINGLE, cp_group=SINGLE, metrics="basic", **options)
    config = SimpleNamespace(calculate_per_token_loss=per_token)
    shared = {"totals": StepTotals(3, None, 9), "config": config, "groups": ParallelGroups()}
    count = others[3].sum()
    with synchronisation_refused():
        for tokens in (5, count):
            _, num_tokens, _ = scale_for_schedule(output.loss, 4, num_local_tokens=tokens, **shared)
        report_pairs(output.metrics, 4)
    assert num_tokens.dtype == torch.int32 and num_tokens.item() == (count.item() if per_token else 1)


def capturable_step(loss, options):
    """(leaf, step): step() computes loss and gradient of whatever the leaf holds, with fresh memory for both."""
    (logits, *others), defaults = make_step("cuda", torch.bfloat16)
    leaf, factor = logits.requires_grad_(), options.get("loss_scale", 1.0)
    factor = 2.0 if isinstance(factor, AssumedScale) else factor

    def step():
        leaf.grad = None
        output = loss(leaf * 1, *others, tp_group=SINGLE, cp_group=SINGLE, **{**defaults, **options})
        (output.loss * factor).backward()
        return output.loss.detach(), output.log_probs, output.num_nonfinite, leaf.grad

    return leaf, step


@pytest.mark.parametrize("name", policy_loss_names())
@pytest.mark.parametrize("inplace", [False, True], ids=["out of place", "in place"])
@pytest.mark.parametrize("announced", ["nothing", "loss_scale", "loss_scale, one read", "assumed, one read"])
def test_forward_and_backward_replay_in_a_cuda_graph(name, inplace, announced, monkeypatch):
    """A graph holds launches and addresses and nothing that the host decided by looking: other logits give their own results."""
    options = {"inplace": inplace, "metrics": "with_entropy"} | ({} if announced == "nothing" else {"loss_scale": 2.0})
    if announced.endswith("one read"):  # 24 rows are else too few for one kernel
        monkeypatch.setattr(backends, "FEWEST_WAVES", 0)
    if announced == "assumed, one read":  # the first call delivers what the others assume
        options["loss_scale"] = AssumedScale()
    leaf, step = capturable_step(functools.partial(without_needless_clip, policy_loss, name), options)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles, and lets autograd make its buffers on a stream that may be captured
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    leaf.grad = None
    with torch.cuda.graph(graph):
        captured = step()
    for seed in (1, 2):
        fresh = torch.randn(leaf.shape, generator=torch.Generator().manual_seed(seed)).to(leaf)
        with torch.no_grad():
            leaf.copy_(fresh)
        graph.replay()
        replayed = [value.clone() for value in captured]
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(replayed, step(), strict=True))


@contextlib.contextmanager
def counted_compilations():
    """Lists each kernel that Triton has no binary for in this process."""
    from triton import knobs

    names: list[str] = []

    def hook(*, fn, **others) -> bool:
        names.append(fn.jit_function.__name__)
        return False

    before, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, hook
    try:
        yield names
    finally:
        knobs.runtime.jit_cache_hook = before


def log_probs_step(num_rows: int, width: int, *, stride: int | None = None, offset: int = 0, dtype=torch.bfloat16, **options):
    stride = width if stride is None else stride
    memory = torch.randn(offset + num_rows * stride, device="cuda").to(dtype).requires_grad_()
    rows = memory.as_strided((num_rows, width), (stride, 1), offset)
    labels = torch.randint(0, width, (num_rows,), device="cuda")
    mask = torch.arange(num_rows, device="cuda") % 3 != 1
    log_probs, entropy = vocab_parallel_log_probs(rows, labels, loss_mask=mask, with_entropy=True, tp_group=SINGLE, **options)
    (log_probs.sum() + entropy.sum()).backward()


def test_no_size_and_no_setting_compiles_anything_anew():
    """T, V, stride, alignment and temperature are arguments; so are clips, weights and masks of the losses."""
    log_probs_step(4096, 1024)
    log_probs_step(4, 65536)  # few rows: splits and their merge
    with counted_compilations() as compiled:
        for num_rows, width, stride, offset in ((1, 16, 16, 0), (4097, 1001, 1001, 0), (3000, 504, 1003, 5), (5, 50257, 50257, 1)):
            for temperature in (1.0, 0.7):
                log_probs_step(num_rows, width, stride=stride, offset=offset, temperature=temperature)
    assert compiled == []
    for loss in (grpo_loss, gspo_loss):
        capturable_step(loss, {})[1]()
        with counted_compilations() as compiled:
            for options in (
                {"clip_ratio_low": 0.3, "clip_ratio_high": 0.1},
                {"temperature": 1.0, "vocab_size": 1000},
                {"kl_coefficient": 0.2, "entropy_coefficient": 0.3},
                {"inplace": True},
            ):
                capturable_step(loss, options)[1]()
        assert compiled == []


def test_the_device_runs_one_kernel_forward_and_one_backward():
    """Launches as the profiler sees them: torch adds no kernel of its own; a mask is one more."""
    logits = torch.randn(8192, 1000, device="cuda", dtype=torch.bfloat16).requires_grad_()
    labels = torch.randint(0, 1000, (8192,), device="cuda")
    upstream = torch.randn(8192, device="cuda")
    for mask, listed in ((None, []), (labels % 2 == 0, ["list_rows_kernel"])):
        names = []
        for _ in range(2):  # the first compiles
            logits.grad = None
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                log_probs = vocab_parallel_log_probs(logits, labels, loss_mask=mask, tp_group=SINGLE)
                log_probs.backward(upstream)
                torch.cuda.synchronize()
            events = sorted(profile.events(), key=lambda event: event.time_range.start)
            names = [event.name for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
        # conftest.py fills fresh memory with NaN.
        kernels = [name for name in names if not name.startswith(("Memset", "Memcpy")) and "FillFunctor" not in name]
        assert kernels == [*listed, "row_statistics_kernel", "logits_gradient_kernel"]


def test_logits_of_more_than_two_to_the_31_elements():
    """FB-81: 16,384 rows of Qwen's vocabulary, 2.5e9 elements, in place; the last rows lie past what 32 bits count."""
    num_rows, width = 16384, 151936
    if torch.cuda.mem_get_info()[0] < 3 * 2 * num_rows * width:
        pytest.skip("needs 15 GB of free GPU memory")
    logits = torch.empty(num_rows, width, dtype=torch.bfloat16, device="cuda").normal_()
    labels = torch.randint(0, width, (num_rows,), device="cuda")
    sampled = torch.tensor([0, 1, 14133, 14134, 14135, num_rows - 1], device="cuda")  # 2^31 / 151936 = 14134.1
    exact = logits[sampled].double()
    logits.requires_grad_()
    log_probs = vocab_parallel_log_probs(logits, labels, tp_group=SINGLE, inplace=True)
    (found,) = torch.autograd.grad(log_probs.sum(), logits)
    assert found.data_ptr() == logits.data_ptr()
    truth = exact.log_softmax(-1)
    torch.testing.assert_close(log_probs[sampled].double(), truth.gather(1, labels[sampled, None])[:, 0], rtol=0, atol=1e-5)
    gradient = torch.nn.functional.one_hot(labels[sampled], width) - truth.exp()
    # One rounding to bfloat16: half a unit in the last place.
    torch.testing.assert_close(found[sampled].double(), gradient, rtol=2**-8, atol=1e-9)


def test_what_a_registered_loss_returns_and_wrong_counts_are_counted_too():
    """The same without a look at the device: NaN from finite inputs, and token_counts that are not the mask's."""

    nan = float("nan")

    @register_policy_loss("nan_on_cuda", level="sequence")
    def nan_on_cuda(log_ratio, advantages):
        return log_ratio * nan

    (logits, *others), options = make_step("cuda", torch.float32)
    groups = {"tp_group": SINGLE, "cp_group": SINGLE}
    counts = policy_loss("nan_on_cuda", logits, *others, **groups, **options).num_nonfinite
    assert [count > 0 for count in counts.tolist()] == [True, False, True]
    options |= {"token_counts": torch.tensor([99, 99, 99], device="cuda")}
    assert (gspo_loss(logits, *others, **groups, **options).num_nonfinite > 0).all()


@pytest.mark.megatron
def test_the_training_command_learns_on_one_gpu(tmp_path):
    """NCCL, bfloat16 and the GPU's own attention: the demo's reward rises from chance."""
    command = [sys.executable, "-m", "megatron_rl", "train", "--preset", "demo", "--num-rollouts", "40", "--json"]
    command += ["--output-dir", str(tmp_path / "run"), "--no-tensorboard"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "0"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["first_reward"] < 0.3 and summary["last_reward"] > 0.6
