"""Tries a user's own functions once a launch, before any data: losses, aggregations, KL estimators, corrections.

The layouts and the fused head rely on what such a function declares, and no other test can see that it is not elementwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from megatron_rl.config import LOG_RATIO_BOUND, CorrectionLevel, PolicyLossConfig
from megatron_rl.count import StepTotals
from megatron_rl.declare import POLICY_LOSSES, get_policy_loss
from megatron_rl.errors import ConfigError
from megatron_rl.losses.corrections import CORRECTIONS, CorrectionSettings, correct
from megatron_rl.losses.kl import KL_ESTIMATORS, KLEstimator, KLValue, kl_estimate
from megatron_rl.policy_loss.reduce_torch import evaluate
from megatron_rl.validation.launch_methods import Settings
from megatron_rl.weights import AGGREGATIONS, AggregationRecord, sample_token_weights

# The rest of a loop over vectors may round in another way, so that few elements show nothing: 64 are four rests of 16. A half of
# 4096 has no rest where the function takes the elements as they are. Of a half 64 are 3 %: a clip may act on 7 %.
NUM_PROBES, FEW = 4096, 64
# Elsewhere a result has the same bits. What a clip ratio of 3e-4 makes of the others is 1e-4 of a value, so a bound for sums of
# float32 would hide it.
_SAME, _SMALLEST = 1e-5, 1e-9
_NOISE, _BFLOAT16_NOISE = 1e-6, 1e-2  # a user may compute in bfloat16
# Up to this log-ratio the float32 parts of an estimator's derivative, of e^10 at most, cancel with 4 digits left.
_MODERATE = 10.0
Results = tuple[Tensor, ...]  # of each element: a value and, of what trains, its derivative


def own_function_problems(launch: Settings) -> Iterator[str]:
    """Of each function of the user's that the settings name; none where a name or number is wrong, which other rules report."""
    config, record, settings = launch.config, launch.record, CorrectionSettings.of(launch.config)
    yield from loss_problems(config)
    if record is not None and not AGGREGATIONS.is_built_in(record.name):
        yield from aggregation_problems(record, config.loss_aggregation_divisor)
    if launch.kl_estimator is not None and not KL_ESTIMATORS.is_built_in(config.kl_estimator):
        yield from estimator_problems(launch.kl_estimator)
    if settings is None or launch.correction is None:
        return
    if not CORRECTIONS.is_built_in(settings.kind) and not list(settings.problems()):
        yield from correction_problems(settings)


def trial(
    name: str,
    function: Callable[..., Results],
    vectors: Sequence[Tensor],  # [NUM_PROBES] each
    *,
    element: str = "token",
    derivative_of_value: Callable[..., Tensor] | None = None,  # what autograd makes of the value
) -> Iterator[str]:
    """The first thing that is wrong with the function. Nothing for a random one but a result that is not finite: another result
    then shows nothing."""
    try:
        with _leaving_no_trace():
            given = [vector.clone() for vector in vectors]
            whole = function(*given)
            is_written = not all(map(torch.equal, given, vectors))
            is_random = any(map(_num_apart, whole, function(*(vector.clone() for vector in vectors))))
            is_changed = any(
                _num_apart(alone, joint[places]) > FEW
                for places in _halves(vectors)
                for alone, joint in zip(function(*(vector[places] for vector in vectors)), whole, strict=True)
            )
            wanted = None if derivative_of_value is None else derivative_of_value(*vectors)
    except Exception as error:  # of any type: it is the user's function
        yield f"{name} cannot be computed: {type(error).__name__}: {error}"
        return
    num_infinite = max(int((~result.isfinite()).sum()) for result in whole)
    if is_written:
        yield f"{name} writes into its inputs: it must leave them as they are"
    elif num_infinite:
        yield (
            f"{name} is not finite for {num_infinite} of {NUM_PROBES} probes, with log-ratios up to +-30 and advantages of 0: "
            "write bounded_exp for exp, and torch.where(is_inside, x, 0.0) where it is not defined"
        )
    elif is_random:
        return
    elif is_changed:
        yield (
            f"{name} depends at one {element} on the others, so it would change with the layout: leave sums and means over them to "
            "the package"
        )
    elif wanted is not None and whole[0].any() and not whole[1].any():
        yield f"{name} has derivative 0 everywhere, so it would train nothing: compute its value from log_probs without detach"
    elif wanted is not None and (num_wrong := _num_apart(whole[1], wanted, _BFLOAT16_NOISE, _NOISE)) > FEW:
        yield (
            f"{name} returns a derivative that its value does not have, for {num_wrong} of {NUM_PROBES} probes: detach in the "
            "value what is constant for the gradient, or leave the derivative to autograd; beyond a log-ratio of "
            f"+-{LOG_RATIO_BOUND:g} a loss has none through it"
        )


