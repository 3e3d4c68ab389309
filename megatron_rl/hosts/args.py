"""What a launch in miles or slime asks for: names of their options, what is different in each, and a launch as our checks see it.

Both spell the options that are read here alike. What a host does with what a loss returns, D data-parallel x context-parallel ranks
and M micro-batches:

    not per token   the host: x M D / N, Megatron: / (M D)   ->  (1/N) sum of the results over ranks and micro-batches
    per token       the host: x cp, Megatron: / (cp T)       ->  (1/T) sum of the results over ranks and micro-batches
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from typing import Any

from torch import Tensor

from megatron_rl.arguments import validate_megatron_rl_args
from megatron_rl.config import LaunchMethod, PolicyLossConfig
from megatron_rl.count import StepTotals
from megatron_rl.errors import ConfigError
from megatron_rl.hosts import ROLLOUT_HOST_NAMES
from megatron_rl.hosts.contract import Replaced
from megatron_rl.hosts.flags import clip_of_loss, validated, with_host_values
from megatron_rl.hosts.kept_ids import KeptIds
from megatron_rl.layout.groups import Group
from megatron_rl.validation import HOST_SWITCHES, field_of, flag_of
from megatron_rl.weights import AggregationRecord, get_loss_aggregation

INIT_LINE = "--custom-megatron-init-path megatron_rl.hooks.custom_megatron_init"
GUARD_LINE = "--custom-megatron-before-train-step-hook-path megatron_rl.hooks.before_train_step"
REDUCER_FLAG = "--custom-pg-loss-reducer-function-path"
REDUCER_LINE = f"{REDUCER_FLAG} megatron_rl.reducers.get_pg_loss_reducer"
REWARD_LINE = "--custom-reward-post-process-path megatron_rl.hooks.reward_post_process"
CUSTOM_LOSS_LINE = "--loss-type custom_loss --custom-loss-function-path megatron_rl.hooks.custom_loss"

# The step's totals for our losses: 1 where the host divides by the total afterwards (rollouts, or tokens per token), None where the
# loss cannot know it (prompts).
TOTALS_OF_HOST = StepTotals(num_samples=1, num_prompts=None, num_tokens=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """miles or slime: what is different in each. Their own policy loss counts as far as our loss reports the same metrics."""

    name: str
    training_package: str
    """Its modules model and actor, of a training actor, hold the functions that ours are put around."""
    parser_module: str
    """Where its scripts take parse_args from."""
    rollout_functions: tuple[str, ...]
    """The host's own values of --rollout-function-path: each function makes one sample of a rollout."""
    correction_functions: Mapping[str, str]
    """The host's own values of --custom-tis-function-path -> our correction with the same weights. They leave the masks alone."""
    kept: KeptIds
    """How it hands a loss the ids that its sampler kept."""
    marks: tuple[str, ...] = ()
    """Options that no other host has."""
    always_has_entropy: bool = False
    """Entropy is computed and reported without a coefficient."""
    has_ess_ratio: bool = False
    """The effective sample size of the importance ratios is reported."""
    has_rollout_kl: bool = False
    """The KL between trained and sampled log-probabilities is reported, beside their absolute difference."""
    compares_trained_with_rollout: bool = True
    """Under --use-rollout-logprobs that difference is taken of the log-probabilities in training, else of the old ones."""
    needs_log_probs: bool = False
    """Old log-probabilities are in each batch, unless the settings say that they are not needed."""
    measured: Callable[[dict[str, list[Tensor]], Tensor], Any] = field(default=lambda found, logits: found)
    """What its get_log_probs_and_entropy returns for these lists and logits."""
    rollout_key: Callable[[int, int | None], Any]
    """(position, index) of a sample without a rollout_id -> its rollout, as the host counts. DataError where it would count
    several as one."""
    reason_for_split_by_samples: Callable[[HostLaunch, bool], str | None] = field(default=lambda launch, is_multimodal: None)
    """Why steps are cut without looking at rollouts; None: they are cut by rollout."""

    def __str__(self) -> str:
        return self.name


