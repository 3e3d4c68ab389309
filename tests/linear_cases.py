"""Batches of hidden states for the fused head's tests, and ways to see what its matmuls got and which tensors a call makes."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from helpers import CLIP, Batch, random_batch, without_needless_clip
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl.policy_loss import policy_loss
from megatron_rl.policy_loss.linear import WorkItem, scale_last

HIDDEN_SIZE, VOCAB_SIZE = 6, 16
# Documents longer than any small chunk beside short ones, an empty one and one of one token.
LENGTHS = [5, 21, 7, 0, 1, 12, 9]


@dataclass(frozen=True)
class HeadBatch:
    """A packed micro-batch with its hidden states and head: batch.logits are hidden @ weight.T."""

    hidden: Tensor  # [T, H]
    weight: Tensor  # [V, H]
    batch: Batch

    def to(self, dtype: torch.dtype) -> HeadBatch:
        return replace(self, hidden=self.hidden.to(dtype), weight=self.weight.to(dtype))


def head_batch(
    lengths: list[int] = LENGTHS,
    *,
    seed: int = 0,
    hidden_size: int = HIDDEN_SIZE,
    vocab_size: int = VOCAB_SIZE,
) -> HeadBatch:
    """float64. Old log-probabilities differ from the current ones by a third of CLIP's distances and by more. Every second token
    is masked."""
    batch = random_batch(lengths, seed=seed, vocab_size=vocab_size, noise=0.0)
    generator = torch.Generator().manual_seed(seed + 1)
    num_tokens = sum(lengths)
    hidden = torch.randn(num_tokens, hidden_size, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab_size, hidden_size, generator=generator, dtype=torch.float64) * 0.4
    logits = hidden @ weight.T
    log_probs = torch.log_softmax(logits, -1).gather(1, batch.labels[:, None])[:, 0]
    noise = 0.1 * torch.randn(num_tokens, generator=generator, dtype=torch.float64)
    drift = 0.12 * torch.randn(len(lengths), generator=generator, dtype=torch.float64)
    old = log_probs + noise + drift.repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
    return HeadBatch(hidden, weight, replace(batch, logits=logits, old_log_probs=old, loss_mask=torch.arange(num_tokens) % 2 == 1))


def every_term(batch: Batch) -> dict:
    """Options with a coefficient a token: KL, entropy, importance weights, temperature and padded vocabulary."""
    steps = torch.arange(len(batch.labels), dtype=torch.float64)
    return {
        "importance_weights": 1.2 + torch.cos(steps),
        "ref_log_probs": batch.old_log_probs + 0.3 * torch.sin(steps),
        "kl_coefficient": 0.7,
        "entropy_coefficient": 0.3,
        "regularizer_weights": 0.5 + torch.arange(len(batch.documents), dtype=torch.float64),
        "metrics": "with_entropy",
    }


@dataclass
class Result:
    """What a loss gave: the output with its gradients by hidden [T, H] and weight [V, H]."""

    output: object
    hidden_gradient: Tensor | None
    weight_gradient: Tensor | None


def run(loss, case: HeadBatch, *, on_policy: bool = False, factor: float = 1.0, **options) -> Result:
    """loss(hidden, weight, labels, ...) and its backward with this upstream factor."""
    hidden, weight = case.hidden.detach().clone().requires_grad_(), case.weight.detach().clone().requires_grad_()
    labels, old, *rest = case.batch.arguments()
    output = loss(hidden, weight, labels, None if on_policy else old, *rest, **{**CLIP, **options})
    (output.loss * factor).backward()
    return Result(output, hidden.grad, weight.grad)


def on_device(case: HeadBatch, options: dict, device: str) -> tuple[HeadBatch, dict]:
    """Everything a caller may keep on a GPU, there."""
    batch = {name: value.to(device) for name, value in vars(case.batch).items() if isinstance(value, Tensor)}
    options = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in options.items()}
    return HeadBatch(case.hidden.to(device), case.weight.to(device), replace(case.batch, **batch)), options


def by_logits(kind: str, case: HeadBatch, **options) -> Result:
    """The same through policy_loss on hidden @ weight.T; autograd multiplies the gradients."""

    def loss(hidden, weight, *rest, **keywords):
        return without_needless_clip(policy_loss, kind, hidden @ weight.T, *rest, **keywords)

    return run(loss, case, **options)


def budget(case: HeadBatch, rows: int) -> int:
    """max_logits_bytes that give chunks of this many rows."""
    itemsize = case.weight.element_size() if case.weight.element_size() >= 4 else case.weight.element_size() + 4
    return case.weight.shape[0] * itemsize * rows


def worst_error(got: Result, want: Result) -> dict[str, float]:
    """Relative to the largest element of what is wanted, or to 1 where that is 0."""
    pairs = {
        "loss": (got.output.loss.detach(), want.output.loss.detach()),
        "hidden": (got.hidden_gradient, want.hidden_gradient),
        "weight": (got.weight_gradient, want.weight_gradient),
        "log_probs": (got.output.log_probs, want.output.log_probs),
    }
    return {name: relative(*pair) for name, pair in pairs.items()}


def dense_scores(logits, labels, c, e, temperature) -> tuple[Tensor, Tensor, Tensor]:
    """In float64 by autograd: log-probabilities, entropy, and the gradient of sum c log p + e H by the logits."""
    leaf = logits.detach().double().cpu().requires_grad_()
    log_softmax = (leaf / torch.as_tensor(temperature, dtype=torch.float64).reshape(-1, 1)).log_softmax(-1)
    log_probs = log_softmax.gather(1, labels.cpu()[:, None])[:, 0]
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    (c.double().cpu() * log_probs + e.double().cpu() * entropy).sum().backward()
    return log_probs.detach(), entropy.detach(), leaf.grad


def relative(got: Tensor, want: Tensor) -> float:
    largest = float(want.abs().max()) if want.numel() else 0.0
    return float((got.cpu().double() - want.cpu().double()).abs().max()) / (largest or 1.0) if want.numel() else 0.0


class LargestNewTensor(TorchDispatchMode):
    """Elements of each tensor that an operation makes, views and in-place results left out."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        old = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in old:
                self.sizes.append((tensor.numel(), tensor.dtype))
        return result


