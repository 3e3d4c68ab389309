"""Refuses a model whose forward attaches a loss that SCALERS does not know: its scale may depend on the layout."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from megatron_rl.errors import ConfigError
from megatron_rl.megatron.model import find_gpt_model
from megatron_rl.validation.auxiliary_losses import SCALERS

# Bare models whose first graph was looked at.
_checked: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def check_attached(model: nn.Module, outputs: Iterable[Tensor]) -> None:
    """Once a model, in its first forward with a graph: looks for autograd Functions that have a set_loss_scale, as Megatron's have.

    outputs: what the forward has made on this rank. A layer that backward recomputes hides what it attaches. No synchronisation.
    Raises ConfigError for a Function that is not in the table.
    """
    bare = find_gpt_model(model)
    if bare in _checked:
        return
    roots = [output.grad_fn for output in outputs if output.grad_fn is not None]
    if not roots:
        return
    unknown = sorted({name for name in attaching_functions(roots) if name not in SCALERS})
    if unknown:
        raise ConfigError(
            f"the model attaches a loss by {' and '.join(unknown)}, which this package does not know, and its scale may change "
            f"with the layout: switch it off in the model's config. Known are {', '.join(SCALERS)}"
        )
    _checked.add(bare)


def attaching_functions(roots: Iterable[object]) -> Iterator[str]:
    """The names of the Functions with a set_loss_scale in the graph below these nodes."""
    waiting, seen = list(roots), set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        function: Any = getattr(type(node), "_forward_cls", None)  # torch has no public name for the Function of a node
        if hasattr(function, "set_loss_scale"):
            yield str(function.__name__)
        waiting += [following for following, _ in getattr(node, "next_functions", ()) if following is not None]
