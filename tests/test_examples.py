"""The launch scripts under examples/: bash runs each, and what it would start is a sound launch of flags that exist."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch
from host_harness import roots_by_environment

from megatron_rl.arguments import add_megatron_rl_args, read_number
from megatron_rl.config import Route
from megatron_rl.hosts.checks import check_launch, launch_warnings
from megatron_rl.hosts.megatron_lm import megatron_lm_config
from megatron_rl.megatron.packed_bins import samples_of_bin

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
SCRIPT = "gspo_prompt_mean.sh"
HOSTS = ("miles", "slime")
# Flags that stand in the script of miles, which slime's starts, as a comment, for Dr. GRPO, and those that they take the place of.
COMMENTED, REPLACED = re.compile(r"^    # (--.*)$", re.M), re.compile(r"^    --advantage-estimator.*?(?=\n\n)", re.M | re.S)
# Of Megatron-LM's parser; the flags of miles and slime are looked for in a checkout, where one is at hand.
FLAGS_OF_MEGATRON = (
    "--perform-rl-step --rl-use-sequence-packing --grpo-prompts-per-step --grpo-group-size --global-batch-size"
).split()
FLAGS_OF_HOSTS = (
    "--rollout-batch-size --n-samples-per-prompt --global-batch-size --rollout-max-response-len "
    "--advantage-estimator --disable-grpo-std-normalization --eps-clip --eps-clip-high "
    "--loss-type --custom-loss-function-path --custom-pg-loss-reducer-function-path --custom-reward-post-process-path "
    "--custom-megatron-init-path --custom-megatron-before-train-step-hook-path"
).split()


def module_of(path: Path) -> ModuleType:
    specification = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.fixture
def words(tmp_path):
    """What a script starts: the words of its last command, for which stand-ins of python3 and torchrun are on the path."""

    def run(script: Path) -> list[str]:
        for name in ("python3", "torchrun"):
            (tmp_path / name).write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
            (tmp_path / name).chmod(0o755)
        environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
        command = ["bash", str(script), "--tensor-model-parallel-size", "2"]
        finished = subprocess.run(command, check=True, capture_output=True, text=True, env=environment, cwd=tmp_path)
        return finished.stdout.splitlines()

    return run


def settings_of(words: list[str]) -> dict[str, object]:
    """{flag: value} of a command line; True for a flag without a value."""
    settings: dict[str, object] = {}
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            settings[word] = True if following.startswith("--") else read_number(following)
    return settings


def our_flags() -> set[str]:
    return {flag for action in add_megatron_rl_args(ArgumentParser(add_help=False))._actions for flag in action.option_strings}


def namespace_of(settings: dict[str, object], **others) -> Namespace:
    """As the launcher's parser makes it: every flag of ours has an attribute."""
    ours = vars(add_megatron_rl_args(ArgumentParser()).parse_args([]))
    named = {flag.removeprefix("--").replace("-", "_"): value for flag, value in settings.items()}
    named["grpo_std_normalization"] = not named.pop("disable_grpo_std_normalization", False)  # as the hosts' parsers call it
    return Namespace(**ours | others | named)


def whole_numbers(settings: dict[str, object]) -> dict[str, object]:
    """argparse of the hosts reads counts as int."""
    return {flag: int(value) if isinstance(value, float) and value >= 1 else value for flag, value in settings.items()}


@pytest.mark.parametrize("is_dr_grpo", [False, True])
@pytest.mark.parametrize("host", HOSTS)
def test_a_script_starts_a_launch_that_is_sound_and_does_what_it_says(words, tmp_path, host, is_dr_grpo):
    """Catches a flag that does not exist, a path that does not load, and a combination that the init hook would refuse."""
    script = EXAMPLES / host / SCRIPT
    if is_dr_grpo:
        text = (EXAMPLES / "miles" / SCRIPT).read_text(encoding="utf-8")
        script = tmp_path / SCRIPT
        script.write_text(COMMENTED.sub(r"\1", REPLACED.sub("", text)), encoding="utf-8")
    line = words(script)
    assert line[:3] == ["-m", "megatron_rl.hosts.launch", "train.py"]
    assert line[-2:] == ["--tensor-model-parallel-size", "2"]
    settings = settings_of(line[3:-2])
    assert set(settings) <= our_flags() | set(FLAGS_OF_HOSTS)
    for value in settings.values():
        if isinstance(value, str) and value.startswith("megatron_rl."):
            module, _, function = value.rpartition(".")
            assert callable(getattr(import_module(module), function))
    of_miles = {"allow_partial_train_step": False} if host == "miles" else {}
    args = namespace_of(whole_numbers(settings), **of_miles)
    launch = check_launch(args)
    assert launch.host.name == host
    found = (launch.route, settings["--advantage-estimator"], launch.config.loss_aggregation, launch.has_reward_hook)
    gspo, dr_grpo = (Route.CUSTOM_LOSS, "gspo", "prompt_mean", True), (Route.REDUCER, "grpo", "constant", False)
    assert found == (dr_grpo if is_dr_grpo else gspo)
    assert launch_warnings(launch) == []


