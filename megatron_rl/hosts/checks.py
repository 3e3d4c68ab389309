"""What a launch in miles or slime would train on a wrong scale, or without effect: one function each, in a tuple at the end.

A function yields what is wrong, why, and what to type, whatever the type of a value. The launcher asks CHECKS, each hook and loss
asks them again at its call, and the init hook asks CHECKS_IN_ACTORS too.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence

from megatron_rl.aggregation_record import TOKEN_MEAN
from megatron_rl.arguments import read_number, read_switch
from megatron_rl.config import NO_CORRECTION, Route, SupportUse, TermScore
from megatron_rl.errors import ConfigError
from megatron_rl.hosts.args import (
    ADVANTAGES,
    CUSTOM_LOSS_LINE,
    FORWARD,
    HEAD_REMEDY,
    INIT_LINE,
    REDUCER_FLAG,
    REDUCER_LINE,
    REWARD_LINE,
    HostLaunch,
    HostOptions,
    names_ours,
    of_head,
    read_launch,
)
from megatron_rl.hosts.dense_rows import is_proportional
from megatron_rl.hosts.flags import (
    DUAL_CLIP,
    KL_ESTIMATORS,
    POLICY_LOSS_OF_ESTIMATOR,
    correction_of_host,
    has_dual_clip,
    has_weights_of_a_microbatch,
    kl_key,
    known_correction,
)
from megatron_rl.hosts.model_notes import group_problems, kernel_problems, release_problems
from megatron_rl.hosts.names import likely_field
from megatron_rl.hosts.sampler_rule import Sampler, sampler_problems, typed_readers
from megatron_rl.loss_hub import get_loss_aggregation, get_policy_loss, policy_loss_names
from megatron_rl.metrics.custom import named_metrics
from megatron_rl.metrics.policy import Reduction, Weight
from megatron_rl.registries.kl_estimators import KL_ESTIMATORS as OUR_KL_ESTIMATORS
from megatron_rl.validation import config_warnings, flag_of
from megatron_rl.validation.auxiliary_losses import number
from megatron_rl.validation.model_settings import DROPOUTS

Check = Callable[[HostLaunch], Iterator[str]]

DECLARATION = "--one-sample-per-rollout"
# Estimators whose advantage is the reward, so that scaling the reward scales the advantage.
HOMOGENEOUS_ESTIMATORS = ("grpo", "gspo", "cispo")
OUR_LOSS = "megatron_rl.hooks.custom_loss"
OR_HOSTS_LOSS = "or train with the host's --loss-type policy_loss and megatron_rl.reducers.get_pg_loss_reducer"


def check_launch(args: Namespace, route: Route | None = None, found: Sequence[str] = (), *, in_actor: bool = False) -> HostLaunch:
    """The launch, with our settings as its `config`. `route`: the caller's; None: what the launch line says.

    Raises one ConfigError with every problem: first what the caller has `found`, then what the checks find, in their order.
    """
    launch = read_launch(args, route)
    checks = (*CHECKS, *CHECKS_IN_ACTORS) if in_actor else CHECKS
    problems = [*found, *(problem for one in checks for problem in one(launch))]
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return launch


def launch_warnings(launch: HostLaunch) -> list[str]:
    """Of a launch without problems, for its start."""
    return config_warnings(launch.config) if launch.has_our_loss else []


def names_are_spelled_right(launch: HostLaunch) -> Iterator[str]:
    """A host merges any key of its YAML file into the arguments; a misspelt one has no effect."""
    for name, value in launch.options.values.items():
        field = likely_field(name)
        if field is not None and value is not None:
            yield f"{name}={value!r} has no effect: did you mean {field}? Write {field}, or remove it"


def settings_are_valid(launch: HostLaunch) -> Iterator[str]:
    """By the rules of megatron_rl.validation, with the host's values where ours are unset."""
    try:
        launch.config  # noqa: B018
    except ConfigError as error:
        yield from error.problems


# What reduces the loss, and what it is given


def backend_is_megatron(launch: HostLaunch) -> Iterator[str]:
    backend = launch.options["train_backend"]
    if backend != "megatron":
        yield f"--train-backend {backend}: it drops token counts and calls no init hook; use --train-backend megatron"


def something_of_ours_is_at_work(launch: HostLaunch) -> Iterator[str]:
    if launch.is_alone:
        is_typed = launch.options.ours("loss_aggregation") is not None
        what = f"--loss-aggregation {launch.aggregation} has no effect" if is_typed else "the host's own loss would train"
        yield f"{what}: neither our reducer nor our loss is on the launch line; add {REDUCER_LINE}"


