"""The models that ROLL's strategy has built: by ROLL's YAML and by the config of a checkpoint, which no YAML says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from megatron_rl.errors import ConfigError
from megatron_rl.hosts.actor_checks import notes_of_model
from megatron_rl.hosts.door import Found
from megatron_rl.hosts.door_settings import in_words
from megatron_rl.hosts.model_names import model_rows
from megatron_rl.hosts.roll import DOOR, MODEL
from megatron_rl.megatron.model import model_config_of


def models_of(strategy: Any) -> Sequence[nn.Module]:
    """One a virtual pipeline stage. Raises ConfigError for another contract."""
    models: Sequence[nn.Module] | None = getattr(strategy, "models_unwrapped", None)
    if models is None:
        raise ConfigError(f"ROLL's {type(strategy).__name__} has no models_unwrapped, and {DOOR.probed} was probed")
    return models


def with_model(found: Found, strategy: Any) -> Found:
    """What the built model adds is said in the place of what the YAML says. Raises what notes_of_model and models_of raise."""
    notes = [note for model in models_of(strategy)[:1] for note in notes_of_model(MODEL, model_config_of(model))]
    of_yaml = {in_words(row) for row in model_rows(MODEL, found.settings) if row.subject not in MODEL.unjudged}
    return replace(found, warnings=(*(text for text in found.warnings if text not in of_yaml), *notes))
