"""build_gpt_model: weights of a seed, what no layout can build, angles of rotary positions, and PackedAttention against a loop.

Then support for the CPU: when asked for, without CUDA, and without Transformer Engine in the way.
"""

from __future__ import annotations

import enum
import math
import os
import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers import error_of, pool_of, run_in_children
from trainer_cases import PP, TP, VPP

from megatron_rl.errors import ConfigError, DataError
from megatron_rl.layout.context_parallel import local_positions
from megatron_rl.layout.groups import SINGLE
from megatron_rl.megatron import attention as attention_module
from megatron_rl.megatron import cpu
from megatron_rl.megatron.attention import PackedAttention, gather_with_gradient, remember_document_bounds, window_of_layer
from megatron_rl.megatron.model import (
    build_gpt_model,
    transformer_config,
)
from megatron_rl.megatron.rotary import Llama3, Rotary, Yarn

pytestmark = pytest.mark.megatron

VOCABULARY = 48
SIZES = {"vocab_size": VOCABULARY, "max_sequence_length": 64}


def small_config(num_layers=2, **overrides):
    values = {"hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 64, **overrides}
    return transformer_config(num_layers=num_layers, **values)


def whole_name(model, name):
    layer = re.match(r"(decoder\.layers\.)(\d+)(\..*)", name)
    if not layer:
        return name.replace("output_layer", "embedding.word_embeddings") if model.share_embeddings_and_output_weights else name
    return f"{layer[1]}{model.decoder.layers[int(layer[2])].layer_number}{layer[3]}"


pool = pool_of(4)


def run_weights(rank, seed, tie_embeddings):
    model = build_gpt_model(small_config(), seed=seed, tie_embeddings=tie_embeddings, **SIZES)
    return {whole_name(model, name): parameter.detach() for name, parameter in model.named_parameters()}


def test_weights_depend_on_seed_and_name_alone(pool):
    """Catches layers, or tied copies, that start alike or unlike because of where they are built."""
    (first,) = pool.run(run_weights, 0, False, world_size=1)
    (other,) = pool.run(run_weights, 1, False, world_size=1)
    assert not any(torch.equal(first[name], other[name]) for name in first)
    assert not torch.equal(first["decoder.layers.1.mlp.linear_fc1.weight"], first["decoder.layers.2.mlp.linear_fc1.weight"])
    stages = pool.run(run_weights, 0, True, world_size=2, **{PP: 2})
    assert torch.equal(stages[0]["embedding.word_embeddings.weight"], stages[1]["embedding.word_embeddings.weight"])
    assert 0.045 < first["embedding.word_embeddings.weight"].std().item() < 0.055  # init_method_std
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


# Changes of the config, arguments of build_gpt_model, words of the refusal.
CANNOT_BUILD = [
    ({}, {"vocab_size": 49}, "vocab_size=49 must be a multiple of tensor_model_parallel_size=2: round it up"),
    ({"num_moe_experts": 4}, {}, "tensor_model_parallel_size=2 with experts needs sequence_parallel"),
    ({PP: 2, VPP: 2, **DEFAULT_P2P}, {"vp_stage": 0}, "silently wrong gradients"),
]


def build_refusals(rank):
    found = []
    for changes, arguments, _ in CANNOT_BUILD:
        config = small_config()
        vars(config).update(changes)
        found.append(error_of(partial(build_gpt_model, config, **SIZES | arguments)))
    return found, error_of(lambda: small_config(tensor_model_parallel_size=1, context_parallel_size=4))


def test_what_no_layout_can_build_is_refused_with_the_remedy(pool):
    """Catches a size that config and parallel_state disagree on, and weights that would depend on the layout."""
    found, of_sizes = pool.run(build_refusals, world_size=2, **{TP: 2})[0]
    for error, (*_, words) in zip(found, CANNOT_BUILD, strict=True):
        assert error.startswith("ConfigError: ") and words in error
    assert "tensor_model_parallel_size=1, but parallel_state was initialised with 2" in of_sizes
    assert "context_parallel_size=4, but parallel_state was initialised with 1" in of_sizes


HEAD, LENGTH = 16, 6
YARN = Yarn(factor=8.0, original_length=64, beta_fast=4.0, beta_slow=1.0)


def model_with(rotary: Rotary, **options):
    config = transformer_config(num_layers=1, hidden_size=2 * HEAD, num_attention_heads=2, **options)
    return build_gpt_model(config, vocab_size=16, max_sequence_length=LENGTH, rotary=rotary)


def angles_on_rank(rank: int, rotary: Rotary) -> tuple[torch.Tensor, float]:  # [LENGTH, dimensions], scale of the softmax
    model = model_with(rotary)
    return model.rotary_pos_emb(LENGTH)[:, 0, 0], model.decoder.layers[0].self_attention.core_attention.softmax_scale


def test_the_angles_of_yarn_are_those_of_the_paper(pool):
    """A frequency f turns L f / 2 pi times within the first length L: one with many turns stays, one with few is divided.
    test_hf.py has the logits of transformers for the other forms."""
    base, pairs = 500.0, range(HEAD // 2)

    def place(turns: float) -> float:  # the pair of dimensions that turns so often
        return HEAD * math.log(YARN.original_length / (2 * math.pi * turns)) / (2 * math.log(base))

    low, high = max(place(YARN.beta_fast), 0), min(place(YARN.beta_slow), HEAD - 1)
    shares = [min(max((pair - low) / (high - low), 0.0), 1.0) for pair in pairs]
    plain = [base ** (-2 * pair / HEAD) for pair in pairs]
    by_hand = [f * (1 - share) + f / YARN.factor * share for f, share in zip(plain, shares, strict=True)]
    angles, softmax_scale = pool.run(angles_on_rank, Rotary(base=base, yarn=YARN), world_size=1)[0]
    expected = torch.outer(torch.arange(LENGTH).double(), torch.tensor(by_hand * 2).double())
    torch.testing.assert_close(angles.double(), expected, rtol=1e-6, atol=1e-7)  # float32 frequencies
    assert softmax_scale == pytest.approx((0.1 * math.log(8) + 1) ** 2 / math.sqrt(HEAD))  # on queries and on keys


def refused_rotary_on_rank(rank: int) -> list[str]:
    latent = {"multi_latent_attention": True, "rope_type": "rope"}
    cases = [
        (Rotary(base=500.0), latent),
        (Rotary(yarn=YARN), {"softmax_scale": 0.1}),
        (Rotary(yarn=YARN, llama3=Llama3(factor=4.0)), {}),
    ]
    return [error_of(lambda rotary=rotary, options=options: model_with(rotary, **options)) for rotary, options in cases]


def test_what_the_model_would_leave_out_is_refused(pool):
    """It would take the other form, or none, without an error."""
    latent, scale, two = pool.run(refused_rotary_on_rank, world_size=1)[0]
    assert "with multi_latent_attention: the config has its positions and wins; leave rotary out" in latent
    assert "softmax_scale=0.1 with rotary.yarn, which makes it 0.364" in scale
    assert "rotary has llama3 and yarn: positions are scaled in one form" in two


# Attention of packed rows, against a loop in float64

HEADS, GROUPS, DIM = 4, 2, 8
EXACT = {"rtol": 1e-11, "atol": 1e-12}
# The logit of the sink of each head: below, among and above the scores.
SINKS = torch.tensor([-1.0, 0.0, 0.7, 3.0], dtype=torch.float64)


class MaskType(enum.Enum):
    """Megatron's AttnMaskType, of which the attention reads the name alone."""

    causal = 1


def attention(cp_group=SINGLE, **overrides) -> PackedAttention:
    values = {"kv_channels": DIM, "attention_dropout": 0.0, "window_size": None, "softmax_type": "vanilla", **overrides}
    of_sinks = {"num_attention_heads": HEADS, "params_dtype": torch.float64, "use_cpu_initialization": True}
    values |= of_sinks | {"perform_initialization": True, "init_method": lambda sinks: sinks.data.copy_(SINKS)}
    config = SimpleNamespace(**{"apply_query_key_layer_scaling": False, **values})
    groups = SimpleNamespace(cp=cp_group, tp=SINGLE)
    return PackedAttention(config, 1, MaskType.causal, "self", cp_comm_type="p2p", pg_collection=groups)


def packed(bounds: list[int]) -> SimpleNamespace:
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    return SimpleNamespace(qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_q_padded=None)


def random_inputs(rows: int, batch: int = 1, groups: int = GROUPS) -> tuple[torch.Tensor, ...]:
    """query, key, value and the gradient of the output, for the whole row."""
    generator = torch.Generator().manual_seed(rows)
    shapes = [(rows, batch, HEADS, DIM), (rows, batch, groups, DIM), (rows, batch, groups, DIM), (rows, batch, HEADS * DIM)]
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)


def loop_reference(query, key, value, output_gradient, bounds, window=None, sinks=None):
    """Output and gradients, one token and one head at a time; each document by itself, the tail as one more."""
    leaves = [x.clone().requires_grad_() for x in (query, key, value, sinks) if x is not None]
    query, key, value, *given = leaves
    rows, batch, heads, _ = query.shape
    starts = [max(bound for bound in [*bounds, 0] if bound <= row) for row in range(rows)]
    output = []
    for row, start in enumerate(starts):
        for column in range(batch):
            for head in range(heads):
                group = head // (heads // key.shape[2])
                first = start if window is None else max(start, row - window)
                scores = key[first : row + 1, column, group] @ query[row, column, head] / math.sqrt(DIM)
                weights = scores.exp() / (scores.exp().sum() + sum(sinks[head].exp() for sinks in given))
                output.append(weights @ value[first : row + 1, column, group])
    output = torch.stack(output).reshape(rows, batch, heads * DIM)
    return output.detach(), torch.autograd.grad(output, leaves, output_gradient)


def outputs_and_gradients(module, query, key, value, output_gradient, packed_seq_params=None):
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    # Megatron drops the batch dimension of a packed row, and since 0.18 takes the result for [T, heads * dim].
    inputs = leaves if packed_seq_params is None else [x.squeeze(1) for x in leaves]
    output = module(*inputs, None, attn_mask_type=MaskType.causal, packed_seq_params=packed_seq_params)
    if packed_seq_params is not None:
        assert output.dim() == 2
        output = output.unsqueeze(1)
    return output.detach(), torch.autograd.grad(output, [*leaves, *module.parameters()], output_gradient)


WINDOW, WITH_SINKS = {"window_size": (3, 0)}, {"softmax_type": "learnable"}
KINDS = {"a window": WINDOW, "sinks": WITH_SINKS, "a window and sinks, as gpt-oss": WINDOW | WITH_SINKS}


def reference_of(kind, inputs, bounds):
    return loop_reference(*inputs, bounds, kind.get("window_size", (None,))[0], SINKS if "softmax_type" in kind else None)


# Bounds of the documents in the whole row, None for a padded batch of three rows; tokens; heads of keys; kind.
ROWS = [
    pytest.param(None, 6, HEADS, {}, id="own keys for each head"),
    pytest.param(None, 6, GROUPS, {}, id="grouped"),
    pytest.param(None, 6, 1, {}, id="one key head"),
    pytest.param([0, 8, 16, 40], 40, GROUPS, {}, id="two of one length, then a longer one"),
    pytest.param([0, 0, 8, 8, 24, 24], 40, GROUPS, {}, id="FB-63, FB-64 empty documents at start, middle and end, a padding tail"),
    pytest.param([0], 16, GROUPS, {}, id="nothing but padding"),
    *(pytest.param(None, 11, GROUPS, kind, id=name) for name, kind in KINDS.items()),
    *(pytest.param([0, 9, 16, 23], 40, GROUPS, kind, id=f"{name}, packed") for name, kind in KINDS.items()),
]


@pytest.mark.parametrize(("bounds", "rows", "groups", "kind"), ROWS)
@pytest.mark.parametrize("smallest_cut", [2, 128], ids=["cut", "whole"])
def test_rows_equal_a_loop_over_tokens(bounds, rows, groups, kind, smallest_cut, monkeypatch):
    """FB-148: catches a wrong scale, a head that reads another group's keys, a query that sees the future or another document, a
    document that is skipped, NaN in the tail, a window that is off by one, cuts that lose keys, a sink with a value or no gradient.
    """
    monkeypatch.setattr(attention_module, "SMALLEST_CUT", smallest_cut)
    attention_module._runs.cache_clear()
    inputs = random_inputs(rows, batch=3 if bounds is None else 1, groups=groups)
    actual = outputs_and_gradients(attention(**kind), *inputs, None if bounds is None else packed(bounds))
    torch.testing.assert_close(actual, reference_of(kind, inputs, bounds or [0]), **EXACT)
    attention_module._runs.cache_clear()


def test_the_layers_with_a_window_are_those_that_megatron_gives_one():
    """By hand: each second layer without one; a list names the layers that have one; -1 is no window."""
    cases = {((5, 0), 2): [5, None, 5, None], ((5, 0), (0, 1, 1, 0)): [None, 5, 5, None], ((5, 0), None): [5] * 4}
    cases |= {((-1, 0), None): [None] * 4, (None, 2): [None] * 4}
    for (size, skips), expected in cases.items():
        skips = list(skips) if isinstance(skips, tuple) else skips
        config = SimpleNamespace(window_size=size, window_attn_skip_freq=skips)
        assert [window_of_layer(config, number) for number in (1, 2, 3, 4)] == expected


def test_memory_of_a_packed_row_grows_with_its_tokens_and_not_with_their_square():
    """Catches a [T, T] mask or score matrix: 4096 tokens in 64 documents would save 16 M elements for backward."""
    rows, saved = 4096, []
    query, key, value, _ = random_inputs(rows)
    bounds = list(range(0, rows + 1, 64))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        attention()(*(x.squeeze(1).requires_grad_() for x in (query, key, value)), packed_seq_params=packed(bounds))
    assert max(saved) == rows * HEADS * DIM


def test_the_bounds_are_those_that_the_host_remembers_then_the_padded_ones():
    """Catches a synchronisation per layer on CUDA, and cuts beside those of Megatron's rotary positions."""
    inputs, params = random_inputs(16), packed([0, 8, 16])

    def assert_cut_at(bounds):
        actual = outputs_and_gradients(attention(), *inputs, params)
        torch.testing.assert_close(actual, loop_reference(*inputs, bounds), **EXACT)

    remember_document_bounds(params, [0, 4, 16])
    assert_cut_at([0, 4, 16])
    params.cu_seqlens_q = torch.tensor([0, 12, 16], dtype=torch.int32)
    assert_cut_at([0, 12, 16])
    params = packed([0, 5, 11])
    params.cu_seqlens_q_padded = torch.tensor([0, 8, 16], dtype=torch.int32)
    assert_cut_at([0, 8, 16])


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ([2, 8, 16], r"cu_seqlens_q=\[2, 8, 16\] must start with 0"),
        ([0, 12, 8, 16], r"cu_seqlens_q decreases: document lengths \[12, -4, 8\]"),
    ],
)
def test_impossible_bounds_are_refused_with_the_numbers(bounds, message):
    with pytest.raises(DataError, match=message):
        outputs_and_gradients(attention(), *random_inputs(16), packed(bounds))


