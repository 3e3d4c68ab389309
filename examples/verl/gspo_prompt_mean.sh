#!/usr/bin/env bash
# GSPO (arXiv:2507.18071) on verl, each prompt with the same weight, as DAPO (arXiv:2503.14476) aggregates.
#
#   bash /path/to/megatron_rl/examples/verl/gspo_prompt_mean.sh model_engine=megatron actor_rollout_ref.model.path=... data.train_files=...
#
# Give your own overrides of verl after the name of the script: model, data, engine, parallel sizes, optimiser. megatron_rl must be
# installed (pip install) on every node: verl finds it by its entry point. docs/hosts/verl.md shows what it prints.
set -euo pipefail

LINES=(
    # Loss and aggregation are ours. The clip is that of the paper: the ratio is a geometric mean, so 0.2 would never clip.
    actor_rollout_ref.actor.policy_loss.loss_mode=megatron_rl.gspo.prompt_mean
    actor_rollout_ref.actor.clip_ratio_low=3e-4 actor_rollout_ref.actor.clip_ratio_high=4e-4
    algorithm.adv_estimator=grpo
    # One mini-batch a batch: a group is never cut.
    data.train_batch_size=256 actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.rollout.n=8
)

python3 -m verl.trainer.main_ppo "${LINES[@]}" "$@"
