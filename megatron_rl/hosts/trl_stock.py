"""What TRL's own losses weigh a token, by the version of TRL, and what its versions have by default."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_rl.aggregation_record import TOKEN_MEAN, Formula
from megatron_rl.hosts.closed_words import closest
from megatron_rl.hosts.door import DIVISOR
from megatron_rl.hosts.settings import UNKNOWN, Settings, Size, StepSizes
from megatron_rl.hosts.step_sizes import PROCESSES, SizeNames, whole_number
from megatron_rl.hosts.stock import (
    MEAN_OF_TOKEN_MEANS,
    MEAN_OVER_RANKS,
    OF_A_MICRO_BATCH,
    SAMPLE_MEAN,
    Stock,
    aggregation_of,
    exact_setting,
    is_on,
    local_letters,
    times_of_generation,
)
from megatron_rl.hosts.trl_others import OTHER, STOCKS
from megatron_rl.hosts.trl_source import CONFIG, default_of, found_version, installed
from megatron_rl.validation.checks import Row

PREFIX = "megatron_rl."
CHOICE, BIAS_CORRECTION, LONGEST = "loss_type", "use_bias_correction_kl", "max_completion_length"
STEPS, GENERATED, GENERATION = "gradient_accumulation_steps", "steps_per_generation", "generation_batch_size"
# Not a setting: whether the trainer has Liger's loss.
LIGERS_LOSS = "compute_liger_loss"
SIZES = SizeNames(
    micro_batch="per_device_train_batch_size",
    num_microbatches=STEPS,
    ranks=(PROCESSES,),
    defaults={"per_device_train_batch_size": 8, STEPS: 1},
)
# The versions from which TRL divides by the share of a step in a generation and has the bias correction of KL on, and from which
# Liger's loss is given the tokens of a generation, and Liger replaces layers alone and no loss; the newest that was read.
RESCALES, COUNTS, KEEPS_LOSS, NEWEST = (1, 10), (1, 11), (1, 14), (1, 16)
# What TRL's own losses weigh a token. All its micro-batches have as many samples.
STOCK_TYPES = {
    **dict.fromkeys(("grpo", "sapo"), SAMPLE_MEAN),
    "bnpo": MEAN_OF_TOKEN_MEANS,
    "dr_grpo": Formula(N=-1, L=-1),
    **dict.fromkeys(("dapo", "cispo", "vespo"), TOKEN_MEAN),
    "luspo": Formula(N=-1),
}
# TRL's losses that are ours by another name; the others have their own here. At the level of a sequence ours is gspo for these, and
# there is none for the others.
OURS = dict.fromkeys(("grpo", "bnpo", "dr_grpo", "dapo", "luspo"), "grpo")
LEVEL = "importance_sampling_level"
OF_GENERATION, RESCALED = Formula(T_gen=-1), Formula(M_gen=1, M=-1, T_gen=-1)
SHUFFLES = "TRL shuffles a generation"
OF_MATRIX = Formula(N=-1, L_b=-1, m_i=1)
# A setting -> the value that does nothing, and what another one does.
VARIES = {
    "top_entropy_quantile": (1.0, OF_A_MICRO_BATCH.format("top_entropy_quantile")),
    "use_adaptive_entropy": (False, "use_adaptive_entropy=True changes the coefficient by the entropy of each micro-batch"),
}


def is_before(first: tuple[int, int]) -> bool:
    """Whether the TRL that is installed is older. Without one the newest is judged."""
    return (installed() or NEWEST) < first


def judged() -> str:
    found = installed()
    number = ".".join(map(str, found or NEWEST))
    return f"TRL {found_version() or number} is installed" if found else f"no TRL is installed here, and {number} is judged"


def settings_of(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> Settings:
    """Of a launch line, with the defaults of the version."""
    return Settings.of_names({LIGERS_LOSS: is_before(KEEPS_LOSS), **given}, defaults_of_version(defaults))


def defaults_of_version(defaults: Mapping[str, Any]) -> dict[str, Any]:
    longest = default_of(CONFIG.format("grpo"), "GRPOConfig", LONGEST)
    return {**defaults, BIAS_CORRECTION: bias_correction(), **({} if longest is None else {LONGEST: longest})}


def bias_correction() -> bool:
    """What TRL has by default: some sources between two releases differ from both."""
    found = default_of(CONFIG.format("grpo"), "GRPOConfig", BIAS_CORRECTION)
    return found if isinstance(found, bool) else not is_before(RESCALES)


def kl_by_default() -> str:
    is_on = bias_correction()
    return f"{is_on} by default, so KL is {'unbiased' if is_on else 'k3'}"


def of_version(settings: Settings) -> Iterator[Row]:
    """What other versions would train of the same line."""
    if is_on(settings, "beta") and BIAS_CORRECTION not in settings.given:
        yield Row(BIAS_CORRECTION, f"{kl_by_default()} ({judged()}; False before 1.10, and True since)", is_note=True)
    if settings["use_liger_kernel"] is True:
        of_loss = "trains Liger's loss" if trains_ligers_loss(settings) else "replaces layers of the model, and no loss"
        yield Row("use_liger_kernel", f"True {of_loss} ({judged()}; it trains Liger's loss before 1.14)", is_note=True)
    elif installed() is None or is_before(RESCALES):
        yield from _across_rescaling(settings)


def _across_rescaling(settings: Settings) -> Iterator[Row]:
    """What the terms that 1.10 changed weigh in the versions that are not judged."""
    is_old = is_before(RESCALES)
    own, other = (stock_of_version(settings, is_old=one) for one in (is_old, not is_old))
    if own is None or other is None:
        return
    changed = {name: weight for name, weight in other.terms.items() if own.terms[name] != weight}
    for weight in dict.fromkeys(changed.values()):
        times = times_of_generation(weight, other.known) if weight == OF_GENERATION else None
        size = "" if times is None else f", about {times:.3g} times the token mean"
        side, terms = "since" if is_old else "before", " and ".join(name for name, one in changed.items() if one == weight)
        yield Row("version", f"{side} 1.10 a token weighs {weight}{size}, in {terms} ({judged()})", is_note=True)


def trains_ligers_loss(settings: Settings) -> bool:
    return settings["use_liger_kernel"] is True and bool(settings[LIGERS_LOSS])


# What TRL's own losses weigh a token


def stock(settings: Settings) -> Stock | None:
    return stock_of_version(settings, is_old=is_before(RESCALES))


def stock_of_version(settings: Settings, *, is_old: bool) -> Stock | None:
    """is_old: before 1.10. The KL term is in the loss of a token; the entropy is a mean of each micro-batch, in old versions of
    what the loss divides by."""
    if settings[OTHER] is not None:
        return STOCKS[settings[OTHER]]
    weight = STOCK_TYPES.get(str(settings[CHOICE]))
    if weight is None:
        return None
    kl, entropy = weight, MEAN_OF_TOKEN_MEANS
    exact = exact_setting(f"{CHOICE}={{}}", {"dapo": TOKEN_MEAN}, weight)
    if exact and (of_step := of_generations(settings)[2]) is not None:  # dapo divides by the tokens of a generation
        exact += f" with {of_step}"
    varies = tuple(text for name, (idle, text) in VARIES.items() if settings[name] not in (idle, UNKNOWN))
    remarks: list[str] = []
    longest = whole_number(settings[LONGEST])
    known: dict[str, float] = {} if longest is None else {"L": longest}
    is_ligers = trains_ligers_loss(settings)
    if weight == TOKEN_MEAN and is_ligers and is_before(COUNTS):  # it counts the tokens of a micro-batch of all ranks
        weight = kl = MEAN_OVER_RANKS
        exact = of_generations(settings)[2]
    elif weight == TOKEN_MEAN:
        known, remarks, exact = of_generations(settings)
        weight = kl = TOKEN_MEAN if exact is None else OF_GENERATION if is_old else RESCALED
        entropy = weight if is_old else entropy
    elif settings[CHOICE] == "luspo" and (is_old or is_ligers):  # of a matrix, TRL takes the mean over its padded places too
        weight, kl = weight if without(settings) else OF_MATRIX, OF_MATRIX
    if is_ligers and local_letters(weight) and not (is_old and weight == OF_MATRIX):
        exact = ", ".join(filter(None, ("use_liger_kernel=False", exact)))
    terms = (weight, kl if is_on(settings, "beta") else None, entropy if is_on(settings, "entropy_coef") else None)
    of_ours, removed, said = ours(settings), without(settings), tuple(remarks)
    return Stock(*terms, exact, said, varies, known=known, shuffles=SHUFFLES, ours=of_ours, without=removed)


def without(settings: Settings) -> str:
    return LEVEL if settings[LEVEL] == "sequence" else ""


def ours(settings: Settings) -> str | None:
    """The loss of ours that TRL's is, but for the weights."""
    name = str(settings[CHOICE])
    return OURS.get(name, name) if not without(settings) else "gspo" if name in OURS else None


