"""The table of the trainers' own losses: by hand on a ragged step, and each row against the trainer's own code from a checkout.

VERL_ROOT=... SKYRL_ROOT=... NEMO_RL_ROOT=... ROLL_ROOT=... MILES_ROOT=... SLIME_ROOT=... pytest -m host tests/test_explain_stock.py
"""

from __future__ import annotations

import types

import pytest
import torch
from test_golden_losses import functions_of, source_of, statements_of

from megatron_rl.commands.explain.stock import (
    MEAN_OF_TOKEN_MEANS,
    STOCK,
    WHOLE,
    gradient_error,
    read_layout,
    weights_of,
)
from megatron_rl.errors import ConfigError

# Two ranks of two micro-batches of two samples; one sample is fully masked.
LAYOUT = [[[3, 1], [4, 2]], [[0, 5], [2, 1]]]
TOKENS = torch.tensor(LAYOUT).flatten()
SAMPLES = [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
M, DP, DIVISOR = 2, 2, 512
PROMPTS = "aabbccdd"
WEIGHED = TOKENS > 0


def test_a_mean_of_means_by_hand():
    """1 / (M dp T_b) against 1 / T = 1 / 18: micro-batches of 4, 6, 5 and 3 tokens."""
    weights = weights_of(MEAN_OF_TOKEN_MEANS, LAYOUT, None, None)
    own = [1 / (4 * tokens) for tokens in (4, 4, 6, 6, 5, 5, 3, 3)]
    assert weights == pytest.approx([0.0 if i == 4 else own[i] for i in range(8)])
    exact = weights_of(WHOLE[MEAN_OF_TOKEN_MEANS], LAYOUT, None, None)
    assert exact == pytest.approx([0.0 if i == 4 else 1 / 18 for i in range(8)])
    # |w - 1/T|^2 / |1/T|^2 over tokens: (4 (1/8)^2 + 6 (-1/4)^2 + 5 (-1/10)^2 + 3 (1/2)^2) / 18
    error = gradient_error(weights, exact, TOKENS.tolist())
    assert error == pytest.approx(((4 / 64 + 6 / 16 + 5 / 100 + 3 / 4) / 18) ** 0.5)


def test_every_weight_that_depends_on_the_layout_stands_for_one_that_does_not():
    """Each sample alone on a rank has another weight under the first, and the same under the second."""
    alone = [[[int(tokens)]] for tokens in TOKENS]
    for weight in {weight for weights in STOCK.values() for weight in weights.values()}:
        here, there = (weights_of(weight, layout, DIVISOR, PROMPTS) for layout in (LAYOUT, alone))
        assert (here == pytest.approx(there)) == (weight not in WHOLE), weight
        whole = WHOLE.get(weight, weight)
        here, there = (weights_of(whole, layout, DIVISOR, PROMPTS) for layout in (LAYOUT, alone))
        assert here == pytest.approx(there), weight


def test_a_typed_layout():
    assert read_layout("3100,900|2500,700||400|60") == [[[3100, 900], [2500, 700]], [[400], [60]]]
    with pytest.raises(ConfigError, match=r"--micro-batches 3,a: give response lengths"):
        read_layout("3,a")


# The trainers' own functions


def matrix(samples: list[int], values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The losses of tokens and their mask, padded to the longest of the micro-batch."""
    width = int(TOKENS[samples].max())
    mask = torch.stack([(torch.arange(width) < TOKENS[sample]).double() for sample in samples])
    return torch.stack([values[sample, :width] for sample in samples]), mask


def agrees(host: str, name: str, reduced) -> None:
    """reduced(losses, mask, samples): the trainer's number of a micro-batch, with its factors, averaged over ranks and added over
    micro-batches."""
    values = torch.zeros(len(TOKENS), int(TOKENS.max()), dtype=torch.float64, requires_grad=True)
    total = sum(reduced(*matrix(samples, values), samples) for rank in SAMPLES for samples in rank) / DP
    (weights,) = torch.autograd.grad(total, values)
    found = torch.tensor(weights_of(STOCK[host][name], LAYOUT, DIVISOR, PROMPTS), dtype=torch.float64)
    # The trainers add 1e-8 to some divisors.
    torch.testing.assert_close(found, weights[:, 0] * WEIGHED, rtol=1e-7, atol=0)


@pytest.mark.host("VERL_ROOT")
@pytest.mark.parametrize("mode", [name for name in STOCK["verl"] if name != "geo_mean"])
def test_verl(mode):
    """The worker multiplies by M what Megatron's schedule divides by it."""
    masked = types.SimpleNamespace(masked_sum=lambda x, mask: (x * mask).sum())
    agg_loss = functions_of(source_of("VERL_ROOT", "verl/trainer/ppo/core_algos.py"), "agg_loss", verl_F=masked).agg_loss
    scale = None if "without" in mode else DIVISOR
    batch = {"dp_size": DP, "batch_num_tokens": int(TOKENS.sum()), "global_batch_size": len(TOKENS), "loss_scale_factor": scale}
    agrees("verl", mode, lambda losses, mask, samples: agg_loss(losses, mask, mode.split()[0], **batch))


@pytest.mark.host("SKYRL_ROOT")
@pytest.mark.parametrize("reduction", STOCK["skyrl"])
def test_skyrl(reduction):
    """The driver scales the advantages of a mini-batch, micro-batches add tokens, and the worker multiplies by what schedule and
    ranks divide by."""
    tree = source_of("SKYRL_ROOT", "skyrl/backends/skyrl_train/utils/ppo_utils.py")
    found = functions_of(tree, "apply_loss_reduction_to_advantages_minibatch")
    mask = matrix(list(range(8)), torch.zeros(8, 5, dtype=torch.float64))[1]
    of_prompts = [(first, first + 2) for first in range(0, 8, 2)]
    scaled = found.apply_loss_reduction_to_advantages_minibatch(torch.ones_like(mask), mask, reduction, 2, DIVISOR, of_prompts)
    weights = torch.tensor(weights_of(STOCK["skyrl"][reduction], LAYOUT, DIVISOR, PROMPTS), dtype=torch.float64)
    torch.testing.assert_close(weights, scaled[:, 0] * WEIGHED)


@pytest.mark.host("NEMO_RL_ROOT")
@pytest.mark.parametrize("name", STOCK["nemo_rl"])
def test_nemo_rl(name):
    """Its workers add micro-batches and ranks."""
    masked_mean = functions_of(source_of("NEMO_RL_ROOT", "nemo_rl/algorithms/utils.py"), "masked_mean").masked_mean
    tokens, present = TOKENS.sum().double(), WEIGHED.sum().double()

    def reduced(losses, mask, samples):
        if name == "token_level_loss=true":
            return DP * masked_mean(losses, mask, global_normalization_factor=tokens)
        of_samples = masked_mean(losses, mask, dim=-1)
        return DP * masked_mean(of_samples, WEIGHED[samples].double(), global_normalization_factor=present)

    agrees("nemo_rl", name, reduced)


@pytest.mark.host("ROLL_ROOT")
@pytest.mark.parametrize("mode", STOCK["roll"])
def test_roll(mode):
    """apply_loss_scale multiplies by M dp, the schedule and DDP divide by it."""
    found = functions_of(source_of("ROLL_ROOT", "roll/utils/functionals.py"), "agg_loss", "masked_mean", "masked_sum")
    counts = {"batch_num_tokens": int(TOKENS.sum()), "global_valid_samples": int(WEIGHED.sum())}
    # token-mean there adds all of the matrix, whose masked places are 0
    agrees("roll", mode, lambda losses, mask, samples: DP * found.agg_loss(losses * mask, mask, mode, **counts))


REDUCERS = {"miles": "miles/backends/training_utils/cp_utils.py", "slime": "slime/backends/megatron_utils/cp_utils.py"}


@pytest.mark.parametrize("name", ["default", "calculate_per_token_loss"])
@pytest.mark.parametrize("host", [pytest.param(host, marks=pytest.mark.host(f"{host.upper()}_ROOT")) for host in REDUCERS])
def test_miles_and_slime(host, name):
    """The host multiplies by M dp / N what Megatron divides by M dp; per token Megatron divides by the tokens that it counted."""
    groups = types.SimpleNamespace(get_context_parallel_world_size=lambda: 1)
    parallel = types.SimpleNamespace(cp=types.SimpleNamespace(size=1))
    others = {"mpu": groups, "get_parallel_state": lambda: parallel}
    reducer_of = functions_of(source_of(f"{host.upper()}_ROOT", REDUCERS[host]), "get_sum_of_sample_mean", **others)

    def reduced(losses, mask, samples):
        lengths, is_per_token = [losses.shape[1]] * len(samples), name != "default"
        reducer = reducer_of.get_sum_of_sample_mean(lengths, lengths, list(mask), calculate_per_token_loss=is_per_token)
        return DP * reducer(losses.flatten()) / (TOKENS.clamp(min=1).sum() if is_per_token else len(TOKENS))

    agrees(host, name, reduced)


@pytest.mark.host("PRIME_RL_ROOT")
def test_prime_rl():
    """The trainer divides by the tokens of all ranks, and scale_gradients_ undoes FSDP's mean over them."""

    class Type:
        def __class_getitem__(cls, item):
            return cls

    names = dict.fromkeys(("Bool", "Float", "LossFn"), Type) | {"LossInputs": types.SimpleNamespace, "Any": object}
    tree = source_of("PRIME_RL_ROOT", "src/prime_rl/trainer/rl/loss.py")
    compute_loss = functions_of(tree, "compute_loss", Tensor=torch.Tensor, **names).compute_loss

    def sums(inputs):
        return types.SimpleNamespace(loss=(inputs.trainer_logprobs * inputs.loss_mask).sum(), metrics={})

    def reduced(losses, mask, samples):
        nothing, total = [None] * 4, int(TOKENS.sum())
        return DP * compute_loss([*losses], [*losses], None, [*losses], [*mask.bool()], *nothing[:3], sums, total, 1, 1)[0]

    agrees("prime_rl", "default", reduced)


@pytest.mark.host("TRL_ROOT")
@pytest.mark.parametrize("kind", [kind for kind in STOCK["trl"] if kind != "luspo"])
def test_trl(kind):
    """The branch of _compute_loss that divides; two accumulation steps on two processes."""
    tree = source_of("TRL_ROOT", "trl/trainer/grpo_trainer.py")
    accelerator = types.SimpleNamespace(num_processes=DP, gather=lambda loss: loss[None], sync_gradients=True)
    trainer = types.SimpleNamespace(
        loss_type=kind,
        current_gradient_accumulation_steps=M,
        max_completion_length=DIVISOR,
        args=types.SimpleNamespace(steps_per_generation=M),
        accelerator=accelerator,
        _metrics={"train": {"policy_loss": []}},
    )

    def reduced(losses, mask, samples):
        inputs = {"num_items_in_batch": TOKENS.sum().double()}
        given = {"self": trainer, "mode": "train", "per_token_loss": losses, "mask": mask, "inputs": inputs}
        found = statements_of(tree, "_compute_loss", lambda text: text.startswith("if self.loss_type in ['grpo', 'sapo']"), **given)
        return found["loss"]

    agrees("trl", kind, reduced)
