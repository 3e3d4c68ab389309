"""The emulator's policy losses of miles and slime, from log-probabilities. Nothing here is used in training."""

from __future__ import annotations

from argparse import Namespace

import torch
from host_rank import HostRank, Reducer, load_function
from torch import Tensor

from megatron_rl.layout.groups import all_reduce_sum


def emulated_policy_loss(
    host: HostRank,
    args: Namespace,
    batch: dict,
    logits: Tensor,  # [1, rows, V] or [B, rows, V]
    reduce: Reducer,
) -> tuple[Tensor, dict[str, Tensor]]:  # 0-d with graph, {name: 0-d}
    """PPO clip, GSPO or CISPO, dual clip, OPSM, TIS and icepop, entropy and KL terms, and metrics under the host's names. Only the
    policy term goes through the hook's reducer."""
    masks = batch["loss_masks"]
    log_probs, entropy = response_log_probs(host, args, batch, logits)
    old = batch["rollout_log_probs"] if args.use_rollout_logprobs else batch["log_probs"]
    if args.advantage_estimator == "gspo":
        log_ratio = _sample_log_ratios(host, args, batch, log_probs, old)
    else:
        log_ratio = torch.cat(log_probs) - torch.cat(old)
    advantages = torch.cat(batch["advantages"])
    is_active = torch.cat([masks[i][host.owned(args, batch, i)] for i in range(len(masks))]).bool()
    if host.own.drops_masked_values:
        log_ratio = torch.where(is_active & log_ratio.isfinite(), log_ratio, torch.zeros_like(log_ratio))
        advantages = torch.where(is_active & advantages.isfinite(), advantages, torch.zeros_like(advantages))
    values, clipped = clipped_values(host, args, log_ratio, advantages, torch.cat(log_probs))
    corrected, compared, policy_masks, policy_default = {}, {}, masks, reduce
    if args.use_opsm:
        is_dropped, share = _off_policy_samples(host, args, batch, log_probs, old)
        values, corrected = values * (1 - is_dropped), {"opsm_clipfrac": share}
    if args.use_tis or args.get_mismatch_metrics:
        values, policy_masks, weights = _importance_sampled(host, args, batch, values)
        policy_default = host.default_reducer(args, batch, policy_masks)
        means = {name: reduce(value) for name, value in {"ois": log_ratio.exp(), **weights}.items()}
        corrected = {**means, **corrected}
    policy_loss = host.policy_reducer(args, batch, policy_masks, policy_default)(values)
    means = {"pg_clipfrac": policy_default(clipped), "ppo_kl": policy_default(-log_ratio)}
    loss, entropy_loss, terms = policy_loss, torch.zeros(()), {}
    if args.entropy_coef != 0 or host.host.always_has_entropy or args.observe_training_entropy:
        entropy_loss = policy_default(torch.cat(entropy))
        loss = loss - args.entropy_coef * entropy_loss
    if args.use_kl_loss:
        ratio = (torch.cat(log_probs) - torch.cat(old)).exp() if args.use_unbiased_kl else None
        divergence = approximate_kl(host, args.kl_loss_type, torch.cat(log_probs) - torch.cat(batch["ref_log_probs"]), ratio)
        terms["kl_loss"] = policy_default(divergence.where(is_active, 0.0) if host.own.drops_masked_values else divergence)
        loss = loss + args.kl_loss_coef * terms["kl_loss"]
    if not is_active.numel():
        loss = loss + 0 * logits.sum()
    log = {"loss": loss, "pg_loss": policy_loss, "entropy_loss": entropy_loss, **means}
    if host.host.has_ess_ratio:
        log["ess_ratio"] = _effective_sample_size(host, args, batch, log_ratio.detach())
    if batch["rollout_log_probs"] is not None:
        is_of_training = host.host.compares_trained_with_rollout and args.use_rollout_logprobs
        trained = log_probs if is_of_training else old
        compared = _mismatch(host, batch, trained, is_active, policy_default)
    return loss, {name: value.detach() for name, value in {**log, **compared, **terms, **corrected}.items()}


