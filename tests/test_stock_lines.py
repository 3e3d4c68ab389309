"""What doctor and explain say of a launch line that trains with the trainer's own loss."""

from __future__ import annotations

import json
import os
import re

import pytest

from megatron_rl.__main__ import main
from megatron_rl.hosts import skyrl, verl, verl_refusals
from megatron_rl.hosts.base import CUSTOM_LOSS_LINE, INIT_LINE, REDUCER_LINE
from megatron_rl.hosts.flags import MIS_FUNCTION, MIS_FUNCTION_OF_FSDP

ALIKE = "the weights of its tokens do not depend on the layout"
VARIES = "NOT exact: the step depends on the layout; see the notes\n"
# What verl's examples/rollout_correction/run_qwen2_5_7b_fsdp.sh sets.
BYPASS = " ".join(
    f"algorithm.rollout_correction.{setting}"
    for setting in ("bypass_mode=true", "loss_type=reinforce", "rollout_is=sequence", "rollout_is_batch_normalize=true")
)


# What doctor prints


def test_a_step_that_depends_on_the_layout_is_not_said_to_be_exact(capsys):
    line = f"--response-lengths 3,1 -- python -m verl.trainer.main_ppo trainer.use_v1=False {BYPASS}"
    assert main(["doctor", "--launch-only", *line.split()]) == 0
    out = capsys.readouterr().out
    assert "what the notes say of the layout is not in a figure here" in out and "exact weight" not in out and VARIES in out, out


LINES = {
    "skyrl": (
        ["python", "-m", "skyrl.train.entrypoints.main_base", "trainer.algorithm.loss_reduction=token_mean_legacy"],
        (
            "1/(M dp T_b)",
            "exact: trainer.algorithm.loss_reduction=token_mean",
            "NOT exact: the weight of a token in its policy",
        ),
    ),
    "verl": (
        ["python3", "-m", "verl.trainer.main_ppo", "actor_rollout_ref.actor.loss_agg_mode=token-mean"],
        ("1/T; token_mean here", "verl's own: 1/T too, as the policy term", f"verl's own loss: {ALIKE}"),
    ),
    "nemo_rl": (["python", "examples/run_grpo.py", "loss_fn.token_level_loss=false"], ("1/(N+ m_i)", "NeMo-RL's own loss")),
    "trl": (
        ["python", "t.py", "--loss_type", "bnpo", "--beta", "0.1", "--entropy_coef", "0.01"],
        ("exact: loss_type=dapo", "in its policy, KL and entropy terms depends"),
    ),
    "miles": (["python3", "train.py", "--advantage-estimator", "grpo"], ("1/(N m_i); sample_mean here", "miles's own loss")),
    "megatron_lm": (
        ["python", "train_rl.py", "--grpo-kl-beta", "0.1"],
        ("1/(M dp T_b)", "exact: --calculate-per-token-loss", "in its policy, KL and entropy terms depends"),
    ),
    "prime_rl": (["rl", "--trainer.loss.type", "custom"], ("what it weighs is not known here: nothing was judged",)),
}


def doctor(capsys, *words: str) -> tuple[int, str]:
    code = main(["doctor", "--launch-only", *words])
    return code, capsys.readouterr().out


