"""Tries a user's own aggregation, KL estimator, correction, selection and metrics, once a launch, and says where one is not what it
declares.

Nothing here of a function of the package: the tests over the registries try those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from megatron_rl.aggregation import weigh_tokens
from megatron_rl.aggregation_record import AggregationRecord
from megatron_rl.config import CorrectionLevel, PolicyLossConfig, PolicyMetrics
from megatron_rl.corrections import correct
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.loss_hub import AGGREGATIONS
from megatron_rl.metrics.custom import named_metrics
from megatron_rl.metrics.policy import Metric, TokenValues, check_values
from megatron_rl.ops.ratios import bounded_exp, kl_estimate
from megatron_rl.registries.correction_settings import CorrectionSettings
from megatron_rl.registries.corrections import CORRECTIONS, CorrectionKind
from megatron_rl.registries.kl_estimators import KL_ESTIMATORS, KLEstimator, KLValue
from megatron_rl.registries.token_selections import TOKEN_SELECTIONS, TokenSelectionKind
from megatron_rl.step_counts import StepTotals
from megatron_rl.validation.halves import NUM_PROBES, changed_in, halves, leaving_no_trace
from megatron_rl.validation.routes import Settings

_NOISE = 1e-4
# Up to this log-ratio float32 parts of a value cancel without a loss of digits that matters.
_MODERATE = 3.0
_FACTOR_NOISE = 1e-2  # a user may compute in bfloat16


def own_term_problems(launch: Settings) -> Iterator[str]:
    """The contradictions of the configured aggregation, estimator, correction and selection; none of a built-in one, and none where
    a name or bounds are wrong, which other rules report."""
    record, estimator, correction = launch.record, launch.kl_estimator, launch.correction
    if record is not None and not AGGREGATIONS.is_built_in(record.name):
        yield from aggregation_problems(record, launch.config.loss_aggregation_divisor)
    if estimator is not None and not KL_ESTIMATORS.is_built_in(launch.config.kl_estimator):
        yield from estimator_problems(estimator)
    settings = CorrectionSettings.of(launch.config)
    if correction is not None and not CORRECTIONS.is_built_in(settings.kind) and not list(settings.problems()):
        yield from correction_problems(correction, settings)
    if launch.token_selection is not None and not TOKEN_SELECTIONS.is_built_in(launch.config.token_selection):
        yield from selection_problems(launch.token_selection)


def aggregation_problems(record: AggregationRecord, divisor: float | None) -> Iterator[str]:
    """A text where the weight of a sample depends on which samples are weighed with it. Nothing for a function that raises here."""
    places = torch.arange(NUM_PROBES)
    counts = 1 + 41 * (places * 7 % 32)  # each of 128 samples
    of_rollouts = torch.bincount(places // 2, counts)[places // 2].long()
    rows, of_prompts = 1 + places % 3, torch.bincount(places // 8, counts)[places // 8].long()
    totals = StepTotals(NUM_PROBES, NUM_PROBES // 8, int(counts.sum()), NUM_PROBES // 2)

    def weights_of(chosen: Tensor) -> tuple[Tensor]:
        weights = weigh_tokens(
            *(record.name, counts[chosen], totals),
            prompt_token_counts=of_prompts[chosen],
            divisor=divisor,
            rollout_token_counts=of_rollouts[chosen],
            rows_of_rollout=rows[chosen],
        )
        return (weights * totals.num_tokens,)  # near 1

    try:
        with leaving_no_trace():
            whole = weights_of(places)
            is_changed = bool(changed_in(halves((counts, of_prompts, of_rollouts, rows)), weights_of, whole))
    except Exception:  # of any type: it is the user's function
        return
    if is_changed:
        yield (
            f"loss_aggregation={record.name} gives a sample a weight that depends on the other samples of the call, those "
            "of a micro-batch, so it would change with the layout: take counts of the step from totals and the other arguments"
        )


def estimator_problems(estimator: KLEstimator) -> Iterator[str]:
    """A text for each way in which an estimator differs from its declaration."""
    name = f"kl_estimator={estimator.name}"
    vectors = _probes()
    kept = [vector.clone() for vector in vectors]
    try:
        with leaving_no_trace():
            value, derivative = kl_estimate(estimator, *vectors)
            is_written = any(not torch.equal(vector, before) for vector, before in zip(vectors, kept, strict=True))
            _, of_value = kl_estimate(replace(estimator, function=_value_alone(estimator)), *kept)

            def at(chosen: Tensor) -> tuple[Tensor, Tensor]:
                return kl_estimate(estimator, *(vector[chosen] for vector in kept))

            is_changed = bool(changed_in(halves(kept), at, (value, derivative)))
    except Exception as error:  # of any type: it is the user's function
        yield f"{name} cannot be computed: {type(error).__name__}: {error}"
        return
    if is_written:
        yield f"{name} writes into its inputs: it must leave them as they are"
        return
    if not bool((value.isfinite() & derivative.isfinite()).all()):
        yield (
            f"{name} is not finite for log-probabilities between -60 and 0: bound its exponents, as megatron_rl.bounded_exp does"
        )
        return
    if not bool(derivative.any()):
        yield f"{name} has derivative 0 everywhere, so it would train nothing: compute its value from log_probs without detach"
        return
    if is_changed:
        yield f"{name} depends at one token on the others, so it would change with the layout: it must be elementwise"
        return
    log_probs, ref_log_probs, log_ratio = kept
    is_moderate = ((log_probs - ref_log_probs).abs() <= _MODERATE) & (log_ratio.abs() <= _MODERATE)
    is_apart = is_moderate & ~torch.isclose(derivative, of_value, rtol=_FACTOR_NOISE, atol=_NOISE)
    if estimator.is_gradient_of_value and bool(is_apart.any()):
        yield (
            f"{name} returns a derivative that its value does not have, for {int(is_apart.sum())} of {NUM_PROBES} tokens: leave "
            "it to autograd, or declare is_gradient_of_value=False if that is the intent"
        )


def _value_alone(estimator: KLEstimator) -> Callable[..., Tensor]:
    def value(*given: Tensor) -> Tensor:
        returned = estimator.function(*given)
        result: Tensor = returned.value if isinstance(returned, KLValue) else returned
        return result

    return value


def correction_problems(correction: CorrectionKind, settings: CorrectionSettings) -> Iterator[str]:
    """A text for each way in which a correction differs from its declaration, at the bounds of the settings."""
    name = f"importance_correction={correction.name}"
    old, rollout, _ = _probes()
    mask, documents = torch.ones(NUM_PROBES, dtype=torch.bool), torch.arange(NUM_PROBES)  # each token is a sample
    settings = replace(settings, sequence_delta=None)

    def at(chosen: Tensor) -> tuple[Tensor, Tensor]:
        tokens = old[chosen]
        found = correct(
            settings,
            old_log_probs=tokens,
            rollout_log_probs=rollout[chosen],
            advantages=torch.ones_like(tokens),
            sums={"old_to_rollout": (tokens - rollout[chosen]).double(), "counts": torch.ones_like(tokens).double()},
            loss_mask=mask[chosen],
            documents=documents[: tokens.numel()],
        )
        return found.weights, found.is_kept

    try:
        with leaving_no_trace():
            weights, is_kept = whole = at(documents)
            is_changed = bool(changed_in(halves([old - rollout]), at, whole))
    except Exception as error:  # of any type: it is the user's function
        yield f"{name} cannot be computed: {type(error).__name__}: {error}"
        return
    if not bool(weights.isfinite().all()) or bool((weights < 0).any()):
        yield f"{name} has weights that are not finite or below 0, for ratios between e^-20 and e^20: bound them"
    if is_changed:
        element = "token" if settings.level == CorrectionLevel.TOKEN else "sample"
        yield f"{name} depends at one {element} on the others, so it would change with the layout: it must be elementwise"
    if correction.drops_tokens == bool(is_kept.all()):
        drops = "drops nothing" if correction.drops_tokens else "drops some"
        yield f"{name} declares drops_tokens={correction.drops_tokens}, and of ratios between e^-20 and e^20 it {drops}: change it"


def selection_problems(selection: TokenSelectionKind) -> Iterator[str]:
    """A text for each way in which a selection's score differs from what it must be."""
    name = f"token_selection={selection.name}"
    log_probs, others, differences = (vector.double() for vector in _probes())
    vectors = {
        **{"log_probs": log_probs, "entropy": -others, "advantages": differences},
        **{"centred_log_probs": log_probs - log_probs.mean(), "centred_advantages": differences - differences.mean()},
    }
    given = {need: vectors[need] for need in selection.needs}

    def at(chosen: Tensor) -> tuple[Tensor]:
        return (selection.function(**{need: vector[chosen] for need, vector in given.items()}),)

    try:
        with leaving_no_trace():
            (score,) = whole = at(torch.arange(NUM_PROBES))
            is_changed = bool(changed_in(halves(given.values()), at, whole))
            is_finite = bool(score.isfinite().all())
    except Exception as error:  # of any type: it is the user's function
        yield f"{name} cannot be computed: {type(error).__name__}: {error}"
        return
    if not is_finite:
        yield f"{name} has a score that is not finite, for log-probabilities between -30 and 0: bound it"
    if is_changed:
        yield f"{name} depends at one token on the others, so it would change with the layout: it must be elementwise"


