"""What a trainer's settings choose: one of our losses with an aggregation, our settings beside it, and every problem of them.

An adapter reads its trainer's own config object with a `Reader`, hands what it found to `make_launch`, and gets a `Launch` or one
ConfigError with all problems. What is true of every trainer stands here once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, NamedTuple

from megatron_rl.aggregation_record import AggregationRecord
from megatron_rl.arguments import read_number
from megatron_rl.config import PolicyLossConfig, PolicyMetrics, flag_fields
from megatron_rl.errors import ConfigError
from megatron_rl.hosts.dense_rows import EACH_ROW, ONE_SAMPLE, Rollouts, is_carried, is_proportional
from megatron_rl.hosts.sampler_rule import Sampler, readers_of, sampler_problems
from megatron_rl.loss_hub import (
    PolicyLoss,
    declared_parameters,
    get_loss_aggregation,
    get_policy_loss,
    is_finite_number,
    loss_aggregation_names,
    policy_loss_names,
)
from megatron_rl.registries.correction_settings import CorrectionSettings, counted_twice
from megatron_rl.registries.kl_estimators import get_kl_estimator
from megatron_rl.validation.own_functions import loss_problems

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


def typed_if(changed: Mapping[str, tuple[Any, ...]], read: Callable[[str], Any], prefix: str = "") -> list[str]:
    """Settings as typed whose value is not one of those with which they do nothing. An absent one does nothing."""
    found = {name: read(name) for name in changed}
    return [f"{prefix}{name}={value}" for name, value in found.items() if value is not None and value not in changed[name]]


class Reader:
    """A trainer's config by dotted names: a dataclass, Namespace, OmegaConf, pydantic model or mapping.

    prefix: of the names that its user types, where the object is a section. values: what was asked, by dotted name. problems: of
    the types of what was asked. A `Launch` keeps the values, and no object of the trainer.
    """

    def __init__(self, owner: Any, prefix: str = ""):
        self.owner, self.prefix = owner, prefix
        self.values: dict[str, Any] = {}
        self.problems: list[str] = []

    def __call__(self, name: str, default: Any = None) -> Any:
        value = self.values[name] = value_at(self.owner, name)
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
    rollouts: whether the rows of a rollout are counted. values: what was read of the trainer's config. in_advantages: the
    advantages carry the weights of prompts."""

    title: str
    config: PolicyLossConfig
    loss: PolicyLoss
    record: AggregationRecord
    terms: str
    rollouts: Rollouts = EACH_ROW
    values: Mapping[str, Any]
    in_advantages: bool = False
    sampler: Sampler | None = None

    @property
    def counts_prompts(self) -> bool:
        return self.record.needs is None or self.record.needs_prompts

    def is_of(self, owner: Any) -> bool:
        """Whether the config has the values that were read."""
        return all(value_at(owner, name) == value for name, value in self.values.items())

    def __str__(self) -> str:
        return f"{self.config.policy_loss}.{self.config.loss_aggregation}"


