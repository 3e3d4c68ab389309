"""ROLL: our losses on the logits of its Megatron strategy, with the weights of the step. The loss is in roll_loss.

    actor_train:
      worker_cls: megatron_rl.hosts.roll_worker.ActorWorker
      pg_variant: <loss>.<aggregation>

ROLL's settings drop a name that they do not know without a word. So ours are variables of the worker's environment,
actor_train.system_envs.MEGATRON_RL_<NAME>. A launch line names a YAML, which hydra finds beside the script.

What ROLL and Megatron do with the number that a loss returns, D data-parallel and c context-parallel ranks, M micro-batches:

    ROLL: x M D; Megatron: x c / M; DDP: mean over D c ranks
    -> sum over ranks and micro-batches; with packing ROLL calls a loss once a sequence, and adds

So a loss returns its rank's part of sum_i w_i S_i, w_i from the counts of the whole step, which ROLL hands over. Each rank has the
logits of its own tokens, so KL and entropy come from the same pass, with ROLL's coefficients. Prompts are known by their tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.aggregation_record import TOKEN_MEAN, Formula
from megatron_rl.arguments import read_number, read_switch
from megatron_rl.config import DEFAULT_MAX_LOGITS_BYTES, PolicyLossConfig
from megatron_rl.errors import ConfigError
from megatron_rl.hosts import door_line
from megatron_rl.hosts.closed_words import Words
from megatron_rl.hosts.dealing import Dealing
from megatron_rl.hosts.door import (
    AVERAGED,
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
    Setting,
    names,
)
from megatron_rl.hosts.model_names import ModelNames
from megatron_rl.hosts.programs import DISTILLED, PREFERENCES, SUPERVISED, TRAINS_NOTHING
from megatron_rl.hosts.roll_sizes import (
    BATCH,
    DYNAMIC,
    LAYOUT,
    STEP,
    STRATEGY_ARGS,
    TRAIN,
    batch_of,
    devices_of,
    has_whole_steps,
    step_of,
)
from megatron_rl.hosts.sampling import NO_FACTOR, Filter, Sampler, Scores
from megatron_rl.hosts.settings import ABSENT, UNKNOWN, Given, Settings, as_typed, flat, read_value, value_at
from megatron_rl.hosts.settings_files import resolved, with_values
from megatron_rl.hosts.step_sizes import SizeNames, whole_number
from megatron_rl.hosts.stock import MEANS_ARE_ADDED, MTP_IS_NOT_JUDGED, OF_PRESENT_SAMPLES, Stock, is_on, unjudged
from megatron_rl.loss_hub import get_policy_loss
from megatron_rl.validation.checks import Row, check

WORKER, STRATEGY = "megatron_rl.hosts.roll_worker.ActorWorker", "megatron_train"
SCRIPT, OUR_SCRIPT = re.compile(r"(?:.*/)?start_\w+_pipeline\.py"), re.compile(r"(?:.*/)?start_rlvr\w*_pipeline\.py")
# The pipelines whose actor has the loss that is judged here; the others train another loss, or nothing.
POLICY_SCRIPT = re.compile(r"(?:.*/)?start_(rlvr|rlvr_vl|agentic|onpolicy_distill)_pipeline\.py")
INFER, CORRECTION = "actor_infer.", "train_infer_correction."
WORKER_CLASS, VARIANT, VARIABLES = f"{TRAIN}worker_cls", f"{TRAIN}pg_variant", "MEGATRON_RL_"
ENVIRONMENT = f"{TRAIN}system_envs."
# What computes old log-probabilities and those of ROLL's own loss: ours, or ROLL's.
LOG_PROBS, OURS, THEIRS = f"{ENVIRONMENT}{VARIABLES}LOG_PROBS", "megatron_rl", "roll"
OTHERS = ("kl_estimator", "fused_lm_head_loss", "max_logits_bytes")
# Our head in the model of the worker, and the most bytes of its logits.
HEAD, HEAD_BYTES = (f"{ENVIRONMENT}{VARIABLES}{name}" for name in ("FUSED_LM_HEAD_LOSS", "MAX_LOGITS_BYTES"))
PACKING = f"{TRAIN}use_sequence_packing"
RECOMPUTE, NEVER_RECOMPUTE = "enable_old_logprobs_recompute", "force_disable_old_logprobs_recompute"
# Estimators for which ROLL always computes old log-probabilities.
RECOMPUTING = ("step_reinforce", "gigpo")
# ROLL's clip, of both sides or of each with use_pg_clip_range, and the default of all three.
CLIPS, CLIP = ("pg_clip", "pg_clip_low", "pg_clip_high"), 0.2
PER_TOKEN = f"{STRATEGY_ARGS}strategy_config.calculate_per_token_loss"
# What ROLL's own loss reads, the only value that ours accepts, and why.
_NORMALISED = "ROLL normalises these weights in each micro-batch, so they depend on its size"
ONLY = {
    "importance_sampling": (Kind.OTHER, "token", "two losses in one launch; ours is gspo: set pg_variant: gspo.<aggregation>"),
    "difficulty_loss_weight": (Kind.SWITCH, False, _NORMALISED),
    "length_loss_weight": (Kind.SWITCH, False, _NORMALISED),
    "rl_loss_coef": (Kind.NUMBER, 1.0, "it would multiply the weights; change the learning rate"),
    "loss_agg_mode": (
        Kind.OTHER,
        "seq-mean-token-mean",
        "our aggregation is in pg_variant, and KL and entropy are means over samples",
    ),
}
# Why the other pipelines are not judged.
OTHER_PIPELINES = {"rollout": TRAINS_NOTHING, "sft": SUPERVISED, "dpo": PREFERENCES, "distill": DISTILLED}
OUR_PIPELINE = "our worker is made for ROLL's RLVR pipeline; start examples/start_rlvr_pipeline.py"


# Settings


def settings_of(worker: Any, pipeline: Any, given: Mapping[str, Any] | None = None) -> Settings:
    """Of ROLL's configs of the worker and of the pipeline, objects or mappings. given: all names of a YAML; None: the variables of
    the worker. What a YAML says is not known to be typed: ROLL's objects have its defaults too."""

    def value_of(name: str) -> Any:
        if name.startswith(TRAIN):
            value = value_at(worker, name.removeprefix(TRAIN))
            return read_number(value) if name.startswith(ENVIRONMENT) else value
        if name.startswith(INFER) and value_at(pipeline, INFER.removesuffix(".")) in (None, ABSENT):
            return UNKNOWN
        return value_at(pipeline, name)

    if given is None:
        given = {f"{ENVIRONMENT}{name}": value for name, value in worker.system_envs.items()}
    return Settings(value_of, DOOR.all_defaults, typed=(), has_files=True, given=given)


