"""Writes the file of --save-rollouts and reads the file of --rollouts. Every sample is checked: no bad one reaches the loss.

JSON lines, one line a rollout batch:

    {"rollout_index": 0, "samples": [{"prompt_id": "repeat-0", "tokens": [8, 3, 3, 1], "response_length": 2,
     "loss_mask": [1, 1], "reward": 0.5, "advantage": -0.7, "old_log_probs": [-1.9, -2.2], "index": 0}, ...], "vocab_size": 9}

vocab_size, the policy's, may be left out: then --vocab-size or the task gives it. old_log_probs, ref_log_probs,
rollout_log_probs, policy_version, routes, kept_ids, kept_mass and rollout_id may be null or left out (old_log_probs: null).
Samples of one rollout_id, a string or an integer, are rows of one rollout: they share prompt_id and reward. routes are
[layers with experts][tokens - 1][experts of a token], ids of experts; the last token predicts nothing and has none. kept_ids are
what a sampler with top-p, top-k or min-p drew each response token from: [response_length][ids of a set], a masked token's may be
empty; train/kept_ids.py reads other forms. Log-probabilities are then over these sets. Floats have as many digits as the same
bits of float32 need. A value at a masked token may be NaN or Infinity, as Python's json module writes them.

On several data-parallel ranks each writes its own samples: rollouts.jsonl is then rollouts.part-0.jsonl, rollouts.part-1.jsonl, and
so on, with a line a rollout in each, where num_parts is their number and digest one of the whole rollout. The name without a part
stands for all of them.
"""

from __future__ import annotations

import dataclasses
import json
import math
import mmap
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl.errors import ConfigError, DataError
from megatron_rl.files.json_values import numbered_lines, parse_json_line
from megatron_rl.layout.sampling_support import SamplingSupport
from megatron_rl.megatron.samples import RouteShape, route_problem
from megatron_rl.rollout_groups import rollouts_of
from megatron_rl.train.kept_ids import problems_of_kept_ids, read_kept_ids
from megatron_rl.train.rollouts import DIGEST_LIMIT, TENSORS, RolloutBatch, Sample, problem_of_rollouts, prompt_groups

# Fields that all samples of a rollout have, or none -> what it means where none has.
GIVEN_FOR_ALL = {
    "old_log_probs": "on-policy",
    "rollout_log_probs": "the trainer's own engine sampled",
    "policy_version": "staleness is not counted",
    "routes": "routers choose by themselves",
    "kept_ids": "the sampler drew from the whole vocabulary",
    "kept_mass": "it is not measured",
    "rollout_id": "each sample is a rollout",
}


# float32 logits of size 1e4 are 1e-3 apart: rounding may lift the log of a probability of 1 by that, and not by ten times that.
LARGEST_LOG_PROB = 1e-2
# Those of the types that the values are kept in.
TOKEN_LIMIT, EXPERT_LIMIT = 2**63, 2**15


def part_path(path: str | Path, part: int, num_parts: int) -> Path:
    """The file of one data-parallel rank. A run on one rank has no parts."""
    path = Path(path)
    return path if num_parts == 1 else path.with_name(f"{path.stem}.part-{part}{path.suffix}")


def existing_parts(path: str | Path) -> list[Path]:
    """The files that the name stands for, parts in their order; none: there is no such rollout file."""
    path = Path(path)
    named = re.compile(re.escape(path.stem) + r"\.part-(0|[1-9][0-9]*)" + re.escape(path.suffix))
    beside = path.parent.iterdir() if path.parent.is_dir() else ()
    parts = {int(match[1]): file for file in beside if (match := named.fullmatch(file.name)) and file.is_file()}
    return [*([path] if path.is_file() else []), *(parts[number] for number in sorted(parts))]


