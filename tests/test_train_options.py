"""`megatron-rl COMMAND`, and the flags of train: defaults, presets, and each rule with what it rejects and what it allows."""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import signal
import sys
from pathlib import Path

import pytest
from helpers import run_in_children

from megatron_rl.arguments import add_megatron_rl_args, validate_megatron_rl_args
from megatron_rl.commands import main as command_line
from megatron_rl.config import Route
from megatron_rl.declare import clip_of
from megatron_rl.errors import ConfigError, DataError, RunError
from megatron_rl.train.option_rules import TrainLaunch, check_effects, train_options, with_group_size
from megatron_rl.train.options import TrainOptions, add_train_args, experts_of, model_vocab_size, set_preset_defaults
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


def test_every_flag_arrives_with_its_type():
    numbers = {
        **dict(num_rollouts=3, prompts_per_rollout=4, steps_per_rollout=1, micro_batch_size=2, num_layers=4, hidden_size=32),
        **dict(num_attention_heads=2, vocab_size=64, lr=1e-4, clip_grad=0.0, seed=7),
        **dict(target_reward=0.5, save_interval=5, tensor_model_parallel_size=2),
        **dict(pipeline_model_parallel_size=2, context_parallel_size=2, task="tally", output_dir="x", save_rollouts="r.jsonl"),
    }
    switches = dict(overwrite=True, tensorboard=False, json=True, packed=True, sequence_parallel=True)
    switches |= dict(use_distributed_optimizer=True, bf16=False)
    words = [f"--{name} {value}" for name, value in numbers.items()] + [f"--{'' if on else 'no-'}{n}" for n, on in switches.items()]
    line = " ".join(words).replace("_", "-")
    assert options_of(line) == TrainOptions(**numbers, **switches)


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


@pytest.mark.parametrize("line", ["--preset demo --policy-loss grpo --lr 1", "--policy-loss grpo --lr 1 --preset=demo"])
def test_a_flag_that_is_given_wins_over_the_preset_wherever_it_stands(line):
    """Catches a preset that overrides what the user wrote, and GSPO's clip of 3e-4 left standing under GRPO."""
    args = parse(line)
    config = validate_megatron_rl_args(args, Route.TRAIN)
    assert (config.policy_loss, args.lr, config.loss_aggregation) == ("grpo", 1.0, "prompt_mean")
    assert clip_of(config) == (0.2, 0.2)


@pytest.mark.parametrize(
    ("line", "task"), [("", "tally"), ("--task repeat", "repeat"), ("--prompts p.jsonl", None), ("--hf-checkpoint=folder", None)]
)
def test_a_task_that_is_given_wins_over_that_of_the_preset(line, task):
    """Catches --preset demo with --prompts refused as two tasks."""
    args = parse(f"{line} --preset demo")
    assert (args.task, args.lr) == (task, 1e-3)


# Rules

REJECTED = [
    # line, what the message says
    ("--num-rollouts 0", "--num-rollouts 0 must be at least 1"),
    ("--lr 0", r"--lr 0\.0 must be above 0"),
    ("--lr-warmup-iters -1", "--lr-warmup-iters -1 must be at least 0"),
    ("--lr-decay-style linear --docs-per-step 16", "linear has no effect with --docs-per-step"),
    ("--lr-decay-style linear --rollouts here.jsonl", "linear needs --num-rollouts"),
    ("--clip-grad -1", r"--clip-grad -1\.0 must be at least 0; 0 does not clip"),
    ("--seed -1", "--seed -1 must be at least 0"),
    ("--target-reward inf", "--target-reward inf must be finite"),
    ("--save-rollouts here.jsonl", r"--save-rollouts here\.jsonl exists"),
    ("--output-dir old", "--output-dir old holds a run; --resume goes on"),
    ("--output-dir started", "started holds a run; --resume goes on, --overwrite starts"),
    # FB-120: one engine, and the policy itself
    ("--importance-correction tis", "tis has .* with the engine .* every ratio is 1; .*--rollouts"),
    ("--off-policy-sequence-delta 0.1 --steps-per-rollout 1", "no effect with one optimiser step"),
    ("--top-p 0", r"--top-p 0\.0 must be above 0 and at most 1; 1 turns it off"),
    ("--top-p 0.9 --sampling-support refuse", "with --sampling-support refuse: .* is off by"),
    ("--sampling-support replay", "--sampling-support replay has no effect: .* add --top-p"),
]


@pytest.fixture
def earlier_files(empty_directory):
    """A rollout file, a finished run, one killed before its first checkpoint, and one that failed before its first step."""
    for folder in ("old/checkpoints/step_00000001", "started", "failed"):
        (empty_directory / folder).mkdir(parents=True)
    texts = {
        "here.jsonl": ROLLOUT,
        "old/checkpoints/latest": "step_00000001\n",
        "started/metrics.jsonl": '{"step": 1}\n',
        "failed/metrics.jsonl": "",
    }
    for path, text in texts.items():
        (empty_directory / path).write_text(text)


@pytest.mark.parametrize(("line", "message"), REJECTED)
def test_a_bad_option_is_refused_with_its_flag(earlier_files, line, message):
    with pytest.raises(ConfigError, match=message):
        options_of(line)


