"""The rules of a launch in a host: what would train on a wrong scale there, or be ignored by our loss, each named and with its
remedy; changes nothing.

They stand beside those of megatron_rl.validation, which know no host. `check_launch` reports both in one error.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import cache

from megatron_rl.aggregation_record import TOKEN_MEAN
from megatron_rl.arguments import read_switch
from megatron_rl.config import PolicyLossConfig, Route
from megatron_rl.errors import ConfigError
from megatron_rl.hosts.companion_rules import companion_problems
from megatron_rl.hosts.facts import HostArgs, host_config, names_ours
from megatron_rl.hosts.launch_facts import (
    CONVERT_LINE,
    CUSTOM_LOSS_LINE,
    REDUCER_FLAG,
    REDUCER_LINE,
    REWARD_LINE,
    HostLaunch,
    read_launch,
)
from megatron_rl.hosts.slips import likely_field, meant_flag, why_nobody_reads
from megatron_rl.loss_hub import get_loss_aggregation
from megatron_rl.validation import field_of, flag_of

__all__ = ["HOST_RULES", "check_launch", "companion_problems", "dropped_flags", "host_problems"]

Rule = Callable[[HostLaunch], Iterator[str]]
HOST_RULES: list[Rule] = []
COMPANION_OF_OPTION = {
    "custom_convert_samples_to_train_data_path": "convert_samples_to_train_data",
    "custom_reward_post_process_path": "reward_post_process",
}

DECLARATION = "--one-sample-per-rollout"
# low_var_kl is k3; the hosts also clamp its value to 10, where its gradient then vanishes, and that clamp is left out.
KL_TYPES = ("k3", "low_var_kl")
# What both hosts take for --kl-loss-type when it is unset.
DEFAULT_KL_TYPE = "k1"
# What both hosts, and the engine behind them, take for --rollout-top-k of the whole vocabulary.
WHOLE_VOCABULARY = (-1, 0)
OF_THE_SUPPORT = "log-probabilities of the tokens alone that were sampled from"


def rule(function: Rule) -> Rule:
    """Decorator: adds a rule. The launch may hold a value of any type in any setting of ours."""
    HOST_RULES.append(function)
    return function


def check_launch(args: Namespace, route: Route | None = None, found: Sequence[str] = ()) -> tuple[PolicyLossConfig, HostLaunch]:
    """Our settings and the launch they stand in. `route`: who asks; None (the init hook): what the launch line says.

    Raises one ConfigError with the problems that the caller has found already and those of names, of settings, of the launch and
    of its companion, in this order: a path that does not load or a misspelt name is the cause of what the others say.
    """
    launch = read_launch(args, route)
    config, problems = None, [*found, *names_are_spelled_right(launch)]
    try:
        config = host_config(args, launch.route)
    except ConfigError as error:
        problems += error.problems
    problems += [problem for problem in host_problems(launch) if problem not in problems]
    if problems:
        raise ConfigError(problems)
    return config, launch


def host_problems(launch: HostLaunch) -> list[str]:
    return [*(problem for judge in HOST_RULES for problem in judge(launch)), *companion_problems(launch.view)]


def dropped_flags(args: Namespace, argv: list[str], flags) -> list[str]:
    """Flags of ours, and slips of them, on the command line that the host's parser did not take over: slime drops what it does not
    know."""
    typed = {word.partition("=")[0] for word in argv}
    slips = [f"{word} is read by nobody: {why_nobody_reads(word)}" for word in sorted(typed) if meant_flag(word) is not None]
    dropped = [
        f"{flag} stands on the command line and not in args: this launcher drops flags that it does not know; put "
        f"{field_of(flag)} into the file of --custom-config-path, or start with python -m megatron_rl.hosts.launch"
        for flag in flags
        if flag in typed and not HostArgs(args).has(field_of(flag))
    ]
    return [*dropped, *slips]


@rule
def rollouts_are_one_sample(launch: HostLaunch) -> Iterator[str]:
    """Where m_i is in the weight, a rollout of several samples has one share of N, and the reducer is not told which samples belong
    together. constant gives a token 1 / (L N), N the host's number of rollouts, however a rollout is split."""
    own, record = launch.own_rollout_functions, launch.record
    is_sample_mean = record is not None and record is get_loss_aggregation("sample_mean")
    has_tokens = record is not None and record.formula is not None and "m_i" in record.formula.powers
    # The reward hook counts rollouts; beside sample_mean it has no use but to look at the samples.
    is_open = own and launch.has_reducer and has_tokens and (launch.companion is None or is_sample_mean)
    is_declared = read_switch(launch.view.ours("one_sample_per_rollout")) is True
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


