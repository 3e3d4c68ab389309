"""The kernel that reads a row once, against the two kernels: values, what it touches, when it is chosen, its factor.

Interpreted on a CPU, compiled on a GPU. Its machine code: tests/test_kernel_code.py.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from dataclasses import fields, replace
from unittest import mock

import pytest
import torch
from helpers import CLIP, KERNEL_DEVICE, Batch, random_batch, without_needless_clip
from loss_backends import counted_launches
from simulated_cuda import simulated_cuda
from simulated_ranks import groups_of_ranks
from torch import Tensor

from megatron_rl.declare import get_policy_loss
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.layout.groups import SINGLE
from megatron_rl.losses.corrections import CorrectionSettings
from megatron_rl.metrics.policy import STATISTICS
from megatron_rl.metrics.step import finalise_metrics
from megatron_rl.ops.backends import (
    ROWS_AT_ONCE,
    GradientConfiguration,
    OneReadConfiguration,
    StatisticsConfiguration,
    one_read_configuration,
)
from megatron_rl.policy_loss import policy_loss
from megatron_rl.policy_loss.api import PolicyLossOutput

pytest.importorskip("triton")
from test_row_kernels import IS_INTERPRETED, counts, in_guarded_memory, only_interpreted, recorded_accesses

import megatron_rl.ops.backends as backends
import megatron_rl.ops.rows_triton as rows_triton
import megatron_rl.policy_loss.one_read_triton as one_read
from megatron_rl.ops.log_probs_triton import logits_gradient_triton, row_results_triton

pytestmark = pytest.mark.kernel
SCALE, FACTOR = 3.0, torch.tensor(3.0, device=KERNEL_DEVICE)
# Lanes, tiles and blocks of both paths: a row of 77 columns has full tiles, a masked one and edges, five documents two blocks.
SMALL = OneReadConfiguration(lanes=4, tiles=2, block=32, num_warps=1)
SMALL_STATISTICS = {"configuration": StatisticsConfiguration(lanes=4, tiles=2, num_warps=1, splits=1)}
SMALL_GRADIENT = {"configuration": GradientConfiguration(block=32, num_warps=1, splits=1)}
WIDTH, REAL, TAIL = 77, 70, 2  # stored columns, those that are no padding, tokens after the last document
# Each compiled kernel fuses multiply-adds in its own way, so that a row's entropy, a chain of them, differs by a step or two of
# float32 of 2^-23; the interpreter does the same operations in both.
ENTROPY_STEPS = 0.0 if IS_INTERPRETED else 2**-22
LENGTHS, NUM_MASKED = [4, 0, 5, 1, 2], (1, 0, 2, 0, 2)  # the last document is masked altogether


@contextlib.contextmanager
def chosen(configuration: OneReadConfiguration | None = SMALL) -> Iterator[list[str]]:
    """Any shape fits the cache, and both paths have the same lanes. Gives the names of the kernels that are launched."""
    with (
        mock.patch.object(rows_triton, "one_read_configuration", lambda *sizes: configuration),
        mock.patch.dict(row_results_triton.__kwdefaults__, SMALL_STATISTICS),
        mock.patch.dict(logits_gradient_triton.__kwdefaults__, SMALL_GRADIENT),
        counted_launches() as launches,
    ):
        yield launches


def make_batch(dtype: torch.dtype = torch.float32) -> Batch:
    """Logits with padded columns and tokens that hold NaN where nothing may be read; float32 vectors."""
    batch = random_batch([*LENGTHS, TAIL], vocab_size=REAL, num_masked=(*NUM_MASKED, TAIL))
    logits = torch.full((sum(LENGTHS) + TAIL, WIDTH), math.nan, dtype=torch.float64)
    logits[:, :REAL] = 2 * batch.logits
    logits[~batch.loss_mask] = math.nan
    batch = replace(batch, logits=logits.to(dtype), documents=batch.documents[:-1])
    numbers = {"old_log_probs": batch.old_log_probs.float(), "advantages": batch.advantages[:-1].float()}
    batch = replace(batch, token_weights=batch.token_weights[:-1].float(), **numbers)
    names = ("logits", "labels", "old_log_probs", "advantages", "loss_mask")
    return replace(batch, **{name: getattr(batch, name).to(KERNEL_DEVICE) for name in names})


def terms(batch: Batch, *names: str) -> dict:
    """Options by name: per-token vectors, and the coefficients that use them."""
    old = -3.0 + 0.0 * batch.labels if batch.old_log_probs is None else batch.old_log_probs
    wave = 1.2 + torch.cos(old + batch.labels)
    of_documents = 0.5 + torch.arange(len(batch.documents), dtype=torch.float32)
    known = {
        "importance": {"importance_weights": wave},
        "kl": {"ref_log_probs": old - 0.1, "kl_coefficient": 0.2, "regularizer_weights": of_documents},
        "entropy": {"entropy_coefficient": 0.3, "regularizer_weights": of_documents},
        "metrics": {"metrics": "with_entropy"},
        "sampler": {"rollout_log_probs": old + 0.3 * torch.sin(9 * old + batch.labels)},
        "tokens": {"correction": CorrectionSettings(kind="tis", high=1.1, level="token")},
    }
    return {name: value for key in names for name, value in known[key].items()}


def run(
    kind: str, batch: Batch, *, loss_scale: float | Tensor | None = SCALE, backend: str = "triton", **options
) -> tuple[PolicyLossOutput, Tensor]:
    """(the output, the gradient), after a backward with SCALE."""
    leaf = batch.logits.clone().requires_grad_()
    asked = {"temperature": 0.7, "vocab_size": REAL, "backend": backend, "loss_scale": loss_scale} | options
    output = without_needless_clip(policy_loss, kind, leaf * 1, *batch.arguments(), **CLIP, **asked)
    (output.loss * SCALE).backward()
    return output, leaf.grad


def assert_same(found: PolicyLossOutput, wanted: PolicyLossOutput) -> None:
    for field in fields(PolicyLossOutput):
        mine, other = getattr(found, field.name), getattr(wanted, field.name)
        if isinstance(mine, Tensor):
            has_entropy = field.name.startswith("entropy") or (field.name == "loss" and found.entropy is not None)
            steps = ENTROPY_STEPS if has_entropy else 0.0
            torch.testing.assert_close(mine, other, rtol=steps, atol=0, equal_nan=True, msg=field.name)
        else:
            assert (mine is None) == (other is None), field.name
    if found.metrics is not None:
        for name, mine, other in zip(STATISTICS, found.metrics.values.tolist(), wanted.metrics.values.tolist(), strict=True):
            assert mine == pytest.approx(other, rel=ENTROPY_STEPS if name == "entropy" else 0.0, abs=0.0, nan_ok=True), name


@pytest.mark.parametrize(("backend", "loss_scale"), [("torch", None), ("triton", None), ("triton", SCALE)])
def test_without_old_log_probs_the_ratio_is_exactly_1(backend, loss_scale):
    """Also in kernels of one read and of two, which add up a row in other orders."""
    for kind in ("grpo", "cispo", "topr", "gspo", "gmpo"):
        batch = replace(make_batch(), old_log_probs=None)
        found = finalise_metrics(run(kind, batch, backend=backend, loss_scale=loss_scale, metrics="basic")[0].metrics)
        assert found["policy/ratio_new_old_sum"] == found["policy/ratio_new_old_squared_sum"], kind
        assert (found["policy/effective_sample_size"], found["policy/kl_new_old"]) == (1.0, 0.0), kind
        assert found["policy/ratio_new_old"] == pytest.approx(1.0, abs=1e-15), kind  # a mean of ones over float64 weights
        assert found["policy/clipped_ratio_fraction"] == 0.0 and found["policy/old_logprobs"] == found["policy/new_logprobs"], kind


EVERYTHING = ("importance", "kl", "entropy", "metrics")


@pytest.mark.parametrize(
    ("kind", "dtype", "asked", "options"),
    [
        pytest.param("grpo", torch.bfloat16, EVERYTHING, {}, id="bf16, everything"),
        pytest.param("cispo", torch.float16, EVERYTHING, {"inplace": True}, id="fp16, everything, in place"),
        pytest.param("grpo", torch.float32, ("entropy",), {"loss_scale": FACTOR}, id="the factor as a tensor"),
    ],
)
def test_each_dtype_and_memory_has_the_numbers_of_two_kernels(kind, dtype, asked, options):
    """Bit by bit with the same lanes, but for entropies on a GPU. Each loss, term and correction: tests/test_generated_steps.py."""
    batch = make_batch(dtype)
    options = options | terms(batch, *asked)
    with chosen() as launches:
        found, gradient = run(kind, batch, **options)
    assert "one_read_kernel" in launches and "row_statistics_kernel" not in launches, launches
    with chosen() as launches:
        wanted, two_kernels = run(kind, batch, **options | {"loss_scale": None})
    assert "one_read_kernel" not in launches
    steps = ENTROPY_STEPS if "entropy_coefficient" in options and batch.logits.dtype == torch.float32 else 0.0
    # Of an entropy term of 0.3 x 4.5 x SCALE / 0.7 = 6 times p (log p + H).
    torch.testing.assert_close(gradient, two_kernels, rtol=steps, atol=6 * steps)
    assert_same(found, wanted)
    assert gradient[~batch.loss_mask].eq(0).all() and gradient[:, REAL:].eq(0).all() and gradient.any()


# A row of 256 logits with the lanes of each shipped program, beside K1's 128: sums of 256 float32 numbers in another order.
@pytest.mark.parametrize("num_warps", ROWS_AT_ONCE)
def test_more_lanes_change_the_last_bits_alone(num_warps):
    batch = make_batch()
    batch = replace(batch, logits=torch.cat([batch.logits[:, :REAL].nan_to_num().repeat(1, 60)], 1))
    lanes = 32 * num_warps
    with chosen(OneReadConfiguration(lanes, 2, 16 * lanes, num_warps)):
        found, gradient = run("grpo", batch, vocab_size=None)
    wanted, two_kernels = run("grpo", batch, vocab_size=None, loss_scale=None)
    torch.testing.assert_close(found.log_probs, wanted.log_probs, rtol=0, atol=2e-6)
    torch.testing.assert_close(gradient, two_kernels, rtol=5e-6, atol=1e-9)
    torch.testing.assert_close(found.loss, wanted.loss, rtol=2e-6, atol=1e-6)


@only_interpreted
@pytest.mark.parametrize(("stride", "offset"), [(WIDTH, 0), (WIDTH + 6, 5), (WIDTH + 3, 16)])
@pytest.mark.parametrize("inplace", [True, False])
def test_a_row_is_read_twice_and_written_once_and_a_masked_one_only_written(stride, offset, inplace):
    """The second read comes from the cache. Nothing beside the rows is touched, wherever they lie."""
    batch = make_batch()
    memory, view = in_guarded_memory(batch.logits, stride, offset)
    with chosen() as launches, recorded_accesses() as accesses:
        leaf = view.requires_grad_()
        output = policy_loss(
            "grpo", leaf, *batch.arguments(), backend="triton", vocab_size=REAL, loss_scale=SCALE, inplace=inplace, tp_group=SINGLE
        )
    assert launches[0] == "one_read_kernel"
    reads = counts(accesses.loads, memory).as_strided(view.shape, (stride, 1), offset)
    live, label = batch.loss_mask, batch.labels
    of_label = torch.zeros_like(reads).scatter_(1, label[:, None], 1)  # the log-probability's own load
    has_gradient = reads[:, 0] == 2
    assert torch.equal(reads[~live], torch.zeros_like(reads[~live]))
    # A vector at the end may hold padding: it is read, and not used. A clipped row is read once.
    assert torch.equal((reads - of_label)[live & has_gradient][:, :REAL], torch.full_like(reads, 2)[live & has_gradient][:, :REAL])
    assert (reads - of_label)[live][:, :REAL].min() >= 1 and reads[live][:, :REAL].max() <= 3 and (live & has_gradient).any()
    written = counts(accesses.stores, memory)
    inside = torch.zeros_like(memory, dtype=torch.bool).as_strided(view.shape, (stride, 1), offset).fill_(True)
    expected = torch.zeros_like(written)
    expected.as_strided(view.shape, (stride, 1), offset).fill_(int(inplace))
    assert torch.equal(written, expected) and inside.all()
    output.loss.mul(SCALE).backward()
    assert leaf.grad[~live].eq(0).all() and torch.isfinite(leaf.grad).all()


def test_a_value_that_is_not_finite_is_found_as_after_two_kernels(monkeypatch):
    """On a CPU it raises; where nobody looks, as on a GPU, counts and NaN in the gradient are those of two kernels."""
    batch = make_batch()
    batch.logits[1, 3], batch.old_log_probs[6], batch.labels[8] = math.nan, math.inf, REAL
    if IS_INTERPRETED:
        with chosen(), pytest.raises(DataError, match="document 0 of the micro-batch has 1 unmasked tokens"):
            run("cispo", batch)
        monkeypatch.setattr("megatron_rl.policy_loss.api.refuse_bad_data", lambda *arguments: None)
    with chosen():
        found, gradient = run("cispo", batch)
        wanted, two_kernels = run("cispo", batch, loss_scale=None)
    assert found.num_nonfinite.tolist() == wanted.num_nonfinite.tolist() == [1, 0, 2, 0, 0]
    torch.testing.assert_close(gradient, two_kernels, rtol=0, atol=0, equal_nan=True)
    assert gradient[1].isnan().any()


# What backward delivers is checked by both paths and by both backends: no shape decides whether a wrong factor is seen.
@pytest.mark.parametrize(
    ("backend", "is_one_read"), [("triton", True), ("triton", False), ("torch", False)], ids=["one read", "two kernels", "torch"]
)
@pytest.mark.skipif(not IS_INTERPRETED, reason="on a GPU a wrong factor is NaN: the test below")
def test_another_factor_than_the_announced_one_is_refused(backend, is_one_read):
    with chosen(SMALL if is_one_read else None) as launches:
        batch = make_batch()
        with pytest.raises(ConfigError, match="loss_scale=2.0 was announced and backward delivers 3.0"):
            run("grpo", batch, loss_scale=2.0, backend=backend)
        leaf = batch.logits.clone().requires_grad_()
        output = policy_loss("grpo", leaf, *batch.arguments(), backend=backend, vocab_size=REAL, loss_scale=SCALE)
        for _ in range(2 if is_one_read else 1):
            with pytest.raises(ConfigError, match="a second backward") if leaf.grad is not None else contextlib.nullcontext():
                (output.loss * SCALE).backward(retain_graph=True)
    assert ("one_read_kernel" in launches) == is_one_read


@pytest.mark.skipif(not IS_INTERPRETED, reason="there is a GPU")
@pytest.mark.parametrize("is_one_read", [True, False])
@pytest.mark.parametrize("announced", [SCALE, 2.0])
def test_on_a_gpu_another_factor_makes_the_gradient_nan_and_nobody_waits(is_one_read, announced):
    batch = make_batch()
    with chosen(SMALL if is_one_read else None), simulated_cuda() as seen:
        leaf = batch.logits.to("cuda").requires_grad_()
        tensors = [tensor.to("cuda") for tensor in batch.arguments()]
        seen.clear()
        output = policy_loss("grpo", leaf, *tensors, vocab_size=REAL, loss_scale=announced, tp_group=SINGLE, cp_group=SINGLE)
        (output.loss * SCALE).backward()
        assert seen == []
        gradient = leaf.grad.cpu()
    assert gradient[batch.loss_mask].isnan().any() == (announced != SCALE)
    if announced != SCALE:  # each row that another layer multiplies becomes NaN
        assert gradient[batch.loss_mask & gradient.ne(0).any(1)].isnan().any(1).all()


# (loss, options, a change of the batch): what one kernel cannot know. The first of each pair of kernels says which path it is.
@pytest.mark.parametrize(
    ("kind", "asked", "change", "is_one_read"),
    [
        pytest.param("grpo", (), {}, True, id="a loss of tokens"),
        pytest.param("gspo", (), {"old_log_probs": None}, True, id="a sequence loss on-policy"),
        pytest.param("gspo", (), {}, False, id="a sequence loss off-policy"),
        # A row's entropy is known when it has been read, which is after the loss's derivative was wanted.
        pytest.param("own_heeding", (), {}, False, id="a loss that needs entropies"),
        pytest.param("grpo", ("sampler", "tokens"), {"old_log_probs": None}, False, id="weights of the policy in training"),
        pytest.param("gspo", ("sampler", "tokens"), {"old_log_probs": None}, False, id="a sequence loss with a correction"),
    ],
)
def test_one_kernel_is_chosen_where_the_coefficients_are_known(kind, asked, change, is_one_read, own_losses):
    batch = replace(make_batch(), **change)
    with chosen() as launches:
        run(kind, batch, **terms(batch, *asked))
    assert ("one_read_kernel" in launches) == is_one_read == ("row_statistics_kernel" not in launches)


def test_two_kernels_stay_without_a_gradient_a_factor_room_or_adjacent_columns():
    batch = make_batch()
    logits = batch.logits.clone()
    options = {"backend": "triton", "vocab_size": REAL, "loss_scale": SCALE, "inplace": True}
    with chosen() as launches:
        policy_loss("grpo", logits, *batch.arguments(), **options)
        with torch.no_grad():
            policy_loss("grpo", logits.requires_grad_(), *batch.arguments(), **options)
        policy_loss("grpo", logits, *batch.arguments(), **options | {"loss_scale": None})
        strided = logits.detach().t().contiguous().t().requires_grad_()
        policy_loss("grpo", strided, *batch.arguments(), **options | {"inplace": False})
    assert "one_read_kernel" not in launches
    assert torch.equal(logits.detach().nan_to_num(), batch.logits.nan_to_num())  # the in-place write waits for a backward
    with chosen(None) as launches:
        policy_loss("grpo", logits, *batch.arguments(), **options)
    assert "one_read_kernel" not in launches
    two_ranks = groups_of_ranks(tp=2)[0].tp
    inputs, settings = mock.Mock(), mock.Mock(tp_group=two_ranks, cp_group=SINGLE, correction=None)
    with chosen():
        plan = functools.partial(one_read.plan_loss, is_assumed=False)
        assert plan(get_policy_loss("grpo"), logits, inputs, settings) is None
        settings.tp_group = SINGLE
        assert plan(get_policy_loss("grpo"), logits, inputs, settings) == SMALL
        # Another reduction over cp would meet a rank that does not make it.
        settings.cp_group, inputs.old_log_probs = two_ranks, None
        assert plan(get_policy_loss("gspo"), logits, inputs, settings) is None
        settings.cp_group = SINGLE
        assert plan(get_policy_loss("gspo"), logits, inputs, settings) == SMALL


# 132 multiprocessors and 50 MiB. (rows, columns, bytes of a logit, warps)
@pytest.mark.parametrize(
    ("num_rows", "num_columns", "itemsize", "num_warps"),
    [
        pytest.param(8192, 151936, 2, 32, id="Qwen in bf16: a row an SM"),
        pytest.param(8192, 151936, 4, 32, id="Qwen in float32: the rows do not fit, and half of them is still found"),
        pytest.param(8192, 52958, 2, 16, id="the widest bf16 rows of three an SM"),
        pytest.param(8192, 52959, 2, 32, id="one column more"),
        pytest.param(8192, 32000, 4, 32, id="Llama 2 in float32"),
        pytest.param(8192, 25600, 2, 8, id="a short vocabulary: six rows"),
        pytest.param(264, 151936, 2, 32, id="two waves"),
        pytest.param(263, 151936, 2, None, id="fewer than two waves"),
        pytest.param(300, 25600, 2, 32, id="too few rows for six at once"),
    ],
)
def test_shape_and_cache_choose_the_program(monkeypatch, num_rows, num_columns, itemsize, num_warps):
    monkeypatch.setattr(backends, "num_processors", lambda device: 132)
    monkeypatch.setattr(backends, "cache_bytes", lambda device: 50 << 20)
    found = one_read_configuration(num_rows, num_columns * itemsize, torch.device("cuda"))
    assert (None if found is None else found.num_warps) == num_warps
