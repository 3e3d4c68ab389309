"""Our losses in TRL: through a stand-in of its trainer always, through its own with a checkout.

TRL_ROOT=... pytest -m host --require host tests/test_trl.py          with torch, transformers, accelerate and datasets
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import trl_cases as cases
from dense_row_cases import largest_error, truth
from trl_cases import Case

from megatron_rl.__main__ import main
from megatron_rl.config import PolicyLossConfig
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.hosts import door_line, trl

PLUG = f"megatron_rl.hosts.{trl.PLUG}"
LAYOUTS = (
    {"dp": 1, "accumulation": 1, "generated": 1},
    {"dp": 2, "accumulation": 2, "generated": 2},
    {"dp": 4, "accumulation": 4, "generated": 4},
    {"dp": 2, "accumulation": 2, "generated": 2, "iterations": 2},
)


@pytest.fixture(autouse=True)
def trainer(monkeypatch) -> Iterator[type]:
    """Ours on the stand-in."""
    with monkeypatch.context() as patch:
        for name in [name for name in sys.modules if name.split(".")[0] == "trl" or name == PLUG]:
            patch.delitem(sys.modules, name)
        kept = dict(sys.modules)
        cases.emulated_trl()
        yield trl.GRPOTrainer
        for name in sys.modules.keys() - kept.keys():
            if name.split(".")[0] == "trl" or name == PLUG:
                del sys.modules[name]


def error_of(case: Case, trainer: type, **settings) -> float:
    samples, log_probs = cases.step_of(case)
    return largest_error(cases.run_step(case, samples, log_probs, trainer, **settings), *truth(case, samples, log_probs))


def test_half_of_a_generation_is_a_step_of_its_own(trainer):
    """Two steps a generation: the counts are those of the first two of four micro-batches, whatever is in them."""
    for aggregation in ("sample_mean", "token_mean", "constant"):
        case = Case(loss="grpo", aggregation=aggregation, dp=2, accumulation=4, generated=4)
        whole = cases.run_step(case, *cases.step_of(case), trainer)
        half = Case(loss="grpo", aggregation=aggregation, dp=2, accumulation=2, generated=4)
        part = cases.run_step(half, *cases.step_of(half), trainer)
        trained = [bool(gradient.any()) for gradient in part.gradients]
        assert 0 < sum(trained) < sum(bool(gradient.any()) for gradient in whole.gradients)
        if aggregation == "constant":  # 1 / (L N): of half the samples each weighs twice
            ratio = [float(p.sum() / w.sum()) for p, w, has in zip(part.gradients, whole.gradients, trained, strict=True) if has]
            assert ratio == pytest.approx([2.0] * len(ratio), rel=1e-5)  # float32 sums


def test_without_old_log_probs_the_ratio_is_one(trainer):
    """TRL measures none where each step trains what it has generated. At ratio 1 a sample's mean is minus its advantage."""
    case = Case(loss="grpo", aggregation="sample_mean", dp=2, accumulation=2, generated=2)
    samples, log_probs = cases.step_of(case)
    found = cases.run_step(case, [replace(sample, old_log_probs=None) for sample in samples], log_probs, trainer)
    by_hand = [-sample.advantage * any(sample.loss_mask) / len(samples) for sample in samples]
    assert found.loss == pytest.approx(sum(by_hand), abs=1e-6)  # float32
    for metrics in found.metrics:
        assert metrics["clip_ratio/region_mean"] == [0.0] * case.accumulation


