"""Our loss in a trainer that hands over dense rows [S, R] and the counts of the step: verl, NeMo-RL, ROLL, SkyRL.

NeMo-RL says nothing of prompts to a loss. So under prompt_mean the advantages carry the weights of the prompt groups, for sample i
(N / P) m_i / M_g, and the loss runs with sample_mean. A code in the last bits of these advantages shows the loss that they do.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_rl.config import PolicyLossConfig
from megatron_rl.count import RolloutCounts, StepTotals
from megatron_rl.declare import PolicyLoss, get_policy_loss
from megatron_rl.errors import DataError
from megatron_rl.hosts.run import ranks_in_words
from megatron_rl.layout.groups import SINGLE
from megatron_rl.losses.corrections import CorrectionSettings
from megatron_rl.losses.kl import kl_estimate
from megatron_rl.metrics.step import finalise_metrics
from megatron_rl.policy_loss import PolicyLossOutput, loss_of_log_probs
from megatron_rl.validation.advice import numbers_in_words
from megatron_rl.validation.weight_words import shift_in_words, weight_in_words
from megatron_rl.weights import get_loss_aggregation, sample_token_weights

# Our setting that says that each rollout is one row.
ONE_SAMPLE = "one_sample_per_rollout"
# A marked advantage has a code in its last bits: a relative change of at most 16 x 2^-23.
MARK_BITS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollouts:
    """several: where a rollout may come in several rows; None: a row is a rollout. ids: what names the rollout of a row, so that
    rollouts are counted; None: nothing does, and such launches are refused where an aggregation counts rollouts, unless the user
    says that each rollout has one row."""

    several: str | None = None
    ids: str | None = None


EACH_ROW = Rollouts()


def is_carried(aggregation: str) -> bool:
    """Whether advantages can carry the weights of prompts, see dense_rows.carry_prompt_weights."""
    return aggregation == "prompt_mean"


@functools.cache
def is_proportional(loss: PolicyLoss) -> bool:
    """Whether twice the advantage gives twice the loss and twice the gradient, by a trial on two samples.

    Of a loss that needs an entropy it is not known: rows have no logits, and the adapters refuse it.
    """
    if loss.needs_entropy:
        return False
    numbers = torch.linspace(-0.3, 0.3, 6, dtype=torch.float64)
    advantages = torch.tensor([0.5, 0.5, 0.5, -1.0, -1.0, -1.0], dtype=torch.float64)

    def trial(factor: float) -> Tensor:
        log_probs = (numbers - 1).requires_grad_()
        ones, bounds = torch.ones(6, dtype=torch.bool), torch.tensor([0, 3, 6], dtype=torch.int32)
        weights = torch.ones(2, dtype=torch.float64)
        old = numbers - 1 - numbers.flip(0)
        vectors: Any = dict.fromkeys(loss.inputs_needed, old)
        given = (log_probs, old, factor * advantages, ones, bounds, weights)
        output = loss_of_log_probs(loss.name, *given, tp_group=SINGLE, cp_group=SINGLE, **vectors)
        return torch.cat([torch.autograd.grad(output.loss, log_probs)[0], output.loss.detach()[None]])

    return torch.allclose(trial(2.0), 2 * trial(1.0), rtol=1e-9, atol=1e-12)


# The loss


class RowCounts(NamedTuple):
    """What weighs the rows of a micro-batch: counts of the step."""

    totals: StepTotals
    tokens: Tensor  # [S]
    prompt_tokens: Tensor | None  # [S]
    rollouts: RolloutCounts | None  # [S] each; None: a row is a rollout


def loss_of_rows(
    config: PolicyLossConfig,
    totals: StepTotals | None,  # None: the advantages have the weights in them
    log_probs: Tensor,  # [S, R] with gradient: the whole rows, on each tp and cp rank
    old_log_probs: Tensor,  # [S, R]
    advantages: Tensor,  # [S, R]
    mask: Tensor,  # [S, R] bool
    *,
    scale: int = 1,
    importance_weights: Tensor | None = None,  # [S, R]
    rollout_log_probs: Tensor | None = None,  # [S, R]
    counted: Tensor | None = None,  # [S, R] bool
    prompt_token_counts: Tensor | None = None,  # [S]
    rollouts: RolloutCounts | None = None,  # [S] each; None: a row is a rollout
) -> PolicyLossOutput:
    """scale times sum_i w_i sum_t m_it u_it l_it, w_i = 1 without totals. Masked values may be anything. Communication: none.

    counted: the tokens of the weights, where they are more than the loss's; None: the same. prompt_token_counts: the tokens
    of each sample's prompt group; None: the advantages carry prompt_mean.
    Raises DataError for unmasked values that are not finite; on CUDA this look synchronises.
    """
    num_rows, width = mask.shape
    token_counts = mask.sum(-1)
    is_in_advantages = is_carried(config.loss_aggregation) and prompt_token_counts is None
    aggregation = "sample_mean" if is_in_advantages else config.loss_aggregation
    if totals is None:
        weights = torch.ones(num_rows, device=mask.device)
    else:
        weight_counts = token_counts if counted is None else counted.sum(-1)
        divisor = config.loss_aggregation_divisor
        weights = sample_token_weights(
            aggregation,
            weight_counts,
            totals,
            prompt_token_counts=prompt_token_counts,
            divisor=divisor,
            rollout_token_counts=None if rollouts is None else rollouts.tokens,
            rows_of_rollout=None if rollouts is None else rollouts.rows,
            are_of_step=False,
        )
    output = loss_of_log_probs(
        config.policy_loss,
        log_probs.flatten(),
        old_log_probs.flatten(),
        advantages.flatten(),
        mask.flatten(),
        torch.arange(num_rows + 1, dtype=torch.int32, device=mask.device) * width,
        scale * weights,
        clip_ratio_low=config.clip_ratio_low,
        clip_ratio_high=config.clip_ratio_high,
        loss_parameters=config.loss_parameters,
        importance_weights=None if importance_weights is None else importance_weights.flatten(),
        rollout_log_probs=None if rollout_log_probs is None else rollout_log_probs.flatten(),
        correction=CorrectionSettings.of(config),
        advantages_per="token",
        token_counts=token_counts,
        metrics=config.policy_metrics,
        tp_group=SINGLE,
        cp_group=SINGLE,
    )
    refuse_nonfinite(output.num_nonfinite)
    return output


def kl_of_tokens(
    estimator: str,
    log_probs: Tensor,  # [*] with gradient
    ref_log_probs: Tensor,  # [*]
    sampled: Tensor,  # [*] of the policy that sampled
    mask: Tensor,  # [*] bool
) -> Tensor:  # [*]: the estimate of each token, with the gradient of losses/kl.py; 0 where masked
    """Masked values may be anything. Raises DataError for an unmasked estimate that is not finite; on CUDA it synchronises."""
    log_probs, ref_log_probs, sampled = (torch.where(mask, values, 0.0) for values in (log_probs, ref_log_probs, sampled))
    values = log_probs.detach()
    estimate, derivative = kl_estimate(estimator, values, ref_log_probs, values - sampled)
    found = torch.where(mask, estimate + derivative * (log_probs - values), 0.0)
    if not bool(found.isfinite().all()):
        raise DataError(f"the KL estimate {estimator} is not finite: mask the tokens whose reference log-probability is not")
    return found


def metrics_of(output: PolicyLossOutput) -> dict[str, float]:
    """By our names; empty where no token is unmasked."""
    return {} if output.metrics is None else finalise_metrics(output.metrics)


def refuse_nonfinite(num_nonfinite: Tensor) -> None:  # [N] int32 over all cp ranks
    """Raises DataError for unmasked values that are not finite, on CUDA with a synchronisation. On the CPU the loss has raised."""
    if bool((num_nonfinite > 0).any()):
        samples = torch.nonzero(num_nonfinite > 0).flatten().tolist()
        raise DataError(
            f"samples {samples} of the micro-batch have {int(num_nonfinite.sum())} unmasked tokens with a value that is not "
            "finite, in logits, log_probs, advantages or importance weights: mask them or drop the samples"
        )


def step_line(
    title: str,
    config: PolicyLossConfig,
    totals: StepTotals | None,
    regularizers: str,
    rollouts: Rollouts,
    num_data: int | None,
    token_mean_host: str,
) -> str:
    """The line of the first step: its ranks, what a token and a rollout weigh, who computes KL and entropy.

    totals: None where they are not told, as where the trainer has put all weights into the advantages. num_data: see
    ranks_in_words. token_mean_host: the title of a trainer whose default is token_mean.
    """
    has_several = rollouts.ids is not None and (totals is None or totals.num_rollouts not in (None, totals.num_samples))
    record, divisor = get_loss_aggregation(config.loss_aggregation), config.loss_aggregation_divisor
    correction = CorrectionSettings.of(config)
    known: dict[str, float | None] = {"L": divisor}
    if totals is not None:
        known |= {"N": totals.num_samples, "R": totals.num_rollouts, "P": totals.num_prompts, "T": totals.num_tokens}
    in_advantages = totals is None or (is_carried(record.name) and totals.num_prompts is None)
    parts = [title, numbers(config)]
    if correction is not None:
        low, high = correction.bounds
        parts.append(f"sampling weights {correction.kind} {low:g} to {high:g}")
    if totals is not None:
        parts.append(f"step of {totals.num_samples} samples" + f" of {totals.num_rollouts} rollouts" * has_several)
    parts += [
        f"on {ranks_in_words(num_data=num_data)}",
        f"weight of a token {weight_in_words(record, known, with_rollouts=has_several)}" + ", in the advantages" * in_advantages,
        f"a rollout is the rows of one {rollouts.ids}" if has_several else "a row is a whole rollout",
        f"weights {shift_in_words(record, divisor, token_mean_host)}",
        regularizers,
    ]
    return " | ".join(parts)


def numbers(config: PolicyLossConfig) -> str:
    """Clip and parameters in words, and whose clip it is."""
    own = [side for side in ("low", "high") if getattr(config, f"clip_ratio_{side}") is None]
    if not own or get_policy_loss(config.policy_loss).clip_ratios is None:
        return numbers_in_words(config)
    whose = "the loss's own clip" if len(own) == 2 else f"{own[0]}: the loss's own"
    return f"{numbers_in_words(config)} ({whose})"


# prompt_mean


def carry_prompt_weights(
    advantages: Tensor,  # [S, R]: the whole step
    mask: Tensor,  # [S, R], of which the loss counts all but the first column
    prompt_ids: Tensor,  # [S, ...]: the tokens of each sample's prompt, equal rows are one prompt
) -> Tensor:  # [S, R] float32, 0 where masked
    """Advantages with which sample_mean over the S samples is prompt_mean over the prompts, marked for the loss.

    P counts the prompts that have a trained token: NeMo-RL leaves samples that it drops out of N as well."""
    token_counts = mask[:, 1:].bool().sum(-1)
    _, group = torch.unique(prompt_ids.to(mask.device), dim=0, return_inverse=True)
    num_samples, num_prompts = len(token_counts), max(group[token_counts > 0].unique().numel(), 1)
    group_tokens = torch.zeros(num_samples, dtype=token_counts.dtype, device=token_counts.device).index_add(0, group, token_counts)
    totals = StepTotals(num_samples=num_samples, num_prompts=num_prompts, num_tokens=int(token_counts.sum()))
    weights = sample_token_weights("prompt_mean", token_counts, totals, prompt_token_counts=group_tokens[group])
    factors = weights * token_counts * num_samples  # (1 / (P M_g)) / (1 / (N m_i))
    return _mark(torch.where(mask.bool(), advantages.float() * factors[:, None], 0.0), token_counts, num_samples)


def _codes(token_counts: Tensor, num_samples: int) -> Tensor:  # [S] -> [S] int32 of MARK_BITS bits
    mixed = (token_counts.long() + 1) * (num_samples + 0x9E37)
    mixed = (mixed ^ (mixed >> 7)) * 0x9E3779B1 & 0xFFFFFFFF
    return (mixed >> 20 & (1 << MARK_BITS) - 1).int()


def _mark(advantages: Tensor, token_counts: Tensor, num_samples: int) -> Tensor:  # [S, R] float32, [S] -> [S, R]
    """Writes a code of the sample's tokens and the step's samples into the last bits of each advantage; 0 and denormals are 0.

    The loss recognises it. Whatever changes advantages, masks or the step after the estimator breaks it.
    """
    bits, codes = advantages.contiguous().view(torch.int32), _codes(token_counts, num_samples)[:, None]
    half, all_bits = 1 << (MARK_BITS - 1), (1 << MARK_BITS) - 1
    marked = ((bits - codes + half) & ~all_bits) | codes
    # Below the smallest normal number the code would be the value, or carry into the sign.
    is_none = advantages.abs() < torch.finfo(torch.float32).tiny
    return torch.where(is_none, 0.0, marked.view(torch.float32))


def marked_rows(
    advantages: Tensor, mask: Tensor, num_samples: int
) -> tuple[Tensor, Tensor]:  # [S] bool each: all its advantages have the code; it has an advantage that is not 0
    is_live = mask & (advantages != 0)
    if advantages.dtype != torch.float32:
        return torch.zeros_like(is_live[:, 0]), is_live.any(-1)
    found = advantages.contiguous().view(torch.int32) & (1 << MARK_BITS) - 1
    has_code = found == _codes(mask.sum(-1), num_samples)[:, None]
    return (has_code | ~is_live).all(-1) & is_live.any(-1), is_live.any(-1)
