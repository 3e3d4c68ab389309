"""One optimiser step through NeMo-RL's call of a loss: micro-batches and factors of its Megatron worker, a float64 truth.

The call is emulated, or NeMo-RL's own LossPostProcessor.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import dense_row_cases
import torch
from dense_row_cases import (
    AGGREGATIONS,
    Result,
    RowCase,
    gradients_of,
    in_place,
    largest_error,
    own_part,
    parameters_of,
    samples_of,
)
from torch import Tensor

from megatron_rl.hosts import nemo_rl
from megatron_rl.testing.layout_step import StepSample
from megatron_rl.testing.reference import CLIPS, DIVISOR
from megatron_rl.weights import get_loss_aggregation

PACKINGS = ("rows", "a call a sequence", "one call")
AFTER_THE_ESTIMATOR = [name.removeprefix("grpo.") for name in nemo_rl.AFTER_THE_ESTIMATOR]
# What the samples that sample_mask drops are filled with: they are in no count.
DROPPED = (3, 9)


@dataclass(frozen=True, kw_only=True)
class Case(RowCase):
    packing: str = "rows"
    has_dropped: bool = False  # samples with sample_mask 0

    def __str__(self) -> str:
        return f"{RowCase.__str__(self)} {self.packing}{' dropped' * self.has_dropped}"


# Every second layout has dropped samples.
LAYOUTS = [layout | {"has_dropped": number % 2 == 1} for number, layout in enumerate(dense_row_cases.LAYOUTS)]


def matrix(losses: Sequence[str]) -> list[Case]:
    return [
        Case(loss=loss, aggregation=aggregation, packing=packing, **layout)
        for loss in losses
        for aggregation in AGGREGATIONS
        for packing in PACKINGS
        for layout in LAYOUTS
    ]


def loss_settings(case: Case) -> dict[str, Any]:
    """What a launch line sets of loss_fn."""
    clip, parameters = CLIPS[case.loss], parameters_of(case)
    settings: dict[str, Any] = {"megatron_rl": f"{case.loss}.{case.aggregation}", "reference_policy_kl_penalty": 0.0}
    if clip is not None:
        settings |= {"ratio_clip_min": clip[0], "ratio_clip_max": clip[1]}
    if parameters:
        settings["ratio_clip_c"] = parameters["clip_ratio_c"]
    if get_loss_aggregation(case.aggregation).takes_divisor:
        settings["megatron_rl_loss_aggregation_divisor"] = DIVISOR
    return settings


def master_config(loss_fn: Mapping[str, Any], *, samples: int = 16, top_p: float = 1.0, **grpo: Any) -> SimpleNamespace:
    sizes = {"num_prompts_per_step": samples // 4, "num_generations_per_prompt": 4, **dict.fromkeys(AFTER_THE_ESTIMATOR)}
    generation = {"top_p": top_p, "vllm_cfg": {"logprobs_mode": "processed_logprobs"}}
    policy = {"megatron_cfg": {"enabled": True}, "train_global_batch_size": samples, "generation": generation}
    return SimpleNamespace(loss_fn=loss_fn, policy=policy, grpo=SimpleNamespace(**(sizes | grpo)))


class LossType(enum.Enum):
    TOKEN_LEVEL = "token_level"


class OwnLoss:
    """What ours uses of NeMo-RL's ClippedPGLossFn: attributes, the KL (k3, a mean over tokens), a metric."""

    input_type, loss_type = "logprob", LossType.TOKEN_LEVEL

    def __init__(self, cfg: Any, use_fused_linear_logprobs: bool = False):
        self.use_fused_linear_logprobs = use_fused_linear_logprobs
        self.force_on_policy_ratio = dict(cfg).get("force_on_policy_ratio", False)
        self.reference_policy_kl_penalty = dict(cfg).get("reference_policy_kl_penalty", 0.01)
        self.metric_normalizations: dict[str, object] = {}

    def __call__(self, next_token_logprobs, data, global_valid_seqs, global_valid_toks):
        mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
        ratio = (next_token_logprobs - data["prev_logprobs"][:, 1:]).exp()
        loss = (-data["advantages"][:, 1:] * ratio * mask).sum() / global_valid_toks
        if self.reference_policy_kl_penalty:
            gap = data["reference_policy_logprobs"][:, 1:] - data.get("curr_logprobs_unfiltered", next_token_logprobs)
            loss = loss + self.reference_policy_kl_penalty * ((gap.exp() - 1 - gap) * mask).sum() / global_valid_toks
        return loss, {"loss": loss.item(), "probs_ratio": float((ratio.detach() * mask).sum() / global_valid_toks)}


