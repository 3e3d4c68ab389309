"""NeMo-RL: our losses in the place of its ClippedPGLossFn, with the step's weights, and prompt_mean by its advantages.

    python -m megatron_rl.hosts.launch examples/run_grpo.py --config ... ++loss_fn.megatron_rl=<loss>.<aggregation>

What NeMo-RL's Megatron worker does with the number that a loss returns, c context-parallel ranks, M micro-batches:

    NeMo-RL: x 1 / c, x M / c; Megatron: x c / M; the gather of log-probabilities adds c equal gradients; DDP: sums over D ranks
    -> sum over ranks and micro-batches; with packing NeMo-RL may call a loss once a sequence, and adds

So a loss returns sum_i w_i S_i of what it is given, w_i from the counts of the whole global batch, which NeMo-RL hands over. KL is
NeMo-RL's own, with its formula and its own mean, or ours where an estimator is chosen. The metrics are NeMo-RL's.

Here is what NeMo-RL's settings are to us; nemo_rl_plugin.py is what it calls.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.aggregation_record import TOKEN_MEAN, Formula
from megatron_rl.arguments import read_number
from megatron_rl.config import LARGEST_RATIO, CorrectionLevel, PolicyLossConfig
from megatron_rl.errors import ConfigError
from megatron_rl.hosts import door_line
from megatron_rl.hosts.closed_words import Words
from megatron_rl.hosts.dealing import Dealing
from megatron_rl.hosts.door import (
    CORRECTION_SETTINGS,
    SUMMED,
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
from megatron_rl.hosts.door_line import read_launch
from megatron_rl.hosts.model_names import ModelNames
from megatron_rl.hosts.programs import DISTILLED, PREFERENCES, REWARDS, SUPERVISED, TRAINS_NOTHING, Programs, modules_from
from megatron_rl.hosts.sampling import OFF, Filter, Replay, Sampler, Scores
from megatron_rl.hosts.scripts import imported_packages, syntax_tree, taken_from
from megatron_rl.hosts.settings import ABSENT, UNKNOWN, Given, Settings, as_typed, flat, put, read_overrides, value_at
from megatron_rl.hosts.settings_files import inherited, merge, nested, resolved, with_values
from megatron_rl.hosts.step_sizes import SizeNames, whole_steps
from megatron_rl.hosts.stock import OF_PRESENT_SAMPLES, Stock, Term, is_on
from megatron_rl.registries.corrections import get_correction
from megatron_rl.registries.kl_estimators import get_kl_estimator
from megatron_rl.validation.checks import Row, check

PACKAGE, TRAINER, LAUNCHER = "nemo_rl", "nemo_rl.algorithms.grpo", "megatron_rl.hosts.launch"
LOSS_FN, SAMPLING = "loss_fn.", "policy.generation."
REPLAY = f"{SAMPLING}vllm_kwargs.return_sampling_mask"
NAME, PREFIX = f"{LOSS_FN}megatron_rl", f"{LOSS_FN}megatron_rl_"
# What computes log-probabilities: ours, whichever loss trains, or NeMo-RL's.
LOG_PROBS, QUANTISED = f"{PREFIX}log_probs", "policy.quant_cfg"
# NeMo-RL's fused head, and what trains on logits themselves.
FUSED_HEAD, DRAFT = "policy.megatron_cfg.use_fused_linear_logprobs", "policy.draft.enabled"
CRITIC = "value_loss_fn"
CHOOSE = f"++{NAME}=<loss>.<aggregation>"
PENALTY, POSITIVE_EXAMPLES = f"{LOSS_FN}reference_policy_kl_penalty", f"{LOSS_FN}positive_example_nll_weight"
# Settings that choose another loss, and what ours has for it.
OTHER_LOSSES = {
    f"{LOSS_FN}use_cispo": "cispo",
    f"{LOSS_FN}disable_ppo_ratio": "reinforce",
    f"{LOSS_FN}sequence_level_importance_ratios": "gspo",
}
# NeMo-RL's truncation of sampling weights -> our correction. None: weights without bounds.
WEIGHTS, TRUNCATION = f"{LOSS_FN}use_importance_sampling_correction", f"{LOSS_FN}truncated_importance_sampling_type"
BOUND, LOWER_BOUND = f"{LOSS_FN}truncated_importance_sampling_ratio", f"{LOSS_FN}truncated_importance_sampling_ratio_min"
CORRECTIONS = {None: "tis", "tis": "tis", "icepop": "icepop", "seq-mask-tis": "seq_mask_tis"}
# What our KL estimator takes the place of. The coefficient stays NeMo-RL's.
ESTIMATOR, WITH_DEVIATION = (f"grpo.adv_estimator.{name}" for name in ("name", "normalize_rewards"))
KL_SETTINGS = {
    f"{LOSS_FN}reference_policy_kl_type": "k3",
    f"{LOSS_FN}use_on_policy_kl_approximation": False,
    f"{LOSS_FN}kl_input_clamp_value": 20.0,
    f"{LOSS_FN}kl_output_clamp_value": 10.0,
}
WORDS = {
    TRUNCATION: Words(names=tuple(filter(None, CORRECTIONS))),
    f"{LOSS_FN}reference_policy_kl_type": Words(names=("k1", "k2", "k3"), is_read=lambda settings: is_on(settings, PENALTY)),
    ESTIMATOR: Words(names=("grpo", "gdpo", "opd", "reinforce_plus_plus"), beside_ours=True),
}
WORKER, LOGPROBS_MODE = "policy.megatron_cfg.enabled", f"{SAMPLING}vllm_cfg.logprobs_mode"
PROMPTS, GENERATIONS, BATCH = "grpo.num_prompts_per_step", "grpo.num_generations_per_prompt", "policy.train_global_batch_size"
# What NeMo-RL writes into advantages after its estimator.
AFTER_THE_ESTIMATOR = tuple(
    f"grpo.{name}"
    for name in ("advantage_clip_low", "advantage_clip_high", "invalid_tool_call_advantage", "malformed_thinking_advantage")
)
# What run_grpo.py reads without --config, beside itself.
DEFAULT_FILE = Path("configs", "grpo_math_1B.yaml")
# What other scripts of NeMo-RL's read without it, below their own folder.
OTHER_FILES = {
    "run_ppo": Path("configs", "ppo_math_1B.yaml"),
    "run_vlm_grpo": Path("configs", "vlm_grpo_3B.yaml"),
    "run_grpo_sliding_puzzle": Path("configs", "grpo_sliding_puzzle.yaml"),
    "run_grpo_single_controller": Path("configs", "grpo_math_1B_megatron_single_controller.yaml"),
    "run_grpo_nemo_gym": Path("grpo_workplace_assistant_nemotron_nano_v2_9b.yaml"),
}
# The modules of nemo_rl.algorithms that train ClippedPGLossFn, and why others are not judged.
SAME_LOSS = ("grpo", "grpo_sync", "ppo", "single_controller")
OTHER_LOSS = {"sft": SUPERVISED, "dpo": PREFERENCES, "rm": REWARDS, "distillation": DISTILLED}
# NeMo-RL's scripts of other trainers; tests/test_sections.py looks at a checkout's scripts.
OTHER_SCRIPT = re.compile(r"run_(?!.*grpo).*\.py|run_grpo_single_controller\.py")


# Its settings


def correction_of(settings: Settings) -> str | None:
    """Ours for NeMo-RL's truncation; None: ours has none."""
    truncation = settings[TRUNCATION]
    return CORRECTIONS.get(truncation) if isinstance(truncation, str | None) else None