def read_settings(worker: Any, pipeline: Any) -> Found:
    """From ROLL's config objects. Raises one ConfigError with every problem."""
    if not hasattr(pipeline, "num_return_sequences_in_group"):
        raise ConfigError(f"{type(pipeline).__name__}: {OUR_PIPELINE}")
    return door_line.read_launch(DOOR, settings_of(worker, pipeline), may_have_more=True)


def trains_ours(settings: Settings) -> bool:
    """Whether our worker trains our loss. It may be there for our log-probabilities alone."""
    return settings[LOG_PROBS] == THEIRS or "." in str(settings[VARIANT])


def check_log_probs(settings: Settings) -> bool:
    """Whether our log-probabilities take the place of ROLL's. Raises one ConfigError with every problem of that."""
    return door_line.check_log_probs(DOOR, settings, trains_ours=trains_ours(settings))


def derive(settings: Settings, fields: Mapping[str, Given]) -> dict[str, Given]:
    """The clip of both sides, or of each; ROLL's c of the dual clip; KL, entropy, our head. Text stays as it is, and is refused."""

    def number(name: str, of: Any) -> Any:
        value = settings[name]
        return of(value) if isinstance(value, int | float) else value

    def as_whole(value: float) -> float:
        return int(value) if value == value // 1 else value

    # The switch chooses both sides, whatever their values; without it ROLL's default counts as not set.
    has_range = bool(settings["use_pg_clip_range"])
    low, high = (settings.one(name)._replace(is_typed=has_range or None) for name in acting_clips(settings))
    dual_clip = number("pg_clip", lambda clip: 1 + 2 * clip) if settings["dual_clip_loss"] else None
    kl = settings.one("kl_loss_coef") if settings["use_kl_loss"] else Given("use_kl_loss: true and kl_loss_coef", 0, 0)
    return {
        "clip_ratio_low": low,
        "clip_ratio_high": high,
        "clip_ratio_c": Given("dual_clip_loss", dual_clip),
        "kl_coefficient": kl,
        "entropy_coefficient": Given("entropy_loss_coef", number("entropy_loss_coef", lambda value: max(value, 0)), 0),
        "fused_lm_head_loss": settings.one(HEAD)._replace(value=read_switch(settings[HEAD])),
        "max_logits_bytes": settings.one(HEAD_BYTES)._replace(value=number(HEAD_BYTES, as_whole)),
    }


