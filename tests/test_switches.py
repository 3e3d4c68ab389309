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
from megatron_rl.hosts.args import OPTIONS, HostLaunch
from megatron_rl.hosts.checks import check_launch
from megatron_rl.hosts.loss import read_plan
from megatron_rl.hosts.megatron_lm import megatron_lm_config
from megatron_rl.hosts.reducer import get_pg_loss_reducer
from megatron_rl.hosts.rewards import reward_post_process
from megatron_rl.hosts.training_hooks import custom_megatron_init
from megatron_rl.validation.routes import HOST_SWITCHES

MILES = {"true_on_policy_mode": False}


def by_reducer(args: Namespace) -> None:
    set_global_args(args)
    get_pg_loss_reducer([], [], [], bool(vars(args)["calculate_per_token_loss"]))


# Whoever judges a launch -> (the function that does, settings of a launch that it would let through, a value that is no bool).
JUDGES: dict[str, tuple[Callable[[Namespace], object], dict, object]] = {
    "init hook, miles": (custom_megatron_init, {**REDUCER, **MILES}, 1),
    "init hook, slime": (custom_megatron_init, CUSTOM_LOSS, "false"),
    "reducer": (by_reducer, {**REDUCER, **MILES}, "no"),
    "custom_loss": (read_plan, CUSTOM_LOSS, 0),
    "reward hook": (lambda args: reward_post_process(args, []), {**REDUCER, **REWARD, **MILES}, 1.0),
    "Megatron-LM": (megatron_lm_config, {}, "true"),
    "train": (lambda args: validate_megatron_rl_args(args, Route.TRAIN), {}, []),
}


@pytest.mark.parametrize("judge", JUDGES)
def test_a_per_token_switch_that_is_no_bool_is_refused_by_name(judge):
    """FB-74: the host takes 1 and "false" from a YAML file for true and trains token_mean, whatever the launch is called."""
    function, settings, value = JUDGES[judge]
    with pytest.raises(ConfigError) as caught:
        function(Namespace(**{"loss_aggregation": "sample_mean", **settings, "calculate_per_token_loss": value}))
    assert f"calculate_per_token_loss={value!r} must be true or false" in str(caught.value)
    assert f"the host reads it as {bool(value)}; write calculate_per_token_loss: true or" in str(caught.value)


@pytest.mark.parametrize("name", HOST_SWITCHES)
def test_every_switch_is_refused_by_name_and_read_as_the_host_does(name):
    """One rule for all of them; where no rule has judged the launch, we read as the host does, which asks `if args.name`."""
    launch = {"loss_aggregation": "sample_mean", **REDUCER}
    problems = pytest.raises(ConfigError, check_launch, Namespace(**launch, **{name: "false"})).value.problems
    assert problems[0].startswith(f"{name}='false' must be true or false"), problems
    if HOST_SWITCHES[name]:  # the host reads None as off, and its absence as on
        with pytest.raises(ConfigError, match=f"{name}=None must be true or false"):
            check_launch(Namespace(**launch, **{name: None}))
    for value in ("false", 0, None, True):
        assert HostLaunch(Namespace(**{name: value}))[name] is bool(value)
    assert HostLaunch(Namespace())[name] is HOST_SWITCHES[name]
    assert {option for option, value in OPTIONS.items() if isinstance(value, bool)} == set(HOST_SWITCHES)
