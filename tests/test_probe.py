"""The probe: what the installed Megatron-Core does to a loss on every layout, and that a changed arithmetic is refused by name."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from helpers import error_of
from trainer_cases import tiny_trainer

from megatron_rl.aggregation import StepTotals
from megatron_rl.layout.groups import resolve_groups
from megatron_rl.megatron import probe
from megatron_rl.megatron import trainer as trainer_module
from megatron_rl.megatron.probe import probe_schedule, run_one_parameter
from megatron_rl.megatron.schedule import scale_for_schedule
from megatron_rl.testing.ranks import RankPool

pytestmark = pytest.mark.megatron

TP, PP, CP, VPP = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "virtual_pipeline_model_parallel_size",
)
# Float32 holds 24 bits, and each number below goes through at most ten operations.
TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def pool():
    with RankPool(4) as ranks:
        yield ranks


def probe_on_rank(rank, per_token=False, ddp=None):
    from megatron.core.distributed import DistributedDataParallelConfig

    ddp_config = DistributedDataParallelConfig(**ddp) if ddp else None
    return probe_schedule(calculate_per_token_loss=per_token, ddp_config=ddp_config)


# world size, layout, DDP
LAYOUTS = [
    pytest.param(1, {}, {}, id="one rank"),
    pytest.param(2, {}, {}, id="DP2: the average over ranks"),
    pytest.param(2, {CP: 2}, {}, id="CP2: a cp factor"),
    pytest.param(2, {TP: 2}, {}, id="TP2: an average over tp, where none belongs"),
    pytest.param(2, {PP: 2}, {}, id="PP2: the loss lives on one stage"),
    pytest.param(4, {TP: 2, PP: 2}, {}, id="TP2xPP2"),
    pytest.param(4, {CP: 2}, {}, id="CP2xDP2: an average over dp alone"),
    pytest.param(4, {PP: 2, VPP: 2}, {}, id="FB-53 DP2xPP2 with interleaved stages"),
    pytest.param(2, {}, {"use_distributed_optimizer": True}, id="DP2, distributed optimiser: each rank reduces a shard"),
    pytest.param(2, {}, {"overlap_grad_reduce": True}, id="DP2, overlapped reduction: one for each micro-batch"),
]


@pytest.mark.parametrize("per_token", [False, True], ids=["unit", "per-token"])
@pytest.mark.parametrize(("world_size", "layout", "ddp"), LAYOUTS)
def test_the_installed_megatron_gives_the_gradient_of_the_step_on_every_layout(pool, world_size, layout, ddp, per_token):
    """FB-03: catches a probe that refuses a sound layout, and a factor that scale_for_schedule gets wrong on one of them."""
    for result in pool.run(probe_on_rank, per_token, ddp, world_size=world_size, **layout):
        assert result.ratio == pytest.approx(1.0, abs=TOLERANCE)
        assert result.contract.startswith("per-token" if per_token else "unit")


def test_an_average_in_the_collective_counts_once(pool):
    """FB-03: DDP's 1/D may come from the collective instead of a factor; Megatron allows it without per-token loss alone."""
    for result in pool.run(probe_on_rank, False, {"average_in_collective": True}, world_size=2):
        assert result.ratio == pytest.approx(1.0, abs=TOLERANCE)


# L of each micro-batch [dp-cp rank][m] and its token count; a mean of means, a sum and a mean of sums differ for them.
VALUES = [[1.0, 4.0, 0.5], [2.0, -3.0, 8.0], [0.25, 6.0, 5.0], [7.0, 1.5, -2.0]]
COUNTS = [[1, 3, 0], [2, 5, 1], [4, 0, 2], [1, 1, 6]]


def row_on_rank(rank, length, per_token):
    groups = resolve_groups()
    me = groups.dp_cp.rank()

    def tuple_of(loss, index, config):
        assert config.calculate_per_token_loss is per_token
        num_tokens = torch.tensor(COUNTS[me][index], dtype=torch.int32)
        report = {"loss": loss.detach().clone()}
        return (loss, num_tokens, report) if length == 3 else (loss, report)

    return me, run_one_parameter(tuple_of, VALUES[me], calculate_per_token_loss=per_token)


def row_by_hand(length, per_token, dp, cp):
    """The gradient of sum over r, m of L_rm as the table of Megatron-Core 0.15 and later says it comes out."""
    ranks, num_microbatches = range(dp * cp), 3
    pairs = [(VALUES[r][m], COUNTS[r][m]) for r in ranks for m in range(num_microbatches)]
    if per_token and length == 3:
        return sum(value for value, _ in pairs) / sum(count for _, count in pairs)
    if per_token:
        return sum(value for value, _ in pairs) * cp / num_microbatches
    if length == 3:
        return sum(value / max(count, 1) for value, count in pairs) / (dp * cp * num_microbatches)
    return sum(value for value, _ in pairs) / (dp * num_microbatches)


