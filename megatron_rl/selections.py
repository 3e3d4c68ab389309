"""Selects tokens of a step by a score, over all ranks: the same tokens for any cut into micro-batches, and any layout.

    s_t      the score of an unmasked token of the step, from the policy before the step; a file of token_selections/ has it
    k        share x T, rounded down and at least 1; T are the unmasked tokens of the step
    S        the k tokens that come first: by largest or smallest s_t, or by a drawn number; then by sample id and position

Scores are float32, because the order is of their bits. Log-probabilities and entropies of two layouts differ in their last bits, so
a token whose score is as near as that to the last selected one may be on the other side. The rest is exact. A
drawn number is of a sample id and a position: a rollout that is cut into other samples has others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.config import EntropyBonusTokens
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.layout.groups import Group, all_reduce_sum, group_device, resolve_group
from megatron_rl.layout.noise import hash_of
from megatron_rl.layout.packing import document_ids, spread
from megatron_rl.layout.step_order import KEY_BITS, first_of_step, ordered_bits, value_of_bits
from megatron_rl.registries.selection_settings import TokenSelectionSettings
from megatron_rl.registries.token_selections import Effect, Taken, TokenSelectionKind

# Means are rounded to multiples of it, in nats: the order of a sum does not show, and an advantage that is the mean gives score 0.
MEAN_UNIT = 2.0**-24
ELSEWHERE = "another rank has refused its tokens of this step; its message says why"


@dataclass(frozen=True, slots=True)
class TokenSelection:
    """The selected tokens of this rank, and what that changes of their loss. All of it is constant for the gradient."""

    is_selected: Tensor  # [T] bool
    importance_weights: Tensor | None  # [T] float32, 0 where no policy term is trained, else 1; None: every token's is
    old_kl_coefficients: Tensor | None  # [T] float32, of the KL penalty towards the old policy; None: there is none
    entropy_mask: Tensor | None  # [T] bool, the tokens of an entropy bonus; None: all unmasked ones
    num_selected: int  # of the whole step
    num_tokens: int  # of the whole step, unmasked
    threshold: float | None  # the score of the last selected token; None: no token, or random ones


def select_tokens(
    settings: TokenSelectionSettings,
    loss_mask: Tensor,  # [T] bool
    cu_seqlens: Tensor,  # [N + 1] integer
    sample_ids: Sequence[int] | Tensor,  # [N]
    *,
    log_probs: Tensor | None = None,  # [T]
    entropy: Tensor | None = None,  # [T]
    advantages: Tensor | None = None,  # [T]
    positions: Tensor | None = None,  # [T] integer
    seed: int = 0,
    group: Group | None = None,
) -> TokenSelection:
    """Selects tokens of the whole step. Every rank of the group calls it once a step, also one without a token.

    Hand importance_weights, old_kl_coefficients and entropy_mask to policy_loss or linear_policy_loss, whose keywords have these
    names. Denominators count all unmasked tokens, also those that are not trained; a KL term has all of them.

    Args:
        settings: which selection, of what share.
        loss_mask: of the tokens that this rank holds of the step: whole samples, or context-parallel slices of them.
        cu_seqlens: bounds of these samples or slices.
        sample_ids: at least 0, each sample's own in the step, and in each layout the same. They break ties.
        log_probs, entropy: of the policy before the step, in nats; which are needed is declared by the selection.
        advantages: of the tokens; each has its sample's.
        positions: of each token in its sample; None: from 0, because the samples are whole.
        seed: for random tokens. Take another one for each step, because the same one prefers the same ids and positions.
        group: the ranks that hold different tokens of the step: data-parallel ones, and with slices context-parallel ones too.
            None: dp_cp of megatron.core.parallel_state, else one rank.
    Communication: over the group, two all-reduces of 2^16 int64 (512 KiB); one of 4 numbers before them for a score that reads the
        step's means; and where tokens of equal score are on both sides of the last place, one more for each 16 bits of the largest
        sample id and position, two up to 32 bits. So with small ids there are at most five. Synchronises once for each.
    Raises: ConfigError for wrong settings and for missing inputs. DataError on all ranks of the group for wrong shapes, for ids
        below 0, for an unmasked value that is not finite, and for such a score.

    >>> settings, loss_mask = TokenSelectionSettings(kind="top_entropy", share=0.5), torch.tensor([True, True, True, False])
    >>> found = select_tokens(settings, loss_mask, torch.tensor([0, 4]), [0], entropy=torch.tensor([0.1, 0.3, 0.2, 9.0]))
    >>> found.is_selected, found.num_selected, found.num_tokens
    (tensor([False,  True, False, False]), 1, 3)
    """
    problems = list(settings.problems())
    if problems or not settings.is_on:
        raise ConfigError(problems or "token_selection=none selects nothing: leave out the call, or choose a selection")
    group = resolve_group(group, "dp_cp")
    declared = settings.declared
    given = {"log_probs": log_probs, "entropy": entropy, "advantages": advantages}
    for name in declared.needs:
        if given[name.removeprefix("centred_")] is None:
            raise ConfigError(f"token_selection={declared.name} needs {name.removeprefix('centred_')}: pass it")
    needed = {need.removeprefix("centred_") for need in declared.needs}
    refusal: Exception | None = None
    try:
        tokens = _Tokens.of(
            loss_mask, cu_seqlens, sample_ids, positions, {name: v for name, v in given.items() if v is not None and name in needed}
        )
    except Exception as error:  # of any type: the others are to hear of it, and not to wait
        refusal, tokens = error, _Tokens.empty(needed)
    if declared.is_centred:
        tokens = tokens.centred(group, refusal)
    score = keys = torch.zeros_like(tokens.sample_ids)
    are_candidates = tokens.is_live
    if refusal is None:
        try:
            score = _score(declared, tokens)
            low, high = settings.bounds
            are_candidates = are_candidates & (score >= low) & (score <= high)
            keys = _keys(declared.taken, score, tokens, seed)
        except Exception as error:
            refusal, are_candidates = error, torch.zeros_like(tokens.is_live)
    num_tokens = 0

    def number_of(sums: list[int]) -> int:
        nonlocal num_tokens
        num_tokens, num_refused = sums
        _raise_together(refusal, num_refused)
        return settings.number_of(num_tokens)

    told = torch.tensor([int(tokens.is_live.sum()), int(refusal is not None)])
    first = first_of_step(keys, tokens.sample_ids, tokens.positions, are_candidates, told, number_of, group)
    is_selected = first.are_first
    threshold = None if first.last_key is None else _threshold(declared.taken, first.last_key)
    is_trained = {Effect.TRAINED_ALONE: is_selected, Effect.LEFT_OUT: ~is_selected}.get(declared.effect)
    return TokenSelection(
        is_selected=is_selected,
        importance_weights=None if is_trained is None else is_trained.float(),
        old_kl_coefficients=None if settings.penalty is None else is_selected * torch.tensor(settings.penalty, dtype=torch.float32),
        entropy_mask=is_trained if settings.entropy_bonus == EntropyBonusTokens.TRAINED else None,
        num_selected=first.number,
        num_tokens=num_tokens,
        threshold=threshold,
    )


@dataclass(frozen=True, slots=True)
class _Tokens:
    """This rank's tokens of the step, checked."""

    is_live: Tensor  # [T] bool, unmasked and no padding
    sample_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    vectors: dict[str, Tensor]  # [T] float64 each, 0 where masked

    @classmethod
    def empty(cls, names: set[str]) -> _Tokens:
        nothing = torch.zeros(0, dtype=torch.int64)
        return cls(nothing.bool(), nothing, nothing, {name: nothing.double() for name in names})

    @classmethod
    def of(
        cls,
        loss_mask: Tensor,
        cu_seqlens: Tensor,
        sample_ids: Sequence[int] | Tensor,
        positions: Tensor | None,
        vectors: Mapping[str, Tensor],
    ) -> _Tokens:
        num_tokens, num_samples = loss_mask.numel(), cu_seqlens.numel() - 1
        ids = torch.as_tensor(sample_ids, device=loss_mask.device).to(torch.int64)
        if ids.shape != (num_samples,):
            raise DataError(f"sample_ids must be [N={num_samples}], one a sample, got {tuple(ids.shape)}")
        if bool((ids < 0).any()):
            raise DataError(f"sample_ids holds {int(ids.min())}: ids are at least 0")
        documents = document_ids(cu_seqlens.to(loss_mask.device), num_tokens)
        if positions is None:
            starts = spread(cu_seqlens[:-1].to(loss_mask.device, torch.int64), documents)
            positions = torch.arange(num_tokens, device=loss_mask.device) - starts
        if positions.shape != (num_tokens,):
            raise DataError(f"positions must be [T={num_tokens}], got {tuple(positions.shape)}")
        is_live = loss_mask.bool() & (documents < num_samples)
        if bool((is_live & (positions < 0)).any()):
            raise DataError("positions has numbers below 0: they count the tokens of a sample from 0")
        checked = {}
        for name, given in vectors.items():
            if given.shape != (num_tokens,):
                raise DataError(f"{name} must be [T={num_tokens}], one a token, got {tuple(given.shape)}")
            values = given.double()
            wrong = (is_live & ~values.isfinite()).nonzero()
            if len(wrong):
                place = int(wrong[0])
                raise DataError(
                    f"{name} is {float(values[place])} at an unmasked token, number {int(positions[place])} of sample "
                    f"{int(ids[documents[place]])}: a score that is not finite has no order; mask the token or drop the sample"
                )
            checked[name] = torch.where(is_live, values, 0.0)
        return cls(is_live, spread(ids, documents), positions.to(torch.int64), checked)

    def centred(self, group: Group, refusal: Exception | None) -> _Tokens:
        """With log_probs and advantages minus their means over the step's unmasked tokens. One all-reduce of 4 numbers."""
        names = ("log_probs", "advantages")
        sums = [float(self.vectors[name].sum()) if name in self.vectors else 0.0 for name in names]
        mine = torch.tensor([float(self.is_live.sum()), *sums, float(refusal is not None)], dtype=torch.float64)
        count, *totals, num_refused = all_reduce_sum(mine.to(group_device(group)), group).tolist()
        _raise_together(refusal, int(num_refused))
        means = {name: round(total / max(count, 1.0) / MEAN_UNIT) * MEAN_UNIT for name, total in zip(names, totals, strict=True)}
        centred = {f"centred_{name}": self.vectors[name] - means[name] for name in names if name in self.vectors}
        return _Tokens(self.is_live, self.sample_ids, self.positions, self.vectors | centred)


