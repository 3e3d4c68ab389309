"""Settings that are one of a trainer's own words: doctor's lists against the trainers' code, and what is said of another word."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from test_golden_losses import source_of

from megatron_rl.__main__ import main
from megatron_rl.hosts import nemo_rl, roll, skyrl, verl, verl_plugin, verl_stock
from megatron_rl.hosts.base import host_named
from megatron_rl.hosts.closed_words import closest
from megatron_rl.hosts.doors import DOORS
from megatron_rl.hosts.settings import Settings

VERL, LOSS, MODE = "python -m verl.trainer.main_ppo", verl.LOSS_MODE, verl.AGG_MODE
SKYRL, KIND = "python -m skyrl.train.entrypoints.main_base", "trainer.algorithm.policy_loss_type"
NEMO = "python run_grpo.py --config none.yaml"


# The trainers' own lists


def registered(tree: ast.Module, decorator: str) -> set[str]:
    calls = [one for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) for one in node.decorator_list]
    return {
        one.args[0].value
        for one in calls
        if isinstance(one, ast.Call) and ast.unparse(one.func) == decorator and isinstance(one.args[0], ast.Constant)
    }


def assigned(tree: ast.AST, name: str) -> set[str]:
    (value,) = [n.value for n in ast.walk(tree) if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == name]
    return set(ast.literal_eval(value))


def enumerated(tree: ast.Module, name: str) -> set[str]:
    (cls,) = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name]
    return {one.value.value for one in cls.body if isinstance(one, ast.Assign) and isinstance(one.value, ast.Constant)}


def compared(tree: ast.Module, name: str) -> set[str]:
    """The texts that a name is compared with."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Compare) and ast.unparse(node.left).endswith(name)]
    return {one.value for node in nodes for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str)}


