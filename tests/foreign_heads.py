"""Output layers that compute more than X W^T, as bridges and adapters build them, and what each refusal calls them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def capped(output: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
    return 3.0 * torch.tanh(output[0] / 3.0), output[1]


def subclassed(model: nn.Module) -> None:
    from megatron.core.tensor_parallel import ColumnParallelLinear

    class CappedLayer(ColumnParallelLinear):
        def forward(self, *given, **named):
            return capped(super().forward(*given, **named))

    model.output_layer.__class__ = CappedLayer


def replaced_on_the_instance(model: nn.Module) -> None:
    own = model.output_layer.forward
    model.output_layer.forward = lambda *given, **named: capped(own(*given, **named))


class Adapter(nn.Module):
    """Around a layer: it has no attribute of the layer."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.to_wrap = layer

    def forward(self, *given, **named):
        return capped(self.to_wrap(*given, **named))


class AdapterWithWeight(Adapter):
    @property
    def weight(self):
        return self.to_wrap.weight + 1.0


class AdapterWithAttributes(Adapter):
    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("to_wrap"), name)


def wrapped(kind: type[Adapter]):
    def change(model: nn.Module) -> None:
        model.output_layer = kind(model.output_layer)

    return change


NOT_MEGATRONS, BY_ADAPTER = "not Megatron's ColumnParallelLinear", "It computes by foreign_heads.Adapter.forward ("
# The change of a model whose output_layer is Megatron's own -> words of the refusal.
FOREIGN_HEADS = {
    subclassed: ("is a CappedLayer, a subclass of Megatron's ColumnParallelLinear", "CappedLayer.forward ("),
    replaced_on_the_instance: ("is a ColumnParallelLinear whose forward was replaced", "<locals>.<lambda> ("),
    wrapped(Adapter): (f"is a Adapter, {NOT_MEGATRONS}", BY_ADAPTER),
    wrapped(AdapterWithWeight): (f"is a AdapterWithWeight, {NOT_MEGATRONS}", BY_ADAPTER),
    wrapped(AdapterWithAttributes): (f"is a AdapterWithAttributes, {NOT_MEGATRONS}", BY_ADAPTER),
}


def check_refusals(found: list[str], setting: str) -> None:
    """found: the error of each of FOREIGN_HEADS."""
    for message, words in zip(found, FOREIGN_HEADS.values(), strict=True):
        assert message.startswith(f"ConfigError: {setting}: the output layer "), message
        assert all(part in message for part in words) and "foreign_heads.py:" in message, message
        assert f"Remove {setting}, or build the plain layer" in message
