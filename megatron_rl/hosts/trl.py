"""TRL: a GRPOTrainer with our losses, for training without Megatron.

    from megatron_rl.hosts.trl import GRPOTrainer

    args = GRPOConfig(loss_type="megatron_rl.gspo.prompt_mean", ...)
    GRPOTrainer(model, rewards, args, dataset, megatron_rl={"importance_correction": "tis"}).train()

What is done with the number that our loss returns; D ranks, M micro-batches of an optimiser step:

    ours: D x sum_i w_i sum_t m_it u_it l_it; TRL and Trainer: nothing; accelerate adds micro-batches; DDP: mean over D ranks -> sum

Weights are from counts of the step, which every rank has before it trains on the first micro-batch: the counts of all
completions are gathered once, when a batch of them is generated. So a step must have its completions by then. KL and entropy
are ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from megatron_rl.aggregation_record import Formula
from megatron_rl.config import PolicyLossConfig
from megatron_rl.errors import ConfigError
from megatron_rl.hosts.door import CLIPS, Choice, Deviation, Door, Found, Kind, Line, Own, Prompts, ReadFile, Setting, names, plug
from megatron_rl.hosts.programs import PREFERENCES, REWARDS, SUPERVISED, Programs
from megatron_rl.hosts.sampling import NO_FACTOR, Filter, Sampler, Scores
from megatron_rl.hosts.script_constants import plain
from megatron_rl.hosts.settings import UNKNOWN, Given, Settings, Size, read_value
from megatron_rl.hosts.step_sizes import (
    PROCESSES,
    has_other_number,
    is_python_alone,
    launched_processes,
    launcher_problems,
    whole_number,
)
from megatron_rl.hosts.stock import unjudged
from megatron_rl.hosts.trl_fields import misplaced, unknown_fields
from megatron_rl.hosts.trl_others import DEFAULTS as OTHERS_DEFAULTS
from megatron_rl.hosts.trl_others import GRPO, OTHER, known_trainer
from megatron_rl.hosts.trl_refusals import MODE, OBJECTIVES, SCALE, WORDS, refusals
from megatron_rl.hosts.trl_script import Script
from megatron_rl.hosts.trl_stock import (
    BIAS_CORRECTION,
    CHOICE,
    GENERATED,
    GENERATION,
    LEVEL,
    LIGERS_LOSS,
    LONGEST,
    PREFIX,
    SIZES,
    STEPS,
    defaults_of_version,
    instead_of_stock,
    judged,
    kl_by_default,
    knows_ranks,
    of_generation_batch,
    of_version,
    settings_of,
    stock,
)
from megatron_rl.loss_hub import get_policy_loss, needs_rollout_log_probs
from megatron_rl.validation.checks import Row, check

PLUG, TRAINER = "trl_trainer", "trl.trainer.grpo_trainer:GRPOTrainer"
REMEDY = f'GRPOConfig({CHOICE}="{PREFIX}<loss>.<aggregation>") with {__name__}.GRPOTrainer chooses one of ours'
# TRL's own commands.
COMMANDS = {"grpo": None, "rloo": None, "sft": SUPERVISED, "reward": REWARDS}
COMMANDS |= dict.fromkeys(("dpo", "kto"), PREFERENCES)
UNSEEN = "it is not found here: its flags are judged as if it parses them, and our trainer judges all of it when it is made"
# Words of HfArgumentParser for a switch.
TRUTH = dict.fromkeys(("yes", "true", "t", "y", "1"), True) | dict.fromkeys(("no", "false", "f", "n", "0"), False)
# What TRL's own loss selects or weighs in each micro-batch by itself, the only value that ours accepts, and why.
ONLY = {
    "use_liger_kernel": (False, "Liger's kernel is another loss; remove it"),
    LEVEL: ("token", "two losses in one launch; ours is gspo: set loss_type=megatron_rl.gspo.<aggregation>"),
    "top_entropy_quantile": (1.0, "TRL selects the tokens of each micro-batch by itself, so they depend on its size"),
    "use_adaptive_entropy": (False, "TRL changes the coefficient by the entropy of a micro-batch; set entropy_coef"),
    "off_policy_mask_threshold": (None, "ours is megatron_rl={'off_policy_sequence_delta': ...}"),
}


def derive(settings: Settings, fields: Mapping[str, Given]) -> dict[str, Given]:
    """epsilon is of both sides unless epsilon_high is set. The bias correction of KL, which newer TRLs have on by default, is
    `unbiased`; without a coefficient it is a mistake only where it was chosen."""
    low, high = (fields[name] for name in CLIPS)
    found = {CLIPS[1]: high if high.value is not None else low._replace(name="epsilon_high")}
    is_asked = fields["kl_coefficient"].value != 0.0 or BIAS_CORRECTION in settings.given
    if settings[BIAS_CORRECTION] and is_asked and fields["kl_estimator"].value is None:
        found["kl_estimator"] = Given(BIAS_CORRECTION, "unbiased")
    return found


def corrections(settings: Settings) -> list[str]:
    is_on = settings["use_vllm"] and settings["vllm_importance_sampling_correction"]
    return [f"vllm_importance_sampling_correction=True ({settings['vllm_importance_sampling_mode']})"] if is_on else []


@check()
def one_loss_trains(found: Found) -> Iterator[Row]:
    for name, (only, why) in ONLY.items():
        if name == "use_liger_kernel" and not found.settings[LIGERS_LOSS]:
            continue
        if name == LEVEL and found.loss.level == "sequence":
            why = f"{found.loss.name} has one ratio a sample by itself"
        if (value := found.settings[name]) != only:
            yield Row(name, f"{name}={value} beside {PREFIX}{found}: {why}; set {name}={only}", is_wrong=True)


@check()
def a_step_has_its_completions(found: Found) -> Iterator[Row]:
    names_of = (STEPS, GENERATED, "num_iterations")
    steps, generated, iterations = (found.settings[name] for name in names_of)
    name, said, exact = GENERATED, f"{GENERATED}={generated}", f"{GENERATED}={steps}"
    if generated is None and found.settings[GENERATION] is not None:
        name = GENERATION
        generated, exact, said = of_generation_batch(found.settings, whole_number(steps))
        if not knows_ranks(found.settings):
            text = f"the line does not say how many processes share it, so it is not judged with {STEPS}={steps}"
            yield Row(name, f"{GENERATION}: {text}; {exact} x processes always fits", is_note=True)
            return
    if not all(isinstance(count, int) for count in (steps, generated, iterations)):
        return
    if min(steps, generated, iterations) < 1:
        text = f"{', '.join(names_of)} are {steps}, {generated}, {iterations}: each must be 1 or more"
        yield Row(name, text, is_wrong=True)
        return
    if generated * iterations % steps:
        text = (
            f"{said} with {STEPS}={steps}: completions of the optimiser step are "
            f"generated after its first micro-batch is trained, so its counts are not known; set {exact}"
        )
        yield Row(name, text, is_wrong=True)
    if steps % generated and found.counts_prompts:
        text = (
            f"{said} with {STEPS}={steps} beside {PREFIX}{found}: TRL shuffles the "
            f"completions, and an optimiser step cuts prompt groups; set {exact}, or another aggregation"
        )
        yield Row(name, text, is_wrong=True)


@check(when=lambda found: bool(found.correction.is_on or "rollout_log_probs" in found.loss.inputs_needed))
def sampler_reports_its_scores(found: Found) -> Iterator[Row]:
    if not (found.settings["use_vllm"] or found.settings["rollout_func"]):
        text = f"{PREFIX}{found} with these settings compares with the sampler, and transformers reports no log-probabilities"
        yield Row("use_vllm", f"use_vllm=False: {text}; set use_vllm=True, or give the trainer a rollout_func", is_wrong=True)


@check()
def sampler_follows_the_settings(found: Found) -> Iterator[Row]:
    """generation_kwargs overrides them in generation alone: the trainer's scores and our rules of sampling do not see it."""
    given, filters = found.settings["generation_kwargs"], DOOR.sampler.filters
    for name in ("temperature", *filters) if isinstance(given, Mapping) else ():
        expected = found.settings[name]
        if expected is None and name in filters:
            expected = filters[name].default
        if name in given and given[name] != expected:
            text = f"generation_kwargs sets {name} to {given[name]} for the sampler alone; set {name}={given[name]}"
            yield Row("generation_kwargs", text, is_wrong=True)


