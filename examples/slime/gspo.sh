#!/usr/bin/env bash
# GSPO (arXiv:2507.18071) on slime with our loss: one all-reduce of a number a sample over context-parallel ranks.
#
#   cd slime && bash /path/to/megatron_rl/examples/slime/gspo.sh "${MODEL_ARGS[@]}" --hf-checkpoint ... --prompt-data ...
#
# After the script's name stand your own flags of slime: model, checkpoints, data, parallel sizes, optimiser. megatron_rl must be
# importable on every node; under Ray the command below goes after `ray job submit ... --`. docs/hosts/slime.md says what will be
# printed.
set -euo pipefail

LINES=(
    --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256
    # The paper's clip. The ratio is a geometric mean over the response: 0.2 would never clip.
    --advantage-estimator gspo --eps-clip 3e-4 --eps-clip-high 4e-4

    # Loss and aggregation are ours; clip, temperature and coefficients are slime's own flags, read from there.
    --loss-aggregation sample_mean
    --loss-type custom_loss --custom-loss-function-path megatron_rl.hooks.custom_loss
    # No optimiser step after a token that is not finite.
    --custom-megatron-before-train-step-hook-path megatron_rl.hooks.before_train_step
    --custom-megatron-init-path megatron_rl.hooks.custom_megatron_init
)

python3 -m megatron_rl.hosts.launch train.py "${LINES[@]}" "$@"
