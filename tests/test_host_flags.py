"""The hosts' own flags in our loss: equal to the host's own loss where both mean the same. test_custom_loss has the float64 truth.

The emulated hosts run always, real checkouts with MILES_ROOT=... SLIME_ROOT=... pytest -m host --require host.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
from helpers import pool_of
from host_cases import ROLLOUT_GAP, HostCase, host_args, normalised_rewards, sample_log_probs
from host_harness import roots_by_environment
from host_rank import OWN_CODE
from host_ranks import StepResult, run_cases

from megatron_rl.testing.ranks import RankPool

ROOTS = roots_by_environment()
EXACT, DIFFERENT, ACTS = 1e-6, 1e-3, 1e-3  # relative to the largest gradient of float32
COEFFICIENT = 0.3


@dataclass(frozen=True)
class Flags:
    """A launch of our loss, and whether the host's own loss means the same."""

    case: HostCase
    is_same: bool = True


def launch(is_same: bool = True, *, ref_gap: float = 0.4, **options) -> Flags:
    case = {name: options.pop(name) for name in ("estimator", "aggregation", "per_token") if name in options}
    if "kl_loss_type" in options:
        options |= {"use_kl_loss": True, "kl_loss_coef": COEFFICIENT}
    plain = HostCase("miles", "custom_loss", "sample_mean", size=3, ref_gap=ref_gap)
    return Flags(replace(plain, options=tuple(options.items()), **case), is_same)


PER_TOKEN = {"aggregation": "token_mean", "per_token": True}
OF_ROLLOUT = {"use_opsm": True, "opsm_delta": 0.05, "use_rollout_logprobs": True}
ICEPOP = {"use_tis": True, "custom_tis_function_path": "icepop"}
LAUNCHES = {
    "tis": launch(use_tis=True),
    "tis, gspo, per token": launch(use_tis=True, estimator="gspo", **PER_TOKEN),
    "icepop": launch(**ICEPOP),
    "icepop, gspo": launch(**ICEPOP, estimator="gspo"),
    "OPSM of the sampler": launch(**OF_ROLLOUT),
    "OPSM of the sampler, gspo, per token": launch(**OF_ROLLOUT, estimator="gspo", **PER_TOKEN),
    "OPSM of log-probabilities that the trainer recomputes": launch(False, use_opsm=True, opsm_delta=0.005),
    "k1": launch(kl_loss_type="k1"),
    "k2": launch(kl_loss_type="k2", **PER_TOKEN),
    "k3 beyond the clamp of low_var_kl": launch(kl_loss_type="k3", ref_gap=3.5),
    "low_var_kl": launch(kl_loss_type="low_var_kl"),
    "low_var_kl beyond its clamp": launch(False, kl_loss_type="low_var_kl", ref_gap=3.5),
    "unbiased": launch(kl_loss_type="k3", use_unbiased_kl=True),
    "unbiased by the token's ratio": launch(kl_loss_type="low_var_kl", use_unbiased_kl=True, estimator="gspo"),
    "unbiased beyond the clamp": launch(False, kl_loss_type="low_var_kl", use_unbiased_kl=True, ref_gap=3.5),
    "unbiased k1": launch(False, kl_loss_type="k1", use_unbiased_kl=True),
    "cispo": launch(estimator="cispo"),
    "cispo without a lower bound, tis": launch(estimator="cispo", eps_clip=5.0, use_tis=True),
    **{f"dual clip, {name}": launch(estimator=name, eps_clip_c=1.02) for name in ("grpo", "gspo")},
}


def cases_of(host: str) -> dict[str, Flags]:
    return {
        name: replace(flags, case=replace(flags.case, host=host))
        for name, flags in LAUNCHES.items()
        if flags.case.estimator != "cispo" or OWN_CODE[host].has_cispo
    }


