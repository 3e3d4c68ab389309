"""Which binaries a launch asks for, recorded on a machine without a GPU; nothing is compiled here and no kernel runs.

A launcher is called with tensors that have no storage. Triton, told that the device is an sm_90 one, says what it would compile:
types, alignments, constants, options. A look at a tensor's value raises, as it would synchronise on a GPU.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

WARP = 32
# Of an H100 and an H200; what torch's allocator gives at least, fake tensors start here.
MULTIPROCESSORS, ADDRESS = 132, 1 << 20


@dataclass(frozen=True)
class Binary:
    """What one launch would compile, as Triton says it."""

    kernel: str
    signature: dict[str, str]
    constants: dict[str, object]
    attributes: dict[tuple, list]
    options: dict[str, object]
    function: object

    def key(self) -> str:
        return repr(
            [self.kernel, self.signature, *map(sorted, (self.constants.items(), self.attributes.items(), self.options.items()))]
        )

    def aligned(self) -> list[str]:
        """The arguments of which the compiler is told that they are multiples of 16."""
        names = list(self.signature)
        return [names[path[0]] for path, told in self.attributes.items() if ["tt.divisibility", 16] in told]

    def is_specialised_on(self) -> list[str]:
        """Arguments by whose value the binary differs: everything but constants, types and a pointer's alignment."""
        told = {name for name in self.aligned() if not self.signature[name].startswith("*")}
        declared = {p.name for p in self.function.params if p.is_constexpr}
        folded = {name for name in self.constants if name not in declared and self.constants[name] is not None}
        return sorted(told | folded)


class TorchOperations(TorchDispatchMode):
    """Lists the operations that torch would launch a kernel of its own for: all but views and fresh memory."""

    def __init__(self, names: list[str]):
        super().__init__()
        self.names = names

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        is_view = any(value.alias_info and not value.alias_info.is_write for value in function._schema.returns)
        name = str(function)
        if not is_view and name.startswith("aten.") and "empty" not in name:
            self.names.append(name.removeprefix("aten."))
        return function(*args, **(kwargs or {}))


def record(launch: Callable[[], None], operations: list[str]) -> list[Binary]:
    """The binaries that `launch` asks for, in its order, repeated ones too. `operations`: to be filled with torch's."""
    from triton import knobs

    found: list[Binary] = []

    def hook(*, fn, compile, **others) -> bool:
        described = json.loads(compile["specialization_data"])
        names = list(compile["signature"])
        constants = {names[path[0]]: value for path, value in compile["constants"].items()}
        found.append(
            Binary(
                kernel=fn.jit_function.__name__,
                signature=dict(compile["signature"]),
                constants={name: getattr(value, "value", value) for name, value in constants.items()},
                attributes=dict(compile["configs"][0]),
                options=described["options"],
                function=fn.jit_function,
            )
        )
        return True  # Triton then neither compiles nor launches

    before, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, hook
    try:
        with pretended_device(), TorchOperations(operations):
            launch()
    finally:
        knobs.runtime.jit_cache_hook = before
    return found


@contextlib.contextmanager
def pretended_device() -> Iterator[None]:
    """Tensors on "cuda" without storage, and a driver that answers for an sm_90 device. Looking at a value raises."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    pretended = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, WARP),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
    )
    replaced = [
        (FakeTensor, "__getitem__", indexed),
        (FakeTensor, "data_ptr", lambda tensor: ADDRESS + tensor.storage_offset() * tensor.element_size()),
        (torch.cuda, "get_device_properties", lambda *device: SimpleNamespace(multi_processor_count=MULTIPROCESSORS)),
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "device", contextlib.nullcontext),
        (torch.cuda, "device_of", contextlib.nullcontext),
        (torch.cuda, "current_device", lambda: 0),
        # A torch built for CUDA, 2.11 and before, makes a real tensor on the device here, and asks for a driver.
        (fake_tensor, "init_gpu_context", lambda device: None),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, value in replaced:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        active = driver._active
        stack.callback(lambda: setattr(driver, "_active", active))
        driver.set_active(pretended)
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(FakeTensorMode())
        stack.enter_context(torch.no_grad())
        yield


def indexed(tensor: torch.Tensor, index: object) -> torch.Tensor:
    """tensor[index] of numbers, slices and an ellipsis: a torch without CUDA stumbles over the device in its own."""
    parts, dimension = index if isinstance(index, tuple) else (index,), 0
    for number, part in enumerate(parts):
        if part is Ellipsis:
            dimension = tensor.dim() - (len(parts) - number - 1)
        elif isinstance(part, int):
            tensor = tensor.select(dimension, part)
        else:
            start, stop, step = part.indices(tensor.shape[dimension])
            tensor = torch.ops.aten.slice(tensor, dimension, start, stop, step)
            dimension += 1
    return tensor
