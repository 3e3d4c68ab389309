#!/usr/bin/env bash
# GSPO (arXiv:2507.18071) on NeMo-RL, each prompt with the same weight, as DAPO (arXiv:2503.14476) aggregates.
#
#   cd RL && PYTHONPATH=/path/to/megatron_rl bash /path/to/megatron_rl/examples/nemo_rl/gspo_prompt_mean.sh policy.model_name=...
#
# Give your own overrides of NeMo-RL after the name of the script. Its driver and its workers must be able to import megatron_rl: NeMo-RL
# hands the environment on to its workers, so the PYTHONPATH of the launch is enough. docs/hosts/nemo_rl.md shows what it prints.
set -euo pipefail

LINES=(
    # Loss and aggregation are ours. The clip is that of the paper: the ratio is a geometric mean, so 0.2 would never clip.
    ++loss_fn.megatron_rl=gspo.prompt_mean
    ++loss_fn.ratio_clip_min=3e-4 ++loss_fn.ratio_clip_max=4e-4
    # One optimiser step a batch: a prompt group is never cut.
    grpo.num_prompts_per_step=32 grpo.num_generations_per_prompt=8 policy.train_global_batch_size=256
)

uv run python -m megatron_rl.hosts.launch examples/run_grpo.py --config examples/configs/grpo_math_1B_megatron.yaml "${LINES[@]}" "$@"
