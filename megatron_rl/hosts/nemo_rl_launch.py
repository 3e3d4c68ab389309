"""Reads a launch line of NeMo-RL, its settings file and its overrides, and says what our loss makes of them: `megatron-rl doctor`.

A value that only the shell or OmegaConf knows is not judged. Without the settings file the overrides are judged alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_rl.config import CorrectionSettings, PolicyLossConfig
from megatron_rl.errors import ConfigError
from megatron_rl.hosts import launch, nemo_rl
from megatron_rl.hosts.dense_rows import CORRECTION_SETTINGS, numbers, sample_in_words
from megatron_rl.hosts.given import Given, clip_to_type, not_numbers
from megatron_rl.hosts.sampling import names_of, value_at
from megatron_rl.hosts.sections import NEMO_RL, values_for_groups
from megatron_rl.hosts.settings_line import (
    LOSS_SETTINGS,
    UNKNOWN,
    ReadFile,
    Row,
    advice_of,
    idle_settings,
    in_words,
    put,
    read_overrides,
    read_value,
)
from megatron_rl.loss_hub import get_loss_aggregation, get_policy_loss
from megatron_rl.validation import routes_of_flags

LAUNCHER, NAME = "megatron_rl.hosts.launch", f"loss_fn.{nemo_rl.KEY}"
# What run_grpo.py reads without --config, beside itself.
DEFAULT_FILE = Path("configs", "grpo_math_1B.yaml")
# Our settings that reach a loss in NeMo-RL.
HONOURED = (*LOSS_SETTINGS, *CORRECTION_SETTINGS, "kl_coefficient", "kl_estimator")
NOT_OURS = "its own settings decide on entropy and temperature"
OWN_MODE = {"policy.generation.vllm_cfg.logprobs_mode": "processed_logprobs"}  # in NeMo-RL's own files
READ = (NAME, *nemo_rl.SIZES, *names_of("nemo_rl"), "policy.megatron_cfg.enabled")
# NeMo-RL's scripts of other trainers; tests/test_sections.py looks at those of a checkout.
OTHER_SCRIPT = re.compile(r"run_(?!.*grpo).*\.py|run_grpo_single_controller\.py")
INHERITS, REPLACES = "defaults", "_override_"


def is_of_nemo_rl(words: Sequence[str]) -> bool:
    return any(word.lstrip("+").startswith(f"{NAME}") for word in words) or any(word.endswith("run_grpo.py") for word in words)


def judge(words: Sequence[str], read_file: ReadFile) -> Iterator[Row]:
    """read_file: the mapping of a YAML file; raises ConfigError where it cannot be read."""
    if not any(word == LAUNCHER for word in words):
        text = f"without python -m {LAUNCHER} before the script, NeMo-RL trains its own loss and reads no {NAME}"
        is_meant = any(word.lstrip("+").startswith(NAME) for word in words)
        yield Row("launcher", text, is_wrong=is_meant, is_note=not is_meant)
        return
    overrides, path = read_overrides(words), _file_of(words)
    yield from _script(words)
    if groups := list(values_for_groups("NeMo-RL", overrides, READ, NAME)):
        yield from groups
        return
    try:
        settings, is_whole = _inherited(path, read_file), True
        yield Row("settings", f"{path}, and {len(overrides)} override{'' if len(overrides) == 1 else 's'}")
    except ConfigError as error:
        settings, is_whole = {}, False
        yield Row("settings", f"{error}: only the overrides of the line are judged", is_note=True)
    known = settings.get("loss_fn", {})
    for word in words:  # hydra refuses a key that the file does not have
        name = word.partition("=")[0]
        if name.startswith(NAME) and name.removeprefix("loss_fn.") not in known:
            yield Row(name, f"NeMo-RL's settings have no {name}, so hydra needs ++ before it: type ++{word}", is_wrong=True)
        elif name in routes_of_flags():
            text = f"a flag of miles and slime, and no setting of NeMo-RL: loss and aggregation are ++{NAME}=<loss>.<aggregation>"
            yield Row(name, text, is_wrong=True)
    sizes = [Given(name, overrides.get(name)) for name in nemo_rl.SIZES]
    yield from (Row(NAME, problem, is_wrong=True) for problem in not_numbers(sizes))
    misplaced = [name for name in overrides if not name.startswith("loss_fn.")]
    yield from NEMO_RL.judge({name: overrides[name] for name in misplaced}, (nemo_rl.KEY,))
    for name, value in overrides.items():
        put(settings, name.split("."), value)
    loss_fn = settings.get("loss_fn", {})
    if any(loss_fn.get(name) is UNKNOWN for name in loss_fn):
        unknown = ", ".join(f"loss_fn.{name}" for name, value in loss_fn.items() if value is UNKNOWN)
        yield Row(NAME, f"{unknown}: not known here, so the loss is not judged", is_note=True)
        return
    try:
        found = nemo_rl.check_launch(_as_master_config(settings, is_whole=is_whole), nemo_rl.typed_of(words))
    except ConfigError as error:
        yield from (Row(NAME, problem, is_wrong=True) for problem in error.problems)
        return
    config, record = found.config, get_loss_aggregation(found.config.loss_aggregation)
    weight = record.weight_in_words({"L": config.loss_aggregation_divisor})
    carried = ", in the advantages" if found.has_companion else ""
    yield Row(NAME, f"{found}, {numbers(config)}, weight of a token {weight}{carried}")
    yield Row("sample", sample_in_words(config.loss_aggregation, None))
    yield from advice_of(config)
    yield from (Row("sampling", text, is_note=True) for text in found.warnings)
    if CorrectionSettings.of(config).is_on:
        yield Row("correction", f"{config.importance_correction}, for the gap between sampler and trainer")
    if config.kl_coefficient:
        yield Row("KL", f"ours, {config.kl_coefficient} x mean over samples, {config.kl_estimator}")
    elif penalty := loss_fn.get("reference_policy_kl_penalty"):
        mean = "samples" if loss_fn.get("token_level_loss") is False else "tokens"
        yield Row(
            "KL", f"NeMo-RL's own, {penalty} x mean over {mean}, whatever {record.name} does to the policy term", is_note=True
        )


def judge_settings(config: PolicyLossConfig) -> tuple[list[str], list[str]]:
    """(the overrides that give NeMo-RL these settings, their problems)."""
    given: dict[str, Any] = {nemo_rl.KEY: f"{config.policy_loss}.{config.loss_aggregation}"}
    given |= clip_to_type(get_policy_loss(config.policy_loss), config.clip_ratio_low, config.clip_ratio_high, nemo_rl.CLIPS)
    named = {nemo_rl.PARAMETERS.get(name, f"{nemo_rl.KEY}_{name}"): value for name, value in config.loss_parameters.items()}
    given |= named | {f"{nemo_rl.KEY}_{nemo_rl.DIVISOR}": config.loss_aggregation_divisor}
    default = PolicyLossConfig()
    correction = {name: value for name in CORRECTION_SETTINGS if (value := getattr(config, name)) != getattr(default, name)}
    given |= {f"{nemo_rl.KEY}_{name}": value for name, value in correction.items()}
    given[nemo_rl.KL_PENALTY[0]] = config.kl_coefficient  # NeMo-RL's default is a KL term
    if config.kl_coefficient:
        given[nemo_rl.KL_ESTIMATOR] = str(config.kl_estimator)
    given = {name: value for name, value in given.items() if value is not None}
    problems = idle_settings(config, HONOURED, f"NeMo-RL: {NOT_OURS}")
    try:
        nemo_rl.read_settings(given, given)
    except ConfigError as error:
        problems += error.problems
    return in_words({f"{'++' * name.startswith(nemo_rl.KEY)}loss_fn.{name}": value for name, value in given.items()}), problems


def _file_of(words: Sequence[str]) -> Path:
    for index, word in enumerate(words):
        flag, _, value = word.partition("=")
        if flag == "--config":
            return Path(value or words[index + 1]) if value or index + 1 < len(words) else Path()
    script = next((Path(word) for word in words if word.endswith(".py")), Path())
    return script.parent / DEFAULT_FILE


def _inherited(path: Path, read_file: ReadFile) -> dict[str, Any]:
    """The file's settings over those of the files that it names under `defaults`, as NeMo-RL reads them."""
    own = dict(read_file(path))
    parents = own.pop(INHERITS, [])
    settings: dict[str, Any] = {}
    for parent in [parents] if isinstance(parents, str) else parents:
        _merge(settings, _inherited(path.parent / parent, read_file))
    _merge(settings, own)
    return settings


