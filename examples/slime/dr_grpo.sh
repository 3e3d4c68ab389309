#!/usr/bin/env bash
# Dr. GRPO (arXiv:2503.20783) on slime: each token weighs 1 / (L N), whatever the length of its response.
#
#   cd slime && bash /path/to/megatron_rl/examples/slime/dr_grpo.sh "${MODEL_ARGS[@]}" --hf-checkpoint ... --prompt-data ...
#
# Give your own flags of slime after the name of the script: model, checkpoints, data, parallel sizes, optimiser. Every node must be able
# to import megatron_rl. With Ray put the command below after `ray job submit ... --`. docs/hosts/miles.md shows what it prints.
set -euo pipefail

LINES=(
    --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256 --rollout-max-response-len 8192
    # Rewards minus the mean of their group, without division by its standard deviation.
    --advantage-estimator grpo --disable-grpo-std-normalization
    --eps-clip 0.2 --eps-clip-high 0.2

    # L is the generation budget. The weights are (mean length) / L times those of sample_mean. Adam hides this, but clipping by norm
    # does not. Another L is the same training with another clipping value.
    --loss-aggregation constant --loss-aggregation-divisor 8192
    --custom-pg-loss-reducer-function-path megatron_rl.reducers.get_pg_loss_reducer
    --custom-megatron-init-path megatron_rl.hooks.custom_megatron_init
)

python3 -m megatron_rl.hosts.launch train.py "${LINES[@]}" "$@"
