"""Runs that TRL's own trainers refuse: what doctor says of them, and by TRL's own statements from a checkout."""

from __future__ import annotations

import ast
import types
from typing import Any

import pytest
from test_golden_losses import source_of

from megatron_rl.__main__ import main
from megatron_rl.hosts import trl, trl_refusals, trl_stock
from megatron_rl.hosts.settings import Settings, Size
from megatron_rl.hosts.step_sizes import PROCESSES, is_python_alone
from megatron_rl.hosts.trl_others import OTHER

LIGER = {"use_liger_kernel": True}
# Settings on as many processes; whether TRL refuses the run. One that is None in the versions without it is left out there.
CASES = [
    ({}, 1, False),
    ({}, 3, False),
    ({"per_device_train_batch_size": 4}, 1, True),
    ({"per_device_train_batch_size": 4}, 2, False),
    ({"num_generations": 6}, 1, True),
    ({"num_generations": 6}, 3, False),
    ({"num_generations": 1}, 1, True),
    ({"num_generations": 16, "gradient_accumulation_steps": 2}, 1, False),
    ({"num_generations": 16, "gradient_accumulation_steps": 2, "steps_per_generation": 1}, 1, True),
    ({"steps_per_generation": 2, "generation_batch_size": 16}, 1, True),
    ({"generation_batch_size": 20}, 1, True),
    ({"generation_batch_size": 24}, 2, True),
    ({"generation_batch_size": 32, "per_device_train_batch_size": 4, "num_generations": 16}, 2, False),
    ({"auto_find_batch_size": True}, 1, True),
    ({"vllm_importance_sampling_clip_min": 3.5}, 1, True),
    ({"vllm_importance_sampling_clip_min": 0.5}, 1, False),
    ({"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": None}, 1, True),
    ({"vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_max": None}, 1, False),
    ({"loss_type": "vespo", "use_vllm": True}, 1, True),
    ({"loss_type": "vespo", "use_vllm": True, "vllm_importance_sampling_mode": "token_mask"}, 1, False),
    ({"loss_type": "vespo", "use_vllm": True, "vllm_importance_sampling_correction": False}, 1, False),
    ({"sync_ref_model": True}, 1, True),
    ({"sync_ref_model": True, "beta": 0.1}, 1, False),
    (LIGER, 1, False),
    (LIGER | {"off_policy_mask_threshold": 0.5}, 1, "liger"),
    (LIGER | {"top_entropy_quantile": 0.2}, 1, "liger"),
    (LIGER | {"entropy_coef": 0.1}, 1, "liger"),
    (LIGER | {"use_adaptive_entropy": True}, 1, "liger"),
    (LIGER | {"delta": 2.0}, 1, False),
]


def refused(given: dict[str, Any], processes: int, **others: Any) -> list[str]:
    settings = trl_stock.settings_of(given | {PROCESSES: Size(processes, "--num_processes")} | others, trl.DOOR.all_defaults)
    return [row.text for row in trl_refusals.refusals(settings) if row.is_wrong]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} on {case[1]}")
@pytest.mark.parametrize("version", [(1, 9), (1, 16)])
def test_doctor_says_what_trl_refuses(case, version, monkeypatch):
    monkeypatch.setattr(trl_stock, "installed", lambda: version)
    given, processes, is_refused = case
    found = refused(given, processes)
    assert bool(found) == (version < trl_stock.KEEPS_LOSS if is_refused == "liger" else is_refused), found
    assert all(text.startswith("TRL refuses this run: ") for text in found)


# TRL's own statements


def defaults_of(config: ast.Module) -> dict[str, Any]:
    """The fields of a config class, each with its default."""
    found = {}
    for node in (one for one in ast.walk(config) if isinstance(one, ast.AnnAssign) and isinstance(one.value, ast.Call)):
        values = [one.value for one in node.value.keywords if one.arg == "default"]
        if values and isinstance(values[0], ast.Constant):
            found[ast.unparse(node.target)] = values[0].value
    return found


