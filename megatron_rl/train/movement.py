"""Measures how far a policy moves over some steps, on samples that are kept: a step on-policy does not show it, its ratio is 1."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_rl.layout.groups import all_reduce_sum, group_device, world_group
from megatron_rl.ops.ratios import k3_estimate
from megatron_rl.train.rollouts import Microbatches
from megatron_rl.train.writers import CHANGED_WEIGHTS, MOVED_KL

if TYPE_CHECKING:
    from megatron_rl.train.trainer import PolicyTrainer


class PolicyMovement:
    """Keeps one micro-batch of each data-parallel rank with its log-probabilities, and measures it again `num_steps` steps later.

    That is two forwards of a micro-batch in `num_steps` steps. Every rank calls `before_step` at the same steps.
    """

    def __init__(self, trainer: PolicyTrainer, num_steps: int):
        self._trainer, self._num_steps, self._kept_at = trainer, num_steps, 0
        self._kept: tuple[Microbatches, list[list[Tensor]], Tensor] | None = None

    def before_step(self, steps_done: int, microbatches: Microbatches) -> dict[str, float]:
        """Called before each step, with its samples. Empty but where num_steps steps are done since samples were kept.

        Then, equal on all ranks: the mean k3 estimate of KL(policy then, policy now) in nats per token, over the unmasked tokens of
        kept samples with an advantage (missing where there is none), and the share of the compared weights that have another value.

        Communication, at these steps alone: trainer.log_probs', twice, and one all-reduce of [4] over all ranks.
        """
        if self._kept is not None and steps_done - self._kept_at < self._num_steps:
            return {}
        moved = {} if self._kept is None else self._measure(*self._kept)
        kept = [next((samples for samples in microbatches if any(sample.advantage for sample in samples)), microbatches[0])]
        self._kept, self._kept_at = (kept, self._trainer.log_probs(kept), self._trainer.some_weights()), steps_done
        return moved

    def _measure(self, kept: Microbatches, before: list[list[Tensor]], weights: Tensor) -> dict[str, float]:
        now, now_weights = self._trainer.log_probs(kept), self._trainer.some_weights()
        each = [torch.zeros(0, dtype=torch.float64), *_token_kls(kept, before, now)]
        kls, is_changed = torch.cat(each), now_weights != weights
        sums = [float(kls.sum()), kls.numel(), int(is_changed.sum()), is_changed.numel()]
        world = world_group()
        kl, num_tokens, num_changed, num_weights = all_reduce_sum(
            torch.tensor(sums, dtype=torch.float64, device=group_device(world)), world
        ).tolist()
        return {CHANGED_WEIGHTS: num_changed / num_weights} | ({MOVED_KL: kl / num_tokens} if num_tokens else {})


def _token_kls(kept: Microbatches, before: list[list[Tensor]], now: list[list[Tensor]]) -> Iterator[Tensor]:  # [unmasked tokens]
    for samples, old_rows, new_rows in zip(kept, before, now, strict=True):
        for sample, old, new in zip(samples, old_rows, new_rows, strict=True):
            if sample.advantage:
                yield k3_estimate(old.double(), new.double())[0][sample.loss_mask]