def _score(declared: TokenSelectionKind, tokens: _Tokens) -> Tensor:  # [T] float32
    name, is_live = declared.name, tokens.is_live
    returned = declared.function(**{need: tokens.vectors[need].clone() for need in declared.needs})
    if not isinstance(returned, Tensor) or returned.shape != is_live.shape or not returned.is_floating_point():
        found = f"{tuple(returned.shape)} {returned.dtype}" if isinstance(returned, Tensor) else type(returned).__name__
        raise DataError(f"token selection {name!r} returned {found} as its score: it must be {tuple(is_live.shape)} floating point")
    score: Tensor = torch.where(is_live, returned, 0.0).float()
    if not bool(score.isfinite().all()):
        raise DataError(f"token selection {name!r} returned a score that is not finite, from finite inputs: bound it")
    return score


def _keys(taken: Taken, score: Tensor, tokens: _Tokens, seed: int) -> Tensor:  # [T] int64 in [0, 2^32), the smallest come first
    if taken == Taken.RANDOM:
        drawn: Tensor = hash_of(seed, tokens.sample_ids, tokens.positions) & (2**KEY_BITS - 1)
        return drawn
    bits = ordered_bits(score)
    return 2**KEY_BITS - 1 - bits if taken == Taken.LARGEST else bits


def _threshold(taken: Taken, last_key: int) -> float | None:
    if taken == Taken.RANDOM:
        return None
    return value_of_bits(2**KEY_BITS - 1 - last_key if taken == Taken.LARGEST else last_key)


def _raise_together(refusal: Exception | None, num_refused: int) -> None:
    if refusal is not None:
        raise refusal
    if num_refused:
        raise DataError(ELSEWHERE)
