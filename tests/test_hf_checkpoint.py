"""Checkpoints of Hugging Face's format: logits as `transformers` computes them, on every layout, and back to the same bits.

With transformers 4 and 5: the file runs in an environment of either, `python -m pytest tests/test_hf_checkpoint.py`. They spell
config.json in other ways, and 5 has the experts of a layer in one tensor, which it writes one by one.
"""

from __future__ import annotations

import json
import os
import re

import pytest
import torch
from helpers import error_of, pool_of

from megatron_rl.errors import ConfigError
from megatron_rl.layout.groups import all_gather_stack, broadcast_from_last, resolve_groups
from megatron_rl.megatron.model import in_half_precision, transformer_config
from megatron_rl.megatron.rotary import Llama3, Rotary
from megatron_rl.testing.layout_step import Layout
from megatron_rl.train.hf_checkpoint import INDEX, build_hf_model, read_hf_model, save_hf_checkpoint

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[hf]'")
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
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
# Of models whose routers have a bias. Their configs say what a folder of them has.
BIASED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "first_k_dense_replace": 1}
GROUPED = {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 4, "n_routed_experts": 16}
ONE_GROUP = {"n_group": 1, "topk_group": 1}
LATENT = {"kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12, "num_key_value_heads": 4}
SCALED_YARN = {**YARN, "attention_factor": 1.5}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 32}
EXPERTS_OF_ONE_TENSOR = {"num_local_experts": 4, "num_experts_per_tok": 2}
MODELS = {
    "llama": ("Llama", {"rope_theta": 500000.0, "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 8192}}),
    "llama, tied": ("Llama", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {"rope_theta": 1000000.0}),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3 with experts": ("Qwen3Moe", {**EXPERTS, "norm_topk_prob": True}),
    "qwen3 with experts, not normalised": ("Qwen3Moe", {**EXPERTS, "norm_topk_prob": False, "mlp_only_layers": [0]}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 32}),
    "mixtral with experts": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "glm 4.6 with experts": (
        "Glm4Moe",
        {
            **BIASED,
            "head_dim": 32,
            "attention_bias": True,
            "use_qk_norm": True,
            "n_shared_experts": 1,
            "routed_scaling_factor": 1.5,
        },
    ),
    "glm 4.5 with experts, grouped": ("Glm4Moe", {**BIASED, **GROUPED, "head_dim": 16, "n_shared_experts": 2}),
    "deepseek with experts": (
        "DeepseekV3",
        {
            **BIASED,
            **GROUPED,
            **LATENT,
            "q_lora_rank": 20,
            "rope_scaling": {**YARN, "beta_fast": 2.0, "beta_slow": 0.2, "mscale": 0.8, "mscale_all_dim": 0.8},
        },
    ),
    "deepseek with experts, whole queries": (
        "DeepseekV3",
        {**BIASED, **LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1},
    ),
    "gpt-oss with experts": (
        "GptOss",
        {
            **EXPERTS_OF_ONE_TENSOR,
            "head_dim": 32,
            "sliding_window": 4,  # of 12 tokens
            "rope_theta": 150.0,
            "rope_scaling": {**YARN, "beta_fast": 2.0, "beta_slow": 0.2, "truncate": False},
        },
    ),
}
# Each on two layouts alone: what a form changes is one vector, and the scale of the softmax.
ROTARY = {
    "linear": ("Llama", {"rope_scaling": {"rope_type": "linear", "factor": 3.0}}),
    "llama3, other factors": (
        "Llama",
        {
            "rope_theta": 123.5,
            "rope_scaling": {**LLAMA3, "low_freq_factor": 2.0, "high_freq_factor": 5.0, "original_max_position_embeddings": 32},
        },
    ),
    "yarn": ("Qwen3", {"head_dim": 32, "rope_scaling": {**YARN, "beta_fast": 2.0, "beta_slow": 0.2}}),
    "yarn with experts, scaled": (
        "Qwen3Moe",
        {**EXPERTS, "norm_topk_prob": True, "rope_scaling": SCALED_YARN},
    ),
    "yarn, not rounded": (
        "Qwen2",
        {
            "rope_scaling": {
                **YARN,
                "original_max_position_embeddings": 64,
                "beta_fast": 2.0,
                "mscale": 1.0,
                "mscale_all_dim": 0.5,
                "truncate": False,
            }
        },
    ),
}
# Fewer key heads than tensor-parallel ranks: a rank holds a part of a query group.
FEW_KEY_HEADS = {
    f"{name}, one key head": (kind, {**settings, "num_key_value_heads": 1})
    for name, (kind, settings) in MODELS.items()
    if name in ("llama", "qwen2", "qwen3", "qwen3 with experts", "glm 4.6 with experts", "gpt-oss with experts")
}
ALL_MODELS = MODELS | FEW_KEY_HEADS | ROTARY
# Both compute in float32, in another order; a wrong head, a wrong rotation or a missing bias moves logits of this size by 0.1.
TOLERANCE = 1e-4
TOKENS = torch.randint(99, (2, 12), generator=torch.Generator().manual_seed(0))


class Checkpoints:
    """name -> (folder, the logits of transformers), each made where a test asks for it."""

    def __init__(self, factory):
        self.factory, self.made = factory, {}

    def __getitem__(self, name):
        if name not in self.made:
            self.made[name] = self.make(*ALL_MODELS[name])
        return self.made[name]

    def make(self, kind, settings):
        torch.manual_seed(1)
        config = getattr(transformers, f"{kind}Config")(**{**SIZES, **settings})
        model = getattr(transformers, f"{kind}ForCausalLM")(config).float().eval()
        biases = [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
        for values in (*model.parameters(), *biases):  # norms and biases too: their initial values are 1 and 0
            torch.nn.init.normal_(values, 1.0 if isinstance(values, torch.nn.Parameter) and values.dim() == 1 else 0.0, 0.15)
        with torch.no_grad():
            for name, values in model.named_parameters():
                if name.endswith(".gate_up_proj") and kind == "GptOss":
                    values *= 8  # so that the limit of SwiGLU binds, which in transformers 4 is always 7
        for bias in biases if config.to_dict().get("n_group", 1) > 1 else ():
            bias.abs_()  # with a score below 0 transformers 4 takes experts of groups that were not chosen
        folder = self.factory.mktemp("hf")
        model.save_pretrained(folder)
        with torch.no_grad():
            return folder, model(TOKENS).logits


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return Checkpoints(tmp_path_factory)


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
    whole = torch.cat(list(all_gather_stack(logits, groups.tp)), -1)[..., : model.vocab_size]
    if saved is not None:
        save_hf_checkpoint(model, [gpt], saved)
    return whole


ANY = [Layout(), Layout(pipeline=2), Layout(data=2, num_microbatches=1)]
DENSE = [Layout(tensor=2), Layout(tensor=2, sequence_parallel=True)]
# Experts with tensor parallelism and without their own drift, and are refused.
OF_EXPERTS = [
    Layout(data=2, expert=2),
    Layout(data=4, expert=2),
    Layout(pipeline=2, data=2, expert=2),
    Layout(tensor=2, sequence_parallel=True, expert=2, expert_tensor=1),
    Layout(tensor=2, sequence_parallel=True, data=2, expert=2, expert_tensor=1),
]


def tensor_parallel(name, size):
    is_moe = "experts" in name
    return Layout(tensor=size, sequence_parallel=is_moe, **({"expert": size, "expert_tensor": 1} if is_moe else {}))


# Of every architecture one rank, and one layout that cuts all that can be cut; of a router's bias the layouts that it goes through.
WITH_ETP = Layout(tensor=2, sequence_parallel=True, data=2, expert=2, expert_tensor=2)
# Experts with biases are whole on a rank.
BIASED_EXPERTS = Layout(tensor=2, sequence_parallel=True, pipeline=2, expert=2, expert_tensor=1)


def largest(name):
    if "experts" not in name:
        return Layout(tensor=2, pipeline=2)
    return BIASED_EXPERTS if "gpt-oss" in name else WITH_ETP


def further_layouts(name):
    return [*(OF_EXPERTS if "experts" in name else DENSE), largest(name)]


EVERY_CASE = [(name, layout) for name in MODELS for layout in (*ANY, *further_layouts(name))]
EVERY_CASE += [(name, tensor_parallel(name, 4)) for name in MODELS]
EVERY_CASE += [(name, tensor_parallel(name, size)) for name in FEW_KEY_HEADS for size in (2, 4)]
EVERY_CASE += [
    (name, layout)
    for name in ROTARY
    for layout in (Layout(), Layout(tensor=2, sequence_parallel=True, pipeline=2))[: 2 - ("experts" in name)]
]
QUICK = [(name, layout) for name in MODELS for layout in (Layout(), largest(name))]
QUICK += [(name, Layout()) for name in ROTARY]
QUICK += [("glm 4.6 with experts", Layout(pipeline=2, data=2, expert=2))]
QUICK += [(name, tensor_parallel(name, 4)) for name in ("llama, one key head", "glm 4.6 with experts", "deepseek with experts")]
CASES = [
    pytest.param(name, layout, id=f"{name}-{layout}", marks=() if (name, layout) in QUICK else pytest.mark.slow)
    for name, layout in EVERY_CASE
]


def tensors_of(folder):
    from safetensors.torch import load_file

    files = [load_file(path) for path in folder.glob("*.safetensors")]
    found = {name: values for tensors in files for name, values in tensors.items()}
    assert len(found) == sum(map(len, files)), "a tensor is in two files"
    return found


def check_logits_and_bits(pool, checkpoint, saved, layout):
    folder, expected = checkpoint
    found = pool.run(logits_on_rank, folder, layout.sequence_parallel, saved, world_size=layout.world_size, **layout.model_parallel)
    for logits in found:
        torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=TOLERANCE)
    before, after = tensors_of(folder), tensors_of(saved)
    assert set(after) == set(before)
    assert [key for key, values in after.items() if values.dtype != before[key].dtype or not torch.equal(values, before[key])] == []


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_logits_are_those_of_transformers_and_the_saved_weights_the_same_bits(pool, checkpoints, tmp_path, name, layout):
    check_logits_and_bits(pool, checkpoints[name], tmp_path / "saved", layout)
    if layout.world_size == 1:  # what is saved is a folder of transformers
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
        assert type(again).__name__ == f"{ALL_MODELS[name][0]}ForCausalLM"
        with torch.no_grad():
            torch.testing.assert_close(again.eval()(TOKENS).logits, checkpoints[name][1], atol=TOLERANCE, rtol=TOLERANCE)


def refusals_of_releases_on_rank(rank, one_key_head, whole_queries):
    """What is said where the installed Megatron-Core is an earlier or a later one."""
    from megatron_rl.megatron import model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "shares_key_heads", lambda: False)
        patch.setattr(model, "norms_queries_twice", lambda: True)
        folder = read_hf_model(whole_queries)
        config = transformer_config(**folder.transformer_options(), sequence_parallel=True, expert_tensor_parallel_size=2)
        return [
            error_of(lambda: transformer_config(**read_hf_model(one_key_head).transformer_options())),
            error_of(lambda: build_hf_model(folder, config, max_sequence_length=8)),
        ]


