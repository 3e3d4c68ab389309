"""The launcher: a host's train script with our flags, on stand-ins of the hosts' parsers.

`megatron-rl launch-config`: a file that both hosts read as it was meant, the lines it needs, and what it refuses to write.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import sys
from pathlib import Path

import pytest
from forked import forked

from megatron_rl.__main__ import main
from megatron_rl.commands.launch_config import yaml_text
from megatron_rl.errors import ConfigError
from megatron_rl.hosts import launch

ROOT = Path(__file__).resolve().parent.parent
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
    parser.add_argument("--rollout-batch-size", type=int, default=4)
    parser.add_argument("--advantage-estimator", default="grpo")
    parser.add_argument("--calculate-per-token-loss", action="store_true")
    parser.add_argument("--custom-pg-loss-reducer-function-path", default=None)
    parser.add_argument("--custom-megatron-init-path", default=None)
    parser.add_argument("--custom-reward-post-process-path", default=None)
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


@pytest.fixture
def host(tmp_path, monkeypatch):
    """Writes a checkout of a host into tmp_path, with this train script, and makes it the working directory."""

    def write(name: str, script: str = SCRIPT, arguments: str = "", parser: str = PARSER) -> Path:
        folder = tmp_path / name / "utils"
        folder.mkdir(parents=True)
        for package in (folder.parent, folder):
            (package / "__init__.py").touch()
        parse = "parse_args()" if name == "miles" else "parse_known_args()[0]"
        (folder / "arguments.py").write_text(parser.replace("{parse}", parse))
        (tmp_path / "helper_of_script.py").write_text("NUMBER = 7")
        (tmp_path / "train.py").write_text(script.replace("{host}", name).replace("{arguments}", arguments))
        return tmp_path / "train.py"

    monkeypatch.chdir(tmp_path)
    for name in ("argv", "path", "meta_path"):  # what the launcher sets in its own process
        monkeypatch.setattr(sys, name, [*vars(sys)[name]])
    before = set(sys.modules)
    yield write
    for module in set(sys.modules) - before:
        if module.split(".")[0] in ("miles", "slime", "helper_of_script"):
            del sys.modules[module]


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    try:
        code = launch.main([str(argument) for argument in arguments])
    except SystemExit as end:
        code = end.code
    out, error = capsys.readouterr()
    return code, out, error


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
    "help without a script": ({"name": "slime"}, ["--help"], 0, "SCRIPT ....*--loss-aggregation-divisor", "^$"),
    "nothing": (
        {"name": "slime"},
        [],
        2,
        "^$",
        "nothing is no train script in .*: write python -m megatron_rl.hosts.launch train.py",
    ),
    "a flag": ({"name": "slime"}, DR_GRPO, 2, "^$", "--loss-aggregation is no train script in "),
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
def test_the_script_runs_as_itself_with_our_flags_in_its_parser_or_is_refused(checkout, words, code, out, error, host, capsys):
    host(**checkout)
    found, printed, said = run(capsys, *words)
    assert found == code and re.search(out, printed, re.DOTALL) and re.search(error, said, re.DOTALL) and "Traceback" not in said


def test_errors_of_the_script_are_its_own(host):
    host("miles", "from megatron_rl.errors import ConfigError\nimport miles\nraise ConfigError('of the script')")
    with pytest.raises(ConfigError, match="of the script"):
        launch.main(["train.py"])


def test_the_module_runs_from_a_checkout_of_the_host(host, tmp_path):
    """The command as it is typed, from another folder than the script's."""
    script = host("miles")

    def typed() -> None:
        os.chdir(ROOT)
        sys.argv = ["", str(script), *DR_GRPO, *REDUCER]
        # Where the package is installed, pytest rewrites its modules, and runpy cannot run what is rewritten.
        del sys.modules["megatron_rl.hosts.launch"]
        sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "AssertionRewritingHook"]
        runpy.run_module("megatron_rl.hosts.launch", run_name="__main__", alter_sys=True)

    code, out, error = forked(typed)
    assert code == 0, error
    assert json.loads(out)[3] == ["constant", 8192.0, "grpo"]


# MEGATRON_RL_CHECK: the host's own parser and our check, and no run


