"""`megatron-rl doctor`: names what is broken and its remedy, survives it, and tells what a launch line would come to."""

from __future__ import annotations

import base64
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from doctor_cases import ABSENT, CPU_MACHINE, EMPTY_ENGINE, GPU_MACHINE, HERE, SICK_MACHINE, WEB_TOOLKIT, machine

from megatron_rl.__main__ import main
from megatron_rl.commands import doctor
from megatron_rl.commands.doctor import probes as doctor_probes
from megatron_rl.commands.doctor.command_line import read_line
from megatron_rl.commands.doctor.launch import judge_launch
from megatron_rl.commands.doctor.machine import JUDGES, capabilities, findings, has_kernels
from megatron_rl.commands.doctor.report import NOTE, OK, PROBLEM
from megatron_rl.config import Route
from megatron_rl.errors import ConfigError
from megatron_rl.validation import ROUTES_OF_FLAG

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
REDUCER = "--custom-pg-loss-reducer-function-path megatron_rl.reducers.get_pg_loss_reducer"
REWARD = "--custom-reward-post-process-path megatron_rl.hooks.reward_post_process --global-batch-size 8"
INIT = "--custom-megatron-init-path megatron_rl.hooks.custom_megatron_init"
DR_GRPO = f"--loss-aggregation constant --loss-aggregation-divisor 8192 {REDUCER}"
LAUNCH = "python -m megatron_rl.hosts.launch"


BROKEN = {"state": "broken", "error": "OSError: y"}


def problems(found) -> list[str]:
    return [f"{finding.subject}: {finding.text}" for finding in found if finding.status == PROBLEM]


# The machine


@pytest.mark.parametrize("facts", [CPU_MACHINE, GPU_MACHINE, machine(megatron=ABSENT, triton=ABSENT, psutil=ABSENT, numpy=ABSENT)])
def test_a_sound_machine_has_no_problem_whatever_it_lacks(facts):
    """Absent is not broken: the losses need torch alone."""
    assert problems(findings(facts)) == []
    assert [finding.subject for finding in findings(facts)].count("torch") == 1


SICK = [
    pytest.param(
        {"transformer_engine": EMPTY_ENGINE},
        "transformer engine: 2.9.0 is PyPI's empty meta package.*pip uninstall",
        id="FB-79 empty TE",
    ),
    pytest.param(
        {"apex": WEB_TOOLKIT}, "apex: 0.9.10.dev0 is the web toolkit .* not NVIDIA's.*pip uninstall apex", id="FB-79 apex"
    ),
    pytest.param(
        {"apex": {**HERE, "is_nvidia": True} | {"state": "broken", "error": "OSError: x"}},
        "apex: cannot be imported .OSError: x.: rebuild",
        id="apex of another torch",
    ),
    pytest.param(
        {"psutil": ABSENT}, "psutil: not installed: Megatron's checkpoints need it.*hang.*pip install psutil", id="FB-78 no psutil"
    ),
    pytest.param(
        {"megatron": {"state": "broken", "error": "RuntimeError: x"}},
        "megatron: megatron-core  ?cannot be used: RuntimeError: x",
        id="broken core",
    ),
    pytest.param(
        {"megatron": {"contract": "Megatron-Core 9 changed what a 3-tuple means", "ratio": 0.5}},
        "schedule: Megatron-Core 9 changed",
        id="FB-16 contract",
    ),
    pytest.param({"torch": BROKEN}, "torch: cannot be imported: OSError: y; reinstall it", id="broken torch"),
    pytest.param({"torch": ABSENT}, "torch: not installed, and everything needs it", id="no torch"),
    pytest.param({"python": {"version": "3.10.12"}}, "python: 3.10.12: megatron_rl needs 3.11 or later", id="old Python"),
    pytest.param(
        {"torch": {"numpy_error": "RuntimeError: Numpy is not available"}},
        "numpy: 2.4.6, which this torch cannot use .RuntimeError: Numpy is not available.: pip install 'numpy<2'",
        id="numpy 2 beside a torch of numpy 1",
    ),
    pytest.param(
        {"machine": {"has_nvidia_device": True}},
        "cuda: there is an NVIDIA device and this torch is built without CUDA",
        id="CPU torch on a GPU",
    ),
    pytest.param({"numpy": {"state": "broken", "error": "ImportError: z"}}, "numpy: cannot be imported", id="broken numpy"),
]


@pytest.mark.parametrize(("changes", "message"), SICK)
def test_a_sick_machine_is_told_what_is_broken_and_what_to_do(changes, message):
    (problem,) = problems(findings(machine(**changes)))
    assert re.match(message, problem), problem


