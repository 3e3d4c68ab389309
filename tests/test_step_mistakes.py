"""check_step names the mistake: each row of the table is planted in a copy of examples/own_loop.py, which two ranks run."""

from __future__ import annotations

import sys

import pytest
import torch
from helpers import ROOT, pool_of

from megatron_rl.errors import ConfigError
from megatron_rl.testing.step_check import check_step

pytestmark = pytest.mark.megatron

pool = pool_of(2)
LOOP = (ROOT / "examples" / "own_loop.py").read_text(encoding="utf-8")
WEIGHTS = 'sample_token_weights("prompt_mean", counts, totals, prompt_token_counts=prompt_counts)'
LOSS = "output = grpo_loss(logits.flatten(0, 1), labels, old_here, advantages[index], mask, bounds, weights[rows])"
UNSCALED = """def scale_for_schedule(loss, *counts, **others):
    return loss, torch.ones((), dtype=torch.int32), {"policy/loss": torch.stack([loss.detach(), torch.tensor(1.0)])}


def main():"""
# The value of GRPO without its clip, and half of the squared ratio in place of the ratio.
SQUARED = """from types import SimpleNamespace
        new = torch.log_softmax(logits.flatten(0, 1), -1).gather(1, labels[:, None])[:, 0]
        squared = (2 * (new - old_here)).exp() / 2 * advantages[index].repeat_interleave(LENGTH)
        output = SimpleNamespace(loss=-(squared * mask * weights[rows].repeat_interleave(LENGTH)).sum())"""

# mistake -> what stands in the loop, what is put in its place, words of the message.
MISTAKES = {
    "aggregation of another name": (WEIGHTS, 'sample_token_weights("sample_mean", counts, totals)', "as under sample_mean"),
    "prompt groups lost": ("[prompts[index] for index in mine]", "mine", "as if each sample were a prompt of its own"),
    "labels not moved by one": (".roll(-1, 1)", "", "the labels are not moved by one"),
    "mask one row late": ("positions - (PROMPT - 1)  #", "positions - PROMPT  #", "the mask is one row late"),
    "another derivative": (LOSS, SQUARED, "the loss has another derivative"),
    "no scale_for_schedule": ("def main():", UNSCALED, "0.166667 of expected = 1/(dp x micro-batches)"),
    "one micro-batch in the scale": (
        "output.loss, len(batches), totals",
        "output.loss, 1, totals",
        "0.333333 of expected = 1/micro-batches:",
    ),
    # Seven above, and more:
    "another temperature": ("grpo_loss(logits.flatten(0, 1),", "grpo_loss(logits.flatten(0, 1) / 0.7,", "are at temperature 0.7,"),
    "token_mean": (WEIGHTS, 'sample_token_weights("token_mean", counts, totals)', "as under token_mean, or"),
    "lengths with padding": (
        WEIGHTS,
        'sample_token_weights("sample_mean", torch.full_like(counts, LENGTH - PROMPT), totals)',
        "as under constant",
    ),
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
    "mask over padding": (
        "(places < lengths[:, None])",
        "(places < LENGTH - PROMPT + 0 * lengths[:, None])",
        "rows too many, of prompts, padding",
    ),
    "mask without the last token": (
        "< lengths[:, None])",
        "< lengths[:, None] - 1)",
        "the mask is one token short: the last token",
    ),
    "labels of other samples": ("tokens[index].roll", "tokens[rows].roll", "rows are of other rows: token"),
    "a micro-batch lost": ("output.loss, len", "output.loss * (rows[0] == 0), len", "lost: 16 of 24 samples"),
    "advantages of other samples": ("advantages[index], mask", "advantages[rows], mask", "the advantages are in another order"),
    "advantages normalised twice": (
        "advantages[index], mask",
        "((advantages - advantages.mean()) / advantages.std())[index], mask",
        "once more, over the step",
    ),
    "advantages normalised on each micro-batch": (
        "advantages[index], mask",
        "(advantages[index] - advantages[index].mean()), mask",
        "once more, over each micro-batch",
    ),
    "the objective for the loss": ("output.loss, len", "-output.loss, len", "with the other sign"),
    "no old log-probabilities": ("old_here, advantages", "None, advantages", "every ratio is 1"),
    "old log-probabilities one late": ("old[index].flatten()", "old[index].roll(1, 1).flatten()", "are one token late"),
    "another loss": ("grpo_loss(logits", "gspo_loss(logits", "the loss is gspo"),
    "no clip": ("weights[rows])  #", "weights[rows], clip_ratio_low=0.999, clip_ratio_high=1e3)  #", "the ratio has no clip"),
    "another clip": ("weights[rows])  #", "weights[rows], clip_ratio_low=0.1, clip_ratio_high=0.1)  #", "the clip is another"),
}


