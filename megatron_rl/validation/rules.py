"""The rules of our settings: each checks one thing and yields a message for each problem. A rule changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import Field
from typing import TypeGuard

from megatron_rl.aggregation_record import TOKEN_MEAN
from megatron_rl.config import (
    DEFAULT_KL_ESTIMATOR,
    DEFAULT_MAX_LOGITS_BYTES,
    Backend,
    CorrectionLevel,
    EntropyBonusTokens,
    PolicyMetrics,
    RatioUnit,
    RejectedTokens,
    Route,
    TermScore,
    Watchdog,
    flag_fields,
)
from megatron_rl.errors import ConfigError
from megatron_rl.kept_counts import counts_kept_before, other_choices, why_before
from megatron_rl.loss_hub import (
    PolicyLoss,
    clip_high_problem,
    clip_low_problem,
    declared_parameters,
    get_loss_aggregation,
    get_policy_loss,
    is_built_in,
    is_finite_number,
    loss_aggregation_names,
    policy_loss_names,
)
from megatron_rl.registries.correction_settings import CorrectionSettings, counted_twice
from megatron_rl.registries.corrections import correction_names, get_correction
from megatron_rl.registries.selection_settings import TokenSelectionSettings
from megatron_rl.validation.auxiliary_losses import auxiliary_loss_problems
from megatron_rl.validation.checks import check
from megatron_rl.validation.experts import expert_problems
from megatron_rl.validation.model_settings import model_problems
from megatron_rl.validation.routes import CHOICES, HOST_SWITCHES, REASONS, REGISTRIES, Settings, flag_of, routes_of_flags

_DEFAULTS = {field.name: field.default for field in flag_fields()}

# Names of aggregations in other frameworks, with underscores. verl: loss_agg_mode; TRL: loss_type; open-instruct: token.
_ELSEWHERE = {
    "seq_mean_token_mean": "is sample_mean here",
    "grpo": "is sample_mean here",
    "seq_mean_token_sum": "is constant with --loss-aggregation-divisor 1 here",
    "luspo": "is constant with --loss-aggregation-divisor 1 here",
    "seq_mean_token_sum_norm": "is constant here, but verl does not divide by the samples: its L does not carry over",
    "dr_grpo": "is constant here, with its L as --loss-aggregation-divisor",
    "token": "is token_mean here",
    "dapo": "is token_mean here as most frameworks compute it, prompt_mean as published (arXiv:2503.14476)",
    "bnpo": "has no equal here, because a mean over one rank's batch depends on the layout; token_mean does not",
}
_COUNTS = {
    "samples_per_prompt": "it is the number of samples of each prompt",
    "max_logits_bytes": "it is a size in bytes",
    "docs_per_step": "it is the number of documents of a step",
}
_COEFFICIENTS = {
    "kl_coefficient": "the loss adds it times the KL",
    "entropy_coefficient": "the loss subtracts it times the entropy",
}
_SWITCHES = [name for name, default in _DEFAULTS.items() if isinstance(default, bool)]


@check()
def host_switches_are_true_or_false(launch: Settings) -> Iterator[str]:
    """A host takes the value of its YAML file and tests its truth, so the text "false" is on. No other rule checks this."""
    for name, value in launch.host_switches.items():
        is_off = value is None and not HOST_SWITCHES[name]  # an empty value
        if not (isinstance(value, bool) or is_off):
            yield (
                f"{name}={value!r} must be true or false: it is a switch, and the host reads it as {bool(value)}; write "
                f"{name}: true or {name}: false in YAML, without quotes, and on a command line the flag without a value"
            )


@check()
def loss_aggregation_is_known(launch: Settings) -> Iterator[str]:
    name = launch.config.loss_aggregation
    yield from _problem_of_name("loss_aggregation", name, get_loss_aggregation, _pointer_to_aggregation)


@check()
def policy_loss_is_known(launch: Settings) -> Iterator[str]:
    yield from _problem_of_name("policy_loss", launch.config.policy_loss, get_policy_loss, _pointer_to_loss)


@check()
def own_loss_is_what_it_declares(launch: Settings) -> Iterator[str]:
    if launch.loss is not None and not is_built_in(launch.loss.name):
        from megatron_rl.validation.own_loss import own_loss_problems  # torch, which a user's loss has imported

        yield from own_loss_problems(launch.config)


@check()
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
            f"{record.weight_in_words({})}; remove it, or choose --loss-aggregation constant"
        )
    elif not is_finite_number(divisor) or divisor <= 0:
        yield (
            f"loss_aggregation_divisor={divisor!r} must be a finite number above 0: weights are divided by it; write it out, as "
            "in --loss-aggregation-divisor 8192"
        )


@check()
def clip_ratio_low_is_a_distance(launch: Settings) -> Iterator[str]:
    value = launch.config.clip_ratio_low
    problem = None if value is None else clip_low_problem(value, launch.loss)
    if problem is not None:
        yield f"{problem}; {_clip_remedy(launch.loss, value)}"


@check()
def clip_ratio_high_is_a_distance(launch: Settings) -> Iterator[str]:
    value = launch.config.clip_ratio_high
    problem = None if value is None else clip_high_problem(value)
    if problem is not None:
        yield f"{problem}; {_clip_remedy(launch.loss, value)}"


@check()
def clip_goes_with_a_loss_that_clips(launch: Settings) -> Iterator[str]:
    loss = launch.loss
    if loss is not None and loss.clip_ratios is None:
        for name in ("clip_ratio_low", "clip_ratio_high"):
            value = getattr(launch.config, name)
            if value is not None:
                yield f"{flag_of(name)} {value} has no effect: policy loss {loss.name!r} has no clip; remove it"


@check()
def loss_parameters_are_declared(launch: Settings) -> Iterator[str]:
    loss = launch.loss
    if loss is None:
        return
    for name, value in launch.config.loss_parameters.items():
        owners = declared_parameters().get(name, {})
        if loss.name in owners:
            try:
                owners[loss.name].check(value)
            except ConfigError as error:
                yield f"{flag_of(name)}: {error}"
        else:
            yield (
                f"{flag_of(name)} {value} has no effect with --policy-loss {launch.config.policy_loss}: it is a parameter of "
                f"{', '.join(owners) or 'no loss'}; remove it, or choose that loss"
            )


@check()
def entropy_of_a_loss_is_known(launch: Settings) -> Iterator[str]:
    """custom_loss reports a share of clipped tokens, for which it calls the loss again, without the entropies."""
    loss, config = launch.loss, launch.config
    if loss is None or not loss.needs_entropy or launch.route != Route.CUSTOM_LOSS:
        return
    if config.policy_metrics != PolicyMetrics.NONE:
        yield (
            f"--policy-loss {config.policy_loss} needs the entropy of each token, which the metric pg_clipfrac of this route does "
            "not have: set --policy-metrics none, or train with the forward step of Megatron-LM or with megatron_rl train"
        )


@check()
def corrections_fit(launch: Settings) -> Iterator[str]:
    """A wrong level is reported with the other choices."""
    correction, loss = CorrectionSettings.of(launch.config), launch.loss
    if launch.correction is None or correction.level not in tuple(CorrectionLevel):
        return
    yield from correction.problems()
    if correction.has_factor and loss is not None and loss.anchor == "rollout":
        yield counted_twice(correction.kind, loss.name)


@check()
def ratios_have_a_unit(launch: Settings) -> Iterator[str]:
    """A wrong unit is reported with the other choices."""
    config, loss, correction = launch.config, launch.loss, CorrectionSettings.of(launch.config)
    unit = config.importance_ratio_unit
    if unit not in (RatioUnit.ROLLOUT, RatioUnit.TURN) or loss is None:
        return
    if loss.level == "batch":
        yield (
            f"importance_ratio_unit={unit} with policy_loss={config.policy_loss}: its function sums over the tokens of a sample by "
            "itself, so it has no ratio of a sequence that could be another one's; remove it, or choose --policy-loss gspo"
        )
    elif loss.level != "sequence" and not correction.needs_sums:
        yield (
            f"importance_ratio_unit={unit} has no effect with policy_loss={config.policy_loss}, which has a ratio a token, and "
            "without a correction of sequences; remove it, or choose --policy-loss gspo"
        )
    if unit == RatioUnit.ROLLOUT and launch.record is not None and launch.record.needs_rows:
        yield (
            f"importance_ratio_unit={unit} with loss_aggregation={config.loss_aggregation}: the samples of a rollout weigh "
            "differently there, and the one ratio of them all has one weight; choose --loss-aggregation sample_mean"
        )


@check()
def dropped_tokens_are_known(launch: Settings) -> Iterator[str]:
    config = launch.config
    if config.rejected_tokens != RejectedTokens.DROPPED:
        return
    if config.off_policy_sequence_delta is not None:
        if launch.record is not None and counts_kept_before(config):
            yield (
                f"rejected_tokens=dropped with off_policy_sequence_delta={config.off_policy_sequence_delta} and "
                f"loss_aggregation={config.loss_aggregation}: what that drops depends on the policy in training, and must be known "
                f"before the forward pass, {why_before(config)}; choose {other_choices(config)}"
            )
    elif launch.correction is not None and not launch.correction.drops_tokens:
        dropping = [name for name in correction_names() if get_correction(name).drops_tokens]
        yield (
            f"rejected_tokens=dropped has no effect with importance_correction={config.importance_correction}, which drops no "
            f"token: remove it, or choose {' or '.join(dropping)}"
        )


@check()
def selections_fit(launch: Settings) -> Iterator[str]:
    config, selection, loss = launch.config, TokenSelectionSettings.of(launch.config), launch.loss
    if launch.token_selection is None or config.entropy_bonus_tokens not in tuple(EntropyBonusTokens):
        return
    yield from selection.problems()
    if not selection.is_on:
        return
    if selection.share == 0:
        yield "token_selection_share=0 selects no token: remove --token-selection, or give the share that is to be selected"
    if loss is not None and loss.level != "token":
        yield (
            f"token_selection={selection.kind} with policy_loss={config.policy_loss}, a loss of level {loss.level}: the tokens of "
            "a sample are together in it, so one is not trained without the others; remove --token-selection, or choose a loss of "
            "single tokens, such as grpo"
        )
    if selection.entropy_bonus == EntropyBonusTokens.TRAINED and not config.entropy_coefficient:
        yield ("entropy_bonus_tokens=trained has no effect without an entropy term: set --entropy-coefficient, or remove it")


@check()
def kl_estimator_has_a_term(launch: Settings) -> Iterator[str]:
    config = launch.config
    if config.kl_estimator != DEFAULT_KL_ESTIMATOR and launch.kl_estimator is not None and config.kl_coefficient == 0:
        yield f"kl_estimator={config.kl_estimator} has no effect without a KL term: set --kl-coefficient, or remove it"


@check()
def kl_score_has_a_term(launch: Settings) -> Iterator[str]:
    config = launch.config
    if config.kl_score == TermScore.SUPPORT and config.kl_coefficient == 0:
        yield "kl_score=support has no effect without a KL term: set --kl-coefficient, or remove it"


@check()
def entropy_score_has_a_reader(launch: Settings) -> Iterator[str]:
    config, loss = launch.config, launch.loss
    selection = launch.token_selection
    is_read = config.entropy_coefficient or config.policy_metrics == PolicyMetrics.WITH_ENTROPY or (loss and loss.needs_entropy)
    is_read = is_read or (selection is not None and "entropy" in selection.needs)
    if config.entropy_score == TermScore.SUPPORT and not is_read:
        yield (
            "entropy_score=support has no effect: nothing takes an entropy; set --entropy-coefficient or --policy-metrics "
            "with_entropy, or remove it"
        )


@check()
def temperature_is_positive(launch: Settings) -> Iterator[str]:
    value = launch.config.policy_temperature
    if not (is_finite_number(value) and value > 0):
        yield (
            f"policy_temperature={value!r} must be a finite number above 0: logits are divided by it; pass the "
            "temperature that the rollouts were sampled at"
        )


@check()
def coefficients_are_not_negative(launch: Settings) -> Iterator[str]:
    for name, use in _COEFFICIENTS.items():
        value = getattr(launch.config, name)
        if not (is_finite_number(value) and value >= 0):
            yield f"{name}={value!r} must be a finite number at or above 0: {use}; {flag_of(name)} 0 turns the term off"


@check()
def counts_are_positive(launch: Settings) -> Iterator[str]:
    for name, meaning in _COUNTS.items():
        value = getattr(launch.config, name)
        if value is not None and not _is_count(value):
            yield (
                f"{name}={value!r} must be a whole number of at least 1: {meaning}; write it out in digits, or leave "
                f"{flag_of(name)} unset"
            )


@check()
def choices_are_listed(launch: Settings) -> Iterator[str]:
    for name, choices in CHOICES.items():
        value = getattr(launch.config, name)
        if value not in list(choices) and not (value is None and _DEFAULTS[name] is None):
            # YAML 1.1 reads the bare words on, off, yes and no as booleans.
            remedy = f'in YAML write it in quotes, as in {name}: "{next(iter(choices))}"'
            if not isinstance(value, bool):
                remedy = f"pass one of them to {flag_of(name)}"
            yield f"{name}={value!r} must be one of {', '.join(choices)}: nothing else is implemented; {remedy}"


@check()
def registered_names_are_known(launch: Settings) -> Iterator[str]:
    for name, registry in REGISTRIES.items():
        try:
            registry.find(getattr(launch.config, name))
        except ConfigError as error:
            yield f"{flag_of(name)}: {error}"


@check()
def own_terms_are_what_they_declare(launch: Settings) -> Iterator[str]:
    declarations = (launch.record, launch.kl_estimator, launch.correction, launch.token_selection)
    own = [declared for declared in declarations if declared is not None]
    if any(not declared.function.__module__.startswith("megatron_rl.") for declared in own):
        from megatron_rl.validation.own_terms import own_term_problems  # torch, which a user's function has imported

        yield from own_term_problems(launch)


@check()
def custom_metrics_are_computed(launch: Settings) -> Iterator[str]:
    config = launch.config
    if config.custom_policy_metrics is None:
        return
    if config.policy_metrics == PolicyMetrics.NONE:
        yield (
            f"custom_policy_metrics={config.custom_policy_metrics} has no effect with policy_metrics=none: no metric is computed; "
            "choose --policy-metrics basic, or remove it"
        )
        return
    from megatron_rl.validation.own_terms import metric_problems  # torch, which a user's metric has imported

    yield from metric_problems(config)


@check()
def switches_are_true_or_false(launch: Settings) -> Iterator[str]:
    for name in _SWITCHES:
        value = getattr(launch.config, name)
        if not isinstance(value, bool):
            yield (
                f"{name}={value!r} must be true or false: it is a switch; write {flag_of(name)} without a value on a "
                f"command line, or {name}: true in YAML"
            )


@check()
def partial_groups_need_a_declared_size(launch: Settings) -> Iterator[str]:
    config = launch.config
    if config.allow_partial_prompt_groups is True and config.samples_per_prompt is None:
        yield (
            "allow_partial_prompt_groups=True has no effect without samples_per_prompt: without a declared size no group is "
            "incomplete; pass --samples-per-prompt too, or remove --allow-partial-prompt-groups"
        )


@check()
def per_token_loss_is_token_mean(launch: Settings) -> Iterator[str]:
    record = launch.record
    if launch.calculate_per_token_loss is not True or record is None or record.formula == TOKEN_MEAN:
        return
    yield (
        f"loss_aggregation={launch.config.loss_aggregation} does not go with calculate_per_token_loss=True: the host divides by "
        f"the step's tokens, the weight 1/T of token_mean, and this one's is {record.weight_in_words({})}; remove "
        "--calculate-per-token-loss, or choose --loss-aggregation token_mean"
    )


@check()
def auxiliary_losses_keep_their_scale(launch: Settings) -> Iterator[str]:
    """Losses that the model adds by itself; validation/auxiliary_losses.py explains the arithmetic."""
    of_loss = {
        "calculate_per_token_loss": launch.calculate_per_token_loss is True,
        "router_aux_loss": launch.config.router_aux_loss,
    }
    yield from auxiliary_loss_problems({**launch.model, **of_loss}, launch.route)


@check()
def experts_do_not_depend_on_the_layout(launch: Settings) -> Iterator[str]:
    """Nor on chance. The drift of replicas is judged where Megatron-Core is: at start."""
    yield from expert_problems(launch.model, launch.route)


@check()
def models_are_right_on_their_layout(launch: Settings) -> Iterator[str]:
    yield from model_problems(launch.model, launch.route)


@check()
def steps_hold_whole_prompt_groups(launch: Settings) -> Iterator[str]:
    config = launch.config
    samples, size, record = launch.global_batch_size, config.samples_per_prompt, launch.record
    if record is None or not record.needs_prompts or config.allow_partial_prompt_groups is True:
        return
    if _is_count(samples) and _is_count(size) and samples % size:
        yield (
            f"global_batch_size={samples} is not a multiple of samples_per_prompt={size}: with loss_aggregation="
            f"{config.loss_aggregation} a step would cut a prompt group; choose a multiple of {size}, or accept cut groups with "
            "--allow-partial-prompt-groups"
        )


@check()
def scaled_exp_goes_with_the_fused_head(launch: Settings) -> Iterator[str]:
    config = launch.config
    if config.scaled_exp_head is not True:
        return
    if config.fused_lm_head_loss is not True:
        yield (
            "scaled_exp_head=True has no effect without fused_lm_head_loss: it is a form of the fused head; remove it, or add "
            "--fused-lm-head-loss"
        )
    elif config.entropy_coefficient:
        yield (
            f"scaled_exp_head=True with entropy_coefficient={config.entropy_coefficient}: the coefficient of an entropy term does "
            "not commute with the product; remove --scaled-exp-head"
        )
    elif config.policy_loss_backend == Backend.TORCH:
        yield "scaled_exp_head=True with policy_loss_backend=torch: its kernel is a Triton kernel; remove one of them"


@check()
def logits_budget_goes_with_the_fused_head(launch: Settings) -> Iterator[str]:
    config = launch.config
    is_given = "--max-logits-bytes" in launch.set_flags or config.max_logits_bytes != DEFAULT_MAX_LOGITS_BYTES
    if is_given and config.fused_lm_head_loss is not True:
        yield (
            f"max_logits_bytes={config.max_logits_bytes!r} has no effect without fused_lm_head_loss: only the fused head computes "
            "logits in chunks; remove it, or add --fused-lm-head-loss"
        )


@check()
def fp32_head_has_16_bit_parameters(launch: Settings) -> Iterator[str]:
    """Logits of float32 parameters are float32 without the flag too, so a user who sets it expects other parameters."""
    if launch.config.fp32_lm_head is True and launch.has_16_bit_parameters is False:
        yield (
            "fp32_lm_head=True has no effect with float32 parameters: their logits are float32 already; remove it, or train 16-bit "
            "parameters with --bf16"
        )


@check()
def watchdog_has_metrics(launch: Settings) -> Iterator[str]:
    """The default is on for every run. Only a user who sets the flag expects it to work."""
    config = launch.config
    is_given = "--watchdog" in launch.set_flags or config.watchdog == Watchdog.RAISE
    if is_given and config.watchdog in (Watchdog.WARN, Watchdog.RAISE) and config.policy_metrics == PolicyMetrics.NONE:
        yield (
            f"watchdog={config.watchdog} has no effect with policy_metrics=none: it checks the metrics of each step; choose "
            "--policy-metrics basic, or remove --watchdog"
        )


@check()
def flags_have_an_effect(launch: Settings) -> Iterator[str]:
    given = {field.name: getattr(launch.config, field.name) for field in flag_fields() if _is_given(launch, field)}
    routes_of_flag = routes_of_flags()
    for name, value in (given | dict(launch.config.loss_parameters)).items():
        flag = flag_of(name)
        routes = routes_of_flag.get(flag, routes_of_flag["--policy-loss"])
        if launch.route not in routes:
            places = ", ".join(route for route in Route if route in routes)
            reason = f" ({REASONS[flag]})" if flag in REASONS else ""
            is_ours = launch.route == Route.REDUCER and Route.CUSTOM_LOSS in routes
            other = f"train our loss: {launch.takes_our_loss_by}" if is_ours else "change the route"
            yield (
                f"{name}={value!r} would be ignored on the route {launch.route}: {flag} works on {places}{reason}; remove "
                f"it, or {other}"
            )


def _is_given(launch: Settings, field: Field) -> bool:
    return flag_of(field.name) in launch.set_flags or getattr(launch.config, field.name) != field.default


def _problem_of_name(field_name: str, name: object, look_up: Callable, pointer: Callable[[str], str]) -> Iterator[str]:
    if not isinstance(name, str) or not name:
        yield f"{field_name}={name!r} must be a name: give {flag_of(field_name)} a registered one, or module.function"
        return
    try:
        look_up(name)
    except ConfigError as error:
        hint = pointer(name.lower().replace("-", "_"))
        yield f"{flag_of(field_name)}: {error}. {name!r} {hint}" if hint else f"{flag_of(field_name)}: {error}"


def _pointer_to_aggregation(plain: str) -> str:
    """The name here of an aggregation of another framework; empty for an unknown name."""
    return f"is spelled {plain} here" if plain in loss_aggregation_names() else _ELSEWHERE.get(plain, "")


def _pointer_to_loss(plain: str) -> str:
    if plain in policy_loss_names():
        return f"is spelled {plain} here"
    meaning = _pointer_to_aggregation(plain)
    return f"names an aggregation: it {meaning}; combine --policy-loss grpo with --loss-aggregation" if meaning else ""


def _clip_remedy(loss: PolicyLoss | None, value: object) -> str:
    if is_finite_number(value) and 1 < value < 2:
        return f"did you mean {value - 1:.6g}?"
    if is_finite_number(value) and -1 < value < 0:
        return f"did you mean {-value:g}?"
    if loss is None or loss.clip_ratios is None:
        return "leave it unset for the loss's default"
    low, high = loss.clip_ratios
    return f"leave it unset for the default of {loss.name} ({low:g} low, {high:g} high)"


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
