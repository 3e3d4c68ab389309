"""What a trainer's settings choose: one of our losses with an aggregation, our settings beside it, and every problem of them.

An adapter reads its trainer's own config object with a `Reader`, hands what it found to `make_launch`, and gets a `Launch` or one
ConfigError with all problems. What is true of every trainer stands here once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from megatron_rl.arguments import read_number
from megatron_rl.config import PolicyLossConfig, PolicyMetrics, flag_fields
from megatron_rl.count import StepTotals
from megatron_rl.declare import POLICY_LOSSES, PolicyLoss, get_policy_loss, is_finite_number
from megatron_rl.errors import ConfigError
from megatron_rl.hosts.dense_rows import EACH_ROW, ONE_SAMPLE, Rollouts, is_proportional, step_line
from megatron_rl.hosts.run import Run
from megatron_rl.hosts.sampler_rule import Sampler, sampler_problems, typed_readers
from megatron_rl.losses.corrections import CorrectionSettings, counted_twice
from megatron_rl.losses.kl import KL_ESTIMATORS
from megatron_rl.validation import Settings
from megatron_rl.validation.own_functions import own_function_problems
from megatron_rl.weights import AGGREGATIONS, AggregationRecord, get_loss_aggregation

ABSENT = object()  # a name that is not set, where None is a value that somebody has set
# Our settings of the correction for the sampler, by the names of PolicyLossConfig.
CORRECTION_SETTINGS = (
    *("importance_correction", "importance_correction_level", "importance_correction_low", "importance_correction_high"),
    "off_policy_sequence_delta",
)
CLIPS, DIVISOR, PARTIAL_GROUPS = ("clip_ratio_low", "clip_ratio_high"), "loss_aggregation_divisor", "allow_partial_prompt_groups"
# Of ours that a trainer may set, those that are true or false, and those that are a word.
SWITCHES = (ONE_SAMPLE, PARTIAL_GROUPS, "fused_lm_head_loss")
WORDS = ("importance_correction", "importance_correction_level", "kl_estimator")
FIELDS = tuple(one.name for one in flag_fields())


class Given(NamedTuple):
    """A setting that our loss reads, by the name that its user types. None: the loss's own value."""

    name: str
    value: Any


def value_at(owner: Any, name: str) -> Any:
    """The value of a dotted name in nested mappings and objects; ABSENT: not there."""
    for part in name.split("."):
        get = getattr(owner, "get", None)
        owner = get(part, ABSENT) if callable(get) else getattr(owner, part, ABSENT)
        if owner is ABSENT:
            return ABSENT
    return owner


def read_word(text: str) -> Any:
    """The value of a word name=text of a launch line."""
    words = {"true": True, "false": False, "null": None, "none": None}
    return words[text.lower()] if text.lower() in words else read_number(text)


def typed_if(changed: Mapping[str, tuple[Any, ...]], read: Callable[[str], Any]) -> list[str]:
    """Settings as typed whose value is not one of those with which they do nothing. An absent one does nothing."""
    found = {name: read(name) for name in changed}
    return [f"{name}={value}" for name, value in found.items() if value is not None and value not in changed[name]]


class Reader:
    """A trainer's config by dotted names: a dataclass, Namespace, OmegaConf, pydantic model or mapping.

    prefix: of the names that its user types, where the object is a section. problems: of the types of what was asked."""

    def __init__(self, owner: Any, prefix: str = ""):
        self.owner, self.prefix = owner, prefix
        self.problems: list[str] = []

    def __call__(self, name: str, default: Any = None) -> Any:
        value = value_at(self.owner, name)
        return default if value is ABSENT else value

    def switch(self, name: str, default: bool = False) -> bool:
        value = self(name, default)
        if isinstance(value, str):
            self.problems.append(f"{self.prefix}{name}={value!r} is text, which a trainer may take for true: write true or false")
        return bool(value)

    def number(self, name: str, default: float | None = None) -> float | None:
        value = self(name, default)
        if value is None or isinstance(value, int | float) and not isinstance(value, bool):
            return value
        self.problems.append(f"{self.prefix}{name}={value!r} must be a number")
        return default

    def given(self, name: str, default: float | None = None) -> Given:
        """A number that our loss reads. A value that is the trainer's default is nobody's choice: the loss has its own."""
        value = self.number(name, default)
        return Given(self.prefix + name, None if value == default else value)


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """What of a launch decides the scale. title: as the start line begins. terms: who adds KL and entropy, and as what mean.
    rollouts: whether the rows of a rollout are counted. token_mean_host: the title of a trainer whose default is token_mean."""

    title: str
    config: PolicyLossConfig
    terms: str
    rollouts: Rollouts
    sampler: Sampler | None
    token_mean_host: str

    @property
    def record(self) -> AggregationRecord:
        return get_loss_aggregation(self.config.loss_aggregation)

    @property
    def counts_prompts(self) -> bool:
        return self.record.needs is None or self.record.needs_prompts

    def tell(self, run: Run, totals: StepTotals | None, *, num_data: int | None = None) -> None:
        """The line of the first step, once a run. totals, num_data: as step_line."""
        words = (self.title, self.config, totals, self.terms, self.rollouts, num_data, self.token_mean_host)
        run.tell(self.title, lambda: step_line(*words))

    def __str__(self) -> str:
        return f"{self.config.policy_loss}.{self.config.loss_aggregation}"


