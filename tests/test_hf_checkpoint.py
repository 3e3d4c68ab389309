"""Folders of Hugging Face: logits as `transformers` computes them, on each layout, and back to the same bits; else a refusal."""

from __future__ import annotations

import json
import re

import pytest
import torch
from helpers import error_of, pool_of

from megatron_rl.layout.groups import all_gather_stack, broadcast_from_last, resolve_groups
from megatron_rl.megatron.model import transformer_config
from megatron_rl.megatron.rotary import Llama3, Rotary
from megatron_rl.testing.layout_step import Layout
from megatron_rl.train.hf_weights import INDEX, build_hf_model, read_hf_model, save_hf_checkpoint

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[train]'")
pytestmark = pytest.mark.megatron

pool = pool_of(4)
SIZES = {
    "vocab_size": 99,  # no multiple of two: the last tensor-parallel rank holds a padded column
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,  # of 0.02 the logits would be so flat that a wrong layer hides
}
# Of the 8 frequencies of a head some are kept, one is mixed and some are divided.
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 256
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 32}
MODELS = {
    "llama": ("Llama", {"rope_theta": 500000.0, "rope_scaling": LLAMA3}),
    "llama, tied": ("Llama", {"tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": 16, "head_dim": 32}),
    "qwen2": ("Qwen2", {"rope_theta": 1000000.0}),
    "qwen3, tied": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "experts": ("Qwen3Moe", {**EXPERTS, "norm_topk_prob": True}),
    "experts, not normalised": ("Qwen3Moe", {**EXPERTS, "norm_topk_prob": False, "mlp_only_layers": [0]}),
}
# Both compute in float32, in another order; a wrong head, a wrong rotation or a missing bias moves logits of this size by 0.1.
TOLERANCE = 1e-4
TOKENS = torch.randint(99, (2, 12), generator=torch.Generator().manual_seed(0))
DENSE = (Layout(), Layout(tensor=2, pipeline=2))
OF_EXPERTS = (Layout(), Layout(tensor=2, sequence_parallel=True, data=2, expert=2))
CASES = [(name, layout) for name in MODELS for layout in (OF_EXPERTS if "experts" in name else DENSE)]
CASES += [
    ("llama", Layout(tensor=2, sequence_parallel=True)),
    ("qwen2", Layout(tensor=4)),  # half of a key head a rank
    ("llama, tied", Layout(data=2, num_microbatches=1)),
    ("experts", Layout(data=4, expert=2)),
    ("experts", Layout(tensor=2, sequence_parallel=True, pipeline=2, expert=2, expert_tensor=1)),
]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """name -> (folder, the logits of transformers)."""
    found = {}
    for name, (kind, settings) in MODELS.items():
        torch.manual_seed(1)
        config = getattr(transformers, f"{kind}Config")(**{**SIZES, **settings})
        model = getattr(transformers, f"{kind}ForCausalLM")(config).float().eval()
        for values in model.parameters():  # norms and biases too: their initial values are 1 and 0
            torch.nn.init.normal_(values, float(values.dim() == 1), 0.15)
        folder = tmp_path_factory.mktemp("hf")
        model.save_pretrained(folder)
        with torch.no_grad():
            found[name] = (folder, model(TOKENS).logits)
    return found


