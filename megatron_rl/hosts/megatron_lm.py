"""Megatron-LM: our flags beside its own, and pretrain() in each of its signatures; it must never change an argument."""

from __future__ import annotations

import inspect
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from functools import wraps
from importlib import import_module

import torch.distributed as dist

from megatron_rl.arguments import add_megatron_rl_args, read_switch, validate_megatron_rl_args
from megatron_rl.config import LossAggregation, PolicyLossConfig, Route
from megatron_rl.errors import ConfigError
from megatron_rl.hosts.base import Host, HostOptions, current_args
from megatron_rl.hosts.init_hook import layout_in_words, shift_in_words, terms_in_words
from megatron_rl.layout.groups import resolve_groups
from megatron_rl.megatron.probe import probe_schedule
from megatron_rl.validation import config_warnings, flag_of

ArgsProvider = Callable[[ArgumentParser], ArgumentParser]


class MegatronLM(Host):
    """Its own loop calls our forward step, which counts the whole step itself: no total is left to the host."""

    name = "megatron_lm"
    package = "megatron"
    routes = (Route.MEGATRON_LM,)
    own_options = ("perform_rl_step", "grpo_group_size", "grpo_prompts_per_step")
    script_name = "train_rl|pretrain"
    parser_defaults: Mapping[str, object] = {}

    def recognises(self, names: Mapping[str, object]) -> bool:
        """What no other host has recognised."""
        return True


HOST = MegatronLM()
# The first flag of our group: a parser that has it has all of them.
OWN_FLAG = "--loss-aggregation"
# Our field -> train_rl.py's option for the same thing, and that option's default: a value equal to it may not have been typed.
SAME_THING: dict[str, tuple[str, float]] = {
    "clip_ratio_low": ("grpo_clamp_eps_lower", 0.01),
    "clip_ratio_high": ("grpo_clamp_eps_upper", 0.01),
    "policy_temperature": ("rl_default_temperature", 1.0),
    "kl_coefficient": ("grpo_kl_beta", 0.001),
    "entropy_coefficient": ("grpo_entropy_term_weight", 0.0),
}

WEIGHT_OF_A_TOKEN = {
    LossAggregation.SAMPLE_MEAN: "1/(N m_i)",
    LossAggregation.PROMPT_MEAN: "1/(P M_g)",
    LossAggregation.TOKEN_MEAN: "1/T",
    LossAggregation.CONSTANT: "1/(L N)",
}


def compose_extra_args_provider(provider: ArgsProvider | None = None) -> ArgsProvider:
    """`provider`'s flags and ours, for extra_args_provider and for a host's add_custom_arguments; flags that are there already
    are not added again. Raises ConfigError when `provider` does not return the parser."""

    def add_args(parser: ArgumentParser) -> ArgumentParser:
        if provider is not None:
            parser = provider(parser)
            if not isinstance(parser, ArgumentParser):
                raise ConfigError(f"{_name(provider)} returned {type(parser).__name__}: an arguments provider returns the parser")
        known = {flag for action in parser._actions for flag in action.option_strings}
        return parser if OWN_FLAG in known else add_megatron_rl_args(parser)

    return add_args