def chosen(tree: ast.Module, flag: str) -> set[str]:
    """The choices of a flag of argparse."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("add_argument")]
    (call,) = [node for node in calls if node.args and isinstance(node.args[0], ast.Constant) and node.args[0].value == flag]
    return {text for one in call.keywords if one.arg == "choices" for text in ast.literal_eval(one.value)}


@pytest.mark.host("VERL_ROOT")
def test_the_words_of_verl():
    tables = source_of("VERL_ROOT", "verl/trainer/ppo/core_algos.py")
    assert enumerated(tables, "AdvantageEstimator") == set(verl_stock.ESTIMATORS)
    assert registered(tables, "register_policy_loss") == {*verl_stock.WORDS[LOSS].names}
    actor = source_of("VERL_ROOT", "verl/workers/config/actor.py")
    assert assigned(actor, "valid_loss_agg_modes") == {*verl_stock.WORDS[MODE].names}


@pytest.mark.host("SKYRL_ROOT")
def test_the_words_of_skyrl():
    tables = source_of("SKYRL_ROOT", "skyrl/backends/skyrl_train/utils/ppo_utils.py")
    assert enumerated(tables, "PolicyLossType") == {*skyrl.WORDS[KIND].names}
    judge = source_of("SKYRL_ROOT", "skyrl/train/utils/utils.py")
    assert compared(judge, "algorithm.loss_reduction") == {*skyrl.WORDS[skyrl.REDUCTION].names}


@pytest.mark.host("ROLL_ROOT")
def test_the_words_of_roll():
    for file in ("rlvr/actor_pg_worker.py", "agentic/agentic_actor_pg_worker.py"):
        assert compared(source_of("ROLL_ROOT", f"roll/pipeline/{file}"), "pg_variant") == {*roll.VARIANTS}
    functions = source_of("ROLL_ROOT", "roll/utils/functionals.py")
    assert compared(functions, "loss_agg_mode") == {*roll.WORDS["loss_agg_mode"].names}


@pytest.mark.host("NEMO_RL_ROOT")
def test_the_words_of_nemo_rl():
    loss = source_of("NEMO_RL_ROOT", "nemo_rl/algorithms/loss/loss_functions.py")
    assert compared(loss, "truncated_importance_sampling_type") == {*nemo_rl.WORDS[nemo_rl.TRUNCATION].names}
    utilities = source_of("NEMO_RL_ROOT", "nemo_rl/algorithms/utils.py")
    assert compared(utilities, "kl_type") == {*nemo_rl.WORDS["loss_fn.reference_policy_kl_type"].names}
    trainer = source_of("NEMO_RL_ROOT", "nemo_rl/algorithms/grpo.py")
    assert compared(trainer, "adv_estimator_name") == {*nemo_rl.WORDS[nemo_rl.ESTIMATOR].names}


@pytest.mark.host("PRIME_RL_ROOT")
def test_the_words_of_prime_rl():
    config = source_of("PRIME_RL_ROOT", "packages/prime-rl-configs/src/prime_rl/configs/trainer.py")
    classes = {node.name: ast.unparse(node) for node in ast.walk(config) if isinstance(node, ast.ClassDef)}
    (union,) = [n for n in ast.walk(config) if isinstance(n, ast.AnnAssign) and ast.unparse(n.target) == "LossConfig"]
    members = {node.id for node in ast.walk(union) if isinstance(node, ast.Name)} & classes.keys()
    (words,) = DOORS["prime_rl"].words.values()
    assert {word for word in words.names if any(f"Literal['{word}']" in classes[one] for one in members)} == {*words.names}
    assert len(members) == len(words.names)


@pytest.mark.parametrize(
    "host", [pytest.param(name, marks=pytest.mark.host(f"{name.upper()}_ROOT")) for name in ("miles", "slime")]
)
def test_the_choices_of_a_parser(host):
    parser = source_of(f"{host.upper()}_ROOT", f"{host}/utils/arguments.py")
    assert {flag: chosen(parser, flag) for flag in host_named(host).choices} == {
        flag: {*words} for flag, words in host_named(host).choices.items()
    }


# What is said


def doctor(capsys, line: str) -> tuple[int, str]:
    code = main(["doctor", "--launch-only", "--", *line.split()])
    return code, capsys.readouterr().out


def test_a_slip_means_the_word_with_its_letters_or_a_similar_one():
    assert closest("gpso", verl_stock.WORDS[LOSS].names) == "gspo"
    assert closest("token_mean", verl_stock.STOCK_MODES) == "token-mean"
    assert closest("mine", verl_stock.WORDS[LOSS].names) is None


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            f"{VERL} {LOSS}=gpso",
            f"set {LOSS}=gspo (one of your own, or of a fork: VERL_USE_EXTERNAL_MODULES=<module that registers it>)",
        ),
        (f"{VERL} {LOSS}=grpo", f"set {LOSS}=vanilla"),
        (f"{VERL} reward.custom_reward_function.path=null {LOSS}=gpso", f"set {LOSS}=gspo"),
        (f"{VERL} {MODE}=token_mean", f"set {MODE}=token-mean\n"),
        (f"{VERL} {MODE}=mine", "is none of token-mean, token-sum, seq-mean-token-mean, seq-mean-token-sum, seq-mean-token-sum-n"),
        (f"VERL_USE_EXTERNAL_MODULES=mine {VERL} {MODE}=token_mean", f"set {MODE}=token-mean\n"),
        (f"{VERL} {verl.EXTERNAL_LIB}={verl.LOG_PROBS} {LOSS}=gpso", f"set {LOSS}=gspo"),  # ours registers none of the user's
        (f"{SKYRL} {KIND}=regulr", f"set {KIND}=regular"),
        (f"{SKYRL} trainer.algorithm.loss_reduction=token-mean", "set trainer.algorithm.loss_reduction=token_mean"),
        ("python3 train_miles.py --loss-type polcy_loss --use-kl-loss", "set --loss-type=policy_loss"),
        ("uv run rl @ none.toml --trainer.loss.type ip", "set trainer.loss.type=ipo"),
    ],
)
def test_another_word_is_refused_and_nothing_more_is_judged(line, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train_miles.py").write_text("from miles.utils.arguments import parse_args\n")
    (tmp_path / "none.toml").write_text("[trainer]\n")
    code, out = doctor(capsys, line)
    assert code == 1 and " refuses this run: " in out and said in out, out
    assert "a token weighs" not in out and "PROBLEM" in out and out.count("PROBLEM") == 1, out


OWN = [
    f"{VERL} {LOSS}=mine",
    f"{VERL} {LOSS}=gspo_of_mine",  # a longer name is no slip
    f"VERL_USE_EXTERNAL_MODULES=mine {VERL} {LOSS}=gpso",
    f"{VERL} {verl.EXTERNAL_LIB}=mine {LOSS}=gpso",
    f"{VERL} reward.custom_reward_function.path=mine.py {LOSS}=gpso",
    f"{VERL} data.custom_cls.name=Mine {LOSS}=gpso",
    f"{VERL} critic.model.external_lib=mine {LOSS}=gpso",
    f"python -m recipe.mine.main_mine {LOSS}=gpso",
    f"{SKYRL} trainer.override_entrypoint=mine {KIND}=gpso",
]


@pytest.mark.parametrize("line", OWN)
def test_a_loss_of_ones_own_is_no_problem(line, capsys):
    code, out = doctor(capsys, line)
    assert code == 0 and "is your own, and what it weighs is not known here: nothing was judged" in out, out
    assert ("set " in out and ", unless it is one of your own\n" in out) == line.endswith("=gpso"), out


def test_a_variable_that_a_script_or_the_shell_exports_counts(tmp_path, monkeypatch, capsys):
    script = tmp_path / "run.sh"
    script.write_text(f"export VERL_USE_EXTERNAL_MODULES=mine\n{VERL} {LOSS}=gpso\n")
    assert doctor(capsys, f"bash {script}")[0] == 0
    script.write_text(f"{VERL} {LOSS}=gpso\n")
    assert doctor(capsys, f"bash {script}")[0] == 1
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "mine")
    assert doctor(capsys, f"bash {script}")[0] == 0


def test_the_plugin_ends_no_launch_of_a_loss_of_ones_own():
    """Beside our log-probabilities verl's whole config is judged, and who has registered what is not known there."""
    assert verl_plugin.OURS.search(f"={verl.LOG_PROBS}")
    settings = Settings.of_names({LOSS: "gpso", verl.EXTERNAL_LIB: verl.LOG_PROBS}, verl.DOOR.all_defaults)
    assert verl.problems_of(settings) == ([], [])


def variants(worker: str) -> Iterator[str]:
    settings = {"actor_train.worker_cls": worker, "actor_train.pg_variant": "vanila"}
    found = DOORS["roll"].words["actor_train.pg_variant"]
    if found.is_read(Settings.of_names(settings, {})):
        yield "vanila"


def test_a_variant_is_read_by_rolls_workers_that_have_several():
    assert [*variants("roll.pipeline.rlvr.actor_pg_worker.ActorPGWorker")] == ["vanila"]
    assert [*variants("roll.pipeline.rlvr.actor_worker.ActorWorker"), *variants("mine.actor_pg_worker.Worker")] == []
