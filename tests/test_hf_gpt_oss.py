"""Folders of gpt-oss beyond tests/test_hf_checkpoint.py: MXFP4 weights as published, and what is refused."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch
from helpers import error_of, pool_of

from megatron_rl.errors import ConfigError
from megatron_rl.train.hf_checkpoint import build_hf_model, read_hf_model
from megatron_rl.train.hf_experts import unpacked

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[hf]'")
from test_hf_checkpoint import (  # noqa: E402
    BIASED_EXPERTS,
    TOKENS,
    TOLERANCE,
    WITH_ETP,
    Checkpoints,
    cast,
    changed,
    logits_on_rank,
    tensors_of,
)
from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # noqa: E402

from megatron_rl.megatron.model import transformer_config  # noqa: E402

pytestmark = pytest.mark.megatron
pool = pool_of(4)
NAME = "gpt-oss with experts"
MXFP4 = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return Checkpoints(tmp_path_factory)


def random_blocks(generator, *shape, lowest=0, highest=254):
    blocks = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(lowest, highest + 1, shape, generator=generator, dtype=torch.uint8)


def test_numbers_of_four_bits_are_those_of_the_specification():
    blocks = torch.tensor([[[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] + [0] * 8]], dtype=torch.uint8)
    positive = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    expected = torch.tensor([*positive, *(-value for value in positive)])
    for exponent in (-127, 0, 3, 125):
        found = unpacked(blocks, torch.tensor([[127 + exponent]], dtype=torch.uint8))
        assert found.dtype == torch.float32 and torch.equal(found[0, :16].double(), expected.double() * 2.0**exponent)
        assert torch.equal(found.bfloat16().float(), found)


def test_a_scale_that_is_no_number_is_refused():
    with pytest.raises(ConfigError, match="MXFP4 weights with a scale of 255, which is no number: fetch the folder again"):
        unpacked(torch.zeros(1, 1, 16, dtype=torch.uint8), torch.tensor([[255]], dtype=torch.uint8))


@pytest.fixture(scope="module")
def packed(checkpoints, tmp_path_factory):
    """(the folder with MXFP4 weights, the same with transformers' numbers of them). Scales of 2 ** -6 to 2 ** -3."""
    source, generator = checkpoints[NAME][0], torch.Generator().manual_seed(3)
    given, plain = {}, {}
    for name, values in tensors_of(source).items():
        plain[name] = given[name] = values
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            count, columns, rows = values.shape
            del given[name]
            blocks, scales = random_blocks(generator, count, rows, columns // 32, lowest=121, highest=124)
            given |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16).to(values.dtype)
    folders = tmp_path_factory.mktemp("packed"), tmp_path_factory.mktemp("plain")
    changed(source, folders[0], settings=MXFP4, tensors=lambda known: given)
    changed(source, folders[1], tensors=lambda known: plain)
    return folders


@pytest.mark.parametrize("layout", [pytest.param(BIASED_EXPERTS, id="largest")])
def test_published_weights_are_unpacked_as_transformers_does(pool, packed, tmp_path, layout):
    folder, plain = packed
    model = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = model(TOKENS).logits
    found = pool.run(logits_on_rank, folder, True, tmp_path / "saved", world_size=layout.world_size, **layout.model_parallel)
    torch.testing.assert_close(found[0], expected, atol=TOLERANCE, rtol=TOLERANCE)
    before, after = tensors_of(plain), tensors_of(tmp_path / "saved")
    assert set(after) == set(before) and all(torch.equal(values, before[name]) for name, values in after.items())
    saved, given = (json.loads((place / "config.json").read_text()) for place in (tmp_path / "saved", folder))
    assert "quantization_config" not in saved and given == saved | MXFP4
    (note,) = read_hf_model(folder).notes
    assert "the MXFP4 weights of experts are unpacked, exactly, and trained; --save-hf writes them unpacked" in note


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quantization_config": None}, "not known for GptOssForCausalLM .*_blocks"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is given"),
        ({"intermediate_size": 64}, r"of another shape .*down_proj_blocks \(4, 64, 3, 16\) instead of \(4, 64, 2, 16\)"),
    ],
    ids=["not said", "another", "misfit"],
)
def test_weights_in_bytes_that_do_not_fit_are_refused(packed, tmp_path, settings, message):
    folder = changed(packed[0], tmp_path, settings=settings)
    assert re.search(message, error_of(lambda: read_hf_model(folder)))


def test_bytes_in_the_place_of_numbers_are_refused(packed, tmp_path):
    shutil.copytree(packed[0], tmp_path, dirs_exist_ok=True)
    folder = changed(
        packed[0], tmp_path, tensors=lambda known: known | cast(torch.uint8)({"model.norm.weight": known["model.norm.weight"]})
    )
    assert "weights other than BF16, F16, F32, F64 for GptOssForCausalLM" in error_of(lambda: read_hf_model(folder))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attention_bias": False}, "attention_bias=False is not computed here; it must be True"),
        ({"swiglu_alpha": 1.5}, "swiglu_alpha=1.5 is not computed here; it must be 1.702"),
        ({"layer_types": ["sliding_attention"]}, r"layer_types=\['sliding_attention'\] must be a list of num_hidden_layers=2"),
        (
            {"layer_types": ["chunked_attention", "full_attention"]},
            "layer_types has chunked_attention; only full_attention and sliding",
        ),
        ({"sliding_window": None}, "has no 'sliding_window'"),
        ({"sliding_window": 0}, "sliding_window=0 must be a whole number of 1"),
        ({"rope_parameters": None, "rope_scaling": None}, "has no rope_theta, or neither rope_parameters nor rope_scaling"),
        ({"rope_parameters": {"rope_type": "default"}, "rope_theta": None, "rope_scaling": None}, "has no rope_theta, or neither"),
        ({"num_local_experts": 10**7}, "num_local_experts=10000000 must be a whole number of 1 to 4096"),
    ],
)
def test_what_is_not_computed_is_refused(checkpoints, tmp_path, settings, message):
    folder = tmp_path / "changed"
    shutil.copytree(checkpoints[NAME][0], folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))
    assert re.search(message, error_of(lambda: read_hf_model(folder)))


def test_layers_without_their_kinds_have_a_window_in_turn(checkpoints, tmp_path):
    """As transformers 4 and 5 read it."""
    folder = changed(checkpoints[NAME][0], tmp_path, settings={"layer_types": None})
    assert read_hf_model(folder).has_window == (True, False)
    assert transformers.AutoConfig.from_pretrained(folder).layer_types == ["sliding_attention", "full_attention"]


def refused_on_rank(rank, folder):
    model = read_hf_model(folder)
    return error_of(lambda: build_hf_model(model, transformer_config(**model.transformer_options()), max_sequence_length=8))


def test_ranks_that_share_an_expert_are_refused(pool, checkpoints):
    found = pool.run(refused_on_rank, checkpoints[NAME][0], world_size=WITH_ETP.world_size, **WITH_ETP.model_parallel)
    assert "add_bias_linear=True with experts and expert_tensor_parallel_size=2" in found[0]
