"""One optimiser step as `megatron-rl explain` sees it, whichever source it comes from; it must never weight a token."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from torch import Tensor

from megatron_rl.errors import printable

# Of a response and of a step: more is a slip of the finger or a damaged file, and the masks would fill the memory.
MOST_TOKENS = 2**27


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInput:
    """Whole: what count_step needs, and where it comes from."""

    masks: list[Tensor]  # S tensors [response_length]
    prompts: list[int | str] | None
    rollouts: list[Hashable] | None = None
    """The rollout of each sample, where one of them makes several samples; None: each sample is a rollout of its own."""
    source: str
    notes: tuple[str, ...] = ()
    is_given: bool = True
    """False: nobody gave a step, and no number of this one is to be shown."""

    @property
    def longest(self) -> int:
        return max(mask.numel() for mask in self.masks)

    @property
    def rollout_keys(self) -> list[Hashable]:
        return list(range(len(self.masks))) if self.rollouts is None else self.rollouts


def too_many_tokens(lengths: Sequence[int]) -> list[str]:
    """A problem, or none. To be asked before any mask is made."""
    total = sum(lengths)
    return [] if total <= MOST_TOKENS else [f"{total} response tokens in one step: at most {MOST_TOKENS} are read"]


def prompts_of_rollouts(rollouts: Sequence[Hashable], prompts: Sequence[Hashable] | None) -> list[str]:
    """Problems: the samples of a rollout share its prompt."""
    if prompts is None:
        return []
    prompt_of: dict[Hashable, Hashable] = {}
    return [
        printable(f"rollout {rollout} has samples of the prompts {prompt_of[rollout]} and {prompt}: a rollout has one prompt")
        for rollout, prompt in zip(rollouts, prompts, strict=True)
        if prompt_of.setdefault(rollout, prompt) != prompt
    ]
