"""build_gpt_model: independent references for one rank, precision, weights, the head, and what no layout can build."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from gpt_cases import CLASSIC, MAX_LENGTH, MODERN, PACKS, PP, TP, VOCABULARY, VPP, model_inputs, shard_dim, small_config, whole_name

from megatron_rl.errors import ConfigError
from megatron_rl.layout.groups import resolve_groups
from megatron_rl.megatron.model import build_gpt_model, find_output_layer, layout_independent_normal
from megatron_rl.testing.ranks import RankPool

pytestmark = pytest.mark.megatron


@pytest.fixture(scope="module")
def pool():
    with RankPool(4) as pool:
        yield pool


def one_model(**overrides):
    config = small_config(**overrides)
    return build_gpt_model(config, vocab_size=VOCABULARY, max_sequence_length=MAX_LENGTH)


def logits_and_gradients(model, tokens, bounds=None, attention_mask=None):
    arguments = model_inputs(tokens, bounds)[1]
    logits = model(**{**arguments, "attention_mask": attention_mask})
    factors = torch.linspace(-1, 1, VOCABULARY, dtype=logits.dtype)
    gradients = torch.autograd.grad((factors * torch.tanh(logits)).sum(), list(model.parameters()))
    return logits.detach(), gradients


def run_stock_attention(rank):
    """Our layers and Megatron's own at one rank: the same weights, the same causal batch."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    tokens = torch.randint(0, VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(0))
    model = one_model(**CLASSIC).double()
    ours = logits_and_gradients(model, tokens)
    for layer in model.decoder.layers:
        attention = layer.self_attention
        attention.core_attention = DotProductAttention(
            model.config, layer.layer_number, attention.attn_mask_type, attention.attention_type
        )
    future = torch.ones(16, 16, dtype=torch.bool).triu(1)[None, None]
    return ours, logits_and_gradients(model, tokens, attention_mask=future)


def test_one_rank_equals_megatron_s_own_attention(pool):
    """Catches a fault that all layouts share: wrong scale, wrong heads, wrong residual; the reference is Megatron's."""
    ((ours, stock),) = pool.run(run_stock_attention, world_size=1)
    torch.testing.assert_close(ours, stock, rtol=1e-6, atol=1e-6)  # theirs computes the softmax in float32


def run_documents(rank):
    model, bounds = one_model(**MODERN).double(), PACKS[0]
    tokens = torch.randint(0, VOCABULARY, (1, bounds[-1]), generator=torch.Generator().manual_seed(1))
    packed = logits_and_gradients(model, tokens, bounds)
    separate = [logits_and_gradients(model, tokens[:, start:end]) for start, end in itertools.pairwise(bounds)]
    logits = torch.cat([logits for logits, _ in separate], 1)
    gradients = [torch.stack(parts).sum(0) for parts in zip(*(gradients for _, gradients in separate), strict=True)]
    return packed, (logits, tuple(gradients))


def test_a_packed_row_equals_its_documents_one_by_one(pool):
    """FB-64: positions start anew in each document, and no document sees another."""
    ((packed, separate),) = pool.run(run_documents, world_size=1)
    torch.testing.assert_close(packed, separate, rtol=1e-9, atol=1e-11)


def run_dtypes(rank):
    from megatron.core.transformer.module import Float16Module

    tokens = torch.randint(0, VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(2))
    arguments = model_inputs(tokens, None)[1]
    models = {
        "float32": one_model(**MODERN),
        "float64": one_model(**MODERN).double(),
        "bfloat16": Float16Module(small_config(bf16=True, **MODERN), one_model(bf16=True, **MODERN)),
    }
    logits = {name: model(**arguments) for name, model in models.items()}
    logits["bfloat16"].sum().backward()
    gradients = [parameter.grad for parameter in models["bfloat16"].parameters()]
    dtypes = {parameter.dtype for parameter in one_model(bf16=True, **CLASSIC).parameters()}
    gathered = {name: gather_vocabulary(x.detach()) for name, x in logits.items()}
    return gathered, dtypes, all(bool(gradient.isfinite().all()) for gradient in gradients)


def gather_vocabulary(logits):
    tp_group = resolve_groups().tp
    parts = [torch.empty_like(logits) for _ in range(tp_group.size())]
    dist.all_gather(parts, logits.contiguous(), group=tp_group)
    return torch.cat(parts, -1)


def test_float64_is_a_reference_for_float32_and_bfloat16(pool):
    """Catches a step inside that rounds to float32: two layouts in float64 then differ by 1e-8, as in float32."""
    ((alone, _, _),) = pool.run(run_dtypes, world_size=1)
    split, dtypes_of_bf16, is_finite = pool.run(run_dtypes, world_size=2, **{TP: 2})[0]
    truth = alone["float64"]
    error = {name: ((logits.double() - truth).norm() / truth.norm()).item() for name, logits in alone.items()}
    between_layouts = ((split["float64"] - truth).norm() / truth.norm()).item()
    assert truth.dtype == torch.float64
    assert between_layouts < 1e-14 < 1e-8 < error["float32"] < 1e-6 < 1e-3 < error["bfloat16"] < 3e-2
    assert dtypes_of_bf16 == {torch.bfloat16}
    assert is_finite


