"""What miles and slime call for a micro-batch in the place of their loss.

    --loss-type custom_loss --custom-loss-function-path megatron_rl.hooks.custom_loss

Afterwards the host divides the result by the step's rollouts (--calculate-per-token-loss: tokens). Nothing here divides by them, by
M, by cp or by dp: args.py says what the host does with the result, and so what is left to do here.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_rl.config import NO_CORRECTION, Backend, LaunchMethod, PolicyMetrics, SupportUse
from megatron_rl.declare import bounded_exp, clip_of, get_policy_loss
from megatron_rl.errors import DataError
from megatron_rl.hosts.args import INIT_LINE, TOTALS_OF_HOST, HostLaunch, kl_estimator_of_host, names_ours
from megatron_rl.hosts.batch import HostBatch, is_absent, read_host_batch, require
from megatron_rl.hosts.checks import check_launch
from megatron_rl.hosts.dense_rows import refuse_nonfinite
from megatron_rl.hosts.heads.hidden_states_proxy import inputs_of
from megatron_rl.hosts.host_run import RUNS
from megatron_rl.hosts.kept_ids import KeptIds
from megatron_rl.hosts.reducer import check_no_phantom_tokens
from megatron_rl.layout.agreement import checks_microbatch
from megatron_rl.layout.groups import Group, all_reduce_sum, document_ids, document_sums, resolve_group, spread
from megatron_rl.losses.corrections import needs_rollout_log_probs
from megatron_rl.losses.kl import k3, kl_estimate
from megatron_rl.megatron.head import HeadSettings, rows_of
from megatron_rl.ops.backends import resolve_backend
from megatron_rl.policy_loss import PolicyLossOutput, linear_policy_loss, policy_loss
from megatron_rl.policy_loss.inputs import mean_of_documents, not_none, options_of
from megatron_rl.policy_loss.reduce_torch import evaluate
from megatron_rl.weights import sample_token_weights

# The hosts' keys for the part of the vocabulary that each token was sampled from.
SUPPORT_KEYS = ("rollout_top_p_token_ids", "rollout_sampling_mask_ids")


def custom_loss(
    args: Namespace,
    batch: Mapping,
    logits: Tensor,  # [1, T, V_tp] (thd) or [N, S, V_tp] (bshd); temperature not applied yet; with a fused head a HiddenStatesProxy
    sum_of_sample_mean: Callable[[Tensor], Tensor],
) -> tuple[Tensor, dict[str, Tensor]]:  # 0-d with gradient, name -> 0-d
    """One micro-batch's part of the step's loss on this rank, and of the host's metrics.

        sum_i w_i sum_t m_it u_it l_it + kl_loss_coef sum_i v_i sum_t m_it KL_it - entropy_coef sum_i v_i sum_t m_it H_it

    w_i is 1 / M_roll(i) for sample_mean (and where the reward hook carries the aggregation), 1 / divisor for constant, 1 under
    --calculate-per-token-loss; v_i is the host's mean, 1 / M_roll(i) or 1. M_roll(i) counts the tokens of i's whole rollout, those
    that a correction drops included. u_it is the correction's factor (--use-tis, --use-opsm, or our flags), 1 without one.
    The padded columns of the vocabulary take part in the softmax, as in the host's own log-probabilities.
    `sum_of_sample_mean`, the host's reducer, is not called: it takes tokens in zigzag order, which logits need not have.
    Where is_last_reader says so, the gradient is written over the logits, and by forward where one kernel can make it. Else there
    is no side effect: --recompute-loss-function runs it twice.
    With --fused-lm-head-loss there are no logits: the loss is computed from the hidden states that the model's output carries.

    Communication: as policy_loss (tp one all-gather, cp one all-reduce of [N, k] or two) and of the metrics (cp one of
    [N, k <= 2]); --allgather-cp one more. Backward none. With a fused head as linear_policy_loss.
    Raises: ConfigError, DataError: settings that are not honoured, an absent key, a wrong length, a non-finite unmasked token.
    """
    run = RUNS.of(args)
    launch = run.judged(LaunchMethod.CUSTOM_LOSS, args, read_plan)
    cp_group, tp_group = resolve_group(None, "cp"), resolve_group(None, "tp")
    check_keys(launch, batch)
    rows = read_host_batch(
        batch,
        logits,
        cp_group,
        is_padded=launch.is_padded,
        is_contiguous=launch.is_contiguous(cp_group),
        kept=kept_of(launch),
        tp_size=tp_group.size(),
    )
    token_weights, mean_weights = sample_weights(launch, rows.token_counts, rows.rollout_token_counts)
    old_log_probs = _old_log_probs(launch, rows)
    config = launch.config
    has_metric_of_entropy = _entropy_is_reported(launch) and not config.entropy_coefficient
    options: dict[str, Any] = {
        **options_of(config),
        # The host's entropy_loss, where no term of ours has it, from the same pass.
        "metrics": PolicyMetrics.WITH_ENTROPY if has_metric_of_entropy else PolicyMetrics.NONE,
        "advantages_per": "token",
        "token_counts": rows.token_counts,
        "ref_log_probs": rows.per_token.get("ref_log_probs"),
        "rollout_log_probs": rows.per_token.get("rollout_log_probs"),
        "regularizer_weights": mean_weights,
        "tp_group": tp_group,
        "cp_group": cp_group,
        "check_ranks": checks_microbatch(next(run.numbers)),
    }
    support = rows.sampling_support
    if support is not None:
        options["sampling_support"] = support if config.fused_lm_head_loss else support.to(logits.device)
    token_inputs = (
        rows.labels,
        old_log_probs,
        rows.per_token["advantages"],
        rows.loss_mask,
        rows.cu_seqlens,
        token_weights,
    )
    if HeadSettings.of(config).is_on:
        run.check_head()
    if config.fused_lm_head_loss:
        inputs = inputs_of(logits)
        hidden, is_sequence_parallel = rows_of(inputs, tp_group)  # [T, H] or [T / tp, H], in the order of the batch
        output = linear_policy_loss(
            config.policy_loss,
            hidden,
            inputs.weight,
            *token_inputs,
            max_logits_bytes=config.max_logits_bytes,
            sequence_parallel=is_sequence_parallel,
            fp32_logits=config.fp32_lm_head,
            **options,
        )
    else:
        flat = logits.flatten(0, 1)
        is_last = is_last_reader(launch, flat, cp_group)
        scale = run.scale if is_last else None
        output = policy_loss(config.policy_loss, flat, *token_inputs, inplace=is_last, loss_scale=scale, **options)
    if output.num_nonfinite.is_cuda:  # on the CPU the loss has raised by itself
        if run.guard.is_armed:  # hooks.before_train_step looks at it once a step
            run.guard.record_nonfinite(output.num_nonfinite.sum())
        else:
            refuse_nonfinite(output.num_nonfinite)
    old_log_probs = output.log_probs if old_log_probs is None else old_log_probs
    entropy = _entropy(rows, output.entropy_per_token, mean_weights) if has_metric_of_entropy else output.entropy
    return output.loss, host_metrics(launch, rows, output, old_log_probs, mean_weights, entropy, cp_group)


def is_last_reader(launch: HostLaunch, logits: Tensor, cp_group: Group) -> bool:
    """Whether nobody reads the logits after custom_loss, and Triton makes the gradient.

    Not where a function of the user calls it, which may read them, and not where the host does: it runs the loss again
    (--recompute-loss-function), or adds 0 x their sum (--allgather-cp).
    """
    is_called_by_host = names_ours(launch["custom_loss_function_path"], "custom_loss")
    is_read_again = launch["recompute_loss_function"] or launch.is_contiguous(cp_group)
    return is_called_by_host and not is_read_again and resolve_backend(launch.config.policy_loss_backend, logits) == Backend.TRITON


# What the arguments ask for, read once a run, and the weights of tokens


def read_plan(args: Namespace) -> HostLaunch:
    """Raises one ConfigError with every setting that custom_loss would not honour, or would train on a wrong scale."""
    return check_launch(args, LaunchMethod.CUSTOM_LOSS)


def kept_of(launch: HostLaunch) -> KeptIds | None:
    """Where the batch has the ids that the sampler kept; None: scores are over the whole vocabulary."""
    return launch.host.kept if launch.config.sampling_support == SupportUse.REPLAY else None


def _reported_kl(launch: HostLaunch) -> str:
    """The estimator of the metric: the loss's, or at --kl-loss-coef 0 the one that the host would train."""
    if launch.config.kl_coefficient or not launch["use_kl_loss"]:
        return launch.config.kl_estimator
    return kl_estimator_of_host(launch)