@dataclass(frozen=True, kw_only=True)
class Offer:
    """What can be chosen in a trainer. setting, prefix: how, <setting>=<prefix><loss>.<aggregation>. gives: whether it hands over
    what an aggregation needs. has_logits: a loss that needs the entropy of a token can have it. in_advantages: the weights of
    prompt_mean travel in the advantages, so the loss must be proportional to them. remedy: ends a refusal."""

    title: str
    setting: str
    prefix: str
    gives: Callable[[AggregationRecord], bool]
    has_logits: bool = False
    in_advantages: bool = False
    remedy: str = ""

    def losses(self) -> list[str]:
        """Those by name that the trainer gives what they need."""
        records = [get_policy_loss(name) for name in policy_loss_names() if "." not in name]
        return [loss.name for loss in records if not {*loss.inputs_needed} - {"rollout_log_probs"} and self._why_not(loss) is None]

    def aggregations(self) -> list[str]:
        records = [get_loss_aggregation(name) for name in loss_aggregation_names() if "." not in name]
        return [record.name for record in records if self.gives(record)]

    def modes(self) -> list[str]:
        """<prefix><loss>.<aggregation>, all that can be trained there by name."""
        pairs = [(loss, aggregation) for aggregation in self.aggregations() for loss in self.losses()]
        carried = [(loss, one) for loss, one in pairs if self.is_carried(one) and not is_proportional(get_policy_loss(loss))]
        return [f"{self.prefix}{loss}.{one}" for loss, one in pairs if (loss, one) not in carried]

    def is_carried(self, aggregation: str) -> bool:
        return self.in_advantages and is_carried(aggregation)

    def choose(self, typed: object) -> tuple[str, str]:
        """(loss, aggregation), by name or module.function, which is imported. Raises ConfigError, which lists what there is."""
        name = typed.removeprefix(self.prefix) if isinstance(typed, str) and typed.startswith(self.prefix) else ""
        words, losses, aggregations = name.split("."), self.losses(), self.aggregations()
        halves = [(".".join(words[:cut]), ".".join(words[cut:])) for cut in range(1, len(words))]
        halves.sort(key=lambda half: -((half[0] in losses) + (half[1] in aggregations)))
        refused: ConfigError | None = None
        for loss, aggregation in halves:
            if not ((loss in losses or "." in loss) and (aggregation in aggregations or "." in aggregation)):
                continue
            try:
                why = self._why_not(get_policy_loss(loss))
                record = get_loss_aggregation(aggregation)
            except ConfigError as error:
                refused = refused or error
                continue
            if why is None and not self.gives(record):
                why = f"{self.title} does not hand over what {aggregation} needs"
            if why is not None:
                raise ConfigError(f"{self.setting}={typed}: {why}. {self.remedy}".strip())
            return loss, aggregation
        if refused is not None:
            raise refused
        close = get_close_matches(name.replace("-", "_"), [mode.removeprefix(self.prefix) for mode in self.modes()], 1)
        meant = f"did you mean {self.prefix}{close[0]}? " if close else ""
        text = (
            f"{self.setting}={typed} does not name a loss and an aggregation, as {self.prefix}gspo.{aggregations[0]} does; {meant}"
            f"Losses: {', '.join(losses)}. Aggregations: {', '.join(aggregations)}. Either may be module.function. {self.remedy}"
        )
        raise ConfigError(text.strip())

    def _why_not(self, loss: PolicyLoss) -> str | None:
        if loss.needs_entropy and not self.has_logits:
            return f"{loss.name} needs the entropy of each token, and {self.title} hands over log-probabilities without logits"
        return None