ALLOWED = [
    "--clip-grad 0 --seed 0",
    "--top-p 1 --sampling-support refuse",
    "--top-p 0.9 --sampling-support replay",
    "--sampling-support replay --rollouts here.jsonl",
    "--off-policy-sequence-delta 0.1",
    "--importance-correction tis --off-policy-sequence-delta 0.1 --rollouts here.jsonl",
    "--docs-per-step many",  # the rules of the loss tell that it is no number
    "--save-rollouts here.jsonl --resume --output-dir old",
    "--output-dir failed",
]


@pytest.mark.parametrize("line", ALLOWED)
def test_a_good_option_is_allowed(earlier_files, line):
    options_of(line)


def test_the_vocabulary_is_the_tasks_unless_a_larger_one_is_asked_for():
    assert model_vocab_size(TrainOptions(), 9) == 9
    assert model_vocab_size(TrainOptions(vocab_size=9), 9) == 9
    assert model_vocab_size(TrainOptions(vocab_size=64), 9) == 64
    with pytest.raises(ConfigError, match="--vocab-size 8 is smaller than the task's 9 tokens"):
        model_vocab_size(TrainOptions(vocab_size=8), 9)


@pytest.mark.slow
def test_options_and_writers_load_no_megatron_and_no_drawing_library():
    """Catches seconds of imports before a misspelt flag is reported, and in every rank."""
    modules = ", ".join(f"megatron_rl.train.{name}" for name in ("options", "plots", "progress", "writers"))
    script = f"import sys; import {modules}; print({{'megatron', 'matplotlib', 'tensorboard'}} & set(sys.modules))"
    assert run_in_children(script) == "set()\n"


def test_a_folder_of_experts_has_the_losses_of_routers_that_are_typed():
    balance, kind = {"moe_aux_loss_coeff": 0.1}, {"moe_router_load_balancing_type": "aux_loss"}
    for typed, more in (({}, {}), (balance, kind)):
        assert experts_of(TrainOptions(hf_checkpoint="folder", num_experts=4, **typed)) == typed | more


# The command itself


def run_without_a_reader(arguments: list[str], error_file: Path) -> None:
    """Standard output is a pipe whose other end is closed, as after `| head`."""
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)
    os.dup2(os.open(error_file, os.O_CREAT | os.O_WRONLY), 2)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
    sys.argv = ["megatron-rl", *arguments]
    sys.exit(command_line.main())


UNREAD = [
    ["explain", "--response-lengths", "1,2,3", "--json"],  # one line, written when the command ends
    ["explain", "--response-lengths", ",".join(["2"] * 3000), "--rows", "3000"],  # more than a buffer
    ["launch-config", "--help"],  # after which argparse exits
]


@pytest.mark.parametrize("arguments", UNREAD, ids=["a line", "many lines", "help"])
def test_a_command_whose_output_nobody_reads_ends_without_a_word(tmp_path, arguments):
    """`megatron-rl explain ... | head`: SIGPIPE, which a shell shows as 141."""
    process = multiprocessing.get_context("fork").Process(target=run_without_a_reader, args=(arguments, tmp_path / "stderr"))
    process.start()
    process.join()
    assert (process.exitcode, (tmp_path / "stderr").read_text()) == (-signal.SIGPIPE, "")


def test_a_closed_pipe_of_a_command_s_own_work_is_an_error(monkeypatch):
    """A reward that lost its server must not end a run without a word."""

    def lost(arguments):
        raise BrokenPipeError("a socket of the user's own")

    monkeypatch.setattr(command_line, "run_command", lost)
    monkeypatch.setattr(sys, "argv", ["megatron-rl", "train"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(BrokenPipeError, match="a socket of the user's own"):
        command_line.main()
    assert signal.getsignal(signal.SIGPIPE) == signal.SIG_IGN


@pytest.mark.parametrize(("kind", "code", "end"), [(ConfigError, 2, "\\n"), (DataError, 1, "\n"), (RunError, 1, "\n")])
def test_an_error_moves_no_cursor(monkeypatch, capsys, kind, code, end):
    """What a file holds is part of messages: escapes are shown, lines stay lines, and a problem of a ConfigError is one."""

    class Failing:
        @staticmethod
        def add_arguments(parser, arguments):
            pass

        @staticmethod
        def run(args):
            raise kind("first\x1b[2J\r\u2028\nsecond")

    monkeypatch.setattr(command_line, "command_module", lambda name: Failing)
    assert command_line.main(["train"]) == code
    assert capsys.readouterr().err == f"megatron-rl train: {kind.__name__}: first\\x1b[2J\\r\\u2028{end}second\n"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("train --loss_agregation=constant", "did you mean --loss-aggregation?"),
        ("doctor --xyz 1", "--xyz is no flag of megatron-rl doctor: megatron-rl doctor --help lists"),
        ("selftest cp2 -3", "megatron-rl selftest takes no argument 'cp2 -3'"),
        ("train --xyz --zyx", "2 problems:"),
    ],
)
def test_an_unknown_flag_is_refused_with_what_it_may_mean(capsys, line, said):
    assert command_line.main(line.split()) == 2
    assert said in capsys.readouterr().err
