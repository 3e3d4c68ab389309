"""Gives the routers of a model their routes, and records which experts they use.

Three forms. A sample's routes are [num_moe_layers, tokens - 1, topk]: its last token predicts nothing and has none. Those of a
micro-batch lie as its tokens do, [T, num_moe_layers, topk] int16, -1 where a token has none. A router takes its tokens in its own
order, [S, B] flattened, and under sequence parallelism this tensor-parallel rank's part of S.

A replayed router uses the experts of its routes with the weights of the current router, which so have their gradient.
Megatron-Core 0.16 asks the object at TopKRouter.router_replay for the experts of its scores. Here each router has one of its own,
and each forward gives it the routes of its micro-batch and layer. So no order of forwards can mix them up.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from megatron_rl.errors import ConfigError, DataError
from megatron_rl.layout.groups import Group, ParallelGroups, all_reduce_sum, group_device
from megatron_rl.megatron.batch import ForwardInput
from megatron_rl.megatron.model import find_gpt_model, model_config_of
from megatron_rl.megatron.samples import expert_layers

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe.router import TopKRouter

# A model's routers: to look for them walks all its modules, and each micro-batch asks.
_routers: weakref.WeakKeyDictionary[nn.Module, list[TopKRouter]] = weakref.WeakKeyDictionary()


def routers_of(model: nn.Module) -> list[TopKRouter]:
    from megatron.core.transformer.moe.router import TopKRouter

    if model not in _routers:
        _routers[model] = [module for module in model.modules() if isinstance(module, TopKRouter)]
    return _routers[model]


def decoder_routers_of(model: nn.Module) -> list[TopKRouter]:
    """Without those of multi-token prediction: samples have no routes for these, and since Megatron-Core 0.17 their layers have
    numbers that the decoder's have too."""
    mtp = getattr(find_gpt_model(model), "mtp", None)
    others = set() if mtp is None else set(mtp.modules())
    return [router for router in routers_of(model) if router not in others]


def in_router_order(values: Tensor, config: TransformerConfig, tp_group: Group) -> Tensor:  # [B, S, *] -> [tokens, *]
    """This rank's values of a micro-batch in the order in which its routers get the tokens."""
    rows = values.transpose(0, 1)
    if config.sequence_parallel:
        rows = rows.chunk(tp_group.size())[tp_group.rank()]
    return rows.flatten(0, 1)


def routes_by_layer(routes: Tensor, shape: tuple[int, int], config: TransformerConfig, tp_group: Group) -> dict[int, Tensor]:
    """{global number of a layer: [tokens, topk] int16, in the router's order} of a micro-batch's routes, for each layer.

    shape: of its tokens, (B, S). Raises DataError where the routes are of another model.
    """
    layers = expert_layers(config)
    if tuple(routes.shape[1:]) != (len(layers), config.moe_router_topk):
        raise DataError(
            f"routes of {routes.shape[1]} layers with {routes.shape[2]} experts a token, and the model has {len(layers)} layers "
            f"with experts (numbers {layers}) and moe_router_topk={config.moe_router_topk}: are they routes of another model?"
        )
    ordered = in_router_order(routes.view(*shape, *routes.shape[1:]), config, tp_group)
    return dict(zip(layers, ordered.unbind(1), strict=True))


class RouteLog:
    """`with RouteLog(chunks) as log:` keeps, for each expert layer by its global number, the routes of each forward in it.

    A route is [tokens, num_moe_experts] bool, on the CPU, of this rank's tokens in the router's order.
    """

    def __init__(self, chunks: Sequence[nn.Module]):
        self._chunks = chunks
        self.by_layer: dict[int, list[Tensor]] = {}

    def __enter__(self) -> RouteLog:
        def record(router: nn.Module, inputs: object, output: tuple[Tensor, Tensor]) -> None:
            self.by_layer.setdefault(int(router.layer_number), []).append(output[1].detach().bool().cpu())  # type: ignore[arg-type]

        self._hooks = [router.register_forward_hook(record) for chunk in self._chunks for router in decoder_routers_of(chunk)]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for hook in self._hooks:
            hook.remove()


