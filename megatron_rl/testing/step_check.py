"""Checks a user's training loop: the gradient that it gives to the optimiser against a dense float64 reference of the step.

The loop's forward_step runs once through the installed schedule, DDP and finalize_model_grads. What it must give is computed by
the oracle: all ranks' log-probabilities of the step's samples go into one float64 loss, whose gradient by each logit is then sent
through the same model. So no line of the loop's own loss, counts, weights and scale is used for what it is compared with. Where the
gradient is wrong, step_rows.py reads the mistake from the loop's gradient by each logit, or the same step with another setting
explains it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_rl.config import NO_CORRECTION, Distillation, PolicyLossConfig
from megatron_rl.count import StepTotals
from megatron_rl.declare import get_policy_loss
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.layout.agreement import on_all_ranks
from megatron_rl.layout.groups import ParallelGroups, broadcast_from_last, resolve_groups
from megatron_rl.megatron.model import model_config_of
from megatron_rl.megatron.probe import probe_schedule
from megatron_rl.megatron.samples import rollout_ids_of
from megatron_rl.megatron.schedule import ScheduledLoss, scale_for_schedule
from megatron_rl.testing import oracle
from megatron_rl.testing.comparison import MULTIPLE_TOLERANCE, Comparison, compare_shards, named_sizes
from megatron_rl.testing.layout_step import (
    Layout,
    StepSample,
    as_train_step_logs,
    gradient_shards,
    run_schedule,
)
from megatron_rl.testing.reference import CLIPS, DIVISOR, loss_by_hand, scale_of_terms
from megatron_rl.testing.step_rows import Derivatives, Microbatch, Row, known_tokens, read_microbatch, row_problem
from megatron_rl.weights import get_loss_aggregation

# Both gradients run through the same layers, so they differ by the rounding of the gradient of a logit alone: of float32 (4e-7 on
# the layouts of the tests), or of 16 bits (2^-9 of each).
TOLERANCE, TOLERANCE_OF_16_BITS = 1e-5, 1e-2
# How well a row's temperature must fit, and a mistake's gradient, relative to all rows; then in 16 bits.
FIT, MATCH, FIT_OF_16_BITS, MATCH_OF_16_BITS = 1e-3, 1e-4, 5e-2, 2e-2
# A model without dropout gives the same logits twice: exactly on one device, and nearly where a kernel adds in any order.
REPEATED_LOGITS = 1e-3

CURE = (
    "return scale_for_schedule(output.loss, ...) from loss_func: it undoes the 1/(dp x cp x micro-batches) of DDP and the schedule "
    "(docs/own_loop.md)"
)
NO_CLIP = {"clip_ratio_low": 1 - 1e-9, "clip_ratio_high": 1e9}
COUNT = "count the whole step with count_step, before it is divided"

ForwardStep = Callable[[Iterator[Any], Any], tuple[Tensor, Callable[[Tensor], Any]]]


def check_step(
    forward_step: ForwardStep,
    batches: Sequence[Any],
    model: Any,
    samples: Sequence[StepSample],
    places_of: Callable[[Any], Tensor],
    config: PolicyLossConfig,
    *,
    vocab_size: int,
    seq_length: int,
    micro_batch_size: int,
    reported_loss: str | None = None,
) -> Comparison:
    """Runs one step of a loop's own forward_step without the optimiser, and raises where its gradient is wrong.

    Every rank calls it, after parallel_state is initialised. Parameters do not change; gradient buffers are zero afterwards.

    Args:
        forward_step: the loop's, as Megatron's schedules call it: (data_iterator, model) -> (logits [.., V_tp], loss_func).
        batches: this rank's micro-batches, what the data iterator yields.
        model: wrapped by Megatron's DistributedDataParallel, without dropout; a list for an interleaved pipeline. A loss of plain
            PyTorch is for testing.loss_property.assert_layout_invariant.
        samples: of the whole step, in plain numbers, the same on every rank. old_log_probs None: the policy's own.
        places_of: (batch) -> [rows of the logits, 2] int64 on the last pipeline stage: the number of the sample in `samples`, and
            the place in its response of the token that the row predicts; (-1, -1) for a row that predicts none.
        config: the loss, aggregation, clip, temperature, KL, entropy and corrections that the loop means to train.
        vocab_size: columns of the vocabulary without padding.
        seq_length, micro_batch_size: as given to the schedule.
        reported_loss: the key of loss_func's report that holds the step's loss as a [sum, count] pair; None compares none.
    Returns: the comparison; gradient_error is relative, about 4e-7 in float32.
    Warns: on rank 0, where a mistake would pass: the samples weigh the same under another aggregation, or another clip gives the
        same gradient, as where every ratio is 1.
    Communication: two steps of the schedule, the probe's, and a gather of what is known of the step's rows over all ranks.
    Raises: ConfigError, on every rank: for a wrong gradient or reported loss, with the mistake or the factor by its name; where
        places_of misses an unmasked token or names one twice; for a model with dropout, and where nothing reduces gradients.
    """
    models: list[Any] = list(model) if isinstance(model, Sequence) else [model]
    model_config = model_config_of(models[0])
    if model_config.finalize_model_grads_func is None:
        raise ConfigError(
            "check_step: finalize_model_grads_func is None in the model's config, so the schedule never reduces gradients over "
            "ranks: set it to megatron.core.distributed.finalize_model_grads"
        )
    if config.kl_coefficient and any(sample.ref_log_probs is None for sample in samples):
        raise ConfigError("check_step: kl_coefficient is not 0, and a sample has no ref_log_probs: give each sample some")
    if config.distillation != Distillation.NONE:
        raise ConfigError("check_step: its dense step has no teacher: check the loop once without distillation")
    groups = resolve_groups(models[0])
    probe_schedule(calculate_per_token_loss=model_config.calculate_per_token_loss, ddp_config=models[0].ddp_config)
    run = partial(run_schedule, models, batches, seq_length, micro_batch_size)
    own = _Recorder(forward_step)
    reports = run(own)
    gradients = gradient_shards(models)
    microbatches: list[Microbatch] = []

    def read() -> list[Row]:
        rows = []
        for number, (logits, gradient) in enumerate(zip(own.logits, own.gradients, strict=True)):
            part, places = (groups.dp_cp.rank(), number), places_of(batches[number])
            microbatch, read_rows = read_microbatch(part, logits, gradient, places, samples, config, groups, vocab_size)
            microbatches.append(microbatch)
            rows += read_rows
        return [] if groups.tp.rank() else rows  # all ranks of tp have the same

    rows = [row for rank_rows in on_all_ranks(read) for row in rank_rows]
    known = known_tokens(rows, samples)
    step = dense_step(samples, known, config)
    scale = partial(
        scale_for_schedule,
        num_microbatches=len(batches),
        totals=StepTotals(len(samples), None, sum(sum(sample.loss_mask) for sample in samples)),
        config=model_config,
        groups=groups,
        gradient_divisor=config.gradient_divisor,
        router_aux_loss=config.router_aux_loss,
    )
    exact = _Exact(forward_step, microbatches, step, scale)
    run(exact)
    expected = {name: shard.gradient for stage in gradient_shards(models) for name, shard in stage.items()}
    for chunk in models:
        chunk.zero_grad_buffer()
    if not all(on_all_ranks(lambda: exact.repeats_logits)):  # after the schedule, in which other ranks wait for one that raises
        raise ConfigError(
            "check_step: the model gives other logits for the same batch in a second run: turn dropout off "
            "(hidden_dropout=0.0, attention_dropout=0.0), and let forward_step be the same in both runs"
        )
    found = compare_shards(gradients, expected, groups, has_experts=model_config.num_moe_experts is not None)
    if reported_loss is not None:
        found = found.with_loss(_loss_of(reports, reported_loss, groups), step.loss, step.loss_scale)
    is_16_bit = any(on_all_ranks(lambda: any(logits.dtype != torch.float32 for logits in own.logits)))
    tolerance = TOLERANCE_OF_16_BITS if is_16_bit else TOLERANCE
    if torch.distributed.get_rank() == 0 and (alike := settings_alike(samples, known, config)):
        warnings.warn(
            f"check_step: {', '.join(alike)} give the gradient of this step too: the check cannot tell them from config. Give it "
            "responses of different lengths, prompts with different numbers of tokens, and, to the loss too, old log-probabilities "
            "whose ratios lie on both sides of the clip, and near it",
            stacklevel=2,
        )
    if not found.cause(tolerance, {}):
        return found
    mistake = ""
    if not found.gradient_error < tolerance and MULTIPLE_TOLERANCE * abs(found.ratio) <= found.residual < math.inf:
        fit, match = (FIT_OF_16_BITS, MATCH_OF_16_BITS) if is_16_bit else (FIT, MATCH)
        mistake = _Mistakes(rows, samples, known, config, step, match).name(fit)
    num_rows = len(own.logits[0]) if own.logits else 1
    mistake = mistake or _cause(found, tolerance, groups, len(batches), samples, num_rows)
    # Each part on a line of its own: it stands below a traceback, where it must be read whole.
    in_lines = "".join(f"\n    {part}" for part in mistake.split("; "))
    raise ConfigError(f"check_step of {config.policy_loss} with {config.loss_aggregation}:{in_lines}")


def _cause(
    found: Comparison, tolerance: float, groups: ParallelGroups, num_microbatches: int, samples: Sequence[StepSample], rows: int
) -> str:
    """What the numbers of the whole gradient say, such as a factor with a name, and what to do where it is the schedule's."""
    tensor, context, data = groups.tp.size(), groups.cp.size(), groups.dp.size()
    layout = Layout(tensor=tensor, context=context, data=data, num_microbatches=num_microbatches)
    cause = found.cause(tolerance, named_sizes(layout, samples, rows=rows))
    is_unscaled = abs(found.ratio * groups.dp_cp.size() * num_microbatches - 1) < MULTIPLE_TOLERANCE
    return f"{cause}; {CURE}" if is_unscaled else cause