def make_launch(
    title: str,
    loss_name: str,
    aggregation: str,
    *,
    readers: Sequence[Reader],  # the first is of the config that is handed over in each call
    theirs: Mapping[str, Given],  # our field -> the trainer's setting of it
    ours: Mapping[str, Given],  # what was found below our prefix, by our names
    offers: Sequence[str] = (),  # fields of ours that act there beside corrections, divisor and parameters: kl_estimator
    corrections: Sequence[str] = (),  # the trainer's own that multiply our loss, as typed
    compares: Sequence[str] = (),  # what else of the trainer compares with the sampler, as typed
    mixers: Sequence[str] = (),  # see sampler_rule
    sampler: Sampler | None = None,
    terms: str = "",
    rollouts: Rollouts = EACH_ROW,
    in_advantages: bool = False,
    problems: Sequence[str] = (),
) -> Launch:
    """Raises one ConfigError with every problem: `problems`, those of the readers, and those that are true of every trainer."""
    loss, record = get_policy_loss(loss_name), get_loss_aggregation(aggregation)
    found = [problem for reader in readers for problem in reader.problems] + [*problems]
    fields = {**theirs, **ours}
    found += _twice(theirs, ours)
    found += _idle(f"{loss_name}.{aggregation}", loss, record, theirs, ours, offers)
    found += _types(fields)
    if found:  # anything else would be about values that were not meant
        raise ConfigError(list(dict.fromkeys(found)))
    config, of_config = _config(loss, record, loss_name, aggregation, fields)
    found += of_config
    found += loss_problems(config)
    found += _corrections(config, loss, fields, corrections)
    found += _kl(config, fields)
    found += _rollouts(config, record, fields, rollouts)
    if in_advantages and not is_proportional(loss):
        found.append(
            f"{loss_name}.{aggregation}: the advantages carry {aggregation}, which is right for a loss that is proportional to the "
            f"advantage, as grpo and gspo are; {loss_name} is not: choose another one"
        )
    if sampler is not None and not found:
        found += sampler_problems(sampler, [*readers_of(config), *corrections, *compares], mixers)
    if found:
        raise ConfigError(list(dict.fromkeys(found)))
    values = readers[0].values
    return Launch(
        title=title,
        config=config,
        loss=loss,
        record=record,
        terms=terms,
        rollouts=rollouts,
        values=values,
        in_advantages=in_advantages,
        sampler=sampler,
    )


def _twice(theirs: Mapping[str, Given], ours: Mapping[str, Given]) -> Iterator[str]:
    """One setting by the trainer's name and by ours."""
    for name in theirs.keys() & ours.keys():
        host, own = theirs[name], ours[name]
        if None not in (host.value, own.value) and host.value != own.value:
            yield f"{own.name}={own.value} and {host.name}={host.value} are the same setting with two values: remove one of them"


def _types(fields: Mapping[str, Given]) -> Iterator[str]:
    known = {*FIELDS, *declared_parameters(), ONE_SAMPLE}
    for field, (name, value) in fields.items():
        if value is None or field in WORDS or field not in known:
            continue
        if field in SWITCHES and not isinstance(value, bool):
            yield f"{name}={value!r} must be true or false"
        elif field not in SWITCHES and (isinstance(value, bool) or not isinstance(value, int | float)):
            yield f"{name}={value!r} must be a number"


def _idle(
    chosen: str,
    loss: PolicyLoss,
    record: AggregationRecord,
    theirs: Mapping[str, Given],
    ours: Mapping[str, Given],
    offers: Sequence[str],
) -> Iterator[str]:
    """A setting of ours, or one of the trainer's that was chosen, and that this loss does not read."""
    parameters = {parameter.name for parameter in loss.parameters}
    clips = CLIPS if loss.clip_ratios is not None else ()
    divisor = (DIVISOR,) if record.takes_divisor else ()
    known = {*parameters, *clips, *divisor, *CORRECTION_SETTINGS, ONE_SAMPLE, *offers}
    for field, (name, value) in ours.items():
        if field not in known:
            close = get_close_matches(field, known, 1)
            meant = f"did you mean {name.removesuffix(field)}{close[0]}?" if close else f"{chosen} does not read it; remove it"
            yield f"{name}={value} has no effect: {meant}"
    for field, (name, value) in theirs.items():
        is_of_loss = field in (*CLIPS, DIVISOR) or field not in FIELDS
        if value is not None and is_of_loss and field not in known:
            yield f"{name}={value} has no effect: {chosen} does not read it; remove it"


