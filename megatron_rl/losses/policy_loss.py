"""The loss functions of the front door: logits in, this rank's part of the step's loss out, with its exact gradient.

Groups are resolved here, once; what is below takes resolved groups. It must never divide by a count.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import TypedDict, Unpack

import torch
from torch import Tensor

from megatron_rl.config import DEFAULT_CLIP_RATIOS, Backend, PolicyMetrics
from megatron_rl.errors import ConfigError
from megatron_rl.layout.groups import Group, resolve_group
from megatron_rl.layout.rank_agreement import RankAgreement
from megatron_rl.loss_hub import PolicyLossEntry, get_policy_loss
from megatron_rl.losses.inputs import LossInputs, prepare_inputs
from megatron_rl.losses.parts import LossParts, LossSettings, loss_parts
from megatron_rl.metrics import PolicyStatistics
from megatron_rl.ops.autograd import first_order_only, runs_eagerly
from megatron_rl.ops.backends import resolve_backend
from megatron_rl.ops.log_probs import (
    check_log_prob_inputs,
    check_logits,
    compare_log_prob_inputs,
    log_probs_and_entropy,
    log_probs_dtype,
)


@dataclass(frozen=True, slots=True)
class PolicyLossOutput:
    """loss: 0-d, differentiable. The rest is detached; kl_loss and entropy are None at coefficient 0, metrics at "none", and
    log_probs where the fused head was told that nobody reads them."""

    loss: Tensor
    policy_loss: Tensor
    kl_loss: Tensor | None
    entropy: Tensor | None
    log_probs: Tensor | None  # [T]
    num_nonfinite: Tensor  # [N] int32
    metrics: PolicyStatistics | None


class PolicyLossOptions(TypedDict, total=False):
    """The keyword arguments of policy_loss, grpo_loss and gspo_loss; meaning and defaults stand at policy_loss."""

    clip_ratio_low: float | None
    clip_ratio_high: float | None
    temperature: float
    vocab_size: int | None
    token_counts: Tensor | None
    tp_group: Group | None
    cp_group: Group | None
    metrics: str
    inplace: bool
    backend: str
    advantages_per: str | None
    importance_weights: Tensor | None
    ref_log_probs: Tensor | None
    kl_coefficient: float
    entropy_coefficient: float
    regularizer_weights: Tensor | None
    check_ranks: bool | None


@runs_eagerly
def policy_loss(
    name: str,
    logits: Tensor,  # [T, V_tp]
    labels: Tensor,  # [T] int64
    old_log_probs: Tensor | None,  # [T]; None: on-policy
    advantages: Tensor,  # [N] or [T]
    loss_mask: Tensor,  # [T] bool
    cu_seqlens: Tensor,  # [N + 1] int32
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
    inplace: bool = False,
    backend: str = Backend.AUTO,
    advantages_per: str | None = None,
    importance_weights: Tensor | None = None,  # [T]
    ref_log_probs: Tensor | None = None,  # [T]
    kl_coefficient: float = 0.0,
    entropy_coefficient: float = 0.0,
    regularizer_weights: Tensor | None = None,  # [N] from aggregation.regularizer_weights
    check_ranks: bool | None = None,
) -> PolicyLossOutput:
    """Any registered policy loss. `loss` is this rank's part of the step's

        L + kl_coefficient sum_i v_i sum_t m_it k3_it - entropy_coefficient sum_i v_i sum_t m_it H_it,    v = regularizer_weights

    The parts add up to it over micro-batches, cp and dp ranks (never over tp, whose ranks hold the same number). Backward gives
    this rank's slice of the gradient of the sum over cp; every cp rank must apply the same factor to it.
    T counts this rank's tokens: slices of the documents in order, empty ones allowed, padding past cu_seqlens[-1]. labels[t] is
    the token whose probability logits[t] gives: the caller has shifted. Clip distances None: the loss's default.
    [N] tensors follow the logits from the host without a wait; a CUDA graph needs all of them on its device.
    Masked tokens may hold anything. A registered loss without a surrogate reduces over cp on its own, beside our one all-reduce.
    Unless its surrogate is the built-in one, its [T] numbers are computed in torch on the logits' device, whatever the backend.
    check_ranks: whether tp and cp ranks compare what they were given first, so that a difference, or an error of one rank, raises
    on all of them; it waits for a device. None: where they communicate through the CPU.
    torch.compile does not trace this function (a graph break); create_graph=True raises in backward.

    Communication: tp one all-gather of [T, 3 or 4]; cp one all-reduce of [N, k]; with check_ranks one all-gather of 4 KiB over
    each; backward none. None of them at size 1.
    Raises: DataError for shapes, for `advantages` that fit both [N] and [T], for token_counts that are not the mask's, for what a
    registered loss returns if it is no value; on the CPU for unmasked non-finite values; ConfigError for settings.
    """
    tp_group, cp_group = resolve_group(tp_group, "tp"), resolve_group(cp_group, "cp")
    with RankAgreement(tp_group, cp_group, check_ranks=check_ranks) as agreement:
        entry = get_policy_loss(name)
        resolved = resolve_backend(backend, check_logits(logits))
        settings = loss_settings(
            entry, clip_ratio_low, clip_ratio_high, kl_coefficient, entropy_coefficient, metrics, cp_group, resolved
        )
        check_regularizers(settings, ref_log_probs, regularizer_weights)
        inputs = prepare_inputs(
            logits.shape[0],
            logits.device,
            log_probs_dtype(logits),
            old_log_probs,
            advantages,
            loss_mask,
            cu_seqlens,
            token_weights,
            token_counts=token_counts,
            advantages_per=advantages_per,
            importance_weights=importance_weights,
            ref_log_probs=ref_log_probs,
            regularizer_weights=regularizer_weights,
            ranks_must_agree=entry.level == "sequence" and cp_group.size() > 1,
        )
        shard = check_log_prob_inputs(logits, labels, inputs.loss_mask, temperature, vocab_size, tp_group, inplace=inplace)
        compare_log_prob_inputs(agreement, logits, labels, inputs.loss_mask, temperature, vocab_size)
        compare_inputs(agreement, entry, inputs, settings)
    log_probs, entropy = log_probs_and_entropy(
        logits,
        labels,
        inputs.loss_mask,
        shard,
        tp_group=tp_group,
        with_entropy=needs_entropy(settings),
        inplace=inplace,
        backend=resolved,
    )
    parts = loss_parts(entry, log_probs.detach(), None if entropy is None else entropy.detach(), inputs, settings)
    return PolicyLossOutput(
        loss=_WithGradient.apply(log_probs, entropy, parts),
        policy_loss=parts.policy_loss,
        kl_loss=parts.kl_loss,
        entropy=parts.entropy,
        log_probs=log_probs.detach(),
        num_nonfinite=parts.num_nonfinite,
        metrics=parts.statistics,
    )


def grpo_loss(
    logits: Tensor,  # [T, V_tp]
    labels: Tensor,  # [T] int64
    old_log_probs: Tensor | None,  # [T]; None: on-policy
    advantages: Tensor,  # [N] or [T]
    loss_mask: Tensor,  # [T] bool
    cu_seqlens: Tensor,  # [N + 1] int32
    token_weights: Tensor,  # [N]
    **options: Unpack[PolicyLossOptions],
) -> PolicyLossOutput:
    """`policy_loss` with GRPO's ratio, one per token; default clip 0.2 / 0.2. The equation is in losses/grpo.py."""
    return policy_loss("grpo", logits, labels, old_log_probs, advantages, loss_mask, cu_seqlens, token_weights, **options)


