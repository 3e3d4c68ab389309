"""The rules and warnings against the launches of validation_cases, and the tables that they read."""

from __future__ import annotations

import re

import pytest
import torch
from validation_cases import ALLOWED, GSPO, REFUSED, WARNED, judge, launch

from megatron_rl import loss_hub
from megatron_rl.aggregation import StepTotals, sample_token_weights
from megatron_rl.config import PolicyLossConfig, Route, flag_fields
from megatron_rl.validation import (
    ROUTES_OF_FLAG,
    RULES,
    LaunchOptions,
    config_warnings,
    field_of,
    find_problems,
    flag_of,
)

REFUSED_ROWS = [(rule_name, *row) for rule_name, rows in REFUSED.items() for row in rows]
ALLOWED_ROWS = [(rule_name, row) for rule_name, rows in ALLOWED.items() for row in rows]


@pytest.fixture(autouse=True)
def only_built_in_names(monkeypatch):
    """Names that other tests registered would show up in messages, and ours in theirs."""
    for registry in ("_AGGREGATIONS", "_POLICY_LOSSES"):
        built_in = {name: entry for name, entry in vars(loss_hub)[registry].items() if is_built_in(entry)}
        monkeypatch.setattr(loss_hub, registry, built_in)


@pytest.fixture(autouse=True)
def own_losses_are_declared(only_built_in_names):
    """Apart from the names, because the pages of the built-in ones take that fixture too."""
    import own_losses

    own_losses.declare()


def is_built_in(entry) -> bool:
    function = entry.function
    return function.__module__.startswith("megatron_rl.")


@pytest.mark.parametrize(("rule_name", "settings", "says"), REFUSED_ROWS, ids=str)
def test_the_rule_refuses_and_says_why_and_what_to_do(rule_name, settings, says):
    """FB-74, FB-12, FB-13: nonsense and contradictions never start a run; the message alone is enough to mend them."""
    (message,) = judge(rule_name, settings)
    assert re.search(says, message), message
    names = {**settings, **settings.get("host_switches", {}), **settings.get("loss_parameters", {})}
    assert any(name in message or flag_of(name) in message for name in names)
    assert message in find_problems(*launch(settings))


@pytest.mark.parametrize(("rule_name", "settings"), ALLOWED_ROWS, ids=str)
def test_the_rule_allows_what_is_right(rule_name, settings):
    """Catches a rule that refuses its own boundary, or fires without the fact it needs."""
    assert judge(rule_name, settings) == []


def test_each_rule_has_a_row_that_it_refuses_and_one_that_it_allows():
    names = [function.__name__ for function in RULES]
    assert names == list(REFUSED) == list(ALLOWED)
    assert all(REFUSED.values())
    assert all(ALLOWED.values())


def test_the_defaults_are_sound_on_every_route():
    for route in Route:
        assert find_problems(PolicyLossConfig(), LaunchOptions(route=route)) == []


@pytest.mark.parametrize(
    ("elsewhere", "here"),
    [
        ("seq-mean-token-mean", "sample_mean"),
        ("grpo", "sample_mean"),
        ("seq-mean-token-sum", "constant with --loss-aggregation-divisor 1"),
        ("luspo", "constant with --loss-aggregation-divisor 1"),
        ("seq-mean-token-sum-norm", "constant here, but verl does not divide by the samples"),
        ("dr_grpo", "constant"),
        ("token-mean", "token_mean"),
        ("token", "token_mean"),
        ("dapo", "token_mean"),
    ],
)
def test_a_name_from_another_framework_leads_to_ours(elsewhere, here):
    """Whoever carries a configuration over learns the name of the same step instead of a list to guess from."""
    (message,) = judge("loss_aggregation_is_known", {"loss_aggregation": elsewhere})
    assert re.search(f"{elsewhere}' is (spelled )?{here}", message), message


def test_each_field_has_a_row_in_the_route_table_and_each_row_a_field():
    assert [field_of(flag) for flag in ROUTES_OF_FLAG] == [field.name for field in flag_fields()]


def test_the_reducer_route_honours_what_a_reducer_can_see():
    """Catches a flag that a four-argument reducer, which sees neither logits nor a model, would swallow."""
    aggregation_flags = ["--loss-aggregation", "--loss-aggregation-divisor"]
    group_flags = ["--samples-per-prompt", "--allow-partial-prompt-groups"]
    group_flags.append("--one-sample-per-rollout")
    assert [flag for flag in ROUTES_OF_FLAG if Route.REDUCER in ROUTES_OF_FLAG[flag]] == aggregation_flags + group_flags


@pytest.mark.parametrize(("settings", "says"), WARNED, ids=str)
def test_a_setting_that_rarely_means_what_it_says_gives_one_warning(settings, says):
    """FB-72: a GSPO clip of 0.2 never clips. FB-75: coefficients gain when only the policy loss is rescaled."""
    (warning,) = config_warnings(launch(settings)[0])
    assert re.search(says, warning), warning


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="defaults"),
        pytest.param(GSPO, id="the paper's clip"),
        pytest.param({**GSPO, "clip_ratio_low": 0.05, "clip_ratio_high": 0.05}, id="at the limit"),
        pytest.param({"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}, id="grpo clips at 0.2"),
        pytest.param({"kl_coefficient": 0.1, "entropy_coefficient": 0.01}, id="coefficients under sample_mean"),
        pytest.param({"loss_aggregation": "token_mean"}, id="no coefficient"),
    ],
)
def test_a_usual_setting_gives_no_warning(settings):
    """A warning at every start is read by nobody."""
    assert config_warnings(launch(settings)[0]) == []


def test_the_clip_warning_names_the_defaults():
    (warning,) = config_warnings(launch(WARNED[0][0])[0])
    assert tuple(float(value) for value in re.findall(r"0\.000\d", warning)) == loss_hub.get_policy_loss("gspo").clip_ratios


@pytest.mark.parametrize(
    ("aggregation", "divisor", "strength"),
    [
        # Samples of 2, 4 and 6 tokens: 4 on average. The policy's weights add up to 4 / 16, the regularisers' to 1.
        pytest.param("constant", 16.0, 16 / 4, id="divisor over mean tokens"),
        pytest.param("token_mean", None, 1.0, id="equal over all"),
        pytest.param("prompt_mean", None, 1.0, id="equal over all, by prompt"),
    ],
)
def test_the_factor_that_the_warning_claims_is_that_of_the_weights(aggregation, divisor, strength):
    """FB-75: the number told to the user is the one the loss has."""
    counts, totals = torch.tensor([2, 4, 6]), StepTotals(num_samples=3, num_prompts=2, num_tokens=12)
    by_prompt = torch.tensor([6, 6, 6])
    weights = sample_token_weights(aggregation, counts, totals, prompt_token_counts=by_prompt, divisor=divisor)
    assert 1 / float((weights * counts).sum()) == pytest.approx(strength)
