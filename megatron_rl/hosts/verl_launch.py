"""Reads the hydra overrides of `python -m verl.trainer.main_ppo a.b=value ...`, and says what our loss makes of them.

The plugin ends a launch with a problem; `megatron-rl doctor` prints all of it. A setting that is not on the line has the default of
verl's own files; with another --config-name, or a value that only the shell knows, it is not known and not judged. The settings of
a file are judged by the plugin, from verl's whole config.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Any

from megatron_rl.config import LossAggregation, PolicyLossConfig
from megatron_rl.errors import ConfigError
from megatron_rl.hosts import verl
from megatron_rl.hosts.dense_rows import CORRECTION_SETTINGS, numbers, sample_in_words
from megatron_rl.hosts.given import Given, clip_to_type, not_numbers
from megatron_rl.hosts.sampling import judge_sampling, names_of, readers_of
from megatron_rl.hosts.sections import VERL_ACTOR, VERL_CORRECTION, VERL_POLICY_LOSS, values_for_groups
from megatron_rl.hosts.settings_line import LOSS_SETTINGS, UNKNOWN, Row, advice_of, idle_settings, in_words, put, read_overrides
from megatron_rl.loss_hub import (
    clip_of,
    declared_parameters,
    get_loss_aggregation,
    get_policy_loss,
    needs_rollout_log_probs,
    policy_loss_names,
)
from megatron_rl.validation import routes_of_flags

MAIN = "verl.trainer.main_ppo"
ACTOR = "actor_rollout_ref.actor"
LOSS_MODE, LOSS_CLASS = f"{ACTOR}.policy_loss.loss_mode", f"{ACTOR}.policy_loss._target_"
ESTIMATOR = "algorithm.adv_estimator"
MODULES = "VERL_USE_EXTERNAL_MODULES"  # an environment variable of verl: what each of its processes imports first
MINI_BATCH, BATCH = f"{ACTOR}.ppo_mini_batch_size", "data.train_batch_size"
CORRECTION = "algorithm.rollout_correction"
SAMPLING = "sampling"
OWN_CONFIGS = ("ppo_trainer", "ppo_megatron_trainer")
# verl's defaults of what the checks read besides the actor's settings.
DEFAULTS: dict[str, Any] = {
    ESTIMATOR: "gae",
    MINI_BATCH: 256,
    BATCH: 1024,
    "trainer.use_v1": True,
    f"{CORRECTION}.bypass_mode": False,
    f"{CORRECTION}.rollout_rs": None,
    f"{CORRECTION}.rollout_is": None,
    f"{CORRECTION}.rollout_is_threshold": 2.0,
    f"{CORRECTION}.rollout_is_batch_normalize": False,
    "actor_rollout_ref.rollout.calculate_log_probs": True,
    f"{ACTOR}.use_kl_loss": False,
    f"{ACTOR}.megatron.context_parallel_size": 1,
}
# Estimators that have a companion, of the verl that was probed; tests/test_verl.py compares them with a checkout.
ESTIMATORS = (
    *("grpo", "grpo_vectorized", "grpo_passk", "reinforce_plus_plus_baseline", "rloo", "rloo_vectorized", "opo"),
    *("reinforce_plus_plus", "gpg"),
)
# Settings of the actor that our losses, or the checks, read; a name that is more similar than CLOSEST_SETTING is a slip.
READ_OF_ACTOR = (
    "clip_ratio",
    "clip_ratio_low",
    "clip_ratio_high",
    "clip_ratio_c",
    "loss_agg_mode",
    "loss_scale_factor",
    "kl_loss_type",
    "kl_loss_coef",
    "entropy_coeff",
)
# verl's value of what a launch line would be refused for, because our losses do not read it.
OWN_VALUES = {f"{ACTOR}.{name}": value for name, value in {"clip_ratio": 0.2, **verl.CLIPS}.items()}
CLOSEST_SETTING = 0.9
# Sections whose every name is known.
JUDGED = tuple(section.prefix.removesuffix(".") for section in (VERL_ACTOR, VERL_POLICY_LOSS, VERL_CORRECTION))
# For a loss_mode without our prefix: where its loss is one of ours, and where it may be the name of somebody else's.
SIMILAR_MODE, CLOSEST_MODE = 0.6, 0.9
# Its estimates of KL; tests/test_verl.py looks for them in a checkout.
KL_TYPES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
# Our settings that reach a loss in verl.
HONOURED = (*LOSS_SETTINGS, *CORRECTION_SETTINGS, "kl_coefficient", "kl_estimator")
NOT_OURS = "its own settings decide on entropy and temperature"


def is_main(word: str) -> bool:
    """Whether the word of a command line is verl's main program, as a module or as a file."""
    return word == MAIN or word.endswith(f"{MAIN.replace('.', '/')}.py")