def post_init(config: ast.Module, args: types.SimpleNamespace) -> None:
    """The config's own __post_init__, but for what it calls of its base class."""
    (method,) = [node for node in ast.walk(config) if isinstance(node, ast.FunctionDef) and node.name == "__post_init__"]
    method.body = [node for node in method.body if "super()" not in ast.unparse(node)]
    scope: dict[str, Any] = {"warnings": types.SimpleNamespace(warn=lambda *given, **named: None), "FutureWarning": FutureWarning}
    exec(compile(ast.Module([method], []), "checkout", "exec"), scope)
    scope["__post_init__"](args)


def guards(trainer: ast.Module) -> list[list[ast.expr]]:
    """Of each raise of the trainer's __init__ that depends on settings alone, the conditions around it."""
    (method,) = [
        node
        for cls in ast.walk(trainer)
        if isinstance(cls, ast.ClassDef)
        for node in cls.body
        if isinstance(node, ast.FunctionDef) and node.name == "__init__"
    ]
    found: list[list[ast.expr]] = []

    def visit(nodes: list[ast.stmt], conditions: list[ast.expr]) -> None:
        for node in nodes:
            if isinstance(node, ast.Raise):
                names = {one.id for test in conditions for one in ast.walk(test) if isinstance(one, ast.Name)}
                if conditions and names <= {"self", "args"}:
                    found.append(conditions)
            elif isinstance(node, ast.If):
                visit(node.body, [*conditions, node.test])

    visit(method.body, [])
    return found


@pytest.mark.host("TRL_ROOT")
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} on {case[1]}")
def test_trl_refuses_what_doctor_says(case, monkeypatch):
    config, trainer = (source_of("TRL_ROOT", f"trl/trainer/grpo_{name}.py") for name in ("config", "trainer"))
    tests = guards(trainer)
    has_ligers = any("use_liger_kernel" in ast.unparse(test) for one in tests for test in one)
    monkeypatch.setattr(trl_stock, "installed", lambda: (1, 9) if has_ligers else trl_stock.NEWEST)
    given, processes, _ = case
    training = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "use_liger_kernel": False, "do_eval": False}
    training |= {"parallelism_config": None, "auto_find_batch_size": False, "world_size": processes, "n_gpu": 1}
    args = types.SimpleNamespace(**training | defaults_of(config) | given)
    args._entropy_bonus_enabled = args.entropy_coef != 0 or args.use_adaptive_entropy
    args.device = types.SimpleNamespace(type="cpu")
    problem = None
    try:
        post_init(config, args)
    except ValueError as error:
        problem = str(error)
    scope = {"self": args, "args": args}
    for conditions in tests:
        try:
            if all(eval(compile(ast.Expression(test), "checkout", "eval"), scope) for test in conditions):
                problem = " and ".join(map(ast.unparse, conditions))
        except AttributeError:  # of a part of the trainer that is not a setting
            continue
    assert bool(refused(given, processes)) == (problem is not None), problem


@pytest.mark.host("TRL_ROOT")
@pytest.mark.parametrize("name", [name for name in trl_refusals.WORDS if name != "vllm_mode"])
def test_the_words_are_those_that_trl_compares_with(name):
    """All that is compared with the setting, where a branch for anything else raises."""
    trainer, found = source_of("TRL_ROOT", "trl/trainer/grpo_trainer.py"), set()
    for node in ast.walk(trainer):
        if isinstance(node, ast.Compare) and ast.unparse(node.left) == f"self.{name}":
            found |= {one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str)}
    assert found == {*trl_refusals.WORDS[name]}
    said = {ast.unparse(node.exc) for node in ast.walk(trainer) if isinstance(node, ast.Raise) and node.exc is not None}
    assert any(f"self.{name}" in text for text in said)


# Its lines


