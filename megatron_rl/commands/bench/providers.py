"""Ours and what torch alone offers, as providers of `bench losses`; other people's kernels are in peers.py, never copied."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.commands.bench.cases import LossProblem
from megatron_rl.commands.bench.harness import Check, NotSupported, Provider, Step
from megatron_rl.config import Backend
from megatron_rl.layout.groups import SINGLE, Group
from megatron_rl.losses import policy_loss
from megatron_rl.ops.backends import resolve_backend

OURS = "ours, in place"
OURS_OUT_OF_PLACE = "ours"
OURS_ENTROPY = "ours, in place, entropy"
EAGER = "eager torch"
COMPILED = "torch.compile"
# So large that a wrong entropy gradient would show beside the policy's.
ENTROPY_COEFFICIENT = 3.0

# log_probs [T] of the loaded set, differentiable with respect to the given [T, v]
LogProbs = Callable[[LossProblem, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Result:
    loss: Tensor  # 0-d
    log_probs: Tensor | None  # [T]
    gradient: Tensor  # [*, v]


class FakeGroups:
    """Process groups whose other ranks are not there: nothing is sent. all-gather hands back our own part in every place, and
    all-reduce leaves the values as they are, so the kernels do the work of a rank of `size` without its communication."""

    WORLD_SIZE = 8

    @staticmethod
    def get(size: int):  # -> dist.ProcessGroup
        # The module is torch's own test double, present in every release; without it this row says so.
        from torch.testing._internal.distributed.fake_pg import FakeStore

        if not dist.is_initialized():
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=FakeGroups.WORLD_SIZE)
        if dist.get_backend() != "fake":
            raise NotSupported("torch.distributed is initialised with real ranks in this process")
        if size == FakeGroups.WORLD_SIZE:
            return dist.group.WORLD
        return dist.new_group(list(range(size)))

    @staticmethod
    def close() -> None:
        if dist.is_initialized() and dist.get_backend() == "fake":
            dist.destroy_process_group()


def step_of(
    problem: LossProblem,
    compute: Callable[[Tensor], tuple[Tensor, Tensor | None]],  # logits [T, v] -> loss, log_probs [T]
    **check_options,
) -> Step:
    """Forward and backward through autograd; the logits are an operator's output, as in a model, and not a leaf."""

    def run() -> Result:
        head_output = problem.logits.detach().requires_grad_().view_as(problem.logits)
        loss, log_probs = compute(head_output)
        (gradient,) = torch.autograd.grad(loss, head_output)
        return Result(loss.detach(), None if log_probs is None else log_probs.detach(), gradient)

    return Step(problem.load, run, lambda result: check(problem, result, **check_options))


def check(problem: LossProblem, result: Result, row_index: Tensor | None = None, **options) -> list[Check]:
    return [
        *problem.check_loss(result.loss, result.log_probs, **options),
        *problem.check_gradient(result.gradient, row_index=row_index, **options),
    ]


def ours(name: str, backend: str, *, inplace: bool, metrics: str = "none", entropy_coefficient: float = 0.0) -> Provider:
    def prepare(problem: LossProblem) -> Step:
        if backend == Backend.TRITON:
            needs_cuda(problem)
        resolve_backend(backend, problem.logits)  # says what is missing
        case = problem.case
        # all-gather copies our partials to all ranks: each probability is divided by their number.
        tp_group: Group = SINGLE if case.shards == 1 else FakeGroups.get(case.shards)
        options = {"tp_group": tp_group, "cp_group": SINGLE, "backend": backend, "inplace": inplace, "metrics": metrics}
        if entropy_coefficient:
            options |= {"entropy_coefficient": entropy_coefficient, "regularizer_weights": problem.regularizer_weights}

        def compute(logits: Tensor):
            inputs = problem.current
            old_log_probs = inputs.old_log_probs if case.shards == 1 else inputs.old_log_probs - math.log(case.shards)
            packed = (inputs.advantages, problem.loss_mask, problem.cu_seqlens, problem.token_weights)
            output = policy_loss(case.loss, logits, inputs.labels, old_log_probs, *packed, **options)
            return output.loss, output.log_probs

        return step_of(problem, compute, entropy_coefficient=entropy_coefficient, num_replicas=case.shards)

    return Provider(name, prepare, is_ours=True)


def needs_cuda(problem: LossProblem) -> None:
    if not problem.logits.is_cuda:
        raise NotSupported("the Triton kernels need CUDA")


