"""examples/correction_bias.py: a case by hand, every step enumerated one by one, and what docs/corrections.md advises from it."""

from __future__ import annotations

import csv
import importlib.util
import itertools
import math
import sys
from types import ModuleType

import pytest
import torch
from helpers import ROOT

from megatron_rl import CorrectionSettings
from megatron_rl.loss_hub import get_policy_loss, policy_loss_names
from megatron_rl.registries.corrections import correction_names
from megatron_rl.testing.layout_step import StepSample
from megatron_rl.testing.reference import weights_by_hand

SCRIPT = ROOT / "examples" / "correction_bias.py"
# Advantages and weights reach the losses in float32.
TOLERANCE = 1e-6


def load() -> ModuleType:
    specification = importlib.util.spec_from_file_location("correction_bias", SCRIPT)
    module = importlib.util.module_from_spec(specification)
    sys.modules["correction_bias"] = module  # dataclasses look their module up
    specification.loader.exec_module(module)
    return module


example = load()


def two_tokens(sampler: list[float]):
    """One token decides. The trainer says 1/2 and 1/2; the first token has reward 1, the second 0."""
    logits = torch.zeros(1, 2, dtype=torch.float64)
    problem = (torch.tensor([0, 0]), torch.tensor([0, 1]), logits, torch.tensor([sampler], dtype=torch.float64).log())
    return example.Problem([(0,), (1,)], *problem, torch.tensor([1.0, 0.0], dtype=torch.float64))


