"""Samplers that keep a part of the vocabulary (top-p, top-k, min-p): one table of the trainers' settings, one check of a launch.

Of a token a of the kept set S, whose mass is M = sum_S pi, a sampler reports one of two log-probabilities:

    of the kept tokens          log mu(a) = log pi(a) - log M, so log pi(a) - log mu(a) = log M <= 0 on every token
    of the whole vocabulary     log pi(a)

Where the sampler's is of the kept tokens and the trainer's of the whole vocabulary, each importance weight is M although nothing is
off-policy, and the product over m tokens M^m: whatever compares with the sampler is refused. Where both are of one kind the weights
are right. The policy that samples still is another one than pi: a token outside S is never sampled. The ratio of two scores of the
trainer's holds no M, whatever the sampler reports.

Some trainers score among the sampler's own sets, by a setting of theirs: both scores are then of one kind, if nothing else changes
what is drawn from. A penalty changes the logits themselves, and speculative decoding draws from another model's tokens.

megatron-rl train records what it keeps, and its scores are over that. What others sampled comes by --rollouts; where kept ids are
missing the watchdog knows the signature.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.util import find_spec
from itertools import starmap
from pathlib import Path
from typing import Any

from megatron_rl.arguments import read_number
from megatron_rl.config import NO_CORRECTION, PolicyLossConfig
from megatron_rl.hosts.settings import UNKNOWN, as_typed
from megatron_rl.loss_hub import get_policy_loss, policy_loss_names
from megatron_rl.registries.correction_settings import CorrectionSettings
from megatron_rl.registries.kl_estimators import KL_ESTIMATORS
from megatron_rl.validation import flag_of


class Scores(StrEnum):
    """Over which tokens a log-probability is normalised."""

    KEPT = "among the tokens that it kept"
    WHOLE = "over the whole vocabulary"
    UNKNOWN = "over what is not known here"


@dataclass(frozen=True, slots=True)
class Filter:
    """A setting that changes sampling, as one that leaves tokens out. off: the values with which it changes nothing; the first is
    written."""

    default: Any
    off: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """How a trainer is told to score among its sampler's own sets, whoever's loss trains.

    by: each of these settings does so where it is on. told: what to type. mark: the module and class that have it; an installed
    trainer without them takes the setting for something else. "": one that does not replay refuses the setting itself.
    """

    by: Mapping[str, Filter]
    told: str
    mark: str = ""

    def in_words(self) -> str:
        return f"{self.told} (in releases that have it)"

    def is_there(self) -> bool | None:
        """Whether the installed trainer has it; None: none is installed here. Nothing of it runs but its packages' own files."""
        if not self.mark:
            return True
        module, _, name = self.mark.partition(":")
        try:
            spec = find_spec(module)
        except ImportError:  # of a package above it
            return None
        return spec is not None and spec.origin is not None and f"class {name}" in Path(spec.origin).read_text(encoding="utf-8")


OFF = Filter(None, (None, "null", False, ""))
NO_FACTOR = Filter(1.0, (1.0,))
NO_ADDEND = Filter(0.0, (0.0,))


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampler:
    """How a trainer is told to sample. Names are what its user types; of a flag, its name among the arguments."""

    filters: Mapping[str, Filter]
    engines: Mapping[str, Scores | None]
    """What each engine reports; None: what the settings in `modes` say. An engine that is not here: unknown."""
    engine: str | None = None
    """The setting of the engine; None: there is one, the first of `engines`, which also counts where nothing is set."""
    modes: tuple[str, ...] = ()
    """Settings of the kind of log-probabilities; the first that is set counts."""
    default_mode: str = "raw_logprobs"  # vLLM's and Megatron's
    trainer_keeps: tuple[str, ...] = ()
    """Filters that the trainer applies to its own scores as well."""
    recomputes: bool = False
    """It does so by its own logits, and gives a token outside its set the score 0.0."""
    replay: Replay | None = None
    reshaped: Mapping[str, Filter] = field(default_factory=dict)
    """Settings that change the logits that a token is drawn from: penalties and biases."""
    unsettled: Mapping[str, Filter] = field(default_factory=dict)
    """Settings with which a set that is returned need not be the one that its token was drawn from."""
    typed: Callable[[str, str], str] = "{}={}".format
    longest: str | None = None
    """The setting of the most tokens of a response, or of a turn where there are several."""
    turns: str | None = None
    """The setting of the most turns of a response, 1 by default."""