@pytest.mark.parametrize(
    ("host", "line", "said", "not_said"),
    [
        pytest.param(
            "miles",
            "python3 train.py --use-tis --custom-tis-function-path mine.weights",
            ("mine.weights weighs tokens and may reject some: that is not judged", "as far as they were judged; see the notes"),
            "mine.weights is not known here",
            id="miles: a correction of one's own",
        ),
        pytest.param(
            "miles",
            "python3 train.py --use-tis --custom-tis-function-path ${MINE}",
            ("${MINE} weighs tokens and may reject some: that is not judged", "as far as they were judged; see the notes"),
            "layout;",
            id="miles: a correction that is not read",
        ),
        pytest.param(
            "miles",
            f"python3 train.py --custom-config-path ${{FILE}} --custom-tis-function-path examples.{MIS_FUNCTION}",
            (f"{MIS_FUNCTION} weighs tokens and may reject some: that is not judged", "as far as they were judged; see the notes"),
            "layout;",
            id="miles: a correction that a file may turn on",
        ),
        pytest.param(
            "skyrl",
            "python -m examples.train.algorithms.dapo.main_dapo trainer.algorithm.loss_reduction=token_mean_legacy "
            "trainer.algorithm.overlong_buffer_len=512",
            ("main_dapo: what it makes of trainer.algorithm.overlong_buffer_len is not judged", "depends on the layout\n"),
            "PROBLEM",
            id="SkyRL: an entrypoint of its examples",
        ),
        pytest.param(
            "skyrl",
            "python -m mine.main trainer.algorithm.loss_reduction=token_mean_legacy trainer.algorithm.overlong_buffer_len=512",
            (
                "mine.main is an entrypoint of your own: it may train another loss, and what it makes of "
                "trainer.algorithm.overlong_buffer_len is not judged",
                "Our losses need -m skyrl.train.entrypoints.main_base",
                "NOT exact",
                "depends on the layout; see the notes\n",
            ),
            "PROBLEM",
            id="SkyRL: an entrypoint of one's own",
        ),
        pytest.param(
            "skyrl",
            "python -m skyrl.train.entrypoints.main_base trainer.override_entrypoint=mine.entry trainer.strategy=fsdp",
            (
                "trainer.override_entrypoint=mine.entry is not known here: it may train another loss",
                "as far as they were judged; see the notes\n",
            ),
            "PROBLEM",
            id="SkyRL: another trainer behind its entrypoint",
        ),
        pytest.param(
            "verl",
            "python -m recipe.mine.main actor_rollout_ref.actor.loss_agg_mode=token-mean",
            ("recipe.mine.main is a program of your own: it may train another loss", "as far as they were judged; see the notes\n"),
            "PROBLEM",
            id="verl: a program of one's own",
        ),
        pytest.param(
            "verl",
            "python -m verl.experimental.fully_async_policy.fully_async_main --config-name=fully_async_ppo_trainer.yaml "
            "actor_rollout_ref.actor.policy_loss.loss_mode=gspo algorithm.rollout_correction.bypass_mode=true",
            ("fully_async_main trains with verl's own loss; ours was not tried with it", "bypass_mode of the old trainer"),
            "PROBLEM",
            id="verl: the old trainer behind another program",
        ),
        pytest.param(
            "verl",
            "python -m verl.trainer.main_ppo distillation.enabled=True distillation.distillation_loss.use_task_rewards=False "
            "actor_rollout_ref.actor.use_kl_loss=True",
            ("distillation  ", "a token weighs 1/T"),
            "policy  ",
            id="verl: distillation in the place of the policy's loss",
        ),
        pytest.param(
            "verl",
            "python -m verl.trainer.main_ppo distillation.enabled=True actor_rollout_ref.model.mtp.enable=True "
            "actor_rollout_ref.model.mtp.enable_train=True",
            (
                "1/T too, as the policy term",
                "Megatron takes a mean over micro-batches and ranks of the mean over the response tokens of each",
                "see the notes\n",
            ),
            "PROBLEM",
            id="verl: distillation beside it",
        ),
        pytest.param(
            "miles",
            "python3 train.py --train-backend fsdp --calculate-per-token-loss",
            (
                "NOT exact: --train-backend fsdp drops the token count; a token weighs 1/dp",
                "the gradient is T'/dp times too large, and changes with dp",
                "exact: --train-backend megatron, or no --calculate-per-token-loss",
                "our losses: python -m megatron_rl.hosts.launch before the script, and --loss-type custom_loss",
            ),
            "dropout",
            id="miles: a count of tokens that FSDP drops",
        ),
        pytest.param(
            "miles",
            "python3 -m megatron_rl.hosts.launch train.py --multi-lora-n-adapters 4 --rollout-batch-size 32 "
            f"--n-samples-per-prompt 8 --global-batch-size 256 {REDUCER_LINE} --loss-aggregation constant "
            "--loss-aggregation-divisor 8192",
            (
                "step of an adapter's own batch, N is the rollout_batch_size x n_samples_per_prompt of each adapter's own file",
                "weight of a token 1/(L N) = 1/(8192 N)\n",
            ),
            "a rollout is one step",
            id="miles: adapters, each with its own N",
        ),
        pytest.param(
            "miles",
            "python3 train.py --custom-pg-loss-reducer-function-path mine.reducer",
            ("the policy term is reduced by mine.reducer, which is not known here: nothing was judged\n",),
            "exact weight",
            id="miles: a reducer of one's own",
        ),
        pytest.param(
            "miles",
            "python3 train.py --context-parallel-size 2 --custom-pg-loss-reducer-function-path "
            "examples.experimental.DrGRPO.custom_reducer:get_pg_loss_reducer",
            ("a token weighs 1/(L N) = 1/(1000 N); constant here", "ends a run with --context-parallel-size 2: it takes 1 alone"),
            "sample_mean",
            id="miles: its own reducer of Dr. GRPO",
        ),
        pytest.param(
            "miles",
            "python3 train.py --mtp-num-layers 1 --enable-mtp-training",
            (
                "--enable-mtp-training adds the loss of multi-token prediction, which is not judged",
                "as far as they were judged; see the notes\n",
            ),
            "no problems",
            id="miles: multi-token prediction",
        ),
        pytest.param(
            "nemo_rl",
            "python examples/run_grpo.py loss_fn.token_level_loss=true",
            (
                "only the overrides of the line are judged",
                "our losses: that, and ++loss_fn.megatron_rl=",
                "as far as they were judged; see the notes\n",
            ),
            "PROBLEM",
            id="NeMo-RL: a settings file that is not here",
        ),
        pytest.param(
            "trl",
            "trl grpo --loss_type bnpo --top_entropy_quantile 0.2",
            ("exact: loss_type=dapo", "top_entropy_quantile selects tokens of each micro-batch", "see the notes\n"),
            "PROBLEM",
            id="TRL: a selection of each micro-batch",
        ),
        pytest.param(
            "trl",
            "trl grpo --gradient_accumulation_steps 2 --steps_per_generation 8",
            (
                "a token weighs M_gen/(M T_gen) = 8/(2 T_gen), T_gen is the unmasked tokens of a generation",
                "exact: steps_per_generation=2",
                "before 1.10 a token weighs 1/T_gen, about 0.25 times the token mean",
                "its policy term divides by the tokens of a generation and not of the step; the same on every layout; see",
            ),
            "PROBLEM",
            id="TRL: generations of several steps",
        ),
        pytest.param(
            "trl",
            "trl grpo --loss_type grpo --gradient_accumulation_steps 2 --steps_per_generation 8",
            ("a token weighs 1/(N m_i)",),
            "of a generation",
            id="TRL: generations of several steps, a loss without T",
        ),
        pytest.param(
            "trl",
            "trl grpo --gradient_accumulation_steps 8 --generation_batch_size 64 --num_processes 2 --per_device_train_batch_size 2",
            (
                "M_gen/(M T_gen) = 16/(8 T_gen)",
                "generation_batch_size=64 / (2 of per_device_train_batch_size x 2 of --num_processes) is steps_per_generation=16",
            ),
            "PROBLEM",
            id="TRL: the size of a generation",
        ),
        pytest.param(
            "verl",
            f"python -m verl.trainer.main_ppo trainer.use_v1=false actor_rollout_ref.actor.policy_loss.loss_mode=gspo {BYPASS}",
            ("a token weighs 1/T", "in the place of loss_mode", "divides by a mean over each micro-batch", VARIES),
            "no effect",
            id="verl: bypass_mode",
        ),
        pytest.param(
            "verl",
            "python -m verl.trainer.main_ppo trainer.use_v1=false " + BYPASS.replace("reinforce", "ppo_clip"),
            ("no effect of rollout_is=sequence, rollout_is_batch_normalize=True with bypass_mode and loss_type=ppo_clip",),
            "mean over each micro-batch",
            id="verl: bypass_mode and a clip",
        ),
        pytest.param(
            "verl",
            f"python -m verl.trainer.main_ppo {BYPASS} algorithm.rollout_correction.rollout_rs=token_k1",
            (
                "no effect of rollout_is=sequence, rollout_is_batch_normalize=True, rollout_rs=token_k1, loss_type=reinforce with "
                "bypass_mode in the v1 trainer, which skips the correction: remove it, or set trainer.use_v1=False, which reads it",
                "the importance ratio is to the sampler",
                "layout\n",
            ),
            "PROBLEM",
            id="verl: bypass_mode of the v1 trainer",
        ),
        pytest.param(
            "verl",
            "python -m verl.trainer.main_ppo algorithm.rollout_correction.rollout_is=token "
            "actor_rollout_ref.rollout.calculate_log_probs=False",
            ("no effect of rollout_is=token with actor_rollout_ref.rollout.calculate_log_probs=False: set",),
            "PROBLEM",
            id="verl: a correction without log-probabilities of the sampler",
        ),
        pytest.param(
            "skyrl",
            "python -m skyrl.train.entrypoints.main_base trainer.algorithm.policy_loss_type=kl_cov",
            ("kl_cov selects tokens of each micro-batch", VARIES),
            "PROBLEM",
            id="SkyRL: a selection of each micro-batch",
        ),
        pytest.param(
            "skyrl",
            "python -m mine.main trainer.algorithm.policy_loss_type=reinforce",
            ("reinforce is your own, and what it weighs is not known here: nothing was judged",),
            "a token weighs",
            id="SkyRL: a loss of one's own",
        ),
        pytest.param(
            "verl",
            "python -m verl.trainer.main_ppo actor_rollout_ref.actor.policy_loss.loss_mode=mine",
            ("mine is your own, and what it weighs is not known here: nothing was judged",),
            "a token weighs",
            id="verl: a loss of one's own",
        ),
        pytest.param(
            "verl",
            "python -m verl.trainer.main_ppo +actor_rollout_ref.actor.policy_loss.tau_neg=1.05 "
            "actor_rollout_ref.actor.model_engine=megatron",
            ("did you mean actor_rollout_ref.actor.tau_neg?", "did you mean model_engine?"),
            "remove it",
            id="verl: settings in another place",
        ),
    ],
)
def test_doctor_says_what_of_a_stock_line_it_does_not_judge(host, line, said, not_said, capsys):
    _, out = doctor(capsys, "--", *line.split()) if host != "miles" else doctor(capsys, "--host", host, "--", *line.split())
    assert not [text for text in said if text not in out] and not_said not in out, out


