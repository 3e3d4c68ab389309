#!/usr/bin/env bash
# GSPO (arXiv:2507.18071) on Megatron-LM: one ratio a sample, the paper's clip.
#
#   cd Megatron-LM && bash /path/to/megatron_rl/examples/megatron_lm/gspo.sh {your own flags of train_rl.py}
#
# train_policy.py stands in for train_rl.py with a GPT model; its first lines say what it leaves out. It needs an edit of two
# functions of megatron/rl/rl_utils.py, which docs/hosts/megatron_lm.md shows: prompts are recorded, the temperature is applied.
set -euo pipefail

LINES=(
    --perform-rl-step --rl-use-sequence-packing --grpo-prompts-per-step 32 --grpo-group-size 8 --global-batch-size 256
    # Given, because unset they would take train_rl.py's 0.01, thirty times the paper's values.
    --policy-loss gspo --loss-aggregation sample_mean
    --clip-ratio-low 3e-4 --clip-ratio-high 4e-4 --kl-coefficient 0
)

torchrun --nproc-per-node "${GPUS:-8}" "$(dirname "${BASH_SOURCE[0]}")/train_policy.py" "${LINES[@]}" "$@"
