"""The selftest's losses alone, without Megatron-Core: one linear layer, with logits and fused, on the ranks that are there.

Nothing runs the schedule, DDP or the optimiser: gradients are added over ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.aggregation import regularizer_weights, sample_token_weights
from megatron_rl.errors import ConfigError
from megatron_rl.layout.groups import all_reduce_sum
from megatron_rl.losses import linear_policy_loss, policy_loss
from megatron_rl.losses.settings import LossKeywords
from megatron_rl.megatron.ranks import join_ranks
from megatron_rl.registries.correction_settings import CorrectionSettings
from megatron_rl.step_counts import count_step
from megatron_rl.testing.comparison import compare
from megatron_rl.testing.layout_step import Layout, RankStep, Shard, StepSample
from megatron_rl.testing.loss_batch import StepRows
from megatron_rl.testing.loss_property import make_groups
from megatron_rl.testing.model_shapes import ModelShape
from megatron_rl.testing.reference import SHAPES, old_log_probs_of, ragged_samples
from megatron_rl.testing.selftest_bench import Bench, Measured, complete_layout
from megatron_rl.testing.selftest_terms import FUSED, Case, Truths, truth_of_terms

ALONE = (
    "schedule, DDP, optimiser, the per-token contract and counts without dropped tokens: Megatron-Core is not installed, "
    "pip install '/path/to/megatron_rl[megatron]'"
)
HIDDEN_SIZE, TRUE_VOCAB_SIZE = 16, 61
WEIGHT, HIDDEN = "output_layer.weight", "hidden states"


class LossesAlone(Bench):
    """Hidden states of all tokens of the step and the weight of an output layer, in float64 and equal on all ranks. Raises
    ConfigError for a layout that needs Megatron."""

    def __init__(self, asked: Layout, world_size: int, *, has_experts: bool = False, shape: ModelShape | None = None):
        if shape is not None:
            raise ConfigError(
                f"--model-like {shape.name} needs Megatron-Core, which is not installed: pip install "
                "'/path/to/megatron_rl[megatron]', or leave the flag out to test the losses alone"
            )
        if has_experts:
            raise ConfigError("experts need megatron-core, which is not installed: without it the losses alone are tested")
        if asked.pipeline > 1:
            raise ConfigError(
                f"--pipeline-model-parallel-size {asked.pipeline}: stages are Megatron-Core's, which is not installed: pip install "
                "'/path/to/megatron_rl[megatron]', or leave the flag out to test the losses alone"
            )
        layout = complete_layout(asked, world_size)
        switches = [name for name in ("sequence_parallel", "distributed_optimizer") if getattr(asked, name)]
        self.layout = replace(layout, packed=True, sequence_parallel=False, distributed_optimizer=False)
        self.left_out = (ALONE, *(name.replace("_", " ") + ": Megatron's" for name in switches))
        self.cuts = {}
        self.device = join_ranks()
        self.everyone = dist.new_group(backend="gloo") if world_size > 1 else None
        self.groups = make_groups(dist.get_rank(), self.layout, backend=dist.get_backend())
        self.samples = ragged_samples(num_samples=max(len(SHAPES), self.layout.data * self.layout.num_microbatches))
        self.rows = StepRows(self.samples)
        generator = torch.Generator().manual_seed(11)
        self.hidden = torch.randn(len(self.rows.labels), HIDDEN_SIZE, generator=generator, dtype=torch.float64)
        columns = self.layout.tensor * -(-64 // self.layout.tensor)  # padded, as Megatron pads a vocabulary
        self.weight = torch.randn(columns, HIDDEN_SIZE, generator=generator, dtype=torch.float64) / HIDDEN_SIZE**0.5

    def prepare(self, cases: Sequence[Case]) -> None:
        hidden, weight = self.hidden.clone().requires_grad_(), self.weight.clone().requires_grad_()
        rows = hidden @ weight[:TRUE_VOCAB_SIZE].T
        ends = zip(self.rows.starts[1:], self.samples, strict=True)
        logits = [rows[end - len(sample.loss_mask) - 1 : end - 1] for end, sample in ends]
        leaves = {WEIGHT: weight, HIDDEN: hidden}
        self.truths: Truths = truth_of_terms(self.samples, logits, leaves, (case.of_truth for case in cases))

    def loss(self, case: Case) -> Measured:
        of_loss = self.truths[case.policy_loss, case.term]
        found = self.step(case, of_loss.samples)
        return {"": compare(found, of_loss.by_aggregation[case.aggregation], self.groups)}

    def step(self, case: Case, samples: Sequence[StepSample]) -> RankStep:
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
        columns = self.weight.shape[0] // layout.tensor
        shard = slice(groups.tp.rank() * columns, (groups.tp.rank() + 1) * columns)
        weight = self.weight[shard].to(self.device, torch.float32).requires_grad_()
        hidden = self.hidden.to(self.device, torch.float32).requires_grad_()
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        for index in range(layout.num_microbatches):
            chosen = slice(index, None, layout.num_microbatches)
            part = self._part(case, samples, mine[chosen], hidden, weight, weights[chosen], of_terms[chosen], counts[chosen])
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
        case: Case,
        samples: Sequence[StepSample],
        mine: Sequence[int],
        hidden: Tensor,  # [tokens of all samples, H]
        weight: Tensor,  # [V_tp, H]
        weights: Tensor,  # [N]
        weights_of_terms: Tensor,  # [N]
        counts: Tensor,  # [N]
    ) -> Tensor:  # 0-d: this rank's part of one micro-batch
        rows, _, cu_seqlens = self.rows.slices(mine, self.groups)

        def column(of_responses: Sequence[Sequence[float] | None]) -> Tensor | None:  # [T]; None where the samples have none
            given = [values for values in of_responses if values is not None]
            return self.rows.column(given)[rows].to(self.device) if given else None

        options: LossKeywords = {
            "clip_ratio_low": case.config.clip_ratio_low,
            "clip_ratio_high": case.config.clip_ratio_high,
            "loss_parameters": case.config.loss_parameters,
            "temperature": case.config.policy_temperature,
            "rollout_log_probs": column([sample.rollout_log_probs for sample in samples]),
            "ref_log_probs": column([sample.ref_log_probs for sample in samples]),
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
            "cp_layout": "zigzag",  # of local_positions
            "check_ranks": True,
        }
        inputs = (
            self.rows.labels[rows].to(self.device),
            column([old_log_probs_of(sample) for sample in samples]),
            torch.tensor([samples[index].advantage for index in mine]).to(self.device),
            self.rows.loss_mask[rows].to(self.device),
            cu_seqlens.to(self.device),
            weights.to(self.device),
        )
        place = rows.to(self.device)
        if case.head == FUSED:
            return linear_policy_loss(case.policy_loss, hidden[place], weight, *inputs, **options).loss
        return policy_loss(case.policy_loss, hidden[place] @ weight.T, *inputs, **options).loss


def gradient_of(tensor: Tensor) -> Tensor:
    """The gradient; zeros where no micro-batch has reached the tensor."""
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
