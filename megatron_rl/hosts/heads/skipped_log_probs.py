"""Leaves out the forward of miles and slime that measures old log-probabilities: --skip-old-log-probs.

    own                                                    with ours around it
    compute_log_prob(..., store_prefix="")                 no forward; refuses a rollout of several optimiser steps
    compute_log_prob(..., store_prefix="ref_")             as it is, of any policy that is not the one in training
    compute_advantages_and_returns(args, rollout_data)     gets NaN in the place of the old log-probabilities, and leaves none

The hosts take the lengths of advantages from the old log-probabilities, and with the settings that checks.py leaves nothing else.
What reads one all the same makes an advantage NaN, which our loss refuses. custom_loss then takes the step's own log-probabilities.
"""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_rl.errors import ConfigError, DataError
from megatron_rl.hosts.args import ADVANTAGES, FORWARD, Host
from megatron_rl.hosts.batch import is_absent
from megatron_rl.hosts.host_run import RUNS
from megatron_rl.layout.context_parallel import response_spans
from megatron_rl.layout.groups import resolve_groups

KEY = "log_probs"


def leave_out_forward(host: Host) -> None:
    """From now on each run of this host that asks for it has no such forward. A second call changes nothing."""
    FORWARD.put_around(host.training_package, _without_forward)
    ADVANTAGES.put_around(host.training_package, _without_old_log_probs)


def _without_forward(own: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(own)

    def compute_log_prob(*positional: Any, **named: Any) -> Any:
        given = signature.bind(*positional, **named)
        given.apply_defaults()
        if given.arguments["store_prefix"] or not RUNS.of(given.arguments["self"].args).skips_old_log_probs:
            return own(*positional, **named)
        num_steps = len(given.arguments["num_microbatches"])
        if num_steps != 1:
            raise ConfigError(
                f"--skip-old-log-probs: this rollout is {num_steps} optimiser steps, and from the second on the policy in training "
                "is not the old one; make a rollout one step (--num-steps-per-rollout 1), or remove --skip-old-log-probs"
            )
        return {}

    return compute_log_prob


def _without_old_log_probs(own: Callable[..., Any]) -> Callable[..., Any]:
    def compute_advantages_and_returns(args: Namespace, rollout_data: dict[str, Any]) -> Any:
        if not RUNS.of(args).skips_old_log_probs:
            return own(args, rollout_data)
        if not is_absent(rollout_data.get(KEY)):
            raise DataError(
                "--skip-old-log-probs: the rollout brings log_probs of its own, which would be ignored; remove --skip-old-log-probs"
            )
        if is_absent(rollout_data.get("values")) and _is_last_stage():
            rollout_data[KEY] = unknown_log_probs(rollout_data)
        try:
            return own(args, rollout_data)
        finally:
            rollout_data.pop(KEY, None)

    return compute_advantages_and_returns


def _is_last_stage() -> bool:
    pp = resolve_groups().pp
    return pp.rank() == pp.size() - 1


def unknown_log_probs(
    rollout_data: dict[str, Any],
) -> list[Tensor]:  # of each sample [response tokens of this context-parallel rank] float32, NaN
    cp, masks = resolve_groups().cp, rollout_data["loss_masks"]
    padded = rollout_data.get("max_seq_lens") or [None] * len(masks)
    sizes = zip(rollout_data["total_lengths"], rollout_data["response_lengths"], padded, strict=True)
    numbers = [
        sum(max(end - start, 0) for start, end in response_spans(total, response, cp.rank(), cp.size(), padded_to=longest))
        for total, response, longest in sizes
    ]
    return [torch.full((number,), torch.nan, device=mask.device) for number, mask in zip(numbers, masks, strict=True)]
