"""Multi-token prediction in the training command: a run goes on on other ranks, sampling leaves it out, and the flags."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import trainer_cases as cases
from helpers import error_of, pool_of
from test_checkpoints import CONFIG, OPTIONS, run_on_rank
from test_mtp_layouts import knows_borders  # noqa: F401

from megatron_rl.megatron.model import find_gpt_model
from megatron_rl.train.generation import SamplingSettings
from megatron_rl.train.key_value_cache import can_cache
from megatron_rl.train.option_rules import TrainLaunch, check_hf_checkpoint
from megatron_rl.train.options import TrainOptions

megatron = pytest.mark.megatron
pool = pool_of(2)
MTP = {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.5}


def sampled_on_rank(rank: int) -> list:
    """Responses of a policy with these layers and of the same without; what a step says of them; which parameters it has moved."""
    settings = SamplingSettings(max_new_tokens=5, end_tokens=(), temperature=1.0, vocab_size=cases.VOCABULARY, rows_per_forward=2)
    found = []
    for given in (MTP, {}):
        trainer = cases.tiny_trainer(CONFIG, **given)
        prompts = [[1, 2], [3], [4, 5, 6]]
        found.append(
            (
                trainer.sample(prompts, [0, 1, 2], settings, lambda ids, positions, columns: 0.0 * columns.float()),
                can_cache(trainer.model),
            )
        )
    trainer = cases.tiny_trainer(**MTP)
    before = {name: value.clone() for name, value in find_gpt_model(trainer.model).state_dict().items() if value is not None}
    metrics = trainer.step([cases.ragged_step()])
    after = find_gpt_model(trainer.model).state_dict()
    moved = [name for name, value in before.items() if not torch.equal(value, after[name])]
    return [*found, metrics, moved]


@megatron
@pytest.mark.usefixtures("knows_borders")
def test_sampling_leaves_these_layers_out_and_a_step_trains_them(pool):
    with_layers, without, metrics, moved = pool.run(sampled_on_rank, world_size=1)[0]
    assert with_layers == without and with_layers[1]
    assert 0 < metrics["policy/mtp_loss"] < 10 and any(name.startswith("mtp.") for name in moved)


@megatron
@pytest.mark.usefixtures("knows_borders")
@pytest.mark.slow
def test_a_run_goes_on_with_these_layers_on_other_ranks(pool, tmp_path):
    """A rollout on each layout in turn, against three on one rank: an embedding that the last stage has too, and shards."""
    sharded = {**MTP, "sequence_parallel": True, "use_distributed_optimizer": True}
    chain = [(1, {}, {**MTP, "use_distributed_optimizer": True}), (2, {cases.TP: 2}, sharded)]
    chain += [(2, {"pipeline_model_parallel_size": 2}, {**MTP, "use_distributed_optimizer": True})]
    pool.run(
        run_on_rank, tmp_path / "one", {**OPTIONS, "num_rollouts": 3}, {**MTP, "use_distributed_optimizer": True}, world_size=1
    )
    for leg, (world_size, layout, of_leg) in enumerate(chain):
        options = {**OPTIONS, "num_rollouts": leg + 1}
        pool.run(run_on_rank, tmp_path / "chain", options, of_leg, leg > 0, world_size=world_size, **layout)
    # As in test_expert_training.py.
    assert cases.unlike_metrics(cases.metrics_of(tmp_path / "chain"), cases.metrics_of(tmp_path / "one")) == []


def other_model_on_rank(rank: int, output_dir) -> str:
    return error_of(lambda: run_on_rank(rank, output_dir, {**OPTIONS, "num_rollouts": 2}, {}, True))


@megatron
@pytest.mark.usefixtures("knows_borders")
@pytest.mark.slow
def test_a_checkpoint_with_these_layers_is_not_taken_without(pool, tmp_path):
    pool.run(run_on_rank, tmp_path, {**OPTIONS, "num_rollouts": 1}, MTP, world_size=1)
    (message,) = pool.run(other_model_on_rank, tmp_path, world_size=1)
    assert "was saved with --mtp-num-layers 1, this run has 0" in message


def test_a_folder_has_none_of_these_layers():
    options = TrainOptions(hf_checkpoint="folder", mtp_num_layers=1)
    launch = TrainLaunch.of(options, dataclasses.asdict(options), world_size=1)
    said = [*check_hf_checkpoint(launch)]
    assert any("--mtp-num-layers 1 has no effect with --hf-checkpoint" in text for text in said)
