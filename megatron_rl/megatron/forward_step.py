"""The forward_step that Megatron's schedules call, with a registered policy loss. It computes no weight."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from megatron_rl.aggregation import get_loss_aggregation
from megatron_rl.aggregation_record import TOKEN_MEAN
from megatron_rl.config import GradientDivisor, PolicyLossConfig, Route
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.layout.agreement import checks_microbatch
from megatron_rl.layout.groups import Group, ParallelGroups, resolve_groups
from megatron_rl.layout.sampling_support import SamplingSupport
from megatron_rl.losses.corrections import CorrectionSettings, needs_rollout_log_probs
from megatron_rl.megatron.attached import check_attached
from megatron_rl.megatron.batch import PolicyBatch
from megatron_rl.megatron.head import HeadInputs, HeadSettings, is_free_in_forward, rows_of, run_model
from megatron_rl.megatron.model import model_config_of
from megatron_rl.megatron.multi_token import MultiTokenLoss, further_tokens, multi_token_loss, multi_token_problems
from megatron_rl.megatron.router_losses import prepare_routers
from megatron_rl.megatron.routing import RouteChecker
from megatron_rl.megatron.schedule import ScheduledLoss, delivered_factor, scale_for_schedule
from megatron_rl.metrics.further import rollout_statistics
from megatron_rl.metrics.policy import PolicyStatistics
from megatron_rl.metrics.step import report_pairs
from megatron_rl.ops.assumed_scale import AssumedScale
from megatron_rl.policy_loss import linear_policy_loss, policy_loss
from megatron_rl.policy_loss.api import PolicyLossOutput
from megatron_rl.policy_loss.settings import LossKeywords
from megatron_rl.validation.auxiliary_losses import auxiliary_loss_problems
from megatron_rl.validation.model_settings import model_problems

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig


@dataclass(frozen=True, slots=True)
class MicrobatchReport:
    """The results of one micro-batch on the last pipeline stage: detached, this rank's parts of sums over dp-cp."""

    policy_loss: Tensor  # 0-d
    kl_loss: Tensor | None  # 0-d
    entropy: Tensor | None  # 0-d
    num_nonfinite: Tensor  # [N] int32; with multi-token prediction one more, of its layers
    statistics: PolicyStatistics | None
    mtp_loss: Tensor | None = None  # 0-d, of multi-token prediction without its factor; None where it is not trained