def make_loss(case: Case, own: Callable[..., Any] = OwnLoss, **settings: Any) -> nemo_rl.NemoLoss:
    given = loss_settings(case) | settings
    return nemo_rl.NemoLoss(own(given), nemo_rl.read(master_config(given)), case.num_samples)


@dataclass
class Step:
    """Whole padded samples: [S, W], position t is of token t; sample_mask [S]. `log_probs` belong to the responses."""

    samples: list[StepSample]
    log_probs: list[Tensor]
    columns: dict[str, Tensor]

    def kept(self) -> list[int]:
        return [index for index, bit in enumerate(self.columns["sample_mask"].tolist()) if bit]


def make_step(case: Case, given: tuple[list[StepSample], list[Tensor]] | None = None) -> Step:
    """given: samples, and log-probabilities of their responses; None: samples_of."""
    samples, log_probs = given or samples_of(case)
    width = max(len(sample.tokens) for sample in samples)

    column = functools.partial(in_place, samples, width=width)
    mask, old = column([sample.loss_mask for sample in samples]), column([sample.old_log_probs or [] for sample in samples])
    dropped = [index for index in DROPPED if case.has_dropped]
    sample_mask = torch.tensor([float(index not in dropped) for index in range(len(samples))])
    advantages = torch.tensor([sample.advantage for sample in samples])[:, None].expand(mask.shape)
    if case.aggregation == "prompt_mean":
        names = [sample.prompt_id for sample in samples]
        prompts = torch.tensor([[names.index(name), 7] for name in names])
        estimator = SimpleNamespace(compute_advantage=lambda prompt_ids, mask, rewards: rewards)
        advantages = nemo_rl.with_prompt_weights(estimator).compute_advantage(
            prompt_ids=prompts, rewards=advantages, mask=mask * sample_mask[:, None]
        )
    columns = {
        "input_ids": torch.stack([torch.tensor([*s.tokens, *[0] * (width - len(s.tokens))]) for s in samples]),
        "input_lengths": torch.tensor([len(sample.tokens) for sample in samples]),
        "token_mask": mask,
        "sample_mask": sample_mask,
        "advantages": advantages,
        "prev_logprobs": old,
        "generation_logprobs": column([s.rollout_log_probs or [x - 0.1 for x in s.old_log_probs or []] for s in samples]),
        "reference_policy_logprobs": old + 0.3,
    }
    return Step(samples, log_probs, columns)


def poisoned(step: Step, poison: float) -> Step:
    """The step with this in each masked position; log-probabilities of the policy are poisoned by the call."""
    is_kept = (step.columns["token_mask"] * step.columns["sample_mask"][:, None]).bool()
    names = ("prev_logprobs", "generation_logprobs", "reference_policy_logprobs", "advantages")
    return Step(
        step.samples, step.log_probs, step.columns | {name: torch.where(is_kept, step.columns[name], poison) for name in names}
    )


def truth(case: Case, step: Step) -> tuple[float, list[Tensor]]:
    """Of the samples that sample_mask keeps: the others are not in the step."""
    kept = step.kept()
    loss, found = dense_row_cases.truth(case, [step.samples[i] for i in kept], [step.log_probs[i] for i in kept])
    gradients = [torch.zeros_like(values) for values in step.log_probs]
    for index, gradient in zip(kept, found, strict=True):
        gradients[index] = gradient
    return loss, gradients


