"""A small GPTModel in any layout, and its logits and gradients put together again. No test itself."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_rl.layout.context_parallel import local_positions
from megatron_rl.layout.groups import resolve_groups
from megatron_rl.megatron.model import build_gpt_model, transformer_config

VOCABULARY, MAX_LENGTH = 48, 64
# GPT-2's kind of layer, and Llama's with query norms: between them every sort of parameter that a layout shards.
CLASSIC = {"normalization": "LayerNorm", "add_bias_linear": True}
MODERN = {
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "num_query_groups": 2,
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "qk_layernorm": True,
}
# Bounds of the documents of each micro-batch; all lengths are multiples of 8, which cp 4 needs at most.
PACKS = ([0, 16, 24, 40], [0, 8, 24])
TP, PP, CP, VPP = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "virtual_pipeline_model_parallel_size",
)


@dataclass(frozen=True)
class Case:
    world_size: int
    model_parallel: dict[str, int] = field(default_factory=dict)
    style: dict = field(default_factory=lambda: MODERN)
    num_layers: int = 2
    num_microbatches: int = 2
    is_packed: bool = False
    sequence_parallel: bool = False
    tie_embeddings: bool = False
    dtype: torch.dtype = torch.float64

    def on_one_rank(self) -> Case:
        return replace(self, world_size=1, model_parallel={}, sequence_parallel=False)


def small_config(num_layers=2, **overrides):
    values = {"hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 64, **overrides}
    return transformer_config(num_layers=num_layers, **values)


def micro_batch(case: Case, index: int) -> tuple[torch.Tensor, list[int] | None, torch.Tensor]:
    """Tokens [rows, length], document bounds where packed, and the loss's factors [rows, length, vocabulary]."""
    generator = torch.Generator().manual_seed(index)
    bounds = PACKS[index % 2] if case.is_packed else None
    shape = (1, bounds[-1]) if case.is_packed else (2, 16 if index % 2 else 24)
    tokens = torch.randint(0, VOCABULARY, shape, generator=generator)
    return tokens, bounds, torch.randn(*shape, VOCABULARY, generator=generator, dtype=torch.float64).to(case.dtype)


def model_inputs(tokens, bounds):
    """This cp rank's columns, and Megatron's arguments for them."""
    cp_group = resolve_groups().cp
    edges = bounds or [0, tokens.shape[1]]
    columns = torch.cat(
        [start + local_positions(end - start, cp_group.rank(), cp_group.size()) for start, end in itertools.pairwise(edges)]
    )
    arguments = {"position_ids": columns[None].expand(len(tokens), -1), "attention_mask": None}
    if bounds is not None:
        from megatron.core.packed_seq_params import PackedSeqParams

        cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
        longest = max(end - start for start, end in itertools.pairwise(bounds))
        arguments["packed_seq_params"] = PackedSeqParams("thd", cu_seqlens, cu_seqlens, max_seqlen_q=longest, max_seqlen_kv=longest)
    return columns, {"input_ids": tokens[:, columns], **arguments}


def run_case(rank, case: Case):
    """Logits and gradients of this rank: one pass through Megatron's schedule, then the sums of DDP and finalize."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    groups = resolve_groups()
    stages = case.model_parallel.get(VPP)
    config = small_config(case.num_layers, sequence_parallel=case.sequence_parallel, pipeline_dtype=case.dtype, **case.style)
    models = [
        build_gpt_model(
            config, vocab_size=VOCABULARY, max_sequence_length=MAX_LENGTH, vp_stage=stage, tie_embeddings=case.tie_embeddings
        ).to(case.dtype)
        for stage in (range(stages) if stages else [None])
    ]
    logits_of = {}

    def forward_step(iterator, model):
        index = next(iterator)
        tokens, bounds, factors = micro_batch(case, index)
        columns, arguments = model_inputs(tokens, bounds)
        local_factors = factors[:, columns].chunk(groups.tp.size(), -1)[groups.tp.rank()]

        def loss_function(logits):
            logits_of[index] = (columns, logits.detach().clone())
            # The schedule multiplies a 2-tuple's loss with cp / M.
            loss = (local_factors * torch.tanh(logits)).sum() * case.num_microbatches / groups.cp.size()
            return loss, {"loss": loss.detach().clone()}

        return model(**arguments), loss_function

    iterators = [iter(range(case.num_microbatches)) for _ in models]
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if stages else iterators[0],
        model=models if stages else models[0],
        num_microbatches=case.num_microbatches,
        seq_length=1,  # not used: shapes travel along
        micro_batch_size=1,
        forward_only=False,
    )
    gradients = {}
    for model in models:
        for name, parameter in model.named_parameters():
            gradients[whole_name(model, name)] = (summed_gradient(name, parameter, groups), shard_dim(parameter))
    return groups.tp.rank(), groups.cp.rank(), gradients, logits_of


def summed_gradient(name, parameter, groups):
    gradient = parameter.grad.clone()
    dist.all_reduce(gradient, group=groups.cp)
    is_marked = "sequence_parallel" in vars(parameter) and parameter.sequence_parallel
    if is_marked or "q_layernorm" in name or "k_layernorm" in name:
        dist.all_reduce(gradient, group=groups.tp)
    return gradient


def shard_dim(parameter):
    is_sharded = "tensor_model_parallel" in vars(parameter) and parameter.tensor_model_parallel
    return parameter.partition_dim if is_sharded else None


def whole_name(model, name):
    layer = re.match(r"(decoder\.layers\.)(\d+)(\..*)", name)
    if not layer:
        return name.replace("output_layer", "embedding.word_embeddings") if model.share_embeddings_and_output_weights else name
    return f"{layer[1]}{model.decoder.layers[int(layer[2])].layer_number}{layer[3]}"


def assembled_gradients(answers, is_gated):
    """Whole gradients by name: shards side by side, tied copies on two stages added, replicas checked to be equal."""
    shards = {}
    for tp_rank, cp_rank, gradients, _ in answers:
        for name, (gradient, dim) in gradients.items() if cp_rank == 0 else ():
            of_rank = shards.setdefault((name, dim), {})
            of_rank[tp_rank] = of_rank[tp_rank] + gradient if tp_rank in of_rank else gradient
    whole = {}
    for (name, dim), of_rank in shards.items():
        parts = [of_rank[tp_rank] for tp_rank in sorted(of_rank)]
        if dim is None:
            for part in parts[1:]:
                torch.testing.assert_close(part, parts[0])
            whole[name] = parts[0]
        elif is_gated and "linear_fc1" in name:  # a rank holds [gate, up] of its own columns
            whole[name] = torch.cat([part.chunk(2)[half] for half in (0, 1) for part in parts])
        else:
            whole[name] = torch.cat(parts, dim)
    return whole


def assembled_logits(answers, index):
    """[rows, length, vocabulary] of one micro-batch, from the ranks of the last stage."""
    shards = {(cp_rank, tp_rank): logits_of[index] for tp_rank, cp_rank, _, logits_of in answers if index in logits_of}
    cp_ranks, tp_ranks = ({key[axis] for key in shards} for axis in (0, 1))
    columns = torch.cat([shards[cp_rank, 0][0] for cp_rank in cp_ranks])
    logits = torch.cat([torch.cat([shards[cp_rank, tp_rank][1] for tp_rank in tp_ranks], -1) for cp_rank in cp_ranks], 1)
    return logits[:, columns.argsort()]
