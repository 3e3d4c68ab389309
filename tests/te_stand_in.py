"""A stand-in of Transformer Engine on the CPU, at tp 1, for `megatron-rl train` with Megatron-Bridge, which imports that package.

`python te_stand_in.py ARGUMENTS` is `python -m megatron_rl ARGUMENTS`. Megatron-Core's own Transformer Engine layers are subclasses
of these, so the names of parameters are the real ones. The version is one in which Megatron-Core imports little.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from importlib.machinery import ModuleSpec
from types import ModuleType

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812


class RMSNorm(nn.Module):
    def __init__(self, hidden_size, eps, zero_centered_gamma, params_dtype, **others):
        super().__init__()
        self.eps, self.offset = eps, int(zero_centered_gamma)
        self.weight = nn.Parameter(torch.full((hidden_size,), 1.0 - self.offset, dtype=params_dtype))

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], self.weight + self.offset, self.eps)


class Linear(nn.Module):
    def __init__(self, in_features, out_features, *, bias, init_method, parallel_mode, params_dtype, **others):
        assert not bias and others["tp_size"] == 1
        super().__init__()
        self.in_features, self.out_features, self.use_bias, self.parallel_mode = in_features, out_features, bias, parallel_mode
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype))
        init_method(self.weight)

    def forward(self, x, is_first_microbatch=None):
        return F.linear(x, self.weight)


class LayerNormLinear(Linear):
    def __init__(self, in_features, out_features, *, eps, normalization, zero_centered_gamma, params_dtype, **others):
        assert normalization == "RMSNorm"
        super().__init__(in_features, out_features, params_dtype=params_dtype, **others)
        self.eps, self.offset = eps, int(zero_centered_gamma)
        self.layer_norm_weight = nn.Parameter(torch.full((in_features,), 1.0 - self.offset, dtype=params_dtype))

    def forward(self, x, is_first_microbatch=None):
        return super().forward(F.rms_norm(x, x.shape[-1:], self.layer_norm_weight + self.offset, self.eps))


class DotProductAttention(nn.Module):
    def __init__(self, num_attention_heads, kv_channels, *, softmax_scale, **others):
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query, key, value, attention_mask, *, attn_mask_type):
        assert attn_mask_type == "causal", attn_mask_type
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=self.scale, enable_gqa=True)
        return mixed.permute(2, 0, 1, 3).flatten(2)


def kinds(*names: str, base: type = object) -> dict[str, type]:
    return {name: type(name, (base,), {}) for name in names}


MODULES = {
    "": {"__version__": "2.1.0"},
    ".common": {},
    ".common.recipe": kinds("DelayedScaling", "Recipe"),
    ".pytorch": {
        **kinds("LayerNorm", "GroupedLinear", "LayerNormMLP", "TransformerLayer", base=nn.Module),
        **{kind.__name__: kind for kind in (RMSNorm, Linear, LayerNormLinear, DotProductAttention)},
    },
    ".pytorch.fp8": {**kinds("FP8GlobalStateManager"), "fp8_autocast": nullcontext},
    ".pytorch.distributed": {**kinds("CudaRNGStatesTracker"), "activation_recompute_forward": None, "checkpoint": None},
    ".pytorch.ops": kinds("Sequential", "FusibleOperation", base=nn.Module),
    ".pytorch.tensor": kinds("QuantizedTensor", base=torch.Tensor),
    ".pytorch.tensor.float8_tensor": kinds("Float8Tensor", base=torch.Tensor),
}


def install() -> None:
    """Before Megatron-Core is imported."""
    for name, content in MODULES.items():
        name = f"transformer_engine{name}"
        module = ModuleType(name)
        module.__path__ = []
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        vars(module).update(content)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


if __name__ == "__main__":
    install()
    from megatron_rl.__main__ import main

    sys.exit(main(sys.argv[1:]))
