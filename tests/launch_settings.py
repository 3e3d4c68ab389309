"""Settings of a launch line that name each of our functions, as a host's parser stores them."""

from __future__ import annotations

REDUCER = {"custom_pg_loss_reducer_function_path": "megatron_rl.reducers.get_pg_loss_reducer"}
CUSTOM_LOSS = {
    "loss_type": "custom_loss",
    "custom_loss_function_path": "megatron_rl.hooks.custom_loss",
    "advantage_estimator": "grpo",
}
REWARD = {"custom_reward_post_process_path": "megatron_rl.hooks.reward_post_process", "advantage_estimator": "grpo"}
