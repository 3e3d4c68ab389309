"""Context parallelism that changes inside a step: what the layers, the checks and the schedule get from a micro-batch's own group.

test_layouts.py has the gradients, on layouts with `context_sizes`; the selftest has rows of it.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from helpers import error_of, pool_of

from megatron_rl.config import PolicyLossConfig
from megatron_rl.layout.groups import resolve_groups
from megatron_rl.megatron import probe
from megatron_rl.megatron.batch import StepContext, make_packed_batch, make_padded_batch, weigh_samples
from megatron_rl.megatron.context_groups import hybrid_data, make_context_groups
from megatron_rl.megatron.head import packed_params_of
from megatron_rl.megatron.model import build_gpt_model, transformer_config
from megatron_rl.megatron.responses import response_log_probs
from megatron_rl.megatron.schedule import scale_for_schedule
from megatron_rl.testing import layout_step
from megatron_rl.testing.invariance import Layout, StepSample, TinyGPT, merged, step_on_layout
from megatron_rl.testing.layout_step import LayoutModel, RankStep
from megatron_rl.testing.reference import ragged_samples

pytestmark = pytest.mark.megatron
CPU = torch.device("cpu")
CONFIG = PolicyLossConfig(policy_loss="gspo", loss_aggregation="prompt_mean", clip_ratio_low=0.1, clip_ratio_high=0.2)
# Float32 sums in another order; test_layouts.py says why a layout may double 6e-7.
TOLERANCE = 1e-5
pool = pool_of(4)


# Groups


def groups_on_rank(rank: int) -> tuple[dict[int, tuple[int, list[int]]], str]:
    made = make_context_groups([1, 2, 4])
    members = {size: (group.rank(), torch.distributed.get_process_group_ranks(group)) for size, group in made.items()}
    return members, error_of(lambda: make_context_groups([3]))


def test_groups_are_of_neighbours_in_dp_cp(pool):
    for rank, (members, error) in enumerate(pool.run(groups_on_rank, world_size=4, context_parallel_size=2)):
        first = rank // 2 * 2
        assert members == {1: (0, [rank]), 2: (rank % 2, [first, first + 1]), 4: (rank, [0, 1, 2, 3])}
        assert error == "ConfigError: context-parallel sizes [3] do not divide the 4 ranks of dp x cp: choose of 1, 2, 4"


# Layers


def tiny(**options: object) -> TinyGPT:
    without_balancing = {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0}
    return TinyGPT(num_layers=2, experts=tuple((without_balancing | options).items()))


RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
OWN = Layout(data=2, num_microbatches=2, context_sizes=(2, 1), packed=True)


def test_layers_have_the_group_of_their_microbatch_where_backward_recomputes(pool):
    """Backward recomputes the first micro-batch at once here; under a pipeline another one has been forwarded meanwhile."""
    for layout in (OWN, Layout(pipeline=2, data=2, num_microbatches=4, context_sizes=(1, 2, 2, 1), packed=True)):
        model = tiny(**RECOMPUTED)
        alone, found = (step_on_layout(pool, where, ragged_samples(), CONFIG, model) for where in (Layout(), layout))
        assert found.gradient_error(alone) < TOLERANCE, layout


def sticky_on_rank(rank: int) -> list[tuple[str, int | None, bool]]:
    """(format, local_cp_size, whether the group is the model's) of what the forwards of one model are given."""
    model = LayoutModel(Layout(context=2), 8, TinyGPT(num_layers=1)).models[0]
    own, made = resolve_groups(model).cp, make_context_groups([1, 2])
    samples, totals = weigh_samples(CONFIG, ragged_samples()[:1], resolve_groups())
    context = StepContext(totals=totals, num_microbatches=1)

    def given(cp_group, is_packed: bool) -> tuple[str, int | None, bool]:
        shape = {"row_length": 64, "cp_group": cp_group, "device": CPU}
        batch = (
            make_packed_batch(samples, context, **shape) if is_packed else make_padded_batch(samples, context, num_rows=2, **shape)
        )
        params = packed_params_of(model, model.config, batch)
        return ("none", None, False) if params is None else (params.qkv_format, params.local_cp_size, params.cp_group is own)

    calls = [(own, False), (made[2], True), (made[1], True), (made[1], False), (own, True), (own, False)]
    return [given(*call) for call in calls]


def test_a_model_that_met_another_group_names_each_group_from_then_on(pool):
    """Transformer Engine's layers keep the last group that they were given."""
    before = [("none", None, False), ("thd", None, False)]
    after = [("thd", 1, False), ("sbhd", 1, False), ("thd", 2, True), ("sbhd", 2, True)]
    assert pool.run(sticky_on_rank, world_size=2, context_parallel_size=2) == [before + after] * 2


# The setting that takes only one group -> what is said of it.
ONE_GROUP = {
    "multi_latent_attention": (True, "multi_latent_attention=True: its layers"),
    "cuda_graph_impl": ("local", "cuda_graph_impl='local': its layers take only one group"),
    "hierarchical_context_parallel_sizes": ([1, 2], "hierarchical_context_parallel_sizes=[1, 2]: its layers"),
    "": (None, "DotProductAttention does not read the group in packed_seq_params"),
}


def refused_on_rank(rank: int) -> list[str]:
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    errors, batch = [], SimpleNamespace(cp_group=make_context_groups([1])[1], packed_seq_params=None)
    for name, (value, _) in ONE_GROUP.items():
        config = transformer_config(num_layers=1, hidden_size=8, num_attention_heads=2)
        model = build_gpt_model(config, vocab_size=16, max_sequence_length=8)
        if name:
            setattr(config, name, value)
        else:
            model.decoder.layers[0].self_attention.core_attention.__class__ = DotProductAttention
        errors.append(error_of(lambda model=model, config=config: packed_params_of(model, config, batch)))
    return errors


def test_what_cannot_take_a_group_of_its_own_is_refused_by_name(pool):
    for errors in pool.run(refused_on_rank, world_size=2, context_parallel_size=2):
        for error, (_, message) in zip(errors, ONE_GROUP.values(), strict=True):
            assert "a micro-batch over 1 context-parallel ranks, in a model with 2: " in error and message in error


def log_probs_on_rank(rank: int, layout: Layout) -> dict[int, list[float]]:
    """Of the responses of this rank's samples, by their numbers."""
    model, groups, samples = LayoutModel(layout, 64, TinyGPT(num_layers=1)).models[0], resolve_groups(), ragged_samples()
    batches = layout_step.make_step_batches(CONFIG, layout, samples, groups, make_context_groups(layout.context_sizes))
    chosen = [layout_step.samples_of(layout, groups, index, 16) for index in range(layout.num_microbatches)]
    lengths = [[(len(samples[n].tokens), len(samples[n].loss_mask)) for n in part] for part in chosen]
    found = response_log_probs(model, batches, lengths, temperature=1.0, vocab_size=61, backend="torch", groups=groups)
    return {n: values.tolist() for part, rows in zip(chosen, found, strict=True) for n, values in zip(part, rows, strict=True)}


def test_log_probs_of_responses_are_whole_over_each_group(pool):
    """Old log-probabilities on the layout of the step: a sum over the model's group would add other samples."""
    for layout in (replace(OWN, packed=False), OWN):
        [alone] = pool.run(log_probs_on_rank, replace(layout, data=1, context_sizes=()), world_size=1)
        for found in pool.run(log_probs_on_rank, layout, world_size=2):
            assert len(found) == 12  # the 8 of the first micro-batch, and half of the second's
            for number, values in found.items():
                assert values == pytest.approx(alone[number], abs=2e-5)  # of float32 logits, summed in another order


# Experts

EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 16,
    "moe_layer_freq": (0, 1),
}


