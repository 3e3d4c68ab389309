"""A batch without whole steps, on lines of trainers that refuse it or drop its rest: doctor says it first. Of verl:
test_verl_refusals."""

from __future__ import annotations

import pytest

from megatron_rl.__main__ import main

REDUCER = "--custom-pg-loss-reducer-function-path megatron_rl.reducers.get_pg_loss_reducer --loss-aggregation sample_mean"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "python -m skyrl.train.entrypoints.main_base trainer.train_batch_size=100",
            "SkyRL refuses this run: trainer.policy_mini_batch_size=256 does not divide trainer.train_batch_size=100; "
            "set trainer.policy_mini_batch_size=100\n",
        ),
        ("python -m skyrl.train.entrypoints.main_base trainer.train_batch_size=512", None),
        ("python -m skyrl.train.entrypoints.main_base trainer.train_batch_size=$SIZE", None),
        (
            "python examples/run_grpo.py grpo.num_prompts_per_step=10 grpo.num_generations_per_prompt=5 "
            "policy.train_global_batch_size=20",
            "policy.train_global_batch_size=20 does not divide grpo.num_prompts_per_step=10 x "
            "grpo.num_generations_per_prompt=5 = 50 samples; set policy.train_global_batch_size=10\n",
        ),
        ("python examples/run_grpo.py grpo.num_prompts_per_step=10 policy.train_global_batch_size=20", None),
    ],
)
def test_a_batch_without_whole_steps_is_said_before_its_trainer_refuses_it(line, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code = main(["doctor", "--launch-only", "--", *line.split()])
    out = capsys.readouterr().out
    assert code == (0 if said is None else 1) and (said or "own loss: ") in out and ("refuses" in out) == (said is not None), out


ROLL_STEP = "per_device_train_batch_size: 4, gradient_accumulation_steps: {}"


@pytest.mark.parametrize(
    ("accumulation", "devices", "more", "said"),
    [
        # 2 of 4 devices train one sample together: 4 x 6 x 2 = 48 samples a step, and a batch has 16 x 8 = 128.
        (
            6,
            "list(range(0,4))",
            "",
            "ROLL refuses this run: actor_train.training_args.per_device_train_batch_size=4 x "
            "actor_train.training_args.gradient_accumulation_steps=6 x 2 data-parallel ranks = 48 samples does not divide "
            "rollout_batch_size=16 x num_return_sequences_in_group=8 = 128 samples; set "
            "actor_train.training_args.gradient_accumulation_steps=4\n",
        ),
        (8, "list(range(0,4))", "", None),
        (6, "list(range(0,4))", "  use_dynamic_batching_in_train: true\n", None),
        (6, "${my_devices}", "", None),
        (6, "list(range(0,4))", "train_env_manager: {group_size: 8}\n", None),
        # No number of micro-batches is enough: 4 x 3 samples of all ranks do not divide 128, and 18 x 8 = 12 x 12.
        (1, "list(range(0,6))", "", "set rollout_batch_size=18 and actor_train.training_args.gradient_accumulation_steps=1\n"),
    ],
)
def test_roll_says_it_of_a_yaml(accumulation, devices, more, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(
        "rollout_batch_size: 16\nnum_return_sequences_in_group: 8\nadv_estimator: grpo\nactor_train:\n"
        f"  device_mapping: {devices}\n  training_args: {{{ROLL_STEP.format(accumulation)}}}\n"
        "  strategy_args: {strategy_name: megatron_train, strategy_config: {tensor_model_parallel_size: 2}}\n" + more
    )
    code = main(["doctor", "--launch-only", "--", *"python start_rlvr_pipeline.py --config_path . --config_name mine".split()])
    out = capsys.readouterr().out
    assert code == (0 if said is None else 1) and (said or "own loss: ") in out and ("refuses" in out) == (said is not None), out


@pytest.mark.parametrize("host", ["miles", "slime"])
@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        # 25 x 4 = 100 = 64 + 36
        (
            "--global-batch-size 64",
            0,
            "{} trains 64 of --rollout-batch-size=25 x --n-samples-per-prompt=4 = 100 samples and drops the last 36: "
            "--global-batch-size=64 does not divide it; set --global-batch-size=50\n",
        ),
        (
            "--global-batch-size 128",
            1,
            "{} refuses this run: --global-batch-size=128 does not divide --rollout-batch-size=25 x --n-samples-per-prompt=4 = 100 "
            "samples; set --global-batch-size=100\n",
        ),
        ("--global-batch-size 50", 0, None),
        ("--global-batch-size $SIZE", 0, None),
        ("--global-batch-size 64 --custom-generate-function-path mine.generate", None, None),
    ],
)
def test_a_rest_that_is_dropped_is_noted(host, ours, flags, code, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    start = f"{ours * '-m megatron_rl.hosts.launch '}train.py {ours * REDUCER} --rollout-batch-size 25 --n-samples-per-prompt 4"
    found = main(["doctor", "--launch-only", "--host", host, "--", "python", *start.split(), *flags.split()])
    out = capsys.readouterr().out
    assert code in (found, None) and (said or "").format(host) in out and ("mini-batch" in out) == (said is not None), out


def test_miles_may_keep_the_rest_as_a_smaller_step(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    line = "python train.py --rollout-batch-size 25 --n-samples-per-prompt 4 --global-batch-size 64 --allow-partial-train-step"
    for more, is_dropped in (("", True), (" --use-dynamic-batch-size --max-tokens-per-gpu 9", False)):
        assert main(["doctor", "--launch-only", "--host", "miles", "--", *(line + more).split()]) == 0
        assert ("drops the last 36" in capsys.readouterr().out) == is_dropped
