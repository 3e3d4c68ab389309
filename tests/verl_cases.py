"""One optimiser step through verl's loss call: micro-batches as its engines make them, the factors of the engine, a float64 truth.

The call is `emulated_ppo_loss`, or verl's own ppo_loss. The mini-batch is counted as one rank's, because ranks are a loop here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from dense_row_cases import (
    AGGREGATIONS,
    LAYOUTS,
    ROLLOUT_AGGREGATIONS,
    ROLLOUT_LAYOUTS,
    Result,
    RowCase,
    gradients_of,
    own_part,
    padded,
    rollouts_of,
)
from torch import Tensor

from megatron_rl.hosts import verl, verl_loss, verl_step
from megatron_rl.hosts.dense_rows import RowCounts
from megatron_rl.layout.groups import SINGLE
from megatron_rl.testing.layout_step import StepSample
from megatron_rl.testing.reference import CLIPS, DIVISOR
from megatron_rl.weights import get_loss_aggregation

ENGINES = ("megatron", "megatron per token", "fsdp")
# What each engine's ppo_loss hands over beside the rows.
Call = Callable[[Any, Mapping[str, Tensor], "Batch"], tuple[Tensor, dict]]


class Batch(dict):
    """What ppo_loss uses of a TensorDict."""

    def select(self, *names: str) -> Batch:
        return Batch({name: self[name] for name in names})

    def to_padded_tensor(self) -> Batch:
        return self


@dataclass
class ActorConfig:
    """verl's actor config, as far as a loss reads it: attributes, and `get`."""

    policy_loss: dict
    clip_ratio: float = 0.2
    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    clip_ratio_c: float = 3.0
    kl_loss_type: str = "low_var_kl"
    loss_agg_mode: str = "token-mean"
    loss_scale_factor: float | None = None
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    global_batch_info: dict = field(default_factory=dict)

    def get(self, name: str, default: object = None) -> Any:
        return getattr(self, name, default)


@dataclass(frozen=True, kw_only=True)
class Case(RowCase):
    engine: str = "megatron"

    @property
    def mode(self) -> str:
        return f"megatron_rl.{self.loss}.{self.aggregation}"

    def __str__(self) -> str:
        return f"{RowCase.__str__(self)} {self.engine}"


def matrix(losses: Sequence[str]) -> list[Case]:
    """FSDP has no context parallelism here: its sequence parallelism gathers log-probabilities by an autograd function.

    row_mean differs from sample_mean in rollouts of several rows alone, and has them."""
    return [
        Case(loss=loss, aggregation=aggregation, engine=engine, has_rollouts=aggregation == "row_mean", **layout)
        for loss in losses
        for aggregation in (*AGGREGATIONS, "row_mean")
        for engine in ENGINES
        for layout in LAYOUTS
        if not (engine == "fsdp" and "cp" in layout)
    ]


def rollout_matrix() -> list[Case]:
    rows = [("grpo", one, layout) for one in ROLLOUT_AGGREGATIONS for layout in ROLLOUT_LAYOUTS]
    rows += [(loss, "sample_mean", ROLLOUT_LAYOUTS[2]) for loss in ("gspo", "cispo", "dro")]
    return [Case(loss=loss, aggregation=one, has_rollouts=True, **layout) for loss, one, layout in rows]


def actor_settings(case: Case) -> dict[str, Any]:
    """What a launch line sets of the actor."""
    clip = CLIPS[case.loss]
    clips = {} if clip is None else {"clip_ratio_low": clip[0], "clip_ratio_high": clip[1]}
    takes_divisor = get_loss_aggregation(case.aggregation).takes_divisor
    return clips | ({"loss_scale_factor": DIVISOR} if takes_divisor else {})


def emulated_config(case: Case) -> ActorConfig:
    return ActorConfig(policy_loss={"loss_mode": case.mode}, **actor_settings(case))


