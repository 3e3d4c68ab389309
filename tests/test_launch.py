"""A launch in miles or slime: the launcher on stand-ins of the hosts' parsers, `megatron-rl launch-config`, and the rules.

tests/refused_hosts.py has the launches that the rules refuse, and launches that all of them allow.
"""

from __future__ import annotations

import copy
import json
import os
import re
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest
from adapter_cases import emulated
from forked import forked
from host_emulator import load_function
from host_steps import REDUCER as OF_REDUCER
from refused_hosts import (
    ALLOWED_LAUNCHES,
    ALLOWED_SAMPLERS,
    CUSTOM_TIS,
    KL,
    OUR_LOSS,
    PROMPT_MEAN,
    REFUSED_LAUNCHES,
    judge_launch,
    sampler,
)

from megatron_rl.__main__ import main
from megatron_rl.commands.launch_config import yaml_text
from megatron_rl.errors import ConfigError
from megatron_rl.hosts import launch
from megatron_rl.hosts.checks import CHECKS, check_launch, dropped_flags
from megatron_rl.hosts.reducer import get_pg_loss_reducer

REDUCER = ["--custom-pg-loss-reducer-function-path", "megatron_rl.reducers.get_pg_loss_reducer"]
DR_GRPO = ["--loss-aggregation", "constant", "--loss-aggregation-divisor", "8192"]
INIT = ["--custom-megatron-init-path", "megatron_rl.hooks.custom_megatron_init"]

# What both hosts do: one parser, custom flags in front of their own. slime drops what it does not know, miles ends with 2.
PARSER = """
from argparse import ArgumentParser

def parse_args(add_custom_arguments=None):
    parser = ArgumentParser(allow_abbrev=False)
    if add_custom_arguments is not None:
        parser = add_custom_arguments(parser)
    parser.add_argument("--advantage-estimator", default="grpo")
    parser.add_argument("--calculate-per-token-loss", action="store_true")
    parser.add_argument("--custom-pg-loss-reducer-function-path", default=None)
    parser.add_argument("--custom-megatron-init-path", default=None)
    return parser.{parse}
"""
SCRIPT = """
import json, sys
from {host}.utils.arguments import parse_args
from helper_of_script import NUMBER

def train(args):
    names = ("loss_aggregation", "loss_aggregation_divisor", "advantage_estimator")
    print(json.dumps([NUMBER, __name__, sys.argv, [vars(args)[name] for name in names]]))

if __name__ == "__main__":
    train(parse_args({arguments}))
"""


def in_host(tmp_path: Path, work: Callable, name: str, script: str = SCRIPT, arguments: str = "", parser: str = PARSER):
    """(exit code, standard output, standard error) of the work beside a host of this name and its train script."""
    (tmp_path / "helper_of_script.py").write_text("NUMBER = 7")
    (tmp_path / "train.py").write_text(script.replace("{host}", name).replace("{arguments}", arguments))
    parse = "parse_args()" if name == "miles" else "parse_known_args()[0]"

    def in_folder() -> int:
        os.chdir(tmp_path)
        sys.modules.update(emulated(parser.replace("{parse}", parse), f"{name}.utils.arguments"))
        return work()

    return forked(in_folder)


def launched(tmp_path: Path, *words: str, **checkout: str) -> tuple[int | None, str, str]:
    return in_host(tmp_path, lambda: launch.main(words), **checkout)


SOUND = ["train.py", *DR_GRPO, *REDUCER, *INIT]
AS_ITSELF = r'\[7, "__main__", \["train.py", "--loss-aggregation", .*\], \["constant", 8192.0, "grpo"\]\]\n$'
OUR_FLAGS = "__import__('megatron_rl.arguments').arguments.add_megatron_rl_args"
# What the checkout holds, the words of the launcher, the exit code, and what is printed on both streams.
LAUNCHES = {
    # On its own slime drops --loss-aggregation and miles ends with 2; here the attribute is there with its value.
    "miles": ({"name": "miles"}, SOUND, 0, AS_ITSELF, "^$"),
    "slime": ({"name": "slime"}, SOUND, 0, AS_ITSELF, "^$"),
    # argparse raises on a second flag of the same name.
    "a script that adds our flags already": ({"name": "miles", "arguments": OUR_FLAGS}, SOUND, 0, AS_ITSELF, "^$"),
    # Without the launcher the first look is in the training actors, minutes later.
    "FB-74 every problem of a wrong scale": (
        *({"name": "slime"}, ["train.py", *DR_GRPO[:2], "--calculate-per-token-loss", *REDUCER], 2, "^$"),
        "ConfigError: 2 problems.*needs --loss-aggregation-divisor.*calculate_per_token_loss=True",
    ),
    "no init hook: nothing looks at the training actors": (
        *({"name": "slime"}, ["train.py", *DR_GRPO, *REDUCER], 0, AS_ITSELF.replace('", .*', '".*')),
        "megatron_rl: no training actor is checked, .*: add --custom-megatron-init-path",
    ),
    "a script whose flags would have reached nobody": (
        *({"name": "slime", "script": "import slime\nprint('trained')"}, ["train.py", *DR_GRPO], 2, "^trained\n$"),
        "has not called miles.utils.arguments.parse_args nor slime.utils.arguments.parse_args",
    ),
    "a parser that takes no flags": (
        *({"name": "slime", "parser": "def parse_args():\n    return None"}, ["train.py", *DR_GRPO], 2, "^$"),
        "takes no add_custom_arguments.*launch-config",
    ),
    "the script's own exit code": (
        *({"name": "miles", "script": "import miles.utils.arguments\nraise SystemExit(5)"}, ["train.py"], 5, "^$", "^$"),
    ),
}


