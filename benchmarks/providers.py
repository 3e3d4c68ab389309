"""Providers that are not peers: megatron_rl, plain torch, bare matmuls. Only this file calls megatron_rl."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import problems
from benchmarks.measure import NOT_SUPPORTED, Check, Provider, Step, Unavailable
from benchmarks.problems import BenchmarkCase, HeadProblem, Inputs, LogitsProblem, Problem, Result
from megatron_rl.config import DEFAULT_MAX_LOGITS_BYTES, Backend
from megatron_rl.layout.groups import SINGLE
from megatron_rl.lm_head import fp32_head_logits
from megatron_rl.loss_hub import get_policy_loss
from megatron_rl.losses import linear_policy_loss, policy_loss
from megatron_rl.ops.assumed_scale import AssumedScale
from megatron_rl.ops.backends import GradientConfiguration, StatisticsConfiguration, resolve_backend
from megatron_rl.ops.linear_head import bytes_per_logit, chunk_capacity
from megatron_rl.ops.linear_log_probs import linear_log_probs
from megatron_rl.ops.linear_schedule import Plan, document_bins, schedule_documents, schedule_rows
from megatron_rl.ops.log_probs import vocab_parallel_log_probs, vocab_shard
from megatron_rl.ops.log_probs_torch import logits_gradient_torch, row_results_torch

# From logits.
OURS, OURS_ENTROPY, ONE_READ = "ours, in place", "ours, in place, entropy", "ours, in place, one read"
# The factor that backward delivers is 1.
GUESSES = {f"{ONE_READ}, right guess": 1.0, f"{ONE_READ}, wrong guess": 2.0}
EAGER, COMPILED = "eager torch", "torch.compile"
CPU_OURS, CPU_OURS_IN_PLACE = "ours, torch", "ours, torch, in place"
SHIPPED, TORCH_TWIN = ", as shipped", "torch twin"
# So large that a wrong entropy gradient would show beside the policy's.
ENTROPY_COEFFICIENT = 3.0
# A program has 32 lanes a warp, each loads 128 bits: more warps are more lanes.
STATISTICS_CONFIGURATIONS = tuple(
    StatisticsConfiguration(lanes=32 * warps, tiles=tiles, num_warps=warps) for warps in (4, 8) for tiles in (1, 2, 4)
)
GRADIENT_CONFIGURATIONS = tuple(
    GradientConfiguration(block=block, num_warps=warps) for block, warps in ((4096, 8), (2048, 4), (8192, 8))
)
# From hidden states.
THREE_MATMULS, UNFUSED, FUSED, FUSED_SMALL = "three matmuls", "unfused", "ours", "ours, into main_grad, 4096 rows"
FUSED_SCALED = "ours, scaled exp"
FUSED_APART = "ours, statistics and gradient apart"
LOGITS_MATMUL, HIDDEN_MATMUL, WEIGHT_MATMUL = "one matmul: logits", "one matmul: dX", "one matmul: dW"
FORWARD, FORWARD_FP32 = "ours, forward only", "ours, forward only, fp32 logits"
ONE_MATMUL = (LOGITS_MATMUL, HIDDEN_MATMUL, WEIGHT_MATMUL, FORWARD, FORWARD_FP32)
SMALL_ROWS, FAKE_RANKS = 4096, 8

Compute = Callable[..., tuple[Tensor, Tensor | None]]  # (logits) or (hidden, weight) -> loss, log_probs [T] or None
LogProbs = Callable[..., Tensor]  # (logits) or (hidden, weight) -> log_probs [T] of the loaded set, differentiable


def fake_group(size: int) -> dist.ProcessGroup:
    """A group whose other ranks are absent. An all-gather returns our own part in every place; an all-reduce does not change the
    values. So the kernels do the work of one rank of `size`, without communication."""
    # This is torch's own test double. If a release lacks it, the row says so.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=FAKE_RANKS)
    if dist.get_backend() != "fake":
        raise Unavailable(NOT_SUPPORTED, "torch.distributed is initialised with real ranks in this process")
    return dist.group.WORLD if size == FAKE_RANKS else dist.new_group(list(range(size)))


def close_fake_groups() -> None:
    if dist.is_initialized() and dist.get_backend() == "fake":
        dist.destroy_process_group()


def needs_cuda(problem: Problem) -> None:
    if problem.device.type != "cuda":
        raise Unavailable(NOT_SUPPORTED, "its kernels need CUDA")


def whole_vocabulary_only(problem: Problem) -> None:
    if problem.case.shards != 1:
        raise Unavailable(NOT_SUPPORTED, "no vocabulary shards")


def step_of(problem: Problem, compute: Compute, **check_options) -> Step:
    """Forward and backward through autograd, which returns the gradients and keeps no copy."""

    def run() -> Result:
        leaves = problem.leaves()
        loss, log_probs = compute(*leaves)
        gradients = torch.autograd.grad(loss, leaves)
        return Result(loss.detach(), None if log_probs is None else log_probs.detach(), gradients)

    return Step(problem.load, run, lambda result: problem.check(result, **check_options))


def torch_policy_loss(problem: Problem, log_probs: Tensor) -> Tensor:  # [T] -> 0-d
    """GSPO or GRPO over packed documents in plain torch, token mean. A peer that ends at log-probabilities needs it."""
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


def from_log_probs(name: str, find: Callable[[Problem], LogProbs], leaves_out: str) -> Provider:
    """A provider that computes only log-probabilities, followed by torch_policy_loss. `find(problem)` imports it once, untimed."""

    def prepare(problem: Problem) -> Step:
        function = find(problem)

        def compute(*leaves: Tensor):
            log_probs = function(*leaves)
            return torch_policy_loss(problem, log_probs), log_probs

        return step_of(problem, compute)

    return Provider(name, prepare, leaves_out)


def package_loss(problem: Problem, logits: Tensor, **options) -> tuple[Tensor, Tensor]:
    """policy_loss of the loaded set. In a fake group the softmax counts our shard once for each rank. So do the old log-probs."""
    inputs, shards = problem.current, problem.case.shards
    old_log_probs = inputs.old_log_probs if shards == 1 else inputs.old_log_probs - math.log(shards)
    packed = (inputs.advantages, problem.loss_mask, problem.cu_seqlens, problem.token_weights)
    # Groups that communicate through the CPU compare their arguments by default. The fake one stands for NCCL's, which do not.
    options |= {"cp_group": SINGLE, "check_ranks": False}
    output = policy_loss(problem.case.loss, logits, inputs.labels, old_log_probs, *packed, **options)
    return output.loss, output.log_probs


# From logits


def loss_providers(device_kind: str) -> list[Provider]:
    """All others are compared with the first one."""
    torch_twins = [
        ours("ours, torch, in place", Backend.TORCH, inplace=True),
        ours("ours, torch", Backend.TORCH, inplace=False),
    ]
    triton = [
        ours(OURS, Backend.TRITON, inplace=True),
        ours("ours", Backend.TRITON, inplace=False),
        ours(OURS_ENTROPY, Backend.TRITON, inplace=True, metrics="with_entropy"),
        Provider(ONE_READ, one_read, is_ours=True),
        *(Provider(name, functools.partial(one_read, guess=guess), is_ours=True) for name, guess in GUESSES.items()),
        ours("ours, in place, metrics", Backend.TRITON, inplace=True, metrics="basic"),
        ours("ours, in place, entropy bonus", Backend.TRITON, inplace=True, entropy_coefficient=ENTROPY_COEFFICIENT),
    ]
    torch_alone = [
        from_log_probs(EAGER, _eager, "vocabulary shards, entropy, context parallelism"),
        from_log_probs(COMPILED, _compiled, "vocabulary shards, entropy, context parallelism; compiles for each new kind of shape"),
    ]
    own = [*torch_twins, triton[0]] if device_kind == "cpu" else [*triton, torch_twins[1]]
    return own + torch_alone


def ours(name: str, backend: str, *, inplace: bool, metrics: str = "none", entropy_coefficient: float = 0.0) -> Provider:
    def prepare(problem: LogitsProblem) -> Step:
        if backend == Backend.TRITON:
            needs_cuda(problem)
        resolve_backend(backend, problem.logits)  # says what is missing
        shards = problem.case.shards
        tp_group = SINGLE if shards == 1 else fake_group(shards)
        options = {"tp_group": tp_group, "backend": backend, "inplace": inplace, "metrics": metrics}
        if entropy_coefficient:
            options |= {"entropy_coefficient": entropy_coefficient, "regularizer_weights": problem.token_weights}
        compute = lambda logits: package_loss(problem, logits, **options)  # noqa: E731
        return step_of(problem, compute, entropy_coefficient=entropy_coefficient, num_replicas=shards)

    return Provider(name, prepare, is_ours=True)


def one_read(problem: LogitsProblem, guess: float | None = None) -> Step:
    """The gradient in forward, where there are rows enough; elsewhere the row would be that of two kernels.

    guess: the factor that each forward assumes; None: it is declared.
    """
    needs_cuda(problem)
    whole_vocabulary_only(problem)
    resolve_backend(Backend.TRITON, problem.logits)  # says what is missing
    if get_policy_loss(problem.case.loss).level != "token":
        raise Unavailable(NOT_SUPPORTED, "a coefficient needs the whole sample: two kernels")
    from megatron_rl.ops.backends import one_read_configuration

    rows, columns = problem.logits.shape
    if one_read_configuration(rows, columns * problem.logits.itemsize, problem.logits.device) is None:
        raise Unavailable(NOT_SUPPORTED, "the rows are too few: two kernels")
    options = {"tp_group": SINGLE, "backend": Backend.TRITON, "inplace": True, "loss_scale": 1.0}
    step = step_of(problem, lambda logits: package_loss(problem, logits, **options))
    if guess is None:
        return step
    scale = options["loss_scale"] = AssumedScale()

    def load(index: int) -> None:
        problem.load(index)
        scale.assume(problem.logits.device).last.fill_(guess)  # the last backward has delivered 1

    return replace(step, load=load)


def _eager(problem: LogitsProblem) -> LogProbs:
    whole_vocabulary_only(problem)

    def function(logits: Tensor) -> Tensor:
        # As TRL's selective_log_softmax on fp32 logits: the target less logsumexp, one sample at a time to bound memory.
        samples = zip(logits.split(problem.lengths), problem.current.labels.split(problem.lengths), strict=True)
        return torch.cat([_target_less_logsumexp(rows, labels) for rows, labels in samples])

    return function


def _compiled(problem: LogitsProblem) -> LogProbs:
    whole_vocabulary_only(problem)
    if problem.device.type != "cuda":
        raise Unavailable(NOT_SUPPORTED, "compiles for tens of seconds on a CPU: `python -m benchmarks cpu` compares there")
    compiled = _compile_log_probs()
    return lambda logits: compiled(logits, problem.current.labels)


@functools.cache
def _compile_log_probs() -> Callable[[Tensor, Tensor], Tensor]:
    """Compiles once in a run, as a user does. For further shapes torch decides whether it compiles again or makes sizes dynamic."""
    return torch.compile(_target_less_logsumexp)


def _target_less_logsumexp(logits: Tensor, labels: Tensor) -> Tensor:
    x = logits.float()
    return x.gather(1, labels[:, None])[:, 0] - x.logsumexp(-1)


def log_probs_providers() -> list[Provider]:
    """Log-probabilities on the CPU, and the gradient of their sum."""
    eager = lambda logits, labels: torch.log_softmax(logits, -1, dtype=torch.float32).gather(1, labels[:, None])[:, 0]  # noqa: E731
    ours = functools.partial(vocab_parallel_log_probs, tp_group=SINGLE)

    def of(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[LogitsProblem], LogProbs]:
        return lambda problem: lambda logits: function(logits, problem.current.labels)

    return [
        summed_log_probs(EAGER, of(eager)),
        summed_log_probs(CPU_OURS, of(ours), is_ours=True),
        summed_log_probs(CPU_OURS_IN_PLACE, of(functools.partial(ours, inplace=True)), is_ours=True),
    ]


def cpu_loss_providers() -> list[Provider]:
    """The whole loss on the CPU; all others are compared with the first one."""
    in_place = ((CPU_OURS, False), (CPU_OURS_IN_PLACE, True))
    return [
        from_log_probs(EAGER, _eager, "vocabulary shards, entropy, context parallelism"),
        *(ours(name, Backend.TORCH, inplace=is_in_place) for name, is_in_place in in_place),
    ]


def summed_log_probs(name: str, find: Callable[[LogitsProblem], LogProbs], *, is_ours: bool = False) -> Provider:
    """The sum of log-probabilities, whose gradient is that of each."""

    def prepare(problem: LogitsProblem) -> Step:
        function = find(problem)
        return step_of(problem, lambda logits: ((found := function(logits)).sum(), found))

    return Provider(name, prepare, is_ours=is_ours)


# The row kernels alone


class KernelProblem(LogitsProblem):
    """The inputs of the gradient kernel (softmax statistics of rows, coefficients of a loss) are made before."""

    def __init__(self, case: BenchmarkCase, inputs: Inputs, *, seed: int = 0):
        super().__init__(case, inputs, seed=seed)
        self.shard = vocab_shard(case.num_columns, 1.0, None, SINGLE)
        self.given = []
        for index in range(self.num_sets if case.kernel == problems.GRADIENT else 0):
            self.load(index)
            rows = self.row_results(row_results_torch, with_entropy=True)
            self.given.append((rows.maximum, rows.total, rows.entropy, self.exact_loss().coefficients.float()))
        # An entropy bonus: the loss falls where the entropy rises.
        self.entropy_coefficients = -self.entropy_weights(ENTROPY_COEFFICIENT).float() if case.with_entropy else None

    def load(self, index: int) -> None:
        super().load(index)
        self.index = index

    def row_results(self, function: Callable, **options):
        return function(self.logits, self.current.labels, None, self.shard, SINGLE, **options)

    def step(self, row_results: Callable, logits_gradient: Callable, **options) -> Step:
        with_entropy = self.case.with_entropy

        def statistics() -> Result:
            found = self.row_results(row_results, with_entropy=with_entropy, **options)
            return Result(log_probs=found.log_probs, entropy=found.entropy if with_entropy else None)

        def gradient() -> Result:
            arguments = (self.logits, self.current.labels, None, *self.given[self.index], self.entropy_coefficients, self.shard)
            return Result(gradients=(logits_gradient(*arguments, out=self.logits, **options),))

        if self.case.kernel == problems.STATISTICS:
            return Step(self.load, statistics, self.check)
        coefficient = ENTROPY_COEFFICIENT if with_entropy else 0.0
        return Step(self.load, gradient, lambda result: self.check(result, entropy_coefficient=coefficient))


def kernel_providers(case: BenchmarkCase, device_kind: str) -> list[Provider]:
    """Each configuration; on CUDA the shipped one is first. The torch twin shows what the kernel replaces."""
    is_statistics = case.kernel == problems.STATISTICS
    shipped = StatisticsConfiguration() if is_statistics else GradientConfiguration()
    others = STATISTICS_CONFIGURATIONS if is_statistics else GRADIENT_CONFIGURATIONS
    triton = [_configured(configuration, configuration == shipped) for configuration in dict.fromkeys((shipped, *others))]
    twin = Provider(TORCH_TWIN, lambda problem: problem.step(row_results_torch, logits_gradient_torch), is_ours=True)
    return [twin, *triton] if device_kind == "cpu" else [*triton, twin]


def _configured(configuration: StatisticsConfiguration | GradientConfiguration, is_shipped: bool) -> Provider:
    is_gradient = isinstance(configuration, GradientConfiguration)
    cut = f"block {configuration.block}" if is_gradient else f"lanes {configuration.lanes}, tiles {configuration.tiles}"

    def prepare(problem: KernelProblem) -> Step:
        needs_cuda(problem)
        from megatron_rl.ops.log_probs_triton import logits_gradient_triton, row_results_triton

        return problem.step(row_results_triton, logits_gradient_triton, configuration=configuration)

    return Provider(f"{cut}, {configuration.num_warps} warps" + (SHIPPED if is_shipped else ""), prepare, is_ours=True)


# From hidden states


def chunk_rows(case: BenchmarkCase, device: torch.device, max_logits_bytes: int) -> int:
    """Rows in a chunk of the fused head; the bare matmuls use the same number. ConfigError for a budget without room for a row."""
    return min(chunk_capacity(_empty_weight(case, device), max_logits_bytes, False, case.num_tokens), case.num_tokens)


def bytes_for(rows: int, case: BenchmarkCase, device: torch.device) -> int:
    """max_logits_bytes of chunks of `rows` rows."""
    return rows * case.vocab_size * bytes_per_logit(_empty_weight(case, device), False)


def _empty_weight(case: BenchmarkCase, device: torch.device) -> Tensor:
    """The case's shape, dtype and device without its memory."""
    return torch.zeros(1, 1, dtype=case.dtype, device=device).expand(case.vocab_size, case.hidden_size)


