"""The loss functions of the fused head: hidden states in, this rank's part of the step's loss out. It never holds logits [T, V_tp].

Equations, aggregation and outputs are those of policy_loss.py; which rows meet which matmul is ops/linear_schedule.py's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypedDict, Unpack

import torch
from torch import Tensor

from megatron_rl.config import DEFAULT_MAX_LOGITS_BYTES, Backend, PolicyMetrics
from megatron_rl.layout.groups import Group, resolve_group
from megatron_rl.layout.rank_agreement import RankAgreement
from megatron_rl.loss_hub import PolicyLossEntry, get_policy_loss
from megatron_rl.losses.inputs import LossInputs, prepare_inputs
from megatron_rl.losses.linear_coefficients import DocumentCoefficients, TokenCoefficients
from megatron_rl.losses.linear_inputs import HostFacts, check_document_lengths, document_sizes, read_host_facts
from megatron_rl.losses.parts import LossParts, LossSettings
from megatron_rl.losses.policy_loss import (
    PolicyLossOutput,
    check_regularizers,
    compare_inputs,
    loss_settings,
    needs_entropy,
)
from megatron_rl.losses.surrogate import clipped_surrogate
from megatron_rl.ops.autograd import runs_eagerly
from megatron_rl.ops.backends import resolve_backend
from megatron_rl.ops.linear_autograd import ReadyGradient, attach_gradient, check_loss_scale, main_grad_of
from megatron_rl.ops.linear_gradient import make_gradient, run_forward, run_with_gradient
from megatron_rl.ops.linear_head import logits_dtype
from megatron_rl.ops.linear_log_probs import HeadOptions, LinearHead, check_head, chunk_capacity, compare_heads, make_head
from megatron_rl.ops.linear_schedule import WorkItem, document_bins, schedule_documents, schedule_rows
from megatron_rl.ops.log_probs import log_probs_dtype


class LinearPolicyLossOptions(TypedDict, total=False):
    """The keyword arguments of linear_policy_loss and its two names; meaning and defaults stand there and at policy_loss."""

    clip_ratio_low: float | None
    clip_ratio_high: float | None
    temperature: float
    vocab_size: int | None
    token_counts: Tensor | None
    tp_group: Group | None
    cp_group: Group | None
    metrics: str
    backend: str
    advantages_per: str | None
    importance_weights: Tensor | None
    ref_log_probs: Tensor | None
    kl_coefficient: float
    entropy_coefficient: float
    regularizer_weights: Tensor | None
    max_logits_bytes: int
    sequence_parallel: bool
    fp32_logits: bool
    document_lengths: Sequence[int] | None
    loss_scale: Tensor | float | None
    return_log_probs: bool
    check_ranks: bool | None


@runs_eagerly
def linear_policy_loss(
    name: str,
    hidden: Tensor,  # [T, H], or this rank's [T / tp, H] with sequence_parallel; float32, bfloat16, float16 or float64
    weight: Tensor,  # [V_tp, H] of the same dtype: this tp rank's rows of the head
    labels: Tensor,  # [T] int64
    old_log_probs: Tensor | None,  # [T]; None: on-policy
    advantages: Tensor,  # [N] or [T]
    loss_mask: Tensor,  # [T] bool, on any device
    cu_seqlens: Tensor,  # [N + 1] int32, on any device
    token_weights: Tensor,  # [N] from sample_token_weights
    *,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    token_counts: Tensor | None = None,  # [N] over all cp ranks; None: counted here
    tp_group: Group | None = None,
    cp_group: Group | None = None,
    metrics: str = PolicyMetrics.NONE,
    backend: str = Backend.AUTO,
    advantages_per: str | None = None,
    importance_weights: Tensor | None = None,  # [T]
    ref_log_probs: Tensor | None = None,  # [T]
    kl_coefficient: float = 0.0,
    entropy_coefficient: float = 0.0,
    regularizer_weights: Tensor | None = None,  # [N] from aggregation.regularizer_weights
    max_logits_bytes: int = DEFAULT_MAX_LOGITS_BYTES,
    sequence_parallel: bool = False,
    fp32_logits: bool = False,
    document_lengths: Sequence[int] | None = None,  # N host ints, whole documents, equal on all cp ranks
    loss_scale: Tensor | float | None = None,
    return_log_probs: bool = True,
    check_ranks: bool | None = None,
) -> PolicyLossOutput:
    """`policy_loss` of logits = hidden @ weight.T, which are never there as a whole: loss, metrics and both gradients are equal.

    With G_t = (delta - p) / temperature of row t and c_t = dL / d log_prob_t, dX_t = c_t (G_t W) and dW = sum_t G_t^T (c_t X_t):
    the coefficient commutes with both matmuls, so three are enough, in forward, while a chunk's logits are there.

        plan A   a sequence-level loss; whole documents share a chunk: c is known before the chunk is left
        plan B   a document longer than a chunk: c is one number for all its tokens, so G is multiplied first and c applied last
        plan C   a long document with KL or entropy terms, or a registered loss without a surrogate: statistics first, then the
                 logits of all chunks but the last a second time (a fourth matmul for them)
        plan D   a token-level loss, or old_log_probs None: c_t is known row by row, chunks cut anywhere

    Masked rows are in no matmul and hidden may hold anything there; rows with c_t = 0, clipped or of advantage 0, leave the two of
    backward, except the early chunks of a plan B document that turns out clipped. With return_log_probs=False, no metrics, no KL
    and no entropy term, rows of advantage 0 leave all three; `.log_probs` is then None and non-finite logits there go unseen.

    The gradient is computed in forward when gradients are enabled, and `.loss` can be differentiated once; under no_grad one
    matmul runs. That of hidden is complete over tp ([T / tp, H] with sequence_parallel) and kept until backward, that of weight in
    float32. loss_scale is the product of everything that will multiply `.loss` before backward: given, the weight gradient goes
    straight into weight.main_grad (where there is one in float32), and backward checks the factor it gets: on the CPU another one
    raises, on CUDA it fills the gradient of hidden with NaN. None: a float32 buffer of weight's size until backward, which adds
    it to main_grad or returns it in weight's dtype. A forward pass whose backward never runs must not be given loss_scale.

    Memory: max_logits_bytes bounds all chunk buffers together. Beside it there are the gradient of hidden, the weight gradient's
    float32 buffer unless it is main_grad, and for plan B one more of that size, unless a single long document comes alone and
    main_grad is not added to in forward; and scratch of a constant size: the torch row kernels work on up to six pieces of 4 MiB
    on the CPU, of 256 MiB on CUDA, where the Triton ones need none. Smaller chunks cost time, never precision. fp32_logits: logits
    of 16-bit operands stay float32; their gradient is 16-bit on CUDA, where it is multiplied.

    Communication: tp an all-gather of [rows, 3 or 4] a chunk, an all-reduce of the gradient of hidden a chunk, or with
    sequence_parallel one all-gather of hidden and one reduce-scatter. cp one all-reduce of [N_bin, k] a bin (plan D: [N, k] once,
    on-policy at sequence level twice), and for bins one all-gather of [2, N] unless document_lengths and token_counts are given.
    Backward none. None of them at size 1. Every cp rank meets the same bins, whatever it holds of them. check_ranks, torch.compile
    and create_graph as in policy_loss.
    Synchronisation on CUDA: one for the rows unless loss_mask and cu_seqlens are on the CPU, one under cp for the bins unless
    document_lengths are given, one a chunk for the rows that stay; none in backward.
    Raises: what policy_loss raises; DataError for operands that do not fit and for document_lengths that do not; ConfigError for a
    budget without room for a row, a loss_scale that is no factor, float16 without one, and a second backward.
    """
    tp_group, cp_group = resolve_group(tp_group, "tp"), resolve_group(cp_group, "cp")
    with RankAgreement(tp_group, cp_group, check_ranks=check_ranks) as agreement:
        entry = get_policy_loss(name)
        # Everything of it that needs no settings is checked first: the weight has to be a tensor for a backend to be chosen.
        options = HeadOptions(temperature, vocab_size, tp_group, False, backend, sequence_parallel, fp32_logits)
        num_tokens, device = check_head(hidden, weight, labels, options), hidden.device
        numbers = weight.new_empty(0, dtype=logits_dtype(weight, fp32_logits))
        settings = loss_settings(
            entry,
            clip_ratio_low,
            clip_ratio_high,
            kl_coefficient,
            entropy_coefficient,
            metrics,
            cp_group,
            resolve_backend(backend, numbers),
        )
        options = replace(options, with_entropy=needs_entropy(settings))
        check_regularizers(settings, ref_log_probs, regularizer_weights)
        inputs = prepare_inputs(
            num_tokens,
            device,
            log_probs_dtype(numbers),
            old_log_probs,
            _on(device, advantages),
            _on(device, loss_mask),
            cu_seqlens,
            token_weights,
            token_counts=token_counts,
            advantages_per=advantages_per,
            importance_weights=importance_weights,
            ref_log_probs=ref_log_probs,
            regularizer_weights=regularizer_weights,
            ranks_must_agree=entry.level == "sequence" and cp_group.size() > 1,
        )
        facts = read_host_facts(loss_mask, cu_seqlens, inputs, advantages)
        check_document_lengths(document_lengths, facts, cp_group.size())
        capacity = chunk_capacity(weight, max_logits_bytes, fp32_logits, num_tokens)
        needs_gradient = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
        ready = _ready_gradient(hidden, weight, loss_scale) if needs_gradient else None
        compare_heads(agreement, hidden, weight, labels, inputs.loss_mask, options, max_logits_bytes)
        compare_inputs(agreement, entry, inputs, settings)
        _compare_plans(agreement, hidden, weight, facts, document_lengths, loss_scale, return_log_probs)
    with torch.no_grad():
        plan = _plan(entry, inputs, settings, facts, capacity, document_lengths, keeps_log_probs=return_log_probs)
        head = make_head(hidden, weight, labels, options, max((c.numel() for item in plan.items for c in item.chunks), default=0))
        parts = _run(head, plan, settings, hidden, ready)
    return PolicyLossOutput(
        loss=parts.loss if ready is None else attach_gradient(parts.loss, hidden, weight, ready),
        policy_loss=parts.policy_loss,
        kl_loss=parts.kl_loss,
        entropy=parts.entropy,
        log_probs=head.log_probs if return_log_probs else None,
        num_nonfinite=parts.num_nonfinite,
        metrics=parts.statistics,
    )


def linear_grpo_loss(
    hidden: Tensor,  # [T, H], or [T / tp, H] with sequence_parallel
    weight: Tensor,  # [V_tp, H]
    labels: Tensor,  # [T] int64
    old_log_probs: Tensor | None,  # [T]; None: on-policy
    advantages: Tensor,  # [N] or [T]
    loss_mask: Tensor,  # [T] bool
    cu_seqlens: Tensor,  # [N + 1] int32
    token_weights: Tensor,  # [N]
    **options: Unpack[LinearPolicyLossOptions],
) -> PolicyLossOutput:
    """`linear_policy_loss` with GRPO's ratio, one per token: plan D. Default clip 0.2 / 0.2; the equation is in losses/grpo.py."""
    return linear_policy_loss(
        "grpo", hidden, weight, labels, old_log_probs, advantages, loss_mask, cu_seqlens, token_weights, **options
    )


