"""Ours, the unfused path and bare matmuls as providers of `bench head`; other people's are in head_peers.py, never copied."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_rl.commands.bench.harness import Check, Provider, Step
from megatron_rl.commands.bench.head_cases import KL_COEFFICIENT, HeadCase
from megatron_rl.commands.bench.head_problem import HeadProblem, Result
from megatron_rl.config import DEFAULT_MAX_LOGITS_BYTES
from megatron_rl.layout.groups import SINGLE
from megatron_rl.lm_head import fp32_head_logits
from megatron_rl.losses import linear_policy_loss, policy_loss
from megatron_rl.ops.linear_head import bytes_per_logit
from megatron_rl.ops.linear_log_probs import chunk_capacity, linear_log_probs
from megatron_rl.ops.linear_schedule import MOVE_DIVISOR

THREE_MATMULS, THREE_SMALL = "three matmuls", "three matmuls, 4096 rows"
LOGITS_MATMUL, HIDDEN_MATMUL, WEIGHT_MATMUL = "one matmul: logits", "one matmul: dX", "one matmul: dW"
OURS = "ours"
OURS_FP32 = "ours, fp32 logits"
OURS_MAIN_GRAD = "ours, into main_grad"
OURS_SMALL = "ours, into main_grad, 4096 rows"
OURS_FORWARD = "ours, forward only"
OURS_FORWARD_FP32 = "ours, forward only, fp32 logits"
UNFUSED = "unfused"
UNFUSED_COPY = "unfused, out of place"
UNFUSED_FP32 = "unfused, fp32 head"
ONE_MATMUL = (LOGITS_MATMUL, HIDDEN_MATMUL, WEIGHT_MATMUL, OURS_FORWARD, OURS_FORWARD_FP32)
SMALL_ROWS = 4096


def chunk_rows(case: HeadCase, device: torch.device, max_logits_bytes: int) -> int:
    """Rows of a chunk that ours takes there; the bare matmuls take the same."""
    return min(chunk_capacity(_nothing_like(case, device), max_logits_bytes, False, case.num_tokens), case.num_tokens)


def bytes_for(rows: int, case: HeadCase, device: torch.device) -> int:
    """max_logits_bytes of chunks of `rows` rows: a block that moves rows is beside them."""
    weight = _nothing_like(case, device)
    return (rows + -(-rows // MOVE_DIVISOR)) * case.vocab_size * bytes_per_logit(weight, False)


def _nothing_like(case: HeadCase, device: torch.device) -> Tensor:
    """A weight of the case's shape that takes no memory: its size, dtype and device are all that is asked for."""
    return torch.zeros(1, 1, dtype=case.dtype, device=device).expand(case.vocab_size, case.hidden_size)


def loss_options(problem: HeadProblem) -> dict:
    options = {"token_counts": problem.token_counts, "tp_group": SINGLE, "cp_group": SINGLE}
    if problem.case.with_kl:
        regularizers = {"kl_coefficient": KL_COEFFICIENT, "regularizer_weights": problem.token_weights}
        options |= {"ref_log_probs": problem.current.ref_log_probs, **regularizers}
    return options


def ours(
    name: str,
    *,
    max_logits_bytes: int = DEFAULT_MAX_LOGITS_BYTES,
    fp32_logits: bool = False,
    into_main_grad: bool = False,
    rows: int | None = None,
) -> Provider:
    """Mask and document bounds come from the host, as Megatron's batches have them; rows: of a chunk, instead of the budget."""

    def prepare(problem: HeadProblem) -> Step:
        case, weight = problem.case, torch.nn.Parameter(problem.weight)
        budget = max_logits_bytes if rows is None else bytes_for(rows, case, problem.device)
        if into_main_grad:
            weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)

        def load(index: int) -> None:
            problem.load(index)
            if into_main_grad:
                weight.main_grad.zero_()

        def run() -> Result:
            inputs = problem.current
            hidden = inputs.hidden.detach().requires_grad_()
            packed = (inputs.advantages, problem.host_loss_mask, problem.host_cu_seqlens, problem.token_weights)
            output = linear_policy_loss(
                case.loss,
                hidden,
                weight,
                inputs.labels,
                inputs.old_log_probs,
                *packed,
                max_logits_bytes=budget,
                fp32_logits=fp32_logits,
                document_lengths=problem.lengths,
                loss_scale=1.0 if into_main_grad else None,
                **loss_options(problem),
            )
            of_hidden, of_weight = torch.autograd.grad(output.loss, (hidden, weight), allow_unused=into_main_grad)
            return Result(output.loss.detach(), output.log_probs, of_hidden, weight.main_grad if into_main_grad else of_weight)

        precision = torch.float32 if fp32_logits else None
        return Step(load, run, lambda result: problem.check(result, precision=precision))

    return Provider(name, prepare, is_ours=True)


