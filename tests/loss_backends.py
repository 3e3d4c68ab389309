"""Both backends and the fused head, for tests that run a loss on each: one form of batch in, one of result out; counts launches."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import EXACT, KERNEL_DEVICE, Batch, without_needless_clip
from torch import Tensor

from megatron_rl.declare import POLICY_LOSSES, get_policy_loss
from megatron_rl.ops.backends import is_interpreted
from megatron_rl.policy_loss import linear_policy_loss, policy_loss

LOSSES = {name: functools.partial(without_needless_clip, policy_loss, name) for name in POLICY_LOSSES.names()}
# Per-token options of a loss; the rest is [N] and follows the logits by itself.
PER_TOKEN = ("importance_weights", "ref_log_probs")


@dataclass(frozen=True)
class LossBackend:
    """run(loss, batch, **options) -> (output, gradient by the logits), both on the CPU and in float64."""

    name: str
    dtype: torch.dtype
    device: str
    tolerance: dict[str, float]

    def __str__(self) -> str:
        return self.name

    def run(self, loss, batch: Batch, *, divisor: float | None = None, **options):
        """divisor: what the returned loss is divided by, in place, as a schedule does."""
        batch = replace(batch, **{name: self.to(getattr(batch, name)) for name in ("logits", "old_log_probs", "advantages")})
        batch = replace(batch, labels=batch.labels.to(self.device), loss_mask=batch.loss_mask.to(self.device))
        options |= {name: self.to(options[name]) for name in PER_TOKEN if name in options}
        leaf = batch.logits.detach().clone().requires_grad_()
        with self.small_blocks():
            output, weight = self.forward(loss, leaf, batch, options)
        if divisor is not None:
            output.loss.div_(divisor)
        output.loss.backward()
        self.check(weight, leaf)
        assert output.loss.dtype == leaf.grad.dtype == self.dtype
        values = {field.name: getattr(output, field.name) for field in fields(output)}
        found = {name: exact(value) for name, value in values.items() if isinstance(value, Tensor)}
        if output.metrics is not None:
            found["metrics"] = replace(output.metrics, values=exact(output.metrics.values))
        return replace(output, **found), exact(leaf.grad)

    def forward(self, loss, leaf: Tensor, batch: Batch, options: dict):
        return loss(leaf, *batch.arguments(), backend=self.name, **options), None

    def check(self, weight: Tensor | None, leaf: Tensor) -> None:
        """What there is beside the gradient by the logits."""

    def small_blocks(self):
        """Documents of a few tokens then have several blocks."""
        if self.name != "triton":
            return contextlib.nullcontext()
        from megatron_rl.policy_loss.reduce_triton import reduce_triton

        return mock.patch.dict(reduce_triton.__wrapped__.__kwdefaults__, block=4)

    def to(self, tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(self.device, self.dtype)


@dataclass(frozen=True)
class FusedHead(LossBackend):
    """linear_policy_loss in chunks of three rows. The hidden states are the logits, because the head's weight is the identity."""

    def forward(self, loss, leaf: Tensor, batch: Batch, options: dict):
        def through_head(part):
            return linear_policy_loss if part is policy_loss else part

        weight = torch.eye(leaf.shape[1], dtype=self.dtype, requires_grad=True)
        public_function = functools.partial(*map(through_head, (loss.func, *loss.args)))
        budget = 4 * leaf.shape[1] * leaf.element_size()  # a row is for moving others
        return public_function(leaf, weight, *batch.arguments(), backend="torch", max_logits_bytes=budget, **options), weight

    def check(self, weight: Tensor, leaf: Tensor) -> None:
        """The weight's gradient is the product of that by logits with the rows that have one: 0 x NaN is in none."""
        rows = leaf.grad.any(1)
        torch.testing.assert_close(weight.grad, leaf.grad[rows].T @ leaf.detach()[rows], **EXACT)


def exact(value: Tensor) -> Tensor:
    """On the CPU, numbers in float64, which holds each of float32's."""
    value = value.detach().cpu()
    return value.double() if value.is_floating_point() else value


OF_EACH_LEVEL = [*{get_policy_loss(name).level: name for name in reversed(LOSSES)}.values()]
TORCH = LossBackend("torch", torch.float64, "cpu", EXACT)
# float32: a log-probability near -5 is good to 5e-7, and so is the ratio that it gives.
TRITON = LossBackend("triton", torch.float32, KERNEL_DEVICE, {"rtol": 1e-5, "atol": 2e-6})
FUSED = FusedHead("fused", torch.float64, "cpu", EXACT)
HAS_TRITON = importlib.util.find_spec("triton") is not None
KERNEL = [pytest.mark.kernel, pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")]
ON_TRITON = pytest.param(TRITON, marks=KERNEL)
over_backends = pytest.mark.parametrize("backend", [TORCH, FUSED, ON_TRITON], ids=str)


@contextlib.contextmanager
def counted_launches() -> Iterator[list[str]]:
    """Lists the name of each kernel that is launched."""
    import triton

    names: list[str] = []
    kinds: list[Any] = [triton.JITFunction]
    if is_interpreted():  # needs numpy, which compiled kernels do without
        from triton.runtime.interpreter import InterpretedFunction

        kinds.append(InterpretedFunction)

    def counting(launch: Callable[..., Any]) -> Callable[..., Any]:
        def run(kernel: Any, *args: Any, **options: Any) -> Any:
            names.append(kernel.fn.__name__)
            return launch(kernel, *args, **options)

        return run

    with contextlib.ExitStack() as patches:
        for kind in kinds:
            patches.enter_context(mock.patch.object(kind, "run", counting(kind.run)))
        yield names
