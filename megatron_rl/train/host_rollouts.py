"""Rollout files that other systems wrote. A form of FORMS that holds what a step needs has a reader; another says what it lacks.

A reader gives the samples of one file, which is one rollout, as records of train/rollout_files.py. It computes nothing but
advantages, where the file has rewards alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.config import AdvantageNormalization
from megatron_rl.errors import DataError
from megatron_rl.files.bounds import open_regular
from megatron_rl.files.host_dumps import load_samples, plain_number
from megatron_rl.files.json_values import numbered_lines, parse_json_line
from megatron_rl.train.rollouts import group_advantages

# As miles and slime have it in the name of their flag's value. In a name of --rollouts it stands for 0, 1, 2 ..., or 1, 2, 3 ...
NUMBER = "{rollout_id}"
# A line of ours says so at its beginning: it may be too long to be read for this question.
OWN_FIELD, LOOKED_AT = b'"rollout_index"', 4096
INSTEAD = "write its samples as lines of --save-rollouts, whose form is in train/rollout_files.py"
TEXTS = "texts without special tokens, and no token ids, loss masks or log-probabilities"


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """One kind of file. Its suffix tells it, or the fields of its first line."""

    name: str
    suffix: str | None = None
    fields: frozenset[str] = frozenset()
    samples: Callable[[Path], list[dict[str, Any]]] | None = None
    has_advantages: bool = False
    lacks: str = ""
    """Without a reader: what is in the file and what is not."""


def form_of(path: str | Path) -> Form | None:
    """The form of the file that the name stands for; None for one of --save-rollouts, or one that cannot be read as any."""
    by_suffix = next((form for form in FORMS if form.suffix == Path(path).suffix), None)
    files = files_of(path) if by_suffix is None else []
    if not files:
        return by_suffix
    try:
        with open_regular(files[0]) as file:
            if OWN_FIELD in file.read(LOOKED_AT):
                return None
        _, line = next(numbered_lines(files[0]), (1, b""))
        record = parse_json_line(line, str(files[0]))
    except (OSError, DataError):  # whoever reads the file says it, with the number of the line
        return None
    names = record.keys() if isinstance(record, dict) else set()
    return next((form for form in FORMS if form.fields and form.fields <= names), None)


def problem_of_form(path: str | Path) -> str | None:
    """Why the file of another system is not read; None: it is, or is one of ours."""
    form = form_of(path)
    return None if form is None or form.samples else f"this is a file of {form.name}: it holds {form.lacks}; {INSTEAD}"


def is_of_host(path: str | Path) -> bool:
    return form_of(path) is not None


def has_advantages(path: str | Path) -> bool:
    form = form_of(path)
    return form is None or form.has_advantages


def files_of(path: str | Path) -> list[Path]:
    """The file, or those that the name stands for: from rollout 0 or 1 on, up to the first that is not there."""
    if NUMBER not in str(path):
        return [Path(path)] if Path(path).is_file() else []
    numbered = (Path(str(path).replace(NUMBER, str(number))) for number in itertools.count())
    first = next(numbered)
    return [*([first] if first.is_file() else []), *itertools.takewhile(Path.is_file, numbered)]


def host_records(path: str | Path, normalization: str = AdvantageNormalization.STD) -> Iterator[tuple[Path, dict[str, Any]]]:
    """(file, its rollout as a line of --save-rollouts) of each file. Advantages are the file's, or those of group_advantages.

    Raises DataError for what is no such file, and for a sample that lacks something.
    """
    form = form_of(path)
    if form is None or form.samples is None:
        raise DataError(f"{path}: {problem_of_form(path)}")
    for rollout_index, file in enumerate(files_of(path)):
        samples = form.samples(file)
        if not form.has_advantages:
            prompts, keys = ([sample[name] for sample in samples] for name in ("prompt_id", "rollout_id"))
            advantages = group_advantages([sample["reward"] for sample in samples], prompts, normalization, keys)
            samples = [{**sample, "advantage": value} for sample, value in zip(samples, advantages, strict=True)]
            if len({*keys}) == len(keys):  # each sample is a rollout
                samples = [{**sample, "rollout_id": None} for sample in samples]
        yield file, {"rollout_index": rollout_index, "samples": samples}


# Dumps of miles and slime


def _samples_of_dump(file: Path) -> list[dict[str, Any]]:
    records, not_read = load_samples(str(file), "--rollouts")
    other = next((number for number, record in enumerate(records) if not isinstance(record, dict)), None)
    if other is not None:
        kind = " or ".join(not_read) or type(records[other]).__name__
        raise DataError(f"{file}, sample {other}: {kind} in the place of a dict of a sample's fields; {INSTEAD}")
    return [_sample_of_dump(record, f"{file}, sample {number}", number) for number, record in enumerate(records)]


def _sample_of_dump(record: dict, place: str, number: int) -> dict[str, Any]:
    """Numbered by its place in the file: a host's index may count through a whole run. Old log-probabilities are not there."""
    group, reward = plain_number(record.get("group_index")), plain_number(record.get("reward"))
    if group is None:
        raise DataError(f"{place}: group_index: missing, and it says which samples answer one prompt: the host's rollouts set it")
    if isinstance(reward, bool) or not isinstance(reward, int | float):
        raise DataError(f"{place}: reward: {reward!r} must be a number: a host with several takes one by --reward-key")
    rollout = plain_number(record.get("rollout_id"))
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
        "kept_ids": _kept_ids_of_dump(record, place),
        "rollout_id": f"sample {number}" if rollout is None else rollout,
    }