def acting_clips(settings: Settings) -> tuple[str, str]:
    return CLIPS[1:] if settings["use_pg_clip_range"] else (CLIPS[0], CLIPS[0])


def corrections(settings: Settings) -> list[str]:
    return [f"{CORRECTION}is_weight"] if settings[f"{CORRECTION}is_weight.enabled"] else []


def readers(settings: Settings) -> list[str]:
    filters = settings[f"{CORRECTION}filters"]
    is_on = isinstance(filters, Iterable) and any(value_at(one, "enabled") is True for one in filters)
    return [f"{CORRECTION}filters"] * is_on


def recomputes(settings: Settings) -> Any:
    """Whether ROLL computes old log-probabilities, as its PPOConfig decides it. A worker has the decision."""
    asked, never, coefficient = (settings[name] for name in (RECOMPUTE, NEVER_RECOMPUTE, "init_kl_coef"))
    if any(isinstance(one, str) or one is UNKNOWN for one in (asked, never)):
        return asked
    step, batch = step_of(settings), batch_of(settings)
    has_several_steps = step is not None and batch is not None and batch >= 2 * step
    has_rewards_with_kl = isinstance(coefficient, int | float) and coefficient > 0
    return not never and (asked or settings["adv_estimator"] in RECOMPUTING or has_rewards_with_kl or has_several_steps)


# What is ROLL's alone


@check()
def clip_that_its_switch_turns_off(found: Found) -> Iterator[Row]:
    settings = found.settings
    acting = {*acting_clips(settings), *(["pg_clip"] if settings["dual_clip_loss"] else [])}
    for one in map(settings.one, CLIPS):
        if one.is_chosen and one.name not in acting:
            switch = "dual_clip_loss: true" if settings["use_pg_clip_range"] else "use_pg_clip_range: true"
            text = f"{one.name}={one.value} has no effect without {switch}; set the switch, or remove it"
            yield Row(one.name, text, is_wrong=True)


@check()
def clip_that_a_worker_cannot_know(found: Found) -> Iterator[Row]:
    """What a YAML says of the clip and a worker, which has ROLL's defaults too, cannot know."""
    settings, written, own = found.settings, found.settings.given, found.loss.clip_ratios
    if own is None or own == (CLIP, CLIP) or WORKER_CLASS not in written:
        return
    words = f"{found.loss.name} has {own[0]:g}/{own[1]:g} of its own"
    if not settings["use_pg_clip_range"] and written.get("pg_clip") == CLIP and not settings["dual_clip_loss"]:
        text = f"pg_clip={CLIP} is ROLL's default too, so its worker cannot tell that you wrote it, and {words}"
        remedy = f"set use_pg_clip_range: true, pg_clip_low: {CLIP} and pg_clip_high: {CLIP}"
        yield Row("pg_clip", f"{text}; remove it, or {remedy}", is_wrong=True)
    elif settings["use_pg_clip_range"]:
        for name, side in zip(CLIPS[1:], own, strict=True):
            if name not in written and side != CLIP:
                text = f"use_pg_clip_range: true without {name} trains ROLL's default, {CLIP}, and {words}; write {name}"
                yield Row(name, text, is_wrong=True)


