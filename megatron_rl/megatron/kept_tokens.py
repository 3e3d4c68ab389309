"""Divides a step by the tokens that a correction keeps, where only the forward pass knows them, and finds a step without one.

Megatron's schedule calls finalize_model_grads_func once, after the last backward, on each rank. `hook_finalize` puts a function
around it, so that a loop needs no call of its own, and nothing is forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from megatron_rl.aggregation import factor_of_kept
from megatron_rl.errors import ConfigError, EmptyStep
from megatron_rl.layout.groups import ParallelGroups, all_reduce_sum, broadcast_from_last, group_device
from megatron_rl.megatron.batch import StepContext
from megatron_rl.step_counts import StepTotals

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig


class Watcher(Protocol):
    """What hook_finalize calls with the model's chunks, on every rank."""

    def before_finalize(self, models: Sequence[Any]) -> None: ...

    def after_finalize(self, models: Sequence[Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class HookedFinalize:
    """finalize_model_grads_func of a model's config, with what comes before and after it."""

    finalize: Callable[..., Any]
    check: Callable[[], None] | None = None
    watcher: Watcher | None = None

    def __call__(self, models: Sequence[Any], *positional: Any, **named: Any) -> Any:
        if self.check is not None:
            self.check()
        if self.watcher is not None:
            self.watcher.before_finalize(models)
        result = self.finalize(models, *positional, **named)
        if self.watcher is not None:
            self.watcher.after_finalize(models)
        return result


def hook_finalize(model_config: TransformerConfig, **hooks: Any) -> bool:
    """Sets the hooks that are given, in the place of those of the same name. False: there is no finalize_model_grads_func."""
    given = model_config.finalize_model_grads_func
    if given is None:
        return False
    if isinstance(given, HookedFinalize) or any(hooks.values()):
        hooked = given if isinstance(given, HookedFinalize) else HookedFinalize(given)
        model_config.finalize_model_grads_func = replace(hooked, **hooks)
    return True


@dataclass(slots=True)
class KeptTokens:
    """A Watcher that counts the kept tokens of one step, K, and multiplies its gradient by T / K where it is asked to.

    T are the unmasked tokens of the step. Clipping by norm and the optimiser come after it.
    """

    context: StepContext
    groups: ParallelGroups
    scales_gradient: bool
    parts: list[Tensor] = field(default_factory=list)  # [2] of each micro-batch: kept tokens, tokens that are not finite
    is_open: bool = True  # until the gradients are finalized
    _num_kept: float = 0.0

    def takes_more_of(self, context: StepContext) -> bool:
        """Whether the step goes on. A pass that only measured its micro-batches has had them all, and was not finalized."""
        return self.is_open and self.context.totals is context.totals and len(self.parts) < context.num_microbatches

    def before_finalize(self, models: Sequence[Any]) -> None:
        """Raises EmptyStep on all ranks for a step without a kept token, once all gradients are reduced; a token that is not finite
        is no kept one, and check_finite names it. Communication: one all-reduce of [3] over dp-cp, a broadcast over pp."""
        if not self.is_open:
            return
        counted = [torch.cat([part, torch.ones_like(part[:1])]) for part in self.parts]
        self._num_kept, num_nonfinite, num_parts = sum_over_step(counted, 3, self.groups).tolist()
        if self._num_kept or num_nonfinite or not num_parts:  # without a part somebody else computed the loss
            return
        self.is_open = False
        for model in models:
            model.finish_grad_sync()  # else the next step would meet its collectives
        raise EmptyStep(
            f"the correction rejects each of the {self.context.totals.num_tokens} unmasked tokens of the step: there is nothing to "
            "learn from; widen its bounds, or skip the step"
        )

    def after_finalize(self, models: Sequence[Any]) -> None:
        if self.is_open and self.scales_gradient and self._num_kept:
            factor = step_factor_of_kept(self.context.totals, self._num_kept)
            for model in models:
                model.scale_gradients(factor)
        self.is_open = False


def sum_over_step(parts: Sequence[Tensor], width: int, groups: ParallelGroups) -> Tensor:  # [width] each -> [width] on the CPU
    """The sum of numbers of micro-batches over the step, on every rank. Parts before the last pipeline stage are not counted.

    Communication: one all-reduce of [width] over dp-cp and one broadcast over pp. Synchronises once.
    """
    zero = torch.zeros(width, dtype=torch.float64, device=group_device(groups.dp_cp))
    own = torch.stack([part.double() for part in parts]).sum(0).to(zero.device) if parts else zero
    return broadcast_from_last(all_reduce_sum(own.contiguous(), groups.dp_cp).contiguous(), groups.pp).cpu()


def step_factor_of_kept(totals: StepTotals, num_kept: float) -> float:
    """T / K, with T the unmasked tokens of the step and K those that are kept."""
    counts = torch.tensor([totals.num_tokens, num_kept], dtype=torch.float64)
    return float(factor_of_kept(*counts))


def needs_finalize(setting: str) -> ConfigError:
    return ConfigError(
        f"{setting} needs finalize_model_grads_func in the model's config, around which the step's kept tokens are counted: set it "
        "to megatron.core.distributed.finalize_model_grads"
    )
