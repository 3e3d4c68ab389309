"""What only a GPU can show: compiled kernels without a synchronisation and in a CUDA graph; heads.

The kernel tests (marker `kernel`) run compiled there too; what they say is not repeated here. Nothing needs a second GPU."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from helpers import CLIP, Batch, float32, placed, random_batch, without_needless_clip
from linear_cases import HeadBatch, by_logits, on_device, plan_of, run
from torch import Tensor

from megatron_rl import grpo_loss, gspo_loss
from megatron_rl.declare import POLICY_LOSSES
from megatron_rl.layout import SINGLE
from megatron_rl.ops.linear_head import (
    TEMPORARY_BYTES,
    HeadOptions,
    add_weight_gradient,
    bytes_per_logit,
    chunk_capacity,
    head_logits,
    hidden_gradient,
)
from megatron_rl.ops.linear_log_probs import linear_log_probs
from megatron_rl.ops.scale import AssumedScale
from megatron_rl.policy_loss import linear_gspo_loss, linear_policy_loss, policy_loss

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:max_logits_bytes gives chunks of:UserWarning")]
DEVICE = "cuda"


def make_step() -> tuple[list, dict]:
    """(arguments, options) of a loss. Three documents, the second without a token, a padding tail, a masked row of NaN."""
    batch = float32(random_batch([9, 0, 11, 4], vocab_size=1000, num_masked=(3, 0, 4, 4)))
    batch.logits[1] = float("nan")
    labels, old, advantages, mask, cu_seqlens, weights = batch.arguments()
    options = {"vocab_size": 990, "temperature": 0.7, "ref_log_probs": old - 0.1, "kl_coefficient": 0.1}
    options |= {"entropy_coefficient": 0.01, "regularizer_weights": weights[:3]}
    arguments = [batch.logits.bfloat16(), labels % 990, old, advantages[:3], mask, cu_seqlens[:4], weights[:3]]
    return [tensor.to(DEVICE) for tensor in arguments], placed(options, DEVICE)


@pytest.mark.parametrize("loss", [grpo_loss, gspo_loss], ids=lambda loss: loss.args[0])
@pytest.mark.parametrize("of_documents", ["cuda", "cpu"])
def test_the_loss_does_not_synchronise(loss, of_documents):
    """One hidden .item() a micro-batch stalls the pipeline: torch raises on it in this mode. [N] numbers may be the host's."""
    (logits, *others), options = make_step()
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


def capturable_step(loss, options):
    """(leaf, step): step() computes loss and gradient of whatever the leaf holds, with fresh memory for both."""
    (logits, *others), defaults = make_step()
    leaf, factor = logits.requires_grad_(), options.get("loss_scale", 1.0)
    factor = 2.0 if isinstance(factor, AssumedScale) else factor

    def step():
        leaf.grad = None
        output = loss(leaf * 1, *others, tp_group=SINGLE, cp_group=SINGLE, **{**defaults, **options})
        (output.loss * factor).backward()
        return output.loss.detach(), output.log_probs, output.num_nonfinite, leaf.grad

    return leaf, step


@pytest.mark.parametrize("name", POLICY_LOSSES.names())
@pytest.mark.parametrize("inplace", [False, True], ids=["out of place", "in place"])
@pytest.mark.parametrize("declared", ["nothing", "loss_scale", "loss_scale, one read", "assumed, one read"])
def test_forward_and_backward_replay_in_a_cuda_graph(name, inplace, declared, monkeypatch):
    """A graph holds launches and addresses and nothing that the host decided by looking: other logits give their own results."""
    options = {"inplace": inplace, "metrics": "with_entropy"} | ({} if declared == "nothing" else {"loss_scale": 2.0})
    if declared.endswith("one read"):  # 24 rows are else too few for one kernel
        from megatron_rl.ops import rows_triton

        monkeypatch.setattr(rows_triton, "FEWEST_WAVES", 0)
    if declared == "assumed, one read":  # the first call delivers what the others assume
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


# The heads