def hook_is_at_its_own_flag(launch: HostLaunch) -> Iterator[str]:
    """Otherwise the error appears only in the rollout process, or never."""
    path = launch.options["custom_reward_post_process_path"]
    if str(path).replace(":", ".").startswith("megatron_rl.") and not launch.has_reward_hook:
        yield f"--custom-reward-post-process-path {path} is no hook for this place: write {REWARD_LINE}, or remove it"


def our_functions_are_called(launch: HostLaunch) -> Iterator[str]:
    """The reducer is called by the policy loss only."""
    path, loss_type = launch.options["custom_loss_function_path"], launch.options["loss_type"]
    is_ours = names_ours(path, "custom_loss")
    if launch.has_reducer and is_ours and loss_type == "custom_loss":
        yield f"{REDUCER_FLAG} beside {CUSTOM_LOSS_LINE}: the loss reduces by itself and never calls it; remove one of them"
    elif launch.has_reducer and loss_type not in ("policy_loss", "custom_loss"):
        yield f"--loss-type {loss_type} never calls {REDUCER_FLAG}: remove it, or train with --loss-type policy_loss"
    if path is None and loss_type == "custom_loss":
        yield f"--loss-type custom_loss has no function: add {CUSTOM_LOSS_LINE.partition(' custom_loss ')[2]}"
    elif is_ours and loss_type != "custom_loss":
        yield f"--custom-loss-function-path {path} has no effect with --loss-type {loss_type}: pass --loss-type custom_loss"


def aggregation_is_given_its_counts(launch: HostLaunch) -> Iterator[str]:
    """A host divides by N, per-token by T, and hands a loss no count of the step. The reward hook counts the step itself."""
    record, name = launch.record, launch.aggregation
    if record is None or launch.has_reward_hook:
        return
    missing = record.missing_where_a_host_divides_by("N")
    if missing is None:
        why = "it declares no formula, so what the host's division by N leaves of its weight is not known; register it with"
        yield f"--loss-aggregation {name} in a host: {why} formula='1 / (N m_i)' or the like, or add {REWARD_LINE}"
    elif record.needs_prompts:
        yield f"--loss-aggregation {name}: no host tells the loss which samples share a prompt; add {REWARD_LINE}"
    elif record.formula == TOKEN_MEAN and not launch.is_per_token:
        why = "nothing divides by the step's tokens; add --calculate-per-token-loss (no fully masked samples)"
        yield f"--loss-aggregation {name}: {why}, or {REWARD_LINE} (one step per rollout batch)"
    elif missing and not launch.is_per_token:
        why = f"its weight is {record.formula}, and a host divides by N and hands the loss no count of the step"
        yield f"--loss-aggregation {name} needs {', '.join(missing)}: {why}; add {REWARD_LINE}"


def rollouts_are_one_sample(launch: HostLaunch) -> Iterator[str]:
    """Where m_i is in the weight, a rollout of several samples has one share of N, and the reducer does not know which samples
    belong together. constant gives a token 1 / (L N), N the host's number of rollouts, however a rollout is split."""
    own, record = launch.own_rollout_functions, launch.record
    is_sample_mean = record is get_loss_aggregation("sample_mean")
    has_tokens = record is not None and record.formula is not None and "m_i" in record.formula.powers
    # The reward hook counts rollouts; with sample_mean it only looks at the samples.
    is_open = own and launch.has_reducer and has_tokens and (not launch.has_reward_hook or is_sample_mean)
    is_declared = _is_declared(launch)
    if is_declared and not is_open:
        yield f"{DECLARATION} has no effect: only our reducer with a rollout function of your own reads it; remove it"
    elif is_declared and not launch.has_reward_hook:
        yield f"{DECLARATION}: nothing on the launch line looks at the samples; add {REWARD_LINE}, which looks at each batch"
    elif is_open and not is_declared:
        for option, path in own.items():
            why = "may return several samples for one rollout, and in a reducer each would weigh as a whole one"
            remedy = f"if each rollout is one sample, add {DECLARATION} and {REWARD_LINE}"
            yield f"{flag_of(option)} {path} {why}; {remedy}; or use {CUSTOM_LOSS_LINE}, or --loss-aggregation constant"


def _is_declared(launch: HostLaunch) -> bool:
    return read_switch(launch.options.ours("one_sample_per_rollout")) is True


