"""Launch lines of ROLL and SkyRL, which settings configure: the rows of doctor, the chain of explain. Neither host is needed.

ROLL_ROOT=... SKYRL_ROOT=... pytest -m host --require host tests/test_settings_launch.py compares with checkouts.
"""

from __future__ import annotations

import ast
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import roll_cases
import skyrl_cases
import yaml
from dense_row_cases import AGGREGATIONS, RowCase, samples_of
from door_table import ONE_ROW_FLAG, must_say_one_row
from explain_cases import explain, explain_json, stages
from host_checkouts import ROLL, SKYRL
from test_skyrl import started
from torch import Tensor

from megatron_rl.__main__ import main
from megatron_rl.hosts import DOOR_NAMES, roll, roll_sizes, skyrl
from megatron_rl.hosts.door_settings import read
from megatron_rl.hosts.doors import DOORS
from megatron_rl.hosts.settings import put
from megatron_rl.testing.layout_step import StepSample
from megatron_rl.testing.reference import DIVISOR

ROOT = Path(__file__).resolve().parent.parent
OUR_YAML = ROOT / "examples" / "roll" / "gspo_prompt_mean.yaml"
LINE_OF_ROLL = "python examples/start_rlvr_pipeline.py --config_path mine --config_name rlvr_config"
DOOR_OF_SKYRL = f"{skyrl.ENTRYPOINT}={skyrl.__name__}"
LOSS_OF_SKYRL, REDUCTION = skyrl.DOOR.choice.setting, skyrl.DOOR.choice.aggregation
LINE_OF_SKYRL = f"uv run -m {skyrl.ENTRY} {DOOR_OF_SKYRL}"


def test_each_name_of_the_list_has_its_object():
    assert tuple(DOORS) == DOOR_NAMES


def doctor(capsys, line: str) -> tuple[int, str]:
    given = line.split() if " -- " in line else ["--", *line.split()]
    code = main(["doctor", "--launch-only", *given])
    found = capsys.readouterr()
    return code, " ".join((found.out + found.err).split())


# ROLL


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Path:
    """A checkout of ROLL with our example as its YAML. Returns the file."""
    folder = tmp_path / "examples" / "mine"
    folder.mkdir(parents=True)
    for name in ("start_rlvr_pipeline.py", "start_agentic_pipeline.py"):
        (folder.parent / name).touch()
    (folder / "run.sh").write_text(
        "CONFIG_PATH=$(basename $(dirname $0))\n"
        "python examples/start_rlvr_pipeline.py --config_path $CONFIG_PATH  --config_name rlvr_config\n"
    )
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copy(OUR_YAML, folder / "rlvr_config.yaml"))


def change(path: Path, **values: object) -> None:
    settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    for name, value in values.items():
        put(settings, name.split("__"), value)
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")


def test_doctor_approves_of_the_example_of_roll_and_of_a_script(checkout, capsys):
    code, out = doctor(capsys, LINE_OF_ROLL)
    assert code == 0 and "launch line: roll, start_rlvr_pipeline.py settings" not in out, out
    assert "gspo.prompt_mean, clip 0.0003/0.0004, weight of a token 1/(P M_g)" in out
    code, out = doctor(capsys, "bash examples/mine/run.sh")
    assert code == 0 and "from line 2 of the script" in out and "examples/mine/rlvr_config.yaml" in out


WRONG_YAML: dict[str, tuple[dict[str, Any], str]] = {
    "cut groups, by the layout": (
        {"actor_train__strategy_args__strategy_config": {"tensor_model_parallel_size": 2}},
        "a step of 256 of 512 samples",
    ),
    "cut groups, one GPU list": ({"actor_train__device_mapping": "list(range(0,7)) + [7]"}, "a step of 256 of 512 samples"),
    "a variable of nobody": ({"system_envs": {"MEGATRON_RL_DIVISOR": "8"}}, "MEGATRON_RL_DIVISOR=8 has no effect"),
    "an interpolation": ({"importance_sampling": "${mode}", "mode": "seq"}, "two losses in one launch"),
    "another strategy": ({"actor_train__strategy_args": None}, "strategy_name=fsdp2_train: our worker needs the logits"),
    "our loss, their worker": (
        {"actor_train__worker_cls": "roll.pipeline.rlvr.actor_worker.ActorWorker"},
        "ROLL trains its own loss, and actor_train.pg_variant: gspo.prompt_mean has no effect; for ours set actor_train.worker_cls",
    ),
    "no old log-probabilities": (
        {
            "enable_old_logprobs_recompute": False,
            "force_disable_old_logprobs_recompute": True,
            "ppo_epochs": 2,
        },
        "the ratio of the later steps would be 1",
    ),
}