MIS_FILE = "use_tis: true\nuse_rs: true\ntis_upper_bound: 2.0\nrs_veto_threshold: 1.0e-4\ntis_batch_normalize: {}\n"
OF_MICRO_BATCHES = "tis_batch_normalize: true divides the weights by their mean over a micro-batch"


@pytest.mark.parametrize("function", [MIS_FUNCTION, MIS_FUNCTION_OF_FSDP])
@pytest.mark.parametrize("host", ["miles", "slime"])
def test_weights_that_are_divided_by_a_mean_of_the_micro_batch_are_not_exact(host, function, tmp_path, capsys):
    """The stock line of the hosts' example; nothing beside it says that weights are exact, of a step neither."""
    (file := tmp_path / "mis.yaml").write_text(MIS_FILE.format("true"))
    line = f"python3 train.py --custom-config-path {file} --custom-tis-function-path examples.{function}"
    code, out = doctor(capsys, "--host", host, "--response-lengths", "3,5,8", "--", *line.split())
    assert code == 0 and OF_MICRO_BATCHES in out and "write tis_batch_normalize: false" in out, out
    assert out.endswith("NOT exact: the step depends on the layout; see the notes\n"), out
    assert "the same on every layout" not in out and "has its exact weight" not in out, out
    file.write_text(MIS_FILE.format("false"))
    _, out = doctor(capsys, "--host", host, "--", *line.split())
    assert f"{function} weighs and rejects tokens by what is in their own sample" in out and "NOT exact" not in out, out


OURS = "--rollout-batch-size 8 --n-samples-per-prompt 4 --global-batch-size 32 --loss-aggregation constant "
OURS += f"--loss-aggregation-divisor 8 {INIT_LINE} {REDUCER_LINE}"


def test_our_reducer_behind_such_weights_is_refused(tmp_path, capsys):
    (file := tmp_path / "mis.yaml").write_text(MIS_FILE.format("true"))
    line = f"python -m megatron_rl.hosts.launch train.py {OURS} --custom-config-path {file} --custom-tis-function-path"
    words = ["--host", "miles", "--response-lengths", "3,5,8", "--", *line.split(), f"examples.{MIS_FUNCTION}"]
    code, out = doctor(capsys, *words)
    assert code == 1 and OF_MICRO_BATCHES in out and "has its exact weight" not in out and "no problems" not in out, out
    file.write_text(MIS_FILE.format("false"))
    _, out = doctor(capsys, *words)
    assert OF_MICRO_BATCHES not in out and "each token has its exact weight (" in out, out


def test_our_reducer_behind_a_correction_of_ones_own_claims_no_more_than_was_judged(capsys):
    line = f"python -m megatron_rl.hosts.launch train.py {OURS} --use-tis --custom-tis-function-path ${{MINE}}"
    code, out = doctor(capsys, "--host", "miles", "--response-lengths", "3,5,8", "--", *line.split())
    said = "${MINE} weighs tokens and may reject some: that is not judged, see the notes"
    assert code == 0 and out.endswith(f"doctor: {said}\n") and "exact weight, but for what the notes say" in out, out


@pytest.mark.parametrize("of_ours", [REDUCER_LINE, CUSTOM_LOSS_LINE])
def test_multi_token_prediction_is_told_once_and_qualifies_the_step(capsys, tmp_path, of_ours):
    """As of the host's own loss: it changes with the layout whichever loss trains beside it. docs/parallelism.md has how far."""
    (script := tmp_path / "run_mine.py").write_text("import miles.utils as U\nU.execute_train(a)\n")
    mtp = f"--mtp-num-layers 1 --enable-mtp-training {INIT_LINE} {of_ours} --custom-config-path {tmp_path / 'ours.yaml'}"
    (tmp_path / "ours.yaml").write_text("loss_aggregation: sample_mean\n")
    script.write_text(f"{script.read_text()}a = '{mtp}'\n")
    for line in (["python", str(script)], [*"python -m megatron_rl.hosts.launch train.py".split(), *mtp.split()]):
        _, out = doctor(capsys, "--host", "miles", "--response-lengths", "3,5", "--", *line)
        assert out.count("as the table of docs/parallelism.md shows") == 1, out
        assert re.search("note +this step +each token has its exact weight, but for what the notes say", out), out


def test_rules_that_were_not_judged_are_not_without_problems(capsys):
    line = f"python3 train.py {INIT_LINE} {REDUCER_LINE} --custom-config-path ${{FILE}}"
    _, out = doctor(capsys, "--host", "miles", "--", *line.split())
    assert out.endswith("doctor: the rules were not judged, see the notes\n"), out