def loss_problems(config: PolicyLossConfig) -> Iterator[str]:
    """Of the configured loss at its numbers; none of a built-in one."""
    try:
        loss = get_policy_loss(config.policy_loss)
        clip = loss.clip_bounds(config.clip_ratio_low, config.clip_ratio_high)
        keywords = loss.resolve_parameters(config.loss_parameters)
    except ConfigError:  # other rules report it
        return
    if POLICY_LOSSES.is_built_in(loss.name):
        return
    if clip is not None:
        keywords |= {"clip_ratio_low": clip[0], "clip_ratio_high": clip[1]}
    probes, names = _probes(), ("log_ratio", "advantages", "log_probs", *loss.needs)

    def at(*given: Tensor, prefers_autograd: bool = False) -> Results:
        inputs = dict(zip(names, given, strict=True))
        further = {name: inputs[name] for name in loss.needs}
        log_ratio, advantages, log_probs = given[:3]
        found = evaluate(loss, log_ratio, advantages, log_probs, keywords, further, prefers_autograd=prefers_autograd)
        return found.value, found.derivative

    numbers = ", ".join(f"{name}={value:g}" for name, value in keywords.items())
    yield from trial(
        f"policy_loss={loss.name}" + f" with {numbers}" * bool(numbers),
        at,
        [probes[name] for name in names],
        element="token" if loss.level == "token" else "sample",
        derivative_of_value=lambda *given: at(*given, prefers_autograd=True)[1],
    )
    clip_tokens = loss.token_clip
    if clip_tokens is not None:
        vectors = (probes["log_ratio"], probes["advantages"])
        yield from trial(f"token_clip of {loss.name}", lambda *given: (clip_tokens(*given, **keywords),), vectors)


