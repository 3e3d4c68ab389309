"""Checks a user's training loop: the gradient that it gives to the optimiser against a dense float64 reference of the step.

The loop's forward_step runs once through the installed schedule, DDP and finalize_model_grads. What it must give is computed by
hand: all ranks' log-probabilities of the step's samples go into one float64 loss, whose gradient by each logit is then sent through
the same model. So no line of the loop's own loss, counts, weights and scale is used for what it is compared with. Where the
gradient is wrong, forward_step runs once more, and step_mistakes.py reads the mistake from its gradient by each logit, and from
what the loss was given.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_rl.aggregation import sample_token_weights
from megatron_rl.config import PolicyLossConfig
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.layout.agreement import on_all_ranks
from megatron_rl.layout.groups import SINGLE, ParallelGroups, broadcast_from_last, resolve_group, resolve_groups
from megatron_rl.loss_hub import AGGREGATIONS, PASSED_INPUTS, get_loss_aggregation, get_policy_loss, loss_aggregation_names
from megatron_rl.losses.api import watching_losses
from megatron_rl.megatron.model import is_of_expert, model_config_of
from megatron_rl.megatron.probe import probe_schedule
from megatron_rl.megatron.samples import rollout_ids_of
from megatron_rl.megatron.schedule import ScheduledLoss, delivered_factor, scale_for_schedule
from megatron_rl.registries.token_selections import Taken, get_token_selection
from megatron_rl.step_counts import RolloutCounts, StepTotals, count_step
from megatron_rl.testing.comparison import MULTIPLE_TOLERANCE, Comparison, compare_shards, named_sizes
from megatron_rl.testing.layout_step import (
    Layout,
    Shards,
    StepSample,
    as_train_step_logs,
    gather_distributed_gradients,
    named_shards,
)
from megatron_rl.testing.step_given import (
    Given,
    LossWatch,
    compared_tokens,
    gather_given,
    given_problem,
    settings_problem,
    weights_factor,
)
from megatron_rl.testing.step_mistakes import OF_16_BITS, OF_FLOAT32, Step, mistake_of, rows_of
from megatron_rl.testing.step_reference import (
    DenseStep,
    KnownTokens,
    Microbatch,
    Target,
    dense_step,
    gather_tokens,
    gathered_problem,
)

# Both gradients run through the same layers, so they differ by the rounding of the gradient of a logit alone: of float32 (4e-7 on
# the layouts of the tests), or of 16 bits (2^-9 of each).
TOLERANCE, TOLERANCE_OF_16_BITS = 1e-5, 1e-2
# A model without dropout gives the same logits twice: exactly on one device, and nearly where a kernel adds in any order.
REPEATED_LOGITS = 1e-3

CURE = (
    "return scale_for_schedule(output.loss, ...) from loss_func: it undoes the 1/(dp x cp x micro-batches) of DDP and the schedule "
    "(docs/own_loop.md)"
)

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
    Warns: on rank 0, where a mistake would pass: the samples weigh the same under another aggregation, every ratio is 1, or another
        clip or parameter of the loss gives the same gradient.
    Communication: two steps of the schedule, the probe's, and gathers of the step's log-probabilities and of the loss's inputs over
        all ranks. A third step where the gradient is wrong.
    Raises: ConfigError, on every rank: for a wrong gradient or reported loss, with the mistake or the factor by its name; where
        places_of misses an unmasked token or names one twice; for a model with dropout, and where nothing reduces gradients.
    """
    models: list[Any] = list(model) if isinstance(model, Sequence) else [model]
    _refuse_unwrapped(models)
    model_config = model_config_of(models[0])
    _check_settings(model_config, config, samples)
    groups = resolve_groups(models[0])
    probe_schedule(calculate_per_token_loss=model_config.calculate_per_token_loss, ddp_config=models[0].ddp_config)
    run = partial(_run, models, batches, seq_length, micro_batch_size)
    own = _Recorder(forward_step, reported_loss)
    reports = run(own)
    on_all_ranks(own.refuse_what_it_returned)
    gradients = _gradients(models)
    microbatches: list[Microbatch] = []

    def read() -> None:
        for logits, batch in zip(own.logits, own.batches, strict=True):
            places = places_of(batch)
            microbatches.append(Microbatch.of(logits, places, samples, config.policy_temperature, groups, vocab_size))

    on_all_ranks(read)
    known = gather_tokens(microbatches, samples, groups)
    given = gather_given(own.given, microbatches, groups)
    step = dense_step(samples, known, config)
    totals = _counted(samples)[0]
    scale = partial(
        scale_for_schedule,
        num_microbatches=len(batches),
        totals=totals,
        config=model_config,
        groups=groups,
        gradient_divisor=config.gradient_divisor,
        router_aux_loss=config.router_aux_loss,
    )
    exact = _Exact(forward_step, own.logits, [of_microbatch.target(step, samples) for of_microbatch in microbatches], scale)
    run(exact)
    expected = {name: shard.gradient for stage in _gradients(models) for name, shard in stage.items()}
    for chunk in models:
        chunk.zero_grad_buffer()
    if not all(on_all_ranks(lambda: exact.repeats_logits)):  # after the schedule, in which other ranks wait for one that raises
        raise ConfigError(
            "check_step: the model gives other logits for the same batch in a second run: turn dropout off "
            "(hidden_dropout=0.0, attention_dropout=0.0), and let forward_step be the same in both runs"
        )
    has_experts = any(on_all_ranks(lambda: any(is_of_expert(name) for name in expected)))
    found = compare_shards(gradients, expected, groups, has_experts=has_experts)
    if reported_loss is not None:
        found = _with_loss(found, reports, reported_loss, step, groups)
    is_16_bit = any(on_all_ranks(lambda: any(logits.dtype != torch.float32 for logits in own.logits)))
    tolerance = TOLERANCE_OF_16_BITS if is_16_bit else TOLERANCE
    if torch.distributed.get_rank() == 0:
        hidden = [*what_the_step_hides(samples, known, config)]
        if found.is_within(tolerance) and (other := settings_problem(given, config)):
            hidden.append(f"this step has the right gradient, but {other}")
        for words in hidden:
            warnings.warn(f"check_step: {words}", stacklevel=2)
    if not found.is_within(tolerance):
        mistake = ""
        if not found.gradient_error < tolerance and found.is_no_multiple and not found.ranks_differ:
            reader = _GradientReader(forward_step)
            run(reader)
            for chunk in models:
                chunk.zero_grad_buffer()
            precision = OF_16_BITS if is_16_bit else OF_FLOAT32
            gradients_of_rows = [reader.by_logits.get(number, torch.zeros_like(logits)) for number, logits in enumerate(own.logits)]
            rows = rows_of(gradients_of_rows, microbatches, samples, config, vocab_size, groups, precision)
            delivered = delivered_factor(
                len(batches), totals=totals, config=model_config, groups=groups, gradient_divisor=config.gradient_divisor
            )
            mistake = gathered_problem(gradients_of_rows, vocab_size, groups, precision.fit)
            mistake = mistake or mistake_of(Step(rows, samples, known, config, step, float(delivered or 1.0), precision, given))
        if not mistake:
            cause = _cause(found, tolerance, groups, len(batches), samples, own.rows)
            mistake = f"{cause}; {_of_given(cause, found, given, samples, known, config)}".removesuffix("; ")
        raise ConfigError(f"check_step of {config.policy_loss} with {config.loss_aggregation}:{in_lines(mistake)}")
    return found