def _config(
    loss: PolicyLoss, record: AggregationRecord, loss_name: str, aggregation: str, fields: Mapping[str, Given]
) -> tuple[PolicyLossConfig, list[str]]:
    """Our settings, and the problems of clip, parameters and divisor."""
    values = {field: value for field, (_, value) in fields.items() if value is not None}
    parameters = {parameter.name for parameter in loss.parameters}
    of_loss = {field: value for field, value in values.items() if field in parameters}
    low, high = (values.get(name) if loss.clip_ratios is not None else None for name in CLIPS)
    divisor, problems = fields.get(DIVISOR, Given(DIVISOR, None)), []
    if record.takes_divisor and divisor.value is None:
        problems.append(f"{loss_name}.{aggregation} needs its L: set {divisor.name}, for Dr. GRPO the longest response in tokens")
    elif record.takes_divisor and not (is_finite_number(divisor.value) and divisor.value > 0):
        problems.append(f"{divisor.name}={divisor.value!r} must be a number above 0: it is the L of {loss_name}.{aggregation}")
    for name in ("kl_coefficient", "entropy_coefficient"):
        one = fields.get(name)
        if one is not None and one.value is not None and not (is_finite_number(one.value) and one.value >= 0):
            problems.append(f"{one.name}={one.value!r} must be a finite number at or above 0")
    try:
        loss.clip_bounds(low, high)
        loss.resolve_parameters(of_loss)
    except ConfigError as error:
        problems += error.problems
    others = {field: value for field, value in values.items() if field in FIELDS and field not in (*CLIPS, DIVISOR)}
    config = PolicyLossConfig(
        policy_loss=loss_name,
        loss_aggregation=aggregation,
        loss_aggregation_divisor=divisor.value if record.takes_divisor else None,
        clip_ratio_low=low,
        clip_ratio_high=high,
        loss_parameters=of_loss,
        policy_metrics=PolicyMetrics.BASIC,
        **others,
    )
    return config, problems


def _corrections(config: PolicyLossConfig, loss: PolicyLoss, fields: Mapping[str, Given], theirs: Sequence[str]) -> Iterator[str]:
    """One correction acts, and a loss whose ratio is to the sampler has none."""
    correction, read = CorrectionSettings.of(config), " and ".join(theirs)
    yield from correction.problems()
    given = [f"{fields[name].name}={fields[name].value}" for name in CORRECTION_SETTINGS if name in fields]
    if theirs and correction.is_on:
        yield f"{', '.join(given)} beside {read}: two corrections in one launch; turn one of them off"
    if loss.anchor == "rollout" and (theirs or correction.has_factor):
        yield counted_twice(correction.kind, loss.name, read or given[0])


def _kl(config: PolicyLossConfig, fields: Mapping[str, Given]) -> Iterator[str]:
    """Where our estimate of KL can be chosen."""
    estimator = fields.get("kl_estimator")
    if estimator is None or estimator.value is None:
        return
    try:
        get_kl_estimator(estimator.value)
    except ConfigError as error:
        yield f"{estimator.name}={estimator.value}: {error}"
        return
    if not config.kl_coefficient:
        coefficient = fields.get("kl_coefficient")
        yield (
            f"{estimator.name}={estimator.value} has no effect without a coefficient: "
            + (f"set {coefficient.name}, or " if coefficient else "")
            + "remove the estimator"
        )


def _rollouts(
    config: PolicyLossConfig, record: AggregationRecord, fields: Mapping[str, Given], rollouts: Rollouts
) -> Iterator[str]:
    """An aggregation that counts rollouts, where one may come in several rows and nothing says which rows are of one."""
    declared, counts = fields.get(ONE_SAMPLE), record.counts_rollouts
    is_declared = declared is not None and declared.value is True
    if declared is not None and is_declared and not (counts and rollouts.several):
        why = f"{record.name} counts no rollouts" if rollouts.several else "each row is a rollout"
        yield f"{declared.name}=true has no effect: {why}; remove it"
    elif counts and rollouts.several and not (rollouts.ids or is_declared):
        name = declared.name if declared else ONE_SAMPLE
        yield (
            f"{config.policy_loss}.{config.loss_aggregation}: a rollout may come in several rows ({rollouts.several}), and nothing "
            f"says which rows are of one, so each row would weigh as a rollout. If each rollout has one row, set {name}=true; else "
            "choose token_mean, which counts no rollouts"
        )