def instead_of_stock(settings: Settings) -> str:
    """What trains the same loss, or the one that is meant by a misspelt name, in our trainer: as it is typed."""
    kind = closest(str(settings[CHOICE]).removeprefix(PREFIX).lower().replace("-", "_"), STOCK_TYPES)
    aggregation = None if kind is None else aggregation_of(STOCK_TYPES[kind])
    if kind is None or (aggregation == "constant" and "L" not in STOCK_TYPES[kind].powers):
        return f"{CHOICE}={PREFIX}<loss>.<aggregation>"
    loss = "gspo" if without(settings) else OURS.get(kind, kind)
    typed = f"{CHOICE}={PREFIX}{loss}.{aggregation}{f' without {LEVEL}' * bool(without(settings))}"
    if aggregation == "constant" and f"{PREFIX}{DIVISOR}" not in settings.given:
        longest = whole_number(settings[LONGEST])
        typed += f" and megatron_rl={{{DIVISOR!r}: {longest or 'L'}}} of GRPOTrainer"
    return typed


def of_generations(settings: Settings) -> tuple[dict[str, float], list[str], str | None]:
    """TRL counts the tokens of what it generates at once (num_items_in_batch). (M and M_gen, as far as they are known, what is said
    of them, the setting that makes both sizes equal); ({}, [], None) where they are."""
    steps, generated = whole_number(settings[STEPS]), whole_number(settings[GENERATED])
    exact, of_batch = f"{GENERATED}={steps or STEPS}", ""
    if settings[GENERATION] is not None:
        generated, exact, of_batch = of_generation_batch(settings, steps)
    elif settings[GENERATED] is None or steps == generated is not None:
        return {}, [], None
    if steps is None or generated is None:
        return {}, [of_batch or f"{GENERATED}={_shown(generated)} with {STEPS}={_shown(steps)}"], exact
    if steps == generated:
        return {}, [of_batch], None
    said = f"{of_batch or f'{GENERATED}={generated}'} with {STEPS}={steps}"
    if generated % steps == 0 and (loss := ours(settings)) is not None:
        removed = f" without {without(settings)}" if without(settings) else ""
        exact += f", or {CHOICE}={PREFIX}{loss}.token_mean{removed}, which keeps the generation"
    return {"M": steps, "M_gen": generated}, [said], exact


