"""check_step: a right loop passes on every layout, and each usual mistake of a loop is refused by its name."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers import pool_of
from torch import Tensor

from megatron_rl.config import PolicyLossConfig
from megatron_rl.errors import ConfigError
from megatron_rl.layout.groups import ParallelGroups, resolve_groups
from megatron_rl.megatron.batch import PolicyBatch
from megatron_rl.megatron.forward_step import PolicyForwardStep
from megatron_rl.testing.layout_step import Layout, LayoutModel, StepSample, TinyGPT, make_step_batches, row_length
from megatron_rl.testing.reference import in_rollouts, ragged_samples
from megatron_rl.testing.step_check import check_step, settings_alike

pytestmark = pytest.mark.megatron

pool = pool_of(4)
TINY = TinyGPT(use_transformer_engine=False)
GSPO = PolicyLossConfig(policy_loss="gspo", loss_aggregation="prompt_mean", policy_metrics="none")
TERMS = PolicyLossConfig(
    policy_loss="grpo",
    loss_aggregation="sample_mean",
    kl_coefficient=0.1,
    entropy_coefficient=0.05,
    policy_temperature=0.7,
    policy_metrics="none",
)
WARM = replace(TERMS, entropy_coefficient=0.0)
ANOTHER_CLIP = PolicyLossConfig(
    policy_loss="grpo",
    loss_aggregation="constant",
    loss_aggregation_divisor=7.0,
    clip_ratio_low=0.02,
    clip_ratio_high=0.03,
    policy_metrics="none",
)
PER_TOKEN = PolicyLossConfig(policy_loss="grpo", loss_aggregation="token_mean", policy_metrics="none")


def samples_of_step() -> list[StepSample]:
    numbers = random.Random(3)
    return [
        replace(
            sample,
            old_log_probs=[numbers.gauss(-4.1, 0.05) for _ in sample.loss_mask],
            ref_log_probs=[numbers.gauss(-4.1, 0.2) for _ in sample.loss_mask],
        )
        for sample in ragged_samples()
    ]


def places_in(samples: list[StepSample], layout: Layout, groups: ParallelGroups, batches: list, batch: PolicyBatch) -> Tensor:
    """Padded rows: each holds one sample."""
    number, length = next(place for place, other in enumerate(batches) if other is batch), row_length(samples, layout)
    places = []
    for position in batch.row_positions.tolist():
        sample = groups.dp.rank() + groups.dp.size() * (number + layout.num_microbatches * (position // length))
        place = -1
        if sample < len(samples):
            prompt = len(samples[sample].tokens) - len(samples[sample].loss_mask)
            place = position % length - (prompt - 1)
        is_response = sample < len(samples) and 0 <= place < len(samples[sample].loss_mask)
        places.append((sample, place) if is_response else (-1, -1))
    return torch.tensor(places)


def checked(rank, layout, config, fault=None, **changes):
    """The error of check_step, or what it found. fault: (forward_step, batches, groups, model) -> another forward_step."""
    samples, groups = samples_of_step(), resolve_groups()
    model = LayoutModel(layout, row_length(samples, layout), TINY)
    batches = make_step_batches(config, layout, samples, groups)
    forward_step = PolicyForwardStep(config, vocab_size=TINY.true_vocab_size)
    if fault is not None:
        forward_step = fault(forward_step, groups, model)
    places_of = changes.pop("places_of", places_in)
    try:
        return check_step(
            forward_step,
            batches,
            model.models,
            changes.pop("meant", list)(samples),
            partial(places_of, samples, layout, groups, batches),
            changes.pop("config", config),
            seq_length=row_length(samples, layout),
            micro_batch_size=batches[0].tokens.shape[0],
            **{"vocab_size": TINY.true_vocab_size, "reported_loss": "policy/loss", **changes},
        )
    except ConfigError as error:
        return str(error)


def found_on(pool, layout: Layout, config: PolicyLossConfig, fault=None, **changes):
    return pool.run(partial(checked, fault=fault, **changes), layout, config, world_size=layout.world_size, **layout.model_parallel)


TP2 = Layout(tensor=2, data=2, num_microbatches=3, sequence_parallel=True)
CP2 = Layout(context=2, data=2, num_microbatches=3)
VPP2 = Layout(pipeline=2, num_microbatches=4, virtual_pipeline=2)


@pytest.mark.parametrize(
    ("layout", "config"),
    [
        pytest.param(Layout(num_microbatches=3), ANOTHER_CLIP, id="another clip"),
        pytest.param(Layout(data=2, num_microbatches=3, distributed_optimizer=True), GSPO, id="distributed optimiser"),
        pytest.param(TP2, TERMS, id="KL, entropy and temperature, TP2"),
        pytest.param(CP2, TERMS, id="KL, entropy and temperature, CP2"),
        pytest.param(VPP2, GSPO, id="interleaved stages"),
        pytest.param(Layout(data=2, num_microbatches=3, calculate_per_token_loss=True), PER_TOKEN, id="the per-token contract"),
    ],
)
def test_a_right_loop_passes(pool, layout, config):
    for found in found_on(pool, layout, config):
        assert not isinstance(found, str), found
        assert found.ratio == pytest.approx(1.0, abs=1e-6)
        assert found.loss_error < 1e-5


def test_a_loop_may_return_a_list(pool):
    """Megatron's schedule unpacks whatever it is given."""
    assert not any(isinstance(found, str) for found in found_on(pool, DP2, GSPO, partial(returning, change=list)))


