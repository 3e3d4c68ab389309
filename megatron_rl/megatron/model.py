"""Builds a GPTModel for any layout, on CPU or CUDA, with weights that do not depend on the layout."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatron_rl.errors import ConfigError
from megatron_rl.layout.groups import Group, resolve_group
from megatron_rl.megatron.attention import PackedAttention, SequenceParallelNorm
from megatron_rl.megatron.cpu import support_latent_attention
from megatron_rl.megatron.installed import expert_replicas_drift
from megatron_rl.megatron.rotary import Rotary
from megatron_rl.validation.experts import drift_problem, expert_problems
from megatron_rl.validation.model_settings import model_problems

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

# Sizes that Megatron has both in parallel_state and in the config, and does not compare.
_SIZES_OF_PARALLEL_STATE = {
    "tensor_model_parallel_size": "get_tensor_model_parallel_world_size",
    "pipeline_model_parallel_size": "get_pipeline_model_parallel_world_size",
    "virtual_pipeline_model_parallel_size": "get_virtual_pipeline_model_parallel_world_size",
    "context_parallel_size": "get_context_parallel_world_size",
}
_SIZES_OF_EXPERTS = {
    "expert_model_parallel_size": "get_expert_model_parallel_world_size",
    "expert_tensor_parallel_size": "get_expert_tensor_parallel_world_size",
}
# A parameter of a layer, or of the layer that Megatron-Core to 0.16 and since 0.17 has in one of multi-token prediction.
_LAYER = re.compile(r"(?:decoder\.layers\.(\d+)|mtp\.layers\.(\d+)\.(transformer_layer|mtp_model_layer))\.(.*)")
# An expert's parameter behind the name of its layer: in SequentialMLP, and in Transformer Engine's grouped products.
_EXPERT = re.compile(r"mlp\.experts\.(?:local_experts\.(\d+)\.(.*)|(linear_fc[12]\.(?:weight|bias))(\d+))")
# The dimension of an expert's parameter that expert-tensor-parallel ranks share; a second layer's bias is whole on each of them.
_EXPERT_SHARDS = {"linear_fc1.weight": 0, "linear_fc1.bias": 0, "linear_fc2.weight": 1, "linear_fc2.bias": None}
_PARAMETER_OF_EXPERT = re.compile(r".*\.(linear_fc[12]\.(?:weight|bias))\d*")
# Names of the norms' parameters here -> in Transformer Engine's layers. Megatron's checkpoints use the latter for both.
_FUSED_NAMES = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
}


def has_transformer_engine() -> bool:
    """Whether Transformer Engine's layers work here."""
    if not torch.cuda.is_available():
        return False
    try:
        import transformer_engine.pytorch  # noqa: F401
    except (ImportError, RuntimeError, OSError):  # PyPI's empty meta package raises RuntimeError, a missing library OSError
        return False
    return True


def transformer_config(*, num_layers: int, hidden_size: int, num_attention_heads: int, **overrides: Any) -> TransformerConfig:
    """Megatron's TransformerConfig with the sizes of parallel_state, without dropout. `overrides` replace these values.

    It also sets the pipeline's dtype (the parameters' dtype; with `bf16=True` both are bfloat16), lets the pipeline send shapes,
    so that micro-batches may differ in length, and overlaps point-to-point calls where interleaved stages need it (check_pipeline).
    Raises ConfigError where an override contradicts parallel_state: Megatron would build one layout and communicate as the other;
    and for biases of experts that ranks share.
    """
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    values = _config_values(overrides)
    kind = MLATransformerConfig if overrides.get("multi_latent_attention") else TransformerConfig
    config = kind(num_layers=num_layers, hidden_size=hidden_size, num_attention_heads=num_attention_heads, **values)
    check_pipeline(config)
    return config