def of_generation_batch(settings: Settings, steps: int | None) -> tuple[int | None, str, str]:
    """(M_gen, the size that a step has, how M_gen follows). TRL refuses a size that its micro-batches do not divide."""
    batch, sizes = settings[GENERATION], sizes_of(settings)
    rows, ranks = sizes.micro_batch, sizes.data or Size(1, "processes, which are not on the line")
    if rows is None:
        return None, f"{GENERATION}=<completions of a step>", f"{GENERATION}={_shown(whole_number(batch))}"
    size = rows.value * ranks.value
    generated = batch // size if whole_number(batch) is not None and batch % size == 0 else None
    how = f"{GENERATION}={_shown(whole_number(batch))} / ({rows.value} of {rows.source} x {ranks.value} of {ranks.source})"
    exact = f"{GENERATION}={size * steps}" if steps is not None else f"{GENERATION}={size} x {STEPS}"
    return generated, exact, f"{how} is {GENERATED}" + ("" if generated is None else f"={generated}")


def sizes_of(settings: Settings) -> StepSizes:
    return SIZES.read(settings.value_of, StepSizes(data=settings.asked.data))


def knows_ranks(settings: Settings) -> bool:
    return sizes_of(settings).data is not None


def _shown(number: int | None) -> str:
    return "<not known here>" if number is None else str(number)