def changed_batch(forward_step, groups, model, *, change):
    def changed(iterator, chunk):
        return forward_step(iter([change(next(iterator), groups)]), chunk)

    return changed


def labels_of_the_inputs(batch, groups):
    """The label of a row is the token that it read, and not the next one."""
    return replace(batch, labels=batch.tokens.flatten())


def with_dropout(forward_step, groups, model):
    """As dropout does, the logits are others in each run."""

    def noisy(iterator, chunk):
        output, loss_func = forward_step(iterator, chunk)
        return output * (1 + torch.rand(()).item()), loss_func

    return noisy


def with_other_terms(**terms):
    return partial(of_config, replace(TERMS, **terms))


def of_config(config, forward_step, groups, model):
    return PolicyForwardStep(config, vocab_size=TINY.true_vocab_size)


def with_padded_columns(forward_step, groups, model):
    return PolicyForwardStep(GSPO, vocab_size=TINY.vocab_size)


def reporting_half(forward_step, groups, model):
    def reporting(iterator, chunk):
        output, loss_func = forward_step(iterator, chunk)

        def loss_of(logits):
            loss, count, report = loss_func(logits)
            return loss, count, {"policy/loss": report["policy/loss"] * torch.tensor([0.5, 1.0])}

        return output, loss_of

    return reporting


def returning(forward_step, groups, model, *, change):
    def returning(iterator, chunk):
        output, loss_func = forward_step(iterator, chunk)
        return output, lambda logits: change(loss_func(logits))

    return returning


def with_a_term_of_weights(forward_step, groups, model):
    weight = next(model.models[0].parameters())
    return returning(forward_step, groups, model, change=lambda returned: (returned[0] + weight.square().sum(), *returned[1:]))


def without_reduction(forward_step, groups, model):
    model.models[0].config.finalize_model_grads_func = None
    return forward_step


DP2 = Layout(data=2, num_microbatches=3)


@pytest.mark.parametrize(
    ("config", "fault", "message"),
    [
        pytest.param(TERMS, with_other_terms(kl_estimator="k2"), "the KL term is that of k2", id="another estimate of KL"),
        pytest.param(TERMS, with_other_terms(kl_coefficient=0.0), "the KL term is missing", id="no KL"),
        pytest.param(TERMS, with_other_terms(entropy_coefficient=0.0), "the entropy term is missing", id="no entropy"),
        pytest.param(GSPO, with_padded_columns, "padded columns of the vocabulary take part", id="padded columns in the softmax"),
        pytest.param(GSPO, reporting_half, r"the reported loss is 0\.5 of expected", id="reported loss"),
        pytest.param(GSPO, with_dropout, "turn dropout off", id="dropout"),
        pytest.param(GSPO, without_reduction, "finalize_model_grads_func is None", id="nothing reduces"),
        pytest.param(GSPO, with_a_term_of_weights, "the gradient by the logits is right, and", id="beside the logits"),
    ],
)
def test_a_mistake_is_refused_on_every_rank(pool, config, fault, message):
    for found in found_on(pool, DP2, config, fault):
        assert isinstance(found, str), f"passed with {found}"
        assert re.search(message, found), found


WRONG_TEMPERATURE = partial(of_config, replace(WARM, policy_temperature=1.0)), "are at temperature 1, and config says 0.7"
WRONG_LABELS = partial(changed_batch, change=labels_of_the_inputs), "labels are not moved by one"
OTHER_TERMS = {"policy_temperature": 1.0, "kl_coefficient": 0.0, "entropy_coefficient": 0.0}


