"""Adapters to kernels of other projects, called as their users call them. No code of theirs is here, and none is required.

A peer that cannot be imported is a row that says how to add it. Each adapter says what the peer leaves out.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from unittest import mock

import torch
from torch import Tensor

from benchmarks.checkouts import checkout_of, host_module
from benchmarks.measure import NOT_INSTALLED, NOT_SUPPORTED, Check, Provider, Step, Unavailable
from benchmarks.problems import BenchmarkCase, HeadProblem, LogitsProblem, Problem, Result
from benchmarks.providers import LogProbs, fake_group, from_log_probs, needs_cuda, summed_log_probs, whole_vocabulary_only

LIGER, LIGER_VOCAB_PARALLEL = "Liger, Triton", "Liger vocab-parallel CE + torch"
MEGATRON, FAST_LLM, VERL = "Megatron fused CE + torch", "Fast-LLM, Triton", "verl + torch"
LIGER_HEAD, LIGER_SCALED = "Liger fused linear GRPO", "Liger fused scaled CE + torch"
VERL_HEAD = "verl fused linear CE + torch"
MEGATRON_UNFUSED, SLIME = "Megatron vocab-parallel CE", "slime"
IGNORED_LABEL = -100
LOSS_LEFT_OUT = "the loss itself (GRPO or GSPO in torch follows)"


def import_peer(module: str, remedy: str) -> ModuleType:
    """The module; Unavailable, with the remedy, if the module or something that it needs cannot be imported."""
    package = module.split(".")[0]
    if importlib.util.find_spec(package) is None:
        raise Unavailable(NOT_INSTALLED, remedy)
    try:
        return importlib.import_module(module)
    except (ImportError, SyntaxError) as error:  # SyntaxError: written for a newer Python
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise Unavailable(NOT_INSTALLED, f"{package} is here but `import {module}` fails ({reason})") from None


def labels_of(problem: Problem) -> Tensor:
    """Labels of the loaded set for a cross-entropy, which ignores those of masked tokens."""
    return torch.where(problem.loss_mask, problem.current.labels, IGNORED_LABEL)


class PaddedBatch:
    """The layout of Liger's losses: each row of the batch is a sample, padded to the longest and masked. load(index) fills it.

    `source` [N, L + extra_rows, width], the others [N, L].
    """

    def __init__(self, problem: Problem, extra_rows: int):
        self.problem, num_samples, longest = problem, len(problem.lengths), max(problem.lengths)
        num_tokens, width = problem.sets[0].source.shape
        positions = torch.arange(num_tokens, device=problem.device) - problem.cu_seqlens[:-1].long()[problem.documents]
        self.places = (problem.documents, positions)
        self.source = torch.zeros(num_samples, longest + extra_rows, width, dtype=problem.case.dtype, device=problem.device)
        self.mask = torch.zeros(num_samples, longest, device=problem.device)
        self.mask[self.places] = problem.loss_mask.float()
        self.labels, self.old_log_probs = torch.zeros_like(self.mask, dtype=torch.int64), torch.zeros_like(self.mask)

    def load(self, index: int) -> None:
        self.problem.current = inputs = self.problem.sets[index]
        bounds = self.problem.host_cu_seqlens.tolist()
        for sample, (start, stop) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
            self.source[sample, : stop - start].copy_(inputs.source[start:stop])
        self.labels[self.places], self.old_log_probs[self.places] = inputs.labels, inputs.old_log_probs

    def check(self, result: Result) -> list[Check]:
        """The first gradient, of `source`, is brought back to [T, width]."""
        of_source, *others = result.gradients
        return self.problem.check(replace(result, gradients=(of_source[self.places], *others)))


# From logits


def loss_peers() -> list[Provider]:
    without_loss = f"{LOSS_LEFT_OUT}, entropy"
    return [
        Provider(
            LIGER, _liger, "vocabulary shards, packed documents (rows are padded to the longest), context parallelism, entropy"
        ),
        from_log_probs(LIGER_VOCAB_PARALLEL, _liger_vocab_parallel, without_loss),
        from_log_probs(MEGATRON, _megatron, without_loss),
        Provider(FAST_LLM, _fast_llm, "entropy (its metrics take another pass), gradients in place"),
        from_log_probs(VERL, _verl, f"vocabulary shards, {without_loss}; float32 arithmetic where flash-attn is missing"),
    ]


def cpu_peers(case: BenchmarkCase) -> list[Provider]:
    """What Megatron users, verl and slime compute log-probabilities with."""
    found = {MEGATRON_UNFUSED: _megatron_unfused, SLIME: _slime}
    if case.kernel is None:
        return [from_log_probs(name, find, LOSS_LEFT_OUT) for name, find in found.items()]
    return [summed_log_probs(name, find) for name, find in found.items()]


def _megatron_unfused(problem: LogitsProblem) -> LogProbs:
    """It writes into its logits, so its callers hand it a float32 copy."""
    peer = import_peer("megatron.core.tensor_parallel", "pip install megatron-core")
    state = importlib.import_module("megatron.core.parallel_state")
    group = fake_group(1)  # of which initialize_model_parallel cannot make its groups

    def log_probs(logits: Tensor) -> Tensor:
        copy = logits.float() if logits.dtype != torch.float32 else logits.clone()
        with mock.patch.object(state, "_TENSOR_MODEL_PARALLEL_GROUP", group):
            return -peer.vocab_parallel_cross_entropy(copy[:, None], problem.current.labels[:, None])[:, 0]

    return log_probs


def _slime(problem: LogitsProblem) -> LogProbs:
    peer = host_module("slime.utils.ppo_utils")
    return lambda logits: peer.calculate_log_probs_and_entropy(logits.float(), problem.current.labels, None)[0].squeeze(-1)


def _liger(problem: LogitsProblem) -> Step:
    peer = import_peer("liger_kernel.transformers.grpo_loss", "pip install liger-kernel")
    needs_cuda(problem)
    whole_vocabulary_only(problem)
    padded = PaddedBatch(problem, extra_rows=1)  # the last one unused
    mask = padded.mask.long()
    options = {"temperature": 1.0, "beta": 0.0, "eps_low": problem.clip_low, "eps_high": problem.clip_high, "inplace": True}
    # "bnpo" is Liger's name for a token mean over this batch.
    options |= {"loss_type": "bnpo", "importance_sampling_level": _level(problem), "reduce": True}

    def run() -> Result:
        logits = padded.source.detach().requires_grad_().view_as(padded.source)
        arguments = (logits, padded.old_log_probs, None, padded.labels, problem.current.advantages, mask)
        loss, _ = peer.triton_grpo_loss(*arguments, **options)
        return Result(loss.detach(), None, torch.autograd.grad(loss, logits))

    return Step(padded.load, run, padded.check)


def _level(problem: Problem) -> str:
    return "sequence" if problem.case.loss == "gspo" else "token"


def _liger_vocab_parallel(problem: LogitsProblem) -> LogProbs:
    peer = import_peer("liger_kernel.transformers.vocab_parallel_cross_entropy", "pip install 'liger-kernel>=0.8'")
    needs_cuda(problem)
    cross_entropy = peer.LigerVocabParallelCrossEntropy(ignore_index=IGNORED_LABEL)
    tp_group = None if problem.case.shards == 1 else fake_group(problem.case.shards)
    return lambda logits: -cross_entropy(logits[:, None], labels_of(problem)[:, None], tp_group)[:, 0]


def _megatron(problem: LogitsProblem) -> LogProbs:
    """Communication: two all-reduces over the tp group in forward (maximum; target logit and sum of exponentials)."""
    peer = import_peer("megatron.core.fusions.fused_cross_entropy", "pip install megatron-core")
    if problem.case.dtype != torch.bfloat16:
        raise Unavailable(NOT_SUPPORTED, "its gradient is bfloat16 whatever the logits are")
    function = peer.fused_vocab_parallel_cross_entropy
    group = (fake_group(problem.case.shards),)
    group = group if "tp_group" in inspect.signature(function).parameters else ()
    # Its layout is [sequence, batch, vocabulary].
    return lambda logits: -function(logits[:, None], problem.current.labels[:, None], *group)[:, 0]


def _fast_llm(problem: LogitsProblem) -> Step:
    name = problem.case.loss
    peer = import_peer(f"fast_llm.functional.triton.{name}_loss", f"{checkout_of('fast_llm')} (Python 3.12)")
    needs_cuda(problem)
    compute: Callable = getattr(peer, f"triton_{name}_loss_forward_backward")
    documents = problem.documents
    options = {"group": None if problem.case.shards == 1 else fake_group(problem.case.shards)}
    options |= {"epsilon_low": problem.clip_low, "epsilon_high": problem.clip_high, "grad_output": 1.0}
    options |= {"divisor": float(problem.num_unmasked), "num_labels_in_seq": problem.token_counts[documents].to(torch.int32)}
    if name == "gspo":
        options |= {"document_index_zero_based": documents, "num_segments": len(problem.lengths)}

    def run() -> Result:
        # Its caller has advantages for each token and masks through the labels.
        token_advantages = problem.current.advantages[documents]
        arguments = (problem.logits, labels_of(problem), token_advantages, problem.current.old_log_probs)
        loss, gradient, _ = compute(*arguments, **options)
        return Result(loss, None, (gradient,))

    return Step(problem.load, run, problem.check)


def _verl(problem: LogitsProblem) -> LogProbs:
    peer = host_module("verl.utils.torch_functional")
    whole_vocabulary_only(problem)
    # Without flash-attn it computes row by row in the dtype of the logits, and bfloat16 logits then fail the gate.
    return lambda logits: peer.logprobs_from_logits(logits, problem.current.labels)


# From hidden states


def head_peers(case: BenchmarkCase) -> list[Provider]:
    """Only for dense cases: a peer treats masked rows like all others."""
    if not case.is_dense or case.documents == 1:
        return []
    # Their logits are bfloat16, or float32 inside a kernel. The wider limit of the gate is used for both.
    return [
        Provider(
            LIGER_HEAD, _liger_head, "vocabulary shards, packed documents (rows are padded to the longest), context parallelism"
        ),
        from_log_probs(LIGER_SCALED, _liger_scaled, LOSS_LEFT_OUT),
        from_log_probs(VERL_HEAD, _verl_head, f"{LOSS_LEFT_OUT}; logits are computed a second time in backward"),
    ]


def _liger_head(problem: HeadProblem) -> Step:
    peer = import_peer("liger_kernel.chunked_loss", "pip install liger-kernel")
    options = {"beta": 0.0, "compiled": problem.device.type == "cuda", "use_ref_model": False, "temperature": 1.0}
    options |= {"epsilon_low": problem.clip_low, "epsilon_high": problem.clip_high, "loss_type": "bnpo"}
    function = peer.LigerFusedLinearGRPOLoss(importance_sampling_level=_level(problem), **options)
    padded = PaddedBatch(problem, extra_rows=0)

    def run() -> Result:
        leaves = padded.source.detach().requires_grad_(), problem.weight.detach().requires_grad_()
        arguments = (padded.labels, padded.mask, problem.current.advantages)
        loss, _ = function(*leaves, *arguments, old_per_token_logps=padded.old_log_probs)
        return Result(loss.detach(), None, torch.autograd.grad(loss, leaves))

    return Step(padded.load, run, padded.check)


def _liger_scaled(problem: HeadProblem) -> LogProbs:
    needs_cuda(problem)
    remedy = "pip install 'liger-kernel[cutedsl]>=0.8.5'; without CuTe it falls back to torch"
    peer = import_peer("liger_kernel.ops", remedy)
    function = getattr(peer, "LigerFusedLinearScaledCrossEntropyFunction", None)
    if function is None:
        raise Unavailable(NOT_INSTALLED, f"this liger-kernel has no fused scaled cross-entropy: {remedy}")
    # Temperature, ignored label, tiles, without entropy.
    options = (1.0, IGNORED_LABEL, 1, False)
    return lambda hidden, weight: -_first(function.apply(hidden, weight, problem.current.labels, *options))


def _verl_head(problem: HeadProblem) -> LogProbs:
    needs_cuda(problem)
    peer = host_module("verl.utils.kernel.linear_cross_entropy")
    # Temperature, reduction, process group.
    options = (1.0, "none", None)
    return lambda hidden, weight: _first(peer.linear_cross_entropy(hidden, weight, problem.current.labels, *options))


def _first(values: Tensor | tuple) -> Tensor:
    return values if isinstance(values, Tensor) else values[0]