def _kl_is_reported(launch: HostLaunch) -> bool:
    return launch["use_kl_loss"] or launch.config.kl_coefficient != 0


def _entropy_is_reported(launch: HostLaunch) -> bool:
    """Where our settings ask for it, and where the host reports it: always, or with --observe-training-entropy."""
    if launch.config.entropy_coefficient or launch.config.policy_metrics == PolicyMetrics.WITH_ENTROPY:
        return True
    is_computed = launch.host.always_has_entropy or launch["observe_training_entropy"]
    return bool(is_computed) and launch.config.policy_metrics != PolicyMetrics.NONE


def sample_weights(
    launch: HostLaunch,
    token_counts: Tensor,  # [N] unmasked tokens of each sample of the micro-batch, over all cp ranks
    rollout_token_counts: Tensor,  # [N] unmasked tokens of the sample's whole rollout
) -> tuple[Tensor, Tensor]:  # token_weights [N], mean_weights [N], float32
    """The weight of a token in the number that a rank returns, before the host divides by the step's rollouts or tokens.

    sample_mean 1 / M_roll, so that two segments of a rollout share its weight; constant 1 / divisor; per token 1. KL, entropy
    and metrics take the host's own mean_weights: 1 / M_roll, per token 1.
    Raises DataError for a fully masked sample under --calculate-per-token-loss, where the host would count one token for it.
    """
    if launch.is_per_token:
        check_no_phantom_tokens(token_counts)
        weights = sample_token_weights("token_mean", token_counts, TOTALS_OF_HOST, are_of_step=False)
        return weights, weights
    mean_weights = sample_token_weights("sample_mean", rollout_token_counts, TOTALS_OF_HOST, are_of_step=False)
    if launch.has_reward_hook or launch.config.loss_aggregation == "sample_mean":
        return mean_weights, mean_weights
    name, divisor = launch.config.loss_aggregation, launch.config.loss_aggregation_divisor
    weights = sample_token_weights(name, rollout_token_counts, TOTALS_OF_HOST, divisor=divisor, are_of_step=False)
    return torch.where(token_counts > 0, weights, 0.0), mean_weights