HIDDEN_SIZE, VOCAB_SIZE = 128, 2056  # v % 16 == 8
# Chunks of 256 rows: documents of which one is longer than three chunks, one empty, one of a single token.
LENGTHS, ROWS = [300, 900, 40, 0, 1, 200, 120], 256
# Mean log-ratios far from both edges of CLIP, in logarithms -0.105 and 0.14: rounding must not move a document across one.
LOG_RATIOS = [0.03, -0.02, 0.4, 0.0, 0.05, -0.5, 0.01]
ADVANTAGES = [1.0, -0.7, 0.8, 1.0, 0.5, -1.2, 0.0]
# kind, whether with KL and entropy, the plans that its chunks take with ROWS rows.
PLANS = {
    "gspo, plans in-chunk and scale-last": ("gspo", False),
    "gspo with KL and entropy, plans in-chunk and two-pass": ("gspo", True),
    "grpo, plan in-chunk": ("grpo", False),
    "grpo with KL and entropy, plan in-chunk": ("grpo", True),
}
# Relative Frobenius norm. float32: sums of 2056 terms in another order. bfloat16: the logits, their gradient and the result are
# rounded to 2^-9 each, plan scale-last rounds dX twice.
GRADIENT_LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def head_case(dtype: torch.dtype, lengths: list[int] = LENGTHS) -> HeadBatch:
    """Hidden states and head of this dtype; everything else float32. A tenth of each document is masked, and holds NaN."""
    generator = torch.Generator().manual_seed(0)
    num_tokens, count = sum(lengths), len(lengths)
    normal = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    hidden, weight = normal(num_tokens, HIDDEN_SIZE).to(dtype), (normal(VOCAB_SIZE, HIDDEN_SIZE) / HIDDEN_SIZE**0.5).to(dtype)
    labels = torch.randint(VOCAB_SIZE, (num_tokens,), generator=generator)
    loss_mask = torch.arange(num_tokens) % 10 != 3
    log_probs = torch.log_softmax(hidden.double() @ weight.double().T, -1).gather(1, labels[:, None])[:, 0]
    # A token's own distance is drawn from two that add up to 0 and lie on one side of the clip each, for GRPO's sake.
    documents = torch.repeat_interleave(torch.arange(count), torch.tensor(lengths))
    ratios = torch.tensor((LOG_RATIOS * count)[:count])[documents] + torch.where(torch.arange(num_tokens) % 2 == 0, 0.03, -0.03)
    hidden[~loss_mask] = float("nan")
    batch = Batch(
        logits=torch.zeros(0),
        labels=labels,
        old_log_probs=(log_probs - ratios).float(),
        advantages=torch.tensor((ADVANTAGES * count)[:count]),
        loss_mask=loss_mask,
        documents=[document.tolist() for document in torch.arange(num_tokens).split(lengths)],
        token_weights=torch.full((count,), 1.0 / num_tokens),
    )
    return on_device(HeadBatch(hidden, weight, batch), {}, DEVICE)[0]


def exact(case: HeadBatch) -> HeadBatch:
    """The same numbers in float64, where no backend but torch goes; NaN of masked rows cleared, for autograd multiplies them."""
    hidden = torch.where(case.batch.loss_mask[:, None], case.hidden.double(), 0.0)
    return replace(case, hidden=hidden, weight=case.weight.double())


def options_of(name: str, case: HeadBatch) -> tuple[str, dict]:
    (kind, has_terms), options = PLANS[name], {}
    if has_terms:
        old = case.batch.old_log_probs
        options |= {"ref_log_probs": old + 0.1 * torch.sin(torch.arange(len(old), device=old.device))}
        options |= {"kl_coefficient": 0.7, "entropy_coefficient": 0.3, "metrics": "with_entropy"}
        options |= {"regularizer_weights": torch.full((len(case.batch.documents),), 1.0 / len(old), device=old.device)}
    return kind, options


def budget(case: HeadBatch, rows: int, fp32_logits: bool = False) -> int:
    """max_logits_bytes of chunks of this many rows."""
    return rows * case.weight.shape[0] * bytes_per_logit(case.weight, fp32_logits)