def settings_alike(samples: Sequence[StepSample], known: Sequence[Tensor], config: PolicyLossConfig) -> list[str]:
    """The settings whose mistakes these samples cannot show: other values give the same gradient."""
    others = {f"loss_aggregation={name}": [settings] for name, settings in _other_aggregations(samples, config).items()}
    bounds = get_policy_loss(config.policy_loss).clip_bounds(config.clip_ratio_low, config.clip_ratio_high) or (0.0, 0.0)
    for name, bound in zip(NO_CLIP, bounds, strict=True):
        if bound not in (0.0, 1.0):  # 1: no lower bound
            others[f"half and twice {name}"] = [{name: min(bound * factor, NO_CLIP[name])} for factor in (0.5, 2.0)]
    right = dense_step(samples, known, config)
    return [
        words
        for words, changes in others.items()
        if all(dense_step(samples, known, replace(config, **change)).is_near(right) for change in changes)
    ]


def _other_aggregations(samples: Sequence[StepSample], config: PolicyLossConfig) -> dict[str, dict[str, Any]]:
    """The settings of the built-in ones, by name. row_mean is sample_mean where each sample is a rollout."""
    has_rollouts = rollout_ids_of(samples) is not None
    others = [get_loss_aggregation(name) for name in oracle.AGGREGATIONS if name != config.loss_aggregation]
    return {
        one.name: {"loss_aggregation": one.name, "loss_aggregation_divisor": DIVISOR if one.takes_divisor else None}
        for one in others
        if has_rollouts or not one.needs_rows
    }