ON_CUDA = [
    pytest.param({"triton": ABSENT}, "triton: not installed: --policy-loss-backend auto refuses CUDA without it", id="no Triton"),
    pytest.param({"machine": {"interprets_triton": True}}, "triton: TRITON_INTERPRET is set", id="FB-86 interpreter on a GPU"),
    pytest.param({"torch": {"has_nccl": False}}, "nccl: this torch is built without it", id="no NCCL"),
    pytest.param(
        {"torch": {"has_cuda": False, "cuda_error": "The NVIDIA driver on your system is too old"}},
        "cuda: there is an NVIDIA device and torch for CUDA 13.0 cannot use it (The NVIDIA driver on your system is too old): ",
        id="old driver",
    ),
    pytest.param(
        {"torch": {"compute": [[9, 0], [12, 0]], "devices": ["H200", "B300"]}},
        "cuda: this torch has no kernels for B300, only sm_80, sm_90, sm_100: install a newer build",
        id="a device that this torch does not know",
    ),
    pytest.param(
        {
            "transformer_engine": {
                "state": "broken",
                "error": "OSError: libx",
                "distributions": ["transformer-engine", "transformer-engine-torch"],
            }
        },
        "transformer engine: cannot be imported (OSError: libx): megatron.core dies with it",
        id="a TE that lacks a library",
    ),
]


@pytest.mark.parametrize(("changes", "message"), ON_CUDA)
def test_a_sick_machine_with_a_gpu(changes, message):
    (problem,) = problems(findings(machine(GPU_MACHINE, **changes)))
    assert problem.startswith(message), problem


@pytest.mark.parametrize(
    ("changes", "subject", "words"),
    [
        ({"megatron": {"version": "0.12.1"}}, "megatron", "0.12.1 is outside 0.13 to 0.19"),
        pytest.param(
            {"triton": {"version": "3.6.0"}}, "triton", "its interpreter fails on loops with numpy 2.4", id="FB-86 interpreter"
        ),
        ({"transformer_engine": {"state": "broken", "error": "OSError: libcuda.so.1"}}, "transformer engine", "needs CUDA"),
    ],
)
def test_what_is_odd_and_works_is_a_note(changes, subject, words):
    found = findings(machine(**changes))
    assert problems(found) == []
    assert any(finding.subject == subject and finding.status == NOTE and words in finding.text for finding in found)


@pytest.mark.parametrize(
    ("compute", "archs", "expected"),
    [
        ((8, 6), ["sm_80"], True),  # a later minor version of the same major one
        ((8, 0), ["sm_86"], False),  # an earlier one
        ((9, 0), ["sm_80", "sm_90a"], True),
        ((9, 5), ["sm_90a"], False),
        ((10, 3), ["sm_100a"], False),
        ((10, 0), ["compute_90a"], False),
        ((10, 0), ["compute_90"], True),
        ((12, 0), ["sm_100"], False),
        ((12, 1), ["sm_90", "compute_90"], True),  # compiled for it when it is loaded
        ((7, 0), ["compute_80"], False),
        ((9, 0), [], True),  # a build that does not say
    ],
)
def test_which_devices_a_torch_has_kernels_for(compute, archs, expected):
    assert has_kernels(compute, archs) is expected


def test_hidden_devices_are_no_problem():
    facts = machine(machine={"has_nvidia_device": True, "hides_devices": True})
    assert problems(findings(facts)) == []


def test_require_makes_what_is_absent_a_problem():
    """For CI: a job that should have a GPU, or Megatron, and lost it."""
    facts = machine(megatron=ABSENT)
    assert problems(findings(facts, frozenset({"megatron", "cuda", "numpy"}))) == [
        "cuda: no device; torch is built without it, and --require asks for it",
        "megatron: not installed, and --require asks for it: pip install 'megatron_rl[megatron]'",
    ]


@pytest.mark.parametrize(
    ("facts", "name", "answer", "why"),
    [
        (CPU_MACHINE, "Triton kernels", "no", "no CUDA: auto takes torch"),
        (GPU_MACHINE, "Triton kernels", "yes", "auto"),
        (machine(machine={"interprets_triton": True}), "Triton kernels", "partly", "interpreted"),
        (machine(triton=ABSENT), "Triton kernels", "no", "not installed"),
        (CPU_MACHINE, "train, make_forward_step", "yes", "gloo"),
        (GPU_MACHINE, "train, make_forward_step", "yes", "NCCL, one rank on each of 2 devices"),
        (machine(megatron=ABSENT), "train, make_forward_step", "no", "pip install 'megatron_rl[megatron]'"),
        (machine(megatron=ABSENT), "selftest", "partly", "the losses alone"),
        (machine(megatron=BROKEN), "selftest", "no", "megatron-core is broken, see above"),
        (CPU_MACHINE, "Megatron-LM: call_pretrain", "no", "megatron.training is not here"),
        (machine(psutil=ABSENT), "checkpoints", "no", "pip install psutil"),
        (machine(rich=ABSENT), "progress bar, plots, TensorBoard", "partly", "without rich"),
        (machine(slime=HERE), "miles and slime: hosts.launch", "yes", "slime can be imported"),
        (machine(pytest=ABSENT), "pytest fixtures", "no", "pip install pytest"),
        (machine(torch=ABSENT), "everything else", "no", "torch is not installed"),
        (machine(torch=BROKEN), "everything else", "no", "torch is broken, see above"),
    ],
)
def test_what_works_and_what_does_not_and_why(facts, name, answer, why):
    (capability,) = [capability for capability in capabilities(facts) if capability.name == name]
    assert capability.answer == answer and why in capability.why
    assert all(c.answer == "yes" or c.why for c in capabilities(facts))


# Looking at this machine


@pytest.fixture
def fake_packages(tmp_path, monkeypatch):
    """Packages in front of the real ones: {path: text}."""

    def make(files: dict[str, str]) -> None:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        monkeypatch.syspath_prepend(str(tmp_path))

    return make


