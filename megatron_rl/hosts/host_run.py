"""The state of one trainer of miles, slime or their like: what its launch was judged to be, and the guard of its optimiser step.

A hook finds its run by the arguments that the host hands over, which each host keeps as one object as long as it trains. The
reducer is handed none: it takes Megatron's global arguments, which are that object.
"""

from __future__ import annotations

import itertools
import sys
import warnings
from argparse import Namespace
from collections.abc import Callable, Hashable
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn

from megatron_rl.errors import ConfigError, DataError
from megatron_rl.hosts.args import INIT_LINE
from megatron_rl.hosts.run import Run, Runs
from megatron_rl.layout.agreement import maxima_anywhere
from megatron_rl.layout.groups import resolve_groups
from megatron_rl.megatron.head import HeadSettings
from megatron_rl.ops.scale import AssumedScale

V = TypeVar("V")


class HostRun(Run):
    """numbers: counts the micro-batches of our loss. scale: what multiplies it. head: what the init hook places in the model that
    is built next. has_head: it was placed. skips_old_log_probs: no forward measures them."""

    def __init__(self) -> None:
        super().__init__()
        self.guard = StepGuard()
        self.numbers = itertools.count()
        self.scale = AssumedScale()
        self.head = HeadSettings()
        self.has_head = False
        self.skips_old_log_probs = False
        self._judged: dict[Hashable, Any] = {}

    def check_head(self) -> None:
        """For a launch that asks for our head. Raises ConfigError where the model has none: its logits would be the host's."""
        if not self.has_head:
            raise ConfigError(
                "--fused-lm-head-loss and --fp32-lm-head have no effect: the init hook has not placed our head in this model, "
                f"because it was not called, or this host builds its model in another way; add {INIT_LINE}"
            )

    def judged(self, key: Hashable, args: Namespace, judge: Callable[[Namespace], V]) -> V:
        """What `judge` says of these arguments, asked once for each key.

        judge gets a copy: what it returns must not hold `args`, by which this run is known.
        """
        if key not in self._judged:
            self._judged[key] = judge(Namespace(**vars(args)))
        found: V = self._judged[key]
        return found


RUNS = Runs(HostRun)


def current_args() -> Namespace:
    """Megatron's global arguments, which both hosts set in each training actor. Raises ConfigError where there are none.

    The module is looked up, not imported: the host has loaded it before it set them.
    """
    global_vars = sys.modules.get("megatron.training.global_vars")
    if global_vars is not None:
        try:
            found: Namespace = global_vars.get_args()
        except AssertionError:  # "args is not initialized"
            pass
        else:
            return found
    raise ConfigError(
        "Megatron's global arguments are not set, which say whose loss this is: call megatron.training.global_vars.set_args(args) "
        "before the first step"
    )


# The guard of the optimiser step

_NOT_SEEN = object()


class StepGuard:
    """Refuses the optimiser step of a trainer on all ranks after non-finite tokens, with one look at them a step."""

    def __init__(self) -> None:
        self.is_armed = False
        """It will stop the optimiser. If not, each loss checks its own count."""
        self.models: WeakSet[nn.Module] = WeakSet()
        """Those whose config was compared with the arguments."""
        self._step: tuple[int, int] | None = None  # (rollout_id, step_id), from the hook's call until the optimiser's step
        self._num_nonfinite: Tensor | None = None  # 0-d, on the loss's device
        self._optimizer: object = _NOT_SEEN

    def record_nonfinite(
        self,
        count: Tensor,  # any shape, int: non-finite unmasked tokens
    ) -> None:
        """Adds to the count of the next optimiser step. No synchronisation; a loss that runs twice is counted twice."""
        total = count.detach().sum()
        self._num_nonfinite = total if self._num_nonfinite is None else self._num_nonfinite + total

    def arm(self, optimizer: object) -> None:
        """On all ranks or on none: a rank without an optimiser would never join the others' all-reduce.

        Communication: one all-reduce of one number over dp-cp, pp and tp each at the first call with this optimiser, which is the
        same call on all ranks, also where it wraps nothing or is None.
        """
        if optimizer is self._optimizer:
            return
        found = torch_optimizers(optimizer)
        self.is_armed = maxima_anywhere(torch.tensor([int(not found)]), resolve_groups()) == [0]
        self._optimizer = optimizer
        if self.is_armed:
            for one in found:
                # The first optimiser of a chain checks for all of them; they step in the same order on each rank.
                one.register_step_pre_hook(lambda *_: self.refuse_nonfinite_step())
        elif not found:
            warnings.warn(
                "before_train_step found no torch optimiser on this rank: nothing stops its step after non-finite tokens",
                stacklevel=2,
            )

    def begin(self, rollout_id: int, step_id: int) -> None:
        """Looks at a step that the host has skipped, then begins the next."""
        self.refuse_nonfinite_step()
        self._step = (rollout_id, step_id)

    def refuse_nonfinite_step(self) -> None:
        """DataError on all ranks where the step that runs has recorded something; nothing unless it is armed and has a step.

        Communication: one all-reduce of one number over dp-cp, pp and tp each. Synchronises.
        """
        if not self.is_armed or self._step is None:
            return
        (rollout_id, step_id), recorded = self._step, self._num_nonfinite
        self._step, self._num_nonfinite = None, None
        count = torch.zeros((), dtype=torch.int64) if recorded is None else recorded
        (num_tokens,) = maxima_anywhere(count.to(torch.int64).reshape(1), resolve_groups())
        if num_tokens:
            raise DataError(
                f"rollout {rollout_id}, step {step_id}: {num_tokens} non-finite unmasked tokens on one of the ranks: the optimiser "
                "step is refused on all of them. Look at logits, log_probs and advantages of that step's samples"
            )


def torch_optimizers(optimizer: object) -> list[torch.optim.Optimizer]:
    """The torch optimisers that Megatron's wraps, a chain's in its order; none for an optimiser without parameters on this rank."""
    if isinstance(optimizer, torch.optim.Optimizer):
        return [optimizer]
    chain = getattr(optimizer, "chained_optimizers", None)
    if chain is not None:
        return [found for link in chain for found in torch_optimizers(link)]
    return [] if optimizer is None else torch_optimizers(getattr(optimizer, "optimizer", None))