# In NeMo-RL our metric of the tokens that its trainer leaves out.
UNSCORED = "unscored_token_fraction"
# The modes of vLLM and of Megatron's engine. A raw score comes from the logits, before the temperature too.
MODES = {"processed_logprobs": Scores.KEPT, "raw_logprobs": Scores.WHOLE}


def _flag(name: str, value: str) -> str:
    return f"{flag_of(name)} {value}"


_ROLLOUT_FLAGS = {"rollout_top_p": Filter(1.0, (1.0,)), "rollout_top_k": Filter(-1, (-1, 0))}
_OF_SGLANG = {"sglang_speculative_algorithm": OFF, "sglang_enable_custom_logit_processor": OFF}
SAMPLERS: dict[str, Sampler] = {
    # What SGLang reports: the whole vocabulary, or the kept tokens where it returns them as well, by its version and its patches.
    "miles": Sampler(filters=_ROLLOUT_FLAGS, engines={"SGLang": Scores.UNKNOWN}, typed=_flag, unsettled=_OF_SGLANG),
    # slime's trainer computes old log-probabilities among the tokens that top-p has kept, and none of top-k.
    "slime": Sampler(
        filters=_ROLLOUT_FLAGS,
        engines={"SGLang": Scores.UNKNOWN},
        trainer_keeps=("rollout_top_p",),
        typed=_flag,
        unsettled=_OF_SGLANG,
    ),
    "megatron_lm": Sampler(
        filters={"rl_default_top_p": Filter(0.0, (0.0, 1.0)), "rl_default_top_k": Filter(-1, (-1, 0))},
        engines={"Megatron's engine": None},
        modes=("inference_dynamic_batching_logprobs_mode",),
        typed=_flag,
    ),
}


@dataclass(frozen=True, slots=True)
class SamplingVerdict:
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    keeps_a_part: bool = False
    """Some filter is on, and the trainer does not replay it."""
    replays: bool = False
    """The trainer scores among the sampler's sets, by its own setting."""


class _Launch:
    """What a launch tells its sampler. on: the filters that leave tokens out. unknown: those whose value is not known here."""

    def __init__(self, sampler: Sampler, value_of: Callable[[str], Any]):
        self.sampler, self.value_of = sampler, value_of
        self.on, self.unknown = self._on(sampler.filters)
        self.reshaped, _ = self._on(sampler.reshaped)
        self.unsettled, _ = self._on(sampler.unsettled)
        self.replayed, _ = self._on(sampler.replay.by if sampler.replay is not None else {})

    def _on(self, settings: Mapping[str, Filter]) -> tuple[dict[str, Any], list[str]]:
        """(those that change sampling, with their values; those whose value is not known here)."""
        given = {name: self._read(name, one.default) for name, one in settings.items()}
        unknown = [name for name, value in given.items() if value is UNKNOWN]
        return {n: value for n, value in given.items() if value is not UNKNOWN and value not in settings[n].off}, unknown

    def _read(self, name: str, default: Any) -> Any:
        value = self.value_of(name)
        return default if value is None else read_number(value)

    @property
    def engine(self) -> Any:
        first = next(iter(self.sampler.engines))
        return first if self.sampler.engine is None else self._read(self.sampler.engine, first)

    @property
    def mode(self) -> tuple[str, Any] | None:
        """(the setting that counts, its value), where the engine has such settings."""
        if not self.sampler.modes or self.sampler.engines.get(self.engine, Scores.UNKNOWN) is not None:
            return None
        given = ((name, self.value_of(name)) for name in self.sampler.modes)
        return next(
            ((name, value) for name, value in given if value is not None), (self.sampler.modes[-1], self.sampler.default_mode)
        )

    @property
    def asked(self) -> str | None:
        """The setting of the kind of log-probabilities, or of the engine, whose value is not known here."""
        if self.engine is UNKNOWN:
            return self.sampler.engine
        return self.mode[0] if self.mode is not None and self.mode[1] is UNKNOWN else None

    @property
    def scores(self) -> Scores:
        if self.engine is UNKNOWN:
            return Scores.UNKNOWN
        found = self.sampler.engines.get(self.engine, Scores.UNKNOWN)
        return found if found is not None else MODES.get(str(self.mode[1]) if self.mode else "", Scores.UNKNOWN)

    def typed(self, name: str, value: Any) -> str:
        return self.sampler.typed(name, as_typed(value))

    def in_words(self) -> str:
        return ", ".join(self.typed(name, value) for name, value in self.on.items())

    def off_in_words(self, names: Sequence[str] = ()) -> str:
        return " and ".join(self.typed(name, self.sampler.filters[name].off[0]) for name in names or self.on)

    def scores_in_words(self) -> str:
        by = f" ({self.typed(*self.mode)})" if self.mode else ""
        if self.scores == Scores.UNKNOWN:
            return f"whether the log-probabilities of {self.engine}{by} are {Scores.KEPT} cannot be known here"
        return f"the log-probabilities of {self.engine}{by} are {self.scores}"


