"""The state of one trainer of miles, slime or their like: what its launch was judged to be, and the guard of its optimiser step.

A hook finds its run by the arguments that the host hands over, which each host keeps as one object as long as it trains. The
reducer is handed none: it takes Megatron's global arguments, which are that object.
"""

from __future__ import annotations

import copy
import itertools
import operator
import sys
import warnings
from argparse import Namespace
from collections.abc import Callable, Hashable
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn

from megatron_rl.errors import ConfigError, DataError
from megatron_rl.hosts.args import CUSTOM_LOSS_LINE, INIT_LINE
from megatron_rl.hosts.run import Run, Runs
from megatron_rl.layout.groups import maxima_anywhere, resolve_groups
from megatron_rl.megatron.head import HeadSettings
from megatron_rl.ops.assumed_scale import AssumedScale

V = TypeVar("V")


class HostRun(Run):
    """has_begun: the init hook was called. numbers: counts the micro-batches of our loss. scale: what multiplies it. head: what the
    init hook places in the model that is built next. has_head: it was placed. skips_old_log_probs: no forward measures them."""

    def __init__(self) -> None:
        super().__init__()
        self.guard = StepGuard()
        self.has_begun = False
        self.numbers = itertools.count()
        self.scale = AssumedScale()
        self.head = HeadSettings()
        self.has_head = False
        self.skips_old_log_probs = False
        self._judged: dict[Hashable, tuple[_Seen, Any]] = {}

    def check_head(self) -> None:
        """For a launch that asks for our head. Raises ConfigError where the model has none: its logits would be the host's."""
        if not self.has_head:
            raise ConfigError(
                "--fused-lm-head-loss and --fp32-lm-head have no effect: the init hook has not placed our head in this model, "
                f"because it was not called, or this host builds its model in another way; add {INIT_LINE}"
            )

    def judged(self, key: Hashable, args: Namespace, judge: Callable[[Namespace], V]) -> V:
        """What `judge` says of these arguments. It is asked again where one of them was set since, also to an equal value.

        judge gets a copy: what it returns must not hold `args`, by which this run is known.
        """
        if key not in self._judged or not self._judged[key][0].is_still(args):
            seen = _Seen(args)
            self._judged[key] = seen, judge(Namespace(**vars(args) | seen.containers))
        found: V = self._judged[key][1]
        return found


class _Seen:
    """The names and values of arguments, and copies of lists, dicts and sets among them, which somebody may write into."""

    def __init__(self, args: Namespace):
        self.names, self.values = [*vars(args)], [*vars(args).values()]
        containers = {name: value for name, value in vars(args).items() if isinstance(value, list | dict | set)}
        self.containers = {name: copy.copy(value) for name, value in containers.items()}

    def is_still(self, args: Namespace) -> bool:
        """By identity, which is quick for a thousand values of any type."""
        values = vars(args)
        return (
            [*values] == self.names
            and all(map(operator.is_, values.values(), self.values))
            and all(values[name] == copied for name, copied in self.containers.items())
        )


RUNS = Runs(HostRun)


def begin_run(args: Namespace) -> HostRun:
    """The run of the init hook's arguments. Hooks that get no arguments use it where Megatron's global ones are not set."""
    run = RUNS.of(args)
    run.has_begun = True
    return run


def current_args() -> Namespace:
    """Megatron's global arguments, which both hosts set in each training actor before the init hook, else the init hook's.

    The module is looked up, not imported: the host has loaded it before it set them. Raises ConfigError where there are none, and
    where several trainers of this process have called the init hook.
    """
    global_vars = sys.modules.get("megatron.training.global_vars")
    if global_vars is not None:
        try:
            found: Namespace = global_vars.get_args()
        except AssertionError:  # "args is not initialized"
            pass
        else:
            return found
    begun = [owner for owner, run in RUNS if run.has_begun]
    if len(begun) == 1 and isinstance(begun[0], Namespace):
        return begun[0]
    if begun:
        raise ConfigError(
            f"{len(begun)} trainers of this process have called the init hook, and Megatron's global arguments, which say whose "
            "loss this is, are not set: call megatron.training.global_vars.set_args before each trainer's step"
        )
    raise ConfigError(
        "the loss reducer gets no arguments from its host and Megatron's global ones are not set: add "
        f"{INIT_LINE} to the launch line"
    )


# The guard of the optimiser step

_NOT_SEEN = object()


