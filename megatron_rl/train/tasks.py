"""What a run learns: prompts, and a reward for each response. A task knows neither the policy nor its loss.

A prompt is a pure function of (seed, index): every rank makes the same, and a resumed run goes on where it stopped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from megatron_rl.errors import ConfigError
from megatron_rl.train.hf_tokenizer import HFTokenizer
from megatron_rl.train.rollouts import Prompt
from megatron_rl.train.user_tasks import RewardFunction, call_reward, import_reward, read_prompt_file, stable_integer

DEFAULT_TASK = "repeat"


class Task(Protocol):
    """What the training loop needs to know of a task."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""

    @property
    def max_prompt_tokens(self) -> int:
        """Length of the longest prompt."""

    @property
    def max_new_tokens(self) -> int:
        """Sampling stops after this number of tokens."""

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """Sampling stops after each of these tokens, and after max_new_tokens."""

    def make_prompt(self, index: int, seed: int) -> Prompt:
        """The index-th prompt of a run: always the same for the same (seed, index)."""

    def reward(self, prompt: Prompt, response: list[int]) -> float:
        """The reward of the sampled tokens, end token included. A built-in task's is the share of correct tokens."""

    def shown(self, prompt: Prompt, response: list[int]) -> tuple[Any, Any]:
        """Both as a person reads them: text where the task has it, else token ids."""


@dataclass(frozen=True, kw_only=True)
class BuiltInTask:
    """A prompt of symbols after a begin token, with one right answer. A small model learns it on a CPU."""

    name: str
    num_symbols: int
    """Symbols are the ids below it; the id num_symbols begins each prompt."""
    prompt_length: int
    """Symbols in a prompt, without the begin token."""
    answer: Callable[[list[int]], list[int]]
    """The symbols of a prompt -> the right response."""
    max_new_tokens: int
    smallest_symbol: int = 0
    """Of a prompt."""
    end_tokens: tuple[int, ...] = ()
    """Without one each response has max_new_tokens."""
    reward_function: RewardFunction | None = None
    """A user's reward in place of the share of correct tokens."""

    @property
    def vocab_size(self) -> int:
        return self.num_symbols + 1

    @property
    def max_prompt_tokens(self) -> int:
        return self.prompt_length + 1

    def make_prompt(self, index: int, seed: int) -> Prompt:
        numbers = [stable_integer(self.name, seed, index, place) for place in range(self.prompt_length)]
        symbols = [self.smallest_symbol + number % (self.num_symbols - self.smallest_symbol) for number in numbers]
        record = {"answer": self.answer(symbols)}
        return Prompt(prompt_id=f"{self.name}-{index}", tokens=[self.num_symbols, *symbols], record=record)

    def shown(self, prompt: Prompt, response: list[int]) -> tuple[list[int], list[int]]:
        return prompt.tokens, response

    def reward(self, prompt: Prompt, response: list[int]) -> float:
        """The tokens that are right at their place, divided by the longer of response and answer."""
        if self.reward_function is not None:
            return call_reward(self.reward_function, prompt, prompt.tokens, response)
        answer = prompt.record["answer"]
        longest, shortest = max(len(response), len(answer)), min(len(response), len(answer))
        return sum(response[place] == answer[place] for place in range(shortest)) / longest


def four_times(symbols: list[int]) -> list[int]:
    return symbols * 4


def two_digits_of_sum(symbols: list[int]) -> list[int]:
    return list(divmod(sum(symbols), 10))


def tally(symbols: list[int]) -> list[int]:
    """As many marks, token 1, as the number in the prompt, and the end, token 0."""
    return [1] * symbols[0] + [0]


BUILT_IN_TASKS: dict[str, BuiltInTask] = {
    task.name: task
    for task in (
        BuiltInTask(name="repeat", num_symbols=8, prompt_length=1, answer=four_times, max_new_tokens=4),
        BuiltInTask(name="sort", num_symbols=10, prompt_length=3, answer=sorted, max_new_tokens=3),
        BuiltInTask(name="add", num_symbols=10, prompt_length=2, answer=two_digits_of_sum, max_new_tokens=2),
        # Responses end by themselves, at 2 to 6 tokens: what a loss or an aggregation makes of lengths shows.
        BuiltInTask(
            name="tally", num_symbols=6, smallest_symbol=1, prompt_length=1, answer=tally, max_new_tokens=8, end_tokens=(0,)
        ),
    )
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
    """The task of --task, or of --prompts with --reward, or repeat. --reward with a built-in task replaces its reward.

    hf_checkpoint: prompts are text or messages for its tokenizer, and vocab_size is the model's.

    Raises: ConfigError for what was asked for, DataError for what the prompts file holds.
    """
    problems = list(task_problems(name, prompts=prompts, reward=reward, max_new_tokens=max_new_tokens))
    if problems:
        raise ConfigError(problems)
    reward_function = None if reward is None else import_reward(reward)
    if prompts is not None and reward_function is not None:
        tokenizer = None if hf_checkpoint is None else HFTokenizer.of_folder(hf_checkpoint)
        return read_prompt_file(
            prompts,
            reward_function,
            max_new_tokens=max_new_tokens,
            tokenizer=tokenizer,
            vocab_size=vocab_size,
        )
    name = DEFAULT_TASK if name is None else name
    return replace(BUILT_IN_TASKS[name], reward_function=reward_function)


def task_problems(
    name: str | None,
    *,
    prompts: str | Path | None,
    reward: str | None,
    max_new_tokens: int | None,
) -> list[str]:
    """Each problem of the flags that name a task, one line each. Nothing is read or imported."""
    problems = []
    if name is not None and name not in BUILT_IN_TASKS:
        problems.append(
            f"--task {name} is unknown; built in: {', '.join(BUILT_IN_TASKS)}. For a task of your own: --prompts FILE "
            "and --reward module.function"
        )
    if prompts is None:
        if max_new_tokens is not None:
            problems.append(f"--max-new-tokens {max_new_tokens} works with --prompts alone: a built-in task has its own")
        return problems
    if name is not None:
        problems.append(f"--task {name} and --prompts {prompts} are two tasks; give one of them")
    if reward is None:
        problems.append(f"--prompts {prompts} needs --reward module.function, called as fn(prompt, response, record)")
    if not Path(prompts).is_file():
        problems.append(f"--prompts {prompts}: there is no such file")
    if max_new_tokens is not None and max_new_tokens < 1:
        problems.append(f"--max-new-tokens {max_new_tokens} must be at least 1")
    return problems
