#!/usr/bin/env bash
# GSPO (arXiv:2507.18071) on Megatron-LM, each prompt with the same weight, as DAPO (arXiv:2503.14476) aggregates.
#
#   cd Megatron-LM && bash /path/to/megatron_rl/examples/megatron_lm/gspo_prompt_mean.sh {your own flags of train_rl.py}
#
# train_policy.py replaces train_rl.py for GPT models; its first lines say what it leaves out.
set -euo pipefail

LINES=(
    # One step trains on a whole collection, 32 x 8. With several steps, bins would cut prompt groups.
    --perform-rl-step --rl-use-sequence-packing --grpo-prompts-per-step 32 --grpo-group-size 8 --global-batch-size 256
    # Set the clips: unset, they would take 0.01 from train_rl.py, thirty times the values of the paper.
    --policy-loss gspo --loss-aggregation prompt_mean
    --clip-ratio-low 3e-4 --clip-ratio-high 4e-4 --kl-coefficient 0
)

torchrun --nproc-per-node "${GPUS:-8}" "$(dirname "${BASH_SOURCE[0]}")/train_policy.py" "${LINES[@]}" "$@"
