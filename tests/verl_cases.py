"""verl: its batch, its config and its call of a loss, emulated.

Its engines divide one number each in another way, and come to the same: Megatron multiplies by M c / M and averages over D c ranks;
per token it multiplies by R / D and divides by the R tokens that the model was given; FSDP averages over D ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from adapter_cases import Adapter, Call, RowCase, Step, advantages_of, old_of, put, responses, rollouts_of, sampled_of
from torch import Tensor

from megatron_rl.count import StepTotals
from megatron_rl.hosts import verl, verl_loss, verl_step
from megatron_rl.hosts.dense_rows import RowCounts
from megatron_rl.layout.groups import SINGLE
from megatron_rl.testing.layout_step import StepSample


class Batch(dict):
    """What ppo_loss uses of a TensorDict."""

    def select(self, *names: str) -> Batch:
        return Batch({name: self[name] for name in names})

    def to_padded_tensor(self) -> Batch:
        return self


@dataclass
class ActorConfig:
    """verl's actor config, as far as a loss reads it: attributes, and `get`."""

    policy_loss: dict = field(default_factory=dict)
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


@functools.cache
def filled_tables() -> SimpleNamespace:
    tables = emulated_tables()
    verl_loss.register(tables)
    return tables


def emulated_ppo_loss(config: ActorConfig, rows: Sequence[Tensor], data: Batch) -> tuple[Tensor, dict]:
    """The contract of verl's ppo_loss: responses cut out of the rows, the step's counts in the config, all by keyword."""
    info = {name: data[name] for name in ("dp_size", "batch_num_tokens", "global_batch_size")}
    config.global_batch_info |= info | {"loss_scale_factor": config.loss_scale_factor}
    return filled_tables().POLICY_LOSS_REGISTRY[config.policy_loss["loss_mode"]](
        old_log_prob=data["old_log_probs"],
        log_prob=responses(data, rows, data["responses"].shape[1]),
        advantages=data["advantages"],
        response_mask=data["response_mask"].to(bool),
        loss_agg_mode=config.loss_agg_mode,
        config=config,
        rollout_is_weights=data.get("rollout_is_weights", None),
    )


def whole_config(settings: Mapping[str, Any]) -> dict[str, Any]:
    """verl's whole config, as far as it is read in the driver. settings: by dotted names."""
    sizes = {f"{verl.ACTOR}{verl.MINI_BATCH}": 256, verl.BATCH: 256}
    return put({}, {verl.LOSS_MODE: "megatron_rl.grpo.token_mean", f"{verl.ROLLOUT}name": "vllm", **sizes, **settings})


def plain_rows(mask: Tensor) -> RowCounts:
    """Of a mini-batch of 8 rows with 10 tokens of 8 prompts, each a rollout."""
    tokens = mask.sum(-1).long()
    return RowCounts(StepTotals(num_samples=8, num_prompts=8, num_tokens=10), tokens, tokens, None)


EACH = object()


def one_call(
    mode: str = "megatron_rl.grpo.token_mean", *, rows: Any = EACH, dp_size: int | None = 2, config: Any = None, **changes: Any
) -> tuple[Tensor, dict, Tensor]:
    """(loss, metrics, gradient) of two samples of three tokens. The rows are as many as the mask's; `changes` replace arguments."""
    config = config or ActorConfig()
    config.policy_loss["loss_mode"] = mode
    config.global_batch_info = {"dp_size": dp_size}
    mask = changes.get("response_mask", torch.ones(2, 3, dtype=torch.bool))
    verl_loss.RUNS.of(config).rows = plain_rows(mask) if rows is EACH else rows
    given = {
        "old_log_prob": torch.full(mask.shape, -1.1),
        "log_prob": torch.full(mask.shape, -1.0, requires_grad=True),
        "advantages": torch.linspace(1.0, -0.5, mask.shape[0])[:, None].expand(mask.shape),
        "response_mask": mask,
        "loss_agg_mode": config.loss_agg_mode,
        "config": config,
    }
    given |= changes
    loss, metrics = filled_tables().POLICY_LOSS_REGISTRY[mode](**given)
    return loss.detach(), metrics, torch.autograd.grad(loss, given["log_prob"])[0]


def mode_of(case: RowCase) -> str:
    return f"megatron_rl.{case.loss}.{case.aggregation}"


class Verl(Adapter):
    name = "verl"
    metrics = frozenset({"actor/pg_clipfrac", "actor/ppo_kl"})
    numbers = ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "loss_scale_factor")

    def matrix(self, losses):
        """row_mean differs from sample_mean in rollouts of several rows only, and has them."""
        return [replace(case, has_rollouts=case.aggregation == "row_mean") for case in super().matrix(losses)]

    def columns(self, case: RowCase, samples: Sequence[StepSample]) -> dict[str, Tensor]:
        mask, old = self.place(samples, [sample.loss_mask for sample in samples]), self.place(samples, old_of(samples))
        lengths = torch.tensor([len(sample.loss_mask) for sample in samples])
        prompts = torch.tensor([len(sample.tokens) for sample in samples]) - lengths
        widths = int(prompts.max()), mask.shape[1]
        is_prompt = torch.arange(widths[0]) >= widths[0] - prompts[:, None]  # on the left of verl's padding
        columns = {
            "prompts": torch.zeros(len(samples), widths[0]).long(),
            "responses": torch.zeros(len(samples), widths[1]).long(),
            "attention_mask": torch.cat([is_prompt, torch.arange(widths[1]) < lengths[:, None]], 1).long(),
            "response_mask": mask,
            "old_log_probs": old,
            "advantages": advantages_of(samples) * mask,
        }
        if all(sample.rollout_log_probs for sample in samples):  # rollout_is=token, with a threshold that cuts nothing
            columns["rollout_is_weights"] = (old - self.place(samples, sampled_of(samples))).clamp(-20, 20).exp() * mask
        return columns

    def start(self, case, step, own, **settings):
        config = ActorConfig(policy_loss={"loss_mode": mode_of(case), **own, **settings}, **self.given_numbers(case))
        return self.by(emulated_ppo_loss, config, case, step)

    def by(self, ppo_loss: Callable[..., tuple[Tensor, dict]], config: Any, case: RowCase, step: Step) -> Call:
        """Calls of this ppo_loss. The mini-batch is counted as one rank's, because ranks are a loop; prompts of one size are not
        asked for."""
        data = {"response_mask": step.columns["response_mask"], "uid": [str(sample.prompt_id) for sample in step.samples]}
        if case.has_rollouts:
            data["session_id"] = rollouts_of(step.samples)
        launch = verl.read(config)
        launch = replace(launch, config=replace(launch.config, allow_partial_prompt_groups=True))
        totals, counts = verl_step.count_mini_batch(launch, data, SINGLE, None)

        def call(data: dict[str, Tensor], rows: list[Tensor], num_microbatches: int) -> tuple[Tensor, dict]:
            verl_loss.RUNS.of(config).rows = verl_step.rows_of(launch, totals, counts[data["number"]])
            loss, log = ppo_loss(config, rows, Batch(data, dp_size=case.dp, batch_num_tokens=None, global_batch_size=None))
            return loss * self.host_factor(case, num_microbatches), log

        return call

    def host_factor(self, case, num_microbatches):
        return num_microbatches


ADAPTER = Verl()
