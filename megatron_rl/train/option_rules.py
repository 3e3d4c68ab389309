"""The rules of `megatron-rl train`'s flags, each a small named function. They look at files and write none."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_rl.config import (
    DEFAULT_KL_ESTIMATOR,
    NO_CORRECTION,
    NO_SELECTION,
    AdvantageNormalization,
    SupportUse,
    TermScore,
)
from megatron_rl.errors import ConfigError, DataError, printable
from megatron_rl.registries.kl_estimators import KL_ESTIMATORS
from megatron_rl.registries.token_selections import TOKEN_SELECTIONS, Effect
from megatron_rl.train.hf_model import HFModel
from megatron_rl.train.hf_weights import read_hf_model, save_hf_problem
from megatron_rl.train.options import DEFAULT_NUM_ROLLOUTS, DEFAULT_SAMPLES_PER_PROMPT, DEFAULT_STEPS_PER_ROLLOUT, TrainOptions
from megatron_rl.train.output_dir import OWN_FILES, check_output_dir, check_start, is_same_file
from megatron_rl.train.rollout_files import recorded_group_size
from megatron_rl.train.tasks import task_problems
from megatron_rl.validation import flag_of
from megatron_rl.validation.checks import problems_of

# Adam's, by what is trained. A pretrained model takes far smaller steps than one from random weights; with 3e-3 the policy of a
# prompt file collapses on most seeds.
LEARNING_RATES = {"task": 3e-3, "prompts": 5e-4, "hf_checkpoint": 1e-6}
# What --hf-checkpoint decides.
OF_THE_FOLDER = (
    *("task", "vocab_size", "num_layers", "hidden_size", "num_attention_heads", "num_experts"),
    *("moe_router_topk", "moe_ffn_hidden_size"),
)
DIVISIONS = (
    ("hidden_size", "num_attention_heads", "each head has the same width"),
    ("num_attention_heads", "tensor_model_parallel_size", "each tensor-parallel rank holds whole heads"),
    ("num_layers", "pipeline_model_parallel_size", "each pipeline stage holds as many layers"),
)
MODEL_PARALLEL_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")


@dataclass(frozen=True, kw_only=True)
class TrainLaunch(TrainOptions):
    """What these rules judge: the options, with the run's values for flags that are not typed, and what is beside them."""

    settings: Mapping[str, Any]
    """All flags as typed, by field name, flags of the loss too."""
    world_size: int = 1
    num_query_groups: int = 0
    """Of the model of --hf-checkpoint, where its folder can be read."""

    @classmethod
    def of(cls, options: TrainOptions, settings: Mapping[str, Any], **beside: Any) -> TrainLaunch:
        given = {one.name: getattr(options, one.name) for one in dataclasses.fields(TrainOptions)}
        return cls(**given, settings=settings, **beside)


def train_options(settings: Mapping[str, Any], *, world_size: int = 1) -> TrainOptions:
    """The options of a run, from the values of its flags by field name. Raises one ConfigError with every problem.

    It looks at files: call it before the process group is made, so that no rank sees what another has begun to write.
    """
    options = TrainOptions(**{one.name: settings[one.name] for one in dataclasses.fields(TrainOptions)})
    num_query_groups = 0
    if options.hf_checkpoint is not None and not list(check_hf_checkpoint(TrainLaunch.of(options, settings))):
        model = read_hf_model(options.hf_checkpoint)
        options, num_query_groups = with_sizes_of(model, options), model.num_query_groups
    options = with_defaults(options, settings)
    launch = TrainLaunch.of(options, settings, world_size=world_size, num_query_groups=num_query_groups)
    problems = problems_of(RULES, launch)
    if problems:
        raise ConfigError(problems)
    return options


