"""`python -m benchmarks hosts --peer verl=PATH ...`: a training step's head in each host's own code, and ours in its place.

A step starts from hidden states [T, H] and the head's weight [V, H] in 16 bits, and ends with the gradients of both. Between them
lies what the host does: its logits, the copy in float32 that it makes, its log-probabilities, the entropy where its loss always
takes it, and a policy-gradient loss of one factor a token. What is linear in T alone is left out.

    from a checkout       the functions that the host calls, imported from its own files; packages that are absent are stubbed
    bytes a logit         the most bytes that live at once, above what lives before the step, over T x V
    on real tensors       with the CPU time of the process and the error of both gradients against float64. T / H is as at full
                          size: it decides how much a logit the float32 gradient of the weight is
    at full size          on meta tensors, which have a shape and no memory: T 8192, H 4096, V 151,936

Bytes are counted by torch's memory tracker, which sees each storage of torch. Triton's kernels are no part of it: on a CPU ours is
the torch path, whose chunks are those of a GPU. On a GPU the same steps are measured by benchmarks/host_steps.py, at full size.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.checkouts import host_module
from benchmarks.measure import Unavailable
from megatron_rl.hosts.heads.log_probs import log_probs_of_logits
from megatron_rl.layout.groups import SINGLE
from megatron_rl.losses import linear_policy_loss, policy_loss
from megatron_rl.ops.assumed_scale import AssumedScale
from megatron_rl.ops.linear_log_probs import linear_log_probs

# The longest micro-batch of a small model on one GPU, with the vocabulary of Qwen3.
FULL_TOKENS, FULL_COLUMNS, FULL_HIDDEN = 8192, 151_936, 4096
# The hosts' own chunks: fused_linear_logprobs_chunk_size of NeMo-RL's GRPO example, logprobs_chunk_size of SkyRL's defaults.
NEMO_RL_ROWS, SKYRL_ROWS = 256, 1024
ROUNDS = 5
# Of the float64 logits, which at full size are 10 GB: 0.6 GB at once.
EXACT_ROWS = 512
# Of the logits: what ours may hold of them at once in the fused head on a CPU. A host's own has as many rows.
CHUNK_SHARE = 16
# 16 bits of hidden states, weight and logits leave 2e-3 to 3e-3. What is further off computes something else.
MOST_ERROR = 0.03
Scores = tuple[Tensor, Tensor | None]  # log-probabilities [T], entropy [T] where the host's loss takes it


@dataclass(frozen=True, slots=True)
class Step:
    """One micro-batch. Documents are one row each, and each token has its own advantage."""

    hidden: Tensor  # [T, H]
    weight: Tensor  # [V, H]
    labels: Tensor  # [T]
    advantages: Tensor  # [T]
    bounds: Tensor  # [2] int32: one document. Made before, because a copy to a GPU waits for it
    max_logits_bytes: int
    """What ours may hold of the logits at once in the fused head."""
    chunk_rows: int | None
    """Rows of a chunk in a host's own fused head; None: what the host has by default."""

    def leaves(self, *, with_main_grad: bool = False) -> tuple[Tensor, Tensor]:
        hidden, weight = self.hidden.detach().requires_grad_(), self.weight.detach().requires_grad_()
        if with_main_grad:
            weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
        return hidden, weight

    @property
    def num_logits(self) -> int:
        return len(self.labels) * len(self.weight)


Loss = Callable[[Step, Tensor, Tensor], Tensor]  # (step, hidden, weight) -> 0-d


@dataclass(frozen=True, slots=True)
class HostPath:
    """One way from hidden states to the loss. `find()` imports what it needs and returns the loss of (step, hidden, weight)."""

    host: str
    name: str
    find: Callable[[], Loss]
    is_ours: bool = False
    into_main_grad: bool = False
    """The weight has Megatron's float32 gradient buffer, and the loss adds to it."""


@dataclass(frozen=True, slots=True)
class HostRow:
    host: str
    path: str
    is_ours: bool
    status: str = ""
    """Why nothing was measured; empty where it was."""
    bytes_a_logit: float | None = None
    full_bytes_a_logit: float | None = None
    """On meta tensors of the full size; None where the code looks at a value."""
    cpu_ms: float | None = None
    gradient_error: float | None = None


# The hosts


