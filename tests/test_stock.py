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
from megatron_rl.commands.doctor.recorded_step import difference, token_weights
from megatron_rl.hosts import roll, skyrl, stock, trl_others, trl_stock, verl_stock
from megatron_rl.hosts.base import HostOptions, host_named
from megatron_rl.hosts.doors import DOORS
from megatron_rl.hosts.settings import Settings
from megatron_rl.hosts.step_sizes import microbatches

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


def class_of(tree: ast.Module, name: str) -> ast.ClassDef:
    return next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name)


def matrix(samples: list[int], values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The losses of tokens and their mask, padded to the longest of the micro-batch; unmasked tokens come first."""
    width = int(LENGTHS[samples].max())
    mask = torch.stack([(torch.arange(width) < TOKENS[sample]).double() for sample in samples])
    return torch.stack([values[sample, :width] for sample in samples]), mask


def measured(reduced, parts=PARTS) -> torch.Tensor:  # [S] float64, the weight of a token of each sample
    """Of reduced(losses, mask, samples), already with the trainer's factors, averaged over ranks and summed over micro-batches."""
    values = torch.zeros(len(TOKENS), int(LENGTHS.max()), dtype=torch.float64, requires_grad=True)
    total = sum(reduced(*matrix(samples, values), samples) for of_rank in parts for samples in of_rank) / DP
    (weights,) = torch.autograd.grad(total, values)
    assert all(len(set(row[:n].tolist())) <= 1 for row, n in zip(weights, TOKENS.tolist(), strict=True))
    return weights[:, 0] * WEIGHED


def agrees(weight, reduced) -> None:
    # The trainers add 1e-8 to some divisors.
    torch.testing.assert_close(token_weights(weight, TOKENS, LENGTHS, PARTS), measured(reduced), rtol=1e-7, atol=0)


@pytest.mark.host("VERL_ROOT")
@pytest.mark.parametrize("scale", [None, 1])
@pytest.mark.parametrize("mode", verl_stock.STOCK_MODES)
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
    """Means of a micro-batch, which Megatron's schedule averages; FSDP's workers weigh each by its share of the samples."""
    tree = source_of("SKYRL_ROOT", "skyrl/backends/skyrl_train/utils/torch_utils.py")
    masked_mean = functions_of(tree, "masked_mean").masked_mean
    given = {"use_kl_loss": True, "use_entropy_loss": True, "trainer.max_tokens_per_microbatch": 4096}
    found = stock_of("skyrl", **given, **{skyrl.STRATEGY: "megatron"})
    agrees(found.kl, lambda losses, mask, samples: masked_mean(losses, mask, dim=-1).mean() / M)
    agrees(found.entropy, lambda losses, mask, samples: masked_mean(losses, mask) / M)
    worker = (Path(os.environ["SKYRL_ROOT"]) / "skyrl/backends/skyrl_train/workers/worker.py").read_text()
    assert "microbatch_weight = len(microbatch) / len(data)" in worker
    assert "grad_sum_correction_factor + (kl_loss_term - entropy_loss_term) * microbatch_weight" in worker
    ragged = [[[0, 1, 2], [3]], [[4], [5, 6, 7]]]
    found = stock_of("skyrl", **given)
    for term, mean in ((found.kl, lambda *of: masked_mean(*of, dim=-1).mean()), (found.entropy, masked_mean)):
        weights = measured(lambda losses, mask, samples, mean=mean: mean(losses, mask) * len(samples) / 4, ragged)
        torch.testing.assert_close(token_weights(term, TOKENS, LENGTHS, ragged), weights, rtol=1e-7, atol=0)
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


TRL = "trl/trainer/grpo_trainer.py"


@pytest.fixture
def trl_tree(monkeypatch) -> ast.Module:
    """The trainer of the checkout, whose version is judged: 1.10 and its successors rescale the count of a generation."""
    tree = source_of("TRL_ROOT", TRL)
    is_new = "current_gradient_accumulation_steps / self.args.steps_per_generation" in ast.unparse(tree)
    monkeypatch.setattr(trl_stock, "installed", lambda: trl_stock.NEWEST if is_new else (1, 9))
    return tree


def trl_loss(tree: ast.Module, losses, mask, tokens: float, *, kind: str, steps: int, generated: int, entropies=None):
    """The statements of _compute_loss that divide the losses of tokens, or the entropies, as one process of two."""
    trainer = types.SimpleNamespace(
        loss_type=kind,
        current_gradient_accumulation_steps=steps,
        max_completion_length=512,
        args=types.SimpleNamespace(steps_per_generation=generated),
        accelerator=types.SimpleNamespace(num_processes=DP),
        _entropy_bonus_enabled=True,
        use_adaptive_entropy=False,
        entropy_coef=-1.0,
        _metrics={"eval": {"policy_loss": []}, "train": {"policy_loss": [], "entropy_coef": []}},
    )
    trainer.accelerator.gather, trainer.accelerator.sync_gradients = (lambda loss: loss[None]), True
    given = {"self": trainer, "mode": "train", "per_token_loss": losses, "mask": mask, "entropy_mask": None}
    given["inputs"] = {"num_items_in_batch": torch.tensor(float(tokens), dtype=torch.float64)}
    kept = ["if self.loss_type in ['grpo', 'sapo']"]
    if entropies is not None:
        given, kept = given | {"entropies": entropies}, [*kept, "if self._entropy_bonus_enabled"]
    return statements_of(tree, "_compute_loss", lambda text: text.startswith(tuple(kept)), **given)["loss"]


@pytest.mark.host("TRL_ROOT")
@pytest.mark.parametrize("kind", [kind for kind in trl_stock.STOCK_TYPES if kind not in ("sapo", "cispo", "vespo")])
def test_trl(kind, trl_tree):
    """The chain of branches by loss_type that divides; two accumulation steps on two processes."""
    total = float(TOKENS.sum())

    def reduced(losses, mask, samples):
        losses = losses[:, :1] * torch.ones(1, 1) if kind == "luspo" else losses
        return trl_loss(trl_tree, losses, mask, total, kind=kind, steps=M, generated=M)

    found = stock_of("trl", loss_type=kind, entropy_coef=0.1, importance_sampling_level="sequence")
    if kind == "luspo":  # one loss a sample, times its tokens
        values = torch.zeros(len(TOKENS), int(LENGTHS.max()), dtype=torch.float64, requires_grad=True)
        total_loss = sum(reduced(*matrix(samples, values), samples) for of_rank in PARTS for samples in of_rank) / DP
        (weights,) = torch.autograd.grad(total_loss, values)
        torch.testing.assert_close(weights[:, 0] / TOKENS.clamp(min=1), token_weights(found.policy, TOKENS, LENGTHS, PARTS))
    else:
        # L is 512, TRL's default of max_completion_length.
        torch.testing.assert_close(
            token_weights(found.policy, TOKENS, LENGTHS, PARTS, known=found.known), measured(reduced), rtol=1e-7, atol=0
        )

    def of_entropy(losses, mask, samples):
        return trl_loss(trl_tree, 0 * mask, mask, total, kind=kind, steps=M, generated=M, entropies=losses)

    agrees(found.entropy, of_entropy)


@pytest.mark.host("TRL_ROOT")
def test_trl_sums_luspo_of_tokens_over_the_padded_matrix_before_1_10(trl_tree):
    def reduced(losses, mask, samples):
        return trl_loss(trl_tree, losses * mask, mask, 1.0, kind="luspo", steps=M, generated=M)

    agrees(stock_of("trl", loss_type="luspo").policy, reduced)


@pytest.mark.host("TRL_ROOT")
@pytest.mark.parametrize("generated", [1, 2, 4, 8])
def test_trl_divides_by_the_tokens_of_a_generation(generated, trl_tree):
    """Micro-batches of one sample on two processes, two a step: samples of 3 + 4 and 1 + 2 tokens. A generation of one micro-batch
    has 7 or 3 tokens, and its gradient is a mean of means; one of more than a step has other steps of as many tokens."""
    tokens, parts = torch.tensor([3, 1, 4, 2]), [[[0], [1]], [[2], [3]]]
    values = torch.zeros(4, 4, dtype=torch.float64, requires_grad=True)
    total = torch.zeros((), dtype=torch.float64)
    gather = types.SimpleNamespace(accelerator=types.SimpleNamespace(gather=lambda count: count))
    for of_rank in parts:
        for index, samples in enumerate(of_rank):
            in_generation = [one[at] for one in parts for at in range(2) if generated > 1 or at == index]
            masks = torch.stack([(torch.arange(4) < tokens[sample]).double() for (sample,) in in_generation])
            given = {"self": gather, "loss_mask": masks.repeat(max(1, generated // M), 1)}
            counted = statements_of(
                trl_tree, "_generate_and_score_completions", lambda text: text.startswith("num_items_in_batch = "), **given
            )
            mask = (torch.arange(4) < tokens[samples][:, None]).double()
            counted = float(counted["num_items_in_batch"])
            total = total + trl_loss(trl_tree, values[samples], mask, counted, kind="dapo", steps=M, generated=generated) / DP
    (weights,) = torch.autograd.grad(total, values)
    found = stock_of("trl", gradient_accumulation_steps=M, steps_per_generation=generated)
    assert stock.is_of_generation(found.policy) == (generated != M)
    own = token_weights(found.policy, tokens, tokens, parts, known=found.known)
    torch.testing.assert_close(own, weights[:, 0], rtol=1e-12, atol=0)  # the same float64 divisions
    if generated > M:
        times = stock.times_of_generation(found.policy, found.known)
        assert times == pytest.approx(float(own[0]) * 10) and (times == 1) == (trl_stock.installed() == trl_stock.NEWEST)


@pytest.mark.host("TRL_ROOT")
def test_trl_gives_each_step_of_a_generation_the_count_of_all():
    split = functions_of(source_of("TRL_ROOT", "trl/trainer/utils.py"), "split_tensor_dict").split_tensor_dict
    mask = torch.ones(8, 3)
    parts = split({"mask": mask, "num_items_in_batch": mask.sum()}, 4)
    assert [float(part["mask"].sum() / part["num_items_in_batch"]) for part in parts] == [0.25] * 4


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


def test_miles_on_fsdp_with_a_count_of_tokens_by_hand():
    """1/dp against 1/T': 2 ranks, and T' = 19 with one for the sample that is fully masked, so 9.5 times."""
    given = Namespace(train_backend="fsdp", calculate_per_token_loss=True, entropy_coef=0.1)
    found = host_named("miles").stock(HostOptions(given, host_named("miles")))
    assert found.policy == found.entropy == stock.MEAN_OF_RANK_SUMS and stock.aggregation_of(found.policy) == "token_mean"
    assert difference("policy", found.policy, TOKENS, LENGTHS, PARTS).ratios.tolist() == pytest.approx([9.5] * 7)


@pytest.mark.parametrize("is_per_token", [True, False])
@pytest.mark.host("MILES_ROOT")
def test_the_reducer_of_dr_grpo_that_miles_publishes(is_per_token):
    tree = source_of("MILES_ROOT", "examples/experimental/DrGRPO/custom_reducer.py")
    (divisor,) = [node.value.value for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "DIVISOR"]
    groups = types.SimpleNamespace(get_context_parallel_world_size=lambda: 1)
    reducer_of = functions_of(tree, "get_pg_loss_reducer", mpu=groups, DIVISOR=divisor, Callable=object, Tensor=torch.Tensor)
    given = Namespace(custom_pg_loss_reducer_function_path="examples.experimental.DrGRPO.custom_reducer.get_pg_loss_reducer")
    given.calculate_per_token_loss = is_per_token
    found = host_named("miles").stock(HostOptions(given, host_named("miles")))

    def reduced(losses, mask, samples):
        lengths = [losses.shape[1]] * len(samples)
        total = reducer_of.get_pg_loss_reducer(lengths, lengths, list(mask), is_per_token)(losses.flatten())
        return DP * total / (TOKENS.clamp(min=1).sum() if is_per_token else len(TOKENS))

    # The trainers add 1e-8 to some divisors.
    own = token_weights(found.policy, TOKENS, LENGTHS, PARTS, known=found.known)
    torch.testing.assert_close(own, measured(reduced), rtol=1e-7, atol=0)


def own_loss_of_miles(given: Namespace, **call):
    """A function (losses, mask, samples) -> what the host's own loss_function returns, of one micro-batch."""
    size = lambda number: types.SimpleNamespace(size=number)  # noqa: E731
    parallel = types.SimpleNamespace(cp=size(1), intra_dp=size(DP), intra_dp_cp=size(DP))
    others = {"get_parallel_state": lambda: parallel, "mpu": types.SimpleNamespace(get_context_parallel_world_size=lambda: 1)}
    reducer_of = functions_of(source_of("MILES_ROOT", REDUCERS["miles"]), "get_sum_of_sample_mean", **others)
    is_enabled = functions_of(source_of("MILES_ROOT", "miles/utils/multi_lora.py"), "is_multi_lora_enabled")
    others |= {"get_sum_of_sample_mean": reducer_of.get_sum_of_sample_mean, **vars(is_enabled)}
    others["get_loss_function"] = lambda args: lambda args, batch, logits, reduce: (reduce(logits), {})
    loss_function = functions_of(source_of("MILES_ROOT", "miles/backends/training_utils/loss.py"), "loss_function", **others)
    args = Namespace(
        **{"qkv_format": "thd", "allgather_cp": False, "recompute_loss_function": False, "true_on_policy_mode": False},
        **{"calculate_per_token_loss": False, "use_dynamic_global_batch_size": False, "global_batch_size": len(TOKENS)}
        | vars(given),
    )

    def reduced(losses, mask, samples):
        lengths = [losses.shape[1]] * len(samples)
        batch = {"loss_masks": list(mask), "response_lengths": lengths, "total_lengths": lengths}
        return loss_function.loss_function(args, batch, M, losses.flatten(), **call)[0]

    return reduced


@pytest.mark.parametrize("is_per_token", [True, False])
@pytest.mark.host("MILES_ROOT")
def test_miles_on_fsdp(is_per_token):
    """FSDP's mean over ranks alone: the backend reads no normalizer. Without the count the host multiplies by the ranks / N."""
    backend = source_of("MILES_ROOT", "miles/backends/fsdp_utils/actor.py")
    assert [name.ctx.__class__ for name in ast.walk(backend) if getattr(name, "id", "") == "normalizer"] == [ast.Store]
    given = Namespace(calculate_per_token_loss=is_per_token, train_backend="fsdp")
    found = host_named("miles").stock(HostOptions(given, host_named("miles")))
    agrees(found.policy, own_loss_of_miles(given, apply_megatron_loss_scaling=False))


@pytest.mark.host("MILES_ROOT")
def test_miles_with_adapters_divides_by_the_batch_of_an_adapter_and_not_by_that_of_the_line():
    """--global-batch-size is 256; a whole step of an adapter has the 8 samples, by which its optimizer multiplies the sum."""
    scaled = functions_of(
        source_of("MILES_ROOT", "miles/backends/megatron_utils/multi_lora_optimizer.py"),
        "step_adapter_slots",
        _slot_children=lambda optimizer, slot: [optimizer],
        get_grad_norm_fp32=lambda *args, **kwargs: 1.0,
        zero_adapter_slot_grads=lambda model, slot: None,
    ).step_adapter_slots
    given = Namespace(multi_lora=True, global_batch_size=256)
    found = host_named("miles").stock(HostOptions(given, host_named("miles")))
    assert "each adapter's own file" in found.remarks[0]

    def reduced(losses, mask, samples):
        summed = own_loss_of_miles(given, apply_megatron_loss_scaling=True)(losses, mask, samples) / M  # Megatron's
        parameter, nothing = types.SimpleNamespace(grad=torch.ones(())), lambda: []
        optimizer = types.SimpleNamespace(
            **dict.fromkeys(
                ("prepare_grads", "get_main_grads_for_grad_norm", "step_with_ready_grads", "allgather_params"), nothing
            ),
            get_parameters=lambda: [parameter],
        )
        scaled(optimizer, None, {0: len(TOKENS)}, clip_grad=0.0)
        return summed * parameter.grad

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


# Critics. The derivative of a half square is 1 where the value is 1 above the return.


def of_critic(critic):
    """critic(values, returns, mask) of micro-batches, as `measured` takes it."""
    return lambda values, mask, samples: critic(values, values.detach() - 1, mask, samples)


@pytest.mark.host("VERL_ROOT")
@pytest.mark.parametrize("mode", verl_stock.STOCK_MODES)
def test_the_critic_of_verl(mode):
    masked = types.SimpleNamespace(
        masked_sum=lambda x, mask: (x * mask).sum(), masked_mean=lambda x, mask: x.mean(), clip_by_value=torch.clamp
    )
    tree = source_of("VERL_ROOT", "verl/trainer/ppo/core_algos.py")
    found = functions_of(tree, "agg_loss", "compute_value_loss", verl_F=masked)
    batch = {"dp_size": DP, "batch_num_tokens": int(TOKENS.sum()), "global_batch_size": len(TOKENS), "loss_scale_factor": 1}

    def critic(values, returns, mask, samples):
        return found.compute_value_loss(values, returns, values.detach(), mask, 9.0, mode, **batch)[0]

    of_actor = stock_of("verl", loss_agg_mode=mode, loss_scale_factor=1)
    agrees(of_actor.value, of_critic(critic))
    apart = {"critic.loss_agg_mode": mode, "algorithm.adv_estimator": "gae"}
    if mode != "seq-mean-token-sum-norm":
        assert stock_of("verl", **apart).value == of_actor.value
    assert stock_of("verl", **{"algorithm.adv_estimator": "grpo"}).value is None
    assert stock_of("verl", **{"algorithm.adv_estimator": "grpo", "critic.enable": True}).value == TOKEN_MEAN


@pytest.mark.host("SKYRL_ROOT")
@pytest.mark.parametrize("is_by_tokens", [True, False])
def test_the_critic_of_skyrl(is_by_tokens):
    """By tokens a micro-batch is multiplied by its share of the samples; else the step divides by the micro-batches."""
    utils = source_of("SKYRL_ROOT", "skyrl/backends/skyrl_train/utils/torch_utils.py")
    masked_mean = functions_of(utils, "masked_mean").masked_mean
    tree = source_of("SKYRL_ROOT", "skyrl/backends/skyrl_train/utils/ppo_utils.py")
    loss = functions_of(tree, "ppo_critic_loss", masked_mean=masked_mean).ppo_critic_loss
    config = types.SimpleNamespace(value_clip=None)

    def critic(values, returns, mask, samples):
        share = len(samples) / (len(TOKENS) / DP) if is_by_tokens else 1 / M
        return share * loss(values, values.detach(), returns, config, mask)[0]

    agrees(stock_of("skyrl", advantage_estimator="gae").value, of_critic(critic))
    worker = (Path(os.environ["SKYRL_ROOT"]) / "skyrl/backends/skyrl_train/workers/worker.py").read_text()
    assert "microbatch_weight = len(microbatch) / len(data)" in worker and "scale = 1.0 / self._micro_batches_accumulated" in worker


@pytest.mark.host("NEMO_RL_ROOT")
def test_the_critic_of_nemo_rl():
    masked_mean = functions_of(source_of("NEMO_RL_ROOT", "nemo_rl/algorithms/utils.py"), "masked_mean").masked_mean
    tree = class_of(source_of("NEMO_RL_ROOT", "nemo_rl/algorithms/loss/loss_functions.py"), "MseValueLossFn")

    def critic(values, returns, mask, samples):
        given = {"self": types.SimpleNamespace(cliprange=0.0, scale=1.0), "values": values, "returns": returns, "mask": mask}
        given |= {"masked_mean": masked_mean, "global_valid_toks": TOKENS.sum().double()}
        return DP * statements_of(tree, "__call__", lambda text: text.startswith("if self.cliprange"), **given)["loss"]

    agrees(stock_of("nemo_rl", **{"value_loss_fn": {"scale": 1.0}}).value, of_critic(critic))


@pytest.mark.host("ROLL_ROOT")
def test_the_critic_of_roll():
    """apply_loss_scale multiplies the mean of a micro-batch by M dp, so means are added."""
    masked_mean = functions_of(source_of("ROLL_ROOT", "roll/utils/functionals.py"), "masked_mean").masked_mean
    tree = class_of(source_of("ROLL_ROOT", "roll/pipeline/base_worker.py"), "CriticWorker")
    settings = types.SimpleNamespace(pipeline_config=types.SimpleNamespace(value_clip=None))

    def critic(values, returns, mask, samples):
        given = {"self": settings, "values": values, "returns": returns, "response_mask": mask, "masked_mean": masked_mean}
        kept = ("if self.pipeline_config.value_clip", "vf_loss =")
        return DP * statements_of(tree, "loss_func", lambda text: text.startswith(kept), **given)["vf_loss"]

    found = stock_of("roll", adv_estimator="gae")
    agrees(found.value, of_critic(critic))
    assert "grows with their number" in found.varies[-1] and stock_of("roll", adv_estimator="grpo").value is None


@pytest.mark.parametrize(
    "place",
    [
        pytest.param(("MILES_ROOT", "miles/backends/training_utils/loss_hub/losses.py"), marks=pytest.mark.host("MILES_ROOT")),
        pytest.param(("SLIME_ROOT", "slime/backends/megatron_utils/loss.py"), marks=pytest.mark.host("SLIME_ROOT")),
    ],
)
def test_the_critics_of_miles_and_slime_have_the_reducer_of_the_policy(place):
    (body,) = [ast.unparse(node) for node in source_of(*place).body if getattr(node, "name", "") == "value_loss_function"]
    assert "loss = sum_of_sample_mean(loss)" in body
    host = host_named(place[0].removesuffix("_ROOT").lower())
    found = host.stock(HostOptions(Namespace(advantage_estimator="ppo", calculate_per_token_loss=True), host))
    assert found.value == found.policy == stock.OF_COUNTED_TOKENS


# Other trainers of TRL


def of_trl(trainer: str) -> stock.Stock:
    return DOORS["trl"].stock(Settings.of_names({trl_others.OTHER: trainer}, {}))


@pytest.mark.host("TRL_ROOT")
def test_rloo_of_trl():
    """One loss a sample, whose log-probabilities it sums; Trainer divides by the accumulation steps."""
    tree, kept = (
        source_of("TRL_ROOT", "trl/trainer/rloo_trainer.py"),
        ("logps =", "log_ratio =", "coef_", "per_sequence", "loss = per"),
    )

    def reduced(losses, mask, samples):
        given = {
            "self": types.SimpleNamespace(epsilon_low=9.0, epsilon_high=9.0),
            "per_token_logps": losses,
            "completion_mask": mask,
        }
        given |= {"old_logps": torch.zeros(len(samples)), "advantages": -torch.ones(len(samples))}
        return statements_of(tree, "_compute_loss", lambda text: text.startswith(kept), **given)["loss"] / M

    agrees(of_trl("RLOOTrainer").policy, reduced)
    text = ast.unparse(tree)  # the second from 1.16
    assert "self.model_accepts_loss_kwargs = False" in text or "loss_is_scaled_for_ga = False" in text


@pytest.mark.host("TRL_ROOT")
def test_async_grpo_of_trl():
    tree = source_of("TRL_ROOT", "trl/experimental/async_grpo/async_grpo_trainer.py")
    kept = ("loss = ", "global_n_tokens =", "world_size =", "tokens_per_rank =")
    trainer = types.SimpleNamespace(accelerator=types.SimpleNamespace(num_processes=DP), current_gradient_accumulation_steps=M)

    def reduced(losses, mask, samples):
        index = next(index for of_rank in PARTS for index, part in enumerate(of_rank) if part == samples)
        tokens = sum(int(TOKENS[of_rank[index]].sum()) for of_rank in PARTS)
        given = {"self": trainer, "per_token_loss": losses, "completion_mask": mask}
        given["inputs"] = {"global_n_tokens": torch.tensor([float(tokens)], dtype=torch.float64)}
        # It divides in float32, which has 24 bits; each micro-batch's tokens are few enough to be exact.
        found = statements_of(tree, "compute_loss", lambda text: text.startswith(kept) and "aux" not in text, **given)
        return found["loss"]

    agrees(of_trl("AsyncGRPOTrainer").policy, reduced)
    assert stock.of_the_step(of_trl("AsyncGRPOTrainer").policy) == TOKEN_MEAN


@pytest.mark.host("TRL_ROOT")
def test_ppo_of_trl():
    """accelerate divides by the accumulation steps."""
    tree = source_of("TRL_ROOT", "trl/experimental/ppo/ppo_trainer.py")
    masked_mean = functions_of(tree, "masked_mean").masked_mean
    text = ast.unparse(tree)
    assert "pg_loss = masked_mean(pg_loss_max, ~padding_mask[micro_batch_inds])" in text
    assert "vf_loss = 0.5 * masked_mean(vf_loss_max, ~padding_mask_p1[micro_batch_inds])" in text
    found = of_trl("PPOTrainer")
    assert found.value == found.policy
    agrees(found.policy, lambda losses, mask, samples: masked_mean(losses, mask) / M)


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
    assert registered == {*verl_stock.STOCK_LOSSES[1:], *stock.SELECTING, "gspo", "sapo", "geo_mean", "bypass_mode"}
    assert "torch.mean(pg_losses)" in bodies["geo_mean"]
    found = {mode: stock_of("verl", loss_mode=mode, loss_agg_mode="token-mean") for mode in ("gspo", "geo_mean", "kl_cov")}
    assert found["gspo"].policy == stock.SAMPLE_MEAN
    agrees(found["geo_mean"].policy, lambda losses, mask, samples: torch.mean((losses * mask).sum(-1) / mask.sum(-1).clamp(min=1)))
    assert found["kl_cov"].varies and found["geo_mean"].varies


@pytest.mark.host("SKYRL_ROOT")
def test_the_losses_of_skyrl_whose_weights_are_known():
    tree = source_of("SKYRL_ROOT", "skyrl/backends/skyrl_train/utils/ppo_utils.py")
    kinds = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "PolicyLossType")
    names = {node.value.value for node in kinds.body if isinstance(node, ast.Assign)}
    assert names - set(skyrl.STOCK_LOSSES) == {"cross_entropy"} and set(skyrl.STOCK_LOSSES) < names
    assert stock_of("skyrl", policy_loss_type="clip_cov").varies and stock_of("skyrl", policy_loss_type="mine") is None
