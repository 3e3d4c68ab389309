"""The loss in the place of NeMo-RL's ClippedPGLossFn, and the weights of prompt groups in its advantages. See nemo_rl.py."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from megatron_rl.count import StepTotals
from megatron_rl.declare import get_policy_loss
from megatron_rl.errors import DataError
from megatron_rl.hosts.choice import Launch
from megatron_rl.hosts.dense_rows import (
    carry_prompt_weights,
    is_carried,
    kl_of_tokens,
    loss_of_rows,
    marked_rows,
    metrics_of,
)
from megatron_rl.hosts.run import Run
from megatron_rl.losses.corrections import needs_rollout_log_probs
from megatron_rl.weights import regularizer_weights

# Our metric of the tokens that NeMo-RL's trainer leaves out of its distribution.
UNSCORED = "unscored_token_fraction"
# A score of 0.0 beside a sampler's score above this belongs to a sure token: it is rounded.
SURE = -1e-3
# [B, S] each; position t is of token t, so that [:, 1:] belongs to the log-probabilities of next tokens.
COLUMNS = ("prev_logprobs", "generation_logprobs", "reference_policy_logprobs")
UNFILTERED = "curr_logprobs_unfiltered"
# What NeMo-RL's workers, wrappers and metrics read of a loss.
LOSS_ATTRIBUTES = ("input_type", "loss_type", "use_fused_linear_logprobs", "metric_normalizations", "reference_policy_kl_penalty")


class NemoLoss:
    """What NeMo-RL calls in the place of ClippedPGLossFn. It is pickled to the workers, which must have this package."""

    def __init__(self, own: Any, launch: Launch, samples_per_step: int):
        """own: NeMo-RL's loss object of the same settings, for KL and metrics. samples_per_step: of all ranks, for prompt_mean."""
        self.own, self.launch, self.samples_per_step = own, launch, samples_per_step
        self.config, self.has_weights = launch.config, is_carried(launch.config.loss_aggregation)
        # The batch's old log-probabilities are placeholders.
        self.is_on_policy = bool(own.force_on_policy_ratio)
        # Tokens may have the score 0.0 because NeMo-RL's trainer leaves them out of its distribution.
        self.has_unscored = bool(launch.sampler and launch.sampler.kept and not launch.sampler.replayed)
        self.run = Run()
        for name in LOSS_ATTRIBUTES:
            setattr(self, name, getattr(own, name))

    def __call__(
        self,
        next_token_logprobs: Tensor,  # [B, S - 1] with gradient: whole samples, on each context-parallel rank
        data: Mapping[str, Any],  # token_mask, advantages and log-probabilities [B, S]; sample_mask [B]
        global_valid_seqs: Tensor,  # N of the global batch
        global_valid_toks: Tensor,  # T of the global batch
    ) -> tuple[Tensor, dict[str, Any]]:  # 0-d with gradient, NeMo-RL's metrics, which it adds up
        """sum_i w_i sum_t m_it u_it l_it + KL, u: the sampling correction.

        Masked values may be anything. Communication: none. Synchronises as NeMo-RL's own loss does for its metrics.
        Raises DataError for counts that are not the step's, and for rows whose weight would be wrong.
        """
        config = self.config
        whole_mask = (data["token_mask"] * data["sample_mask"][:, None]).bool()
        mask = whole_mask[:, 1:]
        totals = self._read_step(data, mask, global_valid_seqs, global_valid_toks)
        log_probs = torch.where(mask, next_token_logprobs, 0.0)
        unfiltered = torch.where(mask, data[UNFILTERED], 0.0) if UNFILTERED in data else log_probs
        data = {
            **data,
            **{name: torch.where(whole_mask, data[name], 0.0) for name in COLUMNS if name in data},
            UNFILTERED: unfiltered,
        }
        advantages, counted = data["advantages"][:, 1:], totals
        old = log_probs.detach() if self.is_on_policy else data["prev_logprobs"][:, 1:]
        if self.has_weights:
            self._check_marks(advantages, mask)
            totals = StepTotals(num_samples=self.samples_per_step, num_prompts=None, num_tokens=totals.num_tokens)
        sampled = data["generation_logprobs"][:, 1:] if needs_rollout_log_probs(config) else None
        unscored = self._unscored(log_probs, data, mask)
        scored = mask if unscored is None else mask & ~unscored
        rows = (log_probs, old, advantages, scored)
        output = loss_of_rows(config, totals, *rows, rollout_log_probs=sampled, counted=mask)
        kl, metrics = self._kl_and_metrics(log_probs, data, unscored, global_valid_seqs, global_valid_toks)
        if config.kl_coefficient:
            # As in policy_loss: the importance ratio of `unbiased` has the loss's own denominator.
            behind = data["generation_logprobs"][:, 1:] if get_policy_loss(config.policy_loss).anchor == "rollout" else old
            reference = data["reference_policy_logprobs"][:, 1:]
            sample_values = kl_of_tokens(config.kl_estimator, unfiltered, reference, behind, mask).sum(-1)
            kl = config.kl_coefficient * (regularizer_weights(mask.sum(-1), counted) * sample_values).sum()
            metrics["kl_penalty"] = kl.item() / config.kl_coefficient
        loss = output.loss if kl is None else output.loss + kl
        clipped = metrics_of(output).get("policy/clipped_ratio_fraction", 0.0)
        metrics["loss"] = loss.item()
        # NeMo-RL adds what its calls return, so each call has its share of the step's tokens.
        metrics["clipped_ratio_fraction"] = clipped * int(scored.sum()) / totals.num_tokens
        if unscored is not None:
            metrics[UNSCORED] = int(unscored.sum()) / totals.num_tokens
        self.launch.tell(self.run, totals)
        return loss, metrics

    def _unscored(self, log_probs: Tensor, data: Mapping[str, Any], mask: Tensor) -> Tensor | None:  # [B, S - 1] bool
        """The unmasked tokens that NeMo-RL's trainer has left out of its distribution, before this step or in it: their score is
        0.0, the sampler's is not. None: it leaves none out.

        Of a token that is the only one of both sets, the sampler's score is 0 too. Where it is the only one of the trainer's set
        alone it counts as left out: its score is a constant there."""
        if not self.has_unscored:
            return None
        is_left_out = log_probs == 0
        if not self.is_on_policy:
            is_left_out = is_left_out | (data["prev_logprobs"][:, 1:] == 0)
        return mask & is_left_out & (data["generation_logprobs"][:, 1:] < SURE)

    def _kl_and_metrics(
        self,
        log_probs: Tensor,
        data: dict[str, Any],
        unscored: Tensor | None,
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
    ) -> tuple[Tensor | None, dict[str, Any]]:
        """NeMo-RL's own loss at advantages of 0: nothing but its KL, with gradient, is left of it. None: it has no KL, or ours.

        In its metrics a token without a score has the sampler's, so that no ratio comes from it."""
        has_kl = self.own.reference_policy_kl_penalty != 0 and not self.config.kl_coefficient
        silent = {**data, "advantages": torch.zeros_like(data["advantages"])}
        current = log_probs.detach()
        if unscored is not None:
            sampled = data["generation_logprobs"]
            is_left_out = torch.nn.functional.pad(unscored, (1, 0))
            silent["prev_logprobs"] = torch.where(is_left_out, sampled, data["prev_logprobs"])
            current = torch.where(unscored, sampled[:, 1:], current)
        with nullcontext() if has_kl else torch.no_grad():
            loss, metrics = self.own(current, silent, global_valid_seqs, global_valid_toks)
        return (loss if has_kl else None), dict(metrics)

    def _read_step(self, data: Mapping[str, Any], mask: Tensor, global_valid_seqs: Tensor, global_valid_toks: Tensor) -> StepTotals:
        counted = [data["sample_mask"].sum(), mask.sum(), global_valid_seqs, global_valid_toks]
        samples, tokens, num_samples, num_tokens = (round(float(count)) for count in counted)
        if samples > num_samples or tokens > num_tokens:
            sizes = f"{num_samples} samples and {num_tokens} tokens to a call with {samples} samples and {tokens} tokens"
            raise DataError(f"NeMo-RL gives a step of {sizes}: its trainer sends a step in parts; start examples/run_grpo.py")
        return StepTotals(num_samples=max(num_samples, 1), num_prompts=None, num_tokens=max(num_tokens, 1))

    def _check_marks(self, advantages: Tensor, mask: Tensor) -> None:
        is_marked, has_advantage = marked_rows(advantages, mask, self.samples_per_step)
        if not bool((is_marked | ~has_advantage).all()):
            raise DataError(
                f"the advantages of {self.launch} do not have the weights of their prompt groups in a step of "
                f"{self.samples_per_step} samples: leave advantages, masks and batch as NeMo-RL's estimator has left them"
            )


def with_prompt_weights(estimator: Any) -> Any:
    """NeMo-RL's estimator, whose advantages have the weights of prompt groups."""
    compute = estimator.compute_advantage

    def compute_advantage(*, prompt_ids: Tensor, mask: Tensor, **others: Any) -> Tensor:
        return carry_prompt_weights(compute(prompt_ids=prompt_ids, mask=mask, **others), mask, prompt_ids)

    estimator.compute_advantage = compute_advantage
    return estimator