class _Recorder:
    """The loop's forward_step; keeps the logits and the gradient by them of each micro-batch of the last pipeline stage."""

    def __init__(self, forward_step: ForwardStep):
        self.forward_step = forward_step
        self.logits: list[Tensor] = []
        self.gradients: list[Tensor] = []

    def __call__(self, iterator: Iterator[Any], model: Any) -> tuple[Tensor, Callable[..., Any]]:
        output, loss_func = self.forward_step(iterator, model)

        def recorded(logits: Tensor) -> Any:
            logits.register_hook(partial(self._keep, len(self.logits)))
            self.logits.append(logits.detach().flatten(0, -2).clone())  # the loop's loss may overwrite the logits
            self.gradients.append(torch.zeros_like(self.logits[-1]))
            return loss_func(logits)

        return output, recorded

    def _keep(self, number: int, gradient: Tensor) -> None:
        self.gradients[number] = gradient.detach().flatten(0, -2).clone()


class _Exact:
    """The loop's forward_step with another loss: linear in the logits, with the right gradient."""

    def __init__(self, forward_step: ForwardStep, microbatches: Sequence[Microbatch], step: DenseStep, scale: Any):
        self.forward_step, self.step, self.scale = forward_step, step, scale
        self.microbatches, self.repeats_logits = iter(microbatches), True

    def __call__(self, iterator: Iterator[Any], model: Any) -> tuple[Tensor, Callable[..., ScheduledLoss]]:
        output, _ = self.forward_step(iterator, model)
        return output, self.loss_func

    def loss_func(self, logits: Tensor) -> ScheduledLoss:
        one, rows = next(self.microbatches), logits.flatten(0, -2)
        self.repeats_logits &= torch.allclose(rows.detach(), one.own_logits, rtol=REPEATED_LOGITS, atol=REPEATED_LOGITS)
        return self.scale((rows.float() * one.target(self.step.derivatives)).sum(), num_local_tokens=one.num_tokens)