def of_scores(find: Callable[[], Callable[[Tensor, Tensor], Scores]]) -> Callable[[], Loss]:
    """The path of a host whose loss takes log-probabilities. Its entropy is a metric: computed, and not differentiated."""

    def prepare() -> Loss:
        scores = find()

        def loss(step: Step, hidden: Tensor, weight: Tensor) -> Tensor:
            log_probs, _ = scores(hidden @ weight.T, step.labels)
            return -(log_probs * step.advantages).sum() / len(step.labels)

        return loss

    return prepare


def _slime() -> Callable[[Tensor, Tensor], Scores]:
    function = host_module("slime.utils.ppo_utils").calculate_log_probs_and_entropy

    def scores(logits: Tensor, labels: Tensor) -> Scores:
        # Megatron's Float16Module makes float32 of what the last stage returns; the loss takes the entropy as a metric.
        log_probs, entropy = function(logits.float(), labels, one_rank(), with_entropy=True, with_entropy_grad=False)
        return log_probs.reshape(-1), entropy

    return scores


def _miles() -> Callable[[Tensor, Tensor], Scores]:
    function = host_module("miles.backends.training_utils.loss_hub.math_utils").calculate_log_probs_and_entropy

    def scores(logits: Tensor, labels: Tensor) -> Scores:
        log_probs, entropy = function(logits.float(), labels, one_rank(), with_entropy=True, entropy_requires_grad=False)
        return log_probs.reshape(-1), entropy

    return scores


def _verl_megatron() -> Callable[[Tensor, Tensor], Scores]:
    module = host_module("verl.utils.megatron.tensor_parallel")

    def scores(logits: Tensor, labels: Tensor) -> Scores:
        return module.vocab_parallel_log_probs_from_logits(logits.float()[None], labels[None])[0], None

    return scores


def _verl_megatron_entropy() -> Callable[[Tensor, Tensor], Scores]:
    module = host_module("verl.utils.megatron.tensor_parallel")

    def scores(logits: Tensor, labels: Tensor) -> Scores:
        # In this order in the engine: a copy, the entropy of the logits, log-probabilities of the copy.
        logits = logits.float()[None]
        copy = logits.clone()
        entropy = module.vocab_parallel_entropy(logits)
        return module.vocab_parallel_log_probs_from_logits(copy, labels[None])[0], entropy[0]

    return scores


def _verl_fsdp() -> Callable[[Tensor, Tensor], Scores]:
    function = host_module("verl.utils.torch_functional").logprobs_from_logits
    return lambda logits, labels: (function(logits, labels, inplace_backward=True), None)


def _shifted(function: Callable[..., Tensor]) -> Callable[[Tensor, Tensor], Scores]:
    """Of NeMo-RL and SkyRL: they shift the targets themselves, and leave the last row out."""

    def scores(logits: Tensor, labels: Tensor) -> Scores:
        rows = torch.cat([logits.float(), logits.new_zeros(1, logits.shape[1], dtype=torch.float32)])[None]
        return function(rows, torch.cat([labels[:1], labels])[None], 0, logits.shape[1], one_rank())[0], None

    return scores


def _nemo_rl() -> Callable[[Tensor, Tensor], Scores]:
    return _shifted(host_module("nemo_rl.distributed.model_utils").from_parallel_logits_to_logprobs)


def _skyrl() -> Callable[[Tensor, Tensor], Scores]:
    return _shifted(host_module("skyrl.backends.skyrl_train.distributed.megatron.model_utils").from_parallel_logits_to_logprobs)


def of_hidden(find: Callable[[], Callable[[Tensor, Tensor, Tensor, int], Tensor]], default_rows: int) -> Callable[[], Loss]:
    """The path of a host's own fused function: (hidden [T + 1, H], weight, labels, rows of a chunk, by default the host's)."""

    def prepare() -> Loss:
        function = find()

        def loss(step: Step, hidden: Tensor, weight: Tensor) -> Tensor:
            rows = torch.cat([hidden, hidden.new_zeros(1, hidden.shape[1])])
            labels = torch.cat([step.labels[:1], step.labels])
            log_probs = function(rows, weight, labels, step.chunk_rows or default_rows)
            return -(log_probs * step.advantages).sum() / len(step.labels)

        return loss

    return prepare


def _nemo_rl_head() -> Callable[[Tensor, Tensor, Tensor, int], Tensor]:
    function = host_module("nemo_rl.distributed.model_utils").from_parallel_hidden_states_to_logprobs
    return lambda hidden, weight, labels, rows: function(
        hidden[:, None], weight, False, labels[None], 0, len(weight), one_rank(), chunk_size=rows
    )[0]