@pytest.mark.parametrize("name", WRONG_YAML)
def test_a_wrong_yaml_is_refused_by_name(name, checkout, capsys):
    values, expected = WRONG_YAML[name]
    change(checkout, **values)
    code, out = doctor(capsys, LINE_OF_ROLL)
    assert code == 1 and expected in out and "doctor: 1 problem" in out, out


@pytest.mark.parametrize(
    ("values", "line", "message"),
    [
        (
            {"actor_train__worker_cls": None, "actor_train__pg_variant": None},
            LINE_OF_ROLL,
            "the loss is ROLL's own: none of our losses is chosen; for ours set actor_train.worker_cls: megatron_rl.hosts.roll_w",
        ),
        ({"rollout_batch_size": "${oc.env:BATCH}"}, LINE_OF_ROLL, "not judged: the value of rollout_batch_size is not known"),
        ({"rollout_batch_size": "${size}"}, LINE_OF_ROLL, "not judged: the value of rollout_batch_size is not known"),
        ({"defaults": ["base"]}, LINE_OF_ROLL, "defaults: ['base'] is not read"),
        ({"actor_train__device_mapping": "gpus()"}, LINE_OF_ROLL, "gspo.prompt_mean, clip"),
        ({}, LINE_OF_ROLL.replace("mine", "$WHERE"), r"examples/\$WHERE/rlvr_config.yaml is not known here"),
        ({"init_kl_coef": 0, "enable_old_logprobs_recompute": False}, LINE_OF_ROLL, "ROLL computes none, so the ratio is 1"),
    ],
)
def test_what_is_not_known_is_said_and_not_judged(checkout, capsys, values, line, message):
    change(checkout, **values)
    code, out = doctor(capsys, line)
    assert code == 0 and re.search(message.replace("[", r"\["), out), out


def test_a_yaml_that_is_not_there_and_one_that_hydra_does_not_find_are_refused(checkout, capsys):
    code, out = doctor(capsys, LINE_OF_ROLL.replace("rlvr_config", "other"))
    assert code == 1 and "examples/mine/other.yaml is no file here" in out and "the folder --config_path beside its script" in out
    code, out = doctor(capsys, LINE_OF_ROLL.replace("mine", str(checkout.parent)))
    assert code == 1 and "relative to the folder of examples/start_rlvr_pipeline.py" in out and "doctor: 1 problem" in out


def test_a_clip_that_never_clips_and_strong_regularisers_get_advice(checkout, capsys):
    values = {"pg_clip_low": 0.2, "pg_clip_high": 0.28, "use_kl_loss": True, "kl_loss_coef": 0.1}
    change(checkout, **values)
    code, out = doctor(capsys, LINE_OF_ROLL)
    assert (
        code == 0
        and "policy_loss=gspo will hardly ever clip" in out
        and "kl_coefficient=0.1 with loss_aggregation=prompt_mean" in out
    )


def test_another_pipeline_of_roll_is_refused(checkout, capsys):
    code, out = doctor(capsys, LINE_OF_ROLL.replace("rlvr_pipeline", "agentic_pipeline"))
    assert code == 1 and "our worker is made for ROLL's RLVR pipeline" in out


# SkyRL

OURS = f"{LOSS_OF_SKYRL}=megatron_rl."


def test_the_host_of_a_line_can_be_named(capsys):
    for name in DOORS:
        assert f"launch line: {name}, " in " ".join(doctor(capsys, f"--host {name} -- python mine.py")[1].split())


def test_a_check_prints_doctors_report_and_starts_nothing(monkeypatch):
    monkeypatch.setenv("MEGATRON_RL_CHECK", "1")
    code, out, _ = started(f"{OURS}gspoo")
    assert code == 1 and "there is no such loss" in " ".join(out.split()) and "trains" not in out


# The chain of explain


