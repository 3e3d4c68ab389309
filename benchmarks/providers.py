"""Providers that are not peers: megatron_rl, plain torch, bare matmuls. Only this file calls megatron_rl."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.measure import NOT_SUPPORTED, Provider, Step, Unavailable
from benchmarks.problems import GRADIENT, STATISTICS, BenchmarkCase, HeadProblem, Inputs, LogitsProblem, Problem, Result
from megatron_rl.config import DEFAULT_MAX_LOGITS_BYTES, Backend
from megatron_rl.declare import get_policy_loss
from megatron_rl.layout.groups import SINGLE
from megatron_rl.ops.backends import (
    GradientConfiguration,
    StatisticsConfiguration,
    resolve_backend,
    vocab_shard,
)
from megatron_rl.ops.linear_head import HeadOptions, chunk_capacity
from megatron_rl.ops.linear_log_probs import linear_log_probs
from megatron_rl.ops.log_probs import vocab_parallel_log_probs
from megatron_rl.ops.log_probs_torch import logits_gradient_torch, row_results_torch
from megatron_rl.ops.scale import AssumedScale
from megatron_rl.policy_loss import linear_policy_loss, policy_loss

# From logits.
OURS, OURS_ENTROPY, ONE_READ = "ours, in place", "ours, in place, entropy", "ours, in place, one read"
# The factor that backward delivers is 1.
GUESSES = {f"{ONE_READ}, right guess": 1.0, f"{ONE_READ}, wrong guess": 2.0}
EAGER, COMPILED = "eager torch", "torch.compile"
CPU_OURS, CPU_OURS_IN_PLACE = "ours, torch", "ours, torch, in place"
SHIPPED, TORCH_VERSION = ", as shipped", "torch version"
NOT_IN_TORCH = "vocabulary shards, entropy, context parallelism"
# A program has 32 lanes a warp, each loads 128 bits: more warps are more lanes.
STATISTICS_CONFIGURATIONS = tuple(
    StatisticsConfiguration(lanes=32 * warps, tiles=tiles, num_warps=warps) for warps in (4, 8) for tiles in (1, 2, 4)
)
GRADIENT_CONFIGURATIONS = tuple(
    GradientConfiguration(block=block, num_warps=warps) for block, warps in ((4096, 8), (2048, 4), (8192, 8))
)
# From hidden states.
THREE_MATMULS, LOGITS_MATMUL, UNFUSED, FUSED = "three matmuls", "one matmul: logits", "unfused", "ours"
FUSED_MAIN_GRAD, FUSED_SMALL = "ours, into main_grad", "ours, into main_grad, 4096 rows"
FORWARD = "ours, forward only"
ONE_MATMUL = (LOGITS_MATMUL, FORWARD)
MAX_LOGITS_BYTES, SMALL_ROWS, FAKE_RANKS = DEFAULT_MAX_LOGITS_BYTES, 4096, 8

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


def from_log_probs(name: str, find: Callable[[Problem], LogProbs], leaves_out: str, *, is_ours: bool = False) -> Provider:
    """A provider that computes only log-probabilities, followed by torch_policy_loss. `find(problem)` imports it once, untimed."""

    def prepare(problem: Problem) -> Step:
        function = find(problem)

        def compute(*leaves: Tensor):
            log_probs = function(*leaves)
            return torch_policy_loss(problem, log_probs), log_probs

        return step_of(problem, compute)

    return Provider(name, prepare, leaves_out, is_ours)


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
    torch_in_place, in_place = ours("ours, torch, in place", Backend.TORCH), ours(OURS, Backend.TRITON)
    torch_alone = [
        ours("ours, torch", Backend.TORCH, inplace=False),
        from_log_probs(EAGER, _eager, NOT_IN_TORCH),
        from_log_probs(COMPILED, _compiled, f"{NOT_IN_TORCH}; compiles for each new kind of shape"),
    ]
    if device_kind == "cpu":
        return [torch_in_place, in_place, *torch_alone]
    return [
        in_place,
        ours("ours", Backend.TRITON, inplace=False),
        ours(OURS_ENTROPY, Backend.TRITON, metrics="with_entropy"),
        Provider(ONE_READ, one_read, is_ours=True),
        *(Provider(name, functools.partial(one_read, guess=guess), is_ours=True) for name, guess in GUESSES.items()),
        *torch_alone,
    ]


def ours(name: str, backend: str, *, inplace: bool = True, metrics: str = "none") -> Provider:
    def prepare(problem: LogitsProblem) -> Step:
        if backend == Backend.TRITON:
            needs_cuda(problem)
        resolve_backend(backend, problem.logits)  # says what is missing
        shards = problem.case.shards
        tp_group = SINGLE if shards == 1 else fake_group(shards)
        options = {"tp_group": tp_group, "backend": backend, "inplace": inplace, "metrics": metrics}
        return step_of(problem, lambda logits: package_loss(problem, logits, **options), num_replicas=shards)

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
    from megatron_rl.ops.rows_triton import one_read_configuration

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
    compiled = torch.compile(_target_less_logsumexp)
    return lambda logits: compiled(logits, problem.current.labels)


def _target_less_logsumexp(logits: Tensor, labels: Tensor) -> Tensor:
    x = logits.float()
    return x.gather(1, labels[:, None])[:, 0] - x.logsumexp(-1)


def cpu_providers(case: BenchmarkCase) -> list[Provider]:
    """Log-probabilities on the CPU and the gradient of their sum, or the whole loss; all others are compared with the first one."""
    rows = ((CPU_OURS, False), (CPU_OURS_IN_PLACE, True))
    if case.kernel is None:
        return [
            from_log_probs(EAGER, _eager, NOT_IN_TORCH),
            *(ours(name, Backend.TORCH, inplace=inplace) for name, inplace in rows),
        ]
    eager = lambda logits, labels: torch.log_softmax(logits, -1, dtype=torch.float32).gather(1, labels[:, None])[:, 0]  # noqa: E731
    functions = {name: functools.partial(vocab_parallel_log_probs, tp_group=SINGLE, inplace=inplace) for name, inplace in rows}

    def of(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[LogitsProblem], LogProbs]:
        return lambda problem: lambda logits: function(logits, problem.current.labels)

    return [
        summed_log_probs(EAGER, of(eager)),
        *(summed_log_probs(name, of(function), is_ours=True) for name, function in functions.items()),
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

    def __init__(self, case: BenchmarkCase, inputs: Inputs):
        super().__init__(case, inputs)
        self.shard, self.of_rows = vocab_shard(case.num_columns, 1.0, None, SINGLE), []
        for index in range(self.num_sets if case.kernel == GRADIENT else 0):
            self.load(index)
            rows = row_results_torch(self.logits, self.current.labels, None, self.shard, SINGLE, with_entropy=False)
            _, coefficients = self.exact_loss()
            self.of_rows.append((rows.maximum, rows.total, rows.entropy, coefficients.float(), None))

    def load(self, index: int) -> None:
        super().load(index)
        self.index = index

    def step(self, row_results: Callable, logits_gradient: Callable, **options) -> Step:
        def statistics() -> Result:
            arguments = (self.logits, self.current.labels, None, self.shard, SINGLE)
            return Result(log_probs=row_results(*arguments, with_entropy=False, **options).log_probs)

        def gradient() -> Result:
            arguments = (self.logits, self.current.labels, None, *self.of_rows[self.index], self.shard)
            return Result(gradients=(logits_gradient(*arguments, out=self.logits, **options),))

        return Step(self.load, statistics if self.case.kernel == STATISTICS else gradient, self.check)


def kernel_providers(case: BenchmarkCase, device_kind: str) -> list[Provider]:
    """Each configuration; on CUDA the shipped one is first. The torch version shows what the kernel replaces."""
    is_statistics = case.kernel == STATISTICS
    shipped = StatisticsConfiguration() if is_statistics else GradientConfiguration()
    others = STATISTICS_CONFIGURATIONS if is_statistics else GRADIENT_CONFIGURATIONS
    triton = [_configured(one, SHIPPED if one == shipped else "") for one in dict.fromkeys((shipped, *others))]
    plain = Provider(TORCH_VERSION, lambda problem: problem.step(row_results_torch, logits_gradient_torch), is_ours=True)
    return [plain, *triton] if device_kind == "cpu" else [*triton, plain]


def _configured(configuration: StatisticsConfiguration | GradientConfiguration, suffix: str) -> Provider:
    is_gradient = isinstance(configuration, GradientConfiguration)
    cut = f"block {configuration.block}" if is_gradient else f"lanes {configuration.lanes}, tiles {configuration.tiles}"

    def prepare(problem: KernelProblem) -> Step:
        needs_cuda(problem)
        from megatron_rl.ops.log_probs_triton import logits_gradient_triton, row_results_triton

        return problem.step(row_results_triton, logits_gradient_triton, configuration=configuration)

    return Provider(f"{cut}, {configuration.num_warps} warps{suffix}", prepare, is_ours=True)


# From hidden states


def chunk_rows(problem: HeadProblem) -> int:
    """Rows in a chunk of the fused head; the bare matmuls use the same number."""
    num_tokens = problem.case.num_tokens
    return min(chunk_capacity(problem.weight, HeadOptions(max_logits_bytes=MAX_LOGITS_BYTES), num_tokens), num_tokens)


def fused(
    name: str,
    *,
    max_logits_bytes: int | None = None,  # MAX_LOGITS_BYTES
    metrics: str = "none",
    fp32_logits: bool = False,
    into_main_grad: bool = False,
) -> Provider:
    """Mask and document bounds are on the host, as in Megatron's batches."""

    def prepare(problem: HeadProblem) -> Step:
        case, weight = problem.case, torch.nn.Parameter(problem.weight)
        options = {"metrics": metrics, "fp32_logits": fp32_logits, "max_logits_bytes": max_logits_bytes or MAX_LOGITS_BYTES}
        options |= {"token_counts": problem.token_counts}
        options |= {"tp_group": SINGLE, "cp_group": SINGLE, "check_ranks": False}
        if into_main_grad:
            weight.main_grad = problem.main_grad = torch.zeros_like(weight, dtype=torch.float32)
            options["loss_scale"] = 1.0

        def load(index: int) -> None:
            problem.load(index)
            if into_main_grad:
                weight.main_grad.zero_()

        def run() -> Result:
            inputs = problem.current
            hidden = inputs.source.detach().requires_grad_()
            packed = (inputs.advantages, problem.host_loss_mask, problem.host_cu_seqlens, problem.token_weights)
            output = linear_policy_loss(case.loss, hidden, weight, inputs.labels, inputs.old_log_probs, *packed, **options)
            of_hidden, of_weight = torch.autograd.grad(output.loss, (hidden, weight), allow_unused=into_main_grad)
            return Result(output.loss.detach(), output.log_probs, (of_hidden, weight.main_grad if into_main_grad else of_weight))

        precision = torch.float32 if fp32_logits else None
        return Step(load, run, lambda result: problem.check(result, precision=precision))

    return Provider(name, prepare, is_ours=True)