def linear_gspo_loss(
    hidden: Tensor,  # [T, H], or [T / tp, H] with sequence_parallel
    weight: Tensor,  # [V_tp, H]
    labels: Tensor,  # [T] int64
    old_log_probs: Tensor | None,  # [T]; None: on-policy
    advantages: Tensor,  # [N], or [T] and equal inside each sample
    loss_mask: Tensor,  # [T] bool
    cu_seqlens: Tensor,  # [N + 1] int32
    token_weights: Tensor,  # [N]
    **options: Unpack[LinearPolicyLossOptions],
) -> PolicyLossOutput:
    """`linear_policy_loss` with GSPO's ratio, one per sample: plans A to C, on-policy D. Default clip 3e-4 / 4e-4."""
    return linear_policy_loss(
        "gspo", hidden, weight, labels, old_log_probs, advantages, loss_mask, cu_seqlens, token_weights, **options
    )


@dataclass(frozen=True, slots=True)
class _Plan:
    entry: PolicyLossEntry
    inputs: LossInputs
    items: list[WorkItem]
    bounds: list[int]  # N + 1
    is_free: bool  # plan D


def _plan(
    entry: PolicyLossEntry,
    inputs: LossInputs,
    settings: LossSettings,
    facts: HostFacts,
    capacity: int,
    document_lengths: Sequence[int] | None,
    *,
    keeps_log_probs: bool,
) -> _Plan:
    """Rows that take part, and their chunks. Communication: that of document_sizes, but in plan D."""
    has_row_terms = bool(settings.kl_coefficient or settings.entropy_coefficient)
    # Only of the built-in surrogate it is known that advantage 0 gives value and derivative 0.
    has_no_gradient = None if has_row_terms or entry.surrogate is not clipped_surrogate else facts.has_no_advantage
    is_live = facts.loss_mask
    if has_no_gradient is not None and not keeps_log_probs and settings.metrics == PolicyMetrics.NONE:
        is_live = is_live & ~has_no_gradient
    rows = is_live.nonzero()[:, 0]
    if entry.surrogate is not None and (entry.level == "token" or inputs.old_log_probs is None):
        return _Plan(entry, inputs, schedule_rows(rows, capacity), facts.bounds, is_free=True)
    rows_of_documents = facts.rows_of_documents(rows)
    device, cp_group = inputs.loss_mask.device, settings.cp_group
    sizes, counts = document_sizes(facts, rows_of_documents, document_lengths, inputs.token_counts, cp_group, device)
    items = schedule_documents(
        document_bins(sizes, capacity) or [()],
        rows_of_documents,
        capacity,
        has_row_terms=has_row_terms or entry.surrogate is None,
        is_idle=[has_no_gradient is not None and bool(has_no_gradient[rows].all()) for rows in rows_of_documents],
    )
    return _Plan(entry, replace(inputs, token_counts=counts), items, facts.bounds, is_free=False)


