"""From a launch line or a merged YAML file to PolicyLossConfig: nothing dropped, ignored or changed on the way."""

from __future__ import annotations

import copy
import sys
from argparse import ArgumentParser, Namespace
from contextlib import suppress
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.arguments import add_megatron_rl_args, field_meanings, validate_megatron_rl_args
from megatron_rl.config import PolicyLossConfig, Route, flag_fields
from megatron_rl.declare import Parameter, clip_of, declared_parameters, get_policy_loss, policy_loss_names
from megatron_rl.errors import ConfigError
from megatron_rl.validation import field_of, flag_of

ALL = ("reducer", "custom_loss", "megatron_lm", "train")
NOT_REDUCER = ALL[1:]
TIS = ["--importance-correction", "tis"]
# flag: (value on a launch line, the field's value then, routes that honour it, what the launch needs beside it)
EFFECT_OF_FLAG = {
    "--policy-loss": ("gspo", "gspo", NOT_REDUCER, []),
    "--loss-aggregation": ("token_mean", "token_mean", ALL, []),
    "--loss-aggregation-divisor": ("8192", 8192.0, ALL, ["--loss-aggregation", "constant"]),
    "--samples-per-prompt": ("8", 8, ALL, []),
    "--allow-partial-prompt-groups": (None, True, ALL, ["--samples-per-prompt", "8"]),
    "--one-sample-per-rollout": (None, True, ("megatron_lm",), []),
    "--clip-ratio-low": ("0.1", 0.1, NOT_REDUCER, []),
    "--clip-ratio-high": ("0.28", 0.28, NOT_REDUCER, []),
    "--policy-temperature": ("0.7", 0.7, NOT_REDUCER, []),
    "--importance-correction": ("icepop", "icepop", NOT_REDUCER, []),
    "--importance-correction-level": ("sequence_mean", "sequence_mean", NOT_REDUCER, [*TIS, "--importance-correction-high", "2"]),
    "--importance-correction-low": ("0.5", 0.5, NOT_REDUCER, TIS),
    "--importance-correction-high": ("3", 3.0, NOT_REDUCER, TIS),
    "--off-policy-sequence-delta": ("0.1", 0.1, NOT_REDUCER, []),
    "--kl-coefficient": ("1e-3", 1e-3, NOT_REDUCER, []),
    "--kl-estimator": ("k3+", "k3+", NOT_REDUCER, ["--kl-coefficient", "0.1"]),
    "--sampling-support": ("refuse", "refuse", ("custom_loss", "train"), []),
    "--entropy-coefficient": (".01", 0.01, NOT_REDUCER, []),
    "--policy-metrics": ("none", "none", NOT_REDUCER, []),
    "--policy-loss-backend": ("torch", "torch", NOT_REDUCER, []),
    "--fused-lm-head-loss": (None, True, NOT_REDUCER, []),
    "--max-logits-bytes": ("1048576", 2**20, NOT_REDUCER, ["--fused-lm-head-loss"]),
    "--fp32-lm-head": (None, True, ALL, []),
    "--skip-old-log-probs": (None, True, ("custom_loss",), []),
    "--docs-per-step": ("64", 64, ("train",), []),
    "--empty-step": ("skip", "skip", ("train",), []),
    "--router-aux-loss": ("exact", "exact", ("megatron_lm", "train"), []),
    "--gradient-divisor": ("num_samples", "num_samples", ("megatron_lm", "train"), []),
    "--watchdog": ("raise", "raise", ("train",), []),
}


def effect_of_parameter(loss: str, parameter: Parameter) -> tuple:
    """A row of EFFECT_OF_FLAG, of a value inside the range that is not the default."""
    for value in (0.25, 0.75, 3.0):
        with suppress(ConfigError):
            if parameter.check(value) != parameter.default:
                return (str(value), value, NOT_REDUCER, ["--policy-loss", loss])
    raise AssertionError(f"no value for {parameter}")


EFFECT_OF_FLAG |= {
    flag_of(parameter.name): effect_of_parameter(name, parameter)
    for name in policy_loss_names()
    for parameter in get_policy_loss(name).parameters
}
# A parameter of own_losses.py, which is declared inside a test alone.
EFFECT_OF_A_PARAMETER = {"--scale": ("1.5", 1.5, NOT_REDUCER, ["--policy-loss", "own_reinforce"])}


GROUPS = {group.title: group for group in add_megatron_rl_args(ArgumentParser(allow_abbrev=False))._action_groups}
FLAGS = [action.option_strings[0] for action in GROUPS["megatron_rl"]._group_actions]


def parse(*argv: str) -> Namespace:
    return add_megatron_rl_args(ArgumentParser(allow_abbrev=False)).parse_args(argv)