def _forward_only(problem: HeadProblem) -> Step:
    options = {"max_logits_bytes": MAX_LOGITS_BYTES, "loss_mask": problem.host_loss_mask, "tp_group": SINGLE}

    def run() -> Result:
        inputs = problem.current
        with torch.no_grad():
            return Result(log_probs=linear_log_probs(inputs.source, problem.weight, inputs.labels, **options))

    return Step(problem.load, run, problem.check)


def unfused(name: str, *, inplace: bool) -> Provider:
    """All logits, then policy_loss: this is what --fused-lm-head-loss replaces. In place, as the training command calls it."""

    def prepare(problem: HeadProblem) -> Step:
        options = {"token_counts": problem.token_counts, "tp_group": SINGLE, "inplace": inplace}
        return step_of(problem, lambda hidden, weight: package_loss(problem, hidden @ weight.t(), **options))

    return Provider(name, prepare, is_ours=True)


def matmuls(name: str, passes: str, num_rows: int | None = None) -> Provider:
    """Only products, into existing tensors: l logits, x dX, w dW. num_rows: rows of a chunk; None: as many as the fused head."""

    def prepare(problem: HeadProblem) -> Step:
        case, weight = problem.case, problem.weight
        rows = min(num_rows or chunk_rows(problem), case.num_tokens)
        # The logits are multiplied in place of their gradient: sizes and kind of numbers are the same.
        buffer = problem.sets[0].source[:rows] @ weight.t()
        of_weight = torch.zeros_like(weight) if "w" in passes else None
        of_hidden = torch.zeros(rows, case.hidden_size, dtype=case.dtype, device=problem.device)

        def run() -> Result:
            for hidden in problem.current.source.split(rows):
                logits = buffer[: hidden.shape[0]]
                torch.mm(hidden, weight.t(), out=logits)
                if "x" in passes:
                    torch.mm(logits, weight, out=of_hidden[: hidden.shape[0]])
                if "w" in passes:
                    torch.mm(logits.t(), hidden, out=of_weight)
            return Result(logits=logits)

        return Step(problem.load, run, problem.check)

    return Provider(name, prepare, "everything but the products")


def head_providers(case: BenchmarkCase, device_kind: str) -> list[Provider]:
    """The first one is the three matmuls of the ratios. It also shows drift."""
    found = [matmuls(THREE_MATMULS, "lxw"), fused(FUSED), unfused(UNFUSED, inplace=True), matmuls(LOGITS_MATMUL, "l")]
    found.append(Provider(FORWARD, _forward_only, "the loss and its gradient", is_ours=True))
    if device_kind == "cpu":
        return found
    found.append(fused(FUSED_MAIN_GRAD, into_main_grad=True))
    if not case.is_dense or case.documents == 1:
        return found
    return [
        *found,
        fused(FUSED_SMALL, into_main_grad=True, max_logits_bytes=SMALL_ROWS * case.vocab_size * case.dtype.itemsize),
        fused("ours, fp32 logits", fp32_logits=True),
        matmuls("three matmuls, 4096 rows", "lxw", SMALL_ROWS),
    ]
