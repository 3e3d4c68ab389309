"""verl: our losses as entries of its tables, with the step's weights.

    actor_rollout_ref.actor.policy_loss.loss_mode=megatron_rl.<loss>.<aggregation>

What verl does with the number that a loss returns, D data-parallel ranks, c context-parallel ranks, M micro-batches:

    Megatron             verl: x M, Megatron: x c / M, mean over D c ranks; each c rank has the gradient of its own tokens
    Megatron, per token  verl: x R / D, Megatron: sums, then / R;  R: the tokens that the model was given
    FSDP                 mean over D ranks
                         -> (1 / D) sum over ranks and micro-batches

So a loss returns D sum_i w_i S_i of its micro-batch, w_i from the counts of the whole mini-batch, which verl_step takes before the
first micro-batch. KL and entropy terms stay verl's own; verl's table of KL estimates gets `unbiased`, which it lacks.

The plugin ends a launch with a problem; `megatron-rl doctor` prints all of it. A setting that is not on the line has the default of
verl's own files; with another --config-name, or a value that only the shell knows, it is not known and not judged. The settings of
a file are judged by the plugin, from verl's whole config. `verl_loss` has the loss.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_rl.aggregation_record import Formula
from megatron_rl.config import PolicyLossConfig
from megatron_rl.errors import ConfigError
from megatron_rl.hosts.door import (
    AVERAGED,
    CLIPS,
    DIVISOR,
    PARTIAL_GROUPS,
    SUMMED,
    SWITCHES,
    TIMES_CP,
    Choice,
    Deviation,
    Door,
    Found,
    Kind,
    Line,
    LogProbs,
    Own,
    Prompts,
    ReadFile,
    Rollouts,
    Setting,
    names,
)
from megatron_rl.hosts.door_line import judge_settings, weights_multiply
from megatron_rl.hosts.door_settings import in_words, read_choice
from megatron_rl.hosts.model_names import ModelNames, model_rows
from megatron_rl.hosts.programs import SUPERVISED, TRAINS_NOTHING, Programs, program_word
from megatron_rl.hosts.sampling import NO_FACTOR, Filter, Sampler, Scores
from megatron_rl.hosts.settings import ABSENT, UNKNOWN, Settings, as_typed, read_overrides, read_value, value_at
from megatron_rl.hosts.verl_correction import (
    BYPASS,
    CORRECTION,
    IS_V1,
    LOSS_TYPE,
    ROLLOUT,
    SCORES,
    UNCUT_WEIGHTS,
    correction_acts,
    idle_settings,
    our_loss_is_not_replaced,
    readers,
    weights_are_uncut,
)
from megatron_rl.hosts.verl_refusals import (
    BATCH,
    DEFAULTS,
    DYNAMIC_CP,
    EXTERNAL_LIB,
    FUSED_KERNELS,
    LOG_PROBS,
    MINI_BATCH,
    SIZES,
    mini_batches,
    refusals,
)
from megatron_rl.hosts.verl_stock import (
    ACTOR,
    AGG_MODE,
    DEFAULT_AGG_MODE,
    ESTIMATOR,
    LOSS_MODE,
    MODULES,
    SAMPLE_MEAN_MODE,
    WORDS,
    stock,
    terms,
)
from megatron_rl.loss_hub import (
    clip_of,
    get_loss_aggregation,
    get_policy_loss,
    needs_rollout_log_probs,
)
from megatron_rl.registries.kl_estimators import KL_ESTIMATORS, kl_estimator_names
from megatron_rl.validation.checks import Row, check

MAIN = "verl.trainer.main_ppo"
PREFIX = "megatron_rl."
LOSS_CLASS = f"{ACTOR}policy_loss._target_"
OWN_CONFIGS = tuple(f"{kind}ppo_{engine}trainer" for kind in ("", "fully_async_", "one_step_off_") for engine in ("", "megatron_"))
# Multi-token prediction.
MTP = "actor_rollout_ref.model.mtp."
# The class of verl's policy_loss that has fields for the settings of ours that verl has no name for.
POLICY_LOSS_CLASS = "megatron_rl.hosts.verl_config.PolicyLoss"
CLASS_LINE = f"{LOSS_CLASS}={POLICY_LOSS_CLASS}"
OWN_CLASSES = (None, POLICY_LOSS_CLASS, "verl.workers.config.PolicyLossConfig", UNKNOWN)
# The v1 trainer names each row's session, and the old one makes a row of each, unless a manager of the user's own makes the rows.
MANAGER = f"{ROLLOUT}agent.agent_loop_manager_class"
SESSIONS = Rollouts(several="an agent loop with several outputs", ids="uid and session_id")
# verl's own agent loops make one row of a rollout; others are the user's.
AGENT_LOOPS, AGENT_LOOP = (f"{ROLLOUT}agent.{name}" for name in ("agent_loop_config_path", "default_agent_loop"))
OWN_LOOPS = ("single_turn_agent", "tool_agent")
WITH_DEVIATION = "algorithm.norm_adv_by_std_in_grpo"
OF_GROUPS = ("grpo", "grpo_vectorized", "grpo_passk", "gdpo")
OF_MODEL = ("tensor_model", "context", "expert_model", "expert_tensor")
# Our aggregation -> verl's name of it.
AGG_MODES: dict[str, str] = {
    "sample_mean": SAMPLE_MEAN_MODE,
    "constant": "seq-mean-token-sum-norm",
}
# verl's estimates of KL. Those of ours that it has too have the same names; ours adds the others.
KL_TYPES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")


# Trainers of their own with the same workers, and so with the same loss. They correct as the old trainer does.
FULLY_ASYNC, REQUIRED = "fully_async_main", "async_training.require_batches"
OLD_TRAINERS = (
    r"verl\.experimental\.(fully_async_policy\.fully_async_main|one_step_off_policy\.main_ppo)|verl\.trainer\.main_ppo_v0"
)
PROGRAMS = Programs(
    names={
        OLD_TRAINERS: None,
        r"verl\.trainer\.main_ppo_sync": None,
        r"verl\.trainer\.sft_trainer(_ray)?": SUPERVISED,
        r"verl\.trainer\.main_(eval|generation\w*)": TRAINS_NOTHING,
    }
)


def is_main(word: str) -> bool:
    """Whether the word of a command line is verl's main program, as a module or as a file."""
    return word == MAIN or word.endswith(f"{MAIN.replace('.', '/')}.py")