def test_what_would_be_ignored_is_refused_all_at_once():
    """Catches dropout, windows, sinks, scaling, caches and biases that a user sets and nothing honours."""
    with pytest.raises(ConfigError) as caught:
        attention(attention_dropout=0.1, window_size=(128, 128), softmax_type="leaky", apply_query_key_layer_scaling=True)
    named = ("attention_dropout=0.1", "window_size=(128, 128)", "softmax_type='leaky'", "apply_query_key_layer_scaling")
    for problem, name in zip(caught.value.problems, named, strict=True):
        assert name in problem
    query, key, value, _ = random_inputs(4)
    with pytest.raises(ConfigError, match="attention_bias"):
        attention()(query, key, value, None, attention_bias=torch.zeros(1))


def rows_of_rank(bounds: list[int], rows: int, rank: int, cp_size: int) -> torch.Tensor:
    edges = [*bounds, rows] if bounds[-1] < rows else bounds
    pairs = zip(edges[:-1], edges[1:], strict=True)
    return torch.cat([start + local_positions(end - start, rank, cp_size) for start, end in pairs])


def run_local_attention(rank, bounds, rows, batch, kind):
    """This rank's rows, outputs and gradients, from its slices of inputs that every rank draws alike; after generation, whose
    mask in the cache no backward may save."""
    cp_group = dist.group.WORLD
    local = rows_of_rank(bounds or [0, rows], rows, rank, cp_group.size())
    slices = [x[local] for x in random_inputs(rows, batch)]
    params = None if bounds is None else packed(bounds)
    if bounds is None:
        with torch.inference_mode():
            attention(cp_group, **kind)(*slices[:3])
    output, gradients = outputs_and_gradients(attention(cp_group, **kind), *slices, params)
    return local, output, gradients[:3], gradients[3:]