def _cause(
    found: Comparison, tolerance: float, groups: ParallelGroups, num_microbatches: int, samples: Sequence[StepSample], rows: int
) -> str:
    """What the numbers of the whole gradient say, such as a factor with a name, and what to do where it is the schedule's."""
    layout = Layout(
        tensor=groups.tp.size(),
        context=groups.cp.size(),
        pipeline=groups.pp.size(),
        data=groups.dp.size(),
        expert=resolve_group(None, "ep").size(),
        num_microbatches=num_microbatches,
    )
    cause = found.cause(tolerance, named_sizes(layout, samples, rows=rows))
    is_unscaled = abs(found.ratio * groups.dp_cp.size() * num_microbatches - 1) < MULTIPLE_TOLERANCE
    is_of_schedule = any(f"{name}{end}" in cause for name in ("micro-batches", "dp", "cp") for end in (":", ")", " x"))
    return f"{cause}; {CURE}" if is_unscaled or is_of_schedule else cause


def _of_given(
    cause: str, found: Comparison, given: Given | None, samples: Sequence[StepSample], known: KnownTokens, config: PolicyLossConfig
) -> str:
    """What the loop's loss was given, where a factor or a reported loss is all that is wrong."""
    if other := given_problem(given, samples, known, config):
        return other
    factor = weights_factor(compared_tokens(given, samples, known), samples, config)
    if factor is not None and abs(factor - found.ratio) < REPEATED_LOGITS * abs(factor) and abs(factor - 1) > REPEATED_LOGITS:
        return f"token_weights are {factor:.6g} of those of {config.loss_aggregation}: pass what sample_token_weights returned"
    if cause.split("; ")[0] == f"gradient is {found.ratio:.6g} of expected":
        return "it is no count of the step: compare advantages and token weights with those of `samples`"
    if cause.startswith("the reported loss"):
        return (
            "the gradient is right: compare the report, and clip and loss_parameters, which move the loss of clipped tokens alone"
        )
    return ""


