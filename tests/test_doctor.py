"""`megatron-rl doctor`: names what is broken and its remedy, survives it, and tells what a launch line would come to."""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
from doctor_cases import ABSENT, CPU_MACHINE, EMPTY_ENGINE, GPU_MACHINE, HERE, SICK_MACHINE, WEB_TOOLKIT, machine
from forked import forget, forked

from megatron_rl.__main__ import main
from megatron_rl.commands import doctor
from megatron_rl.commands.doctor import probes as doctor_probes
from megatron_rl.commands.doctor.command_line import read_line
from megatron_rl.commands.doctor.launch import judge_launch
from megatron_rl.commands.doctor.machine import findings, has_kernels
from megatron_rl.commands.doctor.report import NOTE, OK, PROBLEM
from megatron_rl.config import Route
from megatron_rl.errors import ConfigError
from megatron_rl.hosts import DOOR_NAMES, HOST_NAMES
from megatron_rl.hosts.base import CUSTOM_LOSS_LINE, rollout_hosts
from megatron_rl.hosts.names import meant_host_flag
from megatron_rl.validation import ROUTES_OF_FLAG, field_of

OURS = "megatron_rl.reducers.get_pg_loss_reducer"
REDUCER = f"--custom-pg-loss-reducer-function-path {OURS}"
REWARD = "--custom-reward-post-process-path megatron_rl.hooks.reward_post_process --global-batch-size 8"
INIT = "--custom-megatron-init-path megatron_rl.hooks.custom_megatron_init"
DR_GRPO = f"--loss-aggregation constant --loss-aggregation-divisor 8192 {REDUCER}"
OUR_LOSS = f"--loss-type custom_loss --custom-loss-function-path megatron_rl.hooks.custom_loss {INIT}"
LAUNCH = "python -m megatron_rl.hosts.launch"


BROKEN = {"state": "broken", "error": "OSError: y"}


def problems(found) -> list[str]:
    return [f"{finding.subject}: {finding.text}" for finding in found if finding.status == PROBLEM]


# The machine


@pytest.mark.parametrize(
    "facts",
    [
        *(CPU_MACHINE, GPU_MACHINE, machine(megatron=ABSENT, triton=ABSENT, psutil=ABSENT, numpy=ABSENT)),
        machine(machine={"has_nvidia_device": True, "hides_devices": True}),
    ],
)
def test_a_sound_machine_has_no_problem_whatever_it_lacks(facts):
    """Absent is not broken: the losses need torch alone."""
    assert problems(findings(facts)) == []
    assert [finding.subject for finding in findings(facts)].count("torch") == 1


SICK = [
    ({"transformer_engine": EMPTY_ENGINE}, "transformer engine: 2.9.0 is PyPI's empty meta package.*pip uninstall"),
    ({"apex": WEB_TOOLKIT}, "apex: 0.9.10.dev0 is the web toolkit .* not NVIDIA's.*pip uninstall apex"),
    ({"psutil": ABSENT}, "psutil: not installed: Megatron's checkpoints need it.*hang.*pip install psutil"),
    ({"megatron": {"state": "broken", "error": "RuntimeError: x"}}, "megatron: megatron-core  ?cannot be used: RuntimeError: x"),
    ({"megatron": {"contract": "Megatron-Core 9 changed what a 3-tuple means", "ratio": 0.5}}, "schedule: Megatron-Core 9 changed"),
    pytest.param({"torch": BROKEN}, "torch: cannot be imported .OSError: y.: reinstall it", id="broken torch"),
    pytest.param({"torch": ABSENT}, "torch: not installed, and everything needs it", id="no torch"),
    pytest.param({"python": {"version": "3.10.12"}}, "python: 3.10.12: megatron_rl needs 3.11 or later", id="old Python"),
    (
        {"torch": {"numpy_error": "RuntimeError: Numpy is not available"}},
        "numpy: 2.4.6, which this torch cannot use .RuntimeError: Numpy is not available.: pip install 'numpy<2'",
    ),
]


@pytest.mark.parametrize(("changes", "message"), SICK)
def test_a_sick_machine_is_told_what_is_broken_and_what_to_do(changes, message):
    """FB-16: catches a package that breaks training later and is not named."""
    (problem,) = problems(findings(machine(**changes)))
    assert re.match(message, problem), problem


