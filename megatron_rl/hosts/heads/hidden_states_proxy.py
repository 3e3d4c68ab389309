"""Hidden states where a host expects its model's logits, on their way from the output layer to our loss.

With --fused-lm-head-loss the output layer multiplies nothing. It returns a HiddenStatesProxy, and custom_loss takes hidden states
and weight out of it; so does proxy_log_probs, for old and reference log-probabilities. The proxy is a torch.Tensor whose data are
the hidden states, with their graph. It says of itself what the host would be told of its logits:

    output layer   ->  GPTModel             ->  Float16Module  ->  DDP, schedule  ->  the host's loss_function  ->  custom_loss
    [S, B, V_tp]       [B, S, V_tp]             float32                               .device, 0 * .sum()
                       transpose, contiguous    .data, .float()                       torch.utils.checkpoint

    what it says           what it holds
    shape [B, S, V_tp]     hidden states [S, B, H], under sequence parallelism [S / tp, B, H]: nothing is moved or gathered
    dtype float32          the dtype of the parameters: a cast copies nothing, and our loss sums its products in float32

Each torch function that is given the proxy comes to `__torch_function__`. FUNCTIONS has those of the path above, each with the
answer that logits would give. Any other is a ConfigError with its name and the caller's line, so that no line of a host computes
with hidden states in the place of logits. `sum` gives a _Sum, which takes a product with 0 alone: it is 0, and keeps the graph,
which is what hosts want of it.

A subclass and not a wrapper, because the schedule, torch.utils.checkpoint and autograd take tensors. They work below
`__torch_function__`, with the data as they are, so the gradient has the shape of the hidden states. What copies the data without a
torch function (torch.tensor, DLPack) is not seen here; a copy in the place of the HiddenStatesProxy is refused by `inputs_of`.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor

from megatron_rl.errors import ConfigError
from megatron_rl.layout.groups import Group
from megatron_rl.megatron.head import HeadInputs

_TORCH_FOLDER = os.path.dirname(torch.__file__) + os.sep
_CHECKPOINT_FILE = torch.utils.checkpoint.__file__
_PROXIES = (__file__, os.path.join(os.path.dirname(__file__), "row_proxy.py"))
_OF_TENSOR: Any = Tensor  # its attributes are descriptors, which type checkers do not know


@dataclass(frozen=True, slots=True)
class _Claim:
    """What a HiddenStatesProxy says of itself, and what its data lack to be HeadInputs."""

    weight: Tensor
    is_sequence_parallel: bool
    shape: torch.Size  # of the logits
    dtype: torch.dtype  # of the logits
    is_batch_first: bool = False


class HiddenStatesProxy(Tensor):
    """Made by `make_proxy`, read by `inputs_of`."""

    claim: _Claim

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        answer, named = FUNCTIONS.get(func), kwargs or {}
        found = NotImplemented
        if answer is not None and takes(answer, args, named, HiddenStatesProxy):
            with torch._C.DisableTorchFunctionSubclass():
                found = answer(*args, **named)
        if found is NotImplemented:
            raise refusal(func)
        return found


class _Sum(Tensor):
    """The sum of logits that were never computed: 0-d and 0, with the graph of the hidden states."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        factors = [value for value in args if not isinstance(value, _Sum)]
        if func not in _PRODUCTS or kwargs or len(factors) != 1 or isinstance(factors[0], Tensor) or factors[0] != 0:
            raise refusal(func, "the sum of ")
        (own,) = (value for value in args if isinstance(value, _Sum))
        with torch._C.DisableTorchFunctionSubclass():
            return own.as_subclass(Tensor) * 0


def make_proxy(inputs: HeadInputs, tp_group: Group) -> HiddenStatesProxy:
    """The arguments of the output layer as the output that it would have, [S, B, V_tp].

    It has a gradient where logits would: also of a trained head on frozen layers, whose hidden states have none. Else the reentrant
    torch.utils.checkpoint would see no input with a gradient, and the head would get none.
    """
    hidden, weight = inputs.hidden, inputs.weight
    if torch.is_grad_enabled() and weight.requires_grad and not hidden.requires_grad:
        hidden = hidden.detach().requires_grad_()
    num_positions = hidden.shape[0] * (tp_group.size() if inputs.is_sequence_parallel else 1)
    shape = torch.Size((num_positions, hidden.shape[1], weight.shape[0]))
    return _made(hidden, _Claim(weight, inputs.is_sequence_parallel, shape, hidden.dtype))


def inputs_of(logits: Tensor) -> HeadInputs:
    """What the model's output carries. Raises ConfigError for logits, and where the host has not moved the batch to the front."""
    if not isinstance(logits, HiddenStatesProxy):
        shape = f"{type(logits).__name__} {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
        raise ConfigError(
            f"--fused-lm-head-loss: the loss is given a {shape}, and not what our output layer returns: this host trains another "
            "model than the one that it has built, or a hook makes a new tensor of the model's output; remove "
            "--fused-lm-head-loss, or the hook"
        )
    claim = logits.claim
    if not claim.is_batch_first:
        raise ConfigError(
            f"--fused-lm-head-loss: the model's output is [S, B, V_tp] {tuple(claim.shape)}, and a host's logits are [B, S, V_tp]: "
            "this model does not move the batch to the front; remove --fused-lm-head-loss"
        )
    with torch._C.DisableTorchFunctionSubclass():
        return HeadInputs(logits.as_subclass(Tensor), claim.weight, claim.is_sequence_parallel)


