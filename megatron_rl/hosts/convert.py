"""convert_samples_to_train_data: makes each prompt one rollout, so that a host that averages over rollouts averages over prompts.
It must never build training data itself: the host's own converter does, and two of its keys are replaced.

    L_host = (1/N) sum_i S_i / rollout_mask_sums_i        N distinct rollout_ids of the step

With rollout_ids the prompt group and rollout_mask_sums its tokens M_g this is prompt_mean, (1/P) sum_g S_g / M_g, and no step
can cut a group.
"""

from __future__ import annotations

import importlib
import inspect
import math
import operator
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from types import MethodType, ModuleType

import torch

from megatron_rl.aggregation import count_step
from megatron_rl.config import PolicyLossConfig
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.hosts.facts import Host, HostArgs, companion_of
from megatron_rl.hosts.launch_facts import CONVERT_LINE, REWARD_LINE
from megatron_rl.hosts.rollout_batch import RolloutBatch, positions_of, print_once, read_batch, reason_for_split_by_samples
from megatron_rl.hosts.rules import check_launch
from megatron_rl.layout.groups import SINGLE
from megatron_rl.loss_hub import import_dotted

# Where each host keeps its converter: miles a function, slime a method of its rollout manager.
CONVERTER_OF_HOST = {
    Host.MILES: ("miles.ray.rollout.train_data_conversion", "convert_samples_to_train_data"),
    Host.SLIME: ("slime.ray.rollout", "RolloutManager"),
}


def convert_samples_to_train_data(
    args: Namespace,  # the host's, in its rollout process
    samples: Sequence,  # the host's Samples of one rollout batch, flat
) -> dict:
    """`--custom-convert-samples-to-train-data-path megatron_rl.hooks.convert_samples_to_train_data`, miles and slime: prompt_mean.

    Everything but rollout_ids and rollout_mask_sums is what the host's own converter emits for these samples, rewards and final
    masks included; like the host's own, it writes the final loss_mask into each sample. --global-batch-size then means prompts
    per step. Entropy, KL and clip fraction become prompt means as well.

    Raises ConfigError for a launch on which rollout ids are ignored, replaced or counted otherwise; DataError for samples whose
    prompt is unknown, incomplete groups, fewer prompts than a step, and rewards that are not finite.
    """
    view = HostArgs(args)
    config = _checked_config(args, view)
    batch = read_batch(samples, view.host, needs_prompts=True)
    prompt_numbers = [_whole_number(position, prompt) for position, prompt in enumerate(batch.prompts)]
    _check_step(batch, view)
    train_data = host_converter(view.host)(args, samples)
    _check_train_data(train_data, len(samples))
    train_data["rollout_ids"] = prompt_numbers
    train_data["rollout_mask_sums"] = _prompt_token_counts(train_data["loss_masks"], batch, config, view)
    print_once(
        f"megatron_rl: prompt_mean with each prompt as one rollout; --global-batch-size {view['global_batch_size']} counts "
        "prompts, and so does the learning-rate schedule; entropy, KL and clip fraction are prompt means too"
    )
    return train_data


def host_converter(host: Host) -> Callable[[Namespace, Sequence], dict]:
    """The host's own converter as a function of (args, samples). ConfigError where this version of the host keeps it elsewhere."""
    module_name, attribute = CONVERTER_OF_HOST[host]
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"{module_name} of {host} cannot be imported ({error}): use {REWARD_LINE} instead") from error
    if not hasattr(module, attribute):
        raise ConfigError(f"{module_name} of this {host} has no {attribute}: use {REWARD_LINE} instead")
    return _miles_converter(module) if host == Host.MILES else _slime_converter(module)


def _miles_converter(module: ModuleType) -> Callable[[Namespace, Sequence], dict]:
    function = module.convert_samples_to_train_data

    def convert(args: Namespace, samples: Sequence) -> dict:
        keywords = {
            # What stands there belongs to multi-LoRA and to dynamic batch sizes, both refused.
            "metadata": {},
            "custom_convert_samples_to_train_data_func": None,
            "custom_reward_post_process_func": _reward_function(HostArgs(args)),
        }
        try:
            inspect.signature(function).bind(args, samples, **keywords)
        except TypeError as error:
            raise ConfigError(f"the converter of this miles takes other arguments ({error}): use {REWARD_LINE} instead") from error
        return function(args, samples, **keywords)

    return convert


