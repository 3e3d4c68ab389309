"""The tokenizer of a Hugging Face folder: text and chat messages to tokens, responses to text, and the tokens that end one."""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.errors import ConfigError, printable
from megatron_rl.files.bounds import check_regular
from megatron_rl.files.json_values import LARGEST_WHOLE, Fields, read_saved

# What transformers and its tokenizers look for in a folder.
READ_BY_TRANSFORMERS = ("*.json", "*.model", "*.txt", "*.jinja")


@dataclass(frozen=True, kw_only=True)
class HFTokenizer:
    folder: Path
    tokenizer: Any  # of transformers
    end_tokens: tuple[int, ...]

    @classmethod
    def of_folder(cls, folder: str | Path) -> HFTokenizer:
        """Raises ConfigError without `transformers`, for a folder without a tokenizer, and for one without an end token."""
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise ConfigError(
                f"--hf-checkpoint needs transformers for the tokenizer ({error}): pip install 'transformers>=4.51,<6'"
            ) from None
        folder = Path(folder)
        try:
            check_regular(folder, READ_BY_TRANSFORMERS)
            # Without the word it asks on standard input whether the folder's own code may run.
            tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
            if not tokenizer.get_vocab().keys() - {*tokenizer.all_special_tokens}:  # as transformers 5 makes one of no file
                raise ValueError("it has no token beside special ones")
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # of any type: transformers raises what its readers raise, and those in Rust panic
            text = printable((str(error).splitlines() or [""])[0])
            raise ConfigError(
                f"--hf-checkpoint {folder}: its tokenizer cannot be read ({type(error).__name__}: {text}); "
                + (
                    "it is code of the folder, which is not run here: take a folder whose tokenizer transformers has"
                    if _has_code(folder)
                    else "copy tokenizer.json and tokenizer_config.json into the folder"
                )
            ) from error
        end_tokens = _end_tokens(folder, tokenizer.eos_token_id)
        if not end_tokens:
            raise ConfigError(
                f"--hf-checkpoint {folder}: neither the tokenizer nor generation_config.json has an end token, so no response "
                "would end before --max-new-tokens; set eos_token in tokenizer_config.json"
            )
        return cls(folder=folder, tokenizer=tokenizer, end_tokens=end_tokens)

    def encode(self, prompt: str | list[dict[str, Any]]) -> list[int]:
        """Text as it is, with the tokens that the tokenizer begins a text with; messages by the chat template."""
        if isinstance(prompt, str):
            return [int(token) for token in self.tokenizer.encode(prompt)]
        if not self.tokenizer.chat_template:
            raise ConfigError(
                f"--hf-checkpoint {self.folder}: a prompt holds chat messages, and the tokenizer has no chat template; write the "
                "prompt as text, or add chat_template to tokenizer_config.json"
            )
        # transformers 5 gives a dict unless it is told not to.
        options = {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
        return [int(token) for token in self.tokenizer.apply_chat_template(prompt, **options)]

    def decode(self, tokens: list[int]) -> str:
        """Without special tokens."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def check_model(self, vocab_size: int) -> None:
        """ConfigError for ids that the model has no row for. A model of more rows than ids is as usual."""
        largest = max(self.tokenizer.get_vocab().values(), default=-1)
        if largest >= vocab_size:
            raise ConfigError(
                f"--hf-checkpoint {self.folder}: the tokenizer has ids up to {largest}, and vocab_size={vocab_size} in config.json "
                f"allows ids up to {vocab_size - 1}: take the tokenizer of this model, or remove the tokens that were added to it; "
                "if they are needed, give the model rows for them (resize_token_embeddings of transformers) and save it"
            )

    def _digest(self) -> str:
        return hashlib.sha256(json.dumps(self.tokenizer.get_vocab(), sort_keys=True).encode()).hexdigest()

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps({"tokenizer": self._digest()}) + "\n", encoding="utf-8")

    def check_saved(self, path: str | Path) -> None:
        """ConfigError unless the run began with a tokenizer of the same vocabulary: token ids would change their meaning."""
        saved = read_saved(path, "tokenizer")
        if saved != self._digest():
            raise ConfigError(f"{path}: the run began with another vocabulary than the tokenizer of {self.folder} has")


def _has_code(folder: Path) -> bool:
    """Whether the tokenizer is a class in a file of the folder."""
    for name in ("tokenizer_config.json", "config.json"):
        with contextlib.suppress(ConfigError):
            classes = Fields.of_file(folder / name, "no folder of a model").content.get("auto_map")
            if isinstance(classes, dict) and "AutoTokenizer" in classes:
                return True
    return False


def _end_tokens(folder: Path, of_tokenizer: int | None) -> tuple[int, ...]:
    """Those of generation_config.json, which may be several, and the tokenizer's."""
    found = [] if of_tokenizer is None else [of_tokenizer]
    path = folder / "generation_config.json"
    if not path.exists():
        return tuple(sorted(set(found)))
    try:
        given = Fields.of_file(path, "no folder of a model").content.get("eos_token_id")
        of_file = given if isinstance(given, list) else [] if given is None else [given]
        if any(type(token) is not int or not 0 <= token <= LARGEST_WHOLE for token in of_file):
            raise ConfigError(f"eos_token_id is {given!r}, and must be a token id or a list of them")
    except ConfigError as error:
        raise ConfigError(
            f"--hf-checkpoint {folder}: {path.name} cannot be read ({error}): fetch the file again, or remove it, and only the "
            "tokenizer's end token ends a response"
        ) from error
    found += of_file
    return tuple(sorted(set(found)))