def names_of(sampler: Sampler) -> tuple[str, ...]:
    """The settings that the check reads."""
    replay = () if sampler.replay is None else sampler.replay.by
    more = (*sampler.modes, *([sampler.engine] if sampler.engine else []), *sampler.reshaped, *sampler.unsettled)
    return tuple(dict.fromkeys((*sampler.filters, *replay, *more)))


def readers_of(config: PolicyLossConfig) -> list[str]:
    """What of our loss compares with the policy that sampled, in words."""
    correction, loss = CorrectionSettings.of(config), get_policy_loss(config.policy_loss)
    found = []
    if correction.has_factor:
        found.append(f"importance_correction={correction.kind}")
    if correction.sequence_delta is not None:
        found.append(f"off_policy_sequence_delta={correction.sequence_delta}")
    if "rollout_log_probs" in loss.inputs_needed:
        found.append(f"the policy loss {loss.name}")
    return found


def mixers_of(config: PolicyLossConfig, estimator: str) -> list[str]:
    """What of our loss mixes a token's score with other tokens', or compares two of them for the KL, in words. estimator: the
    setting of the KL estimator, as it is typed."""
    loss = get_policy_loss(config.policy_loss)
    found = [] if loss.level == "token" else [f"the policy loss {loss.name}, whose ratio is of more than one token"]
    declared = KL_ESTIMATORS.find_or_none(config.kl_estimator)
    if config.kl_coefficient and declared is not None and declared.takes_log_ratio:
        found.append(f"{estimator}={config.kl_estimator}")
    return found


def flags_that_read(value_of: Callable[[str], Any]) -> list[str]:
    """The same for flags, whose values are not checked yet, by our names."""
    given = {name: value_of(name) for name in ("importance_correction", "off_policy_sequence_delta")}
    found = [f"{flag_of(name)} {value}" for name, value in given.items() if value not in (None, NO_CORRECTION)]
    loss = value_of("policy_loss")
    if loss in policy_loss_names() and "rollout_log_probs" in get_policy_loss(loss).inputs_needed:
        found.append(f"--policy-loss {loss}")
    return found


def judge_sampling(
    sampler: Sampler,
    value_of: Callable[[str], Any],  # of a setting of names_of(sampler); None: not set; settings.UNKNOWN: not known here
    readers: Sequence[str],  # what compares with the sampler, as it is typed
    *,
    is_our_loss: bool = True,
    remedy: str | None = None,
) -> SamplingVerdict:
    """Refuses what would take the kept mass for a difference of policies, and warns where the sampler is another policy alone.

    is_our_loss: False where the host's own loss trains, which may know the kept tokens. remedy: the flag with which our loss
    is given them; None: it cannot be.
    """
    launch = _Launch(sampler, value_of)
    if launch.on and launch.replayed:
        return _judge_replay(launch, readers)
    if sampler.recomputes:
        found = judge_recomputed_sampling(sampler, value_of, readers)
    else:
        found = _judge_filters(launch, readers, is_our_loss=is_our_loss, remedy=remedy)
    more = _judge_reshaped(launch, readers)
    return SamplingVerdict(found.problems + more.problems, found.warnings + more.warnings, found.keeps_a_part)


