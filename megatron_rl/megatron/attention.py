"""Computes attention and norms in plain torch for packing, CP, TP and SP, without Transformer Engine and without a [T, T] mask."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_rl.errors import ConfigError, DataError
from megatron_rl.layout.context_parallel import chunk_spans, local_positions
from megatron_rl.layout.groups import Group, all_gather_stack, all_reduce_sum, resolve_group

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnMaskType


SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")
# A window smaller than this is not cut finer: a call of its own for a few queries costs more than the keys that it saves.
SMALLEST_CUT = 128


class Cache(Protocol):
    """Keeps keys and values of earlier forwards. While one is attached, PackedAttention fills it or attends to it."""

    @property
    def has_new_tokens(self) -> bool:
        """Whether this forward has one new token a row, not whole rows."""

    def fill(self, layer: PackedAttention, whole: Tensor) -> None:
        """Takes the keys and values of whole rows."""

    def attend(self, layer: PackedAttention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Adds the new tokens' keys and values, and returns the attention of their queries."""


class _GatherWithGradient(torch.autograd.Function):
    """Stacks over the group. The gradient of this rank's tensor is the sum of all ranks' gradients for it."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return all_gather_stack(values, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # Summed in float32 or wider, as the kernel of a single rank does.
        wide = gradient.float() if gradient.element_size() < 4 else gradient
        return all_reduce_sum(wide, ctx.group)[ctx.group.rank()].to(gradient.dtype), None


def gather_with_gradient(values: Tensor, group: Group) -> Tensor:  # [*] -> [size, *]
    """Each rank's tensor, stacked in group order, with an exact gradient on any backend and any subgroup.

    torch.distributed.nn.functional.all_gather is not used: on gloo its backward uses a group rank as a global rank.
    Communication: one all-gather forward, one all-reduce backward. Every rank of the group must run both.
    """
    stacked: Tensor = _GatherWithGradient.apply(values, group)  # type: ignore[no-untyped-call]  # torch's
    return stacked


def remember_document_bounds(packed_seq_params: PackedSeqParams, bounds: Sequence[int]) -> None:
    """Attaches the host's copy of `cu_seqlens_q` to a PackedSeqParams, so that PackedAttention on CUDA does not synchronise.

    Without Transformer Engine, Megatron's rotary embedding still synchronises: it reads the tensor at least twice for queries and
    twice for keys of each layer. A cu_seqlens on the CPU avoids that (`bounds_on_host` of make_packed_batch).
    """
    packed_seq_params.host_bounds = (_padded_cu_seqlens(packed_seq_params), tuple(bounds))


def _padded_cu_seqlens(packed_seq_params: PackedSeqParams) -> Tensor:  # [N + 1]
    padded: Tensor | None = packed_seq_params.cu_seqlens_q_padded
    bounds: Tensor = packed_seq_params.cu_seqlens_q
    return bounds if padded is None else padded


def _document_bounds(packed_seq_params: PackedSeqParams, num_tokens: int, cp_size: int) -> tuple[int, ...]:
    """Bounds of the documents in the whole row; the padding at the end is one more document.

    Read from the host's copy of `remember_document_bounds` if there is one, else from the tensor: on the CPU each time, because
    that is cheap and never stale; on CUDA once, and remembered for the other layers.
    Raises DataError for bounds that do not start with 0 or end after the row.
    """
    cu_seqlens = _padded_cu_seqlens(packed_seq_params)
    remembered, bounds = vars(packed_seq_params).get("host_bounds", (None, None))
    if remembered is not cu_seqlens:
        bounds = tuple(cu_seqlens.tolist())
        if cu_seqlens.is_cuda:
            remember_document_bounds(packed_seq_params, bounds)
    if bounds[0] != 0 or bounds[-1] > num_tokens:
        raise DataError(
            f"cu_seqlens_q={list(bounds)} must start with 0 and end at or before {num_tokens}, the whole row's tokens "
            f"({num_tokens // cp_size} on this rank x cp_size={cp_size}): it bounds documents, not a rank's slices"
        )
    return bounds if bounds[-1] == num_tokens else (*bounds, num_tokens)


@dataclass(frozen=True, eq=False, slots=True)
class _Chunk:
    """Consecutive queries of a document on this rank, and the consecutive keys that one of them sees."""

    num_queries: int
    keys: slice
    mask: Tensor  # [num_queries, keys] bool


@dataclass(frozen=True, eq=False, slots=True)
class _Run:
    """Consecutive documents of one length. One attention call computes them as a batch."""

    count: int
    length: int  # of each document, over all cp ranks
    key_order: Tensor | None  # [length] index of position 0, 1, 2, ... in the gathered rows; None at cp_size 1
    chunks: tuple[_Chunk, ...]  # in the order of this rank's queries; empty where each query sees all keys up to itself


# The layers of one forward share it, masks included, with and without a window; more would keep old masks alive.
@functools.lru_cache(maxsize=2)
def _runs(bounds: tuple[int, ...], cp_rank: int, cp_size: int, device: torch.device, window: int | None = None) -> tuple[_Run, ...]:
    lengths = [end - start for start, end in itertools.pairwise(bounds)]
    runs = []
    for length, group in itertools.groupby(lengths):
        if length < 0:
            raise DataError(f"cu_seqlens_q decreases: document lengths {lengths}")
        if cp_size > 1 and length % (2 * cp_size) != 0:
            raise DataError(
                f"a document of {length} tokens in {lengths} (the padding at the end counts as one) is not a multiple of "
                f"2 * cp_size = {2 * cp_size}: pad each document, and the row, to such multiples"
            )
        if length > 0:
            # The cache keeps these tensors. Tensors made under inference_mode could not be saved for the backward of a later
            # forward.
            with torch.inference_mode(False):
                order = None if cp_size == 1 else _key_order(length, cp_size).to(device)
                spans = [] if cp_size == 1 and window is None else chunk_spans(length, cp_rank, cp_size)
                chunks = tuple(chunk for span in spans for chunk in _chunks(*span, window, device))
            runs.append(_Run(len(list(group)), length, order, chunks))
    return tuple(runs)


def _key_order(length: int, cp_size: int) -> Tensor:  # [length]
    """Undoes the zigzag order."""
    return torch.cat([local_positions(length, rank, cp_size) for rank in range(cp_size)]).argsort()


def _chunks(start: int, end: int, window: int | None, device: torch.device) -> Iterator[_Chunk]:
    """The queries start to end. With a window they are cut, so that the masks grow with the tokens and not with their square."""
    size = end - start if window is None else max(window + 1, SMALLEST_CUT)
    for first in range(start, end, size):
        last = min(first + size, end)
        first_key = 0 if window is None else max(first - window, 0)
        queries, keys = torch.arange(first, last, device=device)[:, None], torch.arange(first_key, last, device=device)
        is_seen = keys <= queries
        yield _Chunk(last - first, slice(first_key, last), is_seen if window is None else is_seen & (keys >= queries - window))


class PackedAttention(nn.Module):
    """Causal attention for Megatron's layer spec: GQA, TP, packed rows (thd) and CP in zigzag order, alone or together.

        out_p = sum_{q <= p, same document} softmax_q(scale * query_p . key_q) value_q

    window_size (w, 0) leaves the keys p - w <= q <= p, in the layers that window_attn_skip_freq does not skip. softmax_type
    "learnable" adds exp(sink) of the head to the softmax's denominator, "off-by-one" adds 1:
    OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", arXiv:2508.10925, section 2.2.
    A row of a padded batch is one document; the padding after a packed row's last bound is one too. So every token has a key, and
    none gives NaN. Each token sees its document up to itself and nothing else. `attention_mask` is not read, as in Transformer
    Engine's causal layers: padding must follow the tokens, and the loss mask leaves its rows out.

    At cp_size 1 each run of equally long documents is one `scaled_dot_product_attention(is_causal=True)`: no mask,
    memory linear in T; with a window one for each cut of the window's size. Under CP a rank's two chunks of each document attend to
    the gathered keys up to the chunk's end, with a mask of that size.
    The group is that of packed_seq_params, where a micro-batch has one of its own, else the model's.
    Communication: under CP one all-gather forward (keys and values together) and one all-reduce backward over cp; else none.
    Raises ConfigError for settings that it does not compute, DataError for wrong document bounds.
    """

    softmax_offset: Tensor | None
    """[heads of this rank], the logit of the sink of each; None without sinks. The name is Megatron's."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **unused: object,  # cp_comm_type, and names of other Megatron versions; none of them changes the result
    ):
        super().__init__()
        _check_attention_config(config, attn_mask_type, attention_type)
        self.softmax_scale = 1 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale
        self.cp_group = None if pg_collection is None else pg_collection.cp
        self.window = window_of_layer(config, layer_number)
        self._make_sink(config, pg_collection)
        self.cache: Cache | None = None  # while sampling

    def _make_sink(self, config: TransformerConfig, pg_collection: ProcessGroupCollection | None) -> None:
        kind = vars(config).get("softmax_type", "vanilla")
        if kind == "vanilla":
            self.register_buffer("softmax_offset", None)
            return
        tp_size = resolve_group(None if pg_collection is None else pg_collection.tp, "tp").size()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        zeros = torch.zeros(config.num_attention_heads // tp_size, dtype=config.params_dtype, device=device)
        if kind == "off-by-one":
            self.register_buffer("softmax_offset", zeros, persistent=False)
            return
        self.softmax_offset = nn.Parameter(zeros)
        if config.perform_initialization:
            config.init_method(self.softmax_offset)
        # Megatron's marks of a parameter that tensor-parallel ranks share; without them the norm of gradients counts one rank's.
        vars(self.softmax_offset).update(tensor_model_parallel=True, partition_dim=0, partition_stride=1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """For Megatron's distributed checkpoints: the sinks are shared by tensor-parallel ranks."""
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        state = self.state_dict(prefix="", keep_vars=True)
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(state, prefix, {"softmax_offset": 0}, sharded_offsets)
        return sharded

    def forward(
        self,
        query: Tensor,  # [rows, batch, heads, dim], or [T, heads, dim] where packed; rows of this cp rank
        key: Tensor,  # the same with query groups for heads
        value: Tensor,  # the same
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:  # [rows, batch, heads * dim], or [T, heads * dim] where packed, as Transformer Engine's
        if attention_bias is not None:
            raise ConfigError("PackedAttention does not take an attention_bias: use Transformer Engine")
        if attn_mask_type is not None and attn_mask_type.name != "causal":
            raise ConfigError(
                f"PackedAttention was called with attn_mask_type={attn_mask_type.name}, but it computes only causal "
                "attention; Megatron's key-value cache uses no_mask: generate with whole forwards"
            )
        call_group = None if packed_seq_params is None else vars(packed_seq_params).get("cp_group")  # since Megatron-Core 0.16
        cp_group = resolve_group(self.cp_group if call_group is None else call_group, "cp")
        is_packed = query.dim() == 3
        if is_packed:
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        if self.cache is not None and self.cache.has_new_tokens:
            return self.cache.attend(self, query, key, value)
        num_tokens = query.shape[0] * cp_group.size()
        bounds: tuple[int, ...] = (0, num_tokens)
        if packed_seq_params is not None and packed_seq_params.qkv_format == "thd":
            bounds = _document_bounds(packed_seq_params, num_tokens, cp_group.size())
        # [cp, rows, batch, groups, key dim + value dim]
        both = torch.cat([key, value], dim=-1)
        both = gather_with_gradient(both, cp_group) if cp_group.size() > 1 else both[None]
        runs = _runs(bounds, cp_group.rank(), cp_group.size(), query.device, self.window)
        # Split, not sliced: the gradient of each slice would be a tensor of the whole row's size.
        sizes = [run.count * run.length // cp_group.size() for run in runs]
        outputs = []
        for run, rows, rows_of_all in zip(runs, query.split(sizes), both.split(sizes, dim=1), strict=True):
            whole = _whole_documents(rows_of_all, run)
            if self.cache is not None:
                self.cache.fill(self, whole)
            keys, values = whole.split((key.shape[-1], value.shape[-1]), dim=-1)
            queries = _heads_first(rows.unflatten(0, (run.count, -1)))
            # [count * batch, heads, local, dim]
            out = _attend(queries, keys, values, run.chunks, self.softmax_scale, self.softmax_offset)
            out = out.unflatten(0, (run.count, -1)).permute(0, 3, 1, 2, 4)  # [count, local, batch, heads, dim]
            outputs.append(out.flatten(3).flatten(0, 1))
        output = torch.cat(outputs)
        return output.squeeze(1) if is_packed else output


def _whole_documents(
    rows: Tensor,  # [cp, local rows of the run, batch, h, dim]
    run: _Run,
) -> Tensor:  # [count * batch, h, length, dim]
    """The run's documents with their tokens in order: undoes the zigzag order of the ranks' chunks."""
    documents = rows.unflatten(1, (run.count, -1)).transpose(0, 1).flatten(1, 2)  # [count, length, batch, h, dim]
    return _heads_first(documents if run.key_order is None else documents.index_select(1, run.key_order))


def _heads_first(documents: Tensor) -> Tensor:  # [count, rows, batch, h, dim] -> [count * batch, h, rows, dim]
    return documents.permute(0, 2, 3, 1, 4).flatten(0, 1)


def _attend(
    query: Tensor,  # [n, heads, local, dim]
    key: Tensor,  # [n, groups, length, dim]
    value: Tensor,  # [n, groups, length, dim]
    chunks: tuple[_Chunk, ...],  # see _Run
    softmax_scale: float,
    sink: Tensor | None,  # [heads]
) -> Tensor:  # [n, heads, local, dim]
    # Repeated, not enable_gqa: with it the memory-efficient kernels are not used, and torch would make a [T, T] matrix.
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    if not chunks:
        return _softmax_attention(query, key, value, None, softmax_scale, sink)
    queries = query.split([chunk.num_queries for chunk in chunks], dim=2)
    outputs = [
        _softmax_attention(part, key[:, :, chunk.keys], value[:, :, chunk.keys], chunk.mask, softmax_scale, sink)
        for part, chunk in zip(queries, chunks, strict=True)
    ]
    return torch.cat(outputs, dim=2)


def _softmax_attention(
    query: Tensor,  # [n, heads, queries, dim]
    key: Tensor,  # [n, heads, keys, dim]
    value: Tensor,  # [n, heads, keys, dim]
    mask: Tensor | None,  # [queries, keys] bool; None: as many queries as keys, and causal
    softmax_scale: float,
    sink: Tensor | None,  # [heads]
) -> Tensor:  # [n, heads, queries, dim]
    """The sink is one more key in front, which each query sees: in one more dimension scale * query . key = sink, and its value
    is 0."""
    if sink is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None, scale=softmax_scale)
    first = F.pad(sink.to(key.dtype)[None, :, None, None].expand(key.shape[0], -1, -1, -1), (key.shape[-1], 0))
    key = torch.cat([first, F.pad(key, (0, 1))], dim=2)
    query, value = F.pad(query, (0, 1), value=1 / softmax_scale), F.pad(value, (0, 0, 1, 0))
    if mask is not None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=F.pad(mask, (1, 0), value=True), scale=softmax_scale)
    # One more query in front keeps it causal without a mask: the query of token p then sees the sink and the keys up to p.
    query = F.pad(query, (0, 0, 1, 0))
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=softmax_scale)[:, :, 1:]


def window_of_layer(config: TransformerConfig, layer_number: int) -> int | None:
    """How many tokens before its own a query of this layer sees; None: all. layer_number: in the whole model, from 1.

    As Megatron: window_attn_skip_freq n leaves each n-th layer without a window, a list has 1 where a layer has one.
    """
    settings = vars(config)  # some names exist in some Megatron versions only
    size, skips = settings.get("window_size"), settings.get("window_attn_skip_freq")
    if not size or size[0] == -1:  # Megatron's word for no window
        return None
    has_window = True if skips is None else bool(skips[layer_number - 1]) if isinstance(skips, list) else layer_number % skips != 0
    return int(size[0]) if has_window else None


def _check_attention_config(config: TransformerConfig, attn_mask_type: AttnMaskType, attention_type: str) -> None:
    """Raises one ConfigError for all settings that PackedAttention does not compute."""
    settings = vars(config)  # some names exist in some Megatron versions only
    problems = []
    if attention_type != "self" or attn_mask_type.name != "causal":
        problems.append(
            f"PackedAttention is causal self-attention, not {attn_mask_type.name} {attention_type}-attention: use "
            "Transformer Engine"
        )
    if config.attention_dropout != 0:
        problems.append(f"attention_dropout={config.attention_dropout}: it would depend on the layout, set attention_dropout=0.0")
    window = settings.get("window_size")
    if window and (window[1] != 0 or window[0] < -1):
        problems.append(f"window_size={window}: attention is causal, give (tokens before a token, 0)")
    if settings.get("softmax_type", "vanilla") not in SOFTMAX_TYPES:
        problems.append(f"softmax_type={config.softmax_type!r} is not one of {', '.join(SOFTMAX_TYPES)}")
    if config.apply_query_key_layer_scaling:
        problems.append("apply_query_key_layer_scaling: it avoids fp16 overflow and is not computed here, switch it off")
    if problems:
        raise ConfigError(problems)


class SequenceParallelNorm(nn.Module):
    """LayerNorm or RMSNorm, as the config says. Its parameters have the mark `sequence_parallel`.

    Under sequence parallelism a rank normalises its own tokens, so the parameters' gradients are parts of a sum over tp;
    finalize_model_grads adds them up where the parameter is marked. Megatron's torch norm refuses sequence parallelism.
    Raises ConfigError for another normalization and for layernorm_zero_centered_gamma.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: object
    ):  # the names that Megatron uses
        super().__init__()
        if config.normalization not in ("LayerNorm", "RMSNorm"):
            raise ConfigError(f"normalization={config.normalization!r} must be 'LayerNorm' or 'RMSNorm'")
        if config.layernorm_zero_centered_gamma:
            raise ConfigError("layernorm_zero_centered_gamma needs Transformer Engine: switch it off or install that")
        self.epsilon = eps
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.bias = None
        if config.normalization == "LayerNorm":
            self.bias = nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype, device=device))
        for parameter in self.parameters():
            vars(parameter)["sequence_parallel"] = config.sequence_parallel

    def forward(self, hidden: Tensor) -> Tensor:  # [..., hidden_size]
        if self.bias is None:
            return F.rms_norm(hidden, self.weight.shape, self.weight, self.epsilon)
        return F.layer_norm(hidden, self.weight.shape, self.weight, self.bias, self.epsilon)