def with_group_size(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The values of all flags, with --samples-per-prompt where it is not typed: of the recorded rollouts, or the default.

    None where their file cannot be read: then another rule, or the run, says why.
    """
    size = settings["samples_per_prompt"]
    if size is None and settings["rollouts"] is None:
        size = DEFAULT_SAMPLES_PER_PROMPT
    elif size is None:
        with contextlib.suppress(DataError):
            size = recorded_group_size(settings["rollouts"])
    return {**settings, "samples_per_prompt": size}


def with_defaults(options: TrainOptions, settings: Mapping[str, Any]) -> TrainOptions:
    """The options with values for flags that are not typed, where they depend on others."""
    if options.lr is None:
        kind = "hf_checkpoint" if options.hf_checkpoint is not None else "prompts" if options.prompts is not None else "task"
        options = dataclasses.replace(options, lr=LEARNING_RATES[kind])
    if options.steps_per_rollout is None:
        # With --docs-per-step no rule depends on the number.
        steps = DEFAULT_STEPS_PER_ROLLOUT if settings["docs_per_step"] is None else 1
        options = dataclasses.replace(options, steps_per_rollout=steps)
    if options.num_rollouts is None and options.rollouts is None:
        options = dataclasses.replace(options, num_rollouts=DEFAULT_NUM_ROLLOUTS)
    return options


def check_hf_checkpoint(options: TrainLaunch) -> Iterator[str]:
    if options.hf_checkpoint is None:
        return
    defaults = {field.name: field.default for field in dataclasses.fields(TrainOptions)}
    for name in OF_THE_FOLDER:
        if options.settings[name] != defaults[name]:
            yield (
                f"{flag_of(name)} {options.settings[name]} has no effect with --hf-checkpoint: {options.hf_checkpoint} decides it; "
                "remove the flag"
            )
    if options.prompts is None and options.rollouts is None:
        yield f"--hf-checkpoint {options.hf_checkpoint} needs --prompts FILE with --reward, or --rollouts FILE"
    if options.save_hf is not None:
        problem = save_hf_problem(Path(options.save_hf), options.output_dir)
        if problem is not None:
            yield f"--save-hf {options.save_hf}: {problem}; name a new folder, as in --save-hf {options.output_dir}/hf"


def check_key_heads(options: TrainLaunch) -> Iterator[str]:
    tensor, heads = options.tensor_model_parallel_size, options.num_query_groups
    if tensor > 0 and heads % tensor and tensor % heads:
        yield (
            f"--tensor-model-parallel-size {tensor} with num_key_value_heads={heads} in {options.hf_checkpoint}: a rank "
            "holds whole key heads, or an equal part of one; take a multiple or a divisor of that number"
        )


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


def check_learning_rate(options: TrainLaunch) -> Iterator[str]:
    style, warmup = options.lr_decay_style, options.lr_warmup_iters
    if style == "constant":
        if options.min_lr:
            yield f"--min-lr {options.min_lr} has no effect with --lr-decay-style constant: remove it, or choose linear or cosine"
        return
    if options.lr is not None and not options.min_lr < options.lr:
        yield f"--min-lr {options.min_lr} must be below --lr {options.lr}: the learning rate decays"
    if options.settings["docs_per_step"] is not None:
        yield f"--lr-decay-style {style} with --docs-per-step: the number of steps is not known; remove one of them"
    elif options.num_rollouts is None:
        yield f"--lr-decay-style {style} needs --num-rollouts: the number of steps is not known"
    elif options.num_rollouts * options.steps_per_rollout <= warmup:
        steps = options.num_rollouts * options.steps_per_rollout
        yield f"--lr-warmup-iters {warmup} must be below the {steps} steps of the run: the decay follows it"


def check_evaluation(options: TrainOptions) -> Iterator[str]:
    if options.eval_prompts is None or options.prompts is None:
        return
    if not Path(options.eval_prompts).is_file():
        yield f"--eval-prompts {options.eval_prompts}: there is no such file"
    elif Path(options.prompts).is_file() and Path(options.eval_prompts).samefile(options.prompts):
        yield f"--eval-prompts {options.eval_prompts} is the file of --prompts: give prompts that are not trained on"
    if options.rollouts is not None:
        yield "--eval-prompts has no effect with --rollouts, where nothing is sampled: remove it"


def check_wandb(options: TrainOptions) -> Iterator[str]:
    if options.wandb_project is None:
        return
    if missing := [name for name in ("wandb", "tensorboard") if find_spec(name) is None]:
        yield f"--wandb-project {options.wandb_project} needs {' and '.join(missing)}: pip install {' '.join(missing)}"
    if not options.tensorboard:
        yield f"--wandb-project {options.wandb_project} sends the events of TensorBoard: remove --no-tensorboard"


def meaning_of(option: dataclasses.Field[Any]) -> str:
    """The flag's help line and its default, for a message about a wrong value."""
    line = option.metadata["help"].rstrip(".")
    return line if option.default is None else f"{line}; default {option.default}"


def check_numbers(options: TrainOptions) -> Iterator[str]:
    for one in dataclasses.fields(TrainOptions):
        value, must = getattr(options, one.name), one.metadata["must"]
        if must is not None and value is not None and not (math.isfinite(value) and must.allows(value)):
            yield f"{flag_of(one.name)} {value} must be {must.words}: {meaning_of(one)}"


def check_needs(options: TrainLaunch) -> Iterator[str]:
    """What a field declares to need is given; the options of the loss are among the settings."""
    defaults = {one.name: one.default for one in dataclasses.fields(TrainOptions)}
    for one in dataclasses.fields(TrainOptions):
        value = getattr(options, one.name)
        if one.metadata["needs"] is None or value in (one.default, None):
            continue
        needed, because = one.metadata["needs"]
        given = getattr(options, needed) if needed in defaults else options.settings[needed]
        if given == defaults.get(needed):
            shown = flag_of(one.name) if value is True else f"{flag_of(one.name)} {value}"
            if options.hf_checkpoint is None or needed not in OF_THE_FOLDER:
                yield f"{shown} needs {flag_of(needed)}: {because}"
            elif options.num_query_groups:  # the folder was read; else another check says what is wrong with it
                folder = f"--hf-checkpoint {options.hf_checkpoint}"
                yield f"{shown} has no effect with {folder}: {because}, and the folder's is one; remove the flag"


def check_task(options: TrainOptions) -> Iterator[str]:
    yield from task_problems(options.task, prompts=options.prompts, reward=options.reward, max_new_tokens=options.max_new_tokens)


def check_divisions(options: TrainOptions) -> Iterator[str]:
    for whole, part, why in DIVISIONS:
        value, divisor = getattr(options, whole), getattr(options, part)
        if divisor > 0 and value % divisor:
            yield f"{flag_of(whole)} {value} must be a multiple of {flag_of(part)} {divisor}: {why}"


def check_head_width(options: TrainOptions) -> Iterator[str]:
    heads = options.num_attention_heads
    if heads > 0 and options.hidden_size > 0 and options.hidden_size % heads == 0 and options.hidden_size // heads % 2:
        yield (
            f"--hidden-size {options.hidden_size} with --num-attention-heads {heads} makes heads {options.hidden_size // heads} "
            f"wide: rotary positions turn pairs of channels, so the width must be even; use --hidden-size {2 * options.hidden_size}"
        )


def check_experts(options: TrainOptions) -> Iterator[str]:
    """Beside the rule experts_do_not_depend_on_the_layout."""
    if options.num_experts is not None and options.moe_router_topk > options.num_experts:
        yield f"--moe-router-topk {options.moe_router_topk} must be at most --num-experts {options.num_experts}"


def check_show_samples(options: TrainOptions) -> Iterator[str]:
    if options.show_samples and options.rollouts is not None:
        yield f"--show-samples {options.show_samples} has no effect with --rollouts, where nothing is sampled: remove it"


def check_steps(options: TrainOptions) -> Iterator[str]:
    if options.rollouts is None and options.steps_per_rollout > options.prompts_per_rollout >= 1:
        yield (
            f"--steps-per-rollout {options.steps_per_rollout} must be at most --prompts-per-rollout "
            f"{options.prompts_per_rollout}: each optimiser step takes at least one whole prompt group"
        )


def check_advantage_normalization(options: TrainOptions) -> Iterator[str]:
    is_typed = options.advantage_normalization != AdvantageNormalization.STD
    if is_typed and options.rollouts is not None:
        yield (
            f"--advantage-normalization {options.advantage_normalization} has no effect with --rollouts: the file holds the "
            "advantages, which are trained on as they are; remove the flag"
        )


def check_corrections(options: TrainLaunch) -> Iterator[str]:
    """A run that samples by itself has one engine: sampler and trainer agree, and what compares them does nothing."""
    if options.rollouts is not None:
        return
    settings = options.settings
    kind, delta = settings["importance_correction"], settings["off_policy_sequence_delta"]
    if kind not in (None, NO_CORRECTION):
        yield (
            f"--importance-correction {kind} has no effect: this run samples with the engine that trains, so every ratio is 1; "
            "give rollouts of another engine with --rollouts, or remove the flag"
        )
    if delta is not None and _has_one_step(options):
        yield (
            f"--off-policy-sequence-delta {delta} has no effect with one optimiser step a rollout: the policy in training is the "
            "one that sampled; give --steps-per-rollout 2 or more, fewer --docs-per-step than a rollout has, or rollouts of "
            "another engine with --rollouts"
        )


def check_sampling_filter(options: TrainLaunch) -> Iterator[str]:
    settings, is_on = options.settings, options.top_p != 1.0
    typed = f"--top-p {options.top_p}"
    if options.rollouts is not None:
        if is_on:
            yield f"{typed} has no effect with --rollouts, where nothing is sampled: remove it; kept_ids of the file are replayed"
        return
    if is_on and settings["sampling_support"] == SupportUse.REFUSE:
        yield (
            f"{typed} with --sampling-support refuse: the sampler keeps a part of the vocabulary, and without the kept ids every "
            "ratio is off by their mass; remove one of them"
        )
    of_kept = {"sampling_support": SupportUse.REPLAY, "kl_score": TermScore.SUPPORT, "entropy_score": TermScore.SUPPORT}
    for name, value in of_kept.items():
        if not is_on and settings[name] == value:
            yield f"{flag_of(name)} {value} has no effect: this run samples from the whole vocabulary; add --top-p, or remove it"
    estimator = KL_ESTIMATORS.find_or_none(settings["kl_estimator"] or DEFAULT_KL_ESTIMATOR)
    is_full = settings["kl_score"] in (None, TermScore.FULL)
    if is_on and settings["kl_coefficient"] and is_full and estimator is not None and estimator.takes_log_ratio:
        yield (
            f"{typed} with --kl-estimator {estimator.name}: it multiplies the KL term by the importance ratio, which is over the "
            "kept ids, and the term would be over the whole vocabulary; add --kl-score support, or choose another estimator"
        )


def _has_one_step(options: TrainLaunch) -> bool:
    """Whether each sampled rollout is one optimiser step, in which the policy is still the one that sampled."""
    docs, of_prompt = options.settings["docs_per_step"], options.settings["samples_per_prompt"]
    is_whole = docs is None or (isinstance(of_prompt, int) and docs == options.prompts_per_rollout * of_prompt)
    return options.rollouts is None and options.steps_per_rollout == 1 and is_whole


def check_token_selection(options: TrainLaunch) -> Iterator[str]:
    name = options.settings["token_selection"]
    declared = TOKEN_SELECTIONS.find_or_none(name or NO_SELECTION)
    if declared is not None and declared.effect == Effect.PENALIZED and _has_one_step(options):
        yield (
            f"--token-selection {name} has no effect with one optimiser step a rollout: the policy in training is the one that its "
            "penalty holds it to; give --steps-per-rollout 2 or more, fewer --docs-per-step than a rollout has, or rollouts of "
            "another engine with --rollouts"
        )


def check_docs_per_step(options: TrainLaunch) -> Iterator[str]:
    """A flag of the loss that acts on the loop. The loss's own rules refuse what is no number of documents."""
    docs, of_prompt = options.settings["docs_per_step"], options.settings["samples_per_prompt"]
    if docs is None:
        return
    if options.steps_per_rollout > 1:
        yield (f"--steps-per-rollout {options.steps_per_rollout} and --docs-per-step {docs} both say where a step ends: remove one")
    if options.rollouts is not None:
        if options.save_rollouts is not None:
            yield "--save-rollouts with --rollouts and --docs-per-step: a step is no rollout that could be written; copy the file"
    elif isinstance(docs, int) and isinstance(of_prompt, int) and docs > options.prompts_per_rollout * of_prompt > 0:
        yield (
            f"--docs-per-step {docs} is more than the {options.prompts_per_rollout * of_prompt} documents of a rollout "
            f"(--prompts-per-rollout {options.prompts_per_rollout} x --samples-per-prompt {of_prompt}): a step ends with its "
            "rollout; sample more prompts, or lower it"
        )


def check_rollout_files(options: TrainOptions) -> Iterator[str]:
    if options.rollouts is not None and not os.path.isfile(options.rollouts):
        yield f"--rollouts {options.rollouts}: there is no such file; --save-rollouts FILE of a run writes one"
    if options.save_rollouts is None:
        return
    own = [name for name in OWN_FILES if is_same_file(options.save_rollouts, os.path.join(options.output_dir, name))]
    if own or os.path.isdir(os.path.abspath(options.save_rollouts)):
        why = f"it is the run's own {own[0]}" if own else "it is a folder"
        yield f"--save-rollouts {printable(options.save_rollouts[:200])}: {why}; name a file of its own"
    elif options.rollouts is not None and is_same_file(options.rollouts, options.save_rollouts):
        yield f"--rollouts and --save-rollouts are both {options.rollouts}: the run would append to what it reads"
    elif os.path.isfile(options.save_rollouts) and not (options.resume or options.load or options.overwrite):
        yield (
            f"--save-rollouts {options.save_rollouts} exists: two runs in one file cannot be replayed; give "
            "another name, or --overwrite or --resume"
        )


def check_world_size(options: TrainLaunch) -> Iterator[str]:
    tensor, pipeline = options.tensor_model_parallel_size, options.pipeline_model_parallel_size
    of_experts = tensor * options.expert_model_parallel_size * pipeline
    if options.num_experts is not None and of_experts > 0 and options.world_size % of_experts:
        yield (
            f"{options.world_size} ranks do not hold the experts in groups of {of_experts} (tensor {tensor} x expert "
            f"{options.expert_model_parallel_size} x pipeline {pipeline}): start a multiple of {of_experts}: torchrun "
            f"--nproc-per-node {of_experts}"
        )
    sizes = {name: getattr(options, name) for name in MODEL_PARALLEL_SIZES}
    product = math.prod(sizes.values())
    if min(sizes.values()) > 0 and options.world_size % product:
        shown = " x ".join(f"{flag_of(name)} {size}" for name, size in sizes.items())
        yield (
            f"{options.world_size} ranks do not divide into model replicas of {product} ({shown}); start a multiple of "
            f"{product}: torchrun --nproc-per-node {product}"
        )


RULES = (
    check_hf_checkpoint,
    check_key_heads,
    check_learning_rate,
    check_evaluation,
    check_wandb,
    check_numbers,
    check_needs,
    check_task,
    check_divisions,
    check_head_width,
    check_experts,
    check_show_samples,
    check_steps,
    check_advantage_normalization,
    check_corrections,
    check_sampling_filter,
    check_token_selection,
    check_docs_per_step,
    check_rollout_files,
    check_world_size,
    check_start,
    check_output_dir,
)