def save_rollouts(path: str | Path, batch: RolloutBatch, part: int = 0) -> None:
    """Appends one line to the file of the part, and removes a last line that a killed run left unfinished. Raises DataError for a
    batch that could not be loaded."""
    _check_samples(batch.samples, f"rollout {batch.rollout_index}", None, None)
    path = part_path(path, part, batch.num_parts)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        file.truncate(_end_of_last_line(file))
        file.write((json.dumps(record_of(batch)) + "\n").encode())


def record_of(batch: RolloutBatch) -> dict[str, Any]:
    """The batch as it stands in a file."""

    def plain(value: Any) -> Any:
        if isinstance(value, Tensor):
            return (value.long() if value.dtype == torch.bool else value).tolist()
        if isinstance(value, SamplingSupport):
            return [ids.tolist() for ids in value.ids.split(value.sizes.tolist())]
        return value

    names = [field.name for field in dataclasses.fields(Sample)]
    samples = [{name: plain(getattr(sample, name)) for name in names} for sample in batch.samples]
    others = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return {**others, "samples": samples}


def truncate_rollouts(path: str | Path, num_rollouts: int) -> None:
    """Drops the rollouts from index num_rollouts on, because a resumed run appends them again. A file without any is
    removed, and without a file it does nothing."""
    for part in existing_parts(path):
        with part.open("r+b") as file:
            kept = 0
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                if _parse_line(line, f"{part}, line {number}")["rollout_index"] >= num_rollouts:
                    break
                kept += len(line)
            file.truncate(kept)
        if not kept:  # a run with fewer data-parallel ranks writes no such part
            part.unlink()


def check_rollouts_are_of(path: str | Path, run_id: str | None) -> None:
    """ConfigError where a file that the name stands for was begun by another run: a resumed run would cut it and go on in it."""
    for part in existing_parts(path):
        _, line = next(numbered_lines(part), (1, b""))
        if line.endswith(b"\n") and _parse_line(line, f"{part}, line 1").get("run_id") != run_id:
            raise ConfigError(
                f"--save-rollouts {path}: {part} holds rollouts of another run; name a file of this run, or a new one"
            )


def recorded_vocab_size(path: str | Path) -> int | None:
    """What the first line of the file says; None where it says nothing. Raises DataError as load_rollouts."""
    first = _existing(path)[0]
    _, line = next(numbered_lines(first), (1, b""))
    return None if not line else _vocab_size_of(_parse_line(line, f"{first}, line 1"), f"{first}, line 1")


def recorded_group_size(path: str | Path) -> int:
    """The most rollouts of one prompt in the first rollout batch of the file. Raises DataError as load_rollouts."""
    first = next(load_rollouts(path))
    return max(len(rollouts_of(group)) for group in prompt_groups(first.samples))


def load_rollouts(
    path: str | Path,
    *,
    vocab_size: int | None = None,
    route_shape: RouteShape | None = None,
) -> Iterator[RolloutBatch]:
    """The batches of a file, or of its parts together, read one at a time. DataError names file, line and field; at once if there
    is no file.

    route_shape: of the model's routes; None: a sample's routes may have any.
    """
    files = _existing(path)
    readers = [read_part(file, vocab_size=vocab_size, route_shape=route_shape) for file in files]
    return _alone(path, readers[0]) if len(files) == 1 and files[0] == Path(path) else _joined(path, readers)


def _existing(path: str | Path) -> list[Path]:
    files = existing_parts(path)
    if not files:
        raise DataError(f"{path}: there is no such rollout file; --save-rollouts FILE of a run writes one")
    return files


def _alone(path: str | Path, reader: Iterator[RolloutBatch]) -> Iterator[RolloutBatch]:
    for batch in reader:
        check_parts(path, batch.rollout_index, [batch.num_parts], [batch.digest], [])
        yield batch


