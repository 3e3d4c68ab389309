#!/usr/bin/env bash
# GSPO (arXiv:2507.18071) on SkyRL, each prompt with the same weight, as DAPO (arXiv:2503.14476) aggregates.
#
#   cd SkyRL && PYTHONPATH=/path/to/megatron_rl bash /path/to/megatron_rl/examples/skyrl/gspo_prompt_mean.sh trainer.policy.model.path=...
#
# Give your own overrides of SkyRL after the name of the script. Driver and workers must be able to import megatron_rl:
# SKYRL_PYTHONPATH_EXPORT hands the PYTHONPATH on to the workers. docs/hosts/skyrl.md shows what it prints.
set -euo pipefail
export SKYRL_PYTHONPATH_EXPORT=1

LINES=(
    # The loss is ours. The clip is that of the paper: the ratio is a geometric mean, so 0.2 would never clip.
    trainer.override_entrypoint=megatron_rl.hosts.skyrl
    trainer.algorithm.policy_loss_type=megatron_rl.gspo
    trainer.algorithm.eps_clip_low=3e-4 trainer.algorithm.eps_clip_high=4e-4
    # The aggregation is SkyRL's: its driver scales the advantages.
    trainer.algorithm.loss_reduction=prompt_mean
    trainer.strategy=megatron
)

uv run --isolated --extra megatron -m skyrl.train.entrypoints.main_base "${LINES[@]}" "$@"
