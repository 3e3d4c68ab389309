"""check_step names the mistake: each row of the table is planted in a copy of examples/own_loop.py, which two ranks run.

The loop trains a loss whose tokens have a ratio each, and one whose samples have; at the end one of the user's own."""

from __future__ import annotations

import sys
import warnings

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

OF_SAMPLES = "each sample's tokens are off by a factor of their own: its advantage, its weight or its ratio is another"
# mistake -> what stands in the loop, what is put in its place, words of the message.
MISTAKES = {
    "aggregation of another name": (WEIGHTS, 'sample_token_weights("sample_mean", counts, totals)', "as under sample_mean"),
    "prompt groups lost": ("[prompts[index] for index in mine]", "mine", "as if each sample were a prompt of its own"),
    "labels not moved by one": (".roll(-1, 1)", "", "the labels are not moved by one"),
    "mask one row late": ("positions - (PROMPT - 1)  #", "positions - PROMPT  #", "the mask is one row late"),
    "another derivative": (LOSS, SQUARED, "the loss has another derivative"),
    "no scale_for_schedule": ("def main():", UNSCALED, "undoes the 1/(dp x cp x micro-batches) of DDP"),
    "one micro-batch in the scale": (
        "output.loss, len(batches), totals",
        "output.loss, 1, totals",
        "0.333333 of expected = 1/micro-batches:",
    ),
    "another temperature": (
        "grpo_loss(logits.flatten(0, 1),",
        "grpo_loss(logits.flatten(0, 1) / 0.7,",
        "are at temperature 0.7, and config says 1: pass policy_temperature=1",
    ),
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
        "one token short: the last token",
    ),
    "labels of other samples": ("tokens[index].roll", "tokens[rows].roll", "rows are of other rows: token"),
    "a micro-batch lost": ("output.loss, len", "output.loss * (rows[0] == 0), len", "a part of the step is lost"),
    "the objective for the loss": ("output.loss, len", "-output.loss, len", "with the other sign"),
    "no old log-probabilities": ("old_here, advantages", "None, advantages", "every ratio is 1"),
    "old log-probabilities one late": ("old[index].flatten()", "old[index].roll(1, 1).flatten()", "are one token late"),
    "another loss": ("grpo_loss(logits", "gspo_loss(logits", "the loss is gspo"),
    "no clip": (
        "weights[rows])  #",
        "weights[rows], clip_ratio_low=0.999, clip_ratio_high=1e3)  #",
        "the ratio has no clip: pass the clip of config",
    ),
    "another clip": (
        "weights[rows])  #",
        "weights[rows], clip_ratio_low=0.09, clip_ratio_high=0.09)  #",
        "or the clip is another: ",
    ),
    "an entropy term": (
        "output.loss, len",
        "output.loss + 0.01 * (torch.softmax(logits, -1) * torch.log_softmax(logits, -1)).sum(-1).flatten()[mask].sum(), len",
        "or a term beside it: compare loss, clip and terms",
    ),
    "a mean over rows": ("output.loss, len", "output.loss / (len(rows) * LENGTH), len", "= 1/rows: the loss is a mean over"),
    "weights of other samples": ("weights[rows])", "weights[rows].flip(0))", OF_SAMPLES),
    "advantages with the other sign": ("advantages[index], mask", "-advantages[index], mask", "have the other sign"),
    "advantages of another scale": ("advantages[index], mask", "1.12 * advantages[index], mask", "gradient is 1.12 of expected"),
}
# Where each sample has one ratio: a moved old log-probability, an advantage and a weight look alike.
OF_ONE_RATIO = {
    "another clip": "or the clip is another: ",
    "mask one row late": "the mask is one row late",
    "old log-probabilities one late": OF_SAMPLES,
}


def training(policy_loss: str, source: str, low: float = 0.1, high: float = 0.12) -> str:
    """The loop with another loss."""
    if policy_loss == "grpo":
        return source
    clip = f"clip_ratio_low={low}, clip_ratio_high={high}"
    source = source.replace("grpo_loss(logits", f"{policy_loss}_loss(logits").replace("weights[rows])", f"weights[rows], {clip})")
    return source.replace('policy_loss="grpo"', f'policy_loss="{policy_loss}", {clip}')


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


