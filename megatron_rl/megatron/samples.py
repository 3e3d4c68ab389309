"""Gives each whole sample its weight in the step, before micro-batches and context-parallel slices are made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from megatron_rl.config import FIELDS_OF_TEACHER, Distillation, PolicyLossConfig, PolicyMetrics, RouterAuxLoss
from megatron_rl.count import StepTotals, count_step
from megatron_rl.layout.groups import ParallelGroups, all_reduce_sum, group_device
from megatron_rl.layout.sampling_support import SamplingSupport
from megatron_rl.losses.corrections import needs_rollout_log_probs
from megatron_rl.weights import regularizer_weights, sample_token_weights

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

# What a sample may have of a teacher.
TEACHER_FIELDS = tuple(name for names in FIELDS_OF_TEACHER.values() for name in names)


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicySample:
    """One whole sample, as CPU tensors, with its weights in the step."""

    tokens: Tensor  # [L] int64, prompt and response
    loss_mask: Tensor  # [R] bool or 0/1, one a response token
    advantage: float
    token_weight: float  # from sample_token_weights
    token_count: int  # unmasked tokens, from count_step
    regularizer_weight: float = 0.0  # from regularizer_weights; used by the KL and entropy terms
    old_log_probs: Tensor | None = None  # [R]; None: on-policy
    ref_log_probs: Tensor | None = None  # [R]; needed with a KL coefficient
    rollout_log_probs: Tensor | None = None  # [R] from the sampling engine; for metrics, corrections and losses that need them
    policy_version: int | None = None  # of the policy that sampled; only for metrics
    routes: Tensor | None = None  # [num_moe_layers, L - 1, topk] ids of the experts that each token but the last goes to
    kept_ids: SamplingSupport | None = None  # R rows, what the sampler drew each response token from; None: the whole vocabulary
    kept_mass: Tensor | None = None  # [R] what these ids had of the sampler's softmax; only for metrics
    importance_weights: Tensor | None = None  # [R] factors of the policy term; None: 1
    teacher_log_probs: Tensor | None = None  # [R] of the response tokens; for --distillation sampled
    teacher_topk_ids: Tensor | None = None  # [R, K] int64; for --distillation topk
    teacher_topk_log_probs: Tensor | None = None  # [R, K]

    @property
    def response_length(self) -> int:
        return self.loss_mask.shape[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSample:
    """A sample from a rollout as plain numbers, R of them a response: any rank and any other framework can take it."""

    tokens: list[int]  # prompt and response
    loss_mask: list[int]  # [R]
    prompt_id: int | str
    advantage: float
    old_log_probs: list[float] | None = None  # [R]
    ref_log_probs: list[float] | None = None  # [R]
    rollout_log_probs: list[float] | None = None  # [R]
    policy_version: int | None = None
    routes: list[list[list[int]]] | None = None  # [num_moe_layers][tokens - 1][topk], of experts
    kept_ids: list[list[int]] | None = None  # a set for each response token
    kept_mass: list[float] | None = None  # [R]
    teacher_log_probs: list[float] | None = None  # [R]
    teacher_topk_ids: list[list[int]] | None = None  # [R][K]
    teacher_topk_log_probs: list[list[float]] | None = None  # [R][K]
    rollout_id: int | str | None = None  # equal for the samples of one rollout, of the whole step; None: it is a rollout


# Any trainer's object with the fields of a StepSample: lists, or CPU tensors, which are not copied.
UnweightedSample = Any


def weigh_samples(
    config: PolicyLossConfig, samples: Sequence[UnweightedSample], groups: ParallelGroups
) -> tuple[list[PolicySample], StepTotals]:
    """This data-parallel rank's samples of a whole step, each with its weight from the counts of the whole step.

    Every dp rank calls it, also one without samples. All samples of a step have a rollout_id, or none has.
    Communication: the two exchanges of count_step over dp.
    Raises what count_step and sample_token_weights raise; EmptyStep for a step without an unmasked token.
    """
    masks = [torch.as_tensor(sample.loss_mask) for sample in samples]  # not converted: count_step refuses values other than 0 and 1
    totals, counts, prompt_counts, rollouts = count_step(
        masks,
        [sample.prompt_id for sample in samples],
        groups.dp,
        samples_per_prompt=config.samples_per_prompt,
        allow_partial_prompt_groups=config.allow_partial_prompt_groups,
        rollout_ids=rollout_ids_of(samples),
    )
    weights = sample_token_weights(
        config.loss_aggregation,
        counts,
        totals,
        prompt_token_counts=prompt_counts,
        divisor=config.loss_aggregation_divisor,
        rollout_token_counts=None if rollouts is None else rollouts.tokens,
        rows_of_rollout=None if rollouts is None else rollouts.rows,
    )
    regularizers = regularizer_weights(counts, totals, None if rollouts is None else rollouts.tokens)
    rows = zip(samples, masks, weights.tolist(), counts.tolist(), regularizers.tolist(), strict=True)
    has_metrics = config.policy_metrics != PolicyMetrics.NONE
    has_sampler = has_metrics or needs_rollout_log_probs(config)

    def values(row: Sequence[Any] | Tensor | None) -> Tensor | None:
        return None if row is None else torch.as_tensor(row)

    return [
        PolicySample(
            tokens=torch.as_tensor(sample.tokens),
            loss_mask=mask,
            advantage=sample.advantage,
            token_weight=weight,
            token_count=count,
            regularizer_weight=regularizer,
            old_log_probs=values(sample.old_log_probs),
            ref_log_probs=values(sample.ref_log_probs),
            rollout_log_probs=values(sample.rollout_log_probs) if has_sampler else None,
            policy_version=sample.policy_version if has_metrics else None,
            routes=values(sample.routes),
            kept_ids=sets_of(sample),
            kept_mass=values(sample.kept_mass) if has_metrics else None,
            **{name: values(getattr(sample, name)) for name in TEACHER_FIELDS},
        )
        for sample, mask, weight, count, regularizer in rows
    ], totals


def teacher_problem(config: PolicyLossConfig, given: object) -> str | None:
    """Why --distillation cannot be done with what samples, or a batch of them, have of a teacher."""
    missing = [name for name in FIELDS_OF_TEACHER[config.distillation] if getattr(given, name) is None]
    if missing:
        return (
            f"no {' and no '.join(missing)}, which --distillation {config.distillation} needs: record the teacher's, or remove the "
            "flag"
        )
    found = [name for name in TEACHER_FIELDS if getattr(given, name) is not None]
    if found and config.distillation == Distillation.NONE:
        return f"{' and '.join(found)} without --distillation, which would train nothing: add it, or leave them out"
    return None


def rollout_ids_of(samples: Sequence[UnweightedSample]) -> list[int | str] | None:
    """For count_step: None where no sample has one. Where some have one, count_step refuses a None among them on all ranks."""
    ids = [sample.rollout_id for sample in samples]
    has_none = bool(ids) and all(one is None for one in ids)
    return None if has_none else cast(list[int | str], ids)


def unweighted(sample: UnweightedSample, has_routes: bool = False) -> PolicySample:
    """The sample for a forward that only measures: every response token counts, so that masked tokens are measured too. With sets
    of kept ids those count that are in their set."""
    tokens, length, sets = torch.as_tensor(sample.tokens), len(sample.loss_mask), sets_of(sample)
    return PolicySample(
        tokens=tokens,
        loss_mask=torch.ones(length, dtype=torch.bool) if sets is None else sets.have(tokens[-length:]),
        advantage=0.0,
        token_weight=0.0,
        token_count=length,
        routes=torch.as_tensor(sample.routes) if has_routes and sample.routes is not None else None,
        kept_ids=sets,
    )


def sets_of(sample: UnweightedSample) -> SamplingSupport | None:
    kept = sample.kept_ids
    return kept if kept is None or isinstance(kept, SamplingSupport) else SamplingSupport.from_lists(kept)


def count_routed_tokens(config: PolicyLossConfig, samples: Sequence[UnweightedSample], groups: ParallelGroups) -> int | None:
    """The tokens of the step's samples on all dp ranks, prompts too; None where no loss of a router needs them.

    Communication: one all-reduce of one number over dp under --router-aux-loss exact.
    """
    if config.router_aux_loss != RouterAuxLoss.EXACT:
        return None
    count = torch.tensor([sum(len(sample.tokens) for sample in samples)], device=group_device(groups.dp))
    return int(all_reduce_sum(count, groups.dp))


def trained_mtp_layers(config: TransformerConfig) -> int:
    """The layers of multi-token prediction that are trained: 0 without one, and where their loss has the factor 0."""
    return int(config.mtp_num_layers or 0) if config.mtp_loss_scaling_factor else 0


def count_further_tokens(
    config: TransformerConfig, samples: Sequence[UnweightedSample], groups: ParallelGroups
) -> tuple[int, ...] | None:
    """For each trained layer k of multi-token prediction the unmasked response tokens of all dp ranks that it predicts, those with
    more than k tokens of their sample before them; None for a model without one. config: the model's.

    Every dp rank calls it. Communication: one all-reduce of a number a layer over dp.
    """
    num_layers = trained_mtp_layers(config)
    if not num_layers:
        return None
    counts = [0] * num_layers
    for sample in samples:
        mask = torch.as_tensor(sample.loss_mask)
        prompt_length = len(sample.tokens) - len(mask)
        for k in range(1, num_layers + 1):
            counts[k - 1] += int(mask[max(0, k + 1 - prompt_length) :].sum())
    totals = all_reduce_sum(torch.tensor(counts, device=group_device(groups.dp)), groups.dp)
    return tuple(totals.tolist())


def expert_layers(config: TransformerConfig) -> list[int]:
    """The global numbers, from 1, of the layers with experts. A sample's routes are in this order."""
    frequency = config.moe_layer_freq
    pattern = [number % frequency == 0 for number in range(config.num_layers)] if isinstance(frequency, int) else frequency
    return [number for number, has_experts in enumerate(pattern, 1) if has_experts]