FAKES = {
    "transformer_engine/__init__.py": "raise RuntimeError('Found empty `transformer-engine` meta package installed')",
    "transformer_engine-2.9.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: transformer-engine\nVersion: 2.9.0\n",
    "apex/__init__.py": "from pyramid.session import UnencryptedCookieSessionFactoryConfig",
    "apex-0.9.10.dev0.dist-info/METADATA": "Metadata-Version: 2.1\nName: apex\nVersion: 0.9.10.dev0\n",
    "psutil/__init__.py": "import os; os.kill(os.getpid(), 9)",
    "numpy/__init__.py": "print('hello from numpy'); import time; time.sleep(600)",
    "triton/__init__.py": "__version__ = '3.4.5'\nprint('hello')",
}


def test_impostors_and_broken_packages_are_told_and_do_not_take_doctor_down(fake_packages, monkeypatch):
    """FB-79: fake modules of both kinds; beside them one that kills its process and one that hangs."""
    fake_packages(FAKES)
    monkeypatch.setattr(doctor_probes, "PROBED", ("numpy", "psutil", "triton", "transformer_engine", "apex"))
    monkeypatch.setattr(doctor_probes, "SECONDS", 2.0)
    facts = doctor_probes.collect_facts()
    assert facts["numpy"] == {"state": "broken", "error": "its import hangs: no answer in 2 s"}
    assert facts["psutil"]["error"].startswith("its import ended the process (signal 9)")
    assert (facts["triton"]["state"], facts["triton"]["version"]) == ("here", "3.4.5") or facts["triton"]["version"]
    judged = "\n".join(
        problems(findings({**CPU_MACHINE, **facts, "torch": CPU_MACHINE["torch"], "megatron": CPU_MACHINE["megatron"]}))
    )
    assert "transformer engine: 2.9.0 is PyPI's empty meta package" in judged and "apex: 0.9.10.dev0 is the web toolkit" in judged


FAKE_TORCH = """
__version__ = "2.1.0+cu118"
class version: cuda = "11.8"
class cuda:
    is_available = device_count = lambda: 0
    def init(): raise RuntimeError("The NVIDIA driver on your system is too old (found version 10020).\\nPlease update it.")
class _Tensor:
    def numpy(self): raise RuntimeError("Numpy is not available")
zeros = lambda size: _Tensor()
"""
FAKE_DISTRIBUTED = "is_available = is_nccl_available = is_gloo_available = lambda: True\n"


def test_what_a_torch_cannot_use_is_found_out(fake_packages, monkeypatch):
    """A torch that was built for numpy 1 imports beside numpy 2, and one without a driver imports too: both fail later."""
    fake_packages(
        {"torch/__init__.py": FAKE_TORCH, "torch/distributed.py": FAKE_DISTRIBUTED, "numpy/__init__.py": "__version__ = '2'"}
    )
    monkeypatch.setattr(doctor_probes, "PROBED", ("torch",))
    torch = doctor_probes.collect_facts()["torch"]
    assert torch["numpy_error"] == "Numpy is not available" and torch["cuda_build"] == "11.8" and not torch["has_cuda"]
    assert torch["cuda_error"] == "The NVIDIA driver on your system is too old (found version 10020)."


@pytest.mark.megatron
def test_this_machine_as_json(capsys):
    """The real thing once: every package probed in a process of its own, one object on standard output."""
    code = main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    by_subject = {finding["subject"]: finding for finding in report["machine"]}
    assert by_subject["megatron"]["status"] == OK and by_subject["schedule"]["text"].startswith("gradient x 1.000000")
    assert code == (1 if report["problems"] else 0) and report["launch"] is None
    assert {finding["subject"] for finding in report["machine"]} >= {"python", "torch", "cuda", "nccl", "numpy", "psutil", "triton"}


def test_doctor_runs_where_megatron_and_triton_do_not_exist(monkeypatch, capsys):
    monkeypatch.setattr(doctor_probes, "_is_there", lambda name: name in ("torch", "numpy"))
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "absent   megatron            not installed" in out and "no       train, make_forward_step" in out
    assert re.search(r"partly   selftest +the losses alone, without schedule, DDP and optimiser", out)


@pytest.mark.parametrize(("engine", "adam"), [(HERE, "Transformer Engine's"), (ABSENT, "torch's"), (EMPTY_ENGINE, "torch's")])
def test_without_apex_the_adam_that_megatron_takes_is_named(engine, adam):
    """Megatron tries Transformer Engine's, then apex's, then torch's."""
    (finding,) = [found for found in findings(machine(transformer_engine=engine), frozenset()) if found.subject == "apex"]
    assert (finding.status, finding.text) == ("absent", f"not installed: {adam} Adam is used")


