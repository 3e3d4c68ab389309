"""The emulated hosts against checkouts of miles and slime: the same inputs give the same tuple for Megatron and the same metrics.

MILES_ROOT=... SLIME_ROOT=... pytest -m host --require host tests/test_host_canary.py

Red here means that a host has changed its contract: change the emulator, then look at what our hooks make of it.
"""

from __future__ import annotations

import ast
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import pool_of
from host_cases import HostCase, host_args
from host_emulator import merge_custom_config
from host_harness import RealHost, roots_by_environment
from host_rank import OWN_CODE, load_function
from host_ranks import make_host, run_cases, train_data

from megatron_rl.arguments import add_megatron_rl_args
from megatron_rl.hosts.args import OPTIONS
from megatron_rl.validation import HOST_SWITCHES

pytestmark = [pytest.mark.host, pytest.mark.megatron]
ROOTS = roots_by_environment()
DEFAULT = HostCase("miles", "default", "sample_mean", size=3)
KL = (("use_kl_loss", True), ("kl_loss_coef", 0.3))
TIS = (("use_tis", True), ("entropy_coef", 0.2))
PLAIN = {
    "sample_mean": DEFAULT,
    "gspo": replace(DEFAULT, estimator="gspo"),
    "per token, with a phantom token": replace(DEFAULT, per_token=True, options=(("entropy_coef", 0.1),)),
    "several samples a rollout": replace(DEFAULT, segments=True),
    "one sample a micro-batch": replace(DEFAULT, size=1),
    "recomputed": replace(DEFAULT, options=(("recompute_loss_function", True),)),
    "dual clip": replace(DEFAULT, options=(("eps_clip_c", 1.2),)),
    "entropy and k3": replace(DEFAULT, options=(*KL, ("entropy_coef", 0.2))),
    "k1": replace(DEFAULT, options=(*KL, ("kl_loss_type", "k1"))),
    "k2": replace(DEFAULT, options=(*KL, ("kl_loss_type", "k2"))),
    "low_var_kl": replace(DEFAULT, options=(*KL, ("kl_loss_type", "low_var_kl"))),
    "temperature": replace(DEFAULT, options=(("rollout_temperature", 0.7),)),
    "importance sampling": replace(DEFAULT, options=TIS),
    "importance sampling, gspo, per token": replace(DEFAULT, estimator="gspo", per_token=True, options=TIS),
    "rejection sampling": replace(DEFAULT, options=(*TIS, ("custom_tis_function_path", "host_hooks.rejecting_tis"))),
    "ratio against the rollout engine": replace(DEFAULT, options=(("use_rollout_logprobs", True), *TIS)),
    "a reducer of the user's": replace(
        DEFAULT, options=(("custom_pg_loss_reducer_function_path", "host_hooks.sum_by_four_positional_arguments"),)
    ),
    "a custom loss of the user's": replace(
        DEFAULT, options=(("loss_type", "custom_loss"), ("custom_loss_function_path", "host_hooks.advantages_alone"))
    ),
    "rejection sampling with our reducer": replace(
        DEFAULT, door="reducer", aggregation="constant", options=(*TIS, ("custom_tis_function_path", "host_hooks.rejecting_tis"))
    ),
    "icepop": replace(DEFAULT, options=(*TIS, ("custom_tis_function_path", "icepop"))),
    "OPSM of the old policy": replace(DEFAULT, options=(("use_opsm", True), *TIS)),
    "OPSM of the rollout engine, gspo": replace(
        DEFAULT, estimator="gspo", options=(("use_opsm", True), ("use_rollout_logprobs", True))
    ),
    "unbiased KL": replace(DEFAULT, options=(*KL, ("use_unbiased_kl", True))),
    "unbiased KL, clamped": replace(DEFAULT, options=(*KL, ("kl_loss_type", "low_var_kl"), ("use_unbiased_kl", True)), ref_gap=3.5),
    "CISPO": replace(DEFAULT, estimator="cispo"),
    "our custom_loss with every term": replace(DEFAULT, door="custom_loss", options=(*KL, *TIS)),
}
LAID_OUT = ("sample_mean", "entropy and k3", "our custom_loss with every term")
CASES = [
    pytest.param(replace(case, host=host, layout=layout), id=f"{host}, {name}, {layout}")
    for host in sorted(ROOTS) or ["miles"]
    for name, case in PLAIN.items()
    for layout in ("thd", "bshd", "allgather")
    if name != "CISPO" or OWN_CODE[host].has_cispo
    if layout == "thd" or (name in LAID_OUT and (host, layout) != ("slime", "bshd"))
]


@pytest.mark.parametrize("host", sorted(ROOTS) or ["miles"])
def test_every_option_that_is_a_switch_there_is_one_here(host):
    """Catches an option that a rule asks for its truth value and that the rule of switches would let pass as text."""
    tree = ast.parse(Path(ROOTS[host], host, "utils", "arguments.py").read_text(encoding="utf-8"))
    found = set()
    for node in ast.walk(tree):
        keywords = {word.arg: word.value for word in node.keywords} if isinstance(node, ast.Call) else {}
        if "action" in keywords and ast.unparse(keywords["action"]) in ("'store_true'", "'store_false'"):
            flags = [word.value for word in node.args if isinstance(word, ast.Constant) and str(word.value).startswith("--")]
            found.add(ast.literal_eval(keywords["dest"]) if "dest" in keywords else flags[0][2:].replace("-", "_"))
    assert {"use_tis", "calculate_per_token_loss"} <= found
    assert sorted(found & set(OPTIONS)) == sorted(found & set(HOST_SWITCHES))