def is_launch(words: Sequence[str]) -> bool:
    """verl's main program, or one of the user's own with verl's settings."""
    return any(is_main(word) or word.lstrip("+~").startswith(ACTOR) for word in words)


def is_ours(settings: Settings) -> bool:
    return str(settings[LOSS_MODE]).startswith(PREFIX)


# What is verl's alone. The settings of other sections than the actor's are UNKNOWN in verl's workers.


@check()
def clip_reaches_the_workers(found: Found) -> Iterator[Row]:
    """A typed clip that verl's workers would take for verl's default."""
    acting, theirs = clip_of(found.config), DOOR.field_settings
    if acting is None or any(getattr(found.config, name) is not None for name in CLIPS):
        return  # beside a chosen side the other one is judged for every host
    lost = {}
    for name, own in zip(CLIPS, acting, strict=True):
        typed = found.settings.given.get(theirs[name].name, UNKNOWN)
        if typed not in (UNKNOWN, None, own):
            lost[name] = typed
    if lost:
        values = " and ".join(f"{name}={value}" for name, value in lost.items())
        ours = " ".join(f"{DOOR.own.typed(name)}={value}" for name, value in lost.items())
        text = f"{values}: verl's default too, so its workers cannot tell that you typed it, and {PREFIX}{found} would train"
        yield Row(
            "clip", f"{text} its own clip, {acting[0]:g}/{acting[1]:g}; remove it, or type {CLASS_LINE} {ours}", is_wrong=True
        )


@check()
def clip_of_both_sides_is_not_read(found: Found) -> Iterator[Row]:
    if f"{ACTOR}clip_ratio" not in found.settings.given:
        return
    sides = [f"{ACTOR}{name}" for name in CLIPS]
    has_both = all(side in found.settings.given for side in sides)
    remedy = f"{' and '.join(sides)} count" if has_both else f"set {' and '.join(sides)}"
    yield Row("clip_ratio", f"our losses do not read it: {remedy}", is_wrong=not has_both, is_note=has_both)


