"""doctor reads the line of a Python launcher where constants decide it: settings, texts of files, the model, another launcher."""

from __future__ import annotations

import base64
import os
import shlex
import textwrap
from pathlib import Path

import pytest

from megatron_rl.__main__ import main
from megatron_rl.commands.doctor.command_line import read_line
from megatron_rl.commands.doctor.launch import judge_launch
from megatron_rl.config import Route
from megatron_rl.errors import ConfigError

SCRIPT = """
    import os
    import miles.utils.external_utils.command_utils as U

    class Args:
        mode: str = "normal"
        model_name: str = "Tiny-1B"
        hardware: str = "H100"
        num_nodes: int = 2
        reject: bool = False
        rate: float = U.rate()
        extra_args: str = ""

        def __post_init__(self):
            self.width = 1 if self.model_name == "Tiny-1B" else 2
            if self.num_nodes > 4:
                self.width = 8

    def run(args):
        is_debug = args.mode != "normal"
        batch = args.num_nodes * 16
        {body}
        U.execute_train(train_args=train_args{argument})

    run(Args())
"""


def flags_of(folder: Path, body: str, *typed: str, argument: str = "") -> dict[str, tuple[str, ...]]:
    (script := folder / "run_mine.py").write_text(composed(body, argument))
    line = read_line(["python", str(script), *typed], None)
    return dict(line.flags) | ({"unread": line.unread} if line.unread else {})


def composed(body: str, argument: str = "") -> str:
    text = textwrap.dedent(SCRIPT)
    return text.replace("{body}", textwrap.indent(textwrap.dedent(body).strip(), "    ").lstrip()).replace("{argument}", argument)


@pytest.mark.parametrize(
    ("body", "typed", "flags"),
    [
        pytest.param('train_args = f"--a {batch} --b {args.width} "', (), {"--a": ("32",), "--b": ("1",)}, id="settings"),
        pytest.param('train_args = f"--a {batch} --b {args.width} "', ("--num-nodes", "8"), {"--b": ("8",)}, id="typed"),
        pytest.param('train_args = f"--a {1 if is_debug else 256} "', (), {"--a": ("256",)}, id="a decided value"),
        pytest.param('train_args = f"--a {1 if is_debug else 256} "', ("--mode=x",), {"--a": ("1",)}, id="by the line"),
        pytest.param('train_args = f"--a {1 if args.rate else 256} "', (), {"--a": ("${value}",)}, id="not decided"),
        pytest.param(
            "train_args = f\"--a 1 {'--b ' if is_debug else ''}{'--c 2 ' if args.rate else ''}\"",
            (),
            {"--a": ("1",), "--c": ("2",)},
            id="flags of a condition: an open one is taken",
        ),
        pytest.param(
            """
            match args.hardware, args.num_nodes:
                case ("H100", 1) | ("H200", _):
                    perf = "--a 1 "
                case ("H100", 2):
                    perf = "--b 2 "
                case _:
                    perf = "--c 3 "
            train_args = f"{perf} --d 4"
            """,
            (),
            {"--b": ("2",), "--d": ("4",)},
            id="match",
        ),
        pytest.param(
            """
            match args.hardware, args.rate:
                case ("H100", 1):
                    perf = "--a 1 --b 2 "
                case ("H200", 1):
                    perf = "--a 8 --b 9 "
                case _:
                    raise NotImplementedError
            train_args = f"{perf} --d 4"
            """,
            (),
            {"--a": ("1",), "--b": ("2",), "--d": ("4",)},
            id="match of a subject that is known in part",
        ),
        pytest.param(
            """
            train_args = "--a 1 --c 3 --d 1 "
            if args.rate:
                train_args += "--a 2 --b 4 --c 3 --d 2 "
            train_args += "--d 3 "
            """,
            (),
            {"--a": ("${value}",), "--b": ("4",), "--c": ("3",), "--d": ("3",)},
            id="a branch that is open gives another value",
        ),
        pytest.param(
            "a, (b, c) = (1, (1, 2)) if is_debug else (2, batch, 3)[:2] if args.rate else (2, (4, 8))\n"
            "d = [7, 8]\ne, f = d\ng, *h = d\n"
            'i, j = f"--i {e} ", "--j 1 "\n'
            'train_args = f"--b {b} --c {c} --e {e} --f {f} --g {g} {i} {j}"',
            ("--mode", "x"),
            {"--b": ("1",), "--c": ("2",), "--e": ("7",), "--f": ("8",), "--g": ("${g}",), "--i": ("7",), "--j": ("1",)},
            id="several at once",
        ),
        pytest.param(
            'a = [1, 2]\na.append(3)\nb, c, d = a\ntrain_args = f"--b {b} "', (), {"--b": ("${b}",)}, id="of a list that grows"
        ),
        pytest.param('train_args = " ".join(["--a 1", f"--b {batch}"])', (), {"--a": ("1",), "--b": ("32",)}, id="join"),
        pytest.param("train_args = f\"--a {os.environ.get('OF_A_TEST', '7')} \"", (), {"--a": ("7",)}, id="environment"),
        pytest.param("train_args = f\"--a {os.environ.get('MY_TOKEN', '7')} \"", (), {"--a": ("${get}",)}, id="a secret"),
        pytest.param('batch = f()\ntrain_args = f"--a {batch} "', (), {"--a": ("${batch}",)}, id="set twice"),
        pytest.param('for mode in x:\n    mode\ntrain_args = f"--a {mode} "', (), {"--a": ("${mode}",)}, id="of a loop"),
        pytest.param(
            'train_args = f"--a {10 ** 10 ** 10} --b {2 // 0} "', (), {"--a": ("${value}",)}, id="no arithmetic of its own"
        ),
    ],
)
def test_what_constants_decide_is_on_the_line(tmp_path, body, typed, flags):
    found = flags_of(tmp_path, body, *typed)
    assert {flag: found.get(flag) for flag in flags} == flags
    if len(flags) > 1:
        assert set(found) == set(flags)


