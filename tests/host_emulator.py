"""Emulates what miles and slime do around a policy loss, to test hooks without a host. It trains nothing.

    samples -> training data -> loss of a micro-batch -> outer scaling -> (loss, num_tokens, log) for Megatron -> reported metrics

It is written from what the hosts promise their hooks, not from their code. Where there is a checkout of a host,
tests/test_host_canary.py compares the emulator with it.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from host_losses import emulated_policy_loss
from host_rank import HostRank, OwnCode, load_function
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_rl.layout.groups import all_reduce_sum


def merge_custom_config(args: Namespace, settings: Mapping[str, object] | None) -> None:
    """--custom-config-path: each key of the file becomes an attribute as it is; nothing is checked, dashes included."""
    for key, value in (settings or {}).items():
        setattr(args, key, value)


class EmulatedHost(HostRank):
    """One rank of a host. Its rollout process calls `train_data`; its training step calls the other methods."""

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
        function = partial(emulated_policy_loss, self)
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
