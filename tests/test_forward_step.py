"""The forward step under the real schedule: what it never holds, parts without tokens, and values that are not finite.

Then what the schedule makes of a loss: the probe that measures it, and what scale_for_schedule takes and refuses.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import trainer_cases as cases
from helpers import error_of, pool_of
from torch.utils._python_dispatch import TorchDispatchMode
from trainer_cases import CP, PP, TP, VPP

from megatron_rl.config import PolicyLossConfig
from megatron_rl.count import StepTotals
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.layout.groups import ParallelGroups, resolve_groups
from megatron_rl.megatron import forward_step as forward_step_module
from megatron_rl.megatron import probe
from megatron_rl.megatron.forward_step import MicrobatchReport, check_finite
from megatron_rl.megatron.installed import expert_replicas_drift
from megatron_rl.megatron.model import find_output_layer
from megatron_rl.megatron.probe import probe_schedule
from megatron_rl.megatron.schedule import backward_factor, scale_for_schedule

pytestmark = pytest.mark.megatron

pool = pool_of(4)


class SeenShapes(TorchDispatchMode):
    """The shape of every tensor that an operation takes or gives."""

    def __init__(self):
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.see((*args, *(kwargs or {}).values(), result))
        return result

    def see(self, values) -> None:
        for value in values:
            if isinstance(value, torch.Tensor):
                self.shapes.add(value.shape)
            elif isinstance(value, list | tuple):
                self.see(value)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: nothing is compiled under it, and the guard against that takes as long as the operation."""
        return False


def sizes_on_rank(rank, vocabulary):
    """Sizes in any shape of one forward and backward."""
    config = PolicyLossConfig(policy_metrics="with_entropy", entropy_coefficient=0.01)
    trainer = cases.tiny_trainer(config, vocab_size=vocabulary)
    [microbatch] = cases.with_shifted_old_log_probs(trainer, [cases.ragged_step()])
    with SeenShapes() as seen:
        trainer.step([microbatch])
    return {size for shape in seen.shapes for size in shape}


def changed_later_on_rank(rank):
    """What the step after a step says, where the model's config was changed between them."""
    trainer = cases.tiny_trainer(PolicyLossConfig(loss_aggregation="sample_mean"))
    said = []
    for is_per_token in (False, True, False):
        trainer.model.config.calculate_per_token_loss = is_per_token
        said.append(error_of(lambda: trainer.step([cases.ragged_step()])))
    return said


def test_a_setting_that_the_training_loop_changes_is_judged_again(pool):
    """FB-15: a model is checked once; calculate_per_token_loss, or a scale of MTP's losses, may come after it is built."""
    [(before, changed, again)] = pool.run(changed_later_on_rank, world_size=1)
    assert (before, again) == ("", "")
    assert "--loss-aggregation sample_mean with calculate_per_token_loss=True" in changed


def test_no_tensor_of_the_step_has_the_size_of_the_whole_vocabulary(pool):
    """FB-42: catches logits that are gathered before the loss. 246 is no other size here; 123 is the shard's."""
    for sizes in pool.run(sizes_on_rank, 246, world_size=2, **{TP: 2}):
        assert 123 in sizes and 246 not in sizes


def gathered_on_rank(rank):
    trainer = cases.tiny_trainer(PolicyLossConfig())
    find_output_layer(trainer.model).gather_output = True
    return error_of(lambda: trainer.step([cases.ragged_step()]))


def test_logits_that_tensor_parallel_ranks_gather_are_refused_on_each(pool):
    """The loss would be right, and the part of the head of every rank but the first would have the gradient 0."""
    one, two = pool.run(gathered_on_rank, world_size=2, tensor_model_parallel_size=2)
    assert one == two
    assert one.startswith("ConfigError: the output layer gathers its logits over 2 tensor-parallel ranks (gather_output=True)")
    assert "build the model with parallel_output=True" in one


def unscaled_on_rank(rank):
    """The error of a step whose schedule divides by another number of micro-batches than the step has."""
    trainer = cases.tiny_trainer(PolicyLossConfig())
    with mock.patch.object(forward_step_module, "backward_factor", lambda *given, **named: 2.0 * backward_factor(*given, **named)):
        return error_of(lambda: trainer.step([cases.ragged_step()]))


def test_a_backward_that_delivers_another_factor_is_refused(pool):
    """It would train on another scale, and a kernel that has made the gradient in forward could not mend it."""
    (error,) = pool.run(unscaled_on_rank, world_size=1)
    assert error.startswith("ConfigError: loss_scale=2.0 was declared and backward delivers 1.0"), error