ON_CUDA = [
    pytest.param({"triton": ABSENT}, "triton: not installed: --policy-loss-backend auto refuses CUDA without it", id="no Triton"),
    ({"triton": {"version": "3.3.1"}}, "triton: 3.3.1 is older than 3.4, and the kernels .*pass --policy-loss-backend torch"),
    ({"torch": {"version": "2.7.1+cu128"}}, "torch: 2.7.1.cu128 is older than 2.8, and the kernels .*install torch 2.8 or later"),
    pytest.param({"machine": {"interprets_triton": True}}, "triton: TRITON_INTERPRET is set", id="interpreter on a GPU"),
    pytest.param({"torch": {"has_nccl": False}}, "nccl: this torch is built without it", id="no NCCL"),
    (
        {"torch": {"has_cuda": False, "cuda_error": "The NVIDIA driver on your system is too old"}},
        "cuda: there is an NVIDIA device and torch for CUDA 13.0 cannot use it (The NVIDIA driver on your system is too old): ",
    ),
    (
        {"torch": {"compute": [[9, 0], [12, 0]], "devices": ["H200", "B300"]}},
        "cuda: this torch has no kernels for B300, only sm_80, sm_90, sm_100: install a newer build",
    ),
    (
        {
            "transformer_engine": {
                "state": "broken",
                "error": "OSError: libx",
                "distributions": ["transformer-engine", "transformer-engine-torch"],
            }
        },
        "transformer engine: cannot be imported (OSError: libx): megatron.core dies with it",
    ),
    (
        {"flash_attn": BROKEN},
        "flash attn: cannot be imported (OSError: y): Transformer Engine and transformers die with it",
    ),
]


@pytest.mark.parametrize(("changes", "message"), ON_CUDA)
def test_a_sick_machine_with_a_gpu(changes, message):
    (problem,) = problems(findings(machine(GPU_MACHINE, **changes)))
    assert problem.startswith(message) or re.match(message, problem), problem


@pytest.mark.parametrize(
    ("changes", "subject", "text"),
    [
        ({"triton": {"version": "3.10.0"}}, "triton", "3.10.0 is newer than 3.9, .*selftest shows whether they run"),
        ({"torch": {"version": "2.16.0"}}, "torch", "2.16.0 is newer than 2.15"),
        (
            {"torch": {"rocm_build": "7.1", "cuda_build": None}, "triton": {"version": "3.3.1"}},
            "cuda",
            "ROCm 7.1, 2 x .*auto takes torch",
        ),
    ],
    ids=["a newer Triton", "a newer torch", "ROCm"],
)
def test_what_the_kernels_were_not_compiled_with_is_noted(changes, subject, text):
    found = findings(machine(GPU_MACHINE, **changes))
    assert problems(found) == []
    assert any(finding.subject == subject and finding.status == NOTE and re.match(text, finding.text) for finding in found), found


WORKING = [
    # what is odd
    ({"torch": {"version": "2.12.1+cpu"}}, "torch", NOTE, "2.12.1+cpu is none of 2.11, 2.13, 2.14, which are tested"),
    ({"megatron": {"version": "0.12.1"}}, "megatron", NOTE, "0.12.1 is outside 0.13 to 0.19"),
    ({"triton": {"version": "3.6.0"}}, "triton", NOTE, "its interpreter fails on loops with numpy 2.4"),
    ({"transformer_engine": {"state": "broken", "error": "OSError: libcuda.so.1"}}, "transformer engine", NOTE, "needs CUDA"),
    ({"flash_attn": BROKEN}, "flash attn", NOTE, "or pip uninstall flash-attn"),
    # what does not work without what is absent
    ({"triton": ABSENT}, "triton", "absent", "not installed: no kernels, auto takes torch"),
    ({"megatron": ABSENT}, "megatron", "absent", "no train, no checkpoints, no Megatron-LM, selftest of the losses alone"),
    ({}, "megatron", OK, "own scripts need its checkout"),
    ({"slime": HERE}, "hosts", OK, "slime can be imported"),
    ({}, "hosts", "absent", "none of miles, slime can be imported from here: run from a checkout of theirs"),
]


@pytest.mark.parametrize(("changes", "subject", "status", "words"), WORKING)
def test_what_is_odd_or_absent_is_said_and_is_no_problem(changes, subject, status, words):
    """The interpreter on a GPU is thousands of times slower."""
    found = findings(machine(**changes))
    assert problems(found) == []
    said = [finding for finding in found if finding.subject == subject]
    assert any(finding.status == status and words in finding.text for finding in said)
    assert len(said) == 1 or status == NOTE  # beside the line of what works