def derive(settings: Settings, fields: Mapping[str, Given]) -> dict[str, Given]:
    """The coefficient of our KL term, where our estimator is chosen, and our correction in the place of NeMo-RL's."""
    penalty = fields["kl_coefficient"].value
    is_whole = isinstance(penalty, int) and not isinstance(penalty, bool)
    number = read_number(penalty) if is_whole else penalty
    is_ours = fields["kl_estimator"].is_chosen
    found = {"kl_coefficient": Given(PENALTY, number if is_ours else 0.0, is_typed=is_ours)}
    if settings[WEIGHTS] and (kind := correction_of(settings)) is not None:
        high = LARGEST_RATIO if settings[TRUNCATION] is None else settings[BOUND]
        found["importance_correction"] = Given(f"{WEIGHTS}=true, which is importance_correction", kind)
        if CorrectionLevel.TOKEN not in (levels := get_correction(kind).levels):
            found["importance_correction_level"] = Given(TRUNCATION, levels[0])
        found["importance_correction_low"] = Given(LOWER_BOUND, settings[LOWER_BOUND] or 0.0)
        found["importance_correction_high"] = Given(BOUND, high)
    return found


def wrong(name: str, value: Any, text: str) -> Row:
    """Of a setting, with its value."""
    return Row(name, f"{name}={str(value).lower() if isinstance(value, bool) else value}{text}", is_wrong=True)


