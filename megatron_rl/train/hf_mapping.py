"""Which tensors of a Hugging Face folder make which parameter of Megatron's GPTModel."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.train.hf_experts import BLOCKS, GROUP, SCALES
from megatron_rl.train.hf_model import HFModel

EXPERT_BIAS = "router.expert_bias"


@dataclass(frozen=True, slots=True)
class Source:
    """The tensors of a parameter. kind: whole; sharded along its dimension; gated: [gate, up], each sharded by itself; qkv: query,
    key and value, mixed group by group and cut evenly over the ranks, as Megatron holds them. shapes: of the tensors. expert: its
    place in tensors that hold all experts; None: the tensors are of this parameter alone."""

    names: tuple[str, ...]
    kind: str
    shapes: tuple[tuple[int, ...], ...]
    expert: int | None = None

    @classmethod
    def one(cls, name: str, kind: str, *shape: int) -> Source:
        return cls((name,), kind, (shape,))


def sources(model: HFModel) -> dict[str, Source]:
    """By the global name of the parameter, or of a router's bias, which is a buffer."""
    hidden = model.hidden_size
    found = {
        "embedding.word_embeddings.weight": Source.one("model.embed_tokens.weight", "sharded", model.vocab_size, hidden),
        "decoder.final_layernorm.weight": Source.one("model.norm.weight", "whole", hidden),
    }
    if not model.tie_embeddings:
        found["output_layer.weight"] = Source.one("lm_head.weight", "sharded", model.vocab_size, hidden)
    for layer in range(model.num_layers):
        here, there = f"decoder.layers.{layer}", f"model.layers.{layer}"
        attention = _attention if model.latent is None else _latent_attention
        found |= attention(model, f"{here}.self_attention", f"{there}.self_attn")
        # A norm has the name that it has where Transformer Engine fuses it into the product behind it, as in global_parameter_name.
        before_attention = "input_layernorm." if model.latent else "self_attention.linear_qkv.layer_norm_"
        before_mlp = "pre_mlp_layernorm." if model.has_experts(layer) else "mlp.linear_fc1.layer_norm_"
        found[f"{here}.{before_attention}weight"] = Source.one(f"{there}.input_layernorm.weight", "whole", hidden)
        found[f"{here}.{before_mlp}weight"] = Source.one(f"{there}.post_attention_layernorm.weight", "whole", hidden)
        if model.has_experts(layer):
            experts = _stacked_experts if model.has_stacked_experts else _experts
            found |= experts(model, f"{here}.mlp", there)
        else:
            found |= _mlp(f"{here}.mlp", f"{there}.mlp", model.ffn_hidden_size, hidden)
    return found


def _attention(model: HFModel, here: str, there: str) -> dict[str, Source]:
    hidden, head_size = model.hidden_size, model.head_size
    queries, keys = model.num_attention_heads * head_size, model.num_query_groups * head_size
    names, widths = tuple(f"{there}.{part}_proj" for part in "qkv"), (queries, keys, keys)

    def mixed(what: str, *further: int) -> Source:
        return Source(tuple(f"{name}.{what}" for name in names), "qkv", tuple((width, *further) for width in widths))

    found = {
        f"{here}.linear_qkv.weight": mixed("weight", hidden),
        f"{here}.linear_proj.weight": Source.one(f"{there}.o_proj.weight", "sharded", hidden, queries),
    }
    if model.has_qkv_bias:
        found[f"{here}.linear_qkv.bias"] = mixed("bias")
    if model.has_biases:
        found[f"{here}.linear_proj.bias"] = Source.one(f"{there}.o_proj.bias", "whole", hidden)
    if model.has_sinks:
        found[f"{here}.core_attention.softmax_offset"] = Source.one(f"{there}.sinks", "sharded", model.num_attention_heads)
    if model.has_qk_norm:
        for part in "qk":
            found[f"{here}.{part}_layernorm.weight"] = Source.one(f"{there}.{part}_norm.weight", "whole", head_size)
    return found