@rule
def names_are_spelled_right(launch: HostLaunch) -> Iterator[str]:
    """A host merges any key of its YAML file into the arguments, where a misspelled one of ours is read by nobody."""
    for name in launch.view.names():
        field = likely_field(name)
        if field is not None and launch.view.ours(name) is not None:
            yield f"{name}={launch.view.ours(name)!r} is read by nobody: did you mean {field}? Write {field}, or remove it"


@rule
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
            f"--loss-aggregation {name}: nobody divides by the step's tokens; add --calculate-per-token-loss (no fully masked "
            f"samples), or {REWARD_LINE} (one step per rollout batch)"
        )
    elif missing and not launch.is_per_token:
        yield (
            f"--loss-aggregation {name} needs {', '.join(missing)}: its weight is {record.formula}, and a host divides by N and "
            f"hands the loss no count of the step; add {REWARD_LINE}"
        )


@rule
def something_of_ours_is_at_work(launch: HostLaunch) -> Iterator[str]:
    if launch.is_alone:
        yield (
            f"--loss-aggregation {launch.aggregation} is read by nobody: neither our reducer nor our loss is on the launch line; "
            f"add {REDUCER_LINE}"
        )


@rule
def companions_stand_at_their_own_flags(launch: HostLaunch) -> Iterator[str]:
    """Else the rollout process finds out, or nobody does."""
    for option, function in COMPANION_OF_OPTION.items():
        path = launch.view[option]
        if str(path).replace(":", ".").startswith("megatron_rl.") and not names_ours(path, function):
            yield (
                f"--{option.replace('_', '-')} {path} is not a hook for this place: write megatron_rl.hooks.{function}, or remove "
                "the flag"
            )


@rule
def one_of_ours_reduces(launch: HostLaunch) -> Iterator[str]:
    """The reducer is consulted by the policy loss alone."""
    loss_type = launch.view["loss_type"]
    if launch.has_reducer and names_ours(launch.view["custom_loss_function_path"], "custom_loss") and loss_type == "custom_loss":
        yield (
            f"{REDUCER_FLAG} beside {CUSTOM_LOSS_LINE}: the loss reduces by itself and the reducer is never called; remove one of "
            "them"
        )
    elif launch.has_reducer and loss_type not in ("policy_loss", "custom_loss"):
        yield f"--loss-type {loss_type} never calls {REDUCER_FLAG}: remove it, or train with --loss-type policy_loss"


@rule
def our_loss_is_called(launch: HostLaunch) -> Iterator[str]:
    path, loss_type = launch.view["custom_loss_function_path"], launch.view["loss_type"]
    if names_ours(path, "custom_loss") and loss_type != "custom_loss":
        yield f"--custom-loss-function-path {path} is dead with --loss-type {loss_type}: pass --loss-type custom_loss"


@rule
def reducer_sees_the_denominators(launch: HostLaunch) -> Iterator[str]:
    """The converter writes prompt counts where the host's own reducer looks, and counts N in prompts."""
    if launch.has_reducer and launch.companion == "convert":
        path = launch.view["custom_convert_samples_to_train_data_path"]
        yield (
            f"{REDUCER_FLAG} beside --custom-convert-samples-to-train-data-path {path}: the host's own reducer divides by the "
            f"converter's prompt counts, and a custom reducer never sees them; remove {REDUCER_FLAG}, or replace the converter "
            f"by {REWARD_LINE}"
        )


@rule
def tokens_stay_as_counted(launch: HostLaunch) -> Iterator[str]:
    """FB-08: truncated or rejected tokens leave the numerator and stay in the denominator."""
    is_counted = launch.record is not None and launch.record.counts_other_samples
    if is_counted and launch.masks_change_later and launch.companion is None:
        yield (
            f"--custom-tis-function-path {launch.view['custom_tis_function_path']} with --loss-aggregation {launch.aggregation}: "
            "it may reject tokens that the denominator has counted; the built-in --use-tis keeps the masks, and sample_mean and "
            "constant go with rejection"
        )


@rule
def fsdp_divides_by_rollouts(launch: HostLaunch) -> Iterator[str]:
    if launch.view["train_backend"] == "fsdp" and launch.is_per_token:
        yield (
            "--train-backend fsdp with --calculate-per-token-loss: the backend drops the number of tokens and nothing divides by "
            "it; remove --calculate-per-token-loss, or use --train-backend megatron"
        )


