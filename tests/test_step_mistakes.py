"""check_step names the mistake: each row of the table is planted in a copy of examples/own_loop.py, which two ranks run.

The loop trains a loss whose tokens have a ratio each, one whose samples have, and one of the user's own. Without the watch the
check sees the gradient alone, as it does of a loss that is not of this package."""

from __future__ import annotations

import sys
import warnings
from contextlib import nullcontext

import pytest
import torch
from helpers import ROOT, pool_of

from megatron_rl.errors import ConfigError
from megatron_rl.testing import step_check
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

# GRPO with old over new.
SWAPPED = """from types import SimpleNamespace
        new = torch.log_softmax(logits.flatten(0, 1), -1).gather(1, labels[:, None])[:, 0]
        ratio, advantage = (old_here - new).exp(), advantages[index].repeat_interleave(LENGTH)
        value = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        output = SimpleNamespace(loss=(value * mask * weights[rows].repeat_interleave(LENGTH)).sum())"""

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
    "no clip": (
        "weights[rows])  #",
        "weights[rows], clip_ratio_low=0.999, clip_ratio_high=1e3)  #",
        "the clip is another: the loss has clip_ratio_low=0.999",
    ),
    "another clip": ("weights[rows])  #", "weights[rows], clip_ratio_low=0.1, clip_ratio_high=0.1)  #", "the clip is another"),
    "an entropy term": (
        "output.loss, len",
        "output.loss + 0.01 * (torch.softmax(logits, -1) * torch.log_softmax(logits, -1)).sum(-1).flatten()[mask].sum(), len",
        "the loss has an entropy term",
    ),
    "a mean over rows": ("output.loss, len", "output.loss / (len(rows) * LENGTH), len", "= 1/rows: the loss is a mean over"),
    "weights of other samples": ("weights[rows])", "weights[rows].flip(0))", "its weight is another. Compare token weights"),
    "advantages with the other sign": ("advantages[index], mask", "-advantages[index], mask", "have the other sign"),
    "advantages normalised in each prompt": (
        "advantages[index], mask",
        "(advantages - advantages.view(-1, 3).mean(1).repeat_interleave(3))[index], mask",
        "once more, over each prompt",
    ),
    "advantages of another scale": ("advantages[index], mask", "1.12 * advantages[index], mask", "once more, over the step"),
    "weights of another scale": ("weights[rows])", "1.12 * weights[rows])", "token_weights are 1.12 of those of prompt_mean"),
    "old and new swapped": (LOSS, SWAPPED, "old and new are swapped in the ratio: it is log_probs - old_log_probs"),
    "old log-probabilities of other samples": ("old[index]", "old[rows]", "are others, as that of token 0 of sample 2: -"),
}

# Of a loss whose samples have one ratio each, in place of the words above. A sample that is clipped is not counted as lost.
CLIPPED = "clip_ratio_low=0.1, clip_ratio_high=0.12 to the loss"
OF_SAMPLES = {
    "another clip": CLIPPED,
    "no clip": CLIPPED,
    "old and new swapped": "the loss has another derivative",  # each token has a ratio
    "a micro-batch lost": "of 24 samples have no gradient, as sample 8 in micro-batch 1 of rank 0, 2 of rank 0",
}
# By the gradient alone. What one ratio a sample hides has the names of all that it can be.
HIDDEN = "its advantage, its weight or its ratio is another"
NO_COUNT = "off by the same factor\n    it is no count of the step: compare advantages and token weights"
BY_GRADIENT = {
    "advantages of another scale": (NO_COUNT, NO_COUNT),
    "weights of another scale": (NO_COUNT, NO_COUNT),
    "no clip": ("the ratio has no clip", "the ratio has no clip"),
    "another clip": ("the clip is another", "the clip is another"),
    "another loss": ("the loss is gspo", "the clip is the default"),
    "old log-probabilities one late": ("are one token late", HIDDEN),
    "old log-probabilities of other samples": ("the loss has another derivative", HIDDEN),
    "mask one row late": ("the mask is one row late", "the mask is one row late"),
    "weights of other samples": ("its advantage or its weight is another", HIDDEN),
    "advantages with the other sign": ("have the other sign", "have the other sign"),
    "advantages of other samples": ("are in another order", "are in another order"),
    "advantages normalised in each prompt": ("once more, over each prompt", HIDDEN),
}

