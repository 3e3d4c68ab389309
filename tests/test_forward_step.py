"""The forward step under the real schedule: what it never holds, parts without tokens, and values that are not finite."""

from __future__ import annotations

import math
from dataclasses import replace
from unittest import mock

import pytest
import torch
import trainer_cases as cases
from helpers import error_of, pool_of
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl.config import PolicyLossConfig
from megatron_rl.errors import DataError
from megatron_rl.layout.groups import resolve_groups
from megatron_rl.megatron import forward_step as forward_step_module
from megatron_rl.megatron.forward_step import MicrobatchReport, check_finite
from megatron_rl.megatron.model import find_output_layer
from megatron_rl.megatron.schedule import delivered_factor

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
    """Sizes in any shape of one forward and backward; and of a gather, which shows that the mode would see one."""
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    config = PolicyLossConfig(policy_metrics="with_entropy", entropy_coefficient=0.01)
    trainer = cases.tiny_trainer(config, vocab_size=vocabulary)
    [microbatch] = cases.with_shifted_old_log_probs(trainer, [cases.ragged_step()])
    with SeenShapes() as seen:
        trainer.step([microbatch])
    with SeenShapes() as control:
        gather_from_tensor_model_parallel_region(torch.zeros(2, vocabulary // 2))
    return [{size for shape in mode.shapes for size in shape} for mode in (seen, control)]


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
    for sizes, control in pool.run(sizes_on_rank, 246, world_size=2, **{cases.TP: 2}):
        assert 246 in control and 123 in sizes and 246 not in sizes


def gathered_on_rank(rank, config):
    trainer = cases.tiny_trainer(config)
    find_output_layer(trainer.model).gather_output = True
    return error_of(lambda: trainer.step([cases.ragged_step()]))


@pytest.mark.parametrize("is_fused", [False, True], ids=["logits", "fused head"])
def test_logits_that_tensor_parallel_ranks_gather_are_refused_on_each(pool, is_fused):
    """The loss would be right, and the part of the head of every rank but the first would have the gradient 0."""
    config = PolicyLossConfig(fused_lm_head_loss=is_fused)
    one, two = pool.run(gathered_on_rank, config, world_size=2, tensor_model_parallel_size=2)
    assert one == two
    assert one.startswith("ConfigError: the output layer gathers its logits over 2 tensor-parallel ranks (gather_output=True)")
    assert "build the model with parallel_output=True" in one


def unscaled_on_rank(rank):
    """The error of a step whose schedule divides by another number of micro-batches than the step has."""
    trainer = cases.tiny_trainer(PolicyLossConfig())
    with mock.patch.object(
        forward_step_module, "delivered_factor", lambda *given, **named: 2.0 * delivered_factor(*given, **named)
    ):
        return error_of(lambda: trainer.step([cases.ragged_step()]))


def test_a_backward_that_delivers_another_factor_is_refused(pool):
    """It would train on another scale, and a kernel that has made the gradient in forward could not mend it."""
    (error,) = pool.run(unscaled_on_rank, world_size=1)
    assert error.startswith("ConfigError: loss_scale=2.0 was announced and backward delivers 1.0"), error


def rollouts_on_rank(rank):
    step = [replace(sample, rollout_id=place // 2) for place, sample in enumerate(cases.ragged_step())]
    metrics = cases.tiny_trainer(PolicyLossConfig()).step([step])
    return len(step), metrics["num_rollouts"], metrics["rollout/rows"]


def test_rollouts_of_two_rows_are_counted_as_such(pool):
    ((rows, rollouts, rows_of_one),) = pool.run(rollouts_on_rank, world_size=1)
    assert (rollouts, rows_of_one) == (-(-rows // 2), rows / rollouts)


def spoil(trainer, samples, tensor, value):
    """The samples with one bad value on unmasked ground; the logits' is a weight of the second half of the vocabulary."""
    one_token = 3  # its only token lies on the second cp rank
    if tensor == "logits":
        head = find_output_layer(trainer.model)
        if head is not None and resolve_groups().tp.rank() == resolve_groups().tp.size() - 1:
            with torch.no_grad():
                head.weight[1].fill_(value)
        return samples
    change = {"advantage": value} if tensor == "advantages" else {tensor: [value]}
    return [replace(sample, **change) if index == one_token else sample for index, sample in enumerate(samples)]


def refusals_on_rank(rank, faults):
    """[(what the step says, whether the weights moved)] of each fault."""
    answers = []
    for tensor, value, _ in faults:
        trainer = cases.tiny_trainer(PolicyLossConfig(kl_coefficient=0.1))
        [good] = cases.with_shifted_old_log_probs(trainer, [cases.ragged_step()])
        bad = spoil(trainer, [replace(sample, ref_log_probs=sample.old_log_probs) for sample in good], tensor, value)
        before = cases.weights_of(trainer)
        message = error_of(lambda trainer=trainer, bad=bad: trainer.step([bad[:3], bad[3:]]))
        # As bits: a weight that is NaN has not moved either.
        bits = [
            (before[name][2].view(torch.int32), value.view(torch.int32))
            for name, (_, _, value) in cases.weights_of(trainer).items()
        ]
        answers.append((message, not all(torch.equal(*pair) for pair in bits)))
    return answers


FAULTS = [
    ("logits", math.nan, "log_probs"),
    ("logits", math.inf, "log_probs"),
    ("old_log_probs", math.nan, "old_log_probs"),
    ("old_log_probs", -math.inf, "old_log_probs"),
    ("ref_log_probs", math.nan, "ref_log_probs"),
    ("advantages", math.nan, "advantages"),
    ("advantages", math.inf, "advantages"),
]


def test_a_value_that_is_not_finite_stops_every_tp_and_cp_rank_before_the_optimiser(pool):
    """nan_to_num trains on as if on-policy; a rank that raises alone leaves the others in a collective."""
    of_ranks = pool.run(refusals_on_rank, FAULTS, world_size=4, **{cases.TP: 2, cases.CP: 2})
    for (_, _, named), *answers in zip(FAULTS, *of_ranks, strict=True):
        assert all(message.startswith("DataError: document ") and not moved for message, moved in answers)
        names = [message for message, _ in answers if f"in {named}" in message or f", {named}" in message]
        others = [message for message, _ in answers if "on another context-parallel rank" in message]
        # Which value it is can only be said where the token is: tp ranks of one cp rank, or all of them.
        assert len(names) in (2, 4) and len(names) + len(others) == 4


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