def test_our_kl_and_entropy_are_means_over_samples(trainer):
    """By hand: 0.5 x the mean of k3 over a sample's tokens, minus 0.25 x that of the entropy, which is minus log p here."""
    case = Case(loss="grpo", aggregation="token_mean", dp=2, accumulation=2, generated=2)
    samples, log_probs = cases.step_of(case)
    plain = cases.run_step(case, samples, log_probs, trainer)
    terms = cases.run_step(case, samples, log_probs, trainer, gap=0.3, beta=0.5, entropy_coef=0.25)
    k3, entropy = math.exp(-0.3) - 1 + 0.3, 0.0
    for sample, values in zip(samples, log_probs, strict=True):
        mask = torch.tensor(sample.loss_mask, dtype=torch.bool)
        entropy += float(-values[mask].mean()) if mask.any() else 0.0
    share = sum(any(sample.loss_mask) for sample in samples) / len(samples)
    expected = 0.5 * k3 * share - 0.25 * entropy / len(samples)
    assert terms.loss - plain.loss == pytest.approx(expected, rel=1e-5)  # float32
    for metrics in terms.metrics:  # of each rank; TRL logs the mean over micro-batches
        assert sum(metrics["kl"]) / case.accumulation == pytest.approx(k3 * share, rel=1e-5)


def test_liger_is_refused_where_its_loss_takes_the_place_of_ours(trainer, monkeypatch):
    """TRL before 1.14 has compute_liger_loss, which calls no _compute_loss; later Liger replaces layers of the model."""
    read_args = import_module(PLUG).read_args
    args = cases.Config("megatron_rl.grpo.token_mean", use_liger_kernel=True)
    assert str(read_args(args, {})) == "grpo.token_mean"
    monkeypatch.setattr(cases.GRPOTrainer, "compute_liger_loss", None, raising=False)
    with pytest.raises(ConfigError, match="Liger's kernel is another loss"):
        read_args(args, {})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_entropy_of_a_model_of_another_dtype_is_trained(dtype, trainer, monkeypatch):
    case = Case(loss="grpo", aggregation="token_mean", accumulation=2, generated=2)
    samples, log_probs = cases.step_of(case)
    expected = cases.run_step(case, samples, log_probs, trainer, entropy_coef=0.25).loss
    scores = cases.GRPOTrainer._get_per_token_logps_and_entropies

    def of_dtype(self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, compute_entropy=False, **others):
        found = scores(self, model, input_ids, attention_mask, logits_to_keep, batch_size, compute_entropy, **others)
        return found[0], found[1].to(dtype), None

    monkeypatch.setattr(cases.GRPOTrainer, "_get_per_token_logps_and_entropies", of_dtype)
    found = cases.run_step(case, samples, log_probs, trainer, entropy_coef=0.25).loss
    assert found == pytest.approx(expected, abs=0.01)  # bfloat16: 2^-9 of an entropy of about 1, times 0.25