class Overrides:
    """flags: words that begin with two hyphens, which are hydra's or nobody's. is_merged: the words are verl's whole config."""

    def __init__(self, words: Sequence[str], *, is_merged: bool = False):
        self.is_merged = is_merged
        start = next((index + 1 for index, word in enumerate(words) if is_main(word)), 0)
        self.given, self.knows_defaults = read_overrides(words[start:]), True
        names = [word for word in words[start:] if word != "--"]
        self.flags = [name.partition("=")[0] for name in names if name.startswith("--")]
        for index, word in enumerate(names):
            flag, _, value = word.partition("=")
            if flag in ("--config-name", "-cn"):
                name = value or (names[index + 1] if index + 1 < len(names) else "")
                self.knows_defaults &= name.removesuffix(".yaml") in OWN_CONFIGS

    def __getitem__(self, name: str) -> Any:
        """The value, verl's default, or UNKNOWN."""
        return self.given.get(name, DEFAULTS.get(name) if self.knows_defaults else UNKNOWN)

    def tree(self, prefix: str) -> dict[str, Any]:
        """The known overrides below a name, nested as in verl's config."""
        found: dict[str, Any] = {}
        for name, value in self.given.items():
            if not name.startswith(prefix + ".") or value is UNKNOWN:
                continue
            put(found, name.removeprefix(prefix + ".").split("."), value)
        return found


def problems_of(words: Sequence[str], *, is_merged: bool = False) -> list[str]:
    """What ends a launch."""
    rows = {row.text: row for row in judge(Overrides(words, is_merged=is_merged), is_launch=True)}.values()
    return [f"{row.subject}: {row.text}" for row in rows if row.is_wrong]


def judge_config(config: Any) -> tuple[list[str], list[str]]:
    """(problems, what is said at start) of verl's whole config, from whatever files."""
    policy_loss = verl.setting(config, f"{ACTOR}.policy_loss") or {}
    names = [
        *(LOSS_MODE, f"{CORRECTION}.rollout_rs_threshold", *DEFAULTS),
        *(f"{ACTOR}.{name}" for name in READ_OF_ACTOR),
        *(f"{ACTOR}.policy_loss.{name}" for name in policy_loss if f"{ACTOR}.policy_loss.{name}" != LOSS_MODE),
        *names_of("verl"),
    ]
    values = {name: verl.setting(config, name) for name in names}
    words = [f"{name}={value}" for name, value in values.items() if value not in (None, OWN_VALUES.get(name))]
    rows = [*judge(Overrides(words, is_merged=True), is_launch=True)]
    problems, said = ([f"{r.subject}: {r.text}" for r in rows if chosen(r)] for chosen in (lambda r: r.is_wrong, _is_said_at_start))
    return problems, said


def _is_said_at_start(row: Row) -> bool:
    return row.subject == SAMPLING and not row.is_wrong