def dynamic_batches_are_counted_in_rollouts(launch: HostLaunch) -> Iterator[str]:
    """The host then divides by the samples of a step and not by its rollouts. The reward hook looks at them."""
    own, is_dynamic = launch.own_rollout_functions, launch.options["use_dynamic_global_batch_size"]
    if own and is_dynamic and not (launch.has_reward_hook or launch.is_per_token or launch.options["multi_lora"]):
        given = ", ".join(f"{flag_of(name)} {path}" for name, path in own.items())
        why = f"{launch.options.host} then divides by samples, not by rollouts, which may have several"
        yield f"--use-dynamic-global-batch-size with {given}: {why}; remove it"


def rows_are_packed_under_context_parallelism(launch: HostLaunch) -> Iterator[str]:
    cp_size = launch.options["context_parallel_size"]
    if launch.has_reducer and launch.options["qkv_format"] != "thd" and cp_size > 1:
        yield bshd_problem(launch.options["qkv_format"], cp_size)


def bshd_problem(qkv_format: str, cp_size: int) -> str:
    why = "a reducer is not told how long rows are padded, and would take the wrong tokens"
    return f"--qkv-format {qkv_format} with --context-parallel-size {cp_size}: {why}; use --qkv-format thd, or {CUSTOM_LOSS_LINE}"


def counts_are_of_the_whole_step(launch: HostLaunch) -> Iterator[str]:
    """Not of one adapter, and not of one of the replicas of independent data parallelism."""
    options, record, beside = launch.options, launch.record, f"--loss-aggregation {launch.aggregation}"
    if options["multi_lora"] and launch.has_reward_hook:
        yield f"multi-LoRA with {REWARD_LINE}: each adapter has its own N, and the hook does not see adapters; remove it"
    elif options["multi_lora"] and (record is None or record.counts_other_samples):
        yield f"multi-LoRA with {beside}: no hook gets the counts of an adapter's step; choose sample_mean or constant"
    if options["indep_dp"] and record is not None and "num_tokens" in (record.needs or ()):
        yield f"indep_dp=True with {beside}: each replica would divide by its own tokens; choose another, or remove indep_dp"


def group_sizes_agree(launch: HostLaunch) -> Iterator[str]:
    ours, theirs = launch.options.ours("samples_per_prompt"), launch.options["n_samples_per_prompt"]
    if ours is not None and theirs is not None and str(ours) != str(theirs):
        both = f"--samples-per-prompt {ours} and --n-samples-per-prompt {theirs}"
        yield f"{both} are the same thing with two values: remove --samples-per-prompt"


def tokens_stay_as_counted(launch: HostLaunch) -> Iterator[str]:
    """FB-08: truncated or rejected tokens leave the numerator and remain in the denominator."""
    if not launch.masks_change_later:
        return
    given, beside = f"--custom-tis-function-path {launch.options['custom_tis_function_path']}", None
    if launch.has_reward_hook:
        beside = REWARD_LINE
    elif launch.record is not None and launch.record.counts_other_samples:
        beside = f"--loss-aggregation {launch.aggregation}"
    if beside is not None:
        remedy = "remove it (the built-in --use-tis keeps the masks), or choose sample_mean or constant without the reward hook"
        yield f"{given} with {beside}: it may reject tokens that the denominator has counted; {remedy}"


def weights_stay_as_they_are_cut(launch: HostLaunch) -> Iterator[str]:
    """The host's own loss weighs tokens before our reducer sees them."""
    if has_weights_of_a_microbatch(launch.options) and not launch.has_our_loss and not launch.is_alone:
        why = "divides the weights by their mean over a micro-batch, so a step would depend on how it is cut"
        yield f"tis_batch_normalize: true {why}; write tis_batch_normalize: false"


# The reward hook scales advantages before training; the weights must stay exact until the loss


def reward_hook_has_a_use(launch: HostLaunch) -> Iterator[str]:
    if not launch.has_reward_hook or _is_declared(launch):  # a declared hook looks at the samples
        return
    if launch.options.ours("loss_aggregation") is None:
        yield f"{REWARD_LINE} carries weights that no --loss-aggregation asks for: add --loss-aggregation prompt_mean, or remove it"
    elif launch.record is get_loss_aggregation("sample_mean"):
        yield f"{REWARD_LINE} has nothing to do with --loss-aggregation sample_mean: remove it"


