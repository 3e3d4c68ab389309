"""Token selections in training: the same tokens and the same gradient on each layout, and in whole runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import error_of, pool_of
from trainer_cases import (
    CP,
    PP,
    STILL,
    TP,
    gradients_of,
    lively,
    metrics_of,
    ragged_step,
    relative_difference,
    run_loop,
    selection_for,
    tiny_trainer,
    whole,
    with_shifted_old_log_probs,
)

from megatron_rl.config import PolicyLossConfig
from megatron_rl.errors import ConfigError
from megatron_rl.layout.groups import ParallelGroups
from megatron_rl.layout.sampling_support import SamplingSupport
from megatron_rl.megatron.samples import PolicySample
from megatron_rl.megatron.step_selection import select_step_tokens
from megatron_rl.testing.invariance import StepSample

pytestmark = pytest.mark.megatron

GRPO = PolicyLossConfig(clip_ratio_low=0.2, clip_ratio_high=0.3, token_selection_share=0.3)
CONFIGS = {
    "top_entropy": replace(GRPO, token_selection="top_entropy", entropy_coefficient=0.1, entropy_bonus_tokens="trained"),
    "clip_cov": replace(GRPO, token_selection="clip_cov", token_selection_low=0.0, token_selection_high=99.0),
    "kl_cov": replace(GRPO, token_selection="kl_cov", token_selection_kl_coefficient=2.0),
}
# ranks, groups, settings of the trainer, of the loss, samples of a micro-batch
LAYOUTS = {
    "one micro-batch": (1, {}, {}, {}, 6),
    "a sample each": (1, {}, {}, {}, 1),
    "packed": (1, {}, {"packed": True}, {}, 4),
    "fused head": (1, {}, {}, {"fused_lm_head_loss": True, "max_logits_bytes": 4 * 4 * 11}, 2),
    "DP 2": (2, {}, {}, {}, 2),
    "CP 2": (2, {CP: 2}, {}, {}, 3),
    "TP 2": (2, {TP: 2}, {}, {}, 3),
    "PP 2": (2, {PP: 2}, {}, {}, 2),
    "DP 2, CP 2": (4, {CP: 2}, {"packed": True}, {}, 1),
    "DP 4, two ranks with two samples": (4, {}, {}, {"fused_lm_head_loss": True}, 1),
}
pool = pool_of(4)


def on_rank(rank, config, settings, of_loss, size):
    """(selected tokens of this data-parallel rank by sample, gradients, metrics)."""
    trainer = lively(tiny_trainer(replace(config, **of_loss), **STILL, **settings))
    dp = trainer.groups.dp
    mine = ragged_step()[dp.rank() :: dp.size()]
    longest = -(-6 // dp.size())
    cuts = [mine[start : start + size] for start in range(0, longest, size)]  # as many on each rank, the last may be empty
    cuts = with_shifted_old_log_probs(trainer, cuts, 0.15)
    selection = selection_for(trainer, cuts)
    metrics = trainer.step(cuts, selection=selection)
    rows = selection.selection.is_selected.split(list(selection.lengths))
    found = {dp.rank() + dp.size() * number: row.tolist() for number, row in enumerate(rows)}
    return found, gradients_of(trainer), {name: value for name, value in metrics.items() if name.startswith(("policy/sel", "loss"))}


@pytest.fixture(scope="module")
def on_one_rank(pool):
    return {name: pool.run(on_rank, config, {}, {}, 6, world_size=1) for name, config in CONFIGS.items()}


# Each selection on some, each layout once.
PAIRS = {"top_entropy": ("a sample each", "TP 2", "DP 2, CP 2"), "clip_cov": ("packed", "PP 2", "DP 4, two ranks with two samples")}
PAIRS["kl_cov"] = ("fused head", "DP 2", "CP 2")


@pytest.mark.parametrize(("name", "layout"), [(name, layout) for name, layouts in PAIRS.items() for layout in layouts])
def test_a_selection_gives_the_same_gradient_on_each_layout(pool, on_one_rank, name, layout):
    """6 samples of 18 unmasked tokens: 5 are selected."""
    size, groups, settings, of_loss, samples = LAYOUTS[layout]
    answers = pool.run(on_rank, CONFIGS[name], settings, of_loss, samples, world_size=size, **groups)
    found = {number: row for selected, _, _ in answers for number, row in selected.items()}
    [(want, gradient, metrics)] = on_one_rank[name]
    assert found == want and sum(map(sum, want.values())) == 5
    # float32 sums in another order: log-probabilities are good to 1e-7, and so is each product. The largest seen is 1.2e-6.
    assert relative_difference(whole([of_rank for _, of_rank, _ in answers]), whole([gradient])) < 2e-6
    for _, _, told in answers:
        assert told == pytest.approx(metrics, rel=1e-5, abs=1e-6)
    assert metrics["policy/selected_share"] == 5 / 18 and ("policy/selection_threshold" in metrics) == (name != "clip_cov")


def of_kept_on_rank(rank, settings, of_loss):
    """Whether each measured entropy is of the kept ids: two of each token, so at most ln 2, and none of a token with one id."""
    config = replace(CONFIGS["top_entropy"], entropy_score="support", **of_loss)
    trainer = lively(tiny_trainer(config, **STILL, **settings))
    samples = []
    for sample in ragged_step():
        tokens = sample.tokens[-len(sample.loss_mask) :]
        kept = [[token] if place % 3 == 0 else [token, (token + 1) % 11] for place, token in enumerate(tokens)]
        samples.append(replace(sample, kept_ids=SamplingSupport.from_lists(kept)))
    rows = [row for rows in trainer.log_probs([samples], with_entropy=True) for row in rows]
    for log_probs, entropy in rows:
        p = log_probs.exp()  # of the token, the other id has the rest
        rest = 1 - p  # 0 also where a masked token has the score 0
        wanted = torch.where(rest == 0, 0.0, -p * log_probs - rest * rest.clamp(min=1e-30).log())
        torch.testing.assert_close(entropy, wanted, rtol=0, atol=1e-6)  # float32 sums of two terms
    return torch.cat([entropy for _, entropy in rows])


@pytest.mark.parametrize("layout", ["one micro-batch", "fused head", "CP 2", "TP 2"])
def test_with_the_entropy_over_kept_ids_a_token_of_one_id_is_not_selected(pool, layout):
    """An entropy of the vocabulary would spend the selection on tokens without a gradient."""
    size, groups, settings, of_loss, _ = LAYOUTS[layout]
    entropies = pool.run(of_kept_on_rank, settings, of_loss, world_size=size, **groups)
    assert all(torch.equal(of_rank, entropies[0]) for of_rank in entropies) and 0.5 < float(entropies[0].max()) < 0.6932


def without_on_rank(rank):
    trainer = lively(tiny_trainer(replace(GRPO, token_selection="none", token_selection_share=None), **STILL))
    trainer.step(with_shifted_old_log_probs(trainer, [ragged_step()], 0.15))
    return gradients_of(trainer)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_selection_changes_the_step(pool, on_one_rank, name):
    [plain] = pool.run(without_on_rank, world_size=1)
    [(_, gradient, _)] = on_one_rank[name]
    assert relative_difference(whole([gradient]), whole([plain])) > 0.05


def run_on_rank(rank, output_dir, config, options, settings):
    error = error_of(lambda: run_loop(output_dir, config, options, settings=settings))
    return error, [] if error or rank else metrics_of(output_dir)


RUN = {"num_rollouts": 2, "steps_per_rollout": 2, "micro_batch_size": 4}
OF_RUN = {
    name: replace(config, samples_per_prompt=4, clip_ratio_low=None, clip_ratio_high=None) for name, config in CONFIGS.items()
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_runs_on_two_layouts_have_the_same_rewards_and_selections(pool, tmp_path, name):
    """Each step selects by the policy before it, which the steps before have moved. Rewards tell another policy."""
    found = {}
    for layout, (size, groups, changes, settings) in {
        "one rank": (1, {}, {}, {}),
        "four": (4, {CP: 2}, {"micro_batch_size": 1}, {"packed": True}),
    }.items():
        answers = pool.run(run_on_rank, tmp_path / layout, OF_RUN[name], {**RUN, **changes}, settings, world_size=size, **groups)
        assert {error for error, _ in answers} == {""}
        found[layout] = answers[0][1]
    assert len(found["four"]) == 4 and len({row["policy/selected_share"] for row in found["four"]}) >= 1
    for one, other in zip(found["one rank"], found["four"], strict=True):
        compared = ("rollout/reward", "policy/selected_share", "loss", "grad_norm", "policy/selection_threshold")
        for metric in (metric for metric in compared if metric in one or metric in other):
            # Steps of Adam move rounding into the weights: 1e-4 of a gradient is ten times what is met.
            assert one.get(metric) == pytest.approx(other.get(metric), rel=1e-4, abs=1e-6), metric


def test_a_step_without_its_selection_is_refused(pool):
    [error] = pool.run(lost_selection_on_rank, world_size=1)
    assert "token_selection=kl_cov and a batch without selected tokens: they are selected in the whole step" in error


def lost_selection_on_rank(rank):
    trainer = tiny_trainer(CONFIGS["kl_cov"])
    return error_of(lambda: trainer.step([ragged_step()]))


def test_a_selection_is_of_the_samples_that_it_was_made_of():
    step = [StepSample(tokens=[1, 2, 3], loss_mask=[1, 1], prompt_id="p", advantage=1.0)]
    config = replace(GRPO, token_selection="top_entropy")
    given = {"log_probs": [torch.zeros(2)], "entropy": [torch.ones(2)]}
    selection = select_step_tokens(config, step, [0], ParallelGroups(), **given)
    whole_sample = PolicySample(
        tokens=torch.ones(3).long(), loss_mask=torch.ones(2).bool(), advantage=1.0, token_weight=0.5, token_count=2
    )
    (applied,) = selection.applied_to([whole_sample])
    assert applied.importance_weights.tolist() == [1.0, 0.0] and applied.old_kl_coefficients is None
    with pytest.raises(ValueError, match="these 2 samples are not the 1 of which tokens were selected"):
        selection.applied_to([whole_sample, whole_sample])
    with pytest.raises(ValueError, match="these 1 samples are not the 1 of which tokens were selected"):
        selection.applied_to([replace(whole_sample, loss_mask=torch.ones(1).bool())])
    with pytest.raises(ConfigError, match="needs entropy: pass it"):
        select_step_tokens(config, step, [0], ParallelGroups(), log_probs=given["log_probs"])
    nothing = select_step_tokens(config, [], [], ParallelGroups(), log_probs=[], entropy=[])
    assert nothing.applied_to([]) == [] and nothing.metrics() == {"policy/selected_share": 0.0}