class StepGuard:
    """Refuses the optimiser step of a trainer on all ranks after non-finite tokens, with one look at them a step."""

    def __init__(self) -> None:
        self.is_armed = False
        """It will stop the optimiser. If not, each loss checks its own count."""
        self.watches_gradients = False
        """For a host that multiplies values of masked tokens by 0 in its backward: a step is refused too where the gradient of the
        model's last norm, which every token reaches, is not finite."""
        self.models: WeakSet[nn.Module] = WeakSet()
        self._step: tuple[int, int] | None = None  # (rollout_id, step_id), from the hook's call until the optimiser's step
        self._num_nonfinite: Tensor | None = None  # 0-d, on the loss's device
        self._bad_gradients: Tensor | None = None  # 0-d, on the model's: micro-batches whose gradient of a norm is not finite
        self._norm = ""
        self._optimizer: object = _NOT_SEEN

    def record_nonfinite(
        self,
        count: Tensor,  # any shape, int: non-finite unmasked tokens
    ) -> None:
        """Adds to the count of the next optimiser step. No synchronisation; a loss that runs twice is counted twice."""
        total = count.detach().sum()
        self._num_nonfinite = total if self._num_nonfinite is None else self._num_nonfinite + total

    def add_model(self, model: nn.Module, *, handles_overflow: bool) -> None:
        """handles_overflow: a loss scale does, so that no gradient is looked at. Else a hook is on the gradient of the last norm.

        A norm's weight is small, its layer does not fuse it into a main gradient, and every token's path to the loss holds it; the
        last is not true of MTP's norms. A model without a trainable norm is not watched."""
        self.models.add(model)
        norms = [
            (name, parameter)
            for name, parameter in model.named_parameters()
            if parameter.dim() == 1 and parameter.requires_grad and "norm" in name and "mtp" not in name
        ]
        if norms and not handles_overflow:
            name, parameter = norms[-1]
            self._norm = name.replace("module.", "")
            parameter.register_hook(self._record_gradient)

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
                "before_train_step found no torch optimiser on this rank: nothing stops its step after non-finite tokens, "
                "so megatron_rl.hooks.custom_loss looks at each micro-batch itself, and our reducer not at all",
                stacklevel=2,
            )

    def begin(self, rollout_id: int, step_id: int) -> None:
        """Looks at a step that the host has skipped, then begins the next."""
        self.refuse_nonfinite_step()
        self._step = (rollout_id, step_id)

    def refuse_nonfinite_step(self) -> None:
        """DataError on all ranks where the step that runs has recorded something; nothing unless it is armed and has a step.

        Communication: one all-reduce of two numbers over dp-cp, pp and tp each. Synchronises.
        """
        if not self.is_armed or self._step is None:
            return
        (rollout_id, step_id), recorded = self._step, (self._num_nonfinite, self._bad_gradients)
        self._step, self._num_nonfinite, self._bad_gradients = None, None, None
        groups, zero = resolve_groups(), torch.zeros((), dtype=torch.int64)
        device = next((count.device for count in recorded if count is not None), zero.device)
        counts = torch.stack([(zero if count is None else count).to(device, torch.int64) for count in recorded])
        num_tokens, num_gradients = maxima_anywhere(counts, groups)
        place = f"rollout {rollout_id}, step {step_id}"
        if num_tokens:
            raise DataError(
                f"{place}: {num_tokens} non-finite unmasked tokens on one of the ranks: the optimiser step "
                "is refused on all of them. Look at logits, log_probs and advantages of that step's samples"
            )
        if num_gradients:
            raise DataError(
                f"{place}: the gradient of {self._norm or 'a norm'} is not finite on one of the ranks, and no unmasked token's "
                "loss is: the optimiser step is refused on all of them. A masked token whose old log-probability is -inf does "
                "this in slime, whose backward multiplies 0 by inf while the logged loss stays right: put 0 in its place before "
                f"training, or use {CUSTOM_LOSS_LINE}, which leaves masked tokens out"
            )

    def _record_gradient(self, gradient: Tensor) -> None:
        if self.watches_gradients and self._step is not None:
            is_bad = (~torch.isfinite(gradient)).any().to(torch.int64)
            self._bad_gradients = is_bad if self._bad_gradients is None else self._bad_gradients + is_bad


def torch_optimizers(optimizer: object) -> list[torch.optim.Optimizer]:
    """The torch optimisers that Megatron's wraps, a chain's in its order; none for an optimiser without parameters on this rank."""
    if isinstance(optimizer, torch.optim.Optimizer):
        return [optimizer]
    chain = getattr(optimizer, "chained_optimizers", None)
    if chain is not None:
        return [found for link in chain for found in torch_optimizers(link)]
    return [] if optimizer is None else torch_optimizers(getattr(optimizer, "optimizer", None))
