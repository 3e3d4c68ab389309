"""What a launch in miles or slime would train on a wrong scale, or without effect: one function each, in a tuple at the end.

A function yields what is wrong, why, and what to type, whatever the type of a value. The launcher asks CHECKS, each hook and loss
asks them again at its call, and the init hook asks CHECKS_IN_ACTORS too.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from functools import cache

from megatron_rl.arguments import read_number, read_switch
from megatron_rl.config import NO_CORRECTION, LaunchMethod, SupportUse, flag_fields
from megatron_rl.declare import POLICY_LOSSES, declared_parameters, get_policy_loss
from megatron_rl.errors import ConfigError
from megatron_rl.hosts.args import (
    ADVANTAGES,
    CUSTOM_LOSS_LINE,
    FORWARD,
    HEAD_REMEDY,
    INIT_LINE,
    OPTIONS,
    REDUCER_FLAG,
    REDUCER_LINE,
    REWARD_LINE,
    HostLaunch,
    correction_of_host,
    head_places,
    known_correction,
    names_ours,
    read_launch,
)
from megatron_rl.hosts.dense_rows import is_proportional
from megatron_rl.hosts.model_notes import group_problems, kernel_problems, release_problems
from megatron_rl.hosts.sampler_rule import Sampler, sampler_problems, typed_readers
from megatron_rl.validation import config_warnings, field_of, flag_of, methods_of_flags
from megatron_rl.validation.auxiliary_losses import number
from megatron_rl.validation.model_settings import DROPOUTS
from megatron_rl.weights import TOKEN_MEAN, get_loss_aggregation

Check = Callable[[HostLaunch], Iterator[str]]

# Estimators whose advantage is the reward, so that scaling the reward scales the advantage.
HOMOGENEOUS_ESTIMATORS = ("grpo", "gspo", "cispo")
OUR_LOSS = "megatron_rl.hooks.custom_loss"
OR_HOSTS_LOSS = "or train with the host's --loss-type policy_loss and megatron_rl.reducers.get_pg_loss_reducer"
# A name that is more similar than this to one of our fields is a misspelling: no option of a host or of Megatron is.
CLOSEST_NAME = 0.85


def check_launch(
    args: Namespace, method: LaunchMethod | None = None, found: Sequence[str] = (), *, in_actor: bool = False
) -> HostLaunch:
    """The launch, with our settings as its `config`. `method`: the caller's; None: what the launch line says.

    Raises one ConfigError with every problem: first what the caller has `found`, then what the checks find, in their order.
    """
    launch = read_launch(args, method)
    checks = (*CHECKS, *CHECKS_IN_ACTORS) if in_actor else CHECKS
    problems = [*found, *(problem for one in checks for problem in one(launch))]
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return launch


def launch_warnings(launch: HostLaunch) -> list[str]:
    """Of a launch without problems, for its start."""
    return config_warnings(launch.config) if launch.has_our_loss else []


@cache  # launcher, hooks and losses of a process judge one launch each, and a host has a thousand names
def likely_field(name: str) -> str | None:
    """Our setting that `name` misspells; None for a setting, for a host's option, and for a name that is similar to none."""
    fields = (*(field.name for field in flag_fields()), *declared_parameters())
    if name in fields or name in OPTIONS or "-" in name:  # megatron_rl.arguments reports a key with dashes
        return None
    return next(iter(get_close_matches(name, fields, n=1, cutoff=CLOSEST_NAME)), None)


def dropped_flags(args: Namespace, words: Sequence[str]) -> Iterator[str]:
    """Of our flags on the command line, misspelt ones included, those that the host's parser has dropped: slime drops what it does
    not know."""
    for flag in sorted({word.partition("=")[0] for word in words if word.startswith("--")}):
        name = field_of(flag)
        if flag in methods_of_flags() and name not in vars(args):
            why = "is on the command line and not in args: this launcher drops flags that it does not know"
            yield f"{flag} {why}; start with python -m megatron_rl.hosts.launch"
        elif flag not in methods_of_flags():
            meant = name if flag_of(name) in methods_of_flags() else likely_field(name)
            if meant is not None:
                yield f"{flag} has no effect: did you mean {flag_of(meant)}?"