def emulated_ppo_loss(config: ActorConfig, model_output: Mapping[str, Tensor], data: Batch) -> tuple[Tensor, dict]:
    """The contract of verl's ppo_loss: responses cut out of the packed rows, the step's counts in the config, all by keyword."""
    response, width = data["response_lens"], data["responses"].shape[1]
    ends = (data["prompt_lens"] + response).cumsum(0)
    values = model_output["log_probs"]
    cut = [values[end - length - 1 : end - 1] for end, length in zip(ends.tolist(), response.tolist(), strict=True)]
    info = {name: data[name] for name in ("dp_size", "batch_num_tokens", "global_batch_size")}
    config.global_batch_info |= info | {"loss_scale_factor": config.loss_scale_factor}
    function = verl_tables().get(config.policy_loss["loss_mode"])
    assert function is not None, f"{config.policy_loss['loss_mode']} is not registered"
    return function(
        old_log_prob=data["old_log_probs"],
        log_prob=torch.stack([torch.nn.functional.pad(part, (0, width - part.numel())) for part in cut]),
        advantages=data["advantages"],
        response_mask=data["response_mask"].to(bool),
        loss_agg_mode=config.loss_agg_mode,
        config=config,
        rollout_is_weights=data.get("rollout_is_weights", None),
    )


def emulated_tables() -> SimpleNamespace:
    """verl's tables as its plugins find them, with one loss of verl's own."""

    def register_policy_loss(name):
        return lambda function: tables.POLICY_LOSS_REGISTRY.setdefault(name, function)

    def compute_policy_loss_vanilla(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights):
        raise AssertionError("verl's own loss is not asked")

    def kl_penalty(logprob, ref_logprob, kl_penalty):
        return logprob - ref_logprob

    functions = {one.__name__: one for one in (register_policy_loss, compute_policy_loss_vanilla, kl_penalty)}
    tables = SimpleNamespace(__name__="verl", POLICY_LOSS_REGISTRY={}, **functions)
    return tables


def whole_config(**changes: Any) -> dict[str, Any]:
    """verl's whole config, as far as it is read in the driver. changes: dotted names with __ for a dot."""
    config: dict[str, Any] = {
        "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": 256, "policy_loss": {}}, "rollout": {"name": "vllm"}},
        "data": {"train_batch_size": 256},
    }
    for name, value in changes.items():
        *outer, last = name.split("__")
        section = config
        for part in outer:
            section = section.setdefault(part, {})
        section[last] = value
    return config


@functools.cache
def filled_tables() -> SimpleNamespace:
    tables = emulated_tables()
    verl_loss.register(tables)
    return tables


def verl_tables() -> dict[str, Callable]:
    return filled_tables().POLICY_LOSS_REGISTRY


def given_advantages(samples: Sequence[StepSample]) -> Tensor:  # [S, R]
    width = max(len(sample.loss_mask) for sample in samples)
    return torch.tensor([sample.advantage for sample in samples])[:, None] * padded([sample.loss_mask for sample in samples], width)


def count(case: Case, samples: Sequence[StepSample], config: Any) -> Callable[[Sequence[int]], RowCounts]:
    """The counts of some rows, of the mini-batch as verl's worker has it. Prompts of one size are not asked for."""
    width = max(len(sample.loss_mask) for sample in samples)
    data = {"response_mask": padded([sample.loss_mask for sample in samples], width)}
    data["uid"] = [str(sample.prompt_id) for sample in samples]
    if case.has_rollouts:
        data["session_id"] = rollouts_of(samples)
    launch = verl.read(config)
    launch = replace(launch, config=replace(launch.config, allow_partial_prompt_groups=True))
    totals, counts = verl_step.count_mini_batch(launch, data, SINGLE, None)
    return lambda chosen: verl_step.rows_of(launch, totals, counts[list(chosen)])


def uncut_weights(log_ratio: Tensor, mask: Tensor) -> Tensor:  # [S, R] each: old - sampled
    """verl's rollout_is=token, with a threshold that cuts nothing."""
    return log_ratio.clamp(-20, 20).exp() * mask


