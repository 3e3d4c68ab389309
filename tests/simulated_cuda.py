"""A CUDA device without a GPU: real values on the CPU, and a list of what would make a host wait or stop an operation there.

    with simulated_cuda() as seen:
        torch.ones(3, device="cuda").sum().item()
    seen == [Seen("look", "aten._local_scalar_dense", "some_file.py", 2, "<module>")]

A storage that is made on "cuda" carries a mark. `.device`, `.is_cuda` and torch.cuda answer by it as they do on a GPU, and a
dispatch mode sees each operation with the marks of its inputs. Everything is undone at the end of the block.

    look     the host waits for a value: .item(), .tolist(), .cpu(), bool(), nonzero, an index by a mask, synchronize()
    copy     a copy to the device that the host waits for: no non_blocking=True, or an index that lies on the CPU
    mixture  a CPU tensor beside a device's, which raises on a GPU; a 0-d one is a number and passes where a GPU lets it

    with seen.capture():     as a CUDA graph sees it: these raise CaptureError at once, and so does a copy from the host that nobody
        step()               waits for

It knows what torch's own operations do, not what time they take. It must never be used where there is a GPU: tests/test_gpu.py asks
that. A gradient cannot cross from one device to the other here.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from megatron_rl.megatron import cpu

# The first use of torch.compile makes a table of torch's functions, for good: before any of them is replaced.
torch.compile(lambda: None)

LOOK, COPY, MIXTURE = "look", "copy", "mixture"
# In a capture alone: a copy from the host that the host does not wait for.
ASYNC_COPY = "copy in a capture"
HOST, DEVICE = torch.device("cpu"), torch.device("cuda", 0)
MARK = "is_on_simulated_cuda"
# Operations whose result has a size, or is a number, that the host has to be told.
LOOKS = {
    *("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive"),
    *("bincount", "repeat_interleave", "allclose"),
}
INDEXED = {"index", "index_put", "index_put_", "_unsafe_index", "_index_put_impl_"}
# Elementwise operations take a 0-d CPU tensor as a number; these do not.
WITHOUT_NUMBERS = {
    *("cat", "stack", "gather", "scatter", "scatter_", "scatter_add", "scatter_add_", "index_select", "mm", "addmm", "bmm", "mv"),
    *("searchsorted", "embedding"),
}
PLACES_OF_TORCH = (str(Path(torch.__file__).parent), str(Path(contextlib.__file__).parent) + "/contextlib.py", __file__)
ROOT = str(Path(__file__).resolve().parent.parent) + "/"


class Seen(NamedTuple):
    """What happened, and the innermost line outside torch that asked for it."""

    kind: str
    operation: str
    file: str  # from the package's or Megatron-Core's folder on: "megatron_rl/megatron/batch.py"
    line: int
    function: str


def is_on_device(tensor: Tensor) -> bool:
    return getattr(tensor.untyped_storage(), MARK, False)


def mark(tensor: Tensor) -> Tensor:
    setattr(tensor.untyped_storage(), MARK, True)
    return tensor


def means_device(device: object) -> bool:
    return isinstance(device, int) or (device is not None and torch.device(device).type == "cuda")


@contextlib.contextmanager
def simulated_cuda() -> Iterator[Record]:
    if torch.cuda.is_available():
        raise RuntimeError("there is a GPU: ask it, and not its simulation")
    record = Record()
    with contextlib.ExitStack() as stack:
        for owner, name, replacement in replacements(record):
            stack.enter_context(mock.patch.object(owner, name, replacement, create=True))
        stack.enter_context(Operations(record))
        yield record


class CaptureError(RuntimeError):
    """What a CUDA graph cannot hold; a GPU says "operation not permitted when stream is capturing"."""


class Record(list[Seen]):
    """What was seen, in order."""

    def __init__(self):
        super().__init__()
        self.is_capturing = False

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        self.is_capturing = True
        try:
            yield
        finally:
            self.is_capturing = False

    def add(self, kind: str, operation: str) -> None:
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_filename.startswith(PLACES_OF_TORCH):
            frame = frame.f_back
        self.append(Seen(kind, operation, *place_of(frame)))
        if self.is_capturing:
            raise CaptureError(f"not permitted while a stream is capturing: {self[-1]}")

    def copy(self, operation: str, to_device: bool, is_async: bool) -> None:
        if not is_async:
            self.add(COPY if to_device else LOOK, operation)
        elif self.is_capturing:
            self.add(ASYNC_COPY, operation)


def place_of(frame: FrameType) -> tuple[str, int, str]:
    path = frame.f_code.co_filename.rpartition("/site-packages/")[2].removeprefix(ROOT)
    return path, frame.f_lineno, frame.f_code.co_name


def host_version(operation):
    """The operation; for a product of 16-bit operands with a float32 result, which torch has on CUDA alone, the product of wide
    ones."""
    if operation is torch.ops.aten.mm.dtype_out:
        return lambda left, right, dtype, out: torch.ops.aten.mm.out(left.to(dtype), right.to(dtype), out=out)
    if operation is torch.ops.aten.mm.dtype:
        return lambda left, right, dtype: torch.ops.aten.mm.default(left.to(dtype), right.to(dtype))
    return operation


class Operations(TorchDispatchMode):
    """Sees what torch runs, below autograd, forward and backward."""

    def __init__(self, record: Record):
        super().__init__()
        self.record = record

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        # Python alone names the simulated device: below it torch asks for the CPU, where all storages are.
        is_asked_for = means_device(kwargs.get("device"))
        if kwargs.get("device") is not None:
            kwargs["device"] = HOST
        inputs = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        on_device = [is_on_device(tensor) for tensor in inputs]
        is_collective = operation.namespace == "c10d"
        if any(on_device) and not is_collective:
            self.judge(operation, args, kwargs, inputs, on_device)
        # An output in an input's memory lies where that does.
        known = {tensor.untyped_storage()._cdata for tensor in inputs}
        result = host_version(operation)(*args, **kwargs)
        if is_asked_for or any(on_device):
            for value in tree_leaves(result):
                if isinstance(value, Tensor) and value.untyped_storage()._cdata not in known:
                    mark(value)
        return result

    def judge(self, operation, args, kwargs, inputs: list[Tensor], on_device: list[bool]) -> None:
        """Notes what the operation would do on a GPU, where at least one of its inputs lies there."""
        name, text = operation._overloadpacket.__name__, str(operation._overloadpacket)
        if name == "copy_":
            (target, source), is_async = args[:2], len(args) > 2 and args[2]
            if is_on_device(target) != is_on_device(source):
                self.record.copy(text, is_on_device(target), is_async)
        elif name in INDEXED:
            self.judge_index(name, text, args)
        elif name in LOOKS and not (name == "repeat_interleave" and kwargs.get("output_size") is not None):
            self.record.add(LOOK, text)
        elif name not in ("set_", "resize_", "lift_fresh") and any(
            not there and (tensor.dim() or name in WITHOUT_NUMBERS) for tensor, there in zip(inputs, on_device, strict=True)
        ):
            self.record.add(MIXTURE, f"{text} {[tuple(tensor.shape) for tensor in inputs]}")

    def judge_index(self, name: str, text: str, args: tuple) -> None:
        target, indices = args[0], [index for index in args[1] if index is not None]
        value = args[2] if name != "index" and len(args) > 2 else target
        masks = [index for index in indices if index.dtype in (torch.bool, torch.uint8) and is_on_device(index)]
        if not is_on_device(target) or (value.dim() and not is_on_device(value)):
            self.record.add(MIXTURE, text)
            return
        # A GPU writes one number by one mask as masked_fill does, without looking.
        if masks and not (value is not target and value.numel() == 1 and len(indices) == 1):
            self.record.add(LOOK, f"{text} by a mask")
        if not all(is_on_device(tensor) for tensor in (*indices, value)):
            self.record.add(COPY, f"{text} by CPU tensors")


def replacements(record: Record) -> Iterator[tuple[object, str, object]]:
    """(owner, name, what takes its place): torch's answers to Python that no dispatch mode sees."""
    yield from of_tensors(record)
    yield from of_factories(record)
    yield from of_torch_cuda(record)
    yield from of_triton(record)


