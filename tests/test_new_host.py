"""A host that the package has never heard of: one file and its name in the list, and every command and hook knows it."""

from __future__ import annotations

import pytest
from helpers import run_in_children

pytestmark = pytest.mark.slow

HOST_FILE = """
from megatron_rl.hosts.base import Host, HostLoss
from megatron_rl.validation.checks import check

@check()
def beams_are_off(launch):
    if launch.options.ours("num_beams"):
        yield "--num-beams with nohost: a beam is no sample; remove it"

@check(is_warning=True)
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
# A process of its own, with its output and exit code in files.
IN_A_CHILD = """
import os, sys
os.chdir({folder!r})
sys.path.insert(0, "")
sys.argv = ["-c", *{words!r}]
for number, end in ((1, "out"), (2, "err")):
    os.dup2(os.open({name!r} + "." + end, os.O_CREAT | os.O_WRONLY), number)
status = 0
try:
    exec({code!r}, {{"__name__": "__main__"}})
except SystemExit as end:
    status = end.code or 0
open({name!r} + ".code", "w").write(str(status))
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


TRAIN_A_MICRO_BATCH = """
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
"""
COMMAND = "from megatron_rl.__main__ import main; sys.exit(main())"
EXPLAINED = "--response-lengths 3,5 --loss-aggregation sample_mean --data-parallel-size 2 --samples-per-prompt 2 --prompt-ids a,a"
RUNS = {
    "launch": (LAUNCHER, f"train.py {OURS} --global-batch-size 1"),
    "refused": (LAUNCHER, f"train.py {OURS} --num-beams 4"),
    "doctor": (COMMAND, f"doctor --launch-only -- python train.py {OURS} --num-beams 4"),
    "explain": (COMMAND, f"explain --host nohost {EXPLAINED}"),
    "train": (TRAIN_A_MICRO_BATCH, ""),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> dict[str, tuple[int, str, str]]:
    """{run: (exit code, standard output, standard error)} in a checkout of the host beside a train script. Each run is a child of
    one process that has imported torch and nothing of the package."""
    folder = tmp_path_factory.mktemp("checkout")
    (folder / "host_files").mkdir()
    (folder / "host_files" / "nohost.py").write_text(HOST_FILE)
    (folder / "nohost").mkdir()
    (folder / "nohost" / "__init__.py").touch()
    (folder / "nohost" / "arguments.py").write_text(PARSER)
    (folder / "train.py").write_text("from nohost.arguments import parse_args\nprint(parse_args().loss_aggregation)\n")
    codes = []
    for name, (code, words) in RUNS.items():
        code = WITH_THE_HOST.format(folder=str(folder / "host_files"), code=code)
        codes.append(IN_A_CHILD.format(folder=str(folder), words=words.split(), name=name, code=code))
    run_in_children(*codes)
    return {
        name: (int((folder / f"{name}.code").read_text()), *((folder / f"{name}.{end}").read_text() for end in ("out", "err")))
        for name in RUNS
    }


def test_the_launcher_puts_our_flags_into_its_parser_and_asks_its_checks(answers):
    code, out, error = answers["launch"]
    assert (code, out) == (0, "sample_mean\n")
    assert "--global-batch-size 1 with nohost: one sample a step" in error
    code, out, error = answers["refused"]
    assert (code, out) == (2, "") and "--num-beams with nohost: a beam is no sample; remove it" in error


def test_doctor_knows_whose_line_it_is_and_explain_its_chain_of_factors(answers):
    code, out, error = answers["doctor"]
    assert code == 1, error
    assert "nohost, its own launcher" in out and "dropped without a word by the stock launcher of nohost" in out
    code, out, error = answers["explain"]
    assert code == 0 and "nohost scales what its loss function returns" in out, error


def test_the_emulator_trains_a_micro_batch_with_our_loss(answers):
    """What its object says is what is done: an entropy is reported without a coefficient, an effective sample size is not. An
    option with another name there is the one of the package."""
    assert answers["train"][:2] == (0, "True False\n"), answers["train"][2]