def step_of(samples: list[StepSample]) -> list[str]:
    """The step of a case, as explain takes it."""
    masks = ["".join(str(int(kept)) for kept in sample.loss_mask) for sample in samples]
    lengths = [str(len(mask)) for mask in masks]
    prompts = [str(sample.prompt_id) for sample in samples]
    return ["--response-lengths", ",".join(lengths), "--prompt-ids", ",".join(prompts), "--loss-masks", ",".join(masks)]


def chain_of(host: str, case: RowCase, num_microbatches: int) -> dict[str, Any]:
    samples, _ = samples_of(case)
    layout = ["--data-parallel-size", str(case.dp), "--context-parallel-size", str(case.cp)]
    layout += ["--num-microbatches", str(num_microbatches)]
    divisor = ["--loss-aggregation-divisor", str(DIVISOR)] if case.aggregation == "constant" else []
    given = [*step_of(samples), *layout, "--policy-loss", case.loss, "--loss-aggregation", case.aggregation, *divisor]
    return explain_json(*given, "--host", host)


def gradients_of_first_tokens(gradients: list[Tensor], samples: list[StepSample]) -> list[float]:
    """Of each sample's first token that counts, 0 where there is none."""
    places = [next((index for index, kept in enumerate(sample.loss_mask) if kept), None) for sample in samples]
    return [0.0 if place is None else float(values[place]) for place, values in zip(places, gradients, strict=True)]


def by_the_chain(chain: dict[str, Any], samples: list[StepSample]) -> list[float]:
    """A token's gradient under REINFORCE is -A w."""
    return [-sample.advantage * weight for sample, weight in zip(samples, chain["net_weights"], strict=True)]


@pytest.mark.parametrize("aggregation", skyrl_cases.NAMES)
def test_the_chain_of_skyrl_is_what_its_driver_and_worker_do(aggregation, monkeypatch):
    for name, module in skyrl_cases.emulated_skyrl().items():
        monkeypatch.setitem(sys.modules, name, module)
    case = RowCase(loss="reinforce", aggregation=aggregation, dp=2, cp=2, sizes=(4,))
    samples, log_probs = samples_of(case)
    columns, config = skyrl_cases.columns_of(samples), skyrl_cases.config_of(case)
    prompts = [sample.prompt_id for sample in samples]
    starts = [index for index, prompt in enumerate(prompts) if index == 0 or prompt != prompts[index - 1]]
    boundaries = list(zip(starts, [*starts[1:], len(samples)], strict=True))
    mask = columns["loss_mask"]
    scaled = skyrl_cases.emulated_scale(mask, mask, config.loss_reduction, 1, config.max_seq_len, boundaries)
    chain = chain_of("skyrl", case, 2)["chain"]
    assert (
        chain["is_exact"]
        and {"SkyRL": "M dp", "loss": "1", "schedule": "cp/M", "DDP": "1/(dp cp)"}.items() <= stages(chain).items()
    )
    assert chain["factors"][0]["values"] == pytest.approx(scaled.max(-1).values.tolist(), rel=1e-6)
    found = skyrl_cases.run_step(case, samples, log_probs)
    assert gradients_of_first_tokens(found.gradients, samples) == pytest.approx(by_the_chain(chain, samples), rel=1e-5)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_chain_of_roll_is_what_its_strategy_does(aggregation):
    case = roll_cases.Case(loss="reinforce", aggregation=aggregation, sizes=(4,))
    step = roll_cases.make_step(case)
    chain = chain_of("roll", case, 4)["chain"]
    assert chain["is_exact"] and {"ROLL": "M dp", "schedule": "cp/M", "DDP": "1/(dp cp)"}.items() <= stages(chain).items()
    assert [factor["values"][0] for factor in chain["factors"][1:]] == pytest.approx([4, 1 / 4, 1])
    found = roll_cases.run_step(case, step, roll_cases.settings_of(case))
    shown = gradients_of_first_tokens(found.gradients, step.samples)
    assert shown == pytest.approx(by_the_chain(chain, step.samples), rel=1e-5)


STEP = ["--response-lengths", "3,5,8", "--prompt-ids", "a,a,b"]


