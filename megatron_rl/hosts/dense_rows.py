"""Our loss in a trainer that hands over dense rows [S, R] and the counts of the step: verl, NeMo-RL, ROLL, SkyRL.

verl and NeMo-RL say nothing of prompts. So under prompt_mean the advantages carry the weights of the prompt groups, for sample i
(N / P) m_i / M_g, and the loss runs with sample_mean. A code in the last bits of these advantages shows the loss that they do.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_rl.aggregation import StepTotals, weigh_tokens
from megatron_rl.aggregation_record import AggregationRecord
from megatron_rl.config import CorrectionSettings, LossAggregation, PolicyLossConfig, PolicyMetrics
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.hosts.given import Given, acting_clip, not_numbers
from megatron_rl.hosts.run import Run
from megatron_rl.layout.groups import SINGLE
from megatron_rl.loss_hub import (
    PolicyLoss,
    get_loss_aggregation,
    get_policy_loss,
    is_finite_number,
    loss_aggregation_names,
    numbers_in_words,
    policy_loss_names,
)
from megatron_rl.losses import PolicyLossOutput, loss_of_log_probs
from megatron_rl.ops.ratios import kl_estimate
from megatron_rl.validation.own_loss import own_loss_problems

# A marked advantage has a code in its last bits: a relative change of at most 16 x 2^-23.
MARK_BITS = 5
# Our settings of the correction for the sampler, by the names of PolicyLossConfig.
CORRECTION_SETTINGS = (
    *("importance_correction", "importance_correction_level", "importance_correction_low", "importance_correction_high"),
    "off_policy_sequence_delta",
)


# Settings


def aggregations() -> list[AggregationRecord]:
    """Those that such a trainer has the counts for."""
    return [get_loss_aggregation(name) for name in _aggregations_of(has_counts_for)]


def has_counts_for(record: AggregationRecord) -> bool:
    return record.needs is not None and (not record.needs_prompts or is_carried(record.name))


def _aggregations_of(gives: Callable[[AggregationRecord], bool]) -> list[str]:
    return [name for name in loss_aggregation_names() if "." not in name and gives(get_loss_aggregation(name))]


def is_carried(aggregation: str) -> bool:
    """Whether the advantages carry it."""
    return aggregation == LossAggregation.PROMPT_MEAN


def read_name(setting: str, name: object, remedy: str, gives: Callable[[AggregationRecord], bool]) -> tuple[str, str]:
    """(loss, aggregation) of <loss>.<aggregation>, each a known name or module.function, which is imported here and in a worker.

    gives: whether the trainer has the counts of an aggregation. Raises ConfigError, which lists what there is and ends with the
    remedy."""
    losses, names = [loss for loss in policy_loss_names() if "." not in loss], _aggregations_of(gives)
    why = "it has one of each, as in gspo.prompt_mean"
    if isinstance(name, str) and "." in name:
        words = name.split(".")
        halves = [(".".join(words[:cut]), ".".join(words[cut:])) for cut in range(1, len(words))]
        halves.sort(key=lambda half: -((half[0] in losses) + (half[1] in names)))
        refused = None
        for loss, aggregation in halves:
            if not ((loss in losses or "." in loss) and (aggregation in names or "." in aggregation)):
                continue
            try:
                get_policy_loss(loss)
                record = get_loss_aggregation(aggregation)
            except ConfigError as error:
                refused = refused or error
                continue
            if gives(record):
                return loss, aggregation
            raise ConfigError(f"{setting}={name}: this trainer does not hand over what {aggregation} needs. {remedy}")
        if refused is not None:
            raise refused
        loss, _, aggregation = name.rpartition(".")
        unknown, known = {"loss": loss, "aggregation": aggregation}, {"loss": losses, "aggregation": names}
        why = " and ".join(f"{unknown[kind] or 'nothing'!r} is no {kind}" for kind in known if unknown[kind] not in known[kind])
    raise ConfigError(
        f"{setting}={name} does not name a loss and an aggregation: {why}. Losses: {', '.join(losses)}, or module.function. "
        f"Aggregations: {', '.join(names)}, or module.function. {remedy}"
    )


def read_config(
    title: str,  # what the launch line says of loss and aggregation
    loss_name: str,
    aggregation: str,
    clips: tuple[Given, Given],  # low, high
    parameters: Mapping[str, Given],  # by our names
    divisor: Given,
    keep: str,  # see given.acting_clip
    more_numbers: Sequence[Given] = (),  # other settings that must be numbers
    **others: Any,
) -> tuple[PolicyLossConfig, list[str]]:
    """Our settings, and every problem of them."""
    loss, record = get_policy_loss(loss_name), get_loss_aggregation(aggregation)
    switches = [*not_numbers([*clips, *parameters.values(), divisor, *more_numbers])]
    if switches:  # what else would be said is of values that nobody meant
        raise ConfigError(switches)
    (low, high), problems = acting_clip(loss, *clips, keep)
    declared = {parameter.name for parameter in loss.parameters}
    idle = [(given, "clip") for given in clips if loss.clip_ratios is None]
    idle += [(given, name) for name, given in parameters.items() if name not in declared]
    problems += [
        f"{given.name}={given.value} has no effect: {loss.name} has no {what}; remove it" for given, what in idle if given.is_chosen
    ]
    if not record.takes_divisor:
        if divisor.is_chosen:
            problems.append(f"{divisor.name}={divisor.value} has no effect: {aggregation} has no divisor; remove it")
    elif divisor.value is None:
        problems.append(f"{title} needs its L: set {divisor.name}, for Dr. GRPO the longest response in tokens")
    elif not (is_finite_number(divisor.value) and divisor.value > 0):
        problems.append(f"{divisor.name}={divisor.value!r} must be a number above 0: it is the L of {title}")
    values = {name: given.value for name, given in parameters.items() if name in declared and given.value is not None}
    try:
        loss.clip_bounds(low, high)
        loss.resolve_parameters(values)
    except ConfigError as error:
        problems += error.problems
    config = PolicyLossConfig(
        policy_loss=loss_name,
        loss_aggregation=aggregation,
        loss_aggregation_divisor=divisor.value if record.takes_divisor else None,
        clip_ratio_low=low,
        clip_ratio_high=high,
        loss_parameters=values,
        policy_metrics=PolicyMetrics.BASIC,
        **others,
    )
    return config, [*problems, *own_loss_problems(config)]


@functools.cache
def is_proportional(loss: PolicyLoss) -> bool:
    """Whether twice the advantage gives twice the loss and twice the gradient, by a trial on two samples."""
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


def signature_problem(
    name: str, function: Callable[..., Any], expected: tuple[str, ...], *, takes_more: bool = False
) -> str | None:
    """What differs from the arguments that our loss is written for. takes_more: others may follow."""
    found = tuple(inspect.signature(function).parameters)
    if found == expected or (takes_more and found[: len(expected)] == expected):
        return None
    return f"{name} takes ({', '.join(found)}), and ({', '.join(expected)}) was probed"


# The loss


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
) -> PolicyLossOutput:
    """scale times sum_i w_i sum_t m_it u_it l_it, w_i = 1 without totals. Masked values may be anything. Communication: none.

    counted: the tokens of the weights, where they are more than those of the loss; None: the same.
    Raises DataError for unmasked values that are not finite; on CUDA this look synchronises.
    """
    num_rows, width = mask.shape
    token_counts, correction = mask.sum(-1), CorrectionSettings.of(config)
    aggregation = LossAggregation.SAMPLE_MEAN.value if is_carried(config.loss_aggregation) else config.loss_aggregation
    if totals is None:
        weights = torch.ones(num_rows, device=mask.device)
    else:
        of_weights = token_counts if counted is None else counted.sum(-1)
        weights = weigh_tokens(aggregation, of_weights, totals, divisor=config.loss_aggregation_divisor)
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
        correction=correction if correction.is_on else None,
        advantages_per="token",
        token_counts=token_counts,
        metrics=config.policy_metrics,
        tp_group=SINGLE,
        cp_group=SINGLE,
    )
    refuse_nonfinite(output)
    return output


def kl_of_tokens(
    estimator: str,
    log_probs: Tensor,  # [*] with gradient
    ref_log_probs: Tensor,  # [*]
    sampled: Tensor,  # [*] of the policy that sampled
) -> Tensor:  # [*]: the estimate of each token, with the gradient of ops/ratios.py
    values = log_probs.detach()
    estimate, derivative = kl_estimate(estimator, values, ref_log_probs, values - sampled)
    return estimate + derivative * (log_probs - values)


def refuse_nonfinite(output: PolicyLossOutput) -> None:
    """Raises DataError for unmasked values that are not finite, on CUDA, with a synchronisation. On the CPU the loss has raised."""
    if output.num_nonfinite.is_cuda and bool((output.num_nonfinite > 0).any()):
        samples = torch.nonzero(output.num_nonfinite > 0).flatten().tolist()
        raise DataError(
            f"samples {samples} of the micro-batch have {int(output.num_nonfinite.sum())} unmasked tokens with a value that is not "
            "finite, in log-probabilities, advantages or importance weights: mask them or drop the samples"
        )


_OLD = Run()  # of the doors that are not yet tables


def sample_in_words(aggregation: str, several: str | None) -> str:
    """What a rollout weighs that comes in k rows. several: where it does; None: a row is a rollout, with all its turns."""
    formula = get_loss_aggregation(aggregation).formula
    if several is None:
        return "a sample is a row, and a row is a whole rollout"
    if formula is None:
        return f"a sample is a row; a rollout may come in several ({several})"
    if "m_i" in formula.powers:
        return f"N counts rows: a rollout that comes in k rows ({several}) weighs k times"
    if "N" in formula.powers:
        return f"N counts rows: a rollout that comes in k rows ({several}) counts k times in N, and its tokens weigh as in one"
    return f"a rollout that comes in k rows ({several}) weighs as in one"


def step_line(
    title: str, config: PolicyLossConfig, totals: StepTotals | None, regularizers: str, *, several: str | None = None
) -> str:
    """The line of the first step: what a token and a rollout weigh, and who computes KL and entropy. A `Run` tells it once.

    totals: None where the trainer has put all weights into the advantages. several: as in sample_in_words."""
    record, divisor = get_loss_aggregation(config.loss_aggregation), config.loss_aggregation_divisor
    correction = CorrectionSettings.of(config)
    known: dict[str, float | None] = {"L": divisor}
    if totals is not None:
        known |= {"N": totals.num_samples, "P": totals.num_prompts}
    in_advantages = totals is None or (is_carried(record.name) and totals.num_prompts is None)
    if totals is not None and record.needs is not None and "num_tokens" in record.needs:
        known["T"] = totals.num_tokens
    parts = [title, numbers(config)]
    if correction.is_on:
        low, high = correction.bounds
        parts.append(f"sampling weights {correction.kind} {low:g} to {high:g}")
    if totals is not None:
        parts.append(f"step of {totals.num_samples} samples")
    parts += [
        f"weight of a token {record.weight_in_words(known)}" + (", in the advantages" if in_advantages else ""),
        sample_in_words(config.loss_aggregation, several),
        f"learning rate against sample_mean {record.learning_rate_shift(divisor)}",
        regularizers,
    ]
    return " | ".join(parts)


def tell_once(title: str, *given: Any, **named: Any) -> None:
    _OLD.tell(title, lambda: step_line(title, *given, **named))


def warn_once(warnings: Sequence[str]) -> None:
    for text in warnings:
        _OLD.warn(text)


def numbers(config: PolicyLossConfig) -> str:
    """Clip and parameters in words, and whose clip it is."""
    own = [side for side in ("low", "high") if getattr(config, f"clip_ratio_{side}") is None]
    if not own or get_policy_loss(config.policy_loss).clip_ratios is None:
        return numbers_in_words(config)
    return f"{numbers_in_words(config)} (the loss's own clip{'' if len(own) == 2 else f', {own[0]}'})"


# prompt_mean


def carry_prompt_weights(
    advantages: Tensor,  # [S, R]: the whole step
    mask: Tensor,  # [S, R]
    token_counts: Tensor,  # [S]: the tokens that the loss will count
    group: Tensor,  # [S] int64: the number of each sample's prompt
    num_prompts: int,
) -> Tensor:  # [S, R] float32, 0 where masked
    """Advantages with which sample_mean over the S samples is prompt_mean over the prompts, marked for the loss."""
    num_samples = len(token_counts)
    of_group = torch.zeros(num_samples, dtype=token_counts.dtype, device=token_counts.device).index_add(0, group, token_counts)
    totals = StepTotals(num_samples=num_samples, num_prompts=num_prompts, num_tokens=int(token_counts.sum()))
    weights = weigh_tokens(LossAggregation.PROMPT_MEAN, token_counts, totals, prompt_token_counts=of_group[group])
    factors = weights * token_counts * num_samples  # (1 / (P M_g)) / (1 / (N m_i))
    return _mark(torch.where(mask.bool(), advantages.float() * factors[:, None], 0.0), token_counts, num_samples)


def _codes(token_counts: Tensor, num_samples: int) -> Tensor:  # [S] -> [S] int32 of MARK_BITS bits
    mixed = (token_counts.long() + 1) * (num_samples + 0x9E37)
    mixed = (mixed ^ (mixed >> 7)) * 0x9E3779B1 & 0xFFFFFFFF
    return (mixed >> 20 & (1 << MARK_BITS) - 1).int()


def _mark(advantages: Tensor, token_counts: Tensor, num_samples: int) -> Tensor:  # [S, R] float32, [S] -> [S, R]
    """Writes a code of the sample's tokens and the step's samples into the last bits of each advantage that is not 0.

    The loss recognises it. Whatever changes advantages, masks or the step after the estimator breaks it.
    """
    bits, codes = advantages.contiguous().view(torch.int32), _codes(token_counts, num_samples)[:, None]
    half, all_bits = 1 << (MARK_BITS - 1), (1 << MARK_BITS) - 1
    marked = ((bits - codes + half) & ~all_bits) | codes
    return torch.where(advantages == 0, advantages, marked.view(torch.float32))


def marked_rows(
    advantages: Tensor, mask: Tensor, num_samples: int
) -> tuple[Tensor, Tensor]:  # [S] bool each: all its advantages have the code; it has an advantage that is not 0
    is_live = mask & (advantages != 0)
    if advantages.dtype != torch.float32:
        return torch.zeros_like(is_live[:, 0]), is_live.any(-1)
    found = advantages.contiguous().view(torch.int32) & (1 << MARK_BITS) - 1
    has_code = found == _codes(mask.sum(-1), num_samples)[:, None]
    return (has_code | ~is_live).all(-1) & is_live.any(-1), is_live.any(-1)