@pytest.mark.parametrize(
    ("settings", "own", "message"),
    [
        ({"loss_type": "dapo"}, {}, "does not name a loss.*; set loss_type=megatron_rl.grpo.token_mean. Losses"),
        (
            {"loss_type": "dr-grpo"},
            {},
            "; set loss_type=megatron_rl.grpo.constant and megatron_rl={'loss_aggregation_divisor': 512} of GRPOTrainer. Losses",
        ),
        ({"loss_type": "megatron_rl.dr_grpo"}, {}, "; set loss_type=megatron_rl.grpo.constant and"),
        (
            {"loss_type": "megatron_rl.gspo.token_mean", "importance_sampling_level": "sequence"},
            {},
            "gspo has one ratio a sample by itself; set importance_sampling_level=token",
        ),
        ({"loss_type": "megatron_rl.gspoo.token_mean"}, {}, "did you mean megatron_rl.gspo.token_mean"),
        ({"importance_sampling_level": "sequence"}, {}, "ours is gspo"),
        ({"top_entropy_quantile": 0.2}, {}, "depend on its size"),
        ({"use_adaptive_entropy": True}, {}, "set entropy_coef"),
        ({"off_policy_mask_threshold": 0.5}, {}, "off_policy_sequence_delta"),
        ({"beta": True}, {}, "beta=true is a switch"),
        ({"beta": -0.1}, {}, "beta=-0.1 must be a finite number at or above 0"),
        ({"entropy_coef": math.inf}, {}, "entropy_coef=inf must be a finite number"),
        ({"epsilon": 0.1}, {"clip_ratio_low": 0.3}, "clip_ratio_low=0.3 and epsilon=0.1 are the same thing with two values"),
        ({"use_bias_correction_kl": True}, {}, "needs a coefficient|has no effect without a coefficient"),
        ({"loss_type": "megatron_rl.gspo.token_mean", "epsilon_high": 0.28}, {}, "epsilon=0.2 beside epsilon_high=0.28"),
        ({}, {"importance_corection": "tis"}, "importance_corection=tis has no effect"),
        ({}, {"importance_correction": "tis"}, "set use_vllm=True"),
        ({"use_vllm": True}, {"importance_correction": "tis"}, "two corrections in one launch"),
        ({"use_vllm": True, "loss_type": "megatron_rl.dppo_tv.token_mean"}, {}, "counted twice"),
        ({"use_vllm": True, "top_p": 0.9}, {}, "every weight would be the kept mass"),
        ({"use_vllm": True, "generation_kwargs": {"top_p": 0.9}}, {}, "top_p to 0.9 for the sampler alone; set top_p=0.9"),
        ({"generation_kwargs": {"temperature": 0.7}}, {}, "temperature to 0.7 for the sampler alone; set temperature=0.7"),
        ({"entropy_target": 0.5}, {}, "entropy_target=0.5 has no effect.*set entropy_coef"),
        ({}, "tis", "megatron_rl='tis' must be a mapping"),
        ({"gradient_accumulation_steps": 4, "steps_per_generation": 2}, {}, "its counts are not known; set steps_per_generation=4"),
        (
            {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "loss_type": "megatron_rl.grpo.prompt_mean"},
            {},
            "cuts prompt groups",
        ),
    ],
)
def test_settings_that_are_not_honoured_are_refused_before_a_model_is_made(settings, own, message, trainer):
    args = cases.Config(**({"loss_type": "megatron_rl.grpo.token_mean"} | settings))
    with pytest.raises(ConfigError, match=message):
        trainer(None, args=args, megatron_rl=own)


def test_the_bias_correction_that_newer_trls_have_by_default_is_no_choice_of_a_run_without_kl(trainer):
    @dataclass
    class Newer(cases.Config):
        use_bias_correction_kl: bool = True

    def config(**settings) -> PolicyLossConfig:
        return import_module(PLUG).read_args(Newer(loss_type="megatron_rl.grpo.token_mean", **settings), {}).config

    assert config().kl_coefficient == 0.0
    assert config(beta=0.1).kl_estimator == "unbiased"
    assert config(beta=0.1, use_bias_correction_kl=False).kl_estimator == "k3"


def test_a_rollout_function_reports_the_samplers_scores(trainer):
    args, own = cases.Config("megatron_rl.dppo_tv.token_mean"), {"divergence_low": 0.1}
    with pytest.raises(ConfigError, match="set use_vllm=True, or give the trainer a rollout_func"):
        trainer(None, args=args, megatron_rl=own)
    model = SimpleNamespace(accelerator=None)
    assert trainer(model, args=args, rollout_func=print, megatron_rl=own).found.loss.name == "dppo_tv"


def test_generation_settings_that_change_nothing_are_accepted(trainer):
    args = cases.Config("megatron_rl.grpo.token_mean", generation_kwargs={"top_p": 1.0, "suppress_tokens": [3]})
    assert trainer(SimpleNamespace(accelerator=None), args=args).found.config.policy_loss == "grpo"


def test_a_batch_that_cannot_be_trained_is_refused(trainer):
    case = Case(loss="grpo", aggregation="token_mean")
    samples, log_probs = cases.step_of(case)
    with pytest.raises(DataError, match="not finite"):
        cases.run_step(case, samples, [values * math.nan for values in log_probs], trainer)


def test_one_line_and_metrics_by_trls_names(trainer, capsys):
    case = Case(loss="grpo", aggregation="token_mean", dp=2, accumulation=2, generated=2)
    found = cases.run_step(case, *cases.step_of(case), trainer)
    line, _ = capsys.readouterr().err.splitlines()
    assert line.startswith("megatron_rl: loss_type=megatron_rl.grpo.token_mean in TRL | ") and "weight of a token 1/T = " in line
    assert "| on 2 data-parallel ranks |" in line
    assert set(found.metrics[0]) == {"clip_ratio/region_mean", "entropy"} and len(found.metrics[0]["entropy"]) == 2


