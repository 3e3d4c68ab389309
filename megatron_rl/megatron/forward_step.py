"""The forward_step that Megatron's schedules call, with a registered policy loss. It computes no weight."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatron_rl.config import Distillation, PolicyLossConfig
from megatron_rl.errors import DataError
from megatron_rl.layout.agreement import checks_microbatch
from megatron_rl.layout.groups import Group, ParallelGroups, resolve_groups
from megatron_rl.losses.corrections import needs_rollout_log_probs
from megatron_rl.megatron.batch import PolicyBatch
from megatron_rl.megatron.checks import SET_LATE, check_attached, check_model
from megatron_rl.megatron.head import HeadInputs, HeadSettings, is_free_in_forward, rows_of, run_model
from megatron_rl.megatron.model import model_config_of
from megatron_rl.megatron.multi_token import MultiTokenLoss, further_tokens, multi_token_loss
from megatron_rl.megatron.router_losses import prepare_routers
from megatron_rl.megatron.samples import teacher_problem, trained_mtp_layers
from megatron_rl.megatron.schedule import ScheduledLoss, backward_factor, scale_for_schedule
from megatron_rl.metrics.further import rollout_statistics
from megatron_rl.metrics.policy import PolicyStatistics
from megatron_rl.metrics.step import report_pairs
from megatron_rl.ops.distribution import TopKTeacher
from megatron_rl.ops.scale import AssumedScale
from megatron_rl.policy_loss import PolicyLossOutput, linear_policy_loss, policy_loss
from megatron_rl.policy_loss.inputs import not_none, options_of

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
    distillation: Tensor | None = None  # 0-d, with its coefficient


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
        self.declares_factor = True
        """Whether the loss of logits is told what backward multiplies it with. False: a wrong factor is measured, and no error."""
        self._head = HeadSettings.of(config)
        self._assumed = AssumedScale()  # where another grad_scale_func than Megatron's hides the factor
        self._reports: list[MicrobatchReport] = []
        # Models whose config and first graph are checked, with what may change after that.
        self._checked: weakref.WeakKeyDictionary[nn.Module, tuple[object, ...]] = weakref.WeakKeyDictionary()
        self._num_microbatches: weakref.WeakKeyDictionary[Group, int] = weakref.WeakKeyDictionary()
        self._options = {**options_of(config), "vocab_size": vocab_size, "advantages_per": "sample"}

    def __call__(self, data_iterator: Iterator[PolicyBatch], model: nn.Module) -> tuple[Tensor, Callable[[Tensor], ScheduledLoss]]:
        batch = next(data_iterator)
        model_config = model_config_of(model)
        is_packed = batch.packed_seq_params is not None
        settings = (is_packed, *(getattr(model_config, name, None) for name in SET_LATE))
        is_checked = self._checked.get(model) == settings
        if not is_checked:
            check_model(self.config, model, is_packed=is_packed)
        groups = resolve_groups(model) if self.groups is None else self.groups
        if model_config.num_moe_experts is not None:
            prepare_routers(self.config.router_aux_loss, model, model_config, batch, groups)
        further = further_tokens(batch, model, model_config) if trained_mtp_layers(model_config) else None
        num_further = 0 if further is None else len(further.labels)
        output, inputs, rows = run_model(model, batch, self._head, groups.tp, num_further=num_further)
        made = [part.hidden if isinstance(part, HeadInputs) else part for part in (inputs or output, *rows)]
        if not is_checked and check_attached(made):
            self._checked[model] = settings
        # A model in eval mode may have no backward. With a fused head float16 needs the factor in forward all the same.
        if inputs is None:
            is_known = self.declares_factor and model.training
        else:
            is_known = is_free_in_forward(model) and (model.training or model_config.fp16)
        step: dict[str, Any] = {"totals": batch.context.totals, "config": model_config, "groups": groups}
        added = None
        if further is not None and rows:
            factor = backward_factor(batch.context.num_microbatches, **step) if is_known else None
            common = (batch, self.config, model_config, groups)
            added = multi_token_loss(rows, further, *common, vocab_size=self.vocab_size, loss_scale=factor)
        loss_scale: float | Tensor | AssumedScale | None = None
        if is_known:
            step["gradient_divisor"] = self.config.gradient_divisor
            loss_scale = backward_factor(batch.context.num_microbatches, **step)
            if inputs is None and loss_scale is None:
                loss_scale = self._assumed
        return output, partial(self.loss_func, batch, model_config, groups, inputs=inputs, loss_scale=loss_scale, added=added)

    def loss_func(
        self,
        batch: PolicyBatch,
        model_config: TransformerConfig,
        groups: ParallelGroups,
        output: Tensor,
        *,
        inputs: HeadInputs | None = None,
        loss_scale: float | Tensor | AssumedScale | None = None,
        added: MultiTokenLoss | None = None,
    ) -> ScheduledLoss:
        """The 3-tuple of scale_for_schedule for logits [B, S, V_tp], or for what a fused head was given in their place.

        inputs: of the fused head. loss_scale: what backward multiplies the loss with, where it is known. added: a loss that is
        trained beside."""
        name, options = self.config.policy_loss, {**self._options_of(batch, groups), "loss_scale": loss_scale}
        if inputs is None:
            # In place, because nothing else reads the logits.
            found = policy_loss(name, output.flatten(0, 1), batch.labels, inplace=True, **batch.loss.arguments() | options)
        else:
            hidden, is_sequence_parallel = rows_of(inputs, groups.tp)
            options |= {"sequence_parallel": is_sequence_parallel, "fp32_logits": self.config.fp32_lm_head}
            options["max_logits_bytes"] = self.config.max_logits_bytes
            found = linear_policy_loss(name, hidden, inputs.weight, batch.labels, **batch.host.arguments() | options)
        return self._finish(found, batch, model_config, groups, added)

    def _finish(
        self,
        found: PolicyLossOutput,
        batch: PolicyBatch,
        model_config: TransformerConfig,
        groups: ParallelGroups,
        added: MultiTokenLoss | None,
    ) -> ScheduledLoss:
        statistics = _with_rollout(found, batch)
        num_nonfinite = found.num_nonfinite
        if added is not None:
            num_nonfinite = torch.cat([num_nonfinite, added.num_nonfinite[None]])
        parts = (found.policy_loss, found.kl_loss, found.entropy)
        self._reports.append(MicrobatchReport(*parts, num_nonfinite, statistics, found.distillation))
        loss, num_tokens, report = scale_for_schedule(
            found.loss,
            batch.context.num_microbatches,
            totals=batch.context.totals,
            num_local_tokens=batch.loss.loss_mask.sum(),
            config=model_config,
            groups=groups,
            gradient_divisor=self.config.gradient_divisor,
            router_aux_loss=self.config.router_aux_loss,
            added_part=None if added is None else added.loss,
        )
        if added is not None:
            report["policy/mtp_loss"] = torch.stack([added.mean, report["policy/loss"][1]])
        if self.reports_metrics and statistics is not None:
            report |= report_pairs(statistics, groups.dp_cp.size() * batch.context.num_microbatches)
        return loss, num_tokens, report

    def _options_of(self, batch: PolicyBatch, groups: ParallelGroups) -> dict[str, Any]:
        """What a micro-batch adds to the options of the step, and what one without samples has in the place of theirs."""
        # By group: ranks that share one agree on the number, and may have had others between.
        number = self._num_microbatches.get(batch.cp_group, 0)
        self._num_microbatches[batch.cp_group] = number + 1
        return {
            **self._options,
            "check_ranks": checks_microbatch(number),
            "tp_group": groups.tp,
            "cp_group": batch.cp_group,
            "rollout_log_probs": _rollout_log_probs(batch, self.config),
            **_teacher_of(batch, self.config),
        }

    def take_reports(self) -> list[MicrobatchReport]:
        """The reports since the last call, in the order of the micro-batches."""
        reports, self._reports = self._reports, []
        return reports


def _rollout_log_probs(batch: PolicyBatch, config: PolicyLossConfig) -> Tensor | None:
    """The samples' own. A micro-batch without samples has none, and a loss that needs some gets zeros, which nothing reads."""
    if batch.loss.rollout_log_probs is not None or batch.loss.num_documents:
        return batch.loss.rollout_log_probs
    return torch.zeros(batch.labels.shape, device=batch.labels.device) if needs_rollout_log_probs(config) else None


