"""A door is the declaration of a trainer that settings configure: what its settings are called, and what it does with our number.

`door_settings` reads the settings of any door, `door_line` judges a launch line for doctor and writes one for explain, `dense_rows`
has the loss. A door's own file holds its declaration and its plug: how the trainer is made to call us.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from importlib import import_module
from pathlib import Path
from typing import Any

from megatron_rl.aggregation_record import TOKEN_MEAN, AggregationRecord, Formula
from megatron_rl.config import PolicyLossConfig
from megatron_rl.errors import place_of
from megatron_rl.hosts.closed_words import Words
from megatron_rl.hosts.model_names import ModelNames
from megatron_rl.hosts.programs import Programs
from megatron_rl.hosts.sampling import Sampler, names_of
from megatron_rl.hosts.settings import Given, Settings, as_typed
from megatron_rl.hosts.step_sizes import SizeNames
from megatron_rl.hosts.stock import SAMPLE_MEAN, Stock, Term
from megatron_rl.loss_hub import PolicyLoss, declared_parameters, get_loss_aggregation, loss_aggregation_names
from megatron_rl.registries.correction_settings import CorrectionSettings
from megatron_rl.validation.checks import Check, Row

Stage = tuple[str, Formula, str]  # name, factor, what it does
ReadFile = Callable[[Path], Mapping[str, Any]]  # of a file of settings; raises ConfigError where it cannot be read

# What multiplies a token's weight after the loss function has returned, in Megatron-Core 0.13 to 0.19.
# tests/test_explain_chain.py holds each door's stages against the code that does them.
AVERAGED: tuple[Stage, ...] = (
    ("schedule", Formula(M=-1), "averages over micro-batches"),
    ("DDP", Formula(dp=-1, cp=-1), "averages over dp x cp ranks"),
)
SUMMED: tuple[Stage, ...] = (("schedule", Formula(), "adds micro-batches"), ("DDP", Formula(), "adds ranks"))
TIMES_CP: Stage = ("schedule", Formula(M=-1, cp=1), "averages over micro-batches, x cp")
# Our settings of the correction for the sampler, by the names of PolicyLossConfig.
CORRECTION_SETTINGS = (
    *("importance_correction", "importance_correction_level", "importance_correction_low", "importance_correction_high"),
    "off_policy_sequence_delta",
)
# Our settings of what a step counts.
ONE_SAMPLE, PARTIAL_GROUPS = "one_sample_per_rollout", "allow_partial_prompt_groups"
# Of ours that a door may set, those that are a word or a switch.
SWITCHES = (ONE_SAMPLE, PARTIAL_GROUPS)
WORDS = ("importance_correction", "importance_correction_level", "kl_estimator", "fused_lm_head_loss", *SWITCHES)
CLIPS = ("clip_ratio_low", "clip_ratio_high")
DIVISOR = "loss_aggregation_divisor"


class Kind(StrEnum):
    """NUMBER: true, false and text are refused. BOUNDS: a number, or text of bounds. SWITCH: text is refused. GROUP: has names of
    its own, which are not judged."""

    NUMBER = "number"
    BOUNDS = "bounds"
    SWITCH = "switch"
    OTHER = "other"
    GROUP = "group"


@dataclass(frozen=True, slots=True)
class Setting:
    """field: what it is here, a field of PolicyLossConfig or a parameter of a loss. idle: what to do instead, where none of our
    losses reads it."""

    name: str
    kind: Kind = Kind.OTHER
    field: str | None = None
    default: Any = None
    idle: str | None = None


def names(prefix: str, kind: Kind, listed: str | Mapping[str, str]) -> tuple[Setting, ...]:
    """Settings that only need to be known. listed: words, or names with what to do instead."""
    if isinstance(listed, str):
        return tuple(Setting(prefix + name, kind) for name in listed.split())
    return tuple(Setting(prefix + name, kind, idle=instead) for name, instead in listed.items())


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollouts:
    """What a rollout is in the batches of a launch, and who can tell.

    several: where a rollout comes in several rows; None: a row is a rollout. is_said: whether this launch or step has such
    rollouts; else another may. ids: what names the rollout of a row, so that rollouts are counted; None: nothing does. Without ids
    several rows are refused where an aggregation counts rollouts, unless the user says that each rollout has one."""

    several: str | None = None
    ids: str | None = None
    is_said: bool = True

    @property
    def are_counted(self) -> bool:
        return self.ids is not None

    @property
    def have_several(self) -> bool:
        """Whether a weight is told by counts of rollouts: with one row each they are counts of rows."""
        return self.are_counted and self.is_said


class Prompts(Enum):
    """Who knows which samples share a prompt."""

    COUNTED = "the loss is given the counts"
    CARRIED = "the advantages carry prompt_mean, and a loss must be proportional to them"
    BY_DRIVER = "the trainer scales the advantages by every aggregation, and a loss must be proportional to them"
    UNKNOWN = "nobody: an aggregation that needs prompts is not offered"


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """How a launch chooses loss and aggregation: <prefix><loss>.<aggregation>, or <prefix><loss> where `aggregation` is another
    setting, with the host's names of ours. remedy: ends a refusal. imports: module.function of a user's own is offered."""

    setting: str
    prefix: str = ""
    remedy: str
    aggregation: str | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    imports: bool = False
    why_not: Mapping[str, str] = field(default_factory=dict)
    """The host's names of aggregations that ours have no equal of -> why."""
    instead: Callable[[Settings], str] | None = None
    """Ours in the place of the host's own loss, as it is typed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Own:
    """The names of our settings that the host has none for: `prefix`, then our name. added: what its parser wants before a name
    that it does not know. is_upper: variables of an environment. clips: our clip may be set by our name too. others: further fields
    that may be set so, as kl_estimator."""

    prefix: str
    added: str = ""
    is_upper: bool = False
    clips: bool = False
    others: tuple[str, ...] = ()

    def name(self, field: str) -> str:
        return self.prefix + (field.upper() if self.is_upper else field)

    def typed(self, field: str) -> str:
        return self.added + self.name(field)


@dataclass(frozen=True, kw_only=True, slots=True)
class Deviation:
    """The division of advantages by the standard deviation of a group's rewards, which Dr. GRPO does not have.

    without: the settings that leave it out, by whole names. divides: whether a launch has it, as far as it says so."""

    without: Mapping[str, Any]
    divides: Callable[[Settings], bool]


@dataclass(frozen=True, kw_only=True, slots=True)
class LogProbs:
    """The setting that puts our log-probabilities in the place of the host's, whichever loss trains (hosts/log_probs.py).

    value: what turns it on. theirs: what leaves the host's own. is_hosts: the setting is the host's, and may have other values.
    backend: a setting of the host, and its value under which the replaced functions run; None: they run in each launch."""

    setting: str
    value: str
    theirs: str | None = None
    is_hosts: bool = False
    backend: tuple[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Line:
    """What a launch line says. rows: what is said of the line itself. settings: None where nothing of ours can be judged.
    stock: the settings of a line that trains the trainer's own loss, where `settings` is None. is_partial: a row says what of that
    loss is not judged."""

    settings: Settings | None
    rows: Sequence[Row] = ()
    stock: Settings | None = None
    is_partial: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A launch as it is read: our settings, and what they were read from."""

    door: Door
    settings: Settings
    config: PolicyLossConfig
    loss: PolicyLoss
    record: AggregationRecord
    theirs: tuple[str, ...]  # the host's own corrections that are on, as typed
    warnings: tuple[str, ...] = ()  # what is said at start
    keeps_a_part: bool = False  # a filter of the sampler is on
    replays: bool = False  # and the host's trainer scores among the sets that it leaves

    @property
    def correction(self) -> CorrectionSettings:
        return CorrectionSettings.of(self.config)

    @property
    def is_carried(self) -> bool:
        """Whether the advantages carry the aggregation, by us."""
        return self.door.prompts == Prompts.CARRIED and is_carried(self.record.name)

    @property
    def counts_prompts(self) -> bool:
        return self.record.needs is None or self.record.needs_prompts

    @property
    def rollouts(self) -> Rollouts:
        return self.door.rollouts(self.settings)

    def __str__(self) -> str:
        return f"{self.config.policy_loss}.{self.config.loss_aggregation}"