def names_are_spelled_right(launch: HostLaunch) -> Iterator[str]:
    """A host merges any key of its YAML file into the arguments; a misspelt one has no effect."""
    for name, value in vars(launch.args).items():
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
    backend = launch["train_backend"]
    if backend != "megatron":
        yield f"--train-backend {backend}: it drops token counts and calls no init hook; use --train-backend megatron"


def something_of_ours_is_at_work(launch: HostLaunch) -> Iterator[str]:
    if launch.is_alone:
        why = "neither our reducer nor our loss is on the launch line, and the host's own would train"
        yield f"loss_aggregation={launch.aggregation} has no effect: {why}; add {REDUCER_LINE}"


def hook_is_at_its_own_flag(launch: HostLaunch) -> Iterator[str]:
    """Otherwise the error appears only in the rollout process, or never."""
    path = launch["custom_reward_post_process_path"]
    if str(path).replace(":", ".").startswith("megatron_rl.") and not launch.has_reward_hook:
        yield f"--custom-reward-post-process-path {path} is no hook for this place: write {REWARD_LINE}, or remove it"


def our_functions_are_called(launch: HostLaunch) -> Iterator[str]:
    """The reducer is called by the policy loss only."""
    path, loss_type = launch["custom_loss_function_path"], launch["loss_type"]
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
        why = "it declares no formula, so what the host's division by N leaves of its weight is not known"
        yield f"--loss-aggregation {name}: {why}; register it with formula='1 / (N m_i)' or the like, or add {REWARD_LINE}"
    elif missing and not launch.is_per_token:
        why = f"its weight is {record.formula}, and a host divides by N and hands the loss no count of the step"
        instead = ", or --calculate-per-token-loss" if record.formula == TOKEN_MEAN else ""
        yield f"--loss-aggregation {name} needs {', '.join(missing)}: {why}; add {REWARD_LINE}{instead}"


def rollouts_are_one_sample(launch: HostLaunch) -> Iterator[str]:
    """Where m_i is in the weight, a rollout of several samples has one share of N, and the reducer does not know which samples
    belong together; the reward hook does. constant gives a token 1 / (L N), N the host's number of rollouts, however a rollout is
    split."""
    record = launch.record
    has_tokens = record is not None and record.formula is not None and "m_i" in record.formula.powers
    if launch.own_rollout_functions and launch.has_reducer and has_tokens and not launch.has_reward_hook:
        why = "may return several samples for one rollout, and in a reducer each would weigh as a whole one"
        yield f"{launch.own_rollout_functions} {why}; add {REWARD_LINE}"


def dynamic_batches_are_counted_in_rollouts(launch: HostLaunch) -> Iterator[str]:
    """The host then divides by the samples of a step and not by its rollouts. The reward hook looks at them."""
    own, is_dynamic = launch.own_rollout_functions, launch["use_dynamic_global_batch_size"]
    if own and is_dynamic and not (launch.has_reward_hook or launch.is_per_token or launch["multi_lora"]):
        why = f"{launch.host} then divides by samples, not by rollouts, which may have several"
        yield f"--use-dynamic-global-batch-size with {own}: {why}; remove it"


def rows_are_packed_under_context_parallelism(launch: HostLaunch) -> Iterator[str]:
    cp_size = launch["context_parallel_size"]
    if launch.has_reducer and launch["qkv_format"] != "thd" and cp_size > 1:
        yield bshd_problem(launch["qkv_format"], cp_size)


def bshd_problem(qkv_format: str, cp_size: int) -> str:
    why = "a reducer is not told how long rows are padded, and would take the wrong tokens"
    return f"--qkv-format {qkv_format} with --context-parallel-size {cp_size}: {why}; use {CUSTOM_LOSS_LINE}"


def counts_are_of_the_whole_step(launch: HostLaunch) -> Iterator[str]:
    """Not of one adapter, and not of one of the replicas of independent data parallelism."""
    record, beside = launch.record, f"--loss-aggregation {launch.aggregation}"
    if launch["multi_lora"] and launch.has_reward_hook:
        yield f"multi-LoRA with {REWARD_LINE}: each adapter has its own N, and the hook does not see adapters; remove it"
    elif launch["multi_lora"] and (record is None or record.counts_other_samples):
        yield f"multi-LoRA with {beside}: no hook gets the counts of an adapter's step; choose sample_mean or constant"
    if launch["indep_dp"] and record is not None and "num_tokens" in (record.needs or ()):
        yield f"indep_dp=True with {beside}: each replica would divide by its own tokens; choose another, or remove indep_dp"