def test_experts_and_the_exact_z_loss_take_groups_of_their_own(pool):
    """The z-loss is a sum over tokens, whatever group they lie in. Its coefficient makes it half of the gradient."""
    layout, options = Layout(data=2, expert=2, num_microbatches=2, context_sizes=(2, 1)), {**EXPERTS, "moe_z_loss_coeff": 0.1}
    config = replace(CONFIG, router_aux_loss="exact")
    alone, found, without = (
        step_on_layout(pool, where, ragged_samples(), config, tiny(**given))
        for where, given in ((Layout(), options), (layout, options), (Layout(), EXPERTS))
    )
    assert found.gradient_error(alone) < TOLERANCE and without.gradient_error(alone) > 0.1


def losses_refused_on_rank(rank: int, mode: str, options: dict) -> str:
    layout = replace(OWN, packed=False)
    model = LayoutModel(layout, 64, tiny(**EXPERTS, **options))
    return error_of(lambda: model.step(replace(CONFIG, router_aux_loss=mode), ragged_samples()))


def test_balancing_losses_of_routers_are_refused(pool):
    balancing = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
    for mode, name, options in (("exact", "aux_loss", balancing), ("host", "z_loss", {"moe_z_loss_coeff": 0.1})):
        for error in pool.run(losses_refused_on_rank, mode, options, world_size=2):
            assert f"{name} with a micro-batch over 2 context-parallel ranks, in a model with 1: its routers balance" in error


