"""The launcher: a host's train script with our flags, on stand-ins of the hosts' parsers and, where named, on real checkouts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from argparse import ArgumentParser, Namespace
from pathlib import Path

import pytest
from host_harness import roots_by_environment

from megatron_rl.__main__ import main
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


@pytest.mark.parametrize("name", ["miles", "slime"])
def test_the_script_runs_as_itself_with_our_flags_in_its_parser(host, name, capsys):
    """FB-70: on its own slime drops --loss-aggregation and miles ends with 2; here the attribute is there with its value."""
    host(name)
    argv, path = sys.argv, list(sys.path)
    code, out, error = run(capsys, "train.py", *DR_GRPO, *REDUCER, "--advantage-estimator", "gspo", *INIT)
    assert (code, error) == (0, "")
    number, main, seen_argv, values = json.loads(out)
    assert number == 7 and main == "__main__"
    assert seen_argv == ["train.py", *DR_GRPO, *REDUCER, "--advantage-estimator", "gspo", *INIT]
    assert values == ["constant", 8192.0, "gspo"]
    assert (sys.argv, sys.path) == (argv, path)


def test_flags_that_the_script_adds_itself_stay(host, capsys):
    """Catches a launcher that replaces the script's own add_custom_arguments."""
    own = "add_custom_arguments=lambda parser: parser.add_argument('--mine', type=int) and parser"
    host("slime", SCRIPT.replace('"advantage_estimator"', '"mine"'), own)
    code, out, _ = run(capsys, "train.py", *DR_GRPO, *REDUCER, "--mine", "5")
    assert code == 0 and json.loads(out)[3] == ["constant", 8192.0, 5]


def test_a_script_that_adds_our_flags_already_does_not_get_them_twice(host, capsys):
    """argparse raises on a second flag of the same name."""
    host("miles", SCRIPT, "__import__('megatron_rl.arguments').arguments.add_megatron_rl_args")
    code, out, _ = run(capsys, "train.py", *DR_GRPO, *REDUCER)
    assert code == 0 and json.loads(out)[3][0] == "constant"


def test_a_wrong_scale_ends_the_run_before_training_with_every_problem(host, capsys):
    """FB-74: without the launcher the first look is in the training actors, minutes later."""
    host("slime")
    code, out, error = run(capsys, "train.py", "--loss-aggregation", "constant", "--calculate-per-token-loss", *REDUCER)
    assert code == 2 and out == ""
    assert "ConfigError: 2 problems" in error
    assert "needs --loss-aggregation-divisor" in error and "calculate_per_token_loss=True" in error


def test_flags_that_nothing_would_read_are_refused(host, capsys):
    host("slime")
    code, _, error = run(capsys, "train.py", *DR_GRPO)
    assert code == 2 and "has no effect" in error and " ".join(REDUCER) in error


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            [REDUCER[0], "megatron_rl.reducer.get_pg_loss_reducer", *INIT],
            "--custom-pg-loss-reducer-function-path megatron_rl.reducer.get_pg_loss_reducer cannot be loaded (ModuleNotFoundError",
        ),
        (
            [REDUCER[0], "megatron_rl.reducers.get_pg_loss_reducers", *INIT],
            "--custom-pg-loss-reducer-function-path megatron_rl.reducers.get_pg_loss_reducers cannot be loaded (AttributeError",
        ),
        ([*REDUCER, INIT[0], "megatron_rl.hooks.init"], "--custom-megatron-init-path megatron_rl.hooks.init cannot be loaded"),
    ],
)
def test_a_path_of_ours_that_does_not_load_is_refused_before_training(host, flags, says, capsys):
    """FB-71: the host itself finds out at the first loss, after it has loaded the model and made a rollout."""
    host("miles")
    code, out, error = run(capsys, "train.py", *DR_GRPO, *flags)
    assert (code, out) == (2, "") and says in error
    first = error.partition("ConfigError: ")[2].partition("1. ")[2] or error.partition("ConfigError: ")[2]
    assert first.startswith(says), "the cause stands before what follows from it"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], "no --custom-megatron-init-path is on the launch line: add --custom-megatron-init-path megatron_rl.hooks.custom_meg"),
        (
            [INIT[0], "user.init"],
            "--custom-megatron-init-path user.init is not ours: call megatron_rl.hooks.custom_megatron_in",
        ),
    ],
)
def test_a_launch_without_the_init_hook_is_told_what_it_loses(host, flags, says, capsys):
    """It runs: the launcher has judged it. Nothing looks at the training actors and their Megatron."""
    host("slime")
    code, out, error = run(capsys, "train.py", *DR_GRPO, *REDUCER, *flags)
    assert code == 0 and out and f"megatron_rl: {says}" in error
    assert "no probe of the installed Megatron, no line at start" in error