def response_log_probs(
    host: HostRank, args: Namespace, batch: dict, logits: Tensor
) -> tuple[list[Tensor], list[Tensor]]:  # [local response tokens] each: log-probabilities, entropies
    """From logits / temperature, in zigzag order: under --allgather-cp the contiguous parts are summed over cp and cut again."""
    rows = logits.reshape(-1, logits.shape[-1])
    taken, entropies, owned = [], [], []
    for sample, (indices, places) in enumerate(host.owned_rows(args, batch, len(rows))):
        prompt = batch["total_lengths"][sample] - batch["response_lengths"][sample]
        labels = batch["unconcat_tokens"][sample][[prompt + index for index in indices]]
        log_softmax = torch.log_softmax(rows[places] / args.rollout_temperature, -1)
        taken.append(log_softmax.gather(-1, labels[:, None])[:, 0])
        entropies.append(-(log_softmax.exp() * log_softmax).sum(-1))
        owned.append(indices)
    if args.allgather_cp and host.groups.cp.size() > 1:
        mine = [host.owned(args, batch, sample) for sample in range(len(taken))]
        taken, entropies = (
            [whole[indices] for whole, indices in zip(whole_responses(host, batch, parts, owned), mine, strict=True)]
            for parts in (taken, entropies)
        )
    return taken, entropies


def whole_responses(
    host: HostRank,
    batch: dict,
    parts: list[Tensor],  # [local] each
    owned: list[list[int]],  # the response indices of each
) -> list[Tensor]:  # [response_length] each
    """The sum of all cp ranks' parts. The hosts' backward is a sum too, and counts each gradient once, because each rank holds
    another part of the loss. One all-reduce for all samples."""
    lengths, start, places = batch["response_lengths"], 0, []
    for indices, length in zip(owned, lengths, strict=True):
        places += [start + index for index in indices]
        start += length
    flat = torch.cat(parts)
    whole = flat.new_zeros(start).index_put((torch.tensor(places, dtype=torch.int64),), flat)
    if host.groups.cp.size() > 1:
        whole = _SumOverRanks.apply(whole, host.groups.cp)
    return list(whole.split(lengths))


def clipped_values(
    host: HostRank,
    args: Namespace,
    log_ratio: Tensor,  # [local response tokens]
    advantages: Tensor,  # [local response tokens]
    log_probs: Tensor,  # [local response tokens]
) -> tuple[Tensor, Tensor]:  # loss per token, 1.0 where clipped
    ratio = _bounded(host, log_ratio).exp()
    if host.own.has_cispo and args.advantage_estimator == "cispo":
        weight = ratio.detach().clamp(1 - args.eps_clip, 1 + args.eps_clip_high)
        return -weight * advantages * log_probs, (weight != ratio).to(ratio.dtype)
    free, kept = -ratio * advantages, -ratio.clamp(1 - args.eps_clip, 1 + args.eps_clip_high) * advantages
    values = torch.maximum(free, kept)
    if args.eps_clip_c is not None:  # dual clip: a bound on what a negative advantage may cost
        values = torch.where(advantages < 0, torch.minimum(values, -args.eps_clip_c * advantages), values)
    return values, (kept > free).to(values.dtype)


def approximate_kl(host: HostRank, kind: str, log_ratio: Tensor, importance_ratio: Tensor | None = None) -> Tensor:
    """log_ratio: policy minus reference. k1, k2, k3; low_var_kl is k3 clamped to [-10, 10], of the host's bounded log-ratio.

    importance_ratio: policy over old (--use-unbiased-kl); it multiplies the estimate before the clamp, and has a gradient.
    """
    is_bounded = kind == "low_var_kl"
    if is_bounded:
        log_ratio = _bounded(host, log_ratio)
    estimates = {"k1": log_ratio, "k2": log_ratio.square() / 2}
    estimate = estimates[kind] if kind in estimates else (-log_ratio).exp() - 1 + log_ratio
    if importance_ratio is not None:
        estimate = importance_ratio * estimate
    return estimate.clamp(-10, 10) if is_bounded else estimate


def _bounded(host: HostRank, log_ratio: Tensor) -> Tensor:
    bound = host.own.log_ratio_bound
    return log_ratio if bound is None else log_ratio.clamp(-bound, bound)


def _sample_log_ratios(host: HostRank, args: Namespace, batch: dict, log_probs: list[Tensor], old: list[Tensor]) -> Tensor:
    """Each local token gets the mean log-ratio of its whole sample."""
    if host.own.pads_rows and args.qkv_format == "bshd" and host.groups.cp.size() > 1:
        raise AssertionError(f"{host.host} gathers by thd slices: GSPO with bshd and context parallelism does not run")
    owned = [host.owned(args, batch, sample) for sample in range(len(log_probs))]
    difference = [new - before for new, before in zip(log_probs, old, strict=True)]
    spread = []
    for whole, mask, indices in zip(whole_responses(host, batch, difference, owned), batch["loss_masks"], owned, strict=True):
        spread.append(((whole * mask).sum() / mask.sum().clamp(min=1)).expand(len(indices)))
    return torch.cat(spread)