# The functions of both that we put one of ours around.
BUILDER = Replaced("model", "setup_model_and_optimizer", ("args", "role", "..."), "initialize_model_and_optimizer")
MEASURE = Replaced(
    "actor",
    "get_log_probs_and_entropy",
    ("logits", "args", "unconcat_tokens", "total_lengths", "response_lengths", "with_entropy", "..."),
    "MegatronTrainRayActor.compute_log_prob",
)
FORWARD = Replaced(
    "actor",
    "MegatronTrainRayActor.compute_log_prob",
    ("self", "data_iterator", "num_microbatches", "..."),
    "MegatronTrainRayActor.train_actor",
    reads=("store_prefix",),
)
ADVANTAGES = Replaced("actor", "compute_advantages_and_returns", ("args", "rollout_data"), "MegatronTrainRayActor.train_actor")
HEAD_REMEDY = "our head cannot be placed; remove --fused-lm-head-loss and --fp32-lm-head"


def head_places(*, is_fused: bool) -> tuple[Replaced, ...]:
    return (BUILDER, MEASURE) if is_fused else (BUILDER,)


def host_named(name: str) -> Host:
    found: Host = import_module(f"megatron_rl.hosts.{name}").HOST
    return found


def rollout_hosts() -> tuple[Host, ...]:
    return tuple(map(host_named, ROLLOUT_HOST_NAMES))


# An option of the hosts -> its value where it is absent. Any other name is a programming error. Where a host lacks an option, the
# value says what that host always does.
OPTIONS: dict[str, object] = {
    **HOST_SWITCHES,
    "advantage_estimator": None,
    "context_parallel_size": 1,
    "custom_advantage_function_path": None,
    "custom_generate_function_path": None,
    "custom_loss_function_path": None,
    "custom_megatron_before_log_prob_hook_path": None,
    "custom_megatron_init_path": None,
    "custom_pg_loss_reducer_function_path": None,
    "custom_reward_post_process_path": None,
    "custom_tis_function_path": None,
    "entropy_coef": 0.0,
    "eps_clip": None,
    "eps_clip_c": None,
    "eps_clip_high": None,
    "global_batch_size": None,
    "kl_coef": 0.0,
    "kl_loss_coef": 0.0,
    "kl_loss_type": None,
    "loss_type": "policy_loss",
    "lora_dropout": 0.0,
    "moe_input_jitter_eps": 0.0,
    "n_samples_per_prompt": None,
    "num_steps_per_rollout": None,
    "opsm_delta": 1e-4,
    "qkv_format": "thd",  # slime knows no other
    "rollout_batch_size": None,
    "rollout_data_postprocess_path": None,
    "rollout_function_path": None,
    "rollout_temperature": 1.0,
    "rollout_top_k": -1,
    "rollout_top_p": 1.0,
    "sglang_speculative_algorithm": None,  # of SGLang, which both hosts add to their parser
    "tensor_model_parallel_size": 1,
    "tis_clip": 2.0,
    "tis_clip_low": 0.0,
    "train_backend": "megatron",
}


def names_ours(path: object, function: str) -> bool:
    """Whether a host's path leads to our function of that name, in the dotted form or the colon form."""
    parts = path.replace(":", ".").split(".") if isinstance(path, str) else [""]
    return parts[0] == "megatron_rl" and parts[-1] == function


