"""Writes the file of --save-rollouts and reads the file of --rollouts. Every sample is checked: no bad one reaches the loss.

JSON lines, one line a rollout batch:

    {"rollout_index": 0, "samples": [{"prompt_id": "repeat-0", "tokens": [8, 3, 3, 1], "response_length": 2,
     "loss_mask": [1, 1], "reward": 0.5, "advantage": -0.7, "old_log_probs": [-1.9, -2.2], "index": 0}, ...], "vocab_size": 9}

FIELDS has what a sample may hold. What is optional may be null (old_log_probs null: on-policy), for all samples of a rollout
together. Samples of one rollout_id are rows of one rollout. routes are [layers with experts][tokens - 1][experts of a token].
kept_ids are what a sampler with top-p, top-k or min-p drew each response token from, [response_length][ids of a set]:
log-probabilities are then over these sets. Floats have as many digits as the same bits of float32 need. A value at a masked token
may be NaN or Infinity, and its set may be any. A last line without an end is what a killed run has left, and is no rollout.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl.errors import DataError
from megatron_rl.files.json_values import numbered_lines, parse_json_line
from megatron_rl.layout.sampling_support import SamplingSupport
from megatron_rl.megatron.samples import RouteShape, route_problem
from megatron_rl.rollout_groups import rollouts_of
from megatron_rl.train.rollouts import RolloutBatch, Sample, problem_of_rollouts, prompt_groups

# float32 logits of size 1e4 are 1e-3 apart: rounding may lift the log of a probability of 1 by that, and not by ten times that.
LARGEST_LOG_PROB = 1e-2
LARGEST_INT, LARGEST_FLOAT = 2**63 - 1, sys.float_info.max


@dataclass(frozen=True, slots=True)
class Field:
    """What a value of a line, or each item of a list, may be."""

    words: str
    kinds: tuple[type, ...]
    least: float = -LARGEST_FLOAT
    most: float = LARGEST_FLOAT
    of: str | None = None
    """None: one value. Else a list, with an item for each "token" or "response token"."""
    is_optional: bool = False

    def allows(self, value: Any) -> bool:
        return type(value) in self.kinds and (type(value) is str or self.least <= value <= self.most)


_LOG_PROBS = Field("a finite number, at most 0", (int, float), -LARGEST_FLOAT, LARGEST_LOG_PROB, "response token", True)
FIELDS = {
    "prompt_id": Field("a string", (str,)),
    "tokens": Field("an integer of at least 0", (int,), 0, LARGEST_INT, "token"),
    "response_length": Field("at least 1: an empty response has nothing to train on", (int,), 1, LARGEST_INT),
    "loss_mask": Field("0 or 1", (int, bool), 0, 1, "response token"),
    "reward": Field("a finite number", (int, float)),
    "advantage": Field("a finite number", (int, float)),
    "old_log_probs": _LOG_PROBS,
    "index": Field("an integer of at least 0", (int,), 0, LARGEST_INT),
    "ref_log_probs": _LOG_PROBS,
    "rollout_log_probs": _LOG_PROBS,
    "policy_version": Field("the steps that the policy had done, at least 0", (int,), 0, LARGEST_INT, is_optional=True),
    "kept_mass": Field("above 0 and at most 1", (int, float), 2.0**-149, 1 + LARGEST_LOG_PROB, "response token", True),
    "rollout_id": Field("a string or an integer", (str, int), -LARGEST_INT, LARGEST_INT, is_optional=True),
}
OF_A_LINE = {
    "rollout_index": Field("an integer", (int,), -LARGEST_INT, LARGEST_INT),
    "vocab_size": Field("an integer of at least 1", (int,), 1, LARGEST_INT, is_optional=True),
}
NAMES = [field.name for field in dataclasses.fields(Sample)]
REQUIRED = [field.name for field in dataclasses.fields(Sample) if field.default is dataclasses.MISSING]
# All samples of a rollout have these, or none.
GIVEN_FOR_ALL = (*(name for name, field in FIELDS.items() if field.is_optional), "routes", "kept_ids")


def save_rollouts(path: str | Path, batch: RolloutBatch) -> None:
    """Appends one line. Raises DataError for a batch that could not be loaded."""
    record = record_of(batch)
    _batch_of(record, f"rollout {batch.rollout_index}")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as file:
        file.write((json.dumps(record) + "\n").encode())


def record_of(batch: RolloutBatch) -> dict[str, Any]:
    """The batch as it stands in a file."""

    def plain(value: Any) -> Any:
        if isinstance(value, Tensor):
            return (value.long() if value.dtype == torch.bool else value).tolist()
        if isinstance(value, SamplingSupport):
            return [ids.tolist() for ids in value.ids.split(value.sizes.tolist())]
        return value

    samples = [{name: plain(getattr(sample, name)) for name in NAMES} for sample in batch.samples]
    return {**{name: getattr(batch, name) for name in OF_A_LINE}, "samples": samples}


def cut_rollouts(path: str | Path, num_rollouts: int) -> None:
    """Drops the rollouts from index num_rollouts on, because a resumed run appends them again. Without a file it does nothing."""
    if not Path(path).is_file():
        return
    kept = 0
    for line, record in _records(path):
        if record["rollout_index"] >= num_rollouts or not line.endswith(b"\n"):
            break
        kept += len(line)
    with open(path, "r+b") as file:
        file.truncate(kept)


def recorded_vocab_size(path: str | Path) -> int | None:
    """What the first line of the file says; None where it says nothing. Raises DataError as load_rollouts."""
    return next((record.get("vocab_size") for _, record in _records(path)), None)


def recorded_group_size(path: str | Path) -> int:
    """The most rollouts of one prompt in the first rollout batch of the file. Raises DataError as load_rollouts."""
    first = next(load_rollouts(path))
    return max(len(rollouts_of(group)) for group in prompt_groups(first.samples))


def load_rollouts(
    path: str | Path, *, vocab_size: int | None = None, route_shape: RouteShape | None = None
) -> Iterator[RolloutBatch]:
    """The batches of a file, read one at a time. DataError names file, line and field.

    route_shape: of the model's routes; None: a sample's routes may have any.
    """
    last_index = None
    for number, (_, record) in enumerate(_records(path), 1):
        place, index = f"{path}, line {number}", record["rollout_index"]
        if last_index is not None and index <= last_index:
            raise _wrong(place, "rollout_index", f"{index} follows {last_index}: give two runs a file each")
        last_index = index
        yield _batch_of(record, place, vocab_size, route_shape)
    if last_index is None:
        raise DataError(f"{path}: the file holds no rollout")


def _records(path: str | Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Each line with its object, whose fields beside the samples are checked; not a last line that has no end."""
    for number, line in numbered_lines(path):
        place = f"{path}, line {number}"
        try:
            record = parse_json_line(line, place)
        except DataError:
            if line.endswith(b"\n"):
                raise
            return
        if not isinstance(record, dict):
            raise DataError(f"{place}: a line must be an object with rollout_index and samples")
        _check_fields(record, OF_A_LINE, place)
        yield line, record


