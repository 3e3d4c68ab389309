"""Arguments of a launch as a host's parser stores them, and samples of a rollout process. It must never compute a weight."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import dataclass, field

from megatron_rl.arguments import add_megatron_rl_args

# Settings that name each of our functions.
REDUCER = {"custom_pg_loss_reducer_function_path": "megatron_rl.reducers.get_pg_loss_reducer"}
CUSTOM_LOSS = {
    "loss_type": "custom_loss",
    "custom_loss_function_path": "megatron_rl.hooks.custom_loss",
    "advantage_estimator": "grpo",
}
REWARD = {"custom_reward_post_process_path": "megatron_rl.hooks.reward_post_process", "advantage_estimator": "grpo"}


@dataclass
class RolloutSample:
    """The fields of a host's Sample that its converters and our hook read."""

    group_index: int | str | None
    index: int | None
    response_length: int
    reward: object = 1.0
    loss_mask: list[int] | None = None
    rollout_id: int | None = None
    remove_sample: bool = False
    tokens: list[int] = field(default_factory=list)
    multimodal_train_inputs: dict | None = None

    def get_reward_value(self, args: Namespace) -> object:
        return self.reward[args.reward_key] if args.reward_key else self.reward


def launch(host: str, ours: str, **options) -> Namespace:
    """`ours` is what a user types of our flags, `options` the host's that are not as here. 2 prompts of 2 rollouts, one step."""
    shared = dict(
        advantage_estimator="grpo", allgather_cp=False, calculate_per_token_loss=False, custom_advantage_function_path=None,
        custom_convert_samples_to_train_data_path=None, custom_loss_function_path=None, custom_pg_loss_reducer_function_path=None,
        custom_reward_post_process_path=None, custom_tis_function_path=None, entropy_coef=0.0, eps_clip=0.2, eps_clip_high=0.2,
        eps_clip_c=None, get_mismatch_metrics=False, global_batch_size=4, grpo_std_normalization=True, kl_coef=0.0,
        kl_loss_coef=0.0, kl_loss_type="k3", log_probs_chunk_size=-1, loss_type="policy_loss", n_samples_per_prompt=2,
        normalize_advantages=False, num_steps_per_rollout=None, opsm_delta=0.1, recompute_loss_function=False, reward_key=None,
        rewards_normalization=True, rollout_batch_size=2, rollout_temperature=1.0, rollout_top_p=1.0, tis_clip=1.5,
        tis_clip_low=0.5, use_dynamic_batch_size=False, use_dynamic_global_batch_size=False, use_kl_loss=False, use_opd=False,
        use_opsm=False, use_rollout_logprobs=False, use_tis=False, use_unbiased_kl=False,
    )  # fmt: skip
    if host == "miles":
        shared.update(
            allow_partial_train_step=False, cp_comm_type="p2p", delay_split_train_data_by_dp=False, indep_dp=False,
            multi_lora=False, multi_lora_n_adapters=0, observe_training_entropy=False, qkv_format="thd",
            skip_actor_forward_only=False, train_backend="megatron", true_on_policy_mode=False,
        )  # fmt: skip
    flags = vars(add_megatron_rl_args(ArgumentParser()).parse_args(ours.split()))
    return Namespace(**flags | shared | options)
