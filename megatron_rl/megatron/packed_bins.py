"""Packed bins, as Megatron-LM's train_rl.py has: the forward step takes bins, weights them, and returns Megatron's 3-tuple.

Counts are of the whole step, not of a bin or a micro-batch. Prompts are recorded before packing; a row without a prompt is padding,
and no count contains it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron_rl.config import FIELDS_OF_TEACHER, Distillation, PolicyLossConfig, PolicyMetrics
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.layout.agreement import maxima_anywhere
from megatron_rl.layout.groups import ParallelGroups, resolve_groups
from megatron_rl.megatron.batch import PolicyBatch, PolicySample, StepContext, make_packed_batch, weigh_samples
from megatron_rl.megatron.forward_step import MicrobatchReport, PolicyForwardStep, check_finite
from megatron_rl.megatron.model import model_config_of
from megatron_rl.megatron.samples import TEACHER_FIELDS, StepSample, count_further_tokens, count_routed_tokens
from megatron_rl.metrics.step import step_metrics
from megatron_rl.weights import get_loss_aggregation

# By row index before packing: the prompt, or the rollout. None: a row of padding.
NameOfRow = Sequence[int | str | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedBin:
    """One packed row of S positions, its n sequences side by side, as load_packed_data_by_index gives it; rows may be [1, S]."""

    tokens: Tensor  # [S] or [1, S]
    loss_mask: Tensor  # [S - 1], shifted: entry q says whether token q + 1 is trained
    advantages: Tensor  # [n]
    old_log_probs: Tensor | None  # [S - 1], entry q of token q + 1; None: on-policy
    ref_log_probs: Tensor | None  # [S - 1]
    seq_starts: Sequence[int]  # n entries; one more, the end, is ignored
    seq_lengths: Sequence[int]  # n
    seq_indices: Sequence[int]  # n, rows before packing
    rollout_log_probs: Tensor | None = None  # [S - 1], by the engine that sampled; for metrics and corrections
    teacher_log_probs: Tensor | None = None  # [S - 1]; for --distillation sampled
    teacher_topk_ids: Tensor | None = None  # [S - 1, K]; for --distillation topk
    teacher_topk_log_probs: Tensor | None = None  # [S - 1, K]


def samples_of_bin(packed: PackedBin, prompt_of_row: NameOfRow, rollout_of_row: NameOfRow | None = None) -> list[StepSample]:
    """The bin's sequences without padding: the first token of each is the prompt, all others the response, of which the mask
    trains some. rollout_of_row: None: each row is a rollout.

    Raises DataError for a padding row with an unmasked token, a sequence shorter than two tokens or past the bin's end, and an
    unmasked position that predicts no token of its own sequence.
    """
    tokens = packed.tokens.flatten().tolist()
    names = ("loss_mask", "old_log_probs", "ref_log_probs", "rollout_log_probs", *TEACHER_FIELDS)
    given = {name: getattr(packed, name) for name in names}
    rows = {name: _row(values, len(tokens), name) for name, values in given.items() if values is not None}
    advantages = packed.advantages.flatten().float().tolist()
    number = len(packed.seq_indices)
    samples, num_explained = [], 0
    starts = list(packed.seq_starts)[:number]
    for row, start, length, advantage in zip(packed.seq_indices, starts, packed.seq_lengths, advantages, strict=True):
        row, start, length = int(row), int(start), int(length)
        predicting = slice(start, start + max(length - 1, 0))
        num_unmasked = sum(value != 0 for value in rows["loss_mask"][predicting])
        prompt_id, rollout_id = prompt_of_row[row], None if rollout_of_row is None else rollout_of_row[row]
        if prompt_id is None:
            if num_unmasked:
                raise DataError(
                    f"row {row} has {num_unmasked} unmasked tokens and no prompt: record the prompt of each row that trains"
                )
            continue
        if length < 2 or start + length > len(tokens):
            raise DataError(
                f"row {row} has {length} tokens from position {start} of a bin of {len(tokens)}: a prompt and a response of at "
                "least one token each must lie in the bin"
            )
        num_explained += num_unmasked
        sample_fields: dict[str, Any] = {name: values[predicting] for name, values in rows.items()}
        sample_fields |= {"prompt_id": prompt_id, "rollout_id": rollout_id}
        samples.append(StepSample(tokens=tokens[start : start + length], advantage=advantage, **sample_fields))
    num_unmasked = sum(value != 0 for value in rows["loss_mask"])
    if num_unmasked != num_explained:
        raise DataError(
            f"{num_unmasked - num_explained} unmasked positions of a bin predict no token of their own sequence: the first token "
            "of a sequence and padding cannot be trained; the mask must be shifted by one"
        )
    return samples


class PackedForwardStep:
    """`forward_step(data_iterator, model)` for packed bins on any layout, logits [1, S, V / tp]: nothing is gathered over tp.

    The report that Megatron's train_step logs holds the means and sums of docs/metrics.md; `metrics` has all of them.
    On a step's first micro-batch it takes all of the step's items from the iterator and counts them; `reports` are of the
    step before. It puts `check` in front of the finalize_model_grads_func that it finds in the model's config: all ranks refuse
    the optimiser step after a non-finite token. Where the config has none, call `check` before the optimiser.

    Communication: count_step's two exchanges over dp, which excludes cp, before a step; one number over dp-cp, pp and tp after it.
    """

    def __init__(
        self,
        read_bin: Callable[[object], PackedBin],  # an item of the iterator -> its bin
        prompt_of_row: Callable[[], NameOfRow],  # of the current collection of rollouts
        num_microbatches: Callable[[], int],  # Megatron's get_num_microbatches
        *,
        vocab_size: int,  # the true one, without padding
        config: PolicyLossConfig,
        rollout_of_row: Callable[[], NameOfRow] | None = None,  # None: each row is one, which one_sample_per_rollout must say
        groups: ParallelGroups | None = None,  # None: from the model
    ):
        self._read_bin, self._prompt_of_row, self._num_microbatches = read_bin, prompt_of_row, num_microbatches
        self.config, self._groups, self._rollout_of_row = config, groups, rollout_of_row
        self._forward_step = PolicyForwardStep(config, vocab_size=vocab_size, groups=groups, reports_metrics=True)
        self._waiting: dict[int, list[PolicyBatch]] = {}  # by model chunk
        self.reports: list[MicrobatchReport] = []
        self._groups_of_step: ParallelGroups | None = None

    def __call__(self, data_iterator: Iterator[object], model: nn.Module) -> tuple[Tensor, Callable[..., Any]]:
        waiting = self._waiting.get(id(model)) or self._next_step(data_iterator, model)
        self._waiting[id(model)] = waiting[1:]
        return self._forward_step(iter(waiting[:1]), model)

    def check(self) -> None:
        """Each rank calls it between the schedule and the optimiser step; DataError on all ranks after a non-finite token.

        On the CPU the loss has raised before. Synchronises once.
        """
        self.reports = self._forward_step.take_reports()
        counts = [report.num_nonfinite.sum() for report in self.reports]
        worst = torch.stack(counts).sum() if counts else torch.zeros((), dtype=torch.int64)
        if maxima_anywhere(worst[None], self._groups_of_step or resolve_groups()) != [0]:
            check_finite(self.reports)
            raise DataError("another rank met an unmasked token that is not finite: the optimiser step is refused; see its message")

    def metrics(self) -> dict[str, float]:
        """All metrics of the step before, with what train_step cannot carry: minima, maxima, effective sample size, and what needs
        rollout_log_probs. Empty at --policy-metrics none.

        Communication: as metrics.step.step_metrics; every rank calls it, after the step. Synchronises once.
        """
        if self.config.policy_metrics == PolicyMetrics.NONE:
            return {}
        has_entropy = self.config.policy_metrics == PolicyMetrics.WITH_ENTROPY
        groups = self._groups_of_step or resolve_groups()
        statistics = [report.statistics for report in self.reports if report.statistics is not None]
        return step_metrics(statistics, groups, has_entropy=has_entropy)

    def _next_step(self, data_iterator: Iterator[object], model: nn.Module) -> list[PolicyBatch]:
        self._groups_of_step = groups = resolve_groups(model) if self._groups is None else self._groups
        self._check_before_finalize(model_config_of(model))
        bins: list[PackedBin] = []
        wanted = self._num_microbatches()
        with contextlib.suppress(StopIteration):
            while len(bins) < wanted:
                bins.append(self._read_bin(next(data_iterator)))  # Megatron-LM's RerunDataIterator has no __iter__
        if not bins or len(bins) != wanted:
            raise DataError(f"the iterator ended after {len(bins)} of the step's {wanted} micro-batches: a step needs all of them")
        rollouts = None if self._rollout_of_row is None else self._rollout_of_row()
        return batches_of_step(self.config, bins, self._prompt_of_row(), groups, rollouts, model_config_of(model))

    def _check_before_finalize(self, model_config: Any) -> None:
        """The schedule calls finalize on each rank after the last backward, and not in a forward-only pass."""
        given = model_config.finalize_model_grads_func
        if given is not None:
            finalize = given.finalize if isinstance(given, CheckedFinalize) else given
            model_config.finalize_model_grads_func = CheckedFinalize(finalize, self.check)


@dataclass(frozen=True, slots=True)
class CheckedFinalize:
    """finalize_model_grads_func of a model's config, with what is checked before it."""

    finalize: Callable[..., Any]
    check: Callable[[], None]

    def __call__(self, *positional: Any, **named: Any) -> Any:
        self.check()
        return self.finalize(*positional, **named)