DECAYING = """
@register_policy_loss(
    "decaying", level="sequence", clip_ratios=(0.1, 0.12), needs=("token_counts",),
    parameters=(Parameter("reference_length", 4.0, "up to it the upper bound is whole"),),
)
def decaying(log_ratio, advantages, *, token_counts, reference_length, clip_ratio_low, clip_ratio_high):
    ratio = bounded_exp(log_ratio)
    high = clip_ratio_high * (reference_length / token_counts).clamp(max=1.0) ** 0.5
    clipped = torch.minimum(ratio.clamp(min=1 - clip_ratio_low), 1 + high)
    return -torch.minimum(ratio * advantages, clipped * advantages)
"""
NAMES = "count_step, policy_loss, register_policy_loss, Parameter, bounded_exp"


def training(policy_loss: str, source: str, tag: str = "", low: float = 0.1, high: float = 0.12) -> str:
    """The loop with another loss. A name is registered once, so a loss of one's own has a tag."""
    if policy_loss == "grpo":
        return source
    declaration, name = ("", policy_loss) if policy_loss == "gspo" else (DECAYING, f"decaying {tag}")
    call = f"""{declaration.replace('"decaying"', repr(name))}

def grpo_loss(*given, **keywords):
    return policy_loss("{name}", *given, **{{"clip_ratio_low": {low}, "clip_ratio_high": {high}, **keywords}})


def main():"""
    source = source.replace("def main():", call).replace("count_step, grpo_loss", NAMES)
    return source.replace('policy_loss="grpo"', f'policy_loss="{name}", clip_ratio_low={low}, clip_ratio_high={high}')


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


def run_loop(rank: int, source: str, is_watched: bool = True) -> tuple[str, list[str]]:
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
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        if not is_watched:
            patch.setattr(step_check, "watching_losses", nullcontext)
        error = None
        try:
            loop["main"]()
        except ConfigError as refusal:
            error = str(refusal)
        except Passed:
            error = ""
    assert error is not None, "the loop did not check itself"
    return error, [str(one.message) for one in found if str(one.message).startswith("check_step")]


def errors_of(pool, source: str, is_watched: bool = True) -> list[str]:
    return [error for error, _ in pool.run(run_loop, source, is_watched)]


@pytest.mark.parametrize("policy_loss", ["grpo", "gspo", "decaying"])
def test_the_loop_as_it_is_passes_and_its_ratios_show_each_setting(pool, policy_loss):
    assert pool.run(run_loop, training(policy_loss, LOOP, "as it is")) == [("", []), ("", [])]


# A loss of the user's own is compared as a built-in one of its level, so it meets the mistakes that a ratio of the sample hides.
PLANTED = [(mistake, policy_loss) for mistake in MISTAKES for policy_loss in ("grpo", "gspo")]
PLANTED += [(mistake, "decaying") for mistake in BY_GRADIENT]


@pytest.mark.parametrize(("mistake", "policy_loss"), PLANTED)
def test_a_planted_mistake_has_its_name_on_every_rank(pool, mistake, policy_loss):
    found = errors_of(pool, training(policy_loss, planted(mistake), mistake))
    words = MISTAKES[mistake][2]
    if policy_loss != "grpo":
        words = OF_SAMPLES.get(mistake, words)
    if (policy_loss, mistake) == ("gspo", "another loss"):  # with its own clip
        words = CLIPPED
    assert all(words in message for message in found), found
    assert max(map(len, found)) < 400, "a message is a name and what to do"


@pytest.mark.parametrize("policy_loss", ["grpo", "gspo"])
@pytest.mark.parametrize("mistake", BY_GRADIENT)
def test_the_gradient_alone_shows_a_mistake_or_all_that_it_can_be(pool, mistake, policy_loss):
    found = errors_of(pool, training(policy_loss, planted(mistake)), is_watched=False)
    assert all(BY_GRADIENT[mistake][policy_loss == "gspo"] in message for message in found), found


IN_LOOP = ("weights[rows])", "weights[rows], loss_parameters={'reference_length': 1.0})")


