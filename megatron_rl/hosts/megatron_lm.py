"""Megatron-LM: our flags beside its own, and pretrain() in each of its signatures. No argument is changed.

megatron_rl.megatron.packed_bins has the forward step for train_rl.py.
"""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from functools import wraps
from importlib import import_module
from typing import Any

import torch.distributed as dist
from torch import nn

from megatron_rl.arguments import read_number, read_switch, validate_megatron_rl_args
from megatron_rl.config import LARGEST_RATIO, LaunchMethod, PolicyLossConfig
from megatron_rl.errors import ConfigError, name_of
from megatron_rl.hosts.flags import ArgsProvider, compose_extra_args_provider, parsed_line, validated, with_host_values
from megatron_rl.hosts.host_run import current_args
from megatron_rl.hosts.model_notes import release_problems
from megatron_rl.hosts.sampler_rule import Sampler, sampler_problems, typed_readers
from megatron_rl.hosts.training_hooks import head_in_words, shift_in_words, start_line, tell_start, terms_in_words
from megatron_rl.layout.groups import resolve_groups
from megatron_rl.megatron.checks import check_model
from megatron_rl.megatron.probe import probe_schedule
from megatron_rl.validation import config_warnings, flag_of
from megatron_rl.validation.weight_words import weight_in_words
from megatron_rl.weights import AGGREGATIONS, get_loss_aggregation

TITLE = "Megatron-LM"
CORRECTION_FLAG = "--rl-inference-logprobs-is-correction"
# The kind of log-probabilities that its engine reports, and the values with which a filter keeps the whole vocabulary.
MODE = "inference_dynamic_batching_logprobs_mode"
FILTERS_OFF = {"rl_default_top_p": (0.0, 1.0), "rl_default_top_k": (-1, 0)}
# Our field -> train_rl.py's option for the same thing, and its default: the user may not have typed a value equal to it.
SAME_THING: dict[str, tuple[str, float]] = {
    "clip_ratio_low": ("grpo_clamp_eps_lower", 0.01),
    "clip_ratio_high": ("grpo_clamp_eps_upper", 0.01),
    "policy_temperature": ("rl_default_temperature", 1.0),
    "kl_coefficient": ("grpo_kl_beta", 0.001),
    "entropy_coefficient": ("grpo_entropy_term_weight", 0.0),
}


def megatron_lm_config(args: Namespace | None = None) -> PolicyLossConfig:
    """Our settings from Megatron-LM's arguments (None: its global ones).

    Under --perform-rl-step (train_rl.py) train_rl's own flag gives the value where our flag for the same thing is unset. Raises one
    ConfigError with every problem: what validate_megatron_rl_args finds, two values for the same thing, and train_rl_problems.
    """
    args = current_args() if args is None else args
    given = vars(args)
    if not given.get("perform_rl_step"):
        return validate_megatron_rl_args(args, LaunchMethod.MEGATRON_LM)
    known = {field: (option, default) for field, (option, default) in SAME_THING.items() if option in given}
    theirs = {field: (flag_of(option), given[option], given[option] != default) for field, (option, default) in known.items()}
    if given.get("rl_inference_logprobs_is_correction"):
        theirs |= _correction_of_train_rl(given)
    merged, problems = with_host_values(given, theirs)
    problems += train_rl_problems(given, merged)
    is_declared = given.get("samples_per_prompt") is not None
    if _counts_prompts(given) and _allows_cut_groups(given) and given.get("grpo_group_size") and not is_declared:
        merged["allow_partial_prompt_groups"] = None  # train_rl's group size is the declared one; no other size is checked
    return validated(merged, LaunchMethod.MEGATRON_LM, problems)


def _correction_of_train_rl(given: Mapping[str, Any]) -> dict[str, tuple[str, Any, bool]]:
    """train_rl's loss multiplies the clipped objective by exp(old - inference log-probability), truncated where a coefficient is
    given. Without a coefficient the flag also says that bins carry the sampler's log-probabilities, for another correction."""
    bound = given.get("rl_importance_sampling_truncation_coef")
    theirs: dict[str, tuple[str, Any, bool]] = {"importance_correction": (CORRECTION_FLAG, "tis", bound is not None)}
    if given.get("importance_correction") in (None, "tis"):
        value = LARGEST_RATIO if bound is None else bound  # a bound that truncates nothing
        theirs["importance_correction_high"] = (flag_of("rl_importance_sampling_truncation_coef"), value, bound is not None)
    return theirs


# A launch of train_rl.py with our forward step. given: its arguments; merged: with its values for our settings


def _counts_prompts(given: Mapping[str, Any]) -> bool:
    record = AGGREGATIONS.find(given.get("loss_aggregation") or PolicyLossConfig().loss_aggregation)
    return record is not None and record.needs_prompts


def _allows_cut_groups(given: Mapping[str, Any]) -> bool:
    return bool(read_switch(given.get("allow_partial_prompt_groups")))