def gspo_loss(
    logits: Tensor,  # [T, V_tp]
    labels: Tensor,  # [T] int64
    old_log_probs: Tensor | None,  # [T]; None: on-policy
    advantages: Tensor,  # [N], or [T] and equal inside each sample
    loss_mask: Tensor,  # [T] bool
    cu_seqlens: Tensor,  # [N + 1] int32
    token_weights: Tensor,  # [N]
    **options: Unpack[PolicyLossOptions],
) -> PolicyLossOutput:
    """`policy_loss` with GSPO's ratio, one per sample; default clip 3e-4 / 4e-4. The equation is in losses/gspo.py."""
    return policy_loss("gspo", logits, labels, old_log_probs, advantages, loss_mask, cu_seqlens, token_weights, **options)


def needs_entropy(settings: LossSettings) -> bool:
    """The entropy costs a pass over the row: only where a coefficient or a metric asks for it."""
    return settings.entropy_coefficient != 0 or settings.metrics == PolicyMetrics.WITH_ENTROPY


class _WithGradient(torch.autograd.Function):
    """The loss's value with the analytic derivative attached: backward is at most two multiplications and no collective."""

    @staticmethod
    def forward(ctx, log_probs: Tensor, entropy: Tensor | None, parts: LossParts) -> Tensor:
        ctx.save_for_backward(parts.coefficients, parts.entropy_coefficients)
        return parts.loss

    @staticmethod
    @first_order_only
    def backward(ctx, upstream: Tensor):
        coefficients, entropy_coefficients = ctx.saved_tensors
        return (
            upstream * coefficients,
            None if entropy_coefficients is None else upstream * entropy_coefficients,
            None,
        )