@check()
def clip_reaches_the_trainer(found: Found) -> Iterator[Row]:
    """A typed epsilon that the trainer takes for TRL's default: both are the same in a GRPOConfig. `given` is of a line."""
    own, default = found.loss.clip_ratios, DOOR.all_defaults["epsilon"]
    is_lost = found.settings.given.get("epsilon") == default and found.settings["epsilon_high"] is None
    if own is not None and is_lost and own[0] != default and found.config.clip_ratio_low is None:
        text = f"TRL's default too, so the trainer cannot tell that you typed it, and {PREFIX}{found} would train its own clip, "
        text += f"{own[0]:g}/{own[1]:g}; remove it, or give the trainer megatron_rl={{'clip_ratio_low': {default}}}"
        yield Row("epsilon", f"epsilon={default}: {text}", is_wrong=True)


def is_launch(words: Sequence[str]) -> bool:
    """A line that names one of our losses, or TRL's own command."""
    pairs = pairwise([*words, ""])
    names_ours = any(name == f"--{CHOICE}" and value.startswith(PREFIX) for name, value in pairs)
    return names_ours or command_of(words) is not None or any(word.startswith(f"--{CHOICE}={PREFIX}") for word in words)


def command_of(words: Sequence[str]) -> str | None:
    """The word behind TRL's own command."""
    pairs = pairwise([Path(word).name for word in words])
    return next((command for program, command in pairs if program == "trl" and command in COMMANDS), None)


