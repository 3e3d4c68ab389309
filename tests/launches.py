"""Watches the launches of Triton kernels, compiled or interpreted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from megatron_rl.ops.backends import is_interpreted

Launch = Callable[..., Any]  # (kernel, *arguments, **options); kernel.fn is its function


@contextmanager
def watched_launches(watching: Callable[[Launch], Launch]) -> Iterator[None]:
    """Each launch is `watching(launch)(kernel, ...)` in the place of `launch`."""
    import triton

    kinds: list[Any] = [triton.JITFunction]
    if is_interpreted():  # needs numpy, which compiled kernels do without
        from triton.runtime.interpreter import InterpretedFunction

        kinds.append(InterpretedFunction)
    with ExitStack() as patches:
        for kind in kinds:
            patches.enter_context(mock.patch.object(kind, "run", watching(kind.run)))
        yield


@contextmanager
def counted_launches() -> Iterator[list[str]]:
    """Lists the name of each kernel that is launched."""
    names: list[str] = []

    def counting(launch: Launch) -> Launch:
        def run(kernel: Any, *args: Any, **options: Any) -> Any:
            names.append(kernel.fn.__name__)
            return launch(kernel, *args, **options)

        return run

    with watched_launches(counting):
        yield names
