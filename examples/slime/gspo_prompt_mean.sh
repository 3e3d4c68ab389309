#!/usr/bin/env bash
# GSPO with prompt_mean on slime, and Dr. GRPO as a comment: the flags of examples/miles/gspo_prompt_mean.sh have the same names in slime.
#
#   cd slime && bash /path/to/megatron_rl/examples/slime/gspo_prompt_mean.sh "${MODEL_ARGS[@]}" --hf-checkpoint ... --prompt-data ...
exec bash "$(dirname "${BASH_SOURCE[0]}")/../miles/gspo_prompt_mean.sh" "$@"
