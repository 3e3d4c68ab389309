"""A launch line of verl: the plugin that verl loads, the rows of doctor, the chain of explain. No verl is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from door_lines import ACTOR, KL, ONE_MINI_BATCH, RATIO, TIS, UNCUT, our_mode
from explain_cases import LAYOUT, STEP, explain, explain_json, stages
from forked import forked, run_main

from megatron_rl.__main__ import main
from megatron_rl.hosts import verl
from megatron_rl.hosts.door_settings import modes
from megatron_rl.hosts.verl import LOSS_MODE
from megatron_rl.loss_hub import is_built_in

ROOT = Path(__file__).resolve().parent.parent
# A package verl that loads plugins as verl does, with the tables in a module of their own.
LOADING = """
try:
    import megatron_rl.hosts.verl_plugin
except Exception as error:
    print("dropped without a word", error)
"""
TABLES = """
POLICY_LOSS_REGISTRY = {}

def register_policy_loss(name):
    return lambda function: POLICY_LOSS_REGISTRY.setdefault(name, function)

@register_policy_loss("vanilla")
def vanilla(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None):
    pass

def kl_penalty(logprob, ref_logprob, kl_penalty):
    pass
"""
# What is loaded by `import verl`; then the tables.
SHOW = """
import sys
import verl
print("torch" in sys.modules, sorted(name for name in sys.modules if name.startswith("megatron")))
import verl.trainer.ppo.core_algos as tables
print(len(tables.POLICY_LOSS_REGISTRY), "megatron_rl.gspo.prompt_mean" in tables.POLICY_LOSS_REGISTRY)
print("megatron.core" in sys.modules)
"""


@pytest.fixture
def checkout(tmp_path) -> Path:
    package = tmp_path / "verl" / "trainer" / "ppo"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (tmp_path / "verl" / "__init__.py").write_text(LOADING)
    (package / "core_algos.py").write_text(TABLES)
    (package.parent / "main_ppo.py").write_text("import sys\nprint('training', len(sys.argv))\n")
    return tmp_path


def python(folder: Path, *words: str) -> subprocess.CompletedProcess:
    environment = {"PYTHONPATH": f"{folder}:{ROOT}", "PATH": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True)


def run_main_ppo(folder: Path, *words: str) -> tuple[int | None, str, str]:
    """`python -m verl.trainer.main_ppo ...`, with torch and the package loaded before: (exit code, output, errors)."""

    def start() -> None:
        os.chdir(folder)
        sys.path.insert(0, str(folder))
        sys.modules.pop("megatron_rl.hosts.verl_plugin", None)
        run_main(["-m", "verl.trainer.main_ppo", *words])

    return forked(start)


def test_the_plugin_imports_nothing_until_verl_has_its_tables(checkout):
    done = python(checkout, "-c", SHOW)
    assert done.returncode == 0, done.stderr
    at_import, *tables = done.stdout.splitlines()
    loaded = ["megatron_rl", "megatron_rl.hosts", "megatron_rl.hosts.after_import", "megatron_rl.hosts.verl_plugin"]
    assert at_import == f"False {loaded}"
    num_modes = 1 + sum(is_built_in(loss) for loss, _ in modes(verl.DOOR).values())  # and verl's own
    assert tables == [f"{num_modes} True", "False"]


def test_a_verl_with_another_contract_keeps_its_own_losses_and_is_told(checkout):
    path = checkout / "verl" / "trainer" / "ppo" / "core_algos.py"
    path.write_text(TABLES.replace("response_mask, loss_agg_mode", "loss_mask, loss_agg_mode"))
    done = python(checkout, "-c", SHOW)
    assert done.returncode == 0 and done.stdout.splitlines()[1] == "1 False"
    assert "none of its losses is registered in verl" in done.stderr and "loss_mask" in done.stderr


def test_a_bad_line_ends_before_verl_is_loaded(checkout):
    """verl drops the exceptions of a plugin; this one is none."""
    mode = f"{LOSS_MODE}=megatron_rl.gspo.prompt_mean"
    refused = python(checkout, "-m", "verl.trainer.main_ppo", mode)
    assert refused.returncode == 1 and refused.stdout == ""
    assert "ConfigError: mini-batch: 256 of 1024 prompts a step: verl deals samples to ranks by length" in refused.stderr
    assert run_main_ppo(checkout, mode) == (1, "", refused.stderr)
    code, out, said = run_main_ppo(checkout, mode, ONE_MINI_BATCH)
    assert (code, out) == (0, "training 3\n"), said
    assert run_main_ppo(checkout, f"{LOSS_MODE}=gspo")[1] == "training 2\n"
    code, _, said = run_main_ppo(checkout, f"{LOSS_MODE}=gspo.token_mean")
    assert code == 1 and f"set {LOSS_MODE}=megatron_rl.gspo.token_mean" in said
    assert run_main_ppo(checkout, f"{LOSS_MODE}=somebody.gspo", f"{ACTOR}.clip_ratio_lo=0.1")[1] == "training 3\n"
    code, _, said = run_main_ppo(checkout, f"{LOSS_MODE}='megatron_rl.gspoo.token_mean'")
    assert code == 1 and "gspoo" in said
    code, _, said = run_main_ppo(checkout, f"{LOSS_MODE}=gspo", *KL, f"{ACTOR}.kl_loss_type=unbiased")
    assert code == 1 and "verl has no unbiased: set one of kl, k1" in said


# What verl's main does with its files: the whole config goes to validate_config, before Ray starts.
CHECKS = """
def validate_config(config, use_critic):
    print("validated", use_critic)
