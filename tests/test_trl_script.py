"""What doctor reads of a train script of TRL: constants by their names, and classes of the script's own."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

from megatron_rl.__main__ import main
from megatron_rl.hosts.script_constants import constants_and_objects, evaluate, plain
from megatron_rl.hosts.settings import UNKNOWN
from megatron_rl.hosts.trl_script import Script

TRL = "from trl import GRPOConfig, GRPOTrainer\n"


def values(text: str, *asked: str) -> list:
    known = constants_and_objects(ast.parse(text))
    found = [plain(evaluate(ast.parse(one, mode="eval").body, known)) for one in asked]
    return ["?" if value is UNKNOWN else value for value in found]


def test_names_numbers_and_dicts_of_them():
    text = "N = 4\nBATCH: int = N * 2\nA = dict(x=N, y=-1.5)\nB = {'z': BATCH, **A}\n"
    assert values(text, "N", "BATCH", "A", "B", "B['z']", "A | {'x': 5}", "dict(A, x=6)", "A.copy()") == [
        *(4, 8, {"x": 4, "y": -1.5}, {"z": 8, "x": 4, "y": -1.5}, 8, {"x": 5, "y": -1.5}, {"x": 6, "y": -1.5}),
        {"x": 4, "y": -1.5},
    ]


def test_fields_of_a_class_and_of_its_base():
    text = "class Base:\n  x: int = 1\n  y: int = field(default=2)\n  z: list = field(default_factory=list)\n"
    text += "class Args(Base):\n  y: int = 3\nargs = Args(w=4)\n"
    assert values(text, "args.x", "args.y", "args.z", "args.w", "Base.y", "vars(args)['x']", "asdict(Args())['y']") == [
        *(1, 3, "?", 4, 2, 1, 3)
    ]


@pytest.mark.parametrize(
    "text",
    [
        "A = read()",
        "A = {'x': 1}\nA[y] = 2",
        "A = {'x': 1}\ndel A['x']",
        "A = {'x': 1}\nA.update(x=2)",
        "A = {'x': 1}\nA |= other",
        "A = {'x': 1}\nif y:\n  A = {'x': 2}",
        "for A in rows:\n  pass",
        "def main(A):\n  pass\nA = {'x': 1}",
        "def main():\n  global A\n  A = {'x': 1}",
        "A = {read(): 1}",
        "A = {**read()}",
        "A = dict(**read())",
        "A = A",
    ],
)
def test_what_may_change_is_not_known(text):
    assert values(text, "A", "A['x']") == ["?", "?"]


def test_a_key_that_is_set_later_is_not_known_and_the_others_are():
    text = "A = {'x': 1, 'y': 2}\nif z:\n    A['x'] = 3\n"
    assert values(text, "A['x']", "A['y']", "dict(A, x=4)['x']") == ["?", 2, 4]


def test_a_field_that_is_set_anywhere_is_not_known():
    assert values("class C:\n  x: int = 1\n  y: int = 2\nc = C()\nc.x = 3", "c.x", "c.y", "vars(c)['x']") == ["?", 2, "?"]


def doctor(capsys, tmp_path, monkeypatch, text: str, *words: str) -> tuple[int, str]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(text)
    code = main(["doctor", "--launch-only", "--", "accelerate", "launch", "mine.py", *words])
    return code, capsys.readouterr().out


BNPO = "the weight of a token in its policy and KL terms depends on the layout"


@pytest.mark.parametrize(
    "config",
    [
        "S = {'loss_type': 'bnpo', 'beta': 0.1}\nGRPOTrainer(args=GRPOConfig(**S))",
        "S = dict(loss_type='bnpo', beta=0.2 / 2)\ndef main():\n    GRPOTrainer(args=GRPOConfig(output_dir='x', **S))",
        "KIND = 'bnpo'\nGRPOTrainer(args=GRPOConfig(loss_type=KIND, **{'beta': 0.1}))",
        "class A:\n  kind: str = 'bnpo'\n  beta: float = 0.1\na = A()\nGRPOTrainer(args=GRPOConfig(loss_type=a.kind, beta=a.beta))",
        "class Mine(GRPOConfig):\n    loss_type: str = 'bnpo'\nGRPOTrainer(args=Mine(beta=0.1))",
        "from trl import GRPOConfig as C, GRPOTrainer as T\nT(args=C(loss_type='bnpo', beta=0.1))",
        "c = GRPOConfig(beta=0.1)\nKIND = 'bnpo'\nc.loss_type = KIND\nGRPOTrainer(args=c)",
        "class Mine(GRPOTrainer):\n    def log(self): pass\nMine(args=GRPOConfig(loss_type='bnpo', beta=0.1))",
        "class A(GRPOTrainer):\n    pass\nclass B(Mixin, A):\n    pass\nB(args=GRPOConfig(loss_type='bnpo', beta=0.1))",
    ],
)
def test_constants_of_a_script_are_judged_as_if_they_were_typed(config, tmp_path, monkeypatch, capsys):
    code, out = doctor(capsys, tmp_path, monkeypatch, TRL + config)
    assert code == 0 and BNPO in out.splitlines()[-1], out


def test_settings_that_a_script_reads_elsewhere_are_named(tmp_path, monkeypatch, capsys):
    text = "import json\nS = json.load(open('a'))\nGRPOTrainer(args=GRPOConfig(epsilon=0.1, beta=S['beta'], **S))"
    _, out = doctor(capsys, tmp_path, monkeypatch, TRL + text)
    assert "GRPOConfig of mine.py was read: epsilon, but for **S; not known here: beta; what else" in out, out
    assert "the loss is not known here: nothing was judged" in out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "class Mine(GRPOTrainer):\n    def _compute_loss(self): pass\nMine()",
            "a Mine, a GRPOTrainer with a _compute_loss of its own",
        ),
        (
            "class Own:\n    def compute_loss(self): pass\nclass Mine(Own, GRPOTrainer):\n    pass\nMine()",
            "a Mine, a GRPOTrainer with a compute_loss of its own",
        ),
        (
            "class Mine(GRPOTrainer):\n    def _get_per_token_logps_and_entropies(self): pass\nMine()",
            "with a _get_per_token_logps_and_entropies of its own",
        ),
        ("GRPOTrainer._compute_loss = mine\nGRPOTrainer()", "a GRPOTrainer with another _compute_loss"),
        (
            "from trl import RLOOTrainer\nclass Mine(RLOOTrainer):\n    def compute_loss(self): pass\nMine()",
            "a Mine, a RLOOTrainer",
        ),
        ("import unsloth\nGRPOTrainer()", "imports unsloth, which puts losses of its own into TRL's trainers"),
        ("class Mine(Elsewhere):\n    pass\nMineTrainer()", "a MineTrainer, whose loss is not known here"),
    ],
)
@pytest.mark.parametrize("words", [(), ("--loss_type", "megatron_rl.grpo.token_mean")])
def test_a_loss_of_a_scripts_own_is_not_judged(text, said, words, tmp_path, monkeypatch, capsys):
    code, out = doctor(capsys, tmp_path, monkeypatch, TRL + text, *words)
    assert code == 0 and said in out and out.endswith("loss is not known here: nothing was judged\n"), out


def test_several_configs_have_what_they_share(tmp_path, monkeypatch, capsys):
    text = (
        "if x:\n  a = GRPOConfig(beta=0.1, steps_per_generation=2)\nelse:\n  a = GRPOConfig(beta=0.1, generation_batch_size=16)\n"
    )
    code, out = doctor(capsys, tmp_path, monkeypatch, f"{TRL}{text}GRPOTrainer(args=a)")
    assert code == 0 and "was read: beta; not known here: steps_per_generation, generation_batch_size" in out, out


def test_an_attribute_of_another_class_is_no_loss_of_the_trainer(tmp_path, monkeypatch, capsys):
    text = "class Model:\n    def __init__(self):\n        self.compute_loss = None\nGRPOTrainer()"
    assert "a token weighs 1/T" in doctor(capsys, tmp_path, monkeypatch, TRL + text)[1]


def test_batches_of_a_scripts_own_are_a_note(tmp_path, monkeypatch, capsys):
    text = "class Mine(GRPOTrainer):\n    def _prepare_inputs(self, batch): pass\nMine(args=GRPOConfig(loss_type='grpo'))"
    _, out = doctor(capsys, tmp_path, monkeypatch, TRL + text)
    assert "Mine has another _prepare_inputs, which is not judged; the rest is as in GRPOTrainer" in out, out
    assert out.endswith("as far as they were judged; see the notes\n")


def test_a_script_of_rloo_has_its_own_config(tmp_path, monkeypatch, capsys):
    text = "from trl import RLOOConfig, RLOOTrainer\nRLOOTrainer(args=RLOOConfig(generation_batch_size=9))"
    code, out = doctor(capsys, tmp_path, monkeypatch, text)
    assert code == 1 and "generation_batch_size=9 is no multiple of num_generations=2 by default" in out, out


def test_the_row_of_a_script_names_what_is_judged_and_counts_the_rest(tmp_path, monkeypatch, capsys):
    others = "output_dir='x', learning_rate=1e-6, bf16=True, report_to='none'"
    _, out = doctor(capsys, tmp_path, monkeypatch, f"{TRL}GRPOTrainer(args=GRPOConfig(beta=0.1, {others}, epsilon=0.1))")
    assert "GRPOConfig of mine.py was read: beta, epsilon and 4 more; what else" in out and "learning_rate" not in out, out
    _, out = doctor(capsys, tmp_path, monkeypatch, f"{TRL}GRPOTrainer(args=GRPOConfig({others}))")
    assert "GRPOConfig of mine.py was read: 4 settings, none of which is judged; what else" in out, out


MAKES = "GRPOTrainer(args=GRPOConfig(loss_type='bnpo'))"


@pytest.mark.parametrize(
    ("text", "is_read"),
    [
        (MAKES, False),
        ("GRPOTrainer()", False),
        (f"from trl import TrlParser\n{MAKES}", True),
        (f"import argparse\n{MAKES}", True),
        (f"import sys\nprint(sys.argv)\n{MAKES}", True),
        (f"import click\n{MAKES}", True),
        (f"from beside import config\n{MAKES}", True),
        (f"from .beside import config\n{MAKES}", True),
        ("from elsewhere import config\nGRPOTrainer(args=config())", True),
        ("from elsewhere import given\nGRPOTrainer(args=GRPOConfig(loss_type=given.loss_type))", True),
        ("from elsewhere import given\nGRPOTrainer(args=GRPOConfig(**given))", True),
    ],
)
def test_flags_of_a_script_that_reads_no_command_line_have_no_effect(text, is_read, tmp_path, monkeypatch, capsys):
    (tmp_path / "beside.py").write_text("")
    (tmp_path / "a.yaml").write_text("loss_type: grpo")
    for words in (["--loss_type", "grpo"], ["--config", "a.yaml"]):
        code, out = doctor(capsys, tmp_path, monkeypatch, TRL + text, *words)
        assert (f"mine.py reads no command line: {words[0]} has no effect" in out) == (code == 1) == (not is_read), out
        assert is_read or "grpo is TRL's own" not in out, out


@pytest.mark.host("TRL_ROOT")
def test_the_scripts_of_trl_that_have_a_parser_are_given_flags():
    found = {True: [], False: []}
    for path in Path(os.environ["TRL_ROOT"], "examples", "scripts").glob("*grpo*.py"):
        found["Parser" in path.read_text()].append(Script.of(path).without_effect(["loss_type"]))
    assert not any(found[True]) and len(found[True]) > 2 and all(found[False]) and found[False], found
