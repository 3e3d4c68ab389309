"""What the config.json of a Hugging Face folder says of a model, checked, and what Megatron's config is for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.nn.functional import silu

from megatron_rl.errors import ConfigError
from megatron_rl.files.json_values import Fields
from megatron_rl.megatron.rotary import Llama3, Rotary


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """What differs apart from sizes. window: the sliding_window of transformers where config.json has none."""

    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    has_experts: bool = False
    window: int | None = None


# Another architecture of these parts is one more row. Its proof is a row in tests/test_hf.py.
ARCHITECTURES: Mapping[str, Architecture] = {
    "LlamaForCausalLM": Architecture(),
    "MistralForCausalLM": Architecture(window=4096),
    "Qwen2ForCausalLM": Architecture(has_qkv_bias=True),
    "Qwen3ForCausalLM": Architecture(has_qk_norm=True),
    "Qwen3MoeForCausalLM": Architecture(has_qk_norm=True, has_experts=True),
}
# Layers, and experts of a layer: a name is made of each of their tensors, and a wrong number would fill the memory.
MOST_PARTS = 1000
OFF = (False, None)
# Fields that would make another model of the same tensors, with the values that are computed here; the first one is what is typed.
MUST_BE: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": OFF,  # Qwen2 has its biases whatever this says
    "mlp_bias": OFF,
    "use_sliding_window": OFF,
    "partial_rotary_factor": (1.0, None),
    "quantization_config": (None,),
}
# rope_type -> what its rotary positions are made of.
OF_ALL_FORMS = {"rope_type", "type", "rope_theta"}
LLAMA3 = {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
FORMS = {"default": OF_ALL_FORMS, "llama3": OF_ALL_FORMS | LLAMA3}


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """per_token: how many experts each token is sent to. layers: which ones have experts. is_normalized: the weights of a token's
    experts are divided by their sum."""

    count: int
    per_token: int
    width: int
    layers: tuple[bool, ...]
    is_normalized: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class HFModel:
    """A checked folder. longest: the most tokens of a sequence whose positions are known, and each sees all before it."""

    folder: Path
    architecture: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    head_size: int
    ffn_hidden_size: int
    vocab_size: int
    longest: int
    tie_embeddings: bool
    rotary: Rotary
    norm_eps: float
    experts: Experts | None

    @property
    def traits(self) -> Architecture:
        return ARCHITECTURES[self.architecture]

    def transformer_options(self) -> dict[str, Any]:
        """Keywords of transformer_config."""
        options = {
            "num_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "num_attention_heads": self.num_attention_heads,
            "num_query_groups": self.num_query_groups,
            "kv_channels": self.head_size,
            "ffn_hidden_size": self.ffn_hidden_size,
            "normalization": "RMSNorm",
            "layernorm_epsilon": self.norm_eps,
            "gated_linear_unit": True,
            "activation_func": silu,
            "add_bias_linear": False,
            "add_qkv_bias": self.traits.has_qkv_bias,
            "qk_layernorm": self.traits.has_qk_norm,
        }
        if self.experts is None:
            return options
        return options | {
            "num_moe_experts": self.experts.count,
            "moe_ffn_hidden_size": self.experts.width,
            "moe_router_topk": self.experts.per_token,
            "moe_router_load_balancing_type": "none",
            "moe_layer_freq": [int(has) for has in self.experts.layers],
            # Without it the softmax is over the chosen experts, which is softmax, choice and division by their sum.
            "moe_router_pre_softmax": not self.experts.is_normalized,
        }


def described(folder: Path, fields: Fields) -> HFModel:
    """Raises ConfigError for an architecture that is not in the table, with a line for each setting that makes another model of the
    same tensors, and for sizes that are none."""
    names = fields.items("architectures", str)
    architecture = next((name for name in names if name in ARCHITECTURES), None)
    if architecture is None:
        raise ConfigError(
            f"{fields.place}: architectures={names} is not known here; known are {', '.join(ARCHITECTURES)}. Train others "
            "in miles, slime or verl"
        )
    traits = ARCHITECTURES[architecture]
    problems = [*_not_computed(fields, traits)]
    if problems:
        raise ConfigError(problems)
    num_layers = fields.whole("num_hidden_layers", most=MOST_PARTS)
    hidden_size, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    longest = fields.whole("max_position_embeddings")
    if traits.window is not None:  # a query sees so many keys, its own too; null: all
        window = fields.whole("sliding_window", None) if "sliding_window" in fields.content else traits.window
        longest = min(longest, window or longest)
    return HFModel(
        folder=folder,
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_attention_heads=heads,
        num_query_groups=fields.whole("num_key_value_heads", heads),
        head_size=fields.whole("head_dim", hidden_size // heads),
        ffn_hidden_size=fields.whole("intermediate_size"),
        vocab_size=fields.whole("vocab_size"),
        longest=longest,
        tie_embeddings=fields.switch("tie_word_embeddings", False),
        rotary=_rotary(fields),
        norm_eps=fields.number("rms_norm_eps", below=1.0),
        experts=_experts(fields, num_layers) if traits.has_experts else None,
    )


def _not_computed(fields: Fields, traits: Architecture) -> Iterator[str]:
    for name, allowed in MUST_BE.items():
        is_ignored = name == "attention_bias" and traits.has_qkv_bias
        if name in fields.content and fields.content[name] not in allowed and not is_ignored:
            yield str(fields.wrong(name, f"{allowed[0]!r}: another model is not computed here"))
    layers = set(fields.items("layer_types", str)) - {"full_attention"}
    if layers:
        yield f"{fields.place}: layer_types has {', '.join(sorted(layers))}; only full_attention is computed here"


def _rotary(fields: Fields) -> Rotary:
    """transformers 5 has all in rope_parameters; before, the base stood at the top and the scaling in rope_scaling."""
    settings: dict[str, Any] = {}
    top_level = {"rope_theta": fields.content.get("rope_theta")}
    for given in (top_level, fields.table("rope_scaling").content, fields.table("rope_parameters").content):
        for name, value in given.items():
            if value is not None and settings.setdefault(name, value) != value:
                raise ConfigError(f"{fields.place}: {name}={settings[name]!r} and {name}={value!r}: remove the wrong one")
    kind = settings.get("rope_type", settings.get("type", "default"))
    unknown = set(settings) - FORMS.get(str(kind), set())
    if unknown:
        raise ConfigError(
            f"{fields.place}: rotary positions have {', '.join(sorted(unknown))} with rope_type={kind!r}, which is not computed "
            f"here; known are default, and llama3 with {', '.join(sorted(LLAMA3))}"
        )
    found = Fields(settings, f"{fields.place}: rotary positions")
    llama3 = None
    if kind == "llama3":
        factors = {name: found.number(name) for name in ("factor", "low_freq_factor", "high_freq_factor")}
        llama3 = Llama3(original_length=found.whole("original_max_position_embeddings"), **factors)
    return Rotary(base=found.number("rope_theta", 10000.0, above=1.0, below=2.0**53), llama3=llama3)


def _experts(fields: Fields, num_layers: int) -> Experts:
    # transformers 5 writes num_local_experts for what was num_experts.
    count = fields.whole("num_local_experts" if fields.has("num_local_experts") else "num_experts", most=MOST_PARTS)
    dense, every = set(fields.items("mlp_only_layers", int)), fields.whole("decoder_sparse_step", 1)
    return Experts(
        count=count,
        per_token=fields.whole("num_experts_per_tok", most=count),
        width=fields.whole("moe_intermediate_size"),
        layers=tuple(layer not in dense and (layer + 1) % every == 0 for layer in range(num_layers)),
        is_normalized=fields.switch("norm_topk_prob"),
    )
