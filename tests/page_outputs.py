"""What stands in the generated parts of docs/: one function for each kind of command. It must never read the page it is for."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import runpy
import shlex
import sys
import tempfile
import traceback
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import CodeType, SimpleNamespace
from unittest import mock

import markdown_pages
import pytest
from forked import forked
from helpers import names_forgotten
from test_doctor import SICK_MACHINE
from test_examples import namespace_of, settings_of, whole_numbers
from torch.distributed import run as torchrun

from megatron_rl.__main__ import main
from megatron_rl.commands import doctor
from megatron_rl.config import PolicyLossConfig
from megatron_rl.count import StepTotals
from megatron_rl.errors import ConfigError
from megatron_rl.hosts import launch, nemo_rl, roll, skyrl, verl
from megatron_rl.hosts.checks import check_launch
from megatron_rl.hosts.megatron_lm import announce
from megatron_rl.hosts.run import Run
from megatron_rl.hosts.training_hooks import custom_megatron_init
from megatron_rl.megatron.cpu import import_megatron
from megatron_rl.testing.ranks import run_ranks

ROOT = Path(__file__).resolve().parent.parent
# Pages show ranks on a CPU, whatever machine fills them.
CPU = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.getenv("PYTHONPATH")]))}
PYTHON_BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


def said(function, *arguments) -> str:
    """What the call prints, on both streams."""
    with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.redirect_stderr(shown):
        function(*arguments)
    return shown.getvalue()


def printed(command: str) -> str:
    """`megatron-rl ...` in this process."""
    return said(main, shlex.split(command)[1:])


def of_block(command: str) -> str:
    """`block N`: what the N-th Python block of the notebook prints, after those above it."""
    return printed_by_blocks()[int(command.split()[-1]) - 1]


@functools.cache
def printed_by_blocks() -> list[str]:
    namespace: dict[str, object] = {"__name__": "__main__"}
    with names_forgotten():
        fences = [fence for fence in markdown_pages.fences(markdown_pages.NOTEBOOK) if fence.language == "python"]
        codes = [compile(fence.text, str(fence), "exec") for fence in fences]
        return [printed_by(code, namespace) for code in codes]


def printed_by(code: CodeType, namespace: dict[str, object]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        exec(code, namespace)
    return shown.getvalue()


def of_the_chain(command: str) -> str:
    """Without the table of samples before it and what is left out after it."""
    lines = printed(command).splitlines()
    first = next(place for place, line in enumerate(lines) if ": ranks " in line)
    last = next(place for place, line in enumerate(lines) if line.startswith("left out"))
    return "\n".join(["...", *lines[first:last]]).rstrip() + "\n...\n"


def of_a_sick_machine(command: str) -> str:
    with mock.patch.object(doctor, "collect_facts", lambda: SICK_MACHINE):
        return printed("megatron-rl doctor")


def of_torchrun(command: str) -> str:
    """The standard output of `torchrun ...`, which must succeed. It is a fork of this process, and its ranks are forks of it."""

    def start() -> None:
        os.environ.update(CPU)
        import_megatron()
        read_words = torchrun.config_from_args

        def with_forks(args: Namespace) -> tuple:
            script = args.training_script
            return replace(read_words(args)[0], start_method="fork"), run_script, (script, args.module, args.training_script_args)

        torchrun.config_from_args = with_forks
        torchrun.main(["--standalone", *shlex.split(command)[1:]])

    code, out, error = forked(start)
    if code:
        raise RuntimeError(f"{command} ended with {code}: {error}")
    return out


def run_script(script: str, is_module: bool, words: list[str]) -> None:
    """What a rank of torchrun runs."""
    sys.argv = [script, *words]
    try:
        if is_module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")
    except Exception:
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def of_own_loop(command: str) -> str:
    return of_torchrun(command.replace("examples/", f"{ROOT}/examples/"))


def of_own_loop_without_scale(command: str) -> str:
    """What ends examples/own_loop.py when its loss goes to the schedule as it is."""
    source = (ROOT / "examples" / "own_loop.py").read_text(encoding="utf-8")
    unscaled = "(loss, torch.ones((), dtype=torch.int32), {'policy/loss': torch.stack([loss.detach(), torch.tensor(1.0)])})"
    path = Path("forgetful.py")
    path.write_text(f"{source.split('if __name__')[0]}\nscale_for_schedule = lambda loss, *_, **__: {unscaled}\nmain()\n")
    try:
        of_torchrun(f"torchrun --nproc-per-node 2 {path}")
    except RuntimeError as error:
        last = str(error).rpartition("ConfigError: check_step")[2].split("\n  \n")[0]  # as torchrun ends
        return f"ConfigError: check_step{last}\n".replace("\n      ", "\n    ")
    raise RuntimeError("a loop without scale_for_schedule passed")


def of_a_step_divided_by_cp(command: str) -> str:
    from test_selftest import failing_rows

    return run_ranks(failing_rows, 2, use_megatron=True)[0] + "\n"


def of_the_examples_of_testing(command: str) -> str:
    """What pytest says of the one failure among the tests that docs/testing.md shows."""
    code = "\n\n".join(PYTHON_BLOCK.findall((ROOT / "docs" / "testing.md").read_text(encoding="utf-8")))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "test_page.py").write_text(code, encoding="utf-8")
        plugins = ["-p", "pytest_megatron_rl", "-p", "no:cacheprovider", "-p", "no:hypothesispytest"]

        def test_the_page() -> int:
            os.environ.update(CPU)
            os.chdir(folder)
            return pytest.main(["--color=no", *plugins, folder])

        _, said, _ = forked(test_the_page)
    if "1 failed, 2 passed" not in said:
        raise RuntimeError(f"docs/testing.md says that one of its three tests fails: {said}")
    lines = said.splitlines()
    first = next(index for index, line in enumerate(lines) if "the gradient depends on the layout:" in line)
    return "\n".join(lines[first : first + 2]) + "\n"


def launch_of(host: str, *more: str) -> Namespace:
    """What the host's parser makes of examples/HOST/gspo_prompt_mean.sh."""
    script = (ROOT / "examples" / host / "gspo_prompt_mean.sh").read_text(encoding="utf-8")
    flags = script.split("LINES=(")[1].split("\n)")[0]
    settings = whole_numbers(settings_of([*shlex.split(flags, comments=True), *more]))
    return namespace_of(settings, **({"allow_partial_train_step": False} if host == "miles" else {}))


