"""The policy-gradient loss layer for Megatron-Core. Its losses need only torch; its import needs no torch, for doctor."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_rl.config import PolicyLossConfig
    from megatron_rl.count import RolloutCounts, StepCounts, StepTotals, count_step
    from megatron_rl.declare import LossValue, Parameter, bounded_exp, register_policy_loss
    from megatron_rl.errors import ConfigError, DataError
    from megatron_rl.layout.sampling_support import SamplingSupport
    from megatron_rl.losses.corrections import Correction, CorrectionSettings, CorrectionValue, register_correction
    from megatron_rl.losses.distillation import DistillationSettings
    from megatron_rl.losses.kl import KLValue, register_kl_estimator
    from megatron_rl.ops.distribution import HeadTeacher, LogitsTeacher, TopKTeacher
    from megatron_rl.ops.linear_log_probs import linear_log_probs
    from megatron_rl.ops.log_probs import vocab_parallel_log_probs
    from megatron_rl.ops.scale import AssumedScale
    from megatron_rl.policy_loss import (
        PolicyLossOutput,
        ValueLossOutput,
        grpo_loss,
        gspo_loss,
        importance_correction,
        linear_grpo_loss,
        linear_gspo_loss,
        linear_policy_loss,
        value_loss,
    )
    from megatron_rl.weights import register_loss_aggregation, regularizer_weights, sample_token_weights

__version__ = "0.4.0"

__all__ = [
    "AssumedScale",
    "ConfigError",
    "Correction",
    "CorrectionSettings",
    "CorrectionValue",
    "DataError",
    "DistillationSettings",
    "HeadTeacher",
    "KLValue",
    "LogitsTeacher",
    "LossValue",
    "Parameter",
    "PolicyLossConfig",
    "PolicyLossOutput",
    "RolloutCounts",
    "SamplingSupport",
    "StepCounts",
    "StepTotals",
    "TopKTeacher",
    "ValueLossOutput",
    "bounded_exp",
    "count_step",
    "grpo_loss",
    "gspo_loss",
    "importance_correction",
    "linear_grpo_loss",
    "linear_gspo_loss",
    "linear_log_probs",
    "linear_policy_loss",
    "register_correction",
    "register_kl_estimator",
    "register_loss_aggregation",
    "register_policy_loss",
    "regularizer_weights",
    "sample_token_weights",
    "value_loss",
    "vocab_parallel_log_probs",
]
# What has these names, from the ground up: a module is imported where those before it have not the name that is asked for.
_HOMES = (
    *("errors", "config", "declare", "layout.sampling_support", "count", "ops.scale", "ops.log_probs", "ops.linear_log_probs"),
    *("ops.distribution", "losses.kl", "losses.corrections", "losses.distillation", "weights", "policy_loss"),
)


if not TYPE_CHECKING:  # with it a type checker would accept any name as one of the package

    def __getattr__(name: str):
        """Imports the names of __all__ and the modules at first use. It also accepts `megatron_rl.reducers:function`, because the
        documentation of miles and slime shows the colon. Their loaders split on the last dot and ask for `reducers:function`."""
        module, colon, attribute = name.partition(":")
        if colon:
            return getattr(import_module(f"{__name__}.{module}"), attribute)
        if name in __all__:
            homes = (import_module(f"{__name__}.{home}") for home in _HOMES)
            globals()[name] = next(getattr(home, name) for home in homes if hasattr(home, name))
            return globals()[name]
        if find_spec(f"{__name__}.{name}") is not None:
            return import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