def from_yaml(**settings: object) -> Namespace:
    """A host's own arguments with a merged file on top: only the keys of the file are there."""
    return Namespace(**{"loss_aggregation": "sample_mean", "lr": 1e-6, "model_name": "m", **settings})


def test_the_parser_comes_back_and_an_unset_flag_is_none():
    """Megatron uses what its extra_args_provider returns; a default here would hide a host's own flag."""
    parser = ArgumentParser()
    assert add_megatron_rl_args(parser) is parser
    values = vars(parser.parse_args([]))
    assert set(values) == {field.name for field in flag_fields()} | set(declared_parameters())
    assert set(values.values()) == {None}


def test_a_parameter_whose_flag_the_parser_has_is_refused_by_name(own_losses):
    parser = ArgumentParser()
    parser.add_argument("--scale")
    with pytest.raises(ConfigError, match="--scale of policy loss own_reinforce.* is a flag of this parser already: rename"):
        add_megatron_rl_args(parser)


def test_the_loss_on_the_launch_line_gives_the_parser_its_flags(monkeypatch):
    monkeypatch.delitem(sys.modules, "own_losses", raising=False)
    monkeypatch.setattr(sys, "argv", ["train.py", "--policy-loss", "own_losses.truncated", "--ratio-cap", "2.5"])
    assert add_megatron_rl_args(ArgumentParser()).parse_args().ratio_cap == 2.5


def test_the_namespace_holds_numbers_and_keeps_the_text_of_what_is_none():
    """Exit code 2 at the first bad value would tell one fault per launch (FB-74)."""
    args = parse("--clip-ratio-low", "1e-1", "--samples-per-prompt", "8", "--policy-temperature", "hot")
    assert (args.clip_ratio_low, args.samples_per_prompt, args.policy_temperature) == (0.1, 8, "hot")


def test_help_states_meaning_and_default():
    """Catches a percent sign that breaks --help, and a flag whose help is empty."""
    text = " ".join(add_megatron_rl_args(ArgumentParser()).format_help().split())
    for name in (field.name for field in flag_fields()):
        assert " ".join(field_meanings()[name].split()) in text, name
    assert set(field_meanings()) == {field.name for field in fields(PolicyLossConfig)}
    assert "sampled at. Default: 1.0." in text
    assert "whole prompt groups. Default: unset." in text
    assert "--watchdog {off,warn,raise}" in text


def test_help_of_a_loss_of_ones_own_may_hold_a_percent_sign(own_losses):
    text = " ".join(add_megatron_rl_args(ArgumentParser(), []).format_help().split())
    assert "multiplies the weight, 1 is 100 %" in text


def setting_of(config: PolicyLossConfig, flag: str) -> object:
    """A field, or a parameter of the loss."""
    return getattr(config, field_of(flag), config.loss_parameters.get(field_of(flag)))


@pytest.mark.parametrize("flag", dict.fromkeys([*FLAGS, *EFFECT_OF_FLAG, *EFFECT_OF_A_PARAMETER]))
def test_each_flag_is_honoured_or_refused_by_name(flag, own_losses):
    """FB-69: a flag that is accepted and has no effect. A new flag without a row in EFFECT_OF_FLAG fails here, and a row whose flag
    was renamed: scripts in other people's repositories spell these flags."""
    given_value, value, routes, companions = (EFFECT_OF_FLAG | EFFECT_OF_A_PARAMETER)[flag]
    args = parse(*companions, flag, *([] if given_value is None else [given_value]))
    for route in Route:
        if route not in routes:
            with pytest.raises(ConfigError, match=f"would be ignored.*{flag}"):
                validate_megatron_rl_args(args, route)
            continue
        config, without = (setting_of(one, flag) for one in (validate_megatron_rl_args(args, route), PolicyLossConfig()))
        assert config == value and without != value, route
        assert type(config) is type(value), route


def test_a_default_that_is_written_out_is_refused_where_it_has_no_effect():
    """Who writes --watchdog beside a host's launch believes that there is one."""
    with pytest.raises(ConfigError, match="works on train"):
        validate_megatron_rl_args(parse("--watchdog", "warn"), Route.MEGATRON_LM)


def test_a_launcher_that_drops_our_flags_is_found_out():
    """slime ignores unknown flags, so --loss-aggregation constant would train sample_mean without a word."""
    with pytest.raises(ConfigError, match="dropped --loss-aggregation.*megatron_rl.hosts.launch"):
        validate_megatron_rl_args(Namespace(lr=1e-6, samples_per_prompt=8))


