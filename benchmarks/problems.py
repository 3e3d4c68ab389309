"""The cases of the benchmarks, their inputs, and the right values in float64, computed without a function of the package.

Equations: docs/losses.md. With the coefficient c_t = dL / dlog_prob_t, p the softmax and delta the label's indicator,

    dlogits_tj = c_t (delta_tj - p_tj)        dX_t = sum_j dlogits_tj W_j        dW_j = sum_t dlogits_tj X_t

Advantages are never 0 and no ratio is clipped. So c_t is what the token adds to the loss, and only masked rows have none. With a
vocabulary shard every label is in the measured shard. The softmax partials of the other ranks are synthetic.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from benchmarks.measure import Check
from megatron_rl.declare import get_policy_loss

NUM_SETS = 3
LOG_NORMAL, NUM_LOG_NORMAL = 0, 16  # BenchmarkCase.documents: 16 documents of log-normal length
STATISTICS, GRADIENT, LOG_PROBS = "statistics kernel", "gradient kernel", "log-probabilities"
# Standard deviation of a logit that is given, or in a host; of a head's logits, of their own part and of the part that a row's
# logits share. The shared part cancels in dX where probabilities add up to 1, and shows where they do not. A bfloat16 logit below 1
# is off by some 2e-4.
GIVEN_LOGIT_SIZE, HEAD_LOGIT_SIZE = 2.0, 0.1
# The mean log-ratio of a GSPO document: the middle of its clip of 3e-4 and 4e-4. Standard deviation of a GRPO token's: inside 0.2.
GSPO_LOG_RATIO, GRPO_LOG_RATIO = 5e-5, 0.02
# The gate. Log-probabilities of given logits: absolute, the worst that a loss should see. Of a head: a bfloat16 logit between 0.5
# and 1 is off by up to 2^-9; float32: sums of 150 k exponentials. Gradients: relative Frobenius norm; bfloat16: the logits'
# gradient and the result are rounded to 2^-9 each, given logits' gradient once. Loss: relative to the tokens' absolute losses.
LOSS_LIMIT, LOG_PROB_LIMIT = 1e-4, 2e-3
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
    shards: int = 1
    dtype: torch.dtype = torch.bfloat16
    host: str | None = None  # whose step it is
    kernel: str | None = None  # in place of a loss: a row kernel alone, or log-probabilities and the gradient of their sum

    @property
    def kind(self) -> str:
        if self.hidden_size:
            return "hosts" if self.host else "head"
        return "cpu" if self.kernel == LOG_PROBS else "kernel" if self.kernel else "loss"

    @property
    def num_columns(self) -> int:
        return self.vocab_size // self.shards

    @property
    def is_dense(self) -> bool:
        return not self.masked

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
            return f"{self.kernel}, {sizes}, v {self.num_columns}, {dtype}"
        sizes += f", H {self.hidden_size}, V {self.vocab_size}" if self.hidden_size else f", V {self.vocab_size}"
        sizes += f", one of {self.shards} shards" if self.shards > 1 else ""
        if self.host:
            return f"{self.host}, {sizes}, {dtype}"
        masked = [f"{self.masked:.0%} masked"] if self.masked else []
        return ", ".join([f"{self.loss} {sizes}", dtype, self.packing, *masked])

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
        derived = {name: getattr(self, name) for name in ("kind", "num_columns", "is_dense", "size")}
        return asdict(self) | derived | {"dtype": str(self.dtype).removeprefix("torch.")}


def kernel_cases(num_tokens: int, num_columns: int) -> tuple[BenchmarkCase, ...]:
    return tuple(BenchmarkCase(num_tokens, num_columns, documents=1, kernel=kernel) for kernel in (STATISTICS, GRADIENT))


def host_cases(num_tokens: int, vocab_size: int, hidden_size: int) -> tuple[BenchmarkCase, ...]:
    return tuple(BenchmarkCase(num_tokens, vocab_size, hidden_size, loss="grpo", host=host) for host in HOSTS)


HOSTS = ("miles", "slime", "verl, Megatron", "verl, FSDP", "NeMo-RL", "SkyRL", "ROLL")
HEAD_MAIN, HEAD_MEMORY = BenchmarkCase(8192, 131072, 4096), BenchmarkCase(16384, 128256, 4096)  # T, V, H
# Benchmark, device: its cases. On a CPU `losses` has tiny shapes, to try the command out.
CASES = {
    "losses": {
        "cuda": (
            BenchmarkCase(16384, 128256),
            BenchmarkCase(16384, 128256, masked=0.5),
            BenchmarkCase(16384, 128256, loss="grpo"),
            BenchmarkCase(16384, 128256, shards=8),
            BenchmarkCase(4096, 32768),
            BenchmarkCase(16384, 151936, documents=LOG_NORMAL),
            BenchmarkCase(4096, 50257),
            BenchmarkCase(128, 128256),
            *kernel_cases(16384, 128256),
            *kernel_cases(16384, 16032),
        ),
        "cpu": (
            BenchmarkCase(96, 1000),
            BenchmarkCase(64, 1024, shards=8, masked=0.5),
            BenchmarkCase(96, 257, documents=LOG_NORMAL, masked=0.5),
            BenchmarkCase(64, 512, documents=1, loss="grpo", dtype=torch.float32),
            *kernel_cases(32, 1000),
        ),
    },
    "head": {
        "cuda": (
            HEAD_MAIN,
            replace(HEAD_MAIN, loss="grpo"),
            replace(HEAD_MAIN, masked=0.3),
            replace(HEAD_MAIN, documents=1),
            HEAD_MEMORY,
            BenchmarkCase(16384, 151936, 2048),
            BenchmarkCase(8192, 128256, 8192),
            BenchmarkCase(16384, 16032, 4096),  # one of 8 shards of 128256, alone
        ),
        "cpu": (BenchmarkCase(4096, 32000, 512, dtype=torch.float32),),
    },
    # The longest micro-batch of a small model on one GPU, with the vocabulary of Qwen3. On a CPU T / H is the same.
    "hosts": {"cuda": host_cases(8192, 151936, 4096), "cpu": host_cases(512, 16384, 256)},
    "cpu": {
        "cpu": (
            BenchmarkCase(2048, 32000, documents=1, kernel=LOG_PROBS, dtype=torch.float32),
            BenchmarkCase(2048, 32000, loss="grpo", dtype=torch.float32),
        )
    },
}


@dataclass(frozen=True, slots=True)
class InputSet:
    """One micro-batch; `source` is never written to. The last two fields belong to a case, the others to its shape."""

    source: Tensor  # logits [T, v], or hidden states [T, H] in front of a head
    labels: Tensor  # [T] int64
    log_probs: Tensor  # [T] float64, of these columns alone
    old_log_probs: Tensor | None = None  # [T] float32
    advantages: Tensor | None = None  # [N] float32


class Inputs:
    """The inputs that cases of one shape share: num_sets micro-batches, and the weight [V, H] of the head or None."""

    def __init__(self, case: BenchmarkCase, device: torch.device, *, num_sets: int = NUM_SETS):
        self.shape, self.device, self.weight = case.input_shape, device, None
        self.chunk_rows = max(1, CHUNK_ELEMENTS // case.num_columns)
        generator = torch.Generator(device).manual_seed(0)
        normal = lambda *shape: torch.empty(*shape, dtype=case.dtype, device=device).normal_(generator=generator)  # noqa: E731
        if case.hidden_size:
            self.weight = normal(case.num_columns, case.hidden_size)
            size = GIVEN_LOGIT_SIZE if case.host else HEAD_LOGIT_SIZE
            self.weight.add_(normal(1, case.hidden_size)).mul_(size / math.sqrt(case.hidden_size))
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
    logits: Tensor | None = None  # [C, V] of the last C rows: what a bare matmul leaves


class Problem:
    """Documents, weights and old log-probabilities of a case over the inputs of its shape; load(index) chooses a set."""

    def __init__(self, case: BenchmarkCase, inputs: Inputs):
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
        # Token mean: the only aggregation that every peer has.
        self.token_weights = torch.full((num_documents,), 1.0 / self.num_unmasked, device=self.device)
        self.clip_low, self.clip_high = get_policy_loss(case.loss).clip_ratios
        self.logits_bytes = float(case.num_tokens * case.num_columns * case.dtype.itemsize)
        self.sets = [self._draw(shared, index) for index, shared in enumerate(inputs.sets)]
        self.current = self.sets[0]

    def load(self, index: int) -> None:
        self.current = self.sets[index]

    def _draw(self, shared: InputSet, seed: int) -> InputSet:
        generator = torch.Generator(self.device).manual_seed(seed)
        signs = 1.0 - 2.0 * (torch.arange(len(self.lengths), device=self.device) % 4 == 3)
        advantages = signs * (0.5 + torch.rand(len(self.lengths), generator=generator, device=self.device))
        noise = GRPO_LOG_RATIO * torch.randn(len(self.documents), generator=generator, device=self.device, dtype=torch.float64)
        if self.case.loss == "gspo":
            noise += (GSPO_LOG_RATIO - self.mean(noise))[self.documents]
        return replace(shared, old_log_probs=(shared.log_probs - noise).float(), advantages=advantages)

    def mean(self, values: Tensor) -> Tensor:  # [T] -> [N], over unmasked tokens
        values = torch.where(self.loss_mask, values, 0.0)
        return torch.zeros_like(self.token_counts, dtype=values.dtype).index_add_(0, self.documents, values) / self.token_counts

    def exact_loss(self) -> tuple[Tensor, Tensor]:  # [T] float64 each
        """Of the loaded set: what each token adds to the loss, and its coefficient. Of an unclipped policy loss both are one."""
        inputs = self.current
        if self.case.kernel == LOG_PROBS:
            return inputs.log_probs, torch.ones_like(inputs.log_probs)
        log_ratio = inputs.log_probs - inputs.old_log_probs.double()
        log_ratio = self.mean(log_ratio)[self.documents] if self.case.loss == "gspo" else log_ratio
        weights = self.loss_mask.double() / self.num_unmasked
        terms = -inputs.advantages.double()[self.documents] * weights * log_ratio.exp()
        return terms, terms

    def exact_gradient(self, num_replicas: int = 1) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Row numbers [C], their source and dL / dlogits [C, v] in float64.

        num_replicas: as many ranks hold this shard's partials too, so that each probability is divided by it.
        """
        labels, (_, coefficients) = self.current.labels, self.exact_loss()
        for rows, source, log_probabilities in self.inputs.chunks(self.current.source):
            of_rows = coefficients[rows, None]
            gradient = (log_probabilities - math.log(num_replicas)).exp_().mul_(-of_rows)
            yield rows, source, gradient.scatter_add_(1, labels[rows, None], of_rows)

    def check_values(self, result: Result, limit: float, num_replicas: int = 1) -> list[Check]:
        checks = []
        if result.loss is not None:
            terms, _ = self.exact_loss()
            checks.append(Check("loss", float((result.loss.double() - terms.sum()).abs() / terms.abs().sum()), LOSS_LIMIT))
        if result.log_probs is not None:
            difference = result.log_probs.double() - self.current.log_probs + math.log(num_replicas)
            checks.append(Check("log_prob", float(torch.where(self.loss_mask, difference, 0.0).abs().max()), limit))
        return checks