def plan_of(case: BenchmarkCase, rows: int) -> tuple[str, int]:
    """(the plans that the fused head takes with chunks of up to `rows` rows, number of chunks)."""
    counts = [length - round(case.masked * length) for length in case.lengths]
    if case.loss == "grpo":
        items = schedule_rows(torch.arange(sum(counts)), rows)
    else:
        numbers, idle = torch.arange(sum(counts)).split(counts), [False] * len(counts)
        items = schedule_documents(document_bins(counts, rows), numbers, rows, has_row_terms=case.with_kl, is_idle=idle)
    used = {item.plan for item in items}
    return "+".join(plan for plan in Plan if plan in used), sum(len(item.chunks) for item in items)


def head_options(problem: HeadProblem) -> dict[str, Any]:
    options: dict[str, Any] = {"token_counts": problem.token_counts, "tp_group": SINGLE}
    if problem.case.with_kl:
        options |= {"ref_log_probs": problem.current.ref_log_probs, "kl_coefficient": problems.KL_COEFFICIENT}
        options |= {"regularizer_weights": problem.token_weights}
    return options


def fused(
    name: str,
    *,
    max_logits_bytes: int = DEFAULT_MAX_LOGITS_BYTES,
    fp32_logits: bool = False,
    into_main_grad: bool = False,
    scaled_exp: bool = False,
    rows: int | None = None,
    is_apart: bool = False,
) -> Provider:
    """Mask and document bounds are on the host, as in Megatron's batches. rows: the size of a chunk, instead of the budget.

    is_apart: a kernel for the statistics and another for the gradient, where one kernel would do both.
    """

    def prepare(problem: HeadProblem) -> Step:
        case, weight = problem.case, torch.nn.Parameter(problem.weight)
        options = {"max_logits_bytes": max_logits_bytes if rows is None else bytes_for(rows, case, problem.device)}
        options |= {"fp32_logits": fp32_logits, "document_lengths": problem.lengths, "cp_group": SINGLE}
        options |= {"scaled_exp": True, "backend": Backend.TRITON} if scaled_exp else {}
        if into_main_grad:
            weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
            options["loss_scale"] = 1.0

        def load(index: int) -> None:
            problem.load(index)
            if into_main_grad:
                weight.main_grad.zero_()

        def run() -> Result:
            inputs = problem.current
            hidden = inputs.source.detach().requires_grad_()
            packed = (inputs.advantages, problem.host_loss_mask, problem.host_cu_seqlens, problem.token_weights)
            arguments = (case.loss, hidden, weight, inputs.labels, inputs.old_log_probs, *packed)
            with two_row_kernels() if is_apart else contextlib.nullcontext():
                output = linear_policy_loss(*arguments, **options, **head_options(problem))
            of_hidden, of_weight = torch.autograd.grad(output.loss, (hidden, weight), allow_unused=into_main_grad)
            return Result(output.loss.detach(), output.log_probs, (of_hidden, weight.main_grad if into_main_grad else of_weight))

        precision = torch.float32 if fp32_logits else None
        return Step(load, run, lambda result: problem.check(result, precision=precision))

    return Provider(name, prepare, is_ours=True)


