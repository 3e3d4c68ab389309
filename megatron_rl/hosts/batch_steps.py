"""How miles and slime cut a rollout batch into steps, as far as the arguments say it: counts, words, and what is dropped.

Both count a step in rollouts, and drop the rollouts behind the last whole step. miles may train them as a smaller step.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.hosts.base import BATCH_OF_AN_ADAPTER, HostLaunch, HostOptions
from megatron_rl.hosts.closed_words import refused
from megatron_rl.hosts.settings import Settings
from megatron_rl.hosts.step_sizes import product_in_words, whole_number, whole_steps
from megatron_rl.validation import flag_of
from megatron_rl.validation.checks import Row

OF_BATCH, OF_STEP, NUMBER = ("rollout_batch_size", "n_samples_per_prompt"), "global_batch_size", "num_steps_per_rollout"
# What miles needs to keep the rest. Without the last it cuts the batch to whole steps before it looks at the first.
PARTIAL, WITH_PARTIAL = "allow_partial_train_step", ("use_dynamic_batch_size", "disable_rollout_trim_samples")


def counts_of_step(launch: HostLaunch) -> tuple[int | None, int | None]:
    """(samples, prompts) of a step; None where the arguments do not say. A host counts rollouts; with the converter, prompts."""
    step, group = launch.options[OF_STEP], launch.options["n_samples_per_prompt"]
    if step is None or launch.options["use_dynamic_global_batch_size"]:
        return None, None  # the size is known only at the step
    if launch.companion == "convert":
        return (step * group if group else None), step
    return step, (step // group if group and step % group == 0 else None)


def step_in_words(launch: HostLaunch) -> str:
    if launch.options["multi_lora"]:
        return f"step of an adapter's own batch, N is {BATCH_OF_AN_ADAPTER}"
    unit = "samples" if launch.companion == "convert" else "rollouts (one of several samples counts once)"
    named = zip(counts_of_step(launch), (unit, "prompts"), strict=True)
    known = [f"{number} {what}" for number, what in named if number is not None]
    lost = dropped_rollouts(launch)
    verb = "is" if lost == 1 else "are"
    dropped = f", of each {launch.options.samples_of_batch} the last {lost} {verb} dropped" if lost else ""
    return f"step of {', '.join(known)}{dropped}" if known else "step of as many samples as come"


def dropped_rollouts(launch: HostLaunch) -> int:
    """Of each rollout batch; 0 also where the arguments do not say."""
    options = launch.options
    batch, size = whole_number(options.samples_of_batch), whole_number(options[OF_STEP])
    is_known = batch and size and batch > size and _is_cut_by_rollouts(launch) and not _keeps_rest(options)
    return batch % size if is_known and batch and size else 0


def has_whole_steps(launch: HostLaunch) -> Iterator[Row]:
    """Of a rollout batch whose rollouts the host makes, one sample each."""
    options = launch.options
    if not _is_cut_by_rollouts(launch):
        return
    given = {flag_of(name): options[name] for name in (*OF_BATCH, OF_STEP) if options[name] is not None}
    missing = [flag_of(name) for name in WITH_PARTIAL if not options[name]]
    partial = f", or add {' '.join(missing)}, without which {flag_of(PARTIAL)} has no effect" if options[PARTIAL] else ""
    if whole_number(options[NUMBER]) is not None:
        yield from _has_that_many_steps(options, partial)
    elif not _keeps_rest(options):
        of_batch, title = [*map(flag_of, OF_BATCH)], str(options.host)
        settings = Settings.of_names(given, {})
        yield from whole_steps(title, settings, of_batch, [flag_of(OF_STEP)], {}, drops=True, or_else=partial)


def _has_that_many_steps(options: HostOptions, partial: str) -> Iterator[Row]:
    """The host rounds the size of a step down, which may make more steps than are asked for, and leave a rest."""
    number, batch, title = options[NUMBER], whole_number(options.samples_of_batch), str(options.host)
    if batch is None:
        return
    asked, size = f"{flag_of(NUMBER)}={number}", batch // number
    in_words = product_in_words({flag_of(name): options[name] for name in OF_BATCH}, batch)
    remedy = f"set {flag_of(NUMBER)}={next(one for one in range(min(number, batch), 0, -1) if batch % one == 0)}"
    if size == 0:
        yield refused(title, "mini-batch", f"{asked} is more than {in_words}; {remedy}")
    elif options[OF_STEP] not in (None, size):
        why = f"{flag_of(OF_STEP)}={options[OF_STEP]} beside {asked}, which makes it {size} of {in_words}"
        yield refused(title, "mini-batch", f"{why}; remove one of them")
    elif batch % number:
        rest = batch % size
        end = f" and {'one of' if _keeps_rest(options) else 'drops the last'} {rest}" if rest else ""
        text = f"{title} makes {batch // size} steps of {size} of {in_words}{end}: {asked} does not divide it; {remedy}"
        yield Row("mini-batch", f"{text}{partial if rest and not _keeps_rest(options) else ''}", is_note=True)


def _keeps_rest(options: HostOptions) -> bool:
    """It becomes a smaller step."""
    return options[PARTIAL] and all(options[name] for name in WITH_PARTIAL)


def _is_cut_by_rollouts(launch: HostLaunch) -> bool:
    """The host makes them, one sample each. A step of prompts, and one of as many samples as come, have other rules."""
    options = launch.options
    is_other = launch.own_rollout_functions or launch.has_converter() or options["custom_convert_samples_to_train_data_path"]
    return not (is_other or options["use_dynamic_global_batch_size"])
