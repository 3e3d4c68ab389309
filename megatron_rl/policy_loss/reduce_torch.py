"""Computes a rank's part of the step's loss and its derivative from log-probabilities, in torch: specification and CPU backend.

It calls the function of the loss on copies of its inputs and checks the result; autograd gives a missing derivative. The columns
of the one reduction over cp are in inputs.py, because both twins share them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_rl.config import LOG_RATIO_BOUND, PolicyMetrics
from megatron_rl.declare import LossValue, PolicyLoss
from megatron_rl.errors import DataError
from megatron_rl.layout.groups import all_reduce_sum
from megatron_rl.layout.packing import document_sums, spread
from megatron_rl.losses.corrections import Correction
from megatron_rl.losses.kl import kl_estimate
from megatron_rl.metrics.further import SupportValues, token_statistics
from megatron_rl.metrics.policy import PolicyStatistics, TokenValues, policy_statistics
from megatron_rl.ops.ratios import bounded_exp
from megatron_rl.policy_loss.bad_data import bad_data, nonfinite_loss
from megatron_rl.policy_loss.corrected_inputs import corrected, correction_metric_sums
from megatron_rl.policy_loss.inputs import (
    DocumentSums,
    LossInputs,
    checked_tensors,
    further_inputs,
    given,
    has_bad_data,
    is_any,
    read_sums,
    sum_columns,
    vectors_of_samples,
)
from megatron_rl.policy_loss.settings import LossSettings


class LossValues(NamedTuple):
    """A LossValue with all its fields, detached."""

    value: Tensor  # [*]
    derivative: Tensor  # [*] d value / d log-probability
    is_clipped: Tensor  # [*] bool


@dataclass(frozen=True, slots=True)
class LossResult:
    """loss = policy_loss + kl_coefficient kl_loss - entropy_coefficient entropy. It shares no memory, because schedules divide it
    in place."""

    loss: Tensor  # 0-d
    policy_loss: Tensor  # 0-d
    kl_loss: Tensor | None  # 0-d
    entropy: Tensor | None  # 0-d
    coefficients: Tensor  # [T] d loss / d log_probs
    entropy_coefficients: Tensor | None  # [T] d loss / d entropy
    num_nonfinite: Tensor  # [N] int32 over all cp ranks
    metric_sums: PolicyStatistics | None
    correction: Correction | None = None


@torch.no_grad()
def reduce_loss_torch(
    loss: PolicyLoss,
    log_probs: Tensor,  # [T]
    entropy: Tensor | None,  # [T]
    inputs: LossInputs,
    settings: LossSettings,
) -> LossResult:
    """loss = sum_t w_i m_t u_t value_t + kl_coefficient sum_t v_i m_t KL_t - entropy_coefficient sum_t v_i m_t H_t.

    Importance weights u: a loss with a value for each token multiplies value and coefficient by u_t. At level "sequence" the tokens
    share the value, so the sample's weight becomes W_i = w_i sum_t m_t u_t, and each token's coefficient (W_i / m_i) derivative_i,
    without u_t.

    A correction is a factor of u_t; the KL and entropy terms have no such factor.

    Communication: one all-reduce over cp of [N, k]; none at cp size 1. k = 2 (non-finite, count), and the loss's means.
    Level "sequence" adds one column for importance weights, and two for [T] advantages, which must be equal inside a sample over
    all cp ranks. Before it the one of `corrected`. Where ranks are checked, one all-gather of 4 KiB over tp and cp.
    Raises, on the CPU, after the all-reduce and so on all tp and cp ranks: DataError for non-finite unmasked tokens and for
    advantages that vary inside a sample. On CUDA num_nonfinite counts them, without a synchronisation.
    """
    is_sequence, dtype = loss.level == "sequence", log_probs.dtype
    if loss.needs_entropy or inputs.sampling_support is not None:
        inputs = replace(inputs, entropy=entropy)
    if inputs.correction is not None:
        inputs = corrected(inputs, log_probs, settings.cp_group)
    tensors = checked_tensors(loss, log_probs, inputs, settings.kl_coefficient)
    old_log_probs, token_advantages = tensors["old_log_probs"], tensors["advantages"]
    vectors = further_inputs(loss, inputs, dtype)
    results: dict[str, Tensor] = {}
    if not loss.reads_means:
        # Before the reduction, which tells the other cp ranks about non-finite values.
        with settings.agreement() as agreement:
            tokens = evaluate(loss, log_probs - old_log_probs, token_advantages, log_probs, settings.keywords, vectors)
            if agreement.is_active:  # tp ranks have no reduction that tells them
                is_bad = nonfinite_values(tokens, inputs.loss_mask & are_finite(tensors))
                if is_any(is_bad):
                    raise nonfinite_loss(loss, is_bad, log_probs - old_log_probs, token_advantages)
        results = {f"value of {loss.name}": tokens.value, f"derivative of {loss.name}": tokens.derivative}
    kl = None
    if settings.kl_estimator is not None:
        kl = kl_estimate(settings.kl_estimator, log_probs, tensors["ref_log_probs"], log_probs - old_log_probs)
        name = f"KL estimator {settings.kl_estimator.name}"
        results |= {f"value of {name}": kl[0], f"derivative of {name}": kl[1]}
    sums = read_sums(loss, _sum_documents(loss, tensors | results, inputs, settings), inputs, dtype)
    if has_bad_data(sums):
        raise bad_data(loss, sums, log_probs, inputs, settings.kl_coefficient, results)
    advantages, token_advantages = _advantages(loss, inputs, sums, token_advantages)
    value_weights, coefficient_weights = _weights(is_sequence, inputs, sums, dtype)
    num_nonfinite = sums.num_nonfinite
    if is_sequence:
        tokens, num_bad = _sequence_values(loss, log_probs - old_log_probs, advantages, token_advantages, inputs, sums, settings)
        num_nonfinite = num_nonfinite + num_bad
    elif loss.reads_means:
        tokens, num_bad = _values_by_means(loss, log_probs, old_log_probs, token_advantages, inputs, sums, settings)
        num_nonfinite = num_nonfinite + num_bad
    values, derivative = (torch.where(inputs.loss_mask, part, 0.0) for part in (tokens.value, tokens.derivative))
    policy_loss = _sum_live(value_weights * values, inputs)
    coefficients = torch.where(inputs.loss_mask, coefficient_weights * derivative, 0.0)
    kl_loss, kl_coefficients, entropy_sum, entropy_coefficients = _regularizers(kl, entropy, inputs, settings, dtype)
    total = policy_loss.clone()
    if kl_loss is not None and kl_coefficients is not None:
        total, coefficients = total + settings.kl_coefficient * kl_loss, coefficients + kl_coefficients
    if entropy_sum is not None:
        total = total - settings.entropy_coefficient * entropy_sum
    metric_sums = None
    if settings.metrics != PolicyMetrics.NONE:
        metric_sums = _metric_sums(
            is_clipped=tokens.is_clipped,
            advantages=token_advantages,
            log_probs=log_probs,
            old_log_probs=old_log_probs,
            entropy=entropy,
            loss=loss,
            inputs=inputs,
            sums=sums,
            settings=settings,
        )
        if inputs.applied_correction is not None:
            metric_sums = replace(
                metric_sums, correction=correction_metric_sums(inputs.applied_correction, token_advantages, inputs, sums.counts)
            )
        if inputs.sampling_support is not None:
            metric_sums = with_support_sums(metric_sums, log_probs, inputs, sums.counts)
    return LossResult(
        loss=total,
        policy_loss=policy_loss,
        kl_loss=kl_loss,
        entropy=entropy_sum,
        coefficients=coefficients,
        entropy_coefficients=entropy_coefficients,
        num_nonfinite=num_nonfinite.to(torch.int32),
        metric_sums=metric_sums,
        correction=inputs.applied_correction,
    )


def _metric_sums(
    *,
    is_clipped: Tensor,  # [T] bool
    advantages: Tensor,  # [T]
    log_probs: Tensor,  # [T]
    old_log_probs: Tensor,  # [T]
    entropy: Tensor | None,  # [T]
    loss: PolicyLoss,
    inputs: LossInputs,
    sums: DocumentSums,
    settings: LossSettings,
) -> PolicyStatistics:
    is_sequence = loss.level == "sequence"
    log_ratio = spread(sums.means["log_ratio"], inputs.token_documents) if is_sequence else log_probs - old_log_probs
    with_entropy = entropy if settings.metrics == PolicyMetrics.WITH_ENTROPY else None
    return policy_statistics(
        TokenValues(
            log_probs=log_probs,
            old_log_probs=old_log_probs,
            ratios=bounded_exp(log_ratio),
            is_clipped=is_clipped,
            advantages=advantages,
            entropy=with_entropy,
        ),
        loss_mask=inputs.loss_mask,
        counts=spread(sums.counts, inputs.token_documents),
        num_documents=inputs.num_documents,
        is_sequence_level=is_sequence,
        cp_rank=settings.cp_group.rank(),
    )


def with_support_sums(
    statistics: PolicyStatistics,
    log_probs: Tensor,  # [T] over the kept ids
    inputs: LossInputs,  # with sampling_support
    counts: Tensor,  # [N] unmasked tokens of each sample over all cp ranks
) -> PolicyStatistics:
    """The statistics with those of the sets."""
    assert inputs.sampling_support is not None
    values = SupportValues(log_probs, inputs.sampling_support.sizes)
    of_tokens = spread(counts, inputs.token_documents)
    return replace(statistics, support=token_statistics(values, loss_mask=inputs.loss_mask, counts=of_tokens))


def metric_sums_in_torch(
    loss: PolicyLoss,
    log_probs: Tensor,  # [T]
    entropy: Tensor | None,  # [T]
    inputs: LossInputs,
    reduced: Tensor,  # [N, k] float64, over all cp ranks
    settings: LossSettings,
) -> PolicyStatistics:
    """The metric sums beside the kernels of reduce_triton.py. The loss's function runs again for is_clipped."""
    sums = read_sums(loss, reduced, inputs, log_probs.dtype)
    tensors = checked_tensors(loss, log_probs, inputs, 0.0)
    old_log_probs = tensors["old_log_probs"]
    advantages, token_advantages = _advantages(loss, inputs, sums, tensors["advantages"])
    if loss.level == "sequence":
        tokens, _ = _sequence_values(loss, log_probs - old_log_probs, advantages, token_advantages, inputs, sums, settings)
    else:
        vectors = further_inputs(loss, inputs, log_probs.dtype)
        tokens = evaluate(loss, log_probs - old_log_probs, token_advantages, log_probs, settings.keywords, vectors)
    return _metric_sums(
        is_clipped=tokens.is_clipped,
        advantages=token_advantages,
        log_probs=log_probs,
        old_log_probs=old_log_probs,
        entropy=entropy,
        loss=loss,
        inputs=inputs,
        sums=sums,
        settings=settings,
    )