def test_the_cause_stands_before_its_consequence(host, capsys):
    """FB-70: slime drops the misspelt flag, and so the divisor has no use."""
    host("slime")
    code, _, error = run(capsys, "train.py", "--loss-agregation", "constant", *DR_GRPO[2:], *REDUCER)
    assert code == 2
    assert 0 < error.index("did you mean --loss-aggregation?") < error.index("loss_aggregation_divisor=8192.0 does nothing")


def test_a_warning_of_a_sound_launch_is_printed_and_the_script_runs(host, capsys):
    parser = PARSER.replace("return", "parser.add_argument('--eps-clip', type=float, default=0.2)\n    return")
    host("slime", parser=parser)
    code, out, error = run(capsys, "train.py", *DR_GRPO, *REDUCER, "--advantage-estimator", "gspo")
    assert code == 0 and out and "--eps-clip 0.2" in error and "will hardly ever clip" in error


def test_exit_codes_and_errors_of_the_script_are_its_own(host, capsys):
    host("miles", "import miles.utils.arguments\nraise SystemExit(5)")
    assert run(capsys, "train.py")[0] == 5
    (Path("train.py")).write_text("from megatron_rl.errors import ConfigError\nimport miles\nraise ConfigError('of the script')")
    with pytest.raises(ConfigError, match="of the script"):
        launch.main(["train.py"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing is where the train script belongs"),
        (["--loss-aggregation", "constant"], "--loss-aggregation is where the train script belongs"),
        (["absent.py"], "absent.py is no file in "),
    ],
)
def test_a_missing_script_is_named(arguments, message, host, capsys):
    code, _, error = run(capsys, *arguments)
    assert code == 2 and message in error and "Traceback" not in error


def test_without_a_host_the_message_says_what_was_looked_for(tmp_path, monkeypatch, capsys):
    script = tmp_path / "train.py"
    script.write_text("print('never')")
    hosts = [Namespace(package=name, parser_module=f"{name}.utils.arguments") for name in ("no_such_host", "nor_this")]
    monkeypatch.setattr(launch, "rollout_hosts", lambda: hosts)
    code, out, error = run(capsys, script)
    assert code == 2 and out == "" and "neither no_such_host nor nor_this can be imported" in error
    script.write_text("from nor_this.x import parse_args")
    code, _, error = run(capsys, script)
    assert code == 2 and "imports nor_this, which cannot be imported here" in error


def test_a_folder_with_the_name_of_a_host_is_no_host(tmp_path, monkeypatch, capsys):
    """Started beside a checkout and not in it."""
    (tmp_path / "miles" / "utils").mkdir(parents=True)
    (tmp_path / "train.py").write_text("import miles.utils.arguments")
    monkeypatch.chdir(tmp_path)
    code, out, error = run(capsys, "train.py")
    assert code == 2 and "train.py imports miles, which cannot be imported here: run from its checkout" in error


def test_a_script_that_never_parses_is_told_so(host, capsys):
    """Its flags would have had no effect, without a word."""
    host("slime", "import slime\nprint('trained')")
    code, out, error = run(capsys, "train.py", *DR_GRPO)
    assert code == 2 and out == "trained\n" and "has not called slime.utils.arguments.parse_args" in error


