"""The architectures of Hugging Face folders that are known here: a declaration each, of what differs apart from sizes.

Another architecture of these parts is one more declaration. Its proof is a row in tests/test_hf_checkpoint.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

OFF = (False, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A layer of experts. module: its name in a layer. gate, up, down: the three products of an expert. is_sigmoid: scores are
    sigmoids, experts are chosen with a bias, e_score_correction_bias, and a shared expert is added; else scores are a softmax.
    is_stacked: a tensor holds all experts, as gpt-oss: see hf_experts.py. Then the products have biases, and SwiGLU is clamped."""

    module: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    width: str = "moe_intermediate_size"  # the field of config.json
    is_sigmoid: bool = False
    is_stacked: bool = False
    always_normalized: bool = False  # else norm_topk_prob says whether the weights of a token's experts are divided by their sum


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """has_qkv_bias, has_qk_norm: always or never, or the field of config.json that says it. is_latent: multi-latent attention.
    has_biases: of each product but the embeddings', and of routers. has_sinks: a sink for each head. has_windows: layer_types may
    have sliding_attention. names_its_rotary: nothing is assumed of rotary positions that are left out.
    must_be: fields of config.json that would make another model, with the values that are computed here; the first one is
    what is typed. A field that is left out has that value."""

    has_qkv_bias: bool | str = False
    has_qk_norm: bool | str = False
    rotates_a_share: bool = False
    is_latent: bool = False
    has_biases: bool = False
    has_sinks: bool = False
    has_windows: bool = False
    names_its_rotary: bool = False
    experts: Experts | None = None
    must_be: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


# Of every architecture.
MUST_BE: Mapping[str, tuple[Any, ...]] = {"hidden_act": ("silu",), "mlp_bias": OFF, "use_sliding_window": OFF}
NO_BIAS: Mapping[str, tuple[Any, ...]] = {"attention_bias": OFF}
NO_WINDOW: Mapping[str, tuple[Any, ...]] = {"sliding_window": (None,)}
SIGMOID = Experts(is_sigmoid=True)

ARCHITECTURES: Mapping[str, Architecture] = {
    "LlamaForCausalLM": Architecture(must_be=NO_BIAS),
    "MistralForCausalLM": Architecture(must_be=NO_WINDOW),
    "Qwen2ForCausalLM": Architecture(has_qkv_bias=True),
    "Qwen3ForCausalLM": Architecture(has_qk_norm=True, must_be=NO_BIAS),
    "Qwen3MoeForCausalLM": Architecture(has_qk_norm=True, experts=Experts(), must_be=NO_BIAS),
    "MixtralForCausalLM": Architecture(
        experts=Experts(
            module="block_sparse_moe", gate="w1", up="w3", down="w2", width="intermediate_size", always_normalized=True
        ),
        must_be={**NO_WINDOW, "router_jitter_noise": (0.0, None)},
    ),
    # GLM-4.5, 4.5-Air, 4.6, 4.7.
    "Glm4MoeForCausalLM": Architecture(
        has_qkv_bias="attention_bias", has_qk_norm="use_qk_norm", rotates_a_share=True, experts=SIGMOID
    ),
    # DeepSeek-V3 and R1, Kimi-K2. The norms of the latent vectors have 1e-6 in transformers, whatever rms_norm_eps is.
    "DeepseekV3ForCausalLM": Architecture(
        is_latent=True,
        experts=SIGMOID,
        must_be={
            **NO_BIAS,
            "rope_interleave": (True,),
            "rms_norm_eps": (1e-6,),
            "scoring_func": ("sigmoid",),
            "topk_method": ("noaux_tc",),
            "moe_layer_freq": (1,),
        },
    ),
    # gpt-oss-20b and 120b. Where a folder has no rotary settings, transformers 4 and 5 take different ones.
    "GptOssForCausalLM": Architecture(
        has_qkv_bias=True,
        has_biases=True,
        has_sinks=True,
        has_windows=True,
        names_its_rotary=True,
        experts=Experts(is_stacked=True, width="intermediate_size", always_normalized=True),
        must_be={"attention_bias": (True,), "attention_dropout": (0.0, 0), "swiglu_alpha": (1.702,)},
    ),
}
