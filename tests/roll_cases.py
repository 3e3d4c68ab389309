"""One optimiser step through ROLL's call of a loss: batches, factors and packing of its Megatron strategy, on gloo ranks.

The loss is called by `emulated_forward_step`, or by ROLL's own inner_forward_step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import dense_row_cases
import torch
from dense_row_cases import (
    AGGREGATIONS,
    VOCABULARY,
    Result,
    RowCase,
    gradients_of,
    in_place,
    largest_error,
    logits_of,
    parameters_of,
    samples_of,
    truth,
)
from torch import Tensor

from megatron_rl.hosts import roll
from megatron_rl.hosts.choice import Launch
from megatron_rl.hosts.roll_loss import RollLoss, loss_mask_of
from megatron_rl.layout.context_parallel import local_positions
from megatron_rl.layout.groups import ParallelGroups, all_reduce_sum, resolve_groups
from megatron_rl.testing.layout_step import StepSample
from megatron_rl.testing.reference import CLIPS, DIVISOR
from megatron_rl.weights import get_loss_aggregation

PAD_FACTOR = 16  # of a packed sequence, in ROLL


@dataclass(frozen=True, kw_only=True)
class Case(RowCase):
    tp: int = 1
    packing: str = "rows"
    has_final_mask: bool = True  # the RLVR pipeline's own mask beside that of responses

    def __str__(self) -> str:
        return f"{RowCase.__str__(self)} tp{self.tp} {self.packing}{' final mask' * self.has_final_mask}"


# On four ranks and fewer. With the pipeline's own mask beside that of responses, and without.
LAYOUTS = (
    {},
    {"sizes": (1, 5, 3, 7), "has_final_mask": False},
    {"cp": 2, "sizes": (2, 4), "num_samples": 6, "packing": "a call a sequence"},
    {"dp": 2, "sizes": (2, 5), "num_samples": 14, "packing": "a call a sequence", "has_final_mask": False},
    {"dp": 2, "cp": 2, "sizes": (3, 1), "num_samples": 14},
    {"tp": 2, "sizes": (6, 2)},
)


def matrix(losses: Sequence[str], aggregations: Sequence[str] = AGGREGATIONS) -> list[Case]:
    return [Case(loss=loss, aggregation=one, **layout) for loss in losses for one in aggregations for layout in LAYOUTS]


def worker_config(pg_variant: str, *, samples: int = 16, dp: int = 1, **settings: Any) -> SimpleNamespace:
    """What our worker reads of ROLL's actor_train. settings: our numbers, as system_envs, and its own fields."""
    numbers = {name: str(settings.pop(name)) for name in list(settings) if name.startswith(roll.VARIABLES)}
    own: dict[str, Any] = {
        "pg_variant": pg_variant,
        "system_envs": numbers | {"NCCL_DEBUG": "WARN"},
        "strategy_args": SimpleNamespace(strategy_name="megatron_train", strategy_config={"tensor_model_parallel_size": 1}),
        "training_args": SimpleNamespace(per_device_train_batch_size=1, gradient_accumulation_steps=samples // dp),
        "device_mapping": list(range(dp)),
        "apply_loss_scale": True,
        "use_dynamic_batching_in_train": False,
        "use_sequence_packing": False,
    }
    return SimpleNamespace(**(own | settings))


def pipeline_config(samples: int = 16, **settings: Any) -> SimpleNamespace:
    correction = SimpleNamespace(is_weight=SimpleNamespace(enabled=False), filters=[])
    own: dict[str, Any] = {
        "rollout_batch_size": samples // 2,
        "num_return_sequences_in_group": 2,
        "ppo_epochs": 1,
        "enable_old_logprobs_recompute": True,
        "use_pg_clip_range": False,
        "pg_clip": 0.2,
        "pg_clip_low": 0.2,
        "pg_clip_high": 0.2,
        "dual_clip_loss": False,
        "use_kl_loss": False,
        "kl_loss_coef": 0.01,
        "entropy_loss_coef": 0,
        "train_infer_correction": correction,
        **{name: only for name, (only, _) in roll.ONLY.items()},
    }
    return SimpleNamespace(**(own | settings))


def settings_of(case: Case, **pipeline: Any) -> tuple[Launch, bool]:
    """(the launch, whether the batch has placeholders for old log-probabilities)."""
    clip, numbers = CLIPS[case.loss], {name: pipeline.pop(name) for name in [*pipeline] if name.startswith(roll.VARIABLES)}
    if clip is not None:
        pipeline |= {"use_pg_clip_range": True, "pg_clip_low": clip[0], "pg_clip_high": clip[1]}
    if parameters_of(case):
        pipeline |= {"dual_clip_loss": True, "pg_clip": 1.0}  # c = 1 + 2 pg_clip
    if get_loss_aggregation(case.aggregation).takes_divisor:
        numbers["MEGATRON_RL_LOSS_AGGREGATION_DIVISOR"] = DIVISOR
    worker = worker_config(f"{case.loss}.{case.aggregation}", samples=case.num_samples, dp=1, **numbers)
    config = pipeline_config(case.num_samples, **pipeline)
    return roll.read(worker, config), not config.enable_old_logprobs_recompute


class Data:
    """What a loss and ROLL's inner_forward_step use of a DataProto."""

    def __init__(self, batch: dict[str, Tensor], meta_info: dict[str, Any]):
        self.batch, self.meta_info, self.non_tensor_batch = batch, meta_info, {}

    def __len__(self) -> int:
        return len(self.batch["input_ids"])

    def __getitem__(self, chosen: slice | list[int]) -> Data:
        return Data({name: column[chosen] for name, column in self.batch.items()}, self.meta_info)


@dataclass
class Step:
    """Whole padded samples: [S, W], or [S, W - 1] from the second token on. `log_probs` belong to the responses."""

    samples: list[StepSample]
    log_probs: list[Tensor]
    columns: dict[str, Tensor]


def make_step(case: Case, given: tuple[list[StepSample], list[Tensor]] | None = None) -> Step:
    """given: samples, and log-probabilities of their responses; None: samples_of."""
    samples, log_probs = given or samples_of(case)
    width = -(-max(len(sample.tokens) for sample in samples) // 8) * 8

    column = functools.partial(in_place, samples, width=width)
    mask, old = column([s.loss_mask for s in samples]), column([s.old_log_probs or [] for s in samples])
    names = [sample.prompt_id for sample in samples]
    ids = torch.stack([torch.tensor([*s.tokens, *[0] * (width - len(s.tokens))]) for s in samples])
    ids[:, 0] = torch.tensor([names.index(name) for name in names])  # the token that tells prompts apart
    lengths = torch.tensor([len(sample.tokens) for sample in samples])
    columns = {
        "input_ids": ids,
        "attention_mask": (torch.arange(width) < lengths[:, None]).long(),
        "prompt_mask": (torch.arange(width) == 0).expand(len(samples), -1),
        "response_mask": (column([[1] * len(s.loss_mask) for s in samples]) if case.has_final_mask else mask).long(),
        "advantages": torch.tensor([s.advantage for s in samples])[:, None] * mask[:, 1:],
        "old_log_probs": old[:, 1:],
        "ref_log_probs": old[:, 1:] + 0.3,
        "infer_logprobs": column([s.rollout_log_probs or [x - 0.1 for x in s.old_log_probs or []] for s in samples])[:, 1:],
        "number": torch.arange(len(samples)),
    }
    if case.has_final_mask:
        columns["final_response_mask"] = mask[:, 1:].long()
    return Step(samples, log_probs, columns)


FLOATS = ("advantages", "old_log_probs", "ref_log_probs", "infer_logprobs", "train_infer_is_weight")


def poisoned(step: Step, poison: float) -> Step:
    """The step with this in each masked position; logits are poisoned by run_step."""
    mask = loss_mask_of(step.columns)
    columns = {name: torch.where(mask, step.columns[name], poison) for name in FLOATS if name in step.columns}
    return Step(step.samples, step.log_probs, step.columns | columns)


class Strategy:
    """ROLL's Megatron strategy around one step of a case: its train_step without an optimiser."""

    def __init__(self, case: Case, step: Step, poison: float | None, forward_step: Callable[..., Any]):
        self.case, self.poison, self.forward_step = case, poison, forward_step
        self.leaves = [values.float().requires_grad_() for values in step.log_probs]
        self.groups: ParallelGroups = resolve_groups()
        self.use_sequence_packing = case.packing != "rows"

    def _get_feature_on_this_cp_rank(self, feature: Tensor, feature_name: str = "input_ids") -> Tensor:
        return feature[:, local_positions(feature.shape[1], self.groups.cp.rank(), self.groups.cp.size())]

    def _unpack_sequences(self, output_tensor: Tensor, cu_seqlens_padded: Tensor) -> Iterator[Tensor]:
        yield from output_tensor.split((cu_seqlens_padded.diff() // self.case.cp).tolist(), 1)

    def inner_forward_step(self, loss_func, data_iterator: Iterator[Data], model):
        return self.forward_step(self, loss_func, data_iterator, model)

    def train_step(self, batch: Data, loss_func):
        """batch: of this data-parallel rank."""
        keys = [key for key in ("response_mask", "final_response_mask") if key in batch.batch]
        masks = {key: batch.batch[key][:, 1:] if key == "response_mask" else batch.batch[key] for key in keys}
        tokens = {key: all_reduce_sum(mask.sum(), self.groups.dp) for key, mask in masks.items()}
        samples = {key: all_reduce_sum(mask.any(-1).sum(), self.groups.dp) for key, mask in masks.items()}
        batch.meta_info["batch_num_tokens"] = tokens
        batch.meta_info["global_valid_samples"] = {"default": all_reduce_sum(torch.tensor(len(batch)), self.groups.dp), **samples}
        chosen = dense_row_cases.deal(range(len(batch)), self.case.sizes)
        batch.meta_info["loss_scale"] = len(chosen) * self.case.dp
        metrics = []
        for rows in chosen:
            data = batch[rows]
            output, loss_of = self.inner_forward_step(loss_func, iter([data]), lambda data=data, **_: self.logits(data))
            loss, log = loss_of(output)
            metrics.append(log)
            if loss.requires_grad:  # Megatron: x c / M, DDP: mean over D c ranks
                (loss * self.case.cp / len(chosen) / (self.case.dp * self.case.cp)).backward()
        return metrics

    def logits(self, data: Data) -> Tensor:  # [B, W / c, V / tp], packed [1, tokens / c, V / tp]
        width, mask = data.batch["input_ids"].shape[1], loss_mask_of(data.batch)
        rows = []
        for row, number in enumerate(data.batch["number"].tolist()):
            length = int(data.batch["attention_mask"][row].sum())
            leaf = self.leaves[number]
            values = torch.cat([torch.full((length - 1 - len(leaf),), -1.0), leaf])
            logits = logits_of(values, data.batch["input_ids"][row])
            if self.poison is not None:
                kept = torch.nn.functional.pad(mask[row, : length - 1], (0, 1))
                logits = torch.where(kept[:, None], logits, self.poison)
            padded = -(-length // PAD_FACTOR) * PAD_FACTOR if self.use_sequence_packing else width
            logits = torch.nn.functional.pad(logits, (0, 0, 0, padded - length))
            rows.append(self._get_feature_on_this_cp_rank(logits[None]))
        size = VOCABULARY // self.case.tp
        shard = slice(self.groups.tp.rank() * size, (self.groups.tp.rank() + 1) * size)
        return torch.cat(rows, dim=1 if self.use_sequence_packing else 0)[..., shard].contiguous()


def loss_of(settings: tuple[Launch, bool]) -> RollLoss:
    """On a strategy that trains nothing."""
    return RollLoss(settings[0], object.__new__(Strategy), is_on_policy=settings[1])


def emulated_forward_step(strategy: Strategy, loss_func, data_iterator: Iterator[Data], model):
    """The contract of ROLL's inner_forward_step: rows, or a call a sequence with the columns cut to its padded length."""
    data = next(data_iterator)
    output = model()

    def loss_of(logits: Tensor) -> tuple[Tensor, dict]:
        if not strategy.use_sequence_packing:
            loss, metrics = loss_func(data, logits)
            loss *= data.meta_info["loss_scale"]
            return loss, metrics
        total, logs, width = torch.tensor(0.0), [], data.batch["input_ids"].shape[1]
        lengths = -(-data.batch["attention_mask"].sum(-1) // PAD_FACTOR) * PAD_FACTOR
        bounds = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        for row, single in enumerate(strategy._unpack_sequences(logits, bounds)):
            length = single.shape[1] * strategy.case.cp
            columns = {name: cut(values, length, width) for name, values in data[row : row + 1].batch.items()}
            loss, log = loss_func(Data(columns, data.meta_info), single)
            total += loss
            logs.append(log)
        total *= data.meta_info["loss_scale"]
        return total, {name: sum(log[name] for log in logs) for name in logs[0]}

    return output, loss_of


def cut(values: Tensor, length: int, width: int) -> Tensor:
    if values.dim() < 2:
        return values
    length -= width - values.shape[1]
    return torch.nn.functional.pad(values, (0, max(length - values.shape[1], 0)))[:, :length]


def run_step(
    case: Case,
    step: Step,
    settings: tuple[Launch, bool],
    poison: float | None = None,
    forward_step: Callable[..., Any] = emulated_forward_step,
) -> Result:
    """What this rank adds to the gradient, and to the reported losses. On the ranks of an initialised Megatron."""
    strategy = Strategy(case, step, poison, forward_step)
    loss = RollLoss(settings[0], strategy, is_on_policy=settings[1])
    order = [index for batch in list(case.micro_batches())[strategy.groups.dp.rank()] for index in batch]
    data = Data({name: column[order] for name, column in step.columns.items()}, {})
    metrics = strategy.train_step(batch=data, loss_func=loss)
    is_first = strategy.groups.cp.rank() == strategy.groups.tp.rank() == 0
    total = sum(log["actor/total_loss@sum"] for log in metrics) if is_first else 0.0
    return Result(total, gradients_of(strategy.leaves), metrics)


def results_on_rank(rank: int, cases: Sequence[Case], forward_step: Callable[..., Any] = emulated_forward_step) -> list[Result]:
    """Of each case this rank's part."""
    return [run_step(case, make_step(case), settings_of(case), forward_step=forward_step) for case in cases]


def errors_of(cases: Sequence[Case], run: Callable[..., list[list[Result]]]) -> dict[str, float]:
    """run: RankPool.run or run_ranks, for the cases of one layout of ranks."""
    errors: dict[str, float] = {}
    for dp, cp, tp in sorted({(case.dp, case.cp, case.tp) for case in cases}):
        chosen = [case for case in cases if (case.dp, case.cp, case.tp) == (dp, cp, tp)]
        layout = {"context_parallel_size": cp, "tensor_model_parallel_size": tp}
        for case, *parts in zip(chosen, *run(chosen, world_size=dp * cp * tp, **layout), strict=True):
            alone = Case(loss=case.loss, aggregation=case.aggregation, num_samples=case.num_samples)  # no layout changes the truth
            errors[str(case)] = largest_error(added_up(parts), *truth_of(alone))
    return errors


@functools.cache
def truth_of(case: Case) -> tuple[float, list[Tensor]]:
    return truth(case, *samples_of(case))


def added_up(parts: Sequence[Result]) -> Result:
    """The results of all ranks together."""
    gradients = [torch.stack(of_leaf).sum(0) for of_leaf in zip(*(part.gradients for part in parts), strict=True)]
    return Result(sum(part.loss for part in parts), gradients, [log for part in parts for log in part.metrics])
