"""Reads the YAML that a launch line of ROLL names, and says what our loss makes of it: `megatron-rl doctor`, `megatron-rl explain`.

A setting that is not in the YAML has ROLL's default. What only Hydra or the environment knows is not judged.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_rl.config import CorrectionSettings, PolicyLossConfig
from megatron_rl.errors import ConfigError
from megatron_rl.hosts import roll
from megatron_rl.hosts.dense_rows import CORRECTION_SETTINGS, numbers, sample_in_words
from megatron_rl.hosts.given import Given, not_numbers
from megatron_rl.hosts.sampling import value_at
from megatron_rl.hosts.sections import ROLL_CLIPS, ROLL_NUMBERS, ROLL_WORKER, values_for_groups
from megatron_rl.hosts.settings_line import (
    LOSS_SETTINGS,
    UNKNOWN,
    ReadFile,
    Row,
    advice_of,
    as_typed,
    idle_settings,
    put,
    read_value,
)
from megatron_rl.loss_hub import get_policy_loss

SCRIPT = re.compile(r"(?:.*/)?start_\w+_pipeline\.py")
OUR_SCRIPT = re.compile(r"(?:.*/)?start_rlvr\w*_pipeline\.py")
WORKER_CLASS, VARIANT = "actor_train.worker_cls", "actor_train.pg_variant"
# ROLL's defaults of what our worker reads, of the pipeline and of actor_train; tests/test_roll.py compares them with a checkout.
PIPELINE: dict[str, Any] = {
    "rollout_batch_size": 128,
    "num_return_sequences_in_group": 1,
    "ppo_epochs": 1,
    "adv_estimator": "gae",
    "init_kl_coef": 0.2,
    "use_pg_clip_range": False,
    "pg_clip": 0.2,
    "pg_clip_low": 0.2,
    "pg_clip_high": 0.2,
    "dual_clip_loss": False,
    "use_kl_loss": False,
    "kl_loss_coef": 0,
    "entropy_loss_coef": 0,
    "enable_old_logprobs_recompute": False,
    "force_disable_old_logprobs_recompute": False,
    **{name: only for name, (only, _) in roll.ONLY.items()},
}
WORKER: dict[str, Any] = {"pg_variant": None, "use_dynamic_batching_in_train": False, "apply_loss_scale": True}
TRAINING: dict[str, Any] = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
DEFAULT_STRATEGY = "fsdp2_train"
# Estimators for which ROLL always computes old log-probabilities.
RECOMPUTING = ("step_reinforce", "gigpo")
HONOURED = (*LOSS_SETTINGS, *CORRECTION_SETTINGS, "kl_coefficient", "kl_estimator", "entropy_coefficient")
NOT_OURS = "its own settings decide on temperature and batches"
# A name of a YAML that is more similar than this to one of PIPELINE is a slip: no other of ROLL's is.
CLOSEST_NAME = 0.85
# Sections of a YAML that are read here.
GROUPS = (
    *("system_envs", "actor_train", "actor_train.training_args", "actor_train.strategy_args", "actor_train.system_envs"),
    *("actor_infer", "actor_infer.generating_args", "actor_infer.strategy_args"),
)
INTERPOLATION = re.compile(r"\$\{([\w.]+)\}")


def is_of_roll(words: Sequence[str]) -> bool:
    return any(SCRIPT.fullmatch(word) for word in words)


def judge(words: Sequence[str], read_file: ReadFile) -> Iterator[Row]:
    """read_file: the mapping of a YAML file; raises ConfigError where it cannot be read."""
    script = next((word for word in words if SCRIPT.fullmatch(word)), "")
    path = _file_of(words, Path(script))
    if read_value(str(path)) is UNKNOWN:
        yield Row("settings", f"{path} is not known here: nothing of ROLL's YAML is judged", is_note=True)
        return
    try:
        settings = dict(read_file(path))
    except ConfigError as error:
        yield Row("settings", f"{error}. ROLL looks in the folder --config_path beside its script for --config_name", is_wrong=True)
        return
    if path.is_absolute() and not Path(script).is_absolute():
        yield Row("settings", f"Hydra takes a --config_path that is relative to the folder of {script}", is_wrong=True)
    yield Row("settings", f"{path}")
    if parents := settings.pop("defaults", None):
        yield Row("settings", f"defaults: {parents} is not read, and what those files set is not judged", is_note=True)
    settings = _resolved(settings, settings)
    values = {name: value_at(settings, name) for name in GROUPS}
    if no_groups := {name: value for name, value in values.items() if value is not None and not isinstance(value, Mapping)}:
        unknown = [name for name, value in no_groups.items() if value is UNKNOWN]
        yield from (Row(name, "not known here: nothing of this YAML is judged", is_note=True) for name in unknown)
        yield from values_for_groups("ROLL", no_groups, [f"{name}." for name in GROUPS], VARIANT)
        return
    train = settings.get("actor_train") or {}
    if train.get("worker_cls") != roll.WORKER:
        variant = train.get("pg_variant")
        is_meant = isinstance(variant, str) and "." in variant
        idle = f", and {VARIANT}: {variant} has no effect" if is_meant else ""
        remedy = f"for ours set {WORKER_CLASS}: {roll.WORKER}" + ("" if is_meant else f" and {VARIANT}: <loss>.<aggregation>")
        yield Row(WORKER_CLASS, f"ROLL trains its own loss{idle}; {remedy}", is_wrong=is_meant, is_note=not is_meant)
        return
    if not OUR_SCRIPT.fullmatch(script):
        yield Row("script", f"{script} starts another pipeline: {roll.OUR_PIPELINE}", is_wrong=True)
        return
    yield from _names_and_numbers(settings, train)
    unknown = sorted(_unknown(settings))
    if unknown:
        yield Row(VARIANT, f"not judged: the value of {', '.join(unknown)} is not known here", is_note=True)
        return
    try:
        found = roll.read_settings(*configs_of(settings))
    except ConfigError as error:
        yield from (Row(VARIANT, problem, is_wrong=True) for problem in error.problems)
        return
    config = found.config
    yield from _lost_clip(settings, config)
    weight = found.record.weight_in_words({"L": config.loss_aggregation_divisor})
    yield Row(VARIANT, f"{found}, {numbers(config)}, weight of a token {weight}")
    yield Row("sample", sample_in_words(config.loss_aggregation, None))
    yield from advice_of(config)
    yield from (Row("sampling", text, is_note=True) for text in found.warnings)
    if CorrectionSettings.of(config).is_on:
        yield Row("correction", f"{config.importance_correction}, for the gap between sampler and trainer")
    if found.is_on_policy:
        yield Row("old log-probabilities", "ROLL computes none, so the ratio is 1", is_note=True)


def _names_and_numbers(settings: Mapping[str, Any], train: Mapping[str, Any]) -> Iterator[Row]:
    """ROLL drops a name that it does not have without a word."""
    for name, value in settings.items():
        if name in ROLL_NUMBERS:
            yield from (Row(name, problem, is_wrong=True) for problem in not_numbers([Given(name, value)]))
        elif name not in PIPELINE:
            known, cutoff = (ROLL_CLIPS, 0.0) if name.startswith("pg_") else ([*PIPELINE], CLOSEST_NAME)
            if close := get_close_matches(name, known, 1, cutoff):
                yield Row(name, f"ROLL has no such setting, and drops it without a word: did you mean {close[0]}?", is_wrong=True)
    yield from ROLL_WORKER.judge({f"{ROLL_WORKER.prefix}{name}": value for name, value in train.items()})


def _lost_clip(settings: Mapping[str, Any], config: PolicyLossConfig) -> Iterator[Row]:
    """What a YAML says of the clip and a worker, which has ROLL's defaults too, cannot know."""
    own = get_policy_loss(config.policy_loss).clip_ratios
    if own is None or own == (roll.CLIP, roll.CLIP):
        return
    words = f"{config.policy_loss} has {own[0]:g}/{own[1]:g} of its own"
    if not settings.get("use_pg_clip_range") and settings.get("pg_clip") == roll.CLIP and not settings.get("dual_clip_loss"):
        text = f"{roll.CLIP} is ROLL's default too, so its worker cannot tell that you wrote it, and {words}"
        remedy = f"set use_pg_clip_range: true, pg_clip_low: {roll.CLIP} and pg_clip_high: {roll.CLIP}"
        yield Row("pg_clip", f"{text}; remove it, or {remedy}", is_wrong=True)
    elif settings.get("use_pg_clip_range"):
        for name, side in zip(("pg_clip_low", "pg_clip_high"), own, strict=True):
            if name not in settings and side != roll.CLIP:
                text = f"use_pg_clip_range: true without {name} trains ROLL's default, {roll.CLIP}, and {words}; write {name}"
                yield Row(name, text, is_wrong=True)