def _merge(settings: dict[str, Any], others: Mapping[str, Any]) -> None:
    for name, value in others.items():
        if isinstance(value, Mapping):
            if not isinstance(settings.get(name), dict) or value.get(REPLACES):
                settings[name] = {}
            _merge(settings[name], {key: inner for key, inner in value.items() if key != REPLACES})
        else:
            settings[name] = read_value(value) if isinstance(value, str) else value  # PyYAML reads 3e-4 as text


def _as_master_config(settings: Mapping[str, Any], *, is_whole: bool) -> SimpleNamespace:
    """What nobody knows here passes: a value of the shell, and without the file all that is not on the line."""
    grpo, policy = ({k: v for k, v in dict(settings.get(name, {})).items() if v is not UNKNOWN} for name in ("grpo", "policy"))
    names = ("num_prompts_per_step", "num_generations_per_prompt")
    if not all(isinstance(count, int) for count in (*map(grpo.get, names), policy.get(nemo_rl.GLOBAL_BATCH))):
        grpo |= dict.fromkeys(names, 1)
        policy[nemo_rl.GLOBAL_BATCH] = 1
    megatron = policy.get("megatron_cfg") or {}
    if megatron.get("enabled") is UNKNOWN or ("enabled" not in megatron and not is_whole):
        policy["megatron_cfg"] = {**megatron, "enabled": True}
    if not is_whole:
        policy = policy | {"generation": policy.get("generation") or {}}
        for name, value in OWN_MODE.items():
            if value_at({"policy": policy}, name) is None:
                put(policy, name.split(".")[1:], value)
    return SimpleNamespace(loss_fn=settings.get("loss_fn", {}), policy=policy, grpo=SimpleNamespace(**grpo))


def _script(words: Sequence[str]) -> Iterator[Row]:
    """A script of NeMo-RL that starts another trainer: by what it imports, or by its name where it is not here."""
    path = next((Path(word) for word in words if word.endswith(".py")), None)
    if path is None:
        yield Row("script", f"no script is on the line: give one after -m {LAUNCHER}, as examples/run_grpo.py", is_wrong=True)
    elif path.is_file():
        try:
            launch.is_of_nemo_rl(path)
        except ConfigError as error:
            yield Row("script", str(error), is_wrong=True)
    elif OTHER_SCRIPT.fullmatch(path.name):
        text = f"{path} is not {nemo_rl.TRAINER}, which our losses are made for: start examples/run_grpo.py, or a script like it"
        yield Row("script", text, is_wrong=True)
