"""Losses that a model adds, and experts, on launch lines of trainers that settings configure, whichever loss trains."""

from __future__ import annotations

import os
from types import SimpleNamespace

import nemo_rl_cases
import pytest
import roll_cases

from megatron_rl.__main__ import main
from megatron_rl.errors import ConfigError
from megatron_rl.hosts import nemo_rl, roll, skyrl, verl, verl_loss, verl_step
from megatron_rl.hosts.settings import Settings
from megatron_rl.hosts.verl import ACTOR, LOSS_MODE, MTP

OVERRIDES = f"{ACTOR}megatron.override_transformer_config."
VERL = ["python", "-m", verl.MAIN, "model_engine=megatron", "actor_rollout_ref.actor.loss_agg_mode=token-mean"]
PER_TOKEN_OF_VERL = [f"+{OVERRIDES}calculate_per_token_loss=True"]
OURS = f"{LOSS_MODE}=megatron_rl.gspo.sample_mean"
MEAN = "Megatron takes a mean over micro-batches and ranks"


def rows_of(capsys, *line: str) -> tuple[int, dict[str, tuple[str, str]], str]:
    """(exit code, subject -> (status, text), last line)."""
    code = main(["doctor", "--launch-only", "--", *line])
    said = capsys.readouterr().out.splitlines()
    words = [row.split(None, 2) for row in said if row.startswith("  ")]
    return code, {subject: (status, text) for status, subject, text in words}, said[-1]


SAID = [
    ({"moe_z_loss_coeff": 0.001}, "note", f"moe_z_loss_coeff=0.001: {MEAN}"),
    ({"moe_z_loss_coeff": 0.0}, "ok", "off"),
    ({"moe_aux_loss_coeff": 0.01}, "ok", "off"),  # verl's type of load balancing is none
    ({"moe_aux_loss_coeff": 0.01, "moe_router_load_balancing_type": "aux_loss"}, "note", f"=0.01 of aux_loss: {MEAN}"),
    ({"moe_aux_loss_coeff": "$COEFFICIENT"}, "note", "not known here"),
    ({"moe_expert_capacity_factor": 1.0}, "PROBLEM", "which tokens an expert drops depends on the micro-batch"),
    ({"moe_input_jitter_eps": 0.1}, "PROBLEM", "random noise in the router"),
    ({"dsa_indexer_loss_coeff": 0.1}, "note", f"dsa_indexer_loss_coeff=0.1: {MEAN}"),
]


@pytest.mark.parametrize("loss", [(), (OURS,)], ids=["verl's", "ours"])
@pytest.mark.parametrize(("fields", "status", "said"), SAID)
def test_a_line_of_verl_has_a_row_for_each_field_of_the_model(fields, status, said, loss, capsys):
    line = [*VERL, *loss, *(f"+{OVERRIDES}{name}={value}" for name, value in fields.items())]
    code, rows, last = rows_of(capsys, *line)
    found = rows[f"{OVERRIDES}{next(iter(fields))}"]
    assert found[0] == status and said in found[1], rows
    assert code == (status == "PROBLEM")
    if status == "note" and not loss:
        assert last.endswith("see the notes")


def test_a_type_without_a_coefficient_takes_the_one_of_the_checkpoint(capsys):
    code, rows, _ = rows_of(capsys, *VERL, f"+{OVERRIDES}moe_router_load_balancing_type=aux_loss")
    status, text = rows[f"{OVERRIDES}moe_aux_loss_coeff"]
    assert (code, status) == (0, "note") and "router_aux_loss_coef of the checkpoint" in text


def test_verls_own_per_token_contract_divides_by_what_routers_multiply_with(capsys):
    """transformer_impl.py, postprocess_micro_batch_func: num_tokens is the tokens that the model is given."""
    line = [*VERL, f"+{OVERRIDES}moe_z_loss_coeff=0.001", f"+{OVERRIDES}calculate_per_token_loss=True"]
    assert rows_of(capsys, *line)[1][f"{OVERRIDES}moe_z_loss_coeff"][0] == "ok"
    line += [f"+{OVERRIDES}moe_router_load_balancing_type=aux_loss", f"+{OVERRIDES}moe_aux_loss_coeff=0.01"]
    status, text = rows_of(capsys, *line)[1][f"{OVERRIDES}moe_aux_loss_coeff"]
    assert status == "note" and "changes with what shares one" in text


@pytest.mark.parametrize("loss", [(), (OURS,)], ids=["verl's", "ours"])
def test_multi_token_prediction_has_the_same_row_beside_both_losses(loss, capsys):
    _, rows, _ = rows_of(capsys, *VERL, *loss, f"{MTP}enable=True", f"{MTP}enable_train=True")
    assert rows[f"{MTP}enable"][0] == "note" and f"set {MTP}mtp_loss_scaling_factor=0" in rows[f"{MTP}enable"][1]
    assert f"{MTP}enable" not in rows_of(capsys, *VERL, *loss, f"{MTP}enable=True")[1]