@check()
def one_loss_trains(found: Found) -> Iterator[Row]:
    for name, ours in OTHER_LOSSES.items():
        if found.settings[name]:
            text = f" beside {NAME}={found}: two losses in one launch; remove it. Ours has ++{NAME}={ours}.<aggregation>"
            yield wrong(name, found.settings[name], text)
    if weight := found.settings[POSITIVE_EXAMPLES]:
        text = ": NeMo-RL divides this term by the tokens of a micro-batch, so its weight depends on the micro-batch size"
        yield wrong(POSITIVE_EXAMPLES, weight, f"{text}; remove it")


@check()
def one_correction_acts(found: Found) -> Iterator[Row]:
    settings = found.settings
    if not settings[WEIGHTS]:
        return
    if correction_of(settings) is None:
        text = (
            f": beside this switch our losses have {', '.join(filter(None, CORRECTIONS))}, or null for weights without bounds; set "
            f"one of these, or turn it off and set {DOOR.own.typed('importance_correction')}"
        )
        yield wrong(TRUNCATION, settings[TRUNCATION], text)
    ours = [settings.one(DOOR.own.name(name), DOOR.own.typed(name)) for name in CORRECTION_SETTINGS]
    if chosen := [f"{one.name}={one.value}" for one in ours if one.is_chosen]:
        text = f"{', '.join(chosen)} beside {WEIGHTS}=true: two corrections in one launch; turn one of them off"
        yield Row(chosen[0], text, is_wrong=True)


@check()
def one_estimate_of_kl_acts(found: Found) -> Iterator[Row]:
    """Ours takes the place of NeMo-RL's."""
    ours = found.settings.one(DOOR.own.name("kl_estimator"), DOOR.own.typed("kl_estimator"))
    if not ours.is_chosen:
        return
    if found.settings[f"{LOSS_FN}use_kl_in_reward"]:
        text = f" has no effect beside {LOSS_FN}use_kl_in_reward=true, which puts the KL into the rewards by NeMo-RL's own estimate"
        yield wrong(ours.name, ours.value, f"{text}; remove one of them")
    for theirs in map(found.settings.one, KL_SETTINGS):
        if theirs.is_chosen:
            yield wrong(theirs.name, theirs.value, f" has no effect beside {ours.name}={ours.value}; remove it")


@check()
def ratio_of_the_kl_is_of_its_kind(found: Found) -> Iterator[Row]:
    """With NeMo-RL's replay the ratio is among the sampler's sets, and its reference over the whole vocabulary."""
    if found.replays and found.config.kl_coefficient and get_kl_estimator(found.config.kl_estimator).takes_log_ratio:
        text = f" multiplies a KL over the whole vocabulary by a ratio among the sets of {REPLAY}=true; choose another one"
        yield wrong(DOOR.own.typed("kl_estimator"), found.config.kl_estimator, text)


@check()
def kl_is_a_mean_over(found: Found) -> Iterator[Row]:
    """Not a problem: what the term is, for doctor."""
    if found.config.kl_coefficient:
        yield Row("KL", f"ours, {found.config.kl_coefficient} x mean over samples, {found.config.kl_estimator}")


def terms(found: Found) -> dict[str, Term]:
    """NeMo-RL's KL term, where our estimator does not take its place."""
    penalty, is_of_tokens = found.settings[PENALTY], found.settings[f"{LOSS_FN}token_level_loss"]
    kind = found.settings[f"{LOSS_FN}reference_policy_kl_type"]
    if found.config.kl_coefficient or not penalty or penalty is UNKNOWN:
        return {}
    return {
        "KL": Term(
            f"{penalty} x {'not known here' if kind is UNKNOWN else kind}", TOKEN_MEAN if is_of_tokens else OF_PRESENT_SAMPLES
        )
    }


