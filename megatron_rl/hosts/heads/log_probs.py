"""Our log-probabilities in the place of a trainer's own, for whichever loss trains there: one setting a host.

    host      setting                                                                       whose module does it
    verl      actor_rollout_ref.model.external_lib=megatron_rl.hosts.heads.verl          verl
    NeMo-RL   ++loss_fn.megatron_rl_log_probs=megatron_rl                                    nemo_rl
    SkyRL     megatron_rl.log_probs=megatron_rl                                              skyrl
    ROLL      actor_train.system_envs.MEGATRON_RL_LOG_PROBS: megatron_rl                     roll

Each module has a table of `Replacement`: the name that the host looks up, its arguments as they were probed, and the function that
takes its place. The name is replaced where it is defined, right after that module is loaded, and in each module of the host that
has taken it already. A name with other arguments, or a caller that no longer looks it up, is refused with its file and line.

What stays the host's: shifts, packing, padding, the gather over context-parallel ranks, filters of the sampler, sums of squared
probabilities. What changes is the function of a row:

- Value, entropy and gradient are the host's in float32. From 16-bit logits they are computed in float32, and come in float32.
- A label outside the vocabulary gives 0 and has no gradient. Theirs give 0 or max - lse and push the whole row down, or raise.
- Sizes of chunks are accepted and have no effect: nothing here makes a float32 copy of the logits, and a head is cut by
  MAX_LOGITS_BYTES, 2 GiB.
- The gradient is written over the logits only where the host's own function does that too, or overwrites them in forward.
- Logits may be RowProxy, where the host's setting has placed our head: no logits are made then.
- Rows of several temperatures go through a head in chunks of one temperature, which divides their float32 logits. Hidden states
  that are divided before the product would be rounded to 16 bits again, so that a row had other numbers beside rows of another
  temperature than alone.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megatron_rl.config import DEFAULT_MAX_LOGITS_BYTES
from megatron_rl.errors import ConfigError, DataError, place_of
from megatron_rl.hosts.after_import import after_import
from megatron_rl.hosts.contract import looks_up, part_of, signature_problem
from megatron_rl.hosts.heads.row_proxy import RowProxy, rows_of
from megatron_rl.hosts.run import Run
from megatron_rl.layout.groups import Group
from megatron_rl.ops.backends import runs_eagerly
from megatron_rl.ops.linear_log_probs import LinearKeywords, linear_log_probs
from megatron_rl.ops.log_probs import vocab_parallel_log_probs

MARK = "_log_probs_of_megatron_rl"
MAX_LOGITS_BYTES = DEFAULT_MAX_LOGITS_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class Replacement:
    """path: module:name or module:Class.method, as the host defines it. arguments: of the function, or of the `forward` of an
    autograd function. ours: takes the host's own, returns what takes its place. callers: module:function that must look the name
    up; a module that the host does not load is not asked. is_told: it says once that it is at work."""

    path: str
    arguments: tuple[str, ...]
    ours: Callable[[Any], Any]
    callers: tuple[str, ...] = ()
    is_told: bool = True

    @property
    def name(self) -> str:
        return self.path.partition(":")[2]

    @property
    def looked_up(self) -> str:
        """What a caller reads of it."""
        return self.name.rpartition(".")[2]


class Applied:
    """In the place of an autograd function, of which hosts call `apply` alone."""

    def __init__(self, apply: Callable[..., Any]):
        self.apply = apply


@dataclass(frozen=True, slots=True)
class Installer:
    """title: the host as it writes itself. probed: the revision that the tables were read from. packages: its Python packages."""

    title: str
    probed: str
    packages: tuple[str, ...]

    def install(self, replacements: Iterable[Replacement]) -> None:
        """Replaces what is loaded now and the rest when it is. Raises ConfigError here, or where the host imports a module, for a
        host whose path is another one. A second call changes nothing."""
        run = Run()
        for one in replacements:
            after_import(one.path.partition(":")[0], partial(self._replace, one, run))
            for caller in one.callers:
                place, _, function = caller.partition(":")
                after_import(place, partial(self._check_caller, one, function))

    def _replace(self, one: Replacement, run: Run, module: ModuleType) -> None:
        theirs = part_of(module, one.name)
        if hasattr(theirs, MARK):
            return
        if theirs is None:
            raise ConfigError(f"{self._of(module)} has no {one.name}; {self.probed} was probed, and log_probs is made for it")
        function = function_of(theirs)
        if problem := signature_problem(function, one.arguments):
            raise ConfigError(f"{self.title}'s {one.name} {problem}, {place_of(function)}; {self.probed} was probed")
        ours = one.ours(theirs)
        if one.is_told:
            ours = _telling(ours, f"log_probs in {self.title}: {one.name} is megatron_rl's", run)
        setattr(ours, MARK, True)
        if "." in one.name:
            setattr(part_of(module, one.name.rpartition(".")[0]), one.looked_up, ours)
            return
        for holder in [module, *loaded(self.packages)]:
            for name, value in [*vars(holder).items()]:
                if value is theirs:
                    setattr(holder, name, ours)

    def _check_caller(self, one: Replacement, name: str, module: ModuleType) -> None:
        function = part_of(module, name)
        if function is None:
            raise ConfigError(f"{self._of(module)} has no {name}, which calls {one.name}; {self.probed} was probed")
        if not looks_up(function, one.looked_up):
            raise ConfigError(
                f"{self.title}'s {name} does not call {one.name} any more, {place_of(function)}, so log_probs would have no effect "
                f"there; {self.probed} was probed"
            )

    def _of(self, module: ModuleType) -> str:
        return f"{self.title}'s {module.__name__} ({getattr(module, '__file__', 'no file')})"


def function_of(theirs: Any) -> Callable[..., Any]:
    """What has the arguments: the forward of an autograd function, or of its `apply`."""
    owner = theirs if inspect.isclass(theirs) else getattr(theirs, "__self__", None)
    found: Callable[..., Any] = owner.forward if inspect.isclass(owner) and issubclass(owner, torch.autograd.Function) else theirs
    return found


def loaded(packages: tuple[str, ...]) -> list[ModuleType]:
    names = [name for name in sys.modules if name.split(".")[0] in packages]
    return [module for name in names if isinstance(module := sys.modules[name], ModuleType)]


def _telling(ours: Any, text: str, run: Run) -> Any:
    """Ours, which says once that it is at work. torch.compile, which a host may lay over it, does not trace it."""
    call: Callable[..., Any] = ours.apply if isinstance(ours, Applied) else ours

    @runs_eagerly
    def told(*given: Any, **named: Any) -> Any:
        run.warn(text)
        return call(*given, **named)

    return Applied(told) if isinstance(ours, Applied) else told


# The functions of a row


def log_probs_of_logits(
    logits: Tensor,  # [..., V_tp]
    labels: Tensor,  # [...] whole numbers in the full vocabulary
    tp_group: Group,
    *,
    inplace: bool = False,
) -> Tensor:  # [...] float32 (float64 for float64)
    """As vocab_parallel_log_probs. A label outside the vocabulary gives 0 without a gradient."""
    if isinstance(logits, RowProxy):
        return log_probs_of_proxy(logits, labels, tp_group, with_entropy=False)[0]
    rows, chosen = _rows(logits), labels.reshape(-1).long()
    found = vocab_parallel_log_probs(
        rows,
        chosen,
        loss_mask=_is_known(chosen, rows.shape[1] * tp_group.size()),
        tp_group=tp_group,
        inplace=inplace,
    )
    return found.view(labels.shape)


def entropy_of_logits(logits: Tensor, tp_group: Group, *, inplace: bool = False) -> Tensor:  # [..., V_tp] -> [...] float32
    """The entropy of the full distribution, with its gradient."""
    if isinstance(logits, RowProxy):
        any_label = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
        return log_probs_of_proxy(logits, any_label, tp_group)[1]
    rows = _rows(logits)
    any_label = torch.zeros(rows.shape[0], dtype=torch.int64, device=rows.device)
    _, entropy = vocab_parallel_log_probs(rows, any_label, tp_group=tp_group, with_entropy=True, inplace=inplace)
    return entropy.view(logits.shape[:-1])


def log_probs_of_proxy(
    rows: RowProxy,
    labels: Tensor,  # [...] as rows
    tp_group: Group,
    *,
    temperature: Tensor | None = None,  # [...], beside the one that the host has divided by
    with_entropy: bool = True,
) -> tuple[Tensor, Tensor]:  # log_probs, entropy [...] float32; 0 without with_entropy
    """As log_probs_of_hidden."""
    hidden, claim = rows_of(rows)
    found = log_probs_of_hidden(
        hidden,
        claim.weight,
        labels,
        tp_group,
        temperature=claim.temperature if temperature is None else claim.temperature * temperature,
        with_entropy=with_entropy,
        reduces_hidden=True,
    )
    log_probs, entropy = (values.view(labels.shape) for values in found)
    return log_probs, entropy


def log_probs_of_hidden(
    hidden: Tensor,  # [..., H]
    weight: Tensor,  # [V_tp, H]
    labels: Tensor,  # as many as hidden has rows, in their order
    tp_group: Group,
    *,
    temperature: float | Tensor = 1.0,  # a number, or one a row
    with_entropy: bool = True,
    reduces_hidden: bool,
) -> tuple[Tensor, Tensor]:  # log_probs [T], entropy [T] float32; 0 without with_entropy
    """As linear_log_probs, with float32 logits. A label outside the vocabulary gives 0 without a gradient; its entropy is what it
    is. Hidden states of another dtype are cast to the weight's, as a Megatron output layer does."""
    weight = _whole(weight, hidden.dtype)
    if isinstance(temperature, Tensor):
        is_one_a_row = temperature.numel() == labels.numel()
        temperature = temperature.reshape(-1) if is_one_a_row else temperature.unique().squeeze(0)
    chosen = labels.reshape(-1).long()
    operands = (hidden.reshape(-1, hidden.shape[-1]).to(weight.dtype), weight, chosen)
    options: LinearKeywords = {
        "temperature": temperature,
        "tp_group": tp_group,
        "fp32_logits": True,
        "max_logits_bytes": MAX_LOGITS_BYTES,
        "reduces_hidden": reduces_hidden,
    }
    if with_entropy:
        log_probs, entropy = linear_log_probs(*operands, with_entropy=True, **options)
    else:
        log_probs = linear_log_probs(*operands, **options)
        entropy = torch.zeros_like(log_probs)
    return torch.where(_is_known(chosen, weight.shape[0] * tp_group.size()), log_probs, 0.0), entropy