def _wrong(place: str, name: str, problem: str) -> DataError:
    return DataError(f"{place}: {name}: {problem}")


def _batch_of(
    record: dict[str, Any], place: str, vocab_size: int | None = None, route_shape: RouteShape | None = None
) -> RolloutBatch:
    samples: list[Sample] = []
    if not isinstance(record.get("samples"), list) or not record["samples"]:
        raise _wrong(place, "samples", "must be a list of at least one sample")
    for number, of_sample in enumerate(record["samples"]):
        _check_sample(of_sample, f"{place}, sample {number}", vocab_size, route_shape)
        samples.append(Sample(**{name: of_sample[name] for name in NAMES if name in of_sample}))
    for name in GIVEN_FOR_ALL:
        is_absent = [getattr(sample, name) is None for sample in samples]
        if any(is_absent) and not all(is_absent):
            raise _wrong(
                f"{place}, sample {is_absent.index(True)}", name, "null here and not in others: give it for all, or for none"
            )
    if (of_rollout := problem_of_rollouts(samples)) is not None:
        raise _wrong(place, *of_rollout)
    taken: dict[int, int] = {}
    for number, sample in enumerate(samples):
        if (first := taken.setdefault(sample.index, number)) != number:
            raise _wrong(f"{place}, sample {number}", "index", f"{sample.index} is taken by sample {first}: each has its own")
    of_line: dict[str, Any] = {name: record.get(name) for name in OF_A_LINE}
    return RolloutBatch(samples=samples, **of_line)


def _check_fields(record: dict[str, Any], fields: dict[str, Field], place: str) -> None:
    for name, field in fields.items():
        value: Any = record.get(name)
        if value is None and field.is_optional:
            continue
        if field.of is None:
            if not field.allows(value):
                raise _wrong(place, name, f"{value!r} must be {field.words}")
            continue
        if not isinstance(value, list) or not set(map(type, value)) <= set(field.kinds):
            raise _wrong(place, name, f"must be a list with {field.words} for each {field.of}")
        if field.of == "response token" and len(value) != record["response_length"]:
            raise _wrong(place, name, f"{len(value)} values for a response of {record['response_length']} tokens")
        is_checked = record["loss_mask"] if float in field.kinds else [True] * len(value)
        for position, (one, is_live) in enumerate(zip(value, is_checked, strict=True)):
            if is_live and not field.allows(one):
                raise _wrong(place, name, f"{one!r} at {field.of} {position} must be {field.words}")


def _check_sample(record: Any, place: str, vocab_size: int | None, route_shape: RouteShape | None) -> None:
    missing = [name for name in REQUIRED if not isinstance(record, dict) or name not in record]
    if missing:
        raise _wrong(place, missing[0], f"missing; a sample is an object with {', '.join(REQUIRED)}")
    fields, limit = FIELDS, LARGEST_INT if vocab_size is None else vocab_size
    if vocab_size is not None:
        words = f"an id in [0, {vocab_size}), the vocabulary of the model: type the --vocab-size of the run that recorded it"
        fields = fields | {"tokens": dataclasses.replace(FIELDS["tokens"], most=vocab_size - 1, words=words)}
    _check_fields(record, fields, place)
    tokens, length, routes, kept = record["tokens"], record["response_length"], record.get("routes"), record.get("kept_ids")
    if length >= len(tokens):
        raise _wrong(place, "response_length", f"{length} of {len(tokens)} tokens leaves no prompt token before it")
    if routes is not None and (problem := route_problem(routes, len(tokens), route_shape)) is not None:
        raise _wrong(place, "routes", problem)
    if kept is None:
        return
    is_form = isinstance(kept, list) and all(isinstance(ids, list) and set(map(type, ids)) <= {int} for ids in kept)
    if not is_form or len(kept) != length:
        raise _wrong(place, "kept_ids", f"must be null, or a list of ids for each of {length} response tokens")
    for position, (ids, token, is_live) in enumerate(zip(kept, tokens[-length:], record["loss_mask"], strict=True)):
        if is_live and not (token in ids and len(set(ids)) == len(ids) and min(ids) >= 0 and max(ids) < limit):
            wanted = f"must hold the token, {token}, and each id once, all in [0, {limit})"
            raise _wrong(place, "kept_ids", f"the set of response token {position} {wanted}: are sets and tokens shifted?")
