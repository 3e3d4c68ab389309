"""Writes the file of --save-rollouts and reads the file of --rollouts, whose fields are checked.

JSON lines, one line a rollout batch:

    {"rollout_index": 0, "samples": [{"prompt_id": "repeat-0", "tokens": [8, 3, 3, 1], "response_length": 2,
     "loss_mask": [1, 1], "reward": 0.5, "advantage": -0.7, "old_log_probs": [-1.9, -2.2], "index": 0}, ...], "vocab_size": 9}

FIELDS has what a sample may hold, and routes, which are [layers with experts][tokens - 1][experts of a token]. What is optional may
be null (old_log_probs null: on-policy), for all samples of a rollout together. Samples of one rollout_id are rows of one rollout,
with one prompt_id and one reward. kept_ids are what a sampler with top-p, top-k or min-p drew each response token from,
[response_length][ids of a set]: log-probabilities are then over these sets. teacher_topk_ids and teacher_topk_log_probs are
[response_length][K], with one K in a file. In place of the teacher's three fields a sample may have teacher_prompt_logprobs: what
vLLM's server returns as prompt_logprobs where a teacher is sent the tokens of prompt and response. Floats have as many digits as
the same bits of float32 need. A value at a masked token may be NaN or Infinity, and its set may be any. A last line without an end
is what a killed run has left, and is no rollout.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl.config import FIELDS_OF_TEACHER, Distillation
from megatron_rl.errors import DataError
from megatron_rl.files.json_values import finished_lines, parse_json_line
from megatron_rl.layout.sampling_support import SamplingSupport
from megatron_rl.train.rollouts import RolloutBatch, Sample, prompt_groups, rollouts_of
from megatron_rl.train.writers import keep_lines

# float32 logits of size 1e4 are 1e-3 apart: rounding may lift the log of a probability of 1 by that, and not by ten times that.
LARGEST_LOG_PROB = 1e-2
LARGEST_FLOAT = sys.float_info.max


@dataclass(frozen=True, slots=True)
class Field:
    """What a value of a line, or each item of a list, may be."""

    words: str
    kinds: tuple[type, ...]
    least: float = -LARGEST_FLOAT
    most: float = LARGEST_FLOAT
    of: str | None = None
    """None: one value. Else a list, with an item for each "sample", "token" or "response token"."""
    is_optional: bool = False
    items: Field | None = None
    """What the items of a value that is a list may be; None: anything."""

    def allows(self, value: Any) -> bool:
        if type(value) not in self.kinds:
            return False
        if self.items is not None:
            return all(map(self.items.allows, value))
        return isinstance(value, str | list | dict) or self.least <= value <= self.most


def _lists_of(items: Field) -> Field:
    return Field(f"a list of {items.words}", (list,), of="response token", is_optional=True, items=items)


_LOG_PROBS = Field("a finite number, at most 0", (int, float), -LARGEST_FLOAT, LARGEST_LOG_PROB, "response token", True)
FIELDS = {
    "prompt_id": Field("a string", (str,)),
    "tokens": Field("an integer of at least 0", (int,), 0, of="token"),
    "response_length": Field("at least 1: an empty response has nothing to train on", (int,), 1),
    "loss_mask": Field("0 or 1", (int, bool), 0, 1, "response token"),
    "reward": Field("a finite number", (int, float)),
    "advantage": Field("a finite number", (int, float)),
    "old_log_probs": _LOG_PROBS,
    "index": Field("an integer of at least 0", (int,), 0),
    "ref_log_probs": _LOG_PROBS,
    "rollout_log_probs": _LOG_PROBS,
    "policy_version": Field("the steps that the policy had done, at least 0", (int,), 0, is_optional=True),
    "kept_ids": Field("a list of ids", (list,), of="response token", is_optional=True),
    "kept_mass": Field("above 0 and at most 1", (int, float), 2.0**-149, 1 + LARGEST_LOG_PROB, "response token", True),
    "teacher_log_probs": _LOG_PROBS,
    "teacher_topk_ids": _lists_of(Field("integers of at least 0", (int,), 0)),
    "teacher_topk_log_probs": _lists_of(Field("numbers of at most 0, or -Infinity", (int, float), -math.inf, 0.0)),
    "rollout_id": Field("a string or an integer", (str, int), is_optional=True),
}
OF_A_LINE = {
    "rollout_index": Field("an integer", (int,)),
    "vocab_size": Field("an integer of at least 1", (int,), 1, is_optional=True),
}
SAMPLES = Field("an object", (dict,), of="sample")
PROMPT_LOGPROBS = "teacher_prompt_logprobs"
NAMES = [field.name for field in dataclasses.fields(Sample)]
# All samples of a rollout have these, or none.
GIVEN_FOR_ALL = (*(name for name, field in FIELDS.items() if field.is_optional), "routes")


def save_rollouts(path: str | Path, batch: RolloutBatch) -> None:
    """Appends one line."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as file:
        file.write((json.dumps(record_of(batch)) + "\n").encode())


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
    if Path(path).is_file():
        keep_lines(path, lambda record: record["rollout_index"] < num_rollouts)


def recorded_group_size(path: str | Path) -> int:
    """The most rollouts of one prompt in the first rollout batch of the file. Raises DataError as load_rollouts."""
    first = next(load_rollouts(path))
    return max(len(rollouts_of(group)) for group in prompt_groups(first.samples))


