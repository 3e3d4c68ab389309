"""`megatron-rl doctor`: names what is broken and its remedy, survives it, and tells what a launch line would come to."""

from __future__ import annotations

import base64
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import doc_blocks
import pytest
from doctor_cases import ABSENT, CPU_MACHINE, EMPTY_ENGINE, GPU_MACHINE, HERE, SICK_MACHINE, WEB_TOOLKIT, machine

from megatron_rl.__main__ import main
from megatron_rl.commands.doctor import command as doctor
from megatron_rl.commands.doctor import probes as doctor_probes
from megatron_rl.commands.doctor import words as doctor_words
from megatron_rl.commands.doctor.launch import judge_launch
from megatron_rl.commands.doctor.machine import JUDGES, NOTE, OK, PROBLEM, capabilities, findings
from megatron_rl.commands.doctor.words import read_line
from megatron_rl.config import Route
from megatron_rl.errors import ConfigError
from megatron_rl.validation import ROUTES_OF_FLAG

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
PAGE = ROOT / "docs" / "doctor.md"
REDUCER = "--custom-pg-loss-reducer-function-path megatron_rl.reducers.get_pg_loss_reducer"
REWARD = "--custom-reward-post-process-path megatron_rl.hooks.reward_post_process --global-batch-size 8"
INIT = "--custom-megatron-init-path megatron_rl.hooks.custom_megatron_init"
DR_GRPO = f"--loss-aggregation constant --loss-aggregation-divisor 8192 {REDUCER}"
LAUNCH = "python -m megatron_rl.hosts.launch"


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
        id="FB-20 contract",
    ),
    pytest.param({"torch": {"state": "broken", "error": "OSError: y"}}, "torch: cannot be imported: OSError: y", id="broken torch"),
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
        {"torch": {"has_cuda": False}}, "cuda: there is an NVIDIA device and torch for CUDA 13.0 cannot use it", id="old driver"
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
        ({"triton": {"version": "3.6.0"}}, "triton", "its interpreter fails on loops with numpy 2.4"),
        ({"transformer_engine": {"state": "broken", "error": "OSError: libcuda.so.1"}}, "transformer engine", "needs CUDA"),
    ],
)
def test_what_is_odd_and_works_is_a_note(changes, subject, words):
    found = findings(machine(**changes))
    assert problems(found) == []
    assert any(finding.subject == subject and finding.status == NOTE and words in finding.text for finding in found)


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
        (CPU_MACHINE, "train, selftest, make_forward_step", "yes", "gloo"),
        (GPU_MACHINE, "train, selftest, make_forward_step", "yes", "NCCL, one rank on each of 2 devices"),
        (machine(megatron=ABSENT), "train, selftest, make_forward_step", "no", "pip install 'megatron_rl[megatron]'"),
        (machine(psutil=ABSENT), "checkpoints", "no", "pip install psutil"),
        (machine(rich=ABSENT), "progress bar, curves, TensorBoard", "partly", "without rich"),
        (machine(slime=HERE), "miles and slime: hosts.launch", "yes", "slime can be imported"),
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
    assert "absent   megatron            not installed" in out and "no       train, selftest" in out


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
        id="FB-08 no companion",
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


def test_a_loss_of_the_users_own_is_resolved_and_judged(script):
    report = judged(f"{LAUNCH} {script} --loss-aggregation deadly.exact {REDUCER}")
    assert [finding.subject for finding in report.paths if finding.status == PROBLEM] == ["--loss-aggregation"]
    assert report.rules == []  # judging it would import it here


@pytest.mark.parametrize("text", ['loss_aggregation: "constant"\nloss_aggregation_divisor: 8192.0\n', None])
def test_settings_that_travel_in_the_file_are_read(tmp_path, text, monkeypatch):
    """As megatron-rl launch-config writes it, with and without a YAML reader at hand, and as base64."""
    written = text or 'loss_aggregation: "constant"\nloss_aggregation_divisor: 8192.0\n'
    (tmp_path / "m.yaml").write_text(written)
    given = str(tmp_path / "m.yaml") if text else "base64:" + base64.b64encode(written.encode()).decode()
    for find_spec in (doctor_words.find_spec, lambda name: None):
        monkeypatch.setattr(doctor_words, "find_spec", find_spec)
        report = judged(f"python slime/train.py --custom-config-path {given} {REDUCER} {INIT}")
        assert [(f.subject, f.status) for f in report.flags] == [("--loss-aggregation", OK), ("--loss-aggregation-divisor", OK)]
        assert problems(report.findings) == []


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
            r"nothing on the line tells miles or slime: add --host \{miles,slime,megatron_lm\}",
        ),
        ("python", "no train script and no megatron-rl command after --"),
        ("megatron-rl bench cpu", "megatron-rl bench trains nothing"),
        ("python slime/train.py --custom-config-path gone.yaml", "--custom-config-path gone.yaml is no file here"),
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


def test_the_page_shows_what_the_command_prints(on_machine):
    """docs/doctor.md: the sick machine of doctor_cases.py, and each launch line of the page."""
    (machine_block,) = doc_blocks.blocks(PAGE, "megatron-rl doctor, on a machine")
    assert on_machine(SICK_MACHINE)[1] == machine_block
    lines = [match for match in doc_blocks.commands(PAGE) if "--launch-only" in match]
    assert len(lines) >= 2
    for command in lines:
        (block,) = doc_blocks.blocks(PAGE, command)
        assert on_machine(CPU_MACHINE, *shlex.split(command)[2:])[1] == block


def test_every_judge_of_the_machine_says_something_on_every_machine():
    for facts in (CPU_MACHINE, GPU_MACHINE, SICK_MACHINE):
        assert all(list(judge(facts)) for judge in JUDGES)


def test_python_dash_m_and_two_dashes():
    """The words after -- are the launch line's, also those that look like flags of doctor."""
    command = [sys.executable, "-m", "megatron_rl", "doctor", "--launch-only", "--json", "--"]
    words = ["python", "-m", "megatron_rl", "train", "--task", "sort", "--json"]
    finished = subprocess.run([*command, *words], check=True, cwd=ROOT, capture_output=True, text=True)
    assert json.loads(finished.stdout)["launch"]["title"] == "megatron-rl train"