def _config_values(overrides: Mapping[str, Any]) -> dict[str, Any]:
    from megatron.core import parallel_state

    accessors = _SIZES_OF_PARALLEL_STATE | (_SIZES_OF_EXPERTS if overrides.get("num_moe_experts") else {})
    sizes = {name: getattr(parallel_state, accessor)() for name, accessor in accessors.items()}
    problems = [
        f"{name}={overrides[name]}, but parallel_state was initialised with {size}: leave it out, or initialise that"
        for name, size in sizes.items()
        if name in overrides and overrides[name] != size
    ]
    etp = sizes.get("expert_tensor_parallel_size", 1)
    if etp > 1 and overrides.get("add_bias_linear"):
        problems.append(
            f"add_bias_linear=True with experts and expert_tensor_parallel_size={etp}: each of these ranks would add biases, and "
            "Megatron-Core refuses it; initialise parallel_state with expert_tensor_parallel_size=1, or set add_bias_linear=False"
        )
    if problems:
        raise ConfigError(problems)
    half_precision = {"bf16": torch.bfloat16, "fp16": torch.float16}
    dtypes = [dtype for name, dtype in half_precision.items() if overrides.get(name)]
    params_dtype = overrides.get("params_dtype", dtypes[0] if dtypes else torch.float32)
    is_interleaved = (sizes["virtual_pipeline_model_parallel_size"] or 1) > 1
    return {
        **sizes,
        "params_dtype": params_dtype,
        "pipeline_dtype": params_dtype,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": not torch.cuda.is_available(),
        # Needs apex or Transformer Engine, on CUDA.
        "gradient_accumulation_fusion": False,
        "variable_seq_lengths": sizes["pipeline_model_parallel_size"] > 1,
        # The default dispatcher refuses variable_seq_lengths, also in models without experts.
        "moe_token_dispatcher_type": "alltoall",
        # GPT-2's 0.02 is for hidden sizes of 768 and more; a hidden size of 64 learns faster with this value.
        "init_method_std": 0.05,
        "overlap_p2p_comm": is_interleaved,
        "batch_p2p_comm": not is_interleaved,
        # Megatron refuses experts with biases on expert-tensor-parallel ranks.
        **({"add_bias_linear": False} if overrides.get("num_moe_experts") else {}),
        **overrides,
    }


def check_pipeline(config: TransformerConfig) -> None:
    """Raises ConfigError for interleaved stages without overlapped point-to-point calls, where that gives an error.

    With two pipeline ranks the previous and the next rank are the same: Megatron's default calls match sends with the wrong
    receives, and the gradient is wrong without an error. With more ranks the default calls hang (on gloo) if shapes are sent too.
    """
    size, stages = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size or 1
    if stages == 1 or (config.overlap_p2p_comm and not config.batch_p2p_comm):
        return
    if size == 2 or config.variable_seq_lengths:
        result = "gives silently wrong gradients" if size == 2 else "and variable_seq_lengths=True hangs"
        raise ConfigError(
            f"pipeline_model_parallel_size={size} with virtual_pipeline_model_parallel_size={stages} {result} where "
            f"overlap_p2p_comm={config.overlap_p2p_comm} and batch_p2p_comm={config.batch_p2p_comm}: set "
            "overlap_p2p_comm=True and batch_p2p_comm=False, or use one stage per rank"
        )


