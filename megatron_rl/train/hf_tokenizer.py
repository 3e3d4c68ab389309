"""The tokenizer of a Hugging Face folder: text and chat messages to tokens, responses to text, and the tokens that end one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.files.json_values import Fields


@dataclass(frozen=True, kw_only=True)
class HFTokenizer:
    tokenizer: Any  # of transformers
    end_tokens: tuple[int, ...]

    @classmethod
    def from_folder(cls, folder: str | Path) -> HFTokenizer:
        """end_tokens: the tokenizer's, and those of generation_config.json, which may be several.

        Raises what transformers raises for a folder without a tokenizer."""
        from transformers import AutoTokenizer

        # Without the word it asks on standard input whether the folder's own code may run.
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        path = Path(folder) / "generation_config.json"
        given = Fields.from_file(path, "no folder of a model").content.get("eos_token_id") if path.exists() else None
        tokens = [tokenizer.eos_token_id, *(given if isinstance(given, list) else [given])]
        return cls(tokenizer=tokenizer, end_tokens=tuple(sorted({token for token in tokens if token is not None})))

    def encode(self, prompt: str | list[dict[str, Any]]) -> list[int]:
        """Text as it is, with the tokens that the tokenizer begins a text with; messages by the chat template."""
        if isinstance(prompt, str):
            return [int(token) for token in self.tokenizer.encode(prompt)]
        # transformers 5 gives a dict unless it is told not to.
        options = {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
        return [int(token) for token in self.tokenizer.apply_chat_template(prompt, **options)]

    def decode(self, tokens: list[int]) -> str:
        """Without special tokens."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))