# Megatron-Core's own scheduler and schedule


class HybridModel(LayoutModel):
    """Through Megatron-Core's schedule, in rounds; each rank has its own number of micro-batches, of one sample each."""

    def run_rounds(
        self, rounds: list[list[int]], sizes: list[int], samples: list[StepSample], config: PolicyLossConfig
    ) -> RankStep:
        """rounds: the numbers of this rank's samples. sizes: of the groups of the rank's micro-batches."""
        self.rounds, numbers = rounds, [number for of_round in rounds for number in of_round]
        self.layout = replace(self.layout, num_microbatches=len(numbers), context_sizes=tuple(sizes))
        with (
            mock.patch.object(layout_step, "samples_of", lambda layout, groups, index, *_: numbers[index : index + 1]),
            mock.patch.object(layout_step, "run_schedule", self.run_in_rounds),
        ):
            return self.step(config, samples)

    def run_in_rounds(self, models, batches, seq_length, micro_batch_size, forward_step):
        from megatron.core.pipeline_parallel import get_forward_backward_func

        rest, in_order = iter(batches), iter(batches)
        rounds = [[next(rest).cp_group for _ in of_round] for of_round in self.rounds]
        return get_forward_backward_func()(
            forward_step_func=lambda _, model: forward_step(in_order, model),
            data_iterator=hybrid_data(rounds, self.groups.dp_cp),
            model=models[0],
            num_microbatches=len(batches),
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            forward_only=False,
        )


def planned_on_rank(rank: int, layout: Layout, config: PolicyLossConfig) -> tuple[RankStep, set[int], int]:
    """Rounds of Megatron-Core's scheduler: the step, the sizes of groups, the number of this rank's micro-batches."""
    from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler

    samples, dp_cp = ragged_samples(), resolve_groups().dp_cp
    scheduler = BalancedCPScheduler(max_seq_len_per_rank=16, dp_cp_group=dp_cp)
    _, plan = scheduler.get_groups_and_subsamples([(number, len(sample.tokens)) for number, sample in enumerate(samples)], None)
    rounds = [of_round[dp_cp.rank()] for of_round in plan]
    sizes = [sum(number in others for others in of_round) for of_round in plan for number in of_round[dp_cp.rank()]]
    whole = replace(layout, context_sizes=tuple(2**power for power in range(dp_cp.size().bit_length())))
    model = HybridModel(whole, 64, tiny(hybrid_context_parallel=True))
    return model.run_rounds(rounds, sizes, samples, config), {*sizes}, len(sizes)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(data=4, overlap_grad_reduce=True, calculate_per_token_loss=True),
        Layout(tensor=2, data=2, packed=True, sequence_parallel=True),  # samples reach the first rank of tp alone
    ],
    ids=str,
)
def test_a_plan_of_megatrons_scheduler_trains_the_gradient_of_one_rank(pool, layout):
    """Different groups and different numbers of micro-batches by rank, in rounds, as Megatron-Core plans them."""
    config = replace(CONFIG, loss_aggregation="token_mean") if layout.calculate_per_token_loss else CONFIG
    alone = step_on_layout(pool, Layout(), ragged_samples(), config, tiny())
    answers = pool.run(planned_on_rank, layout, config, world_size=4, **layout.model_parallel)
    assert len(set.union(*(sizes for _, sizes, _ in answers))) > 1 and len({number for _, _, number in answers}) > 1
    found = merged([step for step, _, _ in answers])
    assert found.gradient_error(alone) < TOLERANCE and found.loss == pytest.approx(alone.loss, rel=1e-5)


def probed_on_rank(rank: int, factor: float) -> list[str]:
    """Errors under both contracts, where the package's scale is off by a factor."""

    def scaled(*given, **named):
        loss, num_tokens, report = scale_for_schedule(*given, **named)
        return loss * factor, num_tokens, report

    with mock.patch.object(probe, "scale_for_schedule", scaled):
        return [
            error_of(lambda given=given: probe.probe_schedule(calculate_per_token_loss=given, hybrid_context_parallel=True))
            for given in (False, True)
        ]


def test_the_probe_runs_the_hybrid_schedule(pool):
    """With another number of micro-batches on each second rank."""
    for factor, said in ((1.0, ""), (0.5, " is 0.5 of the step's")):
        for errors in pool.run(probed_on_rank, factor, world_size=4, context_parallel_size=2):
            assert all(said in error and bool(error) == bool(said) for error in errors)