def test_what_another_release_of_megatron_does_not_compute_is_refused(pool, checkpoints):
    """Before 0.16 it has a ValueError for key heads, without what to do. Since 0.19 it builds another model, or fails in a mock."""
    folders = [checkpoints[name][0] for name in ("llama, one key head", "deepseek with experts, whole queries")]
    ((heads, queries), _) = pool.run(
        refusals_of_releases_on_rank, *folders, world_size=2, **Layout(tensor=2, expert_tensor=2).model_parallel
    )
    assert "num_query_groups=1 with tensor_model_parallel_size=2: before Megatron-Core 0.16 a rank holds whole key heads" in heads
    assert "q_lora_rank=None with qk_layernorm=True: since 0.19 Megatron-Core normalises the hidden states once more" in queries


def changed(folder, tmp_path, *, settings=None, tensors=None):
    from safetensors.torch import load_file, save_file

    config, settings = json.loads((folder / "config.json").read_text()), settings or {}
    if {"rope_theta", "rope_scaling", "partial_rotary_factor"} & set(settings):  # spelled as transformers 4 does
        rotary = config.pop("rope_parameters", {})
        config |= {name: rotary[name] for name in ("rope_theta", "partial_rotary_factor") if name in rotary}
    (tmp_path / "config.json").write_text(json.dumps({**config, **settings}))
    weights = load_file(folder / "model.safetensors")
    save_file((tensors or (lambda known: known))(weights), tmp_path / "model.safetensors")
    return tmp_path


