"""`megatron-rl doctor`: names what is broken and its remedy, survives it, and shows a launch line to its trainer's own parser."""

from __future__ import annotations

import json
import re
import sys
from importlib import import_module
from types import SimpleNamespace

import pytest
from doctor_cases import ABSENT, CPU_MACHINE, EMPTY_ENGINE, GPU_MACHINE, HERE, SICK_MACHINE, WEB_TOOLKIT, machine
from forked import forget, forked

from megatron_rl.__main__ import main
from megatron_rl.commands import doctor
from megatron_rl.commands.doctor import launch
from megatron_rl.commands.doctor import probes as doctor_probes
from megatron_rl.commands.doctor.machine import findings, has_kernels
from megatron_rl.commands.doctor.report import NOTE, OK, PROBLEM
from megatron_rl.errors import ConfigError

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
    assert code == (1 if report["problems"] else 0) and report["launch"] == []


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


class Toy:
    """An adapter whose trainer is installed, and reads --mode=<text>."""

    TITLE = "Toy"

    def compose(self, words):
        if "--missing" in words:
            raise ImportError("No module named 'toy'")
        if "--unknown" in words:
            raise SystemExit(2)
        return dict(word.lstrip("-").split("=") for word in words if "=" in word)

    def check(self, config):
        if config["mode"] == "bad":
            raise ConfigError(["mode=bad: first", "mode=bad: second"])
        return [f"mode={config['mode']} in Toy"]


@pytest.fixture
def on_machine(monkeypatch, capsys):
    monkeypatch.setattr(launch, "adapter_named", lambda name: Toy())

    def run(facts: dict, *line: str) -> tuple[int, str]:
        monkeypatch.setattr(doctor, "collect_facts", lambda: facts)
        code = main(["doctor", *(["--host", "verl", "--", *line] if line else [])])
        return code, capsys.readouterr().out

    return run


@pytest.mark.parametrize(
    ("words", "code", "rows"),
    [
        (["--mode=good"], 0, ["ok       settings  mode=good in Toy"]),
        (["--mode=bad"], 1, ["PROBLEM  settings  mode=bad: first", "PROBLEM  settings  mode=bad: second"]),
        (["--unknown"], 1, ["PROBLEM  line  Toy's own parser refuses it, exit code 2"]),
        (["--missing"], 0, ["note     line  Toy cannot read it here (No module named 'toy')"]),
    ],
)
def test_the_trainers_own_parser_reads_a_line_and_the_check_at_start_judges_it(words, code, rows, on_machine):
    found, out = on_machine(CPU_MACHINE, "python", "train.py", *words)
    assert found == code and all(row in out for row in rows), out


def test_a_line_of_nobody_asks_for_the_trainer(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "collect_facts", lambda: CPU_MACHINE)
    assert main(["doctor", "--", "python", "mine.py"]) == 0
    assert "add --host, or start it with MEGATRON_RL_CHECK=1" in capsys.readouterr().out


def test_the_exit_code_is_for_ci(on_machine):
    assert on_machine(CPU_MACHINE)[0] == 0 and on_machine(SICK_MACHINE)[0] == 1