def script_of(words: Sequence[str]) -> Path | None:
    return next((Path(word) for word in words if word.endswith(".py") and Path(word).is_file()), None)


def read_line(words: Sequence[str], read_file: ReadFile) -> Line:
    """`--name value` as HfArgumentParser reads them, over a file of --config, over what the script gives its config."""
    command = command_of(words)
    if command is not None and COMMANDS[command] is not None:
        return Line(None, [unjudged(f"trl {command} {COMMANDS[command]}")])
    path = None if command else script_of(words)
    script = None if path is None else Script.of(path)
    if script is not None and script.known is None and (why := script.why_not_judged()) and script.trainers:
        return Line(None, [unjudged(f"{path} {why}")])
    place = next((at for at, word in enumerate(words) if word.endswith(".py") and not command), -1)
    typed, rows = dict[str, Any](), list[Row]()
    for word, behind in pairwise([*words[place + 1 :], "--"]):
        name, is_joined, value = word.removeprefix("--").partition("=")
        if word.startswith("--"):
            typed |= read_flag(name.replace("-", "_"), value if is_joined else "true" if behind.startswith("--") else behind)
    if script is not None and (idle := script.without_effect(typed)):
        listed, has = ", ".join(f"--{name}" for name in idle), "has" if len(idle) == 1 else "have"
        text = f"{path} reads no command line: {listed} {has} no effect; set this in the script, or fill its config by a TrlParser"
        rows.append(Row(f"--{idle[0]}", text, is_wrong=True))
        typed = {name: value for name, value in typed.items() if name not in idle}
    before = words if command else words[: max(place, 0)]
    rows += [] if command else launcher_problems(before, read_file)
    if (processes := launched_processes(before, read_file) or (Size(1, "python") if is_python_alone(before) else None)) is not None:
        typed[PROCESSES] = processes
    elif command or has_other_number(before):  # the command starts accelerate
        typed[PROCESSES] = UNKNOWN
    of_file: dict[str, Any] = {}
    if isinstance(typed.get("config"), str):
        try:
            for name, value in read_file(Path(typed["config"])).items():
                of_file |= read_flag(name, value) if isinstance(value, str) else {name: value}
        except ConfigError as error:
            rows.append(Row("config", str(error), is_wrong=True))
    of_script, assigned, said = script.settings(JUDGED) if script is not None else ({}, {}, [Row("script", UNSEEN, is_note=True)])
    config = f"{known_trainer([], command) or GRPO}".replace("Trainer", "Config")
    slips = [*unknown_fields([*typed, *of_file], config, is_command=True)] if command else []
    meant, moved = dict[str, Any](), list[str]()
    if script is not None:
        fields = script.fields_given()
        of_config = {name: plain(value) for name, value in {**of_script, **assigned}.items() if name in {*fields, *assigned}}
        for row, found in misplaced(of_config, script.given_to_trainer(), script.config, OUR_KEYS):
            slips, meant, moved = [*slips, row], {**meant, **found}, [*moved, row.subject]
        slips += unknown_fields((name for name in fields if name not in {row.subject for row in slips}), script.config)
    rows += [*slips, *judged_without(slips, moved)]
    given = of_script | of_file | typed | assigned
    given = {name: value for name, value in given.items() if name not in {row.subject for row in slips}}
    of_ours = {} if script is None else script.given_to_ours({**defaults_of_version(DOOR.all_defaults), **given})
    given = meant | given | of_ours
    other = known_trainer([] if script is None or script.known is None else [script.known], command)
    if other is not None:
        text = f"{other} always trains TRL's own loss, judged below; ours train in {__name__}.GRPOTrainer"
        settings = Settings.of_names(given | {OTHER: other}, OTHERS_DEFAULTS)
        refused = [*refusals(settings)]
        is_refused = any(row.is_wrong for row in refused)
        return Line(None, [*rows, Row("trainer", text, is_note=True), *refused], stock=None if is_refused else settings)
    if command and any(PREFIX in word for word in words):
        rows.append(Row("trl", f"the command makes TRL's own trainer: start a script with {__name__}.GRPOTrainer", is_wrong=True))
    # Not typed=given: a GRPOConfig does not tell the trainer what was typed, and doctor says what the trainer does.
    settings = settings_of(given, DOOR.all_defaults)
    beside = [] if script is None else [*script.trainer_beside(settings)]
    rows = [*([] if command else said), *rows, *beside]
    if beside and not str(settings[CHOICE]).startswith(PREFIX):  # nothing trains, so nothing is said of TRL's own loss
        return Line(None, [*rows, *(row for row in refusals(settings) if row.subject != CHOICE)])
    return Line(settings, [*rows, *of_version(settings)], is_partial=not command)