def advantage_is_the_weighted_reward(launch: HostLaunch) -> Iterator[str]:
    """The hook weights samples through their rewards, and counts on the host's division by rollouts."""
    if not launch.has_reward_hook:
        return
    options, given = launch.options, dict[str, str]()
    estimator, advantages = options["advantage_estimator"], options["custom_advantage_function_path"]
    reducer, function = options["custom_pg_loss_reducer_function_path"], options["custom_loss_function_path"]
    if options["loss_type"] not in ("policy_loss", "custom_loss"):
        given[f"--loss-type {options['loss_type']}"] = "it takes no advantages; remove the hook, or use policy_loss"
    if reducer and not names_ours(reducer, "get_pg_loss_reducer"):
        given[f"{REDUCER_FLAG} {reducer}"] = "the weights cancel denominators, and this one's are unknown; remove it"
    if options["loss_type"] == "custom_loss" and function is not None and not names_ours(function, "custom_loss"):
        given[f"--custom-loss-function-path {function}"] = "the weights cancel denominators that are unknown here; remove it"
    if estimator not in HOMOGENEOUS_ESTIMATORS:
        why = "its advantage is more than the reward that carries the weight; allowed are"
        given[f"--advantage-estimator {estimator}"] = f"{why} {', '.join(HOMOGENEOUS_ESTIMATORS)}"
    if options["kl_coef"]:
        remedy = "set --kl-coef 0, or use --use-kl-loss with --kl-loss-coef"
        given[f"--kl-coef {options['kl_coef']}"] = f"the penalty joins the advantage after the weight, unweighted; {remedy}"
    if options["use_opd"]:
        given["--use-opd"] = "distillation adds to the advantage after the weight, unweighted; remove one of them"
    if advantages:
        why = "whether the function keeps the weights cannot be known; remove one of them"
        given[f"--custom-advantage-function-path {advantages}"] = why
    loss = options.ours("policy_loss")
    if launch.has_our_loss and loss in policy_loss_names() and not is_proportional(get_policy_loss(loss)):
        why = "its loss is not proportional to the advantage, so a part of it would keep the weights of sample_mean"
        given[f"--policy-loss {loss}"] = f"{why}; choose another loss, or sample_mean or constant without the hook"
    if options["normalize_advantages"]:
        given["--normalize-advantages"] = "whitening undoes the weights; remove --normalize-advantages"
    if launch.is_per_token:
        why = "the weights count on a division by rollouts, and the host would divide by tokens"
        given["--calculate-per-token-loss"] = f"{why}; remove --calculate-per-token-loss"
    yield from (f"{flag} with {REWARD_LINE}: {why}" for flag, why in given.items())


def steps_hold_whole_groups(launch: HostLaunch) -> Iterator[str]:
    """N / P is the same in every step only when groups are whole in it; else the rollout batch must be one step."""
    options, record = launch.options, launch.record
    if not launch.has_reward_hook or record is None or not record.needs_prompts or options.is_one_step:
        return
    step, size = options["global_batch_size"], options["n_samples_per_prompt"]
    if step and size and step % size:
        both = f"--global-batch-size {step} is no multiple of --n-samples-per-prompt {size}"
        yield f"{both}: with {record.name} a step would cut a prompt group; choose a multiple of {size}"
    elif read_switch(options.ours("allow_partial_prompt_groups")):
        why = "the prompts of a step are unknown when rewards are weighted; set --num-steps-per-rollout 1"
        yield f"--allow-partial-prompt-groups with {REWARD_LINE} and several steps per rollout batch: {why}"


def weights_are_equal_in_every_step(launch: HostLaunch) -> Iterator[str]:
    options, record = launch.options, launch.record
    if launch.has_reward_hook and record is not None and record.is_of_one_step and not options.is_one_step:
        instead = ", or use --calculate-per-token-loss without the hook" if record.formula == TOKEN_MEAN else ""
        given = f"--global-batch-size {options['global_batch_size']} of {options.samples_of_batch} samples"
        why = "the counts of a step are unknown when rewards are weighted; set --num-steps-per-rollout 1"
        yield f"{given} with {REWARD_LINE} and {record.name}: {why}{instead}"


# Our loss. flags.HOST_FLAGS has what it honours of the host's flags.


def loss_options_of_the_host_are_honoured(launch: HostLaunch) -> Iterator[str]:
    for name in ("get_mismatch_metrics", "true_on_policy_mode") if launch.has_our_loss else ():
        if launch.options[name]:
            yield f"{flag_of(name)} is not implemented by {OUR_LOSS}, which would train as without it: remove it, {OR_HOSTS_LOSS}"


