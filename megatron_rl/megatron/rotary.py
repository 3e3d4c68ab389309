"""Says how a GPTModel rotates the positions of queries and keys, in one record for all forms that Megatron-Core has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_rl.errors import ConfigError

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Yarn:
    """Peng et al., "YaRN", arXiv:2309.00071. factor: of the context over original_length, which the model was trained on before.
    beta_fast, beta_slow: turns within original_length above which a frequency is kept, and below which it is divided by factor.
    mscale, mscale_all_dim: None: the queries and keys are multiplied by 0.1 ln(factor) + 1."""

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    rounds_range: bool = True  # the bounds between the frequencies, to whole numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class Rotary:
    """Rotary positions, of a model without multi-latent attention: that has them in its config.

    percent: the share of each head's dimensions that rotate, from 0 to 1. llama3_factor: of Llama 3's scaling; None: none.
    """

    base: float = 10000
    percent: float = 1.0
    llama3_factor: float | None = None
    yarn: Yarn | None = None

    def model_options(self, config: TransformerConfig) -> dict[str, Any]:
        """Keywords of GPTModel. YaRN's settings become attributes of config, where Megatron-Core looks for them.

        Raises ConfigError for what the model, Megatron-Core's YaRN or the installed release would leave out without an error.
        """
        problems = [*self._problems(config)]
        if problems:
            raise ConfigError(problems)
        if self.yarn is not None:
            names = {
                "yarn_rotary_scaling_factor": self.yarn.factor,
                "yarn_original_max_position_embeddings": self.yarn.original_length,
                "yarn_beta_fast": self.yarn.beta_fast,
                "yarn_beta_slow": self.yarn.beta_slow,
                "yarn_mscale": self.yarn.mscale,
                "yarn_mscale_all_dim": self.yarn.mscale_all_dim,
                "yarn_correction_range_round_to_int": self.yarn.rounds_range,
            }
            vars(config).update(names)
        return {
            "position_embedding_type": "rope" if self.yarn is None else "yarn",
            "rotary_base": self.base,
            "rotary_percent": self.percent,
            "rope_scaling": self.llama3_factor is not None,
            "rope_scaling_factor": self.llama3_factor or 8.0,
        }

    def _problems(self, config: TransformerConfig) -> list[str]:
        from megatron.core.models.gpt import gpt_model

        problems = []
        if config.multi_latent_attention and self != Rotary():
            problems.append(
                f"rotary={self} with multi_latent_attention: its rotary positions are in its config; leave rotary out, and set "
                "rope_type, rotary_base and rotary_scaling_factor there"
            )
        if self.yarn is None:
            return problems
        if not hasattr(gpt_model, "YarnRotaryEmbedding"):  # before 0.15
            problems.append("rotary.yarn: the GPTModel of the installed Megatron-Core has no YaRN; install 0.15 or later")
        if self.percent != 1.0 or self.llama3_factor is not None:
            problems.append(
                f"rotary.yarn with percent={self.percent} and llama3_factor={self.llama3_factor}: Megatron-Core's YaRN rotates "
                "whole heads and knows no other scaling; set percent=1.0 and llama3_factor=None"
            )
        return problems
