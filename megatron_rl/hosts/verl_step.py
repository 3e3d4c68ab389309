"""verl's optimiser step, counted before its first micro-batch: samples, rollouts, prompts and tokens of the mini-batch.

verl gives a loss rows of a micro-batch, a number of samples that the launch has set, and tokens that it counts before it rejects
some. Its batch also has the uid of each row's prompt and, in the v1 trainer, the session_id of its rollout. So a function of ours
is around BaseEngine.train_batch, which each engine calls for a mini-batch, and hands the counts of its rows to a call of our loss.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megatron_rl.count import RolloutCounts, StepTotals, count_step
from megatron_rl.errors import ConfigError, DataError, EmptyStep, GroupSizeError
from megatron_rl.hosts.choice import Launch, value_at
from megatron_rl.hosts.dense_rows import ONE_SAMPLE, RowCounts
from megatron_rl.hosts.model_notes import check_model
from megatron_rl.hosts.verl import ACCEPT_PARTIAL_GROUPS, CONTRACT, ENGINES, PREFIX, PROBED, ROLLOUT, is_ours
from megatron_rl.hosts.verl_loss import RUNS
from megatron_rl.layout.groups import Group

UID, SESSION, MASK = "uid", "session_id", "response_mask"
# How the uid begins of rows that verl adds so that ranks and mini-batches have equal numbers of rows. No count includes them.
FILLING = "pad"
# The column that we add to verl's batch, [S, 4] int64: tokens of the row, its prompt group and its rollout, rows of its rollout.
COUNTS = "megatron_rl_counts"


def count_in(engines: ModuleType) -> None:
    """Puts our function around the one of verl's engines. Raises ConfigError for engines with another contract."""
    CONTRACT.check({path: expected for path, expected in CONTRACT.calls.items() if path.startswith(ENGINES)}, engines)
    engines.BaseEngine.train_batch = counted(engines.BaseEngine.train_batch)


def counted(train_batch: Callable[..., Any]) -> Callable[..., Any]:
    """verl's train_batch, which counts the mini-batch where a loss of ours trains. Communication: as count_step."""

    @functools.wraps(train_batch)
    def train_counted_batch(self: Any, data: Any, loss_function: Any) -> Any:
        actor = getattr(loss_function, "keywords", {}).get("config")
        if not is_ours(actor):
            return train_batch(self, data, loss_function)
        run = RUNS.of(actor)
        launch = run.read(actor)
        if (config := getattr(self, "tf_config", None)) is not None:
            check_model(config)
        totals, data[COUNTS] = count_mini_batch(launch, data, self.get_data_parallel_group(), value_at(actor, "rollout_n"))

        def with_counts(model_output: Any, data: Any, dp_group: Any = None) -> Any:
            run.rows = rows_of(launch, totals, data[COUNTS])
            try:
                return loss_function(model_output=model_output, data=data, dp_group=dp_group)
            finally:
                run.rows = None

        return train_batch(self, data, with_counts)

    return train_counted_batch


def rows_of(launch: Launch, totals: StepTotals, counts: Tensor) -> RowCounts:  # [S, 4], see COUNTS
    tokens, prompt_tokens, rollout_tokens, rows = counts.unbind(-1)
    rollouts = None if totals.num_rollouts is None else RolloutCounts(rollout_tokens, rows)
    return RowCounts(totals, tokens, prompt_tokens if launch.counts_prompts else None, rollouts)


def count_mini_batch(launch: Launch, data: Any, dp_group: Group, group_size: Any) -> tuple[StepTotals, Tensor]:
    """The totals of the mini-batch, and the counts of this data-parallel rank's rows, [S, 4], see COUNTS, on its mask's device.

    group_size: the rollouts of a prompt; a mini-batch with another number is refused where an aggregation counts prompts, unless
    allow_partial_prompt_groups is set. Communication: as count_step. Raises what it raises; ConfigError for a batch without the uid
    that the aggregation needs, DataError for several rows of a rollout that one_sample_per_rollout excludes."""
    mask = data[MASK]
    tokens = torch.stack([row.sum() for row in mask.unbind()]) if mask.is_nested else mask.sum(-1)
    uids, sessions = (_names(data, name) for name in (UID, SESSION))
    if launch.counts_prompts and uids is None:
        raise ConfigError(f"verl's batch has no {UID}, which {PREFIX}{launch} needs: {PROBED} was probed")
    kept = [row for row in range(len(tokens)) if uids is None or not uids[row].startswith(FILLING)]
    own = tokens.long().cpu()
    prompts = None if uids is None or not launch.counts_prompts else [uids[row] for row in kept]
    sizes = {} if prompts is None or launch.config.allow_partial_prompt_groups else {"samples_per_prompt": group_size}
    columns = torch.zeros(len(own), 4, dtype=torch.int64)
    columns[:, 0] = own
    prompt_tokens, rollout_counts = None, None
    try:
        rollouts = None if uids is None or sessions is None else [f"{uids[row]}_{sessions[row]}" for row in kept]
        counts = count_step(None, prompts, dp_group, token_counts=own[kept], rollout_ids=rollouts, **sizes)
        totals, _, prompt_tokens, rollout_counts = counts
    except EmptyStep:  # on all ranks: verl trains on it, and each weight is 0
        totals = StepTotals(num_samples=1, num_prompts=1, num_tokens=1, num_rollouts=None if sessions is None else 1)
    except GroupSizeError as error:
        raise DataError(f"{error}. In verl that is {ROLLOUT}n; accept cut groups with {ACCEPT_PARTIAL_GROUPS}") from error
    if launch.config.one_sample_per_rollout and totals.rollouts != totals.num_samples:
        text = f"{totals.num_samples} rows of {totals.rollouts} rollouts, and {ONE_SAMPLE}=true says that each has one row"
        raise DataError(f"the mini-batch has {text}: remove it, and rollouts are counted")
    if prompt_tokens is not None:
        columns[kept, 1] = prompt_tokens
    if rollout_counts is not None:
        columns[kept, 2:] = torch.stack([*rollout_counts], -1)
    return totals, columns.to(tokens.device)


def _names(data: Any, key: str) -> Sequence[str] | None:
    """A column that is no tensor, or one of numbers; None: the batch has none."""
    if key not in data.keys():  # noqa: SIM118  # of a TensorDict
        return None
    values = data[key]
    return [str(value) for value in (values.tolist() if hasattr(values, "tolist") else values)]
