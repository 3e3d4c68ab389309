"""The weights of a trainer's own loss: by hand on a ragged step, and by the trainer's own functions from checkouts."""

from __future__ import annotations

import ast
import os
import types
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from test_golden_losses import functions_of, source_of, statements_of

from megatron_rl.aggregation_record import TOKEN_MEAN
from megatron_rl.commands.doctor.recorded_step import difference, microbatches, token_weights
from megatron_rl.hosts import roll, skyrl, stock, trl, verl
from megatron_rl.hosts.base import HostOptions, host_named
from megatron_rl.hosts.doors import DOORS
from megatron_rl.hosts.settings import Settings

# Two ranks of two micro-batches of two samples; one sample is fully masked, and another one is padded.
TOKENS = torch.tensor([3, 1, 4, 2, 0, 5, 2, 1])
LENGTHS = torch.tensor([3, 2, 5, 2, 4, 5, 2, 1])
PARTS = microbatches(8, 2, 2)
M, DP = 2, 2
WEIGHED = TOKENS > 0


def stock_of(door: str, **given) -> stock.Stock:
    names = {one.name.rpartition(".")[2]: one.name for one in DOORS[door].settings}
    settings = {names.get(name, name): value for name, value in given.items()}
    return DOORS[door].stock(Settings.of_names(settings, DOORS[door].all_defaults))


def test_the_samples_of_each_micro_batch():
    assert PARTS == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert microbatches(5, 2, 2) == [[[0, 1], [2]], [[3, 4]]]


def test_a_mean_of_means_by_hand():
    """1 / (M dp T_b) against 1 / T = 1 / 18: micro-batches of 4, 6, 5 and 3 tokens."""
    weights = token_weights(stock.MEAN_OF_TOKEN_MEANS, TOKENS, LENGTHS, PARTS)
    own = [1 / (4 * tokens) for tokens in (4, 4, 6, 6, 5, 5, 3, 3)]
    assert weights.tolist() == pytest.approx([0.0 if i == 4 else own[i] for i in range(8)])
    found = difference("policy", stock.MEAN_OF_TOKEN_MEANS, TOKENS, LENGTHS, PARTS)
    assert found.ratios.tolist() == pytest.approx([own[i] * 18 for i in range(8) if i != 4])
    # |w - 1/T|^2 / |1/T|^2 over tokens: (4 (1/8)^2 + 6 (-1/4)^2 + 5 (-1/10)^2 + 3 (1/2)^2) / 18
    assert found.error == pytest.approx(((4 / 64 + 6 / 16 + 5 / 100 + 3 / 4) / 18) ** 0.5)


@pytest.mark.parametrize("weight", [TOKEN_MEAN, stock.SAMPLE_MEAN, stock.OF_PRESENT_SAMPLES], ids=str)
def test_a_weight_of_the_step_is_exact(weight):
    assert difference("policy", weight, TOKENS, LENGTHS, PARTS).error == 0


def test_the_mean_over_the_step_that_a_mean_of_means_stands_for():
    assert stock.of_the_step(stock.MEAN_OF_TOKEN_MEANS) == TOKEN_MEAN
    assert stock.of_the_step(stock.MEAN_OF_SAMPLE_MEANS) == stock.SAMPLE_MEAN
    assert stock.aggregation_of(stock.MEAN_OF_TOKEN_MEANS) == "token_mean"


# The trainers' own functions