def rollouts_on_rank(rank):
    step = [replace(sample, rollout_id=place // 2) for place, sample in enumerate(cases.ragged_step())]
    metrics = cases.tiny_trainer(PolicyLossConfig()).step([step])
    return len(step), metrics["num_rollouts"], metrics["rollout/rows"]


def test_rollouts_of_two_rows_are_counted_as_such(pool):
    ((rows, rollouts, rows_of_one),) = pool.run(rollouts_on_rank, world_size=1)
    assert (rollouts, rows_of_one) == (-(-rows // 2), rows / rollouts)


def moved_on_rank(rank):
    """Whether weights move in a step of advantages 0, and in one of others."""
    trainer, moved = cases.tiny_trainer(lr=0.1), []
    for step in ([replace(sample, advantage=0.0) for sample in cases.ragged_step()], cases.ragged_step()):
        before = cases.weights_of(trainer)
        trainer.step([step])
        moved.append(any(not torch.equal(before[name][2], weight) for name, (*_, weight) in cases.weights_of(trainer).items()))
    return moved


def test_a_step_without_a_signal_moves_no_weight(pool):
    """No decay of weights, which no loss asks for."""
    assert pool.run(moved_on_rank, world_size=1) == [[False, True]]


FAULTS = [("logits", math.nan), ("old_log_probs", -math.inf), ("ref_log_probs", math.nan), ("advantages", math.inf)]


def refusals_on_rank(rank):
    """[(what the step says, whether the weights stayed)] of each fault."""
    answers = []
    for tensor, value in FAULTS:
        trainer = cases.tiny_trainer(PolicyLossConfig(kl_coefficient=0.1))
        [samples] = cases.with_shifted_old_log_probs(trainer, [cases.ragged_step()])
        samples = [replace(sample, ref_log_probs=sample.old_log_probs) for sample in samples]
        if tensor == "logits" and resolve_groups().tp.rank() == 1:
            with torch.no_grad():
                find_output_layer(trainer.model).weight[1].fill_(value)
        elif tensor != "logits":  # the only token of this sample lies on the second cp rank
            samples[3] = replace(samples[3], **({"advantage": value} if tensor == "advantages" else {tensor: [value]}))
        before = cases.weights_of(trainer)
        message = error_of(lambda trainer=trainer, samples=samples: trainer.step([samples[:3], samples[3:]]))
        after = cases.weights_of(trainer)
        answers.append((message, all(torch.equal(before[name][2].nan_to_num(), after[name][2].nan_to_num()) for name in before)))
    return answers


def test_a_value_that_is_not_finite_stops_every_tp_and_cp_rank_before_the_optimiser(pool):
    """nan_to_num trains on as if on-policy; a rank that raises alone leaves the others in a collective."""
    of_ranks = pool.run(refusals_on_rank, world_size=4, **{TP: 2, CP: 2})
    for (tensor, _), *answers in zip(FAULTS, *of_ranks, strict=True):
        assert all(message.startswith("DataError: document ") and stayed for message, stayed in answers)
        named = "log_probs" if tensor == "logits" else tensor
        # Which value it is can only be said where the token is: tp ranks of one cp rank, or all of them.
        names = [message for message, _ in answers if f"in {named}" in message or f", {named}" in message]
        assert len(names) in (2, 4)


def step_after_a_refusal_on_rank(rank, has_failed):
    """Metrics of a good step on a fresh policy, or on one that has refused a step in its last micro-batch."""
    trainer = cases.tiny_trainer()
    [samples] = cases.with_shifted_old_log_probs(trainer, [cases.ragged_step()])
    if has_failed:
        bad = [*samples[:5], replace(samples[5], advantage=math.nan)]
        assert error_of(lambda: trainer.step([bad[:3], bad[3:5], bad[5:]]))
    return trainer.step([samples[:3], samples[3:]])


def test_a_refused_step_leaves_nothing_behind_for_the_next_one(pool):
    """Catches the reports of its earlier micro-batches in the next step's loss and metrics: a trainer may skip bad data."""
    fresh, after = (pool.run(step_after_a_refusal_on_rank, has_failed, world_size=1) for has_failed in (False, True))
    assert after == fresh


def test_on_the_gpu_the_reports_stop_the_step():
    """There the loss must not synchronise, so the counts are looked at once, before the optimiser."""

    def report(*counts):
        zero = torch.zeros(())
        return MicrobatchReport(zero, None, None, torch.tensor(counts, dtype=torch.int32), None)

    check_finite([])
    check_finite([report(0, 0), report()])
    with pytest.raises(DataError, match=r"micro-batches \{1: 3, 2: 1\} \(micro-batch: tokens\): the optimiser step is refused"):
        check_finite([report(0, 0), report(1, 2), report(0, 1)])


# The probe, and the scale

# Float32 holds 24 bits, and each number below goes through at most ten operations.
TOLERANCE = 1e-6


def probe_on_rank(rank, ddp, contracts):
    from megatron.core.distributed import DistributedDataParallelConfig

    ddp_config = DistributedDataParallelConfig(**ddp) if ddp else None
    states = torch.get_rng_state(), torch.is_grad_enabled()
    results = [probe_schedule(calculate_per_token_loss=per_token, ddp_config=ddp_config) for per_token in contracts]
    return results, torch.equal(torch.get_rng_state(), states[0]) and torch.is_grad_enabled() == states[1]


def drift_on_rank(rank):
    return expert_replicas_drift()


EP, ETP = "expert_model_parallel_size", "expert_tensor_parallel_size"
BOTH = (False, True)
LAYOUTS = [
    pytest.param(1, {}, {}, BOTH, id="one rank"),
    pytest.param(2, {CP: 2}, {}, BOTH, id="CP2: a cp factor"),
    pytest.param(4, {TP: 2, PP: 2}, {}, BOTH, id="TP2xPP2: an average over tp, where none belongs; the loss lives on one stage"),
    pytest.param(4, {PP: 2, VPP: 2}, {}, BOTH, id="DP2xPP2 with interleaved stages"),
    # Megatron allows it without per-token loss alone.
    pytest.param(
        4, {EP: 2}, {"average_in_collective": True}, (False,), id="DP4xEP2, an average in the collective: half of the ranks"
    ),
    pytest.param(4, {EP: 2}, {"use_distributed_optimizer": True}, BOTH, id="DP4xEP2, distributed optimiser"),
    pytest.param(4, {CP: 2, EP: 4, ETP: 1}, {"overlap_grad_reduce": True}, BOTH, id="CP2xDP2xEP4, overlapped reduction"),
    pytest.param(4, {TP: 2, EP: 2}, {}, BOTH, id="TP2xDP2, EP2, ETP2: a rank's share of the tokens"),
    pytest.param(4, {TP: 2, ETP: 1}, {}, BOTH, id="TP2xDP2, ETP1: 0.19 adds the gradients of replicas"),
    pytest.param(2, {ETP: 2}, {}, BOTH, id="DP2, ETP2: shards of an expert on data-parallel ranks"),
]


@pytest.mark.parametrize(("world_size", "layout", "ddp", "contracts"), LAYOUTS)
def test_the_installed_megatron_gives_the_gradient_of_the_step_on_every_layout(pool, world_size, layout, ddp, contracts):
    """FB-03: catches a probe that refuses a sound layout, a factor that scale_for_schedule gets wrong on one of them, and a random
    state that the probe changes: a run's dropout would depend on whether it was probed."""
    apart = EP in layout or (ETP in layout and not pool.run(drift_on_rank, world_size=1)[0])
    for results, left_alone in pool.run(probe_on_rank, ddp, contracts, world_size=world_size, **layout):
        assert left_alone and [result.contract.split(":")[0] for result in results] == ["unit", "per-token"][: len(contracts)]
        assert [result.ratio for result in results] == pytest.approx([1.0] * len(contracts), abs=TOLERANCE)
        if apart:
            assert [result.expert_ratio for result in results] == pytest.approx([1.0] * len(contracts), abs=TOLERANCE)
            assert all(result.in_words.startswith("ratio 1, of experts ") for result in results)
        else:
            assert all(result.expert_ratio is None and result.in_words == f"ratio {result.ratio:.6g}" for result in results)


def probe_changed_schedule(rank, name):
    """What the probe says under a Megatron whose loss arithmetic is off by a factor."""
    import megatron.core.pipeline_parallel.schedules as schedules

    original, cp_size = schedules.forward_step_calc_loss, resolve_groups().cp.size()

    def changed(model, output, loss_func, config, vp_stage, collect, num_microbatches, store, *others):
        output, num_tokens = original(model, output, loss_func, config, vp_stage, collect, num_microbatches, store, *others)
        of_sizes = {"cp": cp_size, "1/cp": 1 / cp_size, "M": num_microbatches}
        return output * (of_sizes[name] if name in of_sizes else name), num_tokens

    with mock.patch.object(schedules, "forward_step_calc_loss", changed):
        return error_of(probe_schedule)


CHANGES = [
    pytest.param("cp", {CP: 2}, "is 2 of the step's, which is cp or dp x cp;", id="FB-16 times cp, as 0.12"),
    pytest.param("1/cp", {CP: 2}, "is 0.5 of the step's, which is 1/(cp) or 1/(dp x cp);", id="over cp"),
    pytest.param("M", {}, "is 3 of the step's, which is micro-batches;", id="never divided by M"),
    pytest.param(1 + 1 / 2000, {}, "is 1.0005 of the step's; see docs/parallelism.md", id="a small factor without a name"),
]


@pytest.mark.parametrize(("change", "layout", "message"), CHANGES)
def test_a_schedule_of_another_arithmetic_is_refused_on_every_rank_and_the_factor_named(pool, change, layout, message):
    """FB-16: a version number is no evidence. A rank that did not refuse would wait for the others."""
    for error in pool.run(probe_changed_schedule, change, world_size=2, **layout):
        assert error.startswith("ConfigError: Megatron-Core ") and message in error


def probe_broken_megatron(rank):
    """What the probe says of token counts that are taken for one a micro-batch (both contracts), and of ranks that are not
    averaged."""
    from megatron.core import distributed
    from megatron.core.distributed import DistributedDataParallel

    finalize, found = distributed.finalize_model_grads, []

    def without_counts(model, num_tokens=None, *args, **kwargs):
        one_each = None if num_tokens is None else torch.full_like(num_tokens, 3)  # micro-batches of the probe
        return finalize(model, one_each, *args, **kwargs)

    with mock.patch.object(distributed, "finalize_model_grads", without_counts):
        found += [error_of(lambda flag=flag: probe_schedule(calculate_per_token_loss=flag)) for flag in (True, False)]
    with mock.patch.object(DistributedDataParallel, "finish_grad_sync", lambda *args, **kwargs: None):
        return [*found, error_of(probe_schedule)]


def test_a_megatron_that_counts_or_reduces_otherwise_is_refused(pool):
    """The probe's micro-batches hold 0, 2 and 4 tokens: one each on average."""
    for per_token, unit, not_reduced in pool.run(probe_broken_megatron, world_size=2):
        assert "the gradient of per-token: (loss x T, tokens) is 2 of the step's" in per_token
        assert unit == "", "the unit contract needs no count"
        assert not_reduced.startswith("ConfigError: Megatron-Core ")


def probe_other_experts(rank, factor, only_rank):
    """What the probe says where DDP scales the gradients of experts by another factor, on all ranks or on one."""
    from megatron.core.distributed import DistributedDataParallel

    original = DistributedDataParallel.__init__

    def changed(ddp, *args, **kwargs):
        original(ddp, *args, **kwargs)
        for bucket in (bucket for buffer in ddp.expert_parallel_buffers for bucket in buffer.buckets):
            bucket.gradient_scaling_factor *= factor if only_rank in (None, rank) else 1.0

    with mock.patch.object(DistributedDataParallel, "__init__", changed):
        return [error_of(lambda flag=flag: probe_schedule(calculate_per_token_loss=flag)) for flag in BOTH]


@pytest.mark.parametrize(
    ("factor", "names", "only_rank"), [(0.5, "1/(dp) or 1/(dp x cp) or 1/(ep);", None), (2.0, "dp or dp x cp or ep;", 1)]
)
def test_another_scale_of_experts_is_refused_on_every_rank_and_named(pool, factor, names, only_rank):
    """FB-106: experts are reduced over fewer ranks than the rest. Catches a probe that sees a dense parameter alone, and ranks that
    wait for one that has refused."""
    first, second = pool.run(probe_other_experts, factor, only_rank, world_size=2, **{EP: 2})
    assert first == second
    assert all(f" is {factor:g} of the step's for the parameters of experts, which is {names}" in error for error in first)


def test_float32_rounding_over_thousands_of_ranks_is_no_refusal():
    """Catches a tolerance that a large cluster's reduction misses: one order of additions against the exact sum."""
    ranks = (SimpleNamespace(dp_cp=SimpleNamespace(rank=lambda rank=rank: rank)) for rank in range(12_000))
    gradients = [sum(probe._parts(groups, 3)) for groups in ranks]
    in_turn = torch.zeros(())
    for gradient in torch.tensor(gradients):
        in_turn += gradient
    assert 1e-6 < abs(float(in_turn) / sum(gradients) - 1) < probe.TOLERANCE


PER_TOKEN = SimpleNamespace(calculate_per_token_loss=True, grad_scale_func=None)
UNIT = SimpleNamespace(calculate_per_token_loss=False, grad_scale_func=None)
TOTALS = StepTotals(num_samples=2, num_prompts=None, num_tokens=9)


def scaled(num_local_tokens, *, num_microbatches=2, config=PER_TOKEN):
    shared = {"totals": TOTALS, "config": config, "groups": ParallelGroups()}
    return scale_for_schedule(torch.ones(()), num_microbatches, num_local_tokens=num_local_tokens, **shared)


def test_scale_for_schedule_by_hand():
    """D = 4 replicas, M = 3: unit returns (12 x, 1); per-token (7 x, tokens). FB-16: num_tokens is an integer in every mode.
    What the schedule does to them in place does not reach the report, nor the loss."""
    four = SimpleNamespace(size=lambda: 4, rank=lambda: 0)
    groups, totals = ParallelGroups(dp_cp=four), StepTotals(num_samples=5, num_prompts=None, num_tokens=7)
    part = torch.ones((), requires_grad=True) * 0.5

    def call(per_token: bool, num_microbatches: int = 3, groups: ParallelGroups = groups, **others):
        given = {"config": SimpleNamespace(calculate_per_token_loss=per_token), "groups": groups, **others}
        return scale_for_schedule(part, num_microbatches, totals=totals, num_local_tokens=2, **given)

    loss, num_tokens, report = call(False)
    assert loss.item() == 6.0 and num_tokens.item() == 1 and num_tokens.dtype == torch.int32  # 0.5 x 4 x 3
    assert report["policy/loss"].tolist() == pytest.approx([0.5, 1 / 12])
    loss, num_tokens, report = call(False, 1, ParallelGroups())  # a factor of 1
    loss /= 8.0
    num_tokens += 5
    assert report["policy/loss"][0].item() == part.item() == 0.5
    loss, num_tokens, _ = call(True)
    assert loss.item() == 3.5 and num_tokens.item() == 2 and num_tokens.dtype == torch.int32  # 0.5 x 7
    loss, _, report = call(False, gradient_divisor="num_samples")
    assert loss.item() == pytest.approx(1.2)  # 6 / 5
    assert report["policy/loss"][0].item() == 0.5
    with pytest.raises(DataError, match="has no unmasked token"):
        empty = StepTotals(num_samples=5, num_prompts=None, num_tokens=0)
        scale_for_schedule(part, 1, totals=empty, num_local_tokens=0, config=None, groups=groups)


@pytest.mark.parametrize("count", [2.7, math.nan, -1, 2**31, True, torch.tensor([3, 4]), torch.tensor(2.7)], ids=repr)
def test_a_count_that_int32_cannot_hold_is_refused_by_name(count):
    """2.7 would become 2, and NaN and 2**31 -2147483648: a wrong denominator without a word."""
    with pytest.raises(DataError, match=r"^num_local_tokens(=.* must be a whole number from 0 to|.*must be one number)"):
        scaled(count)


AUX = {"moe_aux_loss_coeff": 0.01, "moe_router_load_balancing_type": "aux_loss"}


@pytest.mark.parametrize(
    ("contract", "losses", "router_aux_loss", "refused"),
    [
        (UNIT, AUX, None, ""),
        (UNIT, AUX, "refuse", "moe_aux_loss_coeff=0.01 of aux_loss"),
        (PER_TOKEN, {"moe_z_loss_coeff": 0.001}, None, "moe_z_loss_coeff=0.001 does not go with"),
        (PER_TOKEN, AUX, "exact", ""),
    ],
)
def test_a_balancing_loss_is_refused_where_its_scale_is_wrong_or_the_caller_says_so(contract, losses, router_aux_loss, refused):
    """FB-32: a bridge sets the coefficient of a checkpoint, which no argument shows."""
    config = SimpleNamespace(**vars(contract), num_moe_experts=4, **losses)
    given = {"totals": TOTALS, "config": config, "groups": ParallelGroups()}
    with pytest.raises(ConfigError, match=refused) if refused else nullcontext():
        scale_for_schedule(torch.ones(()), 2, num_local_tokens=5, router_aux_loss=router_aux_loss, **given)


@pytest.mark.parametrize("number", [1.5, 0, True], ids=repr)
def test_a_number_of_micro_batches_that_is_none_is_refused_by_name(number):
    with pytest.raises(ConfigError, match=r"num_microbatches=.* must be at least 1, a whole number: pass the number given"):
        scaled(5, num_microbatches=number)
