"""The rules of a launch in miles or slime: what each refuses, launches that all of them allow, what they read.

tests/refused_hosts.py has the launches.
"""

from __future__ import annotations

import copy
from argparse import Namespace
from functools import partial

import pytest
from host_emulator import load_function
from host_steps import ICEPOP_OF
from launch_settings import CUSTOM_LOSS, REDUCER
from refused_hosts import (
    ALLOWED_LAUNCHES,
    ALLOWED_SAMPLERS,
    CONSTANT,
    CUSTOM_TIS,
    KL,
    MILES,
    OUR_LOSS,
    PROMPT_MEAN,
    REDUCED,
    REFUSED_LAUNCHES,
    judge_launch,
    sampler,
)

from megatron_rl.config import PolicyLossConfig
from megatron_rl.errors import ConfigError
from megatron_rl.hosts import checks
from megatron_rl.hosts.checks import CHECKS, check_launch, dropped_flags, launch_warnings
from megatron_rl.hosts.reducer import get_pg_loss_reducer
from megatron_rl.hosts.sampler_rule import typed_readers


@pytest.mark.parametrize(("name", "settings"), [(name, one) for name, rows in REFUSED_LAUNCHES.items() for one in rows], ids=str)
def test_the_rule_refuses_the_launch(name, settings):
    """FB-08, FB-11, FB-26, FB-39, FB-69, FB-114: a launch of a wrong scale, or with a dead half, never starts. What is said is in
    tests/messages.txt."""
    (message,) = judge_launch(name, settings)
    with pytest.raises(ConfigError) as caught:
        check_launch(Namespace(**settings))
    assert message in caught.value.problems


@pytest.mark.parametrize("settings", ALLOWED_LAUNCHES, ids=range(len(ALLOWED_LAUNCHES)))
def test_a_sound_launch_is_allowed(settings):
    check_launch(Namespace(**settings))


@pytest.mark.parametrize("settings", ALLOWED_SAMPLERS.values(), ids=ALLOWED_SAMPLERS)
def test_a_sampler_whose_scores_are_those_of_the_trainer_is_allowed(settings):
    sampler(**settings)


def test_each_check_has_a_row_that_it_refuses():
    """tests/test_init_hook.py has those of a training actor."""
    assert sorted(one.__name__ for one in CHECKS) == sorted(REFUSED_LAUNCHES)


def test_a_launch_of_a_thousand_names_may_be_judged_often(monkeypatch):
    """Launcher, init hook, loss and the reward hook judge it: a name is compared with ours once in a process."""
    compared = []
    monkeypatch.setattr(checks, "get_close_matches", lambda name, *others, **options: compared.append(name) or [])
    args = Namespace(**REDUCED, **{f"an_option_of_somebody_{number}": number for number in range(1000)})
    for _ in range(3):
        check_launch(args)
    assert len(compared) == len(set(compared)) >= 1000


def test_four_faults_give_one_error_with_four_remedies_and_change_nothing():
    """FB-74: one error a launch, not one a restart."""
    settings = {**PROMPT_MEAN, **REDUCER, **CUSTOM_TIS, "samples_per_prompt": 8, "n_samples_per_prompt": 4}
    args = Namespace(**settings, train_backend="fsdp")
    problems = pytest.raises(ConfigError, check_launch, args).value.problems
    assert len(problems) == len(set(problems)) == 4
    assert vars(args) == copy.deepcopy({**settings, "train_backend": "fsdp"})


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["train.py", "--loss-aggregation", "constant"], ["--loss-aggregation"]),
        (["--loss-aggregation=constant", "--loss-aggregation-divisor=1"], ["--loss-aggregation", "--loss-aggregation-divisor"]),
        (["train.py", "--lr", "1"], []),
    ],
)
def test_flags_that_the_launcher_dropped_are_found_on_the_command_line(words, found):
    """slime drops unknown flags and trains its default."""
    problems = list(dropped_flags(Namespace(lr=1), words))
    assert [problem.split()[0] for problem in problems] == found
    assert all("; start with python -m megatron_rl.hosts.launch" in problem for problem in problems)
    assert list(dropped_flags(Namespace(loss_aggregation="constant", loss_aggregation_divisor=1.0), words)) == []


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("--loss_aggregation", "--loss-aggregation"),
        ("--loss-aggregation-div=8192", "--loss-aggregation-divisor"),
        ("--loss-agregation", "--loss-aggregation"),
        ("--entropy-coef", None),
        ("--kl-loss-coef", None),
        ("loss_aggregation", None),
    ],
)
def test_a_slip_that_the_launcher_dropped_is_found_on_the_command_line(word, meant):
    """slime drops --loss_aggregation constant, under our launcher too, and trains sample_mean; its own are no slips."""
    problems = list(dropped_flags(Namespace(lr=1), ["train.py", word, "constant"]))
    assert problems == ([f"{word.partition('=')[0]} has no effect: did you mean {meant}?"] if meant else [])