@pytest.mark.parametrize(
    ("compute", "archs", "expected"),
    [
        ((8, 6), ["sm_80"], True),  # a later minor version of the same major one
        ((8, 0), ["sm_86"], False),  # an earlier one
        ((9, 5), ["sm_90a"], False),
        ((12, 0), ["sm_100"], False),
        ((12, 1), ["sm_90", "compute_90"], True),  # compiled for it when it is loaded
        ((9, 0), [], True),  # a build that does not say
    ],
)
def test_which_devices_a_torch_has_kernels_for(compute, archs, expected):
    assert has_kernels(compute, archs) is expected


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
    "triton/__init__.py": "__version__ = '3.4.5'\nprint('hello')",
    "flash_attn/__init__.py": "import flash_attn_2_cuda",
    "flash_attn_2_cuda.so": "no library",
}


def test_impostors_and_broken_packages_are_told_and_do_not_take_doctor_down(fake_packages, monkeypatch):
    """Fake modules of both kinds; beside them one that kills its process."""
    fake_packages(FAKES)
    monkeypatch.setattr(doctor_probes, "PROBED", ("psutil", "triton", "transformer_engine", "flash_attn", "apex"))
    facts = doctor_probes.collect_facts()
    assert facts["flash_attn"]["state"] == "broken" and "flash_attn_2_cuda.so: file too short" in facts["flash_attn"]["error"]
    assert facts["psutil"]["error"].startswith("its import ended the process (signal 9)")
    assert (facts["triton"]["state"], facts["triton"]["version"]) == ("here", "3.4.5") or facts["triton"]["version"]
    judged = "\n".join(
        problems(findings({**CPU_MACHINE, **facts, "torch": CPU_MACHINE["torch"], "megatron": CPU_MACHINE["megatron"]}))
    )
    assert "transformer engine: 2.9.0 is PyPI's empty meta package" in judged and "apex: 0.9.10.dev0 is the web toolkit" in judged


FAKE_TORCH = """
__version__ = "2.1.0+cu118"
class version: cuda, hip = "11.8", None
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
def test_this_machine_as_json(monkeypatch, capsys):
    """The real thing once: torch and Megatron probed, here in a fork of this process each, one object on standard output."""

    def answer(name: str, details: str) -> SimpleNamespace:
        def probe() -> None:
            sys.argv = ["-c", name, details]
            exec(doctor_probes.PROBE, {"__name__": "__main__"})

        code, *said = forked(probe)
        return SimpleNamespace(communicate=lambda timeout: said, returncode=code)

    monkeypatch.setattr(doctor_probes, "_launch", answer)
    monkeypatch.setattr(doctor_probes, "_is_there", lambda name: name in ("torch", "numpy", "megatron"))
    code = main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    by_subject = {finding["subject"]: finding for finding in report["machine"]}
    assert by_subject["megatron"]["status"] == OK and by_subject["schedule"]["text"].startswith("gradient x 1.000000")
    assert by_subject["triton"]["status"] == "absent"
    assert code == (1 if report["problems"] else 0) and report["launch"] is None


def test_a_folder_of_that_name_is_no_installed_host(tmp_path, monkeypatch):
    """Beside a checkout `import miles` finds the folder of the checkout, a namespace with nothing in it."""
    (tmp_path / "miles").mkdir()
    (tmp_path / "slime").mkdir()
    (tmp_path / "slime" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert [doctor_probes._is_there(name) for name in ("miles", "slime", "torch", "megatron")] == [False, True, True, True]


def test_a_slow_import_gives_a_sign_of_life_and_has_a_limit(fake_packages, monkeypatch, capsys):
    """A user's function may import for minutes: what is waited for, and how long at most, is said on standard error."""
    monkeypatch.setattr(doctor_probes, "SIGN_OF_LIFE", 0.2)
    fake_packages({"mine.py": "import time; time.sleep(0.5)\ndef generate(): ...\n"})
    assert doctor_probes.look_up("mine.generate")["state"] == "here"
    assert capsys.readouterr().err == "doctor: still importing mine.generate, for at most 120 s\n"
    monkeypatch.setattr(doctor_probes, "SECONDS", 0.3)
    error = doctor_probes.look_up("mine.generate")["error"]
    assert re.fullmatch("its import hangs: no answer in 0.3 s; `.*python.* -v -c 'import mine'` shows where", error)