MISTAKES["an entropy term"] = (
    "output.loss, len",
    "output.loss + 0.01 * (torch.softmax(logits, -1) * torch.log_softmax(logits, -1)).sum(-1).flatten()[mask].sum(), len",
    "the loss has an entropy term",
)
MISTAKES["a mean over rows"] = ("output.loss, len", "output.loss / (len(rows) * LENGTH), len", "= 1/rows: the loss is a mean over")
MISTAKES["weights of other samples"] = ("weights[rows])", "weights[rows].flip(0))", "its advantage or its weight is another")


OWN_LOSS = """
@register_policy_loss("steep", level="token", parameters=(Parameter("steepness", 5.0, "how steep"),))
def steep(log_ratio, advantages, *, steepness):
    return -advantages * torch.tanh(steepness * (bounded_exp(log_ratio) - 1)) / steepness


def main():"""


class Passed(Exception):
    """The loop's check found nothing."""


def planted(mistake: str) -> str:
    old, new, _ = MISTAKES[mistake]
    assert LOOP.count(old) == 1, f"{old} stands {LOOP.count(old)} times in examples/own_loop.py"
    return LOOP.replace(old, new)


def run_loop(rank: int, source: str) -> str:
    """What the loop's check raises, empty where it passes. The ranks are this pool's."""
    from megatron_rl import gspo_loss
    from megatron_rl.layout.groups import SINGLE

    loop: dict = {"__name__": "loop", "gspo_loss": gspo_loss, "SINGLE": SINGLE}
    exec(compile(source, "own_loop.py", "exec"), loop)
    loop["initialize_ranks"] = lambda **sizes: torch.device("cpu")

    def checked(*arguments, **settings):
        check_step(*arguments, **settings)
        raise Passed

    loop["check_step"] = checked
    sys.argv = ["own_loop.py"]
    try:
        loop["main"]()
    except ConfigError as error:
        return str(error)
    except Passed:
        return ""
    raise AssertionError("the loop did not check itself")


def test_the_loop_as_it_is_passes(pool):
    assert pool.run(run_loop, LOOP) == ["", ""]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_has_its_name_on_every_rank(pool, mistake):
    found = pool.run(run_loop, planted(mistake))
    assert all(MISTAKES[mistake][2] in message for message in found), found
    assert max(map(len, found)) < 400, "a message is a name and what to do"


@pytest.mark.parametrize(
    ("in_loop", "in_config", "message"),
    [
        ("", "", None),
        ("", "steepness: 2.0", "the loss has its default parameters: pass loss_parameters={'steepness': 2.0} to it"),
        ("steepness: 2.0", "", "Compare with the function steep steepness: 2.0 at steepness=5, the loss_parameters of config"),
    ],
)
def test_a_loss_of_ones_own_is_compared_with_its_function_at_the_parameters_of_config(in_loop, in_config, message, pool):
    def given(text: str) -> str:
        return f", loss_parameters={{{text.replace('steepness', repr('steepness'))}}}" if text else ""

    call = LOSS.replace("grpo_loss(", 'policy_loss("steep", ').replace("weights[rows])", f"weights[rows]{given(in_loop)})")
    source = LOOP.replace(LOSS, call).replace('policy_loss="grpo"', f'policy_loss="steep"{given(in_config)}')
    source = source.replace("def main():", OWN_LOSS).replace(
        "count_step, grpo_loss", "Parameter, bounded_exp, count_step, policy_loss"
    )
    source = source.replace("import Parameter,", "import register_policy_loss, Parameter,")
    name = f"steep {in_loop}{in_config and f'beside {in_config}'}"  # a name is registered once
    found = pool.run(run_loop, source.replace('"steep"', f'"{name}"'))
    assert found == ["", ""] if message is None else all(message in one for one in found), found