def group_sizes_agree(launch: HostLaunch) -> Iterator[str]:
    ours, theirs = launch.ours("samples_per_prompt"), launch["n_samples_per_prompt"]
    if ours is not None and theirs is not None and str(ours) != str(theirs):
        both = f"--samples-per-prompt {ours} and --n-samples-per-prompt {theirs}"
        yield f"{both} are the same thing with two values: remove --samples-per-prompt"


def tokens_stay_as_counted(launch: HostLaunch) -> Iterator[str]:
    """FB-08: a custom importance-sampling function may reject tokens, which then leave the numerator and remain in the denominator.
    The host's own leave the masks alone."""
    path, is_at_work = launch["custom_tis_function_path"], launch["use_tis"] or launch["get_mismatch_metrics"]
    counts_tokens = launch.has_reward_hook or (launch.record is not None and launch.record.counts_other_samples)
    if is_at_work and path and known_correction(launch) is None and counts_tokens:
        beside = REWARD_LINE if launch.has_reward_hook else f"--loss-aggregation {launch.aggregation}"
        why = "it may reject tokens that the denominator has counted; remove it (the built-in --use-tis keeps the masks)"
        yield f"--custom-tis-function-path {path} with {beside}: {why}"


# The function of both hosts' examples with masked importance sampling, whose settings lie in the file of --custom-config-path.
MIS_FUNCTION = "train_infer_mismatch_helper.mis.compute_mis_weights_with_cp"


def weights_stay_as_they_are_cut(launch: HostLaunch) -> Iterator[str]:
    """The host's own loss weighs tokens before our reducer sees them."""
    is_mis = launch["use_tis"] and str(launch["custom_tis_function_path"]).replace(":", ".").endswith(MIS_FUNCTION)
    if is_mis and launch["tis_batch_normalize"] and not launch.has_our_loss and not launch.is_alone:
        why = "divides the weights by their mean over a micro-batch, so a step would depend on how it is cut"
        yield f"tis_batch_normalize: true {why}; write tis_batch_normalize: false"


# The reward hook scales advantages before training; the weights must stay exact until the loss


def reward_hook_has_a_use(launch: HostLaunch) -> Iterator[str]:
    counts_segments = launch.has_reducer and launch.own_rollout_functions
    if launch.has_reward_hook and launch.ours("loss_aggregation") is None:
        yield f"{REWARD_LINE} carries weights that no --loss-aggregation asks for: add --loss-aggregation prompt_mean"
    elif launch.has_reward_hook and launch.record is get_loss_aggregation("sample_mean") and not counts_segments:
        yield f"{REWARD_LINE} has nothing to do with --loss-aggregation sample_mean: remove it"


def advantage_is_the_weighted_reward(launch: HostLaunch) -> Iterator[str]:
    """The hook weights samples through their rewards, and counts on the host's division by rollouts."""
    if not launch.has_reward_hook:
        return
    estimator, reducer = launch["advantage_estimator"], launch["custom_pg_loss_reducer_function_path"]
    loss_type, function, loss = launch["loss_type"], launch["custom_loss_function_path"], launch.ours("policy_loss")
    is_foreign_loss = loss_type == "custom_loss" and function is not None and not names_ours(function, "custom_loss")
    is_typed = launch.has_our_loss and loss in POLICY_LOSSES.names()
    given = {
        f"--advantage-estimator {estimator}": estimator not in HOMOGENEOUS_ESTIMATORS,
        f"--kl-coef {launch['kl_coef']}": launch["kl_coef"],
        "--use-opd": launch["use_opd"],
        "--normalize-advantages": launch["normalize_advantages"],
        f"--custom-advantage-function-path {launch['custom_advantage_function_path']}": launch["custom_advantage_function_path"],
    }
    why = "the advantage is then not the weighted reward, so that the weights would not reach the loss; remove one of them"
    yield from (f"{flag} with {REWARD_LINE}: {why}" for flag, is_on in given.items() if is_on)
    given = {
        f"--loss-type {loss_type}": loss_type not in ("policy_loss", "custom_loss"),
        f"{REDUCER_FLAG} {reducer}": reducer and not names_ours(reducer, "get_pg_loss_reducer"),
        f"--custom-loss-function-path {function}": is_foreign_loss,
        f"--policy-loss {loss}": is_typed and not is_proportional(get_policy_loss(loss)),
        "--calculate-per-token-loss": launch.is_per_token,
    }
    why = "the weights count on a loss that is proportional to the advantage and divided by rollouts; remove one of them"
    yield from (f"{flag} with {REWARD_LINE}: {why}" for flag, is_on in given.items() if is_on)