@check()
def only_values_that_ours_accept(found: Found) -> Iterator[Row]:
    for name, (_, only, why) in ONLY.items():
        if found.settings[name] != only:
            yield Row(name, f"{name}={found.settings[name]} beside {found}: {why}; set {name}: {only}", is_wrong=True)


@check()
def strategy_is_megatrons(found: Found) -> Iterator[Row]:
    settings, name = found.settings, f"{STRATEGY_ARGS}strategy_name"
    if settings[name] != STRATEGY:
        why = "our worker needs the logits of ROLL's Megatron strategy"
        yield Row(name, f"{name}={settings[name]}: {why}; set {STRATEGY}", is_wrong=True)
        return
    if not settings[f"{TRAIN}apply_loss_scale"]:
        why = "Megatron and DDP would average over micro-batches and ranks"
        yield Row(f"{TRAIN}apply_loss_scale", f"{TRAIN}apply_loss_scale=false: {why}; set it to true", is_wrong=True)
    if settings[PER_TOKEN]:
        why = "ROLL's factors are made for the mean over ranks"
        yield Row(PER_TOKEN, f"{PER_TOKEN}=true: {why}; remove it", is_wrong=True)


@check()
def step_has_what_weights_and_ratios_need(found: Found) -> Iterator[Row]:
    settings, step, batch = found.settings, step_of(found.settings), batch_of(found.settings)
    if settings[f"{STRATEGY_ARGS}strategy_name"] != STRATEGY:
        return
    is_dynamic = bool(settings[DYNAMIC])
    is_one_step = not is_dynamic and (step is None or batch is None or step == batch)
    if found.counts_prompts and not is_one_step:
        how = "dynamic batching" if is_dynamic else f"a step of {step} of {batch} samples"
        yield Row(
            "step",
            f"{how} beside {found}: an optimiser step must have all samples of a batch, because a smaller one cuts prompt groups; "
            f"set {STEP[1]} so that per_device_train_batch_size x gradient_accumulation_steps x data-parallel ranks is "
            f"{' x '.join(BATCH)}, and use_dynamic_batching_in_train: false",
            is_wrong=True,
        )
    if settings[RECOMPUTE]:
        return
    if not (is_one_step and settings["ppo_epochs"] == 1):
        yield Row(
            RECOMPUTE,
            f"{RECOMPUTE}=false with several optimiser steps a batch: the batch has no old log-probabilities, and the ratio of the "
            f"later steps would be 1; set {RECOMPUTE}: true, and no {NEVER_RECOMPUTE}",
            is_wrong=True,
        )
    if found.theirs or readers(settings):
        why = "ROLL drops tokens after it has counted them"
        yield Row("train_infer_correction", f"{RECOMPUTE}=false beside it: {why}; set {RECOMPUTE}: true", is_wrong=True)


@check()
def head_can_train(found: Found) -> Iterator[Row]:
    settings, is_fused, size = found.settings, found.config.fused_lm_head_loss, found.config.max_logits_bytes
    if not isinstance(is_fused, bool):
        yield Row(HEAD, f"{HEAD}={is_fused!r} must be 'true' or 'false'", is_wrong=True)
        return
    if isinstance(size, bool) or not isinstance(size, int) or size <= 0:
        yield Row(HEAD_BYTES, f"{HEAD_BYTES}={size!r} must be a whole number of bytes above 0", is_wrong=True)
        return
    if not is_fused:
        if size != DEFAULT_MAX_LOGITS_BYTES:
            text = f"{HEAD_BYTES}={size} has no effect without our head: set {HEAD}: 'true', or remove it"
            yield Row(HEAD_BYTES, text, is_wrong=True)
        return
    if settings[LOG_PROBS] != OURS:
        why = "ROLL's function of log-probabilities needs logits, and none are made"
        yield Row(LOG_PROBS, f"{HEAD}=true: {why}; set {LOG_PROBS}: {OURS}", is_wrong=True)
    if settings[PACKING]:
        why = "ROLL calls the loss once a sequence, and each call would keep a gradient of the head's whole weight"
        yield Row(PACKING, f"{PACKING}=true with {HEAD}=true: {why}; set {PACKING}: false, or remove {HEAD}", is_wrong=True)


