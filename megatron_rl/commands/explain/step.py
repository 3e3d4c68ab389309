"""One optimiser step as `megatron-rl explain` sees it, from the command line, our rollouts, a sample a line or a host's dump."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor

from megatron_rl.commands.explain.dumps import Array, load_samples, plain_number
from megatron_rl.errors import ConfigError, DataError, printable
from megatron_rl.hosts import ROLLOUT_HOST_NAMES
from megatron_rl.hosts.base import Host, host_named
from megatron_rl.hosts.companions import positions_of, read_batch
from megatron_rl.plain_pickle import DAMAGED
from megatron_rl.training.json_lines import parse_json_line
from megatron_rl.training.rollout_files import load_rollouts
from megatron_rl.validation import field_of, flag_of

# Of a response and of a step: more is a slip of the finger or a damaged file, and the masks would fill the memory.
MOST_TOKENS = 2**27
# What stands for a step in a chain of formulas where none is given: ragged, two prompts, a one-token response.
EXAMPLE_LENGTHS, EXAMPLE_PROMPTS = (2, 4, 1, 3), ("a", "a", "b", "b")
# The fields of a host's Sample that its hooks read -> what stands there when a dump lacks the field.
DUMP_FIELDS = {"group_index": None, "index": None, "rollout_id": None, "remove_sample": False}
# Of a file with one sample a line.
LINE_IDENTITIES = ("prompt_id", "rollout_id")
IDENTITIES = ("group_index", "index", *LINE_IDENTITIES)
MOST_PROBLEMS = 3
GO_WITH = {"--response-lengths": ("prompt_ids", "rollout_ids", "loss_masks"), "--rollouts": ("rollout_index",)}
WHOLE_FILE = "steps: the file is taken as one step; a host cuts its rollouts into steps of --global-batch-size and drops a rest"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInput:
    """Whole: what count_step needs, and where it comes from."""

    masks: list[Tensor]  # S tensors [response_length]
    prompts: Sequence[int | str] | None
    rollouts: Sequence[Hashable] | None = None
    """The rollout of each sample, where one of them makes several samples; None: each sample is a rollout of its own."""
    old_log_probs: list[Tensor] | None = None  # S tensors [response_length] float64; None where a sample has none
    rollout_log_probs: list[Tensor] | None = None
    source: str
    notes: tuple[str, ...] = ()
    is_given: bool = True
    """False: no step was given, and no number of this one is to be shown."""

    @property
    def longest(self) -> int:
        return max(mask.numel() for mask in self.masks)

    @property
    def rollout_keys(self) -> Sequence[Hashable]:
        return list(range(len(self.masks))) if self.rollouts is None else self.rollouts


def too_many_tokens(lengths: Sequence[int]) -> list[str]:
    """A problem, or none. To be asked before any mask is made."""
    total = sum(lengths)
    return [] if total <= MOST_TOKENS else [f"{total} response tokens in one step: at most {MOST_TOKENS} are read"]


def prompts_of_rollouts(rollouts: Sequence[Hashable], prompts: Sequence[Hashable] | None) -> list[str]:
    """Problems: the samples of a rollout share its prompt."""
    if prompts is None:
        return []
    prompt_of: dict[Hashable, Hashable] = {}
    return [
        printable(f"rollout {rollout} has samples of the prompts {prompt_of[rollout]} and {prompt}: a rollout has one prompt")
        for rollout, prompt in zip(rollouts, prompts, strict=True)
        if prompt_of.setdefault(rollout, prompt) != prompt
    ]


def given_flags(args: Namespace, *names: str) -> dict[str, Any]:
    """Flag -> value, of those that are on the command line."""
    return {flag_of(name): vars(args)[name] for name in names if vars(args)[name] is not None}


def read_step(args: Namespace) -> StepInput:
    """ConfigError for sources that contradict each other, DataError for a source that cannot be read."""
    given = given_flags(args, "response_lengths", "rollouts", "rollout_dump")
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)}: a step has one source; give one of them")
    problems = [
        f"{flag} goes with {source} alone: remove it, or give {source}"
        for source, names in GO_WITH.items()
        if source not in given
        for flag in given_flags(args, *names)
    ]
    if problems:
        raise ConfigError(problems)
    if args.rollouts is not None:
        return read_rollouts(args.rollouts, args.rollout_index)
    if args.rollout_dump is not None:
        return read_dump(args.rollout_dump, host_named(args.host) if args.host in ROLLOUT_HOST_NAMES else None)
    if args.response_lengths is not None:
        return read_lengths(args)
    return _no_step(args)


def _no_step(args: Namespace) -> StepInput:
    """The formulas of a chain need no step; everything else does."""
    if args.host is None:
        raise ConfigError(
            "nothing to explain: give --response-lengths 3,5,8 (with --prompt-ids a,a,b), --rollouts FILE of megatron-rl train "
            "--save-rollouts or of one sample a line, or --rollout-dump FILE of a host's --save-debug-rollout-data; --host alone "
            "gives the chain of factors as formulas"
        )
    note = (
        "numbers: no step is given; --response-lengths 3,5,8 --prompt-ids a,a,b, --rollouts FILE or --rollout-dump FILE gives one"
    )
    masks = [torch.ones(length, dtype=torch.bool) for length in EXAMPLE_LENGTHS]
    return StepInput(masks=masks, prompts=list(EXAMPLE_PROMPTS), source="no step", notes=(note,), is_given=False)


def read_lengths(args: Namespace) -> StepInput:
    """`3,5,8`; `a,a,b`; `0,0,1`; `110,11111,00000000`, a digit a response token. Every problem in one ConfigError."""
    words = _listed(args.response_lengths)
    rows = None if args.loss_masks is None else _listed(args.loss_masks)
    names = {flag: _listed(text) for flag, text in given_flags(args, "prompt_ids", "rollout_ids").items()}
    prompts, rollouts = names.get("--prompt-ids"), names.get("--rollout-ids")
    problems = [
        f"--response-lengths {args.response_lengths}: {word!r} must be a whole number of 1 to {MOST_TOKENS}, as in 3,5,8"
        for word in words
        if not word.isdecimal() or not 1 <= int(word) <= MOST_TOKENS
    ]
    if not problems:
        problems = [f"--response-lengths: {problem}" for problem in too_many_tokens([int(word) for word in words])]
    for flag, given in names.items():
        if len(given) != len(words) or "" in given:
            how = f"{len(given)} names{', one of them empty,' if '' in given else ''} for {len(words)} responses"
            problems.append(f"{flag} {vars(args)[field_of(flag)]}: {how}; one name for each is needed, as in a,a,b")
    if not problems and rows is not None and len(rows) != len(words):
        problems = [f"--loss-masks {args.loss_masks}: {len(rows)} masks for {len(words)} responses: one each, as in 110,11111"]
    elif not problems and rows is not None:
        problems = [
            f"--loss-masks: {row!r} must be {length} digits 0 or 1, one for each token of its response"
            for length, row in zip(words, rows, strict=True)
            if len(row) != int(length) or set(row) - {"0", "1"}
        ]
    if not problems and rollouts is not None:
        problems = [f"--rollout-ids {args.rollout_ids}: {problem}" for problem in prompts_of_rollouts(rollouts, prompts)]
    if problems:
        raise ConfigError(problems)
    if rows is None:
        masks = [torch.ones(int(word), dtype=torch.bool) for word in words]
    else:
        masks = [torch.tensor([digit == "1" for digit in row], dtype=torch.bool) for row in rows]
    return StepInput(masks=masks, prompts=prompts, rollouts=rollouts, source="the command line")


def _listed(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


def read_rollouts(path: str, index: int | None) -> StepInput:
    """One rollout of the JSON lines that `megatron-rl train --save-rollouts` writes, or a file of one sample a line."""
    if _holds_one_sample_a_line(path):
        if index is not None:
            raise ConfigError(f"--rollout-index {index}: {path} has one sample a line, which make one step; remove it")
        return _read_sample_lines(path)
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
        masks=[torch.tensor(sample.loss_mask, dtype=torch.int64) for sample in samples],
        prompts=[sample.prompt_id for sample in samples],
        old_log_probs=_rows_of([sample.old_log_probs for sample in samples]),
        rollout_log_probs=_rows_of([sample.rollout_log_probs for sample in samples]),
        source=f"rollout {chosen[0].rollout_index} of {path}",
        notes=tuple(notes),
    )


def _rows_of(values: list[list[float] | None]) -> list[Tensor] | None:
    return None if None in values else [torch.tensor(row, dtype=torch.float64) for row in values]


def _holds_one_sample_a_line(path: str) -> bool:
    try:
        with Path(path).open("rb") as file:
            first = json.loads(file.readline())
    except (OSError, ValueError, RecursionError):
        return False  # load_rollouts says what is wrong
    if isinstance(first, dict) and {"samples", "rollout_index", "response_length", "loss_mask"}.isdisjoint(first):
        raise DataError(
            f"--rollouts {path}, line 1: neither a rollout of `megatron-rl train --save-rollouts` nor a sample, as in "
            '{"response_length": 3, "prompt_id": "a"} or {"loss_mask": [1, 0, 1]}'
        )
    return isinstance(first, dict) and not {"response_length", "loss_mask"}.isdisjoint(first)


def _read_sample_lines(path: str) -> StepInput:
    """{"response_length": 3, "loss_mask": [1, 0, 1], "prompt_id": "a", "rollout_id": 0}: one of the first two, the rest at will."""
    lines = Path(path).read_bytes().rstrip().splitlines()
    records = [parse_json_line(line, f"--rollouts {path}, line {number}") for number, line in enumerate(lines, 1)]
    for record in records:
        if isinstance(record, dict) and isinstance(record.get("loss_mask"), list) and "response_length" not in record:
            record["response_length"] = len(record["loss_mask"])
    masks = _masks_of(records, f"--rollouts {path}, line", 1)
    columns = {name: [record.get(name) for record in records] for name in LINE_IDENTITIES}
    problems = [
        f"--rollouts {path}: line {values.index(None) + 1} has no {name} and others have: give it in all, or none"
        for name, values in columns.items()
        if None in values and values != [None] * len(values)
    ]
    prompts, rollouts = (None if values[0] is None else values for values in columns.values())
    if not problems and rollouts is not None:
        problems = [f"--rollouts {path}: {problem}" for problem in prompts_of_rollouts(rollouts, prompts)]
    if problems:
        raise DataError("; ".join(problems))
    return StepInput(masks=masks, prompts=prompts, rollouts=rollouts, source=path)


def read_dump(path: str, host: Host | None) -> StepInput:
    """A host's --save-debug-rollout-data."""
    records, not_read = load_samples(path, "--rollout-dump")
    masks = _masks_of(records, f"--rollout-dump {path}, sample", 0)
    samples = []
    for record, mask in zip(records, masks, strict=True):
        fields = {name: plain_number(record.get(name, absent)) for name, absent in DUMP_FIELDS.items()}
        samples.append(Namespace(response_length=len(mask), loss_mask=mask, **fields))
    batch, rollouts = read_batch(samples, host, needs_prompts=False), None
    if len(positions_of(batch.rollouts)) != len(samples):
        # A sample without a rollout_id may be a rollout by itself, which the batch names by a tuple.
        rollouts = [f"of sample {key[1]}" if isinstance(key, tuple) else key for key in batch.rollouts]
    notes = [WHOLE_FILE]
    if not_read:
        notes.append(f"objects of the file that are neither numbers, text, lists nor tensors: {', '.join(not_read)}")
    return StepInput(masks=batch.masks, prompts=batch.prompts, rollouts=rollouts, source=path, notes=tuple(notes))


