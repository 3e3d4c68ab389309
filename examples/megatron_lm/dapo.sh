#!/usr/bin/env bash
# DAPO as published (arXiv:2503.14476) on Megatron-LM: each prompt weighs the same, 1 / (P M_g); clip-higher; no KL.
#
#   cd Megatron-LM && bash /path/to/megatron_rl/examples/megatron_lm/dapo.sh {your own flags of train_rl.py}
#
# train_policy.py replaces train_rl.py for GPT models; its first lines say what it leaves out.
set -euo pipefail

LINES=(
    # One step trains on a whole collection, 32 x 8. With several steps, bins would cut prompt groups.
    --perform-rl-step --rl-use-sequence-packing --grpo-prompts-per-step 32 --grpo-group-size 8 --global-batch-size 256
    --policy-loss grpo --loss-aggregation prompt_mean
    --clip-ratio-low 0.2 --clip-ratio-high 0.28 --kl-coefficient 0
    --grpo-filter-groups-with-same-reward
)

torchrun --nproc-per-node "${GPUS:-8}" "$(dirname "${BASH_SOURCE[0]}")/train_policy.py" "${LINES[@]}" "$@"
