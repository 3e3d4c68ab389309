"""NeMo-RL: its batch, its config and its call of a loss, emulated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from adapter_cases import (
    EACH_SEQUENCE,
    LAYOUTS,
    PACKINGS,
    Adapter,
    Call,
    RowCase,
    Step,
    advantages_of,
    in_place,
    old_of,
    padded_ids,
    sampled_of,
)
from torch import Tensor

from megatron_rl.hosts import nemo_rl
from megatron_rl.testing.layout_step import StepSample

AFTER_THE_ESTIMATOR = [name.removeprefix("grpo.") for name in nemo_rl.AFTER_THE_ESTIMATOR]


def master_config(loss_fn: Mapping[str, Any], *, samples: int = 16, top_p: float = 1.0, **grpo: Any) -> SimpleNamespace:
    sizes = {"num_prompts_per_step": samples // 4, "num_generations_per_prompt": 4, **dict.fromkeys(AFTER_THE_ESTIMATOR)}
    generation = {"top_p": top_p, "vllm_cfg": {"logprobs_mode": "processed_logprobs"}}
    policy = {"megatron_cfg": {"enabled": True}, "train_global_batch_size": samples, "generation": generation}
    return SimpleNamespace(loss_fn=loss_fn, policy=policy, grpo=SimpleNamespace(**(sizes | grpo)))


class OwnLoss:
    """What ours uses of NeMo-RL's ClippedPGLossFn: attributes, the KL (k3, a mean over tokens), a metric."""

    input_type, loss_type = "logprob", "token_level"

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


Counts = tuple[Tensor, Tensor]  # global_valid_seqs, global_valid_toks


def mask_of(columns: Mapping[str, Tensor]) -> Tensor:  # [S, W - 1] bool: of next tokens
    return (columns["token_mask"] * columns["sample_mask"][:, None])[:, 1:].bool()


def counts_of(columns: Mapping[str, Tensor]) -> Counts:
    return columns["sample_mask"].sum(), mask_of(columns).sum()


def emulated_call(case: RowCase, loss: Any, data: dict[str, Tensor], rows: list[Tensor], counts: Counts, num_microbatches: int):
    """NeMo-RL's wrappers and factors around a loss. rows: as those of a `Call`."""
    named = {"global_valid_seqs": counts[0], "global_valid_toks": counts[1]}
    if case.packing == EACH_SEQUENCE:
        total, metrics = torch.zeros(()), dict[str, float]()
        for index, row in enumerate(rows):
            own = {name: column[index : index + 1] for name, column in data.items()}
            own = {name: column[:, : len(row)] if column.ndim > 1 else column for name, column in own.items()}
            value, log = loss(data=own, next_token_logprobs=row[None, :-1], **named)
            total = total + value
            metrics = {name: metrics.get(name, 0.0) + number for name, number in log.items()}
    else:
        width = data["token_mask"].shape[1]
        padded = torch.stack([torch.nn.functional.pad(row[:-1], (0, width - len(row))) for row in rows])
        total, metrics = loss(data=data, next_token_logprobs=padded, **named)
    return total * ADAPTER.host_factor(case, num_microbatches), metrics


class NemoRL(Adapter):
    name = "nemo_rl"
    metrics = frozenset({"loss", "probs_ratio", "clipped_ratio_fraction"})
    # Every second layout has samples that NeMo-RL drops.
    layouts = [
        layout | {"has_second_mask": number % 2 == 1, "packing": packing}
        for packing in PACKINGS
        for number, layout in enumerate(LAYOUTS)
    ]
    shorts = ({"dp": 2, "sizes": (2, 5), "num_samples": 14, "has_second_mask": True},)
    other = Adapter.other | {"packing": EACH_SEQUENCE}
    terms = {"reference_policy_kl_penalty": 0.1}
    numbers = ("ratio_clip_min", "ratio_clip_max", "ratio_clip_c", "megatron_rl_loss_aggregation_divisor")

    def place(self, samples, rows):
        return in_place(samples, rows, max(len(sample.tokens) for sample in samples))

    def dropped(self, case):
        return (3, 9) if case.has_second_mask else ()

    def columns(self, case: RowCase, samples: Sequence[StepSample]) -> dict[str, Tensor]:
        mask, old = self.place(samples, [sample.loss_mask for sample in samples]), self.place(samples, old_of(samples))
        sample_mask = torch.tensor([float(index not in self.dropped(case)) for index in range(len(samples))])
        advantages = advantages_of(samples).expand(mask.shape)
        if case.aggregation == "prompt_mean":
            names = [sample.prompt_id for sample in samples]
            prompts = torch.tensor([[names.index(name), 7] for name in names])
            estimator = SimpleNamespace(compute_advantage=lambda prompt_ids, mask, rewards: rewards)
            estimator = nemo_rl.with_prompt_weights(estimator)
            mask_of_step = mask * sample_mask[:, None]
            advantages = estimator.compute_advantage(prompt_ids=prompts, rewards=advantages, mask=mask_of_step)
        return {
            "input_ids": padded_ids(samples, mask.shape[1]),
            "input_lengths": torch.tensor([len(sample.tokens) for sample in samples]),
            "token_mask": mask,
            "sample_mask": sample_mask,
            "advantages": advantages,
            "prev_logprobs": old,
            "generation_logprobs": self.place(samples, sampled_of(samples)),
            "reference_policy_logprobs": old + 0.3,
        }

    def loss_settings(self, case: RowCase) -> dict[str, Any]:
        loss = {"megatron_rl": f"{case.loss}.{case.aggregation}", "reference_policy_kl_penalty": 0.0}
        return loss | self.given_numbers(case)

    def loss(self, case: RowCase, own_loss: Callable[..., Any] = OwnLoss, top_p: float = 1.0, **settings: Any) -> nemo_rl.NemoLoss:
        given = self.loss_settings(case) | settings
        return nemo_rl.NemoLoss(own_loss(given), nemo_rl.read(master_config(given, top_p=top_p)), case.num_samples)

    def start(self, case, step, own, **settings):
        ours = {f"megatron_rl_{name}": value for name, value in own.items()}
        return self.by(emulated_call, self.loss(case, **settings, **ours), case, step)

    def by(self, call: Callable[..., tuple[Tensor, dict]], loss: Any, case: RowCase, step: Step) -> Call:
        counts = counts_of(step.columns)
        return lambda data, rows, num_microbatches: call(case, loss, data, rows, counts, num_microbatches)

    def host_factor(self, case, num_microbatches):
        return num_microbatches / case.cp**2

    def factor(self, case, num_microbatches):
        """Megatron: x c / M. The gather of log-probabilities adds the gradients of c equal calls. DDP: sums."""
        return case.cp / num_microbatches * case.cp


ADAPTER = NemoRL()