def test_a_dense_line_has_no_row_of_experts(capsys):
    _, rows, _ = rows_of(capsys, *VERL, f"{ACTOR}megatron.sequence_parallel=False", f"{ACTOR}megatron.tensor_model_parallel_size=2")
    assert not [name for name in rows if "megatron." in name], rows


def test_a_launch_of_ours_ends_where_tokens_are_dropped():
    """verl's own loss goes on beside our log-probabilities."""
    for loss, number in ((OURS, 1), (f"{LOSS_MODE}=vanilla", 0)):
        line = [*VERL, loss, f"+{OVERRIDES}moe_expert_capacity_factor=1.0"]
        assert len(verl.problems_of(verl.read_line(line).settings)[0]) == number
    tree = {"actor_rollout_ref": {"actor": {"policy_loss": {"loss_mode": "megatron_rl.gspo.sample_mean"}}}}
    tree["actor_rollout_ref"]["actor"]["megatron"] = {"override_transformer_config": {"moe_expert_capacity_factor": 1.0}}
    assert "which tokens an expert drops" in verl.problems_of(verl.settings_of_config(tree))[0][0]


def engine(mtp: bool = False, **fields):
    config = SimpleNamespace(num_moe_experts=8, moe_router_load_balancing_type="none", moe_aux_loss_coeff=0.001, **fields)
    return SimpleNamespace(tf_config=config, model_config={"mtp": {"enable": mtp, "enable_train": mtp}})


def test_a_worker_warns_once_of_what_its_model_adds(capsys):
    run = verl_loss.VerlRun()
    for _ in range(2):
        verl_step.check_model(run, engine(mtp=True, moe_z_loss_coeff=0.001, mtp_num_layers=1, mtp_loss_scaling_factor=0.1))
    said = capsys.readouterr().err
    assert said.count(f"moe_z_loss_coeff=0.001: {MEAN}") == said.count(f"{MTP}enable=1 with {MTP}enable_train") == 1
    assert "moe_aux_loss_coeff" not in said


def test_a_worker_refuses_a_model_that_drops_tokens():
    with pytest.raises(ConfigError, match="moe_expert_capacity_factor=2"):
        verl_step.check_model(verl_loss.VerlRun(), engine(moe_expert_capacity_factor=2.0))


SKYRL = ["python", "-m", "skyrl.train.entrypoints.main_base"]
NEMO = ["python", "examples/run_grpo.py", "policy.megatron_cfg.enabled=true"]
OF_SKYRL, OF_NEMO = "trainer.policy.megatron_config.", "policy.megatron_cfg."
NEMO_OURS = ["python", "-m", "megatron_rl.hosts.launch", *NEMO[1:], "++loss_fn.megatron_rl=gspo.sample_mean"]
OTHERS = [
    (SKYRL, f"{OF_SKYRL}moe_aux_loss_coeff=0.01 {OF_SKYRL}moe_router_load_balancing_type=aux_loss", "note", MEAN),
    (SKYRL, f"{OF_SKYRL}transformer_config_kwargs.moe_z_loss_coeff=0.001", "note", MEAN),
    (SKYRL, f"{OF_SKYRL}transformer_config_kwargs.moe_expert_capacity_factor=1", "PROBLEM", "which tokens an expert drops"),
    (NEMO, f"++{OF_NEMO}model_overrides.moe_z_loss_coeff=0.001", "PROBLEM", "its gradient is x routed tokens / response tokens"),
    (NEMO, f"{OF_NEMO}mtp_num_layers=1", "note", "the loss of multi-token prediction: a sum over response tokens"),
    (
        ["python", "-m", "megatron_rl.hosts.launch", *NEMO[1:], "++loss_fn.megatron_rl=gspo.sample_mean"],
        f"{OF_NEMO}mtp_num_layers=1",
        "note",
        "the loss of multi-token prediction: a sum over response tokens",
    ),
]


@pytest.mark.parametrize(("line", "settings", "status", "said"), OTHERS)
def test_other_trainers_have_the_rows_by_their_own_names(line, settings, status, said, capsys):
    backend = ["trainer.strategy=megatron"] if line is SKYRL else []
    code, rows, _ = rows_of(capsys, *line, *backend, *settings.split())
    found = rows[settings.split()[0].partition("=")[0].lstrip("+")]
    assert found[0] == status and said in found[1] and code == (status == "PROBLEM"), rows
    if backend:  # FSDP reads none of it
        assert not [name for name in rows_of(capsys, *line, *settings.split())[1] if "megatron" in name]