def run_loop(rank: int, source: str) -> tuple[str, list[str]]:
    """What the loop's check raises, empty where it passes, and the warnings. The ranks are this pool's."""
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
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        error = None
        try:
            loop["main"]()
        except ConfigError as refusal:
            error = str(refusal)
        except Passed:
            error = ""
    assert error is not None, "the loop did not check itself"
    return error, [str(one.message) for one in found if str(one.message).startswith("check_step")]


def errors_of(pool, source: str) -> list[str]:
    return [error for error, _ in pool.run(run_loop, source)]


@pytest.mark.parametrize("policy_loss", ["grpo", "gspo"])
def test_the_loop_as_it_is_passes_and_its_ratios_show_each_setting(pool, policy_loss):
    assert pool.run(run_loop, training(policy_loss, LOOP)) == [("", []), ("", [])]


PLANTED = [(mistake, "grpo", words) for mistake, (_, _, words) in MISTAKES.items()]
PLANTED += [(mistake, "gspo", words) for mistake, words in OF_ONE_RATIO.items()]


@pytest.mark.parametrize(("mistake", "policy_loss", "words"), PLANTED)
def test_a_planted_mistake_has_its_name_on_every_rank(pool, mistake, policy_loss, words):
    found = errors_of(pool, training(policy_loss, planted(mistake)))
    assert all(words in message for message in found), found
    assert max(map(len, found)) < 500, "a message is a name and what to do"


def test_ratios_far_from_the_clip_are_said_to_hide_it(pool):
    """Each ratio of a sample is outside this clip, so another clip moves no gradient."""
    (error, said), (other, nothing) = pool.run(run_loop, training("gspo", LOOP, low=3e-4, high=4e-4))
    assert (error, other, nothing) == ("", "", [])
    [words] = said
    assert words.startswith("check_step: half and twice clip_ratio_low, half and twice clip_ratio_high give the gradient of this")


ON_THE_EDGE = """
    with torch.no_grad():
        now = torch.log_softmax(model(tokens, positions.expand(SAMPLES, -1), None).float(), -1)
    bounds = torch.where(advantages > 0, 1.12, 0.9).log() * (torch.arange(SAMPLES) % 2)
    old = now.gather(2, tokens.roll(-1, 1)[..., None])[..., 0] - bounds[:, None]
    places ="""


def test_ratios_on_the_edge_of_the_clip_are_no_mistake_of_the_loop(pool):
    """Rounding decides on which side they are."""
    assert LOOP.count("\n    places =") == 1
    for error in errors_of(pool, training("gspo", LOOP.replace("\n    places =", ON_THE_EDGE))):
        assert "a ratio within rounding of the clip may lie on either side" in error


def with_own_loss(source: str, name: str, in_loop: str = "", in_config: str = "") -> str:
    """The loop with `steep`; a name is registered once."""

    def given(text: str) -> str:
        return f", loss_parameters={{{text.replace('steepness', repr('steepness'))}}}" if text else ""

    call = LOSS.replace("grpo_loss(", 'policy_loss("steep", ').replace("weights[rows])", f"weights[rows]{given(in_loop)})")
    source = source.replace(LOSS, call).replace('policy_loss="grpo"', f'policy_loss="steep"{given(in_config)}')
    source = source.replace("def main():", OWN_LOSS).replace("count_step, grpo_loss", "Parameter, bounded_exp, count_step")
    source = source.replace(
        "from megatron_rl.testing", "from megatron_rl.policy_loss import policy_loss\nfrom megatron_rl.testing", 1
    )
    return source.replace("import Parameter,", "import register_policy_loss, Parameter,").replace('"steep"', f'"{name}"')


def test_a_loss_that_is_saturated_everywhere_is_not_called_cut_off(pool):
    """Its coefficients are 0, and the logits have a graph."""
    far = LOOP.replace("old[index].flatten()", "old[index].flatten() - 8")
    for error in errors_of(pool, with_own_loss(far, "saturated")):
        assert "or every token is clipped: compare old_log_probs with those of `samples`" in error, error


@pytest.mark.parametrize(
    ("in_loop", "in_config", "message"),
    [
        ("", "", None),
        ("", "steepness: 2.0", "the loss has another derivative"),
    ],
)
def test_a_loss_of_ones_own_is_compared_with_its_function_at_the_parameters_of_config(in_loop, in_config, message, pool):
    name = f"steep {in_loop}{in_config and f'beside {in_config}'}"
    found = errors_of(pool, with_own_loss(LOOP, name, in_loop, in_config))
    assert found == ["", ""] if message is None else all(message in one for one in found), found