def _skyrl_head() -> Callable[[Tensor, Tensor, Tensor, int], Tensor]:
    function = host_module("skyrl.backends.skyrl_train.distributed.megatron.model_utils").from_parallel_hidden_to_logprobs
    return lambda hidden, weight, labels, rows: function(
        hidden[None], weight, labels[None], 0, len(weight), one_rank(), chunk_size=rows
    )[0]


def _roll(*, use_fused_kernel: bool = False) -> Callable[[Tensor, Tensor], Scores]:
    function = host_module("mcore_adapter.parallel_functions.vocab_parallel").vocab_parallel_logprobs
    return lambda logits, labels: (function(logits.float()[None], labels[None], use_fused_kernel=use_fused_kernel)[0], None)


# Ours


def _our_log_probs(*, from_float32: bool, inplace: bool) -> Callable[[Tensor, Tensor], Scores]:
    """What the host's setting puts in the place of its function. A float32 copy is the host's: Float16Module's, or its loss's."""

    def scores(logits: Tensor, labels: Tensor) -> Scores:
        return log_probs_of_logits(logits.float() if from_float32 else logits, labels, SINGLE, inplace=inplace), None

    return scores


def _our_head_log_probs() -> Loss:
    """For the host's own loss: what takes the place of its fused function, or of logits and log-probabilities."""

    def loss(step: Step, hidden: Tensor, weight: Tensor) -> Tensor:
        options = {"tp_group": SINGLE, "check_ranks": False, "max_logits_bytes": step.max_logits_bytes}
        log_probs = linear_log_probs(hidden, weight, step.labels, **options)
        return -(log_probs * step.advantages).sum() / len(step.labels)

    return loss


def _our_inputs(step: Step) -> list[Tensor | None]:
    num_tokens, device = len(step.labels), step.labels.device
    mask = torch.ones(num_tokens, dtype=torch.bool, device=device)
    weights = torch.full((1,), 1.0 / num_tokens, device=device)
    return [step.labels, None, step.advantages, mask, step.bounds, weights]


# Whose adapters give the loss an AssumedScale: hosts/loss.py and hosts/roll_loss.py.
ASSUME_SCALE = ("miles", "slime", "ROLL")
OUR_OPTIONS = {"tp_group": SINGLE, "cp_group": SINGLE, "check_ranks": False}


def _our_loss(host: str, metrics: str) -> Callable[[], Loss]:
    def prepare() -> Loss:
        # One for all steps, as in an adapter. Where no kernel makes the gradient in forward, as on a CPU, it has no effect.
        options = OUR_OPTIONS | {"metrics": metrics, "loss_scale": AssumedScale() if host in ASSUME_SCALE else None}

        def loss(step: Step, hidden: Tensor, weight: Tensor) -> Tensor:
            logits = (hidden @ weight.T).float()
            return policy_loss("grpo", logits, *_our_inputs(step), inplace=True, **options).loss

        return loss

    return prepare


def _our_head(metrics: str, loss_scale: float | None) -> Callable[[], Loss]:
    def loss(step: Step, hidden: Tensor, weight: Tensor) -> Tensor:
        options = OUR_OPTIONS | {"metrics": metrics, "max_logits_bytes": step.max_logits_bytes, "loss_scale": loss_scale}
        return linear_policy_loss("grpo", hidden, weight, *_our_inputs(step), **options).loss

    return lambda: loss


