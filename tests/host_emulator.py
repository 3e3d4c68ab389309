"""Emulates what miles and slime do around a policy loss, to test hooks without a host. It trains nothing and imports no host.

    samples -> training data -> loss of a micro-batch -> outer scaling -> (loss, num_tokens, log) for Megatron -> reported metrics

It is written from what the hosts promise their hooks, not from their code, and has of their loss the clipped ratio alone. With a
checkout of a host tests/test_host_canary.py compares the emulator with it. Positions are found token by token; the hosts and
layout/context_parallel.py do it otherwise.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_rl.hosts.args import Host
from megatron_rl.layout.groups import ParallelGroups, all_reduce_sum

Reducer = Callable[[Tensor], Tensor]


def load_function(path: str):
    """The object behind a dotted path: everything after the last dot is an attribute, whatever characters it has."""
    module, _, attribute = path.rpartition(".")
    return getattr(import_module(module), attribute)


@dataclass(frozen=True, kw_only=True)
class OwnCode:
    """What a host's own code does where no hook of ours looks; what our loss must know is in the host's object."""

    logs_sample_count: bool = False
    """The log of a micro-batch begins with the number of samples, else with 0."""
    reenters_checkpoint: bool = False
    """--recompute-loss-function uses the reentrant form of torch.utils.checkpoint."""
    pads_rows: bool = False
    """--qkv-format bshd, rows padded to one length, exists."""
    groups_by_prompt: bool = True
    """Rewards are normalised over the samples of one group_index, with one reward a rollout; else over samples in their order."""
    drops_masked_values: bool = True
    """Masked tokens are replaced before anything is computed; else a hook's reducer gets their values."""
    divides_by_zero_deviation: bool = False
    """A group of equal rewards is divided by its standard deviation as well."""


OWN_CODE = {
    "miles": OwnCode(logs_sample_count=True, reenters_checkpoint=True, pads_rows=True),
    "slime": OwnCode(groups_by_prompt=False, drops_masked_values=False, divides_by_zero_deviation=True),
}