def _slime_converter(module: ModuleType) -> Callable[[Namespace, Sequence], dict]:
    def convert(args: Namespace, samples: Sequence) -> dict:
        return _RolloutManager(module.RolloutManager, args)._convert_samples_to_train_data(samples)

    return convert


class _RolloutManager:
    """Stands in for slime's rollout manager while one of its methods runs: its settings, without its engines.

    The host's class is wrapped by ray.remote, and the wrapper's methods are those of the class, bound to the wrapper.
    """

    def __init__(self, host_class: object, args: Namespace):
        self._host_class = host_class
        self.args = args
        self.custom_convert_samples_to_train_data_func = None
        self.custom_reward_post_process_func = _reward_function(HostArgs(args))

    def __getattr__(self, name: str):
        method = inspect.getattr_static(self._host_class, name, None)
        if not inspect.isfunction(method):
            raise ConfigError(f"the converter of this slime needs its manager's {name}: use {REWARD_LINE} instead")
        return MethodType(method, self)


def _reward_function(view: HostArgs) -> Callable | None:
    path = view["custom_reward_post_process_path"]
    return import_dotted(path, "--custom-reward-post-process-path") if path else None


def _checked_config(args: Namespace, view: HostArgs) -> PolicyLossConfig:
    """Every rule of a launch with this companion, once more here: a rollout process runs no init hook."""
    problems = []
    if companion_of(view) != "convert":  # called by a wrapper, which no rule of a launch can know
        problems.append(
            f"--custom-convert-samples-to-train-data-path {view['custom_convert_samples_to_train_data_path']}: the loss would not "
            "know that prompts stand for rollouts; name megatron_rl.hooks.convert_samples_to_train_data itself on the launch line"
        )
    return check_launch(args, found=problems)[0]


def _check_step(batch: RolloutBatch, view: HostArgs) -> None:
    reason = reason_for_split_by_samples(batch, view)
    if reason is not None:
        raise ConfigError(
            f"{reason} with {CONVERT_LINE}: miles then splits samples without looking at rollout ids, so a step would cut prompt "
            f"groups; use {REWARD_LINE}, or remove the option"
        )
    num_prompts, size = len(positions_of(batch.prompts)), view["global_batch_size"]
    if not size:
        raise ConfigError(f"--global-batch-size is not set: with {CONVERT_LINE} it is the number of prompts of a step")
    if num_prompts < size:
        raise DataError(
            f"{num_prompts} prompts do not fill one step of --global-batch-size {size}, which counts prompts with {CONVERT_LINE}, "
            "not samples: lower it"
        )


def _whole_number(position: int, prompt: object) -> int:
    """The hosts keep rollout ids as int64."""
    if not hasattr(prompt, "__index__"):
        raise DataError(
            f"sample {position} has the group_index {prompt!r}: it becomes a rollout id, a whole number: number the prompts"
        )
    return operator.index(prompt)


def _check_train_data(train_data: Mapping, num_samples: int) -> None:
    missing = [key for key in ("rollout_ids", "rollout_mask_sums", "loss_masks", "rewards") if key not in train_data]
    if missing:
        raise ConfigError(
            f"this host's converter emits no {', '.join(missing)}, so nothing would divide by a prompt's tokens: use {REWARD_LINE}"
        )
    if len(train_data["rollout_ids"]) != num_samples:
        raise DataError(f"the host's converter made {len(train_data['rollout_ids'])} rows of {num_samples} samples")
    for position, reward in enumerate(train_data["rewards"]):
        if not math.isfinite(reward):
            raise DataError(
                f"sample {position} has the reward {reward} after the host's normalisation: the reward itself is not finite, or "
                "its group holds one rollout and the host divides by a deviation of nothing; set --disable-grpo-std-normalization"
            )


def _prompt_token_counts(loss_masks: Sequence, batch: RolloutBatch, config: PolicyLossConfig, view: HostArgs) -> list[int]:
    """M_g for each sample, from the masks that the host will train with. A group is complete when its rollouts are there."""
    rollouts = positions_of(batch.rollouts)
    _, _, counts = count_step(
        [torch.cat([torch.as_tensor(loss_masks[position]) for position in positions]) for positions in rollouts.values()],
        [batch.prompts[positions[0]] for positions in rollouts.values()],
        SINGLE,
        samples_per_prompt=config.samples_per_prompt or view["n_samples_per_prompt"],
        allow_partial_prompt_groups=config.allow_partial_prompt_groups,
    )
    of_rollout = dict(zip(rollouts, counts.tolist(), strict=True))
    return [of_rollout[key] for key in batch.rollouts]