def test_packages_that_hang_together_share_one_limit(monkeypatch):
    """All are started before the first is waited for, and the limit of each counts from the same moment."""
    events = []
    monkeypatch.setattr(doctor_probes, "PROBED", ("numpy", "psutil", "triton"))
    monkeypatch.setattr(doctor_probes, "_is_there", lambda name: True)
    monkeypatch.setattr(doctor_probes, "_launch", lambda name, details: events.append(name))
    monkeypatch.setattr(doctor_probes, "_answer", lambda process, name, started: events.append(started) or {})
    doctor_probes.collect_facts()
    assert events[:3] == ["numpy", "psutil", "triton"] and len({*events[3:]}) == 1 and len(events) == 6


@pytest.mark.parametrize("line", [[], ["--", "python", "slime/train.py"]], ids=["the machine", "and a line"])
def test_doctor_runs_where_torch_does_not(line):
    """Catches an import of torch on the way to the one command that is to say what is wrong with it."""

    def without_torch() -> int:
        forget("torch")
        sys.modules["torch"] = None
        import_module("megatron_rl.commands.doctor.probes")._is_there = lambda name: False
        return import_module("megatron_rl.__main__").main(["doctor", *line])

    code, out, error = forked(without_torch)
    assert code == 1, error
    assert "PROBLEM  torch" in out and "not installed, and everything needs it" in out
    assert ("PROBLEM  rules  they need torch, see above" in out) == bool(line)


# The launch line


def judged(line: str, host: str | None = None):
    return judge_launch(shlex.split(line), host)


SOUND = [
    pytest.param(f"{LAUNCH} /root/slime/train.py {DR_GRPO}", "reducer", id="our launcher"),
    pytest.param(f"ray job submit --runtime-env-json='{{}}' -- {LAUNCH} miles/train.py {DR_GRPO}", "reducer", id="under ray"),
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
        ],
        id="stock slime drops our flags",
    ),
    pytest.param(
        f"python miles/train.py --loss-aggregation constant {REDUCER}",
        ["--loss-aggregation: refused as an unknown argument by the stock launcher of miles"],
        id="stock miles refuses them",
    ),
    pytest.param(
        f"{LAUNCH} slime/train.py {DR_GRPO} --policy-loss gspo",
        ["--policy-loss: ignored on the route reducer: it works on custom_loss, megatron_lm, train; remove it, or train our"],
        id="FB-69 a dead flag",
    ),
    pytest.param(
        f"{LAUNCH} slime/train.py --loss-type custom_loss --loss-aggregation prompt_mean {REWARD}",
        ["rule: --loss-type custom_loss has no function: add --custom-loss-function-path megatron_rl.hooks.custom_loss"],
        id="a loss type without its function",
    ),
    pytest.param(
        f"{LAUNCH} slime/train.py {REDUCER} --loss-aggregation prompt_mean --loss-aggregation sample_men",
        ["rule: --loss-aggregation: loss aggregation 'sample_men' is not registered"],
        id="a value that is refused is not read as well",
    ),
    ("megatron-rl train --docs-per-step none --task sort", ["rule: docs_per_step='none' must be a whole number"]),
    (
        "torchrun --nproc-per-node 3 -m megatron_rl train --tensor-model-parallel-size 2",
        ["rule: 3 ranks do not divide into model replicas of 2"],
    ),
    # Flags of the hosts are no slips of ours: --kl-coef and --entropy-coef begin as ours do.
    (f"{LAUNCH} slime/train.py {DR_GRPO} --kl-coef 0 --entropy-coef 0 --kl-loss-coef 0.1 --policy --loss-type policy_loss", []),
    (f"{LAUNCH} slime/train.py {DR_GRPO} --eps-clip 0.2 --use-kl-loss", []),
    (
        f"{LAUNCH} slime/train.py {REDUCER} -- --loss-aggregation constant --seed 1",
        ["--: a parser reads no flag after it: --loss-aggregation has no effect"],
    ),
    (
        f"{LAUNCH} slime/train.py --custom-pg-loss-reducer-function {OURS}",
        [f"--custom-pg-loss-reducer-function: {OURS} has no effect with this flag: did you mean {REDUCER.split()[0]}?"],
    ),
    (
        "python train_rl.py --docs-per-step 3",
        ["--docs-per-step: ignored on the route megatron_lm: it works on train (elsewhere the host's batching decides"],
    ),
]


