"""Reads the settings a.b=value of a launch line of SkyRL, and says what our loss makes of them: doctor, explain.

A setting that is not on the line has SkyRL's default. A value that only the shell knows is not judged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from megatron_rl.config import CorrectionSettings, KLEstimator, PolicyLossConfig
from megatron_rl.errors import ConfigError
from megatron_rl.hosts import skyrl
from megatron_rl.hosts.dense_rows import CORRECTION_SETTINGS, numbers, sample_in_words
from megatron_rl.hosts.given import clip_to_type
from megatron_rl.hosts.sampling import names_of
from megatron_rl.hosts.sections import SKYRL, values_for_groups
from megatron_rl.hosts.settings_line import (
    LOSS_SETTINGS,
    UNKNOWN,
    ReadFile,
    Row,
    advice_of,
    idle_settings,
    in_words,
    read_overrides,
)
from megatron_rl.loss_hub import get_loss_aggregation, get_policy_loss

ALGORITHM = "trainer.algorithm"
LOSS, REDUCTION = f"{ALGORITHM}.policy_loss_type", f"{ALGORITHM}.loss_reduction"
# SkyRL's defaults of what our losses read; tests/test_skyrl.py compares them with a checkout.
DEFAULTS: dict[str, Any] = {
    "policy_loss_type": "regular",
    "loss_reduction": "token_mean",
    "use_kl_loss": True,
    "use_kl_in_reward": False,
    "kl_loss_coef": 0.001,
    "kl_estimator_type": "k3",
    "use_entropy_loss": False,
    "entropy_loss_coef": 0.01,
    skyrl.DIVISOR: None,
    **skyrl.CLIPS,
    **dict(skyrl.PARAMETERS.values()),
}
CORRECTION = "off_policy_correction"
# A correction is on where one of these is set; of the last two, both.
SWITCHES = ("tis_ratio_type", "sequence_mask_metric", "outlier_token_is_threshold_low", "outlier_token_is_threshold_high")
MASK_SWITCHES = ("token_mask_is_threshold_low", "token_mask_is_threshold_high")
# Our settings that reach a loss in SkyRL.
HONOURED = (*LOSS_SETTINGS, *CORRECTION_SETTINGS, "kl_coefficient", "kl_estimator")
NOT_OURS = "its own settings decide on entropy and temperature"
# SkyRL's estimates of KL that have the name, value and gradient of ours; tests/test_skyrl.py compares them.
KL_ESTIMATORS = (KLEstimator.K1, KLEstimator.K2, KLEstimator.K3)
KL_TYPES = (*KL_ESTIMATORS, "abs")
READ = (*(f"{ALGORITHM}.{name}" for name in (*DEFAULTS, *SKYRL.names)), *names_of("skyrl"))


def is_of_skyrl(words: Sequence[str]) -> bool:
    return any(word == skyrl.ENTRY or word.startswith((skyrl.DOOR, f"{LOSS}={skyrl.PREFIX}")) for word in words)


def judge(words: Sequence[str], read_file: ReadFile) -> Iterator[Row]:
    """read_file: not used, SkyRL's settings are on the line."""
    start = words.index(skyrl.ENTRY) + 1 if skyrl.ENTRY in words else 0
    given = words[start:]
    for word in given:
        if word.startswith("+"):
            yield Row(word.partition("=")[0], "SkyRL refuses settings with a +: remove it", is_wrong=True)
    values = read_overrides(given)
    for name, value in values.items():  # SkyRL refuses a name that it does not have
        whole = next((whole for whole in (LOSS, REDUCTION) if name != whole and whole.endswith(f".{name}")), None)
        if whole is not None:
            yield Row(name, f"SkyRL has no such setting: type its whole name, {whole}={value}", is_wrong=True)
    is_ours = str(values.get(LOSS)).startswith(skyrl.PREFIX)
    plain = read_overrides([word for word in given if not word.startswith("+")])
    yield from SKYRL.judge(plain, is_ours=is_ours)
    if groups := list(values_for_groups("SkyRL", values, READ, LOSS)):
        yield from groups
        return
    doors = [word.removeprefix(skyrl.DOOR) for word in given if word.startswith(skyrl.DOOR)]
    name = values.get(LOSS, DEFAULTS["policy_loss_type"])
    if name is UNKNOWN:
        yield Row(LOSS, "not known here, so the loss is not judged", is_note=True)
        return
    is_ours = str(name).startswith(skyrl.PREFIX)
    if skyrl.__name__ not in doors[:1]:  # SkyRL takes the first
        if not is_ours:
            text = f"{name} is SkyRL's own: none of our losses is chosen"
            yield Row(LOSS, f"{text}; {skyrl.DOOR}{skyrl.__name__} and {LOSS}={skyrl.PREFIX}<loss> choose one", is_note=True)
            return
        text = f"without {skyrl.DOOR}{skyrl.__name__} SkyRL has no {name}: add it"
        yield Row(skyrl.DOOR.removesuffix("="), text, is_wrong=True)
    elif skyrl.ENTRY not in words:
        text = f"it is read by {skyrl.ENTRY} alone: start -m {skyrl.ENTRY}"
        yield Row(skyrl.DOOR.removesuffix("="), text, is_wrong=True)
    algorithm = algorithm_of(values)
    if unknown := [f"{ALGORITHM}.{name}" for name in _unknown(values)]:
        yield Row(LOSS, f"not judged: the value of {', '.join(unknown)} is not known here", is_note=True)
        return
    own, is_corrected = skyrl.own_words(words), corrects(algorithm.off_policy_correction)
    if unknown := [f"{skyrl.PREFIX}{name}" for name, value in own.items() if value is UNKNOWN]:
        yield Row(LOSS, f"not judged: the value of {', '.join(unknown)} is not known here", is_note=True)
        return
    try:
        config = skyrl.read_settings(algorithm, own, is_corrected=is_corrected, typed=skyrl.typed_clips(given))
    except ConfigError as error:
        yield from (Row(LOSS, problem, is_wrong=True) for problem in error.problems)
        return
    sampling = skyrl.judge_sampler(config, values.get, is_corrected=is_corrected)
    yield from (Row("sampling", text, is_wrong=True) for text in sampling.problems)
    yield from (Row("sampling", text, is_note=True) for text in sampling.warnings)
    weight = get_loss_aggregation(config.loss_aggregation).weight_in_words({"L": config.loss_aggregation_divisor})
    yield Row(LOSS, f"{name}, {algorithm.loss_reduction}, {numbers(config)}, weight of a token {weight}, in the advantages")
    is_step_wise = values.get(skyrl.STEP_WISE, False)
    several = skyrl.SEVERAL_ROWS if is_step_wise else None
    yield Row("sample", sample_in_words(config.loss_aggregation, several), is_note=several is not None)
    yield from advice_of(config)
    if is_corrected:
        yield Row(CORRECTION, "SkyRL's own: its weights multiply our loss")
    elif CorrectionSettings.of(config).is_on:
        yield Row("correction", f"{config.importance_correction}, for the gap between sampler and trainer")
    if (algorithm.use_kl_loss or algorithm.use_kl_in_reward) and algorithm.kl_estimator_type not in KL_TYPES:
        text = f"SkyRL has no {algorithm.kl_estimator_type}: set one of {', '.join(KL_TYPES)}"
        yield Row("kl_estimator_type", text, is_wrong=True)
    terms = ["KL"] * bool(algorithm.use_kl_loss) + ["entropy"] * bool(algorithm.use_entropy_loss)
    if terms:
        text = f"SkyRL's own {' and '.join(terms)}: the mean over a micro-batch, then over micro-batches"
        yield Row("KL and entropy", text, is_note=True)


