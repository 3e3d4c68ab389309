"""The hosts' own metric names, with the hosts' divisor, from what the loss has computed anyway; never part of the gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.config import PolicyMetrics
from megatron_rl.hosts.facts import Host
from megatron_rl.hosts.host_batch import HostBatch
from megatron_rl.hosts.loss_plan import LossPlan
from megatron_rl.layout.collectives import all_reduce_sum
from megatron_rl.layout.groups import Group
from megatron_rl.layout.packing import document_ids, document_sums, spread
from megatron_rl.loss_hub import clip_of, get_policy_loss
from megatron_rl.losses import PolicyLossOutput
from megatron_rl.losses.document_stats import mean as mean_of_documents
from megatron_rl.ops.ratios import bounded_exp, k3_estimate


@dataclass(frozen=True, slots=True)
class MetricInputs:
    """What the loss was computed from, beside the batch."""

    old_log_probs: Tensor  # [T]
    weights: Tensor  # [N] the hosts' weight of a token: 1 / M_roll, per token 1
    entropy: Tensor | None  # 0-d, weighted and summed; None: the host does not compute it
    importance_ratio: Tensor | None  # [T] exp(trained with - sampled with) before the clamp; None: no TIS
    importance_weights: Tensor | None  # [T] after it


@torch.no_grad()
def host_metrics(
    plan: LossPlan, batch: HostBatch, output: PolicyLossOutput, inputs: MetricInputs, cp_group: Group
) -> dict[str, Tensor]:  # name -> 0-d float32
    """This rank's share of each metric: the host sums over micro-batches, dp and cp and divides by the step's rollouts (tokens).

    Keys and their order depend on the settings and on which lists the batch has, never on a mask. --policy-metrics none keeps
    the parts of the loss alone. Exponents are bounded to +-20, so that one token cannot make a mean infinite.
    Communication: at cp size above 1 one all-reduce of [N, k <= 2] for what is not a sum over tokens (a sample's mean log-ratio,
    miles' ess_ratio); none with --policy-metrics none.
    """
    documents = document_ids(batch.cu_seqlens, batch.labels.numel())
    weights = spread(inputs.weights.double(), documents)

    def mean(values: Tensor) -> Tensor:  # [T] -> 0-d
        return torch.where(batch.loss_mask, values.double() * weights, 0.0).sum()

    log_probs, old_log_probs = output.log_probs, inputs.old_log_probs
    is_basic = plan.config.policy_metrics != PolicyMetrics.NONE
    metrics = {"loss": output.loss.detach(), "pg_loss": output.policy_loss}
    metrics["entropy_loss"] = torch.zeros_like(output.policy_loss) if inputs.entropy is None else inputs.entropy
    if is_basic:
        log_ratio, effective_samples = _log_ratio(plan, batch, log_probs - old_log_probs, documents, cp_group)
        metrics["pg_clipfrac"] = mean(_is_clipped(plan, log_ratio, batch.per_token["advantages"]))
        metrics["ppo_kl"] = mean(-log_ratio)
        if effective_samples is not None:
            metrics["ess_ratio"] = effective_samples
        metrics.update(_rollout_metrics(plan, batch, log_probs, old_log_probs, mean))
    if plan.kl_is_reported and (is_basic or output.kl_loss is not None):
        kl_loss = output.kl_loss
        if kl_loss is None:
            kl_loss = mean(k3_estimate(log_probs, batch.per_token["ref_log_probs"])[0])
        metrics["kl_loss"] = kl_loss
    if is_basic and inputs.importance_ratio is not None:
        metrics["ois"] = mean(bounded_exp(log_ratio))
        metrics["tis"] = mean(inputs.importance_ratio)
        metrics["tis_clipfrac"] = mean(inputs.importance_weights != inputs.importance_ratio)
        metrics["tis_abs"] = mean((inputs.importance_ratio - 1.0).abs())
    if is_basic and "opd_reverse_kl" in batch.per_token:
        metrics["opd_reverse_kl"] = mean(batch.per_token["opd_reverse_kl"])
    return {name: value.to(torch.float32).clone() for name, value in metrics.items()}


def _log_ratio(
    plan: LossPlan, batch: HostBatch, log_ratio: Tensor, documents: Tensor, cp_group: Group
) -> tuple[Tensor, Tensor | None]:  # [T] a token's, or its sample's mean; 0-d ess_ratio, None where the host has none
    is_sequence = get_policy_loss(plan.config.policy_loss).level == "sequence"
    is_miles, is_first = plan.view.host == Host.MILES, cp_group.rank() == 0
    if is_sequence:
        sums = all_reduce_sum(document_sums(torch.where(batch.loss_mask, log_ratio, 0.0), batch.cu_seqlens), cp_group)
        log_ratio = spread(mean_of_documents(sums, batch.token_counts, log_ratio.dtype), documents)
        effective = (batch.token_counts > 0).double()  # one ratio a sample: none weighs more than another
    elif is_miles:
        ratios = torch.where(batch.loss_mask, bounded_exp(log_ratio), 0.0).double()
        sums = all_reduce_sum(document_sums(torch.stack([ratios, ratios.square()], dim=-1), batch.cu_seqlens), cp_group)
        has_tokens = batch.token_counts > 0
        divisor = torch.where(has_tokens, batch.token_counts * sums[:, 1], 1.0)
        effective = sums[:, 0].square() / divisor  # 0 for a fully masked sample
    if not is_miles:
        return log_ratio, None
    if plan.is_per_token:
        effective = effective * batch.token_counts
    return log_ratio, effective.sum() if is_first else effective.new_zeros(())


def _is_clipped(plan: LossPlan, log_ratio: Tensor, advantages: Tensor) -> Tensor:  # [T] bool
    clip = clip_of(plan.config)
    if clip is None:
        return torch.zeros_like(log_ratio, dtype=torch.bool)
    low, high = clip
    ratio = bounded_exp(log_ratio)
    return ((advantages > 0) & (ratio > 1.0 + high)) | ((advantages < 0) & (ratio < 1.0 - low))


def _rollout_metrics(plan: LossPlan, batch: HostBatch, log_probs: Tensor, old_log_probs: Tensor, mean) -> dict[str, Tensor]:
    """Train against rollout log-probabilities, where the batch has the latter."""
    if "rollout_log_probs" not in batch.per_token:
        return {}
    rollout_log_probs, is_miles = batch.per_token["rollout_log_probs"], plan.view.host == Host.MILES
    trained = log_probs if plan.view["use_rollout_logprobs"] and not is_miles else old_log_probs
    metrics = {"train_rollout_logprob_abs_diff": mean((trained - rollout_log_probs).abs())}
    if is_miles:
        metrics["train_rollout_kl"] = mean(k3_estimate(rollout_log_probs, trained)[0])
    return metrics
