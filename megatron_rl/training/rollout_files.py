"""Writes the file of --save-rollouts and reads that of --rollouts. Every sample is checked, so that no bad one reaches the loss.

JSON lines, one line a rollout batch:

    {"rollout_index": 0, "samples": [{"prompt_id": "repeat-0", "tokens": [8, 3, 3, 1], "response_length": 2,
     "loss_mask": [1, 1], "reward": 0.5, "advantage": -0.7, "old_log_probs": [-1.9, -2.2], "index": 0}, ...], "vocab_size": 9}

vocab_size, that of the policy, may be left out: then --vocab-size or the task gives it. old_log_probs, ref_log_probs,
rollout_log_probs, policy_version and routes may be null or left out (old_log_probs: null). routes are
[layers with experts][tokens - 1][experts of a token], ids of experts; the last token predicts nothing and has none. Floats have as
many digits as the same bits need. A value at a masked token may be NaN or Infinity, as Python's json module writes them.
"""

from __future__ import annotations

import dataclasses
import json
import math
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_rl.errors import DataError
from megatron_rl.megatron.routes import RouteShape
from megatron_rl.megatron.samples import route_problem
from megatron_rl.training.json_lines import parse_json_line
from megatron_rl.training.rollouts import RolloutBatch, Sample

# Fields that all samples of a rollout have, or none -> what it means where none has.
GIVEN_FOR_ALL = {
    "old_log_probs": "on-policy",
    "rollout_log_probs": "the trainer's own engine sampled",
    "policy_version": "staleness is not counted",
    "routes": "routers choose by themselves",
}


# float32 logits of size 1e4 are 1e-3 apart: rounding may lift the log of a probability of 1 by that, and not by ten times that.
LARGEST_LOG_PROB = 1e-2


def save_rollouts(path: str | Path, batch: RolloutBatch) -> None:
    """Appends one line, and removes a last line that a killed run left unfinished. Raises for a batch that could not be loaded."""
    place = f"rollout {batch.rollout_index}"
    line = json.dumps(dataclasses.asdict(batch)) + "\n"
    _check_batch(json.loads(line), place, vocab_size=None, route_shape=None)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        file.truncate(_end_of_last_line(file))
        file.write(line.encode())


def truncate_rollouts(path: str | Path, num_rollouts: int) -> None:
    """Drops the rollouts from index num_rollouts on, because a resumed run appends them again. Without a file it does nothing."""
    path = Path(path)
    if not path.exists():
        return
    with path.open("r+b") as file:
        kept = 0
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            if _parse_line(line, f"{path}, line {number}")["rollout_index"] >= num_rollouts:
                break
            kept += len(line)
        file.truncate(kept)


def recorded_vocab_size(path: str | Path) -> int | None:
    """What the first line of the file says; None where it says nothing. Raises DataError as load_rollouts."""
    with _existing(path).open("rb") as file:
        line = file.readline()
        return None if not line else _vocab_size_of(_parse_line(line, f"{path}, line 1"), f"{path}, line 1")


def load_rollouts(
    path: str | Path, *, vocab_size: int | None = None, route_shape: RouteShape | None = None
) -> Iterator[RolloutBatch]:
    """The batches of a file, read one at a time. DataError names file, line and field; at once if there is no file.

    route_shape: that of the model's routes; None: a sample's routes may have any.
    """
    return _read_batches(_existing(path), vocab_size, route_shape)


def _existing(path: str | Path) -> Path:
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: there is no such rollout file; --save-rollouts FILE of a run writes one")
    return path


def _read_batches(path: Path, vocab_size: int | None, route_shape: RouteShape | None) -> Iterator[RolloutBatch]:
    last_index = None
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            place = f"{path}, line {number}"
            batch = _check_batch(_parse_line(line, place), place, vocab_size, route_shape)
            if last_index is not None and batch.rollout_index <= last_index:
                raise DataError(
                    f"{place}: rollout_index: {batch.rollout_index} follows {last_index}, it must increase: two "
                    "runs were saved into one file; give each its own"
                )
            last_index = batch.rollout_index
            yield batch
    if last_index is None:
        raise DataError(f"{path}: the file holds no rollout")


def _end_of_last_line(file: Any) -> int:
    """The size of a binary file without an unfinished last line. The file is mapped, not read, because it grows with the run."""
    if file.seek(0, 2) == 0:
        return 0
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        return view.rfind(b"\n") + 1


def _parse_line(line: bytes, place: str) -> dict:
    unfinished = "" if line.endswith(b"\n") else "; a killed run leaves its last line unfinished: delete that line"
    value = parse_json_line(line, place, unfinished)
    if not isinstance(value, dict) or not _is_int(value.get("rollout_index")):
        raise DataError(f"{place}: rollout_index: a line must be an object with an integer rollout_index and samples")
    return value