def judge_settings(config: PolicyLossConfig) -> tuple[list[str], list[str]]:
    """(the settings of a launch line that give SkyRL these, their problems)."""
    reductions = {ours: theirs for theirs, ours in skyrl.REDUCTIONS.items()}
    given: dict[str, Any] = {LOSS: f"{skyrl.PREFIX}{config.policy_loss}"}
    problems = idle_settings(config, HONOURED, f"SkyRL: {NOT_OURS}")
    if reduction := next((theirs for ours, theirs in reductions.items() if ours == config.loss_aggregation), None):
        given[REDUCTION] = reduction
    else:
        text = f"SkyRL's driver scales advantages by {', '.join(reductions)} alone; choose one of them"
        problems.append(f"--loss-aggregation {config.loss_aggregation}: {text}")
    clips: dict[str, float | None] = {}
    clips |= clip_to_type(get_policy_loss(config.policy_loss), config.clip_ratio_low, config.clip_ratio_high, skyrl.CLIPS)
    typed = tuple(clips)
    default = PolicyLossConfig()
    own = {name: value for name in CORRECTION_SETTINGS if (value := getattr(config, name)) != getattr(default, name)}
    own |= {name: value for name, value in config.loss_parameters.items() if name not in skyrl.PARAMETERS}
    clips |= {skyrl.PARAMETERS[name][0]: value for name, value in config.loss_parameters.items() if name in skyrl.PARAMETERS}
    numbers_given = clips | {skyrl.DIVISOR: config.loss_aggregation_divisor}
    given |= {f"{ALGORITHM}.{name}": value for name, value in numbers_given.items() if value is not None}
    given[f"{ALGORITHM}.use_kl_loss"] = bool(config.kl_coefficient)  # SkyRL's default is a KL term
    if config.kl_coefficient:
        given[f"{ALGORITHM}.kl_loss_coef"] = config.kl_coefficient
        given[f"{ALGORITHM}.kl_estimator_type"] = str(config.kl_estimator)
        if config.kl_estimator not in KL_ESTIMATORS:
            text = f"SkyRL's workers compute the KL term, and have {', '.join(KL_ESTIMATORS)} of ours"
            problems.append(f"--kl-estimator {config.kl_estimator}: {text}; choose one of them")
    try:
        if reduction:
            skyrl.read_settings(algorithm_of(given), own, is_corrected=False, typed=typed)
    except ConfigError as error:
        problems += error.problems
    words = in_words(given | {f"{skyrl.PREFIX}{name}": value for name, value in own.items()})
    return [f"{skyrl.DOOR}{skyrl.__name__}", *words], problems