def _joined(path: str | Path, readers: Sequence[Iterator[RolloutBatch]]) -> Iterator[RolloutBatch]:
    """The rollouts of all parts. Parts of other runs may follow each other: a resumed run may have had other ranks."""
    heads = [next(reader, None) for reader in readers]
    while waiting := [head for head in heads if head is not None]:
        index = min(head.rollout_index for head in waiting)
        found = [head for head in waiting if head.rollout_index == index]
        sizes = [part.vocab_size for part in found]
        check_parts(path, index, [part.num_parts for part in found], [part.digest for part in found], sizes)
        samples = sorted((sample for part in found for sample in part.samples), key=lambda sample: sample.index)
        _check_together(samples, f"{path}, rollout {index}")
        yield dataclasses.replace(found[0], samples=samples, num_parts=1, digest=None)
        heads = [
            next(reader, None) if head is not None and head.rollout_index == index else head
            for reader, head in zip(readers, heads, strict=True)
        ]


def check_parts(
    path: str | Path, rollout_index: int, num_parts: Sequence[int], digests: Sequence[int | None], vocab_sizes: Sequence[int | None]
) -> None:
    """DataError unless the parts of a rollout that were found, each with its num_parts, digest and vocab_size, are all of it."""
    if len(num_parts) == 1 < num_parts[0] and (named := re.fullmatch(r"(.+)\.part-\d+", Path(path).stem)):
        whole = Path(path).with_name(named[1] + Path(path).suffix)
        raise DataError(f"{path}, rollout {rollout_index}: this is one of {num_parts[0]} parts; {whole} stands for all of them")
    of_other_runs = "digests" if len(set(digests)) > 1 else "vocab_size" if len(set(vocab_sizes)) > 1 else None
    if set(num_parts) == {len(num_parts)} and of_other_runs is not None:
        raise DataError(
            f"{path}, rollout {rollout_index}: its parts have different {of_other_runs}, so they are of different runs: "
            "copy the parts of one run into a folder of their own"
        )
    if set(num_parts) != {len(num_parts)}:
        raise DataError(
            f"{path}, rollout {rollout_index}: {len(num_parts)} of its {max(num_parts)} parts are there. A killed run leaves its "
            "last rollout unfinished: delete the last line of the longer files; else copy the missing "
            f"{part_path(path, 0, 2).name}, ..."
        )


def read_part(file_path: Path, *, vocab_size: int | None = None, route_shape: RouteShape | None = None) -> Iterator[RolloutBatch]:
    """As load_rollouts, of one file and with the samples of its part alone."""
    last_index = None
    for number, line in numbered_lines(file_path):
        place = f"{file_path}, line {number}"
        batch = _batch_of(_parse_line(line, place), place, vocab_size, route_shape)
        if last_index is not None and batch.rollout_index <= last_index:
            raise DataError(
                f"{place}: rollout_index: {batch.rollout_index} follows {last_index}, it must increase: two "
                "runs were saved into one file; give each its own"
            )
        last_index = batch.rollout_index
        yield batch
    if last_index is None:
        raise DataError(f"{file_path}: the file holds no rollout")


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


def _batch_of(value: dict, place: str, vocab_size: int | None, route_shape: RouteShape | None) -> RolloutBatch:
    records = value.get("samples")
    if not isinstance(records, list) or not records:
        raise DataError(f"{place}: samples: must be a list of at least one sample")
    samples = [_sample_of(record, f"{place}, sample {number}") for number, record in enumerate(records)]
    _check_samples(samples, place, vocab_size, route_shape)
    num_parts = value.get("num_parts", 1)
    if not _is_int(num_parts) or num_parts < 1:
        raise DataError(f"{place}: num_parts: {num_parts!r} must be an integer of at least 1")
    digest = value.get("digest")
    if digest is not None and (not _is_int(digest) or not 0 <= digest < DIGEST_LIMIT):
        raise DataError(f"{place}: digest: {digest!r} must be null or an integer in [0, {DIGEST_LIMIT})")
    run_id = value.get("run_id")
    if not isinstance(run_id, str | None):
        raise DataError(f"{place}: run_id: {run_id!r} must be null or the name of the run that wrote the line")
    return RolloutBatch(
        samples=samples,
        rollout_index=value["rollout_index"],
        vocab_size=_vocab_size_of(value, place),
        num_parts=num_parts,
        digest=digest,
        run_id=run_id,
    )


