"""A user's own task: --prompts FILE and --reward module.function. A malformed line is an error, not a guess.

Each line of the file is a JSON object with `prompt`, token ids or text (the same in all lines), and anything else for the reward.
The reward is called as fn(prompt, response, record) -> number.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, SupportsFloat

from megatron_rl.errors import ConfigError, DataError, RunError, name_of
from megatron_rl.files.json_values import numbered_lines, parse_json_line
from megatron_rl.train.hf_tokenizer import HFTokenizer
from megatron_rl.train.rollouts import Prompt

# Long enough for a short answer, short enough for a first run on a CPU.
DEFAULT_MAX_NEW_TOKENS = 16
# Replaces a token without a character in a text response: the model's vocabulary may be larger than the task's.
UNKNOWN_CHARACTER = "\ufffd"

RewardFunction = Callable[[Any, Any, dict], SupportsFloat]


@dataclass(frozen=True, kw_only=True)
class CharacterVocabulary:
    """One token for each character, in the order of code points, and one more that ends a response."""

    characters: str

    @property
    def end_token(self) -> int:
        return len(self.characters)

    def encode(self, text: str) -> list[int]:
        return [self.characters.index(character) for character in text]

    def decode(self, tokens: list[int]) -> str:
        return "".join(self.characters[t] if t < len(self.characters) else UNKNOWN_CHARACTER for t in tokens)

    def save(self, path: Path) -> None:
        """ConfigError where the file holds another vocabulary: with that a checkpoint's token ids mean other characters."""
        if path.exists() and (saved := json.loads(path.read_text())["characters"]) != self.characters:
            raise ConfigError(
                f"{path} holds the characters {saved!r}, the prompts file has {self.characters!r}: the checkpoint's "
                "token ids would change their meaning; resume with the --prompts that the run began with"
            )
        path.write_text(json.dumps({"characters": self.characters, "end_token": self.end_token}) + "\n")


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
        prompts = _prompts_of(path, _read_records(path), self.vocabulary, vocab_size)
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
        """A finite float. An error of the user's function passes, with a note that names the prompt.

        The function gets copies: a change of them affects neither training nor the next call.
        """
        name = name_of(self.reward_function)
        try:
            number = float(self.reward_function(*copy.deepcopy((*self.shown(prompt, response), prompt.record))))
        except SystemExit as error:
            raise RunError(
                f"the reward {name} called sys.exit({error.code!r}): return a value or raise an error instead"
            ) from error
        except Exception as error:
            error.add_note(f"raised by the reward {name} for prompt {prompt.prompt_id!r}")
            raise
        if not math.isfinite(number):
            raise DataError(f"the reward {name} returned {number} for prompt {prompt.prompt_id!r}, it must return a finite number")
        return number

    def shown(self, prompt: Prompt, response: list[int]) -> tuple[Any, Any]:
        """What the user's function sees: the response up to an end token, as text where the prompt is text or messages."""
        length = next((place for place, token in enumerate(response) if token in self.end_tokens), len(response))
        shown: Any = response[:length]
        if self.vocabulary is not None and not _is_token_list(prompt.record["prompt"]):
            shown = self.vocabulary.decode(shown)
        return prompt.record["prompt"], shown


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

    Text: the vocabulary holds every character of the lines' values that are text or numbers, and an end token.
    Token ids: it goes up to the largest id of prompts and of lists named `answer`, and no token ends a response; --vocab-size may
    be larger.
    """
    records = _read_records(path)
    first, *_ = records.values()
    vocabulary: Vocabulary = tokenizer
    end_tokens: tuple[int, ...] = ()
    if tokenizer is not None:
        assert vocab_size is not None
        end_tokens = tokenizer.end_tokens
    elif isinstance(first["prompt"], str):
        values = [value for record in records.values() for value in record.values()]
        text = "".join(str(value) for value in values if type(value) in (str, int, float))
        vocabulary = CharacterVocabulary(characters="".join(sorted({*text})))
        vocab_size, end_tokens = vocabulary.end_token + 1, (vocabulary.end_token,)
    else:
        values = [record.get(name) for record in records.values() for name in ("prompt", "answer")]
        vocab_size = 1 + max((token for value in values if _is_token_list(value) for token in value), default=0)
    return PromptFileTask(
        prompts=_prompts_of(path, records, vocabulary, vocab_size),
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


def _read_records(path: str | Path) -> dict[int, dict]:
    """By the number of its line, the object of each line that is not blank."""
    records: dict[int, dict] = {}
    # Lines of bytes: in text other characters end lines too, and JSON may hold them as they are.
    for number, line in numbered_lines(path):
        if line.strip():
            place = f"{path}, line {number}"
            record = parse_json_line(line, place)
            if not isinstance(record, dict) or "prompt" not in record:
                raise DataError(f"{place}: prompt: missing; each line is an object with a prompt, text or a list of token ids")
            records[number] = record
    if not records:
        raise DataError(f"{path}: the file holds no prompt; write one JSON object with a prompt in each line")
    return records


def _prompts_of(path: str | Path, records: Mapping[int, dict], vocabulary: Vocabulary, vocab_size: int) -> tuple[Prompt, ...]:
    prompts = []
    for number, record in records.items():
        tokens = _tokens_of(record["prompt"], vocabulary, vocab_size, f"{path}, line {number}")
        prompts.append(Prompt(prompt_id=f"line-{number}", tokens=tokens, record=record))
    return tuple(prompts)


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
            f"{place}: prompt: must be text, or a list of token ids, as the first prompt is; with --hf-checkpoint either, or a "
            "list of messages with role and content"
        )
    if not tokens:
        raise DataError(f"{place}: prompt: it has no token, and the policy needs one to begin with")
    if max(tokens) >= vocab_size:
        raise DataError(f"{place}: prompt: token {max(tokens)} is not below {vocab_size}, the vocabulary of the model")
    return tokens


def _is_token_list(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int and token >= 0 for token in value)


def _is_message_list(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, dict) and one.keys() >= {"role", "content"} for one in value)
