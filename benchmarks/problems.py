"""The cases of the benchmarks, their inputs, and the right values in float64, computed without a function of the package.

Equations: docs/losses.md. With the coefficient c_t = dL / dlog_prob_t, p the softmax and delta the label's indicator,

    dlogits_tj = c_t (delta_tj - p_tj)        dX_t = sum_j dlogits_tj W_j        dW_j = sum_t dlogits_tj X_t

Advantages are never 0. Only the share that a case asks for is clipped, because skipping clipped rows is measured separately.
With a vocabulary shard every label is in the measured shard. The softmax partials of the other ranks are synthetic.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from benchmarks.measure import Check, takes_part
from megatron_rl.errors import ConfigError
from megatron_rl.loss_hub import get_policy_loss

NUM_SETS = 3
LOG_NORMAL, NUM_LOG_NORMAL = 0, 16  # BenchmarkCase.documents: 16 documents of log-normal length
STATISTICS, GRADIENT, LOG_PROBS = "statistics kernel", "gradient kernel", "log-probabilities"
# Standard deviation of a given logit; of a head's logits, of their own part and of the part that a row's logits share. The shared
# part cancels in dX where probabilities add up to 1, and shows where they do not. A bfloat16 logit below 1 is off by some 2e-4.
GIVEN_LOGIT_SIZE, HEAD_LOGIT_SIZE = 2.0, 0.1
# The mean log-ratio of a GSPO document: the middle of its clip of 3e-4 and 4e-4. Standard deviation of a GRPO token's: inside 0.2.
GSPO_LOG_RATIO, GRPO_LOG_RATIO, BEYOND_THE_CLIP = 5e-5, 0.02, 0.01
KL_COEFFICIENT = 0.1
# The gate. Log-probabilities of given logits: absolute, the worst that a loss should see. Of a head: a bfloat16 logit between 0.5
# and 1 is off by up to 2^-9; float32: sums of 150 k exponentials. Entropy: absolute, sums of 152 k float32 terms. Gradients:
# relative Frobenius norm; bfloat16: the logits' gradient and the result are rounded to 2^-9 each, given logits' gradient once.
# Loss: relative to the sum of the tokens' absolute losses.
LOSS_LIMIT, LOG_PROB_LIMIT, ENTROPY_LIMIT = 1e-4, 2e-3, 1e-3
HEAD_LOG_PROB_LIMITS = {torch.bfloat16: 4e-3, torch.float32: 5e-5}
GRADIENT_LIMITS, HEAD_LIMITS = {torch.bfloat16: 1e-2, torch.float32: 1e-4}, {torch.bfloat16: 1e-2, torch.float32: 1e-5}
LOG_PROBS_LIMITS = {torch.bfloat16: 4e-3, torch.float32: 1e-5}
CHUNK_ELEMENTS = 2**25  # of float64 work: a quarter of a gigabyte at a time


@dataclass(frozen=True, slots=True)
class BenchmarkCase:
    num_tokens: int
    vocab_size: int  # with a head: columns here
    hidden_size: int | None = None  # None: the logits are given
    loss: str = "gspo"
    documents: int = 8
    masked: float = 0.0  # of each document's tokens, its first: the prompt
    clipped: float = 0.0  # of the documents (GSPO) or tokens (GRPO)
    with_kl: bool = False
    shards: int = 1
    dtype: torch.dtype = torch.bfloat16
    kernel: str | None = None  # in place of a loss: a row kernel alone, or log-probabilities and the gradient of their sum
    with_entropy: bool = False  # of a kernel

    @property
    def kind(self) -> str:
        return "head" if self.hidden_size else "cpu" if self.kernel == LOG_PROBS else "kernel" if self.kernel else "loss"

    @property
    def num_columns(self) -> int:
        return self.vocab_size // self.shards

    @property
    def is_dense(self) -> bool:
        return not (self.masked or self.clipped)

    @property
    def computes_twice(self) -> bool:
        """If each token has its own coefficient, a fused head cannot know those of a long document while it has the logits."""
        return self.with_kl and self.documents == 1

    @property
    def size(self) -> str:
        """large: the case fills a GPU, and kernels decide its time. Else launches decide, and a microsecond is a few percent."""
        if self.num_tokens >= 4096 and self.num_columns >= (100_000 if self.hidden_size else 32768):
            return "large"
        return "few rows" if self.num_tokens <= 128 else "small"

    @property
    def packing(self) -> str:
        return {LOG_NORMAL: "log-normal documents", 1: "one document"}.get(self.documents, f"{self.documents} documents")

    @property
    def title(self) -> str:
        dtype, sizes = str(self.dtype).removeprefix("torch."), f"T {self.num_tokens}"
        if self.kernel:
            return f"{self.kernel}, {sizes}, v {self.num_columns}, {dtype}{', with entropy' * self.with_entropy}"
        sizes += f", H {self.hidden_size}, V {self.vocab_size}" if self.hidden_size else f", V {self.vocab_size}"
        sizes += f", one of {self.shards} shards" if self.shards > 1 else ""
        shares = [f"{share:.0%} {name}" for name, share in (("masked", self.masked), ("clipped", self.clipped)) if share]
        return ", ".join([f"{self.loss} {sizes}", dtype, self.packing, *shares, *(["KL"] * self.with_kl)])

    @property
    def lengths(self) -> list[int]:
        """Lengths that add up to num_tokens: nearly equal, or log-normal with sigma 1; the same in every run, at least 2."""
        if self.documents != LOG_NORMAL:
            bounds = [self.num_tokens * number // self.documents for number in range(self.documents + 1)]
            return [stop - start for start, stop in zip(bounds[:-1], bounds[1:], strict=True)]
        draws = torch.randn(NUM_LOG_NORMAL, generator=torch.Generator().manual_seed(0)).exp()
        lengths = [max(2, int(share * self.num_tokens)) for share in (draws / draws.sum()).tolist()]
        lengths[lengths.index(max(lengths))] += self.num_tokens - sum(lengths)
        return lengths

    @property
    def input_shape(self) -> tuple:
        """What the drawn inputs depend on."""
        return self.num_tokens, self.hidden_size, self.num_columns, self.dtype

    def as_dict(self) -> dict:
        derived = {name: getattr(self, name) for name in ("kind", "num_columns", "packing", "is_dense", "computes_twice", "size")}
        return asdict(self) | derived | {"dtype": str(self.dtype).removeprefix("torch.")}


def head_variants(case: BenchmarkCase) -> tuple[BenchmarkCase, ...]:
    """One shape, eight documents: long ones, KL, a token-level loss, masked and clipped rows."""
    others = {"loss": "grpo"}, {"masked": 0.3}, {"clipped": 0.3, "documents": 10}, {"loss": "grpo", "clipped": 0.3}
    return (case, *(replace(case, **changes) for changes in (*others, {"documents": 1}, {"documents": 1, "with_kl": True})))


def kernel_cases(*shapes: tuple[int, int]) -> tuple[BenchmarkCase, ...]:
    return tuple(
        BenchmarkCase(num_tokens, num_columns, documents=1, kernel=kernel, with_entropy=with_entropy)
        for num_tokens, num_columns in shapes
        for kernel in (STATISTICS, GRADIENT)
        for with_entropy in (False, True)
    )


LOSSES_QUICK = (
    BenchmarkCase(16384, 128256),
    BenchmarkCase(16384, 128256, masked=0.5),
    BenchmarkCase(16384, 128256, loss="grpo"),
    BenchmarkCase(16384, 128256, shards=8),
    BenchmarkCase(4096, 32768),
    BenchmarkCase(16384, 151936, documents=LOG_NORMAL),
    BenchmarkCase(4096, 50257),
    BenchmarkCase(128, 128256),
)
FULL_SHAPES = (16384, 128264), (4096, 128256), (4096, 151936), (16384, 32768), (65536, 32768), (16384, 151936)  # 128264 % 16 == 8
SHARD_SHAPES = (4096, 151936), (16384, 151936), (4096, 32768), (16384, 32768), (65536, 32768), (4096, 128256)
LOSSES_FULL = (
    *LOSSES_QUICK,
    BenchmarkCase(16384, 128256, documents=1),
    BenchmarkCase(16384, 128256, documents=LOG_NORMAL, masked=0.5),
    *(BenchmarkCase(*shape, loss="grpo") for shape in ((16384, 151936), (4096, 32768))),
    *(BenchmarkCase(*shape) for shape in FULL_SHAPES),
    *(BenchmarkCase(*shape, shards=8) for shape in SHARD_SHAPES),
    BenchmarkCase(4096, 128256, dtype=torch.float32),
    BenchmarkCase(16, 128256, documents=1),
)
KERNELS_QUICK = kernel_cases((16384, 128256), (16384, 16032))
KERNELS_FULL = (*KERNELS_QUICK, *kernel_cases((4096, 32768), (16384, 151936), (4096, 50257), (16384, 128264), (128, 128256)))
TINY_LOSSES = (
    BenchmarkCase(96, 1000),
    BenchmarkCase(64, 1024, shards=8, masked=0.5),
    BenchmarkCase(96, 257, documents=LOG_NORMAL, masked=0.5),
    BenchmarkCase(64, 512, documents=1, loss="grpo", dtype=torch.float32),
    *kernel_cases((32, 1000)),
)
# T, V, H.
HEAD_MAIN, HEAD_MEMORY = BenchmarkCase(8192, 131072, 4096), BenchmarkCase(16384, 128256, 4096)
HEAD_CPU = BenchmarkCase(4096, 32000, 512, dtype=torch.float32)
HEAD_QUICK = (
    *head_variants(HEAD_MAIN),
    HEAD_MEMORY,
    BenchmarkCase(16384, 151936, 2048),
    BenchmarkCase(8192, 128256, 8192),
    BenchmarkCase(4096, 128256, 4096),
    BenchmarkCase(16384, 16032, 4096),  # one of 8 shards of 128256, alone
)
HEAD_FULL = (
    *HEAD_QUICK,
    replace(HEAD_MAIN, loss="grpo", masked=0.3),
    replace(HEAD_MAIN, with_kl=True),
    replace(HEAD_MEMORY, documents=1),
    BenchmarkCase(16384, 151936, 2048, loss="grpo"),
    BenchmarkCase(8192, 128256, 8192, documents=1),
    BenchmarkCase(2048, 131072, 4096),
    BenchmarkCase(128, 128256, 4096, documents=1),
)
# Benchmark, device: presets, the default first.
PRESETS = {
    "losses": {
        "cuda": {"quick": LOSSES_QUICK + KERNELS_QUICK, "full": LOSSES_FULL + KERNELS_FULL, "cpu": TINY_LOSSES},
        "cpu": {"cpu": TINY_LOSSES},
    },
    "head": {
        "cuda": {"quick": HEAD_QUICK, "full": HEAD_FULL},
        "cpu": {"quick": (HEAD_CPU,), "full": head_variants(HEAD_CPU)},
    },
}


def with_shape(cases: tuple[BenchmarkCase, ...], shape: str) -> list[BenchmarkCase]:
    """The cases that have the shape of the first one, with the shape T,H,V instead. Raises ConfigError."""
    try:
        num_tokens, hidden_size, vocab_size = (int(number) for number in shape.split(","))
    except ValueError:
        raise ConfigError(f"--shape {shape} must be T,H,V: three whole numbers, such as 8192,4096,131072") from None
    if min(hidden_size, vocab_size - 1) < 1 or num_tokens < 20:
        raise ConfigError(f"--shape {shape}: at least 20 tokens, so that 10 documents hold two each, and 2 columns")
    chosen = [case for case in cases if case.input_shape == cases[0].input_shape]
    return [replace(case, num_tokens=num_tokens, hidden_size=hidden_size, vocab_size=vocab_size) for case in chosen]


@dataclass(frozen=True, slots=True)
class InputSet:
    """One micro-batch; `source` is never written to. The last three fields belong to a case, the others to its shape."""

    source: Tensor  # logits [T, v], or hidden states [T, H] in front of a head
    labels: Tensor  # [T] int64
    log_probs: Tensor  # [T] float64, of these columns alone
    old_log_probs: Tensor | None = None  # [T] float32
    ref_log_probs: Tensor | None = None  # [T] float32
    advantages: Tensor | None = None  # [N] float32


class Inputs:
    """The inputs that cases of one shape share: num_sets micro-batches, and the weight [V, H] of the head or None."""

    def __init__(self, case: BenchmarkCase, device: torch.device, *, num_sets: int = NUM_SETS, seed: int = 0):
        self.shape, self.device, self.weight = case.input_shape, device, None
        self.chunk_rows = max(1, CHUNK_ELEMENTS // case.num_columns)
        generator = torch.Generator(device).manual_seed(seed)
        normal = lambda *shape: torch.empty(*shape, dtype=case.dtype, device=device).normal_(generator=generator)  # noqa: E731
        if case.hidden_size:
            self.weight = normal(case.num_columns, case.hidden_size)
            self.weight.add_(normal(1, case.hidden_size)).mul_(HEAD_LOGIT_SIZE / math.sqrt(case.hidden_size))
        self.sets = []
        for _ in range(num_sets):
            source = normal(case.num_tokens, case.hidden_size or case.num_columns)
            source = source if case.hidden_size else source.mul_(GIVEN_LOGIT_SIZE)
            labels = torch.randint(case.num_columns, (case.num_tokens,), generator=generator, device=device)
            exact = [x.gather(1, labels[rows, None])[:, 0] for rows, _, x in self.chunks(source)]
            self.sets.append(InputSet(source, labels, torch.cat(exact)))

    def chunks(self, source: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Row numbers [C], their source and their log-probabilities [C, v], a few rows at a time in float64."""
        weight = None if self.weight is None else self.weight.double()
        for rows in torch.arange(source.shape[0], device=self.device).split(self.chunk_rows):
            x = source[rows].double()
            yield rows, x, torch.log_softmax(x if weight is None else x @ weight.t(), -1)