@check()
def worker_is_megatrons(found: Found) -> Iterator[Row]:
    if not found.settings[WORKER]:
        text = (
            f"{WORKER} is not true: our losses are made for NeMo-RL's Megatron worker, and other workers multiply a loss by other "
            f"factors; set {WORKER}=true and policy.dtensor_cfg.enabled=false"
        )
        yield Row(WORKER, text, is_wrong=True)


@check(when=lambda found: found.is_carried)
def weights_reach_the_loss(found: Found) -> Iterator[Row]:
    """The advantages carry them, of all prompts of a step."""
    settings = found.settings
    for name in AFTER_THE_ESTIMATOR:
        if settings[name] not in (None, UNKNOWN):
            text = (
                f" beside {found}: NeMo-RL writes it into the advantages after they have the weights of prompt groups; set "
                f"{name}=null, or another aggregation"
            )
            yield wrong(name, settings[name], text)
    prompts, generations, batch = (settings[name] for name in (PROMPTS, GENERATIONS, BATCH))
    if all(isinstance(count, int) for count in (prompts, generations, batch)) and batch != prompts * generations:
        text = (
            f" beside {found}: an optimiser step must have all {prompts * generations} samples of a batch, because a smaller one "
            f"cuts prompt groups; set it to {prompts * generations}"
        )
        yield wrong(BATCH, batch, text)


def stock(settings: Settings) -> Stock | None:
    """NeMo-RL's own loss: both terms are means over the tokens of the step, or over its samples."""
    is_of_tokens, remarks, varies = settings[f"{LOSS_FN}token_level_loss"], [], []
    if not isinstance(is_of_tokens, bool):
        return None
    if is_on(settings, POSITIVE_EXAMPLES):
        text = "is a mean over the tokens of a micro-batch, and micro-batches are added: it depends on the layout"
        varies.append(f"{POSITIVE_EXAMPLES}={settings[POSITIVE_EXAMPLES]} {text}")
    if settings.value_of(DRAFT) is True:
        remarks.append(f"{DRAFT}=true adds the loss of a draft model, which is not judged")
    weight = TOKEN_MEAN if is_of_tokens else OF_PRESENT_SAMPLES
    value = TOKEN_MEAN if settings.value_of(CRITIC) not in (ABSENT, None) else None
    kl = weight if is_on(settings, PENALTY) else None
    return Stock(weight, kl, remarks=tuple(remarks), varies=tuple(varies), value=value)


def why_not_judged(script: ast.Module) -> str | None:
    """A script that imports NeMo-RL: by the trainer that it takes from nemo_rl.algorithms."""
    modules = modules_from(script, f"{PACKAGE}.algorithms")
    if any(module in SAME_LOSS for module in modules):
        return None
    return next((OTHER_LOSS[one] for one in modules if one in OTHER_LOSS), "imports no trainer that is known here")


PROGRAMS = Programs(
    names={
        "run_grpo_(sliding_puzzle|single_controller|nemo_gym)|run_vlm_grpo|run_ppo": None,
        "run_(vlm_)?sft": SUPERVISED,
        "run_dpo": PREFERENCES,
        "run_rm": REWARDS,
        r"run_(\w+_)?distillation(_nemo_gym)?": DISTILLED,
        "run_eval": TRAINS_NOTHING,
    },
    package=PACKAGE,
    of_script=why_not_judged,
)


