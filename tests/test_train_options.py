"""`megatron-rl COMMAND`, and the flags of train: defaults, presets, and each rule with what it rejects and what it allows."""

from __future__ import annotations

import argparse
import dataclasses
import json

import pytest

from megatron_rl.arguments import add_megatron_rl_args, validate_megatron_rl_args
from megatron_rl.commands import main as command_line
from megatron_rl.config import LaunchMethod
from megatron_rl.declare import clip_of
from megatron_rl.errors import ConfigError
from megatron_rl.train.option_rules import TrainLaunch, check_effects, train_options, with_group_size
from megatron_rl.train.options import TrainOptions, add_train_args, experts_of, set_preset_defaults
from megatron_rl.validation import flag_of

# A file of one rollout.
ROLLOUT = (
    '{"rollout_index": 0, "samples": [{"prompt_id": "a", "tokens": [1, 2], "response_length": 1, "loss_mask": [1], "reward": 1.0, '
    '"advantage": 0.0, "old_log_probs": null, "index": 0}]}\n'
)


def make_parser() -> argparse.ArgumentParser:
    return add_train_args(add_megatron_rl_args(argparse.ArgumentParser(allow_abbrev=False)))


def parse(line: str) -> argparse.Namespace:
    parser = make_parser()
    set_preset_defaults(parser, line.split())
    return parser.parse_args(line.split())


def write_prompts(path, *prompts):
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return path


def options_of(line: str) -> TrainOptions:
    return train_options(with_group_size(vars(parse(line))))


@pytest.fixture(autouse=True)
def empty_directory(tmp_path, monkeypatch):
    """runs/train is the default output directory: no test may depend on one that somebody left."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_without_flags_every_option_has_its_default_and_each_is_a_flag():
    """Catches a default that is written twice, in the field and at the flag, and differs."""
    assert options_of("") == TrainOptions(num_rollouts=140, lr=3e-3)
    assert with_group_size(vars(parse("")))["samples_per_prompt"] == 8
    text = make_parser().format_help()
    for field in dataclasses.fields(TrainOptions):
        assert f"--{field.name.replace('_', '-')}" in text


def value_for(option: dataclasses.Field) -> str:
    """A value of the option's flag, other than its default."""
    choices = [choice for choice in option.metadata["argparse"].get("choices", ()) if choice != option.default]
    return "" if option.default is False else choices[-1] if choices else "1" if option.default is None else str(option.default + 1)


def effects_of(typed: dict) -> list[str]:
    settings = {one.name: one.default for one in dataclasses.fields(TrainOptions)} | {"docs_per_step": None} | typed
    values = {name: value for name, value in settings.items() if name != "docs_per_step"}
    return [*check_effects(TrainLaunch(**values, settings=settings))]


CONDITIONAL = [one for one in dataclasses.fields(TrainOptions) if one.metadata["needs"] or one.metadata["without"]]


@pytest.mark.parametrize("option", CONDITIONAL, ids=lambda one: one.name)
def test_a_flag_that_would_do_nothing_is_refused(option):
    """Without the one that it needs, and beside the one that makes it idle."""
    value = vars(parse(f"{flag_of(option.name)} {value_for(option)}"))[option.name]
    shown, typed = f"{flag_of(option.name)} {value}".removesuffix(" True"), {option.name: value}
    if option.metadata["needs"] is not None:
        needed, why = option.metadata["needs"]
        said = f"{shown} needs {flag_of(needed)}: {why}"
        assert said in effects_of(typed | ({needed: False} if needed == "tensorboard" else {}))
        assert said not in effects_of(typed | {needed: True if needed == "tensorboard" else 2})
    if option.metadata["without"] is not None:
        other, why = option.metadata["without"]
        said = f"{shown} has no effect with {flag_of(other)}: {why}; remove it"
        assert said in effects_of(typed | {other: "given"}) and said not in effects_of(typed)