def test_rolls_experts_take_the_coefficient_of_the_checkpoint(tmp_path, monkeypatch, capsys):
    """mcore_adapter's models: router_aux_loss_coef is moe_aux_loss_coeff, of the type aux_loss."""
    (tmp_path / "config").mkdir()
    monkeypatch.chdir(tmp_path)
    for value, status in (("", "note"), ("moe_aux_loss_coeff: 0, ", None)):
        config = f"strategy_config: {{{value}expert_model_parallel_size: 4}}"
        text = f"actor_train: {{strategy_args: {{strategy_name: megatron_train, {config}}}}}"
        (tmp_path / "config" / "mine.yaml").write_text(text)
        _, rows, _ = rows_of(capsys, "python", "start_rlvr_pipeline.py", "--config_name", "mine")
        assert rows.get("actor_train.model_args.moe_aux_loss_coef", (None,))[0] == status, rows


def of_verl(fields: dict) -> list[str]:
    actor = {"policy_loss": {"loss_mode": "megatron_rl.gspo.sample_mean"}, "megatron": {"override_transformer_config": fields}}
    problems, said = verl.problems_of(verl.settings_of_config({"actor_rollout_ref": {"actor": actor}}))
    if problems:
        raise ConfigError(problems)
    return said


def of_nemo_rl(fields: dict) -> list[str]:
    config = nemo_rl_cases.master_config({"megatron_rl": "gspo.sample_mean"})
    config.policy["megatron_cfg"] |= fields
    return [*nemo_rl.check_launch(config).warnings]


def of_skyrl(fields: dict) -> list[str]:
    given = {"trainer.strategy": "megatron", skyrl.DOOR.choice.setting: "megatron_rl.gspo"}
    given |= {f"{OF_SKYRL}transformer_config_kwargs.{name}": value for name, value in fields.items()}
    return [*skyrl.check_launch(Settings.of_names(given, skyrl.DOOR.all_defaults))]


def of_roll(fields: dict) -> list[str]:
    strategy = SimpleNamespace(strategy_name="megatron_train", strategy_config=fields)
    worker = roll_cases.worker_config("gspo.sample_mean", strategy_args=strategy)
    return [*roll.read_settings(worker, roll_cases.pipeline_config()).warnings]


START = [of_verl, of_nemo_rl, of_skyrl, of_roll]
NOT_JUDGED = "which was run with no loss, and is not judged"
DYNAMIC_CP = f"{ACTOR}megatron.dynamic_context_parallel"
ROLLS = "actor_train: {strategy_args: {strategy_name: megatron_train, strategy_config: {%s}}%s}"


@pytest.mark.parametrize(
    ("line", "setting", "said"),
    [
        (VERL, f"{DYNAMIC_CP}=True", NOT_JUDGED),
        (VERL, f"+{OVERRIDES}hybrid_context_parallel=True", NOT_JUDGED),
        (VERL, f"{DYNAMIC_CP}=$DYNAMIC", "not known here: what it adds to the step is not judged"),
        ([*SKYRL, "trainer.strategy=megatron"], f"{OF_SKYRL}transformer_config_kwargs.hybrid_context_parallel=true", NOT_JUDGED),
        (NEMO, f"++{OF_NEMO}model_overrides.dynamic_context_parallel=true", NOT_JUDGED),
        (
            ROLLS % ("hybrid_context_parallel: true", ""),
            "actor_train.strategy_args.strategy_config.hybrid_context_parallel",
            NOT_JUDGED,
        ),
        (
            ROLLS % ("", ", mtp_training_mode: joint"),
            "actor_train.mtp_training_mode",
            "multi-token prediction, which is not judged",
        ),
    ],
)
def test_what_is_not_judged_is_named_and_the_verdict_says_so(line, setting, said, tmp_path, monkeypatch, capsys):
    if isinstance(line, str):
        (tmp_path / "config").mkdir()
        (tmp_path / "config" / "mine.yaml").write_text(line)
        monkeypatch.chdir(tmp_path)
        words = ["python", "start_rlvr_pipeline.py", "--config_name", "mine"]
    else:
        words = [*line, setting]
    _, rows, last = rows_of(capsys, *words)
    status, text = rows[setting.partition("=")[0].lstrip("+")]
    assert status == "note" and said in text, rows
    assert last.endswith("; see the notes") and ("NOT exact" in last or "as far as they were judged" in last), last


