"""What a launch in a host would train on a wrong scale, or without effect, each with its remedy. Nothing is changed."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace

from megatron_rl.aggregation_record import TOKEN_MEAN
from megatron_rl.arguments import read_switch
from megatron_rl.config import PolicyLossConfig, Route
from megatron_rl.errors import ConfigError
from megatron_rl.hosts import ROLLOUT_HOST_NAMES
from megatron_rl.hosts.base import (
    CONVERT_LINE,
    CUSTOM_LOSS_LINE,
    INIT_LINE,
    REDUCER_FLAG,
    REDUCER_LINE,
    REWARD_LINE,
    HostLaunch,
    drops_token_count,
    names_ours,
    read_launch,
)
from megatron_rl.hosts.dense_rows import is_proportional
from megatron_rl.hosts.names import paths_load
from megatron_rl.hosts.published import with_another_divisor, with_deviation
from megatron_rl.loss_hub import get_loss_aggregation, get_policy_loss, policy_loss_names
from megatron_rl.validation import config_warnings, flag_of
from megatron_rl.validation.checks import Asker, Check, Row, check, checks_in, problems_of, warnings_of
from megatron_rl.validation.experts import expert_notes
from megatron_rl.validation.model_settings import model_notes

COMPANION_OF_OPTION = {
    "custom_convert_samples_to_train_data_path": "convert_samples_to_train_data",
    "custom_reward_post_process_path": "reward_post_process",
}
OF_ALL = (
    *("megatron_rl.hosts.names", __name__, "megatron_rl.hosts.clip_checks", "megatron_rl.hosts.correction_checks"),
    *("megatron_rl.hosts.loss_checks", "megatron_rl.hosts.head_checks", "megatron_rl.hosts.skip_checks"),
    "megatron_rl.hosts.support_checks",
)
OF_ACTORS = "megatron_rl.hosts.actor_checks"
DECLARATION = "--one-sample-per-rollout"
# Estimators whose advantage is the reward, so that scaling the reward scales the advantage.
HOMOGENEOUS_ESTIMATORS = ("grpo", "gspo", "cispo")


def checks_of(launch: HostLaunch) -> tuple[Check, ...]:
    """First the checks of names, because such a fault causes others; then of all hosts, our loss, the launch's host, its actors."""
    return checks_in(*OF_ALL, type(launch.options.host).__module__, OF_ACTORS)


def check_launch(
    args: Namespace, route: Route | None = None, found: Sequence[str] = (), *, asker: Asker = Asker.DOCTOR
) -> tuple[PolicyLossConfig, HostLaunch]:
    """Our settings and the launch that they belong to. `route`: the caller's; None: what the launch line says.

    Raises one ConfigError with every problem: first what the caller has `found`, then what the checks find, in their order.
    """
    launch = read_launch(args, route)
    problems = [*found, *problems_of(checks_of(launch), launch, asker)]
    if problems:
        raise ConfigError(problems)
    return launch.config, launch


def host_warnings(launch: HostLaunch, asker: Asker = Asker.DOCTOR) -> list[str]:
    """The warnings of a launch without problems, for its start."""
    return warnings_of(checks_of(launch), launch, asker)


@check()
def settings_are_valid(launch: HostLaunch) -> Iterator[str]:
    """By the rules of megatron_rl.validation, with the host's values where ours are unset."""
    try:
        launch.config  # noqa: B018
    except ConfigError as error:
        yield from error.problems


@check()
def rollouts_are_one_sample(launch: HostLaunch) -> Iterator[str]:
    """Where m_i is in the weight, a rollout of several samples has one share of N, and the reducer does not know which samples
    belong together. constant gives a token 1 / (L N), N the host's number of rollouts, however a rollout is split."""
    own, record = launch.own_rollout_functions, launch.record
    is_sample_mean = record is get_loss_aggregation("sample_mean")
    has_tokens = record is not None and record.formula is not None and "m_i" in record.formula.powers
    # The reward hook counts rollouts; with sample_mean it only looks at the samples.
    is_open = own and launch.has_reducer and has_tokens and (launch.companion is None or is_sample_mean)
    is_declared = read_switch(launch.options.ours("one_sample_per_rollout")) is True
    if is_declared and not is_open:
        yield (
            f"{DECLARATION} has no effect here: it is for sample_mean in our reducer beside a --custom-generate-function-path or "
            f"--rollout-function-path of your own, and this is {launch.aggregation}; remove it"
        )
    elif is_declared and launch.companion != "reward":
        yield f"{DECLARATION}: nothing on the launch line looks at the samples; add {REWARD_LINE}, which looks at each batch"
    elif is_open and not is_declared:
        for option, path in own.items():
            yield (
                f"{flag_of(option)} {path} may return several samples for one rollout, and with {launch.aggregation} each would "
                f"weigh as much as a whole rollout, which a reducer cannot see; if each rollout is one sample, add {DECLARATION} "
                f"and {REWARD_LINE}; or use {CUSTOM_LOSS_LINE}, or --loss-aggregation constant, exact for any number of samples"
            )