def test_another_contract_is_named_with_its_line(trainer, monkeypatch):
    monkeypatch.setattr(cases.GRPOTrainer, "_compute_loss", lambda self, model, inputs, num_items: None)
    with pytest.raises(ConfigError, match=r"_compute_loss takes \(self, model, inputs, num_items\).*test_trl.py:\d+"):
        trainer(None, args=cases.Config("megatron_rl.grpo.token_mean"))


# Its launch line


def said(line: str) -> str:
    return " ".join(f"{row.subject} {row.text}" for row in door_line.judge(trl.DOOR, line.split(), lambda path: {"beta": 0.04}))


def test_doctor_reads_flags_and_a_file():
    line = "accelerate launch train.py --loss_type megatron_rl.gspo.prompt_mean --config grpo.yaml --epsilon=0.1"
    assert trl.DOOR.recognises(line.split()) and "gspo.prompt_mean, clip 0.1/0.1" in said(line)
    assert "did you mean epsilon_high" in said(f"{line} --epsilonhigh 0.2")
    assert "makes TRL's own trainer" in said("trl grpo --loss_type megatron_rl.gspo.prompt_mean")
    assert not trl.DOOR.recognises("accelerate launch train.py --loss_type dapo".split())


@pytest.mark.parametrize(
    ("module", "loss_type", "said_of_it"),
    [
        ("trl", "megatron_rl.gspo.prompt_mean", "makes TRL's own GRPOTrainer, which does not know megatron_rl.gspo.prompt_mean"),
        (
            "megatron_rl.hosts.trl",
            "grpo",
            "makes our GRPOTrainer, which refuses loss_type=grpo: set loss_type=megatron_rl.grpo.sample_mean",
        ),
        ("megatron_rl.hosts.trl", "megatron_rl.gspo.prompt_mean", None),
        ("trl", "grpo", None),
    ],
)
def test_doctor_compares_the_trainer_of_a_script_with_its_loss(module, loss_type, said_of_it, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        f"from trl import GRPOConfig\nfrom {module} import GRPOTrainer\nGRPOTrainer(GRPOConfig(loss_type={loss_type!r}))"
    )
    rows = [row.text for row in door_line.judge(trl.DOOR, ["python", str(script)], lambda path: {}) if row.is_wrong]
    assert not rows if said_of_it is None else said_of_it in rows[0], rows
    assert "ours was not tried" not in said(f"python {script}")  # the trainer is changed by another import


OURS = "from trl import GRPOConfig\nfrom megatron_rl.hosts.trl import GRPOTrainer\nGRPOTrainer(GRPOConfig({}), megatron_rl={})"


