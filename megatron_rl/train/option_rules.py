"""The rules of `megatron-rl train`'s flags, each a small named function. They look at files and write none."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.config import NO_CORRECTION, SupportUse
from megatron_rl.errors import ConfigError
from megatron_rl.train.hf_model import HFModel
from megatron_rl.train.hf_weights import read_hf_model, save_hf_problem
from megatron_rl.train.options import DEFAULT_NUM_ROLLOUTS, DEFAULT_SAMPLES_PER_PROMPT, DEFAULT_STEPS_PER_ROLLOUT, TrainOptions
from megatron_rl.train.output_dir import check_output_dir
from megatron_rl.train.rollout_files import recorded_group_size
from megatron_rl.validation import flag_of
from megatron_rl.validation.checks import problems_of

# Adam's, by what is trained. A pretrained model takes far smaller steps than one from random weights; with 3e-3 the policy of a
# prompt file collapses on most seeds.
LEARNING_RATES = {"task": 3e-3, "prompts": 5e-4, "hf_checkpoint": 1e-6}


@dataclass(frozen=True, kw_only=True)
class TrainLaunch(TrainOptions):
    """What the rules judge: the options of a run, and all flags as typed."""

    settings: Mapping[str, Any]
    """By field name, those of the loss too."""


def train_options(settings: Mapping[str, Any]) -> TrainOptions:
    """The options of a run, from the values of its flags by field name. Raises one ConfigError with every problem.

    It looks at files: call it before the process group is made, so that no rank sees what another has begun to write.
    """
    options = TrainOptions(**{one.name: settings[one.name] for one in dataclasses.fields(TrainOptions)})
    if options.hf_checkpoint is not None:
        options = with_sizes_of(read_hf_model(options.hf_checkpoint), options)
    options = with_defaults(options, settings)
    problems = problems_of(RULES, TrainLaunch(**vars(options), settings=settings))
    if problems:
        raise ConfigError(problems)
    return options


def with_group_size(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The values of all flags, with --samples-per-prompt where it is not typed: of the recorded rollouts, or the default. Raises
    DataError where their file cannot be read."""
    size = settings["samples_per_prompt"]
    if size is None:
        size = DEFAULT_SAMPLES_PER_PROMPT if settings["rollouts"] is None else recorded_group_size(settings["rollouts"])
    return {**settings, "samples_per_prompt": size}


def with_defaults(options: TrainOptions, settings: Mapping[str, Any]) -> TrainOptions:
    """The options with values for flags that are not typed, where they depend on others."""
    kind = "hf_checkpoint" if options.hf_checkpoint is not None else "prompts" if options.prompts is not None else "task"
    defaults: dict[str, Any] = {
        "lr": LEARNING_RATES[kind],
        # With --docs-per-step no rule depends on the number.
        "steps_per_rollout": DEFAULT_STEPS_PER_ROLLOUT if settings["docs_per_step"] is None else 1,
        "num_rollouts": DEFAULT_NUM_ROLLOUTS if options.rollouts is None else None,
    }
    unset = {name: value for name, value in defaults.items() if getattr(options, name) is None}
    return dataclasses.replace(options, **unset)


def check_hf_checkpoint(options: TrainLaunch) -> Iterator[str]:
    if options.hf_checkpoint is None:
        return
    if options.prompts is None and options.rollouts is None:
        yield f"--hf-checkpoint {options.hf_checkpoint} needs --prompts FILE with --reward, or --rollouts FILE"
    if options.save_hf is not None:
        problem = save_hf_problem(Path(options.save_hf), options.output_dir)
        if problem is not None:
            yield f"--save-hf {options.save_hf}: {problem}; name a new folder, as in --save-hf {options.output_dir}/hf"


def with_sizes_of(model: HFModel, options: TrainOptions) -> TrainOptions:
    """The options with the folder's sizes in the place of the flags."""
    return dataclasses.replace(
        options,
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        vocab_size=model.vocab_size,
        num_experts=None if model.experts is None else model.experts.count,
        moe_router_topk=options.moe_router_topk if model.experts is None else model.experts.per_token,
    )