def megatron_lm_config(args: Namespace | None = None) -> PolicyLossConfig:
    """Our settings from Megatron-LM's arguments (None: its global ones).

    Under --perform-rl-step (train_rl.py) an unset flag of ours takes the value of train_rl's own for the same thing. Raises one
    ConfigError with every problem: those of validate_megatron_rl_args, two values for the same thing, what our forward step
    would leave out of train_rl's loss, and prompt_mean over steps that cut prompt groups.
    """
    args = current_args() if args is None else args
    given, options = vars(args), HostOptions(args)
    if not options["perform_rl_step"]:
        return validate_megatron_rl_args(args, Route.MEGATRON_LM)
    problems, merged = [], dict(given)
    for field, (option, default) in SAME_THING.items():
        if option not in given:
            continue
        ours, theirs = given.get(field), given[option]
        if ours is None:
            merged[field] = theirs
        elif theirs != default and float(ours) != float(theirs):
            problems.append(
                f"{flag_of(field)} {ours} and {flag_of(option)} {theirs} are the same thing with two values: remove one of them"
            )
    if not options["rl_use_sequence_packing"]:
        problems.append(
            "--perform-rl-step without --rl-use-sequence-packing: megatron_rl.hosts.packed_bins reads packed bins; add "
            "--rl-use-sequence-packing"
        )
    if options["rl_inference_logprobs_is_correction"]:
        problems.append(
            "--rl-inference-logprobs-is-correction would be ignored: this forward step has no importance weights; remove it, or "
            "keep train_rl.py's own forward_step"
        )
    if given.get("loss_aggregation") == LossAggregation.PROMPT_MEAN:
        if not read_switch(given.get("allow_partial_prompt_groups")):
            problems += _cut_prompt_groups(given)
        elif given.get("samples_per_prompt") is None and given.get("grpo_group_size"):
            merged["allow_partial_prompt_groups"] = None  # train_rl's group size is the declared one; no other size is checked
    try:
        config = validate_megatron_rl_args(Namespace(**merged), Route.MEGATRON_LM)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from error
    if problems:
        raise ConfigError(problems)
    return config


def _cut_prompt_groups(given: dict) -> list[str]:
    """train_rl.py splits rows over ranks, packs them, and gives a step its share of the bins: only all of them hold whole groups.

    --grpo-iterations goes over the same bins again. What is unset is not judged.
    """
    step, prompts, size = (given.get(name) for name in ("global_batch_size", "grpo_prompts_per_step", "grpo_group_size"))
    if not (step and prompts and size) or step == prompts * size:
        return []
    iterations = f" in each of --grpo-iterations {given['grpo_iterations']} passes" if given.get("grpo_iterations") else ""
    return [
        f"--global-batch-size {step} with --loss-aggregation prompt_mean: a collection is --grpo-prompts-per-step {prompts} x "
        f"--grpo-group-size {size} = {prompts * size} samples, and a step takes its share of the packed bins{iterations}, whatever "
        f"prompts they hold, so it cuts prompt groups; set --global-batch-size {prompts * size}, or accept cut groups with "
        "--allow-partial-prompt-groups"
    ]


def call_pretrain(pretrain, *, dataset_provider, model_provider, model_type, forward_step, extra_args_provider=None, **options):
    """Megatron-LM's `pretrain` with our flags in its parser, in the signature that the given function has.

        up to 0.17   pretrain(..., extra_args_provider=, args_defaults=) parses by itself
        from 0.18    pretrain(cfg_container, ...): parse_and_validate_args and pretrain_cfg_container_from_args stand beside it

    options: args_defaults; model_config_from_args, the function that turns arguments into a model configuration (0.19 and later:
    gpt_config_from_args); and pretrain's own keywords, which must exist. Our flags are judged right after parsing where parsing
    is apart, and in any case before the model is built. Raises ConfigError for a signature that is none of these.
    """
    parameters = inspect.signature(pretrain).parameters
    provider = compose_extra_args_provider(extra_args_provider)
    args_defaults = options.pop("args_defaults", {})
    model_config_from_args = options.pop("model_config_from_args", None)
    call = {
        "train_valid_test_dataset_provider": dataset_provider,
        "model_provider": _judged_before(model_provider),
        "model_type": model_type,
        "forward_step_func": forward_step,
        **options,
    }
    if "cfg_container" in parameters:
        if "cfg_container" not in options:
            call["cfg_container"] = _parsed_container(pretrain, provider, args_defaults, model_config_from_args)
    elif "extra_args_provider" in parameters:
        if model_config_from_args is not None:
            raise ConfigError("model_config_from_args needs Megatron-LM 0.18 or later: this pretrain parses by itself; remove it")
        call |= {"extra_args_provider": provider, "args_defaults": args_defaults}
    else:
        raise ConfigError(
            f"{_name(pretrain)}({', '.join(parameters)}) is no pretrain of Megatron-LM 0.13 to 0.20: neither cfg_container nor "
            "extra_args_provider; call it yourself, with compose_extra_args_provider at its parser"
        )
    unknown = sorted(call.keys() - parameters.keys())
    if unknown:
        raise ConfigError(f"{_name(pretrain)} of this Megatron-LM takes no {', '.join(unknown)}: it has {', '.join(parameters)}")
    return pretrain(**call)