def judge_settings(config: PolicyLossConfig) -> tuple[list[str], list[str]]:
    """(the lines of a YAML that give ROLL these settings, their problems)."""
    given: dict[str, Any] = {WORKER_CLASS: roll.WORKER, VARIANT: f"{config.policy_loss}.{config.loss_aggregation}"}
    clips: dict[str, Any] = {"pg_clip_low": config.clip_ratio_low, "pg_clip_high": config.clip_ratio_high}
    parameters = dict(config.loss_parameters)
    if dual_clip := parameters.pop("clip_ratio_c", None):
        given |= {"dual_clip_loss": True, "pg_clip": (dual_clip - 1) / 2}  # ROLL's c is 1 + 2 pg_clip
    if dual_clip or any(value is not None for value in clips.values()):
        own = get_policy_loss(config.policy_loss).clip_ratios or (None, None)
        sides = zip(clips.items(), own, strict=True)
        given |= {"use_pg_clip_range": True} | {name: side if value is None else value for (name, value), side in sides}
    if config.kl_coefficient:
        given |= {"use_kl_loss": True, "kl_loss_coef": config.kl_coefficient}
    if config.entropy_coefficient:
        given["entropy_loss_coef"] = config.entropy_coefficient
    ours: dict[str, Any] = {**parameters, roll.DIVISOR: config.loss_aggregation_divisor}
    if config.kl_estimator != PolicyLossConfig().kl_estimator:
        ours["kl_estimator"] = str(config.kl_estimator)
    if (correction := CorrectionSettings.of(config)).is_on:
        ours |= {name: getattr(config, name) for name in CORRECTION_SETTINGS}
        if correction.kind == "none":
            ours.pop("importance_correction")
    for name, value in ours.items():
        if value is not None:
            given[f"actor_train.system_envs.{roll.VARIABLES}{name.upper()}"] = (
                f"'{as_typed(value)}'" if isinstance(value, float) else value
            )
    given = {name: value for name, value in given.items() if value is not None}
    # The step is what explain was given, so batches are not judged.
    settings: dict[str, Any] = {"actor_train": {"strategy_args": {"strategy_name": roll.STRATEGY}}}
    for name, value in given.items():
        put(settings, name.split("."), value.strip("'") if isinstance(value, str) else value)
    problems = idle_settings(config, HONOURED, f"ROLL: {NOT_OURS}")
    try:
        roll.read_settings(*configs_of(settings))
    except ConfigError as error:
        problems += error.problems
    return [f"{name}: {_shown(value)}" for name, value in given.items()], problems


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else as_typed(value)