def test_the_last_of_two_files_counts_and_the_others_are_lost(tmp_path, capsys):
    (file := tmp_path / "mrl.yaml").write_text("loss_aggregation: constant\nloss_aggregation_divisor: 8.0\n")
    line = f"python3 train.py --custom-config-path ${{FIRST}} {INIT_LINE} {REDUCER_LINE} --custom-config-path {file}"
    _, out = doctor(capsys, "--host", "miles", "--", *line.split())
    said = f"given 2 times (${{FIRST}}, {file}): the last one counts, the first one has no effect"
    said += "; what the other files set is lost: write one file"
    assert said in out and "trains" in out and "not judged" not in out, out


@pytest.mark.host("MILES_ROOT")
def test_a_launcher_that_writes_its_own_file_loses_it_to_one_of_ours(tmp_path, monkeypatch, capsys):
    (file := tmp_path / "mrl.yaml").write_text("loss_aggregation: constant\nloss_aggregation_divisor: 8.0\n")
    monkeypatch.chdir(os.environ["MILES_ROOT"])
    line = ["--", "python", "scripts/run_qwen3_30b_a3b.py", "--enable-mis"]
    _, out = doctor(capsys, *line)
    assert (
        "prints, in the text that the script gives to --custom-config-path, and behind the script --extra-args '--custom-m" in out
    )
    assert "tis_batch_normalize: true divides the weights by their mean over a micro-batch" in out, out
    assert out.endswith("NOT exact: the step depends on the layout; see the notes\n"), out
    _, out = doctor(capsys, *line, "--extra-args", f"--custom-config-path {file} {INIT_LINE} {REDUCER_LINE}")
    lost = "the last one counts, the first one has no effect, and what it sets is lost: use_tis, use_rs, tis_level, rs_level, "
    assert " ".join(f"PROBLEM  --custom-config-path given 2 times (base64:..., {file}): {lost}".split()) in " ".join(out.split()), (
        out
    )
    assert "; put our lines into the text that the script gives to --custom-config-path, and leave ours out" in out, out
    assert "weight of a token 1/(L N)" in out, out


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("python -m verl.trainer.sft_trainer", "verl.trainer.sft_trainer trains on given answers"),
        ("python verl/trainer/main_eval.py", "verl/trainer/main_eval.py trains nothing"),
        ("uv run examples/run_dpo.py", "examples/run_dpo.py trains on preferences"),
        ("python -m skyrl.train.main_sft", "skyrl.train.main_sft trains on given answers"),
        ("uv run sft @ sft.toml", "sft trains on given answers"),
        ("trl dpo --config x.yaml", "trl dpo trains on preferences"),
    ],
)
def test_other_trainings_of_a_trainer_are_named_and_not_judged(line, why, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, out = doctor(capsys, "--", *line.split())
    assert code == 0 and f"doctor: {why}" in out and out.endswith(": nothing was judged\n"), out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("from trl import GRPOConfig, GRPOTrainer\nGRPOTrainer(GRPOConfig(loss_type='bnpo', beta=x))", "NOT exact: the weight of"),
        ("from trl import SFTTrainer\nSFTTrainer()", "trains on given answers"),
        ("import trl\ntrl.RLOOTrainer()", f"TRL's own loss: {ALIKE}"),
        ("import trl\ntrl.AsyncGRPOTrainer()", "NOT exact: the weight of a token in its policy term"),
        ("import trl\ntrl.PPOTrainer()", "NOT exact: the weight of a token in its policy and value terms"),
        ("import trl\ntrl.MineTrainer()", "makes a MineTrainer, whose loss is not known here"),
        ("from nemo_rl.algorithms.grpo import setup", "NeMo-RL's own loss: the weights"),
        ("from nemo_rl.algorithms.dpo import setup", "trains on preferences"),
    ],
)
def test_a_script_says_by_its_imports_whose_it_is(text, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(text)
    _, out = doctor(capsys, "--", "python", "mine.py", "loss_fn.token_level_loss=true")
    assert said in out.splitlines()[-1], out


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("python -m verl.trainer.main_ppo", "value   "),
        ("python -m skyrl.train.entrypoints.main_base trainer.algorithm.advantage_estimator=gae", "value   "),
        ("trl rloo --beta 0.1", "a token weighs 1/N; constant here; the same on every layout"),
    ],
)
def test_doctor_judges_the_value_term_and_other_trainers(line, said, capsys):
    code, out = doctor(capsys, "--", *line.split())
    assert code == 0 and said in out and "own loss: " in out.splitlines()[-1], out


@pytest.mark.parametrize("host", LINES)
def test_doctor_says_what_a_stock_line_weighs(host, capsys):
    line, said = LINES[host]
    code, out = doctor(capsys, "--host", host, "--", *line)
    assert code == 0 and not [text for text in said if text not in out], out
    assert "no problems" not in out


@pytest.mark.parametrize(
    ("pipeline", "said"),
    [("sft", "nothing was judged"), ("rlvr_rollout", "nothing was judged"), ("agentic", "layout; see the notes")],
)
def test_a_pipeline_of_roll_without_a_policy_is_not_judged(pipeline, said, tmp_path, monkeypatch, capsys):
    """Its supervised, preference and distillation workers have other losses; the rollout pipelines train nothing."""
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "mine.yaml").write_text("rollout_batch_size: 8\ndefaults: [other]\n")
    monkeypatch.chdir(tmp_path)
    _, out = doctor(capsys, "--", "python", f"start_{pipeline}_pipeline.py", "--config_name", "mine")
    assert f"launch line: roll, start_{pipeline}_pipeline.py" in out and said in out.splitlines()[-1], out


