"""What several test files share: step S, random batches, losses as loops. It must never call the code under test."""

from __future__ import annotations

import contextlib
import math
import multiprocessing.connection
import os
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.declare import POLICY_LOSSES, get_policy_loss
from megatron_rl.layout.agreement import MESSAGE_BYTES
from megatron_rl.layout.groups import GATHER_INTO_ONE
from megatron_rl.losses.corrections import CORRECTIONS
from megatron_rl.losses.kl import KL_ESTIMATORS
from megatron_rl.testing import ranks as rank_pools
from megatron_rl.testing.ranks import RankPool
from megatron_rl.weights import AGGREGATIONS

ROOT = Path(__file__).resolve().parent.parent
# Where Triton's kernels run: compiled on a GPU, else interpreted (conftest.py).
KERNEL_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# About a third of the ratios of random_batch is clipped; low and high differ, so that swapping them shows.
CLIP = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.15}
# For float64: what is left are roundings.
EXACT = {"rtol": 1e-10, "atol": 1e-12}
# Step S of the table of field bugs: prompts (a, a, b, b), unmasked tokens (2, 4, 1, 0).
S_PROMPTS = ["a", "a", "b", "b"]
COLLECTIVES = {
    *"all_reduce all_gather all_gather_into_tensor all_gather_object reduce_scatter_tensor reduce_scatter broadcast".split(),
    *"reduce gather scatter all_to_all all_to_all_single barrier".split(),
    *(name for name in ("all_gather_single", "reduce_scatter_single") if hasattr(dist, name)),  # torch 2.13
}


@contextlib.contextmanager
def names_forgotten() -> Iterator[None]:
    """The registries forget the losses, aggregations, and what else is registered inside."""
    registries = (AGGREGATIONS, POLICY_LOSSES, KL_ESTIMATORS, CORRECTIONS)
    for registry in registries:
        registry.names()  # the built-in ones are there
    known = [dict(registry) for registry in registries]
    try:
        yield
    finally:
        for registry, before in zip(registries, known, strict=True):
            registry.clear()
            registry.update(before)


def s_masks() -> list[Tensor]:
    return [torch.tensor(mask, dtype=torch.bool) for mask in ([1, 1], [1, 1, 1, 1], [1], [0, 0, 0])]


@dataclass(frozen=True)
class Batch:
    """A packed micro-batch, float64. `documents` holds the token positions of each document."""

    logits: Tensor  # [T, V]
    labels: Tensor  # [T]
    old_log_probs: Tensor  # [T]
    advantages: Tensor  # [N]
    loss_mask: Tensor  # [T] bool
    documents: list[list[int]]
    token_weights: Tensor  # [N]

    @property
    def cu_seqlens(self) -> Tensor:
        bounds = [0]
        for document in self.documents:
            bounds.append(bounds[-1] + len(document))
        return torch.tensor(bounds, dtype=torch.int32)

    def arguments(self) -> tuple:
        """The positional arguments of a loss after logits."""
        return (*(self.labels, self.old_log_probs, self.advantages, self.loss_mask, self.cu_seqlens), self.token_weights)

    def take(self, positions: list[list[int]], samples: list[int] | None = None) -> Batch:
        """A batch of these token positions, a list for each document; `samples` names the documents (all)."""
        samples = list(range(len(self.documents))) if samples is None else samples
        flat = torch.tensor([t for document in positions for t in document], dtype=torch.int64)
        start, documents = 0, []
        for document in positions:
            documents.append(list(range(start, start + len(document))))
            start += len(document)
        return replace(
            self,
            logits=self.logits[flat],
            labels=self.labels[flat],
            old_log_probs=self.old_log_probs[flat],
            advantages=self.advantages[samples],
            loss_mask=self.loss_mask[flat],
            documents=documents,
            token_weights=self.token_weights[samples],
        )


