#!/usr/bin/env bash
# GRPO on slime: each sample weighs the same, 1 / (N m_i), and the launch is checked before any data is read.
#
#   cd slime && bash /path/to/megatron_rl/examples/slime/grpo.sh "${MODEL_ARGS[@]}" --hf-checkpoint ... --prompt-data ...
#
# Give your own flags of slime after the name of the script: model, checkpoints, data, parallel sizes, optimiser. Every node must be able
# to import megatron_rl. With Ray put the command below after `ray job submit ... --`. docs/hosts/miles.md shows what it prints.
set -euo pipefail

LINES=(
    --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256
    --advantage-estimator grpo --eps-clip 0.2 --eps-clip-high 0.2
    --use-kl-loss --kl-loss-coef 0.001 --kl-loss-type low_var_kl

    # The weight of a token. slime alone trains the same weight, if a rollout is one sample and no --custom-tis-function-path rejects
    # tokens: rejected tokens leave our denominator, but stay in that of slime.
    --loss-aggregation sample_mean
    --custom-pg-loss-reducer-function-path megatron_rl.reducers.get_pg_loss_reducer
    # Checks flags, process groups and Megatron's arithmetic once, prints one line, and stops a launch with a wrong scale.
    --custom-megatron-init-path megatron_rl.hooks.custom_megatron_init
)

# This runs train.py itself, with the flags of megatron_rl in its parser.
python3 -m megatron_rl.hosts.launch train.py "${LINES[@]}" "$@"
