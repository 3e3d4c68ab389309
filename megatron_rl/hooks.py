"""The hooks that miles and slime import by name. Their code is in hosts/.

--custom-megatron-init-path megatron_rl.hooks.custom_megatron_init
--custom-megatron-before-train-step-hook-path megatron_rl.hooks.before_train_step
--loss-type custom_loss --custom-loss-function-path megatron_rl.hooks.custom_loss
--custom-reward-post-process-path megatron_rl.hooks.reward_post_process
"""

from __future__ import annotations

from megatron_rl.hosts.loss import custom_loss
from megatron_rl.hosts.rewards import reward_post_process
from megatron_rl.hosts.training_hooks import before_train_step, custom_megatron_init

__all__ = [
    "before_train_step",
    "custom_loss",
    "custom_megatron_init",
    "reward_post_process",
]