def check_keys(launch: HostLaunch, batch: Mapping) -> None:
    """DataError, with the key, where the host's batch lacks what these settings need, or has what this loss cannot honour."""
    needed = {
        "rollout_mask_sums": launch.has_reward_hook,
        "ref_log_probs": _kl_is_reported(launch),
        "rollout_log_probs": launch["use_rollout_logprobs"],
        # Some hosts leave them out where the policy has not moved since the rollout.
        "log_probs": launch.host.needs_log_probs and not (launch["use_rollout_logprobs"] or _is_on_policy(launch)),
    }
    for key, is_needed in needed.items():
        if is_needed:
            require(batch, key)
    if launch.config.skip_old_log_probs and not is_absent(batch.get("log_probs")):
        raise DataError(
            "--skip-old-log-probs: the host's batch has log_probs, which would be ignored: the init hook was not called, or the "
            f"rollout brings its own; add {INIT_LINE}, or remove --skip-old-log-probs"
        )
    if needs_rollout_log_probs(launch.config):
        require(batch, "rollout_log_probs", "what compares with the sampler's policy")
    kept = kept_of(launch)
    for key in SUPPORT_KEYS:
        if not is_absent(batch.get(key)) and (kept is None or kept.ids != key):
            raise DataError(
                f"the host's batch has {key!r}: its samples were taken from a part of the vocabulary, and "
                "megatron_rl.hooks.custom_loss has log-probabilities of the whole vocabulary; sample with --rollout-top-p 1 "
                f"--rollout-top-k -1, or add --sampling-support {SupportUse.REPLAY} where the host has these sets"
            )


def _is_on_policy(launch: HostLaunch) -> bool:
    is_skipped = launch.config.skip_old_log_probs or launch["skip_actor_forward_only"]
    return bool(is_skipped and not launch["use_rollout_logprobs"])


def _old_log_probs(launch: HostLaunch, rows: HostBatch) -> Tensor | None:  # [T]
    """The old log-probabilities of the ratio, chosen as the host does; None: the policy in training, before this step."""
    if launch["use_rollout_logprobs"]:
        return rows.per_token["rollout_log_probs"]
    return None if _is_on_policy(launch) else rows.per_token.get("log_probs")


