"""Tests the losses on the ranks and devices that are there: one tiny step for each loss, aggregation, head and backend.

Each row is a step through the installed Megatron's schedule, DDP and optimiser, compared with a float64 reference that one process
computed before the layout was set up. No factor is undone by hand, and a row that did not run does not pass.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from megatron_rl.errors import ConfigError
from megatron_rl.megatron.cpu import import_megatron
from megatron_rl.megatron.installed import expert_replicas_drift
from megatron_rl.megatron.probe import megatron_version, probe_schedule, reduces_experts_apart
from megatron_rl.megatron.ranks import initialize_ranks
from megatron_rl.testing.comparison import compare
from megatron_rl.testing.layout_step import Layout, LayoutModel, StepSample, TinyGPT, row_length
from megatron_rl.testing.reference import (
    SHAPES,
    double_model,
    global_parameters,
    model_logits,
    ragged_samples,
)
from megatron_rl.testing.selftest_router_losses import (
    RouterLossModel,
    missing_router_losses,
    model_of_router_losses,
    router_losses_of,
    truth_of_router_losses,
)
from megatron_rl.testing.selftest_router_losses import measured as measured_router_loss
from megatron_rl.testing.selftest_rows import (
    Case,
    Choice,
    SelftestRow,
    Setting,
    cases_here,
    complete_layout,
    guarded,
    named_sizes,
    per_token_cases,
    refuse_tf32,
    row_of,
)
from megatron_rl.testing.selftest_terms import Truths, truth_of_terms
from megatron_rl.validation.experts import drift_problem

WITHOUT_TRANSFORMER_ENGINE = "Transformer Engine's layers: the model is built of Megatron's own, in float32"


def run_selftest(
    asked: Layout,
    world_size: int,
    on_start: Callable[[Setting], None] = lambda setting: None,
    *,
    has_experts: bool = False,
    interprets_triton: bool = False,
    choice: Choice = Choice(),  # noqa: B008  # frozen
    on_row: Callable[[str], None] = lambda name: None,
) -> Iterator[SelftestRow]:
    """Each rank calls it and gets the same rows, one after another. data and num_microbatches of `asked` follow from the rest.
    on_row gets the name of each row before it runs. The rows of the probe run whatever is chosen.

    It replaces parallel_state, and initialises torch.distributed from the environment where needed. Raises ConfigError for a layout
    that does not fit these ranks.
    """
    layout = complete_layout(asked, world_size, has_experts=has_experts)
    check_megatron()
    tiny = model_for(layout, has_experts=has_experts)
    samples = ragged_samples(num_samples=max(len(SHAPES), layout.data * layout.num_microbatches))
    device = _set_layout(Layout())
    refuse_tf32(device)
    if has_experts and expert_replicas_drift() and (problem := drift_problem(layout.model_parallel | tiny.expert_options)):
        raise ConfigError(problem)
    everyone = dist.new_group(backend="gloo") if world_size > 1 else None
    cases, without_triton = cases_here(device, interprets=interprets_triton)
    cases, per_token = choice.of(cases), choice.of(per_token_cases())
    truth = _from_rank_0(lambda: truths_of(samples, tiny, [*cases, *per_token]), everyone)
    with_losses, of_routers = model_of_router_losses(tiny), None
    without_router_losses = missing_router_losses(layout) if has_experts else []
    if has_experts and router_losses_of(layout):
        of_routers = _from_rank_0(lambda: truth_of_router_losses(samples, with_losses, layout), everyone)
    router_titles = [] if of_routers is None else [_router_title(name) for name in of_routers.by_loss]
    choice.check([*cases, *per_token, *filter(choice.has, router_titles)])
    _set_layout(layout)
    sizes = named_sizes(layout, samples)
    left_out = (*without_triton, WITHOUT_TRANSFORMER_ENGINE, *without_router_losses)
    cuts = {} if of_routers is None else of_routers.cuts
    on_start(Setting(layout, device.type, dist.get_backend(), megatron_version(), sizes, left_out, cuts))
    guard = partial(guarded, on_row=on_row)
    yield guard("schedule probe", everyone, lambda name: SelftestRow(name, True, probe_schedule().ratio))
    if reduces_experts_apart():
        yield guard("schedule probe, experts", everyone, lambda name: SelftestRow(name, True, probe_schedule().expert_ratio))
    for is_per_token, chosen in ((False, cases), (True, per_token)):
        model = LayoutModel(replace(layout, calculate_per_token_loss=is_per_token), row_length(samples, layout), tiny)
        model.announces_factor = False  # a row says how large a wrong factor is
        for case in chosen:
            yield guard(str(case), everyone, partial(measured, case=case, model=model, truth=truth, sizes=sizes))
        if of_routers is None:
            continue
        of_losses = RouterLossModel(
            replace(layout, calculate_per_token_loss=is_per_token), row_length(samples, layout), with_losses
        )
        for name in of_routers.by_loss:
            make = partial(measured_router_loss, name=name, model=of_losses, truth=of_routers, sizes=sizes)
            if choice.has(title := _router_title(name, is_per_token=is_per_token)):
                yield guard(title, everyone, make)


def _router_title(name: str, *, is_per_token: bool = False) -> str:
    return f"{name} of routers, exact{', per-token' if is_per_token else ''}"


def measured(name: str, case: Case, model: LayoutModel, truth: Truths, sizes: dict[str, int]) -> SelftestRow:
    of_loss = truth[case.policy_loss, case.term]
    found = model.step(case.config, of_loss.samples)
    return row_of(name, compare(found, of_loss.by_aggregation[case.aggregation], model.groups), sizes)


def truths_of(samples: list[StepSample], tiny: TinyGPT, cases: Sequence[Case]) -> Truths:
    model = double_model(tiny, samples)
    return truth_of_terms(samples, model_logits(model, samples, tiny), global_parameters(model), (case.of_truth for case in cases))


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


def _from_rank_0(make: Callable[[], object], everyone):
    if everyone is None:
        return make()
    box = [make() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box, src=0, group=everyone)
    return box[0]
