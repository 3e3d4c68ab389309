"""Makes the installed Megatron-Core run on CPU and gloo, when install_cpu_support() is called and CUDA is not available."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.errors import ConfigError

_CPU = torch.device("cpu")
# Functions that Megatron-Core calls with device="cuda" or device=torch.cuda.current_device(), some with pin_memory=True.
_FACTORIES = (
    *("arange", "empty", "empty_like", "eye", "full", "full_like", "ones", "ones_like", "rand", "rand_like"),
    *("randint", "randn", "randn_like", "randperm", "tensor", "zeros", "zeros_like"),
)
_is_installed = False


def install_cpu_support() -> None:
    """Redirects Megatron-Core's CUDA calls to the CPU, for the rest of this process. A second call does nothing.

    Call it before the first use of Megatron-Core. Megatron uses CUDA in six places that a caller cannot choose: the device of its
    buffers, factories with device="cuda", `.cuda()`, its random state tracker, streams and events, and the type string
    "torch.cuda.FloatTensor". All six then use the CPU; `torch.cuda.is_available()` stays False. Its experts exchange parts of
    unequal size, which gloo refuses: all_to_all_single, all_gather and reduce_scatter take them.

    Raises ConfigError where CUDA is available (the run would train on the CPU without a message) and where megatron-core is not
    installed.
    """
    global _is_installed
    if torch.cuda.is_available():
        raise ConfigError(
            "install_cpu_support() was called but torch.cuda.is_available() is True: Megatron-Core needs no CPU support there; "
            "do not call it, or hide the devices with CUDA_VISIBLE_DEVICES='' to run on the CPU"
        )
    if _is_installed:
        return
    hide_transformer_engine()
    if find_spec("megatron") is None or find_spec("megatron.core") is None:
        raise ConfigError("megatron-core is not installed: pip install '/path/to/megatron_rl[megatron]'")
    # Imported before anything is replaced, so that a failed import leaves torch unchanged.
    with _without_compiler():
        import megatron.core.tensor_parallel.random as megatron_random

    _redirect_devices()
    _redirect_random_state(megatron_random)
    _replace_streams()
    _rename_tensor_types()
    _support_experts()
    support_latent_attention()
    _is_installed = True


def hide_transformer_engine() -> None:
    """Makes `import transformer_engine` raise ImportError where the package is installed and CUDA is not available.

    Transformer Engine does not work without CUDA: PyPI's meta package raises RuntimeError, the real package OSError for the missing
    driver library. Megatron-Core handles only ImportError.
    """
    is_hidden_or_imported = "transformer_engine" in sys.modules
    if not is_hidden_or_imported and not torch.cuda.is_available() and find_spec("transformer_engine") is not None:
        sys.modules["transformer_engine"] = None  # type: ignore[assignment]  # None makes the import raise ImportError


def quiet_megatron() -> None:
    """Silences the warnings of Megatron's and torch's modules in this process. At its import Megatron-Core warns of what it does
    without (Transformer Engine, apex), which `megatron-rl doctor` tells."""
    warnings.filterwarnings("ignore", module=r"(megatron|torch)\..*")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    logging.getLogger("megatron.core.dist_checkpointing").setLevel(logging.CRITICAL)  # what it logs it raises too


def import_megatron() -> None:
    """Imports what a rank uses of Megatron-Core, and silences it. Raises what its import raises."""
    quiet_megatron()
    hide_transformer_engine()
    with _without_compiler():
        import megatron.core.models.gpt  # a release that lacks it, or another package of this name, fails here
        import megatron.core.models.gpt.gpt_layer_specs
        import megatron.core.optimizer
        import megatron.core.pipeline_parallel  # noqa: F401


@contextlib.contextmanager
def _without_compiler() -> Iterator[None]:
    """Without CUDA torch.compile returns the function itself. Megatron-Core decorates some fused functions at its import, which no
    model on a CPU calls, and torch then imports its whole compiler: that is a third of the time that Megatron's import takes."""
    compiling = torch.compile
    if not torch.cuda.is_available():
        _replace(torch, compile=lambda function=None, **_: (lambda given: given) if function is None else function)
    try:
        yield
    finally:
        _replace(torch, compile=compiling)


def _redirect_devices() -> None:
    # Rotary embeddings, GlobalMemoryBuffer, DDP buffers and gather regions allocate on torch.cuda.current_device().
    _replace(torch.cuda, current_device=lambda: _CPU)
    _replace(torch, **{name: _on_cpu(getattr(torch, name)) for name in _FACTORIES})
    # Rotary embeddings under context parallelism call .cuda(non_blocking=True).
    _replace(torch.Tensor, cuda=lambda self, *args, **kwargs: self)
    _replace(torch.nn.Module, cuda=lambda self, *args, **kwargs: self)


def _replace(owner: object, **replacements: object) -> None:
    """Replaces attributes of torch or of Megatron-Core. The replacements work on the CPU, so their types differ."""
    for name, replacement in replacements.items():
        setattr(owner, name, replacement)


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    """The factory with the CPU in place of device="cuda", and without pinned memory, which needs a driver."""

    @functools.wraps(factory)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if isinstance(device, (str, torch.device)) and torch.device(device).type == "cuda":
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return wrapped