# A published launch of each trainer, of each kind that doctor reads in its own way.
PUBLISHED = [
    ("MILES", "python scripts/run_qwen3_4b.py", f"miles's own loss: {ALIKE}, as far as they were judged; see the notes"),
    ("MILES", "bash examples/lora/run-qwen3-4B-megatron-lora.sh", f"miles's own loss: {ALIKE}"),
    ("MILES", "bash examples/geo3k_vlm/run_geo3k_vlm.sh", f"miles's own loss: {ALIKE}; not read"),
    ("SLIME", "bash scripts/run-qwen3-30B-A3B.sh", f"slime's own loss: {ALIKE}"),
    ("SLIME", "bash scripts/run-qwen3-4B-base-sft.sh", "--loss-type sft_loss trains on given answers"),
    ("VERL", "bash examples/gmpo_trainer/run_qwen3_8b_fsdp.sh", "NOT exact: the weight of a token in its policy term"),
    ("VERL", "bash verl/experimental/fully_async_policy/shell/geo3k_qwen3vl_30b_a3b_fsdp2_32_32.sh", f"verl's own loss: {ALIKE}"),
    ("NEMO_RL", "uv run examples/run_ppo.py", f"NeMo-RL's own loss: {ALIKE}"),
    ("NEMO_RL", "bash tests/test_suites/llm/sft-gpt-oss-20b-1n8g-fsdp8ep8-automodel.sh", "run_sft.py trains on given answers"),
    ("SKYRL", "bash examples/train/algorithms/dapo/run_dapo_aime_qwen3_4b_aime.sh", "NOT exact: the weight of a token"),
    ("SKYRL", "bash examples/train/delta_weight_sync/run_gsm8k_qwen1p5b_nfs.sh", f"SkyRL's own loss: {ALIKE}"),  # calls another one
    ("ROLL", "bash examples/qwen3-8B-rlvr_megatron/run_rlvr_pipeline.sh", f"ROLL's own loss: {ALIKE}"),
    ("TRL", "python examples/scripts/grpo_2048.py", f"TRL's own loss: {ALIKE}, as far as they were judged; see the notes"),
    ("TRL", "python examples/scripts/openenv/opencode.py", "NOT exact: the weight of a token in its policy term depends"),
    ("NEMO_RL", "bash tests/test_suites/llm/grpo-deepscaler-1.5b-8K-tq_simple.sh", f"NeMo-RL's own loss: {ALIKE}"),
    ("VERL", "bash tests/special_e2e/run_v1_separate_async.sh", f"verl's own loss: {ALIKE}"),
    ("PRIME_RL", "uv run rl @ examples/basic/wordle/rl.toml", f"prime-rl's own loss: {ALIKE}"),
]


@pytest.mark.parametrize(
    ("host", "line", "said"),
    [pytest.param(*row, id=row[1].rpartition("/")[2], marks=pytest.mark.host(f"{row[0]}_ROOT")) for row in PUBLISHED],
)
def test_doctor_judges_a_published_launch(host, line, said, monkeypatch, capsys):
    monkeypatch.chdir(os.environ[f"{host}_ROOT"])
    code, out = doctor(capsys, "--", *line.split())
    assert code == 0 and said in out.splitlines()[-1], out


def test_doctor_says_how_far_a_recorded_step_is_off(tmp_path, capsys):
    """Samples of 10, 10, 10 and 70 tokens in two micro-batches: 20 and 80 tokens, exact 1 / 100, so factors 2.5 and 0.625."""
    png = tmp_path / "step.png"
    step = ["--response-lengths", "10,10,10,70", "--micro-batch-size", "2"]
    code, out = doctor(capsys, *step, "--plot", str(png), "--host", "trl", "--", *LINES["trl"][0])
    assert "policy, KL, entropy: a token weighs 0.625 to 2.5 times its exact weight, and the gradient is 75% off" in out, out
    assert code == 0 and png.read_bytes().startswith(b"\x89PNG")
    code, out = doctor(capsys, *step, "--host", "miles", "--", *LINES["miles"][0])
    assert "each token has its exact weight" in out, out


GENERATION = ["python", "t.py", "--loss_type", "dapo", "--gradient_accumulation_steps", "2", "--per_device_train_batch_size", "1"]
GENERATION += ["--num_generations", "2"]


