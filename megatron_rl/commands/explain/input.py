"""The step that `megatron-rl explain` looks at: from the command line, our rollout file or a host's dump. It never weights."""

from __future__ import annotations

import io
import pickle
import zipfile
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_rl.errors import ConfigError, DataError
from megatron_rl.hosts.facts import Host
from megatron_rl.hosts.rollout_batch import positions_of, read_batch
from megatron_rl.training.rollout_files import load_rollouts

# Shown where a host's chain is asked for and no data is given: ragged, two prompts, one of them with a one-token response.
EXAMPLE_LENGTHS, EXAMPLE_PROMPTS = (2, 4, 1, 3), ("a", "a", "b", "b")
# The fields of a host's Sample that its hooks read -> what stands there when a dump lacks the field; None: it must not.
DUMP_FIELDS = {"loss_mask": None, "group_index": None, "index": None, "rollout_id": None, "remove_sample": False}
RESAVE = (
    'where the host is installed: d = torch.load(path, weights_only=False)["samples"]; names = ("response_length", "loss_mask", '
    '"group_index", "index", "rollout_id", "remove_sample"); torch.save([{n: s.get(n) for n in names} for s in d], new_path)'
)


@dataclass(frozen=True, slots=True)
class StepInput:
    """One optimiser step, whole: what count_step needs, and where it comes from."""

    masks: list[Tensor]  # S tensors [response_length]
    prompts: list[int | str] | None
    source: str
    notes: tuple[str, ...] = ()

    @property
    def longest(self) -> int:
        return max(mask.numel() for mask in self.masks)


def read_step(args: Namespace) -> StepInput:
    """ConfigError for sources that contradict each other, DataError for a source that cannot be read."""
    given = [flag for flag, value in _sources(args).items() if value is not None]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)}: a step has one source; give one of them")
    problems = [
        f"{flag} goes with {source} alone: remove it, or give {source}"
        for flag, value, source in (
            ("--prompt-ids", args.prompt_ids, "--response-lengths"),
            ("--loss-masks", args.loss_masks, "--response-lengths"),
            ("--rollout-index", args.rollout_index, "--rollouts"),
        )
        if value is not None and source not in given
    ]
    if problems:
        raise ConfigError(problems)
    if args.rollouts is not None:
        return read_rollouts(args.rollouts, args.rollout_index)
    if args.rollout_dump is not None:
        return read_dump(args.rollout_dump, Host.MILES if args.host == Host.MILES else Host.SLIME)
    if args.response_lengths is not None:
        return read_lengths(args.response_lengths, args.prompt_ids, args.loss_masks)
    if args.host is None:
        raise ConfigError(
            "nothing to explain: give --response-lengths 3,5,8 (with --prompt-ids a,a,b), --rollouts FILE of megatron-rl train "
            "--save-rollouts, or --rollout-dump FILE of a host's --save-debug-rollout-data"
        )
    masks = [torch.ones(length, dtype=torch.bool) for length in EXAMPLE_LENGTHS]
    lengths = ",".join(map(str, EXAMPLE_LENGTHS))
    note = (
        f"your own data: the numbers are those of an example, --response-lengths {lengths} --prompt-ids {','.join(EXAMPLE_PROMPTS)}"
    )
    return StepInput(masks, list(EXAMPLE_PROMPTS), "an example", (note,))


def read_lengths(lengths: str, prompt_ids: str | None, loss_masks: str | None) -> StepInput:
    """`3,5,8`; `a,a,b`; `110,11111,00000000`, a digit a response token. Every problem in one ConfigError."""
    words, problems = lengths.split(","), []
    for word in words:
        if not word.strip().isdecimal() or int(word) < 1:
            problems.append(f"--response-lengths {lengths}: {word.strip()!r} must be a whole number of at least 1, as in 3,5,8")
    prompts = None if prompt_ids is None else [word.strip() for word in prompt_ids.split(",")]
    if prompts is not None and (len(prompts) != len(words) or "" in prompts):
        problems.append(f"--prompt-ids {prompt_ids}: one name for each of the {len(words)} responses is needed, as in a,a,b")
    rows = ["1" * int(word) for word in words] if not problems and loss_masks is None else (loss_masks or "").split(",")
    if loss_masks is not None and len(rows) != len(words):
        problems.append(f"--loss-masks {loss_masks}: {len(rows)} masks for {len(words)} responses: one each, as in 110,11111")
    if problems:
        raise ConfigError(problems)
    for word, row in zip(words, rows, strict=True):
        if len(row.strip()) != int(word) or set(row.strip()) - {"0", "1"}:
            problems.append(f"--loss-masks: {row.strip()!r} must be {int(word)} digits 0 or 1, one for each token of its response")
    if problems:
        raise ConfigError(problems)
    masks = [torch.tensor([digit == "1" for digit in row.strip()], dtype=torch.bool) for row in rows]
    return StepInput(masks, prompts, "the command line")


