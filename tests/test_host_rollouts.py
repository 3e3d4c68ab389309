"""`train --rollouts` on what miles and slime write with --save-debug-rollout-data."""

from __future__ import annotations

import random

import pytest
import torch
from helpers import error_of, pool_of
from test_train_options import parse
from trainer_cases import metrics_of, run_loop, unlike_metrics

from megatron_rl.config import PolicyLossConfig
from megatron_rl.errors import DataError
from megatron_rl.train.option_rules import check_advantage_normalization, with_group_size
from megatron_rl.train.options import TrainOptions
from megatron_rl.train.rollout_files import load_rollouts, save_rollouts
from megatron_rl.train.rollouts import RolloutBatch, Sample, group_advantages

VOCABULARY, GROUP_SIZE = 9, 4
GSPO = PolicyLossConfig(policy_loss="gspo", loss_aggregation="prompt_mean", samples_per_prompt=GROUP_SIZE)
pool = pool_of(2)


def records_of(rollout: int) -> list[dict]:
    """As Sample.to_dict of the hosts, whose index and group_index count over the whole run."""
    numbers, records = random.Random(rollout), []
    for index in range(2 * GROUP_SIZE):
        length = numbers.randrange(1, 7)
        number = rollout * 2 * GROUP_SIZE + index
        records.append(
            {
                "group_index": number // GROUP_SIZE,
                "index": number,
                "tokens": [numbers.randrange(VOCABULARY) for _ in range(3 + length)],
                "response_length": length,
                "loss_mask": None if index % 3 else [1] * length,
                "reward": numbers.gauss(0.0, 1.0),
                "rollout_log_probs": [-1.0] * length,
                "remove_sample": index == 5,
                "status": "completed",
                "prompt": "of a host",
            }
        )
    return records


def test_what_slime_s_sampler_kept_is_read(tmp_path):
    """Its Sample has all ids one after the other, as a list or a tensor, and where each token's begin."""
    records = records_of(0)
    for record in records:
        kept = [{token, (token + 1) % VOCABULARY} for token in record["tokens"][3:]]
        ids, offsets = [number for of_token in kept for number in of_token], torch.arange(len(kept) + 1) * 2
        record |= {"rollout_top_p_token_ids": ids, "rollout_top_p_token_offsets": offsets.int()}
    torch.save({"rollout_id": 0, "samples": records}, tmp_path / "0.pt")
    [batch] = load_rollouts(tmp_path / "0.pt", vocab_size=VOCABULARY)
    for record, sample in zip(records, batch.samples, strict=True):
        rows = sample.kept_ids.ids.split(sample.kept_ids.sizes.tolist())
        assert [row.tolist() for row in rows] == [sorted({token, (token + 1) % VOCABULARY}) for token in record["tokens"][3:]]
    del records[0]["rollout_top_p_token_offsets"]
    torch.save({"rollout_id": 0, "samples": records}, tmp_path / "0.pt")
    with pytest.raises(DataError, match=r"0\.pt, sample 0: kept_ids: must be null, or a list of ids for each response token"):
        list(load_rollouts(tmp_path / "0.pt"))


def test_segments_of_a_rollout_count_once_in_the_baseline_of_their_group(tmp_path):
    """FB-143. Three segments of rollout 7 with the reward 1, and a sample of reward 0 for each other: the mean is 1 / (G - 2)."""
    records = records_of(0)
    for number, record in enumerate(records):
        record |= {"rollout_id": 7 if number < 3 else 100 + number, "reward": float(number < 3)}
    torch.save({"rollout_id": 0, "samples": records}, tmp_path / "0.pt")
    [batch] = load_rollouts(tmp_path / "0.pt", vocab_size=VOCABULARY, advantage_normalization="none")
    mean = 1 / (GROUP_SIZE - 2)
    assert [sample.advantage for sample in batch.samples[:GROUP_SIZE]] == pytest.approx([1 - mean] * 3 + [-mean] * (GROUP_SIZE - 3))
    assert [sample.rollout_id for sample in batch.samples[:4]] == [7, 7, 7, 103]
    for record in records:
        record["rollout_id"] = record["index"]
    torch.save({"rollout_id": 0, "samples": records}, tmp_path / "0.pt")
    assert {sample.rollout_id for batch in load_rollouts(tmp_path / "0.pt") for sample in batch.samples} == {None}


class KeptByMiles:
    """Its Sample has an object of its own in the place of lists; whatever its class, no code of it runs."""

    def __init__(self, **state):
        self.__dict__ |= state

    def __setstate__(self, state):
        raise AssertionError("a class of a file was asked for something")


@pytest.mark.parametrize("mark", ["_", ""], ids=["private names", "public names"])
def test_what_miles_s_sampler_kept_is_read(tmp_path, mark):
    records = records_of(0)
    for record in records:
        kept = [{token, (token + 1) % VOCABULARY} for token in record["tokens"][3:]]
        ids = torch.tensor([number for of_token in kept for number in of_token], dtype=torch.int32)
        tensors = {f"{mark}ids": ids, f"{mark}offsets": torch.arange(len(kept) + 1) * 2}
        record["rollout_sampling_mask"] = KeptByMiles(**tensors, others=["what a later release adds"])
    torch.save({"rollout_id": 0, "samples": records}, tmp_path / "0.pt")
    [batch] = load_rollouts(tmp_path / "0.pt", vocab_size=VOCABULARY)
    for record, sample in zip(records, batch.samples, strict=True):
        rows = sample.kept_ids.ids.split(sample.kept_ids.sizes.tolist())
        assert [row.tolist() for row in rows] == [sorted({token, (token + 1) % VOCABULARY}) for token in record["tokens"][3:]]