class PolicyForwardStep:
    """`forward_step(data_iterator, model)` of GPTModel for get_forward_backward_func, for packed or padded batches and any layout.

    The iterator yields PolicyBatch. With fused_lm_head_loss the model computes no logits. After the schedule has run,
    `take_reports` returns the reports of the micro-batches (none before the last pipeline stage), and `check_finite` raises if a
    token was not finite, before the optimiser step.

    Args:
        config: the settings of the loss.
        vocab_size: columns of the vocabulary without padding.
        groups: None: the model's process groups, read at each call.
        reports_metrics: add metrics.step.report_pairs to the schedule's report, for Megatron's train_step, which reduces them.
    Communication: none here; a call runs the collectives of the model and of policy_loss or linear_policy_loss.
    Raises: nothing here; a call raises what the loss and scale_for_schedule raise, and ConfigError where the model's config does
        not fit the settings.
    """

    def __init__(
        self, config: PolicyLossConfig, *, vocab_size: int, groups: ParallelGroups | None = None, reports_metrics: bool = False
    ):
        self.config = config
        self.vocab_size = vocab_size
        self.groups = groups
        self.reports_metrics = reports_metrics
        self.route_checker: RouteChecker | None = None
        self.announces_factor = True
        """Whether the loss of logits is told what backward multiplies it with. False: a wrong factor is measured, and no error."""
        self._assumed = AssumedScale()  # where another grad_scale_func than Megatron's hides the factor
        self._reports: list[MicrobatchReport] = []
        self._num_microbatches: weakref.WeakKeyDictionary[Group, int] = weakref.WeakKeyDictionary()

    def __call__(self, data_iterator: Iterator[PolicyBatch], model: nn.Module) -> tuple[Tensor, Callable[[Tensor], ScheduledLoss]]:
        batch = next(data_iterator)
        model_config = model_config_of(model)
        check_contract(self.config, model_config)
        groups = resolve_groups(model) if self.groups is None else self.groups
        prepare_routers(self.config.router_aux_loss, model, model_config, batch, groups)
        checker = self.route_checker
        further = further_tokens(batch, model, model_config)
        head, num_further = HeadSettings.of(self.config, knows_mtp=True), 0 if further is None else len(further.labels)
        with nullcontext() if checker is None else checker.forward_of(model, batch, groups.tp):
            output, inputs, rows = run_model(model, batch, head, groups.tp, num_further=num_further)
        check_attached(model, [part.hidden if isinstance(part, HeadInputs) else part for part in (inputs or output, *rows)])
        added = None
        if further is not None and rows:
            is_known = self.announces_factor if inputs is None else is_free_in_forward(model)
            factor = self._delivered(batch, model_config, groups, GradientDivisor.NONE) if is_known else None
            common = (batch, self.config, model_config, groups)
            added = multi_token_loss(rows, further, *common, vocab_size=self.vocab_size, loss_scale=factor)
        if inputs is None:  # a model in eval mode may have no backward
            is_announced = self.announces_factor and model.training
            delivered = self._delivered(batch, model_config, groups) if is_announced else None
            loss_scale = self._assumed if is_announced and delivered is None else delivered
            return output, partial(self.loss_func, batch, model_config, groups, loss_scale=loss_scale, added=added)
        loss_scale = self._loss_scale(batch, model, model_config, groups)
        return output, partial(self.fused_loss_func, batch, model_config, groups, inputs, loss_scale, added=added)

    def loss_func(
        self,
        batch: PolicyBatch,
        model_config: TransformerConfig,
        groups: ParallelGroups,
        logits: Tensor,
        *,
        loss_scale: float | Tensor | AssumedScale | None = None,
        added: MultiTokenLoss | None = None,
    ) -> ScheduledLoss:
        """The 3-tuple of scale_for_schedule for logits [B, S, V_tp]. loss_scale: with it one kernel may read them once. added: a
        loss that is trained beside."""
        output = policy_loss(
            self.config.policy_loss,
            logits.flatten(0, 1),
            batch.labels,
            batch.old_log_probs,
            batch.advantages,
            batch.loss_mask,
            batch.cu_seqlens,
            batch.token_weights,
            inplace=True,  # nothing else reads the logits
            loss_scale=loss_scale,
            **self._loss_options(batch, groups, batch.sampling_support),
        )
        return self._finish(output, batch, model_config, groups, added)

    def fused_loss_func(
        self,
        batch: PolicyBatch,
        model_config: TransformerConfig,
        groups: ParallelGroups,
        inputs: HeadInputs,
        loss_scale: float | Tensor | None,
        mark: Tensor,  # what the model returned in place of logits
        *,
        added: MultiTokenLoss | None = None,
    ) -> ScheduledLoss:
        """The 3-tuple of scale_for_schedule for the hidden states that were given to the output layer."""
        hidden, is_sequence_parallel = rows_of(inputs, groups.tp)
        output = linear_policy_loss(
            self.config.policy_loss,
            hidden,
            inputs.weight,
            batch.labels,
            batch.old_log_probs,
            batch.host.advantages,
            batch.host.loss_mask,
            batch.host.cu_seqlens,
            batch.token_weights,
            max_logits_bytes=self.config.max_logits_bytes,
            sequence_parallel=is_sequence_parallel,
            fp32_logits=self.config.fp32_lm_head,
            document_lengths=batch.host.document_lengths,
            loss_scale=loss_scale,
            **self._loss_options(batch, groups, batch.host.sampling_support),
        )
        return self._finish(output, batch, model_config, groups, added)

    def _loss_options(self, batch: PolicyBatch, groups: ParallelGroups, sampling_support: SamplingSupport | None) -> LossKeywords:
        config = self.config
        # By group: ranks that share one agree on the number, and may have had others between.
        number = self._num_microbatches.get(batch.cp_group, 0)
        self._num_microbatches[batch.cp_group] = number + 1
        return {
            "check_ranks": checks_microbatch(number),
            "clip_ratio_low": config.clip_ratio_low,
            "clip_ratio_high": config.clip_ratio_high,
            "temperature": config.policy_temperature,
            "vocab_size": self.vocab_size,
            "token_counts": batch.token_counts,
            "tp_group": groups.tp,
            "cp_group": batch.cp_group,
            "metrics": config.policy_metrics,
            "backend": config.policy_loss_backend,
            "advantages_per": "sample",
            "ref_log_probs": batch.ref_log_probs,
            "rollout_log_probs": _rollout_log_probs(batch, config),
            "loss_parameters": config.loss_parameters,
            "sampling_support": sampling_support,
            "correction": CorrectionSettings.of(config),
            "kl_coefficient": config.kl_coefficient,
            "kl_estimator": config.kl_estimator,
            "entropy_coefficient": config.entropy_coefficient,
            "regularizer_weights": batch.regularizer_weights,
            "importance_weights": batch.importance_weights,
        }

    def _loss_scale(
        self, batch: PolicyBatch, model: nn.Module, model_config: TransformerConfig, groups: ParallelGroups
    ) -> float | Tensor | None:
        """The factor with which forward may add the weight's gradient to main_grad; None: backward adds it.

        A model in eval mode may have no backward. float16 needs the factor in forward.
        """
        if not (is_free_in_forward(model) and (model.training or model_config.fp16)):
            return None
        return self._delivered(batch, model_config, groups)

    def _delivered(
        self, batch: PolicyBatch, model_config: TransformerConfig, groups: ParallelGroups, gradient_divisor: str | None = None
    ) -> float | Tensor | None:
        return delivered_factor(
            batch.context.num_microbatches,
            totals=batch.context.totals,
            config=model_config,
            groups=groups,
            gradient_divisor=gradient_divisor or self.config.gradient_divisor,
        )

    def _finish(
        self,
        output: PolicyLossOutput,
        batch: PolicyBatch,
        model_config: TransformerConfig,
        groups: ParallelGroups,
        added: MultiTokenLoss | None,
    ) -> ScheduledLoss:
        statistics = _with_rollout(output, batch)
        of_terms = (output.policy_loss, output.kl_loss, output.entropy)
        num_nonfinite = output.num_nonfinite
        if added is not None:
            num_nonfinite = torch.cat([num_nonfinite, added.num_nonfinite[None]])
        of_mtp = None if added is None else added.mean
        self._reports.append(MicrobatchReport(*of_terms, num_nonfinite, statistics, of_mtp))
        loss, num_tokens, report = scale_for_schedule(
            output.loss,
            batch.context.num_microbatches,
            totals=batch.context.totals,
            num_local_tokens=batch.loss_mask.sum(),
            config=model_config,
            groups=groups,
            gradient_divisor=self.config.gradient_divisor,
            router_aux_loss=self.config.router_aux_loss,
            added_part=None if added is None else added.loss,
        )
        if of_mtp is not None:
            report["policy/mtp_loss"] = torch.stack([of_mtp, report["policy/loss"][1]])
        if self.reports_metrics and statistics is not None:
            report |= report_pairs(statistics, groups.dp_cp.size() * batch.context.num_microbatches)
        return loss, num_tokens, report

    def take_reports(self) -> list[MicrobatchReport]:
        """The reports since the last call, in the order of the micro-batches."""
        reports, self._reports = self._reports, []
        return reports