def _advantages(
    loss: PolicyLoss,
    inputs: LossInputs,
    sums: DocumentSums,
    token_advantages: Tensor,  # [T] as given, in the dtype of the loss
) -> tuple[Tensor, Tensor]:  # as the loss takes them, [T] of the tokens
    """A sequence-level loss takes one advantage per sample: the mean of its tokens' where they are given."""
    advantages = inputs.advantages.to(token_advantages.dtype)
    if loss.level == "sequence" and inputs.advantages_per == "token":
        advantages = given(sums.advantages).to(token_advantages.dtype)
        token_advantages = spread(advantages, inputs.token_documents)
    return advantages, token_advantages


def _sequence_values(
    loss: PolicyLoss,
    log_ratio: Tensor,  # [T]
    advantages: Tensor,  # [N]
    token_advantages: Tensor,  # [T]
    inputs: LossInputs,
    sums: DocumentSums,
    settings: LossSettings,
) -> tuple[LossValues, Tensor]:  # [T] each, [N] tokens with non-finite results
    """Computes each sample's values and gives them to its tokens. Communication: as settings.agreement."""
    vectors = vectors_of_samples(loss, sums, advantages.dtype)
    log_probs = sums.means.get("log_probs", sums.means["log_ratio"])  # any tensor, where the loss does not take log_probs
    with settings.agreement():
        samples = evaluate(loss, sums.means["log_ratio"], advantages, log_probs, settings.keywords, vectors)
        is_bad = nonfinite_values(samples, sums.counts > 0)
        if is_any(is_bad):
            raise nonfinite_loss(loss, is_bad, sums.means["log_ratio"], advantages)
    value, derivative, is_clipped = (spread(part, inputs.token_documents) for part in samples)
    if loss.token_clip is not None:
        is_token_clipped = _clipped_log_ratio(loss, log_ratio, token_advantages, settings) != log_ratio
        derivative = torch.where(is_token_clipped, 0.0, derivative)
        is_clipped = is_clipped | (is_token_clipped & (token_advantages != 0))
    return LossValues(value, derivative, is_clipped), torch.where(is_bad, sums.counts, 0.0)