def _check_samples(samples: Sequence[Sample], place: str, vocab_size: int | None, route_shape: RouteShape | None) -> None:
    for number, sample in enumerate(samples):
        for name, problem in _sample_problems(sample, vocab_size, route_shape):
            raise DataError(f"{place}, sample {number}: {name}: {problem}")
    _check_together(samples, place)


def _check_together(samples: Sequence[Sample], place: str) -> None:
    for name, without in GIVEN_FOR_ALL.items():
        is_absent = [getattr(sample, name) is None for sample in samples]
        if any(is_absent) and not all(is_absent):
            raise DataError(
                f"{place}, sample {is_absent.index(True)}: {name}: null here and given for others of the rollout; "
                f"give them for all samples, or for none ({without})"
            )
    if (of_rollout := problem_of_rollouts(samples)) is not None:
        raise DataError(f"{place}: {of_rollout[0]}: {of_rollout[1]}")
    taken: dict[int, int] = {}
    for number, sample in enumerate(samples):
        if taken.setdefault(sample.index, number) != number:
            raise DataError(
                f"{place}, sample {number}: index: {sample.index} is taken by sample {taken[sample.index]}: each has its own"
            )


def _vocab_size_of(value: dict, place: str) -> int | None:
    size = value.get("vocab_size")
    if size is not None and (not _is_int(size) or size < 1):
        raise DataError(f"{place}: vocab_size: {size!r} must be null or an integer of at least 1")
    return size


def _sample_of(record: Any, place: str) -> Sample:
    """The sample, if its lists are of the right kinds; its values are not yet checked."""
    names = [field.name for field in dataclasses.fields(Sample)]
    if not isinstance(record, dict):
        raise DataError(f"{place}: must be an object with the fields {', '.join(names)}")
    for field in dataclasses.fields(Sample):
        if field.name not in record and field.default is dataclasses.MISSING:
            raise DataError(f"{place}: {field.name}: missing; a sample has {', '.join(names)}")
    for name, problem in _problems_of_lists(record):
        raise DataError(f"{place}: {name}: {problem}")
    return Sample(**{name: record[name] for name in names if name in record})


def _problems_of_lists(record: dict) -> Iterator[tuple[str, str]]:
    """(field, what is wrong with it). The caller stops at the first."""
    tokens, mask, length = record["tokens"], record["loss_mask"], record["response_length"]
    if not isinstance(tokens, list):
        yield "tokens", f"{tokens!r} must be a list of token ids"
    if tokens and not (set(map(type, tokens)) == {int} and 0 <= min(tokens) and max(tokens) < TOKEN_LIMIT):
        position = next(n for n, token in enumerate(tokens) if not _is_int(token) or not 0 <= token < TOKEN_LIMIT)
        yield "tokens", f"{tokens[position]!r} at position {position} must be an integer of at least 0"
    if not _is_int(length):
        yield "response_length", f"{length!r} must be at least 1: an empty response has nothing to train on"
    if not isinstance(mask, list) or any(value not in (0, 1) for value in mask):
        yield "loss_mask", "must be a list of 0 and 1"
    for name, dtype in TENSORS.items():
        values = record.get(name)
        is_list = isinstance(values, list) and (set(map(type, values)) <= {float} or all(map(_is_number, values)))
        if dtype == "float32" and values is not None and not is_list:
            yield name, f"must be null or a list of {length} numbers, one for each response token"
    problem = None if record.get("routes") is None else route_problem(record["routes"], len(tokens))
    if problem is None and record.get("routes") is not None and int(torch.tensor(record["routes"]).max()) >= EXPERT_LIMIT:
        problem = f"ids of experts must be below {EXPERT_LIMIT}"
    if problem is not None:
        yield "routes", problem
    if record.get("kept_ids") is not None:
        try:
            read_kept_ids(record["kept_ids"])
        except DataError as error:
            yield "kept_ids", str(error)