def loss_settings(
    entry: PolicyLossEntry, low, high, kl_coefficient, entropy_coefficient, metrics, cp_group: Group, backend: Backend
) -> LossSettings:
    default_low, default_high = DEFAULT_CLIP_RATIOS.get(entry.name, DEFAULT_CLIP_RATIOS["grpo"])
    low = _number("clip_ratio_low", default_low if low is None else low)
    high = _number("clip_ratio_high", default_high if high is None else high)
    if not 0 <= low < 1:
        raise ConfigError(f"clip_ratio_low={low} must be in [0, 1): it is a distance below 1")
    if not 0 <= high < float("inf"):
        raise ConfigError(f"clip_ratio_high={high} must be a finite number of at least 0: it is a distance above 1")
    coefficients = {"kl_coefficient": kl_coefficient, "entropy_coefficient": entropy_coefficient}
    for name, value in coefficients.items():
        coefficients[name] = _number(name, value)
        if not 0 <= coefficients[name] < float("inf"):
            raise ConfigError(f"{name}={value} must be a finite number of at least 0; 0 turns the term off")
    if not isinstance(metrics, str) or metrics not in set(PolicyMetrics):
        raise ConfigError(f"metrics={metrics!r} is not one of {', '.join(PolicyMetrics)}")
    return LossSettings(low, high, **coefficients, metrics=metrics, cp_group=cp_group, backend=backend)


def _number(name: str, value: object) -> float:
    """A Python float that float32 holds, which the loss computes in: inf beyond it. ConfigError for what is no number."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ConfigError(f"{name}={value!r} must be a number")
    return float(value) if abs(value) <= torch.finfo(torch.float32).max or value != value else math.copysign(math.inf, value)


def compare_inputs(agreement: RankAgreement, entry: PolicyLossEntry, inputs: LossInputs, settings: LossSettings) -> None:
    """What must be equal on ranks that compute one loss: all of it over tp; over cp, where tokens are others, all of [N]."""
    if not agreement.is_active:
        return
    agreement.add("policy loss", entry.name)
    for name in ("clip_ratio_low", "clip_ratio_high", "kl_coefficient", "entropy_coefficient", "metrics", "backend"):
        agreement.add(name, getattr(settings, name))
    agreement.add("number of documents", inputs.num_documents)
    agreement.add("cu_seqlens", inputs.cu_seqlens, is_sliced=True)
    agreement.add("advantages_per", inputs.advantages_per)
    for name in ("old_log_probs", "importance_weights", "ref_log_probs"):
        agreement.add(name, _live(getattr(inputs, name), inputs.loss_mask), is_sliced=True)
    if inputs.advantages_per == "token":
        agreement.add("advantages", _live(inputs.advantages, inputs.loss_mask), is_sliced=True)
    else:
        agreement.add("advantages", inputs.advantages)
    for name in ("token_weights", "token_counts", "regularizer_weights"):
        agreement.add(name, getattr(inputs, name))


def _live(values: Tensor | None, loss_mask: Tensor) -> Tensor | None:
    """Masked tokens may hold anything: 0."""
    return None if values is None else torch.where(loss_mask, values, 0)


def check_regularizers(settings: LossSettings, ref_log_probs: Tensor | None, regularizer_weights: Tensor | None) -> None:
    if settings.kl_coefficient and ref_log_probs is None:
        raise ConfigError(f"kl_coefficient={settings.kl_coefficient} needs ref_log_probs [T]; pass them or set it to 0")
    if (settings.kl_coefficient or settings.entropy_coefficient) and regularizer_weights is None:
        raise ConfigError(
            "kl_coefficient and entropy_coefficient need regularizer_weights [N]: pass "
            "aggregation.regularizer_weights(token_counts, totals), the sample_mean weights of the step"
        )