class LogitsProblem(Problem):
    """From given logits. `logits` is a buffer that a step may overwrite; load(index) restores it."""

    def __init__(self, case: BenchmarkCase, inputs: Inputs):
        super().__init__(case, inputs)
        self.logits = torch.empty_like(inputs.sets[0].source)
        # Read in forward; read and written in backward. A masked row is not read, but its gradient is written.
        masked_bytes = self.logits_bytes * (case.num_tokens - self.num_unmasked) / case.num_tokens
        self.nominal_bytes, self.floor_bytes = 3 * self.logits_bytes, 3 * self.logits_bytes - 2 * masked_bytes
        if case.kind == "kernel":  # it reads once; the gradient is written as well
            self.nominal_bytes = self.floor_bytes = self.logits_bytes * (1 if case.kernel == STATISTICS else 2)
        self.work = {"logits_bytes": self.logits_bytes, "nominal_bytes": self.nominal_bytes, "floor_bytes": self.floor_bytes}

    @property
    def given(self) -> list[Tensor]:
        return [self.logits]

    def load(self, index: int) -> None:
        super().load(index)
        self.logits.copy_(self.current.source)

    def leaves(self) -> tuple[Tensor]:
        """Logits as the output of an operator, as in a model. The gradient of a leaf would be kept in memory."""
        return (self.logits.detach().requires_grad_().view_as(self.logits),)

    def check(self, result: Result, *, num_replicas: int = 1) -> list[Check]:
        """Of the loaded set. An element that was not written is NaN (CudaDevice.poison), and then the error is NaN."""
        checks = self.check_values(result, LOG_PROB_LIMIT, num_replicas)
        if not result.gradients:
            return checks
        whole, off_the_label = SquareSums(), SquareSums()
        for rows, _, expected in self.exact_gradient(num_replicas):
            found, label = result.gradients[0][rows].double(), self.current.labels[rows, None]
            whole.add(found, expected)
            # The element of the label is as large as all others together, so it would hide a wrong softmax.
            off_the_label.add(found.scatter_(1, label, 0.0), expected.scatter_(1, label, 0.0))
        limit = (LOG_PROBS_LIMITS if self.case.kernel == LOG_PROBS else GRADIENT_LIMITS)[self.case.dtype]
        return [*checks, Check("gradient", whole.ratio, limit), Check("gradient off the label", off_the_label.ratio, limit)]


