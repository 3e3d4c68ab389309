"""The selftest's whole steps: a tiny GPT through the installed Megatron's schedule, DDP and optimiser."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import cycle, islice
from types import SimpleNamespace
from typing import TypeVar

import torch
import torch.distributed as dist

from megatron_rl.config import PolicyLossConfig
from megatron_rl.errors import ConfigError
from megatron_rl.layout.groups import Group, process_group
from megatron_rl.megatron.context_groups import own_group_problems_of, packed_params_name_groups
from megatron_rl.megatron.cpu import import_megatron
from megatron_rl.megatron.installed import expert_replicas_drift
from megatron_rl.megatron.multi_token import multi_token_problems
from megatron_rl.megatron.probe import megatron_version, probe_schedule, reduces_experts_apart
from megatron_rl.megatron.ranks import initialize_ranks
from megatron_rl.testing.comparison import compare, compare_part
from megatron_rl.testing.layout_step import Layout, LayoutModel, StepSample, TinyGPT, row_length, tiny_like
from megatron_rl.testing.model_shapes import ModelShape, parameter_kind
from megatron_rl.testing.reference import (
    SHAPES,
    double_model,
    global_parameters,
    model_logits,
    mtp_loss_by_hand,
    ragged_samples,
)
from megatron_rl.testing.selftest_bench import Bench, Measured, complete_layout
from megatron_rl.testing.selftest_router_losses import (
    RouterLossModel,
    RouterTruth,
    compare_router_loss,
    exact_router_losses,
    model_of_router_losses,
    truth_of_router_losses,
)
from megatron_rl.testing.selftest_terms import Case, Truths, truth_of_terms
from megatron_rl.validation.experts import drift_problem

WITHOUT_TRANSFORMER_ENGINE = "Transformer Engine's layers: the model is built of Megatron's own, in float32"
OF_ROUTERS = "auxiliary losses of routers: their rows run without --model-like"
Made = TypeVar("Made")


class WholeSteps(Bench):
    """data and num_microbatches of the layout that is asked for follow from the rest. It replaces parallel_state, and initialises
    torch.distributed from the environment where needed. Raises ConfigError for a layout that does not fit these ranks."""

    def __init__(self, asked: Layout, world_size: int, *, has_experts: bool = False, shape: ModelShape | None = None):
        has_experts = has_experts or shape is not None
        self.layout = complete_layout(asked, world_size, has_experts=has_experts)
        check_megatron()
        self.megatron_version = megatron_version()
        self.shape = shape
        self.tiny = model_for(self.layout, has_experts=has_experts) if shape is None else self._model_like(shape)
        self.samples = ragged_samples(num_samples=max(len(SHAPES), self.layout.data * self.layout.num_microbatches))
        self.device = _set_layout(Layout())  # where the truths are computed
        if has_experts and expert_replicas_drift():
            if problem := drift_problem(self.layout.model_parallel | self.tiny.expert_options):
                raise ConfigError(problem)
        self.everyone = dist.new_group(backend="gloo") if world_size > 1 else None
        self.router_losses, left_out = exact_router_losses(self.layout) if has_experts and shape is None else ((), ())
        if shape is not None:
            left_out = (*(f"multi-token prediction: {problem}" for problem in mtp_problems(shape)), OF_ROUTERS)
        without_groups = [] if packed_params_name_groups() else ["this Megatron-Core's PackedSeqParams has no cp_group"]
        without_groups += own_group_problems_of(self.tiny.expert_options)
        has_groups = self.layout.data * self.layout.context > 1
        of_groups = (f"own cp groups: {problem}" for problem in without_groups if has_groups)
        self.left_out = (WITHOUT_TRANSFORMER_ENGINE, *of_groups, *left_out)
        self.has_own_groups = has_groups and not without_groups
        self.cuts = {}
        self._models: dict[tuple[bool, bool], LayoutModel] = {}
        self._router_models: dict[bool, RouterLossModel] = {}

    def _model_like(self, shape: ModelShape) -> TinyGPT:
        from megatron.core.transformer import MLATransformerConfig

        layout = self.layout
        known = {field.name for field in fields(MLATransformerConfig)}
        problems = shape.problems(
            tensor=layout.tensor, expert_tensor=layout.expert_tensor or 1, known=known, release=self.megatron_version
        )
        if problems:
            raise ConfigError(problems)
        tiny = tiny_like(replace(shape, has_mtp=False) if mtp_problems(shape) else shape, layout)
        self.model = f"{tiny.num_layers} layers like {shape.name} ({shape.source}): {shape.contains}"
        return tiny

    def prepare(self, cases: Sequence[Case]) -> None:
        """Communication: the truths, from rank 0. Then the ranks have the layout that was asked for."""
        self.truths: Truths = _from_rank_0(lambda: truths_of(self.samples, self.tiny, cases), self.everyone)
        if self.router_losses:
            make = partial(truth_of_router_losses, self.samples, model_of_router_losses(self.tiny), self.layout)
            self.of_routers: RouterTruth = _from_rank_0(make, self.everyone)
            self.cuts = self.of_routers.cuts
        _set_layout(self.layout)
        self.probes = ("dense", "experts") if reduces_experts_apart() else ("dense",)

    def probe(self, gradients: str) -> Measured:
        found = probe_schedule()
        ratio = found.ratio if gradients == "dense" else found.expert_ratio
        assert ratio is not None, "it has a ratio where experts are reduced apart"
        return ratio

    def loss(self, case: Case) -> Measured:
        model, of_loss = self._model(case.is_per_token, case.has_own_groups), self.truths[case.policy_loss, case.term]
        found, truth = model.step(case.config, of_loss.samples), of_loss.by_aggregation[case.aggregation]
        kinds = [] if self.shape is None else list(dict.fromkeys(map(parameter_kind, truth.gradient)))
        parts = {kind: compare_part(found, truth, model.groups, partial(_is_of_kind, kind)) for kind in kinds}
        return {"": compare(found, truth, model.groups), **parts}

    def router_loss(self, name: str, *, is_per_token: bool) -> Measured:
        if is_per_token not in self._router_models:
            model = RouterLossModel(*self._built(is_per_token, False), model_of_router_losses(self.tiny))
            self._router_models[is_per_token] = model
        return compare_router_loss(self._router_models[is_per_token], name, self.of_routers)

    def _model(self, is_per_token: bool, has_own_groups: bool) -> LayoutModel:
        """Under one contract, built for its first row."""
        key = is_per_token, has_own_groups
        if key not in self._models:
            self._models[key] = LayoutModel(*self._built(*key), self.tiny)
            self._models[key].announces_factor = False  # a row says how large a wrong factor is
        return self._models[key]

    def _built(self, is_per_token: bool, has_own_groups: bool) -> tuple[Layout, int]:
        layout = with_own_groups(self.layout) if has_own_groups else self.layout
        return replace(layout, calculate_per_token_loss=is_per_token), row_length(self.samples, layout)


def mtp_problems(shape: ModelShape) -> list[str]:
    """Why its layer of multi-token prediction is left out here."""
    return [*multi_token_problems(PolicyLossConfig(), SimpleNamespace(**shape.mtp_options))] if shape.has_mtp else []


def _is_of_kind(kind: str, name: str) -> bool:
    return parameter_kind(name) == kind


def with_own_groups(layout: Layout) -> Layout:
    """Its micro-batches over all ranks of dp x cp, then over fewer, down to one."""
    ranks = layout.data * layout.context
    sizes = [size for size in range(ranks, 0, -1) if ranks % size == 0]
    return replace(layout, context_sizes=tuple(islice(cycle(sizes), layout.num_microbatches)))


def truths_of(samples: list[StepSample], tiny: TinyGPT, cases: Sequence[Case]) -> Truths:
    model = double_model(tiny, samples)
    logits, rows = model_logits(model, samples, tiny), (case.of_truth for case in cases)
    return truth_of_terms(samples, logits, global_parameters(model), rows, mtp_loss_by_hand(model, samples, tiny))


def check_megatron() -> None:
    """Raises ConfigError where the installed Megatron-Core cannot be imported: another package of its name may raise anything."""
    try:
        import_megatron()
    except Exception as error:
        raise ConfigError(
            f"the installed Megatron-Core cannot be imported ({type(error).__name__}: {error}): megatron-rl doctor says why"
        ) from error


def model_for(layout: Layout, *, has_experts: bool = False) -> TinyGPT:
    """Heads for each tensor rank, a layer for each stage, padded columns on the last shard, two experts a rank or more."""
    experts = {
        "num_moe_experts": max(4, 2 * layout.expert),  # with two a token has no choice, and losses that balance are constant
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 8 * (layout.expert_tensor or 1),
        "moe_layer_freq": (0, 1) * layout.pipeline,  # of the two layers of a stage the second has experts
    }
    heads = layout.tensor * -(-4 // layout.tensor)
    return TinyGPT(
        num_layers=2 * layout.pipeline if has_experts else layout.pipeline,
        hidden_size=8 * heads,
        num_attention_heads=heads,
        vocab_size=layout.tensor * -(-64 // layout.tensor),
        use_transformer_engine=False,
        experts=tuple(experts.items()) if has_experts else (),
    )


def _set_layout(layout: Layout) -> torch.device:
    parallel_state = sys.modules.get("megatron.core.parallel_state")
    if parallel_state is not None and parallel_state.model_parallel_is_initialized():
        groups = getattr(parallel_state, "_global_process_group_list", None) or []
        parallel_state.destroy_model_parallel()
        for group in groups:  # else each lives on, with its threads or its buffers on the device
            with contextlib.suppress(ValueError):  # Megatron has destroyed some
                if group is not None:  # the whole world, which stays
                    dist.destroy_process_group(group)
    return initialize_ranks(**layout.model_parallel)


def _from_rank_0(make: Callable[[], Made], everyone: Group | None) -> Made:
    if everyone is None:
        return make()
    box: list = [make() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box, src=0, group=process_group(everyone))
    return box[0]