def moved(record: Record, tensor: Tensor, to_device: bool, dtype: torch.dtype | None, is_async: bool) -> Tensor:
    """A copy of the tensor on the other device."""
    if tensor.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError("a gradient that crosses from one device to the other is not simulated")
    record.copy("to" if to_device else "cpu", to_device, is_async)
    with _disable_current_modes():
        copy = tensor.detach().clone() if dtype is None else tensor.detach().to(dtype, copy=True)
    return mark(copy) if to_device else copy


def of_tensors(record: Record) -> Iterator[tuple[object, str, object]]:
    base = torch._C.TensorBase
    move = functools.partial(moved, record)

    def to(tensor: Tensor, *args, **kwargs) -> Tensor:
        args, wanted, dtype = list(args), kwargs.pop("device", None), kwargs.pop("dtype", None)
        if args and isinstance(args[0], Tensor):
            args[:1] = [args[0].device, args[0].dtype]
        if args and not isinstance(args[0], (bool, torch.dtype)):
            wanted = args.pop(0)
        if args and not isinstance(args[0], bool):
            dtype = args.pop(0)
        if wanted is None or means_device(wanted) == is_on_device(tensor):
            return base.to(tensor, tensor.dtype if dtype is None else dtype, *args, **kwargs)
        return move(tensor, means_device(wanted), dtype, kwargs.get("non_blocking", bool(args) and args[0]))

    def looking(name: str) -> Callable:
        """A method by which Python reads values; a NumPy array of a device's tensor does not exist."""
        real = getattr(base, name)

        def look(tensor: Tensor, *args, **kwargs):
            if is_on_device(tensor):
                record.add(LOOK if name == "tolist" else MIXTURE, name)
            with _disable_current_modes():
                return real(tensor, *args, **kwargs)

        return look

    def set_item(tensor: Tensor, index, value) -> None:
        if is_on_device(tensor) and not isinstance(value, Tensor):
            value = torch.full((), value, dtype=tensor.dtype, device=DEVICE)  # a GPU fills, it copies nothing
        base.__setitem__(tensor, index, value)

    def type_of(tensor: Tensor, *args, **kwargs):
        answer = base.type(tensor, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) and is_on_device(tensor) else answer

    found = {
        "device": property(lambda tensor: DEVICE if is_on_device(tensor) else HOST),
        "is_cuda": property(is_on_device),
        "is_cpu": property(lambda tensor: not is_on_device(tensor)),
        "get_device": lambda tensor: 0 if is_on_device(tensor) else -1,
        "to": to,
        "cpu": lambda tensor: to(tensor, HOST),
        "cuda": lambda tensor, device=None, non_blocking=False: to(tensor, DEVICE, non_blocking=non_blocking),
        "pin_memory": lambda tensor: tensor,
        "type": type_of,
        "__setitem__": set_item,
        **{name: looking(name) for name in ("tolist", "numpy")},
    }
    return ((Tensor, name, value) for name, value in found.items())