@check()
def aggregation_is_given_its_counts(launch: HostLaunch) -> Iterator[str]:
    """A host divides by N, per-token by T, and hands a loss no count of the step. The hooks count the step themselves."""
    record, name = launch.record, launch.aggregation
    if record is None or launch.companion is not None:
        return
    missing = record.missing_where_a_host_divides_by("N")
    if missing is None:
        yield (
            f"--loss-aggregation {name} in a host: it declares no formula, so what the host's division by N leaves of its weight "
            f"is not known; register it with formula=..., as in formula='1 / (N m_i)', or add {REWARD_LINE}"
        )
    elif record.needs_prompts:
        yield f"--loss-aggregation {name}: no host tells the loss which samples share a prompt; add {REWARD_LINE}"
    elif record.formula == TOKEN_MEAN and not launch.is_per_token:
        yield (
            f"--loss-aggregation {name}: nothing divides by the step's tokens; add --calculate-per-token-loss (no fully masked "
            f"samples), or {REWARD_LINE} (one step per rollout batch)"
        )
    elif missing and not launch.is_per_token:
        yield (
            f"--loss-aggregation {name} needs {', '.join(missing)}: its weight is {record.formula}, and a host divides by N and "
            f"hands the loss no count of the step; add {REWARD_LINE}"
        )


@check()
def something_of_ours_is_at_work(launch: HostLaunch) -> Iterator[str]:
    if launch.is_alone and not list(paths_load(launch)):  # a path of megatron_rl that does not load is told by itself
        is_typed = launch.options.ours("loss_aggregation") is not None
        what = f"--loss-aggregation {launch.aggregation} has no effect" if is_typed else "the host's own loss would train"
        yield (f"{what}: neither our reducer nor our loss is on the launch line; add {REDUCER_LINE}")


@check()
def companions_are_at_their_own_flags(launch: HostLaunch) -> Iterator[str]:
    """Otherwise the error appears only in the rollout process, or never."""
    for option, function in COMPANION_OF_OPTION.items():
        path = launch.options[option]
        if str(path).replace(":", ".").startswith("megatron_rl.") and not names_ours(path, function):
            yield (f"{flag_of(option)} {path} is not a hook for this place: write megatron_rl.hooks.{function}, or remove the flag")


@check()
def one_of_ours_reduces(launch: HostLaunch) -> Iterator[str]:
    """The reducer is consulted by the policy loss alone."""
    loss_type = launch.options["loss_type"]
    if launch.has_reducer and names_ours(launch.options["custom_loss_function_path"], "custom_loss") and loss_type == "custom_loss":
        yield (
            f"{REDUCER_FLAG} beside {CUSTOM_LOSS_LINE}: the loss reduces by itself and the reducer is never called; remove one of "
            "them"
        )
    elif launch.has_reducer and loss_type not in ("policy_loss", "custom_loss"):
        yield f"--loss-type {loss_type} never calls {REDUCER_FLAG}: remove it, or train with --loss-type policy_loss"


@check()
def our_loss_is_called(launch: HostLaunch) -> Iterator[str]:
    path, loss_type = launch.options["custom_loss_function_path"], launch.options["loss_type"]
    if path is None and loss_type == "custom_loss":
        yield f"--loss-type custom_loss has no function: add {CUSTOM_LOSS_LINE.partition(' custom_loss ')[2]}"
    if names_ours(path, "custom_loss") and loss_type != "custom_loss":
        yield f"--custom-loss-function-path {path} has no effect with --loss-type {loss_type}: pass --loss-type custom_loss"


@check()
def reducer_sees_the_denominators(launch: HostLaunch) -> Iterator[str]:
    """The converter writes prompt counts where the host's own reducer looks, and counts N in prompts."""
    if launch.has_reducer and launch.companion == "convert":
        path = launch.options["custom_convert_samples_to_train_data_path"]
        yield (
            f"{REDUCER_FLAG} beside --custom-convert-samples-to-train-data-path {path}: the host's own reducer divides by the "
            f"converter's prompt counts, and a custom reducer never sees them; remove {REDUCER_FLAG}, or replace the converter "
            f"by {REWARD_LINE}"
        )


