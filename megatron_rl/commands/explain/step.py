"""One optimiser step as `megatron-rl explain` sees it, from the command line, our rollouts, a sample a line or a host's dump."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
from torch import Tensor

from megatron_rl.errors import ConfigError, DataError, printable
from megatron_rl.files.host_dumps import load_samples, plain_number
from megatron_rl.files.json_values import numbered_lines, parse_json_line
from megatron_rl.files.plain_pickle import DAMAGED
from megatron_rl.hosts import ROLLOUT_HOST_NAMES
from megatron_rl.hosts.base import Host, host_named
from megatron_rl.hosts.companions import positions_of, read_batch
from megatron_rl.train.host_rollouts import is_of_host
from megatron_rl.train.rollout_files import load_rollouts
from megatron_rl.train.rollouts import Sample
from megatron_rl.validation import field_of

# Of a response and of a step: more is a slip of the finger or a damaged file, and the masks would fill the memory.
MOST_TOKENS = 2**27
# A field of a sample -> the flag that gives it for each response, and an example.
COLUMNS = {
    "response_length": ("--response-lengths", "3,5,8"),
    "loss_mask": ("--loss-masks", "110,11111,00000000"),
    "prompt_id": ("--prompt-ids", "a,a,b"),
    "rollout_id": ("--rollout-ids", "0,0,1"),
}
# The fields of a host's Sample that its hooks read -> the value where a dump lacks the field.
DUMP_FIELDS = {"group_index": None, "index": None, "rollout_id": None, "remove_sample": False}
IDENTITIES = ("group_index", "index", "prompt_id", "rollout_id")
MOST_PROBLEMS = 3
WHOLE_FILE = "steps: the file is taken as one step; a host cuts its rollouts into steps of --global-batch-size and drops a rest"


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchLayout:
    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    data: int = 1
    num_microbatches: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptSets:
    """The sets of the unmasked tokens, and what a trainer without them would make of each ratio. None: masses are not recorded."""

    mean_size: float
    single_fraction: float
    """Of tokens whose set is one id."""
    mean_mass: float | None = None
    longest_sample: int | None = None
    """Its unmasked tokens."""
    mass_product: float | None = None
    """Over these tokens."""

    def __str__(self) -> str:
        text = f"kept ids: {self.mean_size:.3g} a token; {self.single_fraction:.0%} of the tokens have one, score 0 and no gradient"
        if self.mean_mass is None:
            return text
        return text + (
            f"; kept mass {self.mean_mass:.3g}: over the whole vocabulary each ratio would be off by it, "
            f"the product over {self.longest_sample} tokens by {self.mass_product:.3g}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInput:
    """Whole: what count_step needs, and where it comes from."""

    masks: list[Tensor]  # S tensors [response_length]
    prompts: Sequence[int | str] | None
    rollouts: Sequence[Hashable] | None = None
    """The rollout of each sample, where one of them makes several samples; None: each sample is one rollout."""
    old_log_probs: list[Tensor] | None = None  # S tensors [response_length] float64; None where a sample has none
    rollout_log_probs: list[Tensor] | None = None
    kept: KeptSets | None = None
    """What the sampler kept of the vocabulary; None: the step does not say."""
    source: str
    notes: tuple[str, ...] = ()

    @property
    def rollout_keys(self) -> Sequence[Hashable]:
        return list(range(len(self.masks))) if self.rollouts is None else self.rollouts


def read_step(args: Namespace) -> StepInput:
    """ConfigError for wrong flags, DataError for a file that cannot be read."""
    if args.rollouts is not None:
        return read_rollouts(args.rollouts, args.rollout_index)
    if args.rollout_dump is not None:
        return read_dump(args.rollout_dump, host_named(args.host) if args.host in ROLLOUT_HOST_NAMES else None)
    if args.response_lengths is not None:
        return read_lengths(args)
    raise ConfigError(
        "nothing to explain: give a step, as --response-lengths 3,5,8 (with --prompt-ids a,a,b), --rollouts FILE of megatron-rl "
        "train --save-rollouts or of one sample a line, or --rollout-dump FILE of a host's --save-debug-rollout-data"
    )


def read_lengths(args: Namespace) -> StepInput:
    """The fields of samples in columns; a loss mask has a digit a token."""
    texts = {name: vars(args)[field_of(flag)] for name, (flag, _) in COLUMNS.items()}
    columns = {name: [word.strip() for word in text.split(",")] for name, text in texts.items() if text is not None}
    num_samples = len(columns["response_length"])
    problems = [
        f"{COLUMNS[name][0]} {texts[name]}: one entry for each of the {num_samples} responses is needed, as in {COLUMNS[name][1]}"
        f"{', with no space after a comma' if column[-1] == '' else ''}"
        for name, column in columns.items()
        if len(column) != num_samples or "" in column
    ]
    if problems:
        raise ConfigError(problems)
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
        old_log_probs=_rows_of([sample.old_log_probs for sample in samples]),
        rollout_log_probs=_rows_of([sample.rollout_log_probs for sample in samples]),
        kept=kept_sets(samples),
        source=f"rollout {chosen[0].rollout_index} of {path}",
        notes=tuple(notes),
    )


def kept_sets(samples: Sequence[Sample]) -> KeptSets | None:
    rows = [(sample.kept_ids.sizes[sample.loss_mask], sample) for sample in samples if sample.kept_ids is not None]
    sizes = torch.cat([of_sample for of_sample, _ in rows]) if rows else torch.empty(0)
    if not sizes.numel():
        return None
    found = KeptSets(mean_size=float(sizes.double().mean()), single_fraction=float((sizes == 1).double().mean()))
    masses = [sample.kept_mass[sample.loss_mask].double() for _, sample in rows if sample.kept_mass is not None]
    if len(masses) < len(rows):
        return found
    longest = max(masses, key=len)
    mean = float(torch.cat(masses).mean())
    return replace(found, mean_mass=mean, longest_sample=len(longest), mass_product=float(longest.prod()))


def _rows_of(values: list[Tensor | None]) -> list[Tensor] | None:
    rows = [row.double() for row in values if row is not None]
    return rows if len(rows) == len(values) else None


def _holds_one_sample_a_line(path: str) -> bool:
    """Else the file is read as `megatron-rl train` reads it: ours, or one of a host."""
    try:
        first = parse_json_line(next(numbered_lines(path), (1, b""))[1], path)
    except DataError:
        return False  # load_rollouts says what is wrong
    if not isinstance(first, dict) or not {"samples", "rollout_index"}.isdisjoint(first):
        return False
    return not {"response_length", "loss_mask"}.isdisjoint(first) or not is_of_host(path)


def _step_of(records: list[Any], place: str, first: int, source: str) -> StepInput:
    """Of {"response_length": 3, "loss_mask": [1, 0, 1], "prompt_id": "a", "rollout_id": 0}: one of the first two, the rest at will.
    place, first: what a message calls a record, and the number of the first."""
    masks = _masks_of(records, place, first)
    columns = {name: [record.get(name) for record in records] for name in ("prompt_id", "rollout_id")}
    problems = [
        f"{place} {values.index(None) + first} has no {name} and others have: give it in all, or none"
        for name, values in columns.items()
        if None in values and values != [None] * len(values)
    ]
    prompts, rollouts = (None if None in values else values for values in columns.values())
    prompt_of: dict[Hashable, Hashable] = {}
    for rollout, prompt in [] if prompts is None or rollouts is None else zip(rollouts, prompts, strict=True):
        if prompt_of.setdefault(rollout, prompt) != prompt:
            names = f"rollout {rollout} has samples of the prompts {prompt_of[rollout]} and {prompt}"
            problems.append(f"{place.rpartition(',')[0]}: {printable(names)}: a rollout has one prompt")
    if problems:
        raise DataError("; ".join(problems))
    return StepInput(masks=masks, prompts=prompts, rollouts=rollouts, source=source)


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
    lengths = [plain_number(record.get("response_length")) for record in records if isinstance(record, dict)]
    total = sum(length for length in lengths if _is_length(length))
    if total > MOST_TOKENS:
        raise DataError(f"{place.rpartition(',')[0]}: {total} response tokens in one step: at most {MOST_TOKENS} are read")
    masks, problems = [], []
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
    mask = record.get("loss_mask")
    length = plain_number(record.get("response_length", len(mask) if isinstance(mask, list) else None))
    if not _is_length(length):
        raise DataError(f"response_length is {_shown(length)}: a whole number of 0 to {MOST_TOKENS} is needed")
    if mask is None:
        return torch.ones(length, dtype=torch.int64)
    try:
        values = torch.as_tensor([plain_number(value) for value in mask] if isinstance(mask, list) else mask)
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
