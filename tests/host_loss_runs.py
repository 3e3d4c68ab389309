"""Runs hooks.custom_loss on a case of host_loss_cases: one rank's part, or the whole step in one process."""

from __future__ import annotations

import torch
from host_loss_cases import DIVISOR, TIS_CLIP, Case, host_batch, host_logits, micro_batches

from megatron_rl.hosts.custom_loss import custom_loss

GSPO = {"advantage_estimator": "gspo"}
CONSTANT = {"loss_aggregation": "constant", "loss_aggregation_divisor": DIVISOR}
PER_TOKEN = {"loss_aggregation": "token_mean", "calculate_per_token_loss": True}
TIS = {"use_tis": True, "tis_clip": TIS_CLIP, "tis_clip_low": 0}
TERMS = {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "low_var_kl", "entropy_coef": 0.2}
REWARD = {
    "loss_aggregation": "prompt_mean",
    "custom_reward_post_process_path": "megatron_rl.hooks.reward_post_process",
    "global_batch_size": 6,
    "n_samples_per_prompt": 1,
}


def never(values):
    raise AssertionError("the host's reducer takes zigzag order")


def run_part(case: Case, size: int, cp_rank: int = 0, cp_size: int = 1, dp_rank: int = 0, dp_size: int = 1, tp_rank=0, tp_size=1):
    """(sum of this rank's losses, gradient by each sample's logits, summed metrics, the keys of each micro-batch)."""
    args, samples = case.args(), case.samples()
    leaves = [sample.logits.clone().requires_grad_() for sample in samples]
    total, metrics, keys = 0.0, {}, []
    for numbers in micro_batches(case, size, dp_rank, dp_size):
        own = [samples[number] for number in numbers]
        logits = host_logits(case, own, samples, [leaves[number] for number in numbers], cp_rank, cp_size)
        shard = logits.shape[-1] // tp_size
        logits = logits[..., tp_rank * shard : (tp_rank + 1) * shard]
        loss, log = custom_loss(args, host_batch(case, own, samples, cp_rank, cp_size), logits, never)
        assert loss.requires_grad and loss.dim() == 0
        (loss + 0 * torch.where(logits.isnan(), 0, logits).sum()).backward()  # every rank meets the backward
        total += float(loss.detach())
        keys.append(list(log))
        for name, value in log.items():
            assert value.dim() == 0 and not value.requires_grad and value.dtype == torch.float32
            metrics[name] = metrics.get(name, 0.0) + float(value)
    return total, [leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in leaves], metrics, keys


def one(case: Case, change=None, **settings):
    """custom_loss on the whole step in one process; `change(batch)` damages the batch first."""
    samples = case.samples()
    leaves = [sample.logits.clone().requires_grad_() for sample in samples]
    logits, batch = host_logits(case, samples, samples, leaves, 0, 1), host_batch(case, samples, samples, 0, 1)
    if change is not None:
        logits = change(batch, logits)
        logits = host_logits(case, samples, samples, leaves, 0, 1) if logits is None else logits
    args = case.args()
    vars(args).update(settings)
    return *custom_loss(args, batch, logits, never), leaves