def random_batch(
    lengths: list[int], *, seed: int = 0, vocab_size: int = 11, num_masked: tuple[int, ...] | None = None, noise: float = 0.3
) -> Batch:
    """Random documents of these lengths; the first num_masked[i] tokens of document i are masked (default: a third).

    old_log_probs differ from the current ones by `noise`, so that ratios fall on both sides of a clip of that size.
    """
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(lengths)
    logits = torch.randn(num_tokens, vocab_size, generator=generator, dtype=torch.float64)
    labels = torch.randint(vocab_size, (num_tokens,), generator=generator)
    old = loop_log_probs(logits, labels) + noise * torch.randn(num_tokens, generator=generator, dtype=torch.float64)
    start, documents, mask = 0, [], torch.ones(num_tokens, dtype=torch.bool)
    for index, length in enumerate(lengths):
        documents.append(list(range(start, start + length)))
        mask[start : start + (length // 3 if num_masked is None else num_masked[index])] = False
        start += length
    return Batch(
        logits=logits,
        labels=labels,
        old_log_probs=old,
        advantages=torch.randn(len(lengths), generator=generator, dtype=torch.float64),
        loss_mask=mask,
        documents=documents,
        token_weights=0.1 + torch.rand(len(lengths), generator=generator, dtype=torch.float64),
    )


def placed(values, device: str):
    """A dict or a dataclass with its tensors there."""
    if isinstance(values, dict):
        return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in values.items()}
    return replace(values, **placed({field.name: getattr(values, field.name) for field in fields(values)}, device))


def float32(values):
    """A dict or a dataclass with float32 in the place of float64."""
    if isinstance(values, dict):
        wide = {name: value for name, value in values.items() if isinstance(value, Tensor) and value.dtype == torch.float64}
        return values | {name: value.float() for name, value in wide.items()}
    return replace(values, **float32({field.name: getattr(values, field.name) for field in fields(values)}))


def loop_log_probs(logits: Tensor, labels: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Row by row, by the definition: the logarithm of a softmax over the whole vocabulary."""
    rows = [(row / temperature) - torch.logsumexp(row / temperature, 0) for row in logits]
    taken = [row[int(label)] for row, label in zip(rows, labels, strict=True)]
    return torch.stack(taken) if taken else logits.sum(-1)


def loop_entropy(logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    """- sum p log p, row by row."""
    rows = [torch.softmax(row / temperature, 0) for row in logits]
    return torch.stack([-sum(p * p.log() for p in row if p > 0) for row in rows]) if rows else logits.sum(-1)


# Numbers at which the random batches of the tests lie on both sides of each bound.
PARAMETERS = {
    "sapo": {"sapo_temperature_positive": 1.4, "sapo_temperature_negative": 2.3},
    "dppo_tv": {"divergence_low": 0.01, "divergence_high": 0.015, "ratio_truncation": 1.2},
    "dppo_kl": {"divergence_low": 1e-3, "divergence_high": 2e-3, "ratio_truncation": 1.2},
    "dro": {"log_ratio_penalty": 0.3},
    "vespo": {
        "vespo_power_positive": 1.5,
        "vespo_decay_positive": 0.5,
        "vespo_power_negative": 0.7,
        "vespo_decay_negative": 1.2,
    },
}


def without_needless_clip(public_function, name: str, *arguments, **options):
    """The front entry's loss of that name, with the numbers of PARAMETERS. The tables have one clip for all losses, and a loss
    without a clip refuses it. They have one anchor, the old log-probabilities: a loss that compares with the sampler gets them as
    the sampler's, and as the old ones numbers that it must not read."""
    loss = get_policy_loss(name)
    if loss.clip_ratios is None:
        options = {option: value for option, value in options.items() if not option.startswith("clip_ratio")}
    if name in PARAMETERS:
        options = {"loss_parameters": PARAMETERS[name], **options}
    if loss.anchor == "rollout" and "rollout_log_probs" not in options:
        at = 1 + next(i for i, x in enumerate(arguments) if isinstance(x, Tensor) and x.dtype == torch.int64)  # after the labels
        options |= {"rollout_log_probs": arguments[at]}
        arguments = (*arguments[:at], None, *arguments[at + 1 :])
    return public_function(name, *arguments, **options)


def with_gradient(function, logits: Tensor) -> tuple[Tensor, Tensor]:
    """(value, gradient by a fresh leaf with these logits)."""
    leaf = logits.detach().clone().requires_grad_()
    value = function(leaf)
    (gradient,) = torch.autograd.grad(value, leaf)
    return value.detach(), gradient


def run_loss(loss, batch: Batch, **options):
    """(output, gradient of .loss by the logits)."""
    leaf = batch.logits.detach().clone().requires_grad_()
    output = loss(leaf, *batch.arguments(), **options)
    output.loss.backward()
    return output, leaf.grad


def zigzag(document: list[int], cp_rank: int, cp_size: int) -> list[int]:
    """The rank's tokens of a document, by dealing 2 cp_size chunks out to the ranks forth and back."""
    size = math.ceil(len(document) / (2 * cp_size))
    dealt: list[list[int]] = [[] for _ in range(cp_size)]
    for chunk, rank in enumerate([*range(cp_size), *reversed(range(cp_size))]):
        dealt[rank] += document[chunk * size : (chunk + 1) * size]
    return dealt[cp_rank]


def last_rank_alone(document: list[int], cp_rank: int, cp_size: int) -> list[int]:
    return document if cp_rank == cp_size - 1 else []


@contextlib.contextmanager
def counted_collectives(*, with_checks: bool = False) -> Iterator[list[tuple[str, tuple[int, ...], object]]]:
    """Lists each collective that is launched through torch.distributed: (name, shape of its payload, group).

    with_checks False: the comparison of arguments between ranks, which the CPU has beside a loss's own collectives, is left out.
    """
    calls: list[tuple[str, tuple[int, ...], object]] = []
    originals = {name: getattr(dist, name) for name in COLLECTIVES}

    def counting(name: str):
        def call(*args, **kwargs):
            is_gather = name in ("all_gather", GATHER_INTO_ONE)
            payload = args[1] if is_gather else args[0]
            if with_checks or tuple(payload.shape) != (MESSAGE_BYTES,):
                calls.append(("all_gather" if is_gather else name, tuple(payload.shape), kwargs["group"]))
            return originals[name](*args, **kwargs)

        return call

    for name in originals:
        setattr(dist, name, counting(name))
    try:
        yield calls
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def pool_of(size: int, **settings):
    """A fixture: the ranks of a module."""

    @pytest.fixture(scope="module")
    def pool():
        with RankPool(size, **settings) as ranks:
            yield ranks

    return pool


def wait_until(condition: Callable[[], bool]) -> None:
    """pytest's own limit of minutes ends a wait in vain."""
    while not condition():
        time.sleep(0.02)


def let_time_run_out(monkeypatch: pytest.MonkeyPatch, num_hanging: int, condition: Callable[[], bool]) -> None:
    """RankPool's clock stands still until all ranks but these have answered and the condition holds; then no time is left."""
    is_over = False

    def wait(handles, seconds):
        nonlocal is_over
        ready = multiprocessing.connection.wait(handles, 0.05)
        is_over = not ready and len(handles) == 2 * num_hanging and condition()  # a pipe and a process each
        return ready

    # The clock of the stacks runs on: it is asked after the time is over.
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + 1e6 * is_over, sleep=time.sleep)
    monkeypatch.setattr(rank_pools, "time", clock)
    monkeypatch.setattr(rank_pools, "wait", wait)


GLOBAL_VARS = "megatron.training.global_vars"


def set_global_args(args: Namespace) -> None:
    """Megatron's get_args() gives these, as in a host's training actor; to the end of the test."""
    if GLOBAL_VARS not in sys.modules:
        sys.modules[GLOBAL_VARS] = ModuleType(GLOBAL_VARS)
    vars(sys.modules[GLOBAL_VARS])["get_args"] = lambda: args


def error_of(function) -> str:
    """`TypeName: message` of what the call raises; empty if it returns. For ranks, whose exceptions do not travel."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


# Modules are imported once, everything else in a child of that process.
FORKING = """
import os, sys, torch
exec(sys.argv[1])
for code in sys.argv[2:]:
    sys.stdout.flush()
    if os.fork() == 0:
        exec(code, {"torch": torch, "__name__": "__main__"})
        sys.stdout.flush()
        os._exit(0)
    if os.wait()[1]:
        sys.exit(f"failed: {code}")
"""


def run_in_children(*codes: str, first: str = "", **environment: str) -> str:
    """What the codes print, each in a process of its own that knows no test; Triton compiles there."""
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | environment
    command = [sys.executable, "-c", FORKING, first, *codes]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