FILE = r"""
    text = f"use_tis: true\nuse_rs: {'true' if args.reject else 'false'}\ntis_upper_bound: {bound}\n".strip()
    train_args = (
        f"--custom-config-path {U.encode_pseudo_file(text)} "
        "--custom-tis-function-path examples.mis.compute_mis_weights_with_cp "
    )
"""


def test_a_file_that_a_launcher_writes_is_read_where_its_text_is_constant(tmp_path):
    """As --enable-mis of miles's own scripts."""
    body = FILE.replace("{bound}", "2.0")
    script = tmp_path / "run_mine.py"
    for typed, rejects in ((), False), (("--reject",), True):
        script.write_text(composed(body))
        line = read_line(["python", str(script), *typed], None)
        assert line.from_file == {"use_tis": True, "use_rs": rejects, "tis_upper_bound": 2.0}, typed
        (given,) = dict(line.flags)["--custom-config-path"]
        assert base64.b64decode(given.removeprefix("base64:")).startswith(b"use_tis: true\n")
    script.write_text(composed(body.replace("2.0", "{args.rate}")))
    assert dict(read_line(["python", str(script)], None).flags)["--custom-config-path"] == ("${encode_pseudo_file}",)


def test_a_model_whose_name_a_function_makes_is_its_script_of_that_name(tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny-1B.py").write_text("def model_args():\n    return '--num-experts 4 '\n")
    argument, body = ", megatron_model_type=type_of(args.model_name)", 'train_args = "--a 1 "'
    assert flags_of(tmp_path, body, argument=argument)["--num-experts"] == ("4",)
    assert flags_of(tmp_path, body, "--model-name", "Other", argument=argument)["unread"] == ("${MEGATRON_MODEL_TYPE_ARGS}",)
    typed = ("--model-name=Other", "--megatron-model-type=tiny-1B")
    assert flags_of(tmp_path, body, *typed, argument=argument)["--num-experts"] == ("4",)


def test_a_script_that_fills_in_another_ones_settings_is_read_there(tmp_path, monkeypatch):
    (tmp_path / "scripts").mkdir()
    inner = composed("train_args = f\"--a {batch} {'--b ' if args.reject else ''}{args.extra_args}\"").replace("run(Args())", "")
    (tmp_path / "scripts" / "run_mine.py").write_text(inner)
    (script := tmp_path / "test_mine.py").write_text(
        "from scripts.run_mine import Args, run\n# execute_train( runs there\n"
        "if __name__ == '__main__':\n    run(Args(num_nodes=4, reject=True, mode=f(), extra_args='--c 1 ' '--d '))\n"
    )
    monkeypatch.chdir(tmp_path)
    line = read_line(["python", script.name], None)
    assert line.host == "miles" and line.flags == (("--a", ("64",)), ("--b", ()), ("--c", ("1",)), ("--d", ()))
    assert line.read_from.place == "line 23 of scripts/run_mine.py"


def test_what_a_python_launcher_lacks_can_be_typed_as_it_is_said(tmp_path, capsys):
    """Its own line takes no flag of ours, and nothing can be put before train.py: a file and --extra-args reach it."""
    (script := tmp_path / "run_mine.py").write_text(composed('train_args = f"--rollout-batch-size 4 {args.extra_args}"'))
    (row,) = [row for row in judge_launch(["python", str(script)], None).rules if row.subject == "megatron_rl"]
    command, _, words = (
        row.text.partition("our losses: ")[2].replace("<name>", "sample_mean").partition(" > mrl.yaml, and behind the script ")
    )
    assert main(shlex.split(command)[1:]) == 0
    (tmp_path / "mrl.yaml").write_text(capsys.readouterr().out)
    typed = shlex.split(words.replace("/path/to", str(tmp_path)))
    report = judge_launch(["python", str(script), *typed], None)
    assert report.route == Route.REDUCER and any(row.subject == "trains" and "1/(N m_i)" in row.text for row in report.rules), (
        report
    )


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["--extra-arg", "--a 1"], "--extra-arg is no option of the script: did you mean --extra-args?"),
        (["--num_node=4"], "--num-node is no option of the script: did you mean --num-nodes?"),
        (["--no-rejects"], "--no-rejects is no option of the script: did you mean --no-reject?"),
        (["--num-nodes", "eight"], "--num-nodes eight is no whole number"),
        (["--num-nodes=1.5"], "--num-nodes 1.5 is no whole number"),
        (["--rate", "1e-3", "--num-nodes", "${NODES}"], None),
        (
            ["--use-tis"],
            "--use-tis is no option of the script, which ends there: flags of train.py go into --extra-args, as one text",
        ),
        (["--extra-args", "--num-node 4", "--no-reject", "--num-nodes", "4"], None),
    ],
)
def test_a_misspelt_option_of_a_script_is_a_problem(tmp_path, typed, said):
    (script := tmp_path / "run_mine.py").write_text(composed('train_args = f"--rollout-batch-size 4 {args.extra_args}"'))
    report = judge_launch(["python", str(script), *typed], None)
    assert [row.text for row in report.findings if row.status == "PROBLEM"] == [said] * bool(said)