def torch_policy_loss(problem: LossProblem, log_probs: Tensor) -> Tensor:  # [T] -> 0-d
    """GSPO or GRPO over packed documents in plain torch, token mean: what a peer that ends at log-probabilities still needs."""
    inputs, documents = problem.current, problem.documents
    log_ratio = torch.where(problem.loss_mask, log_probs - inputs.old_log_probs, 0.0)
    advantages = inputs.advantages
    if problem.case.loss == "gspo":
        sums = torch.zeros_like(advantages).index_add(0, documents, log_ratio)
        ratio = (sums / problem.token_counts.clamp(min=1)).exp()
    else:
        ratio, advantages = log_ratio.exp(), advantages[documents]
    clipped = ratio.clamp(1 - problem.clip_low, 1 + problem.clip_high)
    values = -torch.minimum(ratio * advantages, clipped * advantages)
    values = values[documents] if problem.case.loss == "gspo" else values
    return torch.where(problem.loss_mask, values, 0.0).sum() / problem.num_unmasked


def from_log_probs(name: str, log_probs: Callable[[LossProblem], LogProbs], leaves_out: str) -> Provider:
    """A provider of log-probabilities alone, followed by torch_policy_loss. `log_probs(problem)` finds it once, untimed."""

    def prepare(problem: LossProblem) -> Step:
        function = log_probs(problem)

        def compute(logits: Tensor):
            values = function(problem, logits)
            return torch_policy_loss(problem, values), values

        return step_of(problem, compute)

    return Provider(name, prepare, leaves_out)


def whole_vocabulary_only(problem: LossProblem) -> None:
    if problem.case.shards != 1:
        raise NotSupported("no vocabulary shards")


def _eager(problem: LossProblem) -> LogProbs:
    whole_vocabulary_only(problem)

    def function(problem: LossProblem, logits: Tensor) -> Tensor:
        # As TRL's selective_log_softmax on fp32 logits: the target less logsumexp, one sample at a time to bound memory.
        samples = zip(logits.split(problem.lengths), problem.current.labels.split(problem.lengths), strict=True)
        parts = []
        for rows, labels in samples:
            x = rows.float()
            parts.append(x.gather(1, labels[:, None])[:, 0] - x.logsumexp(-1))
        return torch.cat(parts)

    return function


def _compiled(problem: LossProblem) -> LogProbs:
    whole_vocabulary_only(problem)
    if not problem.logits.is_cuda:
        raise NotSupported("compiles for tens of seconds on a CPU: `bench cpu` compares there")
    compiled = _compile_log_probs()
    return lambda problem, logits: compiled(logits, problem.current.labels)


@functools.cache
def _compile_log_probs() -> Callable[[Tensor, Tensor], Tensor]:
    """Once a run, as its user has it: further shapes recompile or turn dynamic as torch decides."""

    def log_probs(logits: Tensor, labels: Tensor) -> Tensor:
        x = logits.float()
        return x.gather(1, labels[:, None])[:, 0] - x.logsumexp(-1)

    return torch.compile(log_probs)


def own_providers(device_kind: str) -> list[Provider]:
    """The first is the one that all others are compared with."""
    torch_twins = [
        ours("ours, torch, in place", Backend.TORCH, inplace=True),
        ours("ours, torch", Backend.TORCH, inplace=False),
    ]
    triton = [
        ours(OURS, Backend.TRITON, inplace=True),
        ours(OURS_OUT_OF_PLACE, Backend.TRITON, inplace=False),
        ours(OURS_ENTROPY, Backend.TRITON, inplace=True, metrics="with_entropy"),
        ours("ours, in place, metrics", Backend.TRITON, inplace=True, metrics="basic"),
        ours("ours, in place, entropy bonus", Backend.TRITON, inplace=True, entropy_coefficient=ENTROPY_COEFFICIENT),
    ]
    torch_alone = [
        from_log_probs(EAGER, _eager, "vocabulary shards, entropy, context parallelism"),
        from_log_probs(COMPILED, _compiled, "vocabulary shards, entropy, context parallelism; compiles for each new kind of shape"),
    ]
    own = [*torch_twins, triton[0]] if device_kind == "cpu" else [*triton, torch_twins[1]]
    return own + torch_alone


def add_checkout(path: str) -> None:
    """Makes a peer's checkout importable, behind everything installed: it must not shadow torch or triton."""
    if path not in sys.path:
        sys.path.append(path)