def _loss_of(reports: Sequence[dict[str, Tensor]], key: str, groups: ParallelGroups) -> float:
    logged = as_train_step_logs([{key: report[key]} for report in reports], groups)
    loss = torch.tensor(logged.get(key, 0.0), dtype=torch.float64, device=torch.cuda.current_device())
    return float(broadcast_from_last(loss, groups.pp))


@dataclass(frozen=True, slots=True)
class DenseStep:
    """The loss of the whole step."""

    loss: float
    loss_scale: float
    derivatives: Derivatives

    def is_near(self, other: DenseStep) -> bool:
        one, two = (torch.cat([*chain(*step.derivatives)]) for step in (self, other))
        return bool((one - two).norm() <= TOLERANCE * two.norm())


def dense_step(
    samples: Sequence[StepSample],
    known: Sequence[Tensor],  # of each sample [response_length, 2], as known_tokens
    config: PolicyLossConfig,
    parts: Sequence[set[tuple[int, int]]] = (),
) -> DenseStep:
    """parts: (sample, place) of the tokens that are a step by themselves, with the counts of their own samples and tokens; (): all
    are one step. Communication: none."""
    leaves = [column.clone().requires_grad_() for sample_rows in known for column in sample_rows.unbind(1)]
    scores = [oracle.Scores(*columns) for columns in zip(leaves[::2], leaves[1::2], strict=True)]

    def loss_of(part: set[tuple[int, int]]) -> Tensor:
        numbers = sorted({number for number, _ in part})
        masks = [[int((number, place) in part) for place in range(len(samples[number].loss_mask))] for number in numbers]
        own = [replace(samples[number], loss_mask=mask) for number, mask in zip(numbers, masks, strict=True)]
        return loss_by_hand(own, [scores[number] for number in numbers], config)

    loss = torch.stack([loss_of(part) for part in parts]).sum() if parts else loss_by_hand(samples, scores, config)
    gradients = torch.autograd.grad(loss, leaves, materialize_grads=True)
    # An old log-probability of NaN is not known, and the derivative then neither.
    log_prob_gradients = [
        gradient if sample.old_log_probs is None else gradient + 0.0 * gradient.new_tensor(sample.old_log_probs)
        for sample, gradient in zip(samples, gradients[::2], strict=True)
    ]
    scale = scale_of_terms(samples, config.loss_aggregation, config.loss_aggregation_divisor or DIVISOR)
    return DenseStep(float(loss.detach()), scale, (log_prob_gradients, gradients[1::2]))


