"""Counts the launches of Triton kernels, compiled or interpreted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from megatron_rl.ops.backends import is_interpreted


@contextmanager
def counted_launches() -> Iterator[list[str]]:
    """Lists the name of each kernel that is launched."""
    import triton

    names: list[str] = []
    kinds: list[Any] = [triton.JITFunction]
    if is_interpreted():  # needs numpy, which compiled kernels do without
        from triton.runtime.interpreter import InterpretedFunction

        kinds.append(InterpretedFunction)

    def counting(launch: Callable[..., Any]) -> Callable[..., Any]:
        def run(kernel: Any, *args: Any, **options: Any) -> Any:
            names.append(kernel.fn.__name__)
            return launch(kernel, *args, **options)

        return run

    with ExitStack() as patches:
        for kind in kinds:
            patches.enter_context(mock.patch.object(kind, "run", counting(kind.run)))
        yield names
