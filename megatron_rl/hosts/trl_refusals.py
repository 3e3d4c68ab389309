"""What TRL's own trainers refuse of a run, when they are made or at the first step: what concerns the loss and the sizes of a step.

tests/test_trl_refusals.py holds each against TRL's own code. A refused run trains nothing, so nothing is said of its weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from megatron_rl.hosts.closed_words import closest, none_of, refused
from megatron_rl.hosts.settings import ABSENT, UNKNOWN, Settings
from megatron_rl.hosts.step_sizes import whole_number
from megatron_rl.hosts.trl_others import ASYNC, GRPO, OTHER, RLOO
from megatron_rl.hosts.trl_stock import (
    CHOICE,
    GENERATED,
    GENERATION,
    LEVEL,
    PREFIX,
    SIZES,
    STEPS,
    STOCK_TYPES,
    is_before,
    judged,
    sizes_of,
    trains_ligers_loss,
)
from megatron_rl.loss_hub import policy_loss_names
from megatron_rl.validation.checks import Row

MODE = "vllm_importance_sampling_mode"
SCALE, OBJECTIVES = "scale_rewards", "multi_objective_aggregation"
CLIPS = ("vllm_importance_sampling_clip_min", "vllm_importance_sampling_clip_max")
# Settings that are one of these words, else TRL raises. Other text of them is no number and no switch.
WORDS: Mapping[str, tuple[str, ...]] = {
    CHOICE: tuple(STOCK_TYPES),
    LEVEL: ("token", "sequence"),
    SCALE: ("group", "batch", "none"),
    OBJECTIVES: ("sum_then_normalize", "normalize_then_sum"),
    MODE: ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
    "vllm_mode": ("server", "colocate"),
}
# What TRL makes of a switch, which is not what it makes of its text.
SWITCHED = {"True": "group", "False": "none"}
GENERATIONS = {GRPO: 8, RLOO: 2}
# The versions from which TRL refuses to halve the batch when memory runs out, and Liger's loss takes `delta`.
KEEPS_BATCH, CLIPS_TWICE = (1, 9), (1, 4)
COUNT = "num_generations"
TITLE = "TRL"

Refused = Iterator[tuple[str, str]]  # the setting, and what TRL says of it


def refusals(settings: Settings) -> Iterator[Row]:
    """A problem for each, and a note where it depends on the number of processes, which the line does not say."""
    trainer = settings[OTHER] or GRPO
    is_ours = str(settings[CHOICE]).startswith(PREFIX)
    found: list[tuple[str, str]] = []
    if trainer == GRPO:
        found += _words(settings, is_ours=is_ours)
        found += _sampling(settings)
        found += () if is_ours else _liger(settings)  # our trainer takes none of its losses
    elif trainer == ASYNC and settings["use_liger_kernel"] is True:
        found.append(("use_liger_kernel", "use_liger_kernel=True has no loss in AsyncGRPOTrainer; remove it"))
    if trainer in GENERATIONS:
        found += [*_reference(settings), *_generation(settings)]
        yield from _sizes(settings, GENERATIONS[trainer])
    yield from (refused(TITLE, name, text) for name, text in found)


def _words(settings: Settings, *, is_ours: bool) -> Refused:
    is_read = dict.fromkeys(WORDS, True) | {
        **dict.fromkeys((CHOICE, LEVEL), not is_ours),
        SCALE: settings[OBJECTIVES] in (None, WORDS[OBJECTIVES][0]),
        MODE: _weighs_by_the_sampler(settings),
        "vllm_mode": settings["use_vllm"] is True,
    }
    for name, words in WORDS.items():
        value = settings[name]
        if not is_read[name] or value in (None, UNKNOWN) or value in words or (name == SCALE and isinstance(value, bool)):
            continue
        meant = (SWITCHED.get(str(value)) if name == SCALE else None) or closest(value, words)
        text = none_of(name, value, words, meant)
        if name == CHOICE:
            ours = f"{PREFIX}{value if value in policy_loss_names() else 'gspo'}.token_mean"
            text = f"{text}{'' if meant else f'; ours have a prefix, as in {name}={ours}'} ({judged()})"
        yield name, text


def _weighs_by_the_sampler(settings: Settings) -> bool:
    return settings["use_vllm"] is True and settings["vllm_importance_sampling_correction"] is True


def _sampling(settings: Settings) -> Refused:
    mode, low, high = settings[MODE], settings[CLIPS[0]], settings.value_of(CLIPS[1])
    high = 3.0 if high is ABSENT else high  # TRL's default
    if settings[CHOICE] == "vespo" and _weighs_by_the_sampler(settings) and mode in WORDS[MODE][2:]:
        yield MODE, f"{CHOICE}=vespo with use_vllm=True takes no {MODE}={mode}; set {MODE}=token_truncate, or token_mask"
    if all(isinstance(one, int | float) for one in (low, high)) and low >= high:
        yield CLIPS[0], f"{CLIPS[0]}={low} must be below {CLIPS[1]}={high}"
    is_on = settings["vllm_importance_sampling_correction"] is True
    if is_on and mode in WORDS[MODE][::2] and low is None and high is None:
        yield CLIPS[1], f"{MODE}={mode} needs a bound; set {CLIPS[1]}=3.0"


def _liger(settings: Settings) -> Refused:
    """Of the versions whose Liger has a loss of its own."""
    if not trains_ligers_loss(settings):
        return
    quantile, entropy = settings["top_entropy_quantile"], settings["entropy_coef"]
    beside = {
        "off_policy_mask_threshold": settings["off_policy_mask_threshold"] not in (None, UNKNOWN),
        "top_entropy_quantile": isinstance(quantile, int | float) and quantile < 1,
        "entropy_coef": isinstance(entropy, int | float) and entropy != 0,
        "use_adaptive_entropy": settings["use_adaptive_entropy"] is True,
        "delta": is_before(CLIPS_TWICE) and settings["delta"] not in (None, UNKNOWN),
    }
    for name in (name for name, is_set in beside.items() if is_set):
        yield "use_liger_kernel", f"Liger's loss has no {name}={settings[name]}; set use_liger_kernel=False ({judged()})"


def _reference(settings: Settings) -> Refused:
    if settings["sync_ref_model"] is True and settings["beta"] == 0:
        yield "sync_ref_model", "sync_ref_model=True with beta=0: there is no reference model; set beta, or remove it"


def _generation(settings: Settings) -> Refused:
    """Of numbers that hold for any number of processes."""
    number = settings[COUNT]
    if whole_number(number) == 1 or number == 0:
        yield COUNT, f"{COUNT}={number}: advantages need 2 completions of a prompt, or more; set {COUNT}=8"
    if all(settings[name] not in (None, UNKNOWN) for name in (GENERATION, GENERATED)):
        yield GENERATION, f"{GENERATION} and {GENERATED} are both set, and each says what a generation is; remove one of them"
    if settings["auto_find_batch_size"] is True and not is_before(KEEPS_BATCH):
        text = "auto_find_batch_size=True may cut prompt groups; remove it, and lower per_device_train_batch_size"
        yield "auto_find_batch_size", f"{text} ({judged()})"


def _sizes(settings: Settings, default: int) -> Iterator[Row]:
    """A generation has whole micro-batches of all processes, and whole prompt groups; with a loss of ours it has whole steps."""
    sizes, is_ours = sizes_of(settings), str(settings[CHOICE]).startswith(PREFIX)
    group = default if settings[COUNT] is None else whole_number(settings[COUNT])
    batch, generated = settings[GENERATION], settings[GENERATED]
    if not (sizes.micro_batch and group):
        return
    rows, ranks = sizes.micro_batch.value, sizes.data.value if sizes.data else 1
    of_rows, of_group = f"{SIZES.micro_batch}={rows}", f"{COUNT}={group}{' by default' if settings[COUNT] is None else ''}"
    of_ranks = f" x {ranks} process{'es' if ranks > 1 else ''} of {sizes.data.source}" if sizes.data else ""
    of_step = sizes.num_microbatches.value if sizes.num_microbatches else None
    if batch is not None:
        size = whole_number(batch) if generated is None else None
        wholes = {f"{of_rows}{of_ranks}": rows * ranks, of_group: group}
        if size is not None:
            remedy = f"set {GENERATION}={_next(size, *wholes.values(), rows * ranks * of_step if is_ours and of_step else 1)}"
            found = (f"{GENERATION}={size} is no multiple of {words}; {remedy}" for words, whole in wholes.items() if size % whole)
            yield from (refused(TITLE, GENERATION, text) for text in found)
        return
    steps = of_step if generated is None else whole_number(generated)
    if steps is None or rows * steps * ranks % group == 0:
        return
    product = f"a generation has {of_rows} x {STEPS if generated is None else GENERATED}={steps}"
    if sizes.data:
        whole = rows * steps * ranks
        text = f"{product}{of_ranks} = {whole} completions, which is no multiple of {of_group}"
        near = [size for size in range(max(2, group - group // 4), group + group // 4 + 1) if whole % size == 0]
        other = f"{COUNT}={min(near, key=lambda size: abs(size - group))}, or " if near else ""
        remedy = f"{other}{SIZES.micro_batch}={_next(rows, group // math.gcd(steps * ranks, group))}"
        yield refused(TITLE, COUNT, f"{text}; set {remedy}")
    else:
        needed = group // math.gcd(rows * steps, group)
        text = f"TRL refuses this run unless its number of processes is a multiple of {needed}: {product} completions for each"
        yield Row(COUNT, f"{text}, and in all a multiple of {of_group}", is_note=True)


def _next(size: int, *factors: int) -> int:
    """The first multiple of all factors that is not below."""
    whole = math.lcm(*factors)
    return -(-size // whole) * whole