def _off_policy_samples(
    host: HostRank, args: Namespace, batch: dict, log_probs: list[Tensor], old: list[Tensor]
) -> tuple[Tensor, Tensor]:  # [local] 1.0 where dropped; 0-d: for each sample its dropped tokens by its unmasked ones, added up
    divergence = -_sample_log_ratios(host, args, batch, log_probs, old).detach()
    is_dropped = ((torch.cat(batch["advantages"]) < 0) & (divergence > args.opsm_delta)).to(divergence.dtype)
    lengths = [part.shape[0] for part in log_probs]
    shares = [
        part.sum() / mask.sum().clamp(min=1) for part, mask in zip(is_dropped.split(lengths), batch["loss_masks"], strict=True)
    ]
    return is_dropped, torch.stack(shares).sum()


def _importance_sampled(
    host: HostRank, args: Namespace, batch: dict, values: Tensor
) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:  # values [local], masks [response_length] each, metrics [local]
    """A custom function by keywords, or weights exp(train - rollout): clamped to [tis_clip_low, tis_clip], 0 outside for icepop."""
    shared = {
        "train_log_probs": batch["log_probs"],
        "rollout_log_probs": batch["rollout_log_probs"],
        "loss_masks": batch["loss_masks"],
    }
    kind = host.host.correction_functions.get(args.custom_tis_function_path)
    if args.custom_tis_function_path is not None and kind is None:
        shared.update(total_lengths=batch["total_lengths"], response_lengths=batch["response_lengths"])
        return load_function(args.custom_tis_function_path)(args=args, pg_loss=values, **shared)
    ratio = (torch.cat(batch["log_probs"]) - torch.cat(batch["rollout_log_probs"])).exp()
    weights = ratio.clamp(args.tis_clip_low, args.tis_clip)
    weights = torch.where(weights == ratio, ratio, 0.0) if kind == "icepop" else weights
    metrics = {"tis": ratio, "tis_clipfrac": (weights != ratio).float(), "tis_abs": (ratio - 1).abs()}
    return values * weights, batch["loss_masks"], metrics


def _mismatch(host: HostRank, batch: dict, compared: list[Tensor], is_active: Tensor, reduce: Reducer) -> dict[str, Tensor]:
    """How far the trainer's log-probabilities are from those of the rollout engine."""
    log_ratio = torch.cat(batch["rollout_log_probs"]) - torch.cat(compared)
    found = {"train_rollout_logprob_abs_diff": log_ratio.abs()}
    if host.host.has_rollout_kl:
        found["train_rollout_kl"] = approximate_kl(host, "low_var_kl", log_ratio)
    if host.own.drops_masked_values:
        found = {name: value.where(is_active, 0.0) for name, value in found.items()}
    return {name: reduce(value) for name, value in found.items()}


def _effective_sample_size(host: HostRank, args: Namespace, batch: dict, log_ratio: Tensor) -> Tensor:  # [local] -> 0-d
    """(sum w)^2 / (m sum w^2) per sample, times m under per-token; the first cp rank alone reports it."""
    owned = [host.owned(args, batch, sample) for sample in range(len(batch["loss_masks"]))]
    sums = []
    for part, indices, mask in zip(log_ratio.split([len(i) for i in owned]), owned, batch["loss_masks"], strict=True):
        weights = _bounded(host, part).exp() * mask[indices]
        sums.append(torch.stack([weights.sum(), weights.square().sum()]))
    first, second = all_reduce_sum(torch.stack(sums), host.groups.cp).unbind(-1)
    counts = torch.stack([mask.sum() for mask in batch["loss_masks"]]).clamp(min=1)
    ratios = first.square() / second.clamp(min=1e-8) / (1.0 if args.calculate_per_token_loss else counts)
    return ratios.sum() * (host.groups.cp.rank() == 0)


class _SumOverRanks(torch.autograd.Function):
    """One all-reduce over the group in forward and one in backward."""

    @staticmethod
    def forward(ctx, values, group):
        ctx.group = group
        return all_reduce_sum(values, group)

    @staticmethod
    def backward(ctx, gradient):
        return all_reduce_sum(gradient, ctx.group), None