class RouteRecorder:
    """Collects the routes of whole samples from forwards on any layout. Each rank of a model replica makes one."""

    def __init__(self, model: nn.Module, groups: ParallelGroups):
        self._model, self._config, self._groups = model, model_config_of(model), groups
        self.row_length = 0  # of the last forward's whole rows
        self.samples: dict[int, Tensor] = {}
        """Number of the sample -> [num_moe_layers, tokens - 1, topk] int16, on the CPU."""

    @contextmanager
    def forward(self, row_positions: Tensor, shape: tuple[int, int], cp_group: Group) -> Iterator[None]:
        """Around one forward. row_positions [T]: the position of each local token in the flattened whole rows; shape: their (B, S);
        cp_group: over which they are cut.

        Communication: one all-reduce of [positions, num_moe_layers, topk] over cp and pp, and over tp with sequence parallelism.
        """
        with RouteLog([self._model]) as log:
            yield
        config, groups = self._config, self._groups
        places = in_router_order(row_positions.view(shape).cpu(), config, groups.tp)
        layers = expert_layers(config)
        whole = torch.zeros(row_positions.numel() * cp_group.size(), len(layers), config.moe_router_topk, dtype=torch.int32)
        for layer, (chosen,) in log.by_layer.items():
            whole[places, layers.index(layer)] = chosen.nonzero()[:, 1].view(len(places), -1).int()
        # Each token and layer lies on one rank.
        for group in (*([groups.tp] if config.sequence_parallel else []), cp_group, groups.pp):
            whole = all_reduce_sum(whole.to(group_device(group)), group)
        self._whole, self.row_length = whole.cpu().short(), len(whole) // shape[0]

    def keep(self, number: int, start: int, num_tokens: int) -> None:
        """The sample's routes are what the last forward chose, at num_tokens - 1 positions from `start`."""
        self.samples[number] = self._whole[start : start + num_tokens - 1].transpose(0, 1).contiguous()


class GivenRoutes:
    """Stands at a router's router_replay. A token without a route keeps the router's own choice.

    It holds the routes of the forward that is under way, and once more where backward recomputes that forward. A recomputation has
    no name of its own, so its routes wait first-in-first-out. That is right for one router: each model chunk has its backwards in
    the order of its forwards, under every schedule of Megatron, and a router meets each recomputation once. A queue that routers or
    chunks share is not: interleaved stages mix the micro-batches of their chunks.
    """

    def __init__(self) -> None:
        self._routes: Tensor | None = None
        self._is_open = self._has_gradient = False
        self._waiting: deque[Tensor | None] = deque()

    def open(self, routes: Tensor | None) -> None:  # [tokens, topk]
        self._routes, self._is_open, self._has_gradient = routes, True, torch.is_grad_enabled()

    def close(self) -> None:
        self._routes, self._is_open = None, False

    def forget(self) -> None:
        self._waiting.clear()

    def _take(self) -> Tensor | None:
        """Each call of the router takes once."""
        if not self._is_open:  # a recomputation
            return self._waiting.popleft() if self._waiting else None
        # Checkpointed layers run without gradients at first, and are recomputed.
        if self._has_gradient and not torch.is_grad_enabled():
            self._waiting.append(self._routes)
        return self._routes

    def get_replay_topk(
        self,
        scores: Tensor,  # [tokens, num_moe_experts]
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:  # scores and ids, [tokens, topk]
        assert default_compute_topk is not None  # Megatron-Core's own choice
        values, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        given = self._take()
        if given is None:
            return values, own
        ids = torch.where(given < 0, own, given.long())
        return scores.gather(1, ids), ids


@contextmanager
def replayed(model: nn.Module, config: TransformerConfig, batch: ForwardInput, tp_group: Group) -> Iterator[None]:
    """Around a forward: its routers use the micro-batch's routes, if it has some, also where backward recomputes it.

    Raises ConfigError for replay_problems, and DataError for routes of another model.
    """
    routes = batch.routes
    routers = routers_of(model)
    if routes is not None and not any(isinstance(vars(router).get("router_replay"), GivenRoutes) for router in routers):
        problems = list(replay_problems(config))
        if problems:
            raise ConfigError(problems)
        for router in routers:
            vars(router)["router_replay"] = GivenRoutes()
    shape = (batch.tokens.shape[0], batch.tokens.shape[1])
    by_layer = {} if routes is None else routes_by_layer(routes, shape, config, tp_group)
    replays = [(router, replay) for router in routers if isinstance(replay := vars(router).get("router_replay"), GivenRoutes)]
    for router, replay in replays:
        replay.open(by_layer.get(int(router.layer_number)))
    try:
        yield
    finally:
        for _, replay in replays:
            replay.close()


def forget_recomputations(model: nn.Module) -> None:
    """Before a step: drops what a step that raised has left."""
    for router in routers_of(model):
        replay = vars(router).get("router_replay")
        if isinstance(replay, GivenRoutes):
            replay.forget()


def replay_problems(config: TransformerConfig) -> Iterator[str]:
    """Why routes cannot be replayed in this model, with the installed Megatron-Core."""
    if config.num_moe_experts is None:
        yield "routes are given, and the model has no experts: num_moe_experts is not set; leave the routes out"
        return
    remedy = "remove it, or choose --router-replay none"
    if getattr(config, "moe_router_fusion", False):
        yield f"router replay with moe_router_fusion: the fused kernel chooses by itself and takes no routes; {remedy}"
    if config.moe_router_enable_expert_bias and config.moe_router_bias_update_rate:
        yield (
            "router replay with moe_router_enable_expert_bias: the bias would follow the load of the replayed "
            f"experts, which the router did not choose; set moe_router_bias_update_rate=0, or {remedy}"
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