@dataclass(frozen=True)
class HostLaunch:
    """A launch, as checks, hooks and losses see it. method: our function that reduces the loss. Where the host's own reducer does
    it, on samples that the reward hook has weighted, the settings of the reducer launch method hold."""

    args: Namespace
    """All arguments, known to us or not; nobody writes into them."""
    method: LaunchMethod = LaunchMethod.REDUCER
    has_reducer: bool = False
    """Our reducer is on the launch line, or is the caller."""

    def __getitem__(self, name: str) -> Any:
        """The option's value; OPTIONS' where the host has no such option. A switch has the truth value that the host sees.
        KeyError for a name outside OPTIONS."""
        absent = OPTIONS[name]
        value = vars(self.args).get(name, absent)
        if name in HOST_SWITCHES:
            return bool(value)
        return absent if value is None else value

    def ours(self, field: str) -> Any:
        """One of our settings, or of Megatron's, as the launch gave it, not checked; None where it is unset or was dropped."""
        return vars(self.args).get(field)

    @cached_property
    def config(self) -> PolicyLossConfig:
        """Our settings. Raises one ConfigError with every problem of theirs."""
        return host_config(self)

    @cached_property
    def host(self) -> Host:
        """By the options that only one of them has. A launch without any, as one that is not from a host's parser, is slime's."""
        hosts = rollout_hosts()
        return next((host for host in hosts if any(mark in vars(self.args) for mark in host.marks)), hosts[-1])

    @property
    def is_padded(self) -> bool:
        """The rows of a micro-batch have one length."""
        return bool(self["qkv_format"] == "bshd")

    def is_contiguous(self, cp_group: Group) -> bool:
        """A context-parallel rank has one part of the samples end to end, not two chunks of each."""
        return self["allgather_cp"] and cp_group.size() > 1

    @property
    def samples_of_batch(self) -> int | None:
        """Samples of a rollout batch; None where the arguments do not say."""
        prompts, size = self["rollout_batch_size"], self["n_samples_per_prompt"]
        return prompts * size if prompts and size else None

    @property
    def is_one_step(self) -> bool:
        """One optimiser step takes the whole rollout batch. False where the arguments do not say."""
        if self["num_steps_per_rollout"] is not None:
            return bool(self["num_steps_per_rollout"] == 1)
        is_whole = self.samples_of_batch is not None and self["global_batch_size"] == self.samples_of_batch
        return is_whole or self["use_dynamic_global_batch_size"]

    @property
    def has_our_loss(self) -> bool:
        return self.method == LaunchMethod.CUSTOM_LOSS

    @cached_property
    def has_reward_hook(self) -> bool:
        """Our hook gives samples their weights before training, through their rewards."""
        return names_ours(self["custom_reward_post_process_path"], "reward_post_process")

    @property
    def is_alone(self) -> bool:
        """Nothing of megatron_rl reduces the loss or weights the samples."""
        return not (self.has_our_loss or self.has_reducer or self.has_reward_hook)

    @cached_property
    def is_per_token(self) -> bool:
        return bool(self["calculate_per_token_loss"])

    @property
    def aggregation(self) -> Any:  # not checked
        given = self.ours("loss_aggregation")
        return PolicyLossConfig().loss_aggregation if given is None else given

    @property
    def record(self) -> AggregationRecord | None:
        """The record of the aggregation; None for a wrong name, which validation reports."""
        try:
            return get_loss_aggregation(self.aggregation)
        except ConfigError:
            return None

    @property
    def own_rollout_functions(self) -> str:
        """The user's own functions, as typed: each may return several samples for one rollout."""
        paths = {name: self[name] for name in ("custom_generate_function_path", "rollout_function_path")}
        host_paths = {path for host in rollout_hosts() for path in host.rollout_functions}
        return ", ".join(f"{flag_of(name)} {path}" for name, path in paths.items() if path and path not in host_paths)


def read_launch(args: Namespace, method: LaunchMethod | None = None) -> HostLaunch:
    """`method`: the caller, where the reducer or custom_loss calls; None: the launch line says it."""
    if method is not None:
        return HostLaunch(args, method, has_reducer=method == LaunchMethod.REDUCER)
    launch = HostLaunch(args)
    is_ours = launch["loss_type"] == "custom_loss" and names_ours(launch["custom_loss_function_path"], "custom_loss")
    has_reducer = names_ours(launch["custom_pg_loss_reducer_function_path"], "get_pg_loss_reducer")
    return HostLaunch(args, LaunchMethod.CUSTOM_LOSS if is_ours else LaunchMethod.REDUCER, has_reducer)


# Our settings from the host's flags

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
# What the host's parser gives by itself: a user who has typed our flag may not have typed this value of the host's.
UNTYPED = {
    "kl_estimator": DEFAULT_KL_TYPE,
    "importance_correction_low": 0.0,
    "importance_correction_high": 2.0,
    "off_policy_sequence_delta": 1e-4,
}


def known_correction(launch: HostLaunch) -> str | None:
    """The correction of --custom-tis-function-path, where it names a function of the host's own."""
    return launch.host.correction_functions.get(str(launch["custom_tis_function_path"]).replace(":", "."))


def correction_of_host(launch: HostLaunch) -> str | None:
    """The correction that --use-tis asks for; None without it, and for a function that is not the host's own."""
    if not launch["use_tis"]:
        return None
    return known_correction(launch) if launch["custom_tis_function_path"] else "tis"


