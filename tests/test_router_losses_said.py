"""What is said of the auxiliary losses of routers: at start, and in the first step what Megatron's own scale makes of each."""

from __future__ import annotations

import functools
import warnings
from argparse import Namespace
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import trainer_cases
from helpers import error_of, pool_of
from test_expert_layouts import EXPERTS, LOSSES, error_of_whole, merged, model_of, needs_padding_mask, of_auxiliary_losses
from test_layouts import GRADIENT_TOLERANCE, config_of

from megatron_rl.__main__ import main
from megatron_rl.hosts import megatron_lm
from megatron_rl.megatron import router_losses
from megatron_rl.megatron.installed import HostScales
from megatron_rl.megatron.router_scale import RoutedPart, host_ranges
from megatron_rl.testing.layout_step import Layout, LayoutModel, row_length
from megatron_rl.testing.reference import ragged_samples

pytestmark = pytest.mark.megatron

pool = pool_of(2)


def sum_of(*terms: tuple[float, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: sum(weight * gradient[name] for weight, gradient in terms) for name in terms[0][1]}


def lines_on_rank(rank: int, layout: Layout, options: dict) -> list[str]:
    model = LayoutModel(layout, row_length(ragged_samples(), layout), model_of(layout, **options))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model.step(config_of("reinforce", "sample_mean"), ragged_samples())
    return [str(warning.message) for warning in caught if "--router-aux-loss" in str(warning.message)]


def test_what_the_host_makes_of_a_step_of_unequal_micro_batches(pool):
    """The default contract, without a flag, against gradients of each micro-batch alone.

    One rank has the samples 0, 2, 4, ... in micro-batch 0 and 1, 3, 5, ... in micro-batch 1: n_0 and n_1 tokens in B_0 and B_1
    samples, R rows each. Megatron takes the mean of both; T = n_0 + n_1, B = B_0 + B_1, and G_b is the gradient of b alone.

        z_loss         host sum_t z_t / (2 n_b),           exact sum_t z_t / T:         host is x T / (2 n_b) of exact
        seq_aux_loss   host sum_i bal_i R / (2 n_b^2),     exact sum_i bal_i B / T^2:   host is x R T^2 / (2 B n_b^2) of exact

    b alone has R = B_b rows, so G_b of z_loss is sum_t z_t / n_b, and that of seq_aux_loss is sum_i bal_i B_b / n_b^2. So exact has
    G_b n_b / T and G_b (n_b^2 / B_b) (B / T^2) of it, and their weighted sums must be the gradient that Megatron gives. aux_loss is
    x 1: exact has the mean over the same micro-batches. A micro-batch of global_aux_loss is added up over data-parallel ranks and
    then averaged: x 1 / DP.
    """
    needs_padding_mask()
    step, layout = ragged_samples(), Layout(num_microbatches=2)
    parts, rows = (step[::2], step[1::2]), -(-len(step) // 2)
    counts = [sum(len(sample.tokens) for sample in part) for part in parts]
    num_tokens, num_samples = sum(counts), len(step)
    by_hand = {
        "z_loss": [num_tokens / (2 * n) for n in counts],
        "seq_aux_loss": [rows * num_tokens**2 / (2 * num_samples * n**2) for n in counts],
    }
    shares = {
        "z_loss": [n / num_tokens for n in counts],
        "seq_aux_loss": [n**2 / len(part) * num_samples / num_tokens**2 for n, part in zip(counts, parts, strict=True)],
    }
    routed = [RoutedPart(number, (float(n),), n, rows) for number, n in enumerate(counts)]
    ranges = host_ranges(routed, 1, num_samples, None, HostScales())
    lines = pool.run(lines_on_rank, layout, LOSSES["z_loss"] | LOSSES["seq_aux_loss"], world_size=1)[0]
    for name, weights in by_hand.items():
        cases = [(layout, step, "host", LOSSES[name]), *((Layout(), part, "host", LOSSES[name]) for part in parts)]
        found, *alone = of_auxiliary_losses(pool, cases)
        expected = sum_of(*((w * s, g) for w, s, g in zip(weights, shares[name], alone, strict=True)))
        assert error_of_whole(found, expected) < GRADIENT_TOLERANCE, name
        assert ranges[name] == pytest.approx((min(weights), max(weights))) and max(weights) > 1.1 * min(weights), name
        assert len(lines) == 1 and f"{name} x {min(weights):.4g} to {max(weights):.4g} (by micro-batch and rank)" in lines[0]
    assert ranges["aux_loss"] == pytest.approx((1, 1))


def test_what_the_host_makes_of_ranks(pool):
    """On two data-parallel ranks of n_0 and n_1 tokens: z_loss is x T / (2 n_d), aux_loss x 1, and global_aux_loss x 1 / 2, which
    is measured too: exact has the loss of one rank. Rank 0 alone speaks, and once."""
    needs_padding_mask()
    step, layout = ragged_samples(), Layout(data=2, expert=2)
    counts = [sum(len(sample.tokens) for sample in step[rank::2]) for rank in range(2)]
    of_z_loss = sorted(sum(counts) / (2 * n) for n in counts)
    balance = {"moe_router_load_balancing_type": ("aux_loss", "global_aux_loss"), "moe_aux_loss_coeff": (1.0, 1.0)}
    (line,), silent = pool.run(lines_on_rank, layout, LOSSES["z_loss"] | balance, world_size=2, **layout.model_parallel)
    assert silent == []
    z_loss = f"z_loss x {of_z_loss[0]:.4g} to {of_z_loss[1]:.4g} (by micro-batch and rank)"
    assert f"keeps Megatron's scale: aux_loss x 1, global_aux_loss x 0.5, {z_loss} of exact in this step ({sum(counts)}" in line
    of_global = LOSSES["global_aux_loss"]
    found, alone = (of_auxiliary_losses(pool, [(where, step, "host", of_global)])[0] for where in (layout, Layout()))
    assert error_of_whole(found, sum_of((0.5, alone))) < GRADIENT_TOLERANCE


def test_the_weights_of_a_step_without_padding_mask():
    """Two micro-batches of 10 and 30 tokens in one row of 40 positions each, T = 40, 20 response tokens, 3 samples.

    Every position is a token. z_loss divides by 40 in place of n, so a real token has 1 / (2 * 40) and not 1 / T: x 0.5. The sums
    of aux_loss are divided by 40^2 and not n^2: x (n / 40)^2. The per-token contract multiplies a part by 40 / 20 in place of
    1 / 2, so z_loss is x 2 and aux_loss x 4 (n / 40)^2.
    """
    parts = [RoutedPart(0, (10.0,), 40, 1), RoutedPart(1, (30.0,), 40, 1)]
    found = host_ranges(parts, 1, 3, None, HostScales(), counts_padding=True)
    assert found["z_loss"] == pytest.approx((0.5, 0.5)) and found["aux_loss"] == pytest.approx((1 / 16, 9 / 16))
    found = host_ranges(parts, 1, 3, 20, HostScales(), counts_padding=True)
    assert found["z_loss"] == pytest.approx((2, 2)) and found["aux_loss"] == pytest.approx((1 / 4, 9 / 4))


def test_the_weights_of_slices_and_of_packed_rows(pool):
    """One micro-batch of 10 and 30 tokens on two context-parallel ranks: a mean over ranks of a mean, x T / (2 n). On a packed row
    seq_aux_loss is aux_loss: x 1."""
    found = host_ranges([RoutedPart(0, (10.0, 30.0), 32, 1)], 1, 3, None, HostScales(), is_packed=True)
    assert found["z_loss"] == pytest.approx((40 / 60, 2)) and found["seq_aux_loss"] == pytest.approx((1, 1))
    needs_padding_mask()
    *_, line = pool.run(lines_on_rank, Layout(packed=True), LOSSES["seq_aux_loss"], world_size=1)[0]
    assert "keeps Megatron's scale: seq_aux_loss (as aux_loss of the row) x 1 of exact in this step" in line


def start_on_rank(rank: int, cases: list) -> list[tuple[str, list[str]]]:
    """What a model says when it is checked, before a forward: (error, warnings)."""
    found = []
    for mode, is_packed, options in cases:
        model = LayoutModel(Layout(), 16, model_of(Layout(), **options)).models[0]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call = functools.partial(router_losses.check_routers, mode, model, model.config, is_packed=is_packed)
            found.append((error_of(call), [str(warning.message) for warning in caught]))
    return found


def test_what_is_refused_or_said_of_these_losses_comes_at_start(pool):
    """Packed rows."""
    needs_padding_mask()
    of_samples, of_microbatch = LOSSES["seq_aux_loss"], LOSSES["aux_loss"]
    cases = [("exact", True, of_samples), ("exact", False, of_samples), ("exact", True, of_microbatch), (None, True, of_samples)]
    refused, silent, cut, whole_row = pool.run(start_on_rank, cases, world_size=1)[0]
    assert "exact with seq_aux_loss (--moe-aux-loss-coeff 3.0) and packed rows: Megatron gives its router no bounds" in refused[0]
    assert silent == ("", [])
    assert cut[0] == "" and "exact: aux_loss: the tokens of a micro-batch are balanced, by definition" in cut[1][0]
    assert whole_row[0] == "" and whole_row[1] == [
        "--router-aux-loss host: seq_aux_loss with packed rows: Megatron gives its router no bounds of samples, and balances the "
        "whole row as one sample"
    ]


def refused_on_rank(rank: int) -> list[str]:
    """By the trainer of `megatron-rl train` and by Megatron-LM's model provider, before any step."""
    config = config_of("reinforce", "sample_mean", router_aux_loss="exact")
    of_train = error_of(
        lambda: trainer_cases.tiny_trainer(
            config, experts=EXPERTS | LOSSES["seq_aux_loss"] | {"moe_layer_freq": [0, 1]}, packed=True
        )
    )
    chunk = LayoutModel(Layout(), 16, model_of(Layout(), **LOSSES["seq_aux_loss"])).models[0]
    args = Namespace(rl_use_sequence_packing=True)
    stand_ins = {"megatron_lm_config": lambda given=None: config, "current_args": lambda: args}
    with mock.patch.multiple(megatron_lm, **stand_ins, announce=mock.DEFAULT, release_problems=lambda args: []):
        of_megatron_lm = error_of(megatron_lm._checked_provider(lambda: chunk.module))
        args.rl_use_sequence_packing = False
        assert megatron_lm._checked_provider(lambda: chunk.module)() is chunk.module
    return [of_train, of_megatron_lm]


def test_train_and_megatron_lm_refuse_before_the_first_step(pool):
    needs_padding_mask()
    found = pool.run(refused_on_rank, world_size=1)[0]
    wanted = "exact with seq_aux_loss (--moe-aux-loss-coeff 3.0) and packed rows"
    assert len(found) == 2 and all(wanted in message for message in found), found


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--moe-aux-loss-coeff", "0.1", "--router-aux-loss", "refuse"], "moe_aux_loss_coeff=0.1 of aux_loss with --router-aux"),
        (["--tensor-model-parallel-size", "2"], "tensor_model_parallel_size=2 with experts needs sequence_parallel"),
    ],
)
def test_train_refuses_them_before_it_starts(capsys, tmp_path, flags, message):
    assert main(["train", "--num-experts", "4", *flags, "--output-dir", str(tmp_path)]) != 0
    assert message in capsys.readouterr().err