def test_the_advice_of_validation_is_told_of_our_loss_only():
    """With the reducer KL and entropy are the host's own."""
    coefficients = {**CONSTANT, "entropy_coef": 0.01}
    (warning,) = launch_warnings(check_launch(Namespace(**coefficients, **CUSTOM_LOSS)))
    assert warning.startswith("entropy_coefficient=0.01 with loss_aggregation=constant")
    assert launch_warnings(check_launch(Namespace(**coefficients, **REDUCER))) == []


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"use_tis": True}, {"importance_correction": "tis", "importance_correction_low": 0.0, "importance_correction_high": 2.0}),
        ({"use_tis": True, "importance_correction_high": "3"}, {"importance_correction_high": 3.0}),
        (
            {
                **MILES,
                "use_tis": True,
                "custom_tis_function_path": ICEPOP_OF["miles"].replace(".icepop", ":icepop"),
                "tis_clip": 5.0,
            },
            {"importance_correction": "icepop", "importance_correction_low": 0.0, "importance_correction_high": 5.0},
        ),
        ({"tis_clip": 5.0, "custom_tis_function_path": "user.f"}, {"importance_correction": "none"}),
        ({"use_opsm": True}, {"off_policy_sequence_delta": 1e-4}),
        ({"use_opsm": True, "off_policy_sequence_delta": 0.1}, {"off_policy_sequence_delta": 0.1}),
        ({"opsm_delta": 0.1}, {"off_policy_sequence_delta": None}),
        (KL, {"kl_estimator": "k1"}),
        ({**KL, "kl_loss_type": "low_var_kl"}, {"kl_estimator": "k3"}),
        ({**KL, "kl_loss_type": "low_var_kl", "use_unbiased_kl": True}, {"kl_estimator": "unbiased"}),
        ({**KL, "kl_estimator": "k3+"}, {"kl_estimator": "k3+"}),
        ({**KL, "kl_loss_coef": 0.0, "kl_loss_type": "k2"}, {"kl_estimator": "k3"}),
        ({"advantage_estimator": "cispo", "eps_clip": 10.0}, {"policy_loss": "cispo", "clip_ratio_low": 1.0}),
    ],
    ids=str,
)
def test_a_flag_of_the_host_gives_the_setting_that_is_unset(settings, expected):
    defaults = {"eps_clip": 0.2, "tis_clip": 2.0, "tis_clip_low": 0, "opsm_delta": 1e-4, "kl_loss_type": "k1"}
    config = check_launch(Namespace(**{**OUR_LOSS, **defaults, **settings})).config
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize("name", ["own_reinforce", "own_losses.reinforce"])
def test_the_clip_of_a_host_does_not_reach_a_loss_without_one(name, own_losses):
    config = check_launch(Namespace(**OUR_LOSS, policy_loss=name, eps_clip=0.2)).config
    assert (config.policy_loss, config.clip_ratio_low, config.clip_ratio_high) == (name, None, None)


@pytest.mark.parametrize(
    ("settings", "words", "typed"),
    [
        ({}, [], []),
        ({"importance_correction": "tis"}, ["importance_correction=tis"], ["--importance-correction tis"]),
        ({"off_policy_sequence_delta": 0.1}, ["off_policy_sequence_delta=0.1"], ["--off-policy-sequence-delta 0.1"]),
        ({"policy_loss": "dppo_tv"}, ["policy_loss=dppo_tv"], ["--policy-loss dppo_tv"]),
    ],
)
def test_what_compares_with_the_sampler_is_named(settings, words, typed):
    of_config = partial(getattr, PolicyLossConfig(**settings))
    assert typed_readers(of_config, "{}={}".format) == words and typed_readers(settings.get) == typed


def test_a_path_with_a_colon_leads_to_our_function():
    """The hosts' documentation shows it, and their loaders split on the last dot."""
    assert load_function("megatron_rl.reducers:get_pg_loss_reducer") is get_pg_loss_reducer
    with pytest.raises(AttributeError, match="absent"):
        load_function("megatron_rl.reducers:absent")