@pytest.mark.parametrize(("checkout", "words", "code", "out", "error"), LAUNCHES.values(), ids=LAUNCHES)
def test_the_script_runs_as_itself_with_our_flags_in_its_parser_or_is_refused(tmp_path, checkout, words, code, out, error):
    found, printed, said = launched(tmp_path, *words, **checkout)
    assert found == code and re.search(out, printed, re.DOTALL) and re.search(error, said, re.DOTALL) and "Traceback" not in said


def test_a_check_says_what_would_train_and_ends_before_the_script_goes_on(tmp_path, monkeypatch):
    """MEGATRON_RL_CHECK: the host's own parser and our check, and no run."""
    monkeypatch.setenv("MEGATRON_RL_CHECK", "1")
    code, out, error = launched(tmp_path, *SOUND, name="miles")
    assert (code, out) == (0, "")
    assert "megatron_rl: loss_aggregation=constant by our reducer | step of " in error and "ends here" in error
    assert launched(tmp_path, "train.py", *DR_GRPO[:2], *REDUCER, name="miles")[0] == 2
    monkeypatch.setenv("MEGATRON_RL_CHECK", "0")
    assert json.loads(launched(tmp_path, *SOUND, name="miles")[1])[0] == 7


def test_doctor_asks_the_parser_of_the_host_and_the_check_at_start(tmp_path, unseen_machine):
    line = ["doctor", "--host", "slime", "--", "python", "train.py", *REDUCER, *DR_GRPO]
    code, out, error = in_host(tmp_path, lambda: main(line), "slime")
    assert code == 0 and "loss_aggregation=constant by our reducer" in out, error


# launch-config: docs/hosts/miles.md shows what it prints


def test_the_clip_of_a_loss_is_typed_in_the_hosts_flags_and_a_refused_setting_is_not_printed(capsys):
    """The host's flags always have a clip, which is that of its own loss."""
    assert main(["launch-config", "--policy-loss", "gspo", "--clip-ratio-low", "1e-3", "--launch-method", "custom_loss"]) == 0
    assert "--eps-clip 0.001 --eps-clip-high 0.0004" in capsys.readouterr().err
    assert main(["launch-config", "--loss-aggregation", "constant"]) == 2
    out, error = capsys.readouterr()
    assert out == "" and "needs --loss-aggregation-divisor" in error


SETTINGS = {
    "loss_aggregation": "prompt_mean",
    "samples_per_prompt": 8,
    "clip_ratio_low": 1e-05,
    "loss_aggregation_divisor": 1e16,
    "watchdog": "off",
    "policy_loss": 'my."module".fünction: #1',
}


def test_a_parser_of_yaml_reads_back_each_value_with_its_type():
    """A bare off is false, 1e-05 without a point is text, a bare colon or # ends a value: YAML 1.1, which both hosts read."""
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed here; hosts bring it")
    read = yaml.safe_load(yaml_text(SETTINGS))
    assert read == SETTINGS
    assert {name: type(value) for name, value in read.items()} == {name: type(value) for name, value in SETTINGS.items()}


# The rules


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
    """tests/test_hooks.py has those of a training actor."""
    assert sorted(one.__name__ for one in CHECKS) == sorted(REFUSED_LAUNCHES)


def test_four_faults_give_one_error_with_four_remedies_and_change_nothing():
    """FB-74: one error a launch, not one a restart."""
    settings = {**PROMPT_MEAN, **OF_REDUCER, **CUSTOM_TIS, "samples_per_prompt": 8, "n_samples_per_prompt": 4}
    args = Namespace(**settings, train_backend="fsdp")
    problems = pytest.raises(ConfigError, check_launch, args).value.problems
    assert len(problems) == len(set(problems)) == 4
    assert vars(args) == copy.deepcopy({**settings, "train_backend": "fsdp"})


def test_flags_that_the_launcher_dropped_are_found_on_the_command_line():
    """slime drops unknown flags and trains its default."""
    words = ["--loss-aggregation=constant", "--loss-aggregation-divisor", "1", "--lr", "1"]
    problems = list(dropped_flags(Namespace(lr=1), words))
    assert [problem.split()[0] for problem in problems] == ["--loss-aggregation", "--loss-aggregation-divisor"]
    assert all("; start with python -m megatron_rl.hosts.launch" in problem for problem in problems)
    assert list(dropped_flags(Namespace(loss_aggregation="constant", loss_aggregation_divisor=1.0), words)) == []


@pytest.mark.parametrize(
    ("word", "meant"),
    [("--loss_aggregation", "--loss-aggregation"), ("--loss-agregation=8", "--loss-aggregation"), ("--entropy-coef", None)],
)
def test_a_slip_that_the_launcher_dropped_is_found_on_the_command_line(word, meant):
    """slime drops --loss_aggregation constant, under our launcher too, and trains sample_mean; its own are no slips."""
    problems = list(dropped_flags(Namespace(lr=1), ["train.py", word, "constant"]))
    assert problems == ([f"{word.partition('=')[0]} has no effect: did you mean {meant}?"] if meant else [])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"use_tis": True}, {"importance_correction": "tis", "importance_correction_low": 0.0, "importance_correction_high": 2.0}),
        ({"use_tis": True, "importance_correction_high": "3"}, {"importance_correction_high": 3.0}),
        ({"use_opsm": True, "off_policy_sequence_delta": 0.1}, {"off_policy_sequence_delta": 0.1}),
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


def test_a_path_with_a_colon_leads_to_our_function():
    """The hosts' documentation shows it, and their loaders split on the last dot."""
    assert load_function("megatron_rl.reducers:get_pg_loss_reducer") is get_pg_loss_reducer
    with pytest.raises(AttributeError, match="absent"):
        load_function("megatron_rl.reducers:absent")
