"""Rows of hidden states where verl, NeMo-RL or ROLL expects those of its logits, up to the function that makes log-probabilities.

As HiddenStatesProxy, for hosts that cut the model's output before they compute: a sequence out of a packed row, a batch dimension
off and on, a division by the temperature. The data of RowProxy are hidden states [..., H] in the layout that logits [..., V_tp]
would have, so what touches the first dimensions alone is done with them. Last dimension, dtype and temperature are said.

    output layer -> GPTModel            -> Float16Module -> host                            -> log_probs, our functions
    [S, B, V_tp]    transpose, contiguous  float            narrow, [:, a:b], squeeze(0),
                                                            unsqueeze(0), to(float32), div_(temperature)

A division is remembered, and our function divides the float32 logits: hidden states that were divided before the product would be
rounded to their 16 bits once more. Any other function of torch is a ConfigError with its name and the host's line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from megatron_rl.hosts.heads.hidden_states_proxy import OF_EVERY_PROXY, data_getter, refusal, takes
from megatron_rl.layout.groups import Group
from megatron_rl.megatron.head import HeadInputs, whole_sequences

_OF_TENSOR: Any = Tensor  # its attributes are descriptors, which type checkers do not know


@dataclass(frozen=True, slots=True)
class Claim:
    """What RowProxy say of themselves. setting: what the user typed to get them. divisors: of all views of the same numbers;
    num_seen: how many of them `temperature` holds."""

    weight: Tensor  # [V_tp, H]
    dtype: torch.dtype
    setting: str
    temperature: float = 1.0
    divisors: list[float] = field(default_factory=list)
    num_seen: int = 0


class RowProxy(Tensor):
    """Made by `make_row_proxy`, read by `rows_of`."""

    claim: Claim

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        answer, named = FUNCTIONS.get(func), kwargs or {}
        found = NotImplemented
        if answer is not None and takes(answer, args, named, RowProxy):
            with torch._C.DisableTorchFunctionSubclass():
                found = answer(*args, **named)
        if found is NotImplemented:
            given = [*args, *named.values(), *(each for value in args if isinstance(value, (list, tuple)) for each in value)]
            setting = next((value.claim.setting for value in given if isinstance(value, RowProxy)), "a fused head")
            raise refusal(func, setting=setting)
        return found


def make_row_proxy(inputs: HeadInputs, tp_group: Group, setting: str) -> RowProxy:
    """The arguments of the output layer as the output that it would have, [S, B, V_tp].

    Communication: under sequence parallelism one all-gather of hidden states over tp; backward takes this rank's part of a gradient
    that is complete over tp.
    """
    claim = Claim(inputs.weight, inputs.hidden.dtype, setting)
    return _made(whole_sequences(inputs, tp_group), claim)


def rows_of(rows: RowProxy) -> tuple[Tensor, Claim]:
    """Hidden states [..., H], whose gradient must be complete over tp, and what belongs to them.

    Raises ConfigError where another view of them was divided in place: the division of logits would reach these, or a part of them.
    """
    if rows.claim.num_seen != len(rows.claim.divisors):
        raise refusal(Tensor.div_, of="another view of ", setting=rows.claim.setting)
    with torch._C.DisableTorchFunctionSubclass():
        return rows.as_subclass(Tensor), rows.claim


def _made(data: Tensor, claim: Claim) -> RowProxy:
    with torch._C.DisableTorchFunctionSubclass():
        made = data.as_subclass(RowProxy)
    made.claim = claim
    return made


def _shape(rows: RowProxy) -> torch.Size:
    return torch.Size((*_OF_TENSOR.shape.__get__(rows)[:-1], rows.claim.weight.shape[0]))


def _size(rows: RowProxy, dim: int | None = None) -> Any:
    return _shape(rows) if dim is None else _shape(rows)[dim]


def _of_first(rows: RowProxy, dim: int) -> bool:
    """Whether it is a dimension of the rows, and not the last one."""
    return -rows.dim() <= dim < rows.dim() - 1 and dim != -1


def _transpose(rows: RowProxy, first: int, second: int) -> Any:
    if not (_of_first(rows, first) and _of_first(rows, second)):
        return NotImplemented
    return _made(rows.transpose(first, second), rows.claim)


def _narrow(rows: RowProxy, dim: int, start: Any, length: Any) -> Any:
    return _made(rows.narrow(dim, int(start), int(length)), rows.claim) if _of_first(rows, dim) else NotImplemented


def _squeeze(rows: RowProxy, dim: int) -> Any:
    return _made(rows.squeeze(dim), rows.claim) if _of_first(rows, dim) else NotImplemented


def _unsqueeze(rows: RowProxy, dim: int) -> Any:
    return _made(rows.unsqueeze(dim), rows.claim) if 0 <= dim < rows.dim() else NotImplemented


def _cut(rows: RowProxy, index: Any) -> Any:
    slices = index if isinstance(index, tuple) else (index,)
    if len(slices) >= rows.dim() or not all(isinstance(one, slice) for one in slices):
        return NotImplemented
    return _made(rows.as_subclass(Tensor)[slices], rows.claim)


def _cast(rows: RowProxy, dtype: Any) -> Any:
    is_known = isinstance(dtype, torch.dtype) and dtype.is_floating_point
    if not is_known:
        return NotImplemented
    claim = replace(rows.claim, dtype=dtype)
    # Logits of another dtype are a copy.
    return _made(rows, claim if dtype == rows.claim.dtype else replace(claim, divisors=[], num_seen=0))


def _divide(rows: RowProxy, divisor: Any) -> Any:
    """In place, by a number."""
    if isinstance(divisor, bool) or not isinstance(divisor, (int, float)) or not divisor > 0:
        return NotImplemented
    claim = rows.claim
    claim.divisors.append(divisor)
    rows.claim = replace(claim, temperature=claim.temperature * divisor, num_seen=claim.num_seen + 1)
    return rows


def _in_words(rows: RowProxy, *_: Any, **__: Any) -> str:
    return f"RowProxy(hidden states in the place of logits {tuple(_shape(rows))} {rows.claim.dtype}, {rows.claim.setting})"


# A function of torch -> the answer, as in hidden_states_proxy.FUNCTIONS.
FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    **OF_EVERY_PROXY,
    _OF_TENSOR.shape.__get__: _shape,
    Tensor.size: _size,
    _OF_TENSOR.ndim.__get__: data_getter(Tensor.dim),
    Tensor.dim: data_getter(Tensor.dim),
    Tensor.numel: lambda rows: _shape(rows).numel(),
    _OF_TENSOR.data.__get__: lambda rows: _made(rows.detach(), rows.claim),
    Tensor.detach: lambda rows: _made(rows.detach(), rows.claim),
    Tensor.transpose: _transpose,
    Tensor.float: lambda rows: _cast(rows, torch.float32),
    Tensor.to: _cast,
    Tensor.narrow: _narrow,
    Tensor.squeeze: _squeeze,
    Tensor.unsqueeze: _unsqueeze,
    Tensor.__getitem__: _cut,
    Tensor.div_: _divide,
    Tensor.__repr__: _in_words,
    Tensor.__format__: _in_words,
}