def _sample_problems(sample: Sample, vocab_size: int | None, route_shape: RouteShape | None) -> Iterator[tuple[str, str]]:
    """(field, what is wrong with it). The caller stops at the first, so a later check may rely on earlier ones."""
    if not isinstance(sample.prompt_id, str):
        yield "prompt_id", f"{sample.prompt_id!r} must be a string"
    if sample.rollout_id is not None and not isinstance(sample.rollout_id, str) and not _is_int(sample.rollout_id):
        yield "rollout_id", f"{sample.rollout_id!r} must be null, a string or an integer"
    if not _is_int(sample.index) or sample.index < 0:
        yield "index", f"{sample.index!r} must be an integer of at least 0"
    if vocab_size is not None:
        for position in (sample.tokens >= vocab_size).nonzero().flatten().tolist():
            bounds = f"an integer in [0, {vocab_size}), the vocabulary of the model: type the --vocab-size of the run that"
            yield "tokens", f"{int(sample.tokens[position])} at position {position} must be {bounds} recorded it"
    if sample.response_length < 1:
        yield "response_length", f"{sample.response_length!r} must be at least 1: an empty response has nothing to train on"
    if sample.response_length >= len(sample.tokens):
        yield "response_length", f"{sample.response_length} of {len(sample.tokens)} tokens leaves no prompt token before it"
    if len(sample.loss_mask) != sample.response_length:
        yield "loss_mask", f"{len(sample.loss_mask)} values for a response of {sample.response_length} tokens"
    for name, value in (("reward", sample.reward), ("advantage", sample.advantage)):
        if not _is_number(value) or not math.isfinite(value):
            yield name, f"{value!r} must be a finite number"
    for name in ("old_log_probs", "rollout_log_probs"):
        if getattr(sample, name) is not None:
            yield from _log_prob_problems(name, getattr(sample, name), sample.loss_mask)
    if sample.policy_version is not None and (not _is_int(sample.policy_version) or sample.policy_version < 0):
        yield "policy_version", f"{sample.policy_version!r} must be null or the steps that the policy had done, at least 0"
    problem = None if sample.routes is None else route_problem(sample.routes, len(sample.tokens), route_shape)
    if problem is not None:
        yield "routes", problem
    if sample.kept_ids is not None:
        of_response = sample.tokens[-sample.response_length :]
        for text in problems_of_kept_ids(sample.kept_ids, of_response, sample.loss_mask, vocab_size):
            yield "kept_ids", text
    if sample.kept_mass is not None:
        yield from _mass_problems(sample.kept_mass, sample.loss_mask)


def _mass_problems(values: Tensor, loss_mask: Tensor) -> Iterator[tuple[str, str]]:
    if values.shape != loss_mask.shape:
        yield "kept_mass", f"must be null or a list of {len(loss_mask)} numbers, one for each response token"
    is_mass = (values > 0) & (values <= 1 + LARGEST_LOG_PROB)
    for position in (loss_mask & ~is_mass).nonzero().flatten().tolist():
        yield "kept_mass", f"{float(values[position])} at unmasked response token {position} must be above 0 and at most 1"


def _log_prob_problems(name: str, values: Tensor, loss_mask: Tensor) -> Iterator[tuple[str, str]]:
    if values.shape != loss_mask.shape:
        yield name, f"must be null or a list of {len(loss_mask)} numbers, one for each response token"
    for position in (loss_mask & ~values.isfinite()).nonzero().flatten().tolist():
        yield name, f"{float(values[position])} at unmasked response token {position} must be finite"
    for position in (loss_mask & (values > LARGEST_LOG_PROB)).nonzero().flatten().tolist():
        yield name, f"{float(values[position])} at unmasked response token {position} is above 0: no probability is above 1"


def _is_int(value: Any) -> bool:
    """An integer that int64 holds."""
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or _is_int(value)
