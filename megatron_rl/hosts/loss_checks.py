"""What our loss refuses of a host's flags, and where a flag that it honours means something else than in the host's own loss.

flags.HOST_FLAGS has what is honoured. A warning here is a line at start; docs/hosts has the same as a table.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.config import NO_CORRECTION, CorrectionLevel, Route
from megatron_rl.errors import ConfigError
from megatron_rl.hosts.base import HostLaunch
from megatron_rl.hosts.flags import (
    DUAL_CLIP,
    KL_ESTIMATORS,
    MIS_FUNCTION,
    POLICY_LOSS_OF_ESTIMATOR,
    correction_of_host,
    correction_settings,
    has_dual_clip,
    is_mis,
    kl_key,
    known_correction,
    mis_problems,
    normalised_weights,
)
from megatron_rl.hosts.sampling import SAMPLERS, SamplingVerdict, flags_that_read, judge_sampling
from megatron_rl.hosts.support_checks import remedy_of, replays
from megatron_rl.metrics.custom import named_metrics
from megatron_rl.metrics.policy import Reduction, Weight
from megatron_rl.validation.checks import check

# What our loss reports by the hosts' names.
METRICS_OF_HOSTS = frozenset(
    "loss pg_loss entropy_loss pg_clipfrac ppo_kl ess_ratio kl_loss ois tis tis_clipfrac tis_abs opsm_clipfrac opd_reverse_kl "
    "kept_ids kept_mass train_rollout_logprob_abs_diff train_rollout_kl".split()
)
WOULD_LEAVE_OUT = "which would train as if it were not there"
OR_HOSTS_LOSS = "or train with the host's --loss-type policy_loss and megatron_rl.reducers.get_pg_loss_reducer"


@check(when=HostLaunch.has_our_loss)
def loss_options_of_the_host_are_honoured(launch: HostLaunch) -> Iterator[str]:
    """Those that flags.HOST_FLAGS has no row for."""
    options = launch.options
    unsupported = {
        "--get-mismatch-metrics": options["get_mismatch_metrics"],
        "--true-on-policy-mode": options["true_on_policy_mode"],
    }
    for option, is_set in unsupported.items():
        if is_set:
            yield f"{option} is not implemented by megatron_rl.hooks.custom_loss, {WOULD_LEAVE_OUT}: remove it, {OR_HOSTS_LOSS}"


@check(when=HostLaunch.has_our_loss)
def custom_correction_is_known(launch: HostLaunch) -> Iterator[str]:
    """A function of the user's may do anything to the loss and to the masks."""
    options, path = launch.options, launch.options["custom_tis_function_path"]
    if options["use_tis"] and is_mis(options):
        for problem in mis_problems(options):
            remedy = "" if problem == normalised_weights(options) else f", {OR_HOSTS_LOSS}"  # the host's loss calls it as well
            yield f"--custom-tis-function-path {path}: {problem}{remedy}"
    elif options["use_tis"] and path and known_correction(options) is None:
        known = ", ".join([*options.host.loss.correction_functions, f"...{MIS_FUNCTION}"])
        yield (
            f"--custom-tis-function-path {path} with --use-tis: megatron_rl.hooks.custom_loss does not call it, {WOULD_LEAVE_OUT}; "
            f"known are {known}; for other corrections remove it and --use-tis and type --importance-correction "
            f"{{tis,icepop,mask}} with --importance-correction-level, -low and -high, {OR_HOSTS_LOSS}"
        )


@check(when=HostLaunch.has_our_loss)
def metrics_of_ones_own_are_the_hosts_means(launch: HostLaunch) -> Iterator[str]:
    """The host adds up what a micro-batch returns, and divides each metric by one count."""
    host, is_per_token = launch.options.host, launch.options["calculate_per_token_loss"]
    try:
        rows = named_metrics(launch.options.ours("custom_policy_metrics"))
    except ConfigError:  # the rules of the settings say it
        return
    divided = (Weight.TOKEN, "num_tokens") if is_per_token else (Weight.SAMPLE_SHARE, "num_samples")
    count, remedy = ("tokens", "weight=Weight.TOKEN, normaliser='num_tokens'") if is_per_token else ("rollouts", "sample_mean(...)")
    for row in rows:
        if row.reduction != Reduction.SUM or not row.is_reported or (row.weight, row.normaliser) != divided:
            yield (
                f"--custom-policy-metrics: policy metric {row.name!r} is no mean over the step's {count}, and {host} divides each "
                f"metric by these: declare it with {remedy}, or leave it out"
            )
        elif row.name in METRICS_OF_HOSTS:
            yield f"--custom-policy-metrics: policy metric {row.name!r}: {host} has a metric of that name; choose another"


@check(when=HostLaunch.has_our_loss)
def correction_is_counted_once(launch: HostLaunch) -> Iterator[str]:
    """A ratio to the sampler's policy holds the correction; a second factor counts the gap twice."""
    options = launch.options
    if not options["use_rollout_logprobs"]:
        return
    ours = options.ours("importance_correction")
    kind = correction_of_host(options) if ours is None else ours
    if kind not in (None, NO_CORRECTION):
        flag = f"--importance-correction {kind}" if ours is not None else "--use-tis"
        yield (
            f"{flag} with --use-rollout-logprobs: the ratio of the loss is to rollout_log_probs already, so the correction would "
            f"be counted twice; remove {flag}, or remove --use-rollout-logprobs"
        )


@check()
def sampler_and_trainer_score_alike(launch: HostLaunch) -> Iterator[str]:
    """On each route: the host's own loss may compare with the sampler too."""
    yield from _sampling(launch).problems


