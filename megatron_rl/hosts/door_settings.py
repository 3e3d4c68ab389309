"""Reads the settings of a launch for any door: which loss, which weights, and every problem of them. What is true of every trainer
stands here once."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from megatron_rl.config import PolicyLossConfig, PolicyMetrics, flag_fields
from megatron_rl.errors import ConfigError
from megatron_rl.hosts.dense_rows import is_proportional
from megatron_rl.hosts.door import (
    CLIPS,
    CORRECTION_SETTINGS,
    DIVISOR,
    ONE_SAMPLE,
    SWITCHES,
    WORDS,
    Door,
    Found,
    Kind,
    Prompts,
    is_carried,
)
from megatron_rl.hosts.sampling import SamplingVerdict, judge_sampling, mixers_of, names_of, readers_of
from megatron_rl.hosts.settings import ABSENT, UNKNOWN, Given, Letter, Settings, acting_clip, not_numbers
from megatron_rl.loss_hub import PolicyLoss, get_loss_aggregation, get_policy_loss, is_finite_number, policy_loss_names
from megatron_rl.registries.correction_settings import counted_twice
from megatron_rl.registries.kl_estimators import get_kl_estimator
from megatron_rl.validation.checks import Row
from megatron_rl.validation.own_loss import own_loss_problems

# Fields of our config that are no parameter of a loss.
FIELDS = tuple(one.name for one in flag_fields())
# A name that is more similar than this to one of ours is a slip; the parameter of another loss is less similar to any.
CLOSEST_NAME = 0.85
# What the DPPO of trainers reads from a clip's settings: bounds of the divergence and of the ratio, which have names of ours.
OF_DIVERGENCE = {"clip_ratio_low": "divergence_low", "clip_ratio_high": "divergence_high", "clip_ratio_c": "ratio_truncation"}


class Refused(ConfigError):
    """rows: the problems, each with the setting that it is of, and what else the checks say."""

    def __init__(self, rows: Iterable[Row]):
        self.rows = tuple(rows)
        super().__init__(list(dict.fromkeys(in_words(row) for row in self.rows if row.is_wrong)))


def read(door: Door, settings: Settings) -> Found:
    """Raises Refused with every problem, or the ConfigError of what chooses the loss."""
    loss_name, aggregation = read_choice(door, settings)
    loss, record = get_policy_loss(loss_name), get_loss_aggregation(aggregation)
    fields = {ours: settings.one(one.name) for ours, one in door.field_settings.items()}
    own = {ours: settings.one(door.own.name(ours), door.own.typed(ours)) for ours in door.own_fields(loss)}
    fields |= {ours: given for ours, given in own.items() if ours not in fields}
    fields |= door.derive(settings, fields)
    twice = [*_clips_given_twice(door, fields, own)]
    # A clip by our name is typed, whatever its value; some workers cannot tell that their own was.
    fields |= {name: own[name]._replace(is_typed=True) for name in CLIPS if name in own and own[name].value is not None}
    wrong = [*not_numbers(_numbers(door, settings, fields)), *_no_coefficients(fields)]
    if wrong:  # anything else would be about values that were not meant
        raise ConfigError(list(dict.fromkeys(wrong)))
    config, problems = _config(door, loss_name, aggregation, fields)
    theirs = tuple(door.corrections(settings))
    sampling = judge_sampler(door, settings, config, theirs)
    found = Found(
        door=door,
        settings=settings,
        config=config,
        loss=loss,
        record=record,
        theirs=theirs,
        warnings=sampling.warnings,
        keeps_a_part=sampling.keeps_a_part,
        replays=sampling.replays,
    )
    problems += [*twice, *own_loss_problems(config)]
    for find in (_own_names, _switches, _corrections, _kl, _proportional, _rollouts):
        problems += find(found, fields)
    rows = [Row(door.choice.setting, text, is_wrong=True) for text in (*problems, *_texts(door, settings, fields))]
    rows += [Row("sampling", text, is_wrong=True) for text in sampling.problems]
    # A check of a door compares numbers.
    if all(_is_number(settings.value_of(one.name)) for one in door.settings if one.kind == Kind.NUMBER):
        rows += [row for one in door.checks for row in one(found)]
    if any(row.is_wrong for row in rows):
        raise Refused(rows)
    return found


# Loss and aggregation


def losses(door: Door) -> list[str]:
    """Those by name that the host gives what they need."""
    records = [get_policy_loss(name) for name in policy_loss_names() if "." not in name]
    has_all = [
        loss for loss in records if not {*loss.inputs_needed} - {"rollout_log_probs"} and _why_no_entropy(door, loss) is None
    ]
    return [loss.name for loss in has_all if door.prompts != Prompts.BY_DRIVER or is_proportional(loss)]


def _why_no_entropy(door: Door, loss: PolicyLoss) -> str | None:
    """Why the door cannot run the loss; None where it can."""
    if not loss.needs_entropy or door.has_logits:
        return None
    return f"{loss.name} needs the entropy of each token, and {door.title} hands over log-probabilities without logits"


def modes(door: Door) -> dict[str, tuple[str, str]]:
    """<loss>.<aggregation> -> (loss, aggregation), all that can be trained there by name."""
    return {
        f"{loss}.{record.name}": (loss, record.name)
        for record in door.aggregations()
        for loss in losses(door)
        if not (door.prompts == Prompts.CARRIED and is_carried(record.name)) or is_proportional(get_policy_loss(loss))
    }


def read_choice(door: Door, settings: Settings) -> tuple[str, str]:
    """(loss, aggregation), each a known name or module.function, which is imported here and in a worker. Raises ConfigError, which
    lists what there is and ends with the remedy."""
    choice, whole = door.choice, settings[door.choice.setting]
    name = whole.removeprefix(choice.prefix) if isinstance(whole, str) and whole.startswith(choice.prefix) else None
    if choice.aggregation is None:
        return _one_name(door, whole, name, choice.instead(settings) if choice.instead and "." not in (name or "") else None)
    offered, aggregation = losses(door), settings[choice.aggregation]
    if name not in offered:
        why = "it is not a loss of megatron_rl; choose one" if name is None else _why_no_loss(door, name)
        raise ConfigError(f"{choice.setting}={whole}: {why}. Losses: {', '.join(choice.prefix + one for one in offered)}")
    if str(aggregation) not in choice.names:
        why = f"; {choice.why_not[aggregation]}" if str(aggregation) in choice.why_not else ""
        raise ConfigError(f"{choice.aggregation}={aggregation}: ours are {', '.join(choice.names)}{why}")
    return name, choice.names[aggregation]


def _why_no_loss(door: Door, name: str) -> str:
    loss, _, aggregation = name.rpartition(".")
    theirs = {ours: theirs for theirs, ours in door.choice.names.items()}
    if loss in losses(door) and aggregation in theirs:
        short = str(door.choice.aggregation).rpartition(".")[2]
        remedy = f"type {door.choice.setting}={door.choice.prefix}{loss} {door.choice.aggregation}={theirs[aggregation]}"
        return f"in {door.title} the aggregation is {short}, and no part of this name; {remedy}"
    if "." in name:
        return f"{door.title}'s workers import megatron_rl, and no module of yours: a loss of your own is not offered"
    if name in policy_loss_names():
        return f"it is not proportional to the advantage, which carries the weights in {door.title}"
    close = get_close_matches(name, losses(door), 1)
    return "there is no such loss" + (f"; did you mean {door.choice.prefix}{close[0]}?" if close else "")


def _one_name(door: Door, whole: object, name: str | None, instead: str | None) -> tuple[str, str]:
    """instead: what is typed in the place of the host's own loss."""
    choice, known = door.choice, modes(door)
    if name in known:
        return known[name]
    offered, aggregations = losses(door), [record.name for record in door.aggregations()]
    why = f"it has one of each, as in {choice.prefix}gspo.{aggregations[0]}"
    words = name.split(".") if name else []
    halves = [(".".join(words[:cut]), ".".join(words[cut:])) for cut in range(1, len(words))]
    halves.sort(key=lambda half: -((half[0] in offered) + (half[1] in aggregations)))
    refused: ConfigError | None = None
    for loss, aggregation in halves if choice.imports else ():
        if not ((loss in offered or "." in loss) and (aggregation in aggregations or "." in aggregation)):
            continue
        try:
            no_entropy = _why_no_entropy(door, get_policy_loss(loss))
            record = get_loss_aggregation(aggregation)
        except ConfigError as error:
            refused = refused or error
            continue
        if no_entropy is not None:
            raise ConfigError(f"{choice.setting}={whole}: {no_entropy}; choose another loss, or a host that trains from logits")
        if not door.gives(record):
            why = f"{door.title} does not hand over what {aggregation} needs"
            raise ConfigError(f"{choice.setting}={whole}: {why}. {choice.remedy}")
        return loss, aggregation  # whether it is proportional is asked with the other problems
    if refused is not None:
        raise refused
    if name and "." in name:
        loss, _, aggregation = name.rpartition(".")
        if loss in offered and aggregation in aggregations:
            why = f"{loss} is not proportional to the advantage, and in {door.title} the advantages carry {aggregation}"
        else:
            parts = {"loss": (loss, offered), "aggregation": (aggregation, aggregations)}
            why = " and ".join(f"{one or 'nothing'!r} is no {kind}" for kind, (one, those) in parts.items() if one not in those)
    close = [f"{last}.{first}" for first, last in halves if f"{last}.{first}" in known]
    close = close or (get_close_matches(name.replace("-", "_"), known, 1) if name else [])
    if name in aggregations and f"grpo.{name}" in known:
        close = [f"grpo.{name}"]
    meant = f"; did you mean {choice.prefix}{close[0]}?" if close else f"; set {instead}." if instead else "."
    others = ", or module.function" if choice.imports else ""
    raise ConfigError(
        f"{choice.setting}={whole} does not name a loss and an aggregation: {why}{meant} Losses: {', '.join(offered)}{others}. "
        f"Aggregations: {', '.join(aggregations)}{others}. {choice.remedy}"
    )