def test_a_folder_of_that_name_is_no_installed_host(tmp_path, monkeypatch):
    """Beside a checkout `import miles` finds the folder of the checkout, a namespace with nothing in it."""
    (tmp_path / "miles").mkdir()
    (tmp_path / "slime").mkdir()
    (tmp_path / "slime" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert [doctor_probes._is_there(name) for name in ("miles", "slime", "torch", "megatron")] == [False, True, True, True]


def test_a_slow_import_gives_a_sign_of_life_and_has_a_limit(monkeypatch, capsys):
    """A user's function may import for minutes: what is waited for, and how long at most, is said on standard error."""
    monkeypatch.setattr(doctor_probes, "SIGN_OF_LIFE", 0.2)
    slow = f'import time; time.sleep(1.0); print({doctor_probes.MARK!r} + \'{{"state": "here"}}\')'
    assert doctor_probes.ask(slow, waits_for="mine.generate") == {"state": "here"}
    assert capsys.readouterr().err == "doctor: still importing mine.generate, for at most 120 s\n"
    monkeypatch.setattr(doctor_probes, "SECONDS", 0.4)
    assert doctor_probes.ask(slow, waits_for="mine.generate")["error"] == "its import hangs: no answer in 0.4 s"


WITHOUT_TORCH = """
import importlib, sys, types
sys.modules["torch"] = None
package = types.ModuleType("megatron_rl")
package.__path__, package.__version__ = [sys.argv[1]], "0"
sys.modules["megatron_rl"] = package
doctor = importlib.import_module("megatron_rl.commands.doctor")
from argparse import ArgumentParser
from megatron_rl.commands.doctor import probes
probes._is_there = lambda name: False
parser = ArgumentParser()
doctor.add_arguments(parser, [])
sys.exit(doctor.run(parser.parse_args(sys.argv[2:])))
"""


@pytest.mark.parametrize("line", [[], ["--", "python", "slime/train.py"]], ids=["the machine", "and a line"])
def test_doctor_runs_where_torch_does_not(line):
    """Catches an import of torch on the way to the one command that is to say what is wrong with it."""
    command = [sys.executable, "-c", WITHOUT_TORCH, str(ROOT / "megatron_rl"), *line]
    finished = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT)
    assert finished.returncode == 1, finished.stderr
    assert "PROBLEM  torch" in finished.stdout and "no       everything else" in finished.stdout
    assert ("PROBLEM  rules  they need torch, see above" in finished.stdout) == bool(line)


# The launch line


def judged(line: str, host: str | None = None):
    return judge_launch(shlex.split(line), host)


@pytest.mark.parametrize("host", ["miles", "slime"])
@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "gspo"])
def test_the_example_scripts_are_sound_launches(host, name):
    lines = [line.partition("#")[0].strip() for line in (EXAMPLES / host / f"{name}.sh").read_text(encoding="utf-8").splitlines()]
    first, last = lines.index("LINES=("), lines.index(")")
    report = judged(f"{LAUNCH} /root/{host}/train.py {' '.join(lines[first + 1 : last])}")
    assert problems(report.findings) == [] and report.flags


SOUND = [
    pytest.param(f"{LAUNCH} /root/slime/train.py {DR_GRPO}", "reducer", id="our launcher"),
    pytest.param(f"ray job submit --runtime-env-json='{{}}' -- {LAUNCH} miles/train.py {DR_GRPO}", "reducer", id="under ray"),
    pytest.param("megatron-rl train --task sort --policy-loss gspo", "train", id="our own command"),
    pytest.param(
        f"{LAUNCH} slime/train.py --loss-aggregation prompt_mean {REDUCER} {REWARD}", "reducer", id="the host's own defaults"
    ),
    pytest.param("torchrun --nproc-per-node=4 -m megatron_rl train --tensor-model-parallel-size 4", "train", id="torchrun"),
    pytest.param("python pretrain_gpt.py --policy-loss gspo --clip-ratio-low 3e-4", "megatron_lm", id="a script that is not here"),
]


@pytest.mark.parametrize(("line", "route"), SOUND)
def test_a_sound_line_has_no_problem_and_each_flag_of_ours_is_read(line, route):
    report = judged(line)
    assert problems(report.findings) == [] and report.route == route
    assert all(finding.status == OK and f"read on the route {route}" in finding.text for finding in report.flags)


UNSOUND = [
    pytest.param(
        f"python slime/train.py {DR_GRPO}",
        [
            "--loss-aggregation: dropped without a word by the stock launcher of slime",
            "--loss-aggregation-divisor: dropped",
            "launcher: --loss-aggregation and --loss-aggregation-divisor reach nobody: put them into the file that megatron-rl ",
        ],
        id="FB-70 stock slime drops our flags",
    ),
    pytest.param(
        f"python miles/train.py --loss-aggregation constant {REDUCER}",
        ["--loss-aggregation: refused as an unknown argument by the stock launcher of miles", "launcher: --loss-aggregation reach"],
        id="FB-70 stock miles refuses them",
    ),
    pytest.param(
        f"{LAUNCH} slime/train.py {DR_GRPO} --policy-loss gspo",
        ["--policy-loss: ignored on the route reducer: it works on custom_loss, megatron_lm, train"],
        id="FB-69 a dead flag",
    ),
    pytest.param(
        f"{LAUNCH} slime/train.py {DR_GRPO} --calculate-per-token-loss",
        ["rule: loss_aggregation=constant does not go with calculate_per_token_loss=True"],
        id="FB-15 constant per token",
    ),
    pytest.param(
        f"{LAUNCH} slime/train.py --loss-aggregation prompt_mean {REDUCER}",
        ["rule: --loss-aggregation prompt_mean: no host tells the loss which samples share a prompt"],
        id="FB-02 no companion",
    ),
    pytest.param(
        "megatron-rl train --docs-per-step none --task sort",
        ["rule: docs_per_step='none' must be a whole number"],
        id="a value of our own command",
    ),
    pytest.param(
        "torchrun --nproc-per-node 3 -m megatron_rl train --tensor-model-parallel-size 2",
        ["rule: 3 ranks do not divide into model replicas of 2"],
        id="ranks of torchrun",
    ),
    pytest.param(
        "python train_rl.py --docs-per-step 3",
        ["--docs-per-step: ignored on the route megatron_lm: it works on train (elsewhere the host's own batching decides"],
        id="FB-69 a flag of train",
    ),
]