def _entropy(rows: HostBatch, entropies: Tensor | None, weights: Tensor) -> Tensor:  # [T], [N] -> 0-d
    documents = document_ids(rows.cu_seqlens, rows.labels.numel())
    return torch.where(rows.loss_mask, not_none(entropies).double() * spread(weights.double(), documents), 0.0).sum()


# The host's own metric names and divisor, from what the loss has computed; no gradient goes through them


@torch.no_grad()
def host_metrics(
    launch: HostLaunch,
    batch: HostBatch,
    output: PolicyLossOutput,
    old_log_probs: Tensor,  # [T]
    mean_weights: Tensor,  # [N] the hosts' weight of a token: 1 / M_roll, per token 1
    entropy: Tensor | None,  # 0-d, weighted and summed; None: the host does not compute it
    cp_group: Group,
) -> dict[str, Tensor]:  # name -> 0-d float32
    """This rank's share of each metric: the host sums over micro-batches, dp and cp and divides by the step's rollouts (tokens).

    Keys and their order depend on the settings and on which lists the batch has, never on a mask. --policy-metrics none keeps
    the parts of the loss alone. Exponents are bounded to +-20, so that one token cannot make a mean infinite.
    Communication: at cp size above 1 one all-reduce of [N, k <= 2] for what is not a sum over tokens (miles' ess_ratio), and one
    for a sample's mean log-ratio; none with --policy-metrics none.
    """
    documents = document_ids(batch.cu_seqlens, batch.labels.numel())
    weights = spread(mean_weights.double(), documents)

    def mean(values: Tensor) -> Tensor:  # [T] -> 0-d
        return torch.where(batch.loss_mask, values.double() * weights, 0.0).sum()

    log_probs = output.log_probs
    is_basic = launch.config.policy_metrics != PolicyMetrics.NONE
    metrics = {"loss": output.loss.detach(), "pg_loss": output.policy_loss}
    metrics["entropy_loss"] = torch.zeros_like(output.policy_loss) if entropy is None else entropy
    if is_basic:
        log_ratio, effective_samples = _log_ratio(launch, batch, log_probs - old_log_probs, documents, cp_group)
        metrics["pg_clipfrac"] = mean(_is_clipped(launch, batch, old_log_probs, log_probs, log_ratio, cp_group))
        metrics["ppo_kl"] = mean(-log_ratio)
        if effective_samples is not None:
            metrics["ess_ratio"] = effective_samples
        metrics.update(_rollout_metrics(launch, batch, log_probs, old_log_probs, mean))
    if _kl_is_reported(launch) and (is_basic or output.kl_loss is not None):
        kl_loss = output.kl_loss
        if kl_loss is None:
            ref_log_probs = batch.per_token["ref_log_probs"]
            kl_loss = mean(kl_estimate(_reported_kl(launch), log_probs, ref_log_probs, log_probs - old_log_probs)[0])
        metrics["kl_loss"] = kl_loss
    correction = output.correction
    if is_basic and launch.config.importance_correction != NO_CORRECTION and correction is not None:
        metrics["ois"] = mean(bounded_exp(log_ratio))
        metrics["tis"] = mean(correction.ratios)
        metrics["tis_clipfrac"] = mean(correction.is_low | correction.is_high)
        metrics["tis_abs"] = mean((correction.ratios - 1.0).abs())
    if is_basic and launch.config.off_policy_sequence_delta is not None and correction is not None:
        metrics["opsm_clipfrac"] = mean(correction.is_off_policy)
    if is_basic and "opd_reverse_kl" in batch.per_token:
        metrics["opd_reverse_kl"] = mean(batch.per_token["opd_reverse_kl"])
    if is_basic and batch.sampling_support is not None:
        metrics["kept_ids"] = mean(batch.sampling_support.sizes.to(log_probs.device))
    return {name: value.to(torch.float32).clone() for name, value in metrics.items()}


