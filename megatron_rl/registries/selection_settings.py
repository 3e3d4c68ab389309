"""The settings of a selection of a step's tokens, and what can be wrong with them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeGuard

from megatron_rl.config import NO_SELECTION, EntropyBonusTokens, PolicyLossConfig
from megatron_rl.errors import ConfigError
from megatron_rl.registries.token_selections import Effect, TokenSelectionKind, get_token_selection

# Of the selected tokens' penalty. Cui et al., arXiv:2505.22617, train with it.
DEFAULT_KL_COEFFICIENT = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenSelectionSettings:
    """Which tokens of a step are selected, and what that changes.

    kind: a registered selection, or module.function. share: of the step's unmasked tokens, in [0, 1]. low, high: only tokens whose
    score lies in them can be selected; None: the declared bounds. kl_coefficient: of the penalty, for a kind that has one; None: 1.
    entropy_bonus: of which tokens an entropy bonus is: "all", or "trained", those whose policy term is not left out.

    >>> TokenSelectionSettings(kind="clip_cov", share=2e-4).bounds
    (1.0, 5.0)
    >>> TokenSelectionSettings(kind="kl_cov", share=0.29).number_of(100)
    29
    """

    kind: str = NO_SELECTION
    share: float | None = None
    low: float | None = None
    high: float | None = None
    kl_coefficient: float | None = None
    entropy_bonus: str = EntropyBonusTokens.ALL

    @classmethod
    def of(cls, config: PolicyLossConfig) -> TokenSelectionSettings:
        return cls(
            kind=config.token_selection,
            share=config.token_selection_share,
            low=config.token_selection_low,
            high=config.token_selection_high,
            kl_coefficient=config.token_selection_kl_coefficient,
            entropy_bonus=config.entropy_bonus_tokens,
        )

    @property
    def is_on(self) -> bool:
        return self.kind != NO_SELECTION

    @property
    def declared(self) -> TokenSelectionKind:
        return get_token_selection(self.kind)

    @property
    def bounds(self) -> tuple[float, float]:
        """(low, high) of the score. Call it where `problems` finds none."""
        low, high = self.declared.bounds
        return (low if self.low is None else self.low, high if self.high is None else self.high)

    @property
    def penalty(self) -> float | None:
        """The coefficient of the selected tokens' KL penalty; None for a kind without one."""
        if self.declared.effect != Effect.PENALIZED:
            return None
        return DEFAULT_KL_COEFFICIENT if self.kl_coefficient is None else self.kl_coefficient

    def number_of(self, num_tokens: int) -> int:
        """How many of the step's unmasked tokens are selected: share x tokens, rounded down, and at least 1 unless the share is 0.

        The share counts as it is written: 0.29 of 100 tokens are 29, where the nearest float64 gives 28.999999999999996.
        """
        assert self.share is not None
        number = math.floor(Fraction(repr(float(self.share))) * num_tokens)
        return max(number, 1) if self.share > 0 and num_tokens else number

    def in_words(self) -> str:
        """As in `clip_cov: 0.0002 of the step's tokens with scores in [1, 5] left out`, for start lines; empty without one."""
        if not self.is_on:
            return ""
        low, high = self.bounds
        bounds = f" with scores in [{low:g}, {high:g}]" if math.isfinite(low) or math.isfinite(high) else ""
        what = {Effect.TRAINED_ALONE: "trained alone", Effect.LEFT_OUT: "left out"}.get(self.declared.effect)
        share = math.nan if self.share is None else self.share
        return f"{self.kind}: {share:g} of the step's tokens{bounds} {what or f'with a KL penalty x {self.penalty:g}'}"

    def problems(self) -> Iterator[str]:
        """What is wrong with the settings, each with its remedy. A field may hold a value of any type."""
        try:
            declared = self.declared
        except ConfigError as error:
            yield f"token_selection={self.kind!r}: {error}"
            return
        given = {
            "token_selection_share": self.share,
            "token_selection_low": self.low,
            "token_selection_high": self.high,
            "token_selection_kl_coefficient": self.kl_coefficient,
        }
        if not self.is_on:
            for name, value in given.items():
                if value is not None:
                    yield f"{name}={value!r} has no effect without a selection: remove it, or choose --token-selection"
            if self.entropy_bonus != EntropyBonusTokens.ALL:
                yield (
                    f"entropy_bonus_tokens={self.entropy_bonus!r} has no effect without a selection: remove it, or choose "
                    "--token-selection"
                )
            return
        if self.share is None:
            yield (
                f"token_selection={self.kind} needs --token-selection-share, because recipes do not agree; published are 0.2 for "
                "top_entropy, 2e-4 for clip_cov, 2e-4 and 2e-3 for kl_cov"
            )
        elif not _is_number(self.share) or not 0 <= self.share <= 1:
            yield (
                f"token_selection_share={self.share!r} must be a number in [0, 1]: it is the share of the step's tokens that is "
                "selected; write 20 % as 0.2"
            )
        for name, value in (("token_selection_low", self.low), ("token_selection_high", self.high)):
            if value is not None and not _is_number(value):
                yield f"{name}={value!r} must be a finite number: it bounds the score of a token; leave it out for the declared one"
                return
        if self.bounds[0] > self.bounds[1]:
            yield (
                f"token_selection_low={self.bounds[0]:g} is above token_selection_high={self.bounds[1]:g}: no score lies between "
                "them; change one"
            )
        if self.kl_coefficient is not None and declared.effect != Effect.PENALIZED:
            yield (
                f"token_selection_kl_coefficient={self.kl_coefficient!r} has no effect with token_selection={self.kind}, which has "
                "no KL penalty: remove it, or choose --token-selection kl_cov"
            )
        elif self.kl_coefficient is not None and not (_is_number(self.kl_coefficient) and self.kl_coefficient > 0):
            yield (
                f"token_selection_kl_coefficient={self.kl_coefficient!r} must be a finite number above 0: it multiplies the KL "
                "penalty of the selected tokens; remove --token-selection to train without it"
            )
        if self.entropy_bonus == EntropyBonusTokens.TRAINED and declared.effect == Effect.PENALIZED:
            yield (
                f"entropy_bonus_tokens=trained has no effect with token_selection={self.kind}, which trains every token: remove "
                "it, or choose --token-selection top_entropy or clip_cov"
            )


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and -math.inf < value < math.inf