def without(name):
    return lambda known: {key: value for key, value in known.items() if key != name}


def renamed(known):
    return {key.replace("layers.1.mlp.up_proj", "layers.1.mlp.wide_proj"): value for key, value in known.items()}


def cast(dtype):
    return lambda known: {key: value.to(dtype) for key, value in known.items()}


@pytest.mark.parametrize(
    ("settings", "tensors", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            None,
            "architectures=.*GPT2LMHeadModel.* is not known here; known are LlamaForCausalLM",
        ),
        ({"hidden_act": "gelu"}, None, "hidden_act='gelu' is not computed here; it must be 'silu'"),
        ({"use_sliding_window": True}, None, "use_sliding_window=True is not computed here"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, None, "layer_types has sliding_attention; only full_attention"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, None, "full_attention.* is not computed here"),
        (
            {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}},
            None,
            "rope_scaling=.*longrope.* is not computed here; known as rope_type are default, linear, llama3, yarn",
        ),
        (
            {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 8192, "mrope_section": [1]}},
            None,
            "rope_scaling has mrope_section with rope_type=llama3",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": -4.0}}, None, "factor=-4.0 must be a number above 0"),
        ({"rope_scaling": {**YARN, "beta_fast": 0.5}}, None, "beta_fast=0.5 must be beta_slow=1.0 at least"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, None, "high_freq_factor=1.0 must be above low_freq_factor=1.0"),
        (None, without("model.norm.weight"), "missing for Qwen2ForCausalLM with the sizes of config.json: model.norm.weight"),
        (None, renamed, "not known for Qwen2ForCausalLM .*: model.layers.1.mlp.wide_proj.weight"),
        ({"intermediate_size": 100}, None, r"of another shape .*gate_proj.weight \(96, 64\) instead of \(100, 64\).* and 2 more"),
        ({"num_hidden_layers": 3}, None, "missing .*model.layers.2.*and 8 more"),
        # A wrong kind is no other number, and no list is made of a size that the weights do not have.
        (
            {"num_hidden_layers": 10**7},
            None,
            "num_hidden_layers=10000000 must be a whole number of 1 to 27: the weights hold 27 tensors",
        ),
        ({"hidden_size": "64"}, None, "config.json: hidden_size='64' must be a whole number of 1"),
        ({"num_attention_heads": None}, None, "config.json has no 'num_attention_heads'"),
        ({"num_key_value_heads": 3}, None, "num_attention_heads=4 must be a multiple of num_key_value_heads=3"),
        ({"head_dim": 7}, None, "heads of 7 numbers, of which positions turn 7: they turn pairs, so it must be even"),
        ({"rms_norm_eps": -1.0}, None, "rms_norm_eps=-1.0 must be a number above 0"),
        ({"tie_word_embeddings": "false"}, None, "tie_word_embeddings='false' must be true or false"),
        ({"architectures": {"Qwen2ForCausalLM": 1}}, None, "architectures=.* must be a list, each text"),
        ({"rope_theta": -1.0}, None, "rope_theta=-1.0 must be a number above 1"),
        ({"rope_theta": float("nan")}, None, "rope_theta=nan must be a number above 1"),
        (
            {"partial_rotary_factor": 0.5},
            None,
            "partial_rotary_factor=0.5 must be 1: positions turn whole heads in this architecture",
        ),
        ({"partial_rotary_factor": 1.5}, None, "partial_rotary_factor=1.5 must be a number above 0, and 1 at most"),
        ({"rope_scaling": "llama3"}, None, "rope_scaling='llama3' must be an object of settings"),
        (
            {"rope_theta": 1e6, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}},
            None,
            "rope_theta=1000000.0, and 10000.0 in its rotary settings",
        ),
        (
            {"rope_scaling": {"rope_type": "default"}, "rope_parameters": LLAMA3},
            None,
            "rope_parameters=.* and rope_scaling=.* differ",
        ),
        ({"quantization_config": {"quant_method": "fp8"}}, None, "quantization_config is given"),
        (None, cast(torch.int8), "weights other than BF16, F16, F32, F64 for .* is I8"),
        (None, cast(torch.float8_e4m3fn), "weights other than BF16, .* is F8_E4M3"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused_from_its_headers(checkpoints, tmp_path, settings, tensors, message, name="qwen2"):
    folder = changed(checkpoints[name][0], tmp_path, settings=settings, tensors=tensors)
    with pytest.raises(ConfigError) as refused:
        read_hf_model(folder)
    assert re.search(message, str(refused.value)), refused.value


@pytest.mark.parametrize(
    ("settings", "tensors", "remedy"),
    [
        (None, without("model.norm.weight"), "after an incomplete download: fetch the folder again"),
        (None, renamed, "a variant that is not supported here: train it in miles, slime or verl"),
        ({"intermediate_size": 100}, None, "config.json is of another model: take the one that belongs to these weights"),
    ],
    ids=["missing", "not known", "of another shape"],
)
def test_tensors_that_do_not_fit_come_with_what_to_do(checkpoints, tmp_path, settings, tensors, remedy):
    folder = changed(checkpoints["qwen2"][0], tmp_path, settings=settings, tensors=tensors)
    with pytest.raises(ConfigError) as refused:
        read_hf_model(folder)
    assert remedy in str(refused.value)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("mistral", {"sliding_window": 4096}, "sliding_window=4096 is not computed here; it must be None"),
        ("mixtral with experts", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1 is not computed here; it must be 0.0"),
        ("glm 4.6 with experts", {"attention_bias": False}, "not known for Glm4MoeForCausalLM .*self_attn.k_proj.bias"),
        ("glm 4.6 with experts", {"use_qk_norm": False}, "not known for Glm4MoeForCausalLM .*self_attn.k_norm.weight"),
        ("glm 4.6 with experts", {"norm_topk_prob": False}, "norm_topk_prob=False must be true: Megatron-Core divides sigmoids"),
        ("glm 4.6 with experts", {"partial_rotary_factor": 0.3}, "of which positions turn 9: they turn pairs"),
        ("glm 4.6 with experts", {"rope_scaling": YARN}, "rope_scaling multiplies the rotated numbers of a head by 1.13863"),
        ("glm 4.6 with experts", {"n_group": 3}, "n_group=3 and topk_group=1 with n_routed_experts=8: groups must be of one size"),
        (
            "glm 4.5 with experts, grouped",
            {"num_experts_per_tok": 3},
            "num_experts_per_tok=3 with n_group=4 and topk_group=2: .* so it must be 4",
        ),
        ("deepseek with experts", {"rope_interleave": False}, "rope_interleave=False is not computed here; it must be True"),
        ("deepseek with experts", {"rms_norm_eps": 1e-5}, "rms_norm_eps=1e-05 is not computed here; it must be 1e-06"),
        ("deepseek with experts", {"scoring_func": "softmax"}, "scoring_func='softmax' is not computed here"),
        ("deepseek with experts", {"attention_bias": True}, "attention_bias=True is not computed here; it must be False"),
        ("deepseek with experts", {"rope_scaling": YARN}, "rope_scaling multiplies the rotated numbers of a head by 1.13863"),
    ],
)
def test_what_an_architecture_does_not_compute_is_refused(checkpoints, tmp_path, name, settings, message):
    test_a_folder_that_does_not_fit_is_refused_from_its_headers(checkpoints, tmp_path, settings, None, message, name)


