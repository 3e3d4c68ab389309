"""`--loss-type custom_loss --custom-loss-function-path megatron_rl.hooks.custom_loss`: our losses in the place of a host's own.

The host divides what is returned by the step's rollouts (--calculate-per-token-loss: tokens) afterwards; nothing here may do so.
"""

from __future__ import annotations

import itertools
from argparse import Namespace
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from megatron_rl.errors import DataError
from megatron_rl.hosts import step_guard
from megatron_rl.hosts.facts import Host
from megatron_rl.hosts.host_batch import HostBatch, is_absent, read_host_batch, require
from megatron_rl.hosts.host_metrics import MetricInputs, host_metrics
from megatron_rl.hosts.loss_plan import LossPlan, read_plan, sample_weights
from megatron_rl.layout.groups import Group, resolve_group
from megatron_rl.layout.packing import document_ids, spread
from megatron_rl.layout.rank_agreement import checks_microbatch
from megatron_rl.loss_hub import parameters_of
from megatron_rl.losses import PolicyLossOutput, policy_loss
from megatron_rl.losses.options import LogitsLossKeywords
from megatron_rl.ops.log_probs import vocab_parallel_log_probs

# Where slime and miles put the tokens that each token was sampled from.
SUPPORT_KEYS = ("rollout_top_p_token_ids", "rollout_sampling_mask_ids")

_microbatches = itertools.count()


def custom_loss(
    args: Namespace,
    batch: Mapping,
    logits: Tensor,  # [1, T, V_tp] (thd) or [N, S, V_tp] (bshd); temperature not applied yet
    sum_of_sample_mean: Callable[[Tensor], Tensor],
) -> tuple[Tensor, dict[str, Tensor]]:  # 0-d with gradient, name -> 0-d
    """One micro-batch's part of the step's loss on this rank, and of the host's metrics.

        sum_i w_i sum_t m_it l_it + kl_loss_coef sum_i v_i sum_t m_it k3_it - entropy_coef sum_i v_i sum_t m_it H_it

    w_i is 1 / M_roll(i) for sample_mean (and where a companion hook carries the aggregation), 1 / divisor for constant, 1 under
    --calculate-per-token-loss; v_i is the host's mean, 1 / M_roll(i) or 1. M_roll(i) counts the tokens of i's whole rollout.
    The padded columns of the vocabulary take part in the softmax, as in the host's own log-probabilities.
    `sum_of_sample_mean`, the host's reducer, is not called: it takes tokens in zigzag order, which logits need not have.
    It is pure: --recompute-loss-function runs it twice. The logits are read, never written.

    Communication: that of losses.policy_loss (tp one all-gather, cp one all-reduce of [N, k]) and of the metrics (cp one of
    [N, k <= 2]; tp one where the host reports an entropy at coefficient 0); --allgather-cp one more. Backward none.
    Raises: ConfigError, DataError: settings that are not honoured, an absent key, a wrong length, a non-finite unmasked token.
    """
    plan = read_plan(args)
    cp_group, tp_group = resolve_group(None, "cp"), resolve_group(None, "tp")
    rows = read_host_batch(batch, logits, plan.view, cp_group)
    check_keys(plan, batch)
    token_weights, mean_weights = sample_weights(plan, rows.token_counts, rows.rollout_token_counts)
    importance_ratio, importance_weights = _importance(plan, rows)
    flat_logits, old_log_probs = logits.flatten(0, 1), _old_log_probs(plan, rows)
    output = policy_loss(
        plan.config.policy_loss,
        flat_logits,
        rows.labels,
        old_log_probs,
        rows.per_token["advantages"],
        rows.loss_mask,
        rows.cu_seqlens,
        token_weights,
        advantages_per="token",
        token_counts=rows.token_counts,
        importance_weights=importance_weights,
        ref_log_probs=rows.per_token.get("ref_log_probs"),
        rollout_log_probs=rows.per_token.get("rollout_log_probs"),
        regularizer_weights=mean_weights,
        tp_group=tp_group,
        cp_group=cp_group,
        check_ranks=checks_microbatch(next(_microbatches)),
        **_settings(plan),
    )
    if output.num_nonfinite.is_cuda:  # on the CPU the loss has raised by itself
        stop_on_nonfinite(output.num_nonfinite)
    inputs = MetricInputs(
        old_log_probs=output.log_probs if old_log_probs is None else old_log_probs,
        weights=mean_weights,
        entropy=_entropy(plan, rows, flat_logits, output, mean_weights, tp_group),
        importance_ratio=importance_ratio,
        importance_weights=importance_weights,
    )
    return output.loss, host_metrics(plan, rows, output, inputs, cp_group)