# A line, what is said of its sizes, and the rank and micro-batch of the last of four samples.
DYNAMIC = ["--use-dynamic-batch-size"]
BUDGET_OF_FOUR = ["python", "-m", verl.MAIN, f"{verl.ACTOR}use_dynamic_bsz=True", f"{verl.ACTOR}ppo_max_token_len_per_gpu=4"]
LAYOUTS = [
    ("trl", [*GENERATION], "micro-batch size 1 of per_device_train_batch_size; a step of the line has 2 samples", "0.3"),
    ("trl", ["torchrun", "--nproc-per-node=2", "--nnodes", "2", *GENERATION[1:]], "4 of --nproc-per-node x --nnodes", "3.0"),
    (
        "trl",
        ["accelerate", "launch", "--config_file", "a.yaml", *GENERATION[1:]],
        "data-parallel size 2 of num_processes of a.yaml, micro-batch size 1 of per_device_train_batch_size)",
        "1.1",
    ),
    (
        "trl",
        ["python", "t.py"],
        "micro-batch size 8 of per_device_train_batch_size by default; a step of the line has 8 samples",
        "0.0",
    ),
    (
        "trl",
        ["accelerate", "launch", "t.py"],
        "data-parallel size not known here, and taken as 1: give --num_processes, or --data-parallel-size before --",
        "0.0",
    ),
    (
        "trl",
        ["python", "t.py", "--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "4"],
        "a step of the line has 8 samples, in 4 micro-batches a rank, and this one has 2)",
        "0.1",
    ),
    (
        "trl",
        ["accelerate", "launch", "--num_processes", "8", "t.py"],
        "(the command line; micro-batch size 8 of per_device_train_batch_size by default; judged as on 1 rank: the step has 4 of "
        "the 8 or more samples that 8 data-parallel ranks of --num_processes need; a step of the line has 64 samples)",
        "0.0",
    ),
    (
        "skyrl",
        [
            *("python", "-m", skyrl.ENTRY, "trainer.placement.policy_num_gpus_per_node=4", "trainer.strategy=megatron"),
            *("trainer.policy.megatron_config.tensor_model_parallel_size=2", "trainer.micro_train_batch_size_per_gpu=2"),
        ],
        "micro-batch size 2 of trainer.micro_train_batch_size_per_gpu",
        "1.0",
    ),
    # 3 + 5 | 1 + 7, and 3 + 5 + 1 | 7
    ("skyrl", ["python", "-m", skyrl.ENTRY, "trainer.max_tokens_per_microbatch=8"], "micro-batches of about 8 tokens of", "0.1"),
    (
        "miles",
        ["python3", "train.py", *DYNAMIC, "--max-tokens-per-gpu", "9"],
        "9 tokens of --max-tokens-per-gpu, prompt tokens not counted, samples in the order given; the host packs them first-fit",
        "0.1",
    ),
    # Budgets of one rank, of which 2 share a sample: 3 + 5 | 1 + 7 of 8 tokens. Other trainers' budgets are of a micro-batch.
    (
        "slime",
        ["python3", "train.py", *DYNAMIC, "--max-tokens-per-gpu", "4", "--context-parallel-size", "2"],
        "micro-batches of about 8 tokens of --max-tokens-per-gpu x --context-parallel-size",
        "0.1",
    ),
    (
        "verl",
        [*BUDGET_OF_FOUR, f"{verl.ACTOR}megatron.context_parallel_size=2"],
        f"8 tokens of {verl.ACTOR}ppo_max_token_len_per_gpu x {verl.ACTOR}megatron.context_parallel_size",
        "0.0",  # verl deals by length: 1 + 7 | 3 + 5, of the most work first
    ),
    (
        "verl",  # the older name counts where it is above 1, and both are one size: 4 ranks are 2 of data
        [
            *(*BUDGET_OF_FOUR, f"{verl_refusals.ULYSSES}=1", f"{verl.ACTOR}ulysses_sequence_parallel_size=2"),
            "trainer.n_gpus_per_node=4",
        ],
        f"n_gpus_per_node / {verl.ACTOR}ulysses_sequence_parallel_size, micro-batches of about 8 tokens",
        "0.0",
    ),
    (
        "verl",  # 7 | 1 and 5 | 3
        [*BUDGET_OF_FOUR, f"{verl.ACTOR}ulysses_sequence_parallel_size=1", "trainer.n_gpus_per_node=2"],
        "data-parallel size 2 of trainer.n_gpus_per_node, micro-batches of about 4 tokens of",
        "0.0",
    ),
    (
        "verl",
        [*BUDGET_OF_FOUR, f"{verl_refusals.ULYSSES}=$SP"],
        "1 sample a micro-batch, for the tokens that actor_rollout_ref.actor.use_dynamic_bsz gives them are not known",
        "0.3",
    ),
    (
        "skyrl",
        [
            *("python", "-m", skyrl.ENTRY, "trainer.strategy=megatron", "trainer.max_tokens_per_microbatch=8"),
            "trainer.policy.megatron_config.context_parallel_size=2",
        ],
        "prompt tokens not counted, samples in the order given; SkyRL deals them by length",
        "0.1",
    ),
    ("slime", ["python3", "train.py", *DYNAMIC], "that --use-dynamic-batch-size gives them are not known", "0.3"),
    (
        "verl",
        ["python", "-m", verl.MAIN, f"{verl.ACTOR}use_dynamic_bsz=True", f"{verl.ACTOR}ppo_max_token_len_per_gpu=8"],
        "micro-batches of about 8 tokens of",
        "0.0",
    ),
    ("verl", ["python", "-m", verl.MAIN, f"{verl.ACTOR}use_dynamic_bsz=True"], "about 16384 tokens of", "0.0"),
    (
        "verl",
        ["python", "-m", verl.MAIN, "trainer.n_gpus_per_node=2", f"{verl.ACTOR}ppo_micro_batch_size_per_gpu=2"],
        "data-parallel size 2 of trainer.n_gpus_per_node, micro-batch size 2 of",
        "1.0",
    ),
    ("miles", ["python3", "train.py", "--micro-batch-size", "2"], "micro-batch size 2 of --micro-batch-size", "0.1"),
    (
        "miles",
        ["python3", "train.py", "--micro-batch-size", "3"],
        "; 3 samples a micro-batch do not divide it: the last one has 1 on",
        "0.1",
    ),
    (  # 8 GPUs a node are the host's default
        "miles",
        ["python3", "train.py", "--actor-num-nodes", "1", "--context-parallel-size", "4", "--micro-batch-size", "1"],
        "data-parallel size 2 of --actor-num-nodes x --actor-num-gpus-per-node by default / --context-parallel-size, micro",
        "1.1",
    ),
    (  # FSDP has data parallelism alone
        "miles",
        ["python3", "train.py", "--train-backend", "fsdp", "--actor-num-nodes", "1", "--actor-num-gpus-per-node", "2", "${M[@]}"],
        "data-parallel size 2 of --actor-num-nodes x --actor-num-gpus-per-node, micro",
        "1.1",
    ),
    (
        "slime",
        ["python3", "train.py", "--actor-num-nodes", "1", "--tensor-model-parallel-size", "$TP"],
        "taken as 1: --tensor-model-parallel-size was not read; give --data-parallel-size before --",
        "0.3",
    ),
    (
        "miles",
        [*("python3", "train.py", "--actor-num-nodes", "1", "--actor-num-gpus-per-node", "8"), "${PERF_ARGS[@]}"],
        "taken as 1: --tensor-model-parallel-size, --pipeline-model-parallel-size, --context-parallel-size were not read",
        "0.3",
    ),
    (
        "verl",
        ["python", "-m", verl.MAIN, "trainer.n_gpus_per_node=2", f"{verl.ACTOR}megatron.context_parallel_size=$CP"],
        f"taken as 1: {verl.ACTOR}megatron.context_parallel_size was not read; give --data-parallel-size before --",
        "0.3",
    ),
    (
        "megatron_lm",
        ["torchrun", "--nproc-per-node", "4", "train_rl.py", "--micro-batch-size", "2", "--tensor-model-parallel-size", "2"],
        "data-parallel size 2 of --nproc-per-node / --tensor-model-parallel-size, micro-batch size 2 of",
        "1.0",
    ),
]


@pytest.mark.parametrize(("host", "line", "said", "place"), LAYOUTS)
def test_doctor_and_explain_cut_a_step_as_the_line_does(host, line, said, place, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text("num_processes: 2")
    step = ["--response-lengths", "3,5,1,7", "--host", host]
    _, out = doctor(capsys, *step, "--", *line)
    of_step = [row for row in out.splitlines() if " this step " in row]
    assert any(said in row for row in of_step), out
    assert not any("taken as 1: " in row and "micro-batch" in row for row in of_step), out  # in a note of its own
    _, shown = explain(capsys, *step, "--", *line)
    places = [row.split()[3] for row in shown.splitlines() if row.startswith("sample ")]
    assert places[-1] == place and said in shown, shown
    is_other = any(words in out for words in ("a step of the line has", "too few", "do not divide"))
    assert ("unmasked tokens; " in shown.splitlines()[0]) == is_other, shown  # above the weights


def test_a_smaller_step_keeps_the_size_of_a_micro_batch(capsys):
    """3 samples of a line with 2 micro-batches of 2: 2 and 1. Of one with 2 micro-batches of 1, each a generation, they are 3
    generations, of 3, 5 and 7 tokens: 1 / (3 x 3), 1 / (3 x 5), 1 / (3 x 7), and 15 / (3 x 3) = 1.67 times 1 / T."""
    line = [*GENERATION, "--per_device_train_batch_size", "2"]
    _, out = explain(capsys, "--response-lengths", "3,5,7", "--host", "trl", "--", *line)
    assert [row.split()[3] for row in out.splitlines() if row.startswith("sample ")] == ["0.0", "0.0", "0.1"], out
    assert "; a step of the line has 4 samples; 2 samples a micro-batch do not divide it: the last one has 1 on rank 0" in out, out
    line = [*GENERATION, "--steps_per_generation", "1", "--num_generations", "${N}"]
    _, out = explain(capsys, "--response-lengths", "3,5,7", "--host", "trl", "--", *line)
    assert [row.split()[3] for row in out.splitlines() if row.startswith("sample ")] == ["0.0", "0.1", "0.2"], out
    assert [row.split()[5] for row in out.splitlines() if row.startswith("sample ")] == ["0.1111", "0.06667", "0.04762"], out


def test_a_step_that_is_exact_by_chance_says_so(capsys):
    norm = f"{verl.ACTOR}loss_agg_mode=seq-mean-token-sum-norm"
    _, out = doctor(capsys, "--response-lengths", "5,5", "--", "python", "-m", verl.MAIN, norm, "trainer.n_gpus_per_node=1")
    assert re.search("this step +policy, value: exact on this step, not on others", out) and "NOT exact" in out, out


def test_a_kl_of_coefficient_0_is_no_term(capsys):
    line = ["python", "-m", verl.MAIN, f"{verl.ACTOR}use_kl_loss=True", f"{verl.ACTOR}kl_loss_coef=0.0"]
    _, out = doctor(capsys, "--", *line)
    assert re.search("ok +KL +0.0 x low_var_kl: a metric alone", out) and "1/T too, as the policy term" in out, out
    assert out.count(" KL ") == 1, out


def test_lengths_that_the_launch_cannot_make_are_told(capsys):
    line = ["python", "-m", verl.MAIN, "data.max_response_length=1024", *BUDGET_OF_FOUR[3:], "trainer.n_gpus_per_node=1"]
    _, out = doctor(capsys, "--response-lengths", "1024,1025", "--", *line)
    assert "a response of 1025 tokens cannot occur: data.max_response_length=1024 is the longest one" in out, out
    assert f"is more than the 4 of {verl.ACTOR}ppo_max_token_len_per_gpu, and the trainer raises" in out, out
    line[-2] = f"{verl.ACTOR}ppo_max_token_len_per_gpu=1024"
    _, out = doctor(capsys, "--response-lengths", "1024,3", "--", *line)
    assert "cannot occur" not in out and "raises" not in out, out


def test_the_flags_of_the_command_win_over_the_line(capsys):
    line = ["accelerate", "launch", "--num_processes", "4", *GENERATION[1:], "--generation_batch_size", "4"]
    step = ["--response-lengths", "3,5,1,7", "--data-parallel-size", "2", "--host", "trl"]
    _, out = doctor(capsys, *step, "--micro-batch-size", "2", "--", *line)
    assert "data-parallel size 2 of --data-parallel-size, micro-batch size 2 of --micro-batch-size)" in out, out
    _, out = explain(capsys, *step, "--num-microbatches", "1", "--", *line)
    assert "data-parallel size 2 of --data-parallel-size, 1 micro-batch a rank of --num-microbatches)" in out, out


def test_micro_batches_that_are_asked_for_hold_where_ranks_would_be_empty(capsys):
    line = ["python", "-m", verl.MAIN, "trainer.n_gpus_per_node=8", f"{verl.ACTOR}use_dynamic_bsz=True"]
    _, out = explain(capsys, "--response-lengths", "3,5,1,7", "--num-microbatches", "2", "--", *line)
    assert [row.split()[3] for row in out.splitlines() if row.startswith("sample ")] == ["0.0", "0.0", "0.1", "0.1"], out


def test_a_step_with_exact_weights_has_no_picture_and_keeps_its_verdict(tmp_path, capsys):
    png = tmp_path / "step.png"
    code, out = doctor(capsys, "--response-lengths", "3,5", "--plot", str(png), "--host", "miles", "--", "python3", "train.py")
    assert code == 0 and not png.exists() and f"{png} is not written" in out and "do not depend on the layout" in out, out


def test_a_step_is_judged_beside_a_loss_of_ours(capsys):
    for aggregation, said in (("token_mean", "each token has its exact weight"), ("constant", "not judged: what the line trains")):
        ours = f"{verl.LOSS_MODE}=megatron_rl.gspo.{aggregation}"
        _, out = doctor(capsys, "--response-lengths", "3,5", "--", "python", "-m", verl.MAIN, ours)
        assert re.search(f"this step +{said}", out), out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--micro-batch-size", "2", "--", "rl"], "--micro-batch-size goes with a recorded step"),
        (["--response-lengths", "3,5"], "--response-lengths is for the launch line after --"),
        (["--response-lengths", "3", "--rollouts", "x", "--", "rl"], "a step has one source"),
        (["--response-lengths", "3", "--micro-batch-size", "0", "--", "rl"], "--micro-batch-size 0 must be at least 1"),
    ],
)
def test_a_flag_that_does_nothing_is_refused(words, said, capsys):
    code = main(["doctor", "--launch-only", *words])
    assert code == 2 and said in capsys.readouterr().err