def _log_ratio(
    launch: HostLaunch, batch: HostBatch, log_ratio: Tensor, documents: Tensor, cp_group: Group
) -> tuple[Tensor, Tensor | None]:  # [T] a token's, or its sample's mean; 0-d ess_ratio, None where the host has none
    is_sequence = get_policy_loss(launch.config.policy_loss).level == "sequence"
    has_ess_ratio, is_first = launch.host.has_ess_ratio, cp_group.rank() == 0
    if is_sequence:
        log_ratio = _mean_of_samples(batch, log_ratio, documents, cp_group)
        effective = (batch.token_counts > 0).double()  # one ratio a sample: none weighs more than another
    elif has_ess_ratio:
        ratios = torch.where(batch.loss_mask, bounded_exp(log_ratio), 0.0).double()
        sums = all_reduce_sum(document_sums(torch.stack([ratios, ratios.square()], dim=-1), batch.cu_seqlens), cp_group)
        has_tokens = batch.token_counts > 0
        divisor = torch.where(has_tokens, batch.token_counts * sums[:, 1], 1.0)
        effective = sums[:, 0].square() / divisor  # 0 for a fully masked sample
    if not has_ess_ratio:
        return log_ratio, None
    if launch.is_per_token:
        effective = effective * batch.token_counts
    return log_ratio, effective.sum() if is_first else effective.new_zeros(())


def _mean_of_samples(batch: HostBatch, log_ratio: Tensor, documents: Tensor, cp_group: Group) -> Tensor:  # [T]
    sums = all_reduce_sum(document_sums(torch.where(batch.loss_mask, log_ratio, 0.0), batch.cu_seqlens), cp_group)
    return spread(mean_of_documents(sums, batch.token_counts, log_ratio.dtype), documents)


def _is_clipped(
    launch: HostLaunch, batch: HostBatch, old_log_probs: Tensor, log_probs: Tensor, log_ratio: Tensor, cp_group: Group
) -> Tensor:  # [T] bool
    """What the loss counts as clipped, without the dual clip, which the hosts leave out too.

    Communication: for a token-level loss that reads its sample's mean log-ratio one all-reduce of [N] over cp.
    """
    loss, advantages, clip = get_policy_loss(launch.config.policy_loss), batch.per_token["advantages"], clip_of(launch.config)
    if loss.level == "sequence" and loss.token_clip is None:
        if clip is None:
            return torch.zeros_like(log_ratio, dtype=torch.bool)
        ratio = bounded_exp(log_ratio)
        return ((advantages > 0) & (ratio > 1.0 + clip[1])) | ((advantages < 0) & (ratio < 1.0 - clip[0]))
    keywords = loss.resolve_parameters(launch.config.loss_parameters)
    if "clip_ratio_c" in keywords:
        keywords["clip_ratio_c"] = math.inf
    if clip is not None:
        keywords |= {"clip_ratio_low": clip[0], "clip_ratio_high": clip[1]}
    documents = document_ids(batch.cu_seqlens, log_probs.numel())
    known = {**batch.per_token, "token_counts": spread(batch.token_counts, documents)}
    behind = batch.per_token["rollout_log_probs"] if loss.anchor == "rollout" else old_log_probs
    log_ratio, advantages = log_probs - behind.to(log_probs.dtype), advantages.to(log_probs.dtype)
    if loss.token_clip is not None:
        return (loss.token_clip(log_ratio, advantages, **keywords) != log_ratio) & (advantages != 0)
    if loss.reads_means:
        known["mean_log_ratio"] = _mean_of_samples(batch, log_ratio, documents, cp_group)
    vectors = {name: known[name].to(log_probs.dtype) for name in loss.needs}
    return evaluate(loss, log_ratio, advantages, log_probs, keywords, vectors).is_clipped


def _rollout_metrics(launch: HostLaunch, batch: HostBatch, log_probs: Tensor, old_log_probs: Tensor, mean) -> dict[str, Tensor]:
    """Train against rollout log-probabilities, where the batch has the latter."""
    if "rollout_log_probs" not in batch.per_token:
        return {}
    rollout_log_probs, host = batch.per_token["rollout_log_probs"], launch.host
    is_of_training = launch["use_rollout_logprobs"] and host.compares_trained_with_rollout
    trained = log_probs if is_of_training else old_log_probs
    metrics = {"train_rollout_logprob_abs_diff": mean((trained - rollout_log_probs).abs())}
    if host.has_rollout_kl:
        metrics["train_rollout_kl"] = mean(k3(rollout_log_probs, trained).value)
    return metrics
