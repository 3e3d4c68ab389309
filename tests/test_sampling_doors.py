"""Samplers that keep a part of the vocabulary: what each host's door says of it, by doctor and at start."""

from __future__ import annotations

import re
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import roll_cases
import yaml

from megatron_rl.__main__ import main
from megatron_rl.config import PolicyLossConfig
from megatron_rl.errors import ConfigError
from megatron_rl.hosts import DOOR_NAMES, HOST_NAMES, dense_rows, megatron_lm, nemo_rl, roll, verl, verl_plugin
from megatron_rl.hosts.door import Rollouts
from megatron_rl.hosts.doors import DOORS
from megatron_rl.hosts.sampling import SAMPLERS, judge_sampling
from megatron_rl.hosts.settings import UNKNOWN
from megatron_rl.step_counts import StepTotals

VERL = (
    "python3 -m verl.trainer.main_ppo data.train_batch_size=256 actor_rollout_ref.actor.ppo_mini_batch_size=256 "
    "actor_rollout_ref.actor.policy_loss._target_=megatron_rl.hosts.verl_config.PolicyLoss "
)
UNCUT = "algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.rollout_is_threshold=1000000000.0 "
GRPO, DPPO = (f"actor_rollout_ref.actor.policy_loss.loss_mode=megatron_rl.{name}.token_mean " for name in ("grpo", "dppo_tv"))
ICEPOP = f"{GRPO}{UNCUT}+actor_rollout_ref.actor.policy_loss.importance_correction=icepop "
TOP_P, RAW = "actor_rollout_ref.rollout.top_p=0.8 ", "actor_rollout_ref.rollout.logprobs_mode=raw_logprobs "
NEMO = "python3 -m megatron_rl.hosts.launch examples/run_grpo.py ++loss_fn.megatron_rl={}.token_mean "
NEMO_TIS = "++loss_fn.megatron_rl_importance_correction=tis "
SKYRL = (
    "python3 -m skyrl.train.entrypoints.main_base trainer.override_entrypoint=megatron_rl.hosts.skyrl "
    "trainer.algorithm.policy_loss_type=megatron_rl.grpo trainer.strategy=megatron "
)
SKYRL_TIS, SKYRL_TOP_P = "megatron_rl.importance_correction=tis ", "generator.sampling_params.top_p=0.8 "
SKYRL_KEPT = "generator.inference_engine.engine_init_kwargs.logprobs_mode=processed_logprobs "
SKYRL_REPLAY = (
    "trainer.algorithm.enable_sample_support_replay=true generator.inference_engine.enable_return_sample_support_set=true "
)
NEMO_REPLAY = "policy.generation.top_p=0.8 policy.generation.top_k=50 ++policy.generation.vllm_kwargs.return_sampling_mask=true "
ROLLOUTS = (
    "python3 -m megatron_rl.hosts.launch train.py --loss-type custom_loss "
    "--custom-loss-function-path megatron_rl.hooks.custom_loss --custom-megatron-init-path megatron_rl.hooks.custom_megatron_init "
)
TRAIN_RL = "python train_rl.py --perform-rl-step --rl-use-sequence-packing "
CORRECTED = "--rl-inference-logprobs-is-correction --rl-importance-sampling-truncation-coef 2 "
KEPT = "--inference-dynamic-batching-logprobs-mode processed_logprobs "
PROBLEM, NOTE = "PROBLEM", "note"
# line -> (PROBLEM, note, or nothing of sampling; what is said)
LINES: dict[str, tuple[str, str | None, str]] = {
    "verl, icepop": (
        f"{VERL}{ICEPOP}{TOP_P}actor_rollout_ref.rollout.top_k=20",
        PROBLEM,
        "vllm .*processed_logprobs.* kept; .*icepop",
    ),
    "verl, dppo": (
        f"{VERL}{DPPO}{UNCUT}{TOP_P}",
        PROBLEM,
        "beside the policy loss dppo_tv and .*set actor_rollout_ref.rollout.top_p=1",
    ),
    "verl, its own weights": (f"{VERL}{GRPO}{UNCUT}{TOP_P}", PROBLEM, "beside algorithm.rollout_correction.rollout_is=token: "),
    "verl, its own rejection": (
        f"{VERL}{GRPO}algorithm.rollout_correction.rollout_rs=token_k1 {TOP_P}",
        PROBLEM,
        "rollout_rs=token_k1",
    ),
    "verl, the rollout as anchor": (
        f"{VERL}{GRPO}algorithm.rollout_correction.bypass_mode=true {TOP_P}",
        PROBLEM,
        "beside algorithm.rollout_correction.bypass_mode",
    ),
    "verl, raw": (
        f"{VERL}{ICEPOP}{TOP_P}{RAW}",
        NOTE,
        "over the whole vocabulary, so .* is not off by the kept mass, but the policy",
    ),
    "verl, SGLang": (f"{VERL}{ICEPOP}{TOP_P}actor_rollout_ref.rollout.name=sglang", NOTE, "sglang are over the whole vocabulary"),
    "verl, another engine": (f"{VERL}{ICEPOP}{TOP_P}actor_rollout_ref.rollout.name=trtllm", PROBLEM, "trtllm .*cannot be known"),
    "verl, the engine's own": (
        f"{VERL}{ICEPOP}{TOP_P}{RAW}+actor_rollout_ref.rollout.engine_kwargs.vllm.logprobs_mode=processed_logprobs",
        PROBLEM,
        "engine_kwargs.vllm.logprobs_mode=processed_logprobs",
    ),
    "verl, no correction": (f"{VERL}{GRPO}{TOP_P}", NOTE, "the ratio of the loss is right, but the policy that samples is another"),
    "verl, unknown": (f"{VERL}{ICEPOP}actor_rollout_ref.rollout.top_p=$P", NOTE, "top_p: not known here; beside .* it must be off"),
    "verl, another file": (
        f"{VERL}{ICEPOP}{TOP_P}actor_rollout_ref.rollout.top_k=-1 --config-name mine",
        NOTE,
        "name is not known here: importance_corr",
    ),
    "verl, a penalty": (
        f"{VERL}{ICEPOP}actor_rollout_ref.rollout.repetition_penalty=1.1",
        PROBLEM,
        "repetition_penalty=1.1 beside importance_correction=icepop and .*set actor_rollout_ref.rollout.repetition_penalty=1, or",
    ),
    "verl, a penalty alone": (f"{VERL}{GRPO}actor_rollout_ref.rollout.repetition_penalty=1.1", NOTE, "another one than the policy"),
    "verl, validation": (f"{VERL}{ICEPOP}actor_rollout_ref.rollout.val_kwargs.top_p=0.7", None, ""),
    "verl, off": (f"{VERL}{ICEPOP}actor_rollout_ref.rollout.top_p=1.0 actor_rollout_ref.rollout.top_k=-1", None, ""),
    "NeMo-RL, tis": (
        f"{NEMO.format('grpo')}{NEMO_TIS}policy.generation.top_p=0.8",
        PROBLEM,
        "beside importance_correction=tis: .*0.0",
    ),
    "NeMo-RL, gspo": (
        f"{NEMO.format('gspo')}policy.generation.top_k=20",
        PROBLEM,
        "beside the policy loss gspo, whose ratio is of more",
    ),
    "NeMo-RL, raw": (
        f"{NEMO.format('grpo')}policy.generation.top_p=0.8 policy.generation.vllm_cfg.logprobs_mode=raw_logprobs",
        PROBLEM,
        "cannot be told from a sure one: set policy.generation.vllm_cfg.logprobs_mode=processed_logprobs",
    ),
    "NeMo-RL, SGLang": (
        f"{NEMO.format('grpo')}policy.generation.top_p=0.8 policy.generation.backend=sglang",
        PROBLEM,
        "sure one: set policy.generation.top_p=1",
    ),
    "NeMo-RL, unbiased KL": (
        f"{NEMO.format('grpo')}++loss_fn.megatron_rl_kl_estimator=unbiased loss_fn.reference_policy_kl_penalty=0.01 "
        "policy.generation.top_p=0.8",
        PROBLEM,
        "beside ..loss_fn.megatron_rl_kl_estimator=unbiased",
    ),
    "NeMo-RL, no correction": (f"{NEMO.format('grpo')}policy.generation.top_p=0.8", NOTE, "its share is unscored_token_fraction"),
    "NeMo-RL, its own replay": (
        f"{NEMO.format('gspo')}{NEMO_TIS}{NEMO_REPLAY}",
        NOTE,
        "return_sampling_mask=True: right where the trainer has nemo_rl.*:SamplingMask, and none is installed here; else set",
    ),
    "NeMo-RL, its own replay of a draft": (
        f"{NEMO.format('grpo')}{NEMO_REPLAY}++policy.generation.vllm_kwargs.speculative_config.method=mtp",
        PROBLEM,
        "speculative_config.* with policy.generation.vllm_kwargs.return_sampling_mask=True: ",
    ),
    "NeMo-RL, its own replay and the ratio of a KL": (
        f"{NEMO.format('grpo')}++loss_fn.megatron_rl_kl_estimator=unbiased loss_fn.reference_policy_kl_penalty=0.01 {NEMO_REPLAY}",
        PROBLEM,
        "kl_estimator=unbiased multiplies a KL over the whole vocabulary by a ratio among the sets",
    ),
    "NeMo-RL, off": (f"{NEMO.format('gspo')}{NEMO_TIS}policy.generation.top_p=1 policy.generation.top_k=null", None, ""),
    "SkyRL, tis": (f"{SKYRL}{SKYRL_TIS}{SKYRL_TOP_P}", NOTE, "vLLM .*raw_logprobs. are over the whole vocabulary"),
    "SkyRL, processed": (f"{SKYRL}{SKYRL_TIS}{SKYRL_TOP_P}{SKYRL_KEPT}", PROBLEM, "beside importance_correction=tis"),
    "SkyRL, its own": (
        f"{SKYRL}generator.sampling_params.min_p=0.1 trainer.algorithm.off_policy_correction.tis_ratio_type=token {SKYRL_KEPT}",
        PROBLEM,
        "min_p=0.1 beside trainer.algorithm.off_policy_correction: ",
    ),
    "SkyRL, its own replay": (f"{SKYRL}{SKYRL_TIS}{SKYRL_TOP_P}{SKYRL_KEPT}{SKYRL_REPLAY}", None, ""),
    "SkyRL, its own replay, compared with nobody": (f"{SKYRL}{SKYRL_TOP_P}{SKYRL_REPLAY}", None, ""),
    "SkyRL, its own replay of the whole vocabulary": (f"{SKYRL}{SKYRL_TIS}{SKYRL_REPLAY}trainer.mtp.enabled=true", None, ""),
    "SkyRL, its own replay of raw scores": (
        f"{SKYRL}{SKYRL_TIS}{SKYRL_TOP_P}{SKYRL_REPLAY}",
        PROBLEM,
        "enable_sample_support_replay=True beside importance_correction=tis: .*set .*logprobs_mode=processed_logprobs, or remove",
    ),
    "SkyRL, its own replay of a draft": (
        f"{SKYRL}{SKYRL_TOP_P}{SKYRL_REPLAY}trainer.mtp.enabled=true",
        PROBLEM,
        "trainer.mtp.enabled=True with trainer.algorithm.enable_sample_support_replay=True: .*remove it, or sample from the whole",
    ),
    "SkyRL, its own replay with a penalty": (
        f"{SKYRL}{SKYRL_TOP_P}{SKYRL_REPLAY}generator.sampling_params.additional_kwargs.repetition_penalty=1.1",
        PROBLEM,
        "repetition_penalty=1.1 with trainer.algorithm.enable_sample_support_replay=True: the sampler draws from logits that this",
    ),
    "SkyRL, evaluation": (f"{SKYRL}{SKYRL_TIS}{SKYRL_KEPT}generator.eval_sampling_params.top_p=0.7", None, ""),
    "SkyRL, off": (f"{SKYRL}{SKYRL_TIS}generator.sampling_params.top_p=1.0 {SKYRL_KEPT}", None, ""),
    "slime, tis": (f"{ROLLOUTS}--use-tis --rollout-top-p 0.8", PROBLEM, "so that the ratio is off by the kept mass"),
    "slime, top-k": (f"{ROLLOUTS}--rollout-top-k 20", NOTE, "the ratio of the loss is right"),
    "slime, off": (f"{ROLLOUTS}--use-tis --rollout-top-p 1.0", None, ""),
    "miles, tis": (f"{ROLLOUTS}--use-tis --rollout-top-p 0.8", PROBLEM, "SGLang .* cannot be known here; .*--use-tis"),
    "miles, no correction": (f"{ROLLOUTS}--rollout-top-p 0.8", NOTE, "the ratio of the loss is right"),
    "Megatron-LM, kept": (f"{TRAIN_RL}{CORRECTED}{KEPT}--rl-default-top-p 0.9", PROBLEM, "--rl-default-top-p 0.9 beside --imp"),
    "Megatron-LM, raw": (f"{TRAIN_RL}{CORRECTED}--rl-default-top-p 0.9", NOTE, "raw_logprobs. are over the whole vocabulary"),
    "Megatron-LM, off": (f"{TRAIN_RL}{CORRECTED}{KEPT}--rl-default-top-p 1.0 --rl-default-top-k -1", None, ""),
}


