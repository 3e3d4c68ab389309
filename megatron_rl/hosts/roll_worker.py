"""The worker that ROLL imports by name: `actor_train.worker_cls: megatron_rl.hosts.roll_worker.ActorWorker`."""

from __future__ import annotations

from typing import Any

from roll.distributed.scheduler.decorator import Dispatch, register
from roll.pipeline.rlvr.actor_worker import ActorWorker as RollWorker
from torch import Tensor

from megatron_rl.hosts.choice import value_at
from megatron_rl.hosts.heads.roll import install, models_of, place
from megatron_rl.hosts.model_notes import check_model
from megatron_rl.hosts.roll import CONTRACT, PROBED, RECOMPUTE, TITLE, has_log_probs, read, trains_ours
from megatron_rl.hosts.roll_loss import RollLoss
from megatron_rl.megatron.model import model_config_of


class ActorWorker(RollWorker):
    """ROLL's own worker, with our loss in the place of its loss, or our log-probabilities in the place of its own, or both."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def initialize(self, pipeline_config: Any) -> None:
        """Raises ConfigError for settings that are not honoured, before the model is made, for a ROLL with another contract, and
        for a model whose step would depend on its layout."""
        CONTRACT.check()
        if has_log_probs(self.worker_config):
            install(TITLE, PROBED)
        launch = read(self.worker_config, pipeline_config) if trains_ours(self.worker_config) else None
        super().initialize(pipeline_config)
        for model in models_of(self.strategy)[:1] if launch is not None else ():
            check_model(model_config_of(model))
        if launch is not None and launch.config.fused_lm_head_loss:
            place(self.strategy)
        is_on_policy = not value_at(pipeline_config, RECOMPUTE)
        self.loss = None if launch is None else RollLoss(launch, self.strategy, is_on_policy=is_on_policy)

    def loss_func(self, data: Any, output_tensor: Tensor) -> tuple[Tensor, dict[str, float]]:
        if self.loss is None:
            return super().loss_func(data, output_tensor)
        return self.loss(data, output_tensor)