def in_lines(sentence: str) -> str:
    """Each part of it on a line of its own: it stands below a traceback, where it must be read whole."""
    return "".join(f"\n    {part}" for part in sentence.split("; "))


def what_the_step_hides(samples: Sequence[StepSample], known: KnownTokens, config: PolicyLossConfig) -> Iterator[str]:
    """The mistakes that these samples cannot show, with the data that would."""
    if alike := aggregations_alike(samples, config):
        yield (
            f"every sample of this step weighs the same under {', '.join(alike)}: the check cannot tell these apart. Give it "
            "responses of different lengths, and prompts with different numbers of tokens"
        )
    if get_policy_loss(config.policy_loss).clip_ratios is not None and all(sample.old_log_probs is None for sample in samples):
        yield (
            "every ratio of this step is 1: the check cannot tell losses and clips apart. Give it, and the loss, old "
            "log-probabilities on both sides of the clip"
        )
    elif names := settings_without_effect(samples, known, config):
        yield (
            f"half and twice {', '.join(names)} give the gradient of this step too: the check cannot tell other values from those "
            "of config. Give it, and the loss, old log-probabilities whose ratios lie on both sides of each bound, and near it"
        )


def settings_without_effect(samples: Sequence[StepSample], known: KnownTokens, config: PolicyLossConfig) -> list[str]:
    """The clip ratios and parameters of the loss whose half and double do not change the step's gradient."""
    loss, right = get_policy_loss(config.policy_loss), dense_step(samples, known, config)
    bounds = loss.clip_bounds(config.clip_ratio_low, config.clip_ratio_high)
    clips = {} if bounds is None else dict(zip(("clip_ratio_low", "clip_ratio_high"), bounds, strict=True))
    parameters = loss.resolve_parameters(config.loss_parameters)
    names = []
    for name, value in {**clips, **parameters}.items():
        is_same: list[bool] = []
        for other in (value * 2, value / 2):
            settings: dict[str, Any] = {name: other} if name in clips else {"loss_parameters": {**parameters, name: other}}
            try:
                changed = dense_step(samples, known, replace(config, **settings))
            except (ConfigError, DataError):  # out of its range
                continue
            is_same.append(changed.is_near(right, TOLERANCE))
            if not is_same[-1]:
                break
        if value not in (0.0, math.inf) and is_same and all(is_same):
            names.append(name)
    return names


def _counted(samples: Sequence[StepSample]) -> tuple[StepTotals, Tensor, Tensor, RolloutCounts]:
    """Of the whole step, which every rank knows."""
    masks, ids = [torch.tensor(sample.loss_mask) for sample in samples], rollout_ids_of(samples)
    rollout_ids = range(len(samples)) if ids is None else ids
    totals, counts, of_prompts, rollouts = count_step(masks, [one.prompt_id for one in samples], SINGLE, rollout_ids=rollout_ids)
    assert of_prompts is not None
    return totals, counts, of_prompts, rollouts