def _run(head: LinearHead, plan: _Plan, settings: LossSettings, hidden: Tensor, ready: ReadyGradient | None) -> LossParts:
    """All chunks; fills `ready` with the gradient."""
    kind = TokenCoefficients if plan.is_free else DocumentCoefficients
    coefficients = kind(plan.entry, plan.inputs, settings, plan.bounds, head)
    if ready is None:
        run_forward(head, plan.items, coefficients)
        return coefficients.finish()
    gradient = make_gradient(
        head,
        needs_hidden=hidden.requires_grad,
        needs_weight=ready.parameter.requires_grad,
        main_grad=main_grad_of(ready.parameter) if ready.is_in_main_grad else None,
        scale=ready.loss_scale,
    )
    ready.hidden = run_with_gradient(head, plan.items, coefficients, gradient)
    ready.weight = None if ready.is_in_main_grad else gradient.weight
    return coefficients.finish()


def _compare_plans(
    agreement: RankAgreement,
    hidden: Tensor,
    weight: Tensor,
    facts: HostFacts,
    document_lengths: Sequence[int] | None,
    loss_scale: Tensor | float | None,
    return_log_probs: bool,
) -> None:
    """What else decides which rows meet in a chunk, and which collectives the gradient takes."""
    gradients = (torch.is_grad_enabled() and hidden.requires_grad, torch.is_grad_enabled() and weight.requires_grad)
    agreement.add("which gradients are needed (hidden, weight)", str(gradients))
    agreement.add("whether advantages are read on the host", facts.has_no_advantage is not None)
    agreement.add("document_lengths", None if document_lengths is None else str(list(document_lengths)))
    agreement.add("loss_scale", "a tensor" if isinstance(loss_scale, Tensor) else loss_scale)
    agreement.add("return_log_probs", bool(return_log_probs))


def _ready_gradient(hidden: Tensor, weight: Tensor, loss_scale: Tensor | float | None) -> ReadyGradient:
    """Empty as yet, but checked: what backward will do with it is decided before anything is computed."""
    adds_in_forward = loss_scale is not None and weight.requires_grad and main_grad_of(weight) is not None
    check_loss_scale(loss_scale, hidden, adds_in_forward=adds_in_forward)
    return ReadyGradient(None, None, weight, adds_in_forward, loss_scale)


def _on(device: torch.device, value):
    """What the host may keep follows the hidden states; what is no tensor is left to the check that says so."""
    return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