def check_keys(plan: LossPlan, batch: Mapping) -> None:
    """DataError naming the key that these settings need and the host's batch lacks, or has and this loss cannot honour."""
    view = plan.view
    needed = {
        "rollout_mask_sums": plan.has_companion,
        "ref_log_probs": plan.kl_is_reported,
        "rollout_log_probs": view["use_rollout_logprobs"] or view["use_tis"],
        # slime leaves them out where the policy has not moved since the rollout
        "log_probs": view["use_tis"] or (view.host == Host.MILES and not (view["use_rollout_logprobs"] or _is_on_policy(plan))),
    }
    for key, is_needed in needed.items():
        if is_needed:
            require(batch, key)
    for key in SUPPORT_KEYS:
        if not is_absent(batch.get(key)):
            raise DataError(
                f"the host's batch has {key!r}: its samples were taken from a part of the vocabulary, and "
                "megatron_rl.hooks.custom_loss has log-probabilities of the whole vocabulary; sample with --rollout-top-p 1 "
                "--rollout-top-k -1, or train with the host's --loss-type policy_loss and megatron_rl.reducers.get_pg_loss_reducer"
            )


def stop_on_nonfinite(num_nonfinite: Tensor) -> None:  # [N] int32 over all cp ranks
    """Hands the count to hooks.before_train_step where that stands before the optimiser; else looks at it, once a micro-batch."""
    if step_guard.is_armed():
        step_guard.record_nonfinite(num_nonfinite.sum())
    elif bool((num_nonfinite > 0).any()):
        samples = torch.nonzero(num_nonfinite > 0).flatten().tolist()
        raise DataError(
            f"samples {samples} of the micro-batch have {int(num_nonfinite.sum())} unmasked tokens with a value that is not "
            "finite, in logits, log_probs, advantages or importance weights: mask them or drop the samples; with "
            "--custom-megatron-before-train-step-hook-path megatron_rl.hooks.before_train_step the look is once a step"
        )


def _settings(plan: LossPlan) -> LogitsLossKeywords:
    config = plan.config
    return {
        "clip_ratio_low": config.clip_ratio_low,
        "clip_ratio_high": config.clip_ratio_high,
        "loss_parameters": parameters_of(config),
        "temperature": config.policy_temperature,
        "kl_coefficient": config.kl_coefficient,
        "entropy_coefficient": config.entropy_coefficient,
        "backend": config.policy_loss_backend,
    }


def _is_on_policy(plan: LossPlan) -> bool:
    return bool(plan.view["skip_actor_forward_only"] and not plan.view["use_rollout_logprobs"])


def _old_log_probs(plan: LossPlan, rows: HostBatch) -> Tensor | None:  # [T]
    """The policy that the ratio is taken against, chosen as the host does; None: the one in training, before this step."""
    if plan.view["use_rollout_logprobs"]:
        return rows.per_token["rollout_log_probs"]
    return None if _is_on_policy(plan) else rows.per_token.get("log_probs")


def _importance(plan: LossPlan, rows: HostBatch) -> tuple[Tensor | None, Tensor | None]:  # [T], [T]
    """Truncated importance sampling: exp(log_probs - rollout_log_probs) before and after the clamp to [tis_clip_low, tis_clip]."""
    if not plan.view["use_tis"]:
        return None, None
    difference = rows.per_token["log_probs"] - rows.per_token["rollout_log_probs"]
    ratio = difference.exp()
    clamped = ratio.clamp(plan.view["tis_clip_low"], plan.view["tis_clip"])
    # The clamp would turn an infinite difference into a number that trains.
    return ratio, torch.where(torch.isfinite(difference), clamped, float("nan"))


@torch.no_grad()
def _entropy(
    plan: LossPlan, rows: HostBatch, flat_logits: Tensor, output: PolicyLossOutput, weights: Tensor, tp_group: Group
) -> Tensor | None:  # 0-d
    """The host's entropy_loss; without a coefficient it takes a second look at the logits, outside the graph."""
    if output.entropy is not None or not plan.entropy_is_reported:
        return output.entropy
    _, entropy = vocab_parallel_log_probs(
        flat_logits.detach(),
        rows.labels,
        loss_mask=rows.loss_mask,
        temperature=plan.config.policy_temperature,
        tp_group=tp_group,
        with_entropy=True,
        backend=plan.config.policy_loss_backend,
    )
    documents = document_ids(rows.cu_seqlens, rows.labels.numel())
    return torch.where(rows.loss_mask, entropy.double() * spread(weights.double(), documents), 0.0).sum()