def judge_settings(config: PolicyLossConfig) -> tuple[list[str], list[str]]:
    """(the overrides that give verl these settings, their problems)."""
    # verl's table has them by their declared names, as soon as the module that declares them is imported.
    loss, aggregation = get_policy_loss(config.policy_loss).name, get_loss_aggregation(config.loss_aggregation).name
    dotted = [name for name in (config.policy_loss, config.loss_aggregation) if "." in name]
    modules = ",".join(dict.fromkeys(name.rpartition(".")[0] for name in dotted))
    given: dict[str, Any] = {LOSS_MODE: f"{verl.PREFIX}{loss}.{aggregation}"}
    of_loss = get_policy_loss(config.policy_loss)
    clips = clip_to_type(of_loss, config.clip_ratio_low, config.clip_ratio_high, verl.CLIPS)
    # verl's workers take verl's default for nobody's choice, unless it is typed by our names.
    hidden = {} if of_loss.clip_ratios is None else dict(zip(verl.CLIPS, of_loss.clip_ratios, strict=True))
    hidden = {name: value for name, value in clips.items() if value == verl.CLIPS[name] != hidden.get(name, value)}
    clips = {name: value for name, value in clips.items() if name not in hidden}
    named = {verl.PARAMETERS[ours][0]: value for ours, value in config.loss_parameters.items() if ours in verl.PARAMETERS}
    for setting, value in {**clips, **named, verl.DIVISOR: config.loss_aggregation_divisor}.items():
        if value is not None:
            given[f"{ACTOR}.{setting}"] = value
    defaults = PolicyLossConfig()
    own = hidden | {name: value for name, value in config.loss_parameters.items() if name not in verl.PARAMETERS}
    own |= {n: getattr(config, n) for n in CORRECTION_SETTINGS if getattr(config, n) != getattr(defaults, n)}
    if own:
        given[LOSS_CLASS] = verl.POLICY_LOSS_CLASS
        given |= {f"+{ACTOR}.policy_loss.{name}": value for name, value in own.items()}
    if config.kl_coefficient:
        kl = {"use_kl_loss": True, "kl_loss_coef": config.kl_coefficient, "kl_loss_type": str(config.kl_estimator)}
        kl["loss_agg_mode"] = verl.AGG_MODES[LossAggregation.SAMPLE_MEAN]  # our mean of the term
        given |= {f"{ACTOR}.{name}": value for name, value in kl.items()}
    if needs_rollout_log_probs(config):
        given |= {f"{CORRECTION}.{name}": value for name, value in verl.NEEDED_OF_ROLLOUT_CORRECTION.items()}
    if config.loss_aggregation == LossAggregation.PROMPT_MEAN:
        given[ESTIMATOR] = f"{verl.PREFIX}grpo{verl.COMPANION_SUFFIX}"
    lines = in_words(given)
    # The step is what explain was given, so the sizes of batches are not judged.
    problems = problems_of([*lines, f"{BATCH}=$BATCH"])
    lines = [f"{MODULES}={modules}", *lines] if modules else lines
    return lines, problems + idle_settings(config, HONOURED, f"verl: {NOT_OURS}")


def judge(line: Overrides, *, is_launch: bool = False) -> Iterator[Row]:
    """is_launch: this verl will look at the names itself, so that one that is like none of ours may be its own."""
    for given, value in line.given.items():
        place = next(
            (whole for whole in (LOSS_MODE, ESTIMATOR) if given != whole and whole.endswith(f".{given.split('.')[-1]}")), None
        )
        if place is not None and str(value).startswith(verl.PREFIX):
            yield Row(given, f"verl has no such setting: type its whole name, {place}={value}", is_wrong=True)
    if groups := list(values_for_groups("verl", line.given, [*DEFAULTS, LOSS_MODE], LOSS_MODE)):
        yield from groups
        return
    yield from _names_and_numbers(line, is_launch)
    yield from _without_effect(line)
    name = line[LOSS_MODE]
    if isinstance(name, str) and not name.startswith(verl.PREFIX) and (meant := _meant_mode(name)) is not None:
        yield Row(LOSS_MODE, f"{name} is neither ours nor verl's: set {LOSS_MODE}={meant}", is_wrong=True)
        return
    if name is UNKNOWN or not str(name).startswith(verl.PREFIX):
        shown = "not known here" if name is UNKNOWN else f"{name or 'vanilla'} is verl's own"
        ours = f"{LOSS_MODE}={verl.PREFIX}<loss>.<aggregation> chooses one"
        yield Row(LOSS_MODE, f"{shown}: none of our losses is chosen; {ours}", is_note=True)
        yield from _companion_alone(line)
        return
    try:
        mode = verl.read_mode(name)
    except ConfigError as error:
        yield Row(LOSS_MODE, str(error), is_wrong=True)
        return
    yield from _settings(line, mode)
    yield from _weights(line, mode)
    yield from _corrections(line, mode)
    if line[f"{ACTOR}.use_kl_loss"] is True:
        kind = line.given.get(f"{ACTOR}.kl_loss_type", "low_var_kl")
        whose = "ours" if kind == verl.ADDED_ESTIMATOR else "verl's own"
        text = f"{kind}, {whose}, averaged by actor.loss_agg_mode={_agg_mode(line)}, whatever {mode.aggregation} does to the policy"
        yield Row("use_kl_loss", f"{text} term", is_note=True)
    elif f"{ACTOR}.kl_loss_type" in line.given and line[f"{ACTOR}.use_kl_loss"] is False:
        yield Row("kl_loss_type", "nothing reads it without use_kl_loss=True", is_note=True)