# Numbers


def _numbers(door: Door, settings: Settings, fields: Mapping[str, Given]) -> Iterator[Given]:
    yield from (one for name, one in fields.items() if name not in WORDS)
    yield from (settings.one(one.name) for one in door.settings if one.kind in (Kind.NUMBER, Kind.BOUNDS))


def _no_coefficients(fields: Mapping[str, Given]) -> Iterator[str]:
    for name in ("kl_coefficient", "entropy_coefficient"):
        one = fields.get(name)
        if one is not None and one.value is not None and not (is_finite_number(one.value) and one.value >= 0):
            yield f"{one.name}={one.value!r} must be a finite number at or above 0"


def _is_number(value: object) -> bool:
    return not isinstance(value, str | list | tuple | Mapping)


def _clips_given_twice(door: Door, fields: Mapping[str, Given], own: Mapping[str, Given]) -> Iterator[str]:
    """By the host's name and by ours."""
    for name in CLIPS:
        ours, host = own.get(name), fields.get(name)
        if ours is None or host is None or ours.value is None or host.name == ours.name:
            continue
        if host.is_chosen and host.value != ours.value:
            yield f"{ours.name}={ours.value} and {host.name}={host.value} are the same thing with two values: remove one of them"


def _texts(door: Door, settings: Settings, fields: Mapping[str, Given]) -> Iterator[str]:
    """Text for a switch; text and lists for a number that no loss judges, as a clip that the host's switch turns off."""
    yield from texts_for_switches(door, settings)
    judged = {given.name for name, given in fields.items() if not name.endswith("_coefficient")}
    for one in door.settings:
        value = settings.value_of(one.name)
        if one.kind == Kind.NUMBER and not (_is_number(value) or isinstance(value, str)):
            yield f"{one.name}={value} must be one number"
        if isinstance(value, str) and one.kind == Kind.NUMBER and one.name not in judged:
            yield f"{one.name}={value!r} is text, and must be a number"


