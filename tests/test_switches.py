"""Switches of a host that a rule looks at: a bool, or refused by name wherever a launch is judged (FB-74)."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable

import pytest
from helpers import set_global_args
from launch_settings import CUSTOM_LOSS, REDUCER, REWARD

from megatron_rl.arguments import validate_megatron_rl_args
from megatron_rl.config import Route
from megatron_rl.errors import ConfigError
from megatron_rl.hosts.args import OPTIONS, HostOptions
from megatron_rl.hosts.checks import check_launch
from megatron_rl.hosts.launch import with_our_flags
from megatron_rl.hosts.loss import read_plan
from megatron_rl.hosts.megatron_lm import megatron_lm_config
from megatron_rl.hosts.reducer import get_pg_loss_reducer
from megatron_rl.hosts.rewards import reward_post_process
from megatron_rl.hosts.training_hooks import custom_megatron_init
from megatron_rl.validation.routes import HOST_SWITCHES

MILES, SLIME = {"true_on_policy_mode": False}, {"rollout_batch_size": 8}


def by_reducer(args: Namespace) -> None:
    set_global_args(args)
    get_pg_loss_reducer([], [], [], bool(vars(args)["calculate_per_token_loss"]))


def by_launcher(args: Namespace) -> None:
    def parse_args(add_custom_arguments=None):
        return args

    with_our_flags(parse_args)()


# Whoever judges a launch -> (the function that does, settings of a launch that it would let through).
JUDGES: dict[str, tuple[Callable[[Namespace], object], dict]] = {
    "init hook, miles, reducer": (custom_megatron_init, {**REDUCER, **MILES}),
    "init hook, slime, reducer": (custom_megatron_init, {**REDUCER, **SLIME}),
    "init hook, miles, custom_loss": (custom_megatron_init, {**CUSTOM_LOSS, **MILES}),
    "init hook, slime, custom_loss": (custom_megatron_init, {**CUSTOM_LOSS, **SLIME}),
    "launcher, reducer": (by_launcher, {**REDUCER, **SLIME}),
    "launcher, custom_loss": (by_launcher, {**CUSTOM_LOSS, **MILES}),
    "reducer": (by_reducer, {**REDUCER, **MILES}),
    "custom_loss": (read_plan, {**CUSTOM_LOSS, **MILES}),
    "reward hook": (lambda args: reward_post_process(args, []), {**REDUCER, **REWARD, **MILES}),
    "Megatron-LM": (megatron_lm_config, {}),
    "train": (lambda args: validate_megatron_rl_args(args, Route.TRAIN), {}),
}


def problems_of(judge: Callable[[Namespace], object], settings: dict, capsys) -> str:
    try:
        judge(Namespace(**settings))
    except ConfigError as error:
        return str(error)
    except SystemExit:  # the launcher
        return capsys.readouterr().err
    return ""


@pytest.mark.parametrize("judge", JUDGES)
def test_a_per_token_switch_that_is_no_bool_is_refused_by_name(judge, capsys):
    """FB-74: the host takes 1 and "false" from a YAML file for true and trains token_mean, whatever the launch is called."""
    function, settings = JUDGES[judge]
    problems = problems_of(function, {"loss_aggregation": "sample_mean", **settings, "calculate_per_token_loss": "false"}, capsys)
    assert "calculate_per_token_loss='false' must be true or false" in problems
    assert "the host reads it as True; write calculate_per_token_loss: true or" in problems


def test_every_switch_of_a_host_is_one_of_the_rule():
    """One rule for all of them: whichever a check, a hook or a plan reads by its truth value."""
    assert {name: value for name, value in OPTIONS.items() if isinstance(value, bool)} == HOST_SWITCHES


def test_we_read_a_switch_as_the_host_does():
    """Also where no rule has judged the launch: the host asks `if args.name`."""
    for name, absent in HOST_SWITCHES.items():
        for value in ("false", 1, 0, None, True, False):
            assert HostOptions(Namespace(**{name: value}))[name] is bool(value)
        assert HostOptions(Namespace())[name] is absent


@pytest.mark.parametrize("value", ["false", False, None])
def test_our_own_switch_may_be_text_and_says_what_it_says(value):
    """`"false"` in YAML: nobody but us reads it, and it means false to each rule."""
    two_steps = {"global_batch_size": 16, "rollout_batch_size": 8, "n_samples_per_prompt": 4}
    launch = {"loss_aggregation": "prompt_mean", **REDUCER, **REWARD, **two_steps, "allow_partial_prompt_groups": value}
    check_launch(Namespace(**launch))
    rl = {"perform_rl_step": True, "rl_use_sequence_packing": True, "grpo_prompts_per_step": 8, "grpo_group_size": 4}
    args = Namespace(loss_aggregation="prompt_mean", global_batch_size=16, allow_partial_prompt_groups=value, **rl)
    with pytest.raises(ConfigError, match="so it cuts prompt groups"):
        megatron_lm_config(args)