def _judge_filters(launch: _Launch, readers: Sequence[str], *, is_our_loss: bool, remedy: str | None) -> SamplingVerdict:
    sampler, value_of, read = launch.sampler, launch.value_of, " and ".join(readers)
    warnings = []
    if launch.unknown and readers:
        names = ", ".join(launch.unknown)
        warnings.append(f"{names}: not known here; beside {read} it must be off: {launch.off_in_words(launch.unknown)}")
    filtered = [name for name in launch.on if name in launch.sampler.trainer_keeps]
    if filtered and not is_our_loss:  # the trainer's scores and the sampler's are of the same tokens
        launch = _Launch(launch.sampler, lambda name: None if name in filtered else value_of(name))
    if not launch.on:
        return SamplingVerdict(warnings=tuple(warnings))
    given, off = launch.in_words(), launch.off_in_words()
    if remedy is None and sampler.replay is not None:
        remedy = sampler.replay.in_words()
    replay = "" if remedy is None else f"add {remedy}, or "
    if filtered and is_our_loss:
        problem = (
            f"{given}: the trainer computes old log-probabilities among the kept tokens, and our loss those of the whole "
            f"vocabulary, so that the ratio is off by the kept mass; {replay}set {off}, or train with the host's own loss"
        )
        return SamplingVerdict((problem,), tuple(warnings), True)
    if not readers or launch.scores == Scores.WHOLE:
        right = (
            f"{launch.scores_in_words()}, so {read} is not off by the kept mass" if readers else "the ratio of the loss is right"
        )
        warnings.append(
            f"{given}: the sampler keeps a part of the vocabulary; {right}, but the policy that samples is another one than the "
            f"policy that trains, and no weight makes up for tokens that are never sampled; {off} samples from the policy itself"
            + ("" if remedy is None else f", and {remedy} trains the policy that samples")
        )
        return SamplingVerdict((), tuple(warnings), True)
    if launch.asked is not None:
        warnings.append(
            f"{given}: the sampler keeps a part of the vocabulary, and {launch.asked} is not known here: {read} is right only "
            f"where the sampler's log-probabilities are {Scores.WHOLE}; else set {off}"
        )
        return SamplingVerdict((), tuple(warnings), True)
    raw = f", or {launch.typed(launch.mode[0], 'raw_logprobs')} at temperature 1" if launch.mode else ""
    problem = (
        f"{given} beside {read}: the sampler keeps a part of the vocabulary, and {launch.scores_in_words()}; the trainer's are "
        f"{Scores.WHOLE}, so every weight would be the kept mass, which is below 1 although nothing is off-policy; "
        f"{replay}set {off}{raw}, or remove {read}"
    )
    return SamplingVerdict((problem,), tuple(warnings), True)


def _judge_replay(launch: _Launch, readers: Sequence[str]) -> SamplingVerdict:
    """The trainer's scores are among the sampler's sets: the sampler's must be too, and of the same logits."""
    replay, read, off = launch.sampler.replay, " and ".join(readers), launch.off_in_words()
    assert replay is not None
    told = " and ".join(starmap(launch.typed, launch.replayed.items()))
    problems, warnings = changed_under_replay(launch.sampler, launch.value_of, told), []
    is_there = replay.is_there()
    if is_there is None:
        warnings.append(f"{told}: right where the trainer has {replay.mark}, and none is installed here; else set {off}")
    elif not is_there:
        problems.append(f"{told}: this trainer has no {replay.mark}, and keeps tokens by its own logits; update it, or set {off}")
    if readers and launch.scores != Scores.KEPT:
        how = f"set {launch.typed(launch.mode[0], 'processed_logprobs')}, or " if launch.mode else ""
        text = (
            f"{told} beside {read}: the trainer scores among the kept tokens, and {launch.scores_in_words()}, so that every weight "
            f"may be off by the kept mass; {how}remove {read}"
        )
        (problems if launch.asked is None else warnings).append(text)
    return SamplingVerdict(tuple(problems), tuple(warnings), replays=True)