def judged_without(slips: Sequence[Row], moved: Sequence[str]) -> Iterator[Row]:
    """Of names that stop the run. moved: those that have another place."""
    wrong = [row.subject for row in slips if row.is_wrong]
    as_if = " and ".join(f"{name} stood in its place" for name in wrong if name in moved)
    without = ", ".join(name for name in wrong if name not in moved)
    how = ", and ".join([*([f"as if {as_if}"] if as_if else []), *([f"without {without}"] if without else [])])
    if how:
        yield Row("script", f"what follows is judged {how}", is_note=True)


def read_flag(name: str, text: str) -> dict[str, Any]:
    """As HfArgumentParser reads text, of a flag and of a file. A switch that is on by default has a flag with no_ before it."""
    kinds = {one.name: one.kind for one in DOOR.settings}
    if kinds.get(name.removeprefix("no_")) == Kind.SWITCH:
        is_on = TRUTH.get(text.lower(), text)
        return {name.removeprefix("no_"): not is_on if name.startswith("no_") else is_on}
    value = read_value(text)
    return {name: text if name in WORDS and value is not UNKNOWN else value}


def write(config: PolicyLossConfig, given: dict[str, Any]) -> dict[str, Any]:
    """Of both sides TRL takes epsilon where epsilon_high is not set, and has the sampler's log-probabilities from vLLM. Its trainer
    takes TRL's default as not set, unless it is given by our name."""
    own = get_policy_loss(config.policy_loss).clip_ratios
    if own is not None and given.get("epsilon") == DOOR.all_defaults["epsilon"] != own[0]:
        given[DOOR.own.name(CLIPS[0])] = given.pop("epsilon")
    if "epsilon" in given and "epsilon_high" not in given and config.clip_ratio_high is not None:
        given["epsilon_high"] = config.clip_ratio_high
    if config.kl_coefficient:  # its default is another one before TRL 1.10
        given.pop(DOOR.own.name("kl_estimator"), None) if config.kl_estimator == "unbiased" else None
        given[BIAS_CORRECTION] = config.kl_estimator == "unbiased"
    if needs_rollout_log_probs(config):
        given |= {"use_vllm": True, "vllm_importance_sampling_correction": False}
    return given