def test_the_lines_of_roll_are_a_yaml_that_doctor_reads(checkout, capsys):
    given = ["--policy-loss", "grpo", "--loss-aggregation", "constant", "--loss-aggregation-divisor", "8192"]
    given += ["--clip-ratio-low", "0.1", "--clip-ratio-high", "0.3", "--clip-ratio-c", "5", "--kl-coefficient", "0.01"]
    given += ["--entropy-coefficient", "0.02", "--importance-correction", "tis", "--importance-correction-high", "3"]
    lines = explain_json(*STEP, *given, "--host", "roll")["launch_lines"]
    settings: dict[str, Any] = {}
    for line in lines:
        name, value = next(iter(yaml.safe_load(line).items()))
        put(settings, name.split("."), value)
    checkout.write_text(yaml.safe_dump(settings), encoding="utf-8")
    code, out = doctor(capsys, LINE_OF_ROLL)
    assert code == 0 and "grpo.constant, clip 0.1/0.3, clip_ratio_c 5, weight of a token 1/(L N) = 1/(8192 N)" in out, out
    assert "correction tis, for the gap" in out
    config = read(roll.DOOR, roll.settings_of_yaml(settings)).config
    assert (config.kl_coefficient, config.entropy_coefficient, config.importance_correction_high) == (0.01, 0.02, 3)
    assert all(type(value) is str for value in settings["actor_train"]["system_envs"].values())


def test_the_lines_of_skyrl_are_settings_that_doctor_reads(capsys):
    given = ["--policy-loss", "sapo", "--loss-aggregation", "constant", "--loss-aggregation-divisor", "8192"]
    found = explain_json(*STEP, *given, "--sapo-temperature-negative", "1.5", "--host", "skyrl")
    code, out = doctor(capsys, " ".join([f"python -m {skyrl.ENTRY}", *found["launch_lines"]]))
    assert code == 0 and "megatron_rl.sapo.constant" in out and "8192" in out and "1.5" in out, out


@pytest.mark.parametrize("host", DOOR_NAMES)
def test_a_large_divisor_keeps_its_digits(host):
    given = ["--loss-aggregation", "constant", "--loss-aggregation-divisor", "1234567"]
    given += ONE_ROW_FLAG * must_say_one_row(DOORS[host], "constant")
    assert any("1234567" in line for line in explain_json(*STEP, *given, "--host", host)["launch_lines"])


@pytest.mark.parametrize(
    ("host", "word"), [("nemo_rl", "loss_fn.reference_policy_kl_penalty=0"), ("skyrl", "trainer.algorithm.use_kl_loss=False")]
)
def test_settings_without_kl_turn_off_the_term_that_is_the_hosts_default(host, word):
    assert word in explain_json(*STEP, "--host", host)["launch_lines"]
    assert word not in explain_json(*STEP, "--host", host, "--kl-coefficient", "0.1")["launch_lines"]


REJECTED = ["--importance-correction", "icepop", "--rejected-tokens", "dropped"]


@pytest.mark.parametrize(
    ("host", "given", "message"),
    [
        ("roll", ["--policy-temperature", "0.7"], "--policy-temperature=0.7 has no effect in ROLL"),
        ("nemo_rl", ["--entropy-coefficient", "0.1"], "--entropy-coefficient=0.1 has no effect in NeMo-RL"),
        ("skyrl", ["--entropy-coefficient", "0.1"], "--entropy-coefficient=0.1 has no effect in SkyRL"),
        *(
            (host, REJECTED, f"has no effect in {name}: it counts the step")
            for host, name in (("nemo_rl", "NeMo-RL"), ("roll", "ROLL"))
        ),
        ("skyrl", ["--kl-coefficient", "0.1", "--kl-estimator", "unbiased"], "--kl-estimator unbiased: SkyRL computes"),
        (
            "prime_rl",
            ["--loss-aggregation", "sample_mean"],
            "give --one-sample-per-rollout here, and --trainer.loss.kwargs.one-sample-per-rollout True there",
        ),
        ("prime_rl", ["--loss-aggregation", "token_mean", *ONE_ROW_FLAG], "one_sample_per_rollout=true has no effect: token_mean"),
        ("skyrl", ["--policy-loss", "dro"], "dro: it is not proportional to the advantage"),
    ],
)
def test_explain_refuses_what_the_host_decides_itself(host, given, message):
    code, out, _ = explain(*STEP, *given, "--host", host)
    assert code == 1 and f"REFUSED: {message}" in out or message in out, out