def _latent_attention(model: HFModel, here: str, there: str) -> dict[str, Source]:
    sizes, heads, hidden = model.latent, model.num_attention_heads, model.hidden_size
    assert sizes is not None
    queries = heads * (sizes.kept + sizes.rotated)
    found = {
        f"{here}.linear_kv_down_proj.weight": Source.one(
            f"{there}.kv_a_proj_with_mqa.weight", "whole", sizes.rank + sizes.rotated, hidden
        ),
        f"{here}.linear_kv_up_proj.layer_norm_weight": Source.one(f"{there}.kv_a_layernorm.weight", "whole", sizes.rank),
        f"{here}.linear_kv_up_proj.weight": Source.one(
            f"{there}.kv_b_proj.weight", "sharded", heads * (sizes.kept + sizes.value), sizes.rank
        ),
        f"{here}.linear_proj.weight": Source.one(f"{there}.o_proj.weight", "sharded", hidden, heads * sizes.value),
    }
    if sizes.query_rank is None:
        return found | {f"{here}.linear_q_proj.weight": Source.one(f"{there}.q_proj.weight", "sharded", queries, hidden)}
    rank = sizes.query_rank
    return found | {
        f"{here}.linear_q_down_proj.weight": Source.one(f"{there}.q_a_proj.weight", "whole", rank, hidden),
        f"{here}.linear_q_up_proj.layer_norm_weight": Source.one(f"{there}.q_a_layernorm.weight", "whole", rank),
        f"{here}.linear_q_up_proj.weight": Source.one(f"{there}.q_b_proj.weight", "sharded", queries, rank),
    }


def _mlp(
    here: str, there: str, width: int, hidden: int, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> dict[str, Source]:
    gate, up, down = (f"{there}.{name}.weight" for name in names)
    return {
        f"{here}.linear_fc1.weight": Source((gate, up), "gated", ((width, hidden), (width, hidden))),
        f"{here}.linear_fc2.weight": Source.one(down, "sharded", hidden, width),
    }


def _experts(model: HFModel, here: str, layer: str) -> dict[str, Source]:
    sizes, hidden = model.experts, model.hidden_size
    assert sizes is not None
    there = f"{layer}.{sizes.names.module}"
    found = {f"{here}.router.weight": Source.one(f"{there}.gate.weight", "whole", sizes.count, hidden)}
    if sizes.names.is_sigmoid:
        found[f"{here}.{EXPERT_BIAS}"] = Source.one(f"{there}.gate.e_score_correction_bias", "whole", sizes.count)
    if sizes.shared_width:
        found |= _mlp(f"{here}.shared_experts", f"{there}.shared_experts", sizes.shared_width, hidden)
    names = (sizes.names.gate, sizes.names.up, sizes.names.down)
    for expert in range(sizes.count):
        found |= _mlp(f"{here}.experts.{expert}", f"{there}.experts.{expert}", sizes.width, hidden, names)
    return found


def _stacked_experts(model: HFModel, here: str, layer: str) -> dict[str, Source]:
    sizes, hidden = model.experts, model.hidden_size
    assert sizes is not None
    count, router, there = sizes.count, f"{layer}.{sizes.names.module}.router", f"{layer}.{sizes.names.module}.experts"
    found = {
        f"{here}.router.weight": Source.one(f"{router}.weight", "whole", count, hidden),
        f"{here}.router.bias": Source.one(f"{router}.bias", "whole", count),
    }
    for own, product, rows, columns in (
        ("fc1", "gate_up_proj", 2 * sizes.width, hidden),
        ("fc2", "down_proj", hidden, sizes.width),
    ):
        kind, name = "gated" if own == "fc1" else "sharded", f"{there}.{product}"
        tensors: dict[str, tuple[int, ...]] = {name: (count, columns, rows)}
        if model.is_packed:
            groups = (count, rows, columns // GROUP)
            tensors = {name + BLOCKS: (*groups, GROUP // 2), name + SCALES: groups}
        for expert in range(count):
            place = f"{here}.experts.{expert}.linear_{own}"
            found[f"{place}.weight"] = Source(tuple(tensors), kind, tuple(tensors.values()), expert)
            found[f"{place}.bias"] = Source((f"{name}_bias",), kind, ((count, rows),), expert)
    return found