@dataclass(frozen=True, slots=True)
class Result:
    """What a step found."""

    loss: Tensor | None = None  # 0-d
    log_probs: Tensor | None = None  # [T]; None: the provider keeps them
    gradients: tuple[Tensor, ...] = ()  # of the logits [T, v]; or of hidden states [T, H] and weight [V, H]
    entropy: Tensor | None = None  # [T]
    logits: Tensor | None = None  # [C, V] of the last C rows: what a bare matmul leaves


@dataclass(frozen=True, slots=True)
class ExactLoss:
    loss: Tensor  # 0-d float64
    scale: Tensor  # 0-d float64: sum of the tokens' absolute losses
    coefficients: Tensor  # [T] float64


class Problem:
    """Documents, weights and old log-probabilities of a case over the inputs of its shape; load(index) chooses a set."""

    def __init__(self, case: BenchmarkCase, inputs: Inputs, *, seed: int = 0):
        self.case, self.inputs, self.device, self.weight = case, inputs, inputs.device, inputs.weight
        self.num_sets, self.lengths = len(inputs.sets), case.lengths
        num_documents = len(self.lengths)
        self.host_cu_seqlens = torch.tensor([0, *self.lengths]).cumsum(0).to(torch.int32)
        self.host_loss_mask = torch.cat([torch.arange(length) >= round(case.masked * length) for length in self.lengths])
        documents = torch.repeat_interleave(torch.arange(num_documents), torch.tensor(self.lengths))
        counts = torch.bincount(documents[self.host_loss_mask], minlength=num_documents)
        self.num_unmasked = int(counts.sum())
        self.documents, self.token_counts = documents.to(self.device), counts.to(self.device)
        self.loss_mask, self.cu_seqlens = self.host_loss_mask.to(self.device), self.host_cu_seqlens.to(self.device)
        # Token mean for the policy term, KL and entropy: the only aggregation that every peer has.
        self.token_weights = torch.full((num_documents,), 1.0 / self.num_unmasked, device=self.device)
        self.clip_low, self.clip_high = get_policy_loss(case.loss).clip_ratios
        self.logits_bytes = float(case.num_tokens * case.num_columns * case.dtype.itemsize)
        self.sets = [self._draw(shared, seed * 1000 + index) for index, shared in enumerate(inputs.sets)]
        self.current = self.sets[0]

    def load(self, index: int) -> None:
        self.current = self.sets[index]

    def _draw(self, shared: InputSet, seed: int) -> InputSet:
        generator = torch.Generator(self.device).manual_seed(seed)
        signs = 1.0 - 2.0 * (torch.arange(len(self.lengths), device=self.device) % 4 == 3)
        advantages = signs * (0.5 + torch.rand(len(self.lengths), generator=generator, device=self.device))
        old = shared.log_probs - self._log_ratios(advantages, generator)
        ref = old + 0.05 * torch.randn(old.shape, generator=generator, device=self.device)
        return replace(shared, old_log_probs=old.float(), ref_log_probs=ref.float(), advantages=advantages)

    def _log_ratios(self, advantages: Tensor, generator: torch.Generator) -> Tensor:  # [T] float64
        """Log-ratios inside the clip. The share that the case asks for lies beyond it, on the side where the gradient is 0."""
        case, num_documents = self.case, len(self.lengths)
        noise = GRPO_LOG_RATIO * torch.randn(case.num_tokens, generator=generator, device=self.device, dtype=torch.float64)
        above, below = math.log1p(self.clip_high) + BEYOND_THE_CLIP, math.log1p(-self.clip_low) - BEYOND_THE_CLIP
        beyond = torch.where(advantages > 0, above, below).double()  # [N]
        if case.loss == "grpo":
            order = torch.randperm(case.num_tokens, generator=generator, device=self.device)
            return torch.where(order < round(case.clipped * case.num_tokens), beyond[self.documents], noise)
        num_clipped = round(case.clipped * num_documents)
        is_clipped = torch.tensor([takes_part(number, num_clipped, num_documents) for number in range(num_documents)])
        targets = torch.where(is_clipped.to(self.device), beyond, GSPO_LOG_RATIO)
        return noise + (targets - self.mean(noise))[self.documents]

    def mean(self, values: Tensor) -> Tensor:  # [T] -> [N], over unmasked tokens
        values = torch.where(self.loss_mask, values, 0.0)
        return torch.zeros_like(self.token_counts, dtype=values.dtype).index_add_(0, self.documents, values) / self.token_counts

    def exact_loss(self) -> ExactLoss:
        """Of the loaded set."""
        inputs, weights = self.current, torch.where(self.loss_mask, 1.0 / self.num_unmasked, 0.0).double()
        if self.case.kernel == LOG_PROBS:
            return ExactLoss(inputs.log_probs.sum(), inputs.log_probs.abs().sum(), torch.ones_like(inputs.log_probs))
        log_ratio = inputs.log_probs - inputs.old_log_probs.double()
        log_ratio = self.mean(log_ratio)[self.documents] if self.case.loss == "gspo" else log_ratio
        ratio, advantages = log_ratio.exp(), inputs.advantages.double()[self.documents]
        values = -torch.minimum(ratio * advantages, ratio.clamp(1 - self.clip_low, 1 + self.clip_high) * advantages) * weights
        is_clipped = torch.where(advantages > 0, ratio > 1 + self.clip_high, ratio < 1 - self.clip_low)
        coefficients = torch.where(is_clipped, 0.0, -weights * ratio * advantages)
        if self.case.with_kl:
            difference = inputs.ref_log_probs.double() - inputs.log_probs
            values = values + KL_COEFFICIENT * weights * (difference.exp() - difference - 1)
            coefficients = coefficients + KL_COEFFICIENT * weights * (1 - difference.exp())
        return ExactLoss(values.sum(), values.abs().sum(), coefficients)

    def entropy_weights(self, entropy_coefficient: float) -> Tensor:  # [T] float64
        return torch.where(self.loss_mask, entropy_coefficient * self.token_weights.double()[self.documents], 0.0)

    def exact_gradient(
        self, exact: ExactLoss, entropy_coefficient: float = 0.0, num_replicas: int = 1, *, with_entropy: bool = False
    ) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:  # rows [C]; their source, entropy [C] and dL / dlogits [C, v], float64
        """num_replicas: as many ranks hold this shard's partials too, so that each probability is divided by it. Without a
        coefficient and with_entropy the entropy is 0: it takes half of the time."""
        labels, weights = self.current.labels, self.entropy_weights(entropy_coefficient)
        for rows, source, log_probabilities in self.inputs.chunks(self.current.source):
            log_probabilities -= math.log(num_replicas)
            gradient, coefficients = log_probabilities.exp(), exact.coefficients[rows]
            entropy = torch.zeros_like(coefficients)
            if with_entropy or entropy_coefficient:
                entropy = -num_replicas * (gradient * log_probabilities).sum(-1)
                # d(-e H) / d x_j = e p_j (ln p_j + H)
                gradient *= weights[rows, None] * (log_probabilities + entropy[:, None]) - coefficients[:, None]
            else:
                gradient *= -coefficients[:, None]
            yield rows, source, entropy, gradient.scatter_add_(1, labels[rows, None], coefficients[:, None])

    def check_values(self, result: Result, exact: ExactLoss, limit: float, num_replicas: int = 1) -> list[Check]:
        checks = []
        if result.loss is not None:
            checks.append(Check("loss", float((result.loss.double() - exact.loss).abs() / exact.scale), LOSS_LIMIT))
        if result.log_probs is not None:
            difference = result.log_probs.double() - self.current.log_probs + math.log(num_replicas)
            checks.append(Check("log_prob", float(torch.where(self.loss_mask, difference, 0.0).abs().max()), limit))
        return checks