@pytest.mark.parametrize(("line", "expected"), UNSOUND)
def test_an_unsound_line_is_told_flag_by_flag(line, expected):
    found = problems(judged(line).findings)
    assert len(found) == len(expected)
    for problem, start in zip(found, expected, strict=True):
        assert problem.startswith(start), problem


SLIPS = [
    pytest.param("--loss_aggregation", "did you mean --loss-aggregation? Flags have dashes", id="underscores"),
    pytest.param("--loss-agregation", "did you mean --loss-aggregation?", id="a letter"),
    pytest.param("--LOSS-AGGREGATION", "did you mean --loss-aggregation?", id="capitals"),
    pytest.param("--loss-aggr", "did you mean --loss-aggregation? These parsers take no abbreviations", id="an abbreviation"),
    pytest.param("--policy_loss_backend", "did you mean --policy-loss-backend? Flags have dashes", id="a longer name"),
]


@pytest.mark.parametrize(("flag", "words"), SLIPS)
@pytest.mark.parametrize(
    ("start", "fate"),
    [
        (f"{LAUNCH} slime/train.py", "dropped without a word by the launcher of slime"),
        ("python miles/train.py", "refused as an unknown argument by the stock launcher of miles"),
        ("megatron-rl train --task sort", "refused as an unknown argument"),
        ("python pretrain_gpt.py", "unknown to this script's parser"),
    ],
)
def test_a_slip_of_a_flag_is_told_and_never_judged_as_the_flag(flag, words, start, fate):
    """FB-69, FB-70: no parser has it, and one that drops what it does not know trains sample_mean in silence."""
    report = judged(f"{start} {flag} constant")
    assert problems(report.findings) == [f"{flag}: {fate}: {words}"]
    assert report.route in (None, "train", "megatron_lm")  # in the other hosts nothing of ours is at work


def test_a_slip_is_told_without_the_rules_that_it_breaks():
    (problem,) = problems(
        judged(f"{LAUNCH} slime/train.py --loss-agregation constant --loss-aggregation-divisor 8 {REDUCER}").findings
    )
    assert problem.startswith("--loss-agregation: dropped")


def test_flags_of_the_hosts_are_no_slips_of_ours():
    """--kl-coef and --entropy-coef begin as ours do."""
    hosts_own = "--kl-coef 0 --entropy-coef 0 --eps-clip 0.2 --kl-loss-coef 0.1 --use-kl-loss --policy --loss-type policy_loss"
    assert problems(judged(f"{LAUNCH} slime/train.py {DR_GRPO} {hosts_own}").findings) == []


def test_what_stands_behind_two_dashes_is_no_flag():
    (problem,) = problems(judged(f"{LAUNCH} slime/train.py {REDUCER} -- --loss-aggregation constant --seed 1").findings)
    assert problem.startswith("--: a parser takes what stands behind it for no flag: --loss-aggregation reaches nobody")


def test_of_a_flag_that_is_given_twice_the_last_counts():
    report = judged(f"{LAUNCH} slime/train.py {DR_GRPO} --loss-aggregation-divisor 4096 --seed 1 --seed 2")
    (note,) = [finding for finding in report.flags if finding.status == NOTE]
    assert (note.subject, note.text) == ("--loss-aggregation-divisor", "given 2 times, and the last counts: 4096, not 8192")


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--custom-pg-loss-reducer-function", "did you mean --custom-pg-loss-reducer-function-path?"),
        ("--reducer-path", "the places are --custom-advantage-function-path"),
    ],
)
def test_a_function_of_ours_behind_no_hooks_flag_is_told(flag, words):
    found = problems(judged(f"{LAUNCH} slime/train.py {flag} megatron_rl.reducers.get_pg_loss_reducer").findings)
    assert len(found) == 1 and found[0].startswith(f"{flag}: ") and words in found[0]


# What only the shell knows


def test_words_that_may_hide_flags_are_told_and_are_nobodys_values():
    """A line out of a script, with its arrays: the reducer's value is the reducer and not the rest of the line."""
    line = ["python", "slime/train.py", *REDUCER.split(), "${GRPO_ARGS[@]}", "--colocate", "$EXTRA_ARGS", *INIT.split()]
    report = judge_launch(line, None)
    assert report.route == "reducer" and report.unread == ("${GRPO_ARGS[@]}", "$EXTRA_ARGS")
    assert report.reading[0].status == NOTE and "not expanded, and the flags in there are not judged" in report.reading[0].text
    (problem,) = problems(report.findings)  # no --loss-aggregation was seen
    assert problem.endswith("(unless ${GRPO_ARGS[@]}, $EXTRA_ARGS says otherwise)")


