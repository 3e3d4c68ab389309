"""What ROLL's worker calls: our loss on the logits of its Megatron strategy. What ROLL's settings are to us is in roll.py."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_rl.config import Backend
from megatron_rl.count import StepTotals, count_step
from megatron_rl.errors import ConfigError
from megatron_rl.hosts.choice import Launch
from megatron_rl.hosts.dense_rows import refuse_nonfinite
from megatron_rl.hosts.heads.row_proxy import RowProxy, rows_of
from megatron_rl.hosts.roll import CONTRACT, HEAD, PROBED, STRATEGY_CONTRACT
from megatron_rl.hosts.run import Run
from megatron_rl.layout.groups import ParallelGroups, all_reduce_sum, resolve_group
from megatron_rl.losses.corrections import needs_rollout_log_probs
from megatron_rl.metrics.step import finalise_metrics, reduce_statistics
from megatron_rl.ops.backends import resolve_backend
from megatron_rl.ops.scale import AssumedScale
from megatron_rl.policy_loss import PolicyLossOutput, linear_policy_loss, policy_loss
from megatron_rl.policy_loss.inputs import options_of
from megatron_rl.weights import regularizer_weights, sample_token_weights

# Columns that we add to ROLL's batch of a step, [B] int64, and to its meta_info.
PROMPT_TOKENS, NUM_PROMPTS = "megatron_rl_prompt_tokens", "megatron_rl_num_prompts"


class RollLoss:
    """The loss of one worker, with what it has told."""

    def __init__(self, launch: Launch, strategy: Any, *, is_on_policy: bool):
        """strategy: ROLL's, which from now on counts the prompts of a step before it trains, where weights need them, and tells its
        first step. is_on_policy: the batch has placeholders for old log-probabilities. Raises ConfigError for a strategy with
        another contract than the one that was probed."""
        CONTRACT.check(STRATEGY_CONTRACT, type(strategy))
        self.launch, self.strategy, self.run, self.is_on_policy = launch, strategy, Run(), is_on_policy
        self.scale = AssumedScale()
        train_step = strategy.train_step

        @functools.wraps(train_step)
        def counted_train_step(batch: Any, loss_func: Callable[..., Any]) -> Any:
            if launch.counts_prompts:
                count_prompts(batch)
            metrics = train_step(batch=batch, loss_func=loss_func)
            launch.tell(self.run, read_totals(batch))
            return metrics

        strategy.train_step = counted_train_step

    def __call__(
        self,
        data: Any,  # ROLL's micro-batch of whole samples: [B, S] and [B, S - 1] columns; position t of the latter is of token t + 1
        logits: Tensor,  # [B, S / c, V / tp] with gradient: of this rank's tokens; with our head RowProxy
    ) -> tuple[Tensor, dict[str, float]]:  # 0-d with gradient, ROLL's names of metrics
        """This rank's part of sum_i w_i sum_t m_it u_it l_it + KL - entropy, u: ROLL's train_infer_is_weight, or our correction.

        Masked values may be anything. On CUDA the gradient is written over the logits. Communication: as policy_loss, with our head
        as linear_policy_loss; over context-parallel ranks two sums for metrics. Synchronises, as ROLL's own loss does for its
        metrics. Raises ConfigError for a call without the step's counts or the sampler's log-probabilities, and with our head for a
        plain tensor; DataError for unmasked values that are not finite.
        """
        config, strategy, columns, totals = self.launch.config, self.strategy, data.batch, read_totals(data)
        mask = loss_mask_of(columns)
        token_counts = mask.sum(-1)
        needs_sampler = needs_rollout_log_probs(config)

        def on_this_rank(values: Tensor) -> Tensor:  # [B, S - 1] -> [B S / c]
            return strategy._get_feature_on_this_cp_rank(torch.nn.functional.pad(values, (0, 1)), PROMPT_TOKENS).flatten()

        sampled = columns.get("infer_logprobs", None) if needs_sampler else None
        if needs_sampler and (sampled is None or len(sampled) == 0):
            raise ConfigError(
                f"the batch has no infer_logprobs, which {self.launch} needs: set actor_infer.generating_args.logprobs: 1"
            )
        importance = columns.get("train_infer_is_weight", None)
        rows, width = logits.shape[:2]
        token_inputs = (
            on_this_rank(torch.where(mask, columns["input_ids"][:, 1:], 0)),
            None if self.is_on_policy else on_this_rank(columns["old_log_probs"].float()),
            on_this_rank(columns["advantages"].float()),
            on_this_rank(mask),
            torch.arange(rows + 1, dtype=torch.int32, device=logits.device) * width,
            sample_token_weights(
                config.loss_aggregation,
                token_counts,
                totals,
                prompt_token_counts=columns[PROMPT_TOKENS] if self.launch.counts_prompts else None,
                divisor=config.loss_aggregation_divisor,
                are_of_step=False,
            ),
        )
        options: dict[str, Any] = {
            **options_of(config),
            "importance_weights": None if importance is None else on_this_rank(importance),
            "rollout_log_probs": None if sampled is None else on_this_rank(sampled),
            "ref_log_probs": on_this_rank(columns["ref_log_probs"].float()) if config.kl_coefficient else None,
            "regularizer_weights": regularizer_weights(token_counts, totals),
            "advantages_per": "token",
            "token_counts": token_counts,
        }
        if config.fused_lm_head_loss:
            output = self._of_hidden(logits, token_inputs, options)
        else:
            # ROLL reads them no more. A write into a slice would be one into what the others keep for their backwards.
            is_last = is_alone(logits) and resolve_backend(Backend.AUTO, logits) == Backend.TRITON
            scale = self.scale if is_last else None
            output = policy_loss(
                config.policy_loss, logits.flatten(0, 1), *token_inputs, inplace=is_last, loss_scale=scale, **options
            )
        refuse_nonfinite(output.num_nonfinite)
        return output.loss, _metrics(output)

    def _of_hidden(self, rows: Tensor, token_inputs: tuple[Any, ...], options: dict[str, Any]) -> PolicyLossOutput:
        """Of what our head gives in the place of logits. Float32 logits, as our log-probabilities have them."""
        if not isinstance(rows, RowProxy):
            raise ConfigError(
                f"{HEAD}=true: the loss is given a plain tensor, so something between model and loss took our head's output for "
                f"logits; {PROBED} was probed; remove {HEAD}"
            )
        hidden, claim = rows_of(rows)
        options["temperature"] = claim.temperature
        return linear_policy_loss(
            self.launch.config.policy_loss,
            hidden.flatten(0, 1).to(claim.weight.dtype),
            claim.weight,
            *token_inputs,
            max_logits_bytes=self.launch.config.max_logits_bytes,
            fp32_logits=True,
            **options,
        )


# The step


def count_prompts(data: Any) -> None:
    """Adds the tokens of each sample's prompt group to this rank's batch of a step. Samples with equal prompts are a group.

    Communication: as count_step, over the data-parallel ranks. Raises what it raises.
    """
    columns = data.batch
    ids, is_prompt = columns["input_ids"].cpu(), columns["prompt_mask"].bool().cpu()
    prompts = [str(row[kept].tolist()) for row, kept in zip(ids, is_prompt, strict=True)]
    totals, _, prompt_counts, _ = count_step(None, prompts, token_counts=loss_mask_of(columns).sum(-1).cpu())
    assert prompt_counts is not None  # of the prompts that were given
    columns[PROMPT_TOKENS] = prompt_counts.to(columns["input_ids"].device)
    data.meta_info[NUM_PROMPTS] = totals.num_prompts


def is_alone(logits: Tensor) -> bool:
    """Whether a write into these logits is counted as one into them alone: they are no part of a larger tensor."""
    return logits._base is None or logits._base.numel() == logits.numel()


def loss_mask_of(columns: Any) -> Tensor:  # [B, S - 1] bool
    final = columns.get("final_response_mask", None)
    return (columns["response_mask"][:, 1:] if final is None else final).bool()


def read_totals(data: Any) -> StepTotals:
    """Raises ConfigError, with the key, where ROLL's call does not have the counts of the step."""
    meta = data.meta_info
    key = "response_mask" if data.batch.get("final_response_mask", None) is None else "final_response_mask"
    try:
        num_samples, num_tokens = int(meta["global_valid_samples"]["default"]), int(meta["batch_num_tokens"][key])
    except KeyError as error:
        raise ConfigError(f"ROLL's meta_info has no {error}, which our weights need; {PROBED} was probed") from None
    return StepTotals(num_samples=num_samples, num_prompts=meta.get(NUM_PROMPTS), num_tokens=num_tokens)


def _metrics(output: PolicyLossOutput) -> dict[str, float]:
    """ROLL adds what ends with @sum over its calls and data-parallel ranks, and averages what ends with @mean. It reads one
    context-parallel rank, so the parts are added up here."""
    cp_group = resolve_group(None, "cp")
    sums = {
        "actor/total_loss@sum": output.loss.detach(),
        "actor/pg_loss@sum": output.policy_loss,
        "actor/kl_loss@sum": output.kl_loss,
    }
    parts = {name: value for name, value in sums.items() if value is not None}
    totals = all_reduce_sum(torch.stack(list(parts.values())).double(), cp_group).tolist()
    statistics = reduce_statistics(output.metrics, ParallelGroups(dp_cp=cp_group), has_entropy=False)
    found = finalise_metrics(statistics)
    return {
        **dict(zip(parts, totals, strict=True)),
        "actor/ppo_ratio_clipfrac@mean": found.get("policy/clipped_ratio_fraction", 0.0),
        "actor/policykl@mean": found.get("policy/new_logprobs", 0.0) - found.get("policy/old_logprobs", 0.0),
    }
