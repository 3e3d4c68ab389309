"""The rules of our settings: each judges one thing and yields a message for each problem. A rule changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeGuard

from megatron_rl.config import (
    DEFAULT_KL_ESTIMATOR,
    DEFAULT_MAX_LOGITS_BYTES,
    CorrectionLevel,
    Distillation,
    LaunchMethod,
    PolicyMetrics,
    SupportUse,
    Watchdog,
    flag_fields,
)
from megatron_rl.declare import is_finite_number
from megatron_rl.errors import ConfigError
from megatron_rl.losses.corrections import CorrectionSettings, counted_twice
from megatron_rl.losses.distillation import DIVERGENCES, DistillationSettings
from megatron_rl.validation.auxiliary_losses import auxiliary_loss_problems
from megatron_rl.validation.experts import expert_problems
from megatron_rl.validation.launch_methods import CHOICES, HOST_SWITCHES, REGISTRIES, Settings, field_of, flag_of, methods_of_flags
from megatron_rl.validation.model_settings import model_problems
from megatron_rl.validation.own_functions import own_function_problems
from megatron_rl.validation.weight_words import weight_in_words
from megatron_rl.weights import TOKEN_MEAN

_DEFAULTS = {field.name: field.default for field in flag_fields()}
# Aggregations of verl, SkyRL and TRL, with underscores.
_OF_RANKS = "a mean over one rank's tokens, which depends on the layout; token_mean does not"
_ELSEWHERE = {
    "seq_mean_token_mean": "--loss-aggregation sample_mean",
    "seq_mean_token_sum": "--loss-aggregation constant --loss-aggregation-divisor 1",
    "seq_mean_token_sum_norm": "--loss-aggregation constant, with its loss_scale_factor as --loss-aggregation-divisor",
    "dr_grpo": "--loss-aggregation constant, with its L as --loss-aggregation-divisor",
    "token_mean_legacy": _OF_RANKS,
    "bnpo": _OF_RANKS,
}
_OF_TEACHER = ("distillation_divergence", "distillation_beta", "distillation_coefficient")
_COUNTS = ("samples_per_prompt", "max_logits_bytes", "docs_per_step")
_SWITCHES = [name for name, default in _DEFAULTS.items() if isinstance(default, bool)]


def host_switches_are_true_or_false(launch: Settings) -> Iterator[str]:
    """A host takes the value of its YAML file and tests its truth, so the text "false" is on. No other rule checks this."""
    for name, default in HOST_SWITCHES.items():
        value = launch.arguments.get(name, default)
        is_off = value is None and not default  # an empty value
        if not (isinstance(value, bool) or is_off):
            yield (
                f"{name}={value!r} must be true or false: it is a switch, and the host reads it as {bool(value)}; write "
                f"{name}: true or {name}: false in YAML, without quotes"
            )


def names_are_registered(launch: Settings) -> Iterator[str]:
    for name, registry in REGISTRIES.items():
        value = getattr(launch.config, name)
        try:
            if value != _DEFAULTS[name]:  # that of a correction is none
                registry[str(value)]
        except ConfigError as error:
            meant = _ELSEWHERE.get(str(value).lower().replace("-", "_"))
            yield f"{flag_of(name)}: {error}" + (f". Here {value} is {meant}" if meant else "")


def divisor_goes_with_constant(launch: Settings) -> Iterator[str]:
    """A formula with L needs a divisor, a formula without L refuses it. Without a formula the function may take it."""
    name, divisor, record = launch.config.loss_aggregation, launch.config.loss_aggregation_divisor, launch.record
    if divisor is None:
        if record is not None and record.formula is not None and record.takes_divisor:
            yield (
                f"loss_aggregation={name} needs --loss-aggregation-divisor L: each token weighs {record.formula}, "
                "which sets the scale of the gradient, so there is no default; pass the longest response, in tokens"
            )
    elif record is not None and record.takes_divisor is False:
        yield (
            f"loss_aggregation_divisor={divisor!r} has no effect with loss_aggregation={name}: its weight is "
            f"{weight_in_words(record, {})}; remove it"
        )
    elif not is_finite_number(divisor) or divisor <= 0:
        yield (
            f"loss_aggregation_divisor={divisor!r} must be a finite number above 0: weights are divided by it; write it out, as "
            "in --loss-aggregation-divisor 8192"
        )


def numbers_fit_the_loss(launch: Settings) -> Iterator[str]:
    """Its clip, and its parameters."""
    loss, config = launch.loss, launch.config
    if loss is None:
        return
    for check, given in (
        (loss.clip_bounds, (config.clip_ratio_low, config.clip_ratio_high)),
        (loss.resolve_parameters, (config.loss_parameters,)),
    ):
        try:
            check(*given)
        except ConfigError as error:
            yield from error.problems


def entropy_of_a_loss_is_known(launch: Settings) -> Iterator[str]:
    """custom_loss reports a share of clipped tokens, for which it calls the loss again, without the entropies."""
    loss, config = launch.loss, launch.config
    needs_entropy = loss is not None and loss.needs_entropy
    if needs_entropy and launch.method == LaunchMethod.CUSTOM_LOSS and config.policy_metrics != PolicyMetrics.NONE:
        yield (
            f"--policy-loss {config.policy_loss} needs the entropy of each token, which the metric pg_clipfrac of this launch "
            "method does not have: set --policy-metrics none"
        )


def corrections_fit(launch: Settings) -> Iterator[str]:
    """A wrong level is reported with the other choices."""
    correction, loss = CorrectionSettings.of(launch.config), launch.loss
    if correction is None:
        return
    if (correction.has_factor and launch.correction is None) or correction.level not in tuple(CorrectionLevel):
        return
    yield from correction.problems()
    if correction.has_factor and loss is not None and loss.anchor == "rollout":
        yield counted_twice(correction.kind, loss.name)


def distillation_fits(launch: Settings) -> Iterator[str]:
    """A wrong kind or divergence is reported with the other choices."""
    config, settings, loss = launch.config, DistillationSettings.of(launch.config), launch.loss
    if settings is None or config.distillation not in tuple(Distillation) or settings.divergence not in DIVERGENCES:
        return
    for problem in settings.problems():
        yield f"distillation_{problem}"
    if config.distillation == Distillation.SAMPLED and settings.divergence != _DEFAULTS["distillation_divergence"]:
        yield (
            f"distillation_divergence={settings.divergence} has no effect with --distillation sampled, whose advantages train "
            "reverse_kl: remove it, or give top K ids with --distillation topk"
        )
    if config.distillation == Distillation.SAMPLED and loss is not None and loss.level == "sequence":
        yield (
            f"--distillation sampled with policy_loss={config.policy_loss}: the teacher gives each token its own advantage, and "
            "this loss takes one a sample; choose a token-level loss (grpo), or --distillation topk"
        )
    if config.sampling_support == SupportUse.REPLAY:
        yield (
            f"--distillation {config.distillation} with --sampling-support replay: the teacher is of the whole vocabulary, "
            "and the loss scores among the kept ids; remove one of them"
        )


def settings_are_read(launch: Settings) -> Iterator[str]:
    """What nothing reads beside the other settings. What a host reports by itself, its own rules know."""
    config, given = launch.config, launch.set_flags
    has_no_kl, has_no_metrics = config.kl_coefficient == 0, config.policy_metrics == PolicyMetrics.NONE
    has_no_teacher = config.distillation == Distillation.NONE
    has_head = config.fused_lm_head_loss is True
    has_budget = "--max-logits-bytes" in given or config.max_logits_bytes != DEFAULT_MAX_LOGITS_BYTES
    # The default watches every run. Only a user who sets the flag expects it to work.
    has_watchdog = config.watchdog == Watchdog.RAISE or config.watchdog == Watchdog.WARN and "--watchdog" in given
    has_no_size = config.allow_partial_prompt_groups is True and config.samples_per_prompt is None
    # The setting, whether it is set and not read, what is missing, the flag that adds it.
    rows = (
        ("kl_estimator", config.kl_estimator != DEFAULT_KL_ESTIMATOR and has_no_kl, "a KL term", "--kl-coefficient"),
        *(
            (name, has_no_teacher and getattr(config, name) != _DEFAULTS[name], "a teacher", "--distillation")
            for name in _OF_TEACHER
        ),
        ("allow_partial_prompt_groups", has_no_size, "a size of groups", "--samples-per-prompt"),
        ("max_logits_bytes", has_budget and not has_head, "the fused head", "--fused-lm-head-loss"),
        ("watchdog", has_watchdog and has_no_metrics, "metrics", "--policy-metrics basic"),
    )
    for name, is_idle, missing, flag in rows:
        if is_idle:
            yield f"{name}={getattr(config, name)!r} has no effect without {missing}: remove it, or add {flag}"


def numbers_are_in_range(launch: Settings) -> Iterator[str]:
    config, temperature = launch.config, launch.config.policy_temperature
    if not (is_finite_number(temperature) and temperature > 0):
        yield (
            f"policy_temperature={temperature!r} must be a finite number above 0: logits are divided by it; pass the "
            "temperature that the rollouts were sampled at"
        )
    for name in ("kl_coefficient", "entropy_coefficient"):
        value = getattr(config, name)
        if not (is_finite_number(value) and value >= 0):
            yield f"{name}={value!r} must be a finite number at or above 0: {flag_of(name)} 0 turns the term off"
    for name in _COUNTS:
        value = getattr(config, name)
        if value is not None and not _is_count(value):
            yield f"{name}={value!r} must be a whole number of at least 1: write it out in digits"


def choices_are_listed(launch: Settings) -> Iterator[str]:
    for name, choices in CHOICES.items():
        value = getattr(launch.config, name)
        if value not in list(choices) and not (value is None and _DEFAULTS[name] is None):
            # YAML 1.1 reads the bare words on, off, yes and no as booleans.
            remedy = "write it in quotes in YAML" if isinstance(value, bool) else f"pass one of them to {flag_of(name)}"
            yield f"{name}={value!r} must be one of {', '.join(choices)}; {remedy}"


def switches_are_true_or_false(launch: Settings) -> Iterator[str]:
    for name in _SWITCHES:
        value = getattr(launch.config, name)
        if not isinstance(value, bool):
            yield f"{name}={value!r} must be true or false: it is a switch; write {flag_of(name)} without a value"


def per_token_loss_is_token_mean(launch: Settings) -> Iterator[str]:
    record = launch.record
    if launch.calculates_per_token_loss and record is not None and record.formula != TOKEN_MEAN:
        yield (
            f"loss_aggregation={launch.config.loss_aggregation} does not go with calculate_per_token_loss=True: the host divides "
            f"by the step's tokens, the weight 1/T of token_mean, and this one's is {weight_in_words(record, {})}; remove "
            "--calculate-per-token-loss"
        )


def the_model_keeps_the_step(launch: Settings) -> Iterator[str]:
    """Losses that the model adds keep their scale, and nothing of it makes the step depend on its layout, or on chance."""
    loss_arguments = {
        "calculate_per_token_loss": launch.calculates_per_token_loss,
        "router_aux_loss": launch.config.router_aux_loss,
    }
    yield from auxiliary_loss_problems({**launch.arguments, **loss_arguments}, launch.method)
    yield from expert_problems(launch.arguments)
    yield from model_problems(launch.arguments)


def steps_hold_whole_prompt_groups(launch: Settings) -> Iterator[str]:
    config = launch.config
    samples, size, record = launch.arguments.get("global_batch_size"), config.samples_per_prompt, launch.record
    if record is None or not record.needs_prompts or config.allow_partial_prompt_groups is True:
        return
    if _is_count(samples) and _is_count(size) and samples % size:
        yield (
            f"global_batch_size={samples} is not a multiple of samples_per_prompt={size}: with loss_aggregation="
            f"{config.loss_aggregation} a step would cut a prompt group; choose a multiple of {size}, or accept cut groups with "
            "--allow-partial-prompt-groups"
        )


def flags_have_an_effect(launch: Settings) -> Iterator[str]:
    values = {field.name: getattr(launch.config, field.name) for field in flag_fields()} | dict(launch.config.loss_parameters)
    for flag, methods in methods_of_flags().items():
        name = field_of(flag)
        is_given = flag in launch.set_flags or name in values and values[name] != _DEFAULTS.get(name)
        if is_given and launch.method not in methods:
            value = values[name]
            places = ", ".join(method for method in LaunchMethod if method in methods)
            remedy = "remove it"
            if name == "distillation" and launch.method in (LaunchMethod.CUSTOM_LOSS, LaunchMethod.REDUCER):
                remedy += ": for sampled, --use-opd with --opd-kl-coef of miles and slime adds the same to the advantages"
            yield f"{name}={value!r} would be ignored on the launch method {launch.method}: {flag} works on {places}; {remedy}"


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


RULES = (
    host_switches_are_true_or_false,
    names_are_registered,
    own_function_problems,
    divisor_goes_with_constant,
    numbers_fit_the_loss,
    entropy_of_a_loss_is_known,
    corrections_fit,
    distillation_fits,
    settings_are_read,
    numbers_are_in_range,
    choices_are_listed,
    switches_are_true_or_false,
    per_token_loss_is_token_mean,
    the_model_keeps_the_step,
    steps_hold_whole_prompt_groups,
    flags_have_an_effect,
)
