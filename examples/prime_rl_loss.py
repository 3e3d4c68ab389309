"""prime-rl's rl loss as GSPO, each sample with the same weight. With the folder of this file on PYTHONPATH:

    [trainer.loss]
    type = "custom"
    import_path = "prime_rl_loss.loss"

prime-rl sums the loss over samples and divides by T, the tokens of the step. So a sample's loss is T w_i S_i here. w_i is the
weight of its tokens, S_i the sum over them. The gradient is that of the whole step, for any number of ranks and micro-batches.

A sample is what prime-rl sends: each branch of a rollout's trace is one. Samples without a token of the rl loss are not counted.
Old log-probabilities are the sampler's. prompt_mean is not possible: the trainer's batch does not say which prompt a sample has.
"""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from prime_rl.trainer.rl.data import DataLoader
from prime_rl.trainer.rl.loss import LossInputs, LossOutputs

from megatron_rl import ConfigError, StepTotals, count_step, sample_token_weights
from megatron_rl.errors import EmptyStep
from megatron_rl.policy_loss import loss_of_log_probs

POLICY_LOSS, AGGREGATION = "gspo", "sample_mean"
STEP: dict[str, StepTotals] = {}  # the totals of the step
get_batch = DataLoader.get_batch


def totals_of(micro_batches: list[dict]) -> StepTotals:
    """N and T, both c times over on c context-parallel ranks, which have the same samples: T w_i has their quotient."""
    masks = []
    for batch in micro_batches:
        mask, weights = batch["loss_mask"][0], batch["rl_weights"]
        mask = mask if weights is None else mask & (weights[0] != 0)
        masks += [of_sample for of_sample in mask.split(batch["sequence_lengths"]) if of_sample.any()]
    try:
        return count_step(masks, None, dist.group.WORLD)[0]
    except EmptyStep:  # prime-rl goes on with a step without a token of the rl loss, and divides by 1
        return StepTotals(num_samples=1, num_prompts=None, num_tokens=1)


@functools.wraps(get_batch)
def get_counted_batch(loader: DataLoader) -> list[dict]:
    micro_batches = get_batch(loader)
    STEP["totals"] = totals_of(micro_batches)
    return micro_batches


DataLoader.get_batch = get_counted_batch


def loss(inputs: LossInputs) -> LossOutputs:
    """Of one sample: its columns are [R]."""
    if "totals" not in STEP:
        raise ConfigError(
            "the samples of the step are not counted, as none came from DataLoader.get_batch; train without fake data"
        )
    totals, mask = STEP["totals"], inputs.loss_mask
    weight = totals.num_tokens * sample_token_weights(AGGREGATION, mask.sum()[None], totals)
    output = loss_of_log_probs(
        POLICY_LOSS,
        inputs.trainer_logprobs,
        inputs.inference_logprobs,
        inputs.advantages,
        mask,
        torch.tensor([0, len(mask)], dtype=torch.int32, device=mask.device),
        weight,
        advantages_per="token",
        importance_weights=inputs.loss_weights,
    )
    return LossOutputs(loss=output.loss, metrics={})