def load_rollouts(path: str | Path, *, vocab_size: int | None = None) -> Iterator[RolloutBatch]:
    """The batches of a file, read one at a time. DataError names file, line and field. vocab_size: of the model; None: any."""
    place, sizes = None, set()
    for number, line in finished_lines(path):
        place = f"{path}, line {number}"
        record = parse_json_line(line, place)
        if not isinstance(record, dict):
            raise DataError(f"{place}: a line must be an object with rollout_index and samples")
        _check_fields(record, {**OF_A_LINE, "samples": SAMPLES}, place)
        _read_prompt_logprobs(record["samples"], place)
        samples = [_sample_of(one, f"{place}, sample {position}", vocab_size) for position, one in enumerate(record["samples"])]
        for name in GIVEN_FOR_ALL:
            if len({getattr(sample, name) is None for sample in samples}) > 1:
                raise _wrong(place, name, "null in some samples and not in others: give it for all, or for none")
        for name in FIELDS_OF_TEACHER[Distillation.TOPK]:
            sizes |= {rows.shape[1:] for sample in samples if (rows := getattr(sample, name)) is not None}
            if len(sizes) > 1:
                raise _wrong(
                    place, name, f"lists of {', '.join(str(*size) for size in sorted(sizes))}: all of a file have one length, K"
                )
        if len({sample.index for sample in samples}) < len(samples):
            raise _wrong(place, "index", "two samples have the same: each has its own")
        line_fields: dict[str, Any] = {name: record.get(name) for name in OF_A_LINE}
        yield RolloutBatch(samples=samples, **line_fields)
    if place is None:
        raise DataError(f"{path}: the file holds no rollout")


def _read_prompt_logprobs(records: list[dict[str, Any]], place: str) -> None:
    """Writes the teacher's fields of a line from vLLM's form: for each token {id: {"logprob": ..., "rank": ...}} of the K likeliest
    ids and of the token itself, null for the first. A token that is none of the K likeliest has a rank behind them, so K shows in
    the samples together; 0: the server was asked for the tokens alone."""
    ranked: dict[int, list[list[tuple[int, int, float]]]] = {}
    for position, record in enumerate(records):
        if record.get(PROMPT_LOGPROBS) is None:
            continue
        try:
            tokens = record["tokens"]
            rows = [*zip(record[PROMPT_LOGPROBS], tokens, strict=True)][len(tokens) - record["response_length"] :]
            own = [_log_prob(row[str(token)]) for row, token in rows]
            ranked[position] = [sorted((one["rank"], int(name), _log_prob(one)) for name, one in row.items()) for row, _ in rows]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            form = "null or {id: {logprob, rank}} for each token of prompt and response, the token's own id among them"
            problem = f"must be the prompt_logprobs of vLLM, {form} ({error!r})"
            raise _wrong(f"{place}, sample {position}", PROMPT_LOGPROBS, problem) from error
        for name in ("teacher_log_probs", *FIELDS_OF_TEACHER[Distillation.TOPK]):
            if record.get(name) is not None:
                raise _wrong(f"{place}, sample {position}", PROMPT_LOGPROBS, f"stands beside {name}: give one of them")
        record["teacher_log_probs"] = own
    sizes = [sum(rank == number for number, (rank, *_) in enumerate(row, 1)) for sample in ranked.values() for row in sample]
    size = min(sizes, default=0)
    if not size:
        return
    for position, sample in ranked.items():
        records[position]["teacher_topk_ids"] = [[name for _, name, _ in row[:size]] for row in sample]
        records[position]["teacher_topk_log_probs"] = [[log_prob for *_, log_prob in row[:size]] for row in sample]


def _log_prob(entry: dict[str, Any]) -> float:
    """vLLM's server writes -9999 for -inf."""
    return -math.inf if entry["logprob"] <= -9999.0 else entry["logprob"]


def _wrong(place: str, name: str, problem: str) -> DataError:
    return DataError(f"{place}: {name}: {problem}")


def _check_fields(record: dict[str, Any], fields: dict[str, Field], place: str) -> None:
    for name, field in fields.items():
        value: Any = record.get(name)
        if value is None and field.is_optional:
            continue
        if field.of is not None and not isinstance(value, list):
            raise _wrong(place, name, f"must be a list with {field.words} for each {field.of}")
        values = [value] if field.of is None else value
        if field.of == "response token" and len(values) != record["response_length"]:
            raise _wrong(place, name, f"{len(values)} values for a response of {record['response_length']} tokens")
        is_masked = field.of == "response token" and (float in field.kinds or field.items is not None)
        is_checked = record["loss_mask"] if is_masked else [True] * len(values)
        for one, is_live in zip(values, is_checked, strict=True):
            if is_live and not field.allows(one):
                raise _wrong(place, name, f"{one!r} must be {field.words}")


def _sample_of(record: dict[str, Any], place: str, vocab_size: int | None) -> Sample:
    _check_fields(record, FIELDS, place)
    tokens, length = record["tokens"], record["response_length"]
    if length >= len(tokens):
        raise _wrong(place, "response_length", f"{length} of {len(tokens)} tokens leaves no prompt token before it")
    if vocab_size is not None and max(tokens) >= vocab_size:
        known = f"{vocab_size}, the vocabulary of the model: type the --vocab-size of the run that recorded it"
        raise _wrong(place, "tokens", f"{max(tokens)} must be below {known}")
    try:
        return Sample(**{name: record[name] for name in NAMES if name in record})
    except (TypeError, ValueError, RuntimeError) as error:  # of lists that make no tensor
        raise DataError(f"{place}: {error}") from error