def check_numbers(options: TrainOptions) -> Iterator[str]:
    for one in dataclasses.fields(TrainOptions):
        value, must = getattr(options, one.name), one.metadata["must"]
        if must is not None and value is not None and not (math.isfinite(value) and must.allows(value)):
            yield f"{flag_of(one.name)} {value} must be {must.words}: {one.metadata['help'].rstrip('.')}"


def check_effects(options: TrainLaunch) -> Iterator[str]:
    """A typed flag has what it needs, and nothing with which it has no effect."""
    for one in dataclasses.fields(TrainOptions):
        value = options.settings[one.name]
        if value in (one.metadata["argparse"].get("default", one.default), None):
            continue
        shown = flag_of(one.name) if value is True else f"{flag_of(one.name)} {value}"
        if one.metadata["needs"] is not None:
            needed, why = one.metadata["needs"]
            if not _is_given(options, needed):
                yield f"{shown} needs {flag_of(needed)}: {why}"
        if one.metadata["without"] is not None:
            other, why = one.metadata["without"]
            if _is_given(options, other):
                yield f"{shown} has no effect with {flag_of(other)}: {why}; remove it"


def _is_given(options: TrainLaunch, name: str) -> bool:
    """Whether an option of train differs from its default, or a flag of the loss is typed."""
    field = TrainOptions.__dataclass_fields__.get(name)
    if field is None:
        return options.settings[name] is not None
    value = getattr(options, name)
    return bool(value) and (value is True or value != field.default)


def check_corrections(options: TrainLaunch) -> Iterator[str]:
    """A run that samples by itself has one engine: sampler and trainer agree, and what compares them does nothing."""
    kind = options.settings["importance_correction"]
    if options.rollouts is None and kind not in (None, NO_CORRECTION):
        yield (
            f"--importance-correction {kind} has no effect: this run samples with the engine that trains, so every ratio is 1; "
            "give rollouts of another engine with --rollouts, or remove the flag"
        )


def check_kept_ids(options: TrainLaunch) -> Iterator[str]:
    """A run that samples from a part of the vocabulary records the kept ids; any other has none."""
    if options.rollouts is not None:
        return
    use = options.settings["sampling_support"]
    if options.top_p == 1.0:
        if use == SupportUse.REPLAY:
            yield f"--sampling-support {use} has no effect: this run samples from the whole vocabulary; add --top-p"
    elif use == SupportUse.REFUSE:
        typed = f"--top-p {options.top_p} with --sampling-support {use}"
        yield f"{typed}: without the kept ids every ratio is off by their mass; remove one of them"


def check_one_step(options: TrainLaunch) -> Iterator[str]:
    """Where each sampled rollout is one optimiser step, the policy in training is still the one that sampled."""
    settings = options.settings
    docs, group_size = settings["docs_per_step"], settings["samples_per_prompt"]
    is_whole = docs is None or (isinstance(group_size, int) and docs == options.prompts_per_rollout * group_size)
    if options.rollouts is not None or options.steps_per_rollout != 1 or not is_whole:
        return
    if settings["off_policy_sequence_delta"] is not None:
        yield (
            f"--off-policy-sequence-delta {settings['off_policy_sequence_delta']} has no effect with one optimiser step a rollout: "
            "the policy in training is the one that sampled; give --steps-per-rollout 2 or more, or fewer --docs-per-step than a "
            "rollout has"
        )


def check_rollout_files(options: TrainOptions) -> Iterator[str]:
    """A new run would empty the file."""
    written = options.save_rollouts
    if written is not None and os.path.isfile(written) and not (options.resume or options.overwrite):
        yield f"--save-rollouts {written} exists: give another name, or --overwrite"


RULES = (
    check_hf_checkpoint,
    check_numbers,
    check_effects,
    check_corrections,
    check_kept_ids,
    check_one_step,
    check_rollout_files,
    check_output_dir,
)
