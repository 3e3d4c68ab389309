#!/usr/bin/env bash
# DAPO as published (arXiv:2503.14476) on slime: each prompt weighs the same, 1 / (P M_g); clip-higher.
#
#   cd slime && bash /path/to/megatron_rl/examples/slime/dapo.sh "${MODEL_ARGS[@]}" --hf-checkpoint ... --prompt-data ...
#
# Give your own flags of slime after the name of the script: model, checkpoints, data, parallel sizes, optimiser. Every node must be able
# to import megatron_rl. With Ray put the command below after `ray job submit ... --`. docs/hosts/miles.md shows what it prints.
set -euo pipefail

LINES=(
    # Steps hold whole prompt groups: the global batch is a multiple of the samples per prompt.
    --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256
    --dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std
    --advantage-estimator grpo --eps-clip 0.2 --eps-clip-high 0.28

    --loss-aggregation prompt_mean
    --custom-pg-loss-reducer-function-path megatron_rl.reducers.get_pg_loss_reducer
    # A micro-batch may hold only a part of a prompt group. This hook runs where groups are whole, and puts their weights into the
    # rewards. It scales logged rewards and advantages, but not raw rewards.
    --custom-reward-post-process-path megatron_rl.hooks.reward_post_process
    --custom-megatron-init-path megatron_rl.hooks.custom_megatron_init
)

python3 -m megatron_rl.hosts.launch train.py "${LINES[@]}" "$@"
