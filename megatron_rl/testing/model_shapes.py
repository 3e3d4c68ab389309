"""The models of the field in two layers: what is special in each as options of Megatron-Core, with sizes that fit a layout."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.megatron.rotary import Rotary, Yarn
from megatron_rl.testing.layout_step import Layout, TinyGPT


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A model of the field (docs/moe.md). options: fields of TransformerConfig, but for sizes that follow from the layout."""

    source: str  # of the published config.json
    options: Mapping[str, object]
    groups_of: int | None = None  # heads of one key and value; None: no groups
    expert_groups: int = 1  # of which a token chooses some
    is_mixed: bool = False  # the first layer is dense
    has_shared_expert: bool = False
    rotary: Rotary = Rotary()  # noqa: RUF009  # frozen


def tiny_like(shape: ModelShape, layout: Layout) -> TinyGPT:
    """The shape with two layers a pipeline stage and heads, groups, experts and widths that fit the layout; padded columns are on
    the last shard."""
    unit_of_heads = layout.tensor * (shape.groups_of or 1)  # a key and value head for each rank
    heads = unit_of_heads * -(-4 // unit_of_heads)  # four or more
    unit = math.lcm(layout.expert, shape.expert_groups)
    sizes: dict[str, object] = {
        "ffn_hidden_size": 16 * layout.tensor,
        "num_moe_experts": unit * -(-max(8, 4 * shape.expert_groups, 2 * layout.expert) // unit),
        "moe_ffn_hidden_size": 8 * (layout.tensor if layout.expert_tensor is None else layout.expert_tensor),
        "moe_layer_freq": (0 if shape.is_mixed else 1,) + (1,) * (2 * layout.pipeline - 1),
    }
    if shape.groups_of is not None:
        sizes["num_query_groups"] = heads // shape.groups_of
    if shape.has_shared_expert:
        sizes["moe_shared_expert_intermediate_size"] = 8 * layout.tensor
    return TinyGPT(
        num_layers=2 * layout.pipeline,
        num_attention_heads=heads,
        vocab_size=layout.tensor * -(-64 // layout.tensor),
        use_transformer_engine=False,
        experts=tuple({**sizes, **shape.options}.items()),
        rotary=shape.rotary,
    )


def quick_gelu(values: Tensor) -> Tensor:
    return values * torch.sigmoid(1.702 * values)


GATED = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "moe_router_load_balancing_type": "none",
}
SHAPES: Mapping[str, ModelShape] = {
    "qwen3-moe": ModelShape(
        source="Qwen/Qwen3-30B-A3B",
        options={**GATED, "qk_layernorm": True, "kv_channels": 16, "moe_router_topk": 2},
        groups_of=2,
        rotary=Rotary(base=1e6),
    ),
    "deepseek-v3": ModelShape(
        source="deepseek-ai/DeepSeek-V3",
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
    "gpt-oss": ModelShape(
        source="openai/gpt-oss-20b",
        # The window and the clamp are small, so that they bind in a step of short samples and small activations.
        options={
            **GATED,
            "activation_func": quick_gelu,
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
        rotary=Rotary(base=150000, yarn=Yarn(factor=32.0, original_length=16)),
    ),
}