def configs_of(settings: Mapping[str, Any]) -> tuple[SimpleNamespace, SimpleNamespace]:
    """What our worker is given: ROLL's actor_train and its pipeline."""
    train, pipeline = dict(settings.get("actor_train") or {}), {name: settings.get(name, own) for name, own in PIPELINE.items()}
    strategy = dict(train.get("strategy_args") or {"strategy_name": DEFAULT_STRATEGY})
    layout = strategy.get("strategy_config") or {}
    numbers_of_training = TRAINING | dict(train.get("training_args") or {})
    worker = SimpleNamespace(
        **{name: train.get(name, own) for name, own in WORKER.items()},
        system_envs=dict(settings.get("system_envs") or {}) | dict(train.get("system_envs") or {}),
        strategy_args=SimpleNamespace(strategy_name=strategy.get("strategy_name", DEFAULT_STRATEGY), strategy_config=layout),
        training_args=SimpleNamespace(**numbers_of_training),
        device_mapping=_devices(train.get("device_mapping")),
    )
    batch = pipeline["rollout_batch_size"] * pipeline["num_return_sequences_in_group"]
    if worker.device_mapping is None:  # not known here, and so not judged
        worker.device_mapping = list(range(roll.ranks_of_model(layout)))
        worker.training_args = SimpleNamespace(per_device_train_batch_size=1, gradient_accumulation_steps=batch)
    correction = settings.get("train_infer_correction") or {}
    pipeline["actor_infer"] = settings.get("actor_infer")
    pipeline["train_infer_correction"] = SimpleNamespace(
        is_weight=SimpleNamespace(enabled=bool((correction.get("is_weight") or {}).get("enabled"))),
        filters=[SimpleNamespace(enabled=bool(one.get("enabled"))) for one in correction.get("filters") or []],
    )
    # As ROLL's PPOConfig decides it.
    has_several_steps = batch >= 2 * roll.step_of(worker)
    recomputes = pipeline["adv_estimator"] in RECOMPUTING or pipeline["init_kl_coef"] > 0 or has_several_steps
    is_forced_off = pipeline["force_disable_old_logprobs_recompute"]
    pipeline["enable_old_logprobs_recompute"] = not is_forced_off and (recomputes or pipeline["enable_old_logprobs_recompute"])
    return worker, SimpleNamespace(**pipeline)