def texts_for_switches(door: Door, settings: Settings) -> Iterator[str]:
    """Of the settings that are true or false, whoever reads them."""
    by_default = [name for name, default in door.all_defaults.items() if isinstance(default, bool)]
    for name in dict.fromkeys([*(one.name for one in door.settings if one.kind == Kind.SWITCH), *by_default]):
        if isinstance(value := settings.value_of(name), str):
            yield f"{name}={value!r} is text, which {door.title} may take for true: write true or false"


def _config(door: Door, loss_name: str, aggregation: str, fields: Mapping[str, Given]) -> tuple[PolicyLossConfig, list[str]]:
    """Our settings, and the problems of clip, parameters and divisor."""
    loss, record = get_policy_loss(loss_name), get_loss_aggregation(aggregation)
    clips = [fields.get(name, Given(name, None)) for name in CLIPS]
    parameters = {name: given for name, given in fields.items() if name not in FIELDS}
    divisor = fields[DIVISOR]
    (low, high), problems = acting_clip(loss, clips[0], clips[1], door.keep_clip)
    declared = {parameter.name for parameter in loss.parameters}
    idle = [(given, "clip", ours) for ours, given in zip(CLIPS, clips, strict=True) if loss.clip_ratios is None]
    idle += [(given, name, name) for name, given in parameters.items() if name not in declared]
    problems += [
        f"{given.name}={given.value} has no effect: {loss.name} has no {what}; {_instead(door, declared, given, ours)}"
        for given, what, ours in idle
        if given.is_chosen
    ]
    title = f"{loss_name}.{aggregation}"
    if not record.takes_divisor:
        if divisor.is_chosen:
            problems.append(f"{divisor.name}={divisor.value} has no effect: {aggregation} has no divisor; remove it")
    elif divisor.value is None:
        theirs = door.field_settings.get(DIVISOR)
        (typed,) = door.typed({theirs.name if theirs else door.own.name(DIVISOR): Letter("L")})
        problems.append(f"{title} needs its L: set {typed}, for Dr. GRPO the longest response in tokens")
    elif not (is_finite_number(divisor.value) and divisor.value > 0):
        problems.append(f"{divisor.name}={divisor.value!r} must be a number above 0: it is the L of {title}")
    values = {name: given.value for name, given in parameters.items() if name in declared and given.value is not None}
    try:
        loss.clip_bounds(low, high)
        loss.resolve_parameters(values)
    except ConfigError as error:
        problems += error.problems
    others = {
        name: given.value for name, given in fields.items() if name in FIELDS and name not in (*CLIPS, DIVISOR) and given.is_chosen
    }
    config = PolicyLossConfig(
        policy_loss=loss_name,
        loss_aggregation=aggregation,
        loss_aggregation_divisor=divisor.value if record.takes_divisor else None,
        clip_ratio_low=low,
        clip_ratio_high=high,
        loss_parameters=values,
        policy_metrics=PolicyMetrics.BASIC,
        **others,
    )
    return config, problems