def custom_correction_is_known(launch: HostLaunch) -> Iterator[str]:
    """A function of the user's may do anything to the loss and to the masks."""
    options, path = launch.options, launch.options["custom_tis_function_path"]
    if launch.has_our_loss and options["use_tis"] and path and known_correction(options) is None:
        remedy = f"remove it and --use-tis and type --importance-correction {{tis,icepop,mask}}, {OR_HOSTS_LOSS}"
        known = ", ".join(options.correction_functions)
        yield f"--custom-tis-function-path {path} with --use-tis: {OUR_LOSS} does not call it; known are {known}; {remedy}"


def correction_is_counted_once(launch: HostLaunch) -> Iterator[str]:
    """A ratio to the sampler's policy holds the correction; a second factor counts the gap twice."""
    options = launch.options
    ours = options.ours("importance_correction")
    kind = correction_of_host(options) if ours is None else ours
    if launch.has_our_loss and options["use_rollout_logprobs"] and kind not in (None, NO_CORRECTION):
        flag = f"--importance-correction {kind}" if ours is not None else "--use-tis"
        why = "the ratio of the loss is to rollout_log_probs already, so the correction would be counted twice"
        yield f"{flag} with --use-rollout-logprobs: {why}; remove {flag}, or remove --use-rollout-logprobs"


def loss_has_a_dual_clip(launch: HostLaunch) -> Iterator[str]:
    options = launch.options
    loss = options.ours("policy_loss") or POLICY_LOSS_OF_ESTIMATOR.get(options["advantage_estimator"])
    if launch.has_our_loss and options["eps_clip_c"] is not None and loss and not has_dual_clip(loss):
        why = f"it does not declare {DUAL_CLIP}, so the flag would have no effect"
        yield f"--eps-clip-c {options['eps_clip_c']} (dual clip) with policy loss {loss}: {why}; remove it, {OR_HOSTS_LOSS}"


def kl_estimator_is_known(launch: HostLaunch) -> Iterator[str]:
    kl_type, is_unbiased = kl_key(launch.options)
    is_the_hosts = launch.options["use_kl_loss"] and launch.options.ours("kl_estimator") is None
    if not launch.has_our_loss or not is_the_hosts or (kl_type, is_unbiased) in KL_ESTIMATORS:
        return
    names = [name for name, unbiased in KL_ESTIMATORS if unbiased == is_unbiased]
    beside = " --use-unbiased-kl" if is_unbiased else ""
    why = f": the ratio times {kl_type} has not the gradient of a KL" if is_unbiased else ""
    yield f"--kl-loss-type {kl_type}{beside} with --use-kl-loss{why}; {OUR_LOSS} has {', '.join(names)}: set one of them"


def metrics_of_ones_own_are_the_hosts_means(launch: HostLaunch) -> Iterator[str]:
    """The host adds up what a micro-batch returns, and divides each metric by one count."""
    if not launch.has_our_loss:
        return
    try:
        rows = named_metrics(launch.options.ours("custom_policy_metrics"))
    except ConfigError:  # the rules of the settings say it
        return
    divided, count, remedy = (Weight.SAMPLE_SHARE, "num_samples"), "rollouts", "sample_mean(...)"
    if launch.is_per_token:
        divided, count, remedy = (Weight.TOKEN, "num_tokens"), "tokens", "weight=Weight.TOKEN, normaliser='num_tokens'"
    for row in rows:
        if row.reduction != Reduction.SUM or not row.is_reported or (row.weight, row.normaliser) != divided:
            why = f"is no mean over the step's {count}, by which the host divides each metric"
            yield f"--custom-policy-metrics: policy metric {row.name!r} {why}: declare it with {remedy}, or leave it out"


# What the sampler has drawn from, and what our loss scores


SUPPORT_FLAG = f"--sampling-support {SupportUse.REPLAY}"
OR_REFUSE = "or remove --sampling-support"
# The values with which a filter keeps the whole vocabulary.
FILTERS_OFF = {"rollout_top_p": (1.0,), "rollout_top_k": (-1, 0)}
# With these a set that is returned need not be the one that its token was drawn from.
UNSETTLED = ("sglang_speculative_algorithm", "sglang_enable_custom_logit_processor")
# SGLang then reports log-probabilities of the whole vocabulary, beside the sets.
RAW_SCORES = "SGLANG_RETURN_ORIGINAL_LOGPROB"


def _replays(launch: HostLaunch) -> bool:
    return launch.has_our_loss and launch.options.ours("sampling_support") == SupportUse.REPLAY


