"""Makes routers use given experts. The weights of the experts are those of the current router, so they have their gradient.

Megatron-Core 0.16 asks the object at TopKRouter.router_replay for the experts of its scores. Here each router has one of its own,
and each forward gives it the routes of its micro-batch and layer. So no order of forwards can mix them up.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from megatron_rl.errors import ConfigError
from megatron_rl.layout.groups import Group
from megatron_rl.megatron.router_losses import routers_of
from megatron_rl.megatron.routes import OfForward, routes_by_layer

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from megatron_rl.megatron.head import ForwardInput


class GivenRoutes:
    """Stands at a router's router_replay. A token without a route keeps the router's own choice."""

    def __init__(self) -> None:
        self.routes: OfForward[Tensor] = OfForward()
        self.own_choice: Tensor | None = None
        """[tokens, topk]: what the router itself would have chosen in its last forward."""

    def get_replay_topk(
        self,
        scores: Tensor,  # [tokens, num_moe_experts]
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:  # scores and ids, [tokens, topk]
        if default_compute_topk is None:
            raise TypeError("get_replay_topk needs default_compute_topk")
        values, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        self.own_choice = own
        given, _ = self.routes.take()
        if given is None:
            return values, own
        ids = torch.where(given < 0, own, given.long())
        return scores.gather(1, ids), ids


@contextmanager
def replayed(model: nn.Module, config: TransformerConfig, batch: ForwardInput, tp_group: Group) -> Iterator[None]:
    """Around a forward: its routers use the micro-batch's replayed_routes, if it has some, also where backward recomputes it.

    Raises ConfigError for replay_problems, and DataError for routes of another model.
    """
    routes = batch.replayed_routes
    routers = routers_of(model) if config.num_moe_experts is not None else []
    if routes is not None and not any(isinstance(vars(router).get("router_replay"), GivenRoutes) for router in routers):
        problems = list(replay_problems(config))
        if problems:
            raise ConfigError(problems)
        for router in routers:
            vars(router)["router_replay"] = GivenRoutes()
    shape = (batch.tokens.shape[0], batch.tokens.shape[1])
    by_layer = {} if routes is None else routes_by_layer(routes, shape, config, tp_group)
    doors = [(router, door) for router in routers if isinstance(door := vars(router).get("router_replay"), GivenRoutes)]
    for router, door in doors:
        door.routes.open(by_layer.get(int(router.layer_number)))
    try:
        yield
    finally:
        for _, door in doors:
            door.routes.close()


def forget_recomputations(model: nn.Module) -> None:
    """Before a step: drops what a step that raised has left."""
    for router in routers_of(model):
        door = vars(router).get("router_replay")
        if isinstance(door, GivenRoutes):
            door.routes.forget()


def replay_problems(config: TransformerConfig) -> Iterator[str]:
    """Why routes cannot be replayed in this model, with the installed Megatron-Core."""
    if config.num_moe_experts is None:
        yield "routes are given, and the model has no experts: num_moe_experts is not set; leave the routes out"
        return
    from megatron.core.transformer.moe import moe_utils

    if "router_replay" not in inspect.signature(moe_utils.topk_routing_with_score_function).parameters:
        yield (
            "router replay: the installed Megatron-Core takes no experts for its routers (topk_routing_with_score_function has no "
            "router_replay); install megatron-core 0.16 or later, or choose --router-replay none"
        )
    remedy = "remove it, or choose --router-replay none"
    if getattr(config, "moe_router_fusion", False):
        yield f"router replay with moe_router_fusion: the fused kernel chooses by itself and takes no routes; {remedy}"
    if config.moe_router_enable_expert_bias:
        yield (
            "router replay with moe_router_enable_expert_bias: the bias would follow the replayed load and not that of "
            f"the router's own choice; {remedy}"
        )
    if config.mtp_num_layers:
        yield (
            f"router replay with mtp_num_layers={config.mtp_num_layers}: samplers have no routes for the layers of multi-token "
            f"prediction; {remedy}"
        )
    if getattr(config, "moe_enable_routing_replay", False):
        yield (
            "router replay with moe_enable_routing_replay: Megatron-Core's own replay would take the place of the given routes; "
            "remove it"
        )
    if getattr(config, "cuda_graph_impl", "none") not in (None, "none") or getattr(config, "enable_cuda_graph", False):
        yield f"router replay with CUDA graphs: a graph repeats the routes that it was captured with; {remedy}"