def test_a_key_with_dashes_is_found_out():
    """A YAML key is set on args as it is spelled: with dashes nobody would ever read it."""
    args = from_yaml(**{"clip-ratio-low": 0.1, "watchdog": None})
    with pytest.raises(ConfigError, match="clip-ratio-low=0.1 has no effect.*write clip_ratio_low"):
        validate_megatron_rl_args(args)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("loss_aggregation_divisor", "8192", 8192.0),
        ("loss_aggregation_divisor", 8192, 8192.0),
        ("kl_coefficient", "1e-3", 1e-3),  # YAML 1.1 reads it as text
        ("policy_temperature", " .7 ", 0.7),
        ("clip_ratio_low", "+3E-4", 3e-4),
        ("samples_per_prompt", "8", 8),
        ("allow_partial_prompt_groups", "False", False),
        ("policy_metrics", "none", "none"),  # the name is not a missing value
        ("policy_loss", " gspo ", "gspo"),
        ("clip_ratio_high", None, None),
    ],
)
def test_text_from_a_yaml_file_is_read(name, text, value):
    needed = {"loss_aggregation_divisor": {"loss_aggregation": "constant"}}.get(name, {"samples_per_prompt": "8"})
    found = getattr(validate_megatron_rl_args(from_yaml(**{**needed, name: text})), name)
    assert found == value and type(found) is type(value)


NONSENSE = [True, "8k", "nan", "inf", float("nan"), float("inf"), "1e999", 10**400, "", "1_000", "0x10", "true", [8], "-"]


@pytest.mark.parametrize("name", ["loss_aggregation_divisor", "clip_ratio_low", "policy_temperature", "kl_coefficient"])
def test_what_is_not_a_number_is_refused(name):
    """FB-12: a divisor of True or "8k" is a mistake, not 1 or 8."""
    for value in NONSENSE:
        with pytest.raises(ConfigError, match=name):
            validate_megatron_rl_args(from_yaml(loss_aggregation="constant", **{"loss_aggregation_divisor": 1, name: value}))


def test_what_is_not_a_count_or_a_switch_is_refused():
    for value in (True, "8k", 8.0, "8.0", "", 0, -1, [8], "9" * 30):
        with pytest.raises(ConfigError, match="samples_per_prompt=.* must be a whole number of at least 1"):
            validate_megatron_rl_args(from_yaml(samples_per_prompt=value))
    for value in ("yes", "1", 1, 0, "on", ""):
        with pytest.raises(ConfigError, match="allow_partial_prompt_groups=.* must be true or false"):
            validate_megatron_rl_args(from_yaml(samples_per_prompt=8, allow_partial_prompt_groups=value))


def test_five_faults_give_one_error_with_five_remedies_and_leave_args_alone():
    """FB-74: one error per launch, and arguments rewritten while they are checked."""
    args = parse(
        *("--loss-aggregation", "constant", "--clip-ratio-low", "1.3", "--policy-temperature", "hot"),
        *("--samples-per-prompt", "0", "--watchdog", "panic"),
    )
    before = copy.deepcopy(vars(args))
    with pytest.raises(ConfigError, match="5 problems") as caught:
        validate_megatron_rl_args(args, Route.TRAIN)
    remedies = (
        "pass the longest response",
        "did you mean 0.3?",
        "pass the temperature",
        "write it out in digits",
        "pass one of them to --watchdog",
    )
    for remedy, problem in zip(remedies, caught.value.problems, strict=True):
        assert remedy in problem
        assert remedy in str(caught.value)
    assert vars(args) == before


@pytest.mark.parametrize(
    ("argv", "ratios"),
    [
        ([], (0.2, 0.2)),
        (["--policy-loss", "gspo", "--clip-ratio-high", "1e-3"], (3e-4, 1e-3)),
        (["--clip-ratio-low", "0"], (0.0, 0.2)),  # a value, not unset
        (["--policy-loss", "cispo"], (1.0, 0.28)),  # without a lower bound
    ],
)
def test_the_clip_default_is_that_of_the_loss(argv, ratios):
    """FB-72: one default of 0.2 for every loss, under which GSPO never clips."""
    assert clip_of(validate_megatron_rl_args(parse(*argv))) == ratios


# No dot: a dotted name is imported.
ANYTHING = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats()),
    *(st.text(st.characters(exclude_characters="."), max_size=8), st.lists(st.integers(), max_size=2)),
    st.sampled_from(["constant", "token_mean", "gspo", "train", "8", "1e-3", "true", "off"]),
)
NAMES = [field.name for field in flag_fields()] + ["global_batch_size", "calculate_per_token_loss"]


# On a busy machine a draw may take a second: no clock decides here.
@given(settings=st.dictionaries(st.sampled_from(NAMES), ANYTHING, max_size=6), route=st.sampled_from(Route))
def test_any_value_gives_a_configuration_or_a_config_error(settings, route):
    """Catches a rule that trips over the type of a value it does not judge, before all problems are told."""
    args = Namespace(**settings)
    before = repr(vars(args))
    try:
        config = validate_megatron_rl_args(args, route)
    except ConfigError as error:
        assert all(error.problems)
    else:
        assert isinstance(config, PolicyLossConfig)
    assert repr(vars(args)) == before