def _clipped_log_ratio(loss: PolicyLoss, log_ratio: Tensor, advantages: Tensor, settings: LossSettings) -> Tensor:  # [T] each
    """The log-ratios whose mean a sequence-level loss gets. Communication: as settings.agreement. Raises DataError for another
    shape."""
    if loss.token_clip is None:
        return log_ratio
    with settings.agreement():
        clipped = loss.token_clip(log_ratio, advantages, **settings.keywords)
        if not isinstance(clipped, Tensor) or clipped.shape != log_ratio.shape:
            raise DataError(f"token_clip of policy loss {loss.name!r} must return [T={len(log_ratio)}], as its log_ratio")
    return clipped


def _values_by_means(
    loss: PolicyLoss,
    log_probs: Tensor,  # [T]
    old_log_probs: Tensor,  # [T]
    advantages: Tensor,  # [T]
    inputs: LossInputs,
    sums: DocumentSums,
    settings: LossSettings,
) -> tuple[LossValues, Tensor]:  # [T] each, [N] tokens with non-finite results
    """Of a token-level loss that reads its sample's mean log-ratio.

    Communication: one all-reduce of [N] over cp, so that no rank alone has bad results; and as settings.agreement.
    """
    vectors = further_inputs(loss, inputs, log_probs.dtype)
    vectors["mean_log_ratio"] = spread(sums.means["log_ratio"], inputs.token_documents)
    log_ratio = log_probs - old_log_probs
    with settings.agreement():
        tokens = evaluate(loss, log_ratio, advantages, log_probs, settings.keywords, vectors)
        is_bad = nonfinite_values(tokens, inputs.loss_mask)
        if is_any(is_bad):
            raise nonfinite_loss(loss, is_bad, log_ratio, advantages)
    return tokens, all_reduce_sum(document_sums(is_bad, inputs.cu_seqlens), settings.cp_group)