DOOR = Door(
    name="nemo_rl",
    title="NeMo-RL",
    probed="NVIDIA-NeMo/RL 7ea279abf",
    settings=(
        Setting(f"{LOSS_FN}ratio_clip_min", Kind.NUMBER, "clip_ratio_low", 0.2),
        Setting(f"{LOSS_FN}ratio_clip_max", Kind.NUMBER, "clip_ratio_high", 0.2),
        Setting(f"{LOSS_FN}ratio_clip_c", Kind.NUMBER, "clip_ratio_c"),
        Setting(PENALTY, Kind.NUMBER, "kl_coefficient", 0.01),
        Setting(NAME),
        Setting(LOG_PROBS, default=PACKAGE),
        Setting(f"{LOSS_FN}token_level_loss", Kind.SWITCH, default=True),
        Setting(POSITIVE_EXAMPLES, Kind.NUMBER, default=0.0),
        *(Setting(name, Kind.NUMBER if name.endswith("_value") else Kind.OTHER, default=own) for name, own in KL_SETTINGS.items()),
        *(Setting(name, Kind.SWITCH, default=False) for name in (*OTHER_LOSSES, WEIGHTS)),
        *(Setting(f"{LOSS_FN}{name}", Kind.SWITCH, default=False) for name in ("use_kl_in_reward", "force_on_policy_ratio")),
        Setting(TRUNCATION),
        *names("", Kind.NUMBER, f"{BOUND} {LOWER_BOUND} {PROMPTS} {GENERATIONS} {BATCH}"),
    ),
    sections=(LOSS_FN,),
    choice=Choice(setting=NAME, remedy=f"{CHOOSE} on the launch line chooses both", imports=True),
    own=Own(prefix=PREFIX, added="++", others=("kl_estimator",)),
    defaults={TRUNCATION: None, BOUND: None, LOWER_BOUND: None, WORKER: True, WITH_DEVIATION: True, ESTIMATOR: "grpo"},
    deviation=Deviation(
        without={WITH_DEVIATION: False},
        divides=lambda settings: settings[WITH_DEVIATION] is True and settings[ESTIMATOR] in ("grpo", "gdpo"),
    ),
    derive=derive,
    is_ours=lambda settings: trains_ours(settings),
    of_any_launch=lambda settings: problems_of_log_probs(settings),
    stock=stock,
    refuses=lambda settings: whole_steps("NeMo-RL", settings, (PROMPTS, GENERATIONS), (BATCH,), {}),
    sizes=SizeNames(
        micro_batch="policy.train_micro_batch_size",
        by_tokens={f"policy.{how}.enabled": f"policy.{how}.train_mb_tokens" for how in ("sequence_packing", "dynamic_batching")},
        dealing=lambda value_of: Dealing("NeMo-RL deals them by length"),
    ),
    log_probs=LogProbs(setting=LOG_PROBS, value="megatron_rl", theirs=PACKAGE),
    sampler=Sampler(
        filters={f"{SAMPLING}top_p": Filter(1.0, (1.0,)), f"{SAMPLING}top_k": Filter(None, ("null", None, -1, 0))},
        engine=f"{SAMPLING}backend",
        engines={"vllm": None, "megatron": Scores.KEPT, "dynamo": Scores.KEPT, "sglang": Scores.WHOLE},
        modes=(LOGPROBS_MODE,),
        trainer_keeps=(f"{SAMPLING}top_p", f"{SAMPLING}top_k"),
        longest=f"{SAMPLING}max_new_tokens",
        turns="grpo.max_rollout_turns",
        recomputes=True,
        replay=Replay(
            by={REPLAY: OFF},
            told=f"{REPLAY}=true with a {SAMPLING}top_k above 0",
            mark="nemo_rl.algorithms.logits_sampling_utils:SamplingMask",
        ),
        unsettled={f"{SAMPLING}vllm_kwargs.speculative_config": OFF},
    ),
    checks=(
        *(one_loss_trains, one_correction_acts, one_estimate_of_kl_acts, worker_is_megatrons, weights_reach_the_loss),
        *(ratio_of_the_kl_is_of_its_kind, kl_is_a_mean_over),
    ),
    megatron="policy.megatron_cfg.enabled=true",
    model=ModelNames(
        sections=("policy.megatron_cfg.", "policy.megatron_cfg.model_overrides."),
        own={"moe_router_load_balancing_type": "none", "sequence_parallel": True},
        backend=(WORKER, True),
        is_per_token=lambda settings: True,
        trains_mtp=True,
    ),
    prompts=Prompts.CARRIED,
    carrier="the launcher's estimator",
    step=(
        ("NeMo-RL", Formula(M=1, cp=-2), "its wrappers divide by cp, and multiply by M / cp"),
        TIMES_CP,
        ("gather", Formula(cp=1), "each cp rank has the whole loss, and the gather of log-probabilities adds their gradients"),
        SUMMED[1],
    ),
    why_not_per_token="its Megatron worker always sets it",
    is_per_token=True,
    words=WORDS,
    terms=terms,
    starts="run_grpo.py",
    programs=PROGRAMS,
    recognises=lambda words: any(word.lstrip("+").startswith(NAME) or word.endswith("run_grpo.py") for word in words),
    read_line=lambda words, read_file: read_line(words, read_file),
    write=lambda config, given: write(config, given),
    line_of=lambda name, value: f"{'++' * name.startswith(NAME)}{name}={as_typed(value)}",
    place="overrides on the launch line",
    contract={
        f"{TRAINER}:ClippedPGLossFn.__call__": (
            *("self", "next_token_logprobs", "data", "global_valid_seqs", "global_valid_toks"),
        ),
        f"{TRAINER}:ClippedPGLossFn.__init__": ("self", "cfg", "use_fused_linear_logprobs"),
        f"{TRAINER}:_create_advantage_estimator": ("master_config",),
        f"{TRAINER}:setup": ("master_config", "..."),
    },
)