def of_factories(record: Record) -> Iterator[tuple[object, str, object]]:
    """torch.tensor and as_tensor make a CPU tensor and copy it; the others run a kernel, and take an int for a device."""
    tensor, as_tensor = torch.tensor, torch.as_tensor

    def from_data(data, *, device=None, dtype=None, **kwargs) -> Tensor:
        if isinstance(data, Tensor):
            return data.detach().clone().to(data.device if device is None else device, data.dtype if dtype is None else dtype)
        made = tensor(data, dtype=dtype, **{**kwargs, "pin_memory": False})
        return moved(record, made, True, None, False).requires_grad_(made.requires_grad) if means_device(device) else made

    def as_given(data, dtype=None, device=None) -> Tensor:
        if isinstance(data, Tensor):
            return data.to(data.device if device is None else device, data.dtype if dtype is None else dtype)
        return from_data(data, device=device, dtype=dtype) if means_device(device) else as_tensor(data, dtype=dtype)

    def by_kernel(factory: Callable) -> Callable:
        def make(*args, **kwargs):
            if type(kwargs.get("device")) is int:
                kwargs["device"] = DEVICE
            return factory(*args, **kwargs)

        return make

    others = [name for name in cpu._FACTORIES if name != "tensor"]
    yield from ((torch, name, by_kernel(getattr(torch, name))) for name in others)
    yield from ((torch, "tensor", from_data), (torch, "as_tensor", as_given))


def returning(make: Callable) -> Callable:
    """A function object of its own for each name: torch.compile's table refuses one object under two names of torch."""
    return lambda *args, **kwargs: make()


def of_torch_cuda(record: Record) -> Iterator[tuple[object, str, object]]:
    def wait(*args) -> None:
        record.add(LOOK, "synchronize")

    stream = type("Stream", (cpu._Stream,), {"synchronize": wait, "device": DEVICE})
    event = type("Event", (cpu._Event,), {"synchronize": wait})
    generator = torch.default_generator
    get_state, set_state = lambda *args, **kwargs: generator.get_state(), lambda state, *args, **kwargs: generator.set_state(state)
    properties = SimpleNamespace(
        multi_processor_count=132, L2_cache_size=50 << 20, total_memory=141 << 30, major=9, minor=0, name="simulated"
    )
    found = {
        **{"is_available": lambda: True, "is_initialized": lambda: True, "device_count": lambda: 1, "current_device": lambda: 0},
        **{name: returning(lambda: None) for name in ("_lazy_init", "set_device", "empty_cache")},
        **{"device": contextlib.nullcontext, "device_of": contextlib.nullcontext, "Stream": stream, "Event": event},
        **{name: returning(stream) for name in ("stream", "current_stream", "default_stream")},
        **{"synchronize": wait, "is_current_stream_capturing": lambda: record.is_capturing, "default_generators": (generator,)},
        **{"get_device_properties": lambda *device: properties, "get_device_capability": lambda *device: (9, 0)},
        **{"get_rng_state": get_state, "set_rng_state": set_state},
        **{"manual_seed": generator.manual_seed, "manual_seed_all": lambda seed: generator.manual_seed(seed)},
    }
    yield from ((torch.cuda, name, value) for name, value in found.items())
    for name in ("get_rng_state", "set_rng_state", "current_device"):
        yield torch.cuda.random, name, found[name]


def of_triton(record: Record) -> Iterator[tuple[object, str, object]]:
    """The interpreter copies a kernel's arguments to the host and back, which a compiled kernel does not do."""
    if "triton" not in sys.modules:
        return
    from triton.runtime.interpreter import GridExecutor

    launch = GridExecutor.__call__

    def launch_unseen(executor, *args, **kwargs):
        if any(not is_on_device(value) for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)):
            record.add(MIXTURE, f"CPU tensor given to {executor.fn.__name__}")
        with _disable_current_modes():
            return launch(executor, *args, **kwargs)

    yield GridExecutor, "__call__", launch_unseen
