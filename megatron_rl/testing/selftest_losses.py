"""Tests the losses alone, on the ranks that are there and without Megatron-Core: one linear layer, with logits and fused.

No row runs the schedule, DDP or the optimiser: gradients are added over ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.aggregation import count_step, regularizer_weights, sample_token_weights
from megatron_rl.config import CorrectionSettings
from megatron_rl.errors import ConfigError
from megatron_rl.layout.context_parallel import local_positions
from megatron_rl.layout.groups import ParallelGroups, all_reduce_sum
from megatron_rl.losses import linear_policy_loss, policy_loss
from megatron_rl.losses.keywords import LossKeywords
from megatron_rl.megatron.ranks import COLLECTIVE_TIMEOUT
from megatron_rl.testing.comparison import compare
from megatron_rl.testing.layout_step import Layout, RankStep, Shard, StepSample
from megatron_rl.testing.rank_groups import make_groups
from megatron_rl.testing.reference import SHAPES, old_log_probs_of, ragged_samples
from megatron_rl.testing.selftest_rows import (
    FUSED,
    Case,
    Choice,
    SelftestRow,
    Setting,
    cases_here,
    complete_layout,
    guarded,
    named_sizes,
    refuse_tf32,
    row_of,
)
from megatron_rl.testing.selftest_terms import OF_STEPS, Truths, truth_of_terms

ALONE = (
    "schedule, DDP, optimiser, the per-token contract and counts without dropped tokens: Megatron-Core is not installed, "
    "pip install '/path/to/megatron_rl[megatron]'"
)
HIDDEN_SIZE, TRUE_VOCAB_SIZE = 16, 61
WEIGHT, HIDDEN = "output_layer.weight", "hidden states"


def run_losses(
    asked: Layout,
    world_size: int,
    on_start: Callable[[Setting], None] = lambda setting: None,
    *,
    interprets_triton: bool = False,
    choice: Choice = Choice(),  # noqa: B008  # frozen
    on_row: Callable[[str], None] = lambda name: None,
) -> Iterator[SelftestRow]:
    """As run_selftest, for ranks without Megatron-Core. Raises ConfigError for a layout that needs Megatron."""
    if asked.pipeline > 1:
        raise ConfigError(
            f"--pipeline-model-parallel-size {asked.pipeline}: stages are Megatron-Core's, which is not installed: pip install "
            "'/path/to/megatron_rl[megatron]', or leave the flag out to test the losses alone"
        )
    layout = complete_layout(asked, world_size)
    switches = [name for name in ("sequence_parallel", "distributed_optimizer") if getattr(asked, name)]
    layout = replace(layout, packed=True, **dict.fromkeys(switches, False))
    device = join_ranks()
    refuse_tf32(device)
    everyone = dist.new_group(backend="gloo") if world_size > 1 else None
    groups = make_groups(dist.get_rank(), layout, backend=dist.get_backend())
    head = SelftestHead(ragged_samples(num_samples=max(len(SHAPES), layout.data * layout.num_microbatches)), layout.tensor)
    cases, without_triton = cases_here(device, interprets=interprets_triton)
    cases = [case for case in choice.of(cases) if case.term not in OF_STEPS]
    choice.check(cases)
    truths = head.truths(cases)
    sizes = named_sizes(layout, head.samples)
    left_out = (ALONE, *(name.replace("_", " ") + ": Megatron's" for name in switches), *without_triton)
    on_start(Setting(layout, device.type, dist.get_backend(), None, sizes, left_out))
    for case in cases:
        make = partial(measured, case=case, head=head, rank=HeadRank(layout, groups, device), truths=truths, sizes=sizes)
        yield guarded(str(case), everyone, make, on_row)


def measured(name: str, case: Case, head: SelftestHead, rank: HeadRank, truths: Truths, sizes: dict[str, int]) -> SelftestRow:
    of_loss = truths[case.policy_loss, case.term]
    found = rank.step(head, case, of_loss.samples)
    return row_of(name, compare(found, of_loss.by_aggregation[case.aggregation], rank.groups), sizes)


def join_ranks() -> torch.device:
    """NCCL with CUDA, else gloo, from torchrun's environment or for one process."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    if "RANK" not in os.environ:
        os.environ.update(alone)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=COLLECTIVE_TIMEOUT)
    return device


