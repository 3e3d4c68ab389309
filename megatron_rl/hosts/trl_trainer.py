"""What `megatron_rl.hosts.trl.GRPOTrainer` is: TRL's trainer with our loss in the place of its own."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import trl
from torch import Tensor

from megatron_rl.aggregation import regularizer_weights
from megatron_rl.errors import ConfigError
from megatron_rl.hosts.dense_rows import loss_of_rows, step_line
from megatron_rl.hosts.door import Found
from megatron_rl.hosts.door_line import read_launch
from megatron_rl.hosts.run import Run
from megatron_rl.hosts.settings import ABSENT, Settings, value_at
from megatron_rl.hosts.trl import DOOR, PREFIX
from megatron_rl.hosts.trl_stock import BIAS_CORRECTION, LIGERS_LOSS
from megatron_rl.loss_hub import needs_rollout_log_probs
from megatron_rl.losses import PolicyLossOutput
from megatron_rl.metrics.step import finalise_metrics
from megatron_rl.step_counts import StepTotals

# Columns that we add to TRL's batches: the number of a completion's prompt group, the tokens of that group, and (completions,
# tokens) of the micro-batch over all ranks.
GROUP, PROMPT_TOKENS, COUNTS = "megatron_rl_group", "megatron_rl_prompt_tokens", "megatron_rl_counts"
# What a model is given besides its tokens.
MODEL_INPUTS = (
    *("pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles", "image_sizes"),
    *("token_type_ids", "mm_token_type_ids", "image_position_ids"),
)


def read_args(args: Any, own: Mapping[str, Any], *, rollout_func: Any = None) -> Found:
    """args: TRL's GRPOConfig. own: our settings by our names. Raises one ConfigError with every problem."""
    if not isinstance(own, Mapping):
        raise ConfigError(f"megatron_rl={own!r} must be a mapping: {{'importance_correction': 'tis'}}")
    ours = {f"{PREFIX}{name}": value for name, value in own.items()} | {
        "rollout_func": rollout_func is not None,
        LIGERS_LOSS: hasattr(trl.GRPOTrainer, LIGERS_LOSS),
    }
    # An object has every setting; those that differ from the default of its class are somebody's.
    judged = [one.name for one in DOOR.settings if one.idle is not None or one.name == BIAS_CORRECTION]
    values = {name: value_at(args, name) for name in judged}
    given = ours | {name: value for name, value in values.items() if value not in (ABSENT, getattr(type(args), name, None))}

    def value_of(name: str) -> Any:
        return ours.get(name, ABSENT) if name.startswith(PREFIX) or name in ours else value_at(args, name)

    return read_launch(DOOR, Settings(value_of, DOOR.all_defaults, given=given))


def mask_of(inputs: Mapping[str, Any]) -> Tensor:  # [B, R] bool
    mask = inputs["completion_mask"]
    return (mask * inputs["tool_mask"] if "tool_mask" in inputs else mask).bool()


def count(batches: Sequence[dict[str, Any]], accelerator: Any) -> None:
    """Adds its counts to each of the micro-batches of one generation. Communication: one gather. Synchronises once."""
    own = torch.stack([torch.stack([mask_of(batch).sum(-1), batch[GROUP]], -1) for batch in batches])
    tokens, groups = accelerator.gather(own[None]).unbind(-1)  # [D, M, B] each
    of_groups = tokens.new_zeros(tokens.numel()).index_add(0, groups.flatten(), tokens.flatten())
    for batch, num_tokens in zip(batches, tokens.sum((0, 2)).tolist(), strict=True):
        batch[PROMPT_TOKENS] = of_groups[batch[GROUP]]
        batch[COUNTS] = (tokens.shape[0] * tokens.shape[2], num_tokens)


