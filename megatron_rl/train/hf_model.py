"""What the config.json of a Hugging Face folder says of a model, checked, and what Megatron's config is for it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.nn.functional import silu

from megatron_rl.errors import ConfigError
from megatron_rl.files.json_values import Fields
from megatron_rl.megatron.rotary import Rotary
from megatron_rl.train.hf_architectures import ARCHITECTURES, MUST_BE, Experts
from megatron_rl.train.hf_rotary import rotary_of

# Experts in one tensor: no number of tensors bounds them.
MOST_STACKED = 2**12
QUANTIZATION = "quantization_config"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertSizes:
    """names: of the tensors. layers: which ones have experts. num_groups 1: a token chooses among all experts; else among those of
    groups_per_token groups. scaling: of the sum of its experts. shared_width 0: no shared expert. limit None: SwiGLU is plain; else
    silu(1.702 gate) / 1.702 (up + 1), with gate at most limit, and up between both."""

    names: Experts
    count: int
    per_token: int
    width: int
    layers: tuple[bool, ...]
    is_normalized: bool
    scaling: float = 1.0
    num_groups: int = 1
    groups_per_token: int = 1
    shared_width: int = 0
    limit: float | None = None

    def transformer_options(self) -> dict[str, Any]:
        options: dict[str, Any] = {
            "num_moe_experts": self.count,
            "moe_ffn_hidden_size": self.width,
            "moe_router_topk": self.per_token,
            "moe_router_load_balancing_type": "none",
            "moe_layer_freq": [int(has) for has in self.layers],
        }
        if self.limit is not None:
            from megatron.core.fusions.fused_bias_geglu import quick_gelu

            options |= {"activation_func": quick_gelu, "activation_func_clamp_value": self.limit, "glu_linear_offset": 1.0}
        if not self.names.is_sigmoid:
            # Without it the softmax is over the chosen experts, which is softmax, choice and division by their sum.
            return options | {"moe_router_pre_softmax": not self.is_normalized}
        if self.num_groups > 1:
            options |= {"moe_router_num_groups": self.num_groups, "moe_router_group_topk": self.groups_per_token}
        return options | {
            "moe_router_score_function": "sigmoid",
            "moe_router_topk_scaling_factor": self.scaling,
            "moe_router_enable_expert_bias": True,
            "moe_router_bias_update_rate": 0.0,  # the bias stays as it is loaded
            "moe_router_dtype": "fp32",
            "moe_shared_expert_intermediate_size": self.shared_width or None,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentSizes:
    """Of multi-latent attention. query_rank None: queries are made from the hidden states. rotated, kept: numbers of a head's
    query and key, turned by positions and not; value: of a head's value."""

    query_rank: int | None
    rank: int
    rotated: int
    kept: int
    value: int

    def transformer_options(self, rotary: Rotary) -> dict[str, Any]:
        """The scale of the softmax is Megatron's: (0.1 mscale ln(rotary_scaling_factor) + 1) ** 2 / sqrt(kept + rotated)."""
        yarn = rotary.yarn
        mscale = 0.0 if yarn is None or yarn.mscale_all_dim is None else yarn.mscale_all_dim
        return {
            "multi_latent_attention": True,
            "q_lora_rank": self.query_rank,
            "kv_lora_rank": self.rank,
            "qk_head_dim": self.kept,
            "qk_pos_emb_head_dim": self.rotated,
            "v_head_dim": self.value,
            "qk_layernorm": True,
            "rope_type": "rope",
            "rotary_base": rotary.base,
            "rotary_scaling_factor": 1.0 if yarn is None else yarn.factor,
            "mscale": mscale,  # Megatron-Core 0.13 takes this one
            "mscale_all_dim": mscale,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class HFModel:
    """A checked folder. kept: the tensors of layers beyond num_layers, which predict further tokens. They are not trained, and
    written as they were read. window: how many keys a query sees, its own too, in the layers where has_window. is_packed: the
    weights of experts are MXFP4."""

    folder: Path
    architecture: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    head_size: int
    ffn_hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    tie_embeddings: bool
    has_qkv_bias: bool
    has_qk_norm: bool
    has_biases: bool
    has_sinks: bool
    window: int | None
    has_window: tuple[bool, ...]
    is_packed: bool
    rotary: Rotary
    norm_eps: float
    experts: ExpertSizes | None
    latent: LatentSizes | None
    kept: tuple[str, ...]

    @property
    def num_experts(self) -> int:
        return 0 if self.experts is None else self.experts.count

    @property
    def experts_per_token(self) -> int:
        return 0 if self.experts is None else self.experts.per_token

    @property
    def notes(self) -> list[str]:
        """For the start of a run."""
        notes = []
        if self.kept:
            notes.append(
                f"--hf-checkpoint {self.folder}: {len(self.kept)} tensors of layers that predict further tokens "
                "(num_nextn_predict_layers) are not trained, and --save-hf writes them as they are"
            )
        if self.is_packed:
            notes.append(
                f"--hf-checkpoint {self.folder}: the MXFP4 weights of experts are unpacked, exactly, and trained; --save-hf writes "
                "them unpacked, without quantization_config"
            )
        return notes

    @property
    def has_stacked_experts(self) -> bool:
        return self.experts is not None and self.experts.names.is_stacked

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and self.experts.layers[layer]

    def transformer_options(self) -> dict[str, Any]:
        """Keywords of transformer_config."""
        return {
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
            "add_bias_linear": self.has_biases,
            "add_qkv_bias": self.has_qkv_bias,
            "qk_layernorm": self.has_qk_norm,
            **({"softmax_type": "learnable"} if self.has_sinks else {}),
            **self._window_options(),
            **({} if self.experts is None else self.experts.transformer_options()),
            **({} if self.latent is None else self.latent.transformer_options(self.rotary)),
        }

    def _window_options(self) -> dict[str, Any]:
        if self.window is None:
            return {}
        # Megatron counts the keys before a query's own.
        return {"window_size": (self.window - 1, 0), "window_attn_skip_freq": [int(has) for has in self.has_window]}


def architecture_of(fields: Fields) -> str:
    """Raises ConfigError for one that is not declared here."""
    names = fields.items("architectures", str)
    known = [name for name in names if name in ARCHITECTURES]
    if not known:
        raise ConfigError(
            f"{fields.place}: architectures={names} is not known here; known are {', '.join(ARCHITECTURES)}. Train others in "
            "miles, slime or verl, which load them through Megatron-Bridge or mbridge"
        )
    return known[0]


def described(folder: Path, architecture: str, fields: Fields, tensors: Collection[str]) -> HFModel:
    """tensors: of the weights. A layer, or an expert of a layer, has one at least: no list is longer than that.

    Raises ConfigError, with a line for each setting that makes another model of the same tensors, and for sizes that do not fit.
    """
    traits = ARCHITECTURES[architecture]
    allows_packed = traits.experts is not None and traits.experts.is_stacked
    problems = not_computed(fields, traits.must_be, has_windows=traits.has_windows, allows_packed=allows_packed)
    try:
        model = _sizes(folder, architecture, fields, tensors)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    return model


def is_packed(fields: Fields) -> bool:
    """Whether the weights are MXFP4, by the config alone."""
    return fields.table(QUANTIZATION).content.get("quant_method") == "mxfp4"


def not_computed(
    fields: Fields, must_be: Mapping[str, tuple[Any, ...]], *, has_windows: bool = False, allows_packed: bool = False
) -> list[str]:
    known = {"full_attention", "sliding_attention"} if has_windows else {"full_attention"}
    problems = [
        f"{fields.place}: {name}={fields.content[name]!r} is not computed here; it must be {allowed[0]!r}"
        for name, allowed in {**MUST_BE, **must_be}.items()
        if name in fields.content and fields.content[name] not in allowed
    ]
    layers = set(fields.items("layer_types", str)) - known
    if layers:
        problems.append(
            f"{fields.place}: layer_types has {', '.join(sorted(layers))}; only {' and '.join(sorted(known))} is computed here"
        )
    if fields.has(QUANTIZATION) and not (allows_packed and is_packed(fields)):
        problems.append(
            f"{fields.place}: quantization_config is given, and quantised weights are not trained here: take those before it"
        )
    return problems


def _sizes(folder: Path, architecture: str, fields: Fields, tensors: Collection[str]) -> HFModel:
    traits, num_tensors = ARCHITECTURES[architecture], len(tensors)
    of_weights = f": the weights hold {num_tensors} tensors"
    num_layers = fields.whole("num_hidden_layers", most=max(num_tensors, 1), why=of_weights)
    hidden_size, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    latent = _latent_sizes(fields) if traits.is_latent else None
    groups = heads if latent else fields.whole("num_key_value_heads", heads)
    head_size = hidden_size // heads if latent else fields.whole("head_dim", hidden_size // heads)
    if heads % groups:
        raise ConfigError(f"{fields.place}: num_attention_heads={heads} must be a multiple of num_key_value_heads={groups}")
    if traits.names_its_rotary:
        _check_rotary_is_there(fields)
    window, has_window = _windows(fields, num_layers) if traits.has_windows else (None, ())
    rotary = rotary_of(fields, rotates_a_share=traits.rotates_a_share, is_latent=traits.is_latent)
    rotated = latent.rotated if latent else int(head_size * rotary.percent)
    if rotated % 2 or not rotated:
        raise ConfigError(
            f"{fields.place}: heads of {head_size} numbers, of which positions turn {rotated}: they turn pairs, so it must be even"
        )
    return HFModel(
        folder=folder,
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_attention_heads=heads,
        num_query_groups=groups,
        head_size=head_size,
        ffn_hidden_size=fields.whole("intermediate_size"),
        vocab_size=fields.whole("vocab_size"),
        max_position_embeddings=fields.whole("max_position_embeddings"),
        tie_embeddings=fields.switch("tie_word_embeddings", False),
        has_qkv_bias=_said(fields, traits.has_qkv_bias),
        has_qk_norm=_said(fields, traits.has_qk_norm),
        has_biases=traits.has_biases,
        has_sinks=traits.has_sinks,
        window=window,
        has_window=has_window,
        is_packed=is_packed(fields),
        rotary=rotary,
        norm_eps=fields.number("rms_norm_eps", below=1.0),
        experts=None if traits.experts is None else _expert_sizes(fields, traits.experts, num_layers, num_tensors),
        latent=latent,
        kept=_of_further_layers(fields, num_layers, tensors),
    )


def _check_rotary_is_there(fields: Fields) -> None:
    scalings = [fields.table(name) for name in ("rope_parameters", "rope_scaling")]
    if not any(scaling.content for scaling in scalings) or not any(given.has("rope_theta") for given in (fields, *scalings)):
        raise ConfigError(
            f"{fields.place} has no rope_theta, or neither rope_parameters nor rope_scaling, and what transformers then takes "
            "depends on its release: write the model's own"
        )


def _windows(fields: Fields, num_layers: int) -> tuple[int | None, tuple[bool, ...]]:
    """Left out: every second layer has none, as in transformers."""
    kinds = fields.items("layer_types", str) or [("sliding_attention", "full_attention")[layer % 2] for layer in range(num_layers)]
    if len(kinds) != num_layers:
        raise fields.wrong("layer_types", f"a list of num_hidden_layers={num_layers}")
    has_window = tuple(kind == "sliding_attention" for kind in kinds)
    return (fields.whole("sliding_window"), has_window) if any(has_window) else (None, ())


def _of_further_layers(fields: Fields, num_layers: int, tensors: Collection[str]) -> tuple[str, ...]:
    number = fields.whole("num_nextn_predict_layers", 0, least=0, most=2**10)
    names = tuple(f"model.layers.{layer}." for layer in range(num_layers, num_layers + number))
    return tuple(sorted(name for name in tensors if name.startswith(names)))


def _said(fields: Fields, always_or_field: bool | str) -> bool:
    return always_or_field if isinstance(always_or_field, bool) else fields.switch(always_or_field, False)


def _latent_sizes(fields: Fields) -> LatentSizes:
    return LatentSizes(
        query_rank=fields.whole("q_lora_rank", None),
        rank=fields.whole("kv_lora_rank"),
        rotated=fields.whole("qk_rope_head_dim"),
        kept=fields.whole("qk_nope_head_dim"),
        value=fields.whole("v_head_dim"),
    )


def _expert_sizes(fields: Fields, names: Experts, num_layers: int, num_tensors: int) -> ExpertSizes:
    of_weights = f": the weights hold {num_tensors} tensors"
    # transformers 5 writes num_local_experts for what was num_experts.
    spellings = ("n_routed_experts",) if names.is_sigmoid else ("num_experts", "num_local_experts")
    given = next((name for name in spellings if fields.has(name)), spellings[0])
    count = (
        fields.whole(given, most=MOST_STACKED)
        if names.is_stacked
        else fields.whole(given, most=max(num_tensors, 1), why=of_weights)
    )
    per_token = fields.whole("num_experts_per_tok", most=count)
    is_normalized = names.always_normalized or fields.switch("norm_topk_prob")
    if names.is_sigmoid:
        first = fields.whole("first_k_dense_replace", 0, least=0)
        layers = tuple(layer >= first for layer in range(num_layers))
    else:
        dense, every = set(fields.items("mlp_only_layers", int)), fields.whole("decoder_sparse_step", 1)
        layers = tuple(layer not in dense and (layer + 1) % every == 0 for layer in range(num_layers))
    if sum(layers) * count > num_tensors and not names.is_stacked:
        raise ConfigError(f"{fields.place}: {given}={count} in {sum(layers)} layers{of_weights}")
    if per_token == 1 and is_normalized:
        raise ConfigError(
            f"{fields.place}: num_experts_per_tok=1 with norm_topk_prob=true: the weight of the one expert is always 1, so the "
            "router would not learn, and Megatron-Core refuses it: take a model of 2 experts a token, or without norm_topk_prob"
        )
    sizes = ExpertSizes(
        names=names,
        count=count,
        per_token=per_token,
        width=fields.whole(names.width),
        layers=layers,
        is_normalized=is_normalized,
        limit=float(fields.number("swiglu_limit", 7.0)) if names.is_stacked else None,
    )
    return _with_sigmoids(fields, sizes) if names.is_sigmoid else sizes


def _with_sigmoids(fields: Fields, sizes: ExpertSizes) -> ExpertSizes:
    """Megatron always divides by the sum of the chosen sigmoids. It scores a group by its best per_token / groups_per_token
    experts, transformers by its best two. Experts of other groups are at -inf, and at 0 in transformers 4, which takes one of them
    where a score with its bias is below 0 in a chosen group."""
    num_groups, chosen = fields.whole("n_group", 1), fields.whole("topk_group", 1)
    if not sizes.is_normalized and sizes.per_token > 1:
        raise fields.wrong("norm_topk_prob", "true: Megatron-Core divides sigmoids of several experts by their sum")
    if sizes.count % num_groups or chosen > num_groups:
        raise ConfigError(
            f"{fields.place}: n_group={num_groups} and topk_group={chosen} with n_routed_experts={sizes.count}: groups must be of "
            "one size, and a token takes topk_group of them"
        )
    if chosen == num_groups:
        num_groups = chosen = 1
    if num_groups > 1 and (sizes.per_token != 2 * chosen or sizes.per_token > chosen * (sizes.count // num_groups)):
        raise ConfigError(
            f"{fields.place}: num_experts_per_tok={sizes.per_token} with n_group={num_groups} and topk_group={chosen}: Megatron "
            "scores a group by its best num_experts_per_tok / topk_group experts and transformers by its best 2, so it must be "
            f"{2 * chosen}"
        )
    return replace(
        sizes,
        scaling=float(fields.number("routed_scaling_factor", 1.0)),
        num_groups=num_groups,
        groups_per_token=chosen,
        shared_width=sizes.width * fields.whole("n_shared_experts", 0, least=0),
    )