class SelftestHead:
    """Hidden states of all tokens of the step and the weight of an output layer, in float64 and equal on all ranks."""

    def __init__(self, samples: Sequence[StepSample], tensor_size: int):
        self.samples = list(samples)
        lengths = [len(sample.tokens) for sample in samples]
        self.starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
        generator = torch.Generator().manual_seed(11)
        self.hidden = torch.randn(sum(lengths), HIDDEN_SIZE, generator=generator, dtype=torch.float64)
        rows = tensor_size * -(-64 // tensor_size)  # padded, as Megatron pads a vocabulary
        self.weight = torch.randn(rows, HIDDEN_SIZE, generator=generator, dtype=torch.float64) / HIDDEN_SIZE**0.5

    def truths(self, cases: Sequence[Case]) -> Truths:
        """The steps and truths of these rows, without the code under test."""
        hidden, weight = self.hidden.clone().requires_grad_(), self.weight.clone().requires_grad_()
        rows = hidden @ weight[:TRUE_VOCAB_SIZE].T
        logits = [
            rows[end - len(sample.loss_mask) - 1 : end - 1] for end, sample in zip(self.starts[1:], self.samples, strict=True)
        ]
        return truth_of_terms(self.samples, logits, {WEIGHT: weight, HIDDEN: hidden}, (case.of_truth for case in cases))


class HeadRank:
    """One rank's step with the head: its micro-batches, its slices, its shard of the vocabulary."""

    def __init__(self, layout: Layout, groups: ParallelGroups, device: torch.device):
        self.layout, self.groups, self.device = layout, groups, device

    def step(self, head: SelftestHead, case: Case, samples: Sequence[StepSample]) -> RankStep:
        """The loss and the gradients by weight shard and hidden states, added over micro-batches, dp and cp.

        Communication: count_step's; the loss's own; an all-reduce of the gradients over dp-cp, as DDP's without its mean; and over
        tp one of the hidden states' gradient, as in an output layer's backward.
        """
        layout, groups, config = self.layout, self.groups, case.config
        mine = list(range(len(samples)))[groups.dp.rank() :: layout.data]
        masks = [torch.tensor(samples[index].loss_mask) for index in mine]
        totals, counts, prompt_counts = count_step(masks, [samples[index].prompt_id for index in mine], groups.dp)
        weights = sample_token_weights(
            config.loss_aggregation, counts, totals, prompt_token_counts=prompt_counts, divisor=config.loss_aggregation_divisor
        )
        of_terms = regularizer_weights(counts, totals)
        rows = head.weight.shape[0] // layout.tensor
        shard = slice(groups.tp.rank() * rows, (groups.tp.rank() + 1) * rows)
        weight = head.weight[shard].to(self.device, torch.float32).requires_grad_()
        hidden = head.hidden.to(self.device, torch.float32).requires_grad_()
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        for index in range(layout.num_microbatches):
            chosen = slice(index, None, layout.num_microbatches)
            part = self._part(head, case, samples, mine[chosen], hidden, weight, weights[chosen], of_terms[chosen], counts[chosen])
            part.backward()
            loss += part.detach()
        of_hidden = gradient_of(hidden) if case.head == FUSED else all_reduce_sum(gradient_of(hidden), groups.tp)
        gradients: dict[str, tuple[int | None, Tensor]] = {WEIGHT: (0, gradient_of(weight)), HIDDEN: (None, of_hidden)}
        shards = {
            name: Shard(dim, groups.tp.rank(), groups.tp.size(), all_reduce_sum(gradient, groups.dp_cp).double().cpu())
            for name, (dim, gradient) in gradients.items()
        }
        return RankStep(float(all_reduce_sum(loss, groups.dp_cp)), [shards], None, {}, {})

    def _part(
        self,
        head: SelftestHead,
        case: Case,
        samples: Sequence[StepSample],
        mine: Sequence[int],
        hidden: Tensor,  # [tokens of all samples, H]
        weight: Tensor,  # [V_tp, H]
        weights: Tensor,  # [N]
        weights_of_terms: Tensor,  # [N]
        counts: Tensor,  # [N]
    ) -> Tensor:  # 0-d: this rank's part of one micro-batch
        rows, labels, masks, sizes = [], [], [], [0]
        old: list[Tensor] = []
        rollout: list[Tensor] = []
        reference: list[Tensor] = []
        for index in mine:
            sample, length = samples[index], len(samples[index].tokens)
            order = local_positions(length, self.groups.cp.rank(), self.layout.context)
            place = order.clamp(max=length - 1)  # padding repeats the last row, which predicts nothing
            prompt = length - len(sample.loss_mask)
            rows.append(head.starts[index] + place)
            labels.append(torch.tensor([*sample.tokens[1:], 0])[place])
            masks.append(torch.tensor([0] * (prompt - 1) + list(sample.loss_mask) + [0])[place])
            for values, found in (
                (old, old_log_probs_of(sample)),
                (rollout, sample.rollout_log_probs),
                (reference, sample.ref_log_probs),
            ):
                if found is not None:
                    values.append(torch.tensor([0.0] * (prompt - 1) + found + [0.0])[place])
            sizes.append(order.numel())
        place = torch.cat(rows).to(self.device)
        options: LossKeywords = {
            "clip_ratio_low": case.config.clip_ratio_low,
            "clip_ratio_high": case.config.clip_ratio_high,
            "loss_parameters": case.config.loss_parameters,
            "temperature": case.config.policy_temperature,
            "rollout_log_probs": torch.cat(rollout).to(self.device) if rollout else None,
            "ref_log_probs": torch.cat(reference).to(self.device) if reference else None,
            "correction": CorrectionSettings.of(case.config),
            "kl_coefficient": case.config.kl_coefficient,
            "kl_estimator": case.config.kl_estimator,
            "entropy_coefficient": case.config.entropy_coefficient,
            "regularizer_weights": weights_of_terms.to(self.device),
            "backend": case.backend,
            "advantages_per": "sample",
            "vocab_size": TRUE_VOCAB_SIZE,
            "token_counts": counts.to(self.device),
            "metrics": "none",
            "tp_group": self.groups.tp,
            "cp_group": self.groups.cp,
            "check_ranks": True,
        }
        inputs = (
            torch.cat(labels).to(self.device),
            torch.cat(old).to(self.device),
            torch.tensor([samples[index].advantage for index in mine]).to(self.device),
            torch.cat(masks).bool().to(self.device),
            torch.tensor(sizes).cumsum(0).to(torch.int32).to(self.device),
            weights.to(self.device),
        )
        if case.head == FUSED:
            return linear_policy_loss(case.policy_loss, hidden[place], weight, *inputs, **options).loss
        return policy_loss(case.policy_loss, hidden[place] @ weight.T, *inputs, **options).loss


def gradient_of(tensor: Tensor) -> Tensor:
    """The gradient; zeros where no micro-batch has reached the tensor."""
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