@check()
def class_has_our_fields(found: Found) -> Iterator[Row]:
    prefix = DOOR.own.prefix
    idle = CLIPS if found.loss.clip_ratios is None else ()
    fields = [name for name in DOOR.own_fields(found.loss) if name not in idle]
    own = sorted(name for name in found.settings.given if name.removeprefix(prefix) in fields)
    own = [name.removeprefix(prefix) for name in own if name.startswith(prefix)]
    if own and found.settings[LOSS_CLASS] not in (POLICY_LOSS_CLASS, UNKNOWN):
        text = f"{', '.join(own)}: verl's own class has no such fields; set {CLASS_LINE}"
        yield Row("policy_loss", text, is_wrong=True)


@check()
def one_aggregation_acts(found: Found) -> Iterator[Row]:
    """verl's acts on its KL and entropy alone."""
    settings, mode = found.settings, found.settings[AGG_MODE]
    if mode is UNKNOWN:
        return
    mode = mode or DEFAULT_AGG_MODE
    has_terms = settings[f"{ACTOR}use_kl_loss"] is True or settings[f"{ACTOR}entropy_coeff"] not in (0, None, UNKNOWN)
    of_terms = [AGG_MODES["sample_mean"]] if has_terms else []
    allowed = dict.fromkeys((DEFAULT_AGG_MODE, AGG_MODES.get(found.record.name, DEFAULT_AGG_MODE), *of_terms))
    if str(mode) not in allowed:
        text = (
            f"{AGG_MODE}={mode} beside {PREFIX}{found}: two aggregations in one launch. Ours is in the loss_mode, and verl's acts "
            f"on its KL and entropy alone; set {AGG_MODE}={' or '.join(allowed)}"
        )
        yield Row("loss_agg_mode", text, is_wrong=True)
    else:
        of_terms_on = " and ".join(terms(settings))
        readers = (
            f"of {of_terms_on}; our loss does not read it" if of_terms_on else "nothing reads it: no KL and no entropy in the loss"
        )
        yield Row("loss_agg_mode", f"{mode}: {readers}")
        if found.record.name == "constant" and mode != AGG_MODES["constant"] and "KL" in terms(settings):
            without = f"{ACTOR}use_kl_loss=False"
            if mode != DEFAULT_AGG_MODE and of_terms_on == "KL":  # which nothing reads then
                without += f" {AGG_MODE}={DEFAULT_AGG_MODE}"
            text = f"KL keeps {mode}: Dr. GRPO has no KL in the loss, so set {without}; or divide it by L too, "
            yield Row("advice", f"{text}with {AGG_MODE}={AGG_MODES['constant']}", is_note=True)


def rollouts_of(settings: Settings) -> Rollouts:
    if (manager := settings[MANAGER]) not in (None, UNKNOWN):  # whether it names the session of a row is not known
        return Rollouts(several=f"{MANAGER}={manager}")
    if settings[IS_V1] is False:
        return Rollouts()
    loops, loop = settings[AGENT_LOOPS], settings[AGENT_LOOP]
    return replace(SESSIONS, is_said=loops not in (None, UNKNOWN) or loop not in (*OWN_LOOPS, None, UNKNOWN))


@check(when=lambda found: not needs_rollout_log_probs(found.config))
def weights_of_verl_multiply(found: Found) -> Iterator[Row]:
    name, bypass, scores = f"{CORRECTION}rollout_is", found.settings[BYPASS], found.settings[SCORES]
    if found.settings[name] not in (None, UNKNOWN) and bypass is not True and scores is not False:
        yield weights_multiply(found, [f"{name}={found.settings[name]}"])


