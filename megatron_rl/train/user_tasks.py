"""A user's own task: --prompts FILE and --reward module.function. A malformed line is an error, not a guess.

Each line of the file is a JSON object with `prompt`, token ids or text (the same in all lines), an optional
`prompt_id`, and anything else for the reward. The reward is called as fn(prompt, response, record) -> number.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Sequence
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


Vocabulary = CharacterVocabulary | HFTokenizer | None


@dataclass(frozen=True, kw_only=True)
class PromptFileTask:
    """A user's prompts and reward. Each epoch goes through all prompts once, in its own order."""

    prompts: tuple[Prompt, ...]
    reward_function: RewardFunction
    vocab_size: int
    max_new_tokens: int
    end_tokens: tuple[int, ...]
    vocabulary: Vocabulary
    """None: the prompts are token ids."""

    def with_prompts_of(self, path: str | Path, vocab_size: int | None = None) -> PromptFileTask:
        """The same task with the prompts of another file. vocab_size: the model's, where it is more than the prompts need; it has
        a row for each token, or DataError is raised."""
        vocab_size = self.vocab_size if vocab_size is None else max(vocab_size, self.vocab_size)
        prompts = _prompts_of(_read_records(path), self.vocabulary, vocab_size)
        return replace(self, prompts=prompts, vocab_size=vocab_size)

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
        length = next((place for place, token in enumerate(response) if token in self.end_tokens), len(response))
        shown: Any = response[:length]
        if self.vocabulary is not None and not _is_token_list(prompt.record["prompt"]):
            shown = self.vocabulary.decode(shown)
        return prompt.record["prompt"], shown


def import_reward(path: str) -> RewardFunction:
    """The function that --reward names. ConfigError says what failed."""
    try:
        return import_dotted(path, "--reward")
    except ConfigError:
        raise
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
    try:
        number = float(value) if isinstance(value, SupportsFloat) else math.nan
    except (TypeError, ValueError, OverflowError, RuntimeError):  # a tensor of several numbers, a number of 400 digits
        number = math.nan
    if not math.isfinite(number):
        raise DataError(
            f"the reward {name} returned {_shortened(value)} ({type(value).__name__}) for prompt {prompt.prompt_id!r}, it must "
            "return a finite number"
        )
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

    Text: the vocabulary holds every character of the lines' values that are text or numbers, without prompt_id, and an end token.
    Token ids: it goes up to the largest id of prompts and of lists named `answer`, and no token ends a response; --vocab-size may
    be larger.
    """
    lines = _read_records(path)
    records = [record for _, _, record in lines]
    vocabulary: Vocabulary = tokenizer
    end_tokens: tuple[int, ...] = ()
    if tokenizer is not None:
        assert vocab_size is not None
        tokenizer.check_model(vocab_size)
        end_tokens = tokenizer.end_tokens
    elif isinstance(records[0]["prompt"], str):
        values = [value for record in records for name, value in record.items() if name != "prompt_id"]
        vocabulary = CharacterVocabulary.of_texts(str(value) for value in values if type(value) in (str, int, float))
        vocab_size, end_tokens = vocabulary.end_token + 1, (vocabulary.end_token,)
    else:
        lists = [record[name] for record in records for name in ("prompt", "answer") if _is_token_list(record.get(name))]
        vocab_size = 1 + max((token for tokens in lists for token in tokens), default=0)
    return PromptFileTask(
        prompts=_prompts_of(lines, vocabulary, vocab_size),
        reward_function=reward_function,
        vocab_size=vocab_size,
        max_new_tokens=DEFAULT_MAX_NEW_TOKENS if max_new_tokens is None else max_new_tokens,
        end_tokens=end_tokens,
        vocabulary=vocabulary,
    )


def stable_integer(*parts: int | str) -> int:
    """A 64-bit number that depends on the parts alone: equal on every machine, in every process and version."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


@functools.lru_cache(maxsize=4)
def _epoch_order(num_prompts: int, seed: int, epoch: int) -> list[int]:
    return sorted(range(num_prompts), key=lambda place: stable_integer("order", seed, epoch, place))


def _read_records(path: str | Path) -> list[tuple[str, str, dict]]:
    """(file and line, prompt_id, record) of each line that is not blank."""
    found: dict[str, tuple[str, str, dict]] = {}
    # Lines of bytes: in text other characters end lines too, and JSON may hold them as they are.
    for number, line in numbered_lines(path):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        record = parse_json_line(line, place)
        if not isinstance(record, dict) or "prompt" not in record:
            raise DataError(f"{place}: prompt: missing; each line is an object with a prompt, text or a list of token ids")
        prompt_id = record.get("prompt_id", f"line-{number}")
        if not isinstance(prompt_id, str | int) or str(prompt_id) in found:
            raise DataError(
                f"{place}: prompt_id: {prompt_id!r} must be a string or an integer that no other line has: two prompts of one id "
                "would share a prompt group"
            )
        found[str(prompt_id)] = place, str(prompt_id), record
    if not found:
        raise DataError(f"{path}: the file holds no prompt; write one JSON object with a prompt in each line")
    return list(found.values())


def _prompts_of(lines: Sequence[tuple[str, str, dict]], vocabulary: Vocabulary, vocab_size: int) -> tuple[Prompt, ...]:
    return tuple(
        Prompt(prompt_id=prompt_id, tokens=_tokens_of(record["prompt"], vocabulary, vocab_size, place), record=record)
        for place, prompt_id, record in lines
    )


def _tokens_of(prompt: Any, vocabulary: Vocabulary, vocab_size: int, place: str) -> list[int]:
    """DataError for another kind of prompt than the vocabulary's, one without a token, and an id that the model has no row for."""
    has_tokenizer = isinstance(vocabulary, HFTokenizer)
    if _is_token_list(prompt) and (has_tokenizer or vocabulary is None):
        tokens = prompt
    elif vocabulary is not None and (isinstance(prompt, str) or (has_tokenizer and _is_message_list(prompt))):
        if isinstance(vocabulary, CharacterVocabulary) and (unknown := {*prompt} - {*vocabulary.characters}):
            raise DataError(f"{place}: prompt: --prompts, which makes the vocabulary, has no {''.join(sorted(unknown))!r}")
        tokens = vocabulary.encode(prompt)
    else:
        raise DataError(
            f"{place}: prompt: {_shortened(prompt)} must be text, or a list of token ids of 0 to {LARGEST_TOKEN}, as the first "
            "prompt is; with --hf-checkpoint either, or a list of messages with role and content"
        )
    if not tokens:
        raise DataError(f"{place}: prompt: {_shortened(prompt)} has no token: the policy needs one to begin with")
    if max(tokens) >= vocab_size:
        raise DataError(f"{place}: prompt: token {max(tokens)} is not below {vocab_size}, the vocabulary of the model")
    return tokens


def _is_token_list(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int and 0 <= token <= LARGEST_TOKEN for token in value)


def _is_message_list(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message for message in value
    )


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