def run_step(
    case: Case,
    samples: Sequence[StepSample],
    log_probs: Sequence[Tensor],
    advantages: Tensor,  # [S, R]
    ppo_loss: Call,
    config: Any,
    poison: float | None = None,  # in masked positions
    weights_of: Callable[[Tensor, Tensor], Tensor] = uncut_weights,
) -> Result:
    """The gradient that the optimiser gets, and the sum of the reported losses over ranks and micro-batches."""
    leaves = [values.float().requires_grad_() for values in log_probs]
    rows_of, run = count(case, samples, config), verl_loss.RUNS.of(config)
    routed = sum(len(sample.tokens) for sample in samples)
    total, counted, metrics = 0.0, 0, []
    for micro_batches in case.micro_batches():
        for chosen in micro_batches:
            for cp_rank in range(case.cp):
                data, model_output = micro_batch(samples, leaves, advantages, chosen, cp_rank, case.cp, poison, weights_of)
                data |= {"dp_size": case.dp, "batch_num_tokens": None, "global_batch_size": None}
                run.rows = rows_of(chosen)
                loss, log = ppo_loss(config, model_output, data)
                metrics.append(log)
                tokens_here = sum(len(samples[index].tokens) for index in chosen)
                if case.engine == "megatron":  # x M; Megatron: x c / M; DDP: mean over dp x cp
                    scaled = loss * len(micro_batches) * case.cp / len(micro_batches) / (case.dp * case.cp)
                elif case.engine == "megatron per token":  # x R / D; sums; the division by counted tokens comes last
                    scaled = loss * routed / case.dp
                    counted += tokens_here // case.cp
                else:
                    scaled = loss / case.dp
                scaled.backward()
                total += float(loss.detach()) / case.dp if cp_rank == 0 else 0.0
    divisor = counted if case.engine == "megatron per token" else 1
    return Result(total, [gradient / divisor for gradient in gradients_of(leaves)], metrics)


def micro_batch(
    samples: Sequence[StepSample],
    leaves: Sequence[Tensor],
    advantages: Tensor,
    chosen: Sequence[int],
    cp_rank: int,
    cp_size: int,
    poison: float | None,
    weights_of: Callable[[Tensor, Tensor], Tensor],
) -> tuple[Batch, dict[str, Tensor]]:
    """Right-padded rows, and the model's packed log-probabilities: each cp rank has all of them, and the gradient of its own."""
    rows = [samples[index] for index in chosen]
    width = max(len(sample.loss_mask) for sample in rows)
    packed = []
    for index, sample in zip(chosen, rows, strict=True):
        prompt = len(sample.tokens) - len(sample.loss_mask)
        values = torch.cat([torch.zeros(prompt - 1), leaves[index], torch.zeros(1)])  # row p predicts token p + 1
        packed.append(own_part(values, cp_rank, cp_size))
    mask = padded([sample.loss_mask for sample in rows], width)
    old = padded([sample.old_log_probs or [] for sample in rows], width)
    prompts = [len(sample.tokens) - len(sample.loss_mask) for sample in rows]
    given = advantages[list(chosen), :width]
    if poison is not None:
        old, given = (torch.where(mask.bool(), values, poison) for values in (old, given))
        kept = [torch.nn.functional.pad(mask[row, : len(s.loss_mask)], (prompts[row] - 1, 1)) for row, s in enumerate(rows)]
        packed = [torch.where(keep.bool(), values, poison) for keep, values in zip(kept, packed, strict=True)]
    longest = max(prompts)
    attention = [[0] * (longest - p) + [1] * p for p in prompts]
    attention = [
        [*left, *[1] * len(s.loss_mask), *[0] * (width - len(s.loss_mask))] for left, s in zip(attention, rows, strict=True)
    ]
    data = Batch(
        prompts=torch.zeros(len(rows), longest, dtype=torch.int64),
        responses=torch.zeros(len(rows), width, dtype=torch.int64),
        attention_mask=torch.tensor(attention),
        prompt_lens=torch.tensor(prompts),
        response_lens=torch.tensor([len(sample.loss_mask) for sample in rows]),
        response_mask=mask,
        old_log_probs=old,
        advantages=given,
    )
    if all(sample.rollout_log_probs for sample in rows):
        ratios = old - padded([sample.rollout_log_probs or [] for sample in rows], width)
        data["rollout_is_weights"] = weights_of(ratios, mask)
    return data, {"log_probs": torch.cat(packed)}
