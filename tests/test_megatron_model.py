"""build_gpt_model: weights of a seed, what no layout can build, and the angles of rotary positions.

Then support for the CPU: when asked for, without CUDA, and without Transformer Engine in the way.
"""

from __future__ import annotations

import math
import os
import re
from functools import partial

import pytest
import torch
from helpers import error_of, pool_of, run_in_children
from trainer_cases import PP, TP, VPP

from megatron_rl.errors import ConfigError
from megatron_rl.megatron import cpu
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