@check()
def fsdp_is_given_what_it_hands_over(launch: HostLaunch) -> Iterator[str]:
    """That backend drops the number of tokens, and the hosts hand a reducer no arguments."""
    if launch.options["train_backend"] != "fsdp":
        return
    if drops_token_count(launch.options):
        yield (
            "--train-backend fsdp with --calculate-per-token-loss: the backend drops the number of tokens and nothing divides by "
            "it; remove --calculate-per-token-loss, or use --train-backend megatron"
        )
    if launch.has_reducer:
        yield (
            f"--train-backend fsdp with {REDUCER_FLAG}: the backend sets no global arguments and calls no init hook, so our "
            f"reducer cannot read its settings; use {CUSTOM_LOSS_LINE}, or --train-backend megatron"
        )


@check()
def rows_are_packed_under_context_parallelism(launch: HostLaunch) -> Iterator[str]:
    cp_size = launch.options["context_parallel_size"]
    if launch.has_reducer and launch.options["qkv_format"] != "thd" and cp_size > 1:
        yield bshd_problem(launch.options["qkv_format"], cp_size)


@check()
def adapters_have_one_n(launch: HostLaunch) -> Iterator[str]:
    if launch.options["multi_lora"] and launch.companion is not None:
        yield (
            f"multi-LoRA with {launch.companion_line}: prompt groups of adapters do not reach the hook, and each adapter has its "
            "own N; remove it"
        )
    elif launch.options["multi_lora"] and (launch.record is None or launch.record.counts_other_samples):
        yield (
            f"multi-LoRA with --loss-aggregation {launch.aggregation}: each adapter has its own step, and no hook gets its counts; "
            "choose sample_mean or constant"
        )


@check()
def replicas_share_one_t(launch: HostLaunch) -> Iterator[str]:
    record = launch.record
    if launch.options["indep_dp"] and record is not None and "num_tokens" in (record.needs or ()):
        yield (
            f"indep_dp=True (independent data parallelism) with --loss-aggregation {launch.aggregation}: each replica would divide "
            "by its own tokens; choose another aggregation, or train without fault-tolerant replicas"
        )


@check()
def group_sizes_agree(launch: HostLaunch) -> Iterator[str]:
    ours, theirs = launch.options.ours("samples_per_prompt"), launch.options["n_samples_per_prompt"]
    if ours is not None and theirs is not None and str(ours) != str(theirs):
        yield (
            f"--samples-per-prompt {ours} and --n-samples-per-prompt {theirs} are the same thing with two values: remove "
            "--samples-per-prompt, or give both the same value"
        )


@check()
def converted_rollouts_are_divided_by_prompts(launch: HostLaunch) -> Iterator[str]:
    if launch.route == Route.CUSTOM_LOSS and launch.companion == "convert" and launch.is_per_token:
        yield (
            f"--calculate-per-token-loss with {CONVERT_LINE}: the host would divide by tokens what the converter has made a mean "
            "over prompts; remove one of them"
        )


def bshd_problem(qkv_format: str, cp_size: int) -> str:
    return (
        f"--qkv-format {qkv_format} with --context-parallel-size {cp_size}: a reducer is not told how long rows are padded, and "
        f"would take the wrong tokens; use --qkv-format thd, or {CUSTOM_LOSS_LINE}"
    )


# A companion gives samples their weights before training: the reward hook scales advantages, the converter makes each prompt one
# rollout. These checks keep the weights exact until the loss.


@check(when=HostLaunch.has_companion)
def companion_has_a_use(launch: HostLaunch) -> Iterator[str]:
    # A declared hook looks at the samples; rollouts_are_one_sample judges the declaration.
    is_declared = launch.companion == "reward" and read_switch(launch.options.ours("one_sample_per_rollout")) is True
    if launch.options.ours("loss_aggregation") is None and not is_declared:
        yield (
            f"{launch.companion_line} carries weights that no --loss-aggregation asks for, so sample_mean would be trained: add "
            "--loss-aggregation prompt_mean, or another one that needs it; or remove the hook"
        )
    elif launch.record is get_loss_aggregation("sample_mean") and not is_declared:
        yield f"{launch.companion_line} has nothing to do with --loss-aggregation sample_mean, which needs no weights: remove it"