def test_a_flag_that_is_given_twice_is_noted_and_a_refused_value_is_not_called_read():
    twice = "--loss-aggregation prompt_mean --loss-aggregation sample_men"
    flags = [(f.subject, f.status, f.text) for f in judged(f"{LAUNCH} slime/train.py {REDUCER} {twice}").flags]
    assert flags == [
        ("--loss-aggregation", NOTE, "given 2 times (prompt_mean, sample_men): the last one counts, the first one has no effect")
    ]


@pytest.mark.parametrize(("line", "expected"), UNSOUND)
def test_an_unsound_line_is_told_flag_by_flag(line, expected):
    """FB-69: catches a flag that is accepted and has no effect."""
    found = problems(judged(line).findings)
    assert len(found) == len(expected)
    for problem, start in zip(found, expected, strict=True):
        assert problem.startswith(start), problem


SLIPS = [
    pytest.param("--loss_aggregation", "did you mean --loss-aggregation? Flags have dashes", id="underscores"),
    pytest.param("--loss-agregation", "did you mean --loss-aggregation?", id="a letter"),
    pytest.param("--loss-agg-mode", "did you mean --loss-aggregation?", id="verl's name"),
    pytest.param("--loss-aggr", "did you mean --loss-aggregation? These parsers take no abbreviations", id="an abbreviation"),
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
    """FB-69: no parser has it, and one that drops what it does not know trains sample_mean in silence."""
    report = judged(f"{start} {flag} constant")
    assert problems(report.findings) == [f"{flag}: {fate}: {words}"]
    assert report.route in (None, "train", "megatron_lm")  # in the other hosts nothing of ours is at work


MEANT = {
    "--eps-clip-hihg": "--eps-clip-high",
    "--esp-clip": "--eps-clip",
    "--contxt-parallel-size": "--context-parallel-size",
    "--rollout-temprature": "--rollout-temperature",
    # The host's and ours differ by two letters: the most similar one is told.
    "--n-samples-per-prompts": "--n-samples-per-prompt",
    "--samples-per-prompts": "--samples-per-prompt",
    # Switches that turn something off have another name in the arguments.
    "--disable-grpo-std-normalisation": "--disable-grpo-std-normalization",
    "--disable-grpo-std-norm": "--disable-grpo-std-normalization",
    "--disable-reward-normalization": "--disable-rewards-normalization",
    "--no-check-for-nan-in-loss-and-grads": "--no-check-for-nan-in-loss-and-grad",
}


@pytest.mark.parametrize("host", ["slime", "miles"])
def test_a_slip_of_a_hosts_flag_is_told(host):
    """slime drops it, and trains with another clip. Only flags that our checks read are known here."""
    slips = " ".join(f"{slip} 2" for slip in MEANT)
    found = {
        f.subject: f.text for f in judged(f"{LAUNCH} {host}/train.py {DR_GRPO} {slips} --own-flag 3").flags if f.status == PROBLEM
    }
    assert list(found) == list(MEANT)
    assert all(found[slip].endswith(f"by the launcher of {host}: did you mean {MEANT[slip]}?") for slip in MEANT)


def test_a_script_of_ones_own_may_have_a_flag_as_others_name_ours():
    (problem,) = problems(judged("python pretrain_gpt.py --policy-loss gspo --epsilon 1e-8 --clip-ratio-high nan").findings)
    assert "clip_ratio_high" in problem and "epsilon" not in problem
    (slip,) = problems(judged(f"{LAUNCH} slime/train.py {DR_GRPO} --epsilon 0.2").findings)
    assert slip.endswith("did you mean --clip-ratio-low?")


@pytest.mark.host("MILES_ROOT", "SLIME_ROOT", "MEGATRON_LM_ROOT")
def test_no_real_flag_is_taken_for_a_slip():
    roots = [Path(os.environ[name]) for name in ("MILES_ROOT", "SLIME_ROOT", "MEGATRON_LM_ROOT") if name in os.environ]
    texts = [path.read_text(encoding="utf-8", errors="ignore") for root in roots for path in root.rglob("*arguments*.py")]
    flags = {flag for text in texts for flag in re.findall(r"[\"'](--[a-z][a-z0-9-]+)[\"']", text)}
    assert len(flags) > 100
    assert [flag for flag in flags for host in rollout_hosts() if meant_host_flag(flag, host)] == []


def test_a_launch_without_a_problem_is_told_what_it_trains():
    """The weight of a token and, with our loss, its clip: of the host's own flags too."""
    sizes = "--global-batch-size 64 --n-samples-per-prompt 8"
    (ours,) = [f.text for f in judged(f"{LAUNCH} slime/train.py {OUR_LOSS} {sizes} --eps-clip 0.1").rules if f.subject == "trains"]
    step = "step of 64 rollouts (one of several samples counts once), 8 prompts"
    assert "custom_loss | grpo, clip 0.1/0.1, " in ours and f"{step} | weight of a token 1/(N M_roll)" in ours
    (own,) = [f.text for f in judged(f"{LAUNCH} slime/train.py {DR_GRPO} {sizes}").rules if f.subject == "trains"]
    assert own.startswith(f"loss_aggregation=constant by our reducer | {step} | weight of a token 1/(L N)")
    assert not [f for f in judged(f"{LAUNCH} slime/train.py {DR_GRPO} --policy-loss gspo").rules if f.subject == "trains"]


# What only the shell knows


def test_words_that_may_hide_flags_are_told_and_are_nobodys_values():
    """A line out of a script, with its arrays: the reducer's value is the reducer and not the rest of the line."""
    line = ["python", "slime/train.py", *REDUCER.split(), "${GRPO_ARGS[@]}", "--colocate", "$EXTRA_ARGS", *INIT.split()]
    report = judge_launch(line, None)
    assert report.route == "reducer" and report.unread == ("${GRPO_ARGS[@]}", "$EXTRA_ARGS")
    assert report.reading[0].status == NOTE and "not expanded, and the flags in there are not judged" in report.reading[0].text
    (problem,) = problems(report.findings)  # no --loss-aggregation was seen
    assert problem.endswith("(unless ${GRPO_ARGS[@]}, $EXTRA_ARGS says otherwise)")


FREE = "the weights of its tokens do not depend on the layout"


def test_a_line_with_nothing_of_ours_says_nothing_of_what_it_hides(on_machine):
    code, out = on_machine(CPU_MACHINE, "--launch-only", "--", "python", "slime/train.py", "${GRPO_ARGS[@]}")
    assert code == 0 and "what could be read of this line has no path and no flag of megatron_rl" in out
    said = "the weights of its tokens do not depend on the layout; not read: ${GRPO_ARGS[@]}\n"
    assert out.endswith(said)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "--host miles -- python3 train.py --advantage-estimator grpo --disable-grpo-std-normalization",
            f"; miles's own loss: {FREE}",
        ),
        (
            "-- python slime/train.py --num-experts 8 --moe-aux-loss-coeff 0",
            f"; slime's own loss: {FREE}",
        ),
        (
            "-- python -m verl.trainer.main_ppo actor_rollout_ref.actor.policy_loss.loss_mode=gspo",
            f"verl's own loss: {FREE}",
        ),
        (
            "-- python -m skyrl.train.entrypoints.main_base trainer.algorithm.policy_loss_type=gspo",
            f"SkyRL's own loss: {FREE}",
        ),
        (
            "-- python examples/run_grpo.py loss_fn.ratio_clip_max=0.28",
            f"NeMo-RL's own loss: {FREE}, as far as they were judged; see the notes",
        ),
    ],
)
def test_the_last_line_of_a_stock_launch_does_not_say_that_there_is_no_problem(line, said, on_machine):
    code, out = on_machine(CPU_MACHINE, "--launch-only", *line.split())
    assert code == 0 and out.endswith(f"{said}\n"), out