@pytest.mark.parametrize("per_token", [False, True], ids=["per-token off", "per-token on"])
@pytest.mark.parametrize("length", [3, 2], ids=["3-tuple", "2-tuple"])
@pytest.mark.parametrize(("dp", "cp"), [(2, 1), (1, 2), (2, 2)], ids=["DP2", "CP2", "DP2xCP2"])
def test_each_row_of_the_contract_table_is_what_megatron_does(pool, dp, cp, length, per_token):
    """FB-16: catches a release that changes what a tuple means, and a probe that measures something else. Two micro-batches
    have no token: n = 0 gave NaN in 0.13 and 0.14, and would give it here."""
    expected = row_by_hand(length, per_token, dp, cp)
    answers = pool.run(row_on_rank, length, per_token, world_size=dp * cp, **{CP: cp})
    assert sorted(me for me, _ in answers) == list(range(dp * cp))
    for _, gradient in answers:
        assert gradient == pytest.approx(expected, rel=TOLERANCE)


def empty_microbatch_on_rank(rank, per_token):
    """Of three micro-batches rank 0 has one without a token, rank 1 has nothing but such."""
    groups, me = resolve_groups(), resolve_groups().dp_cp.rank()
    counts, parts = ([2, 0, 3], [1.0, 0.0, 2.5]) if me == 0 else ([0, 0, 0], [0.0, 0.0, 0.0])
    totals = StepTotals(num_samples=1, num_prompts=None, num_tokens=5)
    types = []

    def tuple_of(loss, index, config):
        result = scale_for_schedule(loss, 3, totals=totals, num_local_tokens=counts[index], config=config, groups=groups)
        types.append(result[1].dtype)
        return result

    return run_one_parameter(tuple_of, parts, calculate_per_token_loss=per_token), types


@pytest.mark.parametrize("per_token", [False, True], ids=["unit", "per-token"])
def test_micro_batches_without_a_token_leave_the_gradient_finite_and_exact(pool, per_token):
    """FB-16, FB-55: 0 / 0; and a token count that is no integer, which Megatron cannot add to its own."""
    for gradient, types in pool.run(empty_microbatch_on_rank, per_token, world_size=2):
        assert gradient == pytest.approx(3.5, rel=TOLERANCE)
        assert types == [torch.int32] * 3


def probe_changed_schedule(rank, change):
    """The probe under a Megatron whose loss arithmetic is another one."""
    import megatron.core.pipeline_parallel.schedules as schedules

    original = schedules.forward_step_calc_loss
    cp_size = resolve_groups().cp.size()

    def changed(model, output, loss_func, config, vp_stage, collect, num_microbatches, store, *others):
        output, num_tokens = original(model, output, loss_func, config, vp_stage, collect, num_microbatches, store, *others)
        factors = {
            "as 0.12": cp_size,
            "not times cp": 1 / cp_size,
            "divided twice": 1 / num_microbatches,
            "never divided": num_microbatches,
            "by a third more": 4 / 3,
            "by one in two thousand": 1 + 1 / 2000,
        }
        return output * factors[change], num_tokens

    schedules.forward_step_calc_loss = changed
    try:
        return error_of(probe_schedule)
    finally:
        schedules.forward_step_calc_loss = original


CHANGES = [
    pytest.param("as 0.12", {CP: 2}, "is 2 of the step's, which is cp or dp x cp;", id="FB-16 times cp, as 0.12"),
    pytest.param("not times cp", {CP: 2}, "is 0.5 of the step's, which is 1/(cp) or 1/(dp x cp);", id="over cp"),
    pytest.param("divided twice", {}, "is 0.333333 of the step's, which is 1/(micro-batches);", id="divided by M twice"),
    pytest.param("never divided", {}, "is 3 of the step's, which is micro-batches;", id="never divided by M"),
    pytest.param("by a third more", {}, "is 1.33333 of the step's; see docs/parallelism.md", id="a factor without a name"),
    pytest.param("by one in two thousand", {}, "is 1.0005 of the step's;", id="a small factor"),
]


