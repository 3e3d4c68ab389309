"""The fused head's matmuls where a device has the better form or lacks it, what autocast leaves alone, and the bytes of a call."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from helpers import CLIP
from linear_cases import budget, by_logits, head_batch, run, worst_error
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_rl.config import DEFAULT_MAX_LOGITS_BYTES
from megatron_rl.layout import SINGLE
from megatron_rl.losses import linear_gspo_loss
from megatron_rl.ops import linear_head
from megatron_rl.ops.linear_gradient import make_gradient
from megatron_rl.ops.linear_head import HeadOptions, blocks, chunk_capacity, make_head
from megatron_rl.ops.linear_schedule import MOVE_DIVISOR, schedule_rows

GIB = 1024**3


# A torch without a form: the product is made in blocks


class OnDevice:
    """A CPU tensor's stand-in that says it is on CUDA; what is cut from it says so too."""

    def __init__(self, tensor):
        self.tensor, self.is_cuda = tensor, True

    def __getattr__(self, name):
        return getattr(self.tensor, name)

    def __getitem__(self, index):
        return self.tensor[index]


@pytest.mark.parametrize("outputs", [frozenset({"mm"}), frozenset()], ids=["mm alone", "no float32 output"])
def test_products_that_cannot_be_written_in_place_are_made_in_blocks(monkeypatch, outputs):
    """Of the weight gradient's size, or the chunk's, there would be a second one: 2 GiB at V = 128k and H = 4096."""
    widths = []

    def mm(left, right):
        widths.append(left.shape[0] * right.shape[1])
        return left.float() @ right.float()

    monkeypatch.setattr(linear_head, "_float32_outputs", lambda dtype, device: outputs)
    monkeypatch.setattr(linear_head, "accumulating_matmul", lambda dtype, device: None)
    monkeypatch.setattr(linear_head, "_float32_mm", mm)
    monkeypatch.setattr(linear_head, "_upcast_mm", mm)
    monkeypatch.setattr(linear_head, "TEMPORARY_BYTES", 7 * 4 * 12)  # seven columns of twelve float32
    generator = torch.Generator().manual_seed(0)
    gradient, hidden, weight = (torch.randn(shape, generator=generator).bfloat16() for shape in ((9, 40), (9, 12), (40, 12)))
    out = torch.full((40, 12), 0.5)
    linear_head.add_weight_gradient(OnDevice(gradient), hidden, out=out)
    torch.testing.assert_close(out, 0.5 + gradient.float().t() @ hidden.float())
    assert max(widths) == 7 * 12 and sum(widths) == 40 * 12
    widths.clear()
    logits = torch.full((9, 40), float("nan"))
    linear_head.head_logits(OnDevice(hidden), weight, out=logits)
    torch.testing.assert_close(logits, hidden.float() @ weight.float().t())
    assert max(widths) == 9 * 7 and sum(widths) == 9 * 40


@pytest.mark.parametrize(("num_columns", "bytes_per_column"), [(0, 4), (1, 10**12), (1000, 10**6), (5, 0)])
def test_blocks_hold_each_column_once(num_columns, bytes_per_column):
    cut = [index for columns in blocks(num_columns, bytes_per_column) for index in range(num_columns)[columns]]
    assert cut == list(range(num_columns))


# What a caller's surroundings may not change


def test_autocast_changes_nothing():
    """Operands have the dtype that was asked for: under autocast the gradient of hidden alone would be a product of bfloat16."""
    case = head_batch().to(torch.float32)
    want = run(linear_gspo_loss, case, max_logits_bytes=budget(case, 6))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = run(linear_gspo_loss, case, max_logits_bytes=budget(case, 6))
    assert torch.equal(got.hidden_gradient, want.hidden_gradient) and torch.equal(got.weight_gradient, want.weight_gradient)
    assert torch.equal(got.output.loss, want.output.loss)


