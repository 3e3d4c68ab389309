#!/usr/bin/env bash
# DAPO as published (arXiv:2503.14476) on miles: each prompt weighs the same, 1 / (P M_g); clip-higher.
#
#   cd miles && bash /path/to/megatron_rl/examples/miles/dapo.sh "${MODEL_ARGS[@]}" --hf-checkpoint ... --prompt-data ...
#
# After the script's name stand your own flags of miles: model, checkpoints, data, parallel sizes, optimiser. megatron_rl must be
# importable on every node; under Ray the command below goes after `ray job submit ... --`. docs/hosts/miles.md says what will be
# printed.
set -euo pipefail

LINES=(
    # Steps hold whole prompt groups: the global batch is a multiple of the samples per prompt.
    --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256
    --dynamic-sampling-filter-path miles.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std
    --advantage-estimator grpo --eps-clip 0.2 --eps-clip-high 0.28

    --loss-aggregation prompt_mean
    --custom-pg-loss-reducer-function-path megatron_rl.reducers.get_pg_loss_reducer
    # No micro-batch knows a whole prompt group. This hook runs where groups are whole and puts their weights into the rewards;
    # logged rewards and advantages are scaled by it, raw rewards are not.
    --custom-reward-post-process-path megatron_rl.hooks.reward_post_process
    --custom-megatron-init-path megatron_rl.hooks.custom_megatron_init
)

python3 -m megatron_rl.hosts.launch train.py "${LINES[@]}" "$@"
