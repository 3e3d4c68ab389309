"""build_gpt_model: logits and gradients on every layout are those of one rank, and that rank's those of independent references."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, field, replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers import error_of, pool_of
from test_attention import rows_of_rank
from trainer_cases import CP, PP, TP, VPP

from megatron_rl.errors import ConfigError
from megatron_rl.layout.groups import resolve_groups
from megatron_rl.megatron.model import build_gpt_model, find_output_layer, transformer_config

pytestmark = pytest.mark.megatron

VOCABULARY = 48
SIZES = {"vocab_size": VOCABULARY, "max_sequence_length": 64}
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
    columns = rows_of_rank(bounds or [0], tokens.shape[1], cp_group.rank(), cp_group.size())
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

    groups, stages, logits_of = resolve_groups(), case.model_parallel.get(VPP), {}
    config = small_config(case.num_layers, sequence_parallel=case.sequence_parallel, pipeline_dtype=case.dtype, **case.style)
    sizes = {**SIZES, "tie_embeddings": case.tie_embeddings}
    models = [build_gpt_model(config, vp_stage=stage, **sizes).to(case.dtype) for stage in (range(stages) if stages else [None])]

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
        **{"forward_step_func": forward_step, "num_microbatches": case.num_microbatches, "forward_only": False},
        **{"data_iterator": iterators if stages else iterators[0], "model": models if stages else models[0]},
        **{"seq_length": 1, "micro_batch_size": 1},  # not used: shapes travel along
    )
    named = [(whole_name(model, name), name, parameter) for model in models for name, parameter in model.named_parameters()]
    gradients = {whole: (summed_gradient(name, parameter, groups), shard_dim(parameter)) for whole, name, parameter in named}
    return groups.tp.rank(), groups.cp.rank(), gradients, logits_of


def summed_gradient(name, parameter, groups):
    gradient = parameter.grad.clone()
    dist.all_reduce(gradient, group=groups.cp)
    if vars(parameter).get("sequence_parallel") or "q_layernorm" in name or "k_layernorm" in name:
        dist.all_reduce(gradient, group=groups.tp)
    return gradient


def shard_dim(parameter):
    return parameter.partition_dim if vars(parameter).get("tensor_model_parallel") else None


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


pool = pool_of(4)


CASES = [
    pytest.param(Case(2, {TP: 2}, CLASSIC, tie_embeddings=True), id="TP2 tied"),
    pytest.param(Case(2, {TP: 2}, sequence_parallel=True), id="TP2+SP"),
    pytest.param(Case(2, {TP: 2}, CLASSIC, is_packed=True, sequence_parallel=True), id="TP2+SP packed, biases"),
    pytest.param(Case(4, {TP: 4}, CLASSIC), id="TP4"),
    pytest.param(Case(2, {PP: 2}), id="PP2, micro-batches of unlike length"),
    pytest.param(Case(2, {PP: 2}, CLASSIC, is_packed=True, tie_embeddings=True), id="PP2 packed tied"),
    pytest.param(Case(2, {PP: 2, VPP: 2}, num_layers=4, num_microbatches=4, is_packed=True), id="PP2xVPP2 overlapped"),
    pytest.param(Case(4, {PP: 4, VPP: 2}, num_layers=8, num_microbatches=4), id="PP4xVPP2"),
    pytest.param(Case(4, {PP: 2, TP: 2}, sequence_parallel=True), id="PP2xTP2+SP, padded"),
    pytest.param(Case(4, {CP: 4}, CLASSIC), id="FB-21 CP4"),
    pytest.param(Case(4, {CP: 4}, is_packed=True), id="FB-28 CP4 packed"),
    pytest.param(Case(4, {CP: 2, TP: 2}, is_packed=True, sequence_parallel=True), id="FB-28 CP2xTP2+SP packed"),
    pytest.param(Case(4, {CP: 2, PP: 2}, is_packed=True), id="CP2xPP2 packed"),
    pytest.param(Case(2, {TP: 2}, dtype=torch.float32), id="TP2 in float32"),
]


@pytest.fixture(scope="module")
def on_one_rank(pool):
    """The answer to a case that is on one rank, computed once, and all of them without another layout in between."""
    cases = {repr(case := row.values[0].on_one_rank()): case for row in CASES}
    return {name: pool.run(run_case, case, world_size=1) for name, case in cases.items()}


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_are_those_of_one_rank(pool, on_one_rank, case):
    """FB-03, FB-21: in float64, so that a step which quietly computes in float32 shows as well as a wrong sum."""
    tolerance = {"rtol": 1e-9, "atol": 1e-10} if case.dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-4}
    is_gated = case.style is MODERN
    expected = on_one_rank[repr(case.on_one_rank())]
    actual = pool.run(run_case, case, world_size=case.world_size, **case.model_parallel)
    for index in range(case.num_microbatches):
        torch.testing.assert_close(assembled_logits(actual, index), assembled_logits(expected, index), **tolerance)
    whole = assembled_gradients(expected, is_gated)
    assert all(gradient.abs().max() > 1e-3 for gradient in whole.values())  # a zero would hide a lost gradient
    torch.testing.assert_close(assembled_gradients(actual, is_gated), whole, **tolerance)


def run_weights(rank, seed, tie_embeddings):
    model = build_gpt_model(small_config(**CLASSIC), seed=seed, tie_embeddings=tie_embeddings, **SIZES)
    return {whole_name(model, name): parameter.detach() for name, parameter in model.named_parameters()}


def test_weights_depend_on_seed_and_name_alone(pool):
    """Catches layers, or tied copies, that start alike or unlike because of where they are built."""
    (first,) = pool.run(run_weights, 0, False, world_size=1)
    (again,) = pool.run(run_weights, 0, False, world_size=1)
    (other,) = pool.run(run_weights, 1, False, world_size=1)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)
    assert not torch.equal(first["decoder.layers.1.mlp.linear_fc1.weight"], first["decoder.layers.2.mlp.linear_fc1.weight"])
    stages = pool.run(run_weights, 0, True, world_size=2, **{PP: 2})
    assert torch.equal(stages[0]["embedding.word_embeddings.weight"], stages[1]["embedding.word_embeddings.weight"])
    weight = first["embedding.word_embeddings.weight"]
    assert 0.045 < weight.std().item() < 0.055  # init_method_std
    assert abs(first["decoder.final_layernorm.weight"].mean().item() - 1) < 0.05


def interleaved_on_rank(rank, settings):
    """Of each settings of eight layers: the two p2p flags that the configuration chose, or what it says."""

    def flags_of(overrides):
        config = small_config(8, **overrides)
        return config.overlap_p2p_comm, config.batch_p2p_comm

    return [error_of(lambda given=given: flags_of(given)) or flags_of(given) for given in settings]


DEFAULT_P2P = {"overlap_p2p_comm": False, "batch_p2p_comm": True}


def test_interleaved_stages_send_shapes_with_overlapped_p2p_only(pool):
    """Megatron's default calls give a gradient norm of 1312 for 2.42 on two ranks, and hang beyond when shapes travel."""
    settings = [DEFAULT_P2P, {**DEFAULT_P2P, "variable_seq_lengths": False}]
    for message, of_one_shape in pool.run(interleaved_on_rank, settings, world_size=4, **{PP: 4, VPP: 2}):
        assert "variable_seq_lengths=True hangs where overlap_p2p_comm=False and batch_p2p_comm=True" in message
        assert of_one_shape == (False, True)
    settings = [{}, DEFAULT_P2P, {"overlap_p2p_comm": False}, {"batch_p2p_comm": True}]
    for by_default, *messages in pool.run(interleaved_on_rank, settings, world_size=2, **{PP: 2, VPP: 2}):
        assert by_default == (True, False)
        for message in messages:
            assert "silently wrong gradients" in message and "set overlap_p2p_comm=True and batch_p2p_comm=False" in message
    assert pool.run(interleaved_on_rank, [DEFAULT_P2P], world_size=2, **{PP: 2}) == [[(False, True)]] * 2


