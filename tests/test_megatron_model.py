"""build_gpt_model: weights of a seed, what no layout can build, and the output layer. test_layouts.py has the gradients."""

from __future__ import annotations

import re

import pytest
import torch
from helpers import error_of, pool_of
from trainer_cases import PP, TP, VPP

from megatron_rl.errors import ConfigError
from megatron_rl.megatron.model import build_gpt_model, find_output_layer, transformer_config

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
