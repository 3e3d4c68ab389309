"""Finds the tokens of a step that come first in an order, over all ranks of a group, without a gather of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_rl.errors import DataError
from megatron_rl.layout.groups import Group, all_reduce_sum, group_device

# A round counts the tokens by so many bits of what they are ordered by: an all-reduce of 2^16 numbers, 512 KiB. With 8 bits it
# would be 2 KiB and twice as many rounds, each of which waits for the slowest rank.
DIGIT_BITS = 16
KEY_BITS = 32
_ID_BITS = 63


class FirstTokens(NamedTuple):
    """The tokens that come first."""

    are_first: Tensor  # [T] bool, of this rank
    number: int  # on all ranks
    last_key: int | None  # the largest key among them; None: there is none


def ordered_bits(values: Tensor) -> Tensor:  # [T] float32 without NaN -> [T] int64 in [0, 2^32)
    """Whole numbers in the order of the values. -0 and 0 are equal."""
    bits = (values + 0.0).view(torch.int32).to(torch.int64)  # -0 + 0 is 0
    return torch.where(bits < 0, -1 - bits, bits + 2**31)


def value_of_bits(bits: int) -> float:
    """The value whose ordered bits these are."""
    word = bits - 2**31 if bits >= 2**31 else -1 - bits
    return float(torch.tensor(word, dtype=torch.int32).view(torch.float32))


def first_of_step(
    keys: Tensor,  # [T] int64 in [0, 2^32): a token of a smaller key comes first
    sample_ids: Tensor,  # [T] int64, at least 0; among equal keys a smaller one comes first
    positions: Tensor,  # [T] int64, at least 0; among equal ids a smaller one comes first
    are_candidates: Tensor,  # [T] bool
    told: Tensor,  # [k] int64, numbers of this rank
    number_of: Callable[[list[int]], int],
    group: Group,
) -> FirstTokens:
    """The first tokens of the order (key, sample id, position), over all ranks of the group; as many as number_of says, or all
    candidates where there are fewer.

    number_of: gets the sums of `told` over the group, and says how many; at least 0. It may raise, which it does on all ranks.
    Tokens of equal key, id and position are taken together, so that their number may be larger: ids are unique in the step.

    Communication: two all-reduces of 2^16 numbers over the group; where the last key is that of more tokens than are to be taken,
    one more for each 16 bits of the largest id and position, which are two where both together have no more than 32 bits. The
    result and the number of all-reduces depend on the tokens of the step alone, and not on the ranks that hold them.
    Synchronises once a round.
    Raises: DataError on all ranks where the largest id and position have more than 63 bits together.
    """
    id_bits, position_bits = (_bits_of(values, are_candidates) for values in (sample_ids, positions))
    lengths = torch.zeros(2, _ID_BITS + 1, dtype=torch.int64)
    lengths[0, id_bits], lengths[1, position_bits] = 1, 1
    counts, sums = _counted(keys >> DIGIT_BITS, are_candidates, torch.cat([told.cpu(), lengths.flatten()]), group)
    wanted = min(number_of(sums[: told.numel()].tolist()), int(counts.sum()))
    are_first = torch.zeros_like(are_candidates)
    if wanted <= 0:
        return FirstTokens(are_first, 0, None)
    rounds = _Rounds(are_first, are_candidates, wanted)
    high = rounds.narrow(keys >> DIGIT_BITS, counts)
    low_digit = keys & (2**DIGIT_BITS - 1)
    low = rounds.narrow(low_digit, _counted(low_digit, rounds.candidates, None, group)[0])
    id_bits, position_bits = (int(row.nonzero().max()) for row in sums[told.numel() :].view(2, -1))
    if id_bits + position_bits > _ID_BITS:
        raise DataError(
            f"the largest sample id has {id_bits} bits and the largest position {position_bits}: together at most {_ID_BITS} are "
            "ordered; give smaller ids, such as the samples' numbers in the step"
        )
    order, bits = (sample_ids << position_bits) | positions, id_bits + position_bits
    while rounds.num_candidates > rounds.wanted and bits > 0:
        bits -= DIGIT_BITS
        digit = (order >> max(bits, 0)) & (2 ** (DIGIT_BITS + min(bits, 0)) - 1)
        rounds.narrow(digit, _counted(digit, rounds.candidates, None, group)[0])
    taken = wanted - rounds.wanted + rounds.num_candidates
    return FirstTokens(rounds.are_first | rounds.candidates, taken, (high << DIGIT_BITS) | low)


class _Rounds:
    """What is known after each round: the tokens that come first, and the candidates for the rest."""

    def __init__(self, are_first: Tensor, candidates: Tensor, wanted: int):
        self.are_first, self.candidates, self.wanted = are_first, candidates, wanted
        self.num_candidates = wanted

    def narrow(self, digit: Tensor, counts: Tensor) -> int:  # [T] and [2^16], counts on all ranks -> the last digit that is taken
        """Tokens of a smaller digit than the last one come first; those of the last one remain candidates."""
        up_to = counts.cumsum(0)
        last = int(torch.searchsorted(up_to, self.wanted))  # the first digit up to which there are enough
        self.are_first = self.are_first | (self.candidates & (digit < last))
        self.candidates = self.candidates & (digit == last)
        self.num_candidates = int(counts[last])
        self.wanted -= int(up_to[last]) - self.num_candidates
        return last


def _counted(digit: Tensor, candidates: Tensor, told: Tensor | None, group: Group) -> tuple[Tensor, Tensor]:
    """(the candidates of each digit [2^16], the sums of `told`) over the group, on the CPU. One all-reduce."""
    counts = torch.bincount(digit[candidates], minlength=2**DIGIT_BITS)
    mine = counts if told is None else torch.cat([counts, told.to(counts.device)])
    total = all_reduce_sum(mine.to(group_device(group)), group).cpu()
    return total[: 2**DIGIT_BITS], total[2**DIGIT_BITS :]


def _bits_of(values: Tensor, candidates: Tensor) -> int:
    return int(values[candidates].max()).bit_length() if bool(candidates.any()) else 0
