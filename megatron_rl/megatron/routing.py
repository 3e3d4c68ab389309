"""Gives the routers of a model their routes, records which experts they choose, and compares the two.

Three forms. A sample's routes are [num_moe_layers, tokens - 1, topk]: its last token predicts nothing and has none. Those of a
micro-batch lie as its tokens do, [T, num_moe_layers, topk] int16, -1 where a token has none. A router takes its tokens in its own
order, [S, B] flattened, and under sequence parallelism this tensor-parallel rank's part of S.

A replayed router uses the experts of its routes with the weights of the current router, which so have their gradient.
Megatron-Core 0.16 asks the object at TopKRouter.router_replay for the experts of its scores. Here each router has one of its own,
and each forward gives it the routes of its micro-batch and layer. So no order of forwards can mix them up.
"""

from __future__ import annotations

import inspect
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from megatron_rl.errors import ConfigError, DataError
from megatron_rl.layout.groups import Group, ParallelGroups, all_reduce_sum, group_device
from megatron_rl.megatron.batch import ForwardInput, PolicyBatch
from megatron_rl.megatron.model import find_gpt_model, model_config_of
from megatron_rl.megatron.samples import RouteShape, expert_layers

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe.router import TopKRouter

T = TypeVar("T")
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


def as_map(routes: Tensor, num_experts: int) -> Tensor:
    """[tokens, topk] ids -> [tokens, num_experts] bool; all False where a token has none."""
    ids = routes.long()
    chosen = torch.zeros(ids.shape[0], num_experts, dtype=torch.bool, device=ids.device)
    return chosen.scatter(1, ids.clamp(min=0), ids >= 0)


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


class OfForward(Generic[T]):
    """A router's value for the forward that is under way, and once more where backward recomputes that forward.

    A recomputation has no name of its own, so its values wait first-in-first-out. That is right for one router: each model chunk
    has its backwards in the order of its forwards, under every schedule of Megatron, and a router meets each recomputation once. A
    queue that routers or chunks share is not: interleaved stages mix the micro-batches of their chunks.
    """

    def __init__(self) -> None:
        self._value: T | None = None
        self._is_open = self._has_gradient = False
        self._waiting: deque[T | None] = deque()

    def open(self, value: T | None) -> None:
        self._value, self._is_open, self._has_gradient = value, True, torch.is_grad_enabled()

    def close(self) -> None:
        self._value, self._is_open = None, False

    def take(self) -> tuple[T | None, bool]:
        """(the value, whether this is a recomputation). Each call of the router takes once."""
        if self._is_open:
            # Checkpointed layers run without gradients at first, and are recomputed.
            if self._has_gradient and not torch.is_grad_enabled():
                self._waiting.append(self._value)
            return self._value, False
        return (self._waiting.popleft() if self._waiting else None), True

    def forget(self) -> None:
        self._waiting.clear()


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


class _Expected(NamedTuple):
    microbatch: int
    routes: Tensor | None  # [tokens, topk], -1: none
    is_padding: Tensor | None  # [tokens] bool


class _Comparison(NamedTuple):
    microbatch: int
    layer: int
    is_recomputed: bool
    counts: Tensor  # [2]: tokens that went to other experts, and compared tokens


