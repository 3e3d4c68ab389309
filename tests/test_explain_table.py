"""The table of `megatron-rl explain --host`: each factor is what the code behind it does, executed on one token a sample."""

from __future__ import annotations

import json
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
from explain_cases import LAYOUT, STEP, explain, explain_json
from host_emulator import EmulatedHost

from megatron_rl.config import PolicyLossConfig
from megatron_rl.count import StepTotals
from megatron_rl.hosts.args import TOTALS_OF_HOST, HostLaunch, host_named
from megatron_rl.hosts.loss import sample_weights
from megatron_rl.hosts.rewards import HostRollouts, reward_weights
from megatron_rl.layout.groups import ParallelGroups
from megatron_rl.megatron.schedule import delivered_factor, scale_for_schedule
from megatron_rl.weights import get_loss_aggregation, loss_aggregation_names, sample_token_weights

# As LAYOUT says: cp 2, dp 2, 3 micro-batches. Nothing is launched over these groups.
OF_TWO, OF_FOUR = (SimpleNamespace(rank=lambda: 0, size=lambda size=size: size) for size in (2, 4))
GROUPS = ParallelGroups(cp=OF_TWO, dp=OF_TWO, dp_cp=OF_FOUR)
NUM_MICROBATCHES = 3
L = 8.0
PROMPTS = ["a", "a", "b", "b"]
# flags -> tokens of each sample, the rollout of each
STEPS = {
    "one sample each": ([], [2, 4, 1, 3], [0, 1, 2, 3]),
    "a masked sample": (["--loss-masks", "11,1111,1,000"], [2, 4, 1, 0], [0, 1, 2, 3]),
    "a rollout of two": (["--rollout-ids", "0,0,1,2"], [2, 4, 1, 3], [0, 0, 1, 2]),
}
CLOSE = {"rel": 1e-6, "abs": 0.0}


def sums(counts: list[int], names: list) -> torch.Tensor:
    """Of each sample, the tokens of all that have its name."""
    return torch.tensor([sum(c for c, other in zip(counts, names, strict=True) if other == name) for name in names])


def values_of(chain: dict) -> dict[str, list[float]]:
    return {factor["stage"]: factor["values"] for factor in chain["factors"]}


def unit_loss(args, batch, logits, reduce):
    """A custom loss of 1: what comes out of the host is the host's factor."""
    return torch.ones((), dtype=torch.float64), {}


def emulated(host: str, per_token: bool, counts: list[int], num_rollouts: int) -> tuple[float, int]:
    """(factor on the loss, tokens that the host counts over the step)."""
    args = Namespace(
        loss_type="custom_loss", custom_loss_function_path=f"{__name__}.unit_loss", calculate_per_token_loss=per_token,
        recompute_loss_function=False, allgather_cp=False, qkv_format="thd",
    )  # fmt: skip
    batch = {"loss_masks": torch.tensor(counts)[:, None], "total_lengths": [1] * 4, "response_lengths": [0] * 4}
    batch["rollout_mask_sums"] = torch.ones(4)
    loss, num_tokens, _ = EmulatedHost(host_named(host), GROUPS).loss_function(
        args, batch, torch.zeros(1, 1, 1), num_microbatches=NUM_MICROBATCHES, num_rollouts=num_rollouts
    )
    return float(loss), int(num_tokens)


def launch_of(config: PolicyLossConfig, **arguments) -> HostLaunch:
    launch = HostLaunch(Namespace(**arguments))
    vars(launch)["config"] = config
    return launch


def reduced(host, route, has_hook, per_token, config, counts, of_rollout) -> torch.Tensor:
    """What one token counts in the number that the loss function returns."""
    tokens = torch.tensor(counts)
    if route == "reducer":
        name, divisor = config.loss_aggregation, config.loss_aggregation_divisor
        name, divisor = ("sample_mean", None) if has_hook else (name, divisor)
        return sample_token_weights(name, tokens, TOTALS_OF_HOST, divisor=divisor, are_of_step=False)
    hook = "megatron_rl.hooks.reward_post_process" if has_hook else None
    launch = launch_of(config, calculate_per_token_loss=per_token, custom_reward_post_process_path=hook)
    # A masked sample is refused under the per-token contract; the table then shows what its tokens would get.
    whole = tokens.clamp(min=1) if per_token else tokens
    return sample_weights(launch, whole, of_rollout)[0]