@dataclass(frozen=True, kw_only=True)
class Offer:
    """What can be chosen in a trainer. setting, prefix: how, <setting>=<prefix><loss>.<aggregation>. gives: whether it hands over
    what an aggregation needs. carried: aggregations whose weights travel in the advantages. has_logits: a loss that needs the
    entropy of a token can have it."""

    title: str
    setting: str
    prefix: str = ""
    gives: Callable[[AggregationRecord], bool]
    carried: Sequence[str] = ()
    has_logits: bool = False

    def refusal(self, loss: PolicyLoss, record: AggregationRecord) -> str | None:
        """Why the two cannot be trained there; None: they can."""
        missing = [*{*loss.inputs_needed} - {"rollout_log_probs"}]
        if missing:
            return f"{loss.name} needs {missing[0]}, which {self.title} hands to no loss"
        if loss.needs_entropy and not self.has_logits:
            return f"{loss.name} needs the entropy of each token, and {self.title} hands over log-probabilities without logits"
        if not self.gives(record):
            return f"{self.title} does not hand over what {record.name} needs"
        if record.name in self.carried and not is_proportional(loss):
            return f"the advantages carry {record.name}, so a loss must be proportional to the advantage, and {loss.name} is not"
        return None

    def pairs(self) -> list[tuple[str, str]]:
        """(loss, aggregation), all that can be trained there by name."""
        losses = [get_policy_loss(name) for name in POLICY_LOSSES.names() if "." not in name]
        records = [get_loss_aggregation(name) for name in AGGREGATIONS.names() if "." not in name]
        return [(loss.name, record.name) for record in records for loss in losses if self.refusal(loss, record) is None]

    def choose(self, typed: object) -> tuple[str, str]:
        """(loss, aggregation), by name or module.function, which is imported. Raises ConfigError, which lists what there is."""
        words = str(typed).removeprefix(self.prefix).split(".")
        losses, aggregations = POLICY_LOSSES.names(), AGGREGATIONS.names()
        halves = [(".".join(words[:cut]), ".".join(words[cut:])) for cut in range(1, len(words))]
        halves = [(loss, one) for loss, one in halves if (loss in losses or "." in loss) and (one in aggregations or "." in one)]
        halves.sort(key=lambda half: -((half[0] in losses) + (half[1] in aggregations)))
        refused: list[ConfigError] = []
        for loss, aggregation in halves:
            try:
                why = self.refusal(get_policy_loss(loss), get_loss_aggregation(aggregation))
            except ConfigError as error:
                refused.append(error)
                continue
            if why is not None:
                raise ConfigError(f"{self.setting}={typed}: {why}")
            return loss, aggregation
        if refused:
            raise refused[0]
        offered = [", ".join(dict.fromkeys(names)) for names in zip(*self.pairs(), strict=True)]
        raise ConfigError(
            f"{self.setting}={typed} does not name a loss and an aggregation, as {self.prefix}gspo.token_mean does. "
            f"Losses: {offered[0]}. Aggregations: {offered[1]}. Either may be module.function"
        )


def make_launch(
    title: str,
    loss_name: str,
    aggregation: str,
    *,
    readers: Sequence[Reader],
    theirs: Mapping[str, Given],  # our field -> the trainer's setting of it, or with None the name of ours that is the only one
    ours: Mapping[str, Given],  # what was found below our prefix, by our names
    offers: Sequence[str] = (),  # fields of ours that act there beside corrections, divisor and parameters: kl_estimator
    corrections: Sequence[str] = (),  # the trainer's own that multiply our loss, as typed
    compares: Sequence[str] = (),  # what else of the trainer compares with the sampler, as typed
    sampler: Sampler | None = None,
    terms: str = "",
    rollouts: Rollouts = EACH_ROW,
    token_mean_host: str = "",
    problems: Sequence[str] = (),
) -> Launch:
    """Raises one ConfigError with every problem: `problems`, those of the readers, and those that are true of every trainer."""
    loss, record = get_policy_loss(loss_name), get_loss_aggregation(aggregation)
    found = [problem for reader in readers for problem in reader.problems] + [*problems]
    found += _idle_or_mistyped(loss, record, theirs, ours, offers)
    if found:  # anything else would be about values that were not meant
        raise ConfigError(list(dict.fromkeys(found)))
    fields = {**theirs, **ours}
    values = {field: value for field, (_, value) in fields.items() if value is not None and _is_read(field, loss, record)}
    config = PolicyLossConfig(
        policy_loss=loss_name,
        loss_aggregation=aggregation,
        loss_parameters={field: value for field, value in values.items() if field not in FIELDS},
        policy_metrics=PolicyMetrics.BASIC,
        **{field: value for field, value in values.items() if field in FIELDS},
    )
    found += _wrong_values(config, loss, record, fields)
    found += _corrections(config, loss, fields, corrections)
    found += _rollouts(config, record, rollouts)
    if not found:
        found += own_function_problems(Settings(config=config))
    if sampler is not None and not found:
        found += sampler_problems(sampler, [*typed_readers(partial(getattr, config), "{}={}".format), *corrections, *compares])
    if found:
        raise ConfigError(list(dict.fromkeys(found)))
    return Launch(title=title, config=config, terms=terms, rollouts=rollouts, sampler=sampler, token_mean_host=token_mean_host)