def trains_ours(settings: Settings) -> bool:
    """Whether a launch through our launcher has our loss. It may have our log-probabilities alone."""
    return settings[NAME] is not None or settings[LOG_PROBS] == PACKAGE


def log_probs_need_the_worker(settings: Settings) -> Iterator[Row]:
    """They come with a class of NeMo-RL's Megatron worker."""
    if settings[LOG_PROBS] in (PACKAGE, UNKNOWN):
        return
    if settings[WORKER] is False:
        text = f"{LOG_PROBS}={settings[LOG_PROBS]} is made for NeMo-RL's Megatron worker; set {WORKER}=true, or remove it"
        yield Row(LOG_PROBS, text, is_wrong=True)
    if settings.value_of(QUANTISED) not in (ABSENT, UNKNOWN, None):
        text = f"{LOG_PROBS}={settings[LOG_PROBS]} beside {QUANTISED}: each has NeMo-RL make another class of worker; remove one"
        yield Row(LOG_PROBS, text, is_wrong=True)


def has_fused_head(settings: Settings) -> bool:
    """Whether NeMo-RL's switch is on beside our log-probabilities: the head is ours then."""
    return settings.value_of(FUSED_HEAD) is True


def fused_head_is_not_filtered(settings: Settings) -> Iterator[Row]:
    """What reads a row of logits beside its log-probability finds none."""
    if settings[LOG_PROBS] in (PACKAGE, UNKNOWN) or not has_fused_head(settings):
        return
    for name, one in DOOR.sampler.filters.items():
        if settings[name] not in (*one.off, ABSENT, UNKNOWN):
            text = f": NeMo-RL cuts the trainer's distribution too, and {FUSED_HEAD}=true makes no logits; remove one of them"
            yield wrong(name, settings[name], text)
    if settings.value_of(DRAFT) is True:
        text = f": a draft model learns from logits, and {FUSED_HEAD}=true makes none; remove one of them"
        yield wrong(DRAFT, True, text)


def problems_of_log_probs(settings: Settings) -> Iterator[Row]:
    yield from log_probs_need_the_worker(settings)
    yield from fused_head_is_not_filtered(settings)


def check_log_probs(settings: Settings) -> bool:
    """Whether our log-probabilities take the place of NeMo-RL's. Raises one ConfigError with every problem of that."""
    others = problems_of_log_probs(settings)
    return door_line.check_log_probs(DOOR, settings, trains_ours=trains_ours(settings), others=others)


def check_launch(master_config: Any, words: Sequence[str] = ()) -> Found:
    """What NeMo-RL's whole config trains. words: of the launch line. Raises one ConfigError with every problem."""
    return read_launch(DOOR, settings_of(master_config, words))


def settings_of(master_config: Any, words: Sequence[str] = ()) -> Settings:
    """NeMo-RL keeps any name below loss_fn and reads none that its model does not have: another one is a slip."""
    typed, loss_fn = read_overrides(words), master_config.loss_fn
    # NeMo-RL's model has made 1.0 of a number that was typed as true.
    of_line = {name: value for name, value in typed.items() if isinstance(value, bool)}
    worker = value_at(master_config, WORKER)
    of_line[WORKER] = worker is not ABSENT and bool(worker)
    given = typed | {f"{LOSS_FN}{name}": value for name, value in dict(loss_fn).items()} | of_line
    newer = {f"{LOSS_FN}{name}" for name in getattr(type(loss_fn), "model_fields", ())} - {one.name for one in DOOR.settings}
    return Settings(
        lambda name: of_line[name] if name in of_line else value_at(master_config, name),
        DOOR.all_defaults,
        typed=typed,
        has_files=True,
        given={name: value for name, value in given.items() if name not in newer},
    )


