"""What is refused of --sampling-support replay and the scores of its terms, before there is data; kept_ids reads the sets."""

from __future__ import annotations

import os
from collections.abc import Iterator

from megatron_rl.arguments import read_number, read_switch
from megatron_rl.config import PolicyMetrics, SupportUse, TermScore
from megatron_rl.hosts.base import HostLaunch
from megatron_rl.hosts.kept_ids import KeptIds
from megatron_rl.hosts.sampling import SAMPLERS, changed_under_replay
from megatron_rl.registries.kl_estimators import KL_ESTIMATORS
from megatron_rl.validation import flag_of
from megatron_rl.validation.checks import Asker, check

FLAG = f"--sampling-support {SupportUse.REPLAY}"
OR_REFUSE = "or remove --sampling-support"
# SGLang then reports log-probabilities of the whole vocabulary, beside the sets.
RAW_SCORES = "SGLANG_RETURN_ORIGINAL_LOGPROB"


def replays(launch: HostLaunch) -> bool:
    return launch.has_our_loss() and launch.options.ours("sampling_support") == SupportUse.REPLAY


def remedy_of(launch: HostLaunch) -> str | None:
    """What gives our loss the sets that the sampler of this launch returns; None: it returns none."""
    kept = _kept(launch)
    return FLAG if launch.has_our_loss() and kept is not None and any(_filters_on(launch)[name] for name in kept.filters) else None


def _kept(launch: HostLaunch) -> KeptIds | None:
    return launch.options.host.loss.kept


def _filters_on(launch: HostLaunch) -> dict[str, bool]:
    filters = SAMPLERS[launch.options.host.name].filters
    return {name: read_number(launch.options[name]) not in one.off for name, one in filters.items()}


@check(when=HostLaunch.has_our_loss)
def support_has_a_use(launch: HostLaunch) -> Iterator[str]:
    """kl_score is checked against the KL term by megatron_rl.validation."""
    for name, term in (("kl_score", "the KL term"), ("entropy_score", "the entropy")):
        if not replays(launch) and launch.options.ours(name) == TermScore.SUPPORT:
            flag = flag_of(name)
            yield f"{flag} support without {FLAG}: there are no kept ids for {term}; add {FLAG}, or remove {flag}"


@check(when=replays)
def sets_are_handed_over(launch: HostLaunch) -> Iterator[str]:
    host, kept = launch.options.host, _kept(launch)
    if kept is None:
        yield f"{FLAG}: {host} does not hand a loss the ids that its sampler kept; sample from the whole vocabulary, {OR_REFUSE}"
        return
    is_on = _filters_on(launch)
    if any(is_on[name] for name in kept.filters):
        return
    on = " and ".join(f"{flag_of(name)} {launch.options[name]}" for name in is_on if is_on[name])
    typed = " or ".join(map(flag_of, kept.filters))
    if on:
        yield (
            f"{FLAG} with {on}: {host} returns what its sampler kept only where {typed} is set; set {typed} below 1 too, or remove "
            f"{on} and --sampling-support"
        )
    else:
        yield f"{FLAG} has no effect: the sampler keeps the whole vocabulary; set {typed}, {OR_REFUSE}"


@check(when=replays)
def tokens_are_drawn_from_their_sets(launch: HostLaunch) -> Iterator[str]:
    sampler = SAMPLERS.get(launch.options.host.name)
    yield from changed_under_replay(sampler, launch.options.__getitem__, FLAG) if sampler is not None else ()


@check(when=replays)
def reference_is_scored_so(launch: HostLaunch) -> Iterator[str]:
    """The host's trainer measures ref_log_probs, over what it always does."""
    options, kept = launch.options, _kept(launch)
    ours = options.ours("kl_coefficient")
    has_term = options["use_kl_loss"] or (ours is not None and read_number(ours) not in (0, None))
    if kept is None:
        return
    if has_term:
        score = options.ours("kl_score") or TermScore.FULL
        over = {TermScore.FULL: "over the whole vocabulary", TermScore.SUPPORT: "among the kept ids"}
        if score != kept.reference and score in over:
            yield (
                f"--kl-score {score} with {FLAG}: {options.host} measures ref_log_probs {over[kept.reference]}, and the KL term "
                f"would compare two kinds of scores; set --kl-score {kept.reference}"
            )
        estimator = KL_ESTIMATORS.find_or_none(str(options.ours("kl_estimator")))
        takes_ratio = options["use_unbiased_kl"] or (estimator is not None and estimator.takes_log_ratio)
        if takes_ratio and kept.reference == TermScore.FULL:
            given = "--use-unbiased-kl" if options["use_unbiased_kl"] else f"--kl-estimator {options.ours('kl_estimator')}"
            yield (
                f"{given} with {FLAG}: it multiplies the KL term by the importance ratio, which is among the kept ids, and the KL "
                f"of {options.host} is over the whole vocabulary; remove {given}"
            )
    if options["kl_coef"] and kept.reference == TermScore.FULL:
        yield (
            f"--kl-coef {options['kl_coef']:g} with {FLAG}: the KL in the reward compares old log-probabilities among the kept ids "
            "with ref_log_probs over the whole vocabulary; use --use-kl-loss with --kl-loss-coef, and remove --kl-coef"
        )


@check(when=replays)
def entropy_is_scored_so(launch: HostLaunch) -> Iterator[str]:
    """The KL that a host reports at coefficient 0 takes its kept mass from the pass that has the entropy of the vocabulary."""
    options, loss = launch.options, launch.options.host.loss
    if options.ours("entropy_score") != TermScore.SUPPORT:
        return
    ours, metrics = options.ours("entropy_coefficient"), options.ours("policy_metrics")
    has_metrics, is_computed = metrics != PolicyMetrics.NONE, loss.always_has_entropy or options["observe_training_entropy"]
    is_reported = metrics == PolicyMetrics.WITH_ENTROPY or (has_metrics and is_computed)
    if not (options["entropy_coef"] or read_number(ours) not in (0, None) or is_reported):
        yield "--entropy-score support has no effect: nothing takes an entropy; set --entropy-coef, or remove it"
    has_term = options["kl_loss_coef"] or read_number(options.ours("kl_coefficient")) not in (0, None)
    if loss.kept is not None and loss.kept.reference == TermScore.FULL and options["use_kl_loss"] and not has_term and has_metrics:
        yield (
            "--entropy-score support with --use-kl-loss and --kl-loss-coef 0: the KL is then a metric over the whole vocabulary, "
            "which is read for the entropy alone; remove --use-kl-loss or --entropy-score, or set --policy-metrics none"
        )


@check(asked_by=(Asker.INIT_HOOK,), when=replays)
def sampler_scores_what_it_kept(launch: HostLaunch) -> Iterator[str]:
    """The engine's process may have another environment; this one's is often handed on."""
    if os.environ.get(RAW_SCORES, "0").lower() in ("1", "true"):
        yield (
            f"{RAW_SCORES}={os.environ[RAW_SCORES]} with {FLAG}: rollout_log_probs are then over the whole vocabulary, and the "
            f"loss's among the kept ids, so that each comparison is off by the kept mass; unset it"
        )


@check(when=replays)
def head_leaves_other_logits_out(launch: HostLaunch) -> Iterator[str]:
    if read_switch(launch.options.ours("scaled_exp_head")) is True:
        yield f"--scaled-exp-head with {FLAG}: it is for logits of the whole vocabulary; remove --scaled-exp-head"
