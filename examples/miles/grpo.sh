#!/usr/bin/env bash
# GRPO on miles: each sample weighs the same, 1 / (N m_i), with the launch checked before any data.
#
#   cd miles && bash /path/to/megatron_rl/examples/miles/grpo.sh "${MODEL_ARGS[@]}" --hf-checkpoint ... --prompt-data ...
#
# After the script's name stand your own flags of miles: model, checkpoints, data, parallel sizes, optimiser. megatron_rl must be
# importable on every node; under Ray the command below goes after `ray job submit ... --`. docs/hosts/miles.md says what will be
# printed.
set -euo pipefail

LINES=(
    --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256
    --advantage-estimator grpo --eps-clip 0.2 --eps-clip-high 0.2
    --use-kl-loss --kl-loss-coef 0.001 --kl-loss-type low_var_kl

    # The weight of a token. It is what miles trains by itself too, as long as a rollout is one sample and no
    # --custom-tis-function-path rejects tokens: rejected tokens leave our denominator and stay in that of miles.
    --loss-aggregation sample_mean
    --custom-pg-loss-reducer-function-path megatron_rl.reducers.get_pg_loss_reducer
    # Looks at flags, process groups and Megatron's own arithmetic once, prints one line, stops what would train on a wrong scale.
    --custom-megatron-init-path megatron_rl.hooks.custom_megatron_init
)

# train.py itself, with the flags of megatron_rl in its parser.
python3 -m megatron_rl.hosts.launch train.py "${LINES[@]}" "$@"