def logits_on_rank(rank, folder, sequence_parallel, saved):
    model, groups = read_hf_model(folder), resolve_groups()
    config = transformer_config(**model.transformer_options(), sequence_parallel=sequence_parallel)
    gpt = build_hf_model(model, config, max_sequence_length=TOKENS.shape[1], use_transformer_engine=False)
    hidden_shape = (TOKENS.shape[1] // (groups.tp.size() if sequence_parallel else 1), TOKENS.shape[0], model.hidden_size)
    if groups.pp.rank():
        received = torch.empty(hidden_shape)
        torch.distributed.recv(received, group=groups.pp, group_src=groups.pp.rank() - 1)
        gpt.set_input_tensor(received)
    with torch.no_grad():
        output = gpt(TOKENS, torch.arange(TOKENS.shape[1]).expand(len(TOKENS), -1), None)
    if groups.pp.rank() < groups.pp.size() - 1:
        torch.distributed.send(output, group=groups.pp, group_dst=groups.pp.rank() + 1)
        output = torch.zeros(*TOKENS.shape, -(-model.vocab_size // groups.tp.size()))
    logits = broadcast_from_last(output.contiguous(), groups.pp)
    save_hf_checkpoint(model, [gpt], saved)
    return torch.cat(list(all_gather_stack(logits, groups.tp)), -1)[..., : model.vocab_size]


def tensors_of(folder):
    from safetensors.torch import load_file

    files = [load_file(path) for path in folder.glob("*.safetensors")]
    found = {name: values for tensors in files for name, values in tensors.items()}
    assert len(found) == sum(map(len, files)), "a tensor is in two files"
    return found


@pytest.mark.parametrize(("name", "layout"), CASES, ids=str)
def test_logits_are_those_of_transformers_and_the_saved_folder_the_same_bits(pool, checkpoints, tmp_path, name, layout):
    (folder, expected), saved = checkpoints[name], tmp_path / "saved"
    found = pool.run(logits_on_rank, folder, layout.sequence_parallel, saved, world_size=layout.world_size, **layout.model_parallel)
    for logits in found:
        torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=TOLERANCE)
    before, after = tensors_of(folder), tensors_of(saved)
    assert set(after) == set(before)
    assert [key for key, values in after.items() if values.dtype != before[key].dtype or not torch.equal(values, before[key])] == []
    read_hf_model(saved)  # a file of each pipeline stage
    again = transformers.AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32).eval()
    with torch.no_grad():
        assert type(again).__name__ == f"{MODELS[name][0]}ForCausalLM" and torch.equal(again(TOKENS).logits, expected)


# Refusals


def changed(folder, tmp_path, settings, tensors=None):
    """The folder with other settings, as transformers 4 spells them, and other tensors."""
    from safetensors.torch import load_file, save_file

    config = json.loads((folder / "config.json").read_text())
    if {"rope_theta", "rope_scaling"} & set(settings):
        config.pop("rope_parameters", None)
    (tmp_path / "config.json").write_text(json.dumps({**config, **settings}))
    weights = load_file(folder / "model.safetensors")
    save_file((tensors or (lambda known: known))(weights), tmp_path / "model.safetensors")
    return tmp_path


def without(name):
    return lambda known: {key: value for key, value in known.items() if key != name}


def renamed(known):
    return {key.replace("layers.1.mlp.up_proj", "layers.1.mlp.wide_proj"): value for key, value in known.items()}


REFUSED = [
    # model, settings, tensors, what is said
    ("qwen2", {"architectures": ["GPT2LMHeadModel"]}, None, "architectures=.*GPT2.* is not known here; known are LlamaForCausalLM"),
    ("llama", {"attention_bias": True}, None, "attention_bias=True must be False"),
    ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, None, "layer_types has sliding_attention; only full_att"),
    (
        "qwen2",
        {"rope_scaling": {"type": "yarn", "factor": 4.0}},
        None,
        "have factor, type with rope_type='yarn', which",
    ),
    (
        "qwen2",
        {"rope_theta": 1e6, "rope_parameters": {"rope_theta": 1e4}},
        None,
        "rope_theta=1000000.0 and rope_theta=10000.0",
    ),
    ("qwen2", {}, without("model.norm.weight"), "missing for Qwen2ForCausalLM .*: model.norm.weight; fetch the folder again"),
    ("qwen2", {"num_hidden_layers": 3}, None, "12 tensors missing .*model.layers.2"),
    ("experts", {"decoder_sparse_step": 2}, None, r"missing .*: model\.layers\.0\.mlp\.down_proj\.weight"),
    (
        "qwen2",
        {},
        renamed,
        "not known for Qwen2ForCausalLM .*: model.layers.1.mlp.wide_proj.weight; a variant that is not",
    ),
    (
        "qwen2",
        {"intermediate_size": 100},
        None,
        r"6 tensors of another shape .*gate_proj.weight \(96, 64\) instead of \(100, 64\)",
    ),
    # A wrong kind is no other number, and no list is made of a size that no model has.
    ("qwen2", {"num_hidden_layers": 10**7}, None, "num_hidden_layers=10000000 must be a whole number of 1 to 1000"),
    ("qwen2", {"hidden_size": "64"}, None, "config.json: hidden_size='64' must be a whole number of 1"),
    ("qwen2", {"num_attention_heads": None}, None, "config.json has no 'num_attention_heads'"),
    ("qwen2", {"rms_norm_eps": -1.0}, None, "rms_norm_eps=-1.0 must be a number above 0"),
    ("qwen2", {"tie_word_embeddings": "false"}, None, "tie_word_embeddings='false' must be true or false"),
]