# explain, of a line


def explain(capsys, *words: str) -> tuple[int, str]:
    code = main(["explain", *words])
    shown = capsys.readouterr()
    return code, shown.out + shown.err


def test_explain_shows_the_weights_of_a_stock_line(capsys):
    """Samples of 10, 10, 10 and 70 tokens in two micro-batches, as doctor's step above: 1 / (2 x 20) and 1 / (2 x 80)."""
    step = ["--response-lengths", "10,10,10,70", "--num-microbatches", "2", "--host", "trl"]
    code, out = explain(capsys, *step, "--", *LINES["trl"][0])
    rows = [line.split() for line in out.splitlines() if line.startswith("sample ")]
    assert [row[3:] for row in rows] == [
        ["0.0", "10/10", "0.025", "25.0%", "x", "2.5"],
        ["0.0", "10/10", "0.025", "25.0%", "x", "2.5"],
        ["0.1", "10/10", "0.00625", "6.2%", "x", "0.625"],
        ["0.1", "70/70", "0.00625", "43.8%", "x", "0.625"],
    ]
    assert code == 0 and out.splitlines()[-1].startswith("TRL's own loss: NOT exact"), out
    assert json.loads(explain(capsys, *step, "--json", "--", *LINES["trl"][0])[1])["own_loss"]["policy"]["weights"][0] == 0.025


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--loss-aggregation", "constant", "--", "python3", "train.py"], "--loss-aggregation beside a launch line"),
        (["--", "uv", "run", "sft", "@", "x.toml"], "sft trains on given answers, without a policy loss: nothing was judged"),
        (
            ["--", "python", "-m", verl.MAIN, f"{verl.LOSS_MODE}=megatron_rl.gspo.constant"],
            "constant needs its L",
        ),
        (
            ["--rollout-ids", "0,0", "--", "python", "-m", skyrl.ENTRY],
            "rollouts of several samples, and the weights of a line are shown for samples that are rollouts",
        ),
        (["--", "python", "-m", skyrl.ENTRY, f"{skyrl.REDUCTION}=prompt_mean"], "give --prompt-ids a,a,b"),
    ],
)
def test_explain_says_why_a_line_has_no_weights(words, said, capsys):
    code, out = explain(capsys, "--response-lengths", "3,5", *words)
    assert code == 2 and said in out, out