def _whole(weight: Any, dtype: torch.dtype) -> Tensor:
    """A weight that FSDP2 shards, because the host reads it outside of its layer's forward, as a whole one in the dtype of that
    forward. Its gradient is the mean over ranks, as FSDP2 makes of each gradient."""
    found: Tensor = weight
    if hasattr(weight, "full_tensor"):
        from torch.distributed.tensor import Partial  # takes seconds to import, and FSDP2 has done so

        found = weight.full_tensor(grad_placements=[Partial("avg")] * weight.device_mesh.ndim).to(dtype)
    return found


# NeMo-RL and SkyRL have taken two autograd functions from NeMo-Aligner: the arguments of their `forward`, and ours.
WHOLE_ARGUMENTS = ("ctx", "vocab_parallel_logits", "target", "vocab_start_index", "vocab_end_index", "group", "inference_only")
CHUNKED_ARGUMENTS = (*WHOLE_ARGUMENTS[:5], "chunk_size", "tp_group", "inference_only")


def whole_rows(theirs: Any) -> Applied:
    def apply(logits: Tensor, target: Tensor, first: int, end: int, group: Group, inference_only: bool = False) -> Tensor:
        return log_probs_of_shard(logits, target, first, end, group, has_gradient=not inference_only)

    return Applied(apply)