@check(is_warning=True)
def sampler_is_the_policy(launch: HostLaunch) -> Iterator[str]:
    yield from _sampling(launch).warnings


def _sampling(launch: HostLaunch) -> SamplingVerdict:
    options, is_our_loss = launch.options, launch.route == Route.CUSTOM_LOSS
    if launch.is_alone or launch.route not in options.host.routes or options.host.name not in SAMPLERS:
        return SamplingVerdict()
    if replays(launch):  # the sampler's log-probabilities and the loss's are among the kept ids; support_checks judges the rest
        return SamplingVerdict(keeps_a_part=True)
    readers = ["--use-tis"] * bool(options["use_tis"]) + ["--use-rollout-logprobs"] * bool(options["use_rollout_logprobs"])
    if is_our_loss:
        readers += ["--use-opsm"] * bool(options["use_opsm"])
        readers += flags_that_read(options.ours)
    sampler, remedy = SAMPLERS[options.host.name], remedy_of(launch)
    return judge_sampling(sampler, options.__getitem__, readers, is_our_loss=is_our_loss, remedy=remedy)


@check(when=HostLaunch.has_our_loss)
def loss_has_a_dual_clip(launch: HostLaunch) -> Iterator[str]:
    options = launch.options
    loss = options.ours("policy_loss") or POLICY_LOSS_OF_ESTIMATOR.get(options["advantage_estimator"])
    if options["eps_clip_c"] is not None and loss and not has_dual_clip(loss):
        yield (
            f"--eps-clip-c {options['eps_clip_c']} (dual clip) with policy loss {loss}: it does not declare {DUAL_CLIP}, so the "
            f"flag would have no effect; remove it, {OR_HOSTS_LOSS}"
        )


@check(when=HostLaunch.has_our_loss)
def kl_estimator_is_known(launch: HostLaunch) -> Iterator[str]:
    kl_type, is_unbiased = kl_key(launch.options)
    is_ours = launch.options.ours("kl_estimator") is not None
    if is_ours or not launch.options["use_kl_loss"] or (kl_type, is_unbiased) in KL_ESTIMATORS:
        return
    names = [name for name, unbiased in KL_ESTIMATORS if unbiased == is_unbiased]
    beside = " --use-unbiased-kl" if is_unbiased else ""
    why = f": the ratio times {kl_type} has not the gradient of a KL" if is_unbiased else ""
    yield (
        f"--kl-loss-type {kl_type}{beside} with --use-kl-loss{why}; megatron_rl.hooks.custom_loss has {', '.join(names)}: set one "
        "of them"
    )


# Where a flag of the host has another meaning in our loss than in the host's.


@check(when=HostLaunch.has_our_loss, is_warning=True)
def kl_differs_from_the_hosts(launch: HostLaunch) -> Iterator[str]:
    kl_type, is_unbiased = kl_key(launch.options)
    if not launch.kl_and_entropy[0] or launch.options.ours("kl_estimator") is not None:
        return
    beside = " --use-unbiased-kl" if is_unbiased else ""
    if kl_type == "low_var_kl":
        yield (
            f"--kl-loss-type low_var_kl{beside} in our loss is k3{' times the ratio' if is_unbiased else ''}, without "
            f"{launch.options.host}'s clamp at 10: a token of a larger value keeps its gradient, up to a log-ratio of 20"
        )
    elif is_unbiased and kl_type == "k1":
        yield (
            "--kl-loss-type k1 --use-unbiased-kl in our loss is the ratio times k3: the expected gradient is the same, its noise "
            "is smaller"
        )


@check(when=HostLaunch.has_our_loss, is_warning=True)
def sequence_masking_differs_from_the_hosts(launch: HostLaunch) -> Iterator[str]:
    """DeepSeek-V3.2 compares with the sampler. Log-probabilities that the trainer recomputes come from the policy itself in the
    first step of a rollout."""
    options, host = launch.options, launch.options.host
    if not options["use_opsm"]:
        return
    if not options["use_rollout_logprobs"]:
        inert = ", which are the policy's own, so that nothing is ever dropped" if options.is_one_step else ""
        yield (
            f"--use-opsm --opsm-delta {options['opsm_delta']:g} in our loss compares the policy with rollout_log_probs, as "
            f"DeepSeek-V3.2 does; {host}'s own loss compares with the trainer's log_probs{inert}: the gap between sampler and "
            "trainer now counts, and a delta that was tuned there may drop more"
        )
    yield (
        f"opsm_clipfrac is the share of what --use-opsm drops, by the weights of the other metrics; {host} itself adds up the "
        "shares of the samples, masked tokens included"
    )


@check(when=HostLaunch.has_our_loss, is_warning=True)
def masked_sampling_differs_from_the_hosts(launch: HostLaunch) -> Iterator[str]:
    options, found = launch.options, correction_settings(launch.options)
    if found.kind is not None and is_mis(options):
        yield (
            f"{MIS_FUNCTION} is --importance-correction {found.kind} --importance-correction-level {found.level} with bounds "
            f"[{found.low:g}, {found.high:g}] in our loss: the same weights over the same denominators; the mis_... metrics of "
            f"{options.host} are not reported"
        )


@check(when=HostLaunch.has_our_loss, is_warning=True)
def sample_ratios_are_reported(launch: HostLaunch) -> Iterator[str]:
    level = launch.options.ours("importance_correction_level") or correction_settings(launch.options).level
    if level not in (None, CorrectionLevel.TOKEN):
        yield (
            f"tis, tis_clipfrac and tis_abs are those of the sample's ratio (--importance-correction-level {level}); "
            f"{launch.options.host}'s own are those of the token's"
        )
