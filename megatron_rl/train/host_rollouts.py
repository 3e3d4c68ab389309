"""Reads what miles and slime write with --save-debug-rollout-data, so that `train --rollouts` trains on it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_rl.config import AdvantageNormalization
from megatron_rl.errors import DataError
from megatron_rl.files.host_dumps import load_samples, plain_number
from megatron_rl.train.rollouts import group_advantages

# As the hosts have it in the name of their flag's value.
NUMBER = "{rollout_id}"


def is_of_host(path: str | Path) -> bool:
    return Path(path).suffix == ".pt"


def host_files(path: str | Path) -> list[Path]:
    """The file, or those that the name stands for: of rollout 0, 1, 2 and so on, up to the first that is not there."""
    if NUMBER not in str(path):
        return [Path(path)] if Path(path).is_file() else []
    numbered = (Path(str(path).replace(NUMBER, str(number))) for number in itertools.count())
    return list(itertools.takewhile(Path.is_file, numbered))


def host_records(path: str | Path, normalization: str = AdvantageNormalization.STD) -> Iterator[tuple[Path, dict[str, Any]]]:
    """(file, its rollout as a line of --save-rollouts) of each file. Advantages are those of group_advantages over group_index.

    Raises DataError for what is no such file, and for a sample without group_index or without a number as its reward.
    """
    for rollout_index, file in enumerate(host_files(path)):
        records, _ = load_samples(str(file), "--rollouts")
        samples = [_sample_of(record, f"{file}, sample {number}", number) for number, record in enumerate(records)]
        prompts = [sample["prompt_id"] for sample in samples]
        advantages = group_advantages([sample["reward"] for sample in samples], prompts, normalization)
        for sample, advantage in zip(samples, advantages, strict=True):
            sample["advantage"] = advantage
        yield file, {"rollout_index": rollout_index, "samples": samples}


def _sample_of(record: Any, place: str, number: int) -> dict[str, Any]:
    """Numbered by its place in the file: a host's index may be that of its whole run. Old log-probabilities are not in the file."""
    if not isinstance(record, dict):
        raise DataError(f"{place}: {type(record).__name__} in the place of a dict of a sample's fields")
    group, reward = plain_number(record.get("group_index")), plain_number(record.get("reward"))
    if group is None:
        raise DataError(f"{place}: group_index: missing, and it says which samples answer one prompt: the host's rollouts set it")
    if isinstance(reward, bool) or not isinstance(reward, int | float):
        raise DataError(f"{place}: reward: {reward!r} must be a number: a host with several takes one by --reward-key")
    length, mask = plain_number(record.get("response_length")), _listed(record.get("loss_mask"))
    if record.get("remove_sample"):  # the host masks all of it
        mask = [0] * length if isinstance(length, int) else mask
    return {
        "prompt_id": str(group),
        "tokens": _listed(record.get("tokens")),
        "response_length": length,
        "loss_mask": [1] * length if mask is None and isinstance(length, int) else mask,
        "reward": reward,
        "old_log_probs": None,
        "rollout_log_probs": _listed(record.get("rollout_log_probs")),
        "index": number,
    }


def _listed(values: Any) -> Any:
    return values.tolist() if hasattr(values, "tolist") else values
