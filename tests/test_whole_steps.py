"""A batch without whole steps, on lines of trainers that refuse it: doctor says it first. Of verl: test_verl_refusals."""

from __future__ import annotations

import pytest

from megatron_rl.__main__ import main


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
