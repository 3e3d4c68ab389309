"""Samples and arguments of a rollout process, for the tests of the hooks that run there. It must never compute a weight."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import dataclass, field

from megatron_rl.arguments import add_megatron_rl_args

HOOKS = "megatron_rl.hooks."
REDUCER = "megatron_rl.reducers.get_pg_loss_reducer"
COMPANIONS = {
    "reward": {"custom_reward_post_process_path": HOOKS + "reward_post_process"},
}
DOORS = {
    "host's reducer": {},
    "our reducer": {"custom_pg_loss_reducer_function_path": REDUCER},
    "custom_loss": {"loss_type": "custom_loss", "custom_loss_function_path": HOOKS + "custom_loss"},
}


@dataclass
class RolloutSample:
    """The fields of a host's Sample that its converters read."""

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


def launch(host: str, companion: str, ours: str, **options) -> Namespace:
    """The arguments in the rollout process; `ours` is what a user types of our flags. 2 prompts of 2 rollouts, one step."""
    shared = dict(
        advantage_estimator="grpo", calculate_per_token_loss=False, custom_advantage_function_path=None,
        custom_convert_samples_to_train_data_path=None, custom_loss_function_path=None, custom_pg_loss_reducer_function_path=None,
        custom_reward_post_process_path=None, custom_tis_function_path=None, entropy_coef=0.0, eps_clip=0.2, eps_clip_high=0.2,
        eps_clip_c=None, get_mismatch_metrics=False, global_batch_size=4, grpo_std_normalization=True, kl_coef=0.0,
        kl_loss_coef=0.0, kl_loss_type="k3", loss_type="policy_loss", n_samples_per_prompt=2, normalize_advantages=False,
        num_steps_per_rollout=None, reward_key=None, rewards_normalization=True, rollout_batch_size=2, rollout_temperature=1.0,
        use_dynamic_batch_size=False, use_dynamic_global_batch_size=False, use_kl_loss=False, use_opd=False, use_tis=False,
    )  # fmt: skip
    if host == "miles":
        shared.update(
            allow_partial_train_step=False, delay_split_train_data_by_dp=False, indep_dp=False, multi_lora=False,
            observe_training_entropy=False, qkv_format="thd", train_backend="megatron", true_on_policy_mode=False,
        )  # fmt: skip
    flags = vars(add_megatron_rl_args(ArgumentParser()).parse_args(ours.split()))
    return Namespace(**{**flags, **shared, **COMPANIONS[companion], **options})


def make_samples(counts: list[int], prompts: list, **fields: list) -> list[RolloutSample]:
    """One sample an entry: `counts` unmasked tokens among twice as many, its prompt, and further fields."""
    samples = []
    for index, (count, prompt) in enumerate(zip(counts, prompts, strict=True)):
        mask = [1] * count + [0] * max(count, 3)
        rest = {name: values[index] for name, values in fields.items()}
        samples.append(RolloutSample(prompt, 100 + index, len(mask), **{"loss_mask": mask, **rest}))
    return samples


def step_s(**fields: list) -> list[RolloutSample]:
    """Step S: m = (2, 4, 1, 0), prompts (7, 7, 9, 9), so N = 4, P = 2, T = 7, M_7 = 6, M_9 = 1."""
    return make_samples([2, 4, 1, 0], [7, 7, 9, 9], **fields)
