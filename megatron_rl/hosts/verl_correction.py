"""verl's correction for the sampler: what it hands over to a loss of ours, and which of its settings have no effect."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron_rl.hosts.door import Found
from megatron_rl.hosts.settings import UNKNOWN, Settings
from megatron_rl.loss_hub import needs_rollout_log_probs
from megatron_rl.validation.checks import Row, check

ROLLOUT, CORRECTION, IS_V1 = "actor_rollout_ref.rollout.", "algorithm.rollout_correction.", "trainer.use_v1"
BYPASS, LOSS_TYPE, SCORES = f"{CORRECTION}bypass_mode", f"{CORRECTION}loss_type", f"{ROLLOUT}calculate_log_probs"
# What weighs tokens, and what rejects them.
WEIGHING, REJECTING = (
    tuple(f"{CORRECTION}{name}" for name in ("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize")),
    tuple(f"{CORRECTION}{name}" for name in ("rollout_rs", "rollout_rs_threshold")),
)
# The overrides with which verl hands over exp(old - sampled). verl itself bounds it at e^20, so a larger threshold cuts nothing.
LEAST_UNCUT_THRESHOLD = math.exp(20)
UNCUT_WEIGHTS = {f"{CORRECTION}rollout_is": "token", f"{CORRECTION}rollout_is_threshold": 1e9}


def uncut_weights() -> list[str]:
    return [f"{name}={value}" for name, value in UNCUT_WEIGHTS.items()]


@check(when=lambda found: needs_rollout_log_probs(found.config))
def weights_are_uncut(found: Found) -> Iterator[Row]:
    """Whether verl hands over what the sampler's log-probabilities are computed from."""
    settings = found.settings
    level, threshold = settings[f"{CORRECTION}rollout_is"], settings[f"{CORRECTION}rollout_is_threshold"]
    wrong = [] if level in ("token", UNKNOWN) else [f"rollout_is={level}"]
    if threshold is not UNKNOWN and not (isinstance(threshold, int | float) and threshold >= LEAST_UNCUT_THRESHOLD):
        wrong.append(f"rollout_is_threshold={threshold}")
    remedy = uncut_weights() if wrong else []
    needed = {f"{CORRECTION}rollout_is_batch_normalize": False, BYPASS: False, SCORES: True}
    for name in (name for name, value in needed.items() if settings[name] is not value and isinstance(settings[name], bool)):
        wrong.append(f"{name.removeprefix(CORRECTION)}={str(settings[name]).lower()}")
        remedy.append(f"{name}={needed[name]}")
    if wrong:
        name = f"{found.door.choice.prefix}{found}"
        text = f"{name} with these settings compares with the sampler, and gets it from verl's uncut weights"
        yield Row("rollout_correction", f"{', '.join(wrong)}: {text}; set {' '.join(remedy)}", is_wrong=True)
    elif level is not UNKNOWN:
        text = "verl's uncut weights give our loss the sampler's log-probabilities, and multiply nothing"
        yield Row("rollout_correction", text)


@check(subject="rollout_correction")
def our_loss_is_not_replaced(found: Found) -> Iterator[str]:
    if found.settings[BYPASS] is True and found.settings[IS_V1] is False:
        yield "bypass_mode=true of the old trainer puts verl's own loss in the place of ours; remove it, or trainer.use_v1=false"


@check(when=lambda found: not needs_rollout_log_probs(found.config))
def correction_acts(found: Found) -> Iterator[Row]:
    yield from idle_settings(found.settings, has_ours=True)


def readers(settings: Settings) -> list[str]:
    """verl's own corrections that compare with the sampler."""
    given = {f"{CORRECTION}{name}": settings[f"{CORRECTION}{name}"] for name in ("rollout_is", "rollout_rs", "bypass_mode")}
    return [f"{name}={value}" for name, value in given.items() if value not in (None, False, UNKNOWN)]


def idle_settings(settings: Settings, *, has_ours: bool) -> Iterator[Row]:
    """Of verl's correction, those with a value that nothing reads; and what bypass_mode makes of the importance ratio."""
    bypass, is_old, loss_type = settings[BYPASS], settings[IS_V1], settings[LOSS_TYPE]
    if UNKNOWN in (bypass, is_old, loss_type):
        return
    is_bypass, is_old = bypass is True, is_old is False
    names: tuple[str, ...] = (LOSS_TYPE,)
    where, remedy = "without bypass_mode", "remove it"
    if is_bypass and not is_old:
        is_read = loss_type == "reinforce" and not has_ours
        names, where = (*WEIGHING, *REJECTING, LOSS_TYPE), "with bypass_mode in the v1 trainer, which skips the correction"
        remedy = f"remove it, or set {IS_V1}=False, which reads it" if is_read else f"remove it, or set {BYPASS}=False for weights"
    elif is_bypass:  # a loss of ours is refused there
        names = () if has_ours or loss_type == "reinforce" else WEIGHING
        where = "with bypass_mode and loss_type=ppo_clip, which takes no weights"
    elif settings[SCORES] is False:
        names, where, remedy = (*WEIGHING, *REJECTING), f"with {SCORES}=False", f"set {SCORES}=True, or remove it"
    values = {name: settings.given.get(name) for name in names}
    idle = {name: value for name, value in values.items() if value not in (None, UNKNOWN, settings.defaults.get(name))}
    if idle:
        listed = ", ".join(f"{name.removeprefix(CORRECTION)}={value}" for name, value in idle.items())
        yield Row("rollout_correction", f"no effect of {listed} {where}: {remedy}", is_wrong=has_ours, is_note=not has_ours)
    if is_bypass and not is_old:
        yield Row("bypass_mode", "the sampler's log-probabilities are the old ones, so the importance ratio is to the sampler")
