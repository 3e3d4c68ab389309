"""Megatron-Core's fused cross-entropies as the benchmark calls them; no loss of ours is computed with them."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from torch import Tensor


def fused_cross_entropy_log_probs() -> Callable[..., Tensor]:
    """(logits [T, V_tp], labels [T], tp_group) -> log_probs [T]. May overwrite the logits. ImportError without Megatron-Core.

    Communication: two all-reduces over tp_group in forward (maximum; target logit and sum of exponentials), none in backward.
    """
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

    takes_group = "tp_group" in inspect.signature(fused_vocab_parallel_cross_entropy).parameters

    def log_probs(logits: Tensor, labels: Tensor, tp_group) -> Tensor:
        # Its layout is [sequence, batch, vocabulary].
        arguments = (logits[:, None], labels[:, None], *((tp_group,) if takes_group else ()))
        return -fused_vocab_parallel_cross_entropy(*arguments)[:, 0]

    return log_probs


def fused_linear_cross_entropy_log_probs() -> Callable[..., Tensor]:
    """(hidden [T, H], weight [V, H], labels [T]) -> log_probs [T]. ImportError without Megatron-Core, or with one that has none.

    Communication: none, there is one rank.
    """
    from megatron.core.fusions.fused_linear_cross_entropy import linear_cross_entropy

    return lambda hidden, weight, labels: -linear_cross_entropy(hidden, weight, labels, reduction="none")
