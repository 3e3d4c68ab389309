"""Adapters to other people's fused heads, called as their users call them. None of their code is here, none is required."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_rl.commands.bench.harness import NotInstalled, NotSupported, Provider, Step
from megatron_rl.commands.bench.head_cases import HeadCase
from megatron_rl.commands.bench.head_problem import CROSS_ENTROPY, HeadProblem, Result
from megatron_rl.commands.bench.head_providers import step_of
from megatron_rl.commands.bench.peers import IGNORED_LABEL, import_peer
from megatron_rl.commands.bench.providers import add_checkout, torch_policy_loss
from megatron_rl.megatron.cross_entropy import fused_linear_cross_entropy_log_probs

LIGER = "Liger fused linear GRPO"
LIGER_SCALED = "Liger fused scaled CE + torch"
VERL = "verl fused linear CE + torch"
MEGATRON = "Megatron fused linear CE + torch"
CUT = "cut-cross-entropy + torch"
QUACK = "QuACK fused linear CE"
# --peer NAME=PATH: the package that is looked for in PATH.
CHECKOUTS = {
    "liger_kernel": "https://github.com/linkedin/Liger-Kernel (its src)",
    "verl": "https://github.com/volcengine/verl",
    "cut_cross_entropy": "https://github.com/apple/ml-cross-entropy",
    "quack": "https://github.com/Dao-AILab/quack",
    "megatron": "https://github.com/NVIDIA/Megatron-LM",
}
SEAM = "the loss itself (GRPO or GSPO in torch follows)"
RECOMPUTED = "logits are computed a second time in backward"
QUACK_ROWS = 4096  # its own default

# (hidden [T, H], weight [V, H], labels [T]) -> log_probs [T], differentiable
LogProbs = Callable[[Tensor, Tensor, Tensor], Tensor]


def peer_providers(case: HeadCase, checkouts: dict[str, str]) -> list[Provider]:
    """Beside dense cases without KL alone: what a peer does with masked and clipped rows is what it does with all."""
    if not case.is_dense or case.with_kl or case.documents == 1:
        return []
    for path in checkouts.values():
        add_checkout(path)
    return [
        Provider(LIGER, _liger, "vocabulary shards, packed documents (rows are padded to the longest), context parallelism"),
        _from_log_probs(LIGER_SCALED, _liger_scaled, SEAM),
        _from_log_probs(VERL, _verl, f"{SEAM}; {RECOMPUTED}"),
        _from_log_probs(MEGATRON, _megatron, f"{SEAM}; {RECOMPUTED}; GPUs before Blackwell"),
        _from_log_probs(CUT, _cut, f"{SEAM}, vocabulary shards; {RECOMPUTED}; gradient filter off: flat rows do not survive it"),
        Provider(QUACK, _quack, "any loss but the mean of -log_prob, whose coefficient is known: judged against that"),
    ]


def _needs_cuda(problem: HeadProblem) -> None:
    if problem.device.type != "cuda":
        raise NotSupported("its kernels need CUDA")


def _from_log_probs(name: str, find: Callable[[HeadProblem], LogProbs], leaves_out: str) -> Provider:
    """A peer that ends at log-probabilities, with the loss in torch behind it. `find(problem)` imports it once, untimed."""

    def prepare(problem: HeadProblem) -> Step:
        function = find(problem)

        def compute(hidden: Tensor, weight: Tensor):
            log_probs = function(hidden, weight, problem.current.labels)
            return torch_policy_loss(problem, log_probs), log_probs

        # Their logits are float32 inside a kernel or bfloat16: the wider limit holds for both.
        return step_of(problem, compute)

    return Provider(name, prepare, leaves_out)


def _liger(problem: HeadProblem) -> Step:
    peer = import_peer("liger_kernel.chunked_loss", "pip install liger-kernel")
    case, num_samples, longest = problem.case, len(problem.lengths), max(problem.lengths)
    function = peer.LigerFusedLinearGRPOLoss(
        beta=0.0,
        compiled=problem.device.type == "cuda",
        use_ref_model=False,
        epsilon_low=problem.clip_low,
        epsilon_high=problem.clip_high,
        loss_type="bnpo",  # its name for a token mean over the batch at hand
        importance_sampling_level="sequence" if case.loss == "gspo" else "token",
        temperature=1.0,
    )
    # Its layout: [B, L, H], a sample each row of the batch, padded and masked.
    samples = problem.documents
    positions = torch.arange(case.num_tokens, device=problem.device) - problem.cu_seqlens[:-1].long()[samples]
    padded = torch.zeros(num_samples, longest, case.hidden_size, dtype=case.dtype, device=problem.device)
    mask = torch.zeros(num_samples, longest, device=problem.device)
    mask[samples, positions] = problem.loss_mask.float()
    labels, old_log_probs = torch.zeros_like(mask, dtype=torch.int64), torch.zeros_like(mask)

    def load(index: int) -> None:
        problem.load(index)
        inputs = problem.current
        padded[samples, positions] = inputs.hidden
        labels[samples, positions], old_log_probs[samples, positions] = inputs.labels, inputs.old_log_probs

    def run() -> Result:
        hidden, weight = padded.detach().requires_grad_(), problem.weight.detach().requires_grad_()
        advantages = problem.current.advantages
        loss, _ = function(hidden, weight, labels, mask, advantages, old_per_token_logps=old_log_probs)
        of_hidden, of_weight = torch.autograd.grad(loss, (hidden, weight))
        return Result(loss.detach(), None, of_hidden, of_weight)

    row_index = samples * longest + positions
    return Step(load, run, lambda result: problem.check(result, row_index=row_index))


def _liger_scaled(problem: HeadProblem) -> LogProbs:
    _needs_cuda(problem)
    remedy = "pip install 'liger-kernel[cutedsl]>=0.8.5'; without CuTe it falls back to torch"
    peer = import_peer("liger_kernel.ops", remedy)
    function = getattr(peer, "LigerFusedLinearScaledCrossEntropyFunction", None)
    if function is None:
        raise NotInstalled(f"this liger-kernel has no fused scaled cross-entropy: {remedy}")
    # Temperature, ignored label, tiles, without entropy.
    return lambda hidden, weight, labels: -_first(function.apply(hidden, weight, labels, 1.0, IGNORED_LABEL, 1, False))


def _verl(problem: HeadProblem) -> LogProbs:
    _needs_cuda(problem)
    remedy = f"pip install verl, or --peer verl=PATH, a checkout of {CHECKOUTS['verl']}"
    peer = import_peer("verl.utils.kernel.linear_cross_entropy", remedy)
    # Temperature, reduction, process group.
    return lambda hidden, weight, labels: _first(peer.linear_cross_entropy(hidden, weight, labels, 1.0, "none", None))


def _megatron(problem: HeadProblem) -> LogProbs:
    _needs_cuda(problem)
    try:
        return fused_linear_cross_entropy_log_probs()
    except ImportError as error:
        remedy = f"a megatron-core that has it, or --peer megatron=PATH, a checkout of {CHECKOUTS['megatron']}"
        raise NotInstalled(f"{remedy} ({error})") from None


def _cut(problem: HeadProblem) -> LogProbs:
    _needs_cuda(problem)
    remedy = f"pip install cut-cross-entropy, or --peer cut_cross_entropy=PATH, a checkout of {CHECKOUTS['cut_cross_entropy']}"
    peer = import_peer("cut_cross_entropy", remedy)
    options = {"reduction": "none", "impl": "cce", "filter_eps": None}
    return lambda hidden, weight, labels: -peer.linear_cross_entropy(hidden, weight, labels, **options)


def _quack(problem: HeadProblem) -> Step:
    _needs_cuda(problem)
    remedy = f"pip install quack-kernels, or --peer quack=PATH, a checkout of {CHECKOUTS['quack']}"
    peer = import_peer("quack.linear_cross_entropy", remedy)

    def compute(hidden: Tensor, weight: Tensor):
        labels = torch.where(problem.loss_mask, problem.current.labels, IGNORED_LABEL)
        loss = peer.chunked_linear_cross_entropy(
            hidden, weight, labels, chunk_size=QUACK_ROWS, ignore_index=IGNORED_LABEL, reduction="mean"
        )
        return loss, None

    return step_of(problem, compute, kind=CROSS_ENTROPY)


def _first(values: Tensor | tuple) -> Tensor:
    return values if isinstance(values, Tensor) else values[0]