def steps_hold_whole_groups(launch: HostLaunch) -> Iterator[str]:
    """N / P is the same in every step only when groups are whole in it; else the rollout batch must be one step."""
    record, step, size = launch.record, launch["global_batch_size"], launch["n_samples_per_prompt"]
    if not launch.has_reward_hook or record is None or not record.needs_prompts or launch.is_one_step:
        return
    if step and size and step % size:
        both = f"--global-batch-size {step} is no multiple of --n-samples-per-prompt {size}"
        yield f"{both}: with {record.name} a step would cut a prompt group; choose a multiple of {size}"
    elif read_switch(launch.ours("allow_partial_prompt_groups")):
        why = "the prompts of a step are unknown when rewards are weighted; set --num-steps-per-rollout 1"
        yield f"--allow-partial-prompt-groups with {REWARD_LINE} and several steps per rollout batch: {why}"


def weights_are_equal_in_every_step(launch: HostLaunch) -> Iterator[str]:
    record = launch.record
    if launch.has_reward_hook and record is not None and record.is_of_one_step and not launch.is_one_step:
        given = f"--global-batch-size {launch['global_batch_size']} of {launch.samples_of_batch} samples"
        why = "the counts of a step are unknown when rewards are weighted; set --num-steps-per-rollout 1"
        yield f"{given} with {REWARD_LINE} and {record.name}: {why}"


# Our loss. args.values_of_host has what it honours of the host's flags.


def loss_options_of_the_host_are_honoured(launch: HostLaunch) -> Iterator[str]:
    for name in ("get_mismatch_metrics", "true_on_policy_mode") if launch.has_our_loss else ():
        if launch[name]:
            yield f"{flag_of(name)} is not implemented by {OUR_LOSS}, which would train as without it: remove it, {OR_HOSTS_LOSS}"


def custom_correction_is_known(launch: HostLaunch) -> Iterator[str]:
    """A function of the user's may do anything to the loss and to the masks."""
    path = launch["custom_tis_function_path"]
    if launch.has_our_loss and launch["use_tis"] and path and known_correction(launch) is None:
        known = ", ".join(launch.host.correction_functions)
        yield f"--custom-tis-function-path {path} with --use-tis: {OUR_LOSS} does not call it; known are {known}; remove it"


def correction_is_counted_once(launch: HostLaunch) -> Iterator[str]:
    """A ratio to the sampler's policy holds the correction; a second factor counts the gap twice."""
    ours = launch.ours("importance_correction")
    kind = correction_of_host(launch) if ours is None else ours
    if launch.has_our_loss and launch["use_rollout_logprobs"] and kind not in (None, NO_CORRECTION):
        flag = f"--importance-correction {kind}" if ours is not None else "--use-tis"
        why = "the ratio of the loss is to rollout_log_probs already, so the correction would be counted twice"
        yield f"{flag} with --use-rollout-logprobs: {why}; remove {flag}"


# What the sampler has drawn from, and what our loss scores


SUPPORT_FLAG = f"--sampling-support {SupportUse.REPLAY}"
# The values with which a filter keeps the whole vocabulary.
FILTERS_OFF = {"rollout_top_p": (1.0,), "rollout_top_k": (-1, 0)}
# With these a set that is returned need not be the one that its token was drawn from.
UNSETTLED = ("sglang_speculative_algorithm", "sglang_enable_custom_logit_processor")
# SGLang then reports log-probabilities of the whole vocabulary, beside the sets.
RAW_SCORES = "SGLANG_RETURN_ORIGINAL_LOGPROB"


def _replays(launch: HostLaunch) -> bool:
    return launch.has_our_loss and launch.ours("sampling_support") == SupportUse.REPLAY


