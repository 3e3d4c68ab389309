"""A user's own task: --prompts FILE and --reward module.function. A malformed line is an error, not a guess.

Each line of the file is a JSON object with `prompt`, token ids or text (the same in all lines), an optional
`prompt_id`, and anything else for the reward. The reward is called as fn(prompt, response, record) -> number.
"""

from __future__ import annotations

import codecs
import copy
import functools
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, SupportsFloat

from megatron_rl.errors import ConfigError, DataError, RunError, name_of
from megatron_rl.files.json_values import numbered_lines, parse_json_line, read_saved
from megatron_rl.registries.dotted import import_dotted
from megatron_rl.train.hf_tokenizer import HFTokenizer
from megatron_rl.train.rollouts import Prompt

# Long enough for a short answer, short enough for a first run on a CPU.
DEFAULT_MAX_NEW_TOKENS = 16
# Replaces a token without a character in a text response: the model's vocabulary may be larger than the task's.
UNKNOWN_CHARACTER = "\ufffd"

# A vocabulary holds all ids up to its largest: with an id above this one its embedding would fill the memory.
LARGEST_TOKEN = 2**24
OTHER_ENCODINGS = {"UTF-8 with a mark": codecs.BOM_UTF8, "UTF-16": codecs.BOM_UTF16_LE, "UTF-16 (big-endian)": codecs.BOM_UTF16_BE}

RewardFunction = Callable[[Any, Any, dict], SupportsFloat]


@dataclass(frozen=True, kw_only=True)
class CharacterVocabulary:
    """One token for each character, in the order of code points, and one more that ends a response."""

    characters: str

    @classmethod
    def of_texts(cls, texts: Iterable[str]) -> CharacterVocabulary:
        return cls(characters="".join(sorted({character for text in texts for character in text})))

    @property
    def end_token(self) -> int:
        return len(self.characters)

    def encode(self, text: str) -> list[int]:
        return [self.characters.index(character) for character in text]

    def decode(self, tokens: list[int]) -> str:
        return "".join(self.characters[t] if t < len(self.characters) else UNKNOWN_CHARACTER for t in tokens)

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps({"characters": self.characters, "end_token": self.end_token}) + "\n")

    def check_saved(self, path: str | Path) -> None:
        """ConfigError unless the file holds this vocabulary: with another, a checkpoint's token ids mean other characters."""
        saved = read_saved(path, "characters")
        if saved != self.characters:
            raise ConfigError(
                f"{path} holds the characters {saved!r}, the prompts file has {self.characters!r}: the checkpoint's "
                "token ids would change their meaning; resume with the --prompts that the run began with"
            )


@dataclass(frozen=True, kw_only=True)
class PromptFileTask:
    """A user's prompts and reward. Each epoch goes through all prompts once, in its own order."""

    prompts: tuple[Prompt, ...]
    reward_function: RewardFunction
    vocab_size: int
    max_new_tokens: int
    end_tokens: tuple[int, ...]
    vocabulary: CharacterVocabulary | HFTokenizer | None
    """None: the prompts are token ids."""

    def with_prompts_of(self, path: str | Path, vocab_size: int | None = None) -> PromptFileTask:
        """The same task with the prompts of another file. vocab_size: the model's, where it is more than the prompts need; it has
        a row for each token, or DataError is raised."""
        vocab_size = self.vocab_size if vocab_size is None else max(vocab_size, self.vocab_size)
        records = list(_read_records(Path(path), takes_messages=isinstance(self.vocabulary, HFTokenizer)))
        prompts = []
        for prompt_id, record in records:
            shown = record["prompt"]
            # A tokenizer takes all kinds, in one file too.
            if not isinstance(self.vocabulary, HFTokenizer) and isinstance(shown, str) == (self.vocabulary is None):
                raise DataError(f"{path}: prompt {prompt_id}: text and token ids in the two files; write all prompts the same way")
            if isinstance(self.vocabulary, CharacterVocabulary) and not set(shown) <= set(self.vocabulary.characters):
                unknown = "".join(sorted(set(shown) - set(self.vocabulary.characters)))
                raise DataError(f"{path}: prompt {prompt_id}: --prompts, which makes the vocabulary, has no {unknown!r}")
            tokens = _tokens_of(shown, self.vocabulary, vocab_size, f"{path}: prompt {prompt_id}")
            prompts.append(Prompt(prompt_id=prompt_id, tokens=tokens, record=record))
        return replace(self, prompts=tuple(prompts), vocab_size=vocab_size)

    @property
    def max_prompt_tokens(self) -> int:
        return max(len(prompt.tokens) for prompt in self.prompts)

    def make_prompt(self, index: int, seed: int) -> Prompt:
        """The id carries the epoch: a rollout of more prompts than the file has does not merge prompt groups."""
        epoch, place = divmod(index, len(self.prompts))
        prompt = self.prompts[_epoch_order(len(self.prompts), seed, epoch)[place]]
        return Prompt(prompt_id=f"{prompt.prompt_id}#{epoch}", tokens=prompt.tokens, record=prompt.record)

    def reward(self, prompt: Prompt, response: list[int]) -> float:
        return call_reward(self.reward_function, prompt, *self.shown(prompt, response))

    def shown(self, prompt: Prompt, response: list[int]) -> tuple[Any, Any]:
        """What the user's function sees: the response up to an end token, as text where the prompt is text or messages."""
        ends = [place for place, token in enumerate(response) if token in self.end_tokens]
        response = response[: ends[0]] if ends else response
        has_ids = self.vocabulary is None or _is_token_list(prompt.record["prompt"])
        return prompt.record["prompt"], response if has_ids or self.vocabulary is None else self.vocabulary.decode(response)