@pytest.mark.parametrize("start", ["python3 train.py", "python3 -m megatron_rl.hosts.launch train.py"])
@pytest.mark.parametrize("switch", ["", " --disable-grpo-std-normalization"])
@pytest.mark.parametrize("estimator", ["grpo", "gspo"])  # miles divides for both
def test_dr_grpo_with_the_deviation_is_noted(start, switch, estimator, on_machine):
    line = f"{start} --advantage-estimator {estimator} --loss-aggregation constant --loss-aggregation-divisor 8{switch}"
    _, out = on_machine(CPU_MACHINE, "--launch-only", "--host", "miles", "--", *line.split(), *REDUCER.split())
    assert ("without --disable-grpo-std-normalization" in " ".join(out.split())) == (not switch), out


@pytest.mark.parametrize("host", ["miles", "slime"])
@pytest.mark.parametrize(
    ("given", "is_advised"),
    [
        (REDUCER, True),
        (f"{REDUCER} --eps-clip-high 0.28", False),
        (f"{REDUCER} --advantage-estimator gspo", False),
        (f"{CUSTOM_LOSS_LINE} --policy-loss grpo", True),
        (f"{CUSTOM_LOSS_LINE} --policy-loss grpo --eps-clip-high 0.28", False),
        (f"{CUSTOM_LOSS_LINE} --policy-loss cispo", False),
    ],
)
def test_prompt_mean_without_the_clip_of_dapo_is_noted(host, given, is_advised, on_machine):
    sizes = "--rollout-batch-size 8 --n-samples-per-prompt 4 --global-batch-size 32"
    hook = "--custom-reward-post-process-path megatron_rl.hooks.reward_post_process"
    line = f"python3 -m megatron_rl.hosts.launch train.py --loss-aggregation prompt_mean {hook} {sizes} {given}"
    _, out = on_machine(CPU_MACHINE, "--launch-only", "--host", host, "--", *line.split())
    said = "--loss-aggregation prompt_mean without --eps-clip-high 0.28: the clip is 0.2/0.2, and DAPO as published has 0.2/0.28"
    assert (said in " ".join(out.split())) == is_advised, out