@rule
def reducer_has_its_settings(launch: HostLaunch) -> Iterator[str]:
    """The hosts hand a reducer no arguments."""
    if launch.view["train_backend"] == "fsdp" and launch.has_reducer:
        yield (
            f"--train-backend fsdp with {REDUCER_FLAG}: the backend sets no global arguments and calls no init hook, so our "
            f"reducer cannot read its settings; use {CUSTOM_LOSS_LINE}, or --train-backend megatron"
        )


@rule
def rows_are_packed_under_context_parallelism(launch: HostLaunch) -> Iterator[str]:
    cp_size = launch.view["context_parallel_size"]
    if launch.has_reducer and launch.view["qkv_format"] != "thd" and cp_size > 1:
        yield bshd_problem(launch.view["qkv_format"], cp_size)


@rule
def adapters_have_one_n(launch: HostLaunch) -> Iterator[str]:
    is_counted = launch.record is None or launch.record.counts_other_samples
    if launch.view["multi_lora"] and is_counted and launch.companion is None:
        yield (
            f"multi-LoRA with --loss-aggregation {launch.aggregation}: each adapter has a step of its own, whose counts reach no "
            "hook; choose sample_mean or constant"
        )


@rule
def replicas_share_one_t(launch: HostLaunch) -> Iterator[str]:
    record = launch.record
    if launch.view["indep_dp"] and record is not None and "num_tokens" in (record.needs or ()):
        yield (
            f"indep_dp=True (independent data parallelism) with --loss-aggregation {launch.aggregation}: each replica would divide "
            "by its own tokens; choose another aggregation, or train without fault-tolerant replicas"
        )


@rule
def group_sizes_agree(launch: HostLaunch) -> Iterator[str]:
    ours, theirs = launch.view.ours("samples_per_prompt"), launch.view["n_samples_per_prompt"]
    if ours is not None and theirs is not None and str(ours) != str(theirs):
        yield (
            f"--samples-per-prompt {ours} and --n-samples-per-prompt {theirs} are the same thing with two values: remove "
            "--samples-per-prompt, or set both alike"
        )


@rule
def loss_options_of_the_host_are_honoured(launch: HostLaunch) -> Iterator[str]:
    if launch.route != Route.CUSTOM_LOSS:
        return
    view = launch.view
    options = {
        f"--eps-clip-c {view['eps_clip_c']} (dual clip)": view["eps_clip_c"] is not None,
        "--use-opsm (off-policy sequence masking)": view["use_opsm"],
        "--get-mismatch-metrics": view["get_mismatch_metrics"],
        f"--custom-tis-function-path {view['custom_tis_function_path']}": view["use_tis"] and view["custom_tis_function_path"],
        "--use-unbiased-kl": view["use_kl_loss"] and view["use_unbiased_kl"],
        "--true-on-policy-mode": view["true_on_policy_mode"],
        f"--rollout-top-p {view['rollout_top_p']} ({OF_THE_SUPPORT})": view["rollout_top_p"] != 1.0,
        f"--rollout-top-k {view['rollout_top_k']} ({OF_THE_SUPPORT})": view["rollout_top_k"] not in WHOLE_VOCABULARY,
    }
    for option, is_set in options.items():
        if is_set:
            yield (
                f"{option} is not implemented by megatron_rl.hooks.custom_loss, which would train as if it were not there: remove "
                "it, or train with the host's --loss-type policy_loss and megatron_rl.reducers.get_pg_loss_reducer"
            )


@rule
def kl_estimator_is_known(launch: HostLaunch) -> Iterator[str]:
    kl_type = launch.view["kl_loss_type"] or DEFAULT_KL_TYPE
    if launch.route == Route.CUSTOM_LOSS and launch.view["use_kl_loss"] and kl_type not in KL_TYPES:
        yield (
            f"--kl-loss-type {kl_type} with --use-kl-loss: megatron_rl.hooks.custom_loss has {' and '.join(KL_TYPES)}, two names "
            "of one estimator; set one of them"
        )


@rule
def converted_rollouts_are_divided_by_prompts(launch: HostLaunch) -> Iterator[str]:
    if launch.route == Route.CUSTOM_LOSS and launch.companion == "convert" and launch.is_per_token:
        yield (
            f"--calculate-per-token-loss with {CONVERT_LINE}: the host would divide by tokens what the converter has made a mean "
            "over prompts; remove one of them"
        )


@cache  # a reducer's call judges a thousand names
def bshd_problem(qkv_format: str, cp_size: int) -> str:
    return (
        f"--qkv-format {qkv_format} with --context-parallel-size {cp_size}: a reducer is not told how long rows are padded, and "
        f"would take the wrong tokens; use --qkv-format thd, or {CUSTOM_LOSS_LINE}"
    )