def import_reward(path: str) -> RewardFunction:
    """The function that --reward names. ConfigError says what failed."""
    try:
        return import_dotted(path, "--reward")
    except ConfigError as error:
        raise ConfigError(
            f"{error}; modules are looked for in PYTHONPATH and, with `python -m megatron_rl`, in the current directory"
        ) from error
    except (Exception, SystemExit) as error:  # whatever the user's module raises while it is imported
        raise ConfigError(f"--reward {path!r}: importing the module raised {type(error).__name__}: {error}") from error


def call_reward(function: RewardFunction, prompt: Prompt, shown_prompt: Any, shown_response: Any) -> float:
    """The reward as a finite float. An error of the function itself passes, with a note that names the prompt.

    The function gets copies: a change of them affects neither training nor the next call.
    """
    name = name_of(function)
    try:
        value = function(*copy.deepcopy((shown_prompt, shown_response, prompt.record)))
    except SystemExit as error:
        raise RunError(f"the reward {name} called sys.exit({error.code!r}): return a value or raise an error instead") from error
    except Exception as error:
        error.add_note(f"raised by the reward {name} for prompt {prompt.prompt_id!r}")
        raise
    return _checked_reward(value, name, prompt)


def _checked_reward(value: Any, name: str, prompt: Prompt) -> float:
    try:
        number = float(value) if isinstance(value, SupportsFloat) else None
    except (TypeError, ValueError, OverflowError, RuntimeError):  # a tensor of several numbers, a number of 400 digits
        number = None
    if number is None:
        raise DataError(
            f"the reward {name} returned {_shortened(value)} ({type(value).__name__}) for prompt {prompt.prompt_id!r}, it must "
            "return a number"
        )
    if not math.isfinite(number):
        raise DataError(f"the reward {name} returned {number} for prompt {prompt.prompt_id!r}, it must be finite")
    return number


def read_prompt_file(
    path: str | Path,
    reward_function: RewardFunction,
    *,
    max_new_tokens: int | None = None,
    tokenizer: HFTokenizer | None = None,
    vocab_size: int | None = None,
) -> PromptFileTask:
    """Reads and checks the whole file. Raises DataError naming file, line and field.

    tokenizer: the prompts are text or lists of messages for it, or its token ids; vocab_size is then the model's.

    Text: the vocabulary holds every character of the file's values, numbers as they are written, without prompt_id, and an
    end token. Token ids: it goes up to the largest id of prompts and of lists named `answer`, and no token ends a
    response; --vocab-size may be larger.
    """
    records = list(_read_records(Path(path), takes_messages=tokenizer is not None))
    prompts = [record["prompt"] for _, record in records]
    vocabulary: CharacterVocabulary | HFTokenizer | None = tokenizer
    if tokenizer is not None:
        if vocab_size is None:
            raise ConfigError("a tokenizer needs the vocab_size of its model")
        tokenizer.check_model(vocab_size)
        end_tokens = tokenizer.end_tokens
    elif isinstance(prompts[0], str):
        vocabulary = CharacterVocabulary.of_texts(text for _, record in records for text in _texts(record))
        vocab_size, end_tokens = vocabulary.end_token + 1, (vocabulary.end_token,)
    else:
        answers = [answer for _, record in records if _is_token_list(answer := record.get("answer"))]
        vocab_size, end_tokens = 1 + max(token for tokens in prompts + answers for token in tokens), ()
    return PromptFileTask(
        prompts=tuple(
            Prompt(
                prompt_id=prompt_id,
                tokens=_tokens_of(record["prompt"], vocabulary, vocab_size, f"{path}: prompt {prompt_id}"),
                record=record,
            )
            for prompt_id, record in records
        ),
        reward_function=reward_function,
        vocab_size=vocab_size,
        max_new_tokens=DEFAULT_MAX_NEW_TOKENS if max_new_tokens is None else max_new_tokens,
        end_tokens=end_tokens,
        vocabulary=vocabulary,
    )