def gpt_layer_spec(
    config: TransformerConfig, *, use_transformer_engine: bool = True, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """This stage's layers: Transformer Engine's where it works and may be used, else Megatron's with PackedAttention."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    if use_transformer_engine and has_transformer_engine():
        return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=config.normalization, vp_stage=vp_stage)
    for layer in block.layer_specs:
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = PackedAttention
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = SequenceParallelNorm
        if config.multi_latent_attention:
            _whole_down_projections(attention)
        if config.qk_layernorm and config.multi_latent_attention:
            attention.q_layernorm = attention.kv_layernorm = SequenceParallelNorm
        elif config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = SequenceParallelNorm
    block.layer_norm = SequenceParallelNorm
    return block


def mtp_block_spec(
    config: TransformerConfig, *, use_transformer_engine: bool = True, vp_stage: int | None = None
) -> Any:  # MultiTokenPredictionBlockSubmodules | None
    """The layers of multi-token prediction, of the kind of the decoder's last; None without any, and on other stages."""
    if not config.mtp_num_layers:
        return None
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    layers = gpt_layer_spec(config, use_transformer_engine=use_transformer_engine, vp_stage=vp_stage)
    is_of_engine = use_transformer_engine and has_transformer_engine()
    block = get_gpt_mtp_block_spec(config, layers, use_transformer_engine=is_of_engine, vp_stage=vp_stage)
    if block is not None and not is_of_engine:
        for layer in block.layer_specs:
            layer.submodules.enorm = layer.submodules.hnorm = layer.submodules.layer_norm = SequenceParallelNorm
    return block


def _whole_down_projections(attention: Any) -> None:
    """Each tensor-parallel rank holds the whole down projections of multi-latent attention, as in Transformer Engine's layers.

    Megatron's own layers shard them and gather the result. The backward of the gather gives a rank the gradient of its own heads,
    and the gradient of the rotary key, which all heads share, misses the other ranks' heads.
    """
    from megatron.core.post_training.modelopt.layers import Linear

    support_latent_attention()
    attention.linear_q_down_proj = attention.linear_kv_down_proj = Linear


def build_gpt_model(
    config: TransformerConfig,
    *,
    vocab_size: int,
    max_sequence_length: int,
    vp_stage: int | None = None,
    tie_embeddings: bool = False,
    seed: int | None = 0,
    rotary: Rotary = Rotary(),  # noqa: B008  # frozen
    use_transformer_engine: bool = True,
) -> GPTModel:
    """This pipeline stage's GPTModel with rotary positions. Its weights are equal in every tp, pp, vpp and expert layout.

        parameter = config.init_method_std * z(seed, global name) + (1 for the weight of a norm, else 0)

    with z standard normal. Biases and norms are random too, so that a gradient that a layout loses can be seen. Call it after
    model_parallel_cuda_manual_seed. seed None: the weights are Megatron's, for a caller that loads some.
    Raises ConfigError for a vp_stage or vocab_size that does not fit the layout, for a rotary that the model cannot have, for
    expert_problems, model_problems and drift_problem.
    """
    _check_layout(config, vocab_size, vp_stage)
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel

    stage = {} if vp_stage is None else {"vp_stage": vp_stage}
    virtual = {"ignore_virtual": vp_stage is None, **stage}
    model = GPTModel(
        config=config,
        transformer_layer_spec=gpt_layer_spec(config, use_transformer_engine=use_transformer_engine, vp_stage=vp_stage),
        vocab_size=vocab_size,
        max_sequence_length=max_sequence_length,
        pre_process=parallel_state.is_pipeline_first_stage(**virtual),
        post_process=parallel_state.is_pipeline_last_stage(**virtual),
        share_embeddings_and_output_weights=tie_embeddings,
        mtp_block_spec=mtp_block_spec(config, use_transformer_engine=use_transformer_engine, vp_stage=vp_stage),
        **rotary.model_options(config),
        **stage,
    )
    rotary.put_into(model)
    _mend_biases_of_experts(model)
    if seed is None:
        return model
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            normal = layout_independent_normal(model, name, parameter, seed=seed)
            parameter.copy_(mean + config.init_method_std * normal)
    return model


def _mend_biases_of_experts(model: GPTModel) -> None:
    """Of the second layer of each expert, which Megatron's own layers take for a parameter that tensor-parallel ranks share.

    With sequence parallelism finalize_model_grads would add the gradients of different experts, and the norm of gradients would
    miss those of all ranks but the first. Megatron also adds the bias in place to the layer's output, a view, which autograd
    refuses: it gets a tensor of its own.
    """
    for name, module in model.named_modules():
        if is_of_expert(name) and name.endswith("linear_fc2") and getattr(module, "bias", None) is not None:
            module.register_forward_hook(lambda layer, inputs, answer: (answer[0].clone(), *answer[1:]))
            is_parallel = vars(module.weight).get("tensor_model_parallel", False)
            vars(module.bias).update(sequence_parallel=False, tensor_model_parallel=is_parallel)


def _check_layout(config: TransformerConfig, vocab_size: int, vp_stage: int | None) -> None:
    check_pipeline(config)
    num_stages = config.virtual_pipeline_model_parallel_size
    if (vp_stage is None) != (num_stages is None):
        raise ConfigError(
            f"vp_stage={vp_stage} with virtual_pipeline_model_parallel_size={num_stages}: build one model for each "
            "of the rank's interleaved stages, with vp_stage 0, 1, ...; without interleaving leave vp_stage out"
        )
    tp_size = resolve_group(None, "tp").size()
    if vocab_size % tp_size != 0:
        raise ConfigError(
            f"vocab_size={vocab_size} must be a multiple of tensor_model_parallel_size={tp_size}: round it up, and pass "
            "the size without padding to the loss as vocab_size"
        )
    # transformer_impl='local' would build other layers: see _whole_down_projections and _mend_biases_of_experts.
    settings = vars(config) | {"transformer_impl": None}
    problems = [*expert_problems(settings), *model_problems(settings, has_own_groups=True)]
    if settings.get("experimental_attention_variant"):
        problems.append(
            f"experimental_attention_variant={settings['experimental_attention_variant']!r}: build_gpt_model has no such layers "
            "and would build plain ones; remove it"
        )
    drift = drift_problem(settings)
    if drift is not None and expert_replicas_drift():
        problems.append(drift)
    if config.num_moe_experts and settings.get("moe_use_legacy_grouped_gemm"):  # up to Megatron-Core 0.16
        problems.append(
            "moe_use_legacy_grouped_gemm=True holds all experts in one tensor, and this package names each expert's weights; "
            "remove it: Transformer Engine's grouped products are used where moe_grouped_gemm=True"
        )
    if problems:
        raise ConfigError(problems)


def global_parameter_name(model: GPTModel, name: str) -> str:
    """A parameter's name in the whole model: layers and experts have global numbers, tied weights and fused norms one name."""
    if name == "output_layer.weight" and model.share_embeddings_and_output_weights:
        return "embedding.word_embeddings.weight"
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return name
    number, mtp_layer, kind, rest = layer.groups()
    if mtp_layer is None:
        module = model.decoder.layers[int(number)]
        prefix = f"decoder.layers.{module.layer_number - 1}"
    else:
        module, prefix = getattr(model.mtp.layers[int(mtp_layer)], kind), f"mtp.layers.{mtp_layer}.transformer_layer"
    for own, fused in _FUSED_NAMES.items():
        place, _, layer_norm = fused.rpartition(".")
        # A mixture of experts has no mlp.linear_fc1, and multi-latent attention no linear_qkv: the norm before them is by itself.
        if rest.startswith(own) and _has_module(module, place):
            rest = rest.replace(own, f"{place}.{layer_norm}")
    expert = _EXPERT.fullmatch(rest)
    if expert is not None:
        number, name_in_expert, grouped, number_in_group = expert.groups()
        indices = module.mlp.local_expert_indices
        rest = f"mlp.experts.{indices[int(number or number_in_group)]}.{name_in_expert or grouped}"
    return f"{prefix}.{rest}"


def _has_module(module: Any, name: str) -> bool:
    for part in name.split("."):
        if not hasattr(module, part):
            return False
        module = getattr(module, part)
    return True


def is_of_expert(name: str) -> bool:
    """Whether a parameter, by its own or its global name, belongs to one expert: not to the router, not to a shared expert."""
    return ".mlp.experts." in name


def sharding_of(name: str, parameter: Tensor) -> tuple[int | None, Group]:
    """The dimension that is sharded, None where each rank holds the whole, and the group of the shards.

    Of experts by their names: Megatron does not tell Transformer Engine that an expert is sharded, and the mark that it then gives
    to the weight of the second layer has the wrong dimension.
    """
    expert_match = _PARAMETER_OF_EXPERT.fullmatch(name) if is_of_expert(name) else None
    if expert_match is not None:
        return _EXPERT_SHARDS[expert_match[1]], resolve_group(None, "expert_tp")
    is_sharded = vars(parameter).get("tensor_model_parallel", False)  # Megatron's mark
    return (vars(parameter)["partition_dim"] if is_sharded else None), resolve_group(None, "tp")


def halves_of(name: str, config: TransformerConfig) -> int:
    """2 for the first layer of a gated MLP, also of experts: it holds [gate, up] on each rank, each half sharded by itself."""
    return 2 if config.gated_linear_unit and "linear_fc1" in name else 1


def layout_independent_normal(
    model: GPTModel,
    name: str,  # as model.named_parameters() gives it
    parameter: Tensor,
    *,
    seed: int = 0,
) -> Tensor:  # the shape of parameter, float32, CPU
    """This rank's shard of standard normal numbers. They depend only on (seed, global name, whole shape).

    A gradient can be projected on them: the sum of gradient * normal over all shards is the same number in every layout.
    """
    digest = hashlib.blake2b(f"{seed}/{global_parameter_name(model, name)}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    dim, group = sharding_of(name, parameter)
    if dim is None:
        return torch.randn(parameter.shape, generator=generator)
    shape = list(parameter.shape)
    halves = halves_of(name, model.config)
    shape[dim : dim + 1] = [halves, shape[dim] // halves * group.size()]
    shard = torch.randn(shape, generator=generator).chunk(group.size(), dim + 1)[group.rank()]
    return shard.reshape(parameter.shape)


def find_gpt_model(model: nn.Module | type[nn.Module]) -> Any:
    """The GPTModel inside DDP, Float16Module and similar wrappers."""
    found: Any = model
    while hasattr(found, "module"):
        found = found.module
    return found


def find_output_layer(model: nn.Module) -> Any:  # nn.Module | None
    """The layer that computes logits, found by its attribute inside DDP, Float16Module and similar wrappers; None on other stages.

    Not by class: Megatron-Core 0.19 deprecates GPTModel, and a HybridModel has the same head.
    """
    found: nn.Module | None = model
    while found is not None:
        if hasattr(found, "output_layer"):
            return found.output_layer
        children = dict(found.named_children())
        found = children.get("module", children.get("language_model"))
    return None


def model_config_of(model: Any) -> TransformerConfig:
    """The model's config, found inside DDP, Float16Module and similar wrappers."""
    while not hasattr(model, "config"):
        model = model.module
    return model.config