@pytest.mark.parametrize(
    ("config", "own", "line", "said_of_it"),
    [
        ("loss_type='megatron_rl.grpo.constant'", "{'loss_aggregation_divisor': 16}", "", None),
        ("loss_type='megatron_rl.grpo.constant'", "dict(loss_aggregation_divisor=16)", "", None),
        (
            "loss_type='megatron_rl.grpo.constant'",
            "{}",
            "",
            "its L: set megatron_rl={'loss_aggregation_divisor': L} of GRPOTrainer, for",
        ),
        ("loss_type='megatron_rl.grpo.constant'", "{'loss_agregation_divisor': 16}", "", "loss_aggregation_divisor"),
        ("loss_type='megatron_rl.grpo.constant'", "{'loss_divisor': 16}", "", "did you mean megatron_rl.loss_aggregation_divisor?"),
        ("loss_type='megatron_rl.constant.grpo'", "{}", "", "did you mean megatron_rl.grpo.constant?"),
        ("beta=0.0", "{}", "", "makes our GRPOTrainer, which refuses loss_type=dapo: set loss_type=megatron_rl.grpo.token_mean"),
        ("beta=0.0", "{}", "--loss_type megatron_rl.grpo.token_mean", "reads no command line: --loss_type has no effect"),
    ],
)
def test_doctor_reads_what_a_script_gives_our_trainer(config, own, line, said_of_it, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(OURS.format(config, own))
    rows = [row.text for row in door_line.judge(trl.DOOR, ["python", str(script), *line.split()], lambda path: {}) if row.is_wrong]
    assert not rows if said_of_it is None else any(said_of_it in row for row in rows), rows


@pytest.mark.parametrize(
    ("made", "line", "divisor", "said"),
    [
        ("args = GRPOConfig(CHOICE, max_completion_length=64)", "", "args.max_completion_length", "1/(64 N)"),
        (
            "training_args = GRPOConfig(CHOICE)",
            "",
            "training_args.max_completion_length // 2",
            "1/(256 N)",
        ),  # of 512, TRL's default
        (
            "args = TrlParser(GRPOConfig).parse()",
            "--loss_type megatron_rl.grpo.constant --max_completion_length 8",
            "args.max_completion_length",
            "1/(8 N)",
        ),
        ("args = GRPOConfig(CHOICE)\nargs.max_completion_length = 32", "", "args.max_completion_length", "1/(32 N)"),
        ("args = GRPOConfig(CHOICE)", "", "longest()", "is not known here; type it in the place of the name"),
    ],
)
def test_a_divisor_that_reads_the_config_is_known(made, line, divisor, said, tmp_path):
    text = OURS.partition("GRPOTrainer(")[0] + made.replace("CHOICE", "loss_type='megatron_rl.grpo.constant'")
    name = made.partition(" ")[0]
    script = tmp_path / "train.py"
    script.write_text(f"{text}\nGRPOTrainer(args={name}, megatron_rl={{'loss_aggregation_divisor': {divisor}}})")
    rows = [row.text for row in door_line.judge(trl.DOOR, ["python", str(script), *line.split()], lambda path: {})]
    assert any(said in row for row in rows), rows


@pytest.mark.parametrize(
    ("kind", "own", "typed"),
    [
        ("dr-grpo", "{}", "megatron_rl.grpo.constant and megatron_rl={'loss_aggregation_divisor': 64} of GRPOTrainer"),
        ("DR_GRPO", "{'loss_aggregation_divisor': 16}", "megatron_rl.grpo.constant"),
        ("dapoo", "{}", "megatron_rl.grpo.token_mean"),
        ("bnpo", "{}", "megatron_rl.grpo.token_mean"),
        ("sapo", "{}", "megatron_rl.sapo.sample_mean"),
        ("luspo", "{}", "megatron_rl.<loss>.<aggregation>"),
        ("something", "{}", "megatron_rl.<loss>.<aggregation>"),
    ],
)
def test_a_loss_of_trls_in_our_trainer_is_answered_with_ours_at_once(kind, own, typed, tmp_path, capsys):
    """And such a run does not start, so nothing is said of TRL's own loss."""
    script = tmp_path / "train.py"
    script.write_text(OURS.format(f"loss_type={kind!r}, max_completion_length=64", own))
    assert main(["doctor", "--launch-only", "--", "torchrun", str(script)]) == 1
    out = capsys.readouterr().out
    assert f"which refuses loss_type={kind}: set loss_type={typed}\n" in out and out.endswith("doctor: 1 problem\n"), out


def test_a_loss_in_settings_that_a_script_makes_is_not_judged(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("from trl import GRPOConfig, GRPOTrainer\nGRPOTrainer(GRPOConfig(beta=0.1, **read('a.json')))")
    assert f"GRPOConfig of {script} was read: beta, but for **read('a.json')" in said(f"python {script}")
    assert "so the loss is not judged" in said(f"python {script}") and "the same on every layout" not in said(f"python {script}")


def test_switches_and_numbers_are_read_as_trls_parser_reads_them():
    line = "train.py --loss_type megatron_rl.grpo.token_mean --use_vllm yes"
    assert "its weights multiply our loss" in said(line)
    assert not set(said(f"{line} --no_vllm_importance_sampling_correction").split()) & {"such", "multiply"}
    assert "use_vllm='maybe' is text" in said(f"{line} --use_vllm maybe")
    file = {"loss_type": "megatron_rl.grpo.token_mean", "beta": "1e-3", "use_vllm": "T"}  # PyYAML leaves 1e-3 as text
    assert not [
        row.text for row in door_line.judge(trl.DOOR, ["train.py", "--config", "a.yaml"], lambda path: file) if row.is_wrong
    ]
    assert "epsilon given 2 times (0.1, 0.3): the last one counts, the first one has no effect" in said(
        f"{line} --epsilon 0.1 --epsilon=0.3"
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"epsilon": 0.2}, "the trainer cannot tell that you typed it"),
        ({"epsilon": 0.2, "epsilon_high": 0.3}, "beside epsilon_high=0.3: 0.2 is the host's default"),
        ({"epsilon": 0.1}, None),
        ({}, None),
    ],
)
def test_doctor_approves_of_no_clip_that_the_trainer_does_not_have(given, message, trainer):
    """gspo has a clip of its own, and a GRPOConfig does not tell a typed epsilon=0.2 from TRL's default."""
    loss = "megatron_rl.gspo.token_mean"
    words = " ".join(f"--{name} {value}" for name, value in given.items())
    of_doctor = said(f"train.py --loss_type {loss} {words}")
    read_args = import_module(PLUG).read_args
    try:
        found = read_args(cases.Config(loss_type=loss, **given), {})
        acting = f"clip {found.config.clip_ratio_low or 3e-4:g}/{found.config.clip_ratio_high or 4e-4:g}"
    except ConfigError as error:
        acting = str(error)
    if message is None:
        assert acting in of_doctor
    else:
        assert message in of_doctor and f"{loss}, clip" not in of_doctor


