"""`megatron-rl launch-config`: our settings as the file of --custom-config-path, and the lines to add to a stock miles or slime
launcher. Standard output is the file, standard error has the lines. A setting that validation refuses is not printed."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from megatron_rl.arguments import add_megatron_rl_args, validate_megatron_rl_args
from megatron_rl.config import LaunchMethod, PolicyLossConfig, flag_fields
from megatron_rl.declare import clip_of
from megatron_rl.hosts.args import CUSTOM_LOSS_LINE, GUARD_LINE, INIT_LINE, REDUCER_LINE, REWARD_LINE
from megatron_rl.validation import config_warnings
from megatron_rl.weights import TOKEN_MEAN, get_loss_aggregation

PER_TOKEN_LINE = "--calculate-per-token-loss"
LINES_OF_METHOD: dict[LaunchMethod | None, list[str]] = {
    LaunchMethod.REDUCER: [REDUCER_LINE],
    LaunchMethod.CUSTOM_LOSS: [CUSTOM_LOSS_LINE, GUARD_LINE],
}
FILE_NAME = "megatron_rl.yaml"


def add_arguments(parser: ArgumentParser, arguments: Sequence[str]) -> None:
    add_megatron_rl_args(parser, arguments)
    group = parser.add_argument_group(title="launch-config")
    group.add_argument(
        "--launch-method",
        choices=[*map(str, LINES_OF_METHOD)],
        default=str(LaunchMethod.REDUCER),
        help="reducer: the host's loss, our aggregation; custom_loss: our loss too. Default: reducer.",
    )
    group.add_argument(
        "--calculate-per-token-loss",
        action="store_true",
        help="The launcher sets Megatron's flag of that name: token_mean then needs no hook, and counts a token for each fully "
        "masked sample.",
    )


def run(args: Namespace) -> int:
    config = validate_megatron_rl_args(args, LaunchMethod(args.launch_method))
    print(yaml_text(settings_of_file(args, config)), end="")
    for warning in config_warnings(config):
        print(f"megatron_rl: {warning}", file=sys.stderr)
    added = " \\\n".join(f"    {line}" for line in launch_lines(args, config))
    print(f"megatron_rl: write standard output to a file (> {FILE_NAME}), and add to the launch line:\n{added}", file=sys.stderr)
    return 0


def settings_of_file(args: Namespace, config: PolicyLossConfig) -> dict[str, str | float | int | bool]:
    """Every setting that was given, and the aggregation always: its absence would tell a host's hooks that it was dropped."""
    given = {field.name: getattr(config, field.name) for field in flag_fields() if vars(args)[field.name] is not None}
    return {"loss_aggregation": config.loss_aggregation, **given, **config.loss_parameters}


def launch_lines(args: Namespace, config: PolicyLossConfig) -> list[str]:
    lines = [f"--custom-config-path {FILE_NAME}", INIT_LINE, *LINES_OF_METHOD[LaunchMethod(args.launch_method)]]
    # The host's own flags always have a value, which would win over the loss's default and contradict another in the file.
    clip = (
        clip_of(config) if LaunchMethod(args.launch_method) == LaunchMethod.CUSTOM_LOSS and args.policy_loss is not None else None
    )
    lines += [] if clip is None else [f"--eps-clip {clip[0]!r} --eps-clip-high {clip[1]!r}"]
    lines += [PER_TOKEN_LINE] if args.calculate_per_token_loss else []
    return [*lines, REWARD_LINE] if needs_reward_hook(config, per_token=args.calculate_per_token_loss) else lines


def needs_reward_hook(config: PolicyLossConfig, *, per_token: bool) -> bool:
    """For weights that one micro-batch does not know, unless the host divides by the step's tokens itself."""
    record = get_loss_aggregation(config.loss_aggregation)
    is_divided_later = per_token and record.formula == TOKEN_MEAN
    return not is_divided_later and record.missing_where_a_host_divides_by("N") != ()


def yaml_text(settings: dict[str, str | float | int | bool]) -> str:
    """One `key: value` a line, read the same by YAML 1.1 and 1.2: text in quotes (a bare off is false), floats with a point."""
    return "".join(f"{name}: {_yaml_scalar(value)}\n" for name, value in settings.items())


def _yaml_scalar(value: str | float | int | bool) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        mantissa, exponent, power = repr(value).partition("e")
        return (mantissa if "." in mantissa else f"{mantissa}.0") + exponent + power
    # JSON's text is YAML's double-quoted text.
    return json.dumps(value)