def _filters(launch: HostLaunch) -> dict[str, str]:
    """Those that leave tokens out, as typed, by name."""
    given = {name: read_number(launch[name]) for name in FILTERS_OFF}
    return {name: f"{flag_of(name)} {value:g}" for name, value in given.items() if value not in FILTERS_OFF[name]}


def sampler_and_trainer_score_alike(launch: HostLaunch) -> Iterator[str]:
    """What SGLang reports is of the whole vocabulary or of the kept tokens, by its version. slime's trainer computes old
    log-probabilities among the tokens that top-p has kept, and its own loss knows them."""
    is_ours, kept, on = launch.has_our_loss, launch.host.kept, _filters(launch)
    if launch.is_alone or _replays(launch):
        return
    readers = [flag_of(name) for name in ("use_tis", "use_rollout_logprobs") if launch[name]]
    if is_ours:
        readers += ["--use-opsm"] * launch["use_opsm"] + typed_readers(launch.ours)
    add = f", or add {SUPPORT_FLAG}" if is_ours and any(name in on for name in kept.filters) else ""
    if kept.has_reference and (trainer_top_p := on.pop("rollout_top_p", None)) and is_ours:
        why = "the trainer computes old log-probabilities among the kept tokens, and our loss over the whole vocabulary"
        yield f"{trainer_top_p}: {why}, so that the ratio is off by the kept mass; set --rollout-top-p 1{add}"
    for problem in sampler_problems(Sampler(kept=[*on.values()], engine="SGLang"), readers):
        yield f"{problem}{add}"


def sets_are_handed_over(launch: HostLaunch) -> Iterator[str]:
    """The host returns what its sampler kept only where one of these filters is on."""
    filters, on = launch.host.kept.filters, _filters(launch)
    if _replays(launch) and not any(name in on for name in filters):
        given, typed = " and ".join(on.values()) or "the whole vocabulary", " or ".join(map(flag_of, filters))
        yield f"{SUPPORT_FLAG} with {given}: {launch.host} returns its sets only where {typed} is set; set it"


def tokens_are_drawn_from_their_sets(launch: HostLaunch) -> Iterator[str]:
    drafted = [flag_of(name) for name in UNSETTLED if launch[name]]
    if _replays(launch):
        yield from sampler_problems(Sampler(kept=[*_filters(launch).values()], drafted=drafted, replayed=SUPPORT_FLAG), [])


def reference_is_scored_so(launch: HostLaunch) -> Iterator[str]:
    """The host's trainer measures ref_log_probs, over what it always does; our KL of kept ids is over them."""
    if not _replays(launch) or launch.host.kept.has_reference:
        return
    on = {"use_kl_loss": launch["use_kl_loss"], "kl_coef": launch["kl_coef"], "kl_coefficient": launch.ours("kl_coefficient")}
    why = f"{launch.host} measures ref_log_probs over the whole vocabulary, and the loss scores among the kept ids"
    yield from (f"{flag_of(name)} with {SUPPORT_FLAG}: {why}; remove one of them" for name, value in on.items() if value)


# Our head, before there is a model; placed_head judges the model


def _head_flags(launch: HostLaunch) -> str:
    fields = ("fused_lm_head_loss", "fp32_lm_head")
    return " and ".join(flag_of(name) for name in fields if read_switch(launch.ours(name)) is True)


def head_is_placed(launch: HostLaunch) -> Iterator[str]:
    """A function of the user's own at the init hook's flag may call our hook; whether it did is asked at the first micro-batch."""
    if (flags := _head_flags(launch)) and launch["custom_megatron_init_path"] is None:
        yield f"{flags} has no effect without our init hook, which places our head in the model: add {INIT_LINE}"


def head_computes_what_the_loss_reads(launch: HostLaunch) -> Iterator[str]:
    flags, layers = _head_flags(launch), number(launch.ours("mtp_num_layers"))
    if flags and (layers or launch["enable_mtp_training"]):
        given = f"--mtp-num-layers {layers:g}" if layers else "--enable-mtp-training"
        yield f"{flags} with {given}: the losses of multi-token prediction would get no logits; remove {given} or {flags}"
    if flags and launch["true_on_policy_mode"]:
        yield f"{flags} with --true-on-policy-mode: the sampler's kernels compute the logits there; remove one of them"
    if "--fused" in flags and launch["fp16"]:
        why = "the gradient of hidden states comes before the loss scale is known, and float16 would round most of it to 0"
        yield f"--fused-lm-head-loss with --fp16: {why}; train in bfloat16, or remove --fused-lm-head-loss"