def _instead(door: Door, declared: Collection[str], given: Given, name: str) -> str:
    """The remedy for a value that the loss does not read. name: ours of it."""
    ours = OF_DIVERGENCE.get(name)
    return f"set {door.own.typed(ours)}={given.value}" if ours in declared and ours else "remove it"


# What is true of every trainer


def _own_names(found: Found, fields: Mapping[str, Given]) -> Iterator[str]:
    """Names of ours that act on nothing here. A section of the host's own judges what it has."""
    own, door = found.door.own, found.door
    allowed, all_names = door.own_fields(found.loss), door.own_names()
    is_shared = own.prefix in door.sections  # with names of the host, and what is neither is judged by name
    offered = [one for one in allowed if one != DIVISOR or found.record.takes_divisor]
    if door.log_probs is not None and door.log_probs.setting.startswith(own.prefix):
        offered.append(door.log_probs.setting.removeprefix(own.prefix).lower())
    for name, value in found.settings.given.items():
        if not name.startswith(own.prefix) or name in door.read_names or (is_shared and name not in all_names):
            continue
        short = name.removeprefix(own.prefix)
        ours = short.lower() if own.is_upper else short
        if ours in allowed and name == own.name(ours):
            continue
        if theirs := door.field_settings.get(ours):
            instead = f"set {theirs.name}"
        elif close := get_close_matches(ours, offered, 1, CLOSEST_NAME) or _with_words_more(ours, offered):
            instead = f"did you mean {own.typed(close[0])}?"
        else:
            shown = ", ".join(own.name(one).removeprefix(own.prefix) for one in offered)
            instead = f"{found} has {shown}; remove it"
        yield f"{own.added}{name}={value} has no effect: {instead}"


def _with_words_more(name: str, known: Iterable[str]) -> list[str]:
    """The only one that has all words of the name."""
    found = [one for one in known if {*name.split("_")} <= {*one.split("_")}]
    return found if len(found) == 1 else []


def _switches(found: Found, fields: Mapping[str, Given]) -> Iterator[str]:
    """Ours below a prefix, which no table of the door's settings judges."""
    for one in (fields[name] for name in SWITCHES if name in fields):
        if one.value is not None and not isinstance(one.value, bool):
            yield f"{one.name}={one.value!r} must be true or false"


def _corrections(found: Found, fields: Mapping[str, Given]) -> Iterator[str]:
    correction, theirs = found.correction, " and ".join(found.theirs)
    yield from correction.problems()
    given = [f"{one.name}={one.value}" for name, one in fields.items() if name in CORRECTION_SETTINGS and one.is_chosen]
    if theirs and correction.is_on:
        yield f"{', '.join(given)} beside {theirs}: two corrections in one launch; turn one of them off"
    if found.loss.anchor == "rollout" and (theirs or correction.has_factor):
        yield counted_twice(correction.kind, found.loss.name, theirs or given[0])