@pytest.mark.parametrize("kind", ["Topologies", "Literal['4node', 'single-node']", "Optional[Topologies]", "Topologies | None"])
@pytest.mark.parametrize(("typed", "is_told"), [("single-nod", True), ("single-node", False)])
def test_a_word_that_is_none_of_a_literal_is_a_problem(tmp_path, kind, typed, is_told):
    text = composed('train_args = f"--a 1 {args.extra_args}"').replace("mode: str", f"topology: {kind} = '4node'\n    mode: str")
    (script := tmp_path / "run_mine.py").write_text(f"Topologies = Literal['4node', 'single-node']\n{text}")
    said = [
        row.text for row in judge_launch(["python", str(script), f"--topology={typed}"], None).reading if row.status == "PROBLEM"
    ]
    assert said == ["--topology single-nod is none of 4node, single-node: did you mean single-node?"] * is_told


@pytest.mark.parametrize(
    ("parser", "is_told"), [("import typer", True), ("import argparse", False), ('import typer\nx = "--extra_args"', False)]
)
def test_an_option_of_typer_has_hyphens(tmp_path, parser, is_told):
    (script := tmp_path / "run_mine.py").write_text(f"{parser}\n" + composed('train_args = f"--a 1 {args.extra_args}"'))
    said = judge_launch(["python", str(script), "--extra_args", "--lr 3"], None).reading
    text = "--extra_args is no option of the script: typer makes --extra-args of extra_args; type that"
    assert [row.text for row in said if row.subject == "script"] == [text] * is_told


def test_an_option_may_be_one_of_a_class_that_is_not_here(tmp_path):
    text = composed('train_args = f"--rollout-batch-size 4 {args.extra_args}"').replace("class Args:", "class Args(far.Away):")
    (script := tmp_path / "run_mine.py").write_text(text)
    report = judge_launch(["python", str(script), "--use-tis"], None)
    assert "class Args(far.Away):" in text and [row for row in report.findings if row.status == "PROBLEM"] == []