def test_what_explain_types_for_a_clip_is_what_the_trainer_has():
    config = PolicyLossConfig(policy_loss="gspo", loss_aggregation="token_mean", clip_ratio_low=0.2, importance_correction="tis")
    lines, problems = door_line.write(trl.DOOR, config)
    assert not problems and "epsilon=0.2" not in lines
    assert lines[-1] == "megatron_rl={'importance_correction': 'tis', 'clip_ratio_low': 0.2} of GRPOTrainer", "one argument, once"


# TRL's own code


@pytest.mark.host("TRL_ROOT")
@pytest.mark.parametrize("ranks", [1, 2])
def test_trls_own_trainer_is_exact_with_ours(ranks):
    """Whole training of a random Llama: each optimiser step's gradient against a dense float64 step, see trl_real.py."""
    for name in ("transformers", "accelerate", "datasets"):
        pytest.importorskip(name, reason="TRL's own requirements, and not ours")
    script = Path(__file__).with_name("trl_real.py")
    launcher = [] if ranks == 1 else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    path = os.pathsep.join([os.environ["TRL_ROOT"], *sys.path])
    done = subprocess.run(
        [sys.executable, *launcher, str(script)], capture_output=True, text=True, timeout=900, env=os.environ | {"PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    print(f"worst {max(found.values()):.1e} of {len(found)}")
    # Weights are float32: a relative error of 6e-8 for each of the few factors. TRL 1.16 also sums the softmax in float32: 1.3e-6.
    assert len(found) >= 20 and max(found.values()) < 2e-6, {name: error for name, error in found.items() if not error < 2e-6}


@pytest.mark.host("TRL_ROOT")
def test_the_names_of_trl_are_its_own():
    """Red here: TRL has moved; read what the setting does, then what our trainer makes of it."""
    source = Path(os.environ["TRL_ROOT"], "trl", "trainer", "grpo_config.py").read_text()
    of_transformers = {"gradient_accumulation_steps", "use_liger_kernel", "auto_find_batch_size"}
    for one in trl.DOOR.settings:
        if one.name not in of_transformers:
            assert f"    {one.name}: " in source, one.name