def test_a_line_with_nothing_of_ours_says_nothing_of_what_it_hides(on_machine):
    code, out = on_machine(CPU_MACHINE, "--launch-only", "--", "python", "slime/train.py", "${GRPO_ARGS[@]}")
    assert code == 0 and "nothing of ours is on what could be read of this line" in out
    assert out.endswith("doctor: no problems in what could be read; not read: ${GRPO_ARGS[@]}\n")


def test_a_value_that_only_the_shell_knows_is_not_judged():
    report = judged(f"{LAUNCH} slime/train.py {REDUCER} --loss-aggregation '$MODE' --num-gpus '${{GPUS}}'")
    assert [(f.subject, f.status) for f in report.flags] == [("--loss-aggregation", NOTE)]
    assert [f.text for f in report.rules] == ["not judged: the value of --loss-aggregation is not known here"]
    assert report.reading[0].text == "not known here, and not judged: what --num-gpus will be given"
    unread_file = judged(f"python slime/train.py --custom-config-path '$CONFIG' {REDUCER}")
    assert unread_file.rules[0].text == "not judged: the value of --custom-config-path is not known here"


def test_a_value_of_the_wrong_kind_ends_in_a_note():
    """The host's own parser refuses it; ours must not end in a traceback."""
    line = f"{LAUNCH} slime/train.py --loss-type custom_loss --custom-loss-function-path megatron_rl.hooks.custom_loss"
    (note,) = judged(f"{line} --eps-clip abc --clip-ratio-low 0.2").rules
    assert note.status == NOTE and "could not convert string to float: 'abc'" in note.text


PATHS = [
    pytest.param("megatron_rl.reducers.get_pg_loss_reducer", OK, "loads", id="FB-71 ours"),
    pytest.param(
        "megatron_rl.reducers:get_pg_loss_reducer",
        NOTE,
        "write megatron_rl.reducers.get_pg_loss_reducer",
        id="FB-71 ours with a colon",
    ),
    pytest.param("megatron_rl.reducers.get_reducer", PROBLEM, "cannot be loaded (AttributeError", id="FB-71 a slip"),
    pytest.param(
        "rewards.exact:match",
        PROBLEM,
        "loaders split on the last dot and cannot load it; write rewards.exact.match",
        id="FB-71 a colon",
    ),
    pytest.param("my_rewards.exact", OK, "my_rewards.exact loads", id="beside the script"),
    pytest.param("my_rewards.LIMIT", PROBLEM, "is int, not a function", id="no function"),
    pytest.param("my_rewards.gone", PROBLEM, "AttributeError", id="a missing name"),
    pytest.param("no_such_thing.exact", PROBLEM, "cannot be loaded from", id="a missing module"),
    pytest.param(
        "needs_sglang.exact",
        NOTE,
        "it imports sglang_that_is_absent, which is not installed here",
        id="a dependency that is elsewhere",
    ),
    pytest.param("slime.rollout.generate", NOTE, "it imports slime, which is not installed here", id="the host is elsewhere"),
    pytest.param("/root/my_rewards.py:exact", PROBLEM, "is no module.function", id="a file"),
    pytest.param("exact", PROBLEM, "is no module.function", id="a bare name"),
    pytest.param("deadly.exact", PROBLEM, "its import ended the process (exit code 3)", id="an import that ends the process"),
]


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slime")
    (folder / "train.py").write_text("import slime\n")
    (folder / "my_rewards.py").write_text("LIMIT = 3\ndef exact(args, samples): ...\n")
    (folder / "needs_sglang.py").write_text("import sglang_that_is_absent\ndef exact(): ...\n")
    (folder / "deadly.py").write_text("import os\nos._exit(3)\n")
    return folder / "train.py"


@pytest.mark.parametrize(("path", "status", "words"), PATHS)
def test_every_dotted_path_is_resolved_as_the_host_would(script, path, status, words):
    (finding,) = judged(f"{LAUNCH} {script} --custom-convert-samples-to-train-data-path {path}").paths
    assert finding.status == status and words in finding.text


@pytest.mark.parametrize(
    ("words", "paths"),
    [
        ("--dynamic-sampling-filter-path my_rewards.exact", [("--dynamic-sampling-filter-path", OK)]),
        ("--rollout-sample-filter-path my_rewards.gone", [("--rollout-sample-filter-path", PROBLEM)]),
        ("--data-source-path my_rewards.exact", [("--data-source-path", OK)]),
        ("--spec my_rewards exact", [("--spec", OK)]),
        ("--chat-template-path my.jinja --megatron-config-path a.yaml --lora-adapter-path a.b", []),  # files
        ("--custom-rm-path my_rewards.gone --custom-rm-path my_rewards.exact", [("--custom-rm-path", OK)]),  # the last
    ],
)
def test_each_option_of_a_host_that_takes_a_function_is_looked_at(script, words, paths):
    assert [(f.subject, f.status) for f in judged(f"{LAUNCH} {script} {words}").paths] == paths