def test_a_parameter_of_the_loop_has_its_name(pool):
    found = errors_of(pool, training("decaying", LOOP.replace(*IN_LOOP), "at another length"))
    words = "the loss has reference_length=1, and config has not: pass loss_parameters={'reference_length': 4.0} to it"
    assert all(words in message for message in found), found


def test_clipped_samples_are_not_called_lost(pool):
    """By the gradient alone: the loop clips more of them."""
    found = errors_of(pool, training("decaying", LOOP.replace(*IN_LOOP), "by its gradient"), is_watched=False)
    assert all("the clip is another: " in message and "`loss_parameters`" in message for message in found), found


@pytest.mark.parametrize("is_watched", [True, False])
def test_ratios_far_from_the_clip_are_said_to_hide_it(pool, is_watched):
    """Each ratio of a sample is outside this clip, so the parameter moves no gradient. The report is not compared."""
    source = LOOP.replace(*IN_LOOP).replace(' reported_loss="policy/loss",', "")
    source = training("decaying", source, f"far from the clip {is_watched}", low=3e-4, high=4e-4)
    (error, said), (other, nothing) = pool.run(run_loop, source, is_watched)
    assert (error, other, nothing) == ("", "", [])
    assert said[0].startswith("check_step: half and twice clip_ratio_low, clip_ratio_high, reference_length give the gradient of")
    assert len(said) == 1 + is_watched
    assert not is_watched or "has the right gradient, but the loss has reference_length=1, and config has not" in said[1]


def test_a_report_that_alone_is_wrong_says_what_moves_it(pool):
    source = training("decaying", LOOP.replace(*IN_LOOP), "wrong in the report", low=3e-4, high=4e-4)
    for error in errors_of(pool, source, is_watched=False):
        assert "the gradient is right: compare the report, and clip and loss_parameters" in error


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
        assert "the gradient is right but for" in error
        assert "whose ratio lies within rounding of the clip" in error


def with_own_loss(source: str, name: str, in_loop: str = "", in_config: str = "") -> str:
    """The loop with `steep`; a name is registered once."""

    def given(text: str) -> str:
        return f", loss_parameters={{{text.replace('steepness', repr('steepness'))}}}" if text else ""

    call = LOSS.replace("grpo_loss(", 'policy_loss("steep", ').replace("weights[rows])", f"weights[rows]{given(in_loop)})")
    source = source.replace(LOSS, call).replace('policy_loss="grpo"', f'policy_loss="steep"{given(in_config)}')
    source = source.replace("def main():", OWN_LOSS).replace(
        "count_step, grpo_loss", "Parameter, bounded_exp, count_step, policy_loss"
    )
    return source.replace("import Parameter,", "import register_policy_loss, Parameter,").replace('"steep"', f'"{name}"')


@pytest.mark.parametrize(
    ("is_watched", "words"),
    [
        (True, "old log-probabilities are others, as that of token 0 of sample 0: -"),
        (False, "or every token is clipped or saturated: compare old_log_probs with those of `samples`"),
    ],
)
def test_a_loss_that_is_saturated_everywhere_is_not_called_cut_off(pool, is_watched, words):
    """Its coefficients are 0, and the logits have a graph: what it was given is compared first."""
    far = LOOP.replace("old[index].flatten()", "old[index].flatten() - 8")
    for error in errors_of(pool, with_own_loss(far, f"saturated {is_watched}"), is_watched):
        assert words in error and ("no gradient reaches" in error) == (not is_watched), error


@pytest.mark.parametrize(
    ("in_loop", "in_config", "message"),
    [
        ("", "", None),
        ("", "steepness: 2.0", "the loss has steepness=5, and config has not: pass loss_parameters={'steepness': 2.0} to it"),
        ("steepness: 2.0", "", "the loss has steepness=2, and config has not: pass loss_parameters={'steepness': 5.0} to it"),
    ],
)
def test_a_loss_of_ones_own_is_compared_with_its_function_at_the_parameters_of_config(in_loop, in_config, message, pool):
    name = f"steep {in_loop}{in_config and f'beside {in_config}'}"
    found = errors_of(pool, with_own_loss(LOOP, name, in_loop, in_config))
    assert found == ["", ""] if message is None else all(message in one for one in found), found