def _filters(options: HostOptions) -> dict[str, str]:
    """Those that leave tokens out, as typed, by name."""
    given = {name: read_number(options[name]) for name in FILTERS_OFF}
    return {name: f"{flag_of(name)} {value:g}" for name, value in given.items() if value not in FILTERS_OFF[name]}


def sampler_and_trainer_score_alike(launch: HostLaunch) -> Iterator[str]:
    """What SGLang reports is of the whole vocabulary or of the kept tokens, by its version. slime's trainer computes old
    log-probabilities among the tokens that top-p has kept, and its own loss knows them."""
    options, is_ours = launch.options, launch.has_our_loss
    if launch.is_alone or _replays(launch):
        return
    readers = [flag_of(name) for name in ("use_tis", "use_rollout_logprobs") if options[name]]
    if is_ours:
        readers += ["--use-opsm"] * options["use_opsm"] + typed_readers(options.ours)
    on = _filters(options)
    add = f", or add {SUPPORT_FLAG}" if is_ours and any(name in on for name in options.host.kept.filters) else ""
    if options.host.kept.reference == TermScore.SUPPORT and (of_trainer := on.pop("rollout_top_p", None)) and is_ours:
        why = "the trainer computes old log-probabilities among the kept tokens, and our loss over the whole vocabulary"
        yield f"{of_trainer}: {why}, so that the ratio is off by the kept mass; set --rollout-top-p 1{add}, {OR_HOSTS_LOSS}"
    for problem in sampler_problems(Sampler(kept=[*on.values()], engine="SGLang"), readers):
        yield f"{problem}{add}"


def sets_are_handed_over(launch: HostLaunch) -> Iterator[str]:
    """The host returns what its sampler kept only where one of these filters is on."""
    filters, on = launch.options.host.kept.filters, _filters(launch.options)
    for name in ("kl_score", "entropy_score") if launch.has_our_loss and not _replays(launch) else ():
        if launch.options.ours(name) == TermScore.SUPPORT:
            yield f"{flag_of(name)} support without {SUPPORT_FLAG}: there are no kept ids; add it, or remove {flag_of(name)}"
    if not _replays(launch) or any(name in on for name in filters):
        return
    typed = " or ".join(map(flag_of, filters))
    if on:
        given = " and ".join(on.values())
        yield f"{SUPPORT_FLAG} with {given}: {launch.options.host} returns its sets only where {typed} is set; set it, {OR_REFUSE}"
    else:
        yield f"{SUPPORT_FLAG} has no effect: the sampler keeps the whole vocabulary; set {typed}, {OR_REFUSE}"


def tokens_are_drawn_from_their_sets(launch: HostLaunch) -> Iterator[str]:
    options, on = launch.options, _filters(launch.options)
    values = {name: options[name] for name in UNSETTLED}
    drafted = [flag_of(name) if value is True else f"{flag_of(name)} {value}" for name, value in values.items() if value]
    if _replays(launch):
        yield from sampler_problems(Sampler(kept=[*on.values()], drafted=drafted, replayed=SUPPORT_FLAG), [])


def reference_is_scored_so(launch: HostLaunch) -> Iterator[str]:
    """The host's trainer measures ref_log_probs, over what it always does."""
    options, reference = launch.options, launch.options.host.kept.reference
    if not _replays(launch):
        return
    over = {TermScore.FULL: "over the whole vocabulary", TermScore.SUPPORT: "among the kept ids"}
    ours = options.ours("kl_coefficient")
    if options["use_kl_loss"] or (ours is not None and read_number(ours) not in (0, None)):
        score = options.ours("kl_score") or TermScore.FULL
        if score != reference and score in over:
            why = f"{options.host} measures ref_log_probs {over[reference]}"
            yield f"--kl-score {score} with {SUPPORT_FLAG}: {why}; set --kl-score {reference}"
        estimator = OUR_KL_ESTIMATORS.find_or_none(str(options.ours("kl_estimator")))
        takes_ratio = options["use_unbiased_kl"] or (estimator is not None and estimator.takes_log_ratio)
        if takes_ratio and reference == TermScore.FULL:
            given = "--use-unbiased-kl" if options["use_unbiased_kl"] else f"--kl-estimator {options.ours('kl_estimator')}"
            why = f"the importance ratio is among the kept ids, and the KL of {options.host} is over the whole vocabulary"
            yield f"{given} with {SUPPORT_FLAG}: {why}; remove {given}"
    if options["kl_coef"] and reference == TermScore.FULL:
        why = "it compares log-probabilities among the kept ids with ref_log_probs over the whole vocabulary"
        yield f"--kl-coef {options['kl_coef']:g} with {SUPPORT_FLAG}: {why}; use --use-kl-loss with --kl-loss-coef"


