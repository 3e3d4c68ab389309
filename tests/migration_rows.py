"""What other frameworks call losses, corrections and KL estimators: the tables of docs/hosts/migration.md, as data.

Each row was read in the framework's source, at the commit that the page names. `place` is the file and line.
"""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    framework: str
    setting: str  # `code` in the page's quotes
    here: str  # our flags, or `none`
    differs: str
    place: str


# framework | setting | here | what differs | file:line
# A name in the place of flags is that of --policy-loss.
LOSSES = """\
verl | `loss_mode=vanilla`, `clip_ratio_c=3.0` | `grpo` with dual clip at 3 | dual clip is on by default there, off here | \
    trainer/ppo/core_algos.py:1323
verl | `loss_mode=gspo` | `gspo_token` | trains `sample_mean` whatever is set; the log-ratio is clamped above at 10 | \
    trainer/ppo/core_algos.py:1545
verl | `loss_mode=cispo`, `clip_ratio` 0.2 | `--policy-loss cispo --clip-ratio-low 0.2 --clip-ratio-high 0.2` | distances, \
    as here; our defaults are 1 and 0.28 | trainer/ppo/core_algos.py:2046
verl | `loss_mode=geo_mean`, `clip_ratio` 0.2 | `gmpo`, low 1 - exp(-0.2), high exp(0.2) - 1 | its clip is of the \
    log-ratio; the mean runs over the micro-batch, so the result depends on the layout | trainer/ppo/core_algos.py:1927
verl | `loss_mode=gpg` | `--policy-loss reinforce` | | trainer/ppo/core_algos.py:1706
verl | `loss_mode=clip_cov`, `kl_cov` | none | chosen in the micro-batch there, which depends on the layout | \
    trainer/ppo/core_algos.py:1742
TRL | `loss_type=cispo`, `epsilon_high=5.0` | `--policy-loss cispo --clip-ratio-low 1 --clip-ratio-high 4` | its cap is \
    absolute, ours a distance from 1; no lower bound | trainer/grpo_trainer.py:3080
TRL | `delta` | dual clip at `delta` | off by default on both sides; for A > 0 it has no effect if it is above 1 + high | \
    trainer/grpo_trainer.py:3086
TRL | `loss_type=vespo` | none | | trainer/grpo_trainer.py:3096
NeMo-RL | `use_cispo`, `ratio_clip_min`, `ratio_clip_max` 0.2 | `--policy-loss cispo --clip-ratio-low 0.2 \
    --clip-ratio-high 0.2` | only with `token_level_loss` there | algorithms/loss/loss_functions.py:545
NeMo-RL | `ratio_clip_c` | dual clip | off by default on both sides; recipes take 3 | \
    algorithms/loss/loss_functions.py:554
NeMo-RL | `force_on_policy_ratio` | no old log-probabilities: `old_log_probs: null` | | \
    algorithms/loss/loss_functions.py:520
NeMo-RL | `positive_example_nll_weight` | none | | algorithms/loss/loss_functions.py:163
SkyRL | `policy_loss_type=cispo`, 1.0 and 4.0 | `--policy-loss cispo --clip-ratio-low 1 --clip-ratio-high 4` | distances; \
    `cispo_anchor=rollout` has no equal here | backends/skyrl_train/utils/ppo_utils.py:732
SkyRL | `policy_loss_type=dual_clip`, `clip_ratio_c=3.0` | `grpo` with dual clip at 3 | | \
    backends/skyrl_train/utils/ppo_utils.py:556
SkyRL | `policy_loss_type=dppo`, `delta_low`, `delta_high` 0.2 | `dppo_tv`, `dppo_kl` with these divergences | its ratio \
    has no truncation; ours has 20 | backends/skyrl_train/utils/ppo_utils.py:867
ROLL | `pg_variant=cispo`, 0.1 and 0.1 | `--policy-loss cispo --clip-ratio-low 0.1 --clip-ratio-high 0.1` | \
    `cispo_use_unified_mask` has no equal here | pipeline/rlvr/actor_pg_worker.py:333
ROLL | `pg_variant=kimi15`, `kimi15_tau` 0.1 | `dro` with the penalty 0.1 | our default is 0.05 | \
    pipeline/rlvr/actor_pg_worker.py:430
ROLL | `pg_variant=topr` | `topr` | the sign of the score decides there, that of the advantage here; its two weights have \
    no equal here | pipeline/rlvr/actor_pg_worker.py:299
ROLL | `dual_clip_loss` | dual clip at 1 + 2 `pg_clip` | the bound has no flag of its own there | \
    pipeline/rlvr/actor_pg_worker.py:182
AReaL | `use_cispo_loss`, `eps_clip` 1.0, `eps_clip_higher` 4.0 | `--policy-loss cispo --clip-ratio-low 1 \
    --clip-ratio-high 4` | distances | utils/functional/functional.py:678
AReaL | `c_clip` | dual clip | | utils/functional/functional.py:555
AReaL | `use_sapo_loss`, `sapo_tau_pos`, `sapo_tau_neg` | `sapo` with these temperatures | | \
    utils/functional/functional.py:599
OpenRLHF | `--actor.dual_clip` | dual clip | off by default on both sides | models/loss.py:191
OpenRLHF | `policy_loss_type=gspo` with the correction on | `gspo` on `old_log_probs` of the sampler | its ratio is to \
    vLLM then | models/loss.py:170
miles, slime | `--eps-clip-c` | dual clip | off by default on both sides | slime utils/ppo_utils.py:138; miles \
    training_utils/loss_hub/math_utils.py:267
slime | `--advantage-estimator cispo`, `--eps-clip` 1.0, `--eps-clip-high` | `--policy-loss cispo`, the same distances | \
    miles has no CISPO | utils/ppo_utils.py:152
ms-swift | `loss_type=cispo`, `epsilon_high=5.0` | `--policy-loss cispo --clip-ratio-low 1 --clip-ratio-high 4` | its cap \
    is absolute | megatron/trainers/grpo_trainer.py:1048
ms-swift | `importance_sampling_level=sequence_token` | `gspo_token` | the clip is that of tokens unless it is set | \
    megatron/trainers/grpo_trainer.py:1023
ms-swift | `loss_type=fipo`, `real` | none | | megatron/trainers/grpo_trainer.py:1058
prime-rl | its default loss, `dppo_mask_low`, `dppo_mask_high` 0.2 | none; near it `dppo_tv` with the divergences 0.2 | it \
    adds 1e-3 times the squared log-ratio, and its ratio has no truncation | trainer/rl/loss.py:109
prime-rl | `ipo` | none | | trainer/rl/loss.py:164
"""
CORRECTIONS = """\
verl | `rollout_is=token`, `rollout_is_threshold=C`, default 2.0 | `--importance-correction tis \
    --importance-correction-high C` | off unless `rollout_is` is set | trainer/ppo/rollout_corr_helper.py:595
verl | `rollout_is=token`, `rollout_is_threshold=L_C` | `--importance-correction icepop`, low L, high C | | \
    trainer/ppo/rollout_corr_helper.py:602
verl | `rollout_is=sequence` | the same with `--importance-correction-level sequence_sum` | | \
    trainer/ppo/rollout_corr_helper.py:578
verl | `rollout_rs=token_k1`, `rollout_rs_threshold=L_C` | `--importance-correction mask`, low 1 / C, high 1 / L, \
    `--rejected-tokens dropped` | its k1 is log(rollout / old), so the bounds change places; rejected tokens leave the \
    response mask: KL, entropy and all counts lose them too | trainer/ppo/rollout_corr_helper.py:312
verl | `rollout_rs=seq_mean_k1`, `seq_sum_k1` | the same with level `sequence_mean`, `sequence_sum` | as above; with \
    `rollout_is` besides it multiplies too, here one kind at a time | trainer/ppo/rollout_corr_helper.py:323
verl | `rollout_rs` of k2, k3 or max; `rollout_is_batch_normalize` | none | no criterion here takes k2, k3 or a maximum | \
    trainer/ppo/rollout_corr_helper.py:77
verl | `bypass_mode` with `loss_type=ppo_clip` | `old_log_probs` of the sampler, no correction | it does not multiply the \
    ratio in twice | trainer/ppo/core_algos.py:2528
TRL | `vllm_importance_sampling_mode=sequence_mask`, its default, with clip_max 3.0 | `--importance-correction icepop \
    --importance-correction-level sequence_sum --importance-correction-low 0 --importance-correction-high 3` | on by default \
    there | trainer/grpo_trainer.py:2602
TRL | `token_truncate`, `token_mask` | `tis`, `icepop` at level token, low 0, high 3 | our defaults are 2, and 0.5 and 5 | \
    trainer/grpo_trainer.py:2596
TRL | `sequence_truncate` | `tis` at level `sequence_sum`, high 3 | | trainer/grpo_trainer.py:2596
TRL | `off_policy_mask_threshold=d` | `--off-policy-sequence-delta d` | counts there are `counted`; without vLLM it \
    compares with the old policy | trainer/grpo_trainer.py:2920
NeMo-RL | `truncated_importance_sampling_type=tis`, `..._ratio=C` | `--importance-correction tis \
    --importance-correction-high C` | only with `use_importance_sampling_correction`, which is off by default; the ratio has \
    no default | algorithms/loss/loss_functions.py:597
NeMo-RL | the same with `sequence_level_importance_ratios` | level `sequence_sum` | the product of all tokens; \
    `sequence_mean` is the usual remedy | algorithms/loss/loss_functions.py:571
NeMo-RL | `icepop`, `..._ratio_min=L`, `..._ratio=C` | `--importance-correction icepop`, low L, high C | | \
    algorithms/loss/loss_functions.py:617
NeMo-RL | `seq-mask-tis`, 0.999 to 1.002 | `--importance-correction mask --importance-correction-level sequence_mean` | it \
    multiplies kept tokens by their own ratio too, without a bound; here they keep the factor 1 | \
    algorithms/loss/loss_functions.py:637
NeMo-RL | `use_importance_sampling_correction` alone | `tis` with a very large high | a weight without a bound | \
    algorithms/loss/loss_functions.py:673
SkyRL | `tis_ratio_type=token`, `token_tis_ratio_clip_high=2.0` | `--importance-correction tis` | | \
    backends/skyrl_train/utils/off_policy_correction_utils.py:54
SkyRL | `tis_ratio_type=sequence` | `tis` at level `sequence_sum`, high its `sequence_tis_ratio_clip_high` | | \
    backends/skyrl_train/utils/off_policy_correction_utils.py:61
SkyRL | `sequence_mask_metric=geometric`, 0.99 to 1.01 | `--importance-correction mask --importance-correction-level \
    sequence_mean --importance-correction-low 0.99 --importance-correction-high 1.01` | | \
    backends/skyrl_train/utils/off_policy_correction_utils.py:220
SkyRL | `sequence_mask_metric=product`, 0.5 to 2.0 | the same with `sequence_sum`, low 0.5, high 2 | | \
    backends/skyrl_train/utils/off_policy_correction_utils.py:237
SkyRL | `token_mask_is_threshold_low`, `..._high` | `--importance-correction mask`, low, high | with \
    `tis_ratio_type=token` too: `icepop` | backends/skyrl_train/utils/off_policy_correction_utils.py:137
SkyRL | `outlier_token_is_threshold_low`, `..._high` | none | one token outside drops its whole sample | \
    backends/skyrl_train/utils/off_policy_correction_utils.py:75
SkyRL | `dppo`, `rollout_is` with a correction | none | the ratio is to the sampler already, and it multiplies once more; \
    here refused | backends/skyrl_train/utils/ppo_utils.py:929
ROLL | `train_infer_correction.is_weight`, `weight_type=token`, `upper_bound=1.2` | `--importance-correction tis \
    --importance-correction-high 1.2` | | utils/train_infer_corrections.py:124
ROLL | `weight_type=geometric`, `sequence` | the same at level `sequence_mean`, `sequence_sum` | `segment` has no equal \
    here | utils/train_infer_corrections.py:14
ROLL | a filter with `ratio_enabled`, 0.8 to 1.2 | `--importance-correction mask --importance-correction-low 0.8 \
    --importance-correction-high 1.2` | rejected tokens leave the KL term too; `diff_enabled` has no equal here | \
    pipeline/rlvr/actor_pg_worker.py:64
AReaL | `rejection_sampling`: `action=clamp`, `metric=ratio` | `--importance-correction tis`, low, high | needs \
    `use_decoupled_loss` | utils/functional/functional.py:344
AReaL | `action=mask`, `metric=ratio` | `--importance-correction icepop`, low, high | kept tokens keep their ratio as \
    weight; level `sequence` is the geometric mean, or the product with `agg=sum`; `counted` | \
    utils/functional/functional.py:344
AReaL | `metric=kl_k1`, `kl_k2`, `kl_k3`, `binary_kl` | none | | utils/functional/functional.py:239
OpenRLHF | `is_correction_type=tis` | `--importance-correction tis`, low, high of `is_correction_threshold` | `counted`; \
    with `gspo` the ratio is to vLLM instead | models/loss.py:215
OpenRLHF | `is_correction_type=icepop` | `--importance-correction icepop`, low, high | as above | models/loss.py:200
OpenRLHF | `is_correction_type=seq-mask-tis` | `--importance-correction mask --importance-correction-level sequence_mean`, \
    low, high | kept tokens keep their own ratio without a bound | models/loss.py:206
miles, slime | `--use-tis`, `--tis-clip-low` 0, `--tis-clip` 2.0 | `--importance-correction tis` | `counted` | slime \
    backends/megatron_utils/loss.py:884; miles training_utils/loss_hub/corrections.py:7
miles, slime | `--custom-tis-function-path` of icepop_function | `--importance-correction icepop`, low and high of the \
    same flags | their defaults 0 and 2 are not those of the paper; `counted` | slime backends/megatron_utils/loss.py:908; \
    miles training_utils/loss_hub/corrections.py:35
miles, slime | `--use-opsm`, `--opsm-delta` 1e-4 | `--off-policy-sequence-delta 1e-4` | they compare with \
    log-probabilities that the trainer computed, unless `--use-rollout-logprobs`: inert with one step a rollout; opsm_clipfrac \
    is a sum over samples | slime utils/ppo_utils.py:54; miles training_utils/loss_hub/math_utils.py:183
ms-swift | `rollout_importance_sampling_mode=token_truncate`, threshold 2.0 | `--importance-correction tis` | the weight \
    multiplies the KL term too; here it does not | megatron/trainers/grpo_trainer.py:1415
ms-swift | `token_mask` | `--importance-correction icepop`, low 0, high 2 | as above | \
    megatron/trainers/grpo_trainer.py:1419
ms-swift | `sequence_truncate` | `tis` at level `sequence_mean`, high 2 | the geometric mean, and not TRL's product | \
    megatron/trainers/grpo_trainer.py:1423
ms-swift | `sequence_mask` | `--importance-correction mask --importance-correction-level sequence_mean`, low 0, high 2 | \
    kept tokens keep their own ratio without a bound | megatron/trainers/grpo_trainer.py:1431
ms-swift | `off_policy_sequence_mask_delta=d` | `--off-policy-sequence-delta d` | the sample leaves the mask: its KL term \
    and the denominators of the micro-batch go too | megatron/trainers/grpo_trainer.py:1129
prime-rl | its default loss | none | its ratio is to the sampler and has no correction | trainer/rl/loss.py:109
"""
KL = """\
verl | `kl_loss_type=low_var_kl`, its default, or `k3` | `--kl-estimator k3` | the value is clamped at 10, and the \
    gradient is 0 there | trainer/ppo/core_algos.py:2238
verl | `k1`, `k2` | `k1`, `k2` | `abs` has no equal here | trainer/ppo/core_algos.py:2227
verl | `k3+` | `k3+` | | trainer/ppo/core_algos.py:2187
TRL | `beta` | `k3` | | trainer/grpo_trainer.py:3071
TRL | `use_bias_correction_kl` | `unbiased` | with `importance_sampling_level=sequence` it multiplies by the ratio of the \
    sample, here by that of the token | trainer/grpo_trainer.py:3075
NeMo-RL | `reference_policy_kl_type=k3`, its default | `k3+` | it multiplies by exp(x - constant x), so value k3 and \
    gradient k2; clamped at 20 and 10 | algorithms/loss/loss_functions.py:488
NeMo-RL | `k1` | `k2` | the same expected gradient on-policy; the value is k1 | algorithms/loss/loss_functions.py:488
NeMo-RL | `k2` | none | value k2, gradient d + d^2 / 2 | algorithms/loss/loss_functions.py:488
NeMo-RL | `use_on_policy_kl_approximation` with `k3` | `unbiased` | its ratio is to the sampler's log-probabilities, here \
    to the old ones | algorithms/loss/loss_functions.py:484
SkyRL | `kl_estimator_type=k1`, `k2`, `k3`; default k3 | the same name | k3 clamped at 10; `abs` has no equal here | \
    backends/skyrl_train/utils/ppo_utils.py:88
ROLL | `use_kl_loss` | `k3` | a token that a filter rejects has no KL term | pipeline/rlvr/actor_pg_worker.py:118
AReaL | `kl_estimator=k1`, `k2`, `k3`; default k1 | none | it is part of the reward | api/cli_args.py:1772
OpenRLHF | `--algo.kl.estimator` `k1`, `k2`, `k3` | the same name | the value is clamped at 10, and the gradient is 0 \
    there | models/utils.py:64
miles, slime | `--kl-loss-type`, default k1; low_var_kl is k3 | the same name | low_var_kl is clamped at 10, and the \
    gradient is 0 there; k1 in the loss has the expected gradient 0 | slime utils/ppo_utils.py:12; miles \
    training_utils/loss_hub/math_utils.py:139
miles, slime | `--use-unbiased-kl` with k3 | `unbiased` | with k1 or k2 it multiplies these, which has no equal here | \
    slime backends/megatron_utils/loss.py:1120; miles training_utils/loss_hub/losses.py:318
ms-swift | `beta` | `k3` | clamped at 20 and 10; multiplied by the weight of its correction | \
    megatron/trainers/grpo_trainer.py:1013
prime-rl | `kl_tau` | none | a penalty on the log-ratio to the sampler, and not a KL to a reference | \
    trainer/rl/loss.py:145
"""


def rows(text: str) -> list[Row]:
    lines = (" ".join(line.split()) for line in text.splitlines())  # a line of the source that goes on is indented
    return [Row(*(cell.strip() for cell in line.split("|"))) for line in lines]


def table(text: str) -> list[str]:
    """The lines of the page."""
    lines = ["| elsewhere | here | what differs | read at |", "|---|---|---|---|"]
    for row in rows(text):
        cells = (f"{row.framework} {row.setting}", row.here, row.differs, row.place)
        lines.append(f"| {' | '.join(cells)} |".replace("|  |", "| |"))
    return lines
