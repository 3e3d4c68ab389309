"""Adapters to other people's kernels, called as their users call them. None of their code is here, and none is ever required.

A peer that is not importable is a row that says how to add it. Each adapter says what the peer leaves out.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType

import torch

from megatron_rl.commands.bench.cases import LossProblem
from megatron_rl.commands.bench.harness import NotInstalled, NotSupported, Provider, Step
from megatron_rl.commands.bench.providers import (
    FakeGroups,
    LogProbs,
    Result,
    add_checkout,
    check,
    from_log_probs,
    whole_vocabulary_only,
)
from megatron_rl.errors import ConfigError
from megatron_rl.megatron.cross_entropy import fused_cross_entropy_log_probs

LIGER = "Liger, Triton"
LIGER_VOCAB_PARALLEL = "Liger vocab-parallel CE + torch"
MEGATRON = "Megatron fused CE + torch"
FAST_LLM = "Fast-LLM, Triton"
VERL = "verl + torch"
# --peer NAME=PATH: the package that is looked for in PATH.
CHECKOUTS = {"fast_llm": "https://github.com/ServiceNow/Fast-LLM", "verl": "https://github.com/volcengine/verl"}
IGNORED_LABEL = -100
SEAM = "the loss itself (GRPO or GSPO in torch follows), entropy"


def parse_peers(values: Sequence[str], checkouts: Iterable[str] = tuple(CHECKOUTS)) -> dict[str, str]:
    """NAME=PATH -> {name: path}. Raises ConfigError for a name that is not one of `checkouts` or a path without the package."""
    found, problems = {}, []
    for value in values:
        name, equals, path = value.partition("=")
        if not equals or name not in checkouts:
            problems.append(f"--peer {value}: write NAME=PATH with NAME one of {', '.join(checkouts)}")
        elif not (Path(path) / name).is_dir():
            problems.append(f"--peer {value}: {path} holds no folder {name}; give the checkout's own folder")
        else:
            found[name] = path
    if problems:
        raise ConfigError(problems)
    return found


def peer_providers(checkouts: dict[str, str]) -> list[Provider]:
    for path in checkouts.values():
        add_checkout(path)
    return [
        Provider(
            LIGER, _liger, "vocabulary shards, packed documents (rows are padded to the longest), context parallelism, entropy"
        ),
        from_log_probs(LIGER_VOCAB_PARALLEL, _liger_vocab_parallel, SEAM),
        from_log_probs(MEGATRON, _megatron, SEAM),
        Provider(FAST_LLM, _fast_llm, "entropy (its metrics take another pass), gradients in place"),
        from_log_probs(VERL, _verl, f"vocabulary shards, {SEAM}; float32 arithmetic where flash-attn is missing"),
    ]


def import_peer(module: str, remedy: str) -> ModuleType:
    """The module; NotInstalled with the remedy where it, or something it needs, cannot be imported."""
    package = module.split(".")[0]
    if importlib.util.find_spec(package) is None:
        raise NotInstalled(remedy)
    try:
        return importlib.import_module(module)
    except (ImportError, SyntaxError) as error:  # SyntaxError: written for a newer Python
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise NotInstalled(f"{package} is here but `import {module}` fails ({reason})") from None


def _needs_triton(problem: LossProblem) -> None:
    """CUDA, or Triton's interpreter: what other people's kernels run on."""
    if problem.logits.is_cuda:
        return
    if importlib.util.find_spec("triton") is None or not importlib.import_module("triton").knobs.runtime.interpret:
        raise NotSupported("Triton kernels need CUDA")


def _liger(problem: LossProblem) -> Step:
    peer = import_peer("liger_kernel.transformers.grpo_loss", "pip install liger-kernel")
    _needs_triton(problem)
    whole_vocabulary_only(problem)
    case, (num_samples, longest) = problem.case, (len(problem.lengths), max(problem.lengths))
    # Its layout: [B, L + 1, V], the last row unused, a sample each row of the batch, padded and masked.
    padded = torch.zeros(num_samples, longest + 1, case.num_columns, dtype=case.dtype, device=problem.device)
    samples = problem.documents
    positions = torch.arange(case.num_tokens, device=problem.device) - problem.cu_seqlens[:-1].long()[samples]
    mask = torch.zeros(num_samples, longest, dtype=torch.int64, device=problem.device)
    mask[samples, positions] = problem.loss_mask.long()
    labels, old_log_probs = torch.zeros_like(mask), torch.zeros_like(mask, dtype=torch.float32)

    def load(index: int) -> None:
        problem.current = inputs = problem.sets[index]
        start = 0
        for sample, length in enumerate(problem.lengths):
            padded[sample, :length].copy_(inputs.pristine[start : start + length])
            start += length
        labels[samples, positions], old_log_probs[samples, positions] = inputs.labels, inputs.old_log_probs

    def run() -> Result:
        head_output = padded.detach().requires_grad_().view_as(padded)
        loss, _ = peer.triton_grpo_loss(
            head_output,
            old_log_probs,
            None,
            labels,
            problem.current.advantages,
            mask,
            temperature=1.0,
            beta=0.0,
            eps_low=problem.clip_low,
            eps_high=problem.clip_high,
            inplace=True,
            loss_type="bnpo",  # its name for a token mean over the batch at hand
            importance_sampling_level="sequence" if case.loss == "gspo" else "token",
            reduce=True,
        )
        (gradient,) = torch.autograd.grad(loss, head_output)
        return Result(loss.detach(), None, gradient)

    row_index = samples * (longest + 1) + positions
    return Step(load, run, lambda result: check(problem, result, row_index))


def _liger_vocab_parallel(problem: LossProblem) -> LogProbs:
    peer = import_peer("liger_kernel.transformers.vocab_parallel_cross_entropy", "pip install 'liger-kernel>=0.8'")
    _needs_triton(problem)
    cross_entropy = peer.LigerVocabParallelCrossEntropy(ignore_index=IGNORED_LABEL)
    tp_group = None if problem.case.shards == 1 else FakeGroups.get(problem.case.shards)

    def function(problem: LossProblem, logits):
        labels = torch.where(problem.loss_mask, problem.current.labels, IGNORED_LABEL)
        return -cross_entropy(logits[:, None], labels[:, None], tp_group)[:, 0]

    return function


def _megatron(problem: LossProblem) -> LogProbs:
    try:
        log_probs = fused_cross_entropy_log_probs()
    except ImportError as error:
        raise NotInstalled(f"pip install megatron-core ({error})") from None
    if problem.case.dtype != torch.bfloat16:
        raise NotSupported("its gradient is bfloat16 whatever the logits are")
    tp_group = FakeGroups.get(problem.case.shards)
    return lambda problem, logits: log_probs(logits, problem.current.labels, tp_group)


def _fast_llm(problem: LossProblem) -> Step:
    name = problem.case.loss
    remedy = f"--peer fast_llm=PATH, a checkout of {CHECKOUTS['fast_llm']} (Python 3.12)"
    peer = import_peer(f"fast_llm.functional.triton.{name}_loss", remedy)
    _needs_triton(problem)
    compute: Callable = getattr(peer, f"triton_{name}_loss_forward_backward")
    tp_group = None if problem.case.shards == 1 else FakeGroups.get(problem.case.shards)
    documents, num_documents = problem.documents, len(problem.lengths)
    counts_of_tokens = problem.token_counts[documents].to(torch.int32)

    def run() -> Result:
        inputs = problem.current
        options = {"group": tp_group, "epsilon_low": problem.clip_low, "epsilon_high": problem.clip_high}
        options |= {"grad_output": 1.0, "divisor": float(problem.num_unmasked), "num_labels_in_seq": counts_of_tokens}
        if name == "gspo":
            options |= {"document_index_zero_based": documents, "num_segments": num_documents}
        labels = torch.where(problem.loss_mask, inputs.labels, IGNORED_LABEL)
        # Its caller has advantages for each token and masks through the labels.
        token_advantages = inputs.advantages[documents]
        loss, gradient, _ = compute(problem.logits, labels, token_advantages, inputs.old_log_probs, **options)
        return Result(loss, None, gradient)

    return Step(problem.load, run, lambda result: check(problem, result))


def _verl(problem: LossProblem) -> LogProbs:
    remedy = f"pip install verl, or --peer verl=PATH, a checkout of {CHECKOUTS['verl']}; flash-attn for its fused cross-entropy"
    peer = import_peer("verl.utils.torch_functional", remedy)
    whole_vocabulary_only(problem)
    # Without flash-attn it goes row by row in the logits' own dtype, which bfloat16 logits do not survive at the gate.
    return lambda problem, logits: peer.logprobs_from_logits(logits, problem.current.labels)