HOST_OF = {"slime": "slime", "miles": "miles", "Megatron-LM": "megatron_lm"}


def doctor(capsys, line: str, host: str | None = None) -> tuple[int, list[tuple[str, str]]]:
    """(exit code, (status, text) of each row)."""
    of_host = [] if host is None else ["--host", host]
    code = main(["doctor", "--launch-only", *of_host, "--", *line.split()])
    rows = [row.strip().split(" ", 1) for row in capsys.readouterr().out.splitlines()]
    return code, [(row[0], row[-1]) for row in rows]


def check_rows(code: int, rows: list[tuple[str, str]], status: str | None, says: str) -> None:
    found = [
        (row, text)
        for row, text in rows
        if re.search("keeps a part|kept|must be off|NeMo-RL's trainer|that this changes|of a draft|right where|ratio among", text)
    ]
    assert code == (status == PROBLEM), rows
    assert [row for row, _ in found] == [status] * (status is not None), rows
    assert not says or re.search(says, found[0][1]), found


@pytest.mark.parametrize("name", LINES)
def test_doctor_refuses_warns_or_says_nothing(name, tmp_path, monkeypatch, capsys):
    """FB-114, FB-161: refused beside what reads the sampler's log-probabilities, warned of otherwise, from any folder."""
    monkeypatch.chdir(tmp_path)
    line, status, says = LINES[name]
    check_rows(*doctor(capsys, line, HOST_OF.get(name.partition(",")[0])), status, says)


