"""The fields of TRL's configs, against TRL's and transformers' own text, and what doctor says of a name that is none."""

from __future__ import annotations

import os
import re
from importlib.metadata import version
from pathlib import Path

import pytest

from megatron_rl.__main__ import main
from megatron_rl.hosts import trl_fields

TRL = "from trl import GRPOConfig, GRPOTrainer\n"


def doctor(capsys, tmp_path, monkeypatch, text: str) -> tuple[int, str]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(text)
    code = main(["doctor", "--launch-only", "--", "accelerate", "launch", "mine.py"])
    return code, capsys.readouterr().out


def of_checkout(monkeypatch) -> None:
    """The checkout is what a run imports, with the transformers that is installed."""
    monkeypatch.syspath_prepend(os.environ["TRL_ROOT"])


@pytest.mark.host("TRL_ROOT")
@pytest.mark.skipif(not version("transformers").startswith("5.24"), reason="the table is of transformers 5.24")
@pytest.mark.parametrize("config", ["GRPOConfig", "RLOOConfig"])
def test_the_table_is_what_trl_and_transformers_declare(config, monkeypatch):
    table = trl_fields.fields_of(config)
    of_checkout(monkeypatch)
    found = trl_fields.fields_of(config)
    assert len(found) > 100 and found <= table and (config == "RLOOConfig" or found == table), found ^ table


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("kl_coef", "beta"),
        ("betta", "beta"),
        ("per_device_train_batch", "per_device_train_batch_size"),
        ("per_device_batch_size", "per_device_train_batch_size"),
        ("gradient_accumulation", "gradient_accumulation_steps"),
        ("max_new_tokens", "max_completion_length"),
        ("clip_higher", "epsilon_high"),
    ],
)
def test_a_keyword_that_is_no_field_is_a_problem(name, meant, tmp_path, monkeypatch, capsys):
    code, out = doctor(capsys, tmp_path, monkeypatch, f"{TRL}GRPOTrainer(args=GRPOConfig({name}=4))")
    assert code == 1 and f"GRPOConfig has no field {name} (" in out and f": did you mean {meant}?" in out, out


@pytest.mark.parametrize("version", [None, (1, 16)])
@pytest.mark.parametrize("name", ["max_prompt_length", "warmup_ratio", "of_another_version"])
def test_a_field_that_another_version_may_have_is_a_note_where_the_version_is_not_known(
    name, version, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(trl_fields, "installed", lambda: version)
    code, out = doctor(capsys, tmp_path, monkeypatch, f"{TRL}GRPOTrainer(args=GRPOConfig({name}=4))")
    assert f"GRPOConfig has no field {name} (" in out and code == (version is not None), out
    is_said = "doctor: if TRL is 1.16, this run stops at GRPOConfig(" in out
    assert is_said == (version is None and name != "warmup_ratio"), out


@pytest.mark.parametrize(
    "text",
    [
        "from trl import GRPOTrainer\nfrom open_r1.configs import GRPOConfig\nGRPOTrainer(args=GRPOConfig(kl_coef=4))",
        f"{TRL}class Mine(GRPOConfig):\n    kl_coef: float = 0.1\nGRPOTrainer(args=Mine(kl_coef=4))",
        f"{TRL}class Mine(Elsewhere, GRPOConfig):\n    pass\nGRPOTrainer(args=Mine(kl_coef=4))",
        f"{TRL}GRPOTrainer(args=GRPOConfig(learning_rate=1e-6, warmup_steps=3, bf16=True, vllm_mode='server'))",
    ],
)
def test_fields_that_the_config_has_or_may_have_are_not_refused(text, tmp_path, monkeypatch, capsys):
    code, out = doctor(capsys, tmp_path, monkeypatch, text)
    assert code == 0 and "has no field" not in out, out


def test_flags_of_trls_own_command(capsys):
    line = "trl grpo --kl_coef 0.1 --model_name_or_path m --lora_r 8 --no_bf16 --num_processes 4 --mixed_precision no"
    code = main(["doctor", "--launch-only", "--", *line.split()])
    out = capsys.readouterr().out
    assert code == 1 and out.count("trl takes no --") == 1 and "--kl_coef" in out and "did you mean --beta?" in out, out


def test_a_keyword_that_is_no_field_changes_nothing_else(tmp_path, monkeypatch, capsys):
    """A misspelt field is told once, and not as a setting too."""
    code, out = doctor(capsys, tmp_path, monkeypatch, f"{TRL}GRPOTrainer(args=GRPOConfig(num_generation=4))")
    assert code == 1 and out.count("did you mean") == 1 and "what follows is judged without num_generation\n" in out, out


OURS = "from trl import GRPOConfig\nfrom megatron_rl.hosts.trl import GRPOTrainer\n"
DR_GRPO = "loss_type='megatron_rl.grpo.constant', scale_rewards='none'"


@pytest.mark.parametrize("version", [None, (1, 16)])
@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            f"GRPOTrainer(args=GRPOConfig({DR_GRPO}, megatron_rl={{'loss_aggregation_divisor': 512}}))",
            "an argument of GRPOTrainer, not of GRPOConfig: GRPOTrainer(..., megatron_rl={'loss_aggregation_divisor': 512})",
        ),
        (
            f"GRPOTrainer(args=GRPOConfig({DR_GRPO}, loss_aggregation_divisor=512))",
            "not an argument of GRPOConfig: GRPOTrainer(..., megatron_rl={'loss_aggregation_divisor': 512})",
        ),
        (
            f"args = GRPOConfig({DR_GRPO})\nargs.megatron_rl = {{'loss_aggregation_divisor': 512}}\nGRPOTrainer(args=args)",
            "an argument of GRPOTrainer, not of GRPOConfig: GRPOTrainer(..., megatron_rl={'loss_aggregation_divisor': 512})",
        ),
        (
            f"GRPOTrainer(args=GRPOConfig({DR_GRPO}), loss_aggregation_divisor=512)",
            "not an argument of GRPOTrainer: GRPOTrainer(..., megatron_rl={'loss_aggregation_divisor': 512})",
        ),
        (
            "GRPOTrainer(args=GRPOConfig(), loss_type='megatron_rl.grpo.token_mean')",
            "an argument of GRPOConfig, not of GRPOTrainer: GRPOConfig(..., loss_type='megatron_rl.grpo.token_mean')",
        ),
    ],
)
def test_what_is_given_the_wrong_one_of_config_and_trainer(text, said, version, tmp_path, monkeypatch, capsys):
    """No TRL takes it, and the rest is judged as if it stood in its place: one round."""
    monkeypatch.setattr(trl_fields, "installed", lambda: version)
    code, out = doctor(capsys, tmp_path, monkeypatch, OURS + text)
    assert code == 1 and said in out and out.endswith("doctor: 1 problem\n"), out
    assert re.search(r"PROBLEM  (\w+) .*\n +note .* what follows is judged as if \1 stood in its place\n", out), out