def test_context_parallelism_of_a_micro_batch_is_said_at_start_too():
    for read, name in (
        (of_skyrl, "hybrid_context_parallel"),
        (of_roll, "dynamic_context_parallel"),
        (of_verl, "hybrid_context_parallel"),
    ):
        (said,) = [text for text in read({name: True}) if name in text]
        assert NOT_JUDGED in said
        assert not [text for text in read({name: False}) if name in text]


DROPPING = {"num_moe_experts": 8, "moe_expert_capacity_factor": 1.0}


@pytest.mark.parametrize("read", START)
def test_each_door_says_at_start_what_its_model_adds(read):
    assert not [text for text in read({}) if "moe_z_loss" in text]
    if read is of_nemo_rl:  # its contract rescales the loss
        with pytest.raises(ConfigError, match="moe_z_loss_coeff=0.1 does not go with calculate_per_token_loss=True"):
            read({"num_moe_experts": 8, "moe_z_loss_coeff": 0.1})
        return
    (said,) = [text for text in read({"num_moe_experts": 8, "moe_z_loss_coeff": 0.1}) if "moe_z_loss" in text]
    assert f"moe_z_loss_coeff=0.1: {MEAN}" in said


@pytest.mark.parametrize("read", START)
def test_each_door_refuses_at_start_a_model_that_drops_tokens(read):
    with pytest.raises(ConfigError, match="which tokens an expert drops"):
        read(DROPPING)


# Megatron's process_mtp_loss under the per-token contract: factor x sum x (tokens / those that have a next one), and the trainer
# divides by the response tokens of the step; verl by routed tokens of routed / response, NeMo-RL by mtp_grad_scale_func.
PER_TOKEN = [
    ([*VERL, *PER_TOKEN_OF_VERL, f"{MTP}enable=True", f"{MTP}enable_train=True"], f"{MTP}enable", 0.1),
    (
        [*VERL, *PER_TOKEN_OF_VERL, f"{MTP}enable=True", f"{MTP}enable_train=True", f"{MTP}mtp_loss_scaling_factor=0.3"],
        f"{MTP}enable",
        0.3,
    ),
    ([*NEMO, f"{OF_NEMO}mtp_num_layers=1", f"{OF_NEMO}mtp_loss_scaling_factor=0.2"], f"{OF_NEMO}mtp_num_layers", 0.2),
]


@pytest.mark.parametrize(("line", "name", "factor"), PER_TOKEN)
def test_multi_token_prediction_under_the_per_token_contract_has_its_factor_and_its_divisor(line, name, factor, capsys):
    _, rows, _ = rows_of(capsys, *line)
    status, text = rows[name]
    assert status == "note" and f"mtp_loss_scaling_factor={factor} x the loss" in text and "divided by those of the step" in text
    off = [word for word in line if "scaling_factor" not in word]
    setting = f"{name.rpartition('.')[0]}.mtp_loss_scaling_factor=0"
    assert name not in rows_of(capsys, *off, setting)[1]


@pytest.mark.host("NEMO_RL_ROOT")
def test_a_dense_model_of_nemo_rl_is_no_mixture_of_experts(monkeypatch, capsys):
    """Its file has all names of experts, sequence_parallel: false and an expert-tensor-parallel size of 1."""
    monkeypatch.chdir(os.environ["NEMO_RL_ROOT"])
    code, rows, _ = rows_of(capsys, *NEMO, f"{OF_NEMO}tensor_model_parallel_size=2")
    assert code == 0 and not [name for name in rows if "megatron_cfg" in name], rows


# Published lines: the loss that verl chooses, and ours.
PUBLISHED = [
    ("VERL", "examples/grpo_trainer/run_qwen3_vl_30b_a3b_megatron.sh", f"{OVERRIDES}moe_z_loss_coeff"),
    ("ROLL", "examples/qwen3-30BA3B-rlvr_megatron/run_rlvr_pipeline.sh", "actor_train.model_args.moe_aux_loss_coef"),
    ("VERL", "examples/mtp_trainer/run_mimo_7b_mtp_megatron.sh", f"{MTP}enable"),
]


@pytest.mark.parametrize("loss", [(), (f"{LOSS_MODE}=megatron_rl.grpo.token_mean",)], ids=["the trainer's", "ours"])
@pytest.mark.parametrize(
    ("host", "script", "name"), [pytest.param(*row, marks=pytest.mark.host(f"{row[0]}_ROOT")) for row in PUBLISHED]
)
def test_a_published_line_has_the_note_with_both_losses(host, script, name, loss, monkeypatch, capsys):
    monkeypatch.chdir(os.environ[f"{host}_ROOT"])
    code, rows, last = rows_of(capsys, "bash", script, *(loss if host == "VERL" else ()))
    assert code == 0 and rows[name][0] == "note" and "changes with the layout" in rows[name][1], rows
    if not loss:
        assert last.endswith("see the notes")