def _weights(is_sequence: bool, inputs: LossInputs, sums: DocumentSums, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The factors [T] of the tokens' values, and those [T] of their derivatives."""
    weights = spread(inputs.token_weights.to(dtype), inputs.token_documents)
    if inputs.importance_weights is None:
        return weights, weights
    value_weights = weights * inputs.importance_weights.to(dtype)
    if not is_sequence:
        return value_weights, value_weights
    mean_importance = torch.where(sums.counts > 0, given(sums.importance) / sums.counts.clamp(min=1), 0.0).to(dtype)
    return value_weights, weights * spread(mean_importance, inputs.token_documents)


def _regularizers(
    kl: tuple[Tensor, Tensor] | None,  # the estimate [T] and its derivative [T]
    entropy: Tensor | None,  # [T]
    inputs: LossInputs,
    settings: LossSettings,
    dtype: torch.dtype,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """(kl sum 0-d, its coefficients [T], entropy sum 0-d, its coefficients [T]); None for a term whose coefficient is 0."""
    kl_loss = kl_coefficients = entropy_sum = entropy_coefficients = None
    if kl is not None or settings.entropy_coefficient:
        weights = spread(given(inputs.regularizer_weights).to(dtype), inputs.token_documents)
    if kl is not None:
        value, derivative = kl
        kl_loss = _sum_live(weights * value, inputs)
        kl_coefficients = torch.where(inputs.loss_mask, settings.kl_coefficient * weights * derivative, 0.0)
    if settings.entropy_coefficient:
        entropy_sum = _sum_live(weights * given(entropy), inputs)
        entropy_coefficients = torch.where(inputs.loss_mask, -settings.entropy_coefficient * weights, 0.0)
    return kl_loss, kl_coefficients, entropy_sum, entropy_coefficients


def _sum_documents(
    loss: PolicyLoss, tensors: dict[str, Tensor], inputs: LossInputs, settings: LossSettings
) -> Tensor:  # [N, k] float64
    """Sums sum_columns over each document into one [N, k] tensor. Communication: one all-reduce of it over cp."""
    per_token = {**tensors, "num_nonfinite": ~are_finite(tensors), "counts": inputs.loss_mask}
    columns = sum_columns(loss, inputs)
    if inputs.importance_weights is not None:
        per_token["importance"] = inputs.importance_weights
    if "log_ratio" in columns:
        log_ratio = tensors["log_probs"] - tensors["old_log_probs"]
        per_token["log_ratio"] = _clipped_log_ratio(loss, log_ratio, tensors["advantages"], settings)
    if "squared_advantages" in columns:
        per_token["squared_advantages"] = tensors["advantages"].double().square()
    stacked = torch.stack([torch.where(inputs.loss_mask, per_token[name], 0).double() for name in columns], dim=-1)
    return all_reduce_sum(document_sums(stacked, inputs.cu_seqlens), settings.cp_group)


def are_finite(tensors: dict[str, Tensor]) -> Tensor:  # [T] each -> [T] bool
    return torch.stack([torch.isfinite(tensor) for tensor in tensors.values()]).all(0)


def _sum_live(values: Tensor, inputs: LossInputs) -> Tensor:  # [T] -> 0-d
    """Sums in float64, document by document: padding changes no bit, and the order of documents none that float32 can show."""
    return document_sums(torch.where(inputs.loss_mask, values, 0.0), inputs.cu_seqlens).sum().to(values.dtype)


def evaluate(
    loss: PolicyLoss,
    log_ratio: Tensor,  # [*] of tokens or samples
    advantages: Tensor,  # [*]
    log_probs: Tensor,  # [*] of tokens, or means of samples
    keywords: Mapping[str, float],  # clip and parameters
    vectors: Mapping[str, Tensor],  # [*] the further inputs that the loss declares
    *,
    prefers_autograd: bool = False,  # even where the loss gives a derivative, unless its value has no graph
) -> LossValues:
    """Calls an elementwise loss. Raises DataError for a result of another shape or dtype, and for a write into an input.

    It does not check that values are finite: the caller does, because it knows which of them count.
    """
    given = {"log_ratio": log_ratio, "advantages": advantages}
    if loss.takes_log_probs:
        given["log_probs"] = log_probs

    def call(copies: dict[str, Tensor]) -> object:
        positional = [copies.pop(name) for name in given]
        return loss.function(*positional, **copies, **keywords)

    return _checked(loss, call, given=given | dict(vectors), like=log_ratio, prefers_autograd=prefers_autograd)


def nonfinite_values(values: LossValues, is_live: Tensor) -> Tensor:  # [*] bool
    return is_live & ~(torch.isfinite(values.value) & torch.isfinite(values.derivative))


def _checked(
    loss: PolicyLoss,
    call: Callable[[dict[str, Tensor]], Any],
    *,
    given: Mapping[str, Tensor],
    like: Tensor,
    prefers_autograd: bool,
) -> LossValues:
    """The checked result of `call` on copies of `given`.

    The derivative is the sum of those by log_ratio and log_probs; autograd computes it where the loss gives none, and with
    prefers_autograd wherever it can. The derivative through log_ratio is 0 beyond its bound: autograd does not go through it
    there, and one that the loss gives is 0 there, unless the loss takes log_probs and so has another derivative.
    """
    with torch.inference_mode(False), torch.enable_grad():
        # A tensor made in inference mode cannot be differentiated; a copy made outside can.
        leaves = {name: tensor.clone() if tensor.is_inference() else tensor.detach() for name, tensor in given.items()}
        trained = [name for name in ("log_ratio", "log_probs") if name in leaves]
        leaves |= {name: leaves[name].requires_grad_() for name in trained}
        copies = {name: leaf.clone() for name, leaf in leaves.items()}
        log_ratio = leaves["log_ratio"]
        is_beyond = log_ratio.detach().abs() > LOG_RATIO_BOUND  # false for NaN, which passes through
        copies["log_ratio"] = torch.where(is_beyond, log_ratio.detach(), log_ratio)
        inputs = dict(copies)
        returned = _returned(loss, call, copies)
        for name, tensor in inputs.items():
            if tensor._version:  # torch counts the writes into a tensor, and has no public name for the count
                raise DataError(f"policy loss {loss.name!r} writes into {name}: it must leave its inputs as they are")
        result = returned if isinstance(returned, LossValue) else LossValue(returned)
        _check_shapes(loss, result, like)
        derivative = None if prefers_autograd and result.value.requires_grad else result.derivative
        if derivative is None:
            derivative = _derivative(loss, result.value, [leaves[name] for name in trained], like)
        elif not loss.takes_log_probs:
            derivative = torch.where(is_beyond, 0.0, derivative)
    is_clipped = torch.zeros_like(like, dtype=torch.bool) if result.is_clipped is None else result.is_clipped
    return LossValues(result.value.detach(), derivative.detach(), is_clipped)


def _returned(loss: PolicyLoss, call: Callable[[dict[str, Tensor]], Any], copies: dict[str, Tensor]) -> Any:
    try:
        return call(copies)
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit would end this rank without a word to the others
        raise DataError(f"policy loss {loss.name!r} raised {type(error).__name__}({error}): raise a ValueError instead") from error


def _derivative(loss: PolicyLoss, value: Tensor, leaves: list[Tensor], like: Tensor) -> Tensor:
    if not value.requires_grad:
        return torch.zeros_like(like)
    gradients = torch.autograd.grad(value.sum(), leaves, allow_unused=True)
    found = [gradient for gradient in gradients if gradient is not None]
    if not found:
        raise DataError(
            f"policy loss {loss.name!r} returned a value with a gradient of its own, and none by log_ratio or log_probs: compute "
            "it from them; a number that is trained elsewhere, such as a torch.nn.Parameter, must be detached"
        )
    return sum(found[1:], found[0])


def _check_shapes(loss: PolicyLoss, result: LossValue, like: Tensor) -> None:
    for name, tensor in (("value", result.value), ("derivative", result.derivative), ("is_clipped", result.is_clipped)):
        dtype = torch.bool if name == "is_clipped" else like.dtype
        if tensor is None and name != "value":
            continue
        wanted, found = f"{tuple(like.shape)} {dtype}", type(tensor).__name__
        if isinstance(tensor, Tensor):
            given = (tensor.shape, tensor.dtype, tensor.layout, tensor.device)
            if given == (like.shape, dtype, like.layout, like.device):
                continue
            found = f"{tuple(tensor.shape)} {tensor.dtype}"
            if (tensor.layout, tensor.device) != (like.layout, like.device):
                wanted += f" with {like.layout} on {like.device}"
                found += f" with {tensor.layout} on {tensor.device}"
        hint = "; return megatron_rl.LossValue(value, derivative, is_clipped)" if isinstance(tensor, tuple | list) else ""
        if isinstance(tensor, Tensor) and tensor.dim() == 0 and like.dim():
            hint = ", one number for each; the package weighs them and adds them up"
        raise DataError(f"policy loss {loss.name!r} returned {found} as its {name}: it must be {wanted}{hint}")
