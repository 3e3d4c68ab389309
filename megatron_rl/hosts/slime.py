"""slime: what is different from miles, and its launch line for the commands."""

from __future__ import annotations

from functools import partial

import torch

from megatron_rl.hosts.args import Host
from megatron_rl.hosts.flags import parsed_line
from megatron_rl.hosts.kept_ids import KeptIds
from megatron_rl.hosts.training_hooks import said_of

TITLE = "slime"
LOSSES = "slime.backends.megatron_utils.loss"

HOST = Host(
    name="slime",
    training_package="slime.backends.megatron_utils",
    parser_module="slime.utils.arguments",
    rollout_functions=("slime.rollout.sglang_rollout.generate_rollout",),
    correction_functions={f"{LOSSES}.vanilla_tis_function": "tis", f"{LOSSES}.icepop_function": "icepop"},
    kept=KeptIds(
        ids="rollout_top_p_token_ids",
        offsets="rollout_top_p_token_offsets",
        filters=("rollout_top_p",),
        adds_token=True,
        has_reference=True,
        arguments=("top_p_token_ids", "top_p_token_offsets"),
    ),
    always_has_entropy=True,
    # Behind an empty tensor, as a loss is.
    measured=lambda found, logits: (torch.empty((0,), device=logits.device), found),
    rollout_key=lambda position, index: ("sample", position),  # a fresh number
)

compose = partial(parsed_line, HOST.parser_module)
check = said_of
