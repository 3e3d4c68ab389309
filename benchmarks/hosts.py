"""`python -m benchmarks hosts --peer verl=PATH ...`: a training step's head in each host's own code, and ours in its place.

A step starts from hidden states [T, H] and the head's weight [V, H] in 16 bits, and ends with the gradients of both. Between them
lies what the host does: its logits, the copy in float32 that it makes, its log-probabilities, the entropy where its loss always
takes it, and GRPO. What is linear in T alone is no host's: after its log-probabilities every host has the same loss.

    a host's own          the functions that the host calls, imported from its own files; packages that are absent are stubbed
    bytes a logit         the most bytes that live at once, above what lives before the step, over T x V. On a CPU ours is the torch
                          path. There T / H is as at full size: it decides how much the weight's float32 gradient is
    groups                of one rank: NCCL's, gloo's on a CPU. No message leaves it, so no time of one is in the numbers
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.checkouts import host_module
from benchmarks.measure import Check, Device, Provider, Step
from benchmarks.problems import BenchmarkCase, HeadProblem, Result, relative
from benchmarks.providers import MAX_LOGITS_BYTES, LogProbs, from_log_probs, fused, package_loss, step_of
from megatron_rl.hosts.heads.log_probs import log_probs_of_logits
from megatron_rl.layout.groups import SINGLE
from megatron_rl.ops.linear_log_probs import linear_log_probs
from megatron_rl.ops.scale import AssumedScale

# The hosts' own chunks: fused_linear_logprobs_chunk_size of NeMo-RL's GRPO example, logprobs_chunk_size of SkyRL's defaults.
NEMO_RL_ROWS, SKYRL_ROWS = 256, 1024
# On a CPU, of the logits: what ours may hold of them at once in the fused head. A host's own has as many rows.
CHUNK_SHARE = 16
# 16 bits of hidden states, weight and logits leave 2e-3 to 3e-3. What is further off computes something else.
MOST_ERROR = 0.03

Find = Callable[[HeadProblem], LogProbs]
Scores = Callable[[Tensor, Tensor], Tensor]  # (logits [T, V], labels [T]) -> log-probabilities [T]
OfHidden = Callable[[Tensor, Tensor, Tensor, int], Tensor]  # (hidden [T + 1, H], weight, labels [T + 1], rows of a chunk) -> [T]


# The hosts


def from_logits(find: Callable[[], Scores]) -> Find:
    def prepare(problem: HeadProblem) -> LogProbs:
        scores = find()
        return lambda hidden, weight: scores(hidden @ weight.T, problem.current.labels)

    return prepare


def _slime() -> Scores:
    function = host_module("slime.utils.ppo_utils").calculate_log_probs_and_entropy

    def scores(logits: Tensor, labels: Tensor) -> Tensor:
        # Megatron's Float16Module makes float32 of what the last stage returns; the loss takes the entropy as a metric.
        log_probs, _ = function(logits.float(), labels, one_rank(), with_entropy=True, with_entropy_grad=False)
        return log_probs.reshape(-1)

    return scores


def _miles() -> Scores:
    function = host_module("miles.backends.training_utils.loss_hub.math_utils").calculate_log_probs_and_entropy

    def scores(logits: Tensor, labels: Tensor) -> Tensor:
        log_probs, _ = function(logits.float(), labels, one_rank(), with_entropy=True, entropy_requires_grad=False)
        return log_probs.reshape(-1)

    return scores


def _verl_megatron(*, with_entropy: bool = False) -> Scores:
    module = host_module("verl.utils.megatron.tensor_parallel")

    def scores(logits: Tensor, labels: Tensor) -> Tensor:
        logits = logits.float()[None]
        if with_entropy:
            # In this order in the engine: a copy, the entropy of the logits, log-probabilities of the copy.
            copy = logits.clone()
            entropy = module.vocab_parallel_entropy(logits)
            log_probs = module.vocab_parallel_log_probs_from_logits(copy, labels[None])[0]
            del entropy  # it lives until here
            return log_probs
        return module.vocab_parallel_log_probs_from_logits(logits, labels[None])[0]

    return scores


def _verl_fsdp() -> Scores:
    function = host_module("verl.utils.torch_functional").logprobs_from_logits
    return lambda logits, labels: function(logits, labels, inplace_backward=True)


def _shifted(module: str) -> Scores:
    """Of NeMo-RL and SkyRL: they shift the targets themselves, and leave the last row out."""
    function = host_module(module).from_parallel_logits_to_logprobs

    def scores(logits: Tensor, labels: Tensor) -> Tensor:
        rows = torch.cat([logits.float(), logits.new_zeros(1, logits.shape[1], dtype=torch.float32)])[None]
        return function(rows, torch.cat([labels[:1], labels])[None], 0, logits.shape[1], one_rank())[0]

    return scores


def from_hidden(find: Callable[[], OfHidden], default_rows: int) -> Find:
    """Of a host's own fused function. On a GPU a chunk has the host's default of rows."""

    def prepare(problem: HeadProblem) -> LogProbs:
        function = find()
        num_rows = default_rows if problem.device.type == "cuda" else max(problem.case.num_tokens // CHUNK_SHARE, 1)

        def log_probs(hidden: Tensor, weight: Tensor) -> Tensor:
            rows, labels = torch.cat([hidden, hidden.new_zeros(1, hidden.shape[1])]), problem.current.labels
            return function(rows, weight, torch.cat([labels[:1], labels]), num_rows)

        return log_probs

    return prepare


def _nemo_rl_head() -> OfHidden:
    function = host_module(NEMO_RL).from_parallel_hidden_states_to_logprobs
    return lambda hidden, weight, labels, rows: function(
        hidden[:, None], weight, False, labels[None], 0, len(weight), one_rank(), chunk_size=rows
    )[0]


def _skyrl_head() -> OfHidden:
    function = host_module(SKYRL).from_parallel_hidden_to_logprobs
    return lambda hidden, weight, labels, rows: function(
        hidden[None], weight, labels[None], 0, len(weight), one_rank(), chunk_size=rows
    )[0]


def _roll(*, use_fused_kernel: bool = False) -> Scores:
    function = host_module("mcore_adapter.parallel_functions.vocab_parallel").vocab_parallel_logprobs
    return lambda logits, labels: function(logits.float()[None], labels[None], use_fused_kernel=use_fused_kernel)[0]


NEMO_RL, SKYRL = "nemo_rl.distributed.model_utils", "skyrl.backends.skyrl_train.distributed.megatron.model_utils"
OWN: dict[str, dict[str, Find]] = {
    "miles": {"its own, with entropy": from_logits(_miles)},
    "slime": {"its own, with entropy": from_logits(_slime)},
    "verl, Megatron": {
        "its own": from_logits(_verl_megatron),
        "its own, with entropy": from_logits(partial(_verl_megatron, with_entropy=True)),
    },
    "verl, FSDP": {"its own": from_logits(_verl_fsdp)},
    "NeMo-RL": {
        "its own": from_logits(partial(_shifted, NEMO_RL)),
        "its own fused head": from_hidden(_nemo_rl_head, NEMO_RL_ROWS),
    },
    "SkyRL": {"its own": from_logits(partial(_shifted, SKYRL)), "its own fused head": from_hidden(_skyrl_head, SKYRL_ROWS)},
    "ROLL": {"its own": from_logits(_roll)},
}
# Of a host that has a Triton kernel behind a setting.
OWN_ON_CUDA = {"ROLL": {"its own, cross_entropy_loss_fusion": from_logits(partial(_roll, use_fused_kernel=True))}}


# Ours


# As hosts/*_log_probs.py: whether the host hands over a float32 copy, and whether the gradient is written over its logits.
OUR_LOG_PROBS = {
    "verl, Megatron": {"from_float32": True, "inplace": True},
    "verl, FSDP": {"from_float32": False, "inplace": True},
    "ROLL": {"from_float32": True, "inplace": True},
    **dict.fromkeys(("NeMo-RL", "SkyRL"), {"from_float32": True, "inplace": False}),
}
# Whose adapters give the loss an AssumedScale: hosts/loss.py and hosts/roll_loss.py.
ASSUME_SCALE = ("miles", "slime", "ROLL")


def our_scores(*, from_float32: bool, inplace: bool) -> Scores:
    return lambda logits, labels: log_probs_of_logits(logits.float() if from_float32 else logits, labels, SINGLE, inplace=inplace)


def our_budget(case: BenchmarkCase, device_kind: str) -> int:
    """What ours may hold of the logits at once in the fused head."""
    all_of_them = case.num_tokens * case.vocab_size * case.dtype.itemsize
    return MAX_LOGITS_BYTES if device_kind == "cuda" else all_of_them // CHUNK_SHARE


def _our_loss(host: str, metrics: str) -> Callable[[HeadProblem], Step]:
    def prepare(problem: HeadProblem) -> Step:
        # One for all steps, as in an adapter. Where no kernel makes the gradient in forward, as on a CPU, it has no effect.
        options = {"metrics": metrics, "loss_scale": AssumedScale() if host in ASSUME_SCALE else None}
        options |= {"tp_group": SINGLE, "inplace": True}
        return step_of(problem, lambda hidden, weight: package_loss(problem, (hidden @ weight.T).float(), **options))

    return prepare


def host_providers(case: BenchmarkCase, device_kind: str) -> Iterator[Provider]:
    """The host's own, then ours in its place: log-probabilities where its loss may stay, and our loss, with entropy as its own."""
    host, budget = case.host, {"max_logits_bytes": our_budget(case, device_kind)}
    own = OWN[host] | (OWN_ON_CUDA.get(host, {}) if device_kind == "cuda" else {})
    found = [from_log_probs(name, find, "") for name, find in own.items()]
    if host in OUR_LOG_PROBS:
        of_logits = from_logits(lambda: our_scores(**OUR_LOG_PROBS[host]))
        of_hidden = lambda problem: lambda *leaves: linear_log_probs(*leaves, problem.current.labels, tp_group=SINGLE, **budget)  # noqa: E731
        found.append(from_log_probs("our log-probabilities", of_logits, "", is_ours=True))
        found.append(from_log_probs("our log-probabilities from hidden states", of_hidden, "", is_ours=True))
    for suffix in dict.fromkeys(", with entropy" if name.endswith(", with entropy") else "" for name in own):
        metrics = "with_entropy" if suffix else "none"
        found += [
            Provider(f"our loss from logits{suffix}", _our_loss(host, metrics), is_ours=True),
            fused(f"our fused head{suffix}", metrics=metrics, **budget),
            fused(f"our fused head, into main_grad{suffix}", metrics=metrics, into_main_grad=True, **budget),
        ]
    return map(_gated, found)


# Measuring


def _gated(provider: Provider) -> Provider:
    """With the gate of a host's 16 bits: both gradients, and nothing else."""

    def prepare(problem: HeadProblem) -> Step:
        def check(result: Result) -> list[Check]:
            error = max(map(relative, result.gradients, problem.exact_gradients))
            return [Check("gradients", error, MOST_ERROR)]

        return replace(provider.prepare(problem), check=check)

    return replace(provider, prepare=prepare)


@contextlib.contextmanager
def one_megatron_rank(device: Device) -> Iterator[None]:
    """Megatron's groups of one rank."""
    from megatron.core import parallel_state

    dist.init_process_group("nccl" if device.kind == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def one_rank() -> dist.ProcessGroup:
    return dist.group.WORLD