def aggregations_alike(samples: Sequence[StepSample], config: PolicyLossConfig) -> list[str]:
    """The built-in aggregations, with the configured one, whose weights on these samples are the same; empty where it is alone."""
    records = [get_loss_aggregation(name) for name in loss_aggregation_names() if "." not in name]
    # A divisor is a number of the user's. row_mean is sample_mean where each sample is a rollout.
    has_rollouts = rollout_ids_of(samples) is not None
    names = [
        record.name
        for record in records
        if AGGREGATIONS.is_built_in(record.name) and not record.takes_divisor and (has_rollouts or not record.needs_rows)
    ]
    if config.loss_aggregation not in names:
        return []
    totals, counts, of_prompts, (tokens, rows) = _counted(samples)
    weights = {
        name: sample_token_weights(
            *(name, counts, totals), prompt_token_counts=of_prompts, rollout_token_counts=tokens, rows_of_rollout=rows
        )
        for name in names
    }
    own = weights[config.loss_aggregation]
    # 1e-5 of each: TOLERANCE, below which the gradients cannot differ either.
    alike = [name for name, found in weights.items() if torch.allclose(found, own, rtol=TOLERANCE, atol=0.0)]
    return alike if len(alike) > 1 else []


def _refuse_unwrapped(models: Sequence[Any]) -> None:
    if unwrapped := [type(model).__name__ for model in models if not hasattr(model, "ddp_config")]:
        raise ConfigError(
            f"check_step: the model is a {unwrapped[0]}: pass one wrapped by Megatron's DistributedDataParallel. Of a "
            "plain PyTorch loss assert_layout_invariant tests the layout (docs/testing.md), and docs/step_by_hand.md the value"
        )


def _check_settings(model_config: Any, config: PolicyLossConfig, samples: Sequence[StepSample]) -> None:
    problems = []
    if model_config.finalize_model_grads_func is None:
        problems.append(
            "finalize_model_grads_func is None in the model's config, so the schedule never reduces gradients over ranks: set it "
            "to megatron.core.distributed.finalize_model_grads"
        )
    if needs := [need for need in get_policy_loss(config.policy_loss).needs if need in PASSED_INPUTS]:
        problems.append(f"policy_loss={config.policy_loss!r} reads {', '.join(needs)}, which check_step cannot give by hand")
    if config.kl_coefficient and any(sample.ref_log_probs is None for sample in samples):
        problems.append("kl_coefficient is not 0, and a sample has no ref_log_probs: give each sample some")
    if get_token_selection(config.token_selection).taken == Taken.RANDOM:
        problems.append(
            f"token_selection={config.token_selection!r} draws tokens by a seed that check_step does not know: check the loop with "
            "token_selection='kl_cov', whose tokens are those of a sort"
        )
    if problems:
        raise ConfigError([f"check_step: {problem}" for problem in problems])


class _Watched:
    """An iterator that remembers its last item."""

    def __init__(self, items: Sequence[Any]):
        self._items, self.last = iter(items), None

    def __iter__(self) -> _Watched:
        return self

    def __next__(self) -> Any:
        self.last = next(self._items)
        return self.last


def _problem_of(returned: Any, reported_loss: str | None) -> str | None:
    """What Megatron, or the comparison of the reported loss, would find by its first len or index, in words."""
    if not isinstance(returned, tuple | list) or len(returned) not in (2, 3):
        what = f"{len(returned)} values" if isinstance(returned, tuple | list) else f"a {type(returned).__name__}"
        return f"loss_func returned {what}: return (loss, num_tokens, report), as scale_for_schedule does"
    pair = returned[-1].get(reported_loss) if isinstance(returned[-1], Mapping) else None
    if not isinstance(pair, Tensor) or pair.shape == (2,):
        return None
    return (
        f"report[{reported_loss!r}] of loss_func has shape {list(pair.shape)}: it must be a [sum, count] pair, as "
        "scale_for_schedule makes it"
    )