class RouteChecker:
    """Compares the experts that routers use with those that they should use, by (micro-batch, layer), recomputation included.

    It works in your own loop too, with Megatron-Core's RouterReplay or any other way of replay. Make one for each step:

        with RouteChecker(chunks) as checker:          # this rank's model chunks
            run the schedule, whose forward_step calls
                with checker.forward(chunk, routes):   # {global number of the layer: [tokens, topk] ids, in the router's order}
                    output = chunk(...)
        checker.raise_first()                          # before the optimiser step

    The forwards of a chunk are its micro-batches 0, 1, ... A token with ids -1 is not compared. It waits for nothing on the device
    before raise_first. No communication, but in `metrics`.

    Raises ConfigError for Megatron-Core's RouterReplay (routers with a router_replay of that class, one first-in-first-out list for
    the whole process) together with interleaved stages, layers of multi-token prediction or an expert bias.
    """

    def __init__(self, chunks: Sequence[nn.Module]):
        self._config = model_config_of(chunks[0])
        self._routers = [(chunk, router) for chunk in chunks for router in decoder_routers_of(chunk)]
        problems = list(_problems_of_megatrons_replay(self._config, len(chunks), [router for _, router in self._routers]))
        if problems:
            raise ConfigError(problems)
        self._num_forwards = {id(chunk): 0 for chunk in chunks}
        self._expected: dict[nn.Module, OfForward[_Expected]] = {router: OfForward() for _, router in self._routers}
        self._comparisons: list[_Comparison] = []
        # By the global number of the layer: tokens of each expert; tokens whose router chose what was expected, compared tokens.
        self._load: dict[int, Tensor] = {}
        self._agreement: dict[int, Tensor] = {}

    def __enter__(self) -> RouteChecker:
        self._hooks = [router.register_forward_hook(self._look) for _, router in self._routers]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def forward(self, chunk: nn.Module, routes: Mapping[int, Tensor] | None, is_padding: Tensor | None = None) -> Iterator[None]:
        """Around the forward of a micro-batch. routes None: nothing is compared; is_padding [tokens] bool: not counted as load."""
        routers = [router for of, router in self._routers if of is chunk]
        missing = [] if routes is None else [n for router in routers if (n := int(router.layer_number)) not in routes]
        if missing:
            raise DataError(f"RouteChecker.forward: no routes for layers {missing}, which have experts: give them, or routes=None")
        for router in routers:
            given = None if routes is None else routes[int(router.layer_number)]
            self._expected[router].open(_Expected(self._num_forwards[id(chunk)], given, is_padding))
        self._num_forwards[id(chunk)] += 1
        try:
            yield
        finally:
            for router in routers:
                self._expected[router].close()

    def forward_of(self, chunk: nn.Module, batch: PolicyBatch, tp_group: Group) -> AbstractContextManager[None]:
        """`forward` for a micro-batch of this package, which may have routes."""
        if not self._routers:
            return nullcontext()
        shape = (batch.tokens.shape[0], batch.tokens.shape[1])
        routes = None if batch.routes is None else routes_by_layer(batch.routes, shape, self._config, tp_group)
        return self.forward(chunk, routes, in_router_order(batch.is_padding, self._config, tp_group))

    def raise_first(self) -> None:
        """Raises DataError for the first (micro-batch, layer) whose routers used other experts. Waits for the device once."""
        found = self._comparisons
        counts = torch.stack([comparison.counts for comparison in found]).tolist() if found else []
        for (microbatch, layer, is_recomputed, _), (count, num_tokens) in zip(found, counts, strict=True):
            if count:
                where = " where backward recomputes it" if is_recomputed else ""
                raise DataError(
                    f"micro-batch {microbatch}, layer {layer}{where}: {count} of {num_tokens} tokens went to other experts than "
                    "their routes say: the replay gave routes of another micro-batch, layer or order of tokens, or gave none"
                )

    def metrics(self, groups: ParallelGroups) -> dict[str, float]:
        """policy/max_vio, and policy/route_agreement where routes were given; means over the layers with experts, on all ranks.

        Communication: one all-reduce of [num_moe_layers, num_moe_experts + 2] over dp-cp and pp, and tp with sequence parallelism.
        """
        config = self._config
        shape = RouteShape.of(config)
        counts = torch.zeros(shape.num_layers, shape.num_experts + 2, dtype=torch.float64, device=group_device(groups.dp_cp))
        for row, layer in enumerate(expert_layers(config)):
            if layer in self._load:
                counts[row, :-2] = self._load[layer]
                counts[row, -2:] = self._agreement[layer]
        for group in (*([groups.tp] if config.sequence_parallel else []), groups.dp_cp, groups.pp):
            counts = all_reduce_sum(counts, group)
        load, agreeing, compared = counts[:, :-2], counts[:, -2], counts[:, -1]
        found = {"policy/max_vio": float((load.amax(1) / load.mean(1) - 1).mean())}
        return found | ({"policy/route_agreement": float((agreeing / compared).mean())} if bool(compared.all()) else {})

    def _look(self, router: nn.Module, inputs: object, output: tuple[Tensor, Tensor]) -> None:
        expected, is_recomputed = self._expected[router].take()
        if expected is None:  # a forward outside of `forward`, as in sampling
            return
        used, layer = output[1].detach().bool(), int(router.layer_number)  # type: ignore[arg-type]
        agreement = torch.zeros(2, dtype=torch.float64, device=used.device)
        if expected.routes is not None:
            has_route = expected.routes[:, 0] >= 0
            wanted = as_map(expected.routes, used.shape[1])
            counts = torch.stack([(has_route & (wanted != used).any(1)).sum(), has_route.sum()])
            self._comparisons.append(_Comparison(expected.microbatch, layer, is_recomputed, counts))
            # Under replay the router's own choice says more than what it was made to use.
            own = getattr(vars(router).get("router_replay"), "own_choice", None)
            chosen = used if own is None else as_map(own, used.shape[1])
            agreement = torch.stack([(has_route & (wanted == chosen).all(1)).sum(), counts[1]]).double()
        if not is_recomputed:
            real = used if expected.is_padding is None else used & ~expected.is_padding[:, None]
            self._load[layer] = self._load.get(layer, 0) + real.sum(0)
            self._agreement[layer] = self._agreement.get(layer, 0) + agreement


def _problems_of_megatrons_replay(config: TransformerConfig, num_chunks: int, routers: Sequence[nn.Module]) -> Iterator[str]:
    """Why Megatron-Core's own replay would give a router the routes of another forward, or count tokens that it did not choose."""
    kinds = {type(vars(router).get("router_replay")).__name__ for router in routers}
    if "RouterReplay" not in kinds:
        return
    num_stages = max(num_chunks, config.virtual_pipeline_model_parallel_size or 1)
    if num_stages > 1:
        yield (
            f"moe_enable_routing_replay with virtual_pipeline_model_parallel_size={num_stages}: Megatron-Core sets the routes of "
            "all chunks at once, and interleaved chunks run different micro-batches; use one stage a rank, or give routes with the "
            "samples (PolicySample.routes), which are found by micro-batch and layer"
        )
    if config.mtp_num_layers:
        yield (
            f"moe_enable_routing_replay with mtp_num_layers={config.mtp_num_layers}: the layers of multi-token prediction take "
            "routes from the same list, and samplers have none for them; remove --mtp-num-layers"
        )
    if config.moe_router_enable_expert_bias and config.moe_router_bias_update_rate:
        yield (
            "moe_enable_routing_replay with moe_router_enable_expert_bias: the bias would follow the replayed load, not the "
            "router's own; set moe_router_bias_update_rate=0, or remove one of them"
        )