@dataclass(frozen=True)
class EmulatedHost:
    """One rank of a host. Its rollout process calls `train_data`; its training step calls the other methods."""

    host: Host
    groups: ParallelGroups

    @property
    def own(self) -> OwnCode:
        return OWN_CODE[self.host.name]

    def train_data(self, args: Namespace, samples: Sequence[EmulatedSample]) -> dict[str, list]:
        """Rewards through the hook or the host's own normalisation, final masks, and for each sample the unmasked tokens of its
        whole rollout."""
        hook = args.custom_reward_post_process_path
        raw, rewards = load_function(hook)(args, samples) if hook else _normalised_rewards(self.own, args, samples)
        masks = [list(s.loss_mask) if s.loss_mask is not None else [1] * s.response_length for s in samples]
        masks = [[0] * len(mask) if s.remove_sample else mask for s, mask in zip(samples, masks, strict=True)]
        rollouts = [_rollout_of(s) for s in samples]
        sums = [sum(sum(mask) for mask, other in zip(masks, rollouts, strict=True) if other == mine) for mine in rollouts]
        return {
            "tokens": [s.tokens for s in samples],
            "response_lengths": [s.response_length for s in samples],
            "rewards": rewards,
            "raw_reward": raw,
            "sample_indices": [s.index for s in samples],
            "rollout_ids": rollouts,
            "loss_masks": masks,
            "rollout_mask_sums": sums,
        }

    def loss_function(
        self,
        args: Namespace,
        batch: dict,
        logits: Tensor,  # [1, rows, V] (thd), [B, row length / cp, V] (bshd)
        *,
        num_microbatches: int,
        num_rollouts: int,
    ) -> tuple[Tensor, Tensor, dict]:  # scaled loss, num_tokens, {"keys": names, "values": [count, *metrics]}
        """What Megatron gets for a micro-batch. Not per-token: loss x M / N x dp x cp, and 1 token. Per-token: loss x cp, and all
        unmasked tokens of the whole samples; a sample without any counts as one token."""
        masks = batch["loss_masks"]
        function = partial(_policy_loss, self)
        if args.loss_type == "custom_loss":
            function = load_function(args.custom_loss_function_path)
        operands = (args, batch, logits, self.default_reducer(args, batch, masks))
        if args.recompute_loss_function:
            loss, log = checkpoint(function, *operands, use_reentrant=self.own.reenters_checkpoint)
        else:
            loss, log = function(*operands)
        if args.allgather_cp and self.groups.cp.size() > 1:
            loss = loss + 0 * logits.sum()  # a backward on each rank
        if args.calculate_per_token_loss:
            num_tokens = sum(max(int(mask.sum()), 1) for mask in masks)
            loss, count = loss * self.groups.cp.size(), num_tokens
        else:
            loss, num_tokens = loss * num_microbatches / num_rollouts * self.groups.dp_cp.size(), 1
            count = len(masks) if self.own.logs_sample_count else 0
        values = torch.tensor([count, *log.values()], dtype=torch.float32)
        return loss, torch.tensor(num_tokens), {"keys": list(log), "values": values}

    def reduce_metrics(self, logs: list[dict], args: Namespace, *, num_rollouts: int) -> dict[str, float]:
        """The reported metrics: sums over micro-batches and ranks, divided by the step's rollouts; per-token by its tokens, which
        each cp rank has counted whole. One all-reduce over dp-cp."""
        total = all_reduce_sum(sum(log["values"] for log in logs), self.groups.dp_cp)
        count, *sums = total.tolist()
        divisor = count / self.groups.cp.size() if args.calculate_per_token_loss else num_rollouts
        return {key: value / divisor for key, value in zip(logs[0]["keys"], sums, strict=True)}

    def default_reducer(
        self,
        args: Namespace,
        batch: dict,
        loss_masks: list[Tensor],  # [response_length] each, whole
    ) -> Reducer:
        """The sum of m x over this rank's tokens, divided, if not per-token, by the unmasked tokens of the sample's rollout."""
        owned = [self.owned(args, batch, sample) for sample in range(len(loss_masks))]
        masks = [mask[torch.tensor(indices, dtype=torch.int64)] for mask, indices in zip(loss_masks, owned, strict=True)]
        divisors = [1.0] * len(masks) if args.calculate_per_token_loss else batch["rollout_mask_sums"]

        def reduce(values: Tensor) -> Tensor:  # [sum of local lengths] -> 0-d
            parts = values.split([len(indices) for indices in owned])
            terms = [(p * m).sum() / max(float(d), 1.0) for p, m, d in zip(parts, masks, divisors, strict=True)]
            return torch.stack(terms).sum()

        return reduce

    def owned(self, args: Namespace, batch: dict, sample: int) -> list[int]:
        """The response indices of this rank's losses, ascending, which is the local order; zigzag under --allgather-cp too."""
        prompt, response = _prompt_and_response(batch, sample)
        chunk = _chunk_size(self._row_length(args, batch, sample), self.groups.cp.size())
        return [index for index in range(response) if self._owns(chunk, prompt + index - 1)]

    def owned_rows(
        self,
        args: Namespace,
        batch: dict,
        num_rows: int,
    ) -> list[tuple[list[int], list[int]]]:  # per sample: response indices, rows of the flattened local logits that predict them
        """The rows of this rank's logits: zigzag, or under --allgather-cp one contiguous part of all samples end to end."""
        found, start, cp_size = [], 0, self.groups.cp.size()
        for sample, total in enumerate(batch["total_lengths"]):
            prompt, response = _prompt_and_response(batch, sample)
            length = self._row_length(args, batch, sample)
            chunk = _chunk_size(length, cp_size)
            pairs = []
            for index in range(response):
                position = prompt + index - 1
                if args.allgather_cp and cp_size > 1:
                    rank, row = divmod(start + position, num_rows)
                    is_mine = rank == self.groups.cp.rank()
                else:
                    row = start + position % chunk + (chunk if position // chunk >= cp_size else 0)
                    is_mine = self._owns(chunk, position)
                if is_mine:
                    pairs.append((index, row))
            found.append(([index for index, _ in pairs], [row for _, row in pairs]))
            start += total if args.allgather_cp else length if cp_size == 1 else 2 * chunk
        return found

    def _owns(self, chunk_size: int, position: int) -> bool:
        chunk, cp_size = position // chunk_size, self.groups.cp.size()
        return self.groups.cp.rank() == (chunk if chunk < cp_size else 2 * cp_size - 1 - chunk)

    def _row_length(self, args: Namespace, batch: dict, sample: int) -> int:
        is_padded = self.own.pads_rows and args.qkv_format == "bshd"
        return batch["max_seq_lens"][sample] if is_padded else batch["total_lengths"][sample]


def _prompt_and_response(batch: dict, sample: int) -> tuple[int, int]:
    response = batch["response_lengths"][sample]
    return batch["total_lengths"][sample] - response, response


def _chunk_size(length: int, cp_size: int) -> int:
    """The size of each of 2 cp_size chunks; the last ones are padded."""
    return -(-length // (2 * cp_size))


# The host's own loss


def _policy_loss(
    host: EmulatedHost,
    args: Namespace,
    batch: dict,
    logits: Tensor,  # [1, rows, V] or [B, rows, V]
    reduce: Reducer,
) -> tuple[Tensor, dict[str, Tensor]]:  # 0-d with graph, {name: 0-d}
    """PPO's clip, or GSPO's. The hook's factory gets four positional arguments and not the batch, and the masks that a function of
    the user's at --custom-tis-function-path made."""
    masks, old = batch["loss_masks"], batch["log_probs"]
    log_probs = _response_log_probs(host, args, batch, logits)
    if args.advantage_estimator == "gspo":
        log_ratio = _sample_log_ratios(host, args, batch, log_probs, old)
    else:
        log_ratio = torch.cat(log_probs) - torch.cat(old)
    advantages, ratio = torch.cat(batch["advantages"]), log_ratio.exp()
    values = torch.maximum(-ratio * advantages, -ratio.clamp(1 - args.eps_clip, 1 + args.eps_clip_high) * advantages)
    if host.own.drops_masked_values:
        is_active = torch.cat([mask[host.owned(args, batch, sample)] for sample, mask in enumerate(masks)]).bool()
        values = torch.where(is_active, values, 0.0)
    if args.use_tis:
        lists = {name: batch[name] for name in ("rollout_log_probs", "total_lengths", "response_lengths", "loss_masks")}
        function = load_function(args.custom_tis_function_path)
        values, masks, _ = function(args=args, pg_loss=values, train_log_probs=old, **lists)
        reduce = host.default_reducer(args, batch, masks)
    if args.custom_pg_loss_reducer_function_path is not None:
        factory = load_function(args.custom_pg_loss_reducer_function_path)
        reduce = factory(batch["total_lengths"], batch["response_lengths"], masks, args.calculate_per_token_loss)
    loss = reduce(values)
    if not values.numel():
        loss = loss + 0 * logits.sum()
    return loss, {"loss": loss.detach(), "pg_loss": loss.detach()}


def _response_log_probs(
    host: EmulatedHost, args: Namespace, batch: dict, logits: Tensor
) -> list[Tensor]:  # [local response tokens] each
    """From logits / temperature, in zigzag order: under --allgather-cp the contiguous parts are summed over cp and cut again."""
    rows, taken, owned = logits.reshape(-1, logits.shape[-1]), [], []
    for sample, (indices, places) in enumerate(host.owned_rows(args, batch, len(rows))):
        prompt, _ = _prompt_and_response(batch, sample)
        labels = batch["unconcat_tokens"][sample][[prompt + index for index in indices]]
        log_softmax = torch.log_softmax(rows[places] / args.rollout_temperature, -1)
        taken.append(log_softmax.gather(-1, labels[:, None])[:, 0])
        owned.append(indices)
    if not args.allgather_cp or host.groups.cp.size() == 1:
        return taken
    whole = _whole_responses(host, batch, taken, owned)
    return [values[host.owned(args, batch, sample)] for sample, values in enumerate(whole)]


def _whole_responses(
    host: EmulatedHost,
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


def _sample_log_ratios(host: EmulatedHost, args: Namespace, batch: dict, log_probs: list[Tensor], old: list[Tensor]) -> Tensor:
    """Each local token gets the mean log-ratio of its whole sample."""
    if host.own.pads_rows and args.qkv_format == "bshd" and host.groups.cp.size() > 1:
        raise AssertionError(f"{host.host} gathers by thd slices: GSPO with bshd and context parallelism does not run")
    owned = [host.owned(args, batch, sample) for sample in range(len(log_probs))]
    difference = [new - before for new, before in zip(log_probs, old, strict=True)]
    spread = []
    for whole, mask, indices in zip(_whole_responses(host, batch, difference, owned), batch["loss_masks"], owned, strict=True):
        spread.append(((whole * mask).sum() / mask.sum().clamp(min=1)).expand(len(indices)))
    return torch.cat(spread)


class _SumOverRanks(torch.autograd.Function):
    """One all-reduce over the group in forward and one in backward."""

    @staticmethod
    def forward(ctx, values, group):
        ctx.group = group
        return all_reduce_sum(values, group)

    @staticmethod
    def backward(ctx, gradient):
        return all_reduce_sum(gradient, ctx.group), None


# The rollout process


@dataclass
class EmulatedSample:
    """What a hook of the rollout process may read of a sample."""

    group_index: int | None
    index: int | None
    response_length: int
    reward: float
    tokens: list[int] = field(default_factory=list)
    loss_mask: list[int] | None = None
    rollout_id: int | None = None
    remove_sample: bool = False

    def get_reward_value(self, args: Namespace) -> float:
        return self.reward


def _normalised_rewards(
    own: OwnCode, args: Namespace, samples: Sequence[EmulatedSample]
) -> tuple[list[float], list[float]]:  # raw, normalised
    """(Reward - mean of the prompt group) / (its standard deviation + 1e-6). Some hosts make groups of samples in their order."""
    raw = [s.get_reward_value(args) for s in samples]
    if not args.rewards_normalization:
        return raw, raw
    size = args.n_samples_per_prompt
    is_full = len(samples) == size * args.rollout_batch_size
    groups = [s.group_index for s in samples] if own.groups_by_prompt else [i // size if is_full else 0 for i in range(len(raw))]
    # By prompt, one reward of each rollout counts, and those of its other samples do not.
    rollouts = [_rollout_of(s) if own.groups_by_prompt else i for i, s in enumerate(samples)]
    normalised = []
    for reward, group in zip(raw, groups, strict=True):
        triples = zip(raw, groups, rollouts, strict=True)
        peers = torch.tensor(list({rollout: other for other, its, rollout in triples if its == group}.values()))
        centred = reward - float(peers.mean())
        if args.grpo_std_normalization and (own.divides_by_zero_deviation or (len(peers) > 1 and float(peers.std()) > 0)):
            centred /= float(peers.std()) + 1e-6
        normalised.append(centred)
    return raw, normalised


def _rollout_of(sample: EmulatedSample) -> int | None:
    return sample.index if sample.rollout_id is None else sample.rollout_id