@contextlib.contextmanager
def two_row_kernels() -> Iterator[None]:
    from megatron_rl.ops import unit_gradient_triton

    with mock.patch.object(unit_gradient_triton, "plan_unit_gradient", lambda logits, out: None):
        yield


def forward_only(name: str, *, max_logits_bytes: int, fp32_logits: bool = False) -> Provider:
    def prepare(problem: HeadProblem) -> Step:
        options = {"max_logits_bytes": max_logits_bytes, "fp32_logits": fp32_logits, "loss_mask": problem.host_loss_mask}

        def run() -> Result:
            inputs = problem.current
            with torch.no_grad():
                return Result(log_probs=linear_log_probs(inputs.source, problem.weight, inputs.labels, tp_group=SINGLE, **options))

        precision = torch.float32 if fp32_logits else None
        return Step(problem.load, run, lambda result: problem.check(result, precision=precision))

    return Provider(name, prepare, "the loss and its gradient", is_ours=True)


def unfused(name: str, *, inplace: bool, fp32_head: bool = False) -> Provider:
    """All logits, then policy_loss: this is what --fused-lm-head-loss replaces. In place, as the training command calls it."""

    def prepare(problem: HeadProblem) -> Step:
        def compute(hidden: Tensor, weight: Tensor):
            logits = fp32_head_logits(hidden, weight, tp_group=SINGLE) if fp32_head else hidden @ weight.t()
            return package_loss(problem, logits, inplace=inplace, **head_options(problem))

        return step_of(problem, compute, precision=torch.float32 if fp32_head else None)

    return Provider(name, prepare, is_ours=True)


