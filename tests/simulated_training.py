"""One rank of the training command on a simulated GPU: what of sampling, log-probabilities and a step makes the host wait.

    python tests/simulated_training.py        prints one JSON object: setting -> phase -> what was seen, as lists

A process of its own, because Megatron-Core looks for CUDA where it is imported. gloo stands in for NCCL; one rank launches no
collective of its own.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, whatever is installed
from simulated_cuda import simulated_cuda

SETTINGS = {
    "padded, logits, float32": ({}, {"kl_coefficient": 0.1, "entropy_coefficient": 0.01}),
    "packed, fused head, bfloat16": ({"packed": True, "bf16": True}, {"fused_lm_head_loss": True, "fp32_lm_head": True}),
}
VOCABULARY = 20
PROMPTS = [[1, 2, 3], [4, 5]]


def sample_of(index: int, response: list[int], old_log_probs=None, ref_log_probs=None) -> SimpleNamespace:
    return SimpleNamespace(
        tokens=[*PROMPTS[index], *response],
        loss_mask=[1] * len(response),
        advantage=1.0 - 2 * index,
        prompt_id=index,
        rollout_id=None,
        old_log_probs=old_log_probs,
        ref_log_probs=ref_log_probs,
        rollout_log_probs=old_log_probs,
        policy_version=0,
        routes=None,
        kept_ids=None,
        kept_mass=None,
    )


def phases(device: torch.device, settings: dict, options: dict, seen: list) -> dict:
    from megatron_rl.config import PolicyLossConfig
    from megatron_rl.train.generation import SamplingSettings, gumbel_noise
    from megatron_rl.train.trainer import PolicyTrainer, TrainerSettings

    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": VOCABULARY, "max_sequence_length": 16}
    config = PolicyLossConfig(policy_loss="gspo", policy_loss_backend="torch", policy_metrics="with_entropy", **options)
    trainer = PolicyTrainer(TrainerSettings(**sizes, **settings), config, device)
    found = {}

    def phase(name: str, run):
        seen.clear()
        result = run()
        found[name] = list(seen)
        return result

    plan = SamplingSettings(max_new_tokens=3, end_tokens=(), temperature=1.0, vocab_size=VOCABULARY, rows_per_forward=8)
    responses = phase("sample", lambda: trainer.sample(PROMPTS, [0, 1], plan, partial(gumbel_noise, 0, 0)))
    bare = [[sample_of(index, response)] for index, response in enumerate(responses)]
    old = phase("log_probs", lambda: trainer.log_probs(bare))
    reference = trainer.log_probs(bare, of_reference=True) if config.kl_coefficient else [[None], [None]]
    step = [[sample_of(i, responses[i], old[i][0], reference[i][0])] for i in range(len(responses))]
    first = trainer.step(step, policy_version=1)  # what is looked at or allocated once
    assert abs(first["policy/ratio_new_old"] - 1) < 1e-5, first
    phase("step", lambda: trainer.step(step, policy_version=1))
    return found


def main() -> None:
    start = dist.init_process_group
    replaced = {"init_process_group": lambda backend, **kwargs: start("gloo", **kwargs), "get_backend": lambda *group: "nccl"}
    with simulated_cuda() as seen, mock.patch.multiple(dist, **replaced):
        from megatron_rl.megatron.ranks import initialize_ranks

        sizes = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "context_parallel_size": 1}
        device = initialize_ranks(**sizes)
        answer = {name: phases(device, *options, seen) for name, options in SETTINGS.items()}
    print(json.dumps(answer))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