@pytest.mark.parametrize(("name", "settings", "tensors", "message"), REFUSED, ids=[row[-1] for row in REFUSED])
def test_a_folder_that_is_no_such_model_is_refused_from_its_settings_and_headers(
    checkpoints, tmp_path, name, settings, tensors, message
):
    folder = changed(checkpoints[name][0], tmp_path, settings, tensors)
    assert re.search(message, error_of(lambda: read_hf_model(folder)))


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_theta": 5e5, "rope_scaling": LLAMA3},
        {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_scaling": None, "rope_parameters": LLAMA3},
    ],
    ids=["transformers 4", "transformers 5", "the base beside the scaling"],
)
def test_each_spelling_of_rotary_positions_is_the_same_model(checkpoints, tmp_path, settings):
    """10000 in the place of the base is another model, without an error."""
    found = read_hf_model(changed(checkpoints["llama"][0], tmp_path, settings))
    assert found.rotary == Rotary(base=500000.0, llama3=Llama3(factor=8.0, original_length=256))


def test_what_is_not_said_has_the_default_of_transformers(checkpoints, tmp_path):
    folder = changed(checkpoints["mistral"][0], tmp_path, {"max_position_embeddings": 8192})
    config = json.loads((folder / "config.json").read_text())
    left_out = ("tie_word_embeddings", "sliding_window", "rope_parameters")
    (folder / "config.json").write_text(json.dumps({name: value for name, value in config.items() if name not in left_out}))
    found = read_hf_model(folder)
    assert (found.tie_embeddings, found.longest, found.rotary) == (False, transformers.MistralConfig().sliding_window, Rotary())
    assert read_hf_model(changed(folder, tmp_path, {"sliding_window": None})).longest == 8192


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": 3}, "3 cannot be read: .*; fetch the folder again"),
        ({"a": "none.safetensors"}, "none.safetensors cannot be read: .*; fetch the folder again"),
    ],
    ids=["a number", "no file"],
)
def test_an_index_names_files(checkpoints, tmp_path, weight_map, message):
    folder = changed(checkpoints["llama"][0], tmp_path, {})
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert re.search(message, error_of(lambda: read_hf_model(folder)))


def test_a_folder_without_weights_or_settings_is_refused(checkpoints, tmp_path):
    assert "no folder of a Hugging Face checkpoint" in error_of(lambda: read_hf_model("models/Qwen3"))
    assert "config.json cannot be read" in error_of(lambda: read_hf_model(tmp_path))
    (tmp_path / "config.json").write_bytes((checkpoints["llama"][0] / "config.json").read_bytes())
    assert "model.safetensors cannot be read: No such file" in error_of(lambda: read_hf_model(tmp_path))


def refusal_of_length_on_rank(rank, folder, longest):
    model = read_hf_model(folder)
    config = transformer_config(**model.transformer_options())
    build_hf_model(model, config, max_sequence_length=longest)
    return error_of(lambda: build_hf_model(model, config, max_sequence_length=longest + 1))


@pytest.mark.parametrize(
    ("name", "longest", "message"),
    [
        ("llama", 64, "sequences of 65 tokens are longer than 64, the least of"),
        ("mistral", 16, "sequences of 17 tokens are longer than 16, the least of"),
    ],
)
def test_a_sequence_beyond_the_positions_or_the_window_is_refused(pool, checkpoints, name, longest, message):
    assert message in pool.run(refusal_of_length_on_rank, checkpoints[name][0], longest, world_size=1)[0]