def _tokens_of(prompt: Any, vocabulary: CharacterVocabulary | HFTokenizer | None, vocab_size: int, place: str) -> list[int]:
    """Of text, messages or ids. DataError for a prompt without a token, and for an id that the model has no row for."""
    tokens = prompt if vocabulary is None or _is_token_list(prompt) else vocabulary.encode(prompt)
    if not tokens:
        raise DataError(f"{place}: {_shortened(prompt)} has no token for the tokenizer: the policy needs one to begin with")
    if max(tokens) >= vocab_size:
        raise DataError(
            f"{place}: token {max(tokens)} is not below {vocab_size}, the vocabulary: "
            + (f"type --vocab-size {max(tokens) + 1} or more" if vocabulary is None else "write ids of the folder's tokenizer")
        )
    return tokens


def stable_integer(*parts: int | str) -> int:
    """A 64-bit number that depends on the parts alone: equal on every machine, in every process and version."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


@functools.lru_cache(maxsize=4)
def _epoch_order(num_prompts: int, seed: int, epoch: int) -> list[int]:
    return sorted(range(num_prompts), key=lambda place: stable_integer("order", seed, epoch, place))


def _read_records(path: Path, *, takes_messages: bool = False) -> Iterator[tuple[str, dict]]:
    """(prompt_id, record) of each line that is not blank."""
    line_of_id: dict[str, int] = {}
    first_kind = None
    # Lines of bytes: in text other characters end lines too, and JSON may hold them as they are.
    for number, line in numbered_lines(path):
        for codec, mark in OTHER_ENCODINGS.items() if number == 1 else ():
            if line.startswith(mark):
                raise DataError(f"{path}: the file is {codec} (it begins with its byte order mark); save it as UTF-8 without one")
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        record = _check_record(parse_json_line(line, place), place, takes_messages=takes_messages)
        kind = str if isinstance(record["prompt"], str) else list
        if not takes_messages and first_kind not in (None, kind):
            raise DataError(f"{place}: prompt: text and token ids in one file; write all prompts the same way")
        first_kind = kind
        prompt_id = str(record.get("prompt_id", f"line-{number}"))
        if prompt_id in line_of_id:
            raise DataError(
                f"{place}: prompt_id: {prompt_id!r} is taken by line {line_of_id[prompt_id]}; two prompts of one id "
                "would share a prompt group"
            )
        line_of_id[prompt_id] = number
        yield prompt_id, record
    if not line_of_id:
        raise DataError(f"{path}: the file holds no prompt; write one JSON object with a prompt in each line")


def _check_record(record: Any, place: str, *, takes_messages: bool) -> dict:
    if not isinstance(record, dict) or "prompt" not in record:
        raise DataError(f"{place}: prompt: missing; each line is an object with a prompt, text or a list of token ids")
    prompt = record["prompt"]
    if takes_messages:
        if not prompt or not (isinstance(prompt, str) or _is_message_list(prompt) or _is_token_list(prompt)):
            raise DataError(
                f"{place}: prompt: {_shortened(prompt)} must be text, a list of messages with role and content, or a list of token "
                "ids, and not empty"
            )
    elif not prompt or not (isinstance(prompt, str) or _is_token_list(prompt)):
        is_chat = bool(prompt) and _is_message_list(prompt)
        need = "; chat messages need the template of a tokenizer: give its folder as --hf-checkpoint" if is_chat else ""
        raise DataError(
            f"{place}: prompt: {_shortened(prompt)} must be text or a list of token ids, integers of 0 to {LARGEST_TOKEN}, and not "
            f"empty{need}"
        )
    if not isinstance(record.get("prompt_id", ""), str | int):
        raise DataError(f"{place}: prompt_id: {record['prompt_id']!r} must be a string or an integer")
    return record


def _is_token_list(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int and 0 <= token <= LARGEST_TOKEN for token in value)


def _is_message_list(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message for message in value
    )


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _texts(value: Any) -> Iterator[str]:
    """Every text in a record, at any depth; numbers as they are written; prompt_id and true, false, null left out."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key != "prompt_id":
                yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)
    elif isinstance(value, str):
        yield value
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield str(value)