def is_carried(aggregation: str) -> bool:
    """Whether advantages can carry the weights of prompts, see dense_rows.carry_prompt_weights."""
    return aggregation == "prompt_mean"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Door:
    """A trainer that settings configure. Names of settings are whole, as a user types them."""

    name: str
    title: str
    """As it writes itself."""
    probed: str
    """The repository and revision that all of this was measured on."""

    # Its settings.
    settings: tuple[Setting, ...]
    """What is known by name: what our losses read, and all of the sections that choose a loss or a correction."""
    sections: tuple[str, ...]
    """Prefixes, with their dot, below which `settings` has every name: another one is a slip."""
    choice: Choice
    own: Own
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Settings that the checks read, beside `settings`."""
    keep_clip: str = "{name}={value} on the launch line"
    """How a clip is typed that equals the host's default; {side}, {name} and {value} are filled in."""
    derive: Callable[[Settings, Mapping[str, Given]], Mapping[str, Given]] = lambda settings, fields: {}
    """Our fields that are not one setting of the host, from all of them."""
    is_ours: Callable[[Settings], bool] | None = None
    """Whether a launch chooses a loss of ours; None: by the prefix of the choice."""
    stand_ins: Mapping[str, Any] | None = None
    """What is taken for settings that only the shell knows, so that the others are judged; other unknown ones are left out. None: a
    launch with an unknown setting that our losses read is not judged."""
    corrections: Callable[[Settings], Sequence[str]] = lambda settings: ()
    """The host's own corrections for the sampler that are on and multiply our loss, as they are typed."""
    readers: Callable[[Settings], Sequence[str]] = lambda settings: ()
    """What else of the host compares with the sampler, as it is typed."""
    rollouts: Callable[[Settings], Rollouts] = lambda settings: Rollouts()
    counts_rollouts: bool = False
    """Whether there are launches where rollouts of several rows are counted."""
    log_probs: LogProbs | None = None
    """None: the host computes its own log-probabilities, or our loss is given logits."""
    deviation: Deviation | None = None
    """None: its advantages have none."""
    sampler: Sampler
    checks: tuple[Check, ...] = ()
    """What is this host's alone. Each finds, in a `Found`, messages or rows."""

    of_any_launch: Callable[[Settings], Iterable[Row]] = lambda settings: ()
    """What is said of a launch whoever's loss trains."""
    refuses: Callable[[Settings], Iterable[Row]] = lambda settings: ()
    """What the host itself refuses of a launch, whoever's loss trains: a problem, and then nothing is said of its own loss."""
    words: Mapping[str, Words] = field(default_factory=dict)
    """Settings that are one of a list, where a loss of ours does not take their place."""
    imports: tuple[str, ...] = ()
    """Settings and environment variables that name modules of the user's own, which the host imports where a loss trains."""
    unchosen: Callable[[Settings], Iterable[Row]] = lambda settings: ()
    """What is said of a launch that chooses no loss of ours, and means one."""
    is_open: Callable[[Settings, str], bool] = lambda settings, section: False
    """Whether a class of the user's own may have given a section more names."""

    stock: Callable[[Settings], Stock | None] = lambda settings: None
    """What the host's own loss weighs a token; None: it is not known here."""
    terms: Callable[[Found], Mapping[str, Term]] = lambda found: {}
    """KL and entropy that the host adds to a loss of ours."""
    sizes: SizeNames = SizeNames()
    """What says how a step is cut, for a step that doctor and explain are given."""

    # What it does with the number.
    megatron: str | None = None
    """The setting with which Megatron-Core trains there; None: it never does."""
    model: ModelNames | None = None
    """Its names of the model's settings; None where Megatron-Core never trains."""
    has_logits: bool = False
    """Whether it hands over logits, as a loss needs that reads the entropy; else log-probabilities."""
    prompts: Prompts
    carrier: str = ""
    """What puts the weights into the advantages, for explain."""
    returns: Formula = field(default_factory=Formula)
    """What our loss multiplies its weights by."""
    step: tuple[Stage, ...]
    """What multiplies the number that our loss returns."""
    step_per_token: tuple[Stage, ...] | None = None
    """The same under Megatron's per-token contract, where the host lets its user choose."""
    why_not_per_token: str | None = None
    """Why explain refuses --calculate-per-token-loss."""
    was_run: str = ""
    """Where our gradient was compared in the trainer's own code; empty: nowhere."""
    is_per_token: bool = False
    """Megatron's per-token contract, whatever is typed."""

    # Its launch line.
    starts: str
    recognises: Callable[[Sequence[str]], bool]
    programs: Programs = Programs()
    """What else starts a training of this trainer, with its own loss or with another one."""
    read_line: Callable[[Sequence[str], ReadFile], Line]
    write: Callable[[PolicyLossConfig, dict[str, Any]], dict[str, Any]] = lambda config, given: given
    """Completes the settings, by name, that give the host ours. What is UNKNOWN is neither judged nor typed."""
    line_of: Callable[[str, Any], str] = lambda name, value: f"{name}={as_typed(value)}"
    lines_of: Callable[[Mapping[str, Any]], list[str]] | None = None
    """The same of all settings at once, where several are typed in one."""
    of_written: Callable[[PolicyLossConfig], Iterable[str]] = lambda config: ()
    """What is said of settings that `write` gives and that nobody has asked for."""
    place: str = "settings on the launch line"
    separator: str = " "
    honours: tuple[str, ...] = ("kl_coefficient", "kl_estimator")
    """Our settings that act there, beside loss, aggregation, clip and corrections."""
    estimators: tuple[str, ...] | None = None
    """Estimates of KL that the host computes by itself and that are ours; None: each of ours acts there."""
    decides: str = "entropy and temperature"
    """What the host's own settings decide on."""

    # Its code.
    contract: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """module:function or module:Class.method -> its arguments; a last "..." takes more."""

    @property
    def all_defaults(self) -> dict[str, Any]:
        return {one.name: one.default for one in self.settings if one.default is not None} | dict(self.defaults)

    @property
    def of_token_mean(self) -> str:
        """Its title, where its own loss is by default the mean over the step's tokens; else empty."""
        stock = self.stock(Settings.of_names({}, self.all_defaults))
        return self.title if isinstance(stock, Stock) and stock.policy == TOKEN_MEAN else ""

    @property
    def field_settings(self) -> dict[str, Setting]:
        """Our field -> the host's setting of it."""
        return {one.field: one for one in self.settings if one.field is not None}

    @property
    def read_names(self) -> tuple[str, ...]:
        """What our losses and the checks read."""
        ours = [one.name for one in self.settings if one.field is not None or one.default is not None]
        more = [name for name in (self.choice.setting, self.choice.aggregation) if name]
        return tuple(dict.fromkeys([*more, *ours, *self.defaults]))

    @property
    def known_names(self) -> tuple[str, ...]:
        log_probs = [] if self.log_probs is None else [self.log_probs.setting]
        return (*(one.name for one in self.settings), *self.defaults, *names_of(self.sampler), self.choice.setting, *log_probs)

    def typed(self, given: Mapping[str, Any]) -> list[str]:
        """Settings by whole names, as a user types them."""
        return [self.line_of(*one) for one in given.items()] if self.lines_of is None else self.lines_of(given)

    @property
    def without_deviation(self) -> str:
        """As Host.without_deviation."""
        return "" if self.deviation is None else self.separator.join(self.typed(self.deviation.without))

    def own_fields(self, loss: PolicyLoss) -> tuple[str, ...]:
        """What may be set by our names: corrections, and what the host has no name for."""
        known = self.field_settings
        parameters = [one.name for one in loss.parameters if one.name not in known]
        divisor = [DIVISOR] if DIVISOR not in known else []
        return (*parameters, *divisor, *CORRECTION_SETTINGS, *self.own.others, *(CLIPS if self.own.clips else ()))

    def own_names(self) -> set[str]:
        """All that may be set by our names, whichever loss trains."""
        fields = {*declared_parameters(), DIVISOR, *CORRECTION_SETTINGS, *self.own.others, *(CLIPS if self.own.clips else ())}
        return {self.own.name(one) for one in fields}

    def gives(self, record: AggregationRecord) -> bool:
        """Whether the host hands over what the aggregation needs."""
        if self.choice.aggregation is not None:
            return record.name in self.choice.names.values()
        if record.needs_rows and not self.counts_rollouts:
            return False
        if self.prompts == Prompts.COUNTED:
            return True
        carries = self.prompts == Prompts.CARRIED and is_carried(record.name)
        return record.needs is not None and (not record.needs_prompts or carries)

    def aggregations(self) -> list[AggregationRecord]:
        records = [get_loss_aggregation(name) for name in loss_aggregation_names() if "." not in name]
        return [record for record in records if self.gives(record)]

    def stages(self, weight: Formula, *, needs_prompts: bool, per_token: bool) -> tuple[list[Stage], list[Stage]]:
        """(the factors that weigh samples, those that scale the whole step)."""
        step = self.step_per_token if per_token and self.step_per_token is not None else self.step
        words = "" if not self.returns.powers else f"{self.returns} x "
        if self.prompts == Prompts.BY_DRIVER:
            driver = ("driver", weight, f"{self.title} scales the sample's advantage, by counts of the mini-batch")
            return [driver, ("loss", self.returns, "adds the tokens")], [*step]
        if self.prompts == Prompts.CARRIED and needs_prompts:
            estimator = ("estimator", weight / SAMPLE_MEAN, f"{self.carrier} scales the sample's advantage")
            return [estimator, ("loss", SAMPLE_MEAN * self.returns, f"{words}the weight of sample_mean")], [*step]
        return [("loss", weight * self.returns, f"{words}the weight, from counts of the step")], [*step]

    def contract_problems(self) -> Iterator[str]:
        """What the trainer that is installed lacks of what was probed, with the line that is another one."""
        for path, expected in self.contract.items():
            module, _, name = path.partition(":")
            yield from self.differences(import_module(module), name, expected)

    def differences(self, owner: Any, name: str, expected: tuple[str, ...]) -> Iterator[str]:
        """The same of one function. owner: a module or a class of the trainer. expected: see `contract`."""
        try:
            found: Any = functools.reduce(getattr, name.split("."), owner)
        except AttributeError:
            yield f"{self.title}'s {owner.__name__} has no {name}, and {self.probed} was probed ({place_of(owner)})"
            return
        if problem := signature_problem(found, expected):
            shown = f"{owner.__name__}.{name}" if inspect.isclass(owner) else name
            yield f"{self.title}'s {shown} {problem}, and {self.probed} was probed ({place_of(found)})"


def plug(module: str) -> Any:
    """The file of hosts/ that a trainer calls, imported where the trainer asks the declaration for a name of it: doctor and explain
    read the declaration where the trainer's packages are not."""
    return import_module(f"megatron_rl.hosts.{module}")


def signature_problem(function: Callable[..., Any], expected: tuple[str, ...]) -> str | None:
    """What differs from the arguments that our loss is written for. A last "..." in `expected`: others may follow."""
    found = tuple(inspect.signature(function).parameters)
    first = expected[:-1] if expected[-1:] == ("...",) else expected
    if found == first or (first != expected and found[: len(first)] == first):
        return None
    return f"takes ({', '.join(found)}), ours is made for ({', '.join(expected)})"


def looks_up(function: Callable[..., Any], name: str) -> bool:
    """Whether a function of a host reads that name of its module: what takes the name's place then has an effect."""
    return name in inspect.unwrap(function).__code__.co_names


def part_of(module: Any, path: str) -> Any:
    """A function of a host's module, or `Class.method`; None where it is not there."""
    return functools.reduce(lambda owner, part: getattr(owner, part, None), path.split("."), module)
