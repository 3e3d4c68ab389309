"""What is said of the auxiliary losses of routers at start, and what the first step refuses."""

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
from test_expert_layouts import EXPERTS, LOSSES, merged, model_of
from test_layouts import config_of

from megatron_rl.__main__ import main
from megatron_rl.hosts import megatron_lm
from megatron_rl.megatron.checks import check_model, exact_problems
from megatron_rl.testing.layout_step import Layout, LayoutModel, row_length
from megatron_rl.testing.reference import ragged_samples

pytestmark = pytest.mark.megatron

pool = pool_of(2)


def start_on_rank(rank: int, cases: list) -> list[tuple[str, list[str]]]:
    """What a model says when it is checked, before a forward: (error, warnings)."""
    found = []
    for mode, is_packed, options in cases:
        model = LayoutModel(Layout(), 16, model_of(Layout(), **options)).models[0]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            config = config_of("reinforce", "sample_mean", router_aux_loss=mode)
            check = functools.partial(check_model, config, model, is_packed=is_packed)
            error, _ = error_of(check), error_of(check)  # said once, whatever calls it
        found.append((error, [str(warning.message) for warning in caught]))
    return found


def test_what_is_refused_or_said_of_these_losses_comes_at_start(pool):
    """Packed rows."""
    of_samples, of_microbatch = LOSSES["seq_aux_loss"], LOSSES["aux_loss"]
    cases = [("exact", True, of_samples), ("exact", False, of_samples), ("exact", True, of_microbatch), (None, True, of_samples)]
    refused, silent, cut, host = pool.run(start_on_rank, cases, world_size=1)[0]
    assert "exact with seq_aux_loss (--moe-aux-loss-coeff 3.0) and packed rows: Megatron gives its router no bounds" in refused[0]
    assert silent == ("", [])
    assert cut == ("", [])
    assert host[0] == "" and host[1] == [
        "--router-aux-loss host keeps Megatron's scale of seq_aux_loss, which depends on the layout: a mean over micro-batches and "
        "ranks, under --calculate-per-token-loss x routed tokens / response tokens; choose exact for the value of one rank on the "
        "whole step",
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
    problems = list(exact_problems({"z_loss": 0.1}, GPTModel, config, is_packed=False))
    assert any("moe_grad_scale_func in the model's config: both scale these losses; remove one" in problem for problem in problems)


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
    [message] = pool.run(of_another_schedule, 0.5, world_size=1)
    assert "multiplies the losses of routers by 0.25, and 0.5 (loss scale x cp / micro-batches) was expected" in message
    assert "would train x 0.5" in message and pool.run(of_another_schedule, 1.0, world_size=1) == [""]