def distance(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("fp32_logits", [False, True], ids=["", "fp32 logits"])
@pytest.mark.parametrize("dtype", GRADIENT_LIMITS, ids=str)
@pytest.mark.parametrize("name", PLANS)
def test_each_plan_is_float64(name, dtype, fp32_logits, schedules):
    """FB-85: loss, log-probabilities and both gradients; masked rows hold NaN and are in no matmul."""
    case = head_case(dtype)
    kind, options = options_of(name, case)
    truth = by_logits(kind, exact(case), **options)
    loss = functools.partial(linear_policy_loss, kind)
    for rows in (ROWS, 4096):
        got = run(loss, case, max_logits_bytes=budget(case, rows, fp32_logits), fp32_logits=fp32_logits, **options)
        mask = case.batch.loss_mask
        is_rounded = dtype == torch.bfloat16 and not fp32_logits
        # One rounding of a logit of up to 5 is 2^-7.
        limit = 2e-2 if is_rounded else 1e-5
        assert (got.output.log_probs - truth.output.log_probs.to(got.output.log_probs))[mask].abs().max() < limit
        torch.testing.assert_close(got.output.loss.double(), truth.output.loss.double(), rtol=3e-3 if is_rounded else 1e-5, atol=0)
        assert distance(got.hidden_gradient, truth.hidden_gradient) < GRADIENT_LIMITS[dtype]
        assert distance(got.weight_gradient, truth.weight_gradient) < GRADIENT_LIMITS[dtype]
        assert not got.hidden_gradient[~mask].any() and got.output.num_nonfinite.sum() == 0
        assert got.hidden_gradient.dtype == got.weight_gradient.dtype == dtype
    plans = {plan_of(item) for item in schedules[0]}
    assert plans == set(name.replace(",", "").split("plan")[1].replace("s ", "").replace("and", "").split()), plans


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_three_matmuls_keep_what_they_are_asked_for(dtype):
    """FB-85: float32 logits and a float32 weight gradient of 16-bit operands are as good as float32 matmuls, in any form found."""
    hidden, weight = (torch.randn(rows, 96, device=DEVICE).to(dtype) for rows in (72, 200))
    logits = head_logits(hidden, weight, out=torch.empty(72, 200, device=DEVICE))
    # Products of 16-bit numbers are exact in float32: 96 of them are summed, the order is cuBLAS's.
    torch.testing.assert_close(logits.double(), hidden.double() @ weight.double().T, rtol=0, atol=1e-4)
    gradient = torch.randn(72, 200, device=DEVICE).to(dtype)
    start = torch.randn(200, 96, device=DEVICE)
    buffer = start.clone()
    for _ in range(2):
        add_weight_gradient(gradient, hidden, out=buffer)
    torch.testing.assert_close(buffer.double(), start.double() + 2 * gradient.double().T @ hidden.double(), rtol=0, atol=1e-4)
    found = hidden_gradient(gradient, weight)
    assert found.dtype == dtype and distance(found, gradient.double() @ weight.double()) < 2**-8


@pytest.mark.parametrize("num_chunks", [1, 16])
def test_the_weight_gradient_does_not_lose_bits_with_chunks(num_chunks):
    """FB-85: rounding each chunk's part to bfloat16 would cost 1e-2 over 16 of them; what is left is the rounding of G, once."""
    case = head_case(torch.bfloat16, [128] * 16)
    want = by_logits("grpo", exact(case))
    labels, *rest = case.batch.arguments()
    parameter = megatron_parameter(case, start=0.0)
    options = {**CLIP, "fp32_logits": True, "max_logits_bytes": budget(case, 2048 // num_chunks, True)}
    linear_policy_loss("grpo", case.hidden.clone().requires_grad_(), parameter, labels, *rest, **options).loss.backward()
    assert distance(parameter.main_grad, want.weight_gradient) < 2**-9


# Synchronisation


@contextlib.contextmanager
def synchronisations() -> Iterator[list]:
    """Torch warns of each one that it makes; those of tensors that come to the host are among them."""
    torch.cuda.synchronize()
    found: list = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found += [warning for warning in caught if "synchronizing CUDA operation" in str(warning.message)]


def sync_call(case: HeadBatch, name: str, *, on_host: bool):
    """A forward pass with everything that a caller can know beforehand, and its expected chunks."""
    kind, options = options_of(name, case)
    labels, old, advantages, mask, cu_seqlens, weights = case.batch.arguments()
    counts = torch.tensor([int(case.batch.loss_mask[document].sum()) for document in case.batch.documents], device=DEVICE)
    mask, cu_seqlens = (mask.cpu(), cu_seqlens) if on_host else (mask, cu_seqlens.to(DEVICE))
    hidden, weight = case.hidden.clone().requires_grad_(), case.weight.clone().requires_grad_()
    positional = (hidden, weight, labels, old, advantages, mask, cu_seqlens, weights)
    keywords = {**CLIP, **options, "tp_group": SINGLE, "cp_group": SINGLE, "token_counts": counts}
    keywords |= {"max_logits_bytes": budget(case, ROWS)}
    return lambda: linear_policy_loss(kind, *positional, **keywords)


def waits_of(items: list) -> int:
    """One a chunk for the rows that stay; the early chunks of a scale-last document need none, their coefficient comes last."""
    return sum(1 if plan_of(item) == "scale-last" else len(item.chunks) for item in items)


@pytest.mark.parametrize("on_host", [True, False], ids=["mask and bounds on the host", "on the device"])
@pytest.mark.parametrize("name", PLANS)
def test_forward_synchronises_once_a_chunk_and_once_for_rows_it_cannot_know(name, on_host, schedules):
    """One more on the device, for mask and bounds together. Backward, which may run under a pipeline's schedule, not at all."""
    case = head_case(torch.bfloat16)
    call = sync_call(case, name, on_host=on_host)
    call().loss.backward()  # what is compiled, probed or allocated once
    with synchronisations() as found:
        loss = call().loss
    assert len(found) == waits_of(schedules[-1]) + (not on_host), [str(warning.filename) for warning in found]
    with synchronisation_refused():
        loss.backward()


# main_grad and the declared factor


def megatron_parameter(case: HeadBatch, start: float = 0.5) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(case.weight.clone())
    parameter.main_grad = torch.full(case.weight.shape, start, device=DEVICE)
    parameter.grad_added_to_main_grad = False
    return parameter


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_wrong_factor_poisons_the_gradient_and_does_not_synchronise(is_frozen):
    """The gradient of the head is in main_grad by then: NaN is what the finite check of a step sees, and nothing waits for it."""
    case = head_case(torch.bfloat16)
    parameter, hidden = megatron_parameter(case), case.hidden.clone().requires_grad_(not is_frozen)
    labels, *rest = case.batch.arguments()
    options = {**CLIP, "loss_scale": 4.0, "max_logits_bytes": budget(case, ROWS), "tp_group": SINGLE, "cp_group": SINGLE}
    loss = linear_gspo_loss(hidden, parameter, labels, *rest, **options).loss * 8.0
    with synchronisation_refused():
        loss.backward()
    # Without a gradient of hidden nothing else carries the NaN.
    assert (parameter.main_grad if is_frozen else hidden.grad).isnan().all()


# Memory


def wide_case(num_documents: int) -> HeadBatch:
    """8192 rows of 32768 columns: 512 MiB of bfloat16 logits, chunks of a quarter of that and less."""
    num_tokens, hidden_size, vocab_size = 8192, 256, 32768
    lengths = [num_tokens // num_documents] * num_documents
    hidden = torch.randn(num_tokens, hidden_size, device=DEVICE).bfloat16()
    weight = (torch.randn(vocab_size, hidden_size, device=DEVICE) / hidden_size).bfloat16()
    labels = torch.randint(vocab_size, (num_tokens,), device=DEVICE)
    old = linear_log_probs(hidden, weight, labels, tp_group=SINGLE, max_logits_bytes=2**27)
    documents = [document.tolist() for document in torch.arange(num_tokens).split(lengths)]
    mask = torch.ones(num_tokens, dtype=torch.bool, device=DEVICE)
    ones = torch.ones(num_documents, device=DEVICE)
    return HeadBatch(hidden, weight, Batch(torch.zeros(0), labels, old, ones, mask, documents, ones / num_tokens))


@pytest.mark.parametrize("into_main_grad", [False, True], ids=["a buffer", "main_grad"])
@pytest.mark.parametrize("kl_coefficient", [0.0, 0.1])
@pytest.mark.parametrize("num_documents", [16, 1])
def test_memory_is_the_budget_and_the_gradients(num_documents, kl_coefficient, into_main_grad):
    """chunk buffers <= max_logits_bytes, dX, and dW of several chunks in float32 unless it is main_grad: docs/kernels.md."""
    case, limit = wide_case(num_documents), 2**27
    options = {**CLIP, "tp_group": SINGLE, "cp_group": SINGLE, "max_logits_bytes": limit}
    if kl_coefficient:
        options |= {"kl_coefficient": kl_coefficient, "ref_log_probs": case.batch.old_log_probs}
        options |= {"regularizer_weights": case.batch.token_weights}
    parameter = torch.nn.Parameter(case.weight)
    if into_main_grad:
        parameter.main_grad = torch.zeros(case.weight.shape, device=DEVICE)
        options |= {"loss_scale": 1.0}
    labels, *rest = case.batch.arguments()
    hidden = case.hidden.requires_grad_()

    def step() -> None:
        hidden.grad = parameter.grad = None
        linear_gspo_loss(hidden, parameter, labels, *rest, **options).loss.backward()

    step()  # cuBLAS's workspace stays from here on
    hidden.grad = parameter.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before
    of_hidden, of_weight = 2 * case.hidden.numel(), 4 * case.weight.numel()
    # dX of a chunk before it is in its place, and a block of dW where no matmul adds to a float32 buffer; vectors of [T].
    beside = of_hidden + min(TEMPORARY_BYTES, of_weight) + 4 * 2**20
    # Where it is declared there is no buffer; where it is not, the second is of bfloat16 and comes when the chunks are gone.
    model = limit + of_hidden + (0 if into_main_grad else of_weight)
    assert 0.5 * limit < extra <= model + beside, (extra / 2**20, model / 2**20)
    assert extra < 0.6 * 8192 * 32768 * 2
    assert chunk_capacity(case.weight, HeadOptions(max_logits_bytes=limit), 8192) < 8192
