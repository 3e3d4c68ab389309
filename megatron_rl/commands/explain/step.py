"""One optimiser step as `megatron-rl explain` sees it, from the command line, our rollouts, or a sample a line."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_rl.errors import ConfigError, DataError, printable
from megatron_rl.files.json_values import numbered_lines, parse_json_line
from megatron_rl.train.rollout_files import load_rollouts
from megatron_rl.validation import field_of

# Of a step: more is a slip of the finger or a damaged file, and the masks would fill the memory.
MOST_TOKENS = 2**27
# A field of a sample -> the flag that gives it for each response, and an example.
COLUMNS = {
    "response_length": ("--response-lengths", "3,5,8"),
    "loss_mask": ("--loss-masks", "110,11111,00000000"),
    "prompt_id": ("--prompt-ids", "a,a,b"),
    "rollout_id": ("--rollout-ids", "0,0,1"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInput:
    """Whole: what count_step needs, and where it comes from."""

    masks: list[Tensor]  # S tensors [response_length]
    prompts: Sequence[int | str] | None
    rollouts: Sequence[Hashable] | None
    """The rollout of each sample, where one of them makes several samples; None: each sample is one rollout."""
    source: str
    notes: tuple[str, ...] = ()

    @property
    def rollout_keys(self) -> Sequence[Hashable]:
        return list(range(len(self.masks))) if self.rollouts is None else self.rollouts


def read_step(args: Namespace) -> StepInput:
    """ConfigError for wrong flags, DataError for a file that cannot be read."""
    return read_lengths(args) if args.rollouts is None else read_rollouts(args.rollouts, args.rollout_index)


def read_lengths(args: Namespace) -> StepInput:
    """The fields of samples in columns; a loss mask has a digit a token."""
    texts = {name: vars(args)[field_of(flag)] for name, (flag, _) in COLUMNS.items()}
    columns = {name: [word.strip() for word in text.split(",")] for name, text in texts.items() if text is not None}
    num_samples = len(columns["response_length"])
    for name, column in columns.items():
        if len(column) != num_samples or "" in column:
            flag, example = COLUMNS[name]
            raise ConfigError(f"{flag} {texts[name]}: one entry for each of the {num_samples} responses is needed, as in {example}")
    records: list[dict[str, Any]] = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    for record in records:
        length = record["response_length"]
        record["response_length"] = int(length) if length.isdecimal() else length
        if "loss_mask" in record:
            record["loss_mask"] = [int(digit) if digit in "01" else digit for digit in record["loss_mask"]]
    try:
        return _step_of(records, "--response-lengths, response", 0, "the command line")
    except DataError as error:
        raise ConfigError(str(error)) from error


def read_rollouts(path: str, index: int | None) -> StepInput:
    """One rollout of a file that `megatron-rl train --rollouts` reads, or a file of one sample a line."""
    if _holds_one_sample_a_line(path):
        if index is not None:
            raise ConfigError(f"--rollout-index {index}: {path} has one sample a line, which make one step; remove it")
        lines = [(number, line) for number, line in numbered_lines(path) if line.strip()]
        records = [parse_json_line(line, f"--rollouts {path}, line {number}") for number, line in lines]
        return _step_of(records, f"--rollouts {path}, line", 1, path)
    try:
        batches = list(load_rollouts(path))
    except DataError as error:
        raise DataError(f"--rollouts {error}") from error
    chosen = [batch for batch in batches if index is None or batch.rollout_index == index]
    if not chosen:
        known = f"{batches[0].rollout_index} to {batches[-1].rollout_index}"
        raise ConfigError(f"--rollout-index {index}: {path} holds the rollouts {known}")
    samples = chosen[0].samples
    notes = [f"{len(batches) - 1} other rollouts of the file: --rollout-index chooses one"] if len(batches) > 1 else []
    return StepInput(
        masks=[sample.loss_mask.long() for sample in samples],
        prompts=[sample.prompt_id for sample in samples],
        rollouts=None if samples[0].rollout_id is None else [str(sample.rollout_id) for sample in samples],
        source=f"rollout {chosen[0].rollout_index} of {path}",
        notes=tuple(notes),
    )


def _holds_one_sample_a_line(path: str) -> bool:
    """Else the file is read as `megatron-rl train` reads it."""
    try:
        first = parse_json_line(next(numbered_lines(path), (1, b""))[1], path)
    except DataError:
        return False  # load_rollouts says what is wrong
    return isinstance(first, dict) and {"samples", "rollout_index"}.isdisjoint(first)


def _step_of(records: list[Any], place: str, first: int, source: str) -> StepInput:
    """Of {"response_length": 3, "loss_mask": [1, 0, 1], "prompt_id": "a", "rollout_id": 0}: one of the first two, the rest at will.
    place, first: what a message calls a record, and the number of the first."""
    masks: list[Tensor] = []
    most_tokens = MOST_TOKENS
    for number, record in enumerate(records, first):
        try:
            masks.append(_mask_of(record, most_tokens))
            most_tokens -= len(masks[-1])
        except DataError as error:
            raise DataError(f"{place} {number}: {error}") from error
    columns = {name: [record.get(name) for record in records] for name in ("prompt_id", "rollout_id")}
    for name, values in columns.items():
        if None in values and values != [None] * len(values):
            raise DataError(f"{place} {values.index(None) + first} has no {name} and others have: give it in all, or none")
    prompts, rollouts = (None if None in values else values for values in columns.values())
    prompt_of: dict[Hashable, Hashable] = {}
    for rollout, prompt in [] if prompts is None or rollouts is None else zip(rollouts, prompts, strict=True):
        if prompt_of.setdefault(rollout, prompt) != prompt:
            names = f"rollout {rollout} has samples of the prompts {prompt_of[rollout]} and {prompt}"
            raise DataError(f"{place.rpartition(',')[0]}: {printable(names)}: a rollout has one prompt")
    return StepInput(masks=masks, prompts=prompts, rollouts=rollouts, source=source)


def _mask_of(record: Any, most_tokens: int) -> Tensor:  # [response_length] int64
    if not isinstance(record, dict):
        raise DataError(f"{type(record).__name__} in the place of a dict of a sample's fields")
    for name in ("prompt_id", "rollout_id"):
        if not isinstance(record.get(name), int | str | None):
            raise DataError(f"{name} is {record[name]!r}: a whole number or text is needed, or nothing")
    mask = record.get("loss_mask")
    length = record.get("response_length", len(mask) if isinstance(mask, list) else None)
    if not isinstance(length, int) or not 0 <= length <= most_tokens:
        raise DataError(f"response_length is {length!r}: a whole number is needed, with at most {MOST_TOKENS} tokens in a step")
    if mask is None:
        return torch.ones(length, dtype=torch.int64)
    if not isinstance(mask, list) or any(isinstance(value, bool) or value not in (0, 1) for value in mask):
        raise DataError("loss_mask must be a list of 0 and 1, or None")
    if len(mask) != length:
        raise DataError(f"a loss_mask of {len(mask)} for a response_length of {length}: one entry a token")
    return torch.tensor(mask, dtype=torch.int64)
