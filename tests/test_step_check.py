"""check_step: a right loop passes on every layout, and each usual mistake of a loop is refused by its name.

Then mistakes are planted in a copy of examples/own_loop.py, which two ranks run."""

from __future__ import annotations

import random
import re
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers import ROOT, pool_of
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
SLOW = pytest.mark.slow

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
PER_TOKEN_TERMS = replace(TERMS, loss_aggregation="token_mean")


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
        pytest.param(TP2, TERMS, id="KL, entropy and temperature, TP2"),
        pytest.param(CP2, TERMS, id="KL, entropy and temperature, CP2"),
        pytest.param(VPP2, GSPO, id="interleaved stages"),
        pytest.param(
            Layout(data=2, num_microbatches=3, calculate_per_token_loss=True), PER_TOKEN_TERMS, id="the per-token contract"
        ),
    ],
)
def test_a_right_loop_passes(pool, layout, config):
    for found in found_on(pool, layout, config):
        assert not isinstance(found, str), found
        assert found.ratio == pytest.approx(1.0, abs=1e-6)
        assert found.loss_error < 1e-5


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


of_warm = partial(of_config, replace(WARM, policy_temperature=1.0))


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
PP2 = Layout(pipeline=2, num_microbatches=4)
WITHOUT_TERMS = {"kl_coefficient": 0.0, "entropy_coefficient": 0.0}


def losing_a_token(*arguments):
    places = places_in(*arguments)
    places[(places == torch.tensor([1, 3])).all(1)] = -1
    return places


def refused(message: str, *given, config=GSPO, layout=DP2, **changes):
    """given: the fault, if any. changes: arguments of `checked`."""
    return pytest.param(layout, config, [*given, None][0], changes, message, id=message)


@pytest.mark.parametrize(
    ("layout", "config", "fault", "changes", "message"),
    [
        refused("the KL term is missing", with_other_terms(kl_coefficient=0.0), config=TERMS),
        refused("the entropy term is missing", with_other_terms(entropy_coefficient=0.0), config=TERMS),
        refused("padded columns of the vocabulary take part", with_padded_columns),
        refused(r"the reported loss is 0\.5 of expected", reporting_half),
        refused("finalize_model_grads_func is None", without_reduction),
        refused("its dense step has no teacher", config=replace(GSPO, distillation="topk")),
        refused("the gradient by the logits is right, and", with_a_term_of_weights),
        # Rows and columns of the logits lie on other ranks; the other stages of a pipeline wait for the last one, which sees them.
        refused("are at temperature 1, and config says 0.7", of_warm, config=WARM, layout=TP2),
        refused("turn dropout off", with_dropout, layout=PP2),
        refused("the loss is grpo", with_other_terms(policy_temperature=1.0, **WITHOUT_TERMS), layout=CP2),
        # The loop counts each row as a rollout of its own; `samples` say which rows are one.
        refused("as if each sample were a rollout of its own", config=replace(TERMS, **WITHOUT_TERMS), meant=in_rollouts),
        refused("token 3 of sample 1 is in 0 rows of the step", places_of=losing_a_token),
    ],
)
def test_a_mistake_is_refused_on_every_rank(pool, layout, config, fault, changes, message):
    for found in found_on(pool, layout, config, fault, **changes):
        assert isinstance(found, str), f"passed with {found}"
        assert re.search(message, found), found


def known_of(samples: list[StepSample]) -> list[Tensor]:
    return [torch.tensor([[-4.1, 4.0]] * len(sample.loss_mask), dtype=torch.float64) for sample in samples]