OF_RANKS = [
    pytest.param(2, [0, 8, 8, 24], 40, {}, id="CP2, an empty document, a padding tail"),
    pytest.param(4, [0, 8, 16, 40], 40, {}, id="CP4"),
    pytest.param(2, [0], 16, {}, id="CP2, nothing but padding"),
    pytest.param(4, None, 32, {}, id="CP4, padded batch of three rows"),
    *(pytest.param(2, [0, 8, 32], 40, kind, id=f"CP2, {name}") for name, kind in KINDS.items()),
]


@pytest.mark.parametrize(("cp_size", "bounds", "rows", "kind"), OF_RANKS)
def test_context_parallel_ranks_hold_their_tokens_of_the_whole_result(pool, cp_size, bounds, rows, kind):
    """Catches keys put back in a wrong order, a mask that is off by a chunk, and a gradient that stays on its rank. The gradient of
    a sink is the sum over the ranks' queries."""
    batch = 3 if bounds is None else 1
    whole_output, whole_gradients = reference_of(kind, random_inputs(rows, batch), bounds or [0])
    answers = pool.run(run_local_attention, bounds, rows, batch, kind, world_size=cp_size)
    for local, output, gradients, _ in answers:
        expected = tuple(x[local] for x in whole_gradients[:3])
        torch.testing.assert_close((output, gradients), (whole_output[local], expected), **EXACT)
    assert sorted(row for local, *_ in answers for row in local.tolist()) == list(range(rows))
    of_sinks = [sum(parts) for parts in zip(*(answer[3] for answer in answers), strict=True)]
    torch.testing.assert_close(of_sinks, [*whole_gradients[3:]], **EXACT)


