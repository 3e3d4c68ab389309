#!/usr/bin/env bash
# Dr. GRPO (arXiv:2503.20783) on Megatron-LM: each token weighs 1 / (L N), whatever the length of its response.
#
#   cd Megatron-LM && bash /path/to/megatron_rl/examples/megatron_lm/dr_grpo.sh {your own flags of train_rl.py}
#
# train_policy.py replaces train_rl.py for GPT models; its first lines say what it leaves out.
set -euo pipefail

LINES=(
    --perform-rl-step --rl-use-sequence-packing --grpo-prompts-per-step 32 --grpo-group-size 8 --global-batch-size 256
    # L is the generation budget. The weights are (mean length) / L times those of sample_mean.
    --policy-loss grpo --loss-aggregation constant --loss-aggregation-divisor 8192
    --clip-ratio-low 0.2 --clip-ratio-high 0.2 --kl-coefficient 0
)

torchrun --nproc-per-node "${GPUS:-8}" "$(dirname "${BASH_SOURCE[0]}")/train_policy.py" "${LINES[@]}" "$@"
