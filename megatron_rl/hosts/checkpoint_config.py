"""Reads which auxiliary loss of routers the config.json of a Hugging Face checkpoint switches on. Only JSON is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_rl.files.json_values import read_json
from megatron_rl.hosts.base import HostOptions
from megatron_rl.validation import flag_of
from megatron_rl.validation.auxiliary_losses import number

# Mixtral, Qwen, OLMoE and others; DeepSeek and GLM. A bridge copies one of them into moe_aux_loss_coeff.
COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_alpha")


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """coefficients: those that are not 0; a multimodal model has them in its text_config."""

    flag: str
    path: Path
    coefficients: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{', '.join(f'{name}={value:g}' for name, value in self.coefficients.items())} in {self.path}"


def checkpoint_config(options: HostOptions) -> CheckpointConfig | None:
    """The config.json of --hf-checkpoint, else of --ref-load; None where neither folder is here or the file cannot be read."""
    for name in ("hf_checkpoint", "ref_load"):
        path = Path(str(options[name])) / "config.json"
        if options[name] is None or not path.is_file():
            continue
        try:
            content = read_json(path)
        except (OSError, ValueError):
            return None
        return CheckpointConfig(flag_of(name), path, _coefficients(content))
    return None


def _coefficients(content: Any) -> dict[str, float]:
    found: dict[str, float] = {}
    for part in (content, content.get("text_config")) if isinstance(content, Mapping) else ():
        if isinstance(part, Mapping):
            found |= {name: number(part[name]) for name in COEFFICIENTS if number(part.get(name)) > 0}
    return found