def kl_estimator_of_host(launch: HostLaunch) -> str:
    """Ours of that name; what it is called where we have none. The ratio times k2 has not the gradient of a KL."""
    kl_type = launch["kl_loss_type"] or DEFAULT_KL_TYPE
    name = "k3" if kl_type == "low_var_kl" else kl_type
    if not launch["use_unbiased_kl"]:
        return name
    return "unbiased" if name in ("k1", "k3") else f"{kl_type} with --use-unbiased-kl"


def values_of_host(launch: HostLaunch) -> dict[str, tuple[str, Any]]:
    """Our setting, or a parameter that losses declare -> the host's option for the same thing, and its value; None: the host asks
    for nothing, and our flag counts."""
    clip, upper, correction = launch["eps_clip"], launch["eps_clip_high"], correction_of_host(launch)
    kl = launch["kl_loss_coef"] if launch["use_kl_loss"] else 0.0  # a coefficient counts only with --use-kl-loss
    return {
        "clip_ratio_low": ("eps_clip", clip),
        "clip_ratio_high": ("eps_clip_high", clip if upper is None else upper),
        "clip_ratio_c": ("eps_clip_c", launch["eps_clip_c"]),
        "policy_temperature": ("rollout_temperature", launch["rollout_temperature"]),
        "entropy_coefficient": ("entropy_coef", launch["entropy_coef"]),
        "kl_coefficient": ("kl_loss_coef", kl),
        "kl_estimator": ("kl_loss_type", kl_estimator_of_host(launch) if kl else None),
        "importance_correction": ("use_tis", correction),
        "importance_correction_low": ("tis_clip_low", launch["tis_clip_low"] if correction else None),
        "importance_correction_high": ("tis_clip", launch["tis_clip"] if correction else None),
        "off_policy_sequence_delta": ("opsm_delta", launch["opsm_delta"] if launch["use_opsm"] else None),
    }


def host_config(launch: HostLaunch) -> PolicyLossConfig:
    """Our settings on a host's launch method. On custom_loss the host's flag gives the value where ours is unset.

    Raises one ConfigError with every problem: what validate_megatron_rl_args finds, and each pair of flags with two values for the
    same thing.
    """
    if not launch.has_our_loss:
        return validate_megatron_rl_args(launch.args, launch.method)
    given, problems, estimator = vars(launch.args), list[str](), launch["advantage_estimator"]
    policy_loss = given.get("policy_loss")
    if policy_loss is None:
        policy_loss = POLICY_LOSS_OF_ESTIMATOR.get(estimator)
        if policy_loss is None:
            known = ", ".join(POLICY_LOSS_OF_ESTIMATOR)
            problems.append(f"--advantage-estimator {estimator} names no policy loss, as {known} do: give --policy-loss")
    theirs: dict[str, tuple[str, Any, bool]] = {}
    for name, (option, host_bounds) in values_of_host(launch).items():
        value = _without_bound(name, host_bounds, policy_loss)
        theirs[name] = (flag_of(option), value, option in given and value != UNTYPED.get(name))
    merged, conflicts = with_host_values(given | {"policy_loss": policy_loss}, theirs)
    try:
        return validated(merged, launch.method, [*problems, *conflicts])
    except ConfigError as error:
        typed = {name: flag for name, (flag, _, is_typed) in theirs.items() if is_typed and given.get(name) is None}
        raise ConfigError([_with_the_hosts_flag(problem, typed) for problem in error.problems]) from error


def _with_the_hosts_flag(problem: str, typed: Mapping[str, str]) -> str:
    """A refused value of megatron_rl that came from a flag of the host is named by the flag that was typed."""
    named = problem.partition("=")[0].partition(" ")[0].removesuffix(":")
    flag = typed.get(field_of(named))
    return problem if flag is None else f"{flag}: {problem}"


def _without_bound(field: str, value: Any, policy_loss: object) -> Any:
    """clip_ratio_low >= 1 sets no lower bound, because ratios are positive. We write it as 1."""
    if field == "clip_ratio_low" and isinstance(value, int | float) and value > 1:
        declared = clip_of_loss(policy_loss)
        return 1.0 if declared is not None and declared[0] == 1 else value
    return value
