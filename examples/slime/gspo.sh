#!/usr/bin/env bash
# GSPO (arXiv:2507.18071) on slime with our loss: one all-reduce over context-parallel ranks, of one number for each sample.
#
#   cd slime && bash /path/to/megatron_rl/examples/slime/gspo.sh "${MODEL_ARGS[@]}" --hf-checkpoint ... --prompt-data ...
#
# Give your own flags of slime after the name of the script: model, checkpoints, data, parallel sizes, optimiser. Every node must be able
# to import megatron_rl. With Ray put the command below after `ray job submit ... --`. docs/hosts/miles.md shows what it prints.
set -euo pipefail

LINES=(
    --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256
    # The clip of the paper. The ratio is a geometric mean over the response, so 0.2 would never clip.
    --advantage-estimator gspo --eps-clip 3e-4 --eps-clip-high 4e-4

    # Loss and aggregation are ours. Our loss reads clip, temperature and coefficients from slime's own flags.
    --loss-aggregation sample_mean
    --loss-type custom_loss --custom-loss-function-path megatron_rl.hooks.custom_loss
    # This hook allows no optimiser step after a token that is not finite.
    --custom-megatron-before-train-step-hook-path megatron_rl.hooks.before_train_step
    --custom-megatron-init-path megatron_rl.hooks.custom_megatron_init
    # For long contexts add --fused-lm-head-loss: no logits of the micro-batch are made.
)

python3 -m megatron_rl.hosts.launch train.py "${LINES[@]}" "$@"