def with_further_layer(known):
    """One layer more, with what DeepSeek-V3 has beyond a layer's tensors."""
    copied = {name.replace("layers.1.", "layers.2."): values + 1 for name, values in known.items() if "layers.1." in name}
    return {**known, **copied, "model.layers.2.eh_proj.weight": torch.ones(64, 128, dtype=torch.bfloat16)}


def test_layers_that_predict_further_tokens_are_written_as_they_were_read(pool, checkpoints, tmp_path):
    (folder, expected), name = checkpoints["deepseek with experts"], "model.layers.2.eh_proj.weight"
    source = changed(folder, tmp_path, settings={"num_nextn_predict_layers": 1}, tensors=with_further_layer)
    layout = WITH_ETP
    found = pool.run(logits_on_rank, source, True, tmp_path / "saved", world_size=layout.world_size, **layout.model_parallel)
    torch.testing.assert_close(found[0], expected, atol=TOLERANCE, rtol=TOLERANCE)
    before, after = tensors_of(source), tensors_of(tmp_path / "saved")
    assert after[name].dtype == torch.bfloat16 and set(after) == set(before)
    assert all(torch.equal(values, before[key]) for key, values in after.items())
    (note,) = read_hf_model(source).notes
    further = len(before) - len(tensors_of(folder))
    assert f"{further} tensors of layers that predict further tokens (num_nextn_predict_layers) are not trained" in note
    assert read_hf_model(folder).notes == []
    with pytest.raises(ConfigError, match=r"not known for DeepseekV3ForCausalLM .*model.layers.2"):
        read_hf_model(changed(source, tmp_path, settings={"num_nextn_predict_layers": 0}))