# Our head, before there is a model; placed_head judges the model


def _head_flags(launch: HostLaunch) -> str:
    fields = ("fused_lm_head_loss", "fp32_lm_head")
    return " and ".join(flag_of(name) for name in fields if read_switch(launch.options.ours(name)) is True)


def head_is_placed(launch: HostLaunch) -> Iterator[str]:
    """A function of the user's own at the init hook's flag may call our hook; whether it did is asked at the first micro-batch."""
    if (flags := _head_flags(launch)) and launch.options["custom_megatron_init_path"] is None:
        yield f"{flags} has no effect without our init hook, which places our head in the model: add {INIT_LINE}"


def head_computes_what_the_loss_reads(launch: HostLaunch) -> Iterator[str]:
    flags, layers = _head_flags(launch), number(launch.options.values.get("mtp_num_layers"))
    if flags and (layers or launch.options["enable_mtp_training"]):
        given = f"--mtp-num-layers {layers:g}" if layers else "--enable-mtp-training"
        yield f"{flags} with {given}: the losses of multi-token prediction would get no logits; remove {given} or {flags}"
    if flags and launch.options["true_on_policy_mode"]:
        yield f"{flags} with --true-on-policy-mode: the sampler's kernels compute the logits there; remove one of them"
    if "--fused" in flags and launch.options["fp16"]:
        why = "the gradient of hidden states comes before the loss scale is known, and float16 would round most of it to 0"
        yield f"--fused-lm-head-loss with --fp16: {why}; train in bfloat16, or remove --fused-lm-head-loss"
    if _replays(launch) and read_switch(launch.options.ours("scaled_exp_head")) is True:
        yield f"--scaled-exp-head with {SUPPORT_FLAG}: it is for logits of the whole vocabulary; remove --scaled-exp-head"


# --skip-old-log-probs, before there is data; skipped_log_probs leaves the forward out


SKIP_FLAG = "--skip-old-log-probs"
SKIP_REMEDY = f"no forward can be left out; remove {SKIP_FLAG}"
OR_FORWARD = f"or remove {SKIP_FLAG}"
# What reads old log-probabilities, or what the forward that measures them leaves -> what for.
READERS = {
    "keep_old_actor": "the old log-probabilities are those of another policy than the one in training",
    "kl_coef": "the KL in the reward is an estimate from the old log-probabilities; use --use-kl-loss with --kl-loss-coef",
    "use_opd": "distillation adds a KL of the old log-probabilities to the advantages",
    "custom_advantage_function_path": "the function may read the old log-probabilities",
    "rollout_data_postprocess_path": "the function may read the old log-probabilities",
    "custom_megatron_before_log_prob_hook_path": "the hook is called before the forward that is left out",
    "log_correct_samples": "the entropy of right answers is taken from the old log-probabilities",
    "use_rollout_entropy": "this entropy is measured by the forward that is left out",
}
# A replay of what that forward records -> its form that replays what the sampler has recorded.
REPLAYS = {"use_routing_replay": "use_rollout_routing_replay", "use_indexer_replay": "use_rollout_indexer_replay"}
# In the forward that trains, and not in the one that measures.
NOISE = ("lora_dropout", "moe_input_jitter_eps")


def _skips(launch: HostLaunch) -> bool:
    return launch.has_our_loss and read_switch(launch.options.ours("skip_old_log_probs")) is True


def forward_can_be_left_out(launch: HostLaunch) -> Iterator[str]:
    """A function of the user's own at the init hook's flag may call ours; if not, our loss sees what was measured."""
    if _skips(launch) and launch.options["custom_megatron_init_path"] is None:
        yield f"{SKIP_FLAG} has no effect without our init hook, which leaves the forward out: add {INIT_LINE}"
    if _skips(launch) and launch.options["use_rollout_logprobs"]:
        yield f"--use-rollout-logprobs with {SKIP_FLAG}: the ratio is to the sampler then, without a forward; remove one of them"