def _kl(found: Found, fields: Mapping[str, Given]) -> Iterator[str]:
    """Of a trainer where our estimate of KL can be chosen."""
    estimator = fields.get("kl_estimator")
    if estimator is None or not estimator.is_chosen:
        return
    try:
        get_kl_estimator(estimator.value)
    except ConfigError as error:
        yield f"{estimator.name}={estimator.value}: {error}"
        return
    if not (is_finite_number(found.config.kl_coefficient) and found.config.kl_coefficient > 0):
        coefficient = fields.get("kl_coefficient")
        set_it = f"set {coefficient.name} to a number above 0, it is {coefficient.value}" if coefficient else "there is no KL term"
        yield f"{estimator.name}={estimator.value} has no effect without a coefficient: {set_it}; or remove the estimator"


def _proportional(found: Found, fields: Mapping[str, Given]) -> Iterator[str]:
    if found.is_carried and not is_proportional(found.loss):
        yield (
            f"{found}: in {found.door.title} the advantages carry {found.record.name}, which is right for a loss that is "
            f"proportional to the advantage, as grpo and gspo are; {found.loss.name} is not: choose another one"
        )


def _rollouts(found: Found, fields: Mapping[str, Given]) -> Iterator[str]:
    """An aggregation that counts rollouts, where one may come in several rows and nothing says which rows are of one."""
    door, rollouts, declared = found.door, found.rollouts, fields.get(ONE_SAMPLE)
    is_declared, counts = declared is not None and declared.value is True, found.record.counts_rollouts
    if declared is not None and is_declared and not (counts and rollouts.several):
        why = f"{found.record.name} counts no rollouts" if rollouts.several else "each row is a rollout"
        yield f"{declared.name}=true has no effect: {why}; remove it"
    elif counts and rollouts.several and not (rollouts.ids or is_declared):
        others = [record.name for record in door.aggregations() if not record.counts_rollouts]
        yield (
            f"{found}: a rollout may come in several rows ({rollouts.several}), and {door.title} does not say which rows are of "
            f"one. Each row would weigh as a rollout. If each has one row, type {door.line_of(door.own.name(ONE_SAMPLE), True)}; "
            f"else choose {' or '.join(others)}, which counts no rollouts"
        )


def judge_sampler(door: Door, settings: Settings, config: PolicyLossConfig, theirs: Iterable[str]) -> SamplingVerdict:
    def value_of(name: str) -> Any:  # None: the sampler's default
        value = settings.value_of(name)
        return (None if settings.knows_defaults else UNKNOWN) if value is ABSENT else value

    readers = [*readers_of(config), *theirs, *door.readers(settings)]
    if door.sampler.recomputes:
        readers += mixers_of(config, door.own.typed("kl_estimator"))
    return judge_sampling(door.sampler, value_of, readers)


def in_words(row: Row) -> str:
    """What is said of a setting, with its name where the text does not begin with one."""
    return row.text if "=" in row.text.partition(" ")[0] else f"{row.subject}: {row.text}"


class _Asked(Settings):
    """A launch that notes what is asked of it by name, beside what is looked at for its kind alone."""

    def __init__(self, settings: Settings):
        vars(self).update(vars(settings))
        self.names: dict[str, None] = {}

    def __getitem__(self, name: str) -> Any:
        self.names[name] = None
        return super().__getitem__(name)


class OnceRead:
    """Reads the host's own config objects at each call of a loss, and judges them where a setting that decides has changed. What it
    keeps are values: no object of the host."""

    def __init__(self, door: Door):
        self.door = door
        self.values: dict[str, Any] = {}
        self.found: Found | None = None

    def read(self, settings: Settings) -> Found:
        """Raises one ConfigError with every problem."""
        if self.found is not None and [*map(settings.value_of, self.values)] == [*self.values.values()]:
            return self.found
        asked = _Asked(settings)
        found = read(self.door, asked)
        own = map(self.door.own.name, self.door.own_fields(found.loss))
        names = (*self.door.read_names, *own, *names_of(self.door.sampler), *asked.names)
        values = {name: settings.value_of(name) for name in names}
        kept = settings.read_by(lambda name: values.get(name, ABSENT))
        self.found, self.values = replace(found, settings=kept), values
        return self.found