"""
MAIN_OF_FILES = """
import json, sys
from verl.utils.config import validate_config
validate_config(config=json.loads(sys.argv[1]), use_critic=False)
print("training")
"""


@pytest.mark.parametrize(
    ("policy_loss", "others", "said"),
    [
        (
            {"loss_mode": "megatron_rl.gspoo.token_mean"},
            {},
            "'gspoo' is no loss; did you mean megatron_rl.gspo.token_mean?",
        ),
        ({"loss_mode": "gspo.token_mean"}, {}, f"set {LOSS_MODE}=megatron_rl.gspo.token_mean"),
        ({"loss_mode": "megatron_rl.gspo.constant"}, {}, "needs its L"),
        ({"loss_mode": "megatron_rl.gspo.prompt_mean"}, {"ppo_mini_batch_size": 64}, "64 of 1024 prompts a step"),
        ({"loss_mode": "megatron_rl.grpo.token_mean"}, {"clip_ratio_low": 1.5}, "clip_ratio_low=1.5 must be in"),
        ({"loss_mode": "megatron_rl.gspo.token_mean"}, {}, None),
        ({"loss_mode": "vanilla"}, {"clip_ratio_low": 1.5}, None),
        ({}, {}, None),  # a config with other places
    ],
)
@pytest.mark.parametrize("is_loaded", [False, True])
def test_settings_of_files_are_judged_before_verl_starts(checkout, policy_loss, others, said, is_loaded):
    """Nothing of ours is on the line; verl would find an unknown loss after the first rollout."""
    (checkout / "verl" / "utils").mkdir()
    (checkout / "verl" / "utils" / "__init__.py").write_text("from .config import validate_config\n")
    (checkout / "verl" / "utils" / "config.py").write_text(CHECKS)
    (checkout / "verl" / "__init__.py").write_text("import verl.utils\n" * is_loaded + LOADING)
    (checkout / "verl" / "trainer" / "main_ppo.py").write_text(MAIN_OF_FILES)
    actor = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0, "loss_agg_mode": "token-mean"}
    actor |= {"loss_scale_factor": None, "policy_loss": policy_loss | {"ppo_kl_coef": 0.1}, **others}
    config = {"actor_rollout_ref": {"actor": actor}, "algorithm": {"rollout_correction": None}, "data": {}}
    code, out, error = run_main_ppo(checkout, json.dumps(config))
    if said is None:
        assert out == "validated False\ntraining\n", error
    else:
        assert (code, out) == (1, "") and said in error and "Traceback" not in error, error


def test_doctor_reads_a_line_that_names_the_file_of_verls_main(capsys):
    line = f"python3 verl/trainer/main_ppo.py {our_mode('gspo.sample_mean')}"
    assert main(["doctor", "--launch-only", "--", *line.split()]) == 0
    assert "megatron_rl.gspo.sample_mean, clip" in capsys.readouterr().out
    assert main(["doctor", "--launch-only", "--host", "verl", "--", *line.replace("main_ppo", "mine").split()]) == 0


def test_doctor_reads_a_script_of_verl(tmp_path, capsys):
    script = tmp_path / "run.sh"
    script.write_text(
        "MODE=megatron_rl.gspo.prompt_mean\nACTOR=(\n    actor_rollout_ref.actor.policy_loss.loss_mode=${MODE}\n"
        "    actor_rollout_ref.actor.use_kl_loss=True\n)\nDATA=(data.train_batch_size=${SIZE:-512})\n"
        'python3 -m verl.trainer.main_ppo \\\n    "${DATA[@]}" "${ACTOR[@]}" "$@"\n'
    )
    assert main(["doctor", "--launch-only", "--", "bash", str(script)]) == 1
    out = capsys.readouterr().out
    assert "launch line: verl, verl.trainer.main_ppo, from line 7 of the script" in out
    assert "PROBLEM  mini-batch" in out and "256 of 512 prompts a step" in out and "doctor: 1 problem" in out
    assert main(["doctor", "--launch-only", "--", "bash", str(script), ONE_MINI_BATCH]) == 0
    out = capsys.readouterr().out
    assert "megatron_rl.gspo.prompt_mean, clip 0.0003/0.0004, clip_ratio_c 3 (the loss's own clip)" in out
    assert (
        "note     KL  " in out and "0.001 x low_var_kl, averaged by loss_agg_mode=token-mean, verl's own: a token weighs 1/T" in out
    )
    assert main(["doctor", "--launch-only", "--", *f"python3 -m verl.trainer.main_ppo {our_mode('grpo.constant')}".split()]) == 1
    assert "needs its L" in capsys.readouterr().out


def test_the_chain_of_verl_by_hand():
    """dp 2 x cp 2, M = 3, prompts of 6 and 4 tokens: 2 / (P M_g), x 3, x 2 / 3, / 4."""
    found = explain_json(*STEP, *LAYOUT, "--host", "verl", "--policy-loss", "gspo", "--loss-aggregation", "prompt_mean")
    chain = found["chain"]
    assert stages(chain) == {"loss": "dp/(P M_g)", "verl": "M", "schedule": "cp/M", "DDP": "1/(dp cp)"}
    assert chain["factors"][0]["values"] == pytest.approx([2 / 12, 2 / 12, 2 / 8, 2 / 8])
    assert chain["net_weights"] == pytest.approx([1 / 12, 1 / 12, 1 / 8, 1 / 8]) and chain["is_exact"]
    assert found["launch_lines"] == [our_mode("gspo.prompt_mean")]


@pytest.mark.parametrize("host", ["verl", "skyrl"])
def test_the_chain_of_rollouts_of_several_rows_by_hand(host):
    """Rollouts of 2 + 4 and 3 tokens, R = 2; FB-141."""
    step = ["--response-lengths", "2,4,3", "--prompt-ids", "a,a,b", "--rollout-ids", "0,0,1", "--data-parallel-size", "2"]
    for aggregation, weights in (("sample_mean", [1 / 12, 1 / 12, 1 / 6]), ("row_mean", [1 / 8, 1 / 16, 1 / 6])):
        chain = explain_json(*step, "--host", host, "--loss-aggregation", aggregation)["chain"]
        assert chain["net_weights"] == pytest.approx(weights) and chain["is_exact"]


@pytest.mark.parametrize("aggregation", ["sample_mean", "token_mean", "prompt_mean"])
def test_the_chain_of_verl_is_exact_per_token_too(aggregation):
    given = [*STEP, *LAYOUT, "--host", "verl", "--loss-aggregation", aggregation, "--calculate-per-token-loss"]
    chain = explain_json(*given)["chain"]
    assert chain["is_exact"] and {"verl": "T_all/dp", "finalize": "1/T_all"}.items() <= stages(chain).items()


def test_explain_types_what_a_correction_needs():
    given = ["--policy-loss", "gspo", "--importance-correction", "tis", "--importance-correction-high", "3"]
    lines = explain_json(*STEP, *LAYOUT, "--host", "verl", *given)["launch_lines"]
    high = f"+{ACTOR}.policy_loss.importance_correction_high=3"
    assert lines == [our_mode("gspo.sample_mean"), *TIS, high, UNCUT[0], f"{RATIO}_threshold=1000000000"]
    lines = explain_json(*STEP, *LAYOUT, "--host", "verl", "--policy-loss", "dppo_tv", "--divergence-low", "0.1")["launch_lines"]
    assert lines[1:3] == [TIS[0], f"+{ACTOR}.policy_loss.divergence_low=0.1"]


def test_explain_types_our_mean_of_the_kl_term():
    lines = explain_json(*STEP, *LAYOUT, "--host", "verl", "--kl-coefficient", "0.1", "--kl-estimator", "unbiased")["launch_lines"]
    typed = dict(line.removeprefix(f"{ACTOR}.").split("=") for line in lines)
    expected = {"use_kl_loss": "True", "kl_loss_coef": "0.1", "kl_loss_type": "unbiased", "loss_agg_mode": "seq-mean-token-mean"}
    assert expected.items() <= typed.items()


def test_explain_refuses_what_verl_decides_itself():
    code, out, _ = explain(*STEP, "--host", "verl", "--entropy-coefficient", "0.1", "--policy-temperature", "0.7")
    assert code == 1
    for flag in ("--entropy-coefficient=0.1", "--policy-temperature=0.7"):
        assert f"REFUSED: {flag} has no effect in verl" in out
    assert "overrides on the launch line: actor_rollout_ref" in out
    assert f"our log-probabilities too, for this loss or verl's own: {verl.EXTERNAL_LIB}={verl.LOG_PROBS}\n" in out