def _parsed_container(pretrain, provider: ArgsProvider, args_defaults: dict, model_config_from_args):
    package = pretrain.__module__.rpartition(".")[0]
    parse = import_module(f"{package}.arguments").parse_and_validate_args
    args = parse(extra_args_provider=provider, args_defaults=args_defaults)
    megatron_lm_config(args)
    make_container = import_module(f"{package}.argument_utils").pretrain_cfg_container_from_args
    return make_container(args) if model_config_from_args is None else make_container(args, model_config_from_args(args))


def announce(config: PolicyLossConfig, *, calculate_per_token_loss: bool) -> None:
    """Probes the installed schedule on the groups that are up, and prints one line, and the warnings, on rank 0.

    Communication: the probe's steps. Raises ConfigError when a step's gradient would have a wrong scale.
    """
    probe = probe_schedule(calculate_per_token_loss=calculate_per_token_loss)
    if dist.get_rank() != 0:
        return
    for warning in config_warnings(config):
        warnings.warn(f"megatron_rl: {warning}", stacklevel=2)
    groups = resolve_groups()
    parts = [
        f"megatron_rl: policy_loss={config.policy_loss}, loss_aggregation={config.loss_aggregation}",
        _weight_in_words(config),
        _head_in_words(config, groups.tp.size()),
        terms_in_words(config),
        "host megatron_lm",
        f"Megatron-Core {probe.megatron_version}",
        f"contract {probe.contract}, ratio {probe.ratio:.6g} on {layout_in_words(groups)}",
        "PASS",
    ]
    print(" | ".join(parts), flush=True)


def _weight_in_words(config: PolicyLossConfig) -> str:
    """N, P and the counts of tokens are those of each step; its metrics say them."""
    name = config.loss_aggregation
    divisor = f" = 1/({config.loss_aggregation_divisor:g} N)" if name == LossAggregation.CONSTANT else ""
    shift = f" | {shift_in_words(config)}" if name in WEIGHT_OF_A_TOKEN else ""
    return f"weight of a token {WEIGHT_OF_A_TOKEN.get(name, 'of its own')}{divisor}{shift}"


def _head_in_words(config: PolicyLossConfig, tp_size: int) -> str:
    precision = "float32 logits" if config.fp32_lm_head else "logits"
    if config.fused_lm_head_loss:
        return f"hidden states on each tp rank, {precision} [rows, V/{tp_size}] in at most {config.max_logits_bytes} bytes"
    return f"{precision} [T, V/{tp_size}] on each tp rank"


def _judged_before(model_provider):
    """The provider, after a look at Megatron's arguments and arithmetic; None where a model configuration builds the model."""
    if model_provider is None:
        return None
    announced: list[bool] = []

    def build(*positional, **named):
        config = megatron_lm_config()
        if dist.is_initialized() and not announced:  # a model has several chunks under interleaved pipelining
            announced.append(True)
            announce(config, calculate_per_token_loss=HostOptions(current_args())["calculate_per_token_loss"])
        return model_provider(*positional, **named)

    # A functools.partial, which Megatron-LM's scripts pass, has no name to take over.
    return wraps(model_provider)(build)


def _name(function) -> str:
    return f"{function.__module__}.{function.__qualname__}" if hasattr(function, "__qualname__") else repr(function)
