"""Old and reference log-probabilities of miles and slime from hidden states: get_log_probs_and_entropy of a proxy."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_rl.config import LaunchMethod
from megatron_rl.errors import ConfigError
from megatron_rl.hosts.batch import read_host_responses
from megatron_rl.hosts.heads.hidden_states_proxy import HiddenStatesProxy, inputs_of
from megatron_rl.hosts.host_run import RUNS
from megatron_rl.hosts.loss import kept_of, read_plan
from megatron_rl.layout.groups import resolve_group
from megatron_rl.megatron.head import rows_of
from megatron_rl.ops.linear_log_probs import LinearKeywords, linear_log_probs

# Arguments of the hosts that are read here, or that say nothing where there is no gradient.
KNOWN = ("max_seq_lens", "non_loss_data", "entropy_requires_grad")


@torch.no_grad()
def proxy_log_probs(
    logits: HiddenStatesProxy,  # [1, T, V_tp] (thd) or [N, S, V_tp] (bshd)
    *,
    args: Namespace,
    unconcat_tokens: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    with_entropy: bool = False,
    **others: Any,
) -> dict[str, list[Tensor]]:  # "log_probs", "entropy" -> of each sample the numbers of this context-parallel rank, float32
    """What the host computes from logits over its temperature, for the response tokens.

    At most --max-logits-bytes of logits exist at a time, and none for a token of a prompt. They are over the kept ids that the host
    passes under --sampling-support replay; where it passes none, over the whole vocabulary.
    Communication: as ops.linear_log_probs over tp; --allgather-cp one all-reduce of [response tokens] over cp for each name.
    Raises: ConfigError for an argument that is not known here; DataError for lengths that do not fit the rows.
    """
    launch = RUNS.of(args).judged(LaunchMethod.CUSTOM_LOSS, args, read_plan)
    kept = kept_of(launch)
    kept_names = () if kept is None else kept.arguments
    known = (*KNOWN, *kept_names)
    if unknown := [f"{name}={value!r}"[:200] for name, value in others.items() if name not in known and value is not None]:
        raise ConfigError(
            f"--fused-lm-head-loss: the host measures log-probabilities with {', '.join(unknown)}, which our head does not know; "
            "remove --fused-lm-head-loss, or the host's setting"
        )
    config, cp_group, tp_group = launch.config, resolve_group(None, "cp"), resolve_group(None, "tp")
    batch = {
        "unconcat_tokens": list(unconcat_tokens),
        "total_lengths": list(total_lengths),
        "response_lengths": list(response_lengths),
        "max_seq_lens": others.get("max_seq_lens"),
    }
    is_padded, is_contiguous = launch.is_padded, launch.is_contiguous(cp_group)
    responses = read_host_responses(batch, logits, cp_group, is_padded=is_padded, is_contiguous=is_contiguous)
    inputs = inputs_of(logits)
    hidden, is_sequence_parallel = rows_of(inputs, tp_group)
    options: LinearKeywords = {
        "loss_mask": responses.is_response,
        "temperature": config.policy_temperature,
        "tp_group": tp_group,
        "backend": config.policy_loss_backend,
        "max_logits_bytes": config.max_logits_bytes,
        "sequence_parallel": is_sequence_parallel,
        "fp32_logits": config.fp32_lm_head,
    }
    if kept is not None and kept_names and others.get(kept_names[0]) is not None:
        sets = {kept.ids: others[kept_names[0]], kept.offsets: others.get(kept_names[1])}
        options["sampling_support"] = responses.kept_sets(sets, kept)
    found = {}
    if with_entropy:
        found["log_probs"], found["entropy"] = linear_log_probs(
            hidden, inputs.weight, responses.labels, with_entropy=True, **options
        )
    else:
        found["log_probs"] = linear_log_probs(hidden, inputs.weight, responses.labels, **options)
    return {name: responses.lists_of(values, cp_group) for name, values in found.items()}
