"""The Megatron worker under `++loss_fn.megatron_rl_log_probs=megatron_rl`: NeMo-RL's own, with our log-probabilities."""

from __future__ import annotations

import ray
from nemo_rl.models.policy.utils import get_runtime_env_for_policy_worker
from nemo_rl.models.policy.workers.megatron_policy_worker import MegatronPolicyWorkerImpl

from megatron_rl.hosts.nemo_rl_log_probs import install

install()


@ray.remote(runtime_env=get_runtime_env_for_policy_worker("megatron_policy_worker"))
class MegatronPolicyWorker(MegatronPolicyWorkerImpl):
    """NeMo-RL's own. Ray makes no subclass of a remote class, so NeMo-RL has the class without its decorator."""