@check(is_warning=True, subject="old log-probabilities")
def ratio_is_one(found: Found) -> Iterator[str]:
    if not found.settings[RECOMPUTE]:
        yield "ROLL computes none, so the ratio is 1"


# The launch line


def read_line(words: Sequence[str], read_file: ReadFile) -> Line:
    """The YAML of a line. Files below its defaults are not read."""
    script = next((word for word in words if SCRIPT.fullmatch(word)), "")
    path = file_of(words, Path(script))
    if read_value(str(path)) is UNKNOWN:
        return Line(None, [Row("settings", f"{path} is not known here: nothing of ROLL's YAML is judged", is_note=True)])
    try:
        tree = with_values(read_file(path))
    except ConfigError as error:
        text = f"{error}. ROLL looks in the folder --config_path beside its script for --config_name"
        return Line(None, [Row("settings", text, is_wrong=True)])
    rows = [Row("settings", f"{path}")]
    if path.is_absolute() and not Path(script).is_absolute():
        rows.append(Row("settings", f"Hydra takes a --config_path that is relative to the folder of {script}", is_wrong=True))
    parents = tree.pop("defaults", None)
    if parents:
        rows.append(Row("settings", f"defaults: {parents} is not read, and what those files set is not judged", is_note=True))
    settings = settings_of_yaml(resolved(tree))
    if settings[WORKER_CLASS] == WORKER and not OUR_SCRIPT.fullmatch(script):
        return Line(None, [*rows, Row("script", f"{script} starts another pipeline: {OUR_PIPELINE}", is_wrong=True)])
    if script and not POLICY_SCRIPT.fullmatch(script):
        why = next((why for kind, why in OTHER_PIPELINES.items() if kind in script), "trains a loss that is not known here")
        return Line(None, [*rows, unjudged(f"{script} {why}")])
    return Line(settings, rows, is_partial=bool(parents))


def unchosen(settings: Settings) -> Iterator[Row]:
    variant = settings[VARIANT]
    if isinstance(variant, str) and "." in variant:
        text = f"ROLL trains its own loss, and {VARIANT}: {variant} has no effect; for ours set {WORKER_CLASS}: {WORKER}"
        yield Row(WORKER_CLASS, text, is_wrong=True)


# What the terms of ROLL's own losses weigh a token.
STOCK_MODES = {
    "token-mean": TOKEN_MEAN,
    "seq-mean-token-mean": OF_PRESENT_SAMPLES,
    "seq-mean-token-sum": Formula({"N+": -1}),
    "seq-mean-token-sum-norm": Formula(L_b=-1),
}


VARIANTS = ("vanilla", "ppo", "tis", "topr", "cispo", "kimi15")  # of the workers in ROLL's files actor_pg_worker.py
WORDS = {
    VARIANT: Words(VARIANTS, is_read=lambda settings: bool(re.match(r"roll\..*actor_pg_worker\.", str(settings[WORKER_CLASS])))),
    "loss_agg_mode": Words(tuple(STOCK_MODES)),
}


def stock(settings: Settings) -> Stock | None:
    weight = STOCK_MODES.get(str(settings["loss_agg_mode"]))
    has_kl, has_entropy = settings["use_kl_loss"] is not False, is_on(settings, "entropy_loss_coef")
    normalised = [name for name in ("difficulty_loss_weight", "length_loss_weight") if settings[name] is True]
    varies = [f"{name}=true divides by a sum over each micro-batch, so the step depends on the layout" for name in normalised]
    kl, entropy = weight if has_kl else None, weight if has_entropy else None
    value = Formula(N_b=-1, m_i=-1) if settings.value_of("adv_estimator") in (ABSENT, "gae") else None
    varies += [MEANS_ARE_ADDED.format("ROLL's critic")] if value is not None else []
    return None if weight is None else Stock(weight, kl, entropy, varies=tuple(varies), value=value)


