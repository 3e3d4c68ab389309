"""What a run learns: prompts, and a reward for each response. A task knows neither the policy nor its loss.

A prompt is a pure function of (seed, index): every rank makes the same, and a resumed run goes on where it stopped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import eq
from pathlib import Path

from megatron_rl.registry import import_dotted
from megatron_rl.train.hf_tokenizer import HFTokenizer
from megatron_rl.train.rollouts import Prompt
from megatron_rl.train.user_tasks import PromptFileTask, read_prompt_file, stable_integer


@dataclass(frozen=True, kw_only=True)
class BuiltInTask:
    """A prompt of one symbol after a begin token, with one right answer. A small model learns it on a CPU."""

    name: str
    num_symbols: int
    """Symbols are the ids below it; the id num_symbols begins each prompt."""
    answer: Callable[[int], list[int]]
    """The symbol of a prompt -> the right response."""
    max_new_tokens: int
    """Sampling stops after this number of tokens, and after each of end_tokens."""
    smallest_symbol: int = 0
    end_tokens: tuple[int, ...] = ()

    max_prompt_tokens = 2

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self.num_symbols + 1

    def make_prompt(self, index: int, seed: int) -> Prompt:
        """The index-th prompt of a run: always the same for the same (seed, index)."""
        number = stable_integer(self.name, seed, index, 0)
        symbol = self.smallest_symbol + number % (self.num_symbols - self.smallest_symbol)
        record = {"answer": self.answer(symbol)}
        return Prompt(prompt_id=f"{self.name}-{index}", tokens=[self.num_symbols, symbol], record=record)

    def shown(self, prompt: Prompt, response: list[int]) -> tuple[list[int], list[int]]:
        """Both as a person reads them: token ids, because there is no text."""
        return prompt.tokens, response

    def reward(self, prompt: Prompt, response: list[int]) -> float:
        """The tokens, end token included, that are right at their place, divided by the longer of response and answer."""
        answer = prompt.record["answer"]
        return sum(map(eq, response, answer)) / max(len(response), len(answer))


Task = BuiltInTask | PromptFileTask

BUILT_IN_TASKS: dict[str, BuiltInTask] = {
    "repeat": BuiltInTask(name="repeat", num_symbols=8, answer=lambda symbol: [symbol] * 4, max_new_tokens=4),
    # As many marks, token 1, as the number in the prompt, and the end, token 0. Responses end by themselves, at 2 to 6 tokens: what
    # a loss or an aggregation makes of lengths shows.
    "tally": BuiltInTask(
        name="tally", num_symbols=6, smallest_symbol=1, answer=lambda symbol: [1] * symbol + [0], max_new_tokens=8, end_tokens=(0,)
    ),
}


def make_task(
    name: str | None = None,
    *,
    prompts: str | Path | None = None,
    reward: str | None = None,
    max_new_tokens: int | None = None,
    hf_checkpoint: str | Path | None = None,
    vocab_size: int | None = None,
) -> Task:
    """The task of --task, or of --prompts with --reward, or repeat.

    hf_checkpoint: prompts are text or messages for its tokenizer, and vocab_size is the model's.

    Raises: ConfigError for a reward that cannot be imported, DataError for what the prompts file holds.
    """
    if prompts is None or reward is None:
        return BUILT_IN_TASKS[name or "repeat"]
    reward_function = import_dotted(reward, "--reward")
    tokenizer = None if hf_checkpoint is None else HFTokenizer.from_folder(hf_checkpoint)
    return read_prompt_file(prompts, reward_function, max_new_tokens=max_new_tokens, tokenizer=tokenizer, vocab_size=vocab_size)