@pytest.mark.parametrize("state", [{}, {"_ids": torch.tensor([1])}, {"_ids": [1, 2], "_offsets": [0, 1, 2]}], ids=str)
def test_what_miles_s_sampler_kept_is_not_lost_in_silence(tmp_path, state):
    records = records_of(0)
    for record in records:
        record["rollout_sampling_mask"] = None
    torch.save({"rollout_id": 0, "samples": records}, tmp_path / "0.pt")
    [batch] = load_rollouts(tmp_path / "0.pt", vocab_size=VOCABULARY)
    assert batch.samples[0].kept_ids is None
    records[1]["rollout_sampling_mask"] = KeptByMiles(**state)
    torch.save({"rollout_id": 0, "samples": records}, tmp_path / "0.pt")
    with pytest.raises(DataError, match=r"0\.pt, sample 1: rollout_sampling_mask: .* write them as rollout_top_p_token_ids"):
        list(load_rollouts(tmp_path / "0.pt", vocab_size=VOCABULARY))


@pytest.fixture
def folder(tmp_path):
    for rollout in (0, 1):
        torch.save({"rollout_id": rollout, "samples": records_of(rollout)}, tmp_path / f"{rollout}.pt")
        records = records_of(rollout)
        prompts, rewards = [str(record["group_index"]) for record in records], [record["reward"] for record in records]
        samples = [
            Sample(
                prompt_id=prompt,
                tokens=record["tokens"],
                response_length=record["response_length"],
                loss_mask=[int(not record["remove_sample"])] * record["response_length"],
                reward=record["reward"],
                advantage=advantage,
                old_log_probs=None,
                rollout_log_probs=record["rollout_log_probs"],
                index=index,
            )
            for index, (record, prompt, advantage) in enumerate(
                zip(records, prompts, group_advantages(rewards, prompts), strict=True)
            )
        ]
        save_rollouts(tmp_path / "truth.jsonl", RolloutBatch(samples=samples, rollout_index=rollout))
    return tmp_path


def run_on_rank(rank, output_dir, path):
    return error_of(lambda: run_loop(output_dir, GSPO, {"rollouts": str(path), "steps_per_rollout": 1}))


@pytest.mark.megatron
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_on_them_is_the_one_on_the_same_rollouts_in_a_file_of_ours(pool, folder, world_size):
    for name, path in (("host", "{rollout_id}.pt"), ("truth", "truth.jsonl")):
        assert set(pool.run(run_on_rank, folder / name, folder / path, world_size=world_size)) == {""}
    rows = metrics_of(folder / "host")
    assert [row["num_samples"] for row in rows] == [8, 8]
    assert unlike_metrics(rows, metrics_of(folder / "truth")) == []


def test_one_file_is_one_rollout_and_its_advantages_may_be_undivided(folder):
    [batch] = load_rollouts(folder / "1.pt", advantage_normalization="none")
    rewards = [sample.reward for sample in batch.samples[:GROUP_SIZE]]
    assert batch.rollout_index == 0 and batch.samples[0].prompt_id == "2"
    assert batch.samples[0].advantage == pytest.approx(rewards[0] - sum(rewards) / GROUP_SIZE)


FAULTS = {
    "no group": ({"group_index": None}, "sample 3: group_index: missing"),
    "a dict of rewards": ({"reward": {"score": 1.0}}, "sample 3: reward: {'score': 1.0} must be a number.*--reward-key"),
    "a mask that is too short": ({"loss_mask": []}, "sample 3: loss_mask: 0 values for a response of"),
    "no response": ({"response_length": 0, "loss_mask": []}, "sample 3: response_length: 0 must be at least 1"),
    "a token outside the vocabulary": ({"tokens": [1] * 9 + [90], "response_length": 2, "loss_mask": [1, 1]}, "90 at position 9"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_cannot_be_trained_is_refused_with_its_file(folder, fault):
    change, message = FAULTS[fault]
    records = records_of(0)
    records[3] = records[3] | {"rollout_log_probs": None} | change
    records = [record | {"rollout_log_probs": None} for record in records]
    torch.save(records, folder / "0.pt")
    with pytest.raises(DataError, match=message) as refused:
        list(load_rollouts(folder / "0.pt", vocab_size=VOCABULARY))
    assert "0.pt" in str(refused.value)


def test_files_that_are_not_there_are_refused(tmp_path):
    for name in ("0.pt", "{rollout_id}.pt"):
        with pytest.raises(DataError, match="--save-debug-rollout-data of miles and slime a .pt file for each rollout"):
            load_rollouts(tmp_path / name)


def test_what_divides_advantages_has_an_effect_on_rewards_alone(folder):
    for path, problems in ((folder / "0.pt", 0), (folder / "truth.jsonl", 1)):
        options = TrainOptions(rollouts=str(path), advantage_normalization="none")
        assert len(list(check_advantage_normalization(options))) == problems


EQUAL = [record | {"reward": float(number // 2)} for number, record in enumerate(records_of(0))]


def group_size(line: str) -> int | None:
    return with_group_size(vars(parse(line)))["samples_per_prompt"]


def test_the_file_says_how_many_samples_a_prompt_has(folder):
    """FB-143: rows of one rollout count once. A typed number wins; of a file that cannot be read there is none."""
    for name in ("{rollout_id}.pt", "truth.jsonl"):
        assert group_size(f"--rollouts {folder / name}") == GROUP_SIZE
        assert group_size(f"--rollouts {folder / name} --samples-per-prompt 8") == 8
    torch.save([record | {"rollout_id": number // 2} for number, record in enumerate(EQUAL)], folder / "0.pt")
    assert group_size(f"--rollouts {folder / '0.pt'}") == GROUP_SIZE // 2
    (folder / "bad.jsonl").write_text("x")
    assert group_size(f"--rollouts {folder / 'bad.jsonl'}") is None