def test_a_host_without_the_argument_is_refused(host, capsys):
    host("slime", parser="def parse_args():\n    return None")
    code, _, error = run(capsys, "train.py", *DR_GRPO)
    assert code == 2 and "takes no add_custom_arguments" in error and "launch-config" in error


def test_a_script_that_is_no_python_is_refused(host, capsys):
    host("slime", "#!/bin/bash\nray job submit -- python3 train.py")
    code, _, error = run(capsys, "train.py")
    assert code == 2 and "is no Python script" in error


def test_help_lists_our_flags_without_a_script(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0 and "--loss-aggregation-divisor" in out and "SCRIPT ..." in out


def test_help_of_the_script_lists_both(host, capsys):
    host("slime")
    code, out, _ = run(capsys, "train.py", "--help")
    assert code == 0 and "--rollout-batch-size" in out and "--samples-per-prompt" in out


def test_the_module_runs_from_a_checkout_of_the_host(host, tmp_path):
    """The command as it is typed, from another folder than the script's."""
    script = host("miles")
    command = [sys.executable, "-m", "megatron_rl.hosts.launch", str(script), *DR_GRPO, *REDUCER]
    finished = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert json.loads(finished.stdout)[3] == ["constant", 8192.0, "grpo"]


# MEGATRON_RL_CHECK: doctor's report instead of a run

SOUND, UNSOUND = [*DR_GRPO, *REDUCER, *INIT], [*DR_GRPO, *REDUCER, "--loss-agregation", "constant"]
# Whatever loads the host, Ray or the script leaves a file.
STARTED = "open('started', 'a').close()\n"


@pytest.mark.parametrize(("flags", "expected"), [(SOUND, 0), (UNSOUND, 1)])
@pytest.mark.parametrize("name", ["miles", "slime"])
def test_a_check_prints_doctors_report_and_starts_nothing(host, name, flags, expected, capfd, monkeypatch):
    host(name, STARTED + SCRIPT, parser=STARTED + PARSER)
    monkeypatch.setenv("MEGATRON_RL_CHECK", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    code, out, error = run(capfd, "train.py", *flags)
    assert (code, error) == (expected, "")
    assert out.startswith(f"launch line: {name}, started by megatron_rl.hosts.launch, route reducer\n")
    assert "megatron_rl.reducers.get_pg_loss_reducer loads" in out
    assert ("did you mean --loss-aggregation?" in out) == bool(expected)
    assert not Path("started").exists() and f"{name}.utils.arguments" not in sys.modules
    doctor = ["doctor", "--launch-only", "--", "python", "-m", "megatron_rl.hosts.launch", "train.py"]
    assert (main([*doctor, *flags]), capfd.readouterr().out) == (expected, out)


def test_a_check_touches_no_group_no_device_and_no_ray(host, monkeypatch):
    """In a process of its own, as the host's script starts it."""
    script = host("slime", "import ray\n" + STARTED + SCRIPT)
    Path("ray.py").write_text(STARTED)
    code = """
import sys, torch
from megatron_rl.hosts.launch import main
print(main(sys.argv[1:]), torch.distributed.is_initialized(), torch.cuda.is_initialized(), "ray" in sys.modules)
"""
    finished = subprocess.run(
        [sys.executable, "-c", code, str(script), *SOUND],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "MEGATRON_RL_CHECK": "1", "PYTHONPATH": str(ROOT)},
    )
    assert finished.stdout.splitlines()[-1] == "0 False False False" and not Path("started").exists()


@pytest.mark.parametrize("value", ["0", ""])
def test_a_check_that_is_off_runs_the_script(host, value, capsys, monkeypatch):
    host("slime")
    monkeypatch.setenv("MEGATRON_RL_CHECK", value)
    code, out, _ = run(capsys, "train.py", *SOUND)
    assert code == 0 and json.loads(out)[0] == 7


def test_a_check_of_what_the_launcher_would_refuse_is_refused(host, capsys, monkeypatch):
    """A script or a host that is not here: code 2, as without the variable."""
    monkeypatch.setenv("MEGATRON_RL_CHECK", "1")
    code, out, error = run(capsys, "absent.py", *SOUND)
    assert (code, out) == (2, "") and "absent.py is no file in " in error
    host("slime", "import miles.utils.arguments")
    code, out, error = run(capsys, "train.py", *SOUND)
    assert (code, out) == (2, "") and "imports miles, which cannot be imported here" in error


# The checkout's own parse_args, its real flags and ours; what validates a machine, or needs SGLang and Megatron, is stubbed.
ON_A_CHECKOUT = textwrap.dedent(
    """
    import sys, types
    from argparse import ArgumentParser
    sys.path.insert(0, sys.argv[1])
    import host_harness
    host_harness.STUBBED += ["polars", "omegaconf", "tokenizers", "PIL", "datasets", "pybase64"]
    host, root, script, *rest = sys.argv[2:]
    host_harness.load_checkout(root)

    def parse_args(extra_args_provider=None, ignore_unknown_args=False):
        parser = ArgumentParser(allow_abbrev=False)
        parser.add_argument("--calculate-per-token-loss", action="store_true")
        parser.add_argument("--pipeline-model-parallel-size", type=int, default=2)
        parser = extra_args_provider(parser)
        return parser.parse_known_args()[0] if ignore_unknown_args else parser.parse_args()

    import megatron.training.arguments as of_megatron
    of_megatron.parse_args = parse_args
    arguments = __import__(f"{host}.utils.arguments", fromlist=["parse_args"])
    backend = __import__(f"{host}.backends.megatron_utils.arguments", fromlist=["x"])
    keep = lambda args, *others, **named: args
    for module, names in (
        (arguments, ("sglang_validate_args", f"{host}_validate_args", "add_sglang_arguments", "sglang_parse_args", "RouterArgs")),
        (backend, ("validate_args", "set_default_megatron_args", "_set_default_megatron_args")),
    ):
        for name in names:
            if hasattr(module, name):
                setattr(module, name, keep)
    if host == "slime":
        arguments.sglang_parse_args = lambda: None
    else:
        arguments.RouterArgs = types.SimpleNamespace(add_cli_args=keep)
        arguments.SimpleHealthCheckerConfig = types.SimpleNamespace(add_arguments=lambda parser, **others: None)
        backend.parse_args = parse_args
    from megatron_rl.hosts.launch import main
    sys.exit(main([script, *rest]))
    """
)


@pytest.mark.host
@pytest.mark.megatron
def test_a_real_checkout_carries_our_flags_beside_all_of_its_own(tmp_path):
    """No flag of ours collides with one of the host's, and the values arrive."""
    for name, root in roots_by_environment().items():
        script = tmp_path / f"train_{name}.py"
        (tmp_path / "helper_of_script.py").write_text("NUMBER = 7")
        script.write_text(SCRIPT.replace("{host}", name).replace("{arguments}", ""))
        line = ["--rollout-batch-size", "4", "--advantage-estimator", "gspo", "--num-rollout", "1"]
        command = [sys.executable, "-c", ON_A_CHECKOUT, str(ROOT / "tests"), name, root, str(script), *DR_GRPO, *REDUCER, *line]
        finished = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)
        assert finished.returncode == 0, finished.stderr
        assert json.loads(finished.stdout.splitlines()[-1])[3] == ["constant", 8192.0, "gspo"]


def test_the_wrapper_takes_the_hook_by_position_too():
    def parse_args(add_custom_arguments=None):
        parser = add_custom_arguments(ArgumentParser())
        return parser.parse_args([*DR_GRPO, "--custom-pg-loss-reducer-function-path", REDUCER[1], "--mine", "1"])

    def own(parser):
        parser.add_argument("--mine")
        parser.add_argument(REDUCER[0])
        return parser

    args = launch.with_our_flags(parse_args)(own)
    assert (args.mine, args.loss_aggregation) == ("1", "constant")