def test_a_module_beside_a_script_that_is_elsewhere_is_not_judged():
    (finding,) = judged(f"{LAUNCH} /cluster/slime/train.py --custom-rm-path my_rewards.exact").paths
    assert finding.status == NOTE and "/cluster/slime/train.py is not here, and no module my_rewards either" in finding.text


def test_the_lines_own_python_path_is_looked_at(tmp_path):
    """As the hosts' search and tool-use examples are launched."""
    (tmp_path / "generate_with_search.py").write_text("def generate(): ...\n")
    told_ray = json.dumps({"env_vars": {"PYTHONPATH": f"/root/Megatron-LM/:{tmp_path}"}})
    rest = ["slime/train.py", "--custom-rm-path", "generate_with_search.generate"]
    for start in (["ray", "submit", f"--runtime-env-json={told_ray}", "--", "python3"], [f"PYTHONPATH={tmp_path}", "python"]):
        assert [f.status for f in judge_launch([*start, *rest], None).paths] == [OK]
    assert [f.status for f in judge_launch(["python", *rest], None).paths] == [NOTE]


def test_a_loss_of_the_users_own_is_resolved_and_judged(script):
    report = judged(f"{LAUNCH} {script} --loss-aggregation deadly.exact {REDUCER}")
    assert [finding.subject for finding in report.paths if finding.status == PROBLEM] == ["--loss-aggregation"]
    assert report.rules == []  # judging it would import it here


@pytest.mark.parametrize("is_file", [True, False], ids=["a file", "base64"])
def test_settings_that_travel_in_the_file_are_read(tmp_path, is_file):
    """As megatron-rl launch-config writes it."""
    written = 'loss_aggregation: "constant"\nloss_aggregation_divisor: 8192.0\n'
    (tmp_path / "m.yaml").write_text(written)
    given = f"--custom-config-path {tmp_path / 'm.yaml'}" if is_file else config(written)
    report = judged(f"python slime/train.py {given} {REDUCER} {INIT}")
    assert [(f.subject, f.status) for f in report.flags] == [("--loss-aggregation", OK), ("--loss-aggregation-divisor", OK)]
    assert problems(report.findings) == []


def test_without_a_reader_of_yaml_the_file_is_refused_in_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ConfigError, match=r"read with pyyaml, which is not installed: pip install 'megatron_rl\[doctor\]'"):
        judged(f"python slime/train.py {config('a: b')} {REDUCER}")


@pytest.mark.parametrize(
    ("value", "is_refused"), [('"false"', True), ("1", True), ("'no'", True), ("no", False), ("Off", False), ("false", False)]
)
def test_a_switch_of_the_file_is_what_the_host_will_read(value, is_refused):
    """FB-13: in quotes it is text, which is on; YAML 1.1 reads a bare no and off as false."""
    file = config(f"loss_aggregation: sample_mean\ncalculate_per_token_loss: {value}\n")
    found = [text for text in problems(judged(f"python slime/train.py {file} {REDUCER} {INIT}").findings) if "must be" in text]
    assert bool(found) == is_refused
    assert all("calculate_per_token_loss" in text and "reads it as True" in text for text in found)


def test_the_models_own_losses_are_judged_as_far_as_the_line_says(script):
    """FB-98: MODEL_ARGS of a script of experts stand on the line."""
    line = f"{LAUNCH} {script} --loss-aggregation token_mean --calculate-per-token-loss {REDUCER} {INIT} --num-experts 64"
    assert problems(judged(f"{line} --moe-aux-loss-coeff 0").findings) == []
    (problem,) = problems(judged(f"{line} --moe-aux-loss-coeff 0.001").findings)
    assert "moe_aux_loss_coeff=0.001 of aux_loss does not go with" in problem


def config(text: str) -> str:
    return "--custom-config-path base64:" + base64.b64encode(text.encode()).decode()


def test_functions_that_the_file_names_are_resolved():
    written = "loss_aggregation: sample_mean\ncustom_megatron_init_path: megatron_rl.hooks.custom_megatron_ini\n"
    (problem,) = problems(judged(f"python slime/train.py {config(written)} {REDUCER}").findings)
    assert problem.startswith("--custom-megatron-init-path: megatron_rl.hooks.custom_megatron_ini cannot be loaded")


@pytest.mark.parametrize(
    ("start", "statuses"),
    [
        (f"{LAUNCH} slime/train.py", [OK, NOTE]),
        ("python slime/train.py", [OK, NOTE]),  # dropped from the line, and merged from the file
        ("python miles/train.py", [PROBLEM, NOTE]),  # refused before the file is read
    ],
)
def test_the_file_wins_over_the_line_and_the_difference_is_told(start, statuses):
    report = judged(f"{start} --loss-aggregation constant {config('loss_aggregation: sample_mean')} {REDUCER}")
    assert [f.status for f in report.flags] == statuses
    assert report.flags[1].text == "the file of --custom-config-path wins: sample_mean, not the constant of the line"


def test_a_key_with_dashes_is_no_flag():
    report = judged(f"python slime/train.py {config('loss-aggregation: constant')} {REDUCER}")
    found = problems(report.findings)
    assert report.flags == []
    assert any("loss-aggregation='constant' has no effect: keys have underscores" in problem for problem in found)
    assert not any(problem.startswith("--loss-aggregation: ") for problem in found)