@pytest.mark.parametrize("which", ["transposed", "every second", "rows of a larger one"])
def test_operands_may_have_any_strides(which):
    """Views of larger tensors, as slices of a fused parameter or a transposed head are."""
    case = head_batch()

    def view(tensor):
        if which == "transposed":
            return tensor.t().contiguous().t()
        if which == "every second":
            return torch.stack([tensor, torch.full_like(tensor, float("nan"))], -1)[..., 0]
        return torch.cat([torch.full_like(tensor, float("nan")), tensor])[len(tensor) :]

    labels = torch.stack([case.batch.labels, case.batch.labels], -1)[:, 0]
    hidden, weight = view(case.hidden).requires_grad_(), view(case.weight).requires_grad_()
    assert which == "rows of a larger one" or not hidden.is_contiguous()
    _, *rest = case.batch.arguments()
    want = by_logits("gspo", case)
    for rows in (6, 1000):
        hidden.grad = weight.grad = None
        output = linear_gspo_loss(hidden, weight, labels, *rest, **CLIP, max_logits_bytes=budget(case, rows))
        output.loss.backward()
        got = SimpleNamespace(output=output, hidden_gradient=hidden.grad, weight_gradient=weight.grad)
        assert max(worst_error(got, want).values()) < 1e-12


# The memory of a call, from the buffers that the code makes


def most_extra_bytes(num_tokens: int, max_logits_bytes: int, *, has_main_grad: bool = False, fp32_logits: bool = False):
    """(rows of a chunk, bytes beside the inputs when most are held) of plans A and D at V 131072, H 4096, bfloat16 on CUDA. Tensors
    without storage, so that any machine can tell."""
    columns, hidden_size = 131072, 4096
    with FakeTensorMode():
        weight = torch.empty(columns, hidden_size, dtype=torch.bfloat16, device="cuda")
        hidden = torch.empty(num_tokens, hidden_size, dtype=torch.bfloat16, device="cuda")
        labels = torch.empty(num_tokens, dtype=torch.int64, device="cuda")
        main_grad = torch.empty(columns, hidden_size, device="cuda") if has_main_grad else None
        capacity = chunk_capacity(weight, max_logits_bytes, fp32_logits, num_tokens)
        rows = max(chunk.numel() for item in schedule_rows(torch.arange(num_tokens), capacity) for chunk in item.chunks)
        head = make_head(hidden, weight, labels, HeadOptions(1.0, None, SINGLE, True, "torch", False, fp32_logits), rows)
        gradient = make_gradient(head, needs_hidden=True, needs_weight=True, main_grad=main_grad, scale=None)
    assert head.weight.dtype == torch.bfloat16 and head.hidden.shape == hidden.shape
    chunk = head.logits.nbytes + (0 if head.gradient is head.logits else head.gradient.nbytes)
    moved = rows // MOVE_DIVISOR * columns * head.logits.itemsize
    assert chunk + moved <= max_logits_bytes
    rows_of_hidden = rows * hidden_size * 2
    numbers = 16 * num_tokens * 4  # statistics, log-probabilities, coefficients: float32, one a row
    own = gradient.hidden.nbytes + (0 if has_main_grad else gradient.weight.nbytes)
    # Clipped rows leave a chunk whose rows of hidden were gathered; later there is the gradient of those rows too.
    return rows, chunk + own + numbers + max(moved + rows_of_hidden, 2 * rows_of_hidden)


@pytest.mark.filterwarnings("ignore:max_logits_bytes gives chunks")
def test_extra_memory_at_16k_tokens_and_128k_columns_is_below_the_target():
    """4.2 GiB at the default budget, 2.3 GiB with main_grad and chunks of 4096 rows. Plan B has one more buffer of float32 weights
    where it cannot scale the one there is."""
    rows, plain = most_extra_bytes(16384, DEFAULT_MAX_LOGITS_BYTES)
    assert rows == 5462 and plain < 3.7 * GIB, "three chunks of one size"
    rows, full = most_extra_bytes(7936, DEFAULT_MAX_LOGITS_BYTES)
    other_tokens = (16384 - rows) * (4096 * 2 + 16 * 4)
    assert rows == 7936 and full + other_tokens < 4.2 * GIB, "a document that fills its chunk, among 16k tokens"
    rows, with_main_grad = most_extra_bytes(16384, 4352 * 131072 * 2, has_main_grad=True)
    assert rows == 4096 and with_main_grad < 2.3 * GIB
    rows, exact = most_extra_bytes(16384, DEFAULT_MAX_LOGITS_BYTES, fp32_logits=True)
    assert exact < 4.2 * GIB