def _names_and_numbers(line: Overrides, is_launch: bool) -> Iterator[Row]:
    is_ours = str(line[LOSS_MODE]).startswith(verl.PREFIX) and not line.is_merged
    has_own_class = line[LOSS_CLASS] not in (None, verl.POLICY_LOSS_CLASS, "verl.workers.config.PolicyLossConfig")
    policy_loss = (*declared_parameters(), *CORRECTION_SETTINGS, *verl.CLIPS)
    for section, added, is_open in (
        (VERL_ACTOR, (), f"{ACTOR}._target_" in line.given),
        (VERL_POLICY_LOSS, policy_loss, has_own_class),
        (VERL_CORRECTION, (), False),
    ):
        may_have_more = is_launch and section is not VERL_POLICY_LOSS
        rows = section.judge(line.given, added, is_ours=is_ours, may_have_more=may_have_more)
        yield from (row for row in rows if not is_open or row.subject.removeprefix(section.prefix) in (*section.names, *added))
    yield from (Row(BATCH, problem, is_wrong=True) for problem in not_numbers([Given(BATCH, line.given.get(BATCH))]))


def _meant_mode(name: str) -> str | None:
    """Our loss_mode that a name without our prefix means; None: it may be verl's own, which has no dot, or somebody else's."""
    ours = {mode.removeprefix(verl.PREFIX): mode for mode in verl.loss_modes()}
    short = name.replace("-", "_").removeprefix(verl.PREFIX)
    losses = {mode.partition(".")[0] for mode in ours}
    cutoff = SIMILAR_MODE if short.partition(".")[0] in losses else CLOSEST_MODE
    close = get_close_matches(short, ours, n=1, cutoff=cutoff) if "." in name else []
    return ours[close[0]] if close else None


