"""The flags of `megatron-rl train`: defaults, presets, and each rule with what it rejects and what it allows."""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys

import pytest
from conftest import ROOT

from megatron_rl.arguments import add_megatron_rl_args, validate_megatron_rl_args
from megatron_rl.config import PolicyLossConfig, Route
from megatron_rl.errors import ConfigError
from megatron_rl.loss_hub import clip_of
from megatron_rl.training.option_rules import train_options
from megatron_rl.training.options import PRESETS, TrainOptions, add_train_args, model_vocab_size, set_preset_defaults


def make_parser() -> argparse.ArgumentParser:
    return add_train_args(add_megatron_rl_args(argparse.ArgumentParser(allow_abbrev=False)))


def parse(line: str) -> argparse.Namespace:
    parser = make_parser()
    set_preset_defaults(parser, line.split())
    return parser.parse_args(line.split())


def options_of(line: str, world_size: int = 1) -> TrainOptions:
    return train_options(vars(parse(line)), world_size=world_size)


@pytest.fixture(autouse=True)
def empty_directory(tmp_path, monkeypatch):
    """runs/train is the default output directory: no test may depend on one that somebody left."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_without_flags_every_option_has_its_default():
    """Catches a default that is written twice, in the field and at the flag, and differs."""
    assert options_of("") == TrainOptions(num_rollouts=140)
    assert parse("").samples_per_prompt == 8


def test_every_option_is_a_flag_and_has_a_line_of_help():
    text = make_parser().format_help()
    for field in dataclasses.fields(TrainOptions):
        assert f"--{field.name.replace('_', '-')}" in text
        assert field.metadata["help"].endswith(".")


def test_every_flag_arrives_with_its_type(tmp_path):
    line = (
        f"--task add --output-dir {tmp_path}/x --num-rollouts 3 --prompts-per-rollout 4 --steps-per-rollout 1 "
        "--micro-batch-size 2 --num-layers 4 --hidden-size 32 --num-attention-heads 2 --vocab-size 64 --lr 1e-4 "
        "--adam-beta2 0.9 --clip-grad 0 --weight-decay 0.1 --seed 7 --target-reward 0.5 --target-reward-window 2 "
        "--max-seconds 30 --save-rollouts r.jsonl --save-interval 5 --overwrite --no-tensorboard --no-plot --json "
        "--packed --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --context-parallel-size 2 "
        "--sequence-parallel --use-distributed-optimizer --no-bf16"
    )
    assert options_of(line, world_size=8) == TrainOptions(
        task="add",
        output_dir=f"{tmp_path}/x",
        num_rollouts=3,
        prompts_per_rollout=4,
        steps_per_rollout=1,
        micro_batch_size=2,
        num_layers=4,
        hidden_size=32,
        num_attention_heads=2,
        vocab_size=64,
        lr=1e-4,
        adam_beta2=0.9,
        clip_grad=0.0,
        weight_decay=0.1,
        seed=7,
        target_reward=0.5,
        target_reward_window=2,
        max_seconds=30.0,
        save_rollouts="r.jsonl",
        save_interval=5,
        overwrite=True,
        tensorboard=False,
        plot=False,
        json=True,
        packed=True,
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        context_parallel_size=2,
        sequence_parallel=True,
        use_distributed_optimizer=True,
        bf16=False,
    )


def test_batches_are_padded_or_packed_and_not_both(capsys):
    """Catches --padded read as --packed."""
    assert [options_of(line).packed for line in ("", "--padded", "--packed")] == [False, False, True]
    with pytest.raises(SystemExit):
        parse("--packed --padded")
    assert "--padded: not allowed with argument --packed" in capsys.readouterr().err


def test_unset_steps_per_rollout_are_two_unless_documents_say_where_a_step_ends():
    """Catches the default of 2 refused as if it had been given, and None left where the loop wants a number."""
    assert [options_of(line).steps_per_rollout for line in ("", "--preset demo", "--docs-per-step 64")] == [2, 2, 1]
    assert "Default: 2." in " ".join(make_parser().format_help().split())


def test_a_replay_takes_all_rollouts_of_its_file_unless_told_otherwise(tmp_path):
    """Catches the default of 140 cutting a longer file short without a word."""
    (tmp_path / "r.jsonl").write_text("")
    assert options_of("--rollouts r.jsonl").num_rollouts is None
    assert options_of("--rollouts r.jsonl --num-rollouts 10").num_rollouts == 10


def test_the_demo_is_gspo_with_prompt_mean_and_gspos_own_clip():
    args = parse("--preset demo")
    config = validate_megatron_rl_args(args, Route.TRAIN)
    assert (config.policy_loss, config.loss_aggregation, config.samples_per_prompt) == ("gspo", "prompt_mean", 8)
    assert clip_of(config) == (3e-4, 4e-4)
    options = train_options(vars(args))
    assert (options.prompts_per_rollout, options.steps_per_rollout, options.lr) == (16, 2, 3e-3)
    assert (options.num_rollouts, options.target_reward, options.target_reward_window) == (140, 0.97, 5)


@pytest.mark.parametrize("line", ["--preset demo --policy-loss grpo --lr 1", "--policy-loss grpo --lr 1 --preset=demo"])
def test_a_flag_that_is_given_wins_over_the_preset_wherever_it_stands(line):
    """Catches a preset that overrides what the user wrote, and GSPO's clip of 3e-4 left standing under GRPO."""
    args = parse(line)
    config = validate_megatron_rl_args(args, Route.TRAIN)
    assert (config.policy_loss, args.lr, config.loss_aggregation) == ("grpo", 1.0, "prompt_mean")
    assert clip_of(config) == (0.2, 0.2)