def test_a_value_that_only_the_shell_knows_is_not_judged():
    report = judged(f"{LAUNCH} slime/train.py {REDUCER} --loss-aggregation '$MODE' --num-gpus '${{GPUS}}' --eps-clip '$CLIP'")
    assert [(f.subject, f.status) for f in report.flags] == [("--loss-aggregation", NOTE)]
    assert [f.text for f in report.rules] == ["not judged: the value of --loss-aggregation is not known here"]
    assert report.reading[0].text == "not known here, and not judged: what --eps-clip will be given"
    unread_file = judged(f"python slime/train.py --custom-config-path '$CONFIG' {REDUCER}")
    assert unread_file.rules[0].text == "not judged: the value of --custom-config-path is not known here"


@pytest.mark.parametrize("place", ["line", "file"])
def test_a_misspelt_path_is_one_problem(place, tmp_path):
    """The other flags are judged as beside the path that is meant: nothing of them is to be removed."""
    flags = "--loss-type custom_loss --custom-loss-function-path megatron_rl.hooks.custom_los"
    if place == "file":
        (file := tmp_path / "mrl.yaml").write_text("custom_loss_function_path: megatron_rl.hooks.custom_los\n")
        flags = f"--loss-type custom_loss --custom-config-path {file}"
    hook = "--custom-reward-post-process-path megatron_rl.hooks.reward_post_process"
    step = "--rollout-batch-size 4 --n-samples-per-prompt 8 --global-batch-size 32"
    report = judged(f"{LAUNCH} miles/train.py {flags} --policy-loss gspo --loss-aggregation prompt_mean {hook} {step}")
    problems = [row for row in report.findings if row.status == PROBLEM]
    assert [row.subject for row in problems] == ["--custom-loss-function-path"] and "did you mean" in problems[0].text
    assert report.route == Route.CUSTOM_LOSS