def settings_of_yaml(tree: Mapping[str, Any]) -> Settings:
    """As ROLL makes its objects of a YAML: the pipeline's variables are the worker's, and it decides on old log-probabilities."""
    train, variables = tree.get("actor_train"), tree.get("system_envs")
    if isinstance(train, Mapping) and isinstance(variables, Mapping):
        own = train.get("system_envs")
        train = {**train, "system_envs": {**variables, **own} if isinstance(own, Mapping) else own or variables}
    tree = {**tree, "actor_train": train}
    tree[RECOMPUTE] = recomputes(settings_of(train, tree, {}))
    return settings_of(train, tree, flat(tree))


def file_of(words: Sequence[str], script: Path) -> Path:
    """Hydra looks for the folder beside the script."""
    given = {"--config_path": "config", "--config_name": "sppo_config"}  # the script's defaults
    for index, word in enumerate(words):
        flag, _, value = word.partition("=")
        if flag in given:
            given[flag] = value or "".join(words[index + 1 : index + 2])
    folder, name = given.values()
    return script.parent / folder / f"{name.removesuffix('.yaml')}.yaml"


def write(config: PolicyLossConfig, given: dict[str, Any]) -> dict[str, Any]:
    """Of the clip both sides are written, as its switch chooses both."""
    lines = {WORKER_CLASS: WORKER, f"{STRATEGY_ARGS}strategy_name": STRATEGY, **given}
    if config.fused_lm_head_loss:
        lines[LOG_PROBS] = OURS
    if dual_clip := given.get("dual_clip_loss"):
        lines |= {"dual_clip_loss": True, "pg_clip": (dual_clip - 1) / 2}
    if dual_clip or any(name in given for name in CLIPS[1:]):
        own = get_policy_loss(config.policy_loss).clip_ratios or (None, None)
        sides = zip(CLIPS[1:], (config.clip_ratio_low, config.clip_ratio_high), own, strict=True)
        lines |= {"use_pg_clip_range": True} | {name: side if value is None else value for name, value, side in sides}
    return lines | ({"use_kl_loss": True} if "kl_loss_coef" in given else {})


def line_of(name: str, value: Any) -> str:
    """A line of YAML. Variables of an environment are text."""
    shown = str(value).lower() if isinstance(value, bool) else "null" if value is None else as_typed(value)
    return f"{name}: '{shown}'" if name.startswith(ENVIRONMENT) and isinstance(value, int | float) else f"{name}: {shown}"