def of_the_init_hook(command: str) -> str:
    """Its line for examples/HOST/gspo_prompt_mean.sh, on one rank, with the installed Megatron."""
    host = re.search(r"examples/(\w+)/", command)[1]

    def on_rank(rank: int) -> str:
        sys.argv = ["train.py"]
        return said(custom_megatron_init, launch_of(host))

    return run_ranks(on_rank, 1)[0]


def of_a_refused_launch(command: str) -> str:
    host = re.search(r"examples/(\w+)/", command)[1]
    try:
        check_launch(launch_of(host, "--calculate-per-token-loss"))
    except ConfigError as error:
        return said(launch._refuse, error)
    raise RuntimeError(f"the launch of {host} was not refused")


def of_call_pretrain(command: str) -> str:
    def on_rank(rank: int) -> str:
        return said(functools.partial(announce, calculate_per_token_loss=False), config)

    config = PolicyLossConfig(policy_loss="gspo", policy_temperature=0.7)
    return run_ranks(on_rank, 2, tensor_model_parallel_size=2)[0]


def of_the_first_step_in_verl(command: str) -> str:
    """The line of our loss, for a mini-batch of 256 rollouts of one row on 8 ranks."""
    from verl_cases import ActorConfig

    config = ActorConfig(policy_loss={"loss_mode": command.split()[-1]}, loss_scale_factor=8192)
    totals = StepTotals(num_samples=256, num_prompts=None, num_tokens=1, num_rollouts=256)
    return said(lambda: verl.read(config).tell(Run(), totals, num_data=8))


def of_the_first_step_in_nemo_rl(command: str) -> str:
    """The line of our loss, for a step of 256 samples."""
    from nemo_rl_cases import master_config

    config = master_config({"megatron_rl": command.split("=")[-1], "megatron_rl_loss_aggregation_divisor": 8192})
    totals = StepTotals(num_samples=256, num_prompts=None, num_tokens=1)
    return said(nemo_rl.read(config).tell, Run(), totals)


def of_the_first_step_in_roll(command: str) -> str:
    """The line of our loss, for a step of 512 samples of 64 prompts."""
    from roll_cases import pipeline_config, worker_config

    worker = worker_config(command.split()[-1], samples=512, MEGATRON_RL_LOSS_AGGREGATION_DIVISOR=8192)
    launch = roll.read(worker, pipeline_config(512, use_kl_loss=True))
    return said(launch.tell, Run(), StepTotals(num_samples=512, num_prompts=None, num_tokens=1))


def of_the_first_step_in_skyrl(command: str) -> str:
    """The line of our loss."""
    from skyrl_cases import ADAPTER, RowCase

    case = RowCase(loss=re.search(r"megatron_rl\.(\w+)", command)[1], aggregation=command.split()[-1])
    without_correction = SimpleNamespace(off_policy_correction_enabled=lambda settings: False)
    with mock.patch.object(skyrl, "import_module", lambda name: without_correction):
        return said(ADAPTER.run, case, ADAPTER.step(case))
