"""A sixth door in sixty lines: it is judged, explained and exact, with no other file than its own."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from conftest import ROOT
from dense_row_cases import (
    AGGREGATIONS,
    Result,
    RowCase,
    gradients_of,
    largest_error,
    padded,
    parameters_of,
    samples_of,
    too_large,
    truth,
)
from toy_door import DOOR, ToyLoss

from megatron_rl.aggregation_record import Formula
from megatron_rl.config import PolicyLossConfig
from megatron_rl.errors import ConfigError
from megatron_rl.hosts import door_line
from megatron_rl.hosts.dense_rows import carry_prompt_weights
from megatron_rl.hosts.door_settings import OnceRead, modes
from megatron_rl.hosts.settings import Settings
from megatron_rl.loss_hub import get_loss_aggregation
from megatron_rl.step_counts import StepTotals
from megatron_rl.testing.layout_step import StepSample
from megatron_rl.testing.reference import CLIPS, DIVISOR

OURS = "toy.loss=megatron_rl.grpo.token_mean"


def wrong(*words: str) -> str:
    return " ".join(f"{row.subject}: {row.text}" for row in door_line.judge(DOOR, ["toy.train", *words], dict) if row.is_wrong)


def test_a_sound_line_has_no_problem():
    assert not wrong(OURS, "toy.clip_high=0.28", "megatron_rl.importance_correction=tis", "other.setting=1")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["toy.loss=megatron_rl.grpo.prompt_mean"], "'prompt_mean' is no aggregation"),
        (["toy.loss=megatron_rl.gspoo.token_mean"], "did you mean megatron_rl.gspo.token_mean?"),
        ([OURS, "toy.clip_hi=0.28"], "did you mean toy.clip_high?"),
        ([OURS, "toy.clip_high=true"], "toy.clip_high=true is a switch, and must be a number"),
        ([OURS, "toy.shuffle=maybe"], "write true or false"),
        ([OURS, "toy.gamma=0.9"], "our losses do not read it; advantages are the trainer's"),
        ([OURS, "megatron_rl.importance_corection=tis"], "importance_corection=tis has no effect"),
        ([OURS, "loss=megatron_rl.gspo.token_mean"], "type its whole name, toy.loss=megatron_rl.gspo.token_mean"),
        ([OURS, "megatron_rl.importance_correction=tis", "sampler.top_p=0.9"], "every weight would be the kept mass"),
        (["toy.loss=megatron_rl.grpo.constant"], "grpo.constant needs its L: set megatron_rl.loss_aggregation_divisor"),
        (["toy.loss=megatron_rl.reinforce.token_mean", "toy.epochs=2"], "set toy.epochs=1, or take grpo"),
    ],
)
def test_a_wrong_line_is_refused_by_name(words, message):
    assert message in wrong(*words)


def test_what_explain_writes_is_what_doctor_reads():
    config = PolicyLossConfig(policy_loss="gspo", loss_aggregation="constant", loss_aggregation_divisor=512.0, clip_ratio_high=0.1)
    words, problems = door_line.write(DOOR, config)
    assert problems == [] and not wrong(*words)
    of_samples, of_step = DOOR.stages(Formula(N=-1, m_i=-1), needs_prompts=False, per_token=False)
    product = Formula()
    for _, factor, _ in (*of_samples, *of_step):
        product = product * factor
    assert product == Formula(N=-1, m_i=-1)


def test_settings_are_judged_again_where_one_has_changed():
    """At each call a host may hand over another config, or the same one with another value."""
    reader, given = OnceRead(DOOR), {"toy.loss": "megatron_rl.grpo.token_mean"}
    settings = Settings.of_names(given, DOOR.all_defaults)
    found = reader.read(settings)
    assert reader.read(settings) is found and found.config.clip_ratio_high is None
    given["toy.clip_high"] = 0.3
    assert reader.read(settings).config.clip_ratio_high == 0.3
    given["toy.clip_high"] = True
    with pytest.raises(ConfigError, match="toy.clip_high=true is a switch"):
        reader.read(settings)


@pytest.mark.parametrize("aggregation", [name for name in AGGREGATIONS if not get_loss_aggregation(name).needs_prompts])
def test_the_step_is_exact(aggregation):
    """Against float64; the loss computes in float32."""
    found = {}
    for loss in dict.fromkeys(loss for loss, _ in modes(DOOR).values() if CLIPS.get(loss)):
        case = RowCase(loss=loss, aggregation=aggregation, dp=2, sizes=(2, 5), num_samples=14)
        samples, log_probs = samples_of(case)
        words = {"toy.loss": f"megatron_rl.{loss}.{aggregation}"}
        words |= dict(zip(("toy.clip_low", "toy.clip_high"), CLIPS[loss], strict=True))
        words |= {f"megatron_rl.{name}": value for name, value in parameters_of(case).items()}
        if get_loss_aggregation(aggregation).takes_divisor:
            words["megatron_rl.loss_aggregation_divisor"] = DIVISOR
        ours = ToyLoss(Settings.of_names(words, DOOR.all_defaults, typed=words))
        found[str(case)] = largest_error(run_step(ours, case, samples, log_probs), *truth(case, samples, log_probs))
    assert found and not too_large(found)


def run_step(ours: ToyLoss, case: RowCase, samples: Sequence[StepSample], log_probs: Sequence[torch.Tensor]) -> Result:
    width = max(len(sample.loss_mask) for sample in samples)
    mask = padded([sample.loss_mask for sample in samples], width).bool()
    old = padded([sample.old_log_probs for sample in samples], width)
    advantages = torch.tensor([sample.advantage for sample in samples])[:, None] * mask
    step = StepTotals(num_samples=len(samples), num_prompts=None, num_tokens=int(mask.sum()))
    leaves, total = [values.float().requires_grad_() for values in log_probs], 0.0
    for batches in case.micro_batches():
        for rows in batches:
            new = torch.stack([torch.nn.functional.pad(leaves[i], (0, width - len(leaves[i]))) for i in rows])
            loss = ours(new, old[rows], advantages[rows], mask[rows], step, case.dp) / case.dp
            loss.backward()
            total += float(loss.detach())
    return Result(total, gradients_of(leaves), [])


def test_contributing_shows_this_door():
    guide, declaration = (ROOT / "CONTRIBUTING.md").read_text(), (ROOT / "tests" / "toy_door.py").read_text()
    assert declaration[declaration.index("DOOR: Door = Door(") : declaration.index("\n\n\nclass")] in guide
    assert len(declaration.splitlines()) <= 60


def test_a_marked_advantage_stays_a_number():
    """The smallest denormals, of either sign, would become NaN with a code in their last bits."""
    for length in range(1, 9):  # the code depends on it
        for scale in (0.0, 1e-45, 1e-40, 1e-37, 1.0):
            given = scale * torch.tensor([[1.0], [-1.0]]).expand(2, length)
            mask, counts = torch.ones(2, length, dtype=torch.bool), torch.tensor([length, length])
            found = carry_prompt_weights(given, mask, counts, torch.tensor([0, 0]), 1)
            # A mark changes 5 of 23 bits; what is not normal is 0.
            torch.testing.assert_close(found, given, rtol=16 * 2**-23, atol=1.2e-38)