MARK = "logits_sampling_utils.py"

OF_ROLL = [
    # generating_args, strategy_args, further settings, what doctor says, the text
    pytest.param({}, {}, {}, NOTE, "top_p: 0.7, .*top_k: 50: .*another one", id="its own defaults"),
    pytest.param({"top_p": 0.8, "top_k": -1}, {}, "tis", NOTE, "vllm .*raw_logprobs. are over the whole", id="raw"),
    pytest.param({"top_p": 0.8, "top_k": -1}, {"strategy_name": "sglang"}, "tis", NOTE, "sglang are over the whole", id="SGLang"),
    pytest.param(
        *({"top_p": 0.8, "top_k": -1}, {"strategy_name": "vllm", "strategy_config": {"logprobs_mode": "processed_logprobs"}}),
        *("tis", PROBLEM, "top_p: 0.8 beside importance_correction=tis: .*strategy_config.logprobs_mode: processed_logprobs"),
        id="processed",
    ),
    pytest.param(
        *({"top_p": 1.0, "top_k": 0}, {"strategy_config": {"logprobs_mode": "processed_logprobs"}}, "tis", None, ""), id="off"
    ),
]


@pytest.mark.parametrize(("generating", "strategy", "correction", "status", "says"), OF_ROLL)
def test_doctor_reads_the_sampling_of_a_yaml(generating, strategy, correction, status, says, tmp_path, monkeypatch, capsys):
    """FB-114: ROLL truncates where its YAML says nothing."""
    folder = tmp_path / "examples" / "mine"
    folder.mkdir(parents=True)
    settings = yaml.safe_load((Path(__file__).parents[1] / "examples" / "roll" / "gspo_prompt_mean.yaml").read_text())
    settings["actor_infer"] = {"generating_args": generating, "strategy_args": strategy}
    if correction:
        settings["actor_train"]["system_envs"] = {"MEGATRON_RL_IMPORTANCE_CORRECTION": correction}
    (folder / "rlvr_config.yaml").write_text(yaml.safe_dump(settings))
    monkeypatch.chdir(tmp_path)
    line = "python examples/start_rlvr_pipeline.py --config_path mine --config_name rlvr_config"
    check_rows(*doctor(capsys, line), status, says)