PATHS = [
    pytest.param("megatron_rl.reducers.get_pg_loss_reducer", OK, "loads", id="ours"),
    ("megatron_rl.reducers:get_pg_loss_reducer", NOTE, "write megatron_rl.reducers.get_pg_loss_reducer"),
    pytest.param("megatron_rl.reducers.get_reducer", PROBLEM, "cannot be loaded (AttributeError", id="a slip"),
    ("megatron_rl.hook.custom_loss", PROBLEM, "did you mean megatron_rl.hooks.custom_loss?"),
    ("rewards.exact:match", PROBLEM, "a loader splits on the last dot and cannot load it; write rewards.exact.match"),
    pytest.param("my_rewards.exact", OK, "my_rewards.exact loads", id="beside the script"),
    pytest.param("no_such_thing.exact", PROBLEM, "cannot be loaded from", id="a missing module"),
    ("needs_sglang.exact", NOTE, "it imports sglang_that_is_absent, which is not installed here"),
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
    """The hosts split on the last dot, and find out at the first batch."""
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
    with pytest.raises(
        ConfigError, match=r"read with pyyaml, which is not installed: pip install '/path/to/megatron_rl\[doctor\]'"
    ):
        judged(f"python slime/train.py {config('a: b')} {REDUCER}")


@pytest.mark.parametrize(
    ("value", "is_refused"), [('"false"', True), ("1", True), ("'no'", True), ("no", False), ("Off", False), ("false", False)]
)
def test_a_switch_of_the_file_is_what_the_host_will_read(value, is_refused):
    """In quotes it is text, which is on; YAML 1.1 reads a bare no and off as false."""
    file = config(f"loss_aggregation: sample_mean\ncalculate_per_token_loss: {value}\n")
    found = [text for text in problems(judged(f"python slime/train.py {file} {REDUCER} {INIT}").findings) if "must be" in text]
    assert bool(found) == is_refused
    assert all("calculate_per_token_loss" in text and "reads it as True" in text for text in found)


def config(text: str) -> str:
    return "--custom-config-path base64:" + base64.b64encode(text.encode()).decode()


@pytest.mark.parametrize(
    ("start", "statuses"),
    [
        (f"{LAUNCH} slime/train.py", [OK, NOTE]),
        ("python slime/train.py", [OK, NOTE]),  # dropped from the line, and merged from the file
        ("python miles/train.py", [PROBLEM, NOTE]),  # refused before the file is read
    ],
)
def test_the_file_wins_over_the_line_and_the_difference_is_told(start, statuses):
    """Of several values on the line none counts, and no row says that the last one does."""
    for typed in ("constant", "token_mean --loss-aggregation constant"):
        report = judged(f"{start} --loss-aggregation {typed} {config('loss_aggregation: sample_mean')} {REDUCER}")
        assert [f.status for f in report.flags] == statuses
        lost = typed.replace(" --loss-aggregation", ",")
        text = f"the file of --custom-config-path wins: sample_mean, not the {lost} of the line; change it in the file"
        assert report.flags[1].text == text


def test_a_key_with_dashes_is_no_flag():
    report = judged(f"python slime/train.py {config('loss-aggregation: constant')} {REDUCER}")
    found = problems(report.findings)
    assert report.flags == []
    assert any("loss-aggregation='constant' has no effect: keys have underscores" in problem for problem in found)
    assert not any(problem.startswith("--loss-aggregation: ") for problem in found)


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
        report = judged(f"python pretrain_gpt.py {flag} 1")
        is_ignored = any(finding.status == PROBLEM for finding in report.flags)
        assert is_ignored == (Route.MEGATRON_LM not in routes), flag
        if not report.flags:  # the value 1 is refused, so the flag is not called read as well
            assert any(finding.status == PROBLEM and re.match(f"{flag}|{field_of(flag)}", finding.text) for finding in report.rules)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "python train.py --rollout-batch-size 8",
            "tells whose script this is: train.py is not here; start doctor from the checkout .*, or add --host {"
            + ",".join((*HOST_NAMES, *DOOR_NAMES)),
        ),
        ("python", "no train script and no megatron-rl command after --"),
        ("python -m verl.trainer.main_pp a.b=1", "did you mean verl.trainer.main_ppo?"),
        ("megatron-rl selftest", "megatron-rl selftest trains nothing"),
        ("python -m megatron_rl.host.launch slime/train.py", r"did you mean python -m megatron_rl\.hosts\.launch\?"),
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
    assert on_machine(SICK_MACHINE, "--launch-only", *line)[0] == 0
    assert on_machine(CPU_MACHINE, "--launch-only")[0] == 2


def test_the_words_after_two_dashes_are_the_launch_lines(capsys):
    """Also those that look like flags of doctor."""
    main([*"doctor --launch-only --json -- python -m megatron_rl train --task sort --json".split()])
    assert json.loads(capsys.readouterr().out)["launch"]["title"] == "megatron-rl train"


@pytest.mark.parametrize("host", ["slime", "miles"])
@pytest.mark.parametrize(
    ("longest", "said"),
    [
        ("8192", "8192, the longest response: the gradient is 10 x as large as with it; type --loss-aggregation-divisor 8192"),
        ("409.5", None),  # no length
        ("819", None),
        ("8192 --custom-generate-function-path mine.generate", None),  # several turns may be longer
    ],
)
def test_a_divisor_that_is_not_the_longest_response_has_a_note(host, longest, said):
    """8192 / 819 = 10.002."""
    line = DR_GRPO.replace("--loss-aggregation-divisor 8192", "--loss-aggregation-divisor 819")
    report = judged(f"{LAUNCH} {host}/train.py {line} --rollout-max-response-len {longest}")
    notes = [f.text for f in report.rules if f.status == NOTE and "--loss-aggregation-divisor" in f.text]
    assert [f"--loss-aggregation-divisor 819 is not --rollout-max-response-len {said}, unless you mean that"] * bool(said) == notes
