"""The Megatron workers under `++loss_fn.megatron_rl_log_probs=megatron_rl`: NeMo-RL's own, with our log-probabilities."""

from __future__ import annotations

from typing import Any

import ray
from nemo_rl.models.policy.utils import get_runtime_env_for_policy_worker
from nemo_rl.models.policy.workers.megatron_policy_worker import MegatronPolicyWorkerImpl

from megatron_rl.hosts.heads.nemo_rl import FUSED_HEAD, install
from megatron_rl.hosts.heads.placed_rows import place_rows
from megatron_rl.hosts.nemo_rl import PROBED, TITLE

install(TITLE, PROBED)


@ray.remote(runtime_env=get_runtime_env_for_policy_worker("megatron_policy_worker"))
class MegatronPolicyWorker(MegatronPolicyWorkerImpl):
    """NeMo-RL's own. Ray makes no subclass of a remote class, so NeMo-RL has the class without its decorator."""


@ray.remote(runtime_env=get_runtime_env_for_policy_worker("megatron_policy_worker"))
class MegatronPolicyWorkerWithHead(MegatronPolicyWorkerImpl):
    """The same, whose output layer gives hidden states to our log-probabilities. In its config NeMo-RL's fused head is off."""

    def __init__(self, *given: Any, **named: Any):
        super().__init__(*given, **named)
        place_rows([self.model], f"{FUSED_HEAD}=true")