def biases_on_rank(rank, folder):
    model = read_hf_model(folder)
    config = transformer_config(**model.transformer_options(), bf16=True)
    wrapped = in_half_precision(build_hf_model(model, config, max_sequence_length=8, use_transformer_engine=False))
    (router,) = [module for module in wrapped.modules() if type(module).__name__ == "TopKRouter"]
    with torch.no_grad():
        wrapped(TOKENS[:, :8], torch.arange(8).expand(2, -1), None)
    return router.expert_bias, router.weight.dtype


def test_the_biases_of_routers_stay_float32_in_16_bits(pool, checkpoints):
    """Float16Module rounds them. A difference of 2 ** -9 of a bias is another choice of experts."""
    folder = checkpoints["glm 4.6 with experts"][0]
    bias, dtype = pool.run(biases_on_rank, folder)[0]
    assert dtype == torch.bfloat16
    assert torch.equal(bias, tensors_of(folder)["model.layers.1.mlp.gate.e_score_correction_bias"])


def test_rotary_settings_as_transformers_5_writes_them(checkpoints, tmp_path):
    """One dictionary in the place of rope_theta and rope_scaling, which must not silently become the default base."""
    before = read_hf_model(checkpoints["llama"][0])
    settings = {
        "rope_theta": None,
        "rope_scaling": None,
        "rope_parameters": {**MODELS["llama"][1]["rope_scaling"], "rope_theta": 5e5},
    }
    found = read_hf_model(changed(checkpoints["llama"][0], tmp_path, settings=settings))
    assert found.rotary == before.rotary == Rotary(base=500000.0, llama3=Llama3(factor=8.0))