def _check_batch(value: dict, place: str, vocab_size: int | None, route_shape: RouteShape | None) -> RolloutBatch:
    records = value.get("samples")
    if not isinstance(records, list) or not records:
        raise DataError(f"{place}: samples: must be a list of at least one sample")
    samples = [_check_sample(record, f"{place}, sample {number}", vocab_size, route_shape) for number, record in enumerate(records)]
    for name, without in GIVEN_FOR_ALL.items():
        is_absent = [getattr(sample, name) is None for sample in samples]
        if any(is_absent) and not all(is_absent):
            raise DataError(
                f"{place}, sample {is_absent.index(True)}: {name}: null here and given for others of the rollout; "
                f"give them for all samples, or for none ({without})"
            )
    taken: dict[int, int] = {}
    for number, sample in enumerate(samples):
        if taken.setdefault(sample.index, number) != number:
            raise DataError(
                f"{place}, sample {number}: index: {sample.index} is taken by sample {taken[sample.index]}: each has its own"
            )
    return RolloutBatch(samples=samples, rollout_index=value["rollout_index"], vocab_size=_vocab_size_of(value, place))


def _vocab_size_of(value: dict, place: str) -> int | None:
    size = value.get("vocab_size")
    if size is not None and (not _is_int(size) or size < 1):
        raise DataError(f"{place}: vocab_size: {size!r} must be null or an integer of at least 1")
    return size


def _check_sample(record: Any, place: str, vocab_size: int | None, route_shape: RouteShape | None) -> Sample:
    names = [field.name for field in dataclasses.fields(Sample)]
    if not isinstance(record, dict):
        raise DataError(f"{place}: must be an object with the fields {', '.join(names)}")
    for field in dataclasses.fields(Sample):
        if field.name not in record and field.default is dataclasses.MISSING:
            raise DataError(f"{place}: {field.name}: missing; a sample has {', '.join(names)}")
    sample = Sample(**{name: record[name] for name in names if name in record})
    for name, problem in _sample_problems(sample, vocab_size, route_shape):
        raise DataError(f"{place}: {name}: {problem}")
    return sample


def _sample_problems(sample: Sample, vocab_size: int | None, route_shape: RouteShape | None) -> Iterator[tuple[str, str]]:
    """(field, what is wrong with it). The caller stops at the first, so a later check may rely on earlier ones."""
    if not isinstance(sample.prompt_id, str):
        yield "prompt_id", f"{sample.prompt_id!r} must be a string"
    if not _is_int(sample.index) or sample.index < 0:
        yield "index", f"{sample.index!r} must be an integer of at least 0"
    yield from _token_problems(sample.tokens, vocab_size)
    if not _is_int(sample.response_length) or sample.response_length < 1:
        yield (
            "response_length",
            f"{sample.response_length!r} must be at least 1: an empty response has nothing to train on",
        )
    if sample.response_length >= len(sample.tokens):
        yield (
            "response_length",
            f"{sample.response_length} of {len(sample.tokens)} tokens leaves no prompt token before it",
        )
    if not isinstance(sample.loss_mask, list) or any(mask not in (0, 1) for mask in sample.loss_mask):
        yield "loss_mask", "must be a list of 0 and 1"
    if len(sample.loss_mask) != sample.response_length:
        yield "loss_mask", f"{len(sample.loss_mask)} values for a response of {sample.response_length} tokens"
    for name, value in (("reward", sample.reward), ("advantage", sample.advantage)):
        if not _is_number(value) or not math.isfinite(value):
            yield name, f"{value!r} must be a finite number"
    yield from _log_prob_problems(sample)
    problem = None if sample.routes is None else route_problem(sample.routes, len(sample.tokens), route_shape)
    if problem is not None:
        yield "routes", problem


def _token_problems(tokens: Any, vocab_size: int | None) -> Iterator[tuple[str, str]]:
    if not isinstance(tokens, list):
        yield "tokens", f"{tokens!r} must be a list of token ids"
    limit = math.inf if vocab_size is None else vocab_size
    for position, token in enumerate(tokens):
        if not _is_int(token) or not 0 <= token < limit:
            remedy = "--vocab-size N takes that of the run that recorded it"
            bounds = f"an integer in [0, {vocab_size}), the vocabulary of the model: {remedy}"
            allowed = "an integer of at least 0" if vocab_size is None else bounds
            yield "tokens", f"{token!r} at position {position} must be {allowed}"


def _log_prob_problems(sample: Sample) -> Iterator[tuple[str, str]]:
    for name in ("old_log_probs", "rollout_log_probs"):
        values = getattr(sample, name)
        if values is None:
            continue
        if not isinstance(values, list) or len(values) != sample.response_length or not all(map(_is_number, values)):
            yield name, f"must be null or a list of {sample.response_length} numbers, one for each response token"
        for position, (value, mask) in enumerate(zip(values, sample.loss_mask, strict=True)):
            if mask and not math.isfinite(value):
                yield name, f"{value} at unmasked response token {position} must be finite"
            if mask and value > LARGEST_LOG_PROB:
                yield name, f"{value} at unmasked response token {position} is above 0: no probability is above 1"
    if sample.policy_version is not None and (not _is_int(sample.policy_version) or sample.policy_version < 0):
        yield "policy_version", f"{sample.policy_version!r} must be null or the steps that the policy had done, at least 0"


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
