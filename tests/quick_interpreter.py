"""Triton's interpreter without what it computes anew at each operation; it must never change what a kernel computes."""

from __future__ import annotations

import dataclasses
import functools


def quicken() -> None:
    """What the interpreter finds out again and again, it keeps. The search below takes half of its time, types and shapes a third
    of the rest, and of what is left after these a half is for operands that need nothing."""
    quicken_calls()
    quicken_types()
    quicken_operations()


def quicken_calls() -> None:
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


def quicken_types() -> None:
    """Each result of an operation has a type and a shape of its own: equal ones share their parts, which no one writes to."""
    from triton.language import core
    from triton.runtime import interpreter

    of_scalar = functools.cache(interpreter._get_np_dtype)
    pointer = of_scalar(core.uint64)
    first_block, first_tensor, unwrap = core.block_type.__init__, core.tensor.__init__, core._unwrap_if_constexpr
    blocks, tensors = {}, {(): (core.constexpr(1), core.tuple([]))}
    as_they_are = {int, float, bool, str, type(None), core.tensor, core.dtype, core.block_type, core.pointer_type}

    def numpy_dtype(kind):
        element = kind.element_ty if isinstance(kind, core.block_type) else kind
        return pointer if isinstance(element, core.pointer_type) else of_scalar(element)

    def block(self, element_ty, shape):
        sizes = tuple([size.value if isinstance(size, core.constexpr) else size for size in shape])
        if sizes not in blocks:
            first_block(self, element_ty, shape)
            blocks[sizes] = (self.shape, self.numel, str(self.shape))
        self.element_ty = element_ty
        self.shape, self.numel, words = blocks[sizes]
        self.name = f"<{words}, {element_ty}>"

    def tensor(self, handle, type):
        sizes = (*type.shape.values,) if type.is_block() else ()
        if sizes not in tensors:
            first_tensor(self, handle, type)
            tensors[sizes] = (self.numel, self.shape)
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = tensors[sizes]

    interpreter._get_np_dtype = numpy_dtype
    core.block_type.__init__, core.tensor.__init__ = block, tensor
    core._unwrap_if_constexpr = lambda value: value if type(value) in as_they_are else unwrap(value)


def quicken_operations() -> None:
    """Operands of one type and shape are as an operation wants them. The sums of integers in 64 bits, by which Triton looks for an
    overflow, go to an assertion that is made under debug=True alone."""
    from triton.language import core
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    builder, check = interpreter.interpreter_builder, TritonSemantic.binary_op_type_checking_impl
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)

    def checked(self, lhs, rhs, *options, **named):
        if type(lhs) is type(rhs) is core.tensor and lhs.dtype is rhs.dtype and lhs.shape is rhs.shape:
            # quicken_types gives tensors of one shape one tuple. The fourth option is that of a division: bf16 becomes float32.
            if len(options) < 4 and "div_or_mod" not in named and not isinstance(lhs.dtype, core.pointer_type):
                return lhs, rhs
        return check(self, lhs, rhs, *options, **named)

    TritonSemantic.binary_op_type_checking_impl = checked
