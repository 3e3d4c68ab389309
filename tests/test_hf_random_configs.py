"""Folders of random configs of each known architecture, on random layouts: logits of `transformers`, and the same bits back."""

from __future__ import annotations

import random

import pytest
from helpers import pool_of

from megatron_rl.testing.layout_step import Layout

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[hf]'")
from test_hf_checkpoint import LATENT, ONE_GROUP, Checkpoints, check_logits_and_bits  # noqa: E402

pytestmark = [pytest.mark.megatron, pytest.mark.slow]
pool = pool_of(4)


def random_case(seed):
    """A class of transformers, its settings, and a layout on which they fit."""
    rng = random.Random(seed)
    kind = rng.choice(["Llama", "Mistral", "Qwen2", "Qwen3", "Qwen3Moe", "Mixtral", "Glm4Moe", "DeepseekV3", "GptOss"])
    has_experts = kind in ("Qwen3Moe", "Mixtral", "Glm4Moe", "DeepseekV3", "GptOss")
    heads, tensor = 4 * rng.choice([1, 2]), rng.choice([1, 2, 4])
    is_sequence_parallel = tensor > 1 and (has_experts or rng.random() < 0.5)
    of_experts = {"expert": tensor, "expert_tensor": 1} if has_experts else {}
    pipeline = rng.choice([1, 2]) if tensor < 4 else 1
    layout = Layout(tensor=tensor, pipeline=pipeline, sequence_parallel=is_sequence_parallel, **of_experts)
    factor = {"factor": rng.uniform(2, 8)}
    length = {"original_max_position_embeddings": rng.choice([8, 16, 64])}
    rope = rng.choice(
        [
            None,
            {"rope_type": "linear", **factor},
            {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": rng.uniform(2, 6), **factor, **length},
            {"rope_type": "yarn", "beta_fast": rng.uniform(2, 8), "beta_slow": rng.uniform(0.2, 1), **factor, **length},
        ]
    )
    settings = {
        "vocab_size": rng.randint(99, 140),
        "hidden_size": 8 * heads,
        "intermediate_size": 16 * rng.randint(1, 6),
        "num_hidden_layers": layout.pipeline * rng.choice([1, 2]),
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice([1, 2, 4]),
        "tie_word_embeddings": rng.random() < 0.4,
        "rms_norm_eps": 10 ** rng.uniform(-7, -4),
        "rope_theta": 10 ** rng.uniform(2, 6),
        "rope_scaling": rope,
    }
    if kind not in ("Qwen2", "DeepseekV3"):
        settings["head_dim"] = rng.choice([8, 16, 24])
    if kind == "GptOss":
        settings |= {"rope_scaling": rope or {"rope_type": "default"}, "sliding_window": rng.randint(1, 14)}
        settings |= {"swiglu_limit": rng.uniform(2, 20)} if transformers.__version__ >= "5" else {}
        settings |= {"layer_types": rng.choices(["sliding_attention", "full_attention"], k=settings["num_hidden_layers"])}
    if kind in ("Mistral", "Mixtral"):
        settings["sliding_window"] = None
    if has_experts:
        count = 4 * rng.choice([1, 2])
        settings |= {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_experts": count}
        settings |= (
            {"num_local_experts": count}
            if kind in ("Mixtral", "GptOss")
            else {"norm_topk_prob": kind != "Qwen3Moe" or rng.random() < 0.5}
        )
    if kind in ("Glm4Moe", "DeepseekV3"):
        del settings["num_experts"]
        settings |= {"n_routed_experts": count, "n_shared_experts": rng.choice([1, 2]), "first_k_dense_replace": rng.choice([0, 1])}
        settings |= rng.choice([ONE_GROUP, {"n_group": 4 if count == 8 else 2, "topk_group": 1}])
        settings |= {"routed_scaling_factor": rng.uniform(0.5, 3)}
        if rope is not None and rope["rope_type"] == "yarn":  # where a part of a head rotates
            settings["rope_scaling"] = rope | {"mscale": 0.7, "mscale_all_dim": 0.7}
    if kind == "Glm4Moe":
        settings |= {"attention_bias": rng.random() < 0.5, "use_qk_norm": rng.random() < 0.5}
    if kind == "DeepseekV3":
        settings |= {**LATENT, "num_key_value_heads": heads, "q_lora_rank": rng.choice([None, 20]), "rms_norm_eps": 1e-6}
    return kind, settings, layout


@pytest.mark.parametrize("seed", range(16))
def test_random_configs_have_the_logits_of_transformers_and_the_same_bits(pool, tmp_path_factory, tmp_path, seed):
    kind, settings, layout = random_case(seed)
    check_logits_and_bits(pool, Checkpoints(tmp_path_factory).make(kind, settings), tmp_path / "saved", layout)