class _Recorder:
    """The loop's forward_step; keeps the logits and the batch of each micro-batch of the last pipeline stage."""

    def __init__(self, forward_step: ForwardStep, reported_loss: str | None):
        self.forward_step, self.reported_loss = forward_step, reported_loss
        self.logits: list[Tensor] = []
        self.batches: list[Any] = []
        self.given: list[LossWatch] = []
        self.problem: str | None = None

    def __call__(self, iterator: _Watched, model: Any) -> tuple[Tensor, Callable[..., Any]]:
        output, loss_func = self.forward_step(iterator, model)
        batch = iterator.last

        def recorded(logits: Tensor, *others: Any) -> Any:
            self.logits.append(logits.detach().flatten(0, -2).clone())  # the loop's loss may overwrite the logits
            self.batches.append(batch)
            self.given.append(LossWatch())
            with watching_losses(self.given[-1]):
                returned = loss_func(logits, *others)
            self.problem = self.problem or _problem_of(returned, self.reported_loss)
            if self.problem is None:
                return returned
            # Other stages wait for this one: the schedule ends first.
            return logits.float().sum() * 0.0, torch.ones((), dtype=torch.int32, device=logits.device), {}

        return output, recorded

    @property
    def rows(self) -> int:
        """Of the logits of each micro-batch; 1 where they have unlike numbers."""
        numbers = {len(logits) for logits in self.logits}
        return numbers.pop() if len(numbers) == 1 else 1

    def refuse_what_it_returned(self) -> None:
        if self.problem is not None:
            raise ConfigError(f"check_step: {self.problem}")


class _Exact:
    """The loop's forward_step with another loss: linear in the logits, with the right gradient."""

    def __init__(self, forward_step: ForwardStep, logits: list[Tensor], targets: list[Target], scale: Callable[..., ScheduledLoss]):
        self.forward_step, self.scale = forward_step, scale
        self.expected = iter(zip(logits, targets, strict=True))
        self.repeats_logits = True

    def __call__(self, iterator: _Watched, model: Any) -> tuple[Tensor, Callable[..., ScheduledLoss]]:
        output, _ = self.forward_step(iterator, model)
        return output, self.loss_func

    def loss_func(self, logits: Tensor) -> ScheduledLoss:
        before, target = next(self.expected)
        rows = logits.flatten(0, -2)
        self.repeats_logits &= torch.allclose(rows.detach(), before, rtol=REPEATED_LOGITS, atol=REPEATED_LOGITS)
        return self.scale((rows.float() * target.gradient).sum(), num_local_tokens=target.num_tokens)


class _GradientReader:
    """The loop's forward_step; keeps the gradient by the logits of each micro-batch of the last pipeline stage."""

    def __init__(self, forward_step: ForwardStep):
        self.forward_step, self.by_logits, self.seen = forward_step, dict[int, Tensor](), 0

    def __call__(self, iterator: _Watched, model: Any) -> tuple[Tensor, Callable[..., Any]]:
        output, loss_func = self.forward_step(iterator, model)

        def watched(logits: Tensor, *others: Any) -> Any:
            number, self.seen = self.seen, self.seen + 1
            logits.register_hook(partial(self._keep, number))
            return loss_func(logits, *others)

        return output, watched

    def _keep(self, number: int, gradient: Tensor) -> None:
        self.by_logits[number] = gradient.detach().flatten(0, -2).clone()


def _run(models: Sequence[Any], batches: Sequence[Any], seq_length: int, micro_batch_size: int, forward_step: Any) -> Any:
    """The schedule's reports. Parameters' .grad is dropped too: an optimiser may have left its buffer there."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    for model in models:
        model.zero_grad_buffer()
        for parameter in model.parameters():
            parameter.grad = None
    is_chunked = len(models) > 1
    iterators = [_Watched(batches) for _ in models]
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if is_chunked else iterators[0],
        model=list(models) if is_chunked else models[0],
        num_microbatches=len(batches),
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        forward_only=False,
    )


def _gradients(models: Sequence[Any]) -> list[Shards]:
    gather_distributed_gradients(models)
    return [named_shards(model) for model in models]


def _with_loss(
    found: Comparison, reports: Sequence[dict[str, Tensor]], key: str, step: DenseStep, groups: ParallelGroups
) -> Comparison:
    known = [*on_all_ranks(lambda: sorted(reports[0]) if reports else [])][-1]
    if key not in known:
        raise ConfigError(
            f"check_step: reported_loss={key!r} is not in loss_func's report, which has {', '.join(known) or 'nothing'}"
        )
    logged = as_train_step_logs([{key: report[key]} for report in reports if key in report], groups)
    loss = torch.tensor(logged.get(key, 0.0), dtype=torch.float64, device=torch.cuda.current_device())
    value = float(broadcast_from_last(loss, groups.pp))
    return replace(
        found,
        loss_error=abs(value - step.loss) / step.loss_scale,
        loss_ratio=value / step.loss if step.loss else math.nan,
    )