WITH_ENTROPY, NO_METRICS = "with_entropy", "none"
THEIRS: tuple[tuple[str, Sequence[tuple[str, Callable[[], Loss]]], str], ...] = (
    ("miles", [("its own", of_scores(_miles))], WITH_ENTROPY),
    ("slime", [("its own", of_scores(_slime))], WITH_ENTROPY),
    ("verl, Megatron", [("its own", of_scores(_verl_megatron))], NO_METRICS),
    ("verl, Megatron", [("its own, with entropy", of_scores(_verl_megatron_entropy))], WITH_ENTROPY),
    ("verl, FSDP", [("its own", of_scores(_verl_fsdp))], NO_METRICS),
    ("NeMo-RL", [("its own", of_scores(_nemo_rl)), ("its own fused head", of_hidden(_nemo_rl_head, NEMO_RL_ROWS))], NO_METRICS),
    ("SkyRL", [("its own", of_scores(_skyrl)), ("its own fused head", of_hidden(_skyrl_head, SKYRL_ROWS))], NO_METRICS),
    ("ROLL", [("its own", of_scores(_roll))], NO_METRICS),
)
"""Host, its own paths, and the metrics that ours computes beside the loss, so that both give the entropy or neither."""
THEIR_KERNELS = {"ROLL": ("its own, cross_entropy_loss_fusion", of_scores(partial(_roll, use_fused_kernel=True)))}
"""Of a host that has a Triton kernel behind a setting: it needs CUDA."""
OUR_LOG_PROBS = {
    "verl, Megatron": _our_log_probs(from_float32=True, inplace=True),
    "verl, FSDP": _our_log_probs(from_float32=False, inplace=True),
    "ROLL": _our_log_probs(from_float32=True, inplace=True),
    **dict.fromkeys(("NeMo-RL", "SkyRL"), _our_log_probs(from_float32=True, inplace=False)),
}
"""As hosts/*_log_probs.py: the logits that a host hands over, and whether the gradient is written over them."""


def paths(hosts: Sequence[str] | None = None, *, with_kernels: bool = False) -> Iterator[HostPath]:
    """The host's own, then ours in its place: log-probabilities where its loss may stay, and our loss.

    hosts: texts of which a host's name holds one; None: all.
    """
    for host, own, metrics in THEIRS:
        if hosts is not None and not any(text.lower() in host.lower() for text in hosts):
            continue
        kernels = [THEIR_KERNELS[host]] if with_kernels and host in THEIR_KERNELS else []
        yield from (HostPath(host, name, find) for name, find in [*own, *kernels])
        if metrics == NO_METRICS:
            yield HostPath(host, "our log-probabilities", of_scores(partial(OUR_LOG_PROBS.__getitem__, host)), is_ours=True)
            yield HostPath(host, "our log-probabilities from hidden states", _our_head_log_probs, is_ours=True)
        suffix = ", with entropy" if metrics == WITH_ENTROPY else ""
        yield HostPath(host, f"our loss from logits{suffix}", _our_loss(host, metrics), is_ours=True)
        yield HostPath(host, f"our fused head{suffix}", _our_head(metrics, None), is_ours=True)
        yield HostPath(host, f"our fused head, into main_grad{suffix}", _our_head(metrics, 1.0), is_ours=True, into_main_grad=True)


# Measuring


def measure_hosts(
    num_tokens: int, num_columns: int, hidden_size: int, dtype: torch.dtype, hosts: Sequence[str] | None = None
) -> Iterator[HostRow]:
    """A row for each path, as it comes. hosts: as in `paths`."""
    step = draw(num_tokens, num_columns, hidden_size, dtype)
    full = draw(FULL_TOKENS, FULL_COLUMNS, FULL_HIDDEN, dtype, device="meta")
    exact = exact_gradients(step)
    with one_megatron_rank():
        for path in paths(hosts):
            yield _measured(path, step, full, exact)


