"""Samples responses with the training model, on any TP, SP, CP, PP and DP layout.

A new token is one row of each layer, with a cache of keys and values. It is a forward of the whole sequence where a recorder of
routes needs that, and where layers are Transformer Engine's. Each forward runs the training
schedule. No state is kept between calls. With top-p a token is drawn from the ids that it keeps of its row.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from megatron_rl.errors import DataError
from megatron_rl.layout.context_parallel import local_positions, padded_length
from megatron_rl.layout.groups import (
    Group,
    ParallelGroups,
    all_gather_stack,
    all_reduce_max,
    all_reduce_sum,
    broadcast_from_last,
    group_device,
    resolve_group,
)
from megatron_rl.megatron.head import HeadInputs, HeadSettings
from megatron_rl.megatron.model import model_config_of
from megatron_rl.megatron.responses import forward_only, recording
from megatron_rl.megatron.routing import RouteRecorder
from megatron_rl.train.key_value_cache import KeyValueCache, can_cache
from megatron_rl.train.sampling_filter import KeptTokens, kept_by_top_p

# (sample ids [B] int64, position of the next token [B] int64, vocabulary ids [V_local] int64) -> [B, V_local] float32
Noise = Callable[[Tensor, Tensor, Tensor], Tensor]
# Bits of the hash that become a uniform number. With the added half, which excludes 0 and 1, they fill a float64's 53 bits.
UNIFORM_BITS = 52
# splitmix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
INCREMENT = 0x9E3779B97F4A7C15
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS = (30, 27, 31)


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingSettings:
    max_new_tokens: int
    end_tokens: tuple[int, ...]  # each ends a response and is part of it; without one every response has max_new_tokens
    temperature: float
    vocab_size: int  # the true vocabulary: padded columns are never sampled
    rows_per_forward: int  # limits the memory of a forward
    top_p: float = 1.0  # 1: every token is kept


# As KeptTokens.add takes them: ids, sizes, scores, masses.
_Kept = tuple[Tensor, list[int], list[float], list[float]]


@dataclass(frozen=True, slots=True)
class Sampler:
    model: nn.Module
    settings: SamplingSettings
    noise: Noise
    groups: ParallelGroups
    device: torch.device
    head: HeadSettings
    recorder: RouteRecorder | None
    kept: KeptTokens | None

    def sample(
        self,
        prompts: Sequence[Sequence[int]],  # of this data-parallel rank, one a sample
        sample_ids: Sequence[int],  # the samples' numbers, for the noise
    ) -> list[list[int]]:
        """One response for each prompt, equal on all ranks of the tp, cp and pp groups of a data-parallel rank.

            token = argmax_j (logits_j / temperature + noise_j),    noise standard Gumbel: a draw from the softmax (Gumbel, 1954)

        With top_p below 1 j is of the kept ids alone, which `kept` gets: the same noise, so that tokens stay where all are kept.

        Only `noise` is random. Only the logits of the last positions are computed, [B, V_tp]. The host waits once a forward.
        Communication per new token, besides the model's: tp one all-gather of [B, 2], cp one all-reduce of [B], pp one broadcast
        of [B]; dp none, so ranks may have different numbers of samples. With top_p below 1 tp gathers float32 logits, [B, V_tp],
        to sort whole rows, cp and pp have [4, B] in the place of [B], and one more of all kept ids; the host waits twice. Where
        ranks share experts, dp has one all-reduce of a number, and a rank with fewer rows runs forwards whose tokens nobody reads.
        A recorder's is added once a forward; it gets the routes of each sample, by its place in prompts, from the last forward that
        the sample was in: the one that sampled its last token.
        Raises DataError for logits that are not finite.
        """
        responses: list[list[int]] = [[] for _ in prompts]
        starts = range(0, len(prompts), self.settings.rows_per_forward)
        parts = [range(len(prompts))[start : start + self.settings.rows_per_forward] for start in starts]
        forwards = itertools.chain.from_iterable(self._run(part, prompts, sample_ids, responses) for part in parts)
        has_work = next(forwards, False)
        while self._have_expert_ranks_work(has_work):
            if has_work:
                has_work = next(forwards, False)
            else:  # the other ranks wait for this one's part in the exchange of tokens
                replace(self, recorder=None)._next_tokens([[0]], [0], None, is_first=True)
        return responses

    def _have_expert_ranks_work(self, has_work: bool) -> bool:
        """Whether any dp rank has work, where they exchange tokens with each other's experts; else whether this one has."""
        if not model_config_of(self.model).num_moe_experts or resolve_group(None, "ep").size() == 1:
            return has_work
        dp = self.groups.dp
        return bool(all_reduce_max(torch.tensor([int(has_work)], device=group_device(dp)), dp))

    def _run(
        self, part: Sequence[int], prompts: Sequence[Sequence[int]], sample_ids: Sequence[int], responses: list[list[int]]
    ) -> Iterator[bool]:
        """Adds to the responses of the rows in `part`. True before each forward."""
        sequences = {row: list(prompts[row]) for row in part}
        rows, cache = list(part), None
        for step in range(self.settings.max_new_tokens):
            yield True
            if step == 0 and self.recorder is None and can_cache(self.model):
                capacity = max(map(len, sequences.values())) + self.settings.max_new_tokens
                cache = KeyValueCache(self.model, len(rows), capacity)
            given_rows = [sequences[row] for row in rows], [sample_ids[row] for row in rows]
            tokens, kept = self._next_tokens(*given_rows, cache, is_first=step == 0)
            if self.kept is not None and kept is not None:
                self.kept.add(rows, *kept)
            for place, (row, token) in enumerate(zip(rows, tokens, strict=True)):
                if self.recorder is not None:
                    self.recorder.keep(row, place * self.recorder.row_length, len(sequences[row]) + 1)
                sequences[row].append(token)
                responses[row].append(token)
            is_open = [token not in self.settings.end_tokens for token in tokens]
            rows = [row for row, flag in zip(rows, is_open, strict=True) if flag]
            if not rows:
                return
            if cache is not None and not all(is_open):
                cache.keep_rows(torch.tensor(is_open, device=self.device))

    def _next_tokens(
        self, sequences: list[list[int]], sample_ids: list[int], cache: KeyValueCache | None, *, is_first: bool
    ) -> tuple[list[int], _Kept | None]:
        """One new token of each row, the same on all ranks of tp, cp and pp."""
        groups, device = self.groups, self.device
        there = partial(Tensor.to, device=device, non_blocking=True)
        multiple = groups.tp.size() if model_config_of(self.model).sequence_parallel else 1
        row_length = padded_length(max(map(len, sequences)), groups.cp.size(), multiple=multiple)
        order = local_positions(row_length, groups.cp.rank(), groups.cp.size())
        place = torch.full((row_length,), -1)
        place[order] = torch.arange(order.numel())
        last = torch.tensor([len(sequence) - 1 for sequence in sequences])
        local = there(place[last])  # [B] index of the last token on this cp rank, -1 if another rank has it
        places, ids, next_position, is_own = local.clamp(min=0), there(torch.tensor(sample_ids)), there(last + 1), local >= 0

        def choose(_: object, logits: Tensor, inputs: HeadInputs | None) -> tuple[Tensor, Tensor | None]:
            return self._choose(logits.flatten(0, 1).float(), ids, next_position, is_own)

        if cache is None or is_first:  # with a cache a later token costs no copy of what stands before it
            whole = torch.zeros(len(sequences), row_length, dtype=torch.int64)
            for row, sequence in enumerate(sequences):
                whole[row, : len(sequence)] = torch.tensor(sequence)
            batch = _PaddedPrompts(there(whole[:, order]), there(order[None].expand(len(sequences), -1).contiguous()))
            row_positions = (torch.arange(len(sequences))[:, None] * row_length + order).flatten()
            filled = nullcontext() if cache is None else cache.filled()
            with recording(self.recorder, row_positions, batch.tokens, groups.cp), filled:
                chosen = forward_only(self.model, batch, choose, groups, self.head, places)
        else:
            newest = torch.zeros(1, -(-len(sequences) // multiple) * multiple, dtype=torch.int64)
            newest[0, : len(sequences)] = torch.tensor([sequence[-1] for sequence in sequences])
            batch = _PaddedPrompts(there(newest), there(torch.zeros_like(newest)))
            places = torch.arange(len(sequences), device=device)
            with cache.extended(next_position - 1, newest.shape[1], int(last.max())):
                chosen = forward_only(self.model, batch, choose, groups, self.head, places)
        tokens, kept = self._shared(chosen, len(sequences))
        if min(tokens) < 0:
            raise DataError(
                f"the policy's logits are not finite while sampling (sample {sample_ids[tokens.index(min(tokens))]}): "
                "training has diverged; lower --lr or --clip-grad, or resume from an earlier checkpoint"
            )
        return tokens, kept

    def _choose(
        self,
        rows: Tensor,  # [B, V_tp] float32
        ids: Tensor,  # [B] of the samples
        positions: Tensor,  # [B] that the new tokens take
        is_own: Tensor,  # [B] bool, whether this cp rank has the row's last token
    ) -> tuple[Tensor, Tensor | None]:
        """([1, B] float64 the tokens, None); with top_p below 1 ([4, B] token, size, score and mass; [B, V] kept). A token is -1
        where the logits are not finite; all is 0 in rows of other ranks. Communication: over tp, as `sample` says."""
        tp, vocabulary = self.groups.tp, self.settings.vocab_size
        columns = torch.arange(rows.shape[1], device=rows.device) + tp.rank() * rows.shape[1]
        scaled = rows / self.settings.temperature
        scores, is_open, kept = scaled + self.noise(ids, positions, columns), columns < vocabulary, None
        if self.settings.top_p < 1.0:
            whole = all_gather_stack(scaled, tp).transpose(0, 1).flatten(1)[:, :vocabulary]
            kept = kept_by_top_p(whole, self.settings.top_p)
            is_open = is_open & kept[:, columns.clamp(max=vocabulary - 1)]
        best = torch.where(is_open, scores, -torch.inf).max(-1)
        # float64 holds a vocabulary id and a float32 score exactly: one all-gather for both.
        pair = torch.stack([best.values.double(), columns[best.indices].double()], -1)
        value, column = all_gather_stack(pair, tp).unbind(-1)  # [tp, B]
        token = column.gather(0, value.argmax(0, keepdim=True))[0]
        values = [torch.where(value.amax(0).isfinite(), token, -1.0)]
        if kept is not None:
            kept &= is_own[:, None]
            logits = whole.double()
            among = torch.where(kept, logits, -torch.inf).logsumexp(-1)
            score = logits.gather(1, token.long()[:, None])[:, 0] - among
            values += [kept.sum(-1).double(), score, (among - logits.logsumexp(-1)).exp()]
        return torch.where(is_own, torch.stack(values), 0.0), kept

    def _shared(self, chosen: tuple[Tensor, Tensor | None] | None, count: int) -> tuple[list[int], _Kept | None]:
        """What each rank hears; None: of a stage without logits. Communication: over cp and pp, as `sample` says."""
        cp, pp, is_filtered = self.groups.cp, self.groups.pp, self.settings.top_p < 1.0
        values = torch.zeros(4 if is_filtered else 1, count, dtype=torch.float64, device=self.device)
        values = broadcast_from_last(values if chosen is None else all_reduce_sum(chosen[0], cp).contiguous(), pp)
        tokens, *set_rows = values.tolist()
        if not is_filtered:
            return [int(token) for token in tokens], None
        sizes = [int(size) for size in set_rows[0]]
        ids = torch.zeros(sum(sizes), dtype=torch.int32, device=self.device)
        if chosen is not None and chosen[1] is not None:
            rows, columns = chosen[1].nonzero().unbind(-1)
            starts, own = (given_rows.cumsum(0) - given_rows for given_rows in (values[1].long(), chosen[1].sum(-1)))
            ids[torch.arange(len(rows), device=self.device) + (starts - own)[rows]] = columns.int()
            ids = all_reduce_sum(ids, cp)
        return [int(token) for token in tokens], (broadcast_from_last(ids, pp).cpu(), sizes, *set_rows[1:])


@dataclass(frozen=True, slots=True)
class _PaddedPrompts:
    """A ForwardInput of padded rows."""

    tokens: Tensor
    position_ids: Tensor
    is_padding: Tensor | None = None
    packed_seq_params: object | None = None
    cp_group: Group | None = None
    routes: Tensor | None = None


def gumbel_noise(
    seed: int,
    rollout: int,
    samples: Tensor,  # [B] int64, index of each sample in the rollout batch
    positions: Tensor,  # [B] int64, position that the next token of each sample takes
    columns: Tensor,  # [V_local] int64, vocabulary ids of this rank's columns
) -> Tensor:  # [B, V_local] float32
    """Standard Gumbel noise, -log(-log(u)), u uniform in (0, 1).

    argmax(logits + noise) is a draw from softmax(logits) (Gumbel 1954; Maddison et al., arXiv:1411.0030, section 2).

    Each number is a hash of (seed, rollout, sample, position, column) alone. So a rank computes only its vocabulary shard and its
    samples, and every layout draws the same tokens.

    Row b is a splitmix64 stream; a hash of (seed, rollout, samples[b], positions[b]) is its state, and column c takes its
    number c. It is computed in float64: logarithms differ between devices in the last bit, which the float32 result does
    not hold, and tokens of probability down to 2^-52 are drawn. All values are finite: between -3.61 and 36.74.

    Communication: none.
    """
    states = torch.zeros((), dtype=torch.int64)
    for part in (signed(seed), signed(rollout), samples, positions):
        states = scramble((states + signed(INCREMENT)) ^ part)
    hashes = scramble(states[:, None] + (columns + 1)[None, :] * signed(INCREMENT))
    uniform = logical_shift(hashes, 64 - UNIFORM_BITS).double().add_(0.5).mul_(2.0**-UNIFORM_BITS)
    return uniform.log_().neg_().log_().neg_().float()


def scramble(words: Tensor) -> Tensor:
    """The finaliser of splitmix64: an input bit flips each output bit with probability near 1/2. int64 wraps."""
    for shift, multiplier in zip(SHIFTS[:2], MULTIPLIERS, strict=True):
        words = (words ^ logical_shift(words, shift)) * signed(multiplier)
    return words ^ logical_shift(words, SHIFTS[2])


def logical_shift(words: Tensor, shift: int) -> Tensor:
    """Shift to the right that brings in zeros; torch's own brings in copies of the sign."""
    return (words >> shift) & ((1 << (64 - shift)) - 1)


def signed(value: int) -> int:
    """The int64 with the low 64 bits of value."""
    value &= 0xFFFFFFFFFFFFFFFF
    return value - (1 << 64) if value >> 63 else value