def _is_read(field: str, loss: PolicyLoss, record: AggregationRecord) -> bool:
    """Whether the two read a setting; each of the others is read by what it is of."""
    if field == DIVISOR:
        return bool(record.takes_divisor)
    if field in CLIPS:
        return loss.clip_ratios is not None
    return field in FIELDS or field in (parameter.name for parameter in loss.parameters)


def _idle_or_mistyped(
    loss: PolicyLoss, record: AggregationRecord, theirs: Mapping[str, Given], ours: Mapping[str, Given], offers: Sequence[str]
) -> Iterator[str]:
    """A setting of ours that is not read, or has another type."""
    parameters = [parameter.name for parameter in loss.parameters]
    offered = (*parameters, *CORRECTION_SETTINGS, ONE_SAMPLE, *offers, DIVISOR)
    for field, (name, value) in ours.items():
        if field in theirs and theirs[field].name != name:
            yield f"{name}={value} has no effect: set {theirs[field].name}"
        elif field not in offered or not _is_read(field, loss, record):
            known = ", ".join(one for one in offered if _is_read(one, loss, record))
            yield f"{name}={value} has no effect: {loss.name}.{record.name} reads {known}"
        elif field in SWITCHES and not isinstance(value, bool):
            yield f"{name}={value!r} must be true or false"
        elif field not in (*SWITCHES, *WORDS) and not is_finite_number(value):
            yield f"{name}={value!r} must be a number"


def _wrong_values(
    config: PolicyLossConfig, loss: PolicyLoss, record: AggregationRecord, fields: Mapping[str, Given]
) -> Iterator[str]:
    """Of clip, parameters, divisor and the terms beside the loss."""
    divisor = fields.get(DIVISOR, Given(DIVISOR, None))
    if record.takes_divisor and not (is_finite_number(divisor.value) and divisor.value > 0):
        yield f"{divisor.name}={divisor.value}: {record.name} needs its L, a number above 0, as the longest response in tokens"
    for name in ("kl_coefficient", "entropy_coefficient"):
        if not getattr(config, name) >= 0:
            yield f"{fields[name].name}={fields[name].value} must be at or above 0"
    if "kl_estimator" in fields and not config.kl_coefficient:
        estimator, coefficient = fields["kl_estimator"], fields["kl_coefficient"]
        yield f"{estimator.name}={estimator.value} has no effect without a coefficient: set {coefficient.name}"
    try:
        loss.clip_bounds(config.clip_ratio_low, config.clip_ratio_high)
        loss.resolve_parameters(config.loss_parameters)
        KL_ESTIMATORS[str(config.kl_estimator)]
    except ConfigError as error:
        yield from error.problems


def _corrections(config: PolicyLossConfig, loss: PolicyLoss, fields: Mapping[str, Given], theirs: Sequence[str]) -> Iterator[str]:
    """One correction acts, and a loss whose ratio is to the sampler has none."""
    correction, read = CorrectionSettings.of(config) or CorrectionSettings(), " and ".join(theirs)
    yield from correction.problems()
    given = [f"{fields[name].name}={fields[name].value}" for name in CORRECTION_SETTINGS if name in fields]
    if theirs and correction.is_on:
        yield f"{', '.join(given)} beside {read}: two corrections in one launch; turn one of them off"
    if loss.anchor == "rollout" and (theirs or correction.has_factor):
        yield counted_twice(correction.kind, loss.name, read or given[0])


def _rollouts(config: PolicyLossConfig, record: AggregationRecord, rollouts: Rollouts) -> Iterator[str]:
    """An aggregation that counts rollouts, where one may come in several rows and nothing says which rows are of one."""
    if record.counts_rollouts and rollouts.several and not (rollouts.ids or config.one_sample_per_rollout):
        why = f"a rollout may have several rows ({rollouts.several}), and nothing says which"
        yield f"{record.name}: {why}; choose token_mean, or set {ONE_SAMPLE}=true if each rollout has one row"