@check()
def a_step_has_whole_prompts(found: Found) -> Iterator[Row]:
    if not found.counts_prompts or found.config.allow_partial_prompt_groups:
        yield from (row for row in mini_batches(found.settings, is_ours=True) if row.is_note)
    if not found.counts_prompts:
        return
    sizes = {name: found.settings[name] for name in (BATCH, MINI_BATCH)}
    known, (batch, mini_batch) = {name: size for name, size in sizes.items() if isinstance(size, int)}, sizes.values()
    if len(known) < len(sizes):
        if found.config.allow_partial_prompt_groups is False:
            unknown = [name for name in sizes if name not in known]
            size = next(iter(known.values()), "<prompts of a step>")
            text = (
                f"{' and '.join(unknown)}: not known here, and a mini-batch that is not the whole batch cuts prompt groups; type "
            )
            yield Row("mini-batch", f"{text}{' '.join(f'{name}={size}' for name in unknown)}", is_note=True)
        return
    text = f"{mini_batch} of {batch} prompts a step"
    is_wrong = batch != mini_batch and found.config.allow_partial_prompt_groups is False
    if is_wrong:
        text += f": verl deals samples to ranks by length, so a mini-batch cuts prompt groups; set {MINI_BATCH}={batch}, or "
        text += f"{BATCH}={mini_batch}, or accept cut groups with {CLASS_LINE} {DOOR.own.typed(PARTIAL_GROUPS)}=true"
    yield Row("mini-batch", text, is_wrong=is_wrong)


def cuts_groups(settings: Settings) -> bool:
    """Whether a_step_has_whole_prompts refuses the mini-batches, of whatever else is wrong with them."""
    try:
        needs_prompts = is_ours(settings) and get_loss_aggregation(read_choice(DOOR, settings)[1]).needs_prompts
    except ConfigError:
        return False
    is_accepted = settings.value_of(DOOR.own.name(PARTIAL_GROUPS)) is True
    return needs_prompts and not is_accepted and settings[BATCH] != settings[MINI_BATCH]


def is_added_estimator(kind: object) -> bool:
    """Whether verl has no estimate of KL of that name and we have: one of ours, or module.function of one."""
    is_verls = isinstance(kind, str) and kind.removesuffix("+") in KL_TYPES
    return not is_verls and KL_ESTIMATORS.find_or_none(kind) is not None


@check()
def kl_term_is(found: Found) -> Iterator[Row]:
    """Not a problem: what the term is, for doctor."""
    kind, has_kl = found.settings[f"{ACTOR}kl_loss_type"], found.settings[f"{ACTOR}use_kl_loss"]
    if has_kl is True and is_added_estimator(kind):
        yield Row("kl_loss_type", f"{kind} is ours")
    elif f"{ACTOR}kl_loss_type" in found.settings.given and has_kl is False:
        yield Row("kl_loss_type", "nothing reads it without use_kl_loss=True", is_note=True)


# Of any launch of verl, with our loss or its own.


def estimates_of_kl(settings: Settings) -> Iterator[Row]:
    given = settings.given
    in_rewards = given.get("algorithm.kl_penalty")
    if given.get("algorithm.use_kl_in_reward") is True and isinstance(in_rewards, str):
        if in_rewards.removesuffix("+") not in KL_TYPES:
            text = f"verl has no {in_rewards} for rewards: set one of {', '.join(KL_TYPES)}, or one with a + behind it"
            yield Row("algorithm.kl_penalty", text, is_wrong=True)
    kind, has_kl = given.get(f"{ACTOR}kl_loss_type"), settings[f"{ACTOR}use_kl_loss"] is not False
    is_added = is_added_estimator(kind) and (settings[LOSS_MODE] is UNKNOWN or is_ours(settings))
    if isinstance(kind, str) and kind.removesuffix("+") not in KL_TYPES and not is_added:
        text = f"verl has no {kind}: set one of {', '.join(KL_TYPES)}, or one with a + behind it"
        added = [name for name in kl_estimator_names() if is_added_estimator(name)]
        text += f"; {', '.join(added)} comes with a loss of ours"
        text = text if has_kl else f"{text}, before you turn use_kl_loss on"
        yield Row("kl_loss_type", text, is_wrong=has_kl, is_note=not has_kl)