def changed_under_replay(sampler: Sampler, value_of: Callable[[str], Any], told: str) -> list[str]:
    """What changes a token's distribution behind the set that the sampler returns. told: how replay is typed."""
    launch = _Launch(sampler, value_of)
    draft = (
        "the set that comes with a token need not be the one that it was drawn from: speculative decoding takes the tokens of a "
        "draft, and a logits processor changes the logits"
    )
    penalty = "the sampler draws from logits that this changes, and the trainer scores the model's own"
    found = [*((one, penalty) for one in launch.reshaped.items()), *((one, draft) for one in launch.unsettled.items())]
    return [f"{launch.typed(*one)} with {told}: {why}; remove it, or sample from the whole vocabulary" for one, why in found]


def _judge_reshaped(launch: _Launch, readers: Sequence[str]) -> SamplingVerdict:
    """Penalties: the sampler's scores are of changed logits, unless they are raw."""
    if not launch.reshaped:
        return SamplingVerdict()
    given, read = ", ".join(starmap(launch.typed, launch.reshaped.items())), " and ".join(readers)
    off = " and ".join(launch.typed(name, launch.sampler.reshaped[name].off[0]) for name in launch.reshaped)
    if readers and launch.scores == Scores.KEPT:
        mode = "" if launch.mode is None else f", or {launch.typed(launch.mode[0], 'raw_logprobs')} at temperature 1"
        text = f"the sampler's log-probabilities are of logits that this changes, and every weight would be off by that; set {off}"
        return SamplingVerdict((f"{given} beside {read}: {text}{mode}, or remove {read}",))
    text = "the sampler draws from logits that this changes, so the policy that samples is another one than the policy that trains"
    return SamplingVerdict((), (f"{given}: {text}; {off} samples from the policy itself",))


def judge_recomputed_sampling(sampler: Sampler, value_of: Callable[[str], Any], readers: Sequence[str]) -> SamplingVerdict:
    """NeMo-RL: its trainer keeps tokens by the same settings and its own logits, and gives one outside its set the score 0.0.

    readers: what compares with the sampler, or mixes the tokens of a sample. Else such a token is known by a sampler's score other
    than 0, so this must be of the kept tokens too: where one token is kept, both are 0.
    """
    launch, read = _Launch(sampler, value_of), " and ".join(readers)
    warnings = []
    if launch.unknown:
        names = ", ".join(launch.unknown)
        warnings.append(f"{names}: not known here; our losses are judged as with {launch.off_in_words(launch.unknown)}")
    if not launch.on:
        return SamplingVerdict(warnings=tuple(warnings))
    given, off = launch.in_words(), launch.off_in_words()
    if sampler.replay is not None:
        off = f"{off}, or {sampler.replay.in_words()}"
    why = "NeMo-RL's trainer keeps tokens by the same settings, and a token that it leaves out has log-probability 0.0"
    if launch.scores != Scores.KEPT and launch.asked is None:
        how = f"set {launch.typed(launch.mode[0], 'processed_logprobs')}, or {off}" if launch.mode else f"set {off}"
        problem = f"{given}: {why}; {launch.scores_in_words()}, so such a token cannot be told from a sure one: {how}"
        return SamplingVerdict((problem,), tuple(warnings), True)
    if readers:
        problem = f"{given} beside {read}: {why}, and counts there as one of probability 1; set {off}, or remove {read}"
        return SamplingVerdict((problem,), tuple(warnings), True)
    warnings.append(
        f"{given}: {why}; our loss leaves it out of the policy term and its metrics, and counts it in every weight; its share "
        f"is {UNSCORED}; {off} samples from the policy itself"
    )
    return SamplingVerdict((), tuple(warnings), True)
