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
        # 100 // 3 = 33, 100 // 18 = 5, and a step is never empty.
        (
            "--num-steps-per-rollout 3",
            0,
            "{} makes 3 steps of 33 of --rollout-batch-size=25 x --n-samples-per-prompt=4 = 100 samples and drops the last 1: "
            "--num-steps-per-rollout=3 does not divide it; set --num-steps-per-rollout=2\n",
        ),
        (
            "--num-steps-per-rollout 18",
            0,
            "{} makes 20 steps of 5 of --rollout-batch-size=25 x --n-samples-per-prompt=4 = 100 samples: "
            "--num-steps-per-rollout=18 does not divide it; set --num-steps-per-rollout=10\n",
        ),
        ("--num-steps-per-rollout 128", 1, "--num-steps-per-rollout=128 is more than --rollout-batch-size=25 x"),
        (
            "--num-steps-per-rollout 3 --global-batch-size 50",
            1,
            "{} refuses this run: --global-batch-size=50 beside --num-steps-per-rollout=3, which makes it 33 of "
            "--rollout-batch-size=25 x --n-samples-per-prompt=4 = 100 samples; remove one of them\n",
        ),
        ("--num-steps-per-rollout 4", 0, None),
        ("--num-steps-per-rollout $STEPS", 0, None),
    ],
)
def test_a_rest_that_is_dropped_is_noted(host, ours, flags, code, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    start = f"{ours * '-m megatron_rl.hosts.launch '}train.py {ours * REDUCER} --rollout-batch-size 25 --n-samples-per-prompt 4"
    found = main(["doctor", "--launch-only", "--host", host, "--", "python", *start.split(), *flags.split()])
    out = capsys.readouterr().out
    assert code in (found, None) and (said or "").format(host) in out and ("mini-batch" in out) == (said is not None), out


@pytest.mark.parametrize("step", ["--global-batch-size 64", "--num-steps-per-rollout 3"])
def test_miles_keeps_the_rest_as_a_smaller_step_where_it_does_not_trim_it_before(step, tmp_path, monkeypatch, capsys):
    """Of 100: 64 and 36, 3 x 33 and 1. test_rollout_hosts has the host's own code."""
    monkeypatch.chdir(tmp_path)
    line = f"python train.py --rollout-batch-size 25 --n-samples-per-prompt 4 {step} --allow-partial-train-step"
    dynamic, untrimmed = "--use-dynamic-batch-size", "--disable-rollout-trim-samples"
    for more, missing in (
        ((), (dynamic, untrimmed)),
        ((dynamic,), (untrimmed,)),
        ((untrimmed,), (dynamic,)),
        ((dynamic, untrimmed), ()),
    ):
        assert main(["doctor", "--launch-only", "--host", "miles", "--", *line.split(), *more]) == 0
        out = capsys.readouterr().out
        assert (f", or add {' '.join(missing)}, without which --allow-partial-train-step has no effect\n" in out) == bool(
            missing
        ), out
        assert ("drops the last" in out) == bool(missing) and ("and one of 1:" in out) == (not missing and "num-" in step), out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            "--num-steps-per-rollout 3",
            "step of 33 rollouts (one of several samples counts once), of each 100 the last 1 is dropped |",
        ),
        (
            "--global-batch-size 64",
            "step of 64 rollouts (one of several samples counts once), 16 prompts, of each 100 the last 36 are dropped |",
        ),
        ("--num-steps-per-rollout 4", "step of 25 rollouts (one of several samples counts once) |"),
    ],
)
def test_the_start_line_counts_what_is_dropped(flags, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    line = f"python -m megatron_rl.hosts.launch train.py {REDUCER} --rollout-batch-size 25 --n-samples-per-prompt 4 {flags}"
    main(["doctor", "--launch-only", "--host", "slime", "--", *line.split()])
    assert said in next(row for row in capsys.readouterr().out.splitlines() if " trains " in row)


def test_a_number_of_steps_gives_their_size_as_in_the_host(tmp_path, monkeypatch, capsys):
    """One step a rollout: the reward hook knows its counts."""
    monkeypatch.chdir(tmp_path)
    hook = "--custom-reward-post-process-path megatron_rl.hooks.reward_post_process"
    line = f"python -m megatron_rl.hosts.launch train.py {REDUCER.replace('sample_mean', 'token_mean')} {hook}"
    line += " --rollout-batch-size 25 --n-samples-per-prompt 4 --num-steps-per-rollout"
    for number, code in ((1, 0), (2, 1)):
        assert main(["doctor", "--launch-only", "--host", "miles", "--", *line.split(), str(number)]) == code
        assert f"step of {100 // number} rollouts" in capsys.readouterr().out or code
