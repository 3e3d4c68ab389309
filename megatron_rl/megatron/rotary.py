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
    """Peng et al., "YaRN", arXiv:2309.00071. factor: of the context over original_length, which the model was trained on before.
    beta_fast, beta_slow: turns within original_length above which a frequency is kept, and below which it is divided by factor.
    attention_factor: of queries and keys. None: (0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) + 1), or
    0.1 ln(factor) + 1 where one of the two is None."""

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    rounds_range: bool = True  # the bounds between the frequencies, to whole numbers
    attention_factor: float | None = None

    @property
    def factor_of_queries(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor

        def grown(coefficient: float) -> float:
            return 1.0 if self.factor <= 1 else 0.1 * coefficient * math.log(self.factor) + 1.0

        if self.mscale is None or self.mscale_all_dim is None:
            return grown(1.0)
        return grown(self.mscale) / grown(self.mscale_all_dim)

    def scaled(self, frequencies: Tensor, base: float) -> Tensor:
        half = frequencies.numel()

        def place(turns: float) -> float:  # of the frequency that turns so often
            return half * math.log(self.original_length / (turns * 2 * math.pi)) / math.log(base)

        first, last = place(self.beta_fast), place(self.beta_slow)
        if self.rounds_range:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * half - 1)
        divided = ((torch.arange(half, device=frequencies.device) - first) / (last - first or 1e-3)).clamp(0, 1)
        return (1 - divided) * frequencies + divided * frequencies / self.factor


@dataclass(frozen=True, kw_only=True, slots=True)
class Rotary:
    """Rotary positions. With multi-latent attention the base is in the config too, as rotary_base.

    percent: the share of each head's dimensions that rotate, from 0 to 1. Of linear_factor, by which positions are divided, llama3
    and yarn one at most.
    """

    base: float = 10000
    percent: float = 1.0
    linear_factor: float | None = None
    llama3: Llama3 | None = None
    yarn: Yarn | None = None

    @property
    def is_scaled(self) -> bool:
        return any(form is not None for form in (self.linear_factor, self.llama3, self.yarn))

    def frequencies(self, num_rotated: int) -> Tensor:  # [num_rotated / 2] float32, radians a position
        frequencies = 1.0 / self.base ** (torch.arange(0, num_rotated, 2, dtype=torch.float32) / num_rotated)
        if self.linear_factor is not None:
            return frequencies / self.linear_factor
        if self.llama3 is not None:
            return self.llama3.scaled(frequencies)
        return frequencies if self.yarn is None else self.yarn.scaled(frequencies, self.base)

    def model_options(self, config: TransformerConfig) -> dict[str, Any]:
        """Keywords of GPTModel. YaRN's factor of queries and keys becomes softmax_scale of config.

        Raises ConfigError for what the model would leave out, or compute in another way, without an error.
        """
        problems = self._problems(config)
        if problems:
            raise ConfigError(problems)
        if self._softmax_factor != 1:
            config.softmax_scale = self._softmax_scale(config)
        return {"position_embedding_type": "rope", "rotary_base": self.base, "rotary_percent": self.percent}

    def put_into(self, model: nn.Module) -> None:
        """Sets the frequencies of each rotary embedding of the model, where they are scaled."""
        from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

        for module in model.modules() if self.is_scaled else ():
            if isinstance(module, RotaryEmbedding):
                own: Any = module.inv_freq
                module.inv_freq = self.frequencies(2 * own.numel()).to(own)

    @property
    def _softmax_factor(self) -> float:
        return 1.0 if self.yarn is None else self.yarn.factor_of_queries**2

    def _softmax_scale(self, config: TransformerConfig) -> float:
        return self._softmax_factor / math.sqrt(config.kv_channels)

    def _problems(self, config: TransformerConfig) -> list[str]:
        problems, is_latent, settings = [], config.multi_latent_attention, vars(config)
        given = [name for name in ("linear_factor", "llama3", "yarn") if getattr(self, name) is not None]
        if len(given) > 1:
            problems.append(f"rotary has {' and '.join(given)}: positions are scaled in one form; leave the others out")
        if is_latent and self != Rotary() and (settings["rope_type"] != "rope" or settings["rotary_base"] != self.base):
            problems.append(
                f"rotary={self} with multi_latent_attention, rope_type={settings['rope_type']!r} and rotary_base="
                f"{settings['rotary_base']}: the config would win; set rope_type='rope' and rotary_base={self.base} there, or "
                "leave rotary out"
            )
        if is_latent and self.percent != 1.0:
            problems.append(f"rotary.percent={self.percent} with multi_latent_attention: its rotated dimensions are in the config")
        if self._softmax_factor == 1:
            return problems
        if self.percent != 1.0 or is_latent:
            problems.append(
                f"rotary.yarn multiplies rotated dimensions by {self._softmax_factor**0.5:g}, which is not computed where others "
                "of the head stay as they are: set attention_factor=1.0"
            )
        elif (given_scale := settings["softmax_scale"]) not in (None, self._softmax_scale(config)):
            problems.append(
                f"softmax_scale={given_scale} with rotary.yarn, which makes it {self._softmax_scale(config)}: leave it out"
            )
        return problems
