"""Says how a GPTModel rotates the positions of queries and keys, in one record for all forms, the same in every release.

Megatron-Core takes other arguments in each release, and not all factors of a form. Every release keeps the frequencies in
`inv_freq`, so they are computed here and put there. A factor on the rotated queries and keys is a factor of the softmax.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatron_rl.errors import ConfigError

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Llama3:
    """Dubey et al., "The Llama 3 Herd of Models", arXiv:2407.21783. A frequency that turns less than low_freq_factor times within
    original_length is divided by factor, one with more than high_freq_factor turns is kept, and between them both are mixed."""

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192

    def scaled(self, frequencies: Tensor) -> Tensor:
        turns = self.original_length * frequencies / (2 * math.pi)
        kept = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return (1 - kept) * frequencies / self.factor + kept * frequencies


@dataclass(frozen=True, kw_only=True, slots=True)
class Yarn:
    """Peng et al., "YaRN", arXiv:2309.00071. factor, above 1: of the context over original_length, which the model was trained on
    before. beta_fast, beta_slow: turns within original_length above which a frequency is kept, and below which it is divided by
    factor; the bounds between them are not rounded. Queries and keys are multiplied by 0.1 ln(factor) + 1."""

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    def scaled(self, frequencies: Tensor, base: float) -> Tensor:
        half = frequencies.numel()

        def place(turns: float) -> float:  # of the frequency that turns so often
            return half * math.log(self.original_length / (turns * 2 * math.pi)) / math.log(base)

        first, last = max(place(self.beta_fast), 0), min(place(self.beta_slow), 2 * half - 1)
        divided = ((torch.arange(half, device=frequencies.device) - first) / (last - first or 1e-3)).clamp(0, 1)
        return (1 - divided) * frequencies + divided * frequencies / self.factor


@dataclass(frozen=True, kw_only=True, slots=True)
class Rotary:
    """Rotary positions of whole heads, plain or scaled in one form. With multi-latent attention they are in the config."""

    base: float = 10000
    llama3: Llama3 | None = None
    yarn: Yarn | None = None

    def model_options(self, config: TransformerConfig) -> dict[str, Any]:
        """Keywords of GPTModel. YaRN's factor of queries and keys becomes softmax_scale of config.

        Raises ConfigError for what the model would leave out, or compute in another way, without an error.
        """
        if self.llama3 is not None and self.yarn is not None:
            raise ConfigError("rotary has llama3 and yarn: positions are scaled in one form; leave one out")
        if config.multi_latent_attention and self != Rotary():
            raise ConfigError(f"rotary={self} with multi_latent_attention: the config has its positions and wins; leave rotary out")
        if self.yarn is not None:
            scale = (0.1 * math.log(self.yarn.factor) + 1.0) ** 2 / math.sqrt(config.kv_channels)
            if (given := vars(config)["softmax_scale"]) not in (None, scale):
                raise ConfigError(f"softmax_scale={given} with rotary.yarn, which makes it {scale}: leave it out")
            config.softmax_scale = scale
        return {"position_embedding_type": "rope", "rotary_base": self.base}

    def put_into(self, model: nn.Module) -> None:
        """Sets the frequencies of each rotary embedding of the model, where they are scaled."""
        from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

        if self.llama3 is None and self.yarn is None:
            return
        for module in model.modules():
            if isinstance(module, RotaryEmbedding):
                own: Any = module.inv_freq
                module.inv_freq = self._frequencies(2 * own.numel()).to(own)

    def _frequencies(self, num_rotated: int) -> Tensor:  # [num_rotated / 2] float32, radians a position
        frequencies = 1.0 / self.base ** (torch.arange(0, num_rotated, 2, dtype=torch.float32) / num_rotated)
        if self.llama3 is not None:
            return self.llama3.scaled(frequencies)
        return frequencies if self.yarn is None else self.yarn.scaled(frequencies, self.base)