def run_weights(rank, seed, tie_embeddings):
    keywords = {"vocab_size": VOCABULARY, "max_sequence_length": MAX_LENGTH}
    model = build_gpt_model(small_config(**CLASSIC), seed=seed, tie_embeddings=tie_embeddings, **keywords)
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


def projections(rank):
    """Sums over shards of weight * normal, by the helper that draws the normals: equal in every layout."""
    model = one_model(**MODERN)
    total = torch.zeros((), dtype=torch.float64)
    for name, parameter in model.named_parameters():
        product = (layout_independent_normal(model, name, parameter, seed=5) * parameter.detach()).double().sum()
        total += product if shard_dim(parameter) is not None or resolve_groups().tp.rank() == 0 else 0
    dist.all_reduce(total, group=dist.group.WORLD)
    return total.item()


def test_normals_project_to_one_number_in_each_layout(pool):
    (alone,) = pool.run(projections, world_size=1)
    for layout in ({TP: 2}, {TP: 2, PP: 2}):
        for total in pool.run(projections, world_size=len(layout) * 2, **layout):
            assert total == pytest.approx(alone, rel=1e-12)


def refusal(rank, overrides):
    with pytest.raises(ConfigError) as caught:
        small_config(8, **overrides)
    return str(caught.value)


def accepted(rank, overrides):
    config = small_config(8, **overrides)
    return config.overlap_p2p_comm, config.batch_p2p_comm


DEFAULT_P2P = {"overlap_p2p_comm": False, "batch_p2p_comm": True}


def test_interleaved_stages_send_shapes_with_overlapped_p2p_only(pool):
    """Catches a hang: beyond two ranks the default calls are right for one shape, and stop when shapes travel."""
    layout = {PP: 4, VPP: 2}
    fixed = {**DEFAULT_P2P, "variable_seq_lengths": False}
    assert pool.run(accepted, fixed, world_size=4, **layout) == [(False, True)] * 4
    for message in pool.run(refusal, DEFAULT_P2P, world_size=4, **layout):
        assert "variable_seq_lengths=True hangs where overlap_p2p_comm=False and batch_p2p_comm=True" in message


def test_two_pipeline_ranks_interleave_with_overlapped_p2p_only(pool):
    """FB-53: Megatron's default calls give a gradient norm of 1312 for 2.42 there, without an error."""
    for overrides in (DEFAULT_P2P, {"overlap_p2p_comm": False}, {"batch_p2p_comm": True}):
        for message in pool.run(refusal, overrides, world_size=2, **{PP: 2, VPP: 2}):
            assert "silently wrong gradients" in message
            assert "set overlap_p2p_comm=True and batch_p2p_comm=False" in message
    assert pool.run(accepted, {}, world_size=2, **{PP: 2, VPP: 2}) == [(True, False)] * 2
    assert pool.run(accepted, DEFAULT_P2P, world_size=2, **{PP: 2}) == [(False, True)] * 2


def build_refusals(rank):
    messages = []
    for changes, arguments in (
        ({}, {"vocab_size": VOCABULARY + 1}),
        ({"expert_model_parallel_size": 2, "num_moe_experts": 4}, {}),
        ({}, {"vp_stage": 0}),
        ({VPP: 2}, {}),
        ({"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2, **DEFAULT_P2P}, {"vp_stage": 0}),
        ({}, {"use_transformer_engine": True}),
    ):
        config = small_config()
        vars(config).update(changes)
        with pytest.raises(ConfigError) as caught:
            build_gpt_model(config, **{"vocab_size": VOCABULARY, "max_sequence_length": MAX_LENGTH, **arguments})
        messages.append(str(caught.value))
    with pytest.raises(ConfigError) as caught:
        small_config(tensor_model_parallel_size=1, context_parallel_size=4)
    return [*messages, *caught.value.problems]


def test_what_no_layout_can_build_is_refused_with_the_remedy(pool):
    """Catches a size that config and parallel_state disagree on, and weights that would depend on the layout."""
    expected = [
        "vocab_size=49 must be a multiple of tensor_model_parallel_size=2: round it up",
        "expert_model_parallel_size=2: experts are named by their local number",
        "vp_stage=0 with virtual_pipeline_model_parallel_size=None",
        "vp_stage=None with virtual_pipeline_model_parallel_size=2: build one model for each",
        "silently wrong gradients",
        "use_transformer_engine=True: Transformer Engine needs CUDA",
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
    model = one_model(bf16=True)
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