def read_rollouts(path: str, index: int | None) -> StepInput:
    """One rollout of the JSON lines that `megatron-rl train --save-rollouts` writes, taken as one step."""
    batches = list(load_rollouts(path))
    chosen = [batch for batch in batches if index is None or batch.rollout_index == index]
    if not chosen:
        known = f"{batches[0].rollout_index} to {batches[-1].rollout_index}"
        raise ConfigError(f"--rollout-index {index}: {path} holds the rollouts {known}")
    samples = chosen[0].samples
    notes = [f"{len(batches) - 1} other rollouts of the file: --rollout-index chooses one"] if len(batches) > 1 else []
    masks = [torch.tensor(sample.loss_mask, dtype=torch.int64) for sample in samples]
    prompts = [sample.prompt_id for sample in samples]
    return StepInput(masks, prompts, f"rollout {chosen[0].rollout_index} of {path}", tuple(notes))


def read_dump(path: str, host: Host) -> StepInput:
    """miles and slime, --save-debug-rollout-data: torch.save of {"samples": [Sample.to_dict(), ...]}, or that list alone."""
    records = _load_dump(path)
    problems = [
        f"{path}, sample {position}: {_record_problem(record)}"
        for position, record in enumerate(records)
        if _record_problem(record) is not None
    ]
    if problems:
        raise DataError("; ".join(problems[:3]) + (f"; and {len(problems) - 3} more" if len(problems) > 3 else ""))
    samples = [
        Namespace(
            response_length=record["response_length"], **{name: record.get(name, absent) for name, absent in DUMP_FIELDS.items()}
        )
        for record in records
    ]
    batch = read_batch(samples, host, needs_prompts=False)
    notes = []
    num_rollouts = len(positions_of(batch.rollouts))
    if num_rollouts != len(samples):
        notes.append(
            f"rollouts: {len(samples)} samples belong to {num_rollouts} rollouts, each sample is weighted here as a rollout of its "
            "own, and the host counts rollouts"
        )
    return StepInput(batch.masks, batch.prompts, path, tuple(notes))


def _load_dump(path: str) -> Sequence:
    try:
        file = io.BytesIO(Path(path).read_bytes())
        if not zipfile.is_zipfile(file):
            raise DataError(
                f"--rollout-dump {path} is no file of torch.save, which is a zip archive; explain reads no other pickle"
            )
        file.seek(0)
        content = torch.load(file, map_location="cpu", weights_only=True)
    except OSError as error:
        raise DataError(f"--rollout-dump {path} cannot be read: {error}") from error
    except pickle.UnpicklingError as error:
        kind = str(error).partition("GLOBAL ")[2].split(" ")[0] or "something else"
        raise DataError(
            f"--rollout-dump {path} holds objects beside numbers, text, lists and tensors ({kind}), and reading them runs code of "
            f"the file, which explain does not do; write a plain one, {RESAVE}"
        ) from error
    except RuntimeError as error:
        raise DataError(f"--rollout-dump {path} is damaged, or a zip archive of another kind: {error}") from error
    samples = content.get("samples") if isinstance(content, dict) else content
    if not isinstance(samples, list) or not samples:
        found = f"a dict with the keys {', '.join(map(str, content))}" if isinstance(content, dict) else type(content).__name__
        raise DataError(f'--rollout-dump {path} holds {found}: a list of samples is needed, or a dict with one at "samples"')
    return samples


def _record_problem(record: object) -> str | None:
    if not isinstance(record, dict):
        return f"{type(record).__name__} in the place of a dict of a sample's fields"
    length = record.get("response_length")
    if isinstance(length, bool) or not isinstance(length, int) or length < 0:
        return f"response_length is {length!r}: a whole number of at least 0 is needed"
    mask = record.get("loss_mask")
    if mask is not None and not (isinstance(mask, list | Tensor) and all(value in (0, 1) for value in mask)):
        return "loss_mask must be a list of 0 and 1, or None"
    return None


def _sources(args: Namespace) -> dict[str, str | None]:
    return {"--response-lengths": args.response_lengths, "--rollouts": args.rollouts, "--rollout-dump": args.rollout_dump}