@pytest.mark.parametrize(
    ("layout", "config", "fault", "message"),
    [
        pytest.param(TP2, WARM, *WRONG_TEMPERATURE, id="temperature, TP2"),
        pytest.param(VPP2, GSPO, *WRONG_LABELS, id="labels, interleaved stages"),
        pytest.param(Layout(pipeline=2, num_microbatches=4), GSPO, with_dropout, "turn dropout off", id="dropout, PP2"),
        pytest.param(CP2, GSPO, with_other_terms(**OTHER_TERMS), "the loss is grpo", id="another loss, CP2"),
    ],
)
def test_a_mistake_has_its_name_on_every_layout(pool, layout, config, fault, message):
    """Rows and columns of the logits lie on other ranks; the other stages of a pipeline wait for the last one, which sees them."""
    for found in found_on(pool, layout, config, fault):
        assert isinstance(found, str), f"passed with {found}"
        assert message in found


def test_lost_rollouts_have_their_name(pool):
    """The loop counts each row as a rollout of its own; `samples` say which rows are one."""
    for found in found_on(pool, DP2, replace(TERMS, kl_coefficient=0.0, entropy_coefficient=0.0), meant=in_rollouts):
        assert isinstance(found, str), f"passed with {found}"
        assert "tokens weigh as if each sample were a rollout of its own" in found


def losing_a_token(*arguments):
    places = places_in(*arguments)
    places[(places == torch.tensor([1, 3])).all(1)] = -1
    return places


def naming_a_token_twice(*arguments):
    places = places_in(*arguments)
    places[(places[:, 0] == 0) & (places[:, 1] == 1)] = torch.tensor([0, 0])
    return places


def beyond_the_samples(*arguments):
    return places_in(*arguments) + torch.tensor([100, 0])


def of_another_shape(*arguments):
    return places_in(*arguments)[1:]


@pytest.mark.parametrize(
    ("places_of", "message"),
    [
        (losing_a_token, "token 3 of sample 1 is in 0 rows of the step"),
        (naming_a_token_twice, "token 0 of sample 0 is in 2 rows of the step"),
        (beyond_the_samples, r"places_of names token -?\d+ of sample \d+"),
        (of_another_shape, r"it must be \[\d+, 2\]"),
    ],
)
def test_wrong_places_are_refused(pool, places_of, message):
    for found in found_on(pool, DP2, PER_TOKEN, places_of=places_of):
        assert isinstance(found, str)
        assert re.search(message, found), found


def known_of(samples: list[StepSample]) -> list[Tensor]:
    return [torch.tensor([[-4.1, 4.0]] * len(sample.loss_mask), dtype=torch.float64) for sample in samples]


@pytest.mark.parametrize(
    ("lengths", "prompts", "alike"),
    [
        ([4, 4, 4, 4], "aabb", ["sample_mean", "token_mean"]),
        ([1, 7, 2, 6], "aabb", ["token_mean"]),
        ([3, 5, 2], "abc", ["sample_mean"]),
        ([1, 7, 2, 3], "aabb", []),
    ],
    ids=["one length", "prompts of as many tokens", "prompts of one sample", "ragged"],
)
def test_samples_that_cannot_tell_aggregations_apart_are_said(lengths, prompts, alike):
    """A loop with the weights of another aggregation, or with its prompt groups lost, would pass."""
    samples = [
        StepSample(tokens=[1] * (length + 1), loss_mask=[1] * length, prompt_id=prompt, advantage=1.0)
        for length, prompt in zip(lengths, prompts, strict=True)
    ]
    config = replace(GSPO, policy_loss="reinforce")
    assert settings_alike(samples, known_of(samples), config) == [f"loss_aggregation={name}" for name in alike]


def test_a_step_says_which_clips_it_cannot_tell_apart():
    samples = samples_of_step()
    known = known_of(samples)
    on_policy = [replace(sample, old_log_probs=None) for sample in samples]
    assert settings_alike(on_policy, known, GSPO) == ["half and twice clip_ratio_low", "half and twice clip_ratio_high"]
    assert not settings_alike(on_policy, known, replace(GSPO, policy_loss="reinforce"))  # it has no ratio
    # Of the samples' mean log-ratios one with A < 0 is -0.0105, and one with A > 0 is 0.0228.
    assert not settings_alike(samples, known, replace(GSPO, clip_ratio_low=0.01, clip_ratio_high=0.02))
    far = replace(GSPO, clip_ratio_low=0.01, clip_ratio_high=0.9)
    assert settings_alike(samples, known, far) == ["half and twice clip_ratio_high"]