def test_the_script_of_megatron_lm_does_what_it_says(words):
    line = words(EXAMPLES / "megatron_lm" / SCRIPT)
    assert Path(line[2]).resolve() == EXAMPLES / "megatron_lm" / "train_policy.py"
    settings = settings_of(line[3:-2])
    assert set(settings) <= our_flags() | set(FLAGS_OF_MEGATRON)
    of_train_rl = {"grpo_clamp_eps_lower": 0.01, "grpo_clamp_eps_upper": 0.01, "grpo_kl_beta": 0.001, "rl_default_temperature": 0.7}
    config = megatron_lm_config(namespace_of(whole_numbers(settings), **of_train_rl))
    assert (config.policy_loss, config.loss_aggregation, config.policy_temperature) == ("gspo", "prompt_mean", 0.7)


@pytest.mark.host
def test_the_flags_of_the_hosts_are_their_own():
    for host, root in roots_by_environment().items():
        source = (Path(root) / host / "utils" / "arguments.py").read_text(encoding="utf-8")
        assert [flag for flag in FLAGS_OF_HOSTS if f'"{flag}"' not in source] == []


@pytest.mark.parametrize("is_correction", [False, True])
def test_the_train_script_of_megatron_lm_reads_its_bins(monkeypatch, is_correction):
    """The tuple of load_packed_data_by_index has eleven entries, tensors of one row with the mask already shifted."""
    train_policy = module_of(EXAMPLES / "megatron_lm" / "train_policy.py")
    mask, old = torch.tensor([[0.0, 1.0, 0.0]]), torch.tensor([[-1.0, -2.0, -3.0]], dtype=torch.bfloat16)
    tokens, advantages, positions = torch.tensor([[7, 8, 9, 0]]), torch.tensor([0.5, 0.0]), torch.arange(4)[None]
    utils, counted = ModuleType("megatron.rl.rl_utils"), []
    state = Namespace(packing_context="context", increment_sequences=counted.append)
    utils.get_rl_runtime_state = lambda: state
    utils.load_packed_data_by_index = lambda index, context, is_correction: (
        *(tokens, advantages, old, mask, positions, old, old - 1 if is_correction else None),
        *([0, 3, 3], [3, 0], [0, 1], None),
    )
    monkeypatch.setitem(sys.modules, "megatron.rl", ModuleType("megatron.rl"))
    monkeypatch.setitem(sys.modules, "megatron.rl.rl_utils", utils)
    training = ModuleType("megatron.training")
    training.get_args = lambda: Namespace(rl_inference_logprobs_is_correction=is_correction)
    monkeypatch.setitem(sys.modules, "megatron.training", training)
    [sample] = samples_of_bin(train_policy.read_bin((torch.tensor(0),)), ["a", None])
    assert (sample.tokens, sample.loss_mask, sample.prompt_id, sample.old_log_probs) == ([7, 8, 9], [0.0, 1.0], "a", [-1.0, -2.0])
    assert sample.rollout_log_probs == ([-2.0, -3.0] if is_correction else None)
    assert counted == [2]


@pytest.mark.slow
@pytest.mark.megatron
def test_warnings_that_are_not_about_the_run_are_silent():
    """As in train: Megatron-Core says at its import what it does without, seven times."""
    root = EXAMPLES.parent
    finished = subprocess.run(
        [sys.executable, "examples/own_loop.py"],
        cwd=root,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert (finished.returncode, finished.stderr) == (0, "")


# examples/length_bias.py at a reduced size: what the picture in docs/aggregation.md claims

WRONG, RIGHT, SHARE_OF_SHORT = range(3)


@pytest.mark.slow
def test_length_bias_is_what_the_picture_claims(tmp_path, monkeypatch, capsys):
    """Dr. GRPO's claim, where the reward does not depend on the length: sample_mean lengthens wrong answers and shortens right
    ones, and prompt_mean less; the noise of 40 steps is 2 %. Answers of 4 and 16 tokens in the mean: where tokens count alike, 4 /
    20 of the weight is that of the short prompts, give or take a step's luck."""
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib")
    example = module_of(EXAMPLES / "length_bias.py")
    curves = {name: example.train(name, seed=0, steps=40) for name in example.AGGREGATIONS}
    of_samples, of_prompts = curves["sample_mean"], curves["prompt_mean"]
    assert of_samples[-1, WRONG] > 2.0 and of_samples[-1, RIGHT] < 0.5
    assert 1.05 < of_prompts[-1, WRONG] < 0.6 * of_samples[-1, WRONG] and of_samples[-1, RIGHT] < of_prompts[-1, RIGHT] < 0.97
    for name in ("constant", "token_mean"):
        assert curves[name][-1, [WRONG, RIGHT]].tolist() == pytest.approx([1.0, 1.0], abs=0.05)
        assert float(curves[name][:, SHARE_OF_SHORT].mean()) == pytest.approx(0.2, abs=0.03)
    assert float(of_samples[:, SHARE_OF_SHORT].mean()) == pytest.approx(0.5, abs=1e-6)
    monkeypatch.setattr(example, "STEPS", 3)
    monkeypatch.setattr(example, "SEEDS", 1)
    monkeypatch.setattr(example, "train", lambda name, seed, train=example.train: train(name, seed, steps=3))
    monkeypatch.setattr(sys, "argv", ["length_bias.py", str(tmp_path / "bias.png")])
    example.main()
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [*example.AGGREGATIONS]
    assert (tmp_path / "bias.png").read_bytes().startswith(b"\x89PNG")
