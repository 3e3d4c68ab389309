"""What a host's arguments say, read through one table of names; it must never guess a flag of ours nor change an argument."""

from __future__ import annotations

import sys
from argparse import Namespace
from enum import StrEnum

from megatron_rl.arguments import validate_megatron_rl_args
from megatron_rl.config import PolicyLossConfig, Route
from megatron_rl.errors import ConfigError
from megatron_rl.validation import HOST_SWITCHES, flag_of


class Host(StrEnum):
    MILES = "miles"
    SLIME = "slime"
    MEGATRON_LM = "megatron_lm"


# A host's option -> what its absence means. A name outside this table is a mistake of ours; an option in it that one host lacks
# has the value that this host always behaves by.
OPTIONS: dict[str, object] = {
    **HOST_SWITCHES,
    "advantage_estimator": None,
    "context_parallel_size": 1,
    "cp_comm_type": None,
    "custom_advantage_function_path": None,
    "custom_convert_samples_to_train_data_path": None,
    "custom_generate_function_path": None,
    "custom_loss_function_path": None,
    "custom_megatron_before_train_step_hook_path": None,
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
    "multimodal_keys": None,
    "n_samples_per_prompt": None,
    "num_steps_per_rollout": None,
    "pipeline_model_parallel_size": 1,
    "qkv_format": "thd",  # slime knows no other
    "rollout_batch_size": None,
    "rollout_function_path": None,
    "rollout_temperature": 1.0,
    "rollout_top_k": -1,
    "rollout_top_p": 1.0,
    "tis_clip": 2.0,
    "tis_clip_low": 0.0,
    "tensor_model_parallel_size": 1,
    "train_backend": "megatron",
}
# Options that one host alone has: which of them stands in the arguments tells the hosts apart.
MILES_ONLY = ("observe_training_entropy", "allow_partial_train_step", "true_on_policy_mode")

_remembered_args: Namespace | None = None


class HostArgs:
    """A read-only view of a host's arguments."""

    def __init__(self, args: Namespace):
        self._values = vars(args)

    def __getitem__(self, name: str):
        """The option's value; what its absence means where the host has no such option. A switch has the truth value that the host
        sees. KeyError for a name outside OPTIONS."""
        absent = OPTIONS[name]
        value = self._values.get(name, absent)
        if name in HOST_SWITCHES:
            return bool(value)
        return absent if value is None else value

    def has(self, name: str) -> bool:
        return name in self._values

    def names(self) -> list[str]:
        """Every argument there is, ours and those of nobody included."""
        return list(self._values)

    def ours(self, field: str):
        """A setting of ours as the launch gave it, unread and unjudged; None where it is unset or was dropped."""
        return self._values.get(field)

    @property
    def host(self) -> Host:
        if any(name in self._values for name in MILES_ONLY):
            return Host.MILES
        return Host.SLIME if "rollout_batch_size" in self._values else Host.MEGATRON_LM


def names_ours(path: object, function: str) -> bool:
    """Whether a host's path leads to our function of that name, in the dotted form or the colon form."""
    parts = path.replace(":", ".").split(".") if isinstance(path, str) else [""]
    return parts[0] == "megatron_rl" and parts[-1] == function


def companion_of(args: Namespace | HostArgs) -> str | None:
    """Which of our hooks gives samples their weights before training: "reward", "convert" or none.

    With both on the launch line it is "convert", because a host's converter replaces the step that calls the reward hook.
    """
    view = args if isinstance(args, HostArgs) else HostArgs(args)
    if names_ours(view["custom_convert_samples_to_train_data_path"], "convert_samples_to_train_data"):
        return "convert"
    return "reward" if names_ours(view["custom_reward_post_process_path"], "reward_post_process") else None


def remember_args(args: Namespace) -> None:
    """The init hook's arguments, for hooks that get none, where Megatron's global arguments cannot be had."""
    global _remembered_args
    _remembered_args = args


def current_args() -> Namespace:
    """Megatron's global arguments, which both hosts set in each training actor before the init hook, else the init hook's.

    Looked up, not imported: whoever set them has loaded the module. Raises ConfigError when there are none.
    """
    global_vars = sys.modules.get("megatron.training.global_vars")
    if global_vars is not None:
        try:
            return global_vars.get_args()
        except AssertionError:  # "args is not initialized"
            pass
    if _remembered_args is not None:
        return _remembered_args
    raise ConfigError(
        "the loss reducer gets no arguments from its host and Megatron's global ones are not set: add "
        "--custom-megatron-init-path megatron_rl.hooks.custom_megatron_init to the launch line. The FSDP backend of miles never "
        "calls it and sets no global arguments: the reducer needs --train-backend megatron"
    )


# The host's estimator -> the loss that it trains with. The others have losses of their own.
POLICY_LOSS_OF_ESTIMATOR = {
    "grpo": "grpo",
    "gspo": "gspo",
    "ppo": "grpo",
    "reinforce_plus_plus": "grpo",
    "reinforce_plus_plus_baseline": "grpo",
}
# Our flag's field -> the host's option for the same thing.
SAME_THING = {
    "clip_ratio_low": "eps_clip",
    "clip_ratio_high": "eps_clip_high",
    "policy_temperature": "rollout_temperature",
    "entropy_coefficient": "entropy_coef",
    "kl_coefficient": "kl_loss_coef",
}


def host_config(args: Namespace, route: Route) -> PolicyLossConfig:
    """Our settings on a host's route. On custom_loss, where a flag of ours is unset the host's own gives the value.

    Raises one ConfigError with every problem: those of validate_megatron_rl_args, and each pair set on both sides to different
    values. `args` is left as it is.
    """
    if companion_of(args) == "convert":
        # The converter makes a rollout of each prompt: the batch size then counts prompts, which no group can be cut from.
        args = Namespace(**{**vars(args), "global_batch_size": None})
    if route != Route.CUSTOM_LOSS:
        return validate_megatron_rl_args(args, route)
    view, problems, merged = HostArgs(args), [], dict(vars(args))
    for field, option in SAME_THING.items():
        ours, theirs = vars(args).get(field), _host_value(view, option)
        if ours is None:
            merged[field] = theirs
        elif view.has(option) and float(ours) != float(theirs if theirs is not None else 0.0):
            problems.append(
                f"{flag_of(field)} {ours} and --{option.replace('_', '-')} {theirs} are the same thing with two values: remove one"
            )
    estimator = view["advantage_estimator"]
    of_estimator = POLICY_LOSS_OF_ESTIMATOR.get(estimator)
    if vars(args).get("policy_loss") is None:
        if of_estimator is None:
            problems.append(
                f"--advantage-estimator {estimator} has no loss in megatron_rl.hooks.custom_loss: known are "
                f"{', '.join(POLICY_LOSS_OF_ESTIMATOR)}; use the host's own loss, or give --policy-loss"
            )
        merged["policy_loss"] = of_estimator
    try:
        config = validate_megatron_rl_args(Namespace(**merged), route)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from error
    if problems:
        raise ConfigError(problems)
    return config


def _host_value(view: HostArgs, option: str):
    """None where the host's option does nothing. A KL coefficient counts with --use-kl-loss alone."""
    if option == "kl_loss_coef" and not view["use_kl_loss"]:
        return 0.0
    if option == "eps_clip_high" and view[option] is None:
        return view["eps_clip"]
    return view[option]
