"""Triton's interpreter without the search that takes half of its time; it must never change what a kernel computes."""

from __future__ import annotations


def quicken() -> None:
    """A device function puts the interpreter's versions into triton.language at its first call alone, not at each.

    The search for what is to be replaced looks at some hundred names, which is more than most device functions do. What the first
    call has put there stays, and the launch around it replaces, at each launch, whatever it takes away again at its end.
    """
    from triton.runtime.interpreter import InterpretedFunction, InterpreterError

    searching, called = InterpretedFunction.__call__, set()

    def call(function: InterpretedFunction, *args, **kwargs):
        if function not in called:
            called.add(function)
            return searching(function, *args, **kwargs)
        try:
            return function.rewrite()(*args, **kwargs)
        except Exception as error:
            raise InterpreterError(repr(error)) from error

    InterpretedFunction.__call__ = call
