"""Emulates what miles and slime do around a policy loss, and runs a step on it, or on a checkout, in this rank.

    samples -> training data -> loss of a micro-batch -> outer scaling -> (loss, num_tokens, log) for Megatron -> reported metrics

It is written from what the hosts promise their hooks, not from their code, and has of their loss PPO's clip on packed rows alone.
With a checkout of a host tests/test_host_contracts.py compares the emulator with it.
"""

from __future__ import annotations

import math
import traceback
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib import import_module

import torch
from helpers import counted_collectives, set_global_args, zigzag
from host_checkouts import RealHost, exact_cross_entropy
from host_steps import REWARDS, Case, RolloutSample, Sample, host_batch, host_logits, micro_batches
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_rl.hosts.args import Host, host_named
from megatron_rl.layout.groups import ParallelGroups, all_reduce_sum, resolve_groups

Reducer = Callable[[Tensor], Tensor]


def load_function(path: str):
    """The object behind a dotted path: everything after the last dot is an attribute, whatever characters it has."""
    module, _, attribute = path.rpartition(".")
    return getattr(import_module(module), attribute)


@dataclass(frozen=True)
class EmulatedHost:
    """One rank of a host. Its rollout process calls `train_data`; its training step calls the other methods."""

    host: Host
    groups: ParallelGroups

    @property
    def is_miles(self) -> bool:
        return self.host.name == "miles"

    def train_data(self, args: Namespace, samples: Sequence[RolloutSample]) -> dict[str, list]:
        """Rewards through the hook or as they are, final masks, and for each sample the unmasked tokens of its whole rollout."""
        assert not args.rewards_normalization, "the emulator has no normalisation of its own"
        raw, hook = [sample.reward for sample in samples], args.custom_reward_post_process_path
        raw, rewards = load_function(hook)(args, samples) if hook else (raw, raw)
        masks = [list(s.loss_mask) if s.loss_mask is not None else [1] * s.response_length for s in samples]
        masks = [[0] * len(mask) if s.remove_sample else mask for s, mask in zip(samples, masks, strict=True)]
        rollouts = [s.index if s.rollout_id is None else s.rollout_id for s in samples]
        sums = [sum(sum(mask) for mask, other in zip(masks, rollouts, strict=True) if other == mine) for mine in rollouts]
        return {
            "tokens": [s.tokens for s in samples],
            "response_lengths": [s.response_length for s in samples],
            "rewards": rewards,
            "raw_reward": raw,
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
        masks, function = batch["loss_masks"], self.policy_loss
        if args.loss_type == "custom_loss":
            function = load_function(args.custom_loss_function_path)
        operands = (args, batch, logits, self.default_reducer(args, batch))
        if args.recompute_loss_function:
            loss, log = checkpoint(function, *operands, use_reentrant=self.is_miles)
        else:
            loss, log = function(*operands)
        assert loss.dim() == 0 and loss.requires_grad
        if args.allgather_cp and self.groups.cp.size() > 1:
            loss = loss + 0 * logits.sum()  # a backward on each rank
        if args.calculate_per_token_loss:
            num_tokens = sum(max(int(mask.sum()), 1) for mask in masks)
            loss, count = loss * self.groups.cp.size(), num_tokens
        else:
            loss, num_tokens = loss * num_microbatches / num_rollouts * self.groups.dp_cp.size(), 1
            count = len(masks) if self.is_miles else 0
        assert all(value.dim() == 0 and value.dtype == torch.float32 for value in log.values()), "the host stacks them"
        values = torch.stack([torch.tensor(float(count)), *log.values()]).detach()
        return loss, torch.tensor(num_tokens), {"keys": list(log), "values": values}

    def reduce_metrics(self, logs: list[dict], args: Namespace, *, num_rollouts: int) -> dict[str, float]:
        """The reported metrics: sums over micro-batches and ranks, divided by the step's rollouts; per-token by its tokens, which
        each cp rank has counted whole. One all-reduce over dp-cp."""
        assert all(log["keys"] == logs[0]["keys"] for log in logs)
        total = all_reduce_sum(sum(log["values"] for log in logs), self.groups.dp_cp)
        count, *sums = total.tolist()
        divisor = count / self.groups.cp.size() if args.calculate_per_token_loss else num_rollouts
        return {key: value / divisor for key, value in zip(logs[0]["keys"], sums, strict=True)}

    def default_reducer(self, args: Namespace, batch: dict) -> Reducer:
        """The sum of m x over this rank's tokens, divided, if not per-token, by the unmasked tokens of the sample's rollout."""
        masks = [mask[indices] for mask, (indices, _) in zip(batch["loss_masks"], self.own_tokens(batch), strict=True)]
        divisors = [1.0] * len(masks) if args.calculate_per_token_loss else batch["rollout_mask_sums"]

        def reduce(values: Tensor) -> Tensor:  # [sum of local lengths] -> 0-d
            parts = values.split([len(mask) for mask in masks])
            terms = [(p * m).sum() / max(float(d), 1.0) for p, m, d in zip(parts, masks, divisors, strict=True)]
            return torch.stack(terms).sum()

        return reduce

    def own_tokens(self, batch: dict) -> list[tuple[list[int], list[int]]]:
        """Of each sample the response indices of this rank's tokens, and the packed rows that predict them."""
        found, start, cp = [], 0, self.groups.cp
        for total, response in zip(batch["total_lengths"], batch["response_lengths"], strict=True):
            padded = total if cp.size() == 1 else -(-total // (2 * cp.size())) * 2 * cp.size()
            line, first = zigzag(list(range(padded)), cp.rank(), cp.size()), total - response - 1
            own = [(q - first, start + row) for row, q in enumerate(line) if first <= q < total - 1]
            found.append(([index for index, _ in own], [row for _, row in own]))
            start += len(line)
        return found

    def policy_loss(
        self, args: Namespace, batch: dict, logits: Tensor, reduce: Reducer
    ) -> tuple[Tensor, dict[str, Tensor]]:  # 0-d with graph, {name: 0-d}
        """The host's own: PPO's clip. The hook's factory gets four positional arguments and not the batch."""
        assert args.advantage_estimator == "grpo" and vars(args).get("qkv_format", "thd") == "thd" and not args.allgather_cp
        taken = []
        for (indices, rows), tokens, response in zip(
            self.own_tokens(batch), batch["unconcat_tokens"], batch["response_lengths"], strict=True
        ):
            labels = tokens[-response:][indices]
            log_softmax = torch.log_softmax(logits[0, rows] / args.rollout_temperature, -1)
            taken.append(log_softmax.gather(-1, labels[:, None])[:, 0])
        advantages, ratio = torch.cat(batch["advantages"]), (torch.cat(taken) - torch.cat(batch["log_probs"])).exp()
        values = torch.maximum(-ratio * advantages, -ratio.clamp(1 - args.eps_clip, 1 + args.eps_clip_high) * advantages)
        if args.custom_pg_loss_reducer_function_path is not None:
            factory = load_function(args.custom_pg_loss_reducer_function_path)
            lengths = batch["total_lengths"], batch["response_lengths"]
            with counted_collectives() as calls:
                reduce = factory(*lengths, batch["loss_masks"], args.calculate_per_token_loss)
                loss = reduce(values)
            assert not calls, "a reducer launches no collective"
        else:
            loss = reduce(values)
        if not values.numel():
            loss = loss + 0 * logits.sum()
        reported = loss.detach().float()
        return loss, {"loss": reported, "pg_loss": reported}


# A step in this rank, which must not know whether the host is emulated


@dataclass
class StepResult:
    loss: float  # the number that the optimiser's gradient is the gradient of
    gradient: Tensor  # [all tokens, V] float64
    metrics: dict[str, float]
    num_tokens: int  # as the host told Megatron, over ranks and micro-batches
    scaled: list[float]  # this rank's scaled losses, one for each micro-batch


def run_cases(rank: int, roots: dict[str, str], cases: list[Case]) -> list[StepResult | str]:
    """A result, or the traceback, for each case; roots: {host: root of its checkout}, an absent host is emulated.

    With an fp32 cross-entropy in the place of Megatron's, which miles calls."""
    results = []
    with exact_cross_entropy() if roots else nullcontext():
        for case in cases:
            try:
                results.append(run_case(make_host(case.host, roots), case))
            except Exception:
                results.append(traceback.format_exc())
    return results


def make_host(name: str, roots: dict[str, str]):
    host, groups = host_named(name), resolve_groups()
    return RealHost(host, groups, roots[name]) if name in roots else EmulatedHost(host, groups)


def run_case(host, case: Case) -> StepResult:
    """One optimiser step's gradient: Megatron's scaling of the tuple, DDP's average and finalize as sums over ranks."""
    args, groups = case.args(), host.groups
    set_global_args(args)
    samples, num_rollouts = trained_samples(host, args, case)
    is_narrow = isinstance(host, RealHost) or args.policy_loss_backend == "triton"
    dtype = torch.float32 if is_narrow else torch.float64
    # The last row stands where nothing may be read. The hosts read it, and add 0 x the sum of contiguous rows.
    junk = math.nan if case.has_our_loss and not args.allgather_cp else 7.5
    rows = [*(sample.logits for sample in samples), torch.full((1, samples[0].logits.shape[1]), junk)]
    table = torch.cat(rows).to(dtype).requires_grad_()
    parts = micro_batches(case, case.size or len(samples), groups.dp.rank(), groups.dp.size())
    loss, num_tokens, logs, scaled = 0.0, 0, [], []
    for numbers in parts:
        batch, logits = micro_batch(host, case, samples, numbers, table)
        part, count, log = host.loss_function(args, batch, logits, num_microbatches=len(parts), num_rollouts=num_rollouts)
        scaled.append(float(part.detach()))
        part = part if args.calculate_per_token_loss else part / count.clamp(min=1) / len(parts)
        part.backward()
        loss, num_tokens, logs = loss + float(part.detach()), num_tokens + int(count), [*logs, log]
    assert table.grad is not None, "a rank without a backward hangs its peers"
    assert not table.grad[-1].any(), "padding has a gradient"
    metrics = host.reduce_metrics(logs, args, num_rollouts=num_rollouts)
    totals = all_reduce_sum(torch.tensor([loss, num_tokens], dtype=torch.float64), groups.dp_cp)
    gradient = all_reduce_sum(all_reduce_sum(table.grad[:-1].double(), groups.dp_cp), groups.tp)
    divisor = totals[1] if args.calculate_per_token_loss else groups.dp_cp.size()
    return StepResult(float(totals[0] / divisor), gradient / divisor, metrics, int(totals[1]), scaled)


def micro_batch(host, case: Case, samples: list[Sample], numbers: list[int], table: Tensor) -> tuple[dict, Tensor]:
    """The host's batch of these samples, and this rank's part of their logits. table: rows of all samples, and one of junk."""
    groups, own = host.groups, [samples[number] for number in numbers]
    *leaves, junk = table.split([*(sample.total for sample in samples), 1])
    place = (groups.cp.rank(), groups.cp.size())
    logits = host_logits(case, own, samples, [leaves[number] for number in numbers], *place, junk[0])
    if groups.tp.size() > 1:
        logits = logits.chunk(groups.tp.size(), -1)[groups.tp.rank()]
    return host_batch(case, own, samples, *place), logits


def trained_data(host, args: Namespace, case: Case) -> dict[str, list]:
    return host.train_data(args, [rollout_sample(number, one, case) for number, one in enumerate(case.samples())])


def trained_samples(host, args: Namespace, case: Case) -> tuple[list[Sample], int]:
    """The samples with the advantages that are made of their rewards, and the number of rollouts."""
    data, found = trained_data(host, args, case), []
    for one, mask, reward in zip(case.samples(), data["loss_masks"], data["rewards"], strict=True):
        assert one.mask == mask
        advantages = torch.where(torch.tensor(mask) == 1, float(reward), one.values["advantages"])
        found.append(replace(one, values=one.values | {"advantages": advantages}))
    return found, len(set(data["rollout_ids"]))


def rollout_sample(number: int, sample: Sample, case: Case) -> RolloutSample:
    """A fully masked one is removed by flag, after the reward hook has run."""
    is_masked = not any(sample.mask)
    return RolloutSample(
        group_index=sample.group,
        index=100 + number,
        response_length=len(sample.mask),
        reward=REWARDS[number],
        tokens=sample.tokens.tolist(),
        loss_mask=[1] * len(sample.mask) if is_masked else list(sample.mask),
        rollout_id=100 + sample.rollout if case.rollouts is not None else None,
        remove_sample=is_masked,
    )
