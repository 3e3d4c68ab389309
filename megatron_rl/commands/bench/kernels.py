"""The row kernels alone, over the configurations that they could ship with; a launch through the same functions as the losses'."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_rl.commands.bench.cases import ONE, LossCase, LossProblem
from megatron_rl.commands.bench.harness import Check, Provider, Step
from megatron_rl.commands.bench.providers import ENTROPY_COEFFICIENT, needs_cuda
from megatron_rl.layout.groups import SINGLE
from megatron_rl.ops.launches import GradientConfiguration, StatisticsConfiguration
from megatron_rl.ops.log_probs import vocab_shard
from megatron_rl.ops.log_probs_reference import logits_gradient_reference
from megatron_rl.ops.row_kernels import row_results_reference

STATISTICS, GRADIENT = "statistics", "gradient"
SHIPPED = ", as shipped"
TORCH_TWIN = "torch twin"
# Of the entropy, absolute: float32 sums of up to 152 k terms.
ENTROPY_LIMIT = 1e-3
# A program has 32 lanes a warp, each loads 128 bits: more warps are more lanes.
STATISTICS_CONFIGURATIONS = tuple(
    StatisticsConfiguration(lanes=32 * warps, tiles=tiles, num_warps=warps) for warps in (4, 8) for tiles in (1, 2, 4)
)
GRADIENT_CONFIGURATIONS = tuple(
    GradientConfiguration(block=block, num_warps=warps) for block, warps in ((4096, 8), (2048, 4), (8192, 8))
)


@dataclass(frozen=True, slots=True)
class KernelCase:
    kernel: str
    num_tokens: int
    num_columns: int
    with_entropy: bool

    @property
    def title(self) -> str:
        entropy = ", with entropy" if self.with_entropy else ""
        return f"{self.kernel} kernel, T {self.num_tokens}, v {self.num_columns}, bfloat16{entropy}"

    @property
    def inputs(self) -> LossCase:
        return LossCase(self.num_tokens, self.num_columns, packing=ONE)

    def as_dict(self) -> dict:
        names = ("kernel", "num_tokens", "num_columns", "with_entropy")
        return {name: getattr(self, name) for name in names}


def kernel_cases(*shapes: tuple[int, int]) -> tuple[KernelCase, ...]:
    return tuple(
        KernelCase(kernel, num_tokens, num_columns, with_entropy)
        for num_tokens, num_columns in shapes
        for kernel in (STATISTICS, GRADIENT)
        for with_entropy in (False, True)
    )


QUICK = kernel_cases((16384, 128256), (16384, 16032))
FULL = (*QUICK, *kernel_cases((4096, 32768), (16384, 151936), (4096, 50257), (16384, 128264), (128, 128256)))
CPU = kernel_cases((32, 1000))
PRESETS = {"quick": QUICK, "full": FULL, "cpu": CPU}


class KernelProblem:
    """Logits, and what the gradient kernel is given: the rows' statistics and a loss's coefficients, both made beforehand."""

    def __init__(self, case: KernelCase, inputs: LossProblem):
        self.case, self.inputs, self.num_sets = case, inputs, inputs.num_sets
        self.logits_bytes = inputs.logits_bytes
        # Read once; the gradient is written as well.
        self.nominal_bytes = self.floor_bytes = inputs.logits_bytes * (1 if case.kernel == STATISTICS else 2)
        self.shard = vocab_shard(case.num_columns, 1.0, None, SINGLE)
        self.statistics, self.coefficients = [], []
        if case.kernel == GRADIENT:
            for index in range(self.num_sets):
                inputs.load(index)
                self.statistics.append(self.row_results(row_results_reference, with_entropy=True))
                self.coefficients.append(inputs.truth()[2].float())
        # An entropy bonus: the loss falls where the entropy rises.
        weights = -inputs.entropy_weights(ENTROPY_COEFFICIENT).float()
        self.entropy_coefficients = weights if case.with_entropy else None
        self.index = 0

    def load(self, index: int) -> None:
        self.index = index
        self.inputs.load(index)

    def row_results(self, function, **options):
        inputs = self.inputs
        return function(inputs.logits, inputs.current.labels, None, self.shard, SINGLE, **options)

    def logits_gradient(self, function, **options) -> torch.Tensor:
        inputs, rows = self.inputs, self.statistics[self.index]
        vectors = (rows.maximum, rows.total, rows.entropy, self.coefficients[self.index], self.entropy_coefficients)
        return function(inputs.logits, inputs.current.labels, None, *vectors, self.shard, out=inputs.logits, **options)

    def check(self, result) -> list[Check]:
        if self.case.kernel == GRADIENT:
            coefficient = ENTROPY_COEFFICIENT if self.case.with_entropy else 0.0
            return self.inputs.check_gradient(result, entropy_coefficient=coefficient)
        checks = [self.inputs.check_log_probs(result.log_probs)]
        if self.case.with_entropy:
            error = (result.entropy.double() - self.inputs.true_entropy()).abs().max()
            checks.append(Check("entropy", float(error), ENTROPY_LIMIT))
        return checks


def kernel_providers(case: KernelCase, device_kind: str) -> list[Provider]:
    """On CUDA the shipped configuration first; the torch twin is there to show what the kernel replaces."""
    is_statistics = case.kernel == STATISTICS
    shipped = StatisticsConfiguration() if is_statistics else GradientConfiguration()
    others = STATISTICS_CONFIGURATIONS if is_statistics else GRADIENT_CONFIGURATIONS
    triton = [_triton(configuration, configuration == shipped) for configuration in dict.fromkeys((shipped, *others))]
    twin = Provider(TORCH_TWIN, _torch_twin, is_ours=True)
    return [twin, *triton] if device_kind == "cpu" else [*triton, twin]


def _triton(configuration: StatisticsConfiguration | GradientConfiguration, is_shipped: bool) -> Provider:
    def prepare(problem: KernelProblem) -> Step:
        needs_cuda(problem.inputs)
        from megatron_rl.ops.log_probs_triton import logits_gradient_triton, row_results_triton

        return _step(problem, row_results_triton, logits_gradient_triton, configuration=configuration)

    return Provider(_name(configuration) + (SHIPPED if is_shipped else ""), prepare, is_ours=True)


def _torch_twin(problem: KernelProblem) -> Step:
    return _step(problem, row_results_reference, logits_gradient_reference)


def _step(problem: KernelProblem, row_results, logits_gradient, **options) -> Step:
    if problem.case.kernel == GRADIENT:
        return Step(problem.load, lambda: problem.logits_gradient(logits_gradient, **options), problem.check)
    options["with_entropy"] = problem.case.with_entropy
    return Step(problem.load, lambda: problem.row_results(row_results, **options), problem.check)


def _name(configuration: StatisticsConfiguration | GradientConfiguration) -> str:
    if isinstance(configuration, GradientConfiguration):
        return f"block {configuration.block}, {configuration.num_warps} warps"
    return f"lanes {configuration.lanes}, tiles {configuration.tiles}, {configuration.num_warps} warps"