def algorithm_of(values: Mapping[str, Any]) -> SimpleNamespace:
    """SkyRL's trainer.algorithm with these settings, by their whole names."""
    found = SimpleNamespace(**{CORRECTION: SimpleNamespace(**dict.fromkeys((*SWITCHES, *MASK_SWITCHES)))})
    given = {name.removeprefix(f"{ALGORITHM}."): value for name, value in values.items() if name.startswith(f"{ALGORITHM}.")}
    for name, value in (DEFAULTS | given).items():
        *parents, last = name.split(".")
        place = found
        for parent in parents:
            if not hasattr(place, parent):
                setattr(place, parent, SimpleNamespace())
            place = getattr(place, parent)
        setattr(place, last, value)
    return found


def corrects(given: SimpleNamespace) -> bool:
    """SkyRL's off_policy_correction_enabled, for settings without a SkyRL."""
    has_mask = all(getattr(given, name) is not None for name in MASK_SWITCHES)
    return has_mask or any(getattr(given, name) is not None for name in SWITCHES)


def _unknown(values: Mapping[str, Any]) -> Iterator[str]:
    for name in values:
        known = name.removeprefix(f"{ALGORITHM}.")
        if values[name] is UNKNOWN and (known in DEFAULTS or known.startswith(CORRECTION)):
            yield known