def test_an_argument_of_a_trainer_of_the_scripts_own_is_its_own(tmp_path, monkeypatch, capsys):
    own = "class Mine(GRPOTrainer):\n    def __init__(self, loss_type, **given):\n        super().__init__(**given)\n"
    code, out = doctor(capsys, tmp_path, monkeypatch, f"{TRL}{own}Mine('a', args=GRPOConfig(), loss_type='dapo')")
    assert code == 0 and "an argument of" not in out, out


@pytest.mark.host("TRL_ROOT")
def test_a_checkout_on_the_path_is_what_is_judged(tmp_path, monkeypatch, capsys):
    """Its own version and the default of its own field, whatever the versions of both sides have."""
    of_checkout(monkeypatch)
    root = Path(os.environ["TRL_ROOT"])
    number, text = (root / "VERSION").read_text().strip(), (root / "trl/trainer/grpo_config.py").read_text()
    (default,) = re.findall(r"use_bias_correction_kl: bool = field\(\s*default=(\w+)", text)
    _, out = doctor(capsys, tmp_path, monkeypatch, f"{TRL}GRPOTrainer(args=GRPOConfig(beta=0.1))")
    kind = {"True": "unbiased", "False": "k3"}[default]
    assert f"{default} by default, so KL is {kind} (TRL {number} is installed;" in out, out


def test_the_version_is_the_distributions_where_there_is_no_checkout(tmp_path, monkeypatch, capsys):
    """The default is the source's: here another one than that of its version."""
    package = tmp_path / "site"
    (package / "trl/trainer").mkdir(parents=True)
    (package / "trl/__init__.py").touch()
    (package / "VERSION").write_text("9.9")  # of somebody else
    (package / "trl/trainer/grpo_config.py").write_text(
        "class GRPOConfig:\n    beta: float = 0.0\n    use_bias_correction_kl: bool = field(default=True)\n"
    )
    (package / "trl-1.9.2.dist-info").mkdir()
    (package / "trl-1.9.2.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: trl\nVersion: 1.9.2\n")
    monkeypatch.syspath_prepend(str(package))
    _, out = doctor(capsys, tmp_path, monkeypatch, f"{TRL}GRPOTrainer(args=GRPOConfig(beta=0.1))")
    assert "True by default, so KL is unbiased (TRL 1.9.2 is installed;" in out, out