def test_explain_weighs_prompts(capsys):
    """Prompts of 3 + 5 and 2 tokens: 1 / (2 x 8) and 1 / (2 x 2)."""
    line = ["python", "-m", skyrl.ENTRY, f"{skyrl.REDUCTION}=prompt_mean", "trainer.algorithm.use_kl_loss=false"]
    _, out = explain(capsys, "--response-lengths", "3,5,2", "--prompt-ids", "a,a,b", "--", *line)
    assert [line.split()[5] for line in out.splitlines() if line.startswith("sample ")] == ["0.0625", "0.0625", "0.25"], out


CONSTANT = "--loss-aggregation constant --loss-aggregation-divisor 8"


@pytest.mark.parametrize(
    "line",
    [
        f"python -m {verl.MAIN} {verl.LOSS_MODE}=megatron_rl.grpo.constant {verl.ACTOR}loss_scale_factor=8",
        f"python -m megatron_rl.hosts.launch miles/train.py {REDUCER_LINE} {CONSTANT}",
        f"python -m megatron_rl train {CONSTANT} --kl-coefficient 0.1",
    ],
    ids=["verl", "miles", "train"],
)
def test_explain_shows_a_line_that_trains_our_loss_as_any_other(line, capsys):
    """1 / (8 x 2). Where KL is ours it is a mean over samples: 1 / (2 x 3) and 1 / (2 x 5). doctor's rows follow."""
    code, out = explain(capsys, "--response-lengths", "3,5", "--", *line.split())
    rows = [line.split()[5:] for line in out.splitlines() if line.startswith("sample ")]
    kl = [["0.1667", "50.0%"], ["0.1", "50.0%"]] if "--kl" in line else [[], []]
    assert code == 0 and rows == [["0.0625", "37.5%", *kl[0]], ["0.0625", "62.5%", *kl[1]]] and "policy 1/(L N), L = 8" in out, out
    assert "each token has its exact weight" in out and "launch line: " in out


def test_a_script_of_verl_names_its_branches_and_the_place_of_our_head(tmp_path, capsys):
    """A script of a trainer that settings configure, as one of miles or slime."""
    line = f"python3 -m {verl.MAIN} {verl.AGG_MODE}=$MODE {verl.EXTERNAL_LIB}={verl.LOG_PROBS} {verl.FUSED_KERNELS}=$FUSED\n"
    (tmp_path / "run.sh").write_text(f'FUSED=False\nMODE=token-mean\nif [ -n "$X" ]; then\n  MODE=token-sum\nfi\n{line}')
    _, out = doctor(capsys, "--", "bash", str(tmp_path / "run.sh"))
    assert "note     branches " in out and "each branch of the script had run: MODE (line 4)" in out, out
    assert "log-probabilities come from logits; with =True from hidden states by our head" in out, out


@pytest.mark.parametrize("typed", [[], ["DEVICE=gpu"], ["env", "DEVICE=npu"]], ids=["", "gpu", "npu"])
def test_the_counts_of_a_script_are_those_of_the_branch_that_runs(tmp_path, capsys, monkeypatch, typed):
    """verl's scripts set a step of 16 prompts on NPUs alone. The row on branches is behind those on the loss."""
    monkeypatch.delenv("DEVICE", raising=False)
    script = """DEVICE=${DEVICE:-$(python3 -c 'import torch_npu' && echo npu || echo gpu)}
        prompts=1024; of_step=256; A=(a.b=1)
        case "${DEVICE}" in gpu) A+=(a.c=2) ;; npu) prompts=16; of_step=16; A+=(a.d=1 a.e=1 a.f=1) ;; esac
    """
    line = f"python3 -m {verl.MAIN} {verl.LOSS_MODE}=megatron_rl.gspo.prompt_mean data.train_batch_size=$prompts "
    (tmp_path / "run.sh").write_text(script + line + f'{verl.ACTOR}ppo_mini_batch_size=$of_step "${{A[@]}}"\n')
    code, out = doctor(capsys, "--", *typed, "bash", str(tmp_path / "run.sh"))
    rows = [row.split(maxsplit=2) for row in out.splitlines()[1:-1]]
    if not typed:
        assert rows[-1][1] == "branches" and "DEVICE=... before bash" in out, out
        assert [row[0] for row in rows if row[1] == "mini-batch"] == ["note"] and "prompts a step" not in out, out
        assert f"in each: data.train_batch_size, {verl.ACTOR}ppo_mini_batch_size, a.c, a.d and 2 more" in out and code == 0, out
    else:
        assert ("256 of 1024 prompts a step" if "DEVICE=gpu" in typed else "16 of 16 prompts") in out and "branches" not in out, out
        assert code == ("DEVICE=gpu" in typed)


def test_explain_names_its_own_flag(capsys):
    _, out = explain(capsys, "--host", "prime_rl", "--response-lengths", "3,5", "--loss-aggregation", "sample_mean")
    assert "give --one-sample-per-rollout here, and --trainer.loss.kwargs.one-sample-per-rollout True there" in out


@pytest.mark.parametrize(("divisor", "is_said"), [("7", False), ("6", True)])
def test_a_response_that_is_longer_than_its_divisor_is_told(divisor, is_said, capsys):
    ours = f"--loss-aggregation constant --loss-aggregation-divisor {divisor} {REDUCER_LINE}"
    line = f"python -m megatron_rl.hosts.launch slime/train.py {ours} --disable-grpo-std-normalization".split()
    _, out = explain(capsys, "--response-lengths", "3,5,1,7", "--host", "slime", "--", *line)
    assert (f"a response of 7 tokens is longer than L = {divisor}: L is the longest one" in out) == is_said, out