def _without_effect(line: Overrides) -> Iterator[Row]:
    """What is on the line and reaches nobody, or not our loss."""
    for flag in line.flags:
        if flag in routes_of_flags():
            text = f"a flag of miles and slime, and no setting of verl; loss and aggregation are one here: {LOSS_MODE}="
            yield Row(flag, f"{text}{verl.PREFIX}<loss>.<aggregation>", is_wrong=True)
    known = {*DEFAULTS, LOSS_MODE, LOSS_CLASS, f"{CORRECTION}.rollout_rs_threshold", *(f"{ACTOR}.{name}" for name in READ_OF_ACTOR)}
    for given in line.given:
        parent, _, last = given.rpartition(".")
        beside = [name.rpartition(".")[2] for name in known if name.rpartition(".")[0] == parent and parent not in JUDGED]
        close = [] if last in beside else get_close_matches(last, beside, n=1, cutoff=CLOSEST_SETTING)
        if close:
            yield Row(given, f"verl has no such setting: did you mean {parent}.{close[0]}?", is_wrong=True)
    if str(line[LOSS_MODE]).startswith(verl.PREFIX) and f"{ACTOR}.clip_ratio" in line.given:
        sides = [f"{ACTOR}.clip_ratio_{side}" for side in ("low", "high")]
        has_both = all(side in line.given for side in sides)
        remedy = f"{' and '.join(sides)} count" if has_both else f"set {' and '.join(sides)}"
        yield Row("clip_ratio", f"our losses do not read it: {remedy}", is_wrong=not has_both, is_note=has_both)
    in_rewards = line.given.get("algorithm.kl_penalty")
    if line.given.get("algorithm.use_kl_in_reward") is True and isinstance(in_rewards, str):
        if in_rewards.removesuffix("+") not in KL_TYPES:
            text = f"verl has no {in_rewards} for rewards: set one of {', '.join(KL_TYPES)}, or one with a + behind it"
            yield Row("algorithm.kl_penalty", text, is_wrong=True)
    kind, has_kl = line.given.get(f"{ACTOR}.kl_loss_type"), line[f"{ACTOR}.use_kl_loss"] is not False
    is_ours = kind == verl.ADDED_ESTIMATOR and (line[LOSS_MODE] is UNKNOWN or str(line[LOSS_MODE]).startswith(verl.PREFIX))
    if isinstance(kind, str) and kind.removesuffix("+") not in KL_TYPES and not is_ours:
        text = f"verl has no {kind}: set one of {', '.join(KL_TYPES)}, or one with a + behind it"
        text += f"; {verl.ADDED_ESTIMATOR} comes with a loss of ours"
        yield Row(
            "kl_loss_type", text if has_kl else f"{text}, before you turn use_kl_loss on", is_wrong=has_kl, is_note=not has_kl
        )


def _agg_mode(line: Overrides) -> Any:
    return line.tree(ACTOR).get("loss_agg_mode") or verl.DEFAULT_AGG_MODE


def _settings(line: Overrides, mode: verl.LossMode) -> Iterator[Row]:
    actor = line.tree(ACTOR)
    # verl fills in its dual clip where nothing is typed, and its clip.
    actor.setdefault("clip_ratio_c", verl.PARAMETERS["clip_ratio_c"][1])
    clips = {name: f"{ACTOR}.{name}" for name in verl.CLIPS}
    if line.knows_defaults:
        actor = {name: default for name, default in verl.CLIPS.items() if clips[name] not in line.given} | actor
    is_open = line.given.get(f"{ACTOR}.{verl.DIVISOR}") is UNKNOWN
    if is_open and mode.record.takes_divisor:
        actor[verl.DIVISOR] = 1.0
    try:
        settings = verl.read_settings(mode, actor)
    except ConfigError as error:
        yield from (Row(LOSS_MODE, problem, is_wrong=True) for problem in error.problems)
        return
    yield from _replaced_clip(line, mode, settings)
    idle = actor.get("policy_loss", {}).keys() & declared_parameters().keys() - {*verl.own_settings(mode)}
    for name in sorted(idle):
        instead = f"set {ACTOR}.{verl.PARAMETERS[name][0]}" if name in verl.PARAMETERS else f"{mode.loss} has no such parameter"
        yield Row(f"policy_loss.{name}", f"it has no effect: {instead}", is_wrong=True)
    own = sorted(actor.get("policy_loss", {}).keys() & verl.own_settings(mode))
    if own and line[LOSS_CLASS] not in (verl.POLICY_LOSS_CLASS, UNKNOWN):
        text = f"{', '.join(own)}: verl's own class has no such fields; set {LOSS_CLASS}={verl.POLICY_LOSS_CLASS}"
        yield Row("policy_loss", text, is_wrong=True)
    if needs_rollout_log_probs(settings):
        yield _sampler(line, mode)
    yield from _sampling(line, settings)
    divisor = None if is_open else settings.loss_aggregation_divisor
    weight = mode.record.weight_in_words({"L": divisor})
    yield Row(LOSS_MODE, f"{mode}, {numbers(settings)}, weight of a token {weight}")
    yield Row("sample", sample_in_words(mode.aggregation, verl.SEVERAL_ROWS))
    yield from advice_of(settings)
    if _agg_mode(line) == "seq-mean-token-mean" and _context_parallel(line):
        text = "verl's Megatron engine refuses it by name with context parallelism, and it acts on KL and entropy alone"
        yield Row("loss_agg_mode", f"{text}: set {ACTOR}.loss_agg_mode={verl.DEFAULT_AGG_MODE}", is_wrong=True)
    else:
        yield Row("loss_agg_mode", f"{_agg_mode(line)}, of KL and entropy; our loss does not read it")