def train_rl_problems(given: Mapping[str, Any], merged: Mapping[str, Any]) -> Iterator[str]:
    if not given.get("rl_use_sequence_packing"):
        yield "--perform-rl-step without --rl-use-sequence-packing: our forward step reads packed bins; add the flag"
    named = ", ".join(typed_readers(given.get))
    if named and not given.get("rl_inference_logprobs_is_correction"):
        text = f"compares with the sampler, and train_rl.py packs its log-probabilities only with {CORRECTION_FLAG}: add it"
        yield f"{named} {text}"
    filters = {name: read_number(given.get(name)) for name in FILTERS_OFF}
    on = [f"{flag_of(name)} {value:g}" for name, value in filters.items() if value not in (None, *FILTERS_OFF[name])]
    sampler = Sampler(engine="Megatron's engine", mode=given.get(MODE) or "raw_logprobs", kept=on)
    yield from sampler_problems(sampler, typed_readers(merged.get))
    # train_rl.py splits rows over ranks, packs them, and gives a step its share of the bins: only all bins hold whole groups.
    step, prompts, size = (given.get(name) for name in ("global_batch_size", "grpo_prompts_per_step", "grpo_group_size"))
    if step and prompts and size and step != prompts * size and _counts_prompts(given) and not _allows_cut_groups(given):
        yield (
            f"--global-batch-size {step} with --loss-aggregation {given['loss_aggregation']}: a collection is "
            f"--grpo-prompts-per-step {prompts} x --grpo-group-size {size} = {prompts * size} samples, and a step takes its share "
            f"of the packed bins, so it cuts prompt groups; set --global-batch-size {prompts * size}, or accept them with "
            "--allow-partial-prompt-groups"
        )


def call_pretrain(pretrain, *, dataset_provider, model_provider, model_type, forward_step, extra_args_provider=None, **options):
    """Megatron-LM's `pretrain` with our flags in its parser, in the signature that the given function has.

        up to 0.17   pretrain(..., extra_args_provider=, args_defaults=) parses by itself
        from 0.18    pretrain(cfg_container, ...): parse_and_validate_args and pretrain_cfg_container_from_args are in its package

    options: args_defaults; model_config_from_args, the function that turns arguments into a model configuration (0.19 and later:
    gpt_config_from_args); and pretrain's own keywords, which must exist. Our flags are checked before the model is built, and in
    0.18 and later right after parsing. Raises ConfigError for any other signature.
    """
    parameters = inspect.signature(pretrain).parameters
    provider = compose_extra_args_provider(extra_args_provider)
    args_defaults = options.pop("args_defaults", {})
    call = {
        "train_valid_test_dataset_provider": dataset_provider,
        "model_provider": _checked_provider(model_provider),
        "model_type": model_type,
        "forward_step_func": forward_step,
        **options,
    }
    if "cfg_container" in parameters:
        make_model_config = call.pop("model_config_from_args", None)
        if "cfg_container" not in options:
            call["cfg_container"] = _parsed_container(pretrain, provider, args_defaults, make_model_config)
    elif "extra_args_provider" in parameters:
        call |= {"extra_args_provider": provider, "args_defaults": args_defaults}
    else:
        text = "is no pretrain of Megatron-LM 0.13 to 0.20: call it yourself, with compose_extra_args_provider at its parser"
        raise ConfigError(f"{name_of(pretrain)}({', '.join(parameters)}) {text}")
    unknown = sorted(call.keys() - parameters.keys())
    if unknown:
        raise ConfigError(f"{name_of(pretrain)} of this Megatron-LM takes no {', '.join(unknown)}: it has {', '.join(parameters)}")
    return pretrain(**call)


def _parsed_container(pretrain, provider: ArgsProvider, args_defaults: dict, make_model_config):
    package = pretrain.__module__.rpartition(".")[0]
    parse = import_module(f"{package}.arguments").parse_and_validate_args
    args = parse(extra_args_provider=provider, args_defaults=args_defaults)
    megatron_lm_config(args)
    make_container = import_module(f"{package}.argument_utils").pretrain_cfg_container_from_args
    return make_container(args) if make_model_config is None else make_container(args, make_model_config(args))


def announce(config: PolicyLossConfig, *, calculate_per_token_loss: bool) -> None:
    """Probes the installed schedule on the groups that are up, and prints one line, and the warnings, on rank 0.

    Communication: the probe's steps. Raises ConfigError when a step's gradient would have a wrong scale.
    """
    probe = probe_schedule(calculate_per_token_loss=calculate_per_token_loss)
    groups = resolve_groups()
    parts = [
        trained_in_words(config),
        shift_in_words(config, (config.kl_coefficient, config.entropy_coefficient)),
        head_in_words(config, groups.tp.size()),
        terms_in_words(config),
    ]
    tell_start(start_line(parts, "megatron_lm", probe, groups), config_warnings(config))


def trained_in_words(config: PolicyLossConfig) -> str:
    """N, P and T are counted anew for each step; its metrics hold them."""
    weight = weight_in_words(get_loss_aggregation(config.loss_aggregation), {"L": config.loss_aggregation_divisor})
    return f"policy_loss={config.policy_loss}, loss_aggregation={config.loss_aggregation} | weight of a token {weight}"


def _checked_provider(model_provider):
    """The provider, which first checks Megatron's arguments and arithmetic; None where a model configuration builds the model."""
    if model_provider is None:
        return None
    announced: list[bool] = []

    def build(*positional, **named):
        args = current_args()
        config = megatron_lm_config(args)
        if dist.is_initialized() and not announced:  # a model has several chunks under interleaved pipelining
            announced.append(True)
            if problems := list(release_problems(vars(args))):
                raise ConfigError(problems)
            announce(config, calculate_per_token_loss=bool(vars(args).get("calculate_per_token_loss")))
        model = model_provider(*positional, **named)
        if dist.is_initialized() and isinstance(model, nn.Module):
            check_model(config, model, is_packed=bool(vars(args).get("rl_use_sequence_packing")))
        return model

    # A functools.partial, which Megatron-LM's scripts pass, has no name to take over.
    return wraps(model_provider)(build)


# For doctor


def compose(words: Sequence[str]) -> Namespace:
    return parsed_line("megatron.training.arguments", words, "extra_args_provider")


def check(args: Namespace) -> list[str]:
    config = megatron_lm_config(args)
    return [trained_in_words(config), *config_warnings(config)]