class HeadProblem(Problem):
    """From hidden states. `logits_bytes` is the size of all logits, which only the unfused path holds at once."""

    def __init__(self, case: BenchmarkCase, inputs: Inputs):
        super().__init__(case, inputs)
        # Weight and one set of hidden states; one of the head's matmuls over all rows, masked ones too.
        self.input_bytes = float((case.num_tokens + case.vocab_size) * case.hidden_size * case.dtype.itemsize)
        self.matmul_flops = 2.0 * case.num_tokens * case.hidden_size * case.vocab_size
        self.work = {"matmul_flops": self.matmul_flops, "logits_bytes": self.logits_bytes, "input_bytes": self.input_bytes}
        self.main_grad: Tensor | None = None  # [V, H], of the provider that was prepared last

    @property
    def given(self) -> list[Tensor]:
        return [self.current.source, self.weight, *([] if self.main_grad is None else [self.main_grad])]

    def leaves(self) -> tuple[Tensor, Tensor]:
        return self.current.source.detach().requires_grad_(), self.weight.detach().requires_grad_()

    def check(self, result: Result, *, precision: torch.dtype | None = None) -> list[Check]:
        """Of the first set, whose whole gradients are kept. precision: of the logits; None: the case's."""
        assert self.current is self.sets[0], "the gate looks at the first set"
        case, limit = self.case, HEAD_LIMITS[self.case.dtype]
        checks = self.check_values(result, HEAD_LOG_PROB_LIMITS[precision or case.dtype])
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
        for rows, hidden, gradient in self.exact_gradient():
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
