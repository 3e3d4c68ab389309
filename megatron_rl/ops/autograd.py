"""Protects hand-written gradients: torch.compile does not trace them, and autograd does not differentiate them a second time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch.autograd.function import once_differentiable

from megatron_rl.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")
Context = TypeVar("Context")


def runs_eagerly(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: torch.compile calls `function` without tracing it (a graph break; with fullgraph=True an error).

    Tracing would lose a gradient that forward computes, because the compiler would keep the loss as a constant. Without
    torch.compile there is no cost: torch._dynamo is not imported.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            eager: Callable[P, R] = torch.compiler.disable(function)
            return eager(*args, **kwargs)
        return function(*args, **kwargs)

    return call


def first_order_only(backward: Callable[Concatenate[Context, P], R]) -> Callable[Concatenate[Context, P], R]:
    """Decorator for the backward of an autograd.Function: create_graph=True raises ConfigError.

    once_differentiable alone would return a gradient without grad, so that a gradient penalty would have no effect.
    """
    plain: Callable[Concatenate[Context, P], R] = once_differentiable(backward)

    @functools.wraps(backward)
    def call(ctx: Context, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if torch.is_grad_enabled():
            raise ConfigError(
                "create_graph=True through a function of megatron_rl: its gradient is written by hand and cannot be "
                "differentiated; leave create_graph out, or compute a gradient penalty on torch.log_softmax"
            )
        return plain(ctx, *args, **kwargs)

    return call