def test_a_second_scale_of_the_model_is_refused():
    """Megatron-Core 0.19 has moe_grad_scale_func, which multiplies these losses too."""
    from megatron.core.models.gpt import GPTModel

    config = SimpleNamespace(moe_grad_scale_func=lambda: 2.0)
    problems = list(router_losses.exact_problems({"z_loss": 0.1}, GPTModel, config, is_packed=False))
    assert any("moe_grad_scale_func in the model's config: both scale these losses; remove one" in problem for problem in problems)
    assert not list(router_losses.exact_problems({}, GPTModel, config, is_packed=False))


def host_after_exact(rank: int, first: str, options: dict) -> dict[str, torch.Tensor]:
    """The gradient of a step under host, after one of the same model under `first`."""
    layout = Layout(num_microbatches=2)
    model = LayoutModel(layout, row_length(ragged_samples(), layout), model_of(layout, **options))
    still = [replace(sample, advantage=0.0) for sample in ragged_samples()]
    for mode in (first, "host"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = model.step(config_of("reinforce", "sample_mean", router_aux_loss=mode), still)
    return merged([found]).gradient


def test_a_step_under_host_is_megatrons_own_after_an_exact_one(pool):
    needs_padding_mask()
    exact, host = (pool.run(host_after_exact, first, LOSSES["z_loss"], world_size=1)[0] for first in ("exact", "host"))
    assert all(torch.equal(value, host[name]) for name, value in exact.items()) and any(value.any() for value in host.values())


def of_another_schedule(rank: int, factor: float) -> str:
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    layout, of_megatron = Layout(num_microbatches=2), MoEAuxLossAutoScaler.set_loss_scale
    model = LayoutModel(layout, row_length(ragged_samples(), layout), model_of(layout, **LOSSES["z_loss"]))
    config = config_of("reinforce", "sample_mean", router_aux_loss="exact")
    with mock.patch.object(MoEAuxLossAutoScaler, "set_loss_scale", lambda scale: of_megatron(scale * factor)):
        return error_of(lambda: model.step(config, ragged_samples()))


def test_a_schedule_with_another_scale_of_these_losses_is_refused_before_the_optimiser(pool):
    """Megatron-Core 0.13 has no cp in it; exact undoes what 0.16 to 0.19 do."""
    needs_padding_mask()
    [message] = pool.run(of_another_schedule, 0.5, world_size=1)
    assert "multiplies the losses of routers by 0.25, and 0.5 (loss scale x cp / micro-batches) was expected" in message
    assert "would train x 0.5" in message and pool.run(of_another_schedule, 1.0, world_size=1) == [""]
