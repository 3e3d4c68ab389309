"""`megatron-rl explain` and experts: one row of the chain, the factor of each auxiliary loss that is on, and the sizes."""

from __future__ import annotations

import pytest
from test_explain import explain, explain_json

from megatron_rl.commands.explain import experts
from megatron_rl.commands.explain.step import LaunchLayout

STEP = ["--response-lengths", "3,5,8", "--prompt-ids", "a,a,b", "--num-experts", "8"]
SIZES = ["--tensor-model-parallel-size", "2", "--data-parallel-size", "2", "--expert-model-parallel-size", "4"]
ETP1 = ["--expert-tensor-parallel-size", "1"]
PER_TOKEN = ["--calculate-per-token-loss", "--loss-aggregation", "token_mean"]


@pytest.mark.parametrize("host", ["miles", "slime", "megatron_lm", "train"])
@pytest.mark.parametrize("contract", [[], PER_TOKEN], ids=["default", "per token"])
def test_experts_have_one_row_and_the_net_weight_of_all_parameters(host, contract):
    """FB-106: the factor of DDP for experts is that of the rest, whatever shares them."""
    if host == "train" and contract:
        return  # `train` has no such flag
    given = [*STEP, "--host", host, *(contract or ["--loss-aggregation", "sample_mean"])]
    dense, spread = explain_json(*given, *SIZES[:4])["chain"], explain_json(*given, *SIZES, *ETP1)["chain"]
    assert spread["net_weights"] == dense["net_weights"] and spread["is_exact"]
    (ddp,) = [factor for factor in spread["factors"] if factor["stage"] == "DDP"]
    name, formula, here, _, does = spread["experts"]
    assert (name, formula) == ("DDP, experts", ddp["formula"]) and float(here) == ddp["values"][0]
    assert "edp = tp cp dp / (ep etp) = 1 replicas" in does


@pytest.mark.parametrize(
    ("layout", "replicas"), [(LaunchLayout(tensor=2, data=4, expert=2), 4), (LaunchLayout(context=2, data=2, expert=4), 1)]
)
def test_replicas_are_counted_over_all_ranks_of_a_stage(layout, replicas):
    assert f"= {replicas} replicas" in experts.expert_row(layout, per_token=False)[-1]


def rows(*flags: str) -> dict[str, list[str]]:
    return {row[0]: row[1:] for row in explain_json(*STEP, *SIZES, *ETP1, *flags)["chain"]["router_losses"]}


def test_each_auxiliary_loss_that_is_on_has_the_factor_of_each_release():
    """40 routed and 16 response tokens, 3 samples in 2 parts, tp 2; test_expert_layouts.py measures releases."""
    both = ["--moe-aux-loss-coeff", "0.001", "--moe-z-loss-coeff", "0.001", "--num-routed-tokens", "40"]
    found = rows("--host", "megatron_lm", *PER_TOKEN, *both, "--router-aux-loss", "host")
    assert found["--router-aux-loss"] == ["refuse", "host", "exact"]
    assert found["z_loss"] == ["an error", "x 1.25 (Megatron-Core 0.16 to 0.18), x 2.5 (Megatron-Core 0.19)", "x 1"]
    assert found["aux_loss"][1] == "x 2.5 (Megatron-Core 0.16 to 0.18), x 5 (Megatron-Core 0.19)"
    of_samples = ["--moe-aux-loss-coeff", "0.1", "--moe-router-load-balancing-type", "seq_aux_loss", "--router-aux-loss", "exact"]
    found = rows("--host", "megatron_lm", *PER_TOKEN, *of_samples)
    assert found["seq_aux_loss"][1].startswith("x routed / 16 x 0.6667 (Megatron-Core 0.16")


@pytest.mark.parametrize(("kind", "factor"), [("aux_loss", "1"), ("seq_aux_loss", "1"), ("global_aux_loss", "0.5")])
def test_the_default_contract_keeps_all_losses_but_that_of_all_ranks(kind, factor):
    """Of equal micro-batches on two data-parallel ranks, over which a loss of all ranks is averaged though its parts add up."""
    both = ["--moe-aux-loss-coeff", "0.001", "--moe-z-loss-coeff", "0.001", "--moe-router-load-balancing-type", kind]
    found = rows("--host", "train", "--loss-aggregation", "sample_mean", *both)
    assert found[kind][1].startswith(f"x {factor} for equal micro-batches, else a mean over micro-batches and ranks")
    assert found["z_loss"][1].startswith("x 1 for equal micro-batches")
    of_host = rows("--host", "miles", "--loss-aggregation", "sample_mean", *both)[kind][1]
    assert of_host.startswith("a mean over micro-batches and ranks")


def test_a_launch_of_a_host_with_a_rescaled_loss_is_refused():
    code, out, _ = explain(*STEP, "--host", "miles", *PER_TOKEN, "--moe-aux-loss-coeff", "0.001")
    assert code == 1 and "REFUSED: moe_aux_loss_coeff=0.001 of aux_loss does not go with calculate_per_token_loss=True" in out
    assert "not in a host, which calls the model" in out
    assert "auxiliary losses of routers, beside" not in explain(*STEP, "--host", "miles", "--loss-aggregation", "sample_mean")[1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--host", "train", *SIZES[:4], "--expert-model-parallel-size", "3"],
            "4 ranks of a pipeline stage do not hold the experts",
        ),
        (["--expert-model-parallel-size", "2"], "goes with --host alone"),
        (["--host", "train", "--num-routed-tokens", "0"], "--num-routed-tokens 0 must be at least 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_by_name(flags, message):
    code, out, error = explain(*STEP, "--loss-aggregation", "sample_mean", *flags)
    assert code == 2 and message in out + error


def test_a_dense_model_has_no_sizes_of_experts():
    code, out, error = explain(
        *STEP[:4], "--host", "train", "--loss-aggregation", "sample_mean", "--expert-model-parallel-size", "2"
    )
    assert code == 2 and "need --num-experts: a dense model has no experts" in out + error