def _rollout_log_probs(batch: PolicyBatch, config: PolicyLossConfig) -> Tensor | None:
    """The samples' own. A micro-batch without samples has none, and a loss that needs some gets zeros, which nothing reads."""
    if batch.rollout_log_probs is not None or batch.token_counts.numel():
        return batch.rollout_log_probs
    return torch.zeros(batch.labels.shape, device=batch.labels.device) if needs_rollout_log_probs(config) else None


@torch.no_grad()
def _with_rollout(output: PolicyLossOutput, batch: PolicyBatch) -> PolicyStatistics | None:
    """The loss's statistics, with the rollout statistics where the batch has inputs for them."""
    counts_phantoms = batch.context.counts_phantoms and batch.old_log_probs is not None
    # Each rank of the group has all samples; another micro-batch may have more ranks.
    staleness = batch.staleness if batch.cp_group.rank() == 0 else None
    given = (batch.rollout_log_probs, staleness, batch.kept_mass)
    if output.metrics is None or not (counts_phantoms or any(values is not None for values in given)):
        return output.metrics
    rollout = rollout_statistics(
        log_probs=output.log_probs,
        old_log_probs=batch.old_log_probs,
        rollout_log_probs=batch.rollout_log_probs,
        kept_mass=batch.kept_mass,
        staleness=staleness,
        counts_phantoms=counts_phantoms,
        loss_mask=batch.loss_mask,
        cu_seqlens=batch.cu_seqlens,
        token_counts=batch.token_counts,
    )
    return replace(output.metrics, rollout=rollout)


def check_contract(config: PolicyLossConfig, model_config: TransformerConfig) -> None:
    """Raises ConfigError for calculate_per_token_loss in the model's config with another aggregation than token_mean, or with a
    model that adds losses by itself or is wrong on its layout. The config may have changed after the arguments were parsed."""
    per_token = bool(model_config.calculate_per_token_loss)
    settings = vars(model_config) | {"calculate_per_token_loss": per_token, "router_aux_loss": config.router_aux_loss}
    problems = [*auxiliary_loss_problems(settings, Route.MEGATRON_LM)]
    problems += model_problems(vars(model_config), has_own_groups=True)
    problems += multi_token_problems(config, model_config)
    if per_token and get_loss_aggregation(config.loss_aggregation).formula != TOKEN_MEAN:
        problems.append(
            f"--loss-aggregation {config.loss_aggregation} with calculate_per_token_loss=True in the model's config: Megatron "
            "divides by the step's tokens, which is token_mean. Remove --calculate-per-token-loss, or choose token_mean"
        )
    if problems:
        raise ConfigError(problems)


def check_finite(reports: list[MicrobatchReport]) -> None:
    """Raises DataError if a micro-batch had a non-finite unmasked token. Call it before the optimiser step.

    On the CPU the loss has raised already. On CUDA this synchronises once.
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
