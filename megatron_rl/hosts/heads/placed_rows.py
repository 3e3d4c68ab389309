"""Places RowProxy in a model of verl, NeMo-RL or ROLL: its output layer gives hidden states where the host expects logits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from megatron_rl.hosts.heads.placed_head import place_head
from megatron_rl.hosts.heads.row_proxy import make_row_proxy
from megatron_rl.layout.groups import Group
from megatron_rl.megatron.head import OWN, HeadInputs, HeadSettings, own_forward

OF_MTP = "_process_mtp_loss"


def place_rows(models: Sequence[nn.Module], setting: str, *, knows_mtp: bool = False) -> None:
    """From now on the output layer of these parts of a model returns RowProxy. setting: what the user typed.

    knows_mtp: the host computes losses of multi-token prediction with a detached weight, or within `with_logits`; these calls get
    their logits. Another call for such a loss would refuse its RowProxy.
    Communication and errors: as place_head.
    """
    place_head(models, HeadSettings(is_fused=True, setting=setting), _forward_of, knows_mtp=knows_mtp)


def _forward_of(layer: Any, settings: HeadSettings, tp_group: Group) -> Callable[..., Any]:
    own = own_forward(layer)

    def forward(input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None) -> Any:
        used = layer.weight if weight is None else weight
        if runtime_gather_output or not isinstance(used, nn.Parameter):  # a sampler's forward; a loss that does not train the head
            return own(input_, weight=weight, runtime_gather_output=runtime_gather_output)
        inputs = HeadInputs(input_, used, layer.sequence_parallel)
        return make_row_proxy(inputs, tp_group, settings.setting or ""), None

    setattr(forward, OWN, own)
    return forward


def with_logits(module: ModuleType) -> None:
    """In this module of a host Megatron-Core's process_mtp_loss, which calls the output layer, gets its logits. Releases of core
    without that function have the loss in the host's own code."""
    own = getattr(module, OF_MTP, None)
    if own is not None:
        setattr(module, OF_MTP, _with_own_layer(own))


def _with_own_layer(compute: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(compute)
    def process_mtp_loss(*, output_layer: Any, **named: Any) -> Any:
        with _own_forward(output_layer):
            return compute(output_layer=output_layer, **named)

    return process_mtp_loss


@contextmanager
def _own_forward(layer: Any) -> Iterator[None]:
    ours = vars(layer).get("forward")
    if not hasattr(ours, OWN):
        yield
        return
    layer.forward = getattr(ours, OWN)
    try:
        yield
    finally:
        layer.forward = ours