def place_of_our_head(settings: Settings) -> Iterator[Row]:
    """Beside our log-probabilities one switch of verl decides what they are computed from."""
    switch = settings.value_of(FUSED_KERNELS)
    if LOG_PROBS not in str(settings.value_of(EXTERNAL_LIB)) or switch is UNKNOWN:
        return
    whole = "from hidden states by our head, and no logits are made"
    if switch is True and settings.value_of(f"{ACTOR}calculate_sum_pi_squared") is True and settings[IS_V1] is False:
        text = (
            "calculate_sum_pi_squared=True reads logits, and none are made: verl's first step raises; set one of the two to False"
        )
        yield Row("use_fused_kernels", text, is_wrong=True)
        return
    text = f"log-probabilities come {whole}" if switch is True else f"log-probabilities come from logits; with =True {whole}"
    yield Row("use_fused_kernels", text)


def sums_of_squares(settings: Settings) -> Iterator[Row]:
    """The v1 trainer asks its workers for none, whatever is set, and some estimators raise without them."""
    estimator, is_old, name = settings[ESTIMATOR], settings[IS_V1], f"{ACTOR}calculate_sum_pi_squared"
    is_set, needs = settings[name], isinstance(estimator, str) and estimator.endswith("optimal_token_baseline")
    if UNKNOWN in (estimator, is_old, is_set):
        return
    if needs and not (is_old is False and is_set is True):
        text = f"{ESTIMATOR}={estimator} needs sums of squared probabilities, and "
        text += "only the old trainer asks for them: " if is_old is not False else "they are not asked for: "
        yield Row(ESTIMATOR, f"{text}verl's first step raises; set {IS_V1}=False and {name}=True", is_wrong=True)
    elif is_set is True and is_old is not False:
        yield Row(name, f"no effect of =True: only the old trainer asks for them; remove it, or set {IS_V1}=False", is_note=True)


def of_any_launch(settings: Settings) -> Iterator[Row]:
    if not is_ours(settings):
        yield from idle_settings(settings, has_ours=False)
        if settings[f"{ACTOR}use_kl_loss"] is True and settings[f"{ACTOR}kl_loss_coef"] == 0:
            yield Row("KL", f"{settings[f'{ACTOR}kl_loss_coef']} x {settings[f'{ACTOR}kl_loss_type']}: a metric alone")
    yield from estimates_of_kl(settings)
    yield from place_of_our_head(settings)
    yield from sums_of_squares(settings)


def is_open(settings: Settings, section: str) -> bool:
    """A class of the user's own may have more fields."""
    if section == f"{ACTOR}policy_loss.":
        return settings[LOSS_CLASS] not in OWN_CLASSES
    return section == ACTOR and f"{ACTOR}_target_" in settings.given


def read_line(words: Sequence[str], read_file: ReadFile | None = None) -> Line:
    """The overrides behind the main program, over the defaults of verl's own files where the line takes no other one."""
    start = next((index + 1 for index, word in enumerate(words) if is_main(word)), 0)
    behind, knows_defaults, engine = [word for word in words[start:] if word != "--"], True, None
    for index, word in enumerate(behind):
        flag, _, value = word.partition("=")
        if flag in ("--config-name", "-cn"):
            name = value or (behind[index + 1] if index + 1 < len(behind) else "")
            knows_defaults &= name.removesuffix(".yaml") in OWN_CONFIGS
            engine = "megatron" if "megatron" in name else None
    given, program = read_overrides(behind), PROGRAMS.named(words)
    if engine and knows_defaults:
        given.setdefault("model_engine", engine)
    rows = [] if knows_defaults else [Row("settings", "the file of --config-name is not read here", is_note=True)]
    if program is not None and re.fullmatch(OLD_TRAINERS, program.word):
        given[IS_V1] = False
        if FULLY_ASYNC in program.word:  # it takes so many mini-batches, whatever the batch is
            sizes = [given.get(name, default) for name, default in ((MINI_BATCH, DEFAULTS[MINI_BATCH]), (REQUIRED, 1))]
            given[BATCH] = UNKNOWN if UNKNOWN in sizes else math.prod(sizes)
    elif program is None and not start:
        rows += [Row("program", f"{program_word(words)} is a program of your own: it may train another loss", is_note=True)]
    settings, is_partial = Settings.of_names(given, DOOR.all_defaults, knows_defaults=knows_defaults), bool(rows)
    if "uv" in words[:start] and is_ours(settings):
        text = "its environment is verl's own: there uv pip install --no-deps /path/to/megatron_rl, or start with VERL_USE_UV=0"
        rows.append(Row("uv run", text, is_note=True))
    return Line(settings, rows, is_partial=is_partial)