@check(when=HostLaunch.has_converter)
def only_one_companion(launch: HostLaunch) -> Iterator[str]:
    if names_ours(launch.options["custom_reward_post_process_path"], "reward_post_process"):
        yield (
            f"{REWARD_LINE} is never called beside {CONVERT_LINE}: the converter replaces the host's step that calls it; remove "
            "one of them"
        )


@check(when=HostLaunch.has_converter)
def converter_gives_prompt_means(launch: HostLaunch) -> Iterator[str]:
    """Its rollout_mask_sums carry the aggregation; sample_mean is refused above."""
    record = launch.record
    others = [get_loss_aggregation(name) for name in ("prompt_mean", "sample_mean")]
    if record is not None and record not in others:
        hook = f" and add {REWARD_LINE}" if record.missing_where_a_host_divides_by("N") != () else ""
        yield (
            f"--loss-aggregation {launch.aggregation} with {CONVERT_LINE}: the converter gives prompt_mean alone, whatever the "
            f"loss; choose prompt_mean, or remove it{hook}"
        )


@check(when=HostLaunch.has_converter)
def host_has_a_converter(launch: HostLaunch) -> Iterator[str]:
    if launch.options.host.name not in ROLLOUT_HOST_NAMES:
        yield f"{CONVERT_LINE} is a hook of {' and '.join(ROLLOUT_HOST_NAMES)}, and these are not their arguments: remove it"


@check(when=HostLaunch.has_converter)
def prompt_counts_divide(launch: HostLaunch) -> Iterator[str]:
    options, loss_type = launch.options, launch.options["loss_type"]
    reducer, loss = options["custom_pg_loss_reducer_function_path"], options["custom_loss_function_path"]
    if reducer and not names_ours(reducer, "get_pg_loss_reducer"):
        yield (
            f"{REDUCER_FLAG} {reducer} with {CONVERT_LINE}: a reducer sees no rollout_mask_sums, so it cannot divide by the "
            "tokens of a prompt; remove it, the host's own does"
        )
    if loss_type != "policy_loss" and not (loss_type == "custom_loss" and names_ours(loss, "custom_loss")):
        yield (
            f"--loss-type {loss_type} ({loss}) with {CONVERT_LINE}: whether it divides by rollout_mask_sums is unknown; use "
            "policy_loss, or custom_loss with megatron_rl.hooks.custom_loss"
        )


@check(when=HostLaunch.has_reward_hook)
def loss_takes_advantages(launch: HostLaunch) -> Iterator[str]:
    if launch.options["loss_type"] not in ("policy_loss", "custom_loss"):
        yield (
            f"--loss-type {launch.options['loss_type']} takes no advantages: {REWARD_LINE} would do nothing; use policy_loss or "
            "custom_loss, or remove the hook"
        )


@check(when=HostLaunch.has_reward_hook)
def advantage_is_the_weighted_reward(launch: HostLaunch) -> Iterator[str]:
    """The hook weights samples through their rewards, and counts on a division by rollouts."""
    options, given = launch.options, {}
    estimator, advantages = options["advantage_estimator"], options["custom_advantage_function_path"]
    if estimator not in HOMOGENEOUS_ESTIMATORS:
        given[f"--advantage-estimator {estimator}"] = (
            "the hook weights samples through their rewards, and this estimator's advantage is more than the reward; allowed are "
            + ", ".join(HOMOGENEOUS_ESTIMATORS)
        )
    if options["kl_coef"]:
        remedy = "set --kl-coef 0, or use --use-kl-loss with --kl-loss-coef"
        given[f"--kl-coef {options['kl_coef']}"] = f"the penalty joins the advantage after the weight, unweighted; {remedy}"
    if options["use_opd"]:
        given["--use-opd"] = "distillation adds to the advantage after the weight, unweighted; remove one of them"
    if advantages:
        why = "whether the function keeps the weights cannot be known; remove one of them"
        given[f"--custom-advantage-function-path {advantages}"] = why
    loss = options.ours("policy_loss")
    if launch.route == Route.CUSTOM_LOSS and loss in policy_loss_names() and not is_proportional(get_policy_loss(loss)):
        why = "its loss is not proportional to the advantage, so a part of it would keep the weights of sample_mean"
        given[f"--policy-loss {loss}"] = f"{why}; choose another loss, or sample_mean or constant without the hook"
    if options["normalize_advantages"]:
        given["--normalize-advantages"] = "whitening undoes the weights; remove --normalize-advantages"
    if launch.is_per_token:
        why = "the weights count on a division by rollouts, and the host would divide by tokens"
        given["--calculate-per-token-loss"] = f"{why}; remove --calculate-per-token-loss"
    yield from (f"{flag} with {REWARD_LINE}: {why}" for flag, why in given.items())


