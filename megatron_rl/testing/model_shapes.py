"""The models of the field in two layers: what is special in each as options of Megatron-Core, with sizes that fit a layout.

A declaration without torch: a command line reads the names. `tiny_like` in layout_step.py makes the model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.errors import ConfigError

# Activations by the names that they have in torch.nn.functional, or in Megatron-Core.
SILU, QUICK_GELU = "silu", "quick_gelu"
HEADS = 4  # of attention, at least


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A model of the field. options: fields of TransformerConfig, but for sizes that follow from the layout."""

    name: str
    source: str  # the published config.json
    contains: str  # in words
    options: Mapping[str, object]
    groups_of: int | None = None  # heads of one key and value; None: no groups
    expert_groups: int = 1  # of which a token chooses some
    is_mixed: bool = False  # the first layer is dense
    has_shared_expert: bool = False
    rotary: Mapping[str, Any] = field(default_factory=dict)  # keywords of Rotary
    yarn: Mapping[str, Any] | None = None  # of its Yarn

    def num_heads(self, tensor: int) -> int:
        """A multiple of the tensor-parallel size, with a key and value head for each rank."""
        unit = tensor * (self.groups_of or 1)
        return unit * -(-HEADS // unit)

    def sized_options(self, *, tensor: int, pipeline: int, expert: int, expert_tensor: int) -> dict[str, object]:
        """The options with the sizes of a layout: two layers a pipeline stage, two experts or more a rank, groups of four."""
        unit = math.lcm(expert, self.expert_groups)
        sizes: dict[str, object] = {
            "ffn_hidden_size": 16 * tensor,
            "num_moe_experts": unit * -(-max(8, 4 * self.expert_groups, 2 * expert) // unit),
            "moe_ffn_hidden_size": 8 * expert_tensor,
            "moe_layer_freq": (0 if self.is_mixed else 1,) + (1,) * (2 * pipeline - 1),
        }
        if self.groups_of is not None:
            sizes["num_query_groups"] = self.num_heads(tensor) // self.groups_of
        if self.has_shared_expert:
            sizes["moe_shared_expert_intermediate_size"] = 8 * tensor
        return {**sizes, **self.options}


GATED = {"normalization": "RMSNorm", "gated_linear_unit": True, "activation_func": SILU, "moe_router_load_balancing_type": "none"}
SHAPES: Mapping[str, ModelShape] = {
    shape.name: shape
    for shape in (
        ModelShape(
            name="qwen3-moe",
            source="Qwen/Qwen3-30B-A3B, config.json",
            contains="grouped queries, heads wider than the hidden size, norms of queries and keys, SwiGLU experts in each layer, "
            "softmax router whose weights are divided by their sum",
            options={**GATED, "qk_layernorm": True, "kv_channels": 16, "moe_router_topk": 2},
            groups_of=2,
            rotary={"base": 1e6},
        ),
        ModelShape(
            name="deepseek-v3",
            source="deepseek-ai/DeepSeek-V3, config.json",
            contains="multi-latent attention with low-rank queries and YaRN, a dense layer first, sigmoid router with expert bias, "
            "groups of experts and factor 2.5, a shared expert, a layer of multi-token prediction",
            # The first length is short, so that YaRN keeps some frequencies, divides others and blends the rest. The bias of
            # experts stays. Multi-token prediction: arXiv:2412.19437, section 4.2, a factor of 0.3 first.
            options={
                **GATED,
                "multi_latent_attention": True,
                "qk_layernorm": True,
                "q_lora_rank": 16,
                "kv_lora_rank": 16,
                "qk_head_dim": 8,
                "qk_pos_emb_head_dim": 8,
                "v_head_dim": 8,
                "rope_type": "yarn",
                "original_max_position_embeddings": 16,
                "rotary_base": 10000,
                "rotary_scaling_factor": 40,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "moe_router_score_function": "sigmoid",
                "moe_router_enable_expert_bias": True,
                "moe_router_bias_update_rate": 0.0,
                "moe_router_topk": 4,
                "moe_router_num_groups": 4,
                "moe_router_group_topk": 2,
                "moe_router_topk_scaling_factor": 2.5,
                "mtp_num_layers": 1,
                "mtp_loss_scaling_factor": 0.3,
            },
            expert_groups=4,
            is_mixed=True,
            has_shared_expert=True,
        ),
        ModelShape(
            name="gpt-oss",
            source="openai/gpt-oss-20b, config.json",
            contains="grouped queries, a sliding window on every other layer, a sink a head, YaRN, biases of attention, router and "
            "experts, experts of clamped SwiGLU with sigmoid(1.702 x) and linear part + 1",
            # The window and the clamp are small, so that they bind in a step of short samples and small activations.
            options={
                **GATED,
                "activation_func": QUICK_GELU,
                "activation_func_clamp_value": 0.25,
                "glu_linear_offset": 1.0,
                "add_bias_linear": True,
                "add_qkv_bias": True,
                "kv_channels": 16,
                "softmax_type": "learnable",
                "window_size": (4, 0),
                "window_attn_skip_freq": 2,
                "moe_router_topk": 2,
            },
            groups_of=2,
            rotary={"base": 150000},
            yarn={"factor": 32.0, "original_length": 16, "rounds_range": False},
        ),
    )
}


def shape_of(name: str) -> ModelShape:
    """Raises ConfigError for a name that is not declared."""
    if name not in SHAPES:
        raise ConfigError(f"--model-like {name} is not known: it is one of {', '.join(SHAPES)}")
    return SHAPES[name]


# The kinds of parameters, by a part of the global name; the first that fits.
_KINDS = (
    (".router.bias", "router bias"),
    (".router.", "router"),
    (".shared_experts.gate_weight", "shared expert's gate"),
    (".shared_experts.", "shared expert"),
    (".experts.", "expert"),
    ("softmax_offset", "sink"),
    ("q_layernorm", "norm of queries and keys"),
    ("k_layernorm", "norm of queries and keys"),
    ("_up_proj.layer_norm", "norm of queries and keys"),
    ("kv_layernorm", "norm of queries and keys"),
    ("norm", "norm"),
    (".eh_proj.", "projection"),
    (".self_attention.", "attention"),
    (".mlp.", "dense MLP"),
    ("embedding", "embedding"),
    ("output_layer", "output layer"),
)


def parameter_kind(name: str) -> str:
    """The kind of a parameter by its global name: "attention", "attention bias", "MTP attention" of multi-token prediction."""
    kind = next((kind for part, kind in _KINDS if part in name), "other")
    is_bias = name.endswith(".bias") and "norm" not in kind and not kind.endswith("bias")
    layer = "MTP " if name.startswith("mtp.") else ""
    return f"{layer}{kind}{' bias' if is_bias else ''}"