def _redirect_random_state(megatron_random: ModuleType) -> None:
    """For dropout, the embedding under sequence parallelism and Megatron's attention, which use its tracker of CUDA states."""

    def get_state(*args: object, **kwargs: object) -> Tensor:
        return torch.default_generator.get_state()

    def set_state(state: Tensor, *args: object, **kwargs: object) -> None:
        torch.default_generator.set_state(state)

    seed = torch.default_generator.manual_seed
    _replace(torch.cuda, manual_seed=seed, manual_seed_all=lambda number: seed(number))
    for module in (torch.cuda, torch.cuda.random):
        _replace(module, get_rng_state=get_state, set_rng_state=set_state)
    _replace(megatron_random, _get_cuda_rng_state=get_state, _set_cuda_rng_state=set_state)


def _replace_streams() -> None:
    """For pipeline point-to-point, overlapped reductions and dist_checkpointing, which synchronise and wait for events."""
    _replace(torch.cuda, Stream=_Stream, Event=_Event)
    # A new function object for each name: torch.compile's rule table refuses one object under two torch names.
    for name in ("current_stream", "default_stream", "stream"):
        setattr(torch.cuda, name, lambda *args, **kwargs: _Stream())
    for name in ("synchronize", "set_device", "empty_cache"):
        setattr(torch.cuda, name, lambda *args, **kwargs: None)


class _Event:
    """An event of a device that finishes each operation before the call returns."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def record(self, *args: object) -> None: ...

    def wait(self, *args: object) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: _Event) -> float:
        return 0.0


class _Stream:
    """The only stream of such a device; like torch's, a context manager."""

    cuda_stream = 0

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def wait_stream(self, *args: object) -> None: ...

    def wait_event(self, *args: object) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, *args: object) -> _Event:
        return _Event()

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *args: object) -> None: ...


def _rename_tensor_types() -> None:
    """For gradient clipping and two optimisers (bf16, sharded), which compare `Tensor.type()` with "torch.cuda.FloatTensor"."""
    tensor_type = torch.Tensor.type

    @functools.wraps(tensor_type)
    def cuda_type(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = tensor_type(self, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer

    _replace(torch.Tensor, type=cuda_type)


def _support_experts() -> None:
    """For mixtures of experts, whose tokens are exchanged in parts of unequal size."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):  # imported with Transformer Engine, and read without it
        _replace(moe_utils, te_general_gemm=None)
    _replace(
        dist,
        all_to_all_single=_with_lists(dist.all_to_all_single),
        all_gather=_with_uneven_parts(dist.all_gather),
        reduce_scatter=_reduce_scatter,
    )


def support_latent_attention() -> None:
    """Without Transformer Engine, Megatron's multi-latent attention asks whether a layer is an instance of what is no class, and
    since 0.17 knows no layer that is whole on each rank."""
    with _without_compiler():
        from megatron.core.post_training.modelopt.layers import Linear
        from megatron.core.transformer import multi_latent_attention

    if not isinstance(vars(multi_latent_attention).get("TELinear"), type):
        _replace(multi_latent_attention, TELinear=type("TELinear", (), {}))
    if vars(multi_latent_attention).get("Linear") is None:
        _replace(multi_latent_attention, Linear=Linear)


def _with_lists(all_to_all_single: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron gives the sizes as a tensor or as numpy's integers; gloo needs a list of int."""

    @functools.wraps(all_to_all_single)
    def wrapped(output: Tensor, input: Tensor, output_split_sizes: Any = None, input_split_sizes: Any = None, **kwargs: Any) -> Any:
        sizes = (None if given is None else [int(size) for size in given] for given in (output_split_sizes, input_split_sizes))
        return all_to_all_single(output, input, *sizes, **kwargs)

    return wrapped


def _with_uneven_parts(all_gather: Callable[..., Any]) -> Callable[..., Any]:
    """gloo gathers parts of one size: shorter ones are padded on the way."""

    @functools.wraps(all_gather)
    def wrapped(parts: list[Tensor], values: Tensor, group: Any = None, async_op: bool = False) -> Any:
        lengths = [part.shape[0] if part.dim() else 1 for part in parts]
        if len(set(lengths)) == 1:
            return all_gather(parts, values, group=group, async_op=async_op)
        padded = values.new_zeros((max(lengths), *values.shape[1:]))
        padded[: values.shape[0]] = values
        gathered = [torch.empty_like(padded) for _ in parts]
        all_gather(gathered, padded, group=group)
        for part, whole in zip(parts, gathered, strict=True):
            part.copy_(whole[: part.shape[0]])
        return None

    return wrapped


def _reduce_scatter(
    output: Tensor, parts: list[Tensor], op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> None:
    """gloo has none for parts of unequal size: all parts are reduced, and this rank takes its own."""
    whole = torch.cat([part.reshape(-1) for part in parts])
    dist.all_reduce(whole, op=op, group=group)
    rank = dist.get_rank(group)
    output.copy_(whole.split([part.numel() for part in parts])[rank].view_as(output))
