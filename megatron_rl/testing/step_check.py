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
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_rl.config import NO_CORRECTION, PolicyLossConfig
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.layout.agreement import on_all_ranks
from megatron_rl.layout.groups import ParallelGroups, broadcast_from_last, resolve_group, resolve_groups
from megatron_rl.loss_hub import PASSED_INPUTS, get_loss_aggregation, get_policy_loss, is_built_in
from megatron_rl.megatron.model import is_of_expert, model_config_of
from megatron_rl.megatron.probe import probe_schedule
from megatron_rl.megatron.samples import rollout_ids_of
from megatron_rl.megatron.schedule import ScheduledLoss, scale_for_schedule
from megatron_rl.step_counts import StepTotals
from megatron_rl.testing import oracle
from megatron_rl.testing.comparison import MULTIPLE_TOLERANCE, Comparison, compare_shards, named_sizes
from megatron_rl.testing.layout_step import (
    Layout,
    Shards,
    StepSample,
    as_train_step_logs,
    gather_distributed_gradients,
    named_shards,
)
from megatron_rl.testing.reference import CLIPS, DIVISOR, loss_by_hand, rollout_key, scale_of_terms, weights_by_hand
from megatron_rl.testing.step_rows import Derivatives, KnownTokens, Microbatch, Row, gather_tokens, row_problem, rows_of

# Both gradients run through the same layers, so they differ by the rounding of the gradient of a logit alone: of float32 (4e-7 on
# the layouts of the tests), or of 16 bits (2^-9 of each).
TOLERANCE, TOLERANCE_OF_16_BITS = 1e-5, 1e-2
# How well a row's gradient must fit, relative to it, and a mistake's gradient, relative to all rows; then in 16 bits. A wrong token
# or temperature changes a row by more than 0.1.
FIT, MATCH, FIT_OF_16_BITS, MATCH_OF_16_BITS = 1e-3, 1e-4, 5e-2, 2e-2
# A model without dropout gives the same logits twice: exactly on one device, and nearly where a kernel adds in any order.
REPEATED_LOGITS = 1e-3

CURE = (
    "return scale_for_schedule(output.loss, ...) from loss_func: it undoes the 1/(dp x cp x micro-batches) of DDP and the schedule "
    "(docs/own_loop.md)"
)
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
    Warns: on rank 0, where a mistake would pass: the samples weigh the same under another aggregation, every ratio is 1, or another
        clip or parameter of the loss gives the same gradient.
    Communication: two steps of the schedule, the probe's, and a gather of the step's log-probabilities over all ranks. Where the
        gradient is wrong, one of its rows.
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
            microbatches.append(Microbatch.of(logits, places_of(batch), samples, config, groups, vocab_size))

    on_all_ranks(read)
    known = gather_tokens(microbatches, samples, groups)
    step = dense_step(samples, known, config)
    prompts, num_tokens = {sample.prompt_id for sample in samples}, sum(sum(sample.loss_mask) for sample in samples)
    rollouts = {rollout_key(sample, place) for place, sample in enumerate(samples)}
    scale = partial(
        scale_for_schedule,
        num_microbatches=len(batches),
        totals=StepTotals(len(samples), len(prompts), num_tokens, len(rollouts)),
        config=model_config,
        groups=groups,
        gradient_divisor=config.gradient_divisor,
        router_aux_loss=config.router_aux_loss,
    )
    exact = _Exact(forward_step, microbatches, step, scale)
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
        for words in what_the_step_hides(samples, known, config):
            warnings.warn(f"check_step: {words}", stacklevel=2)
    if found.is_within(tolerance):
        return found
    mistake = ""
    if not found.gradient_error < tolerance and found.is_no_multiple and not found.ranks_differ:
        fit, match = (FIT_OF_16_BITS, MATCH_OF_16_BITS) if is_16_bit else (FIT, MATCH)
        of_loop = [own.by_logits.get(number, torch.zeros_like(logits)) for number, logits in enumerate(own.logits)]
        mistake = _Mistakes(of_loop, microbatches, samples, known, config, step, match).name(vocab_size, groups, fit)
    mistake = mistake or _cause(found, tolerance, groups, len(batches), samples, own.rows)
    raise ConfigError(f"check_step of {config.policy_loss} with {config.loss_aggregation}:{in_lines(mistake)}")


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
    return f"{cause}; {CURE}" if is_unscaled else cause


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

    def is_same(name: str, other: float) -> bool | None:
        settings: dict[str, Any] = {name: other} if name in clips else {"loss_parameters": {**parameters, name: other}}
        try:
            return dense_step(samples, known, replace(config, **settings)).is_near(right)
        except (ConfigError, DataError):  # out of its range
            return None

    values = {name: value for name, value in {**clips, **parameters}.items() if value not in (0.0, math.inf)}
    found = {name: {is_same(name, value * 2), is_same(name, value / 2)} for name, value in values.items()}
    return [name for name, answers in found.items() if True in answers and False not in answers]


