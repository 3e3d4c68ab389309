"""The host slime: what is different from other hosts."""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections.abc import Sequence
from types import MethodType

import torch
from torch import Tensor

from megatron_rl.config import TermScore
from megatron_rl.errors import ConfigError
from megatron_rl.hosts.base import (
    CHOICES,
    ESTIMATORS,
    REWARD_LINE,
    Converter,
    Host,
    HostLoss,
    HostOptions,
    import_of_host,
    reward_function,
)
from megatron_rl.hosts.kept_ids import KeptIds

MANAGER_MODULE = "slime.ray.rollout"
LOSSES = "slime.backends.megatron_utils.loss"


class Slime(Host):
    name = "slime"
    package = "slime"
    training_package = "slime.backends.megatron_utils"
    parser_module = "slime.utils.arguments"
    refuses_unknown_flags = False
    marks = ("rollout_batch_size",)
    choices = {**CHOICES, "--advantage-estimator": (*ESTIMATORS, "cispo")}
    rollout_functions = ("slime.rollout.sglang_rollout.generate_rollout",)
    loss = HostLoss(
        drops_masked_values=False,
        always_has_entropy=True,
        correction_functions={f"{LOSSES}.vanilla_tis_function": "tis", f"{LOSSES}.icepop_function": "icepop"},
        kept=KeptIds(
            ids="rollout_top_p_token_ids",
            offsets="rollout_top_p_token_offsets",
            filters=("rollout_top_p",),
            adds_token=True,
            reference=TermScore.SUPPORT,
            arguments=("top_p_token_ids", "top_p_token_offsets"),
        ),
    )

    def measured(self, found: dict[str, list[Tensor]], logits: Tensor) -> tuple[Tensor, dict[str, list[Tensor]]]:
        """Behind an empty tensor, as a loss is."""
        return torch.empty((0,), device=logits.device), found

    def rollout_key(self, position: int, index: int | None):
        """A fresh number."""
        return ("sample", position)

    def converter(self) -> Converter:
        """A method of the rollout manager."""
        manager = import_of_host(MANAGER_MODULE, "RolloutManager", self).RolloutManager

        def convert(args: Namespace, samples: Sequence) -> dict:
            return _RolloutManager(manager, args)._convert_samples_to_train_data(samples)

        return convert


class _RolloutManager:
    """Replaces the host's rollout manager while one of its methods runs: it has the settings and no engines.

    The host's class is wrapped by ray.remote, and the wrapper has the class's methods, bound to the wrapper.
    """

    def __init__(self, host_class: object, args: Namespace):
        self._host_class = host_class
        self.args = args
        self.custom_convert_samples_to_train_data_func = None
        self.custom_reward_post_process_func = reward_function(HostOptions(args))

    def __getattr__(self, name: str):
        method = inspect.getattr_static(self._host_class, name, None)
        if not inspect.isfunction(method):
            raise ConfigError(f"the converter of this slime needs its manager's {name}: use {REWARD_LINE} instead")
        return MethodType(method, self)


HOST = Slime()