@pytest.mark.parametrize(
    ("decorator", "prefix"),
    [
        ("@U.dataclass_cli", "MILES_SCRIPT_"),
        ('@dataclass_cli(env_var_prefix="MY_")', "MY_"),
        ('@dataclass_cli(env_var_prefix="")', None),
    ],
)
def test_options_that_miles_takes_from_the_environment_are_read_and_typed_ones_win(decorator, prefix, tmp_path, monkeypatch):
    text = composed('train_args = f"--rollout-batch-size {args.num_nodes} {args.extra_args}"')
    (script := tmp_path / "run_mine.py").write_text(f"{text}\n{decorator}\ndef main(args):\n    run(args)\n")
    for name, value in {"NUM_NODES": "3", "EXTRA_ARGS": "--use-tis"}.items():
        monkeypatch.setenv(f"{prefix or 'MILES_SCRIPT_'}{name}", value)
    flags = dict(read_line(["python", str(script)], None).flags)
    assert (flags["--rollout-batch-size"] == ("3",)) == ("--use-tis" in flags) == (prefix is not None), flags
    flags = dict(read_line(["python", str(script), "--num-nodes", "5", "--extra-args", "--use-kl-loss"], None).flags)
    assert flags["--rollout-batch-size"] == ("5",) and "--use-kl-loss" in flags and "--use-tis" not in flags


@pytest.mark.parametrize(
    "line",
    [
        ["MILES_SCRIPT_NUM_NODES=3", "STEPS_OF_A_TEST=7", "python", "{}"],
        ["env", "STEPS_OF_A_TEST=7", "MILES_SCRIPT_NUM_NODES=3", "python", "{}"],
        ["bash", "run.sh"],
    ],
)
def test_a_value_before_the_program_is_one_of_its_environment(line, tmp_path, monkeypatch):
    """Over this process's own, for options of miles's decorator and for what a script reads itself."""
    if line[0] == "bash":
        pytest.importorskip("tree_sitter_bash", reason="the doctor extra reads bash")
    monkeypatch.chdir(tmp_path)
    for name in ("MILES_SCRIPT_NUM_NODES", "STEPS_OF_A_TEST"):
        monkeypatch.setenv(name, "1")
    flags = '--rollout-batch-size {args.num_nodes} --num-steps-per-rollout {os.environ.get("STEPS_OF_A_TEST", "2")}'
    text = composed(f"train_args = f'{flags}'").replace("import", "import os\nimport", 1)
    (script := tmp_path / "run_train.py").write_text(f"{text}\n@dataclass_cli\ndef main(args):\n    run(args)\n")
    (tmp_path / "run.sh").write_text("export STEPS_OF_A_TEST=7\nMILES_SCRIPT_NUM_NODES=3 python run_train.py\n")
    found = dict(read_line([word.format(script) for word in line], None).flags)
    assert found["--rollout-batch-size"] == ("3",) and found["--num-steps-per-rollout"] == ("7",), found


def test_a_script_that_only_defines_starts_no_training(tmp_path):
    (script := tmp_path / "test_mine.py").write_text(composed('train_args = "--a 1"').replace("run(Args())", ""))
    with pytest.raises(
        ConfigError, match=r"test_mine.py starts no training: it only defines functions; give the script that calls"
    ):
        read_line(["python", str(script)], None)


BASE = """
    import os
    from dataclasses import dataclass, field

    @dataclass
    class Settings:
        output_dir: str = "/root"
        num_nodes: int = field(default_factory=lambda: int(os.environ.get("NODES_OF_A_TEST", "1")))
        rate: float = field(default=0.5)

        def flags(self):
            return "--of-another-file 1 "
"""