@pytest.mark.parametrize(
    ("lengths", "prompts", "alike"),
    [
        ([1, 7, 2, 6], "aabb", ["token_mean"]),
        ([1, 7, 2, 3], "aabb", []),
    ],
    ids=["prompts of as many tokens", "ragged"],
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


# The loop of examples/own_loop.py

LOOP = (ROOT / "examples" / "own_loop.py").read_text(encoding="utf-8")
WEIGHTS = 'sample_token_weights("prompt_mean", counts, totals, prompt_token_counts=prompt_counts)'
UNSCALED = """def scale_for_schedule(loss, *counts, **others):
    return loss, torch.ones((), dtype=torch.int32), {"policy/loss": torch.stack([loss.detach(), torch.tensor(1.0)])}


def main():"""
# mistake -> what stands in the loop, what is put in its place, words of the message.
MISTAKES = {
    "prompt groups lost": ("[prompts[index] for index in mine]", "mine", "as if each sample were a prompt of its own"),
    "mask one row late": ("positions - (PROMPT - 1)  #", "positions - PROMPT  #", "the mask is one row late"),
    "no scale_for_schedule": ("def main():", UNSCALED, "undoes the 1/(dp x cp x micro-batches) of DDP"),
    "token_mean": (WEIGHTS, 'sample_token_weights("token_mean", counts, totals)', "as under token_mean, or"),
    "a mean of means": (
        "bounds, weights[rows])",
        "bounds, torch.full((len(rows),), 1 / int(mask.sum())))",
        "as under token_mean of each micro-batch alone",
    ),
    "counts of one rank": (
        "count_step(masks, [prompts[index] for index in mine])",
        "count_step(masks, [prompts[index] for index in mine], SINGLE)",
        "as under prompt_mean of each rank alone",
    ),
    "labels of other samples": ("tokens[index].roll", "tokens[rows].roll", "rows are of other rows: token"),
    "a micro-batch lost": ("output.loss, len", "output.loss * (rows[0] == 0), len", "a part of the step is lost"),
    "the objective for the loss": ("output.loss, len", "-output.loss, len", "with the other sign"),
    "no old log-probabilities": ("old_here, advantages", "None, advantages", "every ratio is 1"),
    "old log-probabilities one late": ("old[index].flatten()", "old[index].roll(1, 1).flatten()", "are one token late"),
    "no clip": (
        "weights[rows])  #",
        "weights[rows], clip_ratio_low=0.999, clip_ratio_high=1e3)  #",
        "the ratio has no clip: pass the clip of config",
    ),
    "an entropy term": (
        "output.loss, len",
        "output.loss + 0.01 * (torch.softmax(logits, -1) * torch.log_softmax(logits, -1)).sum(-1).flatten()[mask].sum(), len",
        "or a term beside it: compare loss, clip and terms",
    ),
    "advantages with the other sign": ("advantages[index], mask", "-advantages[index], mask", "have the other sign"),
    "advantages of another scale": ("advantages[index], mask", "1.12 * advantages[index], mask", "gradient is 1.12 of expected"),
}


class Passed(Exception):
    """The loop's check found nothing."""


def planted(mistake: str) -> str:
    old, new, _ = MISTAKES[mistake]
    assert LOOP.count(old) == 1, f"{old} stands {LOOP.count(old)} times in examples/own_loop.py"
    return LOOP.replace(old, new)


def run_loop(rank: int, source: str) -> str:
    """What the loop's check raises, empty where it passes. The ranks are this pool's."""
    from megatron_rl.layout.groups import SINGLE

    loop: dict = {"__name__": "loop", "SINGLE": SINGLE}
    exec(compile(source, "own_loop.py", "exec"), loop)
    loop["initialize_ranks"] = lambda **sizes: torch.device("cpu")

    def checked(*arguments, **settings):
        check_step(*arguments, **settings)
        raise Passed

    loop["check_step"] = checked
    sys.argv = ["own_loop.py"]
    try:
        loop["main"]()
    except ConfigError as refusal:
        return str(refusal)
    except Passed:
        return ""
    raise AssertionError("the loop did not check itself")


@SLOW
def test_the_loop_as_it_is_passes(pool):
    assert pool.run(run_loop, LOOP, world_size=2) == ["", ""]


@SLOW
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_has_its_name_on_every_rank(pool, mistake):
    found, words = pool.run(run_loop, planted(mistake), world_size=2), MISTAKES[mistake][-1]
    assert all(words in message for message in found), found
    assert max(map(len, found)) < 500, "a message is a name and what to do"
