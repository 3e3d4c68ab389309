"""The tokenizer of a Hugging Face folder: text and chat messages to tokens, responses to text, and the tokens that end one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.errors import ConfigError, printable
from megatron_rl.files.json_values import Fields


@dataclass(frozen=True, kw_only=True)
class HFTokenizer:
    folder: Path
    tokenizer: Any  # of transformers
    end_tokens: tuple[int, ...]

    @classmethod
    def of_folder(cls, folder: str | Path) -> HFTokenizer:
        """Raises ConfigError for a folder without a tokenizer, and for one without an end token."""
        from transformers import AutoTokenizer

        folder = Path(folder)
        try:
            # Without the word it asks on standard input whether the folder's own code may run.
            tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
            if not tokenizer.get_vocab().keys() - {*tokenizer.all_special_tokens}:  # as transformers 5 makes one of no file
                raise ValueError("it has no token beside special ones")
        except Exception as error:  # of any type: transformers raises what its readers raise
            text = printable((str(error).splitlines() or [""])[0])
            raise ConfigError(
                f"--hf-checkpoint {folder}: its tokenizer cannot be read ({type(error).__name__}: {text}); copy tokenizer.json and "
                "tokenizer_config.json into the folder"
            ) from error
        end_tokens = end_tokens_of(folder, tokenizer.eos_token_id)
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
                "prompt as text"
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
                f"allows ids up to {vocab_size - 1}: take the tokenizer of this model"
            )


def end_tokens_of(folder: Path, of_tokenizer: int | None) -> tuple[int, ...]:
    """The tokenizer's, and those of generation_config.json, which may be several."""
    path = folder / "generation_config.json"
    given = Fields.of_file(path, "no folder of a model").content.get("eos_token_id") if path.exists() else None
    tokens = [of_tokenizer, *(given if isinstance(given, list) else [given])]
    if any(token is not None and (type(token) is not int or token < 0) for token in tokens):
        raise ConfigError(f"{path}: eos_token_id={given!r} must be a token id or a list of them")
    return tuple(sorted({token for token in tokens if token is not None}))