def test_a_preset_sets_existing_flags_alone():
    """Catches a misspelt name, which argparse would accept and nobody read."""
    known = {field.name for owner in (TrainOptions, PolicyLossConfig) for field in dataclasses.fields(owner)}
    assert [name for preset in PRESETS.values() for name in preset if name not in known] == []


@pytest.mark.parametrize("line", ["--preset fast", "--preset"])
def test_an_unknown_preset_is_refused(line, capsys):
    with pytest.raises(SystemExit):
        parse(line)
    assert "--preset" in capsys.readouterr().err


# Rules

REJECTED = [
    # line, world size, what the message says
    pytest.param("--num-rollouts 0", 1, r"--num-rollouts 0 must be at least 1", id="count of zero"),
    pytest.param("--save-interval -1", 1, r"--save-interval -1 must be at least 1", id="negative count"),
    pytest.param("--lr 0", 1, r"--lr 0\.0 must be above 0", id="no learning rate"),
    pytest.param("--lr nan", 1, r"--lr nan must be above 0", id="learning rate NaN"),
    pytest.param("--adam-beta2 1", 1, r"--adam-beta2 1\.0 must be in \[0, 1\)", id="beta of 1"),
    pytest.param("--clip-grad -1", 1, r"--clip-grad -1\.0 must be at least 0; 0 does not clip", id="negative clip"),
    pytest.param("--weight-decay -1", 1, r"--weight-decay -1\.0 must be at least 0", id="negative decay"),
    pytest.param("--seed -1", 1, r"--seed -1 must be at least 0", id="negative seed"),
    pytest.param("--max-seconds 0", 1, r"--max-seconds 0\.0 must be above 0", id="no time"),
    pytest.param("--target-reward inf", 1, r"--target-reward inf must be finite", id="target never reached"),
    pytest.param("--task copy", 1, r"--task copy is unknown; built in: repeat, sort, add", id="unknown task"),
    pytest.param("--task add --prompts p.jsonl --reward a.b", 1, r"are two tasks", id="task and prompts"),
    pytest.param("--prompts p.jsonl", 1, r"--prompts p.jsonl needs --reward", id="prompts without reward"),
    pytest.param("--max-new-tokens 3", 1, r"--max-new-tokens 3 works with --prompts alone", id="length of built-in"),
    pytest.param("--hidden-size 30", 1, r"--hidden-size 30 must be a multiple of --num-attention-heads 4", id="heads"),
    pytest.param(
        "--tensor-model-parallel-size 8",
        8,
        r"--num-attention-heads 4 must be a multiple of --tensor-model-parallel-size 8: each .* holds whole heads",
        id="fewer heads than ranks",
    ),
    pytest.param(
        "--num-layers 3 --pipeline-model-parallel-size 2",
        2,
        r"--num-layers 3 must be a multiple of --pipeline-model-parallel-size 2",
        id="layers over stages",
    ),
    pytest.param("--sequence-parallel", 1, r"--sequence-parallel needs --tensor-model-parallel-size 2", id="SP alone"),
    pytest.param(
        "--docs-per-step 64 --steps-per-rollout 2",
        1,
        r"--steps-per-rollout 2 and --docs-per-step 64 both say where a step ends: remove one",
        id="two ends of a step",
    ),
    pytest.param(
        "--docs-per-step 129",
        1,
        r"129 is more than the 128 documents of a rollout .*-rollout 16 x --samples-per-prompt 8\): a step ends with its rollout",
        id="a step longer than its rollout",
    ),
    pytest.param(
        "--docs-per-step 8 --rollouts here.jsonl --save-rollouts there.jsonl",
        1,
        r"--save-rollouts with --rollouts and --docs-per-step: .* copy the file",
        id="copy of a stream",
    ),
    pytest.param("--max-microbatches 8", 1, r"--max-microbatches 8 bounds the steps of --docs-per-step", id="bound of nothing"),
    pytest.param("--docs-per-step 8 --max-microbatches 0", 1, r"--max-microbatches 0 must be at least 1", id="bound of zero"),
    pytest.param("--metrics-writer os.nothing", 1, r"--metrics-writer 'os\.nothing': module 'os' has no", id="no such writer"),
    pytest.param("--steps-per-rollout 17", 1, r"--steps-per-rollout 17 must be at most --prompts-per-rollout 16", id="steps"),
    pytest.param("--rollouts none.jsonl", 1, r"--rollouts none\.jsonl: there is no such file", id="no replay file"),
    pytest.param("--rollouts here.jsonl --save-rollouts ./here.jsonl", 1, r"are both here\.jsonl", id="read and written"),
    pytest.param("--save-rollouts here.jsonl", 1, r"--save-rollouts here\.jsonl exists", id="rollouts of another run"),
    pytest.param("--load nowhere", 1, r"--load nowhere: there is no such directory", id="nothing to load"),
    pytest.param("--resume --load old --output-dir old", 1, r"--resume and --load say different", id="two starts"),
    pytest.param("--resume --overwrite --output-dir old", 1, r"--resume and --overwrite say", id="resume, overwrite"),
    pytest.param("--resume", 1, r"--resume: --output-dir runs/train holds no checkpoints", id="nothing to resume"),
    pytest.param("--output-dir old", 1, r"--output-dir old holds a run; --resume goes on", id="output taken"),
    pytest.param("--output-dir started", 1, r"started holds a run; --overwrite starts anew", id="taken, no checkpoint yet"),
    pytest.param("--reward-timeout 0", 1, r"--reward-timeout 0\.0 must be above 0 and at most 604800, a week", id="no time at all"),
    pytest.param("--reward-timeout 1e30", 1, r"--reward-timeout 1e\+30 must be above 0 and at most", id="longer than a timer"),
    pytest.param("--output-dir=", 1, r"--output-dir '': the name is empty", id="output without a name"),
    pytest.param("--output-dir a\0b", 1, r"--output-dir 'a\\x00b': the name holds a NUL", id="output with NUL"),
    pytest.param(f"--output-dir {'a' * 5000}", 1, r"--output-dir 'a{200}': the name has 5000 characters", id="output too long"),
    pytest.param("--output-dir folders", 1, r"folders/metrics\.jsonl is a folder", id="metrics are a folder"),
    pytest.param("--overwrite --output-dir mine", 1, r"mine/checkpoints holds what no run .*\(best\.pt\)", id="foreign files"),
    pytest.param("--output-dir linked", 1, r"linked/checkpoints is a link to nowhere, which is not there", id="a link to nothing"),
    pytest.param("--save-rollouts=", 1, r"--save-rollouts : the name is empty", id="rollouts without a name"),
    pytest.param("--save-rollouts runs/train/metrics.jsonl", 1, r"it is the run's own metrics\.jsonl", id="rollouts in metrics"),
    pytest.param("--save-rollouts runs/train/x/../run.lock", 1, r"it is the run's own run\.lock", id="rollouts in the lock"),
    pytest.param("--save-rollouts mine", 1, r"--save-rollouts mine: it is a folder", id="rollouts in a folder"),
    pytest.param("--hidden-size 12", 1, "makes heads 3 wide: .* use --hidden-size 24", id="odd head width"),
    pytest.param("--output-dir here.jsonl/x", 1, r"here\.jsonl is not a directory", id="output below a file"),
    pytest.param(
        "--tensor-model-parallel-size 2 --context-parallel-size 2",
        6,
        r"6 ranks do not divide into model replicas of 4 \(--tensor-model-parallel-size 2 .*--nproc-per-node 4",
        id="world size",
    ),
]