def _replaced_clip(line: Overrides, mode: verl.LossMode, settings: PolicyLossConfig) -> Iterator[Row]:
    """A typed clip that verl's workers would take for verl's default."""
    acting = clip_of(settings)
    if acting is None:
        return
    given = zip(verl.CLIPS, (settings.clip_ratio_low, settings.clip_ratio_high), acting, strict=True)
    typed = {name: line.given.get(f"{ACTOR}.{name}", UNKNOWN) for name, side, own in given if side is None}
    lost = {
        name: typed[name] for name, own in zip(verl.CLIPS, acting, strict=True) if typed.get(name, UNKNOWN) not in (UNKNOWN, own)
    }
    if lost:
        values = " and ".join(f"{name}={value}" for name, value in lost.items())
        ours = " ".join(f"+{ACTOR}.policy_loss.{name}={value}" for name, value in lost.items())
        text = f"{values}: verl's default too, so its workers cannot tell that you typed it, and {mode} would train its own clip"
        yield Row("clip", f"{text}, {acting[0]:g}/{acting[1]:g}; remove it, or type {verl.CLASS_LINE} {ours}", is_wrong=True)


def _sampler(line: Overrides, mode: verl.LossMode) -> Row:
    """Whether verl hands over what the sampler's log-probabilities are computed from."""
    names = ("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize", "bypass_mode")
    level, threshold, is_normalised, bypasses = (line[f"{CORRECTION}.{name}"] for name in names)
    needed = " ".join(verl.rollout_correction_overrides())
    remedy = f"{mode} with these settings compares with the sampler, and gets it from verl's uncut weights; set {needed}"
    wrong = []
    if level not in ("token", UNKNOWN):
        wrong.append(f"rollout_is={level}")
    if threshold is not UNKNOWN and not (isinstance(threshold, int | float) and threshold >= verl.LEAST_UNCUT_THRESHOLD):
        wrong.append(f"rollout_is_threshold={threshold}")
    wrong += [f"{name}=true" for name, value in zip(names[2:], (is_normalised, bypasses), strict=True) if value is True]
    if line["actor_rollout_ref.rollout.calculate_log_probs"] is False:
        wrong.append("actor_rollout_ref.rollout.calculate_log_probs=false")
    if wrong:
        return Row("rollout_correction", f"{', '.join(wrong)}: {remedy}", is_wrong=True)
    return Row("rollout_correction", "verl's uncut weights give our loss the sampler's log-probabilities, and multiply nothing")


def _context_parallel(line: Overrides) -> bool:
    size = line[f"{ACTOR}.megatron.context_parallel_size"]
    return isinstance(size, int) and size > 1


def _weights(line: Overrides, mode: verl.LossMode) -> Iterator[Row]:
    """Whether the counts that verl hands over are those of a step."""
    estimator, batch, mini_batch = line[ESTIMATOR], line[BATCH], line[MINI_BATCH]
    if mode.has_companion:
        yield _companion(estimator)
        if isinstance(batch, int) and isinstance(mini_batch, int):
            text = f"{mini_batch} of {batch} prompts a step"
            if batch != mini_batch:
                text = (
                    f"{text}: a mini-batch cuts prompt groups, and the estimator sees the whole batch alone; set "
                    f"{MINI_BATCH}={batch}, or {BATCH}={mini_batch}"
                )
            yield Row("mini-batch", text, is_wrong=batch != mini_batch)
        return
    if isinstance(estimator, str) and estimator.startswith(verl.PREFIX):
        yield Row(ESTIMATOR, _weighs_twice(estimator, mode), is_wrong=True)
    divides = mode.record.needs is None or "num_samples" in mode.record.needs
    if divides and isinstance(batch, int) and isinstance(mini_batch, int) and batch % mini_batch:
        text = (
            f"{BATCH}={batch} is no multiple of {MINI_BATCH}={mini_batch}: verl fills the last mini-batch with samples without a "
            f"token, and {mode} would divide by them too; change one of them"
        )
        yield Row("mini-batch", text, is_wrong=True)


