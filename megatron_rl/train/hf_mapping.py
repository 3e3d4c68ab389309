"""Which tensors of a Hugging Face folder make which parameter of Megatron's GPTModel."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.train.hf_model import HFModel


@dataclass(frozen=True, slots=True)
class Source:
    """The tensors of a parameter. kind: whole; sharded along its dimension; gated: [gate, up], each sharded by itself; qkv: query,
    key and value, mixed group by group and cut evenly over the ranks, as Megatron holds them. shapes: of the tensors."""

    names: tuple[str, ...]
    kind: str
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def one(cls, name: str, kind: str, *shape: int) -> Source:
        return cls((name,), kind, (shape,))


def sources(model: HFModel) -> dict[str, Source]:
    """By the global name of the parameter."""
    hidden = model.hidden_size
    found = {
        "embedding.word_embeddings.weight": Source.one("model.embed_tokens.weight", "sharded", model.vocab_size, hidden),
        "decoder.final_layernorm.weight": Source.one("model.norm.weight", "whole", hidden),
    }
    if not model.tie_embeddings:
        found["output_layer.weight"] = Source.one("lm_head.weight", "sharded", model.vocab_size, hidden)
    for layer in range(model.num_layers):
        here, there = f"decoder.layers.{layer}", f"model.layers.{layer}"
        found |= _attention(model, f"{here}.self_attention", f"{there}.self_attn")
        # A norm has the name that it has where Transformer Engine fuses it into the product behind it, as in global_parameter_name.
        before_attention = "self_attention.linear_qkv.layer_norm_"
        before_mlp = "pre_mlp_layernorm." if model.has_experts(layer) else "mlp.linear_fc1.layer_norm_"
        found[f"{here}.{before_attention}weight"] = Source.one(f"{there}.input_layernorm.weight", "whole", hidden)
        found[f"{here}.{before_mlp}weight"] = Source.one(f"{there}.post_attention_layernorm.weight", "whole", hidden)
        if model.has_experts(layer):
            found |= _experts(model, f"{here}.mlp", f"{there}.mlp")
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
    if model.traits.has_qkv_bias:
        found[f"{here}.linear_qkv.bias"] = mixed("bias")
    if model.traits.has_qk_norm:
        for part in "qk":
            found[f"{here}.{part}_layernorm.weight"] = Source.one(f"{there}.{part}_norm.weight", "whole", head_size)
    return found


def _mlp(here: str, there: str, width: int, hidden: int) -> dict[str, Source]:
    gate, up, down = (f"{there}.{name}_proj.weight" for name in ("gate", "up", "down"))
    return {
        f"{here}.linear_fc1.weight": Source((gate, up), "gated", ((width, hidden), (width, hidden))),
        f"{here}.linear_fc2.weight": Source.one(down, "sharded", hidden, width),
    }


def _experts(model: HFModel, here: str, there: str) -> dict[str, Source]:
    sizes, hidden = model.experts, model.hidden_size
    assert sizes is not None
    found = {f"{here}.router.weight": Source.one(f"{there}.gate.weight", "whole", sizes.count, hidden)}
    for expert in range(sizes.count):
        found |= _mlp(f"{here}.experts.{expert}", f"{there}.experts.{expert}", sizes.width, hidden)
    return found