def of_written(config: PolicyLossConfig) -> Iterator[str]:
    if config.kl_coefficient:
        is_on, estimator = config.kl_estimator == "unbiased", config.kl_estimator
        own = f"--kl-estimator {estimator}{', our default' if estimator == PolicyLossConfig().kl_estimator else ''}"
        yield f"{BIAS_CORRECTION}={is_on} is {own}; TRL has {kl_by_default()} ({judged()}; False before 1.10, and True since)"


def line_of(name: str, value: Any) -> str:
    return lines_of({name: value})[0]


def lines_of(given: Mapping[str, Any]) -> list[str]:
    """Arguments of GRPOConfig, then the trainer's one with all of ours."""
    own = {name.removeprefix(PREFIX): value for name, value in given.items() if name.startswith(PREFIX)}
    theirs = [f"{name}={value!r}" for name, value in given.items() if not name.startswith(PREFIX)]
    return [*theirs, *([f"megatron_rl={own!r} of GRPOTrainer"] if own else [])]


DOOR = Door(
    name="trl",
    title="TRL",
    probed="huggingface/trl f2cd57710",
    settings=(
        Setting(CHOICE, default="dapo"),
        Setting("epsilon", Kind.NUMBER, "clip_ratio_low", 0.2),
        Setting("epsilon_high", Kind.NUMBER, "clip_ratio_high"),
        Setting("delta", Kind.NUMBER, "clip_ratio_c"),
        Setting("sapo_temperature_pos", Kind.NUMBER, "sapo_temperature_positive", 1.0),
        Setting("sapo_temperature_neg", Kind.NUMBER, "sapo_temperature_negative", 1.05),
        Setting("vespo_k_pos", Kind.NUMBER, "vespo_power_positive", 2.0),
        Setting("vespo_lambda_pos", Kind.NUMBER, "vespo_decay_positive", 3.0),
        Setting("vespo_k_neg", Kind.NUMBER, "vespo_power_negative", 3.0),
        Setting("vespo_lambda_neg", Kind.NUMBER, "vespo_decay_negative", 2.0),
        Setting("beta", Kind.NUMBER, "kl_coefficient", 0.0),
        Setting("entropy_coef", Kind.NUMBER, "entropy_coefficient", 0.0),
        *(Setting(name, default=only) for name, (only, _) in ONLY.items()),
        Setting(BIAS_CORRECTION, Kind.SWITCH, default=True),
        Setting("use_vllm", Kind.SWITCH, default=False),
        Setting("vllm_importance_sampling_correction", Kind.SWITCH, default=True),
        Setting(MODE, default="sequence_mask"),
        Setting(STEPS, Kind.NUMBER, default=1),
        Setting(SCALE, default="group"),
        Setting("num_iterations", Kind.NUMBER, default=1),
        Setting("temperature", Kind.NUMBER, default=1.0),
        Setting(LONGEST, Kind.NUMBER, default=512),
        *names("", Kind.NUMBER, f"{GENERATED} num_generations num_generations_eval"),
        *names("", Kind.NUMBER, "vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min"),
        *names(
            "",
            Kind.NUMBER,
            dict.fromkeys(("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target"), "set entropy_coef"),
        ),
        *names("", Kind.OTHER, f"{OBJECTIVES} vllm_mode {GENERATION}"),
        *names("", Kind.OTHER, "reward_weights mask_truncated_completions repetition_penalty generation_kwargs"),
        *names("", Kind.SWITCH, "sync_ref_model auto_find_batch_size"),
    ),
    sections=(),
    deviation=Deviation(without={SCALE: "none"}, divides=lambda settings: settings[SCALE] not in ("none", False, UNKNOWN)),
    choice=Choice(setting=CHOICE, prefix=PREFIX, remedy=REMEDY, imports=True, instead=instead_of_stock),
    own=Own(prefix=PREFIX, clips=True, others=("kl_estimator",)),
    keep_clip="megatron_rl={{'clip_ratio_{side}': {value}}} of GRPOTrainer",
    derive=derive,
    corrections=corrections,
    sampler=Sampler(
        filters={"top_p": Filter(1.0, (1.0,)), "top_k": Filter(0, (0, -1)), "min_p": Filter(None, (None, 0.0))},
        engines={"vLLM": Scores.KEPT},
        reshaped={"repetition_penalty": NO_FACTOR},
        longest=LONGEST,
    ),
    checks=(
        one_loss_trains,
        clip_reaches_the_trainer,
        a_step_has_its_completions,
        sampler_reports_its_scores,
        sampler_follows_the_settings,
    ),
    refuses=refusals,
    stock=stock,
    sizes=SIZES,
    prompts=Prompts.COUNTED,
    returns=Formula(dp=1),
    step=(("accelerate", Formula(), "adds micro-batches"), ("DDP", Formula(dp=-1), "averages over ranks")),
    why_not_per_token="TRL's trainer is no Megatron",
    was_run="TRL 1.10 and 1.16, in one process and with DDP",
    starts="GRPOTrainer",
    recognises=is_launch,
    programs=Programs(package="trl", of_script=lambda tree: Script(tree).why_not_judged()),
    read_line=read_line,
    write=write,
    of_written=of_written,
    line_of=line_of,
    lines_of=lines_of,
    place="arguments of GRPOConfig, and of GRPOTrainer where it is said",
    separator=", ",
    honours=("kl_coefficient", "kl_estimator", "entropy_coefficient"),
    decides="temperature and batches",
    contract={
        f"{TRAINER}._compute_loss": ("self", "model", "inputs"),
        f"{TRAINER}._prepare_inputs": ("self", "generation_batch"),
        f"{TRAINER}._generate_and_score_completions": ("self", "inputs"),
        f"{TRAINER}._get_per_token_logps_and_entropies": (
            *("self", "model", "input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy", "..."),
        ),
    },
)

# The keys of our trainer's argument.
OUR_KEYS = frozenset(name.removeprefix(PREFIX) for name in DOOR.own_names())
# What a script's row names of what it gives its config.
JUDGED = {*DOOR.known_names, SIZES.micro_batch}


def __getattr__(name: str) -> Any:
    """The trainer, which imports TRL; doctor and explain do without it."""
    if name == "GRPOTrainer":
        return plug(PLUG).GRPOTrainer
    raise AttributeError(f"{__name__} has GRPOTrainer, and no {name}")