@pytest.mark.parametrize(("nodes", "count"), [(None, "1"), ("4", "4")])
def test_what_a_class_extends_gives_it_its_defaults(tmp_path, monkeypatch, nodes, count):
    """As num_nodes of miles's scripts: of the cluster's environment, else 1."""
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "launching.py").write_text(textwrap.dedent(BASE))
    (script := tmp_path / "run_mine.py").write_text(
        "import tools.launching as T\nimport missing.one as M\nclass Args(T.Settings, M.Other):\n    extra_args: str = ''\n"
        "def run(args):\n    train_args = f'--nodes {args.num_nodes} --rate {args.rate} {args.extra_args}'\n"
        "    U.execute_train(train_args)\nrun(Args())\n"
    )
    if nodes is not None:
        monkeypatch.setenv("NODES_OF_A_TEST", nodes)
    found = read_line(["python", str(script)], "miles").flags
    assert found == (("--nodes", (count,)), ("--rate", ("0.5",)))


CARDS = """
    GPUS = {"H100": 8, "GB300": 4}
    TWICE = {"H100": 8}
    TWICE = {"H100": 6}
    class Settings:
        pass
"""
AFTER_INIT = """
    import tools.cards as C
    class Args(C.Settings):
        card: str = "H100"
        apart: bool = False
        fp4: bool = False
        gpus: int | None = None
        actor: int | None = None
        fixed: int = 1
        twice: int | None = None
        def __post_init__(self):
            self.fixed = self.fixed + 1
            self.gpus = self.gpus or C.GPUS[self.card]
            self.apart = self.apart or self.fp4
            if self.apart:
                self.actor = self.actor or self.gpus // 2
            else:
                self.actor = self.gpus
            if unknown():
                self.twice = 2
            else:
                self.twice = C.TWICE[self.card]
            {more}
    def run(args):
        train_args = f"--gpus {args.gpus} --actor {args.actor} --fixed {args.fixed} --twice {args.twice}"
        U.execute_train(train_args)
        {later}
    run(Args())
"""


@pytest.mark.parametrize(
    ("more", "later", "typed", "gpus", "actor", "fixed"),
    [
        ("pass", "", "", "8", "8", "2"),
        ("pass", "", "--card GB300", "4", "4", "2"),
        ("pass", "", "--card GB300 --fp4", "4", "2", "2"),
        ("pass", "", "--gpus 6 --apart --actor 1 --fixed 4", "6", "1", "5"),
        ("self.gpus += 1", "", "", "${gpus}", "8", "2"),
        ("if self.fixed == 2: self.fixed = 7", "", "", "8", "8", "7"),
        ("if unknown(): return", "", "", "${gpus}", "${actor}", "${fixed}"),
        ("pass", "args.gpus = 3", "", "${gpus}", "${actor}", "2"),
    ],
)
def test_a_class_s_own_defaults_are_those_that_it_sets_after_its_fields(tmp_path, more, later, typed, gpus, actor, fixed):
    """As num_gpus_per_node and no_colocate of miles's scripts: each statement reads what the ones before it have set."""
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "cards.py").write_text(textwrap.dedent(CARDS))
    text = textwrap.dedent(AFTER_INIT).replace("{more}", more).replace("{later}", later)
    (script := tmp_path / "run_mine.py").write_text(text)
    found = dict(read_line(["python", str(script), *typed.split()], "miles").flags)
    assert found == {"--gpus": (gpus,), "--actor": (actor,), "--fixed": (fixed,), "--twice": ("${twice}",)}


@pytest.mark.host("MILES_ROOT")
@pytest.mark.parametrize(("typed", "size"), [("", "8"), ("--hardware GB300 --num-nodes 2", "4"), ("--num-gpus-per-node 2", "2")])
def test_the_gpus_of_miles_own_launcher_are_those_of_its_card(typed, size, monkeypatch):
    monkeypatch.chdir(os.environ["MILES_ROOT"])
    monkeypatch.delenv("SLURM_JOB_NUM_NODES", raising=False)
    found = dict(read_line(f"python scripts/run_qwen3_30b_a3b.py {typed}".split(), None).flags)
    assert found["--actor-num-gpus-per-node"] == (size,)


@pytest.mark.host("MILES_ROOT")
def test_the_default_layout_of_miles_own_launcher_is_that_of_its_branch(monkeypatch):
    """H100 and 1 node: 128 experts on 8 ranks. Another card has 4, and its branch does not say more than that it may run."""
    monkeypatch.chdir(os.environ["MILES_ROOT"])
    monkeypatch.delenv("SLURM_JOB_NUM_NODES", raising=False)
    report = judge_launch("python scripts/run_qwen3_30b_a3b.py".split(), None)
    assert "16 of 128 experts a rank" in next(row.text for row in report.rules if row.subject == "--expert-model-parallel-size")