def matmuls(name: str, passes: str, max_logits_bytes: int, num_rows: int | None = None) -> Provider:
    """Only products, into existing tensors: l logits, x dX, w dW. num_rows: rows of a chunk; None: as many as the fused head."""

    def prepare(problem: HeadProblem) -> Step:
        case, weight = problem.case, problem.weight
        rows = min(num_rows or chunk_rows(case, problem.device, max_logits_bytes), case.num_tokens)
        # The logits are multiplied in place of their gradient: sizes and kind of numbers are the same.
        buffer = problem.sets[0].source[:rows] @ weight.t()
        of_weight = torch.zeros_like(weight) if "w" in passes else None
        of_hidden = torch.zeros(rows, case.hidden_size, dtype=case.dtype, device=problem.device)

        def run() -> Tensor:
            for hidden in problem.current.source.split(rows):
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
            return problem.check(Result(logits=logits)) if "l" in passes else [Check("products of the shape", 0.0, 0.0)]

        return Step(problem.load, run, check)

    return Provider(name, prepare, "everything but the products")


def head_providers(case: BenchmarkCase, device_kind: str, max_logits_bytes: int) -> list[Provider]:
    """The first one is the three matmuls of the ratios. It also shows drift."""
    budget = {"max_logits_bytes": max_logits_bytes}
    first = [matmuls(THREE_MATMULS, "lxw", max_logits_bytes), fused(FUSED, **budget), unfused(UNFUSED, inplace=True)]
    if device_kind == "cpu":
        return [*first, unfused("unfused, out of place", inplace=False), forward_only(FORWARD, **budget)]
    if not case.is_dense or case.documents == 1:
        return [*first, fused("ours, into main_grad", into_main_grad=True, **budget), matmuls(LOGITS_MATMUL, "l", max_logits_bytes)]
    return [
        *first,
        matmuls("three matmuls, 4096 rows", "lxw", max_logits_bytes, SMALL_ROWS),
        *(matmuls(name, one, max_logits_bytes) for name, one in ((LOGITS_MATMUL, "l"), (HIDDEN_MATMUL, "x"), (WEIGHT_MATMUL, "w"))),
        fused(FUSED_APART, is_apart=True, **budget),
        fused(FUSED_SCALED, scaled_exp=True, **budget),
        fused("ours, fp32 logits", fp32_logits=True, **budget),
        fused("ours, scaled exp, fp32 logits", scaled_exp=True, fp32_logits=True, **budget),
        fused("ours, into main_grad", into_main_grad=True, **budget),
        fused(FUSED_SMALL, into_main_grad=True, rows=SMALL_ROWS),
        forward_only(FORWARD, **budget),
        forward_only(FORWARD_FP32, fp32_logits=True, **budget),
        unfused("unfused, out of place", inplace=False),
        unfused("unfused, fp32 head", inplace=True, fp32_head=True),
    ]
