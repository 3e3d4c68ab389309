#!/usr/bin/env bash
# GSPO (arXiv:2507.18071) on miles, each prompt with the same weight, as DAPO (arXiv:2503.14476) aggregates.
#
#   cd miles && bash /path/to/megatron_rl/examples/miles/gspo_prompt_mean.sh "${MODEL_ARGS[@]}" --hf-checkpoint ... --prompt-data ...
#
# Give your own flags of miles after the name of the script: model, checkpoints, data, parallel sizes, optimiser. Every node must be able
# to import megatron_rl. With Ray put the command below after `ray job submit ... --`. docs/hosts/miles.md shows what it prints.
set -euo pipefail

LINES=(
    # Steps hold whole prompt groups: the global batch is a multiple of the samples per prompt.
    --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256
    # Checks flags, process groups and Megatron's arithmetic once, prints one line, and stops a launch with a wrong scale.
    --custom-megatron-init-path megatron_rl.hooks.custom_megatron_init

    # The clip of the paper. The ratio is a geometric mean over the response, so 0.2 would never clip.
    --advantage-estimator gspo --eps-clip 3e-4 --eps-clip-high 4e-4
    # Loss and aggregation are ours. Our loss reads clip, temperature and coefficients from the host's own flags.
    --loss-aggregation prompt_mean
    --loss-type custom_loss --custom-loss-function-path megatron_rl.hooks.custom_loss
    # A micro-batch may hold a part of a prompt group. This hook runs where groups are whole, and puts their weights into the rewards.
    --custom-reward-post-process-path megatron_rl.hooks.reward_post_process
    # This hook allows no optimiser step after a token that is not finite.
    --custom-megatron-before-train-step-hook-path megatron_rl.hooks.before_train_step

    # Dr. GRPO (arXiv:2503.20783) with the host's own loss and our weights, in place of the flags from --advantage-estimator on; L is 8192:
    # --advantage-estimator grpo --disable-grpo-std-normalization --eps-clip 0.2 --eps-clip-high 0.2
    # --loss-aggregation constant --loss-aggregation-divisor 8192 --rollout-max-response-len 8192
    # --custom-pg-loss-reducer-function-path megatron_rl.reducers.get_pg_loss_reducer
)

# This runs train.py itself, with the flags of megatron_rl in its parser.
python3 -m megatron_rl.hosts.launch train.py "${LINES[@]}" "$@"
