"""Keeps the keys and values of the tokens that sampling has seen, so that a new token is one row of each layer.

Megatron-Core's StaticInferenceContext is not used: it wants all rows at one position, rotates the whole cache for each token, and
knows neither context nor sequence parallelism. Here each row has its own position, and each cp rank holds the keys of all tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_rl.megatron.attention import PackedAttention
from megatron_rl.megatron.model import find_gpt_model, model_config_of


def can_cache(model: nn.Module) -> bool:
    """Whether each layer has PackedAttention; Transformer Engine's layers keep no cache here."""
    layers = find_gpt_model(model).decoder.layers
    return all(isinstance(layer.self_attention.core_attention, PackedAttention) for layer in layers)


def cache_bytes(model: nn.Module, capacity: int) -> int:
    """Of the keys and values of one row of `capacity` positions, on this rank."""
    gpt, config = find_gpt_model(model), model_config_of(model)
    groups = max(config.num_query_groups // config.tensor_model_parallel_size, 1)
    element = next(gpt.parameters()).element_size()
    return int(len(gpt.decoder.layers) * groups * 2 * config.kv_channels * capacity * element)


class KeyValueCache:
    """The keys and values of some rows, [rows, groups, capacity, key dim + value dim] a layer, in every position from 0."""

    def __init__(self, model: nn.Module, num_rows: int, capacity: int):
        gpt = find_gpt_model(model)
        self._layers = [layer.self_attention.core_attention for layer in gpt.decoder.layers]
        self._rotary, self._num_rows, self._capacity = gpt.rotary_pos_emb, num_rows, capacity
        self._kept: dict[PackedAttention, Tensor] = {}
        self._positions: Tensor | None = None  # of the new tokens [rows]; None in the first forward
        self._length = 0  # the largest of them, and one

    @contextmanager
    def filled(self) -> Iterator[None]:
        """Inside the block a forward of whole padded rows fills the cache."""
        for layer in self._layers:
            layer.cache = self
        try:
            yield
        finally:
            for layer in self._layers:
                layer.cache = None

    @contextmanager
    def extended(self, positions: Tensor, num_tokens: int, longest: int) -> Iterator[None]:
        """Inside the block a forward of one row [1, num_tokens] is one new token of each row; further tokens are padding.
        positions [rows] int64: of the new tokens; longest: the largest."""
        own = self._rotary.forward

        def rotated(*args: object, **others: object) -> Tensor:  # [R, 1, 1, dim]
            padded = F.pad(positions, (0, num_tokens - positions.numel()))
            angles: Tensor = own(self._capacity, packed_seq=True)[padded]  # packed: of every position, on each cp rank
            return angles

        self._positions, self._length = positions, longest + 1
        self._rotary.forward = rotated
        try:
            with self.filled():
                yield
        finally:
            self._rotary.forward = own
            self._positions = None

    def keep_rows(self, is_kept: Tensor) -> None:  # [rows] bool
        self._kept = {layer: kept[is_kept] for layer, kept in self._kept.items()}
        self._num_rows = int(is_kept.sum())

    @property
    def has_new_tokens(self) -> bool:
        return self._positions is not None

    def fill(self, layer: PackedAttention, whole: Tensor) -> None:  # [rows, groups, length, dim], in order
        length = min(whole.shape[2], self._capacity)
        kept = whole.new_zeros(self._num_rows, whole.shape[1], self._capacity, whole.shape[3])
        kept[:, :, :length] = whole[:, :, :length]
        self._kept[layer] = kept

    def attend(
        self,
        layer: PackedAttention,
        query: Tensor,  # [R, 1, heads, dim]
        key: Tensor,  # [R, 1, groups, dim]
        value: Tensor,  # [R, 1, groups, dim]
    ) -> Tensor:  # [R, 1, heads * dim]; zero at padding
        """out_p = sum_{q <= p} softmax_q(scale * query_p . key_q) value_q for each row's new token p. No communication."""
        kept, positions = self._kept[layer], self._positions
        assert positions is not None
        rows = torch.arange(self._num_rows, device=query.device)
        kept[rows, :, positions] = torch.cat([key, value], dim=-1)[: self._num_rows, 0]
        keys, values = kept[:, :, : self._length].split((key.shape[-1], value.shape[-1]), dim=-1)
        # The heads of a group are the queries of one product, so no key is copied.
        grouped = query[: self._num_rows, 0].unflatten(1, (key.shape[2], -1))  # [rows, groups, heads / groups, dim]
        mask = torch.arange(self._length, device=query.device) <= positions[:, None]
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask[:, None, None], scale=layer.softmax_scale)
        padded: Tensor = F.pad(out.flatten(1), (0, 0, 0, query.shape[0] - self._num_rows))
        return padded.unsqueeze(1)