def build_refusals(rank):
    messages = []
    for changes, arguments in (
        ({}, {"vocab_size": VOCABULARY + 1}),
        ({"expert_model_parallel_size": 2, "num_moe_experts": 4}, {}),
        ({}, {"vp_stage": 0}),
        ({VPP: 2}, {}),
        ({"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2, **DEFAULT_P2P}, {"vp_stage": 0}),
    ):
        config = small_config()
        vars(config).update(changes)
        with pytest.raises(ConfigError) as caught:
            build_gpt_model(config, **{**SIZES, **arguments})
        messages.append(str(caught.value))
    with pytest.raises(ConfigError) as caught:
        small_config(tensor_model_parallel_size=1, context_parallel_size=4)
    return [*messages, *caught.value.problems]


def test_what_no_layout_can_build_is_refused_with_the_remedy(pool):
    """Catches a size that config and parallel_state disagree on, and weights that would depend on the layout."""
    expected = [
        "vocab_size=49 must be a multiple of tensor_model_parallel_size=2: round it up",
        "tensor_model_parallel_size=2 with experts needs sequence_parallel",
        "vp_stage=0 with virtual_pipeline_model_parallel_size=None",
        "vp_stage=None with virtual_pipeline_model_parallel_size=2: build one model for each",
        "silently wrong gradients",
        "tensor_model_parallel_size=1, but parallel_state was initialised with 2",
        "context_parallel_size=4, but parallel_state was initialised with 1",
    ]
    messages = pool.run(build_refusals, world_size=2, **{TP: 2})[0]
    for message, part in zip(messages, expected, strict=True):
        assert part in message


def heads(rank):
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    config = small_config(bf16=True)
    model = build_gpt_model(config, **SIZES)
    wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(), Float16Module(config, model))
    head = find_output_layer(wrapped)
    return head is not None and head is model.output_layer, head is None


def test_the_output_layer_is_found_by_its_attribute_through_wrappers(pool):
    """Catches a search by class, which ends with GPTModel, and a first stage that answers with something else."""
    assert pool.run(heads, world_size=2, **{PP: 2}) == [(False, True), (True, False)]

    class Hybrid(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.output_layer = torch.nn.Linear(2, 3)

    wrapper = torch.nn.ModuleDict({"language_model": Hybrid()})
    assert find_output_layer(wrapper) is wrapper["language_model"].output_layer
