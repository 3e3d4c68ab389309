"""One optimiser step through prime-rl's calls of a loss: its packed rows, the factors of its trainer, a float64 truth.

Packing and the sum over samples are emulated, or prime-rl's own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import dense_row_cases
import torch
from dense_row_cases import LAYOUTS, Result, RowCase, gradients_of, parameters_of, samples_of
from torch import Tensor

from megatron_rl.hosts import prime_rl, prime_rl_loss
from megatron_rl.loss_hub import get_loss_aggregation, get_policy_loss
from megatron_rl.step_counts import StepTotals
from megatron_rl.testing.layout_step import StepSample
from megatron_rl.testing.reference import CLIPS, DIVISOR, losses_by_hand, weights_by_hand

AGGREGATIONS = prime_rl.AGGREGATIONS
# The number of a token: that of its sample, and its place there. Padding has number 1.
PLACES = 1000
STREAMS = ("rl_weights", "ce_weights", "ref_kl_weights")


def matrix(losses: Sequence[str]) -> list[RowCase]:
    return [RowCase(loss=loss, aggregation=one, **layout) for loss in losses for one in AGGREGATIONS for layout in LAYOUTS]


def settings_of(case: RowCase, **settings: Any) -> dict[str, Any]:
    """The kwargs of trainer.loss."""
    clip = CLIPS.get(case.loss)
    given: dict[str, Any] = {"policy_loss": case.loss}
    given |= {} if clip is None else {"clip_ratio_low": clip[0], "clip_ratio_high": clip[1]}
    given |= parameters_of(case)
    record = get_loss_aggregation(case.aggregation)
    given |= {"loss_aggregation_divisor": DIVISOR} if record.takes_divisor else {}
    given |= {"one_sample_per_rollout": True} if record.counts_rollouts else {}
    return given | settings


@dataclass
class Rollout:
    """A sample as prime-rl's orchestrator has it: prompt and response in one row."""

    token_ids: list[int]
    mask: list[bool]
    logprobs: list[float]
    temperatures: list[float]
    env_name: str
    advantages: list[float]
    rl_weights: list[float] | None
    ref_logprobs: None = None
    mm_kwargs: None = None
    mm_token_type_ids: None = None
    routed_experts: None = None
    ce_weights: None = None
    ref_kl_weights: None = None


def rollouts_of(samples: Sequence[StepSample], loss: str, weights: Mapping[int, Sequence[float]]) -> list[Rollout]:
    """weights: of the response's tokens of some samples, for prime-rl's rl component."""
    found = []
    for index, sample in enumerate(samples):
        length, response = len(sample.tokens), len(sample.loss_mask)
        behind = sample.old_log_probs if get_policy_loss(loss).anchor == "old" else sample.rollout_log_probs
        assert behind is not None and length < PLACES
        prompt = length - response
        found.append(
            Rollout(
                token_ids=[(index + 1) * PLACES + place for place in range(length)],
                mask=[*[False] * prompt, *map(bool, sample.loss_mask)],
                logprobs=[*[0.0] * prompt, *behind],
                temperatures=[1.0] * length,
                env_name="env",
                advantages=[*[0.0] * prompt, *[sample.advantage * bit for bit in sample.loss_mask]],
                rl_weights=[*[0.0] * prompt, *weights[index]] if index in weights else None,
            )
        )
    return found


class EmulatedPrime:
    """The contract of prime-rl's packing, loader and sum of losses."""

    def packed(self, case: RowCase, rollouts: Sequence[Rollout]) -> list[list[dict[str, Any]]]:  # of each data-parallel rank
        return [
            [self._row([rollouts[index] for index in chosen], case.cp) for chosen in of_rank] for of_rank in case.micro_batches()
        ]

    def _row(self, rollouts: Sequence[Rollout], multiple: int) -> dict[str, Any]:
        lengths = [len(one.token_ids) for one in rollouts]
        padding = -sum(lengths) % multiple
        lengths[-1] += padding
        has_weights = any(one.rl_weights is not None for one in rollouts)

        def row(name: str, fill: Any, dtype: torch.dtype) -> Tensor:
            values = [getattr(one, name) or [1.0] * len(one.token_ids) for one in rollouts]
            return torch.tensor([[*[value for of_one in values for value in of_one], *[fill] * padding]], dtype=dtype)

        return {
            "input_ids": row("token_ids", 1, torch.long),
            "loss_mask": row("mask", False, torch.bool),
            "advantages": row("advantages", 0.0, torch.float),
            "inference_logprobs": row("logprobs", 0.0, torch.float),
            "ref_logprobs": None,
            "rl_weights": row("rl_weights", 0.0, torch.float) if has_weights else None,
            "ce_weights": None,
            "ref_kl_weights": None,
            "sequence_lengths": lengths,
        }

    def loader(self, micro_batches: list[dict[str, Any]]) -> Any:
        from prime_rl.trainer.rl import data

        return data.DataLoader(micro_batches)

    def setup(self, import_path: str, kwargs: Mapping[str, Any]) -> Any:
        from prime_rl.trainer.rl import loss

        return loss.setup_rl_loss_fn(SimpleNamespace(import_path=import_path, kwargs=dict(kwargs)))

    def compute_loss(self, **given: Any) -> tuple[Tensor, dict[str, Tensor]]:
        from prime_rl.trainer.rl import loss

        return loss.compute_loss(**given)


