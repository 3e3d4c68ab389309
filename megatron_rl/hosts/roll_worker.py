"""The worker that ROLL imports by name: `actor_train.worker_cls: megatron_rl.hosts.roll_worker.ActorWorker`."""

from __future__ import annotations

from typing import Any

from roll.distributed.scheduler.decorator import Dispatch, register
from roll.pipeline.rlvr.actor_worker import ActorWorker as RollWorker
from torch import Tensor

from megatron_rl.errors import ConfigError
from megatron_rl.hosts.roll import DOOR, check_log_probs, read_settings, settings_of, trains_ours
from megatron_rl.hosts.roll_head import place
from megatron_rl.hosts.roll_log_probs import install
from megatron_rl.hosts.roll_loss import RollLoss
from megatron_rl.hosts.roll_model import with_model
from megatron_rl.hosts.roll_packed import share_one_gradient


class ActorWorker(RollWorker):
    """ROLL's own worker, with our loss in the place of its loss, or our log-probabilities in the place of its own, or both."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def initialize(self, pipeline_config: Any) -> None:
        """Raises ConfigError for settings that are not honoured, before the model is made, for a ROLL with another contract, and
        for a model whose step would depend on its layout."""
        if problems := [*DOOR.contract_problems()]:
            raise ConfigError(problems)
        settings = settings_of(self.worker_config, pipeline_config)
        if check_log_probs(settings):
            install(DOOR.title, DOOR.probed)
        found = read_settings(self.worker_config, pipeline_config) if trains_ours(settings) else None
        super().initialize(pipeline_config)
        if found is not None:
            found = with_model(found, self.strategy)
        share_one_gradient(self.strategy)
        if found is not None and found.config.fused_lm_head_loss:
            place(self.strategy, found.config.max_logits_bytes)
        self.loss = None if found is None else RollLoss(found, self.strategy)

    def loss_func(self, data: Any, output_tensor: Tensor) -> tuple[Tensor, dict[str, float]]:
        if self.loss is None:
            return super().loss_func(data, output_tensor)
        return self.loss(data, output_tensor)
