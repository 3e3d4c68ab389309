"""ROLL: its batch, its configs, and the batches, factors and packing of its Megatron strategy, on gloo ranks.

The loss is called by `emulated_forward_step`, or by ROLL's own inner_forward_step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from adapter_cases import (
    EACH_SEQUENCE,
    ROWS,
    VOCABULARY,
    Adapter,
    Result,
    RowCase,
    Step,
    advantages_of,
    deal,
    gradients_of,
    in_place,
    largest_error,
    logits_of,
    old_of,
    padded_ids,
    sampled_of,
)
from torch import Tensor

from megatron_rl.hosts import roll
from megatron_rl.hosts.choice import Launch
from megatron_rl.hosts.heads.row_proxy import make_row_proxy
from megatron_rl.hosts.roll_loss import RollLoss, loss_mask_of
from megatron_rl.layout.context_parallel import local_positions
from megatron_rl.layout.groups import ParallelGroups, all_reduce_sum, resolve_groups
from megatron_rl.megatron.head import HeadInputs
from megatron_rl.testing.layout_step import StepSample

PAD_FACTOR = 16  # of a packed sequence, in ROLL
FUSED = {"MEGATRON_RL_FUSED_LM_HEAD_LOSS": "true", "MEGATRON_RL_LOG_PROBS": "megatron_rl"}
CHUNK = 3 * VOCABULARY * 4  # bytes of three rows of float32 logits of one tensor-parallel rank, six of two


def worker_config(pg_variant: str | None, *, samples: int = 16, **settings: Any) -> SimpleNamespace:
    """What our worker reads of ROLL's actor_train. settings: our numbers, as system_envs, and its own fields."""
    numbers = {name: str(settings.pop(name)) for name in list(settings) if name.startswith(roll.VARIABLES)}
    own: dict[str, Any] = {
        "pg_variant": pg_variant,
        "system_envs": numbers | {"NCCL_DEBUG": "WARN"},
        "strategy_args": SimpleNamespace(strategy_name="megatron_train", strategy_config={"tensor_model_parallel_size": 1}),
        "training_args": SimpleNamespace(per_device_train_batch_size=1, gradient_accumulation_steps=samples),
        "device_mapping": [0],
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


class Data:
    """What a loss and ROLL's inner_forward_step use of a DataProto."""

    def __init__(self, batch: dict[str, Tensor], meta_info: dict[str, Any]):
        self.batch, self.meta_info, self.non_tensor_batch = batch, meta_info, {}

    def __len__(self) -> int:
        return len(self.batch["input_ids"])

    def __getitem__(self, chosen: slice | list[int]) -> Data:
        return Data({name: column[chosen] for name, column in self.batch.items()}, self.meta_info)


class Strategy:
    """ROLL's Megatron strategy around one step of a case: its train_step without an optimiser."""

    def __init__(self, case: RowCase, step: Step, poison: float | None, forward_step: Callable[..., Any], is_fused: bool):
        self.case, self.poison, self.forward_step, self.is_fused = case, poison, forward_step, is_fused
        self.leaves = [values.float().requires_grad_() for values in step.log_probs]
        self.groups: ParallelGroups = resolve_groups()
        self.use_sequence_packing = case.packing != ROWS

    def _get_feature_on_this_cp_rank(self, feature: Tensor, feature_name: str = "input_ids") -> Tensor:
        return feature[:, local_positions(feature.shape[1], self.groups.cp.rank(), self.groups.cp.size())]

    def _unpack_sequences(self, output_tensor: Tensor, cu_seqlens_padded: Tensor) -> Iterator[Tensor]:
        yield from output_tensor.split((cu_seqlens_padded.diff() // self.case.cp).tolist(), 1)

    def inner_forward_step(self, loss_func, data_iterator: Iterator[Data], model):
        return self.forward_step(self, loss_func, data_iterator, model)

    def train_step(self, batch: Data, loss_func):
        keys = [key for key in ("response_mask", "final_response_mask") if key in batch.batch]
        masks = {key: batch.batch[key][:, 1:] if key == "response_mask" else batch.batch[key] for key in keys}
        tokens = {key: all_reduce_sum(mask.sum(), self.groups.dp) for key, mask in masks.items()}
        samples = {key: all_reduce_sum(mask.any(-1).sum(), self.groups.dp) for key, mask in masks.items()}
        batch.meta_info["batch_num_tokens"] = tokens
        batch.meta_info["global_valid_samples"] = {"default": all_reduce_sum(torch.tensor(len(batch)), self.groups.dp), **samples}
        chosen = deal(range(len(batch)), self.case.sizes)
        batch.meta_info["loss_scale"] = ADAPTER.host_factor(self.case, len(chosen))
        metrics = []
        for rows in chosen:
            data = batch[rows]
            output, loss_of = self.inner_forward_step(loss_func, iter([data]), lambda data=data, **_: self.logits(data))
            loss, log = loss_of(output)
            metrics.append(log)
            if loss.requires_grad:
                (loss * ADAPTER.factor(self.case, len(chosen))).backward()
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
        whole = torch.cat(rows, dim=1 if self.use_sequence_packing else 0)
        if self.is_fused:  # the rows as hidden states of a head whose weight is the unit matrix
            inputs = HeadInputs(whole.transpose(0, 1), torch.eye(VOCABULARY)[shard], False)
            return make_row_proxy(inputs, self.groups.tp, roll.HEAD).transpose(0, 1).contiguous()
        return whole[..., shard].contiguous()


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


class Roll(Adapter):
    """On gloo ranks, with logits of vocabulary-parallel heads. The second mask is the RLVR pipeline's beside that of responses."""

    name, num_ranks = "roll", 4
    metrics = frozenset(
        {"actor/total_loss@sum", "actor/pg_loss@sum", "actor/kl_loss@sum", "actor/ppo_ratio_clipfrac@mean", "actor/policykl@mean"}
    )
    layouts = (
        {"has_second_mask": True},
        {"sizes": (1, 5, 3, 7)},
        {"cp": 2, "sizes": (2, 4), "num_samples": 6, "packing": EACH_SEQUENCE, "has_second_mask": True},
        {"dp": 2, "sizes": (2, 5), "num_samples": 14, "packing": EACH_SEQUENCE},
        {"dp": 2, "cp": 2, "sizes": (3, 1), "num_samples": 14, "has_second_mask": True},
        {"tp": 2, "sizes": (6, 2), "has_second_mask": True},
    )
    shorts = ({"sizes": (3, 5), "has_second_mask": True}, {"sizes": (3, 5), "packing": EACH_SEQUENCE})
    other = {"cp": 2, "sizes": (4, 12), "has_second_mask": True}
    terms = {"use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_loss_coef": 0.02}
    numbers = ("pg_clip_low", "pg_clip_high", "dual_clip_loss", "MEGATRON_RL_LOSS_AGGREGATION_DIVISOR")

    def place(self, samples, rows):
        """From the second token on."""
        return in_place(samples, rows, -(-max(len(sample.tokens) for sample in samples) // 8) * 8)[:, 1:]

    def columns(self, case: RowCase, samples: Sequence[StepSample]) -> dict[str, Tensor]:
        mask, old = self.place(samples, [sample.loss_mask for sample in samples]), self.place(samples, old_of(samples))
        of_responses = self.place(samples, [[1] * len(sample.loss_mask) for sample in samples]) if case.has_second_mask else mask
        width, names = mask.shape[1] + 1, [sample.prompt_id for sample in samples]
        ids = padded_ids(samples, width)
        ids[:, 0] = torch.tensor([names.index(name) for name in names])  # the token that tells prompts apart
        lengths = torch.tensor([len(sample.tokens) for sample in samples])
        columns = {
            "input_ids": ids,
            "attention_mask": (torch.arange(width) < lengths[:, None]).long(),
            "prompt_mask": (torch.arange(width) == 0).expand(len(samples), -1),
            "response_mask": torch.nn.functional.pad(of_responses, (1, 0)).long(),
            "advantages": advantages_of(samples) * mask,
            "old_log_probs": old,
            "ref_log_probs": old + 0.3,
            "infer_logprobs": self.place(samples, sampled_of(samples)),
        }
        return columns | ({"final_response_mask": mask.long()} if case.has_second_mask else {})

    def settings(self, case: RowCase, **pipeline: Any) -> tuple[Launch, bool]:
        """(the launch, whether the batch has placeholders for old log-probabilities)."""
        given = self.given_numbers(case) | pipeline
        given["use_pg_clip_range"] = "pg_clip_low" in given
        if "dual_clip_loss" in given:
            given |= {"dual_clip_loss": True, "pg_clip": 1.0}  # c = 1 + 2 pg_clip
        ours = {name: given.pop(name) for name in [*given] if name.startswith(roll.VARIABLES)}
        worker = worker_config(f"{case.loss}.{case.aggregation}", samples=case.num_samples, **ours)
        config = pipeline_config(case.num_samples, **given)
        return roll.read(worker, config), not config.enable_old_logprobs_recompute

    def run(self, case, step, *, poison=None, own=None, forward_step=emulated_forward_step, **settings):
        """What this rank adds to the gradient, and to the reported losses. On the ranks of an initialised Megatron."""
        ours = {f"MEGATRON_RL_{name.upper()}": value for name, value in (own or {}).items()}
        launch, is_on_policy = self.settings(case, **settings, **ours)
        step = step if poison is None else self.poisoned(step, poison)
        is_fused = launch.config.fused_lm_head_loss
        strategy = Strategy(case, step, poison, forward_step, is_fused)
        if is_fused:
            launch = replace(launch, config=replace(launch.config, max_logits_bytes=CHUNK))
        loss = RollLoss(launch, strategy, is_on_policy=is_on_policy)
        order = [index for batch in list(case.micro_batches())[strategy.groups.dp.rank()] for index in batch]
        data = Data({name: column[order] for name, column in step.columns.items()}, {})
        metrics = strategy.train_step(batch=data, loss_func=loss)
        is_first = strategy.groups.cp.rank() == strategy.groups.tp.rank() == 0
        total = sum(log["actor/total_loss@sum"] for log in metrics) if is_first else 0.0
        # With the head the gradient of a hidden state is complete on each tensor-parallel rank.
        gradients = [gradient / (case.tp if is_fused else 1) for gradient in gradients_of(strategy.leaves)]
        return Result(total, gradients, metrics)

    def host_factor(self, case, num_microbatches):
        return num_microbatches * case.dp

    def errors(self, cases, pool):
        return errors_of(cases, lambda chosen, **layout: pool().run(results_on_rank, chosen, **layout))


ADAPTER = Roll()


def results_on_rank(rank: int, cases: Sequence[RowCase], forward_step: Callable[..., Any] = emulated_forward_step) -> list[Result]:
    return [ADAPTER.run(case, ADAPTER.step(case), forward_step=forward_step) for case in cases]


def errors_of(cases: Sequence[RowCase], run: Callable[..., list[list[Result]]]) -> dict[str, float]:
    """run: RankPool.run or run_ranks, for the cases of one layout of ranks."""
    errors: dict[str, float] = {}
    for dp, cp, tp in sorted({(case.dp, case.cp, case.tp) for case in cases}):
        chosen = [case for case in cases if (case.dp, case.cp, case.tp) == (dp, cp, tp)]
        layout = {"context_parallel_size": cp, "tensor_model_parallel_size": tp}
        for case, *parts in zip(chosen, *run(chosen, world_size=dp * cp * tp, **layout), strict=True):
            alone = RowCase(loss=case.loss, aggregation=case.aggregation, num_samples=case.num_samples)
            errors[str(case)] = largest_error(added_up(parts), *truth_of(alone))  # no layout changes the truth
    return errors


@functools.cache
def truth_of(case: RowCase) -> tuple[float, list[Tensor]]:
    return ADAPTER.truth(case, ADAPTER.step(case))


def added_up(parts: Sequence[Result]) -> Result:
    gradients = [torch.stack(of_leaf).sum(0) for of_leaf in zip(*(part.gradients for part in parts), strict=True)]
    return Result(sum(part.loss for part in parts), gradients, [log for part in parts for log in part.metrics])