def doctor(capsys, *words: str) -> tuple[int, str]:
    code = main(["doctor", "--launch-only", *words])
    return code, capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--loss_type ppo", "loss_type=ppo is none of grpo, sapo, bnpo, dr_grpo, dapo, cispo, vespo, luspo; ours have a prefix"),
        ("--loss_type gspo", "ours have a prefix, as in loss_type=megatron_rl.gspo.token_mean"),
        ("--loss_type gprpo", "set loss_type=grpo (no TRL is installed here, and 1.16 is judged)"),
        ("--importance_sampling_level tokens", "is none of token, sequence; set importance_sampling_level=token"),
        ("--scale_rewards False", "scale_rewards=False is none of group, batch, none; set scale_rewards=none"),
        ("--multi_objective_aggregation sum", "is none of sum_then_normalize, normalize_then_sum"),
        ("--use_vllm --vllm_importance_sampling_mode mask", "is none of token_truncate, token_mask, sequence_truncate, seq"),
        ("--use_vllm --vllm_mode colocated", "set vllm_mode=colocate"),
        ("--loss_type megatron_rl.grpo.token_mean --num_generations 1", "TRL refuses this run: num_generations=1"),
    ],
)
def test_a_refused_run_is_a_problem_and_has_no_verdict(line, said, capsys):
    code, out = doctor(capsys, "--host", "trl", "--", "python", "t.py", *line.split())
    assert code == 1 and said in out and "is TRL's own" not in out and "same on every layout" not in out, out


@pytest.mark.parametrize(
    "line",
    [
        "--scale_rewards none",
        "--scale_rewards ${SCALE}",
        "--vllm_importance_sampling_mode mask",  # not read without use_vllm
        "--scale_rewards x --multi_objective_aggregation normalize_then_sum",
        "--loss_type ${LOSS} --num_generations ${N}",
    ],
)
def test_what_trl_does_not_read_or_the_shell_knows_is_not_refused(line, capsys):
    code, out = doctor(capsys, "--host", "trl", "--", "python", "t.py", *line.split())
    assert code == 0 and "refuses" not in out, out


def test_a_number_of_processes_that_the_line_does_not_say(capsys):
    line = ["accelerate", "launch", "t.py", "--per_device_train_batch_size", "2"]
    code, out = doctor(capsys, "--host", "trl", "--", *line)
    assert code == 0 and "unless its number of processes is a multiple of 4: a generation has" in out, out
    code, out = doctor(capsys, "--host", "trl", "--", *line[:2], "--num_processes", "4", *line[2:])
    assert code == 0 and "refuses" not in out, out
    code, out = doctor(capsys, "--host", "trl", "--", "CUDA_VISIBLE_DEVICES=0", "python3", *line[2:])
    assert code == 1 and "x 1 process of python = 2 completions, which is no multiple of num_generations=8 by default" in out, out
    assert "set per_device_train_batch_size=8" in out


@pytest.mark.parametrize(
    ("words", "is_alone"),
    [("python", True), ("uv run python3 -u", True), ("srun python", False), ("python -m x", False), ("WORLD_SIZE=2 python", False)],
)
def test_which_words_start_one_process(words, is_alone):
    assert is_python_alone(words.split()) == is_alone


@pytest.mark.parametrize(
    ("trainer", "given", "said"),
    [
        ("RLOOTrainer", {"num_generations": 3}, "a multiple of num_generations=3"),
        ("RLOOTrainer", {"per_device_train_batch_size": 1}, "of num_generations=2 by default"),
        ("RLOOTrainer", {"sync_ref_model": True, "beta": 0.0}, "there is no reference model"),
        ("RLOOTrainer", {"sync_ref_model": True}, None),
        ("RLOOTrainer", {"num_generations": 4}, None),
        ("AsyncGRPOTrainer", {"use_liger_kernel": True}, "has no loss in AsyncGRPOTrainer"),
        ("AsyncGRPOTrainer", {"num_generations": 3}, None),
        ("PPOTrainer", {"num_generations": 3}, None),
    ],
)
def test_other_trainers_refuse_too(trainer, given, said):
    settings = Settings.of_names(given | {OTHER: trainer, PROCESSES: Size(1, "python")}, trl.OTHERS_DEFAULTS)
    rows = [row.text for row in trl_refusals.refusals(settings)]
    assert not rows if said is None else said.replace("a multiple of", "multiple of") in " ".join(rows), rows