def metric_problems(config: PolicyLossConfig) -> Iterator[str]:
    """A text for each way in which --custom-policy-metrics names what is no metric, or one that cannot be computed."""
    try:
        rows = named_metrics(config.custom_policy_metrics)
    except ConfigError as error:
        yield from (f"--custom-policy-metrics: {problem}" for problem in error.problems)
        return
    with_entropy = config.policy_metrics == PolicyMetrics.WITH_ENTROPY
    for row in rows:
        problem = _problem_of_metric(row, with_entropy)
        if problem is not None and not with_entropy and _problem_of_metric(row, True) is None:
            problem = "needs the entropy of each token: set --policy-metrics with_entropy"
        if problem is not None:
            yield f"--custom-policy-metrics: policy metric {row.name!r} {problem}"


def _problem_of_metric(row: Metric, with_entropy: bool) -> str | None:
    """What is wrong with the values of the row, with what to do."""
    log_probs, others, differences = _probes()
    numbers, ratios = torch.arange(NUM_PROBES), bounded_exp(log_probs - others)
    advantages, mask = torch.where(numbers % 7 == 0, 0.0, differences), numbers % 5 != 0
    is_written = False

    vectors = (log_probs, others, ratios, ratios > 1.2, advantages, -others)

    def at(chosen: Tensor) -> tuple[Tensor]:
        nonlocal is_written
        given, kept = ([one[chosen] for one in vectors] for _ in range(2))
        values = row.value(TokenValues(*given) if with_entropy else replace(TokenValues(*given), entropy=None))
        check_values(row, values, given[0])
        is_written = is_written or not all(map(torch.equal, given, kept))
        if values is None:
            raise DataError("has no value: return a vector, one number for each token")
        return (values.double(),)

    try:
        with leaving_no_trace():
            (values,) = whole = at(numbers)
            is_changed = bool(changed_in(halves(vectors), at, whole))
            at(numbers[:0])  # a rank may have no token
    except DataError as error:
        return str(error).removeprefix(f"policy metric {row.name!r} ")
    except Exception as error:  # of any type: it is the user's function
        return f"cannot be computed: {type(error).__name__}: {error}"
    if is_written:
        return "writes into its inputs: it must leave them as they are"
    if not bool(values[mask].isfinite().all()):
        return "is not finite for log-probabilities between -30 and 0, ratios up to e^20 and advantages of 0: bound it"
    if is_changed:
        return "depends at one token on the others, so it would change with the layout: it must be elementwise"
    return None


def _probes() -> tuple[Tensor, Tensor, Tensor]:  # [NUM_PROBES] float32: two log-probabilities, and a log-ratio
    """The differences are of all sizes that a run may meet, and some are 0."""
    drawn = torch.rand(5, NUM_PROBES, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    first = -30.0 * drawn[0]
    signs = torch.where(drawn[1] < 0.5, -1.0, 1.0)
    difference = signs * 10 ** (4.3 * drawn[2] - 3)  # 1e-3 to 20
    difference[::16] = 0.0
    log_ratio = torch.where(drawn[3] < 0.5, -1.0, 1.0) * 10 ** (4 * drawn[4] - 3)
    return first, (first - difference).clamp(max=0.0), log_ratio
