#!/usr/bin/env bash
# GRPO on Megatron-LM: each sample weighs the same, 1 / (N m_i), in any number of bins.
#
#   cd Megatron-LM && bash /path/to/megatron_rl/examples/megatron_lm/grpo.sh {your own flags of train_rl.py}
#
# train_policy.py replaces train_rl.py for GPT models; its first lines say what it leaves out.
set -euo pipefail

LINES=(
    --perform-rl-step --rl-use-sequence-packing --grpo-prompts-per-step 32 --grpo-group-size 8 --global-batch-size 256
    # Flags that are unset here (KL, entropy, temperature) take the values of --grpo-kl-beta and the other flags of train_rl.py.
    --policy-loss grpo --loss-aggregation sample_mean
    --clip-ratio-low 0.2 --clip-ratio-high 0.2
)

torchrun --nproc-per-node "${GPUS:-8}" "$(dirname "${BASH_SOURCE[0]}")/train_policy.py" "${LINES[@]}" "$@"