# With a loss of ours a step has its completions when its first micro-batch is trained.
OURS = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8, "num_generations": 8}


@pytest.mark.host("TRL_ROOT")
@pytest.mark.parametrize("batch", [112, 128, 256])
def test_the_steps_of_a_generation_batch_are_those_of_trl(batch):
    config = source_of("TRL_ROOT", "trl/trainer/grpo_config.py")
    training = {"parallelism_config": None, "auto_find_batch_size": False, "world_size": 4, "do_eval": False}
    args = types.SimpleNamespace(**training | defaults_of(config) | OURS | {trl_stock.GENERATION: batch})
    args.device = types.SimpleNamespace(type="cpu")
    post_init(config, args)
    settings = Settings.of_names(OURS | {PROCESSES: Size(4, "--num_processes"), trl_stock.GENERATION: batch}, trl.DOOR.all_defaults)
    assert trl_stock.of_generation_batch(settings, 8)[:2] == (args.steps_per_generation, "generation_batch_size=128")


@pytest.mark.parametrize(
    ("aggregation", "batch", "said"),
    [
        ("token_mean", 112, "is steps_per_generation=7 with gradient_accumulation_steps=8: completions of the optimiser step"),
        ("prompt_mean", 256, "is steps_per_generation=16 with gradient_accumulation_steps=8 beside megatron_rl.grpo.prompt_mean"),
        ("token_mean", 100, "is no multiple of num_generations=8"),
        ("token_mean", 256, None),
        ("prompt_mean", 128, None),
    ],
)
def test_a_generation_batch_has_whole_steps_of_ours(aggregation, batch, said, capsys):
    settings = [f"--{name}={value}" for name, value in (OURS | {"generation_batch_size": batch}).items()]
    line = ["t.py", f"--loss_type=megatron_rl.grpo.{aggregation}", *settings]
    code, out = doctor(capsys, "--", "accelerate", "launch", "--num_processes", "4", *line)
    assert code == (said is not None) and (said is None or said in out and "set generation_batch_size=128" in out), out
    code, out = doctor(capsys, "--", "accelerate", "launch", *line)
    assert code == (batch == 100) and "; generation_batch_size=32 x processes always fits" in out, out


@pytest.mark.parametrize(
    ("group", "said"),
    [(7, "; set num_generations=8, or per_device_train_batch_size=7"), (96, "=96; set per_device_train_batch_size=12")],
)
def test_a_group_that_does_not_divide_is_given_the_next_one_that_does(group, said, capsys):
    sizes = ["--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "8", "--num_generations", str(group)]
    code, out = doctor(capsys, "--host", "trl", "--", "torchrun", "--nproc-per-node", "1", "t.py", *sizes)
    assert code == 1 and said in out, out


@pytest.mark.parametrize(
    ("launcher", "said"),
    [
        ("accelerate launch --num_proceses 4", "no launcher takes --num_proceses: did you mean --num_processes?"),
        ("accelerate launch --config_file nope.yaml", "nope.yaml"),
        ("accelerate launch --num_processes 4 --mixed_precision bf16 --num_machines 2 --num_cpu_threads_per_process 4", None),
        ("torchrun --nproc-per-node 4 --nnodes 1 --node-rank 0", None),
        ("accelerate launch --config_file ${FILE}", None),
    ],
)
def test_a_slip_of_a_launcher_is_a_problem(launcher, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, out = doctor(capsys, "--host", "trl", "--", *launcher.split(), "t.py", "--loss_type", "grpo")
    assert code == (said is not None) and (said is None or said in out), out