@pytest.mark.parametrize(
    "scaling", [{"rope_type": "default"}, {**LLAMA3, "original_max_position_embeddings": 8192}], ids=["none", "llama3"]
)
def test_the_base_of_rotary_positions_may_stand_beside_their_scaling(checkpoints, tmp_path, scaling):
    """transformers takes the base at the top where rope_parameters has none. 10000 in its place is another model."""
    settings = {"rope_theta": 1e6, "rope_scaling": None, "rope_parameters": scaling}
    found = read_hf_model(changed(checkpoints["llama"][0], tmp_path, settings=settings))
    assert found.rotary == Rotary(base=1000000.0, llama3=Llama3(factor=8.0) if "factor" in scaling else None)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert (config.rope_theta if transformers.__version__ < "5" else config.rope_parameters["rope_theta"]) == 1e6


def test_a_head_that_is_not_said_to_be_tied_is_its_own(checkpoints, tmp_path):
    """transformers writes no setting that has its default."""
    assert not read_hf_model(changed(checkpoints["llama"][0], tmp_path, settings={"tie_word_embeddings": None})).tie_embeddings


def test_every_second_layer_may_have_experts(checkpoints, tmp_path):
    """As transformers counts: those whose number + 1 is a multiple of the step. These weights have experts in each layer."""
    folder = changed(checkpoints["qwen3 with experts"][0], tmp_path, settings={"decoder_sparse_step": 2})
    with pytest.raises(ConfigError, match=r"missing for .*: model\.layers\.0\.mlp\.down_proj\.weight"):
        read_hf_model(folder)