# Sampler 3/4, 1/4: its mean reward is 3/4, so A = 1/4, -3/4. The gradient of log pi by the logits is (1/2, -1/2), (-1/2, 1/2).
# The true gradient is pi_1 pi_2 (1 - 0) = 1/4 by the first logit, -1/4 by the second: its square is 1/8. A score's square is 1/2.
# none: mean 3/4 1/4 1/2 + 1/4 3/4 1/2 = 3/16, so 3/4 of the truth; E|g|^2 = 3/4 1/16 1/2 + 1/4 9/16 1/2 = 12/128, less the mean's
#   square 2 (3/16)^2 = 9/128 is 3/128.
# tis: w = 2/3 and 2: mean 1/16 + 3/16 = 1/4, no bias; E|g|^2 = 4/9 3/4 1/32 + 4 1/4 9/32 = 28/96, less 1/8 is 1/6.
# mask [0.5, 1.5]: the second token has w = 2 and is dropped: mean 3/32, 3/8 of the truth; E|g|^2 = 3/128, less 2 (3/32)^2 is 3/512.
BY_HAND = {
    "none": (example.NONE, 1 / 4, 3 / 128),
    "tis": (CorrectionSettings(kind="tis", high=2.0), 0.0, 1 / 6),
    "mask": (CorrectionSettings(kind="mask", low=0.5, high=1.5), 5 / 8, 3 / 512),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_the_figures_of_two_tokens_are_those_by_hand(name):
    correction, bias, variance = BY_HAND[name]
    found = example.figures(two_tokens([0.75, 0.25]), two_tokens([0.5, 0.5]), "grpo", correction, "trainer", ("a",))
    for aggregation, *numbers in found:
        assert numbers == pytest.approx([bias, 1.0, math.sqrt(variance * 8)], abs=TOLERANCE), aggregation


@pytest.mark.parametrize("aggregation", ["sample_mean", "prompt_mean", "token_mean", "constant"])
def test_mean_and_variance_are_those_of_all_steps_one_by_one(aggregation):
    """Seven responses of one to three tokens, three samples of two prompts: 343 steps."""
    prompts, problem = ("a", "a", "b"), example.make_problem(3, 0.2, vocabulary=2, length=3)
    gradients = problem.sample_gradients("grpo", CorrectionSettings(kind="tis"), "trainer")
    mean, square = torch.zeros_like(gradients[0]), 0.0
    for step in itertools.product(range(len(problem.responses)), repeat=len(prompts)):
        samples = [
            StepSample(tokens=[0], loss_mask=[1] * len(problem.responses[number]), prompt_id=prompt, advantage=0.0)
            for number, prompt in zip(step, prompts, strict=True)
        ]
        weights = weights_by_hand(samples, aggregation, divisor=1.0)
        gradient = sum(weight * gradients[number] for weight, number in zip(weights, step, strict=True))
        chance = math.prod(float(problem.drawn[number]) for number in step)
        mean, square = mean + chance * gradient, square + chance * float(gradient.square().sum())
    found, variance = example.moments(problem, gradients, aggregation, prompts)
    torch.testing.assert_close(found, mean, rtol=TOLERANCE, atol=TOLERANCE)
    assert variance == pytest.approx(square - float(mean.square().sum()), rel=1e-5)


def test_the_responses_are_all_and_the_gap_is_the_one_asked_for():
    problem = example.make_problem(0, 0.3)
    assert len({*problem.responses}) == 31 and float(problem.drawn.sum()) == pytest.approx(1.0, abs=1e-12)
    assert problem.gap == pytest.approx(0.3, abs=1e-9)


def test_at_a_first_update_the_losses_with_a_ratio_to_the_trainer_have_one_gradient():
    """So a correction is chosen without the loss."""
    problem = example.make_problem(1, 0.1)
    for correction in (example.NONE, CorrectionSettings(kind="tis", level="sequence_sum", high=2.0)):
        grpo = problem.sample_gradients("grpo", correction, "trainer")
        for loss in (name for name in policy_loss_names() if get_policy_loss(name).anchor == "old"):
            found = problem.sample_gradients(loss, correction, "trainer")
            torch.testing.assert_close(found, grpo, rtol=1e-6, atol=1e-6, msg=loss)


def test_every_correction_has_a_row():
    assert {correction.kind for correction in example.CORRECTIONS} == {*correction_names()}


def test_what_the_page_advises(figures):
    bias, cosine, noise = ({key: getattr(line, field) for key, line in figures.items()} for field in ("bias", "cosine", "noise"))
    for gap in (0.03, 0.3):
        # A token-level mask turns the gradient farther away than no correction does.
        assert cosine["mask, token, [0.5, 2]", gap] < cosine["none", gap] - 0.03
        # The sample's product with a cap has the least bias of all that have a bound.
        assert (
            min((bias[name, gap], name) for name, at in bias if at == gap and "1e+08" not in name)[1] == "tis, sequence_sum, high 2"
        )
        assert bias["tis, sequence_mean, high 2", gap] < bias["tis, token, high 2", gap] < bias["none", gap]
    assert bias["mask, token, [0.5, 2]", 0.03] > bias["none", 0.03]
    # Ratios beyond the cap 1e8 do not occur at the small gap.
    assert bias["tis, sequence_sum, high 1e+08", 0.03] < 1e-3
    assert noise["tis, sequence_sum, high 1e+08", 0.3] > 10 * noise["none", 0.3]


def test_a_clip_of_the_ratio_to_the_sampler_is_a_mask_of_tokens():
    """So grpo with the sampler's log-probabilities as old ones is farther off than reinforce, which has no ratio."""
    lines = {
        loss: next(line for line in example.mean_lines(0.03, loss, example.NONE, "sampler") if line.aggregation == "constant")
        for loss in ("grpo", "cispo", "reinforce")
    }
    assert lines["grpo"].bias > lines["reinforce"].bias + 0.1
    assert lines["cispo"].bias < lines["reinforce"].bias


@pytest.fixture(scope="module")
def figures():
    return {
        (example.name_of(correction), gap): next(
            line for line in example.mean_lines(gap, "grpo", correction, "trainer") if line.aggregation == "constant"
        )
        for correction in example.CORRECTIONS
        for gap in (0.03, 0.3)
    }


def test_the_command_writes_a_row_for_each_combination_and_draws(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib")
    pytest.importorskip("tqdm", reason="the progress needs tqdm")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--problems", "1", "--gaps", "0.1", "--plot", "bias.png", "--csv", "bias.csv"])
    example.main()
    assert capsys.readouterr().out.count("\n") == 1 + len(example.CORRECTIONS)
    with open("bias.csv", newline="") as file:
        rows = [*csv.DictReader(file)]
    combinations = {(row["loss"], row["correction"], row["old"], row["aggregation"]) for row in rows}
    assert len(combinations) == len(rows) == 4 * len([*example.combinations()])
    assert (tmp_path / "bias.png").read_bytes().startswith(b"\x89PNG")