def rows_in_chunks(theirs: Any) -> Applied:
    def apply(
        logits: Tensor, target: Tensor, first: int, end: int, chunk_size: int, tp_group: Group, inference_only: bool = False
    ) -> Tensor:
        return log_probs_of_shard(logits, target, first, end, tp_group, has_gradient=not inference_only)

    return Applied(apply)


def log_probs_of_shard(
    logits: Tensor,  # [B, S, V_tp]
    target: Tensor,  # [B, S], shifted
    first: int,
    end: int,
    tp_group: Group,
    *,
    has_gradient: bool,
) -> Tensor:  # [B, S] float32
    """As log_probs_of_logits, for a host that says which columns a rank has. The host may read the logits later."""
    check_shard(first, end, logits.shape[-1], tp_group)
    with torch.set_grad_enabled(has_gradient and torch.is_grad_enabled()):
        return log_probs_of_logits(logits, target, tp_group)


def check_shard(first: int, end: int, num_columns: int, tp_group: Group) -> None:
    """Raises DataError unless a host's bounds of this rank's columns are those of equal shards in the order of ranks."""
    expected = tp_group.rank() * num_columns
    if (first, end) != (expected, expected + num_columns):
        raise DataError(
            f"this tp rank has the columns [{first}, {end}) of the vocabulary, and {num_columns} columns of rank {tp_group.rank()} "
            f"of {tp_group.size()} are [{expected}, {expected + num_columns}): shards must be equal and in the order of ranks"
        )


def _rows(logits: Tensor) -> Tensor:
    return logits.reshape(-1, logits.shape[-1])


def _is_known(labels: Tensor, vocab_size: int) -> Tensor:  # [T] bool
    return (labels >= 0) & (labels < vocab_size)
