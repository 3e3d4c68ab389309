"""Golden values of whole steps: real layouts of Megatron-Core, and emulated trainers. golden_core.py stores and compares them.

Of a layout's gradient there is a digest of its bits, and sums of each parameter that say by how much it moved. Of a trainer's step
there is the whole gradient by log-probabilities or logits. Megatron-LM has no emulation: its step is that of the layouts.
The models, the trainers and the trainers' samples are those of other tests; "Adapter" has each call of them and of the package.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

SP = {"tensor": 2, "sequence_parallel": True}
# Layout, model, loss, aggregation. Each model has two layers.
LAYOUTS: dict[str, tuple[dict, str, str, str]] = {
    "one rank, 4 micro-batches": ({"num_microbatches": 4}, "dense", "grpo", "sample_mean"),
    "dp 2": ({"data": 2, "num_microbatches": 2}, "dense", "gspo", "prompt_mean"),
    "tp 2 with sp": ({**SP, "num_microbatches": 2}, "dense", "cispo", "token_mean"),
    "cp 2, dp 2, packed": ({"context": 2, "data": 2, "packed": True, "num_microbatches": 2}, "dense", "gmpo", "constant"),
    "pp 2": ({"pipeline": 2, "num_microbatches": 4}, "dense", "vespo", "sample_mean"),
    "dp 2, ep 2, router losses": ({"data": 2, "expert": 2, "num_microbatches": 2}, "router losses", "gspo", "sample_mean"),
    "tp 2 with sp, ep 2": ({**SP, "expert": 2, "expert_tensor": 1, "num_microbatches": 2}, "experts", "grpo", "prompt_mean"),
    "cp 2, packed, multi-token prediction": ({"context": 2, "packed": True}, "multi-token prediction", "gspo", "token_mean"),
}
EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32, "moe_layer_freq": (1, 1)}
MODELS: dict[str, dict] = {
    "dense": {},
    "experts": EXPERTS | {"moe_aux_loss_coeff": 0.0},
    "router losses": EXPERTS | {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.01},
    "multi-token prediction": {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.7},
}
OURS_IN_HOST = [(door, loss, size) for door, loss in (("reducer", "grpo"), ("custom_loss", "gspo")) for size in (0, 3)]
# Trainer, our part in it, loss, aggregation, layout: by samples of a micro-batch, 0 for all.
HOSTS = [
    *((host, door, loss, "constant", size) for host in ("miles", "slime") for door, loss, size in OURS_IN_HOST),
    *((host, "loss", "gspo", "sample_mean", 0) for host in ("verl", "nemo_rl", "roll", "skyrl")),
    *((host, "loss", "grpo", "token_mean", 3) for host in ("verl", "nemo_rl", "roll", "skyrl")),
]
KEYS = [f"layout | {name}" for name in LAYOUTS] + ["host | " + " | ".join(map(str, row)) for row in HOSTS]


def numbers(key: str) -> Iterator[int]:
    """An endless row of 64-bit numbers: SplitMix64, from a hash of the key."""
    state = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")
    while True:
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        mixed = state
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ (mixed >> shift)) * factor % 2**64
        yield mixed ^ (mixed >> 31)


def values_of(keys: Sequence[str]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    from megatron_rl.testing.ranks import RankPool

    with RankPool(4) as pool:
        for key in keys:
            kind, *words = key.split(" | ")
            loss, gradient = step_of_layout(pool, *words) if kind == "layout" else step_of_host(pool, *words)
            found = summary(gradient) if isinstance(gradient, dict) else {"gradient": gradient}
            yield key, found | {"loss": torch.tensor([loss], dtype=torch.float64)}


def summary(gradient: dict[str, Tensor]) -> dict[str, Tensor]:
    """The digest of all bits; of each parameter the sum, that of absolute values, and that of the products with hashed numbers."""
    digest, sums = hashlib.sha256(), {}
    for name, value in sorted(gradient.items()):
        flat, drawn = value.double().flatten().contiguous(), numbers(name)
        digest.update(name.encode() + flat.numpy().tobytes())
        factors = torch.tensor([next(drawn) % 17 - 8 for _ in range(len(flat))], dtype=torch.float64) / 8
        sums[f"gradient of {name}"] = torch.stack([flat.sum(), flat.abs().sum(), flat @ factors])
    return {"digest": torch.tensor(list(digest.digest()), dtype=torch.uint8), **sums}


# ---------------------------------------------------------------------------------------------------------------- Adapter


def step_of_layout(pool, name: str) -> tuple[float, dict[str, Tensor]]:
    """(loss, gradient of each parameter) of one optimiser step through Megatron-Core, with a KL and an entropy term."""
    from megatron_rl.config import PolicyLossConfig
    from megatron_rl.testing.invariance import Layout, StepSample, TinyGPT, step_on_layout

    layout, model, loss, aggregation = LAYOUTS[name]
    drawn, samples = numbers("samples of layouts"), []
    for index in range(16):
        prompt, response = 1 + next(drawn) % 6, 1 + next(drawn) % 9

        def near(gap: float, size: int = response) -> list[float]:
            """Around the logarithm of 1 / 61, which the model begins with."""
            return [-4.11 + gap * (next(drawn) % 8193 - 4096) / 4096 for _ in range(size)]

        sample = StepSample(
            tokens=[next(drawn) % 61 for _ in range(prompt + response)],
            loss_mask=[int(next(drawn) % 4 > 0 and index != 5) for _ in range(response)],
            prompt_id=f"prompt {index // 4}",
            advantage=(next(drawn) % 129 - 64) / 32,
            old_log_probs=near(0.5),
            ref_log_probs=near(0.5),
        )
        samples.append(sample)
    config = PolicyLossConfig(
        policy_loss=loss,
        loss_aggregation=aggregation,
        loss_aggregation_divisor=8.0 if aggregation == "constant" else None,
        kl_coefficient=0.1,
        entropy_coefficient=0.01,
        router_aux_loss="exact" if model == "router losses" else None,
    )
    tiny = TinyGPT(num_layers=2, experts=tuple(MODELS[model].items()))
    result = step_on_layout(pool, Layout(**layout), samples, config, tiny)
    return result.loss, result.gradient


def step_of_host(pool, host: str, ours: str, loss: str, aggregation: str, size: str) -> tuple[float, Tensor]:
    """(loss, gradient by all logits, or by the log-probabilities of the responses) of one optimiser step of an emulated trainer."""
    import roll_cases
    from adapter_cases import ADAPTERS
    from host_cases import HostCase
    from host_ranks import run_cases

    if host in ("miles", "slime"):
        layout = {"world_size": 2, "context_parallel_size": 2 if size == "3" else 1}
        case = HostCase(host, ours, aggregation, loss, size=int(size))
        ((result,), *_) = pool.run(run_cases, {}, [case], **layout)
        if isinstance(result, str):
            raise AssertionError(f"{case}: {result}")
        return result.loss, result.gradient.flatten()
    adapter = ADAPTERS[host]
    case = adapter.case(loss=loss, aggregation=aggregation, **(adapter.other if size == "3" else {}))
    if host == "roll":
        layout = {"world_size": case.dp * case.cp, "context_parallel_size": case.cp}
        found = roll_cases.added_up([part for (part,) in pool.run(roll_cases.results_on_rank, [case], **layout)])
    else:
        with pytest.MonkeyPatch.context() as patch:
            adapter.install(patch)
            found = adapter.run(case, adapter.step(case))
    return found.loss, torch.cat([gradient.flatten() for gradient in found.gradients])