def run_all(pool: RankPool, roots: dict[str, str], cases: list[HostCase]) -> dict[HostCase, tuple[StepResult, StepResult]]:
    """Each launch with our loss and with the host's own, cp 2, in one call of the pool."""
    every = [*cases, *(replace(case, door="default") for case in cases)]
    results = dict(zip(every, pool.run(run_cases, roots, every, world_size=2, context_parallel_size=2)[0], strict=True))
    for case, result in results.items():
        assert not isinstance(result, str), f"{case}:\n{result}"
    return {case: (results[case], results[replace(case, door="default")]) for case in cases}


pool = pool_of(2)


def plain(case: HostCase) -> HostCase:
    """The launch without its flags."""
    return replace(case, options=(), estimator="grpo" if case.estimator == "cispo" else case.estimator)


def assert_flags_are_honoured(pool: RankPool, roots: dict[str, str], rows: dict[str, Flags]) -> dict:
    launches = [flags.case for flags in rows.values()]
    found = run_all(pool, roots, list(dict.fromkeys([*launches, *map(plain, launches)])))
    for name, flags in rows.items():
        (ours, own), (without, _) = found[flags.case], found[plain(flags.case)]
        row, largest = f"{flags.case.host}, {name}", own.gradient.abs().max()
        assert float((ours.gradient - without.gradient).abs().max() / largest) > ACTS, f"{row}: the flag has to act"
        gap = float((own.gradient - ours.gradient).abs().max() / largest)
        if not flags.is_same:
            assert gap > DIFFERENT, f"{row}: the host's own loss means the same, and the warning at start says that it does not"
            continue
        assert gap <= 2 * EXACT, row
        assert ours.loss == pytest.approx(own.loss, rel=2 * EXACT, abs=2e-7), row
        assert list(ours.metrics) == list(own.metrics), row
        for metric in ours.metrics.keys() - {"opsm_clipfrac"}:
            assert ours.metrics[metric] == pytest.approx(own.metrics[metric], rel=3e-6, abs=2e-6), f"{row}: {metric}"
    return found


def share_of_dropped_samples(case: HostCase) -> float:
    step, args, dropped = case.step(), host_args(case), 0
    for number, (sample, advantage) in enumerate(zip(step.samples, normalised_rewards(step), strict=True)):
        old, kept = step.old_log_probs[number], [t for t in range(sample.response) if sample.mask[t]]
        new = sample_log_probs(sample, step.logits)
        gaps = [float(old[t] + ROLLOUT_GAP * math.sin(t + number) - new[t]) for t in kept]
        dropped += bool(kept) and advantage < 0 and sum(gaps) / len(gaps) > args.opsm_delta
    return dropped / len(step.samples)


@pytest.mark.slow
@pytest.mark.megatron
def test_an_emulated_hosts_flag_has_its_meaning_in_our_loss(pool):
    """A correction weighs no KL term; KL's ratio is the token's under GSPO; samples that are dropped stay in the denominators. Each
    launch on one host, in turn. opsm_clipfrac of ours is a share; the host divides dropped tokens, masked ones too, by the unmasked
    ones of the sample: a dropped sample counts more than 1."""
    of_host = {host: cases_of(host) for host in ("miles", "slime")}
    rows = {name: of_host[("miles", "slime")[number % 2]].get(name) for number, name in enumerate(LAUNCHES)}
    rows = {name: flags or of_host["slime"][name] for name, flags in rows.items()}
    of_sampler = "OPSM of the sampler"
    found = assert_flags_are_honoured(pool, {}, rows | {f"{of_sampler}, {host}": of_host[host][of_sampler] for host in of_host})
    for host in of_host:
        case = of_host[host][of_sampler].case
        ours, own = (result.metrics["opsm_clipfrac"] for result in found[case])
        assert ours == pytest.approx(share_of_dropped_samples(case), abs=1e-6) and own > ours + 0.01, host


@pytest.mark.host
@pytest.mark.megatron
@pytest.mark.parametrize("host", sorted(ROOTS) or ["miles"])
def test_a_checkouts_flag_has_its_meaning_in_our_loss(pool, host):
    assert_flags_are_honoured(pool, ROOTS, cases_of(host))