def test_a_check_says_what_would_train_and_ends_before_the_script_goes_on(host, capsys, monkeypatch):
    host("miles")
    monkeypatch.setenv("MEGATRON_RL_CHECK", "1")
    code, out, error = run(capsys, *SOUND)
    assert (code, out) == (0, "")
    assert "megatron_rl: loss_aggregation=constant by our reducer | step of " in error and "ends here" in error
    assert run(capsys, "train.py", *DR_GRPO[:2], *REDUCER)[0] == 2
    monkeypatch.setenv("MEGATRON_RL_CHECK", "0")
    assert json.loads(run(capsys, *SOUND)[1])[0] == 7


def test_doctor_asks_the_parser_of_the_host_and_the_check_at_start(host, tmp_path, capsys, monkeypatch, unseen_machine):
    host("slime")
    monkeypatch.syspath_prepend(tmp_path)
    line = ["doctor", "--host", "slime", "--", "python", "train.py", *REDUCER]
    assert main([*line, *DR_GRPO]) == 0
    assert "loss_aggregation=constant by our reducer" in capsys.readouterr().out


# launch-config: docs/hosts/miles.md shows what it prints

REWARD = "--custom-reward-post-process-path megatron_rl.hooks.reward_post_process"
CUSTOM_LOSS = "--loss-type custom_loss --custom-loss-function-path megatron_rl.hooks.custom_loss"
GUARD = "--custom-megatron-before-train-step-hook-path megatron_rl.hooks.before_train_step"
BY_REDUCER = " ".join(REDUCER)
BY_OUR_LOSS = [CUSTOM_LOSS, GUARD]
# What is asked for, and the lines that it needs beside the file and the init hook.
LINES = {
    "": [BY_REDUCER],
    "--loss-aggregation constant --loss-aggregation-divisor 8192": [BY_REDUCER],
    "--loss-aggregation prompt_mean": [BY_REDUCER, REWARD],
    "--loss-aggregation token_mean": [BY_REDUCER, REWARD],
    "--loss-aggregation token_mean --calculate-per-token-loss": [BY_REDUCER, "--calculate-per-token-loss"],
    "--loss-aggregation prompt_mean --route custom_loss": [*BY_OUR_LOSS, REWARD],
    # The host's flags always have a clip.
    "--policy-loss gspo --route custom_loss": [*BY_OUR_LOSS, "--eps-clip 0.0003 --eps-clip-high 0.0004"],
    "--policy-loss gspo --clip-ratio-low 1e-3 --route custom_loss": [*BY_OUR_LOSS, "--eps-clip 0.001 --eps-clip-high 0.0004"],
    "--policy-loss reinforce --route custom_loss": BY_OUR_LOSS,
}


@pytest.mark.parametrize("asked", LINES)
def test_the_lines_are_those_that_the_setting_needs(asked, capsys):
    assert main(["launch-config", *asked.split()]) == 0
    said = capsys.readouterr().err.partition("add to the launch line:\n")[2]
    always = ["--custom-config-path megatron_rl.yaml", " ".join(INIT)]
    assert [line.strip().removesuffix(" \\") for line in said.splitlines()] == [*always, *LINES[asked]]


# What is asked for, the exit code, what standard error says.
SAID = {
    "--loss-aggregation constant": (2, "needs --loss-aggregation-divisor"),
    "--policy-loss gspo": (2, "works on custom_loss, megatron_lm, train"),
    "--policy-loss gspo --route custom_loss --clip-ratio-low 0.2": (0, "will hardly ever clip"),
}


@pytest.mark.parametrize("asked", SAID)
def test_what_validation_says_goes_to_standard_error_and_a_refused_setting_is_not_printed(asked, capsys):
    code, message = SAID[asked]
    assert main(["launch-config", *asked.split()]) == code
    out, error = capsys.readouterr()
    assert message in error and message not in out and bool(out) == (code == 0)


SETTINGS = {
    "loss_aggregation": "prompt_mean",
    "policy_metrics": "none",
    "samples_per_prompt": 8,
    "allow_partial_prompt_groups": True,
    "clip_ratio_low": 1e-05,
    "clip_ratio_high": 4e-4,
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
