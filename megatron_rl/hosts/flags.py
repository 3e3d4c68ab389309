"""Our flags in a host's parser, and one table: which flag of the host gives which setting of our loss.

A flag of megatron_rl and one of the host's for the same thing must have one value.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

from megatron_rl.arguments import add_megatron_rl_args, validate_megatron_rl_args
from megatron_rl.config import PolicyLossConfig, Route
from megatron_rl.errors import ConfigError, name_of
from megatron_rl.loss_hub import get_policy_loss
from megatron_rl.validation import flag_of

# The host's estimator -> the loss that it trains with. Other estimators have their own losses.
POLICY_LOSS_OF_ESTIMATOR = {
    "grpo": "grpo",
    "gspo": "gspo",
    "cispo": "cispo",
    "ppo": "grpo",
    "reinforce_plus_plus": "grpo",
    "reinforce_plus_plus_baseline": "grpo",
}
# What both hosts take for --kl-loss-type when it is unset.
DEFAULT_KL_TYPE = "k1"
# (--kl-loss-type, --use-unbiased-kl) -> our estimator. The ratio times k2 estimates no KL and has no KL's gradient: it is refused.
KL_ESTIMATORS: dict[tuple[str, bool], str] = {
    ("k1", False): "k1",
    ("k2", False): "k2",
    ("k3", False): "k3",
    ("low_var_kl", False): "k3",
    ("k1", True): "unbiased",
    ("k3", True): "unbiased",
    ("low_var_kl", True): "unbiased",
}
DUAL_CLIP = "clip_ratio_c"


class LaunchOptions(Protocol):
    """What is read here of a launch: hosts.args.HostOptions has it."""

    @property
    def correction_functions(self) -> Mapping[str, str]: ...  # the host's own values of --custom-tis-function-path

    def __getitem__(self, name: str) -> Any: ...

    def has(self, name: str) -> bool: ...


@dataclass(frozen=True, slots=True)
class HostFlag:
    """A host's flag for one of our settings."""

    field: str
    """Our setting, or a parameter that losses declare."""
    option: str
    """The host's option, named in messages."""
    read: Callable[[LaunchOptions], Any]
    """Its value for our setting; None: the host asks for nothing, and our flag counts."""
    untyped: Any = None
    """The value that the host's parser gives by itself: a user who has typed our flag may not have typed this one."""


def correction_of_host(options: LaunchOptions) -> str | None:
    """The correction that --use-tis asks for; None without it, and for a function that is not the host's own."""
    if not options["use_tis"]:
        return None
    return known_correction(options) if options["custom_tis_function_path"] else "tis"


def known_correction(options: LaunchOptions) -> str | None:
    """The correction of --custom-tis-function-path, where it names a function of the host's own."""
    return options.correction_functions.get(str(options["custom_tis_function_path"]).replace(":", "."))


def kl_key(options: LaunchOptions) -> tuple[str, bool]:
    """The key of KL_ESTIMATORS, which may lack it."""
    return options["kl_loss_type"] or DEFAULT_KL_TYPE, options["use_unbiased_kl"]


# The function of both hosts' examples with masked importance sampling, whose settings lie in the file of --custom-config-path.
MIS_FUNCTION = "train_infer_mismatch_helper.mis.compute_mis_weights_with_cp"


def has_weights_of_a_microbatch(options: LaunchOptions) -> bool:
    """tis_batch_normalize divides the weights of that function by their mean over a micro-batch."""
    is_mis = str(options["custom_tis_function_path"]).replace(":", ".").endswith(MIS_FUNCTION)
    return bool(options["use_tis"] and is_mis and options["tis_batch_normalize"])


def _kl_estimator(options: LaunchOptions) -> str | None:
    has_term = options["use_kl_loss"] and options["kl_loss_coef"]
    return KL_ESTIMATORS.get(kl_key(options)) if has_term else None


def _bound_of_host(options: LaunchOptions, name: str) -> Any:
    return None if correction_of_host(options) is None else options[name]