@check(when=HostLaunch.has_reward_hook)
def no_foreign_reduction(launch: HostLaunch) -> Iterator[str]:
    options = launch.options
    reducer, loss = options["custom_pg_loss_reducer_function_path"], options["custom_loss_function_path"]
    if reducer and not names_ours(reducer, "get_pg_loss_reducer"):
        yield (
            f"{REDUCER_FLAG} {reducer} with {REWARD_LINE}: the weights cancel the denominators of the host's own reducer or of "
            "megatron_rl's, and this one's are unknown; remove it"
        )
    if options["loss_type"] == "custom_loss" and loss is not None and not names_ours(loss, "custom_loss"):
        yield (
            f"--custom-loss-function-path {loss} with {REWARD_LINE}: the weights cancel the denominators of the host's own loss "
            "or of megatron_rl's, and this one's are unknown; remove it"
        )


@check(when=HostLaunch.has_reward_hook)
def steps_hold_whole_groups(launch: HostLaunch) -> Iterator[str]:
    """N / P is the same in every step only when groups are whole in it; else the rollout batch must be one step."""
    options, record = launch.options, launch.record
    if record is None or not record.needs_prompts or options.is_one_step:
        return
    step, size = options["global_batch_size"], options["n_samples_per_prompt"]
    if step and size and step % size:
        yield (
            f"--global-batch-size {step} is no multiple of --n-samples-per-prompt {size}: with {record.name} a step would cut a "
            f"prompt group; choose a multiple of {size}"
        )
    elif read_switch(options.ours("allow_partial_prompt_groups")):
        yield (
            f"--allow-partial-prompt-groups with {REWARD_LINE} and several steps per rollout batch: the number of prompts of a "
            "step is then unknown when rewards are weighted; make the rollout batch one step (--num-steps-per-rollout 1)"
        )


@check(when=HostLaunch.has_reward_hook)
def weights_are_equal_in_every_step(launch: HostLaunch) -> Iterator[str]:
    options, record = launch.options, launch.record
    if record is not None and record.is_of_one_step and not options.is_one_step:
        instead = ", or use --calculate-per-token-loss without the hook" if record.formula == TOKEN_MEAN else ""
        yield (
            f"--global-batch-size {options['global_batch_size']} of a rollout batch of {options.samples_of_batch} samples with "
            f"{REWARD_LINE} and {record.name}: the counts of a step are unknown when rewards are weighted; make the rollout batch "
            f"one step (--num-steps-per-rollout 1){instead}"
        )


@check(when=HostLaunch.has_converter)
def step_is_counted_in_prompts(launch: HostLaunch) -> Iterator[str]:
    options = launch.options
    step, prompts = options["global_batch_size"], options["rollout_batch_size"]
    if options["use_dynamic_global_batch_size"]:
        yield f"--use-dynamic-global-batch-size with {CONVERT_LINE}: it counts samples where the converter's step counts prompts"
    elif step and prompts and (step > prompts or prompts % step):
        yield (
            f"--global-batch-size {step} with {CONVERT_LINE} counts prompts, and the rollout batch holds {prompts} "
            f"(--rollout-batch-size): pass the prompts of a step, a divisor of {prompts}"
        )


@check(when=HostLaunch.has_converter)
def steps_are_not_given_in_samples(launch: HostLaunch) -> Iterator[str]:
    options = launch.options
    steps, size, in_batch = options["num_steps_per_rollout"], options["global_batch_size"], options.samples_of_batch
    if steps and in_batch and options["n_samples_per_prompt"] > 1 and size == in_batch // steps:
        yield (
            f"--num-steps-per-rollout {steps} with {CONVERT_LINE}: the host has set --global-batch-size {size} from it, in "
            "samples, and the converter's step counts prompts; give --global-batch-size in prompts instead"
        )


# Warnings: launches that run, and rarely do what their user wants


