"""miles: what is different from slime, and its launch line for the commands."""

from __future__ import annotations

from functools import partial

from megatron_rl.errors import DataError
from megatron_rl.hosts.args import Host, HostLaunch
from megatron_rl.hosts.flags import parsed_line
from megatron_rl.hosts.kept_ids import KeptIds
from megatron_rl.hosts.training_hooks import said_of
from megatron_rl.validation import flag_of

TITLE = "miles"
CORRECTIONS = "miles.backends.training_utils.loss_hub.corrections"


def rollout_key(position: int, index: int | None) -> int:
    if index is None:
        raise DataError(
            f"sample {position} has neither rollout_id nor index: miles would count all such samples as one rollout; set one of "
            "them where the rollout function makes its samples"
        )
    return index


def reason_for_split_by_samples(launch: HostLaunch, is_multimodal: bool) -> str | None:
    """miles schedules steps by rollout only where its training side has said how it is laid out and samples are plain text."""
    for name in ("delay_split_train_data_by_dp", "indep_dp"):
        if launch[name]:
            return flag_of(name)
    return "samples with multimodal_train_inputs" if is_multimodal else None


HOST = Host(
    name="miles",
    training_package="miles.backends.megatron_utils",
    parser_module="miles.utils.arguments",
    rollout_functions=(
        "miles.rollout.fully_async_rollout.FullyAsyncRolloutFn",
        "miles.rollout.inference_rollout.inference_rollout_common.InferenceRolloutFn",
        "miles.rollout.multi_lora.async_rollout.generate_rollout_multi_lora",
        "miles.rollout.sglang_rollout.generate_rollout",
    ),
    correction_functions={f"{CORRECTIONS}.vanilla_tis_function": "tis", f"{CORRECTIONS}.icepop_function": "icepop"},
    kept=KeptIds(
        ids="rollout_sampling_mask_ids",
        offsets="rollout_sampling_mask_offsets",
        filters=("rollout_top_p", "rollout_top_k"),
        adds_token=False,
        has_reference=False,
    ),
    marks=("observe_training_entropy", "allow_partial_train_step"),  # slime had true_on_policy_mode for some months
    has_ess_ratio=True,
    has_rollout_kl=True,
    compares_trained_with_rollout=False,
    needs_log_probs=True,
    rollout_key=rollout_key,
    reason_for_split_by_samples=reason_for_split_by_samples,
)

compose = partial(parsed_line, HOST.parser_module)
check = said_of
