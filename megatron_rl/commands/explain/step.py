"""One optimiser step as `megatron-rl explain` sees it, whichever source it comes from; it must never weight a token."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from torch import Tensor

# A longer response is a slip of the finger or a damaged file, and its mask would fill the memory.
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


def prompts_of_rollouts(rollouts: Sequence[Hashable], prompts: Sequence[Hashable] | None) -> list[str]:
    """Problems: the samples of a rollout share its prompt."""
    if prompts is None:
        return []
    prompt_of: dict[Hashable, Hashable] = {}
    return [
        f"rollout {rollout} has samples of the prompts {prompt_of[rollout]} and {prompt}: a rollout has one prompt"
        for rollout, prompt in zip(rollouts, prompts, strict=True)
        if prompt_of.setdefault(rollout, prompt) != prompt
    ]