class GRPOTrainer(trl.GRPOTrainer):
    """As TRL's, with one argument more: megatron_rl, our settings that TRL has no name for.

    Raises ConfigError, before a model is made, for settings that are not honoured and for another TRL than the one that was probed.
    """

    def __init__(self, *given: Any, megatron_rl: Mapping[str, Any] | None = None, **named: Any):
        if problems := [*DOOR.contract_problems()]:
            raise ConfigError(problems)
        known = inspect.signature(trl.GRPOTrainer.__init__).bind(self, *given, **named).arguments
        self.found = read_args(known.get("args"), megatron_rl or {}, rollout_func=known.get("rollout_func"))
        self.run = Run()
        super().__init__(*given, **named)
        for text in self.found.warnings:
            self.run.warn(text)

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        batch = super()._generate_and_score_completions(inputs)
        rows, device = batch["completion_mask"].shape[0], batch["completion_mask"].device
        first = self.accelerator.process_index * rows
        batch[GROUP] = torch.arange(first, first + rows, device=device) // self._group_size
        return batch

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if not self.model.training:
            count([inputs], self.accelerator)
        elif self._buffered_inputs is not before:
            count(self._buffered_inputs, self.accelerator)
        return inputs

    @property
    def _group_size(self) -> int:
        return self.num_generations if self.model.training else self.num_generations_eval

    def _totals(self, inputs: Mapping[str, Any]) -> StepTotals:
        """Of the optimiser step of this micro-batch; of an evaluation, where each batch is a step."""
        batches = [inputs]
        if self.model.training:
            first = self._step - self._step % self.args.gradient_accumulation_steps
            numbers = range(first, first + self.args.gradient_accumulation_steps)
            batches = [self._buffered_inputs[number % self.args.steps_per_generation] for number in numbers]
        num_samples, num_tokens = (sum(counts) for counts in zip(*(batch[COUNTS] for batch in batches), strict=True))
        num_prompts = -(-num_samples // self._group_size)
        return StepTotals(num_samples=num_samples, num_prompts=num_prompts, num_tokens=max(num_tokens, 1))

    def _compute_loss(self, model: Any, inputs: Mapping[str, Any]) -> Tensor:  # 0-d with gradient
        """This rank's part of sum_i w_i sum_t m_it u_it l_it + KL - entropy, u: TRL's importance sampling, or our correction.

        Masked values may be anything. Communication: one gather of metrics. Raises ConfigError without the sampler's
        log-probabilities where they are needed, DataError for unmasked values that are not finite.
        """
        found, mask, ranks = self.found, mask_of(inputs), self.accelerator.num_processes
        config, totals = found.config, self._totals(inputs)
        log_probs, entropies, router_loss = self._get_per_token_logps_and_entropies(
            model,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1),
            mask.shape[1],
            compute_entropy=True,
            compute_aux_loss=self.aux_loss_enabled,
            **{name: inputs.get(name) for name in MODEL_INPUTS},
        )
        old, weights = inputs.get("old_per_token_logps"), inputs.get("importance_sampling_ratio")
        sampled = inputs.get("sampling_per_token_logps") if needs_rollout_log_probs(config) else None
        if needs_rollout_log_probs(config) and sampled is None:
            raise ConfigError(
                f"TRL's batch has no sampling_per_token_logps, which {PREFIX}{found} needs: set use_vllm=True, or "
                "return logprobs from rollout_func"
            )
        output = loss_of_rows(
            config,
            totals,
            log_probs,
            log_probs.detach() if old is None else old,
            inputs["advantages"].view(len(mask), -1).expand_as(mask),
            mask,
            scale=ranks,
            importance_weights=None if weights is None else weights.expand_as(mask),
            rollout_log_probs=sampled,
            ref_log_probs=inputs.get("ref_per_token_logps"),
            prompt_token_counts=inputs[PROMPT_TOKENS] if found.counts_prompts else None,
        )
        loss = output.loss
        entropy_of_rows = torch.where(mask, entropies.to(loss.dtype), 0.0).sum(-1)  # a model of 16 bits has them in 16
        if config.entropy_coefficient:
            of_samples = regularizer_weights(mask.sum(-1), totals).to(loss.dtype)
            loss = loss - ranks * config.entropy_coefficient * (of_samples @ entropy_of_rows)
        if self.aux_loss_enabled:
            loss = loss + self.router_aux_loss_coef * router_loss / self._num_micro_batches
        self._tell(totals, ranks)
        self._log_metrics(output, mask, entropy_of_rows.detach())
        return loss

    def _tell(self, totals: StepTotals, ranks: int) -> None:
        config, title = self.found.config, f"loss_type={PREFIX}{self.found} in TRL"
        terms = [f"KL {config.kl_coefficient:g} ({config.kl_estimator})"] * bool(config.kl_coefficient)
        terms += [f"entropy {config.entropy_coefficient:g}"] * bool(config.entropy_coefficient)
        regularizers = f"{' and '.join(terms)} x mean over samples" if terms else "no KL and no entropy in the loss"
        given = (title, config, totals, regularizers)
        self.run.tell(title, lambda: step_line(*given, of_token_mean=DOOR.of_token_mean, num_data=ranks))

    def _log_metrics(self, output: PolicyLossOutput, mask: Tensor, entropy_of_rows: Tensor) -> None:
        """By TRL's names, and summed over ranks: means over the tokens of a micro-batch; `kl` is the term's mean over the step's
        samples, once TRL has averaged what the micro-batches have logged."""
        found, tokens = finalise_metrics(output.metrics) if output.metrics is not None else {}, mask.sum()
        clipped, has_kl = found.get("policy/clipped_ratio_fraction", 0.0) * tokens, output.kl_loss is not None
        kl = output.kl_loss if output.kl_loss is not None else tokens
        own = torch.stack([value.float() for value in (tokens, clipped, entropy_of_rows.sum(), kl)])
        sums = self.accelerator.reduce(own, reduction="sum").tolist()
        metrics = self._metrics["train" if self.model.training else "eval"]
        metrics["clip_ratio/region_mean"].append(sums[1] / max(sums[0], 1.0))
        metrics["entropy"].append(sums[2] / max(sums[0], 1.0))
        if has_kl and self.found.config.kl_coefficient:
            metrics["kl"].append(sums[3] / self.accelerator.num_processes * self._num_micro_batches)

    @property
    def _num_micro_batches(self) -> int:
        return self.args.gradient_accumulation_steps if self.model.training else 1
