"""Runs cases of tests/host_cases.py on a host, emulated or real, in a rank of a pool; it must not know which of the two it has."""

from __future__ import annotations

import traceback
from argparse import Namespace
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from helpers import set_global_args, zigzag
from host_cases import ORDER, ROLLOUT_GAP, DenseStep, HostCase, host_args
from host_emulator import EmulatedHost, EmulatedSample
from host_harness import RealHost, exact_cross_entropy
from torch import Tensor

from megatron_rl.hosts.args import host_named
from megatron_rl.layout.groups import resolve_groups

ROW_LENGTH = 24  # of bshd: beyond the longest sample, a multiple of 2 cp
PADDING = 8  # a thd row is padded to a multiple


@dataclass
class StepResult:
    loss: float  # the number that the optimiser's gradient is the gradient of
    gradient: Tensor  # [all tokens, V] float64
    metrics: dict[str, float]
    num_tokens: int  # as the host told Megatron, over ranks and micro-batches
    scaled: list[float]  # this rank's scaled losses, one for each micro-batch


def run_cases(rank: int, roots: dict[str, str], cases: list[HostCase], is_exact: bool = True) -> list[StepResult | str]:
    """A result, or the traceback, for each case; roots: {host: root of its checkout}, an absent host is emulated.

    is_exact: with an fp32 cross-entropy in the place of Megatron's, which miles calls.
    """
    results = []
    with exact_cross_entropy() if is_exact else nullcontext():
        for case in cases:
            try:
                results.append(run_case(make_host(case.host, roots), case))
            except Exception:
                results.append(traceback.format_exc())
    return results


def make_host(name: str, roots: dict[str, str]):
    host, groups = host_named(name), resolve_groups()
    return RealHost(host, groups, roots[name]) if name in roots else EmulatedHost(host, groups)


def run_case(host, case: HostCase) -> StepResult:
    """One optimiser step's gradient: Megatron's scaling of the tuple, DDP's average and finalize as sums over ranks."""
    step, args, groups = case.step(), host_args(case), host.groups
    set_global_args(args)
    data = train_data(host, args, step)
    num_rollouts = len(set(data["rollout_ids"]))
    micro_batches = deal(case, groups.dp.rank(), groups.dp.size())
    gradient, loss, num_tokens, logs, scaled = torch.zeros_like(step.logits), 0.0, 0, [], []
    for samples in micro_batches:
        rows, batch = micro_batch(host, args, case, step, data, samples)
        leaf = logits_of(step.logits.float(), rows).requires_grad_()
        part, count, log = host.loss_function(args, batch, leaf, num_microbatches=len(micro_batches), num_rollouts=num_rollouts)
        scaled.append(float(part))
        part = part if args.calculate_per_token_loss else part / count.clamp(min=1) / len(micro_batches)
        part.backward()
        assert leaf.grad is not None, "a rank without a backward hangs its peers"
        assert not leaf.grad[rows < 0].any(), "padding has a gradient"
        gradient[rows[rows >= 0]] += leaf.grad[rows >= 0].double()
        loss, num_tokens, logs = loss + float(part), num_tokens + int(count), [*logs, log]
    metrics = host.reduce_metrics(logs, args, num_rollouts=num_rollouts)
    totals = torch.tensor([loss, num_tokens], dtype=torch.float64)
    for tensor in (gradient, totals):
        dist.all_reduce(tensor, group=groups.dp_cp)
    divisor = totals[1] if args.calculate_per_token_loss else groups.dp_cp.size()
    return StepResult(float(totals[0] / divisor), gradient / divisor, metrics, int(totals[1]), scaled)