def settings_of_config(config: Any) -> Settings:
    """Of verl's whole config, from whatever files: what somebody has set, as far as it differs from verl's own values."""
    policy_loss, idle = value_at(config, f"{ACTOR}policy_loss"), {one.name for one in DOOR.settings if one.idle is not None}
    own = [f"{DOOR.own.prefix}{name}" for name in (policy_loss if policy_loss not in (ABSENT, None) else ())]
    given = {}
    for name in dict.fromkeys([*DOOR.known_names, *MODEL.all, *own]):
        value, default = value_at(config, name), DOOR.all_defaults.get(name)
        value = read_value(value) if isinstance(value, str) else value
        is_set = value not in (ABSENT, None, default) or isinstance(value, bool) != isinstance(default, bool)
        if value not in (ABSENT, None) and is_set and (name not in idle or isinstance(value, bool)):
            given[name] = value
    return Settings.of_names(given, DOOR.all_defaults)


def problems_of(settings: Settings) -> tuple[list[str], list[str]]:
    """(what ends a launch, what is said at its start)."""
    found = {row.text: row for row in judge_settings(DOOR, settings, may_have_more=True)}
    of_model = {row.text for row in model_rows(MODEL, settings)}
    if not is_ours(settings):  # a model that verl's own loss trains
        found = {text: row for text, row in found.items() if text not in of_model}
    said = [row for text, row in found.items() if row.is_note and (row.subject == "sampling" or text in of_model)]
    return [in_words(row) for row in found.values() if row.is_wrong], [in_words(row) for row in said]


def write(config: PolicyLossConfig, given: dict[str, Any]) -> dict[str, Any]:
    # verl's table has them by their declared names, as soon as the module that declares them is imported.
    loss, aggregation = get_policy_loss(config.policy_loss), get_loss_aggregation(config.loss_aggregation)
    modules = dict.fromkeys(one.rpartition(".")[0] for one in (config.policy_loss, config.loss_aggregation) if "." in one)
    found: dict[str, Any] = {MODULES: ",".join(modules)} if modules else {}
    found |= given | {LOSS_MODE: f"{PREFIX}{loss.name}.{aggregation.name}"}
    # verl's workers take a value equal to verl's default as not set, unless it is typed by our names.
    for name, own in zip(CLIPS, loss.clip_ratios or (None, None), strict=True):
        host = DOOR.field_settings[name]
        if own is not None and found.get(host.name) == host.default != own:
            found[DOOR.own.name(name)] = found.pop(host.name)
    if any(name.startswith(DOOR.own.prefix) and name != LOSS_MODE and name not in HOSTS_OWN for name in found):
        found = _before(found, DOOR.own.prefix, {LOSS_CLASS: POLICY_LOSS_CLASS})
    if config.kl_coefficient:
        kl = {"use_kl_loss": True, "kl_loss_coef": config.kl_coefficient, "kl_loss_type": str(config.kl_estimator)}
        kl["loss_agg_mode"] = AGG_MODES["sample_mean"]  # our mean of the term
        found = {name: value for name, value in found.items() if not name.endswith(("kl_coefficient", "kl_estimator"))}
        found |= {f"{ACTOR}{name}": value for name, value in kl.items()}
    if needs_rollout_log_probs(config):
        found |= UNCUT_WEIGHTS
    return found | {BATCH: UNKNOWN}  # the step is what explain was given


def _before(found: dict[str, Any], prefix: str, added: Mapping[str, Any]) -> dict[str, Any]:
    """With `added` before the first of our own names."""
    own = {name: value for name, value in found.items() if name.startswith(prefix) and name != LOSS_MODE}
    return {name: value for name, value in found.items() if name not in own} | dict(added) | own