# At start: what a door is given where it stands, and not what a line says.


def test_verls_plugin_ends_such_a_launch_and_warns_of_the_other(capsys):
    """FB-114: the line where the process starts, and the whole config where verl validates it."""
    words = f"{ICEPOP}{TOP_P}".split()
    with pytest.raises(SystemExit, match="actor_rollout_ref.rollout.top_p=0.8 beside importance_correction=icepop"):
        verl_plugin.refuse_bad_line(words)
    validated = []
    checks: Any = Namespace(validate_config=validated.append)
    verl_plugin.judge_files(checks)
    config: dict[str, Any] = {"data": {"train_batch_size": 256}, "algorithm": {}}
    rollout: dict[str, Any] = {"top_p": 0.8, "top_k": -1, "logprobs_mode": "processed_logprobs", "name": "vllm"}
    config["actor_rollout_ref"] = {
        "actor": {"ppo_mini_batch_size": 256, "policy_loss": {"loss_mode": "megatron_rl.grpo.token_mean"}},
        "rollout": rollout,
    }
    checks.validate_config(config)
    assert validated == [config] and "the policy that samples is another one" in capsys.readouterr().err
    config["algorithm"]["rollout_correction"] = {"rollout_is": "token"}
    with pytest.raises(SystemExit, match="rollout.top_p=0.8 beside algorithm.rollout_correction.rollout_is=token"):
        checks.validate_config(config)
    rollout["top_p"] = 1.0
    checks.validate_config(config)
    assert capsys.readouterr().err == ""


