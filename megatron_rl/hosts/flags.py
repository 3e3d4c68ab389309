"""One table: which flag of a host gives which setting of our loss. Beside it, where the host's own loss does something else.

A flag of megatron_rl and one of the host's for the same thing must have one value.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from megatron_rl.arguments import validate_megatron_rl_args
from megatron_rl.config import CorrectionLevel, PolicyLossConfig, Route
from megatron_rl.errors import ConfigError
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
    """What is read here of a launch: hosts.base.HostOptions has it."""

    @property
    def correction_functions(self) -> Mapping[str, str]: ...  # the host's own values of --custom-tis-function-path

    def __getitem__(self, name: str) -> Any: ...

    def has(self, name: str) -> bool: ...

    def flag(self, name: str) -> str: ...


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


class HostCorrection(NamedTuple):
    """What --use-tis asks for, as settings of megatron_rl."""

    kind: str | None = None
    level: str | None = None
    low: float | None = None
    high: float | None = None


def correction_settings(options: LaunchOptions) -> HostCorrection:
    """All None without --use-tis, and for a function that we do not know or cannot express."""
    if not options["use_tis"]:
        return HostCorrection()
    if is_mis(options):
        return HostCorrection() if list(mis_problems(options)) else _mis_correction(options)
    kind = known_correction(options) if options["custom_tis_function_path"] else "tis"
    return HostCorrection() if kind is None else HostCorrection(kind, None, options["tis_clip_low"], options["tis_clip"])


def correction_of_host(options: LaunchOptions) -> str | None:
    return correction_settings(options).kind


def known_correction(options: LaunchOptions) -> str | None:
    """The correction of --custom-tis-function-path, where it names a function of the host's own."""
    return options.correction_functions.get(str(options["custom_tis_function_path"]).replace(":", "."))


def kl_key(options: LaunchOptions) -> tuple[str, bool]:
    """The key of KL_ESTIMATORS, which may lack it."""
    return options["kl_loss_type"] or DEFAULT_KL_TYPE, options["use_unbiased_kl"]


# The function of both hosts' examples with masked importance sampling, whose settings lie in the file of --custom-config-path.
MIS_FUNCTION = "train_infer_mismatch_helper.mis.compute_mis_weights_with_cp"
# Its name for miles's FSDP backend: the same weights.
MIS_FUNCTION_OF_FSDP = "train_infer_mismatch_helper.mis.compute_mis_weights_fsdp"
MIS_LEVELS = {
    "token": CorrectionLevel.TOKEN,
    "sequence": CorrectionLevel.SEQUENCE_SUM,
    "geometric": CorrectionLevel.SEQUENCE_MEAN,
}
MIS_MODES = ("truncate", "clip", "mask")
# What it reads, and nothing else of these hosts does.
MIS_SETTINGS = (
    *("tis_level", "tis_mode", "tis_lower_bound", "tis_upper_bound", "tis_batch_normalize"),
    *("use_rs", "rs_level", "rs_lower_bound", "rs_upper_bound", "rs_veto_threshold"),
)


def is_mis(options: LaunchOptions) -> bool:
    return str(options["custom_tis_function_path"]).replace(":", ".").endswith((MIS_FUNCTION, MIS_FUNCTION_OF_FSDP))


def normalised_weights(options: LaunchOptions) -> str | None:
    """Why weights of MIS_FUNCTION depend on the layout; None: they do not. All else in it looks at one sample alone."""
    if not (options["use_tis"] and is_mis(options) and options["tis_batch_normalize"]):
        return None
    return (
        "tis_batch_normalize: true divides the weights by their mean over a micro-batch, so a step would depend on how it is "
        "cut into micro-batches; write tis_batch_normalize: false"
    )


def unjudged_correction(options: LaunchOptions) -> str | None:
    """What is said of a function of --custom-tis-function-path that acts on the loss and is not known here; None: it is known."""
    path = options["custom_tis_function_path"]
    if not path or not (options["use_tis"] or options["get_mismatch_metrics"]) or known_correction(options) is not None:
        return None
    is_read = is_mis(options) and (options.has("tis_batch_normalize") or not options["use_tis"])
    return None if is_read else f"{path} weighs tokens and may reject some: that is not judged"


def _mis_bounds(options: LaunchOptions) -> tuple[float, float, float, float]:
    """(low, high) of the weights, (low, high) of the rejection, each with the function's default."""
    high = options["tis_upper_bound"]
    low = options["tis_lower_bound"] or 1.0 / high
    return low, high, options["rs_lower_bound"] or low, options["rs_upper_bound"] or high


def mis_problems(options: LaunchOptions) -> Iterator[str]:
    """Why megatron_rl has no correction for the settings of MIS_FUNCTION. Nothing here rounds a setting to a near one."""
    if options["tis_mode"] not in MIS_MODES or options["tis_level"] not in MIS_LEVELS or not options["tis_upper_bound"]:
        yield (
            f"tis_mode={options['tis_mode']!r}, tis_level={options['tis_level']!r}, tis_upper_bound="
            f"{options['tis_upper_bound']!r}: {MIS_FUNCTION} needs a mode of {', '.join(MIS_MODES)}, a "
            f"level of {', '.join(MIS_LEVELS)} and an upper bound"
        )
        return
    if (normalised := normalised_weights(options)) is not None:
        yield normalised
    if not options["use_rs"]:
        return
    if options["rs_veto_threshold"] is not None:
        yield (
            f"rs_veto_threshold: {options['rs_veto_threshold']} drops a sample for one of its tokens, which no correction of "
            "megatron_rl does; set it to null, or drop such samples by rs_level: sequence"
        )
    low, high, rs_low, rs_high = _mis_bounds(options)
    is_inside = rs_high <= high and (options["tis_mode"] == "truncate" or low <= rs_low)
    if options["rs_level"] != options["tis_level"] or not (options["tis_mode"] == "mask" or is_inside):
        yield (
            f"use_rs: true with rs_level={options['rs_level']!r} and bounds [{rs_low:g}, {rs_high:g}] beside tis_level="
            f"{options['tis_level']!r} and [{low:g}, {high:g}] is two criteria, and megatron_rl has one: give both one level, and "
            "rejection bounds inside those of the weights"
        )


def _mis_correction(options: LaunchOptions) -> HostCorrection:
    """The one correction with the same weights: a token that is rejected has weight 0, any other its ratio inside the bounds."""
    low, high, rs_low, rs_high = _mis_bounds(options)
    level, mode = MIS_LEVELS[options["tis_level"]], options["tis_mode"]
    if options["use_rs"]:
        bounds = (max(low, rs_low), min(high, rs_high)) if mode == "mask" else (rs_low, rs_high)
        return HostCorrection("icepop", level, *bounds)
    if mode == "mask":
        return HostCorrection("icepop", level, low, high)
    return HostCorrection("tis", level, 0.0 if mode == "truncate" else low, high)


def _kl_estimator(options: LaunchOptions) -> str | None:
    has_term = options["use_kl_loss"] and options["kl_loss_coef"]
    return KL_ESTIMATORS.get(kl_key(options)) if has_term else None


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
    HostFlag("importance_correction_level", "tis_level", lambda options: correction_settings(options).level),
    HostFlag("importance_correction_low", "tis_clip_low", lambda options: correction_settings(options).low, untyped=0.0),
    HostFlag("importance_correction_high", "tis_clip", lambda options: correction_settings(options).high, untyped=2.0),
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
        theirs[flag.field] = (options.flag(flag.option), value, is_typed)
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