def forward_only(name: str, *, max_logits_bytes: int, fp32_logits: bool = False) -> Provider:
    def prepare(problem: HeadProblem) -> Step:
        def run() -> Result:
            inputs, options = problem.current, {"max_logits_bytes": max_logits_bytes, "fp32_logits": fp32_logits}
            options |= {"loss_mask": problem.host_loss_mask, "tp_group": SINGLE}
            return Result(None, linear_log_probs(inputs.hidden, problem.weight, inputs.labels, **options), None, None)

        precision = torch.float32 if fp32_logits else None
        return Step(problem.load, run, lambda result: problem.check(result, precision=precision))

    return Provider(name, prepare, "the loss and its gradient", is_ours=True)


def unfused(name: str, *, inplace: bool, fp32_head: bool = False) -> Provider:
    """All logits, then policy_loss: what --fused-lm-head-loss replaces. In place as the training command calls it."""

    def prepare(problem: HeadProblem) -> Step:
        def compute(hidden: Tensor, weight: Tensor):
            inputs = problem.current
            logits = fp32_head_logits(hidden, weight, tp_group=SINGLE) if fp32_head else hidden @ weight.t()
            packed = (inputs.advantages, problem.loss_mask, problem.cu_seqlens, problem.token_weights)
            options = loss_options(problem)
            output = policy_loss(
                problem.case.loss, logits, inputs.labels, inputs.old_log_probs, *packed, inplace=inplace, **options
            )
            return output.loss, output.log_probs

        return step_of(problem, compute, precision=torch.float32 if fp32_head else None)

    return Provider(name, prepare, is_ours=True)


def step_of(
    problem: HeadProblem,
    compute: Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]],  # hidden [T, H], weight [V, H] -> loss, log_probs [T]
    **check_options,
) -> Step:
    """Forward and backward through autograd, which hands both gradients over and keeps no copy."""

    def run() -> Result:
        hidden, weight = problem.current.hidden.detach().requires_grad_(), problem.weight.detach().requires_grad_()
        loss, log_probs = compute(hidden, weight)
        of_hidden, of_weight = torch.autograd.grad(loss, (hidden, weight))
        return Result(loss.detach(), None if log_probs is None else log_probs.detach(), of_hidden, of_weight)

    return Step(problem.load, run, lambda result: problem.check(result, **check_options))


def matmuls(name: str, passes: str, max_logits_bytes: int, num_rows: int | None = None) -> Provider:
    """Nothing but products, into tensors that are there: l logits, x dX, w dW. num_rows: of a chunk; None: as ours takes."""

    def prepare(problem: HeadProblem) -> Step:
        case, weight = problem.case, problem.weight
        rows = min(num_rows or chunk_rows(case, problem.device, max_logits_bytes), case.num_tokens)
        # In place of the logits' gradient the logits themselves are multiplied: the same sizes and kind of numbers.
        buffer = problem.sets[0].hidden[:rows] @ weight.t()
        of_weight = torch.zeros_like(weight) if "w" in passes else None
        of_hidden = torch.zeros(rows, case.hidden_size, dtype=case.dtype, device=problem.device)

        def run() -> Tensor:
            for hidden in problem.current.hidden.split(rows):
                logits = buffer[: hidden.shape[0]]
                for one in passes:
                    if one == "l":
                        torch.mm(hidden, weight.t(), out=logits)
                    elif one == "x":
                        torch.mm(logits, weight, out=of_hidden[: hidden.shape[0]])
                    else:
                        torch.mm(logits.t(), hidden, out=of_weight)
            return logits

        def check(logits: Tensor) -> list[Check]:
            if "l" in passes:
                return problem.check(Result(None, None, None, None, logits=logits))
            return [Check("products of the shape", 0.0, 0.0)]

        return Step(problem.load, run, check)

    return Provider(name, prepare, "everything but the products")


def own_providers(case: HeadCase, device_kind: str, max_logits_bytes: int) -> list[Provider]:
    """The first is the one that ratios to three matmuls are taken with, and that drift is seen by."""
    budget = {"max_logits_bytes": max_logits_bytes}
    first = [matmuls(THREE_MATMULS, "lxw", max_logits_bytes), ours(OURS, **budget), unfused(UNFUSED, inplace=True)]
    if device_kind == "cpu":
        return [*first, unfused(UNFUSED_COPY, inplace=False), forward_only(OURS_FORWARD, **budget)]
    if not case.is_dense or case.documents == 1:
        return [*first, ours(OURS_MAIN_GRAD, into_main_grad=True, **budget), matmuls(LOGITS_MATMUL, "l", max_logits_bytes)]
    return [
        *first,
        matmuls(THREE_SMALL, "lxw", max_logits_bytes, SMALL_ROWS),
        *(matmuls(name, one, max_logits_bytes) for name, one in ((LOGITS_MATMUL, "l"), (HIDDEN_MATMUL, "x"), (WEIGHT_MATMUL, "w"))),
        ours(OURS_FP32, fp32_logits=True, **budget),
        ours(OURS_MAIN_GRAD, into_main_grad=True, **budget),
        ours(OURS_SMALL, into_main_grad=True, rows=SMALL_ROWS),
        forward_only(OURS_FORWARD, **budget),
        forward_only(OURS_FORWARD_FP32, fp32_logits=True, **budget),
        unfused(UNFUSED_COPY, inplace=False),
        unfused(UNFUSED_FP32, inplace=True, fp32_head=True),
    ]
