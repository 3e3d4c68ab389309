"""build_gpt_model: weights of a seed, what no layout can build, the output layer, and the angles of rotary positions."""

from __future__ import annotations

import math
import re

import pytest
import torch
from helpers import error_of, pool_of
from trainer_cases import PP, TP, VPP

from megatron_rl.errors import ConfigError
from megatron_rl.megatron.model import build_gpt_model, find_output_layer, transformer_config
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


HEAD, LENGTH = 16, 6
YARN = Yarn(factor=8.0, original_length=64, beta_fast=4.0, beta_slow=1.0)
LLAMA3 = Llama3(factor=4.0, low_freq_factor=0.5, high_freq_factor=3.0, original_length=64)


def model_with(rotary: Rotary, **options):
    config = transformer_config(num_layers=1, hidden_size=2 * HEAD, num_attention_heads=2, **options)
    return build_gpt_model(config, vocab_size=16, max_sequence_length=LENGTH, rotary=rotary)


def angles_on_rank(rank: int, rotary: Rotary) -> tuple[torch.Tensor, float]:  # [LENGTH, dimensions], scale of the softmax
    model = model_with(rotary)
    return model.rotary_pos_emb(LENGTH)[:, 0, 0], model.decoder.layers[0].self_attention.core_attention.softmax_scale


def frequencies(size: int, base: float) -> list[float]:
    return [base ** (-2 * pair / size) for pair in range(size // 2)]


def yarn_by_hand(yarn: Yarn, base: float) -> list[float]:
    """A frequency f turns L f / 2 pi times within the first length L: one with many turns stays, one with few is divided."""

    def place(turns: float) -> float:  # the pair of dimensions that turns so often
        return HEAD * math.log(yarn.original_length / (2 * math.pi * turns)) / (2 * math.log(base))

    low, high = place(yarn.beta_fast), place(yarn.beta_slow)
    low, high = max(low, 0), min(high, HEAD - 1)
    shares = [min(max((pair - low) / (high - low), 0.0), 1.0) for pair in range(HEAD // 2)]
    return [f * (1 - share) + f / yarn.factor * share for f, share in zip(frequencies(HEAD, base), shares, strict=True)]


def llama3_by_hand(llama3: Llama3, base: float) -> list[float]:
    found = []
    for f in frequencies(HEAD, base):
        turns = llama3.original_length * f / (2 * math.pi)
        kept = (turns - llama3.low_freq_factor) / (llama3.high_freq_factor - llama3.low_freq_factor)
        found.append(f if kept > 1 else f / llama3.factor if kept < 0 else kept * f + (1 - kept) * f / llama3.factor)
    return found


@pytest.mark.parametrize(
    ("rotary", "by_hand", "factor"),
    [
        pytest.param(Rotary(), frequencies(HEAD, 10000), 1.0, id="whole heads"),
        pytest.param(Rotary(base=1e6), frequencies(HEAD, 1e6), 1.0, id="another base"),
        pytest.param(Rotary(base=500.0, llama3=LLAMA3), llama3_by_hand(LLAMA3, 500.0), 1.0, id="Llama 3"),
        pytest.param(Rotary(base=500.0, yarn=YARN), yarn_by_hand(YARN, 500.0), 0.1 * math.log(8) + 1, id="YaRN"),
    ],
)
def test_the_angles_are_those_of_the_paper(pool, rotary, by_hand, factor):
    angles, found = pool.run(angles_on_rank, rotary, world_size=1)[0]
    expected = torch.outer(torch.arange(LENGTH).double(), torch.tensor(by_hand * 2).double())
    torch.testing.assert_close(angles.double(), expected, rtol=1e-6, atol=1e-7)  # float32 frequencies
    assert found == pytest.approx(factor**2 / math.sqrt(HEAD))  # on queries and on keys


def refused_rotary_on_rank(rank: int) -> list[str]:
    latent = {"multi_latent_attention": True, "rope_type": "rope"}
    cases = [(Rotary(base=500.0), latent), (Rotary(yarn=YARN), {"softmax_scale": 0.1}), (Rotary(yarn=YARN, llama3=LLAMA3), {})]
    return [error_of(lambda rotary=rotary, options=options: model_with(rotary, **options)) for rotary, options in cases]


def test_what_the_model_would_leave_out_is_refused(pool):
    """It would take the other form, or none, without an error."""
    latent, scale, two = pool.run(refused_rotary_on_rank, world_size=1)[0]
    assert "with multi_latent_attention: the config has its positions and wins; leave rotary out" in latent
    assert "softmax_scale=0.1 with rotary.yarn, which makes it 0.364" in scale
    assert "rotary has llama3 and yarn: positions are scaled in one form" in two