def batches_of_step(
    config: PolicyLossConfig,
    bins: Sequence[PackedBin],
    prompt_of_row: NameOfRow,
    groups: ParallelGroups,
    rollout_of_row: NameOfRow | None = None,  # None: each row is a rollout
    model_config: Any = None,  # a TransformerConfig, needed where the model trains multi-token prediction
) -> list[PolicyBatch]:
    """One PolicyBatch for each of this data-parallel rank's bins of a whole step, weighted by the whole step's counts.

    Raises ConfigError where rows may be turns of one rollout, the aggregation counts rollouts, and nothing says which they are."""
    if (
        rollout_of_row is None
        and not config.one_sample_per_rollout
        and get_loss_aggregation(config.loss_aggregation).counts_rollouts
    ):
        raise ConfigError(
            f"loss_aggregation={config.loss_aggregation} counts rollouts, and a rollout may be several rows of a bin, one for each "
            "turn: give PackedForwardStep rollout_of_row, as take_rollouts(...).rollout_of_row; or, if each rollout is one row, "
            "--one-sample-per-rollout"
        )
    if rollout_of_row is not None and config.one_sample_per_rollout:
        raise ConfigError("--one-sample-per-rollout has no effect beside rollout_of_row, which names each row's rollout: remove it")
    samples = [samples_of_bin(packed, prompt_of_row, rollout_of_row) for packed in bins]
    mine = [sample for bin_samples in samples for sample in bin_samples]
    weighted, totals = weigh_samples(config, mine, groups)
    in_order = iter(weighted)
    context = StepContext(
        totals=totals,
        num_microbatches=len(bins),
        num_routed_tokens=count_routed_tokens(config, mine, groups),
        num_further_tokens=None if model_config is None else count_further_tokens(model_config, mine, groups),
    )
    return [
        _batch(packed, [next(in_order) for _ in bin_samples], context, groups)
        for packed, bin_samples in zip(bins, samples, strict=True)
    ]


def _batch(packed: PackedBin, samples: Sequence[PolicySample], context: StepContext, groups: ParallelGroups) -> PolicyBatch:
    """Rows keep the bin's length, so that shapes agree over a pipeline."""
    return make_packed_batch(samples, context, row_length=packed.tokens.numel(), cp_group=groups.cp, device=packed.tokens.device)


def _row(values: Tensor, num_tokens: int, name: str) -> list[Any]:
    rows = values.flatten(0, -2) if name in FIELDS_OF_TEACHER[Distillation.TOPK] else values.flatten()
    if len(rows) != num_tokens - 1:
        raise DataError(
            f"{name} has {len(rows)} entries for a bin of {num_tokens} tokens: it is shifted, one for each token but the first"
        )
    return rows.tolist()