def aggregations_alike(samples: Sequence[StepSample], config: PolicyLossConfig) -> list[str]:
    """The built-in aggregations, with the configured one, whose weights on these samples are the same; empty where it is alone."""
    names = [name for name in _aggregations(samples) if not get_loss_aggregation(name).takes_divisor]
    if config.loss_aggregation not in names:
        return []
    own = torch.tensor(weights_by_hand(samples, config.loss_aggregation))
    # 1e-5 of each: TOLERANCE, below which the gradients cannot differ either.
    alike = [name for name in names if torch.allclose(torch.tensor(weights_by_hand(samples, name)), own, rtol=TOLERANCE, atol=0.0)]
    return alike if len(alike) > 1 else []


def _aggregations(samples: Sequence[StepSample]) -> list[str]:
    """row_mean is sample_mean where each sample is a rollout."""
    has_rollouts = rollout_ids_of(samples) is not None
    return [name for name in oracle.AGGREGATIONS if has_rollouts or not get_loss_aggregation(name).needs_rows]


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
    if problems:
        raise ConfigError([f"check_step: {problem}" for problem in problems])


class _Recorder:
    """The loop's forward_step; keeps logits, batch and gradient by the logits of each micro-batch of the last pipeline stage."""

    def __init__(self, forward_step: ForwardStep, reported_loss: str | None):
        self.forward_step, self.reported_loss = forward_step, reported_loss
        self.logits: list[Tensor] = []
        self.batches: list[Any] = []
        self.by_logits: dict[int, Tensor] = {}
        self.problem: str | None = None

    def __call__(self, iterator: Iterator[Any], model: Any) -> tuple[Tensor, Callable[..., Any]]:
        batch = next(iterator)
        output, loss_func = self.forward_step(iter([batch]), model)

        def recorded(logits: Tensor, *others: Any) -> Any:
            logits.register_hook(partial(self._keep, len(self.logits)))
            self.logits.append(logits.detach().flatten(0, -2).clone())  # the loop's loss may overwrite the logits
            self.batches.append(batch)
            returned = loss_func(logits, *others)
            self.problem = self.problem or self._problem_of(returned)
            if self.problem is None:
                return returned
            # Other stages wait for this one: the schedule ends first.
            return logits.float().sum() * 0.0, torch.ones((), dtype=torch.int32, device=logits.device), {}

        return output, recorded

    def _keep(self, number: int, gradient: Tensor) -> None:
        self.by_logits[number] = gradient.detach().flatten(0, -2).clone()

    def _problem_of(self, returned: Any) -> str | None:
        """What Megatron, or the comparison of the reported loss, would find by its first len or index, in words."""
        if not isinstance(returned, tuple | list) or len(returned) not in (2, 3):
            return f"loss_func returned a {type(returned).__name__}: return (loss, num_tokens, report), as scale_for_schedule does"
        pair = returned[-1].get(self.reported_loss) if isinstance(returned[-1], Mapping) else None
        if not isinstance(pair, Tensor) or pair.shape == (2,):
            return None
        return (
            f"report[{self.reported_loss!r}] of loss_func has shape {list(pair.shape)}: it must be a [sum, count] pair, as "
            "scale_for_schedule makes it"
        )

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