@pytest.fixture
def earlier_files(empty_directory):
    """A rollout file, a finished run and one that was killed before its first checkpoint."""
    (empty_directory / "here.jsonl").write_text("{}\n")
    (empty_directory / "old" / "checkpoints").mkdir(parents=True)
    (empty_directory / "started").mkdir()
    (empty_directory / "started" / "metrics.jsonl").write_text('{"step": 1}\n')
    (empty_directory / "mine" / "checkpoints").mkdir(parents=True)
    (empty_directory / "mine" / "checkpoints" / "best.pt").write_text("")
    (empty_directory / "linked").mkdir()
    (empty_directory / "linked" / "checkpoints").symlink_to("nowhere")
    (empty_directory / "folders" / "metrics.jsonl").mkdir(parents=True)
    (empty_directory / "failed").mkdir()
    (empty_directory / "failed" / "metrics.jsonl").write_text("")


@pytest.mark.parametrize(("line", "world_size", "message"), REJECTED)
def test_a_bad_option_is_refused_with_its_flag(earlier_files, line, world_size, message):
    with pytest.raises(ConfigError, match=message):
        options_of(line, world_size)


ALLOWED = [
    pytest.param("--clip-grad 0 --weight-decay 0 --adam-beta2 0 --seed 0", 1, id="zeros that mean something"),
    pytest.param("--task sort --reward os.getcwd", 1, id="own reward for a built-in task"),
    pytest.param("--prompts here.jsonl --reward os.getcwd --max-new-tokens 3 --end-token 0", 1, id="own task"),
    pytest.param("--tensor-model-parallel-size 4 --sequence-parallel", 4, id="as many ranks as heads"),
    pytest.param("--vocab-size 9 --tensor-model-parallel-size 2", 2, id="odd vocabulary, which is padded"),
    pytest.param("--num-layers 4 --pipeline-model-parallel-size 4", 8, id="two replicas of four stages"),
    pytest.param("--steps-per-rollout 16", 1, id="a prompt a step"),
    pytest.param("--docs-per-step 128 --max-microbatches 9", 1, id="a rollout a step"),
    pytest.param("--docs-per-step 64 --preset demo", 1, id="documents with the steps of a preset"),
    pytest.param("--docs-per-step 64 --steps-per-rollout 1", 1, id="no second step asked for"),
    pytest.param("--docs-per-step 8 --prompts-per-rollout 1", 1, id="a rollout of one prompt"),
    pytest.param("--docs-per-step 9999 --rollouts here.jsonl", 1, id="steps over many recorded rollouts"),
    pytest.param("--docs-per-step many", 1, id="no number, which the rules of the loss tell"),
    pytest.param("--metrics-writer os.getcwd --x-axis tokens_seen", 1, id="own writer"),
    pytest.param("--rollouts here.jsonl --steps-per-rollout 99", 1, id="steps of a replay depend on the file"),
    pytest.param("--rollouts here.jsonl --save-rollouts there.jsonl", 1, id="copy of a replay"),
    pytest.param("--save-rollouts here.jsonl --overwrite", 1, id="rollouts written anew"),
    pytest.param("--save-rollouts here.jsonl --resume --output-dir old", 1, id="rollouts go on"),
    pytest.param("--output-dir old --overwrite --load old", 1, id="weights of a run that is overwritten"),
    pytest.param("--output-dir failed", 1, id="a run that failed before its first step"),
    pytest.param("--output-dir a/b/c", 1, id="directories that do not exist yet"),
]