def test_train_rls_arguments_are_judged_when_they_are_parsed():
    args: dict[str, Any] = {
        **{"loss_aggregation": "token_mean", "perform_rl_step": True, "rl_use_sequence_packing": True},
        **{"rl_inference_logprobs_is_correction": True, "rl_importance_sampling_truncation_coef": 2.0},
        **{"rl_default_top_p": 0.9, "rl_default_top_k": -1},
    }
    (warning,) = megatron_lm.launch_warnings(megatron_lm.megatron_lm_config(Namespace(**args)), Namespace(**args))
    assert "--rl-default-top-p 0.9: " in warning and "is not off by the kept mass" in warning
    args["inference_dynamic_batching_logprobs_mode"] = "processed_logprobs"
    with pytest.raises(ConfigError, match="--rl-default-top-p 0.9 beside --importance-correction tis: .*--rl-default-top-p 0"):
        megatron_lm.megatron_lm_config(Namespace(**args))
    args["rl_inference_logprobs_is_correction"] = False
    (warning,) = megatron_lm.launch_warnings(megatron_lm.megatron_lm_config(Namespace(**args)), Namespace(**args))
    assert "the ratio of the loss is right" in warning
    args["rl_default_top_p"] = 0.0
    assert megatron_lm.launch_warnings(megatron_lm.megatron_lm_config(Namespace(**args)), Namespace(**args)) == []