@pytest.mark.host("MILES_ROOT")
@pytest.mark.parametrize(("typed", "size"), [("", "2"), ("--parallelism tp1-ep8", "1")])
def test_sizes_that_miles_own_launcher_assigns_together_are_read(monkeypatch, typed, size):
    monkeypatch.chdir(os.environ["MILES_ROOT"])
    line = read_line(f"python scripts/run_qwen3_5_35b_a3b_mtp.py {typed}".split(), None)
    found = dict(line.flags)
    assert found["--tensor-model-parallel-size"] == found["--context-parallel-size"] == (size,)
    assert line.unknown_of_host == []


@pytest.mark.host("MILES_ROOT")
def test_the_file_of_miles_own_launcher_is_judged(monkeypatch):
    """It divides the weights of a micro-batch by their mean: 1 and 3 become 0.5 and 1.5 in one, and 1 and 1 in two."""
    monkeypatch.chdir(os.environ["MILES_ROOT"])
    report = judge_launch("python scripts/run_qwen3_4b.py --enable-mis".split(), None)
    assert "NOT exact" in report.unjudged and "tis_batch_normalize: true" in str(report.rules)


RECIPES = """
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class Recipe:
        model_type: str
        width: int
        rate: float = 0.5
        flags: str = ""

    RECIPES: dict[str, Recipe] = {
        "small": Recipe("tiny", 2),
        "large": Recipe("giant", width=8, rate=1.5, flags=f"--sizes {some(1)} "),
    }
    STEPS = {"small": {"warm": 3}, "large": {"warm": 7}}
    CHANGE

    @dataclass
    class Args:
        size: str = "small"
        width: int = 1
        extra_args: str = ""

        @property
        def recipe(self) -> Recipe:
            '''Of the size.'''
            return RECIPES[self.size]

        @property
        def batch(self) -> int:
            print("not followed")
            return 3

    def run(args):
        recipe = args.recipe
        train_args = f"--width {args.recipe.width} --rate {recipe.rate} --warm {STEPS[args.size]['warm']} --batch {args.batch} "
        if recipe.width > 4 and "small" in RECIPES:
            train_args += "--is-large "
        U.execute_train(train_args)

    run(Args())
"""


@pytest.mark.parametrize(
    ("typed", "change", "flags"),
    [
        pytest.param((), "", {"width": "2", "rate": "0.5", "warm": "3"}, id="the default size"),
        pytest.param(("--size", "large"), "", {"width": "8", "rate": "1.5", "warm": "7", "is-large": ""}, id="a typed size"),
        pytest.param(
            (),
            "STEPS['small']['warm'] = 4; RECIPES.update(small=Recipe('tiny', 9))",
            {"width": "${width}", "rate": "${rate}", "warm": "${value}", "is-large": ""},
            id="dicts that the script changes are not followed",
        ),
        pytest.param(
            ("--size", "none"),
            "",
            {"width": "${width}", "rate": "${rate}", "warm": "${value}", "is-large": ""},
            id="a key that no dict has",
        ),
    ],
)
def test_a_dict_of_constants_is_followed_by_its_key(tmp_path, typed, change, flags):
    """As _RECIPES of miles's scripts: objects of a frozen dataclass, behind a property. A setting may have the name of a field."""
    (script := tmp_path / "run_mine.py").write_text(textwrap.dedent(RECIPES).replace("CHANGE", change))
    found = {
        flag.removeprefix("--"): " ".join(values) for flag, values in read_line(["python", str(script), *typed], "miles").flags
    }
    assert found == flags | {"batch": "${batch}"}


@pytest.mark.host("MILES_ROOT")
@pytest.mark.parametrize(("name", "width", "model"), [("Qwen3-4B", "2", "qwen3-4B"), ("Qwen3-32B", "8", "qwen3-32B")])
def test_the_recipe_of_miles_own_launcher_gives_the_layout_and_the_model(monkeypatch, name, width, model):
    monkeypatch.chdir(os.environ["MILES_ROOT"])
    line = read_line(["python", "scripts/run_qwen3_dense.py", "--model-name", name], None)
    assert dict(line.flags)["--tensor-model-parallel-size"] == (width,)
    assert line.read_from.branches[-1] == f"the flags of the model {model}"