def train_data(host, args: Namespace, step: DenseStep) -> dict[str, list]:
    """What the rollout process makes of the samples. A fully masked one is removed by flag, after the reward hook has run."""
    samples = [
        EmulatedSample(
            group_index=sample.group,
            index=100 + index,
            response_length=sample.response,
            reward=sample.reward,
            tokens=sample.tokens,
            loss_mask=[1] * sample.response if not any(sample.mask) else list(sample.mask),
            rollout_id=100 + sample.rollout if step.has_segments else None,
            remove_sample=not any(sample.mask),
        )
        for index, sample in enumerate(step.samples)
    ]
    return host.train_data(args, samples)


def deal(case: HostCase, dp_rank: int, dp_size: int) -> list[list[int]]:
    mine = ORDER[dp_rank::dp_size]
    size = case.size or len(mine)
    return [mine[start : start + size] for start in range(0, len(mine), size)]


def micro_batch(
    host, args: Namespace, case: HostCase, step: DenseStep, data: dict[str, list], samples: list[int]
) -> tuple[Tensor, dict]:  # [1 or B, local rows] int64 rows of the dense logits, -1 for padding; the batch
    cp_rank, cp_size = host.groups.cp.rank(), host.groups.cp.size()
    masks = {step_index: torch.tensor(mask, dtype=torch.int32) for step_index, mask in enumerate(data["loss_masks"])}
    batch = {
        "unconcat_tokens": [torch.tensor(step.samples[i].tokens) for i in samples],
        "total_lengths": [len(step.samples[i].tokens) for i in samples],
        "response_lengths": [step.samples[i].response for i in samples],
        "loss_masks": [masks[i] for i in samples],
        "rollout_mask_sums": torch.tensor([data["rollout_mask_sums"][i] for i in samples], dtype=torch.float32),
        "max_seq_lens": [ROW_LENGTH] * len(samples) if case.layout == "bshd" else None,
        **{name: None for name in ("values", "opd_reverse_kl", "packed_seq_params")},
        "ref_log_probs": [] if args.use_kl_loss else None,
        "rollout_log_probs": [] if args.use_tis or args.use_opsm or args.use_rollout_logprobs else None,
    }
    batch.update(log_probs=[], advantages=[], returns=[])
    rows = []
    for i in samples:
        sample = step.samples[i]
        length = ROW_LENGTH if case.layout == "bshd" else len(sample.tokens)
        padded = length if cp_size == 1 else -(-length // (2 * cp_size)) * 2 * cp_size
        positions = zigzag(list(range(padded)), cp_rank, cp_size)
        inside = [q for q in positions if sample.prompt - 1 <= q < len(sample.tokens) - 1]
        kept = [q + 1 - sample.prompt for q in inside]
        old = step.old_log_probs[i][kept].float()
        wave = torch.sin(torch.tensor(kept, dtype=torch.float32) + i)
        batch["log_probs"].append(old)
        for name, size in (("ref_log_probs", case.ref_gap), ("rollout_log_probs", ROLLOUT_GAP)):
            if batch[name] is not None:
                batch[name].append(old + size * wave)
        batch["advantages"].append(torch.full((len(kept),), float(data["rewards"][i])))
        batch["returns"].append(batch["advantages"][-1])
        rows.append([sample.start + q if q < len(sample.tokens) else -1 for q in positions])
    if case.layout == "bshd":
        return torch.tensor(rows), batch
    flat = [row for part in rows for row in part]
    if case.layout == "allgather" and cp_size > 1:
        flat = [step.samples[i].start + q for i in samples for q in range(len(step.samples[i].tokens))]
        flat += [-1] * (-len(flat) % (cp_size * PADDING))
        flat = flat[cp_rank * len(flat) // cp_size : (cp_rank + 1) * len(flat) // cp_size]
    return torch.tensor([[*flat, *[-1] * (-len(flat) % PADDING)]]), batch


def logits_of(table: Tensor, rows: Tensor) -> Tensor:  # [all tokens, V], [B, rows] -> [B, rows, V]
    """Padding rows hold finite junk, as a model's output at padding does."""
    return torch.where((rows < 0)[..., None], 7.5, table[rows.clamp(min=0)])