Call = Callable[[Case, Any, dict[str, Tensor], list[Tensor], tuple[Tensor, Tensor], int], tuple[Tensor, dict]]


def emulated_call(
    case: Case,
    loss: Any,
    data: dict[str, Tensor],  # of the micro-batch
    rows: list[Tensor],  # the log-probabilities of each sample's tokens after the first
    counts: tuple[Tensor, Tensor],  # global_valid_seqs, global_valid_toks
    num_microbatches: int,
) -> tuple[Tensor, dict]:
    """NeMo-RL's wrappers and factors around a loss."""
    width = data["token_mask"].shape[1]
    if case.packing == "a call a sequence":
        total, metrics = torch.zeros(()), {}
        for index, values in enumerate(rows):
            length = len(values) + 1
            own = {name: column[index : index + 1] for name, column in data.items()}
            own = {name: column[:, :length] if column.ndim > 1 else column for name, column in own.items()}
            value, log = loss(data=own, global_valid_seqs=counts[0], global_valid_toks=counts[1], next_token_logprobs=values[None])
            total = total + value
            metrics = {name: metrics.get(name, 0.0) + number for name, number in log.items()}
    else:
        padded = torch.stack([torch.nn.functional.pad(values, (0, width - 1 - len(values))) for values in rows])
        total, metrics = loss(data=data, global_valid_seqs=counts[0], global_valid_toks=counts[1], next_token_logprobs=padded)
    return total / case.cp * num_microbatches / case.cp, metrics


def run_step(
    case: Case, step: Step, loss: Any, call: Call = emulated_call, poison: float | None = None, cp_group: Any = None
) -> Result:
    """The gradient that the optimiser gets, and the sum of the reported losses over data-parallel ranks and micro-batches.

    cp_group: this process is one of its ranks, and the call communicates; None: the ranks are a loop."""
    leaves = [values.float().requires_grad_() for values in step.log_probs]
    mask = step.columns["token_mask"][:, 1:] * step.columns["sample_mask"][:, None]
    counts = step.columns["sample_mask"].sum(), mask.sum()
    total, metrics = 0.0, []
    for micro_batches in case.micro_batches():
        for chosen in micro_batches:
            data = {name: column[chosen] for name, column in step.columns.items()}
            for cp_rank in range(case.cp if cp_group is None else 1):
                part = case if cp_group is None else replace(case, cp=1)  # there the call takes the rank's part of the logits
                rows = [row_of(part, step, leaves, index, cp_rank, poison) for index in chosen]
                value, log = call(case, loss, data, rows, counts, len(micro_batches))
                # Megatron: x c / M. The gather of log-probabilities adds the gradients of c equal calls. DDP: sums.
                (value * case.cp / len(micro_batches) * (case.cp if cp_group is None else 1)).backward()
                if cp_rank == 0:
                    total += log["loss"]
                    metrics.append(log)
    gradients = gradients_of(leaves)
    if cp_group is not None:
        for gradient in gradients:
            torch.distributed.all_reduce(gradient, group=cp_group)
    return Result(total, gradients, metrics)


def row_of(case: Case, step: Step, leaves: Sequence[Tensor], index: int, cp_rank: int, poison: float | None) -> Tensor:
    """[length - 1]: of the tokens after the first; with gradient where this rank's logits are."""
    sample = step.samples[index]
    length, prompt = len(sample.tokens), len(sample.tokens) - len(sample.loss_mask)
    values = torch.cat([torch.full((prompt - 1,), -1.0), leaves[index], torch.zeros(1)])  # row p predicts token p + 1
    values = own_part(values, cp_rank, case.cp)[:-1]
    if poison is None:
        return values
    is_kept = step.columns["token_mask"][index, 1:length].bool() & (step.columns["sample_mask"][index] > 0)
    return torch.where(is_kept, values, poison)


def error_of(case: Case, call: Call = emulated_call, own: Callable[..., Any] = OwnLoss, cp_group: Any = None) -> float:
    step = make_step(case)
    return largest_error(run_step(case, step, make_loss(case, own), call, cp_group=cp_group), *truth(case, step))