@check(asked_by=(Asker.LAUNCHER,), is_warning=True, subject="init hook")
def actors_are_checked(launch: HostLaunch) -> Iterator[str]:
    """What a launch that the launcher has checked loses without the hook. The FSDP backend of miles calls no hook."""
    path = launch.options["custom_megatron_init_path"]
    if launch.options["train_backend"] == "megatron" and not names_ours(path, "custom_megatron_init"):
        flag, _, hook = INIT_LINE.partition(" ")
        what = f"{flag} {path} is not ours: call {hook} in it" if path else f"no {flag} is on the launch line: add {INIT_LINE}"
        yield (
            f"{what}. Without it no training actor is checked: no probe of the installed Megatron, no line at start, no look at "
            "the process groups"
        )


@check(is_warning=True)
def settings_do_what_they_seem_to(launch: HostLaunch) -> Iterator[str]:
    """The advice of validation, without that on clips. The host's own loss keeps KL and entropy at the scale of sample_mean;
    under the converter all terms change together."""
    config = launch.config
    if launch.route == Route.CUSTOM_LOSS:
        yield from config_warnings(replace(config, clip_ratio_low=None, clip_ratio_high=None))
    elif not launch.has_converter():
        kl, entropy = launch.kl_and_entropy
        terms = PolicyLossConfig(
            loss_aggregation=config.loss_aggregation,
            loss_aggregation_divisor=config.loss_aggregation_divisor,
            kl_coefficient=kl,
            entropy_coefficient=entropy,
        )
        yield from (f"{line} (--kl-loss-coef, --entropy-coef)" for line in config_warnings(terms))


@check(is_warning=True)
def reducer_is_called_by_delegation(launch: HostLaunch) -> Iterator[str]:
    path = launch.options["custom_loss_function_path"]
    if launch.has_reducer and launch.options["loss_type"] == "custom_loss" and path is not None:
        yield (
            f"--custom-loss-function-path {launch.options['custom_loss_function_path']}: our reducer is called only if that "
            "function delegates to the host's policy loss"
        )


@check(is_warning=True)
def each_rank_has_the_collectives_of_gspo(launch: HostLaunch) -> Iterator[str]:
    options, cp_size = launch.options, launch.options["context_parallel_size"]
    is_host_gspo = options["advantage_estimator"] == "gspo" and options["loss_type"] == "policy_loss"
    if is_host_gspo and options["allgather_cp"] and cp_size > 1:
        yield (
            f"--advantage-estimator gspo with --allgather-cp and --context-parallel-size {cp_size}: a rank without a response "
            f"token of a micro-batch skips a collective of the host's backward, and the others wait for it; use {CUSTOM_LOSS_LINE}"
        )


@check(is_warning=True)
def constant_is_without_deviation(launch: HostLaunch) -> Iterator[str]:
    options = launch.options
    is_divided = options["rewards_normalization"] and options["grpo_std_normalization"]
    if launch.aggregation == "constant" and is_divided and options["advantage_estimator"] in HOMOGENEOUS_ESTIMATORS:
        yield with_deviation("--loss-aggregation constant", options.host.without_deviation)


@check(is_warning=True)
def divisor_is_the_longest_response(launch: HostLaunch) -> Iterator[str]:
    """A function of one's own may make longer ones, of several turns."""
    record, longest = launch.record, launch.options["rollout_max_response_len"]
    is_known = isinstance(longest, int) and longest > 0 and not launch.own_rollout_functions
    if is_known and record is not None and record.takes_divisor:
        divisor = launch.config.loss_aggregation_divisor
        if divisor is not None and divisor != longest:
            typed, exact = (f"--loss-aggregation-divisor {number:g}" for number in (divisor, longest))
            limit = f"--rollout-max-response-len {longest}"
            yield with_another_divisor(divisor, longest, typed=typed, limit=limit, exact=exact)


@check(is_warning=True)
def dynamic_batches_are_counted_in_rollouts(launch: HostLaunch) -> Iterator[str]:
    own, is_dynamic = launch.own_rollout_functions, launch.options["use_dynamic_global_batch_size"]
    if own and is_dynamic and launch.companion is None and not launch.is_per_token and not launch.options["multi_lora"]:
        given = ", ".join(f"{flag_of(name)} {path}" for name, path in own.items())
        yield (
            f"--use-dynamic-global-batch-size with {given}: {launch.options.host} then divides by the samples of a step and not by "
            "its rollouts, so that every weight shrinks where a rollout has several samples"
        )


@check(is_warning=True)
def experts_keep_the_step(launch: HostLaunch) -> Iterator[Row]:
    yield from expert_notes(launch.options.of_model, launch.route)


@check(is_warning=True)
def the_model_keeps_the_step(launch: HostLaunch) -> Iterator[Row]:
    yield from model_notes(launch.options.of_model, launch.route)