class Seen(TorchDispatchMode):
    """Records rows of each matmul of a [T, H] x [V, H] head, and the bytes of live tensors that are as wide as the vocabulary."""

    def __init__(self, hidden_size: int, vocab_size: int):
        super().__init__()
        self.hidden_size, self.vocab_size = hidden_size, vocab_size
        self.rows: dict[str, int] = {"logits": 0, "hidden": 0, "weight": 0}
        self.most_rows = 0  # of a tensor of logits' shape, either way round; weights and their views are not counted
        self.peak_bytes = 0  # of all such tensors that lived at one time
        self._alive: dict[int, tuple[int, int]] = {}  # storage -> its bytes, its tensors

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if name in ("mm", "addmm", "addmm_"):
            left, right = args[-2:] if len(args) < 4 else args[1:3]
            shapes = (tuple(left.shape), tuple(right.shape))
            hidden, vocab = self.hidden_size, self.vocab_size
            kinds = {(hidden, vocab): "logits", (vocab, hidden): "hidden"}
            kind = "weight" if shapes[0][0] == vocab else kinds[shapes[1]]
            self.rows[kind] += shapes[0][1] if kind == "weight" else shapes[0][0]
        if isinstance(result, Tensor) and result.dim() == 2 and self.vocab_size in result.shape and result.is_floating_point():
            num_rows = result.numel() // self.vocab_size
            if num_rows != self.hidden_size:
                self.most_rows = max(self.most_rows, num_rows)
                self._watch(result)
        return result

    def _watch(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        size, count = self._alive.get(key, (storage.nbytes(), 0))
        self._alive[key] = (size, count + 1)
        weakref.finalize(tensor, self._forget, key)
        self.peak_bytes = max(self.peak_bytes, sum(size for size, _ in self._alive.values()))

    def _forget(self, key: int) -> None:
        size, count = self._alive.pop(key)
        if count > 1:
            self._alive[key] = (size, count - 1)


@contextlib.contextmanager
def seen(case: HeadBatch) -> Iterator[Seen]:
    with Seen(case.hidden.shape[1], case.weight.shape[0]) as mode:
        yield mode


def plan_of(item: WorkItem) -> str:
    """How the chunks of an item are computed."""
    if len(item.chunks) <= 1:
        return "in-chunk"
    return "scale-last" if item.plan is scale_last else "two-pass"