def run_badly_padded_attention(rank):
    return error_of(lambda: outputs_and_gradients(attention(dist.group.WORLD), *random_inputs(12), packed([0, 6, 24])))


def test_a_document_that_does_not_divide_into_chunks_is_refused(pool):
    """Catches chunks of unequal size, whose shapes may agree and whose tokens then do not."""
    for message in pool.run(run_badly_padded_attention, world_size=2):
        assert "a document of 6 tokens in [6, 18]" in message and "not a multiple of 2 * cp_size = 4" in message


def gather_on_ranks(rank):
    """256 + 1 + 1 + 1: each sum of 256 and 1 alone is 256 again in bfloat16."""
    given = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
    (gather_with_gradient(given, dist.group.WORLD) * (256.0 if rank == 0 else 1.0)).sum().backward()
    return given.grad


def test_the_gradient_of_a_gather_is_summed_in_float32(pool):
    """259 is 260 in bfloat16; a sum rounded after each rank is 256."""
    for gradient in pool.run(gather_on_ranks):
        assert gradient.dtype == torch.bfloat16 and gradient.item() == 260.0


# The CPU

IMPORTS = """
before = torch.zeros, torch.cuda.current_device, torch.Tensor.type
import megatron_rl.megatron.cpu as cpu, megatron_rl.megatron.model, megatron_rl.testing.ranks, sys
assert before == (torch.zeros, torch.cuda.current_device, torch.Tensor.type)
print(cpu._is_installed, any(name.startswith("megatron.") for name in sys.modules))
cpu.install_cpu_support()
import megatron.core.models.gpt
print("survived")
"""


@pytest.mark.slow
def test_nothing_is_replaced_by_an_import_and_a_broken_transformer_engine_does_not_stop_megatron(tmp_path):
    """Catches support that acts at import. Megatron-Core survives ImportError alone."""
    (tmp_path / "transformer_engine").mkdir()
    impostor = "raise RuntimeError('transformer-engine: found no package for this framework')"
    (tmp_path / "transformer_engine" / "__init__.py").write_text(impostor)
    path = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    printed = run_in_children(IMPORTS, PYTHONPATH=os.pathsep.join(path), CUDA_VISIBLE_DEVICES="")
    assert printed == "False False\nsurvived\n"


def test_it_refuses_where_cuda_is_available(monkeypatch):
    """Catches a training run on GPUs that silently computes on the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = torch.zeros
    with pytest.raises(ConfigError, match=r"torch.cuda.is_available\(\) is True.*CUDA_VISIBLE_DEVICES=''"):
        cpu.install_cpu_support()
    assert torch.zeros is before and not cpu._is_installed