EMULATED_LOSS = """
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any
@dataclass
class LossInputs:
    trainer_logprobs: Any
    inference_logprobs: Any
    ref_logprobs: Any
    advantages: Any
    loss_mask: Any
    loss_weights: Any = field(default=None)
@dataclass
class LossOutputs:
    loss: Any
    metrics: Any
def setup_rl_loss_fn(loss_config):
    module, _, name = loss_config.import_path.rpartition(".")
    function = getattr(import_module(module), name)
    return lambda inputs: function(inputs, **loss_config.kwargs)
def compute_loss(trainer_logprobs, inference_logprobs, ref_logprobs, advantages, loss_mask, rl_weights, ce_weights,
                 ref_kl_weights, rl_loss_fn, rl_scale, ce_scale, ref_kl_scale):
    total, metrics = trainer_logprobs[0].sum() * 0.0, []
    for number, mask in enumerate(loss_mask):
        weights = None if rl_weights is None else rl_weights[number]
        mask = mask if weights is None else mask & (weights != 0)
        if weights is None or mask.any():
            columns = (trainer_logprobs[number], inference_logprobs[number], None, advantages[number], mask, weights)
            found = rl_loss_fn(LossInputs(*columns))
            total = total + found.loss
            metrics.append(found.metrics)
    return total / rl_scale, metrics
"""
EMULATED_DATA = """
class DataLoader:
    def __init__(self, micro_batches): self.micro_batches = micro_batches
    def get_batch(self): return self.micro_batches
class FakeDataLoader(DataLoader):
    def get_batch(self): return self.micro_batches
"""


def emulated_prime(monkeypatch: Any) -> None:
    """The modules of prime-rl that ours imports."""
    for path, text in ((prime_rl.LOSSES, EMULATED_LOSS), (prime_rl.BATCHES, EMULATED_DATA)):
        names = path.split(".")
        for end in range(1, len(names) + 1):
            name = ".".join(names[:end])
            if name not in sys.modules:
                module = ModuleType(name)
                module.__path__ = []
                monkeypatch.setitem(sys.modules, name, module)
                if end > 1:
                    monkeypatch.setattr(sys.modules[".".join(names[: end - 1])], names[end - 1], module, raising=False)
        exec(text, vars(sys.modules[path]))


def run_step(
    case: RowCase,
    samples: Sequence[StepSample],
    log_probs: Sequence[Tensor],
    host: Any = None,
    weights: Mapping[int, Sequence[float]] | None = None,
    poison: float | None = None,  # in masked positions
    **settings: Any,
) -> Result:
    """The gradient that the optimiser gets, and the sum of the losses over ranks and micro-batches."""
    host = host or EmulatedPrime()
    path = f"{prime_rl.__name__}.{case.aggregation}"
    loss_fn = host.setup(path, settings_of(case, **settings))
    leaves = [values.float().requires_grad_() for values in log_probs]
    loaders = [host.loader(rows) for rows in host.packed(case, rollouts_of(samples, case.loss, weights or {}))]
    batches = [loader.get_batch() for loader in loaders]
    counts = [prime_rl_loss.totals_of(batch) for batch in batches]
    scale = case.cp * sum(int(mask.sum()) for batch in batches for row in batch for mask in prime_rl_loss.rl_masks(row))
    scale = max(scale, 1)
    step = StepTotals(case.cp * sum(one.num_samples for one in counts), None, scale)
    total, metrics = 0.0, []
    with counted_as(step):
        for batch, loader in zip(batches, loaders, strict=True):
            assert loader.get_batch() is not None
            for row in batch:
                for cp_rank in range(case.cp):
                    values = row_of(row, leaves, cp_rank, case.cp)
                    loss, found = call(host, row, values, loss_fn, scale, poison)
                    # the gather: c equal gradients; FSDP: mean over D c ranks, x D c
                    (loss * case.cp).backward()
                    total += float(loss.detach())
                    metrics.append(found)
    return Result(total, gradients_of(leaves), metrics)