def _kept_ids_of_dump(record: dict, place: str) -> Any:
    """slime has lists, miles an object with two tensors."""
    kept = record.get("rollout_sampling_mask")
    if kept is None:
        found = [record.get(f"rollout_top_p_token_{name}") for name in ("ids", "offsets")]
    else:
        tensors = getattr(kept, "tensors", {})
        found = [tensors.get(f"_{name}", tensors.get(name)) for name in ("ids", "offsets")]
        if any(one is None for one in found):
            raise DataError(
                f"{place}: rollout_sampling_mask: what the sampler kept, in an object without tensors of ids and offsets; each "
                "ratio would be off by the kept mass: write them as rollout_top_p_token_ids and rollout_top_p_token_offsets"
            )
    ids, offsets = map(_listed, found)
    return None if ids is None and offsets is None else {"token_ids": ids, "offsets": offsets}


def _listed(values: Any) -> Any:
    return values.tolist() if hasattr(values, "tolist") else values


# train_data_step<N>.jsonl of NeMo-RL: a line a sample, its values in lists of one; rows of tokens are padded on the right

ROWS = ("token_ids", "token_loss_mask", "advantages", "generation_logprobs", "prev_logprobs")


def _samples_of_step_log(file: Path) -> list[dict[str, Any]]:
    samples, prompts = [], dict[tuple, str]()
    for number, line in numbered_lines(file):
        place = f"{file}, line {number}"
        prompt, sample = _sample_of_step_log(parse_json_line(line, place), place)
        name = prompts.setdefault(prompt, str(number - 1))
        samples.append({**sample, "prompt_id": name, "index": number - 1})
    unmasked = [value for one in samples for value, m in zip(one["old_log_probs"], one["loss_mask"], strict=True) if m]
    if not any(unmasked):  # force_on_policy_ratio: the placeholder of a forward that was left out
        samples = [{**sample, "old_log_probs": None} for sample in samples]
    return samples


def _sample_of_step_log(record: Any, place: str) -> tuple[tuple, dict[str, Any]]:
    """(the prompt's tokens, the sample without its names). The host takes samples of equal prompts for a group too."""
    if not isinstance(record, dict):
        raise DataError(f"{place}: {type(record).__name__} in the place of an object of a sample's fields")
    # With dynamic sampling "rewards" are those of all that was sampled.
    reward = _only(record, "filtered_rewards" if "filtered_rewards" in record else "rewards", int | float, place)
    length, is_kept = _only(record, "input_lengths", int, place), _only(record, "sample_loss_mask", int | float, place)
    rows = {name: _only(record, name, list, place)[:length] for name in ROWS}
    short = next((name for name in ROWS if len(rows[name]) != length), None)
    if short is not None:
        raise DataError(f"{place}: {short}: {len(rows[short])} values for input_lengths {length}")
    mask = rows["token_loss_mask"]
    if not any(mask):
        raise DataError(f"{place}: token_loss_mask: no token of the sample is unmasked, so its response has no beginning")
    start = next(position for position, value in enumerate(mask) if value)
    advantages = {value for value, is_trained in zip(rows["advantages"], mask, strict=True) if is_trained}
    if len(advantages) > 1:
        raise DataError(
            f"{place}: advantages: from {min(advantages)} to {max(advantages)} in one sample, which has one here: record a run "
            "with grpo.adv_estimator.name=grpo"
        )
    return tuple(rows["token_ids"][:start]), {
        "tokens": rows["token_ids"],
        "response_length": length - start,
        "loss_mask": [int(value and is_kept) for value in mask[start:]],
        "reward": reward,
        "advantage": advantages.pop(),
        "old_log_probs": rows["prev_logprobs"][start:],
        "rollout_log_probs": rows["generation_logprobs"][start:],
    }


def _only(record: dict, name: str, kind: Any, place: str) -> Any:
    """The one value of a list of one."""
    found = record.get(name)
    if not isinstance(found, list) or len(found) != 1 or not isinstance(found[0], kind):
        words = {list: "list", int: "whole number"}.get(kind, "number")
        raise DataError(f"{place}: {name}: must be a list with one {words} in it, as the host's logger writes a sample")
    return found[0]


FORMS = (
    Form(name="miles or slime (--save-debug-rollout-data)", suffix=".pt", samples=_samples_of_dump),
    Form(
        name="NeMo-RL (train_data_step<N>.jsonl of logger.log_dir)",
        fields=frozenset({"token_ids", "token_loss_mask", "rewards"}),
        samples=_samples_of_step_log,
        has_advantages=True,
    ),
    Form(
        name="verl (trainer.rollout_data_dir)",
        fields=frozenset({"input", "output", "score"}),
        lacks=f"{TEXTS}. The DataProto of the step has them, as prompts, responses, response_mask, rollout_log_probs and uid",
    ),
    Form(
        name="ROLL (rollout_dump_dir)",
        fields=frozenset({"responses", "scores", "sampling_params"}),
        lacks=f"{TEXTS}. The DataProto of the step has them, as prompts, responses, response_mask and infer_logprobs",
    ),
    Form(
        name="prime-rl (enable_token_export)",
        fields=frozenset({"token_ids", "inference_logprobs", "trainer_logprobs"}),
        lacks="tokens and log-probabilities, and no reward and no prompt of a sample",
    ),
    Form(
        name="SkyRL (trainer.dump_data_batch)",
        suffix=".pkl",
        lacks="tokens, masks and log-probabilities, and no reward and no uid: which samples share a prompt is not written",
    ),
    Form(name="TRL (log_completions)", suffix=".parquet", lacks=TEXTS),
)
SUFFIXES = frozenset(form.suffix for form in FORMS if form.suffix is not None)