def test_a_launch_that_nothing_checks_at_start_is_advised():
    (advice,) = judged(
        f"python slime/train.py --custom-config-path base64:bG9zc19hZ2dyZWdhdGlvbjogc2FtcGxlX21lYW4K {REDUCER}"
    ).rules
    assert (advice.status, advice.subject) == (NOTE, "init hook") and INIT in advice.text


def test_a_line_without_anything_of_ours_is_said_to_be_that():
    report = judged("python slime/train.py --rollout-batch-size 8")
    assert report.route is None and [f.text for f in report.rules] == ["nothing of ours is on this line: neither a path nor a flag"]


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("import slime.utils", "slime"),
        ("from miles.ray import x", "miles"),
        ("from megatron.training import pretrain", "megatron_lm"),
    ],
)
def test_the_host_is_what_the_script_imports(tmp_path, text, host):
    (tmp_path / "run.py").write_text(text)
    assert read_line(["python", str(tmp_path / "run.py")], None).host == host
    assert read_line(["python", str(tmp_path / "run.py")], "slime").host == "slime"  # --host wins


def test_a_script_with_our_flags_in_its_parser_is_told_from_one_without(tmp_path):
    (tmp_path / "pretrain_mine.py").write_text("from megatron.training import pretrain\n")
    line = f"python {tmp_path / 'pretrain_mine.py'} --policy-loss gspo"
    assert problems(judged(line).findings)[0].startswith("--policy-loss: unknown to this script's parser: pass compose_extra_args")
    (tmp_path / "pretrain_mine.py").write_text("from megatron_rl.hosts.megatron_lm import call_pretrain\nimport megatron\n")
    assert problems(judged(line).findings) == []


def test_each_flag_of_ours_is_judged_by_the_table_of_routes():
    """One truth: what doctor calls ignored is what validation refuses."""
    for flag, routes in ROUTES_OF_FLAG.items():
        (finding,) = judged(f"python pretrain_gpt.py {flag} 1").flags
        assert (finding.status == OK) == (Route.MEGATRON_LM in routes), flag


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "python train.py --rollout-batch-size 8",
            r"tells miles or slime: train.py is not here; start doctor from the checkout .*, or add --host \{miles,slime\}",
        ),
        ("python", "no train script and no megatron-rl command after --"),
        ("megatron-rl selftest", "megatron-rl selftest trains nothing"),
        ("python slime/train.py --custom-config-path gone.yaml", "--custom-config-path gone.yaml is no file here"),
        (f"python slime/train.py {config('- a')}", "holds list: it must be key: value lines"),
        (f"python slime/train.py {config('a: b: c')}", "is no YAML: mapping values are not allowed here"),
        ("python slime/train.py --custom-config-path base64:/w==", "base64:... cannot be decoded"),
    ],
)
def test_a_line_that_cannot_be_read_is_refused(line, message):
    with pytest.raises(ConfigError, match=message):
        judged(line)


# The command


@pytest.fixture
def on_machine(monkeypatch, capsys):
    def run(facts: dict, *arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(doctor, "collect_facts", lambda: facts)
        code = main(["doctor", *arguments])
        return code, capsys.readouterr().out

    return run


def test_the_exit_code_is_for_ci(on_machine):
    line = ["--", *shlex.split(f"{LAUNCH} slime/train.py {DR_GRPO}")]
    assert on_machine(CPU_MACHINE)[0] == 0 and on_machine(SICK_MACHINE)[0] == 1
    assert on_machine(CPU_MACHINE, *line)[0] == 0 and on_machine(CPU_MACHINE, *line, "--policy-loss", "gspo")[0] == 1
    assert on_machine(CPU_MACHINE, "--require", "cuda")[0] == 1
    assert on_machine(SICK_MACHINE, "--launch-only", *line)[0] == 0
    assert on_machine(CPU_MACHINE, "--require", "cudda")[0] == 2 and on_machine(CPU_MACHINE, "--launch-only")[0] == 2


def test_json_holds_what_the_text_says(on_machine):
    code, out = on_machine(SICK_MACHINE, "--json", "--", *shlex.split(f"{LAUNCH} slime/train.py {DR_GRPO} --policy-loss gspo"))
    report = json.loads(out)
    statuses = [
        finding["status"]
        for part in (report["machine"], *[report["launch"][k] for k in ("paths", "flags", "rules")])
        for finding in part
    ]
    assert code == 1 and statuses.count(PROBLEM) == report["problems"] > 1 and report["launch"]["route"] == "reducer"
    assert {capability["answer"] for capability in report["works"]} == {"yes", "no", "partly"}


def test_every_judge_of_the_machine_says_something_on_every_machine():
    for facts in (CPU_MACHINE, GPU_MACHINE, SICK_MACHINE):
        assert all(list(judge(facts)) for judge in JUDGES)


def test_python_dash_m_and_two_dashes():
    """The words after -- are the launch line's, also those that look like flags of doctor."""
    command = [sys.executable, "-m", "megatron_rl", "doctor", "--launch-only", "--json", "--"]
    words = ["python", "-m", "megatron_rl", "train", "--task", "sort", "--json"]
    finished = subprocess.run([*command, *words], check=True, cwd=ROOT, capture_output=True, text=True)
    assert json.loads(finished.stdout)["launch"]["title"] == "megatron-rl train"