def draw(num_tokens: int, num_columns: int, hidden_size: int, dtype: torch.dtype, device: str | torch.device = "cpu") -> Step:
    """Logits of standard deviation 2, as a trained model's are wide, and advantages of both signs."""
    generator = None if device == "meta" else torch.Generator(device).manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=generator, device=device)  # noqa: E731
    labels = torch.randint(num_columns, (num_tokens,), generator=generator, device=device)
    hidden, weight = normal(num_tokens, hidden_size), 2.0 * normal(num_columns, hidden_size) / hidden_size**0.5
    bounds = torch.tensor([0, num_tokens], dtype=torch.int32, device=device)
    budget = num_tokens * num_columns * dtype.itemsize // CHUNK_SHARE
    chunk_rows = max(num_tokens // CHUNK_SHARE, 1)
    return Step(hidden.to(dtype), weight.to(dtype), labels, normal(num_tokens), bounds, budget, chunk_rows)


def exact_gradients(step: Step) -> tuple[Tensor, Tensor]:
    """Of hidden and weight, in float64, a chunk of rows at a time: dz_t = A_t / T (softmax(z_t) - 1 at the label)."""
    weight, parts = step.weight.double(), list[Tensor]()
    of_weight = torch.zeros_like(weight)
    for start in range(0, len(step.labels), EXACT_ROWS):
        rows = slice(start, start + EXACT_ROWS)
        hidden, labels = step.hidden[rows].double(), step.labels[rows, None]
        of_logits = torch.softmax(hidden @ weight.T, -1)
        of_logits.scatter_add_(1, labels, -torch.ones_like(labels, dtype=torch.float64))
        of_logits *= step.advantages[rows, None].double() / len(step.labels)
        parts.append(of_logits @ weight)
        of_weight.addmm_(of_logits.T, hidden)
    return torch.cat(parts), of_weight


def gradient_error(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """The largest of both: the norm of the difference to float64, over the norm of the float64 gradient."""
    return max(float((one.double() - right).norm() / right.norm()) for one, right in zip(found, exact, strict=True))


def _measured(path: HostPath, step: Step, full: Step, exact: Sequence[Tensor]) -> HostRow:
    row = HostRow(path.host, path.name, path.is_ours)
    try:
        loss = path.find()
    except Unavailable as error:
        return replace(row, status=": ".join(error.args))
    hidden, weight = step.leaves(with_main_grad=path.into_main_grad)
    of_hidden, of_weight = torch.autograd.grad(loss(step, hidden, weight), (hidden, weight), allow_unused=True)
    found = (of_hidden, weight.main_grad if path.into_main_grad else of_weight)
    error = gradient_error(found, exact)
    if not error <= MOST_ERROR:
        return replace(row, status=f"FAIL: its gradient is {error:.1e} off", gradient_error=error)
    try:
        of_full = peak_bytes(path, loss, full) / full.num_logits
    except (RuntimeError, NotImplementedError):  # an operation that a tensor without values cannot do
        of_full = None
    return replace(
        row,
        bytes_a_logit=peak_bytes(path, loss, step) / step.num_logits,
        full_bytes_a_logit=of_full,
        cpu_ms=1e3 * statistics.median(_cpu_seconds(path, loss, step) for _ in range(ROUNDS)),
        gradient_error=error,
    )


def _cpu_seconds(path: HostPath, loss: Loss, step: Step) -> float:
    leaves = step.leaves(with_main_grad=path.into_main_grad)
    began = time.process_time()
    torch.autograd.grad(loss(step, *leaves), leaves, allow_unused=True)
    return time.process_time() - began


def peak_bytes(path: HostPath, loss: Loss, step: Step) -> float:
    """The most bytes that live at once during the step, above what lives before it."""
    from torch.distributed._tools.mem_tracker import MemTracker

    leaves, tracker = step.leaves(with_main_grad=path.into_main_grad), MemTracker()
    tracker.track_external(*leaves, *([leaves[1].main_grad] if path.into_main_grad else ()), step.labels, step.advantages)
    before = _total(tracker, "current")
    with tracker:
        torch.autograd.grad(loss(step, *leaves), leaves, allow_unused=True)
    return _total(tracker, "peak") - before


def _total(tracker: Any, when: str) -> int:
    return sum(of_device["Total"] for of_device in tracker.get_tracker_snapshot(when).values())


@contextlib.contextmanager
def one_megatron_rank(backend: str = "fake") -> Iterator[None]:
    """Megatron's groups of one rank. Collectives of "fake" take meta tensors too; not all of them write their result."""
    from megatron.core import parallel_state

    with fake_ranks(1) if backend == "fake" else one_real_rank(backend):
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()


@contextlib.contextmanager
def fake_ranks(number: int) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=number)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def one_real_rank(backend: str) -> Iterator[None]:
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def one_rank() -> dist.ProcessGroup:
    return dist.group.WORLD


TITLES = ("host", "path", "bytes a logit", "bytes a logit at full size", "CPU ms", "error of the gradient")


def table(rows: Iterable[HostRow]) -> Iterator[str]:
    yield "| " + " | ".join(TITLES) + " |"
    yield "|---" * len(TITLES) + "|"
    for row in rows:
        if row.status:
            yield f"| {row.host} | {row.path} | {row.status} |" + " |" * (len(TITLES) - 3)
            continue
        at_full = "it reads a value" if row.full_bytes_a_logit is None else f"{row.full_bytes_a_logit:.2f}"
        numbers = f"{row.bytes_a_logit:.2f} | {at_full} | {row.cpu_ms:.0f} | {row.gradient_error:.1e}"
        yield f"| {row.host} | {row.path} | {numbers} |"
