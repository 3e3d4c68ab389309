"""`--custom-megatron-before-train-step-hook-path megatron_rl.hooks.before_train_step`: no optimiser step after non-finite tokens.

Our reducer and custom_loss record non-finite tokens; a hook on the wrapped torch optimisers looks at the count once a step. A
host's own backward may give a non-finite gradient where the loss is right: there the gradient of one norm is checked too. No
gradient is changed.
"""

from __future__ import annotations

import warnings
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megatron_rl.config import Route
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.hosts.base import CUSTOM_LOSS_LINE, HostOptions
from megatron_rl.layout.groups import ParallelGroups, all_reduce_max, group_device, resolve_groups
from megatron_rl.megatron.model import model_config_of
from megatron_rl.validation.auxiliary_losses import auxiliary_loss_problems, settings_of_model

_NOT_SEEN = object()


@dataclass
class _Guard:
    """What this process knows of a step. `step` is (rollout_id, step_id) from the hook's call until the optimiser's step."""

    num_nonfinite: Tensor | None = None  # 0-d, on the loss's device
    bad_gradients: Tensor | None = None  # 0-d, on the model's device: micro-batches whose gradient of a norm is not finite
    watches_gradients: bool = False
    watched: str = ""  # the norm's name
    step: tuple[int, int] | None = None
    is_armed: bool = False
    optimizer: object = _NOT_SEEN
    checked_models: WeakSet = field(default_factory=WeakSet)
    hooks: list[RemovableHandle] = field(default_factory=list)


_guard = _Guard()


def before_train_step(args: Namespace, rollout_id: int, step_id: int, model, optimizer, opt_param_scheduler) -> None:
    """The host calls it before each step, without the step's data.

    The first call compares the model's config with the arguments, which a bridge may have changed since, and registers the check
    on the optimiser, and a hook on the gradient of the model's last norm. The next call checks a step that the host skipped (a
    gradient norm that is not finite).

    Communication: one all-reduce of two numbers over dp-cp, pp and tp each, at the optimiser's step, and once at the first call.
    Synchronises once a step. Raises ConfigError, or DataError on all ranks together.
    """
    models = list(model) if isinstance(model, Sequence) else [model]
    for part in models:
        if part not in _guard.checked_models:
            config = model_config_of(part)
            check_model_contract(args, config)
            if not vars(config).get("fp16"):  # in fp16 the loss scale handles an overflow
                _watch_last_norm(part)
            _guard.checked_models.add(part)
    if optimizer is not _guard.optimizer:  # the same on all ranks, also where it wraps nothing or is None
        _arm(torch_optimizers(optimizer))
        _guard.optimizer = optimizer
    _refuse_nonfinite_step()
    _guard.step = (rollout_id, step_id)


def is_armed() -> bool:
    """Whether this hook will stop the optimiser. If not, each loss checks its own count."""
    return _guard.is_armed


def record_nonfinite(
    count: Tensor,  # any shape, int: non-finite unmasked tokens
) -> None:
    """Adds to the count of the next optimiser step. No synchronisation; a loss that runs twice is counted twice."""
    total = count.detach().sum()
    _guard.num_nonfinite = total if _guard.num_nonfinite is None else _guard.num_nonfinite + total


def expect_finite_gradients() -> None:
    """For a host that multiplies values of masked tokens by 0 in its backward. From now on a step is refused where the gradient of
    the model's last norm, which every token reaches, is not finite."""
    _guard.watches_gradients = True


def disarm() -> None:
    """Forgets steps and counts. Optimisers keep their hook, which does nothing until before_train_step is called again."""
    global _guard
    for hook in _guard.hooks:
        hook.remove()
    _guard = _Guard()


def torch_optimizers(optimizer) -> list[torch.optim.Optimizer]:
    """The torch optimisers that Megatron's wraps, a chain's in its order; none for an optimiser without parameters on this rank."""
    if isinstance(optimizer, torch.optim.Optimizer):
        return [optimizer]
    chain = getattr(optimizer, "chained_optimizers", None)
    if chain is not None:
        return [found for link in chain for found in torch_optimizers(link)]
    return [] if optimizer is None else torch_optimizers(getattr(optimizer, "optimizer", None))