def test_one_expert_a_token_with_a_normalised_weight_is_refused(checkpoints, tmp_path):
    """Megatron-Core has a ValueError of its own for it, without the folder's name."""
    folder = changed(checkpoints["qwen3 with experts"][0], tmp_path, settings={"num_experts_per_tok": 1})
    with pytest.raises(ConfigError, match=r"config.json: num_experts_per_tok=1 with norm_topk_prob=true"):
        read_hf_model(folder)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        (
            lambda names: dict.fromkeys(names, "../model.safetensors"),
            "weight_map has '../model.safetensors' for .* beside the index",
        ),
        (lambda names: dict.fromkeys(names, "/dev/zero"), "weight_map has '/dev/zero'"),
        (lambda names: dict.fromkeys(names, "fifo.safetensors"), "fifo.safetensors cannot be read: it is no regular file"),
        (lambda names: dict.fromkeys(names, 3), "weight_map has 3 for"),
        (lambda names: list(names), "weight_map=.* must be an object"),
        (lambda names: {}, "weight_map names no tensor"),
        (lambda names: {**dict.fromkeys(names, "model.safetensors"), names[0]: "other.safetensors"}, "missing for .*: {0}"),
    ],
    ids=["above", "a device", "a fifo", "a number", "a list", "empty", "a file without it"],
)
def test_an_index_names_files_beside_itself(checkpoints, tmp_path, weight_map, message):
    from safetensors.torch import load_file, save_file

    folder = changed(checkpoints["llama"][0], tmp_path)
    os.mkfifo(folder / "fifo.safetensors")
    save_file({"x": torch.zeros(1)}, folder / "other.safetensors")
    names = sorted(load_file(folder / "model.safetensors"))
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map(names)}))
    with pytest.raises(ConfigError, match=message.format(re.escape(names[0]))):
        read_hf_model(folder)


def test_a_folder_without_weights_or_settings_is_refused(checkpoints, tmp_path):
    with pytest.raises(ConfigError, match=r"config.json cannot be read"):
        read_hf_model(tmp_path)
    (tmp_path / "config.json").write_bytes((checkpoints["llama"][0] / "config.json").read_bytes())
    with pytest.raises(ConfigError, match=f"has neither model.safetensors nor {INDEX}: weights in pickles"):
        read_hf_model(tmp_path)


def test_a_name_of_the_hub_is_told_how_to_fetch_it():
    with pytest.raises(ConfigError, match="there is no such folder: .* `hf download Qwen/Qwen3 --local-dir models/Qwen3`$"):
        read_hf_model("Qwen/Qwen3")
    with pytest.raises(ConfigError, match="^--hf-checkpoint models/of/mine: there is no such folder$"):
        read_hf_model("models/of/mine")


def test_a_sequence_beyond_the_positions_is_refused(pool, checkpoints):
    def on_rank(rank):
        model = read_hf_model(checkpoints["llama"][0])
        try:
            for length in (64, 65):
                build_hf_model(model, transformer_config(**model.transformer_options()), max_sequence_length=length)
        except ConfigError as error:
            return str(error)

    assert "sequences of 65 tokens are longer than max_position_embeddings=64" in pool.run(on_rank, world_size=1)[0]