class LogitsProblem(Problem):
    """From given logits. `logits` is a buffer that a step may overwrite; load(index) restores it."""

    def __init__(self, case: BenchmarkCase, inputs: Inputs, *, seed: int = 0):
        super().__init__(case, inputs, seed=seed)
        self.logits = torch.empty_like(inputs.sets[0].source)
        # Read in forward; read and written in backward. A masked row is not read, but its gradient is written.
        masked_bytes = self.logits_bytes * (case.num_tokens - self.num_unmasked) / case.num_tokens
        self.nominal_bytes, self.floor_bytes = 3 * self.logits_bytes, 3 * self.logits_bytes - 2 * masked_bytes
        if case.kind == "kernel":  # it reads once; the gradient is written as well
            self.nominal_bytes = self.floor_bytes = self.logits_bytes * (1 if case.kernel == STATISTICS else 2)
        self.work = {"logits_bytes": self.logits_bytes, "nominal_bytes": self.nominal_bytes, "floor_bytes": self.floor_bytes}

    def load(self, index: int) -> None:
        super().load(index)
        self.logits.copy_(self.current.source)

    def leaves(self) -> tuple[Tensor]:
        """Logits as the output of an operator, as in a model. The gradient of a leaf would be kept in memory."""
        return (self.logits.detach().requires_grad_().view_as(self.logits),)

    def check(self, result: Result, *, entropy_coefficient: float = 0.0, num_replicas: int = 1) -> list[Check]:
        """Of the loaded set. An element that was not written is NaN (CudaDevice.poison), and then the error is NaN."""
        exact, entropies, whole, off_the_label = self.exact_loss(), [], SquareSums(), SquareSums()
        options = {"num_replicas": num_replicas, "with_entropy": result.entropy is not None}
        for rows, _, entropy, expected in self.exact_gradient(exact, entropy_coefficient, **options):
            entropies.append(entropy)
            if result.gradients:
                found, label = result.gradients[0][rows].double(), self.current.labels[rows, None]
                whole.add(found, expected)
                # The element of the label is as large as all others together, so it would hide a wrong softmax.
                off_the_label.add(found.scatter_(1, label, 0.0), expected.scatter_(1, label, 0.0))
        entropy = torch.cat(entropies)
        exact = replace(exact, loss=exact.loss - (self.entropy_weights(entropy_coefficient) * entropy).sum())
        checks = self.check_values(result, exact, LOG_PROB_LIMIT, num_replicas)
        if result.entropy is not None:
            checks.append(Check("entropy", float((result.entropy.double() - entropy).abs().max()), ENTROPY_LIMIT))
        if result.gradients:
            limit = (LOG_PROBS_LIMITS if self.case.kernel == LOG_PROBS else GRADIENT_LIMITS)[self.case.dtype]
            checks += [Check("gradient", whole.ratio, limit), Check("gradient off the label", off_the_label.ratio, limit)]
        return checks


