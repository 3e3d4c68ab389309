"""What the rows of the selftest run on: the ranks, their layout, and the steps that they can take."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from math import prod

import torch

from megatron_rl.errors import ConfigError
from megatron_rl.layout.groups import Group
from megatron_rl.testing.comparison import Comparison
from megatron_rl.testing.layout_step import Layout, StepSample
from megatron_rl.testing.reference import SAMPLES_PER_PROMPT
from megatron_rl.testing.selftest_terms import Case

# A probe gives a ratio, a step gives comparisons: "" compares the whole gradient, the others a part of the parameters.
Measured = float | dict[str, Comparison]


class Bench:
    """What rows run on. After `prepare` it has the layout that was asked for, and can say which rows run."""

    megatron_version: str | None = None
    """None: it has no schedule, no DDP and no optimiser."""
    model: str = ""
    """The shape of the model in words; "": a small model, of which no kinds of parameters are compared by themselves."""
    layout: Layout
    samples: list[StepSample]
    device: torch.device
    everyone: Group | None
    """A gloo group of all ranks; None: one process."""
    probes: Sequence[str] = ()
    """Whose gradients a probe of the schedule measures: "dense", "experts"."""
    router_losses: Sequence[str] = ()
    """The auxiliary losses of routers that are exact here."""
    has_own_groups: bool = False
    """Whether micro-batches can be cut over context-parallel groups of other sizes than the layout's."""
    left_out: Sequence[str]
    cuts: dict[str, tuple[float, float]]
    """As in Setting."""

    def prepare(self, cases: Sequence[Case]) -> None:
        """Computes the truths of these rows, without the code under test."""
        raise NotImplementedError

    def probe(self, gradients: str) -> Measured:
        raise NotImplementedError

    def loss(self, case: Case) -> Measured:
        raise NotImplementedError

    def router_loss(self, name: str, *, is_per_token: bool) -> Measured:
        raise NotImplementedError


def complete_layout(asked: Layout, world_size: int, *, has_experts: bool = False) -> Layout:
    """Adds the data-parallel size that is left, and a number of micro-batches that no other size has: so a factor has one name."""
    sizes = {
        "--tensor-model-parallel-size": asked.tensor,
        "--context-parallel-size": asked.context,
        "--pipeline-model-parallel-size": asked.pipeline,
    }
    problems = [f"{flag} {size} must be at least 1" for flag, size in sizes.items() if size < 1]
    replica = prod(sizes.values())
    if not problems and world_size % replica:
        shown = " x ".join(f"{flag} {size}" for flag, size in sizes.items())
        ranks = f"{world_size} ranks do" if world_size > 1 else "1 rank does"
        problems.append(
            f"{ranks} not divide into model replicas of {replica} ({shown}); start a multiple of {replica}: torchrun "
            f"--nproc-per-node {replica} -m megatron_rl selftest ..."
        )
    if asked.sequence_parallel and asked.tensor == 1:
        problems.append("--sequence-parallel does nothing with --tensor-model-parallel-size 1: remove it, or set a size above 1")
    if has_experts and not problems:
        asked = replace(asked, expert_tensor=asked.tensor if asked.expert_tensor is None else asked.expert_tensor)
        problems += expert_layout_problems(asked, world_size)
    if problems:
        raise ConfigError(problems)
    data = world_size // replica
    taken = {asked.tensor, asked.context, asked.pipeline, asked.expert, data, data * asked.context, SAMPLES_PER_PROMPT}
    return replace(asked, data=data, num_microbatches=next(number for number in count(2) if number not in taken))


def expert_layout_problems(asked: Layout, world_size: int) -> Iterator[str]:
    sizes = {"--expert-model-parallel-size": asked.expert, "--expert-tensor-parallel-size": asked.expert_tensor or 1}
    product = prod(sizes.values()) * asked.pipeline
    if min(sizes.values()) < 1 or world_size % product:
        shown = " x ".join(f"{flag} {size}" for flag, size in sizes.items())
        whole = f"{shown} x --pipeline-model-parallel-size {asked.pipeline}"
        yield f"{whole} must divide {world_size} ranks: start a multiple of {product}"


def refuse_tf32(device: torch.device) -> None:
    """Turns TF32 off: its 10-bit mantissa is as large as the errors that the selftest finds. ConfigError where it stays on."""
    if device.type != "cuda":
        return
    os.environ.pop("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", None)  # some containers set it
    torch.set_float32_matmul_precision("highest")
    if torch.backends.cuda.matmul.allow_tf32:
        raise ConfigError("float32 products run in TF32 here: start with TORCH_ALLOW_TF32_CUBLAS_OVERRIDE unset")