@pytest.mark.parametrize("host", ["nemo_rl", "roll", "skyrl"])
def test_the_per_token_contract_is_refused_where_it_is_no_setting(host):
    code, _, error = explain(*STEP, "--host", host, "--calculate-per-token-loss")
    assert code == 2 and f"--calculate-per-token-loss with --host {host}: " in error


# Checkouts


def defaults_of(source: str, name: str) -> dict[str, Any]:
    """The fields of a dataclass and their defaults, from its text."""
    (owner,) = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef) and node.name == name]
    found: dict[str, Any] = {}
    for node in owner.body:
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None):
            continue
        value = node.value
        if isinstance(value, ast.Call):
            value = next((keyword.value for keyword in value.keywords if keyword.arg == "default"), ast.Constant(...))
        try:
            found[node.target.id] = ast.literal_eval(value)
        except ValueError:
            continue
    return found


@pytest.mark.host("ROLL_ROOT")
def test_the_defaults_of_roll_are_its_own():
    base, worker = ROLL.source("roll/configs/base_config.py"), ROLL.source("roll/configs/worker_config.py")
    rlvr, training = (
        ROLL.source("roll/pipeline/rlvr/rlvr_config.py"),
        ROLL.source("roll/configs/training_args.py"),
    )
    own = defaults_of(base, "BaseConfig") | defaults_of(base, "PPOConfig") | defaults_of(rlvr, "RLVRConfig")
    sources = {
        roll_sizes.TRAINING: defaults_of(training, "TrainingArguments"),
        roll.TRAIN: defaults_of(worker, "WorkerConfig"),
        "": own,
    }
    for name, default in roll.DOOR.all_defaults.items():
        prefix = next(prefix for prefix in sources if name.startswith(prefix))
        if (last := name.removeprefix(prefix)).count(".") == 0:
            assert sources[prefix][last] == default, name
    assert defaults_of(worker, "StrategyArguments")["strategy_name"] == roll.DOOR.all_defaults[f"{roll.STRATEGY_ARGS}strategy_name"]
    assert not defaults_of(base, "TrainInferISWeightConfig")["enabled"]


@pytest.mark.host("ROLL_ROOT")
def test_doctor_approves_of_our_lines_over_rolls_own_yaml(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "examples" / "mine"
    folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    own = ROLL.path("examples", "qwen2.5-7B-rlvr_megatron", "rlvr_config.yaml")
    settings, ours = (yaml.safe_load(path.read_text(encoding="utf-8")) for path in (own, OUR_YAML))
    for name, value in ours.items():
        settings[name] = settings[name] | value if isinstance(value, dict) else value
    (folder / "rlvr_config.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    code, out = doctor(capsys, LINE_OF_ROLL)
    assert code == 0 and "gspo.prompt_mean, clip 0.0003/0.0004" in out, out
    assert "actor_infer.generating_args.top_p: 0.99, actor_infer.generating_args.top_k: 100: the sampler keeps a part" in out, out


@pytest.mark.host("SKYRL_ROOT")
def test_the_defaults_of_skyrl_are_its_own():
    source = SKYRL.source("skyrl/train/config/config.py")
    own = defaults_of(source, "AlgorithmConfig")
    own |= {f"sapo.{name}": value for name, value in defaults_of(source, "SAPOConfig").items()}
    theirs = {name.removeprefix(skyrl.ALGORITHM): value for name, value in skyrl.DOOR.all_defaults.items()}
    for name in (skyrl.STEP_WISE, skyrl.LOG_PROBS.removeprefix(skyrl.ALGORITHM), skyrl.STRATEGY):  # of ours, or of another section
        theirs.pop(name)
    assert {name: own[name] for name in theirs} == theirs and own["max_seq_len"] is None
    switches = (*skyrl.SWITCHES, *skyrl.MASK_SWITCHES)
    assert dict.fromkeys(switches).items() <= defaults_of(source, "OffPolicyCorrectionConfig").items()
    utilities = SKYRL.source("skyrl/backends/skyrl_train/utils/off_policy_correction_utils.py")
    enabled = utilities[utilities.index("def off_policy_correction_enabled") : utilities.index("def compute_tis_ratio")]
    assert set(re.findall(r"off_policy_correction\.(\w+)", enabled)) == set(switches)