HOST_FLAGS: tuple[HostFlag, ...] = (
    HostFlag("clip_ratio_low", "eps_clip", lambda options: options["eps_clip"]),
    HostFlag(
        "clip_ratio_high",
        "eps_clip_high",
        lambda options: options["eps_clip"] if options["eps_clip_high"] is None else options["eps_clip_high"],
    ),
    HostFlag(DUAL_CLIP, "eps_clip_c", lambda options: options["eps_clip_c"]),
    HostFlag("policy_temperature", "rollout_temperature", lambda options: options["rollout_temperature"]),
    HostFlag("entropy_coefficient", "entropy_coef", lambda options: options["entropy_coef"]),
    # A KL coefficient counts with --use-kl-loss alone.
    HostFlag("kl_coefficient", "kl_loss_coef", lambda options: options["kl_loss_coef"] if options["use_kl_loss"] else 0.0),
    HostFlag("kl_estimator", "kl_loss_type", _kl_estimator, untyped=KL_ESTIMATORS[DEFAULT_KL_TYPE, False]),
    HostFlag("importance_correction", "use_tis", correction_of_host),
    HostFlag("importance_correction_low", "tis_clip_low", lambda options: _bound_of_host(options, "tis_clip_low"), untyped=0.0),
    HostFlag("importance_correction_high", "tis_clip", lambda options: _bound_of_host(options, "tis_clip"), untyped=2.0),
    HostFlag(
        "off_policy_sequence_delta",
        "opsm_delta",
        lambda options: options["opsm_delta"] if options["use_opsm"] else None,
        untyped=1e-4,
    ),
)


def host_config(args: Namespace, options: LaunchOptions, route: Route) -> PolicyLossConfig:
    """Our settings on a host's route. On custom_loss the host's flag gives the value where ours is unset.

    Raises one ConfigError with every problem: what validate_megatron_rl_args finds, and each pair of flags with two values for the
    same thing. `args` is not changed.
    """
    if route != Route.CUSTOM_LOSS:
        return validate_megatron_rl_args(args, route)
    problems, policy_loss = [], vars(args).get("policy_loss")
    estimator = options["advantage_estimator"]
    of_estimator = POLICY_LOSS_OF_ESTIMATOR.get(estimator)
    if policy_loss is None:
        if of_estimator is None:
            problems.append(
                f"--advantage-estimator {estimator} has no loss in megatron_rl.hooks.custom_loss: known are "
                f"{', '.join(POLICY_LOSS_OF_ESTIMATOR)}; use the host's own loss, or give --policy-loss"
            )
        policy_loss = of_estimator
    theirs: dict[str, tuple[str, Any, bool]] = {}
    for flag in HOST_FLAGS:
        value = _without_bound(flag.field, flag.read(options), policy_loss)
        is_typed = options.has(flag.option) and (flag.untyped is None or value != flag.untyped)
        theirs[flag.field] = (flag_of(flag.option), value, is_typed)
    merged, conflicts = with_host_values(vars(args) | {"policy_loss": policy_loss}, theirs)
    try:
        return validated(merged, route, [*problems, *conflicts])
    except ConfigError as error:
        typed = {field: flag for field, (flag, _, is_typed) in theirs.items() if is_typed and vars(args).get(field) is None}
        raise ConfigError([_with_the_hosts_flag(problem, typed) for problem in error.problems]) from error


def _with_the_hosts_flag(problem: str, typed: Mapping[str, str]) -> str:
    """A refused value of megatron_rl that came from a flag of the host is named by the flag that was typed."""
    flag = typed.get(problem.partition("=")[0])
    return problem if flag is None else f"{flag}: {problem}"


def _without_bound(field: str, value: Any, policy_loss: object) -> Any:
    """clip_ratio_low >= 1 sets no lower bound, because ratios are positive. We write it as 1."""
    if field == "clip_ratio_low" and isinstance(value, int | float) and value > 1:
        declared = _clip_ratios(policy_loss)
        return 1.0 if declared is not None and declared[0] == 1 else value
    return value