def matrix(samples: list[int], values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The losses of tokens and their mask, padded to the longest of the micro-batch; unmasked tokens come first."""
    width = int(LENGTHS[samples].max())
    mask = torch.stack([(torch.arange(width) < TOKENS[sample]).double() for sample in samples])
    return torch.stack([values[sample, :width] for sample in samples]), mask


def measured(reduced) -> torch.Tensor:  # [S] float64, the weight of a token of each sample
    """Of reduced(losses, mask, samples), already with the trainer's factors, averaged over ranks and summed over micro-batches."""
    values = torch.zeros(len(TOKENS), int(LENGTHS.max()), dtype=torch.float64, requires_grad=True)
    total = sum(reduced(*matrix(samples, values), samples) for of_rank in PARTS for samples in of_rank) / DP
    (weights,) = torch.autograd.grad(total, values)
    assert all(len(set(row[:n].tolist())) <= 1 for row, n in zip(weights, TOKENS.tolist(), strict=True))
    return weights[:, 0] * WEIGHED


def agrees(weight, reduced) -> None:
    # The trainers add 1e-8 to some divisors.
    torch.testing.assert_close(token_weights(weight, TOKENS, LENGTHS, PARTS), measured(reduced), rtol=1e-7, atol=0)


@pytest.mark.host("VERL_ROOT")
@pytest.mark.parametrize("scale", [None, 1])
@pytest.mark.parametrize("mode", verl.STOCK_MODES)
def test_verl(mode, scale):
    """The worker multiplies by M what Megatron's schedule divides by it."""
    masked = types.SimpleNamespace(masked_sum=lambda x, mask: (x * mask).sum())
    tree = source_of("VERL_ROOT", "verl/trainer/ppo/core_algos.py")
    agg_loss = functions_of(tree, "agg_loss", verl_F=masked).agg_loss
    batch = {"dp_size": DP, "batch_num_tokens": int(TOKENS.sum()), "global_batch_size": len(TOKENS), "loss_scale_factor": scale}
    found = stock_of("verl", loss_agg_mode=mode, use_kl_loss=True, entropy_coeff=0.1, loss_scale_factor=scale)
    assert found.policy == found.kl == found.entropy
    agrees(found.policy, lambda losses, mask, samples: agg_loss(losses, mask, mode, **batch))


@pytest.mark.host("SKYRL_ROOT")
@pytest.mark.parametrize("reduction", [name for name in skyrl.STOCK_REDUCTIONS if name != "prompt_mean"])
def test_skyrl(reduction):
    """The driver scales the advantages, micro-batches add tokens, and the worker multiplies by what schedule and ranks divide by.
    The mini-batch of the driver is a rank's share."""
    tree = source_of("SKYRL_ROOT", "skyrl/backends/skyrl_train/utils/ppo_utils.py")
    found = functions_of(tree, "apply_loss_reduction_to_advantages_minibatch")
    scale = found.apply_loss_reduction_to_advantages_minibatch
    mask = matrix(list(range(8)), torch.zeros(8, 5, dtype=torch.float64))[1]
    scaled = scale(torch.ones_like(mask), mask, reduction, 2, 1)
    weights = token_weights(stock_of("skyrl", loss_reduction=reduction).policy, TOKENS, LENGTHS, PARTS)
    torch.testing.assert_close(weights, scaled[:, 0] * WEIGHED)


@pytest.mark.host("SKYRL_ROOT")
def test_the_regularisers_of_skyrl():
    """Means of a micro-batch, averaged over micro-batches and ranks."""
    tree = source_of("SKYRL_ROOT", "skyrl/backends/skyrl_train/utils/torch_utils.py")
    masked_mean = functions_of(tree, "masked_mean").masked_mean
    found = stock_of("skyrl", use_kl_loss=True, use_entropy_loss=True, **{"trainer.max_tokens_per_microbatch": 4096})
    agrees(found.kl, lambda losses, mask, samples: masked_mean(losses, mask, dim=-1).mean() / M)
    agrees(found.entropy, lambda losses, mask, samples: masked_mean(losses, mask) / M)
    assert stock_of("skyrl", use_kl_loss=True).kl == stock.SAMPLE_MEAN  # micro-batches of as many samples


@pytest.mark.host("NEMO_RL_ROOT")
@pytest.mark.parametrize("is_of_tokens", [True, False])
def test_nemo_rl(is_of_tokens):
    """Its workers add micro-batches and ranks."""
    masked_mean = functions_of(source_of("NEMO_RL_ROOT", "nemo_rl/algorithms/utils.py"), "masked_mean").masked_mean
    tokens, present = TOKENS.sum().double(), WEIGHED.sum().double()

    def reduced(losses, mask, samples):
        if is_of_tokens:
            return DP * masked_mean(losses, mask, global_normalization_factor=tokens)
        of_samples = masked_mean(losses, mask, dim=-1)
        return DP * masked_mean(of_samples, WEIGHED[samples].double(), global_normalization_factor=present)

    found = stock_of("nemo_rl", token_level_loss=is_of_tokens)
    assert found.kl == found.policy
    agrees(found.policy, reduced)


@pytest.mark.host("ROLL_ROOT")
@pytest.mark.parametrize("mode", roll.STOCK_MODES)
def test_roll(mode):
    """apply_loss_scale multiplies by M dp, the schedule and DDP divide by it."""
    tree = source_of("ROLL_ROOT", "roll/utils/functionals.py")
    found = functions_of(tree, "agg_loss", "masked_mean", "masked_sum")
    counts = {"batch_num_tokens": int(TOKENS.sum()), "global_valid_samples": int(WEIGHED.sum())}

    def reduced(losses, mask, samples):
        losses = losses * mask  # token-mean there adds all of the matrix, whose masked places are 0
        return DP * found.agg_loss(losses, mask, mode, **counts)

    settings = stock_of("roll", loss_agg_mode=mode, use_kl_loss=True, kl_loss_coef=0.1, entropy_loss_coef=0.1)
    assert settings.policy == settings.kl == settings.entropy
    agrees(settings.policy, reduced)


@pytest.mark.host("TRL_ROOT")
@pytest.mark.parametrize("kind", [kind for kind in trl.STOCK_TYPES if kind not in ("sapo", "cispo", "vespo")])
def test_trl(kind):
    """The chain of branches by loss_type that divides; two accumulation steps on two processes."""
    trainer = types.SimpleNamespace(
        loss_type=kind,
        current_gradient_accumulation_steps=M,
        max_completion_length=1,
        accelerator=types.SimpleNamespace(num_processes=DP),
    )
    tree = source_of("TRL_ROOT", "trl/trainer/grpo_trainer.py")

    def reduced(losses, mask, samples):
        losses = losses[:, :1] * torch.ones(1, 1) if kind == "luspo" else losses
        given = {"self": trainer, "mode": "train", "per_token_loss": losses, "mask": mask}
        given["inputs"] = {"num_items_in_batch": TOKENS.sum().double()}
        found = statements_of(tree, "_compute_loss", lambda text: text.startswith("if self.loss_type in ['grpo', 'sapo']"), **given)
        return found["loss"]

    weight = stock_of("trl", loss_type=kind).policy
    if kind == "luspo":  # one loss a sample, times its tokens
        values = torch.zeros(len(TOKENS), int(LENGTHS.max()), dtype=torch.float64, requires_grad=True)
        total = sum(reduced(*matrix(samples, values), samples) for of_rank in PARTS for samples in of_rank) / DP
        (weights,) = torch.autograd.grad(total, values)
        torch.testing.assert_close(weights[:, 0] / TOKENS.clamp(min=1), token_weights(weight, TOKENS, LENGTHS, PARTS))
        return
    agrees(weight, reduced)


@pytest.mark.host("TRL_ROOT")
def test_trl_divides_each_step_of_a_generation_by_all_of_its_tokens():
    """The count is not split with the completions: with 4 micro-batches a generation, and one a step, a step has 1/4 of it."""
    split = functions_of(source_of("TRL_ROOT", "trl/trainer/utils.py"), "split_tensor_dict").split_tensor_dict
    mask = torch.ones(8, 3)
    parts = split({"mask": mask, "num_items_in_batch": mask.sum()}, 4)
    assert [float(part["mask"].sum() / part["num_items_in_batch"]) for part in parts] == [0.25] * 4
    (said,) = stock_of("trl", steps_per_generation=4).remarks
    assert "about 0.25 times its token mean; exact: steps_per_generation=1" in said


REDUCERS = {
    "slime": "slime/backends/megatron_utils/cp_utils.py",
    "miles": "miles/backends/training_utils/cp_utils.py",
}


@pytest.mark.parametrize("is_per_token", [True, False])
@pytest.mark.parametrize("host", [pytest.param(host, marks=pytest.mark.host(f"{host.upper()}_ROOT")) for host in REDUCERS])
def test_miles_and_slime(host, is_per_token):
    """The host multiplies by M dp / N what Megatron divides by M dp; per token Megatron divides by the tokens that it counted."""
    tree = source_of(f"{host.upper()}_ROOT", REDUCERS[host])
    groups = types.SimpleNamespace(get_context_parallel_world_size=lambda: 1)
    parallel = types.SimpleNamespace(cp=types.SimpleNamespace(size=1))
    others = {"mpu": groups, "get_parallel_state": lambda: parallel}
    reducer_of = functions_of(tree, "get_sum_of_sample_mean", **others).get_sum_of_sample_mean

    def reduced(losses, mask, samples):
        lengths = [losses.shape[1]] * len(samples)
        found = reducer_of(lengths, lengths, list(mask), calculate_per_token_loss=is_per_token)(losses.flatten())
        return DP * found / (TOKENS.clamp(min=1).sum() if is_per_token else len(TOKENS))

    given = Namespace(calculate_per_token_loss=is_per_token, use_kl_loss=True, kl_loss_coef=0.1)
    found = host_named(host).stock(HostOptions(given, host_named(host)))
    assert found.policy == found.kl and found.entropy is None
    agrees(found.policy, reduced)


@pytest.mark.host("PRIME_RL_ROOT")
def test_prime_rl():
    """The trainer divides by the tokens of all ranks, and scale_gradients_ undoes FSDP's mean over them."""

    class Type:
        def __class_getitem__(cls, item):
            return cls

    tree = source_of("PRIME_RL_ROOT", "src/prime_rl/trainer/rl/loss.py")
    names = {
        "Bool": Type,
        "Float": Type,
        "LossFn": Type,
        "LossInputs": types.SimpleNamespace,
        "Any": object,
        "Tensor": torch.Tensor,
    }
    compute_loss = functions_of(tree, "compute_loss", **names).compute_loss

    def sums(inputs):
        return types.SimpleNamespace(loss=(inputs.trainer_logprobs * inputs.loss_mask).sum(), metrics={})

    def reduced(losses, mask, samples):
        nothing = [None] * 4
        total = int(TOKENS.sum())
        found = compute_loss([*losses], [*losses], None, [*losses], [*mask.bool()], *nothing[:3], sums, total, 1, 1)
        return DP * found[0]

    agrees(stock_of("prime_rl").policy, reduced)
    assert stock_of("prime_rl", **{"orchestrator.algo.type": "opd"}).remarks and stock_of("prime_rl", type="custom") is None


@pytest.mark.host("MEGATRON_LM_ROOT")
def test_megatron_lm():
    """Megatron's schedule divides the sum of a bin by the tokens that come with it, and by M."""
    tree = source_of("MEGATRON_LM_ROOT", "train_rl.py")

    def reduced(losses, mask, samples):
        given = {"losses_flat": losses.flatten(), "loss_mask_flat": mask.flatten()}
        kept = ("total_tokens = ", "if total_tokens == 0", "loss = torch.cat")
        found = statements_of(tree, "loss_func", lambda text: text.startswith(kept), **given)["loss"]
        return found[0] / found[1].detach() / M

    options = HostOptions(Namespace(calculate_per_token_loss=False), host_named("megatron_lm"))
    agrees(host_named("megatron_lm").stock(options).policy, reduced)


@pytest.mark.host("SKYRL_ROOT")
def test_the_examples_of_skyrl_train_its_own_losses():
    """One adds a loss, whose name no table of ours has."""
    folder = Path(os.environ["SKYRL_ROOT"])
    mains = [path for path in folder.glob("examples/train*/**/main_*.py") if "sft" not in path.name]
    own = [path.name for path in mains if "PolicyLossRegistry" in path.read_text() or "loss_reduction" in path.read_text()]
    assert own == ["main_custom_policy_loss.py"] and len(mains) > 15


@pytest.mark.host("NEMO_RL_ROOT")
def test_the_other_trainers_of_nemo_rl_train_the_same_loss():
    """ppo makes ClippedPGLossFn; the single controller adds micro-batches with 1 for their counts, and divides once."""
    root = Path(os.environ["NEMO_RL_ROOT"])
    assert "loss_fn = ClippedPGLossFn(" in (root / "nemo_rl/algorithms/ppo.py").read_text()
    assert "ClippedPGLossFn(" in "".join(
        path.read_text() for path in (root / "nemo_rl/algorithms/single_controller_utils").glob("*.py")
    )
    worker = (root / "nemo_rl/models/policy/workers/megatron_policy_worker.py").read_text()
    assert "global_valid_toks=placeholder_n" in worker and "self.model.scale_gradients(inv_n)" in worker


@pytest.mark.host("VERL_ROOT")
def test_the_terms_and_programs_of_verl_that_share_its_aggregation():
    text = (Path(os.environ["VERL_ROOT"]) / "verl/trainer/distillation/losses.py").read_text()
    assert text.count("loss_agg_mode=loss_agg_mode") == 2 and "policy_loss = 0.0" in text
    worker = (Path(os.environ["VERL_ROOT"]) / "verl/experimental/separation/engine_workers.py").read_text()
    assert "class DetachActorWorker(ActorRolloutRefWorker)" in worker and "loss" not in worker


@pytest.mark.host("VERL_ROOT")
def test_the_losses_of_verl_that_choose_their_aggregation():
    """gspo and sapo pass a mode of their own; geo_mean takes the mean of the micro-batch, which nobody divides by M."""
    text = source_of("VERL_ROOT", "verl/trainer/ppo/core_algos.py")
    bodies = {node.name.removeprefix("compute_policy_loss_"): ast.unparse(node) for node in text.body if hasattr(node, "name")}
    fixed = {name for name, body in bodies.items() if "loss_agg_mode='seq-mean-token-mean', **config" in body}
    assert fixed == {"gspo", "sapo"}
    registered = {
        call.args[0].value
        for node in text.body
        for call in getattr(node, "decorator_list", ())
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "register_policy_loss"
    }
    assert registered == {*verl.STOCK_LOSSES[1:], *stock.SELECTING, "gspo", "sapo", "geo_mean", "bypass_mode"}
    assert "torch.mean(pg_losses)" in bodies["geo_mean"]
    found = {mode: stock_of("verl", loss_mode=mode, loss_agg_mode="token-mean") for mode in ("gspo", "geo_mean", "kl_cov")}
    assert found["gspo"].policy == stock.SAMPLE_MEAN
    agrees(found["geo_mean"].policy, lambda losses, mask, samples: torch.mean((losses * mask).sum(-1) / mask.sum(-1).clamp(min=1)))
    assert found["kl_cov"].remarks and found["geo_mean"].remarks


@pytest.mark.host("SKYRL_ROOT")
def test_the_losses_of_skyrl_whose_weights_are_known():
    tree = source_of("SKYRL_ROOT", "skyrl/backends/skyrl_train/utils/ppo_utils.py")
    kinds = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "PolicyLossType")
    names = {node.value.value for node in kinds.body if isinstance(node, ast.Assign)}
    assert names - set(skyrl.STOCK_LOSSES) == {"cross_entropy"} and set(skyrl.STOCK_LOSSES) < names
    assert stock_of("skyrl", policy_loss_type="clip_cov").remarks and stock_of("skyrl", policy_loss_type="mine") is None