# --skip-old-log-probs, before there is data; skipped_log_probs leaves the forward out


SKIP_FLAG = "--skip-old-log-probs"
SKIP_REMEDY = f"no forward can be left out; remove {SKIP_FLAG}"
# What takes its numbers from the forward that measures old log-probabilities, or is called for it.
READERS = (
    "keep_old_actor",
    "kl_coef",
    "use_opd",
    "custom_advantage_function_path",
    "rollout_data_postprocess_path",
    "custom_megatron_before_log_prob_hook_path",
    "log_correct_samples",
    "use_rollout_entropy",
)
# A replay of what that forward records -> its form that replays what the sampler has recorded.
REPLAYS = {"use_routing_replay": "use_rollout_routing_replay", "use_indexer_replay": "use_rollout_indexer_replay"}
# In the forward that trains, and not in the one that measures.
NOISE = ("lora_dropout", "moe_input_jitter_eps")


def _skips(launch: HostLaunch) -> bool:
    return launch.has_our_loss and read_switch(launch.ours("skip_old_log_probs")) is True


def forward_can_be_left_out(launch: HostLaunch) -> Iterator[str]:
    """The step's own log-probabilities are those that the forward would measure, to rounding, where a rollout is one step (else the
    first rollout says it), no forward is random, and nothing reads the old ones."""
    if not _skips(launch):
        return
    # A function of the user's own at this flag may call our hook; if not, our loss sees what was measured.
    if launch["custom_megatron_init_path"] is None:
        yield f"{SKIP_FLAG} has no effect without our init hook, which leaves the forward out: add {INIT_LINE}"
    given = dict[str, str]()
    if launch["use_rollout_logprobs"]:
        given["--use-rollout-logprobs"] = "the ratio is to the sampler then, without a forward"
    steps, samples, step = launch["num_steps_per_rollout"], launch.samples_of_batch, launch["global_batch_size"]
    is_cut = None not in (samples, step) and step != samples and not launch["use_dynamic_global_batch_size"]
    if is_cut if steps is None else steps != 1:
        several = f"--global-batch-size {step} of {samples} samples" if steps is None else f"--num-steps-per-rollout {steps}"
        given[several] = "from the second step on the policy in training is not the old one"
    noises = {name: launch.ours(name) for name in DROPOUTS} | {name: launch[name] for name in NOISE}
    for name, value in noises.items():
        if number(value):
            given[f"{flag_of(name)} {number(value):g}"] = "the forward that trains is random, and the one that measures is not"
    replays = [name for name, instead in REPLAYS.items() if not launch[instead]]
    for name in (*READERS, *replays):
        if launch[name]:
            given[flag_of(name)] = "it needs the forward that is left out"
    yield from (f"{flag} with {SKIP_FLAG}: {why}; change one of them" for flag, why in given.items())


# In a training actor, where groups, kernels, the model's code and the installed Megatron-Core are there


def this_process_trains_it(launch: HostLaunch) -> Iterator[str]:
    yield from group_problems(vars(launch.args))
    yield from release_problems(vars(launch.args))
    if launch.has_our_loss and not [*settings_are_valid(launch)]:
        yield from kernel_problems(launch.config.policy_loss_backend)


def host_is_as_known(launch: HostLaunch) -> Iterator[str]:
    """Where ours are put around its functions."""
    host, flags = launch.host, _head_flags(launch)
    for one in head_places(is_fused="--fused" in flags) if flags else ():
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
    *(loss_options_of_the_host_are_honoured, custom_correction_is_known, correction_is_counted_once),
    *(sampler_and_trainer_score_alike, sets_are_handed_over, tokens_are_drawn_from_their_sets, reference_is_scored_so),
    *(head_is_placed, head_computes_what_the_loss_reads, forward_can_be_left_out),
)
CHECKS_IN_ACTORS: tuple[Check, ...] = (this_process_trains_it, host_is_as_known, sampler_scores_what_it_kept)