class _Alternative(NamedTuple):
    """The step with other settings, samples or parts, as dense_step takes them."""

    words: str
    cure: str
    settings: Mapping[str, Any] = {}
    samples: Sequence[StepSample] | None = None
    parts: Sequence[set[tuple[int, int]]] = ()


@dataclass(frozen=True, slots=True)
class _Mistakes:
    """What is wrong in a step, by the gradient of each row of its logits."""

    rows: Sequence[Row]
    samples: Sequence[StepSample]
    known: Sequence[Tensor]
    config: PolicyLossConfig
    right: DenseStep
    match: float

    def name(self, fit: float) -> str:
        """What is wrong and what to do, in words; empty where the rows do not show it."""
        tokens = [row for row in self.rows if row.place >= 0 and self.samples[row.sample].loss_mask[row.place]]
        if not any(row.gg for row in self.rows):
            return (
                "no gradient reaches the logits that forward_step returned: compute the loss from what loss_func is given; or "
                "every token is clipped: compare old_log_probs with those of `samples`"
            )
        if mistake := self.wrong_mask(tokens) or row_problem(tokens, self.samples, self.config, fit):
            return mistake
        if self.is_multiple(self.right, tokens):
            return (
                "the gradient by the logits is right, and that of the parameters is not: look at what the loop does between the "
                "model's forward and the optimiser"
            )
        found = [*islice((one for one in self.alternatives(tokens) if self.is_explained(one, tokens)), 2)]
        cures = "; ".join(dict.fromkeys(one.cure for one in found))
        return f"{', or '.join(one.words for one in found)}: {cures}" if found else self.other_mistake(tokens)

    def wrong_mask(self, tokens: Sequence[Row]) -> str:
        trained, unmasked = {row.token for row in self.rows if row.gg}, {row.token for row in tokens}
        # A sample that is clipped whole has no gradient, and says nothing of its mask.
        shown = {number for number, _ in trained}
        expected = {row.token for row in tokens if row.products_with(self.right.derivatives)[1] and row.sample in shown}
        missing = expected - trained
        for name, where, end in (("first", "late", min), ("last", "early", max)):
            ends = {end(token for token in unmasked if token[0] == number) for number, _ in expected} & expected
            if missing and missing == ends and missing != expected:
                return (
                    f"the mask is one row {where}, or one token short: the {name} token of each response has no gradient. A token "
                    "is predicted by the row before it: set the mask there"
                )
        if trained - unmasked:
            return (
                "the mask has rows too many, of prompts, padding or masked tokens: they have a gradient, and predict no unmasked "
                "token of `samples`. Set it where places_of names an unmasked token alone"
            )
        return ""

    def other_mistake(self, tokens: Sequence[Row]) -> str:
        products = {row: row.products_with(self.right.derivatives) for row in tokens}
        both = [row for row, (found, right, _) in products.items() if found and right]
        if self.is_multiple(self.right, both):
            return (
                "a part of the step is lost, or the clip is another: some tokens have no gradient that must have one, or have one "
                "that must have none. Give each sample of the step to one micro-batch, and the loss the clip and "
                "`loss_parameters` of config; a ratio within rounding of the clip may lie on either side"
            )
        rows_by_sample = [[row for row in both if row.sample == number] for number in range(len(self.samples))]
        if all(self.is_multiple(self.right, sample_rows) for sample_rows in rows_by_sample):
            return (
                "each sample's tokens are off by a factor of their own: its advantage, its weight or its ratio is another. Compare "
                "advantages, token weights and old log-probabilities with those of `samples` and config"
            )
        row = max(tokens, key=lambda row: products[row][0] + products[row][1] - 2 * products[row][2])
        return (
            f"the loss has another derivative, as by the log-probability of token {row.place} of sample {row.sample}, or a term "
            "beside it: compare loss, clip and terms with config, and old log-probabilities with those of `samples`"
        )

    def is_multiple(self, step: DenseStep, rows: Sequence[Row]) -> bool:
        """Whether the gradient by these rows is the step's but for one factor."""
        products = [row.products_with(step.derivatives) for row in rows]
        found, right, product = (sum(row_products[i] for row_products in products) for i in range(3))
        return not rows or (right > 0 and found - product**2 / right <= self.match**2 * found)

    def is_explained(self, one: _Alternative, tokens: Sequence[Row]) -> bool:
        try:
            config = replace(self.config, **one.settings)
            return self.is_multiple(dense_step(one.samples or self.samples, self.known, config, one.parts), tokens)
        except (ConfigError, DataError):  # as a loss that needs what the samples do not have
            return False

    def alternatives(self, tokens: Sequence[Row]) -> Iterator[_Alternative]:
        """The usual mistakes first."""
        config, samples = self.config, self.samples
        weigh = f"weigh with sample_token_weights({config.loss_aggregation!r}, ...)"
        others = _other_aggregations(samples, config)
        for name, settings in others.items():
            yield _Alternative(f"tokens weigh as under {name}", weigh, settings)
        alone = [replace(sample, prompt_id=str(number)) for number, sample in enumerate(samples)]
        prompts = "give count_step the prompt id of each sample, equal on all ranks"
        yield _Alternative("tokens weigh as if each sample were a prompt of its own", prompts, samples=alone)
        rows = [replace(sample, rollout_id=None) for sample in samples]
        rollouts = "give count_step the rollout id of each sample, equal on all ranks"
        yield _Alternative("tokens weigh as if each sample were a rollout of its own", rollouts, samples=rows)
        for part, owner in (("micro-batch", lambda row: row.part), ("rank", lambda row: row.part[0])):
            parts = [{row.token for row in tokens if owner(row) == one} for one in dict.fromkeys(map(owner, tokens))]
            for name, settings in {config.loss_aggregation: {}, **others}.items():
                yield _Alternative(f"tokens weigh as under {name} of each {part} alone", COUNT, settings, parts=parts)
        on_policy = [replace(sample, old_log_probs=None) for sample in samples]
        yield _Alternative("every ratio is 1", "pass the old log-probabilities of the rollout to the loss", samples=on_policy)
        for words, shift in (("late", lambda old: [math.nan, *old[:-1]]), ("early", lambda old: [*old[1:], math.nan])):
            shifted = [replace(one, old_log_probs=one.old_log_probs and shift(one.old_log_probs)) for one in samples]
            cure = "the log-probability of a token lies at the row that predicts it"
            yield _Alternative(f"the old log-probabilities are one token {words}", cure, samples=shifted)
        yield _Alternative("the ratio has no clip", "pass the clip of config to the loss", NO_CLIP)
        opposite = [replace(sample, advantage=-sample.advantage) for sample in samples]
        yield _Alternative("the advantages have the other sign", "give the loss those of `samples`", samples=opposite)
        term = f"add it with kl_coefficient={config.kl_coefficient:g}, kl_estimator={config.kl_estimator!r}"
        yield _Alternative("the KL term is missing", term, {"kl_coefficient": 0.0})
        for name in oracle.ESTIMATORS:
            yield _Alternative(f"the KL term is that of {name}", term, {"kl_estimator": name})
        term = f"add it with entropy_coefficient={config.entropy_coefficient:g}"
        yield _Alternative("the entropy term is missing", term, {"entropy_coefficient": 0.0})
        none = {"importance_correction": NO_CORRECTION, "off_policy_sequence_delta": None}
        yield _Alternative("the correction is missing", "pass correction= and rollout_log_probs= to the loss", none)
        for name in (name for name in CLIPS if name != config.policy_loss):
            other: dict[str, Any] = {"policy_loss": name, "clip_ratio_low": None, "clip_ratio_high": None, "loss_parameters": {}}
            yield _Alternative(f"the loss is {name}", f"compute {config.policy_loss}", other)