def test_defaults_that_depend_on_other_flags(tmp_path):
    """Catches a default refused as if it had been given, and 140 rollouts that cut a longer file short."""
    assert [options_of(line).steps_per_rollout for line in ("", "--preset demo", "--docs-per-step 64")] == [2, 2, 1]
    (tmp_path / "r.jsonl").write_text(ROLLOUT)
    assert options_of("--rollouts r.jsonl").num_rollouts is None
    assert options_of("--rollouts r.jsonl --num-rollouts 10").num_rollouts == 10


def test_a_flag_that_is_given_wins_over_the_preset():
    """Catches a preset that overrides what the user wrote, and GSPO's clip of 3e-4 left standing under GRPO."""
    args = parse("--policy-loss grpo --lr 1 --preset demo")
    config = validate_megatron_rl_args(args, LaunchMethod.TRAIN)
    assert (config.policy_loss, args.lr, config.loss_aggregation) == ("grpo", 1.0, "prompt_mean")
    assert clip_of(config) == (0.2, 0.2)


# Rules

REJECTED = [
    # line, what the message says
    ("--lr-decay-style linear --docs-per-step 16", "linear has no effect with --docs-per-step"),
    ("--lr-decay-style linear --rollouts here.jsonl", "linear needs --num-rollouts"),
    ("--save-rollouts here.jsonl", r"--save-rollouts here\.jsonl exists"),
    ("--output-dir old", "--output-dir old holds a run; --resume goes on"),
    # FB-120: one engine, and the policy itself
    ("--importance-correction tis", "tis has .* with the engine .* every ratio is 1; .*--rollouts"),
    ("--off-policy-sequence-delta 0.1 --steps-per-rollout 1", "no effect with one optimiser step"),
    ("--top-p 0", r"--top-p 0\.0 must be above 0 and at most 1; 1 turns it off"),
    ("--top-p 0.9 --sampling-support refuse", "with --sampling-support refuse: .* is off by"),
    ("--sampling-support replay", "--sampling-support replay has no effect: .* add --top-p"),
]


@pytest.fixture
def earlier_files(empty_directory):
    """A rollout file, a finished run, and one that failed before its first step."""
    for folder in ("old/checkpoints/step_00000001", "failed"):
        (empty_directory / folder).mkdir(parents=True)
    texts = {
        "here.jsonl": ROLLOUT,
        "old/checkpoints/latest": "step_00000001\n",
        "failed/metrics.jsonl": "",
    }
    for path, text in texts.items():
        (empty_directory / path).write_text(text)


@pytest.mark.parametrize(("line", "message"), REJECTED)
def test_a_bad_option_is_refused_with_its_flag(earlier_files, line, message):
    with pytest.raises(ConfigError, match=message):
        options_of(line)


ALLOWED = [
    "--top-p 0.9 --sampling-support replay",
    "--sampling-support replay --rollouts here.jsonl",
    "--importance-correction tis --off-policy-sequence-delta 0.1 --rollouts here.jsonl",
    "--docs-per-step many",  # the rules of the loss tell that it is no number
    "--save-rollouts here.jsonl --resume --output-dir old",
    "--output-dir failed",
]


@pytest.mark.parametrize("line", ALLOWED)
def test_a_good_option_is_allowed(earlier_files, line):
    options_of(line)


def test_a_folder_of_experts_has_the_losses_of_routers_that_are_typed():
    balance, kind = {"moe_aux_loss_coeff": 0.1}, {"moe_router_load_balancing_type": "aux_loss"}
    for typed, more in (({}, {}), (balance, kind)):
        assert experts_of(TrainOptions(hf_checkpoint="folder", num_experts=4, **typed)) == typed | more


# The command itself


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("train --loss_agregation=constant", "did you mean --loss-aggregation?"),
        ("selftest cp2 -3", "megatron-rl selftest takes no argument 'cp2 -3'"),
    ],
)
def test_an_unknown_flag_is_refused_with_what_it_may_mean(capsys, line, said):
    assert command_line.main(line.split()) == 2
    assert said in capsys.readouterr().err