def _file_of(words: Sequence[str], script: Path) -> Path:
    """Hydra looks for the folder beside the script."""
    given = {"--config_path": "config", "--config_name": "sppo_config"}  # the script's defaults
    for index, word in enumerate(words):
        flag, _, value = word.partition("=")
        if flag in given:
            given[flag] = value or "".join(words[index + 1 : index + 2])
    folder, name = given.values()
    return script.parent / folder / f"{name.removesuffix('.yaml')}.yaml"


def _resolved(value: Any, root: Mapping[str, Any], depth: int = 0) -> Any:
    """With OmegaConf's ${name} replaced. UNKNOWN: what stands in no line of the file."""
    if isinstance(value, Mapping):
        return {name: _resolved(inner, root, depth) for name, inner in value.items()}
    if isinstance(value, list):
        return [_resolved(inner, root, depth) for inner in value]
    if not isinstance(value, str):
        return value
    if depth < 8 and (whole := INTERPOLATION.fullmatch(value)):
        found: Any = root
        for part in whole[1].split("."):
            found = found.get(part, UNKNOWN) if isinstance(found, Mapping) else UNKNOWN
        return _resolved(found, root, depth + 1)
    return UNKNOWN if "${" in value else read_value(value)


def _unknown(settings: Mapping[str, Any]) -> Iterator[str]:
    """Settings that our worker reads and nobody knows here."""
    yield from (name for name in (*PIPELINE, "train_infer_correction") if _has_unknown(settings.get(name)))
    train = settings.get("actor_train") or {}
    names = (*WORKER, "system_envs", "strategy_args", "training_args")
    yield from (f"actor_train.{name}" for name in names if _has_unknown(train.get(name)))


def _has_unknown(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_unknown, value.values()))
    return value is UNKNOWN or (isinstance(value, list) and any(map(_has_unknown, value)))


def _devices(given: Any) -> list[int] | None:
    """list(range(0,16)), sums of such lists, or a list of numbers, which ROLL evaluates; None: another expression, or none."""
    if isinstance(given, str):
        found: list[int] = []
        for part in given.split("+"):
            match = re.fullmatch(r"\s*list\(range\(\s*(\d+)\s*(?:,\s*(\d+)\s*)?\)\)\s*", part)
            if match:
                ends = [int(number) for number in match.groups() if number]
                found += range(*ends)
                continue
            try:
                found += ast.literal_eval(part.strip())
            except (ValueError, SyntaxError, TypeError):
                return None
        return found
    return list(given) if isinstance(given, list) else None