class HeadProblem(Problem):
    """From hidden states. `logits_bytes` is the size of all logits, which only the unfused path holds at once."""

    def __init__(self, case: BenchmarkCase, inputs: Inputs, *, seed: int = 0):
        super().__init__(case, inputs, seed=seed)
        # Weight and one set of hidden states; one of the head's matmuls over all rows, masked ones too.
        self.input_bytes = float((case.num_tokens + case.vocab_size) * case.hidden_size * case.dtype.itemsize)
        self.matmul_flops = 2.0 * case.num_tokens * case.hidden_size * case.vocab_size
        self.work = {"matmul_flops": self.matmul_flops, "logits_bytes": self.logits_bytes, "input_bytes": self.input_bytes}

    def leaves(self) -> tuple[Tensor, Tensor]:
        return self.current.source.detach().requires_grad_(), self.weight.detach().requires_grad_()

    def check(self, result: Result, *, precision: torch.dtype | None = None) -> list[Check]:
        """Of the first set, whose whole gradients are kept. precision: of the logits; None: the case's."""
        assert self.current is self.sets[0], "the gate looks at the first set"
        case, limit = self.case, HEAD_LIMITS[self.case.dtype]
        checks = self.check_values(result, self.exact_loss(), HEAD_LOG_PROB_LIMITS[precision or case.dtype])
        if result.logits is not None:
            last = self.current.source[-result.logits.shape[0] :][:64].double() @ self.weight.double().t()
            checks.append(Check("logits", relative(result.logits[:64], last), limit))
        if not result.gradients:
            return checks
        of_hidden, of_weight = self.exact_gradients
        is_label = torch.zeros(case.vocab_size, dtype=torch.bool, device=self.device)
        is_label[self.current.labels] = True
        return [
            *checks,
            Check("dX", relative(result.gradients[0], of_hidden), limit),
            Check("dW", relative(result.gradients[1], of_weight), limit),
            # The rows of labels are as large as all others together, so they would hide wrong probabilities.
            Check("dW off the labels", relative(result.gradients[1], of_weight, ~is_label), limit),
        ]

    @functools.cached_property
    def exact_gradients(self) -> tuple[Tensor, Tensor]:
        """dX [T, H] and dW [V, H] of the first set in float64."""
        weight = self.weight.double()
        of_hidden, of_weight = torch.zeros_like(self.current.source, dtype=torch.float64), torch.zeros_like(weight)
        for rows, hidden, _, gradient in self.exact_gradient(self.exact_loss()):
            of_hidden[rows] = gradient @ weight
            of_weight.addmm_(gradient.t(), hidden)
        return of_hidden, of_weight


class SquareSums:
    """Sums |found - expected| and |expected| over what was added, in float64, and gives their ratio."""

    def __init__(self):
        self.difference = self.expected = 0.0

    def add(self, found: Tensor, expected: Tensor) -> None:
        self.difference += float((found - expected).square().sum())
        self.expected += float(expected.square().sum())

    @property
    def ratio(self) -> float:
        return math.sqrt(self.difference / self.expected) if self.expected else math.inf


def relative(found: Tensor, expected: Tensor, chosen: Tensor | None = None) -> float:  # [n, H] each; chosen [n] bool
    """|found - expected| / |expected| over the chosen rows, a few at a time."""
    sums, rows = SquareSums(), torch.arange(expected.shape[0], device=expected.device)
    for part in (rows if chosen is None else rows[chosen]).split(8192):
        sums.add(found[part].double(), expected[part])
    return sums.ratio
