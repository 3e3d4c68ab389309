#!/usr/bin/env bash
# Dr. GRPO (arXiv:2503.20783) on slime: each token weighs 1 / (L N), whatever the length of its response.
#
#   cd slime && bash /path/to/megatron_rl/examples/slime/dr_grpo.sh "${MODEL_ARGS[@]}" --hf-checkpoint ... --prompt-data ...
#
# After the script's name stand your own flags of slime: model, checkpoints, data, parallel sizes, optimiser. megatron_rl must be
# importable on every node; under Ray the command below goes after `ray job submit ... --`. docs/hosts/slime.md says what will be
# printed.
set -euo pipefail

LINES=(
    --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256 --rollout-max-response-len 8192
    # Rewards minus their group's mean, not divided by its deviation.
    --advantage-estimator grpo --disable-grpo-std-normalization
    --eps-clip 0.2 --eps-clip-high 0.2

    # L is the generation budget. It scales the gradient by (mean length) / L against sample_mean: Adam hides that, clipping by
    # norm does not. Any other L is the same training with another clipping value.
    --loss-aggregation constant --loss-aggregation-divisor 8192
    --custom-pg-loss-reducer-function-path megatron_rl.reducers.get_pg_loss_reducer
    --custom-megatron-init-path megatron_rl.hooks.custom_megatron_init
)

python3 -m megatron_rl.hosts.launch train.py "${LINES[@]}" "$@"