def rollout_is_one_step(launch: HostLaunch) -> Iterator[str]:
    """Where the launch says it; else the first rollout does."""
    options = launch.options
    steps, samples, step = options["num_steps_per_rollout"], options.samples_of_batch, options["global_batch_size"]
    given = None
    if steps not in (None, 1):
        given = f"--num-steps-per-rollout {steps}"
    elif steps is None and None not in (samples, step) and step != samples and not options["use_dynamic_global_batch_size"]:
        given = f"--global-batch-size {step} of a rollout batch of {samples} samples"
    if _skips(launch) and given is not None:
        why = "from the second step on the policy in training is not the old one"
        yield f"{given} with {SKIP_FLAG}: {why}; make a rollout one step (--num-steps-per-rollout 1), {OR_FORWARD}"


def both_forwards_are_the_same(launch: HostLaunch) -> Iterator[str]:
    """The step's own log-probabilities are those that the forward would measure, to rounding, only without noise."""
    given = {name: launch.options.values.get(name) for name in DROPOUTS} | {name: launch.options[name] for name in NOISE}
    for name, value in given.items() if _skips(launch) else ():
        if number(value):
            typed, why = f"{flag_of(name)} {number(value):g}", "the forward that trains is random, and the one that measures is not"
            yield f"{typed} with {SKIP_FLAG}: {why}; set {flag_of(name)} 0, {OR_FORWARD}"


def nothing_reads_old_log_probs(launch: HostLaunch) -> Iterator[str]:
    options = launch.options
    for name, why in READERS.items() if _skips(launch) else ():
        if options[name]:
            value = "" if options[name] is True else f" {options[name]}"
            yield f"{flag_of(name)}{value} with {SKIP_FLAG}: {why}; remove {flag_of(name)}, {OR_FORWARD}"
    for name, instead in REPLAYS.items() if _skips(launch) else ():
        if options[name] and not options[instead]:
            why = "it replays what the forward that is left out records"
            yield f"{flag_of(name)} with {SKIP_FLAG}: {why}; use {flag_of(instead)}, {OR_FORWARD}"


# In a training actor, where groups, kernels, the model's code and the installed Megatron-Core are there


def this_process_trains_it(launch: HostLaunch) -> Iterator[str]:
    yield from group_problems(launch.options.values)
    yield from release_problems(launch.options.values)
    if launch.has_our_loss and not [*settings_are_valid(launch)]:
        yield from kernel_problems(launch.config.policy_loss_backend)


def host_is_as_known(launch: HostLaunch) -> Iterator[str]:
    """Where ours are put around its functions."""
    host, flags = launch.options.host, _head_flags(launch)
    for one in of_head(is_fused="--fused" in flags) if flags else ():
        yield from one.problems(host.name, host.training_package, HEAD_REMEDY)
    for one in (FORWARD, ADVANTAGES) if _skips(launch) else ():
        yield from one.problems(host.name, host.training_package, SKIP_REMEDY)


def sampler_scores_what_it_kept(launch: HostLaunch) -> Iterator[str]:
    """The engine's process may have another environment; this one's is often handed on."""
    if _replays(launch) and os.environ.get(RAW_SCORES, "0").lower() in ("1", "true"):
        why = "rollout_log_probs are then over the whole vocabulary, and the loss's among the kept ids"
        yield f"{RAW_SCORES}={os.environ[RAW_SCORES]} with {SUPPORT_FLAG}: {why}; unset it"


# Names come first: such a fault causes others.
CHECKS: tuple[Check, ...] = (
    *(names_are_spelled_right, settings_are_valid, backend_is_megatron, something_of_ours_is_at_work, hook_is_at_its_own_flag),
    *(our_functions_are_called, aggregation_is_given_its_counts, rollouts_are_one_sample),
    *(dynamic_batches_are_counted_in_rollouts, rows_are_packed_under_context_parallelism, counts_are_of_the_whole_step),
    *(group_sizes_agree, tokens_stay_as_counted, weights_stay_as_they_are_cut),
    *(reward_hook_has_a_use, advantage_is_the_weighted_reward, steps_hold_whole_groups, weights_are_equal_in_every_step),
    *(loss_options_of_the_host_are_honoured, custom_correction_is_known, correction_is_counted_once, loss_has_a_dual_clip),
    *(kl_estimator_is_known, metrics_of_ones_own_are_the_hosts_means),
    *(sampler_and_trainer_score_alike, sets_are_handed_over, tokens_are_drawn_from_their_sets, reference_is_scored_so),
    *(head_is_placed, head_computes_what_the_loss_reads),
    *(forward_can_be_left_out, rollout_is_one_step, nothing_reads_old_log_probs, both_forwards_are_the_same),
)
CHECKS_IN_ACTORS: tuple[Check, ...] = (this_process_trains_it, host_is_as_known, sampler_scores_what_it_kept)