@pytest.mark.parametrize(("change", "layout", "message"), CHANGES)
def test_a_schedule_of_another_arithmetic_is_refused_on_every_rank_and_the_factor_named(pool, change, layout, message):
    """FB-16: a version number is no evidence. A rank that did not refuse would wait for the others."""
    for error in pool.run(probe_changed_schedule, change, world_size=2, **layout):
        assert error.startswith("ConfigError: Megatron-Core ")
        assert message in error


def probe_without_counts(rank, per_token):
    """finalize_model_grads that takes each micro-batch for one token, whatever loss_func returned."""
    from megatron.core import distributed

    def finalize(model, num_tokens=None, *args, **kwargs):
        one_each = None if num_tokens is None else torch.full_like(num_tokens, 3)  # micro-batches of the probe
        return original(model, one_each, *args, **kwargs)

    original = distributed.finalize_model_grads
    with mock.patch.object(distributed, "finalize_model_grads", finalize):
        return error_of(lambda: probe_schedule(calculate_per_token_loss=per_token))


def test_a_count_of_tokens_that_is_not_honoured_is_refused(pool):
    """The probe's micro-batches hold 0, 2 and 4 tokens: one each on average, and such a Megatron would pass."""
    for error in pool.run(probe_without_counts, True, world_size=2):
        assert "the gradient of per-token: (loss x T, tokens) is 2 of the step's" in error
    assert pool.run(probe_without_counts, False, world_size=2) == ["", ""], "the unit contract needs no count"


def probe_with_one_setting_broken(rank):
    """[refusal without the setting, refusal with it] under a DDP that reduces nothing where the collective averages."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    def finish(ddp, *args, **kwargs):
        return None if ddp.ddp_config.average_in_collective else original(ddp, *args, **kwargs)

    original = DistributedDataParallel.finish_grad_sync
    with mock.patch.object(DistributedDataParallel, "finish_grad_sync", finish):
        settings = [DistributedDataParallelConfig(average_in_collective=is_on) for is_on in (False, True)]
        return [error_of(lambda ddp_config=ddp_config: probe_schedule(ddp_config=ddp_config)) for ddp_config in settings]


def test_the_probe_measures_the_ddp_settings_that_it_is_given(pool):
    """Catches a probe of DDP's defaults: a fault of the run's own settings would train."""
    for without, with_setting in pool.run(probe_with_one_setting_broken, world_size=2):
        assert without == "" and with_setting.startswith("ConfigError: Megatron-Core ")


def settings_probed_by_a_trainer(rank):
    with mock.patch.object(trainer_module, "probe_schedule", wraps=probe_schedule) as probed:
        trainer = tiny_trainer(use_distributed_optimizer=True)
    (call,) = probed.call_args_list
    return call.kwargs["ddp_config"] is trainer.model.ddp_config, trainer.model.ddp_config.use_distributed_optimizer


def test_a_trainer_has_its_own_ddp_settings_probed(pool):
    assert pool.run(settings_probed_by_a_trainer, world_size=1) == [(True, True)]


def probe_without_a_reduction(rank):
    """DDP that forgets its average: what a rank would train on its own data alone."""
    from megatron.core.distributed import DistributedDataParallel

    original = DistributedDataParallel.finish_grad_sync
    DistributedDataParallel.finish_grad_sync = lambda self, *args, **kwargs: None
    try:
        return error_of(probe_schedule)
    finally:
        DistributedDataParallel.finish_grad_sync = original


def test_gradients_that_are_not_reduced_over_ranks_are_refused(pool):
    """Catches a wrapper that averages nothing: losses look right on each rank, and the ranks drift apart."""
    assert all("ConfigError" in error for error in pool.run(probe_without_a_reduction, world_size=2))


def side_effects_on_rank(rank):
    states = torch.get_rng_state(), torch.is_grad_enabled()
    probe_schedule()
    return bool((torch.get_rng_state() == states[0]).all()) and torch.is_grad_enabled() == states[1]


def test_the_probe_leaves_the_random_state_as_it_was(pool):
    """Otherwise a run's dropout would depend on whether it was probed."""
    assert all(pool.run(side_effects_on_rank, world_size=2))


def test_float32_rounding_over_thousands_of_ranks_is_no_refusal():
    """Catches a tolerance that a large cluster's reduction misses: one order of additions against the exact sum."""
    size = 12_000
    ranks = (SimpleNamespace(dp_cp=SimpleNamespace(rank=lambda rank=rank: rank)) for rank in range(size))
    gradients = [sum(probe._parts(groups, 3)) for groups in ranks]
    in_turn = torch.zeros(())
    for gradient in torch.tensor(gradients):
        in_turn += gradient
    assert 1e-6 < abs(float(in_turn) / sum(gradients) - 1) < probe.TOLERANCE