def test_rolls_worker_judges_the_sampler_and_says_it_at_the_first_step(capsys):
    """FB-114"""
    kept = SimpleNamespace(strategy_name="vllm", strategy_config={"logprobs_mode": "processed_logprobs"})
    infer = SimpleNamespace(generating_args=SimpleNamespace(top_p=0.8, top_k=-1), strategy_args=kept)
    pipeline = roll_cases.pipeline_config(actor_infer=infer)
    settings = roll.read_settings(roll_cases.worker_config("grpo.token_mean"), pipeline)
    loss = roll_cases.loss_of(settings)
    for _ in range(2):
        loss.tell(StepTotals(num_samples=16, num_prompts=None, num_tokens=64))
    error = capsys.readouterr().err
    assert error.count("actor_infer.generating_args.top_p: 0.8: the sampler keeps a part") == 1
    corrected = roll_cases.worker_config("grpo.token_mean", MEGATRON_RL_IMPORTANCE_CORRECTION="tis")
    with pytest.raises(ConfigError, match="top_p: 0.8 beside importance_correction=tis: .*top_p: 1, or .*mode: raw_logprobs"):
        roll.read_settings(corrected, pipeline)
    pipeline.train_infer_correction.is_weight.enabled = True
    with pytest.raises(ConfigError, match="top_p: 0.8 beside train_infer_correction.is_weight: "):
        roll.read_settings(roll_cases.worker_config("grpo.token_mean"), pipeline)


# What a sample is: whether a rollout that comes in several rows weighs more.

OF_SAMPLES = {
    "verl": (
        f"{VERL}{GRPO.replace('token_mean', 'sample_mean')}",
        r"weight of a token 1/\(N m_i\).* a row is a whole rollout; several rows of one uid and session_id would",
    ),
    "verl, loops of the user": (
        f"{VERL}{GRPO.replace('token_mean', 'sample_mean')}actor_rollout_ref.rollout.agent.agent_loop_config_path=mine.yaml",
        r"weight of a token 1/\(R M_j\) .*a rollout is the rows of one uid and session_id, and counts once .an agent loop with",
    ),
    "verl, constant, a loop of the user": (
        f"{VERL}{GRPO.replace('token_mean', 'constant')}actor_rollout_ref.actor.loss_scale_factor=8 "
        "actor_rollout_ref.rollout.agent.default_agent_loop=mine",
        r"1/\(L R\) = 1/\(8 R\) .*a rollout is the rows of one uid and session_id, and counts once",
    ),
    "verl, token_mean": (
        f"{VERL}{GRPO}",
        "a row is a whole rollout; several rows of one uid and session_id would weigh as one row",
    ),
    "verl, token_mean, a loop of the user": (
        f"{VERL}{GRPO}actor_rollout_ref.rollout.agent.default_agent_loop=mine",
        "k rows .an agent loop with several outputs. weighs as in one",
    ),
    "NeMo-RL": (NEMO.format("grpo"), "a row is a whole rollout"),
    "SkyRL": (f"{SKYRL}trainer.algorithm.loss_reduction=sequence_mean", "a row is a whole rollout"),
    "SkyRL, step-wise": (
        f"{SKYRL}trainer.algorithm.loss_reduction=sequence_mean generator.step_wise_trajectories=true",
        r"1/\(R M_j\), in the advantages .*a rollout is the rows of one trajectory, and counts once .generator.step_wise",
    ),
    "slime": (f"{ROLLOUTS}--global-batch-size 64", "step of 64 rollouts .one of several samples counts once."),
    "miles": (f"{ROLLOUTS}--global-batch-size 64", "step of 64 rollouts .one of several samples counts once."),
}


