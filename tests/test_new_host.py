"""A host that the package has never heard of: one file and its name in the list, and every command and hook knows it."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
HOST_FILE = """
from megatron_rl.hosts.base import Check, Host, HostLoss

def beams_are_off(launch):
    if launch.options.ours("num_beams"):
        yield "--num-beams with nohost: a beam is no sample; remove it"

def batch_is_small(launch):
    if launch.options["global_batch_size"] == 1:
        yield "--global-batch-size 1 with nohost: one sample a step"

class NoHost(Host):
    name = package = "nohost"
    parser_module = "nohost.arguments"
    refuses_unknown_flags = False
    marks = own_options = ("num_beams", "group_samples")
    option_names = {"eps_clip": "clip_width", "n_samples_per_prompt": "group_samples"}
    loss = HostLoss(always_has_entropy=True)
    checks = (Check("beams_are_off", beams_are_off), Check("batch_is_small", batch_is_small, is_warning=True))

HOST = NoHost()
"""
# Runs code in a package that has the file and the name.
WITH_THE_HOST = """
import sys
import megatron_rl.hosts as hosts
hosts.__path__.append({folder!r})
hosts.ROLLOUT_HOST_NAMES, hosts.HOST_NAMES = (*hosts.ROLLOUT_HOST_NAMES, "nohost"), ("nohost", *hosts.HOST_NAMES)
{code}
"""
LAUNCHER = "from megatron_rl.hosts.launch import main; sys.exit(main())"
PARSER = """
from argparse import ArgumentParser

def parse_args(add_custom_arguments=None):
    parser = add_custom_arguments(ArgumentParser())
    parser.add_argument("--num-beams", type=int)
    parser.add_argument("--global-batch-size", type=int, default=4)
    parser.add_argument("--custom-pg-loss-reducer-function-path")
    return parser.parse_args()
"""
OURS = "--loss-aggregation sample_mean --custom-pg-loss-reducer-function-path megatron_rl.reducers.get_pg_loss_reducer"


@pytest.fixture
def run(tmp_path):
    """run(code, words) -> (exit code, standard output, standard error), in a checkout of the host beside a train script."""
    (tmp_path / "host_files").mkdir()
    (tmp_path / "host_files" / "nohost.py").write_text(HOST_FILE)
    (tmp_path / "nohost").mkdir()
    (tmp_path / "nohost" / "__init__.py").touch()
    (tmp_path / "nohost" / "arguments.py").write_text(PARSER)
    (tmp_path / "train.py").write_text("from nohost.arguments import parse_args\nprint(parse_args().loss_aggregation)\n")

    def call(code: str, words: str) -> tuple[int, str, str]:
        program = WITH_THE_HOST.format(folder=str(tmp_path / "host_files"), code=textwrap.dedent(code))
        command = [sys.executable, "-c", program, *words.split()]
        done = subprocess.run(
            command, check=False, cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "PATH": ""}, capture_output=True, text=True
        )
        return done.returncode, done.stdout, done.stderr

    return call


def test_the_launcher_puts_our_flags_into_its_parser_and_asks_its_checks(run):
    code, out, error = run(LAUNCHER, f"train.py {OURS} --global-batch-size 1")
    assert (code, out) == (0, "sample_mean\n")
    assert "--global-batch-size 1 with nohost: one sample a step" in error
    code, out, error = run(LAUNCHER, f"train.py {OURS} --num-beams 4")
    assert (code, out) == (2, "") and "--num-beams with nohost: a beam is no sample; remove it" in error


def test_doctor_knows_whose_line_it_is_and_explain_its_chain_of_factors(run):
    doctor = f"doctor --launch-only -- python train.py {OURS} --num-beams 4"
    explain = "explain --host nohost --response-lengths 3,5 --loss-aggregation sample_mean --data-parallel-size 2 "
    explain += "--samples-per-prompt 2 --prompt-ids a,a"
    both = f"from megatron_rl.__main__ import main; print(main({doctor!r}.split()), main({explain!r}.split()))"
    code, out, error = run(both, "")
    assert code == 0 and out.endswith("1 0\n"), error
    assert "nohost, its own launcher" in out and "dropped without a word by the stock launcher of nohost" in out
    assert "nohost scales what its loss function returns" in out


def test_the_emulator_trains_a_micro_batch_with_our_loss(run):
    """What its object says is what is done: an entropy is reported without a coefficient, an effective sample size is not. An
    option with another name there is the one of the package."""
    code, out, error = run(
        """
        import torch
        from argparse import Namespace
        from megatron_rl.hooks import custom_loss
        from megatron_rl.hosts.base import HostOptions, host_named
        args = Namespace(
            num_beams=None, loss_aggregation="sample_mean", advantage_estimator="grpo", clip_width=0.3, loss_type="custom_loss",
            custom_loss_function_path="megatron_rl.hooks.custom_loss",
        )
        assert HostOptions(args).host is host_named("nohost") and HostOptions(args)["eps_clip"] == 0.3
        numbers = torch.zeros(3)
        batch = dict(total_lengths=[5], response_lengths=[3], unconcat_tokens=[torch.arange(5)], loss_masks=[torch.ones(3)],
                     advantages=[numbers + 1], log_probs=[numbers - 2])
        loss, metrics = custom_loss(args, batch, torch.zeros(1, 5, 8, requires_grad=True), None)
        print(float(metrics["entropy_loss"]) > 2, "ess_ratio" in metrics)
        """,
        "",
    )
    assert (code, out) == (0, "True False\n"), error
