"""The forward_step that Megatron's schedules call, with a registered policy loss behind it; it never chooses a weight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatron_rl.config import LossAggregation, PolicyLossConfig
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.layout.groups import ParallelGroups, resolve_groups
from megatron_rl.losses import policy_loss
from megatron_rl.megatron.batch import PolicyBatch
from megatron_rl.megatron.model import model_config_of
from megatron_rl.megatron.schedule import scale_for_schedule
from megatron_rl.metrics import PolicyStatistics


@dataclass(frozen=True, slots=True)
class MicrobatchReport:
    """What one micro-batch leaves behind on the last pipeline stage; all detached, this rank's parts of sums over dp-cp."""

    policy_loss: Tensor  # 0-d
    kl_loss: Tensor | None  # 0-d
    entropy: Tensor | None  # 0-d
    num_nonfinite: Tensor  # [N] int32
    statistics: PolicyStatistics | None


class PolicyForwardStep:
    """`forward_step(data_iterator, model)` for get_forward_backward_func; the iterator yields PolicyBatch.

    After the schedule has run, `take_reports` gives the step's micro-batch reports (none before the last pipeline stage) and
    `check_finite` refuses the optimiser step after a non-finite token.
    """

    def __init__(self, config: PolicyLossConfig, *, vocab_size: int, groups: ParallelGroups | None = None):
        self.config = config
        self.vocab_size = vocab_size
        self.groups = groups
        self._reports: list[MicrobatchReport] = []

    def __call__(self, data_iterator: Iterator[PolicyBatch], model):
        batch = next(data_iterator)
        model_config = model_config_of(model)
        check_contract(self.config, model_config)
        groups = resolve_groups(model) if self.groups is None else self.groups
        extra = {} if batch.packed_seq_params is None else {"packed_seq_params": batch.packed_seq_params}
        # No labels: the last stage then returns this tensor-parallel rank's logits [B, S, V_tp], nothing gathered.
        output = model(batch.tokens, batch.position_ids, None, **extra)
        return output, partial(self.loss_func, batch, model_config, groups)

    def loss_func(self, batch: PolicyBatch, model_config, groups: ParallelGroups, logits: Tensor):
        """The 3-tuple of scale_for_schedule for logits [B, S, V_tp]."""
        config = self.config
        output = policy_loss(
            config.policy_loss,
            logits.flatten(0, 1),
            batch.labels,
            batch.old_log_probs,
            batch.advantages,
            batch.loss_mask,
            batch.cu_seqlens,
            batch.token_weights,
            clip_ratio_low=config.clip_ratio_low,
            clip_ratio_high=config.clip_ratio_high,
            temperature=config.policy_temperature,
            vocab_size=self.vocab_size,
            token_counts=batch.token_counts,
            tp_group=groups.tp,
            cp_group=groups.cp,
            metrics=config.policy_metrics,
            inplace=True,  # the logits are the head's output and nobody else's
            backend=config.policy_loss_backend,
            advantages_per="sample",
            ref_log_probs=batch.ref_log_probs,
            kl_coefficient=config.kl_coefficient,
            entropy_coefficient=config.entropy_coefficient,
            regularizer_weights=batch.regularizer_weights,
        )
        self._reports.append(
            MicrobatchReport(output.policy_loss, output.kl_loss, output.entropy, output.num_nonfinite, output.metrics)
        )
        return scale_for_schedule(
            output.loss,
            batch.context.num_microbatches,
            totals=batch.context.totals,
            num_local_tokens=batch.loss_mask.sum(),
            config=model_config,
            groups=groups,
            gradient_divisor=config.gradient_divisor,
        )

    def take_reports(self) -> list[MicrobatchReport]:
        """The reports since the last call, in the order of the losses."""
        reports, self._reports = self._reports, []
        return reports


def make_forward_step(config: PolicyLossConfig, *, vocab_size: int, groups: ParallelGroups | None = None) -> PolicyForwardStep:
    """A forward_step for GPTModel, packed or padded batches, any layout.

    vocab_size: the true vocabulary; padded columns beyond it take no part. groups None: taken from the model at each call.
    """
    return PolicyForwardStep(config, vocab_size=vocab_size, groups=groups)


def check_contract(config: PolicyLossConfig, model_config) -> None:
    """calculate_per_token_loss is for token_mean alone, also where a model's config was flipped after parsing."""
    if model_config.calculate_per_token_loss and config.loss_aggregation != LossAggregation.TOKEN_MEAN:
        raise ConfigError(
            f"--loss-aggregation {config.loss_aggregation} with calculate_per_token_loss=True in the model's config: Megatron "
            "divides by the step's tokens, which is token_mean. Remove --calculate-per-token-loss, or choose token_mean"
        )


def check_finite(reports: list[MicrobatchReport]) -> None:
    """Raises DataError when a micro-batch held a non-finite unmasked token. Call it before the optimiser step.

    On the CPU the loss has raised already; on CUDA this is the step's one synchronisation.
    """
    if not reports:
        return
    counts = torch.stack([report.num_nonfinite.sum() for report in reports]).tolist()
    bad = {index: number for index, number in enumerate(counts) if number}
    if bad:
        raise DataError(
            f"non-finite unmasked tokens in micro-batches {bad} (micro-batch: tokens): the optimiser step is refused. Look at "
            "logits, old_log_probs and advantages of those samples"
        )
