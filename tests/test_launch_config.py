"""`megatron-rl launch-config`: a file that both hosts read as it was meant, the lines it needs, and what it refuses to write."""

from __future__ import annotations

import pytest

from megatron_rl.__main__ import main
from megatron_rl.commands.launch_config import yaml_text

DR_GRPO = ["--loss-aggregation", "constant", "--loss-aggregation-divisor", "8192"]


@pytest.fixture
def launch_config(capsys):

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(["launch-config", *arguments])
        out, error = capsys.readouterr()
        return code, out, error

    return run


def lines_of(error: str) -> list[str]:
    """What follows the line that says what to do with the file."""
    return [line.strip().removesuffix(" \\") for line in error.partition("add to the launch line:\n")[2].splitlines()]


def test_dr_grpo_for_a_stock_launcher(launch_config):
    """The file passes a launcher that drops or refuses unknown flags. A redirection gets the file alone."""
    code, out, error = launch_config(*DR_GRPO)
    assert (code, out) == (0, 'loss_aggregation: "constant"\nloss_aggregation_divisor: 8192.0\n')
    assert "write standard output to a file (> megatron_rl.yaml)" in error
    assert "    --custom-config-path megatron_rl.yaml \\\n" in error


REWARD = "--custom-reward-post-process-path megatron_rl.hooks.reward_post_process"
CUSTOM_LOSS = "--loss-type custom_loss --custom-loss-function-path megatron_rl.hooks.custom_loss"
GUARD = "--custom-megatron-before-train-step-hook-path megatron_rl.hooks.before_train_step"
LINES = [
    pytest.param(["--loss-aggregation", "prompt_mean"], [REWARD], id="prompt_mean needs the companion"),
    pytest.param(["--loss-aggregation", "token_mean"], [REWARD], id="token_mean without phantom tokens"),
    pytest.param(
        ["--loss-aggregation", "token_mean", "--calculate-per-token-loss"],
        ["--calculate-per-token-loss"],
        id="token_mean by the host",
    ),
    pytest.param(["--loss-aggregation", "prompt_mean", "--route", "custom_loss"], [CUSTOM_LOSS, GUARD, REWARD], id="our loss"),
    pytest.param(
        ["--policy-loss", "gspo", "--route", "custom_loss"],
        [CUSTOM_LOSS, GUARD, "--eps-clip 0.0003 --eps-clip-high 0.0004"],
        id="a loss with a clip: the host's flags always have one",
    ),
    pytest.param(
        ["--policy-loss", "gspo", "--clip-ratio-low", "1e-3", "--route", "custom_loss"],
        [CUSTOM_LOSS, GUARD, "--eps-clip 0.001 --eps-clip-high 0.0004"],
        id="a clip of one's own",
    ),
    pytest.param(["--policy-loss", "reinforce", "--route", "custom_loss"], [CUSTOM_LOSS, GUARD], id="a loss without a clip"),
    pytest.param([], [], id="sample_mean"),
    pytest.param(DR_GRPO, [], id="constant"),
]


@pytest.mark.parametrize(("arguments", "expected"), LINES)
def test_the_lines_are_those_that_the_setting_needs(launch_config, arguments, expected):
    _, _, error = launch_config(*arguments)
    reducer = "--custom-pg-loss-reducer-function-path megatron_rl.reducers.get_pg_loss_reducer"
    always = ["--custom-config-path megatron_rl.yaml", "--custom-megatron-init-path megatron_rl.hooks.custom_megatron_init"]
    assert lines_of(error) == [*always, *([] if CUSTOM_LOSS in expected else [reducer]), *expected]


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


REFUSED = [
    pytest.param(["--loss-aggregation", "constant"], "needs --loss-aggregation-divisor", id="no divisor"),
    pytest.param(["--policy-loss", "gspo"], "works on custom_loss, megatron_lm, train", id="a flag that the reducer never sees"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_a_setting_that_validation_refuses_is_not_printed(launch_config, arguments, message):
    code, out, error = launch_config(*arguments)
    assert code == 2 and out == "" and message in error


def test_a_warning_goes_to_standard_error(launch_config):
    code, out, error = launch_config("--route", "custom_loss", "--policy-loss", "gspo", "--clip-ratio-low", "0.2")
    assert code == 0 and "will hardly ever clip" in error and "hardly" not in out