def check_model_contract(args: Namespace, model_config) -> None:
    """The host scales the loss by its argument, and Megatron divides by the model's config: both must say the same. The auxiliary
    losses of the model must keep their scale too, wherever they were set."""
    options = HostOptions(args)
    of_args, of_model = options["calculate_per_token_loss"], bool(model_config.calculate_per_token_loss)
    if of_args != of_model:
        remedy = (
            "choose --loss-aggregation token_mean with --calculate-per-token-loss, or --context-parallel-size 1"
            if of_model
            else "remove --calculate-per-token-loss"
        )
        raise ConfigError(
            f"calculate_per_token_loss is {of_args} in the arguments and {of_model} in the model's config, which was changed after "
            f"parsing: the host scales the loss for one contract and Megatron divides for the other; {remedy}"
        )
    settings = {"context_parallel_size": options["context_parallel_size"], **settings_of_model(model_config)}
    settings["enable_mtp_training"] = options["enable_mtp_training"]
    problems = list(auxiliary_loss_problems(settings, Route.REDUCER)) if of_model else []
    if problems:
        raise ConfigError(problems)


def _arm(optimizers: list[torch.optim.Optimizer]) -> None:
    """On all ranks or on none: a rank without an optimiser would never join the others' all-reduce."""
    has_none = torch.tensor(int(not optimizers))
    _guard.is_armed = not largest_anywhere(has_none, resolve_groups())
    if not _guard.is_armed:
        if not optimizers:
            warnings.warn(
                "before_train_step found no torch optimiser on this rank: nothing stops its step after non-finite tokens, "
                "so megatron_rl.hooks.custom_loss looks at each micro-batch itself, and our reducer not at all",
                stacklevel=2,
            )
        return
    for optimizer in optimizers:
        optimizer.register_step_pre_hook(_look_before_the_step)


def _look_before_the_step(optimizer, args, kwargs) -> None:
    """The first optimiser of a chain checks for all of them; they step in the same order on each rank."""
    _refuse_nonfinite_step()


def _watch_last_norm(model: nn.Module) -> None:
    """A norm's weight is small, its layer does not fuse it into a main gradient, and every token's path to the loss holds it; the
    last is not true of MTP's norms. A model without a trainable norm is not watched."""
    norms = [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.dim() == 1 and parameter.requires_grad and "norm" in name and "mtp" not in name
    ]
    if norms:
        _guard.watched, parameter = norms[-1]
        _guard.watched = _guard.watched.replace("module.", "")
        _guard.hooks.append(parameter.register_hook(_record_gradient))


def _record_gradient(gradient: Tensor) -> None:
    if _guard.watches_gradients and _guard.step is not None:
        is_bad = (~torch.isfinite(gradient)).any().to(torch.int64)
        _guard.bad_gradients = is_bad if _guard.bad_gradients is None else _guard.bad_gradients + is_bad


def _refuse_nonfinite_step() -> None:
    """DataError on all ranks where the step that runs has recorded something; nothing without an armed hook and a step."""
    if not _guard.is_armed or _guard.step is None:
        return
    (rollout_id, step_id), recorded = _guard.step, (_guard.num_nonfinite, _guard.bad_gradients)
    _guard.step, _guard.num_nonfinite, _guard.bad_gradients = None, None, None
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
            f"{place}: the gradient of {_guard.watched or 'a norm'} is not finite on one of the ranks, and no unmasked token's "
            "loss is: the optimiser step is refused on all of them. A masked token whose old log-probability is -inf does this "
            "in slime, whose backward multiplies 0 by inf while the logged loss stays right: put 0 in its place before training, "
            f"or use {CUSTOM_LOSS_LINE}, which leaves masked tokens out"
        )


def largest_anywhere(value: Tensor, groups: ParallelGroups) -> int:  # 0-d
    return maxima_anywhere(value[None], groups)[0]


def maxima_anywhere(values: Tensor, groups: ParallelGroups) -> list[int]:  # [k]
    """The maxima over all ranks: over dp-cp, then pp, then tp, which together reach each rank. Synchronises."""
    for group in (groups.dp_cp, groups.pp, groups.tp):
        if group.size() > 1:
            values = all_reduce_max(values.to(group_device(group)), group)
    return values.tolist()
