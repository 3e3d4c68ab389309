"""What verl makes by `actor_rollout_ref.actor.policy_loss._target_=megatron_rl.hosts.verl_config.PolicyLoss`."""

from __future__ import annotations

from dataclasses import field, make_dataclass

from verl.workers.config import PolicyLossConfig

from megatron_rl.config import flag_fields
from megatron_rl.hosts.verl import own_names

TEXTS = {one.name for one in flag_fields() if isinstance(one.default, str)}
# verl's own, with a field for each setting of our losses that verl has no name for: those of its `actor` are read there. None: the
# default of ours.
PolicyLoss = make_dataclass(
    "PolicyLoss",
    [(name, str | None if name in TEXTS else float | None, field(default=None)) for name in own_names()],
    bases=(PolicyLossConfig,),
    namespace={"__module__": __name__},  # a worker gets the object pickled
)