# Each host, route and contract meets two steps.
ROWS = [
    ("miles", "reducer", False, "one sample each"),
    ("slime", "reducer", False, "a masked sample"),
    ("slime", "custom_loss", False, "a rollout of two"),
    ("miles", "custom_loss", False, "a masked sample"),
    ("slime", "reducer", True, "a masked sample"),
    ("miles", "custom_loss", True, "a rollout of two"),
]


@pytest.mark.parametrize(("host", "route", "per_token", "step"), ROWS)
def test_every_row_of_a_host_is_what_its_code_does(host, route, per_token, step):
    flags, counts, rollouts = STEPS[step]
    tokens, of_rollout = torch.tensor(counts), sums(counts, rollouts)
    has_tokens, num_rollouts = tokens > 0, len(set(rollouts))
    for name in ("token_mean",) if per_token else loss_aggregation_names():
        divisor = L if get_loss_aggregation(name).takes_divisor else None
        config = PolicyLossConfig(loss_aggregation=name, loss_aggregation_divisor=divisor)
        arguments = [*STEP, *flags, "--host", host, "--loss-aggregation", name, *["--policy-loss", "grpo"] * (route != "reducer")]
        arguments += ["--loss-aggregation-divisor", str(L)] * (divisor is not None) + ["--calculate-per-token-loss"] * per_token
        found = values_of(json.loads(explain(*arguments, *LAYOUT, "--json")[1])["chain"])  # one that differs too
        has_hook = "reward hook" in found
        expected = reduced(host, route, has_hook, per_token, config, counts, of_rollout)
        assert found[route] == pytest.approx(expected.double().where(has_tokens, 0.0).tolist(), **CLOSE), name
        factor, num_tokens = emulated(host, per_token, counts, num_rollouts)
        assert found["host"] == pytest.approx([factor] * 4, **CLOSE)
        if per_token:
            assert found["finalize"] == pytest.approx([1 / (2 * num_tokens)] * 4, **CLOSE)
        if has_hook:
            masks = [torch.tensor([1] * count or [0]) for count in counts]
            reducer = "megatron_rl.reducers.get_pg_loss_reducer" if route == "reducer" else None
            of_step = {"use_dynamic_global_batch_size": False, "global_batch_size": num_rollouts, "n_samples_per_prompt": None}
            launch = launch_of(config, **of_step, custom_pg_loss_reducer_function_path=reducer)
            weights = reward_weights(HostRollouts(masks, PROMPTS, rollouts), launch)
            assert found["reward hook"] == pytest.approx(weights.tolist(), **CLOSE), name


@pytest.mark.parametrize("divisor", ["none", "num_samples"])
@pytest.mark.parametrize("per_token", [False, True], ids=["unit", "per-token"])
def test_every_row_where_the_package_weighs_is_what_its_code_does(per_token, divisor):
    """scale_for_schedule; backward delivers of it what delivered_factor says, and DDP and finalize_model_grads undo the rest."""
    totals = StepTotals(num_samples=4, num_prompts=2, num_tokens=10)
    config = Namespace(calculate_per_token_loss=per_token, grad_scale_func=None)
    shared = {"totals": totals, "config": config, "groups": GROUPS}
    settings = {**shared, "num_local_tokens": 1}
    one = torch.ones((), dtype=torch.float64)
    scale = float(scale_for_schedule(one, NUM_MICROBATCHES, **settings)[0])
    delivered = delivered_factor(NUM_MICROBATCHES, **shared)
    arguments = ["--host", "megatron_lm" if per_token else "train", "--gradient-divisor", divisor]
    arguments += ["--loss-aggregation", "token_mean", "--calculate-per-token-loss"] * per_token
    found = values_of(explain_json(*STEP, *arguments, *LAYOUT)["chain"])
    assert found["scale"] == pytest.approx([scale] * 4, **CLOSE)
    assert found["schedule"] == pytest.approx([delivered / scale] * 4, **CLOSE)
    undone = found["DDP"][0] * (found["finalize"][0] if per_token else 1.0)
    assert undone == pytest.approx(1 / delivered, **CLOSE)
    if divisor == "num_samples":
        divided = float(scale_for_schedule(one, NUM_MICROBATCHES, **settings, gradient_divisor=divisor)[0])
        assert found["gradient divisor"] == pytest.approx([divided / scale] * 4, **CLOSE)