# Its launch line


def read_line(words: Sequence[str], read_file: ReadFile) -> Line:
    """The settings file with those that it inherits, and the overrides; without the file the overrides alone."""
    if LAUNCHER not in words:
        text = (
            f"without python -m {LAUNCHER} before the script, NeMo-RL trains its own loss and reads no {NAME}; our losses: that, "
        )
        text += f"and {CHOOSE}"
        is_meant = any(word.lstrip("+").startswith(NAME) for word in words)
        rows = [Row("launcher", text, is_wrong=is_meant, is_note=not is_meant)]
        stock = None if is_meant else _settings_of_line(words, read_file, rows)
        return Line(None, rows, stock=stock, is_partial=rows[-1].subject == "settings" and rows[-1].is_note)
    rows = [*judge_script(words)]
    return Line(_settings_of_line(words, read_file, rows), rows)


def _settings_of_line(words: Sequence[str], read_file: ReadFile, rows: list[Row]) -> Settings:
    """rows: gets what is said of the file and of names that need a ++."""
    overrides, path = read_overrides(words), file_of(words)
    try:
        tree, is_whole = with_values(inherited(path, read_file)), True
        rows.append(Row("settings", f"{path}, and {len(overrides)} override{'' if len(overrides) == 1 else 's'}"))
    except ConfigError as error:
        tree, is_whole = nested({LOGPROBS_MODE: "processed_logprobs"}), False  # as in NeMo-RL's own files
        rows.append(Row("settings", f"{error}: only the overrides of the line are judged", is_note=True))
    for word in words:
        name = word.partition("=")[0]
        if name.startswith(NAME) and value_at(tree, name) is ABSENT:
            text = f"NeMo-RL's settings have no {name}, so hydra needs ++ before it: type ++{word}"
            rows.append(Row(name, text, is_wrong=True))
    merge(tree, nested(overrides))
    tree = resolved(tree)
    worker = value_at(tree, WORKER)
    if worker is ABSENT or worker is UNKNOWN:
        put(tree, WORKER.split("."), worker is UNKNOWN or not is_whole)
    given = flat(tree) | overrides
    return Settings.of_object(tree, DOOR.all_defaults, typed=overrides, has_files=True, given=given)


def file_of(words: Sequence[str]) -> Path:
    for index, word in enumerate(words):
        flag, _, value = word.partition("=")
        if flag == "--config":
            return Path(value or words[index + 1]) if value or index + 1 < len(words) else Path()
    script = next((Path(word) for word in words if word.endswith(".py")), Path())
    return script.parent / OTHER_FILES.get(script.stem, DEFAULT_FILE)


def judge_script(words: Sequence[str]) -> Iterator[Row]:
    """A script of NeMo-RL that starts another trainer: by what it imports, or by its name where it is not here."""
    path = next((Path(word) for word in words if word.endswith(".py")), None)
    if path is None:
        yield Row("script", f"no script is on the line: give one after -m {LAUNCHER}, as examples/run_grpo.py", is_wrong=True)
    elif path.is_file():
        try:
            is_script_of_ours(path)
        except ConfigError as error:
            yield Row("script", str(error), is_wrong=True)
    elif OTHER_SCRIPT.fullmatch(path.name):
        text = f"{path} is not {TRAINER}, which our losses are made for: start examples/run_grpo.py, or a script like it"
        yield Row("script", text, is_wrong=True)


def is_script_of_ours(script: Path) -> bool:
    """Whether the script trains with NeMo-RL. Raises ConfigError for a script of another trainer of NeMo-RL."""
    tree = syntax_tree(script)
    if PACKAGE not in imported_packages(tree):
        return False
    if "setup" not in taken_from(tree, TRAINER):
        raise ConfigError(
            f"{script} does not import setup from {TRAINER}: our losses are made for that trainer, as examples/run_grpo.py starts "
            "it. Others send a step in parts, with 1 in the place of its counts, or train with another loss"
        )
    return True


def write(config: PolicyLossConfig, given: dict[str, Any]) -> dict[str, Any]:
    given = given | {PENALTY: config.kl_coefficient}  # NeMo-RL's default is a KL term
    return given | {DOOR.own.name("kl_estimator"): str(config.kl_estimator)} if config.kl_coefficient else given