def _masks_of(records: list[Any], place: str, first: int) -> list[Tensor]:
    """The loss mask of each record, all ones where it has none. DataError names the first records that are wrong."""
    masks, problems = [], []
    lengths = [plain_number(record.get("response_length")) for record in records if isinstance(record, dict)]
    for problem in too_many_tokens([length for length in lengths if _is_length(length)]):
        raise DataError(f"{place.rpartition(',')[0]}: {problem}")
    for number, record in enumerate(records, first):
        try:
            masks.append(_mask_of(record))
        except DataError as error:
            problems.append(f"{place} {number}: {error}")
    if problems:
        rest = f"; and {len(problems) - MOST_PROBLEMS} more" if len(problems) > MOST_PROBLEMS else ""
        raise DataError("; ".join(problems[:MOST_PROBLEMS]) + rest)
    return masks


def _mask_of(record: Any) -> Tensor:  # [response_length] int64
    if not isinstance(record, dict):
        raise DataError(f"{type(record).__name__} in the place of a dict of a sample's fields")
    for name in IDENTITIES:
        if not isinstance(plain_number(record.get(name)), int | str | None):
            raise DataError(f"{name} is {_shown(record[name])}: a whole number or text is needed, or nothing")
    length, mask = plain_number(record.get("response_length")), record.get("loss_mask")
    if not _is_length(length):
        raise DataError(f"response_length is {_shown(length)}: a whole number of 0 to {MOST_TOKENS} is needed")
    if mask is None:
        return torch.ones(length, dtype=torch.int64)
    try:
        row = mask.tolist() if isinstance(mask, Array) else mask
        values = torch.as_tensor([plain_number(value) for value in row] if isinstance(row, list) else row)
    except DAMAGED:
        values = torch.full((length,), -1)
    # Shape first: a tensor may say that it is larger than the memory.
    if values.dim() == 1 and len(values) != length:
        raise DataError(f"a loss_mask of {len(values)} for a response_length of {length}: one entry a token")
    if values.dim() != 1 or not bool(((values == 0) | (values == 1)).all()):
        raise DataError("loss_mask must be a list of 0 and 1, or None")
    return values.to(torch.int64)


def _is_length(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_TOKENS


def _shown(value: Any) -> str:
    """Numbers, text and small lists as they are; of a tensor its shape, which may be larger than the memory."""
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) and value.dim() else repr(value)