def _teacher_of(batch: PolicyBatch, config: PolicyLossConfig) -> dict[str, Any]:
    """What --distillation asks for. A micro-batch without samples gets zeros, which nothing reads, so that its ranks communicate as
    others. Raises DataError where the samples lack it, or have a teacher without the flag."""
    if batch.loss.num_documents:
        if (problem := teacher_problem(config, batch)) is not None:
            raise DataError(f"the samples of a micro-batch have {problem}")
        log_probs, ids, id_log_probs = batch.teacher_log_probs, batch.teacher_topk_ids, batch.teacher_topk_log_probs
    else:
        log_probs = torch.zeros(batch.labels.shape, device=batch.labels.device)
        ids, id_log_probs = torch.zeros_like(batch.labels)[:, None], log_probs[:, None]
    if config.distillation == Distillation.SAMPLED:
        return {"teacher_log_probs": log_probs}
    if config.distillation == Distillation.TOPK:
        assert ids is not None and id_log_probs is not None, "teacher_problem has named them"
        return {"teacher": TopKTeacher(ids, id_log_probs)}
    return {}


@torch.no_grad()
def _with_rollout(output: PolicyLossOutput, batch: PolicyBatch) -> PolicyStatistics | None:
    """The loss's statistics, with the rollout statistics where the batch has inputs for them."""
    loss = batch.loss
    counts_phantoms = batch.context.counts_phantoms and loss.old_log_probs is not None
    # Each rank of the group has all samples; another micro-batch may have more ranks.
    staleness = batch.staleness if batch.cp_group.rank() == 0 else None
    given = (loss.rollout_log_probs, staleness, batch.kept_mass)
    if output.metrics is None or not (counts_phantoms or any(values is not None for values in given)):
        return output.metrics
    rollout = rollout_statistics(
        log_probs=output.log_probs,
        old_log_probs=loss.old_log_probs,
        rollout_log_probs=loss.rollout_log_probs,
        kept_mass=batch.kept_mass,
        staleness=staleness,
        counts_phantoms=counts_phantoms,
        loss_mask=loss.loss_mask,
        cu_seqlens=loss.cu_seqlens,
        token_counts=not_none(loss.token_counts),
    )
    return replace(output.metrics, rollout=rollout)


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