@pytest.mark.parametrize("name", OF_SAMPLES)
def test_doctor_says_what_a_rollout_of_several_rows_weighs(name, tmp_path, monkeypatch, capsys):
    """FB-141"""
    monkeypatch.chdir(tmp_path)
    line, says = OF_SAMPLES[name]
    code, rows = doctor(capsys, line, HOST_OF.get(name.partition(",")[0]))
    assert code == 0 and re.search(says, " ".join(text for _, text in rows)), rows


@pytest.mark.parametrize(
    ("aggregation", "rollouts", "says"),
    [
        ("sample_mean", Rollouts(), "1/(N m_i), in the advantages | a row is a whole rollout |"),
        (
            "sample_mean",
            Rollouts(several="turns", ids="name"),
            "1/(R M_j), in the advantages | a rollout is the rows of one name, and",
        ),
        ("sample_mean", Rollouts(several="turns"), "| a row is a whole rollout, as one_sample_per_rollout says |"),
        ("prompt_mean", Rollouts(several="turns"), "| a rollout that comes in k rows (turns) weighs as in one |"),
    ],
)
def test_the_first_step_says_what_a_rollout_weighs(aggregation, rollouts, says):
    """FB-141"""
    assert says in dense_rows.step_line("", PolicyLossConfig(loss_aggregation=aggregation), None, "none", rollouts=rollouts)


@pytest.mark.parametrize(
    ("text", "says"), [("class SamplingMask:", None), ("class Other:", "has no .*SamplingMask, and keeps tok")]
)
def test_nemo_rls_replay_is_looked_for_where_it_is_installed(text, says, tmp_path, monkeypatch):
    """A release that cannot replay takes the setting for one of vLLM, and filters by its own logits."""
    package = tmp_path / "nemo_rl" / "algorithms"
    package.mkdir(parents=True)
    for file, content in ((package.parent / "__init__.py", ""), (package / "__init__.py", ""), (package / MARK, text)):
        file.write_text(content)
    monkeypatch.syspath_prepend(str(tmp_path))
    given = {"policy.generation.top_p": 0.8, "policy.generation.vllm_kwargs.return_sampling_mask": True}
    processed = {"policy.generation.backend": "vllm", "policy.generation.vllm_cfg.logprobs_mode": "processed_logprobs"}
    with mock.patch.dict(sys.modules):
        for name in [name for name in sys.modules if name.partition(".")[0] == "nemo_rl"]:
            del sys.modules[name]
        found = judge_sampling(nemo_rl.DOOR.sampler, (given | processed).get, ["the policy loss gspo"])
    assert not found.warnings and not found.keeps_a_part  # a score of 0.0 is that of a set of one id
    assert found.problems == () if says is None else re.search(says, found.problems[0])


def test_each_host_has_a_row():
    assert {*SAMPLERS, *DOORS} == {*HOST_NAMES, *DOOR_NAMES}


def test_a_value_that_is_not_known_is_said_beside_what_reads_it_alone():
    """Of the filters, the engine and its kind: a file may have them, which is judged where it is read."""
    unknown: Callable[[str], Any] = lambda name: UNKNOWN  # noqa: E731
    assert judge_sampling(verl.DOOR.sampler, unknown, []).warnings == ()
    assert "not known here" in judge_sampling(verl.DOOR.sampler, unknown, ["a correction"]).warnings[0]
    assert "not known here" in judge_sampling(nemo_rl.DOOR.sampler, unknown, []).warnings[0]
    for name in ("name", "logprobs_mode"):
        half = {"actor_rollout_ref.rollout.top_p": 0.8, f"actor_rollout_ref.rollout.{name}": UNKNOWN}
        found = judge_sampling(verl.DOOR.sampler, half.get, ["a correction"])
        assert found.problems == () and f"{name} is not known here: a correction is right only where" in found.warnings[0]
    half = {"policy.generation.top_p": 0.8, "policy.generation.backend": UNKNOWN}
    assert judge_sampling(nemo_rl.DOOR.sampler, half.get, []).problems == ()