def call(host: Any, row: Mapping[str, Any], values: Tensor, loss_fn: Any, scale: int, poison: float | None) -> Any:
    columns = {name: row[name][0] for name in ("inference_logprobs", "advantages")}
    if poison is not None:
        values = torch.where(row["loss_mask"][0], values, poison)
        columns = {name: torch.where(row["loss_mask"][0], column, poison) for name, column in columns.items()}
    lengths = row["sequence_lengths"]
    streams = {name: None if row[name] is None else row[name][0].split(lengths) for name in STREAMS}
    return host.compute_loss(
        trainer_logprobs=values.split(lengths),
        ref_logprobs=None,
        loss_mask=row["loss_mask"][0].split(lengths),
        rl_loss_fn=loss_fn,
        rl_scale=scale,
        ce_scale=1,
        ref_kl_scale=1,
        **{name: column.split(lengths) for name, column in columns.items()},
        **streams,
    )


class counted_as:
    """The counts of all ranks, for the loop over ranks in one process."""

    def __init__(self, totals: StepTotals):
        self.totals, self.own = totals, prime_rl_loss.totals_of

    def __enter__(self) -> None:
        prime_rl_loss.totals_of = lambda micro_batches: self.totals

    def __exit__(self, *error: object) -> None:
        prime_rl_loss.totals_of = self.own


def row_of(row: Mapping[str, Any], leaves: Sequence[Tensor], cp_rank: int, cp_size: int) -> Tensor:  # [length of the row]
    """Log-probabilities of a packed row, with gradient where this context-parallel rank has the logits: one of c equal parts."""
    found = []
    for number in row["input_ids"][0].tolist():
        index, place = number // PLACES - 1, number % PLACES
        found.append((index, place))
    lengths: dict[int, int] = {}
    for index, place in found:
        lengths[index] = max(lengths.get(index, 0), place + 1)
    zero = torch.zeros(())
    values = []
    for index, place in found:
        start = lengths[index] - len(leaves[index]) if index >= 0 else 0
        values.append(leaves[index][place - start] if index >= 0 and place >= start else zero)
    whole = torch.stack(values)
    part = len(whole) // cp_size
    own = torch.zeros(len(whole), dtype=torch.bool)
    own[cp_rank * part : (cp_rank + 1) * part] = True
    return torch.where(own, whole, whole.detach())


def truth(
    case: RowCase,
    samples: Sequence[StepSample],
    log_probs: Sequence[Tensor],
    factors: Sequence[Sequence[float]] | None = None,  # of each token
) -> tuple[float, list[Tensor]]:
    """A sample without a trained token is not of the step."""
    leaves = [values.clone().requires_grad_() for values in log_probs]
    kept = [index for index, sample in enumerate(samples) if any(sample.loss_mask)]
    of_kept = [samples[index] for index in kept]
    chosen = None if factors is None else [factors[index] for index in kept]
    sums = losses_by_hand(of_kept, [leaves[index] for index in kept], case.loss, parameters_of(case), chosen)
    loss = torch.tensor(weights_by_hand(of_kept, case.aggregation), dtype=torch.float64) @ torch.stack(sums)
    loss.backward()
    return float(loss.detach()), gradients_of(leaves)


def error_of(case: RowCase, host: Any = None, **settings: Any) -> float:
    samples, log_probs = samples_of(case)
    found = run_step(case, samples, log_probs, host, **settings)
    return dense_row_cases.largest_error(found, *truth(case, samples, log_probs))


def with_corrected(samples: Sequence[StepSample], log_probs: Sequence[Tensor]) -> list[StepSample]:
    """The same samples on the policy of the step: what a corrected loss takes for old."""
    return [replace(one, old_log_probs=values.tolist()) for one, values in zip(samples, log_probs, strict=True)]


class RealPrime(EmulatedPrime):
    """prime-rl's own packing, loader and sum of losses, of the checkout that PRIME_RL_ROOT names."""

    def __init__(self, load: Callable[[str], Any], row_length: int = 64):
        self.load, self.row_length = load, row_length

    def packed(self, case: RowCase, rollouts: Sequence[Rollout]) -> list[list[Any]]:
        batch = self.load("prime_rl.trainer.batch")
        return batch.prepare_batch(list(rollouts), self.row_length, case.dp, batch.build_bin_cost(None), case.cp)

    def loader(self, micro_batches: list[Any]) -> Any:
        data = self.load("prime_rl.trainer.rl.data")
        loader = data.DataLoader.__new__(data.DataLoader)
        loader.receiver = SimpleNamespace(receive=lambda: micro_batches)
        return loader

    def setup(self, import_path: str, kwargs: Mapping[str, Any]) -> Any:
        loss = self.load("prime_rl.trainer.rl.loss")
        return loss.setup_rl_loss_fn(loss.CustomLossConfig(import_path=import_path, kwargs=dict(kwargs)))

    def compute_loss(self, **given: Any) -> tuple[Tensor, dict[str, Tensor]]:
        return self.load("prime_rl.trainer.rl.loss").compute_loss(**given)
