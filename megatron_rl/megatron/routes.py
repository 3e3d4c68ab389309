"""Records which experts the routers of a model chose for each token."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from torch import Tensor, nn

from megatron_rl.megatron.router_losses import routers_of


class RouteLog:
    """`with RouteLog(chunks) as log:` keeps, for each expert layer by its global number, the routes of each forward in it.

    A route is [tokens, num_moe_experts] bool, on the CPU: of this rank's tokens in the router's order, [S, B] flattened, and under
    sequence parallelism of this tensor-parallel rank's part of S.
    """

    def __init__(self, chunks: Sequence[nn.Module]):
        self._chunks = chunks
        self.by_layer: dict[int, list[Tensor]] = {}

    def __enter__(self) -> RouteLog:
        def record(router: nn.Module, inputs: object, output: tuple[Tensor, Tensor]) -> None:
            self.by_layer.setdefault(int(router.layer_number), []).append(output[1].detach().bool().cpu())  # type: ignore[arg-type]

        self._hooks = [router.register_forward_hook(record) for chunk in self._chunks for router in routers_of(chunk)]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for hook in self._hooks:
            hook.remove()