MODEL = ModelNames(
    sections=(f"{STRATEGY_ARGS}strategy_config.",),
    fields={"moe_aux_loss_coeff": f"{TRAIN}model_args.moe_aux_loss_coef"},
    own={"sequence_parallel": True},  # its models turn it on where experts need it
    unjudged={f"{TRAIN}mtp_training_mode": MTP_IS_NOT_JUDGED},
    backend=(f"{STRATEGY_ARGS}strategy_name", STRATEGY),
)
DOOR = Door(
    name="roll",
    has_logits=True,
    title="ROLL",
    probed="alibaba/ROLL 8eb27cc2",
    settings=(
        # The pipeline's, of a YAML that may have names of one's own for its ${...}.
        Setting("pg_clip", Kind.NUMBER, default=CLIP),
        Setting("pg_clip_low", Kind.NUMBER, "clip_ratio_low", CLIP),
        Setting("pg_clip_high", Kind.NUMBER, "clip_ratio_high", CLIP),
        Setting("use_pg_clip_range", Kind.SWITCH, default=False),
        Setting("dual_clip_loss", Kind.SWITCH, "clip_ratio_c", False),
        Setting("use_kl_loss", Kind.SWITCH, default=False),
        Setting("kl_loss_coef", Kind.NUMBER, "kl_coefficient", 0),
        Setting("entropy_loss_coef", Kind.NUMBER, "entropy_coefficient", 0),
        Setting("rollout_batch_size", Kind.NUMBER, default=128),
        Setting("num_return_sequences_in_group", Kind.NUMBER, default=1),
        Setting("ppo_epochs", Kind.NUMBER, default=1),
        Setting("adv_estimator", default="gae"),
        Setting("init_kl_coef", Kind.NUMBER, default=0.2),
        Setting(RECOMPUTE, Kind.SWITCH, default=False),
        Setting(NEVER_RECOMPUTE, Kind.SWITCH, default=False),
        *(Setting(name, kind, default=only) for name, (kind, only, _) in ONLY.items()),
        Setting(f"{CORRECTION}is_weight.enabled", Kind.SWITCH, default=False),
        Setting(f"{CORRECTION}filters", default=()),
        *names(
            "",
            Kind.NUMBER,
            "generate_opt_level max_running_requests max_additional_running_prompts seed rpc_timeout max_steps save_steps "
            "max_ckpt_to_keep logging_steps eval_steps val_batch_size local_rank prompt_length response_length sequence_length "
            "val_prompt_length val_sequence_length model_update_buffer_size_mb num_nodes num_gpus_per_node async_generation_ratio "
            "max_grad_norm l2 lambd gamma value_clip target_kl kl_horizon reward_clip advantage_clip critic_warmup val_n_sample "
            "minibatch_data_iter_num difficulty_low_threshold difficulty_high_threshold error_max_len_threshold",
        ),
        *names(
            "",
            Kind.SWITCH,
            "is_num_return_sequences_expand is_use_additional_prompts profiler_timeline profiler_memory "
            "report_length_and_rewards is_offload_states is_offload_optimizer_states_in_train_step use_reward_scaling "
            "add_len_reward use_reward_norm whiten_rewards whiten_advantages add_token_level_kl enable_reference is_pure_opd "
            "use_opd val_greedy max_len_mask difficulty_mask balance_length error_max_len_clip",
        ),
        *names(
            "",
            Kind.OTHER,
            "user_defined_rollout_loop_cls exp_name output_dir base_dir logging_dir rollout_dump_dir track_with "
            "resume_from_checkpoint length_profiler_dir profiler_output_dir otlp_output_dir model_download_type pretrain "
            "reward_pretrain kl_penalty norm_mean_type norm_std_type pure_opd_pipeline_type global_template "
            "save_logging_board_dir mask_type",
        ),
        *names(
            "",
            Kind.GROUP,
            "router_args tracker_kwargs checkpoint_config system_envs rollout_mock transfer_backend actor_train actor_infer critic "
            "reference reward train_infer_correction teacher student_train student_infer tag_to_template dataset_filter validation "
            "rewards reward_model",
        ),
        *names("", Kind.NUMBER, dict.fromkeys(("postive_loss_coef", "use_topr_neg_loss_coef"), "remove it")),
        *names("", Kind.OTHER, dict.fromkeys(("use_topr_loss", "use_policy_loss_type"), f"choose a loss in {VARIANT}")),
        Setting("pg_variant"),  # ROLL's own YAMLs give it to roles by ${pg_variant}
        # The worker's.
        Setting(VARIANT),
        Setting(WORKER_CLASS),
        Setting(LOG_PROBS, default=THEIRS),
        Setting(PACKING, Kind.SWITCH, default=False),
        Setting(f"{TRAIN}apply_loss_scale", Kind.SWITCH, default=True),
        Setting(DYNAMIC, Kind.SWITCH, default=False),
        Setting(f"{STRATEGY_ARGS}strategy_name", default="fsdp2_train"),
        Setting(PER_TOKEN, Kind.SWITCH, default=False),
        *(Setting(name, Kind.NUMBER, default=1) for name in LAYOUT),
        # A right name that is like one that we read.
        Setting(f"{STRATEGY_ARGS}strategy_config.virtual_pipeline_model_parallel_size", Kind.NUMBER),
        Setting(STEP[0], Kind.NUMBER, default=8),
        Setting(STEP[1], Kind.NUMBER, default=1),
        *names(
            TRAIN,
            Kind.NUMBER,
            "world_size num_gpus_per_worker model_update_frequency infer_batch_size backend_timeout max_concurrency "
            "max_tokens_per_microbatch_in_train sequence_length_round_in_train max_tokens_per_microbatch_in_infer "
            "sequence_length_round_in_infer opd_kl_coef",
        ),
        *names(TRAIN, Kind.NUMBER, dict.fromkeys(("topr_positive_weight", "topr_negative_weight"), "remove it")),
        *names(TRAIN, Kind.SWITCH, "use_dynamic_batching_in_infer offload_nccl logits_in_fp32"),
        *names(TRAIN, Kind.OTHER, "name device_mapping mtp_training_mode tag_included"),
        *names(
            TRAIN,
            Kind.GROUP,
            "model_args training_args data_args generating_args strategy_args system_envs sequence_packing_args router_replay",
        ),
    ),
    sections=(TRAIN, "pg_"),
    deviation=Deviation(
        without={"adv_estimator": "reinforce", "norm_mean_type": "group", "norm_std_type": None},
        divides=lambda settings: settings["adv_estimator"] == "grpo" or settings["norm_std_type"] not in (None, UNKNOWN),
    ),
    choice=Choice(
        setting=VARIANT, remedy=f"for ours set {WORKER_CLASS}: {WORKER} and {VARIANT}: <loss>.<aggregation>", imports=True
    ),
    own=Own(prefix=f"{ENVIRONMENT}{VARIABLES}", is_upper=True, others=OTHERS),
    keep_clip="use_pg_clip_range: true and {name}: {value}",
    derive=derive,
    is_ours=lambda settings: settings[WORKER_CLASS] in (WORKER, UNKNOWN) and trains_ours(settings),
    log_probs=LogProbs(setting=LOG_PROBS, value=OURS, theirs=THEIRS, backend=(f"{STRATEGY_ARGS}strategy_name", STRATEGY)),
    corrections=corrections,
    readers=readers,
    unchosen=unchosen,
    refuses=has_whole_steps,
    stock=stock,
    sizes=SizeNames(
        micro_batch=STEP[0],
        num_microbatches=STEP[1],
        ranks=(f"{TRAIN}device_mapping",),
        shared=LAYOUT,
        by_tokens={DYNAMIC: f"{TRAIN}max_tokens_per_microbatch_in_train"},
        dealing=lambda value_of: Dealing("ROLL deals them by length"),
        count=lambda value: whole_number(value) or len(devices_of(value) or ()) or None,
    ),
    sampler=Sampler(
        filters={
            f"{INFER}generating_args.top_p": Filter(0.7, (1.0,)),
            f"{INFER}generating_args.top_k": Filter(50, (-1, 0)),
        },
        engine=f"{INFER}strategy_args.strategy_name",
        engines={"vllm": None, "sglang": Scores.WHOLE},
        modes=(f"{INFER}strategy_args.strategy_config.logprobs_mode",),
        reshaped={f"{INFER}generating_args.repetition_penalty": NO_FACTOR},
        longest="response_length",
        typed="{}: {}".format,
    ),
    checks=(
        *(clip_that_its_switch_turns_off, clip_that_a_worker_cannot_know, only_values_that_ours_accept, strategy_is_megatrons),
        *(step_has_what_weights_and_ratios_need, head_can_train, ratio_is_one),
    ),
    megatron="strategy_name: megatron_train",
    model=MODEL,
    prompts=Prompts.COUNTED,
    step=(
        ("ROLL", Formula(M=1, dp=1), "apply_loss_scale: multiplies by micro-batches and data-parallel ranks"),
        *(TIMES_CP, AVERAGED[1]),
    ),
    why_not_per_token="ROLL's factors are made for the mean over ranks, and our worker refuses it",
    words=WORDS,
    starts="start_rlvr_pipeline.py",
    recognises=lambda words: any(map(SCRIPT.fullmatch, words)),
    read_line=read_line,
    write=write,
    line_of=line_of,
    place="lines of the YAML",
    separator="; ",
    honours=("kl_coefficient", "entropy_coefficient", *OTHERS),
    decides="temperature and batches",
    contract={
        "roll.pipeline.rlvr.actor_worker:ActorWorker.loss_func": ("self", "data", "output_tensor"),
        "roll.pipeline.rlvr.actor_worker:ActorWorker.initialize": ("self", "pipeline_config"),
    },
)
# Of the strategy that ROLL gives the worker.
STRATEGY_CONTRACT = {
    "train_step": ("self", "batch", "loss_func"),
    "inner_forward_step": ("self", "loss_func", "data_iterator", "model"),
    "_get_feature_on_this_cp_rank": ("self", "feature", "feature_name"),
}
