"""The emulated hosts against checkouts of miles and slime: the same inputs give the same tuple for Megatron and the same loss; and
the hosts' own flags, each with its meaning in our loss.

MILES_ROOT=... SLIME_ROOT=... pytest -m host --require host tests/test_host_canary.py

Red here means that a host has changed its contract: change the emulator, then look at what our hooks make of it.
"""

from __future__ import annotations

import ast
from argparse import ArgumentParser
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import pool_of
from host_emulator import make_host, run_cases, trained_data
from host_harness import roots_by_environment
from host_steps import CONSTANT, ICEPOP_OF, OWN_LOSS, PER_TOKEN, REDUCED_BY, SEGMENTS, SHAPES, TERMS, Case

from megatron_rl.arguments import add_megatron_rl_args
from megatron_rl.hosts.args import OPTIONS
from megatron_rl.validation import HOST_SWITCHES

pytestmark = [pytest.mark.host, pytest.mark.megatron]
ROOTS = roots_by_environment()
DEFAULT = Case(settings=OWN_LOSS, size=2)
EVERY_TERM = TERMS | {"use_tis": True}
PLAIN = {
    "sample_mean": DEFAULT,
    "per token, with a phantom token": replace(DEFAULT, settings=OWN_LOSS | PER_TOKEN),
    "several samples a rollout": replace(DEFAULT, rollouts=SEGMENTS),
    "one sample a micro-batch": replace(DEFAULT, size=1),
    "recomputed": replace(DEFAULT, settings=OWN_LOSS | {"recompute_loss_function": True}),
    "our reducer": replace(DEFAULT, settings=REDUCED_BY["reducer"] | CONSTANT),
    "our custom_loss with every term": replace(DEFAULT, settings=EVERY_TERM, without=()),
}
CASES = [
    pytest.param(replace(case, host=host, layout=layout), id=f"{host}, {name}, {layout}")
    for host in sorted(ROOTS) or ["miles"]
    for name, case in PLAIN.items()
    for layout in ("thd", "bshd", "allgather")
    if layout == "thd" or (case.settings == EVERY_TERM and (host, layout) != ("slime", "bshd"))
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


def both(rank: int, roots: dict[str, str], cases: list[Case]) -> tuple:
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
        metrics = {name: real.metrics[name] for name in emulated.metrics}
        assert metrics and emulated.metrics == pytest.approx(metrics, rel=3e-6, abs=2e-6)
        scale = real.gradient.abs().max().clamp(min=1e-3)
        torch.testing.assert_close(emulated.gradient / scale, real.gradient / scale, rtol=0, atol=1e-6)


def rollout_data(rank: int, roots: dict[str, str], case: Case) -> list[dict]:
    return [trained_data(make_host(case.host, which), case.args(), case) for which in ({}, roots)]


@pytest.mark.parametrize("host", sorted(ROOTS) or ["miles"])
def test_emulator_and_checkout_make_the_same_training_data(pool, host):
    """Rewards, final masks, and the tokens of each sample's rollout."""
    emulated, real = pool.run(rollout_data, ROOTS, replace(DEFAULT, host=host, rollouts=SEGMENTS), world_size=1)[0]
    for key in ("loss_masks", "rollout_mask_sums", "response_lengths", "tokens", "rewards"):
        assert emulated[key] == real[key]
    assert len(set(emulated["rollout_ids"])) == len(set(real["rollout_ids"]))


# The hosts' flags in our loss, against their own loss. tests/test_hosts.py has the float64 truth.

EXACT, DIFFERENT, ACTS = 1e-6, 1e-3, 1e-3  # relative to the largest gradient of float32
GSPO, CISPO = {"advantage_estimator": "gspo"}, {"advantage_estimator": "cispo"}
SAMPLER = {"use_opsm": True, "opsm_delta": 0.05, "use_rollout_logprobs": True}
LOW_VAR, UNBIASED = {"kl_loss_type": "low_var_kl"}, {"use_unbiased_kl": True}
TIS, ICEPOP = {"use_tis": True}, {"use_tis": True, "custom_tis_function_path": "icepop"}
# Where the reference is far from the policy.
BEYOND = "beyond the clamp"
FLAGS: dict[str, dict] = {
    "tis": TIS,
    "tis, gspo, per token": TIS | GSPO | PER_TOKEN,
    "icepop": ICEPOP,
    "icepop, gspo": ICEPOP | GSPO,
    "OPSM of the sampler": SAMPLER,
    "OPSM of the sampler, gspo, per token": SAMPLER | GSPO | PER_TOKEN,
    "k1": {"kl_loss_type": "k1"},
    "k2": {"kl_loss_type": "k2"} | PER_TOKEN,
    f"k3 {BEYOND} of low_var_kl": {"kl_loss_type": "k3"},
    "low_var_kl": LOW_VAR,
    "unbiased": {"kl_loss_type": "k3"} | UNBIASED,
    "unbiased by the token's ratio": LOW_VAR | UNBIASED | GSPO,
    "cispo": CISPO,
    "cispo without a lower bound, tis": {"eps_clip": 5.0} | TIS | CISPO,
    **{f"dual clip, {loss}": {"eps_clip_c": 1.02, "advantage_estimator": loss} for loss in ("grpo", "gspo")},
}
# The host means something else, and a line at start says so.
UNLIKE: dict[str, dict] = {
    "OPSM of log-probabilities that the trainer recomputes": {"use_opsm": True, "opsm_delta": 0.005},
    f"low_var_kl {BEYOND}": LOW_VAR,
    f"unbiased {BEYOND}": LOW_VAR | UNBIASED,
    "unbiased k1": {"kl_loss_type": "k1"} | UNBIASED,
}


def case_of(host: str, name: str, settings: dict) -> Case:
    if "kl_loss_type" in settings:
        settings = settings | {"use_kl_loss": True, "kl_loss_coef": 0.3}
    if "custom_tis_function_path" in settings:
        settings = settings | {"custom_tis_function_path": ICEPOP_OF[host]}
    case = Case(host=host, settings=settings, without=(), ref_noise=3.5 if BEYOND in name else 0.4, size=3)
    return replace(case, shapes=SHAPES) if settings.get("calculate_per_token_loss") else case


def without_flags(case: Case) -> Case:
    kept = {name: value for name, value in case.settings.items() if name in GSPO | PER_TOKEN}
    return replace(case, settings=kept if kept.get("advantage_estimator") != "cispo" else {})


@pytest.mark.parametrize("host", sorted(ROOTS) or ["miles"])
def test_a_flag_of_the_host_has_its_meaning_in_our_loss(pool, host):
    """A correction weighs no KL term; KL's ratio is the token's under GSPO; samples that are dropped stay in the denominators."""
    rows = {name: case_of(host, name, settings) for name, settings in (FLAGS | UNLIKE).items()}
    rows = {name: case for name, case in rows.items() if host == "slime" or "cispo" not in name}  # miles has none
    own_losses = [replace(case, settings=case.settings | OWN_LOSS) for case in rows.values()]
    cases = [*rows.values(), *own_losses, *map(without_flags, rows.values())]
    found = pool.run(run_cases, ROOTS, cases, world_size=2, context_parallel_size=2)[0]
    assert not [result for result in found if isinstance(result, str)], found
    for number, name in enumerate(rows):
        ours, own, plain = found[number :: len(rows)]
        largest = own.gradient.abs().max()
        assert float((ours.gradient - plain.gradient).abs().max() / largest) > ACTS, f"{name}: the flag has to act"
        gap = float((own.gradient - ours.gradient).abs().max() / largest)
        if name in UNLIKE:
            assert gap > DIFFERENT, f"{name}: the host's own loss means the same, and the warning at start says that it does not"
            continue
        assert gap <= 2 * EXACT, name
        assert ours.loss == pytest.approx(own.loss, rel=2 * EXACT, abs=2e-7), name
        assert list(ours.metrics) == list(own.metrics), name
        # The host divides dropped tokens, masked ones too, by the unmasked ones: its opsm_clipfrac may be beyond 1.
        for metric in ours.metrics.keys() - {"opsm_clipfrac"}:
            assert ours.metrics[metric] == pytest.approx(own.metrics[metric], rel=3e-6, abs=2e-6), f"{name}: {metric}"