def with_host_values(
    given: Mapping[str, Any],
    theirs: Mapping[str, tuple[str, Any, bool]],  # our field -> the host's flag, its value, whether it may contradict ours
) -> tuple[dict[str, Any], list[str]]:
    """(arguments with the host's value where ours is unset, a problem for each setting that has two values)."""
    merged, problems = dict(given), []
    for field, (flag, value, may_contradict) in theirs.items():
        ours = merged.get(field)
        if ours is None:
            merged[field] = value if takes_host_value(field, merged.get("policy_loss")) else None
        elif may_contradict and value is not None and not _is_same(ours, value):
            problems.append(f"{flag_of(field)} {ours} and {flag} {value} are the same thing with two values: remove one of them")
    return merged, problems


def _is_same(ours: Any, value: Any) -> bool:
    """Values from a file may be text."""
    try:
        return float(ours) == float(value)
    except (TypeError, ValueError):
        return str(ours).strip() == str(value)


def validated(merged: Mapping[str, object], route: Route, found: Sequence[str]) -> PolicyLossConfig:
    """Our settings from arguments by name. Raises one ConfigError with the problems that the caller has found, then its own."""
    try:
        config = validate_megatron_rl_args(Namespace(**merged), route)
    except ConfigError as error:
        raise ConfigError([*found, *error.problems]) from error
    if found:
        raise ConfigError(found)
    return config


def takes_host_value(field: str, policy_loss: object) -> bool:
    """Whether the host's flag may give the value of our unset field. A host's clip flags always have a value, and a loss without a
    clip refuses it. A wrong name of a loss is refused elsewhere."""
    if field == DUAL_CLIP:
        return has_dual_clip(policy_loss)
    return field not in ("clip_ratio_low", "clip_ratio_high") or _clip_ratios(policy_loss) is not None


def has_dual_clip(policy_loss: object) -> bool:
    """Whether the loss declares the parameter. A wrong name of a loss is refused elsewhere."""
    try:
        return isinstance(policy_loss, str) and any(one.name == DUAL_CLIP for one in get_policy_loss(policy_loss).parameters)
    except ConfigError:
        return True


def _clip_ratios(policy_loss: object) -> tuple[float, float] | None:
    """The loss's own clip, None where it has none. A loss of a wrong name has any."""
    try:
        return get_policy_loss(policy_loss).clip_ratios if isinstance(policy_loss, str) else (0.0, 0.0)
    except ConfigError:
        return (0.0, 0.0)


ArgsProvider = Callable[[ArgumentParser], ArgumentParser]
# The first of our flags: a parser that has it has all of them.
OWN_FLAG = "--loss-aggregation"


def compose_extra_args_provider(provider: ArgsProvider | None = None) -> ArgsProvider:
    """`provider`'s flags and ours, for extra_args_provider and for a host's add_custom_arguments; flags that the parser has
    already are not added again. Raises ConfigError when `provider` does not return the parser."""

    def add_args(parser: ArgumentParser) -> ArgumentParser:
        if provider is not None:
            parser = provider(parser)
            if not isinstance(parser, ArgumentParser):
                raise ConfigError(f"{name_of(provider)} returned {type(parser).__name__}: an arguments provider returns the parser")
        known = {flag for action in parser._actions for flag in action.option_strings}
        return parser if OWN_FLAG in known else add_megatron_rl_args(parser)

    return add_args


def parsed_line(parser_module: str, words: Sequence[str], keyword: str = "add_custom_arguments") -> Namespace:
    """A launch line by the parser of miles, slime or Megatron-LM, with our flags in it. keyword: by which it takes further flags.

    The script is the first word that ends in .py. Raises ImportError where the host is not installed, SystemExit as its parser.
    """
    parse_args = import_module(parser_module).parse_args
    script = next((place for place, word in enumerate(words) if word.endswith(".py")), None)
    if script is None:
        raise ConfigError(f"{' '.join(words)}: no word ends in .py; give the line as it starts the train script")
    given, sys.argv = sys.argv, list(words[script:])
    try:
        found: Namespace = parse_args(**{keyword: compose_extra_args_provider()})
    finally:
        sys.argv = given
    return found