@pytest.mark.parametrize(("line", "world_size"), ALLOWED)
def test_a_good_option_is_allowed(earlier_files, line, world_size):
    options_of(line, world_size)


def test_an_output_directory_that_cannot_be_written_is_refused(monkeypatch):
    """Permissions are simulated: tests may run as root, who may write everywhere."""
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match=r"--output-dir runs/train: .* is not writable"):
        options_of("")


def test_all_problems_come_in_one_error():
    """Catches a user who mends one flag, waits for a queue, and meets the next."""
    with pytest.raises(ConfigError) as caught:
        options_of("--lr 0 --num-layers 0 --task copy --sequence-parallel --load nowhere", world_size=1)
    assert [problem.split()[0] for problem in caught.value.problems] == [
        "--num-layers",
        "--lr",
        "--task",
        "--sequence-parallel",
        "--load",
    ]


def test_a_size_of_zero_is_told_once_and_divides_nothing():
    """Catches ZeroDivisionError in the rules that divide."""
    line = "--num-attention-heads 0 --tensor-model-parallel-size 0 --pipeline-model-parallel-size 0"
    with pytest.raises(ConfigError) as caught:
        options_of(line)
    assert len(caught.value.problems) == 3


def test_validation_writes_nothing_and_leaves_the_arguments_as_they_are(empty_directory):
    args = parse("--preset demo --save-rollouts r.jsonl")
    before = dict(vars(args))
    train_options(vars(args))
    assert vars(args) == before
    assert list(empty_directory.iterdir()) == []


def test_the_vocabulary_is_the_tasks_unless_a_larger_one_is_asked_for():
    assert model_vocab_size(TrainOptions(), 9) == 9
    assert model_vocab_size(TrainOptions(vocab_size=9), 9) == 9
    assert model_vocab_size(TrainOptions(vocab_size=64), 9) == 64
    with pytest.raises(ConfigError, match="--vocab-size 8 is smaller than the task's 9 tokens"):
        model_vocab_size(TrainOptions(vocab_size=8), 9)


def test_options_need_no_megatron():
    """Catches an import of Megatron-Core, seconds long, before a misspelt flag is reported."""
    script = "import sys; import megatron_rl.training.options; print('megatron' in sys.modules)"
    finished = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert finished.stdout.strip() == "False"