def _run(models: Sequence[Any], batches: Sequence[Any], seq_length: int, micro_batch_size: int, forward_step: Any) -> Any:
    """The schedule's reports. Parameters' .grad is dropped too: an optimiser may have left its buffer there."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    for model in models:
        model.zero_grad_buffer()
        for parameter in model.parameters():
            parameter.grad = None
    is_chunked = len(models) > 1
    iterators = [iter(batches) for _ in models]
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


@dataclass(frozen=True, slots=True)
class DenseStep:
    """The loss of the whole step."""

    loss: float
    loss_scale: float
    derivatives: Derivatives

    def is_near(self, other: DenseStep) -> bool:
        one, two = (torch.tensor([*chain(*chain(*step.derivatives))]) for step in (self, other))
        return bool((one - two).norm() <= TOLERANCE * two.norm())


def dense_step(samples: Sequence[StepSample], known: KnownTokens, config: PolicyLossConfig) -> DenseStep:
    """Communication: none."""
    leaves = [[_leaf(sample, tokens, column) for column in (0, 1)] for sample, tokens in zip(samples, known, strict=True)]
    loss = loss_by_hand(samples, [oracle.Scores(log_probs, entropy, log_probs) for log_probs, entropy in leaves], config)
    gradients = torch.autograd.grad(loss, [leaf for pair in leaves for leaf in pair], materialize_grads=True)
    by_token = [gradient.tolist() for gradient in gradients]
    for sample, derivatives in zip(samples, by_token[::2], strict=True):
        for place, old in enumerate(sample.old_log_probs or ()):
            derivatives[place] += 0.0 * old  # NaN: not known
    scale = scale_of_terms(samples, config.loss_aggregation, config.loss_aggregation_divisor or DIVISOR)
    return DenseStep(float(loss.detach()), scale, (by_token[::2], by_token[1::2]))


def _leaf(sample: StepSample, tokens: dict[int, tuple[float, float]], column: int) -> Tensor:  # [response_length] float64
    """A masked token that no row predicts has the value 0, which nothing reads."""
    values = [tokens.get(place, (0.0, 0.0))[column] for place in range(len(sample.loss_mask))]
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


class _Alternative(NamedTuple):
    """The step with other settings or samples. parts: (sample, place) of the tokens that are a step by themselves."""

    words: str
    cure: str
    settings: Mapping[str, Any] = MappingProxyType({})
    samples: Sequence[StepSample] | None = None
    parts: Sequence[set[tuple[int, int]]] = ()


@dataclass(frozen=True, slots=True)
class _Mistakes:
    """What is wrong in a step, by the gradient of each row of its logits. Each rank calls each method, and gets the same."""

    gradients: Sequence[Tensor]  # of the loop's loss by the logits of each micro-batch, as Microbatch.target
    microbatches: Sequence[Microbatch]
    samples: Sequence[StepSample]
    known: KnownTokens
    config: PolicyLossConfig
    right: DenseStep
    match: float

    def name(self, vocab_size: int, groups: ParallelGroups, fit: float) -> str:
        """What is wrong and what to do, in words; empty where the rows do not show it."""
        rights = [one.target(self.right.derivatives) for one in self.microbatches]
        rows = rows_of(self.microbatches, self.gradients, rights, self.samples, self.config, vocab_size, groups, fit)
        tokens = [row for row in rows if row.place >= 0 and self.samples[row.sample].loss_mask[row.place]]
        if not any(row.size for row in rows):
            return (
                "no gradient reaches the logits that forward_step returned: compute the loss from what loss_func is given; or "
                "every token is clipped or saturated: compare old_log_probs with those of `samples`"
            )
        if mistake := self.wrong_mask(rows, tokens):
            return mistake
        if mistake := row_problem(tokens, self.samples, self.config, fit):
            is_whole = any(on_all_ranks(lambda: any(one.shape[1] >= vocab_size for one in self.gradients)))
            of_rank = (
                "or each tensor-parallel rank has the logits of the whole vocabulary, and the loss takes them for its part of it"
            )
            return (
                f"{mistake}; {of_rank}: build the model with parallel_output=True" if is_whole and groups.tp.size() > 1 else mistake
            )
        if self.has_one_factor(tokens):
            return (
                "the gradient by the logits is right, and that of the parameters is not: look at what the loop does between the "
                "model's forward and the optimiser"
            )
        return self.usual_mistake(tokens) or self.other_mistake(tokens)

    def wrong_mask(self, rows: Sequence[Row], tokens: Sequence[Row]) -> str:
        trained, unmasked = {row.token for row in rows if row.size and row.place >= 0}, {row.token for row in tokens}
        extras = sum(bool(row.size) for row in rows if row.place < 0) + len(trained - unmasked)
        # A sample that is clipped whole has no gradient, and says nothing of its mask.
        shown = {number for number, _ in trained}
        expected = {row.token for row in tokens if row.right_size and row.sample in shown}
        missing = expected - trained
        places = [[place for place, bit in enumerate(sample.loss_mask) if bit] for sample in self.samples]
        for name, where, end in (("first", "late", 0), ("last", "early", -1)):
            ends = {(number, of_sample[end]) for number, of_sample in enumerate(places) if of_sample} & expected
            if missing and missing == ends and missing != expected:
                also = f", and {extras} rows that predict none have one" if extras else ""
                what = f"the mask is one row {where}" if extras else "the mask is one token short"
                return (
                    f"{what}: the {name} token of each response has no gradient{also}. A token is predicted by the row before it: "
                    "set the mask there"
                )
        if extras:
            return (
                f"the mask has {extras} rows too many, of prompts, padding or masked tokens: they have a gradient, and predict no "
                "unmasked token of `samples`. Set it where places_of names an unmasked token alone"
            )
        return ""

    def usual_mistake(self, tokens: Sequence[Row]) -> str:
        found = [*islice((one for one in self.alternatives(tokens) if self.is_explained(one)), 2)]
        cures = "; ".join(dict.fromkeys(one.cure for one in found))
        return f"{', or '.join(one.words for one in found)}: {cures}" if found else ""

    def other_mistake(self, tokens: Sequence[Row]) -> str:
        both = [row for row in tokens if row.size and row.right_size]
        lost = sum(bool(row.right_size) and not row.size for row in tokens)
        free = sum(bool(row.size) and not row.right_size for row in tokens)
        if self.has_one_factor(both):
            return (
                f"a part of the step is lost, or the clip is another: {lost} tokens have no gradient that must have one, and "
                f"{free} have one that must have none. Give each sample of the step to one micro-batch, and the loss the clip and "
                "`loss_parameters` of config; a ratio within rounding of the clip may lie on either side"
            )
        if all(self.has_one_factor([row for row in both if row.sample == number]) for number in range(len(self.samples))):
            return (
                "each sample's tokens are off by a factor of their own: its advantage, its weight or its ratio is another. Compare "
                "advantages, token weights and old log-probabilities with those of `samples` and config"
            )
        row = max(tokens, key=lambda row: row.size**2 + row.right_size**2 - 2 * row.product)
        whose = "docs/losses.md" if is_built_in(self.config.policy_loss) else f"the function {self.config.policy_loss}"
        return (
            f"the loss has another derivative, as by the log-probability of token {row.place} of sample {row.sample}: compare "
            f"ratio, clip and loss with {whose}, and old log-probabilities with those of `samples`"
        )

    def has_one_factor(self, rows: Sequence[Row]) -> bool:
        sums = (sum(column) for column in zip(*((row.size**2, row.right_size**2, row.product) for row in rows), strict=True))
        return not rows or self.is_multiple(*sums)

    def is_multiple(self, found: float, right: float, product: float) -> bool:
        """found, right: squares of the norms of two gradients."""
        return right > 0 and found - product**2 / right <= self.match**2 * found

    def is_explained(self, one: _Alternative) -> bool:
        """Communication: an all-gather of objects over all ranks, unless the step cannot have the mistake."""
        try:
            config = replace(self.config, **one.settings)
            step = self.of_parts(one.parts, config) if one.parts else dense_step(one.samples or self.samples, self.known, config)
        except (ConfigError, DataError):  # as a loss that needs what the samples do not have
            return False

        def sums() -> list[float]:
            total = torch.zeros(3, dtype=torch.float64)
            for found, microbatch in zip(self.gradients, self.microbatches, strict=True):
                right = microbatch.target(step.derivatives)
                is_known = right.isfinite()
                pair = [torch.where(is_known, gradient, 0.0).double() for gradient in (found, right)]
                total += torch.stack([(pair[i] * pair[j]).sum() for i, j in ((0, 0), (1, 1), (0, 1))]).cpu()
            return total.tolist()

        return self.is_multiple(*(sum(column) for column in zip(*on_all_ranks(sums), strict=True)))

    def of_parts(self, parts: Sequence[set[tuple[int, int]]], config: PolicyLossConfig) -> DenseStep:
        """Each part of the tokens with the counts of its own samples and tokens."""
        zeros = [[0.0] * len(sample.loss_mask) for sample in self.samples]
        derivatives: Derivatives = ([*zeros], [*zeros])
        for part in parts:
            numbers = sorted({number for number, _ in part})
            masks = [[int((n, t) in part) for t in range(len(self.samples[n].loss_mask))] for n in numbers]
            own = [replace(self.samples[n], loss_mask=mask) for n, mask in zip(numbers, masks, strict=True)]
            dense = dense_step(own, [self.known[n] for n in numbers], config)
            for whole, of_part in zip(derivatives, dense.derivatives, strict=True):
                for n, values in zip(numbers, of_part, strict=True):
                    whole[n] = [before + value for before, value in zip(whole[n], values, strict=True)]
        return replace(self.right, derivatives=derivatives)

    def alternatives(self, tokens: Sequence[Row]) -> Iterator[_Alternative]:
        """The usual mistakes first."""
        config, samples = self.config, self.samples
        weigh = f"weigh with sample_token_weights({config.loss_aggregation!r}, ...)"
        others: dict[str, dict[str, Any]] = {
            name: {"loss_aggregation": name, "loss_aggregation_divisor": DIVISOR if name == "constant" else None}
            for name in _aggregations(samples)
            if name != config.loss_aggregation
        }
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
        free = {"clip_ratio_low": 1 - 1e-9, "clip_ratio_high": 1e9}
        yield _Alternative("the ratio has no clip", "pass the clip of config to the loss", free)
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