MODEL = ModelNames(
    sections=(f"{ACTOR}megatron.override_transformer_config.",),
    fields={
        **{name: f"{ACTOR}megatron.{name}" for name in ("sequence_parallel", *(f"{kind}_parallel_size" for kind in OF_MODEL))},
        "dynamic_context_parallel": DYNAMIC_CP,
        "mtp_num_layers": f"{MTP}enable",
        "enable_mtp_training": f"{MTP}enable_train",
        "mtp_loss_scaling_factor": f"{MTP}mtp_loss_scaling_factor",
    },
    own={"moe_router_load_balancing_type": "none", "sequence_parallel": True},
    is_per_token=lambda settings: settings[DYNAMIC_CP] is True,
    divides_by_routed=True,
)

DOOR = Door(
    name="verl",
    title="verl",
    probed="verl-project/verl 1dda039b9",
    settings=(
        Setting(LOSS_MODE),
        Setting(f"{ACTOR}clip_ratio_low", Kind.NUMBER, "clip_ratio_low", 0.2),
        Setting(f"{ACTOR}clip_ratio_high", Kind.NUMBER, "clip_ratio_high", 0.2),
        Setting(f"{ACTOR}clip_ratio_c", Kind.NUMBER, "clip_ratio_c", 3.0),
        Setting(f"{ACTOR}tau_pos", Kind.NUMBER, "sapo_temperature_positive", 1.0),
        Setting(f"{ACTOR}tau_neg", Kind.NUMBER, "sapo_temperature_negative", 1.05),
        Setting(f"{ACTOR}policy_loss.dro_beta", Kind.NUMBER, "log_ratio_penalty"),
        Setting(f"{ACTOR}loss_scale_factor", Kind.NUMBER, DIVISOR),
        Setting(AGG_MODE, default=DEFAULT_AGG_MODE),
        Setting(f"{ACTOR}clip_ratio", Kind.NUMBER, default=0.2),
        Setting(f"{ACTOR}use_kl_loss", Kind.SWITCH, default=False),
        Setting(f"{ACTOR}kl_loss_coef", Kind.NUMBER, default=0.001),
        Setting(f"{ACTOR}kl_loss_type", default="low_var_kl"),
        Setting(f"{ACTOR}entropy_coeff", Kind.NUMBER, default=0),
        Setting(MINI_BATCH, Kind.NUMBER, default=DEFAULTS[MINI_BATCH]),
        Setting(BATCH, Kind.NUMBER, default=DEFAULTS[BATCH]),
        Setting(f"{ACTOR}megatron.context_parallel_size", Kind.NUMBER, default=1),
        Setting(DYNAMIC_CP, Kind.SWITCH, default=False),
        *names(
            ACTOR,
            Kind.NUMBER,
            "ppo_micro_batch_size ppo_micro_batch_size_per_gpu ppo_infer_micro_batch_size_per_gpu ppo_max_token_len_per_gpu "
            "ppo_infer_max_token_len_per_gpu ppo_epochs data_loader_seed rollout_n entropy_from_logits_chunk_size grad_clip "
            "ulysses_sequence_parallel_size",
        ),
        *names(
            ACTOR,
            Kind.OTHER,
            "_target_ strategy use_dynamic_bsz freeze_vision_tower calculate_entropy calculate_sum_pi_squared use_prefix_grouper "
            "use_torch_compile shuffle use_fused_kernels global_batch_info entropy_from_logits_with_chunking entropy_checkpointing "
            "pad_to_length use_remove_padding use_rollout_log_probs",
        ),
        *names(
            ACTOR,
            Kind.GROUP,
            "checkpoint optim profiler profile engine model_config router_replay qat megatron fsdp_config veomni torchtitan "
            "global_batch_info policy_loss.rollout_correction",
        ),
        *names(f"{ACTOR}policy_loss.", Kind.OTHER, "_target_"),
        *names(
            f"{ACTOR}policy_loss.",
            Kind.NUMBER,
            dict.fromkeys(("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef"), "remove it"),
        ),
        Setting(f"{CORRECTION}rollout_is_threshold", Kind.BOUNDS, default=2.0),
        *names(CORRECTION, Kind.BOUNDS, "rollout_rs_threshold"),
        *names(CORRECTION, Kind.OTHER, "_target_"),
        Setting(LOSS_TYPE, default="ppo_clip"),
        Setting("model_engine", default="dp"),
    ),
    sections=(ACTOR, f"{ACTOR}policy_loss.", CORRECTION),
    choice=Choice(setting=LOSS_MODE, prefix=PREFIX, remedy=f"{LOSS_MODE}={PREFIX}<loss>.<aggregation> chooses one of ours"),
    own=Own(prefix=f"{ACTOR}policy_loss.", added="+", clips=True, others=SWITCHES),
    defaults={
        **DEFAULTS,
        IS_V1: True,
        MANAGER: None,
        WITH_DEVIATION: True,
        ESTIMATOR: "gae",
        AGENT_LOOPS: None,
        AGENT_LOOP: OWN_LOOPS[0],
        BYPASS: False,
        f"{CORRECTION}rollout_rs": None,
        f"{CORRECTION}rollout_is": None,
        f"{CORRECTION}rollout_is_batch_normalize": False,
        SCORES: True,
        "algorithm.use_kl_in_reward": False,
        "algorithm.kl_penalty": "kl",
        LOSS_CLASS: None,
    },
    keep_clip=f"{CLASS_LINE} +{ACTOR}policy_loss.clip_ratio_{{side}}={{value}}",
    stand_ins={f"{ACTOR}loss_scale_factor": 1.0},
    readers=readers,
    rollouts=rollouts_of,
    counts_rollouts=True,
    log_probs=LogProbs(setting=EXTERNAL_LIB, value=LOG_PROBS, is_hosts=True),
    deviation=Deviation(
        without={WITH_DEVIATION: False},
        divides=lambda settings: settings[WITH_DEVIATION] is True and settings[ESTIMATOR] in OF_GROUPS,
    ),
    sampler=Sampler(
        filters={f"{ROLLOUT}top_p": Filter(1.0, (1.0,)), f"{ROLLOUT}top_k": Filter(-1, (-1, 0))},
        engine=f"{ROLLOUT}name",
        engines={"vllm": None, "sglang": Scores.WHOLE},
        modes=(f"{ROLLOUT}engine_kwargs.vllm.logprobs_mode", f"{ROLLOUT}logprobs_mode"),
        default_mode="processed_logprobs",
        reshaped={f"{ROLLOUT}repetition_penalty": NO_FACTOR},
        longest="data.max_response_length",
    ),
    checks=(
        *(clip_reaches_the_workers, clip_of_both_sides_is_not_read, class_has_our_fields),
        *(one_aggregation_acts, a_step_has_whole_prompts, weights_are_uncut, correction_acts, weights_of_verl_multiply),
        *(our_loss_is_not_replaced, kl_term_is),
    ),
    of_any_launch=of_any_launch,
    words=WORDS,
    imports=(MODULES, EXTERNAL_LIB),
    refuses=lambda settings: refusals(settings, is_ours=is_ours(settings), cuts_groups=cuts_groups(settings)),
    stock=stock,
    terms=lambda found: terms(found.settings),
    sizes=SIZES,
    is_open=is_open,
    megatron="model_engine=megatron",
    model=MODEL,
    prompts=Prompts.COUNTED,
    returns=Formula(dp=1),
    step=(("verl", Formula(M=1), "multiplies by micro-batches"), TIMES_CP, AVERAGED[1]),
    step_per_token=(
        ("verl", Formula(T_all=1, dp=-1), "T_all: the tokens that the model is given; here those of the responses"),
        *SUMMED,
        ("finalize", Formula(T_all=-1), "divides by the tokens that all ranks have counted"),
    ),
    starts=MAIN,
    recognises=is_launch,
    programs=PROGRAMS,
    read_line=read_line,
    write=write,
    line_of=lambda name, value: f"{'+' * is_added(name)}{name}={as_typed(value)}",
    place="overrides on the launch line",
    honours=("kl_coefficient", "kl_estimator", *SWITCHES),
)
# Names below policy_loss that are verl's own.
HOSTS_OWN = tuple(one.name for one in DOOR.settings if one.name.startswith(DOOR.own.prefix))


def is_added(name: str) -> bool:
    """Whether hydra needs a + before it: verl's own class does not have it."""
    return name.startswith(DOOR.own.prefix) and name not in HOSTS_OWN