def takes(answer: Callable[..., Any], args: Sequence[Any], named: Mapping[str, Any], proxy: type[Tensor]) -> bool:
    """Whether the answer has these arguments, the first of them of this class."""
    try:
        inspect.signature(answer).bind(*args, **named)
    except TypeError:
        return False
    return isinstance(args[0], proxy)


def _made(data: Tensor, claim: _Claim) -> HiddenStatesProxy:
    with torch._C.DisableTorchFunctionSubclass():
        made = data.as_subclass(HiddenStatesProxy)
    made.claim = claim
    return made


def _transpose(proxy: HiddenStatesProxy, first: int, second: int) -> Any:
    if {first, second} != {0, 1}:
        return NotImplemented
    claim, (one, two, columns) = proxy.claim, proxy.claim.shape
    return _made(proxy, replace(claim, shape=torch.Size((two, one, columns)), is_batch_first=not claim.is_batch_first))


def _float(proxy: HiddenStatesProxy) -> HiddenStatesProxy:
    return _made(proxy, replace(proxy.claim, dtype=torch.float32))


def _size(proxy: HiddenStatesProxy, dim: int | None = None) -> Any:
    return proxy.claim.shape if dim is None else proxy.claim.shape[dim]


def _sum(proxy: HiddenStatesProxy) -> _Sum:
    return (proxy.as_subclass(Tensor).sum(dtype=torch.float32) * 0).as_subclass(_Sum)


def _detached(proxy: HiddenStatesProxy) -> HiddenStatesProxy:
    return _made(proxy.detach(), proxy.claim)


def _gradient(proxy: HiddenStatesProxy) -> Any:
    """The reentrant torch.utils.checkpoint takes the gradient of its inputs and hands it to autograd. To others it is no gradient
    of logits."""
    is_checkpoint = sys._getframe(2).f_code.co_filename == _CHECKPOINT_FILE
    return _OF_TENSOR.grad.__get__(proxy) if is_checkpoint else NotImplemented


def _require_gradient(proxy: HiddenStatesProxy, value: bool) -> None:
    _OF_TENSOR.requires_grad.__set__(proxy, value)


def _in_words(proxy: HiddenStatesProxy, *_: Any, **__: Any) -> str:
    shape, dtype = tuple(proxy.claim.shape), proxy.claim.dtype
    return f"HiddenStatesProxy(hidden states in the place of logits {shape} {dtype}, --fused-lm-head-loss)"


def data_getter(getter: Callable[[Tensor], Any]) -> Callable[[Any], Any]:
    """What the hidden states and the logits have alike."""
    return lambda proxy: getter(proxy)


# A function of torch -> the answer, called below __torch_function__. NotImplemented: refused with these arguments.
OF_EVERY_PROXY: dict[Callable[..., Any], Callable[..., Any]] = {
    _OF_TENSOR.dtype.__get__: lambda proxy: proxy.claim.dtype,
    _OF_TENSOR.device.__get__: data_getter(_OF_TENSOR.device.__get__),
    Tensor.get_device: data_getter(Tensor.get_device),
    _OF_TENSOR.is_cuda.__get__: data_getter(_OF_TENSOR.is_cuda.__get__),
    Tensor.is_floating_point: lambda proxy: True,
    _OF_TENSOR.requires_grad.__get__: data_getter(_OF_TENSOR.requires_grad.__get__),
    Tensor.contiguous: lambda proxy: proxy,
}
# Those of a HiddenStatesProxy.
FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    **OF_EVERY_PROXY,
    _OF_TENSOR.shape.__get__: _size,
    Tensor.size: _size,
    _OF_TENSOR.ndim.__get__: lambda proxy: 3,
    Tensor.dim: lambda proxy: 3,
    Tensor.numel: lambda proxy: proxy.claim.shape.numel(),
    _OF_TENSOR.requires_grad.__set__: _require_gradient,
    _OF_TENSOR.grad.__get__: _gradient,
    _OF_TENSOR.data.__get__: _detached,
    Tensor.detach: _detached,
    Tensor.transpose: _transpose,
    Tensor.float: _float,
    Tensor.sum: _sum,
    Tensor.__repr__: _in_words,
    Tensor.__format__: _in_words,
}
_PRODUCTS = (Tensor.mul, Tensor.__mul__, Tensor.__rmul__)


def refusal(func: Callable[..., Any], of: str = "", setting: str = "--fused-lm-head-loss") -> ConfigError:
    """For a function of torch that has no answer here. setting: what the user typed to get a proxy."""
    name = getattr(func, "__name__", repr(func))
    if name in ("__get__", "__set__", "__delete__"):  # an attribute: the descriptor has its name
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    return ConfigError(
        f"{_caller()} asks for `{name}` of {of}the model's output, which under {setting} carries hidden states and no logits: "
        f"the line would compute another number; leave it out, or remove {setting}"
    )


def _caller() -> str:
    """file:line of the innermost frame that is neither torch's nor of a proxy."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_TORCH_FOLDER, *_PROXIES)):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