def aggregation_problems(record: AggregationRecord, divisor: float | None) -> Iterator[str]:
    """Of 128 samples with each count, in rollouts of two and prompts of eight."""
    places = _probes()["places"]
    counts = 1 + 41 * (places * 7 % 32)
    rollout_tokens, prompt_tokens = (torch.bincount(places // size, counts)[places // size].long() for size in (2, 8))
    totals = StepTotals(NUM_PROBES, NUM_PROBES // 8, int(counts.sum()), NUM_PROBES // 2)

    def weights_of(counts: Tensor, prompt_tokens: Tensor, rollout_tokens: Tensor, rows: Tensor) -> Results:
        weights = sample_token_weights(
            *(record.name, counts, totals),
            prompt_token_counts=prompt_tokens,
            divisor=divisor,
            rollout_token_counts=rollout_tokens,
            rows_of_rollout=rows,
            are_of_step=False,
        )
        return (weights * totals.num_tokens,)  # near 1

    vectors = (counts, prompt_tokens, rollout_tokens, 1 + places % 3)
    yield from trial(f"loss_aggregation={record.name}", weights_of, vectors, element="sample")


def estimator_problems(estimator: KLEstimator) -> Iterator[str]:
    probes = _probes()

    def at(*given: Tensor) -> Results:
        return kl_estimate(estimator, *given)

    def value_alone(*given: Tensor) -> Tensor:
        returned = estimator.function(*given)
        result: Tensor = returned.value if isinstance(returned, KLValue) else returned
        return result

    def derivative_of_value(log_probs: Tensor, ref_log_probs: Tensor, log_ratio: Tensor) -> Tensor:
        given = (log_probs, ref_log_probs, log_ratio)
        is_far = ((log_probs - ref_log_probs).abs() > _MODERATE) | (log_ratio.abs() > _MODERATE)
        return torch.where(is_far, at(*given)[1], kl_estimate(replace(estimator, function=value_alone), *given)[1])

    yield from trial(
        f"kl_estimator={estimator.name}",
        at,
        [probes[name] for name in ("log_probs", "old_log_probs", "other_log_ratio")],
        derivative_of_value=derivative_of_value if estimator.is_gradient_of_value else None,
    )


def correction_problems(settings: CorrectionSettings) -> Iterator[str]:
    """At the bounds of the settings. Each token is a sample."""
    probes, settings = _probes(), replace(settings, sequence_delta=None)

    def at(log_ratio: Tensor, old_log_probs: Tensor) -> Results:
        ones = torch.ones_like(log_ratio)
        found = correct(
            settings,
            old_log_probs=old_log_probs,
            rollout_log_probs=old_log_probs - log_ratio,
            advantages=ones,
            sums={"old_to_rollout": log_ratio.double(), "counts": ones.double()},
            loss_mask=ones.bool(),
            documents=torch.arange(len(ones)),
        )
        return (found.weights,)

    element = "token" if settings.level == CorrectionLevel.TOKEN else "sample"
    vectors = (probes["log_ratio"], probes["log_probs"])
    yield from trial(f"importance_correction={settings.kind}", at, vectors, element=element)


@contextmanager
def _leaving_no_trace() -> Iterator[None]:
    """A user's function makes its tensors on the CPU, records no gradient, and moves no generator of random numbers."""
    with torch.device("cpu"), torch.no_grad(), torch.random.fork_rng(devices=[]):
        yield


@_leaving_no_trace()
def _probes() -> dict[str, Tensor]:  # [NUM_PROBES] each, float32
    """All sizes that a run may meet, in all combinations: a loss may be 0 for most of them. Some log-ratios are exactly 0, and
    some beyond the bound: a clip leaves a quarter of them a gradient, which is more than FEW."""
    drawn = torch.rand(8, NUM_PROBES, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    places = torch.arange(NUM_PROBES)
    signs = 2.0 * (drawn[:2].argsort(dim=1) % 2) - 1  # half of them are 1: a half of the probes may have one sign alone
    log_ratio = signs[0] * 10 ** (6 * drawn[2] - 5)  # 1e-5 to 10
    log_ratio[::16] = 0.0
    log_ratio[4::8] = LOG_RATIO_BOUND * signs[0, 4::8] * (1 + drawn[2, 4::8] / 2)
    advantages = signs[1] * 10 ** (5 * drawn[3] - 3)  # 1e-3 to 100
    advantages[7::8] = 0.0
    log_probs = log_ratio.clamp(max=0.0) - 10 ** (4 * drawn[4] - 3)  # no probability is above 1, the old one neither
    return {
        "log_ratio": log_ratio,
        "other_log_ratio": log_ratio.flip(0),
        "advantages": advantages,
        "log_probs": log_probs,
        "old_log_probs": log_probs - log_ratio,
        "rollout_log_probs": -9 * drawn[5],
        "ref_log_probs": -9 * drawn[6],
        "entropy": 1e-3 + 11 * drawn[7],  # from a sure token to an even choice
        "token_counts": (2.0 ** (places.float() % 32 / 2.5)).round(),
        "places": places,
        "mean_log_ratio": log_ratio.flip(0),
    }


def _halves(vectors: Sequence[Tensor]) -> Iterator[Tensor]:
    """The places of the smaller half of each vector's values, then of its larger half.

    The sum, the mean and the count of a vector are others in each half. Its largest value is in one half alone, and so is its
    smallest one.
    """
    for vector in vectors:
        yield from vector.argsort(stable=True).chunk(2)


def _num_apart(values: Tensor, others: Tensor, rtol: float = _SAME, atol: float = _SMALLEST) -> int:
    return int((~torch.isclose(values.float(), others.float(), rtol=rtol, atol=atol, equal_nan=True)).sum())
