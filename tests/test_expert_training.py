"""Mixtures of experts in the training command: sampling, steps and checkpoints on expert-parallel ranks, and the flags."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
import trainer_cases as cases
from helpers import error_of, pool_of
from test_checkpoints import CONFIG, EXPERTS, OPTIONS, run_on_rank

from megatron_rl.__main__ import main
from megatron_rl.testing.ranks import run_ranks
from megatron_rl.train.generation import SamplingSettings
from megatron_rl.train.options import TrainOptions, experts_of
from megatron_rl.train.writers import REWARD
from megatron_rl.validation.experts import expert_problems

pytestmark = pytest.mark.megatron

EP = "expert_model_parallel_size"


pool = pool_of(2)


def load_alone_on_rank(rank: int, output_dir: Path) -> str:
    return error_of(lambda: run_on_rank(rank, output_dir, {**OPTIONS, "num_rollouts": 2}, {"experts": EXPERTS}, True))


def test_a_checkpoint_of_expert_parallel_ranks_is_refused_on_another_number_of_them(pool, tmp_path):
    """Megatron-Core has two optimisers where experts are spread over ranks, one where they are not."""
    pool.run(run_on_rank, tmp_path, {**OPTIONS, "num_rollouts": 1}, {"experts": EXPERTS}, world_size=2, **{EP: 2})
    (message,) = pool.run(load_alone_on_rank, tmp_path, world_size=1)
    assert "was saved with --expert-model-parallel-size 2, this run has 1: give it the same" in message


def responses_on_rank(rank: int) -> list[list[int]]:
    """Rank 0 has three prompts in forwards of one row, rank 1 one prompt."""
    trainer = cases.tiny_trainer(CONFIG, experts=EXPERTS)
    settings = SamplingSettings(max_new_tokens=3, end_tokens=(), temperature=1.0, vocab_size=cases.VOCABULARY, rows_per_forward=1)
    prompts = {0: [[1, 2], [3], [4, 5, 6]], 1: [[7]]}[rank]
    return trainer.sample(prompts, list(range(len(prompts))), settings, lambda ids, positions, columns: 0.0 * columns.float())


def test_ranks_with_unlike_numbers_of_prompts_sample_together(pool):
    """Catches a rank that stops while another waits for it in the exchange of tokens."""
    found = pool.run(responses_on_rank, world_size=2, **{EP: 2})
    assert [[len(response) for response in of_rank] for of_rank in found] == [[3, 3, 3], [3]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_experts": 4, EP: 3}, "expert_model_parallel_size=3 does not divide the 4 experts"),
        ({"num_experts": 4, cases.TP: 2}, "tensor_model_parallel_size=2 with experts needs sequence_parallel"),
    ],
)
def test_experts_that_do_not_fit_are_refused_by_name(options, message):
    assert [problem for problem in expert_problems(dataclasses.asdict(TrainOptions(**options))) if problem.startswith(message)]
    assert not [*expert_problems(dataclasses.asdict(TrainOptions(num_experts=4, **{EP: 2})))]


def test_a_dense_model_has_no_options_of_experts():
    assert experts_of(TrainOptions()) == {}
    found = experts_of(TrainOptions(num_experts=4))
    assert (found["num_moe_experts"], found["moe_ffn_hidden_size"]) == (4, 256)


@pytest.mark.slow
def test_the_preset_learns_on_two_ranks_that_share_the_experts(tmp_path):
    """Under 0.2 to over 0.9, with an auxiliary loss of the whole step."""

    def on_rank(rank: int) -> int:
        os.environ.update(WORLD_SIZE="2", RANK=str(rank))
        until = ["--target-reward", "0.91"]
        given = ["--preset", "moe", f"--{EP.replace('_', '-')}", "2", *until, "--output-dir", str(tmp_path / "run")]
        return main(["train", *given])

    assert run_ranks(on_rank, 2, use_megatron=False) == [0, 0]
    rows = cases.metrics_of(tmp_path / "run")
    rewards = [row[REWARD] for row in rows]
    assert rewards[0] < 0.2 and max(rewards) > 0.9
    assert (tmp_path / "run" / "curves.png").exists()