@pytest.mark.parametrize("host", sorted(ROOTS) or ["miles"])
def test_no_flag_of_ours_is_one_of_the_hosts(host):
    """Our launcher puts both into one parser, and argparse refuses a second flag of the same name."""
    source = Path(ROOTS[host], host, "utils", "arguments.py").read_text(encoding="utf-8")
    ours = {flag for action in add_megatron_rl_args(ArgumentParser())._actions for flag in action.option_strings} - {"-h", "--help"}
    assert [flag for flag in sorted(ours) if f'"{flag}"' in source] == []


def both(rank: int, roots: dict[str, str], cases: list[HostCase]) -> tuple:
    return run_cases(rank, {}, cases), run_cases(rank, roots, cases)


pool = pool_of(4)


@pytest.mark.parametrize("case", CASES)
def test_emulator_and_checkout_tell_megatron_and_the_dashboard_the_same(pool, case):
    for emulated, real in pool.run(both, ROOTS, [case], world_size=4, context_parallel_size=2):
        (emulated,), (real,) = emulated, real
        assert not isinstance(emulated, str), emulated
        assert not isinstance(real, str), real
        assert emulated.scaled == pytest.approx(real.scaled, rel=3e-6, abs=2e-6)
        assert emulated.num_tokens == real.num_tokens
        assert emulated.metrics == pytest.approx(real.metrics, rel=3e-6, abs=2e-6)
        scale = real.gradient.abs().max().clamp(min=1e-3)
        torch.testing.assert_close(emulated.gradient / scale, real.gradient / scale, rtol=0, atol=1e-6)


def rollout_data(rank: int, roots: dict[str, str], case: HostCase) -> list[dict]:
    args, step = host_args(case), case.step()
    return [train_data(make_host(case.host, which), args, step) for which in ({}, roots)]


@pytest.mark.parametrize("host", sorted(ROOTS) or ["miles"])
@pytest.mark.parametrize("options", [(), (("grpo_std_normalization", False),), (("rewards_normalization", False),)], ids=str)
def test_emulator_and_checkout_make_the_same_training_data(pool, host, options):
    """Rewards normalised by the host, final masks, and the tokens of each sample's rollout."""
    emulated, real = pool.run(rollout_data, ROOTS, replace(DEFAULT, host=host, options=options), world_size=1)[0]
    for key in ("loss_masks", "rollout_mask_sums", "response_lengths", "tokens"):
        assert emulated[key] == real[key]
    assert emulated["rewards"] == pytest.approx(real["rewards"], abs=1e-5)
    assert len(set(emulated["rollout_ids"])) == len(set(real["rollout_ids"]))


def load_and_merge(rank: int, roots: dict[str, str], host: str, path: str, settings: dict) -> list:
    real = make_host(host, roots)
    assert isinstance(real, RealHost)
    found = []
    for load, merge in ((load_function, merge_custom_config), (real.load_function, real.merge_custom_config)):
        args = Namespace(kept=1, loss_aggregation="sample_mean")
        merge(args, settings)
        merged = {name: value for name, value in vars(args).items() if name != "custom_config_path"}
        try:
            found.append((load(path).__qualname__, merged))
        except (AttributeError, ModuleNotFoundError, ValueError) as error:
            found.append((type(error).__name__, merged))
    return found


@pytest.mark.parametrize("host", sorted(ROOTS) or ["miles"])
@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("megatron_rl.reducers.get_pg_loss_reducer", "get_pg_loss_reducer"),
        pytest.param("megatron_rl.reducers:get_pg_loss_reducer", "get_pg_loss_reducer", id="the colon form loads"),
        ("host_hooks:advantages_alone", "ValueError"),
        ("megatron_rl.reducers.absent", "AttributeError"),
    ],
)
def test_emulator_and_checkout_load_a_path_and_merge_a_file_alike(pool, host, path, expected):
    settings = {"loss_aggregation": "constant", "loss_aggregation_divisor": "8192", "loss-aggregation": "dashed"}
    emulated, real = pool.run(load_and_merge, ROOTS, host, path, settings, world_size=1)[0]
    assert emulated == real
    assert emulated == (expected, {"kept": 1, **settings})


def gspo_under_bshd(rank: int, roots: dict[str, str]) -> list[str]:
    case = HostCase("miles", "default", "sample_mean", "gspo", layout="bshd")
    return [results[0] for results in both(rank, roots, [case])]


@pytest.mark.skipif("miles" not in ROOTS, reason="needs MILES_ROOT")
def test_gspo_with_bshd_and_context_parallelism_still_fails_in_miles(pool):
    """Our custom_loss trains it; when miles does too, the emulator and the docs have to say so."""
    for emulated, real in pool.run(gspo_under_bshd, ROOTS, world_size=2, context_parallel_size=2):
        assert isinstance(emulated, str) and "AssertionError" in emulated
        assert isinstance(real, str) and ("AssertionError" in real or "RuntimeError" in real)