def _companion(estimator: Any) -> Row:
    names = [f"{verl.PREFIX}{name}{verl.COMPANION_SUFFIX}" for name in ESTIMATORS]
    if estimator is UNKNOWN:
        return Row(ESTIMATOR, f"not known here; it must be one of {', '.join(names)}", is_note=True)
    if estimator in names:
        return Row(ESTIMATOR, f"{estimator}: the advantages carry {LossAggregation.PROMPT_MEAN}")
    like = f"{verl.PREFIX}{estimator}{verl.COMPANION_SUFFIX}"
    remedy = like if like in names else names[0]
    why = f"{estimator} does not weigh prompt groups, and verl tells a loss nothing of prompts"
    return Row(ESTIMATOR, f"{why}; set {ESTIMATOR}={remedy} (for {', '.join(ESTIMATORS)} of verl)", is_wrong=True)


def _companion_alone(line: Overrides) -> Iterator[Row]:
    estimator = line[ESTIMATOR]
    if isinstance(estimator, str) and estimator.startswith(verl.PREFIX):
        text = f"{estimator} puts the weights of prompt groups into the advantages, and this loss has weights of its own"
        loss = line[LOSS_MODE] if line[LOSS_MODE] in policy_loss_names() else "grpo"
        remedy = f"set {LOSS_MODE}={verl.PREFIX}{loss}.{LossAggregation.PROMPT_MEAN}, or an estimator of verl"
        yield Row(ESTIMATOR, f"{text}; {remedy}", is_wrong=True)


def _weighs_twice(estimator: str, mode: verl.LossMode) -> str:
    return (
        f"{estimator} puts the weights of prompt groups into the advantages, and {mode} weighs once more; set "
        f"{LOSS_MODE}={verl.PREFIX}{mode.loss}.{LossAggregation.PROMPT_MEAN}, or an estimator of verl"
    )


def _corrections(line: Overrides, mode: verl.LossMode) -> Iterator[Row]:
    is_v1, bypasses, rejects = (line[f] for f in ("trainer.use_v1", f"{CORRECTION}.bypass_mode", f"{CORRECTION}.rollout_rs"))
    if bypasses is True and is_v1 is False:
        text = "bypass_mode=true of the old trainer puts verl's own loss in the place of ours; remove it, or trainer.use_v1=false"
        yield Row("rollout_correction", text, is_wrong=True)
    counts_tokens = mode.record.needs is None or "num_tokens" in mode.record.needs
    if rejects not in (None, UNKNOWN) and counts_tokens and is_v1 is not False and not mode.has_companion:
        text = (
            f"rollout_rs={rejects}: verl counts batch_num_tokens before it rejects, and {mode} would divide by rejected tokens; "
            "take another aggregation, or rollout_is alone"
        )
        yield Row("rollout_correction", text, is_wrong=True)


def _sampling(line: Overrides, settings: PolicyLossConfig) -> Iterator[Row]:
    """A sampler that keeps a part of the vocabulary, beside our loss and verl's own corrections."""
    given = {name: line[f"{CORRECTION}.{name}"] for name in ("rollout_is", "rollout_rs", "bypass_mode")}
    theirs = [f"{CORRECTION}.{name}={value}" for name, value in given.items() if value not in (None, False, UNKNOWN)]
    unset = None if line.knows_defaults else UNKNOWN
    found = judge_sampling("verl", lambda name: line.given.get(name, unset), [*readers_of(settings), *theirs])
    yield from (Row(SAMPLING, text, is_wrong=True) for text in found.problems)
    yield from (Row(SAMPLING, text, is_note=True) for text in found.warnings)
